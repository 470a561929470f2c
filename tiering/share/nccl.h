// The transport between ranks on any hosts, each with a GPU. Ranks of one host find each other through NCCL and then use shared
// memory (host.h). Two ranks of different hosts have a communicator of their own. Both sides enter *rounds* in step; in a round
// each sends the other one frame. The next round follows at once while there is something to send, else within 5 ms. So a
// round's kernel waits on a GPU only for as long as the two sides differ. The communication thread makes all calls of NCCL, on
// streams of its own.
#pragma once

#include <chrono>
#include <memory>

#include "src/core/device.h"
#include "tiering/share/id.h"
#include "tiering/share/transport.h"

namespace ta::share {

// TA_E_UNSUPPORTED: no NCCL here. The calling process must live until all ranks have joined.
Result<GroupId> make_nccl_id();

struct NcclOptions {
    // The caller's ncclComm_t with the same ranks, in use while the group connects. nullptr: the transport makes one.
    void* comm = nullptr;
    bool hosts_apart = false;             // treats each rank as if it were on a host of its own
    std::chrono::milliseconds silence{};  // if a CUDA call takes longer, it counts as waiting for a dead peer
    std::chrono::milliseconds connect{};  // the same for CUDA and NCCL calls until the group is ready
};
// NCCL's version, such as 22809; 0: there is no NCCL.
int nccl_version();
// Returns at once. TA_E_UNSUPPORTED: no NCCL, or the rank has no GPU. TA_E_MISMATCH: the communicator has other ranks.
Result<std::unique_ptr<Transport>> join_nccl_group(const GroupId& id, uint32_t rank, uint32_t ranks,
                                                   std::shared_ptr<Device> device, const NcclOptions& options);

}  // namespace ta::share
