// DistrAttention on Hopper. A CTA takes a block of 128 query rows of one query head. One of its warpgroups brings 128 keys at a time
// into shared memory by bulk copies and sums K's channels over the block's groups there; two others, of 64 rows each, compute
//   S = Q' K'^T (F16) -> P (F16) -> O += P V (fp32)
// by wgmma, with Q', S, P and O in registers. While a block of keys' P V runs, the next one's scores become P.
#pragma once

#include "kernels/cuda/any/distr/softmax.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace ta::cuda::distr::sm90 {

using namespace ptx;

inline constexpr int kConsumers = 2, kThreads = 128 * (kConsumers + 1);
inline constexpr int kStages = 2, kValueStages = 3;
inline constexpr int kConsumerRegisters = 216, kProducerRegisters = 72;
inline constexpr int kChains = 2;           // of maxima and sums of a row, so that instructions need not wait for each other
inline constexpr int kProducerBarrier = 1;  // named; of the producers
static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= 65536 / 128);

template <int D, int G>
struct SharedMemory {
    static constexpr int kStored = distr_stored_groups(D, G), kSteps = kStored / 16;
    static constexpr int kHalfBytes = D * 128, kFusedHalf = kStored * 128;
    static constexpr int kOutRows = 8, kOutStride = D + 4;  // of a warp, brought into order at once

    alignas(1024) uint8_t v[kValueStages][2 * kHalfBytes];
    alignas(1024) uint8_t fused[kStages][2 * kFusedHalf];
    union {
        alignas(128) uint8_t k[kStages][2 * kHalfBytes];
        float out[4 * kConsumers][kOutRows][kOutStride];  // when K has been read
    };
    uint64_t k_full[kStages], fused_full[kStages], fused_empty[kStages], v_full[kValueStages], v_empty[kValueStages];
};

template <int N>
struct Ring {
    int slot = 0;
    uint32_t phase = 0;
    TA_DEVICE void next() {
        if (++slot == N) slot = 0, phase ^= 1;
    }
};

template <int D, int G>
TA_DEVICE void produce(const DistrArgs& args, const Block& block, SharedMemory<D, G>& shared, int begin, int end, int thread) {
    using Memory = SharedMemory<D, G>;
    const Fusion<D, G> fuse(args.order + block.item * D, thread);
    const auto copy_keys = [&](int tile, int slot) {
        barrier_arrive_expecting(&shared.k_full[slot], 2 * Memory::kHalfBytes);
        bulk_copy(shared.k[slot], args.k_tiles + block.tile(args.attend, tile) * distr_tile_bytes(D), 2 * Memory::kHalfBytes,
                  &shared.k_full[slot]);
    };
    if (thread == 0) {
        for (int n = 0; n < kStages && begin + n < end; ++n) copy_keys(begin + n, n);
    }
    Ring<kStages> at;
    Ring<kValueStages> values;
    for (int tile = begin; tile < end; ++tile, at.next(), values.next()) {
        barrier_wait(&shared.k_full[at.slot], at.phase);
        barrier_wait(&shared.fused_empty[at.slot], at.phase ^ 1);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            fuse(shared.k[at.slot] + half * Memory::kHalfBytes, shared.fused[at.slot] + half * Memory::kFusedHalf, thread);
        fence_async_proxy();
        barrier_arrive(&shared.fused_full[at.slot]);
        named_barrier(kProducerBarrier, 128);  // all have read K
        if (thread != 0) continue;
        if (tile + kStages < end) copy_keys(tile + kStages, at.slot);
        // After the sums: V is needed later, and its place may be taken for longer.
        barrier_wait(&shared.v_empty[values.slot], values.phase ^ 1);
        barrier_arrive_expecting(&shared.v_full[values.slot], 2 * Memory::kHalfBytes);
        bulk_copy(shared.v[values.slot], args.v_tiles + block.tile(args.attend, tile) * distr_tile_bytes(D),
                  2 * Memory::kHalfBytes, &shared.v_full[values.slot]);
    }
}

// 64 rows of the block, 16 of them a warp's; a lane has rows g and g + 8 of these.
template <int D, int G>
struct Consumer {
    using Memory = SharedMemory<D, G>;

    const AttendArgs& a;
    const Block& block;
    Memory& shared;
    const int lane, first_row;  // of the lane, in the block
    uint32_t q[Memory::kSteps][4];
    float o[D / 2] = {};
    float m[2] = {kLowest, kLowest}, l[2] = {}, scale[2];
    int key_begin, key_end;  // keys that every row of the warp sees

