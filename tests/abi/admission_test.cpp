// Admission: ta_kv_pool_fit foretells what a begin finds, ta_seq_reserve keeps its promise, and an engine that admits by them never
// meets TA_E_TIER_FULL.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>

#include "abi/tier_twins.h"

namespace ta::testing {
namespace {

ta_fit fit(const KvPool& pool, const std::vector<ta_seq>& seqs, const std::vector<int32_t>& n_new) {
    auto f = sized<ta_fit>();
    ta_error err;
    require(ta_kv_pool_fit(pool.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), &f, &err), err);
    return f;
}

// One layer of one head: steps that cost next to nothing.
class Small {
  public:
    Small(uint64_t token_blocks, uint64_t channel_blocks, uint64_t host_bytes, uint64_t disk_bytes, uint32_t bits = 4,
          int64_t window = 0, ta_switch falling = TA_DEFAULT, int32_t sinks = 0) {
        auto options = pool_options(1, 1, 64, bits);
        auto numerics = sized<ta_numerics>();
        numerics.sink_blocks = sinks;
        options.numerics = &numerics;
        auto group = sized<ta_layer_group>();
        group.layers = 1;
        group.window = window;
        if (window > 0) options.layer_groups = &group, options.n_layer_groups = 1;
        const ta_kv_pool_stats s = stats(make_pool(make_context(), options));
        options.budget_bytes =
            token_blocks * s.token_block_bytes + channel_blocks * (bits == 8 ? s.token_block_bytes : s.channel_block_bytes);
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = host_bytes;
        tiers.disk_bytes = disk_bytes;
        tiers.falling_precision = falling;
        if (host_bytes + disk_bytes > 0) options.tiers = &tiers;
        pool = make_pool(context, options);
    }
    // A step that brings tokens and attends to nothing; `wait_ms` as of a begin.
    ta_status step(const Plan& plan, const std::vector<ta_seq>& seqs, const std::vector<int32_t>& n_new, int32_t wait_ms,
                   ta_error* err = nullptr) const {
        auto options = sized<ta_step_options>();
        options.wait_ms = wait_ms;
        const std::vector<int32_t> none(seqs.size());
        const ta_status s =
            ta_plan_begin(plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), none.data(), &options, err);
        if (s != TA_OK) return s;
        int64_t n = 0;
        for (const int32_t more : n_new) n += more;
        Tensor k(std::vector<float>(size_t(n) * 64, 0.5f), n, 1, 64), v(std::vector<float>(size_t(n) * 64, 0.25f), n, 1, 64);
        append(plan, 0, k, v);
        end(plan);
        return s;
    }
    ta_status reserve(ta_seq seq, int64_t tokens, int32_t wait_ms = -1, ta_error* err = nullptr) const {
        return ta_seq_reserve(pool.get(), seq, tokens, wait_ms, err);
    }

    const Context context = make_context(1);
    KvPool pool;
};

struct Tiers {
    const char* name;
    uint64_t host_bytes, disk_bytes;
    uint32_t bits;
};
class Admission : public ::testing::TestWithParam<Tiers> {
  protected:
    const Small small{12, 40, GetParam().host_bytes, GetParam().disk_bytes, GetParam().bits};
    const KvPool& pool = small.pool;
    const Plan plan = make_plan(pool);
    Random random{7};
};

