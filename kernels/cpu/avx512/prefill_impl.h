// Attention of many rows. A page is unpacked once to INT8 that stays in L1, and blocks of up to 48 rows pass over it. Rows are
// the lanes throughout: q, P and O are kept transposed, as vectors of 16 rows, and K and V are broadcast. So the softmax
// reduces nothing across lanes, and neither product shuffles anything.
//
// The including file defines the products of a block, `Products`:
//   static void arrange(int d, int v_stored, bool with_v, Block& block);   once a page is unpacked: as the products want it
//   template <int VECTORS> static void scores(int d, const uint8_t* const* q, const Lanes* lanes, Block& block);
//   template <int VECTORS, int PLANES> static void values(int d, int stored, OOrder order, Block& block, float* o);
#pragma once

#include "kernels/cpu/attend.h"
#include "kernels/cpu/avx512/tile_softmax.h"
#include "kernels/cpu/avx512/unpack.h"

namespace ta::cpu {
namespace {

constexpr int kBlockVectors = 3;  // of 16 rows: with 8 tokens or channels they fill 24 accumulators
constexpr int kPass = 8;          // tokens or channels of a pass: the r of a row tile

// 16 rows for the whole call. Rows beyond the task's repeat the last in q, see nothing, and are dropped in the end.
struct Lanes {
    int row, rows;
    int64_t first_seen, last_seen;        // keys from first_seen and below last_seen are seen by a row,
    int64_t first_by_all, last_by_all;    // and these by all 16
    alignas(64) int32_t q_start[kLanes];  // -128 sum_d q_d: the scores of K + 128 less those of K
};

// The part of the workspace with a fixed size. Then: Lanes, q [unit][16][4] and O [channel][16] of each 16 rows.
struct Block {
    PageScales scales;
    LaneUpdate update[kBlockVectors];
    alignas(64) uint8_t k[kPageTokens * kMaxHeadDim];                  // unpack.h
    alignas(64) uint8_t v[kPageTokens * kMaxHeadDim];                  // V codes padded to 128 channels at d = 96 included
    alignas(64) int32_t scores[kPageTokens * kBlockVectors * kLanes];  // [token][vector][row]
    alignas(64) uint8_t p[2][16 * kBlockVectors * 64];                 // [plane][unit][vector][row][4]
    alignas(64) int32_t sums[2][2 * kPass * kBlockVectors * kLanes];   // of one or two passes, and of a plane of P
    alignas(64) uint8_t k_fraction8[kMaxHeadDim];                      // by unit
    alignas(64) float v_fraction8[kMaxHeadDim];
    bool has_k_fraction;
};
static_assert(sizeof(Block) <= 65536);

// 16 x 16 dwords.
[[gnu::always_inline]] inline void transpose_dwords(__m512i (&x)[16]) {
    __m512i y[16];
#pragma GCC unroll 8
    for (int n = 0; n < 16; n += 2) {
        y[n] = _mm512_unpacklo_epi32(x[n], x[n + 1]);
        y[n + 1] = _mm512_unpackhi_epi32(x[n], x[n + 1]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < 16; n += 4) {  // x[n + i]: column i of each lane of 128 bits, rows n .. n + 3
        x[n + 0] = _mm512_unpacklo_epi64(y[n], y[n + 2]);
        x[n + 1] = _mm512_unpackhi_epi64(y[n], y[n + 2]);
        x[n + 2] = _mm512_unpacklo_epi64(y[n + 1], y[n + 3]);
        x[n + 3] = _mm512_unpackhi_epi64(y[n + 1], y[n + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        y[i + 0] = _mm512_shuffle_i64x2(x[i], x[4 + i], 0x88);
        y[i + 4] = _mm512_shuffle_i64x2(x[8 + i], x[12 + i], 0x88);
        y[i + 8] = _mm512_shuffle_i64x2(x[i], x[4 + i], 0xDD);
        y[i + 12] = _mm512_shuffle_i64x2(x[8 + i], x[12 + i], 0xDD);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        x[i + 0] = _mm512_shuffle_i64x2(y[i], y[i + 4], 0x88);
        x[i + 8] = _mm512_shuffle_i64x2(y[i], y[i + 4], 0xDD);
        x[i + 4] = _mm512_shuffle_i64x2(y[i + 8], y[i + 12], 0x88);
        x[i + 12] = _mm512_shuffle_i64x2(y[i + 8], y[i + 12], 0xDD);
    }
}

// q of 16 rows as [unit][row][4 channels].
void transpose_q(const AttendTask& t, Lanes& lanes, uint8_t* out) {
    __m512i sum = _mm512_setzero_si512();
    for (int c = 0; c < t.head_dim; c += 64) {
        const int held = t.head_dim - c < 64 ? t.head_dim - c : 64;
        __m512i x[kLanes];
        for (int k = 0; k < kLanes; ++k) {
            const int row = lanes.row + (k < lanes.rows ? k : lanes.rows - 1);
            x[k] = _mm512_maskz_loadu_epi32(__mmask16((1u << held / 4) - 1), t.q + int64_t(row) * t.head_dim + c);
        }
        transpose_dwords(x);
        for (int k = 0; k < held / 4; ++k) {
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), x[k]);
            store_i(out + 64 * k_channel_unit(t.head_dim, c + 4 * k), x[k]);
        }
    }
    store_i(lanes.q_start, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_setzero_si512(), sum), 7));
}

// The place of a channel in O: in the order that the passes of values_of_block meet them, so that a pass works on adjacent
// vectors; or in the natural order where 2-bit V codes are padded (d = 96), since the passes of 8 bits then meet others.
struct OOrder {
    int d;
    bool natural;
    int place(int channel) const { return natural ? channel : channel % (d / 8) * kPass + channel / (d / 8); }
};

// O of 16 rows as vectors, `stride` floats apart.
void transpose_o_in(const AttendTask& t, const Lanes& lanes, OOrder order, float* out, int stride) {
    for (int c = 0; c < t.head_dim; c += 16) {
        __m512i x[kLanes];
        for (int k = 0; k < kLanes; ++k) {
            x[k] = k < lanes.rows ? load_i(t.o + int64_t(lanes.row + k) * t.head_dim + c) : _mm512_setzero_si512();
        }
        transpose_dwords(x);
        for (int k = 0; k < kLanes; ++k) store_i(out + stride * order.place(c + k), x[k]);
    }
}
void transpose_o_out(const AttendTask& t, const Lanes& lanes, OOrder order, const float* from, int stride) {
    for (int c = 0; c < t.head_dim; c += 16) {
        __m512i x[kLanes];
        for (int k = 0; k < kLanes; ++k) x[k] = load_i(from + stride * order.place(c + k));
        transpose_dwords(x);
        for (int k = 0; k < lanes.rows; ++k) store_i(t.o + int64_t(lanes.row + k) * t.head_dim + c, x[k]);
    }
}

void start_lanes(const AttendTask& t, int row, Lanes& lanes) {
    lanes.row = row;
    lanes.rows = t.rows - row < kLanes ? t.rows - row : kLanes;
    lanes.first_seen = lanes.last_by_all = INT64_MAX;
    lanes.last_seen = lanes.first_by_all = INT64_MIN;
    for (int k = row; k < row + lanes.rows; ++k) {
        const int64_t begin = t.key_begin[k], end = t.key_end[k];
        if (begin < end) {
            if (begin < lanes.first_seen) lanes.first_seen = begin;
            if (end > lanes.last_seen) lanes.last_seen = end;
        }
        if (begin > lanes.first_by_all) lanes.first_by_all = begin;
        if (end < lanes.last_by_all) lanes.last_by_all = end;
    }
    if (lanes.rows < kLanes || t.tree) lanes.last_by_all = INT64_MIN;  // the others see nothing, a tree's rows not all
}

// sum_d q_d fraction8_d of 16 rows; both in the order of units.
__m512 fractions_of_lanes(int d, const uint8_t* q, const uint8_t* fraction8) {
    __m512i sum[4];
    for (__m512i& s : sum) s = _mm512_setzero_si512();
    for (int unit = 0; unit < d / 4; unit += 4) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) add_dot(sum[k], broadcast_i32(fraction8 + 4 * (unit + k)), load_i(q + 64 * (unit + k)));
    }
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]), _mm512_add_epi32(sum[2], sum[3])));
}

