// One pool, many threads: each with a plan and sequences of its own gets what it would get alone, bit by bit, whatever the
// others do meanwhile. Small enough for ThreadSanitizer.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "support/handles.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64, kQHeads = 4;
constexpr int64_t kRow = kHeads * kDim;
constexpr int kThreads = 4;

void run_threads(const std::vector<std::function<void()>>& bodies) {
    std::vector<std::thread> threads;
    for (const auto& body : bodies) {
        threads.emplace_back([&body] {
            try {
                body();
            } catch (const std::exception& e) {
                ADD_FAILURE() << e.what();
            }
        });
    }
    for (std::thread& t : threads) t.join();
}

// The work of one client: prompts, decodes, forks, truncates; everything that it sees is a function of its seed.
std::vector<float> client(const KvPool& pool, uint64_t seed) {
    Random random(seed);
    const Plan plan = make_plan(pool);
    std::vector<ta_seq> seqs = {make_sequence(pool), make_sequence(pool)};
    std::vector<float> seen;
    const auto keep = [&](const std::vector<float>& x) { seen.insert(seen.end(), x.begin(), x.end()); };
    const auto step = [&](const std::vector<int32_t>& n_new) {
        begin(plan, seqs, n_new);
        int64_t n = 0;
        for (int32_t x : n_new) n += x;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(n * kRow), n, kHeads, kDim), v(random.normals(n * kRow), n, kHeads, kDim);
            Tensor q(random.normals(n * kQHeads * kDim), n, kQHeads, kDim), out(n, kQHeads, kDim);
            append(plan, layer, k, v);
            attend(plan, layer, q, out);
            keep(out.values());
        }
        end(plan);
    };
    step({130, 10});
    step({1, 1});
    seqs.push_back(fork_sequence(pool, seqs[0]));
    step({2, 60, 3});
    ta_error err;
    require(ta_seq_truncate(pool.get(), seqs[0], 100, &err), err);
    step({40, 1, 1});
    for (ta_seq seq : seqs) {
        require(ta_seq_verify(pool.get(), seq, &err), err);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const Stored s = dequantize(pool, seq, layer, 0, length(pool, seq), kRow);
            keep(s.k);
            keep(s.v);
        }
        require(ta_seq_release(pool.get(), seq, &err), err);
    }
    return seen;
}

class Threads : public ::testing::TestWithParam<int> {};

TEST_P(Threads, ClientsOfOnePoolGetWhatTheyWouldGetAlone) {
    const Context context = make_context(GetParam());
    const auto options = pool_options(kLayers, kHeads, kDim);
    std::vector<std::vector<float>> expected, got(kThreads);
    for (int i = 0; i < kThreads; ++i) expected.push_back(client(make_pool(context, options), uint64_t(i)));
    const KvPool pool = make_pool(context, options);
    std::vector<std::function<void()>> bodies;
    for (int i = 0; i < kThreads; ++i) {
        bodies.push_back([&, i] {
            for (int round = 0; round < 3; ++round) {
                got[size_t(i)] = client(pool, uint64_t(i));
                EXPECT_TRUE(got[size_t(i)] == expected[size_t(i)]) << "client " << i << ", round " << round;
            }
        });
    }
    run_threads(bodies);
    EXPECT_EQ(stats(pool).sequences, 0u);
    EXPECT_EQ(stats(pool).bytes_used, 0u);
}
INSTANTIATE_TEST_SUITE_P(Workers, Threads, ::testing::Values(1, 2, 3));

// Against the rule: who comes while another is in a call on the plan gets TA_E_BUSY, and nothing else happens. That one is
// refused, bad_order_test.cpp shows.
TEST(ThreadsOnShared, AnotherCallOnAPlanIsRefused) {
    const Context context = make_context(2);
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    Random random(60);
    const int64_t n = 64;
    Tensor k(random.normals(n * kRow), n, kHeads, kDim), q(random.normals(n * kQHeads * kDim), n, kQHeads, kDim);
    begin(plan, {seq}, {int32_t(n)});
    append(plan, 0, k, k);
    Tensor alone(n, kQHeads, kDim);
    attend(plan, 0, q, alone);
    const ta_tensor queries = *q.view();
    std::atomic<int> done{0};
    std::vector<std::function<void()>> bodies;
    for (int t = 0; t < kThreads; ++t) {
        bodies.emplace_back([&] {
            for (int i = 0; i < 50; ++i) {
                Tensor out(n, kQHeads, kDim);
                const ta_status status = ta_attend(plan.get(), 0, &queries, out.view(), nullptr, nullptr, nullptr);
                if (status == TA_OK) {
                    EXPECT_EQ(out.values(), alone.values());
                    ++done;
                } else {
                    EXPECT_EQ(status, TA_E_BUSY);
                    EXPECT_TRUE(out.all_poison());
                }
            }
        });
    }
    run_threads(bodies);
    EXPECT_GT(done.load(), 0);
    append(plan, 1, k, k);
    end(plan);
    EXPECT_EQ(length(pool, seq), n);
}

