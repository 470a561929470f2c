// Results and partial results: what a warp does with the rows of a segment that it has worked on, and how partial results of a
// (sequence, head) are joined. In the order of the pages, so that results do not depend on timing.
#pragma once

#include "kernels/cuda/decode_output.cuh"

namespace ta::cuda {

// Writes words of the row 4 tile + lane % 4 of (s, head): o[k] are channels (D/8) (lane / 4) + 4 (first + k) .. + 3.
template <int D, int N>
__device__ __forceinline__ void write_row(const AttendArgs& a, const SequenceArgs& s, int head, int tile, int first,
                                          const float4 (&o)[N], float m, float l, int lane) {
    const int row = 4 * tile + lane % 4, r = lane / 4;
    if (row >= s.n_query * a.group) return;
    const int q_head = head * a.group + row % a.group;
    const int64_t at = s.row + row / a.group;
    const RowEnd end = end_row(a, m, l, q_head);
    uint8_t* to = output_row(a, at, q_head);
#pragma unroll
    for (int k = 0; k < N; ++k) store_word(to, a.out.dtype, D / 32 * r + first + k, scaled(o[k], end.factor));
    if (a.lse && r == 0 && first == 0) a.lse[at * a.kv_heads * a.group + q_head] = end.lse;
}

// A word of a partial result, and (maximum, l) of a row.
template <int D>
__device__ __forceinline__ float4* partial_word(void* partial, int tile, int j, int lane) {
    return static_cast<float4*>(partial) + (tile * (D / 32) + j) * 32 + lane;
}
template <int D, int kTiles>
__device__ __forceinline__ float2* partial_ml(void* partial, int row) {
    return reinterpret_cast<float2*>(partial_word<D>(partial, kTiles, 0, 0)) + row;
}

// Partial results of a (sequence, head) in the order of its pages: at base + k * stride, but for number `other_index`.
struct PartialList {
    uint8_t* base;
    int64_t stride;
    uint8_t* other;
    int32_t other_index, count;

    __device__ __forceinline__ uint8_t* part(int32_t k) const { return k == other_index ? other : base + k * stride; }
};

// In shared or global memory. Written by other SMs, perhaps: not from L1.
__device__ __forceinline__ float4 load_partial(const float4* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ float2 load_partial(const float2* p) {
    float2 v;
    asm volatile("ld.relaxed.gpu.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}

// Joins word j of a tile's rows by one warp, and leaves it in `to` or, without one, writes the results.
template <int D, int kTiles>
__device__ __noinline__ void join_partials(const DecodeParams& p, const SequenceArgs& s, int head, const PartialList& list,
                                           uint8_t* to, int tile, int j, int lane) {
    constexpr int kAtOnce = 16;
    const int r = lane / 4, i = lane % 4;
    float m = kLowest, l = 0.0f;
    float4 o[1] = {};
    for (int32_t first = 0; first < list.count; first += kAtOnce) {
        float2 ml[2];
        float4 x[kAtOnce];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            ml[k] = load_partial(partial_ml<D, kTiles>(list.part(min(first + r + 8 * k, list.count - 1)), 4 * tile + i));
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {  // no branch, so that all loads are under way at once
            x[k] = load_partial(partial_word<D>(list.part(min(first + k, list.count - 1)), tile, j, lane));
        }
        float top = m, weight[2], sum = 0.0f;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            if (first + r + 8 * k >= list.count) ml[k] = make_float2(-kInfinity, 0.0f);
            top = fmaxf(top, ml[k].x);
        }
#pragma unroll
        for (int h = 4; h <= 16; h *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, h));
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            weight[k] = ex2(ml[k].x - top);
            sum = fmaf(weight[k], ml[k].y, sum);
        }
#pragma unroll
        for (int h = 4; h <= 16; h *= 2) sum += __shfl_xor_sync(kAllLanes, sum, h);
        const float keep = ex2(m - top);
        l = fmaf(l, keep, sum);
        o[0] = scaled(o[0], keep);
        m = top;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const float of_part = __shfl_sync(kAllLanes, weight[k / 8], k % 8 * 4 + i);
            o[0].x = fmaf(of_part, x[k].x, o[0].x);
            o[0].y = fmaf(of_part, x[k].y, o[0].y);
            o[0].z = fmaf(of_part, x[k].z, o[0].z);
            o[0].w = fmaf(of_part, x[k].w, o[0].w);
        }
    }
    if (!to) {
        write_row<D>(p.a, s, head, tile, j, o, m, l, lane);
        return;
    }
    *partial_word<D>(to, tile, j, lane) = o[0];
    if (j == 0 && r == 0) *partial_ml<D, kTiles>(to, 4 * tile + i) = make_float2(m, l);
}

