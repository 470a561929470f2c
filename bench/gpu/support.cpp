#include "bench/gpu/support.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace ta::bench {
namespace {

constexpr int kRuns = 25, kWarmUp = 3;

uint16_t half_of(float x) {  // finite, within F16's normal range; rounds half away, which is good enough for random numbers
    uint32_t b;
    std::memcpy(&b, &x, 4);
    const uint32_t sign = b >> 16 & 0x8000, rounded = (b & 0x7fffffff) + 0x1000;
    return rounded < 0x38800000 ? uint16_t(sign) : uint16_t(sign | (rounded - 0x38000000) >> 13);
}
float float_of(uint16_t h) {
    if ((h & 0x7fff) == 0) return 0.0f;
    const int exponent = h >> 10 & 31;
    const float m = exponent ? 1.0f + float(h & 1023) / 1024 : float(h & 1023) / 1024;
    return std::ldexp(h & 0x8000 ? -m : m, exponent ? exponent - 15 : -14);
}

uint64_t random_state = 1;
float normal() {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
        random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
        sum += float(random_state >> 40) * 0x1p-24f;
    }
    return (sum - 2.0f) * 1.7320508f;
}

double median(std::vector<double> x) {
    std::nth_element(x.begin(), x.begin() + std::ptrdiff_t(x.size() / 2), x.end());
    return x[x.size() / 2];
}

}  // namespace

ta_error error;

void die(const char* what, const char* why) {
    std::fprintf(stderr, "%s: %s\n", what, why);
    std::exit(1);
}
void check(cudaError_t e, const char* what) {
    if (e != cudaSuccess) die(what, cudaGetErrorString(e));
}

DeviceArray::DeviceArray(size_t bytes) {
    CUDA_OK(cudaMalloc(&data, bytes));
    CUDA_OK(cudaMemset(data, 0xFF, bytes));
}

Rows::Rows(int64_t tokens, int n_heads, int head_dim, bool random)
    : heads(n_heads), d(head_dim), host(size_t(tokens) * size_t(n_heads * head_dim)), device(host.size() * 2) {
    if (random) {
        for (auto& h : host) h = half_of(normal());
        CUDA_OK(cudaMemcpy(device.data, host.data(), host.size() * 2, cudaMemcpyHostToDevice));
        // From pageable memory it returns before the last bytes are there, and other streams do not wait for the default one.
        CUDA_OK(cudaStreamSynchronize(nullptr));
    }
    view = sized<ta_tensor>();
    view.dtype = TA_DTYPE_F16;
    view.data = device.data;
    view.tokens = tokens;
    view.heads = heads;
    view.head_dim = d;
}
void Rows::read() {
    CUDA_OK(cudaMemcpy(host.data(), device.data, host.size() * 2, cudaMemcpyDeviceToHost));
}
double Rows::at(int64_t token, int head, int channel) const {
    return float_of(host[size_t((token * heads + head) * d + channel)]);
}

// ------------------------------------------------------------------------------------------------------------------- cache

