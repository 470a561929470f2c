// Stacks of attention layers as models of today have them, with random weights: windows in most layers, layers that use the keys and
// values of earlier ones, learned sinks, wide heads, and heads of two shapes. The same stack in float64 judges the results; they
// must be the same to the bit wherever blocks lie, through files, and beside a pool that keeps everything.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "support/files.h"
#include "support/numbers.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint64_t kPlenty = uint64_t{512} << 20;

struct Layer {
    uint32_t stored;  // layer of the pool that has its keys and values
    bool brings;      // and it brings them
    int64_t window;   // 0: it sees all
};
struct Heads {
    uint32_t kv_heads, group, head_dim;
    uint32_t q_heads() const { return kv_heads * group; }
};
struct Model {
    const char* name;
    std::vector<Layer> layers;
    Heads narrow, wide;  // of layers with a window, and of those that see all
    uint32_t hidden;
    float softcap;
    bool sinks;
    int64_t tokens;
    double allowed[3];  // error of the last hidden states at 8, 4 and 2 bits, relative
    const Heads& heads(const Layer& l) const { return l.window > 0 ? narrow : wide; }
    uint32_t stored_layers() const {
        return uint32_t(std::count_if(layers.begin(), layers.end(), [](const Layer& l) { return l.brings; }));
    }
    int64_t window_of(uint32_t stored) const {
        return std::find_if(layers.begin(), layers.end(), [&](const Layer& l) { return l.stored == stored; })->window;
    }
};
std::vector<Layer> gemma_like() {
    // Five of six layers have a window, and the last third uses what layer 2 stored.
    std::vector<Layer> all;
    for (uint32_t i = 0; i < 6; ++i) all.push_back(i < 4 ? Layer{i, true, i == 3 ? 0 : 1024} : Layer{2, false, 1024});
    return all;
}
std::vector<Layer> gpt_oss_like() {
    std::vector<Layer> all;
    for (uint32_t i = 0; i < 6; ++i) all.push_back({i, true, i % 2 == 0 ? 128 : 0});
    return all;
}
const Model kModels[] = {
    {"gemma_like", gemma_like(), {1, 2, 256}, {1, 2, 256}, 64, 0.0f, false, 1300, {0.008, 0.018, 0.065}},
    {"gpt_oss_like", gpt_oss_like(), {2, 8, 64}, {2, 8, 64}, 64, 0.0f, true, 600, {0.008, 0.018, 0.065}},
    {"softcapped", gpt_oss_like(), {2, 2, 128}, {2, 2, 128}, 64, 30.0f, false, 400, {0.008, 0.018, 0.065}},
    {"two_shapes", gpt_oss_like(), {4, 2, 64}, {1, 8, 128}, 64, 0.0f, false, 600, {0.008, 0.018, 0.065}},
};

// Inputs that both sides compute with: F32, in rows [tokens, heads, head_dim].
class Weights {
  public:
    explicit Weights(const Model& m) {
        Random random(1);
        const auto matrix = [&](size_t rows, size_t columns) {
            return random.normals(int64_t(rows * columns), 1.0f / std::sqrt(float(columns)));
        };
        embeddings = random.normals(m.tokens * m.hidden);
        for (size_t l = 0; l < m.layers.size(); ++l) {
            const Heads& h = m.heads(m.layers[l]);
            q.push_back(matrix(h.q_heads() * h.head_dim, m.hidden));
            k.push_back(matrix(h.kv_heads * h.head_dim, m.hidden));
            v.push_back(matrix(h.kv_heads * h.head_dim, m.hidden));
            o.push_back(matrix(m.hidden, h.q_heads() * h.head_dim));
            sinks.push_back(random.normals(h.q_heads()));
        }
    }
    // [rows of w] of each state, after its normalization.
    template <class T>
    std::vector<T> project(const std::vector<float>& w, const std::vector<T>& x, size_t in, bool normalize) const {
        const size_t n = x.size() / in, out = w.size() / in;
        std::vector<T> y(n * out);
        for (size_t t = 0; t < n; ++t) {
            T norm = 1;
            if (normalize) {
                T sum = 0;
                for (size_t c = 0; c < in; ++c) sum += x[t * in + c] * x[t * in + c];
                norm = 1 / std::sqrt(sum / T(in) + T(1e-6));
            }
            for (size_t r = 0; r < out; ++r) {
                T sum = 0;
                for (size_t c = 0; c < in; ++c) sum += T(w[r * in + c]) * x[t * in + c];
                y[t * out + r] = sum * norm;
            }
        }
        return y;
    }
    // Rotary positions, from `first` on.
    template <class T>
    static void rotate(std::vector<T>& x, size_t heads, size_t d, int64_t first) {
        const size_t n = x.size() / (heads * d);
        for (size_t t = 0; t < n; ++t) {
            for (size_t c = 0; c < d / 2; ++c) {
                const double angle = double(first + int64_t(t)) * std::pow(10000.0, -2.0 * double(c) / double(d));
                const T cosine = T(std::cos(angle)), sine = T(std::sin(angle));
                for (size_t h = 0; h < heads; ++h) {
                    T& a = x[(t * heads + h) * d + c];
                    T& b = x[(t * heads + h) * d + c + d / 2];
                    const T rotated = a * cosine - b * sine;
                    b = a * sine + b * cosine;
                    a = rotated;
                }
            }
        }
    }

