// ta_seq_reserve: what a reservation keeps from others, until when, and what it is refused for.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <thread>

#include "abi/small_pool.h"

namespace ta::testing {
namespace {

// A truncate into a block that others have, and a fork after it: both take a copy.
TEST(Reserve, HoldsBehindATruncateAndAFork) {
    const Small small(12, 0, 0, 0, 4, 0, TA_DEFAULT, -1);
    const Plan plan = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {135}, -1), TA_OK);
    ta_seq fork = 0;
    ta_error err;
    require(ta_seq_fork(small.pool.get(), seq, &fork, &err), err);
    ASSERT_EQ(small.reserve(seq, 48), TA_OK);
    require(ta_seq_truncate(small.pool.get(), seq, 35, &err), err);
    ASSERT_EQ(small.step(plan, {seq}, {1}, -1), TA_OK);
    require(ta_seq_fork(small.pool.get(), seq, &fork, &err), err);
    int others = 0;
    while (small.step(plan, {make_sequence(small.pool)}, {1}, -1) == TA_OK) ++others;
    EXPECT_GT(others, 0);
    EXPECT_EQ(small.step(plan, {seq}, {40}, -1, &err), TA_OK) << err.message;
}

// A truncate of blocks that a fork has frees nothing, and sink blocks come again.
TEST(Reserve, HoldsBehindATruncateOfSharedBlocks) {
    Random random(5);
    for (const int32_t sinks : {1, 2, 4, 7}) {
        const Small small(30, 40, 0, 0, 2, 0, TA_DEFAULT, sinks);
        const Plan plan = make_plan(small.pool);
        for (int round = 0; round < 100; ++round) {
            std::vector<ta_seq> seqs = {make_sequence(small.pool)};
            const auto start = int32_t(1 + random.below(800)), tokens = int32_t(1 + random.below(400));
            ASSERT_EQ(small.step(plan, {seqs[0]}, {start}, 0), TA_OK);
            ASSERT_EQ(small.reserve(seqs[0], tokens, 0), TA_OK);
            seqs.push_back(fork_sequence(small.pool, seqs[0]));
            const int64_t to = random.chance(50) ? random.below(64) : random.below(start);
            ASSERT_EQ(ta_seq_truncate(small.pool.get(), seqs[0], std::min<int64_t>(to, start), nullptr), TA_OK);
            do {
                seqs.push_back(make_sequence(small.pool));
            } while (small.step(plan, {seqs.back()}, {int32_t(1 + random.below(64))}, -1) == TA_OK);
            for (int32_t left = tokens, n = 0; left > 0; left -= n) {
                n = random.chance(50) ? left : int32_t(1 + random.below(left));
                ta_error err;
                ASSERT_EQ(small.step(plan, {seqs[0]}, {n}, -1, &err), TA_OK)
                    << sinks << " sinks, " << start << " tokens cut to " << to << ", " << n << " of " << tokens
                    << " come: " << err.message;
            }
            for (const ta_seq seq : seqs) ASSERT_EQ(ta_seq_release(small.pool.get(), seq, nullptr), TA_OK);
        }
    }
}

TEST(Reserve, MovesDoNotTakeItsBlocksToTheDisk) {
    const Small small(9, 0, 0, 4 << 20, 8);
    const Plan plan = make_plan(small.pool);
    const ta_seq reserved = make_sequence(small.pool), other = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {reserved}, {192}, -1), TA_OK);
    ASSERT_EQ(small.reserve(reserved, 64), TA_OK);
    const ta_move_info moved = move_now(small.pool, reserved, 0, 3, TA_TIER_DISK);
    EXPECT_EQ(moved.moved, 0u);
    EXPECT_EQ(moved.skipped, 3u);
    ASSERT_EQ(small.reserve(other, 64 * 2), TA_OK);
    EXPECT_EQ(small.step(plan, {reserved}, {64}, -1), TA_OK);
    EXPECT_EQ(move_now(small.pool, reserved, 1, 1, TA_TIER_DISK).moved, 1u) << "the reservation is used up";
}

// A fork has the same blocks, and no promise.
TEST(Reserve, MovesOfOthersDoNotTakeItsBlocksToTheDisk) {
    const Small small(9, 0, 0, 4 << 20, 8);
    const Plan plan = make_plan(small.pool);
    const ta_seq reserved = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {reserved}, {192}, -1), TA_OK);
    const ta_seq copy = fork_sequence(small.pool, reserved);
    ASSERT_EQ(small.reserve(reserved, 64), TA_OK);
    EXPECT_EQ(move_now(small.pool, copy, 0, 3, TA_TIER_DISK).skipped, 3u);
    ASSERT_EQ(small.reserve(reserved, 0), TA_OK);
    EXPECT_EQ(move_now(small.pool, copy, 0, 3, TA_TIER_DISK).moved, 3u);
}

