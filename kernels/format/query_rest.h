// Queries of 15 bits: a second INT8 code beside that of stage 1, for products with K at 8 bits. docs/numerics.md, 4.10.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

// The rest of x behind its code of stage 1, in 128ths of the scale: 128 code + rest = RNE(128 x / scale), |rest| <= 64. `code` is
// stage1_code's (codec.h).
inline constexpr int kRestUnits = 128;
TA_HD inline int8_t stage1_rest(float x, float scale, int levels, int8_t code) {
    if (scale == 0.0f) return 0;
    const float r = rintf(x / scale * float(kRestUnits)), limit = float(kRestUnits * levels);
    return int8_t(int(r > limit ? limit : r < -limit ? -limit : r) - kRestUnits * code);
}

}  // namespace ta
