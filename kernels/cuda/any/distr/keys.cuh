// K and V of a tile of keys to F16 in the order in which the kernels of DistrAttention read them. A CTA takes one kv head of K or V.
#pragma once

#include "kernels/cuda/any/append/codec_rows.cuh"
#include "kernels/cuda/any/distr/distr.h"
#include "kernels/cuda/common/half2.cuh"

namespace ta::cuda {

// A thread then reads four rows' chunks of 8 channels.
TA_HD constexpr int distr_keys_threads(int d) {
    return 4 * d;
}

__device__ __forceinline__ float power_of_two(int exponent) {
    return __int_as_float((exponent + 127) << 23);
}

// The largest of all threads' values; `most` is in shared memory, and 0.
__device__ __forceinline__ uint32_t block_max(uint32_t x, uint32_t* most) {
    x = __reduce_max_sync(kWholeWarp, x);
    if (threadIdx.x % 32 == 0) atomicMax(most, x);
    __syncthreads();
    return *most;
}

// A value as it is kept: 16-bit types as they came.
template <DType kType>
struct KeptValue {
    using Word = uint16_t;
    static __device__ __forceinline__ uint32_t pack(float x, float y) {
        return kType == DType::kF16 ? bits_of(__floats2half2_rn(x, y))
                                    : __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);  // BF16 is the upper half
    }
    static __device__ __forceinline__ float widen(uint32_t word) {
        return kType == DType::kF16 ? __half2float(__ushort_as_half(uint16_t(word))) : __uint_as_float(word << 16);
    }
};
template <>
struct KeptValue<DType::kF32> {
    using Word = float;
    static __device__ __forceinline__ float widen(float x) { return x; }
};

// A lane's 8 values of a row, those that no scale is made for replaced. Returns how many were.
template <DType kType>
__device__ __forceinline__ int replace_values(RawRow<kType>& raw, bool saturate, float& amax) {
    constexpr float kLimit = kType == DType::kF16 ? 65504.0f : kMaxMagnitude;
    amax = raw.amax();
    if (amax <= kLimit) return 0;
    float x[8];
    raw.widen(x);
    const int replaced = replace_beyond(x, kLimit, saturate);
    amax = lane_amax(x);
#pragma unroll
    for (int j = 0; j < RawRow<kType>::kWords; ++j) {
        if constexpr (kType == DType::kF32) {
            raw.w[j] = __float_as_uint(x[j]);
        } else {
            raw.w[j] = KeptValue<kType>::pack(x[2 * j], x[2 * j + 1]);
        }
    }
    return replaced;
}

// kOfK: K, else V.
template <int D, DType kType, bool kOfK>
__global__ void __launch_bounds__(distr_keys_threads(D), (kType == DType::kF32 ? 1024 : 1536) / distr_keys_threads(D))
    distr_keys_kernel(const __grid_constant__ DistrArgs args) {
    constexpr int kThreads = distr_keys_threads(D), kLanes = D / 8, kSlots = kThreads / kLanes,
                  kPairs = kDistrKeyTile / (2 * kSlots);
    __shared__ uint32_t most;
    // Words of two keys, a row for each channel. Word t of channel c lies at t ^ 2 (c / 8): lanes that store meet all banks.
    __shared__ alignas(16) uint32_t by_channel[kOfK ? D : 1][kDistrKeyTile / 2];
    const AttendArgs& a = args.attend;
    const int item = int(blockIdx.x), head = item % a.kv_heads;
    const DistrKeys tile = args.tiles[item / a.kv_heads];
    const int lane = int(threadIdx.x) % kLanes, slot = int(threadIdx.x) / kLanes;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();

    RawRow<kType> raw[kPairs][2] = {};
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
        const int key = 2 * (slot + n * kSlots);
        load_rows({kOfK ? args.k : args.v, int64_t(tile.row) + key, 1, head, tile.keys - key}, lane, raw[n]);
    }
    float largest = 0.0f;
    int replaced = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n) {
        float amax;
        replaced += replace_values(raw[n / 2][n % 2], a.saturate, amax);
        largest = fmaxf(largest, amax);
    }
    if (replaced && a.nonfinite) atomicAdd(a.nonfinite, uint32_t(replaced));
    const int exponent = distr_exponent(block_max(__float_as_uint(largest), &most));
    const float factor = power_of_two(-exponent);
    if (threadIdx.x == 0) {
        if (kOfK) {
            args.k_unit[item] = power_of_two(exponent);
        } else {
            args.v_log2[item] = float(exponent);
        }
    }
    uint8_t* const to = (kOfK ? args.k_tiles : args.v_tiles) + item * distr_tile_bytes(D);
    if constexpr (!kOfK) {
        constexpr int kChannels = distr_v_channels(D), kRowBytes = 2 * kChannels;
        const int piece = 8 * lane / kChannels, chunk = lane % (kChannels / 8);
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                const int key = 2 * (slot + n * kSlots) + p, half = key / kDistrHalfKeys, row = key % kDistrHalfKeys;
                float x[8];
                raw[n][p].widen(x);
                uint32_t w[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) w[j] = bits_of(__floats2half2_rn(x[2 * j] * factor, x[2 * j + 1] * factor));
                uint8_t* const at = to + ((half * (D / kChannels) + piece) * kDistrHalfKeys + row) * kRowBytes;
                *reinterpret_cast<uint4*>(at + 16 * distr_v_chunk(D, row, chunk)) = make_uint4(w[0], w[1], w[2], w[3]);
            }
        }
    } else {
#pragma unroll
        for (int n = 0; n < kPairs; ++n) {
            float x[8], y[8];
            raw[n][0].widen(x), raw[n][1].widen(y);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                by_channel[8 * lane + j][(slot + n * kSlots) ^ 2 * lane] =
                    bits_of(__floats2half2_rn(x[j] * factor, y[j] * factor));
            }
        }
        __syncthreads();
        for (int n = int(threadIdx.x); n < 2 * D * 8; n += kThreads) {
            const int half = n / (8 * D), channel = n / 8 % D, chunk = n % 8, swizzle = 2 * (channel / 8);
            uint4 w = *reinterpret_cast<const uint4*>(&by_channel[channel][(32 * half + 4 * chunk) ^ (swizzle & ~3)]);
            if (swizzle & 2) w = make_uint4(w.z, w.w, w.x, w.y);
            reinterpret_cast<uint4*>(to)[n] = w;
        }
    }
}

}  // namespace ta::cuda
