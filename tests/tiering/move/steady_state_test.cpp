// Appending never waits in the steady state: with watermarks, blocks leave in the background before their room is needed,
// however slow the tier below is, as long as it keeps up on average. The tier is slowed down; the pool is a real one.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "src/attend/plan.h"
#include "tiering/wrapped_tier.h"

namespace ta {
namespace {

using std::chrono::milliseconds;
using testing::WrappedTier;

// A host tier that takes its time to hand out slots.
class SlowTier final : public WrappedTier {
  public:
    SlowTier(std::unique_ptr<Tier> tier, milliseconds per_slot) : WrappedTier(std::move(tier)), per_slot_(per_slot) {}
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override {
        std::this_thread::sleep_for(per_slot_ * wanted.size());
        return WrappedTier::acquire(wanted);
    }

  private:
    const milliseconds per_slot_;
};

constexpr int kSequences = 4, kSteps = 500, kTokens = 4;
constexpr uint64_t kDeviceBlocks = 60;
constexpr milliseconds kPerSlot{2}, kStep{2};  // a block fills up every 8 ms

struct Decoded {
    milliseconds longest{0}, ninety_nine_percent{0};  // of begin
    uint64_t waits, left;
};

// Decodes past the device budget, kTokens for each of the sequences in a step.
Decoded decode(int high, int low) {
    Context::Options context_options;
    context_options.threads = 1;
    Result<std::shared_ptr<Context>> context = Context::create(std::move(context_options));
    Result<Geometry> g = Geometry::make({.layers = 1, .kv_heads = 1, .head_dim = 64, .bits = 4});
    ta_numerics settings{};
    settings.sink_blocks = -1;
    Result<Numerics> n = resolve_numerics(&settings, g.value().shapes);
    TierSettings tiers;
    tiers.host_budget = uint64_t{16} << 20;
    tiers.high_percent = high;
    tiers.low_percent = low;
    tiers.wrap_host = [](std::unique_ptr<Tier> tier) -> std::unique_ptr<Tier> {
        return std::make_unique<SlowTier>(std::move(tier), kPerSlot);
    };
    const uint64_t budget = 8 * g.value().token_slot_bytes + kDeviceBlocks * g.value().channel_slot_bytes;
    Result<std::shared_ptr<Pool>> made = Pool::create(context.take(), g.take(), n.take(), budget, 100, tiers);
    const std::shared_ptr<Pool> pool = made.take();
    std::vector<ta_seq> seqs;
    for (int i = 0; i < kSequences; ++i) {
        Result<ta_seq> seq = pool->sequences().create();
        seqs.push_back(seq.value());
    }
    std::vector<float> x(size_t(kSequences * kTokens * 64), 1.0f);
    ta_tensor t{};
    t.struct_size = sizeof t;
    t.dtype = TA_DTYPE_F32;
    t.data = x.data();
    t.tokens = kSequences * kTokens;
    t.heads = 1;
    t.head_dim = 64;
    Result<TensorView> view = view_tensor(t, "x");
    Plan plan(pool);
    const std::vector<int32_t> n_new(kSequences, kTokens), n_query(kSequences, 0);
    std::vector<std::chrono::steady_clock::duration> begins;
    for (int i = 0; i < kSteps; ++i) {
        const auto start = std::chrono::steady_clock::now();
        const Status begun = plan.begin(seqs, n_new.data(), n_query.data());
        begins.push_back(std::chrono::steady_clock::now() - start);
        EXPECT_TRUE(begun.ok());
        EXPECT_TRUE(plan.append(0, view.value(), view.value()).ok());
        std::this_thread::sleep_for(kStep);  // in place of the model
        EXPECT_TRUE(plan.end().ok());
    }
    std::sort(begins.begin(), begins.end());
    const auto in_ms = [](auto duration) { return std::chrono::duration_cast<milliseconds>(duration); };
    return {in_ms(begins.back()), in_ms(begins[begins.size() * 99 / 100]), pool->residency().counters().waits_for_room.load(),
            pool->mover()->counters().blocks_in[size_t(TierKind::kHost)]};
}

TEST(SteadyState, AppendNeverWaits) {
    const Decoded run = decode(70, 50);
    EXPECT_GT(run.left, kSequences * kSteps * kTokens / 64 - kDeviceBlocks);
    EXPECT_EQ(run.waits, 0u);
    EXPECT_LT(run.ninety_nine_percent, kPerSlot) << "longest: " << run.longest.count() << " ms";
}

// The same without background eviction, so that the test above could fail.
TEST(SteadyState, WithoutWatermarksItWaits) {
    const Decoded run = decode(100, 100);
    EXPECT_GT(run.waits, 5u);
    EXPECT_GE(run.longest, kPerSlot);
}

// Notes how often blocks that leave are chosen.
class Choices final : public AttentionSource {
  public:
    explicit Choices(Pool& pool) : pool_(pool) { pool_.sequences().add_source(this); }
    ~Choices() override { pool_.sequences().remove_source(this); }
    void take_in(bool) override { ++n; }
    int n = 0;