TEST(ThreadsOnShared, SequencesForkTheSamePrefixAtOnce) {
    const Context context = make_context(2);
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq prefix = make_sequence(pool);
    {
        const Plan plan = make_plan(pool);
        Random random(50);
        begin(plan, {prefix}, {100}, {0});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(100 * kRow), 100, kHeads, kDim);
            append(plan, layer, k, k);
        }
        end(plan);
    }
    // Each thread continues the same prefix with the same tokens: copy-on-write of one open block by all of them.
    const auto continued = [&] {
        const ta_seq seq = fork_sequence(pool, prefix);
        const Plan plan = make_plan(pool);
        Random random(51);
        std::vector<float> seen;
        for (int i = 0; i < 6; ++i) {
            begin(plan, {seq}, {1});
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                Tensor k(random.normals(kRow), 1, kHeads, kDim), q(random.normals(kQHeads * kDim), 1, kQHeads, kDim),
                    out(1, kQHeads, kDim);
                append(plan, layer, k, k);
                attend(plan, layer, q, out);
                const std::vector<float> x = out.values();
                seen.insert(seen.end(), x.begin(), x.end());
            }
            end(plan);
        }
        ta_error err;
        require(ta_seq_release(pool.get(), seq, &err), err);
        return seen;
    };
    const std::vector<float> expected = continued();
    const Stored before = dequantize(pool, prefix, 1, 0, 100, kRow);
    std::vector<std::function<void()>> bodies;
    for (int i = 0; i < kThreads; ++i) {
        bodies.push_back([&] {
            for (int round = 0; round < 4; ++round) EXPECT_TRUE(continued() == expected);
        });
    }
    run_threads(bodies);
    EXPECT_EQ(dequantize(pool, prefix, 1, 0, 100, kRow), before);
    EXPECT_EQ(stats(pool).sequences, 1u);
    EXPECT_EQ(stats(pool).shared_blocks, 0u);
}

