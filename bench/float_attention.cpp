#include "bench/float_attention.h"

#include "kernels/cpu/avx512/vec.h"

namespace ta::bench {
namespace {

using namespace ta::cpu;

constexpr int kKeys = 64;  // of a tile
constexpr int kVectors = kKeys / 16;
constexpr int kScoreRows = 6, kValueRows = 3, kRowBatch = 4;
static_assert(kFloatBlockRows % 12 == 0);

// K of 64 keys as [channel][key]: 16 x 16 blocks by pairs, quads and lanes.
void pack_keys(int d, const float* k, float* tile) {
    for (int key = 0; key < kKeys; key += 16) {
        for (int c = 0; c < d; c += 16) {
            __m512 x[16], y[16];
            for (int n = 0; n < 16; ++n) x[n] = _mm512_load_ps(k + int64_t(key + n) * d + c);
            for (int n = 0; n < 16; n += 2) {
                y[n] = _mm512_unpacklo_ps(x[n], x[n + 1]);
                y[n + 1] = _mm512_unpackhi_ps(x[n], x[n + 1]);
            }
            for (int n = 0; n < 16; n += 4) {  // x[n + i]: channel i of each lane's 4, keys n..n + 3
                x[n + 0] = _mm512_shuffle_ps(y[n], y[n + 2], 0x44);
                x[n + 1] = _mm512_shuffle_ps(y[n], y[n + 2], 0xEE);
                x[n + 2] = _mm512_shuffle_ps(y[n + 1], y[n + 3], 0x44);
                x[n + 3] = _mm512_shuffle_ps(y[n + 1], y[n + 3], 0xEE);
            }
            for (int i = 0; i < 4; ++i) {
                const __m512 a = _mm512_shuffle_f32x4(x[i], x[4 + i], 0x88),
                             b = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0x88);
                const __m512 e = _mm512_shuffle_f32x4(x[i], x[4 + i], 0xDD),
                             f = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0xDD);
                _mm512_store_ps(tile + (c + i) * kKeys + key, _mm512_shuffle_f32x4(a, b, 0x88));
                _mm512_store_ps(tile + (c + 8 + i) * kKeys + key, _mm512_shuffle_f32x4(a, b, 0xDD));
                _mm512_store_ps(tile + (c + 4 + i) * kKeys + key, _mm512_shuffle_f32x4(e, f, 0x88));
                _mm512_store_ps(tile + (c + 12 + i) * kKeys + key, _mm512_shuffle_f32x4(e, f, 0xDD));
            }
        }
    }
}

void scores_of_rows(int d, const float* q, const float* tile, float* scores) {
    __m512 sum[kScoreRows][kVectors];
#pragma GCC unroll 6
    for (int r = 0; r < kScoreRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_setzero_ps();
    }
    for (int c = 0; c < d; ++c) {
        __m512 key[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) key[v] = _mm512_load_ps(tile + c * kKeys + 16 * v);
#pragma GCC unroll 6
        for (int r = 0; r < kScoreRows; ++r) {
            const __m512 x = _mm512_set1_ps(q[r * d + c]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sum[r][v] = _mm512_fmadd_ps(x, key[v], sum[r][v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < kScoreRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) _mm512_store_ps(scores + r * kKeys + 16 * v, sum[r][v]);
    }
}

// O = O alpha + P V for 3 rows and CHANNELS vectors of channels.
template <int ROWS, int CHANNELS>
void values_of_rows(int d, const float* p, const float* v, const float* alpha, float* o) {
    __m512 sum[ROWS][CHANNELS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < CHANNELS; ++c)
            sum[r][c] = _mm512_mul_ps(_mm512_load_ps(o + r * d + 16 * c), _mm512_set1_ps(alpha[r]));
    }
    for (int key = 0; key < kKeys; ++key) {
        // The rows' factors stay in registers while the vectors stream: the other way round needs 33 registers.
        __m512 x[ROWS];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) x[r] = _mm512_set1_ps(p[r * kKeys + key]);
#pragma GCC unroll 8
        for (int c = 0; c < CHANNELS; ++c) {
            __m512 value = _mm512_load_ps(v + int64_t(key) * d + 16 * c);
            asm("" : "+v"(value));  // or GCC loads it once for every row
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) sum[r][c] = _mm512_fmadd_ps(x[r], value, sum[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < CHANNELS; ++c) _mm512_store_ps(o + r * d + 16 * c, sum[r][c]);
    }
}

// Scores to P in place; updates m and l. `visible`: keys of the tile that each row sees.
[[gnu::always_inline]] inline void softmax_rows(const int64_t* key_end, int64_t first_key, float* scores, float* m, float* l,
                                                float* alpha) {
    __m512 x[kRowBatch][kVectors], part[kRowBatch];
#pragma GCC unroll 4
    for (int r = 0; r < kRowBatch; ++r) {
        const int64_t visible = key_end[r] - first_key;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) x[r][v] = _mm512_load_ps(scores + r * kKeys + 16 * v);
        if (visible < kKeys) {
            const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            const __m512i end = _mm512_set1_epi32(int(visible < 0 ? 0 : visible));
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const __mmask16 see = _mm512_cmplt_epi32_mask(_mm512_add_epi32(lane, _mm512_set1_epi32(16 * v)), end);
                x[r][v] = _mm512_mask_mov_ps(_mm512_set1_ps(kMinusInf), see, x[r][v]);
            }
        }
        part[r] = _mm512_max_ps(_mm512_max_ps(x[r][0], x[r][1]), _mm512_max_ps(x[r][2], x[r][3]));
    }
    const __m128 m_old = _mm_loadu_ps(m), m_new = _mm_max_ps(max_rows(part), m_old);
    const __mmask8 alive = _mm_cmp_ps_mask(m_new, _mm_set1_ps(kMinusInf), _CMP_GT_OQ);
    const __m512 decay = exp2_neg_exact(_mm512_castps128_ps512(_mm_sub_ps(m_new, m_old)));
    const __m128 factor = _mm_mask_mov_ps(_mm_set1_ps(1.0f), alive, _mm512_castps512_ps128(decay));
    _mm_storeu_ps(alpha, factor);
    _mm_storeu_ps(m, m_new);
#pragma GCC unroll 4
    for (int r = 0; r < kRowBatch; ++r) {
        const __m512 m_r = broadcast_row(m_new, r);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            x[r][v] = exp2_neg<ExpMode::kPoly>(_mm512_sub_ps(m_r, x[r][v]));
            _mm512_store_ps(scores + r * kKeys + 16 * v, x[r][v]);
        }
        part[r] = _mm512_add_ps(_mm512_add_ps(x[r][0], x[r][1]), _mm512_add_ps(x[r][2], x[r][3]));
    }
    _mm_storeu_ps(l, _mm_fmadd_ps(_mm_loadu_ps(l), factor, sum_rows(part)));
}

