// A pool with tiers beside one that has all its blocks in one place, and what tests of tiers ask of a pool.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "support/tiers.h"

namespace ta::testing {

inline constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64, kQHeads = 4;
inline constexpr int64_t kRow = kHeads * kDim;
inline constexpr uint64_t kPlenty = uint64_t{64} << 20;

struct Budgets {
    uint64_t device_blocks = 1000, host_bytes = 0, disk_bytes = 0;  // device: channel blocks beside 8 token blocks
    uint32_t bits = 4;
    int high = 0, low = 0;
    ta_eviction eviction = TA_EVICT_LRU;
    ta_switch drop_coldest = TA_DEFAULT;
    int begin_wait_ms = 0;
    uint64_t peer_bytes = 0;
    ta_switch falling = TA_DEFAULT;
    int64_t window = 0;  // of layer 0
};

// `peer`: where the peer tier lies, if there is one.
inline ta_kv_pool_options options_of(const Budgets& b, ta_tier_options& tiers, ta_context* peer = nullptr) {
    auto options = pool_options(kLayers, kHeads, kDim, b.bits);
    const KvPool probe = make_pool(make_context(), options);
    const ta_kv_pool_stats s = stats(probe);
    options.budget_bytes =
        8 * s.token_block_bytes + b.device_blocks * (b.bits == 8 ? s.token_block_bytes : s.channel_block_bytes);
    tiers = sized<ta_tier_options>();
    tiers.host_bytes = b.host_bytes;
    tiers.disk_bytes = b.disk_bytes;
    tiers.high_percent = b.high;
    tiers.low_percent = b.low;
    tiers.eviction = b.eviction;
    tiers.drop_coldest = b.drop_coldest;
    tiers.begin_wait_ms = b.begin_wait_ms;
    tiers.peer_bytes = b.peer_bytes;
    tiers.peer = b.peer_bytes > 0 ? peer : nullptr;
    tiers.falling_precision = b.falling;
    options.tiers = &tiers;
    static const double angle = 0.1;
    static const ta_rotary rotary{sizeof(ta_rotary), TA_ROTARY_HALVES, 2, 1, &angle};
    options.rotary = &rotary;
    if (b.window > 0) {
        static thread_local ta_layer_group group;
        group = sized<ta_layer_group>();
        group.layers = 1;
        group.window = b.window;
        options.layer_groups = &group;
        options.n_layer_groups = 1;
    }
    return options;
}

// A pool with tiers and one without that take the same steps.
class Twins {
  public:
    explicit Twins(const Budgets& budgets, uint64_t seed = 1) : window_(budgets.window), random_(seed) {
        ta_tier_options tiers;
        auto options = options_of(budgets, tiers, peer_context.get());
        pool = make_pool(context, options);
        options.budget_bytes = kPlenty;
        options.tiers = nullptr;
        options.layer_groups = nullptr;
        options.n_layer_groups = 0;
        plain_pool = make_pool(context, options);
        plan = make_plan(pool);
        plain_plan = make_plan(plain_pool);
    }

    size_t add() {
        seqs.push_back(make_sequence(pool));
        plain_seqs.push_back(make_sequence(plain_pool));
        return seqs.size() - 1;
    }
    size_t fork(size_t from) {
        seqs.push_back(fork_sequence(pool, seqs[from]));
        plain_seqs.push_back(fork_sequence(plain_pool, plain_seqs[from]));
        return seqs.size() - 1;
    }
    void forget(size_t s, int64_t first, int64_t n) {
        ta_error err;
        require(ta_seq_forget(pool.get(), seqs[s], first, n, nullptr, &err), err);
        require(ta_seq_forget(plain_pool.get(), plain_seqs[s], first, n, nullptr, &err), err);
        forgets_ = true;
    }
    void shift(size_t s, int64_t first, int64_t n) {
        ta_error err;
        require(ta_seq_shift(pool.get(), seqs[s], first, n, &err), err);
        require(ta_seq_shift(plain_pool.get(), plain_seqs[s], first, n, &err), err);
        forgets_ = true;
    }
    // Others of both pools stand in for a sequence, which goes.
    void replace(size_t s, ta_seq other, ta_seq plain_other) {
        ta_error err;
        require(ta_seq_release(pool.get(), std::exchange(seqs[s], other), &err), err);
        require(ta_seq_release(plain_pool.get(), std::exchange(plain_seqs[s], plain_other), &err), err);
    }
    void truncate(size_t s, int64_t n) {
        ta_error err;
        require(ta_seq_truncate(pool.get(), seqs[s], n, &err), err);
        require(ta_seq_truncate(plain_pool.get(), plain_seqs[s], n, &err), err);
    }
    // `keep`: of a step of drafts; empty: of none.
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new, const std::vector<int32_t>& keep = {}) {
        std::vector<ta_seq> a, b;
        int64_t n = 0;
        for (size_t i = 0; i < members.size(); ++i) {
            a.push_back(seqs[members[i]]);
            b.push_back(plain_seqs[members[i]]);
            n += n_new[i];
        }
        auto how = sized<ta_step_options>();
        how.drafts = keep.empty() ? TA_OFF : TA_ON;
        ta_error err;
        const auto count = uint32_t(a.size());
        require(ta_plan_begin(plan.get(), count, a.data(), n_new.data(), nullptr, &how, &err), err);
        require(ta_plan_begin(plain_plan.get(), count, b.data(), n_new.data(), nullptr, &how, &err), err);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random_.normals(n * kRow), n, kHeads, kDim), v(random_.normals(n * kRow), n, kHeads, kDim);
            Tensor q(random_.normals(n * kQHeads * kDim), n, kQHeads, kDim);
            Tensor out(n, kQHeads, kDim), plain_out(n, kQHeads, kDim);
            std::vector<float> lse(size_t(n * kQHeads)), plain_lse(lse.size());
            append(plan, layer, k, v);
            append(plain_plan, layer, k, v);
            attend(plan, layer, q, out, lse.data());
            auto windowed = sized<ta_attend_options>();
            windowed.window = layer == 0 ? window_ : 0;
            attend(plain_plan, layer, q, plain_out, plain_lse.data(), &windowed);
            const std::vector<float> x = out.values(), y = plain_out.values();
            if (n == 0) continue;
            ASSERT_EQ(std::memcmp(x.data(), y.data(), x.size() * 4), 0) << "layer " << layer;
            ASSERT_EQ(std::memcmp(lse.data(), plain_lse.data(), lse.size() * 4), 0) << "layer " << layer;
        }
        const int32_t* const kept = keep.empty() ? nullptr : keep.data();
        require(ta_plan_end(plan.get(), kept, &err), err);
        require(ta_plan_end(plain_plan.get(), kept, &err), err);
    }
    void verify() {
        for (size_t s = 0; s < seqs.size(); ++s) {
            ta_error err;
            require(ta_seq_verify(pool.get(), seqs[s], &err), err);
            const int64_t n = length(plain_pool, plain_seqs[s]);
            ASSERT_EQ(length(pool, seqs[s]), n);
            if (n == 0 || forgets_) continue;
            ASSERT_TRUE(dequantize(pool, seqs[s], 1, 0, n, kRow) == dequantize(plain_pool, plain_seqs[s], 1, 0, n, kRow));
        }
    }

    Context context = make_context(2), peer_context = make_context(1);
    KvPool pool, plain_pool;
    Plan plan, plain_plan;
    std::vector<ta_seq> seqs, plain_seqs;

  private:
    int64_t window_;
    bool forgets_ = false;  // some tokens: what is stored cannot be compared as a whole
    Random random_;
};

}  // namespace ta::testing
