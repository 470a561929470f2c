// A tier whose slots are host memory: the host tier, and on a CPU context the device tier too.
#pragma once

#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "src/tiering/host_memory.h"
#include "src/tiering/slot_map.h"
#include "src/tiering/tier.h"

namespace ta {

struct HostTierOptions {
    TierKind kind = TierKind::kHost;
    uint64_t budget = 0;                   // bytes of memory, index included
    size_t slot_bytes[kSlotClasses] = {};  // by PageKind; 0: no such blocks
    BlockCheck check;                      // of whole slots that are read or written; may be empty
    unsigned threads = 2;                  // that copy
    HostMemoryOptions memory;              // `bytes` follow from the budget
};

class HostTier final : public Tier {
  public:
    static Result<std::unique_ptr<HostTier>> create(std::shared_ptr<MemorySystem> system, ThreadPool& touching,
                                                    const HostTierOptions& options);
    ~HostTier() override;

    TierKind kind() const override { return options_.kind; }
    size_t slot_bytes(uint8_t slot_class) const override {
        return slot_class < kSlotClasses ? options_.slot_bytes[slot_class] : 0;
    }
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override;
    void release(std::span<const Slot> slots) override;
    // 4096-byte aligned.
    uint8_t* address(Slot slot) const override { return memory_->data() + map_.offset(slot); }
    // Any part of a slot is written. What is read and written at the same time is unspecified.
    Result<TierBatch> submit(std::span<const TierRequest> requests, TierClient& client) override;
    void cancel(TierBatch batch) override;
    TierStats stats() const override;
    TierHealth health() const override { return {}; }
    std::span<const std::string> degraded() const override { return memory_->degraded(); }
    const HostMemory& memory() const { return *memory_; }

  private:
    struct SlotInfo {
        uint32_t busy = 0;  // requests that are queued or worked on
        uint8_t slot_class = 0;
        bool acquired = false;
    };
    struct Op {
        TierRequest request;
        TierClient* client = nullptr;
        TierBatch batch = 0;
    };
    using Ops = std::list<Op>;

    HostTier(const HostTierOptions& options, const SlotMap::Shape& shape, std::unique_ptr<HostMemory> memory);
    Status start();
    void work();
    Status copy(const TierRequest& r);
    Status admit(const TierRequest& r);
    void leave_slot(uint32_t index);

    const HostTierOptions options_;
    const std::unique_ptr<HostMemory> memory_;
    SlotMap map_;
    std::vector<SlotInfo> slots_;
    std::vector<std::thread> workers_;

    mutable std::mutex mutex_;
    std::condition_variable wake_;
    bool stopping_ = false;
    Ops queued_;
    Ops cancelled_;  // to report
    TierBatch next_batch_ = 1;
    uint64_t in_flight_ = 0;
    TierStats counters_;
};

}  // namespace ta
