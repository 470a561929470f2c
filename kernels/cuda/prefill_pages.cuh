// The producers of the prefill kernel: pages come by bulk copy as they are stored and are expanded to INT8 tiles in the order that
// wgmma wants. Both code arrays have the same shape, 16-byte chunks of four words that belong to two rows; a word goes to its
// row as it is (token pages) or unpacked, times step, plus zero point (channel pages).
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/prefill_shared.cuh"

namespace ta::cuda::prefill {

// A lane's place in a tile of rows of kRowBytes: word i of chunk `chunk` of row 8 n + r, with r = lane / 4, i = lane % 4.
template <int kRowBytes>
TA_DEVICE uint8_t* lane_place(uint8_t* tile, int chunk, int r, int i) {
    return tile + r * kRowBytes + sm90::swizzled_chunk<kRowBytes>(r, chunk) * 16 + i * 4;
}
TA_DEVICE void store_word(uint8_t* to, uint32_t w) {
    *reinterpret_cast<uint32_t*>(to) = w;
}
TA_DEVICE void load_words(const uint8_t* from, uint32_t (&w)[4]) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
}

// Two warps expand a page, `part` is which. `half` is the page's place in its block.

// Token page: codes are INT8 already. Word 2 w1 + w0 of a chunk goes to row r + 8 w0 and chunk w1 (K), 2 w1 (V) further.
template <int D>
TA_DEVICE void expand_token_page(const uint8_t* raw, int half, uint8_t* k, uint8_t* v, uint8_t* k_fraction, int part,
                                 int lane) {
    constexpr TokenLayout kLayout(D);
    constexpr int kSteps = D / 32;
    const int r = lane >> 2, i = lane & 3;
    const uint8_t *k_from = raw + kLayout.k_codes() + lane * 16, *v_from = raw + kLayout.v_codes() + lane * 16;
    uint32_t w[4][4];
#pragma unroll
    for (int n = 0; n < kSteps / 2; ++n) {
        const int step = part * (kSteps / 2) + n;
        uint8_t* to[2] = {lane_place<D>(k, 2 * step, r, i), lane_place<D>(k, 2 * step + 1, r, i)};
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) load_words(k_from + (tile * kSteps + step) * 512, w[tile]);
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
            for (int x = 0; x < 4; ++x) store_word(to[x >> 1] + (half * kPageTokens + tile * 16 + 8 * (x & 1)) * D, w[tile][x]);
        }
    }
    uint8_t* to[2] = {lane_place<kBlockTokens>(v, 4 * half + part, r, i),
                      lane_place<kBlockTokens>(v, 4 * half + part + 2, r, i)};
#pragma unroll
    for (int first = 0; first < D / 16; first += 4) {
#pragma unroll
        for (int n = 0; n < 4; ++n) load_words(v_from + (2 * (first + n) + part) * 512, w[n]);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
#pragma unroll
            for (int x = 0; x < 4; ++x) store_word(to[x >> 1] + ((first + n) * 16 + 8 * (x & 1)) * kBlockTokens, w[n][x]);
        }
    }
    if (part == 0 && r < D / 16) store_word(k_fraction + half * D + sm90::swizzled_chunk<D>(half, r) * 16 + i * 4, 0);
}

TA_DEVICE half2 as_half2(uint32_t x) {
    return *reinterpret_cast<half2*>(&x);
}
TA_DEVICE uint32_t as_bits(half2 x) {
    return *reinterpret_cast<uint32_t*>(&x);
}
TA_DEVICE half2 both(float x) {
    return __float2half2_rn(x);
}

// Four unsigned bytes as halves: bytes 0 and 2, bytes 1 and 3.
TA_DEVICE void halves_of_bytes(uint32_t x, half2& even, half2& odd) {
    even = __hsub2(as_half2(__byte_perm(x, 0x64646464, 0x4240)), both(1024.0f));
    odd = __hsub2(as_half2(__byte_perm(x, 0x64646464, 0x4341)), both(1024.0f));
}

// code * step + zero of four channels, exact: in fp16 on the integers around 1536, whose low bytes are the results.
struct KChannels {
    half2 step[2], zero[2];  // bytes 0 and 2, bytes 1 and 3

