#include "kernels/format/rotation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace ta {
namespace {

TEST(Rotation, OnlyPowersOfTwo) {
    EXPECT_TRUE(can_rotate(64));
    EXPECT_TRUE(can_rotate(128));
    EXPECT_TRUE(can_rotate(256));
    EXPECT_FALSE(can_rotate(96));
}

TEST(Rotation, NormIsTheRoundedSquareRoot) {
    for (int d : {64, 128, 256}) EXPECT_EQ(rotation_norm(d), float(1.0 / std::sqrt(double(d))));
}

// The first outputs of SplitMix64 from the seeds 0 and 1234567, as published with the generator.
TEST(Rotation, SignsAreSplitMix64) {
    const auto word = [](uint64_t seed, int n) {
        uint64_t w = 0;
        for (int c = 0; c < 64; ++c) w |= uint64_t(rotation_sign(seed, 64 * n + c)) << c;
        return w;
    };
    EXPECT_EQ(word(0, 0), 0xe220a8397b1dcdafull);
    EXPECT_EQ(word(0, 1), 0x6e789e6aa1b965f4ull);
    EXPECT_EQ(word(1234567, 0), 6457827717110365317ull);
    EXPECT_EQ(word(1234567, 1), 3203168211198807973ull);
    EXPECT_EQ(word(1234567, 2), 9817491932198370423ull);
    EXPECT_EQ(word(1234567, 3), 4593380528125082431ull);
}

TEST(Rotation, IsTheSylvesterHadamardMatrix) {
    for (int d : {64, 128, 256}) {
        for (int column = 0; column < d; ++column) {
            std::vector<float> x(d, 0.0f);
            x[column] = 1.0f;
            hadamard_in_place(x.data(), d);
            for (int row = 0; row < d; ++row) {
                const bool negative = std::popcount(unsigned(row & column)) % 2 == 1;
                ASSERT_EQ(x[row], negative ? -rotation_norm(d) : rotation_norm(d)) << row << " " << column;
            }
        }
    }
}

TEST(Rotation, KeepsProductsAndComesBack) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int d : {64, 128, 256}) {
        for (uint64_t seed : {0ull, 1ull, 0xfeedfacecafebeefull}) {
            std::vector<float> a(d), b(d);
            for (float& v : a) v = normal(random);
            for (float& v : b) v = normal(random);
            a[d / 3] = 40.0f;
            double before = 0, after = 0, norms = 0;
            for (int c = 0; c < d; ++c) before += double(a[c]) * b[c];
            std::vector<float> ra = a, rb = b;
            rotate(ra.data(), d, seed);
            rotate(rb.data(), d, seed);
            for (int c = 0; c < d; ++c) {
                after += double(ra[c]) * rb[c];
                norms += double(a[c]) * a[c];
            }
            EXPECT_NEAR(after, before, 2e-5 * norms);
            rotate_back(ra.data(), d, seed);
            for (int c = 0; c < d; ++c) EXPECT_NEAR(ra[c], a[c], 3e-6f * std::sqrt(float(norms)));
        }
    }
}

TEST(Rotation, SpreadsAnOutlierOverAllChannels) {
    for (int d : {64, 128, 256}) {
        std::vector<float> x(d, 0.0f);
        x[5] = 40.0f;
        rotate(x.data(), d, 3);
        for (float v : x) EXPECT_FLOAT_EQ(std::fabs(v), 40.0f / std::sqrt(float(d)));
    }
}

TEST(Rotation, TheDefaultSignsHaveTheFlattestSpectrum) {
    // The largest rotated value of a vector of ones, whose rotated values have a mean square of 1: the worst d, then the sum.
    const auto peaks = [](uint64_t seed) {
        float worst = 0.0f, sum = 0.0f;
        for (int d : {64, 128, 256}) {
            std::vector<float> x(d, 1.0f);
            rotate(x.data(), d, seed);
            float peak = 0.0f;
            for (float v : x) peak = std::fmax(peak, std::fabs(v));
            worst = std::fmax(worst, peak);
            sum += peak;
        }
        return std::pair(worst, sum);
    };
    for (uint64_t seed = 1; seed <= 16; ++seed) EXPECT_LE(peaks(kDefaultRotationSeed), peaks(seed)) << "seed " << seed;
}

TEST(Rotation, IntegersStayExactUpToTheNorm) {
    std::vector<float> x(128);
    for (int c = 0; c < 128; ++c) x[c] = float(c * 37 % 256 - 128);
    std::vector<int> exact(128, 0);
    for (int row = 0; row < 128; ++row) {
        for (int c = 0; c < 128; ++c) {
            const int sign = (std::popcount(unsigned(row & c)) % 2 == 1) != rotation_sign(9, c) ? -1 : 1;
            exact[row] += sign * int(x[c]);
        }
    }
    rotate(x.data(), 128, 9);
    for (int row = 0; row < 128; ++row) EXPECT_EQ(x[row], float(exact[row]) * rotation_norm(128));
}

}  // namespace
}  // namespace ta
