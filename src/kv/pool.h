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
#include "src/kv/prefix.h"
#include "src/page/pages.h"
#include "tiering/disk/disk.h"
#include "tiering/move/mover.h"
#include "tiering/policy/policy.h"
#include "tiering/room/room_queue.h"
#include "tiering/store/blocks.h"
#include "tiering/verify/reader.h"
#include "tiering/verify/verifier.h"

namespace ta {

inline constexpr uint8_t kNothingSeen = 2;

// Tokens [0, length) in blocks of 64. While `in_plan`, only that plan touches it.
struct Sequence {
    uint32_t slot = 0;
    uint32_t generation = 0;
    bool alive = false;
    bool in_plan = false;
    bool released = false;  // in a plan: the id is stale, the slot and the blocks are the plan's until it ends
    RoomQueue::Waits waits = RoomQueue::Waits::kNot;  // for room, its plan's begin
    bool may_be_read() const { return in_plan && waits == RoomQueue::Waits::kNot; }
    uint64_t last_used = 0;  // by a plan, or moved to the device for one: the pool's count of uses then
    std::chrono::steady_clock::time_point last_used_at;  // by a plan
    // Before the begin that goes on, which may fail.
    uint64_t used_before = 0;
    std::chrono::steady_clock::time_point used_before_at;
    int32_t priority = 0;  // the lower leaves a tier first, where the pool's policy heeds it
    uint64_t version = 0;  // grows with every change of `blocks`
    int64_t length = 0;
    std::vector<BlockPtr> blocks;  // ceil(length / 64)
    // Only with universal open scales: the largest K and V scale of its blocks, [layers, kv_heads, 2]; on a device, which record
    // of Pool::largest_scales() holds them. Not known: the next step finds them from the blocks.
    std::vector<float> largest_scales;
    uint8_t scales_side = kNothingSeen;
    bool scales_known = true;
    uint32_t nonfinite_seen = 0;    // of the device's counter
    std::atomic<Tenant> tenant{0};  // namespace that its tokens belong to; 0: none. Publishing may set it beside a plan
};

// Whether steps on a GPU copy pages in host memory to device memory before a layer reads them, or read them in place.
enum class StagingMode : uint8_t { kAuto, kNever, kAlways };  // kAuto: whichever is predicted to be faster

// The tiers below the device, each on if it has a budget.
struct TierSettings {
    uint64_t host_budget = 0, disk_budget = 0;
    std::string disk_folder;
    std::string disk_path;  // of a persistent file; empty: one without a name in disk_folder
    std::function<std::unique_ptr<Tier>(std::unique_ptr<Tier>)>
        wrap_host;  // a seam: what the pool uses in place of its host tier
    int numa_node = -1;
    MoveRoute route = MoveRoute::kCalibrated;
    int high_percent = 94, low_percent = 90;  // of the device budget: blocks leave from the one, down to the other
    Eviction eviction = Eviction::kLru;
    uint32_t half_life = 128;       // of attention, in steps
    uint32_t attention_layers = 0;  // a step observes one of so many layers; 0: the default
    bool drop_coldest = false;      // when nothing can leave for another tier any more
    // How long a begin waits for what open plans may be reading, and for moves that take the step's blocks away.
    std::chrono::milliseconds plans_patience{1000}, moves_patience{10000};
    StagingMode staging = StagingMode::kAuto;
    uint64_t staging_bytes = 0;  // of the device budget, that each plan may take for it while it has room
};

// Steps that say later what attention blocks got.
class AttentionSource {
  public:
    virtual ~AttentionSource() = default;
    // Leaves with the blocks what has arrived; `wait`: of all steps that were ended so far. Any thread.
    virtual void take_in(bool wait) = 0;
};

class Pool {
  public:
    // Counters since creation, for the statistics.
    struct Counters {
        std::atomic<uint64_t> appended_tokens{0}, closed_pages{0}, reopened_blocks{0}, copied_blocks{0}, saturated_values{0},
            clamped_values{0};
        // By TierKind, of the blocks of steps that began: found there; looked for there and found further down; there, but
        // could not be brought up.
        std::atomic<uint64_t> hits[3] = {}, absent[3] = {}, failed[3] = {};
        // Begins that waited for room, for blocks on disk, and how long in all.
        std::atomic<uint64_t> waits_for_room{0}, waits_for_blocks{0}, wait_nanoseconds{0};
        std::atomic<uint64_t> dropped_blocks{0};
        // Steps with blocks in host memory; those of them that staged some; what was staged, a page for each block and layer.
        std::atomic<uint64_t> host_steps{0}, staged_steps{0}, staged_pages{0}, staged_bytes{0};
    };

