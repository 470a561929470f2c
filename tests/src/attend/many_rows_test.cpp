// Queries that the decode kernel takes 16 rows at a time: each row of a chunk is told to see the keys that it sees in its
// sequence. The kernel's results for a chunk follow its own rules, so this needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "src/attend/cuda/attend.h"

namespace ta {
namespace {

struct Case {
    int group;
    bool causal;
    int window;
};

// The rows of `part`, a chunk of `s` whose first query token has this position in it, see what they see in the sequence.
void check_keys(const Case& c, const cuda::SequenceArgs& s, const cuda::SequenceArgs& part, int32_t first) {
    ASSERT_GT(part.n_query, 0);
    ASSERT_LE(part.n_query * c.group, cuda::kDecodeRows);
    const int32_t skipped = part.first_entry - s.first_entry;
    ASSERT_GE(skipped, 0);
    ASSERT_LE(skipped + (part.n_keys + kPageTokens - 1) / kPageTokens, (s.n_keys + kPageTokens - 1) / kPageTokens);
    // Whole pages: what is asked of all tokens of a page, rows of later chunks see or not.
    ASSERT_TRUE(part.n_keys % int32_t(kPageTokens) == 0 || part.n_keys + skipped * int32_t(kPageTokens) == s.n_keys);
    int32_t last_seen = 0;  // keys up to the last that a row sees
    for (int32_t i = 0; i < part.n_query; ++i) {
        const int32_t row = part.row - s.row + i, position = s.n_keys - s.n_query + row;
        const cuda::KeyRange want = cuda::visible_keys(c.causal, c.window, s.n_keys, position);
        const cuda::KeyRange got = cuda::visible_keys(c.causal, c.window, part.n_keys, first + i);
        const int32_t before = skipped * int32_t(kPageTokens);
        ASSERT_EQ(got.end - got.begin, want.end - want.begin) << "query " << row;
        if (want.begin == want.end) continue;
        last_seen = std::max(last_seen, got.end);
        ASSERT_EQ(before + got.begin, want.begin) << "query " << row;
        ASSERT_EQ(before + first + i, position) << "query " << row;  // distances
    }
    ASSERT_LE(part.n_keys - last_seen, int32_t(kPageTokens) - 1) << "pages that no row sees";
}

// The kernel's input for the sequences.
struct Written {
    Written(const Case& c, int observed, const std::vector<cuda::SequenceArgs>& sequences)
        : key{c.group, c.causal, c.window, nullptr, observed}, rows(key, sequences), bytes(rows.bytes + 1, 0xa5) {
        rows.write(key, sequences, bytes.data());
        EXPECT_EQ(bytes.back(), 0xa5) << "written beyond the end";
        work.args.causal = c.causal;
        set_schedule(rows, bytes.data(), work);
    }
    int32_t first_position(size_t chunk) const { return work.args.first_position[chunk]; }
    ManyRowsKey key;
    ManyRows rows;
    std::vector<uint8_t> bytes;
    AttendWork work;
};

// Of a prompt's last queries by the kernel for every GPU, whose tiles have 256 rows: 64 queries of 4 heads each.
size_t expanded(int32_t n_keys, int32_t n_query, ManyRowsKey::Expands expands, int most = 128) {
    ManyRowsKey key{4, true, 0, &cuda::kPrefillVariants[1]};
    key.kv_heads = 8, key.ctas = 132, key.expands = expands, key.most_expanded = most;
    const std::vector<cuda::SequenceArgs> sequences{{n_keys, n_query, 0, 3}};
    const ManyRows rows(key, sequences);
    std::vector<uint8_t> bytes(rows.bytes + 1, 0xa5);
    rows.write(key, sequences, bytes.data());
    EXPECT_EQ(bytes.back(), 0xa5) << "written beyond the end";
    EXPECT_LE(rows.bytes, rows.room);
    const size_t most_entries = expands == ManyRowsKey::Expands::kNever ? 0 : size_t(most);
    EXPECT_EQ(rows.room, rows.entries_at + most_entries * sizeof(uint32_t)) << "whatever is expanded";
    AttendWork work;
    set_schedule(rows, bytes.data(), work);
    for (size_t n = 0; n < rows.entries.size(); ++n) EXPECT_EQ(work.expand.entries[n], n + 3);
    return rows.entries.size();
}

TEST(ManyRows, PagesThatManyTilesReadAreExpanded) {
    using Expands = ManyRowsKey::Expands;
    EXPECT_EQ(expanded(8192, 512, Expands::kOften), 128u);
    EXPECT_EQ(expanded(8192, 128, Expands::kOften), 128u);
    EXPECT_EQ(expanded(8192, 64, Expands::kOften), 0u) << "one tile";
    EXPECT_EQ(expanded(8192, 64, Expands::kAlways), 128u);
    EXPECT_EQ(expanded(8192, 512, Expands::kNever), 0u);
    EXPECT_EQ(expanded(8193, 512, Expands::kAlways), 0u) << "more pages than there is memory for";
}

void check(const Case& c, const std::vector<cuda::SequenceArgs>& sequences) {
    const Written w(c, ManyRowsKey::kAll, sequences);
    size_t chunk = 0;
    int64_t pages = 0;
    for (const cuda::SequenceArgs& s : sequences) {
        for (int32_t row = 0; row < s.n_query; ++chunk) {
            ASSERT_LT(chunk, size_t(w.rows.chunks));
            const cuda::SequenceArgs& part = w.work.args.sequences[chunk];
            ASSERT_EQ(w.work.args.pages_before[chunk], pages);
            pages += (part.n_keys + kPageTokens - 1) / kPageTokens;
            ASSERT_EQ(part.row, s.row + row);
            check_keys(c, s, part, w.first_position(chunk));
            if (::testing::Test::HasFatalFailure()) return;
            row += part.n_query;
        }
    }
    EXPECT_EQ(chunk, size_t(w.rows.chunks));
    EXPECT_EQ(w.work.args.pages_before[chunk], pages);
    EXPECT_EQ(w.rows.pages, pages);
}

// The last kObservedTokens query tokens of each sequence, each once, and no two chunks of a sequence in one schedule.
void check_observed(const Case& c, const std::vector<cuda::SequenceArgs>& sequences) {
    const int chunks = count_observed_chunks(c.group, sequences), tokens = cuda::kDecodeRows / c.group;
    ASSERT_EQ(chunks, (kObservedTokens + tokens - 1) / tokens);
    std::vector<int> seen(size_t(sequences.back().row + sequences.back().n_query));  // by row: in how many chunks it is
    for (int n = 0; n < chunks; ++n) {
        const Written w(c, n, sequences);
        std::vector<bool> has(sequences.size());
        for (size_t chunk = 0; chunk < size_t(w.rows.chunks); ++chunk) {
            const cuda::SequenceArgs& part = w.work.args.sequences[chunk];
            size_t s = 0;
            while (part.row >= sequences[s].row + sequences[s].n_query) ++s;
            ASSERT_FALSE(has[s]) << "two chunks of sequence " << s;
            has[s] = true;
            check_keys(c, sequences[s], part, w.first_position(chunk));
            if (::testing::Test::HasFatalFailure()) return;
            for (int32_t i = 0; i < part.n_query; ++i) ++seen[size_t(part.row + i)];
        }
    }
    for (const cuda::SequenceArgs& s : sequences) {
        for (int32_t i = 0; i < s.n_query; ++i)
            ASSERT_EQ(seen[size_t(s.row + i)], i >= s.n_query - kObservedTokens ? 1 : 0) << "row " << s.row + i;
    }
}

TEST(ManyRows, SeeWhatTheirSequencesDo) {
    // Keys, queries, first row, first entry: more queries than keys too.
    const std::vector<cuda::SequenceArgs> sequences = {
        {900, 300, 0, 0},   {333, 333, 300, 15}, {64, 0, 633, 21}, {70, 17, 633, 22},
        {40, 130, 650, 24}, {640, 6, 780, 25},   {0, 20, 786, 35},
    };
    for (const int group : {1, 3, 4, 5, 8, 16}) {
        for (const bool causal : {false, true}) {
            for (const int window : {0, 1, 30, 64, 65, 200, 5000}) {
                SCOPED_TRACE("group " + std::to_string(group) + (causal ? ", causal" : ", full") + ", window " +
                             std::to_string(window));
                check({group, causal, window}, sequences);
                if (!::testing::Test::HasFatalFailure()) check_observed({group, causal, window}, sequences);
                if (::testing::Test::HasFatalFailure()) return;
            }
        }
    }
}

// The table of kernels for many rows: which GPUs and calls take which.
TEST(ManyRows, VariantRunsOnItsGpuAndMayRefuse) {
    constexpr int kHopperBytes = 227 * 1024, kSmallBytes = 99 * 1024;  // of shared memory
    const auto launch_of = [](int generation, int major, int shared_bytes, const cuda::AttendArgs& args) {
        const cuda::PrefillVariant* variant = cuda::choose_prefill(generation, major, shared_bytes, args);
        return variant ? variant->launch : nullptr;
    };
    const auto hopper = &cuda::prefill::sm90::launch, ampere = &cuda::prefill::sm80::launch;
    cuda::AttendArgs args{};
    args.head_dim = 128;
    args.p_levels = 255;
    EXPECT_EQ(launch_of(9, 9, kHopperBytes, args), hopper);
    EXPECT_EQ(launch_of(8, 9, kHopperBytes, args), ampere) << "a Hopper that runs code of sm_80";
    EXPECT_EQ(launch_of(9, 10, kHopperBytes, args), ampere) << "a newer GPU that runs code of generation 9";
    EXPECT_EQ(launch_of(8, 8, kSmallBytes, args), ampere);
    EXPECT_EQ(launch_of(8, 7, kSmallBytes - 1, args), nullptr) << "too little shared memory";
    args.p_levels = 127, args.p_running = true;
    EXPECT_EQ(launch_of(9, 9, kHopperBytes, args), hopper) << "its P is finer";
    args.may_lack_pages = true;
    EXPECT_EQ(launch_of(9, 9, kHopperBytes, args), nullptr);
    args.may_lack_pages = false, args.head_dim = 96;
    EXPECT_EQ(launch_of(9, 9, kHopperBytes, args), ampere);
    const cuda::HeadArgs heads{};
    args.heads = &heads;
    EXPECT_EQ(launch_of(9, 9, kHopperBytes, args), nullptr) << "channel pages of head_dim 96";
    args.head_dim = 256;
    EXPECT_EQ(launch_of(9, 9, kHopperBytes, args), ampere);
    EXPECT_EQ(launch_of(8, 8, kSmallBytes, args), nullptr) << "too little shared memory for head_dim 256";
    args.head_dim = 64;
    EXPECT_EQ(launch_of(9, 9, kHopperBytes, args), hopper);
    args.p_levels = 65535;
    EXPECT_EQ(launch_of(9, 9, kHopperBytes, args), nullptr);
}

TEST(ManyRows, KernelsOfDistrAttention) {
    const auto hopper = &cuda::distr::sm90::launch, ampere = &cuda::distr::sm80::launch;
    cuda::DistrArgs args{};
    const auto launch_of = [&](int generation, int major) { return cuda::choose_distr(generation, major, args).launch; };
    args.attend.head_dim = 128;
    EXPECT_EQ(launch_of(9, 9), hopper);
    EXPECT_EQ(launch_of(8, 9), ampere) << "a Hopper that runs code of sm_80";
    EXPECT_EQ(launch_of(9, 10), ampere) << "a newer GPU that runs code of generation 9";
    EXPECT_EQ(launch_of(8, 8), ampere);
    args.attend.softcap = 30.0f;
    EXPECT_EQ(launch_of(9, 9), ampere);
    args.attend.softcap = 0.0f, args.attend.exp = ExpMode::kSas;
    EXPECT_EQ(launch_of(9, 9), ampere);
    args.attend.exp = ExpMode::kExact, args.attend.head_dim = 32;
    EXPECT_EQ(launch_of(9, 9), ampere);
}

TEST(ManyRows, PromptsAreWhatDecodeDoesNotTake) {
    std::vector<cuda::SequenceArgs> sequences(4);
    const int32_t n_query[] = {0, 4, 5, 40};
    for (size_t n = 0; n < 4; ++n) sequences[n].n_query = n_query[n], sequences[n].row = int32_t(n);
    using Blocks = ManyRowsKey::Blocks;
    const Missing missing[] = {Missing::kNone, Missing::kBefore, Missing::kNone, Missing::kAmong};
    const auto left = [&](int group, Blocks blocks = Blocks::kAll) {
        std::vector<int32_t> queries;
        for (const cuda::SequenceArgs& s : prompts_of(sequences, group, ManyRowsKey::Only::kAll, blocks, missing)) {
            EXPECT_EQ(s.row, int32_t(queries.size()));
            queries.push_back(s.n_query);
        }
        return queries;
    };
    EXPECT_EQ(left(1), (std::vector<int32_t>{0, 0, 0, 40}));
    EXPECT_EQ(left(4), (std::vector<int32_t>{0, 0, 5, 40}));
    EXPECT_EQ(left(5), (std::vector<int32_t>{0, 4, 5, 40}));
    EXPECT_EQ(left(5, Blocks::kWhole), (std::vector<int32_t>{0, 0, 5, 0}));
    EXPECT_EQ(left(5, Blocks::kLacking), (std::vector<int32_t>{0, 4, 0, 40}));
    EXPECT_EQ(left(5, Blocks::kPacked), (std::vector<int32_t>{0, 4, 5, 0}));
    EXPECT_EQ(left(5, Blocks::kUnpacked), (std::vector<int32_t>{0, 0, 0, 40}));
}

}  // namespace
}  // namespace ta
