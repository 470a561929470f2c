// A random walk through the API beside a simple model: which blocks each sequence has and shares. After every move the library must
// agree: lengths, statistics to the last block, hashes. Stored pages and results must be, bit for bit, those of a replay: the
// scalar kernels of one thread, in a pool in which each sequence gets the same tokens alone, without forks.
//
// TA_WALK_SECONDS (10) is the time of all walks together, TA_WALK_SEED (1) where they begin. A failure prints the seed and the
// moves that led to it.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <set>
#include <sstream>

#include "abi/tier_twins.h"
#include "support/exact_attention.h"
#include "support/groups.h"

namespace ta::testing {
namespace {

struct Config {
    const char* name;
    uint32_t layers, kv_heads, q_heads, head_dim, bits;
    std::vector<uint8_t> map = {};  // [layers, kv_heads] for K, backwards for V; empty: bits
    ta_profile profile = TA_PROFILE_ACCURATE;
    int32_t sink_blocks = 0;
    bool k_offset = false;
    ta_switch hadamard = TA_DEFAULT;
    ta_granularity granularity = TA_GRANULARITY_DEFAULT;
    ta_dtype dtype = TA_DTYPE_F32;
    int threads = 1;
    uint32_t budget_blocks = 40;  // token blocks that the budget holds

    int64_t row() const { return int64_t(kv_heads) * head_dim; }
    int64_t q_row() const { return int64_t(q_heads) * head_dim; }
};

std::ostream& operator<<(std::ostream& out, const Config& c) {
    return out << c.name;
}

std::vector<Config> configs() {
    std::vector<Config> all = {
        {"accurate4_d64", 2, 2, 4, 64, 4},      {"accurate2_d128", 1, 2, 2, 128, 2},
        {"accurate8_d96", 2, 1, 3, 96, 8},      {"mixed_d128", 2, 3, 6, 128, 4, {4, 2, 8, 2, 2, 4}},
        {"paper4_d64", 1, 2, 8, 64, 4},         {"paper2_d96", 2, 2, 2, 96, 2},
        {"no_sink_tokens_d96", 2, 2, 4, 96, 4}, {"two_sinks_offset_d64", 1, 3, 3, 64, 4},
    };
    all[1].dtype = TA_DTYPE_F16;
    all[3].threads = 3;
    all[3].dtype = TA_DTYPE_BF16;
    all[4].profile = all[5].profile = TA_PROFILE_PAPER;
    all[5].sink_blocks = 1;
    all[6].sink_blocks = -1;
    all[6].granularity = TA_GRANULARITY_TOKEN;
    all[7].sink_blocks = 2;
    all[7].k_offset = true;
    all[7].threads = 2;
    all[7].budget_blocks = 12;  // often full
    return all;
}

// One block: sequences that share it share the pointer.
struct ModelBlock {
    bool channel = false;
    bool sealed = false;
};

// An input of a sequence, in order: tokens, or a length to which it was cut.
struct Event {
    int64_t length = 0;                    // afterwards
    std::vector<std::vector<float>> k, v;  // [layers]; empty: it was cut
};

struct ModelSequence {
    ta_seq id = 0, replay = 0;
    int64_t length = 0;
    std::vector<std::shared_ptr<ModelBlock>> blocks;
    std::vector<std::shared_ptr<const Event>> events;
    std::vector<Stored> stored;  // [layers] by the replay
    bool knows_scales = true;    // the universal ones: else the next step copies its first block, whose codes they may change
    int64_t reserved = 0;        // tokens that surely find room; unknown after what a reservation says nothing of
};

class Walk {
  public:
    Walk(const Config& config, uint64_t seed) : c_(config), random_(seed), context_(make_context(config.threads)) {
        auto numerics = sized<ta_numerics>();
        numerics.profile = c_.profile;
        numerics.sink_blocks = c_.sink_blocks;
        numerics.hadamard = c_.hadamard;
        numerics.k_granularity = numerics.v_granularity = c_.granularity;
        const std::vector<float> offset = random_.normals(int64_t(c_.layers) * c_.row(), 2.0f);
        if (c_.k_offset) numerics.k_offset = offset.data();
        auto options = pool_options(c_.layers, c_.kv_heads, c_.head_dim, c_.bits, &numerics);
        std::vector<uint8_t> v_map(c_.map.rbegin(), c_.map.rend());
        if (!c_.map.empty()) {
            options.k_bits = c_.map.data();
            options.v_bits = v_map.data();
        }
        options.max_sequences = 2 * kMaxSequences;
        replay_pool_ = make_pool(make_context(1, TA_CPU_ISA_SCALAR), options);
        for (Plan& plan : replay_plans_) plan = make_plan(replay_pool_);
        auto description = sized<ta_kv_pool_description>();
        ta_error err;
        require(ta_kv_pool_describe(replay_pool_.get(), &description, &err), err);
        sinks_ = std::max(0, description.numerics->sink_blocks);
        universal_ = description.numerics->open_scale == TA_OPEN_SCALE_UNIVERSAL;
        closes_ = description.channel_block_bytes > 0;
        peer_pool_ = make_pool(peer_context_, options);
        options.max_sequences = kMaxSequences;
        options.budget_bytes = c_.budget_blocks * description.token_block_bytes + 1000;
        pool_ = make_pool(context_, options);
        plan_ = make_plan(pool_);
        other_plan_ = make_plan(pool_);
        mean_ = random_.normals(2 * c_.row(), 0.5f);
    }

