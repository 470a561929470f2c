// The producers of the prefill kernel: pages come by bulk copy as they are stored and are expanded to INT8 tiles in the order
// that wgmma wants. Both code arrays have the same shape, 16-byte chunks of four words that belong to two rows; two chunks of a
// lane make one chunk of each row, of words as they are (token pages) or unpacked, times step, plus zero point (channel pages).
// V's tile is unsigned, code + 128.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/sm90/prefill/shared.cuh"

namespace ta::cuda::prefill {

TA_DEVICE uint4 load_chunk(const uint8_t* from) {
    return *reinterpret_cast<const uint4*>(from);
}
TA_DEVICE void store_chunk(uint8_t* to, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
    *reinterpret_cast<uint4*>(to) = make_uint4(w0, w1, w2, w3);
}

// Where a lane stores K: chunk `pair` of its quarter of the channels, of token 16 tile + r + 8 h.
template <int D>
TA_DEVICE uint8_t* k_place(uint8_t* k, int half, int pair, int tile, int h, int r, int i) {
    const int row = k_row(tile, r, h), chunk = D == 128 ? k_chunk(2 * i + pair) : i;
    return k + (half * kPageTokens + row) * D + sm90::swizzled_chunk<D>(row, chunk) * 16;
}
// Where a lane stores V: all its tokens of channel (d/8) r + 2 tile + h.
TA_DEVICE uint8_t* v_place(uint8_t* v, int half, int tile, int h, int r, int i) {
    const int row = 16 * tile + 8 * h + v_row(r);
    return v + row * kBlockTokens + sm90::swizzled_chunk<kBlockTokens>(v_row(r), 4 * half + i) * 16;
}

// Two warps expand a page, `part` is which; `half` is the page's place in its block. K: by pairs of steps where there are two,
// else by tiles. V: by tiles.
template <int D>
inline constexpr int kPairs = D / 64;  // of steps of 32 channels of K: 16 channels of each lane
template <int D>
inline constexpr int kKTiles = kPairs<D> > 1 ? 4 : 2;  // a warp's of K
template <int D>
inline constexpr int kVTiles = D / 32;  // a warp's of V
template <int D>
TA_DEVICE int first_k_tile(int part) {
    return kPairs<D> > 1 ? 0 : 2 * part;
}
template <int D>
TA_DEVICE int k_pair(int part) {
    return kPairs<D> > 1 ? part : 0;
}

template <int D>
TA_DEVICE void expand_token_page(const uint8_t* raw, int half, uint8_t* k, uint8_t* v, int part, int lane) {
    constexpr TokenLayout kLayout(D);
    constexpr int kSteps = D / 32;
    const int r = lane >> 2, i = lane & 3, pair = k_pair<D>(part), first = first_k_tile<D>(part);
    const uint8_t* k_from = raw + kLayout.k_codes() + (first * kSteps + 2 * pair) * 512 + lane * 16;
#pragma unroll
    for (int n = 0; n < kKTiles<D>; ++n) {
        const uint4 a = load_chunk(k_from + n * kSteps * 512), b = load_chunk(k_from + n * kSteps * 512 + 512);
        store_chunk(k_place<D>(k, half, pair, first + n, 0, r, i), a.x, a.z, b.x, b.z);
        store_chunk(k_place<D>(k, half, pair, first + n, 1, r, i), a.y, a.w, b.y, b.w);
    }
    constexpr uint32_t kSigns = 0x80808080;
    const uint8_t* v_from = raw + kLayout.v_codes() + part * kVTiles<D> * 1024 + lane * 16;
#pragma unroll
    for (int n = 0; n < kVTiles<D>; ++n) {
        const int tile = part * kVTiles<D> + n;
        const uint4 a = load_chunk(v_from + n * 1024), b = load_chunk(v_from + n * 1024 + 512);
        store_chunk(v_place(v, half, tile, 0, r, i), a.x ^ kSigns, b.x ^ kSigns, a.z ^ kSigns, b.z ^ kSigns);
        store_chunk(v_place(v, half, tile, 1, r, i), a.y ^ kSigns, b.y ^ kSigns, a.w ^ kSigns, b.w ^ kSigns);
    }
}

// Where V's fractions of a channel lie, f and 16 f in a byte each: operand_of_sums() in softmax.cuh says why.
TA_DEVICE void store_v_fraction(uint8_t* v_fraction, int row, int half, uint32_t f) {
    *reinterpret_cast<uint16_t*>(v_fraction + row * 16 + 2 * half) = uint16_t(f * 0x1001);
}

template <int D>
TA_DEVICE void clear_fractions(int half, uint8_t* k_fraction, uint8_t* v_fraction, int part, int lane) {
    if (part == 0) {
        if (lane < D / 16) store_chunk(k_fraction + half * D + lane * 16, 0, 0, 0, 0);
    } else {
#pragma unroll
        for (int n = 0; n < D; n += 32) store_v_fraction(v_fraction, n + lane, half, 0);
    }
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
    constexpr int kSteps = D / 32, kPerByte = 8 / kBits;
    constexpr uint32_t kStepMask = kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f, kFractionMask = kBits == 4 ? 0x07070707 : 0x04040404;
    const int r = lane >> 2, i = lane & 3, pair = k_pair<D>(part), first_tile = first_k_tile<D>(part);
    const uint4 step_bytes = load_chunk(steps + D / 4 * i + 16 * pair), zero_bytes = load_chunk(zeros + D / 4 * i + 16 * pair);
    KChannels channels[4];
    channels[0].set<kBits>(step_bytes.x & kStepMask, zero_bytes.x);
    channels[1].set<kBits>(step_bytes.y & kStepMask, zero_bytes.y);
    channels[2].set<kBits>(step_bytes.z & kStepMask, zero_bytes.z);
    channels[3].set<kBits>(step_bytes.w & kStepMask, zero_bytes.w);
    constexpr int kTilesOfLoad = kKTiles<D> < kPerByte ? kKTiles<D> : kPerByte;
    const uint8_t* from = codes + (first_tile / kPerByte * kSteps + 2 * pair) * 512 + lane * 16;
#pragma unroll
    for (int n = 0; n < kKTiles<D>; n += kTilesOfLoad) {
        const uint4 a = load_chunk(from + n / kPerByte * kSteps * 512),
                    b = load_chunk(from + n / kPerByte * kSteps * 512 + 512);
#pragma unroll
        for (int m = 0; m < kTilesOfLoad; ++m) {
            const int tile = first_tile + n + m, t = tile % kPerByte;
            store_chunk(k_place<D>(k, half, pair, tile, 0, r, i), channels[0].expand<kBits>(a.x, t),
                        channels[1].expand<kBits>(a.z, t), channels[2].expand<kBits>(b.x, t),
                        channels[3].expand<kBits>(b.z, t));
            store_chunk(k_place<D>(k, half, pair, tile, 1, r, i), channels[0].expand<kBits>(a.y, t),
                        channels[1].expand<kBits>(a.w, t), channels[2].expand<kBits>(b.y, t),
                        channels[3].expand<kBits>(b.w, t));
        }
    }
    if (r == 0 && (kPairs < D >> 1 || part == 0)) {
        const int chunk = D == 128 ? k_chunk(2 * i + pair) : i;
        store_chunk(k_fraction + half * D + sm90::swizzled_chunk<D>(half, chunk) * 16, step_bytes.x >> 5 & kFractionMask,
                    step_bytes.y >> 5 & kFractionMask, step_bytes.z >> 5 & kFractionMask, step_bytes.w >> 5 & kFractionMask);
    }
}

template <int D, int kBits>
TA_DEVICE void expand_v(const uint8_t* codes, const uint8_t* steps, const uint8_t* zeros, int half, uint8_t* v,
                        uint8_t* v_fraction, int part, int lane) {
    constexpr int kPerByte = 8 / kBits, kWords = kVTiles<D> / 2;
    constexpr int kTilesOfLoad = kVTiles<D> < kPerByte ? kVTiles<D> : kPerByte;
    constexpr uint32_t kMask = kBits == 4 ? 0x0f0f0f0f : 0x03030303;
    constexpr uint32_t kStepMask = kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f;
    const int r = lane >> 2, i = lane & 3, first_tile = part * kVTiles<D>, first_channel = D / 8 * r + 2 * first_tile;
    uint32_t step_bytes[kWords], zero_bytes[kWords];  // two tiles to a word
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
        step_bytes[n] = *reinterpret_cast<const uint32_t*>(steps + first_channel + 4 * n);
        zero_bytes[n] = *reinterpret_cast<const uint32_t*>(zeros + first_channel + 4 * n) ^ 0x80808080u;
    }
    if (i < kVTiles<D>) {
        const uint32_t mine = (kWords > 1 && i >= 2 ? step_bytes[kWords - 1] : step_bytes[0]) >> (16 * (i & 1));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            store_v_fraction(v_fraction, 16 * (first_tile + i) + 8 * h + v_row(r), half,
                             fraction_eighths_of(uint8_t(mine >> (8 * h)), kBits));
        }
    }
    const uint8_t* from = codes + first_tile / kPerByte * 1024 + lane * 16;
