// Context shift, and positions of queries that callers give.
#include <functional>
#include <numbers>
#include <string>
#include <utility>
#include <vector>

#include "abi/shifted.h"
#include "support/files.h"
#include "support/host_floats.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using Texts = ShiftedTexts<Tensor, HostFloats>;
using Text = Texts::Text;

class Shift : public ::testing::TestWithParam<ShiftCase> {
  protected:
    const Context context = make_context(2);
    Texts texts{context, GetParam()};
};

TEST_P(Shift, AttentionIsThatOfTheTextWithoutWhatWasTakenOut) {
    take_out_twice(texts, GetParam());
}

TEST_P(Shift, TextsOfAllLengthsBehindAGap) {
    for (const int32_t n : {1, 63, 64, 65, 127, 128, 129}) {
        Text t = texts.make_text(192);
        texts.shift(t, 64, 128);
        texts.step({{&t, n, texts.last(t, n, n)}});
        texts.step({{&t, 0, texts.last(t, 1)}});
        texts.release(t);
    }
}

TEST_P(Shift, StepsOfAllKinds) {
    texts.walk(std::hash<std::string>()(GetParam().name) % 1000, 25);
}

INSTANTIATE_TEST_SUITE_P(All, Shift, ::testing::ValuesIn(shift_cases()),
                         [](const auto& c) { return std::string(c.param.name); });

constexpr uint32_t kHeads = 2, kDim = 64;
constexpr int64_t kRow = kHeads * kDim;

// A pool of one layer, with an embedding of its own.
class ShiftOrders : public ::testing::Test {
  protected:
    void make(const std::function<void(ta_kv_pool_options&, ta_numerics&)>& change = {}) {
        auto numerics = sized<ta_numerics>();
        auto options = pool_options(1, kHeads, kDim, 8, &numerics);
        auto rotary = sized<ta_rotary>();
        rotary.channels = kDim;
        rotary.layers = 1;
        rotary.angles = angles_.data();
        options.rotary = &rotary;
        if (change) change(options, numerics);
        pool = make_pool(context_, options);
        plan = make_plan(pool);
    }
    ta_seq make_text(int32_t n) {
        const ta_seq seq = make_sequence(pool);
        add(seq, n);
        return seq;
    }
    void add(ta_seq seq, int32_t n) {
        Tensor k(random_.normals(n * kRow, 1.5f), n, kHeads, kDim), v(random_.normals(n * kRow), n, kHeads, kDim);
        begin(plan, {seq}, {n}, {0});
        append(plan, 0, k, v);
        end(plan);
    }
    // Of the same queries, at these positions.
    std::vector<float> ask(ta_seq seq, const std::vector<int64_t>& at, const ta_attend_options* options = nullptr,
                           bool with_positions = true) {
        const auto n = int32_t(at.size()), none = int32_t{0};
        std::vector<float> values;
        for (const int64_t p : at) {
            const std::vector<float> row = Random(uint64_t(p) + 1).normals(kRow);
            values.insert(values.end(), row.begin(), row.end());
        }
        Tensor q(values, n, kHeads, kDim), out(n, kHeads, kDim);
        auto how = sized<ta_step_options>();
        if (with_positions) how.query_positions = at.data();
        ta_error err;
        require(ta_plan_begin(plan.get(), 1, &seq, &none, &n, &how, &err), err);
        attend(plan, 0, q, out, nullptr, options);
        end(plan);
        return out.values();
    }
    ta_status shift(ta_seq seq, int64_t first, int64_t n, ta_error& err) {
        return ta_seq_shift(pool.get(), seq, first, n, &err);
    }
    void expect_near(const std::vector<float>& a, const std::vector<float>& b, float tolerance) {
        ASSERT_EQ(a.size(), b.size());
        for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], tolerance) << i;
    }

    std::vector<double> angles_ = std::vector<double>(kDim / 2, 0.01);
    KvPool pool;
    Plan plan;

  private:
    const Context context_ = make_context(2);
    Random random_{7};
};

