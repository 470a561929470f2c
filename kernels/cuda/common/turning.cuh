// K's turning pairs (kernels/format/turning.h) as attention gives them back to scores. Angles go through the hardware's sine and
// cosine: their error, 2^-21, is far below that of codes.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/common/attend_args.h"
#include "kernels/format/turning.h"

namespace ta::cuda {

// The lowest bytes of four words.
__device__ __forceinline__ uint32_t lowest_bytes(const uint4& w) {
    return __byte_perm(__byte_perm(w.x, w.y, 0x0040), __byte_perm(w.z, w.w, 0x0040), 0x5410);
}
// Pair n of a page, 0 if there is none: from the K scales of a token page, from the pairs of a channel page.
__device__ __forceinline__ uint64_t turning_of_scales(const uint8_t* k_scales, int n) {
    const auto* from = reinterpret_cast<const uint4*>(k_scales) + 2 * n;
    return uint64_t(lowest_bytes(from[1])) << 32 | lowest_bytes(from[0]);
}
__device__ __forceinline__ uint64_t turning_of_pairs(const uint8_t* pairs, int n) {
    const uint2 words = reinterpret_cast<const uint2*>(pairs)[n];
    return uint64_t(words.y) << 32 | words.x;
}

__device__ __forceinline__ TurningValues turning_values_fast(const TurningPair& p, int token) {
    const float angle = float(int32_t(p.phase + p.turn * uint32_t(token))) * 1.46291807926715968e-9f;  // within +-pi
    float sine, cosine;
    __sincosf(angle, &sine, &cosine);
    return {p.amplitude * cosine, p.amplitude * sine};
}

// A query's value in a channel, times `unit`; 0 without a row. Values that stage 1 replaces are replaced here, too.
__device__ __forceinline__ float query_value(const TensorArgs& q, const void* row, int channel, float unit, bool saturate) {
    if (!row) return 0.0f;
    float x;
    if (q.dtype == DType::kF32) {
        x = static_cast<const float*>(row)[channel];
    } else {
        const uint16_t half = static_cast<const uint16_t*>(row)[channel];
        x = q.dtype == DType::kF16 ? __half2float(__ushort_as_half(half)) : __uint_as_float(uint32_t(half) << 16);
    }
    if (!(fabsf(x) <= kMaxMagnitude)) {
        x = !saturate || x != x ? 0.0f : copysignf(q.dtype == DType::kF16 ? 65504.0f : kMaxMagnitude, x);
    }
    return x * unit;
}

}  // namespace ta::cuda
