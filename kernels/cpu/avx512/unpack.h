// A page's codes as INT8, in the order they are stored in: K as u8 = value + 128, V as s8. The products broadcast one dword of
// them at a time, so any order will do:
//   [row tile][load step][r][16 dwords 2 u + w], u = 2 i + h, with h for `w >> 1` and w for `w & 1` of layout.h.
// K: row = token 16 tile + r + 8 w, unit 8 step + u = channels (d/4) i + 8 step + 4 h ..
// V: row = channel (d'/8) r + 2 tile + w, unit 8 step + u = tokens 32 h + 8 b + 2 i + step, b = 0..3.
#pragma once

#include "kernels/cpu/avx512/vec.h"

namespace ta::cpu {
namespace {

inline constexpr int kStepBytes = 512;  // a load step of a row tile: 8 r

template <int BITS>
[[gnu::always_inline]] inline __m512i code_field(__m512i x, int f) {
    if constexpr (BITS == 8) {
        return x;
    } else {
        const __m512i shifted = f == 0 ? x : _mm512_srli_epi16(x, BITS * f);
        return _mm512_and_si512(shifted, _mm512_set1_epi8((1 << BITS) - 1));
    }
}

// The unit of K that holds a channel.
[[gnu::always_inline]] inline int k_channel_unit(int d, int channel) {
    const int i = channel / (d / 4), in_lane = channel % (d / 4);
    return 8 * (in_lane / 8) + 2 * i + in_lane % 8 / 4;
}

template <int BITS>
[[gnu::always_inline]] inline void unpack_k_as(int d, const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros,
                                               uint8_t* out) {
    constexpr int FIELDS = 8 / BITS;
    const int steps = d / 32;
    const __m512i low = _mm512_set1_epi16(0xFF), offset = _mm512_set1_epi8(-128);
    for (int step = 0; step < steps; ++step) {
        __m512i even_scale, odd_scale, zero;
        if constexpr (BITS < 8) {
            // 8 bytes of each of the 4 i, every dword twice
            const __m256i at = _mm256_setr_epi64x(0, d / 4, d / 2, 3 * (d / 4));
            const __m256i bytes = _mm256_i64gather_epi64(reinterpret_cast<const long long*>(step_bytes + 8 * step), at, 1);
            const __m256i zs = _mm256_i64gather_epi64(reinterpret_cast<const long long*>(zeros + 8 * step), at, 1);
            const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            const __m512i scale = _mm512_and_si512(_mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(bytes)),
                                                   _mm512_set1_epi8(BITS == 4 ? 31 : 127));
            even_scale = _mm512_and_si512(scale, low);
            odd_scale = _mm512_srli_epi16(scale, 8);
            zero = _mm512_xor_si512(_mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(zs)), offset);
        }
        for (int group = 0; group < 4 / FIELDS; ++group) {
            const uint8_t* from = codes + (group * steps + step) * kStepBytes;
            for (int r = 0; r < 8; ++r) {
                const __m512i x = load_i(from + 64 * r);
#pragma GCC unroll 4
                for (int f = 0; f < FIELDS; ++f) {
                    uint8_t* to = out + ((group * FIELDS + f) * steps + step) * kStepBytes + 64 * r;
                    if constexpr (BITS == 8) {
                        store_i(to, _mm512_xor_si512(x, offset));
                    } else {
                        const __m512i c = code_field<BITS>(x, f);
                        const __m512i even = _mm512_mullo_epi16(_mm512_and_si512(c, low), even_scale);
                        const __m512i odd = _mm512_mullo_epi16(_mm512_andnot_si512(low, c), odd_scale);  // in the high byte
                        store_i(to, _mm512_add_epi8(_mm512_or_si512(even, odd), zero));
                    }
                }
            }
        }
    }
}

template <int BITS>
[[gnu::always_inline]] inline void unpack_v_as(int d, const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros,
                                               uint8_t* out) {
    constexpr int FIELDS = 8 / BITS;
    const int per_r = v_stored_channels(d, BITS) / 8;  // channels of one r: 2 for each row tile
    for (int r = 0; r < 8 && per_r * r < d; ++r) {
        for (int group = 0; group < per_r / 2 / FIELDS; ++group) {
            __m512i x[2];
            for (int step = 0; step < 2; ++step) x[step] = load_i(codes + (group * 2 + step) * kStepBytes + 64 * r);
#pragma GCC unroll 4
            for (int f = 0; f < FIELDS; ++f) {
                const int tile = group * FIELDS + f, channel = per_r * r + 2 * tile;
                __m512i scale, zero;  // dwords of two channels in turn
                if constexpr (BITS < 8) {
                    const int mask = BITS == 4 ? 31 : 127;
                    const int64_t s0 = step_bytes[channel] & mask, s1 = step_bytes[channel + 1] & mask;
                    const int64_t z0 = zeros[channel], z1 = zeros[channel + 1];
                    scale = _mm512_set1_epi64(s0 * 0x10001 | (s1 * 0x10001) << 32);
                    zero = _mm512_set1_epi64(z0 * 0x1010101 | int64_t(uint64_t(z1 * 0x1010101) << 32));
                }
                for (int step = 0; step < 2; ++step) {
                    __m512i value = code_field<BITS>(x[step], f);
                    // c step < 256: the product of the low byte does not reach the high one
                    if constexpr (BITS < 8) value = _mm512_add_epi8(_mm512_mullo_epi16(value, scale), zero);
                    store_i(out + (tile * 2 + step) * kStepBytes + 64 * r, value);
                }
            }
        }
    }
}

inline void unpack_k(int d, int bits, const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros, uint8_t* out) {
    if (bits == 8) return unpack_k_as<8>(d, codes, step_bytes, zeros, out);
    if (bits == 4) return unpack_k_as<4>(d, codes, step_bytes, zeros, out);
    unpack_k_as<2>(d, codes, step_bytes, zeros, out);
}
inline void unpack_v(int d, int bits, const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros, uint8_t* out) {
    if (bits == 8) return unpack_v_as<8>(d, codes, step_bytes, zeros, out);
    if (bits == 4) return unpack_v_as<4>(d, codes, step_bytes, zeros, out);
    unpack_v_as<2>(d, codes, step_bytes, zeros, out);
}

}  // namespace
}  // namespace ta::cpu
