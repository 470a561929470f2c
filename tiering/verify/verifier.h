// Checks and re-encodes blocks in memory that a device reads.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/core/device.h"
#include "src/page/pages.h"
#include "tiering/store/blocks.h"

namespace ta {

// A check under way. The destructor waits for it.
class ArrivalCheck {
  public:
    virtual ~ArrivalCheck() = default;
    // statuses[i] is TA_E_CORRUPT with block and layer for a block that does not match.
    virtual Status wait(std::span<Status> statuses) = 0;
};

// Recomputes hashes of blocks where the device reads them. Thread-safe.
class BlockVerifier {
  public:
    virtual ~BlockVerifier() = default;
    // Takes what checks need from the device, so that the first check does not wait for the device's work.
    virtual Status open() { return {}; }
    // Verifies after all steps that were ended so far; waits. statuses[i] is TA_E_CORRUPT with block and layer if block i does
    // not match.
    virtual Status verify(std::span<const PlacedBlock> blocks, std::span<Status> statuses) = 0;
    // Starts verify() after `arrival`, without waiting. A verifier that cannot do so verifies in ArrivalCheck::wait().
    virtual Result<std::unique_ptr<ArrivalCheck>> start(std::span<const PlacedBlock> blocks, const DeviceTransfer& arrival);
    // Like start(); without `arrival` the bytes are in place already. Blocks that match get a trailer with their own identity
    // in place of the one they came with.
    virtual Result<std::unique_ptr<ArrivalCheck>> start_adopting(std::span<const PlacedBlock> blocks,
                                                                 const DeviceTransfer* arrival) = 0;
};

// Re-encodes blocks with fewer bits, in memory that a device reads. Thread-safe.
class BlockEncoder {
  public:
    virtual ~BlockEncoder() = default;
    // Encodes full token blocks in device memory as channel blocks with trailers. to[i]: device memory for one. Runs after all
    // steps that were ended so far; waits. The caller has checked the blocks' hashes.
    virtual Status encode_lower(std::span<const PlacedBlock> blocks, std::span<uint8_t* const> to) = 0;
};

// A verifier for a device's own memory: by kernels, or by the CPU if the device's memory is the host's.
std::unique_ptr<BlockVerifier> make_verifier(Device& device, const Pages& pages);
// A verifier for a peer device's memory, which another device writes. It runs after arrivals, not after the peer's steps.
std::unique_ptr<BlockVerifier> make_peer_verifier(Device& peer, const Pages& pages);
std::unique_ptr<BlockEncoder> make_encoder(Device& device, const Pages& pages);

// These use kernels.
std::unique_ptr<BlockVerifier> make_cuda_verifier(CudaDevice& device, const Pages& pages, bool behind_steps);
std::unique_ptr<BlockEncoder> make_cuda_encoder(CudaDevice& device, const Pages& pages);

}  // namespace ta
