// Published prefixes: a sequence that begins with one is what a fork of the publisher is, namespaces see nothing of one
// another, and what nobody uses makes room.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <thread>

#include "abi/prefix_steps.h"
#include "support/slots.h"

namespace ta::testing {
namespace {

class Prefix : public PrefixSteps {};

TEST_F(Prefix, AMatchedSequenceGoesOnLikeAFork) {
    for (ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        for (uint32_t bits : {4u, 2u, 8u}) {
            SCOPED_TRACE(std::to_string(profile) + " at " + std::to_string(bits) + " bits");
            auto numerics = sized<ta_numerics>();
            numerics.profile = profile;
            const KvPool pool = make_pool(context, options(bits, &numerics));
            const ta_namespace space = make_namespace(pool, 1);
            const ta_seq seq = write(pool, 270, 7);
            publish(pool, seq, space, 7, 3);
            const ta_seq fork = fork_sequence(pool, seq);
            truncate(pool, fork, 192);
            const auto [same, n] = match(pool, space, 7, 4);
            ASSERT_EQ(n, 192);
            EXPECT_TRUE(same_values(pool, same, pool, fork, 192));
            EXPECT_TRUE(same_bits(grow(pool, same, 70, 8), grow(pool, fork, 70, 8)));
            // The entries outlive their publisher, and everybody else.
            const std::vector<float> expected = grow(pool, fork, 5, 9);
            EXPECT_TRUE(same_bits(grow(pool, same, 5, 9), expected));
            const ta_seq reference = fork_sequence(pool, seq);
            truncate(pool, reference, 128);
            const std::vector<float> shorter = grow(pool, reference, 3, 10);
            for (ta_seq s : {seq, fork, same, reference}) release(pool, s);
            const auto [again, m] = match(pool, space, 7, 2);
            ASSERT_EQ(m, 128);
            verify(pool, again);
            EXPECT_TRUE(same_bits(grow(pool, again, 3, 10), shorter));
        }
    }
}

TEST_F(Prefix, AMatchedSequenceGoesOnLikeOneFromScratch) {
    for (uint32_t bits : {4u, 2u, 8u}) {
        const KvPool pool = make_pool(context, options(bits)), plain = make_pool(context, options(bits));
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 320, 3);
        publish(pool, seq, space, 3, 5);
        const auto [matched, n] = match(pool, space, 3, 3);
        ASSERT_EQ(n, 192);
        const ta_seq scratch = write(plain, 192, 3);
        for (int32_t step : {1, 80, 64, 200}) {
            ASSERT_TRUE(same_bits(grow(pool, matched, step, 4), grow(plain, scratch, step, 4))) << step << " at " << bits;
        }
    }
}

// A model whose K, V and queries of a layer follow from what the layer before gave, as real ones do. Appends tokens up to `n` in
// chunks; returns the last layer's output for tokens from `from` on.
std::vector<float> run_model(const KvPool& pool, ta_seq seq, int64_t n, int64_t chunk, int64_t from) {
    constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;
    constexpr int64_t kRow = kHeads * kDim;
    const Plan plan = make_plan(pool);
    std::vector<float> seen;
    for (int64_t have = length(pool, seq); have < n;) {
        const int64_t m = std::min(chunk - have % chunk, n - have);
        std::vector<float> x;
        for (int64_t t = have; t < have + m; ++t) {
            const std::vector<float> token = Random(uint64_t(t) * 31 + 7).normals(kRow);
            x.insert(x.end(), token.begin(), token.end());
        }
        begin(plan, {seq}, {int32_t(m)});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(x, m, kHeads, kDim), out(m, kHeads, kDim);
            append(plan, layer, k, k);
            attend(plan, layer, k, out);
            const std::vector<float> y = out.values();
            for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
        }
        end(plan);
        for (int64_t t = std::max(from, have); t < have + m; ++t)
            seen.insert(seen.end(), x.begin() + (t - have) * kRow, x.begin() + (t - have + 1) * kRow);
        have += m;
    }
    return seen;
}

// docs/tiers.md: chunks of one size from the first token on, and matches cut to a multiple of it.
TEST_F(Prefix, AHitIsEqualToAColdRun) {
    constexpr int64_t kTokens = 700;
    for (const uint32_t bits : {4u, 2u, 8u}) {
        for (const int64_t chunk : {64, 128, 192}) {
            SCOPED_TRACE(::testing::Message() << bits << " bits, chunks of " << chunk);
            const KvPool pool = make_pool(context, options(bits));
            const ta_namespace space = make_namespace(pool, 1);
            const ta_seq publisher = make_sequence(pool);
            run_model(pool, publisher, 500, chunk, 0);
            publish(pool, publisher, space, 1, 7);
            const auto [hit, matched] = match(pool, space, 1, 7);
            ASSERT_EQ(matched, 448);
            const int64_t cut = matched / chunk * chunk;
            truncate(pool, hit, cut);
            const std::vector<float> got = run_model(pool, hit, kTokens, chunk, cut);
            EXPECT_TRUE(got == run_model(pool, make_sequence(pool), kTokens, chunk, cut));
        }
    }
}

