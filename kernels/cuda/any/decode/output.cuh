// From accumulators to results: what the decode kernel does at the end of a segment, and the merge of partial results.
#pragma once

#include "kernels/cuda/any/decode/query.cuh"
#include "kernels/cuda/common/scores.cuh"

namespace ta::cuda {

inline constexpr float kLowest = -3e38f;  // a maximum over no key; below every score, and differences to it are no NaN

// Both in units of log2: what O is multiplied by at the end, and the LSE.
struct RowEnd {
    float factor, lse;
};
// `sinks`: [q_heads] logits of learned sinks, natural units, or nullptr.
__device__ __forceinline__ RowEnd end_row(const float* sinks, float m, float l, int q_head) {
    float denominator = l, top = m, weight = 1.0f;  // the denominator is denominator * 2^top
    if (sinks) {
        const float sink = fminf(fmaxf(sinks[q_head] * kLog2e, kLowest), -kLowest);
        top = fmaxf(m, sink);
        weight = ex2(m - top);
        denominator = fmaf(l, weight, ex2(sink - top));
    }
    if (!(denominator > 0.0f)) return {0.0f, -kInfinity};
    return {weight / denominator, (top + log2f(denominator)) * 0.693147181f};
}

__device__ __forceinline__ RowEnd end_row(const AttendArgs& a, float m, float l, int q_head) {
    return end_row(a.sink, m, l, q_head);
}

// Channels 4 word .. + 3 of a row.
__device__ __forceinline__ void store_word(void* row, DType type, int word, const float4& v) {
    const float x[4] = {v.x, v.y, v.z, v.w};
    const int bytes = type == DType::kF32 ? 16 : 8;
    void* at = static_cast<uint8_t*>(row) + word * bytes;
    const bool aligned = reinterpret_cast<uintptr_t>(row) % bytes == 0;
    if (type == DType::kF32) {
        if (aligned) {
            *static_cast<float4*>(at) = v;
        } else {
            for (int c = 0; c < 4; ++c) static_cast<float*>(at)[c] = x[c];
        }
        return;
    }
    uint16_t h[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        h[c] = type == DType::kF16 ? __half_as_ushort(__float2half_rn(x[c])) : __bfloat16_as_ushort(__float2bfloat16_rn(x[c]));
    }
    if (aligned) {
        *static_cast<uint2*>(at) = make_uint2(h[0] | uint32_t(h[1]) << 16, h[2] | uint32_t(h[3]) << 16);
    } else {
        for (int c = 0; c < 4; ++c) static_cast<uint16_t*>(at)[c] = h[c];
    }
}

__device__ __forceinline__ uint8_t* output_row(const AttendArgs& a, int64_t row, int q_head) {
    const int64_t at = row * a.out.stride_row + q_head * a.out.stride_head;
    return static_cast<uint8_t*>(a.out.data) + at * int64_t(dtype_bytes(a.out.dtype));
}

__device__ __forceinline__ float4 scaled(const float4& v, float f) {
    return make_float4(v.x * f, v.y * f, v.z * f, v.w * f);
}

// In shared or global memory. Written by other SMs, perhaps: not from L1.
__device__ __forceinline__ float4 load_partial(const float4* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}
__device__ __forceinline__ float2 load_partial(const float2* p) {
    float2 v;
    asm volatile("ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}

}  // namespace ta::cuda
