// Decode: attention of at most 16 query rows per kv head over pages, one warp per page and kv head. Warps share nothing, so the
// main loop has no CTA barrier. docs/numerics.md, section 8, defines the arithmetic. Here the maximum that O and l refer to follows
// only when scores outgrow it by 2^30, and 2^x is the hardware's for POLY and EXACT alike: its error, 2 ulp, is far below POLY's.
#pragma once

#include "kernels/cuda/decode_output.cuh"
#include "kernels/cuda/decode_page.cuh"

namespace ta::cuda {

// What is the same for all pages of a segment.
struct DecodeSegment {
    SequenceArgs s;
    int32_t seq, head;
    int32_t k_bits, v_bits;
    int32_t min_end, max_begin;  // every row sees all keys of [max_begin, min_end)
};

__device__ __forceinline__ DecodeSegment open_segment(const DecodeParams& p, const DecodeCursor& at) {
    DecodeSegment g;
    g.s = p.a.sequences[at.seq];
    g.seq = at.seq;
    g.head = at.head;
    const HeadArgs h = p.a.heads ? p.a.heads[at.head] : HeadArgs{0, 4, 4, 0};
    g.k_bits = h.k_bits;
    g.v_bits = h.v_bits;
    g.min_end = visible_keys(p.a.causal, p.a.window, g.s.n_keys, g.s.n_keys - g.s.n_query).end;
    g.max_begin = visible_keys(p.a.causal, p.a.window, g.s.n_keys, g.s.n_keys - 1).begin;
    return g;
}

// The state of the rows 4 n + lane % 4 of a segment in one lane.
template <int D, int kTiles>
struct DecodeRows {
    static constexpr int kOut = v_stored_channels(D, 4) / 8, kOut2 = v_stored_channels(D, 2) / 8;
    static constexpr bool kTwoOrders = kOut != kOut2;  // 2-bit V of head_dim 96 distributes its channels differently

    float q_scale[kTiles];
    float m[kTiles], l[kTiles];  // l: sum over this lane's tokens
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

// e^-y as a table times a cubic, y in natural units; the table's entries come from ex2, whose error is far below the cubic's.
__device__ __forceinline__ float exp2_neg_sas(float u) {
    const float y = u * 0.693147181f, n = floorf(y), f = y - n;
    const float cubic = fmaf(fmaf(fmaf(-0.1025f, f, 0.4626f), f, -0.9922f), f, 0.9996f);
    return y <= 6.0f ? ex2(-n * kLog2e) * cubic : 0.0f;
}

// Bias, softcap and ALiBi. x is the logit of token r + 8 k of the page in x[k].
inline __device__ __noinline__ float adjusted_logit(const DecodeParams& p, float x, float bias, float slope, int32_t distance) {
    x += bias;
    if (p.a.softcap > 0.0f) {
        const float e = ex2(fabsf(x / p.a.softcap) * (-2.0f * kLog2e));
        x = copysignf(p.a.softcap * kLog2e * ((1.0f - e) / (1.0f + e)), x);
    }
    return fmaf(slope, float(distance), x);
}

// Keys that a row does not see, by selection: their slots may hold anything. Only pages at the ends of what is visible have any.
template <int N>
__device__ __forceinline__ void mask(const DecodeParams& p, const DecodeSegment& seg, int32_t first_key, int tile,
                                     float (&x)[N][8], int lane) {
    if (first_key + kPageTokens <= seg.min_end && first_key >= seg.max_begin) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int token = (4 * (tile + n) + lane % 4) / p.a.group;
        const KeyRange keys = visible_keys(p.a.causal, p.a.window, seg.s.n_keys, seg.s.n_keys - seg.s.n_query + token);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int32_t key = first_key + lane / 4 + 8 * k;
            if (key < keys.begin || key >= keys.end) x[n][k] = -kInfinity;
        }
    }
}

