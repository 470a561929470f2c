// Attention of few rows. The codes are multiplied as they are stored:
//   sum_d q_d (step_d c_d + z_d) = sum_d (q_d step_d) c_d + sum_d q_d z_d     with q_d step_d as two s8 digits, 256 hi + lo
//   sum_t P_t (step_d c_td + z_d) = step_d sum_t P_t c_td + z_d sum_t P_t     with P_t as one or two u8 digits
// A byte holds 8 / bits fields, tiles that meet the same q or P. Only the fields above one are masked off: with A_f the sum
// over the fields up to f, field f sums to (A_f - A_f-1) >> bits f.
// Before the products, decode_codes.h brings the codes into the order that they are multiplied in, so that lanes are tokens (K)
// or channels (V) and nothing has to be added across them. That is shuffling, for which the products leave room, so it runs
// between them, one matrix ahead: V of a page while its K is multiplied, K of the next page while V is.
#include <type_traits>

#include "kernels/cpu/avx512/decode_codes.h"
#include "kernels/cpu/avx512/paths.h"
#include "kernels/cpu/avx512/softmax.h"

namespace ta::cpu::avx512 {
namespace {

constexpr int kMaxRows = kRowBatch;  // of a row group: with 4 tiles they fill 16 accumulators
constexpr int kMaxDigits = 2;

// A group of up to 4 rows for the whole call.
struct RowGroup {
    int row, rows;
    alignas(64) uint8_t q[kMaxRows][64 * kMaxQVectors];          // KOrder
    alignas(64) int16_t q_words[kMaxRows][kMaxQVectors][2][32];  // even and odd bytes of q
    int32_t q_sum[kMaxRows];                                     // of q, or of 128 q + rest
    bool has_rest;
    alignas(64) uint8_t wide[kMaxRows][kMaxDigits][64 * kMaxQVectors];  // 128 q + rest as digits, 256 hi + lo, low first
    alignas(64) float o[kMaxRows][kMaxHeadDim];                         // VOrder
};

// One page as the rows of a group read it, and their intermediate results from it.
struct Work {
    alignas(64) uint8_t k_codes[kMaxHeadDim / 4 * 4 * 64];  // as Preparation leaves them: at 8 bits 4 vectors for a unit
    alignas(64) uint8_t v_codes[kMaxHeadDim / 64 * 16 * 4 * 64];
    PageScales scales;
    alignas(64) int16_t k_step[kMaxQVectors][2][32];  // even and odd bytes of KOrder
    alignas(64) int16_t k_zero8[kMaxQVectors][2][32];
    alignas(64) int32_t v_step[kMaxHeadDim], v_zero[kMaxHeadDim];  // VOrder; zero as the words z, 128 z
    alignas(64) float v_fraction8[kMaxHeadDim];
    alignas(64) uint8_t digits[kMaxRows][kMaxDigits][64 * kMaxQVectors];  // of q step, or q itself
    int32_t score_base[kMaxRows];
    float score_rest[kMaxRows];
    alignas(64) int32_t scores[kMaxRows][kPageTokens];
    alignas(64) uint8_t p[kMaxRows * kMaxDigits * 64];  // [row][plane][64]
    RowUpdate update;
};

static_assert(4 * sizeof(RowGroup) + sizeof(Work) <= workspace_bytes(64, 4 * kMaxRows));
static_assert(5 * sizeof(RowGroup) + sizeof(Work) <= workspace_bytes(64, 5 * kMaxRows));

// ---- parameters of a page and a group ----

void read_k_parameters(const KOrder& order, const PieceParts& at, int d, const uint8_t* piece, Work& work) {
    const __m512i low_byte = _mm512_set1_epi16(0xFF);
    for (int v = 0; v < order.vectors; ++v) {
        const __m512i bytes = order.load(piece + at.k_parameters, v), zero = order.load(piece + at.k_parameters + d, v);
        const __m512i step = _mm512_and_si512(bytes, _mm512_set1_epi8(at.k_bits == 4 ? 31 : 127));
        const __m512i fraction = _mm512_and_si512(_mm512_srli_epi16(bytes, 5), _mm512_set1_epi8(at.k_bits == 4 ? 7 : 4));
        store_i(work.k_step[v][0], _mm512_and_si512(step, low_byte));
        store_i(work.k_step[v][1], _mm512_srli_epi16(step, 8));
        const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(zero, 8), 5);
        const __m512i odd = _mm512_srai_epi16(_mm512_andnot_si512(low_byte, zero), 5);
        store_i(work.k_zero8[v][0], _mm512_or_si512(even, _mm512_and_si512(fraction, low_byte)));
        store_i(work.k_zero8[v][1], _mm512_or_si512(odd, _mm512_srli_epi16(fraction, 8)));
    }
}

void read_v_parameters(const VOrder& order, const PieceParts& from, int d, const uint8_t* piece, Work& work) {
    const __m512i step_mask = _mm512_set1_epi8(from.v_bits == 4 ? 31 : 127);
    const __m512i fraction_mask = _mm512_set1_epi8(from.v_bits == 4 ? 7 : 4);
    for (int v = 0; 4 * v < order.tiles; ++v) {
        const __m512i bytes = order.load(piece + from.v_parameters, v), zeros = order.load(piece + from.v_parameters + d, v);
        const __m512i steps = _mm512_and_si512(bytes, step_mask);
        const __m512i fractions = _mm512_and_si512(_mm512_srli_epi16(bytes, 5), fraction_mask);
        const auto store_lane = [&]<int lane>(std::integral_constant<int, lane>) {
            const int at = 64 * v + 16 * lane;
            const __m512i zero = _mm512_cvtepi8_epi32(_mm512_extracti32x4_epi32(zeros, lane));
            store_i(work.v_step + at, _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(steps, lane)));
            store_i(work.v_zero + at, _mm512_mask_blend_epi16(0xAAAAAAAA, zero, _mm512_slli_epi32(zero, 23)));
            _mm512_store_ps(work.v_fraction8 + at,
                            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(fractions, lane))));
        };
        store_lane(std::integral_constant<int, 0>());
        store_lane(std::integral_constant<int, 1>());
        store_lane(std::integral_constant<int, 2>());
        store_lane(std::integral_constant<int, 3>());
    }
}

