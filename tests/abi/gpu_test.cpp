// A GPU context beside a CPU context through the same calls: the same bytes in the pages, the same results within rounding, and
// what only a GPU has: streams, graphs, device memory. Skipped where there is no GPU.
#include "support/gpu.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "support/handles.h"
#include "support/numbers.h"

namespace ta::testing {
namespace {

struct Shape {
    uint32_t bits, head_dim;
    int kv_heads, group;
    std::vector<uint8_t> map{};  // of one layer's kv heads, for K; V has it backwards
};

constexpr uint32_t kLayers = 2;

class Gpu : public GpuTest {};

// Two pools that live through the same steps.
class Twins {
  public:
    Twins(const Context& gpu, const Context& cpu, const Shape& shape, cudaStream_t stream, uint64_t seed,
          const ta_numerics* numerics = nullptr)
        : shape_(shape), random_(seed), stream_(stream) {
        auto options = pool_options(kLayers, uint32_t(shape.kv_heads), shape.head_dim, shape.bits, numerics);
        std::vector<uint8_t> k_bits, v_bits;
        if (!shape.map.empty()) {
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                k_bits.insert(k_bits.end(), shape.map.begin(), shape.map.end());
                v_bits.insert(v_bits.end(), shape.map.rbegin(), shape.map.rend());
            }
            options.k_bits = k_bits.data();
            options.v_bits = v_bits.data();
        }
        options.budget_bytes = uint64_t{256} << 20;
        gpu_pool = make_pool(gpu, options);
        cpu_pool = make_pool(cpu, options);
        gpu_plan = make_plan(gpu_pool);
        cpu_plan = make_plan(cpu_pool);
        ta_error err;
        require(ta_plan_set_stream(gpu_plan.get(), stream, &err), err);
    }

    size_t add() {
        sequences.push_back({make_sequence(gpu_pool), make_sequence(cpu_pool)});
        return sequences.size() - 1;
    }
    size_t fork(size_t from) {
        sequences.push_back({fork_sequence(gpu_pool, sequences[from].gpu), fork_sequence(cpu_pool, sequences[from].cpu)});
        return sequences.size() - 1;
    }
    void truncate(size_t s, int64_t n) {
        ta_error err;
        require(ta_seq_truncate(gpu_pool.get(), sequences[s].gpu, n, &err), err);
        require(ta_seq_truncate(cpu_pool.get(), sequences[s].cpu, n, &err), err);
    }

