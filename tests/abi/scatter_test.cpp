// Dense attention whose heads a root scatters over the ranks of a local group: the bits of one rank alone, whatever is asked for.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>

#include "support/scattered.h"

namespace ta::testing {
namespace {

using namespace scattered;

constexpr ta_dense_variant kVariants[] = {TA_DENSE_INT8_PAGE, TA_DENSE_INT_FLASH, TA_DENSE_INT_FLASH_HALF, TA_DENSE_DISTR};

TEST(Scatter, HeadsHaveTheBitsOfOneRank) {
    for (const uint32_t n : {1u, 2u, 3u, 7u}) {
        const std::vector<Member> members = make_members(n);
        for (const ta_dense_variant variant : kVariants) {
            for (const int32_t group : {1, 4}) {
                for (const int64_t kv_heads : {1, 5, 16}) {
                    Problem p;
                    p.variant = variant;
                    p.group = group;
                    p.kv_heads = kv_heads;
                    p.q_tokens = kv_heads == 1 ? 3 : 70;
                    Asked asked;
                    asked.root = n - 1;
                    asked.scatter.heads_per_round = kv_heads == 16 ? 0 : 1;
                    SCOPED_TRACE(std::to_string(n) + " ranks");
                    const std::vector<Given> given = expect_bits(members, p, asked);
                    uint32_t heads = 0;
                    for (const Given& g : given) heads += g.info.heads;
                    EXPECT_EQ(heads, kv_heads);
                    if (HasFailure()) return;
                }
            }
        }
    }
}

TEST(Scatter, EveryTypeAndLayout) {
    const std::vector<Member> members = make_members(3);
    for (const ta_dtype type : kDtypes) {
        for (const Layout layout : kLayouts) {
            Problem p;
            p.q = type;
            p.k = type == TA_DTYPE_F16 ? TA_DTYPE_BF16 : type;
            p.v = type == TA_DTYPE_BF16 ? TA_DTYPE_F32 : type;
            p.out = type == TA_DTYPE_F32 ? TA_DTYPE_F16 : type;
            p.layout = layout;
            p.lse = type != TA_DTYPE_F32;
            p.group = 2;
            expect_bits(members, p);
            p.variant = TA_DENSE_INT8_PAGE;
            expect_bits(members, p);
        }
    }
}

TEST(Scatter, EveryOption) {
    const std::vector<Member> members = make_members(2);
    for (const ta_dense_variant variant : kVariants) {
        Problem p;
        p.variant = variant;
        p.group = 2;
        p.slopes = p.sinks = true;
        p.mask = TA_MASK_FULL;
        p.k_tokens = 100;
        expect_bits(members, p);
        p.sinks = false;
        p.q_offsets = {0, 0, 13, 70};
        p.k_offsets = {0, 20, 20, 100};
        p.v_granularity = variant == TA_DENSE_DISTR ? TA_GRANULARITY_DEFAULT : TA_GRANULARITY_TENSOR;
        expect_bits(members, p);
        p = {};
        p.variant = variant;
        p.q_tokens = p.k_tokens = 1000;
        p.kv_heads = 3;
        expect_bits(members, p);
        p.q_tokens = 0;
        expect_bits(members, p);
        p.q_tokens = 5;
        p.k_tokens = 0;
        p.mask = TA_MASK_FULL;
        expect_bits(members, p);
    }
    Problem p;
    p.group_size = 4;
    p.d = 128;
    expect_bits(members, p);
}

TEST(Scatter, RanksGetWhatTheRootSays) {
    const std::vector<Member> members = make_members(4);
    Problem p;
    p.kv_heads = 9;
    const uint32_t shares[][4] = {{0, 0, 9, 0}, {9, 0, 0, 0}, {1, 5, 0, 3}, {0, 3, 3, 3}};
    for (const auto& share : shares) {
        Asked asked;
        asked.root = 1;
        asked.scatter.rank_heads = share;
        asked.scatter.heads_per_round = 2;
        const std::vector<Given> given = expect_bits(members, p, asked);
        uint64_t sent = 0, back = 0;
        for (uint32_t r = 0; r < 4; ++r) {
            EXPECT_EQ(given[r].info.heads, share[r]);
            EXPECT_EQ(given[r].info.rounds, (share[r] + 1) / 2);
            if (r == 1) continue;
            sent += given[r].info.bytes_received;
            back += given[r].info.bytes_sent;
        }
        const uint64_t head = 70 * 64 * sizeof(float), away = 9 - share[1];
        EXPECT_EQ(given[1].info.bytes_sent, sent);
        EXPECT_EQ(given[1].info.bytes_received, back);
        EXPECT_EQ(sent, away * 3 * head);  // which is a multiple of 256
        EXPECT_GE(back, away * (head + 70 * sizeof(float)));
    }
}

TEST(Scatter, AWorkspaceBoundsTheRounds) {
    const std::vector<Member> members = make_members(2);
    Problem p;
    p.kv_heads = 12;
    const uint64_t head = 4 * 70 * 64 * sizeof(float) + 70 * sizeof(float);
    const auto lend = [](uint64_t bytes) {
        return [bytes](uint32_t r, Asked& asked) {
            if (r == 1) asked.scatter.workspace_bytes = bytes;
        };
    };
    std::vector<Given> given = expect_bits(members, p, {}, lend(2 * 2 * (head + 256)));
    EXPECT_EQ(given[1].info.heads_per_round, 2u);
    EXPECT_EQ(given[1].info.rounds, 3u);
    const Inputs<> inputs(p);
    given = call_all(members, inputs, {}, lend(head));
    for (const Given& g : given) {
        EXPECT_EQ(g.status, TA_E_MEMORY) << g.text;
        EXPECT_EQ(g.rank, 1);
        EXPECT_NE(g.text.find("two rounds of one kv head"), std::string::npos) << g.text;
    }
    EXPECT_TRUE(inputs.untouched());
    expect_bits(members, p);
}

TEST(Scatter, OneCallAfterAnother) {
    const std::vector<Member> members = make_members(3);
    Random random(5);
    for (int i = 0; i < 60; ++i) {
        Problem p;
        p.seed = uint64_t(i);
        p.variant = kVariants[i % 4];
        p.q_tokens = p.k_tokens = 1 + int64_t(random.bits() % 150);
        p.kv_heads = 1 + int64_t(random.bits() % 8);
        p.group = 1 + int32_t(random.bits() % 3);
        Asked asked;
        asked.root = uint32_t(random.bits() % 3);
        asked.scatter.tag = uint64_t(i);
        asked.scatter.heads_per_round = uint32_t(random.bits() % 4);
        expect_bits(members, p, asked);
        if (HasFailure()) return;
    }
}

// Ranks that wait for each other in a call, and one that comes with another: all hear of it, and the next call works.
TEST(Scatter, RanksThatDisagreeAreTold) {
    const std::vector<Member> members = make_members(3, [](ta_group_options& o) { o.operation_ms = 10000; });
    const Problem p;
    const Inputs<> inputs(p);
    const auto expect_mismatch = [&](const char* text, int argument, uint32_t odd, const std::function<void(Asked&)>& change) {
        const auto started = std::chrono::steady_clock::now();
        const std::vector<Given> given = call_all(members, inputs, {}, [&](uint32_t r, Asked& asked) {
            if (r != odd) return;
            change(asked);
            asked.later = std::chrono::milliseconds(50);
        });
        EXPECT_LT(std::chrono::steady_clock::now() - started, std::chrono::seconds(8));
        for (uint32_t r = 0; r < 3; ++r) {
            EXPECT_EQ(given[r].status, TA_E_MISMATCH) << "rank " << r << ": " << given[r].text;
            EXPECT_NE(given[r].text.find(text), std::string::npos) << given[r].text;
            EXPECT_GE(given[r].rank, 0);
        }
        EXPECT_EQ(given[odd].argument, argument);
        EXPECT_TRUE(inputs.untouched());
        expect_bits(members, p);
    };
    for (int i = 0; i < 5; ++i) {
        expect_mismatch("root", 7, 2, [](Asked& a) { a.root = 1; });
        expect_mismatch("root", 7, 0, [](Asked& a) { a.root = 1; });
        expect_mismatch("tag", 8, 0, [](Asked& a) { a.scatter.tag = 7; });
        expect_mismatch("tag", 8, 1, [](Asked& a) { a.scatter.tag = 7; });
    }
}

TEST(Scatter, ARankThatDoesNotCallIsNamed) {
    const std::vector<Member> members = make_members(3, [](ta_group_options& o) { o.operation_ms = 300; });
    const Problem p;
    const Inputs<> inputs(p);
    for (const uint32_t missing : {0u, 2u}) {
        const std::vector<Given> given = call_all(members, inputs, {}, [&](uint32_t r, Asked& a) { a.calls = r != missing; });
        for (uint32_t r = 0; r < 3; ++r) {
            if (r == missing) continue;
            EXPECT_EQ(given[r].status, TA_E_TIMEOUT) << given[r].text;
            EXPECT_EQ(given[r].rank, int32_t(missing)) << given[r].text;
        }
        EXPECT_TRUE(inputs.untouched());
        for (const Member& m : members) EXPECT_EQ(ta_group_health(m.group.get(), nullptr), TA_OK);
        expect_bits(members, p);
    }
}

// The others wait meanwhile, and are served when the root has called rightly.
TEST(Scatter, ARootThatCallsWronglyMayCallAgain) {
    const std::vector<Member> members = make_members(2);
    const Problem p;
    Inputs<> inputs(p);
    std::vector<Given> given;
    std::thread other([&] { given.push_back(call_elsewhere(members[1])); });
    inputs.set_q(33, 2, NAN);
    const Given refused = call(members[0], &inputs, {});
    EXPECT_EQ(refused.status, TA_E_NONFINITE) << refused.text;
    EXPECT_EQ(refused.argument, 1);
    EXPECT_TRUE(inputs.untouched());
    const Inputs<> good(p);
    EXPECT_EQ(call(members[0], &good, {}).status, TA_OK);
    other.join();
    EXPECT_EQ(given[0].status, TA_OK) << given[0].text;
    EXPECT_TRUE(same_bits(good.results(), whole(members[0].context, p)));
}

TEST(Scatter, ARankIsInOneCallAtATime) {
    const std::vector<Member> members = make_members(2);
    const Problem p;
    const Inputs<> inputs(p);
    std::atomic<int> busy{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
            const Given given = call_elsewhere(members[1]);
            EXPECT_TRUE(given.status == TA_OK || given.status == TA_E_BUSY) << given.text;
            busy += given.status == TA_E_BUSY;
            busy.notify_all();
        });
    }
    busy.wait(0);
    EXPECT_EQ(call(members[0], &inputs, {}).status, TA_OK);
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(busy, 1);
}