    void move() {
        const int64_t n = random_.below(100);
        if (n < 12) {
            create();
        } else if (n < 22) {
            fork();
        } else if (n < 24) {
            there_and_back();
        } else if (n < 34) {
            truncate();
        } else if (n < 41) {
            release();
        } else if (n < 46) {
            wrong_call();
        } else if (n < 54) {
            reserve();
        } else {
            step();
        }
        check_statistics();
        if (!sequences_.empty() && random_.chance(40)) check_sequence(*random_.pick(sequences_));
    }
    void check_all() {
        for (const auto& s : sequences_) check_sequence(*s);
    }
    std::string history() const { return history_.str(); }

  private:
    static constexpr uint32_t kMaxSequences = 9, kMostMembers = 4;
    // Of O and LSE beside float64 over what is stored and given, both around 1. A step of INT8 of Q, K and V is 5/119 at the most;
    // rounding to it is an error of 0.012 of each channel, and so of a score, to which V and P bring as much. This is ten times
    // that. It finds other keys than those that a row sees; walks.cpu judges the kernels' arithmetic.
    static constexpr double kNear = 0.2;
    using Sequence = std::shared_ptr<ModelSequence>;

    std::ostringstream& note() {
        history_ << "\n";
        return history_;
    }
    Sequence any() { return sequences_.empty() ? nullptr : random_.pick(sequences_); }

    // ------------------------------------------------------------------------------------------------------ sequence calls

    void create() {
        ta_seq seq = 0;
        const ta_status status = ta_seq_create(pool_.get(), &seq, nullptr);
        note() << "create: " << ta_status_name(status);
        if (sequences_.size() == kMaxSequences) {
            EXPECT_EQ(status, TA_E_LIMIT);
            return;
        }
        ASSERT_EQ(status, TA_OK);
        EXPECT_TRUE(ids_.insert(seq).second) << "an id was given out twice";
        auto s = std::make_shared<ModelSequence>();
        s->id = seq;
        s->replay = make_sequence(replay_pool_);
        s->stored.resize(c_.layers);
        sequences_.push_back(s);
    }

    void fork() {
        const Sequence from = any();
        if (!from) return;
        ta_seq seq = 0;
        const ta_status status = ta_seq_fork(pool_.get(), from->id, &seq, nullptr);
        note() << "fork of " << from->length << ": " << ta_status_name(status);
        if (sequences_.size() == kMaxSequences) {
            EXPECT_EQ(status, TA_E_LIMIT);
            return;
        }
        ASSERT_EQ(status, TA_OK);
        EXPECT_TRUE(ids_.insert(seq).second) << "an id was given out twice";
        auto s = std::make_shared<ModelSequence>(*from);
        s->id = seq;
        s->replay = replay(s->events);
        s->knows_scales = false;
        s->reserved = 0;
        from->reserved = 0;  // its open block may be copied more than once
        sequences_.push_back(s);
    }

    // Checks the statistics of a promise: promised bytes are not free, and all are given back at its end.
    void reserve() {
        const Sequence s = any();
        if (!s) return;
        const int64_t tokens = random_.chance(25) ? 0 : random_.between(1, 250);
        const ta_kv_pool_stats before = stats(pool_);
        ta_error err;
        const ta_status status = ta_seq_reserve(pool_.get(), s->id, tokens, -1, &err);
        note() << "reserve " << tokens << " behind " << s->length << ": " << ta_status_name(status);
        const ta_kv_pool_stats now = stats(pool_);
        EXPECT_EQ(now.bytes_used, before.bytes_used);
        if (status == TA_E_TIER_FULL) {
            EXPECT_GT(err.bytes, 0);
            EXPECT_EQ(now.bytes_promised, before.bytes_promised);
            return;
        }
        ASSERT_EQ(status, TA_OK) << err.message;
        s->reserved = tokens;
        if (tokens > 64) {
            EXPECT_GT(now.bytes_promised, 0u);
        }
    }

