// A slot: the pages of all layers for the same 64 tokens, those of layers without a window first, then a trailer with identity and
// one hash per page. A passed slot has the first of these pages and their hashes alone. docs/FORMAT.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

inline constexpr uint32_t kSlotMagic = 0x564B4154;  // "TAKV" in little endian
inline constexpr uint16_t kFormatVersion = 1;
inline constexpr size_t kSlotAlignment = 4096;  // of its address: O_DIRECT and copy engines want it

// All fields little endian. Followed by uint64_t page_hash[layers].
struct SlotTrailer {
    uint32_t magic;
    uint16_t version;
    uint8_t kind;  // PageKind of every page: page_format() of the slot's
    uint8_t reserved0;
    uint64_t fingerprint;  // of the pool: geometry, bits, numeric settings
    uint64_t block_index;  // position in the sequence: tokens 64 block_index ...
    uint64_t content_id;   // unique to what was written here
    uint32_t tokens;       // valid ones; hashed pages have 64
    uint32_t layers;
    uint64_t reserved[3];
};
static_assert(sizeof(SlotTrailer) == 64);

// Values that the hash of a page binds beside its bytes. 48 bytes, hashed in front of the payload's hash.
struct PageIdentity {
    uint64_t fingerprint;
    uint64_t block_index;
    uint64_t content_id;
    uint32_t layer;  // its page's place in the slot: the layer itself where no layer has a window
    uint32_t tokens;
    uint32_t magic;
    uint16_t version;
    uint8_t kind;
    uint8_t reserved;
    uint64_t payload_bytes;
};
static_assert(sizeof(PageIdentity) == 48);

TA_HD constexpr size_t slot_bytes(size_t payload_bytes, uint32_t layers) {
    const size_t n = payload_bytes + sizeof(SlotTrailer) + layers * sizeof(uint64_t);
    return (n + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

}  // namespace ta
