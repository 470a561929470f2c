// The table of sequences and what the ABI cannot show: retired ids, fingerprints, corruption of stored pages.
#include "src/kv/pool.h"

#include <gtest/gtest.h>

#include <set>

#include "src/attend/plan.h"

namespace ta {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;

std::shared_ptr<Context> make_context() {
    Context::Options options;
    options.threads = 1;
    Result<std::shared_ptr<Context>> c = Context::create(std::move(options));
    return c.take();
}

std::shared_ptr<Pool> make_pool(const std::shared_ptr<Context>& context, const ta_numerics& numerics = {}, uint32_t bits = 4,
                                uint32_t max_sequences = 65536) {
    Result<Geometry> g = Geometry::make({.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = bits});
    Result<Numerics> n = resolve_numerics(&numerics, g.value().shapes);
    Result<std::shared_ptr<Pool>> p = Pool::create(context, g.take(), n.take(), uint64_t{1} << 30, max_sequences);
    return p.take();
}

ta_seq make_sequence(Pool& pool) {
    Result<ta_seq> s = pool.sequences().create();
    EXPECT_TRUE(s.ok());
    return s.ok() ? s.value() : 0;
}

void append(const std::shared_ptr<Pool>& pool, ta_seq seq, int32_t n) {
    Plan plan(pool);
    const ta_seq seqs[] = {seq};
    ASSERT_TRUE(plan.begin(seqs, &n, nullptr).ok());
    std::vector<float> x(size_t(n) * kHeads * kDim);
    for (size_t i = 0; i < x.size(); ++i) x[i] = float(i % 37) - 18.0f;
    ta_tensor t{};
    t.struct_size = sizeof t;
    t.dtype = TA_DTYPE_F32;
    t.data = x.data();
    t.tokens = n;
    t.heads = kHeads;
    t.head_dim = kDim;
    Result<TensorView> view = view_tensor(t, "x");
    ASSERT_TRUE(view.ok());
    for (uint32_t layer = 0; layer < kLayers; ++layer) ASSERT_TRUE(plan.append(layer, view.value(), view.value()).ok());
    ASSERT_TRUE(plan.end().ok());
}

TEST(Pool, ManySequencesHaveManyIds) {
    const auto context = make_context();
    const auto pool = make_pool(context);
    std::set<ta_seq> ids;
    for (int i = 0; i < 65536; ++i) ASSERT_TRUE(ids.insert(make_sequence(*pool)).second);
    EXPECT_FALSE(ids.contains(0));
    Result<ta_seq> more = pool->sequences().create();
    ASSERT_FALSE(more.ok());
    EXPECT_EQ(std::move(more).status().code(), TA_E_LIMIT);
    for (ta_seq id : ids) ASSERT_TRUE(pool->sequences().release(id).ok());
    for (int i = 0; i < 1000; ++i) EXPECT_TRUE(ids.insert(make_sequence(*pool)).second) << "an id came back";
    EXPECT_EQ(pool->sequences().stats().sequences, 1000u);
}

TEST(Pool, ASlotWithoutGenerationsLeftIsRetired) {
    const auto context = make_context();
    const auto pool = make_pool(context, {}, 4, 2);
    const ta_seq first = make_sequence(*pool);
    Result<std::vector<Sequence*>> locked = pool->sequences().lock_for_plan(std::span(&first, 1));
    ASSERT_TRUE(locked.ok());
    Sequence* s = locked.value()[0];
    pool->sequences().unlock_for_plan(locked.value());
    s->generation = UINT32_MAX;
    const ta_seq last = uint64_t{UINT32_MAX} << 32 | uint32_t(first);
    EXPECT_EQ(pool->sequences().length(first).ok(), false);
    ASSERT_TRUE(pool->sequences().release(last).ok());
    const ta_seq other = make_sequence(*pool);
    EXPECT_NE(uint32_t(other), uint32_t(first)) << "the slot's next id would be one that was given out before";
    EXPECT_FALSE(pool->sequences().create().ok());
    EXPECT_FALSE(pool->sequences().length(last).ok());
}

TEST(Pool, FingerprintsDifferWhereBytesMeanSomethingElse) {
    const auto context = make_context();
    std::set<uint64_t> prints;
    const auto add = [&](const ta_numerics& n, uint32_t bits = 4) {
        return prints.insert(make_pool(context, n, bits)->fingerprint()).second;
    };
    ta_numerics n{};
    EXPECT_TRUE(add(n));
    EXPECT_FALSE(add(n)) << "equal pools have equal fingerprints";
    EXPECT_TRUE(add(n, 2));
    EXPECT_TRUE(add(n, 8));
    n.hadamard = TA_OFF;
    EXPECT_TRUE(add(n));
    n.hadamard = TA_ON;
    n.hadamard_seed = 12345;
    EXPECT_TRUE(add(n));
    n.k_turning = TA_OFF;
    EXPECT_TRUE(add(n));
    const std::vector<float> offset(kLayers * kHeads * kDim, 1.0f);
    n.k_offset = offset.data();
    EXPECT_TRUE(add(n));
    n.sink_blocks = 3;
    EXPECT_TRUE(add(n));
    n.exp = TA_EXP_SAS;
    EXPECT_FALSE(add(n)) << "how attention computes does not change what pages mean";
}

TEST(Pool, VerifyNamesTheBadPage) {
    const auto context = make_context();
    const auto pool = make_pool(context);
    const ta_seq seq = make_sequence(*pool);
    append(pool, seq, 64 * 3 + 10);
    ASSERT_TRUE(pool->sequences().verify(seq).ok());
    for (size_t block : {0u, 1u, 2u}) {
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const auto flip = [&] {
                ASSERT_TRUE(pool->sequences()
                                .inspect(seq,
                                         [&](const Sequence& s) {
                                             Block& b = *s.blocks[block];
                                             b.slot()[pool->geometry().page_offset(b.kind(), layer) + 777] ^= 4;
                                             return Status();
                                         })
                                .ok());
            };
            flip();
            const Status status = pool->sequences().verify(seq);
            EXPECT_EQ(status.code(), TA_E_CORRUPT);
            EXPECT_EQ(status.detail()->block, int64_t(block));
            EXPECT_EQ(status.detail()->layer, int32_t(layer));
            flip();
        }
    }
    EXPECT_TRUE(pool->sequences().verify(seq).ok());
}

TEST(Pool, AForkSharesTheDamage) {
    const auto context = make_context();
    const auto pool = make_pool(context);
    const ta_seq seq = make_sequence(*pool);
    append(pool, seq, 130);
    Result<ta_seq> forked = pool->sequences().fork(seq);
    ASSERT_TRUE(forked.ok());
    ASSERT_TRUE(pool->sequences()
                    .inspect(seq,
                             [&](const Sequence& s) {
                                 s.blocks[1]->slot()[5] ^= 1;
                                 return Status();
                             })
                    .ok());
    EXPECT_EQ(pool->sequences().verify(forked.value()).code(), TA_E_CORRUPT);
    EXPECT_EQ(pool->sequences().stats().shared_blocks, 3u);
    ASSERT_TRUE(pool->sequences().release(seq).ok());
    EXPECT_EQ(pool->sequences().stats().shared_blocks, 0u);
    EXPECT_EQ(pool->sequences().verify(forked.value()).code(), TA_E_CORRUPT);
}

TEST(Pool, AnIdOfOnePoolIsNoneOfAnother) {
    const auto context = make_context();
    std::set<ta_seq> ids;
    for (int i = 0; i < 50; ++i) EXPECT_TRUE(ids.insert(make_sequence(*make_pool(context))).second);
}

}  // namespace
}  // namespace ta
