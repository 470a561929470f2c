// Memory that runs out at every possible point of steps and of what a pool does with sequences. A call that fails says TA_E_MEMORY,
// what lacked memory and how many bytes the hooks refused, and has changed nothing; made again with memory, the scenario ends with
// the same bits as if nothing had happened; nothing leaks.
#include <unistd.h>

#include <cstdio>

#include "abi/memory_faults.h"

namespace ta::testing {
namespace {

TEST_P(MemoryFaults, CreatingEverything) {
    for_every_fault([](Life&) {},
                    [](Life& r) {
                        r.make_world();
                        for (int i = 0; i < 20; ++i) r.new_sequence();
                    },
                    10);
}

TEST_P(MemoryFaults, AFirstStep) {
    for_every_fault(
        [](Life& r) {
            r.make_world();
            r.new_sequence();
            r.new_sequence();
        },
        [](Life& r) {
            r.step({0, 1}, {150, 3});
        },
        10);
}

TEST_P(MemoryFaults, ALaterStepAndALargerOne) {
    for_every_fault(
        two_sequences,
        [](Life& r) {
            r.step({1, 0}, {1, 1});
            r.step({0, 1}, {300, 40});
        },
        10);
}

TEST_P(MemoryFaults, ForkAndCopyOnWrite) {
    for_every_fault(
        two_sequences,
        [](Life& r) {
            r.fork(0);
            r.fork(1);
            r.step({2, 3, 1}, {2, 40, 1});
        },
        10);
}

TEST_P(MemoryFaults, DraftsOfWhichSomeStay) {
    for_every_fault(
        two_sequences,
        [](Life& r) {
            r.step({1, 0}, {70, 5}, {40, 0});
            r.step({0, 1}, {90, 3}, {70, 1});
        },
        10);
}

// K of the tokens that these have is encoded anew with the second one of each.
TEST_P(MemoryFaults, ABeginOfSeveralBlocksThatBeginAnew) {
    for_every_fault(
        [](Life& r) {
            r.make_world();
            for (int i = 0; i < 4; ++i) r.new_sequence();
            r.step({0, 1, 2, 3}, {1, 1, 1, 1});
            r.step({3}, {1});  // the plan has kept a block of this one
        },
        [](Life& r) {
            r.step({0, 1, 2}, {1, 1, 1});
        },
        4);
}

// Tokens that stay of drafts may have K of those before them encoded anew. If the end fails behind that, an abort puts it back.
TEST_P(MemoryFaults, AnAbortBehindAnEndOfDraftsThatFailed) {
    const auto [source, sticky] = GetParam();
    bool ended = false;
    for (int64_t n = 0; !ended; ++n) {
        SCOPED_TRACE(n);
        Life r(source, -1, sticky);
        r.make_world();
        r.new_sequence();
        r.step({0}, {1});
        const auto stored = [&] { return dequantize(r.pool, r.sequences[0], 0, 0, 1, kRow); };
        const Stored before = stored();
        auto drafts = sized<ta_step_options>();
        drafts.drafts = TA_ON;
        constexpr int32_t kNew = 20;
        ta_error err;
        require(ta_plan_begin(r.plan.get(), 1, r.sequences.data(), &kNew, nullptr, &drafts, &err), err);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            std::vector<float> k = r.random.normals(kNew * kRow);
            for (size_t i = 0; i < k.size(); i += kDim) k[i + 3] += 60, k[i + 35] -= 40;  // a pair that is worth turning
            Tensor kt(k, kNew, kHeads, kDim), vt(r.random.normals(kNew * kRow), kNew, kHeads, kDim);
            require(ta_append(r.plan.get(), layer, kt.view(), vt.view(), &err), err);
        }
        skip_allocations(n);
        arm_memory(source, sticky);
        const ta_status status = ta_plan_end(r.plan.get(), nullptr, &err);
        heal_memory();
        ended = status == TA_OK;
        if (ended) {
            EXPECT_FALSE(stored() == before) << "nothing began anew";
        } else {
            ASSERT_EQ(status, TA_E_MEMORY) << err.message;
            require(ta_plan_abort(r.plan.get(), &err), err);
            ASSERT_TRUE(stored() == before);
        }
        skip_allocations(INT64_MAX);
        ASSERT_LT(n, 1000);
    }
}

TEST_P(MemoryFaults, ReserveAndFit) {
    for_every_fault(
        two_sequences,
        [](Life& r) {
            const auto reserve = [&](int64_t tokens) {
                r.call("ta_seq_reserve",
                       [&](ta_error* err) { return ta_seq_reserve(r.pool.get(), r.sequences[1], tokens, -1, err); });
            };
            reserve(300);
            r.fork(1);
            auto fit = sized<ta_fit>();
            const std::vector<int32_t> n_new(r.sequences.size(), 100);
            r.call("ta_kv_pool_fit", [&](ta_error* err) {
                const ta_status status =
                    ta_kv_pool_fit(r.pool.get(), uint32_t(n_new.size()), r.sequences.data(), n_new.data(), &fit, err);
                EXPECT_EQ(fit.now, status == TA_OK) << "a call that failed has written its output";
                return status;
            });
            r.step({1, 0}, {170, 1});
            reserve(400);  // in place of what is left
            r.step({1}, {250});
            reserve(0);
            EXPECT_EQ(stats(r.pool).bytes_promised, 0u);
        },
        15);
}

TEST_P(MemoryFaults, TruncateAndReopen) {
    for_every_fault(
        two_sequences,
        [](Life& r) {
            r.call_without_memory("ta_seq_truncate",
                                  [&](ta_error* err) { return ta_seq_truncate(r.pool.get(), r.sequences[0], 150, err); });
            r.call_without_memory("ta_seq_truncate",
                                  [&](ta_error* err) { return ta_seq_truncate(r.pool.get(), r.sequences[1], 10, err); });
            r.step({0, 1}, {50, 2});
        },
        10);
}

TEST_P(MemoryFaults, ReleaseAndAbortNeedNone) {
    for_every_fault(
        two_sequences,
        [](Life& r) {
            const int32_t n_new[] = {70, 5};
            r.call("ta_plan_begin", [&](ta_error* err) {
                return ta_plan_begin(r.plan.get(), 2, r.sequences.data(), n_new, nullptr, nullptr, err);
            });
            r.call_without_memory("ta_plan_abort", [&](ta_error* err) { return ta_plan_abort(r.plan.get(), err); });
            r.call_without_memory("ta_seq_release",
                                  [&](ta_error* err) { return ta_seq_release(r.pool.get(), r.sequences[0], err); });
            r.sequences.erase(r.sequences.begin());
            int64_t n = 0;
            r.call_without_memory("ta_seq_length",
                                  [&](ta_error* err) { return ta_seq_length(r.pool.get(), r.sequences[0], &n, err); });
            r.step({0}, {40});
            r.call_without_memory("ta_kv_pool_close", [&](ta_error* err) { return ta_kv_pool_close(r.pool.get(), err); });
            r.pool.reset();
            r.sequences.clear();
        },
        3);
}

TEST_P(MemoryFaults, Inspection) {
    for_every_fault(
        two_sequences,
        [](Life& r) {
            std::vector<float> k(200 * kRow), v(200 * kRow);
            std::vector<uint8_t> bytes(1 << 16);
            auto block = sized<ta_x_block_info>();
            const ta_seq seq = r.sequences[0];
            r.call("ta_seq_verify", [&](ta_error* err) { return ta_seq_verify(r.pool.get(), seq, err); });
            r.call("ta_x_seq_dequantize",
                   [&](ta_error* err) { return ta_x_seq_dequantize(r.pool.get(), seq, 0, 0, 200, k.data(), v.data(), err); });
            r.call("ta_x_seq_block", [&](ta_error* err) {
                return ta_x_seq_block(r.pool.get(), seq, 1, &block, bytes.data(), bytes.size(), err);
            });
            r.call("ta_context_health", [&](ta_error* err) { return ta_context_health(r.context.get(), err); });
            r.keep(k);
            r.keep(v);
        },
        1);
}

TEST_P(MemoryFaults, PrefixesAndPoolFiles) {
    const std::string path = "/tmp/ta-memory-fault-" + std::to_string(getpid());
    for_every_fault(
        two_sequences,
        [&](Life& r) {
            auto options = sized<ta_namespace_options>();
            options.salt[0] = 1;
            ta_namespace space = 0;
            r.call("ta_namespace_create",
                   [&](ta_error* err) { return ta_namespace_create(r.pool.get(), &options, &space, err); });
            uint8_t keys[4 * 32] = {};
            for (size_t i = 0; i < 4; ++i) keys[i * 32] = uint8_t(i);
            r.call("ta_seq_publish",
                   [&](ta_error* err) { return ta_seq_publish(r.pool.get(), r.sequences[0], space, keys, 3, err); });
            r.call("ta_seq_match_prefix", [&](ta_error* err) {
                ta_seq seq = 0;
                int64_t n = 0;
                const ta_status status = ta_seq_match_prefix(r.pool.get(), space, keys, 4, &seq, &n, err);
                if (status == TA_OK) r.sequences.push_back(seq);
                EXPECT_EQ(n, status == TA_OK ? 192 : 0);
                return status;
            });
            r.step({2}, {70});
            std::remove(path.c_str());
            r.call("ta_kv_pool_save",
                   [&](ta_error* err) { return ta_kv_pool_save(r.pool.get(), path.c_str(), TA_SAVE_PUBLISHED, nullptr, err); });
            r.call("ta_kv_pool_load", [&](ta_error* err) {
                ta_loaded_seq loaded[3] = {};
                uint64_t n = 0;
                const ta_status status = ta_kv_pool_load(r.pool.get(), path.c_str(), nullptr, loaded, 3, &n, err);
                EXPECT_EQ(n, status == TA_OK ? 3u : 0u);
                for (uint64_t i = 0; i < n; ++i) r.sequences.push_back(loaded[i].loaded);
                return status;
            });
            r.step({3, 5}, {1, 1});
        },
        60);
    std::remove(path.c_str());
}

using Fault = std::tuple<MemorySource, bool>;
INSTANTIATE_TEST_SUITE_P(All, MemoryFaults,
                         ::testing::Values(Fault{MemorySource::kHooks, false}, Fault{MemorySource::kHooks, true},
                                           Fault{MemorySource::kNew, false}, Fault{MemorySource::kNew, true},
                                           Fault{MemorySource::kBoth, true}),
                         [](const auto& i) {
                             return std::string(name_of(std::get<0>(i.param))) + (std::get<1>(i.param) ? "FromThenOn" : "Once");
                         });

}  // namespace
}  // namespace ta::testing
