// From O to results: what the prefill kernel does at the end of a tile.
#pragma once

#include "kernels/cuda/sm90/prefill/softmax.cuh"

namespace ta::cuda::prefill {

template <typename T, int N>
TA_DEVICE void store_channels(T* to, const float (&x)[N]) {
    constexpr int kPer = 16 / sizeof(T);
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
        for (int n = 0; n < N; n += kPer) {
            uint4 raw;
            T* values = reinterpret_cast<T*>(&raw);
#pragma unroll
            for (int k = 0; k < kPer; ++k) values[k] = T(x[n + k]);
            *reinterpret_cast<uint4*>(to + n) = raw;
        }
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) to[n] = T(x[n]);
    }
}

// 16-bit rows that lie on 16 bytes, eight of a warp, by way of shared memory: whole lines go out instead of 16 bytes of each of
// 16. x: channels of a lane's row, [e][j]; `exists`: bit 4 r is row r's; `offset` is that of the lane's row. `staging` has room
// for eight rows.
template <int D, typename T>
TA_DEVICE void store_eight_rows(T* out, int64_t offset, uint32_t exists, const float (&x)[2][D / 8], uint8_t* staging,
                                int lane) {
    constexpr int kChunks = D / 8, kAtOnce = 32 / kChunks;  // of a row; rows
    // Where no two of eight lanes use a bank: neither when four lanes write a row, nor when a row is read.
    const auto place = [&](int row, int chunk) {
        return reinterpret_cast<uint4*>(staging) + row * kChunks + (chunk ^ row ^ (chunk >> 3) * 2);
    };
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int n = 0; n < D / 64; ++n) {
            uint4 raw;
            T* values = reinterpret_cast<T*>(&raw);
#pragma unroll
            for (int c = 0; c < 8; ++c) values[c] = T(x[e][8 * n + c]);
            *place(lane / 4, out_octant(lane & 3, e) * (D / 64) + n) = raw;
        }
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; n += kAtOnce) {
        const int row = n + lane / kChunks, chunk = lane % kChunks;
        const int64_t to = __shfl_sync(~0u, offset, 4 * row);
        if (exists >> (4 * row) & 1) *reinterpret_cast<uint4*>(out + to + 8 * chunk) = *place(row, chunk);
    }
    __syncwarp();
}

// O / l and LSE of a lane's two rows. `staging` is the warp's part of Q, which is done with.
template <int D>
TA_DEVICE void finish_rows(const AttendArgs& args, const Tile& tile, int row_in_tile, int lane, const RowInfo* info,
                           const LaneRows& rows, const float (&o)[D / 2], uint8_t* staging) {
    constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f, kUnit = 255.0f * kSumUnit * kOutUnit;
    const int i = lane & 3;
    const bool whole_lines = args.out.dtype != DType::kF32 && reinterpret_cast<uintptr_t>(args.out.data) % 16 == 0 &&
                             (args.out.stride_row | args.out.stride_head) % 8 == 0;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const int row = tile.rows.first_row + row_in_tile + 8 * which;
        float l = quad_sum(rows.sums.l[which]);  // times kUnit / 2^m
        const int head = tile.head * args.group + row % args.group;
        const bool exists = row < tile.rows.n_query * args.group;
        // Score of the row = what P carries + shift; with softcap the offset is in the scores already.
        const float shift = args.softcap > 0.0f ? 0.0f : info[8 * which].bias;
        float m = rows.reference[which], factor = kSumUnit;
        if (args.sink && exists) {
            const float sink = args.sink[head] * kLog2e - shift, larger = fmaxf(m, sink), down = exp2_approx(m - larger);
            l = l * down + kUnit * exp2_approx(sink - larger);
            factor *= down;
            m = larger;
        }
        const float norm = l > 0.0f ? factor / l : 0.0f;
        float x[2][D / 8];
#pragma unroll
        for (int n = 0; n < D / 4; ++n) x[n % 2][n / 2] = o[n / 2 * 4 + 2 * which + n % 2] * norm;
        const int64_t offset = row_offset(args, args.out, tile, row);
        const uint32_t rows_there = __ballot_sync(~0u, exists);
        if (whole_lines && args.out.dtype == DType::kF16) {
            store_eight_rows<D>(static_cast<__half*>(args.out.data), offset, rows_there, x, staging, lane);
        } else if (whole_lines) {
            store_eight_rows<D>(static_cast<__nv_bfloat16*>(args.out.data), offset, rows_there, x, staging, lane);
        }
        if (!exists) continue;
#pragma unroll
        for (int e = 0; e < 2 && !whole_lines; ++e) {
            const int64_t to = offset + out_octant(i, e) * (D / 8);
            if (args.out.dtype == DType::kF16) {
                store_channels(static_cast<__half*>(args.out.data) + to, x[e]);
            } else if (args.out.dtype == DType::kBf16) {
                store_channels(static_cast<__nv_bfloat16*>(args.out.data) + to, x[e]);
            } else {
                store_channels(static_cast<float*>(args.out.data) + to, x[e]);
            }
        }
        if (args.lse && i == 0) {
            const float lse = (m + log2f(l) - log2f(kUnit) + shift) * kLn2;
            args.lse[int64_t(tile.rows.row + row / args.group) * (args.kv_heads * args.group) + head] =
                l > 0.0f ? lse : -INFINITY;
        }
    }
}

}  // namespace ta::cuda::prefill
