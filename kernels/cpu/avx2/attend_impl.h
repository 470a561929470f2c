// The attention kernel of both 256-bit instruction sets: the loop over pages and blocks of rows. The sets differ
// in `Dot` alone, how bytes are multiplied and summed: attend.cpp here and in ../avxvnni. Integer products are in
// decode.h (few rows, on codes) and prefill.h (many rows, on tiles); what happens between scores and P is in
// softmax.h.
#pragma once

#include <type_traits>

#include "kernels/cpu/avx2/prefill.h"
#include "kernels/cpu/avx2/softmax.h"

namespace ta::cpu {
namespace {

inline constexpr int kRowBlock = 32;  // rows whose scores and P are held at a time

// V's per-channel numbers at 4 and 2 bits, in the forms that Finish::channel wants.
struct ValueChannels {
    alignas(32) int32_t step[kMaxHeadDim];
    alignas(32) int32_t zero_pair[kMaxHeadDim];  // words z, 128 z
    alignas(32) float fraction8[kMaxHeadDim];
};

// `parameters`: step [d], zero [d].
inline void read_value_channels(const uint8_t* parameters, int d, int bits, ValueChannels& out) {
    for (int c = 0; c < d; c += 8) {
        const auto* steps = reinterpret_cast<const __m128i*>(parameters + c);
        const auto* zeros = reinterpret_cast<const __m128i*>(parameters + d + c);
        const __m256i step = _mm256_cvtepu8_epi32(_mm_loadl_epi64(steps)), zero = _mm256_cvtepi8_epi32(_mm_loadl_epi64(zeros));
        const __m256i fraction = bits == 4 ? _mm256_srli_epi32(step, 5) : _mm256_slli_epi32(_mm256_srli_epi32(step, 7), 2);
        store_i(out.step + c, _mm256_and_si256(step, _mm256_set1_epi32(bits == 4 ? 31 : 127)));
        store_i(out.zero_pair + c, _mm256_blend_epi16(zero, _mm256_slli_epi32(zero, 16 + 7), 0xAA));
        _mm256_store_ps(out.fraction8 + c, _mm256_cvtepi32_ps(fraction));
    }
}

// Step 6's end for 8 channels of a row.
struct Finish {
    __m256 alpha, g, code_sum;
    __m256i code_sum_pair;
    Finish() = default;
    explicit Finish(const RowScale& scale)
        : alpha(_mm256_set1_ps(scale.alpha)),
          g(_mm256_set1_ps(scale.g)),
          code_sum(_mm256_set1_ps(float(scale.code_sum))),
          code_sum_pair(_mm256_set1_epi32((scale.code_sum & 127) | (scale.code_sum >> 7) << 16)) {}

    // z * sum P as z * (sum % 128) + 128 z * (sum / 128): both factors are words, since the sum is at most 64 *
    // 65535. The product fraction * sum of two exact floats rounds once, just as the conversion of the integer F
    // does.
    void channel(float* o, const ValueChannels& page, int c, __m256i u) const {
        const __m256i zero = _mm256_madd_epi16(load_i(page.zero_pair + c), code_sum_pair);
        const __m256 sum = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_mullo_epi32(load_i(page.step + c), u), zero));
        const __m256 f = _mm256_mul_ps(_mm256_load_ps(page.fraction8 + c), code_sum);
        add(o + c, _mm256_fmadd_ps(f, _mm256_set1_ps(0.125f), sum));
    }
    void token(float* o, int c, __m256i u) const { add(o + c, _mm256_cvtepi32_ps(u)); }

  private:
    void add(float* o, __m256 x) const { _mm256_store_ps(o, _mm256_fmadd_ps(x, g, _mm256_mul_ps(_mm256_load_ps(o), alpha))); }
};

