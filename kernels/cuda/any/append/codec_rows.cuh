// Stage 1 on CUDA: rows of K and V are read, rotated and quantized, 8 channels per lane, in the arithmetic of
// kernels/format/{rotation,codec}.h to the bit, whatever the contraction of the compiler.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/common/attend_args.h"
#include "kernels/format/codec.h"
#include "kernels/format/rotation.h"

namespace ta::cuda {

inline constexpr uint32_t kWholeWarp = 0xffffffffu;

// How the rows of a page lie in a CTA: 16 at a time, a warp holding several rows of d / 8 lanes each.
template <int D>
struct RowShape {
    static constexpr int kLanes = D == 96 ? 16 : D / 8;  // of a row; at 96 four of them hold nothing
    static constexpr int kWarpRows = 32 / kLanes;
    static constexpr int kWarps = 16 / kWarpRows;
    static constexpr int kThreads = 32 * kWarps;
};

// A lane's 8 values as they lie in memory.
template <DType kType>
struct RawRow {
    static constexpr int kWords = int(dtype_bytes(kType)) * 2;
    uint32_t w[kWords];

    // From an address that is a multiple of 16.
    __device__ __forceinline__ void load(const void* from) {
#pragma unroll
        for (int j = 0; j < kWords; j += 4) {
            const uint4 v = __ldg(static_cast<const uint4*>(from) + j / 4);
            w[j] = v.x, w[j + 1] = v.y, w[j + 2] = v.z, w[j + 3] = v.w;
        }
    }
    __device__ __forceinline__ void load_unaligned(const void* from) {
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            if constexpr (kType == DType::kF32) {
                w[j] = __ldg(static_cast<const uint32_t*>(from) + j);
            } else {
                const auto* h = static_cast<const uint16_t*>(from) + 2 * j;
                w[j] = uint32_t(__ldg(h)) | uint32_t(__ldg(h + 1)) << 16;
            }
        }
    }

    __device__ __forceinline__ void widen(float (&x)[8]) const {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if constexpr (kType == DType::kF32) {
                x[j] = __uint_as_float(w[j]);
            } else if constexpr (kType == DType::kBf16) {
                x[j] = __uint_as_float(j % 2 ? w[j / 2] & 0xffff0000u : w[j / 2] << 16);
            } else {
                x[j] = __half2float(__ushort_as_half(uint16_t(w[j / 2] >> j % 2 * 16)));
            }
        }
    }

    // The largest magnitude; not a number where a value is not. Magnitudes compare as their bits do.
    __device__ __forceinline__ float amax() const {
        uint32_t most = 0;
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            most = kType == DType::kF32 ? max(most, w[j] & 0x7fffffffu) : __vmaxu2(most, w[j] & 0x7fff7fffu);
        }
        if constexpr (kType == DType::kF32) return __uint_as_float(most);
        most = max(most & 0xffffu, most >> 16);
        return kType == DType::kBf16 ? __uint_as_float(most << 16) : __half2float(__ushort_as_half(uint16_t(most)));
    }
};

__device__ __forceinline__ float lane_amax(const float (&x)[8]) {
    float m = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) m = fmaxf(m, fabsf(x[j]));
    return m;
}

// The largest magnitude of the whole row, in all of its lanes.
template <int D>
__device__ __forceinline__ float row_amax(float m) {
#pragma unroll
    for (int h = 1; h < RowShape<D>::kLanes; h *= 2) m = fmaxf(m, __shfl_xor_sync(kWholeWarp, m, h));
    return m;
}

// Replaces values that no scale is made for; returns how many.
__device__ __forceinline__ int replace_beyond(float (&x)[8], float limit, bool saturate) {
    int replaced = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (fabsf(x[j]) <= limit) continue;
        x[j] = !saturate || x[j] != x[j] ? 0.0f : copysignf(limit, x[j]);
        ++replaced;
    }
    return replaced;
}

// Rows `first`, first + step, ... of a tensor's head, `count` of them. Where a lane reads more, the others are zeros.
struct HeadRows {
    const TensorArgs& from;
    int64_t first;
    int step, head, count;
};

// A lane's channels of them.
template <DType kType, int kRows>
__device__ __forceinline__ void load_rows(const HeadRows& rows, int lane_in_row, RawRow<kType> (&raw)[kRows]) {
    constexpr int64_t kBytes = int64_t(dtype_bytes(kType));
    const TensorArgs& from = rows.from;
    const int64_t at = rows.first * from.stride_row + rows.head * from.stride_head + 8 * lane_in_row;
    const auto* bytes = static_cast<const uint8_t*>(from.data) + at * kBytes;
    const int64_t stride = rows.step * from.stride_row * kBytes;
    if (rows.count <= 0) return;
    if (((reinterpret_cast<uintptr_t>(bytes) | uintptr_t(stride)) & 15) == 0) {
#pragma unroll
        for (int p = 0; p < kRows; ++p) {
            if (p < rows.count) raw[p].load(bytes + p * stride);
        }
    } else {
#pragma unroll
        for (int p = 0; p < kRows; ++p) {
            if (p < rows.count) raw[p].load_unaligned(bytes + p * stride);
        }
    }
}

