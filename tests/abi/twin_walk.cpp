#include "abi/twin_walk.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>

#include "abi/walk_data.h"
#include "abi/walk_judge.h"

namespace ta::testing {
namespace {

const char* name_of_p(ta_p p) {
    static constexpr const char* kNames[] = {"default", "auto",           "U8",        "U16", "S8_127",
                                             "S8_119",  "S8_127 running", "U8 running"};
    return kNames[p];
}
const char* name_of_exp(ta_exp exp) {
    static constexpr const char* kNames[] = {"default", "poly", "exact", "SAS"};
    return kNames[exp];
}
const char* name_of_type(ta_dtype type) {
    static constexpr const char* kNames[] = {"?", "f16", "bf16", "f32"};
    return kNames[type];
}

// A pool's shape and settings.
struct Settings {
    uint32_t layers, kv_heads, group, head_dim, bits = 4;
    std::vector<uint8_t> k_bits, v_bits;  // empty: bits
    ta_numerics numerics = sized<ta_numerics>();
    std::vector<float> k_offset;

    bool paper() const { return numerics.profile == TA_PROFILE_PAPER; }
    bool rotated() const {
        if (head_dim == 96) return false;
        return numerics.hadamard == TA_DEFAULT ? !paper() : numerics.hadamard == TA_ON;
    }
    bool turning() const { return numerics.k_turning == TA_DEFAULT ? !paper() : numerics.k_turning == TA_ON; }
    bool universal() const { return numerics.open_scale ? numerics.open_scale == TA_OPEN_SCALE_UNIVERSAL : paper(); }
    bool v_exponents() const { return numerics.v_exponents == TA_DEFAULT ? !paper() : numerics.v_exponents == TA_ON; }
    // In each page, be it closed or not.
    bool v_scales_of_tokens() const {
        if (universal()) return false;
        if (numerics.v_granularity == TA_GRANULARITY_TOKEN) return true;
        return bits == 8 ? numerics.v_granularity == TA_DEFAULT && !paper() : v_exponents();
    }
    int64_t sinks() const {
        return numerics.sink_blocks < 0 ? 0 : numerics.sink_blocks > 0 ? numerics.sink_blocks : paper() ? 0 : 1;
    }
    int64_t row() const { return int64_t(kv_heads) * head_dim; }
    int64_t q_heads() const { return int64_t(kv_heads) * group; }
};

Settings draw_settings(Random& random) {
    Settings s{};
    s.layers = uint32_t(random.between(1, 2));
    s.kv_heads = uint32_t(random.between(1, 4));
    s.group = random.pick(std::vector<uint32_t>{1, 2, 3, 4, 5, 8, 16});
    s.head_dim = random.pick(std::vector<uint32_t>{64, 96, 128, 128, 128, 256});
    s.bits = random.pick(std::vector<uint32_t>{8, 4, 4, 2});
    if (s.bits != 8 && random.chance(30)) {
        for (uint32_t i = 0; i < s.layers * s.kv_heads; ++i) {
            s.k_bits.push_back(random.chance(50) ? 4 : 2);
            s.v_bits.push_back(random.chance(50) ? 4 : 2);
        }
    }
    ta_numerics& n = s.numerics;
    n.profile = random.chance(30) ? TA_PROFILE_PAPER : TA_PROFILE_ACCURATE;
    const auto on_or_off = [&] { return random.chance(50) ? TA_ON : TA_OFF; };
    if (random.chance(60)) {
        if (random.chance(30)) n.k_granularity = ta_granularity(random.between(TA_GRANULARITY_TOKEN, TA_GRANULARITY_PAGE));
        if (random.chance(30)) n.v_granularity = ta_granularity(random.between(TA_GRANULARITY_TOKEN, TA_GRANULARITY_PAGE));
        if (random.chance(20)) n.open_scale = random.chance(50) ? TA_OPEN_SCALE_TOKEN : TA_OPEN_SCALE_UNIVERSAL;
        if (random.chance(20)) n.v_exponents = on_or_off();
        if (random.chance(20)) n.fractional_zero = on_or_off();
        if (random.chance(20)) n.v_search = on_or_off();
        if (random.chance(30) && s.head_dim != 96) n.hadamard = on_or_off();
        if (random.chance(50)) n.k_turning = on_or_off();
        if (random.chance(30)) n.sink_blocks = int32_t(random.pick(std::vector<int64_t>{-1, 1, 2, 3}));
        if (random.chance(20)) n.hadamard_seed = uint64_t(random.between(1, 1000));
        if (random.chance(25)) n.p = ta_p(random.between(TA_P_AUTO, TA_P_U8_RUNNING));
        if (random.chance(25)) n.exp = ta_exp(random.between(TA_EXP_POLY, TA_EXP_SAS));
        if (random.chance(25)) s.k_offset = random.normals(int64_t(s.layers) * s.row(), 1.0f);
    }
    return s;
}

std::ostream& operator<<(std::ostream& out, const Settings& s) {
    const ta_numerics& n = s.numerics;
    out << (s.paper() ? "paper" : "accurate") << ", head_dim " << s.head_dim << ", " << s.kv_heads << " kv heads x " << s.group
        << ", " << s.layers << " layers, bits";
    if (s.k_bits.empty()) out << " " << s.bits;
    if (!s.k_bits.empty()) {
        for (const auto* map : {&s.k_bits, &s.v_bits}) {
            out << (map == &s.k_bits ? " K " : " V ");
            for (const uint8_t b : *map) out << int(b);
        }
    }
    static constexpr const char* kSwitch[] = {"", "on", "off"};
    static constexpr const char* kGranularity[] = {"", "token", "page"};
    static constexpr const char* kOpen[] = {"", "token", "universal"};
    if (n.k_granularity) out << ", K scale per " << kGranularity[n.k_granularity];
    if (n.v_granularity) out << ", V scale per " << kGranularity[n.v_granularity];
    if (n.open_scale) out << ", open scale " << kOpen[n.open_scale];
    if (n.v_exponents) out << ", V exponents " << kSwitch[n.v_exponents];
    if (n.fractional_zero) out << ", fractional zero " << kSwitch[n.fractional_zero];
    if (n.v_search) out << ", V search " << kSwitch[n.v_search];
    if (n.hadamard) out << ", hadamard " << kSwitch[n.hadamard];
    if (n.k_turning) out << ", K turning " << kSwitch[n.k_turning];
    if (n.hadamard_seed) out << ", hadamard seed " << n.hadamard_seed;
    if (n.sink_blocks) out << ", sink blocks " << n.sink_blocks;
    if (n.p) out << ", P " << name_of_p(n.p);
    if (n.exp) out << ", exp " << name_of_exp(n.exp);
    if (!s.k_offset.empty()) out << ", K offset";
    return out;
}

struct Known {
    std::vector<float> k, v;  // of all tokens, as they are read
};

struct WalkSequence {
    ta_seq device = 0, cpu = 0, shadow = 0;
    int64_t length = 0;
    std::vector<Known> layers;      // what is stored
    std::vector<DataStyle> styles;  // [layers]
    std::vector<double> v_most;     // [layers] the largest V ever appended, be it truncated since
    std::vector<uint8_t> turns;     // [layers] keys may have turning pairs, whose queries are not rounded
};

// What one attend is asked for.
struct Call {
    ta_attend_options options = sized<ta_attend_options>();
    std::vector<float> slopes, sinks;
    QueryKind queries = QueryKind::kUsual;
    ta_dtype q_type = TA_DTYPE_F32, out_type = TA_DTYPE_F32;
    Layout q_layout = Layout::kPlain, out_layout = Layout::kPlain;
    bool with_lse = true;
};

struct Result {
    std::vector<float> out, lse;
};
// A call and what came of it: on the side under test; on the CPU as asked for, with P of 16 bits, and with P of 8 bits where
// the prefill kernel computes it.
struct Attended {
    uint32_t layer = 0;
    Call call;
    std::vector<float> q, got, lse;
    Result same, truth, eight;
};

class Walk {
  public:
    Walk(Device& device, const Context& cpu, const WalkLimits& limits, uint64_t seed, Shares& shares)
        : device_(device), limits_(limits), shares_(shares), random_(seed), s_(draw_settings(random_)) {
        if (!s_.k_offset.empty()) s_.numerics.k_offset = s_.k_offset.data();
        auto options = pool_options(s_.layers, s_.kv_heads, s_.head_dim, s_.bits, &s_.numerics);
        if (!s_.k_bits.empty()) options.k_bits = s_.k_bits.data(), options.v_bits = s_.v_bits.data();
        options.budget_bytes = limits.budget_bytes;
        options.max_sequences = 64;
        device_pool_ = make_pool(device.context(), options);
        cpu_pool_ = make_pool(cpu, options);
        device_plan_ = make_plan(device_pool_);
        cpu_plan_ = make_plan(cpu_pool_);
        device.start(device_plan_);
        // Tokens of a block that a step closes are read at 8 bits in that step, which nothing shows afterwards. A pool of 8
        // bits with scales of the same kind does: but for V's token exponents, where a scale of each token's own comes near.
        auto shadow = s_.numerics;
        if (!shadow.k_granularity) shadow.k_granularity = TA_GRANULARITY_PAGE;
        if (!shadow.v_granularity) shadow.v_granularity = s_.v_exponents() ? TA_GRANULARITY_TOKEN : TA_GRANULARITY_PAGE;
        auto shadow_options = pool_options(s_.layers, s_.kv_heads, s_.head_dim, 8, &shadow);
        shadow_options.max_sequences = 64;
        shadow_pool_ = make_pool(cpu, shadow_options);
        shadow_plan_ = make_plan(shadow_pool_);
        // Queries are quantized as keys of a token page are: this pool shows as what they are read.
        auto numerics = sized<ta_numerics>();
        numerics.k_granularity = TA_GRANULARITY_TOKEN;
        numerics.hadamard = s_.rotated() ? TA_ON : TA_OFF;
        numerics.hadamard_seed = s_.numerics.hadamard_seed;
        numerics.k_turning = TA_OFF;
        query_pool_ = make_pool(cpu, pool_options(1, uint32_t(s_.q_heads()), s_.head_dim, 8, &numerics));
        query_plan_ = make_plan(query_pool_);
    }

