// A head's page in shared memory, and its closing: token scales merged, channels encoded at 4 or 2 bits. The integers are those
// of kernels/format/codec.h.
//
// Codes are taken and left in the order of layout.h, 16 bytes per lane: the order is the same at all bits, so a lane packs what
// it encoded with shifts alone. Two values go through half-precision arithmetic at a time. Every step of it is exact but the
// division by a step, and that is right for all values and steps that occur (tests/kernels/cuda/append_test.cu tries them all).
#pragma once

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/append/codec_rows.cuh"
#include "kernels/cuda/common/half2.cuh"
#include "kernels/cuda/common/turning.cuh"

namespace ta::cuda {

// A channel that was encoded, all but its final zero point. `sum_q`, `sum_c`: of the values and codes of 64 tokens.
struct EncodedChannel {
    uint8_t step, max_code;
    int8_t zero;
    int16_t sum_q, sum_c;
};

template <int D>
struct PageImage {
    static constexpr int kChunks = 4 * D;     // 16 bytes of K or V each
    uint4 k[kChunks], v[kChunks];             // a token page's code arrays, chunks of a load permuted
    alignas(16) float scale[2][kPageTokens];  // of K, V
    float ratio[2][kPageTokens];              // that merge the tokens' scales
    float own[2][kPageTokens];                // universal scales: those that the tokens would have alone
    int32_t v_sum[kPageTokens];               // of a token's |V codes|
    bool merge[2][2];                         // by half of the tokens: some ratio is not 1
    float page_scale[2];
    EncodedChannel channels[2][D];
    int64_t variance[2][D / 16], covariance[2][D / 16];  // unit_slope: sums over the channels that a warp encodes
    StepZero searched[D];                                // k_search: what was found

    // Chunks are permuted so that both accesses use all banks: lanes that write different loads in natural order, and lanes
    // that read one load.
    __device__ static int k_chunk(int tile, int step, int r, int i) {
        constexpr int kShift = D == 64 ? 2 : D == 256 ? 0 : 1;
        return (tile * (D / 32) + step) * 32 + ((4 * r + i) ^ (step << kShift & 7));
    }
    __device__ static int v_chunk(int tile, int step, int r, int i) {
        return (2 * tile + step) * 32 + ((4 * r + i) ^ (r >> 1 & 3) ^ (tile >> 2 & 1) << 2);
    }
    // Chunk n of the page's array.
    __device__ static int k_chunk(int n) { return k_chunk(n / 32 / (D / 32), n / 32 % (D / 32), n % 32 / 4, n % 4); }
    __device__ static int v_chunk(int n) { return v_chunk(n / 64, n / 32 % 2, n % 32 / 4, n % 4); }

    __device__ uint32_t* k_words(int chunk) { return reinterpret_cast<uint32_t*>(k + chunk); }
    __device__ uint32_t* v_words(int chunk) { return reinterpret_cast<uint32_t*>(v + chunk); }
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) x = fmaxf(x, __shfl_xor_sync(kWholeWarp, x, h));
    return x;
}
__device__ __forceinline__ float page_max(const float (&x)[kPageTokens], int lane) {
    return warp_max(fmaxf(x[lane], x[lane + 32]));
}

inline constexpr uint32_t kSignBits = 0x80808080u;

// merge_code of codec.h for the four codes of a word.
__device__ __forceinline__ uint32_t merge_word(uint32_t q, float r0, float r1, float r2, float r3) {
    const uint32_t u = q ^ kSignBits;
    const float ratio[4] = {r0, r1, r2, r3};
    uint32_t merged[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
        const float x = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7540 + b)) - (0x1p23f + 128.0f);
        merged[b] = __float_as_uint(__fadd_rn(__fmul_rn(x, ratio[b]), kRound));
    }
    return low_bytes(merged[0], merged[1], merged[2], merged[3]);
}

// Two of a word's bytes u as the halves 1024 + u.
__device__ __forceinline__ __half2 bytes01(uint32_t u) {
    return half2_of(__byte_perm(u, 0x64646464u, 0x4140));
}
__device__ __forceinline__ __half2 bytes23(uint32_t u) {
    return half2_of(__byte_perm(u, 0x64646464u, 0x4342));
}
// The half-precision integer 1024 + n, 0 <= n < 1024, twice.
__device__ __forceinline__ __half2 halves_1024(int n) {
    return half2_of(uint32_t(0x6400 + n) * 0x10001u);
}
__device__ __forceinline__ __half reciprocal(int step) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(float(step)));
    return __float2half_rn(r);
}

