// Sequences whose blocks are spread over the ranks of a local group, beside one rank that has all of them.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

#include "abi/spread_layers.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using namespace spread;

TEST(Partition, EveryRankHasTheResultsOfOne) {
    for (const uint32_t n : {1u, 2u, 3u, 8u}) {
        for (const uint32_t bits : {4u, 8u, 2u}) {
            SCOPED_TRACE(std::to_string(n) + " ranks, " + std::to_string(bits) + " bits");
            Spread s(n, bits);
            const size_t a = s.add(partition_options(7)), b = s.add(partition_options(3, n - 1));
            s.expect_step({a}, {300, 300, 1});
            s.expect_step({a, b}, {1, 1, 2});
            for (const int32_t tokens : {62, 1, 1, 64, 65, 127, 129, 1})
                s.expect_step({a, b}, {tokens, std::min(tokens, 3), 3});
            s.expect_step({b}, {0, 5, 4, 5});
        }
    }
}

TEST(Partition, ARankMayBeAheadInStepsWithoutQueries) {
    Spread s(2);
    const size_t a = s.add(partition_options(1));
    for (int i = 0; i < 3; ++i) {
        std::thread late([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            for (int k = 0; k < 3; ++k) EXPECT_EQ(s.step(1, {a}, {100, 0}).status, TA_OK);
        });
        for (int k = 0; k < 3; ++k) EXPECT_EQ(s.step(0, {a}, {100, 0}).status, TA_OK);
        begin(s.ranks[0].plan, s.at({a}, 0), {0}, {1});  // while the other one is behind
        late.join();
        EXPECT_EQ(ta_plan_abort(s.ranks[0].plan.get(), nullptr), TA_OK);
        for (int k = 0; k < 3; ++k) ASSERT_EQ(s.whole_step({a}, {100, 0}).status, TA_OK);
        s.expect_step({a}, {1, 1});
    }
}

TEST(Partition, ARankMayReleaseItsSequenceWhileOthersAttend) {
    for (const ta_partition_output output : {TA_OUTPUT_ALL, TA_OUTPUT_ONE}) {
        Spread s(3, 4, [](ta_group_options& o) { o.operation_ms = 3000; });
        for (uint64_t tag = 1; tag <= 30; ++tag) {
            auto options = partition_options(tag);
            options.output = output;
            const size_t a = s.add(options);
            std::vector<std::thread> threads;
            for (uint32_t r = 0; r < 3; ++r) {
                threads.emplace_back([&, r] {
                    const Given given = s.step(r, {a}, {70, 2});
                    EXPECT_EQ(given.status, TA_OK) << "rank " << r << ": " << given.text;
                    EXPECT_EQ(ta_seq_release(s.ranks[r].pool.get(), s.seqs[a][r], nullptr), TA_OK);
                });
            }
            for (std::thread& t : threads) t.join();
            if (HasFailure()) return;
        }
    }
}

// A rank that gets no results waits for none: it is in a later step while others have not attended in this one.
TEST(Partition, ARankThatGetsNothingMayBeAhead) {
    Spread s(3, 4, [](ta_group_options& o) { o.operation_ms = 3000; });
    auto options = partition_options(1);
    options.output = TA_OUTPUT_ONE;
    options.output_rank = 2;
    const size_t a = s.add(options);
    const std::vector<Asked> steps(4, {70, 2});
    std::vector<std::thread> threads;
    std::vector<Given> given;
    for (uint32_t r = 0; r < 3; ++r) {
        threads.emplace_back([&, r] {
            for (Asked asked : steps) {
                if (r == 1) asked.begun = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
                const Given g = s.step(r, {a}, asked);
                EXPECT_EQ(g.status, TA_OK) << "rank " << r << ": " << g.text;
                if (r == 2) given.push_back(g);
            }
        });
    }
    for (std::thread& t : threads) t.join();
    for (size_t i = 0; i < steps.size(); ++i)
        EXPECT_LT(largest_difference(given[i].out, s.whole_step({a}, steps[i]).out), s.tolerance);
}

TEST(Partition, AStepThatIsGivenUpDoesNotEndTheOneBefore) {
    Spread s(2, 4, [](ta_group_options& o) { o.operation_ms = 3000; });
    auto options = partition_options(1);
    options.output = TA_OUTPUT_ONE;
    options.output_rank = 1;
    const size_t a = s.add(options);
    Asked late{70, 2};
    late.begun = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
    Given given;
    std::thread other([&] { given = s.step(1, {a}, late); });
    EXPECT_EQ(s.step(0, {a}, {70, 2}).status, TA_OK);
    begin(s.ranks[0].plan, s.at({a}, 0), {1}, {1});
    EXPECT_EQ(ta_plan_abort(s.ranks[0].plan.get(), nullptr), TA_OK);
    other.join();
    EXPECT_EQ(given.status, TA_OK) << given.text;
}

