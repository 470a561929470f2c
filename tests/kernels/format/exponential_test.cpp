#include "kernels/format/exponential.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace ta {
namespace {

TEST(Exponential, LogarithmsOfOneAndMore) {
    EXPECT_EQ(log_exact(1.0f), 0.0f);
    for (uint32_t bits = 0x3f800000; bits < 0x43000000; bits += 7) {  // up to 128
        const float x = std::bit_cast<float>(bits);
        const double want = std::log(double(x));
        ASSERT_NEAR(log_exact(x), want, std::max(1e-7, 0x1p-23 * want)) << x;
    }
}

TEST(Exponential, PowersOfTwo) {
    for (float u = 0.0f; u < kExpCutoff; u += 0x1.8p-13f) {
        const double want = std::exp2(-double(u));
        ASSERT_NEAR(exp2_neg_exact(u), want, 1.5e-7 * want) << u;
    }
    for (const float u : {kExpCutoff, 1e4f, __builtin_inff()}) EXPECT_EQ(exp2_neg_exact(u), 0.0f);
}

}  // namespace
}  // namespace ta
