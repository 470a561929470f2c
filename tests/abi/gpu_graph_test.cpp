// Steps whose calls are captured in CUDA graphs, and what happens beside and between replays. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "abi/gpu_twins.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

class GpuGraph : public GpuTest {};

// A step that adds `n` tokens to each of some sequences and attends with as many queries: captured when it is run first, then
// replayed.
class Graph {
  public:
    Graph(Twins& twins, cudaStream_t stream, const Shape& shape, std::span<const size_t> members, int32_t n,
          const ta_attend_options* options = nullptr, const ta_attend_options* gpu_options = nullptr)
        : twins_(twins),
          stream_(stream),
          options_(options),
          gpu_options_(gpu_options ? gpu_options : options),
          heads_(shape.kv_heads),
          q_heads_(heads_ * shape.group),
          d_(shape.head_dim),
          rows_(int64_t(members.size()) * n),
          added_(members.size(), n),
          k_(rows_, heads_, d_),
          v_(rows_, heads_, d_),
          q_(rows_, q_heads_, d_),
          out_(rows_, q_heads_, d_) {
        for (const size_t m : members) {
            on_gpu_.push_back(twins.sequences[m].gpu);
            on_cpu_.push_back(twins.sequences[m].cpu);
        }
    }

    enum class Way { kReplay, kEager };
    void run(Random& random, double tolerance, Way way = Way::kReplay) {
        const std::vector<float> kv = random.normals(rows_ * heads_ * d_), qv = random.normals(rows_ * q_heads_ * d_);
        k_.set(kv);
        v_.set(kv);
        q_.set(qv);
        begin(twins_.gpu_plan, on_gpu_, added_);
        if (way == Way::kEager) {
            call();
        } else {
            if (!graph_) graph_.capture(stream_, [&] { call(); });
            ASSERT_EQ(graph_.launch(stream_), cudaSuccess);
        }
        end(twins_.gpu_plan);
        ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        begin(twins_.cpu_plan, on_cpu_, added_);
        Tensor k(kv, rows_, heads_, d_, TA_DTYPE_F16), q(qv, rows_, q_heads_, d_, TA_DTYPE_F16), out(rows_, q_heads_, d_);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            append(twins_.cpu_plan, layer, k, k);
            attend(twins_.cpu_plan, layer, q, out, nullptr, options_);
        }
        end(twins_.cpu_plan);
        const std::vector<float> got = out_.get(), expected = out.values();
        double difference = 0.0, norm = 0.0;
        for (size_t m = 0; m < got.size(); ++m) {
            difference += (double(got[m]) - expected[m]) * (double(got[m]) - expected[m]);
            norm += double(expected[m]) * expected[m];
        }
        ASSERT_LE(std::sqrt(difference / norm), tolerance);
    }
    // A step that adds so many tokens to the first sequence is not taken for a replay.
    void expect_refused(int32_t added) {
        std::vector<int32_t> other = added_;
        other[0] = added;
        begin(twins_.gpu_plan, on_gpu_, other);
        EXPECT_EQ(ta_plan_end(twins_.gpu_plan.get(), nullptr, nullptr), TA_E_STATE);
        EXPECT_EQ(ta_plan_abort(twins_.gpu_plan.get(), nullptr), TA_OK);
    }

  private:
    void call() {
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(twins_.gpu_plan.get(), layer, k_.view(), v_.view(), &err), err);
            require(ta_attend(twins_.gpu_plan.get(), layer, q_.view(), out_.view(), nullptr, gpu_options_, &err), err);
        }
    }

    Twins& twins_;
    const cudaStream_t stream_;
    const ta_attend_options *const options_, *const gpu_options_;
    const int64_t heads_, q_heads_, d_, rows_;
    const std::vector<int32_t> added_;
    std::vector<ta_seq> on_gpu_, on_cpu_;
    DeviceTensor k_, v_, q_, out_;
    CapturedGraph graph_;
};

