// Transfers of sequences, and of blocks of published prefixes, from one rank of a group to another. docs/internals/sharing.md
// has the protocol. The source offers the blocks of the sequence, or those of the wanted blocks that it has. The destination
// asks for blocks window by window and checks them. When it has all, it makes the sequence, or publishes.
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
    // Ends all transfers. A task that waits for room stops waiting; others run to their end. To be called after the group's
    // stop().
    void stop();

    // Begin a transfer; return a ticket, never 0.
    Result<uint64_t> send(std::shared_ptr<Pool> pool, ta_seq seq, uint32_t to, uint64_t tag, bool move);
    Result<uint64_t> receive(std::shared_ptr<Pool> pool, uint32_t from, uint64_t tag);
    // Fetches blocks of other ranks and publishes them in a namespace that both ranks have joined, under keys [n, 32]. Skips
    // blocks that are here.
    Result<uint64_t> fetch(std::shared_ptr<Pool> pool, Tenant space, std::span<const uint8_t> keys);
    // Waits until the transfer is finished, or so many nanoseconds have passed; < 0: no limit. TA_E_STALE.
    Result<TransferProgress> wait(uint64_t ticket, int64_t nanoseconds) const;
    Status cancel(uint64_t ticket);

    bool takes(MessageType type) const override {
        return (type >= MessageType::kOffer && type <= MessageType::kCancelled) || type == MessageType::kFetch ||
               type == MessageType::kGoesOn;
    }
    Status on_message(const Message& message) override;
    Time on_time(Time now) override;
    void on_end(const Status& why) override;

  private:
    enum class Phase : uint8_t {
        kWaiting,     // for the peer's answer to the offer, or for its offer
        kMoving,      // blocks are on their way
        kLanding,     // the destination makes the sequence, or publishes: nothing stops that any more
        kCancelling,  // until the peer touches nothing of it any more
        kOver,        // its lane releases what it holds
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
    bool begins(uint32_t from, uint64_t channel);
    void touch(Transfer& t);
    void works(Transfer& t) noexcept;
    static bool has_work(const Transfer& t);
    Time deadline_of(const Transfer& t) const;
    void tell_goes_on(Transfer& t) noexcept;
    std::chrono::milliseconds telling_interval() const { return group_.settings().operation / 4; }
    void forget(const Ptr& t);
    Lane& lane_of(const Transfer& t);
    using Task = Status (Transfers::*)(Transfer&);
    std::function<void()> guarded(const Ptr& t, Task task);
    void post(Transfer& t, Lane::Tasks&& tasks) noexcept;
    void tell(uint32_t to, MessageType type, uint64_t channel, const Ending* ending = nullptr) noexcept;
    void begin_cancel(Transfer& t, Status why);
    void conclude(Transfer& t, Status status) noexcept;
    void publish(Transfer& t) noexcept;

    Status on_fetch(const Message& m);
    Status on_arrived(uint32_t from, const Ptr& t);
    Status on_offer(const Message& m);
    Status on_fetched_offer(const Message& m);
    Status on_ready(const Message& m);
    Status on_sent(const Message& m);
    Status on_ask_lease(const Message& m);
    Status on_leased(const Message& m);
    void on_cancel(const Message& m, const Ptr& t, const Ending& ending);
    void match(const Ptr& t, Offer& offer);

    // Tasks of the lanes. A failing task cancels the transfer.
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
    void remember_arrived(const Transfer& t) noexcept;
    Status ask_for_blocks(Transfer& t);
    Status ask_for_windows(Transfer& t);
    Result<bool> open_window(Transfer& t);
    Status take_in_host_window(Transfer& t);
    Status take_in_gpu_window(Transfer& t);
    Result<BlockPtr> take_block(Transfer& t, const StoredBlock& b);
    static Result<std::vector<BlockPtr>> take_free(Transfer& t, std::span<const uint64_t> positions);
    Result<Pull> take_room(Transfer& t, std::span<const uint64_t> positions, std::span<BlockPtr> room);
    Status take_in_leased(Transfer& t);
    Status pull(Transfer& t, std::span<const uint64_t> positions, std::span<const uint64_t> offsets);
    Result<Pull> start_pull(Transfer& t, std::span<const uint64_t> positions, std::span<BlockPtr> room,
                            std::span<uint8_t* const> from);
    Status start_check(Transfer& t, Pull& pull);
    Status finish_pull(Transfer& t, Pull& pull);
    Status land(Transfer& t);
    void let_go(Transfer& t, bool done);

    Group& group_;
    SharedSpaces* const spaces_;
    Lane coming_, leaving_;
    Time worked_[2]{};  // [outgoing]: when each lane last made progress; guarded by mutex_

    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    uint64_t tickets_, channels_ = 0, windows_ = 0;
    std::vector<uint64_t> begun_;              // [ranks]: the last channel on which each rank has begun a transfer
    Status ended_;                             // why the group has ended
    std::vector<Ptr> live_;                    // the unfinished ones
    std::unordered_map<uint64_t, Ptr> known_;  // by ticket
    size_t served_ = 0;                        // transfers in live_ that other ranks' fetches began
    std::vector<uint64_t> done_;               // finished tickets in known_, oldest first
    std::deque<Offer> offers_;                 // no caller has asked for these yet
    uint64_t offered_bytes_ = 0;

    // Blocks that came from other ranks, so that they need not come again. Used by the lane of incoming transfers.
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
    using ArrivedBlocks = std::unordered_map<uint64_t, ArrivedBlock>;  // by content id in the origin's pool
    std::map<Origin, ArrivedBlocks> arrived_;
    size_t prune_arrived_at_ = 1024;  // origins and blocks
};

}  // namespace ta::share
