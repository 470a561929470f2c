// Attention on a GPU through the public ABI: decode over long contexts, prefill, append, and what a step costs the host. Times are
// medians with a cold L2 between calls; every row carries the error of its output against float64 attention over the stored
// values. One JSON object a line with --json, else a table.
//
//   bench_gpu [--json] [--only TEXT]
//
// bench/gpu_peers.py times other libraries on the same shapes; run both in one session of the same GPU.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "turboattention.h"
#include "turboattention_experimental.h"

namespace {

constexpr double kHbm = 4.55e12;  // bytes/s that reads reach on an H200
constexpr int kRuns = 25;

[[noreturn]] void die(const char* what, const char* why) {
    std::fprintf(stderr, "bench_gpu: %s: %s\n", what, why);
    std::exit(1);
}
void ok(cudaError_t e, const char* what) {
    if (e != cudaSuccess) die(what, cudaGetErrorString(e));
}
#define CUDA_OK(call) ok((call), #call)
ta_error err;
#define TA_OK_OR_DIE(call) ((call) == TA_OK ? void() : die(#call, err.message))

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

struct DeviceArray {
    explicit DeviceArray(size_t bytes) {
        CUDA_OK(cudaMalloc(&data, bytes));
        CUDA_OK(cudaMemset(data, 0xFF, bytes));
    }
    ~DeviceArray() { cudaFree(data); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;
    void* data = nullptr;
};

// F16 [tokens, heads, d]
struct Rows {
    Rows(int64_t tokens, int heads, int d, bool random) : host(size_t(tokens) * heads * d), device(host.size() * 2) {
        if (random) {
            for (auto& h : host) h = half_of(normal());
            CUDA_OK(cudaMemcpy(device.data, host.data(), host.size() * 2, cudaMemcpyHostToDevice));
        }
        view.struct_size = sizeof view;
        view.dtype = TA_DTYPE_F16;
        view.data = device.data;
        view.tokens = tokens;
        view.heads = heads;
        view.head_dim = d;
    }
    void read() { CUDA_OK(cudaMemcpy(host.data(), device.data, host.size() * 2, cudaMemcpyDeviceToHost)); }
    std::vector<uint16_t> host;
    DeviceArray device;
    ta_tensor view{};
};

struct Case {
    const char* name;
    int batch, q_heads, kv_heads, d;
    int64_t cached, new_tokens;  // per sequence; new_tokens of 1: decode
    uint32_t bits;
    ta_p p = TA_P_DEFAULT;
};

struct Timing {
    double call_us, host_begin_us, host_attend_us, append_us, error;
};

class Bench {
  public:
    explicit Bench(const Case& c) : c_(c) {
        ta_context_options co{};
        co.struct_size = sizeof co;
        co.device = TA_DEVICE_CUDA;
        TA_OK_OR_DIE(ta_context_create(&co, &context_, &err));
        ta_kv_pool_options po{};
        po.struct_size = sizeof po;
        po.layers = 1;
        po.kv_heads = uint32_t(c.kv_heads);
        po.head_dim = uint32_t(c.d);
        po.bits = c.bits;
        const uint64_t pages = uint64_t(c.batch) * uint64_t((c.cached + c.new_tokens) / 64 + 3);
        po.budget_bytes = pages * uint64_t(c.kv_heads) * uint64_t(c.d) * 64 * 2 * c.bits / 8 * 5 / 4 + (uint64_t{256} << 20);
        TA_OK_OR_DIE(ta_kv_pool_create(context_, &po, &pool_, &err));
        TA_OK_OR_DIE(ta_plan_create(pool_, nullptr, &plan_, &err));
        CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        TA_OK_OR_DIE(ta_plan_set_stream(plan_, stream_, &err));
        seqs_.resize(size_t(c.batch));
        for (auto& s : seqs_) TA_OK_OR_DIE(ta_seq_create(pool_, &s, &err));
        // Sequences grow in turns, so that their pages lie scattered.
        const int64_t chunk = 1024;
        const Rows k(chunk, c.kv_heads, c.d, true), v(chunk, c.kv_heads, c.d, true);
        for (int64_t at = 0; at < c.cached; at += chunk) {
            const int32_t n = int32_t(std::min(chunk, c.cached - at)), none = 0;
            ta_tensor kn = k.view, vn = v.view;
            kn.tokens = vn.tokens = n;
            for (ta_seq s : seqs_) {
                TA_OK_OR_DIE(ta_plan_begin(plan_, 1, &s, &n, &none, &err));
                TA_OK_OR_DIE(ta_append(plan_, 0, &kn, &vn, &err));
                TA_OK_OR_DIE(ta_plan_end(plan_, &err));
            }
        }
        CUDA_OK(cudaStreamSynchronize(stream_));
    }
    ~Bench() {
        ta_plan_destroy(plan_);
        ta_kv_pool_destroy(pool_);
        ta_context_destroy(context_);
        cudaStreamDestroy(stream_);
    }

