#include "tiering/store/room_signal.h"

namespace ta {

void RoomClock::wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Deadline until) const {
    if (until == kNoDeadline) return condition.wait(lock);
    condition.wait_until(lock, until);
}

const RoomClock& RoomClock::steady() {
    static const RoomClock clock;
    return clock;
}

// NOTES: sequentially consistent, like the count in Watch(): either this call sees the watch, or the watch's owner sees what
// was freed before this call.
void RoomSignal::notify() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (watching_.load(std::memory_order_seq_cst) == 0) return;
    const std::thread::id here = std::this_thread::get_id();
    bool some = false;
    {
        std::lock_guard lock(mutex_);
        for (Watch* w : watches_) {
            if (w->thread_ == here || w->signalled_) continue;  // it knows already
            w->signalled_ = some = true;
        }
    }
    if (some) changed_.notify_all();
}

RoomSignal::Watch::Watch(const RoomSignal& signal) : signal_(signal) {
    std::lock_guard lock(signal_.mutex_);
    signal_.watches_.push_back(this);
    signal_.watching_.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

RoomSignal::Watch::~Watch() {
    std::lock_guard lock(signal_.mutex_);
    std::erase(signal_.watches_, this);
    signal_.watching_.fetch_sub(1, std::memory_order_seq_cst);
}

bool RoomSignal::Watch::signalled() const {
    std::lock_guard lock(signal_.mutex_);
    return signalled_;
}

bool RoomSignal::Watch::wait(Deadline until) {
    std::unique_lock lock(signal_.mutex_);
    while (signal_.clock_.now() < until) {
        if (std::exchange(signalled_, false)) return true;
        signal_.clock_.wait(signal_.changed_, lock, until);
    }
    return false;
}

}  // namespace ta
