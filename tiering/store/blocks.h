// Blocks: reference-counted slots under a byte budget, in the device tier or in a tier below it.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
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

// Whose tokens a block holds: the namespace's id (src/kv/prefix.h), 0: of none.
using Tenant = uint64_t;
inline constexpr Tenant kUnknownTenant = UINT64_MAX;
inline constexpr Tenant kNobody = UINT64_MAX - 1;  // of memory that holds nothing of any tenant

// The keys under which a record on disk is found again.
struct RecordKeys {
    BlockKey first{};    // that reading it names
    uint64_t state = 0;  // of the block's keys when it was written; 0: it has none
};

// The place of a block's bytes, and how many bits they have.
struct Place {
    TierKind tier = TierKind::kDevice;
    PageKind kind = PageKind::kToken;
    uint8_t* address = nullptr;  // that the device reads; nullptr on disk
    Slot slot;                   // of a tier below the device
    RecordKeys keys;             // of the record on disk
};

// One slot with its bytes. Immutable once committed and full; an open block is written by the one plan that holds its sequence.
// Shared between sequences by shared_ptr; the last owner gives the slot back. A full block may be moved to another tier at any
// time, and be of another kind there where precision falls; who reads its bytes does so between BlockStore::start_reading and
// stop_reading. The bytes of a block of some kind follow from its content id (tiering/store/fall.h), so it keeps that.
class Block {
  public:
    Block(BlockStore& store, PageKind kind, uint8_t* slot, uint64_t content_id)
        : store_(store), kind_(kind), stored_(pack(slot, kind)), content_id_(content_id) {}
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    // The kind of the block where it is now.
    PageKind kind() const { return kind_.load(std::memory_order_acquire); }
    // For a reader that has seen the block in a tier other than the disk; stays as it was for one that came before a move.
    struct Stored {
        uint8_t* slot;
        PageKind kind;  // of what is there
    };
    Stored stored() const {
        const uintptr_t packed = stored_.load(std::memory_order_acquire);
        return {reinterpret_cast<uint8_t*>(packed & ~kKindBits), PageKind(packed & kKindBits)};
    }
    uint8_t* slot() const { return stored().slot; }
    TierKind tier() const { return tier_.load(std::memory_order_acquire); }
    uint64_t content_id() const { return content_id_; }
    // True when the trailer holds the hashes of all pages: the block is written no more and may move.
    bool sealed() const { return sealed_.load(std::memory_order_acquire); }
    // It was open when it was sealed, to move with a suspended sequence: it lacks tokens, and the next step copies it.
    bool suspended() const { return suspended_.load(std::memory_order_acquire); }
    // Some passed blocks have none: there is nothing to be had by moving them.
    bool has_pages() const;
    // Sealed, with all 64 tokens.
    bool full() const { return sealed() && !suspended(); }

    // Writes the trailer: identity, and one hash per page when `tokens` is 64.
    void seal(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index, uint32_t tokens);
    // The same into a host copy of the slot.
    void write_trailer(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index, uint32_t tokens,
                       uint8_t* slot) const;
    // Before an open block is sealed.
    void mark_suspended() { suspended_.store(true, std::memory_order_release); }
    // It did not move, and nobody else has it: as it was before it was suspended.
    void reopen() {
        sealed_.store(false, std::memory_order_release);
        suspended_.store(false, std::memory_order_release);
    }
    // The same was enqueued where the block's bytes are.
    void mark_sealed() { sealed_.store(true, std::memory_order_release); }
    // Recomputes the hashes of a sealed block whose bytes, or a copy of them, are at `slot`, of this kind. TA_E_CORRUPT names
    // the layer.
    Status verify(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index, const uint8_t* slot,
                  PageKind kind) const;

