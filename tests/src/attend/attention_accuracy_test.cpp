// Attention over a pool, judged by float64. Two questions, kept apart:
//  - Does attention compute what it should over the values that are stored? Queries that INT8 holds exactly, no rotation, the
//    exact exponential and 16-bit P leave errors of 1e-5: a key too many or too few shows.
//  - How far is the result from that over the values that were given? That is the price of the quantization; a table says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "support/data.h"
#include "support/exact_attention.h"
#include "support/handles.h"

namespace ta::testing {
namespace {

struct Heads {
    uint32_t kv_heads = 2, q_heads = 4, head_dim = 64;
    int64_t row() const { return int64_t(kv_heads) * head_dim; }
    int64_t q_row() const { return int64_t(q_heads) * head_dim; }
};

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

// ------------------------------------------------------------------------------------- over the values that are stored

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
    return "q" + std::to_string(i.param.q_heads) + "_kv" + std::to_string(i.param.kv_heads) + "_d" +
           std::to_string(i.param.head_dim);
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

// ------------------------------------------------------------------------------------- against the values that were given

struct PoolSettings {
    ta_numerics numerics = sized<ta_numerics>();
    uint32_t bits = 4;
    std::vector<uint8_t> map;  // of heads, for K and V; empty: bits
};

struct Results {
    std::vector<float> out, lse;
};

// A fresh pool takes the keys and values in `chunks`; then the queries attend without new tokens.
Results attend_after(const Context& context, const AttentionData& data, const PoolSettings& settings,
                     const std::vector<int64_t>& chunks, const ta_attend_options* options = nullptr) {
    const AttentionShape& s = data.shape;
    auto po = pool_options(1, uint32_t(s.kv_heads), uint32_t(s.head_dim), settings.bits, &settings.numerics);
    if (!settings.map.empty()) po.k_bits = po.v_bits = settings.map.data();
    const KvPool pool = make_pool(context, po);
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    const int64_t row = s.kv_heads * s.head_dim;
    int64_t at = 0;
    for (int64_t n : chunks) {
        begin(plan, {seq}, {int32_t(n)}, {0});
        const ta_tensor k = view_of(data.k.data() + at * row, n, s.kv_heads, s.head_dim),
                        v = view_of(data.v.data() + at * row, n, s.kv_heads, s.head_dim);
        ta_error err;
        require(ta_append(plan.get(), 0, &k, &v, &err), err);
        end(plan);
        at += n;
    }
    Results r{std::vector<float>(data.q.size()), std::vector<float>(size_t(s.n_query * s.q_heads))};
    begin(plan, {seq}, {0}, {int32_t(s.n_query)});
    const ta_tensor q = view_of(data.q.data(), s.n_query, s.q_heads, s.head_dim),
                    out = view_of(r.out.data(), s.n_query, s.q_heads, s.head_dim);
    ta_error err;
    require(ta_attend(plan.get(), 0, &q, &out, r.lse.data(), options, &err), err);
    end(plan);
    return r;
}

struct Judged {  // data and the result that it should give
    AttentionData data;
    Attention exact;
};
Judged judged(DataKind kind, const AttentionShape& shape, uint64_t seed) {
    Judged j{make_data(kind, shape, seed), {}};
    j.exact = exact_attention(shape, {}, j.data.q.data(), j.data.k.data(), j.data.v.data());
    return j;
}

double error_of(const Context& context, const Judged& j, const PoolSettings& settings) {
    const Results r = attend_after(context, j.data, settings, {j.data.shape.n_keys});
    return relative_l2(std::span<const float>(r.out), j.exact.out);
}

PoolSettings profile(ta_profile p, uint32_t bits) {
    PoolSettings s;
    s.numerics.profile = p;
    s.bits = bits;
    return s;
}

TEST(Accuracy, ErrorsOfTheProfilesAt4096Tokens) {
    const Context context = make_context(2);
    const DataKind kinds[] = {DataKind::kNormal, DataKind::kFlat, DataKind::kSink, DataKind::kPeaky};
    struct Column {
        const char* name;
        PoolSettings settings;
    };
    Column columns[] = {
        {"accurate 8", profile(TA_PROFILE_ACCURATE, 8)},   {"accurate 4", profile(TA_PROFILE_ACCURATE, 4)},
        {"accurate 4/2", profile(TA_PROFILE_ACCURATE, 4)}, {"accurate 2", profile(TA_PROFILE_ACCURATE, 2)},
        {"paper 8", profile(TA_PROFILE_PAPER, 8)},         {"paper 4", profile(TA_PROFILE_PAPER, 4)},
        {"paper 4/2", profile(TA_PROFILE_PAPER, 4)},       {"paper 2", profile(TA_PROFILE_PAPER, 2)},
    };
    columns[2].settings.map = columns[6].settings.map = {4, 2};
    std::printf("Error of O against float64 (%%), 4096 tokens, 8/2 heads, d 128. d: decode (1 query), p: 32 queries\n%-10s",
                "");
    for (const Column& c : columns) std::printf(" %13s", c.name);
    std::printf("\n");
    for (DataKind kind : kinds) {
        for (int64_t n_query : {1, 32}) {
            // On sink heads the error is that of one logit per row, the sink's: it takes more draws to tell its mean.
            std::vector<Judged> samples;
            for (int draw = 0; draw < (kind == DataKind::kSink ? 8 : 2); ++draw) {
                samples.push_back(judged(kind, {n_query, 4096, 8, 2, 128}, 40 + draw));
            }
            std::printf("%-8s %c", name_of(kind), n_query == 1 ? 'd' : 'p');
            for (const Column& c : columns) {
                double error = 0.0;
                for (const Judged& sample : samples) error += error_of(context, sample, c.settings) / double(samples.size());
                std::printf(" %13.3f", 100.0 * error);
                const double bound = c.name == std::string("accurate 8")   ? (kind == DataKind::kPeaky ? 0.06 : 0.02)
                                     : c.name != std::string("accurate 4") ? 10.0
                                     : kind == DataKind::kFlat             ? 0.015
                                     : kind == DataKind::kSink             ? 0.03
                                                                           : 0.25;
                EXPECT_LE(error, bound) << name_of(kind) << ", " << c.name;
            }
            std::printf("\n");
        }
    }
}

// At 8 bits, where those of 8 bits are a large part of the error.
TEST(Accuracy, WideQueriesInDecode) {
    const Context context = make_context(2);
    std::printf("Error of O against float64 (%%), 8 bits, 4096 tokens, 8/2 heads, d 128, 1 query\n");
    for (DataKind kind : {DataKind::kNormal, DataKind::kFlat, DataKind::kSink, DataKind::kPeaky}) {
        constexpr int kDraws = 12;
        double error[2] = {};
        for (int draw = 0; draw < kDraws; ++draw) {
            const Judged sample = judged(kind, {1, 4096, 8, 2, 128}, 140 + uint64_t(draw));
            for (const bool wide : {false, true}) {
                PoolSettings settings = profile(TA_PROFILE_ACCURATE, 8);
                settings.numerics.q_bits = wide ? 15 : 8;
                error[wide] += error_of(context, sample, settings) / kDraws;
            }
        }
        std::printf("%-8s q_bits 8: %.3f, 15: %.3f\n", name_of(kind), 100.0 * error[0], 100.0 * error[1]);
        EXPECT_LE(error[1], 0.97 * error[0]) << name_of(kind);
    }
}

// Every setting changed alone: what it is worth, and that none of them breaks anything.
TEST(Accuracy, EachSettingAlone) {
    const Context context = make_context(2);
    struct Change {
        const char* name;
        void (*apply)(ta_numerics&);
    };
    const Change accurate[] = {
        {"as it is", [](ta_numerics&) {}},
        {"k_granularity TOKEN", [](ta_numerics& n) { n.k_granularity = TA_GRANULARITY_TOKEN; }},
        {"v_granularity TOKEN", [](ta_numerics& n) { n.v_granularity = TA_GRANULARITY_TOKEN; }},
        {"open_scale UNIVERSAL", [](ta_numerics& n) { n.open_scale = TA_OPEN_SCALE_UNIVERSAL; }},
        {"v_exponents off", [](ta_numerics& n) { n.v_exponents = TA_OFF; }},
        {"fractional_zero off", [](ta_numerics& n) { n.fractional_zero = TA_OFF; }},
        {"v_search off", [](ta_numerics& n) { n.v_search = TA_OFF; }},
        {"hadamard off", [](ta_numerics& n) { n.hadamard = TA_OFF; }},
        {"k_turning off", [](ta_numerics& n) { n.k_turning = TA_OFF; }},
        {"k_search off", [](ta_numerics& n) { n.k_search = TA_OFF; }},
        {"unit_slope off", [](ta_numerics& n) { n.unit_slope = TA_OFF; }},
        {"q_bits 8", [](ta_numerics& n) { n.q_bits = 8; }},
        {"no sink block", [](ta_numerics& n) { n.sink_blocks = -1; }},
        {"2 sink blocks", [](ta_numerics& n) { n.sink_blocks = 2; }},
        {"exp EXACT", [](ta_numerics& n) { n.exp = TA_EXP_EXACT; }},
        {"exp SAS", [](ta_numerics& n) { n.exp = TA_EXP_SAS; }},
        {"P U8", [](ta_numerics& n) { n.p = TA_P_U8; }},
        {"P U16", [](ta_numerics& n) { n.p = TA_P_U16; }},
        {"P S8_127", [](ta_numerics& n) { n.p = TA_P_S8_127; }},
        {"P S8_119", [](ta_numerics& n) { n.p = TA_P_S8_119; }},
        {"P S8_127_RUNNING", [](ta_numerics& n) { n.p = TA_P_S8_127_RUNNING; }},
        {"another seed", [](ta_numerics& n) { n.hadamard_seed = 12345; }},
    };
    const Change paper[] = {
        {"paper", [](ta_numerics&) {}},
        {"paper + v_exponents", [](ta_numerics& n) { n.v_exponents = TA_ON; }},
        {"paper + fractional_zero", [](ta_numerics& n) { n.fractional_zero = TA_ON; }},
        {"paper + v_search", [](ta_numerics& n) { n.v_search = TA_ON; }},
        {"paper + unit_slope", [](ta_numerics& n) { n.unit_slope = TA_ON; }},
        {"paper + q_bits 15", [](ta_numerics& n) { n.q_bits = 15; }},
        {"paper + hadamard", [](ta_numerics& n) { n.hadamard = TA_ON; }},
        {"paper + sink block", [](ta_numerics& n) { n.sink_blocks = 1; }},
        {"paper + POLY", [](ta_numerics& n) { n.exp = TA_EXP_POLY; }},
        {"paper + P AUTO", [](ta_numerics& n) { n.p = TA_P_AUTO; }},
        {"paper + open TOKEN", [](ta_numerics& n) { n.open_scale = TA_OPEN_SCALE_TOKEN; }},
    };
    const AttentionShape shape{4, 2048, 8, 2, 128};
    const Judged flat = judged(DataKind::kFlat, shape, 7), sink = judged(DataKind::kSink, shape, 8),
                 peaky = judged(DataKind::kPeaky, shape, 9);
    std::printf("Error of O against float64 (%%), 4 bits, 2048 tokens, 8/2 heads, d 128, 4 queries\n%-26s %9s %9s %9s\n", "",
                "flat", "sink", "peaky");
    const auto row = [&](const Change& change, ta_profile base) {
        PoolSettings s = profile(base, 4);
        change.apply(s.numerics);
        const double errors[] = {error_of(context, flat, s), error_of(context, sink, s), error_of(context, peaky, s)};
        std::printf("%-26s %9.3f %9.3f %9.3f\n", change.name, 100 * errors[0], 100 * errors[1], 100 * errors[2]);
        for (double e : errors) EXPECT_LE(e, 1.0) << change.name;
    };
    for (const Change& c : accurate) row(c, TA_PROFILE_ACCURATE);
    for (const Change& c : paper) row(c, TA_PROFILE_PAPER);
}

// Every token's query in the step that brings the token.
std::vector<float> prefill(const Context& context, const AttentionData& data, const PoolSettings& settings,
                           const std::vector<int64_t>& chunks) {
    const AttentionShape& s = data.shape;
    const KvPool pool =
        make_pool(context, pool_options(1, uint32_t(s.kv_heads), uint32_t(s.head_dim), settings.bits, &settings.numerics));
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    std::vector<float> out(data.q.size());
    const int64_t row = s.kv_heads * s.head_dim, q_row = s.q_heads * s.head_dim;
    int64_t at = 0;
    for (int64_t n : chunks) {
        begin(plan, {seq}, {int32_t(n)});
        const ta_tensor k = view_of(data.k.data() + at * row, n, s.kv_heads, s.head_dim),
                        v = view_of(data.v.data() + at * row, n, s.kv_heads, s.head_dim);
        const ta_tensor q = view_of(data.q.data() + at * q_row, n, s.q_heads, s.head_dim),
                        o = view_of(out.data() + at * q_row, n, s.q_heads, s.head_dim);
        ta_error err;
        require(ta_append(plan.get(), 0, &k, &v, &err), err);
        require(ta_attend(plan.get(), 0, &q, &o, nullptr, nullptr, &err), err);
        end(plan);
        at += n;
    }
    return out;
}

TEST(Accuracy, AnyChunkingOfAPrefillGivesNearlyTheSame) {
    const Context context = make_context(2);
    constexpr int64_t kTokens = 333;
    Random random(77);
    std::vector<std::vector<int64_t>> chunkings = {
        {kTokens}, std::vector<int64_t>(kTokens, 1), {64, 64, 64, 64, 64, 13}, {63, 65, 1, 64, 140}, {1, 331, 1}};
    for (int i = 0; i < 4; ++i) {
        chunkings.emplace_back();
        for (int64_t left = kTokens; left > 0; left -= chunkings.back().back())
            chunkings.back().push_back(random.between(1, std::min<int64_t>(left, 130)));
    }
    struct Bound {
        uint32_t bits;
        double error;
    };
    for (const Bound bound : {Bound{8, 0.02}, Bound{4, 0.08}, Bound{2, 0.35}}) {
        const AttentionData data = make_data(DataKind::kFlat, {kTokens, kTokens, 4, 2, 64}, 5);
        const Attention exact = exact_attention(data.shape, {}, data.q.data(), data.k.data(), data.v.data());
        for (const std::vector<int64_t>& chunks : chunkings) {
            const std::vector<float> out = prefill(context, data, profile(TA_PROFILE_ACCURATE, bound.bits), chunks);
            EXPECT_LE(relative_l2(std::span<const float>(out), exact.out), bound.error)
                << bound.bits << " bits, " << chunks.size() << " chunks";
        }
    }
    // A chunk sees its own tokens at 8 bits, whatever the pool's bits are.
    const AttentionData data = make_data(DataKind::kFlat, {130, 130, 4, 2, 64}, 6);
    const Attention exact = exact_attention(data.shape, {}, data.q.data(), data.k.data(), data.v.data());
    for (uint32_t bits : {4, 2}) {
        const std::vector<float> out = prefill(context, data, profile(TA_PROFILE_ACCURATE, bits), {130});
        EXPECT_LE(relative_l2(std::span<const float>(out), exact.out), 0.02) << bits;
    }
}

TEST(Accuracy, OutlierChannelsOfKAreWhatTheOffsetTakesAway) {
    const Context context = make_context(2);
    const Judged j = judged(DataKind::kPeaky, {8, 1024, 4, 1, 128}, 3);
    std::vector<float> mean(128, 0.0f);
    for (size_t i = 0; i < j.data.k.size(); ++i) mean[i % 128] += j.data.k[i] / 1024.0f;
    PoolSettings plain = profile(TA_PROFILE_ACCURATE, 4), with_offset = plain;
    plain.numerics.hadamard = with_offset.numerics.hadamard = TA_OFF;
    with_offset.numerics.k_offset = mean.data();
    const double without = error_of(context, j, plain), with = error_of(context, j, with_offset);
    std::printf("K offset, no rotation, peaky: %.3f%% without, %.3f%% with\n", 100 * without, 100 * with);
    EXPECT_LT(with, without);
    // LSE is that of the keys that were given, not of the shifted ones.
    const Results r = attend_after(context, j.data, with_offset, {1024});
    for (size_t i = 0; i < r.lse.size(); ++i) ASSERT_NEAR(r.lse[i], j.exact.lse[i], 0.02 * std::fabs(j.exact.lse[i]) + 0.3);
}

// A token that takes most of the weight and whose V is 0, or nearly: it takes nothing but its weight from the result.
TEST(Accuracy, TokensWithoutVAddNothing) {
    const Context context = make_context(2);
    constexpr int64_t kDim = 128, kToken = 100;
    for (const float v : {0.0f, -0.0f, 1e-6f, 1e-12f}) {
        AttentionData data = make_data(DataKind::kNormal, {1, 192, 1, 1, kDim}, 3);
        for (int64_t c = 0; c < kDim; ++c) {
            data.v[size_t(kToken * kDim + c)] *= v;
            data.k[size_t(kToken * kDim + c)] = 0.75f * data.q[size_t(c)];
        }
        const Attention exact = exact_attention(data.shape, {}, data.q.data(), data.k.data(), data.v.data());
        for (uint32_t bits : {4, 2}) {
            for (const auto& chunks : {std::vector<int64_t>{192}, {70, 122}, std::vector<int64_t>(192, 1)}) {
                const Results r = attend_after(context, data, profile(TA_PROFILE_ACCURATE, bits), chunks);
                EXPECT_LE(relative_l2(std::span<const float>(r.out), exact.out), bits == 4 ? 0.3 : 0.8)
                    << bits << " bits, V times " << v << ", " << chunks.size() << " chunks";
            }
        }
    }
}

// --------------------------------------------------------------------------------------------------------- hostile values

class Hostile : public ::testing::TestWithParam<DataKind> {};

TEST_P(Hostile, ResultsStayWithinTheValues) {
    const Context context = make_context(2);
    for (ta_profile which : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        for (uint32_t bits : {8, 4, 2}) {
            for (int64_t n_query : {1, 40}) {
                SCOPED_TRACE(::testing::Message() << name_of(GetParam()) << ", profile " << which << ", " << bits << " bits, "
                                                  << n_query << " queries");
                const AttentionData data = make_data(GetParam(), {n_query, 300, 4, 2, 128}, 15);
                const Attention exact = exact_attention(data.shape, {}, data.q.data(), data.k.data(), data.v.data());
                const std::vector<int64_t> chunks =
                    n_query == 1 ? std::vector<int64_t>{300} : std::vector<int64_t>{1, 63, 100, 1, 27, 108};
                const Results r = attend_after(context, data, profile(which, bits), chunks);
                float largest = 0.0f;
                for (float x : data.v) largest = std::max(largest, std::fabs(x));
                for (float x : r.out) ASSERT_LE(std::fabs(x), 1.05f * largest);  // false for NaN too
                for (float x : r.lse) ASSERT_TRUE(std::isfinite(x));
                const double error = relative_l2(std::span<const float>(r.out), exact.out);
                switch (GetParam()) {
                    case DataKind::kZeros:
                    case DataKind::kDenormal:
                        for (float x : r.out) ASSERT_EQ(x, 0.0f);
                        for (size_t i = 0; i < r.lse.size(); ++i) ASSERT_NEAR(r.lse[i], exact.lse[i], 5e-4);  // SAS(0) = 0.9996
                        break;
                    case DataKind::kConstantChannels:
                        EXPECT_LE(error, which == TA_PROFILE_ACCURATE ? 0.012 : 0.1);
                        break;
                    case DataKind::kHuge:
                        EXPECT_LE(error, bits == 8 ? 0.08 : bits == 4 ? 0.4 : 1.2);
                        break;
                    default:
                        break;
                }
            }
        }
    }
}
INSTANTIATE_TEST_SUITE_P(Kinds, Hostile,
                         ::testing::Values(DataKind::kZeros, DataKind::kConstantChannels, DataKind::kOutliers,
                                           DataKind::kDenormal, DataKind::kHuge));

TEST(HostileScores, TheLargestInputsGiveFiniteScores) {
    const Context context = make_context(1);
    const std::vector<float> slopes = {0x1p56f, -0x1p56f};
    for (uint32_t d : {64, 128, 256}) {
        for (float sign : {1.0f, -1.0f}) {
            const AttentionData data{{2, 70, 2, 1, d},
                                     std::vector<float>(2 * 2 * d, 0x1p56f),
                                     std::vector<float>(70 * d, sign * 0x1p56f),
                                     std::vector<float>(70 * d, 0x1p56f)};
            const std::vector<float> away(d, -sign * 0x1p56f);
            auto options = sized<ta_attend_options>();
            options.scale = 64.0f;
            for (int variation = 0; variation < 24; ++variation) {
                options.mask = variation & 1 ? TA_MASK_FULL : TA_MASK_CAUSAL;
                options.alibi_slopes = variation & 2 ? slopes.data() : nullptr;
                PoolSettings settings = profile(TA_PROFILE_ACCURATE, variation / 8 == 0 ? 8 : variation / 8 == 1 ? 4 : 2);
                if (variation & 4) settings.numerics.k_offset = away.data();
                SCOPED_TRACE(::testing::Message() << "d " << d << ", sign " << sign << ", variation " << variation);
                const Results r = attend_after(context, data, settings, {70}, &options);
                for (float x : r.out) ASSERT_NEAR(x / 0x1p56f, 1.0f, 0.03f);
                for (float x : r.lse) ASSERT_TRUE(std::isfinite(x));
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- same bits

struct Everything {
    std::vector<float> results;   // outputs and lse of every step
    std::vector<uint8_t> blocks;  // all full blocks, byte by byte
};

// A mixed life of three sequences: prefill, ragged decode, chunks, forks, truncates.
Everything live(const Context& context, const Heads& heads, const PoolSettings& settings, ta_dtype dtype) {
    Everything all;
    const KvPool pool = make_pool(context, [&] {
        auto o = pool_options(2, heads.kv_heads, heads.head_dim, settings.bits, &settings.numerics);
        return o;
    }());
    const Plan plan = make_plan(pool);
    std::vector<ta_seq> seqs = {make_sequence(pool), make_sequence(pool), make_sequence(pool)};
    Random random(99);
    const auto step = [&](const std::vector<int32_t>& n_new, const std::vector<int32_t>& n_query) {
        begin(plan, seqs, n_new, n_query);
        const int64_t n = std::accumulate(n_new.begin(), n_new.end(), int64_t{0}),
                      rows = std::accumulate(n_query.begin(), n_query.end(), int64_t{0});
        for (uint32_t layer = 0; layer < 2; ++layer) {
            Tensor k(random.normals(n * heads.row()), n, heads.kv_heads, heads.head_dim, dtype),
                v(random.normals(n * heads.row()), n, heads.kv_heads, heads.head_dim, dtype);
            Tensor q(random.normals(rows * heads.q_row()), rows, heads.q_heads, heads.head_dim, dtype),
                out(rows, heads.q_heads, heads.head_dim, dtype);
            std::vector<float> lse(size_t(rows) * heads.q_heads);
            append(plan, layer, k, v);
            attend(plan, layer, q, out, lse.data());
            const std::vector<float> values = out.values();
            all.results.insert(all.results.end(), values.begin(), values.end());
            all.results.insert(all.results.end(), lse.begin(), lse.end());
        }
        end(plan);
    };
    step({1300, 64, 7}, {3, 64, 7});
    step({1, 1, 1}, {1, 1, 1});
    step({70, 0, 60}, {70, 9, 2});
    EXPECT_EQ(ta_seq_truncate(pool.get(), seqs[0], 1000, nullptr), TA_OK);
    seqs.push_back(fork_sequence(pool, seqs[0]));
    step({3, 1, 1, 90}, {3, 1, 1, 50});
    step({1, 1, 1, 1}, {1, 1, 1, 1});
    for (ta_seq seq : seqs) {
        for (uint64_t b = 0; b < uint64_t(length(pool, seq)) / 64; ++b) {
            auto block = sized<ta_x_block_info>();
            ta_error err;
            require(ta_x_seq_block(pool.get(), seq, b, &block, nullptr, 0, &err), err);
            std::vector<uint8_t> bytes(block.bytes);
            require(ta_x_seq_block(pool.get(), seq, b, &block, bytes.data(), bytes.size(), &err), err);
            bytes.resize(block.trailer_offset);
            all.blocks.insert(all.blocks.end(), bytes.begin(), bytes.end());
        }
    }
    return all;
}

TEST(SameBits, ForEveryInstructionSetAndNumberOfThreads) {
    const std::vector<ta_cpu_isa> isas = available_isas();
    PoolSettings settings[] = {profile(TA_PROFILE_ACCURATE, 4), profile(TA_PROFILE_ACCURATE, 2),
                               profile(TA_PROFILE_ACCURATE, 8), profile(TA_PROFILE_PAPER, 4)};
    uint32_t i = 0;
    for (const PoolSettings& s : settings) {
        const Heads heads = i == 0 ? Heads{2, 8, 128} : i == 1 ? Heads{1, 5, 96} : i == 2 ? Heads{2, 2, 64} : Heads{1, 4, 256};
        const ta_dtype dtype = kDtypes[i++ % 3];
        const Everything expected = live(make_context(1, TA_CPU_ISA_SCALAR), heads, s, dtype);
        for (ta_cpu_isa isa : isas) {
            for (int threads : {1, 2, 3}) {
                if (isa == TA_CPU_ISA_SCALAR && threads != 2) continue;
                SCOPED_TRACE(::testing::Message() << "isa " << isa << ", " << threads << " threads, settings " << i - 1);
                const Everything got = live(make_context(threads, isa), heads, s, dtype);
                ASSERT_EQ(got.results.size(), expected.results.size());
                EXPECT_EQ(std::memcmp(got.results.data(), expected.results.data(), got.results.size() * sizeof(float)), 0);
                EXPECT_TRUE(got.blocks == expected.blocks) << "stored bytes differ";
            }
        }
    }
}

}  // namespace
}  // namespace ta::testing
