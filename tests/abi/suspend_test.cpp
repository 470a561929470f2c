// Suspended sequences: all their blocks leave the device, open ones too, and what follows is as if they had stayed.
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "abi/tier_twins.h"
#include "support/files.h"

namespace ta::testing {
namespace {

struct Case {
    const char* name;
    Budgets budgets;
    ta_tier tier;
};
class Suspend : public ::testing::TestWithParam<Case> {};

TEST_P(Suspend, WhatFollowsIsAsWithoutIt) {
    Twins twins(GetParam().budgets);
    Random random(3);
    for (const int32_t tokens : {1, 63, 64, 65, 127, 128, 129, 200}) {
        const size_t s = twins.add();
        const ta_seq seq = twins.seqs[s];
        twins.step({s}, {tokens});
        for (const int32_t more : {1, 62, 64, 3}) {
            const ta_move_info moved = suspend(twins.pool, seq, GetParam().tier);
            EXPECT_EQ(moved.state, TA_MOVE_DONE);
            const ta_residency r = residency(twins.pool, seq);
            EXPECT_EQ(r.device_blocks, 0u) << length(twins.pool, seq) << " tokens";
            EXPECT_EQ(r.device_bytes, 0u);
            twins.verify();
            const int what = int(random.below(4));
            if (what == 0) {  // a begin that comes to nothing
                const int32_t n = 5;
                ASSERT_EQ(ta_plan_begin(twins.plan.get(), 1, &seq, &n, nullptr, nullptr, nullptr), TA_OK);
                ASSERT_EQ(ta_plan_abort(twins.plan.get(), nullptr), TA_OK);
            } else if (what == 1) {
                twins.truncate(s, length(twins.pool, seq) - 1);
            } else if (what == 2) {
                const size_t f = twins.fork(s);
                twins.step({f, s}, {2, 1});
                suspend(twins.pool, seq, GetParam().tier);
            }
            twins.step({s}, {more});
            twins.verify();
        }
    }
}

// A file of a suspended sequence is that of one that is not.
TEST_P(Suspend, FilesAreTheSame) {
    const Folder folder;
    Twins twins(GetParam().budgets);
    const size_t s = twins.add();
    twins.step({s}, {150});
    const auto save = [&](const std::string& path) {
        ta_error err;
        require(ta_seq_save(twins.pool.get(), twins.seqs[s], path.c_str(), nullptr, &err), err);
        return read_file(path);
    };
    const auto before = save(folder.file("before"));
    suspend(twins.pool, twins.seqs[s], GetParam().tier);
    EXPECT_TRUE(save(folder.file("suspended")) == before);
    ta_error err;
    ta_seq loaded = 0;
    require(ta_seq_load(twins.pool.get(), folder.file("suspended").c_str(), nullptr, &loaded, &err), err);
    EXPECT_TRUE(dequantize(twins.pool, loaded, 1, 0, 150, kRow) ==
                dequantize(twins.plain_pool, twins.plain_seqs[s], 1, 0, 150, kRow));
}

TEST_P(Suspend, WhatOthersNeedStays) {
    Twins twins(GetParam().budgets);
    const size_t s = twins.add();
    twins.step({s}, {200});
    const size_t f = twins.fork(s);
    const ta_seq fork = twins.seqs[f];
    ASSERT_EQ(ta_plan_begin(twins.plan.get(), 1, &fork, nullptr, nullptr, nullptr, nullptr), TA_OK);
    ta_ticket ticket = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_suspend(twins.pool.get(), fork, GetParam().tier, &ticket, &err), TA_E_BUSY);
    EXPECT_EQ(suspend(twins.pool, twins.seqs[s], GetParam().tier).moved, 0u);
    ASSERT_EQ(ta_plan_abort(twins.plan.get(), nullptr), TA_OK);
    EXPECT_EQ(residency(twins.pool, twins.seqs[s]).device_blocks, 4u);
    EXPECT_EQ(ta_seq_suspend(twins.pool.get(), fork, TA_TIER_DEVICE, &ticket, &err), TA_E_INVALID);
    ASSERT_EQ(ta_seq_pin(twins.pool.get(), fork, 1, 1, nullptr), TA_OK);
    suspend(twins.pool, fork, GetParam().tier);
    EXPECT_GE(residency(twins.pool, fork).device_blocks, 1u);
    twins.step({s, f}, {3, 70});
    twins.verify();
}

// The open block that idle forks share leaves, too, and each of them copies it in its next step.
TEST_P(Suspend, IdleForksShareAnOpenBlock) {
    for (const int32_t tokens : {10, 74, 200}) {
        Twins twins(GetParam().budgets);
        const size_t s = twins.add();
        twins.step({s}, {tokens});
        const size_t f = twins.fork(s), cut = twins.fork(s);
        twins.truncate(cut, tokens - 3);
        const ta_move_info moved = suspend(twins.pool, twins.seqs[f], GetParam().tier);
        EXPECT_EQ(moved.moved, moved.blocks);
        for (const size_t i : {s, f, cut}) EXPECT_EQ(residency(twins.pool, twins.seqs[i]).device_bytes, 0u);
        twins.verify();
        twins.step({f}, {5});
        twins.step({s, cut}, {70, 1});
        twins.verify();
    }
}

TEST_P(Suspend, TenThousandIdleChatsTakeNothingOfTheDevice) {
    auto options = pool_options(1, 1, kDim);
    options.budget_bytes = 8 * stats(make_pool(make_context(), options)).token_block_bytes;
    auto tiers = sized<ta_tier_options>();
    (GetParam().tier == TA_TIER_HOST ? tiers.host_bytes : tiers.disk_bytes) = 512 << 20;
    options.tiers = &tiers;
    const Context context = make_context(2);
    const KvPool pool = make_pool(context, options);
    const Plan plan = make_plan(pool);
    Tensor k(std::vector<float>(kDim, 0.5f), 1, 1, kDim), v(std::vector<float>(kDim, 0.5f), 1, 1, kDim);
    for (int i = 0; i < 10'000; ++i) {
        const ta_seq chat = make_sequence(pool);
        begin(plan, {chat}, {1});
        append(plan, 0, k, v);
        end(plan);
        ta_ticket ticket = 0;
        ASSERT_EQ(ta_seq_suspend(pool.get(), chat, GetParam().tier, &ticket, nullptr), TA_OK);
        if (i % 5 == 4) {  // eight open blocks fit
            ASSERT_EQ(wait(pool, ticket).state, TA_MOVE_DONE);
        }
    }
    wait_for_moves(pool);
    EXPECT_EQ(stats(pool).bytes_used, 0u);
    EXPECT_EQ(stats(pool).sequences, 10'000u);
}

INSTANTIATE_TEST_SUITE_P(Tiers, Suspend,
                         ::testing::Values(Case{"Host", {.host_bytes = 4 << 20}, TA_TIER_HOST},
                                           Case{"Disk", {.disk_bytes = 16 << 20}, TA_TIER_DISK},
                                           Case{"DiskBelowHost", {.host_bytes = 4 << 20, .disk_bytes = 16 << 20}, TA_TIER_DISK},
                                           Case{"At8Bits", {.host_bytes = 8 << 20, .bits = 8}, TA_TIER_HOST}),
                         [](const auto& p) { return p.param.name; });

// If nothing can leave, nothing is worse than before: an open block that was sealed in vain is written as it is again.
TEST(SuspendByItself, WhatCannotLeaveGoesOn) {
    auto options = pool_options(kLayers, kHeads, kDim);
    options.budget_bytes = 2 * stats(make_pool(make_context(), options)).token_block_bytes;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 100'000;  // for a block or two of others
    options.tiers = &tiers;
    const Context context = make_context(1);
    const KvPool pool = make_pool(context, options);
    const Plan plan = make_plan(pool);
    std::vector<ta_seq> seqs;
    const auto step = [&](ta_seq seq, int32_t n) {
        auto at_once = sized<ta_step_options>();
        at_once.wait_ms = -1;
        const ta_status s = ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, &at_once, nullptr);
        if (s != TA_OK) return s;
        Tensor k(std::vector<float>(size_t(n * kRow), 0.5f), n, kHeads, kDim),
            v(std::vector<float>(size_t(n * kRow), 0.5f), n, kHeads, kDim);
        for (uint32_t layer = 0; layer < kLayers; ++layer) append(plan, layer, k, v);
        end(plan);
        return s;
    };
    while (seqs.size() < 20) {  // until the device and the host are full of open blocks
        const ta_seq seq = make_sequence(pool);
        if (step(seq, 1) != TA_OK) break;
        seqs.push_back(seq);
    }
    ASSERT_LT(seqs.size(), 20u);
    ASSERT_GE(seqs.size(), 2u);
    std::vector<ta_seq> here;
    for (const ta_seq seq : seqs) {
        if (residency(pool, seq).device_blocks == 1) here.push_back(seq);
    }
    ASSERT_EQ(here.size(), 2u);
    for (int i = 0; i < 10; ++i) {
        EXPECT_EQ(step(here[0], 70), TA_E_TIER_FULL);
        EXPECT_EQ(step(here[1], 1), TA_OK);
        EXPECT_EQ(step(here[0], 1), TA_OK);
    }
}

// A begin that waits has listed its open block, to write into it. Another begin has that block suspended: the first one copies it.
TEST(SuspendByItself, AnOpenBlockOfABeginThatWaits) {
    auto options = pool_options(kLayers, kHeads, kDim);
    options.budget_bytes = 4 * stats(make_pool(make_context(), options)).token_block_bytes;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 8 << 20;
    options.tiers = &tiers;
    const Context context = make_context(1);
    const KvPool pool = make_pool(context, options);
    const auto step = [](const Plan& plan, const std::vector<ta_seq>& seqs, const std::vector<int32_t>& n) {
        ta_error err;
        ASSERT_EQ(ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.data(), n.data(), nullptr, nullptr, &err), TA_OK)
            << err.message;
        const int32_t rows = std::accumulate(n.begin(), n.end(), 0);
        Tensor k(std::vector<float>(size_t(rows * kRow), 0.5f), rows, kHeads, kDim),
            v(std::vector<float>(size_t(rows * kRow), 0.5f), rows, kHeads, kDim);
        for (uint32_t layer = 0; layer < kLayers; ++layer) append(plan, layer, k, v);
        end(plan);
    };
    const auto add = [&](int32_t tokens) {
        const ta_seq seq = make_sequence(pool);
        step(make_plan(pool), {seq}, {tokens});
        return seq;
    };
    const ta_seq listed = add(10);
    const Plan holds = make_plan(pool);
    begin(holds, {add(10), add(10)}, {1, 1});
    std::jthread first([&] {
        step(make_plan(pool), {listed, make_sequence(pool)}, {5, 65});  // one block is free, and it wants two
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::jthread second([&] { add(65); });
    for (int i = 0; i < 500 && move_stats(pool).bytes_evicted == 0; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_GT(move_stats(pool).bytes_evicted, 0u);
    require(ta_plan_abort(holds.get(), nullptr), {});
    first.join();
    second.join();
    verify(pool, listed);
}

// Six sequences have twelve sink and open blocks between them, in room for eleven blocks: they take turns.
TEST(SuspendByItself, SequencesThatDoNotFitBesideEachOtherTakeTurns) {
    for (const bool disk : {false, true}) {
        auto options = pool_options(kLayers, kHeads, kDim);
        options.budget_bytes = 11 * stats(make_pool(make_context(), options)).token_block_bytes;
        auto tiers = sized<ta_tier_options>();
        (disk ? tiers.disk_bytes : tiers.host_bytes) = 8 << 20;
        options.tiers = &tiers;
        const Context context = make_context(1);
        const KvPool pool = make_pool(context, options);
        std::vector<std::jthread> threads;
        for (int t = 0; t < 6; ++t) {
            threads.emplace_back([&] {
                const Plan plan = make_plan(pool);
                const ta_seq seq = make_sequence(pool);
                for (int32_t step = 0; step < 150; ++step) {
                    const int32_t n = 1 + step % 3;
                    Tensor k(std::vector<float>(size_t(n * kRow), 0.5f), n, kHeads, kDim),
                        v(std::vector<float>(size_t(n * kRow), 0.5f), n, kHeads, kDim);
                    ta_error err;
                    ASSERT_EQ(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, nullptr, &err), TA_OK)
                        << step << ": " << err.message;
                    for (uint32_t layer = 0; layer < kLayers; ++layer) append(plan, layer, k, v);
                    end(plan);
                }
                verify(pool, seq);
                EXPECT_EQ(length(pool, seq), 300);
            });
        }
        threads.clear();
        EXPECT_GT(move_stats(pool).bytes_evicted, 0u);
    }
}

}  // namespace
}  // namespace ta::testing
