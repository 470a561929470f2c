// The condition on which everybody waits who needs room in a tier. Whoever frees bytes or releases blocks signals it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace ta {

// When a step's wait ends. Moves that others make for it wait no longer, except for a moment.
using Deadline = std::chrono::steady_clock::time_point;
inline constexpr Deadline kNoDeadline = Deadline::max();

// The steady clock, or a clock of a test.
class RoomClock {
  public:
    virtual ~RoomClock() = default;
    virtual Deadline now() const { return std::chrono::steady_clock::now(); }
    // Waits until the condition is notified or the time has come; may return earlier.
    virtual void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Deadline until) const;
    static const RoomClock& steady();
};

// Thread-safe. A signal costs one atomic load while nobody watches.
class RoomSignal {
  public:
    explicit RoomSignal(const RoomClock& clock = RoomClock::steady()) : clock_(clock) {}
    RoomSignal(const RoomSignal&) = delete;
    RoomSignal& operator=(const RoomSignal&) = delete;

    Deadline now() const { return clock_.now(); }
    void notify() const;

    // Sees what other threads signal after its creation. Signals of its own thread do not count: a failing look for room frees
    // what it took. Make the watch before looking for room, so that no signal is missed meanwhile.
    class Watch {
      public:
        explicit Watch(const RoomSignal& signal);
        ~Watch();
        Watch(const Watch&) = delete;
        Watch& operator=(const Watch&) = delete;
        // True if something was signalled since the watch was made, or since wait() last returned true.
        bool signalled() const;
        // Waits until that is so. False: the time has come, whatever was signalled.
        bool wait(Deadline until);

      private:
        friend RoomSignal;
        const RoomSignal& signal_;
        const std::thread::id thread_ = std::this_thread::get_id();
        bool signalled_ = false;  // guarded by the signal's mutex
    };

    // Signals at the end of a scope, after the objects declared later are destroyed.
    class AtEnd {
      public:
        explicit AtEnd(const RoomSignal& signal) : signal_(signal) {}
        ~AtEnd() { signal_.notify(); }
        AtEnd(const AtEnd&) = delete;
        AtEnd& operator=(const AtEnd&) = delete;

      private:
        const RoomSignal& signal_;
    };

  private:
    const RoomClock& clock_;
    mutable std::atomic<size_t> watching_{0};
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    mutable std::vector<Watch*> watches_;
};

}  // namespace ta
