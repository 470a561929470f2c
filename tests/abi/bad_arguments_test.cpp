// Every call of the ABI with wrong values: the status, the argument it names, the text, and that nothing changes. Structs,
// tensors, groups, block stores, blocks of a sequence, calls without a pool and the order of calls have files of their own
// (bad_structs_, bad_tensors_, bad_groups_, bad_stores_, bad_blocks_, bad_stateless_, bad_order_test.cpp).
#include <algorithm>
#include <cmath>
#include <limits>

#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

class BadArguments : public WrongCalls {};

// --------------------------------------------------------------------------------------------------------------- context

TEST_F(BadArguments, ContextCreateRefusesAndCreatesNothing) {
    const auto create = [](auto change) {
        return [change](ta_error* err) {
            auto options = sized<ta_context_options>();
            options.threads = 1;
            change(options);
            auto* out = untouched<ta_context>();
            const ta_status status = ta_context_create(&options, &out, err);
            EXPECT_EQ(out, untouched<ta_context>());
            return status;
        };
    };
    static const auto allocate = [](size_t, size_t, void*) -> void* { return nullptr; };
    static ta_allocator lacks_free = sized<ta_allocator>(), lacks_allocate = sized<ta_allocator>(), no_size{};
    lacks_free.allocate = allocate;
    static ta_log_sink too_detailed = sized<ta_log_sink>(), negative = too_detailed;
    too_detailed.level = 5;
    negative.level = -7;
    lacks_allocate.deallocate = [](void*, size_t, size_t, void*) {};
    using Options = ta_context_options;
    expect_failures({
        {"no out", [](ta_error* err) { return ta_context_create(nullptr, nullptr, err); }, TA_E_INVALID, 1, "out is null"},
        {"device", create([](Options& o) { o.device = 2; }), TA_E_INVALID, 0, "device is 2"},
        {"negative device", create([](Options& o) { o.device = -1; }), TA_E_INVALID, 0, "device is -1"},
        {"ordinal of a CPU", create([](Options& o) { o.device_ordinal = 1; }), TA_E_INVALID, 0, "device_ordinal is 1"},
        {"negative ordinal", create([](Options& o) {
             o.device = TA_DEVICE_CUDA;
             o.device_ordinal = -1;
         }),
         TA_E_INVALID, 0, "device_ordinal is -1"},
        {"negative threads", create([](Options& o) { o.threads = -1; }), TA_E_INVALID, 0, "threads is -1"},
        {"too many threads", create([](Options& o) { o.threads = 1025; }), TA_E_INVALID, 0, "threads is 1025"},
        {"INT32_MIN threads", create([](Options& o) { o.threads = INT32_MIN; }), TA_E_INVALID, 0, "threads is -2147483648"},
        {"isa", create([](Options& o) { o.cpu_isa = 6; }), TA_E_INVALID, 0, "cpu_isa is 6"},
        {"negative isa", create([](Options& o) { o.cpu_isa = -1; }), TA_E_INVALID, 0, "cpu_isa is -1"},
        {"log level", create([](Options& o) { o.log = &too_detailed; }), TA_E_INVALID, 0, "log.level is 5"},
        {"negative log level", create([](Options& o) { o.log = &negative; }), TA_E_INVALID, 0, "log.level is -7"},
        {"allocator without free", create([](Options& o) { o.allocator = &lacks_free; }), TA_E_INVALID, 0, "deallocate"},
        {"allocator without allocate", create([](Options& o) { o.allocator = &lacks_allocate; }), TA_E_INVALID, 0, "allocate"},
        {"allocator without size", create([](Options& o) { o.allocator = &no_size; }), TA_E_STRUCT, 0,
         "allocator.struct_size is 0"},
    });
    const std::vector<ta_cpu_isa> isas = available_isas();
    for (ta_cpu_isa isa : {TA_CPU_ISA_SCALAR, TA_CPU_ISA_AVX2, TA_CPU_ISA_AVX_VNNI, TA_CPU_ISA_AVX512, TA_CPU_ISA_AMX}) {
        if (std::find(isas.begin(), isas.end(), isa) != isas.end()) continue;
        expect_failures(
            {{"isa that this CPU lacks", create([isa](Options& o) { o.cpu_isa = isa; }), TA_E_UNSUPPORTED, 0, "its best is"}});
    }
    EXPECT_EQ(info(make_context(3)).threads, 3);
}

TEST_F(BadArguments, ContextQueriesRefuseNull) {
    auto i = sized<ta_context_info>();
    expect_failures({
        {"info of null", [&](ta_error* err) { return ta_context_get_info(nullptr, &i, err); }, TA_E_INVALID, 0,
         "context is null"},
        {"no info", [&](ta_error* err) { return ta_context_get_info(context.get(), nullptr, err); }, TA_E_INVALID, 1,
         "info is null"},
        {"health of null", [](ta_error* err) { return ta_context_health(nullptr, err); }, TA_E_INVALID, 0, "context is null"},
    });
    expect_success([&](ta_error* err) { return ta_context_get_info(context.get(), &i, err); });
    expect_success([&](ta_error* err) { return ta_context_health(context.get(), err); });
}

// ------------------------------------------------------------------------------------------------------------------ pool

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

// ------------------------------------------------------------------------------------------------------------- sequences

