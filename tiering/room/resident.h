// A pool's sequences as the tiers see them.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "tiering/move/mover_part.h"
#include "tiering/room/ledger.h"
#include "tiering/store/blocks.h"

namespace ta {

// A sequence: tokens [0, length) in blocks of 64. While `in_plan`, only that plan touches it.
struct Resident {
    bool alive = false;
    bool in_plan = false;
    RoomLedger::Waits waits = RoomLedger::Waits::kNot;  // how its plan's begin waits for room
    bool may_be_read() const { return in_plan && waits == RoomLedger::Waits::kNot; }
    // Room set aside for later begins: so many tokens, and the slots for them.
    int64_t promised_tokens = 0;
    SlotCounts promise{};
    // No plan reads it and nothing was promised to it: its sink blocks and its open block may leave, too.
    bool is_idle() const { return !may_be_read() && promised_tokens == 0; }
    // Its blocks stay in tiers that the device reads.
    bool stays_readable() const { return may_be_read() || promised_tokens > 0; }
    int32_t priority = 0;    // the lower leaves a tier first, if the pool's policy uses it
    uint64_t last_used = 0;  // the pool's count of uses when a plan used it last, or when it was last moved to the device for
                             // one
    std::chrono::steady_clock::time_point last_used_at;  // by a plan
    int64_t length = 0;
    std::vector<BlockPtr> blocks;  // ceil(length / 64)
};

// The sequences of a pool and its published blocks: the owners that can lose blocks.
class Residents {
  public:
    virtual ~Residents() = default;
    // Guards the sequences. Blocks are chosen and dropped without releasing it in between. Its holder may take the store's
    // locks, but must not call the mover.
    virtual std::mutex& lock() const = 0;
    // TA_E_CLOSED.
    virtual Status check_open() const = 0;
    // Visits the sequences that are alive. Under the lock.
    virtual void visit(const std::function<void(const Resident&)>& see) const = 0;
    // Adds the attention of ended steps to their blocks. `wait`: of all steps that were ended so far. Not under the lock.
    virtual void take_in_attention(bool wait) = 0;

    // Counts published blocks that no sequence has, by TierKind and kind.
    virtual std::array<SlotCounts, kTiers> unused_slots() const = 0;
    // At least so many bytes of these blocks in a tier, or all; the lowest priority first.
    virtual std::vector<MoveItem> unused(TierKind tier, uint64_t bytes) const = 0;
    // Drops some of these blocks; returns how many bytes that freed. `for_all`: drops none unless so many bytes become free.
    virtual uint64_t drop_unused(TierKind tier, uint64_t bytes, bool for_all) = 0;
};

}  // namespace ta
