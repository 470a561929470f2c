// Sequences that go from rank to rank of a local group: what arrives, what stays, how it ends.
#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "support/groups.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64, kQHeads = 4;
constexpr int64_t kRow = kHeads * kDim;
constexpr int64_t kSecond = 1000000000;

ta_kv_pool_options pool_shape(uint32_t bits = 4) {
    auto options = pool_options(kLayers, kHeads, kDim, bits);
    options.budget_bytes = 64 << 20;
    return options;
}

// The results of attention for the last two tokens of a step, or for its only one.
std::vector<float> step(const Rank& rank, ta_seq seq, int32_t n_new, uint64_t seed) {
    Random random(seed);
    const int32_t n_query = std::min(n_new, 2);
    begin(rank.plan, {seq}, {n_new}, {n_query});
    std::vector<float> results;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        Tensor k(random.normals(n_new * kRow), n_new, kHeads, kDim), v(random.normals(n_new * kRow), n_new, kHeads, kDim);
        Tensor q(random.normals(n_query * kQHeads * kDim), n_query, kQHeads, kDim), out(n_query, kQHeads, kDim);
        append(rank.plan, layer, k, v);
        attend(rank.plan, layer, q, out);
        const std::vector<float> x = out.values();
        results.insert(results.end(), x.begin(), x.end());
    }
    end(rank.plan);
    return results;
}

ta_seq grown(const Rank& rank, int32_t tokens, uint64_t seed = 1) {
    const ta_seq seq = make_sequence(rank.pool);
    if (tokens > 0) step(rank, seq, tokens, seed);
    return seq;
}

void expect_equal(const Rank& a, ta_seq x, const Rank& b, ta_seq y) {
    const int64_t n = length(a.pool, x);
    ASSERT_EQ(length(b.pool, y), n);
    verify(b.pool, y);
    for (uint32_t layer = 0; layer < kLayers && n > 0; ++layer)
        EXPECT_TRUE(dequantize(a.pool, x, layer, 0, n, kRow) == dequantize(b.pool, y, layer, 0, n, kRow)) << "layer " << layer;
}

// Steps of both give the same bits.
void expect_same_steps(const Rank& a, ta_seq x, const Rank& b, ta_seq y) {
    for (const int32_t n : {1, 70}) {
        const std::vector<float> here = step(a, x, n, uint64_t(n)), there = step(b, y, n, uint64_t(n));
        EXPECT_EQ(std::memcmp(here.data(), there.data(), here.size() * sizeof(float)), 0) << n << " tokens";
    }
}

// The source sends only pages that the sequence has: pages that windows have passed are at neither rank.
TEST(Group, WhatWindowsHavePassedDoesNotGo) {
    auto windowed = sized<ta_layer_group>();
    windowed.layers = 1;
    windowed.window = 100;
    auto shape = pool_shape();
    shape.layer_groups = &windowed;
    shape.n_layer_groups = 1;
    const std::vector<Rank> ranks = make_ranks(2, shape);
    const ta_seq source = make_sequence(ranks[0].pool);
    for (int i = 0; i < 10; ++i) step(ranks[0], source, 100, uint64_t(i));
    const ta_kv_pool_stats sizes = stats(ranks[0].pool);
    EXPECT_EQ(sizes.passed_blocks, 13u);
    const ta_ticket sent = send(ranks[0], source, 1, 1), got = receive(ranks[1], 0, 1);
    const ta_transfer_info there = wait(ranks[1], got);
    ASSERT_EQ(there.state, TA_MOVE_DONE) << there.reason;
    ASSERT_EQ(wait(ranks[0], sent).state, TA_MOVE_DONE);
    // One layer of two has a window.
    EXPECT_LT(there.bytes_moved, (there.blocks - sizes.passed_blocks / 3) * sizes.channel_block_bytes);
    verify(ranks[1].pool, there.seq);
    expect_same_steps(ranks[0], source, ranks[1], there.seq);
}

