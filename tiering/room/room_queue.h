// Begins that lack room which others have take turns, in the order in which they came.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

namespace ta {

// Who waits for room. Any thread; its lock is held for a moment, while no other one is taken.
class RoomQueue {
  public:
    using Clock = std::chrono::steady_clock;
    // While a begin waits it reads nothing, and others may send its blocks to the disk. One that gives way goes on by itself
    // soon; one that is queued has no room and makes none until it is its turn.
    enum class Waits : uint8_t { kNot, kGivesWay, kQueued };

    // One begin. Used by one thread.
    class Turn {
      public:
        // `set_waiting` is called with what the begin does from then on.
        Turn(RoomQueue& queue, std::function<void(Waits)> set_waiting) : queue_(queue), set_waiting_(std::move(set_waiting)) {}
        ~Turn();
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        // Until it is this one's turn, or `most`. It joins the queue for good with the first call. Calls `pause`, which waits
        // for a moment for what may make room, at least once.
        void wait(Clock::time_point most, const std::function<void()>& pause);
        // Lets one go first that has waited for long: without this it would find a sequence that takes step after step in no
        // plan hardly ever. A few times only, since it may wait for what it cannot have. Before the first wait().
        void give_way();
        // Once it is, it stays so.
        bool is_first() const { return queue_.is_first(this); }

      private:
        friend RoomQueue;
        RoomQueue& queue_;
        const std::function<void(Waits)> set_waiting_;
        // Guarded by the queue's mutex.
        bool queued_ = false;
        Clock::time_point since_;
        int ways_given_ = 0;  // to this one
    };

  private:
    void join(Turn& turn);
    bool is_first(const Turn* turn) const;
    const Turn* take_way();

    mutable std::mutex mutex_;
    std::vector<Turn*> turns_;
};

}  // namespace ta
