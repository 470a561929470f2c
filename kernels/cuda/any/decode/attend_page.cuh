// The work of a warp of the decode kernel on one page of a segment: scores, P, and the addition of P v to O.
#pragma once

#include "kernels/cuda/any/decode/launch.h"
#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/decode/page.cuh"
#include "kernels/cuda/common/scores.cuh"
#include "kernels/cuda/common/turning.cuh"

namespace ta::cuda {

// Values that are the same for all pages of a segment.
struct DecodeSegment {
    SequenceArgs s;
    int32_t seq, head;
    int32_t k_bits, v_bits;
    int32_t first_position;      // of its query tokens among the keys
    int32_t min_end, max_begin;  // every row sees all keys of [max_begin, min_end)
};

template <DecodeKind kKind>
__device__ __forceinline__ DecodeSegment open_segment(const DecodeParams& p, const DecodeCursor& at) {
    DecodeSegment g;
    g.s = at.s;
    g.seq = at.seq;
    g.head = at.head;
    const HeadArgs h = p.a.heads ? p.a.heads[at.head] : HeadArgs{0, 4, 4, 0};
    g.k_bits = h.k_bits;
    g.v_bits = h.v_bits;
    g.first_position = p.a.first_position ? p.a.first_position[at.seq] : g.s.n_keys - g.s.n_query;
    g.min_end = visible_keys(p.a.causal, p.a.window, g.s.n_keys, g.first_position).end;
    g.max_begin = visible_keys(p.a.causal, p.a.window, g.s.n_keys, g.first_position + g.s.n_query - 1).begin;
    if (kKind == DecodeKind::kGeneral && p.tree) g.min_end = g.first_position - p.tree[g.s.row].index;
    return g;
}

// Adds the turning pairs of a page to the logits of N row tiles, tokens r + 8 k; `pair(n)` is its n-th or 0. The queries are
// read from where the caller has them: after a segment's first page they are in L1, which the pages do not pass through.
template <int N, class Pair>
__device__ __forceinline__ void add_turning(const DecodeParams& p, const DecodeSegment& seg, Pair pair, int tile,
                                            float (&x)[N][8], int lane) {
#pragma unroll 1
    for (int m = 0; m < kTurningPairs; ++m) {
        const uint64_t code = pair(m);
        if (code == 0) break;
        const TurningPair of = unpack_turning(code);
        float first[N], second[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const void* row = query_row(p, seg.s, seg.head, 4 * (tile + n) + lane % 4);
            first[n] = query_value(p.a.q, row, of.first, p.unit, p.a.saturate);
            second[n] = query_value(p.a.q, row, of.second, p.unit, p.a.saturate);
        }
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const TurningValues at = turning_values_fast(of, lane / 4 + 8 * k);
#pragma unroll
            for (int n = 0; n < N; ++n) x[n][k] = fmaf(second[n], at.second, fmaf(first[n], at.first, x[n][k]));
        }
    }
}

// The state of the rows 4 n + lane % 4 of a segment in one lane.
template <int D, int kTiles>
struct DecodeRows {
    static constexpr int kOut = v_stored_channels(D, 4) / 8, kOut2 = v_stored_channels(D, 2) / 8;
    static constexpr bool kTwoOrders = kOut != kOut2;  // 2-bit V of head_dim 96 distributes its channels differently

    float q_scale[kTiles];
    float m[kTiles], l[kTiles];  // l: sum over this lane's tokens
    float range[kTiles];         // the largest score of the range of pages so far, where that counts
    float page[kTiles];          // the last page's part in l
    float o[kTiles][kOut];
    float o2[kTwoOrders ? kTiles : 1][kTwoOrders ? kOut2 : 1];

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            m[n] = kLowest;
            l[n] = 0.0f;
#pragma unroll
            for (float& x : o[n]) x = 0.0f;
            if constexpr (kTwoOrders) {
                for (float& x : o2[n]) x = 0.0f;
            }
        }
    }
    __device__ __forceinline__ void scale(int n, float alpha) {
        l[n] *= alpha;
#pragma unroll
        for (float& x : o[n]) x *= alpha;
        if constexpr (kTwoOrders) {
#pragma unroll
            for (float& x : o2[n]) x *= alpha;
        }
    }
};

__device__ __forceinline__ float max_over_tokens(float x) {  // lanes of the same lane % 4
#pragma unroll
    for (int h = 4; h <= 16; h *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, h));
    return x;
}

