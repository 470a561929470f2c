// turboattention.hpp: tiers, prefixes, block stores, admission.
#include <array>
#include <cstring>
#include <map>

#include "hpp_steps.h"

namespace hpp_tests {
namespace {

TEST(Hpp, TiersAndPrefixes) {
    Folder folder;
    const auto path = folder.file("tier");
    auto options = shape();
    const auto peer = ta::Context::create();
    options.tiers = {
        .host_bytes = 16 << 20, .disk_bytes = 16 << 20, .disk_path = path.c_str(), .peer = peer.get(), .peer_bytes = 16 << 20};
    ta::NamespaceOptions tenant;
    tenant.salt.fill(7);
    std::vector<ta::Key> keys(3);
    for (size_t i = 0; i < keys.size(); ++i) keys[i].fill(static_cast<uint8_t>(i + 1));
    {
        const auto pool = ta::Context::create().create_pool(options);
        const auto seq = pool.create_sequence();
        feed(pool.create_plan(), seq, 256);
        auto move = seq.move(TA_TIER_HOST, 1, 2);
        EXPECT_EQ(move.wait().state, TA_MOVE_DONE);
        EXPECT_EQ(move.query().moved, 2u);
        move.cancel();
        EXPECT_EQ(seq.residency().host_blocks, 2u);
        EXPECT_EQ(seq.prefetch(1, 2).wait(std::chrono::seconds(60)).state, TA_MOVE_DONE);
        seq.pin(1, 1);
        EXPECT_EQ(seq.residency().pinned_blocks, 1u);
        seq.unpin(1, 1);
        EXPECT_EQ(seq.move(TA_TIER_PEER, 1, 2).wait().moved, 2u);
        EXPECT_EQ(seq.residency().peer_blocks, 2u);
        EXPECT_EQ(pool.tier_stats(TA_TIER_HOST).bytes_budget, 16u << 20);
        EXPECT_GT(pool.move_stats().bytes_asked, 0u);

        const auto space = pool.create_namespace(tenant);
        seq.publish(space, keys);
        struct Table : ta::BlockStore {
            std::map<std::string, std::string> values;
            static std::string key(const ta_store_item& item) { return {reinterpret_cast<const char*>(item.key), 32}; }
            bool exists(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
                for (auto& item : items) item.result = values.count(key(item)) ? TA_STORE_DONE : TA_STORE_ABSENT;
                return true;
            }
            bool get(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
                for (auto& item : items) {
                    const auto found = values.find(key(item));
                    if (found == values.end()) continue;
                    std::memcpy(item.data, found->second.data(), found->second.size());
                    item.bytes = found->second.size();
                    item.result = TA_STORE_DONE;
                }
                return true;
            }
            bool put(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
                for (auto& item : items) {
                    values[key(item)].assign(static_cast<const char*>(item.data), item.bytes);
                    item.result = TA_STORE_DONE;
                }
                return true;
            }
            bool remove(std::span<ta_store_item> items, std::chrono::nanoseconds) override {
                for (auto& item : items) values.erase(key(item)), item.result = TA_STORE_DONE;
                return true;
            }
        };
        const auto table = std::make_shared<Table>();
        space.attach_store(table, {.batch_bytes = 1});
        EXPECT_EQ(space.flush_store(), 0u);
        EXPECT_EQ(table->values.size(), 3u);
        EXPECT_EQ(space.load(keys).wait().present, 3u);
        EXPECT_EQ(space.store_stats().puts, 3u);
        space.detach_store();
        EXPECT_EQ(table.use_count(), 1);
        EXPECT_EQ(status_of([&] { static_cast<void>(space.load(keys)); }), TA_E_STATE);
        const auto events = space.take_events();
        ASSERT_EQ(events.size(), 4u);
        EXPECT_EQ(events[0].kind, TA_PREFIX_RESET);
        EXPECT_EQ(0, std::memcmp(events[1].key, space.hash_keys(keys)[events[1].index].data(), 32));
        EXPECT_EQ(space.match(keys).length, 192);
        space.flush();
        EXPECT_EQ(space.stats().entries, 3u);
    }
    const auto pool = ta::Context::create().create_pool(options);
    const auto space = pool.create_namespace(tenant);
    EXPECT_EQ(space.match(keys).sequence.length(), 192);  // the namespace's handle had gone, not what was published
    space.destroy();
    EXPECT_EQ(status_of([&] { static_cast<void>(space.stats()); }), TA_E_STALE);
}

TEST(Hpp, AStoreThatThrowsHasFailed) {
    struct Broken : ta::BlockStore {
        using Items = std::span<ta_store_item>;
        bool exists(Items, std::chrono::nanoseconds) override { throw std::runtime_error("exists"); }
        bool get(Items, std::chrono::nanoseconds) override { throw std::runtime_error("get"); }
        bool put(Items, std::chrono::nanoseconds) override { throw 1; }
        bool remove(Items, std::chrono::nanoseconds) override { throw 1; }
    };
    const auto pool = ta::Context::create({.threads = 1}).create_pool(shape());
    const auto space = pool.create_namespace({.salt = {1}});
    const std::vector<ta::Key> keys(1), absent(1, ta::Key{1});
    const auto seq = pool.create_sequence();
    feed(pool.create_plan(), seq, 100);
    const auto broken = std::make_shared<Broken>();
    space.attach_store(broken);
    seq.publish(space, keys);
    EXPECT_EQ(space.flush_store(std::chrono::milliseconds(100)), 1u);
    const auto info = space.load(absent).wait();
    EXPECT_EQ(info.state, TA_MOVE_DONE);
    EXPECT_EQ(info.moved, 0u);
    EXPECT_GT(space.store_stats().calls_failed, 0u);
    EXPECT_EQ(space.store_stats().puts, 0u);
    space.detach_store();
    EXPECT_EQ(broken.use_count(), 1);
    EXPECT_EQ(space.match(keys).length, 64);  // the pool is as it was
}

TEST(Hpp, ReservedFittedSuspended) {
    auto options = shape();
    options.budget_bytes = 8 * ta::Context::create().create_pool(shape()).stats().token_block_bytes;
    options.tiers = {.host_bytes = 16 << 20};
    const auto pool = ta::Context::create().create_pool(options);
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    EXPECT_EQ(pool.stats().bytes_free, options.budget_bytes);
    seq.reserve(100);
    const ta_kv_pool_stats stats = pool.stats();
    EXPECT_GT(stats.bytes_promised, 0u);
    EXPECT_EQ(stats.bytes_free + stats.bytes_promised, options.budget_bytes);
    EXPECT_EQ(stats.bytes_reclaimable, 0u);
    EXPECT_EQ(status_of([&] { seq.reserve(1 << 20, -1); }), TA_E_TIER_FULL);
    const std::array<ta_seq, 2> ids{seq.id(), 0};
    const ta_fit fits = pool.fit(ids, std::array{100, 1});
    EXPECT_EQ(fits.now + fits.after_eviction, 2);
    EXPECT_EQ(fits.first_lacking, -1);
    const ta_fit lacks = pool.fit(ids, std::array{100, 1 << 20});
    EXPECT_EQ(lacks.first_lacking, 1);
    EXPECT_GT(lacks.bytes_lacking, 0u);
    EXPECT_EQ(status_of([&] { pool.fit(ids, std::array{1}); }), TA_E_INVALID);

    const auto idle = pool.create_sequence();
    feed(plan, idle, 70);
    feed(plan, seq, 100);
    EXPECT_EQ(pool.stats().bytes_promised, 0u);
    EXPECT_EQ(status_of([&] { plan.begin(seq, 1 << 20, -1, {.wait_ms = -2}); }), TA_E_INVALID);
    EXPECT_EQ(status_of([&] { pool.take_finished_moves(); }), TA_E_STATE);
    EXPECT_GE(pool.descriptor(), 0);
    const auto suspended = idle.suspend(TA_TIER_HOST);
    EXPECT_EQ(suspended.wait().state, TA_MOVE_DONE);
    std::vector<ta_ticket> finished;
    while (finished.empty()) finished = pool.take_finished_moves();
    EXPECT_EQ(finished, std::vector<ta_ticket>{suspended.ticket()});
    EXPECT_EQ(idle.residency().device_bytes, 0u);
    feed(plan, idle, 1);
    EXPECT_EQ(idle.length(), 71);
}

// More than a call of the C ABI is asked for at once.
TEST(Hpp, AllThatWaitsIsTaken) {
    auto options = shape();
    options.tiers = {.host_bytes = 16 << 20};
    const auto pool = ta::Context::create().create_pool(options);
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence(), other = pool.create_sequence();
    feed(plan, seq, 64);
    feed(plan, other, 200);
    ta::NamespaceOptions tenant;
    tenant.salt.fill(9);
    const auto space = pool.create_namespace(tenant);
    constexpr uint32_t kN = 1500;
    for (uint32_t i = 0; i < kN; ++i) {
        std::array<ta::Key, 1> keys{};
        std::memcpy(keys[0].data(), &i, sizeof i);
        seq.publish(space, keys);
    }
    EXPECT_TRUE(space.take_events(0).empty());
    auto events = space.take_events(1100);
    ASSERT_EQ(events.size(), 1100u);
    for (const ta_prefix_event& event : space.take_events(SIZE_MAX)) events.push_back(event);
    ASSERT_EQ(events.size(), kN + 1);
    for (size_t i = 0; i < events.size(); ++i) ASSERT_EQ(events[i].number, i + 1);

    EXPECT_GE(pool.descriptor(), 0);
    std::vector<ta_ticket> want;
    for (uint32_t i = 0; i < kN; ++i) {
        const auto move = other.move(i % 2 ? TA_TIER_DEVICE : TA_TIER_HOST, 1, 1);
        move.wait();
        want.push_back(move.ticket());
    }
    auto got = pool.take_finished_moves(1100);
    while (got.size() < kN)
        for (const ta_ticket ticket : pool.take_finished_moves(SIZE_MAX)) got.push_back(ticket);
    EXPECT_EQ(got, want);
    space.destroy();
    EXPECT_EQ(status_of([&] { space.take_events(SIZE_MAX); }), TA_E_STALE);

    const auto context = ta::results::Context::create();
    ASSERT_TRUE(context);
    const auto result = context->create_pool(options);
    ASSERT_TRUE(result);
    EXPECT_EQ(result->take_finished_moves(SIZE_MAX).error().status(), TA_E_STATE);
}

}  // namespace
}  // namespace hpp_tests
