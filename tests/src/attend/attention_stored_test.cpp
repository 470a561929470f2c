// Attention over a pool, judged by float64 over the values that are stored: does it compute what it should? Queries that INT8 holds
// exactly, no rotation, the exact exponential and 16-bit P leave errors of 1e-5: a key too many or too few shows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "support/data.h"
#include "support/exact_attention.h"
#include "support/handles.h"
#include "tests/src/attend/heads.h"

namespace ta::testing {
namespace {

ta_attend_options options_of(const AttentionRules& rules) {
    auto o = sized<ta_attend_options>();
    o.mask = rules.causal ? TA_MASK_CAUSAL : TA_MASK_FULL;
    o.scale = float(rules.scale);
    o.softcap = float(rules.softcap);
    o.window = rules.window;
    o.alibi_slopes = rules.alibi_slopes;
    o.sinks = rules.sinks;
    return o;
}

struct SequenceCase {
    int64_t old_tokens;
    int32_t n_new, n_query;
};

struct Problem {
    Heads heads;
    uint32_t bits = 4;
    uint8_t v_bits = 0;  // 0: bits
    std::vector<SequenceCase> sequences;
    AttentionRules rules;
    ta_dtype dtype = TA_DTYPE_F32;
    Layout layout = Layout::kPlain;
    bool with_k_offset = false;
    uint64_t seed = 1;

    std::string text() const {
        std::ostringstream s;
        s << "heads " << heads.q_heads << "/" << heads.kv_heads << " d" << heads.head_dim << " " << bits << "/" << int(v_bits)
          << " bits, dtype " << dtype << ", layout " << int(layout) << ", " << (rules.causal ? "causal" : "full") << ", window "
          << rules.window << ", softcap " << rules.softcap << (rules.alibi_slopes ? ", ALiBi" : "")
          << (rules.sinks ? ", sinks" : "") << (with_k_offset ? ", offset" : "") << ", seed " << seed << ":";
        for (const SequenceCase& c : sequences) s << " " << c.old_tokens << "+" << c.n_new << " q" << c.n_query;
        return s.str();
    }
};

// Rows of integers within +-119, one of them +-119, times a power of two: stage 1 holds them exactly, in every element type.
std::vector<float> exact_queries(Random& random, int64_t rows, int64_t d) {
    std::vector<float> q;
    q.reserve(size_t(rows * d));
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t largest = random.below(d);
        for (int64_t c = 0; c < d; ++c)
            q.push_back(float(c == largest ? (random.chance(50) ? 119 : -119) : random.between(-119, 119)) * 0x1p-6f);
    }
    return q;
}

class StoredValues {
  public:
    explicit StoredValues(const Context& context, const Problem& problem)
        : p_(problem), random_(problem.seed), context_(context) {
        const Heads& h = p_.heads;
        mean_ = random_.normals(2 * h.row(), 0.5f);
        auto numerics = sized<ta_numerics>();
        numerics.k_granularity = numerics.v_granularity = TA_GRANULARITY_PAGE;
        numerics.v_exponents = numerics.hadamard = TA_OFF;
        numerics.exp = TA_EXP_EXACT;
        numerics.p = TA_P_U16;
        numerics.sink_blocks = p_.seed % 2 ? 1 : -1;
        const std::vector<float> offset(mean_.begin(), mean_.begin() + h.row());
        if (p_.with_k_offset) numerics.k_offset = offset.data();
        auto options = pool_options(1, h.kv_heads, h.head_dim, p_.bits, &numerics);
        const std::vector<uint8_t> v_bits(h.kv_heads, p_.v_bits);
        if (p_.v_bits) options.v_bits = v_bits.data();
        pool_ = make_pool(context_, options);
        // Everything at 8 bits with the same scales: shows what new tokens look like before their pages close.
        twin_ = make_pool(context_, pool_options(1, h.kv_heads, h.head_dim, 8, &numerics));
    }

    void check() {
        fill();
        step();
        compare();
    }

