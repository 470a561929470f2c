// One batch step as the plan hands it to the device that runs it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "src/attend/call.h"
#include "src/kv/pool.h"
#include "src/kv/tensor.h"

namespace ta {

// A block that receives tokens [have, end) in this step. Its INT8 page is `token`'s or, where all 64 tokens arrive now or K begins
// anew and the block closes, one of the workspace. If there are both, the tokens that the block has are copied from `token`, which
// stays as it is.
struct StepBlock {
    int64_t index = 0;  // within the sequence
    int have = 0, end = 0;
    BlockPtr token;
    int64_t workspace_page = -1;
    BlockPtr channel;  // what the block becomes; null while it stays open or at 8 bits
    BlockPtr later;    // of drafts: what it becomes if the end fills it
    bool stays_8_bits = false, closes = false;
    bool redone = false;  // of drafts: some of what the appends wrote is not what the tokens that stay give
    // K of the tokens that it has is encoded again if the new ones help to find other turning pairs. Where that changes `token`, the
    // step keeps what was there: an abort puts it back.
    bool begins_anew = false;
    bool changes_tokens() const { return begins_anew && workspace_page < 0; }
    // The block into which the append closes the page; nullptr: it stays open. Drafts close what they fill if queries of later
    // blocks are to find it so.
    Block* closed_by_append(bool batch_invariant) const {
        return channel ? channel.get() : batch_invariant && end == kPageTokens ? later.get() : nullptr;
    }
};

// A full block of a sequence whose windows pass it with the step. `to` has the pages that stay, of layers without a window; from the
// commit on it is the block that the sequence had.
struct PassingBlock {
    int64_t index = 0;
    BlockPtr to;
};

struct StepMember {
    Sequence* sequence = nullptr;
    int64_t length = 0;  // before the step
    int64_t n_new = 0, n_query = 0;
    int64_t new_row = 0, query_row = 0;
    std::vector<StepBlock> touched;
    std::vector<PassingBlock> passing;
    std::vector<BlockPtr> spared;  // of those that do not pass after all
    std::vector<BlockPtr> left;    // of a partitioned sequence: to other ranks, at the commit
    // Of drafts, from the end on: n_new and touched are those that stay, `rejected` are the other blocks. Where the tokens that
    // stay are not the first ones, `path` has their indices.
    std::vector<StepBlock> rejected;
    std::vector<int32_t> path;
    bool is_tree = false;     // its new tokens are no chain
    int64_t first_query = 0;  // the lowest position of its queries; below 0: before its first token
    // Universal open scales. The sequence's largest ones, updated by this step's tokens; on a device, the side with those before
    // the step. `recalls`: the sequence does not know them, begin() finds them from its blocks, and the step's first block is the
    // step's own.
    std::vector<float> largest_scales;
    uint8_t scales_side = kNothingSeen;
    bool recalls = false;
    uint64_t reopened = 0, copied = 0;
    SlotCounts of_promise{};  // of its new blocks, out of the sequence's promise

    // nullptr: the step does not touch this one.
    StepBlock* touched_at(int64_t index) {
        const int64_t n = touched.empty() ? -1 : index - touched.front().index;
        return n < 0 ? nullptr : &touched[size_t(n)];
    }
    // The block that the sequence has at this index, which is full, once the step is part of it.
    Block& block(int64_t index) {
        const StepBlock* t = touched_at(index);
        return t ? *(t->channel ? t->channel : t->token) : *sequence->blocks[size_t(index)];
    }
};

// Query tokens that see the same keys, each up to its own, as the backend attends with them: the keys are those of the member's blocks
// from `first_block` on, `n_keys` of them, and the queries stand at the last of these.
struct StepQueries {
    size_t member = 0;
    int64_t first_block = 0, n_keys = 0, n_query = 0;
    int64_t row = 0;  // of the tensors that the backend gets
};

// A member's queries once more, turned back by the gaps between them and the keys of a run.
struct TurnedQueries {
    int64_t from_row = 0, n_query = 0;
    int64_t row = 0;   // of the tensors that the backend gets: behind all that were given, and those turned before
    int64_t back = 0;  // tokens
};

struct Step {
    std::vector<StepMember> members;
    int64_t total_new = 0, total_query = 0;
    // For each member its own, or those of its positions' runs where these were given, then its turned ones.
    std::vector<StepQueries> queries;
    std::vector<TurnedQueries> turned;
    int64_t turned_rows = 0;
    int64_t all_rows() const { return total_query + turned_rows; }
    bool has_positions = false;  // of queries, as the caller gave them
    // One StepQueries for each member: the last tokens of it, which see all of it.
    bool is_ordinary() const { return !has_positions && turned.empty(); }
    int64_t workspace_pages = 0;
    bool layers_in_order = false;  // the workspace has pages of a single layer, which nobody reads after that layer's attends
    bool drafts = false;           // the end may keep a part of the new tokens
    // It has, as `keep` says, and what was to be redone is: an end that failed behind that goes on there.
    bool kept = false, redone = false;
    std::optional<std::vector<int32_t>> keep;  // [members]; none: all were to stay
    std::vector<int32_t> parents;              // [total_new] of a step that was given as trees
    std::vector<TreeRow> tree;                 // [total_new] of the same
    bool branches = false;                     // some of the members are no chains
    uint64_t turn = 0;                         // of layers to be observed
    bool any_passes() const {                  // blocks, behind windows
        return std::any_of(members.begin(), members.end(), [](const StepMember& m) { return !m.passing.empty(); });
    }

    // Blocks of a member that the step does not touch: [0, this).
    static int64_t untouched_blocks(const StepMember& m) {
        const std::vector<StepBlock>& first = m.touched.empty() ? m.rejected : m.touched;
        return first.empty() ? (m.length + kPageTokens - 1) / kPageTokens : first.front().index;
    }
    // Blocks that it touches at most: what follows from the number of new tokens alone, whatever the sequence's length.
    static int64_t most_touched(int64_t n_new) { return n_new > 0 ? (n_new + kPageTokens - 2) / kPageTokens + 1 : 0; }
};

}  // namespace ta
