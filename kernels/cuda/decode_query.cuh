// Queries of one segment: rotated, quantized to stage 1 and left in the warp's shared memory, in the arithmetic of
// kernels/format/{rotation,codec}.h to the bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/decode_loader.cuh"
#include "kernels/format/codec.h"
#include "kernels/format/rotation.h"

namespace ta::cuda {

// One warp's shared memory but for its ring. `kRows` is a multiple of 4.
template <int D, int kRows>
struct WarpMemory {
    static constexpr int kRowCapacity = kRows;
    alignas(16) uint8_t digits[2 * kRows][D];  // high and low digits of q * step, rows 2 r and 2 r + 1 for query row r
    alignas(16) __half2 half[kRows][D / 2];    // queries as fp16
    alignas(16) uint8_t query[kRows][D];       // queries as int8
    alignas(16) uint4 p[kRows / 4][32];        // P on its way from the layout of scores to that of an operand
    float bias[kRows];                         // what K offsets take from every score
    uint64_t barriers[kDecodeMaxInFlight];

    // Results on their way out take the place of digits and half, which belong to the segment.
    __device__ float* staging() { return reinterpret_cast<float*>(digits); }
    static_assert(sizeof(digits) + sizeof(half) >= 4 * D * sizeof(float));
};

// Place of a word of 4 channels in a row of bytes. Fragments are read 16 bytes at a time by lanes of two rows and four quarters of
// the channels (at 96: 8 bytes, four rows); the order keeps them, and writes of whole rows, free of bank conflicts.
template <int D>
__device__ __forceinline__ int swizzled_word(int row, int word) {
    if constexpr (D == 128) return word * 4 ^ (row & 1) * 16;
    if constexpr (D == 256) return word * 4 ^ (word >> 5 & 1) * 16 ^ (row & 1) * 32;
    return word * 4;
}

// Lane (r, i)'s share of a row, as B fragments: channels (D/4) i + 8 k .. + 7 for step k.
template <int D>
__device__ __forceinline__ void load_fragments(const uint8_t* row_data, int row, int i, uint32_t (&b)[D / 32][2]) {
    if constexpr (D == 96) {
#pragma unroll
        for (int k = 0; k < D / 32; ++k) {
            const uint2 x = *reinterpret_cast<const uint2*>(row_data + i * (D / 4) + 8 * k);
            b[k][0] = x.x;
            b[k][1] = x.y;
        }
    } else {
#pragma unroll
        for (int k = 0; k < D / 32; k += 2) {
            const uint4 x = *reinterpret_cast<const uint4*>(row_data + swizzled_word<D>(row, i * (D / 16) + 2 * k));
            b[k][0] = x.x;
            b[k][1] = x.y;
            b[k + 1][0] = x.z;
            b[k + 1][1] = x.w;
        }
    }
}

__device__ __forceinline__ float to_float(const void* x, DType type, int64_t i) {
    if (type == DType::kF32) return static_cast<const float*>(x)[i];
    if (type == DType::kF16) return __half2float(static_cast<const __half*>(x)[i]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i]);
}

// Channels 4 word .. + 3 of a row.
__device__ __forceinline__ void load_word(const void* row, DType type, int word, float (&x)[4]) {
    const int bytes = type == DType::kF32 ? 16 : 8;
    const void* at = static_cast<const uint8_t*>(row) + word * bytes;
    if (reinterpret_cast<uintptr_t>(row) % bytes != 0) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = to_float(row, type, word * 4 + c);
    } else if (type == DType::kF32) {
        const float4 v = *static_cast<const float4*>(at);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        const uint2 v = *static_cast<const uint2*>(at);
        const uint32_t w[2] = {v.x, v.y};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const auto bits = uint16_t(w[c / 2] >> c % 2 * 16);
            x[c] = type == DType::kF16 ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t(bits) << 16);
        }
    }
}

__device__ __forceinline__ float finite_or(float x, DType type, bool saturate) {
    if (!saturate || x != x) return 0.0f;
    return copysignf(type == DType::kF16 ? 65504.0f : kMaxMagnitude, x);
}

// Butterflies of distance 1, 2, 4, ..: within a lane's words, then across lanes, then between its words.
template <int D, int W>
__device__ __forceinline__ void rotate_lanes(float (&x)[W][4], const float* signs, int lane) {
    const auto butterfly = [](float& a, float& b) {
        const float sum = __fadd_rn(a, b), difference = __fsub_rn(a, b);
        a = sum;
        b = difference;
    };
#pragma unroll
    for (int j = 0; j < W; ++j) {
        const int word = lane % (D / 4 < 32 ? D / 4 : 32) + 32 * j;
        float s[4];
        load_word(signs, DType::kF32, word, s);
#pragma unroll
        for (int c = 0; c < 4; ++c) x[j][c] = s[c] < 0.0f ? -x[j][c] : x[j][c];
        butterfly(x[j][0], x[j][1]);
        butterfly(x[j][2], x[j][3]);
        butterfly(x[j][0], x[j][2]);
        butterfly(x[j][1], x[j][3]);
#pragma unroll
        for (int h = 1; h < (D / 4 < 32 ? D / 4 : 32); h *= 2) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float other = __shfl_xor_sync(kAllLanes, x[j][c], h);
                x[j][c] = lane & h ? __fsub_rn(other, x[j][c]) : __fadd_rn(x[j][c], other);
            }
        }
    }
    if constexpr (W == 2) {
#pragma unroll
        for (int c = 0; c < 4; ++c) butterfly(x[0][c], x[1][c]);
    }
