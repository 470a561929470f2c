// Sequences that are spread over GPUs, or over a GPU and a CPU, beside one GPU that has them whole. Two GPUs where there are two:
// then parts go from GPU to GPU, and graphs capture that. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <thread>

#include "abi/spread_layers.h"
#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using namespace spread;

constexpr int kCpu = -1;

// The devices of the ranks: GPUs' numbers, or kCpu.
struct Places {
    const char* name;
    std::vector<int> devices;
};
void PrintTo(const Places& p, std::ostream* out) {
    *out << p.name;
}

class GpuPartition : public ::testing::TestWithParam<Places> {
  protected:
    void SetUp() override {
        int gpus = 0;
        if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)
            GTEST_SKIP() << "no GPU: NOTHING OF THE CUDA BACKEND IS TESTED HERE";
        devices_ = GetParam().devices;
        if (*std::max_element(devices_.begin(), devices_.end()) >= gpus) GTEST_SKIP() << "needs two GPUs";
        for (const int d : devices_)
            by_kernel_ = by_kernel_ && d != kCpu && std::count(devices_.begin(), devices_.end(), d) == 1;
        for (size_t r = 0; r <= devices_.size(); ++r) {  // the last one is the whole's
            EXPECT_EQ(cudaSetDevice(std::max(device(uint32_t(r)), 0)), cudaSuccess);
            EXPECT_EQ(cudaStreamCreateWithFlags(&streams_.emplace_back(), cudaStreamNonBlocking), cudaSuccess);
        }
    }
    void TearDown() override {
        if (IsSkipped()) return;
        for (const cudaStream_t s : streams_) EXPECT_EQ(cudaStreamDestroy(s), cudaSuccess);
        EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }

    int device(uint32_t rank) const { return rank < devices_.size() ? devices_[rank] : 0; }
    cudaStream_t stream(uint32_t rank) const { return streams_[std::min<size_t>(rank, devices_.size())]; }

    static Context context_on(int device) {
        auto options = sized<ta_context_options>();
        options.threads = 2;
        options.device = device == kCpu ? TA_DEVICE_CPU : TA_DEVICE_CUDA;
        options.device_ordinal = std::max(device, 0);
        return make_context(options);
    }
    void set_stream(const Plan& plan, uint32_t rank) const {
        ta_error err;
        if (device(rank) != kCpu) require(ta_plan_set_stream(plan.get(), stream(rank), &err), err);
    }
    Given run(uint32_t rank, const Calls& calls) const {
        if (device(rank) == kCpu) return try_step(calls);
        EXPECT_EQ(cudaSetDevice(device(rank)), cudaSuccess);
        return try_step<DeviceCopy>(calls, [&] { EXPECT_EQ(cudaStreamSynchronize(stream(rank)), cudaSuccess); });
    }
    Spread make(
        uint32_t bits = 4, const Spread::Change& change = [](auto&) {}) const {
        return make(pool_shape(bits), change);
    }
    Spread make(
        const ta_kv_pool_options& pool, const Spread::Change& change = [](auto&) {}) const {
        std::vector<Context> contexts;
        for (const int d : devices_) contexts.push_back(context_on(d));
        Spread s(std::move(contexts), context_on(0), pool, change,
                 [this](uint32_t rank, const Calls& calls) { return run(rank, calls); });
        for (uint32_t r = 0; r < s.ranks.size(); ++r) set_stream(s.ranks[r].plan, r);
        set_stream(s.whole_plan, Spread::kWhole);
        // 2^x of POLY is the hardware's on a GPU.
        if (std::count(devices_.begin(), devices_.end(), kCpu)) s.tolerance = 4e-4;
        return s;
    }

    void check_graphs(int32_t tokens, int steps, const Asked& asked, double tolerance) const;

    std::vector<int> devices_;
    bool by_kernel_ = true;  // parts go from GPU to GPU

  private:
    std::vector<cudaStream_t> streams_;
};

ta_attend_options explicit_options() {
    ta_attend_options o = fine_options();
    o.exp = TA_EXP_POLY;
    return o;
}

Asked asking(int32_t n_new, int32_t n_query, int32_t group = 2) {
    Asked asked{n_new, n_query, uint64_t(n_new + n_query), group};
    asked.options = explicit_options();
    return asked;
}

