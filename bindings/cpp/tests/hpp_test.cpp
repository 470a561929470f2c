// turboattention.hpp: every call once, what it adds to the C ABI (lifetimes, errors, callbacks), and wrong use. Here are steps,
// sequences, shapes and calls without a pool; hpp_*_test.cpp have the rest.
#include <array>
#include <cmath>
#include <limits>
#include <optional>

#include "hpp_steps.h"

namespace hpp_tests {
namespace {

TEST(Hpp, AStepGivesTheBitsOfC) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto seq = pool.create_sequence();
    const auto plan = pool.create_plan();
    const auto got = feed(plan, seq, 100);

    auto k = numbers(100 * kRow, 1), v = numbers(100 * kRow, 2), q = numbers(100 * kRow, 3), want = q;
    ta_seq id = 0;
    const int32_t n = 100;
    ASSERT_EQ(ta_seq_create(pool.get(), &id, nullptr), TA_OK);
    ASSERT_EQ(ta_plan_begin(plan.get(), 1, &id, &n, nullptr, nullptr, nullptr), TA_OK);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        ASSERT_EQ(ta_append(plan.get(), layer, view(k).get(), view(v).get(), nullptr), TA_OK);
        ASSERT_EQ(ta_attend(plan.get(), layer, view(q).get(), view(want).get(), nullptr, nullptr, nullptr), TA_OK);
    }
    ASSERT_EQ(ta_plan_end(plan.get(), nullptr, nullptr), TA_OK);
    EXPECT_EQ(got, want);
    EXPECT_EQ(seq.length(), 100);
}

TEST(Hpp, WhatNeedsAParentKeepsIt) {
    auto context = std::make_optional(ta::Context::create());
    auto pool = std::make_optional(context->create_pool(shape()));
    auto plan = std::make_optional(pool->create_plan());
    auto seq = pool->create_sequence();
    auto calibrator = context->create_calibrator(1, 1, 64);
    context.reset(), pool.reset();
    feed(*plan, seq, 70);
    auto k = numbers(kRow, 1);
    auto step = plan->begin(seq, 1);
    plan.reset();
    for (uint32_t layer = 0; layer < kLayers; ++layer) step.append(layer, view(k), view(k));
    step.end();
    EXPECT_EQ(seq.length(), 71);
    EXPECT_EQ(status_of([&] { step.end(); }), TA_E_STATE);  // it is over
}

TEST(Hpp, AStepThatIsLeftIsAborted) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence(), other = pool.create_sequence();
    EXPECT_THROW(
        {
            auto step = plan.begin({{seq, 5}, {other, 3}});
            throw std::runtime_error("of the caller");
        },
        std::runtime_error);
    auto step = plan.begin({{seq, 0}, {other, 0}});
    step.abort();
    EXPECT_EQ(status_of([&] { step.abort(); }), TA_E_STATE);
    EXPECT_EQ(status_of([&] { step.end(); }), TA_E_STATE);
    EXPECT_EQ(seq.length(), 0);
    EXPECT_EQ(status_of([&] { plan.begin(std::array{seq.id()}, std::array{1, 2}); }), TA_E_INVALID);
    const auto strange = ta::Context::create().create_pool(shape()).create_sequence();
    EXPECT_EQ(status_of([&] { plan.begin(strange, 1); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { plan.begin({{seq, 1}, {strange, 1}}); }), TA_E_INVALID);
}

TEST(Hpp, SequencesAreReleasedOnce) {
    const auto pool = ta::Context::create().create_pool(shape());
    {
        auto a = pool.create_sequence();
        auto b = std::move(a);
        b = pool.create_sequence();
        EXPECT_EQ(pool.stats().sequences, 1u);
        b.release();
        EXPECT_EQ(status_of([&] { b.release(); }), TA_E_STALE);
        ta::Sequence adopted(pool.shared(), pool.create_sequence().detach());
    }
    EXPECT_EQ(pool.stats().sequences, 0u);
}