TEST_F(BadArguments, SequenceCallsRefuseNullAndLengths) {
    ta_seq out = 77;
    int64_t n = 77;
    expect_failures({
        {"create of null", [&](ta_error* err) { return ta_seq_create(nullptr, &out, err); }, TA_E_INVALID, 0, "pool is null"},
        {"create without out", [&](ta_error* err) { return ta_seq_create(pool.get(), nullptr, err); }, TA_E_INVALID, 1,
         "out is null"},
        {"fork of null", [&](ta_error* err) { return ta_seq_fork(nullptr, long_seq, &out, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"fork without out", [&](ta_error* err) { return ta_seq_fork(pool.get(), long_seq, nullptr, err); }, TA_E_INVALID, 2,
         "out is null"},
        {"truncate of null", [&](ta_error* err) { return ta_seq_truncate(nullptr, long_seq, 1, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"truncate to -1", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, -1, err); }, TA_E_INVALID, 2,
         "length is -1"},
        {"truncate to INT64_MIN", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, INT64_MIN, err); },
         TA_E_INVALID, 2, "length is -9223372036854775808"},
        {"truncate to more", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, 131, err); }, TA_E_INVALID, 2,
         "the sequence has 130"},
        {"truncate to INT64_MAX", [&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, INT64_MAX, err); },
         TA_E_INVALID, 2, "the sequence has 130"},
        {"release of null", [&](ta_error* err) { return ta_seq_release(nullptr, long_seq, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"length of null", [&](ta_error* err) { return ta_seq_length(nullptr, long_seq, &n, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"length without out", [&](ta_error* err) { return ta_seq_length(pool.get(), long_seq, nullptr, err); }, TA_E_INVALID,
         2, "out is null"},
        {"verify of null", [&](ta_error* err) { return ta_seq_verify(nullptr, long_seq, err); }, TA_E_INVALID, 0,
         "pool is null"},
    });
    EXPECT_EQ(out, 77u);
    EXPECT_EQ(n, 77);
    expect_success([&](ta_error* err) { return ta_seq_truncate(pool.get(), long_seq, 130, err); });
    expect_success([&](ta_error* err) { return ta_seq_length(pool.get(), long_seq, &n, err); });
    expect_success([&](ta_error* err) { return ta_seq_verify(pool.get(), long_seq, err); });
}

TEST_F(BadArguments, FilesMovesAndNamespacesRefuseNull) {
    ta_seq out = 77;
    uint64_t n = 77;
    int64_t length = 77;
    ta_ticket ticket = 77;
    int32_t fd = 77;
    auto info = sized<ta_move_info>();
    ta_namespace space = 77;
    const uint8_t key[32] = {};
    const ta_status invalid = TA_E_INVALID;
    const auto save = [&](const char* path, ta_error* err) { return ta_seq_save(pool.get(), long_seq, path, nullptr, err); };
    const auto load = [&](const char* path, ta_seq* to, ta_error* err) {
        return ta_seq_load(pool.get(), path, nullptr, to, err);
    };
    auto sink = sized<ta_sink>(), no_write = sink;
    sink.write = [](void*, uint64_t, const void*, uint64_t) { return 1; };
    const auto load_all = [&](const char* path, uint64_t* count, ta_error* err) {
        return ta_kv_pool_load(pool.get(), path, nullptr, nullptr, 0, count, err);
    };
    const auto match = [&](const uint8_t* keys, ta_seq* to, int64_t* tokens, ta_error* err) {
        return ta_seq_match_prefix(pool.get(), space, keys, 1, to, tokens, err);
    };
    expect_failures({
        {"save to null", [&](ta_error* err) { return save(nullptr, err); }, invalid, 2, "path is null"},
        {"save to nothing", [&](ta_error* err) { return save("", err); }, invalid, 2, "path is empty"},
        {"load from null", [&](ta_error* err) { return load(nullptr, &out, err); }, invalid, 1, "path is null"},
        {"load without out", [&](ta_error* err) { return load("none", nullptr, err); }, invalid, 3, "out is null"},
        {"export of null", [&](ta_error* err) { return ta_seq_export(nullptr, long_seq, &sink, &n, err); }, invalid, 0,
         "pool is null"},
        {"export to null", [&](ta_error* err) { return ta_seq_export(pool.get(), long_seq, nullptr, &n, err); }, invalid, 2,
         "sink is null"},
        {"export to nothing", [&](ta_error* err) { return ta_seq_export(pool.get(), long_seq, &no_write, &n, err); }, invalid,
         2, "sink.write is null"},
        {"export that stops", [&](ta_error* err) { return ta_seq_export(pool.get(), long_seq, &sink, &n, err); },
         TA_E_CANCELLED, -1, "stopped"},
        {"import of null", [&](ta_error* err) { return ta_seq_import(nullptr, key, 1, &out, err); }, invalid, 0,
         "pool is null"},
        {"import from null", [&](ta_error* err) { return ta_seq_import(pool.get(), nullptr, 1, &out, err); }, invalid, 1,
         "data is null"},
        {"import without out", [&](ta_error* err) { return ta_seq_import(pool.get(), key, 1, nullptr, err); }, invalid, 3,
         "out is null"},
        {"import of no bytes", [&](ta_error* err) { return ta_seq_import(pool.get(), key, 0, &out, err); }, TA_E_CORRUPT, -1,
         "the given memory"},
        {"save the pool to null", [&](ta_error* err) { return ta_kv_pool_save(pool.get(), nullptr, 0, nullptr, err); }, invalid,
         1, "path is null"},
        {"load a pool from null", [&](ta_error* err) { return load_all(nullptr, &n, err); }, invalid, 1, "path is null"},
        {"load a pool without n", [&](ta_error* err) { return load_all("none", nullptr, err); }, invalid, 5, "n is null"},
        {"move without out",
         [&](ta_error* err) { return ta_seq_move(pool.get(), long_seq, 0, 1, TA_TIER_DEVICE, nullptr, err); }, invalid, 5,
         "out is null"},
        {"move to no tier", [&](ta_error* err) { return ta_seq_move(pool.get(), long_seq, 0, 1, ta_tier(9), &ticket, err); },
         invalid, 4, "tier is 9"},
        {"prefetch without out", [&](ta_error* err) { return ta_seq_prefetch(pool.get(), long_seq, 0, 1, nullptr, err); },
         invalid, 4, "out is null"},
        {"query of null", [&](ta_error* err) { return ta_move_query(nullptr, ticket, &info, err); }, invalid, 0,
         "pool is null"},
        {"descriptor of null", [&](ta_error* err) { return ta_kv_pool_descriptor(nullptr, &fd, err); }, invalid, 0,
         "pool is null"},
        {"take finished of null", [&](ta_error* err) { return ta_move_take_finished(nullptr, &ticket, 1, &n, err); }, invalid,
         0, "pool is null"},
        {"take finished without tiers", [&](ta_error* err) { return ta_move_take_finished(pool.get(), &ticket, 1, &n, err); },
         TA_E_UNSUPPORTED, 0, "no tier below"},
        {"descriptor without out", [&](ta_error* err) { return ta_kv_pool_descriptor(pool.get(), nullptr, err); }, invalid, 1,
         "out is null"},
        {"descriptor without tiers", [&](ta_error* err) { return ta_kv_pool_descriptor(pool.get(), &fd, err); },
         TA_E_UNSUPPORTED, 0, "no tier below"},
        {"take finished into null", [&](ta_error* err) { return ta_move_take_finished(pool.get(), nullptr, 1, &n, err); },
         invalid, 1, "out is null"},
        {"take finished without n", [&](ta_error* err) { return ta_move_take_finished(pool.get(), &ticket, 1, nullptr, err); },
         invalid, 3, "n is null"},
        {"query without tiers", [&](ta_error* err) { return ta_move_query(pool.get(), ticket, &info, err); }, TA_E_UNSUPPORTED,
         0, "no tier below"},
        {"residency without out", [&](ta_error* err) { return ta_seq_residency(pool.get(), long_seq, nullptr, err); }, invalid,
         2, "out is null"},
        {"tier statistics without stats",
         [&](ta_error* err) { return ta_kv_pool_get_tier_stats(pool.get(), TA_TIER_DEVICE, nullptr, err); }, invalid, 2,
         "stats is null"},
        {"namespace without options", [&](ta_error* err) { return ta_namespace_create(pool.get(), nullptr, &space, err); },
         invalid, 1, "options is null"},
        {"publish no keys", [&](ta_error* err) { return ta_seq_publish(pool.get(), long_seq, space, nullptr, 1, err); },
         invalid, 3, "keys is null"},
        {"match no keys", [&](ta_error* err) { return match(nullptr, &out, &length, err); }, invalid, 2, "keys is null"},
        {"match without out", [&](ta_error* err) { return match(key, nullptr, &length, err); }, invalid, 4, "out is null"},
        {"match without length", [&](ta_error* err) { return match(key, &out, nullptr, err); }, invalid, 5, "length is null"},
    });
    EXPECT_EQ(out, 77u);
    EXPECT_EQ(n, 77u);
    EXPECT_EQ(length, 77);
    EXPECT_EQ(ticket, 77u);
    EXPECT_EQ(fd, 77);
    EXPECT_EQ(space, 77u);
}

TEST_F(BadArguments, ReserveFitAndSuspendRefuseAndTakeNothing) {
    ta_ticket ticket = 77;
    auto out = sized<ta_fit>();
    out.bytes_new = 77;
    const ta_status invalid = TA_E_INVALID;
    const auto reserve = [&](int64_t tokens, int32_t wait_ms) {
        return [&, tokens, wait_ms](ta_error* err) { return ta_seq_reserve(pool.get(), long_seq, tokens, wait_ms, err); };
    };
    const auto fit = [&](std::vector<ta_seq> seqs, std::vector<int32_t> n_new) {
        return [&, seqs, n_new](ta_error* err) {
            return ta_kv_pool_fit(pool.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), &out, err);
        };
    };
    const auto suspend = [&](ta_tier tier, ta_ticket* to) {
        return [&, tier, to](ta_error* err) { return ta_seq_suspend(pool.get(), long_seq, tier, to, err); };
    };
    const auto refused = [&] {
        expect_failures({
            {"reserve of null", [&](ta_error* err) { return ta_seq_reserve(nullptr, long_seq, 1, 0, err); }, invalid, 0,
             "pool is null"},
            {"reserve -1", reserve(-1, 0), invalid, 2, "tokens is -1"},
            {"reserve INT64_MIN", reserve(INT64_MIN, 0), invalid, 2, "tokens is -9223372036854775808"},
            {"reserve 2^40", reserve(int64_t{1} << 40, 0), TA_E_LIMIT, 2, "more than 2^40"},
            {"reserve INT64_MAX", reserve(INT64_MAX, -1), TA_E_LIMIT, 2, "more than 2^40"},
            {"reserve beyond the budget", reserve((int64_t{1} << 40) - 130, 0), TA_E_TIER_FULL, -1, "device tier"},
            {"wait -2 ms", reserve(1, -2), invalid, 3, "wait_ms is -2"},
            {"wait longer than a day", reserve(1, 24 * 3600 * 1000 + 1), invalid, 3, "wait_ms is 86400001"},
            {"wait INT32_MIN ms", reserve(0, INT32_MIN), invalid, 3, "wait_ms is -2147483648"},
            {"fit of null", [&](ta_error* err) { return ta_kv_pool_fit(nullptr, 1, &long_seq, nullptr, &out, err); }, invalid,
             0, "pool is null"},
            {"fit no sequences", [&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 0, &long_seq, nullptr, &out, err); },
             invalid, 1, "n_seqs is 0"},
            {"fit no list", [&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 1, nullptr, nullptr, &out, err); }, invalid,
             2, "seqs is null"},
            {"fit without out", [&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 1, &long_seq, nullptr, nullptr, err); },
             invalid, 4, "out is null"},
            {"fit twice the same", fit({long_seq, 0, long_seq}, {1, 1, 1}), invalid, 2, "twice"},
            {"fit -1", fit({0, long_seq}, {1, -1}), invalid, 3, "n_new[1] is -1"},
            {"fit INT32_MIN", fit({0}, {INT32_MIN}), invalid, 3, "n_new[0] is -2147483648"},
            {"fit a stale one", fit({long_seq, 0xdeadull << 32}, {1, 1}), TA_E_STALE, 2, "no living sequence"},
            {"suspend of null", [&](ta_error* err) { return ta_seq_suspend(nullptr, long_seq, TA_TIER_HOST, &ticket, err); },
             invalid, 0, "pool is null"},
            {"suspend to no tier", suspend(9, &ticket), invalid, 2, "tier is 9"},
            {"suspend to the device", suspend(TA_TIER_DEVICE, &ticket), invalid, 2, "tier is the device"},
            {"suspend without out", suspend(TA_TIER_HOST, nullptr), invalid, 3, "out is null"},
            {"suspend without tiers", suspend(TA_TIER_HOST, &ticket), TA_E_UNSUPPORTED, 2, "no host tier"},
        });
    };
    refused();
    expect_success(reserve(200, 0));
    EXPECT_GT(stats(pool).bytes_promised, 0u);
    refused();  // the promise holds
    expect_success(reserve(0, -1));
    EXPECT_EQ(stats(pool).bytes_promised, 0u);
    EXPECT_EQ(ticket, 77u);
    EXPECT_EQ(out.bytes_new, 77u);
    expect_success(fit({0, long_seq, 0}, {1, INT32_MAX, 0}));
    EXPECT_EQ(out.first_lacking, 1);
    expect_success([&](ta_error* err) { return ta_kv_pool_fit(pool.get(), 1, &long_seq, nullptr, &out, err); });
    EXPECT_EQ(out.now + out.after_eviction, 2);
}