// Bias, softcap and ALiBi of a logit. `distance`: the key's position less the query's.
inline __device__ __noinline__ float adjusted_logit(const DecodeParams& p, float x, float bias, float slope, int32_t distance) {
    x += bias;
    if (p.a.softcap > 0.0f) x = soft_capped(x, p.a.softcap);
    return fmaf(slope, float(distance), x);
}

// Masks keys that a row does not see, by selection: their slots may hold anything. Only pages at the ends of what is visible
// have such keys.
template <int N>
__device__ __forceinline__ void mask(const DecodeParams& p, const DecodeSegment& seg, int32_t first_key, int tile,
                                     float (&x)[N][8], int lane) {
    if (first_key + kPageTokens <= seg.min_end && first_key >= seg.max_begin) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int token = RowPlace(p, seg.head, 4 * (tile + n) + lane % 4).token;
        const KeyRange keys = visible_keys(p.a.causal, p.a.window, seg.s.n_keys, seg.first_position + token);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int32_t key = first_key + lane / 4 + 8 * k;
            if (key < keys.begin || key >= keys.end) x[n][k] = -kInfinity;
        }
    }
}

// The position of a key minus that of a tree's query, whose row of q is `row` and whose own key is `slot`; above 0: it does not
// see it.
inline __device__ __noinline__ int32_t tree_distance(const DecodeParams& p, int32_t row, int32_t slot, int32_t key) {
    const TreeRow query = p.tree[row];
    const int32_t place = key - (slot - query.index);  // among the new tokens
    if (place < 0) return place - query.depth;
    if (key > slot || (place < kTreeTokens && !(query.seen >> place & 1))) return 1;
    return p.tree[row - query.index + place].depth - query.depth;
}

// Step 2 of kernels/cpu/attend.h beyond the scores, and the mask, where there are trees.
template <int D, int kRows, int N>
__device__ __forceinline__ void see_tree(const DecodeParams& p, const DecodeSegment& seg, const WarpMemory<D, kRows>& memory,
                                         int32_t first_key, int tile, float (&x)[N][8], int lane) {
    const bool seen_by_all = first_key + kPageTokens <= seg.min_end && first_key >= seg.max_begin;
    if (seen_by_all && p.a.softcap == 0.0f && !p.a.alibi_slope && !p.a.k_offset) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int row = 4 * (tile + n) + lane % 4;
        const auto [place, q_head] = RowPlace(p, seg.head, row);
        const int token = min(place, seg.s.n_query - 1);  // rows that do not exist see what the last one does
        const float slope = p.a.alibi_slope && place == token ? p.a.alibi_slope[q_head] * kLog2e : 0.0f;
        const float bias = memory.queries[0].bias[row];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int32_t key = first_key + lane / 4 + 8 * k;
            const int32_t distance = tree_distance(p, seg.s.row + token, seg.first_position + token, key);
            const bool seen = distance <= 0 && in_window(p.a.window, -distance);
            x[n][k] = seen ? adjusted_logit(p, x[n][k], bias, slope, distance) : -kInfinity;
        }
    }
}

constexpr float kHeadroom = 30.0f;  // far from overflow, and rarely exceeded twice

// The largest of each row, or of its range so far if `running`; raises the rows' maxima where kHeadroom is exceeded.
template <int D, int kTiles, int N>
__device__ __forceinline__ void raise_maxima(DecodeRows<D, kTiles>& rows, int tile, const float (&x)[N][8], bool running,
                                             float (&top)[N]) {
    bool outgrown = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float(&v)[8] = x[n];
        const float m = fmaxf(fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), fmaxf(fmaxf(v[4], v[5]), fmaxf(v[6], v[7])));
        top[n] = fmaxf(max_over_tokens(m), kLowest);
        if (running) top[n] = rows.range[tile + n] = fmaxf(rows.range[tile + n], top[n]);
        outgrown |= top[n] > rows.m[tile + n] + kHeadroom;
    }
    if (!__any_sync(kAllLanes, outgrown)) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float m = fmaxf(rows.m[tile + n], top[n]);
        rows.scale(tile + n, ex2(rows.m[tile + n] - m));
        rows.m[tile + n] = m;
    }
}

// A warp at work on a segment.
template <int D, int kTiles>
struct DecodeWarp {
    const DecodeParams& p;
    const DecodeSegment& seg;
    WarpMemory<D, 4 * kTiles>& memory;
    DecodeRows<D, kTiles>& rows;
    int lane;
};

