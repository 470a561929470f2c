// From O to results: what the prefill kernel does at the end of a tile.
#pragma once

#include "kernels/cuda/common/prefill/query.cuh"

namespace ta::cuda::prefill {

template <typename T, int N>
TA_DEVICE void store_channels(T* to, const float (&x)[N]) {
    constexpr int kPer = 16 / sizeof(T);
    if (N % kPer == 0 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
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
// 16. x: channels of a lane's row, [e][j]; `to` is that row's place in global memory, 0: it has none. `staging` has room for
// eight rows.
template <int D, typename T>
TA_DEVICE void store_eight_rows(uint64_t to, const float (&x)[2][D / 8], uint8_t* staging, int lane) {
    constexpr int kChunks = D / 8, kAtOnce = 32 / kChunks;  // of a row; rows
    // A place that keeps each eight lanes on distinct banks: both when four lanes write a row, and when a row is read.
    const auto place = [](int row, int chunk) { return chunk ^ row ^ (chunk >> 3) * 2; };
    const int row = lane / 4, first = place(row, out_octant(lane & 3, 0) * (D / 64));
    uint8_t* const mine = staging + row * kChunks * 16;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int n = 0; n < D / 64; ++n) {
            uint4 raw;
            T* values = reinterpret_cast<T*>(&raw);
#pragma unroll
            for (int c = 0; c < 8; ++c) values[c] = T(x[e][8 * n + c]);
            *reinterpret_cast<uint4*>(mine + 16 * (first ^ (e * (D / 64) + n))) = raw;
        }
    }
    __syncwarp();
    const int behind = lane / kChunks, chunk = lane % kChunks, at = place(behind, chunk);
    const uint8_t* const from = staging + behind * kChunks * 16;
#pragma unroll
    for (int n = 0; n < 8; n += kAtOnce) {
        const uint64_t line = __shfl_sync(~0u, to, 4 * (n + behind));
        const uint4 raw = *reinterpret_cast<const uint4*>(from + n * kChunks * 16 + 16 * (at ^ n));
        if (line != 0) {
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(line + 16 * uint32_t(chunk)), "r"(raw.x), "r"(raw.y),
                         "r"(raw.z), "r"(raw.w)
                         : "memory");
        }
    }
    __syncwarp();
}

// O / l and LSE of a lane's two rows. `staging` is the warp's part of Q, which is done with.
template <int D, class Rows>
TA_DEVICE void finish_rows(const AttendArgs& args, const Tile& tile, int row_in_tile, int lane, const RowInfo* info,
                           const Rows& rows, const float (&o)[D / 2], uint8_t* staging) {
    constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f, kUnit = 255.0f * kSumUnit * kOutUnit;
    const int i = lane & 3;
    constexpr bool kMayBeWhole = D % 64 == 0;
    const bool whole_lines = kMayBeWhole && args.out.dtype != DType::kF32 &&
                             reinterpret_cast<uintptr_t>(args.out.data) % 16 == 0 &&
                             (args.out.stride_row | args.out.stride_head) % 8 == 0;
    float l[2], m[2], shift[2], norm[2];
    int64_t offset[2];
    bool exists[2];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const RowPlace at(args, tile, row_in_tile + 8 * which);
        exists[which] = at.token < tile.rows.n_query;
        offset[which] = at.offset(args.out, tile);
        l[which] = quad_sum(rows.sums.l[which]);  // times kUnit / 2^m
        // Score of the row = what P carries + shift; with softcap the offset is in the scores already.
        shift[which] = args.softcap > 0.0f ? 0.0f : info[8 * which].bias;
        m[which] = rows.reference[which];
        float factor = kSumUnit;
        if (args.sink && exists[which]) {
            const float sink = fminf(fmaxf(args.sink[at.head] * kLog2e - shift[which], kNever), -kNever);
            const float larger = fmaxf(m[which], sink), down = exp2_approx(m[which] - larger);
            l[which] = l[which] * down + kUnit * exp2_approx(sink - larger);
            factor *= down;
            m[which] = larger;
        }
        norm[which] = l[which] > 0.0f ? factor * reciprocal(l[which]) : 0.0f;
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        float x[2][D / 8];
#pragma unroll
        for (int n = 0; n < D / 4; ++n) x[n % 2][n / 2] = o[n / 2 * 4 + 2 * which + n % 2] * norm[which];
        if constexpr (kMayBeWhole)
            if (whole_lines) {
                const uint64_t to = exists[which] ? __cvta_generic_to_global(args.out.data) + 2 * uint64_t(offset[which]) : 0;
                if (args.out.dtype == DType::kF16) {
                    store_eight_rows<D, __half>(to, x, staging, lane);
                } else {
                    store_eight_rows<D, __nv_bfloat16>(to, x, staging, lane);
                }
            }
        if (!exists[which]) continue;
#pragma unroll
        for (int e = 0; e < 2 && !whole_lines; ++e) {
            const int64_t to = offset[which] + out_octant(i, e) * (D / 8);
            if (args.out.dtype == DType::kF16) {
                store_channels(static_cast<__half*>(args.out.data) + to, x[e]);
            } else if (args.out.dtype == DType::kBf16) {
                store_channels(static_cast<__nv_bfloat16*>(args.out.data) + to, x[e]);
            } else {
                store_channels(static_cast<float*>(args.out.data) + to, x[e]);
            }
        }
        float* const to_lse = args.lse ? args.lse : args.lse_of_o;
        if (to_lse && i == 0) {
            const RowPlace at(args, tile, row_in_tile + 8 * which);
            const float lse = (m[which] + log2f(l[which]) - log2f(kUnit) + shift[which]) * kLn2;
            to_lse[int64_t(tile.rows.row + at.token) * (args.kv_heads * args.group) + at.head] =
                l[which] > 0.0f ? lse : -INFINITY;
        }
    }
}

}  // namespace ta::cuda::prefill
