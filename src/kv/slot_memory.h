// Where the slots of blocks lie on a CPU: side by side in chunks of huge pages, since attention walks over all of them and small
// pages cost it half its time in TLB misses. With allocator hooks every slot is an allocation of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/core/device.h"
#include "src/core/memory.h"

namespace ta {

// The memory of all slots on a device, taken once; slots of both kinds are cut from it as they are needed.
class SlotSlab {
  public:
    explicit SlotSlab(Device& device) : device_(device) {}
    ~SlotSlab() { device_.deallocate(data_, bytes_); }
    SlotSlab(const SlotSlab&) = delete;
    SlotSlab& operator=(const SlotSlab&) = delete;

    bool take(size_t bytes);
    // nullptr when nothing is left that was never a slot.
    uint8_t* cut(size_t bytes);

  private:
    Device& device_;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0, used_ = 0;
};

// Slots of one size. Not synchronised.
class SlotMemory {
  public:
    // `most`: the bytes that all slots together may come to. `slab`: where they lie on a device, else nullptr.
    SlotMemory(Allocator& allocator, SlotSlab* slab, size_t slot_bytes, uint64_t most);
    ~SlotMemory();
    SlotMemory(const SlotMemory&) = delete;
    SlotMemory& operator=(const SlotMemory&) = delete;

    // A slot with unspecified bytes, 4096-byte aligned; nullptr when there is no memory.
    uint8_t* take();
    // The slot's memory goes back to the system; its addresses stay for the next one.
    void give(uint8_t* slot);
    // What slots of this kind alone take of a slab.
    size_t bytes_for(uint64_t most) const;

  private:
    struct Chunk {
        uint8_t* data;
        size_t bytes;
    };
    bool add_chunk();

    Allocator& allocator_;
    SlotSlab* const slab_;
    const size_t slot_bytes_, stride_;
    const uint64_t most_;
    std::vector<Chunk> chunks_;
    std::vector<uint8_t*> free_;  // its capacity is every slot of the chunks, so that give() never allocates
    size_t slots_ = 0;            // of the chunks
};

}  // namespace ta
