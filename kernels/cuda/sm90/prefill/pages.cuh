// The producers of the prefill kernel: pages come by bulk copy as they are stored and are expanded to INT8 tiles in the order
// that wgmma wants. Both code arrays have the same shape, 16-byte chunks of four words that belong to two rows. stmatrix stores
// the words, as they are (token pages) or unpacked, times step, plus zero point (channel pages).
// V's tile is unsigned, code + 128.
#pragma once

#include "kernels/cuda/common/prefill/expand.cuh"
#include "kernels/cuda/sm90/prefill/scales.cuh"

namespace ta::cuda::prefill::sm90 {

// The address of a row of K for a lane of store_matrices: of token tile 0, step `step` of 32 channels. Tiles are 16 rows apart. The
// matrices are those of words 2 high + low, low being the second eight tokens of a tile, high the second four channels.
template <int D>
TA_DEVICE uint8_t* k_place(uint8_t* k, int half, int step, int lane) {
    const int row = half * kPageTokens + lane / 8 % 2 * 8 + lane % 8;
    return k + row * D + ptx::swizzled_chunk<D>(row, 2 * step + lane / 16) * 16;
}
// The place in V of channel tile 0, token `step` of a pair. Tiles are 16 rows apart; low is the second channel of a tile, high the
// second 32 tokens of the page.
TA_DEVICE uint8_t* v_place(uint8_t* v, int half, int step, int lane) {
    const int row = lane / 8 % 2 * 8 + lane % 8;
    return v + row * kBlockTokens + ptx::swizzled_chunk<kBlockTokens>(row, 4 * half + 2 * (lane / 16) + step) * 16;
}

// The address of an odd step is that of the even one before with this bit set: rows are swizzled by XOR.
inline constexpr uint32_t kNextStepOfK = 32, kNextStepOfV = 16;

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

// A warp's share of a page, as above.
struct PageShare {
    int half, part, lane;
};
// The places of a block in a stage: the tiles of K and V, and the fractions of channel pages.
struct StageTiles {
    int stage;
    uint8_t *k, *v, *k_fraction, *v_fraction;
};

template <int D>
TA_DEVICE void copy_k(const uint8_t* codes, int half, uint8_t* k, int part, int lane) {
    constexpr int kSteps = D / 32;
    const int pair = k_pair<D>(part), first = first_k_tile<D>(part);
    const uint8_t* from = codes + (first * kSteps + 2 * pair) * 512 + lane * 16;
    const uint32_t first_to = ptx::base_address(k_place<D>(k, half, 2 * pair, lane) + first * 16 * D);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const uint32_t to = first_to ^ (step * kNextStepOfK);
        uint4 a[kKTiles<D>];
#pragma unroll
        for (int n = 0; n < kKTiles<D>; ++n) a[n] = load_chunk(from + (n * kSteps + step) * 512);
#pragma unroll
        for (int n = 0; n < kKTiles<D>; ++n) ptx::store_matrices(to + n * 16 * D, a[n].x, a[n].y, a[n].z, a[n].w);
    }
}
template <int D>
TA_DEVICE void copy_v(const uint8_t* codes, int half, uint8_t* v, int part, int lane) {
    constexpr uint32_t kSigns = 0x80808080;
    const int first = part * kVTiles<D>;
    const uint8_t* from = codes + first * 1024 + lane * 16;
    const uint32_t first_to = ptx::base_address(v_place(v, half, 0, lane) + first * 16 * kBlockTokens);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const uint32_t to = first_to ^ (step * kNextStepOfV);
        uint4 a[kVTiles<D>];
#pragma unroll
        for (int n = 0; n < kVTiles<D>; ++n) a[n] = load_chunk(from + n * 1024 + step * 512);
#pragma unroll
        for (int n = 0; n < kVTiles<D>; ++n) {
            ptx::store_matrices(to + n * 16 * kBlockTokens, a[n].x ^ kSigns, a[n].y ^ kSigns, a[n].z ^ kSigns, a[n].w ^ kSigns);
        }
    }
}

TA_DEVICE void store_v_fraction(uint8_t* v_fraction, int row, int stage, int half, uint32_t f) {
    *reinterpret_cast<uint16_t*>(v_fraction + v_fraction_byte(row, stage, half)) = uint16_t(f * 0x1001);
}

