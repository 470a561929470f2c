// How long a call that found no room goes on looking.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace ta {

// For what ends soon if it ends at all.
inline constexpr std::chrono::milliseconds kBriefly{200};

// Who finds no room while others move blocks looks again: for as long as the pool's steps wait, and a few times at least, unless
// each of them takes long.
class RoomRetry {
  public:
    explicit RoomRetry(std::chrono::milliseconds patience) : end_(std::chrono::steady_clock::now() + patience) {}
    // After a pause. False: that was it.
    bool again() {
        constexpr int kAtLeast = 8;
        constexpr std::chrono::microseconds kPause{100};
        constexpr std::chrono::seconds kAtMostBeyond{1};
        const auto now = std::chrono::steady_clock::now();
        if (looks_ == 0) first_ = now;
        if ((++looks_ > kAtLeast && now > end_) || now > std::max(first_, end_) + kAtMostBeyond) return false;
        std::this_thread::sleep_for(kPause);
        return true;
    }

  private:
    const std::chrono::steady_clock::time_point end_;
    std::chrono::steady_clock::time_point first_;
    int looks_ = 0;
};

}  // namespace ta