TEST(Group, ACopyIsTheSequenceToTheBit) {
    for (const uint32_t bits : {4u, 8u}) {
        const std::vector<Rank> ranks =
            make_ranks(2, pool_shape(bits), [](ta_group_options& o) { o.staging_bytes = 3 * 40000; });
        uint64_t tag = 7;
        for (const int32_t n : {0, 1, 63, 64, 65, 127, 128, 129, 1000}) {
            SCOPED_TRACE(n);
            const ta_seq source = grown(ranks[0], n);
            const ta_ticket sent = send(ranks[0], source, 1, tag), got = receive(ranks[1], 0, tag++);
            const ta_transfer_info there = wait(ranks[1], got), here = wait(ranks[0], sent);
            ASSERT_EQ(there.state, TA_MOVE_DONE) << there.reason;
            ASSERT_EQ(here.state, TA_MOVE_DONE) << here.reason;
            EXPECT_EQ(there.length, n);
            EXPECT_EQ(there.blocks, uint64_t((n + 63) / 64));
            EXPECT_EQ(there.blocks_moved, there.blocks);
            EXPECT_EQ(here.bytes_moved, there.bytes_moved);
            expect_equal(ranks[0], source, ranks[1], there.seq);
            expect_same_steps(ranks[0], source, ranks[1], there.seq);
        }
    }
}

TEST(Group, TheSourceGoesOnWhileACopyLeaves) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape(), [](ta_group_options& o) { o.staging_bytes = 1; });
    const ta_seq source = grown(ranks[0], 700), twin = fork_sequence(ranks[0].pool, source);
    const ta_ticket sent = send(ranks[0], source, 1, 1);
    step(ranks[0], source, 33, 5);
    const ta_ticket got = receive(ranks[1], 0, 1);
    step(ranks[0], source, 64, 6);
    ASSERT_EQ(wait(ranks[0], sent).state, TA_MOVE_DONE);
    expect_equal(ranks[0], twin, ranks[1], wait(ranks[1], got).seq);
}

TEST(Group, AMovedSequenceIsAtOneRank) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape());
    const ta_seq source = grown(ranks[0], 300), twin = grown(ranks[0], 300);
    const ta_ticket sent = send(ranks[0], source, 1, 1, TA_SEND_MOVE);
    int64_t n;
    int32_t n_new = 1;
    EXPECT_EQ(ta_plan_begin(ranks[0].plan.get(), 1, &source, &n_new, nullptr, nullptr, nullptr), TA_E_BUSY);
    const ta_ticket got = receive(ranks[1], 0, 1);
    ASSERT_EQ(wait(ranks[0], sent).state, TA_MOVE_DONE);
    EXPECT_EQ(ta_seq_length(ranks[0].pool.get(), source, &n, nullptr), TA_E_STALE);
    expect_equal(ranks[0], twin, ranks[1], wait(ranks[1], got).seq);
    EXPECT_EQ(stats(ranks[0].pool).sequences, 1u);
}

TEST(Group, AMoveThatFailsLeavesTheSequence) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape());
    const ta_seq source = grown(ranks[0], 300);
    const ta_ticket sent = send(ranks[0], source, 1, 1, TA_SEND_MOVE);
    cancel(ranks[0], sent);
    EXPECT_EQ(wait(ranks[0], sent).state, TA_MOVE_CANCELLED);
    EXPECT_EQ(length(ranks[0].pool, source), 300);
    step(ranks[0], source, 3, 1);
}

TEST(Group, SharedBlocksArriveOnce) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape());
    const ta_seq first = grown(ranks[0], 640), second = fork_sequence(ranks[0].pool, first);
    step(ranks[0], second, 70, 9);
    std::vector<ta_transfer_info> got;
    for (const ta_seq seq : {first, second}) {
        send(ranks[0], seq, 1, 1);
        got.push_back(wait(ranks[1], receive(ranks[1], 0, 1)));
        ASSERT_EQ(got.back().state, TA_MOVE_DONE) << got.back().reason;
    }
    EXPECT_EQ(got[0].blocks_shared, 0u);
    EXPECT_EQ(got[1].blocks_shared, 10u);
    EXPECT_EQ(got[1].blocks_moved, 2u);
    EXPECT_EQ(stats(ranks[1].pool).shared_blocks, 10u);
    expect_equal(ranks[0], second, ranks[1], got[1].seq);
}

ta_namespace make_space(const Rank& rank, uint8_t salt) {
    auto options = sized<ta_namespace_options>();
    options.salt[0] = salt;
    ta_namespace space = 0;
    ta_error err;
    require(ta_namespace_create(rank.pool.get(), &options, &space, &err), err);
    return space;
}

