// Moves of the walk on one sequence, and calls that must fail.
#include <algorithm>

#include "abi/random_walk.h"

namespace ta::testing {

void Walk::create() {
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

void Walk::fork() {
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
void Walk::reserve() {
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
void Walk::there_and_back() {
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
ta_seq Walk::replay(const std::vector<std::shared_ptr<const Event>>& events) {
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

void Walk::append_to_replay(const Plan& plan, uint32_t layer, int64_t n, const std::vector<float>& k,
                            const std::vector<float>& v) {
    Tensor kt(k, n, c_.kv_heads, c_.head_dim, c_.dtype), vt(v, n, c_.kv_heads, c_.head_dim, c_.dtype);
    append(plan, layer, kt, vt);
}

void Walk::truncate() {
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

void Walk::release() {
    if (sequences_.empty()) return;
    const auto i = size_t(random_.below(int64_t(sequences_.size())));
    note() << "release " << sequences_[i]->length;
    ASSERT_EQ(ta_seq_release(pool_.get(), sequences_[i]->id, nullptr), TA_OK);
    ASSERT_EQ(ta_seq_release(replay_pool_.get(), sequences_[i]->replay, nullptr), TA_OK);
    dead_.push_back(sequences_[i]->id);
    sequences_.erase(sequences_.begin() + int64_t(i));
}

void Walk::wrong_call() {
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

}  // namespace ta::testing
