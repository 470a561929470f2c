// A CTA takes a kv head of a page. A thread takes 16 bytes of codes, which become as many 16-byte chunks of INT8 codes as a byte
// holds codes: both arrays have the order of kernels/format/layout.h.
#include <cuda_runtime_api.h>

#include "kernels/cuda/any/expand/expand.h"
#include "kernels/cuda/common/prefill/expand.cuh"
#include "kernels/format/fractions.h"
#include "kernels/format/turning.h"

namespace ta::cuda {
namespace {

using namespace prefill;

constexpr int kThreads = 128;
constexpr uint32_t kSigns = 0x80808080, kOnes = 0x01010101;

TA_DEVICE uint4 load_chunk(const uint8_t* from) {
    return *reinterpret_cast<const uint4*>(from);
}
TA_DEVICE void copy_bytes(const uint8_t* from, uint8_t* to, int bytes) {
    for (int n = int(threadIdx.x); n < bytes / 16; n += kThreads)
        reinterpret_cast<uint4*>(to)[n] = reinterpret_cast<const uint4*>(from)[n];
}
template <int kBits>
TA_DEVICE uint32_t steps_of(uint32_t bytes) {
    return bytes & (kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f);
}
template <int kBits>
TA_DEVICE uint32_t eighths_of(uint32_t bytes) {
    return bytes >> 5 & (kBits == 4 ? 0x07070707 : 0x04040404);
}

// round_k() of a token's channels `channel` ... + 3.
TA_DEVICE uint32_t round_k(uint32_t values, uint32_t eighths, int token, int channel) {
    constexpr uint32_t kOfChannels = 0x01060300;
    static_assert(spread_rank(0, 1) == 3 && spread_rank(0, 2) == 6 && spread_rank(0, 3) == 1 && spread_rank(0, 8) == 0);
    const uint32_t ranks = (uint32_t(spread_rank(token, channel)) * kOnes + kOfChannels) & 0x07070707;
    const uint32_t half = (eighths + 0x04040404) >> 3 & kOnes, more = (eighths + 0x03030303) >> 3 & kOnes;
    return __vaddss4(values, (4 * (half + more) + 0x07070707 - ranks) >> 3 & kOnes);
}

template <int D, int kBits>
TA_DEVICE void expand_k(const uint8_t* page, const ChannelLayout& from, uint8_t* to) {
    constexpr int kSteps = D / 32, kPerByte = 8 / kBits, kChunks = kPageTokens * D * kBits / 8 / 16;
    const uint32_t magic = in_register(kBits == 4 ? 0x54005400 : 0x44004400);
    for (int n = int(threadIdx.x); n < kChunks; n += kThreads) {
        const int lane = n % 32, step = n / 32 % kSteps, group = n / 32 / kSteps;
        const uint4 codes = load_chunk(page + from.k_codes() + n * 16);
        const int channel = D / 4 * (lane & 3) + 8 * step;
        const uint2 steps = *reinterpret_cast<const uint2*>(page + from.k_step() + channel);
        const uint2 zeros = *reinterpret_cast<const uint2*>(page + from.k_zero() + channel);
        KChannels channels[2];
        channels[0].set<kBits>(steps_of<kBits>(steps.x), zeros.x);
        channels[1].set<kBits>(steps_of<kBits>(steps.y), zeros.y);
        const uint32_t eighths[2] = {eighths_of<kBits>(steps.x), eighths_of<kBits>(steps.y)};
        uint8_t* const at = to + (group * kPerByte * kSteps + step) * 512 + lane * 16;
#pragma unroll
        for (int t = 0; t < kPerByte; ++t) {
            const auto expand = [&](uint32_t word, int w) {
                const int token = 16 * (group * kPerByte + t) + lane / 4 + 8 * (w & 1);
                return round_k(expand_four<kBits>(channels[w >> 1], word, t, magic), eighths[w >> 1], token,
                               channel + 4 * (w >> 1));
            };
            *reinterpret_cast<uint4*>(at + t * kSteps * 512) =
                make_uint4(expand(codes.x, 0), expand(codes.y, 1), expand(codes.z, 2), expand(codes.w, 3));
        }
    }
}

// Four tokens of a channel, 8 apart, which have the same rank.
struct VChannel {
    uint32_t step, zero, eighths;
    template <int kBits>
    TA_DEVICE static VChannel of(const uint8_t* step, const uint8_t* zero) {
        return {uint32_t(step_of(*step, kBits)), *zero * kOnes ^ kSigns, uint32_t(fraction_eighths_of(*step, kBits))};
    }
    TA_DEVICE uint32_t expand(uint32_t codes, int rank) const {
        return __vaddus4(codes * step + zero, uint32_t(rank) < eighths ? kOnes : 0) ^ kSigns;
    }
};

template <int D, int kBits>
TA_DEVICE void expand_v(const uint8_t* page, const ChannelLayout& from, uint8_t* to) {
    constexpr int kPerByte = 8 / kBits, kStored = v_stored_channels(D, kBits);
    constexpr uint32_t kMask = kBits == 4 ? 0x0f0f0f0f : 0x03030303;
    constexpr int kWords = kPageTokens * D / 4;
    const uint8_t *codes = page + from.v_codes(), *steps = page + from.v_step(), *zeros = page + from.v_zero();
    if constexpr (kStored != D) {  // other channels are neighbours there
        for (int n = int(threadIdx.x); n < kWords; n += kThreads) {
            const int w = n % 4, lane = n / 4 % 32, step = n / 128 % 2, tile = n / 256;
            const int channel = D / 8 * (lane / 4) + 2 * tile + (w & 1), token = 32 * (w >> 1) + 2 * (lane & 3) + step;
            const CodePlace at = v_place(D, kBits, token, channel);
            const uint32_t word = *reinterpret_cast<const uint32_t*>(codes + at.byte) >> at.shift & kMask;
            reinterpret_cast<uint32_t*>(to)[n] =
                VChannel::of<kBits>(steps + channel, zeros + channel).expand(word, spread_rank(token, channel));
        }
        return;
    }
    for (int n = int(threadIdx.x); n < kWords * kBits / 8 / 4; n += kThreads) {
        const int lane = n % 32, step = n / 32 % 2, group = n / 64, token = 2 * (lane & 3) + step;
        const uint4 chunk = load_chunk(codes + n * 16);
        uint8_t* const at = to + (group * kPerByte * 2 + step) * 512 + lane * 16;
#pragma unroll
        for (int t = 0; t < kPerByte; ++t) {
            const int channel = D / 8 * (lane >> 2) + 2 * (group * kPerByte + t);
            const VChannel of[2] = {VChannel::of<kBits>(steps + channel, zeros + channel),
                                    VChannel::of<kBits>(steps + channel + 1, zeros + channel + 1)};
            const auto expand = [&](uint32_t word, int w) {
                return of[w].expand(word >> (t * kBits) & kMask, spread_rank(token, channel + w));
            };
            *reinterpret_cast<uint4*>(at + t * 1024) =
                make_uint4(expand(chunk.x, 0), expand(chunk.y, 1), expand(chunk.z, 0), expand(chunk.w, 1));
        }
    }
}

template <int D>
TA_DEVICE void write_k_scales(const uint8_t* page, const ChannelLayout& from, bool turning, float* to) {
    TurningPairs pairs;
    if (turning) pairs = turning_of_channel(page, from);
    const float scale = *reinterpret_cast<const float*>(page + from.k_scale());
    for (int t = int(threadIdx.x); t < kPageTokens; t += kThreads)
        to[t] = turning ? scale_with_turning(scale, pairs, t) : scale;
}
TA_DEVICE void write_v_scales(const uint8_t* page, const ChannelLayout& from, float* to) {
    const float scale = *reinterpret_cast<const float*>(page + from.v_scale());
    for (int t = int(threadIdx.x); t < kPageTokens; t += kThreads)
        to[t] = ldexpf(scale, -int(page[from.v_exponents() + t / 2] >> (t % 2 * 4) & 15));
}

template <int D>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(const __grid_constant__ AttendArgs args, const __grid_constant__ ExpandArgs expand) {
    const int n = int(blockIdx.x) / args.kv_heads, head = int(blockIdx.x) % args.kv_heads;
    const uint64_t entry = args.table[expand.entries[n]];
    constexpr TokenLayout kTo(D);
    uint8_t* const slot = expand.to + size_t(n) * expanded_page_bytes(D, args.kv_heads);
    const bool is_channel = entry & kEntryChannel;
    if (head == 0 && threadIdx.x == 0)
        expand.table[expand.entries[n]] = is_channel ? reinterpret_cast<uint64_t>(slot) | kEntrySingleLayer : entry;
    if (!is_channel) return;
    const PagePlace place = find_page<D>(args, head, args.heads + head, entry);
    const auto* const page = reinterpret_cast<const uint8_t*>(place.address);
    uint8_t* const to = slot + head * kTo.bytes();
    const int k_bits = k_bits_of(place.piece & 0xffff), v_bits = v_bits_of(place.piece & 0xffff);
    const ChannelLayout from(D, k_bits, v_bits);
    if (k_bits == 8) {
        copy_bytes(page + from.k_codes(), to + kTo.k_codes(), kPageTokens * D);
        copy_bytes(page + from.k_parameters(), to + kTo.k_scale(), kPageTokens * sizeof(float));
    } else {
        k_bits == 4 ? expand_k<D, 4>(page, from, to + kTo.k_codes()) : expand_k<D, 2>(page, from, to + kTo.k_codes());
        write_k_scales<D>(page, from, args.k_turning, reinterpret_cast<float*>(to + kTo.k_scale()));
    }
    if (v_bits == 8) {
        copy_bytes(page + from.v_codes(), to + kTo.v_codes(), kPageTokens * D);
        copy_bytes(page + from.v_parameters(), to + kTo.v_scale(), kPageTokens * sizeof(float));
    } else {
        v_bits == 4 ? expand_v<D, 4>(page, from, to + kTo.v_codes()) : expand_v<D, 2>(page, from, to + kTo.v_codes());
        write_v_scales(page, from, reinterpret_cast<float*>(to + kTo.v_scale()));
    }
}

const void* kernel_for(int head_dim) {
    switch (head_dim) {
        case 64:
            return reinterpret_cast<const void*>(&expand_kernel<64>);
        case 96:
            return reinterpret_cast<const void*>(&expand_kernel<96>);
        case 128:
            return reinterpret_cast<const void*>(&expand_kernel<128>);
        case 256:
            return reinterpret_cast<const void*>(&expand_kernel<256>);
        default:
            return nullptr;
    }
}

}  // namespace

int launch_expand(const AttendArgs& args, const ExpandArgs& expand, CUstream_st* stream) {
    const void* const kernel = kernel_for(args.head_dim);
    if (!kernel) return cudaErrorInvalidValue;
    AttendArgs attend = args;
    ExpandArgs copy = expand;
    void* parameters[] = {&attend, &copy};
    return cudaLaunchKernel(kernel, dim3(unsigned(expand.pages) * unsigned(args.kv_heads)), dim3(kThreads), parameters, 0,
                            stream);
}

}  // namespace ta::cuda
