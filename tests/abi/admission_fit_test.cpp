// ta_kv_pool_fit: what it counts as room, and what a begin then finds.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "abi/small_pool.h"

namespace ta::testing {
namespace {

// A sequence with a reservation loses no block to another one's begin, and fit says so.
TEST(Fit, DropsNothingOfASequenceWithAReservation) {
    auto options = pool_options(1, 1, 64, 8);
    auto tiers = sized<ta_tier_options>();
    tiers.drop_coldest = TA_ON;
    options.tiers = &tiers;
    options.budget_bytes = 12 * stats(make_pool(make_context(), options)).token_block_bytes;
    const Context context = make_context();
    const KvPool pool = make_pool(context, options);
    const Plan plan = make_plan(pool);
    const ta_seq has = make_sequence(pool), wants = make_sequence(pool);
    begin(plan, {has}, {512}, {0});
    Tensor x(std::vector<float>(512 * 64, 0.5f), 512, 1, 64);
    append(plan, 0, x, x);
    end(plan);
    ta_error err;
    const int32_t n_new = 256;
    for (const int64_t reserved : {64, 0}) {
        require(ta_seq_reserve(pool.get(), has, reserved, -1, &err), err);
        EXPECT_EQ(fit(pool, {wants}, {n_new}).after_eviction, reserved == 0);
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &wants, &n_new, nullptr, nullptr, &err), reserved > 0 ? TA_E_TIER_FULL : TA_OK);
    }
}

// A move that has found no place below yet, and finds none, is no room for a step.
TEST(Fit, AMoveThatWaitsForAPlaceGivesNothing) {
    const Small small(12, 0, 56 << 10, 0, 8);  // the host tier has four slots
    const KvPool& pool = small.pool;
    const Plan plan = make_plan(pool), reads = make_plan(pool);
    const ta_seq read = make_sequence(pool), cold = make_sequence(pool);
    ASSERT_EQ(small.step(plan, {read}, {256}, 0), TA_OK);
    ASSERT_EQ(small.step(plan, {cold}, {256}, 0), TA_OK);
    const ta_seq fork = fork_sequence(pool, read);
    const int32_t one = 1;
    ASSERT_EQ(ta_plan_begin(reads.get(), 1, &fork, &one, nullptr, nullptr, nullptr), TA_OK);
    // The host tier is full then; the plan keeps the slots that the blocks left.
    EXPECT_EQ(move_now(pool, read, 0, 4, TA_TIER_HOST).moved, 4u);
    const ta_ticket ticket = move(pool, cold, 0, 4, TA_TIER_HOST);
    for (int i = 0; i < 200; ++i) {
        const ta_fit f = fit(pool, {0}, {320});  // five blocks; the device tier has room for three
        ASSERT_FALSE(f.after_eviction) << i;
        ASSERT_EQ(f.bytes_lacking, 2 * (f.bytes_new / 5)) << i;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ta_error err;
    EXPECT_EQ(small.step(plan, {make_sequence(pool)}, {320}, 0, &err), TA_E_TIER_FULL) << err.message;
    ASSERT_EQ(ta_plan_abort(reads.get(), nullptr), TA_OK);
    EXPECT_EQ(wait(pool, ticket).failed, 4u);
}

// Blocks of the step that are on disk need room, too.
TEST(Fit, BlocksFromTheDiskLackRoomLikeNewOnes) {
    const Small small(4, 0, 0, 4 << 20, 8);
    const Plan plan = make_plan(small.pool);
    const ta_seq below = make_sequence(small.pool), above = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {below}, {192}, -1), TA_OK);
    EXPECT_EQ(suspend(small.pool, below, TA_TIER_DISK).moved, 3u);
    ASSERT_EQ(small.step(plan, {above}, {192}, -1), TA_OK);
    const uint64_t block = stats(small.pool).token_block_bytes;
    for (const int32_t n : {0, 1}) {
        const ta_fit f = fit(small.pool, {below, above}, {n, 0});
        EXPECT_FALSE(f.after_eviction) << n;
        EXPECT_EQ(f.bytes_lacking, uint64_t(2 + n) * block) << n;
        const int32_t n_new[] = {n, 0};
        const ta_seq seqs[] = {below, above};
        EXPECT_EQ(ta_plan_begin(plan.get(), 2, seqs, n_new, nullptr, nullptr, nullptr), TA_E_TIER_FULL) << n;
    }
}