    // One move at a time: false when there is one already.
    bool start_move() { return !moving_.exchange(true, std::memory_order_acquire); }
    void end_move() {
        has_place_.store(false, std::memory_order_release);
        moving_.store(false, std::memory_order_release);
    }
    bool moving() const { return moving_.load(std::memory_order_relaxed); }
    // The move has taken the slot that the block goes to. Until then it may find none.
    void set_has_place() { has_place_.store(true, std::memory_order_release); }
    bool has_place() const { return has_place_.load(std::memory_order_acquire); }
    // Its bytes do not match their hashes: nobody tries to move it again by himself.
    void set_stuck() { stuck_.store(true, std::memory_order_relaxed); }
    bool stuck() const { return stuck_.load(std::memory_order_relaxed); }
    // Its bytes are gone for good, and it has no slot: attention passes over it. Not sealed any more, so that it is not moved
    // either.
    bool dropped() const { return dropped_.load(std::memory_order_acquire); }
    // A pinned block is moved up only.
    void unpin() { pins_.fetch_sub(1, std::memory_order_relaxed); }
    uint32_t pins() const { return pins_.load(std::memory_order_relaxed); }
    // Attention that the block got, of all sequences that share it; several may add at once.
    AttentionMass mass() const { return mass_.load(std::memory_order_relaxed); }
    // The step in which it got attention first.
    uint32_t since() const { return since_.load(std::memory_order_relaxed) - 1; }
    // `step`: in which it got the weight.
    void add_mass(float weight, uint32_t step, Decay& decay) {
        if (since_.load(std::memory_order_relaxed) == 0) since_.store(step + 1, std::memory_order_relaxed);
        AttentionMass now = mass();
        while (!mass_.compare_exchange_weak(now, {decay.at_now(now) + weight, decay.now()}, std::memory_order_relaxed)) {
        }
    }
    Retention retention() const { return retention_.load(std::memory_order_relaxed); }
    PrefetchMark& prefetch() { return prefetch_; }
    const PrefetchMark& prefetch() const { return prefetch_; }
    // It has the pages of `from` that stay when windows have passed, with their hashes.
    void stand_for(const Block& from) {
        content_id_ = from.content_id_;
        retention_.store(from.retention(), std::memory_order_relaxed);
        take_mass(from);
    }
    // It takes the place of `from` in a sequence.
    void take_mass(const Block& from) {
        mass_.store(from.mass(), std::memory_order_relaxed);
        since_.store(from.since_.load(std::memory_order_relaxed), std::memory_order_relaxed);
    }

    // Memory that this block leaves is zeroed before another tenant's block gets it.
    void set_tenant(Tenant tenant) { tenant_.store(tenant, std::memory_order_relaxed); }
    Tenant tenant() const { return tenant_.load(std::memory_order_relaxed); }
    // The identity in the block's record on disk; `index`: of the block in its sequence.
    BlockIdentity identity(uint64_t index, const RecordKeys& keys) const {
        return {index, content_id_, uint32_t(kPageTokens), keys.first};
    }
    // True if the next process is to find it: it has keys (BlockStore::add_key).
    bool published() const { return published_.load(std::memory_order_acquire); }
    // Its kind does not change any more: it is published, or was (BlockStore::keep_kind).
    bool keeps_kind() const { return keeps_kind_.load(std::memory_order_acquire); }
    // How many of its owners are entries of prefix tables; changed under the lock of their store (src/kv/prefix.h).
    uint32_t entries() const { return entries_.load(std::memory_order_relaxed); }
    void add_entry() { entries_.fetch_add(1, std::memory_order_relaxed); }
    void remove_entry() { entries_.fetch_sub(1, std::memory_order_relaxed); }

  private:
    friend class BlockStore;

    static constexpr uintptr_t kKindBits = 7;  // slots are aligned
    static uintptr_t pack(uint8_t* slot, PageKind kind) { return reinterpret_cast<uintptr_t>(slot) | uintptr_t(kind); }

