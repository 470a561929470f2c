// Published blocks in a store of the caller's: prefixes that pools share through it, and stores that fail, stall, lose and lie.
// Whatever the store does, a block that is matched is the one that was published.
#define XXH_INLINE_ALL
#include <poll.h>
#include <xxhash.h>

#include <cstring>

#include "abi/prefix_steps.h"
#include "support/memory_store.h"

namespace ta::testing {
namespace {

using Function = MemoryStore::Function;
using namespace std::chrono_literals;

class Store : public PrefixSteps {
  protected:
    static constexpr uint64_t kText = 7;
    static constexpr size_t kBlocks = 5;

    // A pool with a text of kBlocks blocks that is published.
    struct Publisher {
        KvPool pool;
        ta_namespace space;
    };
    Publisher make_publisher(const ta_kv_pool_options& o = options()) {
        Publisher p{make_pool(context, o), 0};
        p.space = make_namespace(p.pool, 1);
        const ta_seq seq = write(p.pool, kBlocks * 64, kText);
        publish(p.pool, seq, p.space, kText, kBlocks);
        release(p.pool, seq);
        return p;
    }
    // The store with that text in it.
    void fill(ta_switch authenticate = TA_DEFAULT) {
        const Publisher p = make_publisher();
        attach_store(p.pool, p.space, store.attach(), 0, authenticate);
        ASSERT_EQ(flush_store(p.pool, p.space), 0u);
        ASSERT_EQ(store.values().size(), kBlocks);
    }
    // Loads into a fresh pool now. Returns how many blocks came, each of them the right one.
    uint64_t come(ta_switch authenticate = TA_DEFAULT, ta_store_stats* seen = nullptr) {
        const KvPool pool = make_pool(context, options());
        const ta_namespace space = make_namespace(pool, 1);
        attach_store(pool, space, store.attach(), 200, authenticate, TA_OFF);
        const ta_move_info info = load_from_store(pool, space, keys(kText, kBlocks));
        EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
        EXPECT_EQ(info.moved + info.skipped, kBlocks);
        if (seen) *seen = store_stats(pool, space);
        expect_right(pool, space, info.moved);
        return info.moved;
    }
    // The nth call of a function does not return while `held` waits.
    struct HeldCall {
        std::atomic<bool> waits{true};
        std::atomic<int> calls{0};
    };
    void hold(HeldCall& held, Function function, int nth) {
        store.before([&held, function, nth](Function f, ta_store_item*, uint64_t) {
            if (f == function && ++held.calls == nth) {
                while (held.waits) std::this_thread::sleep_for(1ms);
            }
            return 0;
        });
    }
    // The first n blocks of the text are published there, and no more.
    void expect_right(const KvPool& pool, ta_namespace space, uint64_t n) {
        const auto [seq, tokens] = match(pool, space, kText, kBlocks);
        EXPECT_EQ(tokens, int64_t(n) * 64);
        verify(pool, seq);
        EXPECT_TRUE(same_values(pool, seq, reference, text, tokens));
        release(pool, seq);
    }

