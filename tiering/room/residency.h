// Residency of the blocks of a pool: its tiers, moves between them, and room for new blocks. Sequences belong to the pool,
// which shows them as Residents. Internally synchronised.
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
#include <vector>

#include "src/core/context.h"
#include "src/page/pages.h"
#include "tiering/disk/disk.h"
#include "tiering/move/mover.h"
#include "tiering/peer/peer.h"
#include "tiering/policy/policy.h"
#include "tiering/room/ledger.h"
#include "tiering/room/resident.h"
#include "tiering/room/tier_settings.h"
#include "tiering/store/blocks.h"
#include "tiering/verify/reader.h"
#include "tiering/verify/verifier.h"

namespace ta {

class Candidates;

class Residency {
  public:
    // Counters for the statistics, since creation.
    struct Counters {
        // Blocks of steps that began, by TierKind. hits: found in this tier. absent: found further down. failed: in this tier,
        // and could not be promoted.
        std::atomic<uint64_t> hits[kTiers] = {}, absent[kTiers] = {}, failed[kTiers] = {};
        // Begins that waited for room, begins that waited for blocks on disk, and the time of all these waits.
        std::atomic<uint64_t> waits_for_room{0}, waits_for_blocks{0}, wait_nanoseconds{0};
        std::atomic<uint64_t> dropped_blocks{0};
        std::atomic<uint64_t> host_steps{0};  // steps with blocks in host memory
    };

    static constexpr std::chrono::milliseconds kErasePatience{1000};  // for records on disk to be erased, which frees their
                                                                      // room

    // Makes the device tier alone. `pages` and `residents` outlive this.
    Residency(Context& context, const Pages& pages, Residents& residents, uint64_t budget);
    // Makes the tiers below the device. Blocks of a persistent disk stay there until start().
    Status open(const TierSettings& settings);
    // Starts the mover if there are tiers below the device. Tickets count from `first_ticket` on.
    Status start(uint64_t first_ticket);
    // Stops all moves, before the sequences end. Until then threads of the mover call back here for room.
    void stop() {
        if (mover_) mover_->stop();
        mover_.reset();
    }

    const TierSettings& settings() const { return settings_; }
    BlockStore& store() { return store_; }
    const BlockStore& store() const { return store_; }
    // A tier below the device; nullptr: the pool has none of this kind. mover() is nullptr without any of them.
    Tier* tier(TierKind kind) const { return tiers_[kind]; }
    DiskTier* disk() const { return disk_.get(); }
    bool has_memory_below() const { return peer_ || host_; }
    Mover* mover() const { return mover_.get(); }
    // Checks blocks in device memory; nullptr on a CPU.
    BlockVerifier* verifier() const { return verifier_.get(); }
    const BlockReader& reader() const { return reader_; }
    Counters& counters() { return counters_; }
    const Counters& counters() const { return counters_; }

    Status check_open() const { return residents_.check_open(); }

    // ---- attention and steps

    bool observes_attention() const { return settings_.eviction == Eviction::kAttention; }
    // A step observes one layer in attention_layers. Over so many turns it observes each layer once.
    bool observes(uint32_t layer, uint64_t turn) const {
        return observes_attention() && (layer + turn) % settings_.attention_layers == 0;
    }
    // True if blocks may be dropped, so that sequences of steps may lack some.
    bool may_drop() const { return settings_.drop_coldest; }
    // True if sequences may lack blocks: dropped or forgotten ones.
    bool may_lack_blocks() const { return may_drop() || store_.has_forgotten(); }
    Decay decay() const { return Decay(settings_.half_life, steps_.load(std::memory_order_relaxed)); }
    // Counts a step whose blocks are in place. Attention decays by this count.
    void start_step() { steps_.fetch_add(1, std::memory_order_relaxed); }

    // ---- who waits for whom

    RoomLedger& ledger() { return ledger_; }
    // A thread that owns BlockHolds, by an address of its own; nullptr: none. It releases no hold while it waits for room.
    using Holder = const void*;
    class HolderWait;
    // Held by a call while it has blocks that are in no sequence. They cannot leave or be dropped until then, and others wait
    // for it.
    class BlockHold {
      public:
        explicit BlockHold(const Residency& residency, Holder holder = nullptr);
        ~BlockHold();
        BlockHold(const BlockHold&) = delete;
        BlockHold& operator=(const BlockHold&) = delete;

