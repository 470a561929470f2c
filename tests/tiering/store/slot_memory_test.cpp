// The slab of a GPU's pool: it has room for the budget in any kind of block, and takes hardly more.
#include "tiering/store/slot_memory.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "src/page/geometry.h"
#include "tiering/simulated_device.h"

namespace ta::testing {
namespace {

constexpr uint64_t kBudget = uint64_t{256} << 20;

struct Shape {
    const char* name;
    int bits;
    bool falls;
};

class Slab : public ::testing::TestWithParam<Shape> {
  protected:
    void SetUp() override {
        Result<Geometry> g = Geometry::make(
            {.layers = 1, .kv_heads = 4, .head_dim = 128, .bits = uint32_t(GetParam().bits), .falls = GetParam().falls});
        ASSERT_TRUE(g.ok());
        for (int kind = 0; kind < kPageKinds; ++kind) {
            const size_t bytes = g.value().slot_bytes(PageKind(kind));
            stride[kind] = (bytes + 4095) / 4096 * 4096;
            slots[kind] = bytes ? kBudget / bytes : 0;
            needed = std::max<uint64_t>(needed, slots[kind] * stride[kind]);
        }
        ASSERT_TRUE(slab.take(slots, stride));
    }
    SimulatedDevice device{1};
    SlotSlab slab{device};
    size_t stride[kPageKinds] = {}, slots[kPageKinds] = {};
    uint64_t needed = 0;  // by the kind that needs most for the budget
};

TEST_P(Slab, TakesHardlyMoreThanTheBudget) {
    EXPECT_GE(device.bytes_in_use(), needed);
    EXPECT_LE(double(device.bytes_in_use()), 1.02 * double(needed));
}

TEST_P(Slab, HoldsTheBudgetInAnyKind) {
    for (int kind = 0; kind < kPageKinds; ++kind) {
        std::vector<uint8_t*> taken;
        for (size_t i = 0; i < slots[kind]; ++i) {
            uint8_t* slot = slab.cut(kind, stride[kind]);
            ASSERT_NE(slot, nullptr) << "slot " << i << " of " << slots[kind] << " of kind " << kind;
            taken.push_back(slot);
        }
        for (uint8_t* slot : taken) slab.give(kind, slot);
    }
}

TEST_P(Slab, HoldsTheBudgetInAMixture) {
    std::mt19937 random(5);
    std::vector<std::pair<uint8_t*, int>> taken;
    for (uint64_t bytes = 0;;) {
        int kind = int(random() % kPageKinds);
        while (stride[kind] == 0) kind = (kind + 1) % kPageKinds;
        if (bytes + stride[kind] > kBudget) break;
        bytes += stride[kind];
        taken.emplace_back(slab.cut(kind, stride[kind]), kind);
        ASSERT_NE(taken.back().first, nullptr) << bytes;
        *taken.back().first = uint8_t(taken.size());
    }
    for (size_t i = 0; i < taken.size(); ++i) EXPECT_EQ(*taken[i].first, uint8_t(i + 1)) << "slots overlap";
}

INSTANTIATE_TEST_SUITE_P(All, Slab,
                         ::testing::Values(Shape{"8_bits", 8, false}, Shape{"4_bits", 4, false}, Shape{"2_bits", 2, false},
                                           Shape{"falling", 4, true}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ta::testing