    template <int kBits>
    TA_DEVICE void set(uint32_t steps, uint32_t zeros) {
        constexpr float kBase = kBits == 4 ? 16.0f : 4.0f;  // unpack() adds it to a code
        halves_of_bytes(steps, step[0], step[1]);
        half2 z[2];  // zero + 128
        halves_of_bytes(zeros ^ 0x80808080, z[0], z[1]);
#pragma unroll
        for (int n = 0; n < 2; ++n) zero[n] = __hfma2(step[n], both(-kBase), __hadd2(z[n], both(1536.0f - 128.0f)));
    }
    // `tile` is which of the codes in a byte.
    template <int kBits>
    TA_DEVICE uint32_t expand(uint32_t codes, int tile) const {
        constexpr uint32_t kMask = kBits == 4 ? 0x03C003C0 : 0x03000300, kMagic = kBits == 4 ? 0x4C004C00 : 0x44004400;
        constexpr int kAt = kBits == 4 ? 6 : 8;
        const uint32_t even = (codes << (kAt - kBits * tile) & kMask) | kMagic;
        const uint32_t odd = (codes >> (8 - kAt + kBits * tile) & kMask) | kMagic;
        const half2 a = __hfma2(as_half2(even), step[0], zero[0]), b = __hfma2(as_half2(odd), step[1], zero[1]);
        return __byte_perm(as_bits(a), as_bits(b), 0x6240);
    }
};

template <int D, int kBits>
TA_DEVICE void expand_k(const uint8_t* codes, const uint8_t* steps, const uint8_t* zeros, int half, uint8_t* k,
                        uint8_t* k_fraction, int part, int lane) {
    constexpr int kSteps = D / 32, kPerByte = 8 / kBits, kGroups = 4 / kPerByte;
    constexpr uint32_t kStepMask = kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f, kFractionMask = kBits == 4 ? 0x07070707 : 0x04040404;
    const int r = lane >> 2, i = lane & 3;
#pragma unroll
    for (int n = 0; n < kSteps / 2; ++n) {
        const int step = part * (kSteps / 2) + n, first = D / 4 * i + 8 * step;
        const uint2 step_bytes = *reinterpret_cast<const uint2*>(steps + first);
        const uint2 zero_bytes = *reinterpret_cast<const uint2*>(zeros + first);
        uint32_t w[kGroups][4];
#pragma unroll
        for (int group = 0; group < kGroups; ++group) load_words(codes + (group * kSteps + step) * 512 + lane * 16, w[group]);
        uint8_t* to[2] = {lane_place<D>(k, 2 * step, r, i), lane_place<D>(k, 2 * step + 1, r, i)};
#pragma unroll
        for (int w1 = 0; w1 < 2; ++w1) {
            KChannels channels;
            channels.set<kBits>((w1 ? step_bytes.y : step_bytes.x) & kStepMask, w1 ? zero_bytes.y : zero_bytes.x);
#pragma unroll
            for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
                for (int w0 = 0; w0 < 2; ++w0) {
                    store_word(to[w1] + (half * kPageTokens + tile * 16 + 8 * w0) * D,
                               channels.expand<kBits>(w[tile / kPerByte][2 * w1 + w0], tile % kPerByte));
                }
            }
        }
        if (r < 2) {
            const uint32_t fraction = (r ? step_bytes.y : step_bytes.x) >> 5 & kFractionMask;
            store_word(k_fraction + half * D + sm90::swizzled_chunk<D>(half, 2 * step + r) * 16 + i * 4, fraction);
        }
    }
}

// V's zero point has a fraction of f eighths; f of every eight tokens get one more. The mean over the page, which is what the
// fraction is there for, is exact; one token is off by less than an INT8 step. Which bytes of a word of tokens 0 ... 31, and of
// one of tokens 32 ... 63, get one more:
TA_DEVICE uint2 spread_fraction(int f) {
    const auto bytes = [](int n) { return n == 0 ? 0u : 0x01010101u >> (32 - 8 * n); };
    return {bytes((f + 1) / 2), bytes(f / 2)};
}

