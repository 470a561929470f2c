// Products straight on stored codes, for few query rows: scores with the step folded into q (docs/numerics.md),
// and P times codes. A page is never unpacked: 32 bytes are loaded, split into fields in registers, and multiplied
// for R rows.
//
// A K load holds, per 32 bytes, tokens r and r + 8 of a tile by turns: dwords [r r+8 r r+8 | r r+8 r r+8] of 4
// channels each, i and i + 1 of layout.h in the two halves. A V load holds channels c and c + 1 likewise, of 4 tokens
// each.
#pragma once

#include "kernels/cpu/avx2/vec.h"
#include "kernels/cpu/prefetch.h"

namespace ta::cpu {
namespace {

// 32 bytes n = 2 step + h (i = 2 h and 2 h + 1) of row r of a load group, from its start.
inline size_t load_offset(int n, int r) {
    return size_t(n >> 1) * 512 + size_t(n & 1) * 32 + size_t(r) * 64;
}

// R rows' share of a product with K: q in the order that the product wants, what to add to every score, where scores
// [64] go.
template <int R>
struct ScoreArgs {
    const uint8_t* q[R];
    int32_t add[R];
    int32_t* s[R];
};

// Writes [r0 r0' r1 r1' | r2 r2' r3 r3'] (r' = r + 8) as the scores of 4 r from r = 4 * half of a tile.
template <int SHIFT>
inline void store_scores(int32_t* s, int tile, int half, __m256i x, int32_t add) {
    x = _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    x = _mm256_add_epi32(_mm256_slli_epi32(x, SHIFT), _mm256_set1_epi32(add));
    int32_t* at = s + tile * 16 + half * 4;
    _mm_store_si128(reinterpret_cast<__m128i*>(at), _mm256_castsi256_si128(x));
    _mm_store_si128(reinterpret_cast<__m128i*>(at + 8), _mm256_extracti128_si256(x, 1));
}

// q_d step_d = hi * 2^kFoldShift + lo, both within s8 for any step byte, and small enough that Dot's sums of codes
// hold them.
template <int BITS>
inline constexpr int kFoldShift = BITS == 4 ? 6 : 7;

// Channels in the order of load n, once each: 8 of i, 8 of i + 1.
inline __m128i channels_of_load(const void* bytes, int d, int n) {
    const auto* p = static_cast<const uint8_t*>(bytes) + size_t(d / 4) * (2 * (n & 1)) + 8 * (n >> 1);
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + d / 4)));
}
// The same with every group of 4 twice, byte for byte as in a load.
inline __m256i spread_channels(const void* bytes, int d, int n) {
    return _mm256_shuffle_epi32(_mm256_permute4x64_epi64(_mm256_castsi128_si256(channels_of_load(bytes, d, n)), 0x50), 0x50);
}

// A channel page's steps and zero points in eighths, [d] words in the order of the loads.
struct FoldedChannels {
    alignas(32) int16_t step[kMaxHeadDim], zero8[kMaxHeadDim];
};
template <int BITS>
inline void read_steps(const uint8_t* step_bytes, const uint8_t* zeros, int d, FoldedChannels& out) {
    for (int n = 0; n < d / 16; ++n) {
        const __m256i bytes = _mm256_cvtepu8_epi16(channels_of_load(step_bytes, d, n));
        const __m256i zero = _mm256_cvtepi8_epi16(channels_of_load(zeros, d, n));
        const __m256i fraction = BITS == 4 ? _mm256_srli_epi16(bytes, 5) : _mm256_slli_epi16(_mm256_srli_epi16(bytes, 7), 2);
        store_i(out.step + 16 * n, _mm256_and_si256(bytes, _mm256_set1_epi16(BITS == 4 ? 31 : 127)));
        store_i(out.zero8 + 16 * n, _mm256_add_epi16(_mm256_slli_epi16(zero, 3), fraction));
    }
}

// q [d] words in load order -> digits [d / 16][hi, lo] of 32 bytes, spread. Returns sum q zero8.
template <int BITS>
inline int32_t fold_q(const int16_t* q, const FoldedChannels& page, int d, uint8_t* digits) {
    __m256i zero_sum = zero_i();
    for (int n = 0; n < d / 16; ++n) {
        const __m256i q_n = load_i(q + 16 * n);
        const __m256i x = _mm256_mullo_epi16(q_n, load_i(page.step + 16 * n));
        zero_sum = _mm256_add_epi32(zero_sum, _mm256_madd_epi16(q_n, load_i(page.zero8 + 16 * n)));
        const __m256i half = _mm256_set1_epi16(1 << (kFoldShift<BITS> - 1));
        const __m256i hi = _mm256_srai_epi16(_mm256_add_epi16(x, half), kFoldShift<BITS>);
        const __m256i lo = _mm256_sub_epi16(x, _mm256_slli_epi16(hi, kFoldShift<BITS>));
        store_i(digits + 64 * n, _mm256_shuffle_epi32(_mm256_packs_epi16(hi, hi), 0x50));
        store_i(digits + 64 * n + 32, _mm256_shuffle_epi32(_mm256_packs_epi16(lo, lo), 0x50));
    }
    return sum_i32(zero_sum);
}