TEST_P(GpuPartition, EveryRankHasTheResultsOfOne) {
    for (const uint32_t bits : {4u, 8u, 2u}) {
        SCOPED_TRACE(std::to_string(bits) + " bits");
        Spread s = make(bits);
        const size_t a = s.add(partition_options(7)), b = s.add(partition_options(3, 1));
        s.expect_step({a}, asking(300, 300));
        for (const int32_t tokens : {1, 62, 1, 1, 64, 65, 127, 129, 1})
            s.expect_step({a, b}, asking(tokens, std::min(tokens, 3), 3));
        s.expect_step({b}, asking(0, 5, 5));
        s.expect_step({a}, asking(2500, 2500, 4));  // more rows than one exchange takes
        s.expect_step({a, b}, asking(1, 1, 8));
    }
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
    double squares = a.size() == b.size() ? 0.0 : INFINITY;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) squares += std::pow(double(a[i]) - double(b[i]), 2);
    return std::sqrt(squares);
}

// Sequences of a spread, and each once more on the whole's GPU for steps with P of 16 bits. P of prompts has 8: the ranks' results
// are to be about as far from those steps' as one GPU's results of 8 bits are.
class Prompts {
  public:
    explicit Prompts(Spread& spread) : spread_(spread) {}
    size_t add(const ta_partition_options& options) {
        fine_.push_back(make_sequence(spread_.whole));
        return spread_.add(options);
    }
    void expect_step(const std::vector<size_t>& members, const Asked& asked, double more = 2e-3) const {
        Asked with_16_bits = asked;
        with_16_bits.options.p = TA_P_U16;
        std::vector<ta_seq> fine;
        for (const size_t m : members) fine.push_back(fine_[m]);
        const Given want = spread_.whole_step_of(fine, with_16_bits), one = spread_.whole_step(members, asked);
        ASSERT_EQ(want.status, TA_OK) << want.text;
        const std::vector<Given> given = spread_.steps(members, asked);
        const double size = distance(want.out, std::vector<float>(want.out.size()));
        for (const Given& g : given) {
            ASSERT_EQ(g.status, TA_OK) << g.text;
            EXPECT_LT(distance(g.out, want.out), 2.0 * distance(one.out, want.out) + more * size);
            if (asked.lse) {
                EXPECT_LT(largest_difference(g.lse, want.lse), 1e-2 + 2 * more);
            }
            EXPECT_TRUE(same_bits(g.out, given[0].out) && same_bits(g.lse, given[0].lse));
        }
    }

  private:
    Spread& spread_;
    std::vector<ta_seq> fine_;
};

Asked asking_as_usual(int32_t n_new, int32_t n_query, int32_t group, bool lse) {
    Asked asked = asking(n_new, n_query, group);
    asked.options.p = TA_P_DEFAULT;
    asked.lse = lse;
    return asked;
}

TEST_P(GpuPartition, PromptsOfAnyLength) {
    for (const bool lse : {false, true}) {
        uint32_t bits = 2;
        for (const int32_t group : {1, 4, 5, 8}) {
            SCOPED_TRACE("group " + std::to_string(group) + ", " + std::to_string(bits) + " bits" + (lse ? ", LSE" : ""));
            Spread s = make(bits);
            Prompts p(s);
            const size_t a = p.add(partition_options(7)), b = p.add(partition_options(3, 1));
            p.expect_step({a}, asking_as_usual(700, 700, group, lse));
            for (const int32_t tokens : {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300}) {
                Asked asked = asking_as_usual(tokens, tokens, group, lse);
                asked.more = 37;  // the second one's
                p.expect_step({a, b}, asked);
            }
            p.expect_step({b}, asking_as_usual(0, 200, group, lse));
            bits = bits == 8 ? 2 : 2 * bits;
        }
    }
}

