// The rotary embedding that callers apply to Q and K, as ta_rotary says: how much a position turns each pair of channels.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "include/turboattention.h"
#include "kernels/format/rotary.h"
#include "src/core/status.h"
#include "src/page/geometry.h"

namespace ta {

struct Rotary {
    RotaryPairs pairs = RotaryPairs::kHalves;
    uint32_t channels = 0;      // the first ones of a head, which are turned; 0: none was given
    std::vector<double> turns;  // [layers, channels / 2] of a whole turn, for each position

    bool given() const { return channels > 0; }
    const double* of_layer(uint32_t layer) const { return turns.data() + size_t(layer) * (channels / 2); }
};

// `r` is known to be a struct with angles [r.layers, channels / 2].
Result<Rotary> read_rotary(const ta_rotary& r, std::span<const LayerShape> layers);

}  // namespace ta
