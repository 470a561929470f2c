// Scores to P. P is u8 in units of 1/255 of the largest P of its row within the block of keys, P being 2^(score + log2 of V's
// scale). A block's product with V is exact in int32 and is added to O, in fp32 in units of 2^m, m a reference of the row's
// that hardly ever changes.
//
// Scores come to the exponential as 16-bit integers in 1/112 of an octave, two to a register: 1024 steps, what fp16 has in [1,
// 2), span P's 8 bits. The common case (uniform pages, no options) gets there by one multiply-add and half a byte permutation
// per score; everything else goes through fp32.
#pragma once

#include "kernels/cuda/sm90/prefill/query.cuh"

namespace ta::cuda::prefill {

inline constexpr int kHighest = 16383;     // up to here a maximum can be taken off any score without leaving 16 bits
inline constexpr int kLowestOne = 0x3C00;  // fp16 1.0; 1.0 + 1023 / 1024 is the maximum
inline constexpr float kRaise = 16.0f;     // a block this many octaves above the reference becomes the reference

// Scores of one block on their way to P.
struct Scores {
    uint32_t y[2][16];   // [row][j]: columns 8 j + 2 i and the next
    uint32_t offset[2];  // makes y a fp16 number in [1, 2), twice
    float inverse[2];    // factor of the page's sum of P in l; 0 where l has the page already
    float m[2];          // the row's maximum, equal in the quad
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

// The 16-bit path's constants for a block.
struct Fast {
    int factor[2][2];  // [row][page]: y = score * factor + addend, the high half counts
    int addend[2];     // [page]
    float bound;       // of |y|; infinite, or no number, where the path cannot take the block
};

// `info` is that of row g, info + 8 that of row g + 8.
TA_DEVICE Fast make_fast(const RowInfo* info, const WarpLimits& limits, const BlockScales& scales) {
    constexpr int kOctavesApart = 3;  // V's scales of two pages: further, P has too few levels left for the sum of the lower
    Fast fast;
#pragma unroll
    for (int page = 0; page < 2; ++page) {
        fast.addend[page] = scales.v_page[page];
#pragma unroll
        for (int row = 0; row < 2; ++row) fast.factor[row][page] = __float2int_rn(info[8 * row].scale * scales.k_page[page]);
    }
    const int apart = fast.addend[0] - fast.addend[1];
    const bool alike = abs(apart) <= kOctavesApart * int(kFine) || scales.v_inverse[1] == 0.0f;
    const float bound =
        fmaf(limits.largest, fmaxf(scales.k_page[0], scales.k_page[1]), fabsf(float(fast.addend[0])) + kOctavesApart * kFine);
    fast.bound = alike ? bound : INFINITY;
    return fast;
}

// Calls with options take the fp32 path for every block.
TA_DEVICE bool has_options(const AttendArgs& args) {
    return args.softcap > 0.0f || args.exp == ExpMode::kSas || args.alibi_slope;
}

TA_DEVICE void find_limits(const RowInfo* info, bool options, WarpLimits& limits, int lane) {
    constexpr float kFractionsToo = 1.01f;  // K's fractions add less than a hundredth to what the codes can
    const int begin = __reduce_max_sync(~0u, max(info[0].key_begin, info[8].key_begin));
    const int end = __reduce_min_sync(~0u, min(info[0].key_end, info[8].key_end));
    const float largest = fmaxf(info[0].magnitude * info[0].scale, info[8].magnitude * info[8].scale) * kFractionsToo;
    const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(largest));  // in order, being no less than 0
    if (lane == 0) limits = {begin, end, options ? INFINITY : __uint_as_float(bits), 0};
    __syncwarp();
}

// The largest of a row's 16-bit scores over the quad, rows g and g + 8 in the low and the high half.
TA_DEVICE uint32_t largest_of_rows(const Scores& scores) {
    uint32_t m[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        m[row] = scores.y[row][0];
#pragma unroll
        for (int n = 1; n < 15; n += 2) m[row] = __vimax3_s16x2(m[row], scores.y[row][n], scores.y[row][n + 1]);
        m[row] = __vmaxs2(m[row], scores.y[row][15]);
    }
    uint32_t both = __vmaxs2(__byte_perm(m[0], m[1], 0x5410), __byte_perm(m[0], m[1], 0x7632));
    both = __vmaxs2(both, __shfl_xor_sync(~0u, both, 1));
    return __vmaxs2(both, __shfl_xor_sync(~0u, both, 2));
}

template <bool kMasked>
TA_DEVICE void pack_scores(const int32_t (&s)[64], const int (&factor)[2][2], const int (&addend)[2][2], const int (&end)[2],
                           Scores& out) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            int y[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                y[e] = s[4 * j + 2 * row + e] * factor[row][j / 8] + addend[row][j / 8];
                if (kMasked && column_token(j, e) >= end[row]) y[e] = INT_MIN;
            }
            out.y[row][j] = __byte_perm(uint32_t(y[0]), uint32_t(y[1]), 0x7632);
        }
    }
}

