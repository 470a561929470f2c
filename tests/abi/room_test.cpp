// Plans that have the device tier between them: a begin that lacks room which another holds waits for it, and steps that do not
// fit beside each other take turns.

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

struct Case {
    const char* name;
    Budgets budgets;
};

class Room : public ::testing::TestWithParam<Case> {
  protected:
    void make(int begin_wait_ms) {
        Budgets budgets = GetParam().budgets;
        budgets.begin_wait_ms = begin_wait_ms;
        ta_tier_options tiers;
        pool = make_pool(context, options_of(budgets, tiers));
    }
    static ta_status begin_on(const Plan& plan, ta_seq seq, int32_t n_new, ta_error* err = nullptr) {
        return ta_plan_begin(plan.get(), 1, &seq, &n_new, nullptr, nullptr, err);
    }
    void grow(ta_seq seq, int32_t blocks) {
        const Plan plan = make_plan(pool);
        const int32_t n = 64 * blocks;
        begin(plan, {seq}, {n});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(n * kRow), n, kHeads, kDim), v(random.normals(n * kRow), n, kHeads, kDim);
            append(plan, layer, k, v);
        }
        end(plan);
    }

    const Context context = make_context(1);
    KvPool pool;
    Random random{5};
};

TEST_P(Room, ABeginWaitsForWhatAnotherPlanHolds) {
    make(20000);
    const ta_seq held = make_sequence(pool), fresh = make_sequence(pool);
    grow(held, 18);
    const Plan open = make_plan(pool), plan = make_plan(pool);
    ASSERT_EQ(begin_on(open, held, 0), TA_OK);
    const auto start = Clock::now();
    std::jthread ends([&] {
        std::this_thread::sleep_for(200ms);
        EXPECT_EQ(ta_plan_abort(open.get(), nullptr), TA_OK);
    });
    ta_error err;
    EXPECT_EQ(begin_on(plan, fresh, 5 * 64, &err), TA_OK) << err.message;
    EXPECT_GE(Clock::now() - start, 190ms);
    EXPECT_LT(Clock::now() - start, 10s);
}

TEST_P(Room, ABeginThatWaitsInVainEndsInTime) {
    make(300);
    const ta_seq held = make_sequence(pool), fresh = make_sequence(pool);
    grow(held, 18);
    const Plan open = make_plan(pool), plan = make_plan(pool);
    ASSERT_EQ(begin_on(open, held, 0), TA_OK);
    const auto start = Clock::now();
    EXPECT_EQ(begin_on(plan, fresh, 5 * 64), TA_E_TIER_FULL);
    EXPECT_GE(Clock::now() - start, 290ms);
    EXPECT_LT(Clock::now() - start, 5s);
    EXPECT_EQ(length(pool, fresh), 0);
}

// All wait for a plan. When it has ended nobody is left who would make room.
TEST_P(Room, BeginsThatDoNotFitDoNotWaitForEachOther) {
    make(20000);
    constexpr int32_t kTooMany = 18 * 64;  // beside a sink of each sequence, which does not leave
    std::vector<ta_seq> seqs;
    for (int i = 0; i < 4; ++i) {
        grow(seqs.emplace_back(make_sequence(pool)), 3);
        ASSERT_EQ(ta_seq_pin(pool.get(), seqs.back(), 0, 1, nullptr), TA_OK);
    }
    const Plan open = make_plan(pool);
    ASSERT_EQ(begin_on(open, make_sequence(pool), 0), TA_OK);
    const auto start = Clock::now();
    std::vector<std::jthread> threads;
    for (const ta_seq seq : seqs) {
        threads.emplace_back([&, seq] {
            const Plan plan = make_plan(pool);
            EXPECT_EQ(begin_on(plan, seq, kTooMany), TA_E_TIER_FULL);
            EXPECT_EQ(begin_on(plan, seq, 1), TA_OK);
            EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        });
    }
    std::this_thread::sleep_for(200ms);
    EXPECT_EQ(ta_plan_abort(open.get(), nullptr), TA_OK);
    threads.clear();
    EXPECT_LT(Clock::now() - start, 15s);
}

// While a plan is open they do.
TEST_P(Room, BeginsThatWaitBesideEachOtherForAnOpenPlan) {
    make(20000);
    const ta_seq held = make_sequence(pool);
    grow(held, 18);
    const Plan open = make_plan(pool);
    ASSERT_EQ(begin_on(open, held, 0), TA_OK);
    const auto start = Clock::now();
    std::atomic<int> begun{0};
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
        threads.emplace_back([&] {
            const Plan plan = make_plan(pool);
            ta_error err;
            EXPECT_EQ(begin_on(plan, make_sequence(pool), 5 * 64, &err), TA_OK) << err.message;
            ++begun;
            EXPECT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        });
    }
    std::this_thread::sleep_for(200ms);
    EXPECT_EQ(begun.load(), 0);
    EXPECT_EQ(ta_plan_abort(open.get(), nullptr), TA_OK);
    threads.clear();
    EXPECT_EQ(begun.load(), 3);
    EXPECT_LT(Clock::now() - start, 15s);
}

INSTANTIATE_TEST_SUITE_P(Tiers, Room,
                         ::testing::Values(Case{"disk", {.device_blocks = 12, .disk_bytes = 8 << 20, .bits = 8}},
                                           Case{
                                               "small_host_and_disk",
                                               {.device_blocks = 12, .host_bytes = 80 << 10, .disk_bytes = 8 << 20, .bits = 8}},
                                           Case{"drops", {.device_blocks = 12, .bits = 8, .drop_coldest = TA_ON}}),
                         [](const auto& i) { return std::string(i.param.name); });

class Turns : public Room {};

// 14 blocks each; while neither is in a step the other one's may leave, but that is hardly ever.
TEST_P(Turns, StepsThatDoNotFitBesideEachOther) {
    make(20000);
    constexpr int kSteps = 40;
    std::atomic<int> refused{0};
    const ta_seq seqs[] = {make_sequence(pool), make_sequence(pool)};
    for (const ta_seq seq : seqs) grow(seq, 14);
    std::vector<std::jthread> threads;
    for (const ta_seq seq : seqs) {
        threads.emplace_back([&, seq] {
            const Plan plan = make_plan(pool);
            for (int done = 0; done < kSteps;) {
                if (begin_on(plan, seq, 0) != TA_OK) {
                    ++refused;
                    continue;
                }
                std::this_thread::sleep_for(1ms);
                EXPECT_EQ(ta_plan_end(plan.get(), nullptr, nullptr), TA_OK);
                ++done;
            }
        });
    }
    threads.clear();
    EXPECT_EQ(refused.load(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Tiers, Turns,
    ::testing::Values(Case{"disk", {.device_blocks = 12, .disk_bytes = 8 << 20, .bits = 8}},
                      Case{"small_host_and_disk",
                           {.device_blocks = 12, .host_bytes = 80 << 10, .disk_bytes = 8 << 20, .bits = 8}}),
    [](const auto& i) { return std::string(i.param.name); });

}  // namespace
}  // namespace ta::testing
