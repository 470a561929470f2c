// The rotary embedding that callers apply to Q and K (ta_rotary): how far one position turns each pair of channels.
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
    uint32_t channels = 0;      // the first channels of a head, which are turned; 0: the caller gave no embedding
    std::vector<double> turns;  // [layers, channels / 2]: fraction of a whole turn per position

    bool given() const { return channels > 0; }
    const double* of_layer(uint32_t layer) const { return turns.data() + size_t(layer) * (channels / 2); }
};

// `r`: a valid struct with angles [r.layers, channels / 2].
Result<Rotary> read_rotary(const ta_rotary& r, std::span<const LayerShape> layers);

}  // namespace ta
