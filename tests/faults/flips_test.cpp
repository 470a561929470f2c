// 100000 flipped bits of blocks in the device, the host and the disk tier: each is found by ta_seq_verify, which names the
// block, and no block goes to another tier with one. TA_FLIPS: how many in each tier.
#include <gtest/gtest.h>

#include "faults/world.h"

namespace ta::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kDefaultFlips = 4000;
#else
constexpr int kDefaultFlips = 33400;
#endif

class Flips : public ::testing::TestWithParam<ta_tier> {
  protected:
    void prepare(World& world) {
        world.make_pool();
        world.add();
        world.step({0}, {64 * 3 + 5});
        world.move(0, 1, 2, GetParam());
    }
    Inputs inputs;
};

TEST_P(Flips, AreFoundAndNotServed) {
    const PoolShape shape{.host_blocks = 8, .disk_blocks = 8};
    World plain(shape, inputs, nullptr, {}, false, false);
    prepare(plain);
    plain.step({0}, {1});
    plain.finish();
    const Reference reference = plain.take_record();

    World world(shape, inputs, &reference, {}, false, false);
    prepare(world);
    world.settle();
    Random random(7);
    const ta_tier elsewhere = GetParam() == TA_TIER_HOST ? TA_TIER_DISK : TA_TIER_HOST;
    const auto flips = int(number_from("TA_FLIPS", kDefaultFlips));
    int found = 0, kept = 0;
    for (int i = 0; i < flips && !HasFailure();) {
        const auto b = size_t(random.between(1, 2));
        BlockBytes bytes(world, 0, b);
        for (int n = 0; n < 100 && i < flips && !HasFailure(); ++n, ++i) {
            const auto at = size_t(random.below(int64_t(world.payload_bytes(0, b))));
            const int bit = int(random.below(8));
            SCOPED_TRACE(::testing::Message() << "flip " << i << ": bit " << bit << " of byte " << at << " of block " << b);
            bytes.flip(at, bit);
            ta_error err;
            EXPECT_EQ(ta_seq_verify(world.pool.get(), world.seqs[0], &err), TA_E_CORRUPT);
            EXPECT_EQ(err.block, int64_t(b));
            found += err.block == int64_t(b);
            if (i % 20 == 0) {
                world.refuse_move(0, b, elsewhere);
                if (GetParam() == TA_TIER_DISK) world.refuse_step({0}, {1});
                EXPECT_EQ(code_of(world.block(0, b)->tier()), GetParam()) << "it has moved";
                ++kept;
            }
            bytes.flip(at, bit);
            if (i % 20 == 0) world.move(0, 1, 2, GetParam());  // the step has brought the other one
        }
    }
    EXPECT_EQ(ta_seq_verify(world.pool.get(), world.seqs[0], nullptr), TA_OK);
    world.step({0}, {1});
    world.finish();
    std::printf("%d of %d flipped bits found, %d moves refused\n", found, flips, kept);
}

INSTANTIATE_TEST_SUITE_P(Tiers, Flips, ::testing::Values(TA_TIER_DEVICE, TA_TIER_HOST, TA_TIER_DISK), [](const auto& i) {
    return std::string(i.param == TA_TIER_DEVICE ? "Device" : i.param == TA_TIER_HOST ? "Host" : "Disk");
});

}  // namespace
}  // namespace ta::testing
