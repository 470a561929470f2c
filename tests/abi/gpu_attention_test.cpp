// TA_EVICT_ATTENTION and drop_coldest on a GPU: beside a CPU that is fed the same rows, blocks get the same attention, leave in
// the same order and are lost in the same order, and results are attention over the tokens that are left. Skipped where there
// is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kHeads = 2, kDim = 128;
constexpr int64_t kRow = kHeads * kDim;
constexpr double kMassError = 1e-3;  // of the attention that all blocks of a sequence got

class GpuAttention : public GpuTest {
  protected:
    struct Budgets {
        uint64_t device_blocks = 1000, host_bytes = 0;
        ta_eviction eviction = TA_EVICT_ATTENTION;
        ta_switch drop_coldest = TA_DEFAULT;
        uint32_t layers = 2;
        int32_t attention_layers = 1, attention_layers_on_cpu = 0;  // 0: as on the GPU
        bool cpu_follows = false;
    };

    void make(const Budgets& b, int query_group = 4) {
        gpu_plan.reset(), cpu_plan.reset();
        gpu_pool.reset(), cpu_pool.reset();
        group = query_group;
        layers = b.layers;
        attention_layers = b.attention_layers;
        cpu_follows = b.cpu_follows;
        turn = 0;
        windows.clear();
        auto options = pool_options(layers, kHeads, kDim, 4);
        const ta_kv_pool_stats s = stats(make_pool(cpu, options));
        options.budget_bytes = 8 * s.token_block_bytes + b.device_blocks * s.channel_block_bytes;
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = b.host_bytes;
        tiers.eviction = b.eviction;
        auto tuning = sized<ta_x_tier_tuning>();
        tuning.attention_half_life = 4;
        tuning.attention_layers = b.attention_layers;
        tiers.tuning = &tuning;
        tiers.drop_coldest = b.drop_coldest;
        options.tiers = &tiers;
        gpu_pool = make_pool(gpu, options);
        if (b.attention_layers_on_cpu > 0) tuning.attention_layers = b.attention_layers_on_cpu;
        if (cpu_follows) tuning.attention_layers = 1;
        cpu_pool = make_pool(cpu, options);
        gpu_plan = make_plan(gpu_pool);
        cpu_plan = make_plan(cpu_pool);
        ta_error err;
        require(ta_plan_set_stream(gpu_plan.get(), stream, &err), err);
        on_gpu.clear(), on_cpu.clear();
    }
    size_t add() {
        on_gpu.push_back(make_sequence(gpu_pool));
        on_cpu.push_back(make_sequence(cpu_pool));
        return on_gpu.size() - 1;
    }
    std::vector<float> normals(int64_t n, float scale = 1.0f) {
        std::vector<float> x = random.normals(n);
        for (float& v : x) v *= scale;
        return x;
    }
    // One step of both. `groups` of the calls of each layer, one after the other; none: one call with `group`.
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new, const std::vector<int32_t>& n_query,
              int64_t window = 0, const std::vector<int>& groups = {}) {
        std::vector<ta_seq> a, b;
        for (const size_t m : members) a.push_back(on_gpu[m]), b.push_back(on_cpu[m]);
        const int64_t rows = std::accumulate(n_new.begin(), n_new.end(), int64_t{0});
        const int64_t queries = std::accumulate(n_query.begin(), n_query.end(), int64_t{0});
        begin(gpu_plan, a, n_new, n_query);
        begin(cpu_plan, b, n_new, n_query);
        auto options = sized<ta_attend_options>();
        for (uint32_t layer = 0; layer < layers; ++layer) {
            const std::vector<float> kv = normals(rows * kRow);
            const DeviceTensor k(rows, kHeads, kDim, &kv);
            Tensor ck(kv, rows, kHeads, kDim, TA_DTYPE_F16);
            ta_error err;
            require(ta_append(gpu_plan.get(), layer, k.view(), k.view(), &err), err);
            append(cpu_plan, layer, ck, ck);
            if (queries == 0) continue;
            options.window = windows.empty() ? window : windows[layer];
            for (const int g : groups.empty() ? std::vector<int>{group} : groups) {
                attend_both(layer, queries, kHeads * g, options);
                if (HasFatalFailure()) return;
            }
        }
        end(gpu_plan);
        end(cpu_plan);
        turn += queries > 0;
    }
    // True if the CPU attends to the layer: it does not where it observes all layers that it attends to, and the GPU is not to
    // observe this one.
    bool cpu_attends(uint32_t layer, uint64_t in_turn) const {
        return !cpu_follows || (layer + in_turn) % uint64_t(attention_layers) == 0;
    }
    void attend_both(uint32_t layer, int64_t queries, int64_t q_heads, const ta_attend_options& options) {
        const std::vector<float> qv = normals(queries * q_heads * kDim, 2.0f);
        const DeviceTensor q(queries, q_heads, kDim, &qv), out(queries, q_heads, kDim);  // NaN, until it is written
        Tensor cq(qv, queries, q_heads, kDim, TA_DTYPE_F16), cout(queries, q_heads, kDim);
        ta_error err;
        require(ta_attend(gpu_plan.get(), layer, q.view(), out.view(), nullptr, &options, &err), err);
        const bool by_cpu = cpu_attends(layer, turn);
        if (by_cpu) attend(cpu_plan, layer, cq, cout, nullptr, &options);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        const std::vector<float> got = out.get();
        const auto hole = std::find_if(got.begin(), got.end(), [](float x) { return std::isnan(x); });
        EXPECT_TRUE(hole == got.end()) << "layer " << layer << ", " << q_heads << " query heads: query "
                                       << (hole - got.begin()) / (q_heads * kDim) << " was left out";
        if (by_cpu) expect_close(got, cout.values());
    }
    // A step of both of which every new token is a query: on the GPU by a graph, captured the first time.
    struct Graph {
        explicit Graph(int64_t rows, int64_t q_heads)
            : k(rows, kHeads, kDim), q(rows, q_heads, kDim), out(rows, q_heads, kDim) {}
        DeviceTensor k, q, out;
        CapturedGraph captured;
    };
    void replay(Graph& graph, const std::vector<int32_t>& n_new) {
        const int64_t rows = std::accumulate(n_new.begin(), n_new.end(), int64_t{0}), q_heads = kHeads * group;
        const std::vector<float> kv = normals(rows * kRow), qv = normals(rows * q_heads * kDim, 2.0f);
        graph.k.set(kv);
        graph.q.set(qv);
        graph.out.set(std::vector<float>(qv.size(), NAN));
        begin(gpu_plan, on_gpu, n_new);
        ta_error err;
        auto options = sized<ta_attend_options>();
        if (!graph.captured) {
            graph.captured.capture(stream, [&] {
                for (uint32_t layer = 0; layer < layers; ++layer) {
                    options.window = windows.empty() ? 0 : windows[layer];
                    require(ta_append(gpu_plan.get(), layer, graph.k.view(), graph.k.view(), &err), err);
                    require(ta_attend(gpu_plan.get(), layer, graph.q.view(), graph.out.view(), nullptr, &options, &err), err);
                }
            });
        }
        ASSERT_EQ(graph.captured.launch(stream), cudaSuccess);
        end(gpu_plan);
        begin(cpu_plan, on_cpu, n_new);
        Tensor ck(kv, rows, kHeads, kDim, TA_DTYPE_F16), cq(qv, rows, q_heads, kDim, TA_DTYPE_F16), cout(rows, q_heads, kDim);
        for (uint32_t layer = 0; layer < layers; ++layer) {
            options.window = windows.empty() ? 0 : windows[layer];
            append(cpu_plan, layer, ck, ck);
            if (cpu_attends(layer, 0)) attend(cpu_plan, layer, cq, cout, nullptr, &options);
        }
        end(cpu_plan);
        ++turn;
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        if (cpu_attends(layers - 1, 0)) expect_close(graph.out.get(), cout.values());  // of the last layer
    }
    static void expect_close(const std::vector<float>& got, const std::vector<float>& want) {
        double error = 0.0, norm = 0.0;
        for (size_t i = 0; i < got.size(); ++i) {
            error += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
            norm += double(want[i]) * want[i];
        }
        EXPECT_LE(std::sqrt(error / norm), 0.02);
    }
    static std::vector<float> mass_of(const KvPool& pool, ta_seq seq) {
        std::vector<float> mass(size_t((length(pool, seq) + 63) / 64));
        ta_error err;
        require(ta_x_seq_attention(pool.get(), seq, 0, mass.size(), mass.data(), &err), err);
        return mass;
    }
    // `of_all`: what all blocks of the sequence got.
    void compare_mass(size_t s, double* of_all = nullptr) {
        const std::vector<float> got = mass_of(gpu_pool, on_gpu[s]), want = mass_of(cpu_pool, on_cpu[s]);
        ASSERT_EQ(got.size(), want.size());
        const double all = std::accumulate(want.begin(), want.end(), 0.0);
        for (size_t b = 0; b < want.size(); ++b) {
            EXPECT_NEAR(double(got[b]), double(want[b]), kMassError * all) << "sequence " << s << ", block " << b;
        }
        if (of_all) *of_all = all;
    }
    static std::vector<bool> present(const KvPool& pool, ta_seq seq) {
        std::vector<bool> has;
        for (uint64_t b = 0; b < uint64_t(length(pool, seq) + 63) / 64; ++b) {
            auto info = sized<ta_x_block_info>();
            ta_error err;
            has.push_back(ta_x_seq_block(pool.get(), seq, b, &info, nullptr, 0, &err) == TA_OK);
        }
        return has;
    }

    int group = 4;
    uint32_t layers = 2;
    int32_t attention_layers = 1;
    bool cpu_follows = false;
    uint64_t turn = 0;             // steps with queries that were ended
    std::vector<int64_t> windows;  // of layers, in place of a step's
    KvPool gpu_pool, cpu_pool;
    Plan gpu_plan, cpu_plan;
    std::vector<ta_seq> on_gpu, on_cpu;
    Random random{7};
};

