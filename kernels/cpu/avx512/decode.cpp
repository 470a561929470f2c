// Attention of few rows. The codes are multiplied as they are stored:
//   sum_d q_d (step_d c_d + z_d) = sum_d (q_d step_d) c_d + sum_d q_d z_d     with q_d step_d as two s8 digits, 256 hi + lo
//   sum_t P_t (step_d c_td + z_d) = step_d sum_t P_t c_td + z_d sum_t P_t     with P_t as one or two u8 digits
// A byte of codes holds 8 / bits fields, all of which meet the same q or P. Only the fields above are masked off: with
// A_f = sum (byte & (2^(bits (f+1)) - 1)) x, field f sums to (A_f - A_f-1) >> bits f.
#include "kernels/cpu/avx512/paths.h"
#include "kernels/cpu/avx512/softmax.h"

namespace ta::cpu::avx512 {
namespace {

constexpr int kMaxRows = kRowBatch;           // of a row group: rows that share unpacked codes
constexpr int kMaxQVectors = kMaxHeadDim / 64;
constexpr int kMaxDigits = 2;
constexpr int kLoadBytes = 512;

// The order of q and of K's steps here: qwords of 8 channels, qword 4 step + i = channels (d/4) i + 8 step .., so that dword
// 8 step + j belongs to vector j of load `step` after transpose_qwords. Padded with zeros to a multiple of 64.
struct KOrder {
    int vectors;
    __mmask8 valid[kMaxQVectors];
    alignas(64) int64_t qword[kMaxQVectors][8];  // where in the natural order

    explicit KOrder(int d) : vectors((d + 63) / 64) {
        const int steps = d / 32;
        for (int n = 0; n < 8 * vectors; ++n) {
            const int step = n / 4, i = n % 4;
            if (n % 8 == 0) valid[n / 8] = 0;
            if (step < steps) valid[n / 8] = __mmask8(valid[n / 8] | 1u << n % 8);
            qword[n / 8][n % 8] = step < steps ? i * steps + step : 0;
        }
    }

    // Reads up to 63 bytes beyond the d that it uses: for arrays within a page's piece.
    [[gnu::always_inline]] __m512i load(const uint8_t* bytes, int v) const {
        const __m512i index = load_i(qword[v]);
        const __m512i low = _mm512_permutex2var_epi64(_mm512_loadu_si512(bytes), index, vectors > 1 ? _mm512_loadu_si512(bytes + 64) : index);
        if (vectors <= 2) return _mm512_maskz_mov_epi64(valid[v], low);
        const __m512i high = _mm512_permutex2var_epi64(_mm512_loadu_si512(bytes + 128), index, _mm512_loadu_si512(bytes + 192));
        return _mm512_mask_mov_epi64(low, _mm512_cmpgt_epi64_mask(index, _mm512_set1_epi64(15)), high);
    }
};

// The order of O here: vector `tile`, lane 2 r + w = channel (d'/8) r + 2 tile + w. Channels of d'..: none.
struct VOrder {
    int d, stored, tiles;
    __mmask32 valid[kMaxHeadDim / 64];
    alignas(64) int16_t pair[kMaxHeadDim / 64][32];  // pairs of channels [tile][r], as indices in the natural order

    VOrder(int head_dim, int stored_channels) : d(head_dim), stored(stored_channels), tiles(stored_channels / 16) {
        for (int n = 0; n < stored / 2; ++n) {
            const int tile = n / 8, r = n % 8, p = stored / 16 * r + tile;
            if (n % 32 == 0) valid[n / 32] = 0;
            if (2 * p < d) valid[n / 32] |= 1u << n % 32;
            pair[n / 32][n % 32] = int16_t(2 * p < d ? p : 0);
        }
        for (int n = stored / 2; n % 32 != 0; ++n) pair[n / 32][n % 32] = 0;
    }

