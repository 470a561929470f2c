// Memory that runs out at every possible point: the n-th allocation of a scenario fails, alone or with all after it, for every
// n, through the allocator hooks and through operator new. A call that fails says TA_E_MEMORY and has changed nothing; made
// again with memory, the scenario ends with the same bits as if nothing had happened; nothing leaks.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>

#include "support/counting_allocator.h"
#include "support/failing_memory.h"
#include "support/files.h"
#include "support/groups.h"
#include "support/handles.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64, kQHeads = 4;
constexpr int64_t kRow = kHeads * kDim;

// Of the allocations that fail in turn: sanitizers take ten times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int64_t kStride = 3;
#else
constexpr int64_t kStride = 1;
#endif

// One run of a scenario with at most one fault.
class Life {
  public:
    Life(MemorySource source, int64_t fails_at, bool sticky) : source_(source), sticky_(sticky) {
        allocator_.fails = hook_fails;
        skip_allocations(fails_at < 0 ? INT64_MAX : fails_at);
        sequences.reserve(64);  // what follows an armed call within its lambda must not allocate
    }
    ~Life() { finish(); }

    // Makes the call; where it lacks memory, checks that nothing has changed and makes it again with memory.
    template <class Call>
    void call(const char* what, Call&& make) {
        SCOPED_TRACE(what);
        const State before = state();
        ta_error err;
        ta_status status = armed([&] { return make(&err); });
        if (status == TA_OK) return;
        ++failures_;
        EXPECT_EQ(status, TA_E_MEMORY) << err.message;
        EXPECT_EQ(err.code, status);
        EXPECT_TRUE(state() == before) << "a call that failed has changed something";
        skip_allocations(INT64_MAX);
        status = make(&err);
        ASSERT_EQ(status, TA_OK) << "again, with memory: " << err.message;
    }
    // A call that has to work without memory.
    template <class Call>
    void call_without_memory(const char* what, Call&& make) {
        ta_error err;
        const ta_status status = armed([&] { return make(&err); });
        ASSERT_EQ(status, TA_OK) << what << ": " << err.message;
    }

