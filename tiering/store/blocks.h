// Blocks: reference-counted slots under a byte budget, in the device tier or in a tier below it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "src/core/memory.h"
#include "src/page/geometry.h"
#include "src/page/trailer.h"
#include "tiering/disk/request.h"
#include "tiering/policy/policy.h"
#include "tiering/store/prefetch_mark.h"
#include "tiering/store/retention.h"
#include "tiering/store/room_signal.h"
#include "tiering/store/slot_memory.h"
#include "tiering/tier.h"

namespace ta {

class BlockStore;

// Whose tokens are in a block: the namespace's id (src/kv/prefix.h); 0: no namespace's.
using Tenant = uint64_t;
inline constexpr Tenant kUnknownTenant = UINT64_MAX;
inline constexpr Tenant kNobody = UINT64_MAX - 1;  // of memory without anybody's tokens

// The keys by which a record on disk is found again.
struct RecordKeys {
    BlockKey first{};    // the one in its identity
    uint64_t state = 0;  // version of the block's keys when it was written; 0: the record has none
};

// Where a block's bytes are, and in what kind.
struct Place {
    TierKind tier = TierKind::kDevice;
    PageKind kind = PageKind::kToken;
    uint8_t* address = nullptr;  // as the device reads it; nullptr on disk
    Slot slot;                   // of a tier below the device
    RecordKeys keys;             // of the record, if the place is on disk
};

// One slot with its bytes. Once full and committed the bytes never change; an open block is written only by the plan that has
// its sequence. Sequences share blocks by shared_ptr; the last owner gives the slot back. A full block may move to another tier
// at any time, and take another kind there if precision falls. So readers stay between BlockStore::start_reading and
// stop_reading. Content id and kind determine a block's bytes (tiering/store/fall.h): a moved block keeps its content id.
class Block {
  public:
    Block(BlockStore& store, PageKind kind, uint8_t* slot, uint64_t content_id)
        : store_(store), kind_(kind), stored_(pack(slot, kind)), content_id_(content_id) {}
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    // The block's kind where it is now.
    PageKind kind() const { return kind_.load(std::memory_order_acquire); }
    // For a reader that has seen the block in a tier other than the disk. A reader that came before a move still finds the old
    // slot intact.
    struct Stored {
        uint8_t* slot;
        PageKind kind;  // of the bytes there
    };
    Stored stored() const {
        const uintptr_t packed = stored_.load(std::memory_order_acquire);
        return {reinterpret_cast<uint8_t*>(packed & ~kKindBits), PageKind(packed & kKindBits)};
    }
    uint8_t* slot() const { return stored().slot; }
    TierKind tier() const { return tier_.load(std::memory_order_acquire); }
    uint64_t content_id() const { return content_id_; }
    // True if the trailer has the hashes of all pages: nobody writes the block any more, and it may move.
    bool sealed() const { return sealed_.load(std::memory_order_acquire); }
    // True if the block was open when it was sealed, to leave with a suspended sequence. It lacks tokens, so the next step
    // copies it.
    bool suspended() const { return suspended_.load(std::memory_order_acquire); }
    // False for some passed blocks: moving them gains nothing.
    bool has_pages() const;
    // True if sealed, with all 64 tokens.
    bool full() const { return sealed() && !suspended(); }

    // Writes the trailer: identity, and one hash per page when `tokens` is 64.
    void seal(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index, uint32_t tokens);
    // Writes the same trailer into a host copy of the slot.
    void write_trailer(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index, uint32_t tokens,
                       uint8_t* slot) const;
    // Call before an open block is sealed.
    void mark_suspended() { suspended_.store(true, std::memory_order_release); }
    // Undoes the sealing of a suspended block that did not move and has no other owner.
    void reopen() {
        sealed_.store(false, std::memory_order_release);
        suspended_.store(false, std::memory_order_release);
    }
    // Marks the block as sealed: its trailer is in place, or enqueued where its bytes are.
    void mark_sealed() { sealed_.store(true, std::memory_order_release); }
    // Recomputes the hashes of a sealed block; its bytes, or a copy of them, are at `slot`, in kind `kind`. TA_E_CORRUPT names
    // the layer.
    Status verify(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index, const uint8_t* slot,
                  PageKind kind) const;