TEST_F(Prefix, NamespacesAndKeysAreApart) {
    const KvPool pool = make_pool(context, options());
    const ta_namespace a = make_namespace(pool, 1), b = make_namespace(pool, 2);
    EXPECT_NE(a, b);
    const ta_seq seq = write(pool, 256, 1);
    publish(pool, seq, a, 1, 4);
    EXPECT_EQ(match(pool, b, 1, 4).second, 0);
    EXPECT_EQ(match(pool, a, 2, 4).second, 0);
    EXPECT_EQ(match(pool, a, 1, 0).second, 0);
    // A key counts at its place only, and a gap ends the match.
    const std::vector<uint8_t> all = keys(1, 4);
    const auto match_keys = [&](const std::vector<size_t>& order) {
        std::vector<uint8_t> given;
        for (size_t i : order)
            given.insert(given.end(), all.begin() + std::ptrdiff_t(i * 32), all.begin() + std::ptrdiff_t(i * 32 + 32));
        ta_seq out = 0;
        int64_t n = -1;
        ta_error err;
        require(ta_seq_match_prefix(pool.get(), a, given.data(), order.size(), &out, &n, &err), err);
        return n;
    };
    EXPECT_EQ(match_keys({1, 2, 3}), 0);
    EXPECT_EQ(match_keys({0, 2, 1, 3}), 64);
    EXPECT_EQ(match_keys({0, 1, 2, 3}), 256);
    const ta_namespace_stats s = space_stats(pool, a);
    EXPECT_EQ(s.entries, 4u);
    EXPECT_EQ(s.published, 4u);
    EXPECT_EQ(s.hits, 5u);
    EXPECT_EQ(s.misses, 4u + 3 + 3);
    EXPECT_EQ(s.bytes_shared, s.bytes);
    EXPECT_EQ(space_stats(pool, b).misses, 4u);
    // A sequence that was matched in one namespace cannot be published in another.
    ta_error err;
    const auto [matched, n] = match(pool, a, 1, 4);
    EXPECT_EQ(ta_seq_publish(pool.get(), matched, b, all.data(), 4, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.block, 0);
    EXPECT_EQ(ta_seq_publish(pool.get(), seq, b, all.data(), 4, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(space_stats(pool, b).entries, 0u);
    // An ended namespace: sequences keep what they have.
    require(ta_namespace_destroy(pool.get(), a, &err), err);
    EXPECT_EQ(ta_namespace_destroy(pool.get(), a, &err), TA_E_STALE);
    EXPECT_EQ(err.argument, 1);
    verify(pool, matched);
    const ta_namespace again = make_namespace(pool, 1);
    EXPECT_NE(again, a);
    EXPECT_EQ(match(pool, again, 1, 4).second, 0);
}

TEST_F(Prefix, TheFirstOneWins) {
    const KvPool pool = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq first = write(pool, 128, 1), second = write(pool, 192, 2);
    publish(pool, first, space, 9, 2);
    publish(pool, second, space, 9, 3);
    const auto [seq, n] = match(pool, space, 9, 3);
    ASSERT_EQ(n, 192);
    EXPECT_TRUE(same_values(pool, seq, pool, first, 128));
    EXPECT_FALSE(same_values(pool, seq, pool, second, 128));
    EXPECT_TRUE(dequantize(pool, seq, 0, 128, 64, kRow) == dequantize(pool, second, 0, 128, 64, kRow));
    EXPECT_EQ(space_stats(pool, space).published, 3u);
    verify(pool, seq);
}

TEST_F(Prefix, WritersGetCopies) {
    const KvPool pool = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 192, 1);
    const Stored before = dequantize(pool, seq, 0, 0, 192, kRow);
    publish(pool, seq, space, 1, 3);
    const auto [a, n] = match(pool, space, 1, 3);
    const auto [b, m] = match(pool, space, 1, 3);
    truncate(pool, a, 150);
    grow(pool, a, 100, 5);
    truncate(pool, b, 10);
    grow(pool, b, 10, 6);
    truncate(pool, seq, 64);
    grow(pool, seq, 128, 7);
    const auto [c, k] = match(pool, space, 1, 3);
    ASSERT_EQ(k, 192);
    EXPECT_TRUE(dequantize(pool, c, 0, 0, 192, kRow) == before);
    for (ta_seq s : {a, b, c, seq}) verify(pool, s);
}

TEST_F(Prefix, QuotasAreKept) {
    const KvPool pool = make_pool(context, options());
    const ta_kv_pool_stats s = stats(pool);
    const uint64_t prefix = s.token_block_bytes + 2 * s.channel_block_bytes;  // of three blocks
    const ta_namespace space = make_namespace(pool, 1, 2 * prefix + 100), other = make_namespace(pool, 2);
    std::vector<ta_seq> seqs;
    for (uint64_t text = 0; text < 4; ++text) seqs.push_back(write(pool, 192, text));
    publish(pool, seqs[0], space, 0, 3);
    publish(pool, seqs[1], space, 1, 3);
    // All that is published is in use.
    ta_error err;
    EXPECT_EQ(ta_seq_publish(pool.get(), seqs[2], space, keys(2, 3).data(), 3, &err), TA_E_LIMIT);
    EXPECT_NE(std::string(err.message).find("quota of " + std::to_string(2 * prefix + 100)), std::string::npos) << err.message;
    EXPECT_EQ(space_stats(pool, space).bytes, 2 * prefix);
    EXPECT_EQ(match(pool, space, 2, 3).second, 0);
    // 0 was asked for later than 1 and stays.
    for (ta_seq& q : seqs) {
        if (q != seqs[2]) release(pool, q);
    }
    const auto [zero, n] = match(pool, space, 0, 3);
    EXPECT_EQ(n, 192);
    release(pool, zero);
    publish(pool, seqs[2], space, 2, 3);
    EXPECT_EQ(space_stats(pool, space).bytes, 2 * prefix);
    EXPECT_EQ(space_stats(pool, space).evicted, 3u);
    EXPECT_EQ(match(pool, space, 1, 3).second, 0);
    EXPECT_EQ(match(pool, space, 0, 3).second, 192);
    EXPECT_EQ(match(pool, space, 2, 3).second, 192);
    const ta_seq three = write(pool, 192, 3);
    publish(pool, three, other, 3, 3);
    EXPECT_EQ(space_stats(pool, other).bytes_quota, 0u);
    // A prefix that alone is too long.
    const ta_seq four = write(pool, 640, 4);
    EXPECT_EQ(ta_seq_publish(pool.get(), four, space, keys(4, 10).data(), 10, &err), TA_E_LIMIT);
    EXPECT_EQ(match(pool, space, 0, 3).second, 192);
}

// Blocks come to be unused, and used, while a publish counts what it may drop.
TEST_F(Prefix, QuotasAreKeptBesideMatches) {
    constexpr int32_t kBlocks = 400;
    const KvPool pool = make_pool(context, pool_options(1, 1, 64));
    const auto append_all = [&](int32_t n) {
        const ta_seq seq = make_sequence(pool);
        const Plan plan = make_plan(pool);
        begin(plan, {seq}, {n}, {0});
        Tensor kv(std::vector<float>(size_t(n) * 64, 0.5f), n, 1, 64);
        append(plan, 0, kv, kv);
        end(plan);
        return seq;
    };
    const ta_kv_pool_stats s = stats(pool);
    const uint64_t quota = s.token_block_bytes + (kBlocks - 1) * s.channel_block_bytes;
    const ta_namespace space = make_namespace(pool, 1, quota);
    const ta_seq first = append_all(kBlocks * 64);
    publish(pool, first, space, 1, kBlocks);
    release(pool, first);
    const ta_seq longer = append_all((kBlocks + 1) * 64);
    const std::vector<uint8_t> all = keys(1, kBlocks + 1);
    std::jthread matches([&](std::stop_token stop) {
        while (!stop.stop_requested()) {
            ta_seq seq;
            int64_t n;
            if (ta_seq_match_prefix(pool.get(), space, all.data(), kBlocks, &seq, &n, nullptr) == TA_OK) release(pool, seq);
        }
    });
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
    while (std::chrono::steady_clock::now() < end)
        ASSERT_EQ(ta_seq_publish(pool.get(), longer, space, all.data(), kBlocks + 1, nullptr), TA_E_LIMIT);
    EXPECT_EQ(space_stats(pool, space).bytes, quota);
}

TEST_F(Prefix, AMatchThatIsRefusedAsksForNothing) {
    auto o = options();
    o.max_sequences = 2;
    const KvPool pool = make_pool(context, o);
    const ta_namespace space = make_namespace(pool, 1, 2 * stats(pool).token_block_bytes);
    for (uint64_t text : {1, 2}) {
        const ta_seq seq = write(pool, 64, text);
        publish(pool, seq, space, text, 1);
        release(pool, seq);
    }
    const ta_seq third = write(pool, 64, 3), last = make_sequence(pool);
    ta_seq none = 0;
    int64_t n = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_match_prefix(pool.get(), space, keys(1, 1).data(), 1, &none, &n, &err), TA_E_LIMIT) << err.message;
    EXPECT_EQ(space_stats(pool, space).hits, 0u);
    publish(pool, third, space, 3, 1);
    release(pool, last);
    EXPECT_EQ(match(pool, space, 1, 1).second, 0) << "it was asked for before the other one";
}

TEST_F(Prefix, WhatIsPublishedAlreadyNeedsNoQuota) {
    const std::string path = ::testing::TempDir() + "/ta-over-quota-" + std::to_string(getpid());
    const KvPool from = make_pool(context, options()), pool = make_pool(context, options());
    publish(from, write(from, 192, 1), make_namespace(from, 1), 1, 3);
    ta_error err;
    require(ta_kv_pool_save(from.get(), path.c_str(), TA_SAVE_PUBLISHED, nullptr, &err), err);
    const ta_namespace space = make_namespace(pool, 1, 1000);
    ta_loaded_seq loaded{};
    uint64_t n = 0;
    const ta_status s = ta_kv_pool_load(pool.get(), path.c_str(), nullptr, &loaded, 1, &n, &err);
    std::remove(path.c_str());
    require(s, err);
    ASSERT_EQ(n, 1u);
    ASSERT_GT(space_stats(pool, space).bytes, 1000u) << "the sequence has them";
    publish(pool, loaded.loaded, space, 1, 3);
    EXPECT_EQ(ta_seq_publish(pool.get(), loaded.loaded, space, keys(2, 3).data(), 3, &err), TA_E_LIMIT);
}

TEST_F(Prefix, UnusedEntriesMakeRoomEndFirst) {
    const KvPool pool = make_pool(context, small_options(12));
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 9 * 64, 1);
    publish(pool, seq, space, 1, 9);
    release(pool, seq);
    EXPECT_EQ(space_stats(pool, space).bytes_shared, 0u);
    const ta_seq large = write(pool, 22 * 64, 2);
    const ta_namespace_stats s = space_stats(pool, space);
    EXPECT_GT(s.evicted, 0u);
    EXPECT_EQ(s.entries + s.evicted, 9u);
    const auto [rest, n] = match(pool, space, 1, 9);
    EXPECT_EQ(n, int64_t(s.entries) * 64) << "the beginning stays";
    verify(pool, rest);
    verify(pool, large);
    // Blocks that a sequence has are not dropped.
    ta_error err;
    const int32_t much = 64 * 64;
    const Plan plan = make_plan(pool);
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &large, &much, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
    EXPECT_EQ(space_stats(pool, space).entries, s.entries);
}