// Moves that were asked for before it, and those of forks beside it: begins within the reservation find all in memory.
TEST(Reserve, BesideMovesOfForks) {
    const Small small(24, 100, 0, 4 << 20);
    const Plan plan = make_plan(small.pool);
    std::atomic<bool> stop{false};
    std::atomic<ta_seq> copy{0};
    std::thread mover([&] {
        Random random(5);
        while (!stop) {
            int64_t tokens = 0;
            ta_ticket ticket = 0;
            const ta_seq seq = copy;
            if (seq == 0 || ta_seq_length(small.pool.get(), seq, &tokens, nullptr) != TA_OK) {
                std::this_thread::yield();
                continue;
            }
            const ta_tier to = random.chance(50) ? TA_TIER_DISK : TA_TIER_DEVICE;
            auto info = sized<ta_move_info>();
            if (ta_seq_move(small.pool.get(), seq, 0, uint64_t(tokens) / 64, to, &ticket, nullptr) == TA_OK)
                ta_move_wait(small.pool.get(), ticket, random.chance(50) ? -1 : 0, &info, nullptr);
            if (random.chance(12)) ta_seq_suspend(small.pool.get(), seq, TA_TIER_DISK, &ticket, nullptr);
        }
    });
    Random random(6);
    int reserved = 0;
    for (int round = 0; round < 150 && !::testing::Test::HasFailure(); ++round) {
        const ta_seq seq = make_sequence(small.pool);
        EXPECT_EQ(small.step(plan, {seq}, {int32_t(64 + random.below(1200))}, 0), TA_OK);
        const ta_seq other = fork_sequence(small.pool, seq);
        copy = other;
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(2000)));
        const int64_t tokens = 50 + random.below(300);
        ta_error err;
        const ta_status s = small.reserve(seq, tokens, random.chance(50) ? -1 : 100, &err);
        if (s != TA_OK) {
            EXPECT_EQ(s, TA_E_BUSY) << err.message;
        }
        for (int64_t left = s == TA_OK ? tokens : 0; left > 0;) {
            const auto n = int32_t(1 + random.below(std::min<int64_t>(left, 60)));
            const ta_status begun = small.step(plan, {seq}, {n}, -1, &err);
            EXPECT_EQ(begun, TA_OK) << left << " left: " << err.message;
            if (begun != TA_OK) break;
            left -= n;
            if (left > 0) {
                EXPECT_EQ(residency(small.pool, seq).disk_blocks, 0u);
            }
        }
        reserved += s == TA_OK;
        copy = 0;
        EXPECT_EQ(ta_seq_release(small.pool.get(), other, nullptr), TA_OK);
        EXPECT_EQ(ta_seq_release(small.pool.get(), seq, nullptr), TA_OK);
    }
    stop = true;
    mover.join();
    EXPECT_GT(reserved, 10);
}

