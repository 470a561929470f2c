// One batch step as the plan hands it to the device that runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/attend/call.h"
#include "src/kv/pool.h"
#include "src/kv/tensor.h"

namespace ta {

// A block that receives tokens [have, end) in this step. Its INT8 page is `token`'s or, where all 64 tokens arrive now or K begins
// anew and the block closes, one of the workspace, which holds a single layer: nobody reads it after the layer's attend. If there
// are both, the tokens that the block has are copied from `token`, which stays as it is.
struct StepBlock {
    int64_t index = 0;  // within the sequence
    int have = 0, end = 0;
    BlockPtr token;
    int64_t workspace_page = -1;
    BlockPtr channel;  // what the block becomes; null while it stays open or at 8 bits
    bool stays_8_bits = false, closes = false;
    // K of the tokens that it has is encoded again if the new ones help to find other turning pairs. Where that changes `token`, the
    // step keeps what was there: an abort puts it back.
    bool begins_anew = false;
    bool changes_tokens() const { return begins_anew && workspace_page < 0; }
};

struct StepMember {
    Sequence* sequence = nullptr;
    int64_t length = 0;  // before the step
    int64_t n_new = 0, n_query = 0;
    int64_t new_row = 0, query_row = 0;
    std::vector<StepBlock> touched;
    std::vector<BlockPtr> left;  // of a partitioned sequence: to other ranks, at the commit
    // Universal open scales. The sequence's largest ones, updated by this step's tokens; on a device, the side with those before
    // the step. `recalls`: the sequence does not know them, begin() finds them from its blocks, and the step's first block is the
    // step's own.
    std::vector<float> largest_scales;
    uint8_t scales_side = kNothingSeen;
    bool recalls = false;
    uint64_t reopened = 0, copied = 0;
};

struct Step {
    std::vector<StepMember> members;
    int64_t total_new = 0, total_query = 0;
    int64_t workspace_pages = 0;
    uint64_t turn = 0;  // of layers to be observed

    // Blocks of a member that the step does not touch: [0, this).
    static int64_t untouched_blocks(const StepMember& m) {
        return m.touched.empty() ? (m.length + kPageTokens - 1) / kPageTokens : m.touched.front().index;
    }
    // Blocks that it touches at most: what follows from the number of new tokens alone, whatever the sequence's length.
    static int64_t most_touched(int64_t n_new) { return n_new > 0 ? (n_new + kPageTokens - 2) / kPageTokens + 1 : 0; }
};

}  // namespace ta
