// Which blocks leave first: what the policies promise through the ABI. Outputs are the same to the bit under all of them.
#include <algorithm>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

constexpr ta_eviction kPolicies[] = {TA_EVICT_LRU, TA_EVICT_PRIORITY};

void set_priority(const KvPool& pool, ta_seq seq, int32_t priority) {
    ta_error err;
    require(ta_seq_set_priority(pool.get(), seq, priority, &err), err);
}

TEST(Eviction, OutputsAreThoseOfAPoolThatHasAllBlocksInOnePlace) {
    for (const ta_eviction eviction : kPolicies) {
        SCOPED_TRACE("policy " + std::to_string(eviction));
        Twins twins({.device_blocks = 24,
                     .host_bytes = uint64_t{1} << 20,
                     .disk_bytes = kPlenty,
                     .high = 90,
                     .low = 70,
                     .eviction = eviction},
                    7);
        Random random(uint64_t(eviction) + 1);
        for (int i = 0; i < 4; ++i) set_priority(twins.pool, twins.seqs[twins.add()], int32_t(random.between(-2, 2)));
        for (int i = 0; i < 60; ++i) {
            const size_t a = size_t(random.below(4)), b = (a + 1 + size_t(random.below(3))) % 4;
            if (length(twins.pool, twins.seqs[a]) > 900) twins.truncate(a, random.below(500));
            twins.step({a, b}, {int32_t(random.between(1, 120)), 1});
            if (::testing::Test::HasFatalFailure()) return;
        }
        EXPECT_GT(tier_stats(twins.pool, TA_TIER_HOST).bytes_evicted, 0u);
        twins.verify();
    }
}

TEST(Eviction, SequencesOfLowPriorityLeaveFirst) {
    Twins twins({.device_blocks = 40, .host_bytes = kPlenty, .eviction = TA_EVICT_PRIORITY});
    const size_t high = twins.add(), low = twins.add(), middle = twins.add();
    set_priority(twins.pool, twins.seqs[high], 5);
    set_priority(twins.pool, twins.seqs[low], -5);
    twins.step({high}, {640});  // the one that was not used for longest
    twins.step({middle}, {640});
    twins.step({low}, {640});
    const auto on_host = [&](size_t s) { return residency(twins.pool, twins.seqs[s]).host_blocks; };
    EXPECT_EQ(on_host(high) + on_host(middle) + on_host(low), 0u);
    const size_t other = twins.add();
    set_priority(twins.pool, twins.seqs[other], 9);
    for (int i = 0; i < 32; ++i) {
        twins.step({other}, {64});
        EXPECT_TRUE(on_host(middle) == 0 || on_host(low) == 9) << "a block of higher priority left before";
        EXPECT_TRUE(on_host(high) == 0 || on_host(middle) == 9) << "a block of higher priority left before";
    }
    EXPECT_EQ(on_host(low), 9u);  // all but the sink
    EXPECT_GT(on_host(low) + on_host(middle), 9u);
    EXPECT_EQ(on_host(other), 0u);

    // A fork has its source's priority, and a change counts at once.
    const size_t fork = twins.fork(high);
    twins.truncate(high, 64);
    set_priority(twins.pool, twins.seqs[fork], -9);
    const uint64_t before = on_host(middle);
    twins.step({other}, {256});
    EXPECT_GT(on_host(fork), 0u);
    EXPECT_EQ(on_host(middle), before);
    twins.verify();
}

TEST(Eviction, WrongValuesAreRefused) {
    const Context context = make_context();
    ta_error err;
    for (const ta_eviction wrong : {-1, 99}) {
        ta_tier_options tiers;
        const auto options = options_of({.host_bytes = kPlenty, .eviction = wrong}, tiers);
        ta_kv_pool* none = nullptr;
        EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID);
        EXPECT_NE(std::string(err.message).find("eviction"), std::string::npos) << err.message;
        EXPECT_EQ(err.argument, 1);
    }
    ta_tier_options tiers;
    auto options = options_of({.host_bytes = kPlenty}, tiers);
    tiers.route = 3;
    ta_kv_pool* none = nullptr;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &none, &err), TA_E_INVALID) << err.message;
    const KvPool pool = make_pool(context, pool_options(kLayers, kHeads, kDim));
    const ta_seq seq = make_sequence(pool);
    EXPECT_EQ(ta_seq_set_priority(pool.get(), seq, INT32_MIN, &err), TA_OK);  // without tiers it has nothing to do
    EXPECT_EQ(ta_seq_set_priority(pool.get(), seq + 1, 1, &err), TA_E_STALE);
    EXPECT_EQ(ta_seq_set_priority(nullptr, seq, 1, &err), TA_E_INVALID);
    require(ta_kv_pool_close(pool.get(), &err), err);
    EXPECT_EQ(ta_seq_set_priority(pool.get(), seq, 1, &err), TA_E_CLOSED);
}

}  // namespace
}  // namespace ta::testing
