#include "tools/ta/bench_attend.h"

#include <algorithm>
#include <cmath>

namespace ta::tools {
namespace {

using nlohmann::json;

constexpr int64_t kRows = 4096,
                  kChunk = 1024;  // most rows of K and V in a step, in all and per sequence; later steps pass the same rows
                                  // again
constexpr uint64_t kColdBytes = uint64_t{256} << 20;

// The inputs of a step, and exact attention of it.
class Problem {
  public:
    Problem(Machine& machine, const BenchAttendOptions& options, int64_t tokens, uint32_t bits, int64_t queries)
        : machine_(machine),
          o_(options),
          tokens_(tokens),
          queries_(queries),
          new_(queries > 1 ? queries : 0),
          k_(machine, most_rows(), options.kv_heads, options.head_dim, 1),
          v_(machine, most_rows(), options.kv_heads, options.head_dim, 2),
          q_(machine, rows(queries), options.q_heads, options.head_dim, 3),
          out_(machine, rows(queries), options.q_heads, options.head_dim, 4) {
        auto co = sized<ta_context_options>();
        co.device = machine.kind();
        co.device_ordinal = machine.ordinal();
        TA_CHECK(ta_context_create(&co, &context_, &error));
        // Layers are visited in turn, so that a decode step does not find its layer in the caches.
        const uint64_t layer_bytes = uint64_t(tokens) * options.batch * options.kv_heads * options.head_dim * 2 * bits / 8;
        layers_ = queries > 1 ? 1 : uint32_t(std::min<uint64_t>(16, kColdBytes / layer_bytes + 1));
        auto po = sized<ta_kv_pool_options>();
        po.layers = layers_;
        po.kv_heads = options.kv_heads;
        po.head_dim = options.head_dim;
        po.bits = bits;
        auto numerics = sized<ta_numerics>();
        numerics.batch_invariant = options.batch_invariant ? TA_ON : TA_OFF;
        po.numerics = &numerics;
        // Open blocks have 8 bits, and so do full ones while a chunk is appended.
        po.budget_bytes =
            layers_ * uint64_t(options.batch) *
            (layer_bytes / options.batch * 5 / 4 + uint64_t(kChunk + 256) * options.kv_heads * (2 * options.head_dim + 64));
        TA_CHECK(ta_kv_pool_create(context_, &po, &pool_, &error));
        TA_CHECK(ta_plan_create(pool_, nullptr, &plan_, &error));
        if (machine.kind() == TA_DEVICE_CUDA) TA_CHECK(ta_plan_set_stream(plan_, machine.stream(), &error));
        seqs_.resize(options.batch);
        for (ta_seq& seq : seqs_) TA_CHECK(ta_seq_create(pool_, &seq, &error));
        fill();
    }
    ~Problem() {
        ta_plan_destroy(plan_);
        ta_kv_pool_destroy(pool_);
        ta_context_destroy(context_);
    }
    Problem(const Problem&) = delete;
    Problem& operator=(const Problem&) = delete;

    // Seconds of an attend over the last tokens of all sequences, sorted. In a prefill these tokens are new; in a decode the
    // token is in the cache.
    std::vector<double> measure() {
        const std::vector<int32_t> n(seqs_.size(), int32_t(queries_)), none(seqs_.size(), 0);
        const ta_tensor k = k_.first(rows(queries_)), v = v_.first(rows(queries_)), q = q_.all(), out = out_.all();
        TA_CHECK(ta_plan_begin(plan_, uint32_t(seqs_.size()), seqs_.data(), new_ > 0 ? n.data() : none.data(), n.data(),
                               nullptr, &error));
        if (new_ > 0) TA_CHECK(ta_append(plan_, 0, &k, &v, &error));
        uint32_t layer = 0;
        const auto attend = [&] {
            TA_CHECK(ta_attend(plan_, layer, &q, &out, nullptr, nullptr, &error));
            layer = (layer + 1) % layers_;
        };
        attend();
        std::vector<double> seconds;
        for (int i = 0; i < o_.repeats; ++i) seconds.push_back(machine_.time(attend));
        machine_.wait();
        TA_CHECK(ta_plan_abort(plan_, &error));
        std::sort(seconds.begin(), seconds.end());
        return seconds;
    }

    // |out - exact| / |exact| for the last sequence: over its last query token and, in a prefill, one or two others.
    double difference() {
        const int64_t d = o_.head_dim, first_row = rows(queries_) - queries_;
        const std::vector<float> k = copy(k_), v = copy(v_), q = copy(q_), out = copy(out_);
        double wrong = 0, norm = 0;
        std::vector<double> weights, sum(static_cast<size_t>(d));
        for (int64_t i = queries_ - 1; i >= 0; i -= std::max<int64_t>(1, queries_ / 2)) {
            const int64_t keys = tokens_ - queries_ + i + 1;
            weights.resize(size_t(keys));
            for (int64_t h = 0; h < o_.q_heads; ++h) {
                const float* const query = &q[size_t(((first_row + i) * o_.q_heads + h) * d)];
                const int64_t head = h * o_.kv_heads / o_.q_heads;
                double most = -INFINITY, total = 0;
                for (int64_t j = 0; j < keys; ++j) {
                    const float* const key = &k[size_t((source(j) * o_.kv_heads + head) * d)];
                    double s = 0;
                    for (int64_t c = 0; c < d; ++c) s += double(query[c]) * key[c];
                    weights[size_t(j)] = s / std::sqrt(double(d));
                    most = std::max(most, weights[size_t(j)]);
                }
                std::fill(sum.begin(), sum.end(), 0.0);
                for (int64_t j = 0; j < keys; ++j) {
                    const double w = std::exp(weights[size_t(j)] - most);
                    const float* const value = &v[size_t((source(j) * o_.kv_heads + head) * d)];
                    total += w;
                    for (int64_t c = 0; c < d; ++c) sum[size_t(c)] += w * value[c];
                }
                for (int64_t c = 0; c < d; ++c) {
                    const double exact = sum[size_t(c)] / total;
                    wrong += std::pow(out[size_t(((first_row + i) * o_.q_heads + h) * d + c)] - exact, 2);
                    norm += exact * exact;
                }
            }
        }
        return std::sqrt(wrong / norm);
    }

