// Scores to P. P is u8 in units of 1/255 of 2^m, m the running maximum of (score + log2 of V's scale) rounded up to an integer: so
// O stays in int32 over the whole row whatever the pages' V scales are, and a larger maximum is a shift of O.
//
// Scores come to the exponential as 16-bit integers in 1/112 of an octave, two to a register. The common case (uniform pages, no
// options) gets there by one multiply-add and half a byte permutation per score; everything else goes through fp32.
#pragma once

#include "kernels/cuda/prefill_query.cuh"

namespace ta::cuda::prefill {

inline constexpr int kGrid = 112;          // steps of an octave: 1024 of them, what fp16 has in [1, 2), span P's 8 bits
inline constexpr int kHighest = 16383;     // largest maximum, in these steps, that the 16-bit path takes
inline constexpr int kLowestOne = 0x3C00;  // fp16 1.0; 1.0 + 1023 / 1024 is the running maximum
inline constexpr float kNever = -1e30f;    // running maximum before the first key

// Row state of a lane: rows g and g + 8 of its warp. Sums are over the lane's columns only.
struct Rows {
    float m[2];  // running maximum, an integer, equal in the quad; kNever: nothing yet
    float l[2];  // sum of P / (V's scale as P carries it), in P's unit
};

// Scores of one block on their way to P.
struct Pending {
    uint32_t y[2][16];   // [row][4 (32-token group) + 2 (pair) + h]: tokens 8 j + 2 i + h, j = 2 (group, pair), 2 (...) + 1
    uint32_t offset[2];  // makes y a fp16 number in [1, 2), twice
    float inverse[2];    // factor of the page's sum of P in l; 0 where l has the page already
    float l[2];          // to be added to l
};

TA_DEVICE uint32_t twice(int x) {
    return uint32_t(x & 0xffff) * 0x10001u;
}

// 255 * 2^((f - 2047/1024) 1024/112) on the low bytes of 1024 + P. The cubic fits its fourth root such that P has the least squared
// error with these very roundings (0.337 of a step rms; 0.295 would be rounding alone); it never exceeds 255.
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

// P as operand A of the four products with V, and its sums.
TA_DEVICE void make_p(const Pending& pending, Rows& rows, uint32_t (&p)[4][4]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        uint32_t sums[2] = {0, 0};
#pragma unroll
        for (int group = 0; group < 4; ++group) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t e[2];
#pragma unroll
                for (int pair = 0; pair < 2; ++pair) {
                    const uint32_t y = pending.y[row][4 * group + 2 * pair + h];
                    e[pair] = exponential(__viaddmax_s16x2(y, pending.offset[row], twice(kLowestOne)));
                }
                const uint32_t word = __byte_perm(e[0], e[1], 0x6420);
                p[group][2 * h + row] = word;
                sums[group / 2] = __dp4a(word, 0x01010101u, sums[group / 2]);
            }
        }
        rows.l[row] += pending.l[row];
        rows.l[row] = fmaf(float(sums[0]), pending.inverse[0], fmaf(float(sums[1]), pending.inverse[1], rows.l[row]));
    }
}

// The 16-bit path's constants for a block.
struct Fast {
    int factor[2][2];  // [row][page]: y = score * factor + addend, the high half counts
    int addend[2];     // [page]
    bool fits;         // no score of the warp leaves the range, whatever the codes of K
};

// `info` is that of row g, info + 8 that of row g + 8.
TA_DEVICE Fast make_fast(const RowInfo* info, const BlockScales& scales) {
    constexpr float kFractionsToo = 1.01f;  // K's fractions add less than a hundredth to what the codes can
    Fast fast;
    bool fits = true;
#pragma unroll
    for (int page = 0; page < 2; ++page) {
        const float addend = fmaf(scales.v_page[page], kGrid * 65536.0f, 32768.0f);  // rounds the high half to nearest
        fast.addend[page] = __float2int_rn(addend);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float factor = info[8 * row].scale * scales.k_page[page] * (kGrid * 65536.0f);
            fast.factor[row][page] = __float2int_rn(factor);
            fits = fits && fmaf(info[8 * row].magnitude * kFractionsToo, factor, fabsf(addend)) < 2147000000.0f;
        }
    }
    fast.fits = __all_sync(~0u, fits);
    return fast;
}

// The largest of a row's 16-bit scores over the quad, rows g and g + 8 in the low and the high half.
TA_DEVICE uint32_t largest_of_rows(const Pending& pending) {
    uint32_t m[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        m[row] = pending.y[row][0];
#pragma unroll
        for (int n = 1; n < 15; n += 2) m[row] = __vimax3_s16x2(m[row], pending.y[row][n], pending.y[row][n + 1]);
        m[row] = __vmaxs2(m[row], pending.y[row][15]);
    }
    uint32_t both = __vmaxs2(__byte_perm(m[0], m[1], 0x5410), __byte_perm(m[0], m[1], 0x7632));
    both = __vmaxs2(both, __shfl_xor_sync(~0u, both, 1));
    return __vmaxs2(both, __shfl_xor_sync(~0u, both, 2));
}

template <bool kMasked>
TA_DEVICE void pack_scores(const int32_t (&s)[64], const int (&factor)[2][2], const int (&addend)[2][2], const int (&end)[2],
                           Pending& out) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            const int group = n / 4, pair = n / 2 % 2, h = n % 2, page = group / 2;
            int y[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = 4 * group + 2 * pair + e;
                y[e] = s[4 * j + 2 * row + h] * factor[row][page] + addend[row][page];
                if (kMasked && 8 * j + h >= end[row]) y[e] = INT_MIN;
            }
            out.y[row][n] = __byte_perm(uint32_t(y[0]), uint32_t(y[1]), 0x7632);
        }
    }
}

