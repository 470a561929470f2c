// A part of a move: some blocks that are copied, checked and handed over together. Several parts are on their way at a time,
// which keeps the bus busy while arrived blocks are checked.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "tiering/move/sharing.h"
#include "tiering/move/transfers/transfer.h"

namespace ta {

class MovePart {
  public:
    // `items` outlive the part. `patience`: how long start() waits for readers of places that blocks have left. `disk_work`:
    // nullptr if nobody may cancel the move.
    MovePart(MoveSharing& sharing, std::span<const MoveItem> items, TierKind to, MoveReason reason,
             std::chrono::milliseconds patience, DiskWork* disk_work = nullptr);
    // Waits for copies, and undoes what was not finished.
    ~MovePart();
    MovePart(const MovePart&) = delete;
    MovePart& operator=(const MovePart&) = delete;

    // Takes the blocks and their room. False: start() will wait for room or for others, so a caller with parts on their way
    // finishes them first.
    bool prepare();
    // After prepare(). True: start() waits for nobody.
    bool starts_at_once() const;
    // Wakes the threads that hash, so that they are awake when blocks arrive.
    void wake_checkers();
    // Starts to copy, and finds room first if prepare() found none. If there is none, every move but a prefetch makes some.
    void start();
    // Waits for the copies, and gives the blocks that arrived intact their new place.
    void finish();
    MoveProgress& progress() { return progress_; }

  private:
    bool take(const MoveItem& item);
    void find_room();
    Status acquire(std::span<MovedBlock> blocks);
    bool is_damaged(const MovedBlock& block) const;
    void commit(double seconds);
    void give_back(const MovedBlock& block);
    void count_moved(const MovedBlock& w, MoveCounters& counted);

    MoveSharing& sharing_;
    const std::span<const MoveItem> items_;
    const TierKind to_;
    const MoveReason reason_;
    const std::chrono::milliseconds patience_;
    DiskWork* const disk_work_;
    MoveProgress progress_;
    const MovesToCome moves_;       // of all items
    std::vector<MovedBlock> work_;  // not resized after prepare()
    bool has_room_ = false;
    std::chrono::steady_clock::time_point start_;
    std::vector<std::unique_ptr<Transfer>> transfers_;
};

}  // namespace ta