    // Begins a move; there is one at a time. False: another one is under way.
    bool start_move() { return !moving_.exchange(true, std::memory_order_acquire); }
    void end_move() {
        has_place_.store(false, std::memory_order_release);
        moving_.store(false, std::memory_order_release);
    }
    bool moving() const { return moving_.load(std::memory_order_relaxed); }
    // Called when the move has taken the slot that the block goes to. Before that it may still find none.
    void set_has_place() { has_place_.store(true, std::memory_order_release); }
    bool has_place() const { return has_place_.load(std::memory_order_acquire); }
    // Called when the bytes do not match their hashes: from now on the block is not chosen for moves.
    void set_stuck() { stuck_.store(true, std::memory_order_relaxed); }
    bool stuck() const { return stuck_.load(std::memory_order_relaxed); }
    // Whether the last move could not read the block from the disk. Moves go on trying; matches end before it.
    void set_unreadable(bool value) { unreadable_.store(value, std::memory_order_relaxed); }
    // True if a match must not hand the block out. A block that is published under the same key takes its place.
    bool is_bad() const { return stuck() || unreadable_.load(std::memory_order_relaxed); }
    // True if the bytes are gone for good: the block has no slot, and attention skips it. It also stops being sealed, so it
    // does not move.
    bool dropped() const { return dropped_.load(std::memory_order_acquire); }
    // A pinned block moves to faster tiers only.
    void unpin() { pins_.fetch_sub(1, std::memory_order_relaxed); }
    uint32_t pins() const { return pins_.load(std::memory_order_relaxed); }
    // Counts the sequences with a reservation that have the block. While there are some, no move takes it to the disk, however early
    // it was asked for. If a move may know the block already, BlockStore::promise_readable() adds the first one.
    void add_reservation() { reservations_.fetch_add(1, std::memory_order_relaxed); }
    void remove_reservation() { reservations_.fetch_sub(1, std::memory_order_relaxed); }
    // A move asks this under the store's lock before it commits. Before that the answer is a hint.
    bool refuses(TierKind to) const {
        return to > tier() && (pins() > 0 || (to == TierKind::kDisk && reservations_.load(std::memory_order_relaxed) > 0));
    }
    // Attention that the block got in all sequences that share it. Several threads may add at once.
    AttentionMass mass() const { return mass_.load(std::memory_order_relaxed); }
    // The first step in which the block got attention.
    uint32_t since() const { return since_.load(std::memory_order_relaxed) - 1; }
    // `step`: in which the weight was given.
    void add_mass(float weight, uint32_t step, Decay& decay) {
        if (since_.load(std::memory_order_relaxed) == 0) since_.store(step + 1, std::memory_order_relaxed);
        AttentionMass now = mass();
        while (!mass_.compare_exchange_weak(now, {decay.at_now(now) + weight, decay.now()}, std::memory_order_relaxed)) {
        }
    }
    Retention retention() const { return retention_.load(std::memory_order_relaxed); }
    PrefetchMark& prefetch() { return prefetch_; }
    const PrefetchMark& prefetch() const { return prefetch_; }
    // For a block that gets those pages of `from` that stay when windows have passed, with their hashes.
    void stand_for(const Block& from) {
        content_id_ = from.content_id_;
        retention_.store(from.retention(), std::memory_order_relaxed);
        take_mass(from);
    }
    // For a block that replaces `from` in a sequence.
    void take_mass(const Block& from) {
        mass_.store(from.mass(), std::memory_order_relaxed);
        since_.store(from.since_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }

    // Before another tenant's block gets this block's memory, it is zeroed.
    void set_tenant(Tenant tenant) { tenant_.store(tenant, std::memory_order_relaxed); }
    Tenant tenant() const { return tenant_.load(std::memory_order_relaxed); }
    // The identity in the block's record on disk. `index`: the block's, in its sequence.
    BlockIdentity identity(uint64_t index, const RecordKeys& keys) const {
        return {index, content_id_, uint32_t(kPageTokens), keys.first};
    }
    // True if the block has keys (BlockStore::add_key), so that the next process finds it.
    bool published() const { return published_.load(std::memory_order_acquire); }
    // True if the kind is final: the block is or was published (BlockStore::keep_kind).
    bool keeps_kind() const { return keeps_kind_.load(std::memory_order_acquire); }
    // How many of its owners are entries of prefix tables. Changes under the lock of the tables (src/kv/prefix.h).
    uint32_t entries() const { return entries_.load(std::memory_order_relaxed); }
    void add_entry() { entries_.fetch_add(1, std::memory_order_relaxed); }
    void remove_entry() { entries_.fetch_sub(1, std::memory_order_relaxed); }

  private:
    friend class BlockStore;

    static constexpr uintptr_t kKindBits = 7;  // slots are aligned
    static uintptr_t pack(uint8_t* slot, PageKind kind) { return reinterpret_cast<uintptr_t>(slot) | uintptr_t(kind); }

    BlockStore& store_;
    // The fields that evictions read come first, in one cache line with the count of owners.
    std::atomic<AttentionMass> mass_{AttentionMass{}};
    std::atomic<uint32_t> since_{0};  // the first step with attention, plus 1; 0: none yet
    std::atomic<uint32_t> pins_{0};
    std::atomic<Retention> retention_{Retention{}};
    std::atomic<PageKind> kind_;
    std::atomic<TierKind> tier_{TierKind::kDevice};
    std::atomic<bool> moving_{false}, has_place_{false}, stuck_{false}, unreadable_{false};
    std::atomic<bool> sealed_{false}, suspended_{false};
    PrefetchMark prefetch_;
    std::atomic<bool> dropped_{false};
    std::atomic<uint32_t> reservations_{0};  // sequences with a reservation that have it
    std::atomic<uintptr_t> stored_;          // address, and the kind of the bytes there
    uint64_t content_id_;
    Slot tier_slot_;  // in a tier below the device; the store guards it and all changes of stored_, kind_ and tier_
    RecordKeys tier_keys_;
    // A record beside the block on a persistent disk: where the block was before it came up, or written by a flush.
    Slot record_;
    RecordKeys record_keys_;
    // Records of blocks that this one has replaced under a key (BlockStore::replace). Nothing is read from them here. Each stays
    // until a record of this block has the key: from the state `until` of its keys on.
    struct OldRecord {
        Slot slot;
        uint64_t until;
    };
    std::vector<OldRecord> old_records_;
    std::weak_ptr<Block> heir_;  // the block that has replaced this one, and that state of its keys
    uint64_t heir_state_ = 0;
    std::vector<BlockKey> keys_;  // under which the block is published; guarded by the store
    uint64_t keys_state_ = 0;     // their version: grows with every change
    std::atomic<bool> published_{false}, keeps_kind_{false};
    std::atomic<uint32_t> entries_{0};
    std::atomic<Tenant> tenant_{0};
};

using BlockPtr = std::shared_ptr<Block>;

// A full block, its index in the sequence, and where its bytes, or a copy of them, are.
struct PlacedBlock {
    Block* block;
    uint64_t index;
    uint8_t* slot;
    PageKind kind;
    uint64_t content_id = 0;  // of the bytes there, if not the block's own; 0: the block's
};

// Slots of the device tier, by PageKind.
using SlotCounts = std::array<uint64_t, kPageKinds>;
// For each kind, the smaller count of the two.
inline SlotCounts least_of(SlotCounts a, const SlotCounts& b) {
    for (size_t kind = 0; kind < a.size(); ++kind) a[kind] = std::min(a[kind], b[kind]);
    return a;
}
inline SlotCounts sum_of(SlotCounts a, const SlotCounts& b) {
    for (size_t kind = 0; kind < a.size(); ++kind) a[kind] += b[kind];
    return a;
}

// Keep moves from overtaking users of blocks. Only tests switch one off, to see that they would notice.
struct Barriers {
    bool writers = true;  // copies run after the steps that were ended before them
    bool readers = true;  // a place that a block has left is freed when its readers are done
};

// Hands out slots of all kinds in the device tier, and keeps freed ones for reuse. All bytes it holds, in use or cached, stay
// within the budget. Blocks may move to the tiers below.
class BlockStore {
  public:
    BlockStore(Allocator& allocator, Device* device, const Geometry& geometry, uint64_t budget);
    // With a device, call this first: takes memory for the whole budget.
    Status take_slab();
    // The memory of all slots; only with a device.
    DeviceRange device_memory() const { return slab_->memory(); }
    ~BlockStore();
    BlockStore(const BlockStore&) = delete;
    BlockStore& operator=(const BlockStore&) = delete;

