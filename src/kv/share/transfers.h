// Sequences, and blocks of published prefixes, that go from one rank of a group to another: docs/internals/sharing.md has the
// protocol. The source offers what the sequence has, or what it has of the blocks that the destination wants to fetch; the
// destination asks for blocks, window by window, checks what comes, and has the sequence or publishes once it has all.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "src/kv/files/block_file.h"
#include "src/kv/pool.h"
#include "src/kv/share/spaces.h"
#include "tiering/share/group.h"
#include "tiering/share/lane.h"

namespace ta::share {

struct TransferProgress {
    ta_move_state state = TA_MOVE_QUEUED;
    uint32_t peer = 0;
    uint64_t tag = 0;
    uint64_t blocks = 0, blocks_moved = 0, blocks_shared = 0, bytes_moved = 0;
    ta_seq seq = 0;
    int64_t length = 0;
    Status status;

    TransferProgress clone() const;
};

class Transfers final : public Group::Service {
  public:
    // `spaces`: for fetches; outlives this.
    explicit Transfers(Group& group, SharedSpaces* spaces = nullptr);
    ~Transfers() override { stop(); }
    // TA_E_LIMIT: no threads.
    Status start();
    // Waits for the blocks that are being read or taken in; the rest is let go. After the group's stop().
    void stop();

    // Tickets, never 0.
    Result<uint64_t> send(std::shared_ptr<Pool> pool, ta_seq seq, uint32_t to, uint64_t tag, bool move);
    Result<uint64_t> receive(std::shared_ptr<Pool> pool, uint32_t from, uint64_t tag);
    // Publishes blocks of other ranks in a namespace that both have joined, under keys [n, 32]: those that are not there yet.
    Result<uint64_t> fetch(std::shared_ptr<Pool> pool, Tenant space, std::span<const uint8_t> keys);
    // When it is finished, or after so many nanoseconds, < 0: no limit. TA_E_STALE.
    Result<TransferProgress> wait(uint64_t ticket, int64_t nanoseconds) const;
    Status cancel(uint64_t ticket);

    bool takes(MessageType type) const override {
        return (type >= MessageType::kOffer && type <= MessageType::kCancelled) || type == MessageType::kFetch;
    }
    Status on_message(const Message& message) override;
    Time on_time(Time now) override;
    void on_end(const Status& why) override;

  private:
    enum class Phase : uint8_t {
        kWaiting,     // for the peer: its answer to the offer, or its offer
        kMoving,      // blocks are on their way
        kLanding,     // the destination makes the sequence, or publishes: nothing stops it any more
        kCancelling,  // until the peer touches nothing any more
        kOver,        // what it holds is let go
    };
    struct Transfer;
    struct Outgoing;
    struct Incoming;
    struct Fetch;
    struct Pull;
    using Ptr = std::shared_ptr<Transfer>;
    struct Offer {
        uint32_t from;
        uint64_t channel;
        std::vector<uint8_t> payload;
    };

    Ptr add(std::shared_ptr<Pool> pool, bool outgoing, uint32_t peer, uint64_t tag);
    Ptr find(uint64_t channel, uint32_t peer) const;
    Ptr find(uint64_t channel, uint32_t peer, bool outgoing) const;
    void touch(Transfer& t);
    void forget(const Ptr& t);
    Lane& lane_of(const Transfer& t);
    using Task = Status (Transfers::*)(Transfer&);
    std::function<void()> guarded(const Ptr& t, Task task);
    void tell(uint32_t to, MessageType type, uint64_t channel, const Ending* ending = nullptr) noexcept;
    void begin_cancel(Transfer& t, Status why);
    void conclude(Transfer& t, Status status) noexcept;
    void publish(Transfer& t) noexcept;

    Status on_fetch(const Message& m);
    Status on_offer(const Message& m);
    Status on_fetched_offer(const Message& m);
    Status on_ready(const Message& m);
    Status on_sent(const Message& m);
    Status on_ask_lease(const Message& m);
    Status on_leased(const Message& m);
    void on_cancel(const Message& m, const Ptr& t, const Ending& ending);
    void match(const Ptr& t, Offer& offer);

    // Tasks of the lanes. A failure cancels the transfer.
    Status offer_published(Transfer& t);
    Status write_window(Transfer& t);
    Status write_host_window(Transfer& t, uint64_t window, std::span<const uint64_t> positions, std::vector<uint64_t>& hashes);
    Status write_gpu_window(Transfer& t, uint64_t window, std::span<const uint64_t> positions, std::vector<uint64_t>& where);
    Status lease(Transfer& t);
    Status next_leg(Transfer& t);
    Status prepare_leg(Transfer& t);
    Status land_leg(Transfer& t);
    Status prepare(Transfer& t);
    Status begin_moving(Transfer& t);
    Status take_in_window(Transfer& t);
    Status read_offer(Transfer& t);
    Status read_sequence(Transfer& t);
    Status no_offer(const Transfer& t) const;
    void share_present(Transfer& t);
    void remember_arrived(const Transfer& t);
    Status ask_for_blocks(Transfer& t);
    Status ask_for_windows(Transfer& t);
    Result<bool> open_window(Transfer& t);
    Status take_in_host_window(Transfer& t);
    Status take_in_gpu_window(Transfer& t);
    Result<Pull> take_room(Transfer& t, std::span<const uint64_t> positions);
    Status take_in_leased(Transfer& t);
    Status pull(Transfer& t, std::span<const uint64_t> positions, std::span<const uint64_t> offsets);
    Result<Pull> start_pull(Transfer& t, std::span<const uint64_t> positions, std::span<uint8_t* const> from);
    Status start_check(Transfer& t, Pull& pull);
    Status finish_pull(Transfer& t, Pull& pull);
    Status land(Transfer& t);
    void let_go(Transfer& t, bool done);

    Group& group_;
    SharedSpaces* const spaces_;
    Lane coming_, leaving_;

    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    uint64_t tickets_, channels_ = 0, windows_ = 0;
    Status ended_;                             // why the group has ended
    std::vector<Ptr> live_;                    // that are not finished
    std::unordered_map<uint64_t, Ptr> known_;  // by ticket
    size_t served_ = 0;                        // of live_, those that other ranks' fetches began
    std::vector<uint64_t> done_;               // of known_, those finished, oldest first
    std::deque<Offer> offers_;                 // that nobody has asked for yet
    uint64_t offered_bytes_ = 0;

    // Blocks that came from other ranks, for those that come again. The lane's of what comes.
    struct Origin {
        uint32_t rank;
        uint64_t pool;
        const Pool* here;
        auto operator<=>(const Origin&) const = default;
    };
    struct ArrivedBlock {
        uint64_t index;
        std::weak_ptr<Block> block;
    };
    using ArrivedBlocks = std::unordered_map<uint64_t, ArrivedBlock>;  // by content id at the origin
    std::map<Origin, ArrivedBlocks> arrived_;
    size_t prune_arrived_at_ = 1024;  // blocks
};

}  // namespace ta::share