TEST_F(ShiftOrders, AnEmbeddingThatTurnsNothingForgets) {
    std::fill(angles_.begin(), angles_.end(), 0.0);
    make();
    const ta_seq seq = make_text(500), fork = fork_sequence(pool, seq);
    ta_error err;
    require(shift(seq, 64, 192, err), err);
    require(ta_seq_forget(pool.get(), fork, 64, 192, nullptr, &err), err);
    expect_near(ask(seq, {499}), ask(fork, {499}), 1e-4f);  // P has 16 bits, beside other keys
    // In another order: each row is its own.
    const std::vector<float> some = ask(seq, {300, 301, 256, 499, 300}), same = ask(fork, {300, 301, 256, 499, 300});
    expect_near(some, same, 1e-2f);
    expect_near({some.begin(), some.begin() + kRow}, {some.end() - kRow, some.end()}, 1e-5f);
}

// A text that goes on and on behind a sink and over a window of its own: the ranges that are taken out are always one.
TEST_F(ShiftOrders, ATextThatGoesOnAndOnCostsWhatItHas) {
    make();
    const ta_seq seq = make_text(64 * 5);
    ta_error err;
    uint64_t used = 0;
    for (int i = 0; i < 40; ++i) {
        add(seq, 64);
        require(shift(seq, 64, 64 * (i + 1), err), err);
        const uint64_t now = stats(pool).bytes_used;
        if (i > 0) {
            EXPECT_EQ(now, used);
        }
        used = now;
    }
    EXPECT_EQ(length(pool, seq), 64 * 45);
    EXPECT_EQ(residency(pool, seq).dropped_blocks, 40u);
    // The same text, without what was between.
    const ta_seq fork = fork_sequence(pool, seq);
    require(shift(fork, 64, 64 * 40, err), err);
    EXPECT_EQ(ask(seq, {64 * 45 - 1}), ask(fork, {64 * 45 - 1}));
}

// Rows of queries at given positions are those of the same queries where a prompt has them.
TEST_F(ShiftOrders, PositionsAreThoseThatAPromptHas) {
    std::vector<int64_t> all(300), some{299, 5, 6, 7, 63, 64, 0, 250, 251, 7};
    for (size_t i = 0; i < all.size(); ++i) all[i] = int64_t(i);
    auto attention = sized<ta_attend_options>();
    for (const int64_t window : {0, 70}) {
        for (const bool of_layers : {false, true}) {
            for (const bool batch_invariant : {false, true}) {
                SCOPED_TRACE(::testing::Message() << window << of_layers << batch_invariant);
                auto group = sized<ta_layer_group>();
                group.layers = 1;
                group.window = 100;
                make([&](ta_kv_pool_options& o, ta_numerics& n) {
                    if (of_layers) o.layer_groups = &group, o.n_layer_groups = 1;
                    n.batch_invariant = batch_invariant ? TA_ON : TA_OFF;
                    n.p = TA_P_U16;
                });
                const ta_seq seq = make_sequence(pool);
                Tensor k(Random(5).normals(300 * kRow), 300, kHeads, kDim);
                std::vector<float> values;
                for (const int64_t p : all) {
                    const std::vector<float> row = Random(uint64_t(p) + 1).normals(kRow);
                    values.insert(values.end(), row.begin(), row.end());
                }
                Tensor q(values, 300, kHeads, kDim), out(300, kHeads, kDim);
                attention.window = window;
                begin(plan, {seq}, {300}, {300});
                append(plan, 0, k, k);
                attend(plan, 0, q, out, nullptr, &attention);
                // In the same step of another pool: blocks of this one are gone later.
                const std::vector<float> prompt = out.values();
                ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
                std::vector<float> asked;
                for (const int64_t p : some)
                    asked.insert(asked.end(), values.begin() + p * kRow, values.begin() + (p + 1) * kRow);
                const auto n = int32_t(some.size()), n_new = int32_t{300};
                Tensor few(asked, n, kHeads, kDim), got(n, kHeads, kDim);
                auto how = sized<ta_step_options>();
                how.query_positions = some.data();
                ta_error err;
                require(ta_plan_begin(plan.get(), 1, &seq, &n_new, &n, &how, &err), err);
                append(plan, 0, k, k);
                attend(plan, 0, few, got, nullptr, &attention);
                end(plan);
                const std::vector<float> rows = got.values();
                for (size_t i = 0; i < some.size(); ++i) {
                    const std::vector<float> expected(prompt.begin() + some[i] * kRow, prompt.begin() + (some[i] + 1) * kRow);
                    const std::vector<float> row(rows.begin() + int64_t(i) * kRow, rows.begin() + int64_t(i + 1) * kRow);
                    expect_near(row, expected, batch_invariant ? 0.0f : 2e-2f);
                }
            }
        }
    }
}

