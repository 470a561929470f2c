// Every page codec that this CPU runs against the definitions of kernels/format, bit for bit.
#include "kernels/cpu/page_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/format/rotation.h"
#include "kernels/format/turning.h"

namespace ta::cpu {
namespace {

constexpr int kHeadDims[] = {64, 96, 128, 256};

struct PageCodecTest : testing::TestWithParam<ta_cpu_isa> {
    void SetUp() override {
        const Kernels* kernels = find_kernels(GetParam());
        if (!kernels) GTEST_SKIP() << "this CPU or build does not run these kernels";
        codec = kernels->codec;
    }
    const PageCodec* codec = nullptr;
};
// AVX-VNNI shares the codec of AVX2.
INSTANTIATE_TEST_SUITE_P(
    Isa, PageCodecTest, testing::Values(TA_CPU_ISA_SCALAR, TA_CPU_ISA_AVX2, TA_CPU_ISA_AVX512), [](const auto& param) {
        return std::string(param.param == TA_CPU_ISA_SCALAR ? "scalar" : param.param == TA_CPU_ISA_AVX2 ? "avx2" : "avx512");
    });

// ------------------------------------------------------------------------------------------- number formats

// A 16-bit format with e exponent bits, by its definition.
struct Format16 {
    DType type;
    int exponent_bits, mantissa_bits;
    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    int max_exponent() const { return (1 << exponent_bits) - 1; }

    double value(uint16_t h) const {
        const int e = h >> mantissa_bits & max_exponent(), m = h & ((1 << mantissa_bits) - 1);
        const double sign = h >> 15 ? -1.0 : 1.0;
        if (e == max_exponent()) return m ? std::numeric_limits<double>::quiet_NaN() : sign * HUGE_VAL;
        if (e == 0) return sign * std::ldexp(double(m), 1 - bias() - mantissa_bits);
        return sign * std::ldexp(double(m + (1 << mantissa_bits)), e - bias() - mantissa_bits);
    }
    // Nearest even by scaling to units of the last place.
    uint16_t round(float x) const {
        const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
        if (std::isinf(x)) return uint16_t(sign | max_exponent() << mantissa_bits);
        const double a = std::fabs(double(x));
        int e = a == 0.0 ? 1 - bias() : std::ilogb(a);
        e = std::max(e, 1 - bias());
        const double units = std::nearbyint(std::ldexp(a, mantissa_bits - e));  // exact but for this rounding
        // Counted from zero, the encodings of the magnitudes are consecutive.
        const double encoding = units + std::ldexp(double(e + bias() - 1), mantissa_bits);
        const double infinite = std::ldexp(double(max_exponent()), mantissa_bits);
        return uint16_t(sign | uint16_t(std::min(encoding, infinite)));
    }
};
constexpr Format16 kFormats[] = {{DType::kF16, 5, 10}, {DType::kBf16, 8, 7}};

TEST_P(PageCodecTest, WidensEvery16BitValue) {
    std::vector<uint16_t> in(65536);
    for (int i = 0; i < 65536; ++i) in[i] = uint16_t(i);
    std::vector<float> out(in.size());
    for (const Format16& format : kFormats) {
        EXPECT_EQ(codec->to_float(in.data(), format.type, 65536, false, out.data()), 0);
        for (int i = 0; i < 65536; ++i) {
            const double expected = format.value(uint16_t(i));
            if (std::isnan(expected)) {
                ASSERT_TRUE(std::isnan(out[i])) << i;
            } else {
                ASSERT_EQ(double(out[i]), expected) << i;
                ASSERT_EQ(std::signbit(out[i]), std::signbit(expected)) << i;
            }
        }
    }
}

TEST_P(PageCodecTest, RoundsToNearestEven) {
    std::mt19937 random(1);
    for (const Format16& format : kFormats) {
        std::vector<float> in;
        for (int i = 0; i < 65536; ++i) {
            const auto h = uint16_t(i);
            const double a = format.value(h), b = format.value(uint16_t(h + 1));
            if (!std::isfinite(a)) continue;
            in.push_back(float(a));
            // The point half way to the next magnitude, and its neighbours; beyond the last one lies infinity.
            const double next = std::isfinite(b) && (h & 0x7fff) != 0x7fff ? b : 2 * a - format.value(uint16_t(h - 1));
            const auto middle = float((a + next) / 2);
            for (float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, float(next) * 2)}) in.push_back(x);
        }
        for (int i = 0; i < 100000; ++i) {
            const auto x = std::bit_cast<float>(uint32_t(random()));
            if (!std::isnan(x)) in.push_back(x);
        }
        for (float x : {FLT_MAX, -FLT_MAX, FLT_TRUE_MIN, HUGE_VALF, -HUGE_VALF, 65519.996f, 65520.0f}) in.push_back(x);
        std::vector<uint16_t> out(in.size());
        codec->from_float(in.data(), int64_t(in.size()), format.type, out.data());
        for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(out[i], format.round(in[i])) << std::hexfloat << in[i];
    }
}

