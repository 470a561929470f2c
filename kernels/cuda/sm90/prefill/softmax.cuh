// Scores to P. P is u8 in units of 1/255 of the largest P of its row within the block of keys, P being 2^(score + log2 of V's
// scale). A block's product with V is exact in int32 and is added to O, in fp32 in units of 2^m, m a reference of the row's
// that hardly ever changes.
//
// Scores come to the exponential as 16-bit integers in 1/112 of an octave, two to a register: 1024 steps, what fp16 has in [1,
// 2), span P's 8 bits. Three ways there:
//   fast_scores     K's tokens have one scale in a page: one multiply-add and half a byte permutation per score
//   token_scores    K's scales differ: a conversion, two fp32 multiplications and additions and half a permutation
//   general_scores  softcap, ALiBi, scores of hundreds of octaves: fp32 to the end (general_scores.cuh)
// l is what the product with V makes of P and 1 / V's scale (shared.cuh), or is summed in fp32 from the 16-bit scores
// (exact_sums) where LSE is asked for or where V's scales lie too far apart for that.
#pragma once

#include <climits>

#include "kernels/cuda/common/half2.cuh"
#include "kernels/cuda/sm90/prefill/query.cuh"

namespace ta::cuda::prefill::sm90 {

inline constexpr int kTokenHighest = 12000;  // of scores with scales per token: what is masked stays far below
inline constexpr int kOctavesApart = 2;      // V's scales in a block: further, P has too few levels left for a sum of the lower
inline constexpr float kSmallV = -40.0f;     // log2 of V's scales: below, the product's l may underflow beside that of others
inline constexpr int kLowestOne = 0x3C00;    // fp16 1.0; 1.0 + 1023 / 1024 is the maximum
inline constexpr float kRaise = 16.0f;       // a block this many octaves above the reference becomes the reference

// Scores of one block on their way to P.
struct Scores {
    uint32_t y[2][16];      // [row][n]: word n
    uint32_t offset[2][2];  // [row][page]: makes y a fp16 number in [1, 2), twice
    uint32_t least[2][2];   // under SAS, as such a number, twice: what is below has no weight
    int top[2];             // the row's maximum of y, equal in the quad
    float m[2];             // the same in octaves, less what is added to scores
};

TA_DEVICE uint32_t twice(int x) {
    return uint32_t(x & 0xffff) * 0x10001u;
}

// 255 * 2^((f - 2047/1024) 1024/112) on the low bytes of 1024 + P. The cubic fits its fourth root such that P has the least
// squared error with these very roundings (0.337 of a step rms; 0.295 would be rounding alone); it never exceeds 255. `mask`: of
// the halves whose P is not 0.
TA_DEVICE uint32_t exponential(uint32_t f, uint32_t mask) {
    const half2 x = half2_of(f);
    const half2 c3 = __half2half2(__ushort_as_half(0x3e3c)), c2 = __half2half2(__ushort_as_half(0xc4ba));
    const half2 c1 = __half2half2(__ushort_as_half(0x4680)), c0 = __half2half2(__ushort_as_half(0xc11f));
    half2 r = __hfma2(x, c3, c2);
    r = __hfma2(r, x, c1);
    r = __hfma2(r, x, c0);
    r = half2_of(bits_of(__hmul2(r, r)) & mask);
    r = __hfma2(r, r, __float2half2_rn(1024.0f));
    return *reinterpret_cast<uint32_t*>(&r);
}

// The same in three instructions instead of five, of which ex2 holds its unit for 16 cycles a warp. fp16 has no constants
// closer to the line; it is 1/112 octave low, which 256.5 for 255 mends.
TA_DEVICE uint32_t exponential_by_ex2(uint32_t f, uint32_t mask) {
    const half2 slope = __float2half2_rn(9.140625f), offset = __float2half2_rn(-18.28125f);  // 1024/112
    const half2 x = __hfma2(half2_of(f), slope, offset);
    half2 r;
    asm("ex2.approx.f16x2 %0, %1;" : "=r"(*reinterpret_cast<uint32_t*>(&r)) : "r"(*reinterpret_cast<const uint32_t*>(&x)));
    r = __hfma2(half2_of(bits_of(r) & mask), __float2half2_rn(256.5f), __float2half2_rn(1024.0f));
    return *reinterpret_cast<uint32_t*>(&r);
}

// How much of P is made by ex2, in quarters: as much as its unit does beside what limits a path. With channel pages producers
// do, for whom every instruction less counts.
enum class Ex2 { kNone, kQuarter, kAll = 4 };

// P as operand A of the products with V, of which steps [kFrom, kTo) are made. kSas: what is below scores.least has none.
template <Ex2 kEx2 = Ex2::kNone, bool kSas = false, int kFrom = 0, int kTo = 4>
TA_DEVICE void make_p(const Scores& scores, uint32_t (&p)[4][4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int n = 2 * kFrom; n < 2 * kTo; ++n) {
            uint32_t e[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t x = __viaddmax_s16x2(scores.y[row][2 * n + h], scores.offset[row][n / 4], twice(kLowestOne));
                uint32_t mask = ~0u;
                if (kSas) mask = __hge2_mask(half2_of(x), half2_of(scores.least[row][n / 4]));
                e[h] = (2 * n + h) % 4 < int(kEx2) ? exponential_by_ex2(x, mask) : exponential(x, mask);
            }
            p[n / 2][2 * (n % 2) + row] = __byte_perm(e[0], e[1], 0x6420);
        }
    }
}