// If fit says that a step fits, it does. If it says that one does not, hardly any does: slots of the tiers below hold blocks
// of one size at a time, and which go first is found out by trying.
TEST_P(Admission, FitForetellsTheBegin) {
    std::deque<ta_seq> seqs;
    int fits = 0, lacks = 0, evicts = 0, surprises = 0;
    for (int i = 0; i < 600; ++i) {
        if (seqs.size() > 12 || (!seqs.empty() && random.chance(8))) {
            ASSERT_EQ(ta_seq_release(pool.get(), seqs.front(), nullptr), TA_OK);
            seqs.pop_front();
        }
        std::vector<ta_seq> batch;
        std::vector<int32_t> n_new;
        std::vector<size_t> places;
        for (size_t s = 0; s < seqs.size(); ++s) {
            if (batch.size() < 4 && random.chance(30)) batch.push_back(seqs[s]), n_new.push_back(int32_t(random.below(200)));
        }
        const size_t old = batch.size();
        if (old == 0 || random.chance(40))
            batch.push_back(0), n_new.push_back(int32_t(random.below(random.chance(10) ? 4000 : 400)));
        const ta_fit f = fit(pool, batch, n_new);
        ASSERT_EQ(f.after_eviction == 1, f.bytes_lacking == 0);
        ASSERT_EQ(f.first_lacking >= 0, f.bytes_lacking > 0);
        const uint64_t waits = move_stats(pool).waits_for_room + move_stats(pool).waits_for_blocks;
        for (size_t b = old; b < batch.size(); ++b) seqs.push_back(batch[b] = make_sequence(pool));
        ta_error err;
        const ta_status s = small.step(plan, batch, n_new, 0, &err);
        if (s != TA_E_TIER_FULL || f.after_eviction) {
            ASSERT_EQ(s, TA_OK) << "step " << i << ": " << err.message;
        }
        surprises += s == TA_OK && !f.after_eviction;
        if (f.now) {
            ASSERT_EQ(move_stats(pool).waits_for_room + move_stats(pool).waits_for_blocks, waits) << "step " << i;
        }
        if (s == TA_OK && !f.now) ++evicts;
        ++(s == TA_OK ? fits : lacks);
        const ta_kv_pool_stats st = stats(pool);
        ASSERT_LE(st.bytes_free + st.bytes_promised + st.bytes_used, st.bytes_budget);
    }
    EXPECT_GT(fits, 50);
    EXPECT_GT(lacks, 10);
    EXPECT_LT(surprises, GetParam().host_bytes + GetParam().disk_bytes > 0 ? 100 : 1);
    if (GetParam().host_bytes + GetParam().disk_bytes > 0) {
        EXPECT_GT(evicts, 20);
    }
}

// Whatever others take, a promised token finds room without waiting: in steps of any size, after truncates, a fork and an abort.
TEST_P(Admission, APromiseHolds) {
    for (int round = 0; round < 40; ++round) {
        const ta_seq seq = make_sequence(pool);
        const auto start = int32_t(random.below(200));
        if (start > 0) {
            ASSERT_EQ(small.step(plan, {seq}, {start}, 0), TA_OK);
        }
        int64_t left = 1 + random.below(500);
        ASSERT_EQ(small.reserve(seq, left, 0), TA_OK);
        const uint64_t promised = stats(pool).bytes_promised;
        EXPECT_GT(promised, 0u);
        std::vector<ta_seq> others;
        if (random.chance(50)) others.push_back(fork_sequence(pool, seq));  // the open block is shared from now on
        for (int i = 0; i < 60; ++i) {                                      // until nothing else fits
            others.push_back(make_sequence(pool));
            if (small.step(plan, {others.back()}, {int32_t(1 + random.below(120))}, -1) != TA_OK) break;
        }
        while (left > 0) {
            const auto n = int32_t(1 + random.below(std::min<int64_t>(left, random.chance(50) ? 5 : 200)));
            ta_error err;
            if (random.chance(10)) {
                require(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, nullptr, &err), err);
                require(ta_plan_abort(plan.get(), &err), err);
            }
            ASSERT_EQ(small.step(plan, {seq}, {n}, -1, &err), TA_OK)
                << "round " << round << ", " << left << " left: " << err.message;
            left -= n;
            if (random.chance(10) && left > 0)
                require(ta_seq_truncate(pool.get(), seq, length(pool, seq) - random.below(n + 1), &err), err);
        }
        EXPECT_EQ(stats(pool).bytes_promised, 0u);
        for (const ta_seq other : others) ta_seq_release(pool.get(), other, nullptr);
        ASSERT_EQ(ta_seq_release(pool.get(), seq, nullptr), TA_OK);
    }
}