TEST_F(Prefix, ABeginDropsWhatItNeedsOrNothing) {
    const KvPool pool = make_pool(context, small_options(12));
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 9 * 64, 1), held = write(pool, 4 * 64, 2);
    publish(pool, seq, space, 1, 9);
    release(pool, seq);
    const ta_seq next = make_sequence(pool);
    const Plan plan = make_plan(pool);
    ta_error err;
    // No tier below, and the unused blocks would not be enough.
    const int32_t much = 24 * 64;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &next, &much, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
    EXPECT_EQ(space_stats(pool, space).entries, 9u);
    // One block is missing.
    const ta_kv_pool_stats s = stats(pool);
    const uint64_t free = s.bytes_budget - s.bytes_used;
    const auto fits = [&](uint64_t blocks) {
        return s.token_block_bytes + (blocks - 1) * s.channel_block_bytes;  // a sink and the rest
    };
    uint64_t blocks = 1;
    while (fits(blocks) <= free) ++blocks;
    begin(plan, {next}, {int32_t(blocks * 64)});
    EXPECT_EQ(space_stats(pool, space).entries, 8u);
    require(ta_plan_abort(plan.get(), &err), err);
    verify(pool, held);
}

TEST_F(Prefix, ABeginThatCannotFitLosesNothingInTiers) {
    for (const uint64_t disk_bytes : {uint64_t{0}, uint64_t{1} << 18}) {
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = uint64_t{1} << 17;
        tiers.disk_bytes = disk_bytes;
        const KvPool pool = make_pool(context, small_options(12, &tiers));
        const ta_namespace space = make_namespace(pool, 1);
        uint64_t entries = 0;
        for (uint64_t text = 0; text < 8 && space_stats(pool, space).evicted == 0; ++text) {
            const ta_seq seq = write(pool, 6 * 64, text);
            publish(pool, seq, space, text, 6);
            release(pool, seq);
        }
        entries = space_stats(pool, space).entries;
        ASSERT_GT(space_stats(pool, space).evicted, 0u) << "all tiers are full of them";
        const ta_seq held = write(pool, 6 * 64, 20), next = make_sequence(pool);
        ta_error err;
        require(ta_seq_pin(pool.get(), held, 0, 6, &err), err);
        entries = space_stats(pool, space).entries;
        ASSERT_GT(entries, 6u);
        // All but the pinned blocks would have to go, and one more.
        const ta_kv_pool_stats s = stats(pool);
        const uint64_t pinned = s.token_block_bytes + 5 * s.channel_block_bytes;
        uint64_t blocks = 1;
        while (s.token_block_bytes + (blocks - 1) * s.channel_block_bytes <= s.bytes_budget - pinned) ++blocks;
        const int32_t much = int32_t(blocks * 64);
        const Plan plan = make_plan(pool);
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &next, &much, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
        EXPECT_EQ(space_stats(pool, space).entries, entries);
        begin(plan, {next}, {much / 2});
        EXPECT_LT(space_stats(pool, space).entries, entries);
        require(ta_plan_abort(plan.get(), &err), err);
    }
}

