// The counters in the statistics of tiers: where steps found their blocks, what became of prefetched ones, how old evicted ones
// were, and whether begins waited.
#include <chrono>
#include <thread>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

ta_ticket prefetch(const KvPool& pool, ta_seq seq, uint64_t first, uint64_t n) {
    ta_ticket ticket = 0;
    ta_error err;
    require(ta_seq_prefetch(pool.get(), seq, first, n, &ticket, &err), err);
    return ticket;
}

// Threads that move blocks count, and let go of them, after whoever waited for the move was told.
template <class Counted>
void expect_soon(Counted counted, const decltype(counted())& want) {
    for (int i = 0; i < 2000 && counted() != want; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(counted(), want);
}

TEST(TierMetrics, HitsAndMissesOfEachTier) {
    Twins twins({.device_blocks = 100, .host_bytes = kPlenty, .disk_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {10 * 64});
    for (const ta_tier tier : {TA_TIER_DEVICE, TA_TIER_HOST, TA_TIER_DISK}) {
        const ta_tier_stats s = tier_stats(twins.pool, tier);
        EXPECT_EQ(s.hits + s.misses + s.misses_failed, 0u);
    }
    move_now(twins.pool, twins.seqs[a], 1, 5, TA_TIER_HOST);
    move_now(twins.pool, twins.seqs[a], 6, 2, TA_TIER_DISK);
    twins.step({a}, {1});  // 3 on the device, 5 in the host tier, 2 on disk
    ta_tier_stats device = tier_stats(twins.pool, TA_TIER_DEVICE), host = tier_stats(twins.pool, TA_TIER_HOST),
                  disk = tier_stats(twins.pool, TA_TIER_DISK);
    EXPECT_EQ(device.hits, 3u);
    EXPECT_EQ(device.misses, 7u);
    EXPECT_EQ(host.hits, 5u);
    EXPECT_EQ(host.misses, 2u);
    EXPECT_EQ(disk.hits, 2u);
    EXPECT_EQ(disk.misses, 0u);
    EXPECT_EQ(disk.misses_failed, 0u);
    EXPECT_EQ(move_stats(twins.pool).waits_for_blocks, 1u);
    EXPECT_GT(move_stats(twins.pool).wait_seconds, 0.0);
    EXPECT_EQ(move_stats(twins.pool).waits_for_room, 0u);
    twins.step({a}, {1});  // the open block is on the device too
    device = tier_stats(twins.pool, TA_TIER_DEVICE);
    host = tier_stats(twins.pool, TA_TIER_HOST);
    EXPECT_EQ(device.hits, 3u + 4u);
    EXPECT_EQ(host.hits, 5u + 7u);
    EXPECT_EQ(move_stats(twins.pool).waits_for_blocks, 1u);
    EXPECT_EQ(move_stats(twins.pool).host_steps, 2u);
    EXPECT_EQ(move_stats(twins.pool).staged_steps, 0u);  // a CPU reads in place
    EXPECT_EQ(tier_stats(twins.plain_pool, TA_TIER_DEVICE).hits, 10u + 11u);
}

TEST(TierMetrics, PrefetchedBlocksAreUsedLateOrWasted) {
    Twins twins({.device_blocks = 100, .host_bytes = kPlenty, .disk_bytes = kPlenty});
    const size_t a = twins.add(), b = twins.add();
    twins.step({a}, {10 * 64});
    twins.step({b}, {10 * 64});
    const auto counted = [&] {
        const ta_move_stats s = move_stats(twins.pool);
        return std::vector<uint64_t>{s.prefetch_used, s.prefetch_late, s.prefetch_wasted};
    };
    move_now(twins.pool, twins.seqs[a], 1, 8, TA_TIER_DISK);
    EXPECT_EQ(wait(twins.pool, prefetch(twins.pool, twins.seqs[a], 1, 6)).moved, 6u);
    EXPECT_EQ(counted(), (std::vector<uint64_t>{0, 0, 0}));
    move_now(twins.pool, twins.seqs[a], 1, 2, TA_TIER_HOST);
    EXPECT_EQ(counted(), (std::vector<uint64_t>{0, 0, 2}));
    twins.step({a}, {1});
    EXPECT_EQ(counted(), (std::vector<uint64_t>{4, 0, 2}));
    twins.step({a}, {1});  // used before
    EXPECT_EQ(counted(), (std::vector<uint64_t>{4, 0, 2}));
    // Released unused.
    move_now(twins.pool, twins.seqs[b], 1, 3, TA_TIER_HOST);
    EXPECT_EQ(wait(twins.pool, prefetch(twins.pool, twins.seqs[b], 1, 3)).moved, 3u);
    twins.truncate(b, 64);
    expect_soon(counted, {4, 0, 5});
    ta_error err;
    // A cancelled or finished prefetch awaits nothing; one that is under way makes the step's blocks late, or serves it.
    move_now(twins.pool, twins.seqs[a], 1, 8, TA_TIER_DISK);
    const ta_ticket ticket = prefetch(twins.pool, twins.seqs[a], 1, 8);
    require(ta_move_cancel(twins.pool.get(), ticket, &err), err);
    const uint64_t moved = wait(twins.pool, ticket).moved;
    twins.step({a}, {1});
    EXPECT_EQ(counted(), (std::vector<uint64_t>{4 + moved, 0, 5}));
    move_now(twins.pool, twins.seqs[a], 1, 8, TA_TIER_DISK);
    prefetch(twins.pool, twins.seqs[a], 1, 8);
    const std::vector<uint64_t> before = counted();
    twins.step({a}, {1});
    const std::vector<uint64_t> after = counted();
    EXPECT_EQ(after[0] + after[1], before[0] + before[1] + 8);
    EXPECT_EQ(after[2], before[2]);
    twins.verify();
}

TEST(TierMetrics, ABeginThatIsRefusedCountsForNothing) {
    Twins twins({.device_blocks = 40, .host_bytes = kPlenty, .begin_wait_ms = -1});
    const size_t a = twins.add(), b = twins.add();
    twins.step({a}, {10 * 64});
    twins.step({b}, {64});
    move_now(twins.pool, twins.seqs[a], 1, 8, TA_TIER_HOST);
    EXPECT_EQ(wait(twins.pool, prefetch(twins.pool, twins.seqs[a], 1, 4)).moved, 4u);
    ta_error err;
    require(ta_seq_pin(twins.pool.get(), twins.seqs[a], 0, 5, &err), err);  // so that none leaves for a begin
    const auto counted = [&] {
        std::vector<uint64_t> all;
        for (const ta_tier tier : {TA_TIER_DEVICE, TA_TIER_HOST}) {
            const ta_tier_stats s = tier_stats(twins.pool, tier);
            for (const uint64_t n : {s.hits, s.misses}) all.push_back(n);
        }
        const ta_move_stats m = move_stats(twins.pool);
        for (const uint64_t n : {m.host_steps, m.prefetch_used, m.prefetch_late, m.prefetch_wasted}) all.push_back(n);
        return all;
    };
    const std::vector<uint64_t> before = counted();
    const ta_seq both[] = {twins.seqs[a], twins.seqs[b]}, twice[] = {twins.seqs[a], twins.seqs[a]};
    const int32_t too_much[] = {30 * 64, 30 * 64}, one[] = {1, 1};
    EXPECT_EQ(ta_plan_begin(twins.plan.get(), 2, both, too_much, nullptr, nullptr, nullptr), TA_E_TIER_FULL);
    EXPECT_EQ(ta_plan_begin(twins.plan.get(), 2, twice, one, nullptr, nullptr, nullptr), TA_E_INVALID);
    EXPECT_EQ(counted(), before);
    twins.step({a}, {1});
    EXPECT_EQ(move_stats(twins.pool).prefetch_used, 4u);
    EXPECT_EQ(move_stats(twins.pool).host_steps, 1u);
}

TEST(TierMetrics, EvictionsHaveAnAge) {
    Twins twins({.device_blocks = 24, .host_bytes = kPlenty});
    const size_t a = twins.add(), b = twins.add();
    twins.step({a}, {10 * 64});
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (int i = 0; i < 10; ++i) twins.step({b}, {4 * 64});
    expect_soon([&] { return move_stats(twins.pool).queued_tickets; }, 0);
    const ta_tier_stats s = tier_stats(twins.pool, TA_TIER_DEVICE);
    const ta_residency r = residency(twins.pool, twins.seqs[a]);
    EXPECT_EQ(r.host_blocks, 9u);
    EXPECT_GE(s.evicted_blocks, 9u);
    EXPECT_GE(s.evicted_age_seconds, 9 * 0.05);
    EXPECT_EQ(tier_stats(twins.pool, TA_TIER_HOST).evicted_blocks, 0u);
    move_now(twins.pool, twins.seqs[b], 1, 2, TA_TIER_HOST);  // asked for: no eviction
    EXPECT_EQ(tier_stats(twins.pool, TA_TIER_DEVICE).evicted_blocks, s.evicted_blocks);
}

// A field means one thing: what is of the pool is not said of one of its tiers.
TEST(TierMetrics, MovesAreOfThePool) {
    Twins twins({.device_blocks = 100, .host_bytes = kPlenty, .disk_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {300});
    const uint64_t block = stats(twins.pool).channel_block_bytes;
    move_now(twins.pool, twins.seqs[a], 1, 2, TA_TIER_DISK);
    expect_soon([&] { return move_stats(twins.pool).queued_tickets; }, 0);
    const ta_move_stats s = move_stats(twins.pool);
    EXPECT_EQ(s.bytes_asked, 2 * block);
    EXPECT_EQ(s.bytes_prefetched + s.bytes_needed + s.bytes_evicted, 0u);
    EXPECT_EQ(s.failed_blocks + s.corrupt_blocks, 0u);
    for (const ta_tier tier : {TA_TIER_DEVICE, TA_TIER_HOST, TA_TIER_DISK}) {
        const ta_tier_stats t = tier_stats(twins.pool, tier);
        EXPECT_EQ(t.requests_failed + t.requests_corrupt + t.requests_queued, 0u);
        EXPECT_EQ(t.blocks_in, tier == TA_TIER_DISK ? 2u : 0u);
        EXPECT_EQ(t.blocks_out, tier == TA_TIER_DEVICE ? 2u : 0u);
    }
    const ta_move_stats plain = move_stats(twins.plain_pool);
    EXPECT_EQ(plain.bytes_asked + plain.queued_tickets, 0u);
}

TEST(TierMetrics, AreInTheText) {
    Twins twins({.device_blocks = 100, .host_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {300});
    move_now(twins.pool, twins.seqs[a], 1, 2, TA_TIER_HOST);
    twins.step({a}, {1});
    ta_error promise;
    require(ta_seq_reserve(twins.pool.get(), twins.seqs[a], 100, -1, &promise), promise);
    const ta_kv_pool_stats s = stats(twins.pool);
    ASSERT_GT(s.bytes_promised, 0u);
    ASSERT_GT(s.bytes_free, 0u);
    for (const ta_metrics_format format : {TA_METRICS_OPENMETRICS, TA_METRICS_JSON}) {
        uint64_t needed = 0;
        ta_error err;
        require(ta_kv_pool_write_metrics(twins.pool.get(), format, nullptr, 0, &needed, &err), err);
        std::string text(needed, ' ');
        require(ta_kv_pool_write_metrics(twins.pool.get(), format, text.data(), needed, &needed, &err), err);
        const std::vector<const char*> lines =
            format == TA_METRICS_OPENMETRICS
                ? std::vector<const char*>{"\nta_tier_hits_total{tier=\"host\"} 2\n",
                                           "\nta_tier_misses_absent_total{tier=\"device\"} 2\n",
                                           "\nta_tier_misses_failed_total{tier=\"device\"} 0\n",
                                           "\nta_prefetch_late_total 0\n",
                                           "\nta_moves_queued 0\n",
                                           "\nta_moves_failed_blocks_total 0\n",
                                           "\nta_tier_requests_failed_total{tier=\"host\"} 0\n",
                                           "\nta_moved_bytes_total{reason=\"asked\"} ",
                                           "\nta_begin_waits_for_room_total 0\n",
                                           "\nta_tier_fragmentation_ratio{tier=\"host\"} ",
                                           "\nta_tier_evicted_age_seconds_total{tier=\"device\"} 0\n"}
                : std::vector<const char*>{"\"tier_hits\": {\"device\": 3, \"host\": 2}", "\"prefetch_used\": {\"value\": 0}"};
        for (const char* line : lines) EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
        for (const auto& [name, bytes] : {std::pair{"free_bytes", s.bytes_free},
                                          {"promised_bytes", s.bytes_promised},
                                          {"reclaimable_bytes", s.bytes_reclaimable}}) {
            const std::string line = format == TA_METRICS_JSON
                                         ? "\"" + std::string(name) + "\": {\"value\": " + std::to_string(bytes)
                                         : "\nta_" + std::string(name) + " " + std::to_string(bytes) + "\n";
            EXPECT_NE(text.find(line), std::string::npos) << line << "\n" << text;
        }
    }
}

}  // namespace
}  // namespace ta::testing
