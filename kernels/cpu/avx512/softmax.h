// Steps 2 to 6 of attend.h for 4 rows and a page, from integer scores to the integers of P. The 64 tokens of a page are 4
// vectors of 16 in the lane order of vec.h. Nothing here knows how codes are stored.
#pragma once

#include "kernels/cpu/avx512/vec.h"
#include "kernels/cpu/turning_terms.h"
#include "kernels/format/query_rest.h"

namespace ta::cpu {
namespace {

inline constexpr int kRowBatch = 4;
inline constexpr int kVectors = kPageTokens / 16;

// A page's scales, reduced to what the products need; arrays in the order asked for: `order` has the token of each of 16 places.
struct PageScales {
    bool k_bytes;                            // K has 8 bits
    float k_scale8;                          // K at 4 or 2 bits: its scale / 8
    alignas(64) float k_scale[kPageTokens];  // at 8; NaN where unread
    float k_unit;                            // of scores at 8: a 128th where queries have their rest
    float v_scale;                           // vfac of attend.h
    alignas(64) float v_ratio[kPageTokens];  // r_t
    PageTurning turning;
};

inline void read_exponents(const uint8_t* exponents, __m512i order, PageScales& out) {
    // 16 exponents are 8 bytes; token k is nibble k. 2^-e has the exponent field 127 - e.
    const __m512i dword = _mm512_srli_epi32(order, 3),
                  shift = _mm512_slli_epi32(_mm512_and_si512(order, _mm512_set1_epi32(7)), 2);
    for (int v = 0; v < kVectors; ++v) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents + 8 * v));
        const __m512i packed = _mm512_permutexvar_epi32(dword, _mm512_castsi128_si512(bytes));
        const __m512i e = _mm512_and_si512(_mm512_srlv_epi32(packed, shift), _mm512_set1_epi32(15));
        store_i(out.v_ratio + 16 * v, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(127), e), 23));
    }
}

// `valid`: slots of the page that hold tokens, any number.
inline void read_v_scales(const float* v_scales, int64_t valid, __m512i order, PageScales& out) {
    const __m512i n = _mm512_set1_epi32(int(valid < 0 ? 0 : valid > kPageTokens ? kPageTokens : valid));
    __m512 held[kVectors], max = _mm512_setzero_ps();
    for (int v = 0; v < kVectors; ++v) {
        const __m512i token = _mm512_add_epi32(order, _mm512_set1_epi32(16 * v));
        const __m512 s = _mm512_permutexvar_ps(order, _mm512_load_ps(v_scales + 16 * v));
        held[v] = _mm512_maskz_mov_ps(_mm512_cmplt_epi32_mask(token, n), s);
        max = _mm512_max_ps(max, held[v]);
    }
    out.v_scale = _mm512_reduce_max_ps(max);
    for (int v = 0; v < kVectors; ++v) {
        const __m512 ratio = _mm512_div_ps(held[v], _mm512_set1_ps(out.v_scale));
        _mm512_store_ps(out.v_ratio + 16 * v, out.v_scale > 0.0f ? ratio : _mm512_setzero_ps());
    }
}

inline void read_scales(const AttendTask& t, int64_t page, __m512i order, PageScales& out) {
    const PageRef& ref = t.pages[page];
    read_turning(t, ref, out.turning);
    const PieceParts at = parts_of(t, ref.kind);
    out.k_bytes = at.k_bits == 8;
    if (out.k_bytes) {
        const auto* k_scales = reinterpret_cast<const float*>(ref.piece + at.k_parameters);
        for (int v = 0; v < kVectors; ++v)
            _mm512_store_ps(out.k_scale + 16 * v, _mm512_permutexvar_ps(order, _mm512_load_ps(k_scales + 16 * v)));
        out.k_unit = t.q_rest ? 1.0f / float(kRestUnits) : 1.0f;
    } else {
        out.k_scale8 = read_f32(ref.piece + at.k_scale) * 0.125f;
    }
    if (at.v_bits == 8) {
        read_v_scales(reinterpret_cast<const float*>(ref.piece + at.v_parameters), t.n_keys - page * kPageTokens, order, out);
    } else {
        out.v_scale = read_f32(ref.piece + at.v_scale);
        read_exponents(ref.piece + at.v_exponents, order, out);
    }
}

