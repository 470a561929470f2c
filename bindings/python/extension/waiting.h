// Waits that Ctrl-C ends.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "common.h"

// Raises ArgumentError for NaN.
inline void check_seconds(std::optional<double> seconds) {
    if (seconds && std::isnan(*seconds)) throw ta::Error(TA_E_INVALID, "seconds is not a number");
}
// Polls in slices, so that Ctrl-C ends the wait: poll(nanoseconds) says whether what is waited for has come.
template <class Poll>
void wait_for(std::optional<double> seconds, Poll&& poll) {
    using namespace std::chrono;
    const auto start = steady_clock::now();
    check_seconds(seconds);
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