void replay_a_graph(Twins& twins, cudaStream_t stream, const Shape& shape, int32_t n, int replays, double tolerance) {
    std::vector<size_t> all(twins.sequences.size());
    std::iota(all.begin(), all.end(), size_t{0});
    std::vector<int32_t> more(all.size(), n);  // of a step by hand
    more[0] = 2 * n;
    Graph graph(twins, stream, shape, all, n);
    Random random(5);
    for (int i = 0; i < replays; ++i) {
        if (i == 3 || i == 6) {
            // Eager steps of other options and lengths between replays change nothing of what the graph reads.
            auto options = sized<ta_attend_options>();
            options.window = 10 * i;
            twins.step(all, more, more, tolerance, &options);
        }
        SCOPED_TRACE("replay " + std::to_string(i));
        graph.run(random, tolerance);
        if (::testing::Test::HasFatalFailure()) return;
    }
    twins.compare_pages();
    graph.expect_refused(n + 1);
    std::vector<ta_seq> on_gpu;
    for (const auto& s : twins.sequences) on_gpu.push_back(s.gpu);
    begin(twins.gpu_plan, on_gpu,
          std::vector<int32_t>(on_gpu.size(), 0));  // without calls there is nothing to leave to a graph
    end(twins.gpu_plan);
}

// An engine has a graph for each size of its batches.
TEST_F(GpuGraph, APlanReplaysGraphsOfSeveralKinds) {
    const Shape& shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 20);
    const size_t a = twins.add(), b = twins.add(), c = twins.add();
    twins.step({a, b, c}, {100, 60, 300}, {100, 60, 300}, kPrefillError);
    const std::vector<size_t> one{a}, two{a, b}, prompt{c};
    twins.step(one, {1}, {1}, kDecodeError);
    twins.step(two, {1, 1}, {1, 1}, kDecodeError);
    twins.step(prompt, {64}, {64}, kPrefillError);
    Graph of_one(twins, stream, shape, one, 1), of_two(twins, stream, shape, two, 1),
        of_prompt(twins, stream, shape, prompt, 64);
    Random random(6);
    for (int i = 0; i < 70; ++i) {
        SCOPED_TRACE("round " + std::to_string(i));
        of_one.run(random, kDecodeError);
        of_two.run(random, kDecodeError);
        if (i % 10 == 0) of_prompt.run(random, kPrefillError);
        if (HasFatalFailure()) return;
    }
    twins.compare_pages();
    of_two.expect_refused(2);
    of_prompt.expect_refused(65);
    of_two.run(random, kDecodeError);
}

TEST_F(GpuGraph, AGraphIsReplayedWithNewLengths) {
    const Shape& shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 17);
    const size_t a = twins.add(), b = twins.add();
    twins.step({a, b}, {100, 60}, {1, 1}, kDecodeError);
    twins.step({a, b}, {1, 1}, {1, 1}, kDecodeError);  // of the kind that is captured
    replay_a_graph(twins, stream, shape, 1, 1000, kDecodeError);
}

// Some steps of this kind write 1100 pages, others two in each sequence: the table of them is larger than what a plan begins
// with.
TEST_F(GpuGraph, AGraphOfManySequencesWhosePagesFillAtOnce) {
    const Shape shape{4, 64, 1, 1};
    Twins twins(gpu, cpu, shape, stream, 19);
    std::vector<size_t> all;
    for (int i = 0; i < 1100; ++i) all.push_back(twins.add());
    const std::vector<int32_t> prompt(all.size(), 59), two(all.size(), 2);
    twins.step(all, prompt, prompt, kPrefillError);
    twins.step(all, two, two, kDecodeError);
    replay_a_graph(twins, stream, shape, 2, 36, kDecodeError);
}

// A step of new sequences alone takes another kernel than a captured one, which must be loaded by then.
TEST_F(GpuGraph, AGraphOfPromptsAfterNewSequencesAlone) {
    const Shape& shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 18);
    const size_t a = twins.add(), b = twins.add();
    twins.step({a, b}, {300, 130}, {300, 130}, kPrefillError);
    replay_a_graph(twins, stream, shape, 50, 20, kPrefillError);
}

// Outside graphs, prompts over many pages of one scale take a kernel that no graph does.
TEST_F(GpuGraph, AGraphOfPromptsAfterLongTiles) {
    const Shape shape{8, 64, 8, 16};
    auto numerics = sized<ta_numerics>();
    numerics.k_granularity = TA_GRANULARITY_PAGE;
    Twins twins(gpu, cpu, shape, stream, 41, &numerics);
    const size_t a = twins.add();
    twins.step({a}, {8192}, {1}, kDecodeError);
    const std::vector<size_t> one{a};
    Graph graph(twins, stream, shape, one, 200);
    Random random(42);
    for (const auto way : {Graph::Way::kEager, Graph::Way::kReplay, Graph::Way::kReplay, Graph::Way::kEager}) {
        graph.run(random, kPrefillError, way);
        if (HasFatalFailure()) return;
    }
    twins.compare_pages();
}