// Logits x of N row tiles from `tile` on -> P in shared memory, l and m; factor[n] is what O gets P v times. `ratio` [8] is
// what V multiplies the tokens r + 8 k by, `vfac` what it multiplies all of them by. The arithmetic is that of
// kernels/cpu/attend.h, with every option. `only_maxima`: the page belongs to another warp, and comes before this warp's pages
// in the same range.
template <DecodeKind kKind, int D, int kTiles, int N>
__device__ __forceinline__ void softmax(const DecodeWarp<D, kTiles>& warp, int32_t first_key, int tile, float (&x)[N][8],
                                        const float (&ratio)[8], float vfac, bool only_maxima, float (&factor)[kTiles]) {
    const DecodeParams& p = warp.p;
    const DecodeSegment& seg = warp.seg;
    DecodeRows<D, kTiles>& rows = warp.rows;
    constexpr bool kGeneral = kKind == DecodeKind::kGeneral;
    const int lane = warp.lane, r = lane / 4, i = lane % 4;
    const bool sas = kGeneral && p.a.exp == ExpMode::kSas, p_running = kGeneral && p.a.p_running;
    const bool in_trees = kGeneral && p.tree;
    if (in_trees) {
        see_tree(p, seg, warp.memory, first_key, tile, x, lane);
    } else if (kGeneral && (p.a.softcap > 0.0f || p.a.alibi_slope || p.a.k_offset)) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int row = 4 * (tile + n) + i;
            const auto [token, q_head] = RowPlace(p, seg.head, row);
            const float slope = p.a.alibi_slope ? p.a.alibi_slope[q_head] * kLog2e : 0.0f;
            const float bias = warp.memory.queries[0].bias[row];  // 0 without an offset
            const int32_t to_row = first_key + r - (seg.first_position + token);
#pragma unroll
            for (int k = 0; k < 8; ++k) x[n][k] = adjusted_logit(p, x[n][k], bias, slope, to_row + 8 * k);
        }
    }
    if (!in_trees) mask(p, seg, first_key, tile, x, lane);
    __syncwarp();  // the digits, in whose place P goes, have been read
    float top[N];
    raise_maxima(rows, tile, x, p_running || sas, top);
    if (kGeneral && only_maxima) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float base = top[n];
        float sum = 0.0f, largest = 0.0f;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float prob = sas ? exp2_neg_sas(base - x[n][k]) : ex2(x[n][k] - base);
            sum += prob;
            x[n][k] = prob * ratio[k];
            largest = fmaxf(largest, x[n][k]);
        }
        const float weight = ex2(base - rows.m[tile + n]);
        rows.l[tile + n] = fmaf(sum, weight, rows.l[tile + n]);
        rows.page[tile + n] = sum * weight;
        largest = p_running ? 1.0f : max_over_tokens(largest);
        const bool any = largest >= 0x1p-60f;
        const float to_code = any ? p.levels * reciprocal(largest) : 0.0f;
        factor[tile + n] = any ? largest * p.inverse_levels * vfac * weight : 0.0f;
        uint32_t bits[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) bits[k] = __float_as_uint(fmaf(x[n][k], to_code, 0x1p23f));
        store_p(warp.memory.p(tile + n), bits, lane);
    }
}

// The same for a channel page without options: x are logits less the exponents of V, whose largest is therefore that of P, and
// `power` [8] are 2^exponent, which l takes back.
template <int D, int kTiles, int N>
__device__ __forceinline__ void channel_softmax(const DecodeWarp<D, kTiles>& warp, int32_t first_key, int tile,
                                                float (&x)[N][8], const float (&power)[8], float vfac,
                                                float (&factor)[kTiles]) {
    const DecodeParams& p = warp.p;
    DecodeRows<D, kTiles>& rows = warp.rows;
    const int lane = warp.lane;
    mask(p, warp.seg, first_key, tile, x, lane);
    __syncwarp();  // the digits, in whose place P goes, have been read
    float top[N];
    raise_maxima(rows, tile, x, false, top);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float weight = ex2(top[n] - rows.m[tile + n]);
        float sum[2] = {0.0f, 0.0f};
        uint32_t bits[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float prob = ex2(x[n][k] - top[n]);
            sum[k % 2] = fmaf(prob, power[k], sum[k % 2]);
            bits[k] = __float_as_uint(fmaf(prob, p.levels, 0x1p23f));
        }
        rows.l[tile + n] = fmaf(sum[0] + sum[1], weight, rows.l[tile + n]);
        rows.page[tile + n] = (sum[0] + sum[1]) * weight;
        factor[tile + n] = vfac * p.inverse_levels * weight;
        store_p(warp.memory.p(tile + n), bits, lane);
    }
}

