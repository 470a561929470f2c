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

// Where a lane stores K: chunk `pair` of its quarter of the channels, of token 16 tile + r + 8 h. A row's bits are those of r
// and those of (tile, h), apart, and the swizzle is linear in them: an offset of the lane's, one XOR and one addition.
template <int D>
TA_DEVICE uint32_t k_offset_of_lane(int half, int pair, int r, int i) {
    const int row = k_row(0, r, 0), chunk = D == 128 ? k_chunk(2 * i + pair) : i;
    return uint32_t((half * kPageTokens + row) * D + sm90::swizzled_chunk<D>(row, chunk) * 16);
}
template <int D>
TA_DEVICE uint8_t* k_place(uint8_t* k, uint32_t of_lane, int tile, int h) {
    const int row = k_row(tile, 0, h);
    return k + (of_lane ^ uint32_t(sm90::swizzled_chunk<D>(row, 0) * 16)) + row * D;
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
    const uint32_t k_to = k_offset_of_lane<D>(half, pair, r, i);
    const uint8_t* k_from = raw + kLayout.k_codes() + (first * kSteps + 2 * pair) * 512 + lane * 16;
#pragma unroll
    for (int n = 0; n < kKTiles<D>; ++n) {
        const uint4 a = load_chunk(k_from + n * kSteps * 512), b = load_chunk(k_from + n * kSteps * 512 + 512);
        store_chunk(k_place<D>(k, k_to, first + n, 0), a.x, a.z, b.x, b.z);
        store_chunk(k_place<D>(k, k_to, first + n, 1), a.y, a.w, b.y, b.w);
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

// A constant that the compiler does not know: LOP3 has room for one immediate, and (x & mask) | magic with two would be two of
// them.
TA_DEVICE uint32_t in_register(uint32_t x) {
    return __shfl_sync(~0u, x, 0);
}

// Four unsigned bytes as halves, plus 1024: bytes 0 and 2, bytes 1 and 3.
TA_DEVICE void halves_of_bytes(uint32_t x, half2& even, half2& odd) {
    even = as_half2(__byte_perm(x, 0x64646464, 0x4240));
    odd = as_half2(__byte_perm(x, 0x64646464, 0x4341));
}

// code * step + zero of four channels, exact: in fp16 on the integers around 1536, whose low bytes are the results.
struct KChannels {
    half2 step[2], zero[2];  // bytes 0 and 2, bytes 1 and 3

    template <int kBits>
    TA_DEVICE void set(uint32_t steps, uint32_t zeros) {
        constexpr float kBase = kBits == 4 ? 64.0f : 4.0f;  // unpack() adds it to a code
        half2 z[2];                                         // zero + 128 + 1024
        halves_of_bytes(steps, step[0], step[1]);
        halves_of_bytes(zeros ^ 0x80808080, z[0], z[1]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            step[n] = __hsub2(step[n], both(1024.0f));
            zero[n] = __hfma2(step[n], both(-kBase), __hadd2(z[n], both(1536.0f - 128.0f - 1024.0f)));
        }
    }
};

// The codes of one tile of four channels, as halves: 64 + code (4 bits), 4 + code (2 bits).
struct KCodes {
    uint32_t even, odd;

    // `tile` is which of the codes in a byte. Those of a byte's upper bits lie where they are needed, or a byte above.
    template <int kBits>
    static TA_DEVICE KCodes unpack(uint32_t codes, int tile, uint32_t magic) {
        constexpr uint32_t kMask = kBits == 4 ? 0x00F000F0 : 0x03000300;
        constexpr int kAt = kBits == 4 ? 4 : 8;
        const int up = kAt - kBits * tile;  // of an even byte's; an odd byte's lie 8 higher
        return {((up >= 0 ? codes << up : codes >> -up) & kMask) | magic, ((codes >> (8 - up)) & kMask) | magic};
    }
};
template <int kBits>
TA_DEVICE uint32_t expand_four(const KChannels& channels, uint32_t codes, int tile, uint32_t magic) {
    const KCodes c = KCodes::unpack<kBits>(codes, tile, magic);
    const half2 a = __hfma2(as_half2(c.even), channels.step[0], channels.zero[0]);
    const half2 b = __hfma2(as_half2(c.odd), channels.step[1], channels.zero[1]);
    return __byte_perm(as_bits(a), as_bits(b), 0x6240);
}

template <int D, int kBits>
TA_DEVICE void expand_k(const uint8_t* codes, const uint8_t* steps, const uint8_t* zeros, int half, uint8_t* k,
                        uint8_t* k_fraction, int part, int lane) {
    constexpr int kSteps = D / 32, kPerByte = 8 / kBits;
    constexpr uint32_t kStepMask = kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f, kFractionMask = kBits == 4 ? 0x07070707 : 0x04040404;
    const int r = lane >> 2, i = lane & 3, pair = k_pair<D>(part), first_tile = first_k_tile<D>(part);
    const uint32_t k_to = k_offset_of_lane<D>(half, pair, r, i);
    const uint4 step_bytes = load_chunk(steps + D / 4 * i + 16 * pair), zero_bytes = load_chunk(zeros + D / 4 * i + 16 * pair);
    const uint32_t magic = in_register(kBits == 4 ? 0x54005400 : 0x44004400);
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
            store_chunk(k_place<D>(k, k_to, tile, 0), expand_four<kBits>(channels[0], a.x, t, magic),
                        expand_four<kBits>(channels[1], a.z, t, magic), expand_four<kBits>(channels[2], b.x, t, magic),
                        expand_four<kBits>(channels[3], b.z, t, magic));
            store_chunk(k_place<D>(k, k_to, tile, 1), expand_four<kBits>(channels[0], a.y, t, magic),
                        expand_four<kBits>(channels[1], a.w, t, magic), expand_four<kBits>(channels[2], b.y, t, magic),
                        expand_four<kBits>(channels[3], b.w, t, magic));
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

// Of numbers that are not negative, whose bits are in order.
TA_DEVICE float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
}
TA_DEVICE float warp_min(float x) {
    return __uint_as_float(__reduce_min_sync(~0u, __float_as_uint(x)));
}

TA_DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TA_DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The scales of a page's K (part 0) and V (part 1). Tokens [0, valid) of it exist; none: there is no page, and all of its keys
// are masked. What stands for the scales of tokens that do not exist must be numbers. A lane does two tokens, 32 apart, whose
// columns are 4 apart.
template <int D>
TA_DEVICE void read_scales(const uint8_t* raw, bool is_channel, int k_bits, int v_bits, int valid, int half, int part, int lane,
                           BlockScales& out) {
    constexpr TokenLayout kLayout(D);
    const ChannelLayout layout(D, k_bits, v_bits);
    float x[2] = {float(part), float(part)};
    if (valid > 0) {
        if (!is_channel) {
            const float* from = reinterpret_cast<const float*>(raw + (part ? kLayout.v_scale() : kLayout.k_scale()));
            x[0] = from[lane], x[1] = from[lane + 32];
        } else {
            const float page = *reinterpret_cast<const float*>(raw + (part ? layout.v_scale() : layout.k_scale()));
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                x[n] = page;
                if (part) {
                    const uint32_t exponents = raw[layout.v_exponents() + lane / 2 + 16 * n];
                    x[n] *= __uint_as_float((127 - (exponents >> (lane % 2 * 4) & 15)) << 23);
                }
            }
        }
    }
    const float first = __shfl_sync(~0u, x[0], 0);
    if (lane >= valid) x[0] = first;
    if (lane + 32 >= valid) x[1] = first;
    const bool equal = __all_sync(~0u, x[0] == first && x[1] == first);
    const int column = half * kPageTokens + k_row(lane / 16, lane % 8, lane / 8 % 2), i = column % 8 / 2, e = column % 2;
    TokenScales* const token = &out.token[column / 8][i];  // of the first; the other's is token[2]
    if (part == 0) {
        const float largest = equal ? first : warp_max(fmaxf(x[0], x[1]));
        if (lane == 0) {
            out.k_page[half] = equal ? first * kFine : INFINITY;
            out.k_largest[half] = largest;
        }
        token[0].k[e] = x[0];
        token[2].k[e] = x[1];
        return;
    }
    // What stands for a scale of 0 must not take P's levels from other pages, nor span more than a few octaves of its own.
    constexpr float kNoScale = 0x1p-120f, kNoTokenScale = 0x1p-30f;
    const auto or_none = [](float scale) { return scale > 0.0f ? scale : kNoScale; };
    float high = or_none(first), low = high;
    if (!equal) {
        high = or_none(warp_max(fmaxf(x[0], x[1])));
        const float least = fminf(fmaxf(high * kNoTokenScale, kNoScale), high);
#pragma unroll
        for (int n = 0; n < 2; ++n) x[n] = x[n] > 0.0f ? x[n] : least;
        low = warp_min(fminf(x[0], x[1]));
    } else {
        x[0] = x[1] = high;
    }
    const float inverse[2] = {kSumUnit * reciprocal_fast(x[0]),
                              equal ? kSumUnit * reciprocal_fast(x[0]) : kSumUnit * reciprocal_fast(x[1])};
    const float v[2] = {log2_fast(x[0]), equal ? log2_fast(x[0]) : log2_fast(x[1])};
    token[0].v[e] = fmaf(v[0], float(kGrid), kTokenZero);
    token[2].v[e] = fmaf(v[1], float(kGrid), kTokenZero);
    out.v_token[column] = inverse[0];
    out.v_token[column + 4] = inverse[1];
    if (!equal) {
        const int at = column / 16 * 4 % 16 + column % 16 / 8 * 2 + e;
        const float unit = low * (65535.0f / kSumUnit);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const uint32_t weight = __float2uint_rn(unit * inverse[n]);
            out.v_weight[0][i + 2 * n][16 * half + at] = uint8_t(weight >> 8);
            out.v_weight[1][i + 2 * n][16 * half + at] = uint8_t(weight);
        }
    }
    if (lane == 0) {
        const float log2_high = log2_fast(high), log2_low = log2_fast(low), page_inverse = kSumUnit * reciprocal_fast(high);
        out.v_page[half] = __float2int_rn(fmaf(log2_high, kFine, 32768.0f));
        out.v_inverse[half] = valid > 0 ? page_inverse : 0.0f;
        out.v_unit[half] = kSumUnit / 65535.0f * reciprocal_fast(low);
        out.v_largest[half] = fmaxf(fabsf(log2_high), fabsf(log2_low)) * kGrid;
        out.v_spread[half] = log2_high - log2_low;
    }
}

