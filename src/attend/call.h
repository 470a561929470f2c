// A call of attention over pages: what it reads and writes, and its options with defaults applied. The same for all executors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/format/codec.h"
#include "kernels/format/tree.h"
#include "kernels/format/types.h"
#include "src/kv/tensor.h"
#include "src/page/numerics.h"

namespace ta {

struct StoredPage {
    const uint8_t* page;  // all kv heads of one layer; nullptr: the block is dropped or forgotten
    PageKind kind;
};

// How many query tokens of a member are observed, the last ones: all of a decode step, and enough of a prompt to show what it
// attends to.
inline constexpr int64_t kObservedTokens = 16;

// A sequence for the CPU's executor. Steps on a GPU use tables instead (cuda/tables.h).
struct AttendSequence {
    const StoredPage* pages;  // [ceil(n_keys / 64)]
    int64_t n_keys;
    int64_t n_query;                 // with a causal mask at the last n_query of the n_keys positions; with a full mask any
                                     // number
    int64_t query_row;               // first row in q, out, lse
    const float* v_float = nullptr;  // [n_keys, kv_heads, head_dim]: V for half INT8
    float* mass = nullptr;           // [pages]: adds each page's weight in the observed rows, summed over heads
    const TreeRow* tree = nullptr;   // [n_query]: tokens of a token tree, which are the last n_query keys; the mask is causal
    int64_t n_observed = 0;          // number of observed queries, the last ones
    StoredPage own{};                // batch_invariant calls: the page of the queries themselves, used instead of pages[.]
};

// ta_attend_options with defaults applied.
struct AttendSettings {
    ta_mask mask = TA_MASK_CAUSAL;
    float scale = 0.0f;
    float softcap = 0.0f;
    int64_t window = 0;
    const float* alibi_slopes = nullptr;
    const float* sinks = nullptr;
    ExpMode exp = ExpMode::kPoly;
    ta_p p = TA_P_AUTO;
};
// `readable`: this thread may read the options' arrays. `name`: what error texts call the options.
Result<AttendSettings> resolve_attend(const ta_attend_options* options, int64_t q_heads, int head_dim, ExpMode exp, ta_p p,
                                      bool readable = true, const char* name = "options");

inline constexpr int kMaxStepGroup = 128;  // most query heads per kv head in steps

struct AttendCall {
    int head_dim = 0, kv_heads = 0, group = 0;
    const uint8_t* k_bits = nullptr;  // [kv_heads], of channel pages; nullptr: there are none. Low pages have 2 bits
    const uint8_t* v_bits = nullptr;
    const size_t* channel_head_offset = nullptr;  // [kv_heads]
    std::span<const AttendSequence> sequences;    // on a CPU only
    TensorView q, out;
    float* lse = nullptr;
    bool lse_of_o = false;  // lse may belong to sums that are rounded as O's are: only for a merge
    AttendSettings settings;
    const float* rotation_signs = nullptr;  // nullptr: no rotation
    const float* k_offset = nullptr;        // [kv_heads, head_dim] or nullptr
    bool k_turning = false;                 // pages may have turning pairs
    int q_levels = kStage1Levels;
    bool q_rest = false;  // queries of up to kP16Rows rows use 15 bits against K at 8 bits (stage1_rest)
    // Each query has the results that it would have alone. All queries of a sequence are in one block: `own`.
    bool batch_invariant = false;
    bool saturate = false;
};

}  // namespace ta
