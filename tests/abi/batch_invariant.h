// Texts that come in steps of all shapes to a pool with batch_invariant: each token's results must have the same bits whichever step
// brings it. `Rows` is a tensor of the device that computes, `Floats` memory there for LSEs.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "abi/draft_steps.h"
#include "support/host_floats.h"
#include "support/tiers.h"

namespace ta::testing {

struct InvariantCase {
    const char* name;
    DraftShape shape{};
    uint32_t bits = 4;
    std::vector<uint8_t> map = {};  // of K and, backwards, of V; else `bits`
    std::vector<int64_t> lengths = {200, 150, 330};
    void (*numerics)(ta_numerics&) = nullptr;
    void (*attend)(ta_attend_options&) = nullptr;
    bool slopes = false, sinks = false;
    int64_t window = 0;  // of the layers' group
    friend void PrintTo(const InvariantCase& c, std::ostream* out) { *out << c.name; }
};

inline std::vector<InvariantCase> invariant_cases(uint32_t most_group) {
    const auto shape = [](uint32_t d, uint32_t kv_heads, uint32_t group) { return DraftShape{1, kv_heads, d, group, true}; };
    std::vector<InvariantCase> cases{
        {"Bits4", shape(64, 2, 2)},
        {"Bits4Long", shape(64, 1, 4), 4, {}, {1500, 70}},
        {"Bits8", shape(64, 2, 5), 8},
        {"Bits8Long", shape(64, 1, 1), 8, {}, {1400}},
        {"Bits2", shape(128, 1, 8), 2},
        {"MixedBits", shape(64, 4, 2), 4, {8, 4, 2, 8}},
        {"Dim96", shape(96, 1, 3), 4},
        {"Dim256", shape(256, 1, 2), 4, {}, {140, 100}},
        {"Dim80", shape(80, 1, 2), 4, {}, {140, 100}},
        {"OneRow", shape(64, 2, 1)},
        {"Group16", shape(64, 1, 16)},
        {"Window", shape(64, 1, 2), 4, {}, {400, 300}, nullptr, [](ta_attend_options& o) { o.window = 77; }},
        {"WindowLong", shape(64, 1, 2), 8, {}, {2600}, nullptr, [](ta_attend_options& o) { o.window = 1100; }},
        {"WindowOfLayers", shape(64, 1, 2), 4, {}, {700, 300}, nullptr, nullptr, false, false, 100},
        {"Alibi", shape(64, 1, 2), 4, {}, {200, 130}, nullptr, nullptr, true},
        {"Sinks", shape(64, 2, 2), 4, {}, {200, 130}, nullptr, nullptr, false, true},
        {"Softcap", shape(64, 2, 2), 4, {}, {200, 130}, nullptr, [](ta_attend_options& o) { o.softcap = 20.0f; }},
        {"Paper", shape(64, 1, 2), 4, {}, {200, 1300}, [](ta_numerics& n) { n.profile = TA_PROFILE_PAPER; }},
        {"PRunning", shape(64, 1, 2), 4, {}, {300, 1300}, [](ta_numerics& n) { n.p = TA_P_S8_127_RUNNING; }},
        {"Queries8", shape(64, 1, 2), 8, {}, {300}, [](ta_numerics& n) { n.q_bits = 8; }},
        {"ManySinkBlocks", shape(64, 1, 2), 4, {}, {300, 100}, [](ta_numerics& n) { n.sink_blocks = 3; }},
    };
    if (most_group >= 32) cases.push_back({"Group32", shape(64, 1, 32)});
    return cases;
}

template <class Rows, class Floats>
class InvariantTexts {
  public:
    InvariantTexts(const Context& context, const InvariantCase& c, const ta_tier_options* tiers = nullptr,
                   uint64_t budget = uint64_t{64} << 20, ta_stream stream = nullptr)
        : case_(c) {
        auto numerics = sized<ta_numerics>();
        if (c.numerics) c.numerics(numerics);
        numerics.batch_invariant = TA_ON;
        auto options = pool_options(c.shape.layers, c.shape.kv_heads, c.shape.head_dim, c.bits, &numerics);
        const std::vector<uint8_t> backwards(c.map.rbegin(), c.map.rend());
        if (!c.map.empty()) options.k_bits = c.map.data(), options.v_bits = backwards.data();
        auto group = sized<ta_layer_group>();
        group.layers = c.shape.layers;
        group.window = c.window;
        if (c.window > 0) options.layer_groups = &group, options.n_layer_groups = 1;
        options.tiers = tiers;
        options.budget_bytes = budget;
        pool = make_pool(context, options);
        plan = make_plan(pool);
        ta_error err;
        if (stream) require(ta_plan_set_stream(plan.get(), stream, &err), err);
        std::vector<float> slopes, sinks;
        for (uint32_t h = 0; h < c.shape.q_heads(); ++h) {
            slopes.push_back(0.02f * float(h + 1));
            sinks.push_back(float(h) - 1.0f);
        }
        slopes_ = std::make_unique<Floats>(slopes);
        sinks_ = std::make_unique<Floats>(sinks);
    }

