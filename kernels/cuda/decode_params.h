// What the decode kernels take beside the call itself, and how their work is cut. Host and device.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_args.h"

namespace ta::cuda {

inline constexpr int kDecodeRows = 16;        // query rows (query tokens x group) of a sequence and kv head at most
inline constexpr int kDecodeMaxInFlight = 4;  // pieces of one warp

inline constexpr int kQueryWarps = 4;  // of a CTA of the query kernel
inline constexpr int kQueryRows = 1;   // of each of its warps: the fewer, the sooner they are done
inline constexpr int kMergeWarps = 8;  // of a CTA of the merge kernel

// Warps of a CTA that a kernel may be launched with: what its registers allow.
TA_HD constexpr int decode_max_warps(int head_dim, int tiles) {
    return tiles == 1 && head_dim <= 128 ? 12 : 8;
}

// A unit of work is one page of one kv head of one sequence; all units of a call, ordered by sequence, head and page, are cut into
// equal contiguous ranges, at most one per warp. A segment is the part of one (sequence, head) within a range. A segment that is not the
// whole of its (sequence, head) leaves a partial result in slot range + sequence * kv_heads + head: both only grow along the
// units, and each new segment raises one of them, so no two segments share a slot. There are less than 2^31 units.
struct DecodeParams {
    AttendArgs a;
    const int32_t* pages_before;  // a.pages_before, or windowed_pages
    int32_t* windowed_pages;      // [batch + 1] the same for the pages within the window; nullptr without one
    uint32_t* query_codes;        // [batch, kv_heads, row_capacity, head_dim] stage-1 codes, 4 to a word
    float* query_scale;           // [batch, kv_heads, row_capacity] stage-1 scale * unit
    float* query_bias;            // [batch, kv_heads, row_capacity] q . K offset * unit; written where there is an offset
    float* partial_o;             // [slots, row_capacity, head_dim], not divided by l
    float2* partial_ml;           // [slots, row_capacity] maximum in log2 units and sum
    float unit;                   // of scores: scale * log2 e, or scale under a softcap
    float log2_levels;            // of a.p_levels
    float inverse_levels;         // 1 / a.p_levels
    int32_t row_capacity;         // 4, 8 or 16
    int32_t warps;                // of the grid
    int32_t ring_bytes;           // of each warp, for pieces in flight
    bool bulk;                    // cp.async.bulk instead of cp.async
};

// The cut of a call's units into ranges of equal size, the first `longer` of them one unit longer. None is empty.
struct DecodeCut {
    int32_t ranges, size, longer;

    TA_HD DecodeCut(int32_t units, int32_t warps) {
        ranges = units < warps ? units : warps;
        size = ranges > 0 ? units / ranges : 0;
        longer = units - ranges * size;
    }
    TA_HD int32_t begin(int32_t range) const { return range * size + (range < longer ? range : longer); }
    // The range that holds unit u.
    TA_HD int32_t range_of(int32_t u) const {
        const int32_t in_longer = longer * (size + 1);
        return u < in_longer ? u / (size + 1) : longer + (u - in_longer) / size;
    }
};

}  // namespace ta::cuda
