// A tier whose slots lie one after the other in memory. Holders of slots read and write them in place.
#pragma once

#include <mutex>
#include <span>
#include <vector>

#include "tiering/store/slot_map.h"
#include "tiering/tier.h"

namespace ta {

class MemoryTier : public Tier {
  public:
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override {
        std::lock_guard lock(mutex_);
        return map_.acquire_all(wanted, kind_);
    }
    void release(std::span<const Slot> slots) override {
        std::lock_guard lock(mutex_);
        for (const Slot s : slots) {
            if (map_.taken(s)) map_.give(s);
        }
    }
    // 4096-byte aligned.
    uint8_t* address(Slot slot) const override { return data_ + map_.offset(slot); }
    std::span<uint8_t> range() const override { return {data_, bytes_}; }
    TierStats stats() const override {
        std::lock_guard lock(mutex_);
        TierStats s;
        map_.describe(s);
        s.budget = budget_;
        s.memory = map_.index_bytes();
        return s;
    }

  protected:
    // `data` has room for the shape, and outlives the tier.
    MemoryTier(TierKind kind, uint64_t budget, const SlotMap::Shape& shape, uint8_t* data)
        : kind_(kind), budget_(budget), data_(data), bytes_(shape.bytes()), map_(shape) {}

  private:
    const TierKind kind_;
    const uint64_t budget_;
    uint8_t* const data_;
    const uint64_t bytes_;
    mutable std::mutex mutex_;
    SlotMap map_;
};

}  // namespace ta
