// The device where a peer tier lies is lost: so are the blocks there, and no others.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "src/api/api.h"
#include "support/tiers.h"
#include "tiering/simulated_device.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;
constexpr int64_t kRow = kHeads * kDim;
constexpr int kHighPercent = 70;

Context context_on(int ordinal, SimulatedDevice** device = nullptr) {
    auto made = std::make_unique<SimulatedDevice>(1, ordinal);
    if (device) *device = made.get();
    Seams seams;
    seams.device = std::move(made);
    return Context(new ta_context{ta::Context::create({.threads = 1}, std::move(seams)).take()});
}

class PeerLost : public ::testing::Test {
  protected:
    PeerLost() {
        auto options = pool_options(kLayers, kHeads, kDim);
        const ta_kv_pool_stats sizes = stats(make_pool(make_context(), options));
        auto tiers = sized<ta_tier_options>();
        tiers.peer = peer.get();
        tiers.peer_bytes = 1 << 20;
        tiers.host_bytes = 4 << 20;
        tiers.high_percent = kHighPercent;
        options.budget_bytes = 8 * sizes.token_block_bytes + 40 * sizes.channel_block_bytes;
        options.tiers = &tiers;
        pool = make_pool(own, options);
        plan = make_plan(pool);
    }
    void step(ta_seq seq, int32_t tokens) {
        begin(plan, {seq}, {tokens});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(tokens * kRow), tokens, kHeads, kDim), out(tokens, kHeads, kDim);
            append(plan, layer, k, k);
            attend(plan, layer, k, out, nullptr);
        }
        end(plan);
    }

    SimulatedDevice* peer_device = nullptr;
    Context own = context_on(0), peer = context_on(1, &peer_device);
    KvPool pool;
    Plan plan;
    Random random{1};
    ta_error err;
};

TEST_F(PeerLost, ItsBlocksAreAndNoOthers) {
    const ta_seq a = make_sequence(pool), b = make_sequence(pool);
    step(a, 64 * 8 + 5);
    step(b, 64 * 8 + 5);
    auto space_options = sized<ta_namespace_options>();
    space_options.salt[0] = 1;
    ta_namespace space = 0;
    require(ta_namespace_create(pool.get(), &space_options, &space, &err), err);
    std::vector<uint8_t> keys(8 * 32);
    for (size_t i = 0; i < 8; ++i) keys[i * 32] = uint8_t(i + 1);
    require(ta_seq_publish(pool.get(), a, space, keys.data(), 8, &err), err);
    ASSERT_EQ(move_now(pool, a, 3, 4, TA_TIER_PEER).moved, 4u);
    ASSERT_EQ(move_now(pool, b, 1, 3, TA_TIER_HOST).moved, 3u);

    peer_device->lose();
    EXPECT_EQ(tier_stats(pool, TA_TIER_PEER).state, TA_TIER_FAILED);
    EXPECT_STREQ(tier_stats(pool, TA_TIER_PEER).reason, "the simulated device is lost");
    const ta_seq both[] = {b, a};
    const int32_t n_new[] = {1, 1};
    EXPECT_EQ(ta_plan_begin(plan.get(), 2, both, n_new, nullptr, nullptr, &err), TA_E_DEVICE_LOST);
    EXPECT_EQ(err.tier, TA_TIER_PEER);
    EXPECT_EQ(err.sequence, 1);
    EXPECT_EQ(err.block, 3);
    EXPECT_EQ(length(pool, a), 64 * 8 + 5);

    // A sequence with no blocks at the peer goes on, past the device's budget; nothing moves to the peer.
    for (int i = 0; i < 10; ++i) step(b, 320);
    wait_for_moves(pool);
    const ta_tier_stats device = tier_stats(pool, TA_TIER_DEVICE);
    EXPECT_LE(device.bytes_used, device.bytes_budget / 100 * kHighPercent) << "background demotion has ended";
    step(b, 20 * 64);  // a begin that has to evict to the host itself
    verify(pool, b);
    EXPECT_GT(residency(pool, b).host_blocks, 10u);
    EXPECT_EQ(residency(pool, b).peer_blocks, 0u);
    EXPECT_EQ(move_now(pool, b, 1, 3, TA_TIER_PEER).status, TA_E_TIER_FULL);

    // The prefix ends before the first lost block, and is published anew.
    ta_seq matched = 0;
    int64_t tokens = 0;
    require(ta_seq_match_prefix(pool.get(), space, keys.data(), 8, &matched, &tokens, &err), err);
    EXPECT_EQ(tokens, 3 * 64);
    step(matched, 5 * 64);
    require(ta_seq_publish(pool.get(), matched, space, keys.data(), 8, &err), err);
    require(ta_seq_match_prefix(pool.get(), space, keys.data(), 8, &matched, &tokens, &err), err);
    EXPECT_EQ(tokens, 8 * 64);

    // The rest of the sequence is used again, too.
    require(ta_seq_truncate(pool.get(), a, 3 * 64, &err), err);
    step(a, 65);
    verify(pool, a);
}

}  // namespace
}  // namespace ta::testing
