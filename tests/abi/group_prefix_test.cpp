// Namespaces that ranks of a local group share: what lookups answer, what fetches bring, from where, and how they end.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>

#include "support/groups.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using Keys = std::vector<uint8_t>;

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;
constexpr int64_t kRow = kHeads * kDim;
constexpr int64_t kSecond = 1000000000;

ta_kv_pool_options pool_shape() {
    auto options = pool_options(kLayers, kHeads, kDim);
    options.budget_bytes = 64 << 20;
    return options;
}
// The same with room below the device.
struct Tiered {
    Tiered() {
        tiers.host_bytes = tiers.disk_bytes = 8 << 20;
        shape.tiers = &tiers;
    }
    ta_tier_options tiers = sized<ta_tier_options>();
    ta_kv_pool_options shape = pool_shape();
};

// A sequence of so many blocks. A block's values follow from the text and its place.
ta_seq grown(const KvPool& pool, const Plan& plan, size_t blocks, uint8_t text) {
    const ta_seq seq = make_sequence(pool);
    const auto n = int32_t(64 * blocks);
    begin(plan, {seq}, {n});
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        std::vector<float> k, v;
        for (size_t i = 0; i < blocks; ++i) {
            Random random(text * 1000 + i * kLayers + layer);
            for (std::vector<float>* x : {&k, &v}) {
                const std::vector<float> more = random.normals(64 * kRow);
                x->insert(x->end(), more.begin(), more.end());
            }
        }
        Tensor all_k(k, n, kHeads, kDim), all_v(v, n, kHeads, kDim);
        append(plan, layer, all_k, all_v);
    }
    end(plan);
    return seq;
}

// Publishes the text's first blocks and lets go of the sequence.
void publish_text(const Rank& rank, ta_namespace space, uint8_t text, size_t blocks) {
    const ta_seq seq = grown(rank.pool, rank.plan, blocks, text);
    publish(rank, seq, space, make_keys(text, blocks));
    ASSERT_EQ(ta_seq_release(rank.pool.get(), seq, nullptr), TA_OK);
}

struct Matched {
    ta_seq seq;
    int64_t blocks;
};
Matched match_text(const Rank& rank, ta_namespace space, uint8_t text, size_t blocks) {
    const Keys keys = make_keys(text, blocks);
    Matched m{};
    ta_error err;
    require(ta_seq_match_prefix(rank.pool.get(), space, keys.data(), blocks, &m.seq, &m.blocks, &err), err);
    m.blocks /= 64;
    return m;
}

// The rank finds so many of the text's first blocks, and they are those that its publisher computed.
void expect_text(const Rank& rank, ta_namespace space, uint8_t text, size_t blocks, size_t asked) {
    const Matched m = match_text(rank, space, text, asked);
    EXPECT_EQ(m.blocks, int64_t(blocks));
    verify(rank.pool, m.seq);
    const Context context = make_context(1);
    const KvPool pool = make_pool(context, pool_shape());
    const ta_seq twin = grown(pool, make_plan(pool), asked, text);
    for (uint32_t layer = 0; layer < kLayers && m.blocks > 0; ++layer) {
        EXPECT_TRUE(dequantize(rank.pool, m.seq, layer, 0, m.blocks * 64, kRow) ==
                    dequantize(pool, twin, layer, 0, m.blocks * 64, kRow))
            << "text " << int(text) << " layer " << layer;
    }
    ASSERT_EQ(ta_seq_release(rank.pool.get(), m.seq, nullptr), TA_OK);
}

