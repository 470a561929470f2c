// Checks that attention may compute with the values of a page. Pages that an encoder wrote always pass; pages of a file may
// not, whatever their hashes say. docs/FORMAT.md, sections 2 and 3.
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

// Larger than any scale of an encoder: an offset as large as the input doubles a value, a rotation multiplies it by 16 at most,
// and a scale is a 119th of that. Scores of queries within kMaxMagnitude then stay finite.
inline constexpr float kMaxScale = 0x1.2p54f;

// 0, or a normal number up to kMaxScale.
bool is_good_scale(float scale);

// One head's piece. The places of tokens that a block lacks must pass, too; zeros do. `k_turning`: it may have turning pairs
// (turning.h).
bool is_good_token_piece(const uint8_t* piece, int d, bool k_turning = false);
// `own_scales`: it has them.
bool is_good_channel_piece(const uint8_t* piece, const ChannelLayout& layout, bool k_turning = false, bool own_scales = false);

// The scales that tokens would have alone, [n] floats.
bool are_good_own_scales(const uint8_t* at, size_t n);

}  // namespace ta
