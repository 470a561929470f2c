// Pools with tiers beside a pool that has all its blocks in one: the same outputs to the bit, wherever blocks are and whatever
// moves.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <clocale>
#include <cstring>
#include <thread>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

TEST(Tiers, SequencesGrowPastTheDeviceBudgetIntoTheHostTier) {
    for (uint32_t bits : {4u, 2u, 8u}) {
        SCOPED_TRACE(std::to_string(bits) + " bits");
        Twins twins({.device_blocks = 12, .host_bytes = kPlenty, .bits = bits});
        const size_t a = twins.add(), b = twins.add();
        twins.step({a, b}, {300, 200});
        for (int i = 0; i < 10; ++i) twins.step({a, b}, {140, 64});
        const ta_residency r = residency(twins.pool, twins.seqs[a]);
        EXPECT_EQ(r.device_blocks + r.host_blocks, 27u);
        EXPECT_GT(r.host_blocks, 10u);
        EXPECT_EQ(ta_seq_pin(twins.pool.get(), twins.seqs[a], 26, 1, nullptr), TA_E_STATE);  // it is open
        EXPECT_LE(tier_stats(twins.pool, TA_TIER_DEVICE).bytes_used, tier_stats(twins.pool, TA_TIER_DEVICE).bytes_budget);
        EXPECT_GT(move_stats(twins.pool).bytes_evicted, 0u);
        twins.verify();
    }
}

TEST(Tiers, BlocksOnDiskComeBackWhenAStepNeedsThem) {
    Twins twins({.device_blocks = 40, .host_bytes = uint64_t{1} << 20, .disk_bytes = kPlenty});
    std::vector<size_t> s;
    for (int i = 0; i < 6; ++i) s.push_back(twins.add());
    for (int round = 0; round < 4; ++round) {
        for (size_t i : s) twins.step({i}, {320});
    }
    uint64_t on_disk = 0;
    for (size_t i : s) on_disk += residency(twins.pool, twins.seqs[i]).disk_blocks;
    EXPECT_GT(on_disk, 20u);
    twins.verify();
    for (size_t i : s) twins.step({i}, {1});
    const size_t f = twins.fork(s[0]);
    twins.truncate(s[1], 130);
    twins.step({f, s[1]}, {3, 70});
    twins.verify();
    EXPECT_GT(move_stats(twins.pool).bytes_needed, 0u);
}

TEST(Tiers, ADiskWithoutAHostTier) {
    Twins twins({.device_blocks = 24, .disk_bytes = kPlenty});
    std::vector<size_t> s;
    for (int i = 0; i < 5; ++i) s.push_back(twins.add());
    for (int round = 0; round < 3; ++round) {
        for (size_t i : s) twins.step({i}, {330});
    }
    twins.verify();
    // More than the device holds cannot be attended to: the step fails and changes nothing.
    ta_error err;
    const int32_t n_new = 3000;
    const int64_t before = length(twins.pool, twins.seqs[0]);
    EXPECT_EQ(ta_plan_begin(twins.plan.get(), 1, &twins.seqs[0], &n_new, nullptr, nullptr, &err), TA_E_TIER_FULL)
        << err.message;
    EXPECT_EQ(length(twins.pool, twins.seqs[0]), before);
    twins.step({s[0]}, {1});
    twins.verify();
}

