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
    RoomLedger::Waits waits = RoomLedger::Waits::kNot;  // for room, its plan's begin
    bool may_be_read() const { return in_plan && waits == RoomLedger::Waits::kNot; }
    // Room that later begins have: for so many tokens, as slots.
    int64_t promised_tokens = 0;
    SlotCounts promise{};
    // Nothing of it is wanted now, nor was promised: its sink blocks and its open block may leave too.
    bool is_idle() const { return !may_be_read() && promised_tokens == 0; }
    // Its blocks do not leave what the device reads.
    bool stays_readable() const { return may_be_read() || promised_tokens > 0; }
    int32_t priority = 0;    // the lower leaves a tier first, where the pool's policy heeds it
    uint64_t last_used = 0;  // by a plan, or moved to the device for one: the pool's count of uses then
    std::chrono::steady_clock::time_point last_used_at;  // by a plan
    int64_t length = 0;
    std::vector<BlockPtr> blocks;  // ceil(length / 64)
};

// The sequences of a pool and what it published: who can lose blocks.
class Residents {
  public:
    virtual ~Residents() = default;
    // Guards the sequences. Blocks are chosen and dropped under one hold of it; whoever has it may take the store's locks and
    // calls no mover.
    virtual std::mutex& lock() const = 0;
    // TA_E_CLOSED.
    virtual Status check_open() const = 0;
    // Visits the sequences that are alive. Under the lock.
    virtual void visit(const std::function<void(const Resident&)>& see) const = 0;
    // Leaves with the blocks what attention they got; `wait`: in all steps that were ended so far. Not under the lock.
    virtual void take_in_attention(bool wait) = 0;

    // Published blocks that no sequence has: how many, by TierKind and kind; some of a tier, of so many bytes; and dropping them.
    virtual std::array<SlotCounts, kTiers> unused_slots() const = 0;
    // Some of these blocks; those of a lower priority come first.
    virtual std::vector<MoveItem> unused(TierKind tier, uint64_t bytes) const = 0;
    // `for_all`: only where so many bytes become free. How many did.
    virtual uint64_t drop_unused(TierKind tier, uint64_t bytes, bool for_all) = 0;
};

}  // namespace ta