TEST_P(PageCodecTest, NanStaysNan) {
    const float in[] = {std::bit_cast<float>(0x7f800001u), std::bit_cast<float>(0x7fffffffu), std::bit_cast<float>(0xff800001u),
                        std::bit_cast<float>(0x7fc00000u)};
    for (const Format16& format : kFormats) {
        uint16_t out[4];
        codec->from_float(in, 4, format.type, out);
        for (uint16_t h : out) EXPECT_TRUE(std::isnan(format.value(h)));
    }
}

TEST_P(PageCodecTest, F32PassesThrough) {
    std::vector<float> in = {0.0f, -0.0f, FLT_TRUE_MIN, -FLT_MAX, 3.5f}, out(in.size()), back(in.size());
    EXPECT_EQ(codec->to_float(in.data(), DType::kF32, 5, false, out.data()), 0);
    codec->from_float(in.data(), 5, DType::kF32, back.data());
    EXPECT_EQ(std::memcmp(in.data(), out.data(), 20), 0);
    EXPECT_EQ(std::memcmp(in.data(), back.data(), 20), 0);
}

TEST_P(PageCodecTest, FindsTheFirstNonfiniteValue) {
    const uint16_t bad_f16[] = {0x7c00, 0xfc00, 0x7c01, 0xffff};
    const uint16_t bad_bf16[] = {0x7f80, 0xff80, 0x7fc0, 0x5b81 /* above 2^56 */};
    const float bad_f32[] = {HUGE_VALF, -HUGE_VALF, NAN, -std::nextafter(kMaxMagnitude, HUGE_VALF)};
    for (int64_t n : {1, 2, 15, 64, 255, 256, 257, 700}) {
        std::vector<uint16_t> f16(n, 0x7bff), bf16(n, 0x5b80);
        std::vector<float> f32(n, -kMaxMagnitude);
        EXPECT_EQ(codec->find_nonfinite(f16.data(), DType::kF16, n), n);
        EXPECT_EQ(codec->find_nonfinite(bf16.data(), DType::kBf16, n), n);
        EXPECT_EQ(codec->find_nonfinite(f32.data(), DType::kF32, n), n);
        for (int64_t at = n - 1; at >= 0; at -= 1 + n / 40) {
            const int k = int(at % 4);
            f16[at] = bad_f16[k];
            bf16[at] = bad_bf16[k];
            f32[at] = bad_f32[k];
            ASSERT_EQ(codec->find_nonfinite(f16.data(), DType::kF16, n), at);
            ASSERT_EQ(codec->find_nonfinite(bf16.data(), DType::kBf16, n), at);
            ASSERT_EQ(codec->find_nonfinite(f32.data(), DType::kF32, n), at);
        }
    }
    EXPECT_EQ(codec->find_nonfinite(nullptr, DType::kF32, 0), 0);
}