// Every kernel that a captured call may become: bits, head sizes, and prompts that the decode kernel takes in chunks.
TEST_F(GpuGraph, GraphsOfEveryShape) {
    for (const Shape& shape : kShapes) {
        for (const int32_t n : {1, 40}) {
            SCOPED_TRACE(std::to_string(shape.bits) + " bits, d " + std::to_string(shape.head_dim) + ", group " +
                         std::to_string(shape.group) + ", " + std::to_string(n) + " tokens");
            Twins twins(gpu, cpu, shape, stream, 37);
            const size_t a = twins.add(), b = twins.add(), c = twins.add();
            twins.step({a, b, c}, {130, 60, 700}, {1, 1, 1}, kDecodeError);
            twins.step({a, b, c}, {n, n, n}, {n, n, n}, kPrefillError);  // of the kind that is captured
            replay_a_graph(twins, stream, shape, n, 12, kPrefillError);
            if (HasFatalFailure()) return;
        }
    }
}

TEST_F(GpuGraph, GraphsOfCallsWithOptions) {
    const Shape& shape = kShapes[0];
    const std::vector<float> slopes(8, 0.01f), sinks(8, 2.0f);
    float* arrays = nullptr;
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&arrays), 64), cudaSuccess);
    const std::unique_ptr<void, FreeDevice> owner(arrays);
    ASSERT_EQ(cudaMemcpy(arrays, slopes.data(), 32, cudaMemcpyHostToDevice), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(arrays + 8, sinks.data(), 32, cudaMemcpyHostToDevice), cudaSuccess);
    for (const int32_t n : {1, 3, 40}) {
        for (int which = 0; which < 5; ++which) {
            SCOPED_TRACE(std::to_string(n) + " tokens, options " + std::to_string(which));
            auto options = sized<ta_attend_options>();
            if (which == 0 || which == 4) options.window = 150;
            if (which == 1 || which == 4) options.softcap = 5.0f;
            if (which == 2) options.mask = TA_MASK_FULL, options.window = 70;
            if (which == 3) options.p = TA_P_U16;
            auto on_gpu = options;
            if (which >= 2) {
                options.alibi_slopes = slopes.data();
                options.sinks = sinks.data();
                on_gpu.alibi_slopes = arrays;
                on_gpu.sinks = arrays + 8;
            }
            Twins twins(gpu, cpu, shape, stream, 41);
            const size_t a = twins.add(), b = twins.add();
            const std::vector<size_t> both{a, b};
            twins.step(both, {100, 330}, {1, 1}, kDecodeError);
            twins.step(both, {n, n}, {n, n}, kPrefillError, &options, &on_gpu);
            Graph graph(twins, stream, shape, both, n, &options, &on_gpu);
            Random random(8);
            for (int i = 0; i < 15; ++i) {
                SCOPED_TRACE("replay " + std::to_string(i));
                graph.run(random, kPrefillError);
                if (HasFatalFailure()) return;
            }
            twins.compare_pages();
        }
    }
}

// Replays find sequences that were moved, shared, cut, opened again or reserved in vain since the replay before.
TEST_F(GpuGraph, AGraphBesideForksTruncationsAndAborts) {
    const Shape& shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 43);
    const size_t a = twins.add(), b = twins.add();
    const std::vector<size_t> both{a, b};
    twins.step(both, {300, 190}, {1, 1}, kDecodeError);
    twins.step(both, {1, 1}, {1, 1}, kDecodeError);
    Graph graph(twins, stream, shape, both, 1);
    Random random(9);
    for (int i = 0; i < 24; ++i) {
        SCOPED_TRACE("replay " + std::to_string(i));
        graph.run(random, kDecodeError);
        if (HasFatalFailure()) return;
        if (i % 4 == 0) {
            const size_t c = twins.fork(a);
            twins.step({c, b}, {70, 1}, {1, 1}, kDecodeError);
        } else if (i % 4 == 1) {
            twins.truncate(a, 100 + i);  // into a closed block, which later ones of the fork still have
            twins.truncate(b, 64);
        } else if (i % 4 == 2) {
            begin(twins.gpu_plan, {twins.sequences[b].gpu, twins.sequences[a].gpu}, {200, 3});
            EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_OK);
        } else {
            Plan other = make_plan(twins.gpu_pool);  // which changes a sequence of the graph's
            ta_error err;
            require(ta_plan_set_stream(other.get(), stream, &err), err);
            twins.gpu_plan.swap(other);
            twins.step({a}, {65}, {1}, kDecodeError);
            twins.gpu_plan.swap(other);
        }
        if (HasFatalFailure()) return;
    }
    twins.compare_pages();
}