    std::string setting() const {
        std::ostringstream text;
        text << s_;
        return text.str();
    }

    // What is wrong, or nothing.
    std::string run() {
        for (int i = 0; i < limits_.steps && wrong_.empty(); ++i) move();
        for (const auto& s : sequences_) {
            if (wrong_.empty()) compare_stored(*s, 0);
            if (wrong_.empty()) compare_pages(*s);
        }
        return wrong_;
    }
    std::string history() const { return history_.str(); }

  private:
    static constexpr size_t kMostSequences = 5;
    using Sequence = std::shared_ptr<WalkSequence>;

    void fail(const std::string& what) {
        if (wrong_.empty()) wrong_ = what;
    }

    // ---------------------------------------------------------------------------------------------------- sequence calls

    void move() {
        const int64_t n = random_.below(100);
        ta_error err;
        const auto any = [&] { return size_t(random_.below(int64_t(sequences_.size()))); };
        if (sequences_.size() < 2 || (n < 12 && sequences_.size() < kMostSequences)) create();
        if (n >= 12 && n < 22 && sequences_.size() < kMostSequences) {
            const WalkSequence& from = *sequences_[any()];
            history_ << "\n  fork of " << from.length;
            auto s = std::make_shared<WalkSequence>(from);
            s->device = fork_sequence(device_pool_, from.device);
            s->cpu = fork_sequence(cpu_pool_, from.cpu);
            s->shadow = fork_sequence(shadow_pool_, from.shadow);
            sequences_.push_back(s);
        } else if (n >= 22 && n < 34) {
            WalkSequence& s = *sequences_[any()];
            int64_t to = random_.between(0, s.length);
            if (random_.chance(30)) to = std::max<int64_t>(0, s.length - random_.between(0, 5));
            if (random_.chance(20)) to = to / 64 * 64;
            history_ << "\n  truncate " << s.length << " to " << to;
            require(ta_seq_truncate(device_pool_.get(), s.device, to, &err), err);
            require(ta_seq_truncate(cpu_pool_.get(), s.cpu, to, &err), err);
            require(ta_seq_truncate(shadow_pool_.get(), s.shadow, to, &err), err);
            s.length = to;
            for (Known& known : s.layers) known.k.resize(size_t(to * s_.row())), known.v.resize(size_t(to * s_.row()));
            compare_stored(s, std::max<int64_t>(0, to / 64 * 64 - 64));
        } else if (n >= 34 && n < 39 && sequences_.size() > 2) {
            const size_t i = any();
            history_ << "\n  release " << sequences_[i]->length;
            require(ta_seq_release(device_pool_.get(), sequences_[i]->device, &err), err);
            require(ta_seq_release(cpu_pool_.get(), sequences_[i]->cpu, &err), err);
            require(ta_seq_release(shadow_pool_.get(), sequences_[i]->shadow, &err), err);
            sequences_.erase(sequences_.begin() + int64_t(i));
        }
        step();
    }