    void make_world() {
        make_context();
        make_pool();
    }
    void make_context() {
        static ta_allocator hooks;
        hooks = allocator_.hooks();
        auto options = sized<ta_context_options>();
        options.threads = 1;
        options.allocator = &hooks;
        call("ta_context_create", [&](ta_error* err) {
            ta_context* p = nullptr;
            const int released = allocator_.released();
            const ta_status status = ta_context_create(&options, &p, err);
            EXPECT_EQ(allocator_.released() - released, status != TA_OK) << "a set that was given is released";
            context.reset(p);
            return status;
        });
    }
    void make_pool() {
        static const uint8_t k_bits[] = {4, 2, 8, 4}, v_bits[] = {4, 4, 2, 8};
        static const std::vector<float> offset(kLayers * kRow, 0.25f);
        auto numerics = sized<ta_numerics>();
        numerics.k_offset = offset.data();
        auto options = pool_options(kLayers, kHeads, kDim, 0, &numerics);
        options.k_bits = k_bits;
        options.v_bits = v_bits;
        call("ta_kv_pool_create", [&](ta_error* err) {
            ta_kv_pool* p = nullptr;
            const ta_status status = ta_kv_pool_create(context.get(), &options, &p, err);
            pool.reset(p);
            return status;
        });
        call("ta_plan_create", [&](ta_error* err) {
            ta_plan* p = nullptr;
            const ta_status status = ta_plan_create(pool.get(), nullptr, &p, err);
            plan.reset(p);
            return status;
        });
    }
    void new_sequence() {
        call("ta_seq_create", [&](ta_error* err) {
            ta_seq seq = 0;
            const ta_status status = ta_seq_create(pool.get(), &seq, err);
            if (status == TA_OK) sequences.push_back(seq);
            return status;
        });
    }
    void fork(size_t source) {
        call("ta_seq_fork", [&](ta_error* err) {
            ta_seq seq = 0;
            const ta_status status = ta_seq_fork(pool.get(), sequences[source], &seq, err);
            if (status == TA_OK) sequences.push_back(seq);
            return status;
        });
    }
    // `keep`: of drafts.
    void step(const std::vector<size_t>& which, const std::vector<int32_t>& n_new, const std::vector<int32_t>& kept = {}) {
        auto how = sized<ta_step_options>();
        how.drafts = kept.empty() ? TA_OFF : TA_ON;
        std::vector<ta_seq> seqs;
        int64_t n = 0;
        for (size_t i : which) seqs.push_back(sequences[i]);
        for (int32_t x : n_new) n += x;
        call("ta_plan_begin", [&](ta_error* err) {
            return ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), nullptr, &how, err);
        });
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(n * kRow), n, kHeads, kDim), v(random.normals(n * kRow), n, kHeads, kDim);
            Tensor q(random.normals(n * kQHeads * kDim), n, kQHeads, kDim), out(n, kQHeads, kDim);
            call("ta_append", [&](ta_error* err) { return ta_append(plan.get(), layer, k.view(), v.view(), err); });
            call("ta_attend", [&](ta_error* err) {
                const ta_status status = ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, nullptr, err);
                EXPECT_TRUE(status == TA_OK || out.all_poison()) << "a call that failed has written its output";
                return status;
            });
            keep(out.values());
        }
        const std::vector<int32_t> wrong(kept.size(), 1 << 20);
        call("ta_plan_end", [&](ta_error* err) {
            const ta_status status = ta_plan_end(plan.get(), kept.empty() ? nullptr : kept.data(), err);
            if (status != TA_OK && !kept.empty()) {
                EXPECT_NE(ta_plan_end(plan.get(), wrong.data(), nullptr), TA_OK) << "another keep is taken";
            }
            return status;
        });
    }
    void keep(const std::vector<float>& x) { results.insert(results.end(), x.begin(), x.end()); }

    // Destroys everything, which needs no memory, and checks that it was given back.
    void finish() {
        if (finished_) return;
        finished_ = true;
        for (ta_seq seq : sequences) {
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                const Stored s = dequantize(pool, seq, layer, 0, length(pool, seq), kRow);
                keep(s.k);
                keep(s.v);
            }
        }
        if (context) {
            EXPECT_EQ(info(context).bytes_in_use, allocator_.bytes_alive());
        }
        (void)armed([&] {
            plan.reset();
            pool.reset();
            calibrator.reset();
            context.reset();
            return TA_OK;
        });
        EXPECT_EQ(allocator_.bytes_alive(), 0u) << "leaked";
        EXPECT_EQ(allocator_.blocks_alive(), 0u) << "leaked";
        EXPECT_EQ(allocator_.faults(), 0u) << "the hooks were called with wrong sizes or alignments";
    }
    // Allocations that were left to count when the scenario ended: negative where the fault came.
    bool fault_came() const { return failures_ > 0 || memory_failed(); }

    Context context;
    KvPool pool;
    Plan plan;
    Calibrator calibrator;
    std::vector<ta_seq> sequences;
    std::vector<float> results;
    Random random{31};

  private:
    struct State {
        ta_kv_pool_stats stats{};
        std::vector<int64_t> lengths;
        std::vector<Stored> stored;
        bool operator==(const State& other) const {
            return std::memcmp(&stats, &other.stats, sizeof stats) == 0 && lengths == other.lengths && stored == other.stored;
        }
    };
    State state() const {
        State s;
        if (!pool) return s;
        s.stats = testing::stats(pool);
        s.stats.bytes_cached = s.stats.bytes_peak = 0;  // a reservation that was undone leaves blocks behind for the next one
        for (ta_seq seq : sequences) {
            s.lengths.push_back(length(pool, seq));
            Stored values{std::vector<float>(size_t(s.lengths.back() * kRow)),
                          std::vector<float>(size_t(s.lengths.back() * kRow))};
            const ta_status status =
                ta_x_seq_dequantize(pool.get(), seq, 1, 0, s.lengths.back(), values.k.data(), values.v.data(), nullptr);
            if (status == TA_OK) s.stored.push_back(std::move(values));  // else it is in the open plan
        }
        return s;
    }

    template <class Call>
    ta_status armed(Call&& make) {
        arm_memory(source_, sticky_);
        const ta_status status = make();
        heal_memory();
        return status;
    }

    CountingAllocator allocator_;
    const MemorySource source_;
    const bool sticky_;
    int failures_ = 0;
    bool finished_ = false;
};

using Scenario = std::function<void(Life&)>;