// Some blocks that the step itself has, or shares, are on the device and others are not.
TEST_F(Prefix, ABeginThatItsOwnBlocksLeaveNoRoomLosesNothing) {
    for (const bool forked : {false, true}) {
        SCOPED_TRACE(forked ? "with a fork" : "alone");
        auto numerics = sized<ta_numerics>();
        numerics.sink_blocks = -1;
        auto o = options(8, &numerics);
        const uint64_t block = stats(make_pool(context, o)).token_block_bytes, on_pages = (block + 4095) / 4096 * 4096;
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = 4 * on_pages + 8192;
        tiers.disk_bytes = 5 * (on_pages + 4096) + 16384;
        tiers.high_percent = tiers.low_percent = 100;
        tiers.begin_wait_ms = -1;
        o.budget_bytes = 13 * block;
        o.tiers = &tiers;
        const KvPool pool = make_pool(context, o);
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq published = write(pool, 8 * 64, 1), seq = make_sequence(pool);
        publish(pool, published, space, 1, 8);
        release(pool, published);
        for (const int32_t blocks : {5, 4, 3}) grow(pool, seq, blocks * 64, 2);
        if (forked) fork_sequence(pool, seq);
        const uint64_t entries = space_stats(pool, space).entries;
        ASSERT_GT(entries, 0u);
        // 18 blocks, none of which may be on disk: two tiers have room for 17.
        const int32_t much = 6 * 64;
        const Plan plan = make_plan(pool);
        ta_error err;
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &much, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
        EXPECT_EQ(space_stats(pool, space).entries, entries);
        grow(pool, seq, 3 * 64, 2);
    }
}