    void create() {
        auto s = std::make_shared<WalkSequence>();
        s->device = make_sequence(device_pool_);
        s->cpu = make_sequence(cpu_pool_);
        s->shadow = make_sequence(shadow_pool_);
        s->layers.resize(s_.layers);
        s->v_most.resize(s_.layers);
        for (uint32_t i = 0; i < s_.layers; ++i) s->styles.push_back(draw_style(random_));
        s->turns.assign(s_.layers, 0);
        sequences_.push_back(s);
        history_ << "\n  create";
    }

    // ------------------------------------------------------------------------------------------------------------ a step

    struct Member {
        Sequence sequence;
        int32_t n_new = 0, n_query = 0;
        int64_t new_row = 0, query_row = 0;
        std::vector<Known> open = {};                // [layers] what its open block had before
        std::vector<std::vector<float>> new_v = {};  // [layers] what was appended
    };

    void step() {
        std::vector<Sequence> chosen = sequences_;
        for (size_t i = chosen.size(); i > 1; --i) std::swap(chosen[i - 1], chosen[size_t(random_.below(int64_t(i)))]);
        chosen.resize(size_t(random_.between(1, std::min<int64_t>(3, int64_t(chosen.size())))));
        const bool only_queries = random_.chance(25), only_decode = random_.chance(30);
        std::vector<Member> members;
        for (const Sequence& s : chosen) {
            Member m{s};
            const int64_t to_full = 64 - s->length % 64;
            m.n_new = int32_t(only_queries         ? 0
                              : only_decode        ? random_.between(1, 16)
                              : random_.chance(10) ? 0
                              : random_.chance(25) ? random_.between(1, 16)
                              : random_.chance(20) ? to_full + random_.between(-1, 1)
                              : random_.chance(10) ? random_.between(700, 2000)
                              : random_.chance(40) ? random_.between(17, 200)
                                                   : random_.between(100, 700));
            m.n_new = int32_t(std::min<int64_t>(m.n_new, limits_.most_tokens - s->length));
            const int64_t total = s->length + m.n_new;
            m.n_query = int32_t(random_.chance(70) && m.n_new > 0 ? m.n_new
                                : random_.chance(10)              ? 0
                                : random_.chance(40)              ? random_.between(1, 16)
                                                                  : random_.between(1, 300));
            m.n_query = int32_t(std::min<int64_t>(m.n_query, total));
            const double each = double(total) * double(s_.q_heads()) * s_.head_dim;
            const double most = limits_.most_products / double(chosen.size());
            if (m.n_query * each > most) m.n_query = std::max(1, int32_t(most / each));
            members.push_back(m);
        }
        run_step(members);
    }

