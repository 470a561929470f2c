// Checks blocks, and takes bits from them, where a device reads them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/core/device.h"
#include "src/page/pages.h"
#include "tiering/store/blocks.h"

namespace ta {

// A check that is on its way. The destructor waits for it.
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
    // Takes from the device what checks need, so that the first one does not wait for what the device does.
    virtual Status open() { return {}; }
    // Behind all steps that were ended so far; waits. statuses[i] is TA_E_CORRUPT with block and layer for a block that does
    // not match.
    virtual Status verify(std::span<const PlacedBlock> blocks, std::span<Status> statuses) = 0;
    // The same without waiting, and behind `arrival`. A verifier that cannot verifies when it is waited for.
    virtual Result<std::unique_ptr<ArrivalCheck>> start(std::span<const PlacedBlock> blocks, const DeviceTransfer& arrival);
    // As start(); no `arrival`: they are there. Blocks that match get a trailer with their own identity in place of the
    // one that they came with.
    virtual Result<std::unique_ptr<ArrivalCheck>> start_adopting(std::span<const PlacedBlock> blocks,
                                                                 const DeviceTransfer* arrival) = 0;
};

// Takes bits from blocks where the device reads them. Thread-safe.
class BlockEncoder {
  public:
    virtual ~BlockEncoder() = default;
    // Makes of full token blocks in the device's memory channel blocks with trailers: to[i] is memory of the device for one.
    // Behind all steps that were ended so far; waits. The blocks match their hashes.
    virtual Status encode_lower(std::span<const PlacedBlock> blocks, std::span<uint8_t* const> to) = 0;
};

// Of a device's own kind: by its kernels, or by a CPU in memory that is the host's.
std::unique_ptr<BlockVerifier> make_verifier(Device& device, const Pages& pages);
// The same of a peer's device for blocks in its memory that another device writes: behind arrivals, and no steps.
std::unique_ptr<BlockVerifier> make_peer_verifier(Device& peer, const Pages& pages);
std::unique_ptr<BlockEncoder> make_encoder(Device& device, const Pages& pages);

// By kernels.
std::unique_ptr<BlockVerifier> make_cuda_verifier(CudaDevice& device, const Pages& pages, bool behind_steps);
std::unique_ptr<BlockEncoder> make_cuda_encoder(CudaDevice& device, const Pages& pages);

}  // namespace ta
