// DistrAttention for every GPU since Ampere. A CTA of four warps takes a block of 128 query rows of one query head, a warp 32 of them.
// Per 64 keys: all warps sum K's channels over the block's groups, then each computes
//   S = Q' K'^T (F16) -> P (F16) -> O += P V (fp32)
// with S, P and O in registers, and K, its sums and V in shared memory. The next keys are copied meanwhile.
#pragma once

#include "kernels/cuda/any/distr/softmax.cuh"

namespace ta::cuda::distr::sm80 {

inline constexpr int kWarps = 4, kThreads = 32 * kWarps;
inline constexpr int kTiles = kDistrRows / (16 * kWarps);  // of 16 rows, of a warp
inline constexpr int kOutRows = 16;                        // of a warp, brought into order at once
inline constexpr int kCtas = 2;                            // of an SM

template <int D, int G>
struct SharedMemory {
    static constexpr int kStored = distr_stored_groups(D, G), kSteps = kStored / 16, kOutStride = D + 4;
    union {
        struct {
            alignas(128) uint8_t k[D * 128];  // a row for each channel
            alignas(128) uint8_t fused[kStored * 128];
            alignas(128) uint8_t v[2][D * 128];
            uint4 q[kDistrRows / 16][kSteps][32];  // operands of lanes
        };
        float out[kWarps][kOutRows][kOutStride];
    };
};

template <int D, int G, bool kOptions>
struct Consumer {
    using Memory = SharedMemory<D, G>;

    const AttendArgs& a;
    const Block& block;
    Memory& memory;
    const int warp, lane, r, i;
    float o[kTiles][D / 8][4];
    float m[kTiles][2], l[kTiles][2], scale[kTiles][2];
    float top_score[kTiles][2];  // SAS alone: the row's largest score
    int key_begin, key_end;      // keys that every row of the warp sees
    int first_key, stop_key;     // that some row does
    float slope;