    MemoryStore store;
    const KvPool reference = make_pool(context, options());
    const ta_seq text = write(reference, kBlocks * 64, kText);
};

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

// Every part of a value, in turn, and all that may be given in its place.
TEST_F(Store, NoWrongByteIsEverTaken) {
    fill();
    const auto good = store.values();
    const std::string first = [&] {  // the key of block 0
        std::string key;
        store.before([&](Function f, ta_store_item* items, uint64_t) {
            if (f == MemoryStore::kGet && key.empty()) key.assign(reinterpret_cast<const char*>(items[0].key), 32);
            return 0;
        });
        EXPECT_EQ(come(), kBlocks);
        store.well();
        return key;
    }();
    const auto refuses = [&](const char* what, const MemoryStore::Value& value) {
        SCOPED_TRACE(what);
        auto values = good;
        values[first] = value;
        store.set(values);
        ta_store_stats seen;
        EXPECT_EQ(come(TA_DEFAULT, &seen), 0u);
        EXPECT_EQ(seen.refused, 1u);
        EXPECT_GT(seen.failed_unix_ms, 0);
        EXPECT_STRNE(seen.failure, "");
        EXPECT_EQ(store.values().count(first), 0u) << "a bad value stays";
        EXPECT_EQ(store.values().size(), kBlocks - 1);
    };
    const MemoryStore::Value& value = good.at(first);
    Random random(3);
    for (int i = 0; i < 400; ++i) {
        MemoryStore::Value bad = value;
        const auto at = size_t(i < 128 ? i : random.below(int64_t(bad.size())));
        bad[at] ^= uint8_t(1 << random.below(8));
        refuses("a flipped bit", bad);
    }
    for (const size_t bytes : {size_t{0}, size_t{1}, size_t{127}, size_t{128}, size_t{129}, value.size() - 1}) {
        refuses("cut", {value.begin(), value.begin() + ptrdiff_t(bytes)});
    }
    MemoryStore::Value longer = value;
    longer.push_back(0);
    refuses("longer", longer);
    longer.resize(value.size() * 3);
    refuses("larger than the room", longer);
    refuses("zeros", MemoryStore::Value(value.size()));
    for (const auto& [key, other] : good) {
        if (key != first) refuses("another key's", other);
    }
    // A value of a pool of another shape, and of another namespace, under this key.
    for (const bool shape : {false, true}) {
        MemoryStore elsewhere;
        const KvPool pool = make_pool(context, options(shape ? 2 : 4));
        const ta_namespace space = make_namespace(pool, shape ? 1 : 9);
        const ta_seq seq = write(pool, 64, kText);
        publish(pool, seq, space, kText, 1);
        attach_store(pool, space, elsewhere.attach());
        ASSERT_EQ(flush_store(pool, space), 0u);
        refuses(shape ? "of another shape" : "of another namespace", elsewhere.values().begin()->second);
    }
    store.set(good);
    EXPECT_EQ(come(), kBlocks);
}

// Whoever can write to the store can make any hash, and no seal.
TEST_F(Store, AForgedSealIsRefused) {
    fill();
    auto values = store.values();
    for (auto& [key, value] : values) {
        constexpr size_t kSeal = 80, kHash = 120;  // docs/FORMAT.md, section 10
        value[kSeal] ^= 1;
        const uint64_t hash = XXH3_64bits(value.data(), kHash);
        std::memcpy(value.data() + kHash, &hash, sizeof hash);
    }
    store.set(values);
    ta_store_stats seen;
    EXPECT_EQ(come(TA_DEFAULT, &seen), 0u);
    EXPECT_EQ(seen.refused, 1u);
    EXPECT_NE(std::string(seen.failure).find("seal"), std::string::npos) << seen.failure;
    store.set(values);
    EXPECT_EQ(come(TA_OFF), kBlocks) << "all else is right";
}

// Refused in the middle: what comes before stays.
TEST_F(Store, ABadBlockInTheMiddleEndsALoad) {
    fill();
    auto values = store.values();
    const auto good = values;
    uint64_t sum = 0;
    for (const auto& [key, value] : good) {
        values = good;
        values[key][value.size() / 2] ^= 1;
        store.set(values);
        ta_store_stats seen;
        const uint64_t n = come(TA_DEFAULT, &seen);
        EXPECT_EQ(seen.refused, 1u);
        EXPECT_EQ(seen.hits, n);
        sum += n;
    }
    EXPECT_EQ(sum, 0u + 1 + 2 + 3 + 4);
}

TEST_F(Store, ValuesWithoutASealAreRefusedWhereSealsAreAskedFor) {
    fill(TA_OFF);
    const auto good = store.values();
    EXPECT_EQ(come(TA_OFF), kBlocks);
    ta_store_stats seen;
    EXPECT_EQ(come(TA_DEFAULT, &seen), 0u);
    EXPECT_EQ(seen.refused, 1u);
    // Damage is found all the same.
    Random random(5);
    for (int i = 0; i < 60; ++i) {
        auto bad = good;
        for (auto& [key, value] : bad) value[size_t(random.below(int64_t(value.size())))] ^= uint8_t(1 << random.below(8));
        store.set(bad);
        EXPECT_EQ(come(TA_OFF, &seen), 0u);
        EXPECT_EQ(seen.refused, 1u);
    }
    // So is the first block of another text.
    MemoryStore elsewhere;
    const KvPool pool = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    publish(pool, write(pool, 64, 8), space, 8, 1);
    attach_store(pool, space, elsewhere.attach(), 0, TA_OFF);
    ASSERT_EQ(flush_store(pool, space), 0u);
    auto bad = good;
    for (auto& [key, value] : bad) value = elsewhere.values().begin()->second;
    store.set(bad);
    EXPECT_EQ(come(TA_OFF, &seen), 0u);
    EXPECT_EQ(seen.refused, 1u);
}

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
        ta_ticket ticket = 0;
        ta_error err;
        require(ta_namespace_load(p.pool.get(), p.space, keys(9, 2).data(), 2, &ticket, &err), err);
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
        ta_ticket ticket = 0, taken[4] = {};
        require(ta_namespace_load(pool.get(), space, keys(kText, kBlocks).data(), kBlocks, &ticket, &err), err);
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
    ta_ticket first = 0, second = 0;
    ta_error err;
    require(ta_namespace_load(pool.get(), space, keys(kText, kBlocks).data(), kBlocks, &first, &err), err);
    require(ta_namespace_load(pool.get(), space, keys(kText, kBlocks).data(), kBlocks, &second, &err), err);
    EXPECT_TRUE(soon([&] { return get.calls == 2; }));
    require(ta_move_cancel(pool.get(), first, &err), err);
    require(ta_move_cancel(pool.get(), second, &err), err);
    get.waits = false;
    for (const ta_ticket t : {first, second}) {
        auto info = sized<ta_move_info>();
        require(ta_move_wait(pool.get(), t, -1, &info, &err), err);
        EXPECT_EQ(info.state, TA_MOVE_CANCELLED);
        EXPECT_EQ(info.status, TA_E_CANCELLED);
    }
    expect_right(pool, space, 2);
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

}  // namespace
}  // namespace ta::testing