    // Brings all texts to their ends. `one_percent`: of decode among a member's steps, the rest drafts and chunks of up to
    // `most` tokens. Alone, or beside each other.
    void walk(uint64_t seed, int one_percent, int most, bool alone) {
        Random random(seed);
        std::vector<Text> texts;
        for (size_t i = 0; i < case_.lengths.size(); ++i) texts.push_back({make_sequence(pool), i, 0});
        nobody_ = {make_sequence(pool), 0, 0};
        empty_ = {&nobody_, 0, 0, int32_t(random.between(0, 140))};
        while (!texts.empty()) {
            std::vector<Member> members;
            for (Text& t : texts) {
                if (!members.empty() && (alone || random.chance(40))) continue;
                const int64_t left = case_.lengths[t.number] - t.length;
                Member m{&t, int32_t(random.chance(one_percent) ? 1 : random.between(1, std::min<int64_t>(left, most)))};
                m.wrong = random.chance(30) ? int32_t(random.between(1, 5)) : 0;
                m.n_query = random.chance(80) ? m.n + m.wrong : int32_t(random.between(0, m.n + m.wrong));
                members.push_back(m);
            }
            if (!alone && random.chance(20))
                members.insert(members.begin() + ptrdiff_t(random.below(members.size() + 1)), empty_);
            step(members, random.chance(20));
            if (::testing::Test::HasFatalFailure()) return;
            if (random.chance(10)) branch(texts[random.below(texts.size())]);
            for (size_t i = texts.size(); i-- > 0;) {
                if (texts[i].length < case_.lengths[texts[i].number]) continue;
                compare_stored(texts[i]);
                release(texts[i].seq);
                texts.erase(texts.begin() + ptrdiff_t(i));
            }
        }
        release(nobody_.seq);
    }

    // Of a token in a layer.
    struct Result {
        std::vector<float> out, lse;
        bool operator==(const Result& other) const {
            const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
                return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
            };
            return same(out, other.out) && same(lse, other.lse);
        }
    };
    std::map<std::tuple<size_t, int64_t, uint32_t>, Result> book;  // text, token, layer
    KvPool pool;
    Plan plan;

  private:
    struct Text {
        ta_seq seq;
        size_t number;
        int64_t length;
    };
    struct Member {
        Text* text;
        int32_t n = 0, wrong = 0, n_query = 0;  // wrong: drafts behind the text's n tokens that do not stay
    };

    void release(ta_seq seq) {
        ta_error err;
        require(ta_seq_release(pool.get(), seq, &err), err);
    }
    // A copy takes the text's place.
    void branch(Text& t) {
        const ta_seq copy = fork_sequence(pool, t.seq);
        release(t.seq);
        t.seq = copy;
    }