// One word of four tokens of a channel per place.
template <int D, int kBits>
TA_DEVICE void expand_v(const uint8_t* codes, const uint8_t* steps, const uint8_t* zeros, const uint2* spread, int half,
                        uint8_t* v, int part, int lane) {
    constexpr int kPerByte = 8 / kBits, kGroups = D / 16 / kPerByte, kLevels = (1 << kBits) - 1;
    constexpr int kMine = kGroups > 1 ? kGroups / 2 : 1;  // groups of this warp, with both steps of tokens, or one of one group
    constexpr int kTokenSteps = kGroups > 1 ? 2 : 1;
    constexpr uint32_t kMask = kBits == 4 ? 0x0f0f0f0f : 0x03030303;
    const int r = lane >> 2, i = lane & 3, first_step = kGroups > 1 ? 0 : part;
    uint8_t* to[kTokenSteps][2];
#pragma unroll
    for (int n = 0; n < kTokenSteps; ++n) {
#pragma unroll
        for (int w1 = 0; w1 < 2; ++w1) to[n][w1] = lane_place<kBlockTokens>(v, 4 * half + 2 * w1 + first_step + n, r, i);
    }
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
        const int group = kGroups > 1 ? part * kMine + mine : 0, first = D / 8 * r + 2 * kPerByte * group;
        uint32_t w[kTokenSteps][4];
#pragma unroll
        for (int n = 0; n < kTokenSteps; ++n) load_words(codes + (group * 2 + first_step + n) * 512 + lane * 16, w[n]);
#pragma unroll
        for (int t = 0; t < kPerByte; ++t) {
#pragma unroll
            for (int w0 = 0; w0 < 2; ++w0) {
                const int byte = steps[first + 2 * t + w0], zero = int8_t(zeros[first + 2 * t + w0]);
                const uint32_t step = step_of(uint8_t(byte), kBits);
                uint2 extra = spread[fraction_eighths_of(uint8_t(byte), kBits)];
                if (zero + kLevels * int(step) >= 127) extra = {0, 0};  // it would leave INT8
                const uint32_t base = uint32_t(zero + 128) * 0x01010101u;
                const uint32_t add[2] = {base + extra.x, base + extra.y};
#pragma unroll
                for (int n = 0; n < kTokenSteps; ++n) {
#pragma unroll
                    for (int w1 = 0; w1 < 2; ++w1) {
                        const uint32_t c = w[n][2 * w1 + w0] >> (kBits * t) & kMask;
                        store_word(to[n][w1] + ((group * kPerByte + t) * 16 + 8 * w0) * kBlockTokens,
                                   (c * step + add[w1]) ^ 0x80808080u);
                    }
                }
            }
        }
    }
}

template <int D>
TA_DEVICE void expand_channel_page(const uint8_t* raw, int k_bits, int v_bits, const uint2* spread, int half, uint8_t* k,
                                   uint8_t* v, uint8_t* k_fraction, int part, int lane) {
    const ChannelLayout layout(D, k_bits, v_bits);
    const uint8_t *k_step = raw + layout.k_step(), *k_zero = raw + layout.k_zero();
    const uint8_t *v_step = raw + layout.v_step(), *v_zero = raw + layout.v_zero();
    if (k_bits == 4) {
        expand_k<D, 4>(raw, k_step, k_zero, half, k, k_fraction, part, lane);
    } else {
        expand_k<D, 2>(raw, k_step, k_zero, half, k, k_fraction, part, lane);
    }
    if (v_bits == 4) {
        expand_v<D, 4>(raw + layout.v_codes(), v_step, v_zero, spread, half, v, part, lane);
    } else {
        expand_v<D, 2>(raw + layout.v_codes(), v_step, v_zero, spread, half, v, part, lane);
    }
}

TA_DEVICE float warp_max(float x) {
#pragma unroll
    for (int n = 16; n > 0; n /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, n));
    return x;
}

// Reads the scales of a page. Tokens [0, valid) of it exist. `top` is the largest log2 of V's scales that this warp has seen in the
// tile of rows.
template <int D>
TA_DEVICE void read_scales(const uint8_t* raw, bool is_channel, int k_bits, int v_bits, int valid, int half, int lane,
                           float& top, BlockScales& out) {
    constexpr float kOctavesDown = 3.0f;  // further below the top, P carries too few levels for the sum of a row
    float k[2], v[2];
    if (is_channel) {
        const ChannelLayout layout(D, k_bits, v_bits);
        const float k_scale = *reinterpret_cast<const float*>(raw + layout.k_scale());
        const float v_scale = *reinterpret_cast<const float*>(raw + layout.v_scale());
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int t = lane + 32 * n, exponent = raw[layout.v_exponents() + t / 2] >> (t % 2 * 4) & 15;
            k[n] = k_scale;
            v[n] = v_scale * __int_as_float((127 - exponent) << 23);
        }
    } else {
        constexpr TokenLayout kLayout(D);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            k[n] = reinterpret_cast<const float*>(raw + kLayout.k_scale())[lane + 32 * n];
            v[n] = reinterpret_cast<const float*>(raw + kLayout.v_scale())[lane + 32 * n];
        }
    }
    const float k0 = __shfl_sync(~0u, k[0], 0), v0 = __shfl_sync(~0u, v[0], 0);
    bool equal = true;
