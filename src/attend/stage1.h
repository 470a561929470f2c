// Stage 1 of one head's tokens within one page: which tokens share a scale, and the codes.
#pragma once

#include <cstdint>

#include "kernels/cpu/page_codec.h"
#include "kernels/format/turning.h"

namespace ta {

// How the tokens [first, last) of a page get their scales.
enum class ScaleRule : uint8_t {
    kToken,      // each its own
    kPage,       // one for all of them
    kPageExp,    // one for all of them times a power of two per token (V)
    kUniversal,  // the page's, given; larger values are clamped
};

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

}  // namespace ta