    // [tile][r][w] of an array within a page's piece: reads up to 255 bytes beyond the d that it uses.
    [[gnu::always_inline]] __m512i load(const uint8_t* bytes, int v) const {
        const __m512i index = load_i(pair[v]);
        const __m512i low = _mm512_permutex2var_epi16(_mm512_loadu_si512(bytes), index, _mm512_loadu_si512(bytes + 64));
        if (d <= 128) return _mm512_maskz_mov_epi16(valid[v], low);
        const __m512i high = _mm512_permutex2var_epi16(_mm512_loadu_si512(bytes + 128), index, _mm512_loadu_si512(bytes + 192));
        return _mm512_mask_mov_epi16(low, _mm512_cmpgt_epi16_mask(index, _mm512_set1_epi16(63)), high);
    }
    [[gnu::always_inline]] __m512i channels(int tile) const {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i r = _mm512_srli_epi32(lane, 1), w = _mm512_and_si512(lane, _mm512_set1_epi32(1));
        return _mm512_add_epi32(_mm512_mullo_epi32(r, _mm512_set1_epi32(stored / 8)), _mm512_add_epi32(w, _mm512_set1_epi32(2 * tile)));
    }
    void gather(const float* o, float* ordered) const {
        for (int tile = 0; tile < tiles; ++tile) {
            const __m512i channel = channels(tile);
            const __mmask16 held = _mm512_cmplt_epi32_mask(channel, _mm512_set1_epi32(d));
            _mm512_store_ps(ordered + 16 * tile, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), held, channel, o, 4));
        }
    }
    void scatter(const float* ordered, float* o) const {
        for (int tile = 0; tile < tiles; ++tile) {
            const __m512i channel = channels(tile);
            const __mmask16 held = _mm512_cmplt_epi32_mask(channel, _mm512_set1_epi32(d));
            _mm512_mask_i32scatter_ps(o, held, channel, _mm512_load_ps(ordered + 16 * tile), 4);
        }
    }
};

// A group of up to 4 rows for the whole call.
struct RowGroup {
    int row, rows;
    alignas(64) uint8_t q[kMaxRows][64 * kMaxQVectors];                 // KOrder
    alignas(64) int16_t q_words[kMaxRows][kMaxQVectors][2][32];         // even and odd bytes of q
    int32_t q_sum[kMaxRows];
    alignas(64) float o[kMaxRows][kMaxHeadDim];                         // VOrder
};
static_assert(sizeof(RowGroup) <= kMaxRows * (size_t(kMaxHeadDim) * 7 + 256) + 64);

// What the rows of a group need of one page, and what they make of it.
struct Work {
    PageScales scales;
    alignas(64) int16_t k_step[kMaxQVectors][2][32];   // even and odd bytes of KOrder
    alignas(64) int16_t k_zero8[kMaxQVectors][2][32];
    alignas(64) uint8_t v_step[kMaxHeadDim], v_zero[kMaxHeadDim], v_fraction8[kMaxHeadDim];  // VOrder
    alignas(64) uint8_t digits[kMaxRows][kMaxDigits][64 * kMaxQVectors];  // of q step, or q itself
    int32_t score_base[kMaxRows];
    float score_rest[kMaxRows];
    alignas(64) int32_t scores[kMaxRows][kPageTokens];
    alignas(64) uint8_t p[kMaxRows * kMaxDigits * 64];  // [row][plane][64]
    RowUpdate update;
    alignas(64) __m512i x[2][kMaxHeadDim / 32][8];  // transposed codes of a load, where registers do not hold all rows
};

// Fetches the next page while this one is worked on: each load here asks for the 512 bytes at its place there.
[[gnu::always_inline]] inline void prefetch_load(const uint8_t* p) {
#pragma GCC unroll 8
    for (int line = 0; line < kLoadBytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(p + line), _MM_HINT_T0);
}

[[gnu::always_inline]] inline void load_transposed(const uint8_t* codes, __m512i (&x)[8]) {
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) x[r] = load_i(codes + 64 * r);
    transpose_qwords(x);
}

