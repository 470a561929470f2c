// Moves beside steps of a device that is late: what the orderings are for. Each case is also run without its ordering, where it
// must see wrong bytes: a test that could not fail says nothing.
#include "tiering/move/mover.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ctime>
#include <future>

#include "src/kv/pool.h"
#include "tiering/disk/model.h"
#include "tiering/faulty_files.h"
#include "tiering/late_device.h"
#include "tiering/room/step_room.h"

namespace ta::testing {
namespace {

// Without its ordering a case is a data race, which is the point, and which ThreadSanitizer reports as what it is.
#if defined(__SANITIZE_THREAD__)
constexpr bool kSeesRaces = true;
#elif defined(__has_feature)
constexpr bool kSeesRaces = __has_feature(thread_sanitizer);
#else
constexpr bool kSeesRaces = false;
#endif

constexpr uint32_t kLayers = 3, kHeads = 2, kDim = 64;

class MoverTest : public ::testing::Test {
  protected:
    void make_pool(uint64_t device_blocks, uint64_t host_blocks, Barriers barriers, uint64_t disk_blocks = 0) {
        auto late = std::make_unique<LateDevice>();
        device = late.get();
        Context::Options options;
        options.threads = 2;
        files->has_queues = false;
        Result<std::shared_ptr<Context>> context =
            Context::create(std::move(options), {.files = files, .device = std::move(late)});
        ASSERT_TRUE(context.ok());
        Result<Geometry> g = Geometry::make({.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = 8});
        const ta_numerics defaults{};
        Result<Numerics> n = resolve_numerics(&defaults, g.value().shapes);
        const uint64_t bytes = g.value().token_slot_bytes;
        TierSettings tiers;
        tiers.host_budget = host_blocks * ((bytes + 4095) / 4096 * 4096) + (16 << 10);
        tiers.disk_budget = disk_blocks * (bytes + (8 << 10));
        tiers.disk_folder = folder.path();
        Result<std::shared_ptr<Pool>> made =
            Pool::create(context.value(), g.take(), n.take(), device_blocks * bytes, 64, tiers);
        if (!made.ok()) FAIL() << std::move(made).status().detail()->message;
        pool = made.take();
        pool->blocks().barriers() = barriers;
    }

    // A sequence of full blocks whose bytes a step writes, late.
    ta_seq add(uint64_t blocks) {
        Sequences::Snapshot s;
        std::vector<std::pair<const Block*, uint8_t*>> list;
        for (uint64_t b = 0; b < blocks; ++b) {
            Residency::Loading alone;
            Result<BlockPtr> block = pool->residency().new_block(PageKind::kToken, alone);
            EXPECT_TRUE(block.ok());
            if (!block.ok()) return 0;
            const BlockPtr& p = block.value();
            std::memset(p->slot(), 0xEE, pool->geometry().token_slot_bytes);
            list.emplace_back(p.get(), p->slot());
            p->mark_sealed();  // as a step does when it has enqueued the hashing
            s.blocks.push_back(p);
        }
        device->enqueue_step([pool = pool.get(), list] {
            const Geometry& g = pool->geometry();
            for (uint64_t b = 0; b < list.size(); ++b) {
                const auto& [block, slot] = list[b];
                for (size_t i = 0; i < g.payload_bytes(PageKind::kToken); ++i) slot[i] = byte_of(block->content_id(), i);
                block->write_trailer(g, pool->fingerprint(), b, uint32_t(kPageTokens), slot);
            }
        });
        blocks_of[next_] = s.blocks;
        s.length = int64_t(blocks) * kPageTokens;
        Result<ta_seq> seq = pool->sequences().adopt(std::move(s));
        EXPECT_TRUE(seq.ok());
        ids[next_] = seq.ok() ? seq.value() : 0;
        return next_++;
    }
    static uint8_t byte_of(uint64_t content_id, size_t i) { return uint8_t((content_id * 0x9E3779B97F4A7C15u + i * 31) >> 7); }
    MoveProgress move(uint64_t seq, TierKind to) { return move(seq, 0, blocks_of[seq].size(), to); }
    MoveProgress move(uint64_t seq, uint64_t first, uint64_t n, TierKind to) {
        Result<uint64_t> ticket = pool->sequences().move_blocks(ids[seq], first, n, to, MoveReason::kAsked);
        EXPECT_TRUE(ticket.ok());
        Result<MoveProgress> progress = pool->mover()->wait(ticket.value(), -1);
        EXPECT_TRUE(progress.ok());
        return progress.take();
    }
    static bool is_right(uint64_t content_id, const uint8_t* slot, size_t bytes) {
        for (size_t i = 0; i < bytes; ++i) {
            if (slot[i] != byte_of(content_id, i)) return false;
        }
        return true;
    }
    // A step that checks that the bytes at the addresses that it took are right when it reads them.
    std::function<void()> reading_step(uint64_t seq, std::atomic<int>& wrong) {
        std::vector<std::pair<uint64_t, const uint8_t*>> list;
        for (const BlockPtr& b : blocks_of[seq]) list.emplace_back(b->content_id(), b->slot());
        return [list, &wrong, bytes = pool->geometry().payload_bytes(PageKind::kToken)] {
            for (const auto& [content_id, slot] : list) wrong += !is_right(content_id, slot, bytes);
        };
    }

