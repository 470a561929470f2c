// A place for blocks. A tier has fixed slots of up to three classes under a byte budget; which block lives where, and when it
// moves, is not its business.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/format/layout.h"
#include "src/core/status.h"

namespace ta {

// From the fastest to the slowest: of the pool's own device, of another device of the process, of the host, on disk. Kernels read
// all but the last where they lie.
enum class TierKind : uint8_t { kDevice, kPeer, kHost, kDisk };
inline constexpr size_t kTiers = 4;
inline constexpr const char* name_of(TierKind tier) {
    constexpr const char* kNames[kTiers] = {"device", "peer", "host", "disk"};
    return kNames[size_t(tier)];
}
// Memory of devices, where the pool has one: a CPU reads it through that.
inline constexpr bool is_of_devices(TierKind tier) {
    return tier <= TierKind::kPeer;
}
// Below the device, and where kernels read.
inline constexpr bool is_memory_below(TierKind tier) {
    return tier == TierKind::kPeer || tier == TierKind::kHost;
}
// As callers know it.
inline constexpr ta_tier code_of(TierKind tier) {
    constexpr ta_tier kCodes[kTiers] = {TA_TIER_DEVICE, TA_TIER_PEER, TA_TIER_HOST, TA_TIER_DISK};
    return kCodes[size_t(tier)];
}

// A tier that is read-only takes no writes for now: it has no space, or writing failed time and again. It tries again with the
// first write after a while. A failed tier does not answer.
enum class TierState : uint8_t { kOk, kReadOnly, kFailed };

struct TierHealth {
    TierState state = TierState::kOk;
    char reason[192] = "";  // one sentence; empty when the state is kOk
};

inline constexpr int kSlotClasses = kPageKinds;  // by PageKind

// A slot of a tier, from acquire() to release().
struct Slot {
    static constexpr uint32_t kNone = UINT32_MAX;
    uint32_t index = kNone;
    uint8_t slot_class = 0;

    bool operator==(const Slot&) const = default;
};

struct TierStats {
    uint64_t budget = 0;        // bytes the tier may take, everything counted
    uint64_t taken = 0;         // bytes it takes, whether slots are in use or not: slots, headers, index
    uint64_t memory = 0;        // host memory beside the slots: index and buffers. Part of `taken` in the host tier
    uint64_t used = 0;          // bytes of acquired slots, padding and headers included; without retired ones
    uint64_t free = 0;          // bytes of the space for slots that nobody has
    uint64_t room = 0;          // those of them that slots can have: all but the rests of regions that are in use
    uint64_t largest_free = 0;  // longest run of them
    double fragmentation = 0;   // share of the free bytes that the class that fares worse cannot have: 0 none
    uint64_t slots_used[kSlotClasses] = {};
    uint64_t slots_free[kSlotClasses] = {};   // if no slot of another class is acquired
    uint64_t slots_empty[kSlotClasses] = {};  // of these, those of regions that may serve any class
    uint64_t regions_empty = 0;               // such regions

    // Of a disk's requests, since creation.
    uint64_t reads = 0, writes = 0, bytes_read = 0, bytes_written = 0;  // that succeeded
    uint64_t failed = 0, corrupt = 0, stalled = 0, cancelled = 0;       // each request in one of them
    // Of them, now.
    uint64_t queued = 0, in_flight = 0;
    uint64_t erasing = 0;  // slots of a persistent disk that are free when their records are erased
    uint64_t retired = 0;  // that are free after the next sync, and count as free
};

// Thread-safe.
class Tier {
  public:
    virtual ~Tier() = default;
    // One slot for each class in `wanted`, in that order and next to one another where possible; or none and nothing changed.
    // TA_E_TIER_FULL: the budget is used up, or the tier is read-only.
    virtual Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) = 0;
    virtual void release(std::span<const Slot> slots) = 0;
    // The same for slots whose blocks have been written elsewhere: a persistent tier keeps their records until a sync has put
    // that on the medium.
    virtual void retire(std::span<const Slot> slots) { release(slots); }
    // False: the tier knows that what was written to the slot is lost.
    virtual bool holds(Slot) const { return true; }
    // The slot's address, for tiers whose slots are memory, else nullptr.
    virtual uint8_t* address(Slot slot) const = 0;
    virtual TierStats stats() const = 0;
    virtual TierHealth health() const = 0;
    // Says what is missing here and why, a sentence each; constant after creation.
    virtual std::span<const std::string> degraded() const = 0;
};

// The tiers of a pool below its device, fastest first; they are not owned.
class LowerTiers {
  public:
    void set(TierKind kind, Tier* tier) { tiers_[size_t(kind)] = tier; }
    // nullptr: there is none.
    Tier* operator[](TierKind kind) const { return tiers_[size_t(kind)]; }
    // The next one down that there is.
    std::optional<TierKind> below(TierKind kind) const {
        for (size_t t = size_t(kind) + 1; t < kTiers; ++t) {
            if (tiers_[t]) return TierKind(t);
        }
        return {};
    }
    bool empty() const { return !below(TierKind::kDevice); }

  private:
    std::array<Tier*, kTiers> tiers_{};
};

}  // namespace ta
