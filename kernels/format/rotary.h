// Which channels of a head the rotary embedding turns together (RoPE: Su et al., "RoFormer", section 3.2.2).
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

enum class RotaryPairs : uint8_t { kHalves = 0, kAdjacent = 1 };

struct ChannelPair {
    int x, y;
};
// Pair i of a head whose first `channels` channels are turned.
TA_HD constexpr ChannelPair rotary_pair(RotaryPairs pairs, int i, int channels) {
    return pairs == RotaryPairs::kHalves ? ChannelPair{i, i + channels / 2} : ChannelPair{2 * i, 2 * i + 1};
}

}  // namespace ta