// The recipe of docs/sharing.md for prompts in several steps.
TEST(Group, BlocksLeaveWhileThePromptGrows) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape());
    const ta_seq source = make_sequence(ranks[0].pool), twin = make_sequence(ranks[0].pool);
    constexpr uint64_t kChunks = 6, kBlocksEach = 4;
    ta_seq before = 0;
    for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
        for (const ta_seq seq : {source, twin}) step(ranks[0], seq, 64 * kBlocksEach, chunk);
        const ta_ticket got = receive(ranks[1], 0, 1);
        send(ranks[0], source, 1, 1, chunk + 1 < kChunks ? TA_SEND_COPY : TA_SEND_MOVE);
        const ta_transfer_info there = wait(ranks[1], got);
        ASSERT_EQ(there.state, TA_MOVE_DONE) << there.reason;
        EXPECT_EQ(there.blocks_moved, kBlocksEach);
        if (before != 0) {
            ASSERT_EQ(ta_seq_release(ranks[1].pool.get(), before, nullptr), TA_OK);
        }
        before = there.seq;
    }
    expect_equal(ranks[0], twin, ranks[1], before);
    EXPECT_EQ(stats(ranks[1].pool).sequences, 1u);
}

TEST(Group, ASequenceStaysInItsNamespace) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape());
    const ta_namespace here = make_space(ranks[0], 1), there = make_space(ranks[1], 1), other = make_space(ranks[1], 2);
    const ta_seq source = grown(ranks[0], 200);
    const std::vector<uint8_t> keys(3 * 32, 7);
    const auto copy = [&] {
        send(ranks[0], source, 1, 1);
        return wait(ranks[1], receive(ranks[1], 0, 1));
    };
    ASSERT_EQ(copy().state, TA_MOVE_DONE);  // of nobody
    ASSERT_EQ(ta_seq_publish(ranks[0].pool.get(), source, here, keys.data(), 3, nullptr), TA_OK);
    const ta_transfer_info got = copy();
    ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
    EXPECT_EQ(got.blocks_shared, 0u) << "blocks of nobody became the namespace's";
    EXPECT_EQ(ta_seq_publish(ranks[1].pool.get(), got.seq, other, keys.data(), 3, nullptr), TA_E_INVALID);
    EXPECT_EQ(ta_seq_publish(ranks[1].pool.get(), got.seq, there, keys.data(), 3, nullptr), TA_OK);
    EXPECT_EQ(copy().blocks_shared, 3u);
}

TEST(Group, BlocksComeFromAllTiersIntoAllTiers) {
    auto shape = pool_shape();
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 512 << 10;
    tiers.disk_bytes = 4 << 20;
    shape.tiers = &tiers;
    shape.budget_bytes = 600 << 10;
    const std::vector<Rank> ranks = make_ranks(2, shape, [](ta_group_options& o) { o.staging_bytes = 200000; });
    const ta_seq source = grown(ranks[0], 1900);
    move_now(ranks[0].pool, source, 3, 8, TA_TIER_DISK);
    move_now(ranks[0].pool, source, 12, 6, TA_TIER_HOST);
    for (const uint64_t tag : {1, 2}) {
        send(ranks[0], source, 1, tag);
        // The second does not fit the destination's device and host tiers beside the first.
        const ta_transfer_info got = wait(ranks[1], receive(ranks[1], 0, tag));
        ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
        expect_equal(ranks[0], source, ranks[1], got.seq);
    }
}