// How the update of O ends for 4 rows: O = fma(fma(fraction8 code_sum, 0.125, U), g, O alpha). If a row takes nothing from the
// page has P = 0 and g = -0, which leaves O alpha as it is, the sign of a zero included; alpha is 1 if the row saw nothing yet.
struct RowUpdate {
    alignas(16) float alpha[kRowBatch];
    alignas(16) float g[kRowBatch];
    alignas(16) int32_t code_sum[kRowBatch];
};

// P of a row: planes of 64 bytes, dword 2 L + h holding tokens 32 h + 8 b + L (b = 0..3), the quads that V codes are stored in:
// one plane of bytes, or low bytes and high bytes. kFloat: see tile_softmax.h.
enum class PForm { kByte, kTwoBytes, kFloat };
template <PForm FORM>
inline constexpr int kPBytes = FORM == PForm::kByte ? 64 : 128;

inline __m512 float_of_i64(int64_t first, __m512i offset) {
    const __m512i base = _mm512_set1_epi64(first);
    const __m256 low = _mm512_cvtepi64_ps(_mm512_add_epi64(base, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(offset))));
    const __m256 high = _mm512_cvtepi64_ps(_mm512_add_epi64(base, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(offset, 1))));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// The rarer terms of step 2.
[[gnu::noinline]] inline void add_extras(const AttendTask& t, int row, int64_t first_key, const PageTurning& turning,
                                         __m512 (&x)[kVectors]) {
    for (int n = 0; n < turning.pairs; ++n) {
        for (int of = 0; of < 2; ++of) {
            const __m512 q = _mm512_set1_ps(t.q_float[int64_t(row) * t.head_dim + turning.channel[n][of]]);
            for (int v = 0; v < kVectors; ++v) {
                const __m512 values = _mm512_load_ps(turning.value[n][of] + 16 * v);
                x[v] = _mm512_fmadd_ps(q, _mm512_permutexvar_ps(lane_tokens(), values), x[v]);
            }
        }
    }
    for (int v = 0; v < kVectors; ++v) {
        if (t.bias) x[v] = _mm512_add_ps(x[v], _mm512_set1_ps(t.bias[row]));
        if (t.softcap_log2 > 0.0f) {
            x[v] =
                _mm512_mul_ps(_mm512_set1_ps(t.softcap_log2), tanh_exact(_mm512_mul_ps(x[v], _mm512_set1_ps(t.softcap_inv))));
        }
        if (t.slope && t.tree) {
            alignas(64) float far[16];
            for (int j = 0; j < 16; ++j) far[j] = float(key_position(t, first_key + 16 * v + j) - t.position[row]);
            x[v] =
                _mm512_fmadd_ps(_mm512_set1_ps(t.slope[row]), _mm512_permutexvar_ps(lane_tokens(), _mm512_load_ps(far)), x[v]);
        } else if (t.slope) {
            const __m512 distance = float_of_i64(first_key + 16 * v - t.position[row], lane_tokens());
            x[v] = _mm512_fmadd_ps(_mm512_set1_ps(t.slope[row]), distance, x[v]);
        }
    }
}
[[gnu::always_inline]] inline bool has_extras(const AttendTask& t, const PageScales& page) {
    return page.turning.pairs || t.bias || t.slope || t.softcap_log2 > 0.0f;
}

[[gnu::always_inline]] inline void hide_keys(KeysInPage seen, __m512 (&x)[kVectors]) {
    const __m512i first = _mm512_set1_epi32(seen.first), last = _mm512_set1_epi32(seen.last);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        const __m512i token = _mm512_add_epi32(lane_tokens(), _mm512_set1_epi32(16 * v));
        const __mmask16 see = _mm512_mask_cmpge_epi32_mask(_mm512_cmplt_epi32_mask(token, last), token, first);
        x[v] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), see, x[v]);
    }
}

