// The worker pool: every index once, by a worker of its own, and nothing left running when parallel_for returns.
#include "src/core/thread_pool.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace ta {
namespace {

TEST(ThreadPool, RunsEveryIndexOnce) {
    for (int threads : {1, 2, 3, 8}) {
        ThreadPool pool;
        ASSERT_TRUE(pool.start(threads).ok());
        EXPECT_EQ(pool.threads(), threads);
        for (int64_t n : {0, 1, 2, 3, 7, 64, 1000}) {
            for (int64_t grain : {1, 2, 5, 100, 5000}) {
                std::vector<std::atomic<int>> runs(size_t(n) + 1);
                pool.parallel_for(n, grain, [&](int64_t i, int worker) {
                    ASSERT_GE(worker, 0);
                    ASSERT_LT(worker, threads);
                    ++runs[size_t(i)];
                });
                for (int64_t i = 0; i < n; ++i) ASSERT_EQ(runs[size_t(i)], 1) << i << " of " << n;
                ASSERT_EQ(runs[size_t(n)], 0);
            }
        }
    }
}

TEST(ThreadPool, NegativeCountsAreNoWork) {
    ThreadPool pool;
    ASSERT_TRUE(pool.start(2).ok());
    pool.parallel_for(-5, 1, [](int64_t, int) { FAIL(); });
}

TEST(ThreadPool, AWorkerIsOneThreadAtATime) {
    ThreadPool pool;
    constexpr int kThreads = 4;
    ASSERT_TRUE(pool.start(kThreads).ok());
    std::array<std::atomic<int>, kThreads> inside{};
    for (int round = 0; round < 200; ++round) {
        pool.parallel_for(16, 1, [&](int64_t, int worker) {
            EXPECT_EQ(inside[size_t(worker)].fetch_add(1), 0);
            std::this_thread::yield();
            inside[size_t(worker)].fetch_sub(1);
        });
    }
}

TEST(ThreadPool, ResultsAreThereWhenItReturns) {
    ThreadPool pool;
    ASSERT_TRUE(pool.start(3).ok());
    std::vector<int64_t> results(100);  // plain memory: a sanitizer sees a write that is not ordered before the read
    for (int64_t round = 1; round <= 300; ++round) {
        pool.parallel_for(100, 1 + round % 7, [&](int64_t i, int) { results[size_t(i)] = i * round; });
        for (int64_t i = 0; i < 100; ++i) ASSERT_EQ(results[size_t(i)], i * round);
    }
}

TEST(ThreadPool, WorkersHelp) {
    ThreadPool pool;
    ASSERT_TRUE(pool.start(2).ok());
    // Two indices that wait for one another can only both finish on two threads.
    std::atomic<int> arrived{0};
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    pool.parallel_for(2, 1, [&](int64_t, int) {
        ++arrived;
        while (arrived < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    });
    EXPECT_EQ(arrived, 2);
}

TEST(ThreadPool, WorkersThatSleepWakeUp) {
    ThreadPool pool;
    ASSERT_TRUE(pool.start(3).ok());
    for (int round = 0; round < 20; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // longer than they poll
        std::atomic<int> n{0};
        pool.parallel_for(9, 1, [&](int64_t, int) { ++n; });
        ASSERT_EQ(n, 9);
    }
}

TEST(ThreadPool, CallersDoNotWaitForOneAnother) {
    ThreadPool pool;
    ASSERT_TRUE(pool.start(2).ok());
    std::atomic<bool> first_is_in{false}, second_is_done{false};
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    std::thread first([&] {
        pool.parallel_for(2, 1, [&](int64_t, int) {
            first_is_in = true;
            while (!second_is_done && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
        });
    });
    while (!first_is_in) std::this_thread::yield();
    const std::thread::id self = std::this_thread::get_id();
    int64_t next = 0;
    pool.parallel_for(50, 1, [&](int64_t i, int worker) {  // runs here, in order
        EXPECT_EQ(std::this_thread::get_id(), self);
        EXPECT_EQ(worker, 0);
        EXPECT_EQ(i, next++);
    });
    EXPECT_EQ(next, 50);
    second_is_done = true;
    first.join();
    EXPECT_LT(std::chrono::steady_clock::now(), deadline);
}

TEST(ThreadPool, ManyCallersAtOnce) {
    ThreadPool pool;
    ASSERT_TRUE(pool.start(3).ok());
    std::vector<std::thread> callers;
    std::atomic<int64_t> sum{0};
    for (int c = 0; c < 4; ++c) {
        callers.emplace_back([&] {
            for (int round = 0; round < 200; ++round) {
                std::atomic<int64_t> mine{0};
                pool.parallel_for(20, 1 + round % 3, [&](int64_t i, int) { mine += i; });
                ASSERT_EQ(mine, 190);
                sum += mine;
            }
        });
    }
    for (std::thread& t : callers) t.join();
    EXPECT_EQ(sum, 4 * 200 * 190);
}

TEST(ThreadPool, GoesAwayAtAnyMoment) {
    for (int i = 0; i < 100; ++i) {
        ThreadPool pool;
        ASSERT_TRUE(pool.start(1 + i % 4).ok());
        std::atomic<int> n{0};
        if (i % 3 != 0) pool.parallel_for(4, 1, [&](int64_t, int) { ++n; });
        EXPECT_EQ(n, i % 3 != 0 ? 4 : 0);
    }
}

}  // namespace
}  // namespace ta