// Until lookups say so, of all the keys: hints come some time.
void await(const Rank& rank, ta_namespace space, const Keys& keys, ta_prefix_answer answer, int tier = -1, int at = -1) {
    for (int i = 0; i < 10000; ++i) {
        const auto places = lookup(rank, space, keys);
        if (std::all_of(places.begin(), places.end(), [&](const ta_prefix_place& p) {
                return p.answer == answer && (tier < 0 || p.tier == tier) && (at < 0 || p.rank == uint32_t(at));
            }))
            return;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    FAIL() << "no such answer came";
}

// Ranks with a namespace each, which have joined.
struct Sharing {
    using Change = std::function<void(ta_group_options&)>;
    static void keep(ta_group_options&) {}
    explicit Sharing(uint32_t n, const ta_kv_pool_options& shape = pool_shape(), const Change& change = keep,
                     const std::vector<uint64_t>& quotas = {})
        : ranks(make_ranks(n, shape, change)) {
        for (size_t r = 0; r < n; ++r) {
            spaces.push_back(make_space(ranks[r].pool, 1, r < quotas.size() ? quotas[r] : 0));
            join(ranks[r], spaces[r]);
        }
    }

    void publish(size_t rank, uint8_t text, size_t blocks) const { publish_text(ranks[rank], spaces[rank], text, blocks); }
    ta_transfer_info fetch(size_t rank, uint8_t text, size_t blocks) const {
        return wait(ranks[rank], ta::testing::fetch(ranks[rank], spaces[rank], make_keys(text, blocks)), 60 * kSecond);
    }
    void await(size_t rank, uint8_t text, size_t blocks, ta_prefix_answer answer, int tier = -1, int at = -1) const {
        ta::testing::await(ranks[rank], spaces[rank], make_keys(text, blocks), answer, tier, at);
    }
    void expect(size_t rank, uint8_t text, size_t blocks, size_t asked) const {
        expect_text(ranks[rank], spaces[rank], text, blocks, asked);
    }

    std::vector<Rank> ranks;
    std::vector<ta_namespace> spaces;
};

TEST(GroupPrefix, WhatOneRankPublishesAllCanFetch) {
    for (const uint32_t n : {2u, 3u, 4u, 8u}) {
        SCOPED_TRACE(n);
        const Sharing s(n);
        s.publish(0, 1, 10);
        for (size_t r = 1; r < n; ++r) {
            s.await(r, 1, 10, TA_PREFIX_YES);
            s.await(r, 2, 10, TA_PREFIX_NO);
            const ta_transfer_info got = s.fetch(r, 1, 10);
            ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
            EXPECT_EQ(got.blocks, 10u);
            EXPECT_EQ(got.blocks_moved, 10u);
            EXPECT_EQ(got.blocks_shared, 0u);
            EXPECT_EQ(got.length, 640);
            EXPECT_EQ(got.seq, 0u);
            s.expect(r, 1, 10, 10);
            s.await(0, 1, 10, TA_PREFIX_YES, TA_TIER_DEVICE, 0);
        }
        EXPECT_EQ(ta_group_health(s.ranks[0].group.get(), nullptr), TA_OK);
    }
}

TEST(GroupPrefix, OnlyWhatIsMissingComes) {
    const Sharing s(2);
    s.publish(0, 1, 10);
    s.publish(1, 1, 4);
    s.await(1, 1, 10, TA_PREFIX_YES);
    const ta_transfer_info got = s.fetch(1, 1, 10);
    ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
    EXPECT_EQ(got.blocks_shared, 4u);
    EXPECT_EQ(got.blocks_moved, 6u);
    EXPECT_EQ(got.length, 640);
    s.expect(1, 1, 10, 10);
    const ta_transfer_info again = s.fetch(1, 1, 10), beyond = s.fetch(1, 1, 12), none = s.fetch(1, 2, 3);
    for (const ta_transfer_info& i : {again, beyond, none}) EXPECT_EQ(i.state, TA_MOVE_DONE) << i.reason;
    EXPECT_EQ(again.blocks_moved, 0u);
    EXPECT_EQ(again.peer, 1u) << "nobody was asked";
    EXPECT_EQ(beyond.length, 640);
    EXPECT_EQ(none.length, 0);
    EXPECT_EQ(s.fetch(1, 1, 0).state, TA_MOVE_DONE);
}

// Four blocks are nearest at rank 1, the next three at rank 2, the rest at rank 3; two of them are here.
TEST(GroupPrefix, AChainComesFromSeveralRanks) {
    const Tiered tiered;
    const Sharing s(4, tiered.shape);
    for (const auto& [rank, blocks, tier] : {std::tuple(1, 4, TA_TIER_DEVICE), {2, 7, TA_TIER_HOST}, {3, 10, TA_TIER_DISK}}) {
        const Rank& at = s.ranks[size_t(rank)];
        const ta_seq seq = grown(at.pool, at.plan, size_t(blocks), 1);
        publish(at, seq, s.spaces[size_t(rank)], make_keys(1, size_t(blocks)));
        if (tier != TA_TIER_DEVICE) move_now(at.pool, seq, 1, uint64_t(blocks) - 1, tier);
    }
    s.publish(0, 1, 2);
    for (int i = 0;; ++i) {
        const auto places = lookup(s.ranks[0], s.spaces[0], make_keys(1, 10));
        std::vector<uint32_t> at;
        for (const ta_prefix_place& p : places) at.push_back(p.rank);
        if (at == std::vector<uint32_t>{0, 0, 1, 1, 2, 2, 2, 3, 3, 3}) break;
        ASSERT_LT(i, 10000) << "hints do not come";
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const ta_transfer_info got = s.fetch(0, 1, 10);
    ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
    EXPECT_EQ(got.blocks_shared, 2u);
    EXPECT_EQ(got.blocks_moved, 8u);
    EXPECT_EQ(got.peer, 3u);
    s.expect(0, 1, 10, 10);
}

TEST(GroupPrefix, TheNearestRankIsAsked) {
    const Tiered tiered;
    const Sharing s(4, tiered.shape);
    const Keys keys = make_keys(1, 6);
    const auto put = [&](size_t rank, size_t blocks, ta_tier tier) {
        const ta_seq seq = grown(s.ranks[rank].pool, s.ranks[rank].plan, blocks, 1);
        publish(s.ranks[rank], seq, s.spaces[rank], make_keys(1, blocks));
        move_now(s.ranks[rank].pool, seq, 1, blocks - 1, tier);
        return seq;
    };
    put(1, 6, TA_TIER_DISK);
    s.await(0, 1, 1, TA_PREFIX_YES, TA_TIER_DEVICE, 1);
    put(2, 6, TA_TIER_HOST);
    const ta_seq third = put(3, 4, TA_TIER_DEVICE);
    const auto expect = [&](std::vector<std::pair<uint32_t, ta_tier>> expected) {
        for (int i = 0;; ++i) {
            const auto places = lookup(s.ranks[0], s.spaces[0], keys);
            std::vector<std::pair<uint32_t, ta_tier>> found;
            for (const auto& p : places) found.push_back({p.rank, p.tier});
            found[0].first = expected[0].first;  // all three have it
            if (found == expected) return;
            ASSERT_LT(i, 10000) << "hints do not come";
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    };
    constexpr std::pair<uint32_t, ta_tier> kAtThird{3, TA_TIER_DEVICE}, kAtSecond{2, TA_TIER_HOST};
    expect({kAtThird, kAtThird, kAtThird, kAtThird, kAtSecond, kAtSecond});
    const ta_transfer_info got = s.fetch(0, 1, 6);
    ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
    EXPECT_EQ(got.peer, 2u);
    EXPECT_EQ(got.blocks_moved, 6u);
    s.expect(0, 1, 6, 6);
    // A rank tells of moves, too.
    move_now(s.ranks[3].pool, third, 1, 3, TA_TIER_DISK);
    ASSERT_EQ(ta_namespace_leave(s.ranks[0].group.get(), s.ranks[0].pool.get(), s.spaces[0], nullptr), TA_OK);
    ASSERT_EQ(ta_namespace_destroy(s.ranks[0].pool.get(), s.spaces[0], nullptr), TA_OK);
    const ta_namespace again = make_space(s.ranks[0].pool, 1);
    join(s.ranks[0], again);
    await(s.ranks[0], again, {keys.begin() + 32, keys.end()}, TA_PREFIX_NO);  // the index belongs to the key
    for (int i = 0; lookup(s.ranks[0], again, keys)[2].tier != TA_TIER_HOST; ++i) {
        ASSERT_LT(i, 10000);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(lookup(s.ranks[0], again, keys)[2].rank, 2u);
}

TEST(GroupPrefix, BlocksComeFromAllTiersIntoAllTiers) {
    auto shape = pool_shape();
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 512 << 10;
    tiers.disk_bytes = 4 << 20;
    shape.tiers = &tiers;
    shape.budget_bytes = 600 << 10;
    const Sharing s(2, shape, [](ta_group_options& o) { o.staging_bytes = 200000; });
    const ta_seq source = grown(s.ranks[0].pool, s.ranks[0].plan, 29, 1);
    publish(s.ranks[0], source, s.spaces[0], make_keys(1, 29));
    move_now(s.ranks[0].pool, source, 3, 8, TA_TIER_DISK);
    move_now(s.ranks[0].pool, source, 12, 6, TA_TIER_HOST);
    s.publish(1, 3, 20);  // which have to make room
    s.await(1, 1, 29, TA_PREFIX_YES);
    const ta_transfer_info got = s.fetch(1, 1, 29);
    ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
    EXPECT_EQ(got.length, 29 * 64);
    s.expect(1, 1, 29, 29);
}

// Rank 1 answers late: till then nobody knows what it has.
TEST(GroupPrefix, WhatARankHasNotToldIsUnknown) {
    auto fault = sized<ta_x_group_fault>();
    fault.kind = TA_X_FAULT_DELAY;
    fault.action = 4;  // after its hello, its welcome and its own join, of which rank 0 knows nothing
    fault.detail = 1000;
    const std::vector<Rank> ranks =
        make_ranks(2, pool_shape(), [&](ta_group_options& o) { o.fault = o.rank == 1 ? &fault : nullptr; });
    const ta_namespace here = make_space(ranks[0].pool, 1), there = make_space(ranks[1].pool, 1);
    publish_text(ranks[1], there, 1, 3);
    join(ranks[1], there);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    join(ranks[0], here);
    publish_text(ranks[0], here, 2, 1);
    EXPECT_EQ(lookup(ranks[0], here, make_keys(2, 1), 0)[0].answer, TA_PREFIX_YES) << "the own blocks are known";
    for (const int64_t patience : {int64_t{0}, kSecond / 100}) {
        for (const ta_prefix_place& p : lookup(ranks[0], here, make_keys(1, 4), patience)) {
            EXPECT_EQ(p.answer, TA_PREFIX_UNKNOWN);
        }
    }
    const auto places = lookup(ranks[0], here, make_keys(1, 4), -1);
    for (int i : {0, 1, 2}) EXPECT_EQ(places[size_t(i)].answer, TA_PREFIX_YES) << i;
    EXPECT_EQ(places[3].answer, TA_PREFIX_NO);
}

TEST(GroupPrefix, RanksThatHaveNotJoinedOrHaveAnotherSaltAreApart) {
    const std::vector<Rank> ranks = make_ranks(3, pool_shape());
    std::vector<ta_namespace> spaces;
    for (const uint8_t salt : {1, 2, 1}) spaces.push_back(make_space(ranks[spaces.size()].pool, salt));
    for (size_t r = 0; r < 3; ++r) publish_text(ranks[r], spaces[r], uint8_t(r), 2);
    join(ranks[0], spaces[0]);
    join(ranks[1], spaces[1]);
    for (const uint8_t text : {1, 2}) {
        for (const auto& p : lookup(ranks[0], spaces[0], make_keys(text, 2), -1)) EXPECT_EQ(p.answer, TA_PREFIX_NO);
        EXPECT_EQ(wait(ranks[0], fetch(ranks[0], spaces[0], make_keys(text, 2))).length, 0);
    }
    ta_prefix_place place{};
    ta_ticket ticket = 0;
    const Keys keys = make_keys(0, 1);
    EXPECT_EQ(ta_namespace_lookup(ranks[2].group.get(), ranks[2].pool.get(), spaces[2], keys.data(), 1, 0, &place, nullptr),
              TA_E_STATE);
    EXPECT_EQ(ta_namespace_fetch(ranks[2].group.get(), ranks[2].pool.get(), spaces[2], keys.data(), 1, &ticket, nullptr),
              TA_E_STATE);
    join(ranks[2], spaces[2]);
    await(ranks[0], spaces[0], make_keys(2, 2), TA_PREFIX_YES);
    await(ranks[2], spaces[2], make_keys(0, 2), TA_PREFIX_YES);
    await(ranks[1], spaces[1], make_keys(0, 2), TA_PREFIX_NO);
}

TEST(GroupPrefix, JoinLeaveJoin) {
    const Sharing s(2);
    ta_error err;
    EXPECT_EQ(ta_namespace_join(s.ranks[0].group.get(), s.ranks[0].pool.get(), s.spaces[0], &err), TA_E_INVALID);
    const KvPool other = make_pool(s.ranks[0].context, pool_shape());
    EXPECT_EQ(ta_namespace_join(s.ranks[0].group.get(), other.get(), make_space(other, 1), nullptr), TA_E_INVALID);
    join(s.ranks[1], make_space(s.ranks[1].pool, 9));
    for (int round = 0; round < 20; ++round) {
        s.publish(0, uint8_t(round), 1);
        s.await(1, uint8_t(round), 1, TA_PREFIX_YES);
        ASSERT_EQ(ta_namespace_leave(s.ranks[0].group.get(), s.ranks[0].pool.get(), s.spaces[0], nullptr), TA_OK);
        EXPECT_EQ(ta_namespace_leave(s.ranks[0].group.get(), s.ranks[0].pool.get(), s.spaces[0], nullptr), TA_E_STATE);
        if (round % 2) s.await(1, uint8_t(round), 1, TA_PREFIX_NO);
        join(s.ranks[0], s.spaces[0]);
        if (round % 3) s.await(1, uint8_t(round), 1, TA_PREFIX_YES);
    }
    // A namespace that ends leaves.
    ASSERT_EQ(ta_namespace_destroy(s.ranks[0].pool.get(), s.spaces[0], nullptr), TA_OK);
    s.await(1, 0, 1, TA_PREFIX_NO);
    EXPECT_EQ(s.fetch(1, 0, 1).length, 0);
}

// Calls about a namespace say why, at whatever moment the rank hears of the end.
TEST(GroupPrefix, WhenTheGroupHasEndedNoCallSaysThatItWasNotJoined) {
    const Sharing s(2);
    ASSERT_EQ(ta_group_abort(s.ranks[0].group.get(), nullptr), TA_OK);
    ASSERT_EQ(ta_group_abort(s.ranks[1].group.get(), nullptr), TA_OK);
    const Rank& r = s.ranks[0];
    for (int i = 0; i < 100; ++i) {
        EXPECT_EQ(ta_namespace_leave(r.group.get(), r.pool.get(), s.spaces[0], nullptr), TA_E_CANCELLED);
        ta_ticket ticket = 0;
        EXPECT_EQ(ta_namespace_fetch(r.group.get(), r.pool.get(), s.spaces[0], make_keys(1, 1).data(), 1, &ticket, nullptr),
                  TA_E_CANCELLED);
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

TEST(GroupPrefix, APoolThatEndsLeaves) {
    Sharing s(2);
    s.publish(0, 1, 2);
    s.await(1, 1, 2, TA_PREFIX_YES);
    s.ranks[0].plan.reset();
    s.ranks[0].pool.reset();
    s.await(1, 1, 2, TA_PREFIX_NO);
    EXPECT_EQ(ta_group_health(s.ranks[1].group.get(), nullptr), TA_OK);
}

// Rank 0's hints come late: what it has dropped meanwhile does not come.
TEST(GroupPrefix, AFetchBringsTheLeadingPartThatIsStillThere) {
    const uint64_t block = [] {
        const Context context = make_context(1);
        const KvPool pool = make_pool(context, pool_shape());
        grown(pool, make_plan(pool), 3, 1);
        return stats(pool).bytes_used / 3;
    }();
    auto fault = sized<ta_x_group_fault>();
    fault.kind = TA_X_FAULT_DELAY;
    fault.action = 7;  // after hello, welcome, join, answer, an empty table and what it publishes first
    fault.detail = 500;
    const Sharing s(2, pool_shape(), [&](ta_group_options& o) { o.fault = o.rank == 0 ? &fault : nullptr; },
                    {6 * block + block / 2});
    s.await(1, 1, 1, TA_PREFIX_NO);
    s.publish(0, 1, 4);
    s.await(1, 1, 4, TA_PREFIX_YES);
    s.publish(0, 2, 4);  // drops the end of the first text
    for (const auto& p : lookup(s.ranks[1], s.spaces[1], make_keys(1, 4), 0)) EXPECT_EQ(p.answer, TA_PREFIX_YES);
    const int64_t left = match_text(s.ranks[0], s.spaces[0], 1, 4).blocks;
    EXPECT_TRUE(left > 0 && left < 4) << left;
    const ta_transfer_info got = s.fetch(1, 1, 4);
    ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
    EXPECT_EQ(got.length, left * 64);
    s.expect(1, 1, size_t(left), 4);
}

TEST(GroupPrefix, TheQuotaHolds) {
    const Sharing s(2, pool_shape(), Sharing::keep, {0, 60000});
    s.publish(0, 1, 10);
    s.await(1, 1, 10, TA_PREFIX_YES);
    const ta_transfer_info got = s.fetch(1, 1, 10);
    EXPECT_EQ(got.state, TA_MOVE_FAILED);
    EXPECT_EQ(got.status, TA_E_LIMIT) << got.reason;
    EXPECT_EQ(got.rank, 1);
    EXPECT_EQ(got.blocks_moved, 0u) << "blocks came that cannot be kept";
    s.expect(1, 1, 0, 10);
    EXPECT_EQ(stats(s.ranks[1].pool).bytes_used, 0u);
    // Within it, and in place of what nobody uses.
    EXPECT_EQ(s.fetch(1, 1, 2).length, 128);
    s.publish(0, 2, 2);
    s.await(1, 2, 2, TA_PREFIX_YES);
    EXPECT_EQ(s.fetch(1, 2, 2).length, 128);
    auto space = sized<ta_namespace_stats>();
    ASSERT_EQ(ta_namespace_get_stats(s.ranks[1].pool.get(), s.spaces[1], &space, nullptr), TA_OK);
    EXPECT_LE(space.bytes, 60000u);
    EXPECT_GT(space.evicted, 0u);
    s.expect(1, 2, 2, 2);
}

TEST(GroupPrefix, WhatDoesNotFitChangesNothing) {
    const ta_group_id id = make_group_id();
    std::vector<Rank> ranks(2);
    for (uint32_t r = 0; r < 2; ++r) {
        auto shape = pool_shape();
        shape.budget_bytes = r == 0 ? 64 << 20 : 200000;
        ranks[r].context = make_context(1);
        ranks[r].pool = make_pool(ranks[r].context, shape);
        ranks[r].plan = make_plan(ranks[r].pool);
        ranks[r].group = make_group(ranks[r].context, group_options(id, r, 2));
    }
    for (const Rank& r : ranks) ASSERT_EQ(poll(r.group), TA_GROUP_READY);
    const ta_namespace source = make_space(ranks[0].pool, 1), space = make_space(ranks[1].pool, 1);
    join(ranks[0], source);
    join(ranks[1], space);
    publish_text(ranks[0], source, 1, 100);
    await(ranks[1], space, make_keys(1, 100), TA_PREFIX_YES);
    const ta_transfer_info got = wait(ranks[1], fetch(ranks[1], space, make_keys(1, 100)));
    EXPECT_EQ(got.status, TA_E_TIER_FULL) << got.reason;
    EXPECT_EQ(stats(ranks[1].pool).bytes_used, 0u);
    EXPECT_EQ(wait(ranks[1], fetch(ranks[1], space, make_keys(1, 2))).length, 128);
}

TEST(GroupPrefix, CancelledAtAnyMoment) {
    const Sharing s(3, pool_shape(), [](ta_group_options& o) { o.staging_bytes = 1; });
    s.publish(0, 1, 12);
    s.publish(2, 1, 24);
    s.await(1, 1, 24, TA_PREFIX_YES);
    std::map<ta_move_state, int> endings;
    for (int i = 0; i < 60; ++i) {
        const ta_ticket ticket = fetch(s.ranks[1], s.spaces[1], make_keys(1, 24));
        std::this_thread::sleep_for(std::chrono::microseconds(150 * i));
        cancel(s.ranks[1], ticket);
        const ta_transfer_info got = wait(s.ranks[1], ticket, 20 * kSecond);
        ++endings[got.state];
        EXPECT_TRUE(got.state == TA_MOVE_DONE || got.state == TA_MOVE_CANCELLED) << got.reason;
        const Matched m = match_text(s.ranks[1], s.spaces[1], 1, 24);
        EXPECT_EQ(m.blocks * 64, got.length);
        EXPECT_TRUE(m.blocks == 0 || m.blocks == 12 || m.blocks == 24) << m.blocks << " of rank's blocks, not all or none";
        ASSERT_EQ(ta_seq_release(s.ranks[1].pool.get(), m.seq, nullptr), TA_OK);
        // Empty again.
        if (m.blocks > 0) {
            s.expect(1, 1, size_t(m.blocks), 24);
            auto& space = const_cast<ta_namespace&>(s.spaces[1]);
            ASSERT_EQ(ta_namespace_destroy(s.ranks[1].pool.get(), space, nullptr), TA_OK);
            space = make_space(s.ranks[1].pool, 1);
            join(s.ranks[1], space);  // by the name of one that has ended, which nobody waits for
            s.await(1, 1, 24, TA_PREFIX_YES);
        }
    }
    EXPECT_GT(endings[TA_MOVE_CANCELLED], 0);
    EXPECT_EQ(ta_group_health(s.ranks[1].group.get(), nullptr), TA_OK);
    EXPECT_EQ(stats(s.ranks[1].pool).sequences, 0u);
}

TEST(GroupPrefix, NamespacesAndPoolsThatEndInTheMiddle) {
    for (const int what : {0, 1, 2, 3}) {
        SCOPED_TRACE(what);
        const Sharing s(2, pool_shape(), [](ta_group_options& o) { o.staging_bytes = 1; });
        s.publish(0, 1, 60);
        s.await(1, 1, 60, TA_PREFIX_YES);
        const ta_ticket ticket = fetch(s.ranks[1], s.spaces[1], make_keys(1, 60));
        const Rank& ends = s.ranks[size_t(what % 2)];
        if (what < 2) {
            EXPECT_EQ(ta_namespace_destroy(ends.pool.get(), s.spaces[size_t(what)], nullptr), TA_OK);
        } else {
            EXPECT_EQ(ta_kv_pool_close(ends.pool.get(), nullptr), TA_OK);
        }
        const ta_transfer_info got = wait(s.ranks[1], ticket, 20 * kSecond);
        static const std::set<ta_status> kMay = {TA_OK, TA_E_STALE, TA_E_CLOSED};
        EXPECT_TRUE(kMay.contains(got.status)) << got.reason;
        if (what % 2 == 0 && got.status == TA_OK) s.expect(1, 1, size_t(got.length) / 64, 60);
        EXPECT_EQ(ta_group_health(s.ranks[1].group.get(), nullptr), TA_OK);
    }
}

TEST(GroupPrefix, PoolsGoOnWhenTheGroupEnds) {
    for (const bool here : {true, false}) {
        const Sharing s(2, pool_shape(), [](ta_group_options& o) { o.staging_bytes = 1; });
        s.publish(0, 1, 40);
        s.publish(1, 2, 3);
        s.await(1, 1, 40, TA_PREFIX_YES);
        const ta_ticket ticket = fetch(s.ranks[1], s.spaces[1], make_keys(1, 40));
        ASSERT_EQ(ta_group_abort(s.ranks[here ? 1 : 0].group.get(), nullptr), TA_OK);
        const ta_transfer_info got = wait(s.ranks[1], ticket, 20 * kSecond);
        EXPECT_TRUE(got.status == TA_OK || got.status == (here ? TA_E_CANCELLED : TA_E_PEER_LOST)) << got.reason;
        s.expect(1, 2, 3, 3);
        s.expect(1, 1, size_t(got.length) / 64, 40);
        s.expect(0, 1, 40, 40);
        ta_prefix_place place{};
        const Keys keys = make_keys(1, 1);
        EXPECT_NE(ta_namespace_lookup(s.ranks[0].group.get(), s.ranks[0].pool.get(), s.spaces[0], keys.data(), 1, -1, &place,
                                      nullptr),
                  TA_OK);
    }
}

// The tickets of a rank are those that its caller has.
TEST(GroupPrefix, WhoServesAFetchIsNotTold) {
    const Sharing s(2);
    s.publish(0, 1, 3);
    s.await(1, 1, 3, TA_PREFIX_YES);
    const ta_ticket ticket = fetch(s.ranks[1], s.spaces[1], make_keys(1, 3));
    ASSERT_EQ(wait(s.ranks[1], ticket).state, TA_MOVE_DONE);
    ta_ticket tickets[4];
    uint64_t n = 0;
    ASSERT_EQ(ta_group_take_finished(s.ranks[1].group.get(), tickets, 4, &n, nullptr), TA_OK);
    ASSERT_EQ(n, 1u);
    EXPECT_EQ(tickets[0], ticket);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ASSERT_EQ(ta_group_take_finished(s.ranks[0].group.get(), tickets, 4, &n, nullptr), TA_OK);
    EXPECT_EQ(n, 0u);
}

TEST(GroupPrefix, AllFetchFromAllAtOnce) {
    constexpr size_t kRanks = 8, kBlocks = 7;
    const Sharing s(kRanks, pool_shape(), [](ta_group_options& o) { o.staging_bytes = 100000; });
    for (size_t r = 0; r < kRanks; ++r) s.publish(r, uint8_t(r), kBlocks);
    std::vector<std::thread> threads;
    for (size_t r = 0; r < kRanks; ++r) {
        threads.emplace_back([&s, r] {
            std::vector<ta_ticket> tickets;
            for (size_t text = 0; text < kRanks; ++text) {
                s.await(r, uint8_t(text), kBlocks, TA_PREFIX_YES);
                for (int twice = 0; twice < 2; ++twice)
                    tickets.push_back(fetch(s.ranks[r], s.spaces[r], make_keys(uint8_t(text), kBlocks)));
            }
            for (const ta_ticket t : tickets) {
                const ta_transfer_info got = wait(s.ranks[r], t, 60 * kSecond);
                EXPECT_EQ(got.state, TA_MOVE_DONE) << got.reason;
                EXPECT_EQ(got.length, int64_t(kBlocks) * 64);
            }
        });
    }
    for (std::thread& t : threads) t.join();
    for (size_t r = 0; r < kRanks; ++r) s.expect(r, uint8_t((r + 3) % kRanks), kBlocks, kBlocks);
}

// A sequence that came by a transfer and the prefix of it: the blocks come once.
TEST(GroupPrefix, BlocksOfAnEarlierTransferAreShared) {
    const Sharing s(2);
    const ta_seq source = grown(s.ranks[0].pool, s.ranks[0].plan, 6, 1);
    publish(s.ranks[0], source, s.spaces[0], make_keys(1, 6));
    send(s.ranks[0], source, 1, 1);
    ASSERT_EQ(wait(s.ranks[1], receive(s.ranks[1], 0, 1)).state, TA_MOVE_DONE);
    s.await(1, 1, 6, TA_PREFIX_YES);
    const ta_transfer_info got = s.fetch(1, 1, 6);
    ASSERT_EQ(got.state, TA_MOVE_DONE) << got.reason;
    EXPECT_EQ(got.blocks_shared, 6u);
    EXPECT_EQ(got.blocks_moved, 0u);
    s.expect(1, 1, 6, 6);
    // And the other way: a sequence whose prefix was fetched.
    s.publish(0, 2, 5);
    s.await(1, 2, 5, TA_PREFIX_YES);
    ASSERT_EQ(s.fetch(1, 2, 5).length, 320);
    send(s.ranks[0], match_text(s.ranks[0], s.spaces[0], 2, 5).seq, 1, 1);
    EXPECT_EQ(wait(s.ranks[1], receive(s.ranks[1], 0, 1)).blocks_shared, 5u);
}

// ---------------------------------------------------------------------------------------------------------------------- events

// A router that follows events.
struct Router {
    std::map<std::vector<uint8_t>, ta_tier> there;
    uint64_t last = 0, lost = 0, resets = 0;

    size_t follow(const KvPool& pool, ta_namespace space, size_t most = 64) {
        std::vector<ta_prefix_event> events(most);
        uint64_t n = 0;
        ta_error err;
        require(ta_namespace_take_events(pool.get(), space, events.data(), most, &n, &err), err);
        for (size_t i = 0; i < n; ++i) {
            const ta_prefix_event& e = events[i];
            EXPECT_GT(e.number, last);
            lost += e.number - last - 1;
            EXPECT_TRUE(e.number == last + 1 || e.kind == TA_PREFIX_RESET) << "events were lost without a word";
            last = e.number;
            const std::vector<uint8_t> key(e.key, e.key + 32);
            if (e.kind == TA_PREFIX_RESET) {
                there.clear();
                ++resets;
            } else if (e.kind == TA_PREFIX_DROPPED) {
                EXPECT_EQ(there.erase(key), 1u);
            } else {
                EXPECT_EQ(there.contains(key), e.kind == TA_PREFIX_MOVED);
                there[key] = e.tier;
            }
        }
        return n;
    }
    void follow_all(const KvPool& pool, ta_namespace space, size_t most = 64) {
        while (follow(pool, space, most) == most) {
        }
    }
    // The tier of each of a text's blocks, -1: it is not there.
    std::vector<int> tiers(const KvPool& pool, ta_namespace space, uint8_t text, size_t blocks) const {
        const Keys keys = make_keys(text, blocks);
        Keys hashed(keys.size());
        EXPECT_EQ(ta_namespace_hash_keys(pool.get(), space, keys.data(), blocks, hashed.data(), nullptr), TA_OK);
        std::vector<int> all;
        for (size_t i = 0; i < blocks; ++i) {
            const auto found = there.find({hashed.begin() + ptrdiff_t(i * 32), hashed.begin() + ptrdiff_t(i * 32 + 32)});
            all.push_back(found == there.end() ? -1 : found->second);
        }
        return all;
    }
};

TEST(GroupPrefix, EventsTellWhatIsWhere) {
    const Tiered tiered;
    const Context context = make_context(1);
    const KvPool pool = make_pool(context, tiered.shape);
    const Plan plan = make_plan(pool);
    const ta_namespace space = make_space(pool, 1, 200000), other = make_space(pool, 2);
    const auto publish_here = [&](uint8_t text, size_t blocks, ta_namespace to) {
        const ta_seq seq = grown(pool, plan, blocks, text);
        const Keys keys = make_keys(text, blocks);
        EXPECT_EQ(ta_seq_publish(pool.get(), seq, to, keys.data(), blocks, nullptr), TA_OK);
        return seq;
    };
    publish_here(1, 3, space);  // before anybody follows
    publish_here(3, 3, other);
    Router router;
    router.follow_all(pool, space, 2);
    EXPECT_EQ(router.tiers(pool, space, 1, 4), (std::vector<int>{0, 0, 0, -1}));
    const ta_seq second = publish_here(2, 5, space);
    router.follow_all(pool, space, 2);
    EXPECT_EQ(router.tiers(pool, space, 2, 5), (std::vector<int>{0, 0, 0, 0, 0}));
    move_now(pool, second, 1, 2, TA_TIER_HOST);
    move_now(pool, second, 3, 1, TA_TIER_DISK);
    router.follow_all(pool, space, 1);
    EXPECT_EQ(router.tiers(pool, space, 2, 5), (std::vector<int>{0, 1, 1, 2, 0}));
    EXPECT_EQ(router.there.size(), 8u);
    EXPECT_EQ(router.resets, 1u);
    ASSERT_EQ(ta_seq_release(pool.get(), second, nullptr), TA_OK);
    // The quota drops what is used by nobody.
    auto s = sized<ta_namespace_stats>();
    for (uint8_t text = 10; text < 20; ++text) {
        const ta_seq seq = publish_here(text, 3, space);
        ASSERT_EQ(ta_seq_release(pool.get(), seq, nullptr), TA_OK);
        ASSERT_EQ(ta_namespace_get_stats(pool.get(), space, &s, nullptr), TA_OK);
        router.follow_all(pool, space, 3);
        EXPECT_EQ(router.there.size(), s.entries);
    }
    EXPECT_GT(s.evicted, 0u);
    EXPECT_EQ(router.lost, 0u);
    EXPECT_EQ(router.follow(pool, space), 0u);
    uint64_t n = 7;
    EXPECT_EQ(ta_namespace_take_events(pool.get(), space, nullptr, 0, &n, nullptr), TA_OK);
    EXPECT_EQ(n, 0u);
    ASSERT_EQ(ta_namespace_destroy(pool.get(), space, nullptr), TA_OK);
    ta_prefix_event event;
    EXPECT_EQ(ta_namespace_take_events(pool.get(), space, &event, 1, &n, nullptr), TA_E_STALE);
}

// More than the queue keeps: the router begins again. The other rank has all of it, too.
TEST(GroupPrefix, EventsThatOverflowAreToldAgain) {
    constexpr uint32_t kKeys = 9000;
    const Sharing s(2);
    const Rank& rank = s.ranks[0];
    Router router;
    router.follow_all(rank.pool, s.spaces[0]);
    const ta_seq seq = grown(rank.pool, rank.plan, 1, 1);
    const auto key = [](uint32_t i) {
        Keys k = make_keys(1, 1);
        std::memcpy(k.data() + 8, &i, sizeof i);
        return k;
    };
    for (uint32_t i = 0; i < kKeys; ++i) publish(rank, seq, s.spaces[0], key(i));
    router.follow_all(rank.pool, s.spaces[0], 1000);
    EXPECT_EQ(router.resets, 2u);
    EXPECT_EQ(router.lost, kKeys);
    EXPECT_EQ(router.there.size(), kKeys);
    publish(rank, seq, s.spaces[0], key(kKeys));
    router.follow_all(rank.pool, s.spaces[0], 1000);
    EXPECT_EQ(router.there.size(), kKeys + 1);
    EXPECT_EQ(router.resets, 2u);
    for (const uint32_t i : {kKeys, 0u, 4096u, 8191u, 8192u, kKeys - 1}) await(s.ranks[1], s.spaces[1], key(i), TA_PREFIX_YES);
}

}  // namespace
}  // namespace ta::testing