TEST_P(PageCodecTest, SaturatesAndCounts) {
    const uint16_t f16[] = {0x7c00, 0xfc00, 0x7e00, 0x3c00, 0x7bff, 0xfbff};
    const float f16_out[] = {65504.0f, -65504.0f, 0.0f, 1.0f, 65504.0f, -65504.0f};
    const float f32[] = {HUGE_VALF, -HUGE_VALF, NAN, FLT_MAX, -0x1p57f, 0x1p56f, 2.0f};
    const float f32_out[] = {0x1p56f, -0x1p56f, 0.0f, 0x1p56f, -0x1p56f, 0x1p56f, 2.0f};
    const uint16_t bf16[] = {0x7f80, 0xff80, 0x7fff, 0x5b81, 0x5b80};
    const float bf16_out[] = {0x1p56f, -0x1p56f, 0.0f, 0x1p56f, 0x1p56f};
    float out[8];
    EXPECT_EQ(codec->to_float(f16, DType::kF16, 6, true, out), 3);
    for (int i = 0; i < 6; ++i) EXPECT_EQ(out[i], f16_out[i]) << i;
    EXPECT_EQ(codec->to_float(f32, DType::kF32, 7, true, out), 5);
    for (int i = 0; i < 7; ++i) EXPECT_EQ(out[i], f32_out[i]) << i;
    EXPECT_EQ(codec->to_float(bf16, DType::kBf16, 5, true, out), 4);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(out[i], bf16_out[i]) << i;
}

// ------------------------------------------------------------------------------------------------- stage 1

TEST_P(PageCodecTest, AmaxAndQuantizeAreStage1) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (int n : {1, 3, 16, 17, 64, 96, 128, 256, 1000}) {
        for (float size : {1.0f, 1e4f, 1e-30f, 0x1p-126f, 0x1p-130f, 0x1p50f, 0.0f}) {
            std::vector<float> x(n);
            for (float& v : x) v = size * normal(random);
            x[n / 2] = -0.0f;
            float largest = 0.0f;
            for (float v : x) largest = std::max(largest, std::fabs(v));
            ASSERT_EQ(codec->amax(x.data(), n), largest);
            for (int levels : {kStage1Levels, kIntFlashLevels}) {
                // The value's own scale, and smaller ones as a universal scale may be.
                for (float scale : {stage1_scale(largest, levels), stage1_scale(largest / 3, levels), 0.0f}) {
                    std::vector<int8_t> out(n + 8, 99);
                    int64_t clamped = 0;
                    for (float v : x) {
                        clamped += scale == 0.0f ? std::fabs(v) >= kMinAmax : std::fabs(rintf(v / scale)) > float(levels);
                    }
                    ASSERT_EQ(codec->quantize(x.data(), n, scale, levels, out.data()), clamped) << size << " " << scale;
                    for (int i = 0; i < n; ++i) ASSERT_EQ(out[i], stage1_code(x[i], scale, levels)) << x[i] << " / " << scale;
                    for (int i = n; i < n + 8; ++i) ASSERT_EQ(out[i], 99);
                    std::vector<int8_t> rest(n + 8, 99);
                    codec->quantize_rest(x.data(), n, scale, levels, out.data(), rest.data());
                    for (int i = 0; i < n; ++i) {
                        const double units = scale == 0.0f ? 0.0 : std::nearbyint(128.0 * double(x[i] / scale));
                        ASSERT_EQ(128 * out[i] + rest[i], int(std::clamp(units, -128.0 * levels, 128.0 * levels))) << x[i];
                    }
                    for (int i = n; i < n + 8; ++i) ASSERT_EQ(rest[i], 99);
                }
            }
        }
    }
}

TEST_P(PageCodecTest, QuantizeBreaksTiesToEven) {
    std::vector<float> x;
    for (int k = -130; k <= 130; ++k) x.push_back((float(k) + 0.5f) * 0.125f);
    std::vector<int8_t> out(x.size());
    codec->quantize(x.data(), int64_t(x.size()), 0.125f, kStage1Levels, out.data());
    for (size_t i = 0; i < x.size(); ++i) {
        const double expected = std::clamp(std::nearbyint(double(x[i]) * 8), -119.0, 119.0);
        ASSERT_EQ(out[i], int(expected)) << x[i];
    }
}

TEST_P(PageCodecTest, RotateIsTheDefinition) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (int d : {64, 128, 256}) {
        for (uint64_t seed : {0ull, 42ull}) {
            std::vector<float> x(d), sign(d), expected;
            for (int c = 0; c < d; ++c) {
                x[c] = normal(random) * (c % 17 == 0 ? 30.0f : 1.0f);
                sign[c] = rotation_sign(seed, c) ? -1.0f : 1.0f;
            }
            expected = x;
            rotate(expected.data(), d, seed);
            codec->rotate(x.data(), d, sign.data());
            ASSERT_EQ(std::memcmp(x.data(), expected.data(), d * sizeof(float)), 0);
        }
    }
}