TEST(Tiers, MovesThatAreAskedFor) {
    Twins twins({.device_blocks = 200, .host_bytes = kPlenty, .disk_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {10 * 64 + 5});
    const ta_seq seq = twins.seqs[a];
    for (ta_tier tier : {TA_TIER_HOST, TA_TIER_DISK, TA_TIER_HOST, TA_TIER_DEVICE, TA_TIER_DISK, TA_TIER_DEVICE}) {
        const ta_move_info info = move_now(twins.pool, seq, 0, 11, tier);
        EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status) << ", block " << info.block;
        EXPECT_EQ(info.blocks, 11u);
        EXPECT_EQ(info.moved + info.present, 10u) << "tier " << tier;
        EXPECT_EQ(info.skipped, 1u);  // the open block
        const ta_residency r = residency(twins.pool, seq);
        EXPECT_EQ(tier == TA_TIER_DEVICE ? 11u : 1u, r.device_blocks);
        EXPECT_EQ(tier == TA_TIER_HOST ? 10u : 0u, r.host_blocks);
        EXPECT_EQ(tier == TA_TIER_DISK ? 10u : 0u, r.disk_blocks);
        twins.verify();
        twins.step({a}, {1});
        EXPECT_EQ(residency(twins.pool, seq).disk_blocks, 0u);  // the step has brought them back
        EXPECT_EQ(move_now(twins.pool, seq, 0, 10, tier == TA_TIER_DISK ? TA_TIER_HOST : tier).present, 10u);
    }
    // Pinned blocks stay where they are, or go up.
    ta_error err;
    require(ta_seq_pin(twins.pool.get(), seq, 2, 3, &err), err);
    EXPECT_EQ(residency(twins.pool, seq).pinned_blocks, 3u);
    ta_move_info info = move_now(twins.pool, seq, 0, 10, TA_TIER_HOST);
    EXPECT_EQ(info.moved, 7u);
    EXPECT_EQ(info.skipped, 3u);
    EXPECT_EQ(ta_seq_unpin(twins.pool.get(), seq, 1, 4, &err), TA_E_STATE);
    EXPECT_EQ(residency(twins.pool, seq).pinned_blocks, 3u);
    require(ta_seq_unpin(twins.pool.get(), seq, 2, 3, &err), err);
    EXPECT_EQ(move_now(twins.pool, seq, 0, 10, TA_TIER_HOST).moved, 3u);
    // Nor are blocks pinned that are not full any more; what was pinned before can be taken back.
    const ta_seq cut = fork_sequence(twins.pool, seq);
    require(ta_seq_pin(twins.pool.get(), cut, 3, 1, &err), err);
    require(ta_seq_truncate(twins.pool.get(), cut, 3 * 64 + 10, &err), err);
    EXPECT_EQ(ta_seq_pin(twins.pool.get(), cut, 3, 1, &err), TA_E_STATE);
    EXPECT_EQ(ta_seq_pin(twins.pool.get(), cut, 0, 4, &err), TA_E_STATE);
    EXPECT_EQ(residency(twins.pool, cut).pinned_blocks, 1u);
    require(ta_seq_unpin(twins.pool.get(), cut, 3, 1, &err), err);
    require(ta_seq_release(twins.pool.get(), cut, &err), err);
    ta_ticket ticket = 0;
    require(ta_seq_prefetch(twins.pool.get(), seq, 0, 5, &ticket, &err), err);
    EXPECT_EQ(wait(twins.pool, ticket).moved, 5u);
    const ta_tier_stats host = tier_stats(twins.pool, TA_TIER_HOST);
    EXPECT_EQ(host.blocks, 5u);
    EXPECT_GT(move_stats(twins.pool).bytes_prefetched, 0u);
    twins.verify();
}

TEST(Tiers, FullTiersRefuseAndChangeNothing) {
    Twins twins({.device_blocks = 12, .host_bytes = 512 << 10});
    const size_t a = twins.add();
    ta_error err;
    int64_t tokens = 0;
    for (;; tokens += 64) {
        const int32_t n = 64;
        const ta_status s = ta_plan_begin(twins.plan.get(), 1, &twins.seqs[a], &n, nullptr, nullptr, &err);
        if (s == TA_E_TIER_FULL) break;
        require(s, err);
        require(ta_plan_abort(twins.plan.get(), &err), err);
        twins.step({a}, {64});
        ASSERT_LT(tokens, 1 << 20);
    }
    EXPECT_GT(tokens, 14 * 64);
    EXPECT_EQ(length(twins.pool, twins.seqs[a]), tokens);
    twins.truncate(a, tokens - 1000);
    twins.step({a}, {1});
    twins.verify();
}

