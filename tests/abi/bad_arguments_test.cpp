// Every call of the ABI with wrong values: the status, the argument it names, the text, and that nothing changes. Structs,
// tensors, groups and the order of calls have files of their own (bad_structs_, bad_tensors_, bad_groups_, bad_order_test.cpp).
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
        {"isa", create([](Options& o) { o.cpu_isa = 5; }), TA_E_INVALID, 0, "cpu_isa is 5"},
        {"negative isa", create([](Options& o) { o.cpu_isa = -1; }), TA_E_INVALID, 0, "cpu_isa is -1"},
        {"log level", create([](Options& o) { o.log = &too_detailed; }), TA_E_INVALID, 0, "log.level is 5"},
        {"negative log level", create([](Options& o) { o.log = &negative; }), TA_E_INVALID, 0, "log.level is -7"},
        {"allocator without free", create([](Options& o) { o.allocator = &lacks_free; }), TA_E_INVALID, 0, "deallocate"},
        {"allocator without allocate", create([](Options& o) { o.allocator = &lacks_allocate; }), TA_E_INVALID, 0, "allocate"},
        {"allocator without size", create([](Options& o) { o.allocator = &no_size; }), TA_E_STRUCT, 0,
         "allocator.struct_size is 0"},
    });
    const std::vector<ta_cpu_isa> isas = available_isas();
    for (ta_cpu_isa isa : {TA_CPU_ISA_SCALAR, TA_CPU_ISA_AVX2, TA_CPU_ISA_AVX_VNNI, TA_CPU_ISA_AVX512}) {
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
    static const uint8_t threes[] = {4, 4, 3, 4}, eights[] = {8, 8, 8, 8}, mixed[] = {4, 8, 4, 2}, fours[] = {4, 4, 4, 4},
                         zeros[4] = {};
    static std::vector<float> nan_offset(kLayers * kRow, 0.0f), inf_offset = nan_offset, big_offset = nan_offset;
    static auto no_folder = sized<ta_tier_options>();
    no_folder.disk_bytes = 1 << 20;
    no_folder.disk_folder = "";
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
        {"odd head_dim", create([](O& o, N&) { o.head_dim = 80; }), TA_E_UNSUPPORTED, 1, "64, 96, 128 or 256"},
        {"wrapped head_dim", create([](O& o, N&) { o.head_dim = UINT32_MAX; }), TA_E_UNSUPPORTED, 1, "head_dim is 4294967295"},
        {"bits", create([](O& o, N&) { o.bits = 3; }), TA_E_INVALID, 1, "options.bits is 3"},
        {"16 bits", create([](O& o, N&) { o.bits = 16; }), TA_E_INVALID, 1, "bits is 16"},
        {"k_bits", create([](O& o, N&) { o.k_bits = threes; }), TA_E_INVALID, 1, "options.k_bits is 3"},
        {"v_bits", create([](O& o, N&) { o.v_bits = zeros; }), TA_E_INVALID, 1, "options.v_bits is 0"},
        {"8 bits for some heads", create([](O& o, N&) { o.k_bits = mixed; }), TA_E_UNSUPPORTED, 1, "mixes 8 bits"},
        {"8 bits for K alone", create([](O& o, N&) {
             o.k_bits = eights;
             o.v_bits = fours;
         }),
         TA_E_UNSUPPORTED, 1, "both or none"},
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
    auto info = sized<ta_move_info>();
    ta_namespace space = 77;
    const uint8_t key[32] = {};
    const ta_status invalid = TA_E_INVALID;
    const auto save = [&](const char* path, ta_error* err) { return ta_seq_save(pool.get(), long_seq, path, nullptr, err); };
    const auto load = [&](const char* path, ta_seq* to, ta_error* err) {
        return ta_seq_load(pool.get(), path, nullptr, to, err);
    };
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
    EXPECT_EQ(space, 77u);
}

