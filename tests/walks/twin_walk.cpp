#include "walks/twin_walk.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "walks/walk_data.h"

namespace ta::testing {
namespace {

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
            s.k_bits.push_back(random.pick(std::vector<uint8_t>{8, 4, 4, 2, 2}));
            s.v_bits.push_back(random.pick(std::vector<uint8_t>{8, 4, 4, 2, 2}));
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
        if (random.chance(20)) n.k_search = on_or_off();
        if (random.chance(20)) n.unit_slope = on_or_off();
        if (random.chance(30)) n.q_bits = random.chance(50) ? 15 : 8;
        if (random.chance(30) && s.head_dim != 96) n.hadamard = on_or_off();
        if (random.chance(50)) n.k_turning = on_or_off();
        if (random.chance(30)) n.sink_blocks = int32_t(random.pick(std::vector<int64_t>{-1, 1, 2, 3}));
        if (random.chance(20)) n.hadamard_seed = uint64_t(random.between(1, 1000));
        if (random.chance(25)) n.p = ta_p(random.between(TA_P_AUTO, TA_P_U8_RUNNING));
        if (random.chance(25)) n.exp = ta_exp(random.between(TA_EXP_POLY, TA_EXP_SAS));
        if (random.chance(25)) s.k_offset = random.normals(int64_t(s.layers) * s.row(), 1.0f);
    }
    // SAS and P of the running maximum show where a context is cut, and there a GPU cuts elsewhere. Nothing is drawn for it: the other
    // walks stay as they are.
    const bool chosen = (s.layers + s.kv_heads + s.group) % 4 == 0;
    if (chosen && n.profile == TA_PROFILE_ACCURATE && n.exp != TA_EXP_SAS && n.p < TA_P_S8_127_RUNNING) {
        n.batch_invariant = TA_ON;
        n.k_granularity = n.v_granularity = TA_GRANULARITY_DEFAULT;
        n.open_scale = TA_OPEN_SCALE_DEFAULT;
        n.k_turning = TA_DEFAULT;
    }
    return s;
}

// `n`: as in effect.
std::string text_of(const Settings& s, const ta_numerics& n) {
    std::ostringstream text;
    text << "head_dim " << s.head_dim << ", " << s.kv_heads << " kv heads x " << s.group << ", " << s.layers << " layers, bits";
    if (s.k_bits.empty()) text << " " << s.bits;
    for (const auto* map : {&s.k_bits, &s.v_bits}) {
        if (!map->empty()) text << (map == &s.k_bits ? " K " : " V ");
        for (const uint8_t b : *map) text << int(b);
    }
    text << ", as ta_numerics has them: profile " << n.profile << ", granularities " << n.k_granularity << " "
         << n.v_granularity << ", open scale " << n.open_scale << ", V exponents " << n.v_exponents << ", fractional zero "
         << n.fractional_zero << ", V search " << n.v_search << ", hadamard " << n.hadamard << ", seed " << n.hadamard_seed
         << ", sink blocks " << n.sink_blocks << ", exp " << n.exp << ", P " << n.p << ", K offset " << (n.k_offset != nullptr)
         << ", K turning " << n.k_turning << ", K search " << n.k_search << ", unit slope " << n.unit_slope << ", q bits "
         << n.q_bits << ", batch invariant " << n.batch_invariant;
    return text.str();
}

struct WalkSequence {
    ta_seq device = 0, cpu = 0;
    int64_t length = 0;
    std::vector<std::vector<float>> keys;  // [layers] as they are stored, for queries that look at them
    std::vector<DataStyle> styles;         // [layers]
};

