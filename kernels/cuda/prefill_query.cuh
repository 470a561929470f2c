// Stage 1 of queries in registers: rotation, INT8 codes and the order that the product with K wants. A row belongs to the four
// lanes of a quad; lane i of it has channels [i d/4, (i + 1) d/4), which is also how the pages' codes are spread over lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/prefill_shared.cuh"
#include "kernels/format/codec.h"
#include "kernels/format/rotation.h"

namespace ta::cuda::prefill {

// Operand A of the products with K. Two query rows per lane, g and g + 8 of its warp's 16.
template <int D>
struct Queries {
    uint32_t a[D / 32][4];
};

template <typename T>
TA_DEVICE float widen(T x) {
    return float(x);
}

template <typename T, int N>
TA_DEVICE void load_channels(const T* from, float (&x)[N]) {
    constexpr int kPer = 16 / sizeof(T);
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
        for (int n = 0; n < N; n += kPer) {
            const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from + n));
            const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
            for (int k = 0; k < kPer; ++k) x[n + k] = widen(values[k]);
        }
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = widen(from[n]);
    }
}

template <int N>
TA_DEVICE void load_channels(const TensorArgs& t, int64_t offset, float (&x)[N]) {
    if (t.dtype == DType::kF16) {
        load_channels(static_cast<const __half*>(t.data) + offset, x);
    } else if (t.dtype == DType::kBf16) {
        load_channels(static_cast<const __nv_bfloat16*>(t.data) + offset, x);
    } else {
        load_channels(static_cast<const float*>(t.data) + offset, x);
    }
}

// Replaces what is not a number or too large; returns how many values were.
template <int N>
TA_DEVICE int make_finite(float (&x)[N], bool saturate, float limit) {
    bool good = true;
#pragma unroll
    for (int n = 0; n < N; ++n) good = good && fabsf(x[n]) <= kMaxMagnitude;
    if (good) return 0;
    int replaced = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        if (fabsf(x[n]) <= kMaxMagnitude) continue;
        ++replaced;
        x[n] = saturate && x[n] == x[n] ? copysignf(limit, x[n]) : 0.0f;
    }
    return replaced;
}

constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: a sum with it has the nearest integer in its low bits

// RNE(fl(x / scale)) + kInteger of values within +-levels * scale. With the correctly rounded inverse, one correction by the
// remainder gives the correctly rounded quotient (Markstein), where nothing is denormal. Returns a bound of the sum of |codes|.
template <int N>
TA_DEVICE float quantize(float (&x)[N], float scale, int levels) {
    if (scale < 0x1p-90f) {
#pragma unroll 1
        for (int part = 0; part < N; part += 4) {  // rare: small rather than fast, so it moves through the array
            float code[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) code[n] = float(stage1_code(x[n], scale, levels)) + kInteger;
#pragma unroll
            for (int n = 0; n < N - 4; ++n) x[n] = x[n + 4];
#pragma unroll
            for (int n = 0; n < 4; ++n) x[N - 4 + n] = code[n];
        }
        return float(N * levels);
    }
    const float inverse = 1.0f / scale;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float q = x[n] * inverse, exact = fmaf(fmaf(-q, scale, x[n]), inverse, q);
        sum += fabsf(exact);
        x[n] = exact + kInteger;
    }
    return sum + 0.5f * N;
}

// rotation.h over a quad: the last two distances are between lanes. Bit n of `negative`: the lane's channel n changes its sign.
template <int D>
TA_DEVICE void rotate_quad(float (&x)[D / 4], uint32_t negative, int i) {
#pragma unroll
    for (int n = 0; n < D / 4; ++n) x[n] = __int_as_float(__float_as_int(x[n]) ^ (negative << (31 - n) & 0x80000000u));
#pragma unroll
    for (int h = 1; h < D / 4; h *= 2) {
#pragma unroll
        for (int n = 0; n < D / 4; ++n) {
            if (n & h) continue;
            const float a = x[n], b = x[n + h];
            x[n] = a + b;
            x[n + h] = a - b;
        }
    }
#pragma unroll
    for (int h = 1; h < 4; h *= 2) {
#pragma unroll
        for (int n = 0; n < D / 4; ++n) {
            const float other = __shfl_xor_sync(~0u, x[n], h);
            x[n] = i & h ? other - x[n] : x[n] + other;
        }
    }
#pragma unroll
    for (int n = 0; n < D / 4; ++n) x[n] *= rotation_norm(D);
}

TA_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
TA_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Where row `row` of the sequence's n_query * group begins in q or out.
TA_DEVICE int64_t row_offset(const AttendArgs& args, const TensorArgs& t, const PrefillTile& tile, int row) {
    const int token = row / args.group, head = tile.head * args.group + row - token * args.group;
    return int64_t(tile.row + token) * t.stride_row + int64_t(head) * t.stride_head;
}

// Row `row`, which may not exist: then it is zero. codes[n] are those of the lane's channels 4 n ... 4 n + 3.
template <int D>
TA_DEVICE void load_query(const AttendArgs& args, const PrefillTile& tile, int row, int i, uint32_t negative,
                          uint32_t (&codes)[D / 16], RowInfo& info) {
    float x[D / 4];
    const int rows = tile.n_query * args.group;
    if (row < rows) {
        load_channels(args.q, row_offset(args, args.q, tile, row) + i * (D / 4), x);
        const int replaced = make_finite(x, args.saturate, args.q.dtype == DType::kF16 ? 65504.0f : kMaxMagnitude);
        if (replaced && args.nonfinite) atomicAdd(args.nonfinite + tile.sequence, uint32_t(replaced));
    } else {
#pragma unroll
        for (int n = 0; n < D / 4; ++n) x[n] = 0.0f;
    }
    const float unit = args.softcap > 0.0f ? args.scale : args.scale * 1.44269504f;
    info.bias = 0.0f;
    if (args.k_offset) {
        const float* mu = args.k_offset + tile.head * D + i * (D / 4);
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < D / 4; ++n) sum = fmaf(x[n], __ldg(mu + n), sum);
        info.bias = quad_sum(sum) * unit;
    }
    if (args.signs) rotate_quad<D>(x, negative, i);
    float amax = 0.0f;
#pragma unroll
    for (int n = 0; n < D / 4; ++n) amax = fmaxf(amax, fabsf(x[n]));
    const float scale = stage1_scale(quad_max(amax), args.q_levels);
    const float magnitude = quantize(x, scale, args.q_levels);
#pragma unroll
    for (int n = 0; n < D / 4; n += 4) {
        const uint32_t low = __byte_perm(__float_as_uint(x[n]), __float_as_uint(x[n + 1]), 0x0040);
        const uint32_t high = __byte_perm(__float_as_uint(x[n + 2]), __float_as_uint(x[n + 3]), 0x0040);
        codes[n / 4] = __byte_perm(low, high, 0x5410);
    }
    info.scale = scale * unit;
    info.magnitude = quad_sum(magnitude) * 127.0f;
}

// Has the row on its way to the L2 cache: queries are read once, at a moment when nothing else is left to do.
template <int D>
TA_DEVICE void prefetch_query(const AttendArgs& args, const PrefillTile& tile, int row) {
    if (row >= tile.n_query * args.group) return;
    const uint32_t bytes = args.q.dtype == DType::kF32 ? 4 : 2;
    const uint64_t from = reinterpret_cast<uint64_t>(args.q.data) + uint64_t(row_offset(args, args.q, tile, row)) * bytes;
    if (from % 16 != 0) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(D * bytes) : "memory");
}

}  // namespace ta::cuda::prefill
