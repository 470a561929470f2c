// Transfers between ranks with devices, which are simulated. Where they reach each other's memory the destination reads the blocks
// itself; else the source writes them into windows on the destination's device.
#include "src/kv/share/transfers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <thread>

#include "src/attend/plan.h"
#include "tests/tiering/share/lying_transport.h"
#include "tests/tiering/simulated_device.h"
#include "tiering/share/local.h"

namespace ta::share {
namespace {

using ta::testing::DeviceFault;
using ta::testing::LyingTransport;
using ta::testing::SimulatedDevice;

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;

class RankDevice final : public SimulatedDevice {
  public:
    RankDevice(int ordinal, bool reaches) : SimulatedDevice(uint64_t(ordinal)), ordinal_(ordinal), reaches_(reaches) {}
    int ordinal() const override { return ordinal_; }
    Result<bool> reach(std::span<const int>) override { return reaches_; }
    Status copy(std::span<const DeviceCopy> copies, bool to_host) override {
        std::this_thread::sleep_for(copies.size() * (to_host ? delay_down : delay).load());
        return SimulatedDevice::copy(copies, to_host);
    }
    // Of each block, and of one that goes down a tier.
    std::atomic<std::chrono::milliseconds> delay{}, delay_down{};

  private:
    const int ordinal_;
    const bool reaches_;
};

struct Settings {
    bool reaches = true;
    uint64_t blocks = 64;
    Fault fault = {};
    uint32_t ranks = 2;
    std::chrono::milliseconds operation{20000};
    bool has_host_tier = true;
    LyingTransport::Lie lie = {};  // of the rank's messages
    Patience patience = {};
};

// One rank, with its own context and pool.
struct Site {
    Site(const GroupId& id, uint32_t rank, const Settings& of) {
        Seams seams;
        auto made_device = std::make_unique<RankDevice>(int(rank), of.reaches);
        device = made_device.get();
        seams.device = std::move(made_device);
        Context::Options options;
        options.threads = 1;
        context = Context::create(std::move(options), std::move(seams)).take();
        Result<Geometry> g = Geometry::make({.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = 4});
        ta_numerics settings{};
        Result<Numerics> n = resolve_numerics(&settings, g.value().shapes);
        const uint64_t bytes = of.blocks * g.value().token_slot_bytes;
        TierSettings tiers;
        tiers.patience = of.patience;
        if (of.has_host_tier) tiers.host_budget = 4 * bytes;
        pool = Pool::create(context, g.take(), n.take(), bytes, 16, tiers).take();
        GroupSettings s;
        s.rank = rank;
        s.ranks = of.ranks;
        s.generation = 1;
        s.silence = std::chrono::milliseconds(20000);
        s.operation = of.operation;
        std::unique_ptr<Transport> transport = join_local_group(id, rank, of.ranks, device, of.fault).take();
        if (of.lie) transport = std::make_unique<LyingTransport>(std::move(transport), of.lie);
        group = std::make_unique<Group>(context, s, std::move(transport));
        spaces = std::make_unique<SharedSpaces>(*group);
        transfers = std::make_unique<Transfers>(*group, spaces.get());
        EXPECT_TRUE(transfers->start().ok());
        EXPECT_TRUE(group->start({transfers.get(), spaces.get()}).ok());
    }
    ~Site() {
        group->stop();
        spaces->stop();
    }

    ta_seq add(int32_t tokens) const {
        const ta_seq seq = pool->sequences().create().value();
        Plan plan(pool);
        const int32_t none = 0;
        EXPECT_TRUE(plan.begin({&seq, 1}, &tokens, &none).ok());
        std::vector<float> x(size_t(tokens) * kHeads * kDim);
        for (size_t i = 0; i < x.size(); ++i) x[i] = float(i * 2654435761u % 1000) * 0.002f - 1.0f;
        ta_tensor t{};
        t.struct_size = sizeof t;
        t.dtype = TA_DTYPE_F32;
        t.data = x.data();
        t.tokens = tokens;
        t.heads = kHeads;
        t.head_dim = kDim;
        Result<TensorView> view = view_tensor(t, "x");
        for (uint32_t layer = 0; layer < kLayers; ++layer) EXPECT_TRUE(plan.append(layer, view.value(), view.value()).ok());
        EXPECT_TRUE(plan.end().ok());
        return seq;
    }

