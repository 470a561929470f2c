// Shared by the parts of a pool's moves: its tiers, the threads that hash, the counters.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "src/core/thread_pool.h"
#include "tiering/disk/disk.h"
#include "tiering/store/blocks.h"
#include "tiering/store/room_signal.h"
#include "tiering/verify/reader.h"
#include "tiering/verify/verifier.h"

namespace ta {

// Why blocks move; statistics are kept by reason.
enum class MoveReason : uint8_t { kAsked, kPrefetch, kNeeded, kEviction };
inline constexpr int kMoveReasons = 4;
inline constexpr std::chrono::milliseconds kReadersPatience{200};

struct MoveItem {
    BlockPtr block;                                           // nullptr: a block that is not full, which stays
    uint64_t index;                                           // in its sequence
    std::chrono::steady_clock::time_point last_used_at = {};  // by a plan; of what is evicted
};

// How far the moves of a ticket are. `skipped` counts blocks that stay for a reason of their own: open, pinned, released, or
// moved by others.
struct MoveProgress {
    ta_move_state state = TA_MOVE_QUEUED;
    uint64_t blocks = 0, moved = 0, present = 0, skipped = 0, failed = 0;
    Status status;  // of the first block that failed
};

inline constexpr int kLatencyBuckets = 24;  // bucket i: up to 2^i microseconds; the last: any

struct MoveCounters {
    uint64_t latency[kTiers][kLatencyBuckets] = {};            // of parts, by the tier they moved into
    double seconds[kTiers] = {};                               // their sum
    uint64_t blocks_in[kTiers] = {}, blocks_out[kTiers] = {};  // by TierKind
    uint64_t bytes_in[kTiers] = {}, bytes_out[kTiers] = {};
    uint64_t bytes_by_reason[kMoveReasons] = {0, 0, 0, 0};
    uint64_t bytes_by_kernel = 0, bytes_by_engine = 0;  // where a device copies
    // `corrupt` counts blocks that are damaged themselves; a copy that arrived damaged counts in `failed`.
    uint64_t failed = 0, corrupt = 0;
    uint64_t fallen[kTiers] = {};     // blocks, by the tier that they came into with fewer bits
    uint64_t evicted[kTiers] = {};    // blocks, by the tier that they left
    double evicted_age[kTiers] = {};  // seconds since the last step of their sequences, summed

    MoveCounters& operator+=(const MoveCounters& more);
};

// Device memory for blocks that were re-encoded and are on their way to the host. Pieces are kept and reused.
class FallingRoom {
  public:
    explicit FallingRoom(Device* device) : device_(device) {}
    ~FallingRoom();
    FallingRoom(const FallingRoom&) = delete;
    FallingRoom& operator=(const FallingRoom&) = delete;

    struct Piece {
        uint8_t* data = nullptr;
        size_t bytes = 0;
    };
    // A piece of at least so many bytes; data is nullptr if there is none.
    Piece take(size_t bytes);
    void give(const Piece& piece);

  private:
    Device* const device_;
    std::mutex mutex_;
    std::vector<Piece> idle_;
};

// The parts of a pool that its mover uses. They outlive the mover.
struct MoveHost {
    Device* device;  // nullptr: a CPU
    const Pages& pages;
    BlockStore& store;
    const BlockReader& reader;
    const LowerTiers& tiers;
    DiskTier* disk;                      // the one in `tiers`, or nullptr
    BlockVerifier* verifier;             // of a device
    BlockVerifier* peer_verifier;        // of the peer tier's device
    BlockEncoder* encoder;               // of a device where precision falls
    std::chrono::milliseconds patience;  // how long a step waits for readers of places that blocks have left
    // Moves or drops blocks of `tier` so that the wanted ones may fit. False: there was nothing to move or drop.
    std::function<bool(TierKind tier, std::span<const PageKind> wanted, Deadline until)> make_room;
};

// State that the parts of a pool's moves share.
struct MoveSharing {
    explicit MoveSharing(MoveHost of) : pool(std::move(of)), falling(pool.device) {}

    const MoveHost pool;
    MoveRoute route = MoveRoute::kCalibrated;
    std::atomic<int> parts{0};  // on their way
    std::mutex checking;        // one part at a time, by all checkers
    ThreadPool checkers;        // hash what arrived in host memory
    FallingRoom falling;
    std::mutex counting;
    MoveCounters counters;
};

// The disk batches of a ticket's parts, kept so that they can be cancelled.
class DiskWork {
  public:
    void add(DiskTier& disk, DiskBatch batch);
    // Cancels these batches, and those of later add() calls.
    void cancel(DiskTier& disk);

  private:
    std::mutex mutex_;
    bool cancelled_ = false;
    std::vector<DiskBatch> batches_;
};

}  // namespace ta
