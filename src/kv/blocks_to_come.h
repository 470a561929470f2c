// How many slots of the device tier the next tokens of a sequence take.
#pragma once

#include <cstdint>
#include <span>

#include "src/page/pages.h"
#include "tiering/store/blocks.h"

namespace ta {

// True if the windows of its layers may pass the block: nobody but the caller's sequence may see those pages. (A block on disk
// is promoted by the next begin.)
bool may_pass(const BlockPtr& block);

// The slots that one step with `n_new` tokens acquires for a sequence of `length` tokens. `may_write_last`: if the last block
// is not full, the step writes into it without a copy. `blocks`: the present ones.
SlotCounts slots_of_step(const Pages& pages, int64_t length, int64_t n_new, bool may_write_last,
                         std::span<const BlockPtr> blocks);

// The slots to promise a sequence of `length` tokens so that steps that bring `tokens` more, in any pieces, find room. They are
// for: the blocks that there will be; the open block and its successor, which exist together while a step closes the first; a
// copy of the open block; a block that a truncate cuts, which is opened and closed again; and, in sequences longer than the
// sinks, as many sink blocks as a truncate of shared blocks makes come again.
SlotCounts slots_to_promise(const Pages& pages, int64_t length, int64_t tokens);

}  // namespace ta
