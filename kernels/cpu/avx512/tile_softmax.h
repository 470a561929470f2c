// Steps 2 to 6 of attend.h for 16 rows and a page, with the rows in the lanes: nothing is reduced across lanes, and what
// belongs to a row (scale, maximum, sum, ..) is a vector. The scores are [64 tokens][16 rows], tokens in their natural order.
#pragma once

#include "kernels/cpu/avx512/softmax.h"

namespace ta::cpu {
namespace {

inline constexpr int kLanes = 16;

// A RowUpdate of 16 rows, all as floats.
struct LaneUpdate {
    alignas(64) float alpha[kLanes];
    alignas(64) float g[kLanes];
    alignas(64) float code_sum[kLanes];
};

// The keys that 16 rows see, relative to a page; rows that the task does not have see nothing.
struct LaneVisible {
    __m512i first, last;
};
inline LaneVisible visible_lanes(const AttendTask& t, int row, int n, int64_t first_key) {
    LaneVisible out;
    alignas(64) int32_t first[kLanes], last[kLanes];
    for (int k = 0; k < kLanes; ++k) {
        const KeysInPage seen = k < n ? keys_in_page(t, row + k, first_key) : KeysInPage{0, 0};
        first[k] = seen.first;
        last[k] = seen.last;
    }
    out.first = load_i(first);
    out.last = load_i(last);
    return out;
}

[[gnu::always_inline]] inline __m512 hide_key(const LaneVisible& seen, int token, __m512 x) {
    const __m512i at = _mm512_set1_epi32(token);
    const __mmask16 see = _mm512_mask_cmplt_epi32_mask(_mm512_cmpge_epi32_mask(at, seen.first), at, seen.last);
    return _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), see, x);
}

// The queries of 16 rows in the channels of a page's turning pairs.
struct LaneTurning {
    const PageTurning& page;
    alignas(64) float q[kTurningPairs][2][kLanes];
    LaneTurning(const AttendTask& t, int row, __mmask16 rows, const PageTurning& p) : page(p) {
        for (int n = 0; n < p.pairs; ++n) {
            for (int of = 0; of < 2; ++of) {
                for (int k = 0; k < kLanes; ++k)
                    q[n][of][k] = rows >> k & 1 ? t.q_float[int64_t(row + k) * t.head_dim + p.channel[n][of]] : 0.0f;
            }
        }
    }
};

// The rarer terms of step 2 for one token.
[[gnu::noinline]] __m512 add_extras_of_lanes(const AttendTask& t, int row, __mmask16 rows, int64_t first_key, int token,
                                             const LaneTurning& turning, __m512 x) {
    for (int n = 0; n < turning.page.pairs; ++n) {
        for (int of = 0; of < 2; ++of) {
            x = _mm512_fmadd_ps(_mm512_load_ps(turning.q[n][of]), _mm512_set1_ps(turning.page.value[n][of][token]), x);
        }
    }
    if (t.bias) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(rows, t.bias + row));
    if (t.softcap_log2 > 0.0f) {
        x = _mm512_mul_ps(_mm512_set1_ps(t.softcap_log2), tanh_exact(_mm512_mul_ps(x, _mm512_set1_ps(t.softcap_inv))));
    }
    if (t.slope) {
        const __m512i at = _mm512_set1_epi64(key_position(t, first_key + token));
        const __m256 low = _mm512_cvtepi64_ps(_mm512_sub_epi64(at, _mm512_maskz_loadu_epi64(__mmask8(rows), t.position + row)));
        const __m256 high =
            _mm512_cvtepi64_ps(_mm512_sub_epi64(at, _mm512_maskz_loadu_epi64(__mmask8(rows >> 8), t.position + row + 8)));
        const __m512 distance = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
        x = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(rows, t.slope + row), distance, x);
    }
    return x;
}

// The bytes of 4 vectors of codes, packed to words in pairs, side by side in each lane's dword.
[[gnu::always_inline]] inline __m512i join_bytes(__m512i words01, __m512i words23) {
    // Within 16 bytes the pack leaves 4 lanes of each of the 4 vectors.
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm512_shuffle_epi8(_mm512_packus_epi16(words01, words23), lanes);
}

// Rows [row, row + n) of a task, n in 1..16. `all`: every one sees the whole page at hand.
struct RowsInLanes {
    int row, n;
    bool all;
    __mmask16 mask() const { return __mmask16((1u << n) - 1); }
};

// Their scores: token j at at[j * stride]; overwritten. The score is 8 at[..] + rest in eighths where K has 4 or 2 bits, and just at[..]
// on a token page.
struct LaneScores {
    int32_t* at;
    int stride;
    __m512 rest;
};

// Their P: unit 8 step + u at first + unit * unit_bytes, as unpack.h has the units of V; the plane of high bytes plane_bytes
// behind.
struct LaneP {
    uint8_t* first;
    int unit_bytes, plane_bytes;
};