TEST_F(GpuAttention, BlocksGetWhatTheyGetOnACpu) {
    for (const int query_group : {1, 4, 5, 8}) {
        SCOPED_TRACE("group " + std::to_string(query_group));
        make({}, query_group);
        const size_t a = add(), b = add(), c = add();
        step({a, b, c}, {1000, 63, 3000}, {0, 0, 0});
        for (int i = 0; i < 6; ++i) step({a, b, c}, {1, 1, 1}, {1, 1, 1}, i == 4 ? 200 : 0);
        step({a, c}, {2, 1}, {2, 1});
        step({b, a}, {70, 1}, {1, 1});  // a block opens and closes, one closes that was open
        double all = 0.0;
        for (const size_t s : {a, b, c}) {
            compare_mass(s, &all);
            EXPECT_GT(all, 2.0);
        }
        // Blocks that a sequence has from another get what both give. A shared open block is copied.
        on_gpu.push_back(fork_sequence(gpu_pool, on_gpu[a]));
        on_cpu.push_back(fork_sequence(cpu_pool, on_cpu[a]));
        const size_t d = on_gpu.size() - 1;
        for (int i = 0; i < 3; ++i) step({a, d}, {1, 1}, {1, 1});
        ta_error err;
        require(ta_seq_truncate(gpu_pool.get(), on_gpu[c], 2000, &err), err);
        require(ta_seq_truncate(cpu_pool.get(), on_cpu[c], 2000, &err), err);
        step({c, b}, {1, 1}, {1, 1});
        for (const size_t s : {a, b, c, d}) compare_mass(s);
    }
}

