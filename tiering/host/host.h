// The host tier: slots in host memory.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "tiering/host/memory.h"
#include "tiering/store/memory_tier.h"

namespace ta {

struct HostTierOptions {
    uint64_t budget = 0;                   // bytes of memory, index included
    size_t slot_bytes[kSlotClasses] = {};  // by PageKind; 0: no such blocks
    HostMemoryOptions memory;              // `bytes` follow from the budget
};

class HostTier final : public MemoryTier {
  public:
    static Result<std::unique_ptr<HostTier>> create(std::shared_ptr<MemorySystem> system, ThreadPool& touching,
                                                    const HostTierOptions& options);

    TierStats stats() const override;
    TierHealth health() const override { return {}; }
    std::span<const std::string> degraded() const override { return memory_->degraded(); }
    const HostMemory& memory() const { return *memory_; }

  private:
    HostTier(uint64_t budget, const SlotMap::Shape& shape, std::unique_ptr<HostMemory> memory)
        : MemoryTier(TierKind::kHost, budget, shape, memory->data()), memory_(std::move(memory)) {}

    const std::unique_ptr<HostMemory> memory_;
};

}  // namespace ta