    RankDevice* device;  // the context's
    std::shared_ptr<Context> context;
    std::shared_ptr<Pool> pool;
    std::unique_ptr<Group> group;
    std::unique_ptr<SharedSpaces> spaces;
    std::unique_ptr<Transfers> transfers;
};

struct Pair {
    explicit Pair(bool reaches, const Fault& fault = {}, uint64_t room = 64)
        : Pair({.reaches = reaches, .fault = fault}, {.reaches = reaches, .blocks = room, .has_host_tier = false}) {}
    Pair(const Settings& of_source, const Settings& of_destination)
        : id(make_id(GroupKind::kLocal)), source(id, 0, of_source), destination(id, 1, of_destination) {
        source.group->wait_connected(-1);
        destination.group->wait_connected(-1);
        (void)destination.pool->sequences().release(destination.add(64));  // its next blocks have other ids than the source's
    }
    // The progress of a transfer of the sequence, at the source and at the destination.
    std::pair<TransferProgress, TransferProgress> transfer(ta_seq seq, bool move) const {
        Result<uint64_t> sent = source.transfers->send(source.pool, seq, 1, 1, move),
                         got = destination.transfers->receive(destination.pool, 0, 1);
        if (!sent.ok() || !got.ok()) {  // the group has ended
            TransferProgress lost;
            lost.state = TA_MOVE_FAILED;
            lost.status = sent.ok() ? std::move(got).status() : std::move(sent).status();
            return {lost.clone(), std::move(lost)};
        }
        TransferProgress there = destination.transfers->wait(got.value(), -1).take();
        return {source.transfers->wait(sent.value(), -1).take(), std::move(there)};
    }
    // Pages of all blocks, which begin their slots; the trailers differ.
    static std::vector<uint8_t> pages(const Site& site, ta_seq seq) {
        std::vector<uint8_t> all;
        const Geometry& g = site.pool->geometry();
        const Sequences::Snapshot snapshot = site.pool->sequences().snapshot(seq).take();
        for (const BlockPtr& b : snapshot.blocks) {
            const size_t bytes = g.page_offset(b->kind(), kLayers - 1) + g.page_bytes(b->kind(), kLayers - 1);
            all.insert(all.end(), b->slot(), b->slot() + bytes);
        }
        return all;
    }

