// ta_kv_pool_describe: what it says of a pool makes the same pool again.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "support/files.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 3, kDim = 64;
constexpr int64_t kRow = kHeads * kDim;

ta_kv_pool_description describe(const KvPool& pool) {
    auto d = sized<ta_kv_pool_description>();
    ta_error err;
    require(ta_kv_pool_describe(pool.get(), &d, &err), err);
    return d;
}

// Options that say what a description does.
ta_kv_pool_options options_of(const ta_kv_pool_description& d) {
    auto o = sized<ta_kv_pool_options>();
    o.layers = d.layers;
    o.kv_heads = d.kv_heads;
    o.head_dim = d.head_dim;
    o.k_bits = d.k_bits;
    o.v_bits = d.v_bits;
    o.budget_bytes = d.budget_bytes;
    o.max_sequences = d.max_sequences;
    o.numerics = d.numerics;
    o.tiers = d.tiers;
    return o;
}

// The stored bytes and the results of a step: every setting has a part in them.
std::vector<float> behaviour(const KvPool& pool) {
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    Random random(3);
    std::vector<float> seen;
    for (const int64_t n : {130, 1, 62}) {
        Tensor k(random.normals(n * kRow), n, kHeads, kDim), out(n, kHeads, kDim);
        begin(plan, {seq}, {int32_t(n)});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            append(plan, layer, k, k);
            attend(plan, layer, k, out);
            const std::vector<float> values = out.values();
            seen.insert(seen.end(), values.begin(), values.end());
        }
        end(plan);
    }
    const Stored stored = dequantize(pool, seq, 1, 0, length(pool, seq), kRow);
    seen.insert(seen.end(), stored.k.begin(), stored.k.end());
    seen.insert(seen.end(), stored.v.begin(), stored.v.end());
    ta_error err;
    require(ta_seq_release(pool.get(), seq, &err), err);
    return seen;
}

void expect_same_numerics(const ta_numerics& a, const ta_numerics& b) {
    ta_numerics x = a, y = b;
    x.k_offset = y.k_offset = nullptr;
    EXPECT_EQ(std::memcmp(&x, &y, sizeof x), 0);
    ASSERT_EQ(a.k_offset == nullptr, b.k_offset == nullptr);
    if (a.k_offset) {
        EXPECT_TRUE(std::equal(a.k_offset, a.k_offset + kLayers * kRow, b.k_offset));
    }
}

TEST(Describe, ADescriptionMakesTheSamePool) {
    const Context context = make_context(1);
    const std::vector<float> offset(size_t(kLayers * kRow), 0.25f);
    const uint8_t map[] = {4, 2, 4, 2, 2, 4};
    const std::vector<std::function<void(ta_numerics&, ta_kv_pool_options&)>> changes = {
        [](auto&, auto&) {},
        [](auto& n, auto&) { n.profile = TA_PROFILE_PAPER; },
        [](auto& n, auto&) { n.k_granularity = TA_GRANULARITY_TOKEN; },
        [](auto& n, auto&) { n.v_granularity = TA_GRANULARITY_PAGE; },
        [](auto& n, auto&) { n.open_scale = TA_OPEN_SCALE_UNIVERSAL; },
        [](auto& n, auto&) { n.v_exponents = n.fractional_zero = TA_OFF; },
        [](auto& n, auto&) { n.v_search = n.hadamard = TA_OFF; },
        [](auto& n, auto&) { n.k_turning = n.k_search = TA_OFF; },
        [](auto& n, auto&) { n.unit_slope = TA_OFF; },
        [](auto& n, auto&) { n.q_bits = 8; },
        [](auto& n, auto&) { n.batch_invariant = TA_ON; },
        [](auto& n, auto&) { n.batch_invariant = TA_ON, n.profile = TA_PROFILE_PAPER; },
        [](auto& n, auto&) { n.profile = TA_PROFILE_PAPER, n.k_turning = TA_ON; },
        [](auto& n, auto&) { n.sink_blocks = -1; },
        [](auto& n, auto&) { n.sink_blocks = 2; },
        [](auto& n, auto&) { n.exp = TA_EXP_SAS, n.p = TA_P_U8_RUNNING; },
        [](auto& n, auto&) { n.nonfinite = TA_NONFINITE_SATURATE, n.hadamard_seed = 5; },
        [&](auto& n, auto&) { n.k_offset = offset.data(); },
        [](auto&, auto& o) { o.bits = 8; },
        [](auto&, auto& o) { o.bits = 2, o.max_sequences = 7; },
        [&](auto&, auto& o) { o.k_bits = map, o.v_bits = map; },
    };
    for (size_t i = 0; i < changes.size(); ++i) {
        SCOPED_TRACE(i);
        auto numerics = sized<ta_numerics>();
        auto options = pool_options(kLayers, kHeads, kDim, 4, &numerics);
        changes[i](numerics, options);
        const KvPool pool = make_pool(context, options);
        const ta_kv_pool_description d = describe(pool);
        EXPECT_EQ(d.device, TA_DEVICE_CPU);
        EXPECT_EQ(d.bits, options.k_bits ? 0u : options.bits);
        EXPECT_EQ(d.tiers, nullptr);
        EXPECT_EQ(d.token_block_bytes, stats(pool).token_block_bytes);
        EXPECT_EQ(d.channel_block_bytes, stats(pool).channel_block_bytes);
        EXPECT_NE(d.numerics->open_scale, TA_OPEN_SCALE_DEFAULT);
        EXPECT_NE(d.numerics->hadamard, TA_DEFAULT);
        EXPECT_NE(d.numerics->k_turning, TA_DEFAULT);
        EXPECT_NE(d.numerics->sink_blocks, 0);
        const KvPool again = make_pool(context, options_of(d));
        const ta_kv_pool_description e = describe(again);
        EXPECT_EQ(d.fingerprint, e.fingerprint);
        EXPECT_EQ(d.max_sequences, e.max_sequences);
        EXPECT_TRUE(std::equal(d.k_bits, d.k_bits + kLayers * kHeads, e.k_bits));
        expect_same_numerics(*d.numerics, *e.numerics);
        EXPECT_TRUE(behaviour(pool) == behaviour(again));
    }
}

