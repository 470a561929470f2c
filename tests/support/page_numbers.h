// What the bytes of a page stand for, read by the definition of kernels/format/layout.h. Needs the internal headers.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/format/layout.h"

namespace ta::testing {

// The numbers of one head's page: value = number * scale.
struct PageNumbers {
    std::vector<int32_t> k, v;    // [64, head_dim] in eighths on channel pages
    double k_scale[kPageTokens];  // 0 from `valid` on
    double v_scale[kPageTokens];
    double v_unit;  // V's scale of a channel page, of a token page the largest
};
PageNumbers read_piece(const uint8_t* piece, PageKind kind, int head_dim, int k_bits, int v_bits, int valid);

}  // namespace ta::testing