// O = O alpha + .. of VECTORS times 16 rows for 8 channels: `held` of them are below head_dim. DECAYS: some alpha is not 1.
template <int VECTORS, int PLANES, bool DECAYS>
[[gnu::noinline]] void finish_values(const int32_t* sums, const LaneUpdate* update, int held, const float* fraction8,
                                     int fraction_stride, float* o, ptrdiff_t o_stride) {
    const __m512 eighth = _mm512_set1_ps(0.125f);
    __m512 alpha[VECTORS], g[VECTORS], total[VECTORS];
#pragma GCC unroll 3
    for (int v = 0; v < VECTORS; ++v) {
        alpha[v] = _mm512_load_ps(update[v].alpha);
        g[v] = _mm512_load_ps(update[v].g);
        total[v] = _mm512_load_ps(update[v].code_sum);
        if (PLANES == 1) total[v] = _mm512_mul_ps(total[v], eighth);
    }
    for (int r = 0; r < held; ++r) {
        const __m512 fraction = _mm512_set1_ps(fraction8[r * fraction_stride]);
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) {
            float* at = o + r * o_stride + v * kLanes;
            const __m512 u = _mm512_cvtepi32_ps(load_i(sums + (r * VECTORS + v) * kLanes));
            // float(F): both factors are exact, so one rounding here as there; with one byte of P, F is exact
            const __m512 added = PLANES == 1 ? _mm512_fmadd_ps(fraction, total[v], u)
                                             : _mm512_fmadd_ps(_mm512_mul_ps(fraction, total[v]), eighth, u);
            __m512 old = _mm512_load_ps(at);
            if constexpr (DECAYS) old = _mm512_mul_ps(old, alpha[v]);
            _mm512_store_ps(at, _mm512_fmadd_ps(added, g[v], old));
        }
    }
}
template <int VECTORS, int PLANES>
auto finish_of(const Block& block) {
    __mmask16 decays = 0;
    for (int v = 0; v < VECTORS; ++v)
        decays |= _mm512_cmp_ps_mask(_mm512_load_ps(block.update[v].alpha), _mm512_set1_ps(1.0f), _CMP_NEQ_UQ);
    return decays ? finish_values<VECTORS, PLANES, true> : finish_values<VECTORS, PLANES, false>;
}