TEST_F(Prefix, PinnedBlocksStayThoughNobodyUsesThem) {
    for (const uint64_t host_bytes : {uint64_t{0}, uint64_t{1} << 20}) {
        for (const ta_switch drop_coldest : {TA_OFF, TA_ON}) {
            SCOPED_TRACE(std::to_string(host_bytes) + " bytes below, dropping " + std::to_string(drop_coldest));
            auto tiers = sized<ta_tier_options>();
            tiers.host_bytes = host_bytes;
            tiers.drop_coldest = drop_coldest;
            const KvPool pool = make_pool(context, small_options(12, &tiers));
            const ta_namespace space = make_namespace(pool, 1);
            const ta_seq seq = write(pool, 6 * 64, 1);
            publish(pool, seq, space, 1, 6);
            ta_error err;
            require(ta_seq_pin(pool.get(), seq, 0, 6, &err), err);
            release(pool, seq);
            const ta_kv_pool_stats s = stats(pool);
            const auto bytes = [&](uint64_t blocks) { return s.token_block_bytes + (blocks - 1) * s.channel_block_bytes; };
            uint64_t blocks = 1;
            while (bytes(blocks) <= s.bytes_budget - bytes(6)) ++blocks;
            const ta_seq next = make_sequence(pool);
            const int32_t much = int32_t(blocks * 64);
            const Plan plan = make_plan(pool);
            EXPECT_EQ(ta_plan_begin(plan.get(), 1, &next, &much, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
            EXPECT_EQ(space_stats(pool, space).entries, 6u);
            const auto [again, n] = match(pool, space, 1, 6);
            EXPECT_EQ(n, 6 * 64);
            EXPECT_EQ(residency(pool, again).device_blocks, 6u);
            verify(pool, again);
            require(ta_seq_unpin(pool.get(), again, 0, 6, &err), err);
            release(pool, again);
            begin(plan, {next}, {much});
            EXPECT_EQ(space_stats(pool, space).entries == 6, host_bytes > 0);
            require(ta_plan_abort(plan.get(), &err), err);
        }
    }
}

TEST_F(Prefix, ABeginThatCannotFitLosesNothingThoughBlocksMayBeDropped) {
    for (const uint64_t host_bytes : {uint64_t{0}, uint64_t{1} << 17}) {
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = host_bytes;
        tiers.drop_coldest = TA_ON;
        const KvPool pool = make_pool(context, small_options(12, &tiers));
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 6 * 64, 1), idle = write(pool, 5 * 64, 2), held = write(pool, 6 * 64, 3);
        publish(pool, seq, space, 1, 6);
        release(pool, seq);
        ta_error err;
        require(ta_seq_pin(pool.get(), held, 0, 6, &err), err);
        require(ta_seq_pin(pool.get(), idle, 0, 1, &err), err);
        // All but the pinned blocks, the other sequence's sink among them, would have to go, and one more.
        const ta_kv_pool_stats s = stats(pool);
        const auto bytes = [&](uint64_t blocks) { return s.token_block_bytes + (blocks - 1) * s.channel_block_bytes; };
        uint64_t blocks = 1;
        while (bytes(blocks) <= s.bytes_budget - bytes(6) - s.token_block_bytes) ++blocks;
        const ta_seq next = make_sequence(pool);
        const int32_t much = int32_t(blocks * 64);
        const Plan plan = make_plan(pool);
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &next, &much, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
        EXPECT_EQ(space_stats(pool, space).entries, 6u);
        EXPECT_EQ(move_stats(pool).dropped_blocks, 0u);
        // Blocks that nobody uses are dropped before those that a sequence has.
        begin(plan, {next}, {much - 64});
        EXPECT_TRUE(host_bytes > 0 || space_stats(pool, space).entries == 0);
        EXPECT_LE(residency(pool, idle).dropped_blocks, 4u);
        require(ta_plan_abort(plan.get(), &err), err);
        verify(pool, held);
    }
}

// Blocks on disk come to where the device reads them: a step whose blocks do not fit there loses nothing on the way.
TEST_F(Prefix, AStepTooLargeForTheTiersThatAreReadLosesNothing) {
    auto tiers = sized<ta_tier_options>();
    tiers.disk_bytes = uint64_t{1} << 21;
    tiers.high_percent = 100;
    const KvPool pool = make_pool(context, small_options(12, &tiers));
    const ta_namespace space = make_namespace(pool, 1);
    std::vector<ta_seq> large;
    for (uint64_t text = 2; text < 5; ++text) {
        large.push_back(write(pool, 10 * 64, text));
        EXPECT_EQ(move(pool, large.back(), 10, TA_TIER_DISK).moved, 10u);
    }
    // The disk is full, and so is the device, of what nobody uses.
    for (uint64_t text = 20; text < 60 && space_stats(pool, space).evicted == 0; ++text) {
        const ta_seq seq = write(pool, 6 * 64, text);
        publish(pool, seq, space, text, 6);
        release(pool, seq);
    }
    ASSERT_GT(space_stats(pool, space).evicted, 0u);
    const uint64_t entries = space_stats(pool, space).entries;
    const Plan plan = make_plan(pool);
    const int32_t none[] = {0, 0, 0};
    ta_error err;
    EXPECT_EQ(ta_plan_begin(plan.get(), 3, large.data(), none, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
    EXPECT_EQ(space_stats(pool, space).entries, entries);
    begin(plan, {large[0]}, {0});
    require(ta_plan_abort(plan.get(), &err), err);
}

TEST_F(Prefix, ABlockUnderTwoKeysMakesRoom) {
    const KvPool pool = make_pool(context, small_options(12));
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 9 * 64, 1);
    publish(pool, seq, space, 1, 9);
    publish(pool, seq, space, 2, 9);
    EXPECT_EQ(space_stats(pool, space).entries, 18u);
    EXPECT_EQ(space_stats(pool, space).bytes_shared, space_stats(pool, space).bytes);
    release(pool, seq);
    EXPECT_EQ(space_stats(pool, space).bytes_shared, 0u);
    const ta_seq large = write(pool, 12 * 64, 2);
    const ta_namespace_stats s = space_stats(pool, space);
    EXPECT_EQ(s.entries + s.evicted, 18u);
    EXPECT_EQ(match(pool, space, 2, 9).second, int64_t(s.entries / 2 * 64)) << "both entries of a block went";
    verify(pool, large);
    // A quota counts a block once for each key, and drops one key without the other.
    const ta_seq three = write(pool, 64, 3);
    const ta_namespace small = make_namespace(pool, 2, 2 * stats(pool).token_block_bytes);
    publish(pool, three, small, 3, 1);
    publish(pool, three, small, 4, 1);
    release(pool, three);
    publish(pool, write(pool, 64, 5), small, 5, 1);
    EXPECT_EQ(match(pool, small, 3, 1).second, 0);
    EXPECT_EQ(match(pool, small, 4, 1).second, 64);
}

TEST_F(Prefix, BlocksUnderTwoKeysAreEvictedOnce) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{1} << 20;
    const KvPool pool = make_pool(context, small_options(12, &tiers));
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 9 * 64, 1);
    publish(pool, seq, space, 1, 9);
    publish(pool, seq, space, 2, 9);
    release(pool, seq);
    const ta_seq large = write(pool, 17 * 64, 2);
    EXPECT_EQ(space_stats(pool, space).entries, 18u) << "they moved";
    const auto [matched, n] = match(pool, space, 1, 9);
    EXPECT_EQ(n, 9 * 64);
    EXPECT_GT(residency(pool, matched).host_blocks, 0u);
    EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).blocks, residency(pool, matched).host_blocks + residency(pool, large).host_blocks);
    const ta_tier_stats s = tier_stats(pool, TA_TIER_DEVICE);
    EXPECT_EQ(s.evicted_blocks, s.blocks_out) << "those that no sequence had, too";
    verify(pool, matched);
}