    GroupId id;
    Site source, destination;
};

// How a transfer may end whose peer says what is not so.
const std::set<ta_status> kLies{TA_E_CORRUPT, TA_E_MISMATCH, TA_E_PEER_LOST, TA_E_TIMEOUT, TA_E_CANCELLED};

// The parameter: whether devices reach each other.
class DeviceTransfers : public ::testing::TestWithParam<bool> {};
class DeviceFetches : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Reach, DeviceTransfers, ::testing::Bool());
INSTANTIATE_TEST_SUITE_P(Reach, DeviceFetches, ::testing::Bool());

TEST_P(DeviceTransfers, ArriveAsTheyAre) {
    const Pair p(GetParam());
    const Site& copies = GetParam() ? p.destination : p.source;
    for (const bool move : {false, true}) {
        for (const int32_t tokens : {1, 64, 65, 640, 1000}) {
            SCOPED_TRACE(std::to_string(tokens) + " tokens, move " + std::to_string(move));
            const ta_seq seq = p.source.add(tokens);
            const std::vector<uint8_t> before = Pair::pages(p.source, seq);
            const uint64_t operations = copies.device->operations();
            const auto [here, there] = p.transfer(seq, move);
            ASSERT_EQ(there.state, TA_MOVE_DONE) << there.status.detail()->message;
            ASSERT_EQ(here.state, TA_MOVE_DONE);
            EXPECT_EQ(here.bytes_moved, there.bytes_moved);
            EXPECT_EQ(there.blocks_moved, uint64_t(tokens + 63) / 64);
            EXPECT_TRUE(p.destination.pool->sequences().verify(there.seq).ok());
            EXPECT_TRUE(Pair::pages(p.destination, there.seq) == before || tokens % 64 != 0);
            EXPECT_GT(copies.device->operations() - operations, uint64_t(tokens / 64));
            EXPECT_TRUE(p.destination.pool->sequences().release(there.seq).ok());
        }
    }
}

TEST_P(DeviceTransfers, BlocksInTheHostsMemoryComeToo) {
    const Pair p(GetParam());
    std::vector<ta_seq> seqs;
    for (int i = 0; i < 6; ++i) seqs.push_back(p.source.add(64 * 20));  // the first ones have to leave the device
    const Sequences::Snapshot snapshot = p.source.pool->sequences().snapshot(seqs[0]).take();
    const auto in_host = std::count_if(snapshot.blocks.begin(), snapshot.blocks.end(),
                                       [](const BlockPtr& b) { return b->tier() == TierKind::kHost; });
    ASSERT_GT(in_host, 0);
    const std::vector<uint8_t> before = Pair::pages(p.source, seqs[0]);
    const auto [here, there] = p.transfer(seqs[0], false);
    ASSERT_EQ(there.state, TA_MOVE_DONE) << there.status.detail()->message;
    EXPECT_TRUE(p.destination.pool->sequences().verify(there.seq).ok());
    EXPECT_EQ(Pair::pages(p.destination, there.seq), before);
}

// A device fails at one of its operations after the other, or a copy arrives with one bit wrong.
TEST_P(DeviceTransfers, NoWrongBlockIsTakenIn) {
    for (const bool at_source : {false, true}) {
        int failed = 0;
        for (const DeviceFault fault : {DeviceFault::kFails, DeviceFault::kWrong}) {
            for (uint64_t k = 0; k < 20; ++k) {
                SCOPED_TRACE(std::string(name_of(fault)) + " at " + std::to_string(k) + (at_source ? " of the source" : ""));
                const Pair p(GetParam());
                const ta_seq seq = p.source.add(at_source ? 704 : 700);  // open blocks have no hashes
                RankDevice* const breaks = at_source ? p.source.device : p.destination.device;
                breaks->break_now(fault, false, k);
                const auto [here, there] = p.transfer(seq, false);
                breaks->heal();
                if (there.state == TA_MOVE_DONE) {
                    EXPECT_TRUE(p.destination.pool->sequences().verify(there.seq).ok());
                    continue;
                }
                ++failed;
                EXPECT_EQ(there.state, TA_MOVE_FAILED);
                EXPECT_EQ(there.status.code(), fault == DeviceFault::kFails ? TA_E_DEVICE : TA_E_CORRUPT);
                EXPECT_TRUE(there.status.detail()->rank == 0 || (fault == DeviceFault::kFails && !at_source));
                EXPECT_EQ(p.destination.pool->sequences().snapshot_all().value().size(), 0u);
                const auto [again_here, again] = p.transfer(seq, true);
                EXPECT_EQ(again.state, TA_MOVE_DONE);
            }
        }
        EXPECT_GE(failed, at_source == GetParam() ? 1 : 10);  // who copies has more to do
    }
}

TEST_P(DeviceTransfers, ThePoolFillsUp) {
    const Pair p(GetParam(), {}, 8);
    const ta_seq seq = p.source.add(64 * 12);
    const ta_seq there_already = p.destination.add(64 * 4);
    const auto [here, there] = p.transfer(seq, true);
    EXPECT_EQ(there.state, TA_MOVE_FAILED);
    EXPECT_EQ(there.status.code(), TA_E_TIER_FULL);
    EXPECT_EQ(p.source.pool->sequences().snapshot(seq).value().length, 64 * 12);
    EXPECT_TRUE(p.destination.pool->sequences().release(there_already).ok());
    EXPECT_EQ(p.transfer(seq, true).second.state, TA_MOVE_DONE);
}

// Room that a transfer has taken is not promised to it any more.
TEST_P(DeviceTransfers, TwoFitBesideEachOther) {
    const Pair p(GetParam(), {}, 64);
    std::vector<std::pair<uint64_t, uint64_t>> tickets;
    const ta_seq seqs[] = {p.source.add(64 * 45), p.source.add(64 * 45)};
    p.destination.device->delay = std::chrono::milliseconds(1);
    for (const ta_seq seq : seqs) {
        tickets.emplace_back(p.source.transfers->send(p.source.pool, seq, 1, seq, false).value(),
                             p.destination.transfers->receive(p.destination.pool, 0, seq).value());
    }
    for (const auto& [sent, got] : tickets) {
        const TransferProgress there = p.destination.transfers->wait(got, -1).take();
        EXPECT_EQ(there.state, TA_MOVE_DONE) << there.status.detail()->message;
        EXPECT_EQ(p.source.transfers->wait(sent, -1).value().state, TA_MOVE_DONE);
    }
}

// Blocks that the source cannot lease come through windows later. Until then their room stays promised, so what does not fit beside
// them is refused before any of it moves.
TEST_P(DeviceTransfers, RoomOfWhatIsElsewhereStaysPromised) {
    const Pair p(GetParam(), {}, 64);
    std::vector<ta_seq> seqs;
    for (int i = 0; i < 3; ++i) seqs.push_back(p.source.add(64 * 70));  // the first one has to leave the device
    p.source.device->delay = p.source.device->delay_down = std::chrono::milliseconds(2);
    std::vector<std::pair<uint64_t, uint64_t>> tickets;
    for (int i = 0; i < 2; ++i) {
        tickets.emplace_back(p.source.transfers->send(p.source.pool, seqs[size_t(i)], 1, uint64_t(i), false).value(),
                             p.destination.transfers->receive(p.destination.pool, 0, uint64_t(i)).value());
        // The second one comes when the first one has begun to arrive.
        for (bool begun = false; !begun;) {
            const TransferProgress first = p.destination.transfers->wait(tickets[0].second, 1'000'000).take();
            begun = first.blocks_moved > 0 || first.state >= TA_MOVE_DONE;
        }
    }
    const TransferProgress first = p.destination.transfers->wait(tickets[0].second, -1).take(),
                           second = p.destination.transfers->wait(tickets[1].second, -1).take();
    EXPECT_EQ(first.state, TA_MOVE_DONE) << first.status.detail()->message;
    EXPECT_EQ(second.status.code(), TA_E_TIER_FULL);
    EXPECT_EQ(second.blocks_moved, 0u);
    for (const auto& ticket : tickets) (void)p.source.transfers->wait(ticket.first, -1);
}

// The source does one thing wrong, at each of its actions in turn.
TEST_P(DeviceTransfers, FaultsOfMessages) {
    int failed = 0;
    for (const Fault::Kind kind : {Fault::Kind::kCorrupt, Fault::Kind::kCut, Fault::Kind::kDuplicate, Fault::Kind::kReorder}) {
        for (uint64_t action = 3; action < 9; ++action) {
            SCOPED_TRACE("fault " + std::to_string(int(kind)) + " at " + std::to_string(action));
            const Pair p(GetParam(), Fault{kind, action, 8 * 61 + action});
            const ta_seq seq = p.source.add(500);
            const auto [here, there] = p.transfer(seq, false);
            if (there.state == TA_MOVE_DONE) {
                EXPECT_TRUE(p.destination.pool->sequences().verify(there.seq).ok());
                continue;
            }
            ++failed;
            EXPECT_TRUE(kind == Fault::Kind::kCorrupt || kind == Fault::Kind::kCut);
            EXPECT_TRUE(there.status.code() == TA_E_PEER_LOST || there.status.code() == TA_E_CORRUPT);
        }
    }
    EXPECT_GT(failed, 4);
}

// A source that leases more than there is, or what is not its own: nothing is read, and nothing has changed.
TEST(DeviceTransfers, ALeaseEndsWhereTheMemoryEnds) {
    struct Leased {
        MemoryName memory;
        uint64_t bytes, blocks, first;
    };
    const struct {
        const char* what;
        ta_status status;
        std::function<void(Leased&, uint64_t other)> change;
    } lies[] = {
        {"one byte more", TA_E_CORRUPT, [](Leased& l, uint64_t) { ++l.bytes; }},
        {"a block behind the end", TA_E_CORRUPT, [](Leased& l, uint64_t) { l.first = std::exchange(l.bytes, l.bytes * 2); }},
        {"all there can be", TA_E_CORRUPT, [](Leased& l, uint64_t) { l.first = (l.bytes = UINT64_MAX) / 2 / 16 * 16; }},
        {"less than a block lies in", TA_E_CORRUPT, [](Leased& l, uint64_t) { l.bytes = 16; }},
        {"an offset behind the lease", TA_E_CORRUPT, [](Leased& l, uint64_t) { l.first = l.bytes + 16; }},
        {"an offset between two words", TA_E_CORRUPT, [](Leased& l, uint64_t) { l.first = 8; }},
        {"memory of another rank", TA_E_CANCELLED, [](Leased& l, uint64_t other) { l.memory.number = other; }},
    };
    for (const auto& lie : lies) {
        SCOPED_TRACE(lie.what);
        uint64_t other = 0;
        bool lies_now = true;
        Settings source;
        source.lie = [&](uint32_t, MessageHeader& h, std::vector<uint8_t>& payload) {
            if (!lies_now || MessageType(h.type) != MessageType::kLeased) return true;
            Leased leased{};
            std::memcpy(&leased, payload.data(), sizeof leased);
            lie.change(leased, other);
            std::memcpy(payload.data(), &leased, sizeof leased);
            return true;
        };
        const Pair p(source, {.has_host_tier = false});
        const DeviceRange own = p.destination.pool->blocks().device_memory();
        const Transport::Shared shared = p.destination.group->transport()
                                             .share_memory(std::shared_ptr<uint8_t>(p.destination.pool, own.memory), own.bytes)
                                             .take();
        other = shared.name.number;
        const ta_seq seq = p.source.add(64 * 3);
        const uint64_t operations = p.destination.device->operations();
        const auto [here, there] = p.transfer(seq, true);
        EXPECT_EQ(there.state, TA_MOVE_FAILED);
        EXPECT_EQ(there.status.code(), lie.status) << there.status.detail()->message;
        EXPECT_EQ(there.status.detail()->rank, 0);
        EXPECT_EQ(here.state, TA_MOVE_FAILED);
        EXPECT_EQ(p.destination.device->operations(), operations) << "it has read there";
        EXPECT_EQ(p.destination.pool->sequences().snapshot_all().value().size(), 0u);
        EXPECT_TRUE(p.destination.group->health().ok());
        lies_now = false;
        EXPECT_EQ(p.transfer(seq, true).second.state, TA_MOVE_DONE);
    }
}

// The destination has to move others out of the way, block by block, for longer than a rank waits for a peer that does nothing.
TEST_P(DeviceTransfers, WhoMakesRoomSaysThatItGoesOn) {
    const Settings settings{.reaches = GetParam(), .blocks = 16, .operation = std::chrono::milliseconds(600)};
    const Pair p({.reaches = GetParam(), .operation = settings.operation}, settings);
    for (int i = 0; i < 2; ++i) p.destination.add(64 * 20);
    const ta_seq seq = p.source.add(64 * 20);
    p.destination.device->delay_down = std::chrono::milliseconds(50);
    const Time began = Clock::now();
    const auto [here, there] = p.transfer(seq, true);
    p.destination.device->delay_down = std::chrono::milliseconds(0);
    EXPECT_EQ(here.state, TA_MOVE_DONE) << here.status.detail()->message;
    EXPECT_EQ(there.state, TA_MOVE_DONE) << there.status.detail()->message;
    EXPECT_GT(Clock::now() - began, settings.operation) << "it was not slow";
}

// What comes finds no room, and holds blocks itself, as do those that wait for their turn behind it: these let go of nothing.
TEST_P(DeviceTransfers, WhatComesDoesNotWaitForTransfersOfItsOwnLane) {
    const Patience long_one{std::chrono::milliseconds(60000), std::chrono::milliseconds(60000)};
    const Pair p({.reaches = GetParam()}, {.reaches = GetParam(), .blocks = 8, .patience = long_one});
    for (int i = 0; i < 8; ++i) ASSERT_TRUE(p.destination.pool->sequences().pin_blocks(p.destination.add(64), 0, 1, true).ok());
    std::vector<std::pair<uint64_t, uint64_t>> tickets;
    const Time began = Clock::now();
    for (int i = 0; i < 3; ++i) {
        tickets.emplace_back(p.source.transfers->send(p.source.pool, p.source.add(64 * 2), 1, 1, true).value(),
                             p.destination.transfers->receive(p.destination.pool, 0, 1).value());
    }
    for (const auto& [sent, got] : tickets) {
        const TransferProgress there = p.destination.transfers->wait(got, -1).take();
        EXPECT_EQ(there.state, TA_MOVE_FAILED);
        EXPECT_EQ(there.status.code(), TA_E_TIER_FULL) << there.status.detail()->message;
        (void)p.source.transfers->wait(sent, -1);
    }
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));
}

