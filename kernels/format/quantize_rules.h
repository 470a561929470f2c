// How the tokens of a page get their stage-1 scales: the rules of append, for CPU and GPU.
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

enum class ScaleRule : uint8_t {
    kToken,      // each token its own
    kPage,       // one for all of the page
    kPageExp,    // one for all of the page times a power of two per token (V): exponent_scale()
    kUniversal,  // the page's, universal_scale(); larger values are clamped
};

// A pool's options for K or for V.
struct ScaleOptions {
    bool page_scale, page_scale_at_8_bits, exponents, universal;
};

// The rule for the new tokens of a page. `whole`: they fill the whole page. `stays_8_bits`: the page never becomes a channel
// page.
TA_HD constexpr ScaleRule scale_rule(bool whole, bool stays_8_bits, const ScaleOptions& o) {
    if (whole && o.page_scale && (!stays_8_bits || o.page_scale_at_8_bits))
        return o.exponents && !stays_8_bits ? ScaleRule::kPageExp : ScaleRule::kPage;
    return o.universal ? ScaleRule::kUniversal : ScaleRule::kToken;
}

// The universal scale of new tokens in a page. `fixed`: the largest scale of the tokens that the page has; 0: none has a scale
// yet.
// `largest`: the largest scale that a token of the head would have alone, up to and including the new ones.
TA_HD constexpr float universal_scale(float fixed, float largest) {
    return fixed > 0.0f ? fixed : largest;
}

}  // namespace ta