template <class Dot>
class Attention {
  public:
    explicit Attention(const AttendTask& task)
        : t(task), d(task.head_dim), decode(task.rows <= Dot::kMostDecodeRows || task.q_rest) {
        static_assert(Dot::kMostDecodeRows <= kRowBlock, "all rows of a decode are one block");
        uint8_t* free = t.workspace;
        const auto take = [&free](size_t bytes) {
            uint8_t* p = free;
            free += (bytes + 63) / 64 * 64;
            return p;
        };
        const size_t rows = size_t(t.rows), block = rows < kRowBlock ? rows : kRowBlock;
        q_bytes = take(rows * q_stride());
        q_sum = reinterpret_cast<int32_t*>(take(rows * sizeof(int32_t)));
        scores = reinterpret_cast<int32_t*>(take(block * kPageTokens * sizeof(int32_t)));
        if (t.q_rest && !Dot::kWordsOfQ) {
            rest_bytes = take(rows * q_stride());
            rest_sum = reinterpret_cast<int32_t*>(take(rows * sizeof(int32_t)));
            rest_scores = reinterpret_cast<int32_t*>(take(block * kPageTokens * sizeof(int32_t)));
        }
        p_codes = take(block * kPBytes);
        if (decode) {
            q_words = reinterpret_cast<int16_t*>(take(rows * size_t(d) * sizeof(int16_t)));
            q_digits = take(rows * size_t(d) * 4);
            u_stride = v_stored_channels(d, t.v_bits);
            u = reinterpret_cast<int32_t*>(take(rows * size_t(u_stride) * sizeof(int32_t)));
        } else {
            k_tile = take(size_t(kPageTokens) * d * 2);
            v_tile = take(size_t(kPageTokens) * d * 2);
        }
        for (int row = 0; row < t.rows; ++row) prepare_q(row);
    }

    void run() {
        for (int64_t n = t.page_begin; n < t.page_end; ++n) {
            first_key = n * kPageTokens;
            piece = t.pages[n].piece;
            if (!piece) continue;
            bool read = false;
            for (int first = 0; first < t.rows; first += kRowBlock) {
                find_active_rows(first, t.rows - first < kRowBlock ? t.rows : first + kRowBlock);
                if (n_active == 0) continue;
                if (!read) read_page(t.pages[n].kind);
                read = true;
                ahead = prefetch_after(n);
                score();
                switch (t.exp) {
                    case ExpMode::kPoly:
                        soften<ExpMode::kPoly>();
                        break;
                    case ExpMode::kExact:
                        soften<ExpMode::kExact>();
                        break;
                    case ExpMode::kSas:
                        soften<ExpMode::kSas>();
                        break;
                }
                if (t.v_float) {
                    add_float_values();
                } else {
                    add_values();
                }
            }
        }
    }

  private:
    size_t q_stride() const { return size_t(d / 16) * Dot::kKVectors * 32; }

    void prepare_q(int row) {
        const int8_t* q = t.q + int64_t(row) * d;
        for (int n = 0; n < d / 16 && decode; ++n)
            store_i(q_words + int64_t(row) * d + 16 * n, _mm256_cvtepi8_epi16(channels_of_load(q, d, n)));
        q_sum[row] = store_codes(q, row, q_bytes);
        if (!t.q_rest) return;
        const int8_t* rest = t.q_rest + int64_t(row) * d;
        if constexpr (Dot::kWordsOfQ) {
            for (int n = 0; n < d / 16; ++n)
                Dot::store_q(spread_channels(q, d, n), spread_channels(rest, d, n),
                             q_bytes + size_t(row) * q_stride() + size_t(n) * Dot::kKVectors * 32);
        } else {
            rest_sum[row] = store_codes(rest, row, rest_bytes);
        }
    }
    // Stores the codes for INT8 products; returns their sum.
    int32_t store_codes(const int8_t* codes, int row, uint8_t* out) const {
        __m256i sum = zero_i();
        for (int n = 0; n < d / 16; ++n) {
            Dot::store_q(spread_channels(codes, d, n), out + size_t(row) * q_stride() + size_t(n) * Dot::kKVectors * 32);
            const __m256i words = _mm256_cvtepi8_epi16(channels_of_load(codes, d, n));
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
        }
        return sum_i32(sum);
    }

