// Pages on their way into shared memory. Codes of 8 bits need nothing done. Those of fewer bits are expanded by the thread that
// copied them, which needs no barrier for that.
#pragma once

#include "kernels/cuda/common/prefill/expand.cuh"
#include "kernels/cuda/sm80/prefill/shared.cuh"

namespace ta::cuda::prefill::sm80 {

TA_DEVICE uint4 load_chunk(const uint8_t* from) {
    return *reinterpret_cast<const uint4*>(from);
}
TA_DEVICE void copy_chunks(uint8_t* to, uint64_t from, int chunks, int thread) {
    const uint32_t place = smem_address(to);
#pragma unroll 4
    for (int c = thread; c < chunks; c += kThreads) cp_async_16(place + 16 * c, reinterpret_cast<const void*>(from + 16 * c));
}

// Word by word, words 1 and 2 of each 16 bytes in each other's place. A multiple of kThreads words.
template <int kWords>
TA_DEVICE void copy_swapped(uint8_t* to, uint64_t from, int thread) {
    const uint32_t place = smem_address(to) + 4 * uint32_t((thread & ~3) | (thread & 1) << 1 | (thread >> 1 & 1));
    const uint64_t word = from + 4 * uint32_t(thread);
#pragma unroll
    for (int n = 0; n < kWords; n += kThreads) cp_async_4(place + 4 * n, reinterpret_cast<const void*>(word + 4 * n));
}

// Starts the copies of a page.
template <int D, bool kChannels>
TA_DEVICE void copy_page(const PagePlace& page, PageSlot<D>& slot, uint8_t* raw, int thread) {
    const uint32_t bits = page.piece & 0xffff;
    if (!kChannels || bits == 0) {
        constexpr TokenLayout kLayout(D);
        copy_swapped<kLayout.k_scale() / 4>(slot.k, page.address, thread);
        copy_chunks(slot.behind, page.address + kLayout.k_scale(), int((kLayout.bytes() - kLayout.k_scale()) / 16), thread);
        return;
    }
    const ChannelLayout layout(D, k_bits_of(bits), v_bits_of(bits));
    const int k_chunks = int(layout.v_codes() / 16), v_chunks = int((layout.k_step() - layout.v_codes()) / 16);
    copy_chunks(raw, page.address, k_chunks, thread);
    copy_chunks(raw + kPageTokens * D / 2, page.address + layout.v_codes(), v_chunks, thread);
    copy_chunks(slot.behind, page.address + layout.k_step(), PageSlot<D>::kChannelBytes / 16, thread);
}

template <int D, int kBits>
TA_DEVICE void expand_k(const uint8_t* raw, PageSlot<D>& slot, int thread) {
    constexpr int kSteps = D / 32, kPerByte = 8 / kBits, kChunks = kPageTokens * D / kPerByte / 16;
    constexpr uint32_t kStepMask = kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f;
    const uint32_t magic = in_register(kBits == 4 ? 0x54005400 : 0x44004400);
    for (int c = thread; c < kChunks; c += kThreads) {
        const int load = c / 32, group = load / kSteps, step = load % kSteps, lane = c % 32;
        const int channel = D / 4 * (lane & 3) + 8 * step;
        const uint2 steps = *reinterpret_cast<const uint2*>(slot.channel.k_step + channel),
                    zeros = *reinterpret_cast<const uint2*>(slot.channel.k_zero + channel);
        const uint4 codes = load_chunk(raw + 16 * c);
        KChannels low, high;
        low.set<kBits>(steps.x & kStepMask, zeros.x), high.set<kBits>(steps.y & kStepMask, zeros.y);
#pragma unroll
        for (int n = 0; n < kPerByte; ++n) {
            *reinterpret_cast<uint4*>(slot.k + (((group * kPerByte + n) * kSteps + step) * 32 + lane) * 16) =
                make_uint4(expand_four<kBits>(low, codes.x, n, magic), expand_four<kBits>(high, codes.z, n, magic),
                           expand_four<kBits>(low, codes.y, n, magic), expand_four<kBits>(high, codes.w, n, magic));
        }
    }
}

template <int D, int kBits>
TA_DEVICE void expand_v(const uint8_t* raw, PageSlot<D>& slot, int thread) {
    constexpr int kPerByte = 8 / kBits, kChunks = kPageTokens * D / kPerByte / 16;
    constexpr uint32_t kMask = kBits == 4 ? 0x0f0f0f0f : 0x03030303, kStepMask = kBits == 4 ? 0x1f : 0x7f;
    for (int c = thread; c < kChunks; c += kThreads) {
        const int load = c / 32, group = load / 2, step = load % 2, lane = c % 32;
        const int channel = D / 8 * (lane >> 2) + 2 * kPerByte * group;
        const uint4 codes = load_chunk(raw + 16 * c);
#pragma unroll
        for (int n = 0; n < kPerByte; ++n) {
            uint32_t s[2], z[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                s[h] = slot.channel.v_step[channel + 2 * n + h] & kStepMask;
                z[h] = (slot.channel.v_zero[channel + 2 * n + h] ^ 0x80u) * 0x01010101u;
            }
            // A byte's sum is its value plus 128: nothing is carried.
            const auto expand = [&](uint32_t four, int h) {
                return ((four >> (kBits * n) & kMask) * s[h] + z[h]) ^ 0x80808080u;
            };
            *reinterpret_cast<uint4*>(slot.v + (((group * kPerByte + n) * 2 + step) * 32 + lane) * 16) =
                make_uint4(expand(codes.x, 0), expand(codes.z, 0), expand(codes.y, 1), expand(codes.w, 1));
        }
    }
}

// A thread's places for codes as they come are the same whatever the bits: it copies a later page to where it has read this one.
template <int D>
TA_DEVICE void expand_page(uint32_t bits, const uint8_t* raw, PageSlot<D>& slot, int thread) {
    const uint8_t* const v = raw + kPageTokens * D / 2;
    if (k_bits_of(bits) == 4) {
        expand_k<D, 4>(raw, slot, thread);
    } else {
        expand_k<D, 2>(raw, slot, thread);
    }
    if (v_bits_of(bits) == 4) {
        expand_v<D, 4>(v, slot, thread);
    } else {
        expand_v<D, 2>(v, slot, thread);
    }
}

TA_DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// What stands for a V scale of 0: small, so that it does not take P's levels from other tokens, the one of the smallest scale
// above all, but within reach of other scales for 2^x, by which its keys count in l.
inline constexpr float kNoScale = 0x1p-60f, kNoTokenLog2 = -30.0f, kReachLog2 = -90.0f;

// One warp does this for a token page, of which tokens [0, valid) exist. What stands for the scales of others must be numbers.
template <int D>
TA_DEVICE void describe_token_page(PageSlot<D>& slot, int valid, bool turning, int lane) {
    float k[2], v[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) k[n] = slot.token.k_scale[lane + 32 * n], v[n] = slot.token.v_log2[lane + 32 * n];
    const float k_first = __shfl_sync(~0u, k[0], 0), v_first = __shfl_sync(~0u, v[0], 0);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        if (lane + 32 * n >= valid) {
            // Their lowest bytes may be those of turning pairs.
            const uint32_t low = __float_as_uint(k[n]) & 0xffu;
            k[n] = __uint_as_float((__float_as_uint(k_first) & ~0xffu) | (turning ? low : __float_as_uint(k_first) & 0xffu));
            v[n] = v_first;
            slot.token.k_scale[lane + 32 * n] = k[n];
        }
    }
    uint32_t flags = 0;
    if (!__all_sync(~0u, k[0] == k_first && k[1] == k_first)) flags |= PageInfo::kKTokens;
    if (turning && __any_sync(~0u, lane < 8 && (__float_as_uint(k[0]) & 0xff) != 0)) flags |= PageInfo::kTurning;
    float k_largest = k_first;
    if (flags & PageInfo::kKTokens) k_largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(k[0], k[1]))));
    float v_largest = v_first;
    if (!__all_sync(~0u, v[0] == v_first && v[1] == v_first)) {
        flags |= PageInfo::kVTokens;
        v_largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(v[0], v[1]))));
        const auto or_largest = [&](float x) { return __float_as_uint(x > 0.0f ? x : v_largest); };
        const float least = __uint_as_float(__reduce_min_sync(~0u, min(or_largest(v[0]), or_largest(v[1]))));
        const float top = log2_fast(v_largest), none = fmaxf(log2_fast(least) - top + kNoTokenLog2, kReachLog2);