    void step(const std::vector<Member>& members, bool in_order) {
        const DraftShape& s = case_.shape;
        DraftTokens tokens, queries;
        std::vector<ta_seq> seqs;
        std::vector<int32_t> n_new, n_query, keep;
        for (const Member& m : members) {
            const int32_t n = m.n + m.wrong;
            for (int32_t i = 0; i < n; ++i) {
                const int64_t at = m.text->length + i;
                tokens.push_back({i < m.n ? m.text->number * 100000 + uint64_t(at) : 77777777 + uint64_t(at), at});
                if (i >= n - m.n_query) queries.push_back(tokens.back());
            }
            for (int32_t i = n; i < m.n_query; ++i) queries.push_back({1, i});  // before the first token: they see nothing
            seqs.push_back(m.text->seq);
            n_new.push_back(n);
            n_query.push_back(m.n_query);
            keep.push_back(m.n);
        }
        auto how = sized<ta_step_options>();
        how.drafts = tokens.size() > size_t(std::accumulate(keep.begin(), keep.end(), 0)) ? TA_ON : TA_OFF;
        how.layers_in_order = in_order ? TA_ON : TA_OFF;
        ta_error err;
        require(ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), n_query.data(), &how, &err), err);
        for (uint32_t layer = 0; layer < s.layers; ++layer) {
            const auto n = int64_t(tokens.size()), rows = int64_t(queries.size());
            Rows k(values_of(s, tokens, layer, 0), n, s.kv_heads, s.head_dim),
                v(values_of(s, tokens, layer, 1), n, s.kv_heads, s.head_dim),
                q(values_of(s, queries, layer, 2), rows, s.q_heads(), s.head_dim), out(rows, s.q_heads(), s.head_dim);
            Floats lse(std::vector<float>(size_t(rows) * s.q_heads()));
            auto options = sized<ta_attend_options>();
            if (case_.attend) case_.attend(options);
            if (case_.slopes) options.alibi_slopes = slopes_->data();
            if (case_.sinks) options.sinks = sinks_->data();
            require(ta_append(plan.get(), layer, k.view(), v.view(), &err), err);
            require(ta_attend(plan.get(), layer, q.view(), out.view(), lse.data(), &options, &err), err);
            compare(members, layer, out.values(), lse.values());
        }
        require(ta_plan_end(plan.get(), how.drafts == TA_ON ? keep.data() : nullptr, &err), err);
        for (const Member& m : members) m.text->length += m.n;
    }

    void compare(const std::vector<Member>& members, uint32_t layer, const std::vector<float>& out,
                 const std::vector<float>& lse) {
        const size_t heads = case_.shape.q_heads(), width = heads * case_.shape.head_dim;
        size_t row = 0;
        for (const Member& m : members) {
            for (int32_t i = m.n + m.wrong - m.n_query; i < m.n + m.wrong; ++i, ++row) {
                if (i < 0) {
                    const auto of = [&](size_t n) { return out.begin() + ptrdiff_t(row * n); };
                    ASSERT_TRUE(std::all_of(of(width), of(width) + ptrdiff_t(width), [](float x) { return x == 0.0f; }));
                    for (size_t h = 0; h < heads; ++h)
                        ASSERT_TRUE(case_.sinks ? std::isfinite(lse[row * heads + h]) : lse[row * heads + h] == -INFINITY);
                    continue;
                }
                if (i >= m.n) continue;
                const auto of = [&](const std::vector<float>& x, size_t n) {
                    return std::vector<float>(x.begin() + ptrdiff_t(row * n), x.begin() + ptrdiff_t((row + 1) * n));
                };
                Result now{of(out, width), of(lse, heads)};
                const auto [at, fresh] = book.try_emplace({m.text->number, m.text->length + i, layer}, now);
                ASSERT_TRUE(fresh || at->second == now)
                    << "token " << m.text->length + i << " of text " << m.text->number << ", layer " << layer << ", one of "
                    << m.n << " and " << m.wrong << " drafts, " << members.size() << " members";
            }
        }
    }

    void compare_stored(const Text& t) {
        if (case_.window > 0) return;  // it has passed most
        for (uint32_t layer = 0; layer < case_.shape.layers; ++layer) {
            const Stored now = dequantize(pool, t.seq, layer, 0, t.length, case_.shape.row());
            const auto [at, fresh] = stored_.try_emplace({t.number, layer}, now);
            ASSERT_TRUE(fresh || at->second == now) << "text " << t.number << ", layer " << layer;
        }
    }

    const InvariantCase& case_;
    std::map<std::tuple<size_t, uint32_t>, Stored> stored_;
    Text nobody_{};  // a sequence without tokens
    Member empty_;
    std::unique_ptr<Floats> slopes_, sinks_;
};

// The walks that every case takes: in one chunk each, token by token, and mixed.
template <class Texts>
void walk_all(Texts& texts) {
    texts.walk(1, 0, 1 << 20, true);
    if (!::testing::Test::HasFatalFailure()) texts.walk(2, 100, 1, true);
    for (uint64_t seed = 3; seed < 6 && !::testing::Test::HasFatalFailure(); ++seed)
        texts.walk(seed, 50, seed == 5 ? 400 : 70, false);
}

}  // namespace ta::testing