// A truncate into a closed block: it is opened and closed again.
TEST_P(Admission, APromiseHoldsBehindATruncate) {
    for (int round = 0; round < 200; ++round) {
        const ta_seq seq = make_sequence(pool);
        const auto start = int32_t(1 + random.below(200)), tokens = int32_t(1 + random.below(150));
        ASSERT_EQ(small.step(plan, {seq}, {start}, 0), TA_OK);
        ASSERT_EQ(small.reserve(seq, tokens, 0), TA_OK);
        ASSERT_EQ(ta_seq_truncate(pool.get(), seq, random.below(start + 1), nullptr), TA_OK);
        std::vector<ta_seq> others;
        for (int i = 0; i < 60; ++i) {
            others.push_back(make_sequence(pool));
            if (small.step(plan, {others.back()}, {int32_t(1 + random.below(120))}, -1) != TA_OK) break;
        }
        for (int32_t left = tokens, n = 0; left > 0; left -= n) {
            n = int32_t(1 + random.below(left));
            ta_error err;
            ASSERT_EQ(small.step(plan, {seq}, {n}, -1, &err), TA_OK) << "round " << round << ": " << err.message;
        }
        for (const ta_seq other : others) ta_seq_release(pool.get(), other, nullptr);
        ASSERT_EQ(ta_seq_release(pool.get(), seq, nullptr), TA_OK);
    }
}

TEST_P(Admission, AReservationThatFailsLeavesTheFormerOne) {
    const ta_seq a = make_sequence(pool), b = make_sequence(pool);
    ASSERT_EQ(small.reserve(a, 200), TA_OK);
    const ta_kv_pool_stats before = stats(pool);
    ta_error err;
    EXPECT_EQ(small.reserve(a, 100000, -1, &err), TA_E_TIER_FULL);
    EXPECT_GT(err.bytes, 0u);
    EXPECT_EQ(small.reserve(b, 3300, -1, &err), TA_E_TIER_FULL);
    EXPECT_GT(err.bytes, 0u);
    EXPECT_EQ(stats(pool).bytes_promised, before.bytes_promised);
    EXPECT_EQ(stats(pool).bytes_free, before.bytes_free);
    EXPECT_EQ(small.reserve(a, 0), TA_OK);
    EXPECT_EQ(stats(pool).bytes_promised, 0u);
    ASSERT_EQ(small.reserve(a, 200), TA_OK);
    ASSERT_EQ(ta_seq_release(pool.get(), a, nullptr), TA_OK);  // it ends with its sequence
    EXPECT_EQ(stats(pool).bytes_promised, 0u);
    EXPECT_EQ(stats(pool).bytes_free, stats(pool).bytes_budget);
}

// A hundred thousand requests that want more than there is, finished ones kept as idle chats until they are too many. A request
// that the engine admitted never fails.
TEST_P(Admission, AnEngineThatReservesNeverMeetsAFullTier) {
    struct Request {
        ta_seq seq;
        int32_t prompt, output;
    };
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    constexpr int kMostRequests = 10'000;
#else
    constexpr int kMostRequests = 100'000;
#endif
    const int kRequests =
        GetParam().disk_bytes == 0 && GetParam().host_bytes > 0 && GetParam().bits == 4 ? kMostRequests : 10'000;
    constexpr size_t kMostRunning = 16, kMostIdle = 24;
    std::deque<Request> running;
    std::deque<ta_seq> idle;
    int arrived = 0, finished = 0, refused = 0;
    Request next{};
    while (finished < kRequests) {
        while (running.size() < kMostRunning && arrived < kRequests) {
            if (next.seq == 0) next = {make_sequence(pool), int32_t(1 + random.below(150)), int32_t(1 + random.below(8))};
            const ta_status s = small.reserve(next.seq, next.prompt + next.output);
            if (s == TA_E_TIER_FULL) {
                ++refused;
                if (!running.empty()) break;
                ASSERT_FALSE(idle.empty()) << "nothing runs, and a request does not fit";
                ASSERT_EQ(ta_seq_release(pool.get(), idle.front(), nullptr), TA_OK);
                idle.pop_front();
                continue;
            }
            ASSERT_EQ(s, TA_OK);
            running.push_back(next);
            next.seq = 0;
            ++arrived;
        }
        std::vector<ta_seq> seqs;
        std::vector<int32_t> n_new;
        for (Request& r : running) {
            seqs.push_back(r.seq);
            n_new.push_back(r.prompt > 0 ? r.prompt : 1);
            r.output -= r.prompt == 0;
            r.prompt = 0;
        }
        ta_error err;
        ASSERT_EQ(small.step(plan, seqs, n_new, -1, &err), TA_OK) << finished << " requests: " << err.message;
        for (size_t i = running.size(); i-- > 0;) {
            if (running[i].output > 0) continue;
            ++finished;
            ASSERT_EQ(small.reserve(running[i].seq, 0), TA_OK);
            idle.push_back(running[i].seq);
            running.erase(running.begin() + ptrdiff_t(i));
        }
        while (idle.size() > kMostIdle) {
            ASSERT_EQ(ta_seq_release(pool.get(), idle.front(), nullptr), TA_OK);
            idle.pop_front();
        }
    }
    EXPECT_GT(refused, kRequests / 100);
}

