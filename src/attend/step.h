// One batch step, as the plan gives it to a backend.
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

// A block that gets tokens [have, end) in this step. Its INT8 page is `token`'s. If all 64 tokens arrive now, or if K begins
// anew and the block closes, the INT8 page is one of the workspace. If there is `token` as well, its tokens are copied to the
// workspace and `token` stays as it is.
struct StepBlock {
    int64_t index = 0;  // within the sequence
    int have = 0, end = 0;
    BlockPtr token;
    int64_t workspace_page = -1;
    BlockPtr channel;  // its closed form; null if it stays open or at 8 bits
    BlockPtr later;    // of drafts: its closed form if the end fills it
    bool stays_8_bits = false, closes = false;
    bool redone = false;  // of drafts: the appends wrote something else than the tokens that stay would give
    // K of the present tokens is encoded again if the new tokens help to find other turning pairs. If that changes `token`, the
    // step keeps the old bytes, and an abort restores them.
    bool begins_anew = false;
    bool changes_tokens() const { return begins_anew && workspace_page < 0; }
    // The block into which the append closes this one; nullptr: it stays open. A draft's block is closed at once if queries in
    // later blocks must see it closed.
    Block* closed_by_append(bool batch_invariant) const {
        return channel ? channel.get() : batch_invariant && end == kPageTokens ? later.get() : nullptr;
    }
};

// A full block that the sequence's windows pass in this step. `to` gets the pages that stay: those of layers without a window.
// At the commit the two are swapped: from then on `to` is the sequence's old block.
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
    std::vector<BlockPtr> spared;  // replacements for blocks that do not pass after all
    std::vector<BlockPtr> left;    // of a partitioned sequence: blocks given up to other ranks at the commit
    // After a step with drafts has ended, n_new and touched are the tokens and blocks that stay; `rejected` has the other
    // blocks. `path`: the indices of the tokens that stay, unless these are the first ones.
    std::vector<StepBlock> rejected;
    std::vector<int32_t> path;
    bool is_tree = false;     // its new tokens are not a chain
    int64_t first_query = 0;  // the lowest position of its queries; below 0: before the first token
    // Universal open scales: the sequence's largest scales, updated by this step's tokens; on a device, the side that has those
    // from before the step. `recalls`: the scales are not known. Then begin() finds them from the blocks, and the step's first
    // block is a copy.
    std::vector<float> largest_scales;
    uint8_t scales_side = kNothingSeen;
    bool recalls = false;
    uint64_t reopened = 0, copied = 0;
    SlotCounts of_promise{};  // its new blocks that came out of the sequence's promise

    // nullptr: the step does not touch the block at this index.
    StepBlock* touched_at(int64_t index) {
        const int64_t n = touched.empty() ? -1 : index - touched.front().index;
        return n < 0 ? nullptr : &touched[size_t(n)];
    }
    // The full block that the sequence will have at this index after the commit.
    Block& block(int64_t index) {
        const StepBlock* t = touched_at(index);
        return t ? *(t->channel ? t->channel : t->token) : *sequence->blocks[size_t(index)];
    }
};

// Query tokens that attend together: they see the same keys, each up to its own position. The keys are `n_keys` keys of the
// member's blocks from `first_block` on; the queries are at the last of these.
struct StepQueries {
    size_t member = 0;
    int64_t first_block = 0, n_keys = 0, n_query = 0;
    int64_t row = 0;  // first row in the backend's tensors
};

// A member's queries again, turned back by the gaps between them and the keys of a run.
struct TurnedQueries {
    int64_t from_row = 0, n_query = 0;
    int64_t row = 0;   // first row in the backend's tensors: after all given rows and those turned before
    int64_t back = 0;  // tokens
};

struct Step {
    std::vector<StepMember> members;
    int64_t total_new = 0, total_query = 0;
    // For each member: its own queries, or the runs of its positions if these were given; then its turned ones.
    std::vector<StepQueries> queries;
    std::vector<TurnedQueries> turned;
    int64_t turned_rows = 0;
    int64_t all_rows() const { return total_query + turned_rows; }
    bool has_positions = false;  // the caller gave positions of queries
    // True if there is one StepQueries for each member: its last tokens, which see all of it.
    bool is_ordinary() const { return !has_positions && turned.empty(); }
    int64_t workspace_pages = 0;
    bool layers_in_order = false;  // the workspace has pages of one layer, and nobody reads them after that layer's attends
    bool drafts = false;           // the end may keep only a part of the new tokens
    // kept: the end has taken rejected tokens off. redone: it has redone the others. If an end fails after either, the next end
    // continues there.
    bool kept = false, redone = false;
    std::optional<std::vector<int32_t>> keep;  // [members], as given to that end; none: all tokens stay
    std::vector<int32_t> parents;              // [total_new], in a step with trees
    std::vector<TreeRow> tree;                 // [total_new], in a step with trees
    bool branches = false;                     // some members are not chains
    uint64_t turn = 0;                         // chooses the layers to observe
    bool any_passes() const {                  // true if windows pass blocks
        return std::any_of(members.begin(), members.end(), [](const StepMember& m) { return !m.passing.empty(); });
    }

    // The blocks whose tokens the step changes.
    std::vector<const StepBlock*> blocks_begun_anew() const {
        std::vector<const StepBlock*> anew;
        for (const StepMember& m : members) {
            for (const StepBlock& t : m.touched) {
                if (t.changes_tokens()) anew.push_back(&t);
            }
        }
        return anew;
    }

    // The member's blocks [0, this) are untouched by the step.
    static int64_t untouched_blocks(const StepMember& m) {
        const std::vector<StepBlock>& first = m.touched.empty() ? m.rejected : m.touched;
        return first.empty() ? (m.length + kPageTokens - 1) / kPageTokens : first.front().index;
    }
    // The most blocks that so many new tokens can touch, whatever the sequence's length.
    static int64_t most_touched(int64_t n_new) { return n_new > 0 ? (n_new + kPageTokens - 2) / kPageTokens + 1 : 0; }
};

}  // namespace ta