    TA_DEVICE Consumer(const DistrArgs& args, const Block& block, Memory& memory, int warp, int lane)
        : a(args.attend), block(block), memory(memory), warp(warp), lane(lane), r(lane / 4), i(lane % 4), o{}, l{} {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                m[t][h] = top_score[t][h] = kLowest;
                scale[t][h] = block.scale_of(args, row(t, h));
            }
        }
        // The warp's rows that exist.
        const int first = 16 * kTiles * warp, last = min(first + 16 * kTiles, block.rows) - 1;
        const KeyRange of_first = block.keys_of(a, first), of_last = block.keys_of(a, last);
        key_begin = of_last.begin, key_end = of_first.end;
        first_key = of_first.begin, stop_key = first <= last ? of_last.end : 0;
        slope = kOptions && a.alibi_slope ? a.alibi_slope[block.q_head] * kLog2e : 0.0f;
    }

    TA_DEVICE int row(int t, int h) const {
        return 16 * (kTiles * warp + t) + r + 8 * h;
    }

    TA_DEVICE void multiply_keys(float (&s)[kTiles][8][4]) const {
        const int matrix = lane / 8, in_step = 8 * (matrix & 1) + lane % 8;
        const uint32_t from = smem_address(memory.fused) + uint32_t(in_step * 128);
#pragma unroll
        for (int step = 0; step < Memory::kSteps; ++step) {
            uint32_t q[kTiles][4];
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const uint4 w = memory.q[kTiles * warp + t][step][lane];
                q[t][0] = w.x, q[t][1] = w.y, q[t][2] = w.z, q[t][3] = w.w;
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                uint32_t k[4];
                load_matrices_transposed(k, from + step * 16 * 128 + 16 * ((2 * n + matrix / 2) ^ (lane & 7)));
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    mma_f16(s[t][2 * n], q[t], k[0], k[1]);
                    mma_f16(s[t][2 * n + 1], q[t], k[2], k[3]);
                }
            }
        }
    }

    // Scores in log2 units.
    TA_DEVICE void scale_scores(float (&s)[8][4], int t, float k_unit, int key) const {
        const float unit[2] = {scale[t][0] * k_unit, scale[t][1] * k_unit};
        const bool cut = key < key_begin || key + kDistrHalfKeys > key_end;
        KeyRange keys[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) keys[h] = block.keys_of(a, row(t, h));
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float x = __fmul_rn(s[n][e], unit[e / 2]);
                const int at = key + 8 * n + 2 * i + e % 2;
                if (kOptions) {
                    if (a.softcap > 0.0f) x = soft_capped(x, a.softcap);
                    x = fmaf(slope, float(at - (block.position + row(t, e / 2))), x);
                }
                s[n][e] = cut && (at < keys[e / 2].begin || at >= keys[e / 2].end) ? -kInfinity : x;
            }
        }
    }

    // Scores to P and the sums; the factor of what O has so far.
    TA_DEVICE void weigh(float (&s)[8][4], int t, float v_log2, float (&factor)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = -kInfinity;
#pragma unroll
            for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float above = raised(m[t][h], top, v_log2), added = v_log2 - above;
            factor[h] = ex2(m[t][h] - above);
            m[t][h] = above;
            float sum = 0.0f;
            if (kOptions && a.exp == ExpMode::kSas) {
                const float highest = fmaxf(top_score[t][h], top), unit = ex2(fminf(highest + added, 30.0f));
                top_score[t][h] = highest;
#pragma unroll
                for (int n = 0; n < 8; ++n) {
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; ++e) {
                        s[n][e] = fminf(exp2_neg_sas(highest - s[n][e]) * unit, 0x1p15f);
                        sum += s[n][e];
                    }
                }
            } else if (__any_sync(~0u, fabsf(top) > kFineScores)) {
#pragma unroll
                for (int n = 0; n < 8; ++n) {
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; ++e) sum += s[n][e] = ex2(fminf(s[n][e] + added, kLargestP));
                }
            } else {
#pragma unroll
                for (int n = 0; n < 8; ++n) {
#pragma unroll
                    for (int e = 2 * h; e < 2 * h + 2; ++e) sum += s[n][e] = ex2(s[n][e] + added);
                }
            }
            l[t][h] = fmaf(l[t][h], factor[h], sum * ex2(-v_log2));
        }
    }

    TA_DEVICE void multiply_values(const uint8_t* v, const uint32_t (&p)[kTiles][4][4]) {
        constexpr int kChannels = distr_v_channels(D), kRowBytes = 2 * kChannels;
        const int matrix = lane / 8, in_step = 8 * (matrix & 1) + lane % 8;
        const uint32_t from = smem_address(v) + uint32_t(in_step * kRowBytes);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int n = 0; n < D / 16; ++n) {
                const int piece = 16 * n / kChannels, chunk = 2 * n % (kChannels / 8) + matrix / 2;
                uint32_t w[4];
                load_matrices_transposed(
                    w, from + (piece * kDistrHalfKeys + 16 * step) * kRowBytes + 16 * distr_v_chunk(D, in_step, chunk));
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    mma_f16(o[t][2 * n], p[t][step], w[0], w[1]);
                    mma_f16(o[t][2 * n + 1], p[t][step], w[2], w[3]);
                }
            }
        }
    }

    // 64 keys from `key` on.
    TA_DEVICE void take(const uint8_t* v, int key, float k_unit, float v_log2) {
        if (key >= stop_key || key + kDistrHalfKeys <= first_key) return;
        float s[kTiles][8][4] = {};
        multiply_keys(s);
        uint32_t p[kTiles][4][4];
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            scale_scores(s[t], t, k_unit, key);
            float factor[2];
            weigh(s[t], t, v_log2, factor);
#pragma unroll
            for (int step = 0; step < 4; ++step) {
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const float* const two = &s[t][2 * step + n / 2][2 * (n % 2)];
                    p[t][step][n] = bits_of(__floats2half2_rn(two[0], two[1]));
                }
            }
            if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[t][n][e] *= factor[e / 2];
                }
            }
        }
        multiply_values(v, p);
    }

    // All warps have left the loop.
    TA_DEVICE void finish() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float sum = l[t][h];
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                const RowEnd end = end_row(a, m[t][h], sum, block.q_head);
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    *reinterpret_cast<float2*>(&memory.out[warp][r + 8 * h][8 * n + 2 * i]) =
                        make_float2(o[t][n][2 * h] * end.factor, o[t][n][2 * h + 1] * end.factor);
                }
                if (a.lse && i == 0 && row(t, h) < block.rows) {
                    a.lse[int64_t(block.sequence_row + row(t, h)) * (a.kv_heads * a.group) + block.q_head] = end.lse;
                }
            }
            __syncwarp();
            for (int n = 0; n < kOutRows; ++n) {
                const int at = 16 * (kTiles * warp + t) + n;
                if (at >= block.rows) break;
                uint8_t* const to = output_row(a, int64_t(block.sequence_row) + at, block.q_head);
                for (int w = lane; w < D / 4; w += 32) {
                    store_word(to, a.out.dtype, w, *reinterpret_cast<const float4*>(&memory.out[warp][n][4 * w]));
                }
            }
            __syncwarp();
        }
    }
};

