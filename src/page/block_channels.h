#pragma once

#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

// Channels of the blocks of a head that has so many, up to kMaxHeadDim: of the kinds of blocks that there are the one with the fewest
// that are enough.
constexpr uint32_t block_channels(uint32_t channels) {
    while (!is_supported_head_dim(int(channels))) channels += 8;
    return channels;
}

}  // namespace ta