// What the producer warps do. Warps 2 h and 2 h + 1 expand page h of each block; warp 0 also orders the pages. What a page
// needs is read again from shared memory: registers are for its codes, and what the compiler would put into local memory takes
// long to come back.
template <int D, bool kFractions>
TA_DEVICE void produce(const AttendArgs& args, PrefillSchedule* schedule, SharedMemory<D, kFractions>& shared, int warp,
                       int lane) {
    const int half = warp / 2, part = warp % 2;
    if (warp == 0) shared.stream.start(lane);
    Ring<kStages> stage;
    int blocks = 0;
    for (int n = 0;; ++n) {
        if (warp == 0) shared.stream.publish(args, schedule, n, shared, lane);
        sm90::barrier_wait(&shared.tile_full[n % kTiles], n / kTiles & 1);
        const Tile& tile = shared.tiles[n % kTiles];
        const bool end = tile.head < 0;
        for (int page = end ? 0 : tile.rows.page_begin; !end && page < tile.rows.page_end; page += 2, ++blocks, stage.next()) {
            if (warp == 0) shared.stream.fill(args, schedule, blocks + kRawBlocks, shared, lane);
            const int raw = blocks % kRawBlocks;
            sm90::barrier_wait(&shared.raw_full[raw], blocks / kRawBlocks & 1);
            sm90::barrier_wait(&shared.empty[stage.slot], stage.phase ^ 1);
            const bool exists = page + half < tile.rows.page_end;
            const uint8_t* from = shared.raw[raw][half];
            const bool is_channel = kFractions && exists && shared.raw_is_channel[raw][half];
            if (exists) {
                uint8_t *k = shared.k[stage.slot], *v = shared.v[stage.slot];
                if constexpr (kFractions) {
                    uint8_t *k_fraction = shared.k_fraction[stage.slot], *v_fraction = shared.v_fraction[stage.slot];
                    if (is_channel) {
                        expand_channel_page<D>(from, tile.k_bits, tile.v_bits, half, k, v, k_fraction, v_fraction, part, lane);
                    } else {
                        clear_fractions<D>(half, k_fraction, v_fraction, part, lane);
                    }
                }
                if (!is_channel) expand_token_page<D>(from, half, k, v, part, lane);
            }
            const int valid = exists ? tile.rows.n_keys - (page + half) * kPageTokens : 0;
            read_scales<D>(from, is_channel, tile.k_bits, tile.v_bits, valid, half, part, lane, shared.scales[stage.slot]);
            sm90::fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                sm90::barrier_arrive(&shared.raw_empty[raw]);
                sm90::barrier_arrive(&shared.full[stage.slot]);
            }
        }
        __syncwarp();
        if (lane == 0) sm90::barrier_arrive(&shared.tile_empty[n % kTiles]);
        if (end) return;
    }
}

}  // namespace ta::cuda::prefill