    BlockStore& store_;
    // Fields that a choice of blocks to evict reads come first, to be in one cache line with the count of owners.
    std::atomic<AttentionMass> mass_{AttentionMass{}};
    std::atomic<uint32_t> since_{0};  // and 1; 0: it got none yet
    std::atomic<uint32_t> pins_{0};
    std::atomic<Retention> retention_{Retention{}};
    std::atomic<PageKind> kind_;
    std::atomic<TierKind> tier_{TierKind::kDevice};
    std::atomic<bool> moving_{false}, has_place_{false}, stuck_{false};
    std::atomic<bool> sealed_{false}, suspended_{false};
    PrefetchMark prefetch_;
    std::atomic<bool> dropped_{false};
    std::atomic<uintptr_t> stored_;  // address, and kind of what is there
    uint64_t content_id_;
    Slot tier_slot_;  // of a tier below the device; guarded by the store, as changes of stored_, kind_ and tier_ are
    RecordKeys tier_keys_;
    // Beside the block on a persistent disk: from where it came back, or written by a flush, after tier_slot_.
    Slot record_;
    RecordKeys record_keys_;
    std::vector<BlockKey> keys_;  // under which it is published; guarded by the store
    uint64_t keys_state_ = 0;     // grows with every change of them
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
    uint64_t content_id = 0;  // of what lies there, where that is not the block's own; 0: it is
};

// Slots of the device tier, by PageKind.
using SlotCounts = std::array<uint64_t, kPageKinds>;
// As many of each kind as the smaller of the two has.
inline SlotCounts least_of(SlotCounts a, const SlotCounts& b) {
    for (size_t kind = 0; kind < a.size(); ++kind) a[kind] = std::min(a[kind], b[kind]);
    return a;
}
inline SlotCounts sum_of(SlotCounts a, const SlotCounts& b) {
    for (size_t kind = 0; kind < a.size(); ++kind) a[kind] += b[kind];
    return a;
}

// Barriers that keep moves from overtaking users of blocks. Only tests switch some of it off, to see that they would notice.
struct Barriers {
    bool writers = true;  // copies are behind the steps that were ended before them
    bool readers = true;  // what a block has left is free when those who read there are done
};

// Hands out slots of both kinds in the device tier and keeps freed ones for reuse. All bytes it holds there, in use or cached,
// stay within the budget. Blocks may be moved to the tiers below.
class BlockStore {
  public:
    BlockStore(Allocator& allocator, Device* device, const Geometry& geometry, uint64_t budget);
    // With a device, before anything else: its memory for the whole budget.
    Status take_slab();
    // The memory of all slots on a device. With a device.
    DeviceRange device_memory() const { return slab_->memory(); }
    ~BlockStore();
    BlockStore(const BlockStore&) = delete;
    BlockStore& operator=(const BlockStore&) = delete;

    // One block for each kind in `wanted`, in that order, or none and nothing changed. Their bytes are unspecified: kernels
    // never read slots of tokens that were not written; what other tenants left there is zeroed. TA_E_TIER_FULL beyond the
    // budget, `failed` is then the first that does not fit; TA_E_MEMORY when the allocator has none. `tenants`: of each block,
    // or empty: none. `promised`: so many of them come out of promises of the caller's, which the caller reduces.
    Result<std::vector<BlockPtr>> acquire(std::span<const PageKind> wanted, size_t* failed = nullptr,
                                          std::span<const Tenant> tenants = {}, const SlotCounts& promised = {});
    // Keeps slots that nobody has for one owner: `promise`, which is the owner's, becomes `to`. TA_E_TIER_FULL: there are not so
    // many more, and nothing was changed. A promise that shrinks does not fail.
    Status promise(SlotCounts& promise, const SlotCounts& to);
    // The same where the owner knows that there is room: it is about to give back slots, or has just taken them and failed.
    void settle(SlotCounts& promise, const SlotCounts& to);
    // The same without blocks around the slots, for blocks that come back from other tiers and overwrite all of them.
    Result<std::vector<uint8_t*>> acquire_slots(std::span<const PageKind> wanted, size_t* failed = nullptr);
    void release_slot(PageKind kind, uint8_t* slot);
    // Room for a while, without blocks: as many slots as there are free, at most so many. Once the caller has put bytes of
    // `tenant` into them it gives them back so.
    struct Scratch {
        uint8_t* slot;
        Tenant tenant;  // whose bytes are in it
    };
    std::vector<Scratch> acquire_scratch(PageKind kind, size_t most);
    void release_scratch(PageKind kind, const Scratch& scratch, Tenant tenant);
    bool has_scratch() const;