// Words as two digits, 256 hi + lo, in the order of their bytes.
[[gnu::always_inline]] inline void store_digits(__m512i even, __m512i odd, uint8_t* low, uint8_t* high) {
    constexpr __mmask64 kOddBytes = 0xAAAAAAAAAAAAAAAA;
    const __m512i half = _mm512_set1_epi16(128);
    const __m512i even_up = _mm512_add_epi16(even, half), odd_up = _mm512_add_epi16(odd, half);
    store_i(low, _mm512_mask_blend_epi8(kOddBytes, even, _mm512_slli_epi16(odd, 8)));
    store_i(high, _mm512_mask_blend_epi8(kOddBytes, _mm512_srli_epi16(even_up, 8), odd_up));
}

// q step in two digits and q zero8, split so that the score in eighths is 8 (sum + base) + rest.
void fold_rows(const KOrder& order, const RowGroup& group, Work& work) {
    __m512i zero_sum[kMaxRows];
    for (int k = 0; k < kMaxRows; ++k) {
        __m512i sum = _mm512_setzero_si512();
        for (int v = 0; v < order.vectors && k < group.rows; ++v) {
            const __m512i even = load_i(group.q_words[k][v][0]), odd = load_i(group.q_words[k][v][1]);
            sum = _mm512_dpwssd_epi32(sum, even, load_i(work.k_zero8[v][0]));
            sum = _mm512_dpwssd_epi32(sum, odd, load_i(work.k_zero8[v][1]));
            const __m512i x = _mm512_mullo_epi16(even, load_i(work.k_step[v][0])),
                          y = _mm512_mullo_epi16(odd, load_i(work.k_step[v][1]));
            store_digits(x, y, work.digits[k][0] + 64 * v, work.digits[k][1] + 64 * v);
        }
        zero_sum[k] = sum;
    }
    const __m128i total = sum_rows(zero_sum);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(work.score_base), _mm_srai_epi32(total, 3));
    _mm_storeu_ps(work.score_rest, _mm_cvtepi32_ps(_mm_and_si128(total, _mm_set1_epi32(7))));
}

