// The sequences of a pool: their table, and every change of them. Internally synchronised.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "src/core/context.h"
#include "src/kv/append_records.h"
#include "src/kv/prefix.h"
#include "src/kv/sequence.h"
#include "src/page/pages.h"
#include "tiering/room/residency.h"

namespace ta {

// A source of attention that blocks got in steps, which is known later.
class AttentionSource {
  public:
    virtual ~AttentionSource() = default;
    // Adds the attention that has arrived to the blocks. `wait`: of all steps that were ended so far. Any thread.
    virtual void take_in(bool wait) = 0;
};

class Sequences final : public Residents {
  public:
    // At most `most` sequences; their generations begin at `first_generation`. `saturated_values` counts values that kernels
    // made finite.
    Sequences(Context& context, const Pages& pages, Residency& residency, PrefixStore& prefixes, uint32_t most,
              uint32_t first_generation, std::atomic<uint64_t>& saturated_values);

    uint32_t most() const { return most_; }
    AppendRecords& records() { return records_; }
    const AppendRecords& records() const { return records_; }

    // ---- sequences

    // After this all calls are TA_E_CLOSED, close() too.
    Status close();
    // Releases all sequences of a closed pool.
    void release_all();
    Status check_open() const override;
    // TA_E_LIMIT: there is no room for so many more sequences.
    Status check_room_for(uint64_t sequences) const;
    Result<ta_seq> create();
    Result<ta_seq> fork(ta_seq source);
    Status truncate(ta_seq seq, int64_t length);
    // Forgets the whole blocks within [first, first + n). Returns how many tokens.
    Result<int64_t> forget(ta_seq seq, int64_t first, int64_t n);
    // Forgets blocks and closes the gap.
    Status shift(ta_seq seq, int64_t first, int64_t n);
    Status release(ta_seq seq);
    Status set_priority(ta_seq seq, int32_t priority);
    // Makes the sequence partitioned: from now on other ranks have some of its blocks. TA_E_STATE: it is partitioned already.
    Status partition(ta_seq seq, std::shared_ptr<const Partition> partition);
    Status may_partition(ta_seq seq) const;  // what partition() would return now
    Result<int64_t> length(ta_seq seq) const;
    Status verify(ta_seq seq);
    struct Stats {
        uint32_t sequences = 0;
        uint64_t tokens = 0, shared_blocks = 0;
    };
    Stats stats() const;
    // Calls body(const Sequence&) on a sequence that is in no plan; it stays unchanged for the duration.
    template <class Body>
    Status inspect(ta_seq seq, Body&& body) const {
        std::lock_guard lock(mutex_);
        Result<Sequence*> s = find_idle(seq);
        if (!s.ok()) return std::move(s).status();
        return body(static_cast<const Sequence&>(*s.value()));
    }

    // ---- for plans

    // Takes all sequences for a plan, or none. The pointers stay valid until unlock_for_plan, even if sequences are released
    // meanwhile.
    Result<std::vector<Sequence*>> lock_for_plan(std::span<const ta_seq> seqs);
    // Gives the sequences back and empties `seqs`. Sequences that were released meanwhile end now.
    void unlock_for_plan(std::vector<Sequence*>& seqs);
    // To be called after blocks were released: a closed pool keeps no memory for them.
    void trim_if_closed();
    // For a begin that failed: restores the order in which sequences leave a tier.
    void forget_use(std::span<Sequence* const> seqs);
    // Runs `change` on sequences that a plan has, while nobody reads their lengths. `change` does not fail.
    template <class Change>
    void commit_plan(Change&& change) {
        std::lock_guard lock(mutex_);
        change();
    }
    // For commit_plan(): puts the block at `b`, at the end or in exchange for the one there, which `block` is then.
    void put_block(Sequence& s, size_t b, BlockPtr& block);
    // For commit_plan(), after a change of a sequence: `came` tokens are taken off its promise, and the slots that the change
    // freed go back to it.
    void keep_promise(Sequence& s, int64_t came, const SlotCounts& freed);
    // For commit_plan(), after a change of a sequence of a pool with windows: which blocks have passed.
    void note_passed(Sequence& s) const;

    // ---- room

    // Promises room for the sequence's next tokens; replaces an earlier promise.
    Status reserve(ta_seq seq, int64_t tokens, Patience patience);
    // Moves all of an idle sequence to a tier below the device, and ends its promise. Returns a ticket.
    Result<uint64_t> suspend(ta_seq seq, TierKind to);
    // Tells whether steps would find room: ta_kv_pool_fit.
    Result<ta_fit> fit(std::span<const ta_seq> seqs, const int32_t* n_new) const;
    uint64_t reclaimable_bytes() const;

    // ---- blocks