// Pointers to structs that a call reads, and to outputs.
TEST_F(BadArguments, PointersThatAreNotAlignedAreRefused) {
    const auto id = misaligned<uint64_t>();
    const auto number = misaligned<int64_t>();
    ta_kv_pool* const p = pool.get();
    const uint8_t key[32] = {};
    int64_t length = 77;
    uint64_t seq = 77;
    auto sink = sized<ta_sink>();
    sink.write = [](void*, uint64_t, const void*, uint64_t) { return 0; };
    const auto right = pool_options(1, 1, 64);
    auto space = sized<ta_namespace_options>();
    space.salt[0] = 1;
    const ta_status wrong = TA_E_ALIGNMENT;
    const char *const out = "out is not aligned", *const of_info = "info is not aligned",
                      *const of_stats = "stats is not aligned";
    const auto context_out = misaligned<ta_context*>();
    expect_failures({
        {"context", [&](ta_error* e) { return ta_context_create(nullptr, context_out, e); }, wrong, 1, out},
        {"context options",
         [&](ta_error* e) {
             ta_context* made;
             return ta_context_create(misaligned<ta_context_options>(), &made, e);
         },
         wrong, 0, "options is not aligned"},
        {"context info", [&](ta_error* e) { return ta_context_get_info(context.get(), misaligned<ta_context_info>(), e); },
         wrong, 1, of_info},
        {"pool", [&](ta_error* e) { return ta_kv_pool_create(context.get(), &right, misaligned<ta_kv_pool*>(), e); }, wrong, 2,
         out},
        {"pool stats", [&](ta_error* e) { return ta_kv_pool_get_stats(p, misaligned<ta_kv_pool_stats>(), e); }, wrong, 1,
         of_stats},
        {"description", [&](ta_error* e) { return ta_kv_pool_describe(p, misaligned<ta_kv_pool_description>(), e); }, wrong, 1,
         out},
        {"sequence", [&](ta_error* e) { return ta_seq_create(p, id, e); }, wrong, 1, out},
        {"fork", [&](ta_error* e) { return ta_seq_fork(p, long_seq, id, e); }, wrong, 2, out},
        {"length", [&](ta_error* e) { return ta_seq_length(p, long_seq, number, e); }, wrong, 2, out},
        {"loaded sequence", [&](ta_error* e) { return ta_seq_load(p, "none", nullptr, id, e); }, wrong, 3, out},
        {"imported sequence", [&](ta_error* e) { return ta_seq_import(p, key, 1, id, e); }, wrong, 3, out},
        {"exported bytes", [&](ta_error* e) { return ta_seq_export(p, long_seq, &sink, id, e); }, wrong, 3,
         "bytes is not aligned"},
        {"sink", [&](ta_error* e) { return ta_seq_export(p, long_seq, misaligned<ta_sink>(), nullptr, e); }, wrong, 2,
         "sink is not aligned"},
        {"descriptor", [&](ta_error* e) { return ta_kv_pool_descriptor(p, misaligned<int32_t>(), e); }, wrong, 1, out},
        {"finished tickets", [&](ta_error* e) { return ta_move_take_finished(p, id, 1, &seq, e); }, wrong, 1, out},
        {"number of finished", [&](ta_error* e) { return ta_move_take_finished(p, &seq, 1, id, e); }, wrong, 3,
         "n is not aligned"},
        {"loaded sequences",
         [&](ta_error* e) { return ta_kv_pool_load(p, "none", nullptr, misaligned<ta_loaded_seq>(), 1, &seq, e); }, wrong, 3,
         "loaded is not aligned"},
        {"number of loaded", [&](ta_error* e) { return ta_kv_pool_load(p, "none", nullptr, nullptr, 0, id, e); }, wrong, 5,
         "n is not aligned"},
        {"namespace", [&](ta_error* e) { return ta_namespace_create(p, &space, id, e); }, wrong, 2, out},
        {"matched", [&](ta_error* e) { return ta_seq_match_prefix(p, 1, key, 1, id, &length, e); }, wrong, 4, out},
        {"length matched", [&](ta_error* e) { return ta_seq_match_prefix(p, 1, key, 1, &seq, number, e); }, wrong, 5,
         "length is not aligned"},
        {"move", [&](ta_error* e) { return ta_seq_move(p, long_seq, 0, 1, TA_TIER_DEVICE, id, e); }, wrong, 5, out},
        {"prefetch", [&](ta_error* e) { return ta_seq_prefetch(p, long_seq, 0, 1, id, e); }, wrong, 4, out},
        {"residency", [&](ta_error* e) { return ta_seq_residency(p, long_seq, misaligned<ta_residency>(), e); }, wrong, 2, out},
        {"forgotten", [&](ta_error* e) { return ta_seq_forget(p, long_seq, 0, 1, number, e); }, wrong, 4,
         "forgotten is not aligned"},
        {"retention", [&](ta_error* e) { return ta_seq_retain(p, long_seq, 0, 1, misaligned<ta_retention>(), e); }, wrong, 4,
         "retention is not aligned"},
        {"blocks described",
         [&](ta_error* e) { return ta_seq_describe_blocks(p, long_seq, 0, 1, misaligned<ta_block_info>(), e); }, wrong, 4, out},
        {"suspend", [&](ta_error* e) { return ta_seq_suspend(p, long_seq, TA_TIER_HOST, id, e); }, wrong, 3, out},
        {"sequences to fit", [&](ta_error* e) { return ta_kv_pool_fit(p, 1, id, nullptr, misaligned<ta_fit>(), e); }, wrong, 2,
         "seqs is not aligned"},
        {"tokens to fit",
         [&](ta_error* e) { return ta_kv_pool_fit(p, 1, &long_seq, misaligned<int32_t>(), misaligned<ta_fit>(), e); }, wrong, 3,
         "n_new is not aligned"},
        {"fit", [&](ta_error* e) { return ta_kv_pool_fit(p, 1, &long_seq, nullptr, misaligned<ta_fit>(), e); }, wrong, 4, out},
        {"tier stats",
         [&](ta_error* e) { return ta_kv_pool_get_tier_stats(p, TA_TIER_DEVICE, misaligned<ta_tier_stats>(), e); }, wrong, 2,
         of_stats},
        {"metrics", [&](ta_error* e) { return ta_kv_pool_write_metrics(p, TA_METRICS_JSON, nullptr, 0, id, e); }, wrong, 4,
         "needed is not aligned"},
        {"plan", [&](ta_error* e) { return ta_plan_create(p, nullptr, misaligned<ta_plan*>(), e); }, wrong, 2, out},
        {"tensor",
         [&](ta_error* e) {
             const auto t = misaligned<ta_tensor>();
             return ta_attend_dense(context.get(), t, t, t, t, nullptr, nullptr, e);
         },
         wrong, 1, "q is not aligned"},
        {"calibrator",
         [&](ta_error* e) { return ta_calibrator_create(context.get(), 1, 1, 64, misaligned<ta_calibrator*>(), e); }, wrong, 4,
         out},
    });
    EXPECT_EQ(ta_seq_create(p, &seq, misaligned<ta_error>()), wrong);
    EXPECT_EQ(length, 77);
    EXPECT_EQ(seq, 77u);
}

