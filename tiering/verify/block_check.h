// Checks that the bytes of a slot are the block that was asked for, by its trailer and the hash of each page.
#pragma once

#include "src/page/geometry.h"
#include "tiering/disk/request.h"

namespace ta {

// For slots of a pool of this geometry and fingerprint. A block of fewer than 64 tokens has no page hashes: of it the trailer
// is compared.
BlockCheck make_block_check(const Geometry& geometry, uint64_t fingerprint);
// For slots of full blocks that come from a file of another process: whether attention may compute with what they hold.
BlockCheck make_value_check(const Geometry& geometry, bool k_turning);

}  // namespace ta