    // A copy goes to another rank and comes back as a new sequence, with blocks of its own.
    void there_and_back() {
        const Sequence from = any();
        if (!from) return;
        if (!groups_[0]) {
            const ta_group_id id = make_group_id();
            groups_[0] = make_group(context_, group_options(id, 0, 2));
            groups_[1] = make_group(peer_context_, group_options(id, 1, 2));
            for (const GroupHandle& g : groups_) ASSERT_EQ(poll(g), TA_GROUP_READY);
        }
        const auto pass = [this](uint32_t source, ta_seq seq, ta_send_mode mode) {
            const KvPool* pools[] = {&pool_, &peer_pool_};
            ta_ticket sent = 0, got = 0;
            ta_error err;
            auto info = sized<ta_transfer_info>();
            require(ta_seq_receive(groups_[1 - source].get(), pools[1 - source]->get(), source, 1, &got, &err), err);
            require(ta_seq_send(groups_[source].get(), pools[source]->get(), seq, 1 - source, 1, mode, &sent, &err), err);
            require(ta_transfer_wait(groups_[source].get(), sent, -1, &info, &err), err);
            require(ta_transfer_wait(groups_[1 - source].get(), got, -1, &info, &err), err);
            return info;
        };
        const ta_transfer_info there = pass(0, from->id, TA_SEND_COPY);
        ASSERT_EQ(there.state, TA_MOVE_DONE) << there.reason;
        uint64_t needed = 0;
        const ta_kv_pool_stats before = stats(pool_);
        for (const auto& b : from->blocks) needed += b->channel ? before.channel_block_bytes : before.token_block_bytes;
        const ta_transfer_info back = pass(1, there.seq, TA_SEND_MOVE);
        note() << "there and back, " << from->length << ": " << ta_status_name(back.status);
        const bool is_full = sequences_.size() == kMaxSequences, fits = needed <= before.bytes_free;
        ASSERT_EQ(back.status, is_full ? TA_E_LIMIT : fits ? TA_OK : TA_E_TIER_FULL) << back.reason;
        if (back.status != TA_OK) {
            ASSERT_EQ(ta_seq_release(peer_pool_.get(), there.seq, nullptr), TA_OK);
            return;
        }
        EXPECT_TRUE(ids_.insert(back.seq).second) << "an id was given out twice";
        auto s = std::make_shared<ModelSequence>(*from);
        s->id = back.seq;
        for (auto& b : s->blocks) b = std::make_shared<ModelBlock>(*b);
        s->replay = replay(s->events);
        s->knows_scales = false;
        s->reserved = 0;
        sequences_.push_back(s);
    }

    // A sequence that is given all that again.
    ta_seq replay(const std::vector<std::shared_ptr<const Event>>& events) {
        const ta_seq seq = make_sequence(replay_pool_);
        ta_error err;
        int64_t before = 0;
        for (const auto& e : events) {
            const int64_t n = e->length - before;
            before = e->length;
            if (e->k.empty()) {
                require(ta_seq_truncate(replay_pool_.get(), seq, e->length, &err), err);
                continue;
            }
            begin(replay_plans_[0], {seq}, {int32_t(n)}, {0});
            for (uint32_t layer = 0; layer < c_.layers; ++layer)
                append_to_replay(replay_plans_[0], layer, n, e->k[layer], e->v[layer]);
            end(replay_plans_[0]);
        }
        return seq;
    }
    void append_to_replay(const Plan& plan, uint32_t layer, int64_t n, const std::vector<float>& k,
                          const std::vector<float>& v) {
        Tensor kt(k, n, c_.kv_heads, c_.head_dim, c_.dtype), vt(v, n, c_.kv_heads, c_.head_dim, c_.dtype);
        append(plan, layer, kt, vt);
    }

    void truncate() {
        const Sequence s = any();
        if (!s) return;
        int64_t n = random_.between(0, s->length);
        if (random_.chance(25)) n = n / 64 * 64;
        if (random_.chance(25)) n = std::max<int64_t>(0, s->length - random_.between(0, 3));
        note() << "truncate " << s->length << " to " << n;
        ASSERT_EQ(ta_seq_truncate(pool_.get(), s->id, n, nullptr), TA_OK);
        ASSERT_EQ(ta_seq_truncate(replay_pool_.get(), s->replay, n, nullptr), TA_OK);
        s->events.push_back(std::make_shared<Event>(Event{n, {}, {}}));
        s->knows_scales = s->knows_scales && n == s->length;
        s->length = n;
        s->blocks.resize(size_t((n + 63) / 64));
        for (Stored& stored : s->stored) {
            stored.k.resize(size_t(n * c_.row()));
            stored.v.resize(size_t(n * c_.row()));
        }
    }

    void release() {
        if (sequences_.empty()) return;
        const auto i = size_t(random_.below(int64_t(sequences_.size())));
        note() << "release " << sequences_[i]->length;
        ASSERT_EQ(ta_seq_release(pool_.get(), sequences_[i]->id, nullptr), TA_OK);
        ASSERT_EQ(ta_seq_release(replay_pool_.get(), sequences_[i]->replay, nullptr), TA_OK);
        dead_.push_back(sequences_[i]->id);
        sequences_.erase(sequences_.begin() + int64_t(i));
    }

    void wrong_call() {
        const Sequence s = any();
        const ta_seq stale = dead_.empty() || random_.chance(20) ? random_.bits() : random_.pick(dead_);
        ta_seq out = 0;
        int64_t n = 0;
        const int64_t which = random_.below(9);
        note() << "wrong call " << which;
        switch (which) {
            case 0:
                EXPECT_EQ(ta_seq_release(pool_.get(), stale, nullptr), TA_E_STALE);
                break;
            case 1:
                EXPECT_EQ(ta_seq_fork(pool_.get(), stale, &out, nullptr), TA_E_STALE);
                break;
            case 2:
                EXPECT_EQ(ta_seq_length(pool_.get(), stale, &n, nullptr), TA_E_STALE);
                break;
            case 3:
                EXPECT_EQ(ta_plan_end(plan_.get(), nullptr, nullptr), TA_E_STATE);
                break;
            case 4:
                EXPECT_EQ(ta_plan_abort(plan_.get(), nullptr), TA_E_STATE);
                break;
            case 5:
                if (s) {
                    EXPECT_EQ(ta_seq_truncate(pool_.get(), s->id, s->length + random_.between(1, 100), nullptr), TA_E_INVALID);
                }
                break;
            case 6:
                if (s) {
                    const ta_seq twice[] = {s->id, s->id};
                    const int32_t ones[] = {1, 1};
                    EXPECT_EQ(ta_plan_begin(plan_.get(), 2, twice, ones, nullptr, nullptr, nullptr), TA_E_INVALID);
                }
                break;
            case 7:
                if (s) {
                    const ta_seq two[] = {s->id, stale};
                    const int32_t ones[] = {1, 1};
                    EXPECT_EQ(ta_plan_begin(plan_.get(), 2, two, ones, nullptr, nullptr, nullptr), TA_E_STALE);
                }
                break;
            default:
                if (s) {
                    const int32_t many = INT32_MAX, queries = -1, none = 0;
                    EXPECT_EQ(ta_plan_begin(plan_.get(), 1, &s->id, &many, nullptr, nullptr, nullptr), TA_E_TIER_FULL);
                    EXPECT_EQ(ta_plan_begin(plan_.get(), 1, &s->id, &none, &queries, nullptr, nullptr), TA_E_INVALID);
                }
        }
    }