// An open plan reads where blocks have left, so what comes waits for it, unless it is cancelled.
TEST_P(DeviceTransfers, WhatWaitsForRoomCanBeCancelled) {
    const Patience long_one{std::chrono::milliseconds(60000), std::chrono::milliseconds(60000)};
    const Pair p({.reaches = GetParam()}, {.reaches = GetParam(), .blocks = 8, .patience = long_one});
    const ta_seq reader = p.destination.add(64 * 11);
    Plan plan(p.destination.pool);
    const int32_t tokens = 64, none = 0;
    ASSERT_TRUE(plan.begin({&reader, 1}, &tokens, &none).ok());
    const uint64_t sent = p.source.transfers->send(p.source.pool, p.source.add(64 * 6), 1, 1, true).value(),
                   got = p.destination.transfers->receive(p.destination.pool, 0, 1).value();
    EXPECT_EQ(p.destination.transfers->wait(got, 500'000'000).value().state, TA_MOVE_RUNNING);
    const Time began = Clock::now();
    ASSERT_TRUE(p.destination.transfers->cancel(got).ok());
    EXPECT_EQ(p.destination.transfers->wait(got, -1).value().status.code(), TA_E_CANCELLED);
    (void)p.source.transfers->wait(sent, -1);
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));
}

// The same if the group ends at this rank: whoever destroys it does not wait for the plan.
TEST_P(DeviceTransfers, WhatWaitsForRoomEndsWithItsGroup) {
    const Patience long_one{std::chrono::milliseconds(60000), std::chrono::milliseconds(60000)};
    const auto says_no_end = [](uint32_t, MessageHeader& h, std::vector<uint8_t>&) {
        return MessageType(h.type) != MessageType::kEnded;
    };
    const Pair p({.reaches = GetParam(), .lie = says_no_end}, {.reaches = GetParam(), .blocks = 8, .patience = long_one});
    const ta_seq reader = p.destination.add(64 * 11);
    Plan plan(p.destination.pool);
    const int32_t tokens = 64, none = 0;
    ASSERT_TRUE(plan.begin({&reader, 1}, &tokens, &none).ok());
    const ta_seq moved = p.source.add(64 * 6);
    const uint64_t sent = p.source.transfers->send(p.source.pool, moved, 1, 1, true).value(),
                   got = p.destination.transfers->receive(p.destination.pool, 0, 1).value();
    EXPECT_EQ(p.destination.transfers->wait(got, 500'000'000).value().state, TA_MOVE_RUNNING);
    const Time began = Clock::now();
    p.destination.group->stop();
    p.destination.transfers->stop();
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));
    EXPECT_EQ(p.source.transfers->wait(sent, -1).value().status.code(), TA_E_PEER_LOST);
    EXPECT_TRUE(p.source.pool->sequences().snapshot(moved).ok());
    EXPECT_TRUE(plan.abort().ok());
    EXPECT_TRUE(p.destination.pool->sequences().release(reader).ok());
    EXPECT_EQ(p.destination.pool->blocks().usage().used, 0u);
}

