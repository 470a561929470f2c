// The body of page_codec.h, written as plain loops over channels that the compiler vectorises. Included by one source file per
// instruction set and by nothing else: everything is in an unnamed namespace, so each gets its own code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "kernels/cpu/page_codec.h"
#include "kernels/format/query_rest.h"
#include "kernels/format/rotation.h"
#include "kernels/format/turning.h"

namespace ta::cpu {
namespace {

// ----------------------------------------------------------------------------------------------------------- number formats

TA_HD inline float f16_to_f32(uint16_t h) {
    const uint32_t magnitude = uint32_t(h & 0x7fff) << 13, sign = uint32_t(h & 0x8000) << 16;
    // Rebias by a multiplication, which also normalises denormals; Inf and NaN get the fp32 exponent.
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : std::bit_cast<uint32_t>(scaled);
    return std::bit_cast<float>(bits | sign);
}

TA_HD inline uint16_t f32_to_f16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
    uint32_t h;
    if (magnitude > 0x7f800000u) {
        h = 0x7e00;
    } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
        h = 0x7c00;
    } else if (magnitude < 0x38800000u) {  // denormal: adding 0.5 leaves the rounded mantissa in the low bits
        h = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        h = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    }
    return uint16_t(h | (bits >> 16 & 0x8000u));
}

TA_HD inline float bf16_to_f32(uint16_t h) {
    return std::bit_cast<float>(uint32_t(h) << 16);
}

TA_HD inline uint16_t f32_to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

template <class Load>
TA_HD inline int64_t find_in(int64_t n, Load load) {
    constexpr int64_t kStep = 256;
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep) {
        int bad = 0;
        for (int64_t j = i; j < i + kStep; ++j) bad |= !(std::fabs(load(j)) <= kMaxMagnitude);
        if (bad) break;
    }
    for (; i < n; ++i) {
        if (!(std::fabs(load(i)) <= kMaxMagnitude)) return i;
    }
    return n;
}

int64_t find_nonfinite(const void* x, DType type, int64_t n) {
    const auto* h = static_cast<const uint16_t*>(x);
    const auto* f = static_cast<const float*>(x);
    switch (type) {
        case DType::kF16:
            return find_in(n, [h](int64_t i) { return f16_to_f32(h[i]); });
        case DType::kBf16:
            return find_in(n, [h](int64_t i) { return bf16_to_f32(h[i]); });
        default:
            return find_in(n, [f](int64_t i) { return f[i]; });
    }
}

int64_t to_float(const void* x, DType type, int64_t n, bool saturate, float* out) {
    const auto* h = static_cast<const uint16_t*>(x);
    if (type == DType::kF16) {
        for (int64_t i = 0; i < n; ++i) out[i] = f16_to_f32(h[i]);
    } else if (type == DType::kBf16) {
        for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(h[i]);
    } else {
        std::memcpy(out, x, size_t(n) * sizeof(float));
    }
    if (!saturate) return 0;
    const float limit = type == DType::kF16 ? 65504.0f : kMaxMagnitude;
    int64_t replaced = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float v = out[i];
        if (std::fabs(v) <= limit) continue;
        out[i] = v != v ? 0.0f : v > 0.0f ? limit : -limit;
        ++replaced;
    }
    return replaced;
}

void from_float(const float* x, int64_t n, DType type, void* out) {
    auto* h = static_cast<uint16_t*>(out);
    if (type == DType::kF16) {
        for (int64_t i = 0; i < n; ++i) h[i] = f32_to_f16(x[i]);
    } else if (type == DType::kBf16) {
        for (int64_t i = 0; i < n; ++i) h[i] = f32_to_bf16(x[i]);
    } else {
        std::memcpy(out, x, size_t(n) * sizeof(float));
    }
}

// ----------------------------------------------------------------------------------------------------------------- stage 1

// Magnitudes compare as their bits do, and a maximum of integers is one the compiler vectorises.
float amax(const float* x, int64_t n) {
    int32_t a = 0;
    for (int64_t i = 0; i < n; ++i) {
        const int32_t v = std::bit_cast<int32_t>(x[i]) & 0x7fffffff;
        a = v > a ? v : a;
    }
    return std::bit_cast<float>(a);
}

