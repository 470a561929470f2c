// Loads from a store: their tickets, their ends, the room that they find, and what they count.
#include <poll.h>

#include "abi/store_steps.h"

namespace ta::testing {
namespace {

using namespace std::chrono_literals;

TEST_F(Store, TicketsAreThoseOfThePool) {
    fill();
    for (const bool tiered : {false, true}) {
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = 4 << 20;
        auto o = options();
        o.tiers = tiered ? &tiers : nullptr;
        const KvPool pool = make_pool(context, o);
        const ta_namespace space = make_namespace(pool, 1);
        int32_t fd = -1;
        ta_error err;
        EXPECT_EQ(ta_kv_pool_descriptor(pool.get(), &fd, nullptr), tiered ? TA_OK : TA_E_UNSUPPORTED);
        attach_store(pool, space, store.attach());
        require(ta_kv_pool_descriptor(pool.get(), &fd, &err), err);
        ta_ticket taken[4] = {};
        const ta_ticket ticket = start_load(pool, space);
        pollfd p{fd, POLLIN, 0};
        ASSERT_EQ(poll(&p, 1, 20000), 1);
        uint64_t n = 0;
        require(ta_move_take_finished(pool.get(), taken, 4, &n, &err), err);
        ASSERT_EQ(n, 1u);
        EXPECT_EQ(taken[0], ticket);
        EXPECT_EQ(poll(&p, 1, 0), 0);
        auto info = sized<ta_move_info>();
        require(ta_move_query(pool.get(), ticket, &info, &err), err);
        EXPECT_EQ(info.moved, kBlocks);
        EXPECT_EQ(ta_move_query(pool.get(), ticket + 1, &info, nullptr), TA_E_STALE);
        EXPECT_EQ(ta_move_query(pool.get(), 17, &info, nullptr), TA_E_STALE);
        EXPECT_EQ(ta_move_cancel(pool.get(), ticket, nullptr), TA_OK);  // too late
    }
}

TEST_F(Store, ALoadThatIsCancelledEndsAfterTheCallThatRuns) {
    fill();
    HeldCall get;
    hold(get, MemoryStore::kGet, 2);
    const KvPool pool = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF, 1);
    const ta_ticket first = start_load(pool, space);
    const ta_ticket second = start_load(pool, space);
    ta_error err;
    EXPECT_TRUE(soon([&] { return get.calls == 2; }));
    require(ta_move_cancel(pool.get(), first, &err), err);
    require(ta_move_cancel(pool.get(), second, &err), err);
    get.waits = false;
    for (const ta_ticket t : {first, second}) {
        const ta_move_info info = wait(pool, t);
        EXPECT_EQ(info.state, TA_MOVE_CANCELLED);
        EXPECT_EQ(info.status, TA_E_CANCELLED);
    }
    expect_right(pool, space, 2);
    store.well();
}

// The header's maximum, of all namespaces of the pool together. A load that ends makes room for another, whether its ticket is taken
// or not.
TEST_F(Store, NoMoreThan4096LoadsWait) {
    fill();
    HeldCall get;
    hold(get, MemoryStore::kGet, 1);
    const KvPool pool = make_pool(context, options());
    const ta_namespace spaces[] = {make_namespace(pool, 1), make_namespace(pool, 2)};
    for (const ta_namespace space : spaces) attach_store(pool, space, store.attach(), 20000, TA_DEFAULT, TA_OFF);
    const auto wanted = keys(kText, kBlocks);
    ta_error err;
    const auto load = [&](ta_namespace space, ta_ticket* ticket) {
        return ta_namespace_load(pool.get(), space, wanted.data(), kBlocks, ticket, &err);
    };
    std::vector<ta_ticket> tickets(1);
    require(load(spaces[0], tickets.data()), err);
    ASSERT_TRUE(soon([&] { return get.calls == 1; }));
    for (size_t i = 1; i < 4096; ++i) require(load(spaces[0], &tickets.emplace_back()), err);
    for (const ta_namespace space : spaces) {
        ta_ticket none = 17;
        EXPECT_EQ(load(space, &none), TA_E_LIMIT);
        EXPECT_NE(std::string(err.message).find("4096"), std::string::npos) << err.message;
        EXPECT_EQ(none, 17u);
    }
    get.waits = false;
    const auto comes = [&](ta_ticket ticket) {
        const ta_move_info info = wait(pool, ticket);
        EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
        EXPECT_EQ(info.moved + info.present, kBlocks);
    };
    comes(tickets[0]);
    ta_ticket next = 0;
    require(load(spaces[0], &next), err);
    for (const ta_ticket t : tickets) comes(t);
    comes(next);
    expect_right(pool, spaces[0], kBlocks);
    store.well();
}

TEST_F(Store, QuotaAndRoomEndALoad) {
    fill();
    const ta_kv_pool_stats s = stats(reference);
    {
        const KvPool pool = make_pool(context, options());
        const ta_namespace space = make_namespace(pool, 1, s.token_block_bytes + s.channel_block_bytes);
        attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF, 1);
        // Unused entries give way to others of the same prefix's end: no more than the quota is ever there.
        const ta_move_info info = load_from_store(pool, space, keys(kText, kBlocks));
        EXPECT_GE(info.state, TA_MOVE_DONE);
        EXPECT_LE(space_stats(pool, space).bytes, s.token_block_bytes + s.channel_block_bytes);
        const auto [seq, n] = match(pool, space, kText, kBlocks);
        EXPECT_TRUE(same_values(pool, seq, reference, text, n));
    }
    auto o = options();
    o.budget_bytes = 2 * s.token_block_bytes + s.channel_block_bytes;
    const KvPool pool = make_pool(context, o);
    const ta_namespace space = make_namespace(pool, 1);
    attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF);
    const ta_seq taken = write(pool, 64, 8);
    const ta_move_info info = load_from_store(pool, space, keys(kText, kBlocks));
    EXPECT_EQ(info.state, TA_MOVE_FAILED);
    EXPECT_EQ(info.status, TA_E_TIER_FULL);
    EXPECT_EQ(length(pool, taken), 64);
    const auto [seq, n] = match(pool, space, kText, kBlocks);
    EXPECT_TRUE(same_values(pool, seq, reference, text, n));
}

