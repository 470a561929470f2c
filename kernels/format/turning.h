// The turning part of K: pairs of channels with a large part that turns evenly from token to token. The rotary embedding makes
// such pairs from a bias in the K projection. One pair over the tokens t of a page is A cos(p + w t) in its first channel and
// A sin(p + w t) in its second; w = 0 is a constant. The encoder takes up to 8 such pairs out of a page's rows before rotation
// and stage 1, and attention gives them back to the scores in fp32. docs/numerics.md, "Turning part", and docs/FORMAT.md.
//
// Nothing here may be contracted: CPUs and GPUs find the same pairs to the bit.
#pragma once

#include <string.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/format/codec.h"

namespace ta {

inline constexpr int kTurningPairs = 8;  // of a page and head
inline constexpr int kTurningBytes = 8 * kTurningPairs;
static_assert(kTurningBytes == kPageTokens, "a token page keeps a byte of it with the K scale of each token");

TA_HD inline float rn_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}
TA_HD inline float rn_add(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}
TA_HD inline float rn_sub(float a, float b) {
    return rn_add(a, -b);
}
TA_HD inline float rn_div(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fdiv_rn(a, b);
#else
    return a / b;
#endif
}
TA_HD inline float rn_sqrt(float a) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(a);
#else
    return std::sqrt(a);
#endif
}

// ------------------------------------------------------------------------------------------------------------------ angles

// Angles are integers whose full turn is 2^32.
struct SinCos {
    float sin, cos;
};

// Error below 2e-7.
TA_HD inline SinCos turn_sin_cos(uint32_t angle) {
    const uint32_t quadrant = (angle + 0x20000000u) >> 30;
    const float x = rn_mul(float(int32_t(angle - (quadrant << 30))), 1.46291807926715968e-9f);  // 2 pi / 2^32
    const float xx = rn_mul(x, x);
    float s = rn_add(rn_mul(xx, -1.9515295891e-4f), 8.3321608736e-3f);
    s = rn_add(rn_mul(s, xx), -1.6666654611e-1f);
    s = rn_add(rn_mul(rn_mul(s, xx), x), x);
    float c = rn_add(rn_mul(xx, 2.443315711809948e-5f), -1.388731625493765e-3f);
    c = rn_add(rn_mul(c, xx), 4.166664568298827e-2f);
    c = rn_add(rn_mul(c, xx), -0.5f);
    c = rn_add(rn_mul(c, xx), 1.0f);
    const float sine = quadrant & 1 ? c : s, cosine = quadrant & 1 ? s : c;
    return {quadrant & 2 ? -sine : sine, (quadrant + 1) & 2 ? -cosine : cosine};
}

// The angle of (x, y); 0 for (0, 0). Error below 1e-7 of a turn.
TA_HD inline uint32_t turn_of(float x, float y) {
    const float ax = std::fabs(x), ay = std::fabs(y);
    const float most = ax > ay ? ax : ay, least = ax > ay ? ay : ax;
    if (!(most > 0.0f)) return 0;
    const float t = rn_div(least, most), tt = rn_mul(t, t);
    float r = 0.0028662257f;
    r = rn_add(rn_mul(r, tt), -0.0161657367f);
    r = rn_add(rn_mul(r, tt), 0.0429096138f);
    r = rn_add(rn_mul(r, tt), -0.0752896400f);
    r = rn_add(rn_mul(r, tt), 0.1065626393f);
    r = rn_add(rn_mul(r, tt), -0.1420889944f);
    r = rn_add(rn_mul(r, tt), 0.1999355085f);
    r = rn_add(rn_mul(r, tt), -0.3333314528f);
    r = rn_mul(rn_add(rn_mul(r, tt), 1.0f), t);
    uint32_t angle = uint32_t(int32_t(rn_mul(r, 683565275.6f)));  // 2^32 / 2 pi
    if (ay > ax) angle = 0x40000000u - angle;
    if (x < 0.0f) angle = 0x80000000u - angle;
    return y < 0.0f ? 0u - angle : angle;
}

// ------------------------------------------------------------------------------------------------------------------- pairs

struct TurningPair {
    int first, second;  // channels
    uint32_t turn;      // from one token to the next, a multiple of 2^12
    uint32_t phase;     // of the page's first token, a multiple of 2^18
    float amplitude;    // its fp32 has 6 bits of mantissa
};

