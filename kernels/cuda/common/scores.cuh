// The effect of options on scores and probabilities in fp32, in the decode kernel and for half INT8. The prefill kernel has its own
// forms, which multiply by reciprocals and stay in log2 units (kernels/cuda/sm90/prefill/softmax.cuh).
#pragma once

#include "kernels/cuda/ptx/mma.cuh"

namespace ta::cuda {

inline constexpr float kLog2e = 1.44269504f;

// 2^-u by SAS (docs/numerics.md): a table times a cubic. The table's entries come from ex2, whose error is far below the
// cubic's.
__device__ __forceinline__ float exp2_neg_sas(float u) {
    const float y = u * 0.693147181f, n = floorf(y), f = y - n;
    const float cubic = fmaf(fmaf(fmaf(-0.1025f, f, 0.4626f), f, -0.9922f), f, 0.9996f);
    return y <= 6.0f ? ex2(-n * kLog2e) * cubic : 0.0f;
}

// cap * tanh(x / cap) in log2 units, of x in natural ones.
__device__ __forceinline__ float soft_capped(float x, float cap) {
    const float e = ex2(fabsf(x / cap) * (-2.0f * kLog2e));
    return copysignf(cap * kLog2e * ((1.0f - e) / (1.0f + e)), x);
}

}  // namespace ta::cuda