// -------------------------------------------------------------------------------------------- token pieces

// A piece at the alignment that slots give it, nothing beyond its end.
struct Piece {
    explicit Piece(size_t n, uint8_t fill) : bytes(n), data(new (std::align_val_t(128)) uint8_t[n]) {
        std::fill_n(data.get(), n, fill);
    }
    struct Free {
        void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(128)); }
    };
    size_t bytes;
    std::unique_ptr<uint8_t[], Free> data;
};

void draw_codes(std::mt19937& random, HeadStage1& head, int d) {
    for (int i = 0; i < kPageTokens * d; ++i) {
        head.k[i] = int8_t(int(random() % 239) - 119);
        head.v[i] = int8_t(int(random() % 239) - 119);
    }
    for (int t = 0; t < kPageTokens; ++t) {
        head.k_scale[t] = float(random() % 1000 + 1) * 1e-3f;
        head.v_scale[t] = float(random() % 1000 + 1) * 1e-3f;
    }
}

TEST_P(PageCodecTest, TokenPiecesRoundTripInParts) {
    std::mt19937 random(4);
    // Parts that fill a page one after the other, and some in an empty page: tokens of V that lie 8 apart are stored together.
    const std::vector<std::vector<std::array<int, 2>>> pages = {{{0, 1}, {1, 2}, {2, 17}, {17, 40}, {40, 63}, {63, 64}},
                                                                {{0, 64}},
                                                                {{0, 32}, {32, 64}},
                                                                {{3, 30}},
                                                                {{7, 33}, {33, 62}}};
    for (int d : kHeadDims) {
        const TokenLayout layout(d);
        auto in = std::make_unique<HeadStage1>(), out = std::make_unique<HeadStage1>();
        draw_codes(random, *in, d);
        for (const auto& parts : pages) {
            Piece piece(layout.bytes(), 0xA5);
            std::vector<uint8_t> expected(layout.bytes(), 0xA5);
            const int begin = parts[0][0];
            for (const auto& [first, last] : parts) {
                codec->store_token_piece(*in, d, first, last, piece.data.get());
                for (int t = first; t < last; ++t) {
                    for (int c = 0; c < d; ++c) {
                        expected[layout.k_codes() + k_place(d, 8, t, c).byte] = uint8_t(in->k[t * d + c]);
                        expected[layout.v_codes() + v_place(d, 8, t, c).byte] = uint8_t(in->v[t * d + c]);
                    }
                    std::memcpy(&expected[layout.k_scale() + t * 4], &in->k_scale[t], 4);
                    std::memcpy(&expected[layout.v_scale() + t * 4], &in->v_scale[t], 4);
                }
                ASSERT_EQ(std::memcmp(piece.data.get(), expected.data(), expected.size()), 0) << "other tokens were touched";
                std::memset(static_cast<void*>(out.get()), 0x5A, sizeof *out);
                codec->load_token_piece(piece.data.get(), d, last, *out);
                const size_t values = size_t(last - begin) * d, scales = size_t(last - begin) * sizeof(float);
                ASSERT_EQ(std::memcmp(out->k + begin * d, in->k + begin * d, values), 0);
                ASSERT_EQ(std::memcmp(out->v + begin * d, in->v + begin * d, values), 0);
                ASSERT_EQ(std::memcmp(out->k_scale + begin, in->k_scale + begin, scales), 0);
                ASSERT_EQ(std::memcmp(out->v_scale + begin, in->v_scale + begin, scales), 0);
                for (int i = last * d; i < kPageTokens * d; ++i) {
                    ASSERT_EQ(out->k[i], 0x5A) << "tokens beyond the last were written";
                    ASSERT_EQ(out->v[i], 0x5A) << "tokens beyond the last were written";
                }
            }
        }
    }
}

// ------------------------------------------------------------------------------------------ channel pieces

enum class Data { kRandom, kZeros, kConstantChannels, kOutliers, kDenormals, kHotToken, kHeavyTail, kExtremes, kEnd };

