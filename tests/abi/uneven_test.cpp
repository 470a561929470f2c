// Layers of different shapes in one pool: each gives the bits of a pool of its shape alone, wherever blocks lie and through files.
#include "abi/uneven.h"

namespace ta::testing {
namespace {

using Twins = UnevenTwins<Tensor>;

struct Case {
    const char* name;
    bool all_8_bits, host, disk;
};
class Uneven : public ::testing::TestWithParam<Case> {
  protected:
    const Context context_ = make_context(2);
};

TEST_P(Uneven, EachLayerIsAsInAPoolOfItsShape) {
    const Case& c = GetParam();
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = c.host ? uint64_t{3} << 20 : 0;
    tiers.disk_bytes = c.disk ? uint64_t{32} << 20 : 0;
    const bool has_tiers = c.host || c.disk;
    Twins twins(context_, c.all_8_bits, has_tiers ? &tiers : nullptr, has_tiers ? uint64_t{4} << 20 : uint64_t{64} << 20);
    twins.walk(100, has_tiers ? std::optional(ta_tier(c.host ? TA_TIER_HOST : TA_TIER_DISK)) : std::nullopt);
    uint64_t passed = stats(twins.uneven.pool).passed_blocks;
    if (c.host) passed += tier_stats(twins.uneven.pool, TA_TIER_HOST).passed_blocks;
    if (c.disk) passed += tier_stats(twins.uneven.pool, TA_TIER_DISK).passed_blocks;
    EXPECT_GT(passed, 0u);
    EXPECT_GT(stats(twins.uneven.pool).reopened_blocks, 0u);
    EXPECT_GT(stats(twins.uneven.pool).copied_blocks, 0u);
}

TEST_P(Uneven, SizesAreThoseOfTheLayersTogether) {
    const Twins twins(context_, GetParam().all_8_bits);
    const ta_kv_pool_stats all = stats(twins.uneven.pool);
    uint64_t token = 0, channel = 0;
    double values = 0;
    for (uint32_t l = 0; l < kUnevenLayers; ++l) {
        const ta_kv_pool_stats one = stats(twins.alone[l].pool);
        token += one.token_block_bytes;
        channel += one.channel_block_bytes;
        values += kUneven[l].kv_heads * (kUneven[l].head_dim + kUneven[l].v_head_dim);
    }
    // Padding of each block's end is there once.
    EXPECT_NEAR(double(all.token_block_bytes), double(token), kUnevenLayers * 256.0);
    EXPECT_NEAR(double(all.channel_block_bytes), double(channel), kUnevenLayers * 256.0);
    EXPECT_NEAR(all.token_bits_per_element, 8.0 * double(all.token_block_bytes) / (64 * values), 1e-9);
    auto d = sized<ta_kv_pool_description>();
    ta_error err;
    require(ta_kv_pool_describe(twins.uneven.pool.get(), &d, &err), err);
    EXPECT_EQ(d.kv_heads, kUneven[0].kv_heads);
    ASSERT_EQ(d.n_layer_groups, kUnevenLayers - 1);
    EXPECT_EQ(d.layer_groups[0].head_dim, 128u);
    EXPECT_EQ(d.layer_groups[1].v_head_dim, 32u);
}

INSTANTIATE_TEST_SUITE_P(Pools, Uneven,
                         ::testing::Values(Case{"Device", false, false, false}, Case{"Device8", true, false, false},
                                           Case{"Host", false, true, false}, Case{"HostAndDisk", false, true, true},
                                           Case{"Disk8", true, false, true}),
                         [](const auto& i) { return i.param.name; });

class UnevenCalls : public ::testing::Test {
  protected:
    ta_status create(const ta_kv_pool_options& options) {
        ta_kv_pool* out = nullptr;
        const ta_status s = ta_kv_pool_create(context_.get(), &options, &out, &err_);
        EXPECT_EQ(out, nullptr);
        return s;
    }
    const Context context_ = make_context(1);
    ta_error err_{};
};

TEST_F(UnevenCalls, ShapesThatAreRefused) {
    auto options = pool_options(3, 2, 64);
    ta_layer_group group = sized<ta_layer_group>();
    options.layer_groups = &group;
    options.n_layer_groups = 1;
    group.first = group.layers = 1;
    const auto refused = [&](ta_status as, const char* text) {
        EXPECT_EQ(create(options), as);
        EXPECT_NE(std::string(err_.message).find(text), std::string::npos) << err_.message;
        EXPECT_EQ(err_.argument, 1);
    };
    group.kv_heads = 1025;
    refused(TA_E_INVALID, "layer_groups[0].kv_heads is 1025");
    group.kv_heads = 0;
    group.head_dim = 20;
    refused(TA_E_UNSUPPORTED, "layer_groups[0].head_dim is 20");
    group.head_dim = 0;
    group.v_head_dim = 264;
    refused(TA_E_UNSUPPORTED, "layer_groups[0].v_head_dim is 264");
    group.v_head_dim = 0;
    group.head_dim = 128;
    auto numerics = sized<ta_numerics>();
    numerics.open_scale = TA_OPEN_SCALE_UNIVERSAL;
    options.numerics = &numerics;
    refused(TA_E_UNSUPPORTED, "TA_OPEN_SCALE_UNIVERSAL");
    options.numerics = nullptr;
    auto tiers = sized<ta_tier_options>();
    tiers.falling_precision = TA_ON;
    tiers.host_bytes = 1 << 20;
    options.tiers = &tiers;
    refused(TA_E_UNSUPPORTED, "falling_precision");
    options.tiers = nullptr;
    numerics = sized<ta_numerics>();
    numerics.hadamard = TA_ON;
    options.numerics = &numerics;
    group.head_dim = 96;
    refused(TA_E_UNSUPPORTED, "head_dim 96 is not a power of two");
    EXPECT_EQ(err_.layer, 1);
    options.numerics = nullptr;
    std::vector<uint8_t> bits(7, 4);
    group.head_dim = 0;
    group.kv_heads = 3;
    bits[4] = 5;
    options.k_bits = bits.data();
    refused(TA_E_INVALID, "k_bits is 5");
    EXPECT_EQ(err_.layer, 1);
    EXPECT_EQ(err_.head, 2);
}

TEST_F(UnevenCalls, TensorsOfAnotherLayersShapeAreRefused) {
    Twins twins(context_, false);
    twins.add();
    begin(twins.uneven.plan, {twins.uneven.seqs[0]}, {2});
    Tensor kv(2, kUneven[0].kv_heads, kUneven[0].head_dim);
    EXPECT_EQ(ta_append(twins.uneven.plan.get(), 1, kv.view(), kv.view(), &err_), TA_E_SHAPE);
    EXPECT_EQ(err_.layer, 1);
    Tensor k(std::vector<float>(256), 2, 1, 128), q(std::vector<float>(2 * 3 * 128), 2, 3, 64), out(2, 3, 64);
    EXPECT_EQ(ta_append(twins.uneven.plan.get(), 1, k.view(), k.view(), &err_), TA_OK);
    EXPECT_EQ(ta_attend(twins.uneven.plan.get(), 1, q.view(), out.view(), nullptr, nullptr, &err_), TA_E_SHAPE);
    EXPECT_EQ(err_.layer, 1);
    EXPECT_EQ(ta_plan_abort(twins.uneven.plan.get(), &err_), TA_OK);
}

TEST_F(UnevenCalls, PoolsOfOtherShapesCannotExchangeBlocks) {
    auto options = pool_options(2, 2, 64);
    const KvPool plain = make_pool(context_, options);
    ta_layer_group group = sized<ta_layer_group>();
    options.layer_groups = &group;
    options.n_layer_groups = 1;
    group.layers = 1;
    group.kv_heads = 1;
    group.head_dim = 128;
    const KvPool uneven = make_pool(context_, options);
    group.kv_heads = 0;
    const KvPool wider = make_pool(context_, options);  // with as many heads
    auto a = sized<ta_kv_pool_description>(), b = a;
    ASSERT_EQ(ta_kv_pool_describe(plain.get(), &a, nullptr), TA_OK);
    ASSERT_EQ(ta_kv_pool_describe(uneven.get(), &b, nullptr), TA_OK);
    EXPECT_NE(a.fingerprint, b.fingerprint);
    ASSERT_EQ(ta_kv_pool_describe(wider.get(), &b, nullptr), TA_OK);
    EXPECT_NE(a.fingerprint, b.fingerprint);
    // A group that says what the pool has anyway changes nothing.
    group.kv_heads = 2;
    group.head_dim = 64;
    ASSERT_EQ(ta_kv_pool_describe(make_pool(context_, options).get(), &b, nullptr), TA_OK);
    EXPECT_EQ(a.fingerprint, b.fingerprint);
}

}  // namespace
}  // namespace ta::testing