    Timing run() {
        const int64_t rows = c_.batch * c_.new_tokens;
        const Rows k(rows, c_.kv_heads, c_.d, true), v(rows, c_.kv_heads, c_.d, true), q(rows, c_.q_heads, c_.d, true);
        Rows out(rows, c_.q_heads, c_.d, false);
        const DeviceArray flush(size_t{256} << 20);
        cudaEvent_t events[3];
        for (auto& e : events) CUDA_OK(cudaEventCreate(&e));
        const std::vector<int32_t> n_new(seqs_.size(), int32_t(c_.new_tokens));
        ta_attend_options options{};
        options.struct_size = sizeof options;
        options.p = c_.p;
        std::vector<double> call, begin_host, attend_host, append;
        for (int run = 0; run < kRuns + 3; ++run) {
            const auto t0 = std::chrono::steady_clock::now();
            TA_OK_OR_DIE(ta_plan_begin(plan_, uint32_t(seqs_.size()), seqs_.data(), n_new.data(), nullptr, &err));
            const auto t1 = std::chrono::steady_clock::now();
            CUDA_OK(cudaMemsetAsync(flush.data, run, size_t{256} << 20, stream_));
            CUDA_OK(cudaEventRecord(events[0], stream_));
            TA_OK_OR_DIE(ta_append(plan_, 0, &k.view, &v.view, &err));
            CUDA_OK(cudaEventRecord(events[1], stream_));
            CUDA_OK(cudaMemsetAsync(flush.data, run + 1, size_t{256} << 20, stream_));
            CUDA_OK(cudaStreamSynchronize(stream_));
            CUDA_OK(cudaMemsetAsync(flush.data, run + 1, size_t{256} << 20, stream_));
            cudaEvent_t start;
            CUDA_OK(cudaEventCreate(&start));
            CUDA_OK(cudaEventRecord(start, stream_));
            const auto t2 = std::chrono::steady_clock::now();
            TA_OK_OR_DIE(ta_attend(plan_, 0, &q.view, &out.view, nullptr, &options, &err));
            const auto t3 = std::chrono::steady_clock::now();
            CUDA_OK(cudaEventRecord(events[2], stream_));
            CUDA_OK(cudaStreamSynchronize(stream_));
            float ms = 0, append_ms = 0;
            CUDA_OK(cudaEventElapsedTime(&ms, start, events[2]));
            CUDA_OK(cudaEventElapsedTime(&append_ms, events[0], events[1]));
            CUDA_OK(cudaEventDestroy(start));
            TA_OK_OR_DIE(ta_plan_abort(plan_, &err));
            if (run < 3) continue;
            const auto us = [](auto d) { return std::chrono::duration<double, std::micro>(d).count(); };
            call.push_back(1e3 * ms);
            append.push_back(1e3 * append_ms);
            begin_host.push_back(us(t1 - t0));
            attend_host.push_back(us(t3 - t2));
        }
        out.read();
        const auto median = [](std::vector<double>& x) {
            std::nth_element(x.begin(), x.begin() + x.size() / 2, x.end());
            return x[x.size() / 2];
        };
        return {median(call), median(begin_host), median(attend_host), median(append), error(q, k, v, out)};
    }

    uint64_t kv_bytes() const {
        ta_kv_pool_stats s{};
        s.struct_size = sizeof s;
        TA_OK_OR_DIE(ta_kv_pool_get_stats(pool_, &s, &err));
        return s.bytes_used;
    }