    void run_step(std::vector<Member>& members) {
        std::vector<ta_seq> on_device, on_cpu, on_shadow;
        std::vector<int32_t> n_new, n_query;
        int64_t total_new = 0, total_query = 0;
        history_ << "\n  step:";
        for (Member& m : members) {
            m.new_row = total_new, m.query_row = total_query;
            total_new += m.n_new, total_query += m.n_query;
            on_device.push_back(m.sequence->device), on_cpu.push_back(m.sequence->cpu);
            on_shadow.push_back(m.sequence->shadow);
            n_new.push_back(m.n_new), n_query.push_back(m.n_query);
            history_ << " " << m.sequence->length << "+" << m.n_new << " q" << m.n_query;
        }
        begin(device_plan_, on_device, n_new, n_query);
        begin(cpu_plan_, on_cpu, n_new, n_query);
        begin(shadow_plan_, on_shadow, n_new, std::vector<int32_t>(members.size(), 0));
        std::vector<Attended> attended;
        for (uint32_t layer = 0; layer < s_.layers; ++layer) {
            if (total_new > 0) append_to_all(members, layer, total_new);
            const int attends = total_query == 0 ? 0 : random_.chance(20) ? 2 : 1;
            for (int i = 0; i < attends && wrong_.empty(); ++i) attended.push_back(attend_both(members, layer, total_query));
        }
        end(device_plan_);
        end(cpu_plan_);
        end(shadow_plan_);
        device_.wait();
        for (const Member& m : members) {
            WalkSequence& s = *m.sequence;
            s.length += m.n_new;
            if (wrong_.empty()) compare_stored(s, m.n_new > 0 ? (s.length - m.n_new) / 64 * 64 : s.length);
        }
        for (const Member& m : members) {
            for (uint32_t layer = 0; layer < s_.layers && wrong_.empty() && m.n_query > 0; ++layer) {
                const Known read = as_read_in_step(m, layer);
                for (Attended& a : attended) {
                    if (a.layer == layer && wrong_.empty()) judge_one(a, m, read);
                }
            }
        }
        if (wrong_.empty() && random_.chance(30)) compare_pages(*members[0].sequence);
    }

