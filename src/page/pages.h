// What the bytes of a pool's blocks mean: for callers that check, encode or move blocks.
#pragma once

#include <cstdint>

#include "kernels/cpu/page_codec.h"
#include "src/page/geometry.h"
#include "src/page/numerics.h"

namespace ta {

// Never changes, and outlives all references to it.
struct Pages {
    Geometry geometry;
    Numerics numerics;
    uint64_t fingerprint = 0;               // hash of geometry and numerics that all blocks carry
    const cpu::PageCodec* codec = nullptr;  // for blocks in host memory
};

}  // namespace ta