// Sequences that a graph was captured with grow beyond 65536 blocks, and beyond a block table of that size: only lengths differ.
TEST_F(GpuGraph, AGraphWhoseSequencesOutgrowTheBlockTable) {
    constexpr int32_t kAdded = 1 << 17;
    constexpr int64_t kDim = 64;
    auto options = pool_options(1, 1, uint32_t(kDim), 2);
    options.budget_bytes = uint64_t{1} << 30;
    const KvPool pool = make_pool(gpu, options);
    const Plan plan = make_plan(pool);
    ta_error err;
    require(ta_plan_set_stream(plan.get(), stream, &err), err);
    const std::vector<ta_seq> seqs{make_sequence(pool), make_sequence(pool)};
    Random random(11);
    const std::vector<float> few = random.normals(4096 * kDim);
    std::vector<float> many;
    while (many.size() < size_t(2 * kAdded * kDim)) many.insert(many.end(), few.begin(), few.end());
    const DeviceTensor more(2 * kAdded, 1, kDim, &many);
    const std::vector<float> kv = random.normals(2 * kDim), qv = random.normals(2 * kDim);
    const DeviceTensor one(2, 1, kDim, &kv), q(2, 1, kDim, &qv), out(2, 1, kDim);
    const auto calls = [&] {
        require(ta_append(plan.get(), 0, one.view(), one.view(), &err), err);
        require(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err), err);
    };
    for (int step = 0; step < 70; ++step) {
        begin(plan, seqs, {1, 1});
        calls();
        end(plan);
    }
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    begin(plan, seqs, {1, 1});
    CapturedGraph graph;
    graph.capture(stream, calls);
    ASSERT_EQ(graph.launch(stream), cudaSuccess);
    end(plan);
    for (int step = 0; step < 16; ++step) {
        begin(plan, seqs, {kAdded, kAdded}, {0, 0});
        require(ta_append(plan.get(), 0, more.view(), more.view(), &err), err);
        end(plan);
        if (step % 5 != 0 && step != 15) continue;
        SCOPED_TRACE(std::to_string(length(pool, seqs[0])) + " tokens each");
        begin(plan, seqs, {1, 1});
        ASSERT_EQ(graph.launch(stream), cudaSuccess);
        ASSERT_EQ(ta_plan_end(plan.get(), nullptr, &err), TA_OK) << err.message;
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess) << "the graph read what is not its own";
        const std::vector<float> by_graph = out.get();
        // The same queries over the same tokens, by hand.
        begin(plan, seqs, {0, 0}, {1, 1});
        require(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err), err);
        end(plan);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_TRUE(by_graph == out.get());
    }
}

// A pool with a plan whose steps add `n` tokens to each of some sequences and attend with as many queries.
class GraphSteps {
  public:
    GraphSteps(const Context& gpu, cudaStream_t stream, const ta_kv_pool_options& options, int64_t group)
        : pool(make_pool(gpu, options)), plan(make_plan(pool)), stream_(stream), dim_(options.head_dim), group_(group) {
        ta_error err;
        require(ta_plan_set_stream(plan.get(), stream, &err), err);
    }

