// Calls on a pool with wrong values.
#include <algorithm>

#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

TEST_F(BadArguments, PoolCreateRefusesAndCreatesNothing) {
    const auto create = [&](auto change) {
        return [&, change](ta_error* err) {
            auto numerics = sized<ta_numerics>();
            auto options = pool_options(kLayers, kHeads, kDim, 0, &numerics);
            change(options, numerics);
            auto* out = untouched<ta_kv_pool>();
            const ta_status status = ta_kv_pool_create(context.get(), &options, &out, err);
            EXPECT_EQ(out, untouched<ta_kv_pool>());
            return status;
        };
    };
    using O = ta_kv_pool_options;
    using N = ta_numerics;
    static const uint8_t threes[] = {4, 4, 3, 4}, zeros[4] = {};
    static std::vector<float> nan_offset(kLayers * kRow, 0.0f), inf_offset = nan_offset, big_offset = nan_offset;
    static auto no_folder = sized<ta_tier_options>();
    no_folder.disk_bytes = 1 << 20;
    no_folder.disk_folder = "";
    static ta_layer_group groups[] = {sized<ta_layer_group>(), sized<ta_layer_group>()};
    for (ta_layer_group& g : groups) g.layers = 1;
    groups[1].first = 1;
    const auto grouped = [&](auto change) {
        return create([change](O& o, N&) {
            static ta_layer_group changed[2];
            std::copy_n(groups, 2, changed);
            o.layer_groups = changed;
            o.n_layer_groups = 2;
            change(o, changed[1]);
        });
    };
    using G = ta_layer_group;
    using R = ta_rotary;
    static const double fine_angles[4] = {}, nan_angles[] = {0, 0, kNan, 0}, large_angles[] = {0, 1024, 0, -1024.5};
    const auto rotary = [&](void (*change)(R&)) {
        return create([change](O& o, N&) {
            static R changed;
            changed = {sizeof changed, TA_ROTARY_HALVES, 4, kLayers, fine_angles};
            change(changed);
            o.rotary = &changed;
        });
    };
    nan_offset[7] = kNan;
    inf_offset.back() = -kInf;
    big_offset[0] = 0x1.8p56f;
    expect_failures({
        {"no context",
         [](ta_error* err) {
             auto options = pool_options(1, 1, 64);
             ta_kv_pool* out = nullptr;
             return ta_kv_pool_create(nullptr, &options, &out, err);
         },
         TA_E_INVALID, 0, "context is null"},
        {"no options",
         [&](ta_error* err) {
             ta_kv_pool* out = nullptr;
             return ta_kv_pool_create(context.get(), nullptr, &out, err);
         },
         TA_E_INVALID, 1, "options is null"},
        {"no out",
         [&](ta_error* err) {
             auto options = pool_options(1, 1, 64);
             return ta_kv_pool_create(context.get(), &options, nullptr, err);
         },
         TA_E_INVALID, 2, "out is null"},
        {"no layers", create([](O& o, N&) { o.layers = 0; }), TA_E_INVALID, 1, "options.layers is 0"},
        {"too many layers", create([](O& o, N&) { o.layers = 4097; }), TA_E_INVALID, 1, "layers is 4097"},
        {"wrapped layers", create([](O& o, N&) { o.layers = UINT32_MAX; }), TA_E_INVALID, 1, "layers is 4294967295"},
        {"no heads", create([](O& o, N&) { o.kv_heads = 0; }), TA_E_INVALID, 1, "options.kv_heads is 0"},
        {"too many heads", create([](O& o, N&) { o.kv_heads = 1025; }), TA_E_INVALID, 1, "kv_heads is 1025"},
        {"no head_dim", create([](O& o, N&) { o.head_dim = 0; }), TA_E_UNSUPPORTED, 1, "options.head_dim is 0"},
        {"odd head_dim", create([](O& o, N&) { o.head_dim = 84; }), TA_E_UNSUPPORTED, 1, "a multiple of 8 from 16 to 256"},
        {"odd v_head_dim", create([](O& o, N&) { o.v_head_dim = 4; }), TA_E_UNSUPPORTED, 1, "options.v_head_dim is 4"},
        {"wrapped head_dim", create([](O& o, N&) { o.head_dim = UINT32_MAX; }), TA_E_UNSUPPORTED, 1, "head_dim is 4294967295"},
        {"bits", create([](O& o, N&) { o.bits = 3; }), TA_E_INVALID, 1, "options.bits is 3"},
        {"16 bits", create([](O& o, N&) { o.bits = 16; }), TA_E_INVALID, 1, "bits is 16"},
        {"k_bits", create([](O& o, N&) { o.k_bits = threes; }), TA_E_INVALID, 1, "options.k_bits is 3"},
        {"v_bits", create([](O& o, N&) { o.v_bits = zeros; }), TA_E_INVALID, 1, "options.v_bits is 0"},
        {"no groups", grouped([](O& o, G&) { o.layer_groups = nullptr; }), TA_E_INVALID, 1, "options.layer_groups is null"},
        {"groups that are misaligned", grouped([](O& o, G&) { o.layer_groups = misaligned<ta_layer_group>(); }), TA_E_ALIGNMENT,
         1, "options.layer_groups[0] is not aligned"},
        {"an embedding of no pairs", rotary([](R& r) { r.channels = 0; }), TA_E_INVALID, 1, "options.rotary.channels is 0"},
        {"of odd channels", rotary([](R& r) { r.channels = 3; }), TA_E_INVALID, 1, "options.rotary.channels is 3"},
        {"of more channels than a head has", rotary([](R& r) { r.channels = 66; }), TA_E_INVALID, 1, "from 2 to 64"},
        {"of other pairs", rotary([](R& r) { r.pairs = 2; }), TA_E_INVALID, 1, "options.rotary.pairs is 2"},
        {"of negative pairs", rotary([](R& r) { r.pairs = -1; }), TA_E_INVALID, 1, "options.rotary.pairs is -1"},
        {"of no layers", rotary([](R& r) { r.layers = 0; }), TA_E_INVALID, 1, "options.rotary.layers is 0"},
        {"of more layers than the pool has", rotary([](R& r) { r.layers = 3; }), TA_E_INVALID, 1, "the pool has 2"},
        {"without angles", rotary([](R& r) { r.angles = nullptr; }), TA_E_INVALID, 1, "options.rotary.angles is null"},
        {"of misaligned angles",
         rotary([](R& r) { r.angles = reinterpret_cast<const double*>(reinterpret_cast<const char*>(r.angles) + 4); }),
         TA_E_ALIGNMENT, 1, "options.rotary.angles is not aligned"},
        {"of an angle that is none", rotary([](R& r) { r.angles = nan_angles; }), TA_E_INVALID, 1, "of layer 1, pair 0 is nan"},
        {"of a large angle", rotary([](R& r) { r.angles = large_angles; }), TA_E_INVALID, 1, "of layer 1, pair 1 is -1024.5"},
        {"more groups than layers", grouped([](O& o, G&) { o.n_layer_groups = 3; }), TA_E_INVALID, 1, "n_layer_groups is 3"},
        {"groups of other sizes", grouped([](O&, G& g) { g.struct_size += 8; }), TA_E_STRUCT, 1, "have one size"},
        {"a group without layers", grouped([](O&, G& g) { g.layers = 0; }), TA_E_INVALID, 1, "layer_groups[1] has 0 layers"},
        {"a group behind the layers", grouped([](O&, G& g) { g.first = 2; }), TA_E_INVALID, 1, "from 2 on; the pool has 2"},
        {"wrapped layers of a group", grouped([](O&, G& g) { g.layers = UINT32_MAX; }), TA_E_INVALID, 1,
         "has 4294967295 layers"},
        {"a layer in two groups", grouped([](O&, G& g) { g.first = 0; }), TA_E_INVALID, 1, "which is in one before"},
        {"a negative window", grouped([](O&, G& g) { g.window = -1; }), TA_E_INVALID, 1, "window is -1"},
        {"a window beyond all tokens", grouped([](O&, G& g) { g.window = (int64_t{1} << 40) + 1; }), TA_E_INVALID, 1,
         "0 to 2^40"},
        {"heads of a group", grouped([](O&, G& g) { g.kv_heads = UINT32_MAX; }), TA_E_INVALID, 1,
         "layer_groups[1].kv_heads is 4294967295"},
        {"head_dim of a group", grouped([](O&, G& g) { g.head_dim = 12; }), TA_E_UNSUPPORTED, 1,
         "layer_groups[1].head_dim is 12"},
        {"v_head_dim of a group", grouped([](O&, G& g) { g.v_head_dim = 257; }), TA_E_UNSUPPORTED, 1,
         "layer_groups[1].v_head_dim is 257"},
        {"windows and universal scales", grouped([](O& o, G& g) {
             static auto paper = sized<ta_numerics>();
             paper.profile = TA_PROFILE_PAPER;
             o.numerics = &paper;
             g.window = 5;
         }),
         TA_E_UNSUPPORTED, 1, "TA_OPEN_SCALE_UNIVERSAL"},
        {"no budget", create([](O& o, N&) { o.budget_bytes = 0; }), TA_E_INVALID, 1, "budget_bytes is 0"},
        {"tiers in a folder without a name", create([](O& o, N&) { o.tiers = &no_folder; }), TA_E_INVALID, 1,
         "options.tiers.disk_folder is empty"},
        {"budget below one block", create([](O& o, N&) { o.budget_bytes = 4096; }), TA_E_INVALID, 1,
         "a single block of this pool takes"},
        {"profile", create([](O&, N& n) { n.profile = 2; }), TA_E_INVALID, 1, "options.numerics.profile is 2"},
        {"negative profile", create([](O&, N& n) { n.profile = -1; }), TA_E_INVALID, 1, "numerics.profile is -1"},
        {"k_granularity", create([](O&, N& n) { n.k_granularity = TA_GRANULARITY_TENSOR; }), TA_E_INVALID, 1,
         "k_granularity is 3"},
        {"v_granularity", create([](O&, N& n) { n.v_granularity = TA_GRANULARITY_TENSOR; }), TA_E_INVALID, 1,
         "v_granularity is 3"},
        {"open_scale", create([](O&, N& n) { n.open_scale = 3; }), TA_E_INVALID, 1, "open_scale is 3"},
        {"v_exponents", create([](O&, N& n) { n.v_exponents = 3; }), TA_E_INVALID, 1, "v_exponents is 3"},
        {"k_turning", create([](O&, N& n) { n.k_turning = 3; }), TA_E_INVALID, 1, "k_turning is 3"},
        {"fractional_zero", create([](O&, N& n) { n.fractional_zero = -1; }), TA_E_INVALID, 1, "fractional_zero is -1"},
        {"v_search", create([](O&, N& n) { n.v_search = 17; }), TA_E_INVALID, 1, "v_search is 17"},
        {"k_search", create([](O&, N& n) { n.k_search = 3; }), TA_E_INVALID, 1, "k_search is 3"},
        {"unit_slope", create([](O&, N& n) { n.unit_slope = -1; }), TA_E_INVALID, 1, "unit_slope is -1"},
        {"q_bits", create([](O&, N& n) { n.q_bits = 11; }), TA_E_INVALID, 1, "q_bits is 11; it takes 0, 8 or 15"},
        {"batch_invariant", create([](O&, N& n) { n.batch_invariant = 3; }), TA_E_INVALID, 1, "batch_invariant is 3"},
        {"batch_invariant with scales of pages",
         create([](O&, N& n) { n.batch_invariant = TA_ON, n.k_granularity = TA_GRANULARITY_PAGE; }), TA_E_INVALID, 1,
         "k_granularity is PAGE"},
        {"batch_invariant with V's scales of pages",
         create([](O&, N& n) { n.batch_invariant = TA_ON, n.v_granularity = TA_GRANULARITY_PAGE; }), TA_E_INVALID, 1,
         "v_granularity is PAGE"},
        {"batch_invariant with universal scales",
         create([](O&, N& n) { n.batch_invariant = TA_ON, n.open_scale = TA_OPEN_SCALE_UNIVERSAL; }), TA_E_INVALID, 1,
         "open_scale is UNIVERSAL"},
        {"batch_invariant with turning pairs", create([](O&, N& n) { n.batch_invariant = n.k_turning = TA_ON; }), TA_E_INVALID,
         1, "k_turning is on"},
        {"hadamard", create([](O&, N& n) { n.hadamard = 3; }), TA_E_INVALID, 1, "hadamard is 3"},
        {"hadamard at 96", create([](O& o, N& n) {
             o.head_dim = 96;
             n.hadamard = TA_ON;
         }),
         TA_E_UNSUPPORTED, 1, "not a power of two"},
        {"sink_blocks", create([](O&, N& n) { n.sink_blocks = -2; }), TA_E_INVALID, 1, "sink_blocks is -2"},
        {"exp", create([](O&, N& n) { n.exp = 4; }), TA_E_INVALID, 1, "options.numerics.exp is 4"},
        {"p", create([](O&, N& n) { n.p = 8; }), TA_E_INVALID, 1, "options.numerics.p is 8"},
        {"negative p", create([](O&, N& n) { n.p = -1; }), TA_E_INVALID, 1, "p is -1"},
        {"nonfinite", create([](O&, N& n) { n.nonfinite = 3; }), TA_E_INVALID, 1, "nonfinite is 3"},
        {"NaN offset", create([](O&, N& n) { n.k_offset = nan_offset.data(); }), TA_E_INVALID, 1,
         "options.numerics.k_offset[7]"},
        {"infinite offset", create([](O&, N& n) { n.k_offset = inf_offset.data(); }), TA_E_INVALID, 1, "k_offset[255]"},
        {"huge offset", create([](O&, N& n) { n.k_offset = big_offset.data(); }), TA_E_INVALID, 1, "k_offset[0]"},
        {"misaligned offset", create([](O&, N& n) {
             n.k_offset = reinterpret_cast<const float*>(reinterpret_cast<const char*>(nan_offset.data()) + 1);
         }),
         TA_E_ALIGNMENT, 1, "k_offset is not aligned"},
    });
    auto options = pool_options(kLayers, kHeads, kDim);
    EXPECT_EQ(stats(make_pool(context, options)).sequences, 0u);
}

TEST_F(BadArguments, PoolQueriesRefuseNull) {
    auto s = sized<ta_kv_pool_stats>();
    expect_failures({
        {"stats of null", [&](ta_error* err) { return ta_kv_pool_get_stats(nullptr, &s, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"no stats", [&](ta_error* err) { return ta_kv_pool_get_stats(pool.get(), nullptr, err); }, TA_E_INVALID, 1,
         "stats is null"},
        {"close of null", [](ta_error* err) { return ta_kv_pool_close(nullptr, err); }, TA_E_INVALID, 0, "pool is null"},
    });
    expect_success([&](ta_error* err) { return ta_kv_pool_get_stats(pool.get(), &s, err); });
}

}  // namespace
}  // namespace ta::testing
