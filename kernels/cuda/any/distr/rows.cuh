// The groups of a block of query rows, those of a CPU, and the channels of q that stand for them. A CTA takes a block of one query
// head. Sums of projections run over rows in order, each addition rounded, so hashes have a CPU's bits.
#pragma once

#include "kernels/cuda/any/append/codec_rows.cuh"
#include "kernels/cuda/any/distr/distr.h"
#include "kernels/cuda/any/distr/keys.cuh"
#include "kernels/cuda/common/half2.cuh"

namespace ta::cuda {

inline constexpr int kDistrRowsThreads = 256;

template <int D, DType kType>
struct DistrRowsMemory {
    alignas(16) typename KeptValue<kType>::Word q[kDistrRows][D];
    alignas(16) float sign[kDistrRows][kDistrProjections];
    float factor[kDistrRows];  // 1 / q_unit
    uint32_t code[D];
    alignas(16) uint32_t key[D];
    uint8_t order[D];
};

static __device__ constexpr DistrSigns kSignsOnDevice = make_distr_signs();

// The rows that a CTA takes.
struct DistrRowsAt {
    int64_t item;       // of what is prepared for rows
    int64_t first_row;  // of q
    int head, rows;

    __device__ __forceinline__ explicit DistrRowsAt(const DistrArgs& args) : item(blockIdx.x) {
        const int q_heads = args.attend.kv_heads * args.attend.group;
        head = int(blockIdx.x) % q_heads;
        const DistrRows block = args.blocks[int(blockIdx.x) / q_heads];
        const SequenceArgs s = args.attend.sequences[block.sequence];
        first_row = int64_t(s.row) + block.first_row;
        rows = min(s.n_query - block.first_row, kDistrRows);
    }
};

// Rows as they are kept, and their units. A thread has 8 channels of each of its rows. Returns how many values were replaced.
template <int D, DType kType>
__device__ __forceinline__ int read_distr_rows(const DistrArgs& args, const DistrRowsAt& at,
                                               DistrRowsMemory<D, kType>& memory) {
    using Value = KeptValue<kType>;
    constexpr int kLanes = D / 8, kSlots = kDistrRowsThreads / kLanes;
    constexpr int kAtOnce = kDistrRows / kSlots < 4 ? kDistrRows / kSlots : 4;  // rows that a thread reads
    const AttendArgs& a = args.attend;
    const int thread = int(threadIdx.x), lane = thread % kLanes, slot = thread / kLanes;
    int replaced = 0;
#pragma unroll 1
    for (int first = slot; first < kDistrRows; first += kAtOnce * kSlots) {
        RawRow<kType> raw[kAtOnce] = {};
        float x[kAtOnce][8], amax[kAtOnce];
        const int count = (at.rows - first + kSlots - 1) / kSlots;
        load_rows({a.q, at.first_row + first, kSlots, at.head, count}, lane, raw);
        replaced += widen_rows(raw, a.saturate, x, amax);
#pragma unroll
        for (int p = 0; p < kAtOnce; ++p) {
            const int r = first + p * kSlots;
            if constexpr (kType == DType::kF32) {
                float4* const to = reinterpret_cast<float4*>(&memory.q[r][8 * lane]);
                to[0] = make_float4(x[p][0], x[p][1], x[p][2], x[p][3]);
                to[1] = make_float4(x[p][4], x[p][5], x[p][6], x[p][7]);
            } else {
                *reinterpret_cast<uint4*>(&memory.q[r][8 * lane]) =
                    make_uint4(Value::pack(x[p][0], x[p][1]), Value::pack(x[p][2], x[p][3]), Value::pack(x[p][4], x[p][5]),
                               Value::pack(x[p][6], x[p][7]));
            }
#pragma unroll
            for (int h = 1; h < kLanes; h *= 2) amax[p] = fmaxf(amax[p], __shfl_xor_sync(kWholeWarp, amax[p], h));
            if (lane == 0) {
                const int exponent = distr_exponent(__float_as_uint(amax[p]));
                memory.factor[r] = power_of_two(-exponent);
                args.q_unit[at.item * kDistrRows + r] = power_of_two(exponent);
            }
        }
    }
    return replaced;
}

// Sets the bits of a channel's code whose projections are positive; codes are 0 before. A thread has two channels and some of the
// projections. Rows that do not exist are zeros, which change no sum.
template <int D, DType kType>
__device__ __forceinline__ void project_distr_rows(DistrRowsMemory<D, kType>& memory) {
    using Value = KeptValue<kType>;
    constexpr int kSums = 2 * D * kDistrProjections / kDistrRowsThreads / 4;
    const int thread = int(threadIdx.x), channel = 2 * (thread % (D / 2)), first = thread / (D / 2) * kSums;
    float sums[kSums][2] = {};
#pragma unroll 4
    for (int r = 0; r < kDistrRows; ++r) {
        float2 x;
        if constexpr (kType == DType::kF32) {
            x = *reinterpret_cast<const float2*>(&memory.q[r][channel]);
        } else {
            const uint32_t two = *reinterpret_cast<const uint32_t*>(&memory.q[r][channel]);
            x = make_float2(Value::widen(two & 0xffff), Value::widen(two >> 16));
        }
#pragma unroll
        for (int n = 0; n < kSums; ++n) {
            const float sign = memory.sign[r][first + n];
            sums[n][0] = __fmaf_rn(sign, x.x, sums[n][0]);
            sums[n][1] = __fmaf_rn(sign, x.y, sums[n][1]);
        }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        uint32_t bits = 0;
#pragma unroll
        for (int n = 0; n < kSums; ++n) bits |= uint32_t(sums[n][e] > 0.0f) << (first + n);
        if (bits) atomicOr(&memory.code[channel + e], bits);
    }
}

// Orders the channels by their keys, in `memory` and in `to`. A thread counts the keys below its channel's.
template <int D, DType kType>
__device__ __forceinline__ void order_distr_channels(DistrRowsMemory<D, kType>& memory, uint8_t* to) {
    const int thread = int(threadIdx.x);
    if (thread < D) memory.key[thread] = distr_key(memory.code[thread], thread);
    __syncthreads();
    if (thread < D) {
        const uint32_t key = memory.key[thread];
        int rank = 0;
#pragma unroll 8
        for (int n = 0; n < D / 4; ++n) {
            const uint4 others = reinterpret_cast<const uint4*>(memory.key)[n];
            rank += int(others.x < key) + int(others.y < key) + int(others.z < key) + int(others.w < key);
        }
        memory.order[rank] = uint8_t(thread);
        to[rank] = uint8_t(thread);
    }
}

// Writes the sampled channel of each group, F16 in the row's unit. A warp takes every eighth row, a lane a pair of groups.
template <int D, DType kType>
__device__ __forceinline__ void write_distr_rows(const DistrArgs& args, int64_t item, const DistrRowsMemory<D, kType>& memory) {
    const int size = args.group_size, pairs = distr_stored_groups(D, size) / 2;
    const int thread = int(threadIdx.x), of_warp = thread % 32;
    if (of_warp >= pairs) return;
    auto* const to = reinterpret_cast<uint32_t*>(args.q_rows) + item * (kDistrRows * pairs);
    const auto find_channel = [&](int group) {  // -1: of none
        const int begin = group * size;
        return begin < D ? int(memory.order[begin + distr_sampled(min(size, D - begin))]) : -1;
    };
    const int channels[2] = {find_channel(2 * of_warp), find_channel(2 * of_warp + 1)};
#pragma unroll 4
    for (int row = thread / 32; row < kDistrRows; row += kDistrRowsThreads / 32) {
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            x[e] = channels[e] < 0 ? 0.0f : KeptValue<kType>::widen(memory.q[row][channels[e]]) * memory.factor[row];
        }
        to[row * pairs + of_warp] = bits_of(__floats2half2_rn(x[0], x[1]));
    }
}

template <int D, DType kType>
__global__ void __launch_bounds__(kDistrRowsThreads) distr_rows_kernel(const __grid_constant__ DistrArgs args) {
    extern __shared__ __align__(16) uint8_t shared[];
    auto& memory = *reinterpret_cast<DistrRowsMemory<D, kType>*>(shared);
    const DistrRowsAt at(args);
    const int thread = int(threadIdx.x);
    for (int n = thread; n < kDistrRows * kDistrProjections; n += kDistrRowsThreads) {
        memory.sign[n / kDistrProjections][n % kDistrProjections] =
            kSignsOnDevice.of_row[n / kDistrProjections] >> n % kDistrProjections & 1 ? -1.0f : 1.0f;
    }
    if (thread < D) memory.code[thread] = 0;
    const int replaced = read_distr_rows(args, at, memory);
    if (replaced && args.attend.nonfinite) atomicAdd(args.attend.nonfinite, uint32_t(replaced));
    __syncthreads();
    project_distr_rows(memory);
    __syncthreads();
    order_distr_channels(memory, args.order + at.item * D);
    __syncthreads();
    write_distr_rows(args, at.item, memory);
}

}  // namespace ta::cuda