TEST(ThreadsOnShared, CallsOnThePoolOverlap) {
    const Context context = make_context(2);
    auto options = pool_options(kLayers, kHeads, kDim);
    options.budget_bytes = 4 << 20;
    options.max_sequences = 40;
    const KvPool pool = make_pool(context, options);
    const ta_seq shared = make_sequence(pool);
    {
        const Plan plan = make_plan(pool);
        Random random(60);
        begin(plan, {shared}, {200}, {0});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(200 * kRow), 200, kHeads, kDim);
            append(plan, layer, k, k);
        }
        end(plan);
    }
    const Stored before = dequantize(pool, shared, 0, 0, 200, kRow);
    std::atomic<bool> stop{false};
    std::vector<std::function<void()>> bodies;
    for (int i = 0; i < 2; ++i) {
        bodies.push_back([&] {  // sequences come and go
            for (int n = 0; n < 150; ++n) {
                ta_seq a = 0, b = 0;
                ASSERT_EQ(ta_seq_create(pool.get(), &a, nullptr), TA_OK);
                const ta_status forked = ta_seq_fork(pool.get(), shared, &b, nullptr);
                ASSERT_TRUE(forked == TA_OK || forked == TA_E_BUSY) << ta_status_name(forked);
                if (forked == TA_OK) {
                    EXPECT_EQ(ta_seq_truncate(pool.get(), b, 64 + n % 100, nullptr), TA_OK);
                    EXPECT_EQ(ta_seq_release(pool.get(), b, nullptr), TA_OK);
                }
                EXPECT_EQ(ta_seq_release(pool.get(), a, nullptr), TA_OK);
                EXPECT_EQ(ta_seq_release(pool.get(), a, nullptr), TA_E_STALE);
            }
        });
    }
    bodies.push_back([&] {  // readers
        std::vector<float> k(200 * kRow);
        while (!stop) {
            const auto s = stats(pool);
            EXPECT_LE(s.bytes_used + s.bytes_cached, s.bytes_budget);
            EXPECT_LE(s.sequences, 7u);
            const ta_status verified = ta_seq_verify(pool.get(), shared, nullptr);
            EXPECT_TRUE(verified == TA_OK || verified == TA_E_BUSY) << ta_status_name(verified);
            EXPECT_EQ(length(pool, shared), 200);
            const ta_status read = ta_x_seq_dequantize(pool.get(), shared, 0, 0, 200, k.data(), nullptr, nullptr);
            EXPECT_TRUE(read == TA_OK || read == TA_E_BUSY);
            if (read == TA_OK) {
                EXPECT_EQ(k, before.k);
            }
            EXPECT_EQ(info(context).threads, 2);
        }
    });
    bodies.push_back([&] {  // a plan on the shared sequence that never commits
        const Plan plan = make_plan(pool);
        Random random(61);
        for (int n = 0; n < 30; ++n) {
            const int32_t n_new = int32_t(random.between(0, 80)), none = 0;
            const ta_status status = ta_plan_begin(plan.get(), 1, &shared, &n_new, &none, nullptr, nullptr);
            ASSERT_EQ(status, TA_OK);
            Tensor k(random.normals(n_new * kRow), n_new, kHeads, kDim);
            append(plan, 0, k, k);
            EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        }
        const ta_seq seq = make_sequence(pool);
        for (int n = 0; n < 10; ++n) {
            begin(plan, {seq}, {50}, {0});
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                Tensor k(random.normals(50 * kRow), 50, kHeads, kDim);
                append(plan, layer, k, k);
            }
            end(plan);
        }
        EXPECT_EQ(ta_seq_release(pool.get(), seq, nullptr), TA_OK);
        stop = true;
    });
    run_threads(bodies);
    EXPECT_EQ(dequantize(pool, shared, 0, 0, 200, kRow), before);
    EXPECT_EQ(stats(pool).sequences, 1u);
    EXPECT_EQ(ta_seq_release(pool.get(), shared, nullptr), TA_OK);
    EXPECT_EQ(stats(pool).bytes_used, 0u);
}

TEST(ThreadsOnShared, PoolsDenseCallsAndCalibratorsOfOneContextOverlap) {
    const Context context = make_context(3);
    Random random(70);
    const std::vector<float> q_values = random.normals(20 * kQHeads * kDim), k_values = random.normals(150 * kRow);
    const auto dense = [&] {
        Tensor q(q_values, 20, kQHeads, kDim), k(k_values, 150, kHeads, kDim), out(20, kQHeads, kDim);
        ta_error err;
        require(ta_attend_dense(context.get(), q.view(), k.view(), k.view(), out.view(), nullptr, nullptr, &err), err);
        return out.values();
    };
    const std::vector<float> expected_dense = dense(),
                             expected_client = client(make_pool(context, pool_options(kLayers, kHeads, kDim)), 7);
    std::vector<std::function<void()>> bodies;
    for (int i = 0; i < 2; ++i) {
        bodies.push_back([&] {
            for (int n = 0; n < 6; ++n) EXPECT_TRUE(dense() == expected_dense);
        });
    }
    bodies.push_back([&] {
        for (int n = 0; n < 2; ++n)
            EXPECT_TRUE(client(make_pool(context, pool_options(kLayers, kHeads, kDim)), 7) == expected_client);
    });
    bodies.push_back([&] {
        for (int n = 0; n < 10; ++n) {
            ta_calibrator* c = nullptr;
            ta_error err;
            require(ta_calibrator_create(context.get(), 1, kHeads, kDim, &c, &err), err);
            const Calibrator calibrator(c);
            Tensor k(k_values, 150, kHeads, kDim);
            require(ta_calibrator_observe(c, 0, k.view(), k.view(), &err), err);
            uint8_t bits[kHeads];
            require(ta_calibrator_finish(c, 1, bits, bits, nullptr, nullptr, &err), err);
        }
    });
    bodies.push_back([&] {
        for (int n = 0; n < 5; ++n) EXPECT_EQ(info(make_context(2)).threads, 2);  // contexts come and go beside them
    });
    run_threads(bodies);
}

}  // namespace
}  // namespace ta::testing