// In the host tier the open block that comes from disk wants a slot of its own size.
TEST(Fit, BlocksFromTheDiskWantSlotsOfTheirSize) {
    const Small small(3, 1, 36 << 10, 4 << 20);
    const Plan plan = make_plan(small.pool);
    ta_seq seqs[4];  // pinned below; pinned above; pinned above and below; on disk
    for (ta_seq& s : seqs) s = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seqs[0]}, {64}, -1), TA_OK);
    ASSERT_EQ(suspend(small.pool, seqs[0], TA_TIER_HOST).moved, 1u);
    ASSERT_EQ(small.step(plan, {seqs[1]}, {64}, -1), TA_OK);
    ASSERT_EQ(small.step(plan, {seqs[2]}, {128}, -1), TA_OK);
    ASSERT_EQ(move_now(small.pool, seqs[2], 1, 1, TA_TIER_HOST).moved, 1u);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(ta_seq_pin(small.pool.get(), seqs[i], 0, i == 2 ? 2 : 1, nullptr), TA_OK);
    ASSERT_EQ(small.step(plan, {seqs[3]}, {10}, -1), TA_OK);
    ASSERT_EQ(suspend(small.pool, seqs[3], TA_TIER_DISK).moved, 1u);
    EXPECT_FALSE(fit(small.pool, {seqs[3]}, {1}).after_eviction);
    EXPECT_EQ(small.step(plan, {seqs[3]}, {1}, -1), TA_E_TIER_FULL);
}

// A block that fell and came back leaves no more than it has.
TEST(Fit, FallenBlocksGiveTheirOwnBytes) {
    const Small small(8, 0, 4 << 20, 0, 8, 0, TA_ON);
    const Plan plan = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {5 * 64}, -1), TA_OK);
    EXPECT_EQ(move_now(small.pool, seq, 1, 4, TA_TIER_HOST).moved, 4u);
    EXPECT_EQ(move_now(small.pool, seq, 1, 4, TA_TIER_DEVICE).moved, 4u);
    const ta_kv_pool_stats s = stats(small.pool);
    EXPECT_EQ(s.bytes_free + s.bytes_reclaimable, s.bytes_budget);
    EXPECT_FALSE(fit(small.pool, {0}, {9 * 64}).after_eviction);
    EXPECT_TRUE(fit(small.pool, {0}, {8 * 64}).after_eviction);
    EXPECT_EQ(small.step(plan, {make_sequence(small.pool)}, {8 * 64}, -1), TA_OK);
}

// Fit counts no slot for a block that windows will pass later, since it is shared now.
TEST(Fit, WhatCannotPassTakesNothing) {
    const Small small(3, 0, 0, 0, 8, 64);
    const Plan plan = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {128}, -1), TA_OK);
    const ta_seq fork = fork_sequence(small.pool, seq);
    ASSERT_EQ(small.step(plan, {seq}, {63}, -1), TA_OK);
    EXPECT_TRUE(fit(small.pool, {seq}, {1}).now);
    EXPECT_EQ(small.step(plan, {seq}, {1}, -1), TA_OK);
    EXPECT_EQ(ta_seq_release(small.pool.get(), fork, nullptr), TA_OK);
}

// An idle sequence that shares blocks with the step's gives no room of these.
TEST(Fit, AForkOfTheStepsSequenceGivesNothing) {
    const Small small(2, 0, 4 << 20, 0, 8);
    const Plan plan = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {64}, -1), TA_OK);
    for (const bool forked : {false, true}) {
        if (forked) fork_sequence(small.pool, seq);
        EXPECT_FALSE(fit(small.pool, {seq}, {65}).after_eviction) << forked;
        EXPECT_EQ(small.step(plan, {seq}, {65}, -1), TA_E_TIER_FULL) << forked;
    }
}

