// Which slots of a tier are taken. The space is cut into regions of up to 64 slots. A region serves one class while it holds
// any slot, and any class when it is empty. Not synchronised.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tiering/tier.h"

namespace ta {

class SlotMap {
  public:
    struct Shape {
        uint64_t stride[kSlotClasses] = {};  // bytes from one slot to the next; 0: there is no such class
        uint64_t region_bytes = 0;
        uint64_t regions = 0;

        uint64_t bytes() const { return region_bytes * regions; }
        // Slots of the class in a region.
        uint32_t per_region(int slot_class) const {
            return stride[slot_class] ? uint32_t(region_bytes / stride[slot_class]) : 0;
        }
        uint64_t slots(int slot_class) const { return regions * per_region(slot_class); }
        uint64_t indices() const { return regions * kIndicesPerRegion; }  // slot indices are below this
        // For shapes from a file. True if nothing overflows, every slot has an index, and there are no more indices than fit()
        // would make, or few.
        bool valid() const;
    };
    static constexpr uint32_t kIndicesPerRegion = 64;

    // The best cut of at most `bytes` into regions for slots of these strides. No regions: not even one slot fits.
    static Shape fit(uint64_t bytes, const uint64_t (&strides)[kSlotClasses]);

    // Throws std::bad_alloc.
    explicit SlotMap(const Shape& shape);

    const Shape& shape() const { return shape_; }
    bool known(Slot slot) const;  // a slot that this map could have handed out
    uint64_t offset(Slot slot) const {
        return slot.index / kIndicesPerRegion * shape_.region_bytes +
               slot.index % kIndicesPerRegion * shape_.stride[slot.slot_class];
    }
    // Takes the lowest free slot. False: there is none.
    bool acquire(uint8_t slot_class, Slot& slot);
    // Takes one slot for each class in `wanted`, in that order, or none. TA_E_TIER_FULL. TA_E_INVALID: there is no such class.
    // `tier`: for error texts.
    Result<std::vector<Slot>> acquire_all(std::span<const uint8_t> wanted, TierKind tier);
    // Takes this slot. False: it is taken, or its region serves another class.
    bool take(Slot slot);
    void give(Slot slot);
    bool taken(Slot slot) const;
    // Fills in used, free, room, largest_free, fragmentation and the numbers of slots.
    void describe(TierStats& stats) const;
    uint64_t index_bytes() const { return regions_.size() * sizeof(Region); }

  private:
    struct Region {
        uint64_t taken = 0;  // bit i: slot i
        int8_t slot_class = -1;
    };
    uint64_t all(int slot_class) const;  // the bits of a full region

    Shape shape_;
    std::vector<Region> regions_;
    size_t first_open_[kSlotClasses] = {};  // no region before this one has room for the class
};

}  // namespace ta
