// A partitioned sequence in a group of which one rank does one thing wrong, at each of its actions in turn: steps end in time with a
// documented status, and results that a rank has are right.
#include <gtest/gtest.h>

#include <initializer_list>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "abi/spread_layers.h"
#include "support/endings.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using namespace spread;

// One of some ranks does one thing wrong, at one of its actions behind the joining of the group.
struct Case {
    uint32_t ranks, rank;
    ta_x_fault kind;
    uint64_t action, detail;
    // Nothing is lost.
    bool is_harmless() const { return kind == TA_X_FAULT_DELAY || kind == TA_X_FAULT_DUPLICATE || kind == TA_X_FAULT_REORDER; }
    std::string name() const {
        return "rank " + std::to_string(rank) + " of " + std::to_string(ranks) + " fault " + std::to_string(kind) + " action " +
               std::to_string(action) + " detail " + std::to_string(detail);
    }
};

// How two steps ended, for that rank and for the others: the first status that is not TA_OK. Results that a rank has are right.
Ending run(const Case& c) {
    SCOPED_TRACE(c.name());
    static const std::set<ta_status> kDocumented = {TA_E_PEER_LOST, TA_E_TIMEOUT, TA_E_CANCELLED, TA_E_MISMATCH};
    auto fault = sized<ta_x_group_fault>();
    fault.kind = c.kind;
    fault.action = c.action;
    fault.detail = c.detail;
    Spread s(c.ranks, 4, [&](ta_group_options& o) {
        o.silence_ms = c.is_harmless() ? 60000 : 500;
        o.operation_ms = 4 * o.silence_ms;
        if (o.rank == c.rank) o.fault = &fault;
    });
    const auto options = partition_options(1);
    Ending ending{TA_OK, TA_OK};
    std::vector<ta_seq> at;
    for (const Rank& r : s.ranks) {
        at.push_back(make_sequence(r.pool));
        const ta_status status = ta_seq_partition(r.group.get(), r.pool.get(), at.back(), &options, nullptr);
        if (status != TA_OK) return {status, status};  // the group has ended
    }
    s.seqs.push_back(at);
    s.whole_seqs.push_back(make_sequence(s.whole));
    for (const int32_t tokens : {70, 1}) {
        const Given expected = s.whole_step({0}, {tokens, 1});
        const std::vector<Given> given = s.steps({0}, {tokens, 1});
        for (uint32_t r = 0; r < c.ranks; ++r) {
            const Given& g = given[r];
            if (g.status == TA_OK) {
                EXPECT_LT(largest_difference(g.out, expected.out), 1e-4) << "rank " << r;
                continue;
            }
            EXPECT_FALSE(c.is_harmless()) << g.text;
            EXPECT_TRUE(kDocumented.contains(g.status)) << ta_status_name(g.status) << g.text;
            ta_status& end = r == c.rank ? ending.first : ending.second;
            if (end == TA_OK) end = g.status;
        }
        if (ending.first != TA_OK || ending.second != TA_OK) break;
    }
    return ending;
}

Endings run_all(ta_x_fault kind, std::initializer_list<uint64_t> details) {
    std::vector<Case> cases;
    for (const auto& [ranks, rank] : std::initializer_list<std::pair<uint32_t, uint32_t>>{{2, 0}, {2, 1}, {3, 0}, {3, 2}}) {
        const uint64_t joined = 2 * (ranks - 1);  // hellos and welcomes
        for (uint64_t action = joined + 1; action <= joined + 10; ++action) {
            for (const uint64_t detail : details) cases.push_back({ranks, rank, kind, action, detail});
        }
    }
    return testing::run_all(cases, run, "that rank", "others");
}

TEST(PartitionFaults, Dropped) {
    EXPECT_GT(run_all(TA_X_FAULT_DROP, {0}).lost(), 15);
}
TEST(PartitionFaults, Delayed) {
    run_all(TA_X_FAULT_DELAY, {20});
}
TEST(PartitionFaults, Duplicated) {
    run_all(TA_X_FAULT_DUPLICATE, {0});
}
TEST(PartitionFaults, Reordered) {
    run_all(TA_X_FAULT_REORDER, {0});
}
// A bit of each field of a header, of the payload's begin and of what is behind it.
TEST(PartitionFaults, Corrupted) {
    const Endings endings = run_all(
        TA_X_FAULT_CORRUPT, {0, 8 * 4, 8 * 6, 8 * 8, 8 * 16, 8 * 20, 8 * 24, 8 * 32, 8 * 40, 8 * 48, 8 * 56, 8 * 100 + 3});
    EXPECT_GT(endings.lost(), 150);
}
TEST(PartitionFaults, Cut) {
    EXPECT_GT(run_all(TA_X_FAULT_CUT, {0, 1, 55, 56, 57, 100}).lost(), 80);
}
TEST(PartitionFaults, Killed) {
    EXPECT_GT(run_all(TA_X_FAULT_KILL, {0}).lost(), 15);
}

}  // namespace
}  // namespace ta::testing
