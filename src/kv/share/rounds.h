// Calls of all ranks in which one, the root, gives work to the others in rounds and takes their results. This tracks who is in
// which call, and how far each rank is. The bytes go through windows. docs/internals/sharing.md has the protocol.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "tiering/share/group.h"

namespace ta::share {

class Rounds final : public Group::Service {
  public:
    // A rank's first message of a call. `room` may differ between ranks.
    struct Begin {
        uint64_t tag;
        uint64_t room;  // bytes that the rank has for its part
        uint32_t root;
        int32_t device;  // kind of the rank's device
    };
    // What a rank has told another of its part. Counts of rounds only grow.
    struct Progress {
        uint32_t ready = 0;                                  // 1: the window for the other rank is open
        uint32_t given = 0;                                  // by the root: rounds that it has written into the window
        uint32_t taken = 0;                                  // by the other: rounds whose place in the window is free again
        uint32_t returned = 0;                               // by the other: rounds whose results are in the root's window
        uint32_t received = 0;                               // by the root: rounds whose results' place is free again
        uint32_t done = 0;                                   // 1: the root has all results of all ranks
        uint64_t window = 0;                                 // with ready
        uint32_t way = 0;                                    // with ready: the way of the bytes
        MemoryName memory;                                   // where the bytes go, if they go through shared memory
        uint64_t given_hash[2] = {}, returned_hash[2] = {};  // of the last two rounds; 0 if the bytes went from GPU to GPU
    };
    static constexpr uint32_t kSlots = 2;  // rounds that a window holds

    explicit Rounds(Group& group)
        : group_(group), ranks_(group.settings().ranks), rank_(group.settings().rank), peers_(group.settings().ranks) {}
    // To be called after the group's stop().
    void stop();

    // Tells the others that this rank is in a call. TA_E_BUSY: it is in one already.
    Status begin(const Begin& mine);
    // Called by the root: waits until all others have begun the same call. Returns their Begins, [ranks]. TA_E_MISMATCH,
    // TA_E_TIMEOUT.
    Result<std::vector<Begin>> wait_for_all();
    Status call(uint32_t to, std::span<const uint8_t> what);
    // Called by the others: waits until the root has said what the call is.
    Result<std::vector<uint8_t>> wait_for_call();

    enum class Note : uint32_t { kReady = 1, kGiven, kTaken, kReturned, kReceived, kDone, kGoesOn };
    // Tells a rank of progress. `value`: the window, or the hash.
    Status note(uint32_t to, Note what, uint64_t value = 0, uint32_t way = 0, const MemoryName& memory = {});
    // Waits until `condition` is true of what the peer has told this rank and what this rank has told the peer. Returns what
    // the peer had told by then. TA_E_TIMEOUT: nothing came from the peer for the group's operation time. Other errors: the
    // call failed.
    using Condition = std::function<bool(const Progress& there, const Progress& here)>;
    Result<Progress> wait(uint32_t peer, const Condition& condition);
    // Fails the call here and on all others that are in it. If it has failed already, the first reason stays.
    void give_up(const Status& why) noexcept;
    // Ends the call of this rank.
    void end() noexcept;
    // Makes a number for a window of this rank.
    uint64_t new_window();

    bool takes(MessageType type) const override {
        return type >= MessageType::kRoundsBegin && type <= MessageType::kRoundsNote;
    }
    Status on_message(const Message& message) override;
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status& why) override;

  private:
    struct Peer {
        uint64_t nonce = 0;  // of the last call that it began
        uint64_t used = 0;   // of its last call that no call here can use any more
        Begin begin{};
        // In the call that this rank is in: what the peer has told, and what it was told.
        Progress there, here;
        Time heard{};
    };

    void compare(uint32_t rank);
    void fail_call(Status why) noexcept;
    void fail_call(Status why, const Ending& told) noexcept;
    Status why_not() const;
    Status take_note(uint32_t from, PayloadReader& payload);

    Group& group_;
    const uint32_t ranks_, rank_;
    std::mutex mutex_;
    std::condition_variable changed_;
    Status ended_;
    std::vector<Peer> peers_;
    uint64_t nonces_ = 0, windows_ = 0;
    uint64_t nonce_ = 0;  // of this rank's call; 0: it is in none
    Begin mine_{};
    bool bound_ = false;  // all ranks are known to be in the call: `used` has their nonces
    bool called_ = false;
    std::vector<uint8_t> call_;
    Status failed_;
};

}  // namespace ta::share