TEST_P(GpuPartition, OptionsHoldOverAllRanks) {
    const std::function<void(Asked&)> options[] = {
        [](Asked& x) { x.options.window = 70; },  // some ranks have none of these keys
        [](Asked& x) { x.options.window = 500; },
        [](Asked& x) { x.options.mask = TA_MASK_FULL, x.options.window = 100; },
        [](Asked& x) { x.options.softcap = 5.0f; },
        [](Asked& x) {
            x.sinks = {0.5f, -1.0f, 6.0f, 2.0f};
        },
        [](Asked& x) {
            x.slopes = {0.01f, 0.02f, 0.0f, 0.5f};
        },
        [](Asked& x) { x.options.exp = TA_EXP_SAS; },
        [](Asked& x) {
            x.options.window = 300, x.options.softcap = 20.0f;
            x.sinks = {0.5f, -1.0f, 6.0f, 2.0f}, x.slopes = {0.01f, 0.02f, 0.0f, 0.5f};
        },
    };
    Spread s = make();
    Prompts p(s);
    const size_t a = p.add(partition_options(1, 1)), b = p.add(partition_options(2));
    p.expect_step({a, b}, asking_as_usual(900, 900, 2, false));
    for (size_t n = 0; n < std::size(options); ++n) {
        for (const int32_t tokens : {1, 6, 150}) {
            SCOPED_TRACE("options " + std::to_string(n) + ", " + std::to_string(tokens) + " tokens");
            Asked asked = asking_as_usual(tokens, tokens, 2, n % 2 != 0);
            asked.more = tokens / 2;
            options[n](asked);
            // SAS drops what is far below a rank's own maxima.
            p.expect_step({a, b}, asked, asked.options.exp == TA_EXP_SAS ? 0.05 : 2e-3);
        }
    }
}

// Steps over a sequence that is not spread, between those over one that is, in the same plan.
TEST_P(GpuPartition, PlansTakePlainSequencesInTurn) {
    const auto rank =
        uint32_t(std::find_if(devices_.begin(), devices_.end(), [](int d) { return d != kCpu; }) - devices_.begin());
    Spread s = make();
    Prompts p(s);
    const size_t a = p.add(partition_options(1));
    const ta_seq plain = make_sequence(s.ranks[rank].pool), beside = make_sequence(s.whole);
    for (const int32_t tokens : {300, 70, 200}) {
        const Asked asked = asking_as_usual(tokens, tokens, 4, false);
        p.expect_step({a}, asked);
        const Given got = run(rank, {s.ranks[rank].plan, {plain}, asked}), want = s.whole_step_of({beside}, asked);
        ASSERT_EQ(got.status, TA_OK) << got.text;
        EXPECT_TRUE(same_bits(got.out, want.out));
    }
}

// Blocks that get little attention go to host memory, at each rank those of its own.
TEST_P(GpuPartition, BlocksLeaveByTheirAttention) {
    ta_kv_pool_options pool = pool_shape();
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 64 << 20;
    tiers.eviction = TA_EVICT_ATTENTION;
    pool.tiers = &tiers;
    pool.budget_bytes = 300 << 10;
    Spread s = make(pool);
    Prompts p(s);
    const size_t a = p.add(partition_options(1, 1));
    for (int i = 0; i < 16; ++i) {
        p.expect_step({a}, asking_as_usual(300, 300, 4, i % 2 == 0));
        p.expect_step({a}, asking_as_usual(1, 1, 4, i % 2 == 0));
    }
    for (uint32_t r = 0; r < s.ranks.size(); ++r) {
        EXPECT_GT(residency(s.ranks[r].pool, s.seqs[a][r]).host_blocks, 0u) << "rank " << r;
        verify(s.ranks[r].pool, s.seqs[a][r]);
    }
}

TEST_P(GpuPartition, LayersMayDiffer) {
    const UnevenPool pool;
    Spread s = make(pool.options);
    expect_uneven_steps(s, [](int32_t n_new, int32_t n_query) { return asking(n_new, n_query); });
}

TEST_P(GpuPartition, QueriesMayStandAnywhere) {
    expect_positions(make(), [](int32_t n_new, int32_t n_query) { return asking(n_new, n_query); });
}

TEST_P(GpuPartition, OutputsGoWhereTheyAreWanted) {
    expect_outputs([this](const ta_kv_pool_options& pool) { return make(pool); },
                   [](int32_t n_new, int32_t n_query) { return asking(n_new, n_query, 5); });
}

TEST_P(GpuPartition, RanksThatDisagreeFindOut) {
    Spread s = make(4, [](ta_group_options& o) { o.operation_ms = 3000; });
    const size_t a = s.add(partition_options(1));
    s.expect_step({a}, asking(100, 1));
    const auto other = [](auto change) {
        return [change](uint32_t r) {
            Asked asked = asking(5, 2);
            if (r == 1) change(asked);
            return asked;
        };
    };
    for (const auto& differs : std::initializer_list<std::function<Asked(uint32_t)>>{
             other([](Asked& x) { x.n_new = 6; }), other([](Asked& x) { x.n_query = 3; }), other([](Asked& x) { x.group = 3; }),
             other([](Asked& x) { x.options.window = 9; })}) {
        bool told = false;
        for (const Given& g : s.steps({a}, differs)) {
            EXPECT_TRUE(g.status == TA_E_MISMATCH || g.status == TA_E_TIMEOUT || g.status == TA_E_CANCELLED)
                << ta_status_name(g.status) << g.text;
            EXPECT_GE(g.rank, 0);
            told |= g.status == TA_E_MISMATCH;
        }
        EXPECT_TRUE(told);
        for (uint32_t r = 0; r < s.ranks.size(); ++r)
            EXPECT_EQ(length(s.ranks[r].pool, s.seqs[a][r]), length(s.whole, s.whole_seqs[a]));
        s.expect_step({a}, asking(1, 1));
    }
}

