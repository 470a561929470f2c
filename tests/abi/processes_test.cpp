// Ranks of a group that are processes of their own: what one sends another gets, steps over both, and what is left when one is
// killed at any moment. TA_TEST_KILLS: how many of each kind.
#include "support/processes.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <random>
#include <thread>

#include "support/spread.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using namespace spread;

constexpr int64_t kSecond = 1000000000;

ta_seq filled(const Rank& rank, int32_t tokens, uint64_t seed) {
    const ta_seq seq = make_sequence(rank.pool);
    const Given g = try_step(rank.plan, {seq}, {tokens, 1, seed});
    return g.status == TA_OK ? seq : 0;
}

std::vector<float> stored(const Rank& rank, ta_seq seq) {
    std::vector<float> all;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        const Stored x = dequantize(rank.pool, seq, layer, 0, length(rank.pool, seq), kRow);
        all.insert(all.end(), x.k.begin(), x.k.end());
        all.insert(all.end(), x.v.begin(), x.v.end());
    }
    return all;
}

TEST(Processes, SequencesGoFromOneToTheOther) {
    const ProcessGroup ranks(2, pool_shape());
    const Process other = ranks.start(1, [](const Rank& r, const auto&) {
        const ta_seq own = filled(r, 5000, 7);
        for (uint64_t tag = 1; tag <= 3; ++tag) {
            const ta_transfer_info info = wait(r, receive(r, 0, tag), 60 * kSecond);
            if (info.state != TA_MOVE_DONE || stored(r, info.seq) != stored(r, own)) return false;
            verify(r.pool, info.seq);
        }
        return wait(r, send(r, own, 0, 9, TA_SEND_MOVE), 60 * kSecond).state == TA_MOVE_DONE;
    });
    {
        const Rank r = ranks.join(0);
        ASSERT_EQ(poll(r.group), TA_GROUP_READY);
        const ta_seq seq = filled(r, 5000, 7);
        for (uint64_t tag = 1; tag <= 3; ++tag) {
            const ta_transfer_info info = wait(r, send(r, seq, 1, tag), 60 * kSecond);
            ASSERT_EQ(info.state, TA_MOVE_DONE) << info.reason;
        }
        const ta_transfer_info info = wait(r, receive(r, 1, 9), 60 * kSecond);
        ASSERT_EQ(info.state, TA_MOVE_DONE) << info.reason;
        EXPECT_TRUE(stored(r, info.seq) == stored(r, seq));
        EXPECT_EQ(other.status(), 0);
    }
    EXPECT_EQ(shared_files(), 0u);
}

TEST(Processes, AStepOverThreeIsThatOfOne) {
    const auto run = [](const Rank& r) {
        auto options = partition_options(4);
        const ta_seq seq = make_sequence(r.pool);
        ta_error err;
        require(ta_seq_partition(r.group.get(), r.pool.get(), seq, &options, &err), err);
        std::vector<float> all;
        for (const int32_t n : {700, 1, 64, 3}) {
            const Given g = try_step(r.plan, {seq}, {n, std::min(n, 20), uint64_t(n)});
            if (g.status != TA_OK) throw std::runtime_error(g.text);
            all.insert(all.end(), g.out.begin(), g.out.end());
        }
        return all;
    };
    const ProcessGroup ranks(3, pool_shape());
    const auto body = [&](const Rank& r, const auto&) {
        const bool good = !run(r).empty();
        ranks.meet();
        return good;
    };
    const Process a = ranks.start(1, body), b = ranks.start(2, body);
    const Rank r = ranks.join(0);
    ASSERT_EQ(poll(r.group), TA_GROUP_READY);
    const std::vector<float> spread = run(r);
    ranks.meet();
    const ta_seq whole = make_sequence(r.pool);
    std::vector<float> expected;
    for (const int32_t n : {700, 1, 64, 3}) {
        const Given g = try_step(r.plan, {whole}, {n, std::min(n, 20), uint64_t(n)});
        expected.insert(expected.end(), g.out.begin(), g.out.end());
    }
    EXPECT_LT(largest_difference(spread, expected), 1e-4);
    EXPECT_EQ(a.status(), 0);
    EXPECT_EQ(b.status(), 0);
}