// Stage 1 of made-up keys and values. Odd kinds have a scale per token, even ones one scale for the page.
std::unique_ptr<HeadStage1> draw_head(Data data, int d, std::mt19937& random) {
    std::normal_distribution<float> normal;
    auto head = std::make_unique<HeadStage1>();
    for (bool is_v : {false, true}) {
        std::vector<float> x(size_t(kPageTokens) * d);
        for (int t = 0; t < kPageTokens; ++t) {
            for (int c = 0; c < d; ++c) {
                float v = normal(random);
                switch (data) {
                    case Data::kZeros:
                        v = t % 8 < 7 ? (c % 2 ? 0.0f : -0.0f) : v * float(c % 5 == 0);
                        break;
                    case Data::kConstantChannels:
                        v = c % 3 == 0 ? float(c) * 0.1f : c % 3 == 1 ? v : 0.0f;
                        break;
                    case Data::kOutliers:
                        v *= c % 31 == 4 ? 1e4f : 1.0f;
                        break;
                    case Data::kDenormals:
                        v *= t % 2 ? 0x1p-118f : 0x1p-130f;
                        break;
                    case Data::kHotToken:
                        v *= t == 11 ? 500.0f : t % 9 == 0 ? 1e-3f : 1.0f;
                        break;
                    case Data::kHeavyTail:
                        v = v * v * v * std::exp(normal(random));
                        break;
                    case Data::kExtremes:
                        v = (t * 7 + c) % 3 == 0 ? -119.0f : (t + c) % 2 ? 119.0f : float(t - 32);
                        break;
                    default:
                        break;
                }
                x[size_t(t) * d + c] = v;
            }
        }
        int8_t* q = is_v ? head->v : head->k;
        float* scale = is_v ? head->v_scale : head->k_scale;
        const bool per_token = int(data) % 2 == 1 || data == Data::kHotToken || data == Data::kDenormals;
        float page = 0.0f;
        for (float v : x) page = std::max(page, std::fabs(v));
        for (int t = 0; t < kPageTokens; ++t) {
            float own = 0.0f;
            for (int c = 0; c < d; ++c) own = std::max(own, std::fabs(x[size_t(t) * d + c]));
            scale[t] = stage1_scale(per_token ? own : page, kStage1Levels);
            for (int c = 0; c < d; ++c) q[t * d + c] = stage1_code(x[size_t(t) * d + c], scale[t], kStage1Levels);
        }
    }
    return head;
}

// The definition: every channel by encode_channel, every code by its place.
std::vector<uint8_t> encode_by_definition(const HeadStage1& in, const ChannelLayout& layout, const EncodeOptions& options) {
    const int d = layout.d;
    std::vector<uint8_t> piece(layout.bytes(), 0);
    for (bool is_v : {false, true}) {
        const int bits = is_v ? layout.v_bits : layout.k_bits;
        const int8_t* q = is_v ? in.v : in.k;
        const float* scale = is_v ? in.v_scale : in.k_scale;
        if (bits == 8) {  // as they come
            std::memcpy(&piece[is_v ? layout.v_parameters() : layout.k_parameters()], scale, kPageTokens * sizeof(float));
            for (int n = 0; n < kPageTokens * d; ++n) {
                const CodePlace p = is_v ? v_place(d, 8, n / d, n % d) : k_place(d, 8, n / d, n % d);
                piece[(is_v ? layout.v_codes() : layout.k_codes()) + p.byte] = uint8_t(q[n]);
            }
            continue;
        }
        const float page_scale = *std::max_element(scale, scale + kPageTokens);
        std::vector<int8_t> merged(size_t(kPageTokens) * d);
        std::vector<uint8_t> codes(merged.size());
        std::vector<float> magnitude(kPageTokens);
        for (int t = 0; t < kPageTokens; ++t) {
            int sum = 0;
            for (int c = 0; c < d; ++c) sum += std::abs(q[t * d + c]);
            magnitude[t] = token_magnitude(sum, scale[t]);
        }
        const float most = *std::ranges::max_element(magnitude);
        for (int t = 0; t < kPageTokens; ++t) {
            const int e = is_v && options.v_exponents ? v_exponent(scale[t], page_scale, magnitude[t], most) : 0;
            const float ratio = merge_ratio(scale[t], page_scale, e);
            for (int c = 0; c < d; ++c) merged[size_t(t) * d + c] = merge_code(q[t * d + c], ratio);
            if (is_v) {
                uint8_t& byte = piece[layout.v_exponents() + t / 2];
                byte = uint8_t(byte | (t % 2 ? e << 4 : e));
            }
        }
        const Stage2Options stage2 = is_v ? v_stage2(options) : k_stage2(options, bits);
        std::vector<ChannelCode> channels(d);
        for (int c = 0; c < d; ++c) channels[c] = encode_channel(merged.data() + c, codes.data() + c, d, bits, stage2);
        const float gain = options.unit_slope
                               ? give_unit_slope(merged.data(), codes.data(), d, bits, options.fractional_zero, channels.data())
                               : 1.0f;
        for (int c = 0; c < d; ++c) {
            const ChannelCode code = channels[c];
            piece[(is_v ? layout.v_step() : layout.k_step()) + c] = step_byte(code.step, zero_fraction8(code.zero8), bits);
            piece[(is_v ? layout.v_zero() : layout.k_zero()) + c] = uint8_t(int8_t(zero_floor(code.zero8)));
            for (int t = 0; t < kPageTokens; ++t) {
                const CodePlace p = is_v ? v_place(d, bits, t, c) : k_place(d, bits, t, c);
                uint8_t& byte = piece[(is_v ? layout.v_codes() : layout.k_codes()) + p.byte];
                byte = uint8_t(byte | codes[size_t(t) * d + c] << p.shift);
            }
        }
        const float stored_scale = page_scale * gain;
        std::memcpy(&piece[is_v ? layout.v_scale() : layout.k_scale()], &stored_scale, 4);
    }
    return piece;
}