#pragma unroll
    for (int j = 0; j < W; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[j][c] = __fmul_rn(x[j][c], rotation_norm(D));
    }
}

// Fills memory.query, half and bias for the rows of (sequence, head). A lane's q_scale[n] is that of row 4 n + lane % 4. Rows that
// do not exist get zeros. `count`: this warp counts replaced values.
template <int D, int kTiles>
__device__ void prepare_queries(const DecodeParams& p, const SequenceArgs& s, int seq, int head, bool count,
                                WarpMemory<D, 4 * kTiles>& memory, float (&q_scale)[kTiles], int lane) {
    constexpr int W = D > 128 ? 2 : 1;                     // words of 4 channels per lane
    constexpr int kLanes = D / 4 < 32 ? D / 4 : 32;        // that hold one
    const int word_lane = D == 64 ? lane % kLanes : lane;  // at 64 the upper lanes do the same once more
    const bool has_word = word_lane < kLanes;
    const int rows = s.n_query * p.a.group;
#pragma unroll 1
    for (int n = 0; n < kTiles; ++n) {
        float x[4][W][4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int row = 4 * n + k, token = row / p.a.group, q_head = head * p.a.group + row % p.a.group;
            const int64_t at = (s.row + token) * p.a.q.stride_row + q_head * p.a.q.stride_head;
            const auto* data = static_cast<const uint8_t*>(p.a.q.data) + at * int64_t(cpu::dtype_bytes(p.a.q.dtype));
#pragma unroll
            for (int j = 0; j < W; ++j) {
#pragma unroll
                for (int c = 0; c < 4; ++c) x[k][j][c] = 0.0f;
                if (row < rows && has_word) load_word(data, p.a.q.dtype, word_lane + 32 * j, x[k][j]);
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int row = 4 * n + k;
            float amax = 0.0f;
#pragma unroll
            for (int j = 0; j < W; ++j) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if (fabsf(x[k][j][c]) <= kMaxMagnitude) continue;
                    x[k][j][c] = finite_or(x[k][j][c], p.a.q.dtype, p.a.saturate);
                    if (count && lane < kLanes) atomicAdd(p.a.nonfinite + seq, 1u);
                }
            }
            float bias = 0.0f;
            if (p.a.k_offset) {
                double dot = 0.0;
                if (has_word && lane < kLanes) {
#pragma unroll
                    for (int j = 0; j < W; ++j) {
                        float mu[4];
                        load_word(p.a.k_offset + int64_t(head) * D, DType::kF32, lane + 32 * j, mu);
#pragma unroll
                        for (int c = 0; c < 4; ++c) dot += double(x[k][j][c]) * double(mu[c]);
                    }
                }
#pragma unroll
                for (int h = 16; h >= 1; h /= 2) dot += __shfl_xor_sync(kAllLanes, dot, h);
                bias = float(dot * double(p.unit));
            }
            if constexpr (can_rotate(D)) {
                if (p.a.signs) rotate_lanes<D>(x[k], p.a.signs, lane);
            }
#pragma unroll
            for (int j = 0; j < W; ++j) {
#pragma unroll
                for (int c = 0; c < 4; ++c) amax = fmaxf(amax, fabsf(x[k][j][c]));
            }
#pragma unroll
            for (int h = 16; h >= 1; h /= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, h));
            const float scale = stage1_scale(amax, p.a.q_levels);
#pragma unroll
            for (int j = 0; j < W; ++j) {
                int code[4];
#pragma unroll
                for (int c = 0; c < 4; ++c) code[c] = stage1_code(x[k][j][c], scale, p.a.q_levels);
                if (lane >= kLanes) continue;
                const int word = lane + 32 * j;
                *reinterpret_cast<uint32_t*>(memory.query[row] + swizzled_word<D>(row, word)) =
                    __byte_perm(__byte_perm(code[0], code[1], 0x40), __byte_perm(code[2], code[3], 0x40), 0x5410);
                memory.half[row][2 * word] = __floats2half2_rn(float(code[0]), float(code[1]));
                memory.half[row][2 * word + 1] = __floats2half2_rn(float(code[2]), float(code[3]));
            }
            if (lane == 0) memory.bias[row] = bias;
            if (lane % 4 == k) {
#pragma unroll
                for (int m = 0; m < kTiles; ++m) q_scale[m] = m == n ? scale * p.unit : q_scale[m];
            }
        }
    }
    __syncwarp();
}

}  // namespace ta::cuda