TEST_F(ShiftOrders, WhatIsShiftedMovesAndIsSuspended) {
    const Folder folder;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = 16 << 20;
    tiers.disk_folder = folder.path().c_str();
    make([&](ta_kv_pool_options& o, ta_numerics&) { o.tiers = &tiers; });
    const ta_seq seq = make_text(600);
    ta_error err;
    ta_ticket ticket = 0;
    require(ta_seq_move(pool.get(), seq, 1, 6, TA_TIER_DISK, &ticket, &err), err);  // be they on their way or not
    require(shift(seq, 128, 192, err), err);
    const std::vector<float> before = ask(seq, {599, 400});
    for (const ta_tier tier : {TA_TIER_HOST, TA_TIER_DISK}) {
        require(ta_seq_suspend(pool.get(), seq, tier, &ticket, &err), err);
        ASSERT_EQ(wait(pool, ticket).state, TA_MOVE_DONE);
        EXPECT_EQ(ask(seq, {599, 400}), before);
    }
    EXPECT_EQ(ta_seq_save(pool.get(), seq, folder.file("s").c_str(), nullptr, &err), TA_E_STATE);
    require(ta_seq_truncate(pool.get(), seq, 128, &err), err);
    require(ta_seq_save(pool.get(), seq, folder.file("s").c_str(), nullptr, &err), err);
    EXPECT_EQ(ask(seq, {127}), ask(seq, {127}, nullptr, false)) << "the gap is gone";
}

TEST_F(ShiftOrders, PositionsBehindPassedWindowsAreRefused) {
    auto group = sized<ta_layer_group>();
    group.layers = 1;
    group.window = 100;
    make([&](ta_kv_pool_options& o, ta_numerics&) { o.layer_groups = &group, o.n_layer_groups = 1; });
    const ta_seq seq = make_text(700);
    const int32_t n_new = 1, n_query = 2;
    auto how = sized<ta_step_options>();
    ta_error err;
    const auto begin_at = [&](int64_t a, int64_t b) {
        const int64_t at[] = {a, b};
        how.query_positions = at;
        return ta_plan_begin(plan.get(), 1, &seq, &n_new, &n_query, &how, &err);
    };
    EXPECT_EQ(begin_at(700, 300), TA_E_STATE);
    EXPECT_NE(std::string(err.message).find("which windows have passed"), std::string::npos) << err.message;
    ASSERT_EQ(begin_at(699, 700), TA_OK) << err.message;
    ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
}

// A pair of the largest magnitudes that are taken turns into a larger one.
TEST_F(ShiftOrders, QueriesOfTheLargestMagnitude) {
    std::fill(angles_.begin(), angles_.end(), std::numbers::pi / 4 / 128);
    make();
    const ta_seq seq = make_text(300);
    ta_error err;
    require(shift(seq, 64, 128, err), err);
    Tensor q(std::vector<float>(kRow, 0x1p56f), 1, kHeads, kDim), out(1, kHeads, kDim);
    begin(plan, {seq}, {0}, {1});
    EXPECT_EQ(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err), TA_OK) << err.message;
    ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
}

// They are counted once, however often they are turned.
TEST_F(ShiftOrders, QueriesThatAreNotFinite) {
    for (const bool saturates : {false, true}) {
        make([&](ta_kv_pool_options&, ta_numerics& n) {
            n.nonfinite = saturates ? TA_NONFINITE_SATURATE : TA_NONFINITE_REJECT;
        });
        const ta_seq seq = make_text(300);
        ta_error err;
        require(shift(seq, 64, 128, err), err);
        Tensor q(1, kHeads, kDim), out(1, kHeads, kDim);
        for (int64_t c = 0; c < kRow; ++c) q.set(0, c / kDim, c % kDim, c % 32 == 5 ? INFINITY : 0.01f);
        begin(plan, {seq}, {0}, {1});
        const ta_status status = ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err);
        EXPECT_EQ(status, saturates ? TA_OK : TA_E_NONFINITE);
        EXPECT_EQ(stats(pool).saturated_values, saturates ? 4u : 0u);
        EXPECT_EQ(out.all_poison(), !saturates);
        if (!saturates) {
            EXPECT_EQ(err.argument, 2);
        }
        ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
    }
}

