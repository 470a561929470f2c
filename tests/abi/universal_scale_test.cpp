// Universal open scales follow from the tokens that a sequence has: what it lost by a truncate, and how it came by its tokens, do
// not show. Sequences go through random histories, and each is compared with one that got its tokens in a row.
#include <algorithm>
#include <cmath>
#include <filesystem>

#include "abi/prefix_steps.h"
#include "support/files.h"

namespace ta::testing {
namespace {

struct Setting {
    const char* name;
    uint32_t bits;
    ta_profile profile;
};

// Tokens of one step: those of the stream `text` at their places.
struct Part {
    uint64_t text;
    int32_t n;
};

struct Model {
    ta_seq id = 0;
    std::vector<Part> parts;
    int64_t length() const {
        int64_t n = 0;
        for (const Part& p : parts) n += p.n;
        return n;
    }
    void cut(int64_t n) {
        for (size_t i = 0; i < parts.size(); ++i) {
            parts[i].n = int32_t(std::min<int64_t>(parts[i].n, n));
            n -= parts[i].n;
        }
        std::erase_if(parts, [](const Part& p) { return p.n == 0; });
    }
};

class UniversalScale : public PrefixSteps, public ::testing::WithParamInterface<Setting> {
  protected:
    UniversalScale() {
        numerics_.profile = GetParam().profile;
        numerics_.open_scale = TA_OPEN_SCALE_UNIVERSAL;
    }
    KvPool fresh_pool() const { return make_pool(context, options(GetParam().bits, &numerics_)); }

    // Most tokens are of ordinary size, some are up to a million times as large, some are zeros.
    static float size_of(uint64_t text, int64_t t) {
        Random random(text * 7919 + uint64_t(t));
        return random.chance(12) ? std::exp2(float(random.between(1, 20))) : random.chance(10) ? 0.0f : 1.0f;
    }
    static std::vector<float> values(uint64_t text, int64_t first, int32_t n, uint64_t which, int64_t row) {
        std::vector<float> x;
        for (int64_t t = first; t < first + n; ++t) {
            const float size = which == 2 ? 1.0f : size_of(text, t);
            for (float v : Random(text * 1000003 + uint64_t(t) * 17 + which).normals(row)) x.push_back(v * size);
        }
        return x;
    }
    // A step of n tokens at `at`. Returns what attention gave.
    static std::vector<float> step(const KvPool& pool, ta_seq seq, int64_t at, Part part, bool aborts = false) {
        const Plan plan = make_plan(pool);
        std::vector<float> seen;
        begin(plan, {seq}, {part.n});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const uint64_t text = part.text * kLayers + layer;
            Tensor k(values(text, at, part.n, 0, kRow), part.n, kHeads, kDim),
                v(values(text, at, part.n, 1, kRow), part.n, kHeads, kDim),
                q(values(text, at, part.n, 2, kQHeads * kDim), part.n, kQHeads, kDim), out(part.n, kQHeads, kDim);
            append(plan, layer, k, v);
            attend(plan, layer, q, out);
            const std::vector<float> x = out.values();
            seen.insert(seen.end(), x.begin(), x.end());
        }
        if (!aborts) end(plan);
        ta_error err;
        if (aborts) require(ta_plan_abort(plan.get(), &err), err);
        return seen;
    }

    const Context context = make_context(2);
    ta_numerics numerics_ = sized<ta_numerics>();
};

class Walk : public UniversalScale {
  protected:
    void walk(uint64_t seed) {
        Random random(seed);
        pool_ = fresh_pool();
        space_ = make_namespace(pool_, 1);
        models_.clear();
        for (int i = 0; i < 40 && !HasFailure(); ++i) {
            if (models_.empty()) models_.push_back({make_sequence(pool_), {}});
            if (models_.size() > 6) {
                release(pool_, models_.front().id);
                models_.erase(models_.begin());
            }
            const auto at = size_t(random.below(int64_t(models_.size())));
            switch (random.below(11)) {
                case 0:
                case 1:
                case 2:
                case 3:
                    grow(models_[at], random);
                    break;
                case 4:
                    step(pool_, models_[at].id, models_[at].length(), {++texts_, int32_t(random.between(1, 90))}, true);
                    break;
                case 5:
                case 6:
                    truncate(models_[at], random);
                    break;
                case 7:
                    models_.push_back({fork_sequence(pool_, models_[at].id), models_[at].parts});
                    break;
                case 8:
                    publish_and_match(models_[at], random);
                    break;
                case 9:
                    save_and_load(models_[at], random.chance(50));
                    break;
                default:
                    break;
            }
            check(models_[size_t(random.below(int64_t(models_.size())))]);
        }
    }

