// Tickets of loads from stores: the progress of each, who waits for it, and who hears of its end.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "src/kv/pool.h"

namespace ta::store {

// A load that was asked for.
struct Load {
    uint64_t ticket = 0;
    std::vector<BlockKey> keys;  // hashed
    std::atomic<bool> cancelled{false};
    // How a block counts. One that was present or came may be dropped before the load ends. If it comes again, it still counts
    // once.
    enum class Counts : uint8_t { kSkipped, kPresent, kMoved };
    std::vector<Counts> counts;  // by key; used by the store's thread
    MoveProgress progress;       // guarded by its Tickets; `blocks`: number of keys asked for
};

// Internally synchronised.
class Tickets {
  public:
    static constexpr size_t kMostWaiting = 4096, kMostFinished = 4096;
    // Set in tickets of loads, not in those of the pool's mover.
    static constexpr uint64_t kMark = uint64_t{1} << 63;

    Tickets() { done_.reserve(kMostFinished + 1); }
    // Call it first; `pool` outlives this. If the pool has a mover, it reports finished tickets of loads, too.
    void serve(Pool& pool) noexcept {
        mover_ = pool.mover();
        room_ = &pool.blocks().room_signal();
        last_ = pool.first_ticket() | kMark;
    }

    // TA_E_LIMIT: too many loads wait.
    Result<std::shared_ptr<Load>> add(std::vector<BlockKey>&& keys, uint64_t asked);
    // For a load that its store did not take.
    void forget(const Load& load);
    // Both compute the progress from load.counts.
    void update(Load& load);
    void finish(Load& load, Status status) noexcept;

    // Like those of Mover.
    Result<MoveProgress> wait(uint64_t ticket, int64_t nanoseconds) const;
    Status cancel(uint64_t ticket);
    Result<int> descriptor();
    Result<uint64_t> take_finished(std::span<uint64_t> out);

  private:
    static void count(Load& load) noexcept;
    Result<std::shared_ptr<Load>> find(uint64_t ticket) const;

    Mover* mover_ = nullptr;
    const RoomSignal* room_ = nullptr;  // a load may wait on it
    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    uint64_t last_ = 0;
    std::unordered_map<uint64_t, std::shared_ptr<Load>> known_;
    std::vector<uint64_t> done_;  // finished tickets in known_, oldest first
    FinishedTickets told_;        // used without a mover
};

}  // namespace ta::store
