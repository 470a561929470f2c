// Reopening a closed block: decode_channel_piece and store_token_piece of kernels/cpu/page_codec_impl.h.
#include <cuda_runtime_api.h>

#include "kernels/cuda/any/append/append.h"
#include "kernels/format/codec.h"
#include "kernels/format/turning.h"

namespace ta::cuda {
namespace {

// One value, of a channel with these parameters: the zero point rounded, halves up, and the result cut off at what had been encoded.
__device__ __forceinline__ int8_t decode(const uint8_t* codes, CodePlace at, const uint8_t* parameters, int c, int d,
                                         int bits) {
    if (bits == 8) return int8_t(codes[at.byte]);
    const uint8_t step = parameters[c];
    const int zero8 = 8 * int8_t(parameters[d + c]) + fraction_eighths_of(step, bits);
    const int v = (codes[at.byte] >> at.shift & ((1 << bits) - 1)) * step_of(step, bits) + ((zero8 + 4) >> 3);
    return int8_t(v > kStage1Levels ? kStage1Levels : v < -kStage1Levels ? -kStage1Levels : v);
}

// One CTA: one head of one layer.
__global__ void __launch_bounds__(256) reopen_kernel(const __grid_constant__ ReopenArgs a) {
    const int layer = int(blockIdx.x) / a.kv_heads, head = int(blockIdx.x) % a.kv_heads, d = a.head_dim;
    const HeadArgs h = a.heads[blockIdx.x];
    const ChannelLayout from(d, h.k_bits, h.v_bits);
    const TokenLayout to(d);
    const auto* piece = reinterpret_cast<const uint8_t*>(a.channel_slot + a.channel_layer_offset[layer] + h.channel_offset);
    auto* out = reinterpret_cast<uint8_t*>(a.token_slot + a.token_layer_offset[layer] + head * to.bytes());
    __shared__ int peak[2][kPageTokens];
    if (threadIdx.x < kPageTokens) peak[0][threadIdx.x] = peak[1][threadIdx.x] = 0;
    __syncthreads();
    const uint8_t *k_parameters = piece + from.k_parameters(), *v_parameters = piece + from.v_parameters();
    for (int n = threadIdx.x; n < a.tokens * d; n += blockDim.x) {
        const int t = n / d, c = n % d;
        const int8_t k_value = decode(piece + from.k_codes(), k_place(d, h.k_bits, t, c), k_parameters, c, d, h.k_bits);
        const int8_t v_value = decode(piece + from.v_codes(), v_place(d, h.v_bits, t, c), v_parameters, c, d, h.v_bits);
        out[to.k_codes() + k_place(d, 8, t, c).byte] = uint8_t(k_value);
        out[to.v_codes() + v_place(d, 8, t, c).byte] = uint8_t(v_value);
        if (!a.token_own_scales) continue;
        atomicMax(&peak[0][t], abs(int(k_value)));
        atomicMax(&peak[1][t], abs(int(v_value)));
    }
    __syncthreads();
    const TurningPairs turning = a.k_turning ? turning_of_channel(piece, from) : TurningPairs{};
    for (int t = a.tokens + threadIdx.x; t < kPageTokens && a.k_turning; t += blockDim.x) {
        reinterpret_cast<uint32_t*>(out + to.k_scale())[t] = turning.byte(t);
    }
    for (int t = threadIdx.x; t < a.tokens; t += blockDim.x) {
        const auto scale = [](const uint8_t* at) { return *reinterpret_cast<const float*>(at); };
        float k_scale, v_scale;
        if (h.k_bits == 8) {
            k_scale = scale(k_parameters + sizeof(float) * t);
        } else {
            k_scale = scale(piece + from.k_scale());
            if (turning.any()) k_scale = scale_with_turning(k_scale, turning, t);
        }
        if (h.v_bits == 8) {
            v_scale = scale(v_parameters + sizeof(float) * t);
        } else {
            v_scale = reopened_scale(scale(piece + from.v_scale()), piece[from.v_exponents() + t / 2] >> t % 2 * 4 & 15);
        }
        reinterpret_cast<float*>(out + to.k_scale())[t] = k_scale;
        reinterpret_cast<float*>(out + to.v_scale())[t] = v_scale;
        if (!a.token_own_scales) continue;
        auto* own = reinterpret_cast<float*>(a.token_slot + a.token_own_scales) + int64_t(blockIdx.x) * 2 * kPageTokens;
        own[t] = reopened_own_scale(peak[0][t], k_scale);
        own[kPageTokens + t] = reopened_own_scale(peak[1][t], v_scale);
    }
}

}  // namespace

int launch_reopen(const ReopenArgs& args, CUstream_st* stream) {
    if (args.tokens == 0) return cudaSuccess;
    ReopenArgs copy = args;
    void* parameters[] = {&copy};
    return cudaLaunchKernel(reinterpret_cast<const void*>(&reopen_kernel), dim3(unsigned(args.layers * args.kv_heads)),
                            dim3(256), parameters, 0, stream);
}

}  // namespace ta::cuda
