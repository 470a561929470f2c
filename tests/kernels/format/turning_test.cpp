#include "kernels/format/turning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numbers>
#include <numeric>
#include <random>
#include <vector>

#include "src/attend/cpu/turning.h"

namespace ta {
namespace {

constexpr double kFull = 4294967296.0;
double radians(uint32_t angle) {
    return double(angle) / kFull * 2 * std::numbers::pi;
}

TEST(Turning, SineCosineAndAngle) {
    std::mt19937_64 random(1);
    for (int n = 0; n < 200000; ++n) {
        const auto angle = n < 65536 ? uint32_t(n) << 16 : uint32_t(random());
        const SinCos at = turn_sin_cos(angle);
        ASSERT_NEAR(at.sin, std::sin(radians(angle)), 2e-7) << angle;
        ASSERT_NEAR(at.cos, std::cos(radians(angle)), 2e-7) << angle;
        const auto off = int32_t(turn_of(1e3f * at.cos, 1e3f * at.sin) - angle);
        ASSERT_LE(std::abs(double(off)) / kFull, 2e-7) << angle;
    }
    EXPECT_EQ(turn_of(0.0f, 0.0f), 0u);
}

TEST(Turning, ACodeKeepsWhatItHasBitsFor) {
    std::mt19937_64 random(2);
    for (int n = 0; n < 20000; ++n) {
        const auto exponent = int(random() % 170) - 110;
        const TurningPair given{int(random() % 256), int(random() % 256), uint32_t(random()), uint32_t(random()),
                                std::ldexp(1.0f + float(random() % 1000) / 1000.0f, exponent)};
        const uint64_t code = pack_turning(given);
        const TurningPair kept = unpack_turning(code);
        ASSERT_EQ(kept.first, given.first);
        ASSERT_EQ(kept.second, given.second);
        ASSERT_LE(std::abs(int32_t(kept.turn - given.turn)), 1 << 11);
        ASSERT_LE(std::abs(int32_t(kept.phase - given.phase)), 1 << 17);
        ASSERT_NEAR(kept.amplitude / given.amplitude, 1.0f, 0x1p-7f);
        ASSERT_EQ(pack_turning(kept), code);
        TurningPairs pairs, bytes;
        pairs.code[n % kTurningPairs] = code;
        for (int t = 0; t < kPageTokens; ++t) bytes.set_byte(t, pairs.byte(t));
        ASSERT_EQ(bytes.code[n % kTurningPairs], code);
    }
}

struct Rows {
    int d;
    std::vector<float> k;
    Rows(int n, int head_dim, uint64_t seed) : d(head_dim), k(size_t(n * head_dim)) {
        std::mt19937_64 random(seed);
        std::normal_distribution<float> normal;
        for (float& x : k) x = normal(random);
    }
    void add(int first, int second, double amplitude, double turn, double phase) {
        for (size_t t = 0; t < k.size() / size_t(d); ++t) {
            k[t * size_t(d) + size_t(first)] += float(amplitude * std::cos(phase + turn * double(t)));
            k[t * size_t(d) + size_t(second)] += float(amplitude * std::sin(phase + turn * double(t)));
        }
    }
    double square() const {
        double sum = 0;
        for (float x : k) sum += double(x) * double(x);
        return sum / double(k.size());
    }
};

int count(const TurningPairs& pairs) {
    int n = 0;
    while (n < kTurningPairs && pairs.code[n]) ++n;
    return n;
}

TEST(Turning, PairsOfEverySpeedAndShapeAreTakenOut) {
    for (const int d : {64, 96, 128, 256}) {
        for (const double amplitude : {30.0, 300.0, 1e4}) {
            for (int n = 0; n < 60; ++n) {
                Rows rows(64, d, uint64_t(n));
                const int distance = turning_distance(d, n % kTurningDistances), c = 2 * (n % (d / 16)) % std::max(distance, 2);
                rows.add(c, c + distance, amplitude, std::pow(10.0, -n / 10.0) * (n % 2 ? 1 : -1), n);
                const TurningPairs pairs = find_turning(rows.k.data(), 64, d);
                ASSERT_EQ(count(pairs), 1) << d << ", " << n;
                take_out_turning(pairs, 0, 64, d, rows.k.data());
                // An amplitude is kept to 1/128.
                ASSERT_LE(rows.square(), 1.2 + amplitude * amplitude / 16384 / d) << d << ", " << amplitude << ", " << n;
            }
        }
    }
}

// The frequencies of rotary embeddings, neighbours among them, which look alike: what the pairs leave beside the noise.
TEST(Turning, SetsOfPairsOfRotaryEmbeddings) {
    std::mt19937_64 random(3);
    std::uniform_real_distribution<double> uniform;
    int sets[9] = {}, wrong[9] = {};
    for (const int d : {64, 128, 256}) {
        for (const double base : {1e4, 5e5, 1e6}) {
            for (const int pairs : {1, 2, 3, 4, 8}) {
                for (int n = 0; n < 200; ++n) {
                    const Rows noise(64, d, random());
                    Rows rows = noise;
                    std::vector<int> of(size_t(d / 2));
                    std::iota(of.begin(), of.end(), 0);
                    if (n % 2) {
                        std::shuffle(of.begin(), of.end(), random);
                    } else {
                        std::rotate(of.begin(), of.begin() + int(random() % uint64_t(d / 2 - pairs)), of.end());
                    }
                    const double bias = n % 3 == 0 ? 30 : n % 3 == 1 ? 100 : 300, position = std::floor(1e5 * uniform(random));
                    for (int i = 0; i < pairs; ++i) {
                        const double turn = std::pow(base, -2.0 * of[size_t(i)] / d);
                        rows.add(of[size_t(i)], of[size_t(i)] + d / 2, bias * (n % 4 < 2 ? 1 : 0.3 + 0.7 * uniform(random)),
                                 turn, position * turn + 6.3 * uniform(random));
                    }
                    take_out_turning(find_turning(rows.k.data(), 64, d), 0, 64, d, rows.k.data());
                    for (size_t i = 0; i < rows.k.size(); ++i) rows.k[i] -= noise.k[i];
                    ++sets[pairs], wrong[pairs] += rows.square() > 2.0;
                }
            }
        }
    }
    for (const int pairs : {1, 2, 3, 4, 8}) {
        std::printf("%d pairs: %d of %d leave more than twice the noise\n", pairs, wrong[pairs], sets[pairs]);
        EXPECT_LE(wrong[pairs] * (pairs < 8 ? 400 : 60), sets[pairs]) << pairs;
    }
}

TEST(Turning, RowsWithoutPairsHaveNone) {
    for (const int d : {64, 96, 128, 256}) {
        for (int n = 1; n <= 64; ++n) {
            for (uint64_t seed = 0; seed < 4; ++seed) {
                Rows rows(n, d, seed * 1000 + uint64_t(n));
                ASSERT_FALSE(find_turning(rows.k.data(), n, d).any()) << d << ", " << n << ", " << seed;
                if (n < 32) continue;
                // Channels 30 times as large, which do not turn, and one token that stands out.
                for (int t = 0; t < n; ++t) rows.k[size_t(t * d + 5)] *= 30.0f, rows.k[size_t(t * d + 40)] *= 30.0f;
                for (int c = 0; c < d; ++c) rows.k[size_t(d + c)] *= 50.0f;
                ASSERT_FALSE(find_turning(rows.k.data(), n, d).any()) << d << ", " << n << ", " << seed;
            }
        }
    }
    const std::vector<float> zeros(64 * 128, 0.0f);
    EXPECT_FALSE(find_turning(zeros.data(), 64, 128).any());
}

TEST(Turning, AtMostEightPairsTheLargestFirst) {
    Rows rows(64, 128, 9);
    for (int n = 0; n < 12; ++n) rows.add(5 * n, 5 * n + 64, 100.0 * (n + 1), 0.01 * n * n, n);
    const TurningPairs pairs = find_turning(rows.k.data(), 64, 128);
    ASSERT_EQ(count(pairs), kTurningPairs);
    for (int n = 0; n < kTurningPairs; ++n) EXPECT_EQ(unpack_turning(pairs.code[n]).first, 5 * (11 - n));
}

// One new row for each page that follows, 300 pages far: what is left beside the noise does not grow.
TEST(Turning, CarriedPairsStayWhereTheyAre) {
    constexpr int kPages = 300, kDim = 64;
    for (const double turn : {0.0, 1e-5, 0.0562, 1.0, 2.5}) {
        Rows all(64 * kPages, kDim, 77);
        all.add(20, 52, 300.0, turn, 1.0);
        TurningPairs pairs = find_turning(all.k.data(), 64, kDim);
        double worst = 0;
        for (int page = 1; page < kPages; ++page) {
            float* k = all.k.data() + page * 64 * kDim;
            pairs = carry_turning(pairs, k, 1, kDim);
            ASSERT_EQ(count(pairs), 1) << turn << ", page " << page;
            take_out_turning(pairs, 0, 64, kDim, k);
            double left = 0;
            for (int t = 0; t < 64; ++t)
                left +=
                    double(k[t * kDim + 20]) * double(k[t * kDim + 20]) + double(k[t * kDim + 52]) * double(k[t * kDim + 52]);
            worst = std::max(worst, left / 64);
        }
        EXPECT_LE(worst, 60.0) << turn;  // of the pair's 90,000, and 2 of noise
    }
}

TEST(Turning, WherePagesBeginAnew) {
    std::vector<int> ends;
    for (int have = 1; have < 64; ++have) {
        if (turning_begins_anew(have, have + 1)) ends.push_back(have + 1);
    }
    EXPECT_EQ(ends, (std::vector<int>{2, 4, 8, 16, 32, 64}));
    EXPECT_FALSE(turning_begins_anew(0, 64));
    EXPECT_TRUE(turning_begins_anew(5, 64));
    EXPECT_FALSE(turning_begins_anew(33, 63));
}

}  // namespace
}  // namespace ta
