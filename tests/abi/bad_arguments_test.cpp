// Every call of the ABI with wrong values: the status, the argument it names, the text, and that nothing changes. Here are contexts,
// and pointers of all calls that are not aligned. Pools, sequences and plans (bad_arguments_*_test.cpp), structs, tensors, groups,
// block stores, blocks of a sequence, calls without a pool and the order of calls have files of their own (bad_structs_,
// bad_tensors_, bad_groups_, bad_stores_, bad_blocks_, bad_stateless_, bad_order_test.cpp).
#include <algorithm>

#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

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
        {"blocks located", [&](ta_error* e) { return ta_seq_locate_blocks(p, long_seq, 0, 1, misaligned<const void*>(), e); },
         wrong, 4, out},
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
        {"calibrator for",
         [&](ta_error* e) { return ta_calibrator_create_for(context.get(), &right, misaligned<ta_calibrator*>(), e); }, wrong,
         2, out},
        {"shape",
         [&](ta_error* e) {
             ta_calibrator* made;
             return ta_calibrator_create_for(context.get(), misaligned<ta_kv_pool_options>(), &made, e);
         },
         wrong, 1, "options is not aligned"},
    });
    EXPECT_EQ(ta_seq_create(p, &seq, misaligned<ta_error>()), wrong);
    EXPECT_EQ(length, 77);
    EXPECT_EQ(seq, 77u);
}

}  // namespace
}  // namespace ta::testing