    // One step of both; the results are compared.
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new, const std::vector<int32_t>& n_query,
              double tolerance, const ta_attend_options* options = nullptr, const ta_attend_options* gpu_options = nullptr) {
        std::vector<ta_seq> on_gpu, on_cpu;
        for (size_t m : members) {
            on_gpu.push_back(sequences[m].gpu);
            on_cpu.push_back(sequences[m].cpu);
        }
        if (::testing::Test::HasFatalFailure()) return;
        begin(gpu_plan, on_gpu, n_new, n_query);
        begin(cpu_plan, on_cpu, n_new, n_query);
        const int64_t total_new = std::accumulate(n_new.begin(), n_new.end(), int64_t{0});
        const int64_t total_query = std::accumulate(n_query.begin(), n_query.end(), int64_t{0});
        const int64_t heads = shape_.kv_heads, q_heads = heads * shape_.group, d = shape_.head_dim;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const std::vector<float> k = random_.normals(total_new * heads * d), v = random_.normals(total_new * heads * d),
                                     q = random_.normals(total_query * q_heads * d, 1.5f);
            DeviceTensor gk(total_new, heads, d, &k), gv(total_new, heads, d, &v), gq(total_query, q_heads, d, &q),
                gout(total_query, q_heads, d);
            void* lse_memory = nullptr;
            ASSERT_EQ(cudaMalloc(&lse_memory, size_t(total_query * q_heads + 4) * 4), cudaSuccess);
            const std::unique_ptr<void, FreeDevice> glse(lse_memory);
            ta_error err;
            if (total_new > 0) require(ta_append(gpu_plan.get(), layer, gk.view(), gv.view(), &err), err);
            require(ta_attend(gpu_plan.get(), layer, gq.view(), gout.view(), static_cast<float*>(glse.get()),
                              gpu_options ? gpu_options : options, &err),
                    err);
            Tensor ck(k, total_new, heads, d, TA_DTYPE_F16), cv(v, total_new, heads, d, TA_DTYPE_F16),
                cq(q, total_query, q_heads, d, TA_DTYPE_F16), cout(total_query, q_heads, d);
            std::vector<float> lse(size_t(total_query * q_heads));
            if (total_new > 0) append(cpu_plan, layer, ck, cv);
            attend(cpu_plan, layer, cq, cout, lse.data(), options);
            ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
            const std::vector<float> got = gout.get(), expected = cout.values();
            double difference = 0.0, norm = 0.0;
            for (size_t i = 0; i < got.size(); ++i) {
                ASSERT_TRUE(std::isfinite(got[i])) << "element " << i << " was not written";
                difference += (double(got[i]) - expected[i]) * (double(got[i]) - expected[i]);
                norm += double(expected[i]) * expected[i];
            }
            EXPECT_LE(std::sqrt(difference), tolerance * std::sqrt(norm) + 1e-12) << "layer " << layer;
            std::vector<float> got_lse(lse.size());
            ASSERT_EQ(cudaMemcpy(got_lse.data(), glse.get(), 4 * lse.size(), cudaMemcpyDeviceToHost), cudaSuccess);
            for (size_t i = 0; i < lse.size(); ++i) {
                if (std::isinf(lse[i])) {
                    ASSERT_EQ(got_lse[i], lse[i]) << "lse " << i;
                } else {
                    ASSERT_NEAR(got_lse[i], lse[i], 20 * tolerance) << "lse " << i;
                }
            }
        }
        end(gpu_plan);
        end(cpu_plan);
    }

    // Every stored byte of both pools is the same.
    void compare_pages() {
        for (size_t s = 0; s < sequences.size(); ++s) {
            const int64_t n = length(cpu_pool, sequences[s].cpu);
            ASSERT_EQ(length(gpu_pool, sequences[s].gpu), n);
            ta_error verified;
            require(ta_seq_verify(gpu_pool.get(), sequences[s].gpu, &verified), verified);
            for (int64_t b = 0; b < (n + 63) / 64; ++b) {
                auto gi = sized<ta_x_block_info>(), ci = sized<ta_x_block_info>();
                ta_error err;
                require(ta_x_seq_block(cpu_pool.get(), sequences[s].cpu, uint64_t(b), &ci, nullptr, 0, &err), err);
                std::vector<uint8_t> cpu_bytes(ci.bytes), gpu_bytes(ci.bytes);
                require(ta_x_seq_block(cpu_pool.get(), sequences[s].cpu, uint64_t(b), &ci, cpu_bytes.data(), ci.bytes, &err),
                        err);
                require(ta_x_seq_block(gpu_pool.get(), sequences[s].gpu, uint64_t(b), &gi, gpu_bytes.data(), ci.bytes, &err),
                        err);
                ASSERT_EQ(gi.bits, ci.bits);
                ASSERT_EQ(gi.tokens, ci.tokens);
                if (ci.tokens < 64) continue;  // bytes of the missing tokens are unspecified; see below
                ASSERT_EQ(std::memcmp(cpu_bytes.data(), gpu_bytes.data(), ci.trailer_offset), 0)
                    << "sequence " << s << ", block " << b << " of " << ci.bits << " bits";
            }
            for (uint32_t layer = 0; layer < kLayers && n > 0; ++layer) {
                const int64_t row = int64_t(shape_.kv_heads) * shape_.head_dim;
                ASSERT_TRUE(dequantize(gpu_pool, sequences[s].gpu, layer, 0, n, row) ==
                            dequantize(cpu_pool, sequences[s].cpu, layer, 0, n, row))
                    << "sequence " << s << ", layer " << layer;
            }
        }
    }

    struct Pair {
        ta_seq gpu, cpu;
    };
    KvPool gpu_pool, cpu_pool;
    Plan gpu_plan, cpu_plan;
    std::vector<Pair> sequences;

  private:
    Shape shape_;
    Random random_;
    cudaStream_t stream_;
};