    // Blocks leave right after the step that writes them.
    bool written_late(Barriers barriers) {
        make_pool(20, 20, barriers);
        const uint64_t a = add(12);
        const MoveProgress progress = move(a, TierKind::kHost);
        if (progress.moved < 12) {
            EXPECT_EQ(progress.status.code(), TA_E_CORRUPT);  // found, not served
        }
        return progress.moved == 12;
    }
    // A step reads blocks in the host tier; when it has ended, but not run, they leave and others take their slots.
    bool read_late(Barriers barriers) {
        make_pool(40, 8, barriers);
        const uint64_t a = add(8), b = add(8);
        EXPECT_TRUE(device->wait_for_steps().ok());
        EXPECT_EQ(move(a, TierKind::kHost).moved, 8u);
        std::atomic<int> wrong{0};
        {
            const ReadingBlocks reading(pool->blocks());
            device->enqueue_step(reading_step(a, wrong));
        }
        EXPECT_EQ(move(a, TierKind::kDevice).moved, 8u);
        EXPECT_EQ(move(b, TierKind::kHost).moved, 8u);
        EXPECT_TRUE(device->wait_for_steps().ok());
        return wrong == 0;
    }
    // A step reads blocks in the host tier. Before it has run they are released, and others come into their slots from the disk.
    bool read_late_before_disk(Barriers barriers) {
        make_pool(40, 8, barriers, 20);
        const uint64_t a = add(8), b = add(8);
        EXPECT_TRUE(device->wait_for_steps().ok());
        EXPECT_EQ(move(b, TierKind::kDisk).moved, 8u);
        EXPECT_EQ(move(a, TierKind::kHost).moved, 8u);
        std::atomic<int> wrong{0};
        if (!barriers.writers) device->enqueue_step([go_on = gate.get_future().share()] { go_on.wait(); });
        device->enqueue_step(reading_step(a, wrong));
        release(a);
        EXPECT_EQ(move(b, TierKind::kHost).moved, 8u);
        if (!barriers.writers) gate.set_value();
        EXPECT_TRUE(device->wait_for_steps().ok());
        return wrong == 0;
    }
    // As read_late() while the step has not even ended: its slots stay as they are.
    bool read_while_open(Barriers barriers) {
        make_pool(40, 8, barriers);
        const uint64_t a = add(8), b = add(8);
        EXPECT_TRUE(device->wait_for_steps().ok());
        EXPECT_EQ(move(a, TierKind::kHost).moved, 8u);
        std::atomic<int> wrong{0};
        {
            const ReadingBlocks reading(pool->blocks());
            const std::function<void()> step = reading_step(a, wrong);
            EXPECT_EQ(move(a, TierKind::kDevice).moved, 8u);
            const MoveProgress others = move(b, TierKind::kHost);
            if (barriers.readers) {
                EXPECT_EQ(others.status.code(), TA_E_TIER_FULL);
            }
            step();
        }
        return wrong == 0;
    }

