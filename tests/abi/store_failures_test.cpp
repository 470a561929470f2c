// Stores that fail, stall and lose what they had: nothing waits for them, and they are asked again.
#include "abi/store_steps.h"

namespace ta::testing {
namespace {

using namespace std::chrono_literals;

// Each function fails at each of its first calls: as a whole, in its items, and silently.
TEST_F(Store, FailuresAreMissesAndPass) {
    for (const Function f : {MemoryStore::kExists, MemoryStore::kGet, MemoryStore::kPut, MemoryStore::kRemove}) {
        for (int at = 0; at < 3; ++at) {
            for (int how = 0; how < 2; ++how) {
                SCOPED_TRACE(std::to_string(f) + " at call " + std::to_string(at) + " way " + std::to_string(how));
                store.set({});
                std::atomic<int> seen{0};
                store.before([&, f, at, how](Function now, ta_store_item* items, uint64_t n) -> int32_t {
                    if (now != f || seen++ != at) return 0;
                    for (uint64_t i = 0; i < n; ++i) items[i].result = TA_STORE_FAILED;
                    return how == 0 ? -5 : 0;
                });
                const Publisher p = make_publisher();
                attach_store(p.pool, p.space, store.attach(), 0, TA_DEFAULT, TA_DEFAULT, 1);
                EXPECT_TRUE(soon([&] { return store.values().size() == kBlocks; })) << store_stats(p.pool, p.space).failure;
                const KvPool pool = make_pool(context, options());
                const ta_namespace space = make_namespace(pool, 1);
                attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF, 1);
                EXPECT_TRUE(soon([&] {
                    const ta_move_info info = load_from_store(pool, space, keys(kText, kBlocks));
                    EXPECT_EQ(info.state, TA_MOVE_DONE);
                    return info.moved + info.present == kBlocks;
                }));
                expect_right(pool, space, kBlocks);
                store.well();
                EXPECT_EQ(flush_store(p.pool, p.space), 0u);
            }
        }
    }
}

TEST_F(Store, AStoreThatIsDownCostsNothingAndIsAskedAgain) {
    std::atomic<bool> down{true};
    store.before([&](Function, ta_store_item*, uint64_t) { return down ? -111 : 0; });
    const Publisher p = make_publisher();
    attach_store(p.pool, p.space, store.attach());
    EXPECT_EQ(flush_store(p.pool, p.space), kBlocks);
    const int calls = store.calls(MemoryStore::kGet);
    for (int i = 0; i < 50; ++i) EXPECT_EQ(load_from_store(p.pool, p.space, keys(9, 4)).moved, 0u);
    EXPECT_LT(store.calls(MemoryStore::kGet) - calls, 20) << "a store that is down is asked for each load";
    ta_store_stats s = store_stats(p.pool, p.space);
    EXPECT_EQ(s.pausing, 1);
    EXPECT_GT(s.calls_failed, 0u);
    EXPECT_EQ(s.puts, 0u);
    EXPECT_STRNE(s.failure, "");
    down = false;
    EXPECT_TRUE(soon([&] { return store.values().size() == kBlocks; }));
    EXPECT_TRUE(soon([&] { return store_stats(p.pool, p.space).pausing == 0; }));
    EXPECT_EQ(come(), kBlocks);
}

TEST_F(Store, AStoreThatLosesAllIsFilledByAFlush) {
    const Publisher p = make_publisher();
    attach_store(p.pool, p.space, store.attach());
    EXPECT_EQ(flush_store(p.pool, p.space), 0u);
    store.set({});
    EXPECT_EQ(come(), 0u);
    EXPECT_EQ(flush_store(p.pool, p.space), 0u);
    EXPECT_EQ(come(), kBlocks);
    // Emptied between two calls of a load.
    std::atomic<int> gets{0};
    store.before([&](Function f, ta_store_item*, uint64_t) {
        if (f == MemoryStore::kGet && ++gets == 3) store.set({});
        return 0;
    });
    const KvPool pool = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    attach_store(pool, space, store.attach(), 0, TA_DEFAULT, TA_OFF, 1);
    EXPECT_EQ(load_from_store(pool, space, keys(kText, kBlocks)).moved, 2u);
    expect_right(pool, space, 2);
    store.well();
}

// A function that does not return in time: neither steps nor loads nor publishes wait for it, and what it does later is ignored.
TEST_F(Store, AStoreThatStallsHoldsUpNobody) {
    fill();
    for (const Function f : {MemoryStore::kExists, MemoryStore::kGet, MemoryStore::kPut}) {
        std::atomic<bool> stalls{true};
        store.before([&, f](Function now, ta_store_item*, uint64_t) {
            while (now == f && stalls) std::this_thread::sleep_for(1ms);
            return 0;
        });
        if (f == MemoryStore::kPut) store.set({});
        MemoryStore::Client* client = nullptr;
        Publisher p = make_publisher();
        attach_store(p.pool, p.space, store.attach(&client), 40);
        const ta_seq other = write(p.pool, 64, 8);
        const auto start = std::chrono::steady_clock::now();
        publish(p.pool, other, p.space, 8, 1);
        if (f != MemoryStore::kGet) {
            EXPECT_GT(flush_store(p.pool, p.space, 0), 0u);
        }
        const ta_move_info info = load_from_store(p.pool, p.space, keys(9, 1));
        EXPECT_EQ(info.state, TA_MOVE_DONE);
        EXPECT_EQ(info.moved, 0u);
        grow(p.pool, other, 3, 8);
        EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
        EXPECT_TRUE(soon([&] { return store_stats(p.pool, p.space).timeouts > 0; }));
        EXPECT_EQ(store_stats(p.pool, p.space).pausing, 1);
        stalls = false;
        EXPECT_TRUE(soon([&] { return flush_store(p.pool, p.space) == 0; }));
        EXPECT_EQ(client->at_once, 0);
        EXPECT_EQ(come(), kBlocks);
        store.well();
    }
}

// While a function does not return, nothing else is called, and what is not called is not counted.
TEST_F(Store, CallsThatAreNotMadeAreNotCounted) {
    for (const ta_switch write_through : {TA_OFF, TA_ON}) {
        HeldCall held;
        store.before([&](Function, ta_store_item*, uint64_t) {
            ++held.calls;
            while (held.waits) std::this_thread::sleep_for(1ms);
            return 0;
        });
        const Publisher p = make_publisher();
        attach_store(p.pool, p.space, store.attach(), 50, TA_DEFAULT, write_through);
        if (write_through == TA_OFF) (void)load_from_store(p.pool, p.space, keys(9, 2));
        ASSERT_TRUE(soon([&] { return store_stats(p.pool, p.space).timeouts == 1; }));
        const ta_store_stats first = store_stats(p.pool, p.space);
        const auto until = std::chrono::steady_clock::now() + 500ms;  // the pauses are 50 ms, 100 ms and 200 ms at first
        while (std::chrono::steady_clock::now() < until) {
            EXPECT_EQ(load_from_store(p.pool, p.space, keys(9, 2)).moved, 0u);
            if (write_through == TA_ON) {
                EXPECT_EQ(flush_store(p.pool, p.space), kBlocks);
            }
            std::this_thread::sleep_for(10ms);
        }
        const ta_store_stats s = store_stats(p.pool, p.space);
        EXPECT_EQ(held.calls, 1);
        EXPECT_EQ(s.calls, 1u);
        EXPECT_EQ(s.timeouts, 1u);
        EXPECT_EQ(s.put_failures, first.put_failures);
        EXPECT_EQ(s.failed_unix_ms, first.failed_unix_ms);
        EXPECT_EQ(s.pausing, 1);
        held.waits = false;
        EXPECT_TRUE(soon([&] {
            return load_from_store(p.pool, p.space, keys(9, 2)).state == TA_MOVE_DONE &&
                   store_stats(p.pool, p.space).pausing == 0;
        }));
        store.well();
    }
}

// Ends with a function that does not return: bounded, and `release` comes once, after it.
TEST_F(Store, EndsDoNotWaitForAStoreThatStalls) {
    enum { kDetach, kDestroySpace, kClose, kDestroy };
    for (const int end : {kDetach, kDestroySpace, kClose, kDestroy}) {
        SCOPED_TRACE(end);
        std::atomic<bool> stalls{true};
        std::atomic<int> inside{0};
        store.before([&](Function, ta_store_item*, uint64_t) {
            ++inside;
            while (stalls) std::this_thread::sleep_for(1ms);
            return 0;
        });
        MemoryStore::Client* client = nullptr;
        Publisher p = make_publisher();
        attach_store(p.pool, p.space, store.attach(&client), 300);
        EXPECT_TRUE(soon([&] { return inside > 0; }));
        ta_ticket ticket = testing::start_load(p.pool, p.space, keys(9, 2));
        ta_error err;
        const auto start = std::chrono::steady_clock::now();
        auto info = sized<ta_move_info>();
        switch (end) {
            case kDetach:
                require(ta_namespace_detach_store(p.pool.get(), p.space, &err), err);
                require(ta_move_query(p.pool.get(), ticket, &info, &err), err);
                EXPECT_TRUE(info.status == TA_E_CANCELLED || info.state == TA_MOVE_DONE) << ta_status_name(info.status);
                EXPECT_EQ(ta_namespace_load(p.pool.get(), p.space, keys(9, 2).data(), 2, &ticket, nullptr), TA_E_STATE);
                break;
            case kDestroySpace:
                require(ta_namespace_destroy(p.pool.get(), p.space, &err), err);
                require(ta_move_query(p.pool.get(), ticket, &info, &err), err);
                EXPECT_GE(info.state, TA_MOVE_DONE);
                break;
            case kClose:
                require(ta_kv_pool_close(p.pool.get(), &err), err);
                break;
            default:
                p.pool.reset();
        }
        EXPECT_LT(std::chrono::steady_clock::now() - start, 3s);
        EXPECT_EQ(client->released, 0) << "released while a function of it ran";
        stalls = false;
        EXPECT_TRUE(soon([&] { return client->released == 1; }));
        p.pool.reset();
        std::this_thread::sleep_for(20ms);
        EXPECT_EQ(client->released, 1);
        EXPECT_EQ(client->after_release, 0);
        store.well();
    }
}

}  // namespace
}  // namespace ta::testing