Cache::Cache(const Shape& shape) : shape_(shape), n_new_(size_t(shape.batch), int32_t(shape.new_tokens)) {
    auto co = sized<ta_context_options>();
    co.device = TA_DEVICE_CUDA;
    TA_OK_OR_DIE(ta_context_create(&co, &context_, &error));
    auto numerics = sized<ta_numerics>();
    numerics.profile = shape.profile;
    if (shape.page_scales) numerics.k_granularity = numerics.v_granularity = TA_GRANULARITY_PAGE;
    auto po = sized<ta_kv_pool_options>();
    po.layers = uint32_t(shape.layers);
    po.kv_heads = uint32_t(shape.kv_heads);
    po.head_dim = uint32_t(shape.d);
    po.bits = shape.bits;
    po.numerics = &numerics;
    std::vector<uint8_t> map(size_t(shape.layers * shape.kv_heads), 4);
    if (shape.half_2_bits) {
        for (size_t i = 0; i < map.size(); i += 2) map[i] = 2;
        po.k_bits = po.v_bits = map.data();
    }
    const std::vector<double> angles(size_t(shape.d / 2), 0.0);
    const ta_rotary rotary{sizeof rotary, TA_ROTARY_HALVES, uint32_t(shape.d), 1, angles.data()};
    if (shape.shifted) po.rotary = &rotary;
    auto tiers = sized<ta_tier_options>();
    tiers.eviction = TA_EVICT_ATTENTION;
    if (shape.observed) po.tiers = &tiers;
    const double elements = double(shape.batch) * double((shape.cached + shape.new_tokens) / 64 + 3) * 64 * shape.layers *
                            shape.kv_heads * shape.d * 2;
    const double bits = shape.half_2_bits ? 3 : shape.bits;
    // Beside the closed pages: a sink and an open block of 8 bits for each sequence, and the chunks that fill it.
    po.budget_bytes = uint64_t(elements * (bits + 0.4) / 8 * 1.02 +
                               double(shape.batch) * 3 * 64 * shape.layers * shape.kv_heads * shape.d * 2 * 1.1) +
                      (uint64_t{256} << 20);
    TA_OK_OR_DIE(ta_kv_pool_create(context_, &po, &pool_, &error));
    TA_OK_OR_DIE(ta_plan_create(pool_, nullptr, &plan_, &error));
    CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    TA_OK_OR_DIE(ta_plan_set_stream(plan_, stream_, &error));
    seqs_.resize(size_t(shape.batch));
    for (auto& s : seqs_) TA_OK_OR_DIE(ta_seq_create(pool_, &s, &error));
    // Sequences grow in turns, so that their pages lie scattered.
    const int64_t chunk = 1024;
    const Rows k(chunk, shape.kv_heads, shape.d, true), v(chunk, shape.kv_heads, shape.d, true);
    for (int64_t at = 0; at < shape.cached; at += chunk) {
        for (size_t i = 0; i < seqs_.size(); ++i) {
            const int64_t of_it = shape.cached - shape.stagger * int64_t(seqs_.size() - 1 - i);
            const int32_t n = int32_t(std::min(chunk, of_it - at)), none = 0;
            if (n <= 0) continue;
            ta_tensor kn = k.view, vn = v.view;
            kn.tokens = vn.tokens = n;
            TA_OK_OR_DIE(ta_plan_begin(plan_, 1, &seqs_[i], &n, &none, nullptr, &error));
            for (int layer = 0; layer < shape.layers; ++layer)
                TA_OK_OR_DIE(ta_append(plan_, uint32_t(layer), &kn, &vn, &error));
            TA_OK_OR_DIE(ta_plan_end(plan_, nullptr, &error));
        }
    }
    for (const ta_seq s : seqs_) {
        if (shape.taken_out == 0) break;
        TA_OK_OR_DIE(shape.shifted ? ta_seq_shift(pool_, s, 64, shape.taken_out, &error)
                                   : ta_seq_forget(pool_, s, 64, shape.taken_out, nullptr, &error));
    }
    CUDA_OK(cudaStreamSynchronize(stream_));
}

Cache::~Cache() {
    ta_plan_destroy(plan_);
    ta_kv_pool_destroy(pool_);
    ta_context_destroy(context_);
    cudaStreamDestroy(stream_);
}

void Cache::begin() {
    auto in_order = sized<ta_step_options>();
    in_order.layers_in_order = TA_ON;
    in_order.drafts = shape_.drafts ? TA_ON : TA_OFF;
    TA_OK_OR_DIE(ta_plan_begin(plan_, uint32_t(seqs_.size()), seqs_.data(), n_new_.data(), nullptr, &in_order, &error));
}
void Cache::append(const Rows& k, const Rows& v, uint32_t layer) {
    TA_OK_OR_DIE(ta_append(plan_, layer, &k.view, &v.view, &error));
}
void Cache::attend(const Rows& q, Rows& out, uint32_t layer) {
    auto options = sized<ta_attend_options>();
    options.mask = shape_.causal ? TA_MASK_CAUSAL : TA_MASK_FULL;
    TA_OK_OR_DIE(ta_attend(plan_, layer, &q.view, &out.view, nullptr, &options, &error));
}
void Cache::abort() {
    TA_OK_OR_DIE(ta_plan_abort(plan_, &error));
}
void Cache::end() {
    TA_OK_OR_DIE(ta_plan_end(plan_, nullptr, &error));
}
uint64_t Cache::bytes_used() const {
    auto s = sized<ta_kv_pool_stats>();
    TA_OK_OR_DIE(ta_kv_pool_get_stats(pool_, &s, &error));
    return s.bytes_used;
}