    // Rows that the page can change: those that see one of its keys. With P in units of the running maximum a page without
    // visible keys still adds a zero to O, which turns -0 into 0, so there all rows that have begun count.
    void find_active_rows(int first, int last) {
        n_active = 0;
        for (int row = first; row < last; ++row) {
            const KeysInPage seen = keys_in_page(t, row, first_key);
            if (seen.first < seen.last || (t.p_running && t.m[row] != kMinusInf)) active[n_active++] = row;
        }
    }

    void read_page(PageKind kind) {
        read_turning(t, {piece, kind}, page.turning);
        const PieceParts at = parts_of(t, kind);
        read_scales(at, piece, t.n_keys - first_key, page);
        k_codes = piece + at.k_codes;
        v_codes = piece + at.v_codes;
        if (!page.k_bytes) {
            k_steps = piece + at.k_parameters;
            k_zeros = k_steps + d;
        }
        if (!page.v_bytes) read_value_channels(piece + at.v_parameters, d, t.v_bits, values);
        if (!decode) {
            unpack_k();
            if (!t.v_float) unpack_v();
            return;
        }
        if (!page.k_bytes)
            t.k_bits == 4 ? read_steps<4>(k_steps, k_zeros, d, folded) : read_steps<2>(k_steps, k_zeros, d, folded);
        if (page.v_bytes && kWordsOfV && p_is_biased(t) && !t.v_float) sum_values();
    }

    void unpack_k() {
        if (page.k_bytes) {
            unpack_k_bytes<Dot>(k_codes, d, k_tile);
        } else if (t.k_bits == 4) {
            unpack_k_codes<Dot, 4>(k_codes, k_steps, k_zeros, d, k_tile);
        } else {
            unpack_k_codes<Dot, 2>(k_codes, k_steps, k_zeros, d, k_tile);
        }
    }
    void unpack_v() {
        if (!page.v_bytes) {
            t.v_bits == 4 ? unpack_v_bytes<4>(v_codes, d, v_tile) : unpack_v_bytes<2>(v_codes, d, v_tile);
        } else if constexpr (kWordsOfV) {
            unpack_v_words(v_codes, d, v_tile);
            if (p_is_biased(t)) sum_v_words(v_tile, d, v_sum);
        } else {
            unpack_v_bytes<8>(v_codes, d, v_tile);
        }
    }

    // Calls f(rows, first slot) for groups of at most MOST of n slots; `rows` is an integral constant.
    template <int MOST, class F>
    static void for_groups(int n, F f) {
        int i = 0;
        for (; i + MOST <= n; i += MOST) f(std::integral_constant<int, MOST>(), i);
        if constexpr (MOST > 2) {
            if (i + 2 <= n) {
                f(std::integral_constant<int, 2>(), i);
                i += 2;
            }
        }
        for (; i < n; ++i) f(std::integral_constant<int, 1>(), i);
    }

    // ---------------------------------------------------------------------------------------------------------- step 1

    void score() {
        if (decode && !page.k_bytes) {
            for (int i = 0; i < n_active; ++i) {
                const int16_t* q = q_words + int64_t(active[i]) * d;
                uint8_t* digits = q_digits + size_t(i) * size_t(d) * 4;
                add_to_score[i] = t.k_bits == 4 ? fold_q<4>(q, folded, d, digits) : fold_q<2>(q, folded, d, digits);
            }
        } else {
            for (int i = 0; i < n_active; ++i) {
                const uint8_t* q = q_bytes + size_t(active[i]) * q_stride();
                add_to_score[i] = Dot::score_correction(q_sum[active[i]], page.k_bytes ? nullptr : k_steps, t.k_bits, q, d);
            }
        }
        if (!decode) {
            page.k_bytes ? score_tiles<0>() : score_tiles<Dot::kUnpackedShift>();
        } else if (page.k_bytes) {
            for_groups<2>(n_active, [this](auto rows, int i) {
                scores_of_bytes<Dot, rows()>(k_codes, d, score_args<rows()>(i, q_bytes, q_stride(), false), ahead);
            });
            if (t.q_rest && !Dot::kWordsOfQ) add_rest_scores();
        } else if (t.k_bits == 4) {
            for_groups<2>(n_active, [this](auto rows, int i) {
                scores_of_codes<Dot, 4, rows()>(k_codes, d, score_args<rows()>(i, q_digits, size_t(d) * 4, true), ahead);
            });
        } else {
            for_groups<2>(n_active, [this](auto rows, int i) {
                scores_of_codes<Dot, 2, rows()>(k_codes, d, score_args<rows()>(i, q_digits, size_t(d) * 4, true), ahead);
            });
        }
    }

