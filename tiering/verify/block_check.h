// Checks, by trailer and page hashes, that a slot holds the block that was asked for.
#pragma once

#include "src/page/geometry.h"
#include "tiering/disk/request.h"

namespace ta {

// For slots of a pool of this geometry and fingerprint. A block of fewer than 64 tokens has no page hashes: only its trailer is
// compared.
BlockCheck make_block_check(const Geometry& geometry, uint64_t fingerprint);
// For slots of full blocks from a file of another process: checks that attention can compute with their values.
BlockCheck make_value_check(const Geometry& geometry, bool k_turning);

}  // namespace ta
