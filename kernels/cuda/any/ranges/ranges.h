// Attention of queries that go alone (batch_invariant): the keys of each are cut into ranges by the query's place alone, the decode
// kernel takes a range as a sequence of its own (AttendArgs::are_parts), and the parts of a query are merged in their order. The host
// side; nothing here needs the CUDA language.
#pragma once

#include "kernels/cuda/common/attend_args.h"

struct CUstream_st;

namespace ta::cuda {

// Cuts are at multiples of so many pages from a sequence's start on, and before the page that the query is in.
inline constexpr int32_t kRangePages = 8;

struct RangeQuery {
    int32_t row;           // of q, out and lse
    int32_t position;      // among its sequence's keys; below 0: it sees none
    int32_t first_entry;   // in `table`, of the sequence
    int32_t own_entry;     // likewise, of the page that the query is in
    int32_t first_part;    // among those of the call
    int32_t pages_before;  // of the queries before
};

// The pages that a query sees: [first, own), in ranges, and its own.
struct RangeCut {
    int32_t first = 0, own = -1;
    TA_HD RangeCut(int32_t position, int32_t window) {
        if (position < 0) return;
        first = visible_keys(true, window, position + 1, position).begin / kPageTokens;
        own = position / kPageTokens;
    }
    TA_HD int32_t ranges() const { return first < own ? (own - 1) / kRangePages - first / kRangePages + 1 : 0; }
    TA_HD int32_t parts() const { return own < 0 ? 0 : ranges() + 1; }
    TA_HD int32_t pages() const { return own < 0 ? 0 : own - first + 1; }
};

// Writes what the decode kernel reads, part by part.
struct CutRangesArgs {
    int32_t queries, window;
    const RangeQuery* query;  // [queries]
    SequenceArgs* sequences;  // [parts]
    int32_t* pages_before;    // [parts + 1]
    int32_t* first_position;  // [parts]
};
int launch_cut_ranges(const CutRangesArgs& args, CUstream_st* stream);  // a cudaError_t

// Merges the parts of each query, with the learned sink, into its row of out and lse.
struct MergeRangesArgs {
    int32_t queries, heads, head_dim, window;
    const RangeQuery* query;  // [queries]
    const float* o;           // [parts, heads, head_dim]
    const PartSum* sums;      // [parts, heads]
    const float* sink;        // [heads] logits, natural units, or nullptr
    TensorArgs out;
    float* lse;  // [rows, heads] natural logarithm, or nullptr
};
int launch_merge_ranges(const MergeRangesArgs& args, CUstream_st* stream);  // likewise

}  // namespace ta::cuda