    static Result<std::shared_ptr<Pool>> create(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics,
                                                uint64_t budget, uint32_t max_sequences, const TierSettings& tiers = {});
    ~Pool();

    Context& context() const { return *context_; }
    const Pages& pages() const { return pages_; }
    const Geometry& geometry() const { return geometry_; }
    const Numerics& numerics() const { return numerics_; }
    uint64_t fingerprint() const { return pages_.fingerprint; }
    BlockStore& blocks() { return *blocks_; }
    const BlockStore& blocks() const { return *blocks_; }
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
    size_t scales_record() const { return size_t(geometry_.layers) * geometry_.kv_heads * 2; }
    // Behind it, [max_sequences, kv_heads] of what append kernels keep while they run, 0 between them.
    static constexpr size_t kAppendProgressBytes = 16;
    uint8_t* append_progress() const { return largest_scales_ ? largest_scales_.get() + append_progress_offset() : nullptr; }
    // Checks blocks in device memory; nullptr on a CPU.
    BlockVerifier* verifier() const { return verifier_.get(); }
    // Takes bits from blocks in device memory; nullptr on a CPU, and where precision does not fall.
    BlockEncoder* encoder() const { return encoder_.get(); }
    const float* rotation_signs() const { return signs_; }  // [head_dim] +1 or -1

    Status close();
    Status check_open() const;
    uint32_t max_sequences() const { return max_sequences_; }
    // TA_E_LIMIT: there is no room for so many more sequences.
    Status check_room_for(uint64_t sequences) const;
    Result<ta_seq> create_sequence();
    Result<ta_seq> fork_sequence(ta_seq source);
    Status truncate(ta_seq seq, int64_t length);
    Status release(ta_seq seq);
    Status set_priority(ta_seq seq, int32_t priority);
    Result<int64_t> length(ta_seq seq) const;
    Status verify(ta_seq seq) const;

    // Takes all sequences for a plan, or none. They stay where they are until unlock_for_plan, released or not.
    Result<std::vector<Sequence*>> lock_for_plan(std::span<const ta_seq> seqs);
    // Empties `seqs`. Those that were released meanwhile end now.
    void unlock_for_plan(std::vector<Sequence*>& seqs);
    // The begin that took them failed: what leaves a tier first is as before it.
    void forget_use(std::span<Sequence* const> seqs);
    // Runs `change` on sequences that a plan holds, while nobody reads their lengths. It does not fail.
    template <class Change>
    void commit_plan(Change&& change) {
        std::lock_guard lock(mutex_);
        change();
    }

    // Whether steps leave with blocks what attention they got; what they add fades until now.
    bool observes_attention() const { return tier_settings_.eviction == Eviction::kAttention; }
    // One layer in attention_layers is observed, and each in one turn of as many.
    bool observes(uint32_t layer, uint64_t turn) const {
        return observes_attention() && (layer + turn) % tier_settings_.attention_layers == 0;
    }
    // The weights of a sequence's first blocks in step `at`, each times `each`. Blocks that came into their places since then
    // get them.
    void add_attention(uint32_t slot, uint32_t generation, std::span<const float> weights, float each, uint32_t at);
    void add_attention_source(AttentionSource* source);
    void remove_attention_source(AttentionSource* source);
    void take_in_attention(bool wait);
    // Whether blocks may be dropped: the sequences of steps may lack some.
    bool may_drop() const { return tier_settings_.drop_coldest; }
    Fading fading() const { return Fading(tier_settings_.half_life, steps_.load(std::memory_order_relaxed)); }

    const TierSettings& tier_settings() const { return tier_settings_; }
    // Tiers below the device: nullptr where there is none. The mover is there if one of them is.
    Tier* tier(TierKind kind) const {
        return kind == TierKind::kHost ? host_.get() : kind == TierKind::kDisk ? disk_.get() : nullptr;
    }
    Mover* mover() const { return mover_.get(); }
    // For as long as a call holds blocks that are in no sequence: these cannot leave or be dropped before, and others wait.
    class BlockHold {
      public:
        explicit BlockHold(const Pool& pool) : pool_(pool) { pool_.holders_.fetch_add(1); }
        ~BlockHold() { pool_.holders_.fetch_sub(1); }
        BlockHold(const BlockHold&) = delete;
        BlockHold& operator=(const BlockHold&) = delete;

