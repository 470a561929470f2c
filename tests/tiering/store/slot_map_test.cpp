// Which slots are taken: no two overlap, none is lost, what the figures say is what can be had.
#include "tiering/store/slot_map.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace ta {
namespace {

TEST(SlotMap, ShapesFitTheirBytes) {
    for (const uint64_t bytes : {uint64_t{0}, uint64_t{4096}, uint64_t{100000}, uint64_t{1} << 24, uint64_t{1} << 40}) {
        for (const uint64_t a : {uint64_t{0}, uint64_t{4096}, uint64_t{20480}, uint64_t{2} << 20}) {
            for (const uint64_t b : {uint64_t{0}, uint64_t{8192}, uint64_t{1} << 20}) {
                const SlotMap::Shape s = SlotMap::fit(bytes, {a, b});
                if (a == 0 && b == 0) {
                    EXPECT_FALSE(s.valid());
                    continue;
                }
                if (s.regions == 0) continue;
                EXPECT_TRUE(s.valid());
                EXPECT_LE(s.bytes(), bytes);
                if (std::max(a, b) > 64 * std::min(a ? a : b, b ? b : a)) continue;
                EXPECT_GE(s.bytes(), bytes - std::min(bytes, std::max({bytes / 64, a, b}) + s.region_bytes));
                for (int c = 0; c < kSlotClasses; ++c) EXPECT_EQ(s.per_region(c) > 0, s.stride[c] > 0);
            }
        }
    }
    SlotMap::Shape hostile;
    hostile.stride[0] = 4096;
    hostile.region_bytes = uint64_t{1} << 60;
    hostile.regions = 1 << 10;
    EXPECT_FALSE(hostile.valid());
    hostile = {{4096, 0}, 4096, uint64_t{1} << 40};
    EXPECT_FALSE(hostile.valid());
    hostile = {{4096, 8192}, 4096, 10};
    EXPECT_FALSE(hostile.valid()) << "a region without room for a slot";
    hostile = {{4096, 0}, 4096, 100000};
    EXPECT_FALSE(hostile.valid()) << "64 indices for each slot";
    hostile = {{4096, 0}, 63 * 4096, 129};
    EXPECT_FALSE(hostile.valid());
}

// No tier was ever made of a shape that valid() refuses.
TEST(SlotMap, WhatFitsIsValid) {
    std::mt19937_64 random(3);
    for (int i = 0; i < 200000; ++i) {
        uint64_t strides[kSlotClasses] = {};
        for (uint64_t& stride : strides) stride = random() % 3 ? 4096 * (1 + random() % (uint64_t{1} << random() % 12)) : 0;
        const SlotMap::Shape s = SlotMap::fit(random() >> (20 + random() % 40), strides);
        if (s.regions == 0) continue;
        ASSERT_TRUE(s.valid()) << s.regions << " regions of " << s.region_bytes;
        uint64_t slots = 0;
        for (int c = 0; c < kSlotClasses; ++c) slots = std::max(slots, s.slots(c));
        ASSERT_LE(s.indices(), std::max<uint64_t>(slots, 128 * 64));
    }
}

// The regions that a space is cut into serve blocks of every size, whatever the largest is.
TEST(SlotMap, SmallSpacesHoldMostOfEveryClass) {
    constexpr uint64_t kPage = 4096;
    struct Case {
        uint64_t pages[kSlotClasses];  // token, channel, low blocks
    };
    // Of host and disk tiers: two heads of 128, 4 bits, without and with 2 bits below; an 8B model likewise.
    for (const Case& c : {Case{{9, 5, 0}}, {{9, 5, 3}}, {{10, 6, 0}}, {{10, 6, 4}}, {{554, 287, 0}}, {{554, 287, 160}}}) {
        const uint64_t strides[kSlotClasses] = {c.pages[0] * kPage, c.pages[1] * kPage, c.pages[2] * kPage};
        for (uint64_t bytes = 2 * strides[0]; bytes < 3000 * strides[0]; bytes += bytes / 50 / kPage * kPage + kPage) {
            const SlotMap::Shape shape = SlotMap::fit(bytes, strides);
            const uint64_t largest = bytes / strides[0];
            ASSERT_TRUE(shape.valid());
            ASSERT_GE(shape.regions, std::min<uint64_t>(largest, strides[2] ? 3 : 2)) << "a region for each class";
            for (int i = 0; i < kSlotClasses; ++i) {
                if (strides[i] == 0) continue;
                const double share = double(shape.slots(i)) / double(bytes / strides[i]);
                const double least = largest >= 200 ? 0.9 : largest >= 20 ? 0.8 : largest >= 8 ? 0.7 : 0.5;
                EXPECT_GE(share, least) << "class " << i << " of " << strides[0] << " and " << strides[1] << " in " << bytes;
            }
        }
    }
    EXPECT_EQ(SlotMap::fit(1000 << 10, {9 * kPage, 5 * kPage}).slots(1), 50u);
    EXPECT_EQ(SlotMap::fit(1000 << 10, {9 * kPage, 5 * kPage}).slots(0), 25u);
}

// Regions of 64 of the smallest slots, where there are 64 of them: the index is as small as it can be.
TEST(SlotMap, LargeSpacesHaveRegionsOf64Slots) {
    for (const uint64_t other : {0, 2, 5, 9, 64}) {
        const uint64_t strides[kSlotClasses] = {9 * 4096, other * 4096};
        const uint64_t smallest = other ? std::min(strides[0], strides[1]) : strides[0];
        for (const uint64_t bytes : {4096 * smallest, 4100 * smallest + 77, uint64_t{1} << 40}) {
            const SlotMap::Shape shape = SlotMap::fit(bytes, strides);
            EXPECT_EQ(shape.region_bytes, 64 * smallest);
            EXPECT_EQ(shape.regions, bytes / shape.region_bytes);
        }
    }
    // All 64 of a region can be had.
    const uint64_t one_class[kSlotClasses] = {4096};
    const SlotMap::Shape shape = SlotMap::fit(uint64_t{128} * 64 * 4096, one_class);
    ASSERT_EQ(shape.per_region(0), 64u);
    SlotMap map(shape);
    Slot slot;
    for (uint64_t i = 0; i < shape.regions * 64; ++i) ASSERT_TRUE(map.acquire(0, slot)) << i;
    EXPECT_FALSE(map.acquire(0, slot));
}

// Regions once were as large as the largest slot, or whole slots of the smallest class.
TEST(SlotMap, ShapesOfOlderFilesAreValid) {
    for (const uint64_t pages : {10, 12, 18, 66, 384}) {
        for (const uint64_t regions : {1, 24, 64, 127}) {
            const SlotMap::Shape shape{{10 * 4096, 6 * 4096}, pages * 4096, regions};
            EXPECT_TRUE(shape.valid());
        }
    }
}

TEST(SlotMap, ARandomWalkAgainstAModel) {
    std::mt19937_64 random(7);
    for (int round = 0; round < 20; ++round) {
        const uint64_t strides[kSlotClasses] = {4096 * (1 + random() % 9), round % 4 ? 4096 * (1 + random() % 5) : 0};
        SlotMap map(SlotMap::fit((1 << 20) + random() % (1 << 22), strides));
        std::map<uint64_t, std::pair<uint64_t, Slot>> taken;  // begin: end, slot
        for (int step = 0; step < 3000; ++step) {
            const auto slot_class = uint8_t(strides[1] ? random() % 2 : 0);
            const bool filling = step / 500 % 2 == 0;
            if (taken.empty() || random() % 4 < (filling ? 3u : 1u)) {
                TierStats before;
                map.describe(before);
                Slot s;
                const bool got = map.acquire(slot_class, s);
                EXPECT_EQ(got, before.slots_free[slot_class] > 0);
                if (!got) continue;
                const uint64_t begin = map.offset(s), end = begin + strides[slot_class];
                ASSERT_LE(end, map.shape().bytes());
                ASSERT_TRUE(map.known(s) && map.taken(s));
                EXPECT_FALSE(map.take(s));
                const auto after = taken.lower_bound(begin);
                ASSERT_TRUE(after == taken.end() || after->first >= end) << "slots overlap";
                ASSERT_TRUE(after == taken.begin() || std::prev(after)->second.first <= begin) << "slots overlap";
                taken[begin] = {end, s};
            } else {
                auto victim = taken.begin();
                std::advance(victim, long(random() % taken.size()));
                map.give(victim->second.second);
                EXPECT_FALSE(map.taken(victim->second.second));
                taken.erase(victim);
            }
            TierStats now;
            map.describe(now);
            EXPECT_EQ(now.slots_used[0] + now.slots_used[1], taken.size());
            EXPECT_GE(now.fragmentation, 0);
            EXPECT_LE(now.fragmentation, 1);
            EXPECT_EQ(now.used + now.free, map.shape().bytes());
            EXPECT_LE(now.room, now.free);
            EXPECT_LE(now.largest_free, now.room);
            uint64_t worst = now.free;
            for (int c = 0; c < 2; ++c) worst = std::min(worst, strides[c] ? now.slots_free[c] * strides[c] : worst);
            EXPECT_DOUBLE_EQ(now.fragmentation, now.free ? 1 - double(worst) / double(now.free) : 0);
        }
        for (const auto& [begin, entry] : taken) map.give(entry.second);
        TierStats empty;
        map.describe(empty);
        EXPECT_EQ(empty.used, 0u);
        EXPECT_EQ(empty.free, map.shape().bytes());
        EXPECT_EQ(empty.room, map.shape().bytes());
        EXPECT_EQ(empty.largest_free, map.shape().bytes());
        for (int c = 0; c < kSlotClasses; ++c) EXPECT_EQ(empty.slots_free[c], map.shape().slots(c));
    }
}

TEST(SlotMap, FreshSlotsLieSideBySide) {
    SlotMap map(SlotMap::fit(1 << 22, {4096, 8192}));
    Slot last;
    ASSERT_TRUE(map.acquire(0, last));
    for (uint32_t i = 1; i < map.shape().per_region(0); ++i) {
        Slot s;
        ASSERT_TRUE(map.acquire(0, s));
        EXPECT_EQ(map.offset(s), map.offset(last) + 4096);
        last = s;
    }
}

TEST(SlotMap, FragmentationIsWhatTheOtherClassCannotHave) {
    SlotMap map(SlotMap::fit(64 << 12, {4096, 4096}));
    const SlotMap::Shape& shape = map.shape();
    ASSERT_GT(shape.regions, 2u);
    for (uint64_t r = 0; r < shape.regions; ++r) ASSERT_TRUE(map.take({uint32_t(r * SlotMap::kIndicesPerRegion), 0}));
    TierStats s;
    map.describe(s);
    EXPECT_EQ(s.slots_free[1], 0u);
    EXPECT_EQ(s.fragmentation, s.free > 0 ? 1 : 0);
}

// Bytes behind the last slot of a region are free, and count as what nobody can have.
TEST(SlotMap, RestsOfRegionsAreFreeAndOfNoUse) {
    SlotMap map(SlotMap::fit(1000 << 10, {9 * 4096, 5 * 4096}));
    ASSERT_EQ(map.shape().region_bytes, 10 * 4096u);
    TierStats s;
    map.describe(s);
    EXPECT_DOUBLE_EQ(s.fragmentation, 0.1);  // what token blocks cannot have
    EXPECT_EQ(s.room, s.free);
    for (Slot slot; map.acquire(0, slot);) {
    }
    map.describe(s);
    EXPECT_EQ(s.used, 25 * 9 * 4096u);
    EXPECT_EQ(s.free, 25 * 4096u);
    EXPECT_EQ(s.room, 0u);
    EXPECT_EQ(s.largest_free, 0u);
    EXPECT_EQ(s.fragmentation, 1);
}

TEST(SlotMap, AllOrNone) {
    SlotMap map(SlotMap::fit(8 * 8192, {4096, 8192}));
    const auto used = [&] {
        TierStats s;
        map.describe(s);
        return s.used;
    };
    const std::vector<uint8_t> some = {1, 0, 1}, none = {}, unknown = {0, 7}, absent = {1, 2}, many(100, 0);
    Result<std::vector<Slot>> slots = map.acquire_all(some, TierKind::kHost);
    ASSERT_TRUE(slots.ok());
    ASSERT_EQ(slots.value().size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(slots.value()[i].slot_class, some[i]);
        EXPECT_TRUE(map.taken(slots.value()[i]));
    }
    const uint64_t before = used();
    EXPECT_EQ(before, 2 * 8192u + 4096u);
    EXPECT_TRUE(map.acquire_all(none, TierKind::kHost).ok());
    for (const auto& [wanted, why] : {std::pair(&unknown, TA_E_INVALID), {&absent, TA_E_INVALID}, {&many, TA_E_TIER_FULL}}) {
        const Status s = map.acquire_all(*wanted, TierKind::kHost).status();
        EXPECT_EQ(s.code(), why);
        ASSERT_NE(s.detail(), nullptr);
        EXPECT_NE(std::string(s.detail()->message).find("the host tier has no "), std::string::npos) << s.detail()->message;
        EXPECT_EQ(used(), before);
    }
}

}  // namespace
}  // namespace ta