// The codes of x, each an integer less than 2^9 in magnitude, from the channel's step on: 1024 + RNE(x / step). Ties are exact:
// for all steps up to 80 the rounded product with the rounded reciprocal is the exact quotient if that is a half.
__device__ __forceinline__ uint32_t step_codes(__half2 x, __half2 inverse) {
    return bits_of(__hadd2_rn(__hmul2_rn(x, inverse), halves_1024(0)));
}
// The same limited to 0 .. levels.
__device__ __forceinline__ uint32_t step_codes_clamped(__half2 x, __half2 inverse, __half2 levels) {
    const __half2 c = __hmin2(__hmax2(__hmul2_rn(x, inverse), __float2half2_rn(0.0f)), levels);
    return bits_of(__hadd2_rn(c, halves_1024(0)));
}

// The code of one such integer, not negative.
__device__ __forceinline__ int code_of(int x, int step, int levels) {
    const __half2 zero = halves_1024(0), top = __hsub2(halves_1024(levels), zero);
    return int(step_codes_clamped(__hsub2(halves_1024(x), zero), __half2half2(reciprocal(step)), top) & 0xff);
}

// A candidate (step, zero) of the search: 1024 + the code of x. A tie may be rounded the other way, which costs the same error.
struct Candidate {
    __half2 slope, shift;
    __device__ __forceinline__ Candidate(StepZero sz, int levels) {
        float inverse;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(float(levels * sz.step)));
        slope = __float2half2_rn(inverse);
        shift = __float2half2_rn(float(-sz.zero) * inverse);
    }
    __device__ __forceinline__ uint32_t codes(__half2 x, __half2 levels) const {
        return bits_of(__hfma2(__hfma2_sat(x, slope, shift), levels, halves_1024(0)));
    }
};

// stage2_step of codec.h: the range, at most 255, over the levels of 4 or 2 bits, rounded up.
__device__ __forceinline__ int step_of_range(int range, int bits) {
    const int s = bits == 4 ? (range + 14) * 4370 >> 16 : (range + 2) * 21846 >> 16;
    return s < 1 ? 1 : s;
}

// Offsets of ChannelLayout, computed once.
struct PieceOffsets {
    int k_bits, v_bits;
    int v_codes, k_step, k_zero, v_step, v_zero, v_exponents, k_scale, bytes;
    __device__ __forceinline__ explicit PieceOffsets(const ChannelLayout& layout)
        : k_bits(layout.k_bits),
          v_bits(layout.v_bits),
          v_codes(int(layout.v_codes())),
          k_step(int(layout.k_step())),
          k_zero(int(layout.k_zero())),
          v_step(int(layout.v_step())),
          v_zero(int(layout.v_zero())),
          v_exponents(int(layout.v_exponents())),
          k_scale(int(layout.k_scale())),
          bytes(int(layout.bytes())) {}
};

// A sum over the warp of numbers below 2^31.
__device__ __forceinline__ int64_t warp_sum(int x) {
    const int high = __reduce_add_sync(kWholeWarp, x >> 16), low = __reduce_add_sync(kWholeWarp, x & 0xffff);
    return (int64_t(high) << 16) + low;
}

// Sums over a channel's values plus 128 (u) and its codes (c).
struct ChannelSums {
    int u, c, uu, uc;
};

// Unit slope: the step of a lane's channel, and the warp's share of the sums. `mine`: no other lane has the channel.
template <int D>
__device__ __forceinline__ int give_slope(PageImage<D>& page, int tensor, int unit, int bits, bool mine, int step,
                                          const ChannelSums& of, int lane) {
    const ChannelSlope slope = channel_slope(of.u, of.c, of.uu, of.uc);
    step = unit_slope_step(step, slope, of.u - 128 * kPageTokens, of.c, bits);
    const int64_t variance = warp_sum(mine ? slope.variance : 0);
    const int64_t covariance = warp_sum(mine ? slope.covariance * step : 0);
    if (lane == 0) {
        page.variance[tensor][unit] = variance;
        page.covariance[tensor][unit] = covariance;
    }
    return step;
}