  private:
    std::vector<float> values(int64_t tokens, size_t mean_at) {
        std::vector<float> x = random_.normals(tokens * p_.heads.row());
        for (size_t i = 0; i < x.size(); ++i) x[i] += mean_[mean_at + i % size_t(p_.heads.row())];
        return x;
    }
    Tensor tensor(const std::vector<float>& x, int64_t tokens, uint32_t heads) const {
        return {x, tokens, heads, p_.heads.head_dim, p_.dtype, p_.layout};
    }
    void append_to_both(const Plan& plan, const Plan& twin_plan, int64_t n) {
        Tensor k = tensor(values(n, 0), n, p_.heads.kv_heads),
               v = tensor(values(n, size_t(p_.heads.row())), n, p_.heads.kv_heads);
        append(plan, 0, k, v);
        append(twin_plan, 0, k, v);
        end(twin_plan);
    }

    // The old tokens, in one to three steps.
    void fill() {
        const Plan plan = make_plan(pool_), twin_plan = make_plan(twin_);
        for (const SequenceCase& c : p_.sequences) {
            seqs_.push_back(make_sequence(pool_));
            twins_.push_back(make_sequence(twin_));
            for (int64_t left = c.old_tokens; left > 0;) {
                const int64_t n = random_.chance(40) ? left : random_.between(1, left);
                begin(plan, {seqs_.back()}, {int32_t(n)});
                begin(twin_plan, {twins_.back()}, {int32_t(n)});
                append_to_both(plan, twin_plan, n);
                end(plan);
                left -= n;
            }
            old_.push_back(dequantize(pool_, seqs_.back(), 0, 0, c.old_tokens, p_.heads.row()));
        }
    }

    void step() {
        const Plan plan = make_plan(pool_), twin_plan = make_plan(twin_);
        std::vector<int32_t> n_new, n_query;
        for (const SequenceCase& c : p_.sequences) {
            n_new.push_back(c.n_new);
            n_query.push_back(c.n_query);
        }
        const int64_t total_new = std::accumulate(n_new.begin(), n_new.end(), int64_t{0});
        rows_ = std::accumulate(n_query.begin(), n_query.end(), int64_t{0});
        begin(plan, seqs_, n_new, n_query);
        begin(twin_plan, twins_, n_new, n_query);
        append_to_both(plan, twin_plan, total_new);
        q_ = exact_queries(random_, rows_ * p_.heads.q_heads, p_.heads.head_dim);
        Tensor q = tensor(q_, rows_, p_.heads.q_heads), out(rows_, p_.heads.q_heads, p_.heads.head_dim, p_.dtype, p_.layout);
        lse_.assign(size_t(rows_ * p_.heads.q_heads) + 1, -777.0f);
        const ta_attend_options options = options_of(p_.rules);
        attend(plan, 0, q, out, lse_.data(), &options);
        end(plan);
        EXPECT_EQ(lse_.back(), -777.0f) << "written beyond its end";
        EXPECT_TRUE(out.gaps_poison()) << "written between the rows";
        out_ = out.values();
    }

