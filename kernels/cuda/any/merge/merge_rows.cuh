// Merging rows of partial attention results: what ta_merge_states and the exchange of partitioned steps have in common.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/format/merge_states.h"

namespace ta::cuda {

inline constexpr int kPartsAtOnce = 4;  // whose loads are under way together

// kWidth elements as they lie in memory, and as floats.
template <int kWidth>
struct Word;

template <>
struct Word<8> {
    uint4 low, high;  // high: of floats

    __device__ __forceinline__ void load(const uint8_t* from, DType type) {
        low = reinterpret_cast<const uint4*>(from)[0];
        if (type == DType::kF32) high = reinterpret_cast<const uint4*>(from)[1];
    }
    __device__ __forceinline__ void add_to(float (&sum)[8], float w, DType type) const {
        const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (type == DType::kF32) {
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] = fmaf(w, __uint_as_float(words[c]), sum[c]);
            return;
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const auto half = uint16_t(words[c / 2] >> 16 * (c % 2));
            const float x = type == DType::kF16 ? __half2float(__ushort_as_half(half)) : __uint_as_float(uint32_t(half) << 16);
            sum[c] = fmaf(w, x, sum[c]);
        }
    }
    static __device__ __forceinline__ void store(uint8_t* to, DType type, const float (&x)[8]) {
        if (type == DType::kF32) {
            reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
            reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
            return;
        }
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = half_of(x[2 * k], type) | uint32_t(half_of(x[2 * k + 1], type)) << 16;
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    static __device__ __forceinline__ uint16_t half_of(float x, DType type) {
        return type == DType::kF16 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
};

template <>
struct Word<1> {
    uint32_t bits;

    __device__ __forceinline__ void load(const uint8_t* from, DType type) {
        bits = type == DType::kF32 ? *reinterpret_cast<const uint32_t*>(from) : *reinterpret_cast<const uint16_t*>(from);
    }
    __device__ __forceinline__ void add_to(float (&sum)[1], float w, DType type) const {
        const float x = type == DType::kF16    ? __half2float(__ushort_as_half(uint16_t(bits)))
                        : type == DType::kBf16 ? __uint_as_float(bits << 16)
                                               : __uint_as_float(bits);
        sum[0] = fmaf(w, x, sum[0]);
    }
    static __device__ __forceinline__ void store(uint8_t* to, DType type, const float (&x)[1]) {
        if (type == DType::kF32) {
            *reinterpret_cast<float*>(to) = x[0];
        } else {
            *reinterpret_cast<uint16_t*>(to) = Word<8>::half_of(x[0], type);
        }
    }
};

// The weights of row `lane` of a tile, and its LSE, where `to` is not nullptr. lse_at(i): of part i. All LSEs are read by one thread
// before it writes: `to` may be one of them.
template <int kRows, class LseAt>
__device__ __forceinline__ void weigh_row(int n, LseAt lse_at, int lane, float (&weight)[kMaxMergeParts][kRows], float* to) {
    float m = -std::numeric_limits<float>::infinity(), sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < n; ++i) {
        const float lse = *lse_at(i);
        weight[i][lane] = lse;
        m = larger_lse(m, lse);
    }
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
        const float w = merge_weight(weight[i][lane], m);
        weight[i][lane] = w;
        sum += w;
    }
    const MergeEnd end = end_merge(m, sum);
    for (int i = 0; i < n; ++i) weight[i][lane] = __fmul_rn(weight[i][lane], end.factor);
    if (to) *to = end.lse;
}

// Adds up a word of row `lane` over all parts. word_at(i): address and type of part i's.
struct MergeWordAt {
    const uint8_t* data;
    DType dtype;
};
template <int kWidth, int kRows, class WordAt>
__device__ __forceinline__ void merge_word(int n, WordAt word_at, int lane, const float (&weight)[kMaxMergeParts][kRows],
                                           float (&sum)[kWidth]) {
    for (int i = 0; i < n; i += kPartsAtOnce) {
        Word<kWidth> x[kPartsAtOnce];
        DType dtype[kPartsAtOnce];
#pragma unroll
        for (int j = 0; j < kPartsAtOnce; ++j) {
            if (i + j >= n) continue;
            const MergeWordAt at = word_at(i + j);
            dtype[j] = at.dtype;
            x[j].load(at.data, at.dtype);
        }
#pragma unroll
        for (int j = 0; j < kPartsAtOnce; ++j) {
            if (i + j >= n) continue;
            const float w = weight[i + j][lane];
            if (w != 0.0f) x[j].add_to(sum, w, dtype[j]);
        }
    }
}

}  // namespace ta::cuda
