// Texts with a rotary embedding, from whose middle ranges are taken out: attention must be that over the other tokens, each as far
// from a query as the text then says, in float64. `Rows` is a tensor of the device that computes, `Floats` memory there.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "support/handles.h"

namespace ta::testing {

struct ShiftCase {
    const char* name;
    uint32_t kv_heads = 1, group = 1, head_dim = 64, bits = 8;
    ta_rotary_pairs pairs = TA_ROTARY_HALVES;
    uint32_t channels = 0;  // that are turned; 0: all
    bool sinks = false;
    float softcap = 0.0f;
    void (*numerics)(ta_numerics&) = nullptr;
    friend void PrintTo(const ShiftCase& c, std::ostream* out) { *out << c.name; }
};

inline std::vector<ShiftCase> shift_cases() {
    return {
        {"Halves"},
        {"Adjacent", 2, 4, 64, 8, TA_ROTARY_ADJACENT},
        {"APartOfTheChannels", 2, 2, 128, 8, TA_ROTARY_HALVES, 32},
        {"AdjacentPart", 1, 5, 96, 8, TA_ROTARY_ADJACENT, 48},
        {"Bits4", 2, 2, 128, 4},
        {"Bits4Exact", 1, 8, 64, 4, TA_ROTARY_HALVES, 0, false, 0.0f,
         [](ta_numerics& n) { n.exp = TA_EXP_EXACT, n.p = TA_P_U16; }},
        {"NotRotated", 1, 2, 64, 8, TA_ROTARY_HALVES, 0, false, 0.0f, [](ta_numerics& n) { n.hadamard = TA_OFF; }},
        {"Sinks", 2, 2, 64, 8, TA_ROTARY_HALVES, 0, true},
        {"Softcap", 1, 2, 64, 8, TA_ROTARY_HALVES, 0, false, 3.0f},
        {"Dim80", 1, 3, 80, 8},
        {"Dim256", 1, 2, 256, 8},
        {"WideGroup", 1, 32, 64, 8},
    };
}

template <class Rows, class Floats>
class ShiftedTexts {
  public:
    static constexpr uint32_t kLayers = 2;
    struct Range {
        int64_t first, end;
    };
    struct Text {
        ta_seq seq = 0;
        std::vector<float> k[kLayers], v[kLayers];  // before the embedding
        std::vector<int64_t> at;                    // each token's position
        std::vector<Range> gaps;

        int64_t length() const { return int64_t(at.size()); }
        bool has(int64_t t) const {
            return std::none_of(gaps.begin(), gaps.end(), [&](const Range& g) { return t >= g.first && t < g.end; });
        }
        // How much nearer the tokens behind all gaps are to a token than their positions say.
        int64_t moved(int64_t t) const {
            int64_t n = 0;
            for (const Range& g : gaps) n += t < g.first ? g.end - g.first : 0;
            return n;
        }
    };
    struct Member {
        Text* text;
        int32_t n_new = 0;
        std::vector<int64_t> queries{};  // their positions
        std::vector<int32_t> parents{};  // of a tree, whose queries are its tokens
    };

    ShiftedTexts(const Context& context, const ShiftCase& c, ta_stream stream = nullptr, const ta_tier_options* tiers = nullptr)
        : case_(c), pairs_((c.channels ? c.channels : c.head_dim) / 2) {
        auto numerics = sized<ta_numerics>();
        if (c.numerics) c.numerics(numerics);
        auto options = pool_options(kLayers, c.kv_heads, c.head_dim, c.bits, &numerics);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            for (uint32_t i = 0; i < pairs_; ++i) angles_.push_back(std::pow(layer ? 500.0 : 10000.0, -double(i) / pairs_));
        }
        auto rotary = sized<ta_rotary>();
        rotary.pairs = c.pairs;
        rotary.channels = 2 * pairs_;
        rotary.layers = kLayers;
        rotary.angles = angles_.data();
        options.rotary = &rotary;
        options.tiers = tiers;
        pool = make_pool(context, options);
        plan = make_plan(pool);
        ta_error err;
        if (stream) require(ta_plan_set_stream(plan.get(), stream, &err), err);
        std::vector<float> sinks;
        for (uint32_t h = 0; h < q_heads(); ++h) sinks.push_back(1.5f + 0.25f * float(h % 8));
        if (c.sinks) host_sinks_ = sinks, sinks_ = std::make_unique<Floats>(sinks);
    }