// The other rank dies at some moment of transfers both ways. This one hears of it at once, and its pool goes on.
TEST(Processes, ADeadPeerIsFoundAndTheRestGoesOn) {
    Random random(std::random_device{}());
    int seen = 0;
    for (int i = 0; i < kills(); ++i) {
        const ProcessGroup ranks(2, pool_shape());
        const Process other = ranks.start(1, [](const Rank& r, const auto& say) {
            const ta_seq own = filled(r, 3000, 3);
            say();
            for (uint64_t tag = 1;; ++tag) {
                const ta_ticket out = send(r, own, 0, tag), in = receive(r, 0, tag);
                wait(r, out), wait(r, in);
            }
            return false;
        });
        const Rank r = ranks.join(0);
        ASSERT_EQ(poll(r.group), TA_GROUP_READY);
        const ta_seq seq = filled(r, 3000, 5);
        const std::vector<float> before = stored(r, seq);
        ASSERT_TRUE(other.wait_for_word());
        std::thread killer([&] {
            std::this_thread::sleep_for(std::chrono::microseconds(random.below(60000)));
            other.kill();
        });
        std::vector<float> theirs;
        ta_transfer_info out{}, in{};
        for (uint64_t tag = 1;; ++tag) {
            ta_ticket tickets[2];
            ta_error err;
            if (ta_seq_send(r.group.get(), r.pool.get(), seq, 1, tag, TA_SEND_COPY, &tickets[0], &err) != TA_OK) break;
            if (ta_seq_receive(r.group.get(), r.pool.get(), 1, tag, &tickets[1], &err) != TA_OK) break;
            out = wait(r, tickets[0], 20 * kSecond);
            in = wait(r, tickets[1], 20 * kSecond);
            if (in.state == TA_MOVE_DONE) {
                const std::vector<float> got = stored(r, in.seq);
                if (theirs.empty()) theirs = got;
                ASSERT_TRUE(got == theirs) << "other bytes have arrived";
                verify(r.pool, in.seq);
                EXPECT_EQ(ta_seq_release(r.pool.get(), in.seq, nullptr), TA_OK);
                ++seen;
            }
            if (out.state != TA_MOVE_DONE || in.state != TA_MOVE_DONE) break;
        }
        killer.join();
        other.status();
        ta_error err;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
        while (ta_group_health(r.group.get(), &err) == TA_OK && std::chrono::steady_clock::now() < end) usleep(1000);
        EXPECT_EQ(err.code, TA_E_PEER_LOST) << err.message;
        EXPECT_EQ(err.rank, 1);
        for (const ta_transfer_info* info : {&out, &in}) {
            EXPECT_EQ(info->status, info->state == TA_MOVE_FAILED ? TA_E_PEER_LOST : TA_OK) << info->reason;
        }
        EXPECT_TRUE(stored(r, seq) == before);
        EXPECT_EQ(try_step(r.plan, {seq}, {1, 1}).status, TA_OK);
    }
    std::printf("%d kills of a peer, %d sequences arrived before\n", kills(), seen);
    EXPECT_EQ(shared_files(), 0u);
}

TEST(Processes, AStepEndsWhenARankIsKilled) {
    Random random(std::random_device{}());
    for (int i = 0; i < kills(); ++i) {
        const ProcessGroup ranks(2, pool_shape());
        const auto run = [](const Rank& r, const auto& say) {
            auto options = partition_options(4);
            const ta_seq seq = make_sequence(r.pool);
            ta_error err;
            require(ta_seq_partition(r.group.get(), r.pool.get(), seq, &options, &err), err);
            say();
            for (;;) {
                Given g = try_step(r.plan, {seq}, {5, 5});
                if (g.status != TA_OK) return g;
            }
        };
        const Process other = ranks.start(1, [&](const Rank& r, const auto& say) { return run(r, say).status == TA_OK; });
        const Rank r = ranks.join(0);
        ASSERT_EQ(poll(r.group), TA_GROUP_READY);
        std::thread killer([&] {
            (void)other.wait_for_word();
            std::this_thread::sleep_for(std::chrono::microseconds(random.below(60000)));
            other.kill();
        });
        const Given g = run(r, [] {});
        killer.join();
        other.status();
        EXPECT_EQ(g.status, TA_E_PEER_LOST) << g.text;
        EXPECT_EQ(g.rank, 1) << g.text;
        EXPECT_NE(filled(r, 100, 1), 0u);
    }
}

// Rank 0 has joined, alone.
void kill_the_first(const ProcessGroup& ranks) {
    const Process first = ranks.start(0, [](const Rank&, const auto&) { return true; });
    while (shared_files() == 0) usleep(1000);
    usleep(50000);  // from the file to the rank that is in it
    first.kill();
    first.status();
}

TEST(Processes, OneThatDiesBeforeTheOthersJoinIsMissed) {
    const ProcessGroup ranks(3, pool_shape());
    kill_the_first(ranks);
    EXPECT_EQ(shared_files(), 1u);
    ta_error err;
    const Context context = make_context(1);
    const ta_group_options same = ranks.options(1);
    ta_group* group = nullptr;
    EXPECT_EQ(ta_group_create(context.get(), &same, &group, &err), TA_E_STALE) << err.message;
    EXPECT_EQ(shared_files(), 0u);
}

// A child of fork() has the files of its parent, and does not live for it.
TEST(Processes, AChildDoesNotHideItsParentsDeath) {
    const ProcessGroup ranks(2, pool_shape());
    const Process other = ranks.start(0, [](const Rank&, const auto& say) {
        if (fork() == 0) _exit(int(sleep(8)));
        say();
        return pause() == 0;
    });
    const Rank r = ranks.join(1);
    ASSERT_EQ(poll(r.group), TA_GROUP_READY);
    ASSERT_TRUE(other.wait_for_word());
    other.kill();
    other.status();
    for (int i = 0; i < 500 && ta_group_health(r.group.get(), nullptr) == TA_OK; ++i) usleep(10000);
    EXPECT_EQ(ta_group_health(r.group.get(), nullptr), TA_E_PEER_LOST);
}

// Whoever of the two is last.
TEST(Processes, RanksThatLeaveAtOnceLeaveNoMemory) {
    for (int i = 0; i < 300; ++i) {
        const ProcessGroup ranks(3, pool_shape());
        Rank a = ranks.join(0), b = ranks.join(1);
        std::atomic<int> ready{0};
        const auto leave = [&](Rank& rank) {
            for (++ready; ready < 2;) {
            }
            rank.group.reset();
        };
        std::thread other([&] { leave(b); });
        leave(a);
        other.join();
        ASSERT_EQ(shared_files(), 0u) << i;
    }
}

TEST(Processes, TheMemoryOfTheDeadIsLetGo) {
    const ProcessGroup ranks(2, pool_shape());
    kill_the_first(ranks);
    {
        const ProcessGroup later(2, pool_shape());
        const Rank a = later.join(0), b = later.join(1);
        EXPECT_EQ(poll(a.group), TA_GROUP_READY);
        EXPECT_EQ(poll(b.group), TA_GROUP_READY);
    }
    EXPECT_EQ(shared_files(), 0u);
}

}  // namespace
}  // namespace ta::testing
