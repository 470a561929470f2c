// Results and partial results: how a warp writes the rows of a segment that it has computed, and how partial results of a
// (sequence, head) are joined. In the order of the pages, so that results do not depend on timing.
#pragma once

#include "kernels/cuda/any/decode/mass.cuh"
#include "kernels/cuda/any/decode/output.cuh"

namespace ta::cuda {

// Writes words of the row 4 tile + lane % 4 of (s, head), of which `ml` is (maximum, l): o[k] are channels (D/8) (lane / 4) +
// 4 (first + k) .. + 3. Returns what it multiplies with, 0 if there is no such row.
template <int D, int N>
__device__ __forceinline__ float write_row(const DecodeParams& p, const SequenceArgs& s, int head, int tile, int first,
                                           const float4 (&o)[N], const float2& ml, int lane) {
    const AttendArgs& a = p.a;
    const int row = 4 * tile + lane % 4, r = lane / 4;
    if (row >= s.n_query * a.group) return 0.0f;
    const auto [token, q_head] = RowPlace(p, head, row);
    const int64_t at = s.row + token;
    const RowEnd end = end_row(a, ml.x, ml.y, q_head);
    uint8_t* to = output_row(a, at, q_head);
#pragma unroll
    for (int k = 0; k < N; ++k) store_word(to, a.out.dtype, D / 32 * r + first + k, scaled(o[k], end.factor));
    if (a.are_parts && r == 0 && first == 0) a.part_sums[at * a.kv_heads * a.group + q_head] = {ml.x, ml.y};
    if (a.lse && r == 0 && first == 0) a.lse[at * a.kv_heads * a.group + q_head] = end.lse;
    return end.factor;
}

// Word j of a tile of a partial result, and with it (maximum, l) of row 4 tile + i.
template <int D>
__device__ __forceinline__ uint8_t* partial_part(void* partial, int tile, int j) {
    return static_cast<uint8_t*>(partial) + (tile * (D / 32) + j) * kDecodePartBytes;
}
__device__ __forceinline__ float4* partial_word(uint8_t* part, int lane) {
    return reinterpret_cast<float4*>(part) + lane;
}
__device__ __forceinline__ float2* partial_ml(uint8_t* part, int i) {
    return reinterpret_cast<float2*>(reinterpret_cast<float4*>(part) + 32) + i;
}
__device__ __forceinline__ void store_part(uint8_t* part, const float4& o, float m, float l, int lane) {
    *partial_word(part, lane) = o;
    if (lane < 4) *partial_ml(part, lane) = make_float2(m, l);
}

// Partial results of a (sequence, head) in the order of its pages: at base + k * stride, but for number `other_index`.
struct PartialList {
    uint8_t* base;
    int64_t stride;
    uint8_t* other;
    int32_t other_index, count;

    __device__ __forceinline__ uint8_t* part(int32_t k) const { return k == other_index ? other : base + k * stride; }
};

// Word j of a tile's rows joined, by one warp.
struct JoinedPart {
    float4 o;
    float m, l;
};
template <int D>
__device__ __forceinline__ JoinedPart join_partials(const PartialList& list, int tile, int j, int lane) {
    constexpr int kAtOnce = 16;
    const int r = lane / 4, i = lane % 4;
    float m = kLowest, l = 0.0f;
    float4 o = {};
    for (int32_t first = 0; first < list.count; first += kAtOnce) {
        float2 ml[2];
        float4 x[kAtOnce];
        const auto part = [&](int32_t k) { return partial_part<D>(list.part(min(first + k, list.count - 1)), tile, j); };
#pragma unroll
        for (int k = 0; k < 2; ++k) ml[k] = load_partial(partial_ml(part(r + 8 * k), i));
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) x[k] = load_partial(partial_word(part(k), lane));  // all loads are under way at once
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
        o = scaled(o, keep);
        m = top;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            const float of_part = __shfl_sync(kAllLanes, weight[k / 8], k % 8 * 4 + i);
            o.x = fmaf(of_part, x[k].x, o.x);
            o.y = fmaf(of_part, x[k].y, o.y);
            o.z = fmaf(of_part, x[k].z, o.z);
            o.w = fmaf(of_part, x[k].w, o.w);
        }
    }
    return {o, m, l};
}