// As 64 bits, lowest first: first channel 8, second channel 8, turn 20, phase 14, amplitude 14 (the exponent and 6 bits of the
// mantissa). 0: no pair.
inline constexpr int kTurnShift = 12, kPhaseShift = 18, kAmplitudeShift = 17;

TA_HD inline TurningPair unpack_turning(uint64_t code) {
    const uint32_t low = uint32_t(code), high = uint32_t(code >> 32);
    return {int(low & 255), int(low >> 8 & 255), (low >> 16 | (high & 15) << 16) << kTurnShift,
            (high >> 4 & 0x3fff) << kPhaseShift, std::bit_cast<float>(high >> 18 << kAmplitudeShift)};
}

// Rounded to what the code has. The amplitude is from kLeastTurning to kMostTurning.
TA_HD inline uint64_t pack_turning(const TurningPair& p) {
    const uint32_t turn = (p.turn + (1u << (kTurnShift - 1))) >> kTurnShift & 0xfffff;
    const uint32_t phase = (p.phase + (1u << (kPhaseShift - 1))) >> kPhaseShift & 0x3fff;
    const uint32_t amplitude = (std::bit_cast<uint32_t>(p.amplitude) + (1u << (kAmplitudeShift - 1))) >> kAmplitudeShift;
    return uint64_t(turn >> 16 | phase << 4 | amplitude << 18) << 32 | uint32_t(p.first) | uint32_t(p.second) << 8 | turn << 16;
}

// The values of a pair for its two channels at a token.
struct TurningValues {
    float first, second;
};
TA_HD inline TurningValues turning_values(const TurningPair& p, int token) {
    const SinCos at = turn_sin_cos(p.phase + p.turn * uint32_t(token));
    return {rn_mul(p.amplitude, at.cos), rn_mul(p.amplitude, at.sin)};
}

// The pairs of a page: those that there are come first.
struct TurningPairs {
    uint64_t code[kTurningPairs] = {};
    TA_HD bool any() const { return code[0] != 0; }
    TA_HD bool operator==(const TurningPairs& other) const {
        bool same = true;
        for (int n = 0; n < kTurningPairs; ++n) same &= code[n] == other.code[n];
        return same;
    }
    // Byte t of their 64, little endian.
    TA_HD uint8_t byte(int t) const { return uint8_t(code[t / 8] >> (t % 8 * 8)); }
    TA_HD void set_byte(int t, uint8_t x) { code[t / 8] |= uint64_t(x) << (t % 8 * 8); }
};

// The K scale of token t in a token page: its lowest byte is the page's.
TA_HD inline float scale_with_turning(float scale, const TurningPairs& pairs, int t) {
    if (pairs.any() && scale == 0.0f) scale = stage1_scale(kMinAmax, kStage1Levels);  // the byte alone would be denormal
    return std::bit_cast<float>((std::bit_cast<uint32_t>(scale) & ~255u) | pairs.byte(t));
}

// In a page's piece. All 64 scales of a token page have their byte, those of missing tokens too.
TA_HD inline TurningPairs turning_of_scales(const uint8_t* k_scales) {
    TurningPairs out;
    for (int t = 0; t < kPageTokens; ++t) out.set_byte(t, k_scales[4 * t]);
    return out;
}
TA_HD inline TurningPairs turning_of_tokens(const uint8_t* piece, const TokenLayout& layout) {
    return turning_of_scales(piece + layout.k_scale());
}
TA_HD inline TurningPairs turning_of_channel(const uint8_t* piece, const ChannelLayout& layout) {
    if (layout.k_bits == 8) return turning_of_scales(piece + layout.k_parameters());
    TurningPairs out;
    memcpy(out.code, piece + layout.k_turning(), kTurningBytes);
    return out;
}
// Stores the bytes of missing tokens, from `first` on. Their scales have nothing else in them.
TA_HD inline void store_turning_of_missing(const TurningPairs& pairs, int first, const TokenLayout& layout, uint8_t* piece) {
    for (int t = first; t < kPageTokens; ++t) {
        const uint32_t byte = pairs.byte(t);
        memcpy(piece + layout.k_scale() + 4 * t, &byte, sizeof byte);
    }
}

// ----------------------------------------------------------------------------------------------------------- finding them