TEST_F(ShiftOrders, WhatCannotBeDoneWellIsRefused) {
    using O = ta_kv_pool_options;
    using N = ta_numerics;
    auto group = sized<ta_layer_group>();
    group.layers = 1;
    group.window = 100;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 1 << 20;
    tiers.eviction = TA_EVICT_ATTENTION;
    ta_error err;
    const std::vector<std::pair<const char*, std::function<void(O&, N&)>>> pools{
        {"windows", [&](O& o, N&) { o.layer_groups = &group, o.n_layer_groups = 1; }},
        {"batch_invariant", [](O&, N& n) { n.batch_invariant = TA_ON; }},
        {"TA_EVICT_ATTENTION", [&](O& o, N&) { o.tiers = &tiers; }},
        {"options.rotary", [](O& o, N&) { o.rotary = nullptr; }},
    };
    for (const auto& [what, change] : pools) {
        make(change);
        const ta_seq seq = make_text(300);
        EXPECT_EQ(shift(seq, 64, 64, err), TA_E_UNSUPPORTED);
        EXPECT_NE(std::string(err.message).find(what), std::string::npos) << err.message;
        EXPECT_EQ(residency(pool, seq).dropped_blocks, 0u);
    }
    make();
    const ta_seq seq = make_text(300);
    require(shift(seq, 64, 128, err), err);
    // The queries of a step stand behind the gap.
    const int32_t none = 0, many = 300 - 192 + 1;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &none, &many, nullptr, &err), TA_E_STATE);
    EXPECT_EQ(err.argument, 4);
    EXPECT_EQ(err.sequence, 0);
    EXPECT_EQ(err.token, -1);
    auto how = sized<ta_step_options>();
    const int64_t at[] = {299, 191};
    const int32_t two = 2;
    how.query_positions = at;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &none, &two, &how, &err), TA_E_STATE);
    EXPECT_EQ(err.argument, 5);
    EXPECT_EQ(err.token, 1);
    EXPECT_NE(std::string(err.message).find("stands at 191; behind the sequence's gaps is 192"), std::string::npos)
        << err.message;
    const float slopes[kHeads] = {0.5f, 0.25f};
    const std::vector<std::pair<const char*, std::function<void(ta_attend_options&)>>> calls{
        {"options.mask is TA_MASK_FULL, and a sequence of the step was shifted", [](auto& a) { a.mask = TA_MASK_FULL; }},
        {"options.window is given, and a sequence of the step was shifted", [](auto& a) { a.window = 10; }},
        {"options.alibi_slopes is given, and a sequence of the step was shifted", [&](auto& a) { a.alibi_slopes = slopes; }},
    };
    for (const auto& [what, change] : calls) {
        auto options = sized<ta_attend_options>();
        change(options);
        Tensor q(Random(1).normals(kRow), 1, kHeads, kDim), out(1, kHeads, kDim);
        begin(plan, {seq}, {0}, {1});
        EXPECT_EQ(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, &options, &err), TA_E_UNSUPPORTED);
        EXPECT_STREQ(err.message, what);
        EXPECT_EQ(err.argument, 5);
        EXPECT_TRUE(out.all_poison());
        ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
    }
    auto full = sized<ta_attend_options>();
    full.mask = TA_MASK_FULL;
    const ta_seq whole = make_text(10);
    EXPECT_THROW(ask(whole, {4}, &full), std::runtime_error);
    ta_plan_abort(plan.get(), nullptr);
    // In an open step.
    begin(plan, {seq}, {1});
    EXPECT_EQ(shift(seq, 192, 64, err), TA_E_BUSY);
    ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
    require(shift(seq, 0, 0, err), err);
}

}  // namespace
}  // namespace ta::testing
