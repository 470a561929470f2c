// Which blocks may leave a tier, or be dropped: what policies choose from.
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

// The share of a tier's budget, 1 / kEvictedPart, that is evicted at once: room for some steps.
inline constexpr uint64_t kEvictedPart = 64;

inline bool may_leave(const Block& b) {
    return b.sealed() && !b.moving() && b.pins() == 0 && !b.stuck() && b.has_pages();
}

// The blocks that may leave `tier`: sealed ones that are neither pinned nor on a move nor damaged, all of one owner or of several.
class Candidates final : public EvictionView {
  public:
    Candidates(const Geometry& geometry, TierKind tier, uint32_t now) : tier_(tier), geometry_(geometry), now_(now) {}

    // `slowest`: what lies in the tiers down to it too.
    void add(const Resident& s, uint32_t sinks, size_t blocks, TierKind slowest = TierKind::kDevice) {
        const uint32_t end = uint32_t(blocks);
        owners_.push_back({s.last_used, s.priority, std::min(sinks, end), end, s.in_plan});
        sequences_.push_back(&s);
        slowest_.push_back(std::max(tier_, slowest));
    }
    // From now on blocks of this priority alone.
    void set_level(const RetentionLevel& level) { level_ = level; }
    // From now on what several have, but not what is in `held`.
    void set_shared(bool shared, std::unordered_set<const Block*> held = {}) {
        shared_ = shared;
        held_ = std::move(held);
    }

    // From now on only blocks for which this is true.
    void set_filter(std::function<bool(const Block&, uint64_t index)> passes) { passes_ = std::move(passes); }

    std::span<const BlockOwner> owners() const override { return owners_; }
    uint64_t bytes(size_t owner, uint32_t b) const override {
        // Policies walk over blocks in order, and these lie anywhere: the block, and the count of its owners before it.
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

// Blocks of sequences in plans, or with promises, that other sequences have too: a plan may be reading them, though an idle
// sequence has them. `but`: one of which that does not count. Under the lock of the residents.
inline std::unordered_set<const Block*> shared_and_readable(const Residents& residents, const Resident* but = nullptr) {
    std::unordered_set<const Block*> held;
    const auto see = [&](const Resident& s) {
        if (!s.stays_readable() || &s == but) return;
        for (const BlockPtr& block : s.blocks) {
            if (block.use_count() > 1) held.insert(block.get());
        }
    };
    residents.visit(std::cref(see));
    return held;
}

// Open blocks that several idle sequences have. If nobody else has one it may be sealed, to leave: no step writes it as it is, since
// the next step of each sequence copies it. Under the lock of the residents.
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
    // How many idle sequences have the block, which one of them surely has.
    long owners(const Block& block) const {
        const auto found = owners_.find(&block);
        return found == owners_.end() ? 1 : found->second;
    }

  private:
    std::unordered_map<const Block*, long> owners_;
};

// Owners that an open block of an idle sequence may have and be sealed.
inline long idle_owners(const SharedOpenBlocks& shared, const Resident& s, const Block& block) {
    const long listed = s.in_plan ? 2 : 1;  // a begin that waits has listed what it may write
    return std::max(listed, shared.owners(block));
}

// A full block that a truncate cut is needed when tokens are appended: not among those that may be dropped.
inline size_t count_full(const Resident& s) {
    return size_t(s.length / kPageTokens);
}

// True if the plan that holds `mine` may drop blocks of the sequence.
inline bool may_lose_blocks(const Resident& s, std::span<const Resident* const> mine) {
    const bool is_mine = std::find(mine.begin(), mine.end(), &s) != mine.end();
    return s.alive && (is_mine || (!s.in_plan && s.promised_tokens == 0));
}

}  // namespace ta
