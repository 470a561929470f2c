// The peer tier: slots in the memory of another device of the process. The pool's own device reads and writes them in place. On
// a CPU the memory was touched by another context's threads.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/core/context.h"
#include "tiering/host/memory.h"
#include "tiering/store/memory_tier.h"

namespace ta {

struct PeerTierOptions {
    uint64_t budget = 0;                   // bytes of memory
    size_t slot_bytes[kSlotClasses] = {};  // by PageKind; 0: no such blocks
};

class PeerTier final : public MemoryTier {
  public:
    // TA_E_INVALID: not of `own`'s kind, or the same device. TA_E_UNSUPPORTED: `own` does not reach it. TA_E_MEMORY.
    static Result<std::unique_ptr<PeerTier>> create(const Context& own, std::shared_ptr<Context> peer,
                                                    const PeerTierOptions& options);

    // TA_E_TIER_FULL also when the device is lost.
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override;
    // False: the device is lost.
    bool holds(Slot) const override { return health().state == TierState::kOk; }
    TierStats stats() const override;
    TierHealth health() const override;
    std::span<const std::string> degraded() const override { return {}; }
    const std::shared_ptr<Context>& context() const { return context_; }

  private:
    using Memory = std::shared_ptr<uint8_t>;
    static Result<Memory> take(const std::shared_ptr<Context>& context, size_t bytes);
    PeerTier(std::shared_ptr<Context> context, uint64_t budget, const SlotMap::Shape& shape, Memory memory)
        : MemoryTier(TierKind::kPeer, budget, shape, memory.get()), context_(std::move(context)), memory_(std::move(memory)) {}

    const std::shared_ptr<Context> context_;
    const Memory memory_;
};

}  // namespace ta