// A load into a full pool has blocks of the prefix that are here already, but those of a sequence with a reservation, or in a plan,
// stay where the device reads them.
TEST_F(Store, ALoadLeavesWhatOthersReadInMemory) {
    constexpr size_t kHere = 10, kLong = 20;
    fill(store, make_publisher(options(), kLong));
    for (const bool reserves : {true, false}) {
        SCOPED_TRACE(reserves ? "a reservation" : "a plan");
        const ta_kv_pool_stats s = stats(reference);
        auto tiers = sized<ta_tier_options>();
        tiers.disk_bytes = 8 << 20;
        tiers.begin_wait_ms = 50;
        auto o = options();
        o.budget_bytes = 4 * s.token_block_bytes + 13 * s.channel_block_bytes;
        o.tiers = &tiers;
        const KvPool pool = make_pool(context, o);
        const ta_namespace space = make_namespace(pool, 1);
        attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF);
        ASSERT_EQ(load_from_store(pool, space, keys(kText, kHere)).moved, kHere);
        const ta_seq seq = match(pool, space, kText, kHere).first;
        const Plan plan = make_plan(pool);
        ta_error err;
        if (reserves) {
            require(ta_seq_reserve(pool.get(), seq, 64, 0, &err), err);
        } else {
            begin(plan, {seq}, {0});
        }
        const ta_move_info info = load_from_store(pool, space, keys(kText, kLong));
        if (reserves) {
            EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
            EXPECT_EQ(info.moved, kLong - kHere);
        } else {
            require(ta_plan_abort(plan.get(), &err), err);
        }
        EXPECT_EQ(residency(pool, seq).disk_blocks, 0u);
        EXPECT_GT(tier_stats(pool, TA_TIER_DISK).blocks, 0u);
        auto at_once = sized<ta_step_options>();
        at_once.wait_ms = -1;
        const int32_t one = 1;
        if (reserves) {
            EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &one, nullptr, &at_once, &err), TA_OK) << err.message;
        }
    }
}

TEST_F(Store, WhatOthersPublishDuringALoadIsPresent) {
    fill();
    for (const uint64_t batch : {uint64_t{0}, uint64_t{1}}) {
        SCOPED_TRACE(batch);
        HeldCall get;
        hold(get, MemoryStore::kGet, 1);
        const KvPool pool = make_pool(context, options());
        const ta_namespace space = make_namespace(pool, 1);
        attach_store(pool, space, store.attach(), 60000, TA_DEFAULT, TA_OFF, batch);
        const ta_ticket ticket = start_load(pool, space);
        ASSERT_TRUE(soon([&] { return get.calls == 1; }));
        publish(pool, write(pool, 3 * 64, kText), space, kText, 3);
        get.waits = false;
        const ta_move_info info = wait(pool, ticket);
        EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
        EXPECT_EQ(info.present, 3u);
        EXPECT_EQ(info.moved, kBlocks - 3);
        EXPECT_EQ(info.skipped, 0u);
        EXPECT_EQ(store_stats(pool, space).misses, 0u);
        expect_right(pool, space, kBlocks);
        store.well();
    }
}