// A transfer that does not fit beside those that were admitted before is refused before a block of it moves.
TEST(Group, RoomIsPromisedOnce) {
    auto shape = pool_shape();
    const uint64_t bytes = stats(make_ranks(1, shape)[0].pool).channel_block_bytes * 45;  // of 30 blocks, some of 8 bits
    std::vector<Rank> ranks(2);
    const ta_group_id id = make_group_id();
    for (uint32_t r = 0; r < 2; ++r) {
        if (r == 1) shape.budget_bytes = bytes * 3 / 2;
        ranks[r].context = make_context(1);
        ranks[r].pool = make_pool(ranks[r].context, shape);
        ranks[r].plan = make_plan(ranks[r].pool);
        auto options = group_options(id, r, 2);
        options.staging_bytes = 3 * 40000;
        ranks[r].group = make_group(ranks[r].context, options);
    }
    for (const Rank& r : ranks) ASSERT_EQ(poll(r.group), TA_GROUP_READY);
    std::vector<ta_seq> sources;
    for (uint64_t tag = 0; tag < 5; ++tag) sources.push_back(grown(ranks[0], 64 * 30, tag + 1));
    std::vector<ta_ticket> sent, got;
    for (uint64_t tag = 0; tag < 5; ++tag) sent.push_back(send(ranks[0], sources[tag], 1, tag));
    for (uint64_t tag = 0; tag < 5; ++tag) got.push_back(receive(ranks[1], 0, tag));
    uint64_t done = 0;
    for (const ta_ticket ticket : got) {
        const ta_transfer_info there = wait(ranks[1], ticket);
        done += there.state == TA_MOVE_DONE;
        if (there.state == TA_MOVE_DONE) continue;
        EXPECT_EQ(there.status, TA_E_TIER_FULL) << there.reason;
        EXPECT_EQ(there.blocks_moved, 0u);
    }
    EXPECT_GE(done, 1u);
    for (const ta_ticket ticket : sent) (void)wait(ranks[0], ticket);
    // Nothing stays promised.
    for (const ta_ticket ticket : got) {
        const ta_seq seq = wait(ranks[1], ticket).seq;
        if (seq != 0) {
            EXPECT_EQ(ta_seq_release(ranks[1].pool.get(), seq, nullptr), TA_OK);
        }
    }
    (void)send(ranks[0], sources[4], 1, 9);
    EXPECT_EQ(wait(ranks[1], receive(ranks[1], 0, 9)).state, TA_MOVE_DONE);
}

TEST(Group, WhatDoesNotFitChangesNothing) {
    auto shape = pool_shape();
    const ta_group_id id = make_group_id();
    std::vector<Rank> ranks(2);
    for (uint32_t r = 0; r < 2; ++r) {
        shape.budget_bytes = r == 0 ? 64 << 20 : 200000;
        ranks[r].context = make_context(1);
        ranks[r].pool = make_pool(ranks[r].context, shape);
        ranks[r].plan = make_plan(ranks[r].pool);
        ranks[r].group = make_group(ranks[r].context, group_options(id, r, 2));
    }
    for (const Rank& r : ranks) ASSERT_EQ(poll(r.group), TA_GROUP_READY);
    const ta_seq source = grown(ranks[0], 6400);
    const ta_ticket sent = send(ranks[0], source, 1, 1, TA_SEND_MOVE), got = receive(ranks[1], 0, 1);
    const ta_transfer_info there = wait(ranks[1], got), here = wait(ranks[0], sent);
    EXPECT_EQ(there.state, TA_MOVE_FAILED);
    EXPECT_EQ(there.status, TA_E_TIER_FULL) << there.reason;
    EXPECT_EQ(here.status, TA_E_TIER_FULL) << here.reason;
    EXPECT_EQ(here.rank, 1);
    EXPECT_EQ(length(ranks[0].pool, source), 6400);
    EXPECT_EQ(stats(ranks[1].pool).bytes_used, 0u);
    EXPECT_EQ(ta_group_health(ranks[0].group.get(), nullptr), TA_OK);
}

TEST(Group, PoolsThatDifferRefuse) {
    const ta_group_id id = make_group_id();
    std::vector<Rank> ranks(2);
    for (uint32_t r = 0; r < 2; ++r) {
        ranks[r].context = make_context(1);
        ranks[r].pool = make_pool(ranks[r].context, pool_shape(r == 0 ? 4 : 2));
        ranks[r].plan = make_plan(ranks[r].pool);
        ranks[r].group = make_group(ranks[r].context, group_options(id, r, 2));
    }
    for (const Rank& r : ranks) ASSERT_EQ(poll(r.group), TA_GROUP_READY);
    const ta_seq source = grown(ranks[0], 100);
    const ta_ticket sent = send(ranks[0], source, 1, 1), got = receive(ranks[1], 0, 1);
    EXPECT_EQ(wait(ranks[1], got).status, TA_E_MISMATCH);
    EXPECT_EQ(wait(ranks[0], sent).status, TA_E_MISMATCH);
}

