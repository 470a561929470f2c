// Shared by the benchmarks: a filled pool behind the public ABI, float64 attention to check against, and the machine's read
// bandwidth measured in the same run.
#pragma once

#include <turboattention_experimental.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

namespace ta::bench {

struct Shape {
    int layers = 1, q_heads = 32, kv_heads = 8, head_dim = 128;
    int64_t tokens = 0;
};

// Ends the program with the error's text unless the call succeeded: a benchmark has nobody to report to.
void check(ta_status status, const ta_error& err, const char* what);

// Floats on a 64-byte boundary.
class AlignedFloats {
  public:
    explicit AlignedFloats(size_t n) : data_(static_cast<float*>(std::aligned_alloc(64, (n * sizeof(float) + 63) / 64 * 64))) {}
    ~AlignedFloats() { std::free(data_); }
    AlignedFloats(const AlignedFloats&) = delete;
    AlignedFloats& operator=(const AlignedFloats&) = delete;
    float* data() { return data_; }
    const float* data() const { return data_; }

  private:
    float* data_;
};

// Deterministic N(0, 1) values.
std::vector<float> normal_values(size_t n, uint64_t seed);

// A pool with one sequence of shape.tokens tokens in every layer; the layers hold the same keys and values.
class FilledPool {
  public:
    // q_bits: as ta_numerics has it; 0: the profile's.
    FilledPool(const Shape& shape, uint32_t bits, int threads, ta_profile profile = TA_PROFILE_ACCURATE, uint32_t q_bits = 0);
    ~FilledPool();
    FilledPool(const FilledPool&) = delete;
    FilledPool& operator=(const FilledPool&) = delete;

    const Shape& shape() const { return shape_; }
    ta_kv_pool* pool() const { return pool_; }
    ta_plan* plan() const { return plan_; }
    ta_seq sequence() const { return seq_; }
    const std::vector<float>& keys() const { return k_; }  // [tokens, kv_heads, head_dim]
    const std::vector<float>& values() const { return v_; }
    uint64_t kv_bytes_per_layer() const;  // pages, scales included

    void begin(int32_t n_new, int32_t n_query) const;
    void append(uint32_t layer, const float* k, const float* v, int64_t tokens) const;
    void attend(uint32_t layer, const float* q, float* out, int64_t tokens, const ta_attend_options* options = nullptr) const;
    void end() const;
    void abort() const;

  private:
    Shape shape_;
    ta_context* context_ = nullptr;
    ta_kv_pool* pool_ = nullptr;
    ta_plan* plan_ = nullptr;
    ta_seq seq_ = 0;
    std::vector<float> k_, v_;
};

// Relative L2 error of `out` against float64 causal attention, over the given kv head's query heads.
double error_against_float64(const Shape& shape, const float* q, int64_t n_query, const float* k, const float* v,
                             int64_t n_keys, const float* out, int kv_head);

// Bytes per second that `threads` threads read together from memory, over a buffer of 1 GiB.
double read_bandwidth(int threads);

}  // namespace ta::bench