// The largest of each row; raises the rows' maxima where `headroom` is exceeded.
template <int D, int kTiles, int N>
__device__ __forceinline__ void raise_maxima(DecodeRows<D, kTiles>& rows, int tile, const float (&x)[N][8], float headroom,
                                             float (&top)[N]) {
    bool outgrown = false;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float(&v)[8] = x[n];
        const float m = fmaxf(fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3])), fmaxf(fmaxf(v[4], v[5]), fmaxf(v[6], v[7])));
        top[n] = fmaxf(max_over_tokens(m), kLowest);
        outgrown |= top[n] > rows.m[tile + n] + headroom;
    }
    if (!__any_sync(kAllLanes, outgrown)) return;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float m = fmaxf(rows.m[tile + n], top[n]);
        rows.scale(tile + n, ex2(rows.m[tile + n] - m));
        rows.m[tile + n] = m;
    }
}

constexpr float kHeadroom = 30.0f;  // far from overflow, and rarely exceeded twice

// Logits x of N row tiles from `tile` on -> P in shared memory, l and m; factor[n] is what O gets P v times. `ratio` [8] is what V
// multiplies the tokens r + 8 k by, `vfac` what it multiplies all of them by. As kernels/cpu/attend.h has it, with every option.
template <bool kGeneral, int D, int kTiles, int N, class Memory>
__device__ __forceinline__ void softmax(const DecodeParams& p, const DecodeSegment& seg, int32_t first_key, int tile,
                                        float (&x)[N][8], const float (&ratio)[8], float vfac, Memory& memory,
                                        DecodeRows<D, kTiles>& rows, float (&factor)[kTiles], int lane) {
    const int r = lane / 4, i = lane % 4;
    const bool sas = kGeneral && p.a.exp == ExpMode::kSas, p_running = kGeneral && p.a.p_running;
    if (kGeneral && (p.a.softcap > 0.0f || p.a.alibi_slope || p.a.k_offset)) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int row = 4 * (tile + n) + i, token = row / p.a.group, q_head = seg.head * p.a.group + row % p.a.group;
            const float slope = p.a.alibi_slope ? p.a.alibi_slope[q_head] * kLog2e : 0.0f;
            const int64_t at = (int64_t(seg.seq) * p.a.kv_heads + seg.head) * p.row_capacity + row;
            const float bias = p.a.k_offset ? p.query_bias[at] : 0.0f;
            const int32_t to_row = first_key + r - (seg.s.n_keys - seg.s.n_query + token);
#pragma unroll
            for (int k = 0; k < 8; ++k) x[n][k] = adjusted_logit(p, x[n][k], bias, slope, to_row + 8 * k);
        }
    }
    mask(p, seg, first_key, tile, x, lane);
    const bool running = p_running || sas;  // values depend on the running maximum
    float top[N];
    raise_maxima(rows, tile, x, running ? 0.0f : kHeadroom, top);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float base = running ? rows.m[tile + n] : top[n];
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
        largest = p_running ? 1.0f : max_over_tokens(largest);
        const bool any = largest >= 0x1p-60f;
        const float to_code = any ? float(p.a.p_levels) * reciprocal(largest) : 0.0f;
        factor[tile + n] = any ? largest * p.inverse_levels * vfac * weight : 0.0f;
        uint32_t bits[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) bits[k] = __float_as_uint(fmaf(x[n][k], to_code, 0x1p23f));
        store_p(memory.w.p[tile + n], bits, lane);
    }
}

// The same for a channel page without options: x are logits less the exponents of V, whose largest is therefore that of P, and `power`
// [8] are 2^exponent, which l takes back.
template <int D, int kTiles, int N, class Memory>
__device__ __forceinline__ void channel_softmax(const DecodeParams& p, const DecodeSegment& seg, int32_t first_key, int tile,
                                                float (&x)[N][8], const float (&power)[8], float vfac, Memory& memory,
                                                DecodeRows<D, kTiles>& rows, float (&factor)[kTiles], int lane) {
    mask(p, seg, first_key, tile, x, lane);
    float top[N];
    raise_maxima(rows, tile, x, kHeadroom, top);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const float weight = ex2(top[n] - rows.m[tile + n]) * p.inverse_levels;
        float sum[2] = {0.0f, 0.0f};
        uint32_t bits[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            // NOTES: in this order. x - (top - log2 levels) can exceed log2 levels where x is large, and P its 16 bits.
            const float prob = ex2((x[n][k] - top[n]) + p.log2_levels);  // P before it is rounded
            sum[k % 2] = fmaf(prob, power[k], sum[k % 2]);
            bits[k] = __float_as_uint(prob + 0x1p23f);
        }
        rows.l[tile + n] = fmaf(sum[0] + sum[1], weight, rows.l[tile + n]);
        factor[tile + n] = vfac * weight;
        store_p(memory.w.p[tile + n], bits, lane);
    }
}

