// The attention that pages get. A warp writes log2 of each row's sum of weights over a page, which is independent of maxima that
// change later; the warp that writes the row's result knows the sum of all of them, and turns them into shares.
#pragma once

#include "kernels/cuda/any/decode/launch.h"
#include "kernels/cuda/any/decode/output.cuh"

namespace ta::cuda {

// The place in DecodeMass::page_lse of page 0 of a (sequence, head), in pages.
__device__ __forceinline__ uint32_t mass_place(const DecodeParams& p, const SequenceArgs& s, int head) {
    return uint32_t(head) * uint32_t(p.mass.entries) + uint32_t(s.first_entry);
}

__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The rows' weights in the page at `place` are `sum`, over all lanes, times 2^m.
template <DecodeKind kKind, int kTiles>
__device__ __forceinline__ void leave_page_lse(const DecodeParams& p, uint32_t place, const float (&m)[kTiles],
                                               const float (&sum)[kTiles], int lane) {
    if constexpr (kKind != kPlain) {
        if (!p.mass.page_lse) return;
        float* const to = p.mass.page_lse + uint64_t(place) * (4 * kTiles) + lane;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            float all = sum[n];
#pragma unroll
            for (int h = 4; h <= 16; h *= 2) all += __shfl_xor_sync(kAllLanes, all, h);
            if (lane < 4) to[4 * n] = m[n] + lg2(all);
        }
    }
}

// The rows of a tile that a warp has written the results of. A lane knows row lane % 4.
struct WrittenRows {
    const SequenceArgs& s;
    int head, tile;
    float m;       // maximum
    float factor;  // that O was multiplied with
};

// Adds the shares that the `pages` pages of a (sequence, head) have in a tile's rows to the pages' sums. The warp does chunk
// `first` of 32 pages and every `step`th after it. Other warps and CTAs may have left what is read; the caller has
// waited for them.
template <int kTiles>
__device__ __forceinline__ void add_shares(const DecodeParams& p, const WrittenRows& rows, int32_t pages, int first, int step,
                                           int lane) {
    constexpr int kAtOnce = 8;
    if (!p.mass.page_lse) return;
    const SequenceArgs& s = rows.s;
    const float lse = rows.m - lg2(rows.factor);  // infinite where there is no row or no key: no share of any page
    float of_row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of_row[i] = __shfl_sync(kAllLanes, lse, i);
    const uint32_t skipped = uint32_t(first_page(p.a, s, {}));
    const auto* from =
        reinterpret_cast<const float4*>(p.mass.page_lse) + uint64_t(mass_place(p, s, rows.head) + skipped) * kTiles + rows.tile;
    uint64_t* const weight = p.mass.weight + s.first_entry + skipped;
#pragma unroll 1
    for (int32_t page = 32 * first + lane; page < pages;) {
        float4 x[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {  // all loads are under way at once
            x[k] = load_partial(from + uint64_t(min(page + 32 * step * k, pages - 1)) * kTiles);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k, page += 32 * step) {
            const float share =
                ex2(x[k].x - of_row[0]) + ex2(x[k].y - of_row[1]) + ex2(x[k].z - of_row[2]) + ex2(x[k].w - of_row[3]);
            if (page < pages && share > 0.0f) {
                const uint64_t units = __float2ull_rn(fminf(share, 4.0f) * (1.0f / kMassUnit));
                asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(weight + page), "l"(units) : "memory");
            }
        }
    }
}

}  // namespace ta::cuda
