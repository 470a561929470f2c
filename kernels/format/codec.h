// The numeric codec: float -> INT8 (stage 1) -> 4/2 bits (stage 2), one value or one channel at a time, the same on CPU and
// GPU. docs/numerics.md gives the source of each step. All functions round to nearest even and need IEEE division and no
// contraction (-ffp-contract=off, nvcc -fmad=false where they are inlined).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

inline constexpr int kStage1Levels = 119;        // pages; leaves room for stage 2's rounding within INT8
inline constexpr int kIntFlashLevels = 127;      // INT-FlashAttention's R
inline constexpr float kMinAmax = 0x1p-118f;     // below it a scale could be denormal: everything is zero
inline constexpr float kMaxMagnitude = 0x1p56f;  // inputs above it are treated as non-finite, so that no score overflows
inline constexpr int kMaxExponent = 15;          // of a V token
inline constexpr int kMaxStep2Bits = 80;         // of stage 2

// ---------------------------------------------------------------------------------------------------------------- stage 1

TA_HD inline float stage1_scale(float amax, int levels) {
    return amax < kMinAmax ? 0.0f : amax / float(levels);
}

TA_HD inline int8_t stage1_code(float x, float scale, int levels) {
    if (scale == 0.0f) return 0;
    const float r = rintf(x / scale);
    const float limit = float(levels);
    return int8_t(r > limit ? limit : r < -limit ? -limit : r);
}

// The largest e <= 15 with x 2^e <= limit.
TA_HD inline int exponent_below(float x, float limit) {
    if (!(x > 0.0f)) return kMaxExponent;
    int e = 0;
    float scaled = x;
    while (e < kMaxExponent && scaled * 2.0f <= limit) {
        scaled *= 2.0f;
        ++e;
    }
    return e;
}

// How large a token is: fl(sum over channels of |q1| * its scale).
TA_HD inline float token_magnitude(int sum_of_codes, float token_scale) {
    return float(sum_of_codes) * token_scale;
}

// The power-of-two scale of a V token: the largest one at which the token's magnitude stays within the largest magnitude of the
// page, and its scale within the largest scale. The scale alone follows the token's largest channel: beside a token with an
// outlier it would make tokens of ordinary size too large, and with them the range of every channel. A token whose codes are
// all 0 takes the largest exponent, whatever its scale. Stage 2 stores noise for such a token; the exponent keeps the noise
// near 0, and keeps the token's weight from deciding P's unit.
TA_HD inline int v_exponent(float token_scale, float max_scale, float magnitude, float max_magnitude) {
    if (!(magnitude > 0.0f)) return kMaxExponent;
    const int by_scale = exponent_below(token_scale, max_scale), by_magnitude = exponent_below(magnitude, max_magnitude);
    return by_scale < by_magnitude ? by_scale : by_magnitude;
}

// Multiplies by 2^n exactly while the result is normal.
TA_HD inline float times_pow2(float x, int n) {
    return n < 0 ? x / float(1 << -n) : x * float(1 << n);
}

// The scale of a whole page's V token whose own scale would be `own`; 0 for a token of zeros.
TA_HD inline float exponent_scale(float own, float page_scale) {
    return own > 0.0f ? times_pow2(page_scale, -exponent_below(own, page_scale)) : 0.0f;
}

// The scale of a V token that a closed page gives back. Exponents of tokens that are not zero keep it normal.
TA_HD inline float reopened_scale(float page_scale, int exponent) {
    const float scale = times_pow2(page_scale, -exponent);
    return scale < 0x1p-126f ? 0.0f : scale;
}

// ------------------------------------------------------------------------------------------------------- stage 1 -> stage 2

// Factor that brings a token's INT8 codes to the page's common scale: fl(s_t 2^e / s_max), at most 1.
TA_HD inline float merge_ratio(float token_scale, float max_scale, int exponent) {
    return max_scale > 0.0f ? times_pow2(token_scale, exponent) / max_scale : 0.0f;
}
TA_HD inline int8_t merge_code(int8_t q1, float ratio) {
    return int8_t(rintf(float(q1) * ratio));
}

