// The producers of the prefill kernel: pages come by bulk copy as they are stored and are expanded to INT8 tiles in the order that
// wgmma wants. Both code arrays have the same shape, 16-byte chunks of four words that belong to two rows; a word goes to its
// row as it is (token pages) or unpacked, times step, plus zero point (channel pages).
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/prefill_shared.cuh"

namespace ta::cuda::prefill {

// Where the four words of a lane's chunk go: word 2 w1 + w0 to row + 8 w0, chunk + `w1_stride` w1 of the row, place i.
template <int kRowBytes>
TA_DEVICE void store_words(uint8_t* tile, int row, int chunk, int w1_stride, int i, const uint32_t (&w)[4]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const int at = row + 8 * (n & 1), c = chunk + w1_stride * (n >> 1);
        *reinterpret_cast<uint32_t*>(tile + at * kRowBytes + sm90::swizzled_chunk<kRowBytes>(at, c) * 16 + i * 4) = w[n];
    }
}

TA_DEVICE void load_words(const uint8_t* from, uint32_t (&w)[4]) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
}

// Token page: codes are INT8 already. `half` is the page's place in its block.
template <int D>
TA_DEVICE void expand_token_page(const uint8_t* raw, int half, uint8_t* k, uint8_t* v, uint8_t* k_fraction, int warp, int lane) {
    constexpr TokenLayout kLayout(D);
    constexpr int kSteps = D / 32;
    const int r = lane >> 2, i = lane & 3;
    uint32_t w[4];
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
        const int load = warp + 4 * n, tile = load / kSteps, step = load % kSteps;
        load_words(raw + kLayout.k_codes() + load * 512 + lane * 16, w);
        store_words<D>(k, half * kPageTokens + tile * 16 + r, 2 * step, 1, i, w);
    }
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
        const int load = warp + 4 * n, tile = load / 2, step = load % 2;
        load_words(raw + kLayout.v_codes() + load * 512 + lane * 16, w);
        store_words<kBlockTokens>(v, tile * 16 + r, 4 * half + step, 2, i, w);
    }
    if (warp == 0 && lane < D / 4) {
        const int chunk = lane >> 2;
        *reinterpret_cast<uint32_t*>(k_fraction + half * D + sm90::swizzled_chunk<D>(half, chunk) * 16 + i * 4) = 0;
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
                        uint8_t* k_fraction, int warp, int lane) {
    constexpr int kSteps = D / 32, kPerByte = 8 / kBits, kLoads = 4 / kPerByte * kSteps;
    const int r = lane >> 2, i = lane & 3, step = warp % kSteps, first = D / 4 * i + 8 * step;
    const uint2 step_bytes = *reinterpret_cast<const uint2*>(steps + first);
    const uint2 zero_bytes = *reinterpret_cast<const uint2*>(zeros + first);
    constexpr uint32_t kStepMask = kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f, kFractionMask = kBits == 4 ? 0x07070707 : 0x04040404;
    KChannels channels[2];
    channels[0].set<kBits>(step_bytes.x & kStepMask, zero_bytes.x);
    channels[1].set<kBits>(step_bytes.y & kStepMask, zero_bytes.y);
#pragma unroll
    for (int load = warp; load < kLoads; load += 4) {
        uint32_t w[4];
        load_words(codes + load * 512 + lane * 16, w);
#pragma unroll
        for (int t = 0; t < kPerByte; ++t) {
            uint32_t x[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) x[n] = channels[n >> 1].template expand<kBits>(w[n], t);
            store_words<D>(k, half * kPageTokens + (load / kSteps * kPerByte + t) * 16 + r, 2 * step, 1, i, x);
        }
    }
    if (r < 2 && warp < kSteps) {
        const uint32_t fraction = (r ? step_bytes.y : step_bytes.x) >> 5 & kFractionMask;
        *reinterpret_cast<uint32_t*>(k_fraction + half * D + sm90::swizzled_chunk<D>(half, 2 * step + r) * 16 + i * 4) = fraction;
    }
}

// V's zero point has a fraction of f eighths; f of every eight tokens get one more. The mean over the page, which is what the
// fraction is there for, is exact; one token is off by less than an INT8 step. Which bytes of a word of tokens 0 ... 31, and of
// one of tokens 32 ... 63, get one more:
TA_DEVICE uint2 spread_fraction(int f) {
    const auto bytes = [](int n) { return n == 0 ? 0u : 0x01010101u >> (32 - 8 * n); };
    return {bytes((f + 1) / 2), bytes(f / 2)};
}