// The same of several threads, each with requests of its own.
TEST_P(Admission, EnginesBesideEachOther) {
    std::vector<std::jthread> engines;
    std::atomic<int> admitted{0};
    for (int e = 0; e < 3; ++e) {
        engines.emplace_back([&, e] {
            Random mine(uint64_t(e) + 1);
            const Plan own = make_plan(pool);
            for (int i = 0; i < 400; ++i) {
                const ta_seq seq = make_sequence(pool);
                int32_t left = int32_t(1 + mine.below(600));
                if (small.reserve(seq, left, 50) == TA_OK) {
                    ++admitted;
                    for (int32_t n = 0; left > 0; left -= n) {
                        n = int32_t(1 + mine.below(std::min(left, 90)));
                        ta_error err;
                        ASSERT_EQ(small.step(own, {seq}, {n}, -1, &err), TA_OK) << err.message;
                    }
                }
                ASSERT_EQ(ta_seq_release(pool.get(), seq, nullptr), TA_OK);
            }
        });
    }
    engines.clear();
    EXPECT_GT(admitted, 300);
    EXPECT_EQ(stats(pool).bytes_promised, 0u);
}

// A sequence with a reservation loses no block to another one's begin, and fit says so.
TEST(Fit, DropsNothingOfASequenceWithAReservation) {
    auto options = pool_options(1, 1, 64, 8);
    auto tiers = sized<ta_tier_options>();
    tiers.drop_coldest = TA_ON;
    options.tiers = &tiers;
    options.budget_bytes = 12 * stats(make_pool(make_context(), options)).token_block_bytes;
    const Context context = make_context();
    const KvPool pool = make_pool(context, options);
    const Plan plan = make_plan(pool);
    const ta_seq has = make_sequence(pool), wants = make_sequence(pool);
    begin(plan, {has}, {512}, {0});
    Tensor x(std::vector<float>(512 * 64, 0.5f), 512, 1, 64);
    append(plan, 0, x, x);
    end(plan);
    ta_error err;
    const int32_t n_new = 256;
    for (const int64_t reserved : {64, 0}) {
        require(ta_seq_reserve(pool.get(), has, reserved, -1, &err), err);
        EXPECT_EQ(fit(pool, {wants}, {n_new}).after_eviction, reserved == 0);
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &wants, &n_new, nullptr, nullptr, &err), reserved > 0 ? TA_E_TIER_FULL : TA_OK);
    }
}

// A truncate into a block that others have, and a fork after it: both take a copy.
TEST(Reserve, HoldsBehindATruncateAndAFork) {
    const Small small(12, 0, 0, 0, 4, 0, TA_DEFAULT, -1);
    const Plan plan = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {135}, -1), TA_OK);
    ta_seq fork = 0;
    ta_error err;
    require(ta_seq_fork(small.pool.get(), seq, &fork, &err), err);
    ASSERT_EQ(small.reserve(seq, 48), TA_OK);
    require(ta_seq_truncate(small.pool.get(), seq, 35, &err), err);
    ASSERT_EQ(small.step(plan, {seq}, {1}, -1), TA_OK);
    require(ta_seq_fork(small.pool.get(), seq, &fork, &err), err);
    int others = 0;
    while (small.step(plan, {make_sequence(small.pool)}, {1}, -1) == TA_OK) ++others;
    EXPECT_GT(others, 0);
    EXPECT_EQ(small.step(plan, {seq}, {40}, -1, &err), TA_OK) << err.message;
}

