// A pool: geometry, settings, blocks and the table of sequences. Internally synchronised.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/core/checked.h"
#include "src/core/context.h"
#include "src/kv/gaps.h"
#include "src/kv/prefix.h"
#include "src/page/pages.h"
#include "tiering/room/residency.h"

namespace ta {

struct Partition;

inline constexpr uint8_t kNothingSeen = 2;
inline constexpr int64_t kMaxTokens = int64_t{1} << 40;  // of a sequence

struct Sequence : Resident {
    uint32_t slot = 0;
    uint32_t generation = 0;
    bool released = false;  // in a plan: the id is stale, the slot and the blocks are the plan's until it ends
    // Before the begin that goes on, which may fail.
    uint64_t used_before = 0;
    std::chrono::steady_clock::time_point used_before_at;
    uint64_t version = 0;  // grows with every change of `blocks`
    // Only with universal open scales: the largest K and V scale of its blocks, [layers, kv_heads, 2]; on a device, which record
    // of Pool::largest_scales() holds them. Not known: the next step finds them from the blocks.
    std::vector<float> largest_scales;
    uint8_t scales_side = kNothingSeen;
    bool scales_known = true;
    uint32_t nonfinite_seen = 0;    // of the device's counter
    std::atomic<Tenant> tenant{0};  // namespace that its tokens belong to; 0: none. Publishing may set it beside a plan
    // Of a pool with windows. The blocks before this one pass where they can; of a partition, those of its longest length count as passed.
    int64_t passed_to = 0;
    int64_t whole_from = 0;                      // the first one that has not passed
    std::shared_ptr<const Partition> partition;  // nullptr: this rank has all its blocks
    int64_t shared_block = 0;                    // of a partition: the last one of its last step, which all ranks have
    bool all_ranks_have(int64_t block) const { return !partition || block == shared_block; }
    std::vector<Gap> gaps;  // in order, apart from each other, all of forgotten blocks

    // From where on distances are those of the length: queries stand there.
    int64_t behind_gaps() const { return gaps.empty() ? 0 : gaps.back().end * kPageTokens; }
};

// Steps that say later what attention blocks got.
class AttentionSource {
  public:
    virtual ~AttentionSource() = default;
    // Leaves with the blocks what has arrived; `wait`: of all steps that were ended so far. Any thread.
    virtual void take_in(bool wait) = 0;
};

class Pool final : private Residents {
  public:
    // Counters since creation, for the statistics.
    struct Counters {
        std::atomic<uint64_t> appended_tokens{0}, closed_pages{0}, reopened_blocks{0}, copied_blocks{0}, saturated_values{0},
            clamped_values{0};
        // Steps that staged blocks; what was staged, a page for each block and layer.
        std::atomic<uint64_t> staged_steps{0}, staged_pages{0}, staged_bytes{0};
    };

    static Result<std::shared_ptr<Pool>> create(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics,
                                                uint64_t budget, uint32_t max_sequences, const TierSettings& tiers = {});
    ~Pool();

