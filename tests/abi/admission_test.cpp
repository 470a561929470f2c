// Admission: ta_kv_pool_fit foretells what a begin finds, ta_seq_reserve keeps its promise, and an engine that admits by them never
// meets TA_E_TIER_FULL.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <thread>

#include "abi/small_pool.h"

namespace ta::testing {
namespace {

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
                const uint64_t before = stats(pool).bytes_promised;
                require(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, nullptr, &err), err);
                require(ta_plan_abort(plan.get(), &err), err);
                EXPECT_EQ(stats(pool).bytes_promised, before);
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

INSTANTIATE_TEST_SUITE_P(Tiers, Admission,
                         ::testing::Values(Tiers{"Device", 0, 0, 4}, Tiers{"Host", 200 << 10, 0, 4},
                                           Tiers{"Disk", 0, 1 << 20, 4}, Tiers{"HostAndDisk", 100 << 10, 1 << 20, 4},
                                           Tiers{"At8Bits", 200 << 10, 0, 8}),
                         [](const auto& p) { return p.param.name; });

}  // namespace
}  // namespace ta::testing
