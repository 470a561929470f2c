// Attention of many rows: a page is unpacked once to INT8 tiles that stay in L1, and blocks of rows pass over them with register
// tiled integer products.
#include "kernels/cpu/avx512/paths.h"
#include "kernels/cpu/avx512/softmax.h"
#include "kernels/cpu/avx512/unpack.h"

namespace ta::cpu::avx512 {
namespace {

constexpr int kScoreRows = 6;   // of the micro kernel for Q K
constexpr int kBlockRows = 24;  // rows between the two products: their scores, P, q and O stay in L1 with the tiles
static_assert(kBlockRows % kScoreRows == 0 && kBlockRows % kRowBatch == 0);

// The part of the workspace with a fixed size; the rest is the tiles, then q_sum of all rows.
struct Block {
    PageScales scales;
    alignas(64) int32_t scores[kBlockRows][kPageTokens];
    alignas(64) uint8_t p[kBlockRows * kPBytes<PForm::kFloat>];
    float rest[kBlockRows];
    alignas(64) RowUpdate update[kBlockRows / kRowBatch];
    alignas(64) uint8_t k_fraction8[kMaxHeadDim];
    alignas(64) float v_fraction8[kMaxHeadDim];
};
static_assert(sizeof(Block) <= 65536);

// Scores of 6 rows with the 64 tokens of a page. Rows from n on repeat the last.
void scores_of_rows(const AttendTask& t, int row, int n, const uint8_t* k_tile, const int32_t* q_sum,
                    int32_t (*scores)[kPageTokens]) {
    const int8_t* q[kScoreRows];
    __m512i sum[kScoreRows][kVectors];
#pragma GCC unroll 6
    for (int k = 0; k < kScoreRows; ++k) {
        const int from = k < n ? row + k : row + n - 1;
        q[k] = t.q + int64_t(from) * t.head_dim;
        const __m512i start = _mm512_set1_epi32(-128 * q_sum[from]);  // the tile holds K + 128
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[k][v] = start;
    }
    for (int c = 0; c < t.head_dim; c += 4) {
        __m512i key[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) key[v] = load_i(k_tile + 64 * (c + v));
#pragma GCC unroll 6
        for (int k = 0; k < kScoreRows; ++k) {
            const __m512i q_k = broadcast_i32(q[k] + c);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) add_dot(sum[k][v], key[v], q_k);
        }
    }
#pragma GCC unroll 6
    for (int k = 0; k < kScoreRows; ++k) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store_i(scores[k] + 16 * v, sum[k][v]);
    }
}

// sum_d q_d fraction8_d
void fractions_of_rows(const AttendTask& t, int row, int n, const uint8_t* fraction8, float* rest) {
    for (int batch = 0; batch < n; batch += kRowBatch) {
        __m512i sum[kRowBatch];
#pragma GCC unroll 4
        for (int k = 0; k < kRowBatch; ++k) {
            const int from = batch + k < n ? row + batch + k : row + n - 1;
            const int8_t* q = t.q + int64_t(from) * t.head_dim;
            sum[k] = _mm512_setzero_si512();
            for (int c = 0; c < t.head_dim; c += 64) {
                const __mmask64 held = t.head_dim - c < 64 ? (__mmask64(1) << (t.head_dim - c)) - 1 : ~__mmask64(0);
                sum[k] = _mm512_dpbusd_epi32(sum[k], load_i(fraction8 + c), _mm512_maskz_loadu_epi8(held, q + c));
            }
        }
        _mm_storeu_ps(rest + batch, _mm_cvtepi32_ps(sum_rows(sum)));
    }
}

