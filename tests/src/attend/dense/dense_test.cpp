// ta_attend_dense against float64. Inputs that INT8 holds exactly, the exact exponential and 16-bit P show whether the right
// keys are attended to; random inputs show what each variant's quantization costs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "support/data.h"
#include "support/exact_attention.h"
#include "support/handles.h"

namespace ta::testing {
namespace {

struct Item {
    int64_t n_query, n_keys;
};

struct Problem {
    ta_dense_variant variant = TA_DENSE_INT8_PAGE;
    ta_granularity v_granularity = TA_GRANULARITY_DEFAULT;
    int64_t q_heads = 4, kv_heads = 2, head_dim = 64;
    std::vector<Item> items;
    AttentionRules rules;
    ta_dtype dtype = TA_DTYPE_F32;
    Layout layout = Layout::kPlain;
    bool offsets = true;  // false: let the call split evenly
    uint64_t seed = 1;
};

// Rows of integers up to `levels`, each with one of that magnitude, times 2^-6.
std::vector<float> exact_rows(Random& random, int64_t rows, int64_t d, int levels) {
    std::vector<float> x;
    x.reserve(size_t(rows * d));
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t largest = random.below(d);
        for (int64_t c = 0; c < d; ++c)
            x.push_back(float(c == largest ? (random.chance(50) ? levels : -levels) : random.between(-levels, levels)) *
                        0x1p-6f);
    }
    return x;
}

std::vector<float> rows_of(const std::vector<float>& x, int64_t first, int64_t n, int64_t row) {
    return {x.begin() + first * row, x.begin() + (first + n) * row};
}

const Context& context() {
    static const Context c = make_context(2);
    return c;
}

void check_exact(const Problem& p) {
    Random random(p.seed);
    const int levels = p.variant == TA_DENSE_INT8_PAGE ? 119 : 127;
    std::vector<int64_t> q_offsets = {0}, k_offsets = {0};
    for (const Item& item : p.items) {
        q_offsets.push_back(q_offsets.back() + item.n_query);
        k_offsets.push_back(k_offsets.back() + item.n_keys);
    }
    const int64_t n_query = q_offsets.back(), n_keys = k_offsets.back(), row = p.kv_heads * p.head_dim,
                  q_row = p.q_heads * p.head_dim;
    const std::vector<float> q_values = exact_rows(random, n_query * p.q_heads, p.head_dim, levels);
    const std::vector<float> k_values = exact_rows(random, n_keys * p.kv_heads, p.head_dim, levels);
    std::vector<float> v_values = exact_rows(random, n_keys * p.kv_heads, p.head_dim, levels);
    for (float& x : v_values) x = std::fabs(x);  // means that do not vanish
    Tensor q(q_values, n_query, p.q_heads, p.head_dim, p.dtype, p.layout),
        out(n_query, p.q_heads, p.head_dim, p.dtype, p.layout);
    Tensor k(k_values, n_keys, p.kv_heads, p.head_dim, p.dtype, p.layout),
        v(v_values, n_keys, p.kv_heads, p.head_dim, p.dtype, p.layout);
    std::vector<float> lse(size_t(n_query * p.q_heads) + 1, -777.0f);
    auto attend = sized<ta_attend_options>();
    attend.mask = p.rules.causal ? TA_MASK_CAUSAL : TA_MASK_FULL;
    attend.scale = float(p.rules.scale);
    attend.softcap = float(p.rules.softcap);
    attend.window = p.rules.window;
    attend.alibi_slopes = p.rules.alibi_slopes;
    attend.sinks = p.rules.sinks;
    attend.exp = TA_EXP_EXACT;
    attend.p = TA_P_U16;
    auto options = sized<ta_dense_options>();
    options.variant = p.variant;
    options.v_granularity = p.v_granularity;
    options.attend = &attend;
    options.batch = uint32_t(p.items.size());
    if (p.offsets) {
        options.q_offsets = q_offsets.data();
        options.k_offsets = k_offsets.data();
    }
    ta_error err;
    require(ta_attend_dense(context().get(), q.view(), k.view(), v.view(), out.view(), lse.data(), &options, &err), err);
    EXPECT_TRUE(out.gaps_poison());
    EXPECT_EQ(lse.back(), -777.0f);
    const std::vector<float> got = out.values();
    for (size_t b = 0; b < p.items.size(); ++b) {
        const AttentionShape shape{p.items[b].n_query, p.items[b].n_keys, p.q_heads, p.kv_heads, p.head_dim};
        const std::vector<float> qb = rows_of(q_values, q_offsets[b], shape.n_query, q_row),
                                 kb = rows_of(k_values, k_offsets[b], shape.n_keys, row),
                                 vb = rows_of(v_values, k_offsets[b], shape.n_keys, row);
        const Attention exact = exact_attention(shape, p.rules, qb.data(), kb.data(), vb.data());
        const double rounding = p.dtype == TA_DTYPE_F32 ? 0.0 : p.dtype == TA_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
        for (size_t i = 0; i < exact.out.size(); ++i) {
            const double x = got[size_t(q_offsets[b] * q_row) + i];
            ASSERT_NEAR(x, exact.out[i], 1.5e-4 + rounding * std::fabs(exact.out[i]))
                << "variant " << p.variant << ", seed " << p.seed << ", item " << b << " of " << shape.n_query << " x "
                << shape.n_keys << ", query " << int64_t(i) / q_row << ", channel " << int64_t(i) % q_row;
        }
        for (size_t i = 0; i < exact.lse.size(); ++i) {
            const float x = lse[size_t(q_offsets[b] * p.q_heads) + i];
            if (std::isinf(exact.lse[i])) {
                ASSERT_EQ(x, -std::numeric_limits<float>::infinity());
            } else {
                ASSERT_NEAR(x, exact.lse[i], 3e-5 + 1e-6 * std::fabs(exact.lse[i])) << "lse of item " << b << ", row " << i;
            }
        }
    }
}

const std::vector<ta_dense_variant> kVariants = {TA_DENSE_INT8_PAGE, TA_DENSE_INT_FLASH, TA_DENSE_INT_FLASH_HALF};

TEST(Dense, RaggedBatchesOfEveryVariant) {
    for (ta_dense_variant variant : kVariants) {
        for (ta_granularity v : {TA_GRANULARITY_DEFAULT, TA_GRANULARITY_TOKEN, TA_GRANULARITY_PAGE, TA_GRANULARITY_TENSOR}) {
            for (const bool causal : {true, false}) {
                Problem p;
                p.variant = variant;
                p.v_granularity = v;
                p.rules.causal = causal;
                p.items = {{1, 1}, {0, 70}, {130, 130}, {5, 300}, {3, 64}, {7, 0}, {0, 0}, {70, 65}, {1, 129}};
                p.seed = uint64_t(variant) * 10 + uint64_t(v);
                check_exact(p);
            }
        }
    }
}

TEST(Dense, RowsThatSeeNothing) {
    const float sinks[] = {0.5f, -2.0f, 3.0f, 0.0f};
    for (ta_dense_variant variant : kVariants) {
        for (const float* sink : {static_cast<const float*>(nullptr), sinks}) {
            Problem p;
            p.variant = variant;
            p.rules.sinks = sink;
            p.items = {{100, 10}, {5, 0}, {1, 0}, {300, 64}, {65, 64}};
            check_exact(p);
            p.rules.window = 3;
            check_exact(p);
            p.rules.causal = false;
            check_exact(p);
        }
    }
}

TEST(Dense, WindowsOfQueriesBeforeTheFirstKey) {
    for (int64_t window : {40, 64, 65, 102, 103, 140}) {
        Problem p;
        p.rules.causal = false;
        p.rules.window = window;
        p.items = {{143, 41}};
        check_exact(p);
    }
}

TEST(Dense, NothingAtAll) {
    Problem p;
    p.items = {{0, 0}};
    check_exact(p);
    p.items = {{0, 5}};
    check_exact(p);
    p.offsets = false;
    p.items = {{0, 0}, {0, 0}, {0, 0}};
    check_exact(p);
}

TEST(Dense, EvenSplitsNeedNoOffsets) {
    for (ta_dense_variant variant : kVariants) {
        Problem p;
        p.variant = variant;
        p.offsets = false;
        p.items = {{17, 90}, {17, 90}, {17, 90}};
        check_exact(p);
        p.items = {{40, 40}};
        check_exact(p);
    }
}

TEST(Dense, HeadsDimsTypesAndStrides) {
    uint64_t seed = 100;
    for (int64_t d : {64, 96, 128, 256}) {
        for (const auto& [q_heads, kv_heads] : {std::pair<int64_t, int64_t>{1, 1}, {16, 1}, {10, 2}, {3, 3}}) {
            Problem p;
            p.variant = kVariants[seed % 3];
            p.q_heads = q_heads;
            p.kv_heads = kv_heads;
            p.head_dim = d;
            p.dtype = kDtypes[seed % 3];
            p.layout = kLayouts[seed % 4];
            p.seed = ++seed;
            p.items = {{1, 150}, {33, 70}};
            check_exact(p);
        }
    }
}

TEST(Dense, MasksWindowsAndBiases) {
    const float slopes[] = {0.5f, 0.0f, -0.03f, 0.01f}, sinks[] = {1.0f, -3.0f, 8.0f, 0.0f};
    Random random(6);
    for (int i = 0; i < 60; ++i) {
        Problem p;
        p.variant = random.pick(kVariants);
        p.rules.causal = random.chance(50);
        p.rules.window = random.pick<int64_t>({0, 1, 2, 63, 64, 65, 1000, INT64_MAX});
        p.rules.softcap = random.pick<double>({0.0, 2.0, 30.0});
        p.rules.scale = random.pick<double>({0.0, 0.25});
        if (random.chance(40)) p.rules.alibi_slopes = slopes;
        if (random.chance(40)) p.rules.sinks = sinks;
        p.seed = 200 + uint64_t(i);
        for (int64_t n = random.between(1, 3); n > 0; --n) p.items.push_back({random.between(0, 150), random.between(0, 300)});
        check_exact(p);
        if (::testing::Test::HasFailure()) return;
    }
}

double error_of(ta_dense_variant variant, const AttentionData& data, const Attention& exact,
                const ta_attend_options* attend = nullptr) {
    const AttentionShape& s = data.shape;
    const ta_tensor q = view_of(data.q.data(), s.n_query, s.q_heads, s.head_dim),
                    k = view_of(data.k.data(), s.n_keys, s.kv_heads, s.head_dim),
                    v = view_of(data.v.data(), s.n_keys, s.kv_heads, s.head_dim);
    std::vector<float> result(data.q.size());
    const ta_tensor out = view_of(result.data(), s.n_query, s.q_heads, s.head_dim);
    auto options = sized<ta_dense_options>();
    options.variant = variant;
    options.attend = attend;
    ta_error err;
    require(ta_attend_dense(context().get(), &q, &k, &v, &out, nullptr, &options, &err), err);
    return relative_l2(std::span<const float>(result), exact.out);
}

TEST(Dense, ErrorsOfTheVariants) {
    std::printf("Error of O against float64 (%%), 2048 x 2048 causal, 2/1 heads, d 64\n%-10s %12s %12s %12s\n", "", "INT8_PAGE",
                "INT_FLASH", "HALF");
    for (const char* name : {"normal", "uniform", "flat", "peaky"}) {
        const AttentionShape shape{2048, 2048, 2, 1, 64};
        AttentionData data = make_data(name[0] == 'f'   ? DataKind::kFlat
                                       : name[0] == 'p' ? DataKind::kPeaky
                                                        : DataKind::kNormal,
                                       shape, 21);
        if (name[0] == 'u') {
            Random random(22);
            for (auto* x : {&data.q, &data.k, &data.v}) {
                for (float& value : *x) value = float(random.uniform(-0.5, 0.5));
            }
        }
        const Attention exact = exact_attention(shape, {}, data.q.data(), data.k.data(), data.v.data());
        const double page = error_of(TA_DENSE_INT8_PAGE, data, exact), full = error_of(TA_DENSE_INT_FLASH, data, exact),
                     half = error_of(TA_DENSE_INT_FLASH_HALF, data, exact);
        std::printf("%-10s %12.3f %12.3f %12.3f\n", name, 100 * page, 100 * full, 100 * half);
        EXPECT_LT(half, full) << name << ": P and V in float cost nothing more";
        // What peaks cost differs from draw to draw, by 2 to 15%.
        EXPECT_LE(full, name[0] == 'p' ? 0.20 : 0.05) << name;
        EXPECT_LE(page, name[0] == 'p' ? 0.20 : 0.05) << name;
        EXPECT_LE(half, name[0] == 'p' ? 0.16 : 0.02) << name;
    }
}

TEST(Dense, ARunningMaximumForPLosesWhatASinkLeaves) {
    const AttentionShape shape{1, 1024, 1, 1, 64};
    const AttentionData data = make_data(DataKind::kSink, shape, 33);
    const Attention exact = exact_attention(shape, {}, data.q.data(), data.k.data(), data.v.data());
    const auto error_with = [&](ta_p p) {
        auto attend = sized<ta_attend_options>();
        attend.p = p;
        return error_of(TA_DENSE_INT_FLASH, data, exact, &attend);
    };
    EXPECT_GT(error_with(TA_P_S8_127_RUNNING), 0.5) << "INT-FlashAttention as printed";
    EXPECT_LT(error_with(TA_P_S8_127), 0.2);
    EXPECT_LT(error_with(TA_P_U16), 0.2);
}

TEST(Dense, SaturateReplacesWhatRejectRefuses) {
    Random random(44);
    std::vector<float> values = random.normals(64 * 64);
    values[100] = std::numeric_limits<float>::infinity();
    values[200] = std::numeric_limits<float>::quiet_NaN();
    Tensor good(random.normals(64 * 64), 64, 1, 64), bad(values, 64, 1, 64), out(64, 1, 64);
    auto options = sized<ta_dense_options>();
    for (int place = 0; place < 3; ++place) {
        const auto call = [&](ta_nonfinite how) {
            options.nonfinite = how;
            return ta_attend_dense(context().get(), place == 0 ? bad.view() : good.view(),
                                   place == 1 ? bad.view() : good.view(), place == 2 ? bad.view() : good.view(), out.view(),
                                   nullptr, &options, nullptr);
        };
        EXPECT_EQ(call(TA_NONFINITE_DEFAULT), TA_E_NONFINITE);
        EXPECT_EQ(call(TA_NONFINITE_REJECT), TA_E_NONFINITE);
        for (ta_dense_variant variant : kVariants) {
            options.variant = variant;
            EXPECT_EQ(call(TA_NONFINITE_SATURATE), TA_OK);
            for (float x : out.values()) ASSERT_TRUE(std::isfinite(x)) << place << ", variant " << variant;
        }
        options.variant = TA_DENSE_INT8_PAGE;
    }
}

TEST(Dense, NamesTheSequenceOfAValueThatIsNotFinite) {
    Random random(45);
    std::vector<float> values = random.normals(6 * 64);
    values[2 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
    Tensor good(random.normals(6 * 64), 6, 1, 64), bad(values, 6, 1, 64), out(6, 1, 64);
    const int64_t offsets[] = {0, 2, 2, 6};  // the second has no tokens
    auto options = sized<ta_dense_options>();
    options.batch = 3;
    options.q_offsets = options.k_offsets = offsets;
    for (int place = 0; place < 3; ++place) {
        ta_error err;
        EXPECT_EQ(ta_attend_dense(context().get(), place == 0 ? bad.view() : good.view(), place == 1 ? bad.view() : good.view(),
                                  place == 2 ? bad.view() : good.view(), out.view(), nullptr, &options, &err),
                  TA_E_NONFINITE);
        EXPECT_EQ(err.sequence, 2) << err.message;
        EXPECT_EQ(err.token, 2) << err.message;
    }
}

TEST(Dense, SameBitsForEveryInstructionSetAndNumberOfThreads) {
    const AttentionData data = make_data(DataKind::kPeaky, {70, 700, 4, 2, 96}, 55);
    const auto run = [&](const Context& c, ta_dense_variant variant) {
        const AttentionShape& s = data.shape;
        const ta_tensor q = view_of(data.q.data(), s.n_query, s.q_heads, s.head_dim),
                        k = view_of(data.k.data(), s.n_keys, s.kv_heads, s.head_dim),
                        v = view_of(data.v.data(), s.n_keys, s.kv_heads, s.head_dim);
        std::vector<float> result(data.q.size());
        const ta_tensor out = view_of(result.data(), s.n_query, s.q_heads, s.head_dim);
        auto options = sized<ta_dense_options>();
        options.variant = variant;
        ta_error err;
        require(ta_attend_dense(c.get(), &q, &k, &v, &out, nullptr, &options, &err), err);
        return result;
    };
    for (ta_dense_variant variant : kVariants) {
        const std::vector<float> expected = run(make_context(1, TA_CPU_ISA_SCALAR), variant);
        for (ta_cpu_isa isa : available_isas()) {
            for (int threads : {1, 2, 5})
                EXPECT_EQ(run(make_context(threads, isa), variant), expected) << "isa " << isa << ", " << threads << " threads";
        }
    }
}

}  // namespace
}  // namespace ta::testing