    // 128 S + what the rest of q gives.
    void add_rest_scores() {
        for (int i = 0; i < n_active; ++i) add_to_score[i] = Dot::score_correction(rest_sum[active[i]], nullptr, 8, nullptr, d);
        for_groups<2>(n_active, [this](auto rows, int i) {
            ScoreArgs<rows()> args = score_args<rows()>(i, rest_bytes, q_stride(), false);
            for (int k = 0; k < rows(); ++k) args.s[k] = rest_scores + (i + k) * kPageTokens;
            scores_of_bytes<Dot, rows()>(k_codes, d, args, ahead);
        });
        for (int n = 0; n < n_active * kPageTokens; n += 8)
            store_i(scores + n, _mm256_add_epi32(_mm256_slli_epi32(load_i(scores + n), 7), load_i(rest_scores + n)));
    }

    template <int R>
    ScoreArgs<R> score_args(int first, const uint8_t* q, size_t stride, bool by_slot) const {
        ScoreArgs<R> args;
        for (int i = 0; i < R; ++i) {
            args.q[i] = q + size_t(by_slot ? first + i : active[first + i]) * stride;
            args.add[i] = add_to_score[first + i];
            args.s[i] = scores + (first + i) * kPageTokens;
        }
        return args;
    }

    template <int SHIFT>
    void score_tiles() {
        ScoreArgs<2> pairs[kRowBlock / 2];
        const int n_pairs = n_active / 2;
        for (int i = 0; i < n_pairs; ++i) pairs[i] = score_args<2>(2 * i, q_bytes, q_stride(), false);
        for (int tile = 0; tile < 4; ++tile) {  // a part of K that the nearest cache holds beside q
            for (int i = 0; i < n_pairs; ++i) scores_of_unpacked<Dot, SHIFT, 2>(k_tile, tile, d, pairs[i]);
            if (n_active % 2 == 0) continue;
            scores_of_unpacked<Dot, SHIFT, 1>(k_tile, tile, d, score_args<1>(n_active - 1, q_bytes, q_stride(), false));
        }
    }

    // ------------------------------------------------------------------------------------------------------- steps 2-6

    // Leaves in `active` the rows whose O the page's V changes, with P (or p, for float V) and scale in the same slots.
    template <ExpMode MODE>
    void soften() {
        int kept = 0;
        for (int i = 0; i < n_active; ++i) {
            const int row = active[i];
            uint8_t* out = p_codes + size_t(kept) * kPBytes;
            __m256 p[8];
            __m256i code[8];
            if (!softmax_row<MODE>(t, row, first_key, page, scores + i * kPageTokens, p, scale[kept])) continue;
            if (t.v_float) {
                for (int v = 0; v < 8; ++v) _mm256_store_ps(reinterpret_cast<float*>(out) + 8 * v, p[v]);
            } else if (!quantize_p(t, row, page, p, code, scale[kept])) {
                continue;
            } else if (kWordsOfV && page.v_bytes) {
                decode ? store_p<true, PFormat::kWords>(t, code, out) : store_p<false, PFormat::kWords>(t, code, out);
            } else {
                decode ? store_p<true, PFormat::kBytes>(t, code, out) : store_p<false, PFormat::kBytes>(t, code, out);
            }
            active[kept++] = row;
        }
        n_active = kept;
    }