      private:
        const Pool& pool_;
    };
    RoomQueue& room_queue() { return room_queue_; }
    // What the begin of a plan with these sequences does from now on.
    void set_waiting(std::span<Sequence* const> mine, RoomQueue::Waits waits);
    // Until those are done who are reading, or for a moment.
    void await_readers() const;
    // Whether other plans have sequences than the one that holds `mine`.
    bool others_in_plans(std::span<Sequence* const> mine) const { return in_plans_.load() > mine.size(); }
    // Likewise, but for begins that are queued for room.
    bool others_make_room(std::span<Sequence* const> mine) const;
    // Grows when a plan takes or gives back sequences, and when its begin starts or ends to wait.
    uint64_t plan_changes() const { return plan_changes_.load(); }
    // Whether a move or a call holds blocks that it lets go of soon.
    bool blocks_are_held() const { return holders_.load() > 0 || (mover_ && mover_->busy()); }
    StagingMode staging() const { return tier_settings_.staging; }
    uint64_t staging_bytes() const { return tier_settings_.staging_bytes; }
    // What would leave the tier first: full blocks of so many bytes, or all that may. `for_disk`: none that a plan may be
    // reading.
    std::vector<MoveItem> coldest(TierKind tier, uint64_t bytes, bool for_disk) const;
    // Moves blocks that were not used for long out of `tier` until the wanted ones fit. False when nothing could be moved.
    // `for_all`: published blocks that nobody uses are dropped only where then all that is wanted fits.
    bool make_room(TierKind tier, std::span<const PageKind> wanted, bool for_all = false, Deadline until = kNoDeadline);
    // TA_E_TIER_FULL: so many bytes of new blocks do not fit, whatever else moves or is dropped that nobody uses.
    Status check_may_take_in(uint64_t bytes) const;
    // False: published blocks that nobody uses would be lost, and a step of `mine` with new blocks not fit all the same.
    // `lacking` gets how many bytes there are too few then.
    bool may_make_room(std::span<const PageKind> wanted, std::span<Sequence* const> mine, uint64_t* lacking = nullptr) const;
    // Where the blocks of a step lie as it looks for them. Sequences are in the caller's plan.
    struct Lookups {
        struct Prefetched {
            Block* block;
            PrefetchMark::Seen seen;
        };
        uint64_t found[3] = {};  // by TierKind
        std::vector<Prefetched> prefetched;
    };
    Lookups look_up(std::span<Sequence* const> seqs) const;
    // Evictions that failed for another reason than a tier that is full, since creation.
    uint64_t failed_evictions() const;
    // TA_E_TIER_FULL with why blocks could not leave: a tier that fails, evictions that failed since there were `before`, or a
    // tier that is full.
    Status with_cause(Status s, uint64_t before) const;
    // Its blocks are there: attention fades by the steps.
    void start_step() { steps_.fetch_add(1, std::memory_order_relaxed); }
    // Counts a step that has begun, by where its blocks were.
    void count_step(const Lookups& lookups);
    // Brings blocks on disk to where the device reads them. Sequences are in the caller's plan, which has yet to get the wanted
    // blocks.
    Status make_resident(std::span<Sequence* const> seqs, std::span<const PageKind> wanted, Deadline until);
    // The last resort, where it is allowed: drops the coldest blocks that one sequence alone has and no plan but the caller's,
    // which holds `mine`: out of the device, or out of the slowest tier whose room can be passed on to it. Their room is free
    // at once. What would not be enough is not dropped.
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
    Drop drop_coldest(std::span<const PageKind> wanted, std::span<Sequence* const> mine, const DropBelow& from_below);
    // The same for make_resident(mine), before new blocks are wanted: out of all tiers but the disk, and there blocks of
    // `mine`, which need not come any more. False: nothing was dropped.
    bool drop_to_be_resident(std::span<const PageKind> wanted, std::span<Sequence* const> mine);
    // After a step: lets blocks leave in the background when the device tier is nearly full. `filled`: the step made blocks
    // full that may leave.
    void keep_room(bool filled);
    // Moves of full blocks [first, first + n) of a sequence that is in no plan.
    Result<uint64_t> move_blocks(ta_seq seq, uint64_t first, uint64_t n, TierKind to, MoveReason reason);
    Status pin_blocks(ta_seq seq, uint64_t first, uint64_t n, bool pinned);
    // Records of a persistent file that were damaged when it was opened.
    uint64_t refused_records() const { return refused_records_; }
    const BlockReader& reader() const { return reader_; }