// The 16-bit path over one block of scores, where fast.fits. False, for the whole warp, when a maximum leaves its range after all;
// nothing but `out` and `m` has changed then. `first_key` is the key of the lane's first column. `fraction` are the sums of K's
// zero point fractions for (row, page), in eighths.
template <bool kFractions>
TA_DEVICE bool fast_scores(const int32_t (&s)[64], const Fast& fast, const RowInfo* info, const BlockScales& scales,
                           bool masked, int first_key, const float (&fraction)[2][2], const Rows& rows, Pending& out,
                           float (&m)[2]) {
    bool fits = true;
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
        const int end[2] = {info[0].key_end - first_key, info[8].key_end - first_key};
        pack_scores<true>(s, fast.factor, addend, end, out);
    } else {
        pack_scores<false>(s, fast.factor, addend, {}, out);
    }
    const uint32_t largest = largest_of_rows(out);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int top = int16_t(row ? largest >> 16 : largest);
        const bool sees = top != -32768;
        fits = fits && (!sees || abs(top) <= kHighest - kGrid) && rows.m[row] <= float(kHighest / kGrid);
        m[row] = fmaxf(rows.m[row], sees ? ceilf((float(top) - 0.5f) * (1.0f / kGrid)) : kNever);
        out.offset[row] = twice(kLowestOne + 1023 - int(fmaxf(m[row], -146.0f)) * kGrid);
        out.l[row] = 0.0f;
    }
    return __all_sync(~0u, fits);
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

TA_DEVICE float soft_capped(float x, const ScoreOptions& o) {
    const float y = fabsf(x * o.softcap_inverse), e = exp2_approx(-2.0f * 1.44269504f * y);
    return copysignf(o.softcap * __fdividef(1.0f - e, 1.0f + e), x);
}

// The fp32 path: every scale and mask, and with kOptions softcap, ALiBi and SAS. Scores of `s` are replaced. `first_key` is the key
// of the lane's first column, 2 i. Not `masked`: every row of the warp sees the whole block.
template <bool kFractions, bool kOptions>
TA_DEVICE void general_scores(int32_t (&s)[64], RowInfo* row_info, const BlockScales& scales, const ScoreOptions& options,
                              bool masked, int first_key, int i, const float (&fraction)[2][2], const Rows& rows, Pending& out,
                              float (&m)[2]) {
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
                x = fmaf(info[row].slope, float(first_key + 8 * j + h - info[row].position), x);
            }
            s[4 * j + e] = __float_as_int(x);
        }
    }
    if (masked) {
        const int begin[2] = {info[0].key_begin - first_key, info[1].key_begin - first_key};
        const int end[2] = {info[0].key_end - first_key, info[1].key_end - first_key};
#pragma unroll
        for (int n = 0; n < 64; ++n) {
            const int row = n / 2 % 2, column = n / 4 * 8 + n % 2;
            if (column < begin[row] || column >= end[row]) s[n] = __float_as_int(-INFINITY);
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
        m[row] = fmaxf(rows.m[row], fmaxf(ceilf(quad_max(top[row])), kNever));
        if (kOptions) natural[row] = fmaxf(info[row].natural, quad_max(natural[row]));
        out.offset[row] = twice(kLowestOne + 1023);
        out.l[row] = 0.0f;
        out.inverse[row] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        const float2 v0 = *reinterpret_cast<const float2*>(scales.v_token + 8 * j + 2 * i);
        const float2 v1 = *reinterpret_cast<const float2*>(scales.v_token + 8 * j + 8 + 2 * i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = e / 2, h = e % 2;
            const float v[2] = {h ? v0.y : v0.x, h ? v1.y : v1.x};
            uint32_t y[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float x = __int_as_float(s[4 * (j + n) + e]);
                if (kOptions && options.sas && x != -INFINITY) x = natural[row] + log2_sas(natural[row] - x);
                out.l[row] += exp2_approx(x - m[row]);
                const float steps = fmaf(x + (v[n] - m[row]), float(kGrid), kInteger);
                y[n] = __float_as_uint(fmaxf(steps, kInteger - 20000.0f));  // at most 0; where NaN, -20000
            }
            out.y[row][2 * (j / 2) + h] = __byte_perm(y[0], y[1], 0x5410);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        out.l[row] *= 255.0f;
        if (kOptions && options.sas) row_info[8 * row].natural = natural[row];  // the quad's lanes write the same
    }
}

// Brings O and the sums to a larger maximum. True for a row that has none yet: O is still zero.
template <int N>
TA_DEVICE void raise_maximum(Rows& rows, const float (&m)[2], int32_t (&o)[N]) {
    if (!__any_sync(~0u, m[0] > rows.m[0] || m[1] > rows.m[1])) return;
    int shift[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const float octaves = m[row] - rows.m[row];
        shift[row] = int(fminf(octaves, 31.0f));
        rows.l[row] *= exp2_approx(-octaves);
        rows.m[row] = m[row];
    }
#pragma unroll
    for (int n = 0; n < N; ++n) o[n] >>= shift[n / 2 % 2];
}

}  // namespace ta::cuda::prefill