    // -------------------------------------------------------------------------------------------------------------- a step

    struct Member {
        Sequence sequence;
        int32_t n_new, n_query;
        int64_t new_row, query_row;
        std::vector<std::shared_ptr<ModelBlock>> blocks;  // afterwards
        uint64_t closed = 0, reopened = 0, copied = 0;
        std::vector<std::pair<ModelBlock*, bool>> in_place;  // written to where they are, and whether that fills them
        bool released = false;                               // since begin
    };

    // Blocks of a member after the step, and what begin has to take for them.
    void plan_blocks(Member& m, bool drafts) {
        const ModelSequence& s = *m.sequence;
        m.blocks = s.blocks;
        if (m.n_new == 0) return;
        const int64_t total = s.length + m.n_new;
        for (int64_t b = s.length / 64; b < (total + 63) / 64; ++b) {
            const int64_t have = std::clamp<int64_t>(s.length - b * 64, 0, 64), end = std::min<int64_t>(64, total - b * 64);
            const bool stays_8_bits = !closes_ || b < sinks_, closes = end == 64 && !stays_8_bits;
            auto block = std::make_shared<ModelBlock>();
            block->channel = closes;
            block->sealed = end == 64;
            if (have > 0) {
                const auto& present = s.blocks[size_t(b)];
                const bool shared = present.use_count() > 2;  // beside the sequence's list and the member's copy of it
                if (present->sealed || shared || (universal_ && !s.knows_scales)) {
                    ++need_token_;
                    ++(present->sealed ? m.reopened : m.copied);
                } else if (!closes) {
                    m.in_place.push_back({present.get(), block->sealed});
                    block = present;
                }
            } else if (!closes || drafts) {
                ++need_token_;
            }
            if (closes) {
                ++need_channel_;
                m.closed += c_.layers;
            }
            if (size_t(b) < m.blocks.size()) {
                m.blocks[size_t(b)] = block;
            } else {
                m.blocks.push_back(block);
            }
        }
    }

    ta_fit foretold(const std::vector<ta_seq>& seqs, const std::vector<int32_t>& n_new) const {
        auto fit = sized<ta_fit>();
        ta_error err;
        require(ta_kv_pool_fit(pool_.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), &fit, &err), err);
        return fit;
    }

    // Everything is as before.
    void drafts_that_do_not_stay() {
        const Sequence s = random_.pick(sequences_);
        const auto n = int32_t(random_.between(1, 150));
        const int32_t none = 0;
        auto how = sized<ta_step_options>();
        how.drafts = TA_ON;
        ta_error err;
        const ta_status status = ta_plan_begin(plan_.get(), 1, &s->id, &n, nullptr, &how, &err);
        note() << n << " drafts behind " << s->length << ": " << ta_status_name(status);
        if (status == TA_E_TIER_FULL) return;
        ASSERT_EQ(status, TA_OK) << err.message;
        for (uint32_t layer = 0; layer < c_.layers; ++layer) {
            Tensor k(values(n, 0), n, c_.kv_heads, c_.head_dim, c_.dtype),
                v(values(n, 0), n, c_.kv_heads, c_.head_dim, c_.dtype);
            append(plan_, layer, k, v);
        }
        ASSERT_EQ(ta_plan_end(plan_.get(), &none, &err), TA_OK) << err.message;
        check_sequence(*s);
    }