// O of ROWS rows and CHANNELS vectors of 16 channels.
template <int ROWS, int CHANNELS, int PLANES>
[[gnu::always_inline]] inline void values_of_rows(int n, int d, const uint8_t* v_tile, const float* fraction8, const uint8_t* p,
                                                  const RowUpdate* update, int first, float* o) {
    __m512i sum[ROWS][CHANNELS];
    const uint8_t* p_row[ROWS];
#pragma GCC unroll 6
    for (int k = 0; k < ROWS; ++k) {
        p_row[k] = p + (first + (k < n ? k : n - 1)) * 64 * PLANES;
#pragma GCC unroll 8
        for (int v = 0; v < CHANNELS; ++v) sum[k][v] = _mm512_setzero_si512();
    }
#pragma GCC unroll 2
    for (int plane = PLANES - 1; plane >= 0; --plane) {  // the high bytes first
        if (plane < PLANES - 1) {
#pragma GCC unroll 6
            for (int k = 0; k < ROWS; ++k) {
#pragma GCC unroll 8
                for (int v = 0; v < CHANNELS; ++v) sum[k][v] = _mm512_slli_epi32(sum[k][v], 8);
            }
        }
#pragma GCC unroll 1
        for (int quad = 0; quad < 16; ++quad) {
            __m512i p_k[ROWS];
#pragma GCC unroll 6
            for (int k = 0; k < ROWS; ++k) p_k[k] = broadcast_i32(p_row[k] + 64 * plane + 4 * quad);
#pragma GCC unroll 8
            for (int v = 0; v < CHANNELS; ++v) {
                const __m512i value = load_i(v_tile + 4 * quad * d + 64 * v);
#pragma GCC unroll 6
                for (int k = 0; k < ROWS; ++k) add_dot(sum[k][v], p_k[k], value);
            }
        }
    }
#pragma GCC unroll 6
    for (int k = 0; k < ROWS; ++k) {
        if (k >= n) break;
        const RowUpdate& u = update[(first + k) / kRowBatch];
        const int lane = (first + k) % kRowBatch;
        const __m512 alpha = _mm512_set1_ps(u.alpha[lane]), g = _mm512_set1_ps(u.g[lane]);
        const __m512 code_sum = _mm512_set1_ps(float(u.code_sum[lane]));
#pragma GCC unroll 8
        for (int v = 0; v < CHANNELS; ++v) {
            float* at = o + int64_t(k) * d + 16 * v;
            const __m512 f =
                _mm512_mul_ps(_mm512_load_ps(fraction8 + 16 * v), code_sum);  // exact factors: rounds as float(F) does
            const __m512 added = _mm512_fmadd_ps(f, _mm512_set1_ps(0.125f), _mm512_cvtepi32_ps(sum[k][v]));
            _mm512_store_ps(at, _mm512_fmadd_ps(added, g, _mm512_mul_ps(_mm512_load_ps(at), alpha)));
        }
    }
}

template <int ROWS, int CHANNELS, int PLANES>
void values_of_block(const AttendTask& t, int row, int n, const uint8_t* v_tile, const Block& block) {
    const int d = t.head_dim;
    for (int k = 0; k < n; k += ROWS) {
        for (int c = 0; c < d; c += 16 * CHANNELS) {
            values_of_rows<ROWS, CHANNELS, PLANES>(n - k < ROWS ? n - k : ROWS, d, v_tile + 4 * c, block.v_fraction8 + c,
                                                   block.p, block.update, k, t.o + int64_t(row + k) * d + c);
        }
    }
}

template <int PLANES>
void values_of_block(const AttendTask& t, int row, int n, const uint8_t* v_tile, const Block& block) {
    switch (t.head_dim) {
        case 64:
            return values_of_block<6, 4, PLANES>(t, row, n, v_tile, block);
        case 96:
            return values_of_block<4, 6, PLANES>(t, row, n, v_tile, block);
        default:
            return values_of_block<3, 8, PLANES>(t, row, n, v_tile, block);
    }
}

// Half-INT8: float V, key by key as the order of the sum demands.
template <int CHANNELS>
void float_values_of_row(const AttendTask& t, int row, int64_t first_key, const float* p, float alpha) {
    for (int c = 0; c < t.head_dim; c += 16 * CHANNELS) {
        float* o = t.o + int64_t(row) * t.head_dim + c;
        __m512 sum[CHANNELS];
        for (int v = 0; v < CHANNELS; ++v) sum[v] = _mm512_mul_ps(_mm512_load_ps(o + 16 * v), _mm512_set1_ps(alpha));
        for (int j = 0; j < kPageTokens; ++j) {
            if (p[j] <= 0.0f) continue;
            const float* value = t.v_float + (first_key + j) * t.v_float_stride + c;
            for (int v = 0; v < CHANNELS; ++v)
                sum[v] = _mm512_fmadd_ps(_mm512_set1_ps(p[j]), _mm512_loadu_ps(value + 16 * v), sum[v]);
        }
        for (int v = 0; v < CHANNELS; ++v) _mm512_store_ps(o + 16 * v, sum[v]);
    }
}
void float_values_of_block(const AttendTask& t, int row, int n, int64_t first_key, const Block& block) {
    for (int k = 0; k < n; ++k) {
        const float* p = reinterpret_cast<const float*>(block.p) + k * kPageTokens;
        const float alpha = block.update[k / kRowBatch].alpha[k % kRowBatch];
        switch (t.head_dim) {
            case 64:
                float_values_of_row<4>(t, row + k, first_key, p, alpha);
                break;
            case 96:
                float_values_of_row<6>(t, row + k, first_key, p, alpha);
                break;
            default:
                float_values_of_row<8>(t, row + k, first_key, p, alpha);
                break;
        }
    }
}