int64_t quantize(const float* x, int64_t n, float scale, int levels, int8_t* out) {
    if (scale == 0.0f) {
        std::memset(out, 0, size_t(n));
        int64_t lost = 0;
        for (int64_t i = 0; i < n; ++i) lost += std::fabs(x[i]) >= kMinAmax;
        return lost;
    }
    const float limit = float(levels);
    int32_t clamped = 0;
    for (int64_t i = 0; i < n; ++i) {
        float r = rintf(x[i] / scale);
        clamped += std::fabs(r) > limit;
        r = r > limit ? limit : r;
        r = r < -limit ? -limit : r;
        out[i] = int8_t(int32_t(r));
    }
    return clamped;
}

void quantize_rest(const float* x, int64_t n, float scale, int levels, const int8_t* codes, int8_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = stage1_rest(x[i], scale, levels, codes[i]);
}

using Lanes = float __attribute__((vector_size(64)));

// hadamard_in_place (rotation.h) of D channels, 16 at a time: within 16 a butterfly is the other half of each pair plus or
// minus one's own.
template <int D>
TA_HD inline void rotate_lanes(float* x, const float* sign) {
    Lanes v[D / 16];
    for (int i = 0; i < D / 16; ++i) {
        Lanes s;
        std::memcpy(&v[i], x + 16 * i, sizeof v[i]);
        std::memcpy(&s, sign + 16 * i, sizeof s);
        v[i] *= s;
        constexpr Lanes s1 = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
        constexpr Lanes s2 = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
        constexpr Lanes s4 = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
        constexpr Lanes s8 = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
        v[i] = __builtin_shufflevector(v[i], v[i], 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14) + v[i] * s1;
        v[i] = __builtin_shufflevector(v[i], v[i], 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13) + v[i] * s2;
        v[i] = __builtin_shufflevector(v[i], v[i], 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11) + v[i] * s4;
        v[i] = __builtin_shufflevector(v[i], v[i], 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7) + v[i] * s8;
    }
    for (int h = 1; h < D / 16; h *= 2) {
        for (int i = 0; i < D / 16; i += 2 * h) {
            for (int j = i; j < i + h; ++j) {
                const Lanes a = v[j], b = v[j + h];
                v[j] = a + b;
                v[j + h] = a - b;
            }
        }
    }
    for (int i = 0; i < D / 16; ++i) {
        v[i] *= rotation_norm(D);
        std::memcpy(x + 16 * i, &v[i], sizeof v[i]);
    }
}

void rotate_head(float* x, int d, const float* sign) {
    switch (d) {
        case 64:
            return rotate_lanes<64>(x, sign);
        case 128:
            return rotate_lanes<128>(x, sign);
        default:
            return rotate_lanes<256>(x, sign);
    }
}

// ------------------------------------------------------------------------------------------- code order <-> natural order

// Tables for the byte of a code of K or of V: k_place and v_place are sums of a token's part and a channel's.
struct Half {
    const uint16_t *token, *channel;
    int d;
};
struct PlaceTables {
    uint16_t k_channel[kMaxHeadDim], v_channel[kMaxHeadDim];
    uint8_t v_shift[kMaxHeadDim];
    uint16_t k_token[kPageTokens], v_token[kPageTokens];
    uint8_t k_shift[kPageTokens];

    Half k_half(int d) const { return {k_token, k_channel, d}; }
    Half v_half(int d) const { return {v_token, v_channel, d}; }
};

PlaceTables make_tables(int d, int k_bits, int v_bits) {
    PlaceTables t;
    for (int c = 0; c < d; ++c) {
        t.k_channel[c] = uint16_t(k_place(d, k_bits, 0, c).byte);
        t.v_channel[c] = uint16_t(v_place(d, v_bits, 0, c).byte);
        t.v_shift[c] = uint8_t(v_place(d, v_bits, 0, c).shift);
    }
    for (int j = 0; j < kPageTokens; ++j) {
        t.k_token[j] = uint16_t(k_place(d, k_bits, j, 0).byte);
        t.k_shift[j] = uint8_t(k_place(d, k_bits, j, 0).shift);
        t.v_token[j] = uint16_t(v_place(d, v_bits, j, 0).byte);
    }
    return t;
}