// Of a prompt the last 16 query tokens count.
TEST_F(GpuAttention, PromptsGiveWhatTheirEndsLookAt) {
    for (const int query_group : {1, 3, 4, 5, 8, 16}) {
        SCOPED_TRACE("group " + std::to_string(query_group));
        make({}, query_group);
        const size_t a = add(), b = add(), c = add();
        step({a, b, c}, {700, 40, 1900}, {700, 40, 300});
        step({b}, {17}, {17});
        step({c, a, b}, {100, 1, 3}, {100, 1, 3}, 150);  // beside decode steps, under a window
        for (const size_t s : {a, b, c}) {
            double all = 0.0;
            compare_mass(s, &all);
            EXPECT_GT(all, 1.0);
        }
    }
}

TEST_F(GpuAttention, LayersAreObservedInTurn) {
    struct Case {
        int32_t on_gpu, on_cpu;
    };
    for (const Case& c : {Case{2, 2}, Case{3, 3}, Case{5, 5}, Case{0, 8}}) {  // 0: the default
        SCOPED_TRACE("one of " + std::to_string(c.on_gpu));
        make({.layers = 5, .attention_layers = c.on_gpu, .attention_layers_on_cpu = c.on_cpu});
        const size_t a = add(), b = add();
        const auto compare = [&] {
            for (const size_t s : {a, b}) compare_mass(s);
            return !HasFatalFailure();
        };
        step({a, b}, {700, 100}, {700, 40});
        if (!compare()) return;
        for (int i = 0; i < 7; ++i) {
            step({a, b}, {1, 1}, {1, 1}, i == 4 ? 200 : 0);
            if (!compare()) return;
        }
        step({b}, {70}, {0});  // no turn
        step({b, a}, {40, 1}, {40, 1});
        if (!compare()) return;
        step({a, b}, {30, 3}, {30, 3}, 0, {4, 1});
        step({a, b}, {1, 30}, {1, 30}, 150);
        compare();
    }
}