    Barriers& barriers() { return barriers_; }
    // They outlive the store's blocks.
    void attach(const LowerTiers& tiers);
    Place place_of(const Block& block) const;
    // The block's bytes have been copied to `to`, which the caller acquired. The place it leaves is freed when all who read now are
    // done. False, and nothing was done: `to` is of another kind, and the block keeps its own since that was decided; or it
    // lies further down, and the block is pinned.
    bool move(Block& block, const Place& to);
    // The same to the disk tier without a copy, for a block of which a record is there.
    bool move_to_record(Block& block);
    // From now on they go no further down.
    void pin(std::span<const BlockPtr> blocks);
    // From now on they leave in the order of this. Bits of all priorities that were ever given.
    void retain(std::span<const BlockPtr> blocks, Retention retention);
    uint64_t given_priorities() const { return given_priorities_.load(std::memory_order_relaxed); }
    // The block's kind is for good. False: it was already.
    bool keep_kind(Block& block);
    // Not for good after all.
    void free_kind(Block& block);
    // A block without bytes, as those are that were dropped: it stands where another rank of a group has a block.
    const BlockPtr& absent() const { return absent_; }
    // Likewise, one more: it stands where a sequence has forgotten a block.
    BlockPtr forgotten();
    // True if there ever was one.
    bool has_forgotten() const { return has_forgotten_.load(std::memory_order_acquire); }
    // Its place is free at once: the caller knows that nobody reads there.
    void drop(Block& block);
    // Between the two, a block that was seen outside the disk tier has its bytes at Block::slot(), and they stay at every
    // address that it returned, though the block may move on.
    uint64_t start_reading();
    void stop_reading(uint64_t reading);
    // Readers that started so far have numbers up to this one.
    uint64_t last_reading() const;
    // True if some readers up to `last` are reading still.
    bool still_reading(uint64_t last) const;
    // True if there are places that blocks have left and readers keep from being free.
    bool has_vacated() const;
    // Of those places in the tier.
    SlotCounts vacated_slots(TierKind tier) const;
    uint64_t vacated_bytes(TierKind tier) const { return bytes_of(vacated_slots(tier)); }
    // A full block that a persistent disk tier, attached before, brought along, with all the keys of its record.
    BlockPtr recover(const RecoveredBlock& found);
    // The keys under which a block is published, for a persistent disk tier: records that are written from then on bear those
    // that it has then, and stay there when it comes back. add_key needs reserve_keys before, for as many as are added.
    void reserve_keys(Block& block, size_t more);
    void add_key(Block& block, const BlockKey& key) noexcept;
    void remove_key(Block& block, const BlockKey& key);
    // For a record that is written now. `more`: the keys behind the first one.
    RecordKeys keys_of(const Block& block, std::vector<BlockKey>& more) const;
    // A record on disk beside the block's place: it was written there with these keys. Released if none is needed any more.
    void set_record(Block& block, Slot slot, const RecordKeys& keys);
    bool has_record(const Block& block) const;
    // False when there is none.
    bool drop_record(Block& block);
    // How many records drop_record() has dropped since creation.
    uint64_t dropped_records() const { return dropped_records_.load(std::memory_order_relaxed); }
    // True if a record, beside the block or its place, bears the keys that it has now.
    bool has_all_keys_on_disk(const Block& block) const;
    // While the pool begins or ends: records of published blocks stay on disk for the next one.
    void keep_records(bool keep = true) { keep_records_.store(keep, std::memory_order_release); }
    // Grows with every move.
    uint64_t moves() const { return moves_.load(std::memory_order_acquire); }
    // Signalled when bytes become free in a tier, a block moves, or a reader is done; by others, when they let go of blocks.
    const RoomSignal& room_signal() const { return room_signal_; }
    // Of prefetched blocks, each in one of them: used by a step, wanted by one before they came, gone without having been used.
    struct PrefetchCounters {
        std::atomic<uint64_t> used{0}, late{0}, wasted{0};
    };
    PrefetchCounters& prefetches() { return prefetches_; }
    const PrefetchCounters& prefetches() const { return prefetches_; }
    uint64_t blocks_on_disk() const { return on_disk_.load(std::memory_order_acquire); }