// Tokens [first, last) at 8 bits.
void store_bytes(const int8_t* values, const float* scale, const Half& h, int first, int last, uint8_t* codes,
                 uint8_t* scales) {
    for (int j = first; j < last; ++j) {
        uint8_t* to = codes + h.token[j];
        for (int c = 0; c < h.d; ++c) to[h.channel[c]] = uint8_t(values[j * h.d + c]);
    }
    std::memcpy(scales + size_t(first) * sizeof(float), scale + first, size_t(last - first) * sizeof(float));
}
void load_bytes(const uint8_t* codes, const uint8_t* scales, const Half& h, int last, int8_t* values, float* scale) {
    for (int j = 0; j < last; ++j) {
        const uint8_t* from = codes + h.token[j];
        for (int c = 0; c < h.d; ++c) values[j * h.d + c] = int8_t(from[h.channel[c]]);
    }
    std::memcpy(scale, scales, size_t(last) * sizeof(float));
}

void store_token_piece(const HeadStage1& in, int d, int first, int last, uint8_t* piece) {
    const TokenLayout at(d);
    const PlaceTables t = make_tables(d, 8, 8);
    store_bytes(in.k, in.k_scale, t.k_half(d), first, last, piece + at.k_codes(), piece + at.k_scale());
    store_bytes(in.v, in.v_scale, t.v_half(d), first, last, piece + at.v_codes(), piece + at.v_scale());
}

void load_token_piece(const uint8_t* piece, int d, int last, HeadStage1& out) {
    const TokenLayout at(d);
    const PlaceTables t = make_tables(d, 8, 8);
    load_bytes(piece + at.k_codes(), piece + at.k_scale(), t.k_half(d), last, out.k, out.k_scale);
    load_bytes(piece + at.v_codes(), piece + at.v_scale(), t.v_half(d), last, out.v, out.v_scale);
}

// ----------------------------------------------------------------------------------------------------------------- stage 2

// Channels that are encoded together. Each is encoded by itself; all of a page would take 102 KiB of a caller's stack.
constexpr int kSlice = 32;

struct ChannelSlice {
    alignas(64) uint8_t code[kPageTokens * kSlice];  // [token, channel]
    alignas(64) float x[kPageTokens * kSlice];       // merged stage-1 codes as floats
    float step[kSlice], zero[kSlice];
};

// Sums over a page's tokens that the codes of a head's channels are judged by, of values q and codes c, all exact.
struct HeadSums {
    float step[kMaxHeadDim], zero[kMaxHeadDim];
    float q[kMaxHeadDim], c[kMaxHeadDim], qq[kMaxHeadDim], qc[kMaxHeadDim], max_code[kMaxHeadDim];
};

// Squared error of the slice under (step, zero) per channel, exact in fp32: below 2^24. Rounding by the reciprocal may break a
// tie the other way, which costs the same error.
void search_errors(const ChannelSlice& p, float levels, const float* step, const float* zero, float* error) {
    float inverse[kSlice];
    for (int c = 0; c < kSlice; ++c) {
        inverse[c] = 1.0f / step[c];
        error[c] = 0.0f;
    }
    for (int j = 0; j < kPageTokens; ++j) {
        const float* x = p.x + j * kSlice;
        for (int c = 0; c < kSlice; ++c) {
            float code = rintf((x[c] - zero[c]) * inverse[c]);
            code = code < 0.0f ? 0.0f : code;
            code = code > levels ? levels : code;
            const float e = x[c] - (code * step[c] + zero[c]);
            error[c] += e * e;
        }
    }
}

void search(ChannelSlice& p, int bits, const float* min, const float* max) {
    const int levels = (1 << bits) - 1;
    float best[kSlice], error[kSlice], step[kSlice], zero[kSlice];
    search_errors(p, float(levels), p.step, p.zero, best);
    for (int i = 0; i < search_steps(bits); ++i) {
        for (int place = 0; place < search_places(bits); ++place) {
            for (int c = 0; c < kSlice; ++c) {
                const StepZero sz = search_candidate(int(min[c]), int(max[c]), bits, i, place);
                step[c] = float(sz.step);
                zero[c] = float(sz.zero);
            }
            search_errors(p, float(levels), step, zero, error);
            for (int c = 0; c < kSlice; ++c) {
                if (error[c] >= best[c]) continue;
                best[c] = error[c];
                p.step[c] = step[c];
                p.zero[c] = zero[c];
            }
        }
    }
}

