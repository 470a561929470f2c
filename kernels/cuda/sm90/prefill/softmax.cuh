// Scores to P. P is u8 in units of 1/255 of the largest P of its row within the block of keys, P being 2^(score + log2 of V's
// scale). A block's product with V is exact in int32 and is added to O, in fp32 in units
// of 2^m, m a reference of the row's that hardly ever changes.
//
// Scores come to the exponential as 16-bit integers in 1/112 of an octave, two to a register: 1024 steps, what fp16 has in [1,
// 2), span P's 8 bits. Three ways there:
//   fast_scores     uniform pages: one multiply-add and half a byte permutation per score
//   token_scores    scales per token: a conversion, two fp32 multiply-adds and half a permutation
//   general_scores  softcap, ALiBi, scores of hundreds of octaves: fp32 to the end
// l is summed from P, times 1/V's scale, or in fp32 from the 16-bit scores (exact_sums) where LSE is asked for or where V's
// scales lie too far apart for that.
#pragma once

#include <climits>

#include "kernels/cuda/sm90/prefill/query.cuh"

namespace ta::cuda::prefill {

inline constexpr int kHighest = 16256;       // up to here a maximum can be taken off any score without leaving 16 bits
inline constexpr int kTokenHighest = 12000;  // of scores with scales per token: what is masked stays far below
inline constexpr int kOctavesApart = 3;      // V's scales in a block: further, P has too few levels left for a sum of the lower
inline constexpr int kLowestOne = 0x3C00;    // fp16 1.0; 1.0 + 1023 / 1024 is the maximum
inline constexpr float kRaise = 16.0f;       // a block this many octaves above the reference becomes the reference

// Scores of one block on their way to P.
struct Scores {
    uint32_t y[2][16];   // [row][j]: columns 8 j + 2 i and the next
    uint32_t offset[2];  // makes y a fp16 number in [1, 2), twice
    float inverse[2];    // factor of the page's sum of P in l; 0 where l has the page already
    int top[2];          // the row's maximum of y, equal in the quad
    float m[2];          // the same in octaves
    float l[2];          // to be added to l, in units of 2^m
};

TA_DEVICE uint32_t twice(int x) {
    return uint32_t(x & 0xffff) * 0x10001u;
}

// 255 * 2^((f - 2047/1024) 1024/112) on the low bytes of 1024 + P. The cubic fits its fourth root such that P has the least
// squared error with these very roundings (0.337 of a step rms; 0.295 would be rounding alone); it never exceeds 255.
TA_DEVICE uint32_t exponential(uint32_t f) {
    const half2 x = *reinterpret_cast<half2*>(&f);
    const half2 c3 = __half2half2(__ushort_as_half(0x3e3c)), c2 = __half2half2(__ushort_as_half(0xc4ba));
    const half2 c1 = __half2half2(__ushort_as_half(0x4680)), c0 = __half2half2(__ushort_as_half(0xc11f));
    half2 r = __hfma2(x, c3, c2);
    r = __hfma2(r, x, c1);
    r = __hfma2(r, x, c0);
    r = __hmul2(r, r);
    r = __hfma2(r, r, __float2half2_rn(1024.0f));
    return *reinterpret_cast<uint32_t*>(&r);
}

// P as operand A of the four products with V, and its sums over the lane's columns of a page: [row][page].
TA_DEVICE void make_p(const Scores& scores, uint32_t (&p)[4][4], uint32_t (&sums)[2][2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        sums[row][0] = sums[row][1] = 0;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            uint32_t e[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                e[h] = exponential(__viaddmax_s16x2(scores.y[row][2 * n + h], scores.offset[row], twice(kLowestOne)));
            const uint32_t word = __byte_perm(e[0], e[1], 0x6420);
            p[n / 2][2 * (n % 2) + row] = word;
            sums[row][n / 4] = __dp4a(word, 0x01010101u, sums[row][n / 4]);
        }
    }
}

// The fractions f of V's zero points add f / 8 of a page's sum of P to a channel. As operand A of one more product with V: the
// sum / 8 in base 16, low digit for the byte f, the rest for the byte 16 f.
TA_DEVICE void operand_of_sums(const uint32_t (&sums)[2][2], int i, uint32_t (&a)[4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        uint32_t both = sums[row][0] | sums[row][1] << 16;  // up to 64 * 255 each
        both += __shfl_xor_sync(~0u, both, 1);
        both += __shfl_xor_sync(~0u, both, 2);
        const uint32_t eighths = ((both + 0x00040004u) >> 3) & 0x1fff1fffu;
        const uint32_t digits = (eighths & 0x000f000fu) | (eighths << 4 & 0xff00ff00u);
        a[row] = i == 0 ? digits : 0;
        a[2 + row] = 0;
    }
}

// l of P and the weights of V's scales, where they are not one for a page. The products with P are exact.
TA_DEVICE void weigh(const uint32_t (&p)[4][4], const BlockScales& scales, int i, Scores& scores) {
#pragma unroll
    for (int page = 0; page < 2; ++page) {
        if (scales.v_spread[page] == 0.0f) {
            scores.inverse[page] = scales.v_inverse[page];
            continue;
        }
        const uint4 high = *reinterpret_cast<const uint4*>(scales.v_weight[0][i] + 16 * page);
        const uint4 low = *reinterpret_cast<const uint4*>(scales.v_weight[1][i] + 16 * page);
        const uint32_t h[4] = {high.x, high.y, high.z, high.w}, l[4] = {low.x, low.y, low.z, low.w};
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t sum[2] = {};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const uint32_t word = p[2 * page + n / 2][2 * (n % 2) + row];
                sum[0] = __dp4a(word, h[n], sum[0]);
                sum[1] = __dp4a(word, l[n], sum[1]);
            }
            scores.l[row] = fmaf(float(sum[0] * 256u + sum[1]), scales.v_unit[page], scores.l[row]);
        }
    }
}