    TA_DEVICE Consumer(const DistrArgs& args, const Block& block, Memory& shared, int warp, int lane)
        : a(args.attend), block(block), shared(shared), lane(lane), first_row(16 * warp + lane / 4) {
        const auto* of_block = reinterpret_cast<const uint32_t*>(args.q_rows) + block.item * (kDistrRows * Memory::kStored / 2);
        const uint32_t* const w = of_block + first_row * (Memory::kStored / 2) + lane % 4;
        constexpr int kBelow = 8 * Memory::kStored / 2;
#pragma unroll
        for (int step = 0; step < Memory::kSteps; ++step) {
            q[step][0] = w[8 * step], q[step][1] = w[8 * step + kBelow];
            q[step][2] = w[8 * step + 4], q[step][3] = w[8 * step + kBelow + 4];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = block.scale_of(args, first_row + 8 * h);
        key_begin = block.keys_of(a, 16 * warp + 15).begin, key_end = block.keys_of(a, 16 * warp).end;
    }

    TA_DEVICE void multiply_keys(int slot, float (&s)[64]) const {
        const uint64_t b = columns_descriptor(shared.fused[slot], Memory::kFusedHalf);
#pragma unroll
        for (int step = 0; step < Memory::kSteps; ++step) wgmma_f16_n128(s, q[step], b + 128 * step, step > 0);
        wgmma_commit();
    }
    TA_DEVICE void multiply_values(int slot, const uint32_t (&p)[8][4]) {
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            const uint64_t b = columns_descriptor(shared.v[slot] + step / 4 * Memory::kHalfBytes, 64 * 128) + 128 * (step % 4);
            if constexpr (D == 128) {
                wgmma_f16_n128(o, p[step], b, true);
            } else {
                wgmma_f16_n64(o, p[step], b, true);
            }
        }
        wgmma_commit();
    }

    // Scores to P; what O has to be multiplied by.
    TA_DEVICE void weigh(float (&s)[64], int key, float k_unit, float v_log2, float (&factor)[2]) {
        if (key < key_begin || key + kDistrKeyTile > key_end) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const KeyRange keys = block.keys_of(a, first_row + 8 * h);
                const int begin = keys.begin - key - 2 * (lane % 4), end = keys.end - key - 2 * (lane % 4);
#pragma unroll
                for (int n = 0; n < 32; ++n) {
                    const int column = n / 2 * 8 + n % 2;
                    float& x = s[n / 2 * 4 + 2 * h + n % 2];
                    if (column < begin || column >= end) x = -kInfinity;
                }
            }
        }
        float top[2][kChains];
#pragma unroll
        for (int n = 0; n < 2 * kChains; ++n) top[n / kChains][n % kChains] = -kInfinity;
#pragma unroll
        for (int n = 0; n < 64; ++n) {
            float& most = top[n / 2 % 2][(n / 4 * 2 + n % 2) % kChains];
            most = fmaxf(most, s[n]);
        }
        float unit[2], added[2];
        bool large = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float most = top[h][0];