// Field f and those below it.
template <int BITS>
[[gnu::always_inline]] inline __m512i low_fields(__m512i x, int f) {
    return BITS * (f + 1) >= 8 ? x : _mm512_and_si512(x, _mm512_set1_epi8(char((1 << BITS * (f + 1)) - 1)));
}

// ---- K ----

void read_k_parameters(const KOrder& order, const ChannelLayout& layout, const uint8_t* piece, Work& work) {
    const __m512i low_byte = _mm512_set1_epi16(0xFF);
    for (int v = 0; v < order.vectors; ++v) {
        const __m512i bytes = order.load(piece + layout.k_step(), v), zero = order.load(piece + layout.k_zero(), v);
        const __m512i step = _mm512_and_si512(bytes, _mm512_set1_epi8(layout.k_bits == 4 ? 31 : 127));
        const __m512i fraction = _mm512_and_si512(_mm512_srli_epi16(bytes, 5), _mm512_set1_epi8(layout.k_bits == 4 ? 7 : 4));
        store_i(work.k_step[v][0], _mm512_and_si512(step, low_byte));
        store_i(work.k_step[v][1], _mm512_srli_epi16(step, 8));
        const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(zero, 8), 5);
        const __m512i odd = _mm512_srai_epi16(_mm512_andnot_si512(low_byte, zero), 5);
        store_i(work.k_zero8[v][0], _mm512_or_si512(even, _mm512_and_si512(fraction, low_byte)));
        store_i(work.k_zero8[v][1], _mm512_or_si512(odd, _mm512_srli_epi16(fraction, 8)));
    }
}

// q step in two digits and q zero8, split so that the score in eighths is 8 (sum + base) + rest.
void fold_rows(const KOrder& order, const RowGroup& group, Work& work) {
    constexpr __mmask64 kOddBytes = 0xAAAAAAAAAAAAAAAA;
    const __m512i half = _mm512_set1_epi16(128);
    __m512i zero_sum[kMaxRows];
    for (int k = 0; k < kMaxRows; ++k) {
        __m512i sum = _mm512_setzero_si512();
        for (int v = 0; v < order.vectors && k < group.rows; ++v) {
            const __m512i even = load_i(group.q_words[k][v][0]), odd = load_i(group.q_words[k][v][1]);
            sum = _mm512_dpwssd_epi32(sum, even, load_i(work.k_zero8[v][0]));
            sum = _mm512_dpwssd_epi32(sum, odd, load_i(work.k_zero8[v][1]));
            const __m512i x = _mm512_mullo_epi16(even, load_i(work.k_step[v][0])), y = _mm512_mullo_epi16(odd, load_i(work.k_step[v][1]));
            const __m512i x_up = _mm512_add_epi16(x, half), y_up = _mm512_add_epi16(y, half);
            store_i(work.digits[k][0] + 64 * v, _mm512_mask_blend_epi8(kOddBytes, x, _mm512_slli_epi16(y, 8)));
            store_i(work.digits[k][1] + 64 * v, _mm512_mask_blend_epi8(kOddBytes, _mm512_srli_epi16(x_up, 8), y_up));
        }
        zero_sum[k] = sum;
    }
    const __m128i total = sum_rows(zero_sum);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(work.score_base), _mm_srai_epi32(total, 3));
    _mm_storeu_ps(work.score_rest, _mm_cvtepi32_ps(_mm_and_si128(total, _mm_set1_epi32(7))));
}