// The source has heard that a moved sequence has arrived. Its lane is busy with another transfer when the group is destroyed.
TEST(DeviceTransfers, WhatHasArrivedIsAtOneRankAlone) {
    const Pair p(false);
    const ta_seq moved = p.source.add(64 * 2);
    EXPECT_EQ(p.transfer(moved, false).second.state, TA_MOVE_DONE);  // so that no task of the lane is needed later
    p.source.device->delay = std::chrono::milliseconds(20);
    ASSERT_TRUE(p.source.transfers->send(p.source.pool, p.source.add(64 * 20), 1, 2, false).ok());
    ASSERT_TRUE(p.destination.transfers->receive(p.destination.pool, 0, 2).ok());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const uint64_t sent = p.source.transfers->send(p.source.pool, moved, 1, 1, true).value(),
                   got = p.destination.transfers->receive(p.destination.pool, 0, 1).value();
    EXPECT_EQ(p.destination.transfers->wait(got, -1).value().state, TA_MOVE_DONE);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    EXPECT_LT(p.source.transfers->wait(sent, 0).value().state, TA_MOVE_DONE) << "the lane was not busy";
    p.source.group->stop();
    p.source.transfers->stop();
    EXPECT_FALSE(p.source.pool->sequences().snapshot(moved).ok()) << "both ranks have it";
}