// The 16-bit path's constants for a block.
struct Fast {
    int factor[2][2];  // [row][page]: y = score * factor + addend, the high half counts
    int addend[2];     // [page]
    float bound;       // of |y|; infinite, or no number, where the path cannot take the block
};

// `info` is that of row g, info + 8 that of row g + 8.
TA_DEVICE Fast make_fast(const RowInfo* info, const WarpLimits& limits, const BlockScales& scales) {
    Fast fast;
#pragma unroll
    for (int page = 0; page < 2; ++page) {
        fast.addend[page] = scales.v_page[page];
#pragma unroll
        for (int row = 0; row < 2; ++row) fast.factor[row][page] = __float2int_rn(info[8 * row].scale * scales.k_page[page]);
    }
    const bool uniform = scales.v_spread[0] == 0.0f && scales.v_spread[1] == 0.0f;
    const float bound = fmaf(limits.largest, fmaxf(scales.k_page[0], scales.k_page[1]),
                             fmaxf(fabsf(float(fast.addend[0])), fabsf(float(fast.addend[1]))));
    fast.bound = uniform ? bound : INFINITY;
    return fast;
}

// Are V's scales too far apart for a sum of P?
TA_DEVICE bool are_apart(const Fast& fast, const Scores& scores) {
    return abs(fast.addend[0] - fast.addend[1]) > kOctavesApart * int(kFine) && scores.inverse[1] != 0.0f;
}
// Octaves between V's scales in the block, or a little more.
TA_DEVICE float octaves_of_v(const BlockScales& scales) {
    const float pages = scales.v_inverse[1] == 0.0f ? 0.0f : fabsf(float(scales.v_page[0]) - float(scales.v_page[1]));
    return fmaf(pages, 1.0f / kFine, fmaxf(scales.v_spread[0], scales.v_spread[1]));
}

// Can token_scores take the block?
TA_DEVICE bool takes_tokens(const WarpLimits& limits, const BlockScales& scales) {
    const float k = fmaxf(scales.k_largest[0], scales.k_largest[1]), v = fmaxf(scales.v_largest[0], scales.v_largest[1]);
    return fmaf(limits.largest * float(kGrid), k, v) < float(kTokenHighest);
}