    // Makes one block for each kind in `wanted`, in that order; on failure makes none and changes nothing. The bytes are
    // unspecified, without leftovers of other tenants, which are zeroed; kernels never read slots of tokens that were not
    // written. TA_E_TIER_FULL: beyond the budget; `failed` is the first block that does not fit. TA_E_MEMORY: the allocator has
    // none. `tenants`: one for each block, or empty: none. `promised`: so many slots come out of promises of the caller, who
    // reduces these.
    Result<std::vector<BlockPtr>> acquire(std::span<const PageKind> wanted, size_t* failed = nullptr,
                                          std::span<const Tenant> tenants = {}, const SlotCounts& promised = {});
    // Sets slots aside for one owner: changes the owner's `promise` to `to`. TA_E_TIER_FULL: there are not enough free slots,
    // and nothing was changed. Making a promise smaller never fails.
    Status promise(SlotCounts& promise, const SlotCounts& to);
    // The same for an owner that knows there is room: it is about to give slots back, or has taken some and failed.
    void settle(SlotCounts& promise, const SlotCounts& to);
    // Takes slots without blocks, for blocks that come back from other tiers and overwrite all of the slot.
    Result<std::vector<uint8_t*>> acquire_slots(std::span<const PageKind> wanted, size_t* failed = nullptr);
    void release_slot(PageKind kind, uint8_t* slot);
    // Takes free slots for a while, without blocks: as many as there are, `most` at most. release_scratch() names the tenant
    // whose bytes the caller has put into them.
    struct Scratch {
        uint8_t* slot;
        Tenant tenant;  // whose bytes are in it
    };
    std::vector<Scratch> acquire_scratch(PageKind kind, size_t most);
    void release_scratch(PageKind kind, const Scratch& scratch, Tenant tenant);
    bool has_scratch() const;