class MemoryFaults : public ::testing::TestWithParam<std::tuple<MemorySource, bool>> {
  protected:
    // `prepare` runs with memory, `scenario` with the fault.
    void for_every_fault(const Scenario& prepare, const Scenario& scenario, int64_t at_least) {
        const auto [source, sticky] = GetParam();
        Life clean(source, -1, false);
        prepare(clean);
        scenario(clean);
        clean.finish();
        int64_t n = 0;
        for (;; n += kStride) {
            SCOPED_TRACE(::testing::Message()
                         << "allocation " << n << " of the " << (source == MemorySource::kHooks ? "hooks" : "operator new")
                         << (sticky ? " and all after it fail" : " fails"));
            Life run(source, -1, sticky);
            prepare(run);
            skip_allocations(n);
            scenario(run);
            const bool came = run.fault_came();
            skip_allocations(INT64_MAX);
            run.finish();
            EXPECT_EQ(run.results.size(), clean.results.size());
            EXPECT_TRUE(run.results == clean.results) << "the results differ from those of a run with enough memory";
            if (!came || HasFailure()) break;
            ASSERT_LT(n, 5000);
        }
        EXPECT_TRUE(HasFailure() || source == MemorySource::kHooks || n >= at_least)
            << "the scenario hardly takes memory: is it armed?";
    }
};

void two_sequences(Life& r) {
    r.make_world();
    r.new_sequence();
    r.new_sequence();
    r.step({0, 1}, {200, 30});
}

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

TEST_P(MemoryFaults, DenseAttention) {
    for_every_fault(
        [](Life& r) { r.make_context(); },
        [](Life& r) {
            const int64_t q_offsets[] = {0, 1, 30}, k_offsets[] = {0, 70, 170};
            for (ta_dense_variant variant : {TA_DENSE_INT8_PAGE, TA_DENSE_INT_FLASH, TA_DENSE_INT_FLASH_HALF, TA_DENSE_DISTR}) {
                Tensor q(r.random.normals(30 * kQHeads * kDim), 30, kQHeads, kDim), out(30, kQHeads, kDim);
                Tensor k(r.random.normals(170 * kRow), 170, kHeads, kDim), v(r.random.normals(170 * kRow), 170, kHeads, kDim);
                auto options = sized<ta_dense_options>();
                options.variant = variant;
                options.batch = 2;
                options.q_offsets = q_offsets;
                options.k_offsets = k_offsets;
                r.call("ta_attend_dense", [&](ta_error* err) {
                    const ta_status status =
                        ta_attend_dense(r.context.get(), q.view(), k.view(), v.view(), out.view(), nullptr, &options, err);
                    EXPECT_TRUE(status == TA_OK || out.all_poison()) << "a call that failed has written its output";
                    return status;
                });
                r.keep(out.values());
            }
        },
        10);
}

// By a group of one rank, in rounds of one head.
TEST_P(MemoryFaults, ScatteredHeads) {
    GroupHandle group;
    for_every_fault(
        [&group](Life& r) {
            r.make_context();
            const ta_group_id id = make_group_id();
            group = make_group(r.context, group_options(id, 0, 1));
            ASSERT_EQ(poll(group), TA_GROUP_READY);
        },
        [&group](Life& r) {
            Tensor q(r.random.normals(30 * kQHeads * kDim), 30, kQHeads, kDim), out(30, kQHeads, kDim);
            Tensor k(r.random.normals(30 * kRow), 30, kHeads, kDim), v(r.random.normals(30 * kRow), 30, kHeads, kDim);
            std::vector<float> lse(30 * kQHeads);
            auto scatter = sized<ta_x_scatter_options>();
            scatter.heads_per_round = 1;
            r.call("ta_x_group_attend_dense", [&](ta_error* err) {
                return ta_x_group_attend_dense(group.get(), q.view(), k.view(), v.view(), out.view(), lse.data(), nullptr, 0,
                                               &scatter, nullptr, err);
            });
            r.keep(out.values());
            r.keep(lse);
            group.reset();
        },
        10);
}

TEST_P(MemoryFaults, MergingNeedsNone) {
    for_every_fault([](Life& r) { r.make_context(); },
                    [](Life& r) {
                        Tensor a(r.random.normals(30 * kRow), 30, kHeads, kDim, TA_DTYPE_F16), out(30, kHeads, kDim);
                        const std::vector<ta_tensor> parts(3, *a.view());
                        const std::vector<float> lse(30 * kHeads, 1.0f);
                        const std::vector<const float*> lses(3, lse.data());
                        r.call_without_memory("ta_merge_states", [&](ta_error* err) {
                            return ta_merge_states(r.context.get(), 3, parts.data(), lses.data(), out.view(), nullptr, nullptr,
                                                   err);
                        });
                        r.keep(out.values());
                    },
                    0);
}