// 10 query tokens are for the decode kernel at group 1 and for prefill at group 4. A step begins with the group of the call
// before it; schedules cut for that one must not serve for another.
TEST_F(GpuAttention, TheGroupChangesFromCallToCall) {
    for (const ta_eviction eviction : {TA_EVICT_LRU, TA_EVICT_ATTENTION}) {  // without and with the rows that are observed
        SCOPED_TRACE("policy " + std::to_string(eviction));
        make({.eviction = eviction});
        const size_t a = add(), b = add();
        step({a, b}, {100, 70}, {100, 70}, 0, {4, 1});  // so that schedules of both are there
        step({a, b}, {40, 10}, {40, 10}, 0, {4});
        step({a, b}, {40, 10}, {40, 10}, 0, {1, 4, 1});
        step({a, b}, {40, 10}, {40, 10}, 0, {1, 4, 1});
        step({b, a}, {10, 40}, {10, 40}, 30, {4, 1, 4});
        step({b, a}, {70, 10}, {10, 10}, 0, {1});  // no prompts at all
        step({b, a}, {1, 10}, {1, 10}, 0, {4, 1, 4});
        if (HasFatalFailure()) return;
        if (eviction != TA_EVICT_ATTENTION) continue;
        for (const size_t s : {a, b}) compare_mass(s);
    }
}

TEST_F(GpuAttention, AbortedStepsGiveNothing) {
    make({});
    const size_t a = add();
    step({a}, {500}, {0});
    step({a}, {1}, {1});
    for (int i = 0; i < 2; ++i) {
        const std::vector<float> qv = normals(kHeads * group * kDim);
        const DeviceTensor q(1, kHeads * group, kDim, &qv), out(1, kHeads * group, kDim);
        begin(gpu_plan, {on_gpu[a]}, {0}, {1});
        ta_error err;
        require(ta_attend(gpu_plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err), err);
        require(ta_plan_abort(gpu_plan.get(), &err), err);
        begin(cpu_plan, {on_cpu[a]}, {0}, {1});  // counted as a step
        require(ta_plan_abort(cpu_plan.get(), &err), err);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    }
    step({a}, {1}, {1});
    gpu_plan.reset();  // leaves with the blocks what its last step gave
    compare_mass(a);
}

// The sums of the last step are still on their way.
TEST_F(GpuAttention, APoolIsClosedBeforeItsPlan) {
    make({});
    const size_t a = add();
    step({a}, {300}, {1});
    ta_error err;
    require(ta_kv_pool_close(gpu_pool.get(), &err), err);
    gpu_plan.reset();
}

TEST_F(GpuAttention, EachReplayOfAGraphAddsOnce) {
    make({.device_blocks = 3000});
    const size_t a = add(), b = add();
    step({a, b}, {900, 200}, {0, 0});
    step({a, b}, {1, 1}, {1, 1});  // of the kind that is captured
    Graph graph(2, kHeads * group);
    for (int i = 0; i < 150; ++i) {
        replay(graph, {1, 1});
        if (HasFatalFailure()) return;
        if (i % 30 == 0) compare_mass(a);
    }
    compare_mass(a);
    compare_mass(b);
    // Prompts of other numbers and lengths between replays do not make a decode step another kind.
    for (const int32_t n : {40, 10}) {
        step({a, b}, {n, n}, {n, n > 20 ? n : 1});
        replay(graph, {1, 1});
        if (HasFatalFailure()) return;
        for (const size_t s : {a, b}) compare_mass(s);
    }
    // Nor does one for which the step's tables had to grow.
    step({a, b}, {80000, 60000}, {0, 0});
    replay(graph, {1, 1});
}