const Shape kShapes[] = {{4, 128, 2, 4}, {2, 128, 2, 1}, {8, 128, 2, 8}, {4, 128, 4, 5, {4, 2, 4, 2}},
                         {4, 64, 2, 4},  {2, 96, 2, 3},  {4, 256, 1, 2}, {4, 128, 1, 16}};
// Beside 16-bit P rounding differs by little; beside 8-bit P each of the two has its own errors.
constexpr double kDecodeError = 2e-3, kPrefillError = 1.5e-2, kRunningError = 6e-2;

TEST_F(Gpu, AppendDecodeAndPrefillAsOnACpu) {
    for (const Shape& shape : kShapes) {
        SCOPED_TRACE(std::to_string(shape.bits) + " bits, d " + std::to_string(shape.head_dim) + ", group " +
                     std::to_string(shape.group));
        Twins twins(gpu, cpu, shape, stream, 7);
        const size_t a = twins.add(), b = twins.add(), c = twins.add();
        twins.step({a, b, c}, {200, 1, 64}, {200, 1, 64}, kPrefillError);
        for (int i = 0; i < 3; ++i) twins.step({a, b, c}, {1, 1, 1}, {1, 1, 1}, kDecodeError);
        twins.step({c, a}, {130, 1}, {130, 1}, kPrefillError);
        twins.step({b},
                   {
                       63,
                   },
                   {1}, kDecodeError);
        twins.step({a, b, c}, {0, 1, 0}, {1, 0, 1}, kDecodeError);
        twins.compare_pages();
        if (HasFatalFailure()) return;
    }
}

TEST_F(Gpu, ForksTruncationsAndReopenedBlocks) {
    Twins twins(gpu, cpu, kShapes[0], stream, 11);
    const size_t a = twins.add();
    twins.step({a}, {300}, {1}, kDecodeError);
    const size_t b = twins.fork(a);
    twins.step({a, b}, {5, 30}, {1, 1}, kDecodeError);
    twins.truncate(a, 150);
    twins.truncate(b, 10);
    twins.step({b, a}, {1, 100}, {1, 1}, kDecodeError);
    twins.compare_pages();
}

// Its open pages are scaled by what the sequence has seen so far, which an abort and a truncation must not disturb.
TEST_F(Gpu, ProfilePaperKeepsItsUniversalScales) {
    constexpr double kPaperError = 3e-2;  // 119 levels of P: each of the two has its own errors
    auto numerics = sized<ta_numerics>();
    numerics.profile = TA_PROFILE_PAPER;
    for (const Shape& shape : {kShapes[0], kShapes[1], kShapes[3]}) {
        SCOPED_TRACE(std::to_string(shape.bits) + " bits, group " + std::to_string(shape.group));
        Twins twins(gpu, cpu, shape, stream, 23, &numerics);
        const size_t a = twins.add(), b = twins.add();
        twins.step({a, b}, {200, 3}, {1, 1}, kPaperError);
        const int64_t heads = shape.kv_heads, d = shape.head_dim;
        const std::vector<float> large(size_t(70 * heads * d), 50.0f);
        const DeviceTensor k(70, heads, d, &large), v(70, heads, d, &large);
        begin(twins.gpu_plan, {twins.sequences[a].gpu}, {70});
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer)
            require(ta_append(twins.gpu_plan.get(), layer, k.view(), v.view(), &err), err);
        require(ta_plan_abort(twins.gpu_plan.get(), &err), err);
        const size_t c = twins.fork(a);
        for (int i = 0; i < 3; ++i) twins.step({a, b, c}, {1, 30, 5}, {1, 1, 1}, kPaperError);
        twins.truncate(a, 130);
        twins.step({c, a}, {1, 70}, {1, 1}, kPaperError);
        twins.step({b}, {0}, {1}, kPaperError);
        twins.compare_pages();
        auto on_gpu = sized<ta_kv_pool_stats>(), on_cpu = on_gpu;
        require(ta_kv_pool_get_stats(twins.gpu_pool.get(), &on_gpu, &err), err);
        require(ta_kv_pool_get_stats(twins.cpu_pool.get(), &on_cpu, &err), err);
        EXPECT_GE(on_gpu.clamped_values, on_cpu.clamped_values);  // the aborted step's too
        EXPECT_GT(on_cpu.clamped_values, 0u);
        if (HasFatalFailure()) return;
    }
}