#pragma unroll
    for (int n = 0; n < 2; ++n) equal = equal && (lane + 32 * n >= valid || (k[n] == k0 && v[n] == v0));
    equal = __all_sync(~0u, equal);
    float largest = v0;
    if (!equal) largest = warp_max(fmaxf(lane < valid ? v[0] : 0.0f, lane + 32 < valid ? v[1] : 0.0f));
    // Where V's scale is 0 so are its codes, and any factor will do.
    const float none = fmaxf(top, -64.0f), page = largest > 0.0f ? __log2f(largest) : none;
    if (lane == 0) {
        out.zero = 0;
        out.k_page[half] = k0;
        out.v_page[half] = page;
        out.v_inverse[half] = exp2f(-page);
        out.uniform[half] = equal && page >= top - kOctavesDown;
        out.v_largest[half] = exp2f(fmaxf(top, page));
    }
    top = fmaxf(top, page);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int t = half * kPageTokens + lane + 32 * n;
        out.k_token[t] = k[n];
        out.v_token[t] = equal ? page : v[n] > 0.0f ? __log2f(v[n]) : none;
    }
}

// What the producer warps do with the tiles [first, last). Warps 2 h and 2 h + 1 expand page h of each block; warp 0 also orders the
// pages.
template <int D>
TA_DEVICE void produce(const AttendArgs& args, const PrefillTile* first, const PrefillTile* last, SharedMemory<D>& shared,
                       int warp, int lane) {
    const int half = warp / 2, part = warp % 2;
    if (warp == 0) shared.stream.start(first, last, lane);
    Ring<kRawPages> raw;
    Ring<kStages> stage;
    int pages = 0;  // of the blocks before
    if (half == 1) raw.next();
    int next_begin = 0, next_end = 0, next_keys = 0, next_head = 0;  // of the next tile, loaded while this one is worked on
    const auto load_next = [&](const PrefillTile* next) {
        if (next >= last) return;
        next_begin = __ldg(&next->page_begin);
        next_end = __ldg(&next->page_end);
        next_keys = __ldg(&next->n_keys);
        next_head = __ldg(&next->head);
    };
    load_next(first);
    for (const PrefillTile* tile = first; tile < last; ++tile) {
        const int page_begin = next_begin, page_end = next_end, n_keys = next_keys;
        int k_bits = 4, v_bits = 4;
        if (args.heads) {
            const HeadArgs h = args.heads[next_head];
            k_bits = h.k_bits;
            v_bits = h.v_bits;
        }
        load_next(tile + 1);
        float top = -INFINITY;
        for (int page = page_begin + half; page < page_end + half; page += 2, stage.next()) {
            if (warp == 0) shared.stream.fill(args, pages + kRawPages, shared, lane);
            const bool exists = page < page_end;
            BlockScales& out = shared.scales[stage.slot];
            if (exists) sm90::barrier_wait(&shared.raw_full[raw.slot], raw.phase);
            sm90::barrier_wait(&shared.empty[stage.slot], stage.phase ^ 1);
            if (exists) {
                uint8_t *k = shared.k[stage.slot], *v = shared.v[stage.slot], *k_fraction = shared.k_fraction[stage.slot];
                const uint8_t* from = shared.raw[raw.slot];
                const bool is_channel = shared.raw_is_channel[raw.slot];
                if (is_channel) {
                    expand_channel_page<D>(from, k_bits, v_bits, shared.spread, half, k, v, k_fraction, part, lane);
                } else {
                    expand_token_page<D>(from, half, k, v, k_fraction, part, lane);
                }
                if (part == 1) {
                    read_scales<D>(from, is_channel, k_bits, v_bits, n_keys - page * kPageTokens, half, lane, top, out);
                }
            } else if (part == 1 && lane == 0) {  // masked; its scales need not exist, but be numbers
                out.k_page[half] = out.v_page[half] = out.v_inverse[half] = out.v_largest[half] = 0.0f;
                out.uniform[half] = 1;
            }
            sm90::fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                if (exists) sm90::barrier_arrive(&shared.raw_empty[raw.slot]);
                sm90::barrier_arrive(&shared.full[stage.slot]);
            }
            // A tile with an odd number of pages: the next tile's first page follows its last.
            const int used = page - half + 1 < page_end ? 2 : 1;
            pages += used;
            raw.next();
            if (used == 2) raw.next();
        }
    }
}

}  // namespace ta::cuda::prefill
