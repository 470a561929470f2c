// Steps 2 to 6 of attend.h for one row and page, from integer scores to the integers of P. Nothing here knows how
// codes are stored.
#pragma once

#include "kernels/cpu/avx2/vec.h"
#include "kernels/cpu/turning_terms.h"
#include "kernels/format/query_rest.h"

namespace ta::cpu {
namespace {

// A page's scales, reduced to what the products need.
struct PageScales {
    bool k_bytes, v_bytes;                   // K, V have 8 bits
    float k_scale8;                          // K at 4 or 2 bits: its scale / 8
    const float* k_scales;                   // at 8: [64], NaN where unread
    float v_scale;                           // vfac of attend.h
    alignas(32) float v_ratio[kPageTokens];  // r_t
    PageTurning turning;
};

inline float read_f32(const uint8_t* p) {
    float x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

inline void read_exponents(const uint8_t* exponents, PageScales& out) {
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    for (int j = 0; j < kPageTokens; j += 8) {  // 2^-e: the exponent field is 127 - e
        const __m256i packed = broadcast_i32(exponents + j / 2);
        const __m256i e = _mm256_and_si256(_mm256_srlv_epi32(packed, shifts), _mm256_set1_epi32(15));
        store_i(out.v_ratio + j, _mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(127), e), 23));
    }
}

// `valid`: slots of the page that hold tokens, any number.
inline void read_v_scales(const float* v_scales, int64_t valid, PageScales& out) {
    const __m256i n = _mm256_set1_epi32(int(valid < 0 ? 0 : valid > kPageTokens ? kPageTokens : valid));
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256 max = _mm256_setzero_ps();
    for (int j = 0; j < kPageTokens; j += 8) {
        const __m256 held = _mm256_castsi256_ps(_mm256_cmpgt_epi32(n, lane));
        const __m256 s = _mm256_and_ps(_mm256_load_ps(v_scales + j), held);
        _mm256_store_ps(out.v_ratio + j, s);
        max = _mm256_max_ps(max, s);
        lane = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
    }
    out.v_scale = max_f32(max);
    if (!(out.v_scale > 0.0f)) return;  // all zeros already
    for (int j = 0; j < kPageTokens; j += 8) {
        _mm256_store_ps(out.v_ratio + j, _mm256_div_ps(_mm256_load_ps(out.v_ratio + j), _mm256_set1_ps(out.v_scale)));
    }
}

inline void read_scales(const PieceParts& at, const uint8_t* piece, int64_t valid, PageScales& out) {
    out.k_bytes = at.k_bits == 8;
    out.v_bytes = at.v_bits == 8;
    if (out.k_bytes) {
        out.k_scales = reinterpret_cast<const float*>(piece + at.k_parameters);
    } else {
        out.k_scale8 = read_f32(piece + at.k_scale) * 0.125f;
    }
    if (out.v_bytes) {
        read_v_scales(reinterpret_cast<const float*>(piece + at.v_parameters), valid, out);
    } else {
        out.v_scale = read_f32(piece + at.v_scale);
        read_exponents(piece + at.v_exponents, out);
    }
}

// How a row's update of O ends: O = fma(.., g, O alpha).
struct RowScale {
    float alpha, g;
    int32_t code_sum;  // sum of P, of V at 4 and 2 bits
};

inline void add_alibi(const AttendTask& t, int row, int64_t first_key, __m256 (&x)[8]) {
    const int64_t distance = first_key - t.position[row];
    const __m256 slope = _mm256_set1_ps(t.slope[row]);
    alignas(32) float far[kPageTokens];
    const bool fits = !t.tree && distance > -(int64_t(1) << 30) && distance < (int64_t(1) << 30);
    if (!fits) {
        for (int j = 0; j < kPageTokens; ++j) far[j] = float(key_position(t, first_key + j) - t.position[row]);
    }
    __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(int(fits ? distance : 0)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (int v = 0; v < 8; ++v) {
        x[v] = _mm256_fmadd_ps(slope, fits ? _mm256_cvtepi32_ps(lane) : _mm256_load_ps(far + 8 * v), x[v]);
        lane = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
    }
}

inline void hide_tree(const AttendTask& t, int row, int64_t first_key, __m256 (&x)[8]) {
    const uint64_t seen = tree_slots(*t.tree, row, first_key);
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int v = 0; v < 8; ++v) {
        const __m256i of_lanes = _mm256_and_si256(_mm256_set1_epi32(int(seen >> (8 * v) & 255)), bit);
        x[v] = _mm256_blendv_ps(_mm256_set1_ps(kMinusInf), x[v], _mm256_castsi256_ps(_mm256_cmpeq_epi32(of_lanes, bit)));
    }
}

inline void add_turning(const AttendTask& t, int row, const PageTurning& turning, __m256 (&x)[8]) {
    const float* q = t.q_float + int64_t(row) * t.head_dim;
    for (int n = 0; n < turning.pairs; ++n) {
        for (int of = 0; of < 2; ++of) {
            const __m256 q_of = _mm256_set1_ps(q[turning.channel[n][of]]);
            for (int v = 0; v < 8; ++v) x[v] = _mm256_fmadd_ps(q_of, _mm256_load_ps(turning.value[n][of] + 8 * v), x[v]);
        }
    }
}

// Step 2: logits in log2 units.
inline void logits(const AttendTask& t, int row, int64_t first_key, const PageScales& page, const int32_t* s, __m256 (&x)[8]) {
    const __m256 q_scale = _mm256_set1_ps(t.q_scale[row]);
    const __m256 c = _mm256_mul_ps(q_scale, _mm256_set1_ps(page.k_bytes ? 0.0f : page.k_scale8));
    for (int v = 0; v < 8; ++v) {
        __m256 c_v = page.k_bytes ? _mm256_mul_ps(q_scale, _mm256_load_ps(page.k_scales + 8 * v)) : c;
        if (page.k_bytes && t.q_rest) c_v = _mm256_mul_ps(c_v, _mm256_set1_ps(1.0f / float(kRestUnits)));
        x[v] = _mm256_mul_ps(_mm256_cvtepi32_ps(load_i(s + 8 * v)), c_v);
    }
    if (page.turning.pairs) add_turning(t, row, page.turning, x);
    if (t.bias) {
        for (__m256& x_v : x) x_v = _mm256_add_ps(x_v, _mm256_set1_ps(t.bias[row]));
    }
    if (t.softcap_log2 > 0.0f) {
        for (__m256& x_v : x) {
            x_v = _mm256_mul_ps(_mm256_set1_ps(t.softcap_log2), tanh_exact(_mm256_mul_ps(x_v, _mm256_set1_ps(t.softcap_inv))));
        }
    }
    if (t.slope) add_alibi(t, row, first_key, x);
    if (t.tree) hide_tree(t, row, first_key, x);
    const KeysInPage seen = keys_in_page(t, row, first_key);
    if (seen.first == 0 && seen.last == kPageTokens) return;
    const __m256i before_first = _mm256_set1_epi32(seen.first - 1), last = _mm256_set1_epi32(seen.last);
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (__m256& x_v : x) {
        const __m256i see = _mm256_and_si256(_mm256_cmpgt_epi32(lane, before_first), _mm256_cmpgt_epi32(last, lane));
        x_v = _mm256_blendv_ps(_mm256_set1_ps(kMinusInf), x_v, _mm256_castsi256_ps(see));
        lane = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
    }
}

inline void scale_o(const AttendTask& t, int row, float alpha) {
    if (alpha == 1.0f) return;
    float* o = t.o + int64_t(row) * t.head_dim;
    for (int c = 0; c < t.head_dim; c += 8) {
        _mm256_store_ps(o + c, _mm256_mul_ps(_mm256_load_ps(o + c), _mm256_set1_ps(alpha)));
    }
}

// Steps 2 to 4. False if the row sees nothing up to here; otherwise p holds step 3's p_t.
template <ExpMode MODE>
inline bool softmax_row(const AttendTask& t, int row, int64_t first_key, const PageScales& page, const int32_t* s,
                        __m256 (&p)[8], RowScale& scale) {
    logits(t, row, first_key, page, s, p);
    const __m256 max4 = _mm256_max_ps(_mm256_max_ps(p[0], p[1]), _mm256_max_ps(p[2], p[3]));
    const __m256 max8 = _mm256_max_ps(max4, _mm256_max_ps(_mm256_max_ps(p[4], p[5]), _mm256_max_ps(p[6], p[7])));
    const float page_max = max_f32(max8), m_old = t.m[row];
    const float m_new = m_old < page_max ? page_max : m_old;
    if (m_new == kMinusInf) return false;
    // m_old = -inf makes the difference infinite and alpha 0, and so it is for a masked x.
    scale.alpha = m_new == m_old ? 1.0f : _mm256_cvtss_f32(exp2_neg_exact(_mm256_set1_ps(m_new - m_old)));
    for (__m256& p_v : p) p_v = exp2_neg<MODE>(_mm256_sub_ps(_mm256_set1_ps(m_new), p_v));
    const __m256 low = _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(p[0], p[2]), p[4]), p[6]);
    const __m256 high = _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(p[1], p[3]), p[5]), p[7]);
    t.m[row] = m_new;
    const float sum = sum_16_lanes(low, high);
    t.l[row] = __builtin_fmaf(t.l[row], scale.alpha, sum);
    if (t.page_sums) {
        float* of_page = page_sums_of(t, first_key);
        of_page[row] = scale.alpha;
        of_page[t.page_sums_rows + row] = sum;
    }
    return true;
}