    Text make_text(int32_t n) {
        Text t;
        t.seq = make_sequence(pool);
        while (t.length() < n) step({{&t, int32_t(std::min<int64_t>(n - t.length(), 200))}});
        return t;
    }
    void shift(Text& t, int64_t first, int64_t n) {
        ta_error err;
        require(ta_seq_shift(pool.get(), t.seq, first, n, &err), err);
        if (n > 0) t.gaps.push_back({first, first + n});
        // Gaps that meet become one; a gap before all of the sequence's tokens leaves nothing.
        std::sort(t.gaps.begin(), t.gaps.end(), [](const Range& a, const Range& b) { return a.first < b.first; });
        for (size_t i = 1; i < t.gaps.size();) {
            if (t.gaps[i].first > t.gaps[i - 1].end) {
                ++i;
                continue;
            }
            t.gaps[i - 1].end = std::max(t.gaps[i - 1].end, t.gaps[i].end);
            t.gaps.erase(t.gaps.begin() + ptrdiff_t(i));
        }
    }
    // The last n positions.
    static std::vector<int64_t> last(const Text& t, int64_t n, int64_t n_new = 0) {
        std::vector<int64_t> at;
        for (int64_t i = t.length() + n_new - n; i < t.length() + n_new; ++i) at.push_back(i);
        return at;
    }