// K at 8 bits: the fields hold K + 128, q is one digit, with its rest two.
void take_rows(const KOrder& order, const RowGroup& group, Work& work) {
    for (int k = 0; k < group.rows; ++k) {
        for (int v = 0; v < order.vectors; ++v) {
            if (group.has_rest) {
                for (int digit = 0; digit < 2; ++digit)
                    store_i(work.digits[k][digit] + 64 * v, load_i(group.wide[k][digit] + 64 * v));
            } else {
                store_i(work.digits[k][0] + 64 * v, load_i(group.q[k] + 64 * v));
            }
        }
        work.score_base[k] = -128 * group.q_sum[k];
    }
    for (float& rest : work.score_rest) rest = 0.0f;
}

// ---- products ----

// The factors of codes: a dword for each unit, of rows and digits that lie at these distances.
struct Factors {
    const uint8_t* first;
    int digits, row_stride, digit_stride;
};

// sum[row][tile] over `blocks` times 8 units, for all digits, the highest first. K: codes are u8 and q is s8; V: P is u8 and
// codes are s8.
template <Matrix MATRIX, int BITS, int ROWS, int TILES>
[[gnu::always_inline]] inline void multiply(const uint8_t* codes, int blocks, const Factors& factors,
                                            Preparation& next_in_memory, Prefetch& prefetch_in_memory, int loads_per_block,
                                            __m512i (&sum)[ROWS][TILES]) {
    constexpr int kFields = 8 / BITS, kUnitBytes = 64 * (4 / kFields);
    static_assert(TILES % kFields == 0);
    Preparation next = next_in_memory;  // stores of bytes may not touch these
    Prefetch prefetch = prefetch_in_memory;
#pragma GCC unroll 4
    for (int k = 0; k < ROWS; ++k) {
#pragma GCC unroll 4
        for (int tile = 0; tile < TILES; ++tile) sum[k][tile] = _mm512_setzero_si512();
    }
    for (int digit = factors.digits - 1; digit >= 0; --digit) {
#pragma GCC unroll 4
        for (int k = 0; k < ROWS; ++k) {
#pragma GCC unroll 4
            for (int tile = 0; tile < TILES; ++tile) sum[k][tile] = _mm512_slli_epi32(sum[k][tile], 8);
        }
        const uint8_t* code = codes;
        const uint8_t* factor = factors.first + digit * factors.digit_stride;
        for (int block = 0; block < blocks; ++block) {
            next.template run<MATRIX == Matrix::kK ? Matrix::kV : Matrix::kK>(loads_per_block);
#pragma GCC unroll 8
            for (int unit = 0; unit < 8; ++unit) {
                prefetch.run();
                __m512i f[TILES];
#pragma GCC unroll 4
                for (int tile = 0; tile < TILES; ++tile) {
                    const int field = tile % kFields;
                    f[tile] = load_i(code + kUnitBytes * unit + 64 * (tile / kFields));
                    if (MATRIX == Matrix::kK && BITS == 8) f[tile] = _mm512_xor_si512(f[tile], _mm512_set1_epi8(-128));
                    if (field < kFields - 1)
                        f[tile] = _mm512_and_si512(f[tile], _mm512_set1_epi8(char((1 << BITS * (field + 1)) - 1)));
                }
#pragma GCC unroll 4
                for (int k = 0; k < ROWS; ++k) {
                    const __m512i x = broadcast_i32(factor + k * factors.row_stride + 4 * unit);
#pragma GCC unroll 4
                    for (int tile = 0; tile < TILES; ++tile) {
                        sum[k][tile] = MATRIX == Matrix::kK ? _mm512_dpbusd_epi32(sum[k][tile], f[tile], x)
                                                            : _mm512_dpbusd_epi32(sum[k][tile], x, f[tile]);
                    }
                }
            }
            code += 8 * kUnitBytes;
            factor += 8 * 4;
        }
    }
    next_in_memory = next;
    prefetch_in_memory = prefetch;
}

