// 512-bit helpers: transposes, reductions over several rows at once, and the exponentials of math.h, 16 lanes at a time.
// Everything in this folder's headers has internal linkage, so that no other object can end up calling AVX-512 code.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/math.h"

namespace ta::cpu {
namespace {

[[gnu::always_inline]] inline __m512i load_i(const void* p) {
    return _mm512_load_si512(p);
}
[[gnu::always_inline]] inline void store_i(void* p, __m512i x) {
    _mm512_store_si512(p, x);
}
// sum += u8 . s8 in place. The intrinsic lets GCC 12 copy and spill accumulators that a loop carries: P times V ran at a
// quarter of its speed.
[[gnu::always_inline]] inline void add_dot(__m512i& sum, __m512i u8, __m512i s8) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8));
}

[[gnu::always_inline]] inline __m512i broadcast_i32(const void* p) {
    int32_t x;
    __builtin_memcpy(&x, p, sizeof x);
    return _mm512_set1_epi32(x);
}
inline float read_f32(const uint8_t* p) {
    float x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
}

// The 512-byte unit of a code array, "load" in layout.h: 8 vectors (r) of 8 qwords (j = 2 i + (w >> 1)), a qword holding the
// dwords of w & 1 = 0, 1. Afterwards 8 vectors (j) with lane 2 r + (w & 1). A dword is 4 channels of a token (K) or 4 tokens of
// a channel (V), as VNNI wants it, and lanes are 16 tokens or channels: nothing is left to add across lanes.
[[gnu::always_inline]] inline void transpose_qwords(__m512i (&v)[8]) {
    __m512i a[8], b[8];
#pragma GCC unroll 4
    for (int p = 0; p < 4; ++p) {  // [v_2p v_2p+1] of qwords 0 2 4 6 | 1 3 5 7
        a[p] = _mm512_unpacklo_epi64(v[2 * p], v[2 * p + 1]);
        a[4 + p] = _mm512_unpackhi_epi64(v[2 * p], v[2 * p + 1]);
    }
#pragma GCC unroll 2
    for (int odd = 0; odd < 8; odd += 4) {
        b[odd + 0] = _mm512_shuffle_i64x2(a[odd + 0], a[odd + 1], 0x88);  // qwords 0, 4 (of rows 0..3)
        b[odd + 1] = _mm512_shuffle_i64x2(a[odd + 2], a[odd + 3], 0x88);
        b[odd + 2] = _mm512_shuffle_i64x2(a[odd + 0], a[odd + 1], 0xDD);  // qwords 2, 6
        b[odd + 3] = _mm512_shuffle_i64x2(a[odd + 2], a[odd + 3], 0xDD);
        const int j = odd / 4;
        v[j + 0] = _mm512_shuffle_i64x2(b[odd + 0], b[odd + 1], 0x88);
        v[j + 4] = _mm512_shuffle_i64x2(b[odd + 0], b[odd + 1], 0xDD);
        v[j + 2] = _mm512_shuffle_i64x2(b[odd + 2], b[odd + 3], 0x88);
        v[j + 6] = _mm512_shuffle_i64x2(b[odd + 2], b[odd + 3], 0xDD);
    }
}

// Which token of 16 a lane of a K vector holds: lane 2 r + w is token r + 8 w.
[[gnu::always_inline]] inline __m512i lane_tokens() {
    return _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
}

