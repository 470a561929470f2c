// Seals and verifies blocks in GPU memory. Only CUDA builds include this.
#pragma once

#include <span>

#include "kernels/cuda/any/hash/page_hash.h"
#include "src/device/cuda/memory.h"
#include "tiering/verify/verifier.h"

namespace ta {

class CudaHasher {
  public:
    CudaHasher(const Pages& pages, CudaDevice& device) : pages_(pages), device_(device), offsets_(device) {}

    // Prepares the device. Once: before the first blocks, or by the first call with blocks.
    Status open();
    // Enqueues the hashing of full blocks, after the kernels that wrote them, and marks the blocks as sealed.
    Status seal(std::span<const PlacedBlock> blocks, cudaStream_t stream);
    // Enqueues a check. Its tasks and its result are in `pinned`: [blocks, layers], as launch_verify writes it. `adopt`: also
    // gives the blocks trailers with their own identities.
    Status start_verify(std::span<const PlacedBlock> blocks, bool adopt, PinnedBuffer& pinned, cudaStream_t stream,
                        const uint32_t** mismatch);

  private:
    Status stage(std::span<const PlacedBlock> blocks, PinnedBuffer& pinned, size_t extra_bytes, cuda::HashArgs& args);

    const Pages& pages_;
    CudaDevice& device_;
    DeviceBuffer offsets_;  // of pages, 2 x [layers + 1] uint64: in channel blocks, then in token blocks
    PinnedBuffer pinned_[2];
    uint64_t uses_ = 0;
};

}  // namespace ta