  private:
    Pool& pool_;
};

// A step does not look at all blocks again and again where none may leave; it does when one may.
TEST(SteadyState, StepsDoNotLookInVainForWhatMayLeave) {
    Context::Options context_options;
    context_options.threads = 1;
    Result<std::shared_ptr<Context>> context = Context::create(std::move(context_options));
    Result<Geometry> g = Geometry::make({.layers = 1, .kv_heads = 1, .head_dim = 64, .bits = 4});
    ta_numerics settings{};
    settings.sink_blocks = 1;
    Result<Numerics> n = resolve_numerics(&settings, g.value().shapes);
    TierSettings tiers;
    tiers.host_budget = uint64_t{16} << 20;
    tiers.high_percent = 5;
    tiers.low_percent = 1;
    const uint64_t budget = 10 * g.value().token_slot_bytes;
    Result<std::shared_ptr<Pool>> made = Pool::create(context.take(), g.take(), n.take(), budget, 100, tiers);
    const std::shared_ptr<Pool> pool = made.take();
    const ta_seq seq = pool->sequences().create().value();
    Plan plan(pool);
    const auto step = [&](int32_t tokens) {
        std::vector<float> x(size_t(tokens) * 64, 1.0f);
        ta_tensor t{};
        t.struct_size = sizeof t;
        t.dtype = TA_DTYPE_F32;
        t.data = x.data();
        t.tokens = tokens;
        t.heads = 1;
        t.head_dim = 64;
        ASSERT_TRUE(plan.begin({&seq, 1}, &tokens, nullptr).ok());
        if (tokens > 0) {
            Result<TensorView> view = view_tensor(t, "x");
            ASSERT_TRUE(plan.append(0, view.value(), view.value()).ok());
        }
        ASSERT_TRUE(plan.end().ok());
    };
    Choices choices(*pool);
    const auto start = std::chrono::steady_clock::now();
    step(70);  // a sink and an open block
    for (int i = 0; i < 100; ++i) step(0);
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start).count();
    EXPECT_GE(choices.n, 1);
    EXPECT_LE(choices.n, 1 + seconds);
    step(64);
    for (int i = 0; i < 10000 && pool->mover()->busy(); ++i) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ(pool->mover()->counters().blocks_in[size_t(TierKind::kHost)], 1u) << "the second block is full";
}

// Room that other steps stage in is waited for where no blocks may leave, as long as the pool says.
TEST(SteadyState, BeginWaitsForScratch) {
    for (const milliseconds patience : {milliseconds(60000), milliseconds(0)}) {
        Context::Options context_options;
        context_options.threads = 1;
        Result<std::shared_ptr<Context>> context = Context::create(std::move(context_options));
        Result<Geometry> g = Geometry::make({.layers = 1, .kv_heads = 1, .head_dim = 64, .bits = 4});
        ta_numerics settings{};
        Result<Numerics> n = resolve_numerics(&settings, g.value().shapes);
        TierSettings tiers;
        tiers.host_budget = uint64_t{16} << 20;
        tiers.patience.plans = patience;
        const uint64_t budget = 20 * g.value().channel_slot_bytes;
        Result<std::shared_ptr<Pool>> made = Pool::create(context.take(), g.take(), n.take(), budget, 100, tiers);
        const std::shared_ptr<Pool> pool = made.take();
        const ta_seq seq = pool->sequences().create().value();
        std::vector<BlockStore::Scratch> scratch = pool->blocks().acquire_scratch(PageKind::kChannel, 20);
        ASSERT_EQ(scratch.size(), 20u);
        const auto release = [&] {
            for (const BlockStore::Scratch& slot : scratch) pool->blocks().release_scratch(PageKind::kChannel, slot, 0);
        };
        std::thread other;
        if (patience.count() > 0) {
            other = std::thread([&] {
                std::this_thread::sleep_for(milliseconds(50));
                release();
            });
        }
        Plan plan(pool);
        const int32_t one = 1;
        const auto start = std::chrono::steady_clock::now();
        const Status begun = plan.begin({&seq, 1}, &one, nullptr);
        const auto waited = std::chrono::steady_clock::now() - start;
        if (other.joinable()) {
            other.join();
        } else {
            release();
        }
        EXPECT_EQ(begun.code(), patience.count() > 0 ? TA_OK : TA_E_TIER_FULL);
        EXPECT_LT(waited, milliseconds(30000));
        EXPECT_EQ(pool->residency().counters().waits_for_room.load(), 1u);
    }
}

}  // namespace
}  // namespace ta