// Exponents of the tokens r + 8 k of a channel page, and 2^exponent.
__device__ __forceinline__ void load_exponents(const uint8_t* exponents, float (&exponent)[8], float (&power)[8], int lane) {
    const int shift = lane / 4 * 4;  // token r + 8 k has nibble r of word k
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint4 w = reinterpret_cast<const uint4*>(exponents)[h];
        const uint32_t words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            exponent[4 * h + k] = __uint_as_float((words[k] >> shift & 15) | 0x4b000000u) - 0x1p23f;
            power[4 * h + k] = ex2(exponent[4 * h + k]);
        }
    }
}

// What the tokens r + 8 k of a token page multiply V by, relative to the largest, which is returned.
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

// kKBits = kVBits = 8: a token page. `q`: the rows' queries where there are at most 4.
template <int D, int kTiles, bool kGeneral, int kKBits, int kVBits, class Memory>
__device__ __forceinline__ void attend_page(const DecodeParams& p, const DecodeSegment& seg, const uint8_t* piece,
                                            int32_t first_key, const HalfQueries<D, 4>& q, Memory& memory,
                                            DecodeRows<D, kTiles>& rows, int lane) {
    constexpr int N = kTiles < 2 ? kTiles : 2;  // row tiles at a time
    float factor[kTiles];
    if constexpr (kKBits == 8) {
        constexpr TokenLayout kLayout(D);
        float ratio[8];
        const float vfac =
            token_ratios(reinterpret_cast<const float*>(piece + kLayout.v_scale()), seg.s.n_keys - first_key, ratio, lane);
        const auto* k_scale = reinterpret_cast<const float*>(piece + kLayout.k_scale()) + lane / 4;
#pragma unroll
        for (int tile = 0; tile < kTiles; tile += N) {
            int s[N][8];
            float x[N][8];
            token_scores<D>(piece, memory, tile, s, lane);
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int k = 0; k < 8; ++k) x[n][k] = float(s[n][k]) * (rows.q_scale[tile + n] * k_scale[8 * k]);
            }
            softmax<kGeneral>(p, seg, first_key, tile, x, ratio, vfac, memory, rows, factor, lane);
        }
    } else {
        constexpr ChannelLayout kLayout(D, kKBits, kVBits);
        const uint8_t* k_step = piece + kLayout.k_step();
        if constexpr (kTiles == 1) {
            scale_queries<D, kKBits>(k_step, q, memory, 0, lane);
        } else {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                HalfQueries<D, 4> of_tile;
                of_tile.load(memory, 4 * tile, lane);
                scale_queries<D, kKBits>(k_step, of_tile, memory, 4 * tile, lane);
            }
        }
        float exponent[8], power[8];
        load_exponents(piece + kLayout.v_exponents(), exponent, power, lane);
        const float k_scale = *reinterpret_cast<const float*>(piece + kLayout.k_scale()) * 0.125f;
        const float vfac = *reinterpret_cast<const float*>(piece + kLayout.v_scale());
        __syncwarp();