template <int D, int kBits>
TA_DEVICE void expand_v(const uint8_t* codes, const uint8_t* steps, const uint8_t* zeros, const uint2* spread, int half, uint8_t* v,
                        int warp, int lane) {
    constexpr int kPerByte = 8 / kBits, kGroups = D / 16 / kPerByte, kLevels = (1 << kBits) - 1;
    constexpr int kBothSteps = kGroups >= 4 ? 2 : 1;  // of tokens, by one warp
    const int r = lane >> 2, i = lane & 3;
    const int group = kBothSteps == 2 ? warp : warp / 2, first_step = kBothSteps == 2 ? 0 : warp % 2;
    if (group >= kGroups) return;
    uint32_t w[kBothSteps][4];
#pragma unroll
    for (int n = 0; n < kBothSteps; ++n) load_words(codes + (group * 2 + first_step + n) * 512 + lane * 16, w[n]);
    const int first = D / 8 * r + 2 * kPerByte * group;
#pragma unroll
    for (int t = 0; t < kPerByte; ++t) {
        const int tile = group * kPerByte + t;
#pragma unroll
        for (int w0 = 0; w0 < 2; ++w0) {
            const int byte = steps[first + 2 * t + w0], zero = int8_t(zeros[first + 2 * t + w0]);
            const uint32_t step = step_of(uint8_t(byte), kBits), row = tile * 16 + 8 * w0 + r;
            uint2 extra = spread[fraction_eighths_of(uint8_t(byte), kBits)];
            if (zero + kLevels * int(step) >= 127) extra = {0, 0};  // it would leave INT8
            const uint32_t base = uint32_t(zero + 128) * 0x01010101u;
#pragma unroll
            for (int n = 0; n < kBothSteps; ++n) {
#pragma unroll
                for (int w1 = 0; w1 < 2; ++w1) {
                    constexpr uint32_t kMask = kBits == 4 ? 0x0f0f0f0f : 0x03030303;
                    const uint32_t c = w[n][2 * w1 + w0] >> (kBits * t) & kMask;
                    const int chunk = 4 * half + 2 * w1 + first_step + n;
                    *reinterpret_cast<uint32_t*>(v + row * kBlockTokens + sm90::swizzled_chunk<kBlockTokens>(row, chunk) * 16 +
                                                 i * 4) = (c * step + (base + (w1 ? extra.y : extra.x))) ^ 0x80808080u;
                }
            }
        }
    }
}

template <int D>
TA_DEVICE void expand_channel_page(const uint8_t* raw, int k_bits, int v_bits, const uint2* spread, int half, uint8_t* k,
                                   uint8_t* v, uint8_t* k_fraction, int warp, int lane) {
    const ChannelLayout layout(D, k_bits, v_bits);
    const uint8_t *k_step = raw + layout.k_step(), *k_zero = raw + layout.k_zero();
    const uint8_t *v_step = raw + layout.v_step(), *v_zero = raw + layout.v_zero();
    if (k_bits == 4) {
        expand_k<D, 4>(raw, k_step, k_zero, half, k, k_fraction, warp, lane);
    } else {
        expand_k<D, 2>(raw, k_step, k_zero, half, k, k_fraction, warp, lane);
    }
    if (v_bits == 4) {
        expand_v<D, 4>(raw + layout.v_codes(), v_step, v_zero, spread, half, v, warp, lane);
    } else {
        expand_v<D, 2>(raw + layout.v_codes(), v_step, v_zero, spread, half, v, warp, lane);
    }
}

TA_DEVICE float warp_max(float x) {
#pragma unroll
    for (int n = 16; n > 0; n /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, n));
    return x;
}

// One warp's running view of V's scales along the pages of a tile of rows.
struct ScaleReader {
    float base;  // BlockScales::v_base
    float top;   // largest log2 of V's scale so far, less base

    TA_DEVICE void start() { top = -INFINITY; }

    // Tokens [0, valid) of the page exist. `first` says that this is the first page of the tile.
    template <int D>
    TA_DEVICE void read(const uint8_t* raw, bool is_channel, int k_bits, int v_bits, int valid, bool first, int half, int lane,
                        BlockScales& out) {
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
                v[n] = v_scale / float(1 << exponent);
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
        float largest = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (lane + 32 * n >= valid) continue;
            equal = equal && k[n] == k0 && v[n] == v0;
            largest = fmaxf(largest, v[n]);
        }
        equal = __all_sync(~0u, equal);
        largest = warp_max(largest);
        if (first) base = largest > 0.0f ? floorf(__log2f(largest)) : 0.0f;
        // Where V's scale is 0 so are its codes, and any factor will do.
        const float none = fmaxf(top, 0.0f);
        const float page = largest > 0.0f ? __log2f(largest) - base : none;
        const float known = top;
        top = fmaxf(top, page);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int t = half * kPageTokens + lane + 32 * n;
            out.k_token[t] = k[n];
            out.v_token[t] = v[n] > 0.0f ? __log2f(v[n]) - base : none;
        }
        if (lane == 0) {
            out.k_page[half] = k0;
            out.v_page[half] = page;
            out.v_inverse[half] = exp2f(-page);
            out.uniform[half] = equal && page >= known - kOctavesDown;
            out.v_base = base;
            out.v_largest = exp2f(top);
        }
    }
};

