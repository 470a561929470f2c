// Calls about tiers that throw where they fail, as those of handles.h.
#pragma once

#include <chrono>
#include <thread>
#include <vector>

#include "support/handles.h"

namespace ta::testing {

inline ta_residency residency(const KvPool& pool, ta_seq seq) {
    auto r = sized<ta_residency>();
    ta_error err;
    require(ta_seq_residency(pool.get(), seq, &r, &err), err);
    return r;
}
inline ta_tier_stats tier_stats(const KvPool& pool, ta_tier tier) {
    auto s = sized<ta_tier_stats>();
    ta_error err;
    require(ta_kv_pool_get_tier_stats(pool.get(), tier, &s, &err), err);
    return s;
}
inline ta_fit fit(const KvPool& pool, const std::vector<ta_seq>& seqs, const std::vector<int32_t>& n_new) {
    auto f = sized<ta_fit>();
    ta_error err;
    require(ta_kv_pool_fit(pool.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), &f, &err), err);
    return f;
}
inline ta_move_stats move_stats(const KvPool& pool) {
    auto s = sized<ta_move_stats>();
    ta_error err;
    require(ta_kv_pool_get_move_stats(pool.get(), &s, &err), err);
    return s;
}
inline ta_ticket move(const KvPool& pool, ta_seq seq, uint64_t first, uint64_t n, ta_tier tier) {
    ta_ticket ticket = 0;
    ta_error err;
    require(ta_seq_move(pool.get(), seq, first, n, tier, &ticket, &err), err);
    return ticket;
}
inline ta_move_info wait(const KvPool& pool, ta_ticket ticket, int64_t nanoseconds = -1) {
    auto info = sized<ta_move_info>();
    ta_error err;
    require(ta_move_wait(pool.get(), ticket, nanoseconds, &info, &err), err);
    return info;
}
inline ta_move_info move_now(const KvPool& pool, ta_seq seq, uint64_t first, uint64_t n, ta_tier tier) {
    return wait(pool, move(pool, seq, first, n, tier));
}
inline ta_move_info suspend(const KvPool& pool, ta_seq seq, ta_tier tier) {
    ta_ticket ticket = 0;
    ta_error err;
    require(ta_seq_suspend(pool.get(), seq, tier, &ticket, &err), err);
    return wait(pool, ticket);
}
// Until what leaves in the background has left.
inline void wait_for_moves(const KvPool& pool) {
    for (int i = 0; i < 30000 && move_stats(pool).queued_tickets > 0; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
inline void verify(const KvPool& pool, ta_seq seq) {
    ta_error err;
    require(ta_seq_verify(pool.get(), seq, &err), err);
}

}  // namespace ta::testing
