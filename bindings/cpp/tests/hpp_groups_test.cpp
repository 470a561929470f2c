// turboattention.hpp: groups.
#include <array>
#include <barrier>
#include <thread>

#include "hpp_steps.h"

namespace hpp_tests {
namespace {

TEST(Hpp, Groups) {
    constexpr uint32_t kRanks = 2;
    const auto id = ta::Group::make_id(TA_GROUP_LOCAL);
    ta::NamespaceOptions tenant;
    tenant.salt.fill(9);
    const std::array<ta::Key, 1> keys{};
    std::vector<float> outputs[kRanks];
    std::barrier both(kRanks);
    const auto run = [&](uint32_t rank) {
        const auto context = ta::Context::create({.threads = 1});
        const auto group = context.create_group({.rank = rank, .ranks = kRanks, .id = id});
        const auto pool = context.create_pool(shape());
        const auto plan = pool.create_plan();
        ASSERT_EQ(group.wait(), TA_GROUP_READY);
        EXPECT_EQ(group.info().ranks, kRanks);
        EXPECT_EQ(group.peer(1 - rank).route, TA_ROUTE_HOST_MEMORY);
        group.health();
        EXPECT_GE(group.descriptor(), 0);

        const auto space = pool.create_namespace(tenant);
        space.join(group);
        if (rank == 0) {
            const auto seq = pool.create_sequence();
            feed(plan, seq, 100);
            seq.publish(space, keys);
            const auto sent = seq.send(group, 1, 5);
            EXPECT_EQ(sent.wait().state, TA_MOVE_DONE);
            EXPECT_EQ(sent.query().blocks, 2u);
            EXPECT_EQ(group.take_finished(SIZE_MAX).at(0), sent.ticket());
            group.receive(pool, 1, 99).cancel();
        } else {
            auto transfer = group.receive(pool, 0, 5);
            EXPECT_EQ(transfer.take().length(), 100);
            EXPECT_EQ(status_of([&] { transfer.take(); }), TA_E_STATE);
            while (space.lookup(group, keys, std::chrono::seconds(10))[0].answer != TA_PREFIX_YES) std::this_thread::yield();
            EXPECT_EQ(space.fetch(group, keys).wait().length, 64);
            EXPECT_EQ(space.match(keys).length, 64);
        }
        const auto spread = pool.create_sequence();
        spread.partition(group, {.tag = 3});
        outputs[rank] = feed(plan, spread, 200);
        auto last = group.receive(pool, 1 - rank, 1000 + rank);
        EXPECT_EQ(status_of([&] { last.take(std::chrono::milliseconds(1)); }), TA_E_TIMEOUT);
        both.arrive_and_wait();
        space.leave(group);
        both.arrive_and_wait();
        group.abort();
        const ta_status ended = status_of([&] { group.health(); });
        EXPECT_TRUE(ended == TA_E_CANCELLED || ended == TA_E_PEER_LOST);
    };
    std::thread other(run, 1u);
    run(0);
    other.join();
    EXPECT_EQ(outputs[0], outputs[1]);
}

// What arrives for a receive that is gone is released.
TEST(Hpp, ReceivesThatNobodyTookAreCancelled) {
    const auto id = ta::Group::make_id(TA_GROUP_LOCAL);
    const auto here = ta::Context::create({.threads = 1}), there = ta::Context::create({.threads = 1});
    const auto source = here.create_group({.rank = 0, .ranks = 2, .id = id});
    const auto destination = there.create_group({.rank = 1, .ranks = 2, .id = id});
    ASSERT_EQ(source.wait(), TA_GROUP_READY);
    ASSERT_EQ(destination.wait(), TA_GROUP_READY);
    const auto from = here.create_pool(shape()), to = there.create_pool(shape());
    const auto seq = from.create_sequence();
    feed(from.create_plan(), seq, 300);

    auto last = destination.receive(to, 0, 100);
    for (uint64_t tag = 0; tag < 20; ++tag) {
        auto receive = destination.receive(to, 0, tag);
        const auto send = seq.send(source, 1, tag);
        if (tag % 2 == 0) send.wait();
        last = std::move(receive);  // the one before goes before, while or after it arrives
        send.cancel();              // nobody may come for it
        send.wait();
    }
    ta::Transfer given(destination.shared(), last.detach(), to.shared());
    EXPECT_EQ(status_of([&] { last.take(); }), TA_E_STATE);
    { const auto gone = std::move(given); }
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20); to.stats().sequences > 0;) {
        ASSERT_LT(std::chrono::steady_clock::now(), end) << to.stats().sequences;
        std::this_thread::yield();
    }
    ta::Transfer taken(destination.shared(), destination.receive(to, 0, 21).detach(), to.shared());
    const auto send = seq.send(source, 1, 21);
    EXPECT_EQ(taken.take().length(), 300);
}

}  // namespace
}  // namespace hpp_tests
