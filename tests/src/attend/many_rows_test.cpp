// Queries that the decode kernel takes 16 rows at a time: each row of a chunk is told to see the keys that it sees in its
// sequence. What the kernel makes of a chunk is its own rule, so this needs no GPU.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "src/attend/cuda_attend.h"

namespace ta {
namespace {

struct Case {
    int group;
    bool causal;
    int window;
};

void check(const Case& c, const std::vector<cuda::SequenceArgs>& sequences) {
    const ManyRowsKey key{c.group, c.causal, c.window, false};
    const ManyRows rows(key, sequences);
    std::vector<uint8_t> bytes(rows.bytes + 1, 0xa5);
    rows.write(key, sequences, bytes.data());
    EXPECT_EQ(bytes.back(), 0xa5) << "written beyond the end";
    AttendWork work;
    work.args.causal = c.causal;
    set_schedule(rows, bytes.data(), work);
    ASSERT_EQ(work.args.first_position != nullptr, !c.causal);
    size_t chunk = 0;
    int64_t pages = 0;
    for (const cuda::SequenceArgs& s : sequences) {
        for (int32_t row = 0; row < s.n_query; ++chunk) {
            ASSERT_LT(chunk, size_t(rows.chunks));
            const cuda::SequenceArgs& part = work.args.sequences[chunk];
            ASSERT_EQ(work.args.pages_before[chunk], pages);
            const int32_t n_pages = (part.n_keys + kPageTokens - 1) / kPageTokens;
            pages += n_pages;
            ASSERT_GT(part.n_query, 0);
            ASSERT_LE(part.n_query * c.group, cuda::kDecodeRows);
            ASSERT_EQ(part.row, s.row + row);
            const int32_t skipped = part.first_entry - s.first_entry;
            ASSERT_GE(skipped, 0);
            ASSERT_LE(skipped + n_pages, (s.n_keys + kPageTokens - 1) / kPageTokens);
            const int32_t first = c.causal ? part.n_keys - part.n_query : work.args.first_position[chunk];
            for (int32_t i = 0; i < part.n_query; ++i, ++row) {
                const int32_t position = s.n_keys - s.n_query + row;
                const cuda::KeyRange want = cuda::visible_keys(c.causal, c.window, s.n_keys, position);
                const cuda::KeyRange got = cuda::visible_keys(c.causal, c.window, part.n_keys, first + i);
                const int32_t before = skipped * int32_t(kPageTokens);
                ASSERT_EQ(got.end - got.begin, want.end - want.begin) << "query " << row;
                if (want.begin == want.end) continue;
                ASSERT_EQ(before + got.begin, want.begin) << "query " << row;
                ASSERT_EQ(before + first + i, position) << "query " << row;  // distances
            }
        }
    }
    EXPECT_EQ(chunk, size_t(rows.chunks));
    EXPECT_EQ(work.args.pages_before[chunk], pages);
    EXPECT_EQ(rows.pages, pages);
}

TEST(ManyRows, SeeWhatTheirSequencesDo) {
    // Keys, queries, first row, first entry: more queries than keys too.
    const std::vector<cuda::SequenceArgs> sequences = {
        {900, 300, 0, 0}, {333, 333, 300, 15}, {64, 0, 633, 21}, {70, 17, 633, 22}, {40, 130, 650, 24}, {0, 20, 780, 25},
    };
    for (const int group : {1, 3, 4, 16}) {
        for (const bool causal : {false, true}) {
            for (const int window : {0, 1, 30, 64, 65, 200, 5000}) {
                SCOPED_TRACE("group " + std::to_string(group) + (causal ? ", causal" : ", full") + ", window " +
                             std::to_string(window));
                check({group, causal, window}, sequences);
                if (::testing::Test::HasFatalFailure()) return;
            }
        }
    }
}

}  // namespace
}  // namespace ta