TEST_F(Prefix, EntriesLiveInAllTiers) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{1} << 19;
    tiers.disk_bytes = uint64_t{1} << 20;
    const KvPool pool = make_pool(context, small_options(12, &tiers)), plain = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    std::vector<ta_seq> reference;
    uint64_t found = 0;
    for (uint64_t text = 0; text < 12; ++text) {
        const ta_seq seq = write(pool, 6 * 64, text);
        publish(pool, seq, space, text, 6);
        release(pool, seq);
        reference.push_back(write(plain, 6 * 64, text));
    }
    ta_residency all{};
    for (uint64_t text = 12; text-- > 0;) {
        const auto [seq, n] = match(pool, space, text, 6);
        const ta_residency r = residency(pool, seq);
        all.device_blocks += r.device_blocks;
        all.host_blocks += r.host_blocks;
        all.disk_blocks += r.disk_blocks;
        found += uint64_t(n / 64);
        if (n > 0) {
            verify(pool, seq);
            EXPECT_TRUE(same_values(pool, seq, plain, reference[text], n));
            const ta_seq fork = fork_sequence(plain, reference[text]);
            truncate(plain, fork, n);
            EXPECT_TRUE(same_bits(grow(pool, seq, 3, 50), grow(plain, fork, 3, 50)));
        }
        release(pool, seq);
    }
    EXPECT_EQ(found, all.device_blocks + all.host_blocks + all.disk_blocks);
    EXPECT_GT(all.host_blocks, 0u);
    EXPECT_GT(all.disk_blocks, 0u);
    EXPECT_GT(found, 20u);
    // Far more than all tiers hold: what was asked for last is there, the rest makes room.
    for (uint64_t text = 100; text < 160; ++text) {
        const ta_seq seq = write(pool, 6 * 64, text);
        publish(pool, seq, space, text, 6);
        release(pool, seq);
    }
    EXPECT_GT(space_stats(pool, space).evicted, 100u);
    EXPECT_EQ(match(pool, space, 159, 6).second, 6 * 64);
}

