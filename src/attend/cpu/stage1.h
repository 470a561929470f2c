// Stage 1 for one head's tokens of one page: which tokens share a scale, and the codes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "kernels/cpu/page_codec.h"
#include "kernels/format/quantize_rules.h"
#include "kernels/format/turning.h"

namespace ta {

// Tokens [first, last) of a page: x [last - first, d], and each row's largest magnitude.
struct TokenRows {
    const float *x, *amax;
    int d, first, last;
};

// How tokens get their scales. `universal`: for kUniversal. `turning`: for K in pools that keep turning pairs with the scales.
struct TokenScaling {
    ScaleRule rule;
    float universal = 0.0f;
    const TurningPairs* turning = nullptr;
    int levels = kStage1Levels;
};

// Quantizes rows into codes [64, d] and scales [64] of their page. Returns how many values were clamped.
inline int64_t quantize_tokens(const cpu::PageCodec& codec, const TokenRows& rows, const TokenScaling& how, int8_t* codes,
                               float* scales) {
    const int first = rows.first;
    float shared = how.universal;
    if (how.rule == ScaleRule::kPage || how.rule == ScaleRule::kPageExp) {
        float largest = 0.0f;
        for (int t = first; t < rows.last; ++t) largest = rows.amax[t - first] > largest ? rows.amax[t - first] : largest;
        shared = stage1_scale(largest, how.levels);
    }
    int64_t clamped = 0;
    for (int t = first; t < rows.last; ++t) {
        const float own = stage1_scale(rows.amax[t - first], how.levels);
        float scale = how.rule == ScaleRule::kToken ? own : shared;
        if (how.rule == ScaleRule::kPageExp) scale = exponent_scale(own, shared);
        if (how.turning) scale = scale_with_turning(scale, *how.turning, t);
        scales[t] = scale;
        clamped += codec.quantize(rows.x + int64_t(t - first) * rows.d, rows.d, scale, how.levels, codes + int64_t(t) * rows.d);
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

// Computes, from the codes, the scales that reopened tokens would have alone, as far as they can be known.
inline void reopen_own_scales(const int8_t* codes, const float* scales, int d, int tokens, float* own) {
    for (int t = 0; t < tokens; ++t) {
        int peak = 0;
        for (int c = 0; c < d; ++c) peak = std::max(peak, std::abs(int(codes[t * d + c])));
        own[t] = reopened_own_scale(peak, scales[t]);
    }
}

// Corrects a page after a truncate has left its tokens [0, have): `codes` [64, d] and `scales`. `largest`: the largest scale
// that a token of the head would have alone, these being the last tokens. A larger scale belongs to tokens that are gone: codes
// with it become codes of `largest`. `turning`: as above.
inline void settle_page(int8_t* codes, float* scales, int d, int have, float largest, const TurningPairs* turning = nullptr) {
    for (int t = 0; t < have; ++t) {
        const float scale = turning ? scale_with_turning(largest, *turning, t) : largest;
        if (scales[t] <= scale) continue;  // the pairs' byte is the same
        for (int c = 0; c < d; ++c) codes[t * d + c] = recoded(codes[t * d + c], scales[t], scale);
        scales[t] = scale;
    }
}

}  // namespace ta
