// Attention on a CPU through the public ABI: decode over a long context, its growth with the context, chunked prefill against
// float attention, and the overhead of a call. Every row checks its output and prints the error beside the time.
//
//   bench_attend [--benchmark_filter=...]
//
// Threads: TA_BENCH_THREADS, default all. Kernels: TA_BENCH_ISA, a number of ta_cpu_isa. `bandwidth` is the read bandwidth of this machine in this run.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/float_attention.h"
#ifdef TA_HAVE_GGML
#include "bench/ggml_attention.h"
#endif
#include "bench/support.h"

namespace ta::bench {
namespace {

int thread_count() {
    const char* given = std::getenv("TA_BENCH_THREADS");
    return given ? std::atoi(given) : int(std::max(1u, std::thread::hardware_concurrency()));
}

double bandwidth() {
    static const double value = read_bandwidth(thread_count());
    return value;
}

// Layers are visited in turn, so that a step finds nothing of its layer in the caches.
constexpr uint64_t kColdBytes = uint64_t{256} << 20;
int cold_layers(int64_t tokens, int bits) {
    const uint64_t layer_bytes = uint64_t(tokens) * 8 * 128 * 2 * uint64_t(bits) / 8;
    return int(std::min<uint64_t>(16, kColdBytes / layer_bytes + 1));
}

// One query token over args (bits, tokens): 32 query heads, 8 kv heads, head_dim 128.
void decode(benchmark::State& state) {
    const int bits = int(state.range(0));
    const int64_t tokens = state.range(1);
    const Shape shape{cold_layers(tokens, bits), 32, 8, 128, tokens};
    const FilledPool pool(shape, uint32_t(bits), thread_count());
    const std::vector<float> q = normal_values(32 * 128, 3);
    std::vector<float> out(q.size());
    pool.begin(0, 1);
    uint32_t layer = 0;
    for (auto _ : state) {
        pool.attend(layer, q.data(), out.data(), 1);
        layer = (layer + 1) % uint32_t(shape.layers);
    }
    pool.abort();
    const double bytes = double(pool.kv_bytes_per_layer());
    state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
    state.counters["of_bandwidth"] = benchmark::Counter(bytes / bandwidth(), benchmark::Counter::kIsIterationInvariantRate);
    state.counters["bandwidth_GB/s"] = bandwidth() * 1e-9;
    std::vector<float> k(pool.keys().size()), v(k.size());
    ta_error err;
    check(ta_x_seq_dequantize(pool.pool(), pool.sequence(), 0, 0, tokens, k.data(), v.data(), &err), err, "dequantize");
    state.counters["rel_l2_stored"] = error_against_float64(shape, q.data(), 1, k.data(), v.data(), tokens, out.data(), 0);
    state.counters["rel_l2_exact"] =
        error_against_float64(shape, q.data(), 1, pool.keys().data(), pool.values().data(), tokens, out.data(), 0);
}
BENCHMARK(decode)
    ->ArgNames({"bits", "tokens"})
    ->ArgsProduct({{8, 4, 2}, {32768}})
    ->ArgsProduct({{4}, {1024, 4096, 16384, 65536, 131072}})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime()
    ->MinTime(0.5);

constexpr int64_t kPrefillCached = 2048, kPrefillNew = 256;

// 256 new tokens over 2048 cached ones, attention alone; args (bits).
void prefill(benchmark::State& state) {
    const Shape shape{1, 32, 8, 128, kPrefillCached};
    const FilledPool pool(shape, uint32_t(state.range(0)), thread_count());
    const std::vector<float> q = normal_values(kPrefillNew * 32 * 128, 3), k = normal_values(kPrefillNew * 8 * 128, 4),
                             v = normal_values(kPrefillNew * 8 * 128, 5);
    std::vector<float> out(q.size());
    pool.begin(int32_t(kPrefillNew), int32_t(kPrefillNew));
    pool.append(0, k.data(), v.data(), kPrefillNew);
    for (auto _ : state) pool.attend(0, q.data(), out.data(), kPrefillNew);
    pool.abort();
    std::vector<float> all_k = pool.keys(), all_v = pool.values();
    all_k.insert(all_k.end(), k.begin(), k.end());
    all_v.insert(all_v.end(), v.begin(), v.end());
    state.counters["rel_l2_exact"] = error_against_float64(shape, q.data(), kPrefillNew, all_k.data(), all_v.data(),
                                                           kPrefillCached + kPrefillNew, out.data(), 0);
}
BENCHMARK(prefill)->ArgNames({"bits"})->Arg(8)->Arg(4)->Arg(2)->Unit(benchmark::kMicrosecond)->UseRealTime()->MinTime(0.5);

// The peer: the same rows and keys in FP32 (float_attention.h), which gets each head's keys and values as dense arrays for
// free.
class FloatPrefill {
  public:
    FloatPrefill(const Shape& shape, int64_t n_query, const std::vector<float>& k, const std::vector<float>& v)
        : shape_(shape), n_query_(n_query), d_(shape.head_dim), k_(k.size()), v_(v.size()) {
        for (int64_t j = 0; j < shape.tokens; ++j) {
            for (int64_t h = 0; h < shape.kv_heads; ++h) {
                std::copy_n(&k[size_t(j * shape.kv_heads + h) * size_t(d_)], d_, k_.data() + (h * shape.tokens + j) * d_);
                std::copy_n(&v[size_t(j * shape.kv_heads + h) * size_t(d_)], d_, v_.data() + (h * shape.tokens + j) * d_);
            }
        }
    }

