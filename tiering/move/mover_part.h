// A part of a move: some blocks that are copied, checked and published together. Several parts are on their way at a time, so
// that the bus is busy while what has arrived is checked.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "src/core/thread_pool.h"
#include "tiering/disk/disk.h"
#include "tiering/disk/latch.h"
#include "tiering/room/signal.h"
#include "tiering/store/blocks.h"
#include "tiering/verify/reader.h"
#include "tiering/verify/verifier.h"

namespace ta {

// Why blocks move: what the statistics are kept by.
enum class MoveReason : uint8_t { kAsked, kPrefetch, kNeeded, kEviction };
inline constexpr int kMoveReasons = 4;
inline constexpr std::chrono::milliseconds kReadersPatience{200};

struct MoveItem {
    BlockPtr block;                                           // nullptr: one that is not full, which stays
    uint64_t index;                                           // in its sequence
    std::chrono::steady_clock::time_point last_used_at = {};  // by a plan; of what is evicted
};

// How far the moves of a ticket are. `skipped` blocks stay where they are for a reason of their own: open, pinned, released,
// moved by others.
struct MoveProgress {
    ta_move_state state = TA_MOVE_QUEUED;
    uint64_t blocks = 0, moved = 0, present = 0, skipped = 0, failed = 0;
    Status status;  // of the first block that failed
};

inline constexpr int kLatencyBuckets = 24;  // bucket i: up to 2^i microseconds; the last: any

struct MoveCounters {
    uint64_t latency[3][kLatencyBuckets] = {};                     // of the batches that were moved into a tier
    double seconds[3] = {0, 0, 0};                                 // their sum
    uint64_t blocks_in[3] = {0, 0, 0}, blocks_out[3] = {0, 0, 0};  // by TierKind
    uint64_t bytes_in[3] = {0, 0, 0}, bytes_out[3] = {0, 0, 0};
    uint64_t bytes_by_reason[kMoveReasons] = {0, 0, 0, 0};
    uint64_t bytes_by_kernel = 0, bytes_by_engine = 0;  // between a device and the host
    // Corrupt are blocks that are damaged themselves, not only in what arrived of them.
    uint64_t failed = 0, corrupt = 0;
    uint64_t fallen[3] = {0, 0, 0};     // blocks, by the tier that they came into with fewer bits
    uint64_t evicted[3] = {0, 0, 0};    // blocks, by the tier that they left
    double evicted_age[3] = {0, 0, 0};  // seconds since the last step of their sequences, summed

    MoveCounters& operator+=(const MoveCounters& more);
};

// Device memory for blocks that were encoded anew and are on their way to the host. Kept for the next ones.
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
    // Of at least so many bytes; data is nullptr when there is none.
    Piece take(size_t bytes);
    void give(const Piece& piece);

  private:
    Device* const device_;
    std::mutex mutex_;
    std::vector<Piece> idle_;
};

// Of the pool whose blocks are moved. Outlives its mover.
struct MoveHost {
    Device* device;  // nullptr: a CPU
    const Pages& pages;
    BlockStore& store;
    const BlockReader& reader;
    Tier* host;                          // may be nullptr
    DiskTier* disk;                      // likewise
    BlockVerifier* verifier;             // of a device
    BlockEncoder* encoder;               // of a device where precision falls
    std::chrono::milliseconds patience;  // of a step with those who may be reading what blocks have left
    // Moves or drops blocks of `tier` so that the wanted ones may fit. False: nothing could be.
    std::function<bool(TierKind tier, std::span<const PageKind> wanted, Deadline until)> make_room;
};

// What the parts of a pool's moves share.
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

// What the disk is asked for by the parts of a ticket, for who cancels it.
class DiskWork {
  public:
    void add(DiskTier& disk, DiskBatch batch);
    // What is asked for from now on, too.
    void cancel(DiskTier& disk);

  private:
    std::mutex mutex_;
    bool cancelled_ = false;
    std::vector<DiskBatch> batches_;
};

class MovePart {
  public:
    // `items` stay where they are until the part is gone. `patience`: how long start() waits for those who may be reading what
    // blocks have left. `disk_work`: where somebody may cancel the move; else nullptr.
    MovePart(MoveSharing& sharing, std::span<const MoveItem> items, TierKind to, MoveReason reason,
             std::chrono::milliseconds patience, DiskWork* disk_work = nullptr);
    // Waits for copies, and takes back what was not finished.
    ~MovePart();
    MovePart(const MovePart&) = delete;
    MovePart& operator=(const MovePart&) = delete;

    // Takes the blocks. False: start() will wait, for room or for others; who has parts on their way finishes them before.
    bool prepare();
    // After prepare(): start() waits for nobody.
    bool starts_at_once() const;
    // Who hashes what arrives is awake by then.
    void wake_checkers();
    // Finds room and starts to copy. Where there is no room, others make some for needed blocks.
    void start();
    // Waits for the copies, checks what arrived and publishes it.
    void finish();
    MoveProgress& progress() { return progress_; }

  private:
    struct Work {  // one block on its way
        const MoveItem* item;
        Place from, to;
        Status status;
        bool over = false;
        bool cancelled = false;      // on the disk; the status says so
        uint8_t* read = nullptr;     // a copy in host memory of what is at `from`, to be encoded anew
        uint8_t* written = nullptr;  // what goes to `to`, encoded anew; nullptr: what is at `from`
        bool falls() const { return from.kind != to.kind; }
    };
    struct Piece {  // of a block, for a thread
        size_t work;
        uint32_t first, n;  // layers
    };
    bool take(const MoveItem& item);
    void find_room();
    Status acquire(std::span<Work> work);
    void start_in_memory(std::vector<size_t> list);
    void start_with_disk(std::span<const size_t> list, DiskRequest::Kind kind);
    bool on_device(const Place& place) const { return sharing_.pool.device && place.tier == TierKind::kDevice; }
    void fetch_falling(std::span<const size_t> list);
    std::vector<size_t> fall_for_disk(std::vector<size_t> list);
    void fall_on_device(std::span<const size_t> list);
    void fail_all(std::span<const size_t> list, const Status& status);
    void wait_for_copies();
    void check_on_device();
    void check_on_host();
    bool is_damaged(const Work& work) const;
    void fall(Work& work, uint8_t* to, const Piece& piece, std::mutex& failing);
    void write_empty_trailer(const Work& work, uint8_t* to) const;
    void commit(double seconds);
    void give_back(const Work& work);
    void count_moved(const Work& w, MoveCounters& counted);
    Tier* below(TierKind tier) const { return tier == TierKind::kHost ? sharing_.pool.host : sharing_.pool.disk; }

    MoveSharing& sharing_;
    const std::span<const MoveItem> items_;
    const TierKind to_;
    const MoveReason reason_;
    const std::chrono::milliseconds patience_;
    DiskWork* const disk_work_;
    MoveProgress progress_;
    std::vector<Work> work_;
    bool has_room_ = false;
    std::chrono::steady_clock::time_point start_;
    std::vector<size_t> copied_, arriving_;  // of work_: by the device, and what it checks; with a CPU, to copy
    std::vector<uint8_t> fetched_, fallen_;  // on its way to disk: what is encoded anew, from a device, and what came of it
    FallingRoom::Piece on_device_;           // likewise to the host
    std::vector<size_t> on_disk_;            // of work_: what latch_ waits for, by tag
    std::unique_ptr<DiskLatch> latch_;
    std::unique_ptr<DeviceTransfer> transfer_;
    std::unique_ptr<ArrivalCheck> arrival_;
};

}  // namespace ta