TA_DEVICE void find_limits(const AttendArgs& args, const RowInfo* info, WarpLimits& limits, int lane) {
    constexpr float kFractionsToo = 1.01f;  // K's fractions add less than a hundredth to what the codes can
    const int begin = __reduce_max_sync(~0u, max(info[0].key_begin, info[8].key_begin));
    const int end = __reduce_min_sync(~0u, min(info[0].key_end, info[8].key_end));
    const float largest = fmaxf(info[0].magnitude * info[0].scale, info[8].magnitude * info[8].scale) * kFractionsToo;
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));  // in order, being no less than 0
    const bool general = args.softcap > 0.0f || args.alibi_slope;
    if (lane == 0) limits = {begin, end, general ? INFINITY : __uint_as_float(bits), 0};
    __syncwarp();
}

// The largest of a row's 16-bit scores over the quad, rows g and g + 8 in the low and the high half; of columns 8 kFirst to 8
// kEnd.
template <int kFirst, int kEnd>
TA_DEVICE uint32_t largest_of_rows(const Scores& scores) {
    uint32_t m[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        m[row] = scores.y[row][kFirst];
#pragma unroll
        for (int n = kFirst + 1; n < kEnd - 1; n += 2) m[row] = __vimax3_s16x2(m[row], scores.y[row][n], scores.y[row][n + 1]);
        m[row] = __vmaxs2(m[row], scores.y[row][kEnd - 1]);
    }
    uint32_t both = __vmaxs2(__byte_perm(m[0], m[1], 0x5410), __byte_perm(m[0], m[1], 0x7632));
    both = __vmaxs2(both, __shfl_xor_sync(~0u, both, 1));
    return __vmaxs2(both, __shfl_xor_sync(~0u, both, 2));
}

// The rows' maxima and what follows from them. y is `bias` more than the score; kNothing stands for what is masked.
template <int kNothing>
TA_DEVICE void find_maxima(int bias, bool masked, Scores& out) {
    const uint32_t both = largest_of_rows<0, 16>(out);
    const int largest[2] = {int16_t(both), int(both) >> 16};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        out.top[row] = largest[row];
        out.offset[row] = __byte_perm(uint32_t(kLowestOne + 1023 - out.top[row]), 0, 0x1010);
        out.m[row] = float(out.top[row] - bias) * (1.0f / kGrid);
        out.l[row] = 0.0f;
        if (masked && largest[row] == kNothing) {
            out.offset[row] = 0;  // no key: every P is less than 1/2
            out.m[row] = kNever;
        }
    }
}

// Which keys of a block rows g and g + 8 see, counted from the lane's first column.
struct Seen {
    int begin[2], end[2];
    TA_DEVICE Seen(const RowInfo* info, int key, int i) {
        const int first = key + lane_token(i);
#pragma unroll
        for (int row = 0; row < 2; ++row)
            begin[row] = info[8 * row].key_begin - first, end[row] = info[8 * row].key_end - first;
    }
    TA_DEVICE bool has(int row, int token) const {
        return token >= begin[row] && token < end[row];
    }
};

template <bool kMasked>
TA_DEVICE void pack_scores(const int32_t (&s)[64], const int (&factor)[2][2], const int (&addend)[2][2], const RowInfo* info,
                           int key, int i, Scores& out) {
    const Seen seen(info, key, i);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            int y[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                y[e] = s[4 * j + 2 * row + e] * factor[row][j / 8] + addend[row][j / 8];
                if (kMasked && !seen.has(row, column_token(j, e))) y[e] = INT_MIN;
            }
            out.y[row][j] = __byte_perm(uint32_t(y[0]), uint32_t(y[1]), 0x7632);
        }
    }
}