    void run(const float* q, float* out, int threads) const {
        const int64_t rows = n_query_ * group(), tiles = (rows + kTile - 1) / kTile;
        std::atomic<int64_t> next{0};
        const auto work = [&] {
            Scratch scratch(d_);
            for (int64_t i; (i = next.fetch_add(1)) < tiles * shape_.kv_heads;)
                run_tile(q, out, i / tiles, i % tiles * kTile, scratch);
        };
        std::vector<std::thread> others;
        for (int t = 1; t < threads; ++t) others.emplace_back(work);
        work();
        for (std::thread& t : others) t.join();
    }

  private:
    static constexpr int64_t kTile = 192;  // rows of a task
    struct Scratch {
        explicit Scratch(int d)
            : q(size_t(kTile * d)),
              o(size_t(kTile * d)),
              m(kTile),
              l(kTile),
              workspace(float_attend_workspace_bytes(d) / 4 + 1) {}
        AlignedFloats q, o, m, l, workspace;
        int64_t key_end[kTile];
    };
    int64_t group() const { return shape_.q_heads / shape_.kv_heads; }

    void run_tile(const float* q, float* out, int64_t head, int64_t first, Scratch& s) const {
        const int64_t rows = std::min<int64_t>(kTile, n_query_ * group() - first), padded = (rows + 11) / 12 * 12;
        const float unit = 1.44269504f / std::sqrt(float(d_));
        const auto at = [&](int64_t r) {
            return ((first + r) / group() * shape_.q_heads + head * group() + (first + r) % group()) * d_;
        };
        for (int64_t r = 0; r < padded; ++r) {
            s.key_end[r] = r < rows ? shape_.tokens - n_query_ + (first + r) / group() + 1 : 0;
            for (int c = 0; c < d_; ++c) s.q.data()[r * d_ + c] = r < rows ? q[at(r) + c] * unit : 0.0f;
            s.m.data()[r] = -INFINITY;
            s.l.data()[r] = 0.0f;
        }
        std::fill_n(s.o.data(), padded * d_, 0.0f);
        FloatAttendTask task{};
        task.head_dim = d_;
        task.k = k_.data() + head * shape_.tokens * d_;
        task.v = v_.data() + head * shape_.tokens * d_;
        task.n_keys = shape_.tokens;
        task.rows = int(padded);
        task.q = s.q.data();
        task.key_end = s.key_end;
        task.o = s.o.data();
        task.m = s.m.data();
        task.l = s.l.data();
        task.workspace = reinterpret_cast<uint8_t*>(s.workspace.data());
        float_attend(task);
        for (int64_t r = 0; r < rows; ++r) {
            for (int c = 0; c < d_; ++c) out[at(r) + c] = s.o.data()[r * d_ + c] / s.l.data()[r];
        }
    }

