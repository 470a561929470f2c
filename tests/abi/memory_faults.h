// Scenarios whose n-th allocation fails, alone or with all after it, for every n, through the allocator hooks, through operator new,
// and through both.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "support/counting_allocator.h"
#include "support/failing_memory.h"
#include "support/handles.h"

namespace ta::testing {

inline constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64, kQHeads = 4;
inline constexpr int64_t kRow = kHeads * kDim;

// Of the allocations that fail in turn: sanitizers take ten times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int64_t kStride = 3;
#else
inline constexpr int64_t kStride = 1;
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
        const uint64_t refused = allocator_.refused();
        ta_error err;
        ta_status status = armed([&] { return make(&err); });
        if (status == TA_OK) return;
        ++failures_;
        EXPECT_EQ(status, TA_E_MEMORY) << err.message;
        EXPECT_EQ(err.code, status);
        EXPECT_TRUE(*err.message && !std::strstr(err.message, "more than the status")) << err.message;
        EXPECT_TRUE(err.bytes > 0 || allocator_.refused() == refused) << "the hooks refused bytes: " << err.message;
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

inline const char* name_of(MemorySource source) {
    return source == MemorySource::kHooks ? "Hooks" : source == MemorySource::kNew ? "New" : "Both";
}

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
                         << "allocation " << n << " of " << name_of(source) << (sticky ? " and all after it fail" : " fails"));
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

inline void two_sequences(Life& r) {
    r.make_world();
    r.new_sequence();
    r.new_sequence();
    r.step({0, 1}, {200, 30});
}

}  // namespace ta::testing
