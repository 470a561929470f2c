// Arguments of the decode kernels beside the call itself, and how their work is cut. Host and device.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attend_args.h"
#include "kernels/format/tree.h"

namespace ta::cuda {

inline constexpr int kDecodeRows = 16;        // query rows (query tokens x group) of a sequence and kv head at most
inline constexpr int kDecodeMaxInFlight = 4;  // pieces of one warp

// A partial result is [tile][head_dim / 32] of these, for a tile of 4 rows and, of each lane, word j of its channels, which are
// (head_dim / 8) (lane / 4) + 4 j .. + 3 of row lane % 4: sums of P v, not divided by l, [lane] as 4 floats; then for each of
// the rows its maximum in log2 units and its l.
inline constexpr int kDecodePartBytes = 32 * 16 + 4 * 8;
TA_HD constexpr int decode_parts(int head_dim, int tiles) {
    return tiles * (head_dim / 32);
}
TA_HD constexpr int decode_partial_bytes(int head_dim, int tiles) {
    return decode_parts(head_dim, tiles) * kDecodePartBytes;
}

// Warps of a CTA that a kernel may be launched with: what its registers allow.
TA_HD constexpr int decode_max_warps(int head_dim, int tiles) {
    return tiles == 1 && head_dim <= 128 ? 12 : 8;
}

// The number of workers, with constants for a fast division by it: a GPU's division by a number that the compiler does not know
// takes many instructions, and each of these is fetched from memory.
struct DecodeWorkers {
    int32_t n;
    uint32_t inverse;  // (2^32 - 1) / n

    TA_HD explicit DecodeWorkers(int32_t workers) : n(workers), inverse(0xffffffffu / uint32_t(workers)) {}
    DecodeWorkers() = default;
    TA_HD int32_t divide(int32_t x) const {
        const auto q = uint32_t(uint64_t(uint32_t(x)) * inverse >> 32);  // or one less
        return int32_t(q + (uint32_t(x) - q * uint32_t(n) >= uint32_t(n)));
    }
};

// Outputs for the attention that pages get. A page's place is that of its entry in the block table.
struct DecodeMass {
    float* page_lse;   // [kv_heads, entries, row_capacity], of one launch: log2 of the sum of a row's weights in a page
    uint32_t entries;  // of the block table, or more; times kv_heads less than 2^32
    uint64_t* weight;  // [entries], kMassUnit: grows by the weights of all rows, each of which gives 1 to all its pages
    uint64_t* heads;   // grows by the query heads of each call; nullptr: another launch of the call counts them
};
// Integers, so that sums do not depend on the order in which warps get there. A call adds 16 for each query head to a page at
// most.
inline constexpr float kMassUnit = 0x1p-40f;

// A unit of work is one page of one kv head of one sequence. All units of a call, ordered by sequence, head and page, are cut
// into contiguous ranges of equal cost, one per CTA, and each of them into one per warp. A segment is the part of one
// (sequence, head) within a range. There are less than 2^31 units.
struct DecodeParams {
    AttendArgs a;
    const int32_t* pages_before;  // a.pages_before, or windowed_pages
    int32_t* windowed_pages;      // [batch + 1] the same for the pages within the window; nullptr without one

    // Queries of a segment of a CTA are in slot CTA + sequence * kv_heads + head: both only grow along the units, and each new
    // segment raises one of them, so no two share a slot. Stage-1 codes and rests, 4 to a word; stage-1 scale * unit; q . K
    // offset * unit.
    uint32_t* query_codes;  // [ctas + batch * kv_heads, row_capacity, 2, head_dim / 4]
    float* query_scale;     // [ctas + batch * kv_heads, row_capacity]
    float* query_bias;      // [ctas + batch * kv_heads, row_capacity]

    float* warp_partials;  // [ctas, warps] of a warp's first segment, if the warp before it has a part of its (sequence, head)
    // [ctas, 2] of a CTA's first segment, if a CTA before it has a part of that (sequence, head); of its last, if only CTAs after it have
    float* cta_partials;
    // [ctas, decode_parts] for the (sequence, head) that begins in this CTA and ends in another, and each word of a tile: how many
    // CTAs have left their part
    uint32_t* arrivals;

    float unit;             // of scores: scale * log2 e, or scale under a softcap
    float levels;           // a.p_levels
    float inverse_levels;   // 1 / levels
    bool q_rest;            // queries have rests; else these are 0
    int32_t row_capacity;   // 4, 8 or 16
    int32_t group_inverse;  // of a.group: rounded up, times 2^16
    int32_t ring_bytes;     // of each warp, for pieces in flight
    DecodeWorkers ctas, warps;
    DecodeWorkers warps_if_short;  // those with units in a call of less than long_pages pages
    int32_t long_pages;

    DecodeMass mass;  // page_lse is nullptr when nobody asks
    // [rows of q] of steps with token trees, whose mask is causal and whose query tokens are their new ones; or nullptr. The
    // general kernel's alone.
    const TreeRow* tree;
};

// A cut of a line into ranges of equal size, the first `longer` of them longer by one. None is shorter than `least`; on a short
// line there are fewer ranges than workers.
struct DecodeCut {
    DecodeWorkers ranges;
    int32_t size, longer;

    TA_HD DecodeCut(int32_t length, int32_t least, const DecodeWorkers& workers)
        : ranges(length >= least * workers.n ? workers : DecodeWorkers(length >= least ? length / least : 1)) {
        size = ranges.divide(length);
        longer = length - ranges.n * size;
    }
    TA_HD int32_t begin(int32_t range) const { return range * size + (range < longer ? range : longer); }
    // The place where the range would begin if the longer ones were spread over the line.
    TA_HD int32_t spread_begin(int32_t range) const { return range * size + ranges.divide(range * longer); }
    // The range that holds place u, by begin().
    TA_HD int32_t range_of(int32_t u) const {
        const int32_t in_longer = longer * (size + 1);
        const bool is_longer = u < in_longer;
        return (is_longer ? u : u - in_longer) / (is_longer ? size + 1 : size) + (is_longer ? 0 : longer);
    }
};

}  // namespace ta::cuda
