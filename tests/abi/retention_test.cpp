// Blocks leave full tiers, and are dropped, in the order of their priorities; the policy decides among equals.
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

std::vector<ta_block_info> describe(const KvPool& pool, ta_seq seq) {
    std::vector<ta_block_info> all(size_t((length(pool, seq) + 63) / 64));
    ta_error err;
    require(ta_seq_describe_blocks(pool.get(), seq, 0, all.size(), all.data(), &err), err);
    return all;
}

void retain(const KvPool& pool, ta_seq seq, uint64_t first, uint64_t n, uint32_t priority, int64_t ms = 0) {
    auto r = sized<ta_retention>();
    r.priority = priority;
    r.duration_ms = ms;
    ta_error err;
    require(ta_seq_retain(pool.get(), seq, first, n, &r, &err), err);
}

std::vector<bool> in_tier(const KvPool& pool, ta_seq seq, ta_tier tier) {
    std::vector<bool> is;
    for (const ta_block_info& b : describe(pool, seq)) is.push_back(b.bytes > 0 && b.tier == tier);
    return is;
}

TEST(Retention, LowerPrioritiesAreEvictedFirstWhateverThePolicySays) {
    for (const ta_eviction policy : {TA_EVICT_LRU, TA_EVICT_PRIORITY, TA_EVICT_ATTENTION}) {
        SCOPED_TRACE(policy);
        Twins twins({.device_blocks = 12, .host_bytes = kPlenty, .high = 100, .eviction = policy});
        const size_t old = twins.add(), recent = twins.add();
        twins.step({old}, {6 * 64});
        twins.step({recent}, {6 * 64});
        // The one that was used last goes first, but for one block, and of the other one block at the very end.
        retain(twins.pool, twins.seqs[recent], 1, 4, 10);
        retain(twins.pool, twins.seqs[recent], 3, 1, 63);
        retain(twins.pool, twins.seqs[old], 2, 1, 40);
        const size_t wants = twins.add();
        while (residency(twins.pool, twins.seqs[recent]).host_blocks < 3) twins.step({wants}, {64});
        EXPECT_EQ(in_tier(twins.pool, twins.seqs[recent], TA_TIER_HOST),
                  (std::vector<bool>{false, true, true, false, true, false}));
        EXPECT_EQ(residency(twins.pool, twins.seqs[old]).host_blocks, 0u);
        while (residency(twins.pool, twins.seqs[old]).host_blocks < 4) twins.step({wants}, {64});
        EXPECT_FALSE(in_tier(twins.pool, twins.seqs[old], TA_TIER_HOST)[2]);
        twins.step({old, recent}, {1, 1});
        twins.verify();
    }
}

TEST(Retention, LowerPrioritiesAreDroppedFirst) {
    Twins twins({.device_blocks = 14, .drop_coldest = TA_ON});
    const size_t a = twins.add();
    twins.step({a}, {10 * 64});
    retain(twins.pool, twins.seqs[a], 1, 3, 50);
    retain(twins.pool, twins.seqs[a], 7, 2, 1);
    const ta_seq wants = make_sequence(twins.pool);
    const auto grow = [&] {
        begin(twins.plan, {wants}, {64});
        Tensor k(std::vector<float>(64 * kRow, 1.0f), 64, kHeads, kDim);
        for (uint32_t layer = 0; layer < kLayers; ++layer) append(twins.plan, layer, k, k);
        end(twins.plan);
    };
    const auto lost = [&] {
        std::vector<size_t> blocks;
        const std::vector<ta_block_info> all = describe(twins.pool, twins.seqs[a]);
        for (size_t b = 0; b < all.size(); ++b) {
            if (all[b].flags & TA_BLOCK_DROPPED) blocks.push_back(b);
        }
        return blocks;
    };
    while (lost().size() < 2) grow();
    EXPECT_EQ(lost(), (std::vector<size_t>{7, 8}));
    while (lost().size() < 4) grow();
    EXPECT_EQ(lost(), (std::vector<size_t>{4, 5, 7, 8})) << "the oldest among equals";
}

