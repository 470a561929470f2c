// Room for a begin: what others make of it while it looks, and the ways of a step's blocks through tiers that are full.
#include "src/attend/plan.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "tiering/simulated_device.h"
#include "tiering/wrapped_tier.h"

namespace ta::testing {
namespace {

using std::chrono::milliseconds;

// A host tier that tells when it is asked for slots, and for its statistics.
class WatchedTier final : public WrappedTier {
  public:
    struct Hooks {
        std::function<void()> acquire, stats;
    };
    WatchedTier(std::unique_ptr<Tier> tier, const Hooks& hooks) : WrappedTier(std::move(tier)), hooks_(hooks) {}
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override {
        hooks_.acquire();
        return WrappedTier::acquire(wanted);
    }
    TierStats stats() const override {
        hooks_.stats();
        return WrappedTier::stats();
    }

  private:
    const Hooks& hooks_;
};

constexpr uint32_t kLayers = 2, kHeads = 1, kDim = 64;

class PlanRoom : public ::testing::Test {
  protected:
    // Blocks of 8 bits without sinks, or of `bits`.
    void make(uint64_t device_blocks, uint64_t host_blocks, uint64_t disk_blocks, TierSettings tiers = {}, bool gpu = false,
              bool falls = false, uint32_t bits = 8) {
        Seams seams;
        if (gpu) seams.device = std::make_unique<SimulatedDevice>(1);
        Context::Options options;
        options.threads = 1;
        Result<std::shared_ptr<Context>> context = Context::create(std::move(options), std::move(seams));
        ASSERT_TRUE(context.ok());
        Result<Geometry> g =
            Geometry::make({.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = bits, .falls = falls});
        ta_numerics settings{};
        settings.sink_blocks = -1;
        Result<Numerics> n = resolve_numerics(&settings, g.value().shapes);
        const uint64_t bytes = g.value().token_slot_bytes, on_pages = (bytes + 4095) / 4096 * 4096;
        tiers.host_budget = host_blocks ? host_blocks * on_pages + (16 << 10) : 0;
        tiers.disk_budget = disk_blocks ? 8192 + disk_blocks * (on_pages + 4096) : 0;
        tiers.disk_folder = ::testing::TempDir();
        tiers.high_percent = tiers.low_percent = 100;
        Result<std::shared_ptr<Pool>> made =
            Pool::create(context.take(), g.take(), n.take(), device_blocks * bytes, 2048, tiers);
        if (!made.ok()) FAIL() << std::move(made).status().detail()->message;
        pool = made.take();
        plan = std::make_unique<Plan>(pool);
    }
    ~PlanRoom() override {
        plan.reset();
        pool.reset();
    }
    Status begin_tokens(ta_seq seq, int32_t n_new) {
        const int32_t n_query = 0;
        return plan->begin({&seq, 1}, &n_new, &n_query);
    }
    Status begin(ta_seq seq, int32_t blocks) { return begin_tokens(seq, blocks * int32_t(kPageTokens)); }
    void step(ta_seq seq, int32_t blocks) {
        if (Status s = begin(seq, blocks); !s.ok()) FAIL() << s.detail()->message;
        finish(blocks * int32_t(kPageTokens));
    }
    // Appends so many tokens, and ends the step.
    void finish(int64_t tokens) {
        std::vector<float> x(size_t(tokens) * kHeads * kDim, 1.0f);
        ta_tensor t{};
        t.struct_size = sizeof t;
        t.dtype = TA_DTYPE_F32;
        t.data = x.data();
        t.tokens = tokens;
        t.heads = kHeads;
        t.head_dim = kDim;
        Result<TensorView> view = view_tensor(t, "x");
        for (uint32_t layer = 0; layer < kLayers; ++layer) ASSERT_TRUE(plan->append(layer, view.value(), view.value()).ok());
        ASSERT_TRUE(plan->end().ok());
    }
    ta_seq add(int32_t blocks) {
        const ta_seq seq = pool->sequences().create().value();
        while (blocks > 0) {
            step(seq, std::min(blocks, 4));
            blocks -= 4;
        }
        return seq;
    }
    MoveProgress move(ta_seq seq, uint64_t first, uint64_t n, TierKind to) {
        return pool->mover()->wait(pool->sequences().move_blocks(seq, first, n, to, MoveReason::kAsked).value(), -1).take();
    }
    uint64_t count(ta_seq seq, TierKind tier) const {
        uint64_t n = 0;
        (void)pool->sequences().inspect(seq, [&](const Sequence& s) -> Status {
            for (const BlockPtr& b : s.blocks) n += b->tier() == tier;
            return {};
        });
        return n;
    }

