// A call of attention over pages, whoever runs it: what it reads and writes, and its options with defaults applied.
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
    const uint8_t* page;  // all kv heads of one layer; nullptr: gone
    PageKind kind;
};

// Query tokens of a call, the last ones of a member, whose attention is observed: all of a decode step, and enough of a prompt to
// say what it looks at.
inline constexpr int64_t kObservedTokens = 16;

// A sequence as the executor of the CPU finds it. Steps on a GPU have tables instead (cuda_tables.h).
struct AttendSequence {
    const StoredPage* pages;  // [ceil(n_keys / 64)]
    int64_t n_keys;
    int64_t n_query;                 // the last of the n_keys positions, or any number under a full mask
    int64_t query_row;               // of q, out, lse
    const float* v_float = nullptr;  // [n_keys, kv_heads, head_dim]: V for half INT8
    float* mass = nullptr;           // [pages] grows by the weight that each page has in the observed rows, summed over heads
    const TreeRow* tree = nullptr;   // [n_query] of a token tree, whose tokens are the last n_query keys; the mask is causal
    int64_t n_observed = 0;          // of the queries, the last ones
    StoredPage own{};                // of batch_invariant calls: the page that the queries are in, in place of pages[.]
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
// `readable`: the arrays of the options can be looked at from here. `name`: what texts call the options.
Result<AttendSettings> resolve_attend(const ta_attend_options* options, int64_t q_heads, int head_dim, ExpMode exp, ta_p p,
                                      bool readable = true, const char* name = "options");

inline constexpr int kMaxStepGroup = 128;  // query heads per kv head, in steps

struct AttendCall {
    int head_dim = 0, kv_heads = 0, group = 0;
    const uint8_t* k_bits = nullptr;  // [kv_heads] of channel pages; nullptr when there are none. Low pages have 2
    const uint8_t* v_bits = nullptr;
    const size_t* channel_head_offset = nullptr;  // [kv_heads]
    std::span<const AttendSequence> sequences;    // on a CPU
    TensorView q, out;
    float* lse = nullptr;
    bool lse_of_o = false;  // lse may be that of sums rounded as O's are: it is for a merge alone
    AttendSettings settings;
    const float* rotation_signs = nullptr;  // nullptr: no rotation
    const float* k_offset = nullptr;        // [kv_heads, head_dim] or nullptr
    bool k_turning = false;                 // pages can have turning pairs
    int q_levels = kStage1Levels;
    bool q_rest = false;  // queries of up to kP16Rows rows have 15 bits against K at 8 bits (stage1_rest)
    // Each query's results are those that it would have alone. The queries of a sequence are in one block: `own`.
    bool batch_invariant = false;
    bool saturate = false;
};

}  // namespace ta
