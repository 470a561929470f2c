// How many slots of the device tier the next tokens of a sequence take.
#pragma once

#include <cstdint>
#include <span>

#include "src/page/pages.h"
#include "tiering/store/blocks.h"

namespace ta {

// True if the windows of its layers may pass the block, which the caller's sequence has: nobody else may see those pages. The next
// begin promotes a block on disk.
bool may_pass(const BlockPtr& block);

// The blocks that one step with `n_new` tokens acquires for a sequence of `length` tokens. `may_write_last`: its last block, if
// that is not full, takes them as it is. `blocks`: the present ones.
SlotCounts slots_of_step(const Pages& pages, int64_t length, int64_t n_new, bool may_write_last,
                         std::span<const BlockPtr> blocks);

// The slots to promise a sequence of `length` tokens so that any steps that bring `tokens` more find room: for the blocks that
// will be there, the open one and its successor, which exist together while a step closes the first, a copy of the open one, and one that a
// truncate cuts: it is opened and closed again. Behind the sinks also as many sink blocks as a truncate of shared blocks makes come again.
SlotCounts slots_to_promise(const Pages& pages, int64_t length, int64_t tokens);

}  // namespace ta
