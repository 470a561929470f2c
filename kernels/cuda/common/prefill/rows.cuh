// State of query rows and of their results, shared by all prefill kernels.
#pragma once

#include "kernels/cuda/common/prefill/tile.cuh"

namespace ta::cuda::prefill {

// Values of a query row that a block needs once; registers are for the accumulators.
struct alignas(16) RowInfo {
    float scale;      // stage-1 scale * softmax scale, log2 units unless softcap is on
    float magnitude;  // bound of the row's scores: 127 * the sum of |codes|, or a little more
    int key_begin, key_end;
    int position;
    float slope;    // ALiBi, log2 units
    float bias;     // from K's offset, in the unit of `scale`
    float natural;  // running maximum of the scores (SAS)
};

// A lane 4 g + i of a warp has of rows g and g + 8 columns 8 j + 2 i + e of O, which are channels (d/8) out_octant(i, e) + j:
// o[4 j + 2 h + e] of row g + 8 h.
TA_HD constexpr int out_octant(int i, int e) {
    return 2 * i + e;
}

inline constexpr float kSumUnit = 0x1p-32f;  // of the sums of rows: so they are finite whatever V's scale
inline constexpr float kNever = -3e38f;      // log2 of what no key has added to yet; scores reach 2^120
// O as it is kept between blocks: times 255 kOutUnit / 2^m. An int32 below 2^23 is, bit by bit, a denormal fp32 of 2^-149 times
// its value, so one FFMA adds a block to O.
inline constexpr float kOutUnit = 0x1p-49f;

TA_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace ta::cuda::prefill