  private:
    void grow(Model& m, Random& random) {
        if (m.length() > 300) return truncate(m, random);
        const auto n = int32_t(random.chance(50) ? random.between(1, 5) : random.between(1, 150));
        step(pool_, m.id, m.length(), {++texts_, n});
        m.parts.push_back({texts_, n});
    }

    // To where a step or a block has ended. Closed pages have lost bits: within them nothing is as if they had not been closed.
    void truncate(Model& m, Random& random) {
        std::vector<int64_t> ends{0};
        for (int64_t b = 64; b <= m.length(); b += 64) ends.push_back(b);
        int64_t n = 0;
        for (const Part& p : m.parts) {
            n += p.n;
            if (GetParam().bits == 8 || n / 64 == m.length() / 64) ends.push_back(n);
        }
        const int64_t to = ends[size_t(random.below(int64_t(ends.size())))];
        PrefixSteps::truncate(pool_, m.id, to);
        m.cut(to);
    }

    void publish_and_match(const Model& m, Random& random) {
        const auto full = size_t(m.length() / 64);
        if (full == 0) return;
        const auto published = size_t(random.between(1, int64_t(full))),
                   matched = size_t(random.between(1, int64_t(published)));
        publish(pool_, m.id, space_, ++texts_, published);
        const auto [seq, n] = match(pool_, space_, texts_, matched);
        ASSERT_EQ(n, int64_t(matched) * 64);
        Model copy{seq, m.parts};
        copy.cut(n);
        models_.push_back(copy);
    }

    // The sequence, or the pool in whose place the loaded one goes.
    void save_and_load(const Model& m, bool whole) {
        const Folder folder;
        const std::string path = folder.file("saved");
        ta_error err;
        if (!whole) {
            Model copy{0, m.parts};
            require(ta_seq_save(pool_.get(), m.id, path.c_str(), nullptr, &err), err);
            require(ta_seq_load(pool_.get(), path.c_str(), nullptr, &copy.id, &err), err);
            models_.push_back(copy);
            return;
        }
        require(ta_kv_pool_save(pool_.get(), path.c_str(), TA_SAVE_PUBLISHED, nullptr, &err), err);
        KvPool other = fresh_pool();
        std::vector<ta_loaded_seq> all(models_.size());
        uint64_t n = 0;
        require(ta_kv_pool_load(other.get(), path.c_str(), nullptr, all.data(), all.size(), &n, &err), err);
        ASSERT_EQ(n, models_.size());
        for (Model& model : models_) {
            for (const ta_loaded_seq& s : all) {
                if (s.saved != model.id) continue;
                model.id = s.loaded;
                break;
            }
        }
        pool_ = std::move(other);
        space_ = make_namespace(pool_, 1);
    }

    void check(Model& m) {
        const KvPool plain = fresh_pool();
        const ta_seq seq = make_sequence(plain);
        int64_t at = 0;
        for (const Part& p : m.parts) {
            step(plain, seq, at, p);
            at += p.n;
        }
        ASSERT_EQ(length(pool_, m.id), at);
        ASSERT_TRUE(same_values(pool_, m.id, plain, seq, at));
        const Part more{++texts_, int32_t(1 + texts_ % 3 * 40)};
        ASSERT_TRUE(same_bits(step(pool_, m.id, at, more), step(plain, seq, at, more)));
        m.parts.push_back(more);
        ASSERT_TRUE(same_values(pool_, m.id, plain, seq, at + more.n));
    }