// For a page with new tokens of a tree.
[[gnu::noinline]] inline void hide_tree(const AttendTask& t, int row, int64_t first_key, __m512 (&x)[kVectors]) {
    const uint64_t slots = tree_slots(*t.tree, row, first_key);
    for (int v = 0; v < kVectors; ++v) {
        const __m512i of_lanes = _mm512_srlv_epi32(_mm512_set1_epi32(int(slots >> (16 * v) & 0xffff)), lane_tokens());
        const __mmask16 see = _mm512_test_epi32_mask(of_lanes, _mm512_set1_epi32(1));
        x[v] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), see, x[v]);
    }
}

// The integers of P as planes of bytes.
template <PForm FORM>
[[gnu::always_inline]] inline void store_codes(const __m512i (&code)[kVectors], uint8_t* out) {
    // Within 16 bytes the packs leave 4 lanes (r, r+8, r+1, r+9) of each of the 4 vectors: quads are bytes 0 1 4 5 and so on.
    const __m512i quads = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    const __m512i a = _mm512_packus_epi32(code[0], code[1]), b = _mm512_packus_epi32(code[2], code[3]);
    if constexpr (FORM == PForm::kByte) {
        store_i(out, _mm512_shuffle_epi8(_mm512_packus_epi16(a, b), quads));
    } else {
        const __m512i mask = _mm512_set1_epi16(0xFF);
        const __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
        const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
        store_i(out, _mm512_shuffle_epi8(low, quads));
        store_i(out + 64, _mm512_shuffle_epi8(high, quads));
    }
}

// The score of token t of row k, in eighths at 4 and 2 bits, is 8 sums[64 k + t] + rest[k], and just sums[..] at 8.
struct RowScores {
    const int32_t* sums;
    const float* rest;
};

// Rows [row, row + n) of the task, n in 1..4.
template <ExpMode MODE, PForm FORM, bool K_BYTES>
[[gnu::always_inline]] inline void softmax_rows(const AttendTask& t, int row, int n, int64_t first_key, const PageScales& page,
                                                const RowScores& scores, uint8_t* p_out, RowUpdate& update) {
    const __mmask8 rows = __mmask8((1u << n) - 1);
    __m512 x[kRowBatch][kVectors], part[kRowBatch];
    const bool extras = has_extras(t, page);
#pragma GCC unroll 4
    for (int k = 0; k < kRowBatch; ++k) {
        const int safe_row = k < n ? row + k : row;
        const float q_scale = t.q_scale[safe_row];
        const __m512 c = _mm512_set1_ps(q_scale * page.k_scale8), rest_k = _mm512_set1_ps(scores.rest[k]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            const __m512 s = _mm512_cvtepi32_ps(load_i(scores.sums + 64 * k + 16 * v));
            if constexpr (K_BYTES) {
                const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(q_scale), _mm512_load_ps(page.k_scale + 16 * v));
                x[k][v] = _mm512_mul_ps(s, _mm512_mul_ps(scale, _mm512_set1_ps(page.k_unit)));
            } else {  // one rounding: s and rest are exact
                x[k][v] = _mm512_mul_ps(_mm512_fmadd_ps(s, _mm512_set1_ps(8.0f), rest_k), c);
            }
        }
        if (extras) add_extras(t, safe_row, first_key, page.turning, x[k]);
        const KeysInPage seen = k < n ? keys_in_page(t, row + k, first_key) : KeysInPage{0, 0};
        if (seen.first > 0 || seen.last < kPageTokens) hide_keys(seen, x[k]);
        if (t.tree && k < n) hide_tree(t, row + k, first_key, x[k]);
        part[k] = _mm512_max_ps(_mm512_max_ps(x[k][0], x[k][1]), _mm512_max_ps(x[k][2], x[k][3]));
    }

    const __m128 m_old = _mm_mask_loadu_ps(_mm_set1_ps(kMinusInf), rows, t.m + row);
    const __m128 m_new = _mm_max_ps(max_rows(part), m_old);
    const __mmask8 alive = _mm_cmp_ps_mask(m_new, _mm_set1_ps(kMinusInf), _CMP_GT_OQ);
    const __m512 decay = exp2_neg_exact(_mm512_castps128_ps512(_mm_sub_ps(m_new, m_old)));
    const __m128 alpha = _mm_mask_mov_ps(_mm_set1_ps(1.0f), alive, _mm512_castps512_ps128(decay));
    _mm_store_ps(update.alpha, alpha);

