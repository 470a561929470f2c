// Begins, loads and saves that want the same room at once.
#include <chrono>
#include <functional>
#include <thread>

#include "abi/prefix_steps.h"
#include "support/files.h"

namespace ta::testing {
namespace {

using namespace std::chrono_literals;

class RoomFiles : public PrefixSteps {
  protected:
    std::string path(const char* name) const { return folder.file(name); }
    // A file of a sequence of so many tokens.
    std::string sequence_file(int32_t n) {
        const KvPool pool = make_pool(context, options());
        const std::string file = path("sequence");
        ta_error err;
        require(ta_seq_save(pool.get(), write(pool, n, 1), file.c_str(), nullptr, &err), err);
        return file;
    }
    // Runs once, from a callback of progress, in a thread of its own.
    struct WorkBeside {
        std::function<void()> work;
        std::thread thread;
        ~WorkBeside() {
            if (thread.joinable()) thread.join();
        }
        static int32_t start(void* user, uint64_t done, uint64_t total) {
            WorkBeside& b = *static_cast<WorkBeside*>(user);
            if (b.thread.joinable() || 10 * done < 8 * total) return 0;
            b.thread = std::thread(b.work);
            std::this_thread::sleep_for(200ms);
            return 0;
        }
    };

    const Folder folder;
};

// Blocks that a load evicts are room when the plans have ended that may be reading there.
TEST_F(RoomFiles, ALoadWaitsForPlans) {
    const std::string file = sequence_file(640);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{64} << 20;
    tiers.high_percent = 100;
    tiers.begin_wait_ms = 20000;
    const KvPool pool = make_pool(context, small_options(25, &tiers));
    write(pool, 32 * 64, 2);
    const ta_seq other = write(pool, 10, 3);
    const Plan open = make_plan(pool);
    begin(open, {other}, {0});
    std::jthread ends([&] {
        std::this_thread::sleep_for(50ms);
        EXPECT_EQ(ta_plan_abort(open.get(), nullptr), TA_OK);
    });
    ta_seq loaded = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_load(pool.get(), file.c_str(), nullptr, &loaded, &err), TA_OK) << err.message;
}

// Blocks that a load has read belong to no sequence yet, and a begin demotes them like other blocks.
TEST_F(RoomFiles, ABeginBesideALoad) {
    const std::string file = sequence_file(20 * 64);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{64} << 20;
    tiers.begin_wait_ms = 60000;  // a sanitizer's step takes seconds
    const KvPool pool = make_pool(context, small_options(15, &tiers));
    WorkBeside beside{[&] { write(pool, 12 * 64, 2); }, {}};
    ta_seq loaded = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_load(pool.get(), file.c_str(), ReportTo(WorkBeside::start, &beside), &loaded, &err), TA_OK) << err.message;
    ASSERT_TRUE(beside.thread.joinable());
    beside.thread.join();
    verify(pool, loaded);
}

// A step that writes to its sequence's open block needs a copy while a save holds that, and none when the save is over.
TEST_F(RoomFiles, ABeginThatNeedsRoomOnlyBesideASave) {
    for (const bool may_drop : {false, true}) {
        SCOPED_TRACE(may_drop ? "drop_coldest" : "no tiers");
        auto tiers = sized<ta_tier_options>();
        tiers.drop_coldest = TA_ON;
        auto o = options();
        const ta_kv_pool_stats s = stats(make_pool(context, o));
        o.budget_bytes = 2 * s.token_block_bytes + 9 * s.channel_block_bytes;
        if (may_drop) o.tiers = &tiers;
        const KvPool pool = make_pool(context, o);
        const ta_seq seq = make_sequence(pool);
        for (int i = 0; i < 20; ++i) grow(pool, seq, 32, 1);
        grow(pool, seq, 5, 1);
        ASSERT_EQ(stats(pool).bytes_used, o.budget_bytes);
        WorkBeside beside{[&] { grow(pool, seq, 1, 1); }, {}};
        ta_error err;
        EXPECT_EQ(ta_seq_save(pool.get(), seq, path(may_drop ? "1" : "0").c_str(), ReportTo(WorkBeside::start, &beside), &err),
                  TA_OK);
        ASSERT_TRUE(beside.thread.joinable());
        beside.thread.join();
        EXPECT_EQ(length(pool, seq), 646);
        EXPECT_EQ(residency(pool, seq).dropped_blocks, 0u);
    }
}

// Published blocks that no sequence has are held while they are saved: a begin that needs their room waits.
TEST_F(RoomFiles, ABeginWaitsForASave) {
    for (const bool tiered : {false, true}) {
        SCOPED_TRACE(tiered ? "with a host tier" : "without tiers");
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = uint64_t{8} << 20;
        const KvPool pool = make_pool(context, small_options(12, tiered ? &tiers : nullptr));
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 9 * 64, 1);
        publish(pool, seq, space, 1, 9);
        release(pool, seq);
        const ta_seq next = make_sequence(pool);
        const Plan plan = make_plan(pool);
        struct Beside {
            ta_plan* plan;
            ta_seq seq;
            int32_t tokens;
            std::thread thread;
            ta_status status = TA_E_INTERNAL;
        } beside{plan.get(), next, 0, {}};
        // Three blocks more than there is room for: a sink and the rest.
        const ta_kv_pool_stats s = stats(pool);
        beside.tokens = int32_t((s.bytes_budget - s.bytes_used - s.token_block_bytes) / s.channel_block_bytes + 4) * 64;
        const auto begin_beside = [](void* user, uint64_t, uint64_t) -> int32_t {
            Beside& b = *static_cast<Beside*>(user);
            if (b.thread.joinable()) return 0;
            b.thread = std::thread([&b] { b.status = ta_plan_begin(b.plan, 1, &b.seq, &b.tokens, nullptr, nullptr, nullptr); });
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            return 0;
        };
        ta_error err;
        require(ta_kv_pool_save(pool.get(), path(tiered ? "tiered" : "plain").c_str(), TA_SAVE_PUBLISHED,
                                ReportTo(begin_beside, &beside), &err),
                err);
        ASSERT_TRUE(beside.thread.joinable());
        beside.thread.join();
        ASSERT_EQ(beside.status, TA_OK) << ta_status_name(beside.status);
        require(ta_plan_abort(plan.get(), &err), err);
    }
}

}  // namespace
}  // namespace ta::testing