// Encodes p.x, channels from `first` on, into p.code and sums: encode_channel of codec.h for all of its channels, up to the zero
// points.
void encode_channels(ChannelSlice& p, int bits, bool searched, int first, HeadSums& sums) {
    const int levels = (1 << bits) - 1;
    float min[kSlice], max[kSlice], q[kSlice] = {}, codes[kSlice] = {}, qq[kSlice] = {}, qc[kSlice] = {}, max_code[kSlice] = {};
    for (int c = 0; c < kSlice; ++c) min[c] = max[c] = p.x[c];
    for (int j = 1; j < kPageTokens; ++j) {
        const float* x = p.x + j * kSlice;
        for (int c = 0; c < kSlice; ++c) {
            min[c] = x[c] < min[c] ? x[c] : min[c];
            max[c] = x[c] > max[c] ? x[c] : max[c];
        }
    }
    for (int c = 0; c < kSlice; ++c) {
        p.step[c] = float(stage2_step(int(min[c]), int(max[c]), levels));
        p.zero[c] = min[c];
    }
    if (searched) search(p, bits, min, max);
    for (int j = 0; j < kPageTokens; ++j) {
        const float* x = p.x + j * kSlice;
        uint8_t* code = p.code + j * kSlice;
        for (int c = 0; c < kSlice; ++c) {
            // A division: its rounded quotient is a tie only where the exact one is.
            float r = rintf((x[c] - p.zero[c]) / p.step[c]);
            r = r < 0.0f ? 0.0f : r;
            r = r > float(levels) ? float(levels) : r;
            code[c] = uint8_t(int32_t(r));
            max_code[c] = r > max_code[c] ? r : max_code[c];
            q[c] += x[c];
            codes[c] += r;
            qq[c] += x[c] * x[c];
            qc[c] += x[c] * r;
        }
    }
    constexpr size_t kBytes = kSlice * sizeof(float);
    std::memcpy(sums.step + first, p.step, kBytes);
    std::memcpy(sums.zero + first, p.zero, kBytes);
    std::memcpy(sums.q + first, q, kBytes);
    std::memcpy(sums.c + first, codes, kBytes);
    std::memcpy(sums.qq + first, qq, kBytes);
    std::memcpy(sums.qc + first, qc, kBytes);
    std::memcpy(sums.max_code + first, max_code, kBytes);
}

// Writes the steps and zero points of a head. Returns what its page scale is to be multiplied with.
float store_metadata(HeadSums& sums, int d, int bits, Stage2Options options, uint8_t* step_at, uint8_t* zero_at) {
    float gain = 1.0f;
    if (options.unit_slope) {  // give_unit_slope of codec.h
        int64_t variance = 0, covariance = 0;
        for (int c = 0; c < d; ++c) {
            const ChannelSlope slope = channel_slope(int(sums.q[c]), int(sums.c[c]), int(sums.qq[c]), int(sums.qc[c]));
            const int step = unit_slope_step(int(sums.step[c]), slope, bits);
            sums.step[c] = float(step);
            variance += slope.variance;
            covariance += int64_t(slope.covariance) * step;
        }
        gain = unit_slope_gain(variance, covariance);
    }
    const int unit = options.fractional_zero ? fraction_unit(bits) : 8;
    for (int c = 0; c < d; ++c) {
        const int step = int(sums.step[c]), zero = int(sums.zero[c]);
        int zero8 = 8 * zero;
        if (options.unit_slope || options.fractional_zero)
            zero8 = unit_slope_zero8(zero, int(sums.q[c]), int(sums.c[c]), gain, step, int(sums.max_code[c]), unit);
        step_at[c] = step_byte(step, zero_fraction8(zero8), bits);
        zero_at[c] = uint8_t(int8_t(zero_floor(zero8)));
    }
    return gain;
}

// The factors of the codes of each token of K or V when they are merged; `exponent` [64] or all zeros.
void merge_ratios(const float* scale, const uint8_t* exponent, float max_scale, float* ratio) {
    for (int j = 0; j < kPageTokens; ++j) ratio[j] = merge_ratio(scale[j], max_scale, exponent[j]);
}