TEST(Partition, OptionsOfAttentionHoldOverAllRanks) {
    Spread s(3);
    const size_t a = s.add(partition_options(1));
    s.expect_step({a}, {500, 10});
    Asked asked{1, 1, 9};
    asked.sinks = {0.5f, -1.0f, 6.0f, 2.0f};
    s.expect_step({a}, asked);
    asked.slopes = {0.01f, 0.02f, 0.0f, 0.5f};
    s.expect_step({a}, asked);
    asked.options.window = 70;  // some ranks have none of these keys
    s.expect_step({a}, asked);
    asked.options.softcap = 20.0f;
    asked.n_new = asked.n_query = 200;
    s.expect_step({a}, asked);
}

TEST(Partition, QueriesMayStandAnywhere) {
    for (const uint32_t n : {1u, 2u, 3u}) {
        SCOPED_TRACE(std::to_string(n) + " ranks");
        expect_positions(Spread(n), [](int32_t n_new, int32_t n_query) { return Asked{n_new, n_query, uint64_t(n_query)}; });
    }
}

TEST(Partition, LayersMayDiffer) {
    const UnevenPool pool;
    for (const uint32_t n : {1u, 2u, 3u}) {
        SCOPED_TRACE(std::to_string(n) + " ranks");
        Spread s(n, pool.options);
        expect_uneven_steps(s, [](int32_t n_new, int32_t n_query) { return Asked{n_new, n_query, uint64_t(n_new)}; });
    }
}

// Grows a sequence to 704 tokens at rank r; forks beside it may keep its blocks whole. Then cuts and partitions it.
void spread_late(Spread& s, uint32_t r, bool whole, int64_t cut_to) {
    const Rank& rank = s.ranks[r];
    const ta_seq seq = make_sequence(rank.pool);
    std::vector<ta_seq> forks;
    for (int i = 0; i < 11; ++i) {
        ASSERT_EQ(try_step({rank.plan, {seq}, {64, 1}, s.of_layers}).status, TA_OK);
        if (whole) forks.push_back(fork_sequence(rank.pool, seq));
    }
    ta_error err;
    require(ta_seq_truncate(rank.pool.get(), seq, cut_to, &err), err);
    const auto options = partition_options(1);
    require(ta_seq_partition(rank.group.get(), rank.pool.get(), seq, &options, &err), err);
    for (const ta_seq fork : forks) require(ta_seq_release(rank.pool.get(), fork, &err), err);
    s.seqs[0][r] = seq;
}

class LatePartition {
  public:
    LatePartition(bool first_is_whole, bool second_is_whole, int64_t cut_to) : s(2, pool_.options) {
        s.of_layers = pool_.of_layers;
        s.seqs.emplace_back(2);
        spread_late(s, 0, first_is_whole, cut_to);
        spread_late(s, 1, second_is_whole, cut_to);
        s.whole_seqs.push_back(make_sequence(s.whole));
        for (int i = 0; i < 11; ++i) EXPECT_EQ(s.whole_step({0}, {64, 1}).status, TA_OK);
    }

  private:
    const UnevenPool pool_;

  public:
    Spread s;
};

// If one rank has blocks whole that have passed at the other, both take and refuse the same truncations.
TEST(Partition, RanksMayHaveComeByTheSequenceInOtherWays) {
    for (const int64_t to : {704, 640, 512, 448, 0}) {
        SCOPED_TRACE(to);
        LatePartition late(true, false, 704);
        Spread& s = late.s;
        const ta_status cut = ta_seq_truncate(s.ranks[0].pool.get(), s.seqs[0][0], to, nullptr);
        EXPECT_EQ(ta_seq_truncate(s.ranks[1].pool.get(), s.seqs[0][1], to, nullptr), cut);
        EXPECT_EQ(cut, to == 704 || to == 0 ? TA_OK : TA_E_STATE);
        if (cut == TA_OK) {
            require(ta_seq_truncate(s.whole.get(), s.whole_seqs[0], to, nullptr), {});
        }
        for (const int32_t tokens : {1, 70, 2}) s.expect_step({0}, {tokens, 1});
    }
}

// A former, larger length counts for nothing if all blocks are whole.
TEST(Partition, ASequenceThatWasCutIsSpread) {
    LatePartition late(true, true, 128);
    Spread& s = late.s;
    s.whole_seqs[0] = make_sequence(s.whole);
    for (int i = 0; i < 2; ++i) ASSERT_EQ(s.whole_step({0}, {64, 1}).status, TA_OK);
    for (const int32_t tokens : {1, 70, 2}) s.expect_step({0}, {tokens, 1});
}

