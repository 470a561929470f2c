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
    // Since creation, for the statistics.
    struct Counters {
        // By TierKind, of the blocks of steps that began: found there; looked for there and found further down; there, but
        // could not be promoted.
        std::atomic<uint64_t> hits[kTiers] = {}, absent[kTiers] = {}, failed[kTiers] = {};
        // Begins that waited for room, for blocks on disk, and how long in all.
        std::atomic<uint64_t> waits_for_room{0}, waits_for_blocks{0}, wait_nanoseconds{0};
        std::atomic<uint64_t> dropped_blocks{0};
        std::atomic<uint64_t> host_steps{0};  // steps with blocks in host memory
    };

    static constexpr std::chrono::milliseconds kErasePatience{1000};  // of records on disk, until their room is free

    // The device tier alone. `pages` and `residents` outlive this.
    Residency(Context& context, const Pages& pages, Residents& residents, uint64_t budget);
    // Makes the tiers below the device. Blocks that a persistent disk brings along stay there until start().
    Status open(const TierSettings& settings);
    // Starts moves, where there are tiers below the device. Tickets count from `first_ticket` on.
    Status start(uint64_t first_ticket);
    // Ends them, before the sequences do. Threads of the mover come back here, for room, until they have ended.
    void stop() {
        if (mover_) mover_->stop();
        mover_.reset();
    }

    const TierSettings& settings() const { return settings_; }
    BlockStore& store() { return store_; }
    const BlockStore& store() const { return store_; }
    // Tiers below the device: nullptr where there is none. The mover is there if one of them is.
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
    // Blocks may be dropped: the sequences of steps may lack some.
    bool may_drop() const { return settings_.drop_coldest; }
    // Sequences may lack blocks: dropped ones, or forgotten ones.
    bool may_lack_blocks() const { return may_drop() || store_.has_forgotten(); }
    Decay decay() const { return Decay(settings_.half_life, steps_.load(std::memory_order_relaxed)); }
    // A step's blocks are there: attention fades by the steps.
    void start_step() { steps_.fetch_add(1, std::memory_order_relaxed); }

    // ---- who waits for whom

    RoomLedger& ledger() { return ledger_; }
    // For as long as a call holds blocks that are in no sequence: these cannot leave or be dropped before, and others wait.
    class BlockHold {
      public:
        explicit BlockHold(const Residency& residency) : residency_(residency) { residency_.holders_.fetch_add(1); }
        ~BlockHold() {
            residency_.holders_.fetch_sub(1);
            residency_.store_.room_signal().notify();
        }
        BlockHold(const BlockHold&) = delete;
        BlockHold& operator=(const BlockHold&) = delete;

      private:
        const Residency& residency_;
    };
    // Sets how the begin of a plan with these sequences waits from now on.
    void set_waiting(std::span<Resident* const> mine, RoomLedger::Waits waits);
    // A move or a call holds blocks that it lets go of soon.
    bool blocks_are_held() const { return holders_.load() > 0 || (mover_ && mover_->busy()); }

    // ---- room

    uint64_t bytes_of(std::span<const PageKind> kinds) const;
    // Of blocks of `mine`, each counted once.
    uint64_t bytes_on_disk(std::span<Resident* const> mine) const;
    // The first blocks to leave the tier: full blocks of so many bytes, or all that may. `for_disk`: none that a plan may be
    // reading. `passes`: only blocks for which it is true; null: any.
    using BlockFilter = std::function<bool(const Block&, uint64_t index)>;
    std::vector<MoveItem> coldest(TierKind tier, uint64_t bytes, bool for_disk, const BlockFilter& passes = {}) const;
    // Evicts blocks that were not used for long from `tier` until the wanted ones fit. False when nothing could be moved.
    // `for_all`: published blocks that nobody uses are dropped only where then all that is wanted fits.
    bool make_room(TierKind tier, std::span<const PageKind> wanted, bool for_all = false, Deadline until = kNoDeadline);
    // Seals an open block that no plan writes, which `index` is: it may move from then on.
    Status suspend_block(Block& block, uint64_t index);
    // Drops published blocks that no sequence has, to make room in a tier: `for_all`, only where it is enough. False when that
    // freed nothing.
    bool drop_unused(TierKind tier, std::span<const PageKind> wanted, bool for_all);
    // False: published blocks that nobody uses would be lost, and a step of `mine` with new blocks not fit all the same.
    // `lacking` gets how many bytes there are too few then.
    bool may_make_room(std::span<const PageKind> wanted, std::span<Resident* const> mine, uint64_t* lacking = nullptr) const;
    // Bytes that one sequence of a step adds to the device tier, and how many of the step's sequences with blocks come up to it.
    struct Demand {
        uint64_t bytes = 0;
        size_t residents = 0;
    };
    // Tells whether a step would find room as things are: fills in `fit`, but for bytes_new. Under the lock of the residents.
    void fit(std::span<const Demand> demands, std::span<const Resident* const> mine, ta_fit& fit) const;
    // Bytes of the device tier that a step of none of the present sequences could have after evictions, what is free excepted. Under
    // the lock of the residents.
    uint64_t reclaimable_bytes() const;
    // Evictions that failed for another reason than a tier that is full, since creation.
    uint64_t failed_evictions() const;
    // TA_E_TIER_FULL with why blocks could not leave: a tier that fails, evictions that failed since there were `before`, or a
    // tier that is full.
    Status with_cause(Status s, uint64_t before) const;
    // TA_E_DEVICE_LOST names the first block that lay in the memory of a device that is lost. Such blocks count as damaged.
    Status check_not_lost(std::span<Resident* const> mine) const;
    // Promotes blocks on disk to where the device reads them. Sequences are in the caller's plan.
    Status make_resident(std::span<Resident* const> mine, Deadline until);
    // The last resort, where it is allowed: drops the coldest blocks that one sequence alone has and no plan but the caller's,
    // which holds `mine`: out of the device, or out of the slowest tier whose room can be passed on to it. Their room is free
    // at once. Drops nothing if the room would not be enough.
    enum class Drop : uint8_t {
        kNothing,
        kLater,  // nothing now; when those are done who are reading
        kHere,   // the wanted blocks fit
        kBelow,  // what makes room in the device tier fits below
    };
    struct DropBelow {
        bool allowed = true;
        uint64_t readers = 0;  // up to this one must have ended where the device's own blocks would not do
    };
    Drop drop_coldest(std::span<const PageKind> wanted, std::span<Resident* const> mine, const DropBelow& from_below);
    // The same for make_resident(mine), before new blocks are wanted: out of all tiers but the disk, and there blocks of
    // `mine`, which need not come any more. False: nothing was dropped.
    bool drop_to_be_resident(std::span<const PageKind> wanted, std::span<Resident* const> mine);
    // Ends that: what has not left yet stays.
    void stop_keeping_room();
    // After a step: demotes blocks in the background when the device tier is nearly full. `filled`: the step made blocks full
    // that may leave.
    void keep_room(bool filled);

    // ---- steps' blocks

    // Places of a step's blocks as the step looks for them. Sequences are in the caller's plan.
    struct Lookups {
        struct Prefetched {
            Block* block;
            PrefetchMark::Seen seen;
        };
        uint64_t found[kTiers] = {};  // by TierKind
        std::vector<Prefetched> prefetched;
    };
    Lookups look_up(std::span<Resident* const> mine) const;
    // Counts a step that has begun, by where its blocks were.
    void count_step(const Lookups& lookups);

    // ---- loads

    // The blocks that a load has read so far, which no sequence has yet, from the first one on.
    struct Loading {
        std::vector<MoveItem> blocks;
        size_t above[kTiers] = {};  // those before have left this tier and those above it, or stay there
        std::optional<std::chrono::steady_clock::time_point> patience_ends;  // with plans, once there is no room
        uint64_t promised = 0;                                               // bytes of blocks that are still to come
    };
    // While a load goes on others may move what it has read, too: they find it here.
    class LoadHold {
      public:
        LoadHold(Residency& residency, Loading& loading);
        ~LoadHold();
        LoadHold(const LoadHold&) = delete;
        LoadHold& operator=(const LoadHold&) = delete;
        void add(MoveItem item);

      private:
        Residency& residency_;
        Loading& loading_;
    };
    // TA_E_TIER_FULL: so many bytes of new blocks do not fit beside those that other loads were promised, whatever else moves or is
    // dropped that nobody uses. The load has a LoadHold, and no other promise from then on.
    Status promise_room(Loading& mine, uint64_t bytes);
    // A block in the device tier. Makes room by moving others out, those of `mine` too.
    Result<BlockPtr> new_block(PageKind kind, Loading& mine);

  private:
    std::vector<MoveItem> choose_to_drop(Candidates& candidates, uint64_t bytes) const;
    Status check_tiers(const TierSettings& settings) const;
    Status make_peer_tier(const TierSettings& settings);
    Status make_host_tier(const TierSettings& settings);
    Status open_disk_tier(const TierSettings& settings);
    bool evict_to(TierKind from, TierKind to, uint64_t bytes, Deadline until);
    bool evict(TierKind tier, uint64_t bytes, Deadline until);
    std::vector<MoveItem> suspend_idle(uint64_t bytes);
    void reopen_suspended(std::span<const MoveItem> items);
    bool demote(Loading& mine, TierKind from, TierKind to, uint64_t bytes);
    bool demote(Loading& mine, uint64_t bytes);
    void note_failed(const MoveProgress& eviction);
    uint64_t evicted_at_once(TierKind tier, std::span<const PageKind> wanted) const;
    struct MoveEstimate;
    class Capacity;
    using TierBytes = std::array<uint64_t, kTiers>;
    TierBytes unused_bytes() const;  // of what is published and nobody uses
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
    LowerTiers tiers_;  // those of them that there are
    BlockStore store_;
    const BlockReader reader_;
    std::unique_ptr<BlockVerifier> verifier_, peer_verifier_;
    std::unique_ptr<BlockEncoder> encoder_;
    Counters counters_;

    mutable std::mutex failed_evictions_mutex_;
    uint64_t failed_evictions_ = 0;
    Status failed_eviction_;  // the last one's
    RoomLedger ledger_{store_.room_signal(), [this] { return store_.free_bytes(); }, [this] { return blocks_are_held(); }};

    // Under the lock of the residents.
    std::vector<const Loading*> loads_;  // that go on

    mutable std::atomic<int> holders_{0};      // calls of BlockHold
    std::atomic<uint64_t> promised_{0};        // bytes, to all loads
    std::atomic<uint32_t> steps_{0};           // that were begun
    std::atomic<int64_t> keep_room_after_{0};  // of the steady clock, when the last moved nothing
    std::atomic<uint64_t> keeping_room_{0};    // ticket of the last background eviction; 0: nothing might leave
    std::unique_ptr<Mover> mover_;             // last: its threads use the rest
};

}  // namespace ta