// The pages that a CTA reads, tile after tile, as a stream of bulk copies. Run by one warp; lane n knows the address of page
// n of a batch of 32.
template <int D>
struct PageStream {
    const AttendArgs& args;
    const PrefillTile* tile;
    const PrefillTile* tile_end;
    int page = 0, page_end = 0, batch = 0;
    uint64_t address = 0;
    uint32_t bytes = 0;
    int issued = 0;
    Ring<kRawPages> ring;

    TA_DEVICE PageStream(const AttendArgs& a, const PrefillTile* first, const PrefillTile* last)
        : args(a), tile(first - 1), tile_end(last) {}

    TA_DEVICE void load_addresses(int lane) {
        batch = page;
        if (page + lane >= page_end) return;
        const uint64_t entry = __ldg(args.table + tile->first_entry + page + lane);
        const int head = tile->head;
        address = entry & ~kEntryFlags;
        if (entry & kEntryChannel) {
            const HeadArgs h = args.heads[head];
            address += (entry & kEntrySingleLayer ? 0 : args.channel_layer_offset) + h.channel_offset;
            bytes = uint32_t(ChannelLayout(D, h.k_bits, h.v_bits).bytes()) | 1u;
        } else {
            constexpr uint32_t kBytes = TokenLayout(D).bytes();
            address += (entry & kEntrySingleLayer ? 0 : args.token_layer_offset) + uint64_t(head) * kBytes;
            bytes = kBytes;
        }
    }

    // Starts copies until `until` pages have been asked for since the beginning, or all of them.
    TA_DEVICE void fill(int until, SharedMemory<D>& shared, int lane) {
        while (issued < until) {
            while (page == page_end) {
                if (tile + 1 >= tile_end) return;
                ++tile;
                page = tile->page_begin;
                page_end = tile->page_end;
                if (page < page_end) load_addresses(lane);
            }
            if (page == batch + 32) load_addresses(lane);
            const uint64_t from = __shfl_sync(~0u, address, page - batch);
            const uint32_t n = __shfl_sync(~0u, bytes, page - batch);
            if (lane == 0) {
                shared.raw_is_channel[ring.slot] = n & 1;
                sm90::barrier_arrive_expecting(&shared.raw_full[ring.slot], n & ~1u);
                sm90::bulk_copy(shared.raw[ring.slot], reinterpret_cast<const void*>(from), n & ~1u, &shared.raw_full[ring.slot]);
            }
            ring.next();
            ++page;
            ++issued;
        }
    }
};

// What the producer warps do with the tiles [first, last).
template <int D>
TA_DEVICE void produce(const AttendArgs& args, const PrefillTile* first, const PrefillTile* last, SharedMemory<D>& shared,
                       int warp, int lane) {
    PageStream<D> stream(args, first, last);
    ScaleReader scales{};
    Ring<kRawPages> raw;
    Ring<kStages> stage;
    int pages = 0;  // expanded so far
    for (const PrefillTile* tile = first; tile < last; ++tile) {
        const int page_begin = tile->page_begin, page_end = tile->page_end, n_keys = tile->n_keys;
        int k_bits = 4, v_bits = 4;
        if (args.heads) {
            k_bits = args.heads[tile->head].k_bits;
            v_bits = args.heads[tile->head].v_bits;
        }
        scales.start();
        for (int page = page_begin; page < page_end; page += 2, stage.next()) {
            sm90::barrier_wait(&shared.empty[stage.slot], stage.phase ^ 1);
            uint8_t *k = shared.k[stage.slot], *v = shared.v[stage.slot], *k_fraction = shared.k_fraction[stage.slot];
            BlockScales& out = shared.scales[stage.slot];
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                if (page + half >= page_end) {  // masked; its scales need not exist, but be numbers
                    if (warp == 0 && lane == 0) {
                        out.k_page[half] = out.v_page[half] = out.v_inverse[half] = 0.0f;
                        out.uniform[half] = 1;
                    }
                    continue;
                }
                if (warp == 0) stream.fill(pages + kRawPages, shared, lane);
                sm90::barrier_wait(&shared.raw_full[raw.slot], raw.phase);
                const uint8_t* from = shared.raw[raw.slot];
                const bool is_channel = shared.raw_is_channel[raw.slot];
                if (is_channel) {
                    expand_channel_page<D>(from, k_bits, v_bits, shared.spread, half, k, v, k_fraction, warp, lane);
                } else {
                    expand_token_page<D>(from, half, k, v, k_fraction, warp, lane);
                }
                if (warp == kProducerWarps - 1) {
                    const int valid = min(kPageTokens, n_keys - (page + half) * kPageTokens);
                    scales.read<D>(from, is_channel, k_bits, v_bits, valid, page + half == page_begin, half, lane, out);
                }
                raw.next();
                ++pages;
                sm90::named_barrier(1, 32 * kProducerWarps);  // the raw page is free
            }
            sm90::fence_async_proxy();
            __syncwarp();
            if (lane == 0) sm90::barrier_arrive(&shared.full[stage.slot]);
        }
    }
}

}  // namespace ta::cuda::prefill