// Steps and zero points of K (tensor 0) or V, and the page scale, when all of its channels are encoded. The whole CTA does.
template <int D>
__device__ __forceinline__ void store_channels(const PageImage<D>& page, int tensor, int bits, const EncodeOptions& options,
                                               uint8_t* steps, uint8_t* zeros, float* page_scale) {
    const int unit = options.fractional_zero ? fraction_unit(bits) : 8;
    float gain = 1.0f;
    if (options.unit_slope) {
        int64_t variance = 0, covariance = 0;
        for (int n = 0; n < D / (tensor == 0 ? 32 : 16); ++n) {
            variance += page.variance[tensor][n];
            covariance += page.covariance[tensor][n];
        }
        gain = unit_slope_gain(variance, covariance);
    }
    for (int c = threadIdx.x; c < D; c += RowShape<D>::kThreads) {
        const EncodedChannel e = page.channels[tensor][c];
        int zero8 = 8 * e.zero;
        if (options.unit_slope || options.fractional_zero)
            zero8 = unit_slope_zero8(e.zero, e.sum_q, e.sum_c, gain, e.step, e.max_code, unit);
        steps[c] = step_byte(e.step, zero_fraction8(zero8), bits);
        zeros[c] = uint8_t(zero_floor(zero8));
    }
    if (threadIdx.x != 0) return;
    const float scale = page.page_scale[tensor];
    *page_scale = options.unit_slope ? unit_slope_scale(scale, gain, tensor == 0 && options.k_turning) : scale;
}

// A lane's share of the 32 channels of K of one step of the loads, scales merged (`merged`: they are already): [tile][2 w1 + w0] are token
// 16 tile + r + 8 w0, channels 4 w1 ..
template <int D>
__device__ __forceinline__ void load_k(const PageImage<D>& page, int step, bool merged, uint32_t (&u)[4][4], int lane) {
    const int r = lane / 4, i = lane % 4;
    const bool merge = !merged && (page.merge[0][0] || page.merge[0][1]);
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
        const uint4 chunk = page.k[PageImage<D>::k_chunk(tile, step, r, i)];
        u[tile][0] = chunk.x, u[tile][1] = chunk.y, u[tile][2] = chunk.z, u[tile][3] = chunk.w;
    }
    if (merge) {
#pragma unroll
        for (int n = 0; n < 16; ++n) {
            const float ratio = page.ratio[0][16 * (n / 4) + r + 8 * (n & 1)];
            u[n / 4][n % 4] = merge_word(u[n / 4][n % 4], ratio, ratio, ratio, ratio);
        }
    }
}

// The sums of eight lanes r = lane / 4, channel by channel; lane r gets that of channel r.
__device__ __forceinline__ int scatter_sum(const int (&x)[8], int r) {
    int four[4], two[2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const bool up = r & 4;
        four[n] = (up ? x[n + 4] : x[n]) + __shfl_xor_sync(kWholeWarp, up ? x[n] : x[n + 4], 16);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const bool up = r & 2;
        two[n] = (up ? four[n + 2] : four[n]) + __shfl_xor_sync(kWholeWarp, up ? four[n] : four[n + 2], 8);
    }
    const bool up = r & 1;
    return (up ? two[1] : two[0]) + __shfl_xor_sync(kWholeWarp, up ? two[0] : two[1], 4);
}

// Byte b of four words.
__device__ __forceinline__ uint32_t gather_bytes(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3, int b) {
    const uint32_t pick = uint32_t(0x40 + 0x11 * b);
    return __byte_perm(__byte_perm(w0, w1, pick), __byte_perm(w2, w3, pick), 0x5410);
}

// What a lane's words of load_k say of its eight channels, [w1] of four each. Leaves the values plus 128 in the words.
struct KExtremes {
    uint32_t sum[2][2] = {};        // of channels 0 and 2, 1 and 3
    __half2 low[2][2], high[2][2];  // of channels 0 and 1, 2 and 3

    __device__ __forceinline__ explicit KExtremes(uint32_t (&u)[4][4]) {
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                u[tile][w] ^= kSignBits;
                sum[w / 2][0] += u[tile][w] & 0x00ff00ffu;
                sum[w / 2][1] += u[tile][w] >> 8 & 0x00ff00ffu;
                const __half2 a = bytes01(u[tile][w]), b = bytes23(u[tile][w]);
                const bool first = tile == 0 && w % 2 == 0;
                low[w / 2][0] = first ? a : __hmin2(low[w / 2][0], a);
                low[w / 2][1] = first ? b : __hmin2(low[w / 2][1], b);
                high[w / 2][0] = first ? a : __hmax2(high[w / 2][0], a);
                high[w / 2][1] = first ? b : __hmax2(high[w / 2][1], b);
            }
        }
    }
};

// The sums of products of values plus 128 and of codes, of channel r of a lane's eight.
__device__ __forceinline__ ChannelSums sums_of_k(const uint32_t (&u)[4][4], const uint32_t (&codes)[4][4], int sum_u, int sum_c,
                                                 int r) {
    int squares[8] = {}, products[8] = {};
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int tile = 0; tile < 4; tile += 2) {
            const int w = 2 * (c / 4);
            const uint32_t x = gather_bytes(u[tile][w], u[tile][w + 1], u[tile + 1][w], u[tile + 1][w + 1], c % 4);
            const uint32_t y =
                gather_bytes(codes[tile][w], codes[tile][w + 1], codes[tile + 1][w], codes[tile + 1][w + 1], c % 4);
            squares[c] = int(__dp4a(x, x, uint32_t(squares[c])));
            products[c] = int(__dp4a(x, y, uint32_t(products[c])));
        }
    }
    return {sum_u, sum_c, scatter_sum(squares, r), scatter_sum(products, r)};
}

