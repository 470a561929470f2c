// The transport of ranks whose processes are of one host: records in memory that they share, and GPU memory that they map. A rank
// finds within a second that the process of another has ended.
#pragma once

#include <memory>

#include "src/core/device.h"
#include "tiering/share/transport.h"

namespace ta::share {

// Joins the group of that name. `device`: the rank's GPU; nullptr: it has none. TA_E_UNSUPPORTED: more than 63 ranks, or no memory
// can be shared; further errors: Segment::join().
Result<std::unique_ptr<Transport>> join_host_group(uint64_t name, uint32_t rank, uint32_t ranks,
                                                   std::shared_ptr<Device> device);

}  // namespace ta::share
