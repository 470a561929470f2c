// Sequences that are spread over the ranks of a local group, and beside them one context that has them whole.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "support/groups.h"

namespace ta::testing::spread {

inline constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;
inline constexpr int64_t kRow = kHeads * kDim;

// The tensors of a layer.
struct LayerOf {
    uint32_t kv_heads = kHeads, k_dim = kDim, v_dim = kDim;
};
inline const std::vector<LayerOf> kAlike(kLayers);

inline ta_kv_pool_options pool_shape(uint32_t bits = 4) {
    auto options = pool_options(kLayers, kHeads, kDim, bits);
    options.budget_bytes = 64 << 20;
    return options;
}

// P at 16 bits: P of 8 bits is rounded by the largest score of each rank's keys, as it is by that of each split on one device.
inline ta_attend_options fine_options() {
    auto o = sized<ta_attend_options>();
    o.p = TA_P_U16;
    return o;
}

// The arguments of one step, the same at all ranks.
struct Asked {
    int32_t n_new = 1, n_query = 1;
    uint64_t seed = 1;
    int32_t group = 2;  // query heads for each kv head
    ta_attend_options options = fine_options();
    int32_t more = 0;                            // tokens and queries of a sequence than the one before has
    bool lse = true;                             // is asked for
    std::vector<float> sinks = {}, slopes = {};  // [query heads], options'; empty: none
    std::function<void()> begun = [] {};         // is called between ta_plan_begin and the rest
    std::vector<int32_t> keep = {};              // [sequences] of drafts; empty: no drafts
    std::vector<int32_t> parent = {};            // [sum of n_new] of a token tree; empty: chains
    std::vector<int64_t> positions = {};         // [sum of n_query] of the queries; empty: the last tokens
};

struct Given {
    ta_status status = TA_OK;
    int32_t rank = -1;
    std::string text;
    std::vector<float> out, lse;  // of all layers; NaN where nothing was written
};

// How a step of a plan gets its tensors: Copy(tensor) lends one to a call with view(), and fetch() brings the results back, once
// finish() has returned. The default is a CPU's.
struct InPlace {
    explicit InPlace(Tensor& t) : tensor(t) {}
    const ta_tensor* view() const { return tensor.view(); }
    void fetch() const {}
    Tensor& tensor;
};

struct Calls {
    const Plan& plan;
    const std::vector<ta_seq>& seqs;
    const Asked& asked;
    const std::vector<LayerOf>& of_layers = kAlike;
};

// A call that fails ends the step.
template <class Copy = InPlace>
Given try_step(
    const Calls& c, const std::function<void()>& finish = [] {}) {
    Given given;
    ta_error err;
    const auto ok = [&](ta_status s) {
        given.status = s;
        if (s == TA_OK) return true;
        given.rank = err.rank;
        given.text = err.message;
        (void)ta_plan_abort(c.plan.get(), nullptr);
        return false;
    };
    const Asked& asked = c.asked;
    std::vector<int32_t> n_new, n_query;
    int64_t tokens = 0, rows = 0;
    for (int32_t i = 0; i < int32_t(c.seqs.size()); ++i) {
        tokens += n_new.emplace_back(asked.n_new + i * asked.more);
        rows += n_query.emplace_back(asked.n_query + i * asked.more);
    }
    auto how = sized<ta_step_options>();
    how.drafts = asked.keep.empty() ? TA_OFF : TA_ON;
    if (!asked.parent.empty()) how.tree_parent = asked.parent.data();
    if (!asked.positions.empty()) how.query_positions = asked.positions.data();
    if (!ok(ta_plan_begin(c.plan.get(), uint32_t(c.seqs.size()), c.seqs.data(), n_new.data(), n_query.data(), &how, &err)))
        return given;
    asked.begun();
    Random random(asked.seed);
    const int64_t q_heads = kHeads * asked.group;
    Tensor sinks(asked.sinks, !asked.sinks.empty(), q_heads, 1), slopes(asked.slopes, !asked.slopes.empty(), q_heads, 1);
    const Copy sinks_copy(sinks), slopes_copy(slopes);
    ta_attend_options options = asked.options;
    if (!asked.sinks.empty()) options.sinks = static_cast<const float*>(sinks_copy.view()->data);
    if (!asked.slopes.empty()) options.alibi_slopes = static_cast<const float*>(slopes_copy.view()->data);
    struct Layer {
        Layer(Random& random, const LayerOf& of, int64_t tokens, int64_t rows, int64_t heads)
            : k(random.normals(tokens * of.kv_heads * of.k_dim), tokens, of.kv_heads, of.k_dim),
              v(random.normals(tokens * of.kv_heads * of.v_dim), tokens, of.kv_heads, of.v_dim),
              q(random.normals(rows * heads * of.k_dim), rows, heads, of.k_dim),
              out(std::vector<float>(size_t(rows * heads * of.v_dim), NAN), rows, heads, of.v_dim),
              lse(std::vector<float>(size_t(rows * heads), NAN), rows, heads, 1) {}
        Tensor k, v, q, out, lse;
        Copy k_copy{k}, v_copy{v}, q_copy{q}, out_copy{out}, lse_copy{lse};
    };
    std::deque<Layer> layers;
    for (uint32_t layer = 0; layer < c.of_layers.size(); ++layer) {
        const LayerOf& of = c.of_layers[layer];
        layers.emplace_back(random, of, tokens, rows, int64_t(of.kv_heads) * asked.group);
        const Layer& x = layers.back();
        if (!ok(ta_append(c.plan.get(), layer, x.k_copy.view(), x.v_copy.view(), &err))) break;
        auto* const lse = asked.lse ? static_cast<float*>(x.lse_copy.view()->data) : nullptr;
        if (!ok(ta_attend(c.plan.get(), layer, x.q_copy.view(), x.out_copy.view(), lse, &options, &err))) break;
    }
    if (given.status == TA_OK) ok(ta_plan_end(c.plan.get(), asked.keep.empty() ? nullptr : asked.keep.data(), &err));
    finish();
    for (const Layer& x : layers) {
        x.out_copy.fetch();
        x.lse_copy.fetch();
        for (const auto& [from, to] : {std::pair(&x.out, &given.out), std::pair(&x.lse, &given.lse)}) {
            const std::vector<float> got = from->values();
            to->insert(to->end(), got.begin(), got.end());
        }
    }
    return given;
}
inline Given try_step(const Plan& plan, const std::vector<ta_seq>& seqs, const Asked& asked) {
    return try_step(Calls{plan, seqs, asked});
}

inline double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
    double most = a.size() == b.size() ? 0.0 : INFINITY;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
        if (a[i] != b[i]) most = std::max(most, std::fabs(double(a[i]) - double(b[i])));
        if (std::isnan(a[i]) != std::isnan(b[i])) return INFINITY;
    }
    return most;
}