    // By hand. The output's rows are those of `out`, which may have more than the step.
    void run(const std::vector<ta_seq>& seqs, int32_t n, const DeviceTensor& out) {
        start(seqs, n);
        calls(int64_t(seqs.size()) * n, out);
        end(plan);
        ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    }
    // The same, captured and replayed.
    void capture(const std::vector<ta_seq>& seqs, int32_t n, const DeviceTensor& out) {
        start(seqs, n);
        graph_.capture(stream_, [&] { calls(int64_t(seqs.size()) * n, out); });
        ASSERT_EQ(graph_.launch(stream_), cudaSuccess);
        end(plan);
    }
    // False: the step was refused, and is undone.
    bool replay(const std::vector<ta_seq>& seqs, int32_t n) {
        start(seqs, n);
        EXPECT_EQ(graph_.launch(stream_), cudaSuccess);
        const ta_status s = ta_plan_end(plan.get(), nullptr, nullptr);
        EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess) << "the graph read or wrote what is not its own";
        if (s == TA_OK) return true;
        EXPECT_EQ(s, TA_E_STATE);
        EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        return false;
    }

    const KvPool pool;
    const Plan plan;

  private:
    void start(const std::vector<ta_seq>& seqs, int32_t n) { begin(plan, seqs, std::vector<int32_t>(seqs.size(), n)); }
    void calls(int64_t rows, const DeviceTensor& out) {
        if (rows > rows_) {
            Random random(12);
            std::vector<float> few = random.normals(std::min<int64_t>(rows, 4096) * group_ * dim_), kv, q;
            while (int64_t(q.size()) < rows * group_ * dim_) q.insert(q.end(), few.begin(), few.end());
            q.resize(size_t(rows * group_ * dim_));
            kv.assign(q.begin(), q.begin() + rows * dim_);
            tensors_.push_back(std::make_unique<DeviceTensor>(rows, 1, dim_, &kv));
            tensors_.push_back(std::make_unique<DeviceTensor>(rows, group_, dim_, &q));
            rows_ = rows;
        }
        const auto first = [rows](const DeviceTensor& all) {
            ta_tensor t = *all.view();
            t.tokens = rows;
            return t;
        };
        const ta_tensor kv = first(*tensors_.end()[-2]), q = first(*tensors_.back()), o = first(out);
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(plan.get(), layer, &kv, &kv, &err), err);
            require(ta_attend(plan.get(), layer, &q, &o, nullptr, nullptr, &err), err);
        }
    }

    const cudaStream_t stream_;
    const int64_t dim_, group_;
    int64_t rows_ = 0;
    std::vector<std::unique_ptr<DeviceTensor>> tensors_;  // those that graphs read stay
    CapturedGraph graph_;
};

// A prompt's graph does not read blocks that were dropped since: its step is refused where they are missing, by hand it runs.
TEST_F(GpuGraph, OfASequenceWhoseBlocksAreDropped) {
    constexpr int32_t kAdded = 64;
    for (const uint32_t d : {128u, 96u}) {
        SCOPED_TRACE("d " + std::to_string(d));
        auto options = pool_options(kLayers, 1, d, 4);
        options.budget_bytes = uint64_t{64} << 20;
        const ta_kv_pool_stats s = stats(make_pool(gpu, options));
        options.budget_bytes = 4 * s.token_block_bytes + 12 * s.channel_block_bytes;
        auto tiers = sized<ta_tier_options>();
        tiers.drop_coldest = TA_ON;
        options.tiers = &tiers;
        GraphSteps steps(gpu, stream, options, 2);
        const std::vector<ta_seq> seq{make_sequence(steps.pool)};
        const DeviceTensor out(kAdded, 2, d);
        steps.run(seq, kAdded, out);
        steps.capture(seq, kAdded, out);
        int refused = 0;
        for (int i = 0; i < 40; ++i) {
            if (steps.replay(seq, kAdded)) continue;
            ++refused;
            steps.run(seq, kAdded, out);
            if (HasFatalFailure()) return;
            for (const float x : out.get()) ASSERT_TRUE(std::isfinite(x));
        }
        EXPECT_GT(residency(steps.pool, seq[0]).dropped_blocks, 10u);
        EXPECT_GT(refused, 10);
    }
}

struct StepOf {
    const std::vector<ta_seq>& seqs;
    int32_t n;
    const DeviceTensor& out;
};

// Buffers that graphs read move when a step needs more room. In the old place graphs find nothing to do, above all nothing of a
// step that had more rows than theirs.
void expect_nothing_left_behind(GraphSteps& steps, const StepOf& own, const StepOf& larger, const StepOf& too_large) {
    const auto run = [&](const StepOf& s) { steps.run(s.seqs, s.n, s.out); };
    run(own);
    steps.capture(own.seqs, own.n, own.out);
    EXPECT_TRUE(steps.replay(own.seqs, own.n));
    run(larger);
    EXPECT_TRUE(steps.replay(own.seqs, own.n));
    run(larger);
    run(too_large);
    EXPECT_FALSE(steps.replay(own.seqs, own.n));
    const std::vector<float> x = own.out.get();
    const size_t row = size_t(own.out.view()->heads * own.out.view()->head_dim);
    for (size_t i = own.seqs.size() * size_t(own.n) * row; i < x.size(); ++i)
        ASSERT_TRUE(std::isnan(x[i])) << "row " << i / row << " was written";
    run(own);
}