// The scores of ROWS rows with the fields of one tile group. x(step, out) delivers the transposed loads.
template <int BITS, int ROWS, int DIGITS, class LOADS>
[[gnu::always_inline]] inline void scores_of_group(int steps, int tile, int row0, const Work& work, int32_t (*scores)[kPageTokens], LOADS loads) {
    constexpr int FIELDS = 8 / BITS;
    __m512i sum[FIELDS][ROWS][DIGITS];
#pragma GCC unroll 4
    for (int k = 0; k < ROWS; ++k) {
        int32_t base = 0;  // with `base` in every field, A_f holds it 1 + 2^bits + .. times
#pragma GCC unroll 4
        for (int f = 0; f < FIELDS; ++f) {
            base = base + (work.score_base[row0 + k] << BITS * f);
            sum[f][k][0] = _mm512_set1_epi32(base);
            if constexpr (DIGITS == 2) sum[f][k][1] = _mm512_setzero_si512();
        }
    }
    for (int step = 0; step < steps; ++step) {
        __m512i x[8];
        loads(step, x);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            __m512i fields[FIELDS];
#pragma GCC unroll 4
            for (int f = 0; f < FIELDS; ++f) fields[f] = low_fields<BITS>(x[j], f);
#pragma GCC unroll 4
            for (int k = 0; k < ROWS; ++k) {
#pragma GCC unroll 2
                for (int digit = 0; digit < DIGITS; ++digit) {
                    const __m512i q = broadcast_i32(work.digits[row0 + k][digit] + 4 * (8 * step + j));
#pragma GCC unroll 4
                    for (int f = 0; f < FIELDS; ++f) sum[f][k][digit] = _mm512_dpbusd_epi32(sum[f][k][digit], fields[f], q);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int k = 0; k < ROWS; ++k) {
        __m512i below = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int f = 0; f < FIELDS; ++f) {
            __m512i a = sum[f][k][0];
            if constexpr (DIGITS == 2) a = _mm512_add_epi32(a, _mm512_slli_epi32(sum[f][k][1], 8));
            const __m512i field = f == 0 ? a : _mm512_srai_epi32(_mm512_sub_epi32(a, below), BITS * f);
            store_i(scores[row0 + k] + 16 * (tile + f), field);
            below = a;
        }
    }
}

template <int BITS, int ROWS>
void scores_of_page(const uint8_t* codes, const uint8_t* next, int d, Work& work) {
    const int steps = d / 32;
    if constexpr (BITS == 8) {  // codes + 128 as u8; score_base takes the 128 away
        for (int tile = 0; tile < 4; ++tile) {
            scores_of_group<8, ROWS, 1>(steps, tile, 0, work, work.scores, [&](int step, __m512i (&x)[8]) __attribute__((always_inline)) {
                const int at = (tile * steps + step) * kLoadBytes;
                prefetch_load(next + at);
                load_transposed(codes + at, x);
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) x[j] = _mm512_xor_si512(x[j], _mm512_set1_epi8(-128));
            });
        }
    } else if constexpr (BITS == 4) {
        for (int group = 0; group < 2; ++group) {
            scores_of_group<4, ROWS, 2>(steps, 2 * group, 0, work, work.scores, [&](int step, __m512i (&x)[8]) __attribute__((always_inline)) {
                const int at = (group * steps + step) * kLoadBytes;
                prefetch_load(next + at);
                load_transposed(codes + at, x);
            });
        }
    } else {  // 4 fields x 2 digits leave registers for 2 rows
        for (int step = 0; step < steps; ++step) {
            prefetch_load(next + step * kLoadBytes);
            __m512i x[8];
            load_transposed(codes + step * kLoadBytes, x);
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) work.x[0][step][j] = x[j];
        }
        const auto loads = [&](int step, __m512i (&x)[8]) __attribute__((always_inline)) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) x[j] = work.x[0][step][j];
        };
        constexpr int kFirst = ROWS < 2 ? ROWS : 2;
        scores_of_group<2, kFirst, 2>(steps, 0, 0, work, work.scores, loads);
        if constexpr (ROWS > 2) scores_of_group<2, ROWS - 2, 2>(steps, 0, 2, work, work.scores, loads);
    }
}

// ---- V ----