TEST(Hpp, ErrorsSayWhere) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    auto step = plan.begin(seq, 2);
    auto k = numbers(2 * kRow, 1);
    k[kRow] = std::nanf("");
    try {
        step.append(1, view(k), view(k));
        FAIL();
    } catch (const ta::Error& error) {
        EXPECT_EQ(error.status(), TA_E_NONFINITE);
        EXPECT_STREQ(error.status_name(), "TA_E_NONFINITE");
        EXPECT_EQ(error.detail().layer, 1);
        EXPECT_EQ(error.detail().token, 1);
    }
    const std::vector<uint8_t> bits(3, 4);
    auto options = shape();
    options.k_bits = bits;
    EXPECT_EQ(status_of([&] { ta::Context::create().create_pool(options); }), TA_E_SHAPE);
}

TEST(Hpp, ResultsReturnErrors) {
    namespace tr = ta::results;
    const auto context = tr::Context::create();
    ASSERT_TRUE(context);
    const auto none = context->create_pool({});
    ASSERT_FALSE(none);
    EXPECT_EQ(none.error().status(), TA_E_INVALID);
    const auto pool = context->create_pool(shape());
    const auto plan = pool->create_plan();
    auto seq = pool->create_sequence();
    auto k = numbers(kRow, 1);
    {
        auto step = plan->begin(*seq, 1);
        EXPECT_FALSE(step->end());
        for (uint32_t layer = 0; layer < kLayers; ++layer) EXPECT_TRUE(step->append(layer, view(k), view(k)));
        EXPECT_TRUE(step->end());
    }
    EXPECT_EQ(*seq->length(), 1);
}

TEST(Hpp, VMayHaveOtherChannels) {
    const auto pool = ta::Context::create().create_pool(
        {.layers = 1, .kv_heads = 2, .head_dim = 48, .budget_bytes = 1 << 20, .v_head_dim = 32});
    EXPECT_EQ(pool.describe().v_head_dim, 32u);
    const ta::LayerGroup windowed[] = {{.first = 0, .layers = 2, .window = 100}};
    const auto with_windows = ta::Context::create().create_pool(
        {.layers = 3, .kv_heads = 2, .head_dim = 64, .budget_bytes = 1 << 20, .layer_groups = windowed});
    ASSERT_EQ(with_windows.describe().n_layer_groups, 1u);
    EXPECT_EQ(with_windows.describe().layer_groups[0].window, 100);
    EXPECT_EQ(pool.describe().block_head_dim, 64u);
    const auto seq = pool.create_sequence();
    const auto plan = pool.create_plan();
    std::vector<float> k(5 * 2 * 48, 0.5f), v(5 * 2 * 32, 0.25f), out(v.size());
    auto step = plan.begin(seq, 5);
    step.append(0, ta::View(k.data(), 5, 2, 48), ta::View(v.data(), 5, 2, 32));
    step.attend(0, ta::View(k.data(), 5, 2, 48), ta::View(out.data(), 5, 2, 32));
    step.end();
    for (const float x : out) ASSERT_NEAR(x, 0.25f, 0.01f);
}

