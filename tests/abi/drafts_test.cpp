// Steps of which a part stays: what is left of a sequence is what it would be had the other tokens never come. Token trees: each
// query sees its branch. Layers in any order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "abi/draft_steps.h"

namespace ta::testing {
namespace {

struct Kind {
    const char* name;
    uint32_t bits;
    void (*set)(ta_kv_pool_options&, ta_numerics&);
};
const uint8_t kMixed[] = {4, 2, 8, 4};
const Kind kKinds[] = {
    {"4 bits", 4, [](ta_kv_pool_options&, ta_numerics&) {}},
    {"2 bits", 2, [](ta_kv_pool_options&, ta_numerics&) {}},
    {"8 bits", 8, [](ta_kv_pool_options&, ta_numerics&) {}},
    {"mixed", 4, [](ta_kv_pool_options& o, ta_numerics&) { o.k_bits = o.v_bits = kMixed; }},
    {"no sinks, no turning", 4, [](ta_kv_pool_options&, ta_numerics& n) { n.sink_blocks = -1, n.k_turning = TA_OFF; }},
    {"two sinks", 4, [](ta_kv_pool_options&, ta_numerics& n) { n.sink_blocks = 2; }},
};

ta_step_options drafts(const std::vector<int32_t>* parent = nullptr) {
    auto o = sized<ta_step_options>();
    o.drafts = TA_ON;
    o.tree_parent = parent ? parent->data() : nullptr;
    return o;
}

class Drafts : public ::testing::Test {
  protected:
    static KvPool make(const Context& context, const DraftShape& s, const Kind& kind) {
        auto numerics = sized<ta_numerics>();
        auto options = pool_options(s.layers, s.kv_heads, s.head_dim, kind.bits, &numerics);
        kind.set(options, numerics);
        return make_pool(context, options);
    }
    DraftTokens tokens(int64_t n, int64_t position) {
        DraftTokens t;
        for (int64_t i = 0; i < n; ++i) t.push_back({next_seed_++, position + i});
        return t;
    }
    // In a step of its own.
    static DraftResult bring(const DraftShape& s, const KvPool& pool, ta_seq seq, const DraftTokens& t) {
        const Plan plan = make_plan(pool);
        DraftResult r = open_step(s, plan, {seq}, {t}, nullptr);
        end_step(plan);
        return r;
    }

