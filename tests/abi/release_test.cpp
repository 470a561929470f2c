// Ends of objects in use: sequences of an open plan, pools with open plans, namespaces of sequences that go on. The call
// that ends one succeeds, its id is stale at once, and its memory goes with its last user.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "abi/tier_twins.h"
#include "abi/wrong_calls.h"
#include "support/counting_allocator.h"

namespace ta::testing {
namespace {

using namespace std::chrono_literals;

class Release : public WrongCalls {
  protected:
    ta_status release(ta_seq seq) const { return ta_seq_release(pool.get(), seq, nullptr); }
    void expect_stale(ta_seq seq) {
        int64_t n = 0;
        ta_seq fork = 0;
        const Plan other = make_plan(pool);
        EXPECT_EQ(ta_seq_length(pool.get(), seq, &n, nullptr), TA_E_STALE);
        EXPECT_EQ(release(seq), TA_E_STALE);
        EXPECT_EQ(ta_seq_fork(pool.get(), seq, &fork, nullptr), TA_E_STALE);
        EXPECT_EQ(ta_seq_truncate(pool.get(), seq, 0, nullptr), TA_E_STALE);
        EXPECT_EQ(ta_seq_set_priority(pool.get(), seq, 1, nullptr), TA_E_STALE);
        EXPECT_EQ(ta_seq_verify(pool.get(), seq, nullptr), TA_E_STALE);
        EXPECT_EQ(ta_plan_begin(other.get(), 1, &seq, nullptr, nullptr, nullptr, nullptr), TA_E_STALE);
    }
};

// The points of a step at which a member is released: after so many of its calls.
class ReleaseWithin : public Release, public ::testing::WithParamInterface<int> {};

TEST_P(ReleaseWithin, TheOthersOfTheStepGoOn) {
    for (const bool commits : {true, false}) {
        for (const size_t which : {0, 1}) {
            SCOPED_TRACE(::testing::Message() << "commits " << commits << ", member " << which);
            const KvPool twin = make_pool(context, pool_options(kLayers, kHeads, kDim));
            const ta_seq twins[] = {make_sequence(twin), make_sequence(twin)};
            const Plan twin_plan = make_plan(twin);
            pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
            plan = make_plan(pool);
            const ta_seq seqs[] = {make_sequence(pool), make_sequence(pool)};
            const std::vector<int32_t> first = {130, 60}, second = {70, 5};
            ASSERT_EQ(step(plan, {seqs[0], seqs[1]}, first), step(twin_plan, {twins[0], twins[1]}, first));
            const ta_seq fork = fork_sequence(pool, seqs[which]);
            const std::vector<float> expected = [&] {
                begin(twin_plan, {twins[0], twins[1]}, second);
                std::vector<float> r = run_open_plan(twin_plan, second, 7);
                end(twin_plan);
                return r;
            }();
            int calls = 0;
            const auto call_done = [&] {
                if (calls++ != GetParam()) return;
                EXPECT_EQ(release(seqs[which]), TA_OK);
                EXPECT_EQ(stats(pool).sequences, 2u) << "the other and the fork";
                expect_stale(seqs[which]);
            };
            begin(plan, {seqs[0], seqs[1]}, second);
            call_done();
            Random random(7);
            const int64_t n = 75;
            std::vector<float> results;
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                Tensor k(random.normals(n * kRow), n, kHeads, kDim), v(random.normals(n * kRow), n, kHeads, kDim);
                Tensor q(random.normals(n * kQHeads * kDim), n, kQHeads, kDim), out(n, kQHeads, kDim);
                append(plan, layer, k, v);
                call_done();
                attend(plan, layer, q, out);
                call_done();
                const std::vector<float> values = out.values();
                results.insert(results.end(), values.begin(), values.end());
            }
            EXPECT_EQ(results, expected) << "rows of a released sequence are computed like the others";
            ASSERT_EQ(commits ? ta_plan_end(plan.get(), nullptr, nullptr) : ta_plan_abort(plan.get(), nullptr), TA_OK);
            const ta_seq other = seqs[1 - which];
            EXPECT_EQ(length(pool, other), first[1 - which] + (commits ? second[1 - which] : 0));
            EXPECT_EQ(length(pool, fork), first[which]) << "a fork keeps what it has";
            EXPECT_EQ(ta_seq_verify(pool.get(), fork, nullptr), TA_OK);
            EXPECT_EQ(stats(pool).appended_tokens, 190u + uint64_t(commits ? second[1 - which] : 0));
            if (commits) {
                EXPECT_EQ(dequantize(pool, other, 1, 0, length(pool, other), kRow),
                          dequantize(twin, twins[1 - which], 1, 0, length(pool, other), kRow));
            }
            EXPECT_EQ(release(fork), TA_OK);
            EXPECT_EQ(release(other), TA_OK);
            EXPECT_EQ(stats(pool).bytes_used, 0u);
        }
    }
}
INSTANTIATE_TEST_SUITE_P(AfterCalls, ReleaseWithin, ::testing::Range(0, 5));

TEST_F(Release, AStepThatHasLostAllItsSequencesEnds) {
    begin(plan, {long_seq, short_seq}, {70, 1});
    EXPECT_EQ(release(long_seq), TA_OK);
    EXPECT_EQ(release(short_seq), TA_OK);
    EXPECT_EQ(stats(pool).sequences, 0u);
    EXPECT_EQ(stats(pool).tokens, 0u);
    EXPECT_GT(stats(pool).bytes_used, 0u) << "the plan still reads them";
    run_open_plan(plan, {70, 1});
    end(plan);
    EXPECT_EQ(stats(pool).bytes_used, 0u);
    EXPECT_EQ(stats(pool).appended_tokens, before.stats.appended_tokens);
    EXPECT_EQ(step(plan, {make_sequence(pool)}, {3}).size(), size_t(2 * 3 * kQHeads * kDim));
}

TEST_F(Release, TheSlotIsFreeWhenThePlanEnds) {
    while (stats(pool).sequences < 8) make_sequence(pool);
    begin(plan, {short_seq}, {1});
    ASSERT_EQ(release(short_seq), TA_OK);
    EXPECT_EQ(stats(pool).sequences, 7u);
    ta_seq fresh = 5;
    EXPECT_EQ(ta_seq_create(pool.get(), &fresh, nullptr), TA_E_LIMIT) << "it counts among max_sequences until then";
    plan.reset();
    ASSERT_EQ(ta_seq_create(pool.get(), &fresh, nullptr), TA_OK);
    EXPECT_EQ(uint32_t(fresh), uint32_t(short_seq));
    EXPECT_NE(fresh, short_seq);
    EXPECT_EQ(length(pool, fresh), 0);
    expect_stale(short_seq);
}

TEST_F(Release, ASavedPoolDoesNotHaveIt) {
    begin(plan, {short_seq}, {1});
    const std::filesystem::path path = std::filesystem::temp_directory_path() / ("ta-release-" + std::to_string(::getpid()));
    std::filesystem::remove(path);
    EXPECT_EQ(ta_kv_pool_save(pool.get(), path.c_str(), 0, nullptr, nullptr), TA_E_BUSY);
    ASSERT_EQ(release(short_seq), TA_OK);
    ta_error err;
    ASSERT_EQ(ta_kv_pool_save(pool.get(), path.c_str(), 0, nullptr, &err), TA_OK) << err.message;
    uint64_t n = 0;
    EXPECT_EQ(ta_kv_pool_load(pool.get(), path.c_str(), nullptr, nullptr, 0, &n, &err), TA_OK) << err.message;
    EXPECT_EQ(n, 1u);
    std::filesystem::remove(path);
}

// ------------------------------------------------------------------------------------------------------------------- pools

TEST_F(Release, APoolClosesWithAnOpenPlan) {
    CountingAllocator allocator;
    const ta_allocator hooks = allocator.hooks();
    auto options = sized<ta_context_options>();
    options.threads = 1;
    options.allocator = &hooks;
    for (const bool aborts : {true, false}) {
        const Context c = make_context(options);
        pool = make_pool(c, pool_options(kLayers, kHeads, kDim));
        plan = make_plan(pool);
        const Plan idle = make_plan(pool);
        const ta_seq a = make_sequence(pool), b = make_sequence(pool);
        step(plan, {a, b}, {200, 200});
        begin(plan, {a}, {1});
        Random random(3);
        Tensor k(random.normals(kRow), 1, kHeads, kDim), q(random.normals(kQHeads * kDim), 1, kQHeads, kDim),
            out(1, kQHeads, kDim);
        append(plan, 0, k, k);
        const uint64_t open = allocator.bytes_alive();
        ASSERT_EQ(ta_kv_pool_close(pool.get(), nullptr), TA_OK);
        EXPECT_LT(allocator.bytes_alive(), open) << "the other sequence's blocks go at once";
        EXPECT_EQ(ta_kv_pool_close(pool.get(), nullptr), TA_E_CLOSED);
        EXPECT_EQ(ta_append(plan.get(), 1, k.view(), k.view(), nullptr), TA_E_CLOSED);
        EXPECT_EQ(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, nullptr), TA_E_CLOSED);
        EXPECT_EQ(ta_plan_end(plan.get(), nullptr, nullptr), TA_E_CLOSED);
        EXPECT_EQ(ta_plan_abort(idle.get(), nullptr), TA_E_CLOSED);
        EXPECT_TRUE(out.all_poison());
        const uint64_t closed = allocator.bytes_alive();
        if (aborts) {
            EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
            EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_E_CLOSED);
        } else {
            plan.reset();
        }
        EXPECT_LT(allocator.bytes_alive(), closed) << "the plan's blocks go when it ends";
        EXPECT_EQ(ta_seq_create(pool.get(), &short_seq, nullptr), TA_E_CLOSED);
        plan.reset();
        pool.reset();
    }
    EXPECT_EQ(allocator.bytes_alive(), 0u);
    EXPECT_EQ(allocator.faults(), 0u);
}

