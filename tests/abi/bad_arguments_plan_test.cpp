// Calls on a plan with wrong values: begins, appends, attention.
#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

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