TEST(Partition, ARankHasItsBlocksAndTheLastOne) {
    constexpr uint32_t kRanks = 4;
    Spread s(kRanks);
    const size_t a = s.add(partition_options(1, 2));
    for (const int32_t tokens : {640, 1, 30, 40, 200}) s.expect_step({a}, {tokens, 1});
    const int64_t tokens = length(s.whole, s.whole_seqs[a]), blocks = (tokens + 63) / 64;
    for (uint32_t r = 0; r < kRanks; ++r) {
        const ta_seq seq = s.seqs[a][r];
        verify(s.ranks[r].pool, seq);
        int64_t here = 0;
        for (int64_t b = 0; b < blocks; ++b) {
            const bool is_own = (2 + b) % kRanks == r, is_last = b + 1 == blocks;
            here += is_own || is_last;
            if (!is_own) continue;
            const int64_t n = std::min<int64_t>(64, tokens - b * 64);
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                EXPECT_TRUE(dequantize(s.ranks[r].pool, seq, layer, b * 64, n, kRow) ==
                            dequantize(s.whole, s.whole_seqs[a], layer, b * 64, n, kRow))
                    << "rank " << r << " block " << b;
            }
        }
        const ta_residency at = residency(s.ranks[r].pool, seq);
        EXPECT_EQ(int64_t(at.device_blocks), here);
        EXPECT_EQ(at.dropped_blocks, 0u);
    }
}

void check_spread_later(Spread s) {
    ta_error err;
    std::vector<ta_seq> at;
    for (const Rank& r : s.ranks) {
        at.push_back(make_sequence(r.pool));
        ASSERT_EQ(try_step({r.plan, {at.back()}, {1000, 1}, s.of_layers}).status, TA_OK);
    }
    s.whole_seqs.push_back(make_sequence(s.whole));
    ASSERT_EQ(s.whole_step({0}, {1000, 1}).status, TA_OK);
    const uint64_t before = stats(s.ranks[0].pool).bytes_used;
    const auto options = partition_options(1);
    for (uint32_t r = 0; r < 2; ++r)
        require(ta_seq_partition(s.ranks[r].group.get(), s.ranks[r].pool.get(), at[r], &options, &err), err);
    EXPECT_LT(stats(s.ranks[0].pool).bytes_used, before * 65 / 100);
    s.seqs.push_back(at);
    for (const int32_t tokens : {1, 30, 1, 1}) s.expect_step({0}, {tokens, 1});
}
TEST(Partition, ASequenceThatAllHaveIsSpread) {
    check_spread_later(Spread(2));
    const UnevenPool pool;
    Spread uneven(2, pool.options);
    uneven.of_layers = pool.of_layers;
    check_spread_later(std::move(uneven));
}

TEST(Partition, OutputsGoWhereTheyAreWanted) {
    expect_outputs([](const ta_kv_pool_options& pool) { return Spread(3, pool); },
                   [](int32_t n_new, int32_t n_query) {
                       return Asked{n_new, n_query, 1, 5};
                   });
}

// Steps in one step's place: what a rank says of it, and that the next one is as if nothing had been.
TEST(Partition, RanksThatDisagreeFindOut) {
    constexpr uint32_t kRanks = 3;
    Spread s(kRanks, 4, [](ta_group_options& o) { o.operation_ms = 3000; });
    const size_t a = s.add(partition_options(1)), b = s.add(partition_options(2));
    s.expect_step({a, b}, {100, 1});
    const auto other = [](auto change) {
        return [change](uint32_t r) {
            Asked asked{5, 2, 3};
            if (r == 1) change(asked);
            return asked;
        };
    };
    for (const auto& differs : std::initializer_list<std::function<Asked(uint32_t)>>{
             other([](Asked& x) { x.n_new = 6; }), other([](Asked& x) { x.n_query = 3; }), other([](Asked& x) { x.group = 3; }),
             other([](Asked& x) {
                 x.positions = {0, 1, 2, 3};
             }),
             other([](Asked& x) { x.options.window = 9; })}) {
        bool told = false;
        for (const Given& g : s.steps({a, b}, differs)) {
            // A rank that begins after the others have found out waits for them.
            EXPECT_TRUE(g.status == TA_E_MISMATCH || g.status == TA_E_TIMEOUT) << ta_status_name(g.status) << g.text;
            EXPECT_GE(g.rank, 0);
            told |= g.status == TA_E_MISMATCH;
        }
        EXPECT_TRUE(told);
        for (uint32_t r = 0; r < kRanks; ++r)
            EXPECT_EQ(length(s.ranks[r].pool, s.seqs[a][r]), length(s.whole, s.whole_seqs[a]));
        s.expect_step({a, b}, {1, 1, 4});
    }
}

// A rank that passes no queries waits for nobody; those that do hear of it, whichever begins first.
TEST(Partition, RanksThatPassQueriesWhileAnotherPassesNoneAreTold) {
    Spread s(3, 4, [](ta_group_options& o) { o.operation_ms = 60000; });
    const size_t a = s.add(partition_options(1)), b = s.add(partition_options(2));
    for (const bool idle_first : {false, true}) {
        const auto idle = [&] { EXPECT_EQ(s.step(1, {a, b}, {100, 0}).status, TA_OK); };
        if (idle_first) idle();
        std::vector<Given> given(3);
        std::vector<std::thread> threads;
        for (const uint32_t r : {0u, 2u}) threads.emplace_back([&, r] { given[r] = s.step(r, {a, b}, {100, 1}); });
        if (!idle_first) {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            idle();
        }
        for (std::thread& t : threads) t.join();
        for (const uint32_t r : {0u, 2u}) {
            EXPECT_EQ(given[r].status, TA_E_MISMATCH) << given[r].text;
            EXPECT_EQ(given[r].rank, 1);
        }
        for (const size_t m : {a, b}) require(ta_seq_truncate(s.ranks[1].pool.get(), s.seqs[m][1], 0, nullptr), {});
    }
    s.expect_step({a, b}, {100, 1});
}