    Barriers& barriers() { return barriers_; }
    // The tiers outlive the store's blocks.
    void attach(const LowerTiers& tiers);
    Place place_of(const Block& block) const;
    // Calls f(i, place) for each of these blocks, all seen at one moment. f must not call the store.
    template <class F>
    void visit_places(std::span<const Block* const> blocks, F&& f) const {
        std::lock_guard lock(mutex_);
        for (size_t i = 0; i < blocks.size(); ++i) f(i, place_locked(*blocks[i]));
    }
    // Tells readers that the block's bytes have been copied to `to`, which the caller acquired. The block's old place is freed
    // when all present readers are done. False, and nothing was done: `to` has another kind and the block's kind has become
    // final; or the block refuses to go there.
    bool move(Block& block, const Place& to);
    // Moves a block to the disk tier without a copy, if the tier has a record of it.
    bool move_to_record(Block& block);
    // Takes memory for so many calls of move() and move_to_record(), which then need none: a move that ran out of memory half way
    // would leave a slot that no block has. end_moves() gives as many back; MovesToCome calls both.
    void expect_moves(size_t n);
    void end_moves(size_t n);
    // Pins blocks: they move no further down.
    void pin(std::span<const BlockPtr> blocks);
    // Adds a reservation to each of the blocks, so that none goes to the disk any more. False, and nothing was done: one is there.
    bool promise_readable(std::span<const BlockPtr> blocks);
    // Sets the priority by which blocks leave full tiers. given_priorities(): a bit for each priority ever given.
    void retain(std::span<const BlockPtr> blocks, Retention retention);
    uint64_t given_priorities() const { return given_priorities_.load(std::memory_order_relaxed); }
    // Makes the block's kind final. False: it was final already.
    bool keep_kind(Block& block);
    // Undoes keep_kind().
    void free_kind(Block& block);
    // A block without bytes, like a dropped one. In a sequence it stands for a block of another rank of the group.
    const BlockPtr& absent() const { return absent_; }
    // Makes a block without bytes that stands for one that a sequence has forgotten.
    BlockPtr forgotten();
    // True if forgotten() was ever called.
    bool has_forgotten() const { return has_forgotten_.load(std::memory_order_acquire); }
    // Gives up the block's bytes and frees its place at once: the caller knows that nobody reads there.
    void drop(Block& block);
    // From start_reading() until stop_reading(), a block that was seen outside the disk tier has its bytes at Block::slot().
    // They stay at every address that slot() returned, even if the block moves.
    uint64_t start_reading();
    // Signals if places came free, or if still_reading() has reported this reader. It must not signal each time: begins that
    // look for room in vain are readers for a moment, and would wake each other without end.
    void stop_reading(uint64_t reading);
    // The number of the latest reader; earlier ones have lower numbers.
    uint64_t last_reading() const;
    // True if readers up to `last` are still reading. Each of them will signal when it stops.
    bool still_reading(uint64_t last) const;
    // True if readers keep places that blocks have left from being freed.
    bool has_vacated() const;
    // The number of such places in a tier, by kind.
    SlotCounts vacated_slots(TierKind tier) const;
    uint64_t vacated_bytes(TierKind tier) const { return bytes_of(vacated_slots(tier)); }
    // Makes the full block that a persistent disk tier found, with all keys of its record. Attach the tier first.
    BlockPtr recover(const RecoveredBlock& found);
    // The keys under which a block is published, for a persistent disk tier. Records written from then on carry the keys that
    // the block has then; such a record stays on the disk when the block comes up. Call reserve_keys before add_key, for as
    // many keys as will be added.
    void reserve_keys(Block& block, size_t more);
    void add_key(Block& block, const BlockKey& key) noexcept;
    void remove_key(Block& block, const BlockKey& key);
    // The keys for a record that is written now. `more`: those after the first one.
    RecordKeys keys_of(const Block& block, std::vector<BlockKey>& more) const;
    // Gives the block a record on disk beside its place, written with these keys. Releases the record if it is not needed any
    // more.
    void set_record(Block& block, Slot slot, const RecordKeys& keys);
    bool has_record(const Block& block) const;
    // The kind of slot that drop_record() would free; nothing: none.
    std::optional<PageKind> droppable_record(const Block& block) const;
    // False: there is no record.
    bool drop_record(Block& block);
    // Tells that another block has replaced `block` under a key, which it has already. A record of `block` stays until the other one
    // has a record with the key: a flush may have promised it.
    void replace(Block& block, const std::shared_ptr<Block>& by) noexcept;
    // How many records drop_record() has dropped since creation.
    uint64_t dropped_records() const { return dropped_records_.load(std::memory_order_relaxed); }
    // True if a record, beside the block or its place, was written with the block's present keys. It has as many of them as a
    // record can hold.
    bool has_keys_on_disk(const Block& block) const;
    // The number of the block's keys. A record must be found under any of them.
    size_t count_keys(const Block& block) const;
    // While the pool starts or ends: keeps records of published blocks on disk, for the next process.
    void keep_records(bool keep = true) { keep_records_.store(keep, std::memory_order_release); }
    // Grows with every move.
    uint64_t moves() const { return moves_.load(std::memory_order_acquire); }
    // Signalled when bytes come free in a tier, a block moves, or a reader stops. Others signal it when they release blocks.
    const RoomSignal& room_signal() const { return room_signal_; }
    // Prefetched blocks, each counted once: used by a step; late, wanted by a step before they came; or wasted, gone unused.
    struct PrefetchCounters {
        std::atomic<uint64_t> used{0}, late{0}, wasted{0};
    };
    PrefetchCounters& prefetches() { return prefetches_; }
    const PrefetchCounters& prefetches() const { return prefetches_; }
    uint64_t blocks_on_disk() const { return on_disk_.load(std::memory_order_acquire); }

