// The gaps that context shifts have made in a sequence. docs/shift.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/layout.h"

namespace ta {

// Blocks [first, end) of a sequence that a context shift has taken out: what is before them is that much nearer to what is behind.
struct Gap {
    int64_t first, end;
    int64_t tokens() const { return (end - first) * kPageTokens; }
};

// The gaps of a sequence with one more, in order and apart from each other. Gaps that meet become one; one at the start has
// nothing before it and is none.
std::vector<Gap> with_gap(std::span<const Gap> gaps, Gap gap);

// Of a sequence that is cut to so many blocks.
void cut_gaps(std::vector<Gap>& gaps, int64_t blocks);

}  // namespace ta
