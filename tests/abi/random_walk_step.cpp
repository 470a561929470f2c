// Steps of the walk.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "abi/random_walk.h"

namespace ta::testing {

// Blocks of a member after the step, and what begin has to take for them.
void Walk::plan_blocks(Member& m, bool drafts) {
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

// Everything is as before.
void Walk::drafts_that_do_not_stay() {
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
        Tensor k(values(n, 0), n, c_.kv_heads, c_.head_dim, c_.dtype), v(values(n, 0), n, c_.kv_heads, c_.head_dim, c_.dtype);
        append(plan_, layer, k, v);
    }
    ASSERT_EQ(ta_plan_end(plan_.get(), &none, &err), TA_OK) << err.message;
    check_sequence(*s);
}

void Walk::step() {
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
        fits = all_promised || fit(pool_, seqs, n_new).now;
        if (drafts) return;
    } else if (!drafts) {
        const ta_fit foretold = fit(pool_, seqs, n_new);
        EXPECT_EQ(foretold.now, fits);
        EXPECT_EQ(foretold.after_eviction, fits);
        EXPECT_EQ(foretold.bytes_lacking > 0, !fits);
        if (before.bytes_promised == 0) {
            EXPECT_EQ(foretold.bytes_new, need);
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

// Takes over what the replay stores now. Only what the step may have changed is read: check_sequence reads everything often
// enough.
void Walk::commit(Member& m, const std::vector<std::vector<float>>& new_k, const std::vector<std::vector<float>>& new_v) {
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

void Walk::take_over(std::vector<float>& stored, const std::vector<float>& given, const std::vector<float>& now, int64_t from) {
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

std::vector<float> Walk::rows_of(const Member& m, const std::vector<float>& x) const {
    return {x.begin() + m.new_row * c_.row(), x.begin() + (m.new_row + m.n_new) * c_.row()};
}

void Walk::end_released(const std::vector<Member>& members) {
    for (const Member& m : members) {
        if (m.released) {
            ASSERT_EQ(ta_seq_release(replay_pool_.get(), m.sequence->replay, nullptr), TA_OK);
        }
    }
}

// One of the step's sequences ends before the step does, whose results are the same.
void Walk::release_within(std::vector<Member>& members) {
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

void Walk::wrong_calls_within(uint32_t layer, int64_t total_new, int64_t total_query, Tensor& k, Tensor& v,
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

std::vector<float> Walk::new_values_with_nan(int64_t n) {
    std::vector<float> x = random_.normals(n * c_.row());
    x[size_t(random_.below(int64_t(x.size())))] = std::numeric_limits<float>::quiet_NaN();
    return x;
}

std::vector<float> Walk::values(int64_t tokens, size_t mean_at) {
    std::vector<float> x = random_.normals(tokens * c_.row());
    for (size_t i = 0; i < x.size(); ++i) x[i] += mean_[mean_at + i % size_t(c_.row())];
    // The first token of a page decides its universal scale: without this, others would be cut off far too often to
    // compare.
    for (size_t i = 0; universal_ && i < x.size(); i += c_.head_dim) x[i] = 5.0f;
    return x;
}

}  // namespace ta::testing
