// batch_invariant on a CPU: a token's results have the same bits in a decode, among drafts and in chunks, whatever else is in the step.
#include "abi/batch_invariant.h"

namespace ta::testing {
namespace {

using Texts = InvariantTexts<Tensor, HostFloats>;

class BatchInvariant : public ::testing::TestWithParam<InvariantCase> {};

TEST_P(BatchInvariant, TokensHaveTheSameBitsInEveryStep) {
    const Context context = make_context(1), threads = make_context(3);
    Texts texts(context, GetParam());
    walk_all(texts);
    // With threads, and in tiers that hold less than the texts.
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{1} << 20;
    tiers.disk_bytes = uint64_t{64} << 20;
    Texts tiered(threads, GetParam(), &tiers, uint64_t{2} << 20);
    tiered.book = texts.book;
    if (!HasFatalFailure()) tiered.walk(6, 50, 200, false);
}
INSTANTIATE_TEST_SUITE_P(All, BatchInvariant, ::testing::ValuesIn(invariant_cases(128)),
                         [](const auto& of) { return std::string(of.param.name); });

// Attention is as good as without: what a decode gives.
TEST(BatchInvariantAlone, ADecodeOfOpenBlocksIsThatOfAnyPool) {
    InvariantCase c{"plain", {1, 2, 64, 2, false}, 4, {}, {60}};
    const Context context = make_context(1);
    Texts texts(context, c);
    texts.walk(1, 100, 1, true);
    auto numerics = sized<ta_numerics>();
    numerics.k_granularity = numerics.v_granularity = TA_GRANULARITY_TOKEN;
    numerics.k_turning = TA_OFF;
    const KvPool pool = make_pool(context, pool_options(1, 2, 64, 4, &numerics));
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    int compared = 0;
    for (int64_t t = 0; t < 60; ++t) {
        const DraftResult r = open_step(c.shape, plan, {seq}, {{{uint64_t(t), t}}}, nullptr);
        end_step(plan);
        const auto at = texts.book.find({0, t, 0});
        if (at == texts.book.end()) continue;
        EXPECT_TRUE((Texts::Result{r.out[0], r.lse[0]} == at->second)) << t;
        ++compared;
    }
    EXPECT_GT(compared, 30);
}

TEST(BatchInvariantAlone, WhatItCannotDoIsRefused) {
    const Context context = make_context(1);
    auto numerics = sized<ta_numerics>();
    numerics.batch_invariant = TA_ON;
    const KvPool pool = make_pool(context, pool_options(1, 1, 64, 4, &numerics));
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    const int32_t three = 3, siblings[] = {-1, 0, 0}, chain[] = {-1, 0, 1};
    auto how = sized<ta_step_options>();
    how.drafts = TA_ON;
    how.tree_parent = siblings;
    ta_error err;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &three, nullptr, &how, &err), TA_E_UNSUPPORTED);
    EXPECT_EQ(err.argument, 5);
    EXPECT_NE(std::string(err.message).find("batch_invariant"), std::string::npos) << err.message;
    how.tree_parent = chain;
    require(ta_plan_begin(plan.get(), 1, &seq, &three, nullptr, &how, &err), err);
    Random random(1);
    Tensor k(random.normals(3 * 64), 3, 1, 64), v(random.normals(3 * 64), 3, 1, 64), out(3, 1, 64);
    append(plan, 0, k, v);
    auto options = sized<ta_attend_options>();
    options.mask = TA_MASK_FULL;
    EXPECT_EQ(ta_attend(plan.get(), 0, k.view(), out.view(), nullptr, &options, &err), TA_E_UNSUPPORTED);
    EXPECT_EQ(err.argument, 5);
    EXPECT_TRUE(out.all_poison());
}

}  // namespace
}  // namespace ta::testing
