#include "kernels/format/visible.h"

#include <gtest/gtest.h>

#include <limits>

namespace ta {
namespace {

// Key by key, as numerics.md defines masks and windows.
bool sees(bool causal, int64_t window, int64_t p, int64_t key) {
    if (causal && key > p) return false;
    return window == 0 || (key > p - window && key < p + window);
}

TEST(Visible, IsTheSameKeyByKey) {
    for (const int n_keys : {0, 1, 63, 64, 65, 127, 128, 129}) {
        for (const int window : {0, 1, 2, 63, 64, 65, 200}) {
            for (const bool causal : {false, true}) {
                for (int p = -70; p < n_keys + 70; ++p) {
                    const KeyRange<int> r = visible_keys(causal, window, n_keys, p);
                    ASSERT_LE(0, r.begin);
                    ASSERT_LE(r.begin, r.end);
                    ASSERT_LE(r.end, n_keys);
                    for (int key = 0; key < n_keys; ++key) {
                        ASSERT_EQ(key >= r.begin && key < r.end, sees(causal, window, p, key))
                            << n_keys << " keys, window " << window << ", position " << p << ", key " << key;
                    }
                }
            }
        }
    }
}

TEST(Visible, LargestNumbersDoNotOverflow) {
    constexpr int kMost = std::numeric_limits<int>::max();
    const KeyRange<int> full = visible_keys(false, kMost, kMost, kMost - 1);
    EXPECT_EQ(full.begin, 0);
    EXPECT_EQ(full.end, kMost);
    const KeyRange<int> causal = visible_keys(true, 1, kMost, kMost);
    EXPECT_EQ(causal.begin, kMost);
    EXPECT_EQ(causal.end, kMost);
}

}  // namespace
}  // namespace ta