// Exponents of the tokens r + 8 k of a channel page, and 2^exponent.
__device__ __forceinline__ void load_exponents(const uint8_t* exponents, float (&exponent)[8], float (&power)[8], int lane) {
    const int shift = lane / 4 * 4;  // token r + 8 k has nibble r of word k
    // Not as a constant: the instructions are the same, but in another order than the one that was measured.
    uint32_t bits_of_2_23;
    asm("mov.b32 %0, 0x4b000000;" : "=r"(bits_of_2_23));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint4 w = reinterpret_cast<const uint4*>(exponents)[h];
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t magic = (words[k] >> shift & 15) | bits_of_2_23;
            exponent[4 * h + k] = __uint_as_float(magic) - 0x1p23f;
            power[4 * h + k] = __uint_as_float(magic * (1u << 23) + 0x3f800000u);
        }
    }
}

// The factors of V for the tokens r + 8 k of a token page, relative to the largest factor, which is returned.
__device__ __forceinline__ float token_ratios(const float* v_scale, int32_t valid, float (&ratio)[8], int lane) {
    const int r = lane / 4;
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        ratio[k] = r + 8 * k < valid ? v_scale[r + 8 * k] : 0.0f;  // slots beyond may hold anything
        largest = fmaxf(largest, ratio[k]);
    }
    largest = max_over_tokens(largest);
    const float inverse = largest > 0.0f ? reciprocal(largest) : 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) ratio[k] *= inverse;
    return largest;
}

// The unit of the sums of token_scores().
constexpr float kRestUnit = 1.0f / float(kRestUnits);

template <int kTiles>
inline constexpr int kTilesAtOnce = kTiles < 2 ? kTiles : 2;

// P of a token page without options, all row tiles.
template <DecodeKind kKind, int D, int kTiles>
__device__ __forceinline__ void make_token_p(const DecodeWarp<D, kTiles>& warp, const uint8_t* piece, int32_t first_key,
                                             float (&factor)[kTiles]) {
    constexpr int N = kTilesAtOnce<kTiles>;
    constexpr TokenLayout kLayout(D);
    const DecodeParams& p = warp.p;
    const int lane = warp.lane;
    float ratio[8];
    const float vfac =
        token_ratios(reinterpret_cast<const float*>(piece + kLayout.v_scale()), warp.seg.s.n_keys - first_key, ratio, lane);
    const auto* k_scale = reinterpret_cast<const float*>(piece + kLayout.k_scale()) + lane / 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += N) {
        int s[N][8];
        float x[N][8];
        token_scores<D>(piece, warp.memory, tile, s, lane);
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int k = 0; k < 8; ++k) x[n][k] = float(s[n][k]) * (warp.rows.q_scale[tile + n] * k_scale[8 * k] * kRestUnit);
        }
        if (p.a.k_turning) {
            const auto pair = [&](int m) { return turning_of_scales(piece + kLayout.k_scale(), m); };
            add_turning(p, warp.seg, pair, tile, x, lane);
        }
        softmax<kKind>(warp, first_key, tile, x, ratio, vfac, false, factor);
    }
}

// Leaves q step of all rows in memory, as two digits. `q`: the rows' queries where there are at most 4.
template <int kKBits, int D, int kTiles>
__device__ __forceinline__ void fold_queries(const DecodeWarp<D, kTiles>& warp, const uint8_t* k_step,
                                             const HalfQueries<D, 4>& q) {
    if constexpr (kTiles == 1) {
        scale_queries<D, kKBits>(k_step, q, warp.memory, 0, warp.lane);
    } else {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            HalfQueries<D, 4> of_tile;
            of_tile.load(warp.memory, 4 * tile, warp.lane);
            scale_queries<D, kKBits>(k_step, of_tile, warp.memory, 4 * tile, warp.lane);
        }
    }
}