// Their values, those that no scale is made for replaced, and the lane's largest magnitudes. Returns how many were replaced.
template <DType kType, int kRows>
__device__ __forceinline__ int widen_rows(const RawRow<kType> (&raw)[kRows], bool saturate, float (&x)[kRows][8],
                                          float (&amax)[kRows]) {
    constexpr float kLimit = kType == DType::kF16 ? 65504.0f : kMaxMagnitude;
    bool fine = true;
#pragma unroll
    for (int p = 0; p < kRows; ++p) {
        raw[p].widen(x[p]);
        amax[p] = raw[p].amax();
        fine &= amax[p] <= kLimit;
    }
    if (fine) return 0;
    int replaced = 0;
#pragma unroll
    for (int p = 0; p < kRows; ++p) {
        replaced += replace_beyond(x[p], kLimit, saturate);
        amax[p] = lane_amax(x[p]);
    }
    return replaced;
}

// Both, whatever the type.
template <int kRows>
__device__ __forceinline__ int read_rows(const HeadRows& rows, int lane_in_row, bool saturate, float (&x)[kRows][8],
                                         float (&amax)[kRows]) {
    const auto of = [&]<DType kType>() {
        RawRow<kType> raw[kRows] = {};
        load_rows(rows, lane_in_row, raw);
        return widen_rows(raw, saturate, x, amax);
    };
    if (rows.from.dtype == DType::kBf16) return of.template operator()<DType::kBf16>();
    if (rows.from.dtype == DType::kF16) return of.template operator()<DType::kF16>();
    return of.template operator()<DType::kF32>();
}

// rotation.h: butterflies of distance 1, 2, 4 within a lane, the others across lanes. `sign` is the lane's.
template <int D>
__device__ __forceinline__ void rotate_row(float (&x)[8], const float (&sign)[8], int lane_in_row) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], sign[j]);
#pragma unroll
    for (int h = 1; h < 8; h *= 2) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j & h) continue;
            const float a = x[j], b = x[j + h];
            x[j] = __fadd_rn(a, b);
            x[j + h] = __fsub_rn(a, b);
        }
    }
#pragma unroll
    for (int h = 1; h < D / 8; h *= 2) {
        const float own = lane_in_row & h ? -1.0f : 1.0f;  // exact: the fma rounds like the addition it stands for
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = fmaf(x[j], own, __shfl_xor_sync(kWholeWarp, x[j], h));
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], rotation_norm(D));
}

// exponent_below of codec.h for x and limit that are 0 or normal, without its loop.
__device__ __forceinline__ int exponent_below_normal(float x, float limit) {
    if (!(x > 0.0f)) return kMaxExponent;
    const uint32_t a = __float_as_uint(x), b = __float_as_uint(limit);
    const int e = int(b >> 23) - int(a >> 23) - int((a & 0x7fffffu) > (b & 0x7fffffu));
    return e < 0 ? 0 : e > kMaxExponent ? kMaxExponent : e;
}

// Divides by one scale, rounded as IEEE division: nvcc's division without its branch for extreme exponents, which a power of
// two keeps away.
struct Divider {
    float scale, up, inverse;
    __device__ __forceinline__ explicit Divider(float s) {
        up = s < 0x1p-60f ? 0x1p64f : 1.0f;
        scale = __fmul_rn(s, up);
        asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
        inverse = s > 0.0f ? fmaf(fmaf(-scale, inverse, 1.0f), inverse, inverse) : 0.0f;
    }
    // The divider of lane n of each four.
    __device__ __forceinline__ Divider(const Divider& d, int n)
        : scale(__shfl_sync(kWholeWarp, d.scale, n, 4)),
          up(__shfl_sync(kWholeWarp, d.up, n, 4)),
          inverse(__shfl_sync(kWholeWarp, d.inverse, n, 4)) {}
    // `x` times `up` already.
    __device__ __forceinline__ float operator()(float x) const {
        float q = __fmul_rn(x, inverse);
        q = fmaf(fmaf(-scale, q, x), inverse, q);
        return fmaf(fmaf(-scale, q, x), inverse, q);
    }
};

// stage1_scale of codec.h for pages.
__device__ __forceinline__ float page_stage1_scale(float amax) {
    constexpr float kLevels = float(kStage1Levels), kInverse = 1.0f / kLevels;
    const bool small = amax < 0x1p-60f;
    const float x = small ? __fmul_rn(amax, 0x1p64f) : amax;
    float q = __fmul_rn(x, kInverse);
    q = fmaf(fmaf(-kLevels, q, x), kInverse, q);
    q = fmaf(fmaf(-kLevels, q, x), kInverse, q);
    return amax < kMinAmax ? 0.0f : small ? __fmul_rn(q, 0x1p-64f) : q;
}

inline constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which the low bits then hold

// Stage-1 codes of a lane's values as the low bytes of `code`. The values are multiplied by divide.up already, and none may
// round to more than kStage1Levels.
__device__ __forceinline__ void quantize_row(const float (&x)[8], const Divider& divide, uint32_t (&code)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) code[j] = __float_as_uint(__fadd_rn(divide(x[j]), kRound));
}

// Cuts values off at the largest that a scale has codes for; returns how many stage 1 counts as clamped: those whose quotient
// rounds to more than 119.
__device__ __forceinline__ int clamp_row(float (&x)[8], float scale) {
    constexpr double kQuotient = 119.5 - 0x1p-18;  // from here on fl(x / scale) is at least 119.5, which rounds to 120
    const double bound = kQuotient * double(scale);
    const float limit = __fmul_rn(float(kStage1Levels), scale);
    int clamped = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        clamped += scale > 0.0f ? double(fabsf(x[j])) >= bound : fabsf(x[j]) >= kMinAmax;
        x[j] = fminf(fmaxf(x[j], -limit), limit);
    }
    return clamped;
}

// The low bytes of four words as one.
__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

}  // namespace ta::cuda
