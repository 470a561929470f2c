#pragma once

#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

// The channels that blocks have for heads of so many channels (up to kMaxHeadDim): the smallest supported head_dim that holds
// them.
constexpr uint32_t block_channels(uint32_t channels) {
    while (!is_supported_head_dim(int(channels))) channels += 8;
    return channels;
}

}  // namespace ta