// SAS: what lies more than 6 below the row's maximum so far has no weight. (Its table and cubic differ from 2^x by a sixth of a
// step at most.)
TA_DEVICE void cut_off(const Fast& fast, RowInfo* info, Scores& scores) {
    constexpr float kCut = 6.0f * 1.44269504f * kGrid;
    const uint32_t both[2] = {largest_of_rows<0, 8>(scores), largest_of_rows<8, 16>(scores)};
    int cut[2][2];
    bool any = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float natural = info[8 * row].natural * kGrid, v[2];
#pragma unroll
        for (int page = 0; page < 2; ++page) {
            const int largest = row ? int(both[page]) >> 16 : int16_t(both[page]);
            v[page] = float(fast.addend[page]) * 0x1p-16f;
            if (largest != SHRT_MIN) natural = fmaxf(natural, float(largest) - v[page]);
        }
#pragma unroll
        for (int page = 0; page < 2; ++page) {
            cut[row][page] = __float2int_ru(fminf(fmaxf(natural + v[page] - kCut, -float(kHighest)), float(kHighest)));
            any = any || cut[row][page] > scores.top[row] - 1012;  // below, P is 0 in any case
        }
        info[8 * row].natural = natural * (1.0f / kGrid);  // the quad's lanes write the same
    }
    if (!__any_sync(~0u, any)) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            const uint32_t y = scores.y[row][n];
            const uint32_t below = __vmaxs2(__viaddmin_s16x2(y, twice(-cut[row][n / 8]), 0), ~0u);  // -1 or 0
            scores.y[row][n] = (y & ~below) | (below & 0x80008000u);
        }
    }
}

// The 16-bit path over the block of scores from `key` on. `fraction` are the sums of K's zero point
// fractions for (row, page), in eighths.
template <bool kFractions>
TA_DEVICE void fast_scores(const int32_t (&s)[64], const Fast& fast, RowInfo* info, const BlockScales& scales, bool sas,
                           bool masked, int key, int i, const float (&fraction)[2][2], Scores& out) {
    int addend[2][2];
#pragma unroll
    for (int page = 0; page < 2; ++page) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            addend[row][page] = fast.addend[page];
            if (kFractions) addend[row][page] += __float2int_rn(fraction[row][page] * 0.125f * float(fast.factor[row][page]));
        }
        out.inverse[page] = scales.v_inverse[page];
    }
    if (masked) {
        pack_scores<true>(s, fast.factor, addend, info, key, i, out);
    } else {
        pack_scores<false>(s, fast.factor, addend, info, key, i, out);
    }
    find_maxima<SHRT_MIN>(0, masked, out);
    if (sas) cut_off(fast, info, out);
}

// The sum with the offset must not leave 16 bits below: what is too small for P goes to the lowest value that counts.
TA_DEVICE void raise_lowest(Scores& scores) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const uint32_t lowest = twice(max(scores.top[row] - 1023, SHRT_MIN));
#pragma unroll
        for (int n = 0; n < 16; ++n) scores.y[row][n] = __vmaxs2(scores.y[row][n], lowest);
    }
}

template <bool kFractions, bool kMasked>
TA_DEVICE void pack_token_scores(const int32_t (&s)[64], const RowInfo* info, const BlockScales& scales,
                                 const float (&addend)[2][2], int key, int i, Scores& out) {
    const Seen seen(info, key, i);
    const float unit[2] = {info[0].scale * kGrid, info[8].scale * kGrid};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const TokenScales token = scales.token[j][i];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t y[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float x = float(s[4 * j + 2 * row + e]);
                const float score = kFractions ? fmaf(x, token.k[e], addend[row][j / 8]) : x * token.k[e];
                y[e] = __float_as_uint(fmaf(score, unit[row], token.v[e]));
                if (kMasked && !seen.has(row, column_token(j, e))) y[e] = 0;
            }
            out.y[row][j] = __byte_perm(y[0], y[1], 0x6521);
        }
    }
}