TEST(Group, TransfersThatNobodyAnswersEndInTime) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape(), [](ta_group_options& o) { o.operation_ms = 50; });
    const ta_seq source = grown(ranks[0], 100);
    const ta_ticket sent = send(ranks[0], source, 1, 1), got = receive(ranks[1], 0, 2);
    const ta_transfer_info here = wait(ranks[0], sent, 20 * kSecond), there = wait(ranks[1], got, 20 * kSecond);
    EXPECT_EQ(here.status, TA_E_TIMEOUT) << here.reason;
    EXPECT_EQ(there.status, TA_E_TIMEOUT) << there.reason;
    EXPECT_EQ(there.rank, 0);
    // The offer is gone, too.
    const ta_transfer_info late = wait(ranks[1], receive(ranks[1], 0, 1), 20 * kSecond);
    EXPECT_EQ(late.status, TA_E_TIMEOUT) << late.reason;
}

TEST(Group, TicketsAreFinishedOnceAndTheDescriptorTells) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape());
    int32_t fd = -1;
    ta_error err;
    require(ta_group_descriptor(ranks[1].group.get(), &fd, &err), err);
    ta_ticket tickets[4];
    uint64_t n = 9;
    require(ta_group_take_finished(ranks[1].group.get(), tickets, 4, &n, &err), err);
    EXPECT_EQ(n, 0u);
    pollfd p{fd, POLLIN, 0};
    EXPECT_EQ(::poll(&p, 1, 0), 0);
    const ta_seq source = grown(ranks[0], 100);
    send(ranks[0], source, 1, 1);
    const ta_ticket got = receive(ranks[1], 0, 1);
    ASSERT_EQ(::poll(&p, 1, 20000), 1);
    require(ta_group_take_finished(ranks[1].group.get(), tickets, 4, &n, &err), err);
    ASSERT_EQ(n, 1u);
    EXPECT_EQ(tickets[0], got);
    EXPECT_EQ(::poll(&p, 1, 0), 0);
    EXPECT_EQ(wait(ranks[1], got).state, TA_MOVE_DONE);
    auto info = sized<ta_transfer_info>();
    EXPECT_EQ(ta_transfer_query(ranks[1].group.get(), got + 1, &info, nullptr), TA_E_STALE);
    EXPECT_EQ(ta_transfer_query(ranks[0].group.get(), got, &info, nullptr), TA_E_STALE);
}

TEST(Group, FinishedTicketsThatNobodyTakesAreNotKeptForEver) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape());
    for (int i = 0; i < 5000; ++i) {
        const ta_ticket ticket = receive(ranks[1], 0, 1);
        cancel(ranks[1], ticket);
        wait(ranks[1], ticket);
    }
    std::vector<ta_ticket> tickets(6000);
    uint64_t n = 0;
    ta_error err;
    require(ta_group_take_finished(ranks[1].group.get(), tickets.data(), tickets.size(), &n, &err), err);
    EXPECT_EQ(n, 4096u);
    EXPECT_EQ(wait(ranks[1], tickets[0]).state, TA_MOVE_CANCELLED);
}

