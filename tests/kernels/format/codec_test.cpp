// The codec against its specification (docs/numerics.md), exhaustively where the space is small, with
// independent arithmetic: doubles for stage 1, exact integers for stage 2.
#include "kernels/format/codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

namespace ta {
namespace {

// ------------------------------------------------------------------------------------------------ stage 1

TEST(Stage1, ScaleIsTheCorrectlyRoundedQuotient) {
    std::mt19937 random(1);
    for (int n = 0; n < 100000; ++n) {
        const float amax = std::ldexp(1.0f + float(random() & 0x7fffff) * 0x1p-23f, int(random() % 174) - 117);
        for (int levels : {kStage1Levels, kIntFlashLevels}) {
            // A double holds the quotient of two floats well enough that rounding twice is rounding once.
            ASSERT_EQ(stage1_scale(amax, levels), float(double(amax) / levels)) << amax;
        }
    }
}

TEST(Stage1, TinyMagnitudesHaveNoScale) {
    const float below = std::nextafter(kMinAmax, 0.0f);
    for (int levels : {kStage1Levels, kIntFlashLevels}) {
        EXPECT_EQ(stage1_scale(below, levels), 0.0f);
        EXPECT_EQ(stage1_scale(0.0f, levels), 0.0f);
        EXPECT_EQ(stage1_scale(FLT_TRUE_MIN, levels), 0.0f);
        EXPECT_GE(stage1_scale(kMinAmax, levels), FLT_MIN) << "a scale must never be denormal";
        EXPECT_EQ(stage1_code(kMinAmax, stage1_scale(kMinAmax, levels), levels), levels);
        EXPECT_EQ(stage1_code(-kMinAmax, stage1_scale(kMinAmax, levels), levels), -levels);
    }
    EXPECT_EQ(stage1_code(below, 0.0f, kStage1Levels), 0);
    EXPECT_EQ(stage1_code(-below, 0.0f, kStage1Levels), 0);
}

TEST(Stage1, ZeroOfEitherSignAndDenormalsAreZero) {
    for (float scale : {0.0f, FLT_MIN, 1.0f, 0x1p50f}) {
        for (float x : {0.0f, -0.0f}) EXPECT_EQ(stage1_code(x, scale, kStage1Levels), 0);
        if (scale >= 1.0f) {
            EXPECT_EQ(stage1_code(FLT_TRUE_MIN, scale, kStage1Levels), 0);
            EXPECT_EQ(stage1_code(-FLT_MIN / 2, scale, kStage1Levels), 0);
        }
    }
}

TEST(Stage1, TiesGoToTheEvenCode) {
    for (float scale : {0x1p-120f, 0.25f, 1.0f, 0x1p40f}) {
        for (int k = -119; k < 119; ++k) {
            const int even = k % 2 == 0 ? k : k + 1;
            EXPECT_EQ(stage1_code((float(k) + 0.5f) * scale, scale, kStage1Levels), even) << k << " scale " << scale;
            EXPECT_EQ(stage1_code(float(k) * scale, scale, kStage1Levels), k);
        }
    }
}

TEST(Stage1, ClampsBothWays) {
    for (int levels : {kStage1Levels, kIntFlashLevels}) {
        for (float x : {float(levels) + 0.5f, 1e4f, kMaxMagnitude, FLT_MAX, HUGE_VALF}) {
            EXPECT_EQ(stage1_code(x, 1.0f, levels), levels) << x;
            EXPECT_EQ(stage1_code(-x, 1.0f, levels), -levels) << x;
        }
    }
    EXPECT_EQ(stage1_code(kMaxMagnitude, FLT_MIN, kStage1Levels), kStage1Levels) << "the quotient overflows";
    EXPECT_EQ(stage1_code(-kMaxMagnitude, FLT_MIN, kStage1Levels), -kStage1Levels);
}

TEST(Stage1, LargestMagnitudeTakesTheLastCode) {
    std::mt19937 random(2);
    for (int n = 0; n < 100000; ++n) {
        const float amax = std::ldexp(1.0f + float(random() & 0x7fffff) * 0x1p-23f, int(random() % 174) - 118);
        for (int levels : {kStage1Levels, kIntFlashLevels}) {
            const float scale = stage1_scale(amax, levels);
            ASSERT_EQ(stage1_code(amax, scale, levels), levels) << amax;
            ASSERT_EQ(stage1_code(-amax, scale, levels), -levels) << amax;
        }
    }
}

// --------------------------------------------------------------------------------------- tokens' own scales

TEST(VExponent, IsTheLargestThatStaysBelowTheLimit) {
    std::mt19937 random(3);
    for (int n = 0; n < 100000; ++n) {
        const float max = std::ldexp(1.0f + float(random() & 0x7fffff) * 0x1p-23f, int(random() % 160) - 110);
        const float own = n % 3 == 0 ? std::ldexp(max, -int(random() % 20))  // exact powers of two apart
                                     : float(max * (double(random()) / 4294967296.0) * std::exp2(-double(random() % 18)));
        if (own < FLT_MIN) continue;  // no scale is denormal
        const int e = exponent_below(own, max);
        ASSERT_GE(e, 0);
        ASSERT_LE(e, kMaxExponent);
        ASSERT_LE(std::ldexp(double(own), e), double(max));
        if (e < kMaxExponent) {
            ASSERT_GT(std::ldexp(double(own), e + 1), double(max));
        }
    }
    EXPECT_EQ(exponent_below(0.0f, 1.0f), 15);
    EXPECT_EQ(exponent_below(0.0f, 0.0f), 15);
    EXPECT_EQ(exponent_below(1.0f, 1.0f), 0);
    EXPECT_EQ(exponent_below(0x1p-15f, 1.0f), 15);
    EXPECT_EQ(exponent_below(0x1p-40f, 1.0f), 15);
}

// A token of ordinary size beside one with a large channel keeps its scale; one that is small as a whole does not.
TEST(VExponent, FollowsTheMagnitudeWithinTheScale) {
    EXPECT_EQ(v_exponent(1.0f, 8.0f, 100.0f, 100.0f), 0);
    EXPECT_EQ(v_exponent(1.0f, 8.0f, 100.0f, 399.0f), 1);
    EXPECT_EQ(v_exponent(1.0f, 8.0f, 1.0f, 400.0f), 3) << "the codes must stay within INT8";
    EXPECT_EQ(token_magnitude(119 * 256, 0x1p-3f), 3808.0f);
}

TEST(VExponent, OfATokenOfZerosIsTheLargest) {
    EXPECT_EQ(v_exponent(0.0f, 8.0f, 0.0f, 400.0f), 15);
    EXPECT_EQ(v_exponent(0.0f, 0.0f, 0.0f, 0.0f), 15) << "a head of zeros";
    EXPECT_EQ(v_exponent(8.0f, 8.0f, 0.0f, 400.0f), 15) << "codes of zeros under the page's scale";
    EXPECT_EQ(exponent_scale(0.0f, 8.0f), 0.0f);
    EXPECT_EQ(exponent_scale(3.0f, 8.0f), 4.0f);
}

// Beside tokens of zeros a page may be so small that its scale times 2^-15 would be denormal.
TEST(VExponent, GivesNoDenormalScaleBack) {
    EXPECT_EQ(reopened_scale(0x1p-111f, 15), 0x1p-126f);
    EXPECT_EQ(reopened_scale(0x1.8p-112f, 15), 0.0f);
    EXPECT_EQ(reopened_scale(0x1.8p-112f, 14), 0x1.8p-126f);
    EXPECT_EQ(reopened_scale(0.0f, 15), 0.0f);
}

TEST(Merge, IsTheRoundedProductWithAnExactPowerOfTwo) {
    std::mt19937 random(4);
    for (int n = 0; n < 20000; ++n) {
        const float max = std::ldexp(1.0f + float(random() & 0x7fffff) * 0x1p-23f, int(random() % 150) - 100);
        const float own = float(max * (double(random()) / 4294967296.0) * std::exp2(-double(random() % 18)));
        if (own < FLT_MIN) continue;
        for (int e : {0, exponent_below(own, max)}) {
            const float ratio = merge_ratio(own, max, e);
            ASSERT_EQ(ratio, float(std::ldexp(double(own), e) / max));
            ASSERT_LE(ratio, 1.0f);
            const int q = int(random() % 239) - 119;
            const float product = float(double(q) * ratio);  // exact in a double
            ASSERT_EQ(merge_code(int8_t(q), ratio), int(std::nearbyint(product)));
        }
    }
}

TEST(Merge, LeavesTokensOfTheLargestScaleAloneAndNeverGrows) {
    for (int q = -119; q <= 119; ++q) {
        EXPECT_EQ(merge_code(int8_t(q), merge_ratio(0.37f, 0.37f, 0)), q);
        EXPECT_EQ(merge_code(int8_t(q), merge_ratio(0x1.8p-9f, 0x1.8p-4f, 5)), q) << "power of two apart";
        EXPECT_EQ(merge_code(int8_t(q), merge_ratio(0.0f, 0.0f, 0)), 0);
        EXPECT_EQ(merge_code(int8_t(q), 0.5f), q % 2 == 0 ? q / 2 : 2 * int(std::nearbyint(q / 4.0))) << q;
        for (float ratio = 1.0f; ratio > 0.001f; ratio *= 0.83f) {
            EXPECT_LE(std::abs(merge_code(int8_t(q), ratio)), std::abs(q));
        }
    }
}

TEST(TimesPow2, IsExact) {
    for (int n = -15; n <= 15; ++n) EXPECT_EQ(times_pow2(0x1.234568p3f, n), std::ldexp(0x1.234568p3f, n));
}

// ------------------------------------------------------------------------------------------------ stage 2

// RNE(u / s) from its definition: the nearest integer, the even one of two.
int rounded_quotient(int u, int s) {
    const int below = u / s, rest = 2 * (u % s);
    return rest > s || (rest == s && below % 2 == 1) ? below + 1 : below;
}

TEST(Stage2, HoldsItsBoundsOverAllRangesAndValues) {
    for (int bits : {4, 3, 2}) {
        const int levels = (1 << bits) - 1, max_step = bits == 4 ? 16 : bits == 3 ? 34 : 80;
        int largest_step = 0;
        for (int range = 0; range <= 2 * kStage1Levels; ++range) {
            const int s = stage2_step(-kStage1Levels, range - kStage1Levels, levels);
            ASSERT_EQ(s, std::max(1, (range + levels - 1) / levels));
            largest_step = std::max(largest_step, s);
            for (int z = -kStage1Levels; z + range <= kStage1Levels; ++z) {
                ASSERT_EQ(stage2_step(z, z + range, levels), s);
                for (int q = z; q <= z + range; ++q) {
                    const int c = stage2_code(q, z, s);
                    ASSERT_EQ(c, rounded_quotient(q - z, s)) << q << " " << z << " " << s;
                    ASSERT_LE(c, levels) << "no clamp is needed";
                    ASSERT_GE(c * s + z, -119);
                    ASSERT_LE(c * s + z, 126);
                    ASSERT_LE(2 * std::abs(c * s + z - q), s);
                    ASSERT_EQ(stage2_code_clamped(q, z, s, levels), c);
                }
            }
        }
        EXPECT_EQ(largest_step, max_step);
    }
}

TEST(Stage2, ClampedCodeIsTheNearestOfAllCodes) {
    for (int levels : {15, 3}) {
        for (int s = 1; s <= 80; s += levels == 15 ? 1 : 3) {
            for (int z : {-128, -100, -7, 0, 60}) {
                for (int q = -119; q <= 119; ++q) {
                    const int c = stage2_code_clamped(q, z, s, levels);
                    ASSERT_GE(c, 0);
                    ASSERT_LE(c, levels);
                    const int error = std::abs(q - (c * s + z));
                    for (int other = 0; other <= levels; ++other) ASSERT_LE(error, std::abs(q - (other * s + z)));
                }
            }
        }
    }
}

TEST(FractionalZero, RoundsTheMeanResidualToTheNearestEvenUnit) {
    for (int bits : {4, 2}) {
        const int unit = bits == 4 ? 1 : 4;
        for (int residual_sum = -3000; residual_sum <= 3000; ++residual_sum) {
            const int zero8 = fractional_zero8(-20, residual_sum, 3, 3, bits);
            const int moved = zero8 - 8 * -20;
            ASSERT_EQ(moved % unit, 0);
            // The mean residual in units, a binary fraction, rounds exactly in a double.
            ASSERT_EQ(moved / unit, int(std::nearbyint(residual_sum / 64.0 * 8 / unit))) << residual_sum;
        }
    }
}

TEST(FractionalZero, StaysWithinInt8) {
    for (int bits : {4, 2}) {
        const int max_step = bits == 4 ? 16 : 80;
        for (int step = 1; step <= max_step; ++step) {
            for (int max_code = 0; max_code < 1 << bits; ++max_code) {
                for (int zero = -128; zero + step * max_code <= 127; ++zero) {
                    for (int sum : {-64 * step, -32 * step - 1, -5, 0, 5, 32 * step + 1, 64 * step}) {
                        const int zero8 = fractional_zero8(zero, sum, step, max_code, bits);
                        ASSERT_GE(zero_floor(zero8), -128);
                        ASSERT_LE(zero_floor(zero8) + step * max_code, 127);
                        const int fraction = zero_fraction8(zero8);
                        ASSERT_EQ(8 * zero_floor(zero8) + fraction, zero8);
                        const uint8_t byte = step_byte(step, fraction, bits);
                        ASSERT_EQ(step_of(byte, bits), step);
                        ASSERT_EQ(fraction_eighths_of(byte, bits), fraction);
                    }
                }
            }
        }
    }
}

// A page's channel as the encoder meets it.
std::vector<int8_t> draw_channel(std::mt19937& random, int kind) {
    std::vector<int8_t> q(kPageTokens);
    std::normal_distribution<float> normal;
    const float sigma = std::exp2(float(random() % 70) / 10.0f);
    const float mean = kind % 2 == 0 ? 0.0f : float(int(random() % 160) - 80);
    for (int t = 0; t < kPageTokens; ++t) {
        float x = mean + sigma * normal(random);
        if (kind == 2) x = mean + (random() % 16 == 0 ? 100.0f : 2.0f) * normal(random);  // heavy tail
        if (kind == 3) x = t == 7 ? 119.0f : mean / 20.0f;                                // one hot token
        if (kind == 4) x = float(random() % 2 == 0 ? 119 : -119);
        if (kind == 5) x = mean;  // constant
        q[t] = int8_t(std::clamp(std::nearbyint(x), -119.0f, 119.0f));
    }
    return q;
}

int squared_error(const std::vector<int8_t>& q, const std::vector<uint8_t>& codes, int step, int zero) {
    int error = 0;
    for (int t = 0; t < kPageTokens; ++t) {
        const int e = q[t] - (codes[t] * step + zero);
        error += e * e;
    }
    return error;
}

int best_error(const std::vector<int8_t>& q, int step, int zero, int levels) {
    int error = 0;
    for (int v : q) {
        int nearest = 1 << 30;
        for (int c = 0; c <= levels; ++c) nearest = std::min(nearest, (v - (c * step + zero)) * (v - (c * step + zero)));
        error += nearest;
    }
    return error;
}

TEST(EncodeChannel, SearchNeverLosesAndKeepsItsConstraints) {
    std::mt19937 random(5);
    int64_t plain_total[2] = {}, search_total[2] = {};
    for (int n = 0; n < 1200; ++n) {
        const std::vector<int8_t> q = draw_channel(random, n % 6);
        const int min = *std::ranges::min_element(q), max = *std::ranges::max_element(q);
        for (int bits : {4, 2}) {
            const int levels = (1 << bits) - 1;
            std::vector<uint8_t> plain_codes(kPageTokens), codes(kPageTokens);
            const ChannelCode plain = encode_channel(q.data(), plain_codes.data(), 1, bits, {});
            const ChannelCode found = encode_channel(q.data(), codes.data(), 1, bits, {.search = true});
            ASSERT_EQ(plain.step, stage2_step(min, max, levels));
            ASSERT_EQ(plain.zero8, 8 * min);
            ASSERT_EQ(found.zero8 % 8, 0);
            const int zero = found.zero8 / 8;
            const int plain_error = squared_error(q, plain_codes, plain.step, min);
            const int error = squared_error(q, codes, found.step, zero);
            ASSERT_LE(error, plain_error);
            ASSERT_GE(found.step, 1);
            ASSERT_LE(found.step, plain.step);
            ASSERT_GE(zero, -128);
            for (int c : codes) ASSERT_LE(c * found.step + zero, 127);
            if (max == min) {
                ASSERT_EQ(error, 0);
            }

            // The best of the listed candidates, the full range among them, by exhaustive nearest codes.
            int best = best_error(q, plain.step, min, levels);
            for (int i = 0; i < search_steps(bits); ++i) {
                for (int place = 0; place < search_places(bits); ++place) {
                    const StepZero sz = search_candidate(min, max, bits, i, place);
                    ASSERT_GE(sz.step, 1);
                    ASSERT_LE(sz.step, plain.step);
                    ASSERT_GE(sz.zero, -128);
                    ASSERT_LE(sz.zero + levels * sz.step, 127);
                    best = std::min(best, best_error(q, sz.step, sz.zero, levels));
                }
            }
            ASSERT_EQ(error, best);
            plain_total[bits == 2] += plain_error;
            search_total[bits == 2] += error;
        }
    }
    EXPECT_LT(search_total[0], plain_total[0]);
    EXPECT_LT(search_total[1], plain_total[1]);
}

// Every step and every place of the interval: how near the candidates come to the best of them. Pages of 64 tokens and 128 channels.
TEST(EncodeChannel, SearchComesNearADenseOne) {
    constexpr int kDim = 128, kPages = 2;
    std::mt19937 random(6);
    std::normal_distribution<float> normal;
    std::student_t_distribution<float> student(3);
    std::exponential_distribution<float> exponential;
    const std::pair<const char*, std::function<float()>> kinds[] = {
        {"N(0,1)", [&] { return normal(random); }},
        {"Student t, 3", [&] { return student(random); }},
        {"Laplace", [&] { return exponential(random) * (random() % 2 ? 1.0f : -1.0f); }}};
    std::printf("Error of values (%%), with fractional zeros: no search, the candidates, a dense search\n");
    for (const int bits : {4, 2}) {
        const int levels = (1 << bits) - 1;
        for (const auto& [name, draw] : kinds) {
            double square = 0.0, none = 0.0, candidates = 0.0, dense = 0.0;
            for (int page = 0; page < kPages; ++page) {
                std::vector<float> x(size_t{kPageTokens} * kDim);
                std::ranges::generate(x, draw);
                float amax = 0.0f;
                for (const float v : x) amax = std::max(amax, std::fabs(v));
                const float scale = stage1_scale(amax, kStage1Levels);
                for (int channel = 0; channel < kDim; ++channel) {
                    const float* const given = x.data() + channel * kPageTokens;
                    std::vector<int8_t> q(kPageTokens);
                    for (int t = 0; t < kPageTokens; ++t) q[size_t(t)] = stage1_code(given[t], scale, kStage1Levels);
                    std::vector<uint8_t> codes(kPageTokens);
                    const auto error = [&](ChannelCode code) {
                        double sum = 0.0;
                        for (int t = 0; t < kPageTokens; ++t)
                            sum += std::pow(given[t] - scale * (codes[size_t(t)] * code.step + code.zero8 / 8.0), 2);
                        return sum;
                    };
                    for (const float* v = given; v < given + kPageTokens; ++v) square += double(*v) * double(*v);
                    none += error(encode_channel(q.data(), codes.data(), 1, bits, {.fractional_zero = true}));
                    candidates +=
                        error(encode_channel(q.data(), codes.data(), 1, bits, {.search = true, .fractional_zero = true}));

                    const int min = *std::ranges::min_element(q), max = *std::ranges::max_element(q);
                    StepZero best{stage2_step(min, max, levels), min};
                    int least = INT_MAX;
                    for (int step = best.step; step >= 1; --step) {
                        for (int zero = min; zero <= std::max(min, max - levels * step); ++zero) {
                            int sum = 0;
                            for (const int v : q) {
                                const int e = v - (stage2_code_clamped(v, zero, step, levels) * step + zero);
                                sum += e * e;
                            }
                            if (sum < least) least = sum, best = {step, zero};
                        }
                    }
                    int residuals = 0, max_code = 0;
                    for (int t = 0; t < kPageTokens; ++t) {
                        const int c = stage2_code_clamped(q[size_t(t)], best.zero, best.step, levels);
                        codes[size_t(t)] = uint8_t(c);
                        residuals += q[size_t(t)] - (c * best.step + best.zero);
                        max_code = std::max(max_code, c);
                    }
                    dense += error({best.step, fractional_zero8(best.zero, residuals, best.step, max_code, bits)});
                }
            }
            std::printf("%d bits, %-12s %5.1f %5.1f %5.1f\n", bits, name, 100 * std::sqrt(none / square),
                        100 * std::sqrt(candidates / square), 100 * std::sqrt(dense / square));
            EXPECT_LT(candidates, 0.9 * none) << name << ", " << bits << " bits";
            EXPECT_LT(candidates, 1.1 * dense) << name << ", " << bits << " bits";
        }
    }
}

TEST(EncodeChannel, FractionalZeroPreservesTheMeanWithinHalfAUnit) {
    std::mt19937 random(6);
    for (int n = 0; n < 3000; ++n) {
        const std::vector<int8_t> q = draw_channel(random, n % 6);
        for (int bits : {4, 2}) {
            for (bool search : {false, true}) {
                std::vector<uint8_t> codes(kPageTokens), plain_codes(kPageTokens);
                const ChannelCode code = encode_channel(q.data(), codes.data(), 1, bits, {search, true});
                const ChannelCode plain = encode_channel(q.data(), plain_codes.data(), 1, bits, {search, false});
                ASSERT_EQ(codes, plain_codes) << "the fraction moves no code";
                ASSERT_EQ(code.step, plain.step);
                int residual8 = 0, max_code = 0;
                for (int t = 0; t < kPageTokens; ++t) {
                    residual8 += 8 * (q[t] - codes[t] * code.step) - code.zero8;
                    max_code = std::max<int>(max_code, codes[t]);
                }
                const int unit = bits == 4 ? 1 : 4;
                ASSERT_LE(zero_floor(code.zero8) + max_code * code.step, 127);
                ASSERT_GE(zero_floor(code.zero8), -128);
                const bool at_limit = code.zero8 == 8 * -128 || code.zero8 == 8 * (127 - max_code * code.step) + 8 - unit;
                if (!at_limit) {
                    ASSERT_LE(2 * std::abs(residual8), unit * kPageTokens);
                }
            }
        }
    }
}

// The line that fits the stored values of a head over the true ones best has slope 1, and every channel keeps its mean.
TEST(UnitSlope, StoredValuesHaveIt) {
    std::mt19937 random(11);
    int64_t clamped = 0, channels_in_all = 0;
    for (int n = 0; n < 200; ++n) {
        for (int bits : {4, 2}) {
            for (bool search : {false, true}) {
                constexpr int kD = 64;
                std::vector<int8_t> q(size_t(kPageTokens) * kD);
                for (int c = 0; c < kD; ++c) {
                    const std::vector<int8_t> channel = draw_channel(random, n % 6);
                    for (int t = 0; t < kPageTokens; ++t) q[t * kD + c] = channel[t];
                }
                std::vector<uint8_t> codes(q.size());
                std::vector<ChannelCode> channels(kD);
                for (int c = 0; c < kD; ++c) channels[c] = encode_channel(&q[c], &codes[c], kD, bits, {search, true});
                const double gain = double(give_unit_slope(q.data(), codes.data(), kD, bits, true, channels.data()));
                double covariance = 0.0, variance = 0.0;
                for (int c = 0; c < kD; ++c) {
                    const int unit = fraction_unit(bits);
                    double mean_q = 0.0, mean_c = 0.0;
                    int max_code = 0;
                    for (int t = 0; t < kPageTokens; ++t) {
                        mean_q += q[t * kD + c] / 64.0;
                        mean_c += codes[t * kD + c] / 64.0;
                        max_code = std::max<int>(max_code, codes[t * kD + c]);
                    }
                    for (int t = 0; t < kPageTokens; ++t) {
                        const double x = q[t * kD + c] - mean_q;
                        covariance += x * gain * channels[c].step * codes[t * kD + c];
                        variance += x * x;
                    }
                    const int zero8 = channels[c].zero8, highest = 8 * (127 - max_code * channels[c].step) + 8 - unit;
                    ASSERT_GE(channels[c].step, 1);
                    ASSERT_LE(channels[c].step, bits == 4 ? 16 : 80);
                    ASSERT_EQ(zero8 % unit, 0);
                    ASSERT_GE(zero_floor(zero8), -128);
                    ASSERT_LE(zero8, highest);
                    ++channels_in_all;
                    const double off = gain * (channels[c].step * mean_c + zero8 / 8.0) - mean_q;
                    if (zero8 == 8 * -128 || zero8 == highest) {
                        ++clamped;
                    } else {
                        ASSERT_LE(std::fabs(off), gain * (unit / 16.0 + 1 / 128.0) + 1e-4);
                    }
                }
                if (covariance > 0.0 && gain > 0.5 && gain < 2.0) {
                    ASSERT_NEAR(covariance / variance, 1.0, 1e-6) << n << " bits " << bits << " search " << search;
                }
            }
        }
    }
    EXPECT_LT(5 * clamped, channels_in_all);
}

// One token far from all others wants a large step, and that a zero point beyond INT8.
TEST(UnitSlope, ChannelsWithAnOutlierKeepTheirMean) {
    std::mt19937 random(12);
    std::normal_distribution<float> normal(0.0f, 8.0f);
    for (int n = 0; n < 200; ++n) {
        std::vector<int8_t> q(kPageTokens);
        for (int8_t& x : q) x = int8_t(std::clamp(std::lrint(normal(random)), -119L, 119L));
        q[size_t(n % kPageTokens)] = n % 2 ? 119 : -119;
        for (const bool search : {false, true}) {
            std::vector<uint8_t> codes(kPageTokens);
            ChannelCode channel = encode_channel(q.data(), codes.data(), 1, 2, {search, true});
            const double gain = double(give_unit_slope(q.data(), codes.data(), 1, 2, true, &channel));
            const double mean_q = std::reduce(q.begin(), q.end(), 0) / 64.0,
                         mean_c = std::reduce(codes.begin(), codes.end(), 0) / 64.0;
            // Half a unit of the zero point; what the gain of a single channel adds to that is another one.
            EXPECT_LE(std::fabs(gain * (channel.step * mean_c + channel.zero8 / 8.0) - mean_q), 1.0)
                << n << ", search " << search;
        }
    }
}

TEST(UnitSlope, StepsAndGainsStayInTheirRange) {
    EXPECT_EQ(unit_slope_step(7, {0, 0}, 0, 96, 2), 7) << "a constant channel";
    EXPECT_EQ(unit_slope_step(7, {1000, 100}, 0, 96, 4), 7) << "steps of 4 bits stay";
    EXPECT_EQ(unit_slope_step(7, {1000, 100}, 0, 96, 2), 10);
    EXPECT_EQ(unit_slope_step(7, {1050, 100}, 0, 96, 2), 11) << "halves go up";
    EXPECT_EQ(unit_slope_step(7, {1049, 100}, 0, 96, 2), 10);
    EXPECT_EQ(unit_slope_step(7, {1, 100}, 0, 96, 2), 1);
    EXPECT_EQ(unit_slope_step(7, {100000, 100}, 0, 96, 2), 80);
    EXPECT_EQ(unit_slope_step(7, {1000, 100}, 0, 64 * 3 - 5, 2), 10);
    EXPECT_EQ(unit_slope_step(7, {10000, 100}, 0, 64 * 3 - 5, 2), 43) << "the mean of nearly all at the last code";
    EXPECT_EQ(unit_slope_step(50, {10000, 100}, 0, 64 * 3 - 5, 2), 50) << "no smaller than it is";
    EXPECT_EQ(unit_slope_gain(0, 0), 1.0f);
    EXPECT_EQ(unit_slope_gain(5, 4), 1.25f);
    EXPECT_EQ(unit_slope_gain(1, 4), 0.5f);
    EXPECT_EQ(unit_slope_gain(9, 4), 2.0f);
    EXPECT_EQ(unit_slope_zero8(-20, 64 * 30, 0, 1.5f, 3, 3, 1), 8 * 20) << "the mean under the gain";
    EXPECT_EQ(unit_slope_zero8(-20, 64 * 30, 0, 1.6f, 3, 3, 8), 8 * 19) << "without fractions: 18.75";
}

TEST(EncodeChannel, StrideOfTheSourceIsTheStrideOfTheCodes) {
    std::mt19937 random(7);
    const std::vector<int8_t> q = draw_channel(random, 1);
    std::vector<int8_t> spread(kPageTokens * 3, 77);
    std::vector<uint8_t> codes(kPageTokens), spread_codes(kPageTokens * 3, 0xEE);
    for (int t = 0; t < kPageTokens; ++t) spread[3 * t] = q[t];
    const ChannelCode a = encode_channel(q.data(), codes.data(), 1, 4, {true, true});
    const ChannelCode b = encode_channel(spread.data(), spread_codes.data(), 3, 4, {true, true});
    EXPECT_EQ(a.step, b.step);
    EXPECT_EQ(a.zero8, b.zero8);
    for (int t = 0; t < kPageTokens; ++t) {
        EXPECT_EQ(codes[t], spread_codes[3 * t]);
        EXPECT_EQ(spread_codes[3 * t + 1], 0xEE);
        EXPECT_EQ(spread_codes[3 * t + 2], 0xEE);
    }
}

}  // namespace
}  // namespace ta