// K and V of the next tile are asked for while the first block of rows works on this one: 2 MB of floats do not stay in L2.
[[gnu::always_inline]] inline void prefetch(const float* tile, int d, int part, int parts) {
    const int lines = kKeys * d / 16;
    for (int line = lines * part / parts; line < lines * (part + 1) / parts; ++line) {
        _mm_prefetch(reinterpret_cast<const char*>(tile + 16 * line), _MM_HINT_T1);
    }
}

void values_of_block(int d, int rows, const float* scores, const float* v, const float* alpha, float* o) {
    if (d == 64) {
        for (int r = 0; r < rows; r += 6) values_of_rows<6, 4>(d, scores + r * kKeys, v, alpha + r, o + int64_t(r) * d);
        return;
    }
    for (int c = 0; c < d; c += 128) {  // 8 vectors: a tile's 64 keys of them stay in L1 while the rows pass
        for (int r = 0; r < rows; r += kValueRows) {
            values_of_rows<kValueRows, 8>(d, scores + r * kKeys, v + c, alpha + r, o + int64_t(r) * d + c);
        }
    }
}

}  // namespace

void float_attend(const FloatAttendTask& t) {
    const int d = t.head_dim;
    float* tile = reinterpret_cast<float*>(t.workspace);
    float* scores = tile + kKeys * d;
    float* alpha = scores + kFloatBlockRows * kKeys;
    for (int64_t key = 0; key < t.n_keys; key += kKeys) {
        bool packed = false;
        for (int row = 0; row < t.rows; row += kFloatBlockRows) {
            const int rows = t.rows - row < kFloatBlockRows ? t.rows - row : kFloatBlockRows;
            bool seen = false;
            for (int r = 0; r < rows; ++r) seen |= t.key_end[row + r] > key;
            if (!seen) continue;
            if (!packed) pack_keys(d, t.k + key * d, tile);
            packed = true;
            const bool ahead = row == 0 && key + kKeys < t.n_keys;
            for (int r = 0; r < rows; r += kScoreRows) {
                if (ahead) prefetch(t.k + (key + kKeys) * d, d, r / kScoreRows, rows / kScoreRows);
                scores_of_rows(d, t.q + int64_t(row + r) * d, tile, scores + r * kKeys);
            }
            for (int r = 0; r < rows; r += kRowBatch) {
                if (ahead) prefetch(t.v + (key + kKeys) * d, d, r / kRowBatch, rows / kRowBatch);
                softmax_rows(t.key_end + row + r, key, scores + r * kKeys, t.m + row + r, t.l + row + r, alpha + r);
            }
            values_of_block(d, rows, scores, t.v + key * d, alpha, t.o + int64_t(row) * d);
        }
    }
}

void float_attend_products(const FloatAttendTask& t) {
    const int d = t.head_dim;
    float* tile = reinterpret_cast<float*>(t.workspace);
    float* scores = tile + kKeys * d;
    float* alpha = scores + kFloatBlockRows * kKeys;
    pack_keys(d, t.k, tile);
    for (int r = 0; r < kFloatBlockRows; ++r) alpha[r] = 0.5f;
    for (int64_t key = 0; key < t.n_keys; key += kKeys) {
        for (int row = 0; row < t.rows; row += kFloatBlockRows) {
            const int rows = t.rows - row < kFloatBlockRows ? t.rows - row : kFloatBlockRows;
            for (int r = 0; r < rows; r += kScoreRows) scores_of_rows(d, t.q + int64_t(row + r) * d, tile, scores + r * kKeys);
            values_of_block(d, rows, scores, t.v + key * d, alpha, t.o + int64_t(row) * d);
        }
    }
}

}  // namespace ta::bench