// Half-INT8: float V, key by key as the order of the sum demands. P is in the scores.
template <int VECTORS>
void float_values_of_block(const AttendTask& t, int64_t first_key, OOrder order, const Block& block, float* o) {
    const int keys = int(t.n_keys - first_key < kPageTokens ? t.n_keys - first_key : kPageTokens);
    const float* p = reinterpret_cast<const float*>(block.scores);
    for (int c = 0; c < t.head_dim; c += kPass) {
        __m512 sum[VECTORS][kPass];
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) {
            const __m512 alpha = _mm512_load_ps(block.update[v].alpha);
#pragma GCC unroll 8
            for (int r = 0; r < kPass; ++r)
                sum[v][r] = _mm512_mul_ps(_mm512_load_ps(o + (order.place(c + r) * VECTORS + v) * kLanes), alpha);
        }
        for (int j = 0; j < keys; ++j) {
            const float* value = t.v_float + (first_key + j) * t.v_float_stride + c;
#pragma GCC unroll 3
            for (int v = 0; v < VECTORS; ++v) {
                const __m512 p_v = _mm512_load_ps(p + (j * VECTORS + v) * kLanes);
                const __mmask16 adds = _mm512_cmp_ps_mask(p_v, _mm512_setzero_ps(), _CMP_GT_OQ);
#pragma GCC unroll 8
                for (int r = 0; r < kPass; ++r)
                    sum[v][r] = _mm512_mask3_fmadd_ps(p_v, _mm512_set1_ps(value[r]), sum[v][r], adds);
            }
        }
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 8
            for (int r = 0; r < kPass; ++r) _mm512_store_ps(o + (order.place(c + r) * VECTORS + v) * kLanes, sum[v][r]);
        }
    }
}