#pragma unroll
        for (int tile = 0; tile < kTiles; tile += N) {
            int s[N][8];
            float x[N][8];
            channel_scores<D, kKBits>(piece, k_step, memory, tile, s, lane);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float c = rows.q_scale[tile + n] * k_scale;
#pragma unroll
                for (int k = 0; k < 8; ++k) x[n][k] = kGeneral ? float(s[n][k]) * c : fmaf(float(s[n][k]), c, -exponent[k]);
            }
            if constexpr (kGeneral) {
                float ratio[8];
#pragma unroll
                for (int k = 0; k < 8; ++k) ratio[k] = ex2(-exponent[k]);
                softmax<true>(p, seg, first_key, tile, x, ratio, vfac, memory, rows, factor, lane);
            } else {
                channel_softmax(p, seg, first_key, tile, x, power, vfac, memory, rows, factor, lane);
            }
        }
    }
    __syncwarp();
    uint32_t b[kTiles][2][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) load_p(memory.w.p[n], lane, b[n]);
    if constexpr (kKBits == 8) {
        token_values<D>(piece + TokenLayout(D).v_codes(), b, factor, rows.o, lane);
    } else {
        constexpr ChannelLayout kLayout(D, kKBits, kVBits);
        const uint8_t *codes = piece + kLayout.v_codes(), *v_step = piece + kLayout.v_step();
        if constexpr (kVBits == 2 && DecodeRows<D, kTiles>::kTwoOrders) {
            channel_values<D, kVBits>(codes, v_step, b, factor, rows.o2, lane);
        } else {
            channel_values<D, kVBits>(codes, v_step, b, factor, rows.o, lane);
        }
    }
}

// Writes the rows of a segment: results if it is the whole of its (sequence, head), else a partial result.
template <int D, int kTiles, class Memory>
__device__ void close_segment(const DecodeParams& p, const DecodeSegment& seg, bool whole, int64_t slot, Memory& memory,
                              DecodeRows<D, kTiles>& rows, int lane) {
    using Rows = DecodeRows<D, kTiles>;
    const int r = lane / 4, i = lane % 4, n_rows = seg.s.n_query * p.a.group;
    float* staging = memory.staging;  // [4, D]
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        if (4 * n >= n_rows) break;
        float l = rows.l[n];
#pragma unroll
        for (int h = 4; h <= 16; h *= 2) l += __shfl_xor_sync(kAllLanes, l, h);
        __syncwarp();
#pragma unroll
        for (int c = 0; c < Rows::kOut; ++c) staging[i * D + Rows::kOut * r + c] = rows.o[n][c];
        __syncwarp();
        if constexpr (Rows::kTwoOrders) {
#pragma unroll
            for (int c = 0; c < Rows::kOut2; ++c) {
                if (Rows::kOut2 * r + c < D) staging[i * D + Rows::kOut2 * r + c] += rows.o2[n][c];
            }
            __syncwarp();
        }
        for (int k = 0; k < 4; ++k) {
            const int row = 4 * n + k;
            if (row >= n_rows) break;
            const float m = __shfl_sync(kAllLanes, rows.m[n], k), sum = __shfl_sync(kAllLanes, l, k);
            const auto* from = reinterpret_cast<const float4*>(staging + k * D);
            if (whole) {
                const int q_head = seg.head * p.a.group + row % p.a.group;
                const int64_t at = seg.s.row + row / p.a.group;
                const RowEnd end = end_row(p.a, m, sum, q_head);
                uint8_t* to = output_row(p.a, at, q_head);
                for (int w = lane; w < D / 4; w += 32) store_word(to, p.a.out.dtype, w, scaled(from[w], end.factor));
                if (p.a.lse && lane == 0) p.a.lse[at * p.a.kv_heads * p.a.group + q_head] = end.lse;
            } else {
                const int64_t at = slot * p.row_capacity + row;
                auto* to = reinterpret_cast<float4*>(p.partial_o + at * D);
                for (int w = lane; w < D / 4; w += 32) to[w] = from[w];
                if (lane == 0) p.partial_ml[at] = make_float2(m, sum);
            }
        }
    }
    __syncwarp();
}

template <int D, int kTiles>
inline constexpr int kWarpMemoryBytes =
    (int(sizeof(WarpMemory<D, 4 * kTiles>)) + kPieceAlignment - 1) / kPieceAlignment* kPieceAlignment;

