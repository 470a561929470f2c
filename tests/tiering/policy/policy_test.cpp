// Each policy on owners and blocks that are made up.
#include "src/tiering/policy/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "src/tiering/policy/spread.h"

namespace ta {
namespace {

constexpr uint64_t kBytes = 100;

class MadeUp final : public EvictionView {
  public:
    void add(BlockOwner owner) {
        owners_.push_back(owner);
        bytes_.emplace_back(owner.end, kBytes);
    }
    std::span<const BlockOwner> owners() const override { return owners_; }
    uint64_t bytes(size_t owner, uint32_t block) const override {
        EXPECT_GE(block, owners_[owner].first);
        EXPECT_LT(block, owners_[owner].end);
        return bytes_[owner][block];
    }
    std::vector<std::vector<uint64_t>> bytes_;

  private:
    std::vector<BlockOwner> owners_;
};

std::set<std::pair<uint32_t, uint32_t>> as_set(const std::vector<Victim>& victims) {
    std::set<std::pair<uint32_t, uint32_t>> s;
    for (const Victim v : victims) s.insert({v.owner, v.block});
    return s;
}

TEST(Lru, OwnersLeaveInTheOrderOfTheirUse) {
    MadeUp view;
    view.add({.last_used = 7, .priority = -5, .first = 1, .end = 5});
    view.add({.last_used = 3, .priority = 9, .first = 1, .end = 4});
    view.add({.last_used = 5, .priority = 0, .first = 0, .end = 2});
    const auto policy = make_lru_policy();
    EXPECT_TRUE(policy->choose(view, 0).empty());
    EXPECT_EQ(policy->choose(view, 1).size(), 1u);
    EXPECT_EQ(policy->choose(view, 1)[0].owner, 1u);
    const std::vector<Victim> four = policy->choose(view, 4 * kBytes);
    ASSERT_EQ(four.size(), 4u);
    EXPECT_EQ(as_set(four), (std::set<std::pair<uint32_t, uint32_t>>{{1, 1}, {1, 2}, {1, 3}, {2, 0}}));
    EXPECT_EQ(four[3], (Victim{2, 0}));
    EXPECT_EQ(policy->choose(view, UINT64_MAX).size(), 9u);
    EXPECT_EQ(as_set(policy->choose(view, UINT64_MAX)).size(), 9u);
    EXPECT_EQ(policy->choose(view, 250), policy->choose(view, 250));
    EXPECT_TRUE(policy->choose(MadeUp(), 5).empty());
}

TEST(Lru, BlocksThatStayAreLeftOutAndSizesCount) {
    MadeUp view;
    view.add({.last_used = 1, .first = 2, .end = 50});
    for (uint32_t b = 0; b < 50; b += 2) view.bytes_[0][b] = 0;
    view.bytes_[0][33] = 10 * kBytes;
    const auto policy = make_lru_policy();
    for (uint64_t wanted = 1; wanted < 40 * kBytes; wanted += 37) {
        const std::vector<Victim> victims = policy->choose(view, wanted);
        uint64_t found = 0;
        for (size_t i = 0; i < victims.size(); ++i) {
            EXPECT_EQ(victims[i].block % 2, 1u);
            EXPECT_LT(found, wanted) << "more than what is wanted";
            found += view.bytes_[0][victims[i].block];
        }
        EXPECT_GE(found, std::min(wanted, 33 * kBytes));
        EXPECT_EQ(as_set(victims).size(), victims.size());
    }
}

TEST(Lru, WhatLeavesIsSpreadOverTheSequence) {
    MadeUp view;
    view.add({.last_used = 1, .first = 1, .end = 1000});
    for (size_t n : {10u, 100u, 500u}) {
        std::vector<uint32_t> blocks;
        for (const Victim v : make_lru_policy()->choose(view, n * kBytes)) blocks.push_back(v.block);
        ASSERT_EQ(blocks.size(), n);
        std::sort(blocks.begin(), blocks.end());
        uint32_t widest = blocks[0];
        for (size_t i = 1; i < n; ++i) widest = std::max(widest, blocks[i] - blocks[i - 1]);
        EXPECT_LE(widest, 3 * 1000 / n) << n;
    }
}

TEST(Priority, LowerOnesLeaveFirstThenTheOldest) {
    MadeUp view;
    view.add({.last_used = 1, .priority = 1, .end = 2});
    view.add({.last_used = 9, .priority = -1, .end = 2});
    view.add({.last_used = 4, .priority = 0, .end = 2});
    view.add({.last_used = 3, .priority = 0, .end = 2});
    std::vector<uint32_t> order;
    for (const Victim v : make_priority_policy()->choose(view, UINT64_MAX)) order.push_back(v.owner);
    EXPECT_EQ(order, (std::vector<uint32_t>{1, 1, 3, 3, 2, 2, 0, 0}));
}

}  // namespace
}  // namespace ta
