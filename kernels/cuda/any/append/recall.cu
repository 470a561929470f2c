// Universal scales of a sequence from its blocks: CpuStep::recall_scales of src/attend/cpu/step.cpp.
#include <cuda_runtime_api.h>

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/common/turning.cuh"
#include "kernels/format/codec.h"

namespace ta::cuda {
namespace {

constexpr int kThreads = 128;

// Scales are not negative: their bits are in order.
__device__ void raise(uint32_t& most, float scale) {
    atomicMax(&most, __float_as_uint(scale));
}

// settle_page of src/attend/cpu/stage1.h, by all threads. `turning`: scales have bytes of turning pairs.
__device__ void settle(int d, uint8_t* codes, float* scales, bool is_v, int have, float largest, bool turning) {
    if (turning && largest == 0.0f && turning_of_scales(reinterpret_cast<const uint8_t*>(scales), 0) != 0)
        largest = stage1_scale(kMinAmax, kStage1Levels);
    const auto settled = [&](int t) {
        return turning ? __uint_as_float((__float_as_uint(largest) & ~255u) | (__float_as_uint(scales[t]) & 255u)) : largest;
    };
    for (int n = int(threadIdx.x); n < have * d; n += kThreads) {
        const int t = n / d, c = n % d;
        const float scale = settled(t);
        if (scales[t] <= scale) continue;
        const CodePlace at = is_v ? v_place(d, 8, t, c) : k_place(d, 8, t, c);
        codes[at.byte] = uint8_t(recoded(int8_t(codes[at.byte]), scales[t], scale));
    }
    __syncthreads();
    const int t = int(threadIdx.x);
    if (t < have && scales[t] > settled(t)) scales[t] = settled(t);
}

// One CTA: one head of one layer of a sequence.
__global__ void __launch_bounds__(kThreads) recall_kernel(const __grid_constant__ RecallArgs a) {
    const RecallArgs::Sequence s = a.of[blockIdx.y];
    const int piece_number = int(blockIdx.x), layer = piece_number / a.kv_heads, head = piece_number % a.kv_heads;
    const int lane = int(threadIdx.x) % 32;
    const uint64_t* entries = a.table + s.first_entry;
    __shared__ uint32_t most[2];
    if (threadIdx.x < 2) most[threadIdx.x] = 0;
    __syncthreads();
    float k = 0.0f, v = 0.0f;
    // [64] of K, then of V, or one each.
    const auto take = [&](uint64_t at, int each, int n) {
        const auto* own = reinterpret_cast<const float*>(at);
        for (int t = lane; t < n; t += 32) {
            k = fmaxf(k, own[t]);
            v = fmaxf(v, own[each + t]);
        }
    };
    const auto take_tokens = [&](uint64_t entry, int n) {
        take((entry & ~kEntryFlags) + a.token_own_scales + uint64_t(piece_number) * 2 * kPageTokens * sizeof(float),
             kPageTokens, n);
    };
    for (int b = int(threadIdx.x) / 32; b < s.blocks; b += kThreads / 32) {
        const uint64_t entry = entries[b];
        if (entry & kEntryDropped) continue;
        if (entry & kEntryChannel) {
            const bool low = entry & kEntryLow;
            const HeadArgs h = (low ? a.low_heads : a.channel_heads)[piece_number];
            const uint64_t in_slot = (low ? a.low_layer_offset : a.channel_layer_offset)[layer] + h.channel_offset;
            take((entry & ~kEntryFlags) + in_slot + ChannelLayout(a.head_dim, h.k_bits, h.v_bits).own_scales(), 1, 1);
        } else {
            take_tokens(entry, kPageTokens);
        }
    }
    if (threadIdx.x < 32 && s.have > 0) take_tokens(entries[s.blocks], s.have);
    raise(most[0], k);
    raise(most[1], v);
    __syncthreads();
    k = __uint_as_float(most[0]);
    v = __uint_as_float(most[1]);
    if (s.have > 0) {
        const TokenLayout layout(a.head_dim);
        auto* slot = reinterpret_cast<uint8_t*>(entries[s.blocks] & ~kEntryFlags);
        uint8_t* piece = slot + layer * a.token_page_bytes + head * layout.bytes();
        settle(a.head_dim, piece + layout.k_codes(), reinterpret_cast<float*>(piece + layout.k_scale()), false, s.have, k,
               a.k_turning);
        settle(a.head_dim, piece + layout.v_codes(), reinterpret_cast<float*>(piece + layout.v_scale()), true, s.have, v,
               false);
    }
    if (threadIdx.x > 0) return;
    float* out = a.largest_scales + 2 * (2 * int64_t(s.index) * a.layers * a.kv_heads + piece_number);
    out[0] = k;
    out[1] = v;
}

}  // namespace

int launch_recall(const RecallArgs& args, CUstream_st* stream) {
    if (args.sequences == 0) return cudaSuccess;
    RecallArgs copy = args;
    void* parameters[] = {&copy};
    return cudaLaunchKernel(reinterpret_cast<const void*>(&recall_kernel),
                            dim3(unsigned(args.layers * args.kv_heads), unsigned(args.sequences)), dim3(kThreads), parameters,
                            0, stream);
}

}  // namespace ta::cuda
