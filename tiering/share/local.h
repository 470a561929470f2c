// The transport of ranks that are all in this process: messages in queues, bytes by memcpy. It can be told to fail, so that tests
// see what a group does then.
#pragma once

#include <memory>

#include "src/core/device.h"
#include "tiering/share/id.h"
#include "tiering/share/transport.h"

namespace ta::share {

// A fault that a rank makes. Actions are its messages but for heartbeats, and its writes into windows, counted from 1.
struct Fault {
    enum class Kind : int32_t {
        kNone,
        kDrop,       // the message is lost; of a write nothing is written
        kDelay,      // it comes `detail` milliseconds later, and those behind it, too
        kDuplicate,  // it comes twice
        kReorder,    // it comes 50 ms later, those behind it before
        kCorrupt,    // bit `detail` of the message or of what is written, modulo its length, is flipped
        kCut,        // the message, or what is written, ends before byte `detail`, modulo its length
        kKill,       // the rank does nothing any more, as if its process had been killed before the action
    };
    Kind kind = Kind::kNone;
    uint64_t action = 0;
    uint64_t detail = 0;
};

// Joins the group of that id. `device`: the rank's GPU, which outlives the transport; nullptr: it has none. TA_E_INVALID: the rank
// has joined already; TA_E_MISMATCH: others said another number of ranks; TA_E_STALE: the group has ended.
Result<std::unique_ptr<Transport>> join_local_group(const GroupId& id, uint32_t rank, uint32_t ranks, Device* device,
                                                    const Fault& fault);

}  // namespace ta::share
