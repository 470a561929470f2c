// The body of page_codec.h, written as plain loops over channels that the compiler vectorises. Included by one source file per
// instruction set and by nothing else: everything is in an unnamed namespace, so each gets its own code.
#pragma once

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

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

// Where the codes of K or of V stand in a head's piece (k_place, v_place): the byte of a code is the sum of its token's part and its
// channel's. Codes of four channels of K from a multiple of 4 on, and of tokens j, j + 8, j + 16 and j + 24 of V, are bytes that
// follow each other, so they are moved as words.
struct KPlaces {
    uint16_t token[kPageTokens], channel[kMaxHeadDim];
    uint8_t shift[kPageTokens];
};
struct VPlaces {
    uint16_t token[kPageTokens], channel[kMaxHeadDim];
    uint8_t shift[kMaxHeadDim];
};

constexpr int index_of(int d, int bits) {
    return (d == 64 ? 0 : d == 96 ? 1 : d == 128 ? 2 : 3) * 3 + (bits == 2 ? 0 : bits == 4 ? 1 : 2);
}

constexpr KPlaces make_k_places(int d, int bits) {
    KPlaces p{};
    for (int c = 0; c < d; ++c) p.channel[c] = uint16_t(k_place(d, bits, 0, c).byte);
    for (int j = 0; j < kPageTokens; ++j) {
        p.token[j] = uint16_t(k_place(d, bits, j, 0).byte);
        p.shift[j] = uint8_t(k_place(d, bits, j, 0).shift);
    }
    return p;
}
constexpr VPlaces make_v_places(int d, int bits) {
    VPlaces p{};
    for (int c = 0; c < d; ++c) {
        p.channel[c] = uint16_t(v_place(d, bits, 0, c).byte);
        p.shift[c] = uint8_t(v_place(d, bits, 0, c).shift);
    }
    for (int j = 0; j < kPageTokens; ++j) p.token[j] = uint16_t(v_place(d, bits, j, 0).byte);
    return p;
}

struct AllPlaces {
    KPlaces k[4 * 3];
    VPlaces v[4 * 3];
};
constexpr AllPlaces make_all_places() {
    AllPlaces all{};
    for (const int d : {64, 96, 128, 256}) {
        for (const int bits : {2, 4, 8}) {
            all.k[index_of(d, bits)] = make_k_places(d, bits);
            all.v[index_of(d, bits)] = make_v_places(d, bits);
        }
    }
    return all;
}
constexpr AllPlaces kPlaces = make_all_places();

const KPlaces& k_places(int d, int bits) {
    return kPlaces.k[index_of(d, bits)];
}
const VPlaces& v_places(int d, int bits) {
    return kPlaces.v[index_of(d, bits)];
}

// Adds codes that are at most as wide as their place to bytes that have none there.
TA_HD inline void add_word(uint8_t* to, uint32_t codes) {
    uint32_t word;
    std::memcpy(&word, to, sizeof word);
    word |= codes;
    std::memcpy(to, &word, sizeof word);
}

// The bytes of four tokens of V, 8 apart, from `from` on, channel by channel.
template <class Byte>
TA_HD inline uint32_t bytes_of_tokens(const Byte* from, int stride, int c) {
    return uint32_t(uint8_t(from[c])) | uint32_t(uint8_t(from[8 * stride + c])) << 8 |
           uint32_t(uint8_t(from[16 * stride + c])) << 16 | uint32_t(uint8_t(from[24 * stride + c])) << 24;
}

// K of tokens [first, last) at 8 bits.
void store_k_bytes(const HeadStage1& in, int d, int first, int last, uint8_t* codes, uint8_t* scales) {
    const KPlaces& at = k_places(d, 8);
    for (int j = first; j < last; ++j) {
        uint8_t* to = codes + at.token[j];
        for (int c = 0; c < d; c += 4) std::memcpy(to + at.channel[c], in.k + j * d + c, 4);
    }
    std::memcpy(scales + size_t(first) * sizeof(float), in.k_scale + first, size_t(last - first) * sizeof(float));
}
void load_k_bytes(const uint8_t* codes, const uint8_t* scales, int d, int last, HeadStage1& out) {
    const KPlaces& at = k_places(d, 8);
    for (int j = 0; j < last; ++j) {
        const uint8_t* from = codes + at.token[j];
        for (int c = 0; c < d; c += 4) std::memcpy(out.k + j * d + c, from + at.channel[c], 4);
    }
    std::memcpy(out.k_scale, scales, size_t(last) * sizeof(float));
}