#pragma unroll
        for (int n = 0; n < 2; ++n)
            slot.token.v_log2[lane + 32 * n] = v[n] > 0.0f ? fmaxf(log2_fast(v[n]) - top, kReachLog2) : none;
    }
    if (lane == 0) slot.info = {flags, k_largest, log2_fast(v_largest > 0.0f ? v_largest : kNoScale), 0};
}
template <int D>
TA_DEVICE void describe_channel_page(PageSlot<D>& slot, uint32_t bits, bool turning, int lane) {
    const auto& c = slot.channel;
    uint32_t flags = PageInfo::kChannel;
    if (k_bits_of(bits) == 2) flags |= PageInfo::kK2;
    if (v_bits_of(bits) == 2) flags |= PageInfo::kV2;
    const uint32_t k_mask = k_bits_of(bits) == 4 ? 0xe0e0e0e0 : 0x80808080,
                   v_mask = v_bits_of(bits) == 4 ? 0xe0e0e0e0 : 0x80808080;
    uint32_t k = 0, v = 0;
    for (int n = lane; n < D / 4; n += 32) {
        k |= reinterpret_cast<const uint32_t*>(c.k_step)[n] & k_mask;
        v |= reinterpret_cast<const uint32_t*>(c.v_step)[n] & v_mask;
    }
    if (__any_sync(~0u, k != 0)) flags |= PageInfo::kKFraction;
    if (__any_sync(~0u, v != 0)) flags |= PageInfo::kVFraction;
    const uint32_t two = c.v_exponents[lane];
    if (c.v_scale > 0.0f && __any_sync(~0u, two != 0)) flags |= PageInfo::kVTokens;
    if (turning && __any_sync(~0u, lane == 0 && *reinterpret_cast<const uint64_t*>(c.turning) != 0))
        flags |= PageInfo::kTurning;
    if (lane == 0) slot.info = {flags, c.k_scale, log2_fast(c.v_scale > 0.0f ? c.v_scale : kNoScale), 0};
}

// log2 of the scales of V's tokens 8 j + 2 i and the next, less PageInfo's.
template <bool kChannels, int D>
TA_DEVICE float2 v_log2_of(const PageSlot<D>& slot, uint32_t flags, int j, int i) {
    if (!kChannels || !(flags & PageInfo::kChannel)) return *reinterpret_cast<const float2*>(slot.token.v_log2 + 8 * j + 2 * i);
    const uint32_t two = slot.channel.v_exponents[4 * j + i];
    return {8388608.0f - __uint_as_float(0x4B000000u | (two & 15)), 8388608.0f - __uint_as_float(0x4B000000u | two >> 4)};
}

}  // namespace ta::cuda::prefill::sm80
