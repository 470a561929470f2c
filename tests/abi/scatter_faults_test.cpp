// Heads scattered in a group in which one rank does one thing wrong, at each of its actions in turn: every call ends in time with a
// documented status at every rank, and where the root's succeeds its results are right.
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>

#include "support/endings.h"
#include "support/scattered.h"

namespace ta::testing {
namespace {

using namespace scattered;

constexpr uint32_t kRanks = 3;

struct Case {
    uint32_t rank;
    ta_x_fault kind;
    uint64_t action, detail;
    bool is_harmless() const { return kind == TA_X_FAULT_DELAY || kind == TA_X_FAULT_DUPLICATE || kind == TA_X_FAULT_REORDER; }
    std::string name() const {
        return "rank " + std::to_string(rank) + " fault " + std::to_string(kind) + " action " + std::to_string(action) +
               " detail " + std::to_string(detail);
    }
};

const std::set<ta_status> kDocumented = {TA_OK, TA_E_PEER_LOST, TA_E_TIMEOUT, TA_E_CORRUPT, TA_E_STATE};

// Three rounds for each rank.
Problem make_problem() {
    Problem p;
    p.kv_heads = 9;
    p.q_tokens = p.k_tokens = 20;
    p.d = 32;
    return p;
}

// How the root's call ended, and how the last of the others that failed did.
Ending run(const Case& c) {
    SCOPED_TRACE(c.name());
    const Problem p = make_problem();
    auto fault = sized<ta_x_group_fault>();
    fault.kind = c.kind;
    fault.action = c.action;
    fault.detail = c.detail;
    const std::vector<Member> members = make_members(kRanks, [&](ta_group_options& o) {
        o.connect_ms = o.silence_ms = c.is_harmless() ? 60000 : 1000;
        o.operation_ms = 4 * o.silence_ms;
        if (o.rank == c.rank) o.fault = &fault;
    });
    const std::vector<float> expected = whole(members[0].context, p);
    Asked asked;
    asked.scatter.heads_per_round = 1;
    Ending ending{TA_OK, TA_OK};
    for (int i = 0; i < 3; ++i) {  // the fault is over in the third one
        const Inputs<> inputs(p);
        const auto started = std::chrono::steady_clock::now();
        const std::vector<Given> given = call_all(members, inputs, asked);
        EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(30)) << "no end in time";
        for (uint32_t r = 0; r < kRanks; ++r) {
            EXPECT_TRUE(kDocumented.contains(given[r].status))
                << "rank " << r << ": " << ta_status_name(given[r].status) << given[r].text;
            if (c.is_harmless()) {
                EXPECT_EQ(given[r].status, TA_OK) << "rank " << r << ": " << given[r].text;
            }
            if (given[r].status == TA_OK) continue;
            (r == 0 ? ending.first : ending.second) = given[r].status;
        }
        if (given[0].status == TA_OK) {
            EXPECT_TRUE(same_bits(inputs.results(), expected)) << "wrong results";
        }
        bool all_ready = true;
        for (const Member& m : members) all_ready = all_ready && ta_group_health(m.group.get(), nullptr) == TA_OK;
        if (i == 2 && all_ready) {
            for (const Given& g : given) EXPECT_EQ(g.status, TA_OK) << "the group goes on, but not its calls: " << g.text;
        }
    }
    return ending;
}

Endings run_all(const std::vector<Case>& cases) {
    return testing::run_all(cases, run, "root", "others");
}

// Of the root in the first call: 4 messages of the group, 2 that it begins, 2 of what the call is, 6 writes, 6 that it says so, 12 of
// results and 2 at the end; the others have fewer.
std::vector<Case> all_of(ta_x_fault kind, std::initializer_list<uint64_t> details) {
    std::vector<Case> cases;
    for (uint32_t rank = 0; rank < 2; ++rank) {
        for (uint64_t action = 1; action <= (rank == 0 ? 40 : 24); ++action) {
            for (const uint64_t detail : details) cases.push_back({rank, kind, action, detail});
        }
    }
    return cases;
}

TEST(ScatterFaults, Dropped) {
    const Endings endings = run_all(all_of(TA_X_FAULT_DROP, {0}));
    EXPECT_GT(endings.lost(), 10);             // messages
    EXPECT_GT(endings.with(TA_E_CORRUPT), 5);  // heads and results that were not written
}
TEST(ScatterFaults, Delayed) {
    run_all(all_of(TA_X_FAULT_DELAY, {30}));
}
TEST(ScatterFaults, Duplicated) {
    run_all(all_of(TA_X_FAULT_DUPLICATE, {0}));
}
TEST(ScatterFaults, Reordered) {
    run_all(all_of(TA_X_FAULT_REORDER, {0}));
}
TEST(ScatterFaults, Corrupted) {
    const Endings endings = run_all(all_of(TA_X_FAULT_CORRUPT, {8 * 6, 8 * 32, 8 * 56, 8 * 1000 + 5}));
    EXPECT_GT(endings.lost(), 40);
    EXPECT_GT(endings.with(TA_E_CORRUPT), 20);
}
TEST(ScatterFaults, Cut) {
    const Endings endings = run_all(all_of(TA_X_FAULT_CUT, {0, 57, 1000}));
    EXPECT_GT(endings.lost(), 30);
    EXPECT_GT(endings.with(TA_E_CORRUPT), 10);
}
TEST(ScatterFaults, Killed) {
    const Endings endings = run_all(all_of(TA_X_FAULT_KILL, {0}));
    EXPECT_GT(endings.lost(), 30);
}

// A rank hears late that another began a call, and knows from a third that this call failed: it begins nothing there.
TEST(ScatterFaults, WhatADeadCallBeganIsNotTheNextOne) {
    const Problem p;
    const Inputs<> inputs(p);
    auto fault = sized<ta_x_group_fault>();
    fault.kind = TA_X_FAULT_REORDER;
    int mismatches = 0;
    for (fault.action = 1; fault.action <= 8; ++fault.action) {
        const std::vector<Member> members = make_members(3, [&](ta_group_options& o) {
            o.operation_ms = 3000;
            if (o.rank == 2) o.fault = &fault;
        });
        const std::vector<Given> given = call_all(members, inputs, {}, [](uint32_t r, Asked& asked) {
            if (r == 2) asked.root = 1, asked.later = std::chrono::milliseconds(30);
        });
        mismatches += given[0].status == TA_E_MISMATCH;
        expect_bits(members, p);
    }
    EXPECT_EQ(mismatches, 8);
}

}  // namespace
}  // namespace ta::testing