double Cache::error_of(const Rows& q, const Rows& new_k, const Rows& new_v, const Rows& out) const {
    const Shape& c = shape_;
    const int64_t n = c.cached - c.taken_out + c.new_tokens, row = int64_t(c.kv_heads) * c.d, last = c.batch * c.new_tokens - 1;
    std::vector<double> k(size_t(n * c.d)), v(k.size());
    std::vector<float> kc(size_t(4096 * row)), vc(kc.size());
    for (int64_t at = 0, m = 0, to = 0; at < c.cached; at += m, to += m) {
        if (at == 64) at += c.taken_out;
        m = std::min<int64_t>(at < 64 && c.taken_out > 0 ? 64 : 4096, c.cached - at);
        TA_OK_OR_DIE(ta_x_seq_dequantize(pool_, seqs_.back(), 0, at, m, kc.data(), vc.data(), &error));
        for (int64_t t = 0; t < m; ++t) {
            for (int i = 0; i < c.d; ++i) {
                k[size_t((to + t) * c.d + i)] = kc[size_t(t * row + i)];
                v[size_t((to + t) * c.d + i)] = vc[size_t(t * row + i)];
            }
        }
    }
    for (int64_t t = 0; t < c.new_tokens; ++t) {
        for (int i = 0; i < c.d; ++i) {
            k[size_t((n - c.new_tokens + t) * c.d + i)] = new_k.at((c.batch - 1) * c.new_tokens + t, 0, i);
            v[size_t((n - c.new_tokens + t) * c.d + i)] = new_v.at((c.batch - 1) * c.new_tokens + t, 0, i);
        }
    }
    double difference = 0, norm = 0;
    for (int h = 0; h < c.q_heads / c.kv_heads; ++h) {
        std::vector<double> p(static_cast<size_t>(n)), o(size_t(c.d), 0.0);
        double top = -1e300, sum = 0;
        for (int64_t t = 0; t < n; ++t) {
            double s = 0;
            for (int i = 0; i < c.d; ++i) s += q.at(last, h, i) * k[size_t(t * c.d + i)];
            p[size_t(t)] = s / std::sqrt(double(c.d));
            top = std::max(top, p[size_t(t)]);
        }
        for (int64_t t = 0; t < n; ++t) {
            const double e = std::exp(p[size_t(t)] - top);
            sum += e;
            for (int i = 0; i < c.d; ++i) o[size_t(i)] += e * v[size_t(t * c.d + i)];
        }
        for (int i = 0; i < c.d; ++i) {
            const double expected = o[size_t(i)] / sum, got = out.at(last, h, i);
            difference += (got - expected) * (got - expected);
            norm += expected * expected;
        }
    }
    return std::sqrt(difference / norm);
}

double Cache::stored_error(const Rows& k, const Rows& v) {
    begin();
    for (int layer = 0; layer < shape_.layers; ++layer) append(k, v, uint32_t(layer));
    end();
    const int64_t n = shape_.new_tokens, row = int64_t(shape_.kv_heads) * shape_.d, first = (shape_.batch - 1) * n;
    std::vector<float> kc(size_t(n * row)), vc(kc.size());
    TA_OK_OR_DIE(ta_x_seq_dequantize(pool_, seqs_.back(), 0, shape_.cached, n, kc.data(), vc.data(), &error));
    double difference = 0, norm = 0;
    for (int64_t t = 0; t < n; ++t) {
        for (int h = 0; h < shape_.kv_heads; ++h) {
            for (int i = 0; i < shape_.d; ++i) {
                const size_t at = size_t(t * row + h * shape_.d + i);
                const double dk = kc[at] - k.at(first + t, h, i), dv = vc[at] - v.at(first + t, h, i);
                difference += dk * dk + dv * dv;
                norm += k.at(first + t, h, i) * k.at(first + t, h, i) + v.at(first + t, h, i) * v.at(first + t, h, i);
            }
        }
    }
    return std::sqrt(difference / norm);
}