TEST_F(Gpu, OptionsOfAttend) {
    Twins twins(gpu, cpu, kShapes[0], stream, 13);
    const size_t a = twins.add();
    twins.step({a}, {400}, {1}, kDecodeError);
    const std::vector<float> slopes(8, 0.01f), sinks(8, 2.0f);
    float* arrays = nullptr;
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&arrays), 64), cudaSuccess);
    cudaMemcpy(arrays, slopes.data(), 32, cudaMemcpyHostToDevice);
    cudaMemcpy(arrays + 8, sinks.data(), 32, cudaMemcpyHostToDevice);
    for (int n_query : {1, 3, 40}) {
        for (int which = 0; which < 6; ++which) {
            auto options = sized<ta_attend_options>();
            auto on_gpu = options;
            if (which == 0) options.window = 100;
            if (which == 1) options.softcap = 5.0f;
            if (which == 2) options.exp = TA_EXP_EXACT;
            if (which == 3) options.mask = TA_MASK_FULL;
            if (which == 4) options.scale = 0.3f;
            on_gpu = options;
            if (which == 5) {
                options.alibi_slopes = slopes.data();
                options.sinks = sinks.data();
                on_gpu.alibi_slopes = arrays;
                on_gpu.sinks = arrays + 8;
            }
            SCOPED_TRACE(std::to_string(n_query) + " queries, options " + std::to_string(which));
            twins.step({a}, {0}, {n_query}, n_query * 4 <= 16 ? kDecodeError : kPrefillError, &options, &on_gpu);
        }
    }
    cudaFree(arrays);
}