// Unless a reader has it, too, the open block that idle sequences share leaves for a step, and fit counts on that.
TEST(Fit, AnOpenBlockThatIdleForksShareMakesRoom) {
    const Small small(3, 0, 4 << 20, 0, 8);
    const Plan plan = make_plan(small.pool), reads = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {10}, -1), TA_OK);
    const ta_seq fork = fork_sequence(small.pool, seq), other = make_sequence(small.pool);
    EXPECT_EQ(stats(small.pool).bytes_reclaimable, stats(small.pool).token_block_bytes);
    ASSERT_EQ(ta_plan_begin(reads.get(), 1, &fork, nullptr, nullptr, nullptr, nullptr), TA_OK);
    EXPECT_EQ(stats(small.pool).bytes_reclaimable, 0u);
    EXPECT_FALSE(fit(small.pool, {other}, {190}).after_eviction);
    EXPECT_EQ(small.step(plan, {other}, {190}, -1), TA_E_TIER_FULL);
    ASSERT_EQ(ta_plan_abort(reads.get(), nullptr), TA_OK);
    EXPECT_TRUE(fit(small.pool, {other}, {190}).after_eviction);
    EXPECT_EQ(small.step(plan, {other}, {190}, -1), TA_OK);
    EXPECT_EQ(small.step(plan, {fork, seq}, {1, 1}, -1), TA_OK);
}

// Two layers of one head, one of them with a window; budgets of the device tier in bytes.
struct Brink {
    uint32_t bits = 4;
    int32_t sinks = 0;
    int64_t window = 0;
    uint64_t host_bytes = 0, disk_bytes = 0;
    bool drops = false;
};
class BrinkPool {
  public:
    BrinkPool(const Brink& b, uint64_t budget) {
        auto options = pool_options(2, 1, 16, b.bits);
        auto numerics = sized<ta_numerics>();
        numerics.sink_blocks = b.sinks;
        options.numerics = &numerics;
        auto group = sized<ta_layer_group>();
        group.layers = 1;
        group.window = b.window;
        if (b.window > 0) options.layer_groups = &group, options.n_layer_groups = 1;
        options.budget_bytes = budget;
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = b.host_bytes;
        tiers.disk_bytes = b.disk_bytes;
        tiers.drop_coldest = b.drops ? TA_ON : TA_OFF;
        tiers.begin_wait_ms = 300;
        tiers.high_percent = 100;
        options.tiers = &tiers;
        pool = make_pool(context, options);
        plan = make_plan(pool);
    }
    ta_status step(ta_seq seq, int32_t n_new) {
        ta_error err;
        if (const ta_status s = ta_plan_begin(plan.get(), 1, &seq, &n_new, nullptr, nullptr, &err); s != TA_OK) return s;
        for (uint32_t layer = 0; layer < 2; ++layer) {
            Tensor k(std::vector<float>(size_t(n_new) * 16, 0.5f), n_new, 1, 16);
            append(plan, layer, k, k);
        }
        end(plan);
        return TA_OK;
    }
    ta_seq grown(int steps, int32_t last = 64) {
        const ta_seq seq = make_sequence(pool);
        for (int i = 0; i < steps; ++i) (void)step(seq, i + 1 < steps ? 64 : last);
        return seq;
    }
    // A published block that no sequence has.
    void leave_unused(ta_seq seq) {
        auto options = sized<ta_namespace_options>();
        options.salt[0] = 1;
        ta_namespace ns = 0;
        ta_error err;
        require(ta_namespace_create(pool.get(), &options, &ns, &err), err);
        const uint8_t key[32] = {1};
        require(ta_seq_publish(pool.get(), seq, ns, key, 1, &err), err);
        require(ta_seq_release(pool.get(), seq, &err), err);
    }
    // Pinned blocks take what the device has free.
    void fill() {
        ta_error err;
        while (fit(pool, {0}, {64}).now) require(ta_seq_pin(pool.get(), grown(1), 0, 1, &err), err);
    }