// Calls words(j) for each token j of [first, last) that begins four tokens 8 apart, all in the range, and byte(j) for the others.
template <class Words, class Byte>
TA_HD inline void for_tokens_of_v(int first, int last, Words words, Byte byte) {
    for (int half = first / 32 * 32; half < last; half += 32) {
        for (int j = half; j < half + 8; ++j) {
            if (j >= first && j + 24 < last) {
                words(j);
                continue;
            }
            for (int t = j; t < half + 32; t += 8) {
                if (t >= first && t < last) byte(t);
            }
        }
    }
}

// The same of V.
void store_v_bytes(const HeadStage1& in, int d, int first, int last, uint8_t* codes, uint8_t* scales) {
    const VPlaces& at = v_places(d, 8);
    for_tokens_of_v(
        first, last,
        [&](int j) {
            for (int c = 0; c < d; ++c) {
                const uint32_t word = bytes_of_tokens(in.v + j * d, d, c);
                std::memcpy(codes + at.token[j] + at.channel[c], &word, sizeof word);
            }
        },
        [&](int j) {
            for (int c = 0; c < d; ++c) codes[at.token[j] + at.channel[c]] = uint8_t(in.v[j * d + c]);
        });
    std::memcpy(scales + size_t(first) * sizeof(float), in.v_scale + first, size_t(last - first) * sizeof(float));
}
void load_v_bytes(const uint8_t* codes, const uint8_t* scales, int d, int last, HeadStage1& out) {
    const VPlaces& at = v_places(d, 8);
    for_tokens_of_v(
        0, last,
        [&](int j) {
            int8_t* const to = out.v + j * d;
            for (int c = 0; c < d; ++c) {
                uint32_t word;
                std::memcpy(&word, codes + at.token[j] + at.channel[c], sizeof word);
                for (int i = 0; i < 4; ++i) to[8 * i * d + c] = int8_t(word >> 8 * i);
            }
        },
        [&](int j) {
            for (int c = 0; c < d; ++c) out.v[j * d + c] = int8_t(codes[at.token[j] + at.channel[c]]);
        });
    std::memcpy(out.v_scale, scales, size_t(last) * sizeof(float));
}

void store_token_piece(const HeadStage1& in, int d, int first, int last, uint8_t* piece) {
    const TokenLayout at(d);
    store_k_bytes(in, d, first, last, piece + at.k_codes(), piece + at.k_scale());
    store_v_bytes(in, d, first, last, piece + at.v_codes(), piece + at.v_scale());
}

void load_token_piece(const uint8_t* piece, int d, int last, HeadStage1& out) {
    const TokenLayout at(d);
    load_k_bytes(piece + at.k_codes(), piece + at.k_scale(), d, last, out);
    load_v_bytes(piece + at.v_codes(), piece + at.v_scale(), d, last, out);
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

// Squared error of the slice under (step, zero) per channel, exact in fp32: below 2^24. Rounding by the reciprocal may round a
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
            const int step = unit_slope_step(int(sums.step[c]), slope, int(sums.q[c]), int(sums.c[c]), bits);
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

void encode_k(const HeadStage1& in, const ChannelLayout& layout, const EncodeOptions& options, uint8_t* piece) {
    const KPlaces& at = k_places(layout.d, layout.k_bits);
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
            uint8_t* k = piece + layout.k_codes() + at.token[j];
            for (int c = 0; c < kSlice; c += 4) {
                uint32_t codes;
                std::memcpy(&codes, p.code + j * kSlice + c, sizeof codes);
                add_word(k + at.channel[first + c], codes << at.shift[j]);
            }
        }
    }
    const float gain = store_metadata(sums, layout.d, layout.k_bits, stage2, piece + layout.k_step(), piece + layout.k_zero());
    if (stage2.unit_slope) scale = unit_slope_scale(scale, gain, options.k_turning);
    std::memcpy(piece + layout.k_scale(), &scale, sizeof scale);
    for (int j = 0; j < kPageTokens && options.k_turning; ++j)
        piece[layout.k_turning() + j] = uint8_t(std::bit_cast<uint32_t>(in.k_scale[j]));
}

