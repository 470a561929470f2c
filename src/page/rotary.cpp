#include "src/page/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace ta {

Result<Rotary> read_rotary(const ta_rotary& r, std::span<const LayerShape> layers) {
    constexpr double kMostAngle = 1024.0;
    if (r.pairs < TA_ROTARY_HALVES || r.pairs > TA_ROTARY_ADJACENT)
        return fail(TA_E_INVALID, "options.rotary.pairs is %d, no value of ta_rotary_pairs", int(r.pairs));
    uint32_t least = layers[0].k_channels;
    for (const LayerShape& s : layers) least = std::min(least, s.k_channels);
    if (r.channels < 2 || r.channels % 2 != 0 || r.channels > least)
        return fail(TA_E_INVALID, "options.rotary.channels is %u; it takes an even number from 2 to %u", r.channels, least);
    if (r.layers != 1 && r.layers != layers.size())
        return fail(TA_E_INVALID, "options.rotary.layers is %u; the pool has %zu, and 1 stands for all", r.layers,
                    layers.size());
    if (!r.angles) return fail(TA_E_INVALID, "options.rotary.angles is null");
    Rotary rotary{RotaryPairs(r.pairs), r.channels, {}};
    const size_t pairs = r.channels / 2;
    rotary.turns.assign(r.angles, r.angles + r.layers * pairs);
    for (size_t i = 0; i < rotary.turns.size(); ++i) {
        double& angle = rotary.turns[i];
        if (!(std::abs(angle) <= kMostAngle)) {
            return fail(TA_E_INVALID, "options.rotary.angles of layer %zu, pair %zu is %g; it takes up to %g", i / pairs,
                        i % pairs, angle, kMostAngle)
                .layer(int64_t(i / pairs));
        }
        angle /= 2.0 * std::numbers::pi;
    }
    while (rotary.turns.size() < layers.size() * pairs) rotary.turns.push_back(rotary.turns[rotary.turns.size() - pairs]);
    return rotary;
}

}  // namespace ta