    Context context_ = make_context(2);
    uint64_t next_seed_ = 1;
};

// Two sequences take drafts of which random ones stay, and two others get just those, in ordinary steps.
TEST_F(Drafts, ThatDoNotStayLeaveNoTrace) {
    const DraftShape s;
    Random random(7);
    for (const Kind& kind : kKinds) {
        SCOPED_TRACE(kind.name);
        const KvPool drafted = make(context_, s, kind), plain = make(context_, s, kind);
        const Plan plan = make_plan(drafted), plain_plan = make_plan(plain);
        for (const int64_t start : {0, 1, 63, 64, 65, 127, 128, 129}) {
            std::vector<ta_seq> a, b;
            for (int i = 0; i < 2; ++i) {
                a.push_back(make_sequence(drafted));
                b.push_back(make_sequence(plain));
                const DraftTokens first = tokens(start, 0);
                if (start == 0) continue;
                bring(s, drafted, a.back(), first);
                bring(s, plain, b.back(), first);
            }
            for (int round = 0; round < 6; ++round) {
                const bool trees = random.chance(50);
                std::vector<DraftTokens> news, stay;
                std::vector<int32_t> parents, keep;
                for (int i = 0; i < 2; ++i) {
                    const auto n = int32_t(random.chance(60) || trees ? random.between(1, 12) : random.between(1, 200));
                    const std::vector<int32_t> parent = random_tree(random, n, trees ? 60 : 100);
                    keep.push_back(int32_t(random.chance(20) ? 0 : random.chance(20) ? n : random.between(0, n)));
                    news.push_back(tokens(n, length(drafted, a[size_t(i)])));
                    stay.emplace_back();
                    for (const int32_t t : path_to(parent, keep.back() - 1)) {
                        // As it would come by itself: at its place in the sequence.
                        news.back()[size_t(t)].position = length(drafted, a[size_t(i)]) + int64_t(stay.back().size());
                        stay.back().push_back(news.back()[size_t(t)]);
                    }
                    parents.insert(parents.end(), parent.begin(), parent.end());
                }
                const ta_step_options how = drafts(trees ? &parents : nullptr);
                open_step(s, plan, a, news, &how);
                end_step(plan, keep.data());
                open_step(s, plain_plan, b, stay, nullptr);
                end_step(plain_plan);
                for (size_t i = 0; i < 2; ++i) {
                    ASSERT_TRUE(same_sequence(s, drafted, a[i], plain, b[i]))
                        << "begun with " << start << " tokens, round " << round << ", now " << length(plain, b[i]) << ", "
                        << keep[i] << " of " << news[i].size() << " kept" << (trees ? " of a tree" : "");
                }
            }
            ta_error err;
            for (size_t i = 0; i < 2; ++i) require(ta_seq_verify(drafted.get(), a[i], &err), err);
            for (size_t i = 0; i < 2; ++i) require(ta_seq_release(drafted.get(), a[i], &err), err);
        }
        EXPECT_EQ(stats(drafted).bytes_used, 0u);
    }
}

// Compares each tree query with attention in float64 over 8-bit values, within their error.
TEST_F(Drafts, QueriesOfATreeSeeTheirBranches) {
    Random random(3);
    for (const uint32_t group : {1u, 4u, 5u, 8u}) {
        const DraftShape s{1, 2, 64, group, false};
        const std::vector<float> slopes = random.normals(s.q_heads(), 0.05f);
        for (int round = 0; round < 12; ++round) {
            auto rules = sized<ta_attend_options>();
            rules.window = round % 3 == 1 ? 7 : round % 3 == 2 ? 70 : 0;
            rules.alibi_slopes = round % 2 ? slopes.data() : nullptr;
            rules.mask = round == 4 ? TA_MASK_FULL : TA_MASK_CAUSAL;
            std::vector<std::vector<float>> of_isas;
            const int64_t old = random.pick<int64_t>({0, 1, 40, 63, 64, 100, 250});
            std::vector<int32_t> parents;
            std::vector<DraftTokens> before, news;
            std::vector<std::vector<int32_t>> trees;
            for (int i = 0; i < 2; ++i) {
                trees.push_back(random_tree(random, int32_t(random.between(1, i ? 64 : 6)), 50));
                parents.insert(parents.end(), trees[size_t(i)].begin(), trees[size_t(i)].end());
                before.push_back(tokens(old + i, 0));
                news.push_back(tokens(int64_t(trees[size_t(i)].size()), old + i));
            }
            for (const ta_cpu_isa isa : available_isas()) {
                const Context context = make_context(1, isa);
                const KvPool pool = make(context, s, kKinds[2]);
                std::vector<ta_seq> seqs;
                for (int i = 0; i < 2; ++i) {
                    seqs.push_back(make_sequence(pool));
                    if (old + i > 0) bring(s, pool, seqs.back(), before[size_t(i)]);
                }
                const Plan plan = make_plan(pool);
                const ta_step_options how = drafts(&parents);
                const DraftResult r = open_step(s, plan, seqs, news, &how, &rules);
                of_isas.push_back(r.out[0]);
                of_isas.back().insert(of_isas.back().end(), r.lse[0].begin(), r.lse[0].end());
                ASSERT_TRUE(same_bits(of_isas.back(), of_isas.front()))
                    << "isa " << isa << ", group " << group << ", round " << round;
            }
            const float* row = of_isas.front().data();
            for (size_t i = 0; i < 2; ++i) {
                DraftTokens all = before[i];
                all.insert(all.end(), news[i].begin(), news[i].end());
                const std::vector<float> k = values_of(s, all, 0, 0), v = values_of(s, all, 0, 1),
                                         q = values_of(s, news[i], 0, 2);
                for (int32_t t = 0; t < int32_t(news[i].size()); ++t) {
                    std::vector<int64_t> seen(before[i].size());
                    std::iota(seen.begin(), seen.end(), 0);
                    for (const int32_t p : path_to(trees[i], t)) seen.push_back(int64_t(before[i].size()) + p);
                    for (uint32_t h = 0; h < s.q_heads(); ++h, row += s.head_dim) {
                        std::vector<double> x, exact(s.head_dim, 0.0);
                        double top = -1e30, sum = 0.0, error = 0.0, norm = 0.0;
                        // A token's place among those that are seen is its position: its branch is all that there is.
                        for (size_t j = 0; j < seen.size(); ++j) {
                            double dot = 0.0;
                            for (uint32_t c = 0; c < s.head_dim; ++c)
                                dot += double(q[(size_t(t) * s.q_heads() + h) * s.head_dim + c]) *
                                       double(k[(size_t(seen[j]) * s.kv_heads + h / group) * s.head_dim + c]);
                            const auto distance = double(seen.size() - 1 - j);
                            x.push_back(dot / 8.0 - (rules.alibi_slopes ? double(slopes[h]) * distance : 0.0));
                            if (rules.window > 0 && distance >= double(rules.window)) x.back() = -1e30;
                            top = std::max(top, x.back());
                        }
                        for (size_t j = 0; j < seen.size(); ++j) {
                            const double p = std::exp(x[j] - top);
                            sum += p;
                            for (uint32_t c = 0; c < s.head_dim; ++c)
                                exact[c] += p * double(v[(size_t(seen[j]) * s.kv_heads + h / group) * s.head_dim + c]);
                        }
                        for (uint32_t c = 0; c < s.head_dim; ++c) {
                            error += std::pow(row[c] - exact[c] / sum, 2);
                            norm += std::pow(exact[c] / sum, 2);
                        }
                        ASSERT_LT(std::sqrt(error), 0.05 * std::sqrt(norm))
                            << "group " << group << ", round " << round << ", sequence " << i << ", token " << t << ", head "
                            << h << ", old " << old;
                    }
                }
            }
        }
    }
}

TEST_F(Drafts, AChainThatIsGivenAsATreeIsAChain) {
    const DraftShape s;
    const KvPool pool = make(context_, s, kKinds[0]);
    for (const int32_t n : {1, 5, 64, 130}) {
        const ta_seq a = make_sequence(pool);
        bring(s, pool, a, tokens(100, 0));
        const ta_seq b = fork_sequence(pool, a);
        const DraftTokens news = tokens(n, 100);
        const std::vector<int32_t> parents = random_tree(*std::make_unique<Random>(1), n, 100);
        const Plan x = make_plan(pool), y = make_plan(pool);
        const ta_step_options as_tree = drafts(&parents), as_chain = drafts();
        const DraftResult r = open_step(s, x, {a}, {news}, &as_tree), expected = open_step(s, y, {b}, {news}, &as_chain);
        for (uint32_t layer = 0; layer < s.layers; ++layer) {
            EXPECT_TRUE(same_bits(r.out[layer], expected.out[layer]) && same_bits(r.lse[layer], expected.lse[layer]));
        }
        end_step(x);
        end_step(y);
        EXPECT_TRUE(same_sequence(s, pool, a, pool, b));
    }
}

// A fork's drafts do not touch what it shares, and an aborted step, or one that keeps nothing, gives all its blocks back.
TEST_F(Drafts, OfForksAndOfAbortedStepsGoEntirely) {
    const DraftShape s;
    const KvPool pool = make(context_, s, kKinds[0]), plain = make(context_, s, kKinds[0]);
    for (const int64_t old : {20, 64, 120}) {
        const DraftTokens first = tokens(old, 0), news = tokens(70, old);
        const ta_seq source = make_sequence(pool), copy = make_sequence(plain);
        bring(s, pool, source, first);
        bring(s, plain, copy, first);
        const ta_seq fork = fork_sequence(pool, source);
        const uint64_t blocks = stats(pool).bytes_used;
        const Plan plan = make_plan(pool);
        const ta_step_options how = drafts();
        const int32_t none = 0, some = 66;
        open_step(s, plan, {fork}, {news}, &how);
        ta_error err;
        require(ta_plan_abort(plan.get(), &err), err);
        EXPECT_EQ(stats(pool).bytes_used, blocks);
        open_step(s, plan, {fork}, {news}, &how);
        end_step(plan, &none);
        EXPECT_EQ(stats(pool).bytes_used, blocks);
        EXPECT_TRUE(same_sequence(s, pool, fork, plain, copy));
        open_step(s, plan, {fork}, {news}, &how);
        end_step(plan, &some);
        EXPECT_TRUE(same_sequence(s, pool, source, plain, copy));
        bring(s, plain, copy, DraftTokens(news.begin(), news.begin() + some));
        EXPECT_TRUE(same_sequence(s, pool, fork, plain, copy));
        // Blocks that a truncate reopens, too.
        for (const auto& [p, seq] : {std::pair(&pool, fork), std::pair(&plain, copy)})
            require(ta_seq_truncate(p->get(), seq, 70, &err), err);
        open_step(s, plan, {fork}, {news}, &how);
        end_step(plan, &some);
        bring(s, plain, copy, DraftTokens(news.begin(), news.begin() + some));
        EXPECT_TRUE(same_sequence(s, pool, fork, plain, copy));
    }
}

// Sink blocks, and one that is not filled, take a token slot alone.
TEST_F(Drafts, FitWhereTheirSlotsFit) {
    const DraftShape s;
    const Kind sinks{"four sinks", 4, [](ta_kv_pool_options& o, ta_numerics& n) {
                         static const uint64_t slot = stats(make_pool(make_context(), o)).token_block_bytes;
                         o.budget_bytes = 4 * slot;
                         n.sink_blocks = 4;
                     }};
    const KvPool pool = make(context_, s, sinks);
    const ta_seq seq = make_sequence(pool);
    const Plan plan = make_plan(pool);
    const ta_step_options how = drafts();
    open_step(s, plan, {seq}, {tokens(4 * 64 - 1, 0)}, &how);
    end_step(plan);
    EXPECT_EQ(length(pool, seq), 4 * 64 - 1);
}

TEST_F(Drafts, LayersMayBeAttendedToInAnyOrder) {
    const DraftShape s{3, 2, 64, 2};
    for (const Kind& kind : kKinds) {
        if (kind.name == std::string("mixed")) continue;
        const KvPool pool = make(context_, s, kind);
        const ta_seq seq = make_sequence(pool);
        bring(s, pool, seq, tokens(100, 0));
        const DraftTokens news = tokens(200, 100);
        for (const ta_switch in_order : {TA_OFF, TA_ON}) {
            auto how = sized<ta_step_options>();
            how.layers_in_order = in_order;
            const Plan plan = make_plan(pool);
            const DraftResult first = open_step(s, plan, {seq}, {news}, &how);
            for (const uint32_t layer : {0u, 2u, 1u, 0u}) {
                Tensor q(values_of(s, news, layer, 2), 200, s.q_heads(), s.head_dim), out(200, s.q_heads(), s.head_dim);
                if (in_order == TA_ON && layer != 2) {
                    ta_error err;
                    EXPECT_EQ(ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, nullptr, &err), TA_E_STATE);
                    continue;
                }
                attend(plan, layer, q, out);
                EXPECT_TRUE(same_bits(out.values(), first.out[layer])) << kind.name << ", layer " << layer;
            }
            ta_error err;
            require(ta_plan_abort(plan.get(), &err), err);
        }
    }
}

}  // namespace
}  // namespace ta::testing