TEST_F(GpuGraph, OfPromptsBesideOnesThatNeedMoreRoom) {
    for (const uint32_t d : {128u, 96u}) {
        SCOPED_TRACE("d " + std::to_string(d));
        auto options = pool_options(kLayers, 1, d, 4);
        options.budget_bytes = uint64_t{256} << 20;
        GraphSteps steps(gpu, stream, options, 16);
        const std::vector<ta_seq> one{make_sequence(steps.pool)};
        std::vector<ta_seq> many;
        for (int i = 0; i < 400; ++i) many.push_back(make_sequence(steps.pool));
        const DeviceTensor out(300, 16, d), more(300, 16, d), most(400 * 64, 16, d);
        expect_nothing_left_behind(steps, {one, 64, out}, {one, 300, more}, {many, 64, most});
        if (HasFatalFailure()) return;
    }
}

TEST_F(GpuGraph, OfFewSequencesBesideMany) {
    constexpr uint32_t kDim = 64;
    auto options = pool_options(kLayers, 1, kDim, 4);
    options.budget_bytes = uint64_t{256} << 20;
    GraphSteps steps(gpu, stream, options, 1);
    std::vector<ta_seq> all;
    for (int i = 0; i < 1500; ++i) all.push_back(make_sequence(steps.pool));
    const std::vector<ta_seq> two(all.begin(), all.begin() + 2), some(all.begin(), all.begin() + 800);
    const DeviceTensor out(100, 1, kDim), more(3200, 1, kDim);
    expect_nothing_left_behind(steps, {two, 1, out}, {some, 4, more}, {all, 1, more});
}

// A sequence ends beside a graph whose kernels have it, and a plan within the capture of its calls: what others do with the room
// afterwards is not disturbed by what was enqueued before.
TEST_F(GpuGraph, WhatEndsWhileItIsInUse) {
    constexpr uint32_t kDim = 128;
    constexpr int32_t kTokens = 200;
    auto options = pool_options(kLayers, 1, kDim, 4);
    options.budget_bytes = uint64_t{2} << 20;  // every round takes the room of the one before
    options.max_sequences = 4;
    const KvPool pool = make_pool(gpu, options);
    Random random(3);
    const std::vector<float> values = random.normals(kTokens * kDim), row = random.normals(kDim);
    const DeviceTensor x(kTokens, 1, kDim, &values), out(kTokens, 1, kDim), one(1, 1, kDim, &row), one_out(1, 1, kDim);
    ta_error err;
    const auto call = [&](const Plan& plan, const DeviceTensor& in, const DeviceTensor& to) {
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(plan.get(), layer, in.view(), in.view(), &err), err);
            require(ta_attend(plan.get(), layer, in.view(), to.view(), nullptr, nullptr, &err), err);
        }
    };
    const auto make_plan_here = [&] {
        Plan plan = make_plan(pool);
        require(ta_plan_set_stream(plan.get(), stream, &err), err);
        return plan;
    };
    const auto prompt = [&](ta_seq seq) {
        const Plan plan = make_plan_here();
        begin(plan, {seq}, {kTokens});
        call(plan, x, out);
        end(plan);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        return out.get();
    };
    const ta_seq first = make_sequence(pool);
    const std::vector<float> expected = prompt(first);
    require(ta_seq_release(pool.get(), first, &err), err);
    for (int round = 0; round < 10; ++round) {
        const ta_seq seq = make_sequence(pool);
        ASSERT_TRUE(prompt(seq) == expected) << "round " << round;
        Plan plan = make_plan_here();
        begin(plan, {seq}, {1});
        call(plan, one, one_out);
        end(plan);
        if (round % 2 == 0) {
            CapturedGraph graph;
            begin(plan, {seq}, {1});
            graph.capture(stream, [&] { call(plan, one, one_out); });
            require(ta_seq_release(pool.get(), seq, &err), err);
            ASSERT_EQ(graph.launch(stream), cudaSuccess);
            end(plan);
        } else {
            begin(plan, {seq}, {1});
            ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
            call(plan, one, one_out);
            plan.reset();
            cudaGraph_t graph = nullptr;
            if (cudaStreamEndCapture(stream, &graph) == cudaSuccess) cudaGraphDestroy(graph);
            (void)cudaGetLastError();
            EXPECT_EQ(length(pool, seq), kTokens + 1);
            require(ta_seq_verify(pool.get(), seq, &err), err);
            require(ta_seq_release(pool.get(), seq, &err), err);
        }
        EXPECT_EQ(stats(pool).bytes_used, 0u);
    }
}

}  // namespace
}  // namespace ta::testing