    Context& context() const { return *context_; }
    const std::shared_ptr<Context>& shared_context() const { return context_; }
    const Pages& pages() const { return pages_; }
    const Geometry& geometry() const { return geometry_; }
    const Numerics& numerics() const { return numerics_; }
    uint64_t fingerprint() const { return pages_.fingerprint; }
    // Which of this process's pools it is, from 1.
    uint64_t serial() const { return serial_; }
    // Tickets count from here on.
    uint64_t first_ticket() const { return uint64_t(first_generation_) << 32; }
    // The residency of the pool's blocks.
    Residency& residency() { return residency_; }
    const Residency& residency() const { return residency_; }
    BlockStore& blocks() { return residency_.store(); }
    const BlockStore& blocks() const { return residency_.store(); }
    Counters& counters() { return counters_; }
    const Counters& counters() const { return counters_; }
    // [max_sequences] values that kernels replaced in each sequence's slot, or nullptr: a CPU looks before it changes anything.
    uint32_t* nonfinite_counters() const { return nonfinite_.get(); }
    // Values beyond a universal scale, counted by kernels, or nullptr.
    uint64_t* clamped_counter() const {
        return nonfinite_ ? reinterpret_cast<uint64_t*>(nonfinite_.get() + first_even(max_sequences_)) : nullptr;
    }
    // Device memory, only with universal open scales: [max_sequences, 2 sides, layers, kv_heads, 2] of Sequence::largest_scales.
    float* largest_scales() const { return reinterpret_cast<float*>(largest_scales_.get()); }
    size_t scales_record() const { return geometry_.heads() * 2; }
    // Behind it, [max_sequences, kv_heads] of what append kernels keep while they run, 0 between them.
    static constexpr size_t kAppendProgressBytes = 16;
    uint8_t* append_progress() const { return largest_scales_ ? largest_scales_.get() + append_progress_offset() : nullptr; }
    const float* rotation_signs() const { return signs_; }  // [kMaxHeadDim] +1 or -1; a layer takes those of its head_dim

    Status close();
    Status check_open() const override;
    uint32_t max_sequences() const { return max_sequences_; }
    // TA_E_LIMIT: there is no room for so many more sequences.
    Status check_room_for(uint64_t sequences) const;
    Result<ta_seq> create_sequence();
    Result<ta_seq> fork_sequence(ta_seq source);
    Status truncate(ta_seq seq, int64_t length);
    // Of whole blocks in [first, first + n). How many tokens.
    Result<int64_t> forget(ta_seq seq, int64_t first, int64_t n);
    // The same, and closes the gap.
    Status shift(ta_seq seq, int64_t first, int64_t n);
    Status release(ta_seq seq);
    Status set_priority(ta_seq seq, int32_t priority);
    // From now on other ranks have some of its blocks. TA_E_STATE: they have already.
    Status partition(ta_seq seq, std::shared_ptr<const Partition> partition);
    Status may_partition(ta_seq seq) const;  // what that would say now
    Result<int64_t> length(ta_seq seq) const;
    Status verify(ta_seq seq);

    // Takes all sequences for a plan, or none. They stay where they are until unlock_for_plan, released or not.
    Result<std::vector<Sequence*>> lock_for_plan(std::span<const ta_seq> seqs);
    // Empties `seqs`. Sequences that were released meanwhile end now.
    void unlock_for_plan(std::vector<Sequence*>& seqs);
    // When blocks were let go of: a pool that was closed keeps no memory for them.
    void trim_if_closed();
    // The begin that took them failed: what leaves a tier first is as before it.
    void forget_use(std::span<Sequence* const> seqs);
    // Runs `change` on sequences that a plan holds, while nobody reads their lengths. It does not fail.
    template <class Change>
    void commit_plan(Change&& change) {
        std::lock_guard lock(mutex_);
        change();
    }

    // Room for the next tokens of a sequence, in place of what it was promised before.
    Status reserve(ta_seq seq, int64_t tokens, Patience patience);
    // Moves all of an idle sequence to a tier below the device; a ticket. Its promise ends.
    Result<uint64_t> suspend(ta_seq seq, TierKind to);
    // Behind a change of a sequence that `came` tokens and so many freed slots are part of, for commit_plan(): what is left of
    // its promise.
    void keep_promise(Sequence& s, int64_t came, const SlotCounts& freed);
    // Behind a change of a sequence of a pool with windows, for commit_plan(): which blocks have passed.
    void note_passed(Sequence& s) const;
    // TA_E_STATE: a sequence that ends at `length` lacks pages that its windows still see.
    Status check_not_passed(std::span<const BlockPtr> blocks, int64_t length) const;
    // Tells whether steps would find room: ta_kv_pool_fit.
    Result<ta_fit> fit(std::span<const ta_seq> seqs, const int32_t* n_new) const;
    uint64_t reclaimable_bytes() const;