// Reductions of one vector for each of 4 rows to one lane for each. The order is that of attend.h for the sum of P: lanes
// 2r, 2r+1 (tokens k, k+8), then r, r+4, then r, r+2, then r, r+1.
template <class ADD>
[[gnu::always_inline]] inline __m128 reduce_rows(const __m512 (&x)[4], ADD add) {
    constexpr __mmask16 kOdd = 0xAAAA;
    __m256 half[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
        const __m512 &a = x[2 * k], &b = x[2 * k + 1];
        const __m512 straight = _mm512_mask_blend_ps(kOdd, a, b), crossed = _mm512_mask_blend_ps(kOdd, b, a);
        const __m512 ab = add(straight, _mm512_permute_ps(crossed, 0xB1));
        const __m512 swapped = _mm512_shuffle_f32x4(ab, ab, 0x4E);
        half[k] = _mm512_castps512_ps256(add(ab, swapped));
    }
    const __m512 low = _mm512_castps256_ps512(_mm256_permute2f128_ps(half[0], half[1], 0x20));
    const __m512 high = _mm512_castps256_ps512(_mm256_permute2f128_ps(half[0], half[1], 0x31));
    const __m256 quarter = _mm512_castps512_ps256(add(low, high));  // [r r+1 of rows 0, 1 | of rows 2, 3]
    const __m256d q = _mm256_castps_pd(quarter);
    const __m128d q0 = _mm256_castpd256_pd128(q), q1 = _mm256_extractf128_pd(q, 1);
    const __m512 even = _mm512_castps128_ps512(_mm_castpd_ps(_mm_unpacklo_pd(q0, q1)));
    const __m512 odd = _mm512_castps128_ps512(_mm_castpd_ps(_mm_unpackhi_pd(q0, q1)));
    return _mm512_castps512_ps128(add(even, odd));
}
[[gnu::always_inline]] inline __m128 sum_rows(const __m512 (&x)[4]) {
    return reduce_rows(
        x, [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_add_ps(a, b); });
}
[[gnu::always_inline]] inline __m128 max_rows(const __m512 (&x)[4]) {
    return reduce_rows(
        x, [](__m512 a, __m512 b) __attribute__((always_inline)) { return _mm512_max_ps(a, b); });
}
[[gnu::always_inline]] inline __m128i sum_rows(const __m512i (&x)[4]) {
    const __m512 y[4] = {_mm512_castsi512_ps(x[0]), _mm512_castsi512_ps(x[1]), _mm512_castsi512_ps(x[2]),
                         _mm512_castsi512_ps(x[3])};
    return _mm_castps_si128(reduce_rows(
        y, [](__m512 a, __m512 b) __attribute__((always_inline)) {
            return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
        }));
}

// Lane `row` of a 4-row result in every lane.
[[gnu::always_inline]] inline __m512 broadcast_row(__m128 x, int row) {
    return _mm512_permutexvar_ps(_mm512_set1_epi32(row), _mm512_castps128_ps512(x));
}

template <int N>
[[gnu::always_inline]] inline __m512 horner(const float (&coeff)[N], __m512 f) {
    __m512 r = _mm512_set1_ps(coeff[N - 1]);
#pragma GCC unroll 8
    for (int k = N - 2; k >= 0; --k) r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(coeff[k]));
    return r;
}

inline constexpr int kFloor = 0x09;  // of vreduceps: round down, no precision exception
template <int N>
[[gnu::always_inline]] inline __m512 exp2_neg_by(const float (&coeff)[N], __m512 u) {
    const __mmask16 in_range = _mm512_cmp_ps_mask(u, _mm512_set1_ps(kExpCutoff), _CMP_LT_OQ);  // false for NaN, as in math.h
    const __m512i n = _mm512_cvttps_epi32(u);
    const __m512i r = _mm512_castps_si512(horner(coeff, _mm512_reduce_ps(u, kFloor)));
    return _mm512_castsi512_ps(_mm512_maskz_sub_epi32(in_range, r, _mm512_slli_epi32(n, 23)));
}
[[gnu::always_inline]] inline __m512 exp2_neg_exact(__m512 u) {
    return exp2_neg_by(kExactCoeff, u);
}

template <ExpMode MODE>
[[gnu::always_inline]] inline __m512 exp2_neg(__m512 u) {
    if constexpr (MODE == ExpMode::kPoly) return exp2_neg_by(kPolyCoeff, u);
    if constexpr (MODE == ExpMode::kExact) return exp2_neg_exact(u);
    const __m512 y = _mm512_mul_ps(u, _mm512_set1_ps(kLn2));
    const __mmask16 in_range = _mm512_cmp_ps_mask(y, _mm512_set1_ps(kSasCutoff), _CMP_LE_OQ);
    const __m512 r = horner(kSasCoeff, _mm512_reduce_ps(y, kFloor));
    const __m512 table = _mm512_setr_ps(kSasTable[0], kSasTable[1], kSasTable[2], kSasTable[3], kSasTable[4], kSasTable[5],
                                        kSasTable[6], 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_maskz_mul_ps(in_range, _mm512_permutexvar_ps(_mm512_cvttps_epi32(y), table), r);
}

inline __m512 tanh_exact(__m512 y) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 e = exp2_neg_exact(_mm512_mul_ps(_mm512_abs_ps(y), _mm512_set1_ps(2.0f * kLog2e)));
    const __m512 r = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);  // r >= 0
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(r), _mm512_and_si512(_mm512_castps_si512(y), sign)));
}

}  // namespace
}  // namespace ta::cpu