// However a reservation ends for a block, a fork of the sequence can move it to the disk then.
TEST(Reserve, KeepsNoBlocksThatItHasNoMore) {
    struct Way {
        const char* name;
        std::function<void(const Small&, const Plan&, ta_seq)> end;
        uint64_t free;  // blocks of the first three that may leave after it
    };
    const auto truncate = [](const Small& small, ta_seq seq, int64_t length) {
        EXPECT_EQ(ta_seq_truncate(small.pool.get(), seq, length, nullptr), TA_OK);
    };
    const Way ways[] = {
        {"nothing", [](const Small&, const Plan&, ta_seq) {}, 0},
        {"no tokens", [](const Small& small, const Plan&, ta_seq seq) { EXPECT_EQ(small.reserve(seq, 0), TA_OK); }, 3},
        {"all tokens",
         [](const Small& small, const Plan& plan, ta_seq seq) {
             EXPECT_EQ(small.step(plan, {seq}, {100}, -1), TA_OK);
             EXPECT_EQ(small.step(plan, {seq}, {28}, -1), TA_OK);
         },
         3},
        {"a release",
         [](const Small& small, const Plan&, ta_seq seq) { EXPECT_EQ(ta_seq_release(small.pool.get(), seq, nullptr), TA_OK); },
         3},
        {"another one, and no tokens",
         [](const Small& small, const Plan&, ta_seq seq) {
             EXPECT_EQ(small.reserve(seq, 200), TA_OK);
             EXPECT_EQ(small.reserve(seq, 1000000), TA_E_TIER_FULL);
             EXPECT_EQ(small.reserve(seq, 0), TA_OK);
         },
         3},
        {"a truncate", [&](const Small& small, const Plan&, ta_seq seq) { truncate(small, seq, 64); }, 2},
        {"a truncate and a step",
         [&](const Small& small, const Plan& plan, ta_seq seq) {
             truncate(small, seq, 100);
             EXPECT_EQ(small.step(plan, {seq}, {64}, -1), TA_OK);
         },
         2},
        {"a forget",
         [](const Small& small, const Plan&, ta_seq seq) {
             EXPECT_EQ(ta_seq_forget(small.pool.get(), seq, 64, 128, nullptr, nullptr), TA_OK);
         },
         2},
        {"a suspend",
         [](const Small& small, const Plan&, ta_seq seq) { EXPECT_EQ(suspend(small.pool, seq, TA_TIER_DISK).moved, 3u); }, 3},
    };
    for (const Way& way : ways) {
        SCOPED_TRACE(way.name);
        const Small small(24, 0, 0, 4 << 20, 8);
        const Plan plan = make_plan(small.pool);
        const ta_seq seq = make_sequence(small.pool);
        ASSERT_EQ(small.step(plan, {seq}, {192}, -1), TA_OK);
        const ta_seq copy = fork_sequence(small.pool, seq);
        ASSERT_EQ(small.reserve(seq, 128), TA_OK);
        way.end(small, plan, seq);
        const ta_move_info moved = move_now(small.pool, copy, 0, 3, TA_TIER_DISK);
        EXPECT_EQ(moved.moved + moved.present, way.free);
        EXPECT_EQ(residency(small.pool, copy).disk_blocks, way.free);
    }
}

// A CPU's slots are the machine's, as those of a begin are.
TEST(Reserve, MoreThanTheMachineHasIsRefusedAtOnce) {
    const auto memory = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
    auto options = pool_options(32, 8, 128, 8);
    options.budget_bytes = uint64_t{1} << 60;
    const KvPool pool = make_pool(make_context(1), options);
    const auto block = stats(pool).token_block_bytes;
    const auto tokens_of = [&](uint64_t bytes) { return int64_t(bytes / block) * 64; };
    const ta_seq a = make_sequence(pool), b = make_sequence(pool);
    ta_error err;
    for (const int64_t tokens : {tokens_of(memory) + 640, int64_t{1} << 35}) {
        ASSERT_EQ(ta_seq_reserve(pool.get(), a, tokens, -1, &err), TA_E_MEMORY) << tokens;
        EXPECT_GT(err.bytes, 0u);
        EXPECT_EQ(stats(pool).bytes_promised, 0u);
    }
    // What was promised before counts, but for what the call replaces.
    const int64_t most = tokens_of(memory / 5 * 3);
    ASSERT_EQ(ta_seq_reserve(pool.get(), a, most, -1, &err), TA_OK) << err.message;
    EXPECT_EQ(ta_seq_reserve(pool.get(), b, most, -1, &err), TA_E_MEMORY);
    EXPECT_EQ(ta_seq_reserve(pool.get(), a, most - 64, -1, &err), TA_OK) << err.message;
    EXPECT_EQ(ta_seq_reserve(pool.get(), a, 0, -1, &err), TA_OK) << err.message;
    EXPECT_EQ(ta_seq_reserve(pool.get(), b, most, -1, &err), TA_OK) << err.message;
}

// Threads that move make room for that, until the last of them has ended.
TEST(Reserve, APoolMayBeDestroyedWhileAMoveMakesRoom) {
    Random random(11);
    for (int round = 0; round < 10; ++round) {
        Small small(16, 0, 72 << 10, 1 << 20, 8);  // the host tier has eight slots
        Plan plan = make_plan(small.pool);
        ta_seq seq = 0;
        for (int i = 0; i < 6; ++i) {
            seq = make_sequence(small.pool);
            ASSERT_EQ(small.step(plan, {seq}, {384}, 1000), TA_OK) << i;
        }
        move(small.pool, seq, 1, 5, TA_TIER_HOST);
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
        plan.reset();
        small.pool.reset();
    }
}

}  // namespace
}  // namespace ta::testing
