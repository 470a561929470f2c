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
__device__ __forceinline__ void join_partials(const DecodeParams& p, const SequenceArgs& s, int head, const PartialList& list,
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
    // (sequence, head)s that other CTAs have parts of too: that of the CTA's first segment and that of its last.
    struct Shared {
        DecodeCursor at;
        int32_t unit;  // the first
        bool exists;
    };
    Shared shared_before{}, shared_after{};
    const auto ctas_of = [&](const Shared& x, int32_t* count) {  // the first, and how many have a part
        const int32_t first = share.ctas.range_of(x.unit);
        *count = share.ctas.range_of(x.unit + x.at.pages - 1) - first + 1;
        return first;
    };
    __syncthreads();
    // One loop over the segments and then over the shared ones, so that the code is there, and fetched, but once.
    DecodeCursor c = at;
    int32_t unit = share.begin;
    int of_shared = -1;
    while (unit < share.end) {
        PartialList list;
        uint8_t* to = nullptr;
        bool wanted = true;
        int32_t end = unit;
        if (of_shared < 0) {
            const int32_t whole_end = unit + c.pages - c.page;
            end = min(whole_end, share.end);
            const bool before = c.page > 0, after = whole_end > end;  // other CTAs have parts
            const int32_t first = share.warps.range_of(unit - share.begin);
            const int32_t last_warp = share.warps.range_of(end - 1 - share.begin);
            if (before || after) {
                (before ? shared_before : shared_after) = {c, unit - c.page, true};
                to = cta_partials + (2 * cta + (before ? 0 : 1)) * int64_t(kPartialBytes);
            }
            wanted = before || after || first != last_warp;
            // A warp that had more to do left its part in global memory, the others in their rings.
            const bool had_more = share.warps.begin(last_warp + 1) > end - share.begin;
            const int32_t count = last_warp - first + 1;
            list = {rings + first * warp_stride, warp_stride,
                    reinterpret_cast<uint8_t*>(p.warp_partials) + (int64_t(cta) * warps + last_warp) * kPartialBytes,
                    had_more ? count - 1 : -1, count};
        } else if (of_shared < 2) {
            const Shared x = of_shared == 0 ? shared_before : shared_after;
            wanted = x.exists && last[of_shared];
            c = x.at;
            int32_t count;
            const int32_t first = ctas_of(x, &count);
            uint8_t* const base = cta_partials + 2 * first * int64_t(kPartialBytes);
            list = {base, 2 * int64_t(kPartialBytes), base + kPartialBytes, 0, count};
        } else {
            break;
        }
        if (wanted) {
            const int tiles = min((c.s.n_query * p.a.group + 3) / 4, kTiles);
            for (int n = 0; n < tiles * kWords; ++n) {
                if (task == warp) join_partials<D, kTiles>(p, c.s, c.head, list, to, n / kWords, n % kWords, lane);
                if (++task == warps) task = 0;
            }
        }
        if (of_shared >= 0) {
            ++of_shared;
        } else if (end < share.end) {
            unit = end;
            c.next_segment(p);
        } else {
            if (!shared_before.exists && !shared_after.exists) return;
            __threadfence();
            __syncthreads();
            const Shared x = threadIdx.x == 0 ? shared_before : shared_after;
            if (threadIdx.x < 2 && x.exists) {
                int32_t count;
                const int32_t first = ctas_of(x, &count);
                // The counter is 0 again after the last of them.
                last[threadIdx.x] = atomicInc(p.arrivals + first, uint32_t(count - 1)) == uint32_t(count - 1);
            }
            __threadfence();
            __syncthreads();
            of_shared = 0;
        }
    }
}

}  // namespace ta::cuda
