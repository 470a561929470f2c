// Reads the bytes of blocks, in whatever tier they are.
#pragma once

#include <cstdint>

#include "src/core/device.h"
#include "src/page/pages.h"
#include "tiering/disk/disk.h"
#include "tiering/store/blocks.h"

namespace ta {

// Reads the blocks of one pool. Any thread.
class BlockReader {
  public:
    // `device`: nullptr on a CPU. `disk`: the pool's pointer to its disk tier, which may be set later.
    BlockReader(Device* device, const Pages& pages, const BlockStore& store, const std::unique_ptr<DiskTier>& disk)
        : device_(device), pages_(pages), store_(store), disk_(disk) {}

    // Copies a slot in device or host memory, unchecked.
    Status read_memory(const Place& place, uint8_t* to) const;
    // Reads a block's bytes from disk, verified, into `slot`; nullptr: only verifies them. A block that was on disk once keeps
    // its kind.
    Status read(const Block& block, uint64_t index, uint8_t* slot) const;
    // Makes one request to the disk, and waits for it.
    Status ask_disk(const DiskRequest& request) const;

  private:
    Status read_place(const Block& block, uint64_t index, const Place& place, uint8_t* slot) const;

    Device* const device_;
    const Pages& pages_;
    const BlockStore& store_;
    const std::unique_ptr<DiskTier>& disk_;
};

}  // namespace ta
