// Reads the bytes of blocks, wherever they lie.
#pragma once

#include <cstdint>

#include "src/core/device.h"
#include "src/page/pages.h"
#include "tiering/disk/disk.h"
#include "tiering/store/blocks.h"

namespace ta {

// Of one pool. Any thread.
class BlockReader {
  public:
    // `device`: nullptr for a CPU; `disk` is where the pool's disk tier is, or will be.
    BlockReader(Device* device, const Pages& pages, const BlockStore& store, const std::unique_ptr<DiskTier>& disk)
        : device_(device), pages_(pages), store_(store), disk_(disk) {}

    // Copies a slot that lies in memory, the device's or the host's, as it is.
    Status read_memory(const Place& place, uint8_t* to) const;
    // Reads a block's bytes from disk, verified, into `slot`, or only verifies them where it is nullptr. A block that was on
    // disk once keeps its kind.
    Status read(const Block& block, uint64_t index, uint8_t* slot) const;
    // One request to the disk, waited for.
    Status ask_disk(const DiskRequest& request) const;

  private:
    Status read_place(const Block& block, uint64_t index, const Place& place, uint8_t* slot) const;

    Device* const device_;
    const Pages& pages_;
    const BlockStore& store_;
    const std::unique_ptr<DiskTier>& disk_;
};

}  // namespace ta