    // Results are near those over what callers gave; over what is stored where nothing is appended. Of trees nothing stays.
    void step(const std::vector<Member>& members, bool with_positions = false) {
        std::vector<ta_seq> seqs;
        std::vector<int32_t> n_new, n_query, parents;
        std::vector<int64_t> positions;
        int64_t total_new = 0, total_query = 0;
        for (const Member& m : members) {
            const int64_t length = m.text->length();
            seqs.push_back(m.text->seq);
            n_new.push_back(m.n_new);
            n_query.push_back(int32_t(m.queries.size()));
            for (int32_t i = 0; i < m.n_new; ++i) {
                const int32_t parent = m.parents.empty() ? i - 1 : m.parents[size_t(i)];
                parents.push_back(parent);
                m.text->at.push_back(parent < 0 ? length : m.text->at[size_t(length + parent)] + 1);
            }
            positions.insert(positions.end(), m.queries.begin(), m.queries.end());
            total_new += m.n_new;
            total_query += n_query.back();
        }
        auto how = sized<ta_step_options>();
        if (with_positions) how.query_positions = positions.data();
        const bool is_tree = std::any_of(members.begin(), members.end(), [](const Member& m) { return !m.parents.empty(); });
        if (is_tree) how.tree_parent = parents.data();
        ta_error err;
        require(ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), n_query.data(), &how, &err), err);
        std::vector<std::vector<float>> queries, outs, lses;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            std::vector<float> k, v, q;
            for (const Member& m : members) {
                Text& t = *m.text;
                for (int64_t i = t.length() - m.n_new; i < t.length(); ++i) {
                    const std::vector<float> raw = random_.normals(case_.kv_heads * d(), 1.5f),
                                             value = random_.normals(case_.kv_heads * d());
                    t.k[layer].insert(t.k[layer].end(), raw.begin(), raw.end());
                    t.v[layer].insert(t.v[layer].end(), value.begin(), value.end());
                    const std::vector<double> row = turned(raw.data(), case_.kv_heads, layer, t.at[size_t(i)]);
                    k.insert(k.end(), row.begin(), row.end());
                    v.insert(v.end(), value.begin(), value.end());
                }
                for (const int64_t at : m.queries) {
                    const std::vector<float> raw = random_.normals(q_heads() * d());
                    const std::vector<double> row = turned(raw.data(), q_heads(), layer, m.text->at[size_t(at)]);
                    q.insert(q.end(), row.begin(), row.end());
                }
            }
            Rows k_rows(k, total_new, case_.kv_heads, d()), v_rows(v, total_new, case_.kv_heads, d()),
                q_rows(q, total_query, q_heads(), d()), out(total_query, q_heads(), d());
            Floats lse(std::vector<float>(size_t(total_query) * q_heads()));
            auto options = sized<ta_attend_options>();
            options.softcap = case_.softcap;
            if (case_.sinks) options.sinks = sinks_->data();
            require(ta_append(plan.get(), layer, k_rows.view(), v_rows.view(), &err), err);
            require(ta_attend(plan.get(), layer, q_rows.view(), out.view(), lse.data(), &options, &err), err);
            queries.push_back(std::move(q));
            outs.push_back(out.values());
            lses.push_back(lse.values());
        }
        const std::vector<int32_t> nothing(members.size(), 0);
        require(ta_plan_end(plan.get(), is_tree ? nothing.data() : nullptr, &err), err);
        for (uint32_t layer = 0; layer < kLayers && !::testing::Test::HasFatalFailure(); ++layer)
            compare(members, layer, queries[layer], outs[layer], lses[layer]);
        for (const Member& m : members) {
            if (is_tree) cut(*m.text, m.text->length() - m.n_new);
        }
    }

    // Steps of all kinds over up to three texts, which are shifted, forked and cut meanwhile.
    void walk(uint64_t seed, int steps) {
        Random random(seed);
        std::vector<Text> texts;
        const auto block = [&](int64_t tokens) { return tokens / 64 * 64; };
        for (int i = 0; i < steps && !::testing::Test::HasFatalFailure(); ++i) {
            if (texts.size() < 3) texts.push_back(make_text(int32_t(random.between(1, 500))));
            Text& t = texts[random.below(texts.size())];
            if (random.chance(40)) {
                const int64_t first =
                    block(random.between(std::min<int64_t>(random.chance(80) ? 64 : 0, t.length()), t.length()));
                shift(t, first, block(random.between(std::min<int64_t>(64, t.length() - first), t.length() - first)));
            } else if (random.chance(15)) {
                truncate(t, random.chance(50) ? random.between(behind(t), t.length()) : block(random.between(0, t.length())));
            } else if (random.chance(25)) {
                Text copy = t;
                copy.seq = fork_sequence(pool, t.seq);
                release(t);
                t = copy;
            } else if (t.length() > 700 || random.chance(15)) {
                release(t);
                texts.erase(texts.begin() + (&t - texts.data()));
                continue;
            }
            step_at_random(texts, random);
        }
        for (Text& t : texts) release(t);
    }
    // Positions from here on see the whole text.
    static int64_t behind(const Text& t) { return t.gaps.empty() || t.gaps.back().end == 0 ? 0 : t.gaps.back().end; }
    void truncate(Text& t, int64_t length) {
        ta_error err;
        require(ta_seq_truncate(pool.get(), t.seq, length, &err), err);
        cut(t, length);
    }
    void cut(Text& t, int64_t length) {
        t.at.resize(size_t(length));
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            t.k[layer].resize(size_t(length * case_.kv_heads * d()));
            t.v[layer].resize(size_t(length * case_.kv_heads * d()));
        }
        std::erase_if(t.gaps, [&](const Range& g) { return g.first >= length; });
        if (!t.gaps.empty()) t.gaps.back().end = std::min(t.gaps.back().end, length);
    }
    void release(Text& t) {
        ta_error err;
        require(ta_seq_release(pool.get(), t.seq, &err), err);
    }

    double worst_of_stored = 0.0, worst_of_given = 0.0;  // differences from what was expected
    KvPool pool;
    Plan plan;

  private:
    void step_at_random(std::vector<Text>& texts, Random& random) {
        const bool tree = random.chance(20), with_positions = !tree && random.chance(40);
        std::vector<Member> members;
        for (Text& t : texts) {
            if (!members.empty() && random.chance(40)) continue;
            Member m{&t, int32_t(random.chance(30) ? 0 : random.chance(50) ? 1 : random.between(2, 150))};
            if (tree) m.n_new = std::min(m.n_new, 30);
            const int64_t length = t.length() + m.n_new, least = behind(t);
            if (tree) {
                for (int32_t i = 0; i < m.n_new; ++i) m.parents.push_back(int32_t(random.between(-1, i - 1)));
                m.queries = last(t, m.n_new, m.n_new);
            } else if (with_positions) {
                while (length > least && m.queries.size() < 90 && !random.chance(10)) {
                    for (int64_t at = random.between(least, length - 1), n = random.between(1, 40); n > 0 && at < length; --n)
                        m.queries.push_back(at++);
                }
            } else {
                m.queries = last(t, random.between(0, std::min<int64_t>(length - least, random.chance(50) ? 2 : 100)), m.n_new);
            }
            members.push_back(std::move(m));
        }
        step(members, with_positions);
    }

    int64_t d() const { return int64_t(case_.head_dim); }
    int64_t q_heads() const { return int64_t(case_.kv_heads) * case_.group; }

    std::vector<double> turned(const float* row, int64_t heads, uint32_t layer, int64_t position) const {
        std::vector<double> to(row, row + heads * d());
        for (int64_t head = 0; head < heads; ++head) {
            for (uint32_t i = 0; i < pairs_; ++i) {
                const double angle = angles_[layer * pairs_ + i] * double(position);
                const bool halves = case_.pairs == TA_ROTARY_HALVES;
                const size_t x = size_t(head * d()) + (halves ? i : 2 * i), y = x + (halves ? pairs_ : 1);
                const double a = row[x], b = row[y];
                to[x] = a * std::cos(angle) - b * std::sin(angle);
                to[y] = a * std::sin(angle) + b * std::cos(angle);
            }
        }
        return to;
    }

    // K as it stands now, at the places that the text has without its gaps, and V.
    struct Keys {
        std::vector<std::vector<double>> k;  // by token; none where it was taken out
        std::vector<float> v;
    };
    Keys keys_of(const Text& t, uint32_t layer, bool stored) const {
        const int64_t row = case_.kv_heads * d();
        Keys keys{std::vector<std::vector<double>>(size_t(t.length())), t.v[layer]};
        for (int64_t i = 0; i < t.length(); ++i) {
            if (!t.has(i)) continue;
            if (!stored) {
                keys.k[size_t(i)] = turned(t.k[layer].data() + i * row, case_.kv_heads, layer, t.at[size_t(i)] + t.moved(i));
                continue;
            }
            const Stored s = dequantize(pool, t.seq, layer, i, 1, row);
            keys.k[size_t(i)] = turned(s.k.data(), case_.kv_heads, layer, t.moved(i));
            std::copy(s.v.begin(), s.v.end(), keys.v.begin() + i * row);
        }
        return keys;
    }
    static bool sees(const Member& m, int64_t query, int64_t key) {
        if (m.parents.empty()) return key <= query;
        const int64_t first = m.text->length() - m.n_new;
        while (query > key && query >= first) {
            const int32_t parent = m.parents[size_t(query - first)];
            query = parent < 0 ? first - 1 : first + parent;
        }
        return key < first || query == key;
    }

    void compare(const std::vector<Member>& members, uint32_t layer, const std::vector<float>& q, const std::vector<float>& out,
                 const std::vector<float>& lse) {
        int64_t row = 0;
        const int64_t heads = q_heads();
        for (const Member& m : members) {
            if (m.queries.empty()) continue;
            const bool stored = m.n_new == 0;
            const double tolerance = !stored && case_.bits < 8 ? 1.2 : 0.12;
            double squares = 0.0;
            double& worst = stored ? worst_of_stored : worst_of_given;
            const Keys keys = keys_of(*m.text, layer, stored);
            for (const int64_t query : m.queries) {
                for (int64_t head = 0; head < heads; ++head) {
                    const int64_t at = row * heads + head;
                    std::vector<double> o(size_t(d()), 0.0);
                    double sum = case_.sinks ? std::exp(double(host_sinks_[size_t(head)])) : 0.0;
                    for (int64_t key = 0; key < m.text->length(); ++key) {
                        if (keys.k[size_t(key)].empty() || !sees(m, query, key)) continue;
                        const int64_t of_head = head / case_.group * d();
                        double score = 0.0;
                        for (int64_t c = 0; c < d(); ++c)
                            score += double(q[size_t(at * d() + c)]) * keys.k[size_t(key)][size_t(of_head + c)];
                        score /= std::sqrt(double(d()));
                        if (case_.softcap > 0.0f) score = case_.softcap * std::tanh(score / case_.softcap);
                        const double weight = std::exp(score);
                        sum += weight;
                        for (int64_t c = 0; c < d(); ++c)
                            o[size_t(c)] += weight * double(keys.v[size_t((key * case_.kv_heads * d()) + of_head + c)]);
                    }
                    for (int64_t c = 0; c < d(); ++c) {
                        const double expected = sum > 0.0 ? o[size_t(c)] / sum : 0.0;
                        const double off = double(out[size_t(at * d() + c)]) - expected;
                        worst = std::max(worst, std::fabs(off));
                        squares += off * off;
                        ASSERT_NEAR(out[size_t(at * d() + c)], expected, tolerance)
                            << "layer " << layer << ", query " << query << ", head " << head << ", channel " << c;
                    }
                    if (sum > 0.0) {
                        worst = std::max(worst, std::fabs(std::log(sum) - double(lse[size_t(at)])));
                        ASSERT_NEAR(lse[size_t(at)], std::log(sum), tolerance) << "layer " << layer << ", query " << query;
                    } else {
                        ASSERT_EQ(lse[size_t(at)], -INFINITY);
                    }
                }
                ++row;
            }
            ASSERT_LT(std::sqrt(squares / double(int64_t(m.queries.size()) * heads * d())), tolerance / 10);
        }
    }

    const ShiftCase case_;
    const uint32_t pairs_;
    std::vector<double> angles_;
    std::vector<float> host_sinks_;
    std::unique_ptr<Floats> sinks_;
    Random random_{11};
};