// Threads of a rank may partition different sequences in any order.
TEST(Partition, TheOrderOfPartitionsHidesNoMismatch) {
    Spread s(2, 4, [](ta_group_options& o) { o.operation_ms = 20000; });
    const size_t a = s.add(partition_options(1)), b = s.add(partition_options(2));
    for (const uint32_t r : {0u, 1u}) {
        const Rank& rank = s.ranks[r];
        for (const size_t m : {a, b}) require(ta_seq_release(rank.pool.get(), s.seqs[m][r], nullptr), {});
        for (const size_t m : {r == 0 ? a : b, r == 0 ? b : a}) {
            s.seqs[m][r] = make_sequence(rank.pool);
            const auto options = partition_options(m == a ? 1 : 2);
            require(ta_seq_partition(rank.group.get(), rank.pool.get(), s.seqs[m][r], &options, nullptr), {});
        }
    }
    ASSERT_EQ(s.step(1, {a}, {64, 0}).status, TA_OK);
    const Given given = s.step(0, {a}, {64, 1});
    EXPECT_EQ(given.status, TA_E_MISMATCH) << given.text;
    EXPECT_EQ(given.rank, 1);
}

// A begin that fails at one rank alone, before the others could know of it: they abort the step, and all go on.
struct FailingBegin {
    explicit FailingBegin(Spread& of) : s(of) {}
    // Where no room is found, and where an argument is wrong.
    void fail(bool room) const {
        const ta_seq seq = s.seqs[0][1];
        const int32_t n_new = room ? 64 << 20 : 64, n_query = room ? 1 : -1;
        EXPECT_EQ(ta_plan_begin(s.ranks[1].plan.get(), 1, &seq, &n_new, &n_query, nullptr, nullptr),
                  room ? TA_E_TIER_FULL : TA_E_INVALID);
        for (const int32_t queries : {1, 0}) {
            for (const uint32_t r : {0u, 2u}) begin(s.ranks[r].plan, s.at({0}, r), {64}, {queries});
            for (const uint32_t r : {0u, 2u}) EXPECT_EQ(ta_plan_abort(s.ranks[r].plan.get(), nullptr), TA_OK);
        }
    }
    void truncate(uint32_t r, int64_t to) const {
        require(ta_seq_truncate(s.ranks[r].pool.get(), s.seqs[0][r], to, nullptr), {});
    }
    Spread& s;
};

TEST(Partition, ABeginThatFailsAtOneRankHidesNoMismatch) {
    Spread s(3, 4, [](ta_group_options& o) { o.operation_ms = 20000; });
    s.add(partition_options(1));
    const FailingBegin failing(s);
    for (const bool room : {false, true}) {
        for (const bool has_met : {false, true}) {
            failing.fail(room);
            const int64_t before = length(s.ranks[1].pool, s.seqs[0][1]);
            const auto given = s.steps({0}, [](uint32_t r) { return Asked{64, r == 1 ? 0 : 1}; });
            EXPECT_EQ(given[1].status, TA_OK) << given[1].text;
            for (const uint32_t r : {0u, 2u}) {
                EXPECT_EQ(given[r].status, TA_E_MISMATCH) << given[r].text << " met " << has_met;
                EXPECT_EQ(given[r].rank, 1);
            }
            failing.truncate(1, before);
            s.expect_step({0}, {64, 1});
        }
    }
}