    // Moves full blocks [first, first + n) of a sequence that is in no plan. Returns a ticket.
    Result<uint64_t> move_blocks(ta_seq seq, uint64_t first, uint64_t n, TierKind to, MoveReason reason);
    // The error for a block without bytes: it was dropped, or another rank has it.
    Status lacks_block(const BlockPtr& block) const;
    Status pin_blocks(ta_seq seq, uint64_t first, uint64_t n, bool pinned);
    Status retain(ta_seq seq, uint64_t first, uint64_t n, Retention retention);
    Status check_range(const Sequence& s, uint64_t first, uint64_t n) const;
    // Adds the weights, times `each`, that a sequence's first blocks got in step `at`. A block that has replaced another since
    // then gets the other's weight.
    void add_attention(uint32_t slot, uint32_t generation, std::span<const float> weights, float each, uint32_t at);
    void add_source(AttentionSource* source);
    void remove_source(AttentionSource* source);

    // ---- copies

    // The parts of a sequence that a copy of it would have.
    struct Snapshot {
        int64_t length = 0;
        std::vector<BlockPtr> blocks;
        Tenant tenant = 0;
    };
    // TA_E_STATE: the sequence is partitioned.
    Result<Snapshot> snapshot(ta_seq seq) const;
    // Of a sequence that the caller has locked for a plan.
    Result<Snapshot> snapshot_in_plan(const Sequence& seq) const;
    // A snapshot that others may read. TA_E_NONFINITE, once: kernels replaced values that were not finite.
    Result<Snapshot> snapshot_to_publish(ta_seq seq);
    // Snapshots of all sequences with their ids, at one moment. TA_E_BUSY: one is in a plan.
    Result<std::vector<std::pair<ta_seq, Snapshot>>> snapshot_all() const;
    // Makes a sequence with these blocks; all but the last are full.
    Result<ta_seq> adopt(Snapshot&& s);
    // Adopts all or none.
    Result<std::vector<ta_seq>> adopt_all(std::vector<Snapshot>&& all);
    // From now on the sequence's tokens belong to the namespace, if the sequence still lives.
    void set_tenant(ta_seq seq, Tenant space);
    // Calls `see` with the namespaces of all sequences and of their blocks, while no sequence comes or goes.
    void visit_tenants(const std::function<void(const std::unordered_set<Tenant>&)>& see) const;

    // ---- as the tiers see them

    std::mutex& lock() const override { return mutex_; }
    void visit(const std::function<void(const Resident&)>& see) const override;
    void take_in_attention(bool wait) override;
    std::array<SlotCounts, kTiers> unused_slots() const override { return prefixes_.unused_slots(); }
    std::vector<MoveItem> unused(TierKind tier, uint64_t bytes) const override { return prefixes_.unused(tier, bytes); }
    uint64_t drop_unused(TierKind tier, uint64_t bytes, bool for_all) override {
        return prefixes_.drop_unused(tier, bytes, for_all);
    }

  private:
    class Hold;
    BlockStore& blocks() const { return residency_.store(); }
    Result<Sequence*> find(ta_seq seq) const;
    Result<Sequence*> find_idle(ta_seq seq) const;
    ta_seq id_of(uint32_t slot) const { return uint64_t(sequences_[slot]->generation) << 32 | slot; }
    static Status busy(ta_seq seq);
    Result<uint32_t> take_slot();
    void give_slot(const Sequence& s);
    Status take_nonfinite_mark(Sequence& s);
    bool may_write_last(const Sequence& s) const;
    void end_promise(Sequence& s);
    Status check_memory(const Sequence& s, const SlotCounts& to, int64_t tokens) const;
    static void let_leave(const Sequence& s, size_t first = 0);
    Status may_partition(const Sequence& s) const;
    // TA_E_STATE: a sequence that ends at `length` lacks pages that its windows still see.
    Status check_not_passed(std::span<const BlockPtr> blocks, int64_t length) const;
    Status check_shift() const;
    int64_t forget_locked(Sequence& s, size_t begin, size_t end, std::vector<BlockPtr>& forgotten);
    Result<std::vector<MoveRequest>> movable_blocks(ta_seq seq, uint64_t first, uint64_t n) const;
    Status check_full(const Sequence& s, uint64_t first, uint64_t n, bool cut) const;
    Result<Snapshot> copy_locked(const Sequence& s) const;
    Result<ta_seq> adopt_locked(Snapshot&& s);
    void release_locked(Sequence& s, std::vector<BlockPtr>& dropped);
    void end_locked(Sequence& s, std::vector<BlockPtr>& dropped);

    Context& context_;
    const Pages& pages_;
    const Geometry& geometry_;
    const Numerics& numerics_;
    Residency& residency_;
    PrefixStore& prefixes_;
    const uint32_t most_;
    const uint32_t first_generation_;
    std::atomic<uint64_t>& saturated_values_;
    AppendRecords records_;

    // Order of locks: sources_mutex_, an AttentionSource's, mutex_, PrefixStore's, BlockStore's, a tier's or the device's. No
    // thread holds one of them while it calls the mover.
    std::mutex sources_mutex_;
    std::vector<AttentionSource*> sources_;

    mutable std::mutex mutex_;
    std::atomic<bool> closed_{false};                   // written under mutex_
    std::vector<std::unique_ptr<Sequence>> sequences_;  // by slot
    std::vector<uint32_t> free_slots_;
    uint64_t uses_ = 0;  // of sequences by plans
};

}  // namespace ta
