// Pages on their way into shared memory. Codes of 8 bits need nothing done. Codes of fewer bits are expanded by the thread that
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
    constexpr TokenLayout kToken(D);
    constexpr int kWords = kPageTokens * D / 4, kScaleChunks = kPageTokens * int(sizeof(float)) / 16;
    const uint32_t bits = page.piece & 0xffff;
    if (!kChannels || bits == 0) {
        copy_swapped<2 * kWords>(slot.k, page.address, thread);
        copy_chunks(reinterpret_cast<uint8_t*>(slot.k_scale), page.address + kToken.k_scale(), kScaleChunks, thread);
        copy_chunks(reinterpret_cast<uint8_t*>(slot.v_log2), page.address + kToken.v_scale(), kScaleChunks, thread);
        return;
    }
    const ChannelLayout layout(D, k_bits_of(bits), v_bits_of(bits));
    if (layout.k_bits == 8) {
        copy_swapped<kWords>(slot.k, page.address, thread);
    } else {
        copy_chunks(raw, page.address, int(layout.v_codes() / 16), thread);
    }
    if (layout.v_bits == 8) {
        copy_swapped<kWords>(slot.v, page.address + layout.v_codes(), thread);
    } else {
        copy_chunks(raw + kPageTokens * D / 2, page.address + layout.v_codes(),
                    int((layout.k_parameters() - layout.v_codes()) / 16), thread);
    }
    const auto copy_parameters = [&](auto& to, size_t from, size_t end) {
        copy_chunks(reinterpret_cast<uint8_t*>(&to), page.address + from, int((end - from) / 16), thread);
    };
    copy_parameters(slot.k_scale, layout.k_parameters(), layout.v_parameters());
    copy_parameters(slot.v_log2, layout.v_parameters(), layout.v_exponents());
    copy_parameters(slot.tail, layout.v_exponents(), layout.v_exponents() + sizeof slot.tail);
}

template <int D, int kBits>
TA_DEVICE void expand_k(const uint8_t* raw, PageSlot<D>& slot, int thread) {
    constexpr int kSteps = D / 32, kPerByte = 8 / kBits, kChunks = kPageTokens * D / kPerByte / 16;
    constexpr uint32_t kStepMask = kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f;
    const uint32_t magic = in_register(kBits == 4 ? 0x54005400 : 0x44004400);
    for (int c = thread; c < kChunks; c += kThreads) {
        const int load = c / 32, group = load / kSteps, step = load % kSteps, lane = c % 32;
        const int channel = D / 4 * (lane & 3) + 8 * step;
        const uint2 steps = *reinterpret_cast<const uint2*>(slot.k_channels.step + channel),
                    zeros = *reinterpret_cast<const uint2*>(slot.k_channels.zero + channel);
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
                s[h] = slot.v_channels.step[channel + 2 * n + h] & kStepMask;
                z[h] = (slot.v_channels.zero[channel + 2 * n + h] ^ 0x80u) * 0x01010101u;
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

// A thread's places in the buffer of arriving codes do not depend on the bits, since it copies a later page to where it has
// read this one.
template <int D>
TA_DEVICE void expand_page(uint32_t bits, const uint8_t* raw, PageSlot<D>& slot, int thread) {
    const uint8_t* const v = raw + kPageTokens * D / 2;
    if (k_bits_of(bits) == 4) {
        expand_k<D, 4>(raw, slot, thread);
    } else if (k_bits_of(bits) == 2) {
        expand_k<D, 2>(raw, slot, thread);
    }
    if (v_bits_of(bits) == 4) {
        expand_v<D, 4>(v, slot, thread);
    } else if (v_bits_of(bits) == 2) {
        expand_v<D, 2>(v, slot, thread);
    }
}

TA_DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Replacements of a V scale of 0. They are small, so that they do not take P's levels from other tokens, above all from the
// token with the smallest scale. But they are within reach of other scales for 2^x, so that the keys count in l.
inline constexpr float kNoScale = 0x1p-60f, kNoTokenLog2 = -30.0f, kReachLog2 = -90.0f;

// The part of PageInfo for K or for V.
struct HalfInfo {
    uint32_t flags;
    float scale;
};

// For K of 8 bits, of which tokens [0, valid) exist. Replacements for the scales of other tokens must be numbers.
template <int D>
TA_DEVICE HalfInfo describe_k_bytes(PageSlot<D>& slot, int valid, bool turning, int lane) {
    float k[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) k[n] = slot.k_scale[lane + 32 * n];
    const float first = __shfl_sync(~0u, k[0], 0);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        if (lane + 32 * n < valid) continue;
        // Their lowest bytes may be those of turning pairs.
        const uint32_t low = __float_as_uint(turning ? k[n] : first) & 0xffu;
        slot.k_scale[lane + 32 * n] = k[n] = __uint_as_float((__float_as_uint(first) & ~0xffu) | low);
    }
    uint32_t flags = PageInfo::kKBytes;
    if (turning && __any_sync(~0u, lane < 8 && (__float_as_uint(k[0]) & 0xff) != 0)) flags |= PageInfo::kTurning;
    if (__all_sync(~0u, k[0] == first && k[1] == first)) return {flags, first};
    return {flags | PageInfo::kKTokens, __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(k[0], k[1]))))};
}
template <int D>
TA_DEVICE HalfInfo describe_v_bytes(PageSlot<D>& slot, int valid, int lane) {
    float v[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) v[n] = slot.v_log2[lane + 32 * n];
    const float first = __shfl_sync(~0u, v[0], 0);
#pragma unroll
    for (int n = 0; n < 2; ++n) v[n] = lane + 32 * n < valid ? v[n] : first;
    if (__all_sync(~0u, v[0] == first && v[1] == first)) return {PageInfo::kVBytes, first};
    const float largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(v[0], v[1]))));
    const auto or_largest = [&](float x) { return __float_as_uint(x > 0.0f ? x : largest); };
    const float least = __uint_as_float(__reduce_min_sync(~0u, min(or_largest(v[0]), or_largest(v[1]))));
    const float top = log2_fast(largest), none = fmaxf(log2_fast(least) - top + kNoTokenLog2, kReachLog2);