    Shape shape_;
    int64_t n_query_;
    int d_;
    AlignedFloats k_, v_;  // [kv_heads, tokens, head_dim]
};

void prefill_float(benchmark::State& state) {
    const Shape shape{1, 32, 8, 128, kPrefillCached + kPrefillNew};
    const std::vector<float> q = normal_values(kPrefillNew * 32 * 128, 3);
    const std::vector<float> k = normal_values(size_t(shape.tokens) * 8 * 128, 1), v = normal_values(k.size(), 2);
    std::vector<float> out(q.size());
    if (!__builtin_cpu_supports("avx512f")) {
        state.SkipWithError("this CPU lacks AVX-512");
        return;
    }
    const FloatPrefill peer(shape, kPrefillNew, k, v);
    for (auto _ : state) peer.run(q.data(), out.data(), thread_count());
    state.counters["rel_l2_exact"] =
        error_against_float64(shape, q.data(), kPrefillNew, k.data(), v.data(), shape.tokens, out.data(), 0);
}
BENCHMARK(prefill_float)->Unit(benchmark::kMicrosecond)->UseRealTime()->MinTime(0.5);

#ifdef TA_HAVE_GGML
// Peers: ggml over a cache of F16 (type 0), Q8_0 (1) or Q4_0 (2).

void decode_ggml(benchmark::State& state) {
    const auto type = GgmlType(state.range(0));
    const int bits = type == GgmlType::kF16 ? 16 : type == GgmlType::kQ8 ? 8 : 4;
    const Shape shape{cold_layers(state.range(1), bits), 32, 8, 128, state.range(1)};
    const std::vector<float> q = normal_values(32 * 128, 3);
    const std::vector<float> k = normal_values(size_t(shape.tokens) * 8 * 128, 1), v = normal_values(k.size(), 2);
    GgmlAttention peer(shape, type, 1, k, v, thread_count());
    std::vector<float> out(q.size());
    int layer = 0;
    for (auto _ : state) {
        peer.run(layer, q.data(), out.data());
        layer = (layer + 1) % shape.layers;
    }
    const double bytes = double(peer.kv_bytes_per_layer());
    state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
    state.counters["of_bandwidth"] = benchmark::Counter(bytes / bandwidth(), benchmark::Counter::kIsIterationInvariantRate);
    state.counters["rel_l2_exact"] = error_against_float64(shape, q.data(), 1, k.data(), v.data(), shape.tokens, out.data(), 0);
}
BENCHMARK(decode_ggml)
    ->ArgNames({"type", "tokens"})
    ->ArgsProduct({{0, 1, 2}, {4096, 32768}})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime()
    ->MinTime(0.5);

void prefill_ggml(benchmark::State& state) {
    const Shape shape{1, 32, 8, 128, kPrefillCached + kPrefillNew};
    const std::vector<float> q = normal_values(kPrefillNew * 32 * 128, 3);
    const std::vector<float> k = normal_values(size_t(shape.tokens) * 8 * 128, 1), v = normal_values(k.size(), 2);
    GgmlAttention peer(shape, GgmlType(state.range(0)), kPrefillNew, k, v, thread_count());
    std::vector<float> out(q.size());
    for (auto _ : state) peer.run(0, q.data(), out.data());
    state.counters["rel_l2_exact"] =
        error_against_float64(shape, q.data(), kPrefillNew, k.data(), v.data(), shape.tokens, out.data(), 0);
}
BENCHMARK(prefill_ggml)->ArgNames({"type"})->DenseRange(0, 2)->Unit(benchmark::kMicrosecond)->UseRealTime()->MinTime(0.5);
#endif

// ta_plan_begin, one attend and ta_plan_abort on a sequence of 64 tokens, 8 query heads on 2 kv heads.
void call_overhead(benchmark::State& state) {
    const Shape shape{1, 8, 2, 128, 64};
    const FilledPool pool(shape, 4, thread_count());
    const std::vector<float> q = normal_values(8 * 128, 3);
    std::vector<float> out(q.size());
    for (auto _ : state) {
        pool.begin(0, 1);
        pool.attend(0, q.data(), out.data(), 1);
        pool.abort();
    }
    state.counters["rel_l2_exact"] =
        error_against_float64(shape, q.data(), 1, pool.keys().data(), pool.values().data(), 64, out.data(), 0);
}
BENCHMARK(call_overhead)->Unit(benchmark::kMicrosecond)->UseRealTime()->MinTime(0.5);

// The same as an engine decodes: begin, append of a token, attend and end; args (bits of queries).
void decode_step(benchmark::State& state) {
    const Shape shape{1, 8, 2, 128, 64};
    const FilledPool pool(shape, 4, thread_count(), TA_PROFILE_ACCURATE, uint32_t(state.range(0)));
    const std::vector<float> q = normal_values(8 * 128, 3), k = normal_values(2 * 128, 4);
    std::vector<float> out(q.size());
    ta_error err;
    const auto step = [&] {
        pool.begin(1, 1);
        pool.append(0, k.data(), k.data(), 1);
        pool.attend(0, q.data(), out.data(), 1);
        pool.end();
    };
    const auto truncate = [&] { check(ta_seq_truncate(pool.pool(), pool.sequence(), 64, &err), err, "truncate"); };
    int64_t length = 64;
    for (auto _ : state) {
        step();
        if (++length < 127) continue;
        truncate();
        length = 64;
    }
    truncate();
    step();
    std::vector<float> keys = pool.keys(), values = pool.values();
    for (std::vector<float>* all : {&keys, &values}) all->insert(all->end(), k.begin(), k.end());
    state.counters["rel_l2_exact"] = error_against_float64(shape, q.data(), 1, keys.data(), values.data(), 65, out.data(), 0);
}
BENCHMARK(decode_step)->ArgNames({"q_bits"})->Arg(15)->Arg(8)->Unit(benchmark::kMicrosecond)->UseRealTime()->MinTime(0.5);

// ta_plan_end for each of 16 sequences of 100 tokens and 4 new ones, none of which closes a page: without drafts, with drafts that all
// stay, and where one of 4 stays.
void end_of_step(benchmark::State& state) {
    constexpr int kSequences = 16, kNew = 4;
    const Shape shape{1, 8, 2, 128, 100};
    const FilledPool pool(shape, 4, 1);
    ta_error err;
    std::vector<ta_seq> seqs(kSequences);
    for (ta_seq& s : seqs) check(ta_seq_fork(pool.pool(), pool.sequence(), &s, &err), err, "fork");
    const std::vector<int32_t> n_new(kSequences, kNew), none(kSequences), keep(kSequences, state.range(0) == 2 ? 1 : kNew);
    const std::vector<float> k = normal_values(size_t(kSequences) * kNew * 2 * 128, 4);
    ta_step_options options{};
    options.struct_size = sizeof options;
    options.drafts = state.range(0) > 0 ? TA_ON : TA_OFF;
    for (auto _ : state) {
        check(ta_plan_begin(pool.plan(), kSequences, seqs.data(), n_new.data(), none.data(), &options, &err), err, "begin");
        pool.append(0, k.data(), k.data(), kSequences * kNew);
        const auto start = std::chrono::steady_clock::now();
        check(ta_plan_end(pool.plan(), state.range(0) > 0 ? keep.data() : nullptr, &err), err, "end");
        state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / kSequences);
        int64_t length = 0;
        check(ta_seq_length(pool.pool(), seqs.back(), &length, &err), err, "length");
        if (length != 100 + keep.back()) state.SkipWithError("another number of tokens has stayed");
        for (const ta_seq s : seqs) check(ta_seq_truncate(pool.pool(), s, 100, &err), err, "truncate");
    }
}
BENCHMARK(end_of_step)->ArgNames({"drafts"})->DenseRange(0, 2)->Unit(benchmark::kNanosecond)->UseManualTime()->MinTime(0.005);

// Quantizing and closing pages: 64 tokens, 8 kv heads, head_dim 128; args (bits).
void append_page(benchmark::State& state) {
    const Shape shape{1, 32, 8, 128, 64};
    const FilledPool pool(shape, uint32_t(state.range(0)), thread_count());
    const std::vector<float> k = normal_values(64 * 8 * 128, 4), v = normal_values(64 * 8 * 128, 5);
    for (auto _ : state) {
        pool.begin(64, 0);
        pool.append(0, k.data(), v.data(), 64);
        pool.abort();
    }
    state.counters["tokens/s"] = benchmark::Counter(64.0, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(append_page)->ArgNames({"bits"})->Arg(8)->Arg(4)->Arg(2)->Unit(benchmark::kMicrosecond)->UseRealTime()->MinTime(0.2);

}  // namespace
}  // namespace ta::bench

BENCHMARK_MAIN();