template <class Dot, int BITS, int FIELD, int R>
inline void scores_of_tile(const uint8_t* group, int tile, int d, const ScoreArgs<R>& rows, Prefetch& ahead) {
    Prefetch next = ahead;  // in a register
    for (int half = 0; half < 2; ++half) {
        __m256i pairs[R][2];
        repeat<2>([&](auto pair) TA_INLINE_LAMBDA {
            const uint8_t* base = group + load_offset(0, 4 * half + 2 * pair);
            __m256i hi[R][2], lo[R][2];
            set_zero(hi);
            set_zero(lo);
            for (int step = 0; step < d / 32; ++step) {
                next.run();
                repeat<2>([&](auto h) TA_INLINE_LAMBDA {
                    const uint8_t* at = base + step * 512 + h * 32;
                    const __m256i c0 = code_field<BITS, FIELD>(load_i(at)), c1 = code_field<BITS, FIELD>(load_i(at + 64));
                    repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                        const uint8_t* q = rows.q[row] + step * 128 + h * 64;
                        const __m256i q_hi = load_i(q), q_lo = load_i(q + 32);
                        hi[row][0] = running(Dot::add_codes(hi[row][0], c0, q_hi));
                        hi[row][1] = running(Dot::add_codes(hi[row][1], c1, q_hi));
                        lo[row][0] = running(Dot::add_codes(lo[row][0], c0, q_lo));
                        lo[row][1] = running(Dot::add_codes(lo[row][1], c1, q_lo));
                    });
                });
            }
            repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                pairs[row][pair] = add_pairs(Dot::template join<kFoldShift<BITS>>(hi[row][0], lo[row][0]),
                                             Dot::template join<kFoldShift<BITS>>(hi[row][1], lo[row][1]));
            });
        });
        repeat<R>([&](auto row) TA_INLINE_LAMBDA {
            store_scores<3>(rows.s[row], tile, half, add_lanes(pairs[row][0], pairs[row][1]), rows.add[row]);
        });
    }
    ahead = next;
}

// S of R rows on a channel page's K codes. q: digits; add: sum q zero8.
template <class Dot, int BITS, int R>
inline void scores_of_codes(const uint8_t* codes, int d, const ScoreArgs<R>& rows, Prefetch& ahead) {
    constexpr int kPerByte = 8 / BITS;
    for (int tile = 0; tile < 4; tile += kPerByte) {
        const uint8_t* group = codes + size_t(tile / kPerByte) * size_t(d / 32) * 512;
        scores_of_tile<Dot, BITS, 0, R>(group, tile, d, rows, ahead);
        scores_of_tile<Dot, BITS, 1, R>(group, tile + 1, d, rows, ahead);
        if constexpr (kPerByte == 4) {
            scores_of_tile<Dot, BITS, 2, R>(group, tile + 2, d, rows, ahead);
            scores_of_tile<Dot, BITS, 3, R>(group, tile + 3, d, rows, ahead);
        }
    }
}

// S of R rows on a token page's K bytes. q is in Dot's order for INT8 (Dot::store_q).
template <class Dot, int R>
inline void scores_of_bytes(const uint8_t* codes, int d, const ScoreArgs<R>& rows, Prefetch& ahead) {
    for (int tile = 0; tile < 4; ++tile) {
        const uint8_t* group = codes + size_t(tile) * size_t(d / 32) * 512;
        for (int half = 0; half < 2; ++half) {
            __m256i pairs[R][2];
            repeat<2>([&](auto pair) TA_INLINE_LAMBDA {
                const uint8_t* base = group + load_offset(0, 4 * half + 2 * pair);
                __m256i sum[R][2];
                set_zero(sum);
                for (int step = 0; step < d / 32; ++step) {
                    ahead.run();
                    repeat<2>([&](auto h) TA_INLINE_LAMBDA {
                        const uint8_t* at = base + step * 512 + h * 32;
                        const typename Dot::Bytes k0(load_i(at)), k1(load_i(at + 64));
                        repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                            sum[row][0] = running(k0.add_dot_q(sum[row][0], rows.q[row], 2 * step + h));
                            sum[row][1] = running(k1.add_dot_q(sum[row][1], rows.q[row], 2 * step + h));
                        });
                    });
                }
                repeat<R>([&](auto row) TA_INLINE_LAMBDA { pairs[row][pair] = add_pairs(sum[row][0], sum[row][1]); });
            });
            repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                store_scores<0>(rows.s[row], tile, half, add_lanes(pairs[row][0], pairs[row][1]), rows.add[row]);
            });
        }
    }
}