// A graph at its replay does not take schedules that ordinary steps cut for other groups, or for longer prompts.
TEST_F(GpuAttention, GraphsOfPromptsBesideOtherGroups) {
    for (const ta_eviction eviction : {TA_EVICT_LRU, TA_EVICT_ATTENTION}) {
        SCOPED_TRACE("policy " + std::to_string(eviction));
        make({.eviction = eviction});
        const size_t a = add(), b = add();
        step({a, b}, {100, 70}, {100, 70});
        Graph graph(80, kHeads * group);
        replay(graph, {50, 30});
        for (const std::vector<int>& groups : {std::vector<int>{4}, {1, 4}, {8, 1, 4}}) {
            step({a, b}, {300, 200}, {300, 200}, 0, groups);
            replay(graph, {50, 30});
            step({b, a}, {1, 130}, {1, 130}, 0, groups);
            replay(graph, {50, 30});
            if (HasFatalFailure()) return;
        }
        // Whatever group the call before it was of.
        step({a, b}, {300, 200}, {300, 200}, 0, {4, 1});
        replay(graph, {50, 30});
        step({a, b}, {20, 40}, {20, 40}, 0, {1, 4});
        replay(graph, {50, 30});
        if (HasFatalFailure()) return;
        if (eviction != TA_EVICT_ATTENTION) continue;
        for (const size_t s : {a, b}) compare_mass(s);
    }
}

// Steps by hand observe layer 1 by turns with 0 and 2, graphs always these two. Layer 1 has options of its own, and is the one
// that is observed before each capture: what a graph needs to observe the others, calls by hand got unobserved.
TEST_F(GpuAttention, GraphsObserveTheSameLayersInEachStep) {
    make({.layers = 3, .attention_layers = 2, .cpu_follows = true});
    windows = {0, 100, 0};
    const size_t a = add(), b = add();
    const auto compare = [&] {
        for (const size_t s : {a, b}) compare_mass(s);
        return !HasFatalFailure();
    };
    step({a, b}, {200, 150}, {0, 0});
    step({a, b}, {1, 1}, {1, 1});
    ASSERT_EQ(turn % 2, 1u);
    step({a, b}, {50, 30}, {50, 30});
    if (!compare()) return;
    Graph prompts(80, kHeads * group), decode(2, kHeads * group);
    replay(prompts, {50, 30});
    if (!compare()) return;
    ASSERT_EQ(turn % 2, 1u);
    step({a, b}, {1, 1}, {1, 1});
    for (int i = 0; i < 3; ++i) {
        replay(decode, {1, 1});
        if (!compare()) return;
        replay(decode, {1, 1});
        step({b, a}, {1, 20}, {1, 20});
        if (!compare()) return;
        replay(prompts, {50, 30});
        if (!compare()) return;
    }
}

TEST_F(GpuAttention, TheColdestLeaveFirst) {
    make({.device_blocks = 30, .host_bytes = uint64_t{64} << 20});
    const size_t a = add();
    // Keys of two blocks point where all queries look, those of the others away from there.
    constexpr uint64_t kLooked[] = {5, 11};
    const int64_t q_heads = kHeads * group;
    const std::vector<float> ones(size_t(q_heads * kDim), 1.0f);
    const DeviceTensor q(1, q_heads, kDim, &ones), out(1, q_heads, kDim);
    for (uint64_t block = 0; block < 60; ++block) {
        const bool looked = std::find(std::begin(kLooked), std::end(kLooked), block) != std::end(kLooked);
        begin(gpu_plan, {on_gpu[a]}, {64}, {1});
        for (uint32_t layer = 0; layer < layers; ++layer) {
            std::vector<float> kv = normals(64 * kRow, 0.1f);
            for (float& x : kv) x += looked ? 0.8f : -0.2f;
            const DeviceTensor k(64, kHeads, kDim, &kv);
            ta_error err;
            require(ta_append(gpu_plan.get(), layer, k.view(), k.view(), &err), err);
            require(ta_attend(gpu_plan.get(), layer, q.view(), out.view(), nullptr, nullptr, &err), err);
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        }
        end(gpu_plan);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    }
    EXPECT_GT(residency(gpu_pool, on_gpu[a]).host_blocks, 15u);
    for (const uint64_t b : kLooked)
        EXPECT_EQ(move_now(gpu_pool, on_gpu[a], b, 1, TA_TIER_DEVICE).present, 1u) << "block " << b << " left";
    const std::vector<float> mass = mass_of(gpu_pool, on_gpu[a]);
    EXPECT_GT(mass[5], 10 * mass[6]);
}