    const Context context = make_context(1);
    KvPool pool;
    Plan plan;
};

// Counts each block that may leave or be dropped once, and none that stays.
TEST(Fit, ABlockIsEvictedOrDroppedOnce) {
    const uint64_t block = stats(BrinkPool({.bits = 8}, 1 << 20).pool).token_block_bytes;
    BrinkPool p({.bits = 8, .sinks = -1, .disk_bytes = 64 << 20, .drops = true}, 8 * block);
    const ta_seq idle = p.grown(2), reserved = p.grown(2);
    ASSERT_EQ(ta_seq_reserve(p.pool.get(), reserved, 1, 0, nullptr), TA_OK);
    const ta_kv_pool_stats s = stats(p.pool);
    EXPECT_EQ(s.bytes_reclaimable, 2 * block) << "of the sequence without a reservation";
    const auto most = int32_t((s.bytes_free + 2 * block) / block) * 64;
    EXPECT_FALSE(fit(p.pool, {0}, {most + 64}).after_eviction);
    EXPECT_EQ(p.step(make_sequence(p.pool), most + 64), TA_E_TIER_FULL);
    EXPECT_TRUE(fit(p.pool, {0}, {most}).after_eviction);
    EXPECT_EQ(p.step(make_sequence(p.pool), most), TA_OK);
    EXPECT_EQ(move_stats(p.pool).dropped_blocks, 0u);
    EXPECT_EQ(residency(p.pool, idle).disk_blocks, 2u);
}

// Blocks that windows passed leave first, and take regions of the host tier that blocks of other sizes want, too.
TEST(Fit, PassedBlocksTakeRegionsOfTheHost) {
    int fits = 0;
    for (uint64_t budget = 5 * 17536; budget < 12 * 17536; budget += 4096) {
        BrinkPool p({.window = 1, .host_bytes = 2 * 24576 + 8192}, budget);
        p.grown(4);
        p.grown(4, 40);
        const ta_kv_pool_stats s = stats(p.pool);
        EXPECT_LE(s.bytes_free + s.bytes_reclaimable, s.bytes_budget);
        const ta_seq seq = make_sequence(p.pool);
        if (!fit(p.pool, {seq}, {65}).after_eviction) continue;
        ++fits;
        EXPECT_EQ(p.step(seq, 65), TA_OK) << "budget " << budget;
    }
    EXPECT_GT(fits, 20);
}

// An unused block in host memory makes way for one of another size, which takes all of its region.
TEST(Fit, TheRegionOfAnUnusedBlockServesWhatLeavesFirst) {
    int fits = 0;
    for (uint64_t budget = 7 * 17536; budget < 8 * 17536; budget += 1024) {
        BrinkPool p({.sinks = 1, .host_bytes = 57344}, budget);
        std::vector<ta_seq> below = {p.grown(1)};
        while (move_now(p.pool, below.back(), 0, 1, TA_TIER_HOST).moved > 0) below.push_back(p.grown(1));
        ASSERT_GT(below.size(), 2u);
        ta_error err;
        require(ta_seq_release(p.pool.get(), below.back(), &err), err);
        for (size_t i = 1; i + 1 < below.size(); ++i) require(ta_seq_pin(p.pool.get(), below[i], 0, 1, &err), err);
        p.leave_unused(below[0]);
        p.grown(3, 10);  // a sink, a full block and an open one
        p.fill();
        const ta_seq seq = make_sequence(p.pool);
        if (!fit(p.pool, {seq}, {64}).after_eviction) continue;
        ++fits;
        EXPECT_EQ(p.step(seq, 64), TA_OK) << "budget " << budget;
    }
    EXPECT_GT(fits, 3);
}

