// A place for blocks. A tier has fixed slots of up to kSlotClasses classes under a byte budget. It does not know which block
// lives where, nor when one moves.
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

// From fastest to slowest: memory of the pool's own device, of another device of the process, of the host, and disk. Kernels
// read all but the disk in place.
enum class TierKind : uint8_t { kDevice, kPeer, kHost, kDisk };
inline constexpr size_t kTiers = 4;
inline constexpr const char* name_of(TierKind tier) {
    constexpr const char* kNames[kTiers] = {"device", "peer", "host", "disk"};
    return kNames[size_t(tier)];
}
// True for memory of a device. If the pool has a GPU, a CPU reads such memory through the device.
inline constexpr bool is_of_devices(TierKind tier) {
    return tier <= TierKind::kPeer;
}
// True for tiers below the device in which kernels read.
inline constexpr bool is_memory_below(TierKind tier) {
    return tier == TierKind::kPeer || tier == TierKind::kHost;
}
// The tier as the public header names it.
inline constexpr ta_tier code_of(TierKind tier) {
    constexpr ta_tier kCodes[kTiers] = {TA_TIER_DEVICE, TA_TIER_PEER, TA_TIER_HOST, TA_TIER_DISK};
    return kCodes[size_t(tier)];
}

// A read-only tier takes no writes for now: it has no space, or several writes failed. After a while the next write is tried. A
// failed tier does not answer.
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
    uint64_t budget = 0;        // bytes the tier may take, slots, headers and index together
    uint64_t taken = 0;         // bytes it takes for slots, headers and index, whether slots are in use or not
    uint64_t memory = 0;        // host memory beside the slots: index and buffers. Part of `taken` in the host tier
    uint64_t used = 0;          // bytes of acquired slots with padding and headers; retired slots do not count
    uint64_t free = 0;          // bytes of the slot space that are in no slot in use
    uint64_t room = 0;          // part of `free` that slots can get: without the remainders of regions in use
    uint64_t largest_free = 0;  // longest contiguous run of `room`
    double fragmentation = 0;   // share of the free bytes that the class that fits worst cannot use; 0: none
    uint64_t slots_used[kSlotClasses] = {};
    uint64_t slots_free[kSlotClasses] = {};   // slots that would fit if no slot of another class took free regions
    uint64_t slots_empty[kSlotClasses] = {};  // part of slots_free that lies in empty regions, which may serve any class
    uint64_t regions_empty = 0;               // the empty regions
    uint64_t slots_per_region[kSlotClasses] = {};

    // Requests of a disk, since creation.
    uint64_t reads = 0, writes = 0, bytes_read = 0, bytes_written = 0;  // only requests that succeeded
    // A request that did not succeed counts in one of these.
    uint64_t failed = 0, corrupt = 0, stalled = 0, cancelled = 0;
    // Requests now.
    uint64_t queued = 0, in_flight = 0;
    uint64_t erasing = 0;  // slots of a persistent disk that become free once their records are erased
    uint64_t retired = 0;  // slots that become free with the next sync; they count as free
};

// Thread-safe.
class Tier {
  public:
    virtual ~Tier() = default;
    // Acquires one slot for each class in `wanted`, in that order, adjacent where possible. On failure it acquires none.
    // TA_E_TIER_FULL: the budget is used up, or the tier is read-only.
    virtual Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) = 0;
    virtual void release(std::span<const Slot> slots) = 0;
    // Releases slots whose blocks have been written elsewhere. A persistent tier keeps their records until a sync has made the
    // new ones durable.
    virtual void retire(std::span<const Slot> slots) { release(slots); }
    // False: the tier knows that the slot's content is lost.
    virtual bool holds(Slot) const { return true; }
    // The slot's address, for tiers whose slots are memory, else nullptr.
    virtual uint8_t* address(Slot slot) const = 0;
    // The memory of all slots; empty for tiers whose slots are not memory.
    virtual std::span<uint8_t> range() const { return {}; }
    virtual TierStats stats() const = 0;
    virtual TierHealth health() const = 0;
    // One sentence for each feature that is missing here, with the reason; constant after creation.
    virtual std::span<const std::string> degraded() const = 0;
};

// The tiers of a pool below its device, fastest first; they are not owned.
class LowerTiers {
  public:
    void set(TierKind kind, Tier* tier) { tiers_[size_t(kind)] = tier; }
    // nullptr: there is none.
    Tier* operator[](TierKind kind) const { return tiers_[size_t(kind)]; }
    // The next tier down that the pool has.
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