TEST_P(MemoryFaults, Calibration) {
    for_every_fault(
        [](Life& r) { r.make_context(); },
        [](Life& r) {
            r.call("ta_calibrator_create", [&](ta_error* err) {
                ta_calibrator* p = nullptr;
                const ta_status status = ta_calibrator_create(r.context.get(), 1, kHeads, kDim, &p, err);
                r.calibrator.reset(p);
                return status;
            });
            Tensor k(r.random.normals(5 * kRow), 5, kHeads, kDim), v(r.random.normals(5 * kRow), 5, kHeads, kDim);
            r.call("ta_calibrator_observe",
                   [&](ta_error* err) { return ta_calibrator_observe(r.calibrator.get(), 0, k.view(), v.view(), err); });
            uint8_t k_bits[kHeads] = {}, v_bits[kHeads] = {};
            std::vector<float> priorities(2 * kHeads, -1.0f);
            r.call("ta_calibrator_finish", [&](ta_error* err) {
                const ta_status status = ta_calibrator_finish(r.calibrator.get(), 1, k_bits, v_bits, priorities.data(),
                                                              priorities.data() + kHeads, err);
                const bool untouched = k_bits[0] + k_bits[1] + v_bits[0] + v_bits[1] == 0 &&
                                       std::all_of(priorities.begin(), priorities.end(), [](float x) { return x == -1.0f; });
                EXPECT_TRUE(status == TA_OK || untouched) << "a call that failed has written its output";
                return status;
            });
            r.call("ta_calibrator_choose", [&](ta_error* err) {
                const float costs[3 * kHeads] = {0, 1, 4, 0, 2, 9};
                std::fill(k_bits, k_bits + kHeads, uint8_t{0});
                const ta_status status = ta_calibrator_choose(r.calibrator.get(), costs, costs, 1 << 30, k_bits, v_bits, err);
                EXPECT_TRUE(status == TA_OK || k_bits[0] == 0) << "a call that failed has written its output";
                return status;
            });
            r.keep(priorities);
        },
        5);
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

// A creation that fails removes the file that it made, and none that was there.
TEST(MemoryFaultsOfTiers, ADiskTiersFile) {
    const Folder folder;
    const std::string file = folder.file("tier");
    const Context context = make_context(1);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = uint64_t{1} << 20;
    tiers.disk_path = file.c_str();
    auto options = pool_options(kLayers, kHeads, kDim, 4);
    options.tiers = &tiers;
    for (const bool exists : {false, true}) {
        int64_t n = 0;
        std::vector<int64_t> left;
        for (;; ++n) {
            SCOPED_TRACE("allocation " + std::to_string(n) + (exists ? ", with a file" : ""));
            ASSERT_EQ(std::filesystem::exists(file), exists);
            ta_kv_pool* pool = nullptr;
            ta_error err;
            skip_allocations(n);
            arm_memory(MemorySource::kNew, false);
            const ta_status status = ta_kv_pool_create(context.get(), &options, &pool, &err);
            heal_memory();
            EXPECT_TRUE(std::filesystem::exists(file) || (!exists && status != TA_OK)) << err.message;
            if (!exists && status != TA_OK && std::filesystem::exists(file)) left.push_back(n);
            ta_kv_pool_destroy(pool);
            if (status == TA_OK && !memory_failed()) break;
            EXPECT_TRUE(status == TA_OK || status == TA_E_MEMORY) << err.message;
            if (!exists) std::filesystem::remove(file);
            ASSERT_LT(n, 5000);
        }
        skip_allocations(INT64_MAX);
        EXPECT_GT(n, 30);
        EXPECT_TRUE(left.empty()) << "allocation " << left[0] << " of " << n;
    }
}

// A store that allocates nothing while it is called.
class FixedStore {
  public:
    static constexpr size_t kMost = 8;
    ta_block_store set() {
        auto s = sized<ta_block_store>();
        s.exists = each<[](FixedStore& f, ta_store_item& i) { return f.find(i) ? TA_STORE_DONE : TA_STORE_ABSENT; }>;
        s.get = each<[](FixedStore& f, ta_store_item& i) {
            const Value* v = f.find(i);
            if (!v) return TA_STORE_ABSENT;
            if (v->bytes <= i.bytes) std::memcpy(i.data, v->data, v->bytes);
            i.bytes = v->bytes;
            return TA_STORE_DONE;
        }>;
        s.put = each<[](FixedStore& f, ta_store_item& i) {
            Value* v = f.find(i);
            if (!v && f.used_ == kMost) return TA_STORE_FAILED;
            if (!v) v = &f.values_[f.used_++];
            std::memcpy(v->key, i.key, 32);
            std::memcpy(v->data, i.data, v->bytes = i.bytes);
            return TA_STORE_DONE;
        }>;
        s.remove = each<[](FixedStore&, ta_store_item&) { return TA_STORE_ABSENT; }>;
        s.user = this;
        return s;
    }

  private:
    struct Value {
        uint8_t key[32];
        uint64_t bytes;
        uint8_t data[1 << 17];
    };
    template <auto kDo>
    static int32_t each(void* user, ta_store_item* items, uint64_t n, int64_t) {
        for (uint64_t i = 0; i < n; ++i) items[i].result = kDo(*static_cast<FixedStore*>(user), items[i]);
        return 0;
    }
    Value* find(const ta_store_item& i) {
        for (size_t v = 0; v < used_; ++v) {
            if (std::memcmp(values_[v].key, i.key, 32) == 0) return &values_[v];
        }
        return nullptr;
    }
    size_t used_ = 0;
    Value values_[kMost];
};

// Memory that runs out in the call, or in the threads of a store: what lacks it fails or is done later, and what came is right.
TEST(MemoryFaultsOfTiers, AStore) {
    constexpr uint64_t kBlocks = 4;
    const Context context = make_context(1);
    const KvPool from = make_pool(context, pool_options(kLayers, kHeads, kDim, 4)),
                 to = make_pool(context, pool_options(kLayers, kHeads, kDim, 4));
    auto o = sized<ta_namespace_options>();
    o.salt[0] = 1;
    uint8_t keys[32 * kBlocks] = {};
    for (uint64_t b = 0; b < kBlocks; ++b) keys[32 * b] = uint8_t(b + 1);
    ta_namespace source = 0;
    ta_error err;
    require(ta_namespace_create(from.get(), &o, &source, &err), err);
    const ta_seq seq = make_sequence(from);
    {
        const Plan plan = make_plan(from);
        Tensor x(Random(3).normals(64 * kBlocks * kRow), 64 * kBlocks, kHeads, kDim);
        begin(plan, {seq}, {int32_t(64 * kBlocks)});
        for (uint32_t layer = 0; layer < kLayers; ++layer) append(plan, layer, x, x);
        end(plan);
    }
    require(ta_seq_publish(from.get(), seq, source, keys, kBlocks, &err), err);
    const Stored stored = dequantize(from, seq, 1, 0, 64 * kBlocks, kRow);
    const auto attempt = [&](int64_t n) {
        SCOPED_TRACE("allocation " + std::to_string(n));
        const auto store = std::make_unique<FixedStore>();
        const ta_block_store set = store->set();
        ta_namespace space = 0;
        require(ta_namespace_create(to.get(), &o, &space, &err), err);
        ta_ticket ticket = 0;
        uint64_t missing = kBlocks;
        auto info = sized<ta_move_info>();
        constexpr int64_t kSeconds = 1000000000;
        // Each call once with what memory there is, then until it went well.
        const auto go = [&](auto call) {
            const ta_status status = call();
            EXPECT_TRUE(status == TA_OK || status == TA_E_MEMORY) << err.message;
            return status == TA_OK;
        };
        const auto attach_from = [&] { return ta_namespace_attach_store(from.get(), source, &set, nullptr, &err); };
        const auto attach_to = [&] { return ta_namespace_attach_store(to.get(), space, &set, nullptr, &err); };
        const auto flush = [&] { return ta_namespace_flush_store(from.get(), source, 10 * kSeconds, &missing, &err); };
        const auto load = [&] { return ta_namespace_load(to.get(), space, keys, kBlocks, &ticket, &err); };
        const auto wait = [&] { return ta_move_wait(to.get(), ticket, 10 * kSeconds, &info, &err); };
        skip_allocations(n);
        arm_memory(MemorySource::kNew, false);
        const bool attached = go(attach_from);
        if (attached) go(flush);
        const bool here = go(attach_to);
        if (here && go(load)) go(wait);
        heal_memory();
        const bool failed = memory_failed();
        skip_allocations(INT64_MAX);
        EXPECT_TRUE(attached || go(attach_from));
        for (int i = 0; i < 20 && missing > 0; ++i) EXPECT_TRUE(go(flush));
        EXPECT_EQ(missing, 0u);
        EXPECT_TRUE(here || go(attach_to));
        EXPECT_TRUE(go(load) && go(wait));
        EXPECT_EQ(info.state, TA_MOVE_DONE);
        ta_seq copy = 0;
        int64_t tokens = 0;
        require(ta_seq_match_prefix(to.get(), space, keys, kBlocks, &copy, &tokens, &err), err);
        EXPECT_EQ(tokens, int64_t(64 * kBlocks));
        EXPECT_TRUE(dequantize(to, copy, 1, 0, tokens, kRow) == stored);
        EXPECT_EQ(ta_namespace_detach_store(from.get(), source, &err), TA_OK) << err.message;
        EXPECT_EQ(ta_seq_release(to.get(), copy, &err), TA_OK);
        EXPECT_EQ(ta_namespace_destroy(to.get(), space, &err), TA_OK);
        EXPECT_EQ(stats(to).bytes_used, 0u);
        return failed;
    };
    int64_t n = 0;
    while (attempt(n) && n < 2000 && !HasFailure()) ++n;
    EXPECT_GT(n, 30);
}

// A failed suspend may leave a block that is closed to writing in place. Calls do not show that.
TEST(MemoryFaultsOfTiers, ASuspend) {
    const Context context = make_context(1);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{1} << 20;
    auto options = pool_options(kLayers, kHeads, kDim, 4);
    options.tiers = &tiers;
    const auto attempt = [&](int64_t n) {
        SCOPED_TRACE("allocation " + std::to_string(n));
        const KvPool pool = make_pool(context, options);
        const Plan plan = make_plan(pool);
        const ta_seq seq = make_sequence(pool);
        Random random(5);
        const auto step = [&](int32_t tokens) {
            Tensor k(random.normals(tokens * kRow), tokens, kHeads, kDim);
            begin(plan, {seq}, {tokens});
            for (uint32_t layer = 0; layer < kLayers; ++layer) append(plan, layer, k, k);
            end(plan);
        };
        step(150);
        ta_ticket ticket = 0;
        ta_error err;
        ta_seq_reserve(pool.get(), seq, 100, -1, nullptr);
        const ta_kv_pool_stats before = stats(pool);
        const Stored stored = dequantize(pool, seq, 1, 0, 150, kRow);
        skip_allocations(n);
        arm_memory(MemorySource::kNew, false);
        const ta_status status = ta_seq_suspend(pool.get(), seq, TA_TIER_HOST, &ticket, &err);
        heal_memory();
        const bool failed = memory_failed();
        skip_allocations(INT64_MAX);
        if (status != TA_OK) {
            EXPECT_EQ(status, TA_E_MEMORY) << err.message;
            const ta_kv_pool_stats now = stats(pool);
            EXPECT_EQ(std::memcmp(&before, &now, sizeof now), 0) << "a call that failed has changed something";
            EXPECT_EQ(ticket, 0u);
            EXPECT_TRUE(dequantize(pool, seq, 1, 0, 150, kRow) == stored);
            EXPECT_EQ(ta_seq_suspend(pool.get(), seq, TA_TIER_HOST, &ticket, &err), TA_OK) << err.message;
        }
        auto info = sized<ta_move_info>();
        require(ta_move_wait(pool.get(), ticket, -1, &info, &err), err);
        EXPECT_EQ(stats(pool).bytes_promised, 0u);
        EXPECT_TRUE(dequantize(pool, seq, 1, 0, 150, kRow) == stored);
        step(30);
        EXPECT_EQ(ta_seq_verify(pool.get(), seq, &err), TA_OK) << err.message;
        EXPECT_EQ(length(pool, seq), 180);
        return failed;
    };
    int64_t n = 0;
    while (attempt(n) && !HasFailure()) ASSERT_LT(++n, 500);
    EXPECT_TRUE(HasFailure() || n >= 4) << n;
}

INSTANTIATE_TEST_SUITE_P(All, MemoryFaults,
                         ::testing::Combine(::testing::Values(MemorySource::kHooks, MemorySource::kNew), ::testing::Bool()),
                         [](const auto& i) {
                             return std::string(std::get<0>(i.param) == MemorySource::kHooks ? "Hooks" : "New") +
                                    (std::get<1>(i.param) ? "FromThenOn" : "Once");
                         });

}  // namespace
}  // namespace ta::testing