// The merged codes of the channels from q on.
void merge_tokens(const int8_t* q, const float* ratio, int d, float* x) {
    for (int j = 0; j < kPageTokens; ++j) {
        for (int c = 0; c < kSlice; ++c) x[j * kSlice + c] = rintf(float(q[j * d + c]) * ratio[j]);
    }
}

float largest(const float* scale) {
    float m = 0.0f;
    for (int j = 0; j < kPageTokens; ++j) m = scale[j] > m ? scale[j] : m;
    return m;
}

void encode_k(const HeadStage1& in, const ChannelLayout& layout, const PlaceTables& t, const EncodeOptions& options,
              uint8_t* piece) {
    ChannelSlice p;
    HeadSums sums;
    const uint8_t no_exponent[kPageTokens] = {};
    float ratio[kPageTokens];
    float scale = largest(in.k_scale);
    merge_ratios(in.k_scale, no_exponent, scale, ratio);
    const Stage2Options stage2 = k_stage2(options, layout.k_bits);
    for (int first = 0; first < layout.d; first += kSlice) {
        merge_tokens(in.k + first, ratio, layout.d, p.x);
        encode_channels(p, layout.k_bits, stage2.search, first, sums);
        for (int j = 0; j < kPageTokens; ++j) {
            uint8_t* k = piece + layout.k_codes() + t.k_token[j];
            const uint16_t* at = t.k_channel + first;
            for (int c = 0; c < kSlice; ++c) k[at[c]] = uint8_t(k[at[c]] | p.code[j * kSlice + c] << t.k_shift[j]);
        }
    }
    const float gain = store_metadata(sums, layout.d, layout.k_bits, stage2, piece + layout.k_step(), piece + layout.k_zero());
    if (stage2.unit_slope) scale = unit_slope_scale(scale, gain, options.k_turning);
    std::memcpy(piece + layout.k_scale(), &scale, sizeof scale);
    for (int j = 0; j < kPageTokens && options.k_turning; ++j)
        piece[layout.k_turning() + j] = uint8_t(std::bit_cast<uint32_t>(in.k_scale[j]));
}

void encode_v(const HeadStage1& in, const ChannelLayout& layout, const PlaceTables& t, const EncodeOptions& options,
              uint8_t* piece) {
    const int d = layout.d;
    ChannelSlice p;
    HeadSums sums;
    uint8_t exponent[kPageTokens] = {};
    float ratio[kPageTokens];
    float scale = largest(in.v_scale);
    if (options.v_exponents) {
        float magnitude[kPageTokens];
        for (int j = 0; j < kPageTokens; ++j) {
            int sum = 0;
            for (int c = 0; c < d; ++c) sum += std::abs(int(in.v[j * d + c]));
            magnitude[j] = token_magnitude(sum, in.v_scale[j]);
        }
        const float most = largest(magnitude);
        for (int j = 0; j < kPageTokens; ++j) exponent[j] = uint8_t(v_exponent(in.v_scale[j], scale, magnitude[j], most));
    }
    merge_ratios(in.v_scale, exponent, scale, ratio);
    const Stage2Options stage2 = v_stage2(options);
    for (int first = 0; first < d; first += kSlice) {
        merge_tokens(in.v + first, ratio, d, p.x);
        encode_channels(p, layout.v_bits, stage2.search, first, sums);
        for (int j = 0; j < kPageTokens; ++j) {
            uint8_t* v = piece + layout.v_codes() + t.v_token[j];
            const uint16_t* at = t.v_channel + first;
            const uint8_t* shift = t.v_shift + first;
            for (int c = 0; c < kSlice; ++c) v[at[c]] = uint8_t(v[at[c]] | p.code[j * kSlice + c] << shift[c]);
        }
    }
    const float gain = store_metadata(sums, d, layout.v_bits, stage2, piece + layout.v_step(), piece + layout.v_zero());
    if (stage2.unit_slope) scale = unit_slope_scale(scale, gain, false);
    for (int j = 0; j < kPageTokens; ++j) piece[layout.v_exponents() + j / 2] |= uint8_t(exponent[j] << (j % 2 * 4));
    std::memcpy(piece + layout.v_scale(), &scale, sizeof scale);
}