TEST_F(Prefix, MemoryIsZeroedBetweenNamespaces) {
    Slots slots;
    const Context own = slots.make_context();
    KvPool pool = make_pool(own, options());
    const ta_namespace a = make_namespace(pool, 1), b = make_namespace(pool, 2);
    const auto open = [&](ta_seq seq) {  // how many slots are zero while the step is open
        const Plan plan = make_plan(pool);
        begin(plan, {seq}, {10});
        const size_t zero = slots.zero();
        ta_error err;
        require(ta_plan_abort(plan.get(), &err), err);
        return zero;
    };
    const ta_seq none = write(pool, 10, 1);
    ASSERT_EQ(slots.alive.size(), 1u);
    EXPECT_EQ(slots.zero(), 0u);
    release(pool, none);
    const ta_seq nobody = make_sequence(pool);
    EXPECT_EQ(open(nobody), 0u) << "the same: of no namespace";
    const ta_seq in_a = match(pool, a, 1, 0).first, in_b = match(pool, b, 1, 0).first;
    EXPECT_EQ(open(in_a), 1u) << "none to a";
    grow(pool, in_a, 70, 1);  // a sink and an open block
    publish(pool, in_a, a, 1, 1);
    ASSERT_EQ(slots.alive.size(), 2u);
    EXPECT_EQ(slots.zero(), 0u);
    release(pool, in_a);
    ta_error err;
    require(ta_namespace_destroy(pool.get(), a, &err), err);
    EXPECT_EQ(slots.zero(), 0u);
    ASSERT_EQ(slots.alive.size(), 2u) << "kept for reuse";
    EXPECT_EQ(open(in_b), 1u) << "a to b";
    grow(pool, in_b, 64, 1);
    EXPECT_EQ(open(nobody), 1u) << "a to none";
    release(pool, in_b);
    // Published later: the blocks of the sequence are the namespace's from then on.
    grow(pool, nobody, 130, 3);
    publish(pool, nobody, b, 3, 2);
    require(ta_kv_pool_close(pool.get(), &err), err);
    EXPECT_GE(slots.returned.load(), 3);
    EXPECT_EQ(slots.returned_dirty.load(), 0) << "given back to the embedder";
}

// Before one of two sequences that share a block is published, and whoever of them copies the block.
TEST_F(Prefix, CopiesOfABlockAreOfItsNamespace) {
    auto passes = sized<ta_layer_group>();
    passes.layers = 1;
    passes.window = 1;
    for (const int64_t sinks : {1, -1}) {
        for (const bool windows : {false, true}) {
            for (const bool source_first : {true, false}) {
                SCOPED_TRACE(std::to_string(sinks) + " " + std::to_string(windows) + " " + std::to_string(source_first));
                auto numerics = sized<ta_numerics>();
                numerics.sink_blocks = decltype(numerics.sink_blocks)(sinks);
                auto o = options(4, &numerics);
                if (windows) o.layer_groups = &passes, o.n_layer_groups = 1;
                const KvPool pool = make_pool(context, o);
                const ta_namespace a = make_namespace(pool, 1), b = make_namespace(pool, 2);
                const ta_seq source = write(pool, 10, 1), fork = fork_sequence(pool, source);
                publish(pool, fork, a, 1, 0);
                grow(pool, source_first ? source : fork, 200, 2);
                grow(pool, source_first ? fork : source, 200, 2);
                EXPECT_EQ(ta_seq_publish(pool.get(), source, b, keys(2, 1).data(), 1, nullptr), TA_E_INVALID);
            }
        }
    }
}