// Step 2: logits in place of the scores, as floats. max[j % 4] is the largest of a row's.
template <bool K_BYTES>
[[gnu::always_inline]] inline void find_logits(const AttendTask& t, const RowsInLanes& of, int64_t first_key,
                                               const PageScales& page, const LaneScores& scores, __m512 (&max)[4]) {
    const __mmask16 rows = of.mask();
    const int stride = scores.stride;
    float* x = reinterpret_cast<float*>(scores.at);
    const __m512 q_scale = _mm512_maskz_loadu_ps(rows, t.q_scale + of.row), eight = _mm512_set1_ps(8.0f), rest = scores.rest;
    const __m512 c = _mm512_mul_ps(q_scale, _mm512_set1_ps(page.k_scale8));
    const auto logit = [&](int j) __attribute__((always_inline)) {
        const __m512 s = _mm512_cvtepi32_ps(load_i(x + j * stride));
        if constexpr (K_BYTES) return _mm512_mul_ps(s, _mm512_mul_ps(q_scale, _mm512_set1_ps(page.k_scale[j])));
        return _mm512_mul_ps(_mm512_fmadd_ps(s, eight, rest), c);  // one rounding: s and rest are exact
    };
    for (__m512& m : max) m = _mm512_set1_ps(kMinusInf);
    if (of.all && !has_extras(t, page)) {
        for (int j = 0; j < kPageTokens; j += 4) {
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                const __m512 x_j = logit(j + k);
                _mm512_store_ps(x + (j + k) * stride, x_j);
                max[k] = _mm512_max_ps(max[k], x_j);
            }
        }
        return;
    }
    const bool extras = has_extras(t, page);
    const LaneTurning turning(t, of.row, rows, page.turning);
    const LaneVisible seen = visible_lanes(t, of.row, of.n, first_key);
    uint64_t slots[kLanes];
    for (int k = 0; k < of.n && t.tree; ++k) slots[k] = tree_slots(*t.tree, of.row + k, first_key);
    for (int j = 0; j < kPageTokens; ++j) {
        __m512 x_j = logit(j);
        if (extras) x_j = add_extras_of_lanes(t, of.row, rows, first_key, j, turning, x_j);
        x_j = hide_key(seen, j, x_j);
        if (t.tree) {
            __mmask16 see = 0;
            for (int k = 0; k < of.n; ++k) see |= __mmask16((slots[k] >> j & 1) << k);
            x_j = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), see, x_j);
        }
        _mm512_store_ps(x + j * stride, x_j);
        max[j % 4] = _mm512_max_ps(max[j % 4], x_j);
    }
}

// Step 6: the integers of P, which `x` is when it is multiplied with to_code. Returns their sum.
template <PForm FORM>
[[gnu::always_inline]] inline __m512i store_p(const float* x, int stride, __m512 to_code, const LaneP& p) {
    // min(code, levels) is not needed: see softmax.h.
    __m512i low_sum = _mm512_setzero_si512(), high_sum = _mm512_setzero_si512();
    const __m512i ones = _mm512_set1_epi8(1);
    for (int first = 0; first < 8; ++first) {  // 2 i + step
        for (int half = 0; half < 2; ++half) {
            __m512i code[4];
#pragma GCC unroll 4
            for (int b = 0; b < 4; ++b) {
                code[b] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(x + (32 * half + 8 * b + first) * stride), to_code));
            }
            const __m512i words01 = _mm512_packus_epi32(code[0], code[1]), words23 = _mm512_packus_epi32(code[2], code[3]);
            uint8_t* out = p.first + (8 * (first % 2) + 2 * (first / 2) + half) * p.unit_bytes;
            if constexpr (FORM == PForm::kByte) {
                const __m512i bytes = join_bytes(words01, words23);
                low_sum = _mm512_dpbusd_epi32(low_sum, bytes, ones);
                store_i(out, bytes);
            } else {
                const __m512i mask = _mm512_set1_epi16(0xFF);
                const __m512i low = join_bytes(_mm512_and_si512(words01, mask), _mm512_and_si512(words23, mask));
                const __m512i high = join_bytes(_mm512_srli_epi16(words01, 8), _mm512_srli_epi16(words23, 8));
                low_sum = _mm512_dpbusd_epi32(low_sum, low, ones);
                high_sum = _mm512_dpbusd_epi32(high_sum, high, ones);
                store_i(out, low);
                store_i(out + p.plane_bytes, high);
            }
        }
    }
    return _mm512_add_epi32(low_sum, _mm512_slli_epi32(high_sum, 8));
}