void encode_channel_piece(const HeadStage1& in, const ChannelLayout& layout, const EncodeOptions& options, uint8_t* piece) {
    const int d = layout.d;
    const PlaceTables t = make_tables(d, layout.k_bits, layout.v_bits);
    std::memset(piece, 0, layout.bytes());
    if (layout.k_bits == 8) {
        store_bytes(in.k, in.k_scale, t.k_half(d), 0, kPageTokens, piece + layout.k_codes(), piece + layout.k_parameters());
    } else {
        encode_k(in, layout, t, options, piece);
    }
    if (layout.v_bits == 8) {
        store_bytes(in.v, in.v_scale, t.v_half(d), 0, kPageTokens, piece + layout.v_codes(), piece + layout.v_parameters());
    } else {
        encode_v(in, layout, t, options, piece);
    }
}

// A value of 4 or 2 bits. Fractions of zero points are rounded to the nearest, halves up. The encoded value lay within +-119;
// cutting the rounding off there comes closer to it, and keeps the bounds of stage 2 when the page is closed again.
int8_t reopened_value(int code, uint8_t step, uint8_t zero, int bits) {
    const int zero8 = 8 * int8_t(zero) + fraction_eighths_of(step, bits);
    const int v = code * step_of(step, bits) + ((zero8 + 4) >> 3);
    return int8_t(v > kStage1Levels ? kStage1Levels : v < -kStage1Levels ? -kStage1Levels : v);
}

void decode_k(const uint8_t* piece, const ChannelLayout& layout, const PlaceTables& t, int last, HeadStage1& out) {
    const int d = layout.d, mask = (1 << layout.k_bits) - 1;
    float scale;
    std::memcpy(&scale, piece + layout.k_scale(), sizeof scale);
    for (int j = 0; j < last; ++j) {
        const uint8_t* k = piece + layout.k_codes() + t.k_token[j];
        for (int c = 0; c < d; ++c)
            out.k[j * d + c] = reopened_value(k[t.k_channel[c]] >> t.k_shift[j] & mask, piece[layout.k_step() + c],
                                              piece[layout.k_zero() + c], layout.k_bits);
        out.k_scale[j] = scale;
    }
    const TurningPairs turning = turning_of_channel(piece, layout);
    for (int j = 0; j < kPageTokens && turning.any(); ++j) out.k_scale[j] = scale_with_turning(scale, turning, j);
}

void decode_v(const uint8_t* piece, const ChannelLayout& layout, const PlaceTables& t, int last, HeadStage1& out) {
    const int d = layout.d, mask = (1 << layout.v_bits) - 1;
    float scale;
    std::memcpy(&scale, piece + layout.v_scale(), sizeof scale);
    for (int j = 0; j < last; ++j) {
        const uint8_t* v = piece + layout.v_codes() + t.v_token[j];
        for (int c = 0; c < d; ++c)
            out.v[j * d + c] = reopened_value(v[t.v_channel[c]] >> t.v_shift[c] & mask, piece[layout.v_step() + c],
                                              piece[layout.v_zero() + c], layout.v_bits);
        const int exponent = piece[layout.v_exponents() + j / 2] >> (j % 2 * 4) & 15;
        out.v_scale[j] = reopened_scale(scale, exponent);
    }
}

void decode_channel_piece(const uint8_t* piece, const ChannelLayout& layout, int last, HeadStage1& out) {
    const int d = layout.d;
    const PlaceTables t = make_tables(d, layout.k_bits, layout.v_bits);
    if (layout.k_bits == 8) {
        load_bytes(piece + layout.k_codes(), piece + layout.k_parameters(), t.k_half(d), last, out.k, out.k_scale);
        std::memcpy(out.k_scale, piece + layout.k_parameters(), sizeof out.k_scale);  // with the bytes of turning pairs
    } else {
        decode_k(piece, layout, t, last, out);
    }
    if (layout.v_bits == 8) {
        load_bytes(piece + layout.v_codes(), piece + layout.v_parameters(), t.v_half(d), last, out.v, out.v_scale);
    } else {
        decode_v(piece, layout, t, last, out);
    }
}

constexpr PageCodec kPageCodec = {find_nonfinite,
                                  to_float,
                                  from_float,
                                  amax,
                                  quantize,
                                  quantize_rest,
                                  rotate_head,
                                  store_token_piece,
                                  load_token_piece,
                                  encode_channel_piece,
                                  decode_channel_piece};

}  // namespace
}  // namespace ta::cpu