TEST_F(Release, ANamespaceEndsBesideItsSequencesInAnOpenPlan) {
    auto options = sized<ta_namespace_options>();
    options.salt[0] = 1;
    ta_namespace space = 0;
    ASSERT_EQ(ta_namespace_create(pool.get(), &options, &space, nullptr), TA_OK);
    std::vector<uint8_t> two(2 * 32, 9);
    two[32] = 1;
    ASSERT_EQ(ta_seq_publish(pool.get(), long_seq, space, two.data(), 2, nullptr), TA_OK);
    ta_seq matched = 0;
    int64_t n = 0;
    ASSERT_EQ(ta_seq_match_prefix(pool.get(), space, two.data(), 2, &matched, &n, nullptr), TA_OK);
    ASSERT_EQ(n, 128);
    const Stored stored = dequantize(pool, matched, 1, 0, 128, kRow);
    begin(plan, {matched}, {1});
    ASSERT_EQ(ta_namespace_destroy(pool.get(), space, nullptr), TA_OK);
    EXPECT_EQ(ta_namespace_destroy(pool.get(), space, nullptr), TA_E_STALE);
    EXPECT_EQ(ta_seq_match_prefix(pool.get(), space, two.data(), 2, &short_seq, &n, nullptr), TA_E_STALE);
    run_open_plan(plan, {1});
    end(plan);
    EXPECT_EQ(length(pool, matched), 129);
    EXPECT_EQ(dequantize(pool, matched, 1, 0, 128, kRow), stored);
    EXPECT_EQ(ta_seq_verify(pool.get(), matched, nullptr), TA_OK);
    EXPECT_EQ(release(matched), TA_OK);
    EXPECT_EQ(release(long_seq), TA_OK);
}

