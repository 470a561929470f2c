// Calls and threads that have blocks for a moment, each stopped at every one of its allocations in turn: whoever needs the room of
// these blocks meanwhile finds that nobody uses them, or waits, and does not fail.
#include <functional>

#include "abi/prefix_steps.h"
#include "support/stopped.h"

namespace ta::testing {
namespace {

class HeldBlocks : public PrefixSteps {
  protected:
    static constexpr uint64_t kText = 7;
    static constexpr size_t kBlocks = 40;

    // A namespace whose quota is full of blocks that no sequence has, and a sequence whose first block is to be published, too.
    struct Full {
        KvPool pool;
        ta_namespace space = 0;
        ta_seq fresh = 0;
    };
    Full make_full(const ta_kv_pool_options& o = options(), size_t blocks = kBlocks) {
        Full f{make_pool(context, o)};
        const ta_kv_pool_stats s = stats(f.pool);
        f.space = make_namespace(f.pool, 1, s.token_block_bytes + (blocks - 1) * s.channel_block_bytes);  // the first is a sink
        const ta_seq seq = write(f.pool, int32_t(blocks) * 64, kText);
        publish(f.pool, seq, f.space, kText, blocks);
        release(f.pool, seq);
        f.fresh = write(f.pool, 64, kText + 1);
        return f;
    }
    static void publish_fresh(const Full& f) {
        ta_error err;
        EXPECT_EQ(ta_seq_publish(f.pool.get(), f.fresh, f.space, keys(kText + 1, 1).data(), 1, &err), TA_OK) << err.message;
    }
    // A store that has all, but gives nothing out.
    static void attach(const Full& f) {
        auto s = sized<ta_block_store>();
        s.exists = s.put = s.remove = [](void*, ta_store_item* items, uint64_t n, int64_t) {
            for (uint64_t i = 0; i < n; ++i) items[i].result = TA_STORE_DONE;
            return 0;
        };
        s.get = [](void*, ta_store_item*, uint64_t, int64_t) { return 0; };
        ta_error err;
        require(ta_namespace_attach_store(f.pool.get(), f.space, &s, nullptr, &err), err);
    }
    static void flush(const Full& f) {
        uint64_t missing = 1;
        EXPECT_EQ(ta_namespace_flush_store(f.pool.get(), f.space, -1, &missing, nullptr), TA_OK);
        EXPECT_EQ(missing, 0u);
    }

    // Attempts with a stop at each allocation in turn, of which there are at least so many.
    static void stop_everywhere(int64_t at_least, const std::function<bool(int64_t)>& attempt) {
        int64_t n = 0;
        for (bool stopped = true; stopped && !HasFailure(); n += stopped) {
            SCOPED_TRACE("allocation " + std::to_string(n));
            ASSERT_LT(n, 2000);
            stopped = attempt(n);
        }
        EXPECT_TRUE(HasFailure() || n >= at_least) << n;
    }
};

TEST_F(HeldBlocks, AFlushOfAStoreDoesNotUseThem) {
    stop_everywhere(10, [&](int64_t n) {
        const Full f = make_full();
        attach(f);
        flush(f);
        return stop_at(
            n, [&] { flush(f); }, [&] { publish_fresh(f); });
    });
}

TEST_F(HeldBlocks, ALoadDoesNotUseThem) {
    const std::vector<uint8_t> wanted = keys(kText, kBlocks + 1);  // the last of them is nowhere
    stop_everywhere(10, [&](int64_t n) {
        const Full f = make_full();
        attach(f);
        flush(f);
        const auto load = [&] {
            ta_ticket ticket = 0;
            auto info = sized<ta_move_info>();
            EXPECT_EQ(ta_namespace_load(f.pool.get(), f.space, wanted.data(), wanted.size() / 32, &ticket, nullptr), TA_OK);
            EXPECT_EQ(ta_move_wait(f.pool.get(), ticket, -1, &info, nullptr), TA_OK);
        };
        return stop_at(n, load, [&] { publish_fresh(f); });
    });
}

TEST_F(HeldBlocks, AnEvictionForABeginDoesNotUseThem) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 64 << 20;
    tiers.high_percent = 100;
    constexpr size_t kFew = 10;
    const ta_kv_pool_options o = small_options(kFew, &tiers);
    stop_everywhere(10, [&](int64_t n) {
        const Full f = make_full(o, kFew);
        const ta_seq other = make_sequence(f.pool);
        const Plan plan = make_plan(f.pool);
        const int32_t tokens = 16 * 64;  // of more bytes than the published blocks have
        const auto begin = [&] {
            ta_error err;
            EXPECT_EQ(ta_plan_begin(plan.get(), 1, &other, &tokens, nullptr, nullptr, &err), TA_OK) << err.message;
            EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        };
        return stop_at(n, begin, [&] { publish_fresh(f); });
    });
}

// The blocks behind the published one are the sequence's alone. They may be dropped, once the publish has let go of them.
TEST_F(HeldBlocks, ABeginThatDropsWaitsForAPublish) {
    auto tiers = sized<ta_tier_options>();
    tiers.drop_coldest = TA_ON;
    const ta_kv_pool_options o = small_options(12, &tiers);
    const std::vector<uint8_t> key = keys(kText, 1);
    stop_everywhere(3, [&](int64_t n) {
        const KvPool pool = make_pool(context, o);
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq published = write(pool, 12 * 64, kText), other = make_sequence(pool);
        const Plan plan = make_plan(pool);
        const int32_t tokens = 18 * 64;  // more than is free
        const auto publish = [&] { EXPECT_EQ(ta_seq_publish(pool.get(), published, space, key.data(), 1, nullptr), TA_OK); };
        return stop_at(n, publish, [&] {
            ta_error err;
            EXPECT_EQ(ta_plan_begin(plan.get(), 1, &other, &tokens, nullptr, nullptr, &err), TA_OK) << err.message;
            EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        });
    });
}

}  // namespace
}  // namespace ta::testing
