// Queries rotated and quantized to stage 1, in the arithmetic of kernels/format/{rotation,codec}.h to the bit, by a small kernel of
// their own: within the decode kernel this code costs more to fetch than to run. And how a warp of the decode kernel gets them.
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
    struct Working {
        uint8_t digits[2 * kRows][D];  // high and low digits of q * step, rows 2 r and 2 r + 1 for query row r
        uint8_t query[kRows][D];       // stage-1 codes
        uint4 p[kRows / 4][32];        // P on its way from the layout of scores to that of an operand
    };
    union {
        alignas(16) Working w;
        float staging[4 * D];  // results on their way out, at the end of a segment
    };
    uint64_t barriers[kDecodeMaxInFlight];
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

constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float finite_or(float x, DType type, bool saturate) {
    if (!saturate || x != x) return 0.0f;
    return copysignf(type == DType::kF16 ? 65504.0f : kMaxMagnitude, x);
}

// Butterflies of distance 1, 2, 4, ..: within a lane's words, then across lanes, then between its words. The shuffles of
// several rows overlap.
template <int D, int R, int W>
__device__ __forceinline__ void rotate_rows(float (&x)[R][W][4], const float* signs, int lane) {
    constexpr int kLanes = D / 4 < 32 ? D / 4 : 32;
    const auto butterfly = [](float& a, float& b) {
        const float sum = __fadd_rn(a, b), difference = __fsub_rn(a, b);
        a = sum;
        b = difference;
    };
#pragma unroll
    for (int j = 0; j < W; ++j) {
        float s[4];
        load_word(signs, DType::kF32, lane % kLanes + 32 * j, s);
#pragma unroll
        for (int k = 0; k < R; ++k) {
            float(&v)[4] = x[k][j];
#pragma unroll
            for (int c = 0; c < 4; ++c) v[c] = s[c] < 0.0f ? -v[c] : v[c];
            butterfly(v[0], v[1]);
            butterfly(v[2], v[3]);
            butterfly(v[0], v[2]);
            butterfly(v[1], v[3]);
        }
    }
#pragma unroll
    for (int h = 1; h < kLanes; h *= 2) {
#pragma unroll
        for (int k = 0; k < R; ++k) {
#pragma unroll
            for (int j = 0; j < W; ++j) {
#pragma unroll
                for (float& v : x[k][j]) {
                    const float other = __shfl_xor_sync(kAllLanes, v, h);
                    v = lane & h ? __fsub_rn(other, v) : __fadd_rn(v, other);
                }
            }
        }
    }
#pragma unroll
    for (int k = 0; k < R; ++k) {
        if constexpr (W == 2) {
#pragma unroll
            for (int c = 0; c < 4; ++c) butterfly(x[k][0][c], x[k][1][c]);
        }
#pragma unroll
        for (int j = 0; j < W; ++j) {
#pragma unroll
            for (float& v : x[k][j]) v = __fmul_rn(v, rotation_norm(D));
        }
    }
}

// x / scale, rounded to nearest: what nvcc makes of a division, without its branch for extreme exponents, which do not occur:
// a scale is 0 or above 2^-62 (see up), and amax / levels has no remainder below the denormals.
__device__ __forceinline__ float divide(float x, float scale, float inverse) {
    float q = __fmul_rn(x, inverse);
    q = fmaf(fmaf(-scale, q, x), inverse, q);
    return fmaf(fmaf(-scale, q, x), inverse, q);
}

// stage1_code of codec.h for a row.
struct RowQuantizer {
    float stage1;  // the row's scale
    float scale, up, inverse, limit;
    __device__ __forceinline__ RowQuantizer(float amax, int levels) : limit(float(levels)) {
        const float one = reciprocal(limit);
        stage1 = amax < kMinAmax ? 0.0f : divide(amax, limit, fmaf(fmaf(-limit, one, 1.0f), one, one));
        up = amax < 0x1p-54f ? 0x1p64f : 1.0f;  // exact
        scale = __fmul_rn(stage1, up);
        const float about = reciprocal(scale);
        inverse = scale > 0.0f ? fmaf(fmaf(-scale, about, 1.0f), about, about) : 0.0f;
    }
    __device__ __forceinline__ int code(float x) const {
        return __float2int_rn(fminf(fmaxf(rintf(divide(__fmul_rn(x, up), scale, inverse)), -limit), limit));
    }
};

// pages_before for the pages within the window, by one warp.
__device__ __forceinline__ void count_window_pages(const AttendArgs& a, int32_t* pages_before, int lane) {
    int32_t sum = 0;
    if (lane == 0) pages_before[0] = 0;
    for (int first = 0; first < a.batch; first += 32) {
        const int seq = first + lane;
        int32_t upto = 0;
        if (seq < a.batch) {
            const SequenceArgs s = a.sequences[seq];
            if (s.n_query > 0) upto = (s.n_keys + kPageTokens - 1) / kPageTokens - first_page(a, s);
        }
#pragma unroll
        for (int h = 1; h < 32; h *= 2) {
            const int32_t other = __shfl_up_sync(kAllLanes, upto, h);
            if (lane >= h) upto += other;
        }
        if (seq < a.batch) pages_before[seq + 1] = sum + upto;
        sum += __shfl_sync(kAllLanes, upto, 31);
    }
}