// P of a channel page without options.
template <int kKBits, int kVBits, int D, int kTiles>
__device__ __forceinline__ void make_channel_p(const DecodeWarp<D, kTiles>& warp, const uint8_t* piece, int32_t first_key,
                                               const HalfQueries<D, 4>& q, float (&factor)[kTiles]) {
    constexpr int N = kTilesAtOnce<kTiles>;
    constexpr ChannelLayout kLayout(D, kKBits, kVBits);
    const DecodeParams& p = warp.p;
    const int lane = warp.lane;
    const uint8_t* k_step = piece + kLayout.k_step();
    fold_queries<kKBits>(warp, k_step, q);
    float exponent[8], power[8];
    load_exponents(piece + kLayout.v_exponents(), exponent, power, lane);
    const float k_scale = *reinterpret_cast<const float*>(piece + kLayout.k_scale()) * 0.125f;
    const float vfac = *reinterpret_cast<const float*>(piece + kLayout.v_scale());
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += N) {
        int s[N][8];
        float x[N][8];
        channel_scores<D, kKBits>(piece, k_step, warp.memory, tile, s, lane);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float factor_of_score = warp.rows.q_scale[tile + n] * k_scale;
#pragma unroll
            for (int k = 0; k < 8; ++k)
                x[n][k] = fmaf(float(s[n][k]), factor_of_score * (1.0f / float(1 << score_shift<kKBits>(k))), -exponent[k]);
        }
        if (p.a.k_turning) {
            const auto pair = [&](int m) { return turning_of_pairs(piece + kLayout.k_turning(), m); };
            add_turning(p, warp.seg, pair, tile, x, lane);
        }
        channel_softmax(warp, first_key, tile, x, power, vfac, factor);
    }
}

// Adds to O: factor[n] P v, with P in shared memory. `parameters`: V's, of 4 and 2 bits.
template <int kVBits, int D, int kTiles>
__device__ __forceinline__ void add_values(const DecodeWarp<D, kTiles>& warp, const uint8_t* codes, const uint8_t* parameters,
                                           const float (&factor)[kTiles]) {
    uint32_t b[kTiles][2][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) load_p(warp.memory.p(n), warp.lane, b[n]);
    if constexpr (kVBits == 8) {
        token_values<D>(codes, b, factor, warp.rows.o, warp.lane);
    } else if constexpr (kVBits == 2 && DecodeRows<D, kTiles>::kTwoOrders) {
        channel_values<D, kVBits>(codes, parameters, b, factor, warp.rows.o2, warp.lane);
    } else {
        channel_values<D, kVBits>(codes, parameters, b, factor, warp.rows.o, warp.lane);
    }
}

// A page without options. kKBits = kVBits = 8: a token page.
template <DecodeKind kKind, int kKBits, int kVBits, int D, int kTiles>
__device__ __forceinline__ void attend_page(const DecodeWarp<D, kTiles>& warp, const uint8_t* piece, int32_t first_key,
                                            const HalfQueries<D, 4>& q) {
    float factor[kTiles];
    if constexpr (kKBits == 8) {
        make_token_p<kKind>(warp, piece, first_key, factor);
        __syncwarp();
        add_values<8>(warp, piece + TokenLayout(D).v_codes(), nullptr, factor);
    } else {
        constexpr ChannelLayout kLayout(D, kKBits, kVBits);
        make_channel_p<kKBits, kVBits>(warp, piece, first_key, q, factor);
        __syncwarp();
        add_values<kVBits>(warp, piece + kLayout.v_codes(), piece + kLayout.v_parameters(), factor);
    }
}

// Addresses of the parts of a piece, whatever its bits.
struct PieceParts {
    int k_bits, v_bits;
    const uint8_t *k_codes, *v_codes;
    const uint8_t *k_parameters, *v_parameters;  // as ChannelLayout's
    const uint8_t *v_exponents, *k_scale, *k_turning;

    template <int D>
    static __device__ __forceinline__ PieceParts of(const uint8_t* piece, bool channel, int k_bits, int v_bits) {
        if (!channel) {
            constexpr TokenLayout kAt(D);
            return {8,       8,       piece,  piece + kAt.v_codes(), piece + kAt.k_scale(), piece + kAt.v_scale(),
                    nullptr, nullptr, nullptr};
        }
        const ChannelLayout at(D, k_bits, v_bits);
        return {k_bits,
                v_bits,
                piece,
                piece + at.v_codes(),
                piece + at.k_parameters(),
                piece + at.v_parameters(),
                piece + at.v_exponents(),
                piece + at.k_scale(),
                piece + at.k_turning()};
    }
};