// Fractions of the zero points in eighths, zeros on a token page.
void read_fractions(const ChannelLayout& layout, const uint8_t* piece, bool token, Block& block) {
    for (int c = 0; c < layout.d; ++c) {
        block.k_fraction8[c] = token ? 0 : fraction_eighths_of(piece[layout.k_step() + c], layout.k_bits);
        block.v_fraction8[c] = token ? 0.0f : float(fraction_eighths_of(piece[layout.v_step() + c], layout.v_bits));
    }
}

template <PForm FORM>
void attend_pages(const AttendTask& t) {
    const int d = t.head_dim;
    const ChannelLayout channel(d, t.k_bits, t.v_bits);
    const TokenLayout token(d);
    Block& block = *reinterpret_cast<Block*>(t.workspace);
    uint8_t* k_tile = t.workspace + (sizeof(Block) + 63) / 64 * 64;
    uint8_t* v_tile = k_tile + kPageTokens * d;
    int32_t* q_sum = reinterpret_cast<int32_t*>(v_tile + kPageTokens * d);
    for (int row = 0; row < t.rows; ++row) {
        int32_t sum = 0;
        for (int c = 0; c < d; ++c) sum += t.q[int64_t(row) * d + c];
        q_sum[row] = sum;
    }
    for (int c = 0; c < kMaxHeadDim; ++c) block.k_fraction8[c] = 0;

    for (int64_t n = t.page_begin; n < t.page_end; ++n) {
        const int64_t first_key = n * kPageTokens;
        const uint8_t* piece = t.pages[n].piece;
        const bool is_token = t.pages[n].kind == PageKind::kToken;
        bool unpacked = false;
        for (int row = 0; row < t.rows; row += kBlockRows) {
            const int rows = t.rows - row < kBlockRows ? t.rows - row : kBlockRows;
            bool seen = false;
            for (int k = 0; k < rows; ++k) {
                const Visible v = visible_keys(t, row + k, first_key);
                seen |= v.first < v.last;
            }
            if (!seen) {
                skip_page(t, n, row, rows, t.o + int64_t(row) * d, d, d);
                continue;
            }
            if (!unpacked) {
                read_scales(t, n, block.scales);
                read_fractions(channel, piece, is_token, block);
                unpack_k(d, is_token ? 8 : t.k_bits, piece, piece + channel.k_step(), piece + channel.k_zero(), k_tile);
                if constexpr (FORM != PForm::kFloat) {
                    unpack_v(d, is_token ? 8 : t.v_bits, piece + (is_token ? token.v_codes() : channel.v_codes()),
                             piece + channel.v_step(), piece + channel.v_zero(), v_tile);
                }
                unpacked = true;
            }
            for (int k = 0; k < rows; k += kScoreRows) {
                scores_of_rows(t, row + k, rows - k < kScoreRows ? rows - k : kScoreRows, k_tile, q_sum, block.scores + k);
            }
            fractions_of_rows(t, row, rows, block.k_fraction8, block.rest);
            for (int k = 0; k < rows; k += kRowBatch) {
                softmax<FORM>(t, row + k, rows - k < kRowBatch ? rows - k : kRowBatch, first_key, block.scales, block.scores[k],
                              block.rest + k, block.p + k * kPBytes<FORM>, block.update[k / kRowBatch]);
            }
            if constexpr (FORM == PForm::kFloat) {
                float_values_of_block(t, row, rows, first_key, block);
            } else {
                values_of_block<FORM == PForm::kByte ? 1 : 2>(t, row, rows, v_tile, block);
            }
        }
    }
}

}  // namespace

void attend_tiles(const AttendTask& task) {
    if (task.v_float) {
        attend_pages<PForm::kFloat>(task);
    } else if (task.p_levels <= 255) {
        attend_pages<PForm::kByte>(task);
    } else {
        attend_pages<PForm::kTwoBytes>(task);
    }
}

}  // namespace ta::cpu::avx512
