// Which tiles a call of prefill has and how they are split: whatever the shape, each row's pages are there once, in parts that
// the kernel can join. Needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "kernels/cuda/common/prefill/parts.h"
#include "kernels/cuda/common/prefill/schedule.h"
#include "support/numbers.h"

namespace ta::cuda {
namespace {

struct Lengths {
    int32_t n_keys, n_query;
};

std::vector<SequenceArgs> sequences_of(const std::vector<Lengths>& lengths) {
    std::vector<SequenceArgs> sequences;
    for (const Lengths& l : lengths) {
        SequenceArgs s{};
        s.n_keys = l.n_keys, s.n_query = l.n_query;
        if (!sequences.empty()) {
            const SequenceArgs& before = sequences.back();
            s.row = before.row + before.n_query;
            s.first_entry = before.first_entry + (before.n_keys + kPageTokens - 1) / kPageTokens;
        }
        sequences.push_back(s);
    }
    return sequences;
}

constexpr int kRows = 192;  // of a tile

struct Call {
    int group, kv_heads, ctas;
    bool causal;
    int window;
    int cut_every;
    int ranks = 1;
    int rows = kRows;
};

// Of the first keys of a sequence, those in the walk's blocks.
int32_t count_keys(const BlockWalk& walk, int32_t keys) {
    int32_t n = 0;
    for (int32_t block = walk.first; block * kPageTokens < keys; block += walk.stride)
        n += std::min(kPageTokens, keys - block * kPageTokens);
    return n;
}

// resident_keys: of resident tiles; 0: other ones.
void check(Call c, const std::vector<Lengths>& lengths, int resident_keys = 0) {
    const std::vector<SequenceArgs> sequences = sequences_of(lengths);
    std::vector<BlockWalk> walks;
    for (size_t n = 0; c.ranks > 1 && n < lengths.size(); ++n) walks.push_back({int32_t(n + 1) % c.ranks, c.ranks});
    const PrefillShape shape{c.group, c.causal, c.window, c.kv_heads, c.ctas, c.cut_every, c.rows};
    const PrefillPlan plan = resident_keys ? PrefillPlan::resident(sequences, shape, resident_keys, std::max(c.ctas, 1), walks)
                                           : PrefillPlan(sequences, shape, walks);
    if (resident_keys) {
        ASSERT_EQ(plan.rows() % 64, 0);
        ASSERT_LE(plan.rows(), kMostTileRows);
        ASSERT_EQ(plan.slots(), 0);
        c.rows = plan.rows();
    }
    ASSERT_LE(plan.slots(), prefill_slots(c.ctas));
    ASSERT_LE(size_t(plan.slots()) * size_t(c.rows / 16) * part_bytes(128), prefill_workspace_bytes(c.rows, 128, c.ctas));

    std::map<std::pair<int, int>, std::map<int, const PrefillTile*>> parts;  // of (sequence, first row)
    for (const PrefillTile& t : plan.tiles()) {
        ASSERT_TRUE((parts[{t.sequence, t.first_row}].emplace(t.part, &t).second)) << "twice";
    }
    std::set<int> slots;
    size_t tiles = 0;
    for (size_t n = 0; n < sequences.size(); ++n) {
        const SequenceArgs& s = sequences[n];
        const BlockWalk walk = walks.empty() ? BlockWalk{} : walks[n];
        const int64_t rows = int64_t(s.n_query) * c.group;
        for (int64_t row = 0; row < rows; row += c.rows, ++tiles) {
            const auto& of_tile = parts[{int(n), int(row)}];
            ASSERT_FALSE(of_tile.empty()) << "row " << row << " of sequence " << n << " is missing";
            const PrefillTile& first = *of_tile.begin()->second;
            ASSERT_EQ(first.parts, int(of_tile.size()));
            int32_t low = INT32_MAX, high = 0;  // what its rows see
            for (int64_t r = row; r < std::min(row + c.rows, rows); ++r) {
                const KeyRange seen = visible_keys(c.causal, c.window, s.n_keys, s.n_keys - s.n_query + int(r / c.group));
                low = std::min(low, count_keys(walk, seen.begin) / kPageTokens),
                high = std::max(high, (count_keys(walk, seen.end) + kPageTokens - 1) / kPageTokens);
            }
            int32_t page = first.page_begin;
            ASSERT_TRUE(page <= low || high <= low);
            for (const auto& [part, t] : of_tile) {
                ASSERT_EQ(t->parts, first.parts);
                ASSERT_EQ(t->first_slot, first.first_slot);
                ASSERT_EQ(t->n_keys, s.n_keys);
                ASSERT_EQ(t->n_query, s.n_query);
                ASSERT_EQ(t->row, s.row);
                ASSERT_EQ(t->first_entry, s.first_entry);
                ASSERT_EQ(t->own_keys, count_keys(walk, s.n_keys));
                ASSERT_EQ(t->walk.first, walk.first);
                ASSERT_EQ(t->walk.stride, walk.stride);
                ASSERT_EQ(t->page_begin, page);
                ASSERT_TRUE(t->page_end > page || t->parts == 1) << "an empty part";
                ASSERT_TRUE((t->page_end - first.page_begin) % c.cut_every == 0 || part == t->parts - 1)
                    << "cut at " << t->page_end;
                page = t->page_end;
            }
            ASSERT_TRUE(page >= high || high <= low);
            if (first.parts == 1) continue;
            for (int slot = 0; slot < first.parts * c.kv_heads; ++slot) {
                ASSERT_LT(first.first_slot + slot, plan.slots());
                ASSERT_TRUE(slots.insert(first.first_slot + slot).second) << "two tiles have the slot";
            }
        }
    }
    ASSERT_EQ(parts.size(), tiles);

    std::vector<uint8_t> bytes(plan.bytes() + 1, 0xa5);
    plan.write(bytes.data());
    EXPECT_EQ(bytes.back(), 0xa5) << "written beyond the end";
    PrefillSchedule header;
    std::memcpy(&header, bytes.data(), sizeof(header));
    EXPECT_EQ(header.tiles, int(plan.tiles().size()));
    EXPECT_EQ(header.rows, c.rows);
    const size_t counters = sizeof(header) + plan.tiles().size_bytes();
    EXPECT_EQ(std::count(bytes.begin() + ptrdiff_t(counters), bytes.end() - 1, 0), ptrdiff_t(plan.bytes() - counters));
}

TEST(PrefillSchedule, HasEachRowOnce) {
    ta::testing::Random random(7);
    for (int n = 0; n < 400; ++n) {
        const auto upto = [&](int64_t most) { return int(random.between(0, most)); };
        const Call c{1 + upto(7),
                     1 + upto(15),
                     random.chance(20) ? 0 : 1 + upto(160),
                     random.chance(70),
                     random.chance(20) ? 1 + upto(3000) : 0,
                     random.chance(30) ? 64 : 2,
                     random.chance(50) ? 1 : 2 + upto(6),
                     64 << upto(2)};
        std::vector<Lengths> lengths;
        for (int s = upto(5); s >= 0; --s) {
            const int keys = upto(random.chance(30) ? 40000 : 700);
            lengths.push_back({keys, random.chance(80) ? upto(keys) : upto(400)});
        }
        ASSERT_NO_FATAL_FAILURE(check(c, lengths)) << "case " << n;
    }
}

TEST(PrefillSchedule, ResidentTilesHaveEachRowOnce) {
    ta::testing::Random random(8);
    for (int n = 0; n < 200; ++n) {
        const auto upto = [&](int64_t most) { return int(random.between(0, most)); };
        const Call c{1 + upto(7), 1 + upto(15), 1 + upto(160), random.chance(70), 0, 2, random.chance(50) ? 1 : 2 + upto(6)};
        std::vector<Lengths> lengths;
        const int most_queries = random.chance(10) ? 20000 : 511;
        for (int s = upto(20); s >= 0; --s) lengths.push_back({upto(512), 1 + upto(most_queries)});
        ASSERT_NO_FATAL_FAILURE(check(c, lengths, 512)) << "case " << n;
    }
}

TEST(PrefillSchedule, ResidentTilesAreForShortSequences) {
    const auto rows = [](std::vector<Lengths> lengths) {
        const PrefillPlan plan = PrefillPlan::resident(sequences_of(lengths), {4, true, 0, 8, 0, 2, kRows}, 512, 132);
        return plan.tiles().empty() ? 0 : plan.rows();
    };
    EXPECT_EQ(rows(std::vector<Lengths>(64, {512, 512})), 2048) << "all rows of a sequence";
    EXPECT_EQ(rows(std::vector<Lengths>(200, {512, 20000})), kMostTileRows) << "not all rows";
    EXPECT_EQ(rows({{513, 513}, {64, 64}}), 0);
    EXPECT_EQ(rows({{513, 0}, {64, 64}}), 64) << "a sequence without queries, and CTAs enough";
    EXPECT_EQ(rows({{600, 0}}), 0);
    EXPECT_EQ(rows({}), 0);
}

TEST(PrefillSchedule, FewTilesAreSplitAndManyAreNot) {
    const auto plan = [](std::vector<Lengths> lengths, int ctas) {
        return PrefillPlan(sequences_of(lengths), {4, true, 0, 8, ctas, 2, kRows});
    };
    // 16 items of 512 pages on 132 CTAs.
    EXPECT_GT(plan({{32768, 64}}, 132).slots(), 100);
    EXPECT_EQ(plan({{32768, 64}}, 0).slots(), 0);
    EXPECT_EQ(plan({{16384, 16384}}, 132).slots(), 0);
    EXPECT_EQ(plan({{100, 100}}, 132).slots(), 0) << "too short for parts";
    EXPECT_TRUE(plan({{16384, 16384}}, 132).has_long_tiles());
    EXPECT_TRUE(plan({{32768, 2048}, {100, 50}}, 132).has_long_tiles());
    EXPECT_FALSE(plan({{4096, 4096}}, 132).has_long_tiles()) << "causal: 32 pages on the average";
    EXPECT_FALSE(plan({{16384, 64}, {1024, 1024}, {1024, 1024}}, 0).has_long_tiles()) << "most are short";
    EXPECT_FALSE(plan({}, 132).has_long_tiles());
}

// In a block table with other sequences' entries between.
TEST(PrefillSchedule, EntriesAreThoseThatTilesRead) {
    std::vector<SequenceArgs> sequences{{1000, 300, 0, 5}, {700, 0, 300, 40}, {640, 640, 300, 60}};
    const std::vector<BlockWalk> walks{{1, 2}, {0, 2}, {0, 2}};
    for (const int ctas : {0, 132}) {
        const PrefillPlan plan(sequences, {4, true, 0, 8, ctas, 2, kRows}, walks);
        EXPECT_EQ(plan.entries(), (std::vector<uint32_t>{6, 8, 10, 12, 14, 16, 18, 20, 60, 62, 64, 66, 68})) << ctas;
        int64_t pages = 0;
        for (const PrefillTile& t : plan.tiles()) pages += t.page_end - t.page_begin;
        EXPECT_EQ(plan.pages(), pages);
    }
    // Two queries of one sequence, which see different pages of it, and another.
    std::vector<SequenceArgs> queries{{300, 20, 0, 70}, {129, 20, 20, 70}, {400, 5, 40, 80}};
    EXPECT_EQ(PrefillPlan(queries, {4, true, 0, 8, 0, 2, kRows}).entries(),
              (std::vector<uint32_t>{70, 71, 72, 73, 74, 80, 81, 82, 83, 84, 85, 86}));
    const PrefillPlan windowed(sequences_of({{1000, 100}}), {4, true, 64, 8, 0, 2, kRows});
    EXPECT_EQ(windowed.entries(), (std::vector<uint32_t>{13, 14, 15})) << "the first query sees keys from 837 on";
    EXPECT_TRUE(PrefillPlan().entries().empty());
}

// A CTA takes the next item when it is done with one.
TEST(PrefillSchedule, CtasAreDoneAtTheSameTime) {
    const auto wait_of_last = [](std::vector<Lengths> lengths, int cut_every) {
        constexpr int kCtas = 132, kHeads = 8;
        const PrefillPlan plan(sequences_of(lengths), {4, true, 0, kHeads, kCtas, cut_every, kRows});
        std::vector<int64_t> done(kCtas, 0);
        int64_t pages = 0;
        for (const PrefillTile& t : plan.tiles()) {
            for (int head = 0; head < kHeads; ++head) *std::min_element(done.begin(), done.end()) += t.page_end - t.page_begin;
            pages += int64_t(kHeads) * (t.page_end - t.page_begin);
        }
        return double(*std::max_element(done.begin(), done.end())) * kCtas / double(pages);
    };
    EXPECT_LT(wait_of_last({{32768, 2048}}, 2), 1.03);
    EXPECT_LT(wait_of_last({{32768, 1024}}, 2), 1.05);
    EXPECT_LT(wait_of_last({{32768, 512}}, 2), 1.08);
    EXPECT_LT(wait_of_last(std::vector<Lengths>(8, {8192, 128}), 2), 1.12);
    EXPECT_LT(wait_of_last(std::vector<Lengths>(3, {16384, 1000}), 2), 1.05);  // five rounds
    EXPECT_LT(wait_of_last({{32768, 2048}}, 64), 1.08);
}

}  // namespace
}  // namespace ta::cuda
