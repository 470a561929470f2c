// A group in which one rank does one thing wrong, at each of its actions in turn: every ticket ends in time with a documented
// status, no wrong byte arrives or is published, nothing leaks, and a sequence that moves is never at no rank.
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>
#include <thread>

#include "support/endings.h"
#include "support/groups.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 1, kHeads = 1, kDim = 64;
constexpr int64_t kRow = kHeads * kDim;
constexpr int32_t kTokens = 3 * 64 + 10;
constexpr uint64_t kActions = 16;  // of a rank in one transfer, and some beyond

struct Case {
    uint32_t rank;
    ta_x_fault kind;
    uint64_t action, detail;
    ta_send_mode mode;
    // Nothing is lost.
    bool is_harmless() const { return kind == TA_X_FAULT_DELAY || kind == TA_X_FAULT_DUPLICATE || kind == TA_X_FAULT_REORDER; }
    std::string name() const {
        return "rank " + std::to_string(rank) + " fault " + std::to_string(kind) + " action " + std::to_string(action) +
               " detail " + std::to_string(detail) + (mode == TA_SEND_MOVE ? " move" : " copy");
    }
};

void fill(const Rank& rank, ta_seq seq) {
    Random random(3);
    begin(rank.plan, {seq}, {kTokens});
    Tensor k(random.normals(kTokens * kRow), kTokens, kHeads, kDim), v(random.normals(kTokens * kRow), kTokens, kHeads, kDim);
    append(rank.plan, 0, k, v);
    end(rank.plan);
}

bool has(const Rank& rank, ta_seq seq, const Stored& expected) {
    int64_t n = 0;
    if (seq == 0 || ta_seq_length(rank.pool.get(), seq, &n, nullptr) != TA_OK) return false;
    EXPECT_EQ(n, kTokens);
    verify(rank.pool, seq);
    EXPECT_TRUE(dequantize(rank.pool, seq, 0, 0, n, kRow) == expected) << "wrong bytes";
    return true;
}

const std::set<ta_status> kDocumented = {TA_OK, TA_E_PEER_LOST, TA_E_TIMEOUT, TA_E_CORRUPT, TA_E_STATE};

// Two, one of which has the fault.
std::vector<Rank> make_ranks(const Case& c) {
    auto shape = pool_options(kLayers, kHeads, kDim);
    shape.budget_bytes = 1 << 20;
    auto fault = sized<ta_x_group_fault>();
    fault.kind = c.kind;
    fault.action = c.action;
    fault.detail = c.detail;
    return testing::make_ranks(2, shape, [&](ta_group_options& o) {
        o.staging_bytes = 1;  // a window for each block
        o.connect_ms = o.silence_ms = c.is_harmless() ? 60000 : 1000;
        o.operation_ms = 4 * o.silence_ms;
        if (o.rank == c.rank) o.fault = &fault;
    });
}

// How the two tickets ended.
Ending run(const Case& c) {
    SCOPED_TRACE(c.name());
    const std::vector<Rank> ranks = make_ranks(c);
    const ta_seq source = make_sequence(ranks[0].pool);
    fill(ranks[0], source);
    const Stored expected = dequantize(ranks[0].pool, source, 0, 0, kTokens, kRow);

    const auto started = std::chrono::steady_clock::now();
    ta_ticket sent = 0, got = 0;
    ta_error err;
    auto here = sized<ta_transfer_info>(), there = here;
    ta_status s = ta_seq_send(ranks[0].group.get(), ranks[0].pool.get(), source, 1, 5, c.mode, &sent, &err);
    if (s != TA_OK) here.status = s;
    s = ta_seq_receive(ranks[1].group.get(), ranks[1].pool.get(), 0, 5, &got, &err);
    if (s != TA_OK) there.status = s;
    if (got) there = wait(ranks[1], got, int64_t{60} * 1000000000);
    if (sent) here = wait(ranks[0], sent, int64_t{60} * 1000000000);
    const auto took = std::chrono::steady_clock::now() - started;
    EXPECT_LT(took, std::chrono::seconds(30)) << "no end in time";
    EXPECT_TRUE(!sent || here.state >= TA_MOVE_DONE);
    EXPECT_TRUE(!got || there.state >= TA_MOVE_DONE);

    EXPECT_TRUE(kDocumented.contains(here.status)) << ta_status_name(here.status) << here.reason;
    EXPECT_TRUE(kDocumented.contains(there.status)) << ta_status_name(there.status) << there.reason;
    if (c.is_harmless()) {
        EXPECT_EQ(here.status, TA_OK) << here.reason;
        EXPECT_EQ(there.status, TA_OK) << there.reason;
    }
    const bool at_source = has(ranks[0], source, expected), at_other = has(ranks[1], there.seq, expected);
    EXPECT_EQ(at_other, there.status == TA_OK && got != 0);
    EXPECT_TRUE(at_source || at_other) << "the sequence is lost";
    if (c.mode == TA_SEND_COPY) {
        EXPECT_TRUE(at_source);
    } else if (here.status == TA_OK) {
        EXPECT_FALSE(at_source);
    }
    if (at_source) {
        EXPECT_EQ(ta_seq_release(ranks[0].pool.get(), source, &err), TA_OK) << err.message;
    }
    if (at_other) {
        EXPECT_EQ(ta_seq_release(ranks[1].pool.get(), there.seq, &err), TA_OK) << err.message;
    }
    for (const Rank& r : ranks) EXPECT_EQ(stats(r.pool).bytes_used, 0u) << "blocks leaked";
    return {here.status, there.status};
}

