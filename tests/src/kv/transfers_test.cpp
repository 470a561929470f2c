// Transfers between ranks with devices, which are simulated. Where they reach each other's memory the destination reads the blocks
// itself; else the source writes them into windows on the destination's device.
#include "src/kv/share/transfers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>

#include "src/attend/plan.h"
#include "tests/tiering/simulated_device.h"
#include "tiering/share/local.h"

namespace ta::share {
namespace {

using ta::testing::DeviceFault;
using ta::testing::SimulatedDevice;

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64;

class RankDevice final : public SimulatedDevice {
  public:
    RankDevice(int ordinal, bool reaches) : SimulatedDevice(uint64_t(ordinal)), ordinal_(ordinal), reaches_(reaches) {}
    int ordinal() const override { return ordinal_; }
    Result<bool> reach(std::span<const int>) override { return reaches_; }

  private:
    const int ordinal_;
    const bool reaches_;
};

// One rank, with its own context and pool.
struct Site {
    Site(const GroupId& id, uint32_t rank, bool reaches, uint64_t blocks, const Fault& fault) {
        Seams seams;
        auto made_device = std::make_unique<RankDevice>(int(rank), reaches);
        device = made_device.get();
        seams.device = std::move(made_device);
        Context::Options options;
        options.threads = 1;
        context = Context::create(std::move(options), std::move(seams)).take();
        Result<Geometry> g = Geometry::make({.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = 4});
        ta_numerics settings{};
        Result<Numerics> n = resolve_numerics(&settings, g.value().shapes);
        const uint64_t bytes = blocks * g.value().token_slot_bytes;
        TierSettings tiers;
        if (rank == 0) tiers.host_budget = bytes;
        pool = Pool::create(context, g.take(), n.take(), bytes, 16, tiers).take();
        GroupSettings s;
        s.rank = rank;
        s.ranks = 2;
        s.generation = 1;
        s.silence = s.operation = std::chrono::milliseconds(20000);
        group = std::make_unique<Group>(context, s, join_local_group(id, rank, 2, device, fault).take());
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
        const ta_seq seq = pool->create_sequence().value();
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
        : id(make_id(GroupKind::kLocal)), source(id, 0, reaches, 64, fault), destination(id, 1, reaches, room, {}) {
        source.group->wait_connected(-1);
        destination.group->wait_connected(-1);
        (void)destination.pool->release(destination.add(64));  // its next blocks have other ids than the source's
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
        const Pool::Snapshot snapshot = site.pool->snapshot(seq).take();
        for (const BlockPtr& b : snapshot.blocks) {
            const size_t bytes = g.page_offset(b->kind(), kLayers - 1) + g.page_bytes(b->kind(), kLayers - 1);
            all.insert(all.end(), b->slot(), b->slot() + bytes);
        }
        return all;
    }

    GroupId id;
    Site source, destination;
};

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
            EXPECT_TRUE(p.destination.pool->verify(there.seq).ok());
            EXPECT_TRUE(Pair::pages(p.destination, there.seq) == before || tokens % 64 != 0);
            EXPECT_GT(copies.device->operations() - operations, uint64_t(tokens / 64));
            EXPECT_TRUE(p.destination.pool->release(there.seq).ok());
        }
    }
}

TEST_P(DeviceTransfers, BlocksInTheHostsMemoryComeToo) {
    const Pair p(GetParam());
    std::vector<ta_seq> seqs;
    for (int i = 0; i < 6; ++i) seqs.push_back(p.source.add(64 * 20));  // the first ones have to leave the device
    const Pool::Snapshot snapshot = p.source.pool->snapshot(seqs[0]).take();
    const auto in_host = std::count_if(snapshot.blocks.begin(), snapshot.blocks.end(),
                                       [](const BlockPtr& b) { return b->tier() == TierKind::kHost; });
    ASSERT_GT(in_host, 0);
    const std::vector<uint8_t> before = Pair::pages(p.source, seqs[0]);
    const auto [here, there] = p.transfer(seqs[0], false);
    ASSERT_EQ(there.state, TA_MOVE_DONE) << there.status.detail()->message;
    EXPECT_TRUE(p.destination.pool->verify(there.seq).ok());
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
                    EXPECT_TRUE(p.destination.pool->verify(there.seq).ok());
                    continue;
                }
                ++failed;
                EXPECT_EQ(there.state, TA_MOVE_FAILED);
                EXPECT_EQ(there.status.code(), fault == DeviceFault::kFails ? TA_E_DEVICE : TA_E_CORRUPT);
                EXPECT_TRUE(there.status.detail()->rank == 0 || (fault == DeviceFault::kFails && !at_source));
                EXPECT_EQ(p.destination.pool->snapshot_all().value().size(), 0u);
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
    EXPECT_EQ(p.source.pool->snapshot(seq).value().length, 64 * 12);
    EXPECT_TRUE(p.destination.pool->release(there_already).ok());
    EXPECT_EQ(p.transfer(seq, true).second.state, TA_MOVE_DONE);
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
                EXPECT_TRUE(p.destination.pool->verify(there.seq).ok());
                continue;
            }
            ++failed;
            EXPECT_TRUE(kind == Fault::Kind::kCorrupt || kind == Fault::Kind::kCut);
            EXPECT_TRUE(there.status.code() == TA_E_PEER_LOST || there.status.code() == TA_E_CORRUPT);
        }
    }
    EXPECT_GT(failed, 4);
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
        EXPECT_TRUE(p.source.pool->release(seq).ok());
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
        EXPECT_TRUE(p.destination.pool->verify(seq).ok());
        const std::vector<uint8_t> here = Pair::pages(p.destination, seq);
        EXPECT_TRUE(std::equal(here.begin(), here.end(), before.begin()));
        EXPECT_TRUE(p.destination.pool->release(seq).ok());
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

}  // namespace
}  // namespace ta::share
