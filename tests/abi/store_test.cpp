// Published blocks in a store of the caller's: prefixes that pools share through it.
#include "abi/store_steps.h"

namespace ta::testing {
namespace {

TEST_F(Store, PoolsShareAPrefixToTheBit) {
    for (const uint32_t bits : {8u, 4u, 2u}) {
        for (const uint64_t batch : {uint64_t{0}, uint64_t{1}}) {
            SCOPED_TRACE(std::to_string(bits) + " bits");
            MemoryStore shared;
            MemoryStore::Client *writer = nullptr, *reader = nullptr;
            const Publisher p = make_publisher(options(bits));
            attach_store(p.pool, p.space, shared.attach(&writer), 0, TA_DEFAULT, TA_DEFAULT, batch);
            EXPECT_EQ(flush_store(p.pool, p.space), 0u);
            EXPECT_EQ(store_stats(p.pool, p.space).puts, kBlocks);
            const Context elsewhere = make_context(1);
            const KvPool pool = make_pool(elsewhere, options(bits));
            const ta_namespace space = make_namespace(pool, 1);
            attach_store(pool, space, shared.attach(&reader), 0, TA_DEFAULT, TA_DEFAULT, batch);
            EXPECT_EQ(match(pool, space, kText, kBlocks).second, 0);
            const ta_move_info info = load_from_store(pool, space, keys(kText, kBlocks + 3));
            EXPECT_EQ(info.state, TA_MOVE_DONE);
            EXPECT_EQ(info.blocks, kBlocks + 3);
            EXPECT_EQ(info.moved, kBlocks);
            EXPECT_EQ(info.present, 0u);
            EXPECT_EQ(info.skipped, 3u);
            const auto [here, n] = match(p.pool, p.space, kText, kBlocks);
            const auto [there, m] = match(pool, space, kText, kBlocks);
            ASSERT_EQ(n, int64_t(kBlocks) * 64);
            ASSERT_EQ(m, n);
            verify(pool, there);
            EXPECT_TRUE(same_values(p.pool, here, pool, there, n));
            EXPECT_EQ(grow(p.pool, here, 70, kText), grow(pool, there, 70, kText));
            EXPECT_EQ(grow(p.pool, here, 1, kText), grow(pool, there, 1, kText));
            // Blocks that came are not put again.
            EXPECT_EQ(flush_store(pool, space), 0u);
            EXPECT_EQ(store_stats(pool, space).puts, 0u);
            EXPECT_EQ(load_from_store(pool, space, keys(kText, kBlocks)).present, kBlocks);
            const ta_store_stats s = store_stats(pool, space);
            EXPECT_EQ(s.hits, kBlocks);
            EXPECT_GT(s.misses, 0u);
            EXPECT_EQ(s.refused + s.timeouts + s.calls_failed + s.put_failures, 0u) << s.failure;
            EXPECT_EQ(s.bytes_got, store_stats(p.pool, p.space).bytes_put);
            for (const MemoryStore::Client* c : {writer, reader}) {
                EXPECT_EQ(c->threads.size(), 1u);
                EXPECT_EQ(c->at_once, 0);
            }
        }
    }
}

TEST_F(Store, WhatIsPublishedLaterIsPutByItself) {
    const Publisher p = make_publisher();
    attach_store(p.pool, p.space, store.attach());
    EXPECT_TRUE(soon([&] { return store.values().size() == kBlocks; }));
    const ta_seq seq = write(p.pool, 3 * 64, 8);
    publish(p.pool, seq, p.space, 8, 3);
    EXPECT_TRUE(soon([&] { return store.values().size() == kBlocks + 3; }));
    EXPECT_TRUE(soon([&] { return store_stats(p.pool, p.space).puts == kBlocks + 3; }));
}

TEST_F(Store, OtherSaltsAndOtherShapesMeetNothing) {
    fill();
    const KvPool pool = make_pool(context, options());
    const ta_namespace other = make_namespace(pool, 2);
    attach_store(pool, other, store.attach());
    EXPECT_EQ(load_from_store(pool, other, keys(kText, kBlocks)).moved, 0u);
    const KvPool shape = make_pool(context, options(2));
    const ta_namespace space = make_namespace(shape, 1);
    attach_store(shape, space, store.attach());
    EXPECT_EQ(load_from_store(shape, space, keys(kText, kBlocks)).moved, 0u);
    EXPECT_EQ(store_stats(shape, space).refused, 0u);
    EXPECT_EQ(store.values().size(), kBlocks);
}

TEST_F(Store, WhatIsPresentIsNotAskedForAndAGapEndsALoad) {
    fill();
    const KvPool pool = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 2 * 64, kText);
    publish(pool, seq, space, kText, 2);
    attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF);
    ta_move_info info = load_from_store(pool, space, keys(kText, 3));
    EXPECT_EQ(info.present, 2u);
    EXPECT_EQ(info.moved, 1u);
    const int gets = store.calls(MemoryStore::kGet);
    info = load_from_store(pool, space, keys(kText, 3));
    EXPECT_EQ(info.present, 3u);
    EXPECT_EQ(store.calls(MemoryStore::kGet), gets);
    expect_right(pool, space, 3);
}