TEST(Retention, PublishedBlocksThatNobodyUsesLeaveByPriority) {
    Twins twins({.device_blocks = 12});
    ta_error err;
    auto options = sized<ta_namespace_options>();
    options.salt[0] = 1;
    ta_namespace space = 0;
    require(ta_namespace_create(twins.pool.get(), &options, &space, &err), err);
    const auto keys_of = [](uint8_t prompt) {
        std::vector<uint8_t> keys(4 * 32, prompt);
        for (size_t i = 0; i < 4; ++i) keys[32 * i] = uint8_t(i);
        return keys;
    };
    for (const uint8_t prompt : {uint8_t(1), uint8_t(2)}) {
        const size_t s = twins.add();
        twins.step({s}, {4 * 64});
        require(ta_seq_publish(twins.pool.get(), twins.seqs[s], space, keys_of(prompt).data(), 4, &err), err);
        if (prompt == 1) retain(twins.pool, twins.seqs[s], 0, 4, 60);  // the older one
        require(ta_seq_release(twins.pool.get(), twins.seqs[s], &err), err);
    }
    const size_t wants = twins.add();
    const auto matched = [&](uint8_t prompt) {
        ta_seq seq = 0;
        int64_t n = 0;
        require(ta_seq_match_prefix(twins.pool.get(), space, keys_of(prompt).data(), 4, &seq, &n, &err), err);
        require(ta_seq_release(twins.pool.get(), seq, &err), err);
        return n;
    };
    auto s = sized<ta_namespace_stats>();
    do {
        twins.step({wants}, {64});
        require(ta_namespace_get_stats(twins.pool.get(), space, &s, &err), err);
    } while (s.evicted < 3);
    EXPECT_EQ(matched(1), 256);
    EXPECT_LT(matched(2), 256);
}

TEST(Retention, EndsInTimeAndIsListed) {
    Twins twins({.host_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {4 * 64 + 5});
    const ta_seq seq = twins.seqs[a], fork = fork_sequence(twins.pool, seq);
    ta_error err;
    require(ta_seq_pin(twins.pool.get(), seq, 1, 1, &err), err);
    retain(twins.pool, seq, 1, 2, 7);
    retain(twins.pool, seq, 2, 1, 60, 20);
    std::vector<ta_block_info> all = describe(twins.pool, fork);
    ASSERT_EQ(all.size(), 5u);
    EXPECT_EQ(all[0].flags, 0);
    EXPECT_EQ(all[0].priority, 32u);
    EXPECT_EQ(all[0].owners, 2u);
    EXPECT_EQ(all[0].bytes, stats(twins.pool).token_block_bytes);
    EXPECT_EQ(all[1].pins, 1u);
    EXPECT_EQ(all[1].priority, 7u);
    EXPECT_EQ(all[1].retained_ms, -1);
    EXPECT_EQ(all[1].bytes, stats(twins.pool).channel_block_bytes);
    EXPECT_EQ(all[2].priority, 60u);
    EXPECT_LE(all[2].retained_ms, 20);
    EXPECT_EQ(all[4].flags, TA_BLOCK_OPEN);
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    all = describe(twins.pool, fork);
    EXPECT_EQ(all[2].priority, 32u);
    EXPECT_EQ(all[2].retained_ms, -1);
    require(ta_seq_retain(twins.pool.get(), seq, 1, 1, nullptr, &err), err);
    EXPECT_EQ(describe(twins.pool, seq)[1].priority, 32u);
    require(ta_seq_forget(twins.pool.get(), seq, 0, 64, nullptr, &err), err);
    EXPECT_EQ(describe(twins.pool, seq)[0].flags, TA_BLOCK_DROPPED);
    EXPECT_EQ(describe(twins.pool, fork)[0].owners, 1u);
}

}  // namespace
}  // namespace ta::testing