    void append_to_all(std::vector<Member>& members, uint32_t layer, int64_t total_new) {
        const TokenShape shape{s_.kv_heads, s_.head_dim};
        const ta_dtype k_type = kDtypes[random_.below(3)], v_type = random_.chance(70) ? k_type : kDtypes[random_.below(3)];
        std::vector<float> new_k, new_v;
        history_ << "\n    append to layer " << layer << ", " << name_of_type(k_type) << " " << name_of_type(v_type) << ":";
        for (const Member& m : members) {
            WalkSequence& s = *m.sequence;
            if (random_.chance(25)) s.styles[layer] = draw_style(random_);
            const DataStyle& style = s.styles[layer];
            if (m.n_new == 0) continue;
            s.turns[layer] |= style.keys != KeyKind::kNormal || !s_.k_offset.empty();
            history_ << " K " << name_of(style.keys) << ", V " << name_of(style.values) << ";";
            const std::vector<float> k = make_keys(style, shape, k_type, s.length, m.n_new, random_),
                                     v = make_values(style, shape, v_type, s.length, m.n_new, random_);
            new_k.insert(new_k.end(), k.begin(), k.end());
            new_v.insert(new_v.end(), v.begin(), v.end());
        }
        Tensor k(new_k, total_new, s_.kv_heads, s_.head_dim, k_type, kLayouts[random_.below(4)]),
            v(new_v, total_new, s_.kv_heads, s_.head_dim, v_type, kLayouts[random_.below(4)]);
        const auto placed_k = device_.place(k), placed_v = device_.place(v);
        ta_error err;
        require(ta_append(device_plan_.get(), layer, placed_k->view(), placed_v->view(), &err), err);
        append(cpu_plan_, layer, k, v);
        append(shadow_plan_, layer, k, v);
        device_.wait();
        const std::vector<float> k_values = k.values(), v_values = v.values();
        for (Member& m : members) {
            Known& known = m.sequence->layers[layer];
            // What was stored in a block that may be closed now is read as it was.
            const int64_t open = m.sequence->length / 64 * 64 * s_.row();
            m.open.resize(s_.layers);
            m.open[layer] = {{known.k.begin() + open, known.k.end()}, {known.v.begin() + open, known.v.end()}};
            const int64_t from = m.new_row * s_.row(), to = (m.new_row + m.n_new) * s_.row();
            known.k.insert(known.k.end(), k_values.begin() + from, k_values.begin() + to);
            known.v.insert(known.v.end(), v_values.begin() + from, v_values.begin() + to);
            m.new_v.resize(s_.layers);
            m.new_v[layer] = {v_values.begin() + from, v_values.begin() + to};
            double& most = m.sequence->v_most[layer];
            for (int64_t i = from; i < to; ++i) most = std::max(most, std::fabs(double(v_values[size_t(i)])));
        }
    }

    // K and V of a layer as the step that has just ended read them.
    Known as_read_in_step(const Member& m, uint32_t layer) const {
        const WalkSequence& s = *m.sequence;
        Known read = s.layers[layer];
        if (m.n_new == 0 || s_.bits == 8) return read;
        const int64_t before = s.length - m.n_new, row = s_.row();
        const int64_t from = std::max(before / 64, s_.sinks()) * 64, to = s.length / 64 * 64;
        if (from >= to) return read;
        const Stored shadow = dequantize(shadow_pool_, s.shadow, layer, from, to - from, row);
        std::copy(shadow.k.begin(), shadow.k.end(), read.k.begin() + from * row);
        std::copy(shadow.v.begin(), shadow.v.end(), read.v.begin() + from * row);
        // Beside a universal scale pools of 8 bits have no scales of V's tokens either: what was appended comes near.
        const int64_t whole = std::max((before + 63) / 64 * 64, from);
        if (s_.universal() && s_.v_exponents() && whole < to) {
            const auto v = m.new_v[layer].begin();
            std::copy(v + (whole - before) * row, v + (to - before) * row, read.v.begin() + whole * row);
        }
        if (from == before / 64 * 64) {
            std::copy(m.open[layer].k.begin(), m.open[layer].k.end(), read.k.begin() + from * row);
            std::copy(m.open[layer].v.begin(), m.open[layer].v.end(), read.v.begin() + from * row);
        }
        return read;
    }

    Call draw_call() {
        Call c;
        ta_attend_options& o = c.options;
        if (random_.chance(25)) o.mask = TA_MASK_FULL;
        if (random_.chance(20)) o.window = random_.chance(50) ? random_.between(1, 100) : random_.between(1, 1000);
        if (random_.chance(15)) o.softcap = random_.pick(std::vector<float>{1.0f, 5.0f, 50.0f});
        if (random_.chance(15)) o.scale = float(random_.uniform(0.02, 0.5));
        if (random_.chance(30)) o.exp = ta_exp(random_.between(TA_EXP_POLY, TA_EXP_SAS));
        if (random_.chance(50)) o.p = ta_p(random_.between(TA_P_AUTO, TA_P_U8_RUNNING));
        if (device_.stands_in()) o.p = ta_p(random_.between(TA_P_AUTO, TA_P_U16));
        if (random_.chance(15)) c.slopes = random_.normals(s_.q_heads(), random_.chance(50) ? 0.01f : 0.2f);
        if (random_.chance(15)) c.sinks = random_.normals(s_.q_heads(), 3.0f);
        c.queries = QueryKind(random_.below(int64_t(QueryKind::kCount)));
        c.q_type = kDtypes[random_.below(3)], c.out_type = kDtypes[random_.below(3)];
        c.q_layout = kLayouts[random_.below(4)], c.out_layout = kLayouts[random_.below(4)];
        c.with_lse = random_.chance(50);
        return c;
    }
    static std::string describe(const Call& c) {
        const ta_attend_options& o = c.options;
        std::ostringstream text;
        text << "; queries " << name_of(c.queries) << ", " << name_of_type(c.q_type) << " -> " << name_of_type(c.out_type);
        if (o.mask == TA_MASK_FULL) text << ", full";
        if (o.window) text << ", window " << o.window;
        if (o.softcap != 0.0f) text << ", softcap " << o.softcap;
        if (o.scale != 0.0f) text << ", scale " << o.scale;
        if (o.exp) text << ", exp " << name_of_exp(o.exp);
        if (o.p) text << ", P " << name_of_p(o.p);
        if (!c.slopes.empty()) text << ", ALiBi";
        if (!c.sinks.empty()) text << ", sinks";
        if (c.with_lse) text << ", LSE";
        return text.str();
    }