TEST(Hpp, LayersMayHaveOtherShapes) {
    const auto context = ta::Context::create();
    const ta::LayerGroup wide[] = {{.first = 1, .kv_heads = 1, .head_dim = 128, .v_head_dim = 96}};
    const std::vector<uint8_t> bits{8, 4, 2};
    std::vector<float> offset(2 * 64 + 128, 0.125f);
    ta::PoolOptions options{.layers = 2,
                            .kv_heads = 2,
                            .head_dim = 64,
                            .k_bits = bits,
                            .v_bits = bits,
                            .budget_bytes = 1 << 20,
                            .numerics = {.k_offset = offset},
                            .layer_groups = wide};
    const auto pool = context.create_pool(options);
    const ta_kv_pool_description what = pool.describe();
    EXPECT_EQ(what.layer_groups[0].kv_heads, 1u);
    EXPECT_EQ(what.layer_groups[0].head_dim, 128u);
    EXPECT_EQ(what.layer_groups[0].v_head_dim, 96u);
    EXPECT_EQ(what.k_bits[2], 2);
    EXPECT_EQ(what.numerics->k_offset[2 * 64 + 127], 0.125f);
    const auto seq = pool.create_sequence();
    const auto plan = pool.create_plan();
    std::vector<float> k(100 * 128, 0.5f), v(100 * 128, 0.25f), q(100 * 2 * 128, 0.1f), out(q.size());
    auto step = plan.begin(seq, 100);
    step.append(0, ta::View(k.data(), 100, 2, 64), ta::View(v.data(), 100, 2, 64));
    step.attend(0, ta::View(q.data(), 100, 4, 64), ta::View(out.data(), 100, 4, 64));
    for (const float x : out) ASSERT_NEAR(x, 0.25f, 0.01f);
    EXPECT_EQ(status_of([&] { step.append(1, ta::View(k.data(), 100, 2, 64), ta::View(v.data(), 100, 2, 64)); }), TA_E_SHAPE);
    step.append(1, ta::View(k.data(), 100, 1, 128), ta::View(v.data(), 100, 1, 96));
    std::fill(out.begin(), out.end(), 0.0f);
    step.attend(1, ta::View(q.data(), 100, 2, 128), ta::View(out.data(), 100, 2, 96));
    step.end();
    for (size_t i = 0; i < 100 * 2 * 96; ++i) ASSERT_NEAR(out[i], 0.25f, 0.01f);

    const std::vector<uint8_t> one_too_many(4, 4);
    options.k_bits = one_too_many;
    EXPECT_EQ(status_of([&] { context.create_pool(options); }), TA_E_SHAPE);
    options.k_bits = bits;
    offset.push_back(0);
    options.numerics.k_offset = offset;
    EXPECT_EQ(status_of([&] { context.create_pool(options); }), TA_E_SHAPE);
}

TEST(Hpp, BlocksAreForgottenRetainedDescribed) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    feed(plan, seq, 200);
    EXPECT_EQ(seq.forget(60, 100), 64);  // of block 1, the only whole one
    EXPECT_EQ(seq.forget(0, 192), 128);  // of blocks 0 and 2
    EXPECT_EQ(seq.residency().dropped_blocks, 3u);
    EXPECT_EQ(seq.residency().device_blocks, 1u);
    EXPECT_EQ(seq.length(), 200);
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.forget(0, 201)); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.forget(-1, 1)); }), TA_E_INVALID);
    feed(plan, seq, 100);  // to the end of block 3, and 44 tokens of block 4
    seq.pin(3, 1);
    seq.retain(3, 1, {.priority = 50, .duration_ms = 1 << 30});
    EXPECT_EQ(status_of([&] { seq.retain(3, 2); }), TA_E_STATE);  // not full
    EXPECT_EQ(status_of([&] { seq.retain(3, 3); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { seq.retain(3, 1, {.priority = 64}); }), TA_E_INVALID);
    const std::vector<ta_block_info> blocks = seq.describe_blocks(2, 3);
    ASSERT_EQ(blocks.size(), 3u);
    EXPECT_EQ(blocks[0].flags, TA_BLOCK_DROPPED);
    EXPECT_EQ(blocks[0].owners, 0u);
    EXPECT_EQ(blocks[1].flags, 0);
    EXPECT_EQ(blocks[1].tier, TA_TIER_DEVICE);
    EXPECT_EQ(blocks[1].bytes, pool.stats().channel_block_bytes);
    EXPECT_EQ(blocks[1].owners, 1u);
    EXPECT_EQ(blocks[1].pins, 1u);
    EXPECT_EQ(blocks[1].priority, 50u);
    EXPECT_GT(blocks[1].retained_ms, 1 << 29);
    EXPECT_EQ(blocks[2].flags, TA_BLOCK_OPEN);
    EXPECT_EQ(blocks[2].priority, 32u);
    EXPECT_EQ(blocks[2].retained_ms, -1);
    seq.retain(3, 1);
    EXPECT_EQ(seq.describe_blocks(3, 1).at(0).priority, 32u);
    EXPECT_TRUE(seq.describe_blocks(5, 0).empty());
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.describe_blocks(3, 3)); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.locate_blocks(3, 3)); }), TA_E_INVALID);
    EXPECT_NE(seq.locate_blocks(3, 1).at(0), nullptr);
    EXPECT_EQ(status_of([&] { static_cast<void>(pool.memory(TA_TIER_DEVICE)); }), TA_E_UNSUPPORTED);
    EXPECT_EQ(status_of([&] { static_cast<void>(seq.describe_blocks(0, UINT64_MAX)); }), TA_E_INVALID);
}

