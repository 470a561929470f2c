#include <cblas.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <vector>

#include "attention.h"
#include "parallel.h"
#include "vector_math.h"

namespace tinylm {
namespace {

// Query rows of one matrix product. With more, the packed keys would serve more rows, but the scores would not fit the cache.
constexpr int kMaxRows = 128;

class ExactAttention final : public AttentionBackend {
  public:
    ExactAttention(const AttentionShape& shape, Workers& workers)
        : shape_(shape),
          workers_(workers),
          group_(shape.heads / shape.kv_heads),
          head_stride_(static_cast<std::size_t>(shape.max_tokens) * shape.head_dim),
          k_(head_stride_ * shape.layers * shape.kv_heads),
          v_(k_.size()),
          scratch_(workers.count()) {}

    void reset() override { length_ = 0; }
    void begin(int n_new) override {
        n_new_ = n_new;
        const int share = (n_new * shape_.kv_heads + workers_.count() - 1) / workers_.count();
        block_tokens_ = std::max(1, std::min({n_new, share, kMaxRows / group_}));
        const std::size_t rows = static_cast<std::size_t>(block_tokens_) * group_;
        for (Scratch& s : scratch_) {
            s.q.resize(rows * shape_.head_dim);
            s.out.resize(s.q.size());
            s.scores.resize(rows * (length_ + n_new));
        }
    }
    void end() override { length_ += n_new_; }

    void attend(int layer, const float* q, const float* k, const float* v, float* out) override {
        store(layer, k, k_);
        store(layer, v, v_);
        const int blocks = (n_new_ + block_tokens_ - 1) / block_tokens_;
        std::atomic<int> next{0};
        workers_.run([&](int part) {
            for (int unit; (unit = next++) < blocks * shape_.kv_heads;) {
                attend_block(layer, unit % shape_.kv_heads, unit / shape_.kv_heads * block_tokens_, q, out, scratch_[part]);
            }
        });
    }

    void shift(int first, int n) override {
        const std::size_t d = shape_.head_dim;
        for (int head = 0; head < shape_.layers * shape_.kv_heads; ++head) {
            const std::size_t at = static_cast<std::size_t>(head) * head_stride_;
            for (int i = 0; i < first; ++i) turn(k_.data() + at + i * d, n);
            for (std::vector<float>* cache : {&k_, &v_}) {
                float* const to = cache->data() + at + first * d;
                std::copy(to + n * d, to + (length_ - first) * d, to);
            }
        }
        length_ -= n;
    }

    KvStats stats() const override {
        const uint64_t per_token = 2ull * shape_.layers * shape_.kv_heads * shape_.head_dim * sizeof(float);
        return {"exact, fp32", per_token * length_, static_cast<uint64_t>(length_)};
    }

  private:
    struct Scratch {
        std::vector<float> q, out;  // [tokens of a block, group, head_dim]
        std::vector<float> scores;  // [tokens of a block, group, keys]
    };

    // Turns a key by n more positions, as the model does.
    void turn(float* row, int n) const {
        const int half = shape_.head_dim / 2;
        for (int i = 0; i < half; ++i) {
            const double angle = n * std::pow(shape_.rope_theta, -static_cast<double>(i) / half), x = row[i], y = row[i + half];
            row[i] = static_cast<float>(x * std::cos(angle) - y * std::sin(angle));
            row[i + half] = static_cast<float>(x * std::sin(angle) + y * std::cos(angle));
        }
    }

    // The cache is [layer, kv head, token, channel], so that a head is one matrix.
    std::size_t cache_at(int layer, int kv_head) const {
        return (static_cast<std::size_t>(layer) * shape_.kv_heads + kv_head) * head_stride_;
    }

    void store(int layer, const float* x, std::vector<float>& cache) {
        const std::size_t d = shape_.head_dim;
        for (int i = 0; i < n_new_; ++i) {
            for (int head = 0; head < shape_.kv_heads; ++head, x += d) {
                std::copy_n(x, d, cache.data() + cache_at(layer, head) + (length_ + i) * d);
            }
        }
    }

    // Attends some new tokens with all query heads of one kv head: S = Q K^T / sqrt(d), P = softmax(S), O = P V.
    void attend_block(int layer, int kv_head, int first_token, const float* q, float* out, Scratch& scratch) {
        const std::size_t d = shape_.head_dim;
        const std::size_t row = group_ * d;  // values of this kv head's group in a token of q and out
        const int tokens = std::min(block_tokens_, n_new_ - first_token);
        const int seen_before = length_ + first_token;
        const auto at = [&](int i) { return (static_cast<std::size_t>(first_token + i) * shape_.kv_heads + kv_head) * row; };
        for (int i = 0; i < tokens; ++i) std::copy_n(q + at(i), row, scratch.q.data() + i * row);

        const int keys = seen_before + tokens;
        const float* k = k_.data() + cache_at(layer, kv_head);
        const float* v = v_.data() + cache_at(layer, kv_head);
        query_key(scratch, k, tokens * group_, keys);
        for (int i = 0; i < tokens * group_; ++i) {
            softmax(scratch.scores.data() + static_cast<std::size_t>(i) * keys, seen_before + i / group_ + 1, keys);
        }
        probability_value(scratch, v, tokens * group_, keys);
        for (int i = 0; i < tokens; ++i) std::copy_n(scratch.out.data() + i * row, row, out + at(i));
    }

    // For one new token, a matrix product would spend its time on copying the cache into its own layout.
    void query_key(Scratch& s, const float* k, int rows, int keys) const {
        const int d = shape_.head_dim;
        const float scale = 1.0f / std::sqrt(static_cast<float>(d));
        if (n_new_ > 1) {
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, keys, d, scale, s.q.data(), d, k, d, 0.0f,
                        s.scores.data(), keys);
            return;
        }
        for (int i = 0; i < rows; ++i) {
            cblas_sgemv(CblasRowMajor, CblasNoTrans, keys, d, scale, k, d, &s.q[i * d], 1, 0.0f, &s.scores[i * keys], 1);
        }
    }

    void probability_value(Scratch& s, const float* v, int rows, int keys) const {
        const int d = shape_.head_dim;
        if (n_new_ > 1) {
            cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, d, keys, 1.0f, s.scores.data(), keys, v, d, 0.0f,
                        s.out.data(), d);
            return;
        }
        for (int i = 0; i < rows; ++i) {
            cblas_sgemv(CblasRowMajor, CblasTrans, keys, d, 1.0f, v, d, &s.scores[i * keys], 1, 0.0f, &s.out[i * d], 1);
        }
    }

    static void softmax(float* row, int visible, int keys) {
        const float inverse = 1.0f / exp_minus_max(row, visible);
        for (int i = 0; i < visible; ++i) row[i] *= inverse;
        std::fill(row + visible, row + keys, 0.0f);
    }

    AttentionShape shape_;
    Workers& workers_;
    int group_;  // query heads that share a kv head
    std::size_t head_stride_;
    std::vector<float> k_, v_;
    std::vector<Scratch> scratch_;  // one per worker
    int length_ = 0;
    int n_new_ = 0;
    int block_tokens_ = 0;  // new tokens in one unit of work
};

}  // namespace

std::unique_ptr<AttentionBackend> make_exact_attention(const AttentionShape& shape, Workers& workers) {
    return std::make_unique<ExactAttention>(shape, workers);
}

}  // namespace tinylm