// A move that has found no place below yet, and finds none, is no room for a step.
TEST(Fit, AMoveThatWaitsForAPlaceGivesNothing) {
    const Small small(12, 0, 56 << 10, 0, 8);  // the host tier has four slots
    const KvPool& pool = small.pool;
    const Plan plan = make_plan(pool), reads = make_plan(pool);
    const ta_seq read = make_sequence(pool), cold = make_sequence(pool);
    ASSERT_EQ(small.step(plan, {read}, {256}, 0), TA_OK);
    ASSERT_EQ(small.step(plan, {cold}, {256}, 0), TA_OK);
    const ta_seq fork = fork_sequence(pool, read);
    const int32_t one = 1;
    ASSERT_EQ(ta_plan_begin(reads.get(), 1, &fork, &one, nullptr, nullptr, nullptr), TA_OK);
    // The host tier is full then; the plan keeps the slots that the blocks left.
    EXPECT_EQ(move_now(pool, read, 0, 4, TA_TIER_HOST).moved, 4u);
    const ta_ticket ticket = move(pool, cold, 0, 4, TA_TIER_HOST);
    for (int i = 0; i < 200; ++i) {
        const ta_fit f = fit(pool, {0}, {320});  // five blocks; the device tier has room for three
        ASSERT_FALSE(f.after_eviction) << i;
        ASSERT_EQ(f.bytes_lacking, 2 * (f.bytes_new / 5)) << i;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ta_error err;
    EXPECT_EQ(small.step(plan, {make_sequence(pool)}, {320}, 0, &err), TA_E_TIER_FULL) << err.message;
    ASSERT_EQ(ta_plan_abort(reads.get(), nullptr), TA_OK);
    EXPECT_EQ(wait(pool, ticket).failed, 4u);
}

// Blocks of the step that are on disk need room, too.
TEST(Fit, BlocksFromTheDiskLackRoomLikeNewOnes) {
    const Small small(4, 0, 0, 4 << 20, 8);
    const Plan plan = make_plan(small.pool);
    const ta_seq below = make_sequence(small.pool), above = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {below}, {192}, -1), TA_OK);
    ta_ticket ticket = 0;
    ASSERT_EQ(ta_seq_suspend(small.pool.get(), below, TA_TIER_DISK, &ticket, nullptr), TA_OK);
    EXPECT_EQ(wait(small.pool, ticket).moved, 3u);
    ASSERT_EQ(small.step(plan, {above}, {192}, -1), TA_OK);
    const uint64_t block = stats(small.pool).token_block_bytes;
    for (const int32_t n : {0, 1}) {
        const ta_fit f = fit(small.pool, {below, above}, {n, 0});
        EXPECT_FALSE(f.after_eviction) << n;
        EXPECT_EQ(f.bytes_lacking, uint64_t(2 + n) * block) << n;
        const int32_t n_new[] = {n, 0};
        const ta_seq seqs[] = {below, above};
        EXPECT_EQ(ta_plan_begin(plan.get(), 2, seqs, n_new, nullptr, nullptr, nullptr), TA_E_TIER_FULL) << n;
    }
}

// In the host tier the open block that comes from disk wants a slot of its own size.
TEST(Fit, BlocksFromTheDiskWantSlotsOfTheirSize) {
    const Small small(3, 1, 36 << 10, 4 << 20);
    const Plan plan = make_plan(small.pool);
    ta_seq seqs[4];  // pinned below; pinned above; pinned above and below; on disk
    for (ta_seq& s : seqs) s = make_sequence(small.pool);
    const auto suspend = [&](ta_seq seq, ta_tier tier) {
        ta_ticket ticket = 0;
        ASSERT_EQ(ta_seq_suspend(small.pool.get(), seq, tier, &ticket, nullptr), TA_OK);
        ASSERT_EQ(wait(small.pool, ticket).moved, 1u);
    };
    ASSERT_EQ(small.step(plan, {seqs[0]}, {64}, -1), TA_OK);
    suspend(seqs[0], TA_TIER_HOST);
    ASSERT_EQ(small.step(plan, {seqs[1]}, {64}, -1), TA_OK);
    ASSERT_EQ(small.step(plan, {seqs[2]}, {128}, -1), TA_OK);
    ASSERT_EQ(move_now(small.pool, seqs[2], 1, 1, TA_TIER_HOST).moved, 1u);
    for (int i = 0; i < 3; ++i) ASSERT_EQ(ta_seq_pin(small.pool.get(), seqs[i], 0, i == 2 ? 2 : 1, nullptr), TA_OK);
    ASSERT_EQ(small.step(plan, {seqs[3]}, {10}, -1), TA_OK);
    suspend(seqs[3], TA_TIER_DISK);
    EXPECT_FALSE(fit(small.pool, {seqs[3]}, {1}).after_eviction);
    EXPECT_EQ(small.step(plan, {seqs[3]}, {1}, -1), TA_E_TIER_FULL);
}

