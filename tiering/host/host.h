// The host tier: slots in host memory, which whoever has one reads and writes where it lies.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "tiering/host/memory.h"
#include "tiering/store/slot_map.h"
#include "tiering/tier.h"

namespace ta {

struct HostTierOptions {
    uint64_t budget = 0;                   // bytes of memory, index included
    size_t slot_bytes[kSlotClasses] = {};  // by PageKind; 0: no such blocks
    HostMemoryOptions memory;              // `bytes` follow from the budget
};

class HostTier final : public Tier {
  public:
    static Result<std::unique_ptr<HostTier>> create(std::shared_ptr<MemorySystem> system, ThreadPool& touching,
                                                    const HostTierOptions& options);

    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override;
    void release(std::span<const Slot> slots) override;
    // 4096-byte aligned.
    uint8_t* address(Slot slot) const override { return memory_->data() + map_.offset(slot); }
    TierStats stats() const override;
    TierHealth health() const override { return {}; }
    std::span<const std::string> degraded() const override { return memory_->degraded(); }
    const HostMemory& memory() const { return *memory_; }

  private:
    HostTier(uint64_t budget, const SlotMap::Shape& shape, std::unique_ptr<HostMemory> memory)
        : budget_(budget), memory_(std::move(memory)), map_(shape) {}

    const uint64_t budget_;
    const std::unique_ptr<HostMemory> memory_;
    mutable std::mutex mutex_;
    SlotMap map_;
};

}  // namespace ta
