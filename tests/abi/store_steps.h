// A text that pools publish in a block store: what the tests of block stores share.
#pragma once

#include "abi/prefix_steps.h"
#include "support/memory_store.h"

namespace ta::testing {

class Store : public PrefixSteps {
  protected:
    using Function = MemoryStore::Function;
    static constexpr uint64_t kText = 7;
    static constexpr size_t kBlocks = 5;

    // A pool with a text whose first n blocks are published.
    struct Publisher {
        KvPool pool;
        ta_namespace space;
    };
    Publisher make_publisher(const ta_kv_pool_options& o = options(), size_t n = kBlocks, uint64_t of = kText,
                             uint8_t salt = 1) {
        Publisher p{make_pool(context, o), 0};
        p.space = make_namespace(p.pool, salt);
        const ta_seq seq = write(p.pool, int32_t(n) * 64, of);
        publish(p.pool, seq, p.space, of, n);
        release(p.pool, seq);
        return p;
    }
    // The store with that text in it.
    void fill(ta_switch authenticate = TA_DEFAULT) {
        fill(store, make_publisher(), authenticate);
        ASSERT_EQ(store.values().size(), kBlocks);
    }
    static void fill(MemoryStore& with, const Publisher& p, ta_switch authenticate = TA_DEFAULT) {
        attach_store(p.pool, p.space, with.attach(), 0, authenticate);
        ASSERT_EQ(flush_store(p.pool, p.space), 0u);
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
    // Of the first n blocks of the text.
    static ta_ticket start_load(const KvPool& pool, ta_namespace space, size_t n = kBlocks) {
        return testing::start_load(pool, space, keys(kText, n));
    }
    // The nth call of a function does not return while `held` waits.
    struct HeldCall {
        std::atomic<bool> waits{true};
        std::atomic<int> calls{0};
    };
    void hold(HeldCall& held, Function function, int nth) {
        store.before([&held, function, nth](Function f, ta_store_item*, uint64_t) {
            if (f == function && ++held.calls == nth) {
                while (held.waits) std::this_thread::sleep_for(std::chrono::milliseconds(1));
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

}  // namespace ta::testing