TEST_F(BadArguments, InspectionRefusesRangesBeyondTheSequence) {
    auto block = sized<ta_x_block_info>();
    std::vector<float> k(size_t(130 * kRow), -1.0f), v = k;
    std::vector<uint8_t> bytes(1 << 16, 0x5a);
    const auto values = [&](ta_seq seq, uint32_t layer, int64_t first, int64_t n) {
        return [&, seq, layer, first, n](ta_error* err) {
            return ta_x_seq_dequantize(pool.get(), seq, layer, first, n, k.data(), v.data(), err);
        };
    };
    const auto describe = [&](uint64_t index, uint64_t size) {
        return [&, index, size](ta_error* err) {
            return ta_x_seq_block(pool.get(), long_seq, index, &block, bytes.data(), size, err);
        };
    };
    auto* odd = reinterpret_cast<float*>(reinterpret_cast<char*>(k.data()) + 1);
    expect_failures({
        {"block of null", [&](ta_error* err) { return ta_x_seq_block(nullptr, long_seq, 0, &block, nullptr, 0, err); },
         TA_E_INVALID, 0, "pool is null"},
        {"no info", [&](ta_error* err) { return ta_x_seq_block(pool.get(), long_seq, 0, nullptr, nullptr, 0, err); },
         TA_E_INVALID, 3, "info is null"},
        {"block beyond", describe(3, bytes.size()), TA_E_INVALID, 2, "the sequence has 3"},
        {"block far beyond", describe(UINT64_MAX, bytes.size()), TA_E_INVALID, 2, "block is 18446744073709551615"},
        {"no room", describe(0, 0), TA_E_INVALID, 5, "buffer_bytes is 0"},
        {"one byte less", describe(1, stats(pool).channel_block_bytes - 1), TA_E_INVALID, 5, "the block has"},
        {"values of null",
         [&](ta_error* err) { return ta_x_seq_dequantize(nullptr, long_seq, 0, 0, 1, k.data(), v.data(), err); }, TA_E_INVALID,
         0, "pool is null"},
        {"layer", values(long_seq, 2, 0, 1), TA_E_INVALID, 2, "layer is 2"},
        {"wrapped layer", values(long_seq, UINT32_MAX, 0, 1), TA_E_INVALID, 2, "layer is 4294967295"},
        {"negative first", values(long_seq, 0, -1, 1), TA_E_INVALID, 3, "-1 + 1"},
        {"negative count", values(long_seq, 0, 0, -1), TA_E_INVALID, 3, "0 + -1"},
        {"one too many", values(long_seq, 0, 0, 131), TA_E_INVALID, 3, "a sequence of 130"},
        {"begins beyond", values(long_seq, 0, 131, 0), TA_E_INVALID, 3, "131 + 0"},
        {"sum wraps", values(long_seq, 0, 1, INT64_MAX), TA_E_INVALID, 3, "a sequence of 130"},
        {"misaligned k", [&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), long_seq, 0, 0, 1, odd, nullptr, err); },
         TA_E_ALIGNMENT, 5, "k is not aligned"},
        {"misaligned v", [&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), long_seq, 0, 0, 1, nullptr, odd, err); },
         TA_E_ALIGNMENT, 6, "v is not aligned"},
    });
    EXPECT_EQ(k, std::vector<float>(k.size(), -1.0f));
    EXPECT_EQ(v, std::vector<float>(k.size(), -1.0f));
    EXPECT_EQ(bytes, std::vector<uint8_t>(bytes.size(), 0x5a));
    EXPECT_EQ(block.bytes, 0u);
    expect_success([&](ta_error* err) { return ta_x_seq_dequantize(pool.get(), long_seq, 0, 130, 0, nullptr, nullptr, err); });
    expect_success(values(long_seq, 1, 0, 130));
    expect_success(describe(1, stats(pool).channel_block_bytes));
    EXPECT_EQ(block.bits, 4u);
}