// The ranks make a step without queries, take it back, and make it with queries: rank 1, whose begin failed, comes first.
TEST(Partition, ABeginThatFailsAtOneRankFeignsNoMismatch) {
    Spread s(3, 4, [](ta_group_options& o) { o.operation_ms = 20000; });
    s.add(partition_options(1));
    const FailingBegin failing(s);
    for (const bool room : {false, true}) {
        failing.fail(room);
        const int64_t before = length(s.ranks[1].pool, s.seqs[0][1]);
        std::vector<std::thread> threads;
        for (uint32_t r = 0; r < 3; ++r) {
            threads.emplace_back([&, r] {
                EXPECT_EQ(s.step(r, {0}, {64, 0}).status, TA_OK);
                failing.truncate(r, before);
                if (r != 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
                const Given given = s.step(r, {0}, {64, 1});
                EXPECT_EQ(given.status, TA_OK) << "rank " << r << ": " << given.text;
            });
        }
        for (std::thread& t : threads) t.join();
        EXPECT_EQ(s.whole_step({0}, {64, 1}).status, TA_OK);
    }
    s.expect_step({0}, {1, 1});
}

// ta_seq_partition fails at rank 1, which calls it again: with all ranks, which begin anew, or alone.
struct FailingPartition : Spread {
    explicit FailingPartition(bool all_anew) : Spread(2, 4, [](ta_group_options& o) { o.operation_ms = 20000; }) {
        seqs.push_back({make_sequence(ranks[0].pool), make_sequence(ranks[1].pool)});
        EXPECT_EQ(partition(0, seqs[0][0]), TA_OK);
        EXPECT_EQ(partition(1, 1), TA_E_STALE);
        make_anew(1);
        if (all_anew) make_anew(0);
    }
    ta_status partition(uint32_t r, ta_seq seq) const {
        const auto options = partition_options(1);
        return ta_seq_partition(ranks[r].group.get(), ranks[r].pool.get(), seq, &options, nullptr);
    }
    void make_anew(uint32_t r) {
        EXPECT_EQ(ta_seq_release(ranks[r].pool.get(), seqs[0][r], nullptr), TA_OK);
        seqs[0][r] = make_sequence(ranks[r].pool);
        EXPECT_EQ(partition(r, seqs[0][r]), TA_OK);
    }
    // Both go on to a step with queries of the next sequence, one of them earlier.
    void go_on(uint32_t ahead) {
        const auto goes_on = [&](uint32_t r) {
            make_anew(r);
            const Given given = step(r, {0}, {64, 1});
            EXPECT_EQ(given.status, TA_OK) << "rank " << r << ": " << given.text;
        };
        std::this_thread::sleep_for(std::chrono::milliseconds(50));  // messages have come
        std::thread other([&] { goes_on(ahead); });
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        goes_on(1 - ahead);
        other.join();
    }
};

TEST(Partition, APartitionThatFailsAtOneRankHidesNoMismatch) {
    FailingPartition s(true);
    EXPECT_EQ(s.step(1, {0}, {64, 0}).status, TA_OK);
    const Given given = s.step(0, {0}, {64, 1});
    EXPECT_EQ(given.status, TA_E_MISMATCH) << given.text;
    EXPECT_EQ(given.rank, 1);
}

// One rank has the next sequence with the tag while the other still has the one that had a step without queries.
TEST(Partition, APartitionThatFailsAtOneRankFeignsNoMismatch) {
    for (const bool all_anew : {true, false}) {
        for (const uint32_t ahead : {0u, 1u}) {
            FailingPartition s(all_anew);
            for (const uint32_t r : {0u, 1u}) EXPECT_EQ(s.step(r, {0}, {64, 0}).status, TA_OK);
            s.go_on(ahead);
        }
    }
}

// Rank 1 alone calls ta_seq_partition again, and rank 0 alone fails in a step without queries: each has released as much as the other
// when their sequences are not the same.
TEST(Partition, FailuresAtTwoRanksFeignNoMismatch) {
    FailingPartition s(false);
    const int32_t n_new = 64 << 20, n_query = 0;
    EXPECT_EQ(ta_plan_begin(s.ranks[0].plan.get(), 1, &s.seqs[0][0], &n_new, &n_query, nullptr, nullptr), TA_E_TIER_FULL);
    EXPECT_EQ(s.step(1, {0}, {64, 0}).status, TA_OK);
    s.go_on(0);
}

// The same step comes twice, without queries and with them: a rank that is still in the first one does not end the second.
TEST(Partition, AStepMayBeMadeAgainWithQueries) {
    Spread s(2);
    const size_t a = s.add(partition_options(1));
    for (const bool aborted : {false, true}) {
        std::vector<std::thread> threads;
        for (uint32_t r = 0; r < 2; ++r) {
            threads.emplace_back([&, r] {
                const int64_t n = length(s.ranks[r].pool, s.seqs[a][r]);
                if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
                if (aborted) {
                    begin(s.ranks[r].plan, s.at({a}, r), {64}, {0});
                    EXPECT_EQ(ta_plan_abort(s.ranks[r].plan.get(), nullptr), TA_OK);
                } else {
                    EXPECT_EQ(s.step(r, {a}, {64, 0}).status, TA_OK);
                    EXPECT_EQ(ta_seq_truncate(s.ranks[r].pool.get(), s.seqs[a][r], n, nullptr), TA_OK);
                }
                const Given given = s.step(r, {a}, {64, 1});
                EXPECT_EQ(given.status, TA_OK) << given.text;
            });
        }
        for (std::thread& t : threads) t.join();
    }
}

// The same where a new sequence has the tag of the one that the first step was of.
TEST(Partition, ATagMayBeUsedAgain) {
    Spread s(2);
    const ta_partition_options options = partition_options(1);
    const size_t a = s.add(options);
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < 2; ++r) {
        threads.emplace_back([&, r] {
            Rank& rank = s.ranks[r];
            if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
            EXPECT_EQ(s.step(r, {a}, {64, 0}).status, TA_OK);
            EXPECT_EQ(ta_seq_release(rank.pool.get(), s.seqs[a][r], nullptr), TA_OK);
            s.seqs[a][r] = make_sequence(rank.pool);
            EXPECT_EQ(ta_seq_partition(rank.group.get(), rank.pool.get(), s.seqs[a][r], &options, nullptr), TA_OK);
            const Given given = s.step(r, {a}, {64, 1});
            EXPECT_EQ(given.status, TA_OK) << given.text;
        });
    }
    for (std::thread& t : threads) t.join();
}

