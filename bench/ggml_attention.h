// Attention of ggml on a CPU, the peer of bench_attend: its flash attention over a cache in F16, Q8_0 or Q4_0, called as llama.cpp calls
// it. In builds that find ggml (find_package; CMAKE_PREFIX_PATH says where).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/support.h"

namespace ta::bench {

enum class GgmlType { kF16, kQ8, kQ4 };

class GgmlAttention {
  public:
    // k, v [tokens, kv_heads, head_dim]: the same in each of shape.layers layers. Queries are the last n_query tokens.
    GgmlAttention(const Shape& shape, GgmlType type, int64_t n_query, const std::vector<float>& k, const std::vector<float>& v,
                  int threads);
    ~GgmlAttention();
    GgmlAttention(const GgmlAttention&) = delete;
    GgmlAttention& operator=(const GgmlAttention&) = delete;

    // q, out [n_query, q_heads, head_dim]
    void run(int layer, const float* q, float* out);
    uint64_t kv_bytes_per_layer() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace ta::bench