// Fractions of K and of V at 8 bits, by one warp each.
template <int D>
TA_DEVICE void clear_k_fractions(const StageTiles& to, const PageShare& at) {
    if (at.part == 0 && at.lane < D / 16) store_chunk(to.k_fraction + at.half * D + at.lane * 16, 0, 0, 0, 0);
}
template <int D>
TA_DEVICE void clear_v_fractions(const StageTiles& to, const PageShare& at) {
    if (at.part == 0) return;
#pragma unroll
    for (int n = 0; n < D; n += 32) store_v_fraction(to.v_fraction, n + at.lane, to.stage, at.half, 0);
}

template <int D, int kBits>
TA_DEVICE void expand_k(const uint8_t* codes, const uint8_t* steps, const uint8_t* zeros, const StageTiles& tiles,
                        const PageShare& at) {
    const int half = at.half, part = at.part, lane = at.lane;
    constexpr int kSteps = D / 32, kPerByte = 8 / kBits;
    constexpr uint32_t kStepMask = kBits == 4 ? 0x1f1f1f1f : 0x7f7f7f7f, kFractionMask = kBits == 4 ? 0x07070707 : 0x04040404;
    const int r = lane >> 2, i = lane & 3, pair = k_pair<D>(part), first_tile = first_k_tile<D>(part);
    const uint32_t first_to = ptx::base_address(k_place<D>(tiles.k, half, 2 * pair, lane) + first_tile * 16 * D);
    const uint32_t to[2] = {first_to, first_to ^ kNextStepOfK};
    const uint8_t* from = codes + (first_tile / kPerByte * kSteps + 2 * pair) * 512 + lane * 16;
    uint4 a = load_chunk(from), b = load_chunk(from + 512);
    const uint4 step_bytes = load_chunk(steps + D / 4 * i + 16 * pair), zero_bytes = load_chunk(zeros + D / 4 * i + 16 * pair);
    const uint32_t magic = in_register(kBits == 4 ? 0x54005400 : 0x44004400);
    KChannels channels[4];
    channels[0].set<kBits>(step_bytes.x & kStepMask, zero_bytes.x);
    channels[1].set<kBits>(step_bytes.y & kStepMask, zero_bytes.y);
    channels[2].set<kBits>(step_bytes.z & kStepMask, zero_bytes.z);
    channels[3].set<kBits>(step_bytes.w & kStepMask, zero_bytes.w);
    constexpr int kTilesOfLoad = kKTiles<D> < kPerByte ? kKTiles<D> : kPerByte;
#pragma unroll
    for (int n = 0; n < kKTiles<D>; n += kTilesOfLoad) {
        if (n > 0) {
            a = load_chunk(from + n / kPerByte * kSteps * 512);
            b = load_chunk(from + n / kPerByte * kSteps * 512 + 512);
        }
#pragma unroll
        for (int m = 0; m < kTilesOfLoad; ++m) {
            const int t = (first_tile + n + m) % kPerByte;
            ptx::store_matrices(to[0] + (n + m) * 16 * D, expand_four<kBits>(channels[0], a.x, t, magic),
                                expand_four<kBits>(channels[0], a.y, t, magic), expand_four<kBits>(channels[1], a.z, t, magic),
                                expand_four<kBits>(channels[1], a.w, t, magic));
            ptx::store_matrices(to[1] + (n + m) * 16 * D, expand_four<kBits>(channels[2], b.x, t, magic),
                                expand_four<kBits>(channels[2], b.y, t, magic), expand_four<kBits>(channels[3], b.z, t, magic),
                                expand_four<kBits>(channels[3], b.w, t, magic));
        }
    }
    constexpr bool kOnePair = kPairs<D> == 1;
    if (r < 4 && (!kOnePair || part == 0)) {
        const uint32_t low = r & 1 ? step_bytes.y : step_bytes.x, high = r & 1 ? step_bytes.w : step_bytes.z;
        const int chunk = ptx::swizzled_chunk<D>(half, 4 * pair + r);
        *reinterpret_cast<uint32_t*>(tiles.k_fraction + half * D + chunk * 16 + 4 * i) =
            (r & 2 ? high : low) >> 5 & kFractionMask;
    }
}