// Tokens with scales of their own.
template <bool kFractions>
TA_DEVICE void token_scores(const int32_t (&s)[64], const RowInfo* info, const BlockScales& scales, bool masked, int key, int i,
                            const float (&fraction)[2][2], Scores& out) {
    float addend[2][2] = {};
    if (kFractions) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float f = fraction[n / 2][n % 2];
            addend[n / 2][n % 2] = f == 0.0f ? 0.0f : f * (0.125f / kFine) * scales.k_page[n % 2];  // token pages have none
        }
    }
    if (masked) {
        pack_token_scores<kFractions, true>(s, info, scales, addend, key, i, out);
    } else {
        pack_token_scores<kFractions, false>(s, info, scales, addend, key, i, out);
    }
    out.inverse[0] = out.inverse[1] = 0.0f;
    find_maxima<0>(kTokenBias, masked, out);
}

TA_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// l in fp32 from the 16-bit scores.
TA_DEVICE void exact_sums(const BlockScales& scales, int i, Scores& out) {
    constexpr float kStep = 1.0f / kGrid;
    // A score becomes a float by its exponent's bits. The product with kStep is so large that the sum with it, rounded, is off
    // by up to 1/256 octave, but for all scores alike.
    constexpr float kZero = 8388608.0f + 32768.0f;
    const float top[2] = {kZero + float(out.top[0]), kZero + float(out.top[1])};
    const float shift[2] = {-(top[0] * kStep), -(top[1] * kStep)};
    float l[2] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 v = *reinterpret_cast<const float2*>(scales.v_token + 8 * j + 2 * i);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const uint32_t y = out.y[row][j] ^ 0x80008000u;
            const float y0 = __uint_as_float(__byte_perm(y, 0x4B00, 0x5410)),
                        y1 = __uint_as_float(__byte_perm(y, 0x4B00, 0x5432));
            l[row] = fmaf(exp2_approx(fmaf(y0, kStep, shift[row])), v.x, l[row]);
            l[row] = fmaf(exp2_approx(fmaf(y1, kStep, shift[row])), v.y, l[row]);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float off = fmaf(top[row], kStep, shift[row]);
        out.l[row] = out.m[row] == kNever ? 0.0f : l[row] * exp2_approx(-off) * 255.0f;
        out.inverse[row] = 0.0f;
    }
}

TA_DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 of SAS's e^-y, -inf beyond its cutoff; u = y log2 e >= 0.
TA_DEVICE float log2_sas(float u) {
    const float y = u * 0.693147181f;
    if (!(y <= 6.0f)) return -INFINITY;
    const float n = floorf(y), f = y - n;
    float r = fmaf(-0.1025f, f, 0.4626f);
    r = fmaf(r, f, -0.9922f);
    r = fmaf(r, f, 0.9996f);
    return log2_approx(r) - n * 1.44269504f;
}

// What fp32 scores need besides the rows: uniform over the call.
struct ScoreOptions {
    float softcap;  // in log2 units; 0: off
    float softcap_inverse;
    bool sas;
};

TA_DEVICE ScoreOptions score_options(const AttendArgs& args) {
    const bool capped = args.softcap > 0.0f;
    return {args.softcap * 1.44269504f, capped ? 1.0f / args.softcap : 0.0f, args.exp == ExpMode::kSas};
}

TA_DEVICE float soft_capped(float x, const ScoreOptions& o) {
    const float y = fabsf(x * o.softcap_inverse), e = exp2_approx(-2.0f * 1.44269504f * y);
    return copysignf(o.softcap * __fdividef(1.0f - e, 1.0f + e), x);
}

