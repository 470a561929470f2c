// The choice of staged pages and their places: src/attend/staging.h.
#include "src/attend/staging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace ta {
namespace {

constexpr double kRate = 50e9;

TEST(Staging, ReadsOfAPage) {
    EXPECT_EQ(reads_of_page(0, 4, 192, 0), 0);
    EXPECT_EQ(reads_of_page(48, 4, 192, 0), 1);
    EXPECT_EQ(reads_of_page(49, 4, 192, 0), 2);
    EXPECT_EQ(reads_of_page(2048, 4, 192, 0), 43);
    EXPECT_EQ(reads_of_page(2048, 4, 16, 0), 512);
    // A window of 65 keys: 128 query tokens see some key of a page; they may begin anywhere within a tile of 48.
    EXPECT_EQ(reads_of_page(2048, 4, 192, 65), 4);
    EXPECT_EQ(reads_of_page(50, 4, 192, 65), 2);
    // No page is read more often than a count of the tiles that see it says.
    for (const int64_t window : {1, 63, 64, 100, 1000}) {
        const int64_t n_query = 700, first = 5000 - n_query, tokens = 48;
        for (int64_t page = 0; page < 5000 / 64; ++page) {
            int64_t reads = 0;
            for (int64_t tile = 0; tile < n_query; tile += tokens) {
                const int64_t low = first + tile - window + 1, high = first + std::min(tile + tokens, n_query) - 1;
                reads += low < (page + 1) * 64 && high >= page * 64;
            }
            EXPECT_LE(reads, reads_of_page(n_query, 4, 192, window)) << "window " << window << ", page " << page;
        }
    }
}

TEST(Staging, WhatIsReadOnceStaysInPlace) {
    const HostPages sequences[] = {{1, 100 << 20}, {0, 100 << 20}, {5, 0}};
    EXPECT_TRUE(choose_staged(sequences, StagingMode::kAuto, kRate).empty());
    EXPECT_TRUE(choose_staged(sequences, StagingMode::kNever, kRate).empty());
    EXPECT_EQ(choose_staged(sequences, StagingMode::kAlways, kRate), std::vector<uint32_t>{0});  // nobody reads the others
}

TEST(Staging, TheMostReadFirst) {
    const HostPages sequences[] = {{2, 10 << 20}, {1, 10 << 20}, {40, 1 << 20}, {7, 1 << 20}, {40, 2 << 20}};
    EXPECT_EQ(choose_staged(sequences, StagingMode::kAuto, kRate), (std::vector<uint32_t>{2, 4, 3, 0}));
    EXPECT_EQ(choose_staged(sequences, StagingMode::kAlways, kRate), (std::vector<uint32_t>{2, 4, 3, 0, 1}));
    EXPECT_TRUE(choose_staged(sequences, StagingMode::kNever, kRate).empty());
}

TEST(Staging, AFewPagesAreNotWorthTheStart) {
    const HostPages one[] = {{3, 70 << 10}};  // 1.4 us on the bus
    EXPECT_TRUE(choose_staged(one, StagingMode::kAuto, kRate).empty());
    EXPECT_EQ(choose_staged(one, StagingMode::kAuto, kRate / 10).size(), 1u);  // on a slow bus they are
    const HostPages many[] = {{3, 70 << 10}, {43, 70 << 10}};
    EXPECT_EQ(choose_staged(many, StagingMode::kAuto, kRate), (std::vector<uint32_t>{1, 0}));
}

// Places of a part do not overlap one another nor those of the other part, lie within slots, and begin where flags of a block
// table's entry have room.
void check(const StagingRing& ring, const std::vector<uint32_t>& bytes, size_t slots, size_t slot_bytes) {
    ASSERT_EQ(ring.places.size(), size_t(ring.parts) * ring.pages);
    std::vector<std::pair<size_t, size_t>> used;
    for (size_t i = 0; i < ring.places.size(); ++i) {
        const auto [slot, offset] = ring.places[i];
        const size_t n = bytes[i % ring.pages];
        ASSERT_LT(slot, slots);
        ASSERT_EQ(offset % 4096, 0u);
        ASSERT_LE(offset + n, slot_bytes);
        used.emplace_back(slot * slot_bytes + offset, n);
    }
    std::sort(used.begin(), used.end());
    for (size_t i = 1; i < used.size(); ++i) ASSERT_GE(used[i].first, used[i - 1].first + used[i - 1].second);
}

TEST(Staging, Ring) {
    std::vector<uint32_t> bytes(100, 70000);
    bytes[3] = bytes[50] = 140000;  // of another kind
    constexpr size_t kSlot = 300000;
    const size_t both = count_ring_slots(bytes, 2, kSlot), one = count_ring_slots(bytes, 1, kSlot);
    EXPECT_GT(both, one);
    for (const size_t slots : {both + 3, both, both - 1, one, one - 1, size_t{1}, size_t{0}}) {
        SCOPED_TRACE(std::to_string(slots) + " slots");
        const StagingRing ring = cut_ring(bytes, slots, kSlot);
        EXPECT_EQ(ring.parts, slots >= both ? 2 : 1);
        EXPECT_EQ(ring.pages == bytes.size(), slots >= one);
        EXPECT_EQ(ring.pages == 0, slots == 0);
        check(ring, bytes, slots, kSlot);
    }
    // A slot that holds exactly one page, though not a whole number of units.
    const std::vector<uint32_t> whole(5, 70000);
    EXPECT_EQ(count_ring_slots(whole, 2, 70000), 10u);
    check(cut_ring(whole, 7, 70000), whole, 7, 70000);
    EXPECT_EQ(cut_ring(whole, 7, 70000).pages, 5u);
    EXPECT_EQ(cut_ring(whole, 4, 70000).pages, 4u);
    // And one that holds exactly two.
    EXPECT_EQ(count_ring_slots(std::vector<uint32_t>(4, 65536), 1, 131072), 2u);
}

}  // namespace
}  // namespace ta
