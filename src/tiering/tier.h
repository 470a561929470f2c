// Where blocks live and how their bytes get in and out. A tier has fixed slots of up to three classes under a byte budget and
// moves bytes asynchronously; which block lives where, and when it moves, is not its business.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "src/core/status.h"

namespace ta {

enum class TierKind : uint8_t { kDevice, kHost, kDisk };

// A tier that is read-only takes no writes for now: it has no space, or writing failed time and again. It tries again with the
// first write after a while. A failed tier does not answer.
enum class TierState : uint8_t { kOk, kReadOnly, kFailed };

struct TierHealth {
    TierState state = TierState::kOk;
    char reason[192] = "";  // one sentence; empty when the state is kOk
};

inline constexpr int kSlotClasses = 3;  // by PageKind: token blocks, channel blocks, low blocks

// A slot of a tier, from acquire() to release().
struct Slot {
    static constexpr uint32_t kNone = UINT32_MAX;
    uint32_t index = kNone;
    uint8_t slot_class = 0;

    bool operator==(const Slot&) const = default;
};

// What a block says it is. Bound into what is stored, compared when it is read.
struct BlockIdentity {
    uint64_t block_index = 0;       // in its sequence
    uint64_t content_id = 0;        // unique in the pool to what was written
    uint32_t tokens = 0;            // valid ones, 1 ... 64
    std::array<uint8_t, 32> key{};  // the caller's, to find the block again in a persistent tier; else zero
    bool operator==(const BlockIdentity&) const = default;
};

// Whether the bytes of a whole slot are the block that `identity` names: TA_E_CORRUPT says what differs. Called by threads of
// the tier; must not throw.
using BlockCheck = std::function<Status(const BlockIdentity& identity, uint8_t slot_class, const uint8_t* slot)>;

// Bytes into or out of one slot.
struct TierRequest {
    enum class Kind : uint8_t { kRead, kWrite };
    Kind kind = Kind::kRead;
    Slot slot;
    uint64_t offset = 0;  // within the slot
    size_t bytes = 0;
    uint8_t* memory = nullptr;  // read: to here; write: from here. Left alone until, and not touched after, the completion
    BlockIdentity identity;     // of the block that is written, or expected
    uint64_t tag = 0;           // comes back with the completion
};

struct TierCompletion {
    uint64_t tag = 0;
    bool cancelled = false;  // the status is then not OK, and nothing was read into memory or is stored in the slot
    Status status;           // TA_E_CORRUPT, TA_E_IO, TA_E_TIER_FULL
};

// Whoever submits. Told of every request exactly once.
class TierClient {
  public:
    virtual ~TierClient() = default;
    // From a thread of the tier that holds no lock, never from within a call; several threads may call at the same time. May
    // call the tier. Short, since it keeps the tier from working.
    virtual void on_done(TierCompletion completion) noexcept = 0;
};

struct TierStats {
    uint64_t budget = 0;        // bytes the tier may take, everything counted
    uint64_t taken = 0;         // bytes it takes, whether slots are in use or not: slots, headers, index
    uint64_t memory = 0;        // host memory beside the slots: index and staging. Part of `taken` in the host tier
    uint64_t used = 0;          // bytes of acquired slots, padding and headers included
    uint64_t free = 0;          // likewise of slots that nobody has
    uint64_t largest_free = 0;  // longest run of free bytes
    double fragmentation = 0;   // share of the free bytes that the class that fares worse cannot have: 0 none
    uint64_t slots_used[kSlotClasses] = {};
    uint64_t slots_free[kSlotClasses] = {};  // if no slot of another class is acquired

    // Since creation.
    uint64_t reads = 0, writes = 0, bytes_read = 0, bytes_written = 0;  // that succeeded
    uint64_t failed = 0, corrupt = 0, stalled = 0, cancelled = 0;       // each request in one of them
    // Now.
    uint64_t queued = 0, in_flight = 0;
    uint64_t erasing = 0;  // slots of a persistent disk that are free when their records are erased
};

using TierBatch = uint64_t;  // never 0

// Thread-safe. The destructor cancels what is queued, and returns when every client was told of every request.
class Tier {
  public:
    virtual ~Tier() = default;
    virtual TierKind kind() const = 0;
    // Of a block, 0 for a class that the tier does not have.
    virtual size_t slot_bytes(uint8_t slot_class) const = 0;
    // One slot for each class in `wanted`, in that order and next to one another where possible; or none and nothing changed.
    // TA_E_TIER_FULL: the budget is used up, or the tier is read-only.
    virtual Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) = 0;
    // A slot that requests still work on is free for others when they are done with it.
    virtual void release(std::span<const Slot> slots) = 0;
    // Where the slot lies, for tiers whose slots are memory, else nullptr.
    virtual uint8_t* address(Slot slot) const = 0;
    // All requests, or none on failure. They are done in any order. A disk writes whole slots only, and while a slot is written
    // nothing else may be asked of it: TA_E_BUSY; reading what was never written is TA_E_STATE.
    virtual Result<TierBatch> submit(std::span<const TierRequest> requests, TierClient& client) = 0;
    // Requests of the batch that did not finish yet complete as cancelled, soon, whatever the disk does.
    virtual void cancel(TierBatch batch) = 0;
    virtual TierStats stats() const = 0;
    virtual TierHealth health() const = 0;
    // What is missing here and why, a sentence each; constant after creation.
    virtual std::span<const std::string> degraded() const = 0;
};

}  // namespace ta