constexpr EncodeOptions kOptions[] = {
    {}, {true, true}, {true, true, true, true, true}, {.fractional_zero = false, .v_search = true, .unit_slope = true}};

TEST_P(PageCodecTest, EncodesChannelPiecesAsDefined) {
    std::mt19937 random(5);
    for (int d : kHeadDims) {
        for (int k_bits : {8, 4, 2}) {
            for (int v_bits : {8, 4, 2}) {
                const ChannelLayout layout(d, k_bits, v_bits);
                for (int data = 0; data < int(Data::kEnd); ++data) {
                    // Everything on, and in turn with parts off: all combinations meet all data over the head sizes.
                    const auto head = draw_head(Data(data), d, random);
                    for (const EncodeOptions& options : {kOptions[2], kOptions[(data + d / 32 + k_bits) % 2], kOptions[3]}) {
                        const std::vector<uint8_t> expected = encode_by_definition(*head, layout, options);
                        Piece piece(layout.bytes(), 0xA5);
                        codec->encode_channel_piece(*head, layout, options, piece.data.get());
                        for (size_t i = 0; i < piece.bytes; ++i) {
                            ASSERT_EQ(piece.data[i], expected[i]) << "byte " << i << " d " << d << " bits " << k_bits << v_bits
                                                                  << " data " << data << " search " << options.v_search;
                        }
                    }
                }
            }
        }
    }
}

// A page without turning pairs gives scales back whose lowest bytes are no pairs.
TEST_P(PageCodecTest, UnitSlopeLeavesNoTurningPairs) {
    std::mt19937 random(12);
    for (const bool search : {false, true}) {
        const auto head = draw_head(Data::kRandom, 64, random);
        for (float& scale : head->k_scale) scale = std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & ~255u);
        const ChannelLayout layout(64, 2, 2);
        Piece piece(layout.bytes(), 0xA5);
        codec->encode_channel_piece(*head, layout, {.k_search = search, .unit_slope = true, .k_turning = true},
                                    piece.data.get());
        auto out = std::make_unique<HeadStage1>();
        codec->decode_channel_piece(piece.data.get(), layout, 40, *out);
        for (int t = 0; t < 40; ++t) ASSERT_EQ(std::bit_cast<uint32_t>(out->k_scale[t]) & 255u, 0u);
    }
}

