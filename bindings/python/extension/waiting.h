// Waits that Ctrl-C ends.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

#include "common.h"

// Polls in slices, so that Ctrl-C ends the wait: poll(nanoseconds) says whether what is waited for has come.
template <class Poll>
void wait_for(std::optional<double> seconds, Poll&& poll) {
    using namespace std::chrono;
    const auto start = steady_clock::now();
    const auto limit = seconds ? duration<double>(std::max(*seconds, 0.0)) : duration<double>::max();
    for (;;) {
        const auto left = limit - (steady_clock::now() - start);
        const auto slice = std::clamp<duration<double>>(left, nanoseconds(0), milliseconds(50));
        if (unlocked([&] { return poll(duration_cast<nanoseconds>(slice)); })) return;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (steady_clock::now() - start >= limit) return;
    }
}
inline bool finished(ta_move_state state) {
    return state >= TA_MOVE_DONE;
}
