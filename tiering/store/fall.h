// Falling precision: a full block of 8 bits falls to 4 when it is demoted to the host tier, and to 2 when it is demoted to the
// disk. A promoted block keeps its bits. docs/tiers.md; the numbers: docs/numerics.md, section 4.8.
//
// The steps are always 8 -> 4 -> 2 bits, even if a block skips a tier. So content id and kind determine a block's bytes.
#pragma once

#include "kernels/cpu/page_codec.h"
#include "src/page/numerics.h"
#include "src/page/pages.h"
#include "tiering/store/blocks.h"

namespace ta {

// The kind of a falling block after it was demoted to `tier`.
inline PageKind kind_in_tier(PageKind now, TierKind tier) {
    if (tier == TierKind::kDisk) return PageKind::kLow;
    return tier == TierKind::kHost && now == PageKind::kToken ? PageKind::kChannel : now;
}

// Sinks do not fall, nor blocks that lack tokens, nor blocks that are or were published: users of these were promised their
// content.
inline bool may_fall(const Geometry& geometry, const Numerics& numerics, const Block& block, uint64_t index) {
    return geometry.falls && index >= numerics.sink_blocks && !block.suspended() && !block.keeps_kind();
}

// The kind that a block has after a move from `from` to `to`.
inline PageKind kind_moved(const Geometry& geometry, const Numerics& numerics, const Block& block, uint64_t index,
                           TierKind from, TierKind to) {
    const PageKind kind = block.kind();
    return to > from && may_fall(geometry, numerics, block, index) ? kind_in_tier(kind, to) : kind;
}

// Encodes pages [first, first + n) of a full block in a lower kind, exactly as closing and reopening them would. TA_E_MEMORY:
// nothing was written.
Status encode_lower(const Pages& pages, const uint8_t* from, PageKind from_kind, uint8_t* to, PageKind to_kind, uint32_t first,
                    uint32_t n);

}  // namespace ta
