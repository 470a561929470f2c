// The codec and the exponentials against the vectors, through internal functions.
#include "kernels/format/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/page_codec.h"
#include "tests/vectors/vectors.h"

namespace ta {
namespace {

using vectors::Array;
using vectors::Case;

std::vector<const cpu::Kernels*> all_kernels() {
    std::vector<const cpu::Kernels*> out;
    for (ta_cpu_isa isa : {TA_CPU_ISA_SCALAR, TA_CPU_ISA_AVX2, TA_CPU_ISA_AVX_VNNI, TA_CPU_ISA_AVX512, TA_CPU_ISA_AMX}) {
        if (const cpu::Kernels* k = cpu::find_kernels(isa)) out.push_back(k);
    }
    return out;
}

// c, s, z and the reconstruction of q1 [64, d] at 4, 3 and 2 bits, by encode_channel and by every page codec.
void check_stage2(const Case& test, const Array<int>& q1) {
    const int d = int(q1.shape[1]);
    std::vector<int8_t> q(q1.size());
    for (size_t i = 0; i < q.size(); ++i) q[i] = int8_t(q1[i]);
    for (int bits : {4, 3, 2}) {
        const std::string b = std::to_string(bits);
        const auto c = test.array<int>("c" + b), s = test.array<int>("s" + b), z = test.array<int>("z" + b);
        std::vector<uint8_t> codes(q.size());
        for (int channel = 0; channel < d; ++channel) {
            const ChannelCode code = encode_channel(q.data() + channel, codes.data() + channel, d, bits, {});
            ASSERT_EQ(code.step, s[channel]) << bits << " bits, channel " << channel;
            ASSERT_EQ(code.zero8, 8 * z[channel]) << bits << " bits, channel " << channel;
            for (int t = 0; t < kPageTokens; ++t) {
                const size_t i = size_t(t) * d + channel;
                ASSERT_EQ(codes[i], c[i]) << bits << " bits, token " << t << ", channel " << channel;
            }
        }
        if (test.has("q1hat" + b)) {
            const auto expected = test.array<int>("q1hat" + b);
            for (size_t i = 0; i < q.size(); ++i) ASSERT_EQ(codes[i] * s[i % d] + z[i % d], expected[i]) << i;
        }
        if (bits == 3) continue;  // not a page's

        auto head = std::make_unique<cpu::HeadStage1>();
        std::copy(q.begin(), q.end(), head->k);
        std::copy(q.begin(), q.end(), head->v);
        std::fill_n(head->k_scale, kPageTokens, 0.25f);
        std::fill_n(head->v_scale, kPageTokens, 0.25f);
        const ChannelLayout layout(d, bits, bits);
        for (const cpu::Kernels* kernels : all_kernels()) {
            std::vector<uint8_t> piece(layout.bytes());
            kernels->codec->encode_channel_piece(*head, layout, {}, piece.data());
            for (int channel = 0; channel < d; ++channel) {
                ASSERT_EQ(piece[layout.k_step() + channel], s[channel]) << kernels->name;
                ASSERT_EQ(piece[layout.v_step() + channel], s[channel]) << kernels->name;
                ASSERT_EQ(int8_t(piece[layout.k_zero() + channel]), z[channel]) << kernels->name;
                ASSERT_EQ(int8_t(piece[layout.v_zero() + channel]), z[channel]) << kernels->name;
                for (int t = 0; t < kPageTokens; ++t) {
                    const CodePlace k = k_place(d, bits, t, channel), v = v_place(d, bits, t, channel);
                    const int mask = (1 << bits) - 1, expected = c[size_t(t) * d + channel];
                    ASSERT_EQ(piece[layout.k_codes() + k.byte] >> k.shift & mask, expected) << kernels->name;
                    ASSERT_EQ(piece[layout.v_codes() + v.byte] >> v.shift & mask, expected) << kernels->name;
                }
            }
        }
    }
}

struct CodecVectors : testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, CodecVectors,
                         testing::Values("codec_normal64", "codec_llm_k128", "codec_outlier1e4", "codec_ties64",
                                         "codec_denormal128", "codec_negzero64", "codec_constchan128"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(CodecVectors, Stage1AndStage2) {
    TA_LOAD_CASE(test, GetParam());
    const auto x = test.array<float>("x");
    const auto q1 = test.array<int>("q1"), tie = test.array<int>("q1_tie");
    const float s1 = test.array<float>("s1")[0];
    for (const cpu::Kernels* kernels : all_kernels()) {
        std::vector<float> wide(x.size());
        const std::vector<uint16_t> halves = test.halves("x");
        kernels->codec->to_float(halves.data(), DType::kF16, int64_t(halves.size()), false, wide.data());
        ASSERT_EQ(wide, x.data);
        const float scale = stage1_scale(kernels->codec->amax(wide.data(), int64_t(wide.size())), kStage1Levels);
        ASSERT_LE(std::fabs(scale - s1), test.get<double>("s1_rtol") * s1);
        std::vector<int8_t> codes(x.size());
        kernels->codec->quantize(wide.data(), int64_t(wide.size()), scale, kStage1Levels, codes.data());
        for (size_t i = 0; i < x.size(); ++i) {
            ASSERT_LE(std::abs(codes[i] - q1[i]), tie[i] ? 1 : 0) << kernels->name << " " << i << " x " << x[i];
        }
    }
    check_stage2(test, q1);
}

TEST(Stage2Vectors, EveryRange) {
    TA_LOAD_CASE(test, "stage2_ranges");
    check_stage2(test, test.array<int>("q1"));
}

// An open page with one scale, frozen at the first maximum, larger values clamped; then stage 2.
TEST(BufferVectors, ClampedCodes) {
    TA_LOAD_CASE(test, "buffer_clamp");
    const auto x = test.array<float>("x");
    const auto q1 = test.array<int>("q1");
    const float s1 = test.array<float>("s1")[0];
    int clamped = 0;
    for (const cpu::Kernels* kernels : all_kernels()) {
        std::vector<int8_t> codes(x.size());
        clamped = int(kernels->codec->quantize(x.data.data(), int64_t(x.size()), s1, kStage1Levels, codes.data()));
        for (size_t i = 0; i < x.size(); ++i) {
            const double exact = double(x[i]) / s1;
            const bool tie = std::fabs(std::fabs(exact - std::trunc(exact)) - 0.5) < 1e-4;
            ASSERT_LE(std::abs(codes[i] - q1[i]), tie ? 1 : 0) << kernels->name << " " << i;
        }
    }
    EXPECT_GT(clamped, 0);
    check_stage2(test, q1);
}

// The folded products: q s splits into two signed bytes, and the integer dot products on codes equal those on
// reconstructions.
TEST(FoldVectors, IntegerProducts) {
    TA_LOAD_CASE(test, "fold_int");
    const auto q1 = test.array<int>("q1"), p1 = test.array<int>("p1");
    for (int bits : {4, 3, 2}) {
        const std::string b = std::to_string(bits);
        const auto c = test.array<int>("c" + b), s = test.array<int>("s" + b), z = test.array<int>("z" + b);
        const auto hi = test.array<int>("hi" + b), lo = test.array<int>("lo" + b);
        const auto qk = test.array<int>("qk" + b), pv = test.array<int>("pv" + b), qz = test.array<int>("qz" + b);
        constexpr int kD = 128;
        for (int row = 0; row < 8; ++row) {
            int zero = 0;
            for (int d = 0; d < kD; ++d) {
                const int i = row * kD + d;
                ASSERT_EQ(256 * hi[i] + lo[i], q1[i] * s[d]);
                zero += q1[i] * z[d];
            }
            ASSERT_EQ(zero, qz[row]);
            for (int t = 0; t < kPageTokens; ++t) {
                int high = 0, low = 0, plain = 0;
                for (int d = 0; d < kD; ++d) {
                    const int i = row * kD + d, code = c[t * kD + d];
                    high += hi[i] * code;
                    low += lo[i] * code;
                    plain += q1[i] * (code * s[d] + z[d]);
                }
                ASSERT_EQ(256 * high + low + zero, qk[row * kPageTokens + t]);
                ASSERT_EQ(plain, qk[row * kPageTokens + t]);
            }
            for (int d = 0; d < kD; ++d) {
                int folded = 0, sum = 0;
                for (int t = 0; t < kPageTokens; ++t) {
                    folded += p1[row * kPageTokens + t] * c[t * kD + d];
                    sum += p1[row * kPageTokens + t];
                }
                ASSERT_EQ(s[d] * folded + z[d] * sum, pv[row * kD + d]);
            }
        }
    }
}

// Partial results join by the executor's rule: weights 2^(m - max m) by the exact exponential, an empty part is left
// out.
TEST(MergeVectors, PartialResults) {
    TA_LOAD_CASE(test, "merge");
    const auto o_parts = test.array<float>("o_parts"), lse_parts = test.array<float>("lse_parts");
    const auto o = test.array<float>("o"), lse = test.array<float>("lse");
    const int64_t parts = o_parts.shape[0], rows = o_parts.shape[1], d = o_parts.shape[2];
    const double atol = test.get<double>("atol");
    for (int64_t row = 0; row < rows; ++row) {
        float top = cpu::kMinusInf, sum = 0.0f;
        for (int64_t part = 0; part < parts; ++part) top = std::max(top, lse_parts[part * rows + row] * cpu::kLog2e);
        std::vector<float> joined(d, 0.0f);
        for (int64_t part = 0; part < parts; ++part) {
            const float m = lse_parts[part * rows + row] * cpu::kLog2e;
            if (m == cpu::kMinusInf) continue;
            const float weight = cpu::exp2_neg_exact(top - m);
            sum += weight;
            for (int64_t c = 0; c < d; ++c) {
                joined[c] = std::fma(weight, o_parts[(part * rows + row) * d + c], joined[c]);
            }
        }
        for (int64_t c = 0; c < d; ++c) EXPECT_NEAR(joined[c] / sum, o[row * d + c], atol);
        EXPECT_NEAR((top + std::log2(sum)) / cpu::kLog2e, lse[row], atol);
    }
}

TEST(ExpVectors, SasPolyAndExact) {
    TA_LOAD_CASE(test, "sas_table");
    const auto x = test.array<float>("x"), sas = test.array<float>("sas"), sas2 = test.array<float>("sas2");
    const auto exact = test.array<float>("exp");
    const double rtol_sas = test.get<double>("rtol_sas"), rtol_poly = test.get<double>("rtol_sas2");
    for (size_t i = 0; i < x.size(); ++i) {
        // The kernels take a distance in log2 units, which rounds: up to 2 ulp away from the vectors' argument. Results
        // that would be denormal are 0.
        const float u = -x[i] * cpu::kLog2e;
        const double argument = std::isinf(x[i]) ? 0.0 : 3e-7 * std::fabs(x[i]), denormal = 0x1p-126;
        // "An implementation in fp32 may land on either side of an integer: the value jumps by 6.3e-4 relative there."
        const bool at_integer = std::fabs(x[i] - std::nearbyint(x[i])) <= 4e-7f * std::fabs(x[i]);
        if (at_integer && std::nearbyint(x[i]) == -6.0f) {
            const float y = cpu::exp2_neg_sas(u);  // kept or dropped
            EXPECT_TRUE(y == 0.0f || std::fabs(y / std::exp(-6.0) - 1) < 1e-3) << x[i];
        } else {
            EXPECT_NEAR(cpu::exp2_neg_sas(u), sas[i], sas[i] * ((at_integer ? 6.5e-4 : rtol_sas) + argument)) << x[i];
        }
        EXPECT_NEAR(cpu::exp2_neg_poly(u), sas2[i], sas2[i] * (rtol_poly + argument) + denormal) << x[i];
        EXPECT_NEAR(cpu::exp2_neg_exact(u), exact[i], exact[i] * (5e-7 + argument) + denormal) << x[i];
    }
}

}  // namespace
}  // namespace ta