// A warp encodes these channels. `searched`: with the steps and zero points in page.searched.
template <int D>
__device__ __forceinline__ void encode_k(PageImage<D>& page, int step, int bits, bool searched, bool unit_slope, uint8_t* piece,
                                         int lane) {
    const int r = lane / 4, i = lane % 4;
    uint32_t u[4][4];
    load_k(page, step, searched, u, lane);
    KExtremes of(u);
    // Lane r finishes channel r of its eight.
    const int first_channel = D / 4 * i + 8 * step;
    int my_zero = 0, my_high = 0, my_step = 0, my_sum = 0, my_codes = 0;
    __half2 inverse[2][2], zeros[2][2];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        __half2 &lo = of.low[n / 2][n % 2], &hi = of.high[n / 2][n % 2];
        uint32_t& total = of.sum[n / 2][n % 2];
#pragma unroll
        for (int h = 4; h <= 16; h *= 2) {
            lo = __hmin2(lo, half2_of(__shfl_xor_sync(kWholeWarp, bits_of(lo), h)));
            hi = __hmax2(hi, half2_of(__shfl_xor_sync(kWholeWarp, bits_of(hi), h)));
            total += __shfl_xor_sync(kWholeWarp, total, h);
        }
        __half reciprocals[2];
        int zero[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int from = int(bits_of(lo) >> 16 * b & 0xff), to = int(bits_of(hi) >> 16 * b & 0xff);
            StepZero sz{step_of_range(to - from, bits), from};
            if (searched) {
                sz = page.searched[first_channel + 2 * n + b];
                sz.zero += 128;
            }
            const int s = sz.step;
            zero[b] = sz.zero;
            reciprocals[b] = reciprocal(s);
            my_zero = r == 2 * n + b ? sz.zero : my_zero;
            my_high = r == 2 * n + b ? to : my_high;
            my_step = r == 2 * n + b ? s : my_step;
            const int summed = 4 * (n / 2) + n % 2 + 2 * b;  // of bytes 0 and 2, then 1 and 3
            my_sum = r == summed ? int(total >> 16 * b & 0xffff) : my_sum;
        }
        inverse[n / 2][n % 2] = __halves2half2(reciprocals[0], reciprocals[1]);
        zeros[n / 2][n % 2] = half2_of(0x64006400u + uint32_t(zero[0]) + (uint32_t(zero[1]) << 16));
    }
    const __half2 levels = half2_of(bits == 4 ? 0x4b804b80u : 0x42004200u);  // 15, 3
    uint32_t code_sum[2] = {};                                               // bytes: 8 tokens of at most 15
    uint32_t codes_of[4][4];
    uint32_t packed[4] = {};
    uint4* to = reinterpret_cast<uint4*>(piece) + step * 32 + lane;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const uint32_t a = step_codes_clamped(__hsub2(bytes01(u[tile][w]), zeros[w / 2][0]), inverse[w / 2][0], levels);
            const uint32_t b = step_codes_clamped(__hsub2(bytes23(u[tile][w]), zeros[w / 2][1]), inverse[w / 2][1], levels);
            const uint32_t code = __byte_perm(a, b, 0x6420);
            codes_of[tile][w] = code;
            code_sum[w / 2] += code;
            packed[w] |= code << (tile * bits & 7);
        }
        if (((tile + 1) * bits & 7) != 0) continue;  // more tiles go into these bytes
        *to = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        to += D / 32 * 32;
        packed[0] = packed[1] = packed[2] = packed[3] = 0;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        uint32_t codes = code_sum[n / 2] >> n % 2 * 8 & 0x00ff00ffu;
#pragma unroll
        for (int h = 4; h <= 16; h *= 2) codes += __shfl_xor_sync(kWholeWarp, codes, h);
#pragma unroll
        for (int b = 0; b < 2; ++b) my_codes = r == 4 * (n / 2) + n % 2 + 2 * b ? int(codes >> 16 * b & 0xffff) : my_codes;
    }
    int slope_step = my_step;
    if (unit_slope) {
        const ChannelSums sums = sums_of_k(u, codes_of, my_sum, my_codes, r);
        slope_step = give_slope(page, 0, step, bits, true, my_step, sums, lane);
    }
    page.channels[0][first_channel + r] = {uint8_t(slope_step),
                                           uint8_t(code_of(my_high - my_zero, my_step, bits == 4 ? 15 : 3)),
                                           int8_t(my_zero - 128), int16_t(my_sum - kPageTokens * 128), int16_t(my_codes)};
}

