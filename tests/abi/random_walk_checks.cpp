// What the walk checks after its moves.
#include <algorithm>
#include <cmath>
#include <set>

#include "abi/random_walk.h"
#include "support/exact_attention.h"

namespace ta::testing {

void Walk::check_attention(uint32_t layer, int64_t total_query, const std::vector<Member>& members,
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

void Walk::check_sequence(const ModelSequence& s) {
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

void Walk::check_values(const ModelSequence& s) {
    for (uint32_t layer = 0; layer < c_.layers; ++layer) {
        ASSERT_TRUE(dequantize(pool_, s.id, layer, 0, s.length, c_.row()) == s.stored[layer])
            << "stored values of a sequence of " << s.length << " have changed";
    }
}

void Walk::check_statistics() {
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

}  // namespace ta::testing
