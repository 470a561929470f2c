#include "bench/support.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace ta::bench {
namespace {

ta_tensor view(const float* data, int64_t tokens, int64_t heads, int64_t d) {
    return ta_tensor_make(data, TA_DTYPE_F32, tokens, heads, d);
}

}  // namespace

void check(ta_status status, const ta_error& err, const char* what) {
    if (status == TA_OK) return;
    std::fprintf(stderr, "%s: %s: %s\n", what, ta_status_name(status), err.message);
    std::exit(1);
}

std::vector<float> normal_values(size_t n, uint64_t seed) {
    std::vector<float> x(n + 1);
    uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
    const auto uniform = [&state] {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return (double(state >> 11) + 0.5) * 0x1p-53;
    };
    for (size_t i = 0; i < n; i += 2) {  // Box-Muller
        const double r = std::sqrt(-2.0 * std::log(uniform())), angle = 6.283185307179586 * uniform();
        x[i] = float(r * std::cos(angle));
        x[i + 1] = float(r * std::sin(angle));
    }
    x.resize(n);
    return x;
}

FilledPool::FilledPool(const Shape& shape, uint32_t bits, int threads, ta_profile profile, uint32_t q_bits) : shape_(shape) {
    ta_error err;
    ta_context_options co{};
    co.struct_size = sizeof co;
    co.threads = threads;
    if (const char* isa = std::getenv("TA_BENCH_ISA")) co.cpu_isa = std::atoi(isa);
    check(ta_context_create(&co, &context_, &err), err, "context");
    ta_numerics numerics{};
    numerics.struct_size = sizeof numerics;
    numerics.profile = profile;
    numerics.q_bits = q_bits;
    ta_kv_pool_options po{};
    po.struct_size = sizeof po;
    po.layers = uint32_t(shape.layers);
    po.kv_heads = uint32_t(shape.kv_heads);
    po.head_dim = uint32_t(shape.head_dim);
    po.bits = bits;
    po.budget_bytes = uint64_t{16} << 30;
    po.numerics = &numerics;
    check(ta_kv_pool_create(context_, &po, &pool_, &err), err, "pool");
    check(ta_plan_create(pool_, nullptr, &plan_, &err), err, "plan");
    check(ta_seq_create(pool_, &seq_, &err), err, "sequence");
    const size_t row = size_t(shape.kv_heads) * size_t(shape.head_dim);
    k_ = normal_values(size_t(shape.tokens) * row, 1);
    v_ = normal_values(size_t(shape.tokens) * row, 2);
    constexpr int64_t kChunk = 2048;
    for (int64_t done = 0; done < shape.tokens; done += kChunk) {
        const int64_t n = std::min(kChunk, shape.tokens - done);
        begin(int32_t(n), 0);
        for (int layer = 0; layer < shape.layers; ++layer) {
            append(uint32_t(layer), k_.data() + size_t(done) * row, v_.data() + size_t(done) * row, n);
        }
        end();
    }
}

FilledPool::~FilledPool() {
    ta_plan_destroy(plan_);
    ta_kv_pool_destroy(pool_);
    ta_context_destroy(context_);
}

uint64_t FilledPool::kv_bytes_per_layer() const {
    ta_kv_pool_stats stats{};
    stats.struct_size = sizeof stats;
    ta_error err;
    check(ta_kv_pool_get_stats(pool_, &stats, &err), err, "stats");
    return stats.bytes_used / uint64_t(shape_.layers);
}

void FilledPool::begin(int32_t n_new, int32_t n_query) const {
    ta_error err;
    ta_step_options in_order{};
    in_order.struct_size = sizeof in_order;
    in_order.layers_in_order = TA_ON;
    check(ta_plan_begin(plan_, 1, &seq_, &n_new, &n_query, &in_order, &err), err, "begin");
}