// Transfers that wait for others of their lane are given up at neither rank.
TEST_P(DeviceTransfers, WhoWaitsForItsTurnIsNotGivenUp) {
    const Settings settings{.reaches = GetParam(), .operation = std::chrono::milliseconds(600)};
    const Pair p(settings, settings);
    std::vector<ta_seq> seqs;
    for (int i = 0; i < 12; ++i) seqs.push_back(p.source.add(64));
    const Site& copies = GetParam() ? p.destination : p.source;
    copies.device->delay = std::chrono::milliseconds(100);
    const Time began = Clock::now();
    std::vector<std::pair<uint64_t, uint64_t>> tickets;
    for (const ta_seq seq : seqs) {
        tickets.emplace_back(p.source.transfers->send(p.source.pool, seq, 1, 1, true).value(),
                             p.destination.transfers->receive(p.destination.pool, 0, 1).value());
    }
    for (const auto& [sent, got] : tickets) {
        for (const TransferProgress& t :
             {p.source.transfers->wait(sent, -1).take(), p.destination.transfers->wait(got, -1).take()})
            EXPECT_EQ(t.state, TA_MOVE_DONE) << t.status.detail()->message;
    }
    copies.device->delay = std::chrono::milliseconds(0);
    EXPECT_GT(Clock::now() - began, settings.operation) << "they were not slow";
}

// One piece of work that takes longer than a rank waits for a peer that does nothing.
TEST_P(DeviceTransfers, WhoWorksLongOnOneBlockIsNotGivenUp) {
    const Settings settings{.reaches = GetParam(), .operation = std::chrono::milliseconds(600)};
    const Pair p(settings, settings);
    const ta_seq seq = p.source.add(64);
    const Site& copies = GetParam() ? p.destination : p.source;
    copies.device->delay = std::chrono::milliseconds(2000);
    const auto [here, there] = p.transfer(seq, true);
    copies.device->delay = std::chrono::milliseconds(0);
    EXPECT_EQ(here.state, TA_MOVE_DONE) << here.status.detail()->message;
    EXPECT_EQ(there.state, TA_MOVE_DONE) << there.status.detail()->message;
}

// Not for ever: its rank gives up, and says that it was its own.
TEST_P(DeviceTransfers, WhoGetsOnWithNothingGivesUp) {
    const Patience short_one{std::chrono::milliseconds(100), std::chrono::milliseconds(100)};
    const Settings settings{.reaches = GetParam(), .operation = std::chrono::milliseconds(600), .patience = short_one};
    const Pair p(settings, settings);
    const ta_seq seq = p.source.add(64);
    const Site& copies = GetParam() ? p.destination : p.source;
    copies.device->delay = std::chrono::milliseconds(4000);
    const auto [here, there] = p.transfer(seq, true);
    copies.device->delay = std::chrono::milliseconds(0);
    for (const TransferProgress* t : {&here, &there}) {
        EXPECT_EQ(t->status.code(), TA_E_TIMEOUT);
        EXPECT_EQ(t->status.detail()->rank, GetParam() ? 1 : 0) << t->status.detail()->message;
    }
    EXPECT_EQ(p.transfer(seq, true).second.state, TA_MOVE_DONE);
}

// Blocks are asked for once, so that no peer asks for more than there is.
TEST_P(DeviceTransfers, WhoAsksTwiceForABlockEndsTheGroup) {
    Settings of_destination{.reaches = GetParam()};
    of_destination.lie = [](uint32_t, MessageHeader& h, std::vector<uint8_t>& payload) {
        const auto type = MessageType(h.type);
        if (type != MessageType::kReady && type != MessageType::kAskLease) return true;
        uint64_t first = 0;
        std::memcpy(&first, payload.data() + payload.size() - 2 * sizeof first, sizeof first);
        std::memcpy(payload.data() + payload.size() - sizeof first, &first, sizeof first);
        return true;
    };
    const Pair p({.reaches = GetParam()}, of_destination);
    const auto [here, there] = p.transfer(p.source.add(64 * 3), false);
    EXPECT_EQ(here.status.code(), TA_E_PEER_LOST);
    EXPECT_EQ(here.status.detail()->rank, 1);
    EXPECT_EQ(there.state, TA_MOVE_FAILED);
}