// Sums of P over a lane's columns, for a row's two pages: in the low and the high half.
TA_DEVICE uint32_t sums_of_pages(const uint32_t (&p)[4][4], int row) {
    uint32_t sums[2] = {};
#pragma unroll
    for (int n = 0; n < 8; ++n) sums[n / 4] = __dp4a(p[n / 2][2 * (n % 2) + row], 0x01010101u, sums[n / 4]);
    return sums[0] | sums[1] << 16;
}
// Their eighths to base 16, the low digit for the byte f of V's fractions, the rest for the byte 16 f.
TA_DEVICE uint32_t digits_of_sums(uint32_t sums) {
    const uint32_t eighths = ((sums + 0x00040004u) >> 3) & 0x1fff1fffu;
    return (eighths & 0x000f000fu) | (eighths << 4 & 0xff00ff00u);
}
// As operand A of a product with the fractions by mma.sync. Each lane's are those of its own columns: the product adds up the
// quad's.
TA_DEVICE void operand_of_sums(const uint32_t (&p)[4][4], uint32_t (&a)[2]) {
    a[0] = digits_of_sums(sums_of_pages(p, 0)), a[1] = digits_of_sums(sums_of_pages(p, 1));
}
// By wgmma, one step more of the product with V: the quad's, in the lane whose bytes are the stage's.
TA_DEVICE void step_of_sums(const uint32_t (&p)[4][4], int stage, int i, uint32_t (&a)[4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        uint32_t sums = sums_of_pages(p, row);
        sums += __shfl_xor_sync(~0u, sums, 1);
        sums += __shfl_xor_sync(~0u, sums, 2);
        a[row] = i == stage ? digits_of_sums(sums) : 0;
        a[2 + row] = 0;
    }
}

// Do V's tokens have one scale in each page?
TA_DEVICE bool pages_have_scales(const BlockScales& scales) {
    // For a page that does not exist the lowest is above the highest.
    return scales.v_highest[0] <= scales.v_lowest[0] && scales.v_highest[1] <= scales.v_lowest[1];
}

// The 16-bit path's factors: y = score * factor[row][page] + the token's addend, the high half counts.
struct Factors {
    int of[2][2];
    int addend[2];  // of the pages' tokens, or kNoAddend
    TA_DEVICE bool equal() const { return addend[0] != kNoAddend && addend[1] != kNoAddend; }
};
TA_DEVICE Factors find_factors(const LaneRows& rows, const BlockScales& scales) {
    Factors factors;
#pragma unroll
    for (int page = 0; page < 2; ++page) {
        factors.addend[page] = scales.v_page[page];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            // Less than 2^22 where the path can take the block.
            const float factor = fmaf(rows.scale[row], scales.k_page[page], kInteger);
            factors.of[row][page] = __float_as_int(factor) - __float_as_int(kInteger);
        }
    }
    return factors;
}