// A rank that gets no results releases its sequence, and ends or begins a step of the next one with that tag, while another one is
// still in the last step of the first.
TEST(Partition, WhatARankSaysOfANewSequenceOutlivesTheOldOne) {
    for (const int32_t queries : {0, 1}) {
        Spread s(2, 4, [](ta_group_options& o) { o.operation_ms = 20000; });
        ta_partition_options options = partition_options(1);
        options.output = TA_OUTPUT_ONE;
        const size_t a = s.add(options);
        const auto make_anew = [&](uint32_t r) {
            const Rank& rank = s.ranks[r];
            EXPECT_EQ(ta_seq_release(rank.pool.get(), s.seqs[a][r], nullptr), TA_OK);
            s.seqs[a][r] = make_sequence(rank.pool);
            EXPECT_EQ(ta_seq_partition(rank.group.get(), rank.pool.get(), s.seqs[a][r], &options, nullptr), TA_OK);
        };
        Asked first{64, 1};
        std::thread ahead;
        first.begun = [&] {
            EXPECT_EQ(s.step(1, {a}, {64, 1}).status, TA_OK);
            make_anew(1);
            ahead = std::thread([&] { EXPECT_EQ(s.step(1, {a}, {64, queries}).status, TA_OK); });
            std::this_thread::sleep_for(std::chrono::milliseconds(100));  // rank 0 has heard of it
        };
        const Given last = s.step(0, {a}, first);
        ASSERT_EQ(last.status, TA_OK) << last.text;
        make_anew(0);
        const Given given = s.step(0, {a}, {64, 1});
        EXPECT_EQ(given.status, queries == 0 ? TA_E_MISMATCH : TA_OK) << given.text;
        EXPECT_EQ(given.rank, queries == 0 ? 1 : -1);
        ahead.join();
    }
}

TEST(Partition, ARankThatGivesTheStepUpTellsTheOthers) {
    Spread s(2, 4, [](ta_group_options& o) { o.operation_ms = 60000; });
    const size_t a = s.add(partition_options(1));
    s.expect_step({a}, {100, 1});
    for (int i = 0; i < 20; ++i) {
        std::vector<float> bad(kRow, INFINITY);
        Given waits;
        std::thread other([&] { waits = try_step(s.ranks[0].plan, s.at({a}, 0), {1, 1}); });
        begin(s.ranks[1].plan, s.at({a}, 1), {1});
        Tensor k(bad, 1, kHeads, kDim), v(bad, 1, kHeads, kDim);
        EXPECT_EQ(ta_append(s.ranks[1].plan.get(), 0, k.view(), v.view(), nullptr), TA_E_NONFINITE);
        std::this_thread::sleep_for(std::chrono::milliseconds(i));
        EXPECT_EQ(ta_plan_abort(s.ranks[1].plan.get(), nullptr), TA_OK);
        // One that had not begun then is told by the step that follows.
        Given next;
        std::thread follows([&] { next = try_step(s.ranks[1].plan, s.at({a}, 1), {1, 1}); });
        other.join();
        if (waits.status != TA_OK) {
            EXPECT_EQ(waits.status, TA_E_CANCELLED) << waits.text;
            EXPECT_EQ(waits.rank, 1);
            waits = try_step(s.ranks[0].plan, s.at({a}, 0), {1, 1});
        }
        follows.join();
        ASSERT_EQ(waits.status, TA_OK) << waits.text;
        ASSERT_EQ(next.status, TA_OK) << next.text;
        ASSERT_EQ(s.whole_step({a}, {1, 1}).status, TA_OK);
    }
    s.expect_step({a}, {1, 1, 8});
}

// Not even a rank that gets no results, and so waits for none, whether it was in that step or not.
TEST(Partition, NobodyJoinsAStepThatWasGivenUp) {
    for (const ta_partition_output output : {TA_OUTPUT_ONE, TA_OUTPUT_ALL}) {
        for (const bool both : {false, true}) {
            Spread s(2, 4, [](ta_group_options& o) { o.operation_ms = 300; });
            auto options = partition_options(1);
            options.output = output;
            const size_t a = s.add(options);
            for (uint32_t r = 0; r < (both ? 2 : 1); ++r) begin(s.ranks[r].plan, s.at({a}, r), {1});
            for (uint32_t r = 0; r < (both ? 2 : 1); ++r) EXPECT_EQ(ta_plan_abort(s.ranks[r].plan.get(), nullptr), TA_OK);
            std::this_thread::sleep_for(std::chrono::milliseconds(50));  // rank 1 has heard of it
            for (int i = 0; i < 2; ++i) {
                const Given alone = s.step(1, {a}, {1, 1});
                EXPECT_EQ(alone.status, TA_E_TIMEOUT);
                EXPECT_EQ(alone.text, "rank 0 did not begin the step in 300 ms");
            }
            for (const Given& g : s.steps({a}, {1, 1})) EXPECT_EQ(g.status, TA_OK) << g.text;
            for (uint32_t r = 0; r < 2; ++r) EXPECT_EQ(length(s.ranks[r].pool, s.seqs[a][r]), 1);
        }
    }
}