#pragma unroll
    for (int n = 0; n < kVTiles<D>; n += kTilesOfLoad) {
        const uint4 a = load_chunk(from + n / kPerByte * 1024), b = load_chunk(from + n / kPerByte * 1024 + 512);
#pragma unroll
        for (int m = 0; m < kTilesOfLoad; ++m) {
            const int tile = first_tile + n + m, shift = tile % kPerByte * kBits;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = (n + m) % 2 * 2 + h;
                const uint32_t step = __byte_perm(step_bytes[(n + m) / 2] & kStepMask, 0, 0x4440 + at);
                const uint32_t zero = __byte_perm(zero_bytes[(n + m) / 2], 0, 0x1111 * at);
                const auto expand = [&](uint32_t four) { return (four >> shift & kMask) * step + zero; };
                store_chunk(v_place(v, half, tile, h, r, i), expand(h ? a.y : a.x), expand(h ? b.y : b.x),
                            expand(h ? a.w : a.z), expand(h ? b.w : b.z));
            }
        }
    }
}

template <int D>
TA_DEVICE void expand_channel_page(const uint8_t* raw, int k_bits, int v_bits, int half, uint8_t* k, uint8_t* v,
                                   uint8_t* k_fraction, uint8_t* v_fraction, int part, int lane) {
    const ChannelLayout layout(D, k_bits, v_bits);
    const uint8_t *k_step = raw + layout.k_step(), *k_zero = raw + layout.k_zero();
    const uint8_t *v_step = raw + layout.v_step(), *v_zero = raw + layout.v_zero();
    if (k_bits == 4) {
        expand_k<D, 4>(raw, k_step, k_zero, half, k, k_fraction, part, lane);
    } else {
        expand_k<D, 2>(raw, k_step, k_zero, half, k, k_fraction, part, lane);
    }
    if (v_bits == 4) {
        expand_v<D, 4>(raw + layout.v_codes(), v_step, v_zero, half, v, v_fraction, part, lane);
    } else {
        expand_v<D, 2>(raw + layout.v_codes(), v_step, v_zero, half, v, v_fraction, part, lane);
    }
}

