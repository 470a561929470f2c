// The meaning of the bytes of a pool's blocks, for callers that check, encode or move them.
#pragma once

#include <cstdint>

#include "kernels/cpu/page_codec.h"
#include "src/page/geometry.h"
#include "src/page/numerics.h"

namespace ta {

// Outlives all who have a reference to it; never changes.
struct Pages {
    Geometry geometry;
    Numerics numerics;
    uint64_t fingerprint = 0;               // of both, the sign of its blocks
    const cpu::PageCodec* codec = nullptr;  // for blocks in host memory
};

}  // namespace ta