    // So many blocks that each have a ticket of their own keep the threads of a direction busy until the gate opens: what is
    // asked for behind them waits in the queue, unless the caller is to start it.
    static constexpr uint64_t kBusy = 8;
    std::vector<uint64_t> keep_busy(uint64_t seq, TierKind to) {
        device->enqueue_step([go_on = gate.get_future().share()] { go_on.wait(); });
        std::vector<uint64_t> tickets;
        for (uint64_t b = 0; b < kBusy; ++b)
            tickets.push_back(pool->sequences().move_blocks(ids[seq], b, 1, to, MoveReason::kPrefetch).value());
        return tickets;
    }
    // So many moves of a block each that a disk does not answer: the threads that serve it take no more.
    static constexpr uint64_t kStalled = 9;
    std::vector<uint64_t> stall_disk(uint64_t seq, TierKind to) {
        files->break_now(Fault::kStall, true);
        std::vector<uint64_t> tickets;
        for (uint64_t b = 0; b < kStalled; ++b)
            tickets.push_back(pool->sequences().move_blocks(ids[seq], b, 1, to, MoveReason::kAsked).value());
        return tickets;
    }
    void wait_until_moving(uint64_t seq) {
        const auto moves = [](const BlockPtr& block) { return block->moving(); };
        while (!std::all_of(blocks_of[seq].begin(), blocks_of[seq].end(), moves)) std::this_thread::yield();
    }
    // As who has asked for moves does.
    void release(uint64_t seq) {
        blocks_of.erase(seq);
        EXPECT_TRUE(pool->sequences().release(ids[seq]).ok());
    }

    const Folder folder;
    const std::shared_ptr<FaultyFiles> files = std::make_shared<FaultyFiles>();
    LateDevice* device = nullptr;
    std::promise<void> gate;
    std::shared_ptr<Pool> pool;
    std::map<uint64_t, std::vector<BlockPtr>> blocks_of;
    std::map<uint64_t, ta_seq> ids;
    uint64_t next_ = 1;