// What a CTA knows of the cut of the units, to find who has the parts of a segment.
struct DecodeShare {
    DecodeCut ctas, warps;
    int32_t begin, end;  // units of this CTA
};

// Joins the partial results of the CTA's segments once all its warps have left theirs. Whole segments of a warp are written already. Of
// a (sequence, head) that several CTAs have parts of, each leaves one partial result, and the last to do so joins them. `at` is the
// place of the CTA's first unit, `last` the CTA's shared memory.
template <int D, int kTiles>
__device__ __forceinline__ void join_segments(const DecodeParams& p, const DecodeShare& share, DecodeCursor at, uint8_t* rings,
                                              int64_t warp_stride, uint32_t* last, int lane) {
    constexpr int kPartialBytes = decode_partial_bytes(D, kTiles), kWords = D / 32;
    const int warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
    const int cta = int(blockIdx.x);
    auto* const cta_partials = reinterpret_cast<uint8_t*>(p.cta_partials);
    int task = 0;  // in turn to the CTA's warps
    const auto join = [&](const DecodeCursor& c, const PartialList& list, uint8_t* to) {
        const int tiles = min((c.s.n_query * p.a.group + 3) / 4, kTiles);
        for (int n = 0; n < tiles * kWords; ++n) {
            if (task == warp) join_partials<D, kTiles>(p, c.s, c.head, list, to, n / kWords, n % kWords, lane);
            if (++task == warps) task = 0;
        }
    };
    __syncthreads();
    DecodeCursor shared[2];     // parts of (sequence, head)s of several CTAs: the CTA's first segment and its last
    int32_t shared_unit[2];     // the first unit of those
    bool is_shared[2] = {false, false};
    for (int32_t unit = share.begin; unit < share.end;) {
        const int32_t whole_end = unit + at.pages - at.page, end = min(whole_end, share.end);
        const bool before = at.page > 0, after = whole_end > end;  // other CTAs have parts
        const int32_t first = share.warps.range_of(unit - share.begin), last_warp = share.warps.range_of(end - 1 - share.begin);
        if (before || after) {
            const int k = before ? 0 : 1;
            is_shared[k] = true;
            shared[k] = at;
            shared_unit[k] = unit - at.page;
        }
        if (before || after || first != last_warp) {
            // A warp that had more to do left its part in global memory, the others in their rings.
            const bool had_more = share.warps.begin(last_warp + 1) > end - share.begin;
            auto* const other = reinterpret_cast<uint8_t*>(p.warp_partials) + (int64_t(cta) * warps + last_warp) * kPartialBytes;
            const int32_t count = last_warp - first + 1;
            join(at, {rings + first * warp_stride, warp_stride, other, had_more ? count - 1 : -1, count},
                 before || after ? cta_partials + (2 * cta + (before ? 0 : 1)) * int64_t(kPartialBytes) : nullptr);
        }
        unit = end;
        if (unit < share.end) at.next_segment(p);
    }
    if (!is_shared[0] && !is_shared[1]) return;
    __threadfence();
    __syncthreads();
    PartialList lists[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        if (!is_shared[k]) continue;
        const int32_t first = share.ctas.range_of(shared_unit[k]);
        const int32_t count = share.ctas.range_of(shared_unit[k] + shared[k].pages - 1) - first + 1;
        uint8_t* const base = cta_partials + 2 * first * int64_t(kPartialBytes);
        lists[k] = {base, 2 * int64_t(kPartialBytes), base + kPartialBytes, 0, count};
        // The counter is 0 again after the last of them.
        if (threadIdx.x == 0) last[k] = atomicInc(p.arrivals + first, uint32_t(count - 1)) == uint32_t(count - 1);
    }
    __threadfence();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        if (is_shared[k] && last[k]) join(shared[k], lists[k], nullptr);
    }
}

}  // namespace ta::cuda