    void compare() {
        const Heads& h = p_.heads;
        int64_t row = 0;
        for (size_t s = 0; s < p_.sequences.size(); ++s) {
            const SequenceCase& c = p_.sequences[s];
            const Stored fresh = dequantize(twin_, twins_[s], 0, c.old_tokens, c.n_new, h.row());
            std::vector<float> k = old_[s].k, v = old_[s].v;
            k.insert(k.end(), fresh.k.begin(), fresh.k.end());
            v.insert(v.end(), fresh.v.begin(), fresh.v.end());
            const AttentionShape shape{c.n_query, c.old_tokens + c.n_new, h.q_heads, h.kv_heads, h.head_dim};
            const Attention exact = exact_attention(shape, p_.rules, q_.data() + row * h.q_row(), k.data(), v.data());
            float largest = 0.0f;
            for (float x : v) largest = std::max(largest, std::fabs(x));
            const double rounding = p_.dtype == TA_DTYPE_F32 ? 0.0 : p_.dtype == TA_DTYPE_F16 ? 0x1p-11 : 0x1p-8;
            size_t worst = 0;
            double worst_excess = -1.0;
            for (size_t i = 0; i < exact.out.size(); ++i) {
                const double error = std::fabs(double(out_[size_t(row * h.q_row()) + i]) - exact.out[i]);
                const double excess = error - (4e-5 * double(largest) + rounding * std::fabs(exact.out[i]));
                if (excess > worst_excess || std::isnan(error)) {
                    worst_excess = std::isnan(error) ? 1e30 : excess;
                    worst = i;
                }
            }
            const int64_t d = h.head_dim;
            EXPECT_LE(worst_excess, 0.0) << p_.text() << "\nout of sequence " << s << ", query " << int64_t(worst) / h.q_row()
                                         << ", head " << int64_t(worst) / d % h.q_heads << ", channel " << int64_t(worst) % d
                                         << ": " << out_[size_t(row * h.q_row()) + worst] << ", not " << exact.out[worst];
            for (size_t i = 0; i < exact.lse.size(); ++i) {
                const double got = lse_[size_t(row * h.q_heads) + i];
                ASSERT_NEAR(got, exact.lse[i], 3e-5 + 1e-6 * std::fabs(exact.lse[i]))
                    << p_.text() << "\nlse of sequence " << s << ", row " << i;
            }
            row += c.n_query;
        }
    }