// A block that fell and came back leaves no more than it has.
TEST(Fit, FallenBlocksGiveTheirOwnBytes) {
    const Small small(8, 0, 4 << 20, 0, 8, 0, TA_ON);
    const Plan plan = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {5 * 64}, -1), TA_OK);
    EXPECT_EQ(move_now(small.pool, seq, 1, 4, TA_TIER_HOST).moved, 4u);
    EXPECT_EQ(move_now(small.pool, seq, 1, 4, TA_TIER_DEVICE).moved, 4u);
    const ta_kv_pool_stats s = stats(small.pool);
    EXPECT_EQ(s.bytes_free + s.bytes_reclaimable, s.bytes_budget);
    EXPECT_FALSE(fit(small.pool, {0}, {9 * 64}).after_eviction);
    EXPECT_TRUE(fit(small.pool, {0}, {8 * 64}).after_eviction);
    EXPECT_EQ(small.step(plan, {make_sequence(small.pool)}, {8 * 64}, -1), TA_OK);
}

// Fit counts no slot for a block that windows will pass later, since it is shared now.
TEST(Fit, WhatCannotPassTakesNothing) {
    const Small small(3, 0, 0, 0, 8, 64);
    const Plan plan = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {128}, -1), TA_OK);
    const ta_seq fork = fork_sequence(small.pool, seq);
    ASSERT_EQ(small.step(plan, {seq}, {63}, -1), TA_OK);
    EXPECT_TRUE(fit(small.pool, {seq}, {1}).now);
    EXPECT_EQ(small.step(plan, {seq}, {1}, -1), TA_OK);
    EXPECT_EQ(ta_seq_release(small.pool.get(), fork, nullptr), TA_OK);
}

// An idle sequence that shares blocks with the step's gives no room of these.
TEST(Fit, AForkOfTheStepsSequenceGivesNothing) {
    const Small small(2, 0, 4 << 20, 0, 8);
    const Plan plan = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {64}, -1), TA_OK);
    for (const bool forked : {false, true}) {
        if (forked) fork_sequence(small.pool, seq);
        EXPECT_FALSE(fit(small.pool, {seq}, {65}).after_eviction) << forked;
        EXPECT_EQ(small.step(plan, {seq}, {65}, -1), TA_E_TIER_FULL) << forked;
    }
}

// Unless a reader has it, too, the open block that idle sequences share leaves for a step, and fit counts on that.
TEST(Fit, AnOpenBlockThatIdleForksShareMakesRoom) {
    const Small small(3, 0, 4 << 20, 0, 8);
    const Plan plan = make_plan(small.pool), reads = make_plan(small.pool);
    const ta_seq seq = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {seq}, {10}, -1), TA_OK);
    const ta_seq fork = fork_sequence(small.pool, seq), other = make_sequence(small.pool);
    EXPECT_EQ(stats(small.pool).bytes_reclaimable, stats(small.pool).token_block_bytes);
    ASSERT_EQ(ta_plan_begin(reads.get(), 1, &fork, nullptr, nullptr, nullptr, nullptr), TA_OK);
    EXPECT_EQ(stats(small.pool).bytes_reclaimable, 0u);
    EXPECT_FALSE(fit(small.pool, {other}, {190}).after_eviction);
    EXPECT_EQ(small.step(plan, {other}, {190}, -1), TA_E_TIER_FULL);
    ASSERT_EQ(ta_plan_abort(reads.get(), nullptr), TA_OK);
    EXPECT_TRUE(fit(small.pool, {other}, {190}).after_eviction);
    EXPECT_EQ(small.step(plan, {other}, {190}, -1), TA_OK);
    EXPECT_EQ(small.step(plan, {fork, seq}, {1, 1}, -1), TA_OK);
}