// Joins the partial results of the CTA's segments once all its warps have left theirs. Whole segments of a warp are written
// already. If several CTAs have parts of a (sequence, head), each leaves one partial result, and the last one joins them: for
// each word of a tile the warp that has it, so that warps wait for each other no more. `at` is the place of the CTA's first
// unit.
template <int D, int kTiles, bool kMass>
__device__ __forceinline__ void join_segments(const DecodeParams& p, const DecodeShare& share, const HeadCosts& costs,
                                              DecodeCursor at, uint8_t* rings, int64_t warp_stride, int lane) {
    constexpr int kPartialBytes = decode_partial_bytes(D, kTiles), kWords = D / 32;
    const int warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
    const int cta = int(blockIdx.x);
    auto* const cta_partials = reinterpret_cast<uint8_t*>(p.cta_partials);
    int task = warp;  // this warp's next one, counted from the segment's first
    __syncthreads();
    for (int32_t unit = share.begin; unit < share.end;) {
        const int32_t whole_end = unit + at.pages - at.page, end = min(whole_end, share.end);
        const bool before = at.page > 0, after = whole_end > end;  // other CTAs have parts
        const int32_t first = share.warp_of(unit), last = share.warp_of(end - 1);
        if (before || after || first != last) {
            const int tasks = min((at.s.n_query * p.a.group + 3) / 4, kTiles) * kWords;
            for (; task < tasks; task += warps) {
                const int tile = task / kWords, j = task % kWords;
                // A warp that had more to do left its part in global memory, the others in their rings.
                const bool had_more = share.warp_begin(last + 1) > end;
                const int32_t count = last - first + 1;
                PartialList list{rings + first * warp_stride, warp_stride,
                                 reinterpret_cast<uint8_t*>(p.warp_partials) + (int64_t(cta) * warps + last) * kPartialBytes,
                                 had_more ? count - 1 : -1, count};
                for (bool joined_ctas = false;; joined_ctas = true) {
                    const JoinedPart part = join_partials<D>(list, tile, j, lane);
                    if (joined_ctas || !(before || after)) {
                        [[maybe_unused]] const float factor =
                            write_row<D>(p, at.s, at.head, tile, j, {part.o}, {part.m, part.l}, lane);
                        if constexpr (kMass) {
                            add_shares<kTiles>(p, {at.s, at.head, tile, part.m, factor}, at.pages, j, kWords, lane);
                        }
                        break;
                    }
                    uint8_t* const own = cta_partials + (2 * cta + (before ? 0 : 1)) * int64_t(kPartialBytes);
                    store_part(partial_part<D>(own, tile, j), part.o, part.m, part.l, lane);
                    const auto cta_of = [&](int32_t page) {
                        return share.ctas.range_of(costs.place(p, unit - at.page + page, at.seq, at.head, page, at.pages));
                    };
                    const int32_t first_cta = cta_of(0), ctas = cta_of(at.pages - 1) - first_cta + 1;
                    __syncwarp();
                    uint32_t arrived = 0;  // the counter is 0 again after the last
                    if (lane == 0) {
                        __threadfence();
                        arrived = atomicInc(p.arrivals + first_cta * (kTiles * kWords) + task, uint32_t(ctas - 1));
                        __threadfence();
                    }
                    if (__shfl_sync(kAllLanes, arrived, 0) != uint32_t(ctas - 1)) break;
                    __syncwarp();
                    uint8_t* const base = cta_partials + 2 * first_cta * int64_t(kPartialBytes);
                    list = {base, 2 * int64_t(kPartialBytes), base + kPartialBytes, 0, ctas};
                }
            }
            task -= tasks;
        }
        unit = end;
        if (unit < share.end) at.next_segment(p);
    }
}

}  // namespace ta::cuda
