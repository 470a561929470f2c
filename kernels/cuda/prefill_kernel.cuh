// The prefill kernel. Persistent CTAs, each with a list of tiles of 128 query rows of one kv head. Four producer warps expand pages
// into INT8 tiles in shared memory (prefill_pages.cuh); two warpgroups of 64 rows run, per block of 128 keys,
//   S = Q K^T (s8 x s8) -> P (u8, prefill_softmax.cuh) -> O += P V (u8 x s8, int32),
// with Q, P and O in registers. The tokens of V lie in the order in which S leaves P, so nothing is shuffled in between.
#pragma once

#include "kernels/cuda/prefill_pages.cuh"
#include "kernels/cuda/prefill_softmax.cuh"

namespace ta::cuda::prefill {

// Everything per row that comes before the first product. `info` is that of row g, info + 8 that of the other.
template <int D>
TA_DEVICE void start_rows(const AttendArgs& args, const PrefillTile& tile, int first_row, int i, Queries<D>& q, Rows& rows,
                          uint32_t negative, RowInfo* info) {
    uint32_t codes[D / 16] = {};
    // One row after the other by the same instructions: unrolled, they crowd the main loop out of the instruction cache.
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
        const int row = first_row + 8 * which;
#pragma unroll
        for (int n = 0; n < D / 16; ++n) q.a[n / 2][2 * (n % 2)] = codes[n];
        RowInfo r;
        load_query<D>(args, tile, row, i, negative, codes, r);
        r.position = tile.n_keys - tile.n_query + row / args.group;
        const KeyRange seen = visible_keys(args.causal, args.window, tile.n_keys, r.position);
        const bool exists = row < tile.n_query * args.group;
        // A row that does not exist sees all keys, so that no block takes a slower path because of it.
        r.key_begin = exists ? seen.begin : 0;
        r.key_end = exists ? seen.end : tile.n_keys;
        r.slope = args.alibi_slope && exists ? args.alibi_slope[tile.head * args.group + row % args.group] * 1.44269504f : 0.0f;
        r.natural = kNever;
        if (i == 0) info[8 * which] = r;
    }
#pragma unroll
    for (int n = 0; n < D / 16; ++n) q.a[n / 2][2 * (n % 2) + 1] = codes[n];
    rows.m[0] = rows.m[1] = kNever;
    rows.l[0] = rows.l[1] = 0.0f;
    __syncwarp();
}

template <typename T, int N>
TA_DEVICE void store_channels(T* to, const float (&x)[N]) {
    constexpr int kPer = 16 / sizeof(T);
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
#pragma unroll
        for (int n = 0; n < N; n += kPer) {
            uint4 raw;
            T* values = reinterpret_cast<T*>(&raw);
#pragma unroll
            for (int k = 0; k < kPer; ++k) values[k] = T(x[n + k]);
            *reinterpret_cast<uint4*>(to + n) = raw;
        }
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) to[n] = T(x[n]);
    }
}

// O / l and LSE of a lane's two rows.
template <int D>
TA_DEVICE void finish_rows(const AttendArgs& args, const PrefillTile& tile, int first_row, int i, const RowInfo* info,
                           const Rows& rows, const int32_t (&o)[D / 2]) {
    constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
        const int row = first_row + 8 * which;
        float l = quad_sum(rows.l[which]);
        const int head = tile.head * args.group + row % args.group;
        if (row >= tile.n_query * args.group) continue;
        // Score of the row = what P carries + shift; with softcap the offset is in the scores already.
        const float shift = args.softcap > 0.0f ? 0.0f : info[8 * which].bias;
        float m = rows.m[which];
        if (args.sink) {
            const float sink = args.sink[head] * kLog2e - shift;
            if (l > 0.0f) {
                l += 255.0f * exp2_approx(fminf(sink - m, 126.0f));
            } else {
                l = 255.0f, m = sink;
            }
        }
        const float norm = l > 0.0f ? 1.0f / l : 0.0f;
        float x[D / 4];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
            for (int j = 0; j < D / 8; ++j) x[e * (D / 8) + j] = float(o[4 * j + 2 * which + e]) * norm;
        }
        const int64_t offset = row_offset(args, args.out, tile, row) + i * (D / 4);
        if (args.out.dtype == DType::kF16) {
            store_channels(static_cast<__half*>(args.out.data) + offset, x);
        } else if (args.out.dtype == DType::kBf16) {
            store_channels(static_cast<__nv_bfloat16*>(args.out.data) + offset, x);
        } else {
            store_channels(static_cast<float*>(args.out.data) + offset, x);
        }
        if (args.lse && i == 0) {
            const float lse = (m + log2f(l * (1.0f / 255.0f)) + shift) * kLn2;
            args.lse[int64_t(tile.row + row / args.group) * (args.kv_heads * args.group) + head] = l > 0.0f ? lse : -INFINITY;
        }
    }
}

