// Append on CUDA: stage 1 of new K and V into token pages, and the closing of the pages that they fill to 4 or 2 bits. Every
// byte is the one the CPU writes (src/attend/cpu/step.cpp). The host side; nothing here needs the CUDA language.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attend_args.h"
#include "kernels/format/codec.h"

struct CUstream_st;

namespace ta::cuda {

inline constexpr uint8_t kNothingSeen = 2;

// A block that receives tokens [have, end) in this step: the same in all layers.
struct alignas(16) AppendTask {
    uint64_t token_page;    // slot of the block's token page, or with kEntrySingleLayer the page itself
    uint64_t copied_from;   // slot that the search for turning pairs copies the tokens that it has from; 0: they are there
    uint64_t channel_slot;  // slot of what it becomes; 0: it does not close. Closes only with end = 64
    int32_t row;            // of k and v: that of token `have`
    int32_t sequence;       // index for largest_scales and nonfinite; the tasks of a sequence stand together, in order
    uint8_t have, end;
    bool stays_8_bits;
    uint8_t scales_side;  // universal scales: side of largest_scales with those before the step, or kNothingSeen
    int32_t index;        // among the tasks of its sequence
    // Turning pairs: entry of the block before, whose pairs continue in a block that begins with fewer than 64 tokens; 0: there
    // is none. For a block that the step brings, that of its token page.
    uint64_t previous;
    bool first_block;  // of its sequence
    bool begins_anew;  // K of the tokens that it has is encoded again if other pairs are found, or do not help any more
};
static_assert(sizeof(AppendTask) == 64);

// Universal scales only: the progress of the tasks of a sequence and head, while several CTAs work on them. All 0 between
// launches.
struct alignas(16) AppendProgress {
    uint32_t k_scale, v_scale;  // bits of the largest so far
    int32_t left;  // tasks that the last one, or who finishes, still waits for; below 0 until the last one has said how many
    int32_t last;  // the last one
};

// What an append takes of a layer.
struct AppendLayer {
    uint64_t token_layer_offset, channel_layer_offset, low_layer_offset;
    const HeadArgs* heads;  // [kv_heads]; nullptr when there are no channel pages
    TensorArgs k, v;
    const float* k_offset;  // [kv_heads, head_dim] what keys are stored less of, or nullptr
    // Universal scales only: [sequences, 2 sides] records of [kv_heads, 2] largest scales of K and V, scales_stride elements
    // apart. A step reads the side that its tasks name and writes the other, so that it can be taken back. Side 0 if nothing
    // was seen before.
    float* largest_scales;
    uint64_t token_own_scales;  // where token blocks have the layer's: Geometry::own_scales_offset; 0: they have not
};

// An append of one layer, or of the same tasks in several. Pointers are to device memory, or to host memory mapped into it. A captured
// launch is replayed with other tasks by rewriting what `tasks` and `n_tasks` point at.
struct AppendArgs {
    int32_t head_dim, kv_heads;

    const AppendTask* tasks;
    const int32_t* n_tasks;  // one number
    int32_t most_tasks;      // *n_tasks is not greater; 0: it may be anything

    AppendLayer layer;
    const AppendLayer* layers;  // [n_layers] instead of `layer`, one of them with universal scales; nullptr: `layer` alone
    int32_t n_layers;

    const float* signs;  // [head_dim] +1 or -1: keys are rotated; nullptr: they are not

    bool k_page_scale, v_page_scale;  // as in Numerics
    bool k_page_scale_at_8_bits, v_page_scale_at_8_bits;
    bool universal_open_scale;
    // Drafts: where the append keeps `kept_rows` rows of k and v as they are, one behind the other, 16-byte aligned; nullptr: nowhere.
    // Given if the call is for one layer alone.
    void *kept_k, *kept_v;
    int32_t kept_rows;

    EncodeOptions encode;
    bool saturate;  // non-finite and huge values become the nearest allowed ones instead of 0; NaN becomes 0 in any case

    int64_t scales_stride;     // see AppendLayer
    AppendProgress* progress;  // universal scales only: [sequences, kv_heads]

    uint32_t* nonfinite;  // [sequences] counts values that were replaced, or nullptr
    uint64_t* clamped;    // counts values beyond a universal scale, or nullptr
};

// Inputs of a launch beside its arguments.
struct AppendPlan {
    int32_t ctas, turning_ctas;
    bool overlap;  // programmatic dependent launch, from sm_90 on
};

// `max_tasks` bounds the number of tasks of any launch with this plan; fewer CTAs start where it is small. Returns a
// cudaError_t: cudaErrorInvalidValue for shapes that are not supported.
int plan_append(int device, int head_dim, int kv_heads, int64_t max_tasks, AppendPlan* plan);

// Enqueues the append. `pages_turn`: a page of the tasks may begin or close; the search for turning pairs is enqueued first. Returns a
// cudaError_t.
int launch_append(const AppendPlan& plan, const AppendArgs& args, bool pages_turn, CUstream_st* stream);

// A closed block whose first tokens go on in a token block: all layers and heads.
struct ReopenArgs {
    int32_t head_dim, kv_heads, layers, tokens;
    uint64_t channel_slot, token_slot;     // addresses
    const uint64_t* channel_layer_offset;  // [layers]
    const HeadArgs* heads;                 // [layers, kv_heads]
    const uint64_t* token_layer_offset;    // [layers]
    bool k_turning;
    uint64_t token_own_scales;  // where token blocks have them; 0: they have not
};

// Decodes tokens [0, tokens) of every channel page into the token pages, whose other tokens stay as they are. Returns a
// cudaError_t.
int launch_reopen(const ReopenArgs& args, CUstream_st* stream);

// Universal scales: sequences whose largest scales are to be found from their blocks. All layers and heads.
struct RecallArgs {
    static constexpr int kMostSequences = 64;
    struct Sequence {
        int32_t first_entry, blocks;  // of the table: full blocks that the step does not touch
        int32_t have;                 // tokens of the token block in the entry behind them, which are settled there; 0: none
        int32_t index;                // for largest_scales
    };
    int32_t head_dim, kv_heads, layers, sequences;
    bool k_turning;
    const uint64_t* table;
    const uint64_t *channel_layer_offset, *low_layer_offset;  // [layers]; nullptr where there are no such blocks
    const HeadArgs *channel_heads, *low_heads;                // [layers, kv_heads]
    uint64_t token_page_bytes;                                // of one layer
    uint64_t token_own_scales;                                // where token blocks have them
    float* largest_scales;                                    // [sequences, 2 sides, layers, kv_heads, 2]: side 0 is written
    Sequence of[kMostSequences];
};

// As CpuStep::recall_scales of src/attend/cpu/step.cpp. Returns a cudaError_t.
int launch_recall(const RecallArgs& args, CUstream_st* stream);

// Full blocks of 8 bits whose pages become channel pages of 4 bits elsewhere: all layers and heads, one piece behind the other.
struct LowerArgs {
    static constexpr int kMostBlocks = 128;
    int32_t head_dim, pieces, blocks;  // pieces of a block: layers x heads
    EncodeOptions encode;
    uint64_t token_own_scales;                    // where token blocks have them; 0: they have not
    uint64_t from[kMostBlocks], to[kMostBlocks];  // addresses
};

// Encodes them as closing would. Returns a cudaError_t.
int launch_lower(const LowerArgs& args, CUstream_st* stream);

}  // namespace ta::cuda