    // Prefix reuse: pool_prefix.cpp.
    PrefixStore& prefixes() { return prefixes_; }
    const PrefixStore& prefixes() const { return prefixes_; }
    // Publishes the first full blocks of a sequence in no plan, one for each key.
    Status publish(ta_seq seq, Tenant space, std::span<const uint8_t> keys);
    // A sequence of the namespace with the blocks that are published under the first keys.
    Result<std::pair<ta_seq, int64_t>> match_prefix(Tenant space, std::span<const uint8_t> keys);
    // Drops published blocks that no sequence has, to make room in a tier: `for_all`, only where it is enough. False when that
    // freed nothing.
    bool drop_unused(TierKind tier, std::span<const PageKind> wanted, bool for_all);
    // Where files have named as many namespaces as they may: forgets those that nothing in the pool is of.
    void end_forgotten_namespaces();
    // Writes the published blocks of a namespace that are not on the persistent disk, where they stay beside what is in memory.
    Status flush_namespace(Tenant space);

    // A sequence at rest: what a copy of it would have.
    struct Snapshot {
        int64_t length = 0;
        std::vector<BlockPtr> blocks;
        Tenant tenant = 0;
    };
    Result<Snapshot> snapshot(ta_seq seq) const;
    // The namespace that it belongs to, by itself or by blocks that it shares, as files name it.
    SpaceTag tag_of(const Snapshot& s) const;
    // A sequence with these blocks, full ones but for the last.
    Result<ta_seq> adopt(Snapshot&& s);
    // The same for all sequences with their ids, at one moment; TA_E_BUSY while one is in a plan.
    Result<std::vector<std::pair<ta_seq, Snapshot>>> snapshot_all() const;
    // All or none of them.
    Result<std::vector<ta_seq>> adopt_all(std::vector<Snapshot>&& all);
    // What a load has read so far, which no sequence has yet, from the first one on.
    struct Loading {
        std::vector<MoveItem> blocks;
        size_t above[2] = {0, 0};  // those before have left the device tier, the host tier, or stay there
        std::optional<std::chrono::steady_clock::time_point> patience_ends;  // with plans, once there is no room
    };
    // While a load goes on others may move what it has read, too: they find it here.
    class LoadHold {
      public:
        LoadHold(Pool& pool, Loading& loading);
        ~LoadHold();
        LoadHold(const LoadHold&) = delete;
        LoadHold& operator=(const LoadHold&) = delete;
        void add(MoveItem item);