      private:
        friend class Residency::HolderWait;
        const Residency& residency_;
        const Holder holder_;  // without a holder: an address of this hold alone
    };
    // Lives while a thread, which may be a holder, waits for others to release blocks. The thread must not wait for its own
    // holds, nor for those of a holder that waits, too. Made before the look that decides whether to wait: if two holders look
    // at the same time, at least one of them sees that the other waits.
    class HolderWait {
      public:
        HolderWait(const Residency& residency, Holder holder);
        ~HolderWait();
        HolderWait(const HolderWait&) = delete;
        HolderWait& operator=(const HolderWait&) = delete;
        // True if a move, or a holder that does not wait, will release blocks soon.
        bool others_hold() const;

      private:
        const Residency& residency_;
        const Holder holder_;
    };
    // Sets how the begin of a plan with these sequences waits from now on.
    void set_waiting(std::span<Resident* const> mine, RoomLedger::Waits waits);
    // True if a move or a call holds blocks that it will release soon.
    bool blocks_are_held() const { return hold_count_.load() > 0 || blocks_move(); }
    // True while an eviction owns blocks that it has chosen and that do not move yet. When it lets go of them, it signals the
    // room.
    bool evictions_choose() const { return choosing_.load() > 0; }
    bool blocks_move() const { return mover_ && mover_->busy(); }

    // ---- room

    uint64_t bytes_of(std::span<const PageKind> kinds) const;
    // Bytes of the blocks of `mine` that are on disk, each block counted once.
    uint64_t bytes_on_disk(std::span<Resident* const> mine) const;
    // The full blocks that leave the tier first: at least so many bytes, or all that may leave. `for_disk`: without blocks that
    // a plan may be reading. `passes`: only blocks for which it is true; empty: any.
    using BlockFilter = std::function<bool(const Block&, uint64_t index)>;
    std::vector<MoveItem> coldest(TierKind tier, uint64_t bytes, bool for_disk, const BlockFilter& passes = {}) const;
    // Evicts the coldest blocks from `tier` until the wanted ones fit. False: nothing could be moved. `for_all`: published
    // blocks that nobody uses are dropped only if that makes room for everything wanted.
    bool make_room(TierKind tier, std::span<const PageKind> wanted, bool for_all = false, Deadline until = kNoDeadline);
    // Seals the open block with this index, which no plan may be writing. From then on it may move.
    Status suspend_block(Block& block, uint64_t index);
    // Drops published blocks that no sequence has, to make room in a tier. `for_all`: only if that makes enough room. False:
    // nothing was freed.
    bool drop_unused(TierKind tier, std::span<const PageKind> wanted, bool for_all);
    // False if a step of `mine` with these new blocks cannot fit, so that looking for room would lose published blocks or bits
    // in vain. `lacking` then gets the number of missing bytes.
    bool may_make_room(std::span<const PageKind> wanted, std::span<Resident* const> mine, uint64_t* lacking = nullptr) const;
    // Bytes of new blocks of one sequence of a step, and how many sequences of `mine` belong to the step's sequences up to this
    // one.
    struct Demand {
        uint64_t bytes = 0;
        size_t residents = 0;
    };
    // Tells whether a step would find room now: fills in `fit` but for bytes_new. Under the lock of the residents.
    void fit(std::span<const Demand> demands, std::span<const Resident* const> mine, ta_fit& fit) const;
    // Bytes of the device tier that evictions could free for a step of new sequences, beyond what is free now. Under the lock
    // of the residents.
    uint64_t reclaimable_bytes() const;
    // Evictions that failed since creation, other than for a full tier.
    uint64_t failed_evictions() const;
    // Returns the TA_E_TIER_FULL `s` with the reason why blocks could not leave: a tier that fails, an eviction that failed
    // since there were `before`, or a full tier.
    Status with_cause(Status s, uint64_t before) const;
    // TA_E_DEVICE_LOST: the memory of a lost device had blocks of these sequences; names the first one. Marks all of them as
    // damaged.
    Status check_not_lost(std::span<Resident* const> mine) const;
    struct BlockOfStep {
        size_t sequence, block;  // indices
    };
    // Promotes blocks on disk to a tier that the device reads, and waits for those that others promote. The sequences are in the
    // caller's plan. TA_E_BUSY: others have not done so by `moves_end`.
    Status make_resident(std::span<Resident* const> mine, Deadline until, Deadline moves_end);
    // The last resort, if the pool allows it: drops the coldest blocks that have a single owner and that no plan but the
    // caller's may read. `mine`: the sequences of the caller's plan. Drops from the device, or from the slowest tier whose room
    // can be passed up to it. The room is free at once. Drops nothing if that would not make enough room.
    enum class Drop : uint8_t {
        kNothing,
        kLater,  // dropped nothing; there will be blocks to drop when present readers end
        kFree,   // dropped nothing: the device has enough free bytes. They came free meanwhile, or are fragmented
        kHere,   // the wanted blocks fit
        kBelow,  // made room below for blocks that have to leave the device tier
    };
    struct DropBelow {
        bool allowed = true;
        uint64_t readers = 0;  // if the device's own blocks are not enough, waits for readers up to this one
    };
    // `fragmented`: the free bytes have turned out to be of no use.
    Drop drop_coldest(std::span<const PageKind> wanted, std::span<Resident* const> mine, const DropBelow& from_below,
                      bool fragmented);
    // Drops blocks for make_resident(mine), before new blocks are taken: from all tiers above the disk, and blocks of `mine` on
    // the disk, which then need no promotion. False: nothing was dropped.
    bool drop_to_be_resident(std::span<const PageKind> wanted, std::span<Resident* const> mine);
    // After a step: demotes blocks in the background if the device tier is nearly full. `filled`: blocks became full in the
    // step, and may leave now.
    void keep_room(bool filled);