// One warp: kQueryRows query rows of a (sequence, kv head); rows that do not exist get zeros. The last CTA counts the pages that lie
// within the window.
template <int D>
__global__ void __launch_bounds__(32 * kQueryWarps) decode_query_kernel(const __grid_constant__ DecodeParams p) {
    grid_dependency_wait();
    // NOTES: not before the wait: the decode kernel reads pages and lengths without one of its own.
    grid_launch_dependents();
    constexpr int W = D > 128 ? 2 : 1;               // words of 4 channels per lane
    constexpr int kLanes = D / 4 < 32 ? D / 4 : 32;  // that hold one
    const int lane = int(threadIdx.x) % 32, per_segment = p.row_capacity / kQueryRows;
    if (blockIdx.x == gridDim.x - 1) {
        if (p.windowed_pages && threadIdx.x < 32) count_window_pages(p.a, p.windowed_pages, lane);
        return;
    }
    const int task = int(blockIdx.x) * kQueryWarps + int(threadIdx.x) / 32, segment = task / per_segment;
    const int first_row = task % per_segment * kQueryRows;
    if (segment >= p.a.batch * p.a.kv_heads) return;
    const int seq = segment / p.a.kv_heads, head = segment % p.a.kv_heads;
    const SequenceArgs s = p.a.sequences[seq];
    const int rows = s.n_query * p.a.group;
    const int word_lane = D == 64 ? lane % kLanes : lane;  // at 64 the upper lanes do the same once more
    const int64_t first = int64_t(segment) * p.row_capacity + first_row;
    uint32_t* codes = p.query_codes + first * (D / 4);
    float x[kQueryRows][W][4];
#pragma unroll
    for (int k = 0; k < kQueryRows; ++k) {
        const int row = first_row + k, token = row / p.a.group, q_head = head * p.a.group + row % p.a.group;
        const int64_t at = (s.row + token) * p.a.q.stride_row + q_head * p.a.q.stride_head;
        const auto* data = static_cast<const uint8_t*>(p.a.q.data) + at * int64_t(cpu::dtype_bytes(p.a.q.dtype));
#pragma unroll
        for (int j = 0; j < W; ++j) {
#pragma unroll
            for (int c = 0; c < 4; ++c) x[k][j][c] = 0.0f;
            if (row < rows && word_lane < kLanes) load_word(data, p.a.q.dtype, word_lane + 32 * j, x[k][j]);
        }
    }
    float amax[kQueryRows];
    const auto largest = [&] {
#pragma unroll
        for (int k = 0; k < kQueryRows; ++k) {
            amax[k] = 0.0f;
#pragma unroll
            for (int j = 0; j < W; ++j) {
#pragma unroll
                for (const float v : x[k][j]) amax[k] = v == v ? fmaxf(amax[k], fabsf(v)) : kInfinity;
            }
        }
#pragma unroll
        for (int h = 16; h >= 1; h /= 2) {
#pragma unroll
            for (int k = 0; k < kQueryRows; ++k) amax[k] = fmaxf(amax[k], __shfl_xor_sync(kAllLanes, amax[k], h));
        }
    };
    largest();
    bool finite = true;
    for (const float m : amax) finite &= m <= kMaxMagnitude;
    if (!finite) {
#pragma unroll
        for (int k = 0; k < kQueryRows; ++k) {
#pragma unroll
            for (int j = 0; j < W; ++j) {
#pragma unroll
                for (float& v : x[k][j]) {
                    if (fabsf(v) <= kMaxMagnitude) continue;
                    v = finite_or(v, p.a.q.dtype, p.a.saturate);
                    if (p.a.nonfinite && lane < kLanes) atomicAdd(p.a.nonfinite + seq, 1u);
                }
            }
        }
        largest();
    }
    if (p.a.k_offset) {
#pragma unroll
        for (int k = 0; k < kQueryRows; ++k) {
            double dot = 0.0;
            if (lane < kLanes) {
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
            if (lane == 0) p.query_bias[first + k] = float(dot * double(p.unit));
        }
    }
    if constexpr (can_rotate(D)) {
        if (p.a.signs) {
            rotate_rows<D>(x, p.a.signs, lane);
            largest();
        }
    }
#pragma unroll
    for (int k = 0; k < kQueryRows; ++k) {
        const RowQuantizer quantizer(amax[k], p.a.q_levels);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            int code[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) code[c] = quantizer.code(x[k][j][c]);
            if (lane < kLanes) {
                codes[k * (D / 4) + lane + 32 * j] =
                    __byte_perm(__byte_perm(code[0], code[1], 0x40), __byte_perm(code[2], code[3], 0x40), 0x5410);
            }
        }
        if (lane == 0) p.query_scale[first + k] = quantizer.stage1 * p.unit;
    }
}

// Brings the queries of a (sequence, kv head) into memory.w.query. A lane's q_scale[n] is that of row 4 n + lane % 4.
template <int D, int kTiles>
__device__ __forceinline__ void load_queries(const DecodeParams& p, int segment, WarpMemory<D, 4 * kTiles>& memory,
                                             float (&q_scale)[kTiles], int lane) {
    const int64_t first = int64_t(segment) * (4 * kTiles);
    const uint32_t* codes = p.query_codes + first * (D / 4);
#pragma unroll
    for (int row = 0; row < 4 * kTiles; ++row) {
#pragma unroll
        for (int word = lane; word < D / 4; word += 32) {
            *reinterpret_cast<uint32_t*>(memory.w.query[row] + swizzled_word<D>(row, word)) = codes[row * (D / 4) + word];
        }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) q_scale[n] = p.query_scale[first + 4 * n + lane % 4];
    __syncwarp();
}

}  // namespace ta::cuda