// The candidates of codec.h's encoder search for one channel; number 0 is the full range. The numbers of steps and places and
// their parts at 4 and 2 bits are put into the same formulas: the search spends a tenth of its time here.
struct Candidates {
    int smallest, range, full, levels, first_step, less, places_inverse, places, part_slope, part;
    __device__ __forceinline__ Candidates(int from, int to, int bits) : smallest(from), range(to - from) {
        const bool two = bits == 2;
        full = step_of_range(range, bits);
        levels = two ? 3 : 15;
        first_step = two ? 12 * full + 15 : 16 * full;  // sixteenths of step i: first_step - i less, rounded down
        less = two ? full : 16;
        places = two ? 5 : 4;
        places_inverse = two ? 52 : 64;
        part_slope = two ? 4 : 7;
        part = two ? 4 : 3;
    }
    __device__ __forceinline__ StepZero operator()(int number) const {
        const int searched = -int(number != 0);  // a mask: the lanes of a channel have different numbers and would branch
        const int n = number - 1, i = n * places_inverse >> 8, place = n - i * places;
        const int s = full + ((max((first_step - i * less) >> 4, 1) - full) & searched), reach = levels * s;
        const int z = ((range - reach) * (part + (place * part_slope >> 1))) >> 4;
        const int limited = max(min(smallest + z, 127 - reach), -128);
        return {s, smallest + ((limited - smallest) & searched)};
    }
};

// Merges the tokens' scales in one tile of V.
template <int D>
__device__ __forceinline__ void merge_v(PageImage<D>& page, int tile, int lane) {
    using Page = PageImage<D>;
    const int r = lane / 4;
    if (page.merge[1][0] || page.merge[1][1]) {
        const int i = lane % 4;
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            uint4& chunk = page.v[Page::v_chunk(tile, step, r, i)];
            const float* ratio = page.ratio[1] + 2 * i + step;
            uint4 c = chunk;
            c.x = merge_word(c.x, ratio[0], ratio[8], ratio[16], ratio[24]);
            c.y = merge_word(c.y, ratio[0], ratio[8], ratio[16], ratio[24]);
            c.z = merge_word(c.z, ratio[32], ratio[40], ratio[48], ratio[56]);
            c.w = merge_word(c.w, ratio[32], ratio[40], ratio[48], ratio[56]);
            chunk = c;
        }
        __syncwarp();
    }
}

// A channel's 64 values, which two lanes have, each its own 32 first: as bytes plus 128 and as halves.
inline constexpr int kChannelWords = kPageTokens / 4;
struct ChannelValues {
    uint32_t u[kChannelWords];
    __half2 x[2 * kChannelWords];

    template <class WordAt>
    __device__ __forceinline__ explicit ChannelValues(const WordAt& word_at) {
        const __half2 bias = halves_1024(128);
#pragma unroll
        for (int n = 0; n < kChannelWords; ++n) {
            u[n] = word_at(n) ^ kSignBits;
            x[2 * n] = __hsub2(bytes01(u[n]), bias);
            x[2 * n + 1] = __hsub2(bytes23(u[n]), bias);
        }
    }
};