TEST(Scatter, AGroupThatIsLeftEndsTheCall) {
    for (const uint32_t leaves : {0u, 1u}) {
        std::vector<Member> members = make_members(3, [](ta_group_options& o) { o.operation_ms = 20000; });
        const Problem p;
        const Inputs<> inputs(p);
        std::thread leaver([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            members[leaves].group.reset();
        });
        const std::vector<Given> given = call_all(members, inputs, {}, [&](uint32_t r, Asked& a) { a.calls = r != leaves; });
        leaver.join();
        for (uint32_t r = 0; r < 3; ++r) {
            if (r == leaves) continue;
            EXPECT_EQ(given[r].status, TA_E_PEER_LOST) << given[r].text;
            EXPECT_EQ(given[r].rank, int32_t(leaves));
        }
        EXPECT_TRUE(inputs.untouched());
    }
}

// Sequences go from rank to rank meanwhile.
TEST(Scatter, TransfersGoOnBesideIt) {
    const std::vector<Member> members = make_members(2);
    std::vector<Rank> ranks(2);
    for (uint32_t r = 0; r < 2; ++r) {
        auto shape = pool_options(1, 1, 64);
        shape.budget_bytes = 1 << 20;
        ranks[r].pool = make_pool(members[r].context, shape);
    }
    std::thread transfers([&] {
        const Plan plan = make_plan(ranks[0].pool);
        const ta_seq source = make_sequence(ranks[0].pool);
        Random random(3);
        begin(plan, {source}, {200});
        Tensor k(random.normals(200 * 64), 200, 1, 64), v(random.normals(200 * 64), 200, 1, 64);
        append(plan, 0, k, v);
        end(plan);
        for (uint64_t tag = 0; tag < 20; ++tag) {
            ta_ticket sent = 0, got = 0;
            ta_error err;
            auto info = sized<ta_transfer_info>();
            require(ta_seq_send(members[0].group.get(), ranks[0].pool.get(), source, 1, tag, TA_SEND_COPY, &sent, &err), err);
            require(ta_seq_receive(members[1].group.get(), ranks[1].pool.get(), 0, tag, &got, &err), err);
            require(ta_transfer_wait(members[1].group.get(), got, -1, &info, &err), err);
            EXPECT_EQ(info.status, TA_OK) << info.reason;
            EXPECT_EQ(ta_seq_release(ranks[1].pool.get(), info.seq, nullptr), TA_OK);
        }
    });
    for (uint64_t seed = 0; seed < 20; ++seed) {
        Problem p;
        p.seed = seed;
        expect_bits(members, p);
    }
    transfers.join();
}

}  // namespace
}  // namespace ta::testing