  private:
    // The last query of the last sequence, all query heads of its first kv head, against float64 over the stored K and V, and the
    // given ones of the step's own tokens.
    double error(const Rows& q, const Rows& new_k, const Rows& new_v, const Rows& out) const {
        const int64_t n = c_.cached + c_.new_tokens, row = int64_t(c_.kv_heads) * c_.d;
        std::vector<double> k(size_t(n * c_.d)), v(k.size());
        std::vector<float> kc(size_t(4096 * row)), vc(kc.size());
        for (int64_t at = 0; at < c_.cached; at += 4096) {
            const int64_t m = std::min<int64_t>(4096, c_.cached - at);
            TA_OK_OR_DIE(ta_x_seq_dequantize(pool_, seqs_.back(), 0, at, m, kc.data(), vc.data(), &err));
            for (int64_t t = 0; t < m; ++t) {
                for (int c = 0; c < c_.d; ++c) {
                    k[size_t((at + t) * c_.d + c)] = kc[size_t(t * row + c)];
                    v[size_t((at + t) * c_.d + c)] = vc[size_t(t * row + c)];
                }
            }
        }
        for (int64_t t = 0; t < c_.new_tokens; ++t) {
            const size_t from = size_t(((c_.batch - 1) * c_.new_tokens + t) * row);
            for (int c = 0; c < c_.d; ++c) {
                k[size_t((c_.cached + t) * c_.d + c)] = float_of(new_k.host[from + size_t(c)]);
                v[size_t((c_.cached + t) * c_.d + c)] = float_of(new_v.host[from + size_t(c)]);
            }
        }
        double difference = 0, norm = 0;
        const int64_t last = c_.batch * c_.new_tokens - 1;
        for (int h = 0; h < c_.q_heads / c_.kv_heads; ++h) {
            const size_t first = size_t(last * c_.q_heads + h) * size_t(c_.d);
            std::vector<double> p(static_cast<size_t>(n)), o(size_t(c_.d), 0.0);
            double top = -1e300, sum = 0;
            for (int64_t t = 0; t < n; ++t) {
                double s = 0;
                for (int c = 0; c < c_.d; ++c) s += double(float_of(q.host[first + size_t(c)])) * k[size_t(t * c_.d + c)];
                p[size_t(t)] = s / std::sqrt(double(c_.d));
                top = std::max(top, p[size_t(t)]);
            }
            for (int64_t t = 0; t < n; ++t) {
                const double e = std::exp(p[size_t(t)] - top);
                sum += e;
                for (int c = 0; c < c_.d; ++c) o[size_t(c)] += e * v[size_t(t * c_.d + c)];
            }
            for (int c = 0; c < c_.d; ++c) {
                const double expected = o[size_t(c)] / sum, got = float_of(out.host[first + size_t(c)]);
                difference += (got - expected) * (got - expected);
                norm += expected * expected;
            }
        }
        return std::sqrt(difference / norm);
    }

    Case c_;
    ta_context* context_ = nullptr;
    ta_kv_pool* pool_ = nullptr;
    ta_plan* plan_ = nullptr;
    cudaStream_t stream_ = nullptr;
    std::vector<ta_seq> seqs_;
};

}  // namespace

int main(int argc, char** argv) {
    bool json = false;
    std::string only;
    for (int i = 1; i < argc; ++i) {
        if (!std::strcmp(argv[i], "--json")) json = true;
        if (!std::strcmp(argv[i], "--only") && i + 1 < argc) only = argv[++i];
    }
    std::vector<Case> cases;
    for (uint32_t bits : {4u, 2u, 8u}) {
        cases.push_back({"decode b16 h32/8 n32768", 16, 32, 8, 128, 32767, 1, bits});
        cases.push_back({"decode b16 h32/8 n8192", 16, 32, 8, 128, 8191, 1, bits});
        cases.push_back({"decode b1 h32/8 n131072", 1, 32, 8, 128, 131071, 1, bits});
        cases.push_back({"decode b64 h32/8 n4096", 64, 32, 8, 128, 4095, 1, bits});
        cases.push_back({"decode b64 h40/10 n1024", 64, 40, 10, 128, 1023, 1, bits});
        cases.push_back({"decode b8 h32/32 n8192", 8, 32, 32, 128, 8191, 1, bits});
    }
    for (ta_p p : {ta_p(TA_P_U8_RUNNING), ta_p(TA_P_DEFAULT)}) {
        cases.push_back({"prefill b1 h32/8 n4096 causal", 1, 32, 8, 128, 0, 4096, 4, p});
        cases.push_back({"prefill b1 h32/8 n16384 causal", 1, 32, 8, 128, 0, 16384, 4, p});
        cases.push_back({"prefill b4 h32/8 n4096 causal", 4, 32, 8, 128, 0, 4096, 4, p});
        cases.push_back({"chunk of 2048 over 30720", 1, 32, 8, 128, 30720, 2048, 4, p});
    }
    if (!json) {
        std::printf("%-32s %4s %2s %10s %9s %9s %9s %9s %9s\n", "case", "bits", "p", "attend us", "% of HBM", "append us",
                    "begin us", "host us", "error");
    }
    for (const Case& c : cases) {
        if (!only.empty() && !std::strstr(c.name, only.c_str())) continue;
        Bench bench(c);
        const double bytes = double(bench.kv_bytes());
        const Timing t = bench.run();
        const double of_hbm = c.new_tokens == 1 ? 100 * bytes / kHbm / (t.call_us * 1e-6) : 0.0;
        std::printf(
            json ? "{\"case\": \"%s\", \"bits\": %u, \"p\": %d, \"attend_us\": %.2f, \"percent_of_hbm\": %.1f, \"append_us\": "
                   "%.2f, \"host_begin_us\": %.1f, \"host_attend_us\": %.1f, \"rel_l2\": %.2e}\n"
                 : "%-32s %4u %2d %10.2f %9.1f %9.2f %9.1f %9.1f %9.1e\n",
            c.name, c.bits, int(c.p), t.call_us, of_hbm, t.append_us, t.host_begin_us, t.host_attend_us, t.error);
        std::fflush(stdout);
    }
    return 0;
}