// A pool with a host tier whose begins wait for a minute: nothing may last so long.
class StoreWithoutRoom : public Store {
  protected:
    static constexpr auto kSoon = 20s;

    KvPool make_small_pool() {
        tiers.host_bytes = 4 << 20;
        tiers.begin_wait_ms = 60000;
        auto o = options(8);
        o.budget_bytes = 6 * stats(make_pool(context, o)).token_block_bytes;
        o.tiers = &tiers;
        return make_pool(context, o);
    }
    // Blocks that fill the device tier and do not leave it.
    static void fill_up(const KvPool& pool) {
        const ta_seq seq = write(pool, 6 * 64, 8);
        ta_error err;
        require(ta_seq_pin(pool.get(), seq, 0, 6, &err), err);
        move(pool, seq, 6, TA_TIER_DEVICE);  // some may have left before they were pinned
        ASSERT_EQ(residency(pool, seq).device_blocks, 6u);
    }
    // The store with the text in it, as pools of 8 bits have it.
    void fill_with_8_bits(const std::vector<uint8_t>& salts) {
        for (const uint8_t salt : salts) fill(store, make_publisher(options(8), kBlocks, kText, salt));
    }

    ta_tier_options tiers = sized<ta_tier_options>();
};

TEST_F(StoreWithoutRoom, ALoadDoesNotWaitForWhatItHoldsItself) {
    fill_with_8_bits({1});
    const KvPool pool = make_small_pool();
    const ta_namespace space = make_namespace(pool, 1);
    fill_up(pool);
    attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF);
    const auto start = std::chrono::steady_clock::now();
    const ta_move_info info = wait(pool, start_load(pool, space));
    EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon);
    EXPECT_EQ(info.state, TA_MOVE_FAILED);
    EXPECT_EQ(info.status, TA_E_TIER_FULL);
}

// Nor do two loads wait for each other.
TEST_F(StoreWithoutRoom, LoadsDoNotWaitForEachOther) {
    fill_with_8_bits({1, 2});
    const KvPool pool = make_small_pool();
    const ta_namespace spaces[] = {make_namespace(pool, 1), make_namespace(pool, 2)};
    fill_up(pool);
    std::atomic<int> inside{0};
    store.before([&](Function f, ta_store_item*, uint64_t) {
        if (f != MemoryStore::kGet) return 0;
        for (++inside; inside < 2;) std::this_thread::yield();
        return 0;
    });
    for (const ta_namespace space : spaces) attach_store(pool, space, store.attach(), 60000, TA_DEFAULT, TA_OFF);
    const auto start = std::chrono::steady_clock::now();
    const ta_ticket tickets[] = {start_load(pool, spaces[0]), start_load(pool, spaces[1])};
    for (const ta_ticket ticket : tickets) {
        const ta_move_info info = wait(pool, ticket);
        EXPECT_EQ(info.status, TA_E_TIER_FULL) << info.moved << " came, " << info.skipped << " did not";
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon);
    store.well();
}

// An open plan reads where blocks have left, so the load waits for it. Whatever ends the load meanwhile does not.
TEST_F(StoreWithoutRoom, ALoadThatWaitsForRoomCanBeEnded) {
    enum { kCancel, kDetach, kDestroySpace, kClose };
    fill_with_8_bits({1});
    for (const int end : {kCancel, kDetach, kDestroySpace, kClose}) {
        SCOPED_TRACE(end);
        const KvPool pool = make_small_pool();
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 5 * 64, 8);
        const Plan plan = make_plan(pool);
        begin(plan, {seq}, {64});
        attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF);
        const ta_ticket ticket = start_load(pool, space), behind = start_load(pool, space);
        EXPECT_EQ(wait(pool, ticket, 300'000'000).state, TA_MOVE_RUNNING);
        const auto start = std::chrono::steady_clock::now();
        ta_error err;
        require(ta_move_cancel(pool.get(), behind, &err), err);
        EXPECT_EQ(wait(pool, behind).state, TA_MOVE_CANCELLED);
        EXPECT_EQ(wait(pool, ticket, 0).state, TA_MOVE_RUNNING);
        switch (end) {
            case kCancel:
                require(ta_move_cancel(pool.get(), ticket, &err), err);
                break;
            case kDetach:
                require(ta_namespace_detach_store(pool.get(), space, &err), err);
                break;
            case kDestroySpace:
                require(ta_namespace_destroy(pool.get(), space, &err), err);
                break;
            default:
                require(ta_kv_pool_close(pool.get(), &err), err);
        }
        if (end == kClose) {
            EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon);
            EXPECT_EQ(ta_move_cancel(pool.get(), ticket, nullptr), TA_E_CLOSED);
            continue;
        }
        const ta_move_info info = wait(pool, ticket);
        EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon);
        const ta_status why[] = {TA_E_CANCELLED, TA_E_CANCELLED, TA_E_STALE};
        EXPECT_EQ(info.state, end == kCancel ? TA_MOVE_CANCELLED : TA_MOVE_FAILED);
        EXPECT_EQ(info.status, why[end]) << ta_status_name(info.status);
        EXPECT_EQ(info.moved + info.present + info.skipped, kBlocks);
    }
}