// Adds the lanes of two V tiles [c c' c c' | c c' c c'] and stores their 4 channels.
inline void store_values(int32_t* u, int channel, __m256i tile0, __m256i tile1) {
    const __m256i x = add_pairs(tile0, tile1);
    _mm_store_si128(reinterpret_cast<__m128i*>(u + channel),
                    _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

template <class Dot, int BITS, int FIELD, int R, int DIGITS>
inline void values_of_tiles(const uint8_t* base, int channel, const uint8_t* const (&p)[R], int32_t* const (&u)[R]) {
    __m256i sum[R][DIGITS][2];
    set_zero(sum);
    repeat<4>([&](auto n) TA_INLINE_LAMBDA {
        const __m256i x = load_i(base + load_offset(n, 0));
        const __m256i c0 = code_field<BITS, FIELD>(x), c1 = code_field<BITS, FIELD + 1>(x);
        repeat<R>([&](auto row) TA_INLINE_LAMBDA {
            repeat<DIGITS>([&](auto digit) TA_INLINE_LAMBDA {
                const __m256i p_n = load_i(p[row] + 128 * digit + 32 * n);
                sum[row][digit][0] = running(Dot::add_codes(sum[row][digit][0], p_n, c0));
                sum[row][digit][1] = running(Dot::add_codes(sum[row][digit][1], p_n, c1));
            });
        });
    });
    repeat<R>([&](auto row) TA_INLINE_LAMBDA {
        if constexpr (DIGITS == 2) {
            store_values(u[row], channel, Dot::template join<8>(sum[row][1][0], sum[row][0][0]),
                         Dot::template join<8>(sum[row][1][1], sum[row][0][1]));
        } else {
            store_values(u[row], channel, Dot::widen(sum[row][0][0]), Dot::widen(sum[row][0][1]));
        }
    });
}

// u [v_stored_channels] = sum_t P_t c_td on a channel page's V codes. P: bytes, spread.
template <class Dot, int BITS, int R, int DIGITS>
inline void values_of_codes(const uint8_t* codes, int d, const uint8_t* const (&p)[R], int32_t* const (&u)[R],
                            Prefetch& ahead) {
    constexpr int kPerByte = 8 / BITS;
    const int row_channels = v_stored_channels(d, BITS) / 8;
    for (int channel = 0; channel < row_channels; channel += 2 * kPerByte) {
        const uint8_t* group = codes + size_t(channel / (2 * kPerByte)) * 1024;
        for (int r = 0; r < 8 && r * row_channels < d; ++r) {  // rows beyond d are padding
            const uint8_t* base = group + load_offset(0, r);
            const int first = r * row_channels + channel;
            ahead.run();
            values_of_tiles<Dot, BITS, 0, R, DIGITS>(base, first, p, u);
            if constexpr (kPerByte == 4) values_of_tiles<Dot, BITS, 2, R, DIGITS>(base, first + 4, p, u);
        }
    }
}

// u [d] = sum_t P_t v_td on a token page's V bytes. P in Dot's format for INT8, spread.
template <class Dot, int R, int DIGITS>
inline void values_of_bytes(const uint8_t* codes, int d, const uint8_t* const (&p)[R], int32_t* const (&u)[R],
                            Prefetch& ahead) {
    for (int tile = 0; tile < d / 16; tile += 2) {
        for (int r = 0; r < 8; ++r) {
            const uint8_t* base = codes + size_t(tile) * 1024 + load_offset(0, r);
            ahead.run();
            __m256i sum[R][DIGITS][2];
            set_zero(sum);
            repeat<4>([&](auto n) TA_INLINE_LAMBDA {
                const typename Dot::Bytes v0(load_i(base + load_offset(n, 0))), v1(load_i(base + 1024 + load_offset(n, 0)));
                repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                    repeat<DIGITS>([&](auto digit) TA_INLINE_LAMBDA {
                        sum[row][digit][0] = running(v0.add_dot_p(sum[row][digit][0], p[row], digit, n));
                        sum[row][digit][1] = running(v1.add_dot_p(sum[row][digit][1], p[row], digit, n));
                    });
                });
            });
            const int channel = r * (d / 8) + 2 * tile;
            repeat<R>([&](auto row) TA_INLINE_LAMBDA {
                __m256i total[2];
                repeat<2>([&](auto k) TA_INLINE_LAMBDA {
                    total[k] = sum[row][0][k];
                    if constexpr (DIGITS == 2) total[k] = _mm256_add_epi32(total[k], _mm256_slli_epi32(sum[row][1][k], 8));
                });
                store_values(u[row], channel, total[0], total[1]);
            });
        }
    }
}

}  // namespace
}  // namespace ta::cpu