template <int D>
TA_DEVICE void multiply_k(const Queries<D>& q, const uint8_t* k, int32_t (&s)[64]) {
    const uint64_t tile = sm90::tile_descriptor<D>(k);
#pragma unroll
    for (int step = 0; step < D / 32; ++step) sm90::wgmma_s8_n128(s, q.a[step], tile + 2 * step, step > 0);
}
template <int D>
TA_DEVICE void multiply_fractions(const Queries<D>& q, const uint8_t* k_fraction, int32_t (&s)[4]) {
    const uint64_t tile = sm90::tile_descriptor<D>(k_fraction);
#pragma unroll
    for (int step = 0; step < D / 32; ++step) sm90::wgmma_s8_n8(s, q.a[step], tile + 2 * step, step > 0);
}
template <int D>
TA_DEVICE void multiply_v(const uint32_t (&p)[4][4], const uint8_t* v, int32_t (&o)[D / 2]) {
    const uint64_t tile = sm90::tile_descriptor<kBlockTokens>(v);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        if constexpr (D == 128) {
            sm90::wgmma_u8_n128(o, p[step], tile + 2 * step, true);
        } else {
            sm90::wgmma_u8_n64(o, p[step], tile + 2 * step, true);
        }
    }
}

// One warpgroup's share of the tiles [first, last). kFractions: there may be channel pages.
template <int D, bool kFractions>
TA_DEVICE void consume(const AttendArgs& args, const PrefillTile* first, const PrefillTile* last, SharedMemory<D>& shared,
                       int group, int warp, int lane) {
    const int i = lane & 3;
    ScoreOptions options;
    options.softcap = args.softcap * 1.44269504f;
    options.softcap_inverse = args.softcap > 0.0f ? 1.0f / args.softcap : 0.0f;
    options.sas = args.exp == ExpMode::kSas;
    const bool has_options = args.softcap > 0.0f || options.sas || args.alibi_slope;
    const uint32_t negative = D == 128 ? shared.negative[i] : shared.negative[i / 2] >> (16 * (i & 1));
    Ring<kStages> stage;
    for (const PrefillTile* next = first; next < last; ++next) {
        const PrefillTile& tile = *next;  // read again where it is needed: registers are short in between
        const int row_in_tile = 64 * group + 16 * warp + lane / 4;
        RowInfo* info = shared.rows + row_in_tile;
        Queries<D> q;
        Rows rows;
        start_rows<D>(args, tile, tile.first_row + row_in_tile, i, q, rows, negative, info);
        int32_t o[D / 2];
#pragma unroll
        for (int n = 0; n < D / 2; ++n) o[n] = 0;
        if (tile.page_begin < tile.page_end) {
            // Keys that every row of the warp sees.
            const int all_begin = __reduce_max_sync(~0u, max(info[0].key_begin, info[8].key_begin));
            const int all_end = __reduce_min_sync(~0u, min(info[0].key_end, info[8].key_end));
            int32_t s[64], s_fraction[4];
            Pending pending;
            float m[2];
            uint32_t p[4][4];

            // The block before the first has P = 0: the loop has no first iteration of its own, whose copy of the softmax would
            // not fit into the instruction cache.
#pragma unroll
            for (int n = 0; n < 16; ++n) pending.y[0][n] = pending.y[1][n] = twice(-32768);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                pending.offset[n] = 0;
                pending.inverse[n] = pending.l[n] = 0.0f;
            }
            const int blocks = (tile.page_end - tile.page_begin + 1) / 2;
            int key = tile.page_begin * kPageTokens, before = stage.slot;
            // NOTES: the products of an iteration are waited for within it. With one in flight over the back edge the compiler
            // serialises all of them.
            for (int block = 0; block < blocks; ++block) {
                const BlockScales& scales = shared.scales[stage.slot];
                sm90::barrier_wait(&shared.full[stage.slot], stage.phase);
                sm90::wgmma_fence();
                multiply_k<D>(q, shared.k[stage.slot], s);
                if (kFractions) multiply_fractions<D>(q, shared.k_fraction[stage.slot], s_fraction);
                sm90::wgmma_commit();
                // The exponentials wait for a number that came with this block, or the compiler moves them ahead of the product
                // that they should hide behind.
                const uint32_t zero = scales.zero;
                pending.offset[0] += zero;
                pending.offset[1] += zero;
                make_p(pending, rows, p);
                sm90::wgmma_fence();
                multiply_v<D>(p, shared.v[before], o);
                sm90::wgmma_commit();
                const Fast fast = make_fast(info, scales);
                const bool plain = fast.fits && scales.uniform[0] && scales.uniform[1] && !has_options && key >= all_begin;
                sm90::wgmma_wait<1>();
                sm90::pin_registers(s);
                float fraction[2][2] = {};
                if (kFractions) {
                    sm90::pin_registers(s_fraction);
#pragma unroll
                    for (int n = 0; n < 4; ++n) fraction[n / 2][n % 2] = float(__shfl_sync(~0u, s_fraction[n], lane & ~3));
                }
                const bool masked = key + kBlockTokens > all_end;
                if (!plain ||
                    !fast_scores<kFractions>(s, fast, info, scales, masked, key + 2 * i, fraction, rows, pending, m)) {
                    const bool cut = masked || key < all_begin;
                    if (has_options) {
                        general_scores<kFractions, true>(s, info, scales, options, cut, key + 2 * i, i, fraction, rows, pending,
                                                         m);
                    } else {
                        general_scores<kFractions, false>(s, info, scales, options, cut, key + 2 * i, i, fraction, rows,
                                                          pending, m);
                    }
                }
                sm90::wgmma_wait<0>();
                sm90::pin_registers(o);
                if (lane == 0 && block > 0) sm90::barrier_arrive(&shared.empty[before]);
                if (block % 128 == 127) {  // |O| <= 128 * the row's sum of P: an octave less of P before it could overflow
                    const float v_largest = fmaxf(scales.v_largest[0], scales.v_largest[1]);
#pragma unroll
                    for (int row = 0; row < 2; ++row) {
                        if (quad_sum(rows.l[row]) * v_largest < 0x1p23f) continue;
                        m[row] += 1.0f;
                        pending.offset[row] = __vsub2(pending.offset[row], twice(kGrid));
                        pending.l[row] *= 0.5f;
                    }
                }
                raise_maximum(rows, m, o);
                before = stage.slot;
                stage.next();
                key += kBlockTokens;
            }
            make_p(pending, rows, p);
            sm90::wgmma_fence();
            multiply_v<D>(p, shared.v[before], o);
            sm90::wgmma_commit();
            if (next + 1 < last && i == 0) {
                prefetch_query<D>(args, next[1], next[1].first_row + row_in_tile);
                prefetch_query<D>(args, next[1], next[1].first_row + row_in_tile + 8);
            }
            sm90::wgmma_wait<0>();
            sm90::pin_registers(o);
            if (lane == 0) sm90::barrier_arrive(&shared.empty[before]);
        }
        finish_rows<D>(args, tile, tile.first_row + row_in_tile, i, info, rows, o);
        __syncwarp();  // before the next tile writes `info`
    }
}