// Rank 1 begins a step and does not attend: it gives the step up, is late, or leaves.
TEST_P(GpuPartition, ARankThatDoesNotAttend) {
    struct Case {
        ta_status status;
        int32_t operation_ms;
        std::function<void(Rank&)> then;
    };
    const Case cases[] = {{TA_E_CANCELLED, 60000, [](Rank& r) { (void)ta_plan_abort(r.plan.get(), nullptr); }},
                          {TA_E_TIMEOUT, 1000, [](Rank&) {}},
                          {TA_E_PEER_LOST, 60000, [](Rank& r) { r.group.reset(); }}};
    for (const Case& c : cases) {
        SCOPED_TRACE(ta_status_name(c.status));
        Spread s = make(4, [&](ta_group_options& o) { o.operation_ms = c.operation_ms; });
        const size_t a = s.add(partition_options(1));
        s.expect_step({a}, asking(100, 2));
        const auto begun = std::chrono::steady_clock::now();
        Given waits;
        std::vector<std::thread> others;
        for (uint32_t r = 0; r < s.ranks.size(); ++r) {
            if (r == 1) continue;
            others.emplace_back([&, r] {
                const Given g = s.step(r, {a}, asking(1, 1));
                if (r == 0) waits = g;
            });
        }
        begin(s.ranks[1].plan, s.at({a}, 1), {1}, {1});
        std::this_thread::sleep_for(std::chrono::milliseconds(200));
        c.then(s.ranks[1]);
        for (std::thread& t : others) t.join();
        EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
        // Of three ranks another one may have waited for rank 1 as long, and given the step up first.
        if (c.status == TA_E_TIMEOUT && waits.rank == 2) {
            EXPECT_EQ(waits.status, TA_E_CANCELLED) << waits.text;
        } else {
            EXPECT_EQ(waits.status, c.status) << waits.text;
            EXPECT_EQ(waits.rank, 1);
        }
        for (const float x : waits.out) EXPECT_TRUE(std::isnan(x));
        EXPECT_EQ(length(s.ranks[0].pool, s.seqs[a][0]), 100);
        (void)ta_plan_abort(s.ranks[1].plan.get(), nullptr);
        if (c.status == TA_E_PEER_LOST) continue;
        for (const int32_t tokens : {1, 70, 1}) s.expect_step({a}, asking(tokens, 1));
    }
}

TEST_P(GpuPartition, PlansComeAndGo) {
    Spread s = make();
    const size_t a = s.add(partition_options(1)), b = s.add(partition_options(2));
    for (int i = 0; i < 6; ++i) {
        s.expect_step({i % 2 ? a : b}, asking(i == 0 ? 200 : 3, 2));
        Rank& r = s.ranks[size_t(i % 2)];
        r.plan = make_plan(r.pool);
        set_stream(r.plan, uint32_t(i % 2));
    }
}

