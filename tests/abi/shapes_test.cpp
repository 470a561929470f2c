// Shapes that blocks do not have themselves: other numbers of channels, V of another one than K, many query heads for each kv head,
// and more queries than keys.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "support/exact_attention.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

struct Dims {
    uint32_t k, v;
};

// Rows of `from` channels as rows of `to`, by hand: halves at the beginnings of halves.
std::vector<float> spread(const std::vector<float>& x, size_t from, size_t to) {
    std::vector<float> wide(x.size() / from * to);
    for (size_t row = 0; row < x.size() / from; ++row) {
        for (size_t c = 0; c < from; ++c) wide[row * to + (c < from / 2 ? c : to / 2 + c - from / 2)] = x[row * from + c];
    }
    return wide;
}
std::vector<float> gather(const std::vector<float>& x, size_t from, size_t to) {
    std::vector<float> narrow(x.size() / from * to);
    for (size_t row = 0; row < narrow.size() / to; ++row) {
        for (size_t c = 0; c < to; ++c) narrow[row * to + c] = x[row * from + (c < to / 2 ? c : from / 2 + c - to / 2)];
    }
    return narrow;
}

class Channels : public ::testing::TestWithParam<Dims> {
  protected:
    static constexpr uint32_t kLayers = 2, kHeads = 2, kQHeads = 6;
    static constexpr float kScale = 0.11f;

    const uint32_t k = GetParam().k, v = GetParam().v;
    Random random{k * 1000 + v};
};

// The results equal, to the bit, those of a pool with the blocks' own channels for rows that were spread by hand.
TEST_P(Channels, AreThoseOfSpreadRows) {
    for (const uint32_t bits : {8u, 4u, 2u}) {
        for (const ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
            auto numerics = sized<ta_numerics>();
            numerics.profile = profile;
            const std::vector<float> offset = random.normals(int64_t(kLayers * kHeads * k), 0.2f);
            numerics.k_offset = offset.data();
            auto options = pool_options(kLayers, kHeads, k, bits, &numerics);
            options.v_head_dim = v;
            auto tiers = sized<ta_tier_options>();
            tiers.host_bytes = 8 << 20;
            options.tiers = &tiers;
            const Context context = make_context(2);
            const KvPool pool = make_pool(context, options);
            auto d = sized<ta_kv_pool_description>();
            ASSERT_EQ(ta_kv_pool_describe(pool.get(), &d, nullptr), TA_OK);
            ASSERT_EQ(d.head_dim, k);
            ASSERT_EQ(d.v_head_dim, v);
            ASSERT_TRUE(std::equal(offset.begin(), offset.end(), d.numerics->k_offset));
            const uint32_t w = d.block_head_dim;
            const std::vector<float> wide_offset = spread(offset, k, w);
            numerics.k_offset = wide_offset.data();
            auto wide_options = pool_options(kLayers, kHeads, w, bits, &numerics);
            const KvPool wide_pool = make_pool(context, wide_options);
            auto wide_d = sized<ta_kv_pool_description>();
            ASSERT_EQ(ta_kv_pool_describe(wide_pool.get(), &wide_d, nullptr), TA_OK);
            EXPECT_EQ(d.fingerprint == wide_d.fingerprint, k == w && v == w);
            EXPECT_EQ(d.token_block_bytes, wide_d.token_block_bytes);

            const Plan plan = make_plan(pool), wide_plan = make_plan(wide_pool);
            const ta_seq seq = make_sequence(pool), wide_seq = make_sequence(wide_pool);
            auto attend_options = sized<ta_attend_options>();
            attend_options.scale = kScale;
            for (const int32_t n : {1, 70, 3, 64, 130}) {
                begin(plan, {seq}, {n});
                begin(wide_plan, {wide_seq}, {n});
                for (uint32_t layer = 0; layer < kLayers; ++layer) {
                    const std::vector<float> ks = random.normals(int64_t(n) * kHeads * k),
                                             vs = random.normals(int64_t(n) * kHeads * v),
                                             qs = random.normals(int64_t(n) * kQHeads * k);
                    Tensor tk(ks, n, kHeads, k), tv(vs, n, kHeads, v), tq(qs, n, kQHeads, k), out(n, kQHeads, v);
                    Tensor wk(spread(ks, k, w), n, kHeads, w), wv(spread(vs, v, w), n, kHeads, w),
                        wq(spread(qs, k, w), n, kQHeads, w), wide_out(n, kQHeads, w);
                    std::vector<float> lse(size_t(n) * kQHeads), wide_lse(lse.size());
                    append(plan, layer, tk, tv);
                    append(wide_plan, layer, wk, wv);
                    attend(plan, layer, tq, out, lse.data(), &attend_options);
                    attend(wide_plan, layer, wq, wide_out, wide_lse.data(), &attend_options);
                    ASSERT_TRUE(same_bits(out.values(), gather(wide_out.values(), w, v)))
                        << bits << " bits, " << n << " tokens";
                    ASSERT_TRUE(same_bits(lse, wide_lse));
                }
                end(plan);
                end(wide_plan);
            }
            ASSERT_EQ(move_now(pool, seq, 0, 2, TA_TIER_HOST).state, TA_MOVE_DONE);
            const int64_t n = length(pool, seq);
            std::vector<float> ks(size_t(n * kHeads * k)), vs(size_t(n * kHeads * v));
            ASSERT_EQ(ta_x_seq_dequantize(pool.get(), seq, 1, 0, n, ks.data(), vs.data(), nullptr), TA_OK);
            const Stored wide = dequantize(wide_pool, wide_seq, 1, 0, n, int64_t(kHeads) * w);
            ASSERT_TRUE(same_bits(ks, gather(wide.k, w, k)));
            ASSERT_TRUE(same_bits(vs, gather(wide.v, w, v)));
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Dims, Channels,
                         ::testing::Values(Dims{16, 16}, Dims{40, 40}, Dims{64, 64}, Dims{72, 72}, Dims{80, 80}, Dims{112, 112},
                                           Dims{120, 64}, Dims{64, 128}, Dims{192, 128}, Dims{248, 16}, Dims{256, 256}),
                         [](const auto& p) { return std::to_string(p.param.k) + "x" + std::to_string(p.param.v); });

TEST(ChannelsOfCallers, AreNamedByTheirOwnNumbers) {
    const Context context = make_context(1);
    const KvPool pool = make_pool(context, pool_options(1, 1, 80));
    const Plan plan = make_plan(pool);
    begin(plan, {make_sequence(pool)}, {2});
    std::vector<float> bad(160, 1.0f);
    bad[80 + 71] = NAN;
    Tensor k(bad, 2, 1, 80), v(std::vector<float>(160, 1.0f), 2, 1, 80);
    ta_error err;
    EXPECT_EQ(ta_append(plan.get(), 0, k.view(), v.view(), &err), TA_E_NONFINITE);
    EXPECT_NE(std::strstr(err.message, "[1, 0, 71]"), nullptr) << err.message;
    for (const uint32_t d : {8u, 12u, 60u, 100u, 257u, 264u}) {
        ta_kv_pool* none = nullptr;
        auto options = pool_options(1, 1, d);
        EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_UNSUPPORTED) << d;
        options = pool_options(1, 1, 64);
        options.v_head_dim = d;
        EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_UNSUPPORTED) << d;
    }
}