    Result on_cpu(Call& c, Tensor& q, uint32_t layer, ta_p p, ta_exp exp) {
        auto options = c.options;
        options.p = p, options.exp = exp;
        if (!c.slopes.empty()) options.alibi_slopes = c.slopes.data();
        if (!c.sinks.empty()) options.sinks = c.sinks.data();
        const int64_t rows = q.view()->tokens;
        Tensor out(rows, s_.q_heads(), s_.head_dim);
        Result r;
        r.lse.resize(size_t(rows * s_.q_heads()));
        attend(cpu_plan_, layer, q, out, r.lse.data(), &options);
        r.out = out.values();
        return r;
    }

    ta_p p_of(const Call& c) const {
        if (c.options.p != TA_P_DEFAULT) return c.options.p;
        return s_.numerics.p != TA_P_DEFAULT ? s_.numerics.p : s_.paper() ? TA_P_S8_119 : TA_P_AUTO;
    }
    double levels_of(const Call& c, int64_t n_query) const {
        switch (p_of(c)) {
            case TA_P_U16:
                return 65535.0;
            case TA_P_S8_127:
            case TA_P_S8_127_RUNNING:
                return 127.0;
            case TA_P_S8_119:
                return 119.0;
            case TA_P_AUTO:
                return n_query * s_.group <= 16 ? 65535.0 : 255.0;
            default:
                return 255.0;
        }
    }
    double scale_of(const Call& c) const {
        return c.options.scale != 0.0f ? double(c.options.scale) : 1.0 / std::sqrt(double(s_.head_dim));
    }
    bool sas_of(const Call& c) const {
        if (c.options.exp != TA_EXP_DEFAULT) return c.options.exp == TA_EXP_SAS;
        return s_.numerics.exp != TA_EXP_DEFAULT ? s_.numerics.exp == TA_EXP_SAS : s_.paper();
    }

    Attended attend_both(const std::vector<Member>& members, uint32_t layer, int64_t total_query) {
        Attended a;
        a.layer = layer;
        Call& c = a.call;
        c = draw_call();
        std::vector<float> queries;
        for (const Member& m : members) {
            const Known& known = m.sequence->layers[layer];
            const std::vector<float> q = make_queries(c.queries, {s_.kv_heads, s_.head_dim}, s_.group, scale_of(c), known.k,
                                                      m.sequence->length + m.n_new, m.n_query, random_);
            queries.insert(queries.end(), q.begin(), q.end());
        }
        // Near its smallest number F16 has few values, and half of them lie half way between two codes.
        float largest = 0.0f;
        for (const float x : queries) largest = std::max(largest, std::fabs(x));
        if (c.q_type == TA_DTYPE_F16 && largest < 0.1f) c.q_type = TA_DTYPE_BF16;
        if (c.q_type == TA_DTYPE_F16) {
            for (float& x : queries) x = std::clamp(x, -6e4f, 6e4f);
        }
        Tensor q(queries, total_query, s_.q_heads(), s_.head_dim, c.q_type, c.q_layout);
        const ta_exp exact = sas_of(c) ? TA_EXP_SAS : TA_EXP_EXACT;
        a.same = on_cpu(c, q, layer, c.options.p, c.options.exp);
        a.truth = on_cpu(c, q, layer, TA_P_U16, exact);
        float most = 0.0f;
        for (const float x : a.truth.out) most = std::max(most, std::fabs(x));
        if (most > 6e4f && c.out_type == TA_DTYPE_F16) c.out_type = TA_DTYPE_BF16;  // it would be infinite
        history_ << "\n    attend to layer " << layer << describe(c);

        Tensor out(total_query, s_.q_heads(), s_.head_dim, c.out_type, c.out_layout);
        a.lse.assign(size_t(total_query * s_.q_heads()), -777.0f);
        {
            const auto placed_q = device_.place(q), placed_out = device_.place(out);
            const auto placed_lse = device_.place(a.lse), slopes = device_.place(c.slopes), sinks = device_.place(c.sinks);
            auto options = c.options;
            if (!c.slopes.empty()) options.alibi_slopes = slopes->data();
            if (!c.sinks.empty()) options.sinks = sinks->data();
            ta_error err;
            require(ta_attend(device_plan_.get(), layer, placed_q->view(), placed_out->view(),
                              c.with_lse ? placed_lse->data() : nullptr, &options, &err),
                    err);
            device_.wait();
            placed_out->fetch();
            placed_lse->fetch();
        }
        device_.spoil(out, a.lse);
        if (!out.gaps_poison()) fail("something was written between the rows of O");
        a.got = out.values(), a.q = q.values();
        if (device_.is_exact()) {
            for (size_t i = 0; i < a.got.size(); ++i) {
                const float want = round_to(c.out_type, a.same.out[i]);
                if (a.got[i] == want) continue;
                const auto at = int64_t(i), d = int64_t(s_.head_dim);
                std::ostringstream text;
                text.precision(9);
                text << "layer " << layer << ", row " << at / d / s_.q_heads() << " of O, head " << at / d % s_.q_heads()
                     << ", channel " << at % d << " is to be " << want << " to the bit, not " << a.got[i];
                fail(text.str());
            }
        }
        for (const Member& m : members) {
            if (by_prefill_kernel(c, m.n_query) && a.eight.out.empty()) a.eight = on_cpu(c, q, layer, TA_P_U8, c.options.exp);
        }
        return a;
    }