// Tokens of zeros of either sign and tokens whose codes are all 0 under the page's scale, beside some that are not, beside one,
// and alone; K is 0 in the last.
TEST_P(PageCodecTest, TokensOfZerosOfVTakeTheLargestExponent) {
    std::mt19937 random(8);
    for (int d : kHeadDims) {
        for (int bits : {4, 2}) {
            for (int present : {40, 1, 0}) {
                const auto head = draw_head(Data::kRandom, d, random);
                for (int t = present; t < kPageTokens; ++t) {
                    std::fill_n(head->v + t * d, d, int8_t(0));
                    if (t % 2) head->v_scale[t] = 0.0f;
                }
                if (present == 0) {
                    std::fill_n(head->v_scale, kPageTokens, 0.0f);
                    std::fill_n(head->k_scale, kPageTokens, 0.0f);
                    std::fill_n(head->k, kPageTokens * d, int8_t(0));
                }
                const ChannelLayout layout(d, bits, bits);
                Piece piece(layout.bytes(), 0xA5);
                codec->encode_channel_piece(*head, layout, kOptions[2], piece.data.get());
                auto out = std::make_unique<HeadStage1>();
                codec->decode_channel_piece(piece.data.get(), layout, kPageTokens, *out);
                float page_scale;
                std::memcpy(&page_scale, piece.data.get() + layout.v_scale(), sizeof page_scale);
                ASSERT_EQ(page_scale == 0.0f, present == 0);
                for (int t = 0; t < kPageTokens; ++t) {
                    const int e = piece.data[layout.v_exponents() + t / 2] >> (t % 2 * 4) & 15;
                    if (t < present) {
                        ASSERT_LT(e, 15) << t;
                    } else {
                        ASSERT_EQ(e, 15) << t;
                        ASSERT_EQ(out->v_scale[t], page_scale * 0x1p-15f) << t;
                    }
                }
                for (int c = 0; c < d && present == 0; ++c) ASSERT_EQ(out->k[c], 0);
            }
        }
    }
}

TEST_P(PageCodecTest, EncodingIgnoresBytesBeyondTheHead) {
    std::mt19937 random(6);
    const ChannelLayout layout(96, 2, 2);
    const auto head = draw_head(Data::kRandom, 96, random);
    Piece a(layout.bytes(), 0), b(layout.bytes(), 0xFF);
    codec->encode_channel_piece(*head, layout, kOptions[2], a.data.get());
    std::fill(head->k + 64 * 96, std::end(head->k), int8_t(-128));
    std::fill(head->v + 64 * 96, std::end(head->v), int8_t(-128));
    codec->encode_channel_piece(*head, layout, kOptions[2], b.data.get());
    EXPECT_EQ(std::memcmp(a.data.get(), b.data.get(), a.bytes), 0);
}