// Sums of the fields of a byte from those with the lower fields still in them.
template <int BITS, int TILES>
[[gnu::always_inline]] inline void split_fields(__m512i (&a)[TILES]) {
#pragma GCC unroll 4
    for (int tile = TILES - 1; tile > 0; --tile) {
        const int field = tile % (8 / BITS);
        if (field > 0) a[tile] = _mm512_srai_epi32(_mm512_sub_epi32(a[tile], a[tile - 1]), BITS * field);
    }
}

// DIGITS: of queries.
template <int BITS, int ROWS, int DIGITS = 2>
void scores_of_page(int d, Work& work, Preparation& next, Prefetch& prefetch) {
    __m512i sum[ROWS][4];
    const int blocks = d / 32;
    const Factors q{work.digits[0][0], DIGITS, sizeof work.digits[0], sizeof work.digits[0][0]};
    multiply<Matrix::kK, BITS, ROWS, 4>(work.k_codes, blocks, q, next, prefetch, next.per_block(blocks * DIGITS), sum);
    next.run<Matrix::kV>(next.left());
#pragma GCC unroll 4
    for (int k = 0; k < ROWS; ++k) {
        split_fields<BITS>(sum[k]);
#pragma GCC unroll 4
        for (int tile = 0; tile < 4; ++tile) {
            store_i(work.scores[k] + 16 * tile, _mm512_add_epi32(sum[k][tile], _mm512_set1_epi32(work.score_base[k])));
        }
    }
}

template <int BITS, int ROWS, int TILES>
[[gnu::always_inline]] inline void values_of_tiles(int tile0, int planes, int loads_per_block, Work& work, Preparation& next,
                                                   Prefetch& prefetch, float (*o)[kMaxHeadDim]) {
    __m512i sum[ROWS][TILES];
    const uint8_t* codes = work.v_codes + tile0 / 4 * 16 * (64 * 4 * BITS / 8);
    const Factors p{work.p, planes, 64 * planes, 64};
    multiply<Matrix::kV, BITS, ROWS, TILES>(codes, 2, p, next, prefetch, loads_per_block, sum);
#pragma GCC unroll 4
    for (int k = 0; k < ROWS; ++k) {
        const int32_t total = work.update.code_sum[k];
        const __m512 alpha = _mm512_set1_ps(work.update.alpha[k]), g = _mm512_set1_ps(work.update.g[k]);
        if constexpr (BITS < 8) {
            const __m512i shift = _mm512_set1_epi32(128 * total);  // the topmost field of a byte was signed: 128 less
#pragma GCC unroll 4
            for (int tile = 8 / BITS - 1; tile < TILES; tile += 8 / BITS) sum[k][tile] = _mm512_add_epi32(sum[k][tile], shift);
            split_fields<BITS>(sum[k]);
        }
        // z total as a dot product of words: z (total % 128) + 128 z (total / 128), and total / 128 < 2^15
        const __m512i total_words = _mm512_set1_epi32((total & 127) | (total >> 7 << 16));
        const __m512 total_f = _mm512_set1_ps(float(total));
#pragma GCC unroll 4
        for (int tile = 0; tile < TILES; ++tile) {
            const int at = 16 * (tile0 + tile);
            __m512 u;
            if constexpr (BITS < 8) {
                const __m512i scaled = _mm512_mullo_epi32(sum[k][tile], load_i(work.v_step + at));
                u = _mm512_cvtepi32_ps(_mm512_dpwssd_epi32(scaled, load_i(work.v_zero + at), total_words));
                // float(fraction total): both factors are exact, so one rounding here as there
                u = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_load_ps(work.v_fraction8 + at), total_f), _mm512_set1_ps(0.125f), u);
            } else {
                u = _mm512_cvtepi32_ps(sum[k][tile]);
            }
            _mm512_store_ps(o[k] + at, _mm512_fmadd_ps(u, g, _mm512_mul_ps(_mm512_load_ps(o[k] + at), alpha)));
        }
    }
}