// Rank 1's part for an attempt comes when rank 0 is in the next attempt already, which has other tokens.
TEST(Partition, PartsOfAnAttemptThatIsOverAreNotMerged) {
    auto fault = sized<ta_x_group_fault>();
    fault.kind = TA_X_FAULT_DELAY;
    fault.action = 7;  // hello, welcome, a step and its two parts, the attempt; then its part
    fault.detail = 400;
    Spread s(2, 4, [&](ta_group_options& o) {
        if (o.rank == 1) o.fault = &fault;
    });
    const size_t a = s.add(partition_options(1));
    s.expect_step({a}, {200, 1});
    const Asked attempt{5, 2, 100}, next{5, 2, 200};
    std::vector<Given> given(2);
    std::thread other([&] {
        EXPECT_EQ(s.step(1, {a}, attempt).status, TA_E_CANCELLED);
        std::this_thread::sleep_for(std::chrono::milliseconds(500));  // it has arrived
        Asked slow = next;  // rank 0 hears of the attempt long before the part of it comes
        slow.begun = [] { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
        given[1] = s.step(1, {a}, slow);
    });
    begin(s.ranks[0].plan, s.at({a}, 0), {5}, {2});
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    EXPECT_EQ(ta_plan_abort(s.ranks[0].plan.get(), nullptr), TA_OK);
    given[0] = s.step(0, {a}, next);
    other.join();
    const Given expected = s.whole_step({a}, next);
    for (const Given& g : given) {
        ASSERT_EQ(g.status, TA_OK) << g.text;
        EXPECT_LT(largest_difference(g.out, expected.out), 1e-4);
    }
}

TEST(Partition, WaitsEndInTime) {
    Spread s(2, 4, [](ta_group_options& o) { o.operation_ms = 1000; });
    const size_t a = s.add(partition_options(1));
    const Given alone = try_step(s.ranks[0].plan, s.at({a}, 0), {1, 1});
    EXPECT_EQ(alone.status, TA_E_TIMEOUT) << alone.text;
    EXPECT_EQ(alone.rank, 1);
    EXPECT_EQ(length(s.ranks[0].pool, s.seqs[a][0]), 0);
    s.expect_step({a}, {70, 2});
    Given waits;
    std::thread other([&] { waits = try_step(s.ranks[0].plan, s.at({a}, 0), {1, 1}); });
    s.ranks[1].group.reset();
    other.join();
    EXPECT_TRUE(waits.status == TA_E_PEER_LOST || waits.status == TA_E_TIMEOUT) << waits.text;
    EXPECT_EQ(try_step(s.ranks[0].plan, s.at({a}, 0), {1, 1}).status, TA_E_PEER_LOST);
    const Given without = try_step(s.ranks[1].plan, s.at({a}, 1), {1, 1});
    EXPECT_EQ(without.status, TA_E_STATE) << without.text;
    EXPECT_EQ(ta_seq_release(s.ranks[1].pool.get(), s.seqs[a][1], nullptr), TA_OK);
}

TEST(Partition, OtherCallsRefuseOrKeepItWhole) {
    Spread s(2);
    const size_t a = s.add(partition_options(1));
    s.expect_step({a}, {330, 2});
    const Rank& r = s.ranks[0];
    const ta_seq seq = s.seqs[a][0], plain = make_sequence(r.pool);
    ta_seq out = 0;
    ta_ticket ticket = 0;
    ta_error err;
    EXPECT_EQ(ta_seq_fork(r.pool.get(), seq, &out, nullptr), TA_E_STATE);
    EXPECT_EQ(ta_seq_save(r.pool.get(), seq, "/nonexistent/x", nullptr, nullptr), TA_E_STATE);
    EXPECT_EQ(ta_kv_pool_save(r.pool.get(), "/nonexistent/x", 0, nullptr, nullptr), TA_E_STATE);
    for (const ta_send_mode mode : {TA_SEND_COPY, TA_SEND_MOVE}) {
        EXPECT_EQ(ta_seq_send(r.group.get(), r.pool.get(), seq, 1, 1, mode, &ticket, &err), TA_E_STATE) << err.message;
    }
    const auto options = partition_options(2), same = partition_options(1);
    for (const auto* again : {&options, &same})
        EXPECT_EQ(ta_seq_partition(r.group.get(), r.pool.get(), seq, again, nullptr), TA_E_STATE);
    EXPECT_EQ(ta_seq_partition(r.group.get(), r.pool.get(), plain, &same, nullptr), TA_E_INVALID);
    const std::array both = {seq, plain};
    EXPECT_EQ(ta_plan_begin(r.plan.get(), 2, both.data(), nullptr, nullptr, nullptr, &err), TA_E_INVALID);
    EXPECT_EQ(err.sequence, 1);
    for (const int64_t n : {100, 319}) EXPECT_EQ(ta_seq_truncate(r.pool.get(), seq, n, nullptr), TA_E_STATE);
    for (const int64_t n : {325, 192}) {
        for (uint32_t i = 0; i < 2; ++i) require(ta_seq_truncate(s.ranks[i].pool.get(), s.seqs[a][i], n, &err), err);
        EXPECT_EQ(stats(s.ranks[0].pool).shared_blocks, 0u);
        require(ta_seq_truncate(s.whole.get(), s.whole_seqs[a], n, &err), err);
        // 192: its last block is one rank's by now.
        for (uint32_t i = 0; i < 2 && n == 192; ++i) {
            EXPECT_EQ(ta_seq_truncate(s.ranks[i].pool.get(), s.seqs[a][i], 150, &err), TA_E_STATE);
            EXPECT_STREQ(err.message,
                         "token 150 of the partitioned sequence lies in a block of one rank; truncate to a multiple of 64");
        }
        s.expect_step({a}, {64, 2});
    }
    for (uint32_t i = 0; i < 2; ++i) {
        require(ta_seq_release(s.ranks[i].pool.get(), s.seqs[a][i], &err), err);
        require(ta_seq_partition(s.ranks[i].group.get(), s.ranks[i].pool.get(), make_sequence(s.ranks[i].pool), &same, &err),
                err);
        EXPECT_EQ(stats(s.ranks[i].pool).bytes_used, 0u);
    }
}

// Behind the cut the block before is one rank's: none goes on with its turning pairs.
TEST(Partition, RanksQuantizeAlikeBehindACut) {
    Spread s(2);
    const size_t a = s.add(partition_options(1));
    Random random(3);
    const auto grow = [&](int32_t n) {
        const int64_t at = length(s.ranks[0].pool, s.seqs[a][0]);
        const std::vector<float> noise = random.normals(n * kHeads * kDim);
        for (uint32_t r = 0; r < 2; ++r) {
            begin(s.ranks[r].plan, {s.seqs[a][r]}, {n}, {0});
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                std::vector<float> x = noise;
                for (int64_t row = 0; row < n * kHeads; ++row) {
                    const double angle = 0.05 * double(at + row / kHeads);
                    x[size_t(row * kDim + 3)] += float(60.0 * std::cos(angle));
                    x[size_t(row * kDim + 3 + kDim / 2)] += float(60.0 * std::sin(angle));
                }
                Tensor k(x, n, kHeads, kDim), v(noise, n, kHeads, kDim);
                append(s.ranks[r].plan, layer, k, v);
            }
            end(s.ranks[r].plan);
        }
    };
    grow(320);
    for (uint32_t r = 0; r < 2; ++r) require(ta_seq_truncate(s.ranks[r].pool.get(), s.seqs[a][r], 192, nullptr), {});
    for (int i = 0; i < 10; ++i) grow(1);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        EXPECT_TRUE(dequantize(s.ranks[0].pool, s.seqs[a][0], layer, 192, 10, kHeads * kDim) ==
                    dequantize(s.ranks[1].pool, s.seqs[a][1], layer, 192, 10, kHeads * kDim))
            << "layer " << layer;
    }
}

