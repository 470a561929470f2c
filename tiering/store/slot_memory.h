// Memory of slots on a CPU: contiguous in chunks of huge pages. Attention walks over all of it, and would lose half its time to
// TLB misses with small pages. With allocator hooks each slot is an allocation of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/layout.h"
#include "src/core/device.h"
#include "src/core/memory.h"

namespace ta {

// The memory of all slots on a device, taken once and cut into regions. A region serves one kind while it holds any slot, and
// any kind when it is empty. Not synchronised.
class SlotSlab {
  public:
    explicit SlotSlab(Device& device) : device_(device) {}
    ~SlotSlab();
    SlotSlab(const SlotSlab&) = delete;
    SlotSlab& operator=(const SlotSlab&) = delete;

    // Takes memory for slots[kind] slots of any one kind, or a mixture of the same size; a stride of 0: there is no such kind.
    // False: the device has not so much.
    bool take(const size_t (&slots)[kPageKinds], const size_t (&strides)[kPageKinds]);
    // A slot for `kind`, a PageKind. nullptr: no region of the kind has room, and none is empty.
    uint8_t* cut(int kind, size_t stride);
    void give(int kind, uint8_t* slot);
    DeviceRange memory() const { return {data_, bytes_}; }
    size_t count_regions() const { return regions_.size(); }
    size_t region_of(const uint8_t* slot) const { return size_t(slot - data_) / region_bytes_; }
    // How many slots of `kind` could be cut if kept[r] slots of each region r, which count as in use, were given back first.
    size_t count_room(int kind, size_t stride, std::span<const size_t> kept) const;

  private:
    struct Region {
        int kind = -1;             // of its slots; -1: none
        size_t used = 0, cut = 0;  // slots in use, and slots cut since the region was empty
        std::vector<uint8_t*> free;
    };
    Device& device_;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0, region_bytes_ = 0;
    std::vector<Region> regions_;
    std::vector<uint32_t> open_[kPageKinds];  // regions of the kind with room; may list one twice, or a full one
    std::vector<uint32_t> empty_;
};

// Slots of one size. Not synchronised.
class SlotMemory {
  public:
    // `most`: the bytes of all slots together. `slab`: on a device the memory in which they lie, as slots of `kind`; else
    // nullptr.
    SlotMemory(Allocator& allocator, SlotSlab* slab, int kind, size_t slot_bytes, uint64_t most);
    ~SlotMemory();
    SlotMemory(const SlotMemory&) = delete;
    SlotMemory& operator=(const SlotMemory&) = delete;

    // Takes a slot with unspecified bytes, 4096-byte aligned. nullptr: there is no memory.
    uint8_t* take();
    // Gives the slot's memory back to the system. Its addresses are kept for the next slot.
    void give(uint8_t* slot);
    size_t stride() const { return stride_; }  // from one slot to the next

  private:
    struct Chunk {
        uint8_t* data;
        size_t bytes;
    };
    bool add_chunk();

    Allocator& allocator_;
    SlotSlab* const slab_;
    const int kind_;
    const size_t slot_bytes_, stride_;
    const uint64_t most_;
    std::vector<Chunk> chunks_;
    std::vector<uint8_t*> free_;  // its capacity is every slot of the chunks, so that give() never allocates
    size_t slots_ = 0;            // of the chunks
};

}  // namespace ta