// A destination that has asked for a window cannot have it before it was written. The source keeps its sequence.
TEST(LyingTransfers, WhatWasNotSentHasNotArrived) {
    Settings of_destination{.reaches = false};
    of_destination.lie = [asked = 0](uint32_t, MessageHeader& h, std::vector<uint8_t>& payload) mutable {
        if (MessageType(h.type) != MessageType::kReady || ++asked != 2) return true;
        h.type = uint16_t(MessageType::kArrived);
        payload.clear();
        return true;
    };
    const Pair p({.reaches = false}, of_destination);
    const ta_seq seq = p.source.add(64 * 40 + 5);  // the open block comes last
    const auto [here, there] = p.transfer(seq, true);
    ASSERT_EQ(here.status.code(), TA_E_PEER_LOST);
    EXPECT_EQ(here.status.detail()->rank, 1);
    EXPECT_EQ(there.state, TA_MOVE_FAILED);
    EXPECT_EQ(p.source.pool->sequences().snapshot(seq).value().length, 64 * 40 + 5);
}

// Each word of each message of a transfer says something else, in messages that are whole. Nothing wrong is taken in, both tickets end in
// time, and neither rank is left with anything of a transfer that failed.
TEST_P(DeviceTransfers, LiesInEveryWord) {
    int failed = 0;
    for (const bool at_source : {false, true}) {
        for (int message = 0; message < 3; ++message) {
            for (size_t word = 0; word < 24; ++word) {
                for (const bool all : {false, true}) {
                    SCOPED_TRACE(std::string(at_source ? "source" : "destination") + ", message " + std::to_string(message) +
                                 ", word " + std::to_string(word) + (all ? ", all bits" : ", one bit"));
                    std::atomic<bool> lies{false}, lied{false};
                    int left = message;
                    Settings liar{.reaches = GetParam(), .operation = std::chrono::milliseconds(400)}, other = liar;
                    liar.lie = [&](uint32_t, MessageHeader& h, std::vector<uint8_t>& payload) {
                        const size_t at = word * sizeof(uint64_t);
                        if (!lies || MessageType(h.type) < MessageType::kOffer || left-- != 0 || at + 8 > payload.size())
                            return true;
                        uint64_t value = 0;
                        std::memcpy(&value, payload.data() + at, sizeof value);
                        value = all ? ~uint64_t{0} : value ^ 1;
                        std::memcpy(payload.data() + at, &value, sizeof value);
                        lied = true;
                        return true;
                    };
                    const Pair p(at_source ? liar : other, at_source ? other : liar);
                    const ta_seq seq = p.source.add(64 * 2 + 5);
                    lies = true;
                    const auto [here, there] = p.transfer(seq, false);
                    lies = false;
                    if (!lied) continue;
                    EXPECT_EQ(p.source.pool->sequences().snapshot(seq).value().length, 64 * 2 + 5);
                    if (there.state == TA_MOVE_DONE) {
                        EXPECT_TRUE(p.destination.pool->sequences().verify(there.seq).ok());
                        EXPECT_EQ(p.destination.pool->sequences().snapshot(there.seq).value().length, 64 * 2 + 5);
                        continue;
                    }
                    ++failed;
                    EXPECT_EQ(p.destination.pool->sequences().snapshot_all().value().size(), 0u);
                    EXPECT_EQ(p.destination.pool->blocks().usage().used, 0u);
                    EXPECT_TRUE(kLies.contains(there.status.code())) << there.status.detail()->message;
                    EXPECT_TRUE(here.state == TA_MOVE_DONE || kLies.contains(here.status.code()));
                    const Status health = p.destination.group->health();
                    EXPECT_TRUE(health.ok() || health.code() == TA_E_PEER_LOST);
                }
            }
        }
    }
    EXPECT_GT(failed, 40);
}