// Sums are made in this order: 32 lanes, then halves.
TA_HD inline float sum_of_32(float (&lane)[32]) {
    for (int h = 16; h >= 1; h /= 2) {
        for (int k = 0; k < h; ++k) lane[k] = rn_add(lane[k], lane[k + h]);
    }
    return lane[0];
}

// A pair is taken if its square is at least an eighth of a row's square without such pairs, since a smaller pair hardly changes
// the steps of the other channels; and if its square is at least three quarters of the square of its two channels.
inline constexpr float kTurningShare = 8.0f, kTurningPart = 0.75f;
// If two pairs turn almost equally fast, a channel of one and a channel of the other look like a pair, too. But such a false
// pair leaves far more than the noise of two channels. So a pair that leaves at most twice the share of two channels is taken
// at once, and any other only when nothing better is left.
inline constexpr float kTurningRest = 4.0f;  // over head_dim, of a row
inline constexpr int kTurningRows =
    8;  // so many rows show the size of a row; with fewer rows a pair must have as much as all of the rest
inline constexpr float kLeastTurning = 0x1p-40f;  // amplitude: its square is a number of all bits
inline constexpr float kMostTurning = 0x1p58f;
inline constexpr int kTurningTries = 64;  // pairs of channels that are looked at in one page

// Channels can be a pair at these distances: the halves of all channels, of half of them, of a quarter; neighbours.
inline constexpr int kTurningDistances = 4;
TA_HD constexpr int turning_distance(int d, int n) {
    return n == 3 ? 1 : d >> (n + 1);
}
TA_HD constexpr bool is_first_of_pair(int d, int n, int c) {
    return n == 3 ? c % 2 == 0 : c < turning_distance(d, n);
}

// The first page of a sequence has no page before it from which it could take pairs. It begins anew when the number of its
// tokens reaches a power of two: the search runs again, and if it finds other pairs, K of the page's tokens is encoded again.
TA_HD constexpr bool turning_begins_anew(int have, int end) {
    return have > 0 && std::bit_width(unsigned(end)) > std::bit_width(unsigned(have));
}

// Rows of n, by number from the first, whose squares say where to look: 8 of them, evenly.
TA_HD constexpr int turning_samples(int n) {
    return n < kTurningRows ? n : kTurningRows;
}
TA_HD constexpr int turning_sample(int n, int i) {
    return i * (n < kTurningRows ? 1 : n / kTurningRows);
}

// From the squares of the sampled rows, summed per channel: the sum over all channels if channels that stand out had the mean
// of the others.
TA_HD inline float square_without_peaks(const float* square, int d) {
    float limit = __builtin_inff(), mean = 0.0f;
    for (int round = 0; round < 6; ++round) {
        float lane[32];
        int count = 0;
        for (int k = 0; k < 32; ++k) {
            lane[k] = 0.0f;
            for (int c = k; c < d; c += 32) {
                if (!(square[c] <= limit)) continue;
                lane[k] = rn_add(lane[k], square[c]);
                ++count;
            }
        }
        mean = count ? rn_div(sum_of_32(lane), float(count)) : 0.0f;
        limit = rn_mul(mean, 4.0f);
    }
    return rn_mul(mean, float(d));
}

// From the mean square of n rows with head_dim d: the square that a pair must have, and the most that it may leave to be taken
// at once.
struct TurningLimits {
    float least, rest;
    TA_HD TurningLimits(float row, int n, int d)
        : least(rn_mul(row, n < kTurningRows ? 1.0f : 1.0f / kTurningShare)),
          rest(rn_mul(row, rn_div(kTurningRest, float(d)))) {}
};

// The pairs that a search has taken, and those that it may take after it has examined all. Used by one thread; all 0 at first.
struct TurningChoice {
    uint64_t taken[kTurningPairs], left[kTurningTries];
    float rest[kTurningTries];  // what each of `left` leaves
    int n_taken, n_left;
    bool used[kMaxHeadDim];  // channels of those taken

    TA_HD bool is_full() const { return n_taken == kTurningPairs; }
    TA_HD void take(uint64_t code) {
        const TurningPair p = unpack_turning(code);
        taken[n_taken++] = code;
        used[p.first] = used[p.second] = true;
    }
    TA_HD void leave(uint64_t code, float what) {
        left[n_left] = code;
        rest[n_left++] = what;
    }
    // Takes of the pairs that are left, first the one that leaves least.
    TA_HD void take_left() {
        while (!is_full()) {
            int best = -1;
            for (int n = 0; n < n_left; ++n) {
                const TurningPair p = unpack_turning(left[n]);
                if (!used[p.first] && !used[p.second] && (best < 0 || rest[n] < rest[best])) best = n;
            }
            if (best < 0) return;
            take(left[best]);
        }
    }
};

