// Which keys a query sees: the rule of masks and windows, for CPU and GPU.
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

template <class Int>
struct KeyRange {
    Int begin, end;
};

// Keys [begin, end) that the query at position p sees. p may be below 0 or behind the keys. window: only keys nearer than this
// are seen, on both sides under a full mask; 0: all.
template <class Int>
TA_HD constexpr KeyRange<Int> visible_keys(bool causal, Int window, Int n_keys, Int p) {
    const auto within = [n_keys](int64_t j) { return Int(j < 0 ? 0 : j > n_keys ? n_keys : j); };
    KeyRange<Int> r{0, n_keys};
    if (causal) r.end = within(int64_t(p) + 1);
    if (window > 0) {
        r.begin = within(int64_t(p) - window + 1);
        if (!causal) r.end = within(int64_t(p) + window);
    }
    if (r.begin > r.end) r.begin = r.end;
    return r;
}

// Whether a token tree's query sees a token that is `distance` before it on its branch.
template <class Int>
TA_HD constexpr bool in_window(Int window, Int distance) {
    return window == 0 || distance < window;
}

}  // namespace ta