    // ---------------------------------------------------------------------------------------------------- step 6 and O

    static constexpr bool kWordsOfV = Dot::kInt8P == PFormat::kWords;
    float* o_of(int slot) const { return t.o + int64_t(active[slot]) * d; }

    void add_values() {
        if (decode) {
            const bool two = t.p_levels > 255;
            for_groups<2>(n_active, [this, two](auto rows, int i) {
                two && (!page.v_bytes || !kWordsOfV) ? add_decoded<rows(), 2>(i) : add_decoded<rows(), 1>(i);
            });
        } else {
            for_groups<4>(n_active, [this](auto rows, int i) { this->add_unpacked<rows()>(i); });
        }
    }

    template <int R, int DIGITS>
    void add_decoded(int first) {
        const uint8_t* p[R];
        int32_t* sums[R];
        for (int i = 0; i < R; ++i) {
            p[i] = p_codes + size_t(first + i) * kPBytes;
            sums[i] = u + (first + i) * u_stride;
        }
        if (page.v_bytes) {
            values_of_bytes<Dot, R, DIGITS>(v_codes, d, p, sums, ahead);
        } else if (t.v_bits == 4) {
            values_of_codes<Dot, 4, R, DIGITS>(v_codes, d, p, sums, ahead);
        } else {
            values_of_codes<Dot, 2, R, DIGITS>(v_codes, d, p, sums, ahead);
        }
        for (int i = 0; i < R; ++i) {
            const Finish finish(scale[first + i]);
            float* o = o_of(first + i);
            if (!page.v_bytes) {
                for (int c = 0; c < d; c += 8) finish.channel(o, values, c, load_i(sums[i] + c));
            } else {
                for (int c = 0; c < d; c += 8) finish.token(o, c, unbiased(load_i(sums[i] + c), c));
            }
        }
    }

    template <int R>
    void add_unpacked(int first) {
        const int digits = t.p_levels > 255 ? 2 : 1;
        const uint8_t* p[R];
        float* o[R];
        Finish finish[R];
        for (int i = 0; i < R; ++i) {
            p[i] = p_codes + size_t(first + i) * kPBytes;
            o[i] = o_of(first + i);
            finish[i] = Finish(scale[first + i]);
        }
        for (int c8 = 0; c8 < d / 8; c8 += 2) {
            __m256i sums[R][2];
            if (page.v_bytes) {
                if constexpr (kWordsOfV) {
                    values_of_word_tile<R>(v_tile, c8, p, sums);
                } else {
                    values_of_byte_tile<Dot, 8, R>(v_tile, c8, digits, p, sums);
                }
            } else if (t.v_bits == 4) {
                values_of_byte_tile<Dot, 4, R>(v_tile, c8, digits, p, sums);
            } else {
                values_of_byte_tile<Dot, 2, R>(v_tile, c8, digits, p, sums);
            }
            for (int i = 0; i < R; ++i) {
                for (int k = 0; k < 2; ++k) {
                    const int c = 8 * (c8 + k);
                    if (!page.v_bytes) {
                        finish[i].channel(o[i], values, c, sums[i][k]);
                    } else {
                        finish[i].token(o[i], c, unbiased(sums[i][k], c));
                    }
                }
            }
        }
    }

    // P of 16 bits went into products of words as P - 32768.
    __m256i unbiased(__m256i x, int c) const {
        if (!kWordsOfV || !p_is_biased(t)) return x;
        return _mm256_add_epi32(x, _mm256_slli_epi32(load_i(v_sum + c), 15));
    }
    // v_sum [d] = sum_t v_td of a token page, as a product with P = 1.
    void sum_values() {
        alignas(32) uint8_t ones[kPBytes];
        for (size_t i = 0; i < kPBytes; i += 32) store_i(ones + i, _mm256_set1_epi16(1));
        const uint8_t* const p[1] = {ones};
        int32_t* const sums[1] = {v_sum};
        Prefetch nothing(piece, 0, 1);
        values_of_bytes<Dot, 1, 1>(v_codes, d, p, sums, nothing);
    }