    KvPool pool_;
    ta_namespace space_ = 0;
    std::vector<Model> models_;
    uint64_t texts_ = 0;
};

// TA_UNIVERSAL_WALKS: how many for each setting.
TEST_P(Walk, SequencesAreWhatTheirTokensMakeThem) {
    const uint64_t walks = number_from("TA_UNIVERSAL_WALKS", 2);
    for (uint64_t seed = 0; seed < walks && !HasFailure(); ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        walk(seed);
    }
}

class Cut : public UniversalScale {
  protected:
    // V's error in tokens [first, first + 100), which come one by one and are of size 1, after `prompt` tokens. Of these, tokens
    // [keeps, prompt) are a thousand times as large and truncated away. `with_them`: they came at all.
    double error_after(int32_t prompt, int32_t in_first_step, int32_t keeps, bool with_them) const {
        const KvPool pool = fresh_pool();
        const ta_seq seq = make_sequence(pool);
        std::vector<float> given;
        const auto append_tokens = [&](int64_t first, int32_t n, int64_t loud_from) {
            const Plan plan = make_plan(pool);
            begin(plan, {seq}, {n});
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                std::vector<float> x;
                for (int64_t t = first; t < first + n; ++t) {
                    for (float v : Random(uint64_t(t)).normals(kRow)) x.push_back(t >= loud_from ? 1000.0f * v : v);
                }
                Tensor k(x, n, kHeads, kDim), v(x, n, kHeads, kDim);
                append(plan, layer, k, v);
                if (layer == 0 && n == 1) given.insert(given.end(), x.begin(), x.end());
            }
            end(plan);
        };
        const int32_t come = with_them ? prompt : keeps, first = std::min(in_first_step, come);
        append_tokens(0, first, keeps);
        if (first < come) append_tokens(first, come - first, keeps);
        if (with_them) PrefixSteps::truncate(pool, seq, keeps);
        given.clear();
        for (int i = 0; i < 100; ++i) append_tokens(keeps + i, 1, INT64_MAX);
        const std::vector<float> got = dequantize(pool, seq, 0, keeps, 100, kRow).v;
        double error = 0.0, size = 0.0;
        for (size_t i = 0; i < got.size(); ++i) {
            error += std::pow(double(got[i]) - double(given[i]), 2);
            size += std::pow(double(given[i]), 2);
        }
        return std::sqrt(error / size);
    }
};

// The step that opens a page is cut within it: the scale that a lost token gave the page goes with the token.
TEST_P(Cut, WhatFollowsIsAsExactAsIfTheLostTokensHadNeverBeen) {
    struct Case {
        int32_t prompt, in_first_step, keeps;
    };
    std::vector<Case> cases = {{133, 128, 129}, {150, 128, 135}, {200, 140, 141}};
    // In a page of 4 bits that had a scale for the lost tokens, nothing of the others is left.
    if (GetParam().bits == 8) cases.insert(cases.end(), {{192, 192, 140}, {192, 192, 130}});
    for (const Case& c : cases) {
        const double without = error_after(c.prompt, c.in_first_step, c.keeps, false),
                     with = error_after(c.prompt, c.in_first_step, c.keeps, true);
        EXPECT_LT(with, 1.2 * without) << c.prompt << " tokens, " << c.keeps << " kept: " << without << " without the others";
    }
}

constexpr Setting kSettings[] = {{"Paper8", 8, TA_PROFILE_PAPER},
                                 {"Paper4", 4, TA_PROFILE_PAPER},
                                 {"Accurate4", 4, TA_PROFILE_ACCURATE},
                                 {"Accurate8", 8, TA_PROFILE_ACCURATE}};
const auto kName = [](const auto& info) { return std::string(info.param.name); };
INSTANTIATE_TEST_SUITE_P(All, Walk, ::testing::ValuesIn(kSettings), kName);
INSTANTIATE_TEST_SUITE_P(All, Cut, ::testing::ValuesIn(kSettings), kName);

}  // namespace
}  // namespace ta::testing
