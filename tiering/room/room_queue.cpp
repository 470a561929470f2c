#include "tiering/room/room_queue.h"

#include <thread>

namespace ta {

void RoomQueue::join(Turn& turn) {
    std::lock_guard lock(mutex_);
    if (turn.queued_) return;
    turns_.push_back(&turn);
    turn.queued_ = true;
    turn.since_ = Clock::now();
}

bool RoomQueue::is_first(const Turn* turn) const {
    std::lock_guard lock(mutex_);
    return !turns_.empty() && turns_.front() == turn;
}

// The first one, if it has waited for long and was not let go first too often.
const RoomQueue::Turn* RoomQueue::take_way() {
    constexpr std::chrono::milliseconds kLong{20};
    constexpr int kMostWays = 8;
    std::lock_guard lock(mutex_);
    if (turns_.empty()) return nullptr;
    Turn& first = *turns_.front();
    if (Clock::now() - first.since_ < kLong || ++first.ways_given_ > kMostWays) return nullptr;
    return &first;
}

RoomQueue::Turn::~Turn() {
    if (!queued_) return;
    std::lock_guard lock(queue_.mutex_);
    std::erase(queue_.turns_, this);
}

void RoomQueue::Turn::wait(Clock::time_point most, const std::function<void()>& pause) {
    queue_.join(*this);
    set_waiting_(Waits::kQueued);
    do {
        pause();
    } while (Clock::now() < most && !queue_.is_first(this));
    set_waiting_(Waits::kNot);
}

void RoomQueue::Turn::give_way() {
    constexpr std::chrono::milliseconds kWay{50}, kPause{1};
    const auto start = Clock::now();
    const Turn* const first = queue_.take_way();
    if (!first) return;
    set_waiting_(Waits::kGivesWay);
    while (queue_.is_first(first) && Clock::now() - start < kWay) std::this_thread::sleep_for(kPause);
    set_waiting_(Waits::kNot);
}

}  // namespace ta
