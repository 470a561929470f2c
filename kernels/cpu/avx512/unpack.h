// A page's codes as INT8 in the order that the matrix products over many rows read: K as u8 = value + 128 in
// [quad of channels][token, lane order of vec.h][4], V as s8 in [quad 2 L + h: tokens 32 h + 8 b + L][channel][4].
#pragma once

#include "kernels/cpu/avx512/vec.h"

namespace ta::cpu {
namespace {

template <int BITS>
[[gnu::always_inline]] inline __m512i code_field(__m512i x, int f) {
    if constexpr (BITS == 8)
        return x;
    else
        return _mm512_and_si512(_mm512_srli_epi16(x, BITS * f), _mm512_set1_epi8((1 << BITS) - 1));
}

template <int BITS>
[[gnu::always_inline]] inline void unpack_k_as(int d, const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros,
                                               uint8_t* tile) {
    constexpr int FIELDS = 8 / BITS;
    const int steps = d / 32;
    const __m512i low = _mm512_set1_epi16(0xFF), offset = _mm512_set1_epi8(-128);
    for (int group = 0; group < kPageTokens / 16 / FIELDS; ++group) {
        for (int step = 0; step < steps; ++step) {
            __m512i x[8];
            for (int r = 0; r < 8; ++r) x[r] = load_i(codes + (group * steps + step) * 512 + 64 * r);
            transpose_qwords(x);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                const int quad = d / 16 * (j / 2) + 2 * step + j % 2;
                uint8_t* out = tile + quad * 256 + 64 * FIELDS * group;
                if constexpr (BITS == 8) {
                    store_i(out, _mm512_xor_si512(x[j], offset));
                } else {
                    const __m512i scale =
                        _mm512_and_si512(broadcast_i32(step_bytes + 4 * quad), _mm512_set1_epi8(BITS == 4 ? 31 : 127));
                    const __m512i even_scale = _mm512_and_si512(scale, low), odd_scale = _mm512_srli_epi16(scale, 8);
                    const __m512i zero = _mm512_xor_si512(broadcast_i32(zeros + 4 * quad), offset);
#pragma GCC unroll 4
                    for (int f = 0; f < FIELDS; ++f) {
                        const __m512i c = code_field<BITS>(x[j], f);
                        const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(c, low), even_scale);
                        const __m512i odd = _mm512_mullo_epi16(_mm512_andnot_si512(low, c), odd_scale);  // in the high byte
                        store_i(out + 64 * f, _mm512_add_epi8(_mm512_or_si512(even, odd), zero));
                    }
                }
            }
        }
    }
}

template <int BITS>
[[gnu::always_inline]] inline void unpack_v_as(int d, const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros,
                                               uint8_t* tile) {
    constexpr int FIELDS = 8 / BITS;
    const int per_r = v_stored_channels(d, BITS) / 8;  // channels of one r: 2 for each row tile
    for (int r = 0; r < 8 && per_r * r < d; ++r) {
        for (int tile0 = 0; tile0 < per_r / 2; tile0 += 8) {
            const int tiles = per_r / 2 - tile0 < 8 ? per_r / 2 - tile0 : 8;
            const int channel = per_r * r + 2 * tile0;
            const __mmask16 lanes = __mmask16((1u << 2 * tiles) - 1);
            __m512i scale, zero;  // of channel in every byte of its dword
            if constexpr (BITS < 8) {
                const __m128i byte = _mm_maskz_loadu_epi8(lanes, step_bytes + channel),
                              z = _mm_maskz_loadu_epi8(lanes, zeros + channel);
                const __m512i step = _mm512_and_si512(_mm512_cvtepu8_epi32(byte), _mm512_set1_epi32(BITS == 4 ? 31 : 127));
                scale = _mm512_or_si512(step, _mm512_slli_epi32(step, 16));
                zero = _mm512_shuffle_epi8(_mm512_cvtepu8_epi32(z), _mm512_set4_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0));
            }
            for (int step = 0; step < 2; ++step) {
                __m512i x[8];
#pragma GCC unroll 8
                for (int k = 0; k < 8; ++k) {  // vector of row tile k: qword j
                    if (k >= tiles) {
                        x[k] = _mm512_setzero_si512();
                        continue;
                    }
                    const int load = (tile0 + k) / FIELDS * 2 + step;
                    x[k] = code_field<BITS>(load_i(codes + load * 512 + 64 * r), (tile0 + k) % FIELDS);
                }
                transpose_qwords(x);  // vector j: lanes are the 2 channels of each row tile
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) {
                    const int quad = 2 * (2 * (j / 2) + step) + j % 2;
                    __m512i value = x[j];
                    // c step < 256: the product of the low byte does not reach the high one
                    if constexpr (BITS < 8) value = _mm512_add_epi8(_mm512_mullo_epi16(value, scale), zero);
                    _mm512_mask_storeu_epi32(tile + 4 * (quad * d + channel), lanes, value);
                }
            }
        }
    }
}

inline void unpack_k(int d, int bits, const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros, uint8_t* tile) {
    if (bits == 8) return unpack_k_as<8>(d, codes, step_bytes, zeros, tile);
    if (bits == 4) return unpack_k_as<4>(d, codes, step_bytes, zeros, tile);
    unpack_k_as<2>(d, codes, step_bytes, zeros, tile);
}
inline void unpack_v(int d, int bits, const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros, uint8_t* tile) {
    if (bits == 8) return unpack_v_as<8>(d, codes, step_bytes, zeros, tile);
    if (bits == 4) return unpack_v_as<4>(d, codes, step_bytes, zeros, tile);
    unpack_v_as<2>(d, codes, step_bytes, zeros, tile);
}

}  // namespace
}  // namespace ta::cpu
