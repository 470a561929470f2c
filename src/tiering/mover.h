// Moves full blocks between tiers: copies their bytes, checks them against their hashes where they arrive, and publishes the new
// place. Moves are asked for with tickets and done by threads of the mover, some for each direction, or at once by the caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "src/core/thread_pool.h"
#include "src/kv/blocks.h"

namespace ta {

class Pool;

// Why blocks move: what the statistics are kept by.
enum class MoveReason : uint8_t { kAsked, kPrefetch, kNeeded, kEviction };
inline constexpr int kMoveReasons = 4;

struct MoveItem {
    BlockPtr block;  // nullptr: one that is not full, which stays
    uint64_t index;  // in its sequence
};

// How far the moves of a ticket are. `skipped` blocks stay where they are for a reason of their own: open, pinned, moved by others.
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
    uint64_t failed = 0, corrupt = 0;
};

class Mover {
  public:
    // host and disk may be nullptr.
    Mover(Pool& pool, Tier* host, Tier* disk);
    // Starts the threads. TA_E_LIMIT.
    Status start();
    // Cancels what is queued and waits for what is moving.
    ~Mover();
    Mover(const Mover&) = delete;
    Mover& operator=(const Mover&) = delete;

    // A ticket, never 0. What goes to the device has a queue of its own; within one the order is that of the calls.
    Result<uint64_t> submit(std::vector<MoveItem> items, TierKind to, MoveReason reason);
    // The same at once. Where there is no room in `to`, others make room for needed blocks.
    MoveProgress run(std::span<const MoveItem> items, TierKind to, MoveReason reason);

    // TA_E_STALE for a ticket that was never given out, or finished long ago.
    Result<MoveProgress> query(uint64_t ticket) const;
    // Until it is finished or `nanoseconds` have passed, < 0: for ever; then as query().
    Result<MoveProgress> wait(uint64_t ticket, int64_t nanoseconds) const;
    // Blocks that have not moved stay where they are.
    Status cancel(uint64_t ticket);

    MoveCounters counters() const;
    uint64_t queued() const;  // tickets that are not finished
    bool busy() const { return running_.load() > 0 || queued() > 0; }
    void cancel_all();

  private:
    struct Ticket {
        uint64_t id = 0;
        std::vector<MoveItem> items;
        TierKind to = TierKind::kDevice;
        MoveReason reason = MoveReason::kAsked;
        size_t next = 0;  // item that no thread has taken yet
        int threads = 0;  // that work on it
        MoveProgress progress;
        std::atomic<bool> cancelled{false};
    };
    struct Work {  // one block on its way
        const MoveItem* item;
        Place from, to;
        Status status;
        bool over = false;
    };
    class Unfinished;  // takes back what an exception leaves
    using Queue = std::deque<std::shared_ptr<Ticket>>;

    void stop();
    void serve(int direction);
    size_t part_of(std::span<const MoveItem> items) const;
    void add(Ticket& ticket, MoveProgress&& part);
    void run_part(std::span<const MoveItem> items, TierKind to, MoveReason reason, MoveProgress& progress);
    bool take(const MoveItem& item, TierKind to, MoveProgress& progress, std::vector<Work>& work) const;
    void find_room(std::vector<Work>& work, TierKind to, MoveReason reason);
    Status acquire(std::span<Work> work, TierKind to);
    void copy(std::vector<Work>& work, TierKind to);
    void copy_in_memory(std::span<Work*> work);
    void copy_with_disk(std::span<Work*> work, TierRequest::Kind kind);
    void check(std::vector<Work>& work, TierKind to);
    void finish(std::vector<Work>& work, TierKind to, MoveReason reason, double seconds, MoveProgress& progress);
    void give_back(const Work& work);
    Tier* below(TierKind tier) const { return tier == TierKind::kHost ? host_ : disk_; }
    bool through_host(const Place& from, TierKind to) const;

    Pool& pool_;
    Tier *const host_, *const disk_;
    mutable std::mutex mutex_;
    std::condition_variable wake_;              // the threads
    mutable std::condition_variable finished_;  // who waits
    bool stopping_ = false;
    uint64_t tickets_ = 0;
    Queue queues_[2];  // up, down
    std::unordered_map<uint64_t, std::shared_ptr<Ticket>> known_;
    std::deque<uint64_t> done_;  // finished tickets in known_, oldest first
    MoveCounters counters_;
    std::atomic<int> running_{0};  // calls of run_part
    std::mutex checking_;          // one part at a time, by all checkers
    ThreadPool checkers_;
    std::vector<std::thread> threads_;
};

}  // namespace ta
