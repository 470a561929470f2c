// The results that a warp of the decode kernel writes at the end of a segment.
#pragma once

#include "kernels/cuda/any/decode/attend_page.cuh"
#include "kernels/cuda/any/decode/merge.cuh"

namespace ta::cuda {

// Writes the rows of a segment: results if it is the whole, all `pages`, of its (sequence, head), else a partial result to
// `partial`.
template <bool kMass, int D, int kTiles>
__device__ __forceinline__ void close_segment(const DecodeWarp<D, kTiles>& warp, int32_t pages, bool whole, void* partial) {
    using Rows = DecodeRows<D, kTiles>;
    constexpr int kWords = D / 32;
    const DecodeParams& p = warp.p;
    const DecodeSegment& seg = warp.seg;
    Rows& rows = warp.rows;
    const int lane = warp.lane;
    [[maybe_unused]] const int r = lane / 4, i = lane % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        if (4 * n >= seg.s.n_query * p.a.group) break;
        float l = rows.l[n];
#pragma unroll
        for (int h = 4; h <= 16; h *= 2) l += __shfl_xor_sync(kAllLanes, l, h);
        if constexpr (Rows::kTwoOrders) {  // o2 to the lanes that have these channels in o, two rows at a time
            auto* staging = reinterpret_cast<float*>(warp.memory.digits) + i % 2 * D;
            static_assert(2 * D * sizeof(float) <= sizeof(warp.memory.digits));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                __syncwarp();
#pragma unroll
                for (int c = 0; c < Rows::kOut2; ++c) {
                    if (i / 2 == half && Rows::kOut2 * r + c < D) staging[Rows::kOut2 * r + c] = rows.o2[n][c];
                }
                __syncwarp();
#pragma unroll
                for (int c = 0; c < Rows::kOut; ++c) {
                    if (i / 2 == half) rows.o[n][c] += staging[Rows::kOut * r + c];
                }
            }
            __syncwarp();
        }
        float4 o[kWords];
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            o[j] = make_float4(rows.o[n][4 * j], rows.o[n][4 * j + 1], rows.o[n][4 * j + 2], rows.o[n][4 * j + 3]);
        }
        if (whole) {
            SequenceArgs s = seg.s;
            if (p.a.are_parts) s.row = seg.seq;
            [[maybe_unused]] const float factor = write_row<D>(p, s, seg.head, n, 0, o, {rows.m[n], l}, lane);
            if constexpr (kMass) add_shares<kTiles>(p, {seg.s, seg.head, n, rows.m[n], factor}, pages, 0, 1, lane);
        } else {
#pragma unroll
            for (int j = 0; j < kWords; ++j) store_part(partial_part<D>(partial, n, j), o[j], rows.m[n], l, lane);
        }
    }
}

}  // namespace ta::cuda