template <class Texts>
void take_out_twice(Texts& texts, const ShiftCase& c) {
    auto t = texts.make_text(9 * 64 + 20);
    texts.step({{&t, 0, texts.last(t, 1)}});
    texts.shift(t, 64, 3 * 64);
    texts.step({{&t, 0, texts.last(t, 1)}});
    // K is not turned: nothing is lost but the rounding of queries, which have 15 bits where K has 8.
    if (c.bits == 8 && c.group <= 16) {
        EXPECT_LT(texts.worst_of_stored, 2e-4);
    }
    texts.step({{&t, 0, texts.last(t, 80)}});
    texts.step({{&t, 1, texts.last(t, 1, 1)}});
    texts.shift(t, 6 * 64, 64);
    texts.step({{&t, 70, texts.last(t, 70, 70)}});
    // A token tree, then its fork, and a text in the place of one that is gone.
    texts.step({{&t, 6, texts.last(t, 6, 6), {-1, 0, 0, 2, -1, 4}}});
    auto fork = t;
    fork.seq = fork_sequence(texts.pool, t.seq);
    texts.step({{&fork, 0, texts.last(fork, 2)}, {&t, 1, texts.last(t, 1, 1)}});
    texts.release(t);
    auto later = texts.make_text(300);
    texts.step({{&later, 0, {10, 200, 11}}, {&fork, 0, texts.last(fork, 1)}}, true);
}

}  // namespace ta::testing