// Replaces the scale that a reopened token would have alone; `peak` is the largest of its |q1|.
TA_HD inline float reopened_own_scale(int peak, float token_scale) {
    return stage1_scale(token_magnitude(peak, token_scale), kStage1Levels);
}

// A code under another scale, of a value that is no larger than this one's largest.
TA_HD inline int8_t recoded(int8_t q1, float scale, float to) {
    if (q1 == 0 || to == 0.0f) return 0;
    const float r = rintf(float(q1) * (scale / to)), limit = float(kStage1Levels);
    return int8_t(r > limit ? limit : r < -limit ? -limit : r);
}

// ---------------------------------------------------------------------------------------------------------------- stage 2

struct ChannelCode {
    int step;   // s, 1..16 at 4 bits, 1..34 at 3, 1..80 at 2
    int zero8;  // zero point in eighths of an INT8 step
};

// RNE((q - z) / s) for q >= z, in integers.
TA_HD inline int stage2_code(int q, int z, int s) {
    const int t = 2 * (q - z) + s;
    int c = t / (2 * s);
    if (t % (2 * s) == 0 && (c & 1)) --c;
    return c;
}

// The same for any q, limited to 0..levels: what the searching encoder needs.
TA_HD inline int stage2_code_clamped(int q, int z, int s, int levels) {
    if (q <= z) return 0;
    const int c = stage2_code(q, z, s);
    return c > levels ? levels : c;
}

TA_HD inline int stage2_step(int min, int max, int levels) {
    const int s = (max - min + levels - 1) / levels;
    return s < 1 ? 1 : s;
}

// Candidates of the encoder search: three steps from the full one down at 4 bits; five at 2 bits, 12/16 to 8/16 of the full
// one. Each has its covered interval placed at several parts, in sixteenths, of the slack. The full range at its minimum comes
// before them and wins ties, as does the earlier candidate. docs/numerics.md has the figures.
TA_HD constexpr int search_steps(int bits) {
    return bits == 2 ? 5 : 3;
}
TA_HD constexpr int search_places(int bits) {
    return bits == 2 ? 5 : 4;
}
TA_HD constexpr int search_sixteenths(int bits, int place) {
    return bits == 2 ? 2 * place + 4 : 3 * place + 3 + (place > 1);
}

struct StepZero {
    int step, zero;
};
TA_HD inline StepZero search_candidate(int min, int max, int bits, int i, int place) {
    const int levels = (1 << bits) - 1;
    const int s0 = stage2_step(min, max, levels);
    const int narrow = bits == 2 ? (s0 * (12 - i) + 15) >> 4 : s0 - i;
    const int s = narrow < 1 ? 1 : narrow;
    const int slack = (max - min) - levels * s;
    int z = min + ((slack * search_sixteenths(bits, place)) >> 4);  // arithmetic shift: floor
    if (z + levels * s > 127) z = 127 - levels * s;
    if (z < -128) z = -128;
    return {s, z};
}

// Mean-preserving zero point: moves z by the mean of the residuals q - (c s + z) over the page, in steps of `unit` eighths of an
// INT8 step, while c s + floor(z) stays within INT8. `max_code` is the largest code of the channel.
TA_HD inline int moved_zero8(int zero, int residual_sum, int step, int max_code, int unit) {
    const int divisor = kPageTokens / 8 * unit;  // residual_sum / 64 in units
    const int floor_div = residual_sum >= 0 ? residual_sum / divisor : -((-residual_sum + divisor - 1) / divisor);
    const int rest2 = 2 * (residual_sum - floor_div * divisor);
    const int moved = floor_div + (rest2 > divisor || (rest2 == divisor && (floor_div & 1)) ? 1 : 0);
    int zero8 = 8 * zero + unit * moved;
    const int highest = 8 * (127 - max_code * step) + 8 - unit;
    if (zero8 > highest) zero8 = highest;
    if (zero8 < 8 * -128) zero8 = 8 * -128;
    return zero8;
}