    // Half-INT8: p in fp32 times V in fp32, token by token. 64 channels at a time keep O in registers and V's part in
    // the cache.
    void add_float_values() {
        for (int c = 0; c < d; c += 64) {
            for (int i = 0; i < n_active; ++i) d - c >= 64 ? add_float_row<8>(i, c) : add_float_row<4>(i, c);
        }
    }
    template <int VECTORS>
    void add_float_row(int slot, int channel) {
        const float* p = reinterpret_cast<const float*>(p_codes + size_t(slot) * kPBytes);
        float* o = o_of(slot) + channel;
        const float* v = t.v_float + first_key * t.v_float_stride + channel;
        __m256 sum[VECTORS];
        for (int k = 0; k < VECTORS; ++k) {
            sum[k] = _mm256_mul_ps(_mm256_load_ps(o + 8 * k), _mm256_set1_ps(scale[slot].alpha));
        }
        for (int j = 0; j < kPageTokens; ++j) {
            if (p[j] <= 0.0f) continue;  // may not even be there to read
            const __m256 p_j = _mm256_broadcast_ss(p + j);
            const float* v_j = v + j * t.v_float_stride;
            for (int k = 0; k < VECTORS; ++k) sum[k] = _mm256_fmadd_ps(p_j, _mm256_loadu_ps(v_j + 8 * k), sum[k]);
        }
        for (int k = 0; k < VECTORS; ++k) _mm256_store_ps(o + 8 * k, sum[k]);
    }

    // Fetches the next page that is there, spread over the steps of both products of a decode: about d / 2 and d / 4 for two rows.
    Prefetch prefetch_after(int64_t n) const {
        do ++n;
        while (decode && n < t.page_end && !t.pages[n].piece);
        if (!decode || n >= t.page_end) return {piece, 0, 1};  // what is at hand, which costs nothing
        const PageRef& next = t.pages[n];
        const size_t bytes =
            next.kind == PageKind::kToken ? TokenLayout(d).bytes() : ChannelLayout(d, t.k_bits, t.v_bits).bytes();
        return {next.piece, bytes, (t.rows + 1) / 2 * (d / 2 + d / 4)};
    }

    const AttendTask& t;
    const int d;
    const bool decode;

    // In the workspace.
    uint8_t* q_bytes;  // [rows][q_stride] for products with INT8 K
    int32_t* q_sum;    // [rows]
    // The same of their rests, where those do not fit in beside them; what the rests give to scores.
    uint8_t* rest_bytes = nullptr;
    int32_t *rest_sum = nullptr, *rest_scores = nullptr;
    int32_t* scores;              // [slots][64]
    uint8_t* p_codes;             // [slots][kPBytes]
    int16_t* q_words = nullptr;   // decode: [rows][d]
    uint8_t* q_digits = nullptr;  // decode: [slots][d / 16][hi, lo] 32 bytes
    int32_t* u = nullptr;         // decode: [slots][u_stride]
    int u_stride = 0;
    uint8_t* k_tile = nullptr;
    uint8_t* v_tile = nullptr;

    // State of the page at hand.
    int64_t first_key = 0;
    const uint8_t* piece = nullptr;
    const uint8_t *k_codes = nullptr, *v_codes = nullptr, *k_steps = nullptr, *k_zeros = nullptr;
    Prefetch ahead;  // of the next one
    PageScales page;
    ValueChannels values;
    FoldedChannels folded;
    alignas(32) int32_t v_sum[kMaxHeadDim];

    // State of the block of rows at hand, by slot.
    int n_active = 0;
    int active[kRowBlock];
    int32_t add_to_score[kRowBlock];
    RowScale scale[kRowBlock];
};

}  // namespace
}  // namespace ta::cpu