    const Problem p_;
    Random random_;
    const Context& context_;
    std::vector<float> mean_, q_, out_, lse_;
    KvPool pool_, twin_;
    std::vector<ta_seq> seqs_, twins_;
    std::vector<Stored> old_;
    int64_t rows_ = 0;
};

void check(const Problem& problem) {
    static const Context context = make_context(2);
    SCOPED_TRACE(problem.text());
    StoredValues(context, problem).check();
}

class Lengths : public ::testing::TestWithParam<int64_t> {};

TEST_P(Lengths, AttendToWhatIsStored) {
    const int64_t n = GetParam();
    const std::vector<SequenceCase> steps = {
        {n, 0, int32_t(std::min<int64_t>(n, 1))},
        {n, 1, 1},
        {n, 1, 0},
        {n, 5, 5},
        {n, 64, 64},
        {n, 130, 130},
        {n, 130, 1},
        {n, 63, 2},
        {n, 0, int32_t(std::min<int64_t>(n, 33))},
        {n, 3, int32_t(std::min<int64_t>(n + 3, 70))},
    };
    uint64_t seed = uint64_t(n) * 10;
    for (const SequenceCase& step : steps) {
        Problem p;
        p.heads = n > 2000 ? Heads{1, 2, 64} : Heads{2, 4, 64};
        p.sequences = {step};
        p.seed = ++seed;
        p.bits = seed % 3 == 0 ? 2 : 4;
        check(p);
    }
}
INSTANTIATE_TEST_SUITE_P(Tokens, Lengths, ::testing::Values(0, 1, 63, 64, 65, 127, 128, 129, 1000, 4097));

TEST(StoredAttention, RaggedBatches) {
    Problem p;
    p.sequences = {{0, 0, 0},   {1, 0, 1},    {63, 1, 1},   {64, 0, 3}, {65, 64, 64}, {127, 1, 128}, {128, 130, 0},
                   {129, 0, 0}, {1000, 3, 2}, {4097, 1, 1}, {0, 7, 7},  {0, 64, 1},   {10, 54, 54},  {191, 2, 5}};
    for (uint32_t bits : {8, 4, 2}) {
        p.bits = bits;
        check(p);
        ++p.seed;
    }
}

class GroupsAndDims : public ::testing::TestWithParam<Heads> {};

TEST_P(GroupsAndDims, DecodeAndPrefill) {
    Problem p;
    p.heads = GetParam();
    p.seed = p.heads.q_heads * 1000 + p.heads.head_dim;
    for (const auto& [k_bits, v_bits] : {std::pair{4, 4}, {2, 2}, {8, 8}, {8, 4}, {2, 8}}) {
        p.bits = uint32_t(k_bits);
        p.v_bits = uint8_t(v_bits);
        p.sequences = {{200, 1, 1}, {70, 0, 2}, {129, 0, 1}};
        check(p);
        ++p.seed;
        p.sequences = {{150, 40, 40}, {64, 9, 30}};
        check(p);
        ++p.seed;
    }
}

std::vector<Heads> all_heads() {
    std::vector<Heads> all;
    for (uint32_t d : {64, 96, 128, 256}) {
        for (uint32_t group : {1, 2, 4, 5, 8, 16}) all.push_back({2, 2 * group, d});
        all.push_back({1, 8, d});
        all.push_back({3, 9, d});
    }
    return all;
}
INSTANTIATE_TEST_SUITE_P(All, GroupsAndDims, ::testing::ValuesIn(all_heads()), [](const auto& i) {
    std::ostringstream name;
    name << "q" << i.param.q_heads << "_kv" << i.param.kv_heads << "_d" << i.param.head_dim;
    return name.str();
});

TEST(StoredAttention, EveryNumberOfQueries) {
    for (int32_t n = 1; n <= 130; ++n) {
        Problem p;
        p.heads = {1, n % 3 == 0 ? 5u : n % 3 == 1 ? 1u : 4u, 64};
        p.seed = uint64_t(n);
        const int32_t n_new = n % 4 == 0 ? 0 : n % 4 == 1 ? n : n % 4 == 2 ? n / 2 : 130 - n;
        p.sequences = {{90 + n, n_new, n}};
        check(p);
        if (::testing::Test::HasFailure()) return;
    }
}

TEST(StoredAttention, MasksWindowsAndBiases) {
    const std::vector<float> slopes = {0.5f, 0.0f, -0.03f, 0.01f}, sinks = {1.0f, -3.0f, 8.0f, 0.0f};
    Random random(2024);
    for (int i = 0; i < 60; ++i) {
        Problem p;
        p.seed = 3000 + uint64_t(i);
        p.bits = random.pick<uint32_t>({8, 4, 2});
        p.v_bits = random.pick<uint8_t>({0, 8, 4, 2});
        p.rules.causal = random.chance(60);
        p.rules.window = random.pick<int64_t>({0, 0, 1, 2, 63, 64, 65, 100, 5000, INT64_MAX});
        p.rules.softcap = random.pick<double>({0.0, 0.0, 2.0, 30.0});
        p.rules.scale = random.pick<double>({0.0, 0.0, 0.25, 0.0078125});
        if (random.chance(40)) p.rules.alibi_slopes = slopes.data();
        if (random.chance(40)) p.rules.sinks = sinks.data();
        p.with_k_offset = random.chance(30);
        for (int64_t s = random.between(1, 3); s > 0; --s) {
            const int64_t old_tokens = random.between(0, 300);
            const auto n_new = int32_t(random.chance(40) ? random.between(0, 2) : random.between(0, 130));
            p.sequences.push_back({old_tokens, n_new, int32_t(random.between(0, std::min<int64_t>(old_tokens + n_new, 130)))});
        }
        check(p);
        if (::testing::Test::HasFailure()) return;
    }
}

TEST(StoredAttention, LongWindowsSkipWhatNobodySees) {
    for (int64_t window : {1, 64, 100, 1024}) {
        for (bool causal : {true, false}) {
            Problem p;
            p.heads = {1, 2, 64};
            p.rules.window = window;
            p.rules.causal = causal;
            p.seed = uint64_t(window);
            p.sequences = {{4000, 1, 1}, {3000, 70, 70}};
            check(p);
        }
    }
}

TEST(StoredAttention, TypesAndStrides) {
    uint64_t seed = 500;
    for (ta_dtype dtype : kDtypes) {
        for (Layout layout : kLayouts) {
            for (const bool offset : {false, true}) {
                Problem p;
                p.dtype = dtype;
                p.layout = layout;
                p.with_k_offset = offset;
                p.seed = ++seed;
                p.sequences = {{100, 30, 30}, {5, 1, 1}, {64, 0, 7}};
                check(p);
            }
        }
    }
}

}  // namespace
}  // namespace ta::testing