// The largest magnitude of log2 of a block's V scales.
TA_DEVICE float size_of_v(const BlockScales& scales) {
    return fmaxf(fmaxf(scales.v_highest[0], scales.v_highest[1]), -fminf(scales.v_lowest[0], scales.v_lowest[1]));
}
// The octaves between them; infinite where scales are so small that l must not be made from P.
TA_DEVICE float spread_of(const BlockScales& scales) {
    const float highest = fmaxf(scales.v_highest[0], scales.v_highest[1]),
                lowest = fminf(scales.v_lowest[0], scales.v_lowest[1]);
    return lowest < kSmallV ? INFINITY : highest - lowest;
}
// Are these too many for l to be made from P?
TA_DEVICE bool are_wide(const BlockScales& scales) {
    return spread_of(scales) > float(kOctavesApart);
}
// Do the scales of V's pages lie so far apart that one unit of P leaves too few levels for the weights of the lower one? If a
// page's scale comes from an outlier and its codes are small, these weights may be what counts.
TA_DEVICE bool pages_lie_apart(const BlockScales& scales) {
    const float first = scales.v_highest[0], second = scales.v_highest[1];
    const bool both = fminf(first, second) > -0.5f * kNoLog;
    return both && fabsf(first - second) > float(kOctavesApart);
}
// A bound of |y| in the 16-bit path; `largest` is of WarpLimits.
TA_DEVICE float bound_of(float largest, const BlockScales& scales, float v_size) {
    return fmaf(largest, fmaxf(scales.k_page[0], scales.k_page[1]), v_size * kFine);
}
// The same, before the block's scores are there; infinite or NaN if the scores are needed to decide.
TA_DEVICE float fast_bound(const WarpLimits& limits, const BlockScales& scales) {
    const float more = spread_of(scales) > float(kOctavesApart) ? INFINITY : 0.0f;
    return bound_of(limits.trusted, scales, size_of_v(scales)) + more;
}
// For blocks at which one has to look: true if the factors are fine enough to be mended.
TA_DEVICE bool can_be_mended(const LaneRows& rows, const BlockScales& scales) {
    constexpr float kFinest = kFewest / kFine;
    const float k = fminf(scales.k_coarse[0], scales.k_coarse[1]) * (1.0f / kCoarse);
    const auto fine = [&](float scale) { return scale * k >= kFinest || scale == 0.0f; };
    return __all_sync(~0u, fine(rows.scale[0]) && fine(rows.scale[1]));
}

// Once in a tile: whether the factors' rounding shows.
TA_DEVICE void decide(WarpLimits& limits, bool shows, int lane) {
    const bool undecided = limits.trusted == INFINITY;
    __syncwarp();
    if (undecided && lane == 0) limits.trusted = shows ? NAN : limits.largest;
    __syncwarp();
}

// Do K's tokens have scales of their own?
TA_DEVICE bool have_token_scales(const BlockScales& scales) {
    return fmaxf(scales.k_page[0], scales.k_page[1]) == INFINITY;
}
// Can token_scores take the block?
TA_DEVICE bool takes_tokens(const WarpLimits& limits, const BlockScales& scales) {
    const float k = fmaxf(scales.k_largest[0], scales.k_largest[1]);
    return fmaf(limits.largest, k, size_of_v(scales)) < float(kTokenHighest) / kGrid;
}

