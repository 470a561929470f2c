// TA_DENSE_DISTR against float64 attention of queries whose channels are those that stand for their groups.
#include "support/distr.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "support/data.h"
#include "support/handles.h"

namespace ta::testing {
namespace {

struct Problem {
    std::vector<AttentionShape> items;
    AttentionRules rules;
    int group_size = 2;
    ta_dtype dtype = TA_DTYPE_F32;
    Layout layout = Layout::kPlain;
    ta_exp exp = TA_EXP_DEFAULT;
};

struct Result {
    std::vector<float> out, lse;
    bool operator==(const Result&) const = default;
};

struct Inputs {
    std::vector<float> q, k, v;
};

Inputs make_inputs(const Problem& p, Random& random) {
    Inputs x;
    for (const AttentionShape& s : p.items) {
        const auto add = [&](std::vector<float>& to, int64_t n) {
            for (const float value : random.normals(n)) to.push_back(round_to(value, p.dtype));
        };
        add(x.q, s.n_query * s.q_heads * s.head_dim);
        add(x.k, s.n_keys * s.kv_heads * s.head_dim);
        add(x.v, s.n_keys * s.kv_heads * s.head_dim);
    }
    return x;
}

Result run(const ta_context* context, const Problem& p, const Inputs& x) {
    std::vector<int64_t> q_offsets = {0}, k_offsets = {0};
    for (const AttentionShape& s : p.items) {
        q_offsets.push_back(q_offsets.back() + s.n_query);
        k_offsets.push_back(k_offsets.back() + s.n_keys);
    }
    const AttentionShape& s = p.items.front();
    const int64_t n_query = q_offsets.back(), n_keys = k_offsets.back();
    Tensor q(x.q, n_query, s.q_heads, s.head_dim, p.dtype, p.layout), k(x.k, n_keys, s.kv_heads, s.head_dim, p.dtype, p.layout),
        v(x.v, n_keys, s.kv_heads, s.head_dim, p.dtype, p.layout), out(n_query, s.q_heads, s.head_dim, TA_DTYPE_F32, p.layout);
    Result r;
    r.lse.assign(size_t(n_query * s.q_heads) + 1, -777.0f);
    auto attend = sized<ta_attend_options>();
    attend.mask = p.rules.causal ? TA_MASK_CAUSAL : TA_MASK_FULL;
    attend.scale = float(p.rules.scale);
    attend.softcap = float(p.rules.softcap);
    attend.window = p.rules.window;
    attend.alibi_slopes = p.rules.alibi_slopes;
    attend.sinks = p.rules.sinks;
    attend.exp = p.exp;
    auto options = sized<ta_dense_options>();
    options.variant = TA_DENSE_DISTR;
    options.group_size = uint32_t(p.group_size);
    options.attend = &attend;
    options.batch = uint32_t(p.items.size());
    options.q_offsets = q_offsets.data();
    options.k_offsets = k_offsets.data();
    ta_error err;
    require(ta_attend_dense(const_cast<ta_context*>(context), q.view(), k.view(), v.view(), out.view(), r.lse.data(), &options,
                            &err),
            err);
    EXPECT_TRUE(out.gaps_poison());
    EXPECT_EQ(r.lse.back(), -777.0f);
    r.out = out.values();
    return r;
}

const Context& context() {
    static const Context c = make_context(2);
    return c;
}

void check(const Problem& p, const Inputs& x) {
    const Result got = run(context().get(), p, x);
    const AttentionShape& first = p.items.front();
    const int64_t q_row = first.q_heads * first.head_dim, row = first.kv_heads * first.head_dim;
    int64_t q_at = 0, k_at = 0;
    for (const AttentionShape& s : p.items) {
        const std::vector<float> q = distr_queries(s, x.q.data() + q_at * q_row, p.group_size);
        const Attention exact = exact_attention(s, p.rules, q.data(), x.k.data() + k_at * row, x.v.data() + k_at * row);
        double scores = 0.0;  // the largest: fp32 rounds them by so much
        for (const double lse : exact.lse) scores = std::isinf(lse) ? scores : std::max(scores, std::fabs(lse));
        const double fine = 2e-5 + 4e-6 * scores, exp_error = p.exp == TA_EXP_POLY ? 2e-4 : 0.0;
        for (size_t i = 0; i < exact.out.size(); ++i) {
            ASSERT_NEAR(got.out[size_t(q_at * q_row) + i], exact.out[i], (fine + exp_error) * (1 + std::fabs(exact.out[i])))
                << s.n_query << " x " << s.n_keys << ", groups of " << p.group_size << ", query " << int64_t(i) / q_row
                << ", channel " << int64_t(i) % q_row;
        }
        for (size_t i = 0; i < exact.lse.size(); ++i) {
            const float lse = got.lse[size_t(q_at * s.q_heads) + i];
            if (std::isinf(exact.lse[i])) {
                ASSERT_EQ(lse, -std::numeric_limits<float>::infinity());
            } else {
                ASSERT_NEAR(lse, exact.lse[i], fine + exp_error) << "lse of row " << i;
            }
        }
        q_at += s.n_query, k_at += s.n_keys;
    }
}

void check(const Problem& p, uint64_t seed) {
    Random random(seed);
    check(p, make_inputs(p, random));
}

Problem batch_of(std::initializer_list<std::pair<int64_t, int64_t>> lengths, int64_t q_heads, int64_t kv_heads, int64_t d) {
    Problem p;
    for (const auto& [n_query, n_keys] : lengths) p.items.push_back({n_query, n_keys, q_heads, kv_heads, d});
    return p;
}

TEST(Distr, RaggedBatchesOfEveryGroupSize) {
    for (const int group_size : {2, 3, 4}) {
        for (const int64_t d : {32, 64, 128}) {
            for (const bool causal : {true, false}) {
                Problem p = batch_of({{1, 1}, {0, 70}, {127, 127}, {128, 128}, {129, 300}, {63, 64}, {7, 0}, {0, 0}, {70, 65}},
                                     2, 1, d);
                p.group_size = group_size;
                p.rules.causal = causal;
                check(p, uint64_t(group_size * 1000 + d));
            }
        }
    }
}

TEST(Distr, HeadsTypesAndStrides) {
    uint64_t seed = 50;
    for (const int64_t group : {1, 4, 5, 8}) {
        Problem p = batch_of({{130, 200}, {1, 65}}, 2 * group, 2, 64);
        p.dtype = kDtypes[seed % 3];
        p.layout = kLayouts[seed % 4];
        check(p, seed++);
    }
}

TEST(Distr, MasksWindowsAndBiases) {
    const float slopes[] = {0.5f, 0.0f, -0.03f, 0.01f}, sinks[] = {1.0f, -3.0f, 8.0f, 0.0f};
    Random random(6);
    for (int i = 0; i < 40; ++i) {
        Problem p;
        p.rules.causal = random.chance(50);
        p.rules.window = random.pick<int64_t>({0, 1, 2, 63, 64, 65, 1000, INT64_MAX});
        p.rules.softcap = random.pick<double>({0.0, 2.0, 30.0});
        p.rules.scale = random.pick<double>({0.0, 0.25});
        p.exp = random.pick<ta_exp>({TA_EXP_DEFAULT, TA_EXP_EXACT, TA_EXP_POLY});
        p.group_size = random.pick<int>({2, 3, 4});
        if (random.chance(40)) p.rules.alibi_slopes = slopes;
        if (random.chance(40)) p.rules.sinks = sinks;
        for (int64_t n = random.between(1, 3); n > 0; --n)
            p.items.push_back({random.between(0, 150), random.between(0, 300), 4, 2, 32});
        check(p, 200 + uint64_t(i));
        if (::testing::Test::HasFailure()) return;
    }
}

// Ties keep the order of channels, zeros hash alike, and columns that are alike cost nothing at all.
TEST(Distr, ColumnsThatAreAlike) {
    Problem p = batch_of({{130, 150}}, 2, 1, 64);
    const AttentionShape& s = p.items.front();
    Random random(7);
    Inputs x = make_inputs(p, random);
    for (const int kind : {0, 1, 2}) {
        for (size_t i = 0; i < x.q.size(); ++i) {
            if (kind == 0) x.q[i] = x.q[i / 64 * 64];  // all columns alike
            if (kind == 1) x.q[i] = 0.0f;
            if (kind == 2) x.q[i] = i % 64 < 32 ? 1.0f : -1.0f;  // two kinds of columns
        }
        for (const int group_size : {2, 3, 4}) {
            p.group_size = group_size;
            check(p, x);
            if (group_size == 3 && kind == 2) continue;  // a group has both kinds
            const Result got = run(context().get(), p, x);
            const Attention exact = exact_attention(s, p.rules, x.q.data(), x.k.data(), x.v.data());
            for (size_t i = 0; i < exact.out.size(); ++i) ASSERT_NEAR(got.out[i], exact.out[i], 2e-5) << kind;
        }
    }
}

TEST(Distr, ValuesThatAreNotFinite) {
    Problem p = batch_of({{3, 70}}, 1, 1, 32);
    Random random(8);
    const Inputs x = make_inputs(p, random);
    for (int place = 0; place < 3; ++place) {
        Inputs bad = x;
        std::vector<float>& of = place == 0 ? bad.q : place == 1 ? bad.k : bad.v;
        of[40] = std::numeric_limits<float>::quiet_NaN();
        EXPECT_THROW(run(context().get(), p, bad), std::runtime_error);
        auto options = sized<ta_dense_options>();
        options.variant = TA_DENSE_DISTR;
        options.nonfinite = TA_NONFINITE_SATURATE;
        Tensor q(bad.q, 3, 1, 32), k(bad.k, 70, 1, 32), v(bad.v, 70, 1, 32), out(3, 1, 32), expected(3, 1, 32);
        ASSERT_EQ(ta_attend_dense(context().get(), q.view(), k.view(), v.view(), out.view(), nullptr, &options, nullptr),
                  TA_OK);
        of[40] = 0.0f;
        Tensor q0(bad.q, 3, 1, 32), k0(bad.k, 70, 1, 32), v0(bad.v, 70, 1, 32);
        ASSERT_EQ(
            ta_attend_dense(context().get(), q0.view(), k0.view(), v0.view(), expected.view(), nullptr, &options, nullptr),
            TA_OK);
        EXPECT_EQ(out.values(), expected.values());
    }
}

TEST(Distr, SameBitsForEveryInstructionSetAndNumberOfThreads) {
    for (const ta_exp exp : {TA_EXP_EXACT, TA_EXP_POLY, TA_EXP_SAS}) {
        Problem p = batch_of({{150, 300}, {33, 40}}, 4, 2, 128);
        p.exp = exp;
        p.group_size = 3;
        p.rules.softcap = exp == TA_EXP_POLY ? 5.0 : 0.0;
        Random random(9);
        const Inputs x = make_inputs(p, random);
        const Result expected = run(make_context(1, TA_CPU_ISA_SCALAR).get(), p, x);
        for (const ta_cpu_isa isa : available_isas()) {
            for (const int threads : {1, 3})
                EXPECT_EQ(run(make_context(threads, isa).get(), p, x), expected)
                    << "isa " << isa << ", " << threads << " threads";
        }
    }
}

}  // namespace
}  // namespace ta::testing