TEST(Describe, TheEmbeddingIsAsGiven) {
    const Context context = make_context(1);
    auto options = pool_options(kLayers, kHeads, kDim);
    EXPECT_EQ(describe(make_pool(context, options)).rotary, nullptr);
    for (const uint32_t layers : {1u, kLayers}) {
        std::vector<double> angles{0.1, -1024.0, 1.0 / 3.0, 0.0};
        const std::vector<double> given = angles;
        auto rotary = sized<ta_rotary>();
        rotary.pairs = TA_ROTARY_ADJACENT;
        rotary.channels = 8 / layers;
        rotary.layers = layers;
        rotary.angles = angles.data();
        options.rotary = &rotary;
        const KvPool pool = make_pool(context, options);
        angles.assign(4, 7.0);
        const ta_rotary& is = *describe(pool).rotary;
        EXPECT_EQ(is.pairs, TA_ROTARY_ADJACENT);
        EXPECT_EQ(is.channels, rotary.channels);
        EXPECT_EQ(is.layers, layers);
        EXPECT_TRUE(std::equal(given.begin(), given.end(), is.angles));
    }
}

TEST(Describe, TiersAreThoseInEffect) {
    const Context context = make_context(1);
    const std::filesystem::path before = std::filesystem::current_path(),
                                folder = std::filesystem::temp_directory_path() / ("ta-describe-" + std::to_string(getpid()));
    std::filesystem::create_directory(folder);
    std::filesystem::current_path(folder);
    auto tuning = sized<ta_x_tier_tuning>();
    tuning.attention_half_life = 9;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 4 << 20;
    tiers.disk_bytes = 4 << 20;
    tiers.disk_folder = "./.";
    tiers.high_percent = 80;
    tiers.eviction = TA_EVICT_ATTENTION;
    tiers.falling_precision = TA_ON;
    tiers.tuning = &tuning;
    auto options = pool_options(kLayers, kHeads, kDim, 8);
    options.budget_bytes = 8 << 20;
    options.tiers = &tiers;
    const KvPool pool = make_pool(context, options);
    std::filesystem::current_path(before);
    const ta_kv_pool_description d = describe(pool);
    ASSERT_NE(d.tiers, nullptr);
    EXPECT_EQ(d.bits, 8u);
    EXPECT_TRUE(std::all_of(d.k_bits, d.k_bits + kLayers * kHeads, [](uint8_t b) { return b == 8; }));
    EXPECT_GT(d.channel_block_bytes, 0u);
    EXPECT_GT(d.low_block_bytes, 0u);
    EXPECT_EQ(d.tiers->host_bytes, tier_stats(pool, TA_TIER_HOST).bytes_budget);
    EXPECT_EQ(d.tiers->disk_bytes, tier_stats(pool, TA_TIER_DISK).bytes_budget);
    EXPECT_TRUE(std::filesystem::path(d.tiers->disk_folder).is_absolute()) << d.tiers->disk_folder;
    EXPECT_TRUE(std::filesystem::equivalent(d.tiers->disk_folder, folder)) << d.tiers->disk_folder;
    EXPECT_EQ(d.tiers->disk_path, nullptr);
    EXPECT_EQ(d.tiers->high_percent, 80);
    EXPECT_EQ(d.tiers->low_percent, 76);
    EXPECT_EQ(d.tiers->eviction, TA_EVICT_ATTENTION);
    EXPECT_EQ(d.tiers->begin_wait_ms, 0);
    EXPECT_EQ(d.tiers->drop_coldest, TA_OFF);
    EXPECT_EQ(d.tiers->falling_precision, TA_ON);
    EXPECT_EQ(d.tiers->tuning->attention_half_life, 9);
    EXPECT_EQ(d.tiers->tuning->attention_layers, 1);
    EXPECT_EQ(d.tiers->tuning->staging_bytes, options.budget_bytes / 8);
    const KvPool again = make_pool(context, options_of(d));
    const ta_kv_pool_description e = describe(again);
    EXPECT_EQ(d.fingerprint, e.fingerprint);
    EXPECT_EQ(d.tiers->host_bytes, e.tiers->host_bytes);
    EXPECT_STREQ(d.tiers->disk_folder, e.tiers->disk_folder);
    std::filesystem::remove(folder);
}