TEST(Hpp, SequencesAreShifted) {
    const std::vector<double> angles(kLayers * kDim / 2, 0.0);  // which turn nothing
    const std::vector<int64_t> last{199}, before{100}, two{198, 199};
    auto options = shape();
    options.rotary = {.pairs = TA_ROTARY_ADJACENT, .channels = kDim, .angles = angles};
    const auto context = ta::Context::create();
    const auto pool = context.create_pool(options);
    const ta_kv_pool_description what = pool.describe();
    ASSERT_NE(what.rotary, nullptr);
    EXPECT_EQ(what.rotary->pairs, TA_ROTARY_ADJACENT);
    EXPECT_EQ(what.rotary->channels, kDim);
    EXPECT_EQ(what.rotary->layers, kLayers);
    EXPECT_EQ(std::vector<double>(what.rotary->angles, what.rotary->angles + angles.size()), angles);

    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    feed(plan, seq, 200);
    const auto fork = seq.fork();
    const auto ask = [&](const ta::Sequence& of, std::span<const int64_t> at) {
        auto q = numbers(kRow, 1), out = q;
        auto step = plan.begin(of, 0, 1, {.query_positions = at});
        step.attend(0, view(q), view(out));
        step.end();
        return out;
    };
    const std::vector<float> all = ask(seq, last);
    static_cast<void>(ask(seq, before));
    seq.shift(64, 64);
    EXPECT_EQ(fork.forget(64, 64), 64);
    const std::vector<float> shifted = ask(seq, last), forgotten = ask(fork, last);
    EXPECT_NE(shifted, all);
    for (size_t i = 0; i < shifted.size(); ++i) ASSERT_NEAR(shifted[i], forgotten[i], 1e-5f);
    EXPECT_EQ(seq.length(), 200);
    EXPECT_EQ(status_of([&] { ask(seq, before); }), TA_E_STATE);  // in the gap
    EXPECT_EQ(status_of([&] { ask(seq, two); }), TA_E_INVALID);   // of one query
    EXPECT_EQ(status_of([&] { seq.shift(60, 64); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { seq.shift(64, 192); }), TA_E_INVALID);

    options.rotary->angles = std::span(angles).first(kDim / 2);  // one layer for all
    EXPECT_EQ(context.create_pool(options).describe().rotary->layers, 1u);
    options.rotary->angles = std::span(angles).first(3);
    EXPECT_EQ(status_of([&] { context.create_pool(options); }), TA_E_SHAPE);
    options.rotary.reset();
    const auto plain = context.create_pool(options);
    EXPECT_EQ(plain.describe().rotary, nullptr);
    EXPECT_EQ(status_of([&] { plain.create_sequence().shift(0, 0); }), TA_E_UNSUPPORTED);
}

TEST(Hpp, DraftsAreKeptInPart) {
    const auto pool = ta::Context::create().create_pool(shape());
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence(), other = pool.create_sequence();
    const std::vector<int32_t> tree{-1, 0, 0, -1, 0};
    const ta::StepOptions options{.wait_ms = -1, .drafts = TA_ON, .tree_parent = tree};
    EXPECT_EQ(status_of([&] { plan.begin(seq, 2, -1, options); }), TA_E_INVALID);  // five parents
    auto step = plan.begin({{seq, 3}, {other, 2}}, options);
    auto kv = numbers(5 * kRow, 1);
    for (uint32_t layer = 0; layer < kLayers; ++layer) step.append(layer, view(kv), view(kv));
    EXPECT_EQ(status_of([&] { step.end(std::array{1}); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { step.end(); }), TA_E_INVALID);  // no chain
    step.end(std::array{3, 0});                               // the first token and its second child
    EXPECT_EQ(seq.length(), 2);
    EXPECT_EQ(other.length(), 0);
}

TEST(Hpp, DenseMergedCalibrated) {
    const auto context = ta::Context::create();
    auto q = numbers(8 * kRow, 1), k = numbers(32 * kRow, 2), v = numbers(32 * kRow, 3), out = q, half = q, other = q;
    std::vector<float> lse(16), half_lse(16), other_lse(16);
    const ta::DenseOptions full{.attend = {.mask = TA_MASK_FULL}};
    context.attend_dense(view(q), view(k), view(v), view(out), lse.data(), full);
    const auto part = [&](std::vector<float>& x, int64_t first) {
        return ta::View<const float>(x.data() + first * kRow, 16, kHeads, kDim);
    };
    context.attend_dense(view(q), part(k, 0), part(v, 0), view(half), half_lse.data(), full);
    context.attend_dense(view(q), part(k, 16), part(v, 16), view(other), other_lse.data(), full);
    auto merged = q;
    const std::array<ta::Input, 2> parts{view(half), view(other)};
    const std::array<const float*, 2> lses{half_lse.data(), other_lse.data()};
    context.merge_states(parts, lses, view(merged));
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(merged[i], out[i], 0.02f);
    EXPECT_EQ(status_of([&] { context.merge_states(parts, {}, view(merged)); }), TA_E_INVALID);

    const auto calibrator = context.create_calibrator(1, kHeads, kDim);
    calibrator.observe(0, view(k), view(v));
    const auto map = calibrator.finish(1);
    EXPECT_EQ(map.k_bits[0] + map.k_bits[1], 6);
    EXPECT_EQ(map.v_priority.size(), 2u);
    constexpr float kNever = std::numeric_limits<float>::infinity();
    const std::vector<float> k_costs{0, 3, 4, kNever, 0, 1}, v_costs{1, 0, 4, 2, 1, 0};
    const auto chosen = calibrator.choose(k_costs, v_costs, 1 << 30);
    EXPECT_EQ(chosen.k_bits, (std::vector<uint8_t>{8, 4}));
    EXPECT_EQ(chosen.v_bits, (std::vector<uint8_t>{4, 2}));
    EXPECT_EQ(status_of([&] { calibrator.choose(k_costs, v_costs, 1); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { calibrator.choose({}, v_costs, 1 << 30); }), TA_E_INVALID);

    const std::array<ta::LayerGroup, 1> groups{{{.first = 1, .kv_heads = 1, .head_dim = 128}}};
    ta::PoolOptions uneven{.layers = 2, .kv_heads = 2, .head_dim = 64, .budget_bytes = 1 << 20, .layer_groups = groups};
    const std::vector<float> costs(size_t{3} * 3);
    const auto least = context.create_calibrator(uneven).choose(costs, costs, 1 << 30);
    EXPECT_EQ(least.k_bits, (std::vector<uint8_t>{2, 2, 2}));
    uneven.k_bits = least.k_bits;
    EXPECT_NO_THROW(context.create_pool(uneven));
    uneven.head_dim = 20;
    EXPECT_EQ(status_of([&] { context.create_calibrator(uneven); }), TA_E_UNSUPPORTED);
}

}  // namespace
}  // namespace hpp_tests