class Exact : public ::testing::Test {
  protected:
    // One layer at 8 bits; what attention gives, against float64. `n_query` of the last step alone.
    void check(uint32_t kv_heads, uint32_t group, int32_t n_keys, int32_t n_query, ta_mask mask) {
        constexpr uint32_t kDim = 64;
        const KvPool pool = make_pool(context, pool_options(1, kv_heads, kDim, 8));
        const Plan plan = make_plan(pool);
        const ta_seq seq = make_sequence(pool);
        const std::vector<float> ks = random.normals(int64_t(n_keys) * kv_heads * kDim),
                                 vs = random.normals(int64_t(n_keys) * kv_heads * kDim),
                                 qs = random.normals(int64_t(n_query) * kv_heads * group * kDim);
        Tensor k(ks, n_keys, kv_heads, kDim), v(vs, n_keys, kv_heads, kDim), q(qs, n_query, kv_heads * group, kDim),
            out(n_query, kv_heads * group, kDim);
        begin(plan, {seq}, {n_keys}, {0});
        append(plan, 0, k, v);
        end(plan);
        begin(plan, {seq}, {0}, {n_query});
        auto options = sized<ta_attend_options>();
        options.mask = mask;
        std::vector<float> lse(size_t(n_query) * kv_heads * group);
        attend(plan, 0, q, out, lse.data(), &options);
        end(plan);
        AttentionRules rules;
        rules.causal = mask == TA_MASK_CAUSAL;
        const Attention exact =
            exact_attention({n_query, n_keys, kv_heads * group, kv_heads, kDim}, rules, qs.data(), ks.data(), vs.data());
        EXPECT_LT(relative_l2(out.values(), exact.out), 0.02)
            << group << " heads a group, " << n_query << " queries, " << n_keys << " keys";
        for (size_t i = 0; i < lse.size(); ++i) {
            if (std::isinf(exact.lse[i])) {
                ASSERT_EQ(lse[i], -INFINITY);
            } else {
                ASSERT_NEAR(lse[i], exact.lse[i], 0.05);
            }
        }
    }

    const Context context = make_context(2);
    Random random{5};
};

TEST_F(Exact, ManyQueryHeadsForEachKvHead) {
    for (const uint32_t group : {16u, 17u, 32u, 64u, 71u, 128u}) {
        for (const auto& [keys, queries] : {std::pair{1, 1}, {200, 1}, {200, 3}, {130, 65}, {700, 2}})
            check(group > 64 ? 1 : 2, group, keys, queries, TA_MASK_CAUSAL);
    }
    const KvPool pool = make_pool(context, pool_options(1, 1, 64));
    const Plan plan = make_plan(pool);
    begin(plan, {make_sequence(pool)}, {1});
    Tensor k(1, 1, 64), q(1, 129, 64), out(1, 129, 64);
    k.set(0, 0, 0, 1.0f);
    append(plan, 0, k, k);
    EXPECT_EQ(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, nullptr), TA_E_SHAPE);
}

TEST_F(Exact, MoreQueriesThanKeys) {
    for (const auto& [keys, queries] : {std::pair{3, 10}, {1, 64}, {63, 65}, {64, 200}, {65, 70}, {130, 131}}) {
        for (const ta_mask mask : {TA_MASK_FULL, TA_MASK_CAUSAL}) check(2, 2, keys, queries, mask);
    }
}

}  // namespace
}  // namespace ta::testing