TEST(Tiers, ASmallTierHoldsWhatFitsAndSaysWhatIsLeft) {
    constexpr uint64_t kBudget = 1000 << 10;
    for (const ta_tier tier : {TA_TIER_HOST, TA_TIER_DISK}) {
        SCOPED_TRACE(tier);
        Budgets budgets{.device_blocks = 12};
        (tier == TA_TIER_HOST ? budgets.host_bytes : budgets.disk_bytes) = kBudget;
        Twins twins(budgets);
        const uint64_t channel = stats(twins.pool).channel_block_bytes;
        ta_error err;
        for (;;) {
            const size_t s = twins.add();
            const int32_t n = 5 * 64;
            if (ta_plan_begin(twins.plan.get(), 1, &twins.seqs[s], &n, nullptr, nullptr, &err) != TA_OK) break;
            require(ta_plan_abort(twins.plan.get(), &err), err);
            twins.step({s}, {n});
            ASSERT_LT(s, 100u);
        }
        EXPECT_EQ(err.code, TA_E_TIER_FULL);
        const ta_tier_stats now = tier_stats(twins.pool, tier);
        // To 4096 bytes, on disk with a header of as many.
        const uint64_t slot = (channel + 4095) / 4096 * 4096 + (tier == TA_TIER_DISK ? 4096 : 0);
        EXPECT_GE(now.channel_blocks * slot, (kBudget - 8192) * 9 / 10);
        EXPECT_EQ(now.bytes_used, now.channel_blocks * slot);
        EXPECT_LE(now.bytes_used + now.bytes_free, kBudget);
        EXPECT_GT(now.bytes_used + now.bytes_free, kBudget - 8192 - 12 * 4096) << "more than a region is not counted";
        EXPECT_EQ(now.largest_free, 0u);
        const std::string text = err.message;
        const std::string full = std::string("nothing can leave for the ") + (tier == TA_TIER_HOST ? "host" : "disk") +
                                 " tier, which is full (" + std::to_string(now.bytes_used) + " of 1024000 bytes)";
        EXPECT_NE(text.find("the device tier holds "), std::string::npos) << text;
        EXPECT_NE(text.find(full), std::string::npos) << text;
        twins.verify();
    }
}

// The step's blocks must lie where they can be attended to, so they do not go on to the disk.
TEST(Tiers, AFullHostTierIsNamedBesideADiskWithRoom) {
    Twins twins({.device_blocks = 12, .host_bytes = 160 << 10, .disk_bytes = kPlenty});
    const size_t a = twins.add();
    ta_error err;
    ta_status s = TA_OK;
    for (int i = 0; i < 100; ++i) {
        const int32_t n = 64;
        if ((s = ta_plan_begin(twins.plan.get(), 1, &twins.seqs[a], &n, nullptr, nullptr, &err)) != TA_OK) break;
        require(ta_plan_abort(twins.plan.get(), &err), err);
        twins.step({a}, {n});
    }
    EXPECT_EQ(s, TA_E_TIER_FULL);
    EXPECT_EQ(tier_stats(twins.pool, TA_TIER_DISK).blocks, 0u);
    const std::string text = err.message;
    EXPECT_NE(text.find("the device tier holds "), std::string::npos) << text;
    EXPECT_NE(text.find("; nothing can leave for the host tier, which is full ("), std::string::npos) << text;
    EXPECT_EQ(text.find("disk"), std::string::npos) << text;
}