// A task on its way through the pages.
template <class Products>
class TilesPath {
  public:
    explicit TilesPath(const AttendTask& task)
        : t(task),
          order{t.head_dim, v_stored_channels(t.head_dim, t.v_bits) != t.head_dim},
          n_lanes((t.rows + kLanes - 1) / kLanes),
          n_blocks((n_lanes + kBlockVectors - 1) / kBlockVectors),
          block(*reinterpret_cast<Block*>(t.workspace)) {
        uint8_t* at = t.workspace + (sizeof(Block) + 63) / 64 * 64;
        lanes = reinterpret_cast<Lanes*>(at);
        all_q = at + size_t(n_lanes) * sizeof(Lanes);
        all_o = reinterpret_cast<float*>(all_q + size_t(n_lanes) * kLanes * t.head_dim);
        for (int b = 0; b < n_blocks; ++b) {
            for (int n = first_of(b); n < first_of(b + 1); ++n) {
                start_lanes(t, n * kLanes, lanes[n]);
                transpose_q(t, lanes[n], all_q + n * kLanes * t.head_dim);
                transpose_o_in(t, lanes[n], order, o_of(b) + (n - first_of(b)) * kLanes, stride_of(b));
            }
        }
    }

    template <PForm FORM>
    void run() {
        for (int64_t n = t.page_begin; n < t.page_end; ++n) {
            if (!t.pages[n].piece) continue;
            bool unpacked = false;
            for (int b = 0; b < n_blocks; ++b) {
                if (!seen(n, b)) {
                    skip(n, b);
                    continue;
                }
                if (!unpacked) unpack<FORM>(n);
                unpacked = true;
                switch (first_of(b + 1) - first_of(b)) {
                    case 1:
                        attend_block<FORM, 1>(n, b);
                        break;
                    case 2:
                        attend_block<FORM, 2>(n, b);
                        break;
                    default:
                        attend_block<FORM, 3>(n, b);
                        break;
                }
            }
        }
        for (int b = 0; b < n_blocks; ++b) {
            for (int n = first_of(b); n < first_of(b + 1); ++n) {
                transpose_o_out(t, lanes[n], order, o_of(b) + (n - first_of(b)) * kLanes, stride_of(b));
            }
        }
    }

  private:
    // Blocks are of even size: one vector alone leaves the products waiting.
    int first_of(int b) const { return n_lanes * b / n_blocks; }
    // O of a block: [place][vector][row].
    float* o_of(int b) const { return all_o + int64_t(first_of(b)) * kLanes * t.head_dim; }
    int stride_of(int b) const { return (first_of(b + 1) - first_of(b)) * kLanes; }

    PieceParts parts(int64_t n) const { return parts_of(t, t.pages[n].kind); }
    bool seen(int64_t n, int b) const {
        for (int k = first_of(b); k < first_of(b + 1); ++k) {
            if (lanes[k].first_seen < (n + 1) * kPageTokens && lanes[k].last_seen > n * kPageTokens) return true;
        }
        return false;
    }

    // A page that no row of a block sees does not change m, l and O, with one exception: with p_running a row that saw keys
    // before adds P V = +0, which turns -0 into +0.
    void skip(int64_t n, int b) {
        if (!t.p_running || t.v_float) return;
        PageScales scales;
        read_scales(t, n, natural(), scales);
        if (scales.v_scale == 0.0f) return;
        for (int k = first_of(b); k < first_of(b + 1); ++k) {
            const __mmask16 rows = __mmask16((1u << lanes[k].rows) - 1);
            const __m512 m = _mm512_mask_loadu_ps(_mm512_set1_ps(kMinusInf), rows, t.m + lanes[k].row);
            const __mmask16 alive = _mm512_cmp_ps_mask(m, _mm512_set1_ps(kMinusInf), _CMP_GT_OQ);
            for (int c = 0; c < t.head_dim; ++c) {
                float* at = o_of(b) + order.place(c) * stride_of(b) + (k - first_of(b)) * kLanes;
                const __m512 x = _mm512_load_ps(at);
                _mm512_store_ps(at, _mm512_mask_add_ps(x, alive, x, _mm512_setzero_ps()));
            }
        }
    }

