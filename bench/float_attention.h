// The peer of the prefill benchmark: causal flash attention over FP32 keys and values with AVX-512 FMA, written with the care of
// the library's kernels: register-tiled products, keys transposed once per page, a cubic exponential.
#pragma once

#include <cstdint>

namespace ta::bench {

// True where this CPU runs it.
bool float_attention_available();

// q, out [n_query, q_heads, head_dim]; k, v [n_keys, kv_heads, head_dim]; the queries are the last positions. head_dim is a
// multiple of 16 up to 256.
void float_attention(const float* q, int64_t n_query, const float* k, const float* v, int64_t n_keys, int q_heads, int kv_heads,
                     int head_dim, int threads, float* out);

}  // namespace ta::bench