// Which pairs of channels to examine, those with the largest squares first, without channels that are `used`.
struct TurningSearch {
    const float* square;
    int d;
    int samples;  // rows that `square` is of
    TurningLimits limits;
    bool tried[kTurningDistances][kMaxHeadDim] = {};
    int tries = 0;

    TA_HD TurningSearch(const float* s, int head_dim, int rows)
        : square(s),
          d(head_dim),
          samples(turning_samples(rows)),
          limits(rn_div(square_without_peaks(s, head_dim), float(turning_samples(rows))), rows, head_dim) {}

    // False where none is left.
    TA_HD bool next(const bool* used, int& first, int& second) {
        if (tries == kTurningTries) return false;
        float most = 0.0f;
        int distance = 0;
        first = -1;
        for (int n = 0; n < kTurningDistances; ++n) {
            for (int c = 0; c < d; ++c) {
                if (!is_first_of_pair(d, n, c) || tried[n][c]) continue;
                const int other = c + turning_distance(d, n);
                const float both = rn_add(square[c], square[other]);
                if (used[c] || used[other] || !(both > most && both >= rn_mul(limits.least, float(samples)))) continue;
                most = both, first = c, distance = n;
            }
        }
        if (first < 0) return false;
        second = first + turning_distance(d, distance);
        tried[distance][first] = true;
        ++tries;
        return true;
    }
};

// The values of two channels at the tokens of a page, 0 from n on.
struct TurningSeries {
    float x[kPageTokens], y[kPageTokens];
    int n;
};

// The mean of the series turned back by `turn` a token: of tokens [begin, end), times their number.
struct TurningSum {
    float re, im;
};
inline TurningSum turned_back(const TurningSeries& s, uint32_t turn, int begin, int end) {
    float re[32] = {}, im[32] = {};
    for (int t = 0; t < kPageTokens; ++t) {
        if (t < begin || t >= end) continue;
        const SinCos at = turn_sin_cos(turn * uint32_t(t));
        re[t % 32] = rn_add(re[t % 32], rn_add(rn_mul(s.x[t], at.cos), rn_mul(s.y[t], at.sin)));
        im[t % 32] = rn_add(im[t % 32], rn_sub(rn_mul(s.y[t], at.cos), rn_mul(s.x[t], at.sin)));
    }
    return {sum_of_32(re), sum_of_32(im)};
}

// The products of neighbours. Its angle is how far the series turns from token to token.
inline TurningSum sum_of_neighbours(const TurningSeries& s) {
    float re[32] = {}, im[32] = {};
    for (int t = 0; t + 1 < s.n; ++t) {
        re[t % 32] = rn_add(re[t % 32], rn_add(rn_mul(s.x[t + 1], s.x[t]), rn_mul(s.y[t + 1], s.y[t])));
        im[t % 32] = rn_add(im[t % 32], rn_sub(rn_mul(s.y[t + 1], s.x[t]), rn_mul(s.x[t + 1], s.y[t])));
    }
    return {sum_of_32(re), sum_of_32(im)};
}

// The turn, corrected by how far the second half of the series is off from the first. It has the bits that the code has.
TA_HD inline uint32_t corrected_turn(uint32_t turn, TurningSum first, TurningSum second, int half) {
    const uint32_t off = turn_of(rn_add(rn_mul(second.re, first.re), rn_mul(second.im, first.im)),
                                 rn_sub(rn_mul(second.im, first.re), rn_mul(second.re, first.im)));
    return (turn + uint32_t(int32_t(off) / half) + (1u << (kTurnShift - 1))) & ~((1u << kTurnShift) - 1);
}

// Sets phase and amplitude by the sum of n tokens.
TA_HD inline void anchor(TurningPair& p, TurningSum sum, int n) {
    const float re = rn_div(sum.re, float(n)), im = rn_div(sum.im, float(n));
    p.phase = turn_of(re, im);
    p.amplitude = rn_sqrt(rn_add(rn_mul(re, re), rn_mul(im, im)));
}