// The unit of zero points, in eighths of an INT8 step: 1/8 at 4 bits, 1/2 at 2 bits.
TA_HD constexpr int fraction_unit(int bits) {
    return bits == 4 ? 1 : 4;
}
TA_HD inline int fractional_zero8(int zero, int residual_sum, int step, int max_code, int bits) {
    return moved_zero8(zero, residual_sum, step, max_code, fraction_unit(bits));
}

// How pages are closed; a pool's settings of these names.
struct EncodeOptions {
    bool v_exponents = false;
    bool fractional_zero = false;
    bool v_search = false;
    bool k_search = false;  // of 2-bit heads
    bool unit_slope = false;
    bool k_turning = false;  // the lowest bytes of K's scales are turning pairs
};

// The options that apply to a channel.
struct Stage2Options {
    bool search = false;
    bool fractional_zero = false;
    bool unit_slope = false;
};
TA_HD constexpr Stage2Options k_stage2(const EncodeOptions& o, int bits) {
    return {o.k_search && bits == 2, o.fractional_zero, o.unit_slope};
}
TA_HD constexpr Stage2Options v_stage2(const EncodeOptions& o) {
    return {o.v_search, o.fractional_zero, o.unit_slope};
}

// Unit slope. Nearest codes shrink values, and the search shrinks them more: a line fitted to c s over q has a slope below 1.
// The sums are 64^2 times the variance of a channel's q over the page, and 64^2 times the covariance of its q and c.
struct ChannelSlope {
    int variance, covariance;
};
TA_HD constexpr ChannelSlope channel_slope(int sum_q, int sum_c, int sum_qq, int sum_qc) {
    return {kPageTokens * sum_qq - sum_q * sum_q, kPageTokens * sum_qc - sum_q * sum_c};
}
// The largest step at which the zero point that keeps the mean, and the values of all codes, lie within INT8. `sum_q` and
// `sum_c`: of a channel's q and codes.
TA_HD inline int largest_step_of_mean(int sum_q, int sum_c, int bits) {
    const int sum_rest = kPageTokens * ((1 << bits) - 1) - sum_c;
    int most = kMaxStep2Bits;
    if (sum_c > 0 && (sum_q + kPageTokens * 128) / sum_c < most) most = (sum_q + kPageTokens * 128) / sum_c;
    if (sum_rest > 0 && (kPageTokens * 127 - sum_q) / sum_rest < most) most = (kPageTokens * 127 - sum_q) / sum_rest;
    return most;
}
// The step of slope 1, to the nearest integer, halves up, if some zero point keeps the mean at this step. Otherwise the largest
// step at which one does, or the present step if that is larger. Steps of 4 bits are too small to be moved.
TA_HD inline int unit_slope_step(int step, ChannelSlope slope, int sum_q, int sum_c, int bits) {
    if (bits != 2 || slope.covariance <= 0) return step;
    const int s = (2 * slope.variance + slope.covariance) / (2 * slope.covariance);
    const int most = largest_step_of_mean(sum_q, sum_c, bits);
    if (s > most) return most > step ? most : step;
    return s < 1 ? 1 : s;
}
// The factor of the page scale for the slope that the steps leave. The sums over the head's channels: of variances, and
// of covariances times steps.
TA_HD inline float unit_slope_gain(int64_t variance, int64_t covariance) {
    if (covariance <= 0) return 1.0f;
    const float gain = float(variance) / float(covariance);
    return gain < 0.5f ? 0.5f : gain > 2.0f ? 2.0f : gain;
}
// The new page scale. `turning`: it is K's, and scales have turning pairs in their lowest bytes. If a page without pairs is
// reopened, its tokens get this scale, so its lowest byte has to be 0.
TA_HD inline float unit_slope_scale(float scale, float gain, bool turning) {
    const float gained = scale * gain;
    return turning ? std::bit_cast<float>(std::bit_cast<uint32_t>(gained) & ~255u) : gained;
}
// The zero point that keeps the channel's mean under the new scale; with a gain of 1 it is fractional_zero8's. `unit` is 8
// without fractions.
TA_HD inline int unit_slope_zero8(int zero, int sum_q, int sum_c, float gain, int step, int max_code, int unit) {
    const int sum = int(rintf(float(sum_q) / gain));
    return moved_zero8(zero, sum - step * sum_c - kPageTokens * zero, step, max_code, unit);
}

