// Blocks on a disk that damages them or does not answer, for those who look at them or save them: nothing of a damaged one is
// given out, who has it is named, and others go on meanwhile.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <future>
#include <thread>
#include <tuple>

#include "faults/world.h"

namespace ta::testing {
namespace {

constexpr uint64_t kHeld = 64 * 3 + 5;

class Inspect : public ::testing::Test {
  protected:
    Inspect() {
        World plain(shape, inputs, nullptr, {}, false, false);
        prepare(plain);
        plain.finish();
        reference = plain.take_record();
    }
    // Two sequences; blocks 1 and 2 of the first are on disk.
    static void prepare(World& world) {
        world.make_pool();
        world.add();
        world.add();
        world.step({0, 1}, {int32_t(kHeld), 70});
        world.move(0, 1, 2, TA_TIER_DISK);
    }

    const PoolShape shape{.host_blocks = 8, .disk_blocks = 8};
    Inputs inputs;
    Reference reference;
};

TEST_F(Inspect, NothingOfADamagedBlockIsGivenOut) {
    World world(shape, inputs, &reference, {}, false, false);
    prepare(world);
    const ta_seq seq = world.seqs[0];
    BlockBytes bytes(world, 0, 2);
    bytes.flip(100, 3);
    ta_error err;
    auto block = sized<ta_x_block_info>();
    std::vector<uint8_t> slot(1 << 20, 0x77);
    EXPECT_EQ(ta_x_seq_block(world.pool.get(), seq, 2, &block, slot.data(), slot.size(), &err), TA_E_CORRUPT) << err.message;
    EXPECT_EQ(err.block, 2);
    EXPECT_EQ(block.bytes + block.content_id + block.tokens, 0u);
    EXPECT_EQ(slot, std::vector<uint8_t>(slot.size(), 0x77));

    const std::vector<float> none(kHeld * kRow, -1.0f);
    std::vector<float> k = none, v = none;
    EXPECT_EQ(ta_x_seq_dequantize(world.pool.get(), seq, 0, 0, kHeld, k.data(), v.data(), &err), TA_E_CORRUPT) << err.message;
    EXPECT_EQ(err.block, 2);
    EXPECT_EQ(k, none) << "of the blocks before it";
    EXPECT_EQ(v, none);

    const std::string file = world.folder() + "/pool";
    EXPECT_EQ(ta_kv_pool_save(world.pool.get(), file.c_str(), 0, nullptr, &err), TA_E_CORRUPT) << err.message;
    EXPECT_EQ(err.block, 2);
    char name[32];
    std::snprintf(name, sizeof name, "sequence 0x%llx", (unsigned long long)seq);
    EXPECT_NE(std::string(err.message).find(name), std::string::npos) << err.message;

    bytes.flip(100, 3);
    EXPECT_EQ(ta_x_seq_block(world.pool.get(), seq, 2, &block, slot.data(), slot.size(), &err), TA_OK) << err.message;
    EXPECT_EQ(block.tokens, 64u);
}

TEST_F(Inspect, AStalledDiskHoldsNobodyElseUp) {
    World world(shape, inputs, &reference, {}, false, false);
    prepare(world);
    const Plan other = make_plan(world.pool);
    std::vector<uint8_t> slot(1 << 20);
    std::vector<float> k(64 * kRow);
    const std::function<ta_status()> looks[] = {
        [&] {
            auto block = sized<ta_x_block_info>();
            return ta_x_seq_block(world.pool.get(), world.seqs[0], 1, &block, slot.data(), slot.size(), nullptr);
        },
        [&] { return ta_x_seq_dequantize(world.pool.get(), world.seqs[0], 0, 64, 64, k.data(), nullptr, nullptr); }};
    for (const auto& look : looks) {
        SCOPED_TRACE(&look == looks ? "ta_x_seq_block" : "ta_x_seq_dequantize");
        const uint64_t before = world.files()->operations();
        world.files()->break_now(Fault::kStall, true);
        std::future<ta_status> looked = std::async(std::launch::async, look);
        while (world.files()->operations() == before) std::this_thread::yield();
        std::future<ta_status> begun = std::async(std::launch::async, [&] {
            const int32_t one = 1;
            return ta_plan_begin(other.get(), 1, &world.seqs[1], &one, nullptr, nullptr, nullptr);
        });
        EXPECT_EQ(begun.wait_for(std::chrono::seconds(3)), std::future_status::ready);
        EXPECT_EQ(looked.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
        world.files()->heal();
        EXPECT_EQ(begun.get(), TA_OK);
        EXPECT_EQ(looked.get(), TA_OK);
        EXPECT_EQ(ta_plan_abort(other.get(), nullptr), TA_OK);
    }
}

TEST_F(Inspect, MovesThatAStalledDiskWorksOnCanBeCancelled) {
    World world(shape, inputs, &reference, {}, false, false);
    prepare(world);
    const ta_kv_pool* pool = world.pool.get();
    const auto in_tiers = [&] {
        auto r = sized<ta_residency>();
        EXPECT_EQ(ta_seq_residency(pool, world.seqs[0], &r, nullptr), TA_OK);
        return std::array{r.device_blocks, r.host_blocks, r.disk_blocks};
    };
    const auto before = in_tiers();
    for (const auto& [first, n, to] : {std::tuple(1, 2, TA_TIER_HOST), std::tuple(0, 1, TA_TIER_DISK)}) {
        SCOPED_TRACE(to == TA_TIER_DISK ? "written" : "read");
        const uint64_t operations = world.files()->operations();
        world.files()->break_now(Fault::kStall, true);
        ta_ticket ticket = 0;
        ASSERT_EQ(ta_seq_move(world.pool.get(), world.seqs[0], uint64_t(first), uint64_t(n), to, &ticket, nullptr), TA_OK);
        while (world.files()->operations() == operations) std::this_thread::yield();
        auto info = sized<ta_move_info>();
        EXPECT_EQ(ta_move_wait(pool, ticket, 20'000'000, &info, nullptr), TA_OK);
        EXPECT_EQ(info.state, TA_MOVE_RUNNING);
        EXPECT_EQ(ta_move_cancel(world.pool.get(), ticket, nullptr), TA_OK);
        EXPECT_EQ(ta_move_wait(pool, ticket, 3'000'000'000, &info, nullptr), TA_OK);
        EXPECT_EQ(info.state, TA_MOVE_CANCELLED);
        EXPECT_EQ(info.moved + info.failed, 0u);
        EXPECT_EQ(in_tiers(), before);
        world.files()->heal();
        const ta_move_info again = move_now(world.pool, world.seqs[0], uint64_t(first), uint64_t(n), to);
        EXPECT_EQ(again.moved, uint64_t(n)) << ta_status_name(again.status);
        const ta_tier back = to == TA_TIER_DISK ? TA_TIER_DEVICE : TA_TIER_DISK;
        EXPECT_EQ(move_now(world.pool, world.seqs[0], uint64_t(first), uint64_t(n), back).moved, uint64_t(n));
        EXPECT_EQ(ta_seq_verify(world.pool.get(), world.seqs[0], nullptr), TA_OK);
    }
}

}  // namespace
}  // namespace ta::testing