void FilledPool::append(uint32_t layer, const float* k, const float* v, int64_t tokens) const {
    ta_error err;
    const ta_tensor kt = view(k, tokens, shape_.kv_heads, shape_.head_dim),
                    vt = view(v, tokens, shape_.kv_heads, shape_.head_dim);
    check(ta_append(plan_, layer, &kt, &vt, &err), err, "append");
}

void FilledPool::attend(uint32_t layer, const float* q, float* out, int64_t tokens, const ta_attend_options* options) const {
    ta_error err;
    const ta_tensor qt = view(q, tokens, shape_.q_heads, shape_.head_dim),
                    ot = view(out, tokens, shape_.q_heads, shape_.head_dim);
    check(ta_attend(plan_, layer, &qt, &ot, nullptr, options, &err), err, "attend");
}

void FilledPool::end() const {
    ta_error err;
    check(ta_plan_end(plan_, nullptr, &err), err, "end");
}

void FilledPool::abort() const {
    ta_error err;
    check(ta_plan_abort(plan_, &err), err, "abort");
}

double error_against_float64(const Shape& s, const float* q, int64_t n_query, const float* k, const float* v, int64_t n_keys,
                             const float* out, int kv_head) {
    const int group = s.q_heads / s.kv_heads, d = s.head_dim;
    double difference = 0.0, norm = 0.0;
    std::vector<double> p(static_cast<size_t>(n_keys)), o(static_cast<size_t>(d));
    for (int64_t i = 0; i < n_query; ++i) {
        for (int g = 0; g < group; ++g) {
            const int64_t at = (i * s.q_heads + kv_head * group + g) * d;
            const int64_t visible = n_keys - n_query + i + 1;
            double m = -INFINITY, l = 0.0;
            for (int64_t j = 0; j < visible; ++j) {
                double dot = 0.0;
                const float* key = k + (j * s.kv_heads + kv_head) * d;
                for (int c = 0; c < d; ++c) dot += double(q[at + c]) * double(key[c]);
                p[size_t(j)] = dot / std::sqrt(double(d));
                m = std::max(m, p[size_t(j)]);
            }
            std::fill(o.begin(), o.end(), 0.0);
            for (int64_t j = 0; j < visible; ++j) {
                const double w = std::exp(p[size_t(j)] - m);
                const float* value = v + (j * s.kv_heads + kv_head) * d;
                l += w;
                for (int c = 0; c < d; ++c) o[size_t(c)] += w * double(value[c]);
            }
            for (int c = 0; c < d; ++c) {
                const double exact = o[size_t(c)] / l;
                difference += (double(out[at + c]) - exact) * (double(out[at + c]) - exact);
                norm += exact * exact;
            }
        }
    }
    return std::sqrt(difference / norm);
}

double read_bandwidth(int threads) {
    constexpr size_t kBytes = size_t{1} << 30;
    std::vector<uint64_t> data(kBytes / sizeof(uint64_t), 1);
    double best = 0.0;
    for (int repeat = 0; repeat < 5; ++repeat) {
        std::vector<uint64_t> sums(static_cast<size_t>(threads));
        const auto start = std::chrono::steady_clock::now();
        std::vector<std::thread> readers;
        for (int t = 0; t < threads; ++t) {
            readers.emplace_back([&, t] {
                const size_t share = data.size() / size_t(threads), first = share * size_t(t);
                uint64_t lane[32] = {};
                for (size_t i = first; i + 32 <= first + share; i += 32) {
                    for (size_t j = 0; j < 32; ++j) lane[j] += data[i + j];
                }
                for (const uint64_t x : lane) sums[size_t(t)] += x;
            });
        }
        for (std::thread& t : readers) t.join();
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        uint64_t total = 0;
        for (const uint64_t x : sums) total += x;
        if (total == 0) std::exit(1);  // keeps the sums alive
        best = std::max(best, double(kBytes) / seconds.count());
    }
    return best;
}

}  // namespace ta::bench
