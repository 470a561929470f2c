// The gaps that context shifts have made in a sequence. docs/shift.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/layout.h"

namespace ta {

// Blocks [first, end) that a context shift has taken out of a sequence. What stands before them counts as that much nearer to
// what stands behind.
struct Gap {
    int64_t first, end;
    int64_t tokens() const { return (end - first) * kPageTokens; }
};

// Adds a gap to a sequence's gaps, which are in order and do not touch. Gaps that touch become one. A gap at the start is left
// out: nothing stands before it.
std::vector<Gap> with_gap(std::span<const Gap> gaps, Gap gap);

// Cuts the gaps for a sequence that is cut to so many blocks.
void cut_gaps(std::vector<Gap>& gaps, int64_t blocks);

}  // namespace ta