template <int BITS, int ROWS>
void values_of_page(int tiles, int planes, Work& work, Preparation& next, Prefetch& prefetch, float (*o)[kMaxHeadDim]) {
    const int per_block = next.per_block((tiles + 3) / 4 * 2 * planes);
    int tile = 0;
    for (; tile + 4 <= tiles; tile += 4) values_of_tiles<BITS, ROWS, 4>(tile, planes, per_block, work, next, prefetch, o);
    if constexpr (BITS > 2) {
        if (tile < tiles) values_of_tiles<BITS, ROWS, 2>(tile, planes, per_block, work, next, prefetch, o);  // d = 96
    }
    next.run<Matrix::kK>(next.left());
}

using ScoresFn = void (*)(int d, Work& work, Preparation& next, Prefetch& prefetch);
using ValuesFn = void (*)(int tiles, int planes, Work& work, Preparation& next, Prefetch& prefetch, float (*o)[kMaxHeadDim]);

// By rows - 1 and log2 bits - 1, or kWideBytes: 8 bits and two digits.
constexpr int kWideBytes = 3;
constexpr ScoresFn kScores[kMaxRows][4] = {
    {scores_of_page<2, 1>, scores_of_page<4, 1>, scores_of_page<8, 1, 1>, scores_of_page<8, 1>},
    {scores_of_page<2, 2>, scores_of_page<4, 2>, scores_of_page<8, 2, 1>, scores_of_page<8, 2>},
    {scores_of_page<2, 3>, scores_of_page<4, 3>, scores_of_page<8, 3, 1>, scores_of_page<8, 3>},
    {scores_of_page<2, 4>, scores_of_page<4, 4>, scores_of_page<8, 4, 1>, scores_of_page<8, 4>},
};
constexpr ValuesFn kValues[kMaxRows][3] = {
    {values_of_page<2, 1>, values_of_page<4, 1>, values_of_page<8, 1>},
    {values_of_page<2, 2>, values_of_page<4, 2>, values_of_page<8, 2>},
    {values_of_page<2, 3>, values_of_page<4, 3>, values_of_page<8, 3>},
    {values_of_page<2, 4>, values_of_page<4, 4>, values_of_page<8, 4>},
};
int log_index(int bits) {
    return bits == 8 ? 2 : bits == 4 ? 1 : 0;
}

// ---- the pages of a task ----

// 128 q + rest of row k of the group as two digits, and their sum.
void start_rest(const AttendTask& t, const KOrder& order, int row, int k, RowGroup& group) {
    static_assert(kRestUnits == 1 << 7);
    const int8_t* rest = t.q_rest + int64_t(row + k) * t.head_dim;
    __m512i sum = _mm512_setzero_si512();
    for (int v = 0; v < order.vectors; ++v) {
        const __m512i low =
            _mm512_mask_i64gather_epi64(_mm512_setzero_si512(), order.valid[v], load_i(order.qword[v]), rest, 8);
        __m512i word[2];
        for (int odd = 0; odd < 2; ++odd) {
            const __m512i of_rest = _mm512_srai_epi16(odd ? low : _mm512_slli_epi16(low, 8), 8);
            word[odd] = _mm512_add_epi16(_mm512_slli_epi16(load_i(group.q_words[k][v][odd]), 7), of_rest);
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(word[odd], _mm512_set1_epi16(1)));
        }
        store_digits(word[0], word[1], group.wide[k][0] + 64 * v, group.wide[k][1] + 64 * v);
    }
    group.q_sum[k] = _mm512_reduce_add_epi32(sum);
}

