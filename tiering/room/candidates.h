// The blocks that may leave a tier, or be dropped. Policies choose from them.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tiering/policy/policy.h"
#include "tiering/room/resident.h"

namespace ta {

// An eviction moves at least 1 / kEvictedPart of a tier's budget at once: room for several steps.
inline constexpr uint64_t kEvictedPart = 64;

inline bool may_leave(const Block& b) {
    return b.sealed() && !b.moving() && b.pins() == 0 && !b.stuck() && b.has_pages();
}

// The blocks that may leave `tier`: sealed, not pinned, not moving, not damaged. Either those with one owner, or those with
// several.
class Candidates final : public EvictionView {
  public:
    Candidates(const Geometry& geometry, TierKind tier, uint32_t now) : tier_(tier), geometry_(geometry), now_(now) {}

    // `slowest`: blocks in the tiers from `tier` down to this one count, too.
    void add(const Resident& s, uint32_t sinks, size_t blocks, TierKind slowest = TierKind::kDevice) {
        const uint32_t end = uint32_t(blocks);
        owners_.push_back({s.last_used, s.priority, std::min(sinks, end), end, s.in_plan});
        sequences_.push_back(&s);
        slowest_.push_back(std::max(tier_, slowest));
    }
    // From now on only blocks of this level's priority.
    void set_level(const RetentionLevel& level) { level_ = level; }
    // From now on only blocks with several owners (or with one), without those in `held`.
    void set_shared(bool shared, std::unordered_set<const Block*> held = {}) {
        shared_ = shared;
        held_ = std::move(held);
    }

    // From now on only blocks for which this is true.
    void set_filter(std::function<bool(const Block&, uint64_t index)> passes) { passes_ = std::move(passes); }

    std::span<const BlockOwner> owners() const override { return owners_; }
    uint64_t bytes(size_t owner, uint32_t b) const override {
        // Policies walk over blocks in order, but these lie anywhere in memory: prefetches the block and, in front of it, the count
        // of its owners.
        constexpr uint32_t kAhead = 12;
        const std::vector<BlockPtr>& blocks = sequences_[owner]->blocks;
        if (b + kAhead < blocks.size()) {
            const char* ahead = reinterpret_cast<const char*>(blocks[b + kAhead].get());
            __builtin_prefetch(ahead);
            __builtin_prefetch(ahead - 16);
        }
        const BlockPtr& block = blocks[b];
        const TierKind tier = block->tier();
        if (tier < tier_ || tier > slowest_[owner] || !may_leave(*block) || !level_.has(block->retention())) return 0;
        if ((block.use_count() > 1) != shared_ || (!held_.empty() && held_.contains(block.get()))) return 0;
        if (passes_ && !passes_(*block, b)) return 0;
        return geometry_.slot_bytes(block->kind());
    }
    AttentionMass mass(size_t owner, uint32_t b) const override { return sequences_[owner]->blocks[b]->mass(); }
    uint32_t since(size_t owner, uint32_t b) const override { return sequences_[owner]->blocks[b]->since(); }
    uint32_t now() const override { return now_; }
    MoveItem item(Victim v) const { return {sequences_[v.owner]->blocks[v.block], v.block, sequences_[v.owner]->last_used_at}; }
    std::vector<MoveItem> items(std::span<const Victim> victims) const {
        std::vector<MoveItem> items;
        for (const Victim v : victims) items.push_back(item(v));
        return items;
    }

  private:
    const TierKind tier_;
    const Geometry& geometry_;
    const uint32_t now_;
    std::vector<const Resident*> sequences_;
    std::vector<TierKind> slowest_;
    std::vector<BlockOwner> owners_;
    RetentionLevel level_;
    bool shared_ = false;
    std::unordered_set<const Block*> held_;
    std::function<bool(const Block&, uint64_t index)> passes_;
};

// The blocks with several owners of all sequences for which is_one_of(Resident) is true. Under the lock of the residents.
template <class IsOneOf>
std::unordered_set<const Block*> shared_blocks_of(const Residents& residents, IsOneOf&& is_one_of) {
    std::unordered_set<const Block*> shared;
    const auto see = [&](const Resident& s) {
        if (!is_one_of(s)) return;
        for (const BlockPtr& block : s.blocks) {
            if (block.use_count() > 1) shared.insert(block.get());
        }
    };
    residents.visit(std::cref(see));
    return shared;
}

// Blocks with several owners that sequences in plans, or with promises, have: a plan may be reading them, though an idle
// sequence has them, too. The sequence `but` does not count.
inline std::unordered_set<const Block*> shared_and_readable(const Residents& residents, const Resident* but = nullptr) {
    return shared_blocks_of(residents, [but](const Resident& s) { return s.stays_readable() && &s != but; });
}

// Open blocks that several idle sequences share. If no other owner exists, such a block may be sealed and leave: no step will
// write it, since each sequence's next step copies it first. Under the lock of the residents.
class SharedOpenBlocks {
  public:
    // `also`: counts as idle.
    explicit SharedOpenBlocks(const Residents& residents, const Resident* also = nullptr) {
        const auto see = [&](const Resident& s) {
            if ((!s.is_idle() && &s != also) || s.blocks.empty()) return;
            const BlockPtr& last = s.blocks.back();
            if (last.use_count() > 1 && !last->full()) ++owners_[last.get()];
        };
        residents.visit(std::cref(see));
    }
    // How many idle sequences have the block. The caller knows of one.
    long owners(const Block& block) const {
        const auto found = owners_.find(&block);
        return found == owners_.end() ? 1 : found->second;
    }

  private:
    std::unordered_map<const Block*, long> owners_;
};

// The most owners that an open block of an idle sequence may have and still be sealed.
inline long idle_owners(const SharedOpenBlocks& shared, const Resident& s, const Block& block) {
    const long listed = s.in_plan ? 2 : 1;  // a begin that waits holds one more: it has listed the blocks that it may write
    return std::max(listed, shared.owners(block));
}

// Blocks that may be dropped are among the first count_full(). A truncate may have cut a full block: it is needed for the next
// tokens and does not count.
inline size_t count_full(const Resident& s) {
    return size_t(s.length / kPageTokens);
}

// True if the plan whose sequences are `mine` may drop blocks of the sequence.
inline bool may_lose_blocks(const Resident& s, std::span<const Resident* const> mine) {
    const bool is_mine = std::find(mine.begin(), mine.end(), &s) != mine.end();
    return s.alive && (is_mine || (!s.in_plan && s.promised_tokens == 0));
}

}  // namespace ta
