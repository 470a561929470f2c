// Requests to a disk tier and its answers: bytes into and out of slots.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "src/core/status.h"
#include "tiering/tier.h"

namespace ta {

// Names a published block in a persistent disk tier.
using BlockKey = std::array<uint8_t, 32>;
// Keys that a record has room for beside the one in the block's identity.
inline constexpr size_t kMostMoreKeys = 15;

// Identity of a block: stored in its record, and compared when that is read.
struct BlockIdentity {
    uint64_t block_index = 0;  // in its sequence
    uint64_t content_id = 0;   // unique in the pool to what was written
    uint32_t tokens = 0;       // valid ones, 1 ... 64
    BlockKey key{};            // the caller's, to find the block again in a persistent tier; else zero
    bool operator==(const BlockIdentity&) const = default;
};

// Checks that the bytes of a whole slot are the block that `identity` names: TA_E_CORRUPT says what differs. Called by threads
// of the tier; must not throw.
using BlockCheck = std::function<Status(const BlockIdentity& identity, uint8_t slot_class, const uint8_t* slot)>;

// Bytes into or out of one slot.
struct DiskRequest {
    enum class Kind : uint8_t { kRead, kWrite };
    Kind kind = Kind::kRead;
    Slot slot;
    uint64_t offset = 0;  // within the slot
    size_t bytes = 0;
    uint8_t* memory = nullptr;  // read: destination; write: source. In use by the tier until the completion, never after it
    bool on_device = false;     // `memory` is the tier's device's
    BlockIdentity identity;     // of the block that is written, or expected
    std::vector<BlockKey> more_keys;  // write: beside the identity's; the first kMostMoreKeys
    uint64_t tag = 0;                 // comes back with the completion
};

struct DiskCompletion {
    uint64_t tag = 0;
    bool cancelled = false;  // the status is then not OK, and nothing was read into memory or is stored in the slot
    Status status;           // TA_E_CORRUPT, TA_E_IO, TA_E_TIER_FULL
};

// Submits requests, and is told of each exactly once.
class DiskClient {
  public:
    virtual ~DiskClient() = default;
    // Called by a thread of the tier that holds no lock, never from within a call of the tier; several threads may call at a
    // time. May call the tier. Must be short: the thread serves no I/O meanwhile.
    virtual void on_done(DiskCompletion completion) noexcept = 0;
};

using DiskBatch = uint64_t;  // never 0

// A block that a persistent file held when it was opened. Its slot is acquired.
struct RecoveredBlock {
    Slot slot;
    BlockIdentity identity;
    uint64_t generation = 0;          // of two records of a block the later one has the higher
    std::vector<BlockKey> more_keys;  // beside the identity's
};

}  // namespace ta
