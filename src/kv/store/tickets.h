// Tickets of loads from stores: how far each is, who waits for it, and who is told that it has finished.
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
    MoveProgress progress;  // guarded by its Tickets; `blocks`: keys that were asked for
};

// Internally synchronised.
class Tickets {
  public:
    static constexpr size_t kMostWaiting = 4096, kMostFinished = 4096;
    // A bit that tickets of loads have; those of the pool's mover lack it.
    static constexpr uint64_t kMark = uint64_t{1} << 63;

    Tickets() { done_.reserve(kMostFinished + 1); }
    // Before anything else. `mover`: the pool's, which tells of finished tickets where there is one.
    void serve(uint64_t first, Mover* mover) noexcept {
        mover_ = mover;
        last_ = first | kMark;
    }

    // TA_E_LIMIT: too many wait.
    Result<std::shared_ptr<Load>> add(std::vector<BlockKey>&& keys, uint64_t asked);
    // It was not taken after all.
    void forget(const Load& load);
    void update(Load& load, uint64_t moved, uint64_t present);
    void finish(Load& load, Status status) noexcept;

    // As of Mover.
    Result<MoveProgress> wait(uint64_t ticket, int64_t nanoseconds) const;
    Status cancel(uint64_t ticket);
    Result<int> descriptor();
    Result<uint64_t> take_finished(std::span<uint64_t> out);

  private:
    Result<std::shared_ptr<Load>> find(uint64_t ticket) const;

    Mover* mover_ = nullptr;
    mutable std::mutex mutex_;
    mutable std::condition_variable finished_;
    uint64_t last_ = 0;
    std::unordered_map<uint64_t, std::shared_ptr<Load>> known_;
    std::vector<uint64_t> done_;  // of known_, oldest first
    FinishedTickets told_;        // without a mover
};

}  // namespace ta::store
