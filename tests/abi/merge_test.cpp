// ta_merge_states against float64, and what it promises of its bits.
#include <cstring>

#include "abi/merge_problem.h"
#include "support/exact_attention.h"

namespace ta::testing {
namespace {

TEST(Merge, AnyShapesTypesAndLayouts) {
    const Context context = make_context(2);
    for (const MergeShape& shape : kMergeShapes) {
        for (uint64_t seed = 0; seed < 8; ++seed) {
            SCOPED_TRACE(::testing::Message() << shape.n << " parts of [" << shape.tokens << ", " << shape.heads << ", "
                                              << shape.head_dim << "], seed " << seed);
            MergeProblem p(shape, seed);
            Tensor out = p.random_tensor();
            std::vector<float> lse(size_t(p.rows()) + 1, -777.0f);
            ta_error err;
            ASSERT_EQ(p.merge(context, out, lse.data(), &err), TA_OK) << err.message;
            p.check(out, out.view()->dtype, lse);
            EXPECT_EQ(lse.back(), -777.0f);
            EXPECT_TRUE(out.gaps_poison());
            if (HasFatalFailure()) return;
        }
    }
}

TEST(Merge, BitsDependNeitherOnKernelsThreadsNorPlace) {
    for (const MergeShape& shape : kMergeShapes) {
        MergeProblem p(shape, 7);
        for (Tensor& part : p.parts) part = Tensor(part.values(), shape.tokens, shape.heads, shape.head_dim);
        Tensor expected(shape.tokens, shape.heads, shape.head_dim);
        std::vector<float> lse(size_t(p.rows())), expected_lse(lse);
        ASSERT_EQ(p.merge(make_context(1, TA_CPU_ISA_SCALAR), expected, expected_lse.data(), nullptr), TA_OK);
        for (const ta_cpu_isa isa : available_isas()) {
            for (uint32_t place = 0; place < shape.n; ++place) {
                MergeProblem own = p;
                ta_error err;
                ASSERT_EQ(own.merge(make_context(3, isa), own.parts[place], own.lses[place].data(), &err), TA_OK)
                    << err.message;
                ASSERT_EQ(own.parts[place].values(), expected.values()) << "isa " << isa << ", in place of part " << place;
                ASSERT_EQ(own.lses[place], expected_lse);
            }
        }
    }
}

TEST(Merge, OnePartComesOutAsItWentIn) {
    const Context context = make_context(1);
    for (const ta_dtype dtype : kDtypes) {
        MergeProblem p({1, 4, 4, 64}, 3);
        Random random(5);
        p.parts[0] = Tensor(random.normals(16 * 64, 1e-6f), 4, 4, 64, dtype);
        p.lses[0] = random.normals(16, 1e30f);
        Tensor out(4, 4, 64, dtype);
        std::vector<float> lse(16);
        ASSERT_EQ(p.merge(context, out, lse.data(), nullptr), TA_OK);
        EXPECT_EQ(out.values(), p.parts[0].values());
        EXPECT_EQ(lse, p.lses[0]);
    }
}

// The largest magnitudes do not overflow on the way, and what is not finite stays in its channel.
TEST(Merge, ValuesAtTheEndOfTheirRange) {
    constexpr float kMost = std::numeric_limits<float>::max();
    MergeProblem p({2, 1, 1, 3}, 1);
    p.parts = {Tensor(std::vector<float>{kMost, kMost, 1.0f}, 1, 1, 3),
               Tensor(std::vector<float>{kMost, -kMost, kNan}, 1, 1, 3)};
    p.lses = {{3e38f}, {3e38f}};
    Tensor out(1, 1, 3);
    float lse = 0.0f;
    ASSERT_EQ(p.merge(make_context(1), out, &lse, nullptr), TA_OK);
    EXPECT_EQ(out.get(0, 0, 0), kMost);
    EXPECT_EQ(out.get(0, 0, 1), 0.0f);
    EXPECT_TRUE(std::isnan(out.get(0, 0, 2)));
    EXPECT_EQ(lse, 3e38f);
}

TEST(Merge, RefusesLseThatIsNotFinite) {
    const Context context = make_context(1);
    for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
        MergeProblem p({3, 5, 4, 64}, 2);
        p.lses[1][size_t(3 * 4 + 2)] = bad;
        Tensor out(5, 4, 64);
        std::vector<float> lse(20, -777.0f);
        ta_error err;
        EXPECT_EQ(p.merge(context, out, lse.data(), &err), TA_E_NONFINITE);
        EXPECT_NE(std::string(err.message).find("lses[1] of token 3, query head 2 is"), std::string::npos) << err.message;
        EXPECT_EQ(err.argument, 3);
        EXPECT_EQ(err.token, 3);
        EXPECT_EQ(err.head, 2);
        EXPECT_TRUE(out.all_poison());
        EXPECT_EQ(lse, std::vector<float>(20, -777.0f));
    }
}

// Attention over keys that are cut anywhere, the empty share included, merged: attention over all of them.
TEST(Merge, SharesOfTheKeysMakeTheWhole) {
    constexpr int64_t kQ = 5, kKeys = 300, kHeads = 2, kQHeads = 4, kDim = 64;
    const Context context = make_context(2);
    Random random(9);
    for (int round = 0; round < 20; ++round) {
        const std::vector<float> q = random.normals(kQ * kQHeads * kDim), k = random.normals(kKeys * kHeads * kDim, 2.0f),
                                 v = random.normals(kKeys * kHeads * kDim);
        std::vector<int64_t> cuts = {0, kKeys};
        for (int64_t n = random.below(12); n > 0; --n) cuts.push_back(random.between(0, kKeys));
        std::sort(cuts.begin(), cuts.end());
        MergeProblem p({uint32_t(cuts.size() - 1), kQ, kQHeads, kDim}, 1);
        auto attend = sized<ta_attend_options>();
        attend.mask = TA_MASK_FULL;
        auto options = sized<ta_dense_options>();
        options.variant = TA_DENSE_INT_FLASH_HALF;  // K quantized token by token: a share's as the whole's
        options.attend = &attend;
        const auto dense = [&](int64_t first, int64_t end, Tensor& out, float* lse) {
            const ta_tensor qt = view_of(q.data(), kQ, kQHeads, kDim),
                            kt = view_of(k.data() + first * kHeads * kDim, end - first, kHeads, kDim),
                            vt = view_of(v.data() + first * kHeads * kDim, end - first, kHeads, kDim);
            return ta_attend_dense(context.get(), &qt, &kt, &vt, out.view(), lse, &options, nullptr);
        };
        for (uint32_t i = 0; i < p.s.n; ++i) {
            p.parts[i] = Tensor(kQ, kQHeads, kDim);
            ASSERT_EQ(dense(cuts[i], cuts[i + 1], p.parts[i], p.lses[i].data()), TA_OK);
        }
        Tensor whole(kQ, kQHeads, kDim), merged(kQ, kQHeads, kDim);
        std::vector<float> whole_lse(kQ * kQHeads), merged_lse(whole_lse);
        ASSERT_EQ(dense(0, kKeys, whole, whole_lse.data()), TA_OK);
        ASSERT_EQ(p.merge(context, merged, merged_lse.data(), nullptr), TA_OK);
        const std::vector<float> a = merged.values(), b = whole.values();
        for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6) << i;
        for (size_t i = 0; i < merged_lse.size(); ++i)
            ASSERT_NEAR(merged_lse[i], whole_lse[i], 2e-6 * std::abs(whole_lse[i])) << i;
    }
}

}  // namespace
}  // namespace ta::testing
