// Partitioned sequences of models whose layers differ, or have fewer channels than blocks. For CPUs and GPUs.
#pragma once

#include "abi/uneven.h"
#include "support/spread.h"

namespace ta::testing::spread {

struct UnevenPool {
    std::vector<ta_layer_group> groups = uneven_groups();
    ta_kv_pool_options options = pool_options(kUnevenLayers, kUneven[0].kv_heads, kUneven[0].head_dim, 4);
    std::vector<LayerOf> of_layers;
    UnevenPool() {
        options.layer_groups = groups.data();
        options.n_layer_groups = uint32_t(groups.size());
        options.budget_bytes = uint64_t{64} << 20;
        for (const UnevenLayer& l : kUneven) of_layers.push_back({l.kv_heads, l.head_dim, l.v_head_dim});
    }
};

using Asking = std::function<Asked(int32_t n_new, int32_t n_query)>;

// A rank's outputs are those of the heads that it gets, and no others are written.
inline void expect_outputs(const std::function<Spread(const ta_kv_pool_options&)>& make, const Asking& asking) {
    for (const uint32_t d : {kDim, 48u}) {  // 48: blocks have 64 channels
        for (const ta_partition_output output : {TA_OUTPUT_HEADS, TA_OUTPUT_ONE}) {
            Spread s = make(pool_options(kLayers, kHeads, d));
            s.of_layers.assign(kLayers, {kHeads, d, d});
            const auto ranks = int64_t(s.ranks.size());
            auto options = partition_options(1);
            options.output = output;
            options.output_rank = output == TA_OUTPUT_ONE ? uint32_t(ranks - 1) : 0;
            const size_t a = s.add(options);
            for (const auto& [tokens, group] :
                 {std::pair(200, 5), {1, 5}, {3, 1}, {1, 1}, {70, 5}}) {  // 2 heads: not all get one
                Asked asked = asking(tokens, std::min(tokens, 2));
                asked.group = group;
                const int64_t heads = kHeads * asked.group;
                const Given expected = s.whole_step({a}, asked);
                const std::vector<Given> given = s.steps({a}, asked);
                for (int64_t r = 0; r < ranks; ++r) {
                    const Given& got = given[size_t(r)];
                    ASSERT_EQ(got.status, TA_OK) << got.text;
                    for (size_t i = 0; i < expected.lse.size(); ++i) {
                        const auto head = int64_t(i) % heads;
                        const bool is_mine = output == TA_OUTPUT_ONE
                                                 ? r == ranks - 1
                                                 : head >= heads * r / ranks && head < heads * (r + 1) / ranks;
                        ASSERT_EQ(std::isnan(got.lse[i]), !is_mine) << "rank " << r << " head " << head;
                        for (size_t c = i * d; c < (i + 1) * d; ++c) {
                            ASSERT_EQ(std::isnan(got.out[c]), !is_mine) << "rank " << r << " head " << head;
                            if (is_mine) {
                                ASSERT_NEAR(got.out[c], expected.out[c], s.tolerance);
                            }
                        }
                    }
                }
            }
        }
    }
}

// Queries at any positions, of which a rank may have all keys or none.
inline void expect_positions(Spread s, const Asking& asking) {
    const size_t a = s.add(partition_options(1)), b = s.add(partition_options(2, uint32_t(s.ranks.size()) - 1));
    s.expect_step({a, b}, asking(300, 1));
    const auto step = [&](std::vector<size_t> members, int32_t n_new, std::vector<int64_t> positions) {
        Asked asked = asking(n_new, int32_t(positions.size() / members.size()));
        asked.positions = std::move(positions);
        s.expect_step(members, asked);
    };
    step({a}, 0, {0, 63, 64, 299, 5, 6, 7, 130});
    step({b, a}, 70, {369, 0, 200, 201, 100, 64, 65, 300});
    step({a}, 1, {370});
    std::vector<int64_t> run;
    for (int64_t i = 0; i < 200; ++i) run.push_back(100 + i);
    step({b}, 0, run);
}

// `s` is of an UnevenPool. Steps and truncations are those of the whole, and so is what windows pass.
inline void expect_uneven_steps(Spread& s, const Asking& asking) {
    s.of_layers = UnevenPool().of_layers;
    const size_t a = s.add(partition_options(1)), b = s.add(partition_options(2, uint32_t(s.ranks.size()) - 1));
    Random random(7);
    int refused = 0, cut = 0, emptied = 0;
    for (int round = 0; round < 100; ++round) {
        const int64_t n = length(s.whole, s.whole_seqs[a]);
        if (round % 4 >= 2) {  // twice, as far as blocks that the first one leaves
            const int64_t to = random.chance(20) ? 0 : random.between(std::max<int64_t>(0, n / 64 - 2), n / 64) * 64;
            const ta_status expected = ta_seq_truncate(s.whole.get(), s.whole_seqs[a], to, nullptr);
            for (size_t r = 0; r < s.ranks.size(); ++r)
                EXPECT_EQ(ta_seq_truncate(s.ranks[r].pool.get(), s.seqs[a][r], to, nullptr), expected) << "rank " << r;
            (expected == TA_OK ? cut : refused) += to < n;
            emptied += to == 0 && n > 300;
            continue;
        }
        const auto more = [&] { return int32_t(random.chance(30) ? random.between(1, 3) : random.between(1, 250)); };
        const int32_t n_new = more(), n_query = std::min(n_new, more());
        const bool both = random.chance(50);
        s.expect_step(both ? std::vector{b, a} : std::vector{a}, asking(n_new, n_query));
        if (::testing::Test::HasFailure()) return;
    }
    EXPECT_GT(refused, 0);
    EXPECT_GT(cut, 0);
    EXPECT_GT(emptied, 0);
    s.expect_step({a}, asking(600, 1));
    // The last block that passed is one rank's.
    const int32_t n_new = 0;
    int32_t n_query = 1;
    const ta_seq whole = s.whole_seqs[a];
    while (ta_plan_begin(s.whole_plan.get(), 1, &whole, &n_new, &n_query, nullptr, nullptr) == TA_OK) {
        require(ta_plan_abort(s.whole_plan.get(), nullptr), {});
        ++n_query;
    }
    for (const Given& g : s.steps({a}, asking(n_new, n_query))) EXPECT_EQ(g.status, TA_E_STATE) << g.text;
    // Each rank has its share of the whole ones and of the passed ones, and the last one.
    uint64_t passed = 0;
    for (size_t r = 0; r < s.ranks.size(); ++r) {
        for (const size_t m : {a, b}) verify(s.ranks[r].pool, s.seqs[m][r]);
        passed += stats(s.ranks[r].pool).passed_blocks;
    }
    EXPECT_GT(passed, 0u);
    EXPECT_EQ(passed, stats(s.whole).passed_blocks);
}

}  // namespace ta::testing::spread