// Is what was fitted to n tokens, whose squares add up to `all`, a pair to be taken?
TA_HD inline bool is_turning(const TurningPair& p, int n, float all, const TurningLimits& limits) {
    const float square = rn_mul(p.amplitude, p.amplitude);
    return p.amplitude >= kLeastTurning && square >= limits.least && rn_mul(square, float(n)) >= rn_mul(all, kTurningPart);
}

// The square per token that the pair leaves, less what rounding makes of it.
TA_HD inline float turning_rest(const TurningPair& p, int n, float all) {
    return rn_sub(rn_div(all, float(n)), rn_mul(rn_mul(p.amplitude, p.amplitude), 1.0f + 0x1p-20f));
}

// From the sum of the products of neighbours: can the series be a pair? If not, it is not worth a fit.
TA_HD inline bool may_turn(TurningSum neighbours, int n, float all) {
    const float re = std::fabs(neighbours.re), im = std::fabs(neighbours.im);
    return n < kTurningRows || rn_mul(re > im ? re : im, 4.0f) >= all;
}

// How far the values of a channel spread. It decides the steps of a page's codes and, to a lesser degree, of a token's.
struct TurningSpread {
    float low = __builtin_inff(), high = -__builtin_inff();
    TA_HD void see(const TurningSpread& more) {
        low = more.low < low ? more.low : low;
        high = more.high > high ? more.high : high;
    }
    TA_HD void see(float x) { see(TurningSpread{x, x}); }
    TA_HD float size() const {
        const float most = high > -low ? high : -low;
        return rn_add(rn_sub(high, low), rn_mul(most, 0.125f));
    }
};

// Carries a pair of the page before into a page. `sum` is the sum of the page's first n tokens, turned back by the pair's turn.
// The pair's own prediction counts as one token more, unless the tokens contradict it. False: the pair does not continue.
TA_HD inline bool carry(TurningPair& p, TurningSum sum, int n) {
    const TurningValues expected = turning_values(p, kPageTokens);
    const float re = rn_sub(rn_div(sum.re, float(n)), expected.first), im = rn_sub(rn_div(sum.im, float(n)), expected.second);
    const float before = rn_mul(p.amplitude, p.amplitude);
    if (rn_mul(rn_add(rn_mul(re, re), rn_mul(im, im)), 4.0f) <= before) {
        sum.re = rn_add(sum.re, expected.first);
        sum.im = rn_add(sum.im, expected.second);
        ++n;
    }
    anchor(p, sum, n);
    return p.amplitude >= kLeastTurning && rn_mul(rn_mul(p.amplitude, p.amplitude), 16.0f) >= before;
}

inline float sum_of_squares(const TurningSeries& s) {
    float lane[32] = {};
    for (int t = 0; t < s.n; ++t) {
        lane[t % 32] = rn_add(lane[t % 32], rn_add(rn_mul(s.x[t], s.x[t]), rn_mul(s.y[t], s.y[t])));
    }
    return sum_of_32(lane);
}

// Fits a pair to a series whose squares add up to `all`; of amplitude 0 if it is none. One token has a constant.
inline TurningPair fit_turning(const TurningSeries& s, int first, int second, float all) {
    const TurningSum neighbours = sum_of_neighbours(s);
    TurningPair p{first, second, turn_of(neighbours.re, neighbours.im), 0, 0.0f};
    if (!may_turn(neighbours, s.n, all)) return p;
    const int half = s.n / 2;
    if (half > 0)
        p.turn = corrected_turn(p.turn, turned_back(s, p.turn, 0, half), turned_back(s, p.turn, half, 2 * half), half);
    anchor(p, turned_back(s, p.turn, 0, s.n), s.n);
    return p;
}

// Do the series' values spread less without the pair? They do not if positions jump, so that the pair fits only some tokens.
inline bool turning_helps(const TurningSeries& s, const TurningPair& p) {
    TurningSpread given[2], rest[2];
    for (int t = 0; t < s.n; ++t) {
        const TurningValues at = turning_values(p, t);
        given[0].see(s.x[t]);
        given[1].see(s.y[t]);
        rest[0].see(rn_sub(s.x[t], at.first));
        rest[1].see(rn_sub(s.y[t], at.second));
    }
    return rn_add(rest[0].size(), rest[1].size()) < rn_add(given[0].size(), given[1].size());
}

}  // namespace ta
