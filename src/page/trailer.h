// The trailer of a slot: whose block its bytes are, and the hash of each page. Numerics are in docs/numerics.md.
#pragma once

#include <cstdint>

#include "src/page/geometry.h"

namespace ta {

// Checks that the slot's bytes, wherever they lie in host memory, are the block that these name: its trailer, and with 64 tokens
// the hash of every page. TA_E_CORRUPT names the layer.
Status verify_slot(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                   uint64_t content_id, uint32_t tokens);

// Checks that attention may compute with the values in a slot that comes from a file, beside its hashes. TA_E_CORRUPT names
// layer, head and block.
Status check_values(const Geometry& geometry, bool k_turning, PageKind kind, const uint8_t* slot, uint64_t block_index);

// Writes the trailer of a block: its identity, and with `hashes` one hash for each page of a full block; else zeros in their
// place.
void write_trailer(const Geometry& geometry, PageKind kind, uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                   uint64_t content_id, uint32_t tokens, bool hashes);
// The hashes of pages in places [first, first + n), behind a trailer without.
void write_page_hashes(const Geometry& geometry, PageKind kind, uint8_t* slot, uint32_t first, uint32_t n);

// Of a full slot the pages of layers without a window, and their hashes, to one of the passed kind.
void copy_lasting_pages(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint8_t* passed);
// The same as ranges to copy: payload, trailer with hashes. The rest of the passed slot is zero.
struct LastingPages {
    size_t payload, trailer_from, trailer, rest;  // bytes, but for the trailer's place in the full slot
};
LastingPages lasting_pages(const Geometry& geometry, PageKind kind);

// Parts of that, for several threads: whose block the trailer says it is, and pages in places [first, first + n).
Status verify_trailer(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                      uint64_t content_id, uint32_t tokens);
Status verify_pages(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint64_t block_index, uint32_t first,
                    uint32_t n);

}  // namespace ta