    // P of fewer levels and of the running maximum is computed as U8 there (docs/gpu.md).
    bool by_prefill_kernel(const Call& c, int64_t n_query) const {
        return device_.has_prefill_kernel() && n_query * s_.group > 16 && p_of(c) != TA_P_U16 &&
               (s_.head_dim == 64 || s_.head_dim == 128);
    }

    void judge_one(const Attended& a, const Member& m, const Known& read) {
        const Call& c = a.call;
        const int64_t at = m.query_row * s_.q_heads();
        JudgedCall j;
        j.n_query = m.n_query, j.n_keys = m.sequence->length;
        j.kv_heads = s_.kv_heads, j.group = s_.group, j.head_dim = s_.head_dim;
        j.causal = c.options.mask == TA_MASK_CAUSAL, j.window = c.options.window;
        j.scale = scale_of(c), j.softcap = double(c.options.softcap);
        if (!c.slopes.empty()) j.slopes = c.slopes.data();
        if (!c.sinks.empty()) j.sinks = c.sinks.data();
        if (!s_.k_offset.empty()) j.k_offset = s_.k_offset.data() + a.layer * s_.row();
        j.sas = sas_of(c), j.with_lse = c.with_lse, j.rotated = s_.rotated();
        j.v_has_token_scales = s_.v_scales_of_tokens();
        j.p_levels = levels_of(c, m.n_query);
        if (s_.universal()) j.v_most = m.sequence->v_most[a.layer];
        j.by_prefill_kernel = by_prefill_kernel(c, m.n_query);
        j.out_type = c.out_type;
        j.q = a.q.data() + at * s_.head_dim, j.k = read.k.data(), j.v = read.v.data();
        j.read_codes = [&](const float* q) { return codes_of(q, m.n_query); };
        j.got = a.got.data() + at * s_.head_dim;
        j.beside = (j.by_prefill_kernel ? a.eight : a.same).out.data() + at * s_.head_dim;
        j.truth = a.truth.out.data() + at * s_.head_dim;
        j.got_lse = a.lse.data() + at, j.truth_lse = a.same.lse.data() + at;
        std::string wrong = judge(j, shares_);
        if (wrong.empty() && m.n_new == 0 && !(m.sequence->turns[a.layer] && s_.turning())) {
            j.truth_lse = a.truth.lse.data() + at;
            wrong = judge_truth(j, shares_);
        }
        if (wrong.empty()) return;
        std::ostringstream text;
        text << "layer " << a.layer << ", sequence of " << m.sequence->length << " tokens, " << m.n_new << " of them new"
             << (j.by_prefill_kernel ? ", prefill kernel" : "") << describe(c) << ":\n  " << wrong;
        fail(text.str());
    }

    // Queries as their codes say them.
    std::vector<float> codes_of(const float* q, int64_t n) {
        const ta_seq seq = make_sequence(query_pool_);
        begin(query_plan_, {seq}, {int32_t(n)}, {0});
        const ta_tensor rows = view_of(q, n, s_.q_heads(), s_.head_dim);
        ta_error err;
        require(ta_append(query_plan_.get(), 0, &rows, &rows, &err), err);
        end(query_plan_);
        Stored stored = dequantize(query_pool_, seq, 0, 0, n, s_.q_heads() * s_.head_dim);
        require(ta_seq_release(query_pool_.get(), seq, &err), err);
        return std::move(stored.k);
    }

    // ------------------------------------------------------------------------------------------------- what is stored