// What a call reads as a struct or writes to.
TEST_F(BadArguments, PointersThatAreNotAlignedAreRefused) {
    const auto id = misaligned<uint64_t>();
    const auto number = misaligned<int64_t>();
    ta_kv_pool* const p = pool.get();
    const uint8_t key[32] = {};
    int64_t length = 77;
    uint64_t seq = 77;
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
                                 n_new.empty() ? nullptr : n_new.data(), n_query.empty() ? nullptr : n_query.data(), err);
        };
    };
    const ta_seq seqs[] = {long_seq, short_seq};
    const auto shifted = [](const void* p) { return static_cast<const char*>(p) + 1; };
    static const int32_t ones[] = {1, 1, 1};
    static char seq_bytes[3 * sizeof(ta_seq)];
    std::memcpy(seq_bytes + 1, seqs, sizeof seqs);
    expect_failures({
        {"no plan", [&](ta_error* err) { return ta_plan_begin(nullptr, 1, seqs, nullptr, nullptr, err); }, TA_E_INVALID, 0,
         "plan is null"},
        {"no sequences", [&](ta_error* err) { return ta_plan_begin(plan.get(), 0, seqs, nullptr, nullptr, err); }, TA_E_INVALID,
         1, "n_seqs is 0"},
        {"no list", [&](ta_error* err) { return ta_plan_begin(plan.get(), 1, nullptr, nullptr, nullptr, err); }, TA_E_INVALID,
         2, "seqs is null"},
        {"negative n_new", try_begin({long_seq, short_seq}, {1, -1}), TA_E_INVALID, 3, "n_new[1] is -1"},
        {"INT32_MIN n_new", try_begin({long_seq}, {INT32_MIN}), TA_E_INVALID, 3, "n_new[0] is -2147483648"},
        {"negative n_query", try_begin({long_seq, short_seq}, {1, 1}, {1, -5}), TA_E_INVALID, 4, "n_query[1] is -5"},
        {"more queries than tokens", try_begin({long_seq, short_seq}, {1, 1}, {131, 12}), TA_E_INVALID, 4, "n_query[1] is 12"},
        {"INT32_MAX queries", try_begin({long_seq}, {}, {INT32_MAX}), TA_E_INVALID, 4, "will have 130 tokens"},
        {"twice the same", try_begin({short_seq, long_seq, short_seq}, {1, 1, 1}), TA_E_INVALID, 2, "twice"},
        {"sequence 0", try_begin({short_seq, 0}, {1, 1}), TA_E_STALE, 2, "no living sequence"},
        {"beyond the budget", try_begin({short_seq, long_seq}, {1, 1 << 20}), TA_E_TIER_FULL, -1, "device tier"},
        {"far beyond the budget", try_begin({long_seq}, {INT32_MAX}), TA_E_TIER_FULL, -1, "device tier"},
        {"misaligned list",
         [&](ta_error* err) {
             return ta_plan_begin(plan.get(), 2, reinterpret_cast<const ta_seq*>(seq_bytes + 1), ones, ones, err);
         },
         TA_E_ALIGNMENT, 2, "seqs is not aligned"},
        {"misaligned n_new",
         [&](ta_error* err) {
             return ta_plan_begin(plan.get(), 2, seqs, reinterpret_cast<const int32_t*>(shifted(ones)), ones, err);
         },
         TA_E_ALIGNMENT, 3, "n_new is not aligned"},
        {"misaligned n_query",
         [&](ta_error* err) {
             return ta_plan_begin(plan.get(), 2, seqs, ones, reinterpret_cast<const int32_t*>(shifted(ones)), err);
         },
         TA_E_ALIGNMENT, 4, "n_query is not aligned"},
    });
    EXPECT_EQ(ta_plan_end(plan.get(), nullptr), TA_E_STATE) << "a begin that failed left the plan open";
    // Both sequences are free again.
    EXPECT_EQ(ta_seq_truncate(pool.get(), long_seq, 130, nullptr), TA_OK);
    EXPECT_FALSE(step(plan, {long_seq, short_seq}, {1, 1}).empty());
}

