// 256-bit helpers and the exponentials of math.h, 8 lanes at a time. Everything in this folder's headers has internal
// linkage: the avx2 and avxvnni objects compile the same text with different flags, and the linker must not take one
// for the other.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/math.h"

namespace ta::cpu {
namespace {

inline __m256i load_i(const void* p) {
    return _mm256_load_si256(static_cast<const __m256i*>(p));
}
inline void store_i(void* p, __m256i x) {
    _mm256_store_si256(static_cast<__m256i*>(p), x);
}
inline __m256i broadcast_i32(const void* p) {
    int32_t x;
    __builtin_memcpy(&x, p, sizeof x);
    return _mm256_set1_epi32(x);
}
inline __m256i zero_i() {
    return _mm256_setzero_si256();
}

// f(0) .. f(N - 1) with constant arguments. NOTES: arrays of running sums are registers only if every index is a
// constant before the optimiser looks at them; loops that it unrolls later leave them in memory.
template <int N, class F>
[[gnu::always_inline]] inline void repeat(F f) {
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
        (f(std::integral_constant<int, I>()), ...);
    }
    (std::make_integer_sequence<int, N>());
}
#define TA_INLINE_LAMBDA __attribute__((always_inline))
// Sets every element of an array of running sums to zero, one by one for the same reason.
template <class T>
[[gnu::always_inline]] inline void set_zero(T& x) {
    if constexpr (std::is_array_v<T>) {
        repeat<int(std::extent_v<T>)>([&](auto i) TA_INLINE_LAMBDA { set_zero(x[i]); });
    } else {
        x = _mm256_setzero_si256();
    }
}

// NOTES: GCC reassociates integer sums over an unrolled loop into trees and spills half of them. This keeps a running
// sum one.
[[gnu::always_inline]] inline __m256i running(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}

// The even and the odd bytes of each 16-bit word, as words.
inline __m256i even_s8(__m256i x) {
    return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
}
inline __m256i odd_s8(__m256i x) {
    return _mm256_srai_epi16(x, 8);
}
inline __m256i even_u8(__m256i x) {
    return _mm256_and_si256(x, _mm256_set1_epi16(0x00FF));
}
inline __m256i odd_u8(__m256i x) {
    return _mm256_srli_epi16(x, 8);
}

// Field FIELD of every byte of BITS-bit codes.
template <int BITS, int FIELD>
inline __m256i code_field(__m256i x) {
    return _mm256_and_si256(_mm256_srli_epi16(x, BITS * FIELD), _mm256_set1_epi8((1 << BITS) - 1));
}

// Fraction of the zero point in eighths from every step byte (layout.h), as bytes.
template <int BITS>
inline __m256i fraction_bytes(__m256i steps) {
    if constexpr (BITS == 4) return _mm256_and_si256(_mm256_srli_epi16(steps, 5), _mm256_set1_epi8(7));
    return _mm256_and_si256(_mm256_srli_epi16(steps, 5), _mm256_set1_epi8(4));
}
template <int BITS>
inline __m256i step_bytes(__m256i steps) {
    return _mm256_and_si256(steps, _mm256_set1_epi8(BITS == 4 ? 31 : 127));
}

// Dwords [a b a b | a b a b] of x and y -> [x.a x.b y.a y.b] with half of the sum in each 128-bit lane.
inline __m256i add_pairs(__m256i x, __m256i y) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
}
// Joins the lanes of two such: [x.a x.b y.a y.b | z.a z.b w.a w.b].
inline __m256i add_lanes(__m256i xy, __m256i zw) {
    return _mm256_add_epi32(_mm256_permute2x128_si256(xy, zw, 0x20), _mm256_permute2x128_si256(xy, zw, 0x31));
}

inline int32_t sum_i32(__m256i x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xB1)));
}
inline float max_f32(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
// Lane k + lane k+8, +4, +2, +1 of 16 lanes: the order that attend.h asks for.
inline float sum_16_lanes(__m256 low, __m256 high) {
    const __m256 x = _mm256_add_ps(low, high);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

template <int N>
inline __m256 horner(const float (&coeff)[N], __m256 f) {
    __m256 r = _mm256_set1_ps(coeff[N - 1]);
#pragma GCC unroll 8
    for (int k = N - 2; k >= 0; --k) r = _mm256_fmadd_ps(r, f, _mm256_set1_ps(coeff[k]));
    return r;
}
template <int N>
inline __m256 exp2_neg_by(const float (&coeff)[N], __m256 u) {
    const __m256 n = _mm256_floor_ps(u);
    const __m256i r = _mm256_castps_si256(horner(coeff, _mm256_sub_ps(u, n)));
    const __m256i scaled = _mm256_sub_epi32(r, _mm256_slli_epi32(_mm256_cvttps_epi32(n), 23));
    const __m256 below = _mm256_cmp_ps(u, _mm256_set1_ps(kExpCutoff), _CMP_LT_OQ);  // false for NaN, as in math.h
    return _mm256_and_ps(_mm256_castsi256_ps(scaled), below);
}
inline __m256 exp2_neg_exact(__m256 u) {
    return exp2_neg_by(kExactCoeff, u);
}

template <ExpMode MODE>
inline __m256 exp2_neg(__m256 u) {
    if constexpr (MODE == ExpMode::kPoly) return exp2_neg_by(kPolyCoeff, u);
    if constexpr (MODE == ExpMode::kExact) return exp2_neg_exact(u);
    const __m256 y = _mm256_mul_ps(u, _mm256_set1_ps(kLn2));
    const __m256 n = _mm256_floor_ps(y);
    const __m256 r = horner(kSasCoeff, _mm256_sub_ps(y, n));
    const __m256 table =
        _mm256_setr_ps(kSasTable[0], kSasTable[1], kSasTable[2], kSasTable[3], kSasTable[4], kSasTable[5], kSasTable[6], 0.0f);
    const __m256 power = _mm256_permutevar8x32_ps(table, _mm256_cvttps_epi32(n));
    return _mm256_and_ps(_mm256_mul_ps(power, r), _mm256_cmp_ps(y, _mm256_set1_ps(kSasCutoff), _CMP_LE_OQ));
}

inline __m256 tanh_exact(__m256 y) {
    const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
    const __m256 e = exp2_neg_exact(_mm256_mul_ps(_mm256_andnot_ps(sign, y), _mm256_set1_ps(2.0f * kLog2e)));
    const __m256 r = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    return _mm256_or_ps(r, _mm256_and_ps(sign, y));  // r >= 0
}

}  // namespace
}  // namespace ta::cpu
