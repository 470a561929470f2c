// Calls that need no pool, with wrong values: dense attention, merging, calibration.
#include <cmath>

#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

class BadStateless : public WrongCalls {};

TEST_F(BadStateless, DenseRefusesOptionsAndNull) {
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

TEST_F(BadStateless, MergeRefusesCountsAndNull) {
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

TEST_F(BadStateless, CalibratorRefuses) {
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
    auto group = sized<ta_layer_group>();
    group.first = 1;
    group.layers = 1;
    const ta_kv_pool_options good = pool_options(2, 2, 64);
    const auto create_for = [&](auto change) {
        return [&, change](ta_error* err) {
            ta_kv_pool_options o = good;
            o.layer_groups = &group;
            o.n_layer_groups = 1;
            ta_layer_group changed = group;
            change(o, changed);
            if (o.layer_groups) o.layer_groups = &changed;
            return ta_calibrator_create_for(context.get(), &o, &out, err);
        };
    };
    using Options = ta_kv_pool_options;
    using Group = ta_layer_group;
    expect_failures({
        {"for: no context", [&](ta_error* err) { return ta_calibrator_create_for(nullptr, &good, &out, err); }, TA_E_INVALID, 0,
         "context is null"},
        {"for: no options", [&](ta_error* err) { return ta_calibrator_create_for(context.get(), nullptr, &out, err); },
         TA_E_INVALID, 1, "options is null"},
        {"for: no out", [&](ta_error* err) { return ta_calibrator_create_for(context.get(), &good, nullptr, err); },
         TA_E_INVALID, 2, "out is null"},
        {"for: struct_size", create_for([](Options& o, Group&) { o.struct_size = 3; }), TA_E_STRUCT, 1,
         "options.struct_size is 3"},
        {"for: layers", create_for([](Options& o, Group&) { o.layers = 0; }), TA_E_INVALID, 1, "options.n_layer_groups is 1"},
        {"for: head_dim", create_for([](Options& o, Group&) { o.head_dim = 65; }), TA_E_UNSUPPORTED, 1,
         "options.head_dim is 65"},
        {"for: v_head_dim", create_for([](Options& o, Group&) { o.v_head_dim = 264; }), TA_E_UNSUPPORTED, 1,
         "options.v_head_dim is 264"},
        {"for: no groups", create_for([](Options& o, Group&) { o.layer_groups = nullptr; }), TA_E_INVALID, 1,
         "options.layer_groups is null"},
        {"for: a group's layers", create_for([](Options&, Group& g) { g.layers = 2; }), TA_E_INVALID, 1,
         "options.layer_groups[0] has 2 layers from 1"},
        {"for: a group's heads", create_for([](Options&, Group& g) { g.kv_heads = 1025; }), TA_E_INVALID, 1,
         "options.layer_groups[0].kv_heads is 1025"},
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
    const float costs[3 * kLayers * kHeads] = {};
    float nan_costs[3 * kLayers * kHeads] = {}, low_costs[3 * kLayers * kHeads] = {};
    float no_costs[3 * kLayers * kHeads] = {}, costs_of_eights[3 * kLayers * kHeads] = {};
    nan_costs[3 * kHeads + 1] = kNan;
    low_costs[2] = -kInf;
    std::fill_n(no_costs + 3, 3, kInf);
    for (uint32_t i = 0; i < kLayers * kHeads; ++i) costs_of_eights[3 * i + 1] = costs_of_eights[3 * i + 2] = kInf;
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
        {"a cost of NaN", choose(costs, nan_costs, kRoom, k_bits, v_bits), TA_E_INVALID, 2, "v_cost[1, 0, 1] is NaN"},
        {"a cost of -Inf", choose(low_costs, costs, kRoom, k_bits, v_bits), TA_E_INVALID, 1, "k_cost[0, 0, 2] is -Inf"},
        {"a head without bits", choose(costs, no_costs, kRoom, k_bits, v_bits), TA_E_INVALID, 2, "v_cost[0, 1] is +Inf with"},
        {"small blocks", choose(costs, costs, 100, k_bits, v_bits), TA_E_INVALID, 3, "block_bytes is 100"},
        {"small blocks for 8 bits", choose(costs_of_eights, costs, 20000, k_bits, v_bits), TA_E_INVALID, 3,
         "block_bytes is 20000; the smallest block that the costs allow has 22656"},
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