// Rank 0 publishes three blocks, rank 1 fetches them. How the source's group is, and how the ticket ended.
Ending run_fetch(const Case& c) {
    SCOPED_TRACE(c.name());
    constexpr int64_t kSecond = 1000000000;
    constexpr size_t kBlocks = 3;
    std::vector<Rank> ranks = make_ranks(c);
    const auto started = std::chrono::steady_clock::now();
    ta_namespace spaces[2];
    ta_error err;
    ta_status status = TA_OK;
    const auto keys = make_keys(1, kBlocks);
    Stored expected;
    for (uint32_t r = 0; r < 2; ++r) {
        spaces[r] = make_space(ranks[r].pool, 1);
        const ta_status joined = ta_namespace_join(ranks[r].group.get(), ranks[r].pool.get(), spaces[r], &err);
        EXPECT_TRUE(kDocumented.contains(joined)) << ta_status_name(joined) << err.message;
        if (joined != TA_OK) status = joined;
        if (r > 0) continue;
        const ta_seq source = make_sequence(ranks[0].pool);
        fill(ranks[0], source);
        expected = dequantize(ranks[0].pool, source, 0, 0, 64 * kBlocks, kRow);
        publish(ranks[0], source, spaces[0], keys);
        EXPECT_EQ(ta_seq_release(ranks[0].pool.get(), source, nullptr), TA_OK);
    }
    // A hint comes, or the group ends. Each look may be an action.
    for (ta_prefix_place place{}; status == TA_OK && place.answer != TA_PREFIX_YES;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        status =
            ta_namespace_lookup(ranks[1].group.get(), ranks[1].pool.get(), spaces[1], keys.data(), 1, kSecond, &place, &err);
        if (std::chrono::steady_clock::now() - started > std::chrono::seconds(20)) {
            ADD_FAILURE() << "no hint, and the group goes on";
            break;
        }
    }
    ta_ticket ticket = 0;
    if (status == TA_OK)
        status = ta_namespace_fetch(ranks[1].group.get(), ranks[1].pool.get(), spaces[1], keys.data(), kBlocks, &ticket, &err);
    auto got = sized<ta_transfer_info>();
    got.status = status;
    if (ticket) got = wait(ranks[1], ticket, 60 * kSecond);
    EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(30)) << "no end in time";
    EXPECT_TRUE(!ticket || got.state >= TA_MOVE_DONE);
    EXPECT_TRUE(kDocumented.contains(got.status)) << ta_status_name(got.status) << got.reason;
    if (c.is_harmless()) {
        EXPECT_EQ(got.status, TA_OK) << got.reason;
        EXPECT_EQ(got.length, int64_t(64 * kBlocks));
    }
    const ta_status source = ta_group_health(ranks[0].group.get(), nullptr);
    for (const Rank& r : ranks) {
        const ta_namespace space = spaces[&r - ranks.data()];
        ta_seq seq = 0;
        int64_t n = 0;
        require(ta_seq_match_prefix(r.pool.get(), space, keys.data(), kBlocks, &seq, &n, &err), err);
        EXPECT_EQ(n, &r == ranks.data() ? int64_t(64 * kBlocks) : got.length);
        EXPECT_TRUE(n == 0 || n == int64_t(64 * kBlocks));
        verify(r.pool, seq);
        if (n > 0) {
            EXPECT_TRUE(dequantize(r.pool, seq, 0, 0, n, kRow) == expected) << "wrong bytes";
        }
        EXPECT_EQ(ta_seq_release(r.pool.get(), seq, nullptr), TA_OK);
        EXPECT_EQ(ta_namespace_destroy(r.pool.get(), space, nullptr), TA_OK);
    }
    for (Rank& r : ranks) r.group.reset();  // what it serves holds blocks until its own deadline
    for (const Rank& r : ranks) EXPECT_EQ(stats(r.pool).bytes_used, 0u) << "blocks leaked";
    return {source, got.status};
}