#pragma unroll
    for (int n = 0; n < 2; ++n) slot.v_log2[lane + 32 * n] = v[n] > 0.0f ? fmaxf(log2_fast(v[n]) - top, kReachLog2) : none;
    return {PageInfo::kVBytes | PageInfo::kVTokens, largest};
}

// Do step bytes have fractions of zero points?
template <int D>
TA_DEVICE bool have_fractions(const uint8_t (&step)[D], int bits, int lane) {
    const uint32_t mask = bits == 4 ? 0xe0e0e0e0 : 0x80808080;
    uint32_t any = 0;
    for (int n = lane; n < D / 4; n += 32) any |= reinterpret_cast<const uint32_t*>(step)[n] & mask;
    return __any_sync(~0u, any != 0);
}
// For K of 4 and 2 bits.
template <int D>
TA_DEVICE HalfInfo describe_k_codes(const PageSlot<D>& slot, int bits, bool turning, int lane) {
    uint32_t flags = bits == 2 ? PageInfo::kK2 : 0;
    if (have_fractions(slot.k_channels.step, bits, lane)) flags |= PageInfo::kKFraction;
    if (turning && __any_sync(~0u, lane == 0 && *reinterpret_cast<const uint64_t*>(slot.tail.turning) != 0))
        flags |= PageInfo::kTurning;
    return {flags, slot.tail.k_scale};
}
template <int D>
TA_DEVICE HalfInfo describe_v_codes(const PageSlot<D>& slot, int bits, int lane) {
    uint32_t flags = bits == 2 ? PageInfo::kV2 : 0;
    if (have_fractions(slot.v_channels.step, bits, lane)) flags |= PageInfo::kVFraction;
    const uint32_t two = slot.tail.v_exponents[lane];
    if (slot.tail.v_scale > 0.0f && __any_sync(~0u, two != 0)) flags |= PageInfo::kVTokens;
    return {flags, slot.tail.v_scale};
}

// One warp does this for a page, of which tokens [0, valid) exist.
template <int D, bool kChannels>
TA_DEVICE void describe_page(PageSlot<D>& slot, uint32_t bits, int valid, bool turning, int lane) {
    const int k_bits = kChannels && bits ? k_bits_of(bits) : 8, v_bits = kChannels && bits ? v_bits_of(bits) : 8;
    const HalfInfo k =
        k_bits == 8 ? describe_k_bytes(slot, valid, turning, lane) : describe_k_codes(slot, k_bits, turning, lane);
    const HalfInfo v = v_bits == 8 ? describe_v_bytes(slot, valid, lane) : describe_v_codes(slot, v_bits, lane);
    if (lane == 0) slot.info = {k.flags | v.flags, k.scale, log2_fast(v.scale > 0.0f ? v.scale : kNoScale), 0};
}

// log2 of the scales of V's tokens 8 j + 2 i and the next, less PageInfo's.
template <bool kChannels, int D>
TA_DEVICE float2 v_log2_of(const PageSlot<D>& slot, uint32_t flags, int j, int i) {
    if (!kChannels || (flags & PageInfo::kVBytes)) return *reinterpret_cast<const float2*>(slot.v_log2 + 8 * j + 2 * i);
    const uint32_t two = slot.tail.v_exponents[4 * j + i];
    return {8388608.0f - __uint_as_float(0x4B000000u | (two & 15)), 8388608.0f - __uint_as_float(0x4B000000u | two >> 4)};
}

}  // namespace ta::cuda::prefill::sm80
