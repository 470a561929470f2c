// Memory of the slots of blocks on a CPU: side by side in chunks of huge pages, since attention walks over all of them and
// small pages cost it half its time in TLB misses. With allocator hooks every slot is an allocation of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/layout.h"
#include "src/core/device.h"
#include "src/core/memory.h"

namespace ta {

// The memory of all slots on a device, taken once. It is cut into regions; a region holds slots of one kind while it holds any,
// and serves any kind again when it is empty. Not synchronised.
class SlotSlab {
  public:
    explicit SlotSlab(Device& device) : device_(device) {}
    ~SlotSlab();
    SlotSlab(const SlotSlab&) = delete;
    SlotSlab& operator=(const SlotSlab&) = delete;

    // Room for so many slots of any kind alone, or of a mixture of the same size; a stride of 0: there is no such kind. False
    // when the device has no such memory.
    bool take(const size_t (&slots)[kPageKinds], const size_t (&strides)[kPageKinds]);
    // A slot for `kind`, a PageKind; nullptr when no region of that kind has room and none is empty.
    uint8_t* cut(int kind, size_t stride);
    void give(int kind, uint8_t* slot);
    DeviceRange memory() const { return {data_, bytes_}; }

  private:
    struct Region {
        int kind = -1;             // of its slots; -1: none
        size_t used = 0, cut = 0;  // slots in use, slots that were ever cut since it was empty
        std::vector<uint8_t*> free;
    };
    Device& device_;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0, region_bytes_ = 0;
    std::vector<Region> regions_;
    std::vector<uint32_t> open_[kPageKinds];  // regions of the kind that have room; may name some twice or in vain
    std::vector<uint32_t> empty_;
};

// Slots of one size. Not synchronised.
class SlotMemory {
  public:
    // `most`: the bytes that all slots together may come to. `slab`: where they lie on a device, as slots of `kind`, else
    // nullptr.
    SlotMemory(Allocator& allocator, SlotSlab* slab, int kind, size_t slot_bytes, uint64_t most);
    ~SlotMemory();
    SlotMemory(const SlotMemory&) = delete;
    SlotMemory& operator=(const SlotMemory&) = delete;

    // A slot with unspecified bytes, 4096-byte aligned; nullptr when there is no memory.
    uint8_t* take();
    // The slot's memory goes back to the system; its addresses stay for the next one.
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