template <int D, int kBits>
TA_DEVICE void expand_v(const uint8_t* codes, const uint8_t* steps, const uint8_t* zeros, const StageTiles& tiles,
                        const PageShare& at) {
    const int half = at.half, part = at.part, lane = at.lane;
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
            store_v_fraction(tiles.v_fraction, 16 * (first_tile + i) + 8 * h + r, tiles.stage, half,
                             fraction_eighths_of(uint8_t(mine >> (8 * h)), kBits));
        }
    }
    const uint8_t* from = codes + first_tile / kPerByte * 1024 + lane * 16;
    const uint32_t first_to = ptx::base_address(v_place(tiles.v, half, 0, lane) + first_tile * 16 * kBlockTokens);
    const uint32_t to[2] = {first_to, first_to ^ kNextStepOfV};
#pragma unroll
    for (int n = 0; n < kVTiles<D>; n += kTilesOfLoad) {
        const uint4 a = load_chunk(from + n / kPerByte * 1024), b = load_chunk(from + n / kPerByte * 1024 + 512);
#pragma unroll
        for (int m = 0; m < kTilesOfLoad; ++m) {
            const int shift = (first_tile + n + m) % kPerByte * kBits;
            uint32_t step[2], zero[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = (n + m) % 2 * 2 + h;
                step[h] = __byte_perm(step_bytes[(n + m) / 2] & kStepMask, 0, 0x4440 + at);
                zero[h] = __byte_perm(zero_bytes[(n + m) / 2], 0, 0x1111 * at);
            }
            const auto expand = [&](uint32_t four, int h) { return (four >> shift & kMask) * step[h] + zero[h]; };
            const int offset = (n + m) * 16 * kBlockTokens;
            ptx::store_matrices(to[0] + offset, expand(a.x, 0), expand(a.y, 1), expand(a.z, 0), expand(a.w, 1));
            ptx::store_matrices(to[1] + offset, expand(b.x, 0), expand(b.y, 1), expand(b.z, 0), expand(b.w, 1));
        }
    }
}

// kAnyBits: K or V may have 8 bits.
template <int D, bool kAnyBits>
TA_DEVICE void expand_channel_page(const uint8_t* raw, int k_bits, int v_bits, const StageTiles& to, const PageShare& at) {
    if (!kAnyBits) assume_low_bits(k_bits, v_bits);
    const ChannelLayout layout(D, k_bits, v_bits);
    const uint8_t *v_codes = raw + layout.v_codes(), *k_step = raw + layout.k_parameters(),
                  *v_step = raw + layout.v_parameters();
    if (k_bits == 4) {
        expand_k<D, 4>(raw, k_step, k_step + D, to, at);
    } else if (!kAnyBits || k_bits == 2) {
        expand_k<D, 2>(raw, k_step, k_step + D, to, at);
    } else {
        copy_k<D>(raw, at.half, to.k, at.part, at.lane);
        clear_k_fractions<D>(to, at);
    }
    if (v_bits == 4) {
        expand_v<D, 4>(v_codes, v_step, v_step + D, to, at);
    } else if (!kAnyBits || v_bits == 2) {
        expand_v<D, 2>(v_codes, v_step, v_step + D, to, at);
    } else {
        copy_v<D>(v_codes, at.half, to.v, at.part, at.lane);
        clear_v_fractions<D>(to, at);
    }
}

// The parts of the tiles that do not change.
template <int D, bool kChannels, bool kResident>
TA_DEVICE void prepare_tiles(SharedMemory<D, kChannels, kResident>& shared, int thread) {
    for (int n = thread; n < shared.kStages * kSumRows * kBlockTokens / 16; n += kThreads) {
        const int stage = n / (kSumRows * kBlockTokens / 16), chunk = n % (kSumRows * kBlockTokens / 16);
        const uint32_t x = chunk / (kBlockTokens / 16) % 2 ? 0u : 0x01010101u;
        store_chunk(shared.v[stage] + D * kBlockTokens + chunk * 16, x, x, x, x);
    }
    if (kChannels && thread < 2 * kSumRows) store_chunk(shared.v_fraction + v_fraction_byte(D + thread, 0, 0), 0, 0, 0, 0);
}

