// DistrAttention on a GPU through the ABI, preparation included; test_kernels.cuda.distr --bench times it apart.
// bench_distr [--json] [--only TEXT]
#include <algorithm>
#include <cmath>

#include "bench/gpu/support.h"
#include "kernels/format/distr.h"

using namespace ta::bench;

namespace {

struct Case {
    int64_t n;
    int d;
    bool causal;
    uint32_t group_size;
    int q_heads, kv_heads;
};

// Relative L2 error of some rows of two query heads against float64 attention of q, and of q whose channels are those that stand for
// their groups.
struct Errors {
    double exact, grouped;
};

std::vector<int> order_of_channels(const Rows& q, int64_t first, int64_t rows, int head) {
    std::vector<uint32_t> keys;
    for (int c = 0; c < q.d; ++c) {
        uint32_t code = 0;
        for (int n = 0; n < ta::kDistrProjections; ++n) {
            float sum = 0.0f;
            for (int64_t r = 0; r < rows; ++r) {
                const float x = float(q.at(first + r, head, c));
                sum += ta::kDistrSigns.of_row[r] >> n & 1 ? -x : x;
            }
            code |= uint32_t(sum > 0.0f) << n;
        }
        keys.push_back(ta::distr_key(code, c));
    }
    std::vector<int> order(size_t(q.d), 0);
    for (int c = 0; c < q.d; ++c) order[size_t(c)] = c;
    std::sort(order.begin(), order.end(), [&](int a, int b) { return keys[size_t(a)] < keys[size_t(b)]; });
    return order;
}

std::vector<double> attend(const std::vector<double>& q, const Rows& k, const Rows& v, int head, int64_t n) {
    std::vector<double> p(size_t(n), 0.0), o(q.size(), 0.0);
    double top = -1e300, sum = 0.0;
    for (int64_t j = 0; j < n; ++j) {
        for (size_t c = 0; c < q.size(); ++c) p[size_t(j)] += q[c] * k.at(j, head, int(c));
        p[size_t(j)] /= std::sqrt(double(q.size()));
        top = std::max(top, p[size_t(j)]);
    }
    for (int64_t j = 0; j < n; ++j) {
        const double e = std::exp(p[size_t(j)] - top);
        sum += e;
        for (size_t c = 0; c < q.size(); ++c) o[c] += e * v.at(j, head, int(c));
    }
    for (double& x : o) x /= sum;
    return o;
}

Errors errors_of(const Case& c, const Rows& q, const Rows& k, const Rows& v, const Rows& out) {
    double difference[2] = {}, norm[2] = {};
    for (const int head : {0, c.q_heads - 1}) {
        for (const int64_t row : {c.n / 3, c.n - 1}) {
            const int64_t first = row / ta::kDistrRows * ta::kDistrRows;
            const std::vector<int> order = order_of_channels(q, first, std::min<int64_t>(ta::kDistrRows, c.n - first), head);
            std::vector<double> of_row(size_t(c.d), 0.0), of_groups(size_t(c.d), 0.0);
            for (int i = 0; i < c.d; ++i) {
                const int size = int(c.group_size), begin = i / size * size,
                          stands = order[size_t(begin + ta::distr_sampled(std::min(size, c.d - begin)))];
                of_row[size_t(i)] = q.at(row, head, i);
                of_groups[size_t(order[size_t(i)])] = q.at(row, head, stands);
            }
            for (int which = 0; which < 2; ++which) {
                const std::vector<double> expected =
                    attend(which ? of_groups : of_row, k, v, head / (c.q_heads / c.kv_heads), c.causal ? row + 1 : c.n);
                for (int i = 0; i < c.d; ++i) {
                    const double x = expected[size_t(i)], off = out.at(row, head, i) - x;
                    difference[which] += off * off;
                    norm[which] += x * x;
                }
            }
        }
    }
    return {std::sqrt(difference[0] / norm[0]), std::sqrt(difference[1] / norm[1])};
}

struct Inputs {
    Inputs(int64_t n, int d, int kv_heads = 32) : q(n, 32, d, true), k(n, kv_heads, d, true), v(n, kv_heads, d, true) {}
    const Rows q, k, v;
};

void measure(Report& report, ta_context* context, cudaStream_t stream, const Inputs& inputs, bool causal, uint32_t group_size) {
    const auto& [q, k, v] = inputs;
    const Case c{q.view.tokens, q.d, causal, group_size, q.heads, k.heads};
    const std::string name = "distr h" + std::to_string(c.q_heads) + "/" + std::to_string(c.kv_heads) + " d" +
                             std::to_string(c.d) + " n" + std::to_string(c.n) + (c.causal ? " causal" : " full") +
                             ", groups of " + std::to_string(c.group_size);
    if (!report.wants(name)) return;
    Rows out(c.n, c.q_heads, c.d, false);
    auto attend_options = sized<ta_attend_options>();
    attend_options.mask = c.causal ? TA_MASK_CAUSAL : TA_MASK_FULL;
    auto options = sized<ta_dense_options>();
    options.variant = TA_DENSE_DISTR;
    options.group_size = c.group_size;
    options.attend = &attend_options;
    options.stream = stream;
    const auto call = [&] {
        TA_OK_OR_DIE(ta_attend_dense(context, &q.view, &k.view, &v.view, &out.view, nullptr, &options, &error));
    };
    const double us = cold_us(stream, call), in_a_row = back_to_back_us(stream, call);
    out.read();
    const Errors errors = errors_of(c, q, k, v, out);
    if (!(errors.grouped < 5e-3)) die(name.c_str(), "the output is not that of its definition");
    const double n = double(c.n), pairs = c.causal ? n * (n + 1) / 2 : n * n;
    report.add(name, us,
               {{"in_a_row_us", in_a_row},
                {"exact_tflops", 4.0 * c.q_heads * c.d * pairs / (us * 1e-6) * 1e-12},  // as if all channels were multiplied
                {"rel_l2", errors.grouped},
                {"rel_l2_exact", errors.exact}});
}

}  // namespace

int main(int argc, char** argv) {
    Report report(argc, argv, "DistrAttention on a GPU through the ABI");
    auto context_options = sized<ta_context_options>();
    context_options.device = TA_DEVICE_CUDA;
    ta_context* context = nullptr;
    TA_OK_OR_DIE(ta_context_create(&context_options, &context, &error));
    cudaStream_t stream = nullptr;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (const int d : {128, 64}) {
        for (const int64_t n : {4096, 16384, 20480}) {
            const Inputs inputs(n, d);
            for (const bool causal : {false, true}) {
                for (const uint32_t group_size : {2u, 4u}) measure(report, context, stream, inputs, causal, group_size);
            }
            if (d == 128 && n == 16384) measure(report, context, stream, inputs, false, 3);
        }
    }
    measure(report, context, stream, Inputs(16384, 32), false, 2);
    const Inputs shared(16384, 128, 8);
    for (const bool causal : {false, true}) measure(report, context, stream, shared, causal, 2);
    CUDA_OK(cudaStreamDestroy(stream));
    ta_context_destroy(context);
    return 0;
}