void start_group(const AttendTask& t, const KOrder& order, const VOrder& v_order, int row, RowGroup& group) {
    group.row = row;
    group.has_rest = t.q_rest != nullptr;
    group.rows = t.rows - row < kMaxRows ? t.rows - row : kMaxRows;
    for (int k = 0; k < group.rows; ++k) {
        const int8_t* q = t.q + int64_t(row + k) * t.head_dim;
        __m512i sum = _mm512_setzero_si512();
        for (int v = 0; v < order.vectors; ++v) {
            const __m512i ordered =
                _mm512_mask_i64gather_epi64(_mm512_setzero_si512(), order.valid[v], load_i(order.qword[v]), q, 8);
            store_i(group.q[k] + 64 * v, ordered);
            store_i(group.q_words[k][v][0], _mm512_srai_epi16(_mm512_slli_epi16(ordered, 8), 8));
            store_i(group.q_words[k][v][1], _mm512_srai_epi16(ordered, 8));
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), ordered);
        }
        group.q_sum[k] = _mm512_reduce_add_epi32(sum);
        if (group.has_rest) start_rest(t, order, row, k, group);
        v_order.gather(t.o + int64_t(row + k) * t.head_dim, group.o[k]);
    }
}

bool sees(const AttendTask& t, int row, int rows, int64_t first_key) {
    if (t.p_running) return true;  // P = 0 turns -0 in O into +0
    bool seen = false;
    for (int k = 0; k < rows; ++k) {
        const KeysInPage v = keys_in_page(t, row + k, first_key);
        seen |= v.first < v.last;
    }
    return seen;
}

// A task on its way through the pages.
class CodesPath {
  public:
    explicit CodesPath(const AttendTask& task)
        : t(task),
          channel(t.head_dim, t.k_bits, t.v_bits),
          token(t.head_dim),
          k_order(t.head_dim),
          code_order(t.head_dim, v_stored_channels(t.head_dim, t.v_bits)),
          byte_order(t.head_dim, v_stored_channels(t.head_dim, 8)),
          o_order(&code_order),
          n_groups((t.rows + kMaxRows - 1) / kMaxRows),
          groups(reinterpret_cast<RowGroup*>(t.workspace)),
          work(*reinterpret_cast<Work*>(groups + n_groups)) {
        for (int g = 0; g < n_groups; ++g) start_group(t, k_order, code_order, g * kMaxRows, groups[g]);
    }

    template <PForm FORM>
    void run() {
        int64_t n = next_page(t.page_begin);
        if (n < t.page_end) {
            Preparation first = prepare_k(n);
            first.run<Matrix::kK>(first.left());
        }
        while (n < t.page_end) {
            const int64_t after = next_page(n + 1);
            attend_page<FORM>(n, after);
            n = after;
        }
        for (int row = 0; row < t.rows; ++row) {
            o_order->scatter(groups[row / kMaxRows].o[row % kMaxRows], t.o + int64_t(row) * t.head_dim);
        }
    }

  private:
    PieceParts parts(int64_t n) const { return parts_of(t, t.pages[n].kind); }
    const VOrder& v_order_of(const PieceParts& at) const { return at.v_bits == 8 ? byte_order : code_order; }

