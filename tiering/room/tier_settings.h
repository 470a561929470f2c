// The tiers of a pool as they were asked for.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "src/core/context.h"
#include "tiering/policy/policy.h"
#include "tiering/tier.h"

namespace ta {

// How steps on a GPU read pages in host memory: copied to device memory before a layer reads them, or in place.
enum class StagingMode : uint8_t { kAuto, kNever, kAlways };  // kAuto: whichever is predicted to be faster

// How long a begin waits: for what open plans may be reading, and for moves that take the step's blocks away.
struct Patience {
    static constexpr int32_t kMostWait = 24 * 3600 * 1000;

    std::chrono::milliseconds plans{1000}, moves{10000};

    // The patience that a caller gives in milliseconds. -1: none; 0: this one.
    Patience or_of(int32_t wait_ms) const {
        if (wait_ms == 0) return *this;
        const std::chrono::milliseconds wait(wait_ms < 0 ? 0 : wait_ms);
        return {wait, wait};
    }
};

// The tiers below the device, each on if it has a budget.
struct TierSettings {
    uint64_t peer_budget = 0, host_budget = 0, disk_budget = 0;
    std::shared_ptr<Context> peer;  // of the device where the peer tier lies
    std::string disk_folder;
    std::string disk_path;  // of a persistent file; empty: one without a name in disk_folder
    std::function<std::unique_ptr<Tier>(std::unique_ptr<Tier>)>
        wrap_host;  // a seam: what the pool uses in place of its host tier
    int numa_node = -1;
    MoveRoute route = MoveRoute::kCalibrated;
    int high_percent = 94, low_percent = 90;  // of the device budget: above the first, blocks leave until the second is reached
    Eviction eviction = Eviction::kLru;
    uint32_t half_life = 128;       // of attention, in steps
    uint32_t attention_layers = 0;  // a step observes one layer in so many; 0: the default
    bool drop_coldest = false;      // if no block can leave for another tier any more
    Patience patience;              // of begins that set none
    StagingMode staging = StagingMode::kAuto;
    uint64_t staging_bytes = 0;  // of the device budget, for each plan's staging while the device has room
};

}  // namespace ta