    std::vector<float> embeddings;
    std::vector<std::vector<float>> q, k, v, o, sinks;
};

// The last hidden states of all tokens, in float64.
std::vector<double> exact_states(const Model& m, const Weights& w) {
    std::vector<double> x(w.embeddings.begin(), w.embeddings.end());
    std::vector<std::vector<double>> keys(m.layers.size()), values(m.layers.size());
    for (size_t l = 0; l < m.layers.size(); ++l) {
        const Layer& layer = m.layers[l];
        const Heads& of = m.heads(layer);
        const size_t d = of.head_dim, heads = of.q_heads();
        if (layer.brings) {
            keys[layer.stored] = w.project(w.k[l], x, m.hidden, true);
            Weights::rotate(keys[layer.stored], of.kv_heads, d, 0);
            values[layer.stored] = w.project(w.v[l], x, m.hidden, true);
        }
        const std::vector<double>&k = keys[layer.stored], &v = values[layer.stored];
        std::vector<double> q = w.project(w.q[l], x, m.hidden, true), out(size_t(m.tokens) * heads * d);
        Weights::rotate(q, heads, d, 0);
        std::vector<double> p;
        for (int64_t t = 0; t < m.tokens; ++t) {
            const int64_t first = layer.window > 0 ? std::max<int64_t>(0, t - layer.window + 1) : 0;
            for (size_t h = 0; h < heads; ++h) {
                p.assign(size_t(t - first + 1), 0.0);
                double largest = m.sinks ? double(w.sinks[l][h]) : -INFINITY;
                for (int64_t j = first; j <= t; ++j) {
                    double s = 0;
                    const double *a = &q[(size_t(t) * heads + h) * d], *b = &k[(size_t(j) * of.kv_heads + h / of.group) * d];
                    for (size_t c = 0; c < d; ++c) s += a[c] * b[c];
                    s /= std::sqrt(double(d));
                    if (m.softcap > 0) s = m.softcap * std::tanh(s / m.softcap);
                    p[size_t(j - first)] = s;
                    largest = std::max(largest, s);
                }
                double sum = m.sinks ? std::exp(double(w.sinks[l][h]) - largest) : 0.0;
                for (double& s : p) sum += s = std::exp(s - largest);
                double* o = &out[(size_t(t) * heads + h) * d];
                for (int64_t j = first; j <= t; ++j) {
                    const double* b = &v[(size_t(j) * of.kv_heads + h / of.group) * d];
                    for (size_t c = 0; c < d; ++c) o[c] += p[size_t(j - first)] / sum * b[c];
                }
            }
        }
        const std::vector<double> more = w.project(w.o[l], out, heads * d, false);
        for (size_t i = 0; i < x.size(); ++i) x[i] += more[i];
    }
    return x;
}