      private:
        Pool& pool_;
        Loading& loading_;
    };
    // A block in the device tier. Makes room by moving others out, those of `mine` too.
    Result<BlockPtr> new_block(PageKind kind, Loading& mine);

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
    Status take_nonfinite_mark(Sequence& sequence);
    Status check_tiers(const TierSettings& settings) const;
    Status make_host_tier(const TierSettings& settings);
    Status open_disk_tier(const TierSettings& settings);
    Status attach_tiers(const TierSettings& settings);
    void recover_published();
    Status write_record(Block& block, uint64_t index);
    static constexpr std::chrono::milliseconds kErasePatience{1000};  // of records on disk, until their room is free
    TierKind below(TierKind tier) const;
    bool evict(TierKind from, TierKind to, uint64_t bytes, Deadline until);
    bool make_way(TierKind tier, uint64_t bytes, Deadline until);
    bool send_down(Loading& mine, TierKind from, TierKind to, uint64_t bytes);
    bool send_down(Loading& mine, uint64_t bytes);
    void note_failed(const MoveProgress& eviction);
    uint64_t evicted_at_once(TierKind tier, std::span<const PageKind> wanted) const;
    bool pass_to_disk(uint64_t bytes, Deadline until);
    bool raise(std::span<Sequence* const> mine, uint64_t bytes, std::span<const PageKind> wanted, Deadline until);
    struct Census;
    std::array<uint64_t, 3> count_room() const;
    std::string full_below() const;
    Census take_census(std::span<Sequence* const> mine) const;
    double gained_on_device(const Census& census, const std::array<uint64_t, 3>& room, PageKind largest) const;
    double times_on_disk(PageKind above) const;
    uint64_t bytes_of(std::span<const PageKind> kinds) const;
    uint64_t bytes_on_disk(std::span<Sequence* const> seqs) const;
    void drop(std::span<const MoveItem> items);
    Result<std::vector<MoveRequest>> full_blocks(ta_seq seq, uint64_t first, uint64_t n) const;
    Result<uint32_t> take_slot();
    void give_slot(const Sequence& s);
    static Status busy(ta_seq seq);
    size_t append_progress_offset() const { return round_up(size_t(max_sequences_) * 2 * scales_record() * sizeof(float), 16); }
    static Snapshot copy_locked(const Sequence& s) { return {s.length, s.blocks, s.tenant.load()}; }
    Result<ta_seq> adopt_locked(Snapshot&& s);
    void release_locked(Sequence& s, std::vector<BlockPtr>& dropped);
    void end_locked(Sequence& s, std::vector<BlockPtr>& dropped);
    static size_t first_even(size_t n) { return (n + 1) / 2 * 2; }
    ta_seq id_of(uint32_t slot) const { return uint64_t(sequences_[slot]->generation) << 32 | slot; }

    std::shared_ptr<Context> context_;
    const Pages pages_;
    const Geometry& geometry_ = pages_.geometry;
    const Numerics& numerics_ = pages_.numerics;
    const uint32_t max_sequences_;
    const uint32_t first_generation_;  // differs from pool to pool: an id of one names nothing in another
    float signs_[kMaxHeadDim];
    std::unique_ptr<Tier> host_;
    std::unique_ptr<DiskTier> disk_;
    std::unique_ptr<BlockStore> blocks_;
    const BlockReader reader_;
    PrefixStore prefixes_;
    uint64_t refused_records_ = 0;
    TierSettings tier_settings_;
    std::unique_ptr<EvictionPolicy> policy_;
    Counters counters_;
    struct FreeCounters {
        Device* device;
        void operator()(uint32_t* counters) const { device->deallocate_counters(counters); }
    };
    std::unique_ptr<uint32_t[], FreeCounters> nonfinite_;
    std::unique_ptr<BlockVerifier> verifier_;
    std::unique_ptr<BlockEncoder> encoder_;
    struct FreeMemory {
        Device* device;
        size_t bytes;
        void operator()(uint8_t* memory) const { device->deallocate(memory, bytes); }
    };
    std::unique_ptr<uint8_t[], FreeMemory> largest_scales_;

    mutable std::mutex failed_evictions_mutex_;
    uint64_t failed_evictions_ = 0;
    Status failed_eviction_;  // the last one's
    RoomQueue room_queue_;

    // Locks are taken in this order: sources_mutex_, an AttentionSource's, mutex_, PrefixStore's, BlockStore's, a tier's or the
    // device's. Nobody holds one of them while the mover is called.
    std::mutex sources_mutex_;
    std::vector<AttentionSource*> sources_;

    mutable std::mutex mutex_;
    std::atomic<bool> closed_{false};                   // written under mutex_
    std::vector<std::unique_ptr<Sequence>> sequences_;  // by slot
    std::vector<uint32_t> free_slots_;
    std::vector<const Loading*> loads_;  // that go on
    uint64_t uses_ = 0;                  // of sequences by plans
    std::atomic<size_t> in_plans_{0};    // sequences; written under mutex_, as the next two
    size_t queued_ = 0;                  // of them, by begins that are queued for room
    std::atomic<uint64_t> plan_changes_{0};
    mutable std::atomic<int> holders_{0};      // calls of BlockHold
    std::atomic<uint32_t> steps_{0};           // that were begun
    std::atomic<int64_t> keep_room_after_{0};  // of the steady clock, when the last moved nothing
    std::atomic<uint64_t> keeping_room_{0};    // ticket of the last background eviction; 0: nothing might leave
    std::unique_ptr<Mover> mover_;             // last: its threads use the rest
};

}  // namespace ta
