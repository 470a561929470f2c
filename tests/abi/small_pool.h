// A pool whose steps cost next to nothing: what the tests of admission share.
#pragma once

#include <vector>

#include "support/tiers.h"

namespace ta::testing {

// One layer of one head: steps that cost next to nothing.
class Small {
  public:
    Small(uint64_t token_blocks, uint64_t channel_blocks, uint64_t host_bytes, uint64_t disk_bytes, uint32_t bits = 4,
          int64_t window = 0, ta_switch falling = TA_DEFAULT, int32_t sinks = 0) {
        auto options = pool_options(1, 1, 64, bits);
        auto numerics = sized<ta_numerics>();
        numerics.sink_blocks = sinks;
        options.numerics = &numerics;
        auto group = sized<ta_layer_group>();
        group.layers = 1;
        group.window = window;
        if (window > 0) options.layer_groups = &group, options.n_layer_groups = 1;
        const ta_kv_pool_stats s = stats(make_pool(make_context(), options));
        options.budget_bytes =
            token_blocks * s.token_block_bytes + channel_blocks * (bits == 8 ? s.token_block_bytes : s.channel_block_bytes);
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = host_bytes;
        tiers.disk_bytes = disk_bytes;
        tiers.falling_precision = falling;
        if (host_bytes + disk_bytes > 0) options.tiers = &tiers;
        pool = make_pool(context, options);
    }
    // A step that brings tokens and attends to nothing; `wait_ms` as of a begin.
    ta_status step(const Plan& plan, const std::vector<ta_seq>& seqs, const std::vector<int32_t>& n_new, int32_t wait_ms,
                   ta_error* err = nullptr) const {
        auto options = sized<ta_step_options>();
        options.wait_ms = wait_ms;
        const std::vector<int32_t> none(seqs.size());
        const ta_status s =
            ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), none.data(), &options, err);
        if (s != TA_OK) return s;
        int64_t n = 0;
        for (const int32_t more : n_new) n += more;
        Tensor k(std::vector<float>(size_t(n) * 64, 0.5f), n, 1, 64), v(std::vector<float>(size_t(n) * 64, 0.25f), n, 1, 64);
        append(plan, 0, k, v);
        end(plan);
        return s;
    }
    ta_status reserve(ta_seq seq, int64_t tokens, int32_t wait_ms = -1, ta_error* err = nullptr) const {
        return ta_seq_reserve(pool.get(), seq, tokens, wait_ms, err);
    }

    const Context context = make_context(1);
    KvPool pool;
};

}  // namespace ta::testing
