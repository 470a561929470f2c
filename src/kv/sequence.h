// A sequence of a pool: its blocks, and what steps and calls need to know of them. Guarded by the pool's lock, or owned by the
// plan that has it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "src/kv/gaps.h"
#include "tiering/room/resident.h"

namespace ta {

struct Partition;

inline constexpr uint8_t kNothingSeen = 2;
inline constexpr int64_t kMaxTokens = int64_t{1} << 40;  // of a sequence

struct Sequence : Resident {
    uint32_t slot = 0;
    uint32_t generation = 0;
    bool released = false;  // while in a plan: the id is stale; slot and blocks are the plan's until it ends
    // Values from before the running begin, which may fail.
    uint64_t used_before = 0;
    std::chrono::steady_clock::time_point used_before_at;
    uint64_t version = 0;  // grows with every change of `blocks`
    // Only with universal open scales: the largest K and V scales of its blocks, [layers, kv_heads, 2]. On a device
    // `scales_side` says which record of AppendRecords::largest_scales() has them. If they are not known, the next step finds
    // them from the blocks.
    std::vector<float> largest_scales;
    uint8_t scales_side = kNothingSeen;
    bool scales_known = true;
    uint32_t nonfinite_seen = 0;    // of the device's counter: what was reported so far
    std::atomic<Tenant> tenant{0};  // namespace of its tokens; 0: none. Publishing may set it while a plan has the sequence
    // Namespace of the tokens in a block. While the sequence has none, others may have published a block that it shares.
    Tenant tenant_of(int64_t block) const {
        const Tenant there = block < int64_t(blocks.size()) ? blocks[size_t(block)]->tenant() : 0;
        return there != 0 ? there : tenant.load();
    }
    // In a pool with windows: blocks before this one pass if they can. In a partition they count as passed even after a
    // truncate.
    int64_t passed_to = 0;
    int64_t whole_from = 0;                      // the first block that has not passed
    std::shared_ptr<const Partition> partition;  // nullptr: this rank has all its blocks
    int64_t shared_block = 0;                    // of a partition: the last block of its last step, which all ranks have
    bool all_ranks_have(int64_t block) const { return !partition || block == shared_block; }
    std::vector<Gap> gaps;  // in order, not touching; all are forgotten blocks

    // Queries stand at or after this token. From there on distances follow from the length alone.
    int64_t behind_gaps() const { return gaps.empty() ? 0 : gaps.back().end * kPageTokens; }
};

}  // namespace ta