// Logits of N row tiles from `tile` on; queries are folded. Two digits of them are in memory where kKBits is not 8.
template <int kKBits, int D, int kTiles, int N>
__device__ __forceinline__ void logits_of(const DecodeWarp<D, kTiles>& warp, const PieceParts& at, int tile, float (&x)[N][8]) {
    const int lane = warp.lane;
    int s[N][8];
    if constexpr (kKBits == 8) {
        token_scores<D>(at.k_codes, warp.memory, tile, s, lane);
        const auto* k_scale = reinterpret_cast<const float*>(at.k_parameters) + lane / 4;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int k = 0; k < 8; ++k) x[n][k] = float(s[n][k]) * (warp.rows.q_scale[tile + n] * k_scale[8 * k] * kRestUnit);
        }
    } else {
        channel_scores<D, kKBits>(at.k_codes, at.k_parameters, warp.memory, tile, s, lane);
        const float k_scale = *reinterpret_cast<const float*>(at.k_scale) * 0.125f;
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float factor_of_score = warp.rows.q_scale[tile + n] * k_scale;
#pragma unroll
            for (int k = 0; k < 8; ++k)
                x[n][k] = float(s[n][k]) * (factor_of_score * (1.0f / float(1 << score_shift<kKBits>(k))));
        }
    }
    if (!warp.p.a.k_turning) return;
    const auto pair = [&](int m) {
        return kKBits == 8 ? turning_of_scales(at.k_parameters, m) : turning_of_pairs(at.k_turning, m);
    };
    add_turning(warp.p, warp.seg, pair, tile, x, lane);
}

// A page of any kind with every option; K and V have any bits. `only_maxima`: the page belongs to another warp, and comes
// before this warp's pages in the same range.
template <int D, int kTiles>
__device__ __forceinline__ void attend_general_page(const DecodeWarp<D, kTiles>& warp, const PieceParts& at, int32_t first_key,
                                                    const HalfQueries<D, 4>& q, bool only_maxima) {
    constexpr int N = kTilesAtOnce<kTiles>;
    const int lane = warp.lane;
    float factor[kTiles], ratio[8], vfac;
    if (at.v_bits == 8) {
        vfac = token_ratios(reinterpret_cast<const float*>(at.v_parameters), warp.seg.s.n_keys - first_key, ratio, lane);
    } else {
        float exponent[8], power[8];
        load_exponents(at.v_exponents, exponent, power, lane);
        vfac = *reinterpret_cast<const float*>(at.k_scale + sizeof(float));
#pragma unroll
        for (int k = 0; k < 8; ++k) ratio[k] = ex2(-exponent[k]);
    }
    if (at.k_bits == 4) {
        fold_queries<4>(warp, at.k_parameters, q);
    } else if (at.k_bits == 2) {
        fold_queries<2>(warp, at.k_parameters, q);
    }
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += N) {
        float x[N][8];
        if (at.k_bits == 8) {
            logits_of<8>(warp, at, tile, x);
        } else if (at.k_bits == 4) {
            logits_of<4>(warp, at, tile, x);
        } else {
            logits_of<2>(warp, at, tile, x);
        }
        softmax<DecodeKind::kGeneral>(warp, first_key, tile, x, ratio, vfac, only_maxima, factor);
    }
    __syncwarp();
    if (only_maxima) return;
    if (at.v_bits == 8) {
        add_values<8>(warp, at.v_codes, nullptr, factor);
    } else if (at.v_bits == 4) {
        add_values<4>(warp, at.v_codes, at.v_parameters, factor);
    } else {
        add_values<2>(warp, at.v_codes, at.v_parameters, factor);
    }
}

// The page that a piece is of.
template <DecodeKind kKind, int D, int kTiles, class Piece>
__device__ __forceinline__ void attend_piece(const DecodeWarp<D, kTiles>& warp, const Piece& piece, int32_t block,
                                             const HalfQueries<D, 4>& q, bool only_maxima) {
    const int32_t k_bits = piece.low ? 2 : warp.seg.k_bits, v_bits = piece.low ? 2 : warp.seg.v_bits;
    if constexpr (kKind == DecodeKind::kGeneral) {
        const PieceParts at = PieceParts::of<D>(piece.data, piece.channel, k_bits, v_bits);
        attend_general_page(warp, at, block * kPageTokens, q, only_maxima);
    } else {
        const auto attend = [&]<int kKBits, int kVBits>() {
            attend_page<kKind, kKBits, kVBits>(warp, piece.data, block * kPageTokens, q);
        };
        if (!piece.channel) {
            attend.template operator()<8, 8>();
        } else if (k_bits == 4) {
            v_bits == 4 ? attend.template operator()<4, 4>() : attend.template operator()<4, 2>();
        } else {
            v_bits == 4 ? attend.template operator()<2, 4>() : attend.template operator()<2, 2>();
        }
    }
}

}  // namespace ta::cuda