void encode_v(const HeadStage1& in, const ChannelLayout& layout, const EncodeOptions& options, uint8_t* piece) {
    const int d = layout.d;
    const VPlaces& at = v_places(d, layout.v_bits);
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
        for (int j = 0; j < kPageTokens; j = j % 32 == 7 ? j + 25 : j + 1) {
            uint8_t* v = piece + layout.v_codes() + at.token[j];
            const uint16_t* channel = at.channel + first;
            const uint8_t* shift = at.shift + first;
            for (int c = 0; c < kSlice; ++c)
                add_word(v + channel[c], bytes_of_tokens(p.code + j * kSlice, kSlice, c) << shift[c]);
        }
    }
    const float gain = store_metadata(sums, d, layout.v_bits, stage2, piece + layout.v_step(), piece + layout.v_zero());
    if (stage2.unit_slope) scale = unit_slope_scale(scale, gain, false);
    for (int j = 0; j < kPageTokens; ++j) piece[layout.v_exponents() + j / 2] |= uint8_t(exponent[j] << (j % 2 * 4));
    std::memcpy(piece + layout.v_scale(), &scale, sizeof scale);
}

void encode_channel_piece(const HeadStage1& in, const ChannelLayout& layout, const EncodeOptions& options, uint8_t* piece) {
    const int d = layout.d;
    std::memset(piece, 0, layout.bytes());
    if (layout.k_bits == 8) {
        store_k_bytes(in, d, 0, kPageTokens, piece + layout.k_codes(), piece + layout.k_parameters());
    } else {
        encode_k(in, layout, options, piece);
    }
    if (layout.v_bits == 8) {
        store_v_bytes(in, d, 0, kPageTokens, piece + layout.v_codes(), piece + layout.v_parameters());
    } else {
        encode_v(in, layout, options, piece);
    }
}

// A value of 4 or 2 bits. Fractions of zero points are rounded to the nearest, halves up. The encoded value was within +-119;
// cutting the rounding off there comes closer to it, and keeps the bounds of stage 2 when the page is closed again.
int8_t reopened_value(int code, uint8_t step, uint8_t zero, int bits) {
    const int zero8 = 8 * int8_t(zero) + fraction_eighths_of(step, bits);
    const int v = code * step_of(step, bits) + ((zero8 + 4) >> 3);
    return int8_t(v > kStage1Levels ? kStage1Levels : v < -kStage1Levels ? -kStage1Levels : v);
}

void decode_k(const uint8_t* piece, const ChannelLayout& layout, int last, HeadStage1& out) {
    const KPlaces& at = k_places(layout.d, layout.k_bits);
    const int d = layout.d, mask = (1 << layout.k_bits) - 1;
    float scale;
    std::memcpy(&scale, piece + layout.k_scale(), sizeof scale);
    for (int j = 0; j < last; ++j) {
        const uint8_t* k = piece + layout.k_codes() + at.token[j];
        for (int c = 0; c < d; ++c)
            out.k[j * d + c] = reopened_value(k[at.channel[c]] >> at.shift[j] & mask, piece[layout.k_step() + c],
                                              piece[layout.k_zero() + c], layout.k_bits);
        out.k_scale[j] = scale;
    }
    const TurningPairs turning = turning_of_channel(piece, layout);
    for (int j = 0; j < kPageTokens && turning.any(); ++j) out.k_scale[j] = scale_with_turning(scale, turning, j);
}

void decode_v(const uint8_t* piece, const ChannelLayout& layout, int last, HeadStage1& out) {
    const VPlaces& at = v_places(layout.d, layout.v_bits);
    const int d = layout.d, mask = (1 << layout.v_bits) - 1;
    float scale;
    std::memcpy(&scale, piece + layout.v_scale(), sizeof scale);
    for (int j = 0; j < last; ++j) {
        const uint8_t* v = piece + layout.v_codes() + at.token[j];
        for (int c = 0; c < d; ++c)
            out.v[j * d + c] = reopened_value(v[at.channel[c]] >> at.shift[c] & mask, piece[layout.v_step() + c],
                                              piece[layout.v_zero() + c], layout.v_bits);
        const int exponent = piece[layout.v_exponents() + j / 2] >> (j % 2 * 4) & 15;
        out.v_scale[j] = reopened_scale(scale, exponent);
    }
}

void decode_channel_piece(const uint8_t* piece, const ChannelLayout& layout, int last, HeadStage1& out) {
    const int d = layout.d;
    if (layout.k_bits == 8) {
        load_k_bytes(piece + layout.k_codes(), piece + layout.k_parameters(), d, last, out);
        std::memcpy(out.k_scale, piece + layout.k_parameters(), sizeof out.k_scale);  // with the bytes of turning pairs
    } else {
        decode_k(piece, layout, last, out);
    }
    if (layout.v_bits == 8) {
        load_v_bytes(piece + layout.v_codes(), piece + layout.v_parameters(), d, last, out);
    } else {
        decode_v(piece, layout, last, out);
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