// More query rows than the decode kernel takes at once, each chunk of them somewhere among the keys: P of 16 bits goes that
// way.
TEST_F(Gpu, FullMasksWithWindowsAndAlibiInChunks) {
    for (const Shape& shape : {kShapes[0], kShapes[3], kShapes[5], kShapes[6], kShapes[7]}) {
        SCOPED_TRACE("d " + std::to_string(shape.head_dim) + ", group " + std::to_string(shape.group));
        Twins twins(gpu, cpu, shape, stream, 31);
        const size_t a = twins.add(), b = twins.add(), c = twins.add();
        twins.step({a, b, c}, {900, 333, 40}, {1, 1, 1}, kDecodeError);
        const size_t heads = size_t(shape.kv_heads * shape.group);
        std::vector<float> slopes(heads);
        for (size_t h = 0; h < heads; ++h) slopes[h] = 0.01f * float(h + 1);
        void* memory = nullptr;
        ASSERT_EQ(cudaMalloc(&memory, heads * sizeof(float)), cudaSuccess);
        const std::unique_ptr<void, FreeDevice> owner(memory);
        ASSERT_EQ(cudaMemcpy(memory, slopes.data(), heads * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
        for (const int64_t window : {0, 1, 30, 64, 65, 200, 5000}) {
            for (const bool alibi : {false, true}) {
                SCOPED_TRACE("window " + std::to_string(window) + (alibi ? ", ALiBi" : ""));
                auto options = sized<ta_attend_options>();
                options.mask = TA_MASK_FULL;
                options.window = window;
                options.p = TA_P_U16;
                auto on_gpu = options;
                if (alibi) {
                    options.alibi_slopes = slopes.data();
                    on_gpu.alibi_slopes = static_cast<const float*>(memory);
                }
                twins.step({a, b, c}, {1, 0, 0}, {300, 333, 1}, kDecodeError, &options, &on_gpu);
                twins.step({c, a}, {0, 0}, {37, 17}, kDecodeError, &options, &on_gpu);
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST_F(Gpu, PrefillInUnitsOfTheRunningMaximum) {
    auto options = sized<ta_attend_options>();
    options.p = TA_P_U8_RUNNING;
    for (const Shape& shape : kShapes) {
        SCOPED_TRACE(std::to_string(shape.bits) + " bits, d " + std::to_string(shape.head_dim) + ", group " +
                     std::to_string(shape.group));
        Twins twins(gpu, cpu, shape, stream, 7);
        const size_t a = twins.add(), b = twins.add(), c = twins.add();
        twins.step({a, b, c}, {700, 65, 128}, {700, 65, 128}, kRunningError, &options);
        twins.step({c, a, b}, {130, 63, 1}, {130, 63, 1}, kRunningError, &options);
        if (HasFatalFailure()) return;
    }
}

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
    ~Graph() {
        if (exec_) cudaGraphExecDestroy(exec_);
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    void run(Random& random, double tolerance) {
        const std::vector<float> kv = random.normals(rows_ * heads_ * d_), qv = random.normals(rows_ * q_heads_ * d_);
        k_.set(kv);
        v_.set(kv);
        q_.set(qv);
        begin(twins_.gpu_plan, on_gpu_, added_);
        if (!exec_) capture();
        ASSERT_EQ(cudaGraphLaunch(exec_, stream_), cudaSuccess);
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
        EXPECT_EQ(ta_plan_end(twins_.gpu_plan.get(), nullptr), TA_E_STATE);
        EXPECT_EQ(ta_plan_abort(twins_.gpu_plan.get(), nullptr), TA_OK);
    }

  private:
    void capture() {
        ta_error err;
        ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(twins_.gpu_plan.get(), layer, k_.view(), v_.view(), &err), err);
            require(ta_attend(twins_.gpu_plan.get(), layer, q_.view(), out_.view(), nullptr, gpu_options_, &err), err);
        }
        cudaGraph_t graph = nullptr;
        ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&exec_, graph, 0), cudaSuccess);
        cudaGraphDestroy(graph);
    }

    Twins& twins_;
    const cudaStream_t stream_;
    const ta_attend_options *const options_, *const gpu_options_;
    const int64_t heads_, q_heads_, d_, rows_;
    const std::vector<int32_t> added_;
    std::vector<ta_seq> on_gpu_, on_cpu_;
    DeviceTensor k_, v_, q_, out_;
    cudaGraphExec_t exec_ = nullptr;
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
}

// An engine has a graph for each size of its batches.
TEST_F(Gpu, APlanReplaysGraphsOfSeveralKinds) {
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

TEST_F(Gpu, AGraphIsReplayedWithNewLengths) {
    const Shape& shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 17);
    const size_t a = twins.add(), b = twins.add();
    twins.step({a, b}, {100, 60}, {1, 1}, kDecodeError);
    twins.step({a, b}, {1, 1}, {1, 1}, kDecodeError);  // of the kind that is captured
    replay_a_graph(twins, stream, shape, 1, 1000, kDecodeError);
}

// Some steps of this kind write 1100 pages, others two in each sequence: the table of them is larger than what a plan begins
// with.
TEST_F(Gpu, AGraphOfManySequencesWhosePagesFillAtOnce) {
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
TEST_F(Gpu, AGraphOfPromptsAfterNewSequencesAlone) {
    const Shape& shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 18);
    const size_t a = twins.add(), b = twins.add();
    twins.step({a, b}, {300, 130}, {300, 130}, kPrefillError);
    replay_a_graph(twins, stream, shape, 50, 20, kPrefillError);
}

// Every kernel that a captured call may become: bits, head sizes, and prompts that the decode kernel takes in chunks.
TEST_F(Gpu, GraphsOfEveryShape) {
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

TEST_F(Gpu, GraphsOfCallsWithOptions) {
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

// What replays find was moved, shared, cut, opened again or reserved in vain since the one before.
TEST_F(Gpu, AGraphBesideForksTruncationsAndAborts) {
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
TEST_F(Gpu, AGraphWhoseSequencesOutgrowTheBlockTable) {
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
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    calls();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    end(plan);
    for (int step = 0; step < 16; ++step) {
        begin(plan, seqs, {kAdded, kAdded}, {0, 0});
        require(ta_append(plan.get(), 0, more.view(), more.view(), &err), err);
        end(plan);
        if (step % 5 != 0 && step != 15) continue;
        SCOPED_TRACE(std::to_string(length(pool, seqs[0])) + " tokens each");
        begin(plan, seqs, {1, 1});
        ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
        ASSERT_EQ(ta_plan_end(plan.get(), &err), TA_OK) << err.message;
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess) << "the graph read what is not its own";
        const std::vector<float> by_graph = out.get();
        // The same queries over the same tokens, by hand.
        begin(plan, seqs, {0, 0}, {1, 1});
        require(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err), err);
        end(plan);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_TRUE(by_graph == out.get());
    }
    cudaGraphExecDestroy(exec);
}

// The natural way out of a captured call that is refused.
TEST_F(Gpu, AStepDoesNotEndWithinACapture) {
    Twins twins(gpu, cpu, kShapes[0], stream, 23);
    const size_t a = twins.add(), b = twins.add();
    const ta_seq on_gpu = twins.sequences[a].gpu;
    twins.step({a, b}, {70, 1}, {1, 1}, kDecodeError);
    Plan other = make_plan(twins.gpu_pool);
    begin(twins.gpu_plan, {on_gpu}, {0}, {1});
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(ta_plan_end(twins.gpu_plan.get(), nullptr), TA_E_STATE);
    EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_E_STATE);
    EXPECT_EQ(ta_plan_set_stream(other.get(), stream, nullptr), TA_OK);  // it has no earlier steps
    EXPECT_EQ(ta_plan_begin(other.get(), 1, &twins.sequences[b].gpu, nullptr, nullptr, nullptr), TA_E_STATE);
    other.reset();
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_OK);
    twins.step({a}, {70}, {1}, kDecodeError);
    twins.compare_pages();
}

TEST_F(Gpu, WrongMemoryAndNonFiniteValues) {
    const Shape shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 19);
    const ta_seq s = make_sequence(twins.gpu_pool);
    std::vector<float> host(size_t(2 * 128));
    auto view = sized<ta_tensor>();
    view.dtype = TA_DTYPE_F16;
    view.data = host.data();
    view.tokens = 1;
    view.heads = shape.kv_heads;
    view.head_dim = shape.head_dim;
    begin(twins.gpu_plan, {s}, {1});
    ta_error err;
    EXPECT_EQ(ta_append(twins.gpu_plan.get(), 0, &view, &view, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 2);
    std::vector<float> values(2 * 128, 1.0f);
    values[3] = NAN;
    DeviceTensor k(1, 2, 128, &values);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        require(ta_append(twins.gpu_plan.get(), layer, k.view(), k.view(), &err), err);
    }
    end(twins.gpu_plan);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const int32_t one = 1;
    EXPECT_EQ(ta_plan_begin(twins.gpu_plan.get(), 1, &s, &one, nullptr, &err), TA_E_NONFINITE) << err.message;
    EXPECT_EQ(err.sequence, 0);
    EXPECT_EQ(ta_plan_begin(twins.gpu_plan.get(), 1, &s, &one, nullptr, &err), TA_OK) << err.message;
    EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_OK);
}