// They are of blocks that other ranks have.
TEST(Partition, UniversalScalesMustBeKnown) {
    auto numerics = sized<ta_numerics>();
    numerics.open_scale = TA_OPEN_SCALE_UNIVERSAL;
    const std::vector<Rank> ranks = make_ranks(1, pool_options(kLayers, kHeads, kDim, 4, &numerics));
    const Rank& r = ranks[0];
    const auto grow = [&](ta_seq seq, int32_t n) {
        Random random(uint64_t(n) + 1);
        begin(r.plan, {seq}, {n}, {0});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(n * kHeads * kDim), n, kHeads, kDim), v(random.normals(n * kHeads * kDim), n, kHeads, kDim);
            append(r.plan, layer, k, v);
        }
        end(r.plan);
    };
    const ta_seq first = make_sequence(r.pool);
    grow(first, 200);
    ta_seq fork = 0;
    ta_error err;
    require(ta_seq_fork(r.pool.get(), first, &fork, &err), err);
    const auto options = partition_options(1);
    EXPECT_EQ(ta_seq_partition(r.group.get(), r.pool.get(), fork, &options, &err), TA_E_STATE);
    EXPECT_NE(std::strstr(err.message, "universal scales"), nullptr) << err.message;
    grow(fork, 1);
    require(ta_seq_partition(r.group.get(), r.pool.get(), fork, &options, &err), err);
    EXPECT_EQ(ta_seq_truncate(r.pool.get(), fork, 64, &err), TA_E_UNSUPPORTED);
    EXPECT_EQ(length(r.pool, fork), 201);
    for (const int64_t to : {201, 0}) require(ta_seq_truncate(r.pool.get(), fork, to, &err), err);
    grow(fork, 70);
}

}  // namespace
}  // namespace ta::testing