// Does a block in which nothing is masked have fractions and scores that fit into 16 bits? All that decides this is known
// before its scores are.
TA_DEVICE bool is_bare(const WarpLimits& limits, const BlockScales& scales) {
    const float4 k = *reinterpret_cast<const float4*>(scales.k_page), v = *reinterpret_cast<const float4*>(scales.v_highest);
    const bool fits = limits.largest * k.x < k.z && limits.largest * k.y < k.w;
    const float lowest = fminf(v.z, v.w);
    const bool near = fmaxf(v.x, v.y) - lowest <= float(kOctavesApart) && lowest >= kSmallV;
    return __any_sync(~0u, fits && near && (scales.channel[0] | scales.channel[1]));
}

TA_DEVICE void find_limits(const AttendArgs& args, const RowInfo* info, WarpLimits& limits, int lane) {
    constexpr float kFractionsToo = 1.01f;  // K's fractions add less than a hundredth to what the codes can
    const int begin = __reduce_max_sync(~0u, max(info[0].key_begin, info[8].key_begin));
    const int end = __reduce_min_sync(~0u, min(info[0].key_end, info[8].key_end));
    const float largest = fmaxf(info[0].magnitude * info[0].scale, info[8].magnitude * info[8].scale) * kFractionsToo;
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));  // in order, being no less than 0
    const bool general = args.softcap > 0.0f || args.alibi_slope;
    if (lane == 0) limits = {begin, end, general ? INFINITY : __uint_as_float(bits), INFINITY};
    __syncwarp();
}

TA_DEVICE void join_limits(const WarpLimits (&limits)[4], WarpLimits& out, int lane) {
    WarpLimits all = limits[0];
#pragma unroll
    for (int n = 1; n < 4; ++n) {
        all.begin = max(all.begin, limits[n].begin), all.end = min(all.end, limits[n].end);
        all.largest = fmaxf(all.largest, limits[n].largest);
    }
    if (lane == 0) out = all;
    __syncwarp();
}

// The addends of a page's 16-bit scores after they have been packed, [row][page], twice in a word.
struct Shifts {
    uint32_t of[2][2];
};

// The largest of a lane's 16-bit scores of a row and page, of even columns in the low half.
TA_DEVICE uint32_t largest_of_page(const Scores& scores, int row, int page) {
    const uint32_t* y = scores.y[row] + 8 * page;
    uint32_t m = y[0];
#pragma unroll
    for (int n = 1; n < 7; n += 2) m = __vimax3_s16x2(m, y[n], y[n + 1]);
    return __vmaxs2(m, y[7]);
}
// Over the quad, rows g and g + 8 in the low and the high half.
TA_DEVICE uint32_t largest_of_rows(uint32_t m0, uint32_t m1) {
    uint32_t both = __vmaxs2(__byte_perm(m0, m1, 0x5410), __byte_perm(m0, m1, 0x7632));
    both = __vmaxs2(both, __shfl_xor_sync(~0u, both, 1));
    return __vmaxs2(both, __shfl_xor_sync(~0u, both, 2));
}

// Sets the values that depend on the rows' maxima, of rows g and g + 8 in the low and the high half. y is the score plus
// `bias`; kNothing stands for masked scores. kShifted: y is to be shifted, which P's offsets see to.
template <int kNothing, bool kShifted = false>
TA_DEVICE void set_maxima(uint32_t both, int bias, bool masked, Scores& out, const Shifts& shifts = {}) {
    constexpr uint32_t kLowest = 0x80008000, kTop = kLowestOne + 1023;
    out.top[0] = int16_t(both), out.top[1] = int(both) >> 16;
    const uint32_t offset[2] = {__byte_perm(kTop - both, 0, 0x1010), __byte_perm((kTop << 16 | 0xffffu) - both, 0, 0x3232)};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        out.m[row] = float(out.top[row] - bias) * (1.0f / kGrid);
#pragma unroll
        for (int page = 0; page < 2; ++page)
            out.offset[row][page] = kShifted ? __viaddmax_s16x2(offset[row], shifts.of[row][page], kLowest) : offset[row];
        if (masked && out.top[row] == kNothing) {
            out.offset[row][0] = out.offset[row][1] = 0;  // no key: every P is less than 1/2
            out.m[row] = kNever;
        }
    }
}
template <int kNothing, bool kShifted = false>
TA_DEVICE void find_maxima(int bias, bool masked, Scores& out, const Shifts& shifts = {}) {
    constexpr uint32_t kLowest = 0x80008000;
    uint32_t m[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        m[row] = largest_of_page(out, row, 0);
        if (kShifted) m[row] = __viaddmax_s16x2(m[row], shifts.of[row][0], kLowest);
        const uint32_t second = largest_of_page(out, row, 1);
        m[row] = kShifted ? __viaddmax_s16x2(second, shifts.of[row][1], m[row]) : __vmaxs2(m[row], second);
    }
    set_maxima<kNothing, kShifted>(largest_of_rows(m[0], m[1]), bias, masked, out, shifts);
}
// The maxima of pages, for SAS.
struct PageMaxima {
    uint32_t of[2];
    TA_DEVICE explicit PageMaxima(const Scores& scores) {
#pragma unroll
        for (int page = 0; page < 2; ++page)
            of[page] = largest_of_rows(largest_of_page(scores, 0, page), largest_of_page(scores, 1, page));
    }
    TA_DEVICE uint32_t both() const {
        return __vmaxs2(of[0], of[1]);
    }
};

