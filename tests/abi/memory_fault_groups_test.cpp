// Memory that runs out in calls on a group.
#include "abi/memory_faults.h"
#include "support/groups.h"

namespace ta::testing {
namespace {

// By a group of one rank, in rounds of one head.
TEST_P(MemoryFaults, ScatteredHeads) {
    GroupHandle group;
    for_every_fault(
        [&group](Life& r) {
            r.make_context();
            const ta_group_id id = make_group_id();
            group = make_group(r.context, group_options(id, 0, 1));
            ASSERT_EQ(poll(group), TA_GROUP_READY);
        },
        [&group](Life& r) {
            Tensor q(r.random.normals(30 * kQHeads * kDim), 30, kQHeads, kDim), out(30, kQHeads, kDim);
            Tensor k(r.random.normals(30 * kRow), 30, kHeads, kDim), v(r.random.normals(30 * kRow), 30, kHeads, kDim);
            std::vector<float> lse(30 * kQHeads);
            auto scatter = sized<ta_x_scatter_options>();
            scatter.heads_per_round = 1;
            r.call("ta_x_group_attend_dense", [&](ta_error* err) {
                return ta_x_group_attend_dense(group.get(), q.view(), k.view(), v.view(), out.view(), lse.data(), nullptr, 0,
                                               &scatter, nullptr, err);
            });
            r.keep(out.values());
            r.keep(lse);
            group.reset();
        },
        10);
}

// A rank that cannot tell all others that it joins has not joined, and those that were told hear so. Leaving takes no memory. What
// other threads lack ends the group: then the attempt says nothing.
TEST(MemoryFaultsOfGroups, JoinAndLeave) {
    std::vector<Rank> ranks;
    std::vector<ta_namespace> spaces;
    const auto make = [&] {
        ranks = make_ranks(3, pool_options(kLayers, kHeads, kDim, 4));
        spaces.clear();
        for (const Rank& r : ranks) spaces.push_back(make_space(r.pool, 1));
        for (const size_t r : {1, 2}) join(ranks[r], spaces[r]);
    };
    const auto armed = [&](int64_t n, auto call) {
        skip_allocations(n);
        arm_memory(MemorySource::kNew, false);
        const ta_status status = call(ranks[0].group.get(), ranks[0].pool.get(), spaces[0], nullptr);
        heal_memory();
        return status;
    };
    // No rank waits for rank 0 to tell what it has.
    const auto is_known_to_be_away = [&](size_t r) {
        return lookup(ranks[r], spaces[r], make_keys(9, 1), int64_t{20} * 1000000000)[0].answer == TA_PREFIX_NO;
    };
    make();
    int refused = 0, left = 0;
    bool failed = true;
    for (int64_t n = 0; failed && !HasFailure(); ++n) {
        SCOPED_TRACE("allocation " + std::to_string(n));
        ASSERT_LT(n, 2000);
        const ta_status joined = armed(n, ta_namespace_join);
        failed = memory_failed();
        const ta_status away = joined == TA_OK ? armed(n % 4, ta_namespace_leave) : TA_OK;
        skip_allocations(INT64_MAX);
        const ta_status again = ta_namespace_leave(ranks[0].group.get(), ranks[0].pool.get(), spaces[0], nullptr);
        bool known = false;
        try {
            known = is_known_to_be_away(1) && is_known_to_be_away(2);
        } catch (const std::exception&) {
            // The group has ended, or it is not known.
        }
        const auto is_healthy = [](const Rank& r) { return ta_group_health(r.group.get(), nullptr) == TA_OK; };
        if (!std::all_of(ranks.begin(), ranks.end(), is_healthy)) {
            make();
            continue;
        }
        EXPECT_TRUE(joined == TA_OK || joined == TA_E_MEMORY) << ta_status_name(joined);
        EXPECT_EQ(away, TA_OK) << ta_status_name(away);
        EXPECT_EQ(again, TA_E_STATE) << ta_status_name(again);
        (joined == TA_OK ? left : refused) += 1;
        EXPECT_TRUE(known) << "rank 1 or 2 waits for rank 0";
    }
    EXPECT_GT(refused, 3);
    EXPECT_GT(left, 0);
}

}  // namespace
}  // namespace ta::testing
