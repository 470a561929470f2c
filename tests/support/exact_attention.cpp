#include "support/exact_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

namespace ta::testing {
namespace {

// Eight sums at a time, which the compiler can vectorise. n is a multiple of 8.
double dot(const float* a, const float* b, int64_t n) {
    double sums[8] = {};
    for (int64_t c = 0; c < n; c += 8) {
        for (int64_t k = 0; k < 8; ++k) sums[k] += double(a[c + k]) * double(b[c + k]);
    }
    double sum = 0.0;
    for (double x : sums) sum += x;
    return sum;
}

}  // namespace

Attention exact_attention(const AttentionShape& s, const AttentionRules& rules, const float* q, const float* k, const float* v,
                          Rows rows) {
    constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
    const double scale = rules.scale > 0.0 ? rules.scale : 1.0 / std::sqrt(double(s.head_dim));
    Attention r;
    r.out.assign(size_t(s.n_query * s.q_heads * s.head_dim), 0.0);
    r.lse.assign(size_t(s.n_query * s.q_heads), kMinusInf);
    std::vector<double> x(static_cast<size_t>(s.n_keys));
    for (int64_t i = rows.first; i < s.n_query; i += rows.step) {
        const int64_t position = s.n_keys - s.n_query + i;
        const auto sees = [&](int64_t j) {
            if (rules.causal && j > position) return false;
            return rules.window == 0 || std::abs(j - position) < rules.window;
        };
        for (int64_t h = 0; h < s.q_heads; ++h) {
            const int64_t row = i * s.q_heads + h, kv_head = h / s.group();
            const float* q_row = q + row * s.head_dim;
            double top = kMinusInf;
            for (int64_t j = 0; j < s.n_keys; ++j) {
                if (!sees(j)) {
                    x[size_t(j)] = kMinusInf;
                    continue;
                }
                const float* k_row = k + (j * s.kv_heads + kv_head) * s.head_dim;
                double score = dot(q_row, k_row, s.head_dim) * scale;
                if (rules.softcap > 0.0) score = rules.softcap * std::tanh(score / rules.softcap);
                if (rules.alibi_slopes) score += double(rules.alibi_slopes[h]) * double(j - position);
                x[size_t(j)] = score;
                top = std::max(top, score);
            }
            const double sink = rules.sinks ? double(rules.sinks[h]) : kMinusInf;
            top = std::max(top, sink);
            if (top == kMinusInf) continue;  // sees nothing: 0 and -inf
            double denominator = rules.sinks ? std::exp(sink - top) : 0.0;
            double* out = r.out.data() + row * s.head_dim;
            for (int64_t j = 0; j < s.n_keys; ++j) {
                const double p = std::exp(x[size_t(j)] - top);
                if (p == 0.0) continue;
                denominator += p;
                const float* v_row = v + (j * s.kv_heads + kv_head) * s.head_dim;
                for (int64_t c = 0; c < s.head_dim; ++c) out[c] += p * double(v_row[c]);
            }
            for (int64_t c = 0; c < s.head_dim; ++c) out[c] /= denominator;
            r.lse[size_t(row)] = top + std::log(denominator);
        }
    }
    return r;
}

}  // namespace ta::testing