// ------------------------------------------------------------------------------------------------------------------ plan

TEST_F(BadArguments, PlanCreateRefusesAndCreatesNothing) {
    auto* out = untouched<ta_plan>();
    int reserved = 0;
    expect_failures({
        {"no pool", [&](ta_error* err) { return ta_plan_create(nullptr, nullptr, &out, err); }, TA_E_INVALID, 0,
         "pool is null"},
        {"options", [&](ta_error* err) { return ta_plan_create(pool.get(), &reserved, &out, err); }, TA_E_INVALID, 1,
         "reserved"},
        {"no out", [&](ta_error* err) { return ta_plan_create(pool.get(), nullptr, nullptr, err); }, TA_E_INVALID, 2,
         "out is null"},
    });
    EXPECT_EQ(out, untouched<ta_plan>());
}

TEST_F(BadArguments, BeginRefusesAndTakesNoSequence) {
    const auto try_begin = [&](std::vector<ta_seq> seqs, std::vector<int32_t> n_new, std::vector<int32_t> n_query = {}) {
        return [this, seqs, n_new, n_query](ta_error* err) {
            return ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.empty() ? nullptr : seqs.data(),
                                 n_new.empty() ? nullptr : n_new.data(), n_query.empty() ? nullptr : n_query.data(), nullptr,
                                 err);
        };
    };
    const ta_seq seqs[] = {long_seq, short_seq};
    const auto shifted = [](const void* p) { return static_cast<const char*>(p) + 1; };
    static const int32_t ones[] = {1, 1, 1};
    static char seq_bytes[3 * sizeof(ta_seq)];
    std::memcpy(seq_bytes + 1, seqs, sizeof seqs);
    expect_failures({
        {"no plan", [&](ta_error* err) { return ta_plan_begin(nullptr, 1, seqs, nullptr, nullptr, nullptr, err); },
         TA_E_INVALID, 0, "plan is null"},
        {"no sequences", [&](ta_error* err) { return ta_plan_begin(plan.get(), 0, seqs, nullptr, nullptr, nullptr, err); },
         TA_E_INVALID, 1, "n_seqs is 0"},
        {"no list", [&](ta_error* err) { return ta_plan_begin(plan.get(), 1, nullptr, nullptr, nullptr, nullptr, err); },
         TA_E_INVALID, 2, "seqs is null"},
        {"negative n_new", try_begin({long_seq, short_seq}, {1, -1}), TA_E_INVALID, 3, "n_new[1] is -1"},
        {"INT32_MIN n_new", try_begin({long_seq}, {INT32_MIN}), TA_E_INVALID, 3, "n_new[0] is -2147483648"},
        {"negative n_query", try_begin({long_seq, short_seq}, {1, 1}, {1, -5}), TA_E_INVALID, 4, "n_query[1] is -5"},
        {"too many queries", try_begin({long_seq, short_seq}, {1, 1}, {INT32_MAX, 1}), TA_E_LIMIT, -1,
         "2147483648 query tokens"},
        {"twice the same", try_begin({short_seq, long_seq, short_seq}, {1, 1, 1}), TA_E_INVALID, 2, "twice"},
        {"sequence 0", try_begin({short_seq, 0}, {1, 1}), TA_E_STALE, 2, "no living sequence"},
        {"beyond the budget", try_begin({short_seq, long_seq}, {1, 1 << 20}), TA_E_TIER_FULL, -1, "device tier"},
        {"far beyond the budget", try_begin({long_seq}, {INT32_MAX}), TA_E_TIER_FULL, -1, "device tier"},
        {"misaligned list",
         [&](ta_error* err) {
             return ta_plan_begin(plan.get(), 2, reinterpret_cast<const ta_seq*>(seq_bytes + 1), ones, ones, nullptr, err);
         },
         TA_E_ALIGNMENT, 2, "seqs is not aligned"},
        {"misaligned n_new",
         [&](ta_error* err) {
             return ta_plan_begin(plan.get(), 2, seqs, reinterpret_cast<const int32_t*>(shifted(ones)), ones, nullptr, err);
         },
         TA_E_ALIGNMENT, 3, "n_new is not aligned"},
        {"misaligned n_query",
         [&](ta_error* err) {
             return ta_plan_begin(plan.get(), 2, seqs, ones, reinterpret_cast<const int32_t*>(shifted(ones)), nullptr, err);
         },
         TA_E_ALIGNMENT, 4, "n_query is not aligned"},
    });
    const auto begin_with = [&](void (*set)(ta_step_options&)) {
        return [this, set, seqs](ta_error* err) {
            static const int32_t two[] = {2, 2};
            auto how = sized<ta_step_options>();
            set(how);
            return ta_plan_begin(plan.get(), 2, seqs, two, nullptr, &how, err);
        };
    };
    using How = ta_step_options;
    static const int32_t forward[] = {-1, 0, -1, 1}, below[] = {-2, 0, -1, 0}, fine[] = {-1, -1, -1, 0}, few[] = {1, 2};
    static const int64_t places[] = {0, 1, 0, 1, 0}, early[] = {0, 1, 0, -1}, late[] = {0, 1, int64_t{1} << 60, 0};
    static int32_t star[200];
    std::fill(std::begin(star), std::end(star), -1);
    expect_failures({
        {"drafts", begin_with([](How& o) { o.drafts = 3; }), TA_E_INVALID, 5, "options.drafts is 3"},
        {"negative drafts", begin_with([](How& o) { o.drafts = -1; }), TA_E_INVALID, 5, "options.drafts is -1"},
        {"order", begin_with([](How& o) { o.layers_in_order = 7; }), TA_E_INVALID, 5, "options.layers_in_order is 7"},
        {"wait -2 ms", begin_with([](How& o) { o.wait_ms = -2; }), TA_E_INVALID, 5, "options.wait_ms is -2"},
        {"wait longer than a day", begin_with([](How& o) { o.wait_ms = INT32_MAX; }), TA_E_INVALID, 5,
         "options.wait_ms is 2147483647"},
        {"misaligned options",
         [&](ta_error* err) { return ta_plan_begin(plan.get(), 2, seqs, ones, nullptr, misaligned<ta_step_options>(), err); },
         TA_E_ALIGNMENT, 5, "options is not aligned"},
        {"a parent behind", begin_with([](How& o) { o.tree_parent = forward; }), TA_E_INVALID, 5,
         "options.tree_parent[3] is 1"},
        {"a parent before all", begin_with([](How& o) { o.tree_parent = below; }), TA_E_INVALID, 5,
         "options.tree_parent[0] is -2"},
        {"trees without drafts", begin_with([](How& o) { o.tree_parent = fine, o.drafts = TA_OFF; }), TA_E_INVALID, 5,
         "drafts is off"},
        {"misaligned parents",
         begin_with([](How& o) { o.tree_parent = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(fine) + 1); }),
         TA_E_ALIGNMENT, 5, "options.tree_parent is not aligned"},
        {"a position before all", begin_with([](How& o) { o.query_positions = early; }), TA_E_INVALID, 5,
         "options.query_positions[3] is -1"},
        {"a position behind all", begin_with([](How& o) { o.query_positions = late; }), TA_E_INVALID, 5,
         "options.query_positions[2] is 1152921504606846976"},
        {"positions of a tree", begin_with([](How& o) { o.query_positions = places, o.tree_parent = fine; }), TA_E_INVALID, 5,
         "tree_parent and options.query_positions"},
        {"misaligned positions", begin_with([](How& o) {
             o.query_positions = reinterpret_cast<const int64_t*>(reinterpret_cast<const char*>(places) + 4);
         }),
         TA_E_ALIGNMENT, 5, "options.query_positions is not aligned"},
        {"fewer queries than a tree's tokens",
         [&](ta_error* err) {
             static const int32_t two[] = {2, 2};
             auto how = sized<ta_step_options>();
             how.tree_parent = fine;
             return ta_plan_begin(plan.get(), 2, seqs, two, few, &how, err);
         },
         TA_E_INVALID, 4, "n_query[0] is 1, n_new[0] is 2"},
        {"a large tree",
         [&](ta_error* err) {
             const int32_t many[] = {65, 1};
             auto how = sized<ta_step_options>();
             how.tree_parent = star;
             return ta_plan_begin(plan.get(), 2, seqs, many, nullptr, &how, err);
         },
         TA_E_INVALID, 5, "a tree of 65 tokens; the limit is 64"},
    });
    EXPECT_EQ(ta_plan_end(plan.get(), nullptr, nullptr), TA_E_STATE) << "a begin that failed left the plan open";
    // Both sequences are free again.
    EXPECT_EQ(ta_seq_truncate(pool.get(), long_seq, 130, nullptr), TA_OK);
    EXPECT_FALSE(step(plan, {long_seq, short_seq}, {1, 1}).empty());
}