    // One layer in attention_layers is observed, and each in one turn of as many.
    bool observes(uint32_t layer, uint64_t turn) const {
        return residency_.observes_attention() && (layer + turn) % tier_settings().attention_layers == 0;
    }
    // The weights of a sequence's first blocks in step `at`, each times `each`. Blocks that came into their places since then
    // get them.
    void add_attention(uint32_t slot, uint32_t generation, std::span<const float> weights, float each, uint32_t at);
    void add_attention_source(AttentionSource* source);
    void remove_attention_source(AttentionSource* source);
    void take_in_attention(bool wait) override;
    const TierSettings& tier_settings() const { return residency_.settings(); }
    Mover* mover() const { return residency_.mover(); }
    // Moves of full blocks [first, first + n) of a sequence that is in no plan.
    Result<uint64_t> move_blocks(ta_seq seq, uint64_t first, uint64_t n, TierKind to, MoveReason reason);
    // Of one without bytes, which was dropped or is another rank's.
    Status lacks_block(const BlockPtr& block) const;
    Status pin_blocks(ta_seq seq, uint64_t first, uint64_t n, bool pinned);
    Status retain(ta_seq seq, uint64_t first, uint64_t n, Retention retention);
    Status check_range(const Sequence& s, uint64_t first, uint64_t n) const;
    // Records of a persistent file that were damaged when it was opened.
    uint64_t refused_records() const { return refused_records_; }
    const BlockReader& reader() const { return residency_.reader(); }

    // Prefix reuse: pool_prefix.cpp.
    PrefixStore& prefixes() { return prefixes_; }
    const PrefixStore& prefixes() const { return prefixes_; }
    // Publishes the first full blocks of a sequence in no plan, one for each key.
    Status publish(ta_seq seq, Tenant space, std::span<const uint8_t> keys);
    // The same of full, verified blocks that no sequence has, the first of a prefix, under hashed keys.
    Status publish_blocks(Tenant space, std::span<const BlockKey> keys, std::span<const BlockPtr> blocks);
    // A sequence of the namespace with the blocks that are published under the first keys.
    Result<std::pair<ta_seq, int64_t>> match_prefix(Tenant space, std::span<const uint8_t> keys);
    // If files have named as many namespaces as they may, forgets those that nothing in the pool belongs to.
    void end_forgotten_namespaces();
    // Writes the published blocks of a namespace that are not on the persistent disk, where they stay beside what is in memory.
    Status flush_namespace(Tenant space);

    // A sequence at rest: what a copy of it would have.
    struct Snapshot {
        int64_t length = 0;
        std::vector<BlockPtr> blocks;
        Tenant tenant = 0;
    };
    // TA_E_STATE: it is partitioned.
    Result<Snapshot> snapshot(ta_seq seq) const;
    // The same of one that the caller has locked for a plan.
    Result<Snapshot> snapshot_in_plan(const Sequence& seq) const;
    // The namespace that it belongs to, by itself or by blocks that it shares, as files name it.
    SpaceTag tag_of(const Snapshot& s) const;
    // A sequence with these blocks, full ones but for the last.
    Result<ta_seq> adopt(Snapshot&& s);
    // The same for all sequences with their ids, at one moment; TA_E_BUSY while one is in a plan.
    Result<std::vector<std::pair<ta_seq, Snapshot>>> snapshot_all() const;
    // All or none of them.
    Result<std::vector<ta_seq>> adopt_all(std::vector<Snapshot>&& all);
    struct SequenceStats {
        uint32_t sequences = 0;
        uint64_t tokens = 0, shared_blocks = 0;
    };
    SequenceStats sequence_stats() const;

    // Calls body(const Sequence&) on a sequence that is in no plan; it stays unchanged for the duration.
    template <class Body>
    Status inspect(ta_seq seq, Body&& body) const {
        std::lock_guard lock(mutex_);
        Result<Sequence*> s = find_idle(seq);
        if (!s.ok()) return std::move(s).status();
        return body(static_cast<const Sequence&>(*s.value()));
    }

