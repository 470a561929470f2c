// Stage 1 of one head's tokens within one page: which tokens share a scale, and the codes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "kernels/cpu/page_codec.h"
#include "kernels/format/quantize_rules.h"
#include "kernels/format/turning.h"

namespace ta {

// Quantizes rows x [last - first, d] into codes [64, d] and scales [64] at tokens [first, last). `universal` is the scale for
// kUniversal. `turning`: of K in pools that keep turning pairs with the scales. Returns how many values were clamped.
inline int64_t quantize_tokens(const cpu::PageCodec& codec, const float* x, const float* amax, int d, int first, int last,
                               ScaleRule rule, float universal, int levels, int8_t* codes, float* scales,
                               const TurningPairs* turning = nullptr) {
    float shared = universal;
    if (rule == ScaleRule::kPage || rule == ScaleRule::kPageExp) {
        float largest = 0.0f;
        for (int t = first; t < last; ++t) largest = amax[t - first] > largest ? amax[t - first] : largest;
        shared = stage1_scale(largest, levels);
    }
    int64_t clamped = 0;
    for (int t = first; t < last; ++t) {
        const float own = stage1_scale(amax[t - first], levels);
        float scale = rule == ScaleRule::kToken ? own : shared;
        if (rule == ScaleRule::kPageExp) scale = exponent_scale(own, shared);
        if (turning) scale = scale_with_turning(scale, *turning, t);
        scales[t] = scale;
        clamped += codec.quantize(x + int64_t(t - first) * d, d, scale, levels, codes + int64_t(t) * d);
    }
    return clamped;
}

// ---------------------------------------------------------------------------------------------------- universal open scales

// universal_scale() of a page that has tokens with these scales.
inline float universal_scale(const float* page_scales, int have, float largest) {
    float fixed = 0.0f;
    for (int t = 0; t < have; ++t) fixed = std::max(fixed, page_scales[t]);
    return universal_scale(fixed, largest);
}

// What stands for the scales that reopened tokens would have alone.
inline void reopen_own_scales(const int8_t* codes, const float* scales, int d, int tokens, float* own) {
    for (int t = 0; t < tokens; ++t) {
        int peak = 0;
        for (int c = 0; c < d; ++c) peak = std::max(peak, std::abs(int(codes[t * d + c])));
        own[t] = reopened_own_scale(peak, scales[t]);
    }
}

// A page of which a truncation has left tokens [0, have): `codes` [64, d] and `scales`. `largest` is the largest scale that a token
// of the head would have alone, these being the last. A scale above it is that of tokens that are gone: the codes become those of
// `largest`. `turning`: as above.
inline void settle_page(int8_t* codes, float* scales, int d, int have, float largest, const TurningPairs* turning = nullptr) {
    for (int t = 0; t < have; ++t) {
        const float scale = turning ? scale_with_turning(largest, *turning, t) : largest;
        if (scales[t] <= scale) continue;  // the pairs' byte is the same
        for (int c = 0; c < d; ++c) codes[t * d + c] = recoded(codes[t * d + c], scales[t], scale);
        scales[t] = scale;
    }
}

}  // namespace ta