    // Bytes of one layer.
    double bytes() const {
        auto s = sized<ta_kv_pool_stats>();
        TA_CHECK(ta_kv_pool_get_stats(pool_, &s, &error));
        return double(s.bytes_used) / layers_;
    }
    // Multiplications and additions of an attend.
    double operations() const {
        const double pairs = double(queries_) * (double(tokens_) - double(queries_ - 1) / 2);
        return 4 * pairs * o_.head_dim * o_.q_heads * o_.batch;
    }

  private:
    int64_t rows(int64_t tokens) const { return tokens * o_.batch; }
    int64_t most_rows() const { return rows(std::min(tokens_, std::max(chunk_rows(), new_))); }

    // Fills the cache with everything except the step's new tokens. Each step passes the first rows again, one part of them per
    // sequence; source() tells which row a token got.
    void fill() {
        for (int64_t done = 0, cached = tokens_ - new_; done < cached;) {
            const auto n = int32_t(std::min(cached - done, chunk_rows()));
            step(n);
            lengths_.push_back(n);
            done += n;
        }
        lengths_.push_back(new_);
        machine_.wait();
    }
    int64_t chunk_rows() const { return std::max<int64_t>(64, std::min(kChunk, kRows / o_.batch / 64 * 64)); }
    void step(int32_t n) {
        const std::vector<int32_t> of_each(seqs_.size(), n), none(seqs_.size(), 0);
        const ta_tensor k = k_.first(rows(n)), v = v_.first(rows(n));
        TA_CHECK(ta_plan_begin(plan_, uint32_t(seqs_.size()), seqs_.data(), of_each.data(), none.data(), nullptr, &error));
        for (uint32_t layer = 0; layer < layers_; ++layer) TA_CHECK(ta_append(plan_, layer, &k, &v, &error));
        TA_CHECK(ta_plan_end(plan_, nullptr, &error));
    }
    // The row of K and V that token j of the last sequence got.
    int64_t source(int64_t j) const {
        for (const int64_t n : lengths_) {
            if (j < n) return n * (o_.batch - 1) + j;
            j -= n;
        }
        return 0;
    }
    std::vector<float> copy(const Rows& rows) const {
        const ta_tensor t = rows.all();
        std::vector<float> values(size_t(t.tokens * t.heads * t.head_dim));
        machine_.read(values.data(), t.data, values.size() * sizeof(float));
        return values;
    }

    Machine& machine_;
    const BenchAttendOptions& o_;
    const int64_t tokens_, queries_, new_;
    uint32_t layers_ = 1;
    Rows k_, v_, q_, out_;
    std::vector<int64_t> lengths_;  // tokens of each step, including the measured one
    std::vector<ta_seq> seqs_;
    ta_context* context_ = nullptr;
    ta_kv_pool* pool_ = nullptr;
    ta_plan* plan_ = nullptr;
};

struct Part {
    const char* name;
    bool prefill;
};
constexpr Part kParts[] = {{"decode", false}, {"prefill", true}};

// The allowed difference for attention over keys that are alike, as these are: the error of a mean of INT8, INT4 or INT2
// values, with a margin.
double allowed(uint32_t bits) {
    return bits == 8 ? 0.05 : bits == 4 ? 0.25 : 0.9;
}

}  // namespace

std::vector<std::string> bench_attend_parts() {
    return {"decode", "prefill"};
}

void bench_attend(Machine& machine, const BenchAttendOptions& options, const std::function<void(const json&)>& row) {
    if (options.q_heads % options.kv_heads != 0) throw WrongInput("--q-heads is no multiple of --kv-heads");
    for (const Part& part : kParts) {
        if (!options.parts.empty() && std::ranges::find(options.parts, part.name) == options.parts.end()) continue;
        for (const int64_t tokens : options.tokens) {
            const int64_t queries = part.prefill ? std::min(options.chunk, tokens) : 1;
            for (const uint32_t bits : options.bits) {
                Problem problem(machine, options, tokens, bits, queries);
                const double bytes = problem.bytes();
                const std::vector<double> seconds = problem.measure();
                const double median = seconds[seconds.size() / 2], difference = problem.difference();
                if (!(difference <= allowed(bits)))
                    throw Failure(std::string(part.name) + " over " + std::to_string(tokens) + " tokens at " +
                                  std::to_string(bits) + " bits is " + std::to_string(difference) +
                                  " of its size away from exact attention; at most " + std::to_string(allowed(bits)) +
                                  " is right");
                json result = {{"part", part.name},
                               {"bits", bits},
                               {"batch", options.batch},
                               {"tokens", tokens},
                               {"queries", queries},
                               {"q_heads", options.q_heads},
                               {"kv_heads", options.kv_heads},
                               {"head_dim", options.head_dim},
                               {"p50_us", 1e6 * median},
                               {"p99_us", 1e6 * seconds[seconds.size() * 99 / 100]},
                               {"difference", difference}};
                if (options.batch_invariant) result["batch_invariant"] = true;
                if (part.prefill) {
                    result["tera_ops_s"] = 1e-12 * problem.operations() / median;
                } else {
                    result["bytes"] = bytes;
                    result["gb_s"] = 1e-9 * bytes / median;
                }
                row(result);
            }
        }
    }
}

}  // namespace ta::tools
