// Pools with a peer tier beside a pool that has all its blocks in one place: the same outputs to the bit, wherever blocks are.
#include <gtest/gtest.h>

#include <vector>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

constexpr uint64_t kLittle = 256 << 10;

TEST(PeerTier, SequencesGrowThroughAllTiers) {
    for (uint32_t bits : {4u, 2u, 8u}) {
        SCOPED_TRACE(std::to_string(bits) + " bits");
        Twins twins({.device_blocks = 40, .host_bytes = kLittle, .disk_bytes = kPlenty, .bits = bits, .peer_bytes = kLittle});
        std::vector<size_t> s;
        for (int i = 0; i < 6; ++i) s.push_back(twins.add());
        uint64_t seen[4] = {};
        for (int round = 0; round < 6; ++round) {
            for (const size_t i : s) twins.step({i}, {200});
            for (const size_t i : s) {
                const ta_residency r = residency(twins.pool, twins.seqs[i]);
                seen[0] += r.device_blocks, seen[1] += r.peer_blocks, seen[2] += r.host_blocks, seen[3] += r.disk_blocks;
                EXPECT_EQ(r.device_blocks + r.peer_blocks + r.host_blocks + r.disk_blocks,
                          uint64_t(length(twins.pool, twins.seqs[i]) + 63) / 64);
            }
        }
        for (const uint64_t blocks : seen) EXPECT_GT(blocks, 0u);
        const ta_tier_stats peer = tier_stats(twins.pool, TA_TIER_PEER);
        EXPECT_EQ(peer.bytes_budget, kLittle);
        EXPECT_LE(peer.bytes_used, kLittle);
        EXPECT_GT(peer.evicted_blocks, 0u);
        EXPECT_GT(peer.hits, 0u);
        twins.verify();
        const size_t fork = twins.fork(s[0]);
        twins.truncate(s[1], 130);
        twins.step({fork, s[1]}, {3, 70});
        twins.verify();
    }
}

TEST(PeerTier, BlocksMoveBetweenAnyTwoTiers) {
    Twins twins({.device_blocks = 200, .host_bytes = kPlenty, .disk_bytes = kPlenty, .peer_bytes = kPlenty});
    const size_t a = twins.add();
    twins.step({a}, {10 * 64 + 5});
    const ta_seq seq = twins.seqs[a];
    constexpr ta_tier kAll[] = {TA_TIER_DEVICE, TA_TIER_PEER, TA_TIER_HOST, TA_TIER_DISK};
    for (const ta_tier from : kAll) {
        for (const ta_tier to : kAll) {
            SCOPED_TRACE("from tier " + std::to_string(from) + " to " + std::to_string(to));
            (void)move_now(twins.pool, seq, 0, 10, from);
            const ta_move_info info = move_now(twins.pool, seq, 0, 10, to);
            EXPECT_EQ(info.moved, from == to ? 0u : 10u) << ta_status_name(info.status);
            const ta_residency r = residency(twins.pool, seq);
            EXPECT_EQ(r.peer_blocks, to == TA_TIER_PEER ? 10u : 0u);
            EXPECT_EQ(r.host_blocks, to == TA_TIER_HOST ? 10u : 0u);
            EXPECT_EQ(r.disk_blocks, to == TA_TIER_DISK ? 10u : 0u);
            EXPECT_EQ(r.peer_bytes > 0, to == TA_TIER_PEER);
            twins.verify();
            twins.step({a}, {1});
        }
    }
    // A step promotes the blocks that it needs from the disk to the fastest memory below the device.
    (void)move_now(twins.pool, seq, 0, 10, TA_TIER_DISK);
    twins.step({a}, {1});
    EXPECT_EQ(residency(twins.pool, seq).peer_blocks, 10u);
}

TEST(PeerTier, IsTheOnlyTier) {
    Twins twins({.device_blocks = 12, .peer_bytes = kLittle});
    const size_t a = twins.add();
    ta_error err;
    int64_t tokens = 0;
    for (const int32_t n = 64;; tokens += n) {
        const ta_status s = ta_plan_begin(twins.plan.get(), 1, &twins.seqs[a], &n, nullptr, nullptr, &err);
        if (s == TA_E_TIER_FULL) break;
        require(s, err);
        require(ta_plan_abort(twins.plan.get(), &err), err);
        twins.step({a}, {n});
        ASSERT_LT(tokens, 1 << 20);
    }
    EXPECT_GT(tokens, 18 * 64);
    EXPECT_NE(std::string(err.message).find("the peer tier, which is full"), std::string::npos) << err.message;
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a], 0, 1, TA_TIER_HOST, nullptr, &err), TA_E_INVALID);
    ta_ticket ticket = 0;
    EXPECT_EQ(ta_seq_move(twins.pool.get(), twins.seqs[a], 0, 1, TA_TIER_HOST, &ticket, &err), TA_E_UNSUPPORTED);
    twins.verify();
}