TEST(Group, EndsEverywhereWhenARankLeaves) {
    std::vector<Rank> ranks = make_ranks(3, pool_shape());
    const ta_seq source = grown(ranks[0], 100);
    const ta_ticket sent = send(ranks[0], source, 1, 1, TA_SEND_MOVE);
    ranks[2].group.reset();
    const ta_transfer_info here = wait(ranks[0], sent, 20 * kSecond);
    EXPECT_EQ(here.status, TA_E_PEER_LOST);
    EXPECT_EQ(here.rank, 2) << here.reason;
    ta_error err;
    EXPECT_EQ(ta_group_health(ranks[0].group.get(), &err), TA_E_PEER_LOST);
    EXPECT_EQ(err.rank, 2);
    EXPECT_EQ(length(ranks[0].pool, source), 100);
    // Rank 1 hears of it by itself.
    for (int i = 0; i < 20000 && ta_group_health(ranks[1].group.get(), nullptr) == TA_OK; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ta_ticket ticket = 0;
    EXPECT_EQ(ta_seq_receive(ranks[1].group.get(), ranks[1].pool.get(), 0, 1, &ticket, nullptr), TA_E_PEER_LOST);
}

TEST(Group, AbortEndsItHereAndThere) {
    const std::vector<Rank> ranks = make_ranks(2, pool_shape());
    const ta_seq source = grown(ranks[0], 100);
    const ta_ticket sent = send(ranks[0], source, 1, 1), got = receive(ranks[1], 0, 2);
    ta_error err;
    require(ta_group_abort(ranks[0].group.get(), &err), err);
    EXPECT_EQ(wait(ranks[0], sent).status, TA_E_CANCELLED);
    const ta_transfer_info there = wait(ranks[1], got, 20 * kSecond);
    EXPECT_EQ(there.status, TA_E_PEER_LOST);
    EXPECT_EQ(there.rank, 0) << there.reason;
    step(ranks[0], source, 5, 1);
}

TEST(Group, ConnectsOrSaysWhoDidNot) {
    const Context context = make_context(1);
    const ta_group_id id = make_group_id();
    auto options = group_options(id, 0, 3);
    options.connect_ms = 50;
    const GroupHandle group = make_group(context, options);
    const KvPool pool = make_pool(context, pool_shape());
    const ta_seq seq = make_sequence(pool);
    ta_ticket ticket = 0;
    EXPECT_EQ(ta_seq_send(group.get(), pool.get(), seq, 1, 1, 0, &ticket, nullptr), TA_E_STATE);
    EXPECT_EQ(poll(group), TA_GROUP_ENDED);
    ta_error err;
    EXPECT_EQ(ta_group_health(group.get(), &err), TA_E_TIMEOUT);
    EXPECT_EQ(err.rank, 1);
    auto other = group_options(id, 1, 4);
    ta_group* out = nullptr;
    EXPECT_EQ(ta_group_create(context.get(), &other, &out, nullptr), TA_E_MISMATCH);
    EXPECT_EQ(ta_group_create(context.get(), &options, &out, nullptr), TA_E_INVALID);
}

TEST(Group, PoolsThatCloseEndTheirTransfersAlone) {
    for (const int which : {0, 1}) {
        std::vector<Rank> ranks = make_ranks(2, pool_shape(), [](ta_group_options& o) { o.staging_bytes = 1; });
        const ta_seq source = grown(ranks[0], 3000);
        for (Rank& r : ranks) r.plan = {};
        const ta_ticket sent = send(ranks[0], source, 1, 1, TA_SEND_MOVE), got = receive(ranks[1], 0, 1);
        ta_error err;
        require(ta_kv_pool_close(ranks[size_t(which)].pool.get(), &err), err);
        const ta_transfer_info here = wait(ranks[0], sent, 20 * kSecond), there = wait(ranks[1], got, 20 * kSecond);
        EXPECT_TRUE(here.status == TA_OK || here.status == TA_E_CLOSED) << here.reason;
        EXPECT_TRUE(there.status == TA_OK || there.status == TA_E_CLOSED) << there.reason;
        EXPECT_EQ(ta_group_health(ranks[0].group.get(), nullptr), TA_OK);
        // What the tickets held goes with them, not with the handle.
        for (int k = 0; k < 2000 && info(ranks[size_t(which)].context).bytes_in_use > 0; ++k)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(info(ranks[size_t(which)].context).bytes_in_use, 0u) << "rank " << which;
    }
}

TEST(Group, ManyTransfersBothWaysAtOnce) {
    constexpr size_t kRanks = 4, kEach = 6;
    const std::vector<Rank> ranks = make_ranks(kRanks, pool_shape(), [](ta_group_options& o) { o.staging_bytes = 100000; });
    struct Way {
        size_t from, to;
        ta_seq source;
        ta_ticket sent, got;
    };
    std::vector<Way> ways;
    for (size_t from = 0; from < kRanks; ++from) {
        for (size_t to = 0; to < kRanks; ++to) {
            for (size_t i = 0; i < kEach && from != to; ++i) {
                const ta_seq source = grown(ranks[from], int32_t(50 + 61 * i), from * 100 + to * 10 + i);
                ways.push_back({from, to, source, send(ranks[from], source, uint32_t(to), i), 0});
            }
        }
    }
    for (Way& w : ways) w.got = receive(ranks[w.to], uint32_t(w.from), (&w - ways.data()) % kEach);
    for (const Way& w : ways) {
        const ta_transfer_info there = wait(ranks[w.to], w.got);
        ASSERT_EQ(there.state, TA_MOVE_DONE) << there.reason;
        ASSERT_EQ(wait(ranks[w.from], w.sent).state, TA_MOVE_DONE);
        expect_equal(ranks[w.from], w.source, ranks[w.to], there.seq);
    }
}

}  // namespace
}  // namespace ta::testing
