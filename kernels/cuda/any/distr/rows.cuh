// The groups of a block of query rows, those of a CPU, and the channels of q that stand for them. A CTA takes a block of one query
// head. Sums of projections run over rows in order, each addition rounded, so hashes have a CPU's bits.
#pragma once

#include "kernels/cuda/any/append/codec_rows.cuh"
#include "kernels/cuda/any/distr/distr.h"
#include "kernels/cuda/any/distr/keys.cuh"
#include "kernels/cuda/common/half2.cuh"

namespace ta::cuda {

inline constexpr int kDistrRowsThreads = 256;

template <int D>
struct DistrRowsMemory {
    alignas(16) float q[kDistrRows][D];
    alignas(16) float sign[kDistrRows][kDistrProjections];
    float factor[kDistrRows];  // 1 / q_unit
    uint32_t code[D];
    alignas(16) uint32_t key[D];
    uint8_t order[D];
};

static __device__ constexpr DistrSigns kSignsOnDevice = make_distr_signs();

template <int D>
__global__ void __launch_bounds__(kDistrRowsThreads) distr_rows_kernel(const __grid_constant__ DistrArgs args) {
    extern __shared__ __align__(16) uint8_t shared[];
    DistrRowsMemory<D>& memory = *reinterpret_cast<DistrRowsMemory<D>*>(shared);
    constexpr int kLanes = D / 8, kSlots = kDistrRowsThreads / kLanes;
    const AttendArgs& a = args.attend;
    const int q_heads = a.kv_heads * a.group, head = int(blockIdx.x) % q_heads, thread = int(threadIdx.x);
    const DistrRows block = args.blocks[int(blockIdx.x) / q_heads];
    const SequenceArgs s = a.sequences[block.sequence];
    const int rows = min(s.n_query - block.first_row, kDistrRows);
    const int64_t item = blockIdx.x;

    for (int n = thread; n < kDistrRows * kDistrProjections; n += kDistrRowsThreads) {
        memory.sign[n / kDistrProjections][n % kDistrProjections] =
            kSignsOnDevice.of_row[n / kDistrProjections] >> n % kDistrProjections & 1 ? -1.0f : 1.0f;
    }
    if (thread < D) memory.code[thread] = 0;
    const int lane = thread % kLanes, slot = thread / kLanes;
    int replaced = 0;
#pragma unroll 4
    for (int r = slot; r < kDistrRows; r += kSlots) {
        float x[1][8], amax[1];
        replaced +=
            read_rows<1>({a.q, int64_t(s.row) + block.first_row + r, 0, head, int(r < rows)}, lane, a.saturate, x, amax);
        float4* const to = reinterpret_cast<float4*>(&memory.q[r][8 * lane]);
        to[0] = make_float4(x[0][0], x[0][1], x[0][2], x[0][3]);
        to[1] = make_float4(x[0][4], x[0][5], x[0][6], x[0][7]);
#pragma unroll
        for (int h = 1; h < kLanes; h *= 2) amax[0] = fmaxf(amax[0], __shfl_xor_sync(kWholeWarp, amax[0], h));
        if (lane == 0) {
            const int exponent = distr_exponent(__float_as_uint(amax[0]));
            memory.factor[r] = power_of_two(-exponent);
            args.q_unit[item * kDistrRows + r] = power_of_two(exponent);
        }
    }
    if (replaced && a.nonfinite) atomicAdd(a.nonfinite, uint32_t(replaced));
    __syncthreads();

    // A thread has two channels and some of the projections. Rows that do not exist are zeros, which change no sum.
    constexpr int kSums = 2 * D * kDistrProjections / kDistrRowsThreads / 4;
    const int channel = 2 * (thread % (D / 2)), first = thread / (D / 2) * kSums;
    float sums[kSums][2] = {};
#pragma unroll 4
    for (int r = 0; r < kDistrRows; ++r) {
        const float2 x = *reinterpret_cast<const float2*>(&memory.q[r][channel]);
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
    __syncthreads();
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
        args.order[item * D + rank] = uint8_t(thread);
    }
    __syncthreads();

    // A warp takes every eighth row, a lane a pair of groups.
    const int size = args.group_size, pairs = distr_stored_groups(D, size) / 2, of_warp = thread % 32;
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
        for (int e = 0; e < 2; ++e) x[e] = channels[e] < 0 ? 0.0f : memory.q[row][channels[e]] * memory.factor[row];
        to[row * pairs + of_warp] = bits_of(__floats2half2_rn(x[0], x[1]));
    }
}

}  // namespace ta::cuda
