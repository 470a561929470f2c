// Many query rows: a page's K and V are unpacked once into tiles that stay in the nearest cache, and a register-tiled
// product runs over blocks of rows. The integers are those of decode.h.
#pragma once

#include "kernels/cpu/avx2/decode.h"

namespace ta::cpu {
namespace {

// -------------------------------------------------------------------------------------------------------------- K tile
//
// K values in Dot's format for INT8 products with q, in the order of the loads: [tile][r][n]. Dot::kKVectors vectors
// per n.

template <class Dot>
inline size_t k_tile_row(int d) {
    return size_t(d / 16) * Dot::kKVectors * 32;
}

template <class Dot>
inline void unpack_k_bytes(const uint8_t* codes, int d, uint8_t* out) {
    for (int tile = 0; tile < 4; ++tile) {
        for (int n = 0; n < d / 16; ++n) {
            for (int r = 0; r < 8; ++r) {
                const typename Dot::Bytes k(load_i(codes + size_t(tile) * size_t(d / 32) * 512 + load_offset(n, r)));
                k.store_k(out + size_t(tile * 8 + r) * k_tile_row<Dot>(d) + size_t(n) * Dot::kKVectors * 32);
            }
        }
    }
}

template <class Dot, int BITS>
inline void unpack_k_codes(const uint8_t* codes, const uint8_t* step_bytes, const uint8_t* zeros, int d, uint8_t* out) {
    constexpr int kPerByte = 8 / BITS;
    const size_t tile_bytes = 8 * k_tile_row<Dot>(d);
    for (int n = 0; n < d / 16; ++n) {
        const typename Dot::template Steps<BITS> steps(spread_channels(step_bytes, d, n), spread_channels(zeros, d, n));
        for (int tile = 0; tile < 4; tile += kPerByte) {
            const uint8_t* group = codes + size_t(tile / kPerByte) * size_t(d / 32) * 512;
            for (int r = 0; r < 8; ++r) {
                const __m256i x = load_i(group + load_offset(n, r));
                uint8_t* to =
                    out + size_t(tile) * tile_bytes + size_t(r) * k_tile_row<Dot>(d) + size_t(n) * Dot::kKVectors * 32;
                steps.store_k(code_field<BITS, 0>(x), to);
                steps.store_k(code_field<BITS, 1>(x), to + tile_bytes);
                if constexpr (kPerByte == 4) {
                    steps.store_k(code_field<BITS, 2>(x), to + 2 * tile_bytes);
                    steps.store_k(code_field<BITS, 3>(x), to + 3 * tile_bytes);
                }
            }
        }
    }
}

// Scores of R rows for a tile of 16 tokens; 4 R sums are in registers at a time.
template <class Dot, int SHIFT, int R>
inline void scores_of_unpacked(const uint8_t* k_tile, int tile, int d, const ScoreArgs<R>& rows) {
    const size_t k_row = k_tile_row<Dot>(d);
    for (int half = 0; half < 2; ++half) {
        const uint8_t* k = k_tile + size_t(tile * 8 + half * 4) * k_row;
        __m256i sum[R][4];
        set_zero(sum);
        for (size_t i = 0; i < k_row; i += 32) {
            __m256i q_i[R];
            repeat<R>([&](auto row) TA_INLINE_LAMBDA { q_i[row] = load_i(rows.q[row] + i); });
            repeat<4>([&](auto r) TA_INLINE_LAMBDA {
                const __m256i k_i = running(load_i(k + size_t(r) * k_row + i));  // one load, not one per row
                repeat<R>([&](auto row) TA_INLINE_LAMBDA { sum[row][r] = running(Dot::add_k(sum[row][r], k_i, q_i[row])); });
            });
        }
        repeat<R>([&](auto row) TA_INLINE_LAMBDA {
            const __m256i x = add_lanes(add_pairs(sum[row][0], sum[row][1]), add_pairs(sum[row][2], sum[row][3]));
            store_scores<SHIFT>(rows.s[row], tile, half, x, rows.add[row]);
        });
    }
}

// -------------------------------------------------------------------------------------------------------------- V tile
//
// [8 channels][quad of tokens 8 w + l]: a vector holds the 4 tokens of a quad (softmax.h) for 8 channels, as bytes
// (codes; INT8 where Dot multiplies it so) or as two vectors of 16-bit words, even and odd tokens. P needs only be
// broadcast, and no lanes are added.

// Calls emit(vector, channels / 8, quad) for the whole page. FIELD of channel units is chosen by the unit's tile.
template <int BITS, class Emit>
inline void transpose_v(const uint8_t* codes, int d, Emit emit) {
    constexpr int kPerByte = 8 / BITS;
    const int tiles = v_stored_channels(d, BITS) / 16;
    for (int c8 = 0; c8 < d / 8; ++c8) {
        const uint8_t* base[4];
        int shift[4];
        for (int k = 0; k < 4; ++k) {  // channels 8 c8 + 2 k, + 1: tile and r of layout.h's v_place
            const int unit = 4 * c8 + k, tile = unit % tiles;
            base[k] = codes + size_t(tile / kPerByte) * 1024 + load_offset(0, unit / tiles);
            shift[k] = tile % kPerByte * BITS;
        }
        for (int n = 0; n < 4; ++n) {  // n = 2 step + h
            __m256i x[4];
            repeat<4>([&](auto k) TA_INLINE_LAMBDA {
                x[k] = load_i(base[k] + load_offset(n, 0));
                if constexpr (BITS < 8) {
                    x[k] = _mm256_and_si256(_mm256_srl_epi16(x[k], _mm_cvtsi32_si128(shift[k])),
                                            _mm256_set1_epi8((1 << BITS) - 1));
                }
            });
            // 4 x 4 transposition of 64-bit units: [2 h, w 0][2 h, w 1][2 h + 1, w 0][2 h + 1, w 1] of four channel
            // pairs.
            const __m256i w0_01 = _mm256_unpacklo_epi64(x[0], x[1]), w0_23 = _mm256_unpacklo_epi64(x[2], x[3]);
            const __m256i w1_01 = _mm256_unpackhi_epi64(x[0], x[1]), w1_23 = _mm256_unpackhi_epi64(x[2], x[3]);
            const int l = 4 * (n & 1) + (n >> 1);
            emit(_mm256_permute2x128_si256(w0_01, w0_23, 0x20), c8, l);
            emit(_mm256_permute2x128_si256(w0_01, w0_23, 0x31), c8, l + 2);
            emit(_mm256_permute2x128_si256(w1_01, w1_23, 0x20), c8, 8 + l);
            emit(_mm256_permute2x128_si256(w1_01, w1_23, 0x31), c8, 8 + l + 2);
        }
    }
}

template <int BITS>
inline void unpack_v_bytes(const uint8_t* codes, int d, uint8_t* out) {
    transpose_v<BITS>(codes, d, [out](__m256i x, int c8, int quad) { store_i(out + size_t(c8 * 16 + quad) * 32, x); });
}
inline void unpack_v_words(const uint8_t* codes, int d, uint8_t* out) {
    transpose_v<8>(codes, d, [out](__m256i x, int c8, int quad) {
        store_i(out + size_t(c8 * 16 + quad) * 64, even_s8(x));
        store_i(out + size_t(c8 * 16 + quad) * 64 + 32, odd_s8(x));
    });
}
// v_sum [d] = sum_t v_td of such a tile.
inline void sum_v_words(const uint8_t* v_tile, int d, int32_t* v_sum) {
    for (int c8 = 0; c8 < d / 8; ++c8) {
        __m256i sum = zero_i();
        for (int i = 0; i < 32; ++i) {
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(load_i(v_tile + size_t(c8 * 32 + i) * 32), _mm256_set1_epi16(1)));
        }
        store_i(v_sum + 8 * c8, sum);
    }
}

// u [R][16]: sum_t P_t v_td of 16 channels from 8 c8, on a tile of bytes. P: bytes, not spread.
template <class Dot, int BITS, int R>
inline void values_of_byte_tile(const uint8_t* v_tile, int c8, int digits, const uint8_t* const (&p)[R], __m256i (&u)[R][2]) {
    constexpr int kRun = BITS == 2 ? 16 : Dot::kRunOfCodes;  // quads that Dot's sums of codes hold
    const uint8_t* v = v_tile + size_t(c8) * 512;
    set_zero(u);
    for (int digit = digits - 1; digit >= 0; --digit) {
        repeat<R>([&](auto row) TA_INLINE_LAMBDA {
            repeat<2>([&](auto k) TA_INLINE_LAMBDA { u[row][k] = _mm256_slli_epi32(u[row][k], 8); });
        });
        for (int first = 0; first < 16; first += kRun) {
            __m256i sum[R][2];
            set_zero(sum);
            for (int quad = first; quad < first + kRun; ++quad) {
                const __m256i v0 = load_i(v + 32 * quad), v1 = load_i(v + 512 + 32 * quad);
                repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                    const __m256i p_quad = broadcast_i32(p[row] + 64 * digit + 4 * quad);
                    sum[row][0] = running(Dot::add_codes(sum[row][0], p_quad, v0));
                    sum[row][1] = running(Dot::add_codes(sum[row][1], p_quad, v1));
                });
            }
            repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                repeat<2>([&](auto k) TA_INLINE_LAMBDA { u[row][k] = _mm256_add_epi32(u[row][k], Dot::widen(sum[row][k])); });
            });
        }
    }
}

// The same on a tile of words. P: words, not spread.
template <int R>
inline void values_of_word_tile(const uint8_t* v_tile, int c8, const uint8_t* const (&p)[R], __m256i (&u)[R][2]) {
    const uint8_t* v = v_tile + size_t(c8) * 1024;
    set_zero(u);
    for (int quad = 0; quad < 16; ++quad) {
        for (int odd = 0; odd < 2; ++odd) {
            const __m256i v0 = load_i(v + 64 * quad + 32 * odd), v1 = load_i(v + 1024 + 64 * quad + 32 * odd);
            repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                const __m256i p_quad = broadcast_i32(p[row] + 64 * odd + 4 * quad);
                u[row][0] = _mm256_add_epi32(u[row][0], _mm256_madd_epi16(p_quad, v0));
                u[row][1] = _mm256_add_epi32(u[row][1], _mm256_madd_epi16(p_quad, v1));
            });
        }
    }
}

}  // namespace
}  // namespace ta::cpu
