// Attention in float64, straight from the definition: what every result is judged by.
#pragma once

#include <cstdint>
#include <vector>

namespace ta::testing {

struct AttentionShape {
    int64_t n_query = 0, n_keys = 0;
    int64_t q_heads = 1, kv_heads = 1, head_dim = 64;
    int64_t group() const { return q_heads / kv_heads; }
};

struct AttentionRules {
    bool causal = true;
    double scale = 0.0;  // 0: 1 / sqrt(head_dim)
    double softcap = 0.0;
    int64_t window = 0;
    const float* alibi_slopes = nullptr;  // [q_heads]
    const float* sinks = nullptr;         // [q_heads]
};

struct Attention {
    std::vector<double> out;  // [n_query, q_heads, head_dim]
    std::vector<double> lse;  // [n_query, q_heads]
};

// Which query tokens to compute: first, first + step, ... The results of the others stay 0 and -inf.
struct Rows {
    int64_t first = 0, step = 1;
};

// q [n_query, q_heads, head_dim]; k, v [n_keys, kv_heads, head_dim].
Attention exact_attention(const AttentionShape& shape, const AttentionRules& rules, const float* q, const float* k,
                          const float* v, Rows rows = {});

}  // namespace ta::testing