TEST_F(Prefix, WrongCalls) {
    const KvPool pool = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 200, 1);
    ta_error err;
    const std::vector<uint8_t> k = keys(1, 4);
    auto o = namespace_options(0);
    ta_namespace none = 0;
    EXPECT_EQ(ta_namespace_create(pool.get(), &o, &none, &err), TA_E_INVALID) << err.message;
    o = namespace_options(1);
    EXPECT_EQ(ta_namespace_create(pool.get(), &o, &none, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 1);
    o.struct_size = 4;
    EXPECT_EQ(ta_namespace_create(pool.get(), &o, &none, &err), TA_E_STRUCT);
    EXPECT_EQ(ta_namespace_create(pool.get(), nullptr, &none, &err), TA_E_INVALID);
    EXPECT_EQ(none, 0u);
    EXPECT_EQ(ta_seq_publish(pool.get(), seq, space, k.data(), 4, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 4);
    EXPECT_EQ(ta_seq_publish(pool.get(), seq, space, nullptr, 3, &err), TA_E_INVALID);
    EXPECT_EQ(ta_seq_publish(pool.get(), seq, space, k.data(), UINT64_MAX, &err), TA_E_INVALID);
    EXPECT_EQ(ta_seq_publish(pool.get(), seq, space + 1, k.data(), 3, &err), TA_E_STALE);
    EXPECT_EQ(err.argument, 2);
    EXPECT_EQ(ta_seq_publish(pool.get(), seq + 1, space, k.data(), 3, &err), TA_E_STALE);
    EXPECT_EQ(err.argument, 1);
    ta_seq out = 77;
    int64_t n = 77;
    EXPECT_EQ(ta_seq_match_prefix(pool.get(), 0, k.data(), 3, &out, &n, &err), TA_E_STALE);
    EXPECT_EQ(ta_seq_match_prefix(pool.get(), space, nullptr, 3, &out, &n, &err), TA_E_INVALID);
    EXPECT_EQ(ta_seq_match_prefix(pool.get(), space, k.data(), 3, nullptr, &n, &err), TA_E_INVALID);
    EXPECT_EQ(ta_seq_match_prefix(pool.get(), space, k.data(), 3, &out, nullptr, &err), TA_E_INVALID);
    EXPECT_EQ(ta_namespace_flush(pool.get(), space, &err), TA_E_UNSUPPORTED) << err.message;
    EXPECT_EQ(err.argument, 0);
    const Plan plan = make_plan(pool);
    begin(plan, {seq}, {1});
    EXPECT_EQ(ta_seq_publish(pool.get(), seq, space, k.data(), 3, &err), TA_E_BUSY);
    require(ta_plan_abort(plan.get(), &err), err);
    EXPECT_EQ(space_stats(pool, space).entries, 0u);
    EXPECT_EQ(out, 77u);
    EXPECT_EQ(n, 77);
    // A full table of sequences.
    auto few = options();
    few.max_sequences = 1;
    const KvPool tiny = make_pool(context, few);
    const ta_namespace there = make_namespace(tiny, 1);
    publish(tiny, write(tiny, 64, 1), there, 1, 1);
    EXPECT_EQ(ta_seq_match_prefix(tiny.get(), there, k.data(), 1, &out, &n, &err), TA_E_LIMIT);
    EXPECT_EQ(out, 77u);
    require(ta_kv_pool_close(pool.get(), &err), err);
    EXPECT_EQ(ta_seq_publish(pool.get(), seq, space, k.data(), 3, &err), TA_E_CLOSED);
    EXPECT_EQ(ta_seq_match_prefix(pool.get(), space, k.data(), 3, &out, &n, &err), TA_E_CLOSED);
    EXPECT_EQ(ta_namespace_create(pool.get(), &o, &none, &err), TA_E_STRUCT);
    EXPECT_EQ(ta_namespace_destroy(pool.get(), space, &err), TA_E_CLOSED);
}

TEST_F(Prefix, Metrics) {
    const KvPool pool = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    publish(pool, write(pool, 200, 1), space, 1, 3);
    match(pool, space, 1, 5);
    char text[16384];
    uint64_t needed = 0;
    ta_error err;
    require(ta_kv_pool_write_metrics(pool.get(), TA_METRICS_OPENMETRICS, text, sizeof text, &needed, &err), err);
    const std::string label = "{namespace=\"" + std::to_string(space) + "\"} ";
    EXPECT_NE(std::string(text).find("\nta_namespace_entries" + label + "3\n"), std::string::npos) << text;
    EXPECT_NE(std::string(text).find("\nta_namespace_misses_total" + label + "2\n"), std::string::npos) << text;
    require(ta_kv_pool_write_metrics(pool.get(), TA_METRICS_JSON, text, sizeof text, &needed, &err), err);
    EXPECT_NE(std::string(text).find("\"namespace_hits\": {\"" + std::to_string(space) + "\": 3}"), std::string::npos) << text;
}

// Threads that publish the same texts, match them, go on and let go, in too little room.
TEST_F(Prefix, ManyThreads) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{1} << 19;
    const KvPool pool = make_pool(context, small_options(60, &tiers)), plain = make_pool(context, options());
    const ta_namespace spaces[] = {make_namespace(pool, 1), make_namespace(pool, 2, 300000)};
    std::vector<ta_seq> reference;
    for (uint64_t text = 0; text < 6; ++text) reference.push_back(write(plain, 256, text));
    std::atomic<int> matched{0};
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t) {
        threads.emplace_back([&, t] {
            Random random(t);
            for (int i = 0; i < 40; ++i) {
                const auto text = uint64_t(random.below(6));
                const ta_namespace space = spaces[random.below(2)];
                try {
                    const auto [seq, n] = match(pool, space, text, 4);
                    if (n > 0) {
                        ++matched;
                        EXPECT_TRUE(same_values(pool, seq, plain, reference[text], n));
                    }
                    if (n < 256) grow(pool, seq, int32_t(256 - n), text);
                    ta_error err;
                    const ta_status s = ta_seq_publish(pool.get(), seq, space, keys(text, 4).data(), 4, &err);
                    EXPECT_TRUE(s == TA_OK || s == TA_E_LIMIT) << err.message;
                    verify(pool, seq);
                    release(pool, seq);
                } catch (const std::exception& e) {
                    ADD_FAILURE() << e.what();
                }
            }
        });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_GT(matched.load(), 20);
    EXPECT_EQ(stats(pool).sequences, 0u);
}

TEST_F(Prefix, OneOfTwoNamespacesGetsWhatBothAreGivenAtOnce) {
    const KvPool pool = make_pool(context, options());
    const ta_namespace spaces[] = {make_namespace(pool, 1), make_namespace(pool, 2)};
    constexpr int kRounds = 200;
    for (int i = 0; i < kRounds; ++i) {
        const ta_seq seq = write(pool, 128, uint64_t(i));
        std::atomic<int> ready{0};
        ta_status status[2];
        const auto publish_in = [&](int t) {
            ++ready;
            while (ready.load() < 2) {
            }
            status[t] = ta_seq_publish(pool.get(), seq, spaces[t], keys(uint64_t(i), 2).data(), 2, nullptr);
        };
        std::thread other(publish_in, 1);
        publish_in(0);
        other.join();
        const int got = status[0] == TA_OK ? 0 : 1;
        EXPECT_EQ(status[got], TA_OK);
        EXPECT_EQ(status[1 - got], TA_E_INVALID);
        EXPECT_EQ(match(pool, spaces[got], uint64_t(i), 2).second, 128);
        EXPECT_EQ(match(pool, spaces[1 - got], uint64_t(i), 2).second, 0);
    }
}

}  // namespace
}  // namespace ta::testing