// A block whose pages lie apart is taken twice, a page at a time.
enum class Pass { kBothPages, kFirstPage, kSecondPage };

// Which keys of the block from `key` on are to be looked at: some are `masked`, for rows that do not see them or by the pass.
struct BlockMask {
    bool masked;
    int key;
    Pass pass;
};

// Which keys of a block rows g and g + 8 see, counted from the lane's first column.
struct Seen {
    uint32_t begin[2], end[2];  // twice: less the first token, the last
    Seen() = default;
    TA_DEVICE Seen(const RowInfo* info, int key, Pass pass, int i) {
        const int first = key + lane_token(i), from = key + (pass == Pass::kSecondPage ? kPageTokens : 0),
                  to = key + (pass == Pass::kFirstPage ? kPageTokens : kBlockTokens);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            begin[row] = twice(-min(max(max(info[8 * row].key_begin, from) - first, 0), 1000));
            end[row] = twice(min(max(min(info[8 * row].key_end, to) - first, 0), 1000) - 1);
        }
    }
    // All bits of the halves of a word of scores that the row does not see: columns j and j + 1.
    TA_DEVICE uint32_t hidden(int row, int j, int e) const {
        const uint32_t tokens = uint32_t(column_token(j, e)) | uint32_t(column_token(j + 1, e)) << 16;
        const uint32_t left = __vmins2(__vadd2(begin[row], tokens), __vsub2(end[row], tokens));  // negative: hidden
        uint32_t signs;
        asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(signs) : "r"(left));
        return signs;
    }
};

// kTokens: V's tokens differ.
template <bool kTokens, bool kMasked>
TA_DEVICE void pack_scores(const int32_t (&s)[64], const Factors& factors, const BlockScales& scales, const RowInfo* info,
                           int key, Pass pass, int i, Scores& out) {
    const Seen seen = kMasked ? Seen(info, key, pass, i) : Seen();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const int page = factors.addend[n / 4];
        const int4 four = kTokens ? *reinterpret_cast<const int4*>(scales.v_token[n][i]) : make_int4(page, page, page, page);
        const int addend[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                int y[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int j = 2 * n + h;
                    y[h] = s[4 * j + 2 * row + e] * factors.of[row][n / 4] + addend[e][h];
                }
                uint32_t& both = out.y[row][score_word(2 * n, e)];
                both = __byte_perm(uint32_t(y[0]), uint32_t(y[1]), 0x7632);
                if (kMasked) {
                    const uint32_t hidden = seen.hidden(row, 2 * n, e);
                    both = (both & ~hidden) | (hidden & 0x80008000u);
                }
            }
        }
    }
}

