// The transport between processes of one host: records in shared memory, and GPU memory that ranks map. A rank notices within a
// second that another's process has ended.
#pragma once

#include <memory>

#include "src/core/device.h"
#include "tiering/share/transport.h"

namespace ta::share {

// Joins the group of that name. `device`: the rank's GPU; nullptr: none. TA_E_UNSUPPORTED: more than 63 ranks, or memory cannot
// be shared. Other errors: Segment::join().
Result<std::unique_ptr<Transport>> join_host_group(uint64_t name, uint32_t rank, uint32_t ranks,
                                                   std::shared_ptr<Device> device);

}  // namespace ta::share
