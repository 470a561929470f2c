// How the units of a call are cut into ranges: by their costs, so that ranges take equally long.
#pragma once

#include "kernels/cuda/any/decode/params.h"
#include "kernels/cuda/ptx/mma.cuh"

namespace ta::cuda {

inline constexpr uint32_t kAllLanes = 0xffffffffu;

// The costs of the units of each head. All units in their order, each as long as its cost, form a line. Ranges are cut on this
// line, and a unit belongs to the range in which it begins. If all heads have the same bits, a unit costs 1, and the place of a
// unit on the line is its number. The same in all lanes but for `upto`.
struct HeadCosts {
    int32_t upto;       // lane h: of heads 0 to h
    int32_t all, most;  // of all heads, of the dearest
    bool equal;

    // `head`: in lane h what p.a.heads has of head h, where heads may differ.
    __device__ static bool may_differ(const DecodeParams& p) { return p.a.heads != nullptr && p.a.kv_heads <= 32; }
    __device__ HeadCosts(const DecodeParams& p, const HeadArgs& head, int32_t pages, int lane)
        : upto(0), all(p.a.kv_heads), most(1), equal(true) {
        if (!may_differ(p) || pages < p.long_pages) return;
        const bool exists = lane < p.a.kv_heads;
        const int32_t bits = head.k_bits + head.v_bits, bits_of_first = __shfl_sync(kAllLanes, bits, 0);
        if (__all_sync(kAllLanes, !exists || bits == bits_of_first)) return;
        const int32_t cost = exists ? kCostOfPage + kCostOfBits * bits : 0;
        int32_t sum = cost;
#pragma unroll 1
        for (int h = 1; h < 32; h *= 2) {
            const int32_t other = __shfl_up_sync(kAllLanes, sum, h);
            if (lane >= h) sum += other;
        }
        const int32_t all_costs = __shfl_sync(kAllLanes, sum, 31);
        if (pages > INT32_MAX / all_costs) return;
        upto = sum, all = all_costs, equal = false;
        most = int32_t(__reduce_max_sync(kAllLanes, uint32_t(cost)));
    }

    // The place on the line of a unit, which is this page of `pages` of a (sequence, head).
    __device__ int32_t place(const DecodeParams& p, int32_t unit, int32_t seq, int32_t head, int32_t page,
                             int32_t pages) const {
        if (equal) return unit;
        const int32_t upto_head = __shfl_sync(kAllLanes, upto, head);
        const int32_t upto_before = head > 0 ? __shfl_sync(kAllLanes, upto, head - 1) : 0;
        return p.pages_before[seq] * all + upto_before * pages + page * (upto_head - upto_before);
    }

    // The first unit at place x or beyond it. x may differ between lanes.
    __device__ int32_t first_unit(const DecodeParams& p, int32_t x) const {
        if (equal) return x;
        int32_t seq = 0;
        for (int32_t n = p.a.batch; n > 1;) {
            const int32_t half = n / 2;
            if (p.pages_before[seq + half] * all <= x) seq += half;
            n -= half;
        }
        const int32_t before = p.pages_before[seq], pages = p.pages_before[seq + 1] - before, rest = x - before * all;
        int32_t head = 0, upto_before = 0, cost = 1;
        __syncwarp();
        for (int32_t h = 0; h < p.a.kv_heads; ++h) {
            const int32_t upto_head = __shfl_sync(kAllLanes, upto, h);
            if (upto_head * pages <= rest) {
                head = h + 1;
                upto_before = upto_head;
            } else if (head == h) {
                cost = upto_head - upto_before;
            }
        }
        return before * p.a.kv_heads + head * pages + (rest - upto_before * pages + cost - 1) / cost;
    }

  private:
    // Fitted to how long INT4 and INT2 pages take on an H200.
    static constexpr int32_t kCostOfPage = 4, kCostOfBits = 3;
};

// The page of its (sequence, head) that a unit is, and how many that has: none at the end. They may differ between lanes.
struct UnitPage {
    int32_t page = 0, pages;
    __device__ __forceinline__ UnitPage(const DecodeParams& p, int32_t unit) {
        int32_t seq = 0;
        for (int32_t n = p.a.batch; n > 1;) {
            const int32_t half = n / 2;
            if (p.pages_before[seq + half] * p.a.kv_heads <= unit) seq += half;
            n -= half;
        }
        const int32_t before = p.pages_before[seq];
        pages = p.pages_before[seq + 1] - before;
        if (pages > 0) page = (unit - before * p.a.kv_heads) % pages;
    }
};
// The first unit from this one on that begins a (sequence, head).
__device__ __forceinline__ int32_t next_segment(const DecodeParams& p, int32_t unit) {
    const UnitPage at(p, unit);
    return at.page > 0 ? unit + at.pages - at.page : unit;
}
// The unit nearest to this one that begins `range` pages, counted from the first of its (sequence, head), or the next of these.
__device__ __forceinline__ int32_t nearest_range(const DecodeParams& p, int32_t unit, int32_t range) {
    const UnitPage at(p, unit);
    const int32_t down = at.page % range, up = min(range - down, at.pages - at.page);
    return down < up ? unit - down : unit + up;
}

// A warp's view of the cut of the units: of CTAs on the line, and of the CTA's units.
struct DecodeShare {
    DecodeCut ctas;
    int32_t begin, end;  // units of this CTA
    int32_t of_warp;     // lane w: the first of warp w, the end for warps beyond those that have any

    // `parts`: calls may be of parts, each of which one warp takes alone. If there are enough of them, warps begin where
    // `range` pages do, but for the first one, which begins where its CTA does.
    __device__ DecodeShare(const DecodeParams& p, const HeadCosts& costs, int32_t pages, bool parts, int32_t range, int lane)
        : ctas(pages * costs.all, costs.most, p.ctas) {
        const int32_t cta = int32_t(blockIdx.x);
        const int32_t from = ctas.begin(min(cta, ctas.ranges.n)), to = ctas.begin(min(cta + 1, ctas.ranges.n));
        // Measured on an H200: with fewer ranges to a CTA than half of its warps, all warps are faster.
        if (2 * (to - from) < costs.most * range * p.warps.n) range = 1;
        const DecodeCut cut(to - from, costs.most * range, pages < p.long_pages ? p.warps_if_short : p.warps);
        // Spread, so that a segment that is as long as some warps' ranges is theirs alone.
        of_warp = costs.first_unit(p, from + cut.spread_begin(min(lane, cut.ranges.n)));
        if (parts && p.a.are_parts) {
            of_warp = next_segment(p, of_warp);
        } else if (range > 1 && lane > 0 && lane < cut.ranges.n) {
            // No warp is left without a unit: those of the line are a range apart, and none moves by more than half of one.
            of_warp = nearest_range(p, of_warp, range);
        }
        __syncwarp();
        begin = __shfl_sync(kAllLanes, of_warp, 0);
        end = __shfl_sync(kAllLanes, of_warp, 31);
    }
    __device__ int32_t warp_begin(int warp) const { return __shfl_sync(kAllLanes, of_warp, warp); }
    // The warp that has a unit of this CTA.
    __device__ int32_t warp_of(int32_t unit) const { return __popc(__ballot_sync(kAllLanes, of_warp <= unit)) - 1; }
};

}  // namespace ta::cuda