// Does the rounding of the factors show in the maxima, by more than a step? Scores are the maxima less V's part.
TA_DEVICE bool shows_rounding(const Scores& scores, const LaneRows& rows, const BlockScales& block, Pass pass) {
    const float k = fminf(block.k_coarse[0], block.k_coarse[1]), v = pass == Pass::kBothPages
                                                                         ? fmaxf(block.v_highest[0], block.v_highest[1])
                                                                         : block.v_highest[pass == Pass::kSecondPage];
    const auto shows = [&](int row) {
        return fabsf(scores.m[row] - v) > rows.scale[row] * k && rows.scale[row] > 0.0f && scores.m[row] != kNever;
    };
    return __any_sync(~0u, shows(0) || shows(1));
}
// By what share a factor is too small.
TA_DEVICE float rounding_of(float scale, float k_page) {
    const float rounded = fmaf(scale, k_page, kInteger) - kInteger;
    return __fdividef(scale * k_page - rounded, fmaxf(rounded, 1.0f));
}

// Then, takes the factors' rounding out of the scores.
TA_DEVICE void mend_rounding(const LaneRows& rows, const BlockScales& block, bool masked, int i, Scores& scores) {
    constexpr float kMostOff = 16.0f;  // steps: what half of the last bit makes of the largest score of codes, and more
    float off[2][2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const bool none = masked && scores.m[n / 2] == kNever;
        off[n / 2][n % 2] = none ? 0.0f : rounding_of(rows.scale[n / 2], block.k_page[n % 2]);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
        const int4 four = *reinterpret_cast<const int4*>(block.v_token[n][i]);
        const int addend[2][2] = {{four.x, four.y}, {four.z, four.w}};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                uint32_t& both = scores.y[row][score_word(2 * n, e)];
                int y[2] = {int16_t(both), int(both) >> 16};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float score = float(y[h]) - float(addend[e][h]) * 0x1p-16f;
                    // A masked key stays far below.
                    const float steps = fminf(fmaxf(score * off[row][n / 4], -kMostOff), kMostOff);
                    y[h] = max(y[h] + __float2int_rn(steps), SHRT_MIN);
                }
                both = __byte_perm(uint32_t(y[0]), uint32_t(y[1]), 0x5410);
            }
        }
    }
    find_maxima<SHRT_MIN>(0, masked, scores);
}

// SAS: scores more than 6 below the row's maximum so far have no weight, page by page. (Its table and cubic differ from 2^x by
// a sixth of a step at most.) V's scales are one for a page. `natural`: what RowInfo has of the rows.
TA_DEVICE void find_least(const PageMaxima& maxima, const BlockScales& block, const float (&natural)[2], RowInfo* info,
                          Scores& scores) {
    constexpr float kCut = 6.0f * 1.44269504f * kGrid, kMost = 0x4000 - kLowestOne;  // fp16 2.0: above all
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float top = natural[row] * kGrid;
        const float one = float(scores.top[row] - 1023);  // the score that becomes fp16 1.0
#pragma unroll
        for (int page = 0; page < 2; ++page) {
            const int largest = row ? int(maxima.of[page]) >> 16 : int16_t(maxima.of[page]);
            const float v = fmaf(block.v_highest[page], float(kGrid), 0.5f);
            if (largest != SHRT_MIN) top = fmaxf(top, float(largest) - v);
            const float steps = fminf(fmaxf(top + v - kCut - one, -float(kLowestOne)), kMost);
            scores.least[row][page] = twice(__float2int_ru(steps) + kLowestOne);
        }
        info[8 * row].natural = top * (1.0f / kGrid);  // the quad's lanes write the same
    }
}
// For sums of scores, to which what is at the lowest value adds nothing.
TA_DEVICE void cut_off(Scores& scores) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            const uint32_t y = scores.y[row][n];
            const uint32_t x = __viaddmax_s16x2(y, scores.offset[row][n / 8], 0);  // fp16 below 1.0, too: P may be 0 before
            const uint32_t kept = __hge2_mask(half2_of(x), half2_of(scores.least[row][n / 8]));
            scores.y[row][n] = (y & kept) | (0x80008000u & ~kept);
        }
    }
}

