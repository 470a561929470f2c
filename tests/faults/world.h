// One life of a tiered pool in which at most one fault is set: a scenario's calls, made through the ABI on a context whose
// files, memory and device may fail. A call that fails has changed nothing, and made again without the fault it succeeds; what
// attention gives and what is stored is that of a pool without tiers that makes the same calls.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/counting_allocator.h"
#include "support/failing_memory.h"
#include "support/files.h"
#include "support/groups.h"
#include "support/tiers.h"
#include "tiering/disk/client.h"
#include "tiering/faulty_files.h"
#include "tiering/simulated_device.h"
#include "tiering/store/blocks.h"

namespace ta::testing {

inline constexpr uint32_t kLayers = 2, kHeads = 1, kDim = 64, kQHeads = 2;
inline constexpr int64_t kRow = kHeads * kDim;

enum class FaultKind {
    kNone,
    kHooks,
    kNew,
    kEio,
    kEnospc,
    kEintr,
    kShort,
    kTorn,
    kStall,
    kCopyFails,
    kCopyWrong,
    kCopyLate,
};
inline constexpr int kFaultKinds = int(FaultKind::kCopyLate) + 1;
const char* name_of(FaultKind kind);
inline bool is_memory(FaultKind k) {
    return k == FaultKind::kHooks || k == FaultKind::kNew;
}
inline bool is_file(FaultKind k) {
    return k >= FaultKind::kEio && k <= FaultKind::kStall;
}
inline bool is_copy(FaultKind k) {
    return k >= FaultKind::kCopyFails;
}

struct FaultPlan {
    FaultKind kind = FaultKind::kNone;
    uint64_t at = 0;
    bool forever = false;
    // kNone: what is counted.
    FaultKind counts = FaultKind::kNone;
};

struct PoolShape {
    uint64_t device_blocks = 12;                // channel blocks beside six token blocks
    uint64_t host_blocks = 0, disk_blocks = 0;  // channel blocks, about, as all that follow
    int high = 100, low = 100;                  // by default no moves in the background
    bool persistent = false;                    // the disk tier has a name
    uint64_t peer_blocks = 0;
    int64_t window = 0;  // of layer 0; 0: none
};

// The results of a run without tiers, to compare with.
struct Reference {
    struct State {
        ta_kv_pool_stats stats{};
        std::vector<int64_t> lengths;
        std::vector<uint64_t> stored;  // a hash of each sequence's tokens
        std::vector<ta_namespace_stats> spaces;
    };
    std::vector<float> results;
    std::vector<State> before;     // each call
    std::vector<int64_t> matched;  // tokens, of each match
};

// A pool with tiers has dropped published blocks that nobody used, as it may where a fault left no room, and a match found
// fewer: from here on there is nothing to compare with.
struct LostPrefix {};

// Inputs of steps: the same in all lives of a scenario.
class Inputs {
  public:
    struct Layer {
        Tensor k, v, q;
    };
    Layer& of(size_t step, uint32_t layer, int64_t n, int64_t queries);

  private:
    std::map<std::pair<size_t, uint32_t>, Layer> made_;
};

class World {
  public:
    // `reference`: nullptr for the run that makes one. `on_device`: a simulated device in place of plain memory.
    World(const PoolShape& shape, Inputs& inputs, const Reference* reference, const FaultPlan& fault, bool on_device,
          bool uring);
    ~World();

    void make_pool();
    // The fault is set from here on.
    void begin_faults() { faults_on_ = true; }
    size_t add();
    size_t fork(size_t from);
    void truncate(size_t s, int64_t length);
    void forget(size_t s, int64_t first, int64_t n);
    void shift(size_t s, int64_t first, int64_t n);
    void release(size_t s);
    // The last one or two new tokens of each member attend; with `place` not -1 two queries, one `place` tokens from the beginning and
    // one as far from the end.
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new, int64_t place = -1);
    // Waits until the blocks are there. Not done on a pool without tiers, as all that follow but verify().
    void move(size_t s, uint64_t first, uint64_t n, ta_tier tier);
    void prefetch(size_t s, uint64_t first, uint64_t n, bool wait);
    // Asks, and cancels at once.
    void move_and_cancel(size_t s, uint64_t first, uint64_t n, ta_tier tier);
    // Asks and goes on.
    void move_in_background(size_t s, uint64_t first, uint64_t n, ta_tier tier);
    void pin(size_t s, uint64_t first, uint64_t n, bool pinned);
    void retain(size_t s, uint64_t first, uint64_t n, uint32_t priority);
    // All of it leaves the device. Whoever wakes it copies its open block: copies do not count from then on.
    void suspend(size_t s, ta_tier tier);
    void reserve(size_t s, int64_t tokens);
    void verify(size_t s);
    // Saves and loads, the copy takes a new place; both without faults are the sequence.
    size_t save_and_load(size_t s);
    // The same through a group whose two ranks are this context.
    size_t send_and_receive(size_t s);
    // Spreads it over a group of one rank.
    void partition(size_t s);
    void close_pool();