// The begin lacks room that an open plan holds. A pool with tiers would wait for it.
TEST(ReleaseWhileWaiting, ABeginOfAClosedPoolEnds) {
    const Context context = make_context(1);
    Budgets budgets{};
    budgets.device_blocks = 12;
    budgets.host_bytes = 256 << 10;
    budgets.begin_wait_ms = 60000;
    ta_tier_options tiers;
    const KvPool pool = make_pool(context, options_of(budgets, tiers));
    const ta_seq held = make_sequence(pool), fresh = make_sequence(pool);
    const Plan open = make_plan(pool), plan = make_plan(pool);
    const int32_t most = 18 * 64;
    ASSERT_EQ(ta_plan_begin(open.get(), 1, &held, &most, nullptr, nullptr, nullptr), TA_OK);
    const auto start = std::chrono::steady_clock::now();
    std::jthread closes([&] {
        std::this_thread::sleep_for(100ms);
        EXPECT_EQ(ta_kv_pool_close(pool.get(), nullptr), TA_OK);
    });
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &fresh, &most, nullptr, nullptr, nullptr), TA_E_CLOSED);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
    EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_E_CLOSED) << "it is not open";
}

TEST(ReleaseWhileWaiting, ReleasedBlocksOfAPlanAreRoomWhenItEnds) {
    const Context context = make_context(1);
    Budgets budgets{};
    budgets.device_blocks = 12;
    budgets.host_bytes = 256 << 10;
    budgets.begin_wait_ms = 60000;
    ta_tier_options tiers;
    const KvPool pool = make_pool(context, options_of(budgets, tiers));
    const Plan open = make_plan(pool), plan = make_plan(pool);
    const int32_t most = 18 * 64;
    for (int i = 0; i < 3; ++i) {
        const ta_seq held = make_sequence(pool), fresh = make_sequence(pool);
        ASSERT_EQ(ta_plan_begin(open.get(), 1, &held, &most, nullptr, nullptr, nullptr), TA_OK);
        std::jthread ends([&] {
            std::this_thread::sleep_for(20ms);
            EXPECT_EQ(ta_seq_release(pool.get(), held, nullptr), TA_OK);
            std::this_thread::sleep_for(20ms);
            EXPECT_EQ(ta_plan_abort(open.get(), nullptr), TA_OK);
        });
        ta_error err;
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &fresh, &most, nullptr, nullptr, &err), TA_OK) << err.message;
        EXPECT_EQ(ta_seq_release(pool.get(), fresh, nullptr), TA_OK);
        ends.join();
        EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        EXPECT_EQ(stats(pool).bytes_used, 0u);
    }
}