    // Gives cached slots back to the allocator.
    void trim();
    uint64_t next_content_id() { return content_ids_.fetch_add(1, std::memory_order_relaxed); }

    struct Usage {
        uint64_t used = 0, free = 0, cached = 0, promised = 0, peak = 0, token_blocks = 0, channel_blocks = 0, low_blocks = 0,
                 passed_blocks = 0;
    };
    Usage usage() const;
    uint64_t budget() const { return budget_; }
    uint64_t bytes_of(const SlotCounts& slots) const;  // UINT64_MAX: overflow
    uint64_t free_bytes() const;                       // of the budget: neither in use nor promised
    uint64_t usable_bytes() const;                     // part of free_bytes() that full blocks of any kind can use
    double fragmentation() const;                      // share of free_bytes() that such blocks cannot use

  private:
    friend class Block;
    struct Reading {
        uint64_t number;
        uint64_t from;  // moves_ when it started
    };
    struct Vacated {  // a place that a moved block has left
        uint64_t at;
        Place place;
        Tenant tenant;
        bool replaced;  // a record whose block has another record now
    };
    struct Cached {
        uint8_t* slot;
        Tenant tenant;  // whose bytes are in the slot
    };
    struct AcquiredSlot {
        uint8_t* slot;
        bool fresh;     // taken from the allocator or slab, not from cached_
        Tenant tenant;  // whose bytes are in the slot
    };
    BlockPtr without_bytes();
    Status take_slots(std::span<const PageKind> wanted, std::vector<AcquiredSlot>& slots, size_t* failed,
                      const SlotCounts& promised = {}, bool as_scratch = false);
    Result<AcquiredSlot> cut_slot(PageKind kind, const SlotCounts& keep);
    uint8_t* take_memory(PageKind kind, const SlotCounts& keep);
    void reserve_cached();
    Status clear(std::span<const PageKind> wanted, std::span<const AcquiredSlot> slots, std::span<const Tenant> tenants);
    void release_slot(PageKind kind, uint8_t* slot, Tenant tenant);
    void release(const Block& block);
    void free_place(const Place& place, Tenant tenant, bool replaced = false);
    void give_record(Slot slot, bool replaced);
    bool leave_record(Block& heir, Slot record, uint64_t state) noexcept;
    void give_old_records(Block& block, uint64_t state);
    void release_records(Block& block);
    Place place_locked(const Block& block) const;
    bool move_locked(Block& block, const Place& to, Block* heir);
    void free_vacated();
    void free_cached(PageKind kind, size_t keep);
    bool has_room_to_keep(PageKind kind) const;
    Tenant zero_if_given(PageKind kind, uint8_t* slot, Tenant tenant);
    void put_back(PageKind kind, const Cached& slot);
    void give(PageKind kind, const Cached& slot);
    uint64_t bytes_in_use() const { return bytes_of(in_use_); }
    uint64_t bytes_free() const;
    uint64_t bytes_fragmented() const;
    Status beyond_budget(std::span<const PageKind> wanted, uint64_t free, size_t* failed) const;