    // ---- steps' blocks

    // The places of a step's blocks when the step looks them up. The sequences are in the caller's plan.
    struct Lookups {
        struct Prefetched {
            Block* block;
            PrefetchMark::Seen seen;
        };
        uint64_t found[kTiers] = {};  // by TierKind
        std::vector<Prefetched> prefetched;
    };
    Lookups look_up(std::span<Resident* const> mine) const;
    // Counts a step that has begun, by the places of its blocks.
    void count_step(const Lookups& lookups);

    // ---- loads

    // The blocks that a load has: those that it has read so far, which no sequence has yet, and those that were here before.
    struct Loading {
        std::vector<MoveItem> blocks;
        // For plans; set when there is no room for the first time.
        std::optional<std::chrono::steady_clock::time_point> patience_ends;
        uint64_t promised = 0;    // bytes promised for blocks that are still to come
        Holder holder = nullptr;  // the calling thread, if it has a BlockHold
        // Called when there is no room; an error ends new_block(). Whoever makes it fail signals the room. Null: only the end
        // of the pool stops the load.
        std::function<Status()> check;
    };
    // Registers a load for its duration, so that others can find its blocks and move them, too.
    class LoadHold {
      public:
        LoadHold(Residency& residency, Loading& loading);
        ~LoadHold();
        LoadHold(const LoadHold&) = delete;
        LoadHold& operator=(const LoadHold&) = delete;
        void add(MoveItem item);
        void add_all(std::span<MoveItem> items);

      private:
        Residency& residency_;
        Loading& loading_;
    };
    // Promises the load so many bytes of new blocks. TA_E_TIER_FULL: they do not fit beside the promises of other loads, even
    // if everything that may moves and all unused blocks are dropped. Needs a LoadHold; replaces an earlier promise of this
    // load.
    Status promise_room(Loading& mine, uint64_t bytes);
    // Makes blocks in the device tier, if there is free room for all of them; else TA_E_TIER_FULL. `tenants`: as for
    // BlockStore::acquire().
    Result<std::vector<BlockPtr>> new_blocks(std::span<const PageKind> kinds, std::span<const Tenant> tenants, Loading& mine);
    // Promises the load so many more bytes, since it gives blocks of new_blocks() back that it will need again.
    void promise_again(Loading& mine, uint64_t bytes) {
        mine.promised += bytes;
        promised_ += bytes;
    }
    // Makes a block in the device tier. Makes room by demoting other blocks, also those of `mine`. TA_E_CLOSED, or the error of
    // mine.check.
    Result<BlockPtr> new_block(PageKind kind, Loading& mine);

