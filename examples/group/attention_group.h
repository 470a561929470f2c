// One rank's attention over a sequence whose blocks are distributed over all ranks of a group.
#pragma once

#include <turboattention.h>

#include <memory>

#include "../tinylm/attention.h"

namespace group_example {

struct Member {
    ta_group_id id;  // made once and passed to all ranks
    uint32_t rank = 0, ranks = 1;
    ta_group_kind kind = TA_GROUP_LOCAL;
    int gpu = -1;  // -1: a CPU context
};

// Joins the group, and waits until all ranks have joined. All ranks then make the same calls, each rank on a thread of its own,
// because the calls wait for one another. A failure of one rank ends the group, so that the others fail, too.
std::unique_ptr<tinylm::AttentionBackend> make_group_attention(const tinylm::AttentionShape& shape, const Member& member);

}  // namespace group_example