    // The first page from n on that a row sees.
    int64_t next_page(int64_t n) const {
        while (n < t.page_end && (!t.pages[n].piece || !sees(t, 0, t.rows, n * kPageTokens))) ++n;
        return n;
    }
    Preparation prepare_k(int64_t n) {
        const PieceParts at = parts(n);
        const int loads = kPageTokens * t.head_dim * at.k_bits / 8 / kLoadBytes;
        return Preparation(t.pages[n].piece + at.k_codes, at.k_bits, loads, t.head_dim / 32, work.k_codes);
    }
    Preparation prepare_v(int64_t n) {
        const PieceParts at = parts(n);
        const int loads = kPageTokens * v_order_of(at).stored * at.v_bits / 8 / kLoadBytes;
        return Preparation(t.pages[n].piece + at.v_codes, at.v_bits, loads, 2, work.v_codes);
    }
    void change_order(const VOrder& order) {
        if (o_order->stored != order.stored) {  // 2-bit V codes with padding (d = 96) next to 8 bits
            for (int row = 0; row < t.rows; ++row) {
                alignas(64) float natural[kMaxHeadDim];
                float* o = groups[row / kMaxRows].o[row % kMaxRows];
                o_order->scatter(o, natural);
                order.gather(natural, o);
            }
        }
        o_order = &order;
    }

    template <PForm FORM>
    void attend_page(int64_t n, int64_t after) {
        const uint8_t* piece = t.pages[n].piece;
        const PieceParts at = parts(n);
        const bool k_bytes = at.k_bits == 8;
        const int digits = k_bytes && !t.q_rest ? 1 : 2;  // of queries
        const VOrder& v_order = v_order_of(at);
        read_scales(t, n, lane_tokens(), work.scales);
        if (!k_bytes) read_k_parameters(k_order, at, t.head_dim, piece, work);
        if (at.v_bits != 8) read_v_parameters(v_order, at, t.head_dim, piece, work);
        change_order(v_order);

        int last = 0;
        for (int g = 0; g < n_groups; ++g) {
            if (sees(t, groups[g].row, groups[g].rows, n * kPageTokens)) last = g;
        }
        constexpr int kPlanes = FORM == PForm::kByte ? 1 : 2;
        Preparation v = prepare_v(n), k;
        Prefetch prefetch;
        if (after < t.page_end) {
            k = prepare_k(after);
            const int units = t.head_dim / 32 * 8 * (digits + kPlanes);
            const size_t bytes = t.pages[after].kind == PageKind::kToken ? token.bytes() : channel.bytes();
            prefetch = Prefetch(t.pages[after].piece, bytes, units);
        }
        for (int g = 0; g <= last; ++g) {
            RowGroup& group = groups[g];
            if (!sees(t, group.row, group.rows, n * kPageTokens)) continue;
            if (k_bytes) {
                take_rows(k_order, group, work);
            } else {
                fold_rows(k_order, group, work);
            }
            kScores[group.rows - 1][k_bytes && digits == 2 ? kWideBytes : log_index(at.k_bits)](t.head_dim, work, v, prefetch);
            softmax<FORM>(t, group.row, group.rows, n * kPageTokens, work.scales, {work.scores[0], work.score_rest}, work.p,
                          work.update);
            Preparation nothing;
            kValues[group.rows - 1][log_index(at.v_bits)](v_order.tiles, kPlanes, work, g == last ? k : nothing, prefetch,
                                                          group.o);
        }
    }

    const AttendTask& t;
    const ChannelLayout channel;
    const TokenLayout token;
    const KOrder k_order;
    // Two orders of O only where 2-bit V codes are padded: then O changes its order with the bits of the page's V.
    const VOrder code_order, byte_order;
    const VOrder* o_order;
    const int n_groups;
    RowGroup* const groups;
    Work& work;
};

}  // namespace

void attend_codes(const AttendTask& task) {
    CodesPath path(task);
    if (task.p_levels <= 255) {
        path.run<PForm::kByte>();
    } else {
        path.run<PForm::kTwoBytes>();
    }
}

}  // namespace ta::cpu::avx512