// A prefix that is published at the source, which both ranks share.
struct SharedPrefix {
    static constexpr size_t kBlocks = 9;
    explicit SharedPrefix(const Pair& pair) : p(pair), keys(kBlocks * kPrefixKeyBytes, 3) {
        Salt salt{};
        salt[0] = 1;
        for (const Site* site : {&p.source, &p.destination}) {
            spaces.push_back(site->pool->prefixes().create(salt, UINT64_MAX).value());
            EXPECT_TRUE(site->spaces->join(site->pool, spaces.back()).ok());
        }
        const ta_seq seq = p.source.add(64 * kBlocks);
        before = Pair::pages(p.source, seq);
        EXPECT_TRUE(p.source.pool->publish(seq, spaces[0], keys).ok());
        EXPECT_TRUE(p.source.pool->sequences().release(seq).ok());
        for (;;) {
            const auto places = p.destination.spaces->lookup(*p.destination.pool, spaces[1], keys, -1).take();
            if (places.back().answer == PrefixPlace::Answer::kYes) break;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    }
    TransferProgress fetch() const {
        return p.destination.transfers->wait(p.destination.transfers->fetch(p.destination.pool, spaces[1], keys).value(), -1)
            .take();
    }
    void expect(const TransferProgress& got) const {
        const auto [seq, length] = p.destination.pool->match_prefix(spaces[1], keys).value();
        EXPECT_EQ(length, got.length);
        EXPECT_TRUE(p.destination.pool->sequences().verify(seq).ok());
        const std::vector<uint8_t> here = Pair::pages(p.destination, seq);
        EXPECT_TRUE(std::equal(here.begin(), here.end(), before.begin()));
        EXPECT_TRUE(p.destination.pool->sequences().release(seq).ok());
    }

    const Pair& p;
    std::vector<uint8_t> keys, before;
    std::vector<Tenant> spaces;
};

TEST_P(DeviceFetches, ArriveAsTheyAre) {
    const Pair p(GetParam());
    const SharedPrefix shared(p);
    const Site& copies = GetParam() ? p.destination : p.source;
    const uint64_t operations = copies.device->operations();
    const TransferProgress got = shared.fetch();
    ASSERT_EQ(got.state, TA_MOVE_DONE) << got.status.detail()->message;
    EXPECT_EQ(got.length, int64_t(SharedPrefix::kBlocks) * 64);
    EXPECT_GE(copies.device->operations() - operations, SharedPrefix::kBlocks);
    shared.expect(got);
}

TEST_P(DeviceFetches, NoWrongBlockIsPublished) {
    int failed = 0;
    for (const DeviceFault fault : {DeviceFault::kFails, DeviceFault::kWrong}) {
        for (uint64_t k = 0; k < 20; ++k) {
            SCOPED_TRACE(std::string(name_of(fault)) + " at " + std::to_string(k));
            const Pair p(GetParam());
            const SharedPrefix shared(p);
            RankDevice* const copies = (GetParam() ? p.destination : p.source).device;
            copies->break_now(fault, false, k);
            const TransferProgress got = shared.fetch();
            copies->heal();
            shared.expect(got);
            if (got.state == TA_MOVE_DONE) continue;
            ++failed;
            EXPECT_EQ(got.status.code(), fault == DeviceFault::kFails ? TA_E_DEVICE : TA_E_CORRUPT);
            EXPECT_EQ(got.length, 0);
            EXPECT_EQ(p.destination.pool->blocks().usage().used, 0u);
            const TransferProgress again = shared.fetch();
            EXPECT_EQ(again.state, TA_MOVE_DONE);
            shared.expect(again);
        }
    }
    EXPECT_GT(failed, 10);
}

// Rank 1 has all blocks, but cannot give one of them, which its hints do not say; rank 2 has the first five.
TEST(Fetches, ARankIsAskedAgainForWhatIsBehindABlockThatItLacks) {
    constexpr uint64_t kBlocks = 8;
    for (const size_t lacked : {0u, 4u}) {
        SCOPED_TRACE(lacked);
        const GroupId id = make_id(GroupKind::kLocal);
        std::deque<Site> sites;
        for (uint32_t r = 0; r < 3; ++r) sites.emplace_back(id, r, Settings{.ranks = 3});
        std::vector<uint8_t> keys((kBlocks + 1) * kPrefixKeyBytes, 3);
        Salt salt{};
        salt[0] = 1;
        std::vector<Tenant> spaces;
        for (uint32_t r = 0; r < 3; ++r) {
            const Site& site = sites[r];
            site.group->wait_connected(-1);
            spaces.push_back(site.pool->prefixes().create(salt, UINT64_MAX).value());
            const uint64_t n = r == 0 ? 0 : r == 1 ? kBlocks : 5;
            const ta_seq seq = site.add(int32_t(64 * n));
            const auto first = std::span(keys).first(n * kPrefixKeyBytes);
            EXPECT_TRUE(site.pool->publish(seq, spaces[r], first).ok());
            if (r == 1) site.pool->sequences().snapshot(seq).value().blocks[lacked]->set_stuck();
            EXPECT_TRUE(site.spaces->join(site.pool, spaces[r]).ok());
        }
        const Site& here = sites[0];
        // All have told what they have, also to those that rank 0 asks: nobody has the last one.
        for (uint32_t r = 1; r < 3; ++r) EXPECT_TRUE(sites[r].spaces->lookup(*sites[r].pool, spaces[r], keys, -1).ok());
        ASSERT_EQ(here.spaces->lookup(*here.pool, spaces[0], keys, -1).value().back().answer, PrefixPlace::Answer::kNo);
        const TransferProgress got = here.transfers->wait(here.transfers->fetch(here.pool, spaces[0], keys).value(), -1).take();
        EXPECT_EQ(got.state, TA_MOVE_DONE);
        EXPECT_EQ(got.blocks_moved, kBlocks);
        EXPECT_EQ(got.length, int64_t(kBlocks * 64));
    }
}

}  // namespace
}  // namespace ta::share