    void TearDown() override {
        if (device) (void)device->wait_for_steps();
        blocks_of.clear();
    }
};

TEST_F(MoverTest, AMoveIsBehindTheStepThatWrote) {
    EXPECT_TRUE(written_late({}));
}
TEST_F(MoverTest, AMoveIsBehindTheStepThatWrote_SeenWithoutTheBarrier) {
    if (kSeesRaces) GTEST_SKIP();
    EXPECT_FALSE(written_late({.writers = false}));
}
TEST_F(MoverTest, ASlotIsTakenBehindItsLastReader) {
    EXPECT_TRUE(read_late({}));
}
TEST_F(MoverTest, ASlotIsTakenBehindItsLastReader_SeenWithoutTheBarrier) {
    if (kSeesRaces) GTEST_SKIP();
    EXPECT_FALSE(read_late({.writers = false}));
}
TEST_F(MoverTest, ADiskReadsBehindTheLastReader) {
    EXPECT_TRUE(read_late_before_disk({}));
}
TEST_F(MoverTest, ADiskReadsBehindTheLastReader_SeenWithoutTheBarrier) {
    if (kSeesRaces) GTEST_SKIP();
    EXPECT_FALSE(read_late_before_disk({.writers = false}));
}
TEST_F(MoverTest, ASlotStaysWhileAStepIsOpen) {
    EXPECT_TRUE(read_while_open({}));
}
TEST_F(MoverTest, ASlotStaysWhileAStepIsOpen_SeenWithoutTheBarrier) {
    if (kSeesRaces) GTEST_SKIP();
    EXPECT_FALSE(read_while_open({.readers = false}));
}

// Many parts are on their way; a ticket that is cancelled leaves no block behind in between.
TEST_F(MoverTest, ManyPartsAndACancelledTicket) {
    make_pool(600, 600, {});
    const uint64_t a = add(3), b = add(300);
    EXPECT_EQ(move(a, TierKind::kHost).moved, 3u);
    Result<uint64_t> ticket = pool->sequences().move_blocks(ids[b], 0, 300, TierKind::kHost, MoveReason::kAsked);
    ASSERT_TRUE(ticket.ok());
    ASSERT_TRUE(pool->mover()->cancel(ticket.value()).ok());
    const MoveProgress progress = pool->mover()->wait(ticket.value(), -1).take();
    EXPECT_EQ(progress.failed, 0u);
    size_t away = 0;
    for (const BlockPtr& block : blocks_of[b]) {
        EXPECT_FALSE(block->moving());
        away += block->tier() == TierKind::kHost;
    }
    EXPECT_EQ(away, progress.moved);
    EXPECT_EQ(move(b, TierKind::kHost).moved, 300 - away);
    EXPECT_EQ(move(b, TierKind::kDevice).moved, 300u);
    EXPECT_TRUE(pool->sequences().verify(ids[b]).ok());
}

// The caller that asks for a move starts it; a move that nobody waits for is left to the threads.
TEST_F(MoverTest, TheCallerStartsTheFirstParts) {
    make_pool(100, 100, {});
    const uint64_t a = add(40);
    EXPECT_TRUE(device->wait_for_steps().ok());
    for (const TierKind to : {TierKind::kHost, TierKind::kDevice}) {
        device->take_calls();
        EXPECT_EQ(move(a, to).moved, 40u);
        const std::vector<LateDevice::CopyCall> calls = device->take_calls();
        ASSERT_FALSE(calls.empty());
        const auto by_caller = std::count_if(calls.begin(), calls.end(),
                                             [](const auto& call) { return call.caller == std::this_thread::get_id(); });
        EXPECT_GE(by_caller, 1);
        EXPECT_LE(by_caller, 2);  // a thread that happens to be awake may take the second
    }
    EXPECT_EQ(move(a, TierKind::kHost).moved, 40u);
    device->take_calls();
    Result<uint64_t> ticket = pool->sequences().move_blocks(ids[a], 0, 40, TierKind::kDevice, MoveReason::kPrefetch);
    ASSERT_TRUE(ticket.ok());
    EXPECT_EQ(pool->mover()->wait(ticket.value(), -1).value().moved, 40u);
    for (const LateDevice::CopyCall& call : device->take_calls()) EXPECT_NE(call.caller, std::this_thread::get_id());
}

// Callers that start parts at the same time, more than threads take over at once.
TEST_F(MoverTest, ManyCallersStartParts) {
    make_pool(600, 600, {});
    const uint64_t a = add(500);
    EXPECT_TRUE(device->wait_for_steps().ok());
    for (const TierKind to : {TierKind::kHost, TierKind::kDevice}) {
        std::vector<std::thread> callers;
        std::atomic<uint64_t> moved{0};
        for (uint64_t c = 0; c < 5; ++c) {
            callers.emplace_back([&, c] {
                std::vector<uint64_t> tickets;
                for (uint64_t b = 100 * c; b < 100 * c + 100; ++b)
                    tickets.push_back(pool->sequences().move_blocks(ids[a], b, 1, to, MoveReason::kAsked).value());
                for (const uint64_t t : tickets) moved += pool->mover()->wait(t, -1).value().moved;
            });
        }
        for (std::thread& t : callers) t.join();
        EXPECT_EQ(moved, 500u);
        EXPECT_EQ(pool->mover()->queued(), 0u);
        EXPECT_TRUE(pool->sequences().verify(ids[a]).ok());
    }
}

// Two prefetches ask for the same blocks, and the one that is first in the queue is cancelled there.
TEST_F(MoverTest, WhatACancelledPrefetchLeavesToAnotherOneIsCounted) {
    make_pool(600, 600, {});
    const uint64_t a = add(12), busy = add(kBusy);
    EXPECT_TRUE(device->wait_for_steps().ok());
    EXPECT_EQ(move(a, TierKind::kHost).moved, 12u);
    EXPECT_EQ(move(busy, TierKind::kHost).moved, kBusy);
    const std::vector<uint64_t> before = keep_busy(busy, TierKind::kDevice);
    const auto prefetch = [&] {
        return pool->sequences().move_blocks(ids[a], 0, 12, TierKind::kDevice, MoveReason::kPrefetch).value();
    };
    const uint64_t cancelled = prefetch(), other = prefetch();
    ASSERT_TRUE(pool->mover()->cancel(cancelled).ok());
    EXPECT_EQ(pool->mover()->query(cancelled).value().state, TA_MOVE_CANCELLED);
    gate.set_value();
    for (const uint64_t t : before) EXPECT_EQ(pool->mover()->wait(t, -1).value().moved, 1u);
    EXPECT_EQ(pool->mover()->wait(other, -1).value().moved, 12u);
    Result<std::vector<Sequence*>> taken = pool->sequences().lock_for_plan(std::vector<ta_seq>{ids[a]});
    ASSERT_TRUE(taken.ok());
    pool->residency().count_step(pool->residency().look_up(std::vector<Resident*>(taken.value().begin(), taken.value().end())));
    pool->sequences().unlock_for_plan(taken.value());
    const BlockStore::PrefetchCounters& counted = pool->blocks().prefetches();
    EXPECT_EQ(counted.used, 12u);
    EXPECT_EQ(counted.late, 0u);
    EXPECT_EQ(counted.wasted, 0u);
    EXPECT_EQ(move(busy, TierKind::kHost).moved, kBusy);
    EXPECT_EQ(counted.wasted, kBusy);
}

// Parts that a ticket has not begun are over when it is cancelled, whatever is before it, and nothing of it is kept.
TEST_F(MoverTest, ACancelledTicketIsOverWhereItWaits) {
    make_pool(600, 600, {});
    const uint64_t a = add(12), busy = add(kBusy);
    EXPECT_TRUE(device->wait_for_steps().ok());
    const uint64_t used = pool->blocks().usage().used;
    const std::vector<uint64_t> before = keep_busy(busy, TierKind::kHost);
    const uint64_t ticket = pool->sequences().move_blocks(ids[a], 0, 12, TierKind::kHost, MoveReason::kEviction).value();
    EXPECT_EQ(pool->mover()->queued(), kBusy + 1);
    ASSERT_TRUE(pool->mover()->cancel(ticket).ok());
    const MoveProgress progress = pool->mover()->query(ticket).take();
    EXPECT_EQ(progress.state, TA_MOVE_CANCELLED);
    EXPECT_EQ(progress.moved + progress.skipped + progress.failed, 0u);
    EXPECT_EQ(pool->mover()->queued(), kBusy);
    release(a);
    EXPECT_EQ(pool->blocks().usage().used, used - 12 * pool->geometry().token_slot_bytes);
    ASSERT_TRUE(pool->mover()->cancel(ticket).ok()) << "again";
    gate.set_value();
    for (const uint64_t t : before) EXPECT_EQ(pool->mover()->wait(t, -1).value().moved, 1u);
    EXPECT_EQ(pool->mover()->queued(), 0u);
}

// A ticket owns nothing that waits: who releases a sequence has its room at once, and its blocks are not moved for nobody.
TEST_F(MoverTest, FinishedTicketsAreForgottenInTheEnd) {
    make_pool(20, 20, {});
    const uint64_t a = add(1);
    constexpr size_t kKnown = 4096, kMore = 8;
    std::vector<uint64_t> tickets;
    while (tickets.size() < kKnown + kMore) {
        tickets.push_back(pool->sequences().move_blocks(ids[a], 0, 1, TierKind::kDevice, MoveReason::kPrefetch).value());
        if (tickets.size() == 1) (void)pool->mover()->wait(tickets[0], -1);  // they do not end in order
    }
    for (const uint64_t ticket : tickets) (void)pool->mover()->wait(ticket, -1);
    EXPECT_EQ(pool->mover()->queued(), 0u);
    EXPECT_EQ(pool->mover()->query(tickets.front()).status().code(), TA_E_STALE);
    // Now no other ticket has the block at the same moment.
    const uint64_t last = pool->sequences().move_blocks(ids[a], 0, 1, TierKind::kDevice, MoveReason::kPrefetch).value();
    (void)pool->mover()->wait(last, -1);
    EXPECT_EQ(pool->mover()->query(last).value().present, 1u);
}

// A prefetch may have brought it further up meanwhile.
TEST_F(MoverTest, WhatAStepNeedsDoesNotMoveDown) {
    make_pool(20, 20, {});
    const uint64_t a = add(1);
    const std::vector<MoveItem> items = {{blocks_of[a][0], 0}};
    const uint64_t ticket = pool->mover()->submit(items, TierKind::kHost, MoveReason::kNeeded).value();
    EXPECT_EQ(pool->mover()->wait(ticket, -1).value().present, 1u);
    EXPECT_EQ(blocks_of[a][0]->tier(), TierKind::kDevice);
}

TEST_F(MoverTest, WhatIsReleasedMeanwhileIsNotMoved) {
    make_pool(600, 600, {});
    const uint64_t a = add(12), b = add(5), busy = add(kBusy);
    EXPECT_TRUE(device->wait_for_steps().ok());
    const uint64_t used = pool->blocks().usage().used;
    const std::vector<uint64_t> before = keep_busy(busy, TierKind::kHost);
    const uint64_t asked = pool->sequences().move_blocks(ids[a], 0, 12, TierKind::kHost, MoveReason::kEviction).value();
    std::vector<MoveItem> cold;
    for (const BlockPtr& block : blocks_of[b]) cold.push_back({block, cold.size()});
    const uint64_t evicted = pool->mover()->submit(cold, TierKind::kHost, MoveReason::kEviction).value();
    cold.clear();
    release(a);
    release(b);
    EXPECT_EQ(pool->blocks().usage().used, used - (12 + 5) * pool->geometry().token_slot_bytes);
    gate.set_value();
    for (const auto& [ticket, blocks] : {std::pair(asked, 12u), std::pair(evicted, 5u)}) {
        const MoveProgress progress = pool->mover()->wait(ticket, -1).take();
        EXPECT_EQ(progress.state, TA_MOVE_DONE);
        EXPECT_EQ(progress.skipped, blocks);
    }
    for (const uint64_t t : before) EXPECT_EQ(pool->mover()->wait(t, -1).value().moved, 1u);
    EXPECT_EQ(pool->mover()->counters().blocks_in[size_t(TierKind::kHost)], kBusy);
}

// Blocks that leave for the host do not wait for those that a disk is to take.
TEST_F(MoverTest, ASlowDiskDoesNotHoldUpMovesToTheHost) {
    make_pool(100, 100, {}, 100);
    const uint64_t a = add(12), slow = add(kStalled);
    EXPECT_EQ(move(slow, TierKind::kHost).moved, kStalled);
    const std::vector<uint64_t> stalled = stall_disk(slow, TierKind::kDisk);
    const uint64_t ticket = pool->sequences().move_blocks(ids[a], 0, 12, TierKind::kHost, MoveReason::kEviction).value();
    EXPECT_EQ(pool->mover()->wait(ticket, 2'000'000'000).value().moved, 12u);
    EXPECT_EQ(pool->mover()->queued(), kStalled);
    files->heal();
    for (const uint64_t t : stalled) EXPECT_EQ(pool->mover()->wait(t, -1).value().moved, 1u);
    EXPECT_TRUE(pool->sequences().verify(ids[a]).ok());
    EXPECT_TRUE(pool->sequences().verify(ids[slow]).ok());
}

// A block that comes from the host does not wait for reads of a disk, even of the same ticket.
TEST_F(MoverTest, ASlowDiskDoesNotHoldUpMovesToTheDevice) {
    make_pool(100, 100, {}, 100);
    const uint64_t a = add(12), b = add(12), slow = add(kStalled);
    for (const uint64_t seq : {a, b, slow}) EXPECT_EQ(move(seq, TierKind::kHost).failed, 0u);
    EXPECT_EQ(move(a, 3, 6, TierKind::kDisk).moved, 6u);
    EXPECT_EQ(move(b, 3, 6, TierKind::kDisk).moved, 6u);
    EXPECT_EQ(move(slow, TierKind::kDisk).moved, kStalled);
    const std::vector<uint64_t> stalled = stall_disk(slow, TierKind::kDevice);
    const auto prefetch = [&](uint64_t seq) {
        return pool->sequences().move_blocks(ids[seq], 0, 12, TierKind::kDevice, MoveReason::kPrefetch).value();
    };
    const uint64_t tickets[] = {prefetch(a), prefetch(b)};
    for (const uint64_t ticket : tickets) {
        MoveProgress progress = pool->mover()->query(ticket).take();
        for (int i = 0; i < 2000 && progress.moved < 6; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            progress = pool->mover()->query(ticket).take();
        }
        EXPECT_EQ(progress.moved, 6u);
        EXPECT_EQ(progress.state, TA_MOVE_RUNNING);
    }
    ASSERT_TRUE(pool->mover()->cancel(tickets[1]).ok());
    EXPECT_EQ(pool->mover()->query(tickets[1]).value().state, TA_MOVE_CANCELLED) << "the rest is queued";
    files->heal();
    EXPECT_EQ(pool->mover()->wait(tickets[0], -1).value().moved, 12u);
    for (const uint64_t t : stalled) EXPECT_EQ(pool->mover()->wait(t, -1).value().moved, 1u);
    EXPECT_EQ(pool->mover()->query(tickets[1]).value().moved, 6u);
    EXPECT_EQ(blocks_of[b][5]->tier(), TierKind::kDisk);
    for (const uint64_t seq : {a, b, slow}) EXPECT_TRUE(pool->sequences().verify(ids[seq]).ok());
}

// The mark of a prefetch that was cancelled asks for nothing.
TEST_F(MoverTest, AStepDoesNotCountPrefetchesThatWereCancelledInTheQueue) {
    make_pool(600, 600, {});
    const uint64_t a = add(12), busy = add(kBusy);
    EXPECT_TRUE(device->wait_for_steps().ok());
    EXPECT_EQ(move(a, TierKind::kHost).moved, 12u);
    EXPECT_EQ(move(busy, TierKind::kHost).moved, kBusy);
    keep_busy(busy, TierKind::kDevice);
    const uint64_t ticket = pool->sequences().move_blocks(ids[a], 0, 12, TierKind::kDevice, MoveReason::kPrefetch).value();
    ASSERT_TRUE(pool->mover()->cancel(ticket).ok());
    Result<std::vector<Sequence*>> taken = pool->sequences().lock_for_plan(std::vector<ta_seq>{ids[a]});
    ASSERT_TRUE(taken.ok());
    pool->residency().count_step(pool->residency().look_up(std::vector<Resident*>(taken.value().begin(), taken.value().end())));
    pool->sequences().unlock_for_plan(taken.value());
    EXPECT_EQ(pool->blocks().prefetches().late, 0u);
    gate.set_value();
}

// A move that was under way when a block was pinned leaves it where it is.
TEST_F(MoverTest, WhatIsPinnedMeanwhileStays) {
    make_pool(20, 20, {});
    const uint64_t a = add(4);
    const BlockPtr block = pool->sequences().snapshot(ids[a]).value().blocks[1];
    Result<std::vector<Slot>> slots =
        pool->residency().tier(TierKind::kHost)->acquire(std::vector<uint8_t>{uint8_t(block->kind())});
    ASSERT_TRUE(slots.ok());
    const Slot slot = slots.value()[0];
    ASSERT_TRUE(pool->sequences().pin_blocks(ids[a], 1, 1, true).ok());
    EXPECT_FALSE(pool->blocks().move(
        *block, {TierKind::kHost, block->kind(), pool->residency().tier(TierKind::kHost)->address(slot), slot, {}}));
    EXPECT_EQ(block->tier(), TierKind::kDevice);
    pool->residency().tier(TierKind::kHost)->release({&slot, 1});
    ASSERT_TRUE(pool->sequences().pin_blocks(ids[a], 1, 1, false).ok());
}

// A reservation keeps its blocks off the disk, also those that a move is about to take there, or works on.
TEST_F(MoverTest, WhatIsReservedMeanwhileDoesNotGoToTheDisk) {
    using namespace std::chrono_literals;
    make_pool(100, 100, {}, 100);
    const uint64_t under_way = add(12), queued = add(12), slow = add(kStalled);
    for (const uint64_t seq : {under_way, queued, slow}) EXPECT_EQ(move(seq, TierKind::kHost).failed, 0u);
    const auto to_disk = [&](uint64_t seq) {
        return pool->sequences().move_blocks(ids[seq], 0, 12, TierKind::kDisk, MoveReason::kAsked).value();
    };
    files->break_now(Fault::kStall, true);
    const uint64_t first = to_disk(under_way);
    wait_until_moving(under_way);
    const std::vector<uint64_t> stalled = stall_disk(slow, TierKind::kDisk);
    const uint64_t second = to_disk(queued);
    for (const uint64_t seq : {under_way, queued})
        EXPECT_TRUE(pool->sequences().reserve(ids[seq], 64, Patience{0ms, 0ms}).ok());
    files->heal();
    for (const uint64_t ticket : {first, second}) {
        const MoveProgress progress = pool->mover()->wait(ticket, -1).take();
        EXPECT_EQ(progress.moved, 0u);
        EXPECT_EQ(progress.skipped, 12u);
    }
    for (const uint64_t t : stalled) EXPECT_EQ(pool->mover()->wait(t, -1).value().moved, 1u);
    for (const uint64_t seq : {under_way, queued}) {
        for (const BlockPtr& block : blocks_of[seq]) EXPECT_EQ(block->tier(), TierKind::kHost);
        EXPECT_TRUE(pool->sequences().reserve(ids[seq], 0, {}).ok());
        EXPECT_EQ(move(seq, TierKind::kDisk).moved, 12u);
    }
}

// A step whose blocks another move promotes sleeps until that has ended, also beside another one.
TEST_F(MoverTest, AStepWaitsForBlocksThatOthersPromote) {
    using namespace std::chrono_literals;
    make_pool(100, 100, {}, 100);
    const uint64_t a = add(12);
    const ta_seq fork = pool->sequences().fork(ids[a]).value();
    EXPECT_EQ(move(a, TierKind::kDisk).moved, 12u);
    files->break_now(Fault::kStall, true);
    const uint64_t ticket = pool->sequences().move_blocks(ids[a], 0, 12, TierKind::kDevice, MoveReason::kPrefetch).value();
    wait_until_moving(a);
    struct Found {
        Status status;
        double seconds;  // of the processor
    };
    const auto find_room = [&](ta_seq seq, std::chrono::milliseconds patience) -> Found {
        const auto seconds = [] {
            timespec t{};
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
            return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
        };
        std::vector<Sequence*> taken = pool->sequences().lock_for_plan(std::vector<ta_seq>{seq}).take();
        const std::vector<Resident*> residents(taken.begin(), taken.end());
        std::optional<uint64_t> reading;
        const double before = seconds();
        Found found;
        found.status = find_room_for_step(
            pool->residency(), residents, {}, {patience, patience}, [] { return Status(); }, reading);
        found.seconds = seconds() - before;
        if (reading) pool->blocks().stop_reading(*reading);
        pool->sequences().unlock_for_plan(taken);
        return found;
    };
    const auto both = [&](std::chrono::milliseconds patience, bool heals) {
        std::future<Found> other = std::async(std::launch::async, find_room, fork, patience);
        std::future<Found> mine = std::async(std::launch::async, find_room, ids[a], patience);
        std::this_thread::sleep_for(300ms);
        if (heals) files->heal();
        return std::array{other.get(), mine.get()};
    };
    for (const Found& found : both(1000ms, false)) {
        EXPECT_EQ(found.status.code(), TA_E_BUSY);
        EXPECT_NE(std::string(found.status.detail()->message).find("another call promotes"), std::string::npos)
            << found.status.detail()->message;
        EXPECT_LT(found.seconds, 0.1);
    }
    for (const Found& found : both(60s, true)) {
        EXPECT_TRUE(found.status.ok());
        EXPECT_LT(found.seconds, 0.1);
    }
    EXPECT_EQ(pool->mover()->wait(ticket, -1).value().moved, 12u);
}

TEST_F(MoverTest, ADamagedBlockIsFoundWhereItArrives) {
    make_pool(20, 20, {});
    const uint64_t a = add(5);
    EXPECT_TRUE(device->wait_for_steps().ok());
    blocks_of[a][3]->slot()[pool->geometry().page_offset(PageKind::kToken, 1) + 17] ^= 4;
    const MoveProgress progress = move(a, TierKind::kHost);
    EXPECT_EQ(progress.moved, 4u);
    EXPECT_EQ(progress.failed, 1u);
    EXPECT_EQ(progress.status.code(), TA_E_CORRUPT);
    ASSERT_NE(progress.status.detail(), nullptr);
    EXPECT_EQ(progress.status.detail()->block, 3);
    EXPECT_EQ(progress.status.detail()->layer, 1);
    EXPECT_EQ(blocks_of[a][3]->tier(), TierKind::kDevice);
    for (uint64_t b = 0; b < 5; ++b) EXPECT_EQ(blocks_of[a][b]->stuck(), b == 3) << "evictions leave it alone from now on";
}

}  // namespace
}  // namespace ta::testing