TA_DEVICE float warp_max(float x) {
#pragma unroll
    for (int n = 16; n > 0; n /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, n));
    return x;
}

// Reads the scales of a page. Tokens [0, valid) of it exist.
template <int D>
TA_DEVICE void read_scales(const uint8_t* raw, bool is_channel, int k_bits, int v_bits, int valid, int half, int lane,
                           BlockScales& out) {
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
    const float page = v0 > 0.0f ? __log2f(v0) : kNoVScale;
    if (lane == 0) {
        out.k_page[half] = equal ? k0 * kFine : INFINITY;
        out.v_page[half] = __float2int_rn(fmaf(page, kFine, 32768.0f));
        out.v_inverse[half] = kSumUnit * exp2f(-page);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const int t = lane + 32 * n, row = half * kPageTokens + k_row(t / 16, t % 8, t / 8 % 2);
        out.k_token[row] = k[n];
        out.v_token[row] = equal ? page : v[n] > 0.0f ? __log2f(v[n]) : kNoVScale;
    }
}

// What the producer warps do. Warps 2 h and 2 h + 1 expand page h of each block; warp 0 also orders the pages.
template <int D, bool kFractions>
TA_DEVICE void produce(const AttendArgs& args, PrefillSchedule* schedule, SharedMemory<D, kFractions>& shared, int warp,
                       int lane) {
    const int half = warp / 2, part = warp % 2;
    if (warp == 0) shared.stream.start(lane);
    Ring<kRawBlocks> raw;
    Ring<kStages> stage;
    Ring<kTiles> at;
    int blocks = 0;
    for (int n = 0;; ++n, at.next()) {
        if (warp == 0) shared.stream.publish(args, schedule, n, shared, lane);
        sm90::barrier_wait(&shared.tile_full[at.slot], at.phase);
        const Tile& tile = shared.tiles[at.slot];
        const int head = tile.head, page_begin = tile.rows.page_begin, page_end = tile.rows.page_end;
        const int n_keys = tile.rows.n_keys;
        __syncwarp();
        if (lane == 0) sm90::barrier_arrive(&shared.tile_empty[at.slot]);
        if (head < 0) return;
        int k_bits = 4, v_bits = 4;
        if (kFractions) {
            const HeadArgs h = args.heads[head];
            k_bits = h.k_bits;
            v_bits = h.v_bits;
        }
        for (int page = page_begin + half; page < page_end + half; page += 2, ++blocks, raw.next(), stage.next()) {
            if (warp == 0) shared.stream.fill(args, schedule, blocks + kRawBlocks, shared, lane);
            const bool exists = page < page_end;
            BlockScales& out = shared.scales[stage.slot];
            sm90::barrier_wait(&shared.raw_full[raw.slot], raw.phase);
            sm90::barrier_wait(&shared.empty[stage.slot], stage.phase ^ 1);
            if (exists) {
                uint8_t *k = shared.k[stage.slot], *v = shared.v[stage.slot];
                const uint8_t* from = shared.raw[raw.slot][half];
                const bool is_channel = kFractions && shared.raw_is_channel[raw.slot][half];
                if constexpr (kFractions) {
                    uint8_t *k_fraction = shared.k_fraction[stage.slot], *v_fraction = shared.v_fraction[stage.slot];
                    if (is_channel) {
                        expand_channel_page<D>(from, k_bits, v_bits, half, k, v, k_fraction, v_fraction, part, lane);
                    } else {
                        clear_fractions<D>(half, k_fraction, v_fraction, part, lane);
                    }
                }
                if (!is_channel) expand_token_page<D>(from, half, k, v, part, lane);
                if (part == 1) {
                    read_scales<D>(from, is_channel, k_bits, v_bits, n_keys - page * kPageTokens, half, lane, out);
                }
            } else if (part == 1 && lane == 0) {  // masked; what stands for its scales must be numbers
                out.k_page[half] = out.v_inverse[half] = 0.0f;
                out.v_page[half] = 0;
            }
            sm90::fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                sm90::barrier_arrive(&shared.raw_empty[raw.slot]);
                sm90::barrier_arrive(&shared.full[stage.slot]);
            }
        }
    }
}

}  // namespace ta::cuda::prefill