#pragma GCC unroll 4
    for (int k = 0; k < kRowBatch; ++k) {  // a hidden key has u = inf, or NaN where m = -inf too: p = 0
        const __m512 m_k = broadcast_row(m_new, k);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) x[k][v] = exp2_neg<MODE>(_mm512_sub_ps(m_k, x[k][v]));
        part[k] = _mm512_add_ps(_mm512_add_ps(_mm512_add_ps(x[k][0], x[k][1]), x[k][2]), x[k][3]);
    }
    const __m128 l = _mm_maskz_loadu_ps(rows, t.l + row);
    const __m128 sum = sum_rows(part);
    _mm_mask_storeu_ps(t.l + row, rows & alive, _mm_fmadd_ps(l, alpha, sum));
    _mm_mask_storeu_ps(t.m + row, rows & alive, m_new);
    if (t.page_sums) {
        float* of_page = page_sums_of(t, first_key) + row;
        _mm_mask_storeu_ps(of_page, rows & alive, alpha);
        _mm_mask_storeu_ps(of_page + t.page_sums_rows, rows & alive, sum);
    }

#pragma GCC unroll 4
    for (int k = 0; k < kRowBatch; ++k) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) x[k][v] = _mm512_mul_ps(x[k][v], _mm512_load_ps(page.v_ratio + 16 * v));
        part[k] = _mm512_max_ps(_mm512_max_ps(x[k][0], x[k][1]), _mm512_max_ps(x[k][2], x[k][3]));
    }
    const __m128 a = t.p_running ? _mm_set1_ps(1.0f) : max_rows(part);
    const __mmask8 adds =
        _mm_mask_cmp_ps_mask(page.v_scale == 0.0f ? __mmask8(0) : alive, a, _mm_set1_ps(0x1p-60f), _CMP_GE_OQ);
    const __m128 levels = _mm_set1_ps(float(t.p_levels));
    const __m128 to_code = _mm_maskz_div_ps(adds, levels, a);
    const __m128 g = _mm_mul_ps(_mm_div_ps(a, levels), _mm_set1_ps(page.v_scale));
    _mm_store_ps(update.g, _mm_mask_mov_ps(_mm_set1_ps(-0.0f), adds, g));

    // min(code, levels) is not needed: w <= a, and the two roundings of w levels / a stay far below half a level.
    __m512i code_sum[kRowBatch];
#pragma GCC unroll 4
    for (int k = 0; k < kRowBatch; ++k) {
        const __m512 to_code_k = broadcast_row(to_code, k);
        __m512i code[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) code[v] = _mm512_cvtps_epi32(_mm512_mul_ps(x[k][v], to_code_k));
        code_sum[k] = _mm512_add_epi32(_mm512_add_epi32(code[0], code[1]), _mm512_add_epi32(code[2], code[3]));
        store_codes<FORM>(code, p_out + kPBytes<FORM> * k);
    }
    _mm_store_si128(reinterpret_cast<__m128i*>(update.code_sum), sum_rows(code_sum));
}

template <PForm FORM, bool K_BYTES>
inline void softmax_rows_by_mode(const AttendTask& t, int row, int n, int64_t first_key, const PageScales& page,
                                 const RowScores& scores, uint8_t* p_out, RowUpdate& update) {
    switch (t.exp) {
        case ExpMode::kExact:
            return softmax_rows<ExpMode::kExact, FORM, K_BYTES>(t, row, n, first_key, page, scores, p_out, update);
        case ExpMode::kSas:
            return softmax_rows<ExpMode::kSas, FORM, K_BYTES>(t, row, n, first_key, page, scores, p_out, update);
        default:
            return softmax_rows<ExpMode::kPoly, FORM, K_BYTES>(t, row, n, first_key, page, scores, p_out, update);
    }
}
template <PForm FORM>
inline void softmax(const AttendTask& t, int row, int n, int64_t first_key, const PageScales& page, const RowScores& scores,
                    uint8_t* p_out, RowUpdate& update) {
    if (page.k_bytes) {
        softmax_rows_by_mode<FORM, true>(t, row, n, first_key, page, scores, p_out, update);
    } else {
        softmax_rows_by_mode<FORM, false>(t, row, n, first_key, page, scores, p_out, update);
    }
}

}  // namespace
}  // namespace ta::cpu