// The arguments of one attend.
struct Call {
    ta_attend_options options = sized<ta_attend_options>();
    std::vector<float> slopes, sinks;
    QueryKind queries = QueryKind::kUsual;
    ta_dtype q_type = TA_DTYPE_F32, out_type = TA_DTYPE_F32;
    Layout q_layout = Layout::kPlain, out_layout = Layout::kPlain;
    bool with_lse = true;
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
        ta_error err;
        require(ta_kv_pool_describe(cpu_pool_.get(), &description_, &err), err);
    }

    std::string setting() const { return text_of(s_, *description_.numerics); }

    // Returns what is wrong, or nothing.
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
            sequences_.push_back(s);
        } else if (n >= 22 && n < 34) {
            WalkSequence& s = *sequences_[any()];
            int64_t to = random_.between(0, s.length);
            if (random_.chance(30)) to = std::max<int64_t>(0, s.length - random_.between(0, 5));
            if (random_.chance(20)) to = to / 64 * 64;
            history_ << "\n  truncate " << s.length << " to " << to;
            require(ta_seq_truncate(device_pool_.get(), s.device, to, &err), err);
            require(ta_seq_truncate(cpu_pool_.get(), s.cpu, to, &err), err);
            s.length = to;
            for (std::vector<float>& keys : s.keys) keys.resize(size_t(to * s_.row()));
            compare_stored(s, std::max<int64_t>(0, to / 64 * 64 - 64));
        } else if (n >= 34 && n < 39 && sequences_.size() > 2) {
            const size_t i = any();
            history_ << "\n  release " << sequences_[i]->length;
            require(ta_seq_release(device_pool_.get(), sequences_[i]->device, &err), err);
            require(ta_seq_release(cpu_pool_.get(), sequences_[i]->cpu, &err), err);
            sequences_.erase(sequences_.begin() + int64_t(i));
        }
        step();
    }

    void create() {
        auto s = std::make_shared<WalkSequence>();
        s->device = make_sequence(device_pool_);
        s->cpu = make_sequence(cpu_pool_);
        s->keys.resize(s_.layers);
        for (uint32_t i = 0; i < s_.layers; ++i) s->styles.push_back(draw_style(random_));
        sequences_.push_back(s);
        history_ << "\n  create";
    }

    // ------------------------------------------------------------------------------------------------------------ a step

    struct Member {
        Sequence sequence;
        int32_t n_new = 0, n_query = 0;
        int64_t new_row = 0;
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
        std::vector<ta_seq> on_device, on_cpu;
        std::vector<int32_t> n_new, n_query;
        int64_t total_new = 0, total_query = 0;
        history_ << "\n  step:";
        for (Member& m : members) {
            m.new_row = total_new;
            total_new += m.n_new, total_query += m.n_query;
            on_device.push_back(m.sequence->device), on_cpu.push_back(m.sequence->cpu);
            n_new.push_back(m.n_new), n_query.push_back(m.n_query);
            history_ << " " << m.sequence->length << "+" << m.n_new << " q" << m.n_query;
        }
        begin(device_plan_, on_device, n_new, n_query);
        begin(cpu_plan_, on_cpu, n_new, n_query);
        for (uint32_t layer = 0; layer < s_.layers; ++layer) {
            if (total_new > 0) append_to_all(members, layer, total_new);
            const int attends = total_query == 0 ? 0 : random_.chance(20) ? 2 : 1;
            for (int i = 0; i < attends && wrong_.empty(); ++i) attend_both(members, layer, total_query);
        }
        end(device_plan_);
        end(cpu_plan_);
        device_.wait();
        for (const Member& m : members) {
            WalkSequence& s = *m.sequence;
            s.length += m.n_new;
            if (wrong_.empty()) compare_stored(s, m.n_new > 0 ? (s.length - m.n_new) / 64 * 64 : s.length);
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
        device_.wait();
        const std::vector<float> values = k.values();
        for (const Member& m : members) {
            std::vector<float>& keys = m.sequence->keys[layer];
            const int64_t from = m.new_row * s_.row();
            keys.insert(keys.end(), values.begin() + from, values.begin() + from + m.n_new * s_.row());
        }
    }

    Call draw_call() {
        Call c;
        ta_attend_options& o = c.options;
        const bool alone = s_.numerics.batch_invariant == TA_ON;
        if (random_.chance(25) && !alone) o.mask = TA_MASK_FULL;
        if (random_.chance(20)) o.window = random_.chance(50) ? random_.between(1, 100) : random_.between(1, 1000);
        if (random_.chance(15)) o.softcap = random_.pick(std::vector<float>{1.0f, 5.0f, 50.0f});
        if (random_.chance(15)) o.scale = float(random_.uniform(0.02, 0.5));
        if (random_.chance(30)) o.exp = ta_exp(random_.between(TA_EXP_POLY, alone ? TA_EXP_EXACT : TA_EXP_SAS));
        if (random_.chance(50)) o.p = ta_p(random_.between(TA_P_AUTO, alone ? TA_P_S8_119 : TA_P_U8_RUNNING));
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
        if (o.exp) text << ", exp " << o.exp;
        if (o.p) text << ", P " << o.p;
        if (!c.slopes.empty()) text << ", ALiBi";
        if (!c.sinks.empty()) text << ", sinks";
        if (c.with_lse) text << ", LSE";
        return text.str();
    }

    // Judges O and LSE of the device by the replay of what the CPU reads.
    void attend_both(const std::vector<Member>& members, uint32_t layer, int64_t total_query) {
        Call c = draw_call();
        const double scale = c.options.scale != 0.0f ? double(c.options.scale) : 1.0 / std::sqrt(double(s_.head_dim));
        ReplayedCall call;
        call.kv_heads = s_.kv_heads, call.group = s_.group, call.head_dim = int(s_.head_dim);
        std::vector<float> queries;
        for (const Member& m : members) {
            const int64_t n_keys = m.sequence->length + m.n_new;
            const std::vector<float> q = make_queries(c.queries, {s_.kv_heads, s_.head_dim}, s_.group, scale,
                                                      m.sequence->keys[layer], n_keys, m.n_query, random_);
            queries.insert(queries.end(), q.begin(), q.end());
            call.members.push_back({n_keys, m.n_query});
        }
        // Near its smallest number F16 has few values, and half of them lie half way between two codes.
        float largest = 0.0f;
        for (const float x : queries) largest = std::max(largest, std::fabs(x));
        if (c.q_type == TA_DTYPE_F16 && largest < 0.1f) c.q_type = TA_DTYPE_BF16;
        if (c.q_type == TA_DTYPE_F16) {
            for (float& x : queries) x = std::clamp(x, -6e4f, 6e4f);
        }
        Tensor q(queries, total_query, s_.q_heads(), s_.head_dim, c.q_type, c.q_layout);
        const std::vector<float> q_values = q.values();
        auto options = c.options;
        if (!c.slopes.empty()) options.alibi_slopes = c.slopes.data();
        if (!c.sinks.empty()) options.sinks = c.sinks.data();
        call.channel_pages = description_.channel_block_bytes > 0;
        call.q = q_values.data(), call.numerics = description_.numerics, call.options = options;
        call.with_lse = c.with_lse, call.scale = scale;
        if (!s_.k_offset.empty()) call.k_offset = s_.k_offset.data() + layer * s_.row();
        Tensor cpu_out(total_query, s_.q_heads(), s_.head_dim);
        std::vector<float> cpu_lse(size_t(total_query * s_.q_heads()));
        Replay replay(call, device_.kernel_of());
        attend(cpu_plan_, layer, q, cpu_out, cpu_lse.data(), &options);
        const std::vector<float> same = cpu_out.values();
        float most = 0.0f;
        for (const float x : same) most = std::max(most, std::fabs(x));
        if (most > 6e4f && c.out_type == TA_DTYPE_F16) c.out_type = TA_DTYPE_BF16;  // it would be infinite
        history_ << "\n    attend to layer " << layer << describe(c);

        Tensor out(total_query, s_.q_heads(), s_.head_dim, c.out_type, c.out_layout);
        std::vector<float> lse(cpu_lse.size(), -777.0f);
        {
            const auto placed_q = device_.place(q), placed_out = device_.place(out);
            const auto placed_lse = device_.place(lse), slopes = device_.place(c.slopes), sinks = device_.place(c.sinks);
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
        device_.spoil(out, lse);
        if (!out.gaps_poison()) fail("something was written between the rows of O");
        const std::vector<float> got = out.values();
        const std::string where = "layer " + std::to_string(layer) + describe(c) + ":\n  ";
        if (device_.is_exact()) {
            for (size_t i = 0; i < got.size(); ++i) {
                if (got[i] != round_to(c.out_type, same[i])) fail(where + "O is not that of the CPU to the bit");
            }
            if (c.with_lse && lse != cpu_lse) fail(where + "LSE is not that of the CPU to the bit");
        }
        if (const std::string wrong = replay.judge(got, c.out_type, lse, shares_); !wrong.empty()) fail(where + wrong);
    }

    // ------------------------------------------------------------------------------------------------- what is stored

    // Of tokens from `first` on, to the bit; and takes over the keys.
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
            std::copy(want.k.begin(), want.k.end(), s.keys[layer].begin() + first * row);
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
    KvPool device_pool_, cpu_pool_;
    Plan device_plan_, cpu_plan_;
    ta_kv_pool_description description_ = sized<ta_kv_pool_description>();  // of cpu_pool_
    std::vector<Sequence> sequences_;
    std::ostringstream history_;
    std::string wrong_;
};

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
    std::printf("%llu walks, seeds from %llu; largest shares of bounds:", (unsigned long long)(seed - first),
                (unsigned long long)first);
    for (int k = 0; k < kKernels; ++k) {
        if (shares.rows[k] > 0)
            std::printf(" %s: O %.2f, LSE %.2f of %llu rows;", name_of(Kernel(k)), shares.o[k], shares.lse[k],
                        (unsigned long long)shares.rows[k]);
    }
    std::printf("\n");
    return wrong;
}

}  // namespace ta::testing