// Steps 5 and 6 up to the integers of P. False if the page adds nothing: O is scaled and done.
inline bool quantize_p(const AttendTask& t, int row, const PageScales& page, __m256 (&p)[8], __m256i (&code)[8],
                       RowScale& scale) {
    __m256 max = _mm256_setzero_ps();
    for (int v = 0; v < 8; ++v) {
        p[v] = _mm256_mul_ps(p[v], _mm256_load_ps(page.v_ratio + 8 * v));
        max = _mm256_max_ps(max, p[v]);
    }
    const float a = t.p_running ? 1.0f : max_f32(max);
    if (a < 0x1p-60f || page.v_scale == 0.0f) {
        scale_o(t, row, scale.alpha);
        return false;
    }
    const float levels = float(t.p_levels);
    const __m256 to_code = _mm256_set1_ps(levels / a);
    scale.g = (a / levels) * page.v_scale;
    __m256i sum = zero_i();
    for (int v = 0; v < 8; ++v) {
        code[v] = _mm256_min_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(p[v], to_code)), _mm256_set1_epi32(t.p_levels));
        sum = _mm256_add_epi32(sum, code[v]);
    }
    scale.code_sum = page.v_bytes ? 0 : sum_i32(sum);
    return true;
}

// V codes are stored in quads of tokens: token 32 w + 8 b + l is byte b of quad 8 w + l. A plane holds one byte (or
// 16-bit word pair) of P for each: the low and the high bytes of P, or, for sums of 16-bit products, the even and the
// odd tokens.
enum class PFormat { kBytes, kWords };