TEST_F(BadArguments, FailedBeginNamesTheSequence) {
    const ta_seq seqs[] = {short_seq, long_seq};
    const int32_t n_new[] = {1, 1 << 20};
    ta_error err;
    EXPECT_EQ(ta_plan_begin(plan.get(), 2, seqs, n_new, nullptr, &err), TA_E_TIER_FULL);
    EXPECT_EQ(err.sequence, 1);
    EXPECT_GE(err.block, 2);
    const ta_seq stale[] = {long_seq, short_seq, 0xdeadull << 32};
    EXPECT_EQ(ta_plan_begin(plan.get(), 3, stale, nullptr, nullptr, &err), TA_E_STALE);
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
            {"end null", [](ta_error* err) { return ta_plan_end(nullptr, err); }, TA_E_INVALID, 0, "plan is null"},
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

// ----------------------------------------------------------------------------------------------------------------- dense

TEST_F(BadArguments, DenseRefusesOptionsAndNull) {
    Random random(7);
    constexpr int64_t kQ = 6, kK = 10;
    Tensor q(random.normals(kQ * kQHeads * kDim), kQ, kQHeads, kDim), out(kQ, kQHeads, kDim);
    Tensor k(random.normals(kK * kRow), kK, kHeads, kDim), v(random.normals(kK * kRow), kK, kHeads, kDim);
    std::vector<float> lse(kQ * kQHeads + 1, -1.0f);
    const auto dense = [&](auto change) {
        return [&, change](ta_error* err) {
            auto options = sized<ta_dense_options>();
            change(options);
            return ta_attend_dense(context.get(), q.view(), k.view(), v.view(), out.view(), lse.data(), &options, err);
        };
    };
    using O = ta_dense_options;
    static const int64_t from_one[] = {1, 10}, too_far[] = {0, 11}, falls[] = {0, 7, 3, 10}, negative[] = {0, -1, 3, 10},
                         short_of[] = {0, 9};
    static auto bad_attend = sized<ta_attend_options>(), no_size = ta_attend_options{};
    bad_attend.window = -3;
    const auto odd = [](const auto* p) { return reinterpret_cast<decltype(p)>(reinterpret_cast<const char*>(p) + 1); };
    const auto null_at = [&](int which) {
        return [&, which](ta_error* err) {
            return ta_attend_dense(which == 0 ? nullptr : context.get(), which == 1 ? nullptr : q.view(),
                                   which == 2 ? nullptr : k.view(), which == 3 ? nullptr : v.view(),
                                   which == 4 ? nullptr : out.view(), lse.data(), nullptr, err);
        };
    };
    expect_failures({
        {"no context", null_at(0), TA_E_INVALID, 0, "context is null"},
        {"no q", null_at(1), TA_E_INVALID, 1, "q is null"},
        {"no k", null_at(2), TA_E_INVALID, 2, "k is null"},
        {"no v", null_at(3), TA_E_INVALID, 3, "v is null"},
        {"no out", null_at(4), TA_E_INVALID, 4, "out is null"},
        {"variant", dense([](O& o) { o.variant = 4; }), TA_E_INVALID, 6, "variant is 4"},
        {"negative variant", dense([](O& o) { o.variant = -1; }), TA_E_INVALID, 6, "variant is -1"},
        {"group_size", dense([](O& o) {
             o.variant = TA_DENSE_DISTR;
             o.group_size = 5;
         }),
         TA_E_INVALID, 6, "group_size is 5"},
        {"group_size of 1", dense([](O& o) {
             o.variant = TA_DENSE_DISTR;
             o.group_size = 1;
         }),
         TA_E_INVALID, 6, "group_size is 1"},
        {"group_size of INT8", dense([](O& o) { o.group_size = 2; }), TA_E_INVALID, 6, "with TA_DENSE_DISTR, else 0"},
        {"v_granularity", dense([](O& o) { o.v_granularity = 4; }), TA_E_INVALID, 6, "v_granularity is 4"},
        {"nonfinite", dense([](O& o) { o.nonfinite = 9; }), TA_E_INVALID, 6, "nonfinite is 9"},
        {"stream", dense([](O& o) { o.stream = reinterpret_cast<ta_stream>(&o); }), TA_E_UNSUPPORTED, 6, "has no streams"},
        {"batch too large", dense([](O& o) { o.batch = UINT32_MAX; }), TA_E_INVALID, 6, "batch is 4294967295"},
        {"queries do not split", dense([](O& o) { o.batch = 4; }), TA_E_INVALID, 6, "give options.q_offsets"},
        {"keys do not split", dense([](O& o) { o.batch = 3; }), TA_E_INVALID, 6, "give options.k_offsets"},
        {"offsets from 1", dense([](O& o) { o.k_offsets = from_one; }), TA_E_INVALID, 6, "k_offsets"},
        {"offsets too far", dense([](O& o) { o.k_offsets = too_far; }), TA_E_INVALID, 6, "k_offsets[1] is 11"},
        {"offsets end early", dense([](O& o) { o.k_offsets = short_of; }), TA_E_INVALID, 6, "it must run from 0 to 10"},
        {"offsets fall", dense([](O& o) {
             o.batch = 3;
             o.k_offsets = falls;
         }),
         TA_E_INVALID, 6, "k_offsets[2] is 3"},
        {"negative offset", dense([](O& o) {
             o.batch = 3;
             o.k_offsets = negative;
         }),
         TA_E_INVALID, 6, "k_offsets[1] is -1"},
        {"misaligned offsets", dense([&](O& o) { o.q_offsets = odd(from_one); }), TA_E_ALIGNMENT, 6,
         "q_offsets is not aligned"},
        {"attend options", dense([](O& o) { o.attend = &bad_attend; }), TA_E_INVALID, 6, "options.attend.window is -3"},
        {"attend options without size", dense([](O& o) { o.attend = &no_size; }), TA_E_STRUCT, 6,
         "options.attend.struct_size is 0"},
        {"misaligned lse",
         [&](ta_error* err) {
             return ta_attend_dense(context.get(), q.view(), k.view(), v.view(), out.view(),
                                    const_cast<float*>(odd(lse.data())), nullptr, err);
         },
         TA_E_ALIGNMENT, 5, "lse is not aligned"},
    });
    EXPECT_TRUE(out.all_poison());
    EXPECT_EQ(lse, std::vector<float>(lse.size(), -1.0f));
    expect_success(dense([](O& o) { o.batch = 2; }));
    EXPECT_FALSE(out.all_poison());
}

// --------------------------------------------------------------------------------------------------------------- merging

TEST_F(BadArguments, MergeRefusesCountsAndNull) {
    Random random(7);
    Tensor a(random.normals(6 * kRow), 6, kHeads, kDim), b(random.normals(6 * kRow), 6, kHeads, kDim), out(6, kHeads, kDim);
    const std::vector<float> l(6 * kHeads, 0.5f);
    std::vector<float> lse(6 * kHeads + 1, -1.0f);
    const ta_tensor parts[] = {*a.view(), *b.view()};
    const float *const lses[] = {l.data(), l.data()}, *const lacking[] = {l.data(), nullptr},
                       *const odd[] = {l.data(), misaligned<float>()};
    const auto merge = [&](uint32_t n, const ta_tensor* p, const float* const* ls, const ta_tensor* o, float* to,
                           ta_stream stream = nullptr) {
        return [=, this](ta_error* err) { return ta_merge_states(context.get(), n, p, ls, o, to, stream, err); };
    };
    const ta_tensor* o = out.view();
    expect_failures({
        {"no context", [&](ta_error* err) { return ta_merge_states(nullptr, 2, parts, lses, o, nullptr, nullptr, err); },
         TA_E_INVALID, 0, "context is null"},
        {"no parts at all", merge(0, parts, lses, o, lse.data()), TA_E_INVALID, 1, "n is 0; it takes 1..64"},
        {"too many parts", merge(65, parts, lses, o, lse.data()), TA_E_INVALID, 1, "n is 65"},
        {"UINT32_MAX parts", merge(UINT32_MAX, parts, lses, o, lse.data()), TA_E_INVALID, 1, "n is 4294967295"},
        {"no list of parts", merge(2, nullptr, lses, o, lse.data()), TA_E_INVALID, 2, "parts is null"},
        {"misaligned parts", merge(2, misaligned<ta_tensor>(), lses, o, lse.data()), TA_E_ALIGNMENT, 2, "parts is not aligned"},
        {"no list of lses", merge(2, parts, nullptr, o, lse.data()), TA_E_INVALID, 3, "lses is null"},
        {"misaligned lses", merge(2, parts, misaligned<const float*>(), o, lse.data()), TA_E_ALIGNMENT, 3, "lses is not"},
        {"an lse lacks", merge(2, parts, lacking, o, lse.data()), TA_E_INVALID, 3, "lses[1] is null"},
        {"a misaligned one", merge(2, parts, odd, o, lse.data()), TA_E_ALIGNMENT, 3, "lses[1] is not aligned"},
        {"no out", merge(2, parts, lses, nullptr, lse.data()), TA_E_INVALID, 4, "out is null"},
        {"misaligned lse", merge(2, parts, lses, o, misaligned<float>()), TA_E_ALIGNMENT, 5, "lse is not aligned"},
        {"stream", merge(2, parts, lses, o, lse.data(), untouched<CUstream_st>()), TA_E_UNSUPPORTED, 6, "has no streams"},
    });
    EXPECT_TRUE(out.all_poison());
    EXPECT_EQ(lse, std::vector<float>(lse.size(), -1.0f));
    expect_success(merge(2, parts, lses, o, nullptr));
    EXPECT_FALSE(out.all_poison());
    const ta_tensor none[] = {ta_tensor_make(nullptr, TA_DTYPE_F16, 0, 2, 64)};
    const float* const no_lse[] = {nullptr};
    expect_success(merge(1, none, no_lse, none, nullptr));
}

// ------------------------------------------------------------------------------------------------------------ calibrator

TEST_F(BadArguments, CalibratorRefuses) {
    auto* out = untouched<ta_calibrator>();
    const auto create = [&](uint32_t layers, uint32_t heads, uint32_t dim) {
        return [&, layers, heads, dim](ta_error* err) {
            return ta_calibrator_create(context.get(), layers, heads, dim, &out, err);
        };
    };
    expect_failures({
        {"no context", [&](ta_error* err) { return ta_calibrator_create(nullptr, 1, 1, 64, &out, err); }, TA_E_INVALID, 0,
         "context is null"},
        {"no layers", create(0, 1, 64), TA_E_INVALID, 1, "layers is 0"},
        {"layers", create(4097, 1, 64), TA_E_INVALID, 1, "layers is 4097"},
        {"no heads", create(1, 0, 64), TA_E_INVALID, 2, "kv_heads is 0"},
        {"heads", create(1, UINT32_MAX, 64), TA_E_INVALID, 2, "kv_heads is 4294967295"},
        {"head_dim", create(1, 1, 65), TA_E_UNSUPPORTED, 3, "head_dim is 65"},
        {"no out", [&](ta_error* err) { return ta_calibrator_create(context.get(), 1, 1, 64, nullptr, err); }, TA_E_INVALID, 4,
         "out is null"},
    });
    EXPECT_EQ(out, untouched<ta_calibrator>());

    ta_calibrator* made = nullptr;
    ASSERT_EQ(ta_calibrator_create(context.get(), kLayers, kHeads, kDim, &made, nullptr), TA_OK);
    const Calibrator calibrator(made);
    Random random(9);
    Tensor k(random.normals(3 * kRow), 3, kHeads, kDim), v(random.normals(3 * kRow), 3, kHeads, kDim), two(2, kHeads, kDim);
    Tensor bad(random.normals(3 * kRow), 3, kHeads, kDim);
    bad.set(1, 1, 5, kNan);
    uint8_t k_bits[kLayers * kHeads] = {9, 9, 9, 9}, v_bits[kLayers * kHeads] = {9, 9, 9, 9};
    float priority[kLayers * kHeads] = {-1, -1, -1, -1};
    auto* odd = reinterpret_cast<float*>(reinterpret_cast<char*>(priority) + 1);
    const auto observe = [&](uint32_t layer, const ta_tensor* kt, const ta_tensor* vt) {
        return [&, layer, kt, vt](ta_error* err) { return ta_calibrator_observe(made, layer, kt, vt, err); };
    };
    const auto finish = [&](uint32_t n_low, uint8_t* kb, uint8_t* vb, float* kp = nullptr, float* vp = nullptr) {
        return [&, n_low, kb, vb, kp, vp](ta_error* err) { return ta_calibrator_finish(made, n_low, kb, vb, kp, vp, err); };
    };
    constexpr uint64_t kRoom = 1 << 30;
    const float costs[2 * kLayers * kHeads] = {};
    float nan_costs[2 * kLayers * kHeads] = {};
    nan_costs[2 * kHeads + 1] = kNan;
    const auto choose = [&](const float* kc, const float* vc, uint64_t bytes, uint8_t* kb, uint8_t* vb) {
        return [&, kc, vc, bytes, kb, vb](ta_error* err) { return ta_calibrator_choose(made, kc, vc, bytes, kb, vb, err); };
    };
    expect_success(observe(0, k.view(), v.view()));
    expect_failures({
        {"observe null", [&](ta_error* err) { return ta_calibrator_observe(nullptr, 0, k.view(), v.view(), err); },
         TA_E_INVALID, 0, "calibrator is null"},
        {"layer", observe(2, k.view(), v.view()), TA_E_INVALID, 1, "layer is 2"},
        {"no k", observe(0, nullptr, v.view()), TA_E_INVALID, 2, "k is null"},
        {"no v", observe(0, k.view(), nullptr), TA_E_INVALID, 3, "v is null"},
        {"fewer v", observe(0, k.view(), two.view()), TA_E_SHAPE, 3, "v is [2, 2, 64]"},
        {"NaN k", observe(1, bad.view(), v.view()), TA_E_NONFINITE, 2, "k[1, 1, 5]"},
        {"NaN v", observe(1, k.view(), bad.view()), TA_E_NONFINITE, 3, "v[1, 1, 5]"},
        {"finish null", [&](ta_error* err) { return ta_calibrator_finish(nullptr, 0, k_bits, v_bits, nullptr, nullptr, err); },
         TA_E_INVALID, 0, "calibrator is null"},
        {"no k_bits", finish(0, nullptr, v_bits), TA_E_INVALID, 2, "k_bits is null"},
        {"no v_bits", finish(0, k_bits, nullptr), TA_E_INVALID, 3, "v_bits is null"},
        {"n_low", finish(kHeads + 1, k_bits, v_bits), TA_E_INVALID, 1, "n_low is 3"},
        {"misaligned k_priority", finish(0, k_bits, v_bits, odd), TA_E_ALIGNMENT, 4, "k_priority is not aligned"},
        {"misaligned v_priority", finish(0, k_bits, v_bits, priority, odd), TA_E_ALIGNMENT, 5, "v_priority is not aligned"},
        {"choose null", [&](ta_error* err) { return ta_calibrator_choose(nullptr, costs, costs, kRoom, k_bits, v_bits, err); },
         TA_E_INVALID, 0, "calibrator is null"},
        {"no k_cost", choose(nullptr, costs, kRoom, k_bits, v_bits), TA_E_INVALID, 1, "k_cost is null"},
        {"no v_cost", choose(costs, nullptr, kRoom, k_bits, v_bits), TA_E_INVALID, 2, "v_cost is null"},
        {"misaligned v_cost", choose(costs, odd, kRoom, k_bits, v_bits), TA_E_ALIGNMENT, 2, "v_cost is not aligned"},
        {"a cost of NaN", choose(costs, nan_costs, kRoom, k_bits, v_bits), TA_E_INVALID, 2, "v_cost[1, 0, 1] is not finite"},
        {"small blocks", choose(costs, costs, 100, k_bits, v_bits), TA_E_INVALID, 3, "block_bytes is 100"},
        {"choose without k_bits", choose(costs, costs, kRoom, nullptr, v_bits), TA_E_INVALID, 4, "k_bits is null"},
        {"choose without v_bits", choose(costs, costs, kRoom, k_bits, nullptr), TA_E_INVALID, 5, "v_bits is null"},
        {"a layer that a failed call would have observed", finish(1, k_bits, v_bits, priority), TA_E_STATE, -1,
         "layer 1 was never observed"},
    });
    for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(k_bits[i], 9);
        EXPECT_EQ(v_bits[i], 9);
        EXPECT_EQ(priority[i], -1.0f);
    }
    expect_success(observe(1, k.view(), v.view()));
    expect_success(finish(1, k_bits, v_bits, priority));
    EXPECT_EQ(int(k_bits[0]) + k_bits[1], 6);
}

// -------------------------------------------------------------------------------------------------------------- the rest

TEST(Basics, EveryStatusHasItsName) {
    EXPECT_STREQ(ta_status_name(TA_OK), "TA_OK");
    EXPECT_STREQ(ta_status_name(TA_E_TIER_FULL), "TA_E_TIER_FULL");
    EXPECT_STREQ(ta_status_name(TA_E_INTERNAL), "TA_E_INTERNAL");
    for (ta_status unknown : {1, -1, 0x0100, 0x0107, INT32_MAX, INT32_MIN}) EXPECT_STREQ(ta_status_name(unknown), "unknown");
}

TEST(Basics, TheLibraryIsThatOfTheHeader) {
    EXPECT_EQ(ta_version(), uint32_t(TA_VERSION_MAJOR * 10000 + TA_VERSION_MINOR * 100 + TA_VERSION_PATCH));
    EXPECT_EQ(ta_abi_version(), uint32_t(TA_ABI_VERSION));
    EXPECT_NE(std::string_view(ta_build_info()).find("cpu: scalar"), std::string_view::npos);
}

}  // namespace
}  // namespace ta::testing