void read_v_parameters(const VOrder& order, const ChannelLayout& layout, const uint8_t* piece, Work& work) {
    for (int v = 0; v < (order.stored + 63) / 64; ++v) {
        const __m512i bytes = order.load(piece + layout.v_step(), v);
        store_i(work.v_zero + 64 * v, order.load(piece + layout.v_zero(), v));
        store_i(work.v_step + 64 * v, _mm512_and_si512(bytes, _mm512_set1_epi8(layout.v_bits == 4 ? 31 : 127)));
        store_i(work.v_fraction8 + 64 * v, _mm512_and_si512(_mm512_srli_epi16(bytes, 5), _mm512_set1_epi8(layout.v_bits == 4 ? 7 : 4)));
    }
}

// Adds P V of ROWS rows for the channels of one tile group. As the second factor, codes are signed: the topmost field is
// shifted by 128, which 128 sum P makes up for.
template <int BITS, int ROWS, int PLANES, class LOADS>
[[gnu::always_inline]] inline void values_of_group(int tile, int row0, const Work& work, float (*o)[kMaxHeadDim], LOADS loads) {
    constexpr int FIELDS = 8 / BITS;
    __m512i sum[FIELDS][ROWS][PLANES];
#pragma GCC unroll 4
    for (int k = 0; k < ROWS; ++k) {
#pragma GCC unroll 4
        for (int f = 0; f < FIELDS; ++f) {
            const bool shifted = BITS < 8 && f == FIELDS - 1;
            sum[f][k][0] = shifted ? _mm512_slli_epi32(_mm512_set1_epi32(work.update.code_sum[row0 + k]), 7) : _mm512_setzero_si512();
            if constexpr (PLANES == 2) sum[f][k][1] = _mm512_setzero_si512();
        }
    }
#pragma GCC unroll 1
    for (int step = 0; step < 2; ++step) {
        __m512i x[8];
        loads(step, x);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            __m512i fields[FIELDS];
#pragma GCC unroll 4
            for (int f = 0; f < FIELDS; ++f) fields[f] = low_fields<BITS>(x[j], f);
            if constexpr (BITS < 8) fields[FIELDS - 1] = _mm512_xor_si512(x[j], _mm512_set1_epi8(-128));
            const int quad = 2 * (2 * (j / 2) + step) + j % 2;
#pragma GCC unroll 4
            for (int k = 0; k < ROWS; ++k) {
#pragma GCC unroll 2
                for (int plane = 0; plane < PLANES; ++plane) {
                    const __m512i p = broadcast_i32(work.p + 64 * ((row0 + k) * PLANES + plane) + 4 * quad);
#pragma GCC unroll 4
                    for (int f = 0; f < FIELDS; ++f) sum[f][k][plane] = _mm512_dpbusd_epi32(sum[f][k][plane], p, fields[f]);
                }
            }
        }
    }
    __m512i below[ROWS];
#pragma GCC unroll 4
    for (int f = 0; f < FIELDS; ++f) {
        const int at = 16 * (tile + f);
        __m512i step, zero;
        __m512 fraction;
        if constexpr (BITS < 8) {
            step = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(work.v_step + at)));
            zero = _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(work.v_zero + at)));
            fraction = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(work.v_fraction8 + at))));
        }
#pragma GCC unroll 4
        for (int k = 0; k < ROWS; ++k) {
            __m512i a = sum[f][k][0];
            if constexpr (PLANES == 2) a = _mm512_add_epi32(a, _mm512_slli_epi32(sum[f][k][1], 8));
            __m512 u;
            if constexpr (BITS == 8) {
                u = _mm512_cvtepi32_ps(a);
            } else {
                const __m512i field = f == 0 ? a : _mm512_srai_epi32(_mm512_sub_epi32(a, below[k]), BITS * f);
                below[k] = a;
                const __m512i code_sum = _mm512_set1_epi32(work.update.code_sum[row0 + k]);
                u = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_mullo_epi32(field, step), _mm512_mullo_epi32(code_sum, zero)));
                // float(fraction * code_sum): both factors are exact, so one rounding here as there
                u = _mm512_fmadd_ps(_mm512_mul_ps(fraction, _mm512_cvtepi32_ps(code_sum)), _mm512_set1_ps(0.125f), u);
            }
            const __m512 old = _mm512_mul_ps(_mm512_load_ps(o[row0 + k] + at), _mm512_set1_ps(work.update.alpha[row0 + k]));
            _mm512_store_ps(o[row0 + k] + at, _mm512_fmadd_ps(u, _mm512_set1_ps(work.update.g[row0 + k]), old));
        }
    }
}

