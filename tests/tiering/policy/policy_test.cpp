// Each policy on owners and blocks that are made up.
#include "tiering/policy/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>

#include "tiering/policy/spread.h"

namespace ta {
namespace {

constexpr uint64_t kBytes = 100;
constexpr uint32_t kNow = 1000;

class MadeUp final : public EvictionView {
  public:
    void add(BlockOwner owner) {
        owners_.push_back(owner);
        bytes_.emplace_back(owner.end, kBytes);
        mass_.emplace_back(owner.end);
        since_.emplace_back(owner.end, kNow);
    }
    std::span<const BlockOwner> owners() const override { return owners_; }
    uint64_t bytes(size_t owner, uint32_t block) const override {
        EXPECT_GE(block, owners_[owner].first);
        EXPECT_LT(block, owners_[owner].end);
        return bytes_[owner][block];
    }
    AttentionMass mass(size_t owner, uint32_t block) const override { return mass_[owner][block]; }
    uint32_t since(size_t owner, uint32_t block) const override { return since_[owner][block]; }
    uint32_t now() const override { return kNow; }
    std::vector<std::vector<uint64_t>> bytes_;
    std::vector<std::vector<AttentionMass>> mass_;
    std::vector<std::vector<uint32_t>> since_;

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
    EXPECT_TRUE(policy->choose(view, 0, Loss::kMoved).empty());
    EXPECT_EQ(policy->choose(view, 1, Loss::kMoved).size(), 1u);
    EXPECT_EQ(policy->choose(view, 1, Loss::kMoved)[0].owner, 1u);
    const std::vector<Victim> four = policy->choose(view, 4 * kBytes, Loss::kMoved);
    ASSERT_EQ(four.size(), 4u);
    EXPECT_EQ(as_set(four), (std::set<std::pair<uint32_t, uint32_t>>{{1, 1}, {1, 2}, {1, 3}, {2, 0}}));
    EXPECT_EQ(four[3], (Victim{2, 0}));
    EXPECT_EQ(policy->choose(view, UINT64_MAX, Loss::kMoved).size(), 9u);
    EXPECT_EQ(as_set(policy->choose(view, UINT64_MAX, Loss::kMoved)).size(), 9u);
    EXPECT_EQ(policy->choose(view, 250, Loss::kMoved), policy->choose(view, 250, Loss::kMoved));
    EXPECT_TRUE(policy->choose(MadeUp(), 5, Loss::kMoved).empty());
}

TEST(Lru, BlocksThatStayAreLeftOutAndSizesCount) {
    MadeUp view;
    view.add({.last_used = 1, .first = 2, .end = 50});
    for (uint32_t b = 0; b < 50; b += 2) view.bytes_[0][b] = 0;
    view.bytes_[0][33] = 10 * kBytes;
    const auto policy = make_lru_policy();
    for (uint64_t wanted = 1; wanted < 40 * kBytes; wanted += 37) {
        const std::vector<Victim> victims = policy->choose(view, wanted, Loss::kMoved);
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
        for (const Victim v : make_lru_policy()->choose(view, n * kBytes, Loss::kMoved)) blocks.push_back(v.block);
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
    for (const Victim v : make_priority_policy()->choose(view, UINT64_MAX, Loss::kMoved)) order.push_back(v.owner);
    EXPECT_EQ(order, (std::vector<uint32_t>{1, 1, 3, 3, 2, 2, 0, 0}));
}

TEST(Attention, BlocksWithTheLeastOfItLeaveFirst) {
    MadeUp view;
    view.add({.last_used = 9, .end = 4});
    view.add({.last_used = 1, .end = 3});
    constexpr uint32_t kHalfLife = 10;
    // Faded to now: 8, 2, 0.5, 3 and 4, 1, 0.
    view.mass_[0] = {{8.0f, kNow}, {2.0f, kNow}, {0.5f, kNow}, {3.0f, kNow}};
    view.mass_[1] = {{8.0f, kNow - kHalfLife}, {4.0f, kNow - 2 * kHalfLife}, {1.0f, 0}};
    const auto policy = make_attention_policy(kHalfLife);
    const std::vector<Victim> order = {{1, 2}, {0, 2}, {1, 1}, {0, 1}, {0, 3}, {1, 0}, {0, 0}};
    for (size_t n = 0; n <= order.size(); ++n) {
        EXPECT_EQ(policy->choose(view, n * kBytes, Loss::kMoved),
                  std::vector<Victim>(order.begin(), order.begin() + ptrdiff_t(n)));
    }
    view.bytes_[0][2] = 0;
    EXPECT_EQ(policy->choose(view, 2 * kBytes, Loss::kMoved), (std::vector<Victim>{{1, 2}, {1, 1}}));
    EXPECT_TRUE(policy->choose(MadeUp(), 5, Loss::kMoved).empty());
}

// Against sorting all of them.
TEST(Attention, OfManyTheColdest) {
    MadeUp view;
    std::mt19937 random(4);
    std::vector<std::tuple<float, uint32_t, uint32_t>> all;
    for (uint32_t owner = 0; owner < 30; ++owner) {
        view.add({.last_used = owner, .first = owner % 3, .end = 1 + uint32_t(random() % 2000)});
        for (uint32_t b = 0; b < view.owners()[owner].end; ++b) {
            view.mass_[owner][b] = {float(random() % 100000), kNow};
            view.bytes_[owner][b] = random() % 5 == 0 ? 0 : random() % 2 == 0 ? kBytes : 3 * kBytes;
            if (b >= owner % 3 && view.bytes_[owner][b] > 0) all.emplace_back(view.mass_[owner][b].sum, owner, b);
        }
    }
    std::sort(all.begin(), all.end());
    for (const uint64_t bytes : {kBytes, 17 * kBytes, 1000 * kBytes, 9000 * kBytes, uint64_t{1} << 40}) {
        const std::vector<Victim> got = make_attention_policy(10)->choose(view, bytes, Loss::kMoved);
        uint64_t found = 0;
        size_t n = 0;
        for (; n < all.size() && found < bytes; ++n) {
            ASSERT_LT(n, got.size());
            ASSERT_EQ(view.mass_[got[n].owner][got[n].block].sum, std::get<0>(all[n])) << n;
            found += view.bytes_[got[n].owner][got[n].block];
        }
        EXPECT_EQ(got.size(), n);
    }
}

TEST(Attention, WithoutAnyItIsLru) {
    MadeUp view;
    view.add({.last_used = 9, .first = 1, .end = 4});
    view.add({.last_used = 1, .end = 33});
    view.add({.last_used = 5, .end = 3});
    for (uint64_t n = 0; n < 40; ++n)
        EXPECT_EQ(make_attention_policy(1)->choose(view, n * kBytes, Loss::kMoved),
                  make_lru_policy()->choose(view, n * kBytes, Loss::kMoved));
}

// Blocks of 1000, 100 and 10 steps with equal weights in each step, and a new one.
TEST(Attention, AgeIsNoMerit) {
    constexpr uint32_t kHalfLife = 64;
    MadeUp view;
    view.add({.last_used = 1, .end = 4});
    const uint32_t ages[] = {999, 99, 9, 0};
    const double weights[] = {0.02, 0.01, 0.03, 0.04};
    for (uint32_t b = 0; b < 4; ++b) {
        double sum = 0.0;
        for (uint32_t step = 0; step <= ages[b]; ++step) sum += weights[b] * std::exp2(-double(step) / kHalfLife);
        view.mass_[0][b] = {float(sum), kNow};
        view.since_[0][b] = kNow - ages[b];
        Decay decay(kHalfLife, kNow);
        EXPECT_NEAR(decay.share(view.mass_[0][b], kNow - ages[b]), weights[b], 1e-4 * weights[b]) << b;
    }
    EXPECT_EQ(make_attention_policy(kHalfLife)->choose(view, UINT64_MAX, Loss::kMoved),
              (std::vector<Victim>{{0, 1}, {0, 0}, {0, 2}, {0, 3}}));
    EXPECT_EQ(Decay(10, 5).share({1.0f, 6}, 7), Decay(10, 5).share({1.0f, 5}, 5)) << "of a step that began later";
}

// The oldest blocks first, of the sequence that was not used for longest. By attention the last kRecentBlocks of a sequence of the step
// go only when no others are left.
TEST(Dropping, TakesTheOldestFirst) {
    for (const bool attention : {false, true}) {
        MadeUp view;
        view.add({.last_used = 9, .first = 1, .end = 12, .in_step = true});
        view.add({.last_used = 1, .first = 2, .end = 11});
        const std::vector<Victim> victims =
            (attention ? make_attention_policy(10) : make_lru_policy())->choose(view, UINT64_MAX, Loss::kDropped);
        std::vector<Victim> expected;
        for (const uint32_t owner : {1u, 0u}) {
            for (uint32_t b = view.owners()[owner].first; b < view.owners()[owner].end; ++b) expected.push_back({owner, b});
        }
        EXPECT_EQ(victims, expected) << attention;
        view.mass_[1].assign(11, {1.0f, kNow});
        std::swap(view.mass_[1][3], view.mass_[0][3]);  // the coldest of the other
        const std::vector<Victim> hot = make_attention_policy(10)->choose(view, UINT64_MAX, Loss::kDropped);
        ASSERT_EQ(hot.size(), 20u);
        EXPECT_EQ(hot[0], (Victim{1, 3}));
        EXPECT_EQ(hot[1], (Victim{0, 1}));
        for (size_t i = 20 - kRecentBlocks; i < 20; ++i) EXPECT_EQ(hot[i].owner, 0u) << i;
    }
}

TEST(Decay, HalvesInItsHalfLife) {
    Decay decay(100, 1000);
    EXPECT_FLOAT_EQ(decay.at_now({4.0f, 1000}), 4.0f);
    EXPECT_FLOAT_EQ(decay.at_now({4.0f, 900}), 2.0f);
    EXPECT_FLOAT_EQ(decay.at_now({4.0f, 900}), 2.0f);
    EXPECT_FLOAT_EQ(decay.at_now({4.0f, 700}), 0.5f);
    EXPECT_FLOAT_EQ(Decay(100, 50).at_now({4.0f, uint32_t(0) - 50}), 2.0f) << "the count of steps went around";
    EXPECT_FLOAT_EQ(Decay(100, 50).at_now({4.0f, 53}), 4.0f) << "of a step that began later";
    EXPECT_FLOAT_EQ(Decay(100, uint32_t(0) - 1).at_now({4.0f, 2}), 4.0f);
}

}  // namespace
}  // namespace ta