    // Of tokens from `first` on, to the bit; and takes over what the CPU has.
    void compare_stored(WalkSequence& s, int64_t first) {
        const int64_t n = s.length - first, row = s_.row();
        if (length(device_pool_, s.device) != s.length || length(cpu_pool_, s.cpu) != s.length) return fail("wrong length");
        for (uint32_t layer = 0; layer < s_.layers && n > 0; ++layer) {
            const Stored got = dequantize(device_pool_, s.device, layer, first, n, row),
                         want = dequantize(cpu_pool_, s.cpu, layer, first, n, row);
            for (const bool keys : {true, false}) {
                const auto &a = keys ? got.k : got.v, &b = keys ? want.k : want.v;
                if (a == b) continue;
                const auto i = std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin();
                std::ostringstream text;
                text.precision(9);
                text << "stored " << (keys ? "K" : "V") << " of layer " << layer << ", token " << first + i / row << " of "
                     << s.length << ", head " << i % row / s_.head_dim << ", channel " << i % s_.head_dim << ": "
                     << a[size_t(i)] << ", not " << b[size_t(i)];
                return fail(text.str());
            }
            std::copy(want.k.begin(), want.k.end(), s.layers[layer].k.begin() + first * row);
            std::copy(want.v.begin(), want.v.end(), s.layers[layer].v.begin() + first * row);
        }
    }

    void compare_pages(const WalkSequence& s) {
        ta_error err;
        require(ta_seq_verify(device_pool_.get(), s.device, &err), err);
        std::vector<uint8_t> got, want;
        for (int64_t b = 0; b < s.length / 64; ++b) {  // of others some bytes are unspecified
            auto info = sized<ta_x_block_info>(), other = sized<ta_x_block_info>();
            require(ta_x_seq_block(cpu_pool_.get(), s.cpu, uint64_t(b), &info, nullptr, 0, &err), err);
            got.resize(info.bytes), want.resize(info.bytes);
            require(ta_x_seq_block(cpu_pool_.get(), s.cpu, uint64_t(b), &info, want.data(), want.size(), &err), err);
            require(ta_x_seq_block(device_pool_.get(), s.device, uint64_t(b), &other, got.data(), got.size(), &err), err);
            const bool same = info.bits == other.bits && info.tokens == other.tokens &&
                              (info.tokens < 64 || std::memcmp(got.data(), want.data(), info.trailer_offset) == 0);
            if (!same)
                return fail("bytes of block " + std::to_string(b) + " of " + std::to_string(s.length) + " tokens differ");
        }
    }

    Device& device_;
    const WalkLimits limits_;
    Shares& shares_;
    Random random_;
    Settings s_;
    KvPool device_pool_, cpu_pool_, shadow_pool_, query_pool_;
    Plan device_plan_, cpu_plan_, shadow_plan_, query_plan_;
    std::vector<Sequence> sequences_;
    std::ostringstream history_;
    std::string wrong_;
};

uint64_t number_from(const char* variable, uint64_t otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

std::string one_walk(Device& device, const Context& cpu, const WalkLimits& limits, uint64_t seed, Shares& shares) {
    Walk walk(device, cpu, limits, seed, shares);
    if (number_from("TA_WALK_VERBOSE", 0)) {
        std::printf("%llu: %s\n", (unsigned long long)seed, walk.setting().c_str());
        std::fflush(stdout);
    }
    std::string wrong;
    try {
        wrong = walk.run();
    } catch (const std::exception& e) {
        wrong = std::string("a correct call failed: ") + e.what();
    }
    if (wrong.empty()) return {};
    return "TA_WALK_SEED=" + std::to_string(seed) + " (" + walk.setting() + ")\n" + wrong + "\nThe walk:" + walk.history();
}

}  // namespace

std::string run_walk(Device& device, const Context& cpu, const WalkLimits& limits, uint64_t seed) {
    Shares shares;
    return one_walk(device, cpu, limits, seed, shares);
}

std::string run_walks(Device& device, const Context& cpu, const WalkLimits& limits) {
    const auto seconds = double(number_from("TA_WALK_SECONDS", uint64_t(limits.seconds)));
    const auto start = std::chrono::steady_clock::now();
    const uint64_t first = number_from("TA_WALK_SEED", 1);
    uint64_t seed = first;
    Shares shares;
    std::string wrong;
    do {
        wrong = one_walk(device, cpu, limits, seed, shares);
        ++seed;
    } while (wrong.empty() && std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
    std::printf(
        "%llu walks, seeds from %llu; largest shares of bounds: O %.2f (decode), %.2f (prefill), LSE %.2f, %.2f; P of 16 bits "
        "beside float64 %.2f\nby what is known of rows: %llu of %llu sets of rows of O, %llu of %llu LSE, %llu of %llu beside "
        "float64\n",
        (unsigned long long)(seed - first), (unsigned long long)first, shares.o_decode, shares.o_prefill, shares.lse_decode,
        shares.lse_prefill, shares.exact, (unsigned long long)shares.o_excused, (unsigned long long)shares.o_sets,
        (unsigned long long)shares.lse_excused, (unsigned long long)shares.lse_rows, (unsigned long long)shares.exact_excused,
        (unsigned long long)shares.exact_rows);
    return wrong;
}

}  // namespace ta::testing