Endings run_all(const std::vector<Case>& cases, Ending (*run)(const Case&) = ta::testing::run) {
    return testing::run_all(cases, run, "source", "destination");
}

std::vector<Case> all_of(ta_x_fault kind, std::initializer_list<uint64_t> details) {
    std::vector<Case> cases;
    for (const uint32_t rank : {0u, 1u}) {
        for (uint64_t action = 1; action <= kActions; ++action) {
            for (const uint64_t detail : details)
                cases.push_back({rank, kind, action, detail, action % 2 ? TA_SEND_MOVE : TA_SEND_COPY});
        }
    }
    return cases;
}

TEST(GroupFaults, Dropped) {
    const Endings endings = run_all(all_of(TA_X_FAULT_DROP, {0}));
    EXPECT_GT(endings.lost(), 5);              // messages
    EXPECT_GT(endings.with(TA_E_CORRUPT), 2);  // blocks that were not written
}
TEST(GroupFaults, Delayed) {
    run_all(all_of(TA_X_FAULT_DELAY, {30}));
}
TEST(GroupFaults, Duplicated) {
    run_all(all_of(TA_X_FAULT_DUPLICATE, {0}));
}
TEST(GroupFaults, Reordered) {
    run_all(all_of(TA_X_FAULT_REORDER, {0}));
}
// A bit of each field of a header, of the payload's begin and of its end, and some more of blocks.
TEST(GroupFaults, Corrupted) {
    const Endings endings = run_all(
        all_of(TA_X_FAULT_CORRUPT, {0, 8 * 4, 8 * 6, 8 * 8, 8 * 16, 8 * 20, 8 * 24, 8 * 32, 8 * 40, 8 * 48, 8 * 56, 8005}));
    EXPECT_GT(endings.lost(), 50);
    EXPECT_GT(endings.with(TA_E_CORRUPT), 20);
}
TEST(GroupFaults, Cut) {
    const Endings endings = run_all(all_of(TA_X_FAULT_CUT, {0, 1, 55, 56, 57, 100}));
    EXPECT_GT(endings.lost(), 20);
    EXPECT_GT(endings.with(TA_E_CORRUPT), 5);
}
TEST(GroupFaults, Killed) {
    const Endings endings = run_all(all_of(TA_X_FAULT_KILL, {0}));
    EXPECT_GT(endings.lost(), 15);
}

TEST(FetchFaults, Dropped) {
    // Each action twice: how many messages come before a write is a matter of timing.
    const Endings endings = run_all(all_of(TA_X_FAULT_DROP, {0, 0}), run_fetch);
    EXPECT_GT(endings.lost(), 16);
    EXPECT_GT(endings.with(TA_E_CORRUPT), 2);
}
TEST(FetchFaults, Delayed) {
    run_all(all_of(TA_X_FAULT_DELAY, {30}), run_fetch);
}
TEST(FetchFaults, Duplicated) {
    run_all(all_of(TA_X_FAULT_DUPLICATE, {0}), run_fetch);
}
TEST(FetchFaults, Reordered) {
    run_all(all_of(TA_X_FAULT_REORDER, {0}), run_fetch);
}
TEST(FetchFaults, Corrupted) {
    const Endings endings = run_all(
        all_of(TA_X_FAULT_CORRUPT, {0, 8 * 4, 8 * 6, 8 * 8, 8 * 16, 8 * 20, 8 * 24, 8 * 32, 8 * 40, 8 * 48, 8 * 56, 8005}),
        run_fetch);
    EXPECT_GT(endings.lost(), 80);
    EXPECT_GT(endings.with(TA_E_CORRUPT), 20);
}
TEST(FetchFaults, Cut) {
    const Endings endings = run_all(all_of(TA_X_FAULT_CUT, {0, 1, 55, 56, 57, 100}), run_fetch);
    EXPECT_GT(endings.lost(), 40);
    EXPECT_GT(endings.with(TA_E_CORRUPT), 10);
}
TEST(FetchFaults, Killed) {
    const Endings endings = run_all(all_of(TA_X_FAULT_KILL, {0}), run_fetch);
    EXPECT_GT(endings.lost(), 15);
}

}  // namespace
}  // namespace ta::testing