template <int D, int G, bool kOptions>
__global__ void __launch_bounds__(kThreads, kCtas) distr_kernel(const __grid_constant__ DistrArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];
    using Memory = SharedMemory<D, G>;
    Memory& memory = *reinterpret_cast<Memory*>(shared);
    const AttendArgs& a = args.attend;
    const Block block(args);
    const int thread = int(threadIdx.x), warp = thread / 32, lane = thread % 32;

    const Fusion<D, G> fuse(args.order + block.item * D, thread);
    {
        const auto* q = reinterpret_cast<const uint32_t*>(args.q_rows) + block.item * (kDistrRows * Memory::kStored / 2);
        for (int n = thread; n < int(sizeof memory.q / sizeof(uint4)); n += kThreads) {
            const int of = n % 32, step = n / 32 % Memory::kSteps, row = n / 32 / Memory::kSteps * 16 + of / 4;
            const uint32_t* const w = q + (row * Memory::kStored + 16 * step) / 2 + of % 4;
            constexpr int kBelow = 8 * Memory::kStored / 2;
            memory.q[row / 16][step][of] = make_uint4(w[0], w[kBelow], w[4], w[kBelow + 4]);
        }
    }
    // Halves of tiles.
    const int begin = block.key_begin / kDistrHalfKeys, end = (block.key_end + kDistrHalfKeys - 1) / kDistrHalfKeys;
    const auto copy = [&](int half) {
        const int64_t at = block.tile(a, half / 2) * distr_tile_bytes(D) + half % 2 * (D * 128);
        uint8_t* const v = memory.v[half % 2];
#pragma unroll
        for (int n = 0; n < D * 128 / 16 / kThreads; ++n) {
            const int byte = 16 * (thread + n * kThreads);
            cp_async_16(smem_address(memory.k + byte), args.k_tiles + at + byte);
            cp_async_16(smem_address(v + byte), args.v_tiles + at + byte);
        }
        cp_async_commit();
    };
    if (begin < end) copy(begin);
    Consumer<D, G, kOptions> consumer(args, block, memory, warp, lane);
    for (int half = begin; half < end; ++half) {
        const int64_t tile = block.tile(a, half / 2);
        const float k_unit = __ldg(args.k_unit + tile), v_log2 = __ldg(args.v_log2 + tile);
        cp_async_wait<0>();
        __syncthreads();
        fuse(memory.k, memory.fused, thread);
        __syncthreads();
        if (half + 1 < end) copy(half + 1);
        consumer.take(memory.v[half % 2], half * kDistrHalfKeys, k_unit, v_log2);
    }
    __syncthreads();
    consumer.finish();
}

}  // namespace ta::cuda::distr::sm80