// SPREAD: as the decode kernels want it, every quad twice in the order of a V load (4 vectors a plane), else quads
// 0..15 (2 vectors).
template <bool SPREAD>
inline void store_plane(uint8_t* out, __m256i quads0, __m256i quads1) {
    if constexpr (!SPREAD) {
        store_i(out, quads0);
        store_i(out + 32, quads1);
        return;
    }
    // Vector 2 step + h: quads of l = 4 h + step, 4 h + 2 + step, both w, each twice for the two channels of a dword
    // pair.
    const __m256i even0 = _mm256_shuffle_epi32(quads0, 0xA0), even1 = _mm256_shuffle_epi32(quads1, 0xA0);
    const __m256i odd0 = _mm256_shuffle_epi32(quads0, 0xF5), odd1 = _mm256_shuffle_epi32(quads1, 0xF5);
    const __m256i even_a = _mm256_unpacklo_epi64(even0, even1), even_b = _mm256_unpackhi_epi64(even0, even1);
    const __m256i odd_a = _mm256_unpacklo_epi64(odd0, odd1), odd_b = _mm256_unpackhi_epi64(odd0, odd1);
    store_i(out + 0, _mm256_permute2x128_si256(even_a, even_b, 0x20));
    store_i(out + 32, _mm256_permute2x128_si256(even_a, even_b, 0x31));
    store_i(out + 64, _mm256_permute2x128_si256(odd_a, odd_b, 0x20));
    store_i(out + 96, _mm256_permute2x128_si256(odd_a, odd_b, 0x31));
}

template <bool SPREAD>
inline constexpr int kPlaneBytes = SPREAD ? 128 : 64;
inline constexpr size_t kPBytes = 256;  // of a row's P in any format, and of its p as floats

// Products of 16-bit words take P - 32768 where P needs 16 bits; the sum over V makes up for it.
inline bool p_is_biased(const AttendTask& t) {
    return t.p_levels > 32767;
}

template <bool SPREAD, PFormat FORMAT>
inline void store_p(const AttendTask& t, const __m256i (&code)[8], uint8_t* out) {
    __m256i a[2], b[2];  // words of tokens b = 0, 2 and b = 1, 3
    for (int w = 0; w < 2; ++w) {
        const __m256i* c = code + 4 * w;
        a[w] = _mm256_or_si256(c[0], _mm256_slli_epi32(c[2], 16));
        b[w] = _mm256_or_si256(c[1], _mm256_slli_epi32(c[3], 16));
    }
    uint8_t* second = out + kPlaneBytes<SPREAD>;
    if constexpr (FORMAT == PFormat::kWords) {
        const __m256i bias = _mm256_set1_epi16(p_is_biased(t) ? short(-32768) : short(0));
        store_plane<SPREAD>(out, _mm256_xor_si256(a[0], bias), _mm256_xor_si256(a[1], bias));
        store_plane<SPREAD>(second, _mm256_xor_si256(b[0], bias), _mm256_xor_si256(b[1], bias));
        return;
    }
    __m256i low[2], high[2];
    for (int w = 0; w < 2; ++w) {
        low[w] = _mm256_or_si256(even_u8(a[w]), _mm256_slli_epi16(b[w], 8));
        high[w] = _mm256_or_si256(odd_u8(a[w]), _mm256_andnot_si256(_mm256_set1_epi16(0x00FF), b[w]));
    }
    store_plane<SPREAD>(out, low[0], low[1]);
    if (t.p_levels > 255) store_plane<SPREAD>(second, high[0], high[1]);
}

}  // namespace
}  // namespace ta::cpu