TEST_P(PageCodecTest, DecodesTheStoredValues) {
    std::mt19937 random(7);
    for (int d : kHeadDims) {
        for (int k_bits : {8, 4, 2}) {
            for (int v_bits : {8, 4, 2}) {
                const ChannelLayout layout(d, k_bits, v_bits);
                for (Data data : {Data::kRandom, Data::kHotToken, Data::kExtremes}) {
                    const auto head = draw_head(data, d, random);
                    std::vector<uint8_t> bytes = encode_by_definition(*head, layout, kOptions[2]);
                    Piece piece(layout.bytes(), 0);
                    std::memcpy(piece.data.get(), bytes.data(), bytes.size());
                    // Padding: behind the turning pairs, and codes of channels that do not exist.
                    const size_t end = layout.k_turning() + kTurningBytes;
                    std::memset(&piece.data[end], 0xFF, piece.bytes - end);
                    for (int t = 0; t < kPageTokens; ++t) {
                        for (int c = d; c < v_stored_channels(d, v_bits); ++c) {  // at 2 bits alone
                            const CodePlace p = v_place(d, v_bits, t, c);
                            piece.data[layout.v_codes() + p.byte] |= uint8_t(((1 << v_bits) - 1) << p.shift);
                        }
                    }
                    const int last = data == Data::kRandom ? 64 : 37;
                    auto out = std::make_unique<HeadStage1>();
                    std::memset(static_cast<void*>(out.get()), 0x5A, sizeof *out);
                    codec->decode_channel_piece(piece.data.get(), layout, last, *out);
                    float k_scale, v_scale;
                    std::memcpy(&k_scale, &bytes[layout.k_scale()], 4);
                    std::memcpy(&v_scale, &bytes[layout.v_scale()], 4);
                    for (int t = 0; t < last; ++t) {
                        const int e = bytes[layout.v_exponents() + t / 2] >> (t % 2 * 4) & 15;
                        ASSERT_EQ(out->k_scale[t], k_bits == 8 ? head->k_scale[t] : k_scale);
                        ASSERT_EQ(out->v_scale[t], v_bits == 8 ? head->v_scale[t] : std::ldexp(v_scale, -e));
                        for (int c = 0; c < d; ++c) {
                            const auto value = [&](bool is_v) {
                                const int bits = is_v ? v_bits : k_bits;
                                if (bits == 8) return int((is_v ? head->v : head->k)[t * d + c]);
                                const CodePlace p = is_v ? v_place(d, bits, t, c) : k_place(d, bits, t, c);
                                const uint8_t code = bytes[(is_v ? layout.v_codes() : layout.k_codes()) + p.byte];
                                const uint8_t step = bytes[(is_v ? layout.v_step() : layout.k_step()) + c];
                                const auto zero = int8_t(bytes[(is_v ? layout.v_zero() : layout.k_zero()) + c]);
                                const double exact = (code >> p.shift & ((1 << bits) - 1)) * step_of(step, bits) + zero +
                                                     fraction_eighths_of(step, bits) / 8.0;
                                return std::clamp(int(std::floor(exact + 0.5)), -kStage1Levels, kStage1Levels);
                            };
                            ASSERT_EQ(out->k[t * d + c], value(false));
                            ASSERT_EQ(out->v[t * d + c], value(true));
                        }
                    }
                    if (last < kPageTokens) {
                        EXPECT_EQ(out->k[last * d], 0x5A);
                        EXPECT_EQ(out->v[last * d], 0x5A);
                    }
                }
            }
        }
    }
}

// Stage 2 rounds up to 126. A page that is reopened there, filled with other tokens and closed again must not leave
// INT8: cut off at 119, where the value came from, it cannot. (Channel: -114..119, so 119 -> 126; without the cut
// -112..126 -> 128.)
TEST_P(PageCodecTest, ReopenedPagesCloseWithinInt8) {
    for (int bits : {4, 2}) {
        const int d = 64, kept = 32;
        const ChannelLayout layout(d, bits, bits);
        auto head = std::make_unique<HeadStage1>();
        for (int t = 0; t < kPageTokens; ++t) {
            for (int c = 0; c < d; ++c) {
                const int low = -119 + c % 10;
                head->k[t * d + c] = head->v[t * d + c] = int8_t(t < kept ? 119 - c / 10 : low);
            }
            head->k_scale[t] = head->v_scale[t] = 1.0f;
        }
        Piece piece(layout.bytes(), 0);
        codec->encode_channel_piece(*head, layout, {}, piece.data.get());
        codec->decode_channel_piece(piece.data.get(), layout, kept, *head);
        for (int t = kept; t < kPageTokens; ++t) {
            for (int c = 0; c < d; ++c) head->k[t * d + c] = head->v[t * d + c] = int8_t(-119 + c % 8);
            head->k_scale[t] = head->v_scale[t] = 1.0f;
        }
        codec->encode_channel_piece(*head, layout, {}, piece.data.get());
        for (int c = 0; c < d; ++c) {
            const int k_step = step_of(piece.data[layout.k_step() + c], bits),
                      v_step = step_of(piece.data[layout.v_step() + c], bits);
            ASSERT_LE(std::max(k_step, v_step), bits == 4 ? 16 : 80);
            for (int t = 0; t < kPageTokens; ++t) {
                const CodePlace k = k_place(d, bits, t, c), v = v_place(d, bits, t, c);
                const int mask = (1 << bits) - 1;
                const int k_code = piece.data[layout.k_codes() + k.byte] >> k.shift & mask;
                const int v_code = piece.data[layout.v_codes() + v.byte] >> v.shift & mask;
                ASSERT_LE(k_code * k_step + int8_t(piece.data[layout.k_zero() + c]), 127);
                ASSERT_LE(v_code * v_step + int8_t(piece.data[layout.v_zero() + c]), 127);
            }
        }
    }
}

}  // namespace
}  // namespace ta::cpu