// An unused block makes way only when the tier has no region left: a full block of its size takes that one from the open block.
TEST(Fit, AnUnusedBlockKeepsItsSlotWhileThereIsARegion) {
    int fits = 0;
    for (uint64_t budget = 7 * 17536; budget < 9 * 17536; budget += 1024) {
        BrinkPool p({.sinks = -1, .host_bytes = 57344}, budget);
        const ta_seq unused = p.grown(1), used = p.grown(1);  // in one region
        for (const ta_seq below : {unused, used}) ASSERT_EQ(move_now(p.pool, below, 0, 1, TA_TIER_HOST).moved, 1u);
        ASSERT_EQ(ta_seq_pin(p.pool.get(), used, 0, 1, nullptr), TA_OK);
        p.leave_unused(unused);
        p.grown(1, 10);
        p.grown(1);
        p.fill();
        const ta_seq seq = make_sequence(p.pool);
        if (!fit(p.pool, {seq}, {1}).after_eviction) continue;
        ++fits;
        EXPECT_EQ(p.step(seq, 1), TA_OK) << "budget " << budget;
    }
    EXPECT_GT(fits, 2);
}

// The host has no slot for the open block of the sequence unused for longest, but one for a sink that windows have passed.
TEST(Fit, PassedSinksLeaveWhereOpenBlocksCannot) {
    int fits = 0;
    for (uint64_t budget = 12 * 17536; budget < 13 * 17536; budget += 1024) {
        BrinkPool p({.sinks = 3, .window = 1, .host_bytes = 57344}, budget);
        ASSERT_EQ(move_now(p.pool, p.grown(3), 0, 1, TA_TIER_HOST).moved, 1u);
        while (move_now(p.pool, p.grown(1), 0, 1, TA_TIER_HOST).moved > 0) continue;
        p.grown(1, 10);
        p.grown(3);
        p.fill();
        const ta_seq seq = make_sequence(p.pool);
        if (!fit(p.pool, {seq}, {1}).after_eviction) continue;
        ++fits;
        EXPECT_EQ(p.step(seq, 1), TA_OK) << "budget " << budget;
    }
    EXPECT_GT(fits, 3);
}

// Blocks of two sizes come from disk, in their order. Host memory takes either.
TEST(Fit, SinksFromTheDiskTakeRegionsOfTheHost) {
    int fits = 0;
    for (uint64_t budget = 6 * 17536; budget < 12 * 17536; budget += 2048) {
        BrinkPool p({.sinks = 3, .host_bytes = 59648, .disk_bytes = 8 << 20}, budget);
        const ta_seq seq = p.grown(10, 32);
        ASSERT_EQ(length(p.pool, seq), 9 * 64 + 32);
        ASSERT_EQ(suspend(p.pool, seq, TA_TIER_DISK).failed, 0u);
        if (!fit(p.pool, {seq}, {130}).after_eviction) continue;
        ++fits;
        EXPECT_EQ(p.step(seq, 130), TA_OK) << "budget " << budget;
    }
    EXPECT_GT(fits, 20);
}

// In a pool without tiers below fit is exact, also where blocks that windows passed are dropped.
TEST(Fit, PassedBlocksThatMayBeDroppedAreRoom) {
    int lacks = 0;
    for (uint64_t budget = 5 * 17536; budget < 12 * 17536; budget += 2048) {
        BrinkPool p({.bits = 8, .sinks = -1, .window = 1, .drops = true}, budget);
        p.grown(5);
        const ta_seq seq = make_sequence(p.pool);
        int32_t n = 64;
        while (fit(p.pool, {seq}, {n}).after_eviction) n += 64;
        lacks += n < 900;
        EXPECT_EQ(p.step(seq, n), TA_E_TIER_FULL) << "budget " << budget << ", " << n << " tokens";
    }
    EXPECT_GT(lacks, 20);
}

}  // namespace
}  // namespace ta::testing