// The fp32 path: every scale, mask and option. Scores of `s` are replaced. l is summed from P before its rounding.
template <bool kFractions>
TA_DEVICE void general_scores(int32_t (&s)[64], RowInfo* row_info, const BlockScales& scales, const ScoreOptions& options,
                              bool masked, int key, int i, const float (&fraction)[2][2], Scores& out) {
    const RowInfo info[2] = {row_info[0], row_info[8]};
    const int first_key = key + lane_token(i);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const TokenScales token = scales.token[j][i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = e / 2, h = e % 2;
            float x = float(s[4 * j + e]);
            if (kFractions) x = fmaf(fraction[row][j / 8], 0.125f, x);
            x *= info[row].scale * token.k[h];
            if (options.softcap > 0.0f) x = soft_capped(x + info[row].bias, options);
            x = fmaf(info[row].slope, float(first_key + column_token(j, h) - info[row].position), x);
            s[4 * j + e] = __float_as_int(x);
        }
    }
    if (masked) {
        const Seen seen(row_info, key, i);
#pragma unroll
        for (int n = 0; n < 64; ++n) {
            if (!seen.has(n / 2 % 2, column_token(n / 4, n % 2))) s[n] = __float_as_int(-INFINITY);
        }
    }
    float top[2] = {-INFINITY, -INFINITY}, natural[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const TokenScales token = scales.token[j][i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float x = __int_as_float(s[4 * j + e]);
            natural[e / 2] = fmaxf(natural[e / 2], x);
            top[e / 2] = fmaxf(top[e / 2], x + (token.v[e % 2] - kTokenZero) * (1.0f / kGrid));
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        out.m[row] = fmaxf(quad_max(top[row]), kNever);
        natural[row] = fmaxf(info[row].natural, quad_max(natural[row]));
        out.offset[row] = twice(kLowestOne + 1023);
        out.l[row] = 0.0f;
        out.inverse[row] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const TokenScales token = scales.token[j][i];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t y[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = __int_as_float(s[4 * j + 2 * row + h]);
                if (options.sas && x != -INFINITY) x = natural[row] + log2_sas(natural[row] - x);
                x -= out.m[row];
                out.l[row] += exp2_approx(x - 32.0f);
                const float steps = fmaf(x, float(kGrid), token.v[h] - kTokenZero) + kInteger;
                y[h] = __float_as_uint(fmaxf(steps, kInteger - 20000.0f));  // at most 0
            }
            out.y[row][j] = __byte_perm(y[0], y[1], 0x5410);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        out.l[row] *= 255.0f;
        if (options.sas) row_info[8 * row].natural = natural[row];  // the quad's lanes write the same
    }
}

// O as it is kept between blocks: times 255 kOutUnit / 2^m. An int32 below 2^23 is, bit by bit, a denormal fp32 of 2^-149 times
// its value, so one FFMA adds a block to O.
inline constexpr float kOutUnit = 0x1p-49f;

// Takes the terms of 128 out of O, and makes m[row] the reference of a row where it is far above that. `info` as in make_fast;
// the quad's lanes write the same.
template <int N>
TA_DEVICE void settle(RowInfo* info, LaneSums& sums, const float (&m)[2], float (&o)[N]) {
    float factor[2], off[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float before = info[8 * row].reference, reference = m[row] > before + kRaise ? m[row] : before;
        factor[row] = exp2_approx(before - reference);
        off[row] = quad_sum(sums.c[row]) * (-128.0f * kOutUnit) * factor[row];
        sums.l[row] *= factor[row];
        sums.c[row] = 0.0f;
        __syncwarp();
        info[8 * row].reference = reference;
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n) o[n] = fmaf(o[n], factor[n / 2 % 2], off[n / 2 % 2]);
}

// The block's sums, and the factors by which its product with V goes into O. above[row]: the block's maximum less the
// reference.
TA_DEVICE void add_sums(const Scores& scores, const uint32_t (&p)[2][2], const float (&above)[2], LaneSums& sums,
                        float (&factor)[2]) {
    LaneSums x = sums;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float unit = exp2_approx(above[row]);
        const float p0 = float(p[row][0]), p1 = float(p[row][1]);
        x.l[row] = fmaf(fmaf(p0, scores.inverse[0], fmaf(p1, scores.inverse[1], scores.l[row])), unit, x.l[row]);
        x.c[row] = fmaf(p0 + p1, unit, x.c[row]);
        factor[row] = unit * 0x1p100f;  // kOutUnit / 2^-149
    }
    sums = x;
}
// To o[first ...].
template <int N>
TA_DEVICE void add_product(const int32_t (&product)[32], const float (&factor)[2], float (&o)[N], int first) {
#pragma unroll
    for (int n = 0; n < 32; ++n)
        asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(o[first + n]) : "f"(__int_as_float(product[n])), "f"(factor[n / 2 % 2]));
}

}  // namespace ta::cuda::prefill