// The (step, zero) of encode_channel for the channel of lanes `lane` and `lane ^ 2`, and its largest value.
struct FoundCode {
    StepZero best;
    int largest;
};
__device__ __forceinline__ FoundCode find_code(const ChannelValues& of, int bits, bool search, int lane) {
    const __half2 bias = halves_1024(128);
    const int half = lane >> 1 & 1;
    __half2 low = of.x[0], high = of.x[0];
#pragma unroll
    for (int n = 1; n < kChannelWords; ++n) {
        low = __hmin2(low, of.x[n]);
        high = __hmax2(high, of.x[n]);
    }
    low = __hmin2(low, half2_of(__shfl_xor_sync(kWholeWarp, bits_of(low), 2)));
    high = __hmax2(high, half2_of(__shfl_xor_sync(kWholeWarp, bits_of(high), 2)));
    const uint32_t low_bits = bits_of(__hadd2(low, bias)), high_bits = bits_of(__hadd2(high, bias));
    const int smallest = int(min(low_bits & 0xff, low_bits >> 16 & 0xff)) - 128;
    const int largest = int(max(high_bits & 0xff, high_bits >> 16 & 0xff)) - 128;

    const Candidates candidates(smallest, largest, bits);
    if (!search) return {candidates(0), largest};
    const __half2 levels = half2_of(bits == 4 ? 0x4b804b80u : 0x42004200u);  // 15, 3
    const int last = search_steps(bits) * search_places(bits), top = bits == 4 ? 15 : 3;
    int32_t least = INT32_MAX;  // error, then the candidate's number: the first of equals wins
#pragma unroll 1
    for (int m = 0; m <= last; m += 2) {
        const int number = min(m + half, last);
        const StepZero sz = candidates(number);
        const Candidate c(sz, top);
        const uint32_t zero = uint32_t(sz.zero + 128) * 0x01010101u;
        uint32_t error[2] = {};
#pragma unroll
        for (int w = 0; w < kChannelWords; ++w) {
            const uint32_t code = __byte_perm(c.codes(of.x[2 * w], levels), c.codes(of.x[2 * w + 1], levels), 0x6420);
            const uint32_t e = __vabsdiffu4(of.u[w], code * uint32_t(sz.step) + zero);
            error[w % 2] = __dp4a(e, e, error[w % 2]);
        }
        least = min(least, int32_t((error[0] + error[1]) * 32 + uint32_t(number)));
    }
    least = min(least, __shfl_xor_sync(kWholeWarp, least, 2));
    return {candidates(least & 31), largest};
}

// k_search: a warp finds the steps and zero points of half of the channels of encode_k, and merges their scales in place. Not
// inlined, since its registers would make its callers spill.
template <int D>
__device__ __noinline__ void search_k(PageImage<D>& page, int unit, int bits, int lane) {
    using Page = PageImage<D>;
    const int step = unit / 2, first_i = unit % 2 * 2;
    if (page.merge[0][0] || page.merge[0][1]) {
        const int r = lane / 4, i = first_i + lane % 2;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int tile = 2 * n + lane / 2 % 2;
            uint4& chunk = page.k[Page::k_chunk(tile, step, r, i)];
            const float r0 = page.ratio[0][16 * tile + r], r1 = page.ratio[0][16 * tile + r + 8];
            uint4 c = chunk;
            c.x = merge_word(c.x, r0, r0, r0, r0);
            c.y = merge_word(c.y, r1, r1, r1, r1);
            c.z = merge_word(c.z, r0, r0, r0, r0);
            c.w = merge_word(c.w, r1, r1, r1, r1);
            chunk = c;
        }
        __syncwarp();
    }
    const int half = lane >> 1 & 1, c = 2 * (lane / 4) + (lane & 1), i = first_i + c / 8, w = c / 4 % 2 * 2;
    const ChannelValues values([&](int n) {
        const int tile = 2 * (half ^ n / 8) + n % 8 / 4, r = n % 4 * 2;
        const uint32_t* even = page.k_words(Page::k_chunk(tile, step, r, i)) + w;
        const uint32_t* odd = page.k_words(Page::k_chunk(tile, step, r + 1, i)) + w;
        return gather_bytes(even[0], even[1], odd[0], odd[1], c % 4);
    });
    const FoundCode found = find_code(values, bits, true, lane);
    if (half == 0) page.searched[D / 4 * i + 8 * step + c % 8] = found.best;
}

// A warp encodes 16 channels of V, those of one tile, and leaves a byte per code where the stage-1 codes were. A channel is two
// lanes' work: they share the candidates of the search and the final codes.
template <int D>
__device__ __forceinline__ void encode_v(PageImage<D>& page, int tile, int bits, bool search, bool unit_slope, int lane) {
    using Page = PageImage<D>;
    const int r = lane / 4;
    merge_v(page, tile, lane);
    const int w0 = lane & 1, half = lane >> 1 & 1;
    const auto word_at = [&](int n) -> uint32_t& {
        return page.v_words(Page::v_chunk(tile, half ^ n / 8, r, n % 8 / 2))[2 * (n % 2) + w0];
    };
    const ChannelValues of(word_at);
    const auto [best, largest] = find_code(of, bits, search, lane);
    const __half2 inverse = __half2half2(reciprocal(best.step)), bias = halves_1024(128);
    const __half2 zero = __hsub2(halves_1024(best.zero + 128), bias);
    const __half2 levels = half2_of(bits == 4 ? 0x4b804b80u : 0x42004200u);  // 15, 3
    uint32_t sum = 0, codes = 0, squares = 0, products = 0;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kChannelWords / 2; ++n) {
        const auto encode = [&](__half2 v) { return step_codes_clamped(__hsub2(v, zero), inverse, levels); };
        const uint32_t code = __byte_perm(encode(of.x[2 * n]), encode(of.x[2 * n + 1]), 0x6420);
        word_at(n) = code;
        sum = __dp4a(of.u[n], 0x01010101u, sum);
        codes = __dp4a(code, 0x01010101u, codes);
        squares = __dp4a(of.u[n], of.u[n], squares);
        products = __dp4a(of.u[n], code, products);
    }
    sum += __shfl_xor_sync(kWholeWarp, sum, 2);
    codes += __shfl_xor_sync(kWholeWarp, codes, 2);
    int step = best.step;
    if (unit_slope) {
        squares += __shfl_xor_sync(kWholeWarp, squares, 2);
        products += __shfl_xor_sync(kWholeWarp, products, 2);
        const ChannelSums sums{int(sum), int(codes), int(squares), int(products)};
        step = give_slope(page, 1, tile, bits, half == 0, step, sums, lane);
    }
    if (half == 0) {
        page.channels[1][D / 8 * r + 2 * tile + w0] = {uint8_t(step),
                                                       uint8_t(code_of(largest - best.zero, best.step, bits == 4 ? 15 : 3)),
                                                       int8_t(best.zero), int16_t(sum - kPageTokens * 128), int16_t(codes)};
    }
}

