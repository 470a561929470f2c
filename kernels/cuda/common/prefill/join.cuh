// Tiles whose pages are split: each part leaves what its warps have in memory, and the warp that comes last joins them.
#pragma once

#include "kernels/cuda/common/prefill/parts.h"
#include "kernels/cuda/common/prefill/rows.cuh"

namespace ta::cuda::prefill {

// `warp`: which 16 of the tile's rows these are, of kWarps. False: others will come. True: o, the sums and the references are now those of all parts, added
// in their order, whoever comes last.
template <int D, int kWarps, class Rows>
TA_DEVICE bool join_parts(PrefillSchedule* schedule, uint8_t* workspace, const Tile& tile, int warp, int lane, Rows& rows,
                          float (&o)[D / 2]) {
    constexpr int kSums = D / 8;
    const int parts = tile.rows.parts, first = tile.rows.first_slot + tile.head * parts;
    const auto place = [&](int part) {
        return reinterpret_cast<float4*>(workspace + (int64_t(first + part) * kWarps + warp) * part_bytes(D)) + lane;
    };
    float4* const to = place(tile.rows.part);
#pragma unroll
    for (int n = 0; n < kSums; ++n) __stcg(to + 32 * n, make_float4(o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]));
    __stcg(to + 32 * kSums, make_float4(rows.sums.l[0], rows.sums.l[1], rows.reference[0], rows.reference[1]));
    __threadfence();
    __syncwarp();
    uint32_t* const arrivals =
        reinterpret_cast<uint32_t*>(reinterpret_cast<PrefillTile*>(schedule + 1) + __ldg(&schedule->tiles)) +
        int64_t(first) * kWarps + warp;
    int before = 0;
    if (lane == 0) before = int(atomicAdd(arrivals, 1u));
    if (__shfl_sync(~0u, before, 0) < parts - 1) return false;
    __syncwarp();
    __threadfence();
    if (lane == 0) *arrivals = 0;
    float m[2] = {kNever, kNever}, l[2] = {};
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
        const float4 s = __ldcg(place(part) + 32 * kSums);
        m[0] = fmaxf(m[0], s.z), m[1] = fmaxf(m[1], s.w);
    }
#pragma unroll
    for (int n = 0; n < D / 2; ++n) o[n] = 0.0f;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
        const float4* const from = place(part);
        const float4 s = __ldcg(from + 32 * kSums);
        const float factor[2] = {exp2_approx(s.z - m[0]), exp2_approx(s.w - m[1])};
        l[0] = fmaf(s.x, factor[0], l[0]), l[1] = fmaf(s.y, factor[1], l[1]);
#pragma unroll
        for (int n = 0; n < kSums; ++n) {
            const float4 x = __ldcg(from + 32 * n);
            o[4 * n] = fmaf(x.x, factor[0], o[4 * n]), o[4 * n + 1] = fmaf(x.y, factor[0], o[4 * n + 1]);
            o[4 * n + 2] = fmaf(x.z, factor[1], o[4 * n + 2]), o[4 * n + 3] = fmaf(x.w, factor[1], o[4 * n + 3]);
        }
    }
    rows.sums.l[0] = l[0], rows.sums.l[1] = l[1];
    rows.reference[0] = m[0], rows.reference[1] = m[1];
    return true;
}

}  // namespace ta::cuda::prefill