// Steps 2 to 6. kFloat: P stays in `scores` as floats.
template <ExpMode MODE, PForm FORM, bool K_BYTES>
[[gnu::noinline]] void softmax_of_lanes(const AttendTask& t, const RowsInLanes& of, int64_t first_key, const PageScales& page,
                                        const LaneScores& scores, const LaneP& p_out, LaneUpdate& update) {
    const __mmask16 rows = of.mask();
    const int row = of.row, stride = scores.stride;
    float* x = reinterpret_cast<float*>(scores.at);
    __m512 max[4];
    find_logits<K_BYTES>(t, of, first_key, page, scores, max);

    const __m512 minus_inf = _mm512_set1_ps(kMinusInf);
    const __m512 m_old = _mm512_mask_loadu_ps(minus_inf, rows, t.m + row);
    const __m512 page_max = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
    const __m512 m_new = _mm512_max_ps(page_max, m_old);
    const __mmask16 alive = _mm512_cmp_ps_mask(m_new, minus_inf, _CMP_GT_OQ);
    const __m512 alpha = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), alive, exp2_neg_exact(_mm512_sub_ps(m_new, m_old)));
    _mm512_store_ps(update.alpha, alpha);

    // Sum of P in the order of attend.h: tokens j, j+16, j+32, j+48; then j + j+8, + j+4, + j+2, + j+1. A hidden key has u =
    // inf, or NaN where m = -inf too: p = 0.
    for (__m512& m : max) m = _mm512_setzero_ps();
    const auto column = [&](int j) __attribute__((always_inline)) {
        __m512 sum;
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            float* at = x + (j + 16 * k) * stride;
            const __m512 p = exp2_neg<MODE>(_mm512_sub_ps(m_new, _mm512_load_ps(at)));
            sum = k == 0 ? p : _mm512_add_ps(sum, p);
            const __m512 w = FORM == PForm::kFloat ? p : _mm512_mul_ps(p, _mm512_set1_ps(page.v_ratio[j + 16 * k]));
            _mm512_store_ps(at, w);
            max[k] = _mm512_max_ps(max[k], w);
        }
        return sum;
    };
    __m512 quarter[4];  // of j % 4: ((j + j+8) + (j+4 + j+12))
    for (int j = 0; j < 4; ++j) {
        const __m512 a = column(j), b = column(j + 8);
        const __m512 ab = _mm512_add_ps(a, b);
        const __m512 e = column(j + 4), f = column(j + 12);
        quarter[j] = _mm512_add_ps(ab, _mm512_add_ps(e, f));
    }
    const __m512 sum = _mm512_add_ps(_mm512_add_ps(quarter[0], quarter[2]), _mm512_add_ps(quarter[1], quarter[3]));
    const __m512 l = _mm512_maskz_loadu_ps(rows, t.l + row);
    _mm512_mask_storeu_ps(t.l + row, rows & alive, _mm512_fmadd_ps(l, alpha, sum));
    _mm512_mask_storeu_ps(t.m + row, rows & alive, m_new);
    if (t.page_sums) {
        float* of_page = page_sums_of(t, first_key) + row;
        _mm512_mask_storeu_ps(of_page, rows & alive, alpha);
        _mm512_mask_storeu_ps(of_page + t.page_sums_rows, rows & alive, sum);
    }
    if constexpr (FORM == PForm::kFloat) return;

    const __m512 w_max = _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
    const __m512 a = t.p_running ? _mm512_set1_ps(1.0f) : w_max;
    const __mmask16 adds =
        _mm512_mask_cmp_ps_mask(page.v_scale == 0.0f ? __mmask16(0) : alive, a, _mm512_set1_ps(0x1p-60f), _CMP_GE_OQ);
    const __m512 levels = _mm512_set1_ps(float(t.p_levels));
    const __m512 to_code = _mm512_maskz_div_ps(adds, levels, a);
    const __m512 g = _mm512_mul_ps(_mm512_div_ps(a, levels), _mm512_set1_ps(page.v_scale));
    _mm512_store_ps(update.g, _mm512_mask_mov_ps(_mm512_set1_ps(-0.0f), adds, g));

    _mm512_store_ps(update.code_sum, _mm512_cvtepi32_ps(store_p<FORM>(x, stride, to_code, p_out)));
}

using LaneSoftmaxFn = void (*)(const AttendTask& t, const RowsInLanes& of, int64_t first_key, const PageScales& page,
                               const LaneScores& scores, const LaneP& p_out, LaneUpdate& update);

template <PForm FORM, bool K_BYTES>
inline LaneSoftmaxFn lane_softmax(ExpMode mode) {
    switch (mode) {
        case ExpMode::kExact:
            return softmax_of_lanes<ExpMode::kExact, FORM, K_BYTES>;
        case ExpMode::kSas:
            return softmax_of_lanes<ExpMode::kSas, FORM, K_BYTES>;
        default:
            return softmax_of_lanes<ExpMode::kPoly, FORM, K_BYTES>;
    }
}

}  // namespace
}  // namespace ta::cpu