    // Gives the slots kept for reuse back to the allocator.
    void trim();
    uint64_t next_content_id() { return content_ids_.fetch_add(1, std::memory_order_relaxed); }

    struct Usage {
        uint64_t used = 0, free = 0, cached = 0, promised = 0, peak = 0, token_blocks = 0, channel_blocks = 0, low_blocks = 0,
                 passed_blocks = 0;
    };
    Usage usage() const;
    uint64_t budget() const { return budget_; }
    uint64_t bytes_of(const SlotCounts& slots) const;  // UINT64_MAX: more than there are numbers for
    uint64_t free_bytes() const;                       // of the budget, that no slot in use takes and nobody was promised

  private:
    friend class Block;
    struct Reading {
        uint64_t number;
        uint64_t from;  // moves_ when it started
    };
    struct Vacated {  // by a block that was moved
        uint64_t at;
        Place place;
        Tenant tenant;
        bool replaced;  // a record that another one stands for now
    };
    struct Cached {
        uint8_t* slot;
        Tenant tenant;  // whose bytes are in it
    };
    struct AcquiredSlot {
        uint8_t* slot;
        bool fresh;     // was not kept from before
        Tenant tenant;  // likewise whose bytes are in it
    };
    BlockPtr without_bytes();
    Status take_slots(std::span<const PageKind> wanted, std::vector<AcquiredSlot>& slots, size_t* failed,
                      const SlotCounts& promised = {});
    Result<AcquiredSlot> cut_slot(PageKind kind);
    void reserve_cached();
    Status clear(std::span<const PageKind> wanted, std::span<const AcquiredSlot> slots, std::span<const Tenant> tenants);
    void release_slot(PageKind kind, uint8_t* slot, Tenant tenant);
    void release(const Block& block);
    void free_place(const Place& place, Tenant tenant, bool replaced = false);
    void give_record(Slot slot, bool replaced);
    bool move_locked(Block& block, const Place& to);
    void free_vacated();
    void free_cached(PageKind kind, size_t keep);
    bool has_room_to_keep(PageKind kind) const;
    Tenant zero_if_given(PageKind kind, uint8_t* slot, Tenant tenant);
    void put_back(PageKind kind, const Cached& slot);
    void give(PageKind kind, const Cached& slot);
    uint64_t bytes_in_use() const { return bytes_of(in_use_); }
    uint64_t bytes_free() const;
    Status beyond_budget(std::span<const PageKind> wanted, uint64_t free, size_t* failed) const;

    const Geometry& geometry_;
    const uint64_t budget_;
    Barriers barriers_;
    Device* const device_;
    const bool has_hooks_;
    bool slab_has_tenants_ = false;  // a namespace's bytes may lie anywhere in the slab's free memory
    std::atomic<bool> keep_records_{false};
    std::atomic<uint64_t> content_ids_{1};
    mutable std::mutex mutex_;
    std::unique_ptr<SlotSlab> slab_;  // with a device
    SlotMemory memory_[kPageKinds];   // by PageKind, as all below
    std::vector<Cached> cached_[kPageKinds];
    SlotCounts in_use_{};
    SlotCounts promised_{};  // that cached_ has, beside others; for a moment some may be in use still, by those who settle()
    uint64_t held_ = 0;      // bytes, in use and cached
    uint64_t peak_ = 0;      // bytes in use
    LowerTiers tiers_;
    Tier* disk_ = nullptr;               // of them
    uint64_t scratch_[kPageKinds] = {};  // of in_use_, without blocks
    std::atomic<uint64_t> moves_{0}, on_disk_{0}, dropped_records_{0};
    PrefetchCounters prefetches_;
    uint64_t readings_ = 0;         // that were ever started
    std::vector<Reading> reading_;  // now
    std::vector<Vacated> vacated_;  // oldest first
    RoomSignal room_signal_;
    BlockPtr absent_;
    std::atomic<bool> has_forgotten_{false};
    std::atomic<uint64_t> given_priorities_{0};
};

// A reader of blocks for a scope.
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

}  // namespace ta
