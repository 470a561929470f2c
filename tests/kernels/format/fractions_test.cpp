// Fractions of zero points where codes are integers.
#include "kernels/format/fractions.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

namespace ta {
namespace {

TEST(Fractions, EightTokensHaveAllRanks) {
    for (int channel = 0; channel < 16; ++channel) {
        for (const int stride : {1, 3}) {
            std::set<int> ranks;
            for (int t = 0; t < 8; ++t) ranks.insert(spread_rank(stride * t, channel));
            EXPECT_EQ(ranks.size(), 8u) << "channel " << channel << ", stride " << stride;
        }
    }
    EXPECT_NE(spread_rank(0, 0), spread_rank(0, 1));
}

TEST(Fractions, KeepsTheMeanOfChannels) {
    for (const int value : {-119, 0, 126}) {
        for (int eighths = 0; eighths < 8; ++eighths) {
            for (int channel = 0; channel < 8; ++channel) {
                int v = 0, k = 0;
                for (int t = 0; t < kPageTokens; ++t) {
                    v += 8 * spread_v(value, eighths, t, channel);
                    k += 8 * round_k(value, eighths, t, channel);
                    EXPECT_LT(8 * spread_v(value, eighths, t, channel) - (8 * value + eighths), 8);
                    EXPECT_LE(std::abs(8 * round_k(value, eighths, t, channel) - (8 * value + eighths)), 4);
                }
                EXPECT_EQ(v, kPageTokens * (8 * value + eighths));
                if (eighths == 4) {
                    EXPECT_EQ(k, v) << "halves go both ways";
                }
            }
        }
    }
}

TEST(Fractions, StaysInBytes) {
    for (int t = 0; t < kPageTokens; ++t) {
        EXPECT_EQ(spread_v(127, 7, t, 0), 127);
        EXPECT_EQ(round_k(127, 7, t, 0), 127);
    }
}

}  // namespace
}  // namespace ta