// Dynamic shared memory: for each warp WarpMemory and p.ring_bytes.
// kGeneral: with softcap, ALiBi, K offsets, SAS or P in units of the running maximum; the rest of the options cost nothing.
template <int D, int kTiles, bool kGeneral>
__global__ void __launch_bounds__(32 * decode_max_warps(D, kTiles), 1) decode_kernel(const __grid_constant__ DecodeParams p) {
    static_assert(D % 32 == 0, "an MMA step has 32 channels");
    using Memory = WarpMemory<D, 4 * kTiles>;
    extern __shared__ __align__(128) uint8_t smem[];
    const int warp = __shfl_sync(kAllLanes, int(threadIdx.x) / 32, 0), lane = int(threadIdx.x) % 32;
    constexpr int kMemoryBytes = kWarpMemoryBytes<D, kTiles>;
    uint8_t* const base = smem + warp * (kMemoryBytes + p.ring_bytes);
    Memory& memory = *reinterpret_cast<Memory*>(base);
#if __CUDA_ARCH__ >= 900
    if (lane < kDecodeMaxInFlight) mbarrier_init(smem_address(&memory.barriers[lane]), 1);
    mbarrier_init_fence();
    __syncwarp();
#endif
    // The lengths are needed first and in turn: have them on their way. Into L2 only, which stays coherent.
    for (int i = int(threadIdx.x) * 128; i < p.a.batch * int(sizeof(SequenceArgs)); i += int(blockDim.x) * 128) {
        prefetch_l2(reinterpret_cast<const uint8_t*>(p.a.sequences) + i);
    }
    if (p.a.heads && threadIdx.x * 128 < p.a.kv_heads * sizeof(HeadArgs)) prefetch_l2(p.a.heads + threadIdx.x * 16);
    // NOTES: pages and lengths are read before the wait. That is right because the query kernel lets this one start only after its
    // own wait: what came before it is complete. Only what it writes itself must be waited for.
    if (p.windowed_pages) grid_dependency_wait();

    const int32_t probe = DecodeCursor::first_probe(p, lane);
    const DecodeCut cut(__shfl_sync(kAllLanes, probe, 31) * p.a.kv_heads, p.warps);
    const int32_t range = warp * int32_t(gridDim.x) + int32_t(blockIdx.x);  // few ranges are spread over all SMs
    if (range >= cut.ranges) return;
    const int32_t begin = cut.begin(range);
    int32_t left = cut.begin(range + 1) - begin;
    DecodeCursor at;
    at.seek(p, begin, probe, lane);
    PieceLoader<D> loader(p, at, left, base + kMemoryBytes, memory.barriers, lane);
    loader.fill();
    grid_dependency_wait();
    grid_launch_dependents();
    for (;;) {
        const DecodeSegment seg = open_segment(p, at);
        const int32_t pages = min(at.pages - at.page, left);
        DecodeRows<D, kTiles> rows;
        rows.clear();
        load_queries<D, kTiles>(p, seg.seq * p.a.kv_heads + seg.head, memory, rows.q_scale, lane);
        HalfQueries<D, 4> q;
        q.load(memory, 0, lane);
        const int32_t first = first_page(p.a, seg.s) + at.page;
        for (int32_t page = first; page < first + pages; ++page) {
            const auto piece = loader.take();
            const auto attend = [&]<int kKBits, int kVBits>() {
                attend_page<D, kTiles, kGeneral, kKBits, kVBits>(p, seg, piece.data, page * kPageTokens, q, memory, rows, lane);
            };
            if (!piece.channel) {
                attend.template operator()<8, 8>();
            } else if (seg.k_bits == 4) {
                seg.v_bits == 4 ? attend.template operator()<4, 4>() : attend.template operator()<4, 2>();
            } else {
                seg.v_bits == 4 ? attend.template operator()<2, 4>() : attend.template operator()<2, 2>();
            }
            loader.release();
            loader.fill();
        }
        const int64_t slot = range + int64_t(seg.seq) * p.a.kv_heads + seg.head;
        close_segment(p, seg, pages == at.pages, slot, memory, rows, lane);
        left -= pages;
        if (left == 0) break;
        at.next_segment(p);
    }
}

}  // namespace ta::cuda
