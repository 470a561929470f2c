// The blocks of a sequence that a call reads: `first` and every `stride`-th after it. They are all of them, or those of one rank of
// several. Kernels count these alone, as pages, and their keys from 0.
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"

namespace ta::cuda {

struct BlockWalk {
    int32_t first = 0, stride = 1;

    // The index in the sequence of page `page`.
    TA_HD constexpr int32_t block(int32_t page) const { return first + page * stride; }
    // Pages among the first `blocks` of the sequence.
    TA_HD constexpr int32_t pages(int32_t blocks) const {
        const int32_t n = (blocks - first + stride - 1) / stride;
        return n > 0 ? n : 0;
    }
    // Keys of these pages among the first `end` of the sequence.
    TA_HD constexpr int32_t keys(int32_t end) const {
        const int32_t last = end / kPageTokens, before = pages(last);
        return before * kPageTokens + (block(before) == last ? end % kPageTokens : 0);
    }
};

}  // namespace ta::cuda