    void step() {
        if (sequences_.empty()) return create();
        if (!universal_ && random_.chance(20)) drafts_that_do_not_stay();
        const bool drafts = !universal_ && random_.chance(30);
        std::vector<Sequence> chosen = sequences_;
        for (size_t i = chosen.size(); i > 1; --i) std::swap(chosen[i - 1], chosen[size_t(random_.below(int64_t(i)))]);
        chosen.resize(size_t(random_.between(1, std::min<int64_t>(kMostMembers, int64_t(chosen.size())))));
        std::vector<Member> members;
        std::vector<ta_seq> seqs;
        std::vector<int32_t> n_new, n_query;
        int64_t total_new = 0, total_query = 0;
        need_token_ = need_channel_ = 0;
        note() << "step:";
        for (const Sequence& s : chosen) {
            Member m{s, 0, 0, total_new, total_query, {}, 0, 0, 0, {}, false};
            const int64_t to_full = 64 - s->length % 64;
            m.n_new = int32_t(random_.chance(15)   ? 0
                              : random_.chance(30) ? 1
                              : random_.chance(30) ? to_full + random_.between(-1, 1)
                              : random_.chance(70) ? random_.between(2, 90)
                                                   : random_.between(90, 200));
            if (s->length + m.n_new > 700) m.n_new = int32_t(std::max<int64_t>(0, 700 - s->length));
            const int64_t most = std::min<int64_t>(s->length + m.n_new, 90);
            m.n_query = int32_t(random_.chance(20)   ? 0
                                : random_.chance(50) ? std::min<int64_t>(most, m.n_new)
                                                     : random_.between(0, most));
            total_new += m.n_new;
            total_query += m.n_query;
            plan_blocks(m, drafts);
            seqs.push_back(s->id);
            n_new.push_back(m.n_new);
            n_query.push_back(m.n_query);
            history_ << " " << s->length << "+" << m.n_new << " q" << m.n_query;
            members.push_back(std::move(m));
        }
        const auto before = stats(pool_);
        const uint64_t need = need_token_ * before.token_block_bytes + need_channel_ * before.channel_block_bytes;
        bool fits = need <= before.bytes_free;
        // Promises are of slots of one kind, so the library says what members with some find; they never lack what they were promised.
        if (before.bytes_promised > 0 && !fits) {
            const bool all_promised = !drafts && std::all_of(members.begin(), members.end(),
                                                             [](const Member& m) { return m.sequence->reserved >= m.n_new; });
            fits = all_promised || foretold(seqs, n_new).now;
            if (drafts) return;
        } else if (!drafts) {
            const ta_fit fit = foretold(seqs, n_new);
            EXPECT_EQ(fit.now, fits);
            EXPECT_EQ(fit.after_eviction, fits);
            EXPECT_EQ(fit.bytes_lacking > 0, !fits);
            if (before.bytes_promised == 0) {
                EXPECT_EQ(fit.bytes_new, need);
            }
        }
        ta_error err;
        auto how = sized<ta_step_options>();
        how.wait_ms = -1;
        how.drafts = drafts ? TA_ON : TA_OFF;
        const ta_status status =
            ta_plan_begin(plan_.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), n_query.data(), &how, &err);
        ASSERT_EQ(status, fits ? TA_OK : TA_E_TIER_FULL) << err.message;
        if (!fits) {
            history_ << " (full)";
            return;
        }
        for (size_t i = 0; i < members.size(); ++i)
            begin(replay_plans_[i], {members[i].sequence->replay}, {members[i].n_new}, {members[i].n_query});
        const bool aborts = random_.chance(15);
        std::vector<uint32_t> order(c_.layers);
        std::iota(order.begin(), order.end(), 0u);
        if (random_.chance(30)) std::reverse(order.begin(), order.end());
        std::vector<std::vector<float>> new_k(c_.layers), new_v(c_.layers);
        for (uint32_t layer : order) {
            if (random_.chance(5)) release_within(members);
            if (aborts && random_.chance(50)) break;
            new_k[layer] = values(total_new, 0);
            new_v[layer] = values(total_new, size_t(c_.row()));
            const Layout layout = kLayouts[random_.below(4)];
            Tensor k(new_k[layer], total_new, c_.kv_heads, c_.head_dim, c_.dtype, layout),
                v(new_v[layer], total_new, c_.kv_heads, c_.head_dim, c_.dtype);
            new_k[layer] = k.values();
            new_v[layer] = v.values();
            if (random_.chance(20)) wrong_calls_within(layer, total_new, total_query, k, v, members);
            append(plan_, layer, k, v);
            for (size_t i = 0; i < members.size(); ++i)
                append_to_replay(replay_plans_[i], layer, members[i].n_new, rows_of(members[i], new_k[layer]),
                                 rows_of(members[i], new_v[layer]));
            if (random_.chance(70)) check_attention(layer, total_query, members, new_k[layer], new_v[layer], drafts);
        }
        if (::testing::Test::HasFailure()) return;
        if (aborts) {
            history_ << " (aborted)";
            ASSERT_EQ(ta_plan_abort(plan_.get(), &err), TA_OK) << err.message;
            for (size_t i = 0; i < members.size(); ++i)
                ASSERT_EQ(ta_plan_abort(replay_plans_[i].get(), &err), TA_OK) << err.message;
            for (const Member& m : members) {
                if (m.released) continue;
                ASSERT_EQ(length(pool_, m.sequence->id), m.sequence->length);
                check_values(*m.sequence);
            }
            end_released(members);
            return;
        }
        if (random_.chance(5)) release_within(members);
        ASSERT_EQ(ta_plan_end(plan_.get(), drafts && random_.chance(50) ? n_new.data() : nullptr, &err), TA_OK) << err.message;
        for (size_t i = 0; i < members.size(); ++i) end(replay_plans_[i]);
        end_released(members);
        for (Member& m : members) {
            if (m.released) continue;
            appended_ += uint64_t(m.n_new);
            closed_ += m.closed;
            reopened_ += m.reopened;
            copied_ += m.copied;
            for (auto& [block, sealed] : m.in_place) block->sealed = sealed;
            commit(m, new_k, new_v);
        }
    }