  private:
    Pool(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics, uint64_t budget, uint32_t max_sequences);
    Result<Sequence*> find(ta_seq seq) const;
    Result<Sequence*> find_idle(ta_seq seq) const;
    Status may_partition(const Sequence& s) const;
    Status take_nonfinite_mark(Sequence& sequence);
    void recover_published();
    Status write_record(Block& block, uint64_t index);
    bool may_write_last(const Sequence& s) const;
    class Hold;
    void end_promise(Sequence& s);
    Status check_shift() const;
    int64_t forget_locked(Sequence& s, size_t begin, size_t end, std::vector<BlockPtr>& forgotten);
    Result<std::vector<MoveRequest>> movable_blocks(ta_seq seq, uint64_t first, uint64_t n, TierKind to) const;
    Result<uint32_t> take_slot();
    void give_slot(const Sequence& s);
    static Status busy(ta_seq seq);
    Status check_full(const Sequence& s, uint64_t first, uint64_t n, bool cut) const;
    size_t append_progress_offset() const { return round_up(size_t(max_sequences_) * 2 * scales_record() * sizeof(float), 16); }
    Result<Snapshot> copy_locked(const Sequence& s) const;
    Result<ta_seq> adopt_locked(Snapshot&& s);
    void release_locked(Sequence& s, std::vector<BlockPtr>& dropped);
    void end_locked(Sequence& s, std::vector<BlockPtr>& dropped);
    static size_t first_even(size_t n) { return (n + 1) / 2 * 2; }

    std::mutex& lock() const override { return mutex_; }
    void visit(const std::function<void(const Resident&)>& see) const override;
    std::array<SlotCounts, kTiers> unused_slots() const override { return prefixes_.unused_slots(); }
    std::vector<MoveItem> unused(TierKind tier, uint64_t bytes) const override { return prefixes_.unused(tier, bytes); }
    uint64_t drop_unused(TierKind tier, uint64_t bytes, bool for_all) override {
        return prefixes_.drop_unused(tier, bytes, for_all);
    }
    ta_seq id_of(uint32_t slot) const { return uint64_t(sequences_[slot]->generation) << 32 | slot; }

    std::shared_ptr<Context> context_;
    const Pages pages_;
    const Geometry& geometry_ = pages_.geometry;
    const Numerics& numerics_ = pages_.numerics;
    const uint32_t max_sequences_;
    const uint64_t serial_;
    const uint32_t first_generation_;  // differs from pool to pool: an id of one names nothing in another
    float signs_[kMaxHeadDim];
    Residency residency_;  // its mover ends before the rest
    PrefixStore prefixes_;
    uint64_t refused_records_ = 0;
    Counters counters_;
    struct FreeCounters {
        Device* device;
        void operator()(uint32_t* counters) const { device->deallocate_counters(counters); }
    };
    std::unique_ptr<uint32_t[], FreeCounters> nonfinite_;
    struct FreeMemory {
        Device* device;
        size_t bytes;
        void operator()(uint8_t* memory) const { device->deallocate(memory, bytes); }
    };
    std::unique_ptr<uint8_t[], FreeMemory> largest_scales_;

    // Locks are taken in this order: sources_mutex_, an AttentionSource's, mutex_, PrefixStore's, BlockStore's, a tier's or the
    // device's. Nobody holds one of them while the mover is called.
    std::mutex sources_mutex_;
    std::vector<AttentionSource*> sources_;

    mutable std::mutex mutex_;
    std::atomic<bool> closed_{false};                   // written under mutex_
    std::vector<std::unique_ptr<Sequence>> sequences_;  // by slot
    std::vector<uint32_t> free_slots_;
    uint64_t uses_ = 0;  // of sequences by plans
};

}  // namespace ta