template <int BITS, int ROWS, int PLANES>
void values_of_page(const uint8_t* codes, const uint8_t* next, int tiles, Work& work, float (*o)[kMaxHeadDim]) {
    constexpr int FIELDS = 8 / BITS;
    // Accumulators: 32 registers less the loads. At 2 bits and two planes only 2 rows fit.
    constexpr bool kSplit = FIELDS * ROWS * PLANES > 16;
    for (int group = 0; group < tiles / FIELDS; ++group) {
        const auto from_page = [&](int step, __m512i (&x)[8]) __attribute__((always_inline)) {
            const int at = (group * 2 + step) * kLoadBytes;
            prefetch_load(next + at);
            load_transposed(codes + at, x);
        };
        if constexpr (kSplit) {
            for (int step = 0; step < 2; ++step) {
                __m512i x[8];
                from_page(step, x);
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) work.x[0][step][j] = x[j];
            }
            const auto from_work = [&](int step, __m512i (&x)[8]) __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) x[j] = work.x[0][step][j];
            };
            values_of_group<BITS, 2, PLANES>(group * FIELDS, 0, work, o, from_work);
            values_of_group<BITS, ROWS - 2, PLANES>(group * FIELDS, 2, work, o, from_work);
        } else {
            values_of_group<BITS, ROWS, PLANES>(group * FIELDS, 0, work, o, from_page);
        }
    }
}

// ---- the pages of a task ----

using ScoresFn = void (*)(const uint8_t* codes, const uint8_t* next, int d, Work& work);
using ValuesFn = void (*)(const uint8_t* codes, const uint8_t* next, int tiles, Work& work, float (*o)[kMaxHeadDim]);

template <int ROWS>
ScoresFn scores_fn(int bits) {
    return bits == 8 ? scores_of_page<8, ROWS> : bits == 4 ? scores_of_page<4, ROWS> : scores_of_page<2, ROWS>;
}
ScoresFn scores_fn(int bits, int rows) {
    switch (rows) {
        case 1: return scores_fn<1>(bits);
        case 2: return scores_fn<2>(bits);
        case 3: return scores_fn<3>(bits);
        default: return scores_fn<4>(bits);
    }
}
template <int ROWS, int PLANES>
ValuesFn values_fn(int bits) {
    return bits == 8 ? values_of_page<8, ROWS, PLANES> : bits == 4 ? values_of_page<4, ROWS, PLANES> : values_of_page<2, ROWS, PLANES>;
}
template <int PLANES>
ValuesFn values_fn(int bits, int rows) {
    switch (rows) {
        case 1: return values_fn<1, PLANES>(bits);
        case 2: return values_fn<2, PLANES>(bits);
        case 3: return values_fn<3, PLANES>(bits);
        default: return values_fn<4, PLANES>(bits);
    }
}

void start_group(const AttendTask& t, const KOrder& order, const VOrder& v_order, int row, RowGroup& group) {
    group.row = row;
    group.rows = t.rows - row < kMaxRows ? t.rows - row : kMaxRows;
    for (int k = 0; k < group.rows; ++k) {
        const int8_t* q = t.q + int64_t(row + k) * t.head_dim;
        __m512i sum = _mm512_setzero_si512();
        for (int v = 0; v < order.vectors; ++v) {
            const __m512i ordered = _mm512_mask_i64gather_epi64(_mm512_setzero_si512(), order.valid[v], load_i(order.qword[v]), q, 8);
            store_i(group.q[k] + 64 * v, ordered);
            store_i(group.q_words[k][v][0], _mm512_srai_epi16(_mm512_slli_epi16(ordered, 8), 8));
            store_i(group.q_words[k][v][1], _mm512_srai_epi16(ordered, 8));
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), ordered);
        }
        group.q_sum[k] = _mm512_reduce_add_epi32(sum);
        v_order.gather(t.o + int64_t(row + k) * t.head_dim, group.o[k]);
    }
}

