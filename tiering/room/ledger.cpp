#include "tiering/room/ledger.h"

#include <algorithm>
#include <optional>

namespace ta {

// A begin's place in the queue.
class RoomLedger::Place {
  public:
    Place(RoomLedger& ledger, const Turn& turn) : ledger_(ledger), turn_(turn) {
        std::lock_guard lock(ledger_.mutex_);
        ledger_.turns_.push_back(&turn_);
    }
    ~Place() {
        {
            std::lock_guard lock(ledger_.mutex_);
            std::erase(ledger_.turns_, &turn_);
        }
        ledger_.signal_.notify();
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

  private:
    RoomLedger& ledger_;
    const Turn& turn_;
};

// A begin that waits, for a scope.
class RoomLedger::Waiting {
  public:
    Waiting(RoomLedger& ledger, const Turn& turn, Waits waits)
        : ledger_(ledger), turn_(turn), queued_(waits == Waits::kQueued ? turn.request.sequences : 0) {
        turn_.request.set_waiting(waits);
        {
            std::lock_guard lock(ledger_.mutex_);
            ledger_.queued_ += queued_;
        }
        ledger_.signal_.notify();  // others may demote its blocks now
    }
    ~Waiting() {
        {
            std::lock_guard lock(ledger_.mutex_);
            ledger_.queued_ -= queued_;
        }
        turn_.request.set_waiting(Waits::kNot);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

  private:
    RoomLedger& ledger_;
    const Turn& turn_;
    const size_t queued_;
};

void RoomLedger::enter_plans(size_t sequences) {
    std::lock_guard lock(mutex_);
    in_plans_ += sequences;
}

void RoomLedger::leave_plans(size_t sequences) {
    {
        std::lock_guard lock(mutex_);
        in_plans_ -= sequences;
    }
    signal_.notify();
}

Status RoomLedger::admit(const Request& request, const std::function<Look(bool may_take)>& look, bool& waited) {
    using Found = Look::Found;
    Turn turn{request, signal_.now()};
    std::optional<Place> place;
    if (request.may_give_way && must_give_way(turn)) {
        place.emplace(*this, turn);
        if (Look made = look(false); made.found == Found::kEnd) return std::move(made.status);
        give_way(turn);
        waited = true;
    }
    Look l = look(true);  // most begins find room at once
    if (l.found == Found::kEnd) return std::move(l.status);
    RoomSignal::Watch watch(signal_);
    if (!place) place.emplace(*this, turn);
    for (;;) {
        waited |= await_turn(turn, watch, l.until);
        const bool held = others_have_room(turn);
        l = look(true);
        if (l.found == Found::kEnd) return std::move(l.status);
        if (l.found == Found::kAgain) continue;
        const bool may_come = l.found == Found::kSoon || held || others_have_room(turn) || watch.signalled();
        if (!may_come || signal_.now() >= l.until) return std::move(l.status);
        waited = true;
        if (l.found == Found::kNone) turn.in_vain = true;
        if (l.found == Found::kSoon && is_first(turn)) {
            watch.wait(l.until);  // the blocks that it has promoted stay where they are
        } else {
            const Waiting waiting(*this, turn, Waits::kQueued);
            watch.wait(l.until);
        }
    }
}

bool RoomLedger::is_first(const Turn& turn) const {
    std::lock_guard lock(mutex_);
    return turns_.front() == &turn;
}

// Bytes that a begin and those before it want. A begin outside the queue counts as last. Under the lock.
uint64_t RoomLedger::wanted_until(const Turn& turn) const {
    uint64_t bytes = turn.request.bytes;
    for (const Turn* t : turns_) {
        if (t == &turn) break;
        bytes += t->request.bytes;
    }
    return bytes;
}

// True if the first begin of the queue has waited long enough that nobody else may take what it wants. Under the lock.
bool RoomLedger::is_first_due() const {
    return !turns_.empty() && signal_.now() - turns_.front()->came >= kDue;
}

// True if a later begin has to wait for the first one. If the first one has looked in vain, even begins that lack nothing wait:
// it may need blocks of their sequences, which in a loop of steps are hardly ever outside a plan.
bool RoomLedger::must_give_way(const Turn& turn) const {
    uint64_t wanted;
    {
        std::lock_guard lock(mutex_);
        if (!is_first_due() || turns_.front() == &turn || signal_.now() - turns_.front()->came >= kInVain) return false;
        if (turns_.front()->in_vain) return true;
        wanted = wanted_until(turn);
    }
    return turn.request.bytes > 0 && free_bytes_() < wanted;
}

void RoomLedger::give_way(const Turn& turn) {
    RoomSignal::Watch watch(signal_);
    const Waiting waiting(*this, turn, Waits::kGivesWay);
    while (must_give_way(turn) && watch.wait(turn.came + kGiveWay)) {
    }
}

// True if a begin in the queue may look for room again.
bool RoomLedger::may_look(const Turn& turn) const {
    uint64_t wanted;
    {
        std::lock_guard lock(mutex_);
        if (turns_.front() == &turn) return true;
        if (turn.in_vain) return false;
        if (!is_first_due()) return true;
        wanted = wanted_until(turn);
    }
    return free_bytes_() >= wanted;
}

// Returns true if it waited.
bool RoomLedger::await_turn(const Turn& turn, RoomSignal::Watch& watch, Deadline until) {
    if (may_look(turn)) return false;
    const Waiting waiting(*this, turn, Waits::kQueued);
    while (!may_look(turn) && watch.wait(until)) {
    }
    return true;
}

// True if room may come from others: from plans when they end, or from calls and moves when they release blocks. Begins queued
// behind the first one do not count for it: they wait for it.
bool RoomLedger::others_have_room(const Turn& turn) const {
    if (!turn.request.others_help) return false;
    if (blocks_are_held_()) return true;
    std::lock_guard lock(mutex_);
    const bool is_first = !turns_.empty() && turns_.front() == &turn;
    return in_plans_ > turn.request.sequences + (is_first ? queued_ : 0);
}

}  // namespace ta