template <int D, bool kFractions>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ AttendArgs args, const uint8_t* schedule) {
    extern __shared__ __align__(1024) uint8_t memory[];
    SharedMemory<D>& shared = *reinterpret_cast<SharedMemory<D>*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int n = 0; n < kRawPages; ++n) {
            sm90::barrier_init(&shared.raw_full[n], 1);
            sm90::barrier_init(&shared.raw_empty[n], 2);
        }
        for (int n = 0; n < kStages; ++n) {
            sm90::barrier_init(&shared.full[n], kProducerWarps);
            sm90::barrier_init(&shared.empty[n], 4 * kConsumerGroups);
        }
        sm90::fence_barrier_init();
    }
    if (threadIdx.x < 8) shared.spread[threadIdx.x] = spread_fraction(threadIdx.x);
    if (threadIdx.x < D) {
        const uint32_t word = __ballot_sync(~0u, args.signs && args.signs[threadIdx.x] < 0.0f);
        if (lane == 0) shared.negative[warp] = word;
    }
    __syncthreads();
    const int32_t* begin = reinterpret_cast<const int32_t*>(schedule);
    const PrefillTile* tiles = reinterpret_cast<const PrefillTile*>(schedule + prefill_tiles_offset(gridDim.x));
    const PrefillTile *first = tiles + begin[blockIdx.x], *last = tiles + begin[blockIdx.x + 1];
    // The CTA starts with 168 registers a thread, 504 for a thread of each warpgroup: 56 + 2 x 224.
    if (warp < kProducerWarps) {
        sm90::shrink_registers<56>();
        produce<D>(args, first, last, shared, warp, lane);
    } else {
        sm90::grow_registers<224>();
        consume<D, kFractions>(args, first, last, shared, warp / 4 - 1, warp % 4, lane);
    }
}

}  // namespace ta::cuda::prefill
