// Admission: which begins wait for room in a pool, in what order, what they reserve, and who holds room that may come free.
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

// A begin that finds no room joins a queue and waits on the pool's signal. The first begin of the queue may always look for room
// again. The others may look beside it until it is due; from then on they make room, and take only bytes that no begin before them
// wants. A begin that has looked in vain looks again only as the first. Thread-safe; the ledger's lock is held for a moment, and no
// other lock is taken meanwhile.
class RoomLedger {
  public:
    // How a begin waits. A begin that waits reads nothing, so others may demote its blocks to the disk.
    enum class Waits : uint8_t {
        kNot,
        kHeld,    // for those before it, at most kHold
        kQueued,  // for its turn; it makes no room meanwhile
    };

    // The first begin of the queue is due this long after its call.
    static constexpr std::chrono::milliseconds kDue{5};
    // A begin that finds the first one due waits for it, this long after its own call at most.
    static constexpr std::chrono::milliseconds kHold{50};
    // This long after its call the first begin holds up nobody any more: it may wait for what it cannot have.
    static constexpr std::chrono::milliseconds kInVain{420};

    // `free_bytes`: of the device tier. `blocks_are_held`: a move or a call holds blocks that it lets go of soon.
    RoomLedger(const RoomSignal& signal, std::function<uint64_t()> free_bytes, std::function<bool()> blocks_are_held)
        : signal_(signal), free_bytes_(std::move(free_bytes)), blocks_are_held_(std::move(blocks_are_held)) {}
    RoomLedger(const RoomLedger&) = delete;
    RoomLedger& operator=(const RoomLedger&) = delete;

    // Plans have taken so many sequences, or given them back.
    void enter_plans(size_t sequences);
    void leave_plans(size_t sequences);

    struct Request {
        uint64_t bytes;    // of new blocks in the device tier
        size_t sequences;  // of its plan, which enter_plans() has counted
        bool others_help;  // blocks that other plans hold could be room for it
        bool may_hold;     // it waits for those who came before, though it may lack nothing
        // Called with what the begin does from then on, while no lock is held.
        std::function<void(Waits)> set_waiting;
    };
    // How a look for room ended.
    struct Look {
        enum class Found : uint8_t {
            kEnd,    // `status` is the begin's: it has its room, or failed for another reason
            kAgain,  // it made room, or blocks came or went: it looks again at once
            kSoon,   // moves, calls or readers give some back by themselves
            kNone,   // only other plans could
        };
        Found found;
        Status status;
        Deadline until = {};  // until when the begin may wait
    };
    // Looks until a look is the end, nothing can come free any more, or time is up; returns the last look's status. A look with
    // `may_take` false makes room and takes none. `waited` is set if the begin did.
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
    bool must_hold(const Turn& turn) const;
    void hold(const Turn& turn);
    bool may_look(const Turn& turn) const;
    bool await_turn(const Turn& turn, RoomSignal::Watch& watch, Deadline until);
    bool others_hold_room(const Turn& turn) const;

    const RoomSignal& signal_;
    const std::function<uint64_t()> free_bytes_;
    const std::function<bool()> blocks_are_held_;
    mutable std::mutex mutex_;
    std::vector<const Turn*> turns_;  // the queue
    size_t in_plans_ = 0;             // sequences
    size_t queued_ = 0;               // of them, of plans whose begins wait in the queue
};

}  // namespace ta
