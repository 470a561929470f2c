// The outcome of a block's prefetches, for the statistics.
#pragma once

#include <atomic>
#include <cstdint>

namespace ta {

// Tickets of prefetches ask for a block. One of them brings it, and a step uses it or it goes unused. Each arrival has one
// outcome: used, late (a step wanted the block before it came), or wasted. Any thread may call.
class PrefetchMark {
  public:
    // A ticket has asked for the block.
    void ask() {
        change([](Word& w) {
            ++w.tickets;
            if (w.state == State::kNone) w.state = State::kAsked;
            return true;
        });
    }
    // A ticket that asked has ended, whatever came of it.
    void end() {
        change([](Word& w) {
            if (--w.tickets == 0 && w.state != State::kArrived) w.state = State::kNone;
            return true;
        });
    }
    // A ticket brings the block. Called before a step can find it in its new place.
    void arrive() {
        change([](Word& w) {
            w.state = w.state == State::kLate ? State::kNone : State::kArrived;
            return true;
        });
    }

    // The state in which a step found the block.
    struct Seen {
        bool asked = false, arrived = false;
        uint16_t outcomes = 0;
    };
    Seen look() const {
        const Word w = word_.load(std::memory_order_relaxed);
        return {w.state == State::kAsked, w.state == State::kArrived, w.outcomes};
    }
    // Counts what a step saw in look(), asked or arrived, as the outcome. By now the block may have come, even by the step
    // itself. False: there was another outcome since then, which counts instead.
    bool settle(const Seen& seen) {
        return change([&](Word& w) {
            if (w.outcomes != seen.outcomes) return false;
            ++w.outcomes;
            w.state = w.state == State::kAsked ? State::kLate : State::kNone;
            return true;
        });
    }
    // The block leaves again, or is destroyed. False: no prefetch brought it, or a step has used it.
    bool waste() {
        return change([](Word& w) {
            if (w.state != State::kArrived) return false;
            ++w.outcomes;
            w.state = State::kNone;
            return true;
        });
    }

  private:
    // kLate: the outcome is counted, and the block is still to come.
    enum class State : uint16_t { kNone, kAsked, kLate, kArrived };
    // Aligned to its size: for less alignment clang calls libatomic.
    struct alignas(8) Word {
        uint32_t tickets = 0;  // that asked and have not ended
        uint16_t outcomes = 0;
        State state = State::kNone;
    };

    template <class Change>
    bool change(Change&& change_word) {
        Word now = word_.load(std::memory_order_relaxed), next;
        do {
            next = now;
            if (!change_word(next)) return false;
        } while (!word_.compare_exchange_weak(now, next));
        return true;
    }

    std::atomic<Word> word_{Word{}};
    static_assert(std::atomic<Word>::is_always_lock_free);
};

}  // namespace ta
