// Attention over a pool, judged by float64 over the values that were given: how far is the result off? That is the price of the
// quantization; a table says. Whether it is right over the values that are stored: attention_stored_test.cpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "support/data.h"
#include "support/exact_attention.h"
#include "support/handles.h"
#include "tests/src/attend/heads.h"

namespace ta::testing {
namespace {

struct PoolSettings {
    ta_numerics numerics = sized<ta_numerics>();
    uint32_t bits = 4;
    std::vector<uint8_t> map;    // of heads, for K and V; empty: bits
    std::vector<uint8_t> v_map;  // for V alone; empty: map
};

struct Results {
    std::vector<float> out, lse;
};

// A fresh pool that has taken the keys and values in `chunks`.
struct Filled {
    KvPool pool;
    Plan plan;
    ta_seq seq;
};
Filled filled(const Context& context, const AttentionData& data, const PoolSettings& settings,
              const std::vector<int64_t>& chunks) {
    const AttentionShape& s = data.shape;
    auto po = pool_options(1, uint32_t(s.kv_heads), uint32_t(s.head_dim), settings.bits, &settings.numerics);
    if (!settings.map.empty()) po.k_bits = po.v_bits = settings.map.data();
    if (!settings.v_map.empty()) po.v_bits = settings.v_map.data();
    KvPool pool = make_pool(context, po);
    Plan plan = make_plan(pool);
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
    return {std::move(pool), std::move(plan), seq};
}

// The queries attend without new tokens.
Results attend_to(const Filled& f, const AttentionData& data, const ta_attend_options* options = nullptr) {
    const AttentionShape& s = data.shape;
    Results r{std::vector<float>(data.q.size()), std::vector<float>(size_t(s.n_query * s.q_heads))};
    begin(f.plan, {f.seq}, {0}, {int32_t(s.n_query)});
    const ta_tensor q = view_of(data.q.data(), s.n_query, s.q_heads, s.head_dim),
                    out = view_of(r.out.data(), s.n_query, s.q_heads, s.head_dim);
    ta_error err;
    require(ta_attend(f.plan.get(), 0, &q, &out, r.lse.data(), options, &err), err);
    end(f.plan);
    return r;
}
Results attend_after(const Context& context, const AttentionData& data, const PoolSettings& settings,
                     const std::vector<int64_t>& chunks, const ta_attend_options* options = nullptr) {
    return attend_to(filled(context, data, settings, chunks), data, options);
}

struct Judged {  // data and the result that it should give
    AttentionData data;
    Attention exact;
};
Judged judged(AttentionData data) {
    Attention exact = exact_attention(data.shape, {}, data.q.data(), data.k.data(), data.v.data());
    return {std::move(data), std::move(exact)};
}
Judged judged(DataKind kind, const AttentionShape& shape, uint64_t seed) {
    return judged(make_data(kind, shape, seed));
}

double error_of(const Context& context, const Judged& j, const PoolSettings& settings, int64_t chunk = 0) {
    std::vector<int64_t> chunks;  // 0: all at once
    for (int64_t left = j.data.shape.n_keys; left > 0; left -= chunks.back())
        chunks.push_back(chunk > 0 ? std::min(chunk, left) : left);
    const Results r = attend_after(context, j.data, settings, chunks);
    return relative_l2(std::span<const float>(r.out), j.exact.out);
}

// Of attention in float64 over K and V as they are stored: what queries, P and exp have no part in.
double error_of_k_and_v(const Context& context, const Judged& j, const PoolSettings& settings) {
    const AttentionShape& s = j.data.shape;
    const Filled f = filled(context, j.data, settings, {s.n_keys});
    const Stored stored = dequantize(f.pool, f.seq, 0, 0, s.n_keys, s.kv_heads * s.head_dim);
    return relative_l2(exact_attention(s, {}, j.data.q.data(), stored.k.data(), stored.v.data()).out, j.exact.out);
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

// At 8 bits, where those of 8 bits are a large part of the error. With 15 bits it is that of K and V alone.
TEST(Accuracy, WideQueriesInDecode) {
    const Context context = make_context(2);
    std::printf("Error of O against float64 (%%), 8 bits, 4096 tokens, 8/2 heads, d 128, 1 query\n");
    for (DataKind kind : {DataKind::kNormal, DataKind::kFlat, DataKind::kSink, DataKind::kPeaky}) {
        constexpr int kDraws = 12;
        double error[2] = {}, alone = 0.0;
        for (int draw = 0; draw < kDraws; ++draw) {
            const Judged sample = judged(kind, {1, 4096, 8, 2, 128}, 140 + uint64_t(draw));
            PoolSettings settings = profile(TA_PROFILE_ACCURATE, 8);
            alone += error_of_k_and_v(context, sample, settings) / kDraws;
            for (const bool wide : {false, true}) {
                settings.numerics.q_bits = wide ? 15 : 8;
                error[wide] += error_of(context, sample, settings) / kDraws;
            }
        }
        std::printf("%-8s q_bits 8: %.3f, 15: %.3f, K and V alone: %.3f\n", name_of(kind), 100.0 * error[0], 100.0 * error[1],
                    100.0 * alone);
        EXPECT_LE(error[1], 0.97 * error[0]) << name_of(kind);
        EXPECT_LE(error[1], 1.05 * alone) << name_of(kind);
    }
}

// As flat, but the first of every 20 tokens have 70% of the mass and V / 20: no sink block holds them all.
AttentionData small_v(const AttentionShape& s, uint64_t seed) {
    AttentionData data = make_data(DataKind::kFlat, s, seed);
    const int64_t d = s.head_dim, row = s.kv_heads * d;
    const double higher = std::log(0.7 / 0.3 * 19);
    for (int64_t h = 0; h < s.kv_heads; ++h) {
        std::vector<double> along(size_t(d), 0.0);  // what queries of the head have in common
        double square = 0.0;
        for (size_t i = 0; i < data.q.size(); ++i) {
            const int64_t q_head = int64_t(i) / d % s.q_heads;
            if (q_head / s.group() == h) along[i % size_t(d)] += data.q[i] / double(s.n_query * s.group());
        }
        for (const double x : along) square += x * x;
        for (int64_t t = 0; t < s.n_keys; t += 20) {
            for (int64_t c = 0; c < d; ++c) {
                const size_t i = size_t(t * row + h * d + c);
                data.k[i] += float(higher * std::sqrt(double(d)) / square * along[size_t(c)]);
                data.v[i] /= 20.0f;
            }
        }
    }
    return data;
}

// Every setting changed alone: what it is worth, and that none of them breaks anything.
TEST(Accuracy, EachSettingAlone) {
    const Context context = make_context(2);
    struct Change {
        const char* name;
        void (*apply)(ta_numerics&);
        int64_t chunk = 0;  // tokens of a step; 0: all at once
    };
    const Change accurate[] = {
        {"as it is", [](ta_numerics&) {}},
        {"k_granularity TOKEN", [](ta_numerics& n) { n.k_granularity = TA_GRANULARITY_TOKEN; }},
        {"v_granularity TOKEN", [](ta_numerics& n) { n.v_granularity = TA_GRANULARITY_TOKEN; }},
        {"open_scale UNIVERSAL", [](ta_numerics& n) { n.open_scale = TA_OPEN_SCALE_UNIVERSAL; }},
        {"as it is, 48 tokens a step", [](ta_numerics&) {}, 48},
        {"... open_scale UNIVERSAL", [](ta_numerics& n) { n.open_scale = TA_OPEN_SCALE_UNIVERSAL; }, 48},
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
        {"paper + k_search", [](ta_numerics& n) { n.k_search = TA_ON; }},
        {"paper + k_turning", [](ta_numerics& n) { n.k_turning = TA_ON; }},
        {"paper + v_search", [](ta_numerics& n) { n.v_search = TA_ON; }},
        {"paper + unit_slope", [](ta_numerics& n) { n.unit_slope = TA_ON; }},
        {"paper + q_bits 15", [](ta_numerics& n) { n.q_bits = 15; }},
        {"paper + hadamard", [](ta_numerics& n) { n.hadamard = TA_ON; }},
        {"paper + sink block", [](ta_numerics& n) { n.sink_blocks = 1; }},
        {"paper + POLY", [](ta_numerics& n) { n.exp = TA_EXP_POLY; }},
        {"paper + P AUTO", [](ta_numerics& n) { n.p = TA_P_AUTO; }},
        {"paper, 48 tokens a step", [](ta_numerics&) {}, 48},
        {"... open_scale TOKEN", [](ta_numerics& n) { n.open_scale = TA_OPEN_SCALE_TOKEN; }, 48},
    };
    constexpr int kDraws = 3;
    const AttentionShape shape{4, 2048, 8, 2, 128};  // 16 rows for each kv head: the most that take q_bits 15
    std::vector<std::pair<const char*, std::vector<Judged>>> data;
    for (DataKind kind : {DataKind::kNormal, DataKind::kFlat, DataKind::kSink, DataKind::kPeaky}) {
        data.emplace_back(name_of(kind), std::vector<Judged>());
        for (uint64_t seed = 7; seed < 7 + kDraws; ++seed) data.back().second.push_back(judged(kind, shape, seed));
    }
    data.emplace_back("small V", std::vector<Judged>());
    for (uint64_t seed = 7; seed < 7 + kDraws; ++seed) data.back().second.push_back(judged(small_v(shape, seed)));

    std::printf(
        "Error of O against float64 (%%) at 8 / 4 / 2 bits, 2048 tokens, 8/2 heads, d 128, 4 queries, mean of %d draws\n\n|",
        kDraws);
    for (const auto& [kind, draws] : data) std::printf(" | %s", kind);
    std::printf(" |\n|---|---|---|---|---|---|\n");
    const auto row = [&](const Change& change, ta_profile base) {
        std::printf("| %s", change.name);
        for (const auto& [kind, draws] : data) {
            for (uint32_t bits : {8, 4, 2}) {
                PoolSettings s = profile(base, bits);
                change.apply(s.numerics);
                double error = 0.0;
                for (const Judged& draw : draws) error += error_of(context, draw, s, change.chunk) / kDraws;
                std::printf(bits == 8 ? " | %.3g" : " / %.3g", 100 * error);
                EXPECT_LE(error, bits == 2 ? 6.0 : 1.0) << change.name << ", " << kind << ", " << bits << " bits";
            }
        }
        std::printf(" |\n");
    };
    for (const Change& c : accurate) row(c, TA_PROFILE_ACCURATE);
    for (const Change& c : paper) row(c, TA_PROFILE_PAPER);
}

// Against P of 16 bits and the exact exponential, over the same pages.
TEST(Accuracy, PAndExpAlone) {
    const Context context = make_context(2);
    AttentionData data = make_data(DataKind::kNormal, {4, 32768, 4, 1, 128}, 11);
    for (float& x : data.q) x *= 0.5f;
    const Filled f = filled(context, data, profile(TA_PROFILE_ACCURATE, 8), {data.shape.n_keys});
    const auto attend_with = [&](ta_p p, ta_exp exp) {
        auto options = sized<ta_attend_options>();
        options.p = p;
        options.exp = exp;
        return attend_to(f, data, &options);
    };
    const Results exact = attend_with(TA_P_U16, TA_EXP_EXACT);
    const std::vector<double> out(exact.out.begin(), exact.out.end());
    struct Change {
        const char* name;
        ta_p p;
        ta_exp exp;
        double bound;
    };
    std::printf("Error of O and of LSE for P and exp, 8 bits, scores of deviation 0.5, 32768 tokens\n");
    for (const Change& c : {Change{"P U8", TA_P_U8, TA_EXP_EXACT, 0.01}, Change{"P S8_127", TA_P_S8_127, TA_EXP_EXACT, 0.02},
                            Change{"P S8_119", TA_P_S8_119, TA_EXP_EXACT, 0.02},
                            Change{"P S8_127_RUNNING", TA_P_S8_127_RUNNING, TA_EXP_EXACT, 0.1},
                            Change{"exp POLY", TA_P_U16, TA_EXP_POLY, 2e-4}, Change{"exp SAS", TA_P_U16, TA_EXP_SAS, 0.02}}) {
        const Results r = attend_with(c.p, c.exp);
        double lse = 0.0;
        for (size_t i = 0; i < r.lse.size(); ++i) lse = std::max(lse, std::fabs(double(r.lse[i]) - double(exact.lse[i])));
        const double error = relative_l2(std::span<const float>(r.out), out);
        std::printf("%-18s %.2g %.2g\n", c.name, error, lse);
        EXPECT_LE(error, c.bound) << c.name;
    }
}

// 1% of the tokens have 1e4 in a channel of K and -1e4 in one of V; queries look away from them.
TEST(Accuracy, OutlierTokens) {
    const Context context = make_context(2);
    constexpr int kDraws = 3;
    std::vector<Judged> draws;
    for (uint64_t seed = 7; seed < 7 + kDraws; ++seed) {
        AttentionData data = make_data(DataKind::kNormal, {16, 2048, 8, 2, 128}, seed);
        Random random(seed);
        for (float& x : data.q) x *= 0.05f;
        for (size_t i = 3; i < data.q.size(); i += 128) data.q[i] = -std::fabs(data.q[i]) - 0.05f;
        for (int n = 0; n < 20; ++n) {
            const size_t token = size_t(random.below(2048)) * 256;
            for (const size_t head : {0, 128}) data.k[token + head + 3] = 1e4f, data.v[token + head + 40] = -1e4f;
        }
        draws.push_back(judged(std::move(data)));
    }
    std::printf("Error of O (%%) with outliers: 8, 4, 2 bits, one head K 4 and V 2 and the other K 2 and V 4\n");
    for (ta_profile which : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        std::printf("%s", which == TA_PROFILE_ACCURATE ? "accurate" : "paper   ");
        PoolSettings all[] = {profile(which, 8), profile(which, 4), profile(which, 2), profile(which, 4)};
        all[3].map = {4, 2}, all[3].v_map = {2, 4};
        for (const PoolSettings& s : all) {
            double error = 0.0;
            for (const Judged& draw : draws) error += error_of(context, draw, s) / kDraws;
            std::printf(" %9.3g", 100 * error);
            EXPECT_LE(error, which == TA_PROFILE_ACCURATE ? 1.0 : 1000.0) << s.bits << " bits";
        }
        std::printf("\n");
    }
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
