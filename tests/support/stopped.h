// Calls that are stopped in the middle, at one of their allocations. For programs that failing_memory.cpp is part of.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "support/failing_memory.h"

namespace ta::testing {

inline std::atomic<bool> g_stopped{false}, g_goes_on{false};

// Makes `call` in a thread of its own. Stops that, or another one that works for it, at the allocation after the next n, while
// `beside` runs, and for 20 ms at most. False: there were no more than n.
inline bool stop_at(int64_t n, const std::function<void()>& call, const std::function<void()>& beside) {
    g_stopped = g_goes_on = false;
    call_at_allocation(n, [] {
        g_stopped = true;
        for (int i = 0; i < 20 && !g_goes_on; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    std::atomic<bool> over{false};
    std::thread thread([&] {
        call();
        over = true;
    });
    while (!g_stopped && !over) std::this_thread::yield();
    const bool stopped = g_stopped;
    if (stopped) beside();
    g_goes_on = true;
    thread.join();
    call_at_allocation(0, nullptr);
    return stopped;
}

}  // namespace ta::testing