    const Geometry& geometry_;
    const uint64_t budget_;
    Barriers barriers_;
    Device* const device_;
    const bool has_hooks_;
    bool slab_has_tenants_ = false;  // free memory of the slab may have a namespace's bytes
    std::atomic<bool> keep_records_{false};
    std::atomic<uint64_t> content_ids_{1};
    mutable std::mutex mutex_;
    std::unique_ptr<SlotSlab> slab_;  // with a device
    SlotMemory memory_[kPageKinds];   // by PageKind, like all arrays below
    std::vector<Cached> cached_[kPageKinds];
    SlotCounts in_use_{};
    // Slots of cached_ that are promised; cached_ has others, too. settle() counts some that are in use still, for a moment.
    SlotCounts promised_{};
    uint64_t held_ = 0;  // bytes, in use and cached
    uint64_t peak_ = 0;  // bytes in use
    LowerTiers tiers_;
    Tier* disk_ = nullptr;  // the one in tiers_
    SlotCounts scratch_{};  // part of in_use_: slots of acquire_scratch()
    std::atomic<uint64_t> moves_{0}, on_disk_{0}, dropped_records_{0};
    PrefetchCounters prefetches_;
    uint64_t readings_ = 0;                 // ever started
    std::vector<Reading> reading_;          // now
    mutable uint64_t awaited_reading_ = 0;  // readers up to this one signal when they stop
    std::vector<Vacated> vacated_;          // oldest first; has room for one of each expected move
    size_t expected_moves_ = 0;
    RoomSignal room_signal_;
    BlockPtr absent_;
    std::atomic<bool> has_forgotten_{false};
    std::atomic<uint64_t> given_priorities_{0};
};

// Reads blocks for the duration of a scope.
class ReadingBlocks {
  public:
    explicit ReadingBlocks(BlockStore& store) : store_(store), reading_(store.start_reading()) {}
    ~ReadingBlocks() { store_.stop_reading(reading_); }
    ReadingBlocks(const ReadingBlocks&) = delete;
    ReadingBlocks& operator=(const ReadingBlocks&) = delete;

  private:
    BlockStore& store_;
    const uint64_t reading_;
};

// Moves of so many blocks for a scope, which take no memory (BlockStore::expect_moves).
class MovesToCome {
  public:
    MovesToCome(BlockStore& store, size_t n) : store_(store), n_(n) { store_.expect_moves(n); }
    ~MovesToCome() { store_.end_moves(n_); }
    MovesToCome(const MovesToCome&) = delete;
    MovesToCome& operator=(const MovesToCome&) = delete;

  private:
    BlockStore& store_;
    const size_t n_;
};

}  // namespace ta
