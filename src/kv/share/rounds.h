// Calls of all ranks in which one, the root, gives the others work in rounds and takes their results in: who is in which call, and how
// far each is. Bytes go by windows. docs/internals/sharing.md has the protocol.
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
    // The message with which a rank begins. `room` may differ from rank to rank.
    struct Begin {
        uint64_t tag;
        uint64_t room;  // bytes that the rank lends for its part
        uint32_t root;
        int32_t device;  // kind of the rank's device
    };
    // A rank's report of its part to another: counts of rounds that only grow.
    struct Progress {
        uint32_t ready = 0;                                  // 1: the other's window is open
        uint32_t given = 0;                                  // by the root: they are in the window
        uint32_t taken = 0;                                  // by the other: their places in the window are free
        uint32_t returned = 0;                               // by the other: their results are in the root's window
        uint32_t received = 0;                               // by the root: these places are free
        uint32_t done = 0;                                   // 1: the root has all results of all ranks
        uint64_t window = 0;                                 // with ready
        uint32_t way = 0;                                    // with ready: how bytes go
        MemoryName memory;                                   // where they go to, if by that
        uint64_t given_hash[2] = {}, returned_hash[2] = {};  // of the last two rounds; 0 where they went from GPU to GPU
    };
    static constexpr uint32_t kSlots = 2;  // rounds that a window holds

    explicit Rounds(Group& group)
        : group_(group), ranks_(group.settings().ranks), rank_(group.settings().rank), peers_(group.settings().ranks) {}
    // After the group's stop().
    void stop();

    // Tells the others that this rank is in a call. TA_E_BUSY: it is in one already.
    Status begin(const Begin& mine);
    // Of the root: until all others have begun the same call. [ranks] what they said. TA_E_MISMATCH, TA_E_TIMEOUT.
    Result<std::vector<Begin>> wait_for_all();
    Status call(uint32_t to, std::span<const uint8_t> what);
    // Of the others: until the root has said what the call is.
    Result<std::vector<uint8_t>> wait_for_call();

    enum class Note : uint32_t { kReady = 1, kGiven, kTaken, kReturned, kReceived, kDone, kGoesOn };
    // Tells a rank that this one is a round further. `value`: the window or the hash.
    Status note(uint32_t to, Note what, uint64_t value = 0, uint32_t way = 0, const MemoryName& memory = {});
    // Waits until that is so of what the peer said, and of what was said to it; with its last word at that time. TA_E_TIMEOUT: the
    // peer said nothing for the group's operation time. Else why the call failed.
    using Condition = std::function<bool(const Progress& there, const Progress& here)>;
    Result<Progress> wait(uint32_t peer, const Condition& condition);
    // The call fails here and at all others that are in it; the first reason stays.
    void give_up(const Status& why) noexcept;
    // This rank is in no call any more.
    void end() noexcept;
    // A window of this rank.
    uint64_t new_window();

    bool takes(MessageType type) const override {
        return type >= MessageType::kRoundsBegin && type <= MessageType::kRoundsNote;
    }
    Status on_message(const Message& message) override;
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status& why) override;

  private:
    struct Peer {
        uint64_t nonce = 0;  // of the call that it began last
        uint64_t used = 0;   // of its last call that is of no use for further ones here
        Begin begin{};
        // Of the call that this rank is in.
        Progress there, here;
        Time heard{};
    };

    void compare(uint32_t rank);
    void fail_call(Status why) noexcept;
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
    bool bound_ = false;  // all ranks are known to be in it: their nonces are in `used`
    bool called_ = false;
    std::vector<uint8_t> call_;
    Status failed_;
};

}  // namespace ta::share