// A truncate of blocks that a fork has frees nothing, and sink blocks come again.
TEST(Reserve, HoldsBehindATruncateOfSharedBlocks) {
    Random random(5);
    for (const int32_t sinks : {1, 2, 4, 7}) {
        const Small small(30, 40, 0, 0, 2, 0, TA_DEFAULT, sinks);
        const Plan plan = make_plan(small.pool);
        for (int round = 0; round < 100; ++round) {
            std::vector<ta_seq> seqs = {make_sequence(small.pool)};
            const auto start = int32_t(1 + random.below(800)), tokens = int32_t(1 + random.below(400));
            ASSERT_EQ(small.step(plan, {seqs[0]}, {start}, 0), TA_OK);
            ASSERT_EQ(small.reserve(seqs[0], tokens, 0), TA_OK);
            seqs.push_back(fork_sequence(small.pool, seqs[0]));
            const int64_t to = random.chance(50) ? random.below(64) : random.below(start);
            ASSERT_EQ(ta_seq_truncate(small.pool.get(), seqs[0], std::min<int64_t>(to, start), nullptr), TA_OK);
            do {
                seqs.push_back(make_sequence(small.pool));
            } while (small.step(plan, {seqs.back()}, {int32_t(1 + random.below(64))}, -1) == TA_OK);
            for (int32_t left = tokens, n = 0; left > 0; left -= n) {
                n = random.chance(50) ? left : int32_t(1 + random.below(left));
                ta_error err;
                ASSERT_EQ(small.step(plan, {seqs[0]}, {n}, -1, &err), TA_OK)
                    << sinks << " sinks, " << start << " tokens cut to " << to << ", " << n << " of " << tokens
                    << " come: " << err.message;
            }
            for (const ta_seq seq : seqs) ASSERT_EQ(ta_seq_release(small.pool.get(), seq, nullptr), TA_OK);
        }
    }
}

TEST(Reserve, MovesDoNotTakeItsBlocksToTheDisk) {
    const Small small(9, 0, 0, 4 << 20, 8);
    const Plan plan = make_plan(small.pool);
    const ta_seq reserved = make_sequence(small.pool), other = make_sequence(small.pool);
    ASSERT_EQ(small.step(plan, {reserved}, {192}, -1), TA_OK);
    ASSERT_EQ(small.reserve(reserved, 64), TA_OK);
    const ta_move_info moved = move_now(small.pool, reserved, 0, 3, TA_TIER_DISK);
    EXPECT_EQ(moved.moved, 0u);
    EXPECT_EQ(moved.skipped, 3u);
    ASSERT_EQ(small.reserve(other, 64 * 2), TA_OK);
    EXPECT_EQ(small.step(plan, {reserved}, {64}, -1), TA_OK);
    EXPECT_EQ(move_now(small.pool, reserved, 1, 1, TA_TIER_DISK).moved, 1u) << "the reservation is used up";
}

// Threads that move make room for that, until the last of them has ended.
TEST(Reserve, APoolMayBeDestroyedWhileAMoveMakesRoom) {
    Random random(11);
    for (int round = 0; round < 10; ++round) {
        Small small(16, 0, 72 << 10, 1 << 20, 8);  // the host tier has eight slots
        Plan plan = make_plan(small.pool);
        ta_seq seq = 0;
        for (int i = 0; i < 6; ++i) {
            seq = make_sequence(small.pool);
            ASSERT_EQ(small.step(plan, {seq}, {384}, 1000), TA_OK) << i;
        }
        move(small.pool, seq, 1, 5, TA_TIER_HOST);
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
        plan.reset();
        small.pool.reset();
    }
}

INSTANTIATE_TEST_SUITE_P(Tiers, Admission,
                         ::testing::Values(Tiers{"Device", 0, 0, 4}, Tiers{"Host", 200 << 10, 0, 4},
                                           Tiers{"Disk", 0, 1 << 20, 4}, Tiers{"HostAndDisk", 100 << 10, 1 << 20, 4},
                                           Tiers{"At8Bits", 200 << 10, 0, 8}),
                         [](const auto& p) { return p.param.name; });

}  // namespace
}  // namespace ta::testing