// Appends, then attends in a step of its own, so that all tokens are read as they are stored, and compares with float64 over
// what the sequence still has.
class GpuDropping : public GpuAttention {
  protected:
    struct Rules {
        int32_t n_query = 1;
        int64_t window = 0;
        bool alibi = false, full = false;
    };
    void step_and_compare(size_t s, int32_t n_new, const Rules& rules) {
        step({s}, {n_new}, {0});
        const std::vector<bool> has = present(gpu_pool, on_gpu[s]);
        const int64_t q_heads = kHeads * group, n = length(gpu_pool, on_gpu[s]), n_query = rules.n_query;
        std::vector<std::vector<float>> q, out, lse;
        std::vector<float> slopes;
        for (int64_t h = 0; h < q_heads; ++h) slopes.push_back(0.002f * float(h + 1));
        const size_t lse_bytes = size_t(n_query * q_heads) * sizeof(float);
        void *d_slopes = nullptr, *d_lse = nullptr;
        ASSERT_EQ(cudaMalloc(&d_slopes, slopes.size() * sizeof(float)), cudaSuccess);
        ASSERT_EQ(cudaMalloc(&d_lse, lse_bytes), cudaSuccess);
        const std::unique_ptr<void, FreeDevice> slopes_owner(d_slopes), lse_owner(d_lse);
        ASSERT_EQ(cudaMemcpy(d_slopes, slopes.data(), slopes.size() * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
        auto options = sized<ta_attend_options>();
        options.window = rules.window;
        if (rules.full) options.mask = TA_MASK_FULL;
        auto cpu_options = options;
        if (rules.alibi) {
            options.alibi_slopes = static_cast<float*>(d_slopes);
            cpu_options.alibi_slopes = slopes.data();
        }
        begin(gpu_plan, {on_gpu[s]}, {0}, {rules.n_query});
        begin(cpu_plan, {on_cpu[s]}, {0}, {rules.n_query});
        for (uint32_t layer = 0; layer < layers; ++layer) {
            std::vector<float> qv = normals(n_query * q_heads * kDim);
            for (float& x : qv) x = f16_to_float(float_to_f16(x));
            const DeviceTensor query(n_query, q_heads, kDim, &qv), o(n_query, q_heads, kDim);
            ta_error err;
            require(ta_attend(gpu_plan.get(), layer, query.view(), o.view(), static_cast<float*>(d_lse), &options, &err), err);
            Tensor cq(qv, n_query, q_heads, kDim), co(n_query, q_heads, kDim);
            attend(cpu_plan, layer, cq, co, nullptr, &cpu_options);
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            q.push_back(qv);
            out.push_back(o.get());
            lse.emplace_back(size_t(n_query * q_heads));
            ASSERT_EQ(cudaMemcpy(lse.back().data(), d_lse, lse_bytes, cudaMemcpyDeviceToHost), cudaSuccess);
        }
        end(gpu_plan);
        end(cpu_plan);
        for (uint32_t layer = 0; layer < layers; ++layer) {
            std::vector<float> k(size_t(n * kRow)), v(k.size());
            for (int64_t b = 0; b * 64 < n; ++b) {
                if (!has[size_t(b)]) continue;
                const Stored x = dequantize(gpu_pool, on_gpu[s], layer, b * 64, std::min<int64_t>(64, n - b * 64), kRow);
                std::copy(x.k.begin(), x.k.end(), k.begin() + b * 64 * kRow);
                std::copy(x.v.begin(), x.v.end(), v.begin() + b * 64 * kRow);
            }
            double error = 0.0, norm = 0.0;
            for (int64_t row = 0; row < n_query; ++row) {
                const int64_t position = n - n_query + row;
                for (int64_t head = 0; head < q_heads; ++head) {
                    std::vector<double> o(kDim, 0.0);
                    double sum = 0.0;
                    const size_t q_at = size_t((row * q_heads + head) * kDim);
                    const int64_t reach = rules.window ? rules.window - 1 : n;
                    const int64_t last = rules.full ? std::min(n - 1, position + reach) : position;
                    for (int64_t key = std::max<int64_t>(0, position - reach); key <= last; ++key) {
                        if (!has[size_t(key / 64)]) continue;
                        double dot = 0.0;
                        const size_t at = size_t(key * kRow + head / group * kDim);
                        for (uint32_t c = 0; c < kDim; ++c) dot += double(q[layer][q_at + c]) * double(k[at + c]);
                        const double slope = rules.alibi ? double(slopes[size_t(head)]) : 0.0;
                        const double p = std::exp(dot / std::sqrt(double(kDim)) + slope * double(key - position));
                        sum += p;
                        for (uint32_t c = 0; c < kDim; ++c) o[c] += p * double(v[at + c]);
                    }
                    EXPECT_NEAR(double(lse[layer][size_t(row * q_heads + head)]), std::log(sum), 0.02);
                    for (uint32_t c = 0; c < kDim; ++c) {
                        const double want = o[c] / sum, got = double(out[layer][q_at + c]);
                        error += (got - want) * (got - want);
                        norm += want * want;
                    }
                }
            }
            EXPECT_LT(std::sqrt(error / norm), 0.03) << n << " tokens, layer " << layer;
        }
    }
    uint64_t dropped(const KvPool& pool) const { return move_stats(pool).dropped_blocks; }
};

TEST_F(GpuDropping, ASequenceGrowsBeyondAllBudgets) {
    for (const ta_eviction eviction : {TA_EVICT_LRU, TA_EVICT_ATTENTION}) {
        SCOPED_TRACE("policy " + std::to_string(eviction));
        make({.device_blocks = 2, .eviction = eviction, .drop_coldest = TA_ON});
        const size_t a = add();
        const Rules rules[] = {{.n_query = 1},
                               {.n_query = 1, .window = 700},
                               {.n_query = 12},
                               {.n_query = 3, .alibi = true},
                               {.n_query = 12, .window = 200, .alibi = true, .full = true}};
        for (int i = 0; i < 35; ++i) step_and_compare(a, i % 2 == 0 ? 64 : 37, rules[i % 5]);
        const std::vector<bool> has = present(gpu_pool, on_gpu[a]);
        EXPECT_GT(dropped(gpu_pool), 5u);
        EXPECT_EQ(dropped(gpu_pool), uint64_t(std::count(has.begin(), has.end(), false)));
        EXPECT_TRUE(has.front()) << "the sink";
        EXPECT_TRUE(has.back()) << "the open block";
        EXPECT_EQ(has, present(cpu_pool, on_cpu[a]));
        ta_error err;
        EXPECT_EQ(ta_seq_verify(gpu_pool.get(), on_gpu[a], &err), TA_OK) << err.message;
        // Into a sequence that has all its blocks, beside it.
        const size_t b = add();
        step({b, a}, {100, 1}, {1, 1});
        step({a, b}, {1, 1}, {1, 1});
    }
}

TEST_F(GpuDropping, WhatACpuLosesIsLostHere) {
    make({.device_blocks = 20, .drop_coldest = TA_ON});
    const size_t a = add(), b = add();
    for (int i = 0; i < 60; ++i) step({a, b}, {i % 3 == 0 ? 64 : 1, i % 2 == 0 ? 40 : 1}, {1, 1});
    EXPECT_GT(dropped(gpu_pool), 8u);
    for (const size_t s : {a, b}) {
        compare_mass(s);
        EXPECT_EQ(present(gpu_pool, on_gpu[s]), present(cpu_pool, on_cpu[s])) << "sequence " << s;
    }
}

}  // namespace
}  // namespace ta::testing