// Steps of so many tokens. Graphs captured in the first one are replayed in later ones, whatever blocks the ranks have by then.
void GpuPartition::check_graphs(int32_t tokens, int steps, const Asked& asked, double tolerance) const {
    constexpr int64_t kQHeads = kHeads * 4;
    const int64_t row = tokens * kRow, q_row = tokens * kQHeads * kDim;
    Spread s = make();
    const size_t a = s.add(partition_options(1));
    s.tolerance = tolerance;
    s.expect_step({a}, asking(500, 2, 4));
    s.expect_step({a}, asked);  // what captured calls need is there
    std::vector<std::string> failures(s.ranks.size());
    std::vector<std::vector<std::vector<float>>> out(s.ranks.size());
    const auto rank_steps = [&](uint32_t r) {
        ta_error err;
        EXPECT_EQ(cudaSetDevice(device(r)), cudaSuccess);
        Tensor kv(std::vector<float>(size_t(row)), tokens, kHeads, kDim),
            q(std::vector<float>(size_t(q_row)), tokens, kQHeads, kDim),
            o(std::vector<float>(size_t(q_row)), tokens, kQHeads, kDim);
        const DeviceCopy k_copy(kv), q_copy(q), o_copy(o);
        const Plan& plan = s.ranks[r].plan;
        CapturedGraph graph;
        ta_status status = TA_OK;
        for (int i = 0; i < steps; ++i) {
            Random random{uint64_t(i)};
            const std::vector<float> kv_now = random.normals(row), q_now = random.normals(q_row);
            cudaMemcpy(k_copy.view()->data, kv_now.data(), kv_now.size() * 4, cudaMemcpyHostToDevice);
            cudaMemcpy(q_copy.view()->data, q_now.data(), q_now.size() * 4, cudaMemcpyHostToDevice);
            begin(plan, s.at({a}, r), {tokens}, {tokens});
            if (!graph) {
                graph.capture(stream(r), [&] {
                    for (uint32_t layer = 0; layer < kLayers && status == TA_OK; ++layer) {
                        status = ta_append(plan.get(), layer, k_copy.view(), k_copy.view(), &err);
                        if (status == TA_OK)
                            status = ta_attend(plan.get(), layer, q_copy.view(), o_copy.view(), nullptr, &asked.options, &err);
                    }
                });
            }
            if (status != TA_OK) {
                failures[r] = std::string(ta_status_name(status)) + err.message;
                (void)ta_plan_abort(plan.get(), nullptr);
                return;
            }
            EXPECT_EQ(graph.launch(stream(r)), cudaSuccess);
            end(plan);
            o_copy.fetch();
            out[r].push_back(o.values());
        }
    };
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < s.ranks.size(); ++r) threads.emplace_back(rank_steps, r);
    for (std::thread& t : threads) t.join();
    if (!by_kernel_) {
        for (const std::string& f : failures) EXPECT_EQ(f.rfind("TA_E_UNSUPPORTED", 0), 0u) << f;
        s.expect_step({a}, asked);
        return;
    }
    // The whole's, one by one.
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    for (int i = 0; i < steps; ++i) {
        Random random{uint64_t(i)};
        Tensor kv(random.normals(row), tokens, kHeads, kDim), q(random.normals(q_row), tokens, kQHeads, kDim),
            o(std::vector<float>(size_t(q_row)), tokens, kQHeads, kDim);
        const DeviceCopy k_copy(kv), q_copy(q), o_copy(o);
        begin(s.whole_plan, {s.whole_seqs[a]}, {tokens}, {tokens});
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(s.whole_plan.get(), layer, k_copy.view(), k_copy.view(), &err), err);
            require(ta_attend(s.whole_plan.get(), layer, q_copy.view(), o_copy.view(), nullptr, &asked.options, &err), err);
        }
        end(s.whole_plan);
        EXPECT_EQ(cudaStreamSynchronize(stream(Spread::kWhole)), cudaSuccess);
        o_copy.fetch();
        for (size_t r = 0; r < s.ranks.size(); ++r) {
            ASSERT_EQ(out[r].size(), size_t(steps)) << failures[r];
            EXPECT_TRUE(same_bits(out[r][size_t(i)], out[0][size_t(i)])) << "step " << i;
            EXPECT_LT(largest_difference(out[r][size_t(i)], o.values()), tolerance) << "step " << i;
        }
    }
    s.expect_step({a}, asked);  // eager again
}

TEST_P(GpuPartition, GraphsHaveTheExchange) {
    if (std::count(devices_.begin(), devices_.end(), kCpu)) GTEST_SKIP() << "a rank has no graphs";
    check_graphs(1, 150, asking(1, 1, 4), 1e-4);
    check_graphs(40, 20, asking_as_usual(40, 40, 4, true), 2e-2);  // by the prefill kernel, P of 8 bits
}

INSTANTIATE_TEST_SUITE_P(Places, GpuPartition,
                         ::testing::Values(Places{"OneGpu", {0, 0}}, Places{"OneGpuThrice", {0, 0, 0}},
                                           Places{"GpuAndCpu", {0, kCpu}}, Places{"GpuAndTwoCpus", {kCpu, 0, kCpu}},
                                           Places{"TwoGpus", {0, 1}}),
                         [](const auto& i) { return i.param.name; });

}  // namespace
}  // namespace ta::testing