// ------------------------------------------------------------------------------------------------------------------- times

double cold_us(cudaStream_t stream, const std::function<void()>& call, const std::function<void()>& before) {
    cudaEvent_t start, stop;
    CUDA_OK(cudaEventCreate(&start));
    CUDA_OK(cudaEventCreate(&stop));
    std::vector<double> times;
    for (int run = 0; run < kRuns + kWarmUp; ++run) {
        if (before) before();
        flush_l2(stream);
        CUDA_OK(cudaEventRecord(start, stream));
        call();
        CUDA_OK(cudaEventRecord(stop, stream));
        CUDA_OK(cudaStreamSynchronize(stream));
        float ms = 0;
        CUDA_OK(cudaEventElapsedTime(&ms, start, stop));
        if (run >= kWarmUp) times.push_back(1e3 * ms);
    }
    CUDA_OK(cudaEventDestroy(start));
    CUDA_OK(cudaEventDestroy(stop));
    return median(times);
}

double back_to_back_us(cudaStream_t stream, const std::function<void()>& call) {
    cudaEvent_t start, stop;
    CUDA_OK(cudaEventCreate(&start));
    CUDA_OK(cudaEventCreate(&stop));
    for (int run = 0; run < kWarmUp; ++run) call();
    CUDA_OK(cudaEventRecord(start, stream));
    for (int run = 0; run < kRuns; ++run) call();
    CUDA_OK(cudaEventRecord(stop, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    float ms = 0;
    CUDA_OK(cudaEventElapsedTime(&ms, start, stop));
    CUDA_OK(cudaEventDestroy(start));
    CUDA_OK(cudaEventDestroy(stop));
    return 1e3 * ms / kRuns;
}

double host_us(const std::function<void()>& before, const std::function<void()>& call, const std::function<void()>& after) {
    std::vector<double> times;
    for (int run = 0; run < kRuns + kWarmUp; ++run) {
        before();
        const auto start = std::chrono::steady_clock::now();
        call();
        const auto stop = std::chrono::steady_clock::now();
        after();
        if (run >= kWarmUp) times.push_back(std::chrono::duration<double, std::micro>(stop - start).count());
    }
    return median(times);
}

// ------------------------------------------------------------------------------------------------------------------ report

Report::Report(int argc, char** argv, const char* title, bool* sweep) {
    CLI::App app(title);
    app.add_flag("--json", json_, "Google Benchmark's form in place of a table");
    app.add_option("--only", only_, "cases whose names contain this text");
    if (sweep) app.add_flag("--sweep", *sweep, "over context lengths, for bench/gpu/plot.py");
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        std::exit(app.exit(e));
    }
    int device = 0;
    cudaDeviceProp properties{};
    if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
        std::puts("no GPU: SKIPPED, nothing was measured");
        std::exit(77);
    }
    device_ = properties.name;
    if (!json_) std::printf("%s, %s\n", ta_build_info(), properties.name);
}

Report::~Report() {
    if (!json_) return;
    const nlohmann::ordered_json all{{"context", {{"library", ta_build_info()}, {"device", device_}}}, {"benchmarks", rows_}};
    std::puts(all.dump(1).c_str());
}

void Report::context(const char* key, double value) {
    context_[key] = value;
    if (!json_) std::printf("%s: %.4g\n", key, value);
}

void Report::add(const std::string& name, double us, const Columns& columns) {
    nlohmann::ordered_json row{
        {"name", name}, {"run_type", "iteration"}, {"iterations", kRuns}, {"real_time", us}, {"time_unit", "us"}};
    row.update(context_);
    for (const auto& [key, value] : columns) row[key] = value;
    if (!json_) {
        if (rows_.empty()) {
            std::printf("%-44s %10s", "case", "us");
            for (const auto& column : columns) std::printf(" %14s", column.first);
            std::printf("\n");
        }
        std::printf("%-44s %10.2f", name.c_str(), us);
        for (const auto& column : columns) std::printf(" %14.5g", column.second);
        std::printf("\n");
        std::fflush(stdout);
    }
    rows_.push_back(std::move(row));
}

}  // namespace ta::bench
