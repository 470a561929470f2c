#include "tiering/store/prefetch_mark.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

namespace ta {
namespace {

TEST(PrefetchMark, AnArrivalIsUsedOnce) {
    PrefetchMark mark;
    mark.ask();
    EXPECT_TRUE(mark.look().asked);
    mark.arrive();
    mark.end();
    const PrefetchMark::Seen seen = mark.look();
    EXPECT_TRUE(seen.arrived);
    EXPECT_FALSE(seen.asked);
    EXPECT_TRUE(mark.settle(seen));
    EXPECT_FALSE(mark.settle(seen)) << "another step saw it too";
    EXPECT_FALSE(mark.waste());
    EXPECT_FALSE(mark.look().arrived);
}

TEST(PrefetchMark, AnArrivalIsWastedOnce) {
    PrefetchMark mark;
    mark.ask();
    mark.arrive();
    const PrefetchMark::Seen seen = mark.look();
    EXPECT_TRUE(mark.waste());
    EXPECT_FALSE(mark.waste());
    EXPECT_FALSE(mark.settle(seen));
    mark.end();
}

TEST(PrefetchMark, WhatAStepWantedBeforeItCameIsLate) {
    for (const bool comes_during_begin : {false, true}) {
        PrefetchMark mark;
        mark.ask();
        const PrefetchMark::Seen seen = mark.look();
        ASSERT_TRUE(seen.asked);
        if (comes_during_begin) mark.arrive();
        EXPECT_TRUE(mark.settle(seen));
        if (!comes_during_begin) mark.arrive();
        mark.end();
        EXPECT_FALSE(mark.look().arrived) << "the arrival had its outcome";
        EXPECT_FALSE(mark.waste());
    }
}

// Its part found the block on another move, and was over before the step that waited for it had begun.
TEST(PrefetchMark, AStepThatBringsTheBlockItselfIsLateToo) {
    PrefetchMark mark;
    mark.ask();
    const PrefetchMark::Seen seen = mark.look();
    mark.end();
    EXPECT_TRUE(mark.settle(seen));
    EXPECT_FALSE(mark.look().asked);
}

TEST(PrefetchMark, ATicketThatIsOverLeavesTheOthersWaiting) {
    PrefetchMark mark;
    mark.ask();
    mark.ask();
    mark.end();
    EXPECT_TRUE(mark.look().asked);
    mark.arrive();
    EXPECT_TRUE(mark.look().arrived);
    mark.end();
    EXPECT_TRUE(mark.look().arrived);
    EXPECT_TRUE(mark.waste());
    mark.ask();
    mark.end();
    EXPECT_FALSE(mark.look().asked) << "nobody brings it any more";
}

TEST(PrefetchMark, EveryArrivalHasOneOutcomeWhateverThreadsDo) {
    constexpr int kRounds = 2000;
    PrefetchMark mark;
    std::atomic<uint64_t> outcomes{0};
    std::atomic<int> brought{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
        threads.emplace_back([&] {
            while (brought < kRounds) {
                const PrefetchMark::Seen seen = mark.look();
                if (seen.arrived && mark.settle(seen)) ++outcomes;
                std::this_thread::yield();
            }
        });
    }
    threads.emplace_back([&] {
        for (; brought < kRounds; std::this_thread::yield()) outcomes += mark.waste();
    });
    for (; brought < kRounds; ++brought) {
        const uint64_t before = outcomes;
        mark.ask();
        mark.ask();
        mark.end();
        mark.arrive();
        mark.end();
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        while (outcomes == before && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        if (outcomes != before + 1) break;
    }
    brought = kRounds;
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(outcomes, uint64_t(kRounds));
}

}  // namespace
}  // namespace ta
