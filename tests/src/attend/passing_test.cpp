// Blocks that windows pass, where an end cannot take some of them, or has no memory.
#include "src/attend/passing.h"

#include <gtest/gtest.h>

#include <vector>

#include "src/attend/plan.h"
#include "support/failing_memory.h"
#include "support/tensor.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 1, kDim = 64;

std::shared_ptr<Pool> make_pool() {
    Context::Options options;
    options.threads = 1;
    Result<std::shared_ptr<Context>> context = Context::create(std::move(options));
    ta_layer_group group{};
    group.struct_size = sizeof group;
    group.layers = 1;
    group.window = 256;
    Result<Geometry> g =
        Geometry::make({.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = 4, .groups = {&group, 1}});
    const ta_numerics plain{};
    Result<Numerics> n = resolve_numerics(&plain, g.value().shapes);
    return Pool::create(context.take(), g.take(), n.take(), uint64_t{1} << 22, 4).take();
}

void append(Plan& plan, int64_t tokens) {
    Tensor x(std::vector<float>(size_t(tokens) * kHeads * kDim, 1.0f), tokens, kHeads, kDim);
    Result<TensorView> view = view_tensor(*x.view(), "x");
    for (uint32_t layer = 0; layer < kLayers; ++layer) ASSERT_TRUE(plan.append(layer, view.value(), view.value()).ok());
}

// Blocks 3 to 10 are to pass with the step. Something moves blocks 3 and 4 when the end comes, so they stay. The end fails behind
// that for lack of memory, and is called again when nothing moves them any more.
TEST(Passing, AnEndThatFailedBehindBlocksThatStayIsCalledAgain) {
    constexpr int32_t kTokens = 64 * 8, kNoQueries = 0;
    bool failed = true;
    int64_t n = 0;
    for (; failed && !::testing::Test::HasFailure(); ++n) {
        SCOPED_TRACE("allocation " + std::to_string(n));
        ASSERT_LT(n, 500);
        const std::shared_ptr<Pool> pool = make_pool();
        Plan plan(pool);
        const ta_seq seq = pool->sequences().create().value();
        ASSERT_TRUE(plan.begin({&seq, 1}, &kTokens, &kNoQueries).ok());
        append(plan, kTokens);
        ASSERT_TRUE(plan.end().ok());
        EXPECT_EQ(pool->blocks().usage().passed_blocks, 3u);
        std::vector<BlockPtr> now = pool->sequences().snapshot(seq).value().blocks;
        Block* const moving[] = {now[3].get(), now[4].get()};
        now = {};
        ASSERT_TRUE(plan.begin({&seq, 1}, &kTokens, &kNoQueries).ok());
        append(plan, kTokens);
        for (Block* block : moving) ASSERT_TRUE(block->start_move());
        break_memory(MemorySource::kNew, false, n);
        Status status;
        try {
            status = plan.end();
        } catch (const std::bad_alloc&) {
            status = fail(TA_E_MEMORY, "the end has no memory");
        }
        heal_memory();
        failed = !status.ok();
        for (Block* block : moving) block->end_move();
        if (failed) {
            EXPECT_EQ(status.code(), TA_E_MEMORY);
            EXPECT_TRUE(plan.end().ok());
        }
        EXPECT_EQ(pool->blocks().usage().passed_blocks, failed ? 11u : 9u);
        EXPECT_TRUE(pool->sequences().verify(seq).ok());
    }
    EXPECT_TRUE(::testing::Test::HasFailure() || n >= 3) << n;
}

}  // namespace
}  // namespace ta::testing