    std::vector<float> rows_of(const Member& m, const std::vector<float>& x) const {
        return {x.begin() + m.new_row * c_.row(), x.begin() + (m.new_row + m.n_new) * c_.row()};
    }
    void end_released(const std::vector<Member>& members) {
        for (const Member& m : members) {
            if (m.released) {
                ASSERT_EQ(ta_seq_release(replay_pool_.get(), m.sequence->replay, nullptr), TA_OK);
            }
        }
    }

    // One of the step's sequences ends before the step does, whose results are the same.
    void release_within(std::vector<Member>& members) {
        Member& m = members[size_t(random_.below(int64_t(members.size())))];
        history_ << " (released " << m.sequence->length << ")";
        ASSERT_EQ(ta_seq_release(pool_.get(), m.sequence->id, nullptr), m.released ? TA_E_STALE : TA_OK);
        if (m.released) return;
        m.released = true;
        int64_t n = 0;
        EXPECT_EQ(ta_seq_length(pool_.get(), m.sequence->id, &n, nullptr), TA_E_STALE);
        dead_.push_back(m.sequence->id);
        std::erase(sequences_, m.sequence);
        EXPECT_EQ(stats(pool_).sequences, sequences_.size());
    }

    void wrong_calls_within(uint32_t layer, int64_t total_new, int64_t total_query, Tensor& k, Tensor& v,
                            const std::vector<Member>& members) {
        const Member& member = members[size_t(random_.below(int64_t(members.size())))];
        const ta_seq busy = member.sequence->id;
        const ta_status refusal = member.released ? TA_E_STALE : TA_E_BUSY;
        ta_seq out = 0;
        EXPECT_EQ(ta_seq_truncate(pool_.get(), busy, 0, nullptr), refusal);
        EXPECT_EQ(ta_seq_fork(pool_.get(), busy, &out, nullptr), refusal);
        EXPECT_EQ(ta_plan_begin(other_plan_.get(), 1, &busy, nullptr, nullptr, nullptr, nullptr), refusal);
        EXPECT_EQ(ta_append(plan_.get(), c_.layers, k.view(), v.view(), nullptr), TA_E_INVALID);
        if (total_new > 0) {
            EXPECT_EQ(ta_plan_end(plan_.get(), nullptr, nullptr), TA_E_STATE);
            Tensor bad(new_values_with_nan(total_new), total_new, c_.kv_heads, c_.head_dim, c_.dtype);
            EXPECT_EQ(ta_append(plan_.get(), layer, bad.view(), v.view(), nullptr), TA_E_NONFINITE);
            EXPECT_EQ(ta_append(plan_.get(), layer, k.view(), bad.view(), nullptr), TA_E_NONFINITE);
            Tensor q(total_query, c_.q_heads, c_.head_dim), o(total_query, c_.q_heads, c_.head_dim);
            EXPECT_EQ(ta_attend(plan_.get(), layer, q.view(), o.view(), nullptr, nullptr, nullptr), TA_E_STATE);
        }
    }
    std::vector<float> new_values_with_nan(int64_t n) {
        std::vector<float> x = random_.normals(n * c_.row());
        x[size_t(random_.below(int64_t(x.size())))] = std::numeric_limits<float>::quiet_NaN();
        return x;
    }

    std::vector<float> values(int64_t tokens, size_t mean_at) {
        std::vector<float> x = random_.normals(tokens * c_.row());
        for (size_t i = 0; i < x.size(); ++i) x[i] += mean_[mean_at + i % size_t(c_.row())];
        // The first token of a page decides its universal scale: without this, others would be cut off far too often to
        // compare.
        for (size_t i = 0; universal_ && i < x.size(); i += c_.head_dim) x[i] = 5.0f;
        return x;
    }

    // -------------------------------------------------------------------------------------------------------------- checks

