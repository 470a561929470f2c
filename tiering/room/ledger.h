// Admission: which begins wait for room in a pool, in what order, how many bytes they want, and whether others have room that
// may come free.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "src/core/status.h"
#include "tiering/store/room_signal.h"

namespace ta {

// A begin that finds no room joins a queue and waits on the pool's signal. The first begin of the queue may look for room again
// at any time. The others may, too, until the first one is due. From then on they make room, but take only bytes that no begin
// before them wants. A begin that only other plans can help looks again only when it is first. Thread-safe; the ledger holds
// its lock for a moment, and takes no other lock meanwhile.
class RoomLedger {
  public:
    // What a begin does. While it waits it reads nothing, so others may demote its blocks to the disk.
    enum class Waits : uint8_t {
        kNot,
        kGivesWay,  // to those before it, at most kGiveWay
        kQueued,    // for its turn; it makes no room meanwhile
    };

    // The first begin of the queue is due this long after its call.
    static constexpr std::chrono::milliseconds kDue{5};
    // A begin that finds the first one due waits for it, until at most this long after its own call.
    static constexpr std::chrono::milliseconds kGiveWay{50};
    // So long after its call the first begin stops delaying others: it may wait for room that never comes.
    static constexpr std::chrono::milliseconds kInVain{420};

    // `free_bytes`: of the device tier. `blocks_are_held`: a move or a call keeps blocks in place for a while.
    RoomLedger(const RoomSignal& signal, std::function<uint64_t()> free_bytes, std::function<bool()> blocks_are_held)
        : signal_(signal), free_bytes_(std::move(free_bytes)), blocks_are_held_(std::move(blocks_are_held)) {}
    RoomLedger(const RoomLedger&) = delete;
    RoomLedger& operator=(const RoomLedger&) = delete;

    // Counts sequences that plans have taken, or given back.
    void enter_plans(size_t sequences);
    void leave_plans(size_t sequences);

    struct Request {
        uint64_t bytes;     // of new blocks in the device tier
        size_t sequences;   // of its plan, which enter_plans() has counted
        bool others_help;   // evicting or dropping blocks of other plans could give it room
        bool may_give_way;  // it waits for earlier begins even if it lacks nothing
        // Called when the begin changes what it does; no lock is held.
        std::function<void(Waits)> set_waiting;
    };
    // How a look for room ended.
    struct Look {
        enum class Found : uint8_t {
            kEnd,    // `status` is the begin's: it has its room, or failed for another reason
            kAgain,  // it made room, or blocks came or went: it looks again at once
            kSoon,   // moves, calls or readers will give room back by themselves
            kNone,   // only other plans could give room
        };
        Found found;
        Status status;
        Deadline until = {};  // the begin waits until then at most
    };
    // Looks until a look ends the begin, or no more room can come free, or time is up. Returns the last look's status. If
    // `may_take` is false, the look makes room and takes none. Sets `waited` if the begin waited.
    Status admit(const Request& request, const std::function<Look(bool may_take)>& look, bool& waited);

  private:
    struct Turn {
        const Request& request;
        Deadline came;
        std::atomic<bool> in_vain = false;  // it has looked, and only other plans could give it room
    };
    class Place;
    class Waiting;
    bool is_first(const Turn& turn) const;
    uint64_t wanted_until(const Turn& turn) const;
    bool is_first_due() const;
    bool must_give_way(const Turn& turn) const;
    void give_way(const Turn& turn);
    bool may_look(const Turn& turn) const;
    bool await_turn(const Turn& turn, RoomSignal::Watch& watch, Deadline until);
    bool others_have_room(const Turn& turn) const;

    const RoomSignal& signal_;
    const std::function<uint64_t()> free_bytes_;
    const std::function<bool()> blocks_are_held_;
    mutable std::mutex mutex_;
    std::vector<const Turn*> turns_;  // the queue
    size_t in_plans_ = 0;             // sequences
    size_t queued_ = 0;               // those of plans whose begins wait in the queue
};

}  // namespace ta
