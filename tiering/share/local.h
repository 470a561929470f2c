// The transport between ranks of this process: messages go through queues, bytes by memcpy. Tests make it fail by a Fault, to
// see what a group does then.
#pragma once

#include <memory>

#include "src/core/device.h"
#include "tiering/share/id.h"
#include "tiering/share/transport.h"

namespace ta::share {

// A fault that a rank makes. Its actions are its messages without heartbeats, and its writes into windows, counted from 1.
struct Fault {
    enum class Kind : int32_t {
        kNone,
        kDrop,       // the message is lost; a write writes nothing
        kDelay,      // it arrives `detail` milliseconds later, and so do all later ones
        kDuplicate,  // it arrives twice
        kReorder,    // it arrives 50 ms later, after later ones
        kCorrupt,    // one bit is flipped, of the message or of the bytes written: bit `detail`, modulo the length
        kCut,        // the message, or the write, ends before byte `detail`, modulo its length
        kKill,       // the rank does nothing from then on, as if its process was killed before the action
    };
    Kind kind = Kind::kNone;
    uint64_t action = 0;
    uint64_t detail = 0;
};

// Joins the group of that id. `device`: the rank's GPU, which outlives the transport; nullptr: none. TA_E_INVALID: the rank has
// joined already. TA_E_MISMATCH: another rank gave another number of ranks. TA_E_STALE: the group has ended.
Result<std::unique_ptr<Transport>> join_local_group(const GroupId& id, uint32_t rank, uint32_t ranks, Device* device,
                                                    const Fault& fault);

}  // namespace ta::share
