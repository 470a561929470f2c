// Hashes of the pages of a slot, mended.
#pragma once

#include <cstddef>

#include "kernels/format/slot.h"
#include "tests/fuzz/parts.h"
#include "tiering/store/blocks.h"

namespace ta::fuzz {

// Nothing where the slot is none of this kind any more: how long its pages are is for its trailer to say.
inline void mend_pages(const Geometry& geometry, PageKind kind, Bytes& slot) {
    const size_t kind_at = geometry.payload_bytes(kind) + offsetof(SlotTrailer, kind);
    if (slot.size() >= geometry.slot_bytes(kind) && slot[kind_at] == uint8_t(kind))
        write_page_hashes(geometry, kind, slot.data(), 0, geometry.layers);
}

}  // namespace ta::fuzz