// The host tier holds half of the step and must not pass it on to the disk while the other half comes from there.
TEST(Tiers, AStepWhoseBlocksAnIdleForkHasToo) {
    Twins twins({.device_blocks = 16, .host_bytes = 512 << 10, .disk_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {64 * 22 + 1});
    const size_t b = twins.fork(a);
    for (const auto& [to, at] : {std::pair{TA_TIER_HOST, 0}, std::pair{TA_TIER_DISK, 11}})
        EXPECT_EQ(move_now(twins.pool, twins.seqs[a], uint64_t(at), 11, to).state, TA_MOVE_DONE);
    twins.step({a}, {1});
    const ta_tier_stats disk = tier_stats(twins.pool, TA_TIER_DISK);
    EXPECT_LE(disk.blocks_in, 22u) << "blocks of the step went to the disk again and again";
    EXPECT_EQ(residency(twins.pool, twins.seqs[a]).disk_blocks, 0u);
    twins.step({b}, {1});
    twins.verify();
}

TEST(Tiers, TicketsAndArguments) {
    Twins twins({.device_blocks = 100, .host_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {300});
    ta_error err;
    auto info = sized<ta_move_info>();
    ta_ticket ticket = 0;
    EXPECT_EQ(ta_move_query(twins.pool.get(), 77, &info, &err), TA_E_STALE);
    EXPECT_EQ(ta_move_cancel(twins.pool.get(), 0, &err), TA_E_STALE);
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a], 0, 6, TA_TIER_HOST, &ticket, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 2);
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a], UINT64_MAX, 2, TA_TIER_HOST, &ticket, &err), TA_E_INVALID);
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a], 0, 1, 4, &ticket, &err), TA_E_INVALID);
    EXPECT_EQ(err.argument, 4);
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a], 0, 1, TA_TIER_DISK, &ticket, &err), TA_E_UNSUPPORTED) << err.message;
    EXPECT_EQ(err.argument, 4);
    const ta_seq plain = make_sequence(twins.plain_pool);
    EXPECT_EQ(ta_seq_move(twins.plain_pool.get(), plain, 0, 0, TA_TIER_HOST, &ticket, &err), TA_E_UNSUPPORTED);
    EXPECT_EQ(err.argument, 4);
    EXPECT_EQ(ta_seq_move(twins.plain_pool.get(), plain, 0, 0, TA_TIER_DEVICE, &ticket, &err), TA_E_UNSUPPORTED);
    EXPECT_EQ(err.argument, 0) << "as of the calls on tickets";
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a] + (uint64_t{1} << 40), 0, 1, TA_TIER_HOST, &ticket, &err),
              TA_E_STALE);
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a], 0, 1, TA_TIER_HOST, nullptr, &err), TA_E_INVALID);
    EXPECT_EQ(ticket, 0u);
    begin(twins.plan, {twins.seqs[a]}, {1});
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a], 0, 1, TA_TIER_HOST, &ticket, &err), TA_E_BUSY);
    require(ta_plan_abort(twins.plan.get(), &err), err);
    EXPECT_EQ(ta_move_query(twins.plain_pool.get(), 1, &info, &err), TA_E_UNSUPPORTED) << err.message;
    auto s = sized<ta_tier_stats>();
    EXPECT_EQ(ta_kv_pool_get_tier_stats(twins.pool.get(), TA_TIER_DISK, &s, &err), TA_E_UNSUPPORTED);
    EXPECT_EQ(ta_kv_pool_get_tier_stats(twins.pool.get(), -1, &s, &err), TA_E_INVALID);
    EXPECT_EQ(ta_kv_pool_get_tier_stats(twins.plain_pool.get(), TA_TIER_DEVICE, &s, &err), TA_OK);

    ta_tier_options tiers;
    auto options = options_of({.host_bytes = kPlenty, .high = 50, .low = 60}, tiers);
    ta_kv_pool* none = nullptr;
    EXPECT_EQ(ta_kv_pool_create(twins.context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    tiers.high_percent = INT32_MIN, tiers.low_percent = 0;
    EXPECT_EQ(ta_kv_pool_create(twins.context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    tiers.high_percent = 0, tiers.host_node = 0x80000000;
    EXPECT_EQ(ta_kv_pool_create(twins.context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    tiers.host_node = 0;
    for (const ta_staging staging : {-1, 3}) {
        tiers.staging = staging;
        EXPECT_EQ(ta_kv_pool_create(twins.context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    }
    tiers.staging = TA_STAGING_AUTO;
    tiers.disk_bytes = kPlenty;
    tiers.disk_folder = "/nonexistent/folder";
    EXPECT_NE(ta_kv_pool_create(twins.context.get(), &options, &none, &err), TA_OK);
    EXPECT_NE(std::string(err.message).find("/nonexistent/folder"), std::string::npos) << err.message;
    EXPECT_EQ(none, nullptr);
}

// A program with an event loop learns from a descriptor that tickets have finished.
TEST(Tiers, ADescriptorTellsOfFinishedTickets) {
    Twins twins({.host_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {640});
    ta_ticket taken[8];
    uint64_t n = 0;
    EXPECT_EQ(ta_move_take_finished(twins.pool.get(), taken, 8, &n, nullptr), TA_E_STATE);
    move_now(twins.pool, twins.seqs[a], 0, 1, TA_TIER_HOST);  // nobody asked yet
    int32_t fd = -1, again = -1;
    ta_error err;
    require(ta_kv_pool_descriptor(twins.pool.get(), &fd, &err), err);
    require(ta_kv_pool_descriptor(twins.pool.get(), &again, &err), err);
    EXPECT_EQ(fd, again);
    EXPECT_GT(fd, 2);
    pollfd p{fd, POLLIN, 0};
    EXPECT_EQ(poll(&p, 1, 0), 0);
    std::vector<ta_ticket> asked;
    for (uint64_t b = 1; b < 6; ++b) asked.push_back(move(twins.pool, twins.seqs[a], b, 1, TA_TIER_HOST));
    require(ta_seq_suspend(twins.pool.get(), twins.seqs[a], TA_TIER_HOST, &asked.emplace_back(), &err), err);
    std::vector<ta_ticket> finished;
    while (finished.size() < asked.size()) {
        ASSERT_EQ(poll(&p, 1, 10000), 1);
        require(ta_move_take_finished(twins.pool.get(), taken, 2, &n, &err), err);
        ASSERT_LE(n, 2u);
        finished.insert(finished.end(), taken, taken + n);
    }
    std::sort(finished.begin(), finished.end());
    EXPECT_EQ(finished, asked);
    EXPECT_EQ(poll(&p, 1, 0), 0);
    twins.step({a}, {3});
    EXPECT_EQ(ta_kv_pool_descriptor(twins.plain_pool.get(), &fd, nullptr), TA_E_UNSUPPORTED);
    EXPECT_EQ(ta_move_take_finished(twins.plain_pool.get(), taken, 8, &n, nullptr), TA_E_UNSUPPORTED);
}

TEST(Tiers, BlocksLeaveInTheBackgroundAboveTheWatermark) {
    Twins twins({.device_blocks = 100, .host_bytes = kPlenty, .high = 50, .low = 30});
    const size_t a = twins.add();
    for (int i = 0; i < 15; ++i) twins.step({a}, {256});
    wait_for_moves(twins.pool);
    const ta_tier_stats s = tier_stats(twins.pool, TA_TIER_DEVICE);
    EXPECT_LT(s.bytes_used, s.bytes_budget * 55 / 100);
    EXPECT_GT(s.bytes_out, 0u);
    twins.verify();
}

std::string metrics(const KvPool& pool, ta_metrics_format format) {
    uint64_t needed = 0;
    ta_error err;
    require(ta_kv_pool_write_metrics(pool.get(), format, nullptr, 0, &needed, &err), err);
    std::string text(needed, 'x');
    EXPECT_EQ(ta_kv_pool_write_metrics(pool.get(), format, text.data(), needed - 1, &needed, &err), TA_E_INVALID);
    EXPECT_EQ(err.argument, 3);
    EXPECT_EQ(text, std::string(needed, 'x'));
    require(ta_kv_pool_write_metrics(pool.get(), format, text.data(), needed, &needed, &err), err);
    EXPECT_EQ(text.back(), '\0');
    text.pop_back();
    return text;
}

TEST(Tiers, MetricsAsText) {
    Twins twins({.device_blocks = 100, .host_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {300});
    move_now(twins.pool, twins.seqs[a], 1, 3, TA_TIER_HOST);
    const std::string text = metrics(twins.pool, TA_METRICS_OPENMETRICS);
    EXPECT_NE(text.find("\nta_tokens 300\n"), std::string::npos) << text;
    EXPECT_NE(text.find("\nta_tier_blocks{tier=\"host\"} 3\n"), std::string::npos) << text;
    EXPECT_NE(text.find("\nta_appended_tokens_total 300\n"), std::string::npos) << text;
    EXPECT_NE(text.find("\nta_move_seconds_count{tier=\"host\"} 1\n"), std::string::npos) << text;
    EXPECT_EQ(text.find("tier=\"disk\""), std::string::npos);
    EXPECT_EQ(text.substr(text.size() - 6), "# EOF\n");
    const std::string json = metrics(twins.pool, TA_METRICS_JSON);
    EXPECT_NE(json.find("\"tokens\": {\"value\": 300}"), std::string::npos) << json;
    EXPECT_NE(json.find("\"tier_blocks\": {\"device\": 2, \"host\": 3}"), std::string::npos) << json;
    EXPECT_EQ(std::count(json.begin(), json.end(), '{'), std::count(json.begin(), json.end(), '}'));
    metrics(twins.plain_pool, TA_METRICS_OPENMETRICS);
    // A locale with another decimal point, if there is one here, changes nothing. Nothing moves meanwhile.
    for (const char* name : {"de_DE.UTF-8", "fr_FR.UTF-8"}) {
        if (!std::setlocale(LC_NUMERIC, name)) continue;
        const std::string here = metrics(twins.pool, TA_METRICS_JSON);
        std::setlocale(LC_NUMERIC, "C");
        EXPECT_EQ(here, json);
    }
    uint64_t needed = 0;
    EXPECT_EQ(ta_kv_pool_write_metrics(twins.pool.get(), 3, nullptr, 0, &needed, nullptr), TA_E_INVALID);
    EXPECT_EQ(ta_kv_pool_write_metrics(twins.pool.get(), TA_METRICS_JSON, nullptr, 0, nullptr, nullptr), TA_E_INVALID);
}

// Everything at once: steps of two plans, and a thread that moves and pins blocks at random.
TEST(Tiers, MovesWhileStepsRun) {
    const Budgets budgets{.device_blocks = 30, .host_bytes = uint64_t{3} << 20, .disk_bytes = kPlenty, .high = 70, .low = 50};
    Twins twins(budgets, 5);
    for (int i = 0; i < 4; ++i) twins.add();
    std::atomic<bool> over{false};
    std::jthread mover([&] {
        Random random(9);
        std::vector<ta_ticket> tickets;
        while (!over) {
            const ta_seq seq = twins.seqs[size_t(random.below(4))];
            auto r = sized<ta_residency>();
            ta_error err;
            if (ta_seq_residency(twins.pool.get(), seq, &r, &err) != TA_OK) continue;  // in the plan
            const int64_t blocks = int64_t(r.device_blocks + r.host_blocks + r.disk_blocks);
            if (blocks == 0) continue;
            const int64_t first = random.below(blocks), n = random.between(1, std::min<int64_t>(blocks - first, 6));
            ta_ticket ticket = 0;
            if (ta_seq_move(twins.pool.get(), seq, uint64_t(first), uint64_t(n), ta_tier(random.below(3)), &ticket, &err) ==
                TA_OK)
                tickets.push_back(ticket);
            if (random.chance(20) && !tickets.empty()) ta_move_cancel(twins.pool.get(), random.pick(tickets), nullptr);
            if (random.chance(30) && !tickets.empty()) {
                auto info = sized<ta_move_info>();
                ta_move_wait(twins.pool.get(), tickets.back(), 2000000, &info, nullptr);
                EXPECT_EQ(info.status == TA_OK || info.status == TA_E_TIER_FULL, true) << ta_status_name(info.status);
            }
        }
    });
    Random random(3);
    try {
        for (int i = 0; i < 120 && !::testing::Test::HasFatalFailure(); ++i) {
            const size_t a = size_t(random.below(4)), b = (a + 1) % 4;
            if (length(twins.pool, twins.seqs[a]) > 900) twins.truncate(a, random.below(300));
            twins.step({a, b}, {int32_t(random.between(1, 90)), 1});
        }
    } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
    }
    over = true;
    mover.join();
    twins.verify();
}

}  // namespace
}  // namespace ta::testing