// Blocks lie in the memory that their tier has, and take their bytes along.
TEST(Describe, BlocksAreFoundInTheMemoryOfTheirTier) {
    const Context context = make_context(1);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = 4 << 20;
    const Folder folder;
    tiers.disk_folder = folder.path().c_str();
    auto options = pool_options(kLayers, kHeads, kDim, 4);
    options.budget_bytes = 8 << 20;
    options.tiers = &tiers;
    const KvPool pool = make_pool(context, options);
    const ta_seq seq = make_sequence(pool);
    const Plan plan = make_plan(pool);
    Random random(3);
    Tensor k(random.normals(300 * kRow), 300, kHeads, kDim);
    begin(plan, {seq}, {300}, {0});
    for (uint32_t layer = 0; layer < kLayers; ++layer) append(plan, layer, k, k);
    end(plan);
    const auto locate = [&] {
        const void* at[5];
        ta_error err;
        require(ta_seq_locate_blocks(pool.get(), seq, 0, 5, at, &err), err);
        return std::vector<const void*>(at, at + 5);
    };
    ta_error err;
    auto host = sized<ta_memory_range>();
    require(ta_kv_pool_get_memory(pool.get(), TA_TIER_HOST, &host, &err), err);
    EXPECT_EQ(host.device_ordinal, -1);
    EXPECT_GE(host.bytes, 3u << 20);
    const auto in_host = [&](const void* at) {
        const auto p = uintptr_t(at), data = uintptr_t(host.data);
        return p >= data && p + stats(pool).channel_block_bytes <= data + host.bytes;
    };
    const std::vector<const void*> before = locate();
    EXPECT_TRUE(std::none_of(before.begin(), before.end(), in_host));
    std::vector<uint8_t> bytes(stats(pool).channel_block_bytes);
    std::memcpy(bytes.data(), before[2], bytes.size());
    move_now(pool, seq, 1, 2, TA_TIER_HOST);
    move_now(pool, seq, 3, 1, TA_TIER_DISK);
    const std::vector<const void*> after = locate();
    EXPECT_EQ(after[0], before[0]);
    EXPECT_TRUE(in_host(after[1]) && in_host(after[2]) && after[1] != after[2]);
    EXPECT_EQ(std::memcmp(after[2], bytes.data(), bytes.size()), 0);
    EXPECT_EQ(after[3], nullptr);
    EXPECT_EQ(after[4], before[4]);
    EXPECT_EQ(ta_kv_pool_get_memory(pool.get(), TA_TIER_DISK, &host, &err), TA_E_UNSUPPORTED);
}

// A named enum beside each typedef, for generators of bindings.
static_assert(TA_E_IO == ta_status_code(0x0601) && TA_TIER_DISK == ta_tier_code(2) &&
              TA_X_MOVE_ROUTE_KERNEL == ta_x_move_route_code(2));

}  // namespace
}  // namespace ta::testing