inline ta_partition_options partition_options(uint64_t tag, uint32_t first_rank = 0) {
    auto o = sized<ta_partition_options>();
    o.tag = tag;
    o.first_rank = first_rank;
    return o;
}

// A group whose ranks have the same sequences, partitioned, and one pool apart that has them whole.
class Spread {
  public:
    using Change = std::function<void(ta_group_options&)>;
    // A step of a rank, or of the whole: kWhole.
    static constexpr uint32_t kWhole = UINT32_MAX;
    using Run = std::function<Given(uint32_t rank, const Calls& calls)>;

    explicit Spread(
        uint32_t n, uint32_t bits = 4, const Change& change = [](auto&) {})
        : Spread(n, pool_shape(bits), change) {}
    explicit Spread(
        uint32_t n, const ta_kv_pool_options& pool, const Change& change = [](auto&) {})
        : Spread(cpus(n), make_context(1), pool, change, [](uint32_t, const Calls& c) { return try_step(c); }) {}
    Spread(std::vector<Context> contexts, Context of_whole, const ta_kv_pool_options& pool, const Change& change, Run run)
        : ranks(make_ranks(std::move(contexts), pool, change)), context_(std::move(of_whole)), run_(std::move(run)) {
        whole = make_pool(context_, pool);
        whole_plan = make_plan(whole);
    }

    // The sequence of each rank, and the whole one.
    size_t add(ta_partition_options options) {
        std::vector<ta_seq> at;
        ta_error err;
        for (const Rank& r : ranks) {
            at.push_back(make_sequence(r.pool));
            require(ta_seq_partition(r.group.get(), r.pool.get(), at.back(), &options, &err), err);
        }
        seqs.push_back(at);
        whole_seqs.push_back(make_sequence(whole));
        return seqs.size() - 1;
    }

    Given step(uint32_t rank, const std::vector<size_t>& members, const Asked& asked) const {
        return run_(rank, {ranks[rank].plan, at(members, rank), asked, of_layers});
    }
    // The same step, or a step of its own, at each rank at once.
    std::vector<Given> steps(const std::vector<size_t>& members, const std::function<Asked(uint32_t)>& asked) {
        std::vector<Given> given(ranks.size());
        std::vector<std::thread> threads;
        for (uint32_t r = 0; r < ranks.size(); ++r) {
            threads.emplace_back([&, r] { given[r] = step(r, members, asked(r)); });
        }
        for (std::thread& t : threads) t.join();
        return given;
    }
    std::vector<Given> steps(const std::vector<size_t>& members, const Asked& asked) {
        return steps(members, [&](uint32_t) { return asked; });
    }
    Given whole_step(const std::vector<size_t>& members, const Asked& asked) const {
        std::vector<ta_seq> all;
        for (const size_t m : members) all.push_back(whole_seqs[m]);
        return whole_step_of(all, asked);
    }
    Given whole_step_of(const std::vector<ta_seq>& all, const Asked& asked) const {
        return run_(kWhole, {whole_plan, all, asked, of_layers});
    }

    // Every rank has the whole's results to rounding, and all have the same bits.
    void expect_step(const std::vector<size_t>& members, const Asked& asked) {
        const Given expected = whole_step(members, asked);
        const std::vector<Given> given = steps(members, asked);
        ASSERT_EQ(expected.status, TA_OK) << expected.text;
        for (const Given& g : given) {
            ASSERT_EQ(g.status, TA_OK) << g.text;
            EXPECT_LT(largest_difference(g.out, expected.out), tolerance);
            EXPECT_LT(largest_difference(g.lse, expected.lse), tolerance);
            EXPECT_TRUE(same_bits(g.out, given[0].out) && same_bits(g.lse, given[0].lse));
        }
    }

    std::vector<ta_seq> at(const std::vector<size_t>& members, uint32_t rank) const {
        std::vector<ta_seq> all;
        for (const size_t m : members) all.push_back(seqs[m][rank]);
        return all;
    }

    double tolerance = 1e-4;
    std::vector<LayerOf> of_layers = kAlike;  // of the pools, where they differ
    std::vector<Rank> ranks;
    KvPool whole;
    Plan whole_plan;
    std::vector<std::vector<ta_seq>> seqs;  // [sequence][rank]
    std::vector<ta_seq> whole_seqs;

  private:
    static std::vector<Context> cpus(uint32_t n) {
        std::vector<Context> all;
        for (uint32_t i = 0; i < n; ++i) all.push_back(make_context(1));
        return all;
    }

    Context context_;
    Run run_;
};

}  // namespace ta::testing::spread