// The 16-bit path over the block of scores from `key` on. `fraction` are the sums of K's zero point
// fractions for (row, page), in eighths.
template <bool kFractions>
TA_DEVICE void fast_scores(const int32_t (&s)[64], const Fast& fast, const RowInfo* info, const BlockScales& scales,
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
        const int first_key = key + lane_token(i), end[2] = {info[0].key_end - first_key, info[8].key_end - first_key};
        pack_scores<true>(s, fast.factor, addend, end, out);
    } else {
        pack_scores<false>(s, fast.factor, addend, {}, out);
    }
    const uint32_t both = largest_of_rows(out);
    const int top[2] = {int16_t(both), int(both) >> 16};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        out.offset[row] = __byte_perm(uint32_t(kLowestOne + 1023 - top[row]), 0, 0x1010);
        out.m[row] = float(top[row]) * (1.0f / kGrid);
        out.l[row] = 0.0f;
    }
    if (masked) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            if (top[row] != -32768) continue;
            out.offset[row] = 0;  // no key: every P is less than 1/2
            out.m[row] = kNever;
        }
    }
    if (fast.bound < kHighest * 65536.0f) return;
        // The sum with the offset must not leave 16 bits below: what is too small for P goes to the lowest value that counts.
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const uint32_t lowest = twice(max(top[row] - 1023, -32768));
#pragma unroll
        for (int n = 0; n < 16; ++n) out.y[row][n] = __vmaxs2(out.y[row][n], lowest);
    }
}

TA_DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
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

// The fp32 path: every scale and mask, and with kOptions softcap, ALiBi and SAS. Scores of `s` are replaced. `first_key` is the
// key of the lane's first column. Not `masked`: every row of the warp sees the whole block. l is summed from P before its
// rounding.
template <bool kFractions, bool kOptions>
TA_DEVICE void general_scores(int32_t (&s)[64], RowInfo* row_info, const BlockScales& scales, const ScoreOptions& options,
                              bool masked, int first_key, int i, const float (&fraction)[2][2], Scores& out) {
    const RowInfo info[2] = {row_info[0], row_info[8]};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 k = *reinterpret_cast<const float2*>(scales.k_token + 8 * j + 2 * i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = e / 2, h = e % 2;
            float x = float(s[4 * j + e]);
            if (kFractions) x = fmaf(fraction[row][j / 8], 0.125f, x);
            x *= info[row].scale * (h ? k.y : k.x);
            if (kOptions) {
                if (options.softcap > 0.0f) x = soft_capped(x + info[row].bias, options);
                x = fmaf(info[row].slope, float(first_key + column_token(j, h) - info[row].position), x);
            }
            s[4 * j + e] = __float_as_int(x);
        }
    }
    if (masked) {
        const int begin[2] = {info[0].key_begin - first_key, info[1].key_begin - first_key};
        const int end[2] = {info[0].key_end - first_key, info[1].key_end - first_key};
#pragma unroll
        for (int n = 0; n < 64; ++n) {
            const int row = n / 2 % 2, token = column_token(n / 4, n % 2);
            if (token < begin[row] || token >= end[row]) s[n] = __float_as_int(-INFINITY);
        }
    }
    float top[2] = {-INFINITY, -INFINITY}, natural[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 v = *reinterpret_cast<const float2*>(scales.v_token + 8 * j + 2 * i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float x = __int_as_float(s[4 * j + e]);
            if (kOptions) natural[e / 2] = fmaxf(natural[e / 2], x);
            top[e / 2] = fmaxf(top[e / 2], x + (e % 2 ? v.y : v.x));  // -inf + NaN, a slot without a token, does not count
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        out.m[row] = fmaxf(quad_max(top[row]), kNever);
        if (kOptions) natural[row] = fmaxf(info[row].natural, quad_max(natural[row]));
        out.offset[row] = twice(kLowestOne + 1023);
        out.l[row] = 0.0f;
        out.inverse[row] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const float2 v = *reinterpret_cast<const float2*>(scales.v_token + 8 * j + 2 * i);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t y[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = __int_as_float(s[4 * j + 2 * row + h]);
                if (kOptions && options.sas && x != -INFINITY) x = natural[row] + log2_sas(natural[row] - x);
                x -= out.m[row];
                out.l[row] += exp2_approx(x - 32.0f);
                const float steps = fmaf(x + (h ? v.y : v.x), float(kGrid), kInteger);
                y[h] = __float_as_uint(fmaxf(steps, kInteger - 20000.0f));  // at most 0; where NaN, -20000
            }
            out.y[row][j] = __byte_perm(y[0], y[1], 0x5410);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        out.l[row] *= 255.0f;
        if (kOptions && options.sas) row_info[8 * row].natural = natural[row];  // the quad's lanes write the same
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