// The fractions of K's zero points as shifts: `eighths`, [row][page], of units of scores.
TA_DEVICE Shifts shifts_of(const int32_t (&eighths)[2][2], const Factors& factors) {
    Shifts shifts;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const int units = (eighths[n / 2][n % 2] + 4) >> 3;
        shifts.of[n / 2][n % 2] = __byte_perm(uint32_t(units * factors.of[n / 2][n % 2] + 32768), 0, 0x3232);
    }
    return shifts;
}

// The 16-bit path where nothing is masked and scores of pages are to be shifted.
TA_DEVICE void shifted_scores(const int32_t (&s)[64], const Factors& factors, const Shifts& shifts, const BlockScales& scales,
                              int i, Scores& out) {
    if (factors.equal()) {
        pack_scores<false, false>(s, factors, scales, nullptr, 0, Pass::kBothPages, i, out);
    } else {
        pack_scores<true, false>(s, factors, scales, nullptr, 0, Pass::kBothPages, i, out);
    }
    find_maxima<SHRT_MIN, true>(0, false, out, shifts);
}

// The 16-bit path. kLooks: whether the factors' rounding shows in the scores, which is
// returned, and mended. (Always to look takes 6% longer.) kSas: options come here only under SAS.
template <bool kLooks, bool kSas>
TA_DEVICE bool fast_scores(const int32_t (&s)[64], const Factors& factors, RowInfo* info, const LaneRows& rows,
                           const BlockScales& scales, const BlockMask& mask, int i, Scores& out) {
    const bool masked = mask.masked;
    const Pass pass = mask.pass;
    if (masked) {
        pack_scores<true, true>(s, factors, scales, info, mask.key, pass, i, out);
    } else if (factors.equal()) {
        pack_scores<false, false>(s, factors, scales, info, mask.key, pass, i, out);
    } else {
        pack_scores<true, false>(s, factors, scales, info, mask.key, pass, i, out);
    }
    if constexpr (kSas) {
        const float natural[2] = {info[0].natural, info[8].natural};  // before other lanes write it
        PageMaxima maxima(out);
        set_maxima<SHRT_MIN>(maxima.both(), 0, masked, out);
        const bool shows = kLooks && shows_rounding(out, rows, scales, pass);
        if (shows) {
            mend_rounding(rows, scales, masked, i, out);
            maxima = PageMaxima(out);
        }
        __syncwarp();
        find_least(maxima, scales, natural, info, out);
        return shows;
    }
    find_maxima<SHRT_MIN>(0, masked, out);
    const bool shows = kLooks && shows_rounding(out, rows, scales, pass);
    if (shows) mend_rounding(rows, scales, masked, i, out);
    return shows;
}

// The sum with the offset must not fall below 16 bits: scores that are too small for P take the lowest value that counts.
TA_DEVICE void raise_lowest(Scores& scores) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const uint32_t lowest = twice(max(scores.top[row] - 1023, SHRT_MIN));
#pragma unroll
        for (int n = 0; n < 16; ++n) scores.y[row][n] = __vmaxs2(scores.y[row][n], lowest);
    }
}

template <bool kMasked>
TA_DEVICE void pack_token_scores(const int32_t (&s)[64], const RowInfo* info, const BlockScales& scales, float s_unit, int key,
                                 Pass pass, int i, Scores& out) {
    const Seen seen = kMasked ? Seen(info, key, pass, i) : Seen();
    const float unit[2] = {info[0].scale * kGrid * s_unit, info[8].scale * kGrid * s_unit};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const int e = e_of_word(n), first = j_of_word(n);
        const TokenScales token = scales.token[n][i];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t y[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int j = first + h;
                y[h] = __float_as_uint(fmaf(float(s[4 * j + 2 * row + e]) * token.k[h], unit[row], token.v[h]));
            }
            out.y[row][n] = __byte_perm(y[0], y[1], 0x6521);
            if (kMasked) out.y[row][n] &= ~seen.hidden(row, first, e);
        }
    }
}