// Packs the bytes that encode_v left; the whole CTA does, after all tiles.
template <int D>
__device__ __forceinline__ void pack_v(PageImage<D>& page, int bits, uint8_t* piece, const PieceOffsets& at) {
    const int per_byte = bits == 4 ? 2 : 4;
    const int run = bits == 4 ? v_stored_channels(D, 4) / 8 : v_stored_channels(D, 2) / 8;  // channels of a lane
    uint4* to = reinterpret_cast<uint4*>(piece + at.v_codes);
    const int loads = run / per_byte;
    for (int n = threadIdx.x; n < loads * 32; n += RowShape<D>::kThreads) {
        const int group = n / 64, step = n / 32 % 2, r = n % 32 / 4, i = n % 4;
        uint4 out = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int channel = run * r + 2 * (per_byte * group + k);
            if (k >= per_byte || channel >= D) break;
            const uint4 c = page.v[PageImage<D>::v_chunk(channel % (D / 8) / 2, step, channel / (D / 8), i)];
            out.x |= c.x << bits * k;
            out.y |= c.y << bits * k;
            out.z |= c.z << bits * k;
            out.w |= c.w << bits * k;
        }
        to[n] = out;
    }
}

// Adds up each token's |V codes| into v_sum, which is zero before. The warps' loads are all of the same step and quarter.
template <int D>
__device__ __forceinline__ void sum_v(PageImage<D>& page) {
    static_assert(RowShape<D>::kWarps % 2 == 0, "a thread keeps to the tokens of one step");
    const int lane = threadIdx.x % 32;
    uint32_t sum[2][2] = {};  // [w1]: tokens 8 b for b = 0 and 2, 1 and 3
    for (int n = threadIdx.x; n < PageImage<D>::kChunks; n += RowShape<D>::kThreads) {
        const uint4 c = page.v[PageImage<D>::v_chunk(n)];
        const uint32_t w[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const uint32_t magnitude = __vabsdiffu4(w[k] ^ kSignBits, kSignBits);
            sum[k / 2][0] += magnitude & 0x00ff00ffu;
            sum[k / 2][1] += magnitude >> 8 & 0x00ff00ffu;
        }
    }
#pragma unroll
    for (int h = 4; h <= 16; h *= 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k / 2][k % 2] += __shfl_xor_sync(kWholeWarp, sum[k / 2][k % 2], h);
    }
    if (lane >= 4) return;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        const int b = k % 4;
        const int token = 32 * (k / 4) + 8 * b + 2 * lane + threadIdx.x / 32 % 2;
        atomicAdd(&page.v_sum[token], int(sum[k / 4][b % 2] >> b / 2 * 16 & 0xffff));
    }
}