// Once the plan ends, the load has its room.
TEST_F(StoreWithoutRoom, ALoadWaitsForReaders) {
    fill_with_8_bits({1});
    const KvPool pool = make_small_pool();
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 5 * 64, 8);
    Plan plan = make_plan(pool);
    begin(plan, {seq}, {64});
    attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF);
    const ta_ticket ticket = start_load(pool, space);
    EXPECT_EQ(wait(pool, ticket, 300'000'000).state, TA_MOVE_RUNNING);
    plan.reset();
    const ta_move_info info = wait(pool, ticket);
    EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
    EXPECT_EQ(info.moved, kBlocks);
}

// Nobody waits for a block that a load holds while the store removes a bad value.
TEST_F(StoreWithoutRoom, NothingIsHeldWhileABadValueIsRemoved) {
    fill_with_8_bits({1});
    auto values = store.values();
    for (auto& [key, value] : values) value[value.size() / 2] ^= 1;
    store.set(values);
    HeldCall remove;
    hold(remove, MemoryStore::kRemove, 1);
    const KvPool pool = make_small_pool();
    const ta_namespace space = make_namespace(pool, 1);
    fill_up(pool);
    attach_store(pool, space, store.attach(), 60000, TA_DEFAULT, TA_OFF);
    const ta_ticket ticket = start_load(pool, space);
    ASSERT_TRUE(soon([&] { return remove.calls == 1; }));
    const ta_seq other = make_sequence(pool);
    const Plan plan = make_plan(pool);
    const int32_t tokens = 64, none = 0;
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &other, &tokens, &none, nullptr, nullptr), TA_E_TIER_FULL);
    EXPECT_LT(std::chrono::steady_clock::now() - start, kSoon);
    remove.waits = false;
    EXPECT_EQ(wait(pool, ticket).moved, 0u);
    store.well();
}

TEST_F(StoreWithoutRoom, ABlockThatIsDroppedAndComesAgainCountsOnce) {
    constexpr uint64_t kLong = 10;
    fill(store, make_publisher(options(8), kLong));
    const KvPool pool = make_pool(context, options(8));
    // Here the second half of the text is published; the quota has taken the first one.
    const ta_namespace space = make_namespace(pool, 1, 12 * stats(pool).token_block_bytes);
    const auto publish_text = [&](uint64_t of, size_t n, size_t cold) {
        const ta_seq seq = match(pool, space, of, 0).first;
        grow(pool, seq, int32_t(n) * 64, of);
        publish(pool, seq, space, of, n);
        auto low = sized<ta_retention>();
        low.priority = 1;
        ta_error err;
        if (cold > 0) require(ta_seq_retain(pool.get(), seq, 0, cold, &low, &err), err);
        release(pool, seq);
    };
    publish_text(kText, kLong, kLong / 2);
    publish_text(50, 7, 0);
    ASSERT_EQ(match(pool, space, kText, 1).second, 0);
    HeldCall get;
    hold(get, MemoryStore::kGet, 2);
    attach_store(pool, space, store.attach(), 60000, TA_DEFAULT, TA_OFF, 1);
    const ta_ticket ticket = start_load(pool, space, kLong);
    ASSERT_TRUE(soon([&] { return get.calls == 2; }));
    const ta_move_info before = wait(pool, ticket, 0);
    EXPECT_EQ(before.moved, 1u);
    EXPECT_EQ(before.present, kLong / 2);
    publish_text(60, 11, 0);  // takes the quota of what was present
    get.waits = false;
    const ta_move_info info = wait(pool, ticket);
    EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
    EXPECT_GT(info.moved, kLong / 2);
    EXPECT_EQ(info.moved + info.present + info.skipped, kLong);
    EXPECT_LE(std::max({info.moved, info.present, info.skipped}), kLong);
    EXPECT_GT(store_stats(pool, space).hits, kLong / 2) << "what was present did not go";
    store.well();
}

}  // namespace
}  // namespace ta::testing
