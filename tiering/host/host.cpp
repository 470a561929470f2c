#include "tiering/host/host.h"

#include <algorithm>

#include "kernels/format/slot.h"
#include "src/core/checked.h"

namespace ta {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kIndexOfRegion = 16;  // bytes of its entry in the map

SlotMap::Shape shape_for(const HostTierOptions& o) {
    uint64_t strides[kSlotClasses];
    for (int c = 0; c < kSlotClasses; ++c) strides[c] = round_up(o.slot_bytes[c], kSlotAlignment);
    const auto without = [&](uint64_t index) {
        const uint64_t rest = o.budget - std::min(o.budget, index);
        return o.memory.pages == HostMemoryOptions::Pages::kHugeTlb ? rest / kHugePage * kHugePage : rest;
    };
    for (uint64_t bytes = without(0);;) {
        const SlotMap::Shape shape = SlotMap::fit(bytes, strides);
        const uint64_t rest = without(shape.regions * kIndexOfRegion);
        if (shape.bytes() <= rest) return shape;
        bytes = rest;  // is smaller than before: a shape of fewer bytes may have more regions, and so a larger index
    }
}

}  // namespace

Result<std::unique_ptr<HostTier>> HostTier::create(std::shared_ptr<MemorySystem> system, ThreadPool& touching,
                                                   const HostTierOptions& options) {
    const SlotMap::Shape shape = shape_for(options);
    if (!shape.valid() || shape.regions == 0) {
        return fail(TA_E_INVALID, "a host tier of %llu bytes does not hold one block of %zu bytes and its index",
                    (unsigned long long)options.budget, std::ranges::max(options.slot_bytes));
    }
    HostMemoryOptions memory_options = options.memory;
    memory_options.bytes = shape.bytes();
    // No slot crosses the border of two registered chunks: CUDA refuses a copy that does.
    const uint64_t regions = std::max<uint64_t>(memory_options.chunk_bytes / shape.region_bytes, 1);
    memory_options.chunk_bytes = regions * shape.region_bytes;
    Result<std::unique_ptr<HostMemory>> memory = HostMemory::create(std::move(system), touching, memory_options);
    if (!memory.ok()) return std::move(memory).status();
    return std::unique_ptr<HostTier>(new HostTier(options.budget, shape, memory.take()));
}

TierStats HostTier::stats() const {
    TierStats s = MemoryTier::stats();
    s.taken = memory_->bytes() + s.memory;
    return s;
}

}  // namespace ta