    void check_attention(uint32_t layer, int64_t total_query, const std::vector<Member>& members,
                         const std::vector<float>& new_k, const std::vector<float>& new_v, bool drafts) {
        constexpr double kDraftError = 0.05;
        AttentionRules rules;
        rules.causal = random_.chance(70);
        rules.window = random_.chance(20) ? random_.between(1, 300) : 0;
        rules.softcap = random_.chance(15) ? 20.0 : 0.0;
        const std::vector<float> slopes = random_.normals(c_.q_heads, 0.01f), sinks = random_.normals(c_.q_heads);
        if (random_.chance(15)) rules.alibi_slopes = slopes.data();
        if (random_.chance(15)) rules.sinks = sinks.data();
        auto options = sized<ta_attend_options>();
        options.mask = rules.causal ? TA_MASK_CAUSAL : TA_MASK_FULL;
        options.window = rules.window;
        options.softcap = float(rules.softcap);
        options.alibi_slopes = rules.alibi_slopes;
        options.sinks = rules.sinks;
        Tensor q(random_.normals(total_query * c_.q_row()), total_query, c_.q_heads, c_.head_dim, c_.dtype),
            out(total_query, c_.q_heads, c_.head_dim);
        std::vector<float> lse(size_t(total_query * c_.q_heads));
        attend(plan_, layer, q, out, lse.data(), &options);
        const std::vector<float> q_values = q.values(), got = out.values();
        for (size_t n = 0; n < members.size(); ++n) {
            const Member& m = members[n];
            const ModelSequence& s = *m.sequence;
            const auto rows_in = [&m](const std::vector<float>& x, int64_t row) {
                return std::vector<float>(x.begin() + m.query_row * row, x.begin() + (m.query_row + m.n_query) * row);
            };
            Tensor alone_q(rows_in(q_values, c_.q_row()), m.n_query, c_.q_heads, c_.head_dim, c_.dtype),
                alone(m.n_query, c_.q_heads, c_.head_dim);
            std::vector<float> alone_lse(size_t(m.n_query * c_.q_heads));
            attend(replay_plans_[n], layer, alone_q, alone, alone_lse.data(), &options);
            const std::vector<float> mine = rows_in(got, c_.q_row()), its = alone.values();
            // Drafts have no say in the turning pairs of a page before the end: meanwhile its 8-bit codes may be others.
            const bool same = drafts ? relative_l2(mine, std::vector<double>(its.begin(), its.end())) < kDraftError
                                     : mine == its && rows_in(lse, c_.q_heads) == alone_lse;
            ASSERT_TRUE(same) << "attention of layer " << layer << ", " << s.length << "+" << m.n_new
                              << " tokens is not that of the replay";
            std::vector<float> k = s.stored[layer].k, v = s.stored[layer].v;
            const std::vector<float> given_k = rows_of(m, new_k), given_v = rows_of(m, new_v);
            k.insert(k.end(), given_k.begin(), given_k.end());
            v.insert(v.end(), given_v.begin(), given_v.end());
            const AttentionShape shape{m.n_query, s.length + m.n_new, c_.q_heads, c_.kv_heads, c_.head_dim};
            const Rows rows{random_.below(4), 5};  // some of them: float64 takes its time
            const Attention exact =
                exact_attention(shape, rules, q_values.data() + m.query_row * c_.q_row(), k.data(), v.data(), rows);
            for (int64_t row = rows.first; row < m.n_query; row += rows.step) {
                for (int64_t i = row * c_.q_row(); i < (row + 1) * c_.q_row(); ++i) {
                    const double x = got[size_t(m.query_row * c_.q_row() + i)];
                    if (std::fabs(x - exact.out[size_t(i)]) <= kNear) continue;
                    FAIL() << "attention of layer " << layer << ", " << s.length << "+" << m.n_new << " tokens, query " << row
                           << " of " << m.n_query << ", channel " << i % c_.q_row() << ": " << x << ", not "
                           << exact.out[size_t(i)];
                }
                for (int64_t i = row * c_.q_heads; i < (row + 1) * c_.q_heads; ++i)
                    ASSERT_NEAR(lse[size_t(m.query_row * c_.q_heads + i)], exact.lse[size_t(i)], kNear) << i;
            }
        }
    }

    // Takes over what the replay stores now. Only what the step may have changed is read: check_sequence reads everything often
    // enough.
    void commit(Member& m, const std::vector<std::vector<float>>& new_k, const std::vector<std::vector<float>>& new_v) {
        ModelSequence& s = *m.sequence;
        const int64_t from = m.n_new > 0 ? s.length / 64 * 64 : s.length, row = c_.row();
        s.length += m.n_new;
        s.reserved = std::max<int64_t>(0, s.reserved - m.n_new);
        s.blocks = std::move(m.blocks);
        s.knows_scales = s.knows_scales || m.n_new > 0;
        ASSERT_EQ(length(pool_, s.id), s.length);
        if (m.n_new == 0) return;
        Event event{s.length, {}, {}};
        for (uint32_t layer = 0; layer < c_.layers; ++layer) {
            event.k.push_back(rows_of(m, new_k[layer]));
            event.v.push_back(rows_of(m, new_v[layer]));
            const Stored now = dequantize(replay_pool_, s.replay, layer, from, s.length - from, row);
            ASSERT_TRUE(dequantize(pool_, s.id, layer, from, s.length - from, row) == now)
                << "layer " << layer << " of " << s.length << " tokens is stored otherwise than by the replay";
            take_over(s.stored[layer].k, event.k.back(), now.k, from);
            take_over(s.stored[layer].v, event.v.back(), now.v, from);
        }
        s.events.push_back(std::make_shared<Event>(std::move(event)));
    }
    void take_over(std::vector<float>& stored, const std::vector<float>& given, const std::vector<float>& now, int64_t from) {
        stored.insert(stored.end(), given.begin(), given.end());
        const auto was = stored.begin() + from * c_.row();
        for (size_t first = 0; first < now.size(); first += 64 * size_t(c_.row())) {
            double error = 0.0, norm = 0.0;
            for (size_t i = first; i < std::min(now.size(), first + 64 * size_t(c_.row())); ++i) {
                error += std::pow(double(now[i]) - double(was[int64_t(i)]), 2);
                norm += std::pow(double(was[int64_t(i)]), 2);
            }
            // 2 bits of normal values are off by up to 0.75 of them; other values would be by 1.4, none by 1.
            ASSERT_LT(error, norm) << "a block holds something else than it was given";
        }
        std::copy(now.begin(), now.end(), was);
    }

