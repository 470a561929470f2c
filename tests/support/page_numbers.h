// The values of a page's bytes, read by the definition of kernels/format/layout.h. Needs the internal headers.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/format/layout.h"

namespace ta::testing {

// The numbers of one head's page: value = number * scale.
struct PageNumbers {
    std::vector<int32_t> k, v;    // [64, head_dim] at 4 and 2 bits in eighths
    double k_scale[kPageTokens];  // 0 from `valid` on
    double v_scale[kPageTokens];
    bool k_bytes, v_bytes;  // K, V have 8 bits
    double v_unit;          // V's page scale, at 8 bits the largest
};
PageNumbers read_piece(const uint8_t* piece, PageKind kind, int head_dim, int k_bits, int v_bits, int valid);

}  // namespace ta::testing