// Token t of the page, by thread t: the ratios that merge scales, V's exponents, and the end of the piece.
template <int D>
__device__ __forceinline__ void merge_scales(PageImage<D>& page, const EncodeOptions& options, bool keeps_own_scales,
                                             uint8_t* piece, const PieceOffsets& at, int t) {
    const int lane = t % 32;
    const float k_max = page_max(page.scale[0], lane), v_max = page_max(page.scale[1], lane);
    const float k_ratio = merge_ratio(page.scale[0][t], k_max, 0);
    int exponent = 0;
    if (options.v_exponents && at.v_bits != 8) {
        const auto magnitude = [&](int j) { return token_magnitude(page.v_sum[j], page.scale[1][j]); };
        const float most = warp_max(fmaxf(magnitude(lane), magnitude(lane + 32)));
        const float own = magnitude(t);  // v_exponent of codec.h
        exponent = exponent_below_normal(own, most);
        if (own > 0.0f) exponent = min(exponent, exponent_below_normal(page.scale[1][t], v_max));
    }
    const float v_ratio = merge_ratio(page.scale[1][t], v_max, exponent);
    page.ratio[0][t] = k_ratio;
    page.ratio[1][t] = v_ratio;
    const bool merge_k = __any_sync(kWholeWarp, k_ratio != 1.0f), merge_v = __any_sync(kWholeWarp, v_ratio != 1.0f);
    if (lane == 0) {
        page.merge[0][t / 32] = merge_k;
        page.merge[1][t / 32] = merge_v;
    }
    const int next = __shfl_down_sync(kWholeWarp, exponent, 1);
    if (t % 2 == 0) piece[at.v_exponents + t / 2] = uint8_t(exponent | next << 4);
    auto* end = reinterpret_cast<uint32_t*>(piece + at.k_scale);
    constexpr int kOwn = 2 + kTurningBytes / 4;  // ChannelLayout::own_scales()
    const int words = (at.bytes - at.k_scale) / 4, pairs = t - 2;
    uint32_t word = 0;
    if (t < 2) page.page_scale[t] = t == 0 ? k_max : v_max;  // stored with the last channels; at 8 bits there is none
    const bool is_0 = t == 0 ? at.k_bits == 8 : t == 1 && at.v_bits == 8;
    if (options.k_turning && at.k_bits != 8 && pairs >= 0 && 4 * pairs < kTurningBytes)
        word = lowest_bytes(reinterpret_cast<const uint4*>(page.scale[0])[pairs]);
    if (keeps_own_scales) {
        const float k_own = page_max(page.own[0], lane), v_own = page_max(page.own[1], lane);
        word = t == kOwn ? __float_as_uint(k_own) : t == kOwn + 1 ? __float_as_uint(v_own) : word;
    }
    if ((t >= 2 || is_0) && t < words) end[t] = word;
}

// K (tensor 0) or V as a token page has it. The whole CTA does.
template <int D>
__device__ __forceinline__ void store_bytes(const PageImage<D>& page, int tensor, uint8_t* codes, uint8_t* scales) {
    using Image = PageImage<D>;
    for (int n = threadIdx.x; n < Image::kChunks; n += RowShape<D>::kThreads)
        reinterpret_cast<uint4*>(codes)[n] = tensor == 0 ? page.k[Image::k_chunk(n)] : page.v[Image::v_chunk(n)];
    if (threadIdx.x < kPageTokens) reinterpret_cast<float*>(scales)[threadIdx.x] = page.scale[tensor][threadIdx.x];
}

// Closes the page. All threads of the CTA, after the image is complete; v_sum is zero if exponents are wanted.
template <int D>
__device__ __forceinline__ void close_page(PageImage<D>& page, int k_bits, int v_bits, const EncodeOptions& options,
                                           bool keeps_own_scales, uint8_t* piece) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const PieceOffsets at(ChannelLayout(D, k_bits, v_bits));
    const bool k_bytes = k_bits == 8, v_bytes = v_bits == 8;
    if (options.v_exponents && !v_bytes) {
        sum_v(page);
        __syncthreads();
    }
    if (threadIdx.x < kPageTokens) merge_scales(page, options, keeps_own_scales, piece, at, threadIdx.x);
    __syncthreads();
    static_assert(RowShape<D>::kWarps >= D / 16, "a warp takes one unit of V and at most one of K");
    const bool k_search = options.k_search && k_bits == 2;
    if (k_search) {
        if (warp < D / 16) search_k(page, warp, k_bits, lane);
        __syncthreads();
    }
    if (warp < D / 16 && !v_bytes) encode_v(page, warp, v_bits, options.v_search, options.unit_slope, lane);
    const int k_unit = RowShape<D>::kWarps - 1 - warp;
    if (k_unit < D / 32 && !k_bytes) encode_k(page, k_unit, k_bits, k_search, options.unit_slope, piece, lane);
    __syncthreads();
    auto* scales = reinterpret_cast<float*>(piece + at.k_scale);
    if (k_bytes) {
        store_bytes(page, 0, piece, piece + at.k_step);
    } else {
        store_channels(page, 0, k_bits, options, piece + at.k_step, piece + at.k_zero, scales);
    }
    if (v_bytes) {
        store_bytes(page, 1, piece + at.v_codes, piece + at.v_step);
    } else {
        store_channels(page, 1, v_bits, options, piece + at.v_step, piece + at.v_zero, scales + 1);
        pack_v(page, v_bits, piece, at);
    }
}

}  // namespace ta::cuda