TEST(PeerTier, TheColdestIsDroppedWhenAllTiersAreFull) {
    Twins twins({.device_blocks = 12, .host_bytes = kLittle, .drop_coldest = TA_ON, .peer_bytes = kLittle});
    const size_t a = twins.add();
    ta_error err;
    for (int i = 0; i < 60; ++i) {
        begin(twins.plan, {twins.seqs[a]}, {64});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(Random(uint64_t(i)).normals(64 * kRow), 64, kHeads, kDim);
            append(twins.plan, layer, k, k);
        }
        end(twins.plan);
    }
    const ta_residency r = residency(twins.pool, twins.seqs[a]);
    EXPECT_GT(r.dropped_blocks, 0u);
    EXPECT_EQ(r.dropped_blocks + r.device_blocks + r.peer_blocks + r.host_blocks, 60u);
    require(ta_seq_verify(twins.pool.get(), twins.seqs[a], &err), err);
}

// At the same bits in the peer tier, at fewer in the host's and on disk.
TEST(PeerTier, PrecisionFallsBelowIt) {
    Twins twins({.device_blocks = 400,
                 .host_bytes = kPlenty,
                 .disk_bytes = kPlenty,
                 .bits = 8,
                 .peer_bytes = kPlenty,
                 .falling = TA_ON});
    const size_t a = twins.add();
    ta_error err;
    begin(twins.plan, {twins.seqs[a]}, {640});
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        Tensor k(Random(layer).normals(640 * kRow), 640, kHeads, kDim);
        append(twins.plan, layer, k, k);
    }
    end(twins.plan);
    const uint64_t first = 2;
    const uint64_t on_device = residency(twins.pool, twins.seqs[a]).device_bytes / 10;
    EXPECT_EQ(move_now(twins.pool, twins.seqs[a], first, 8, TA_TIER_PEER).moved, 8u);
    EXPECT_EQ(residency(twins.pool, twins.seqs[a]).peer_bytes, 8 * on_device);
    EXPECT_EQ(tier_stats(twins.pool, TA_TIER_PEER).fallen_blocks, 0u);
    EXPECT_EQ(move_now(twins.pool, twins.seqs[a], first, 8, TA_TIER_HOST).moved, 8u);
    EXPECT_EQ(tier_stats(twins.pool, TA_TIER_HOST).fallen_blocks, 8u);
    EXPECT_EQ(move_now(twins.pool, twins.seqs[a], first, 8, TA_TIER_PEER).moved, 8u);
    EXPECT_LT(residency(twins.pool, twins.seqs[a]).peer_bytes, 6 * on_device);
    require(ta_seq_verify(twins.pool.get(), twins.seqs[a], &err), err);
}

TEST(PeerTier, IsDescribedAndOutlivesItsContext) {
    Context context = make_context(1), peer = make_context(1);
    ta_tier_options tiers;
    const ta_kv_pool_options options = options_of({.device_blocks = 12, .peer_bytes = kLittle}, tiers, peer.get());
    const KvPool pool = make_pool(context, options);
    peer.reset();
    auto description = sized<ta_kv_pool_description>();
    ta_error err;
    require(ta_kv_pool_describe(pool.get(), &description, &err), err);
    EXPECT_EQ(description.tiers->peer_bytes, kLittle);
    ASSERT_NE(description.tiers->peer, nullptr);
    auto again = options;
    again.tiers = description.tiers;
    EXPECT_EQ(tier_stats(make_pool(context, again), TA_TIER_PEER).bytes_budget, kLittle);
}

TEST(PeerTier, BadOptionsMakeNoPool) {
    Context context = make_context(1), peer = make_context(1);
    ta_tier_options tiers;
    const ta_kv_pool_options options = options_of({.device_blocks = 12, .peer_bytes = kLittle}, tiers, peer.get());
    ta_kv_pool* pool = nullptr;
    const auto refused = [&](ta_context* of, uint64_t bytes, const char* text) {
        tiers.peer = of;
        tiers.peer_bytes = bytes;
        ta_error err;
        EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &pool, &err), TA_E_INVALID);
        EXPECT_NE(std::string(err.message).find(text), std::string::npos) << err.message;
        EXPECT_EQ(pool, nullptr);
    };
    refused(nullptr, kLittle, "asks for both");
    refused(peer.get(), 0, "asks for both");
    refused(context.get(), kLittle, "own context");
    refused(peer.get(), 4096, "does not hold one block");
}

}  // namespace
}  // namespace ta::testing