TEST_F(BadArguments, FailedBeginNamesTheSequence) {
    const ta_seq seqs[] = {short_seq, long_seq};
    const int32_t n_new[] = {1, 1 << 20};
    ta_error err;
    EXPECT_EQ(ta_plan_begin(plan.get(), 2, seqs, n_new, nullptr, nullptr, &err), TA_E_TIER_FULL);
    EXPECT_EQ(err.sequence, 1);
    EXPECT_GE(err.block, 2);
    const ta_seq stale[] = {long_seq, short_seq, 0xdeadull << 32};
    EXPECT_EQ(ta_plan_begin(plan.get(), 3, stale, nullptr, nullptr, nullptr, &err), TA_E_STALE);
    EXPECT_EQ(err.sequence, 2);
}

TEST_F(BadArguments, AppendAndAttendRefuseLayersAndNull) {
    begin(plan, {long_seq}, {2});
    Random random(5);
    Tensor k(random.normals(2 * kRow), 2, kHeads, kDim), v(random.normals(2 * kRow), 2, kHeads, kDim);
    Tensor q(random.normals(2 * kQHeads * kDim), 2, kQHeads, kDim), out(2, kQHeads, kDim);
    const auto do_append = [&](uint32_t layer, const ta_tensor* kt, const ta_tensor* vt) {
        return [&, layer, kt, vt](ta_error* err) { return ta_append(plan.get(), layer, kt, vt, err); };
    };
    const auto do_attend = [&](uint32_t layer, const ta_tensor* qt, const ta_tensor* ot) {
        return [&, layer, qt, ot](ta_error* err) { return ta_attend(plan.get(), layer, qt, ot, nullptr, nullptr, err); };
    };
    expect_failures(
        {
            {"append to null", [&](ta_error* err) { return ta_append(nullptr, 0, k.view(), v.view(), err); }, TA_E_INVALID, 0,
             "plan is null"},
            {"append no k", do_append(0, nullptr, v.view()), TA_E_INVALID, 2, "k is null"},
            {"append no v", do_append(0, k.view(), nullptr), TA_E_INVALID, 3, "v is null"},
            {"append layer", do_append(2, k.view(), v.view()), TA_E_INVALID, 1, "layer is 2"},
            {"append wrapped layer", do_append(UINT32_MAX, k.view(), v.view()), TA_E_INVALID, 1, "layer is 4294967295"},
            {"attend to null",
             [&](ta_error* err) { return ta_attend(nullptr, 0, q.view(), out.view(), nullptr, nullptr, err); }, TA_E_INVALID, 0,
             "plan is null"},
            {"attend no q", do_attend(0, nullptr, out.view()), TA_E_INVALID, 2, "q is null"},
            {"attend no out", do_attend(0, q.view(), nullptr), TA_E_INVALID, 3, "out is null"},
            {"attend layer", do_attend(2, q.view(), out.view()), TA_E_INVALID, 1, "layer is 2"},
            {"end null", [](ta_error* err) { return ta_plan_end(nullptr, nullptr, err); }, TA_E_INVALID, 0, "plan is null"},
            {"abort null", [](ta_error* err) { return ta_plan_abort(nullptr, err); }, TA_E_INVALID, 0, "plan is null"},
        },
        true);
    EXPECT_TRUE(out.all_poison());
    EXPECT_EQ(run_open_plan(plan, {2}).size(), size_t(2 * 2 * kQHeads * kDim));
    end(plan);
}