// Others release sequences of steps, close the pool and end its namespace while all of it is busy.
TEST(ReleaseThreads, WhatIsInUseEndsBesideItsUsers) {
    for (int round = 0; round < 3; ++round) {
        CountingAllocator allocator;
        const ta_allocator hooks = allocator.hooks();
        auto options = sized<ta_context_options>();
        options.threads = 2;
        options.allocator = &hooks;
        Context context = make_context(options);
        Budgets budgets{};
        budgets.device_blocks = 12;
        budgets.host_bytes = 1 << 20;
        ta_tier_options tiers;
        KvPool pool = make_pool(context, options_of(budgets, tiers));
        std::atomic<ta_seq> in_use[2] = {0, 0};
        std::atomic<bool> stop{false};
        const auto runs = [&](int thread) {
            Random random{uint64_t(thread + 1)};
            const Plan plan = make_plan(pool);
            Tensor k(random.normals(70 * kRow), 70, kHeads, kDim);
            while (!stop) {
                ta_seq seqs[2] = {0, 0};
                if (ta_seq_create(pool.get(), &seqs[0], nullptr) != TA_OK ||
                    ta_seq_create(pool.get(), &seqs[1], nullptr) != TA_OK)
                    return;
                for (int i = 0; i < 4; ++i) {
                    const int32_t n_new[] = {65, 5};
                    const ta_status began = ta_plan_begin(plan.get(), 2, seqs, n_new, nullptr, nullptr, nullptr);
                    if (began == TA_E_CLOSED || began == TA_E_STALE || began == TA_E_TIER_FULL) break;
                    ASSERT_EQ(began, TA_OK) << ta_status_name(began);
                    in_use[thread] = seqs[1];
                    for (uint32_t layer = 0; layer < kLayers; ++layer) {
                        const ta_status s = ta_append(plan.get(), layer, k.view(), k.view(), nullptr);
                        ASSERT_TRUE(s == TA_OK || s == TA_E_CLOSED) << ta_status_name(s);
                    }
                    const ta_status ended = ta_plan_end(plan.get(), nullptr, nullptr);
                    if (ended == TA_E_CLOSED) return;
                    ASSERT_EQ(ended, TA_OK);
                }
                for (const ta_seq seq : seqs) {
                    const ta_status s = ta_seq_release(pool.get(), seq, nullptr);
                    ASSERT_TRUE(s == TA_OK || s == TA_E_STALE || s == TA_E_CLOSED) << ta_status_name(s);
                }
            }
        };
        {
            std::jthread a([&] { runs(0); }), b([&] { runs(1); });
            const auto end = std::chrono::steady_clock::now() + 300ms;
            uint64_t released = 0;
            while (std::chrono::steady_clock::now() < end) {
                for (auto& seq : in_use) {
                    const ta_seq id = seq.exchange(0);
                    if (id && ta_seq_release(pool.get(), id, nullptr) == TA_OK) ++released;
                }
                std::this_thread::yield();
            }
            EXPECT_GT(released, 0u);
            if (round > 0) {
                EXPECT_EQ(ta_kv_pool_close(pool.get(), nullptr), TA_OK);
            }
            stop = true;
        }
        if (round == 0) {
            EXPECT_EQ(stats(pool).bytes_used, 0u);
            EXPECT_EQ(stats(pool).sequences, 0u);
        }
        pool.reset();
        context.reset();
        EXPECT_EQ(allocator.bytes_alive(), 0u);
    }
}

}  // namespace
}  // namespace ta::testing