// The same through a pool.
class Stack {
  public:
    Stack(const Context& context, const Model& m, const Weights& w, uint32_t bits, bool windows,
          const ta_tier_options* tiers = nullptr, uint64_t budget = kPlenty)
        : m_(m), w_(w), windows_(windows) {
        auto options = pool_options(m.stored_layers(), m.narrow.kv_heads, m.narrow.head_dim, bits);
        options.budget_bytes = budget;
        options.tiers = tiers;
        std::vector<ta_layer_group> groups;
        for (uint32_t l = 0; l < options.layers; ++l) {
            ta_layer_group& g = groups.emplace_back(sized<ta_layer_group>());
            g.first = l;
            g.layers = 1;
            g.window = windows ? m.window_of(l) : 0;
            if (m.window_of(l) > 0) continue;
            g.kv_heads = m.wide.kv_heads;
            g.head_dim = m.wide.head_dim;
        }
        options.layer_groups = groups.data();
        options.n_layer_groups = uint32_t(groups.size());
        pool = make_pool(context, options);
        plan_ = make_plan(pool);
        seq = make_sequence(pool);
    }
    // The next tokens, whose last hidden states are added to `states`.
    void step(int32_t n) {
        const int64_t at = length(pool, seq);
        std::vector<float> x(w_.embeddings.begin() + at * m_.hidden, w_.embeddings.begin() + (at + n) * m_.hidden);
        begin(plan_, {seq}, {n});
        for (size_t l = 0; l < m_.layers.size(); ++l) {
            const Layer& layer = m_.layers[l];
            const Heads& of = m_.heads(layer);
            if (layer.brings) {
                std::vector<float> k = w_.project(w_.k[l], x, m_.hidden, true);
                Weights::rotate(k, of.kv_heads, of.head_dim, at);
                Tensor tk(k, n, of.kv_heads, of.head_dim),
                    tv(w_.project(w_.v[l], x, m_.hidden, true), n, of.kv_heads, of.head_dim);
                append(plan_, layer.stored, tk, tv);
            }
            std::vector<float> q = w_.project(w_.q[l], x, m_.hidden, true);
            Weights::rotate(q, of.q_heads(), of.head_dim, at);
            Tensor tq(q, n, of.q_heads(), of.head_dim), out(n, of.q_heads(), of.head_dim);
            auto o = sized<ta_attend_options>();
            o.window = windows_ ? 0 : layer.window;
            o.softcap = m_.softcap;
            o.sinks = m_.sinks ? w_.sinks[l].data() : nullptr;
            attend(plan_, layer.stored, tq, out, nullptr, &o);
            const std::vector<float> more = w_.project(w_.o[l], out.values(), size_t(of.q_heads()) * of.head_dim, false);
            for (size_t i = 0; i < x.size(); ++i) x[i] += more[i];
        }
        end(plan_);
        states.insert(states.end(), x.begin(), x.end());
    }

    KvPool pool;
    ta_seq seq = 0;
    std::vector<float> states;

  private:
    const Model& m_;
    const Weights& w_;
    const bool windows_;
    Plan plan_;
};

class Models : public ::testing::TestWithParam<size_t> {};

TEST_P(Models, AreThoseInFloat64) {
    const Model& m = kModels[GetParam()];
    const Weights w(m);
    const std::vector<double> exact = exact_states(m, w);
    const Context context = make_context(2);
    const Folder folder;
    for (const uint32_t bits : {8u, 4u, 2u}) {
        SCOPED_TRACE(std::to_string(bits) + " bits");
        Stack plain(context, m, w, bits, false), windowed(context, m, w, bits, true);
        const ta_kv_pool_stats sizes = stats(plain.pool);
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = 30 * sizes.token_block_bytes;
        tiers.disk_bytes = kPlenty;
        Stack tiered(context, m, w, bits, true, &tiers, 14 * sizes.token_block_bytes);
        for (int64_t left = m.tokens; left > 0;) {
            const auto n = int32_t(std::min<int64_t>(left, left > 64 ? 256 : 1));
            for (Stack* s : {&plain, &windowed, &tiered}) s->step(n);
            left -= n;
            if (n > 1 || left % 30 > 0) continue;
            ta_ticket ticket = 0;
            ta_error err;
            require(ta_seq_suspend(tiered.pool.get(), tiered.seq, TA_TIER_DISK, &ticket, &err), err);
            const std::string path = folder.file(("at" + std::to_string(left) + "bits" + std::to_string(bits)).c_str());
            require(ta_seq_save(windowed.pool.get(), windowed.seq, path.c_str(), nullptr, &err), err);
            require(ta_seq_release(windowed.pool.get(), windowed.seq, &err), err);
            require(ta_seq_load(windowed.pool.get(), path.c_str(), nullptr, &windowed.seq, &err), err);
        }
        EXPECT_TRUE(windowed.states == plain.states);
        EXPECT_TRUE(tiered.states == plain.states);
        EXPECT_GT(stats(windowed.pool).passed_blocks, 0u);
        EXPECT_LT(stats(windowed.pool).bytes_used, stats(plain.pool).bytes_used);
        double error = 0, norm = 0;
        for (size_t i = 0; i < exact.size(); ++i) {
            error += std::pow(double(plain.states[i]) - exact[i], 2);
            norm += std::pow(exact[i], 2);
        }
        EXPECT_LT(std::sqrt(error / norm), m.allowed[bits == 8 ? 0 : bits == 4 ? 1 : 2]);
        RecordProperty("error_at_" + std::to_string(bits) + "_bits", std::to_string(std::sqrt(error / norm)));
    }
}

INSTANTIATE_TEST_SUITE_P(Stacks, Models, ::testing::Range(size_t{0}, std::size(kModels)),
                         [](const auto& of) { return std::string(kModels[of.param].name); });

}  // namespace
}  // namespace ta::testing