    std::shared_ptr<Pool> pool;
    std::unique_ptr<Plan> plan;
};

// All that could leave is on its way when the begin finds no room, and gone before it has looked for some. Under falling
// precision it looks before it tries.
TEST_F(PlanRoom, MovesThatEndWhileABeginLooks) {
    std::atomic<bool> held{true}, arrived{false};
    std::atomic<int> looks{0};
    WatchedTier::Hooks hooks{[] {}, [] {}};
    TierSettings tiers;
    tiers.patience = Patience().or_of(-1);  // it does not wait for the moves
    tiers.wrap_host = [&](std::unique_ptr<Tier> tier) -> std::unique_ptr<Tier> {
        return std::make_unique<WatchedTier>(std::move(tier), hooks);
    };
    make(8, 16, 0, tiers, false, true);
    const ta_seq a = add(8);
    ASSERT_TRUE(pool->sequences().pin_blocks(a, 4, 4, true).ok());
    const ta_seq b = pool->sequences().create().value();
    hooks.acquire = [&] {
        arrived = true;
        while (held) std::this_thread::yield();
    };
    hooks.stats = [&] {  // by the begin
        ++looks;
        held = false;
        while (pool->mover()->busy()) std::this_thread::yield();
    };
    ASSERT_TRUE(pool->sequences().move_blocks(a, 0, 4, TierKind::kHost, MoveReason::kAsked).ok());
    while (!arrived) std::this_thread::yield();
    const Status s = begin(b, 4);
    EXPECT_TRUE(s.ok()) << s.detail()->message;
    held = false;
    EXPECT_GT(looks, 0);
    hooks.acquire = hooks.stats = [] {};
    EXPECT_EQ(count(a, TierKind::kHost), 4u);
}

// The blocks of a step on a GPU come from disk through a host tier that they fill, while others fill the device.
TEST_F(PlanRoom, AStepLargerThanTheHostTierOfAGpu) {
    struct Case {
        int32_t others;
        uint64_t disk_blocks;
        bool forked;
    };
    for (const Case& c : {Case{0, 80, false}, Case{8, 80, false}, Case{20, 80, false}, Case{26, 80, false}, Case{26, 80, true},
                          Case{26, 36, false}}) {
        SCOPED_TRACE(std::to_string(c.others) + " blocks of others, a disk of " + std::to_string(c.disk_blocks) +
                     (c.forked ? ", forked" : ""));
        make(32, 6, c.disk_blocks, {}, true);
        const ta_seq a = add(28);
        for (uint64_t first = 0; first < 28; first += 4) EXPECT_EQ(move(a, first, 4, TierKind::kDisk).moved, 4u);
        const ta_seq b = add(c.others);
        if (c.forked) {
            EXPECT_TRUE(pool->sequences().fork(a).ok());
        }
        ASSERT_EQ(count(a, TierKind::kDisk), 28u);
        const Status s = begin(a, 2);
        EXPECT_TRUE(s.ok()) << s.detail()->message;
        if (!s.ok()) return;
        EXPECT_TRUE(plan->abort().ok());
        EXPECT_EQ(count(a, TierKind::kDisk), 0u);
        EXPECT_EQ(count(b, TierKind::kDisk) + count(b, TierKind::kHost) + count(b, TierKind::kDevice), uint64_t(c.others));
        step(b, 1);
        step(a, 1);
    }
}

// A place that an evicted block has left is no room while another plan may be reading there; no more is evicted for that.
TEST_F(PlanRoom, NoMoreLeavesForRoomThatIsBeingRead) {
    for (const bool gpu : {false, true}) {
        SCOPED_TRACE(gpu);
        make(24, 24, 80, {}, gpu);
        const ta_seq a = add(4), other = add(1);
        EXPECT_EQ(move(a, 0, 4, TierKind::kDisk).moved, 4u);
        const ta_seq idle = add(20);
        EXPECT_EQ(move(idle, 0, 20, TierKind::kHost).moved, 20u);
        const ta_seq more = add(4);
        EXPECT_EQ(move(more, 0, 4, TierKind::kHost).moved, 4u);
        Plan open(pool);
        const int32_t none = 0;
        ASSERT_TRUE(open.begin({&other, 1}, &none, &none).ok());
        std::jthread ends([&] {
            std::this_thread::sleep_for(milliseconds(100));
            EXPECT_TRUE(open.abort().ok());
        });
        const Status s = begin(a, 0);
        EXPECT_TRUE(s.ok()) << s.detail()->message;
        EXPECT_GE(count(idle, TierKind::kHost) + count(more, TierKind::kHost), 24u - 4 - 4);
    }
}

// A step that can never fit is refused soon.
TEST_F(PlanRoom, AStepLargerThanAllTiersOfAGpu) {
    make(16, 6, 80, {}, true);
    const ta_seq a = pool->sequences().create().value();
    for (int i = 0; i < 6; ++i) {
        step(a, 4);
        EXPECT_EQ(move(a, uint64_t(i) * 4, 4, TierKind::kDisk).moved, 4u);
        if (i < 4) continue;
        const auto start = std::chrono::steady_clock::now();
        EXPECT_EQ(begin(a, 4).code(), TA_E_TIER_FULL);
        EXPECT_LT(std::chrono::steady_clock::now() - start, milliseconds(1000));
        return;
    }
}

// Every region of the GPU's memory has an open block of a sequence that stays: a begin drops what it may, and ends.
TEST_F(PlanRoom, ABeginEndsWhereFreeMemoryIsFragmented) {
    TierSettings tiers;
    tiers.drop_coldest = true;
    tiers.patience = Patience().or_of(-1);
    make(1024, 0, 0, tiers, true, false, 4);
    std::vector<ta_seq> chats{pool->sequences().create().value()};
    for (; begin_tokens(chats.back(), 1).ok(); chats.push_back(pool->sequences().create().value())) finish(1);
    ASSERT_GT(chats.size(), 60u);
    for (size_t i = 0; i < chats.size(); ++i) {
        if (i % 3 > 0) {
            EXPECT_TRUE(pool->sequences().release(chats[i]).ok());
        }
    }
    EXPECT_GT(pool->residency().store().fragmentation(), 0.1);
    const ta_seq grows = pool->sequences().create().value();
    Status s;
    int blocks = 0;
    for (; blocks < 2000 && (s = begin(grows, 1)).ok(); ++blocks) finish(kPageTokens);
    EXPECT_EQ(blocks, 2000) << "it drops its own blocks: " << s.detail()->message;
    EXPECT_EQ(begin(grows, 1200).code(), TA_E_TIER_FULL);
}

TEST(Step, TouchesNoMoreBlocksThanItsNewTokensSay) {
    for (const int64_t n_new : {1, 2, 62, 63, 64, 65, 66, 127, 128, 129, 1000}) {
        int64_t most = 0;
        for (int64_t length = 0; length < 2 * kPageTokens; ++length)
            most = std::max(most, (length + n_new - 1) / kPageTokens - length / kPageTokens + 1);
        EXPECT_EQ(Step::most_touched(n_new), most) << n_new << " new tokens";
    }
    EXPECT_EQ(Step::most_touched(0), 0);
}

// Neither tier alone has what is missing, and what the step shares with a fork cannot be dropped.
TEST_F(PlanRoom, WhatIsDroppedForAStepMayLieInTwoTiers) {
    TierSettings tiers;
    tiers.drop_coldest = true;
    tiers.patience = Patience().or_of(-1);
    make(12, 8, 8, tiers);
    const ta_seq a = add(21), b = add(8), c = pool->sequences().fork(b).value();
    const ta_seq seqs[] = {a, b, c};
    const int32_t n_new[] = {4 * 64, 5 * 64, 6}, n_query[] = {0, 0, 0};
    Status begun = plan->begin(seqs, n_new, n_query);
    EXPECT_TRUE(begun.ok()) << begun.detail()->message;
    EXPECT_EQ(count(b, TierKind::kDisk), 0u);
}

}  // namespace
}  // namespace ta::testing