    // Prefix reuse: world_prefix.cpp. Namespaces go by their salts, keys of a text by its number.
    // `quota`: of sequences of so many blocks, 0: none.
    void make_space(uint8_t salt, uint64_t quota = 0);
    void end_space(uint8_t salt);
    void publish(size_t s, uint8_t salt, uint64_t text, uint64_t n);
    // Beyond the quota.
    void refuse_publish(size_t s, uint8_t salt, uint64_t text, uint64_t n);
    // Throws LostPrefix.
    size_t match(uint8_t salt, uint64_t text, uint64_t n);
    // Another pool of the context fetches it through a group, and is gone again.
    void fetch(uint8_t salt, uint64_t text, uint64_t n);
    // A store gets what is published, another pool of the context loads it from there, and all three are gone again.
    void pass_through_store(uint8_t salt, uint64_t text, uint64_t n);
    // All sequences and what is published, to a file.
    void save_pool();
    // They come back as new sequences, in the order of the old ones. Returns the first.
    size_t load_pool();
    void flush(uint8_t salt);
    // Another pool on the same persistent file; sequences and namespaces are gone. On a pool without tiers what was published
    // stays for a namespace of the same salt.
    void reopen();
    void lost_prefix() { lost_ = true; }

    // Until nothing moves.
    void settle();
    // The tiers of full blocks.
    ta_residency residency(size_t s);
    const BlockPtr& block(size_t s, size_t b);
    bool tiered() const { return reference_ != nullptr; }

    // Verifies everything, releases everything, and checks that nothing is left.
    void finish();
    bool damaged = false;  // blocks were changed behind the pool's back

    // Operations that the fault's kind counts.
    uint64_t operations();
    bool fault_came() const { return failures_ > 0; }
    uint64_t failures() const { return failures_; }
    Reference take_record() { return std::move(record_); }

    Context context;
    KvPool pool;
    Plan plan;
    GroupHandle group;         // of partition()
    std::vector<ta_seq> seqs;  // 0: released
    FaultyFiles* files() { return files_.get(); }
    bool on_device() const { return on_device_; }
    bool has_file_fault() const { return is_file(fault_.kind) || is_file(fault_.counts); }
    // Runs the script's own changes to the pool, while the fault waits.
    template <class Body>
    void heal_for(Body&& body) {
        disarm();
        const bool faults = std::exchange(faults_on_, false);
        body();
        faults_on_ = faults;
    }
    size_t payload_bytes(size_t s, size_t b);
    const std::string& folder() const { return folder_.path(); }
    // Flips a bit of a block's payload where it lies.
    void damage(size_t s, size_t b);
    // Calls that must fail and change nothing.
    void refuse_step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new);
    void refuse_move(size_t s, uint64_t b, ta_tier tier);

  private:
    using Call = std::function<ta_status(ta_error*)>;
    // Calls that a pool without tiers makes too, those that it does not, and those that make the pool.
    enum class Kind { kCommon, kTierOnly, kCreates };
    void call(const char* what, Kind kind, const Call& make);
    void arm();
    void disarm();
    void relax();
    bool is_expected(ta_status status) const;
    // Of a save: its file is removed where it says that it could neither sync the folder nor remove it.
    ta_status saved(ta_status status, const ta_error& err, const std::string& path) const;
    uint64_t source_count() const;
    Status create_context();
    Reference::State state();
    void add_spaces(Reference::State& s);
    // False: they differ by more than what unused entries may come to.
    bool spaces_match(const Reference::State& now, const Reference::State& expected) const;
    static std::string name_spaces(const Reference::State& s);
    void create_pool();
    void expect_state(const char* what);
    void expect_slots(const char* what);
    bool slots_match(std::string& why);
    ta_ticket ask(size_t s, uint64_t first, uint64_t n, ta_tier tier, bool prefetch);
    ta_move_info wait_for(ta_ticket ticket, bool cancelled = false);
    void keep(const std::vector<float>& values);

    const PoolShape shape_;
    Inputs& inputs_;
    const Reference* const reference_;
    const FaultPlan fault_;
    const bool on_device_;
    Context peer_context_;  // where a peer tier lies; nothing fails there
    Reference record_;
    size_t calls_ = 0, steps_ = 0, results_ = 0, saves_ = 0;
    size_t matches_ = 0;
    uint64_t failures_ = 0;
    bool faults_on_ = false, armed_ = false, finished_ = false, closed_ = false, lost_ = false;
    struct Space {
        ta_namespace id = 0;
        bool open = false;
        ta_namespace_stats before{};  // what it counted before the pool was made again
    };
    std::map<uint8_t, Space> spaces_;
    std::vector<ta_seq> saved_;  // sequences of the pool's file
    bool suspends_ = false;
    ta_kv_pool_stats before_{};  // what the pool counted before it was made again
    int64_t left_ = 0;           // operations until the fault
    uint64_t counted_ = 0;       // in earlier armed stretches
    uint64_t armed_from_ = 0;    // the source's count then
    CountingAllocator allocator_;
    std::shared_ptr<FaultyFiles> files_;
    SimulatedDevice* device_ = nullptr;
    Folder folder_;
};

// The bytes of a block where they lie, in memory or in the disk tier's file, for whoever damages them.
class BlockBytes {
  public:
    BlockBytes(World& world, size_t s, size_t b);
    ~BlockBytes();
    BlockBytes(const BlockBytes&) = delete;
    BlockBytes& operator=(const BlockBytes&) = delete;
    void flip(size_t at, int bit);

  private:
    uint8_t* memory_ = nullptr;
    int fd_ = -1;
    std::vector<off_t> offsets_;  // in the file
};

}  // namespace ta::testing