template <PForm FORM>
void attend_pages(const AttendTask& t) {
    constexpr int PLANES = FORM == PForm::kByte ? 1 : 2;
    const int d = t.head_dim;
    const ChannelLayout channel(d, t.k_bits, t.v_bits);
    const TokenLayout token(d);
    const KOrder k_order(d);
    // Two orders of O only where 2-bit V codes are padded (d = 96): then O changes its order with the kind of page.
    const VOrder channel_order(d, v_stored_channels(d, t.v_bits)), token_order(d, v_stored_channels(d, 8));
    const VOrder* o_order = &channel_order;

    const int n_groups = (t.rows + kMaxRows - 1) / kMaxRows;
    RowGroup* groups = reinterpret_cast<RowGroup*>(t.workspace);
    for (int g = 0; g < n_groups; ++g) start_group(t, k_order, channel_order, g * kMaxRows, groups[g]);

    Work work;
    for (int64_t n = t.page_begin; n < t.page_end; ++n) {
        const int64_t first_key = n * kPageTokens;
        const uint8_t* piece = t.pages[n].piece;
        const uint8_t* next = t.pages[n + 1 < t.page_end ? n + 1 : n].piece;
        const bool is_token = t.pages[n].kind == PageKind::kToken;
        const VOrder& v_order = is_token ? token_order : channel_order;
        const size_t v_codes = is_token ? token.v_codes() : channel.v_codes();
        bool parameters_read = false;
        for (int g = 0; g < n_groups; ++g) {
            RowGroup& group = groups[g];
            bool seen = false;
            for (int k = 0; k < group.rows; ++k) {
                const Visible v = visible_keys(t, group.row + k, first_key);
                seen |= v.first < v.last;
            }
            if (!seen) continue;  // x = -inf throughout: m, l and O stay
            if (!parameters_read) {
                read_scales(t, n, work.scales);
                if (!is_token) {
                    read_k_parameters(k_order, channel, piece, work);
                    read_v_parameters(v_order, channel, piece, work);
                }
                if (o_order->stored != v_order.stored) {
                    for (int row = 0; row < t.rows; ++row) {
                        alignas(64) float natural[kMaxHeadDim];
                        float* o = groups[row / kMaxRows].o[row % kMaxRows];
                        o_order->scatter(o, natural);
                        v_order.gather(natural, o);
                    }
                    o_order = &v_order;
                }
                parameters_read = true;
            }
            if (is_token) {
                for (int k = 0; k < group.rows; ++k) {
                    __builtin_memcpy(work.digits[k][0], group.q[k], 64 * k_order.vectors);
                    work.score_base[k] = -128 * group.q_sum[k];
                    work.score_rest[k] = 0.0f;
                }
            } else {
                fold_rows(k_order, group, work);
            }
            scores_fn(is_token ? 8 : t.k_bits, group.rows)(piece, next, d, work);
            softmax<FORM>(t, group.row, group.rows, first_key, work.scales, work.scores[0], work.score_rest, work.p, work.update);
            values_fn<PLANES>(is_token ? 8 : t.v_bits, group.rows)(piece + v_codes, next + v_codes, v_order.tiles, work, group.o);
        }
    }
    for (int row = 0; row < t.rows; ++row) {
        o_order->scatter(groups[row / kMaxRows].o[row % kMaxRows], t.o + int64_t(row) * d);
    }
}

}  // namespace

void attend_codes(const AttendTask& task) {
    if (task.p_levels <= 255) {
        attend_pages<PForm::kByte>(task);
    } else {
        attend_pages<PForm::kTwoBytes>(task);
    }
}

}  // namespace ta::cpu::avx512