// The work of the producer warps. Warps 2 h and 2 h + 1 expand page h of each block; warp 0 also requests the pages. Inputs of
// a page are read again from shared memory and the state of the loop is one counter: registers are for codes, and values that
// the compiler would put into local memory takes long to come back.
template <int D, bool kChannels, bool kAnyBits, bool kResident>
TA_DEVICE void produce(const AttendArgs& args, PrefillSchedule* schedule, SharedMemory<D, kChannels, kResident>& shared,
                       int warp, int lane) {
    constexpr uint32_t kStages = shared.kStages, kRawBlocks = shared.kRawBlocks;
    const int half = warp / 2, part = warp % 2;
    if (warp == 0) shared.stream.start(lane);
    uint32_t blocks = 0;
    for (int n = 0;; ++n) {
        if (warp == 0) shared.stream.hand_out(args, schedule, n, shared, lane);
        ptx::barrier_wait(&shared.tile_full[n % kTiles], n / kTiles & 1);
        const Tile& tile = shared.tiles[n % kTiles];
        // By shuffles, so that the compiler knows them to be the same in all lanes.
        const bool end = __shfl_sync(~0u, tile.head, 0) < 0;
        const int page_end = end ? 0 : __shfl_sync(~0u, tile.rows.page_end, 0);
        for (int page = end ? 0 : __shfl_sync(~0u, tile.rows.page_begin, 0); page < page_end; page += 2, ++blocks) {
            if (warp == 0) shared.stream.fill(args, schedule, int(blocks) + kRawBlocks, shared, lane);
            const uint32_t raw = blocks % kRawBlocks, stage = blocks % kStages, phase = blocks / kStages & 1;
            ptx::barrier_wait(&shared.raw_full[raw], blocks / kRawBlocks & 1);
            ptx::barrier_wait(&(shared.kFreesKeys ? shared.keys_empty : shared.empty)[stage], phase ^ 1);
            const bool exists = page + half < page_end;
            const uint8_t* from = shared.raw[raw][half];
            const uint32_t bits = kChannels && exists ? __shfl_sync(~0u, shared.raw_bits[raw][half], 0) : 0;
            const bool is_channel = bits != 0;
            const int k_bits = k_bits_of(bits), v_bits = v_bits_of(bits);
            const auto await_values = [&] {
                if (shared.kFreesKeys) ptx::barrier_wait(&shared.empty[stage], phase ^ 1);
            };
            if (exists) {
                uint8_t *k = shared.k[stage], *v = shared.v[stage];
                if constexpr (kChannels) {
                    const StageTiles to{int(stage), k, v, k + kBlockTokens * D, shared.v_fraction};
                    if (is_channel) {
                        expand_channel_page<D, kAnyBits>(from, k_bits, v_bits, to, {half, part, lane});
                    } else if (shared.raw_bits[raw][half ^ 1]) {
                        clear_k_fractions<D>(to, {half, part, lane});
                        clear_v_fractions<D>(to, {half, part, lane});
                    }
                }
                if (!is_channel) {
                    copy_k<D>(from, half, k, part, lane);
                    await_values();
                    copy_v<D>(from + TokenLayout(D).v_codes(), half, v, part, lane);
                }
            } else {
                await_values();
            }
            // V's scales by the second warp of each page, K's of both by warp 2: warp 0 has the stream to see to.
            for (int p = part ? half : 0; p < (part ? half + 1 : 2 * half); ++p) {
                const bool there = page + p < page_end;
                const uint32_t bits_there = kChannels && there ? shared.raw_bits[raw][p] : 0;
                const Scales scales{shared.scales[stage], shared.v[stage] + D * kBlockTokens, p, lane, args.k_turning};
                if (bits_there) {
                    scales.read_channels<D, kAnyBits>(shared.raw[raw][p], k_bits_of(bits_there), v_bits_of(bits_there), part);
                } else {
                    constexpr TokenLayout kAt(D);
                    const int valid = there ? tile.rows.own_keys - (page + p) * kPageTokens : 0;
                    scales.read_tokens(shared.raw[raw][p] + (part ? kAt.v_scale() : kAt.k_scale()), valid, part, false);
                }
            }
            ptx::fence_async_proxy();
            __syncwarp();
            if (lane == 0) {
                ptx::barrier_arrive(&shared.raw_empty[raw]);
                ptx::barrier_arrive(&shared.full[stage]);
            }
        }
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(&shared.tile_empty[n % kTiles]);
        if (end) return;
    }
}

}  // namespace ta::cuda::prefill::sm90
