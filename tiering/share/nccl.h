// The transport of ranks on any hosts, each with a GPU. Ranks of one host find each other through NCCL, and go on through memory
// (host.h). Between hosts a pair of ranks has a communicator of two: both sides enter *rounds* in step, in each of which a frame
// goes either way. A round follows at once while there is something to say, else in up to 5 ms, so no kernel of ours waits on a
// GPU for longer than the two differ. The communication thread makes all calls of NCCL, on streams of its own.
#pragma once

#include <chrono>
#include <memory>

#include "src/core/device.h"
#include "tiering/share/id.h"
#include "tiering/share/transport.h"

namespace ta::share {

// TA_E_UNSUPPORTED: no NCCL here. The process has to live until all ranks have joined.
Result<GroupId> make_nccl_id();

struct NcclOptions {
    void* comm = nullptr;  // ncclComm_t of the caller with the same ranks, used while the group connects; nullptr: one is made
    bool hosts_apart = false;             // each rank as if it were on a host of its own
    std::chrono::milliseconds silence{};  // CUDA that does not answer for so long is taken for waiting for a dead peer
};
// NCCL's release, as 22809; 0: there is none.
int nccl_version();
// Returns at once. TA_E_UNSUPPORTED: no NCCL, or the rank has no GPU; TA_E_MISMATCH: the communicator is of other ranks.
Result<std::unique_ptr<Transport>> join_nccl_group(const GroupId& id, uint32_t rank, uint32_t ranks,
                                                   std::shared_ptr<Device> device, const NcclOptions& options);

}  // namespace ta::share