TEST_F(Gpu, PlansOnTwoStreamsShareAPool) {
    const Shape shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 23);
    cudaStream_t other = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    Plan second = make_plan(twins.gpu_pool);
    ta_error err;
    require(ta_plan_set_stream(second.get(), other, &err), err);
    // What one plan's sequence leaves free the other's takes while the first may still read it.
    for (int round = 0; round < 20; ++round) {
        const size_t a = twins.add();
        twins.step({a}, {200}, {1}, kDecodeError);
        ta_seq s = make_sequence(twins.gpu_pool);
        Random random(uint64_t(round) + 1);
        const std::vector<float> kv = random.normals(300 * 2 * 128);
        DeviceTensor k(300, 2, 128, &kv);
        begin(second, {s}, {300});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(second.get(), layer, k.view(), k.view(), &err), err);
        }
        end(second);
        require(ta_seq_release(twins.gpu_pool.get(), s, &err), err);
        twins.step({a}, {70}, {1}, kDecodeError);
    }
    twins.compare_pages();
    second.reset();
    cudaStreamDestroy(other);
}

// The same map and priorities as on a CPU, from rows that lie in any order; what is refused changes nothing.
TEST_F(Gpu, ACalibratorLooksAtDeviceMemory) {
    constexpr int64_t kTokens = 37, kHeads = 5, kDim = 96;
    std::vector<uint16_t> values(size_t(3 * kTokens * kHeads * kDim));
    const std::vector<float> normals = Random(31).normals(int64_t(values.size()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = float_to_f16(normals[i]);
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, 2 * values.size()), cudaSuccess);
    const std::unique_ptr<void, FreeDevice> owner(memory);
    const auto copy = [&] {
        ASSERT_EQ(cudaMemcpy(memory, values.data(), 2 * values.size(), cudaMemcpyHostToDevice), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    };
    copy();
    Calibrator calibrators[2];
    for (int i = 0; i < 2; ++i) {
        ta_calibrator* c = nullptr;
        ta_error err;
        require(ta_calibrator_create((i ? gpu : cpu).get(), 1, kHeads, kDim, &c, &err), err);
        calibrators[i].reset(c);
    }
    const auto observe = [&](int on, int64_t first, int64_t tokens, int64_t stride_token, int64_t stride_head) {
        auto t = sized<ta_tensor>();
        t.dtype = TA_DTYPE_F16;
        t.data = static_cast<uint16_t*>(on ? memory : values.data()) + first;
        t.tokens = tokens;
        t.heads = kHeads;
        t.head_dim = kDim;
        t.stride_token = stride_token;
        t.stride_head = stride_head;
        ta_error err;
        return ta_calibrator_observe(calibrators[on].get(), 0, &t, &t, &err);
    };
    const auto expect_equal = [&](uint32_t n_low) {
        uint8_t bits[2][2][kHeads];
        float priority[2][2][kHeads];
        for (int i = 0; i < 2; ++i) {
            ta_error err;
            require(
                ta_calibrator_finish(calibrators[i].get(), n_low, bits[i][0], bits[i][1], priority[i][0], priority[i][1], &err),
                err);
        }
        EXPECT_EQ(std::memcmp(bits[0], bits[1], sizeof bits[0]), 0);
        EXPECT_EQ(std::memcmp(priority[0], priority[1], sizeof priority[0]), 0);
    };
    const int64_t row = kHeads * kDim;
    const struct {
        int64_t first, tokens, stride_token, stride_head;
    } views[] = {{0, kTokens, 0, 0},
                 {row, kTokens, 3 * row, 0},               // the middle of three interleaved tensors
                 {0, kTokens, kDim, kTokens * kDim},       // head by head
                 {(kTokens - 1) * row, kTokens, -row, 0},  // the last token first
                 {(kHeads - 1) * kTokens * kDim, kTokens, kDim, -kTokens * kDim},
                 {7, 1, 0, 0},
                 {0, kTokens, kDim, kDim}};  // rows that share memory
    for (const auto& v : views) {
        for (int on = 0; on < 2; ++on) ASSERT_EQ(observe(on, v.first, v.tokens, v.stride_token, v.stride_head), TA_OK);
        expect_equal(2);
    }
    values[size_t(5 * row + 3)] = 0x7E00;  // NaN
    copy();
    for (int on = 0; on < 2; ++on) EXPECT_EQ(observe(on, 0, kTokens, 0, 0), TA_E_NONFINITE);
    expect_equal(3);
}

TEST_F(Gpu, TheCallersDeviceAndErrorsStay) {
    EXPECT_NE(cudaMemcpy(nullptr, nullptr, 16, cudaMemcpyDeviceToDevice), cudaSuccess);  // an error of the embedder's
    const cudaError_t before = cudaPeekAtLastError();
    Twins twins(gpu, cpu, kShapes[0], stream, 29);
    const size_t a = twins.add();
    begin(twins.gpu_plan, {twins.sequences[a].gpu}, {1});
    EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_OK);
    EXPECT_EQ(cudaPeekAtLastError(), before);
    (void)cudaGetLastError();
}

}  // namespace
}  // namespace ta::testing