    static __m512i natural() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

    template <PForm FORM>
    void unpack(int64_t n) {
        const uint8_t* piece = t.pages[n].piece;
        const int d = t.head_dim;
        read_scales(t, n, natural(), block.scales);
        const PieceParts at = parts(n);
        const uint8_t *k_step = piece + at.k_parameters, *v_step = piece + at.v_parameters;
        unpack_k(d, at.k_bits, piece + at.k_codes, k_step, k_step + d, block.k);
        if constexpr (FORM != PForm::kFloat) unpack_v(d, at.v_bits, piece + at.v_codes, v_step, v_step + d, block.v);
        Products::arrange(d, v_stored_channels(d, at.v_bits), FORM != PForm::kFloat, block);
        block.has_k_fraction = false;
        for (int c = 0; c < d; ++c)
            block.v_fraction8[c] = at.v_bits == 8 ? 0.0f : float(fraction_eighths_of(v_step[c], at.v_bits));
        for (int c = 0; c < d && at.k_bits != 8; ++c) {
            const uint8_t fraction = uint8_t(fraction_eighths_of(k_step[c], at.k_bits));
            block.k_fraction8[4 * k_channel_unit(d, c) + c % 4] = fraction;
            block.has_k_fraction |= fraction != 0;
        }
    }

    template <PForm FORM, int VECTORS>
    void attend_block(int64_t n, int b) {
        const int d = t.head_dim, from = first_of(b);
        const int64_t first_key = n * kPageTokens;
        const uint8_t* q[VECTORS];
        for (int v = 0; v < VECTORS; ++v) q[v] = all_q + (from + v) * kLanes * d;
        Products::template scores<VECTORS>(d, q, lanes + from, block);
        const LaneSoftmaxFn softmax = block.scales.k_bytes ? lane_softmax<FORM, true>(t.exp) : lane_softmax<FORM, false>(t.exp);
        for (int v = 0; v < VECTORS; ++v) {
            const Lanes& rows = lanes[from + v];
            const __m512 rest = block.has_k_fraction ? fractions_of_lanes(d, q[v], block.k_fraction8) : _mm512_setzero_ps();
            const bool all = rows.first_by_all <= first_key && rows.last_by_all >= first_key + kPageTokens;
            softmax(t, {rows.row, rows.rows, all}, first_key, block.scales, {block.scores + kLanes * v, kLanes * VECTORS, rest},
                    {block.p[0] + 64 * v, 64 * VECTORS, sizeof block.p[0]}, block.update[v]);
        }
        if constexpr (FORM == PForm::kFloat) {
            float_values_of_block<VECTORS>(t, first_key, order, block, o_of(b));
        } else {
            constexpr int kPlanes = FORM == PForm::kByte ? 1 : 2;
            Products::template values<VECTORS, kPlanes>(d, v_stored_channels(d, parts(n).v_bits), order, block, o_of(b));
        }
    }

    const AttendTask& t;
    const OOrder order;
    const int n_lanes, n_blocks;
    Block& block;
    Lanes* lanes;
    uint8_t* all_q;
    float* all_o;
};

template <class Products>
void attend_tiles_by(const AttendTask& task) {
    TilesPath<Products> path(task);
    if (task.v_float) {
        path.template run<PForm::kFloat>();
    } else if (task.p_levels <= 255) {
        path.template run<PForm::kByte>();
    } else {
        path.template run<PForm::kTwoBytes>();
    }
}

}  // namespace
}  // namespace ta::cpu
