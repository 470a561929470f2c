// The trailer of a slot: it says which block the bytes are, and holds a hash of each page. docs/numerics.md defines the format.
#pragma once

#include <cstdint>

#include "src/page/geometry.h"

namespace ta {

// Checks that the slot holds the block with these values: its trailer, and for a full block the hash of every page. The slot
// may lie anywhere in host memory. TA_E_CORRUPT names the layer.
Status verify_slot(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                   uint64_t content_id, uint32_t tokens);

// Checks that attention may compute with the values of a slot that was read from a file. The hashes do not prove that.
// TA_E_CORRUPT names layer, head and block.
Status check_values(const Geometry& geometry, bool k_turning, PageKind kind, const uint8_t* slot, uint64_t block_index);

// Writes the trailer of a block: its identity, and with `hashes` one hash for each page of a full block. Without, zeros take
// their place.
void write_trailer(const Geometry& geometry, PageKind kind, uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                   uint64_t content_id, uint32_t tokens, bool hashes);
// Writes the hashes of the pages in places [first, first + n), behind a trailer that was written without hashes.
void write_page_hashes(const Geometry& geometry, PageKind kind, uint8_t* slot, uint32_t first, uint32_t n);

// Copies the pages of layers without a window, and their hashes, from a full slot to one of the passed kind.
void copy_lasting_pages(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint8_t* passed);
// The same as ranges to copy: the payload, then the trailer with its hashes. The rest of the passed slot is zero.
struct LastingPages {
    size_t payload, trailer_from, trailer, rest;  // bytes; trailer_from: the trailer's offset in the full slot
};
LastingPages lasting_pages(const Geometry& geometry, PageKind kind);

// Parts of verify_slot() for several threads: the trailer's identity, and the pages in places [first, first + n).
Status verify_trailer(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                      uint64_t content_id, uint32_t tokens);
Status verify_pages(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint64_t block_index, uint32_t first,
                    uint32_t n);

}  // namespace ta