// A load asks for no more blocks than the tiers hold, together.
TEST_F(Store, BudgetsThatAddUpToMoreThan64BitsAreNotSmall) {
    fill();
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 64 << 10;
    auto o = options();
    o.budget_bytes = UINT64_MAX;
    o.tiers = &tiers;
    const KvPool pool = make_pool(context, o);
    const ta_namespace space = make_namespace(pool, 1);
    attach_store(pool, space, store.attach());
    EXPECT_EQ(load_from_store(pool, space, keys(kText, kBlocks)).moved, kBlocks);
    expect_right(pool, space, kBlocks);
}

TEST_F(Store, BlocksOfAllTiersArePut) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 4 << 20;
    tiers.disk_bytes = 16 << 20;
    auto o = options();
    o.tiers = &tiers;
    const Publisher p = make_publisher(o);
    const auto [seq, n] = match(p.pool, p.space, kText, kBlocks);
    move(p.pool, seq, 2, TA_TIER_HOST);
    move_now(p.pool, seq, 2, 2, TA_TIER_DISK);
    attach_store(p.pool, p.space, store.attach());
    EXPECT_EQ(flush_store(p.pool, p.space), 0u);
    EXPECT_EQ(come(), kBlocks);
}

TEST_F(Store, MetricsHaveItsFigures) {
    const Publisher p = make_publisher();
    const auto metrics = [&](ta_metrics_format format) {
        std::string s(1 << 16, '\0');
        uint64_t needed = 0;
        ta_error err;
        require(ta_kv_pool_write_metrics(p.pool.get(), format, s.data(), s.size(), &needed, &err), err);
        s.resize(needed - 1);
        return s;
    };
    EXPECT_EQ(metrics(TA_METRICS_OPENMETRICS).find("store_"), std::string::npos);
    attach_store(p.pool, p.space, store.attach());
    EXPECT_EQ(flush_store(p.pool, p.space), 0u);
    const std::string id = std::to_string(p.space), n = std::to_string(kBlocks);
    const std::string now = metrics(TA_METRICS_OPENMETRICS), json = metrics(TA_METRICS_JSON);
    EXPECT_NE(now.find("\nta_store_puts_total{namespace=\"" + id + "\"} " + n + "\n"), std::string::npos) << now;
    EXPECT_NE(now.find("\nta_store_waiting{namespace=\"" + id + "\"} 0\n"), std::string::npos);
    EXPECT_NE(json.find("\"store_puts\": {\"" + id + "\": " + n + "}"), std::string::npos) << json;
}

// The store is not asked again for blocks that a flush puts.
TEST_F(Store, AFlushIsOfAllThatWaits) {
    HeldCall exists;
    hold(exists, MemoryStore::kExists, 1);
    const Publisher p = make_publisher();
    attach_store(p.pool, p.space, store.attach());
    ASSERT_TRUE(soon([&] { return exists.calls == 1; }));
    const ta_seq seq = write(p.pool, 3 * 64, 8);
    publish(p.pool, seq, p.space, 8, 3);
    EXPECT_EQ(flush_store(p.pool, p.space, 0), kBlocks + 3);
    exists.waits = false;
    EXPECT_TRUE(soon([&] { return store.values().size() == kBlocks + 3; }));
    EXPECT_EQ(flush_store(p.pool, p.space), 0u);
    EXPECT_EQ(exists.calls, 3) << "what came before, and two flushes";
    store.well();
}

TEST_F(Store, ReleasedOnceWhateverBecomesOfTheCall) {
    const Publisher p = make_publisher();
    MemoryStore::Client* client = nullptr;
    ta_block_store set = store.attach(&client);
    const auto attach = [&](ta_namespace space, const ta_store_options* o = nullptr) {
        return ta_namespace_attach_store(p.pool.get(), space, &set, o, nullptr);
    };
    EXPECT_EQ(attach(12345), TA_E_STALE);
    EXPECT_EQ(client->released, 1);
    auto o = sized<ta_store_options>();
    o.timeout_ms = -1;
    EXPECT_EQ(attach(p.space, &o), TA_E_INVALID);
    EXPECT_EQ(client->released, 2);
    EXPECT_EQ(ta_namespace_attach_store(nullptr, p.space, &set, nullptr, nullptr), TA_E_INVALID);
    EXPECT_EQ(client->released, 3);
    MemoryStore::Client* kept = nullptr;
    const ta_block_store good = store.attach(&kept);
    attach_store(p.pool, p.space, good);
    EXPECT_EQ(attach(p.space), TA_E_STATE);
    EXPECT_EQ(client->released, 4);
    set.get = nullptr;
    EXPECT_EQ(attach(p.space), TA_E_INVALID);
    EXPECT_EQ(client->released, 5);
    set.struct_size = 3;
    EXPECT_EQ(attach(p.space), TA_E_STRUCT);
    EXPECT_EQ(client->released, 5);
    EXPECT_EQ(kept->released, 0);
    ta_error err;
    require(ta_namespace_detach_store(p.pool.get(), p.space, &err), err);
    EXPECT_EQ(kept->released, 1);
    EXPECT_EQ(ta_namespace_detach_store(p.pool.get(), p.space, nullptr), TA_E_STATE);
    attach_store(p.pool, p.space, store.attach());
}

}  // namespace
}  // namespace ta::testing