TEST_F(BadArguments, AttendRefusesOptions) {
    begin(plan, {long_seq}, {0}, {2});
    Random random(5);
    Tensor q(random.normals(2 * kQHeads * kDim), 2, kQHeads, kDim), out(2, kQHeads, kDim);
    std::vector<float> lse(2 * kQHeads + 1, -1.0f);
    const auto do_attend = [&](auto change) {
        return [&, change](ta_error* err) {
            auto options = sized<ta_attend_options>();
            change(options);
            return ta_attend(plan.get(), 1, q.view(), out.view(), lse.data(), &options, err);
        };
    };
    using O = ta_attend_options;
    static float bad[kQHeads] = {0.0f, 0.0f, 0.0f, kNan}, infinite[kQHeads] = {-kInf, 0.0f, 0.0f, 0.0f};
    static float steep[kQHeads] = {0.0f, 3e38f, 0.0f, 0.0f};
    const auto odd = [](float* p) { return reinterpret_cast<float*>(reinterpret_cast<char*>(p) + 2); };
    expect_failures(
        {
            {"mask", do_attend([](O& o) { o.mask = 2; }), TA_E_INVALID, 5, "options.mask is 2"},
            {"negative mask", do_attend([](O& o) { o.mask = -1; }), TA_E_INVALID, 5, "mask is -1"},
            {"negative scale", do_attend([](O& o) { o.scale = -1.0f; }), TA_E_INVALID, 5, "scale is -1"},
            {"NaN scale", do_attend([](O& o) { o.scale = kNan; }), TA_E_INVALID, 5, "scale is"},
            {"infinite scale", do_attend([](O& o) { o.scale = kInf; }), TA_E_INVALID, 5, "scale is inf"},
            {"huge scale", do_attend([](O& o) { o.scale = 1e30f; }), TA_E_INVALID, 5, "scale is 1e+30"},
            {"negative softcap", do_attend([](O& o) { o.softcap = -30.0f; }), TA_E_INVALID, 5, "softcap is -30"},
            {"NaN softcap", do_attend([](O& o) { o.softcap = kNan; }), TA_E_INVALID, 5, "softcap is"},
            {"tiny softcap", do_attend([](O& o) { o.softcap = 1e-30f; }), TA_E_INVALID, 5, "softcap is 1e-30"},
            {"huge softcap", do_attend([](O& o) { o.softcap = 1e30f; }), TA_E_INVALID, 5, "softcap is 1e+30"},
            {"negative window", do_attend([](O& o) { o.window = -1; }), TA_E_INVALID, 5, "window is -1"},
            {"INT64_MIN window", do_attend([](O& o) { o.window = INT64_MIN; }), TA_E_INVALID, 5,
             "window is -9223372036854775808"},
            {"NaN slope", do_attend([](O& o) { o.alibi_slopes = bad; }), TA_E_INVALID, 5, "options.alibi_slopes[3]"},
            {"infinite sink", do_attend([](O& o) { o.sinks = infinite; }), TA_E_INVALID, 5, "sinks[0]"},
            {"slope that overflows", do_attend([](O& o) { o.alibi_slopes = steep; }), TA_E_INVALID, 5, "alibi_slopes[1]"},
            {"misaligned slopes", do_attend([&](O& o) { o.alibi_slopes = odd(bad); }), TA_E_ALIGNMENT, 5,
             "alibi_slopes is not aligned"},
            {"misaligned sinks", do_attend([&](O& o) { o.sinks = odd(bad); }), TA_E_ALIGNMENT, 5, "sinks is not aligned"},
            {"exp", do_attend([](O& o) { o.exp = 4; }), TA_E_INVALID, 5, "options.exp is 4"},
            {"p", do_attend([](O& o) { o.p = 8; }), TA_E_INVALID, 5, "options.p is 8"},
            {"misaligned lse",
             [&](ta_error* err) { return ta_attend(plan.get(), 1, q.view(), out.view(), odd(lse.data()), nullptr, err); },
             TA_E_ALIGNMENT, 4, "lse is not aligned"},
        },
        true);
    EXPECT_TRUE(out.all_poison());
    EXPECT_EQ(lse, std::vector<float>(lse.size(), -1.0f));
    expect_success(do_attend([](O& o) { o.window = INT64_MAX; }));
    EXPECT_FALSE(out.all_poison());
    EXPECT_EQ(lse.back(), -1.0f) << "written beyond its end";
    EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
}

}  // namespace
}  // namespace ta::testing
