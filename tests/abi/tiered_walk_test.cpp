// A pool with tiers beside one without: whatever is suspended, promised, retained, forgotten or asked for, the results are the same,
// and what was promised is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

uint64_t first_seed() {
    const char* text = std::getenv("TA_WALK_SEED");
    return text ? std::strtoull(text, nullptr, 10) : 1;
}

TEST(TieredWalk, SuspendReserveAndFitChangeNoResult) {
    const uint64_t first = first_seed();
    for (uint64_t seed = first; seed < first + 4; ++seed) {
        SCOPED_TRACE("TA_WALK_SEED=" + std::to_string(seed));
        Random random(seed);
        Twins twins({.device_blocks = 6, .host_bytes = kPlenty, .disk_bytes = kPlenty}, seed);
        std::vector<int64_t> promised;
        for (int i = 0; i < 3; ++i) twins.add(), promised.push_back(0);
        for (int move = 0; move < 60 && !::testing::Test::HasFailure(); ++move) {
            const auto s = size_t(random.below(int64_t(promised.size())));
            const ta_seq seq = twins.seqs[s];
            ta_error err;
            switch (random.below(8)) {
                case 6: {
                    const int64_t n = length(twins.pool, seq), at = random.between(0, n), tokens = random.between(0, n - at);
                    if (move <= 30) break;
                    random.chance(50) ? twins.forget(s, at, tokens) : twins.shift(s, at / 64 * 64, tokens / 64 * 64);
                    break;
                }
                case 7: {
                    const auto full = uint64_t(length(twins.pool, seq) / 64);
                    std::vector<ta_block_info> blocks(full);
                    require(ta_seq_describe_blocks(twins.pool.get(), seq, 0, full, blocks.data(), &err), err);
                    auto r = sized<ta_retention>();
                    r.priority = uint32_t(random.between(1, 63));
                    r.duration_ms = random.between(0, 3);
                    for (uint64_t b = 0; b < full; ++b) {
                        const ta_status status = ta_seq_retain(twins.pool.get(), seq, b, 1, &r, &err);
                        ASSERT_EQ(status, blocks[b].flags & TA_BLOCK_DROPPED ? TA_E_STATE : TA_OK) << err.message;
                    }
                    break;
                }
                case 0: {
                    ta_ticket ticket = 0;
                    require(
                        ta_seq_suspend(twins.pool.get(), seq, random.chance(50) ? TA_TIER_HOST : TA_TIER_DISK, &ticket, &err),
                        err);
                    promised[s] = 0;
                    if (random.chance(50)) break;  // it goes on
                    ASSERT_EQ(wait(twins.pool, ticket).state, TA_MOVE_DONE);
                    wait_for_moves(twins.pool);  // of what an earlier suspend has on its way
                    EXPECT_EQ(residency(twins.pool, seq).device_bytes, 0u);
                    break;
                }
                case 1: {
                    const int64_t tokens = random.chance(30) ? 0 : random.between(1, 150);
                    const ta_status status = ta_seq_reserve(twins.pool.get(), seq, tokens, 0, &err);
                    ASSERT_TRUE(status == TA_OK || (status == TA_E_TIER_FULL && tokens > 0)) << err.message;
                    if (status == TA_OK) promised[s] = tokens;
                    break;
                }
                case 2: {
                    int64_t to = random.between(0, length(twins.pool, seq));
                    if (move > 30) to = to / 64 * 64;  // where a forgotten block may be
                    twins.truncate(s, to);
                    break;
                }
                default: {
                    const auto n = int32_t(promised[s] > 0 ? random.between(1, promised[s]) : random.between(1, 90));
                    auto fit = sized<ta_fit>();
                    require(ta_kv_pool_fit(twins.pool.get(), 1, &seq, &n, &fit, &err), err);
                    if (promised[s] >= n) {
                        EXPECT_TRUE(fit.after_eviction) << n << " of " << promised[s] << " promised tokens";
                    }
                    if (fit.after_eviction) twins.step({s}, {n});
                    promised[s] = std::max<int64_t>(0, promised[s] - n);
                }
            }
            if (random.chance(30)) twins.verify();
        }
        twins.verify();
    }
}

}  // namespace
}  // namespace ta::testing