  private:
    std::vector<MoveItem> choose_to_drop(Candidates& candidates, uint64_t bytes) const;
    Status check_tiers(const TierSettings& settings) const;
    Status make_peer_tier(const TierSettings& settings);
    Status make_host_tier(const TierSettings& settings);
    Status open_disk_tier(const TierSettings& settings);
    bool evict(TierKind tier, uint64_t bytes, Deadline until);
    bool evict_to(TierKind from, TierKind to, uint64_t bytes, Deadline until);
    bool suspend_some(uint64_t bytes, Deadline until);
    std::vector<MoveItem> suspend_idle(uint64_t bytes, const BlockFilter& passes);
    // Moves what `choose` chooses. If the tier has no room for these kinds, lets it choose among other kinds. False: nothing
    // moved.
    using Choice = std::function<std::vector<MoveItem>(const BlockFilter& passes)>;
    bool move_some(TierKind from, TierKind to, Deadline until, const Choice& choose);
    void reopen_suspended(std::span<const MoveItem> items);
    Status promote(std::span<Resident* const> mine, Deadline until, std::optional<BlockOfStep>& of_others);
    void note_failed(const MoveProgress& eviction);
    uint64_t evicted_at_once(TierKind tier, std::span<const PageKind> wanted) const;
    struct MoveEstimate;
    class Capacity;
    class Choosing;
    using TierBytes = std::array<uint64_t, kTiers>;
    TierBytes unused_bytes() const;  // bytes of published blocks that nobody uses
    TierBytes count_room() const;
    std::string full_below() const;
    MoveEstimate estimate_moves(std::span<Resident* const> mine) const;
    double gained_on_device(const MoveEstimate& estimate, const TierBytes& room, PageKind largest) const;
    double times_in(TierKind tier, PageKind above) const;
    void drop(std::span<const MoveItem> items);

    Context& context_;
    const Pages& pages_;
    const Geometry& geometry_ = pages_.geometry;
    const Numerics& numerics_ = pages_.numerics;
    Residents& residents_;
    TierSettings settings_;
    std::unique_ptr<EvictionPolicy> policy_;
    std::unique_ptr<PeerTier> peer_;
    std::unique_ptr<Tier> host_;
    std::unique_ptr<DiskTier> disk_;
    LowerTiers tiers_;  // the ones that exist
    BlockStore store_;
    const BlockReader reader_;
    std::unique_ptr<BlockVerifier> verifier_, peer_verifier_;
    std::unique_ptr<BlockEncoder> encoder_;
    Counters counters_;

    mutable std::mutex failed_evictions_mutex_;
    uint64_t failed_evictions_ = 0;
    Status failed_eviction_;  // the status of the last one
    RoomLedger ledger_{store_.room_signal(), [this] { return store_.free_bytes(); }, [this] { return blocks_are_held(); }};

    // Under the lock of the residents.
    std::vector<const Loading*> loads_;  // loads under way

    mutable std::mutex holds_mutex_;
    mutable std::vector<const BlockHold*> holds_;  // guarded by holds_mutex_
    mutable std::vector<Holder> waiting_;          // likewise; a holder is in it once for each of its HolderWaits
    mutable std::atomic<size_t> hold_count_{0};    // of holds_

    std::atomic<size_t> choosing_{0};          // evictions that own blocks which do not move yet
    std::atomic<uint64_t> promised_{0};        // bytes, to all loads
    std::atomic<uint32_t> steps_{0};           // that were begun
    std::atomic<int64_t> keep_room_after_{0};  // steady clock; no new try before this, if the last one moved nothing
    std::atomic<uint64_t> keeping_room_{0};    // ticket of the last background eviction; 0: no block could leave
    std::unique_ptr<Mover> mover_;             // last: its threads use the rest
};

}  // namespace ta