// Tokens with scales of their own, and factors too coarse to be mended. `unit`: of s.
TA_DEVICE void token_scores(const int32_t (&s)[64], const RowInfo* info, const BlockScales& scales, float unit,
                            const BlockMask& mask, int i, Scores& out) {
    if (mask.masked) {
        pack_token_scores<true>(s, info, scales, unit, mask.key, mask.pass, i, out);
    } else {
        pack_token_scores<false>(s, info, scales, unit, mask.key, mask.pass, i, out);
    }
    find_maxima<0>(kTokenBias, mask.masked, out);
}

// l in fp32 from the 16-bit scores.
TA_DEVICE void find_exact_sums(const BlockScales& scales, int i, const Scores& scores, float (&out)[2]) {
    constexpr float kStep = 1.0f / kGrid;
    // A score becomes a float by its exponent's bits. The product with kStep is so large that the sum with it, rounded, is off
    // by up to 1/256 octave, but for all scores alike.
    constexpr float kZero = 8388608.0f + 32768.0f;
    const float top[2] = {kZero + float(scores.top[0]), kZero + float(scores.top[1])};
    const float shift[2] = {-(top[0] * kStep), -(top[1] * kStep)};
    float l[2] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const float2 v = scales.v_inverse[n][i];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const uint32_t y = scores.y[row][n] ^ 0x80008000u;
            const float y0 = __uint_as_float(__byte_perm(y, 0x4B00, 0x5410)),
                        y1 = __uint_as_float(__byte_perm(y, 0x4B00, 0x5432));
            l[row] = fmaf(exp2_approx(fmaf(y0, kStep, shift[row])), v.x, l[row]);
            l[row] = fmaf(exp2_approx(fmaf(y1, kStep, shift[row])), v.y, l[row]);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float off = fmaf(top[row], kStep, shift[row]);
        out[row] = scores.m[row] == kNever ? 0.0f : l[row] * exp2_approx(-off) * 255.0f;
    }
}

// Takes the terms of 128 out of O, and makes m[row] the reference of a row where it is far above that.
template <int N>
TA_DEVICE void settle(LaneRows& rows, const float (&m)[2], float (&o)[N]) {
    float factor[2], off[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float before = rows.reference[row], reference = m[row] > before + kRaise ? m[row] : before;
        factor[row] = exp2_approx(before - reference);
        off[row] = rows.sums.p[row] * -128.0f * factor[row];
        rows.sums.l[row] *= factor[row];
        rows.sums.p[row] = 0.0f;
        rows.reference[row] = reference;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) o[n] = fmaf(o[n], factor[n / 2 % 2], off[n / 2 % 2]);
}

TA_DEVICE void add_term(int32_t product, float factor, float& o) {
    asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(o) : "f"(__int_as_float(product)), "f"(factor));
}

// The columns of sums, of which `digit` says what those with the lane's digit are worth. l takes two steps: the two factors
// together may be too large for a number.
TA_DEVICE void add_sums(const int32_t (&product)[40], const float (&factor)[2], float digit, LaneSums& sums) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float l;
        add_term(product[32 + 2 * row], factor[row], sums.p[row]);
        asm("mul.rn.f32 %0, %1, %2;" : "=f"(l) : "f"(__int_as_float(product[33 + 2 * row])), "f"(factor[row]));
        sums.l[row] = fmaf(l, digit, sums.l[row]);
    }
}
// l that is not made from P.
TA_DEVICE void add_exact_sums(const float (&exact)[2], const float (&factor)[2], LaneSums& sums) {
#pragma unroll
    for (int row = 0; row < 2; ++row) sums.l[row] = fmaf(exact[row] * kOutUnit, factor[row] * 0x1p-100f, sums.l[row]);
}
// To o[first ...].
template <int M, int N>
TA_DEVICE void add_product(const int32_t (&product)[M], const float (&factor)[2], float (&o)[N], int first) {
#pragma unroll
    for (int n = 0; n < 32; ++n) add_term(product[n], factor[n / 2 % 2], o[first + n]);
}

}  // namespace ta::cuda::prefill::sm90