    void check_sequence(const ModelSequence& s) {
        ASSERT_EQ(length(pool_, s.id), s.length);
        check_values(s);
        ta_error err;
        ASSERT_EQ(ta_seq_verify(pool_.get(), s.id, &err), TA_OK) << err.message;
        for (size_t b = 0; b < s.blocks.size(); ++b) {
            auto block = sized<ta_x_block_info>();
            ASSERT_EQ(ta_x_seq_block(pool_.get(), s.id, b, &block, nullptr, 0, &err), TA_OK) << err.message;
            ASSERT_EQ(block.bits == 8, !s.blocks[b]->channel) << "block " << b << " of " << s.length;
            ASSERT_EQ(block.tokens, uint32_t(std::min<int64_t>(64, s.length - int64_t(b) * 64)));
            ASSERT_EQ(long(block.owners), s.blocks[b].use_count()) << "block " << b << " of " << s.length;
        }
    }
    void check_values(const ModelSequence& s) {
        for (uint32_t layer = 0; layer < c_.layers; ++layer) {
            ASSERT_TRUE(dequantize(pool_, s.id, layer, 0, s.length, c_.row()) == s.stored[layer])
                << "stored values of a sequence of " << s.length << " have changed";
        }
    }

    void check_statistics() {
        const auto s = stats(pool_);
        std::set<const ModelBlock*> token, channel, shared;
        uint64_t tokens = 0;
        for (const auto& sequence : sequences_) {
            tokens += uint64_t(sequence->length);
            for (const auto& b : sequence->blocks) {
                (b->channel ? channel : token).insert(b.get());
                if (b.use_count() > 1) shared.insert(b.get());
            }
        }
        ASSERT_EQ(s.sequences, sequences_.size());
        ASSERT_EQ(s.tokens, tokens);
        ASSERT_EQ(s.token_blocks, token.size());
        ASSERT_EQ(s.channel_blocks, channel.size());
        ASSERT_EQ(s.shared_blocks, shared.size());
        ASSERT_EQ(s.bytes_used, s.token_blocks * s.token_block_bytes + s.channel_blocks * s.channel_block_bytes);
        ASSERT_LE(s.bytes_used + s.bytes_cached, s.bytes_budget);
        ASSERT_EQ(s.bytes_free + s.bytes_promised + s.bytes_used, s.bytes_budget);
        ASSERT_EQ(s.bytes_reclaimable, 0u);
        ASSERT_LE(s.bytes_used, s.bytes_peak);
        ASSERT_LE(s.bytes_peak, s.bytes_budget);
        ASSERT_EQ(s.appended_tokens, appended_);
        ASSERT_EQ(s.closed_pages, closed_);
        ASSERT_EQ(s.reopened_blocks, reopened_);
        ASSERT_EQ(s.copied_blocks, copied_);
        ASSERT_EQ(s.saturated_values, 0u);
        if (!universal_) {
            ASSERT_EQ(s.clamped_values, 0u);
        }
    }

    const Config c_;
    Random random_;
    Context context_;
    KvPool pool_;
    Plan plan_, other_plan_;
    Context peer_context_ = make_context(1);
    KvPool peer_pool_;
    GroupHandle groups_[2];
    KvPool replay_pool_;
    Plan replay_plans_[kMostMembers];
    int64_t sinks_ = 0;  // of the pool as it is in effect, and the next ones
    bool universal_ = false, closes_ = false;
    std::vector<float> mean_;
    std::vector<Sequence> sequences_;
    std::vector<ta_seq> dead_;
    std::set<ta_seq> ids_;
    uint64_t appended_ = 0, closed_ = 0, reopened_ = 0, copied_ = 0;
    uint64_t need_token_ = 0, need_channel_ = 0;
    std::ostringstream history_;
};

uint64_t number_from(const char* variable, uint64_t otherwise) {
    const char* text = std::getenv(variable);
    return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

class RandomWalk : public ::testing::TestWithParam<Config> {};

TEST_P(RandomWalk, AgreesWithTheModel) {
    constexpr int kMoves = 60;
    const uint64_t milliseconds = number_from("TA_WALK_SECONDS", 10) * 1000 / configs().size();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    uint64_t seed = number_from("TA_WALK_SEED", 1), walks = 0;
    const uint64_t first = seed;
    for (; walks == 0 || std::chrono::steady_clock::now() < deadline; ++walks, ++seed) {
        Walk walk(GetParam(), seed);
        for (int i = 0; i < kMoves; ++i) {
            try {
                walk.move();
            } catch (const std::exception& e) {
                ADD_FAILURE() << "a correct call failed: " << e.what();
            }
            if (HasFailure()) {
                FAIL() << "TA_WALK_SEED=" << seed << " --gtest_filter='*" << GetParam().name << "', move " << i
                       << walk.history();
            }
        }
        walk.check_all();
        if (HasFailure()) FAIL() << "TA_WALK_SEED=" << seed << walk.history();
    }
    std::printf("%s: %llu walks of %d moves, seeds from %llu\n", GetParam().name, (unsigned long long)walks, kMoves,
                (unsigned long long)first);
}

INSTANTIATE_TEST_SUITE_P(Pools, RandomWalk, ::testing::ValuesIn(configs()),
                         [](const auto& i) { return std::string(i.param.name); });

}  // namespace
}  // namespace ta::testing