#pragma unroll
            for (int n = 1; n < kChains; ++n) most = fmaxf(most, top[h][n]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            unit[h] = fmaxf(scale[h] * k_unit, 1e-36f);  // not 0, which times infinity is no number
            most = __fmul_rn(most, unit[h]);
            large |= fabsf(most) > kFineScores && most > -kInfinity;
            const float above = raised(m[h], most, v_log2);
            added[h] = v_log2 - above;
            factor[h] = ex2(m[h] - above);
            m[h] = above;
        }
        float sum[2][kChains] = {};
        if (__any_sync(~0u, large)) {
#pragma unroll
            for (int n = 0; n < 64; ++n) {
                const int h = n / 2 % 2;
                s[n] = ex2(fminf(__fmul_rn(s[n], unit[h]) + added[h], kLargestP));
                sum[h][(n / 4 * 2 + n % 2) % kChains] += s[n];
            }
        } else {
#pragma unroll
            for (int n = 0; n < 64; ++n) {
                const int h = n / 2 % 2;
                s[n] = ex2(fmaf(s[n], unit[h], added[h]));
                sum[h][(n / 4 * 2 + n % 2) % kChains] += s[n];
            }
        }
        const float inverse = ex2(-v_log2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int n = 1; n < kChains; ++n) sum[h][0] += sum[h][n];
            l[h] = fmaf(l[h], factor[h], sum[h][0] * inverse);
        }
    }
    TA_DEVICE static void pack(const float (&s)[64], uint32_t (&p)[8][4]) {
#pragma unroll
        for (int n = 0; n < 32; ++n) p[n / 4][n % 4] = bits_of(__floats2half2_rn(s[2 * n], s[2 * n + 1]));
    }
    TA_DEVICE void multiply_output(const float (&factor)[2]) {
        if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int n = 0; n < D / 2; ++n) o[n] *= factor[n / 2 % 2];
    }
    TA_DEVICE void leave(uint64_t* barrier) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    }

    TA_DEVICE void take_keys(const DistrArgs& args, int begin, int end) {
        int64_t tile = block.tile(a, begin);
        float k_unit = __ldg(args.k_unit + tile), v_log2 = __ldg(args.v_log2 + tile);
        uint32_t p[8][4];
        float s[64], factor[2];
        Ring<kStages> keys;
        Ring<kValueStages> values;
        barrier_wait(&shared.fused_full[0], 0);
        wgmma_fence();
        multiply_keys(0, s);
        wgmma_wait<0>();
        pin_registers(s);
        leave(&shared.fused_empty[0]);
        keys.next();
        weigh(s, begin * kDistrKeyTile, k_unit, v_log2, factor);
        pack(s, p);
        for (int n = begin + 1; n < end; ++n) {
            tile += a.kv_heads;
            k_unit = __ldg(args.k_unit + tile), v_log2 = __ldg(args.v_log2 + tile);
            barrier_wait(&shared.fused_full[keys.slot], keys.phase);
            wgmma_fence();
            multiply_keys(keys.slot, s);
            barrier_wait(&shared.v_full[values.slot], values.phase);
            multiply_values(values.slot, p);
            wgmma_wait<1>();
            pin_registers(s);
            leave(&shared.fused_empty[keys.slot]);
            weigh(s, n * kDistrKeyTile, k_unit, v_log2, factor);
            wgmma_wait<0>();
            pin_registers(o);
            leave(&shared.v_empty[values.slot]);
            multiply_output(factor);
            pack(s, p);
            keys.next(), values.next();
        }
        barrier_wait(&shared.v_full[values.slot], values.phase);
        wgmma_fence();
        multiply_values(values.slot, p);
        wgmma_wait<0>();
        pin_registers(o);
    }

    TA_DEVICE void finish(float (&out)[Memory::kOutRows][Memory::kOutStride]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float sum = l[h];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const RowEnd end = end_row(a, m[h], sum, block.q_head);
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                *reinterpret_cast<float2*>(&out[lane / 4][8 * n + 2 * (lane % 4)]) =
                    make_float2(o[4 * n + 2 * h] * end.factor, o[4 * n + 2 * h + 1] * end.factor);
            }
            if (a.lse && lane % 4 == 0 && first_row + 8 * h < block.rows) {
                a.lse[int64_t(block.sequence_row + first_row + 8 * h) * (a.kv_heads * a.group) + block.q_head] = end.lse;
            }
            __syncwarp();
            for (int n = 0; n < Memory::kOutRows; ++n) {
                const int row = first_row - lane / 4 + 8 * h + n;
                if (row >= block.rows) break;
                uint8_t* const to = output_row(a, int64_t(block.sequence_row) + row, block.q_head);
                for (int w = lane; w < D / 4; w += 32)
                    store_word(to, a.out.dtype, w, *reinterpret_cast<const float4*>(&out[n][4 * w]));
            }
            __syncwarp();
        }
    }
};

template <int D, int G>
__global__ void __launch_bounds__(kThreads, 1) distr_kernel(const __grid_constant__ DistrArgs args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    SharedMemory<D, G>& shared = *reinterpret_cast<SharedMemory<D, G>*>(memory);
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = int(threadIdx.x) % 32;
    if (threadIdx.x == 0) {
        for (int n = 0; n < kStages; ++n) {
            barrier_init(&shared.k_full[n], 1);
            barrier_init(&shared.fused_full[n], 128);
            barrier_init(&shared.fused_empty[n], 4 * kConsumers);
        }
        for (int n = 0; n < kValueStages; ++n) {
            barrier_init(&shared.v_full[n], 1);
            barrier_init(&shared.v_empty[n], 4 * kConsumers);
        }
        fence_barrier_init();
    }
    __syncthreads();
    const Block block(args);
    const int begin = block.key_begin / kDistrKeyTile, end = (block.key_end + kDistrKeyTile - 1) / kDistrKeyTile;
    if (warp >= 4 * kConsumers) {
        shrink_registers<kProducerRegisters>();
        if (begin < end) produce<D, G>(args, block, shared, begin, end, int(threadIdx.x) - 128 * kConsumers);
    } else {
        grow_registers<kConsumerRegisters>();
        Consumer<D, G> consumer(args, block, shared, warp, lane);
        if (begin < end) consumer.take_keys(args, begin, end);
        consumer.finish(shared.out[warp]);
    }
}

}  // namespace ta::cuda::distr::sm90