// Encodes one channel of a page, all but unit slope: q [64] with stride `stride`, codes [64] with the same stride. The definition;
// the CPU encoder does the same for many channels at once.
TA_HD inline ChannelCode encode_channel(const int8_t* q, uint8_t* codes, int stride, int bits, Stage2Options options) {
    const int levels = (1 << bits) - 1;
    int min = q[0], max = q[0];
    for (int t = 1; t < kPageTokens; ++t) {
        const int v = q[t * stride];
        min = v < min ? v : min;
        max = v > max ? v : max;
    }
    StepZero best{stage2_step(min, max, levels), min};
    if (options.search) {
        int best_error = -1;
        const int places = search_places(bits);
        const StepZero full = best;
        for (int n = -1; n < search_steps(bits) * places; ++n) {
            const StepZero sz = n < 0 ? full : search_candidate(min, max, bits, n / places, n % places);
            int error = 0;
            for (int t = 0; t < kPageTokens; ++t) {
                const int v = q[t * stride];
                const int e = v - (stage2_code_clamped(v, sz.zero, sz.step, levels) * sz.step + sz.zero);
                error += e * e;
            }
            if (best_error < 0 || error < best_error) {
                best_error = error;
                best = sz;
            }
        }
    }
    int residual_sum = 0, max_code = 0;
    for (int t = 0; t < kPageTokens; ++t) {
        const int v = q[t * stride];
        const int c = stage2_code_clamped(v, best.zero, best.step, levels);
        max_code = c > max_code ? c : max_code;
        codes[t * stride] = uint8_t(c);
        residual_sum += v - (c * best.step + best.zero);
    }
    if (!options.fractional_zero) return {best.step, 8 * best.zero};
    return {best.step, fractional_zero8(best.zero, residual_sum, best.step, max_code, bits)};
}

// Unit slope of a head's channels: q and codes [64, d] as encode_channel left them. Changes channels [d]; returns the gain.
inline float give_unit_slope(const int8_t* q, const uint8_t* codes, int d, int bits, bool fractional_zero,
                             ChannelCode* channels) {
    int64_t variance = 0, covariance = 0;
    float gain = 1.0f;
    for (int pass = 0; pass < 2; ++pass) {  // steps, then zero points
        for (int c = 0; c < d; ++c) {
            int sum_q = 0, sum_c = 0, sum_qq = 0, sum_qc = 0, max_code = 0;
            for (int t = 0; t < kPageTokens; ++t) {
                const int x = q[t * d + c], y = codes[t * d + c];
                sum_q += x, sum_c += y, sum_qq += x * x, sum_qc += x * y;
                max_code = y > max_code ? y : max_code;
            }
            if (pass == 0) {
                const ChannelSlope slope = channel_slope(sum_q, sum_c, sum_qq, sum_qc);
                channels[c].step = unit_slope_step(channels[c].step, slope, sum_q, sum_c, bits);
                variance += slope.variance;
                covariance += int64_t(slope.covariance) * channels[c].step;
            } else {
                channels[c].zero8 = unit_slope_zero8(channels[c].zero8 >> 3, sum_q, sum_c, gain, channels[c].step, max_code,
                                                     fractional_zero ? fraction_unit(bits) : 8);
            }
        }
        gain = unit_slope_gain(variance, covariance);
    }
    return gain;
}

// Splits a zero point in eighths into the stored integer and the stored fraction.
TA_HD inline int zero_floor(int zero8) {
    return zero8 >> 3;
}
TA_HD inline int zero_fraction8(int zero8) {
    return zero8 & 7;
}

}  // namespace ta
