// Sequences as bytes of the caller's: an export is the file that a save writes, and an import takes what a load takes.
#include <gtest/gtest.h>

#include <cstring>

#include "abi/tier_twins.h"
#include "support/exported.h"
#include "support/files.h"

namespace ta::testing {
namespace {

class Export : public ::testing::Test {
  protected:
    ta_status import(const std::vector<char>& bytes, ta_seq* out, ta_error* why = nullptr) {
        return ta_seq_import(twins.pool.get(), bytes.data(), bytes.size(), out, why);
    }

    Twins twins{{.host_bytes = 4 << 20, .disk_bytes = 16 << 20}};
    ta_error err;
};

TEST_F(Export, IsTheFileOfASave) {
    const Folder folder;
    for (const int32_t tokens : {0, 1, 64, 150}) {
        const size_t s = twins.add();
        if (tokens > 0) twins.step({s}, {tokens});
        if (tokens == 150) move_now(twins.pool, twins.seqs[s], 0, 1, TA_TIER_DISK);
        const std::string path = folder.file(std::to_string(tokens).c_str());
        require(ta_seq_save(twins.pool.get(), twins.seqs[s], path.c_str(), nullptr, &err), err);
        Exported to;
        const ta_sink sink = to.sink();
        uint64_t n = 0;
        require(ta_seq_export(twins.pool.get(), twins.seqs[s], &sink, &n, &err), err);
        EXPECT_EQ(n, to.bytes.size());
        EXPECT_EQ(to.released, 1);
        EXPECT_TRUE(to.bytes == read_file(path)) << tokens << " tokens";
        ta_seq imported = 0;
        require(import(to.bytes, &imported, &err), err);
        EXPECT_EQ(length(twins.pool, imported), tokens);
        verify(twins.pool, imported);
        if (tokens > 0) {
            EXPECT_TRUE(dequantize(twins.pool, imported, 1, 0, tokens, kRow) ==
                        dequantize(twins.plain_pool, twins.plain_seqs[s], 1, 0, tokens, kRow));
        }
    }
}

TEST_F(Export, EveryFlippedBitAndCutIsFound) {
    const size_t s = twins.add();
    twins.step({s}, {70});
    Exported to;
    const ta_sink sink = to.sink();
    require(ta_seq_export(twins.pool.get(), twins.seqs[s], &sink, nullptr, &err), err);
    const uint64_t before = stats(twins.pool).bytes_used;
    Random random(4);
    for (int i = 0; i < 300; ++i) {
        std::vector<char> bad = to.bytes;
        if (i % 3 == 0) {
            bad.resize(size_t(random.below(int64_t(bad.size()))));
        } else {
            bad[size_t(i < 150 ? random.below(200) : random.below(int64_t(bad.size())))] ^= char(1 << random.below(8));
        }
        ta_seq none = 7;
        EXPECT_NE(import(bad, &none), TA_OK) << i;
        EXPECT_EQ(none, 7u);
    }
    EXPECT_EQ(stats(twins.pool).bytes_used, before);
}

TEST_F(Export, ASinkMayStopAndArgumentsAreChecked) {
    const size_t s = twins.add();
    twins.step({s}, {150});
    for (int most = 0; most < 6; ++most) {
        Exported to;
        to.most = most;
        const ta_sink sink = to.sink();
        uint64_t n = 7;
        EXPECT_EQ(ta_seq_export(twins.pool.get(), twins.seqs[s], &sink, &n, nullptr), TA_E_CANCELLED) << most;
        EXPECT_EQ(n, 7u);
        EXPECT_EQ(to.released, 1);
    }
    Exported to;
    ta_sink sink = to.sink();
    EXPECT_EQ(ta_seq_export(twins.pool.get(), twins.seqs[s], nullptr, nullptr, nullptr), TA_E_INVALID);
    EXPECT_EQ(ta_seq_export(nullptr, twins.seqs[s], &sink, nullptr, nullptr), TA_E_INVALID);
    EXPECT_EQ(ta_seq_export(twins.pool.get(), 12345, &sink, nullptr, nullptr), TA_E_STALE);
    sink.write = nullptr;
    EXPECT_EQ(ta_seq_export(twins.pool.get(), twins.seqs[s], &sink, nullptr, nullptr), TA_E_INVALID);
    EXPECT_EQ(to.released, 3);  // whatever becomes of the call
    sink.struct_size = 3;
    EXPECT_EQ(ta_seq_export(twins.pool.get(), twins.seqs[s], &sink, nullptr, nullptr), TA_E_STRUCT);
    EXPECT_EQ(to.released, 3);
    ta_seq none = 0;
    EXPECT_EQ(ta_seq_import(twins.pool.get(), nullptr, 10, &none, nullptr), TA_E_INVALID);
    EXPECT_EQ(ta_seq_import(twins.pool.get(), "", 0, &none, nullptr), TA_E_CORRUPT);
    EXPECT_EQ(ta_seq_import(twins.pool.get(), "x", 1, nullptr, nullptr), TA_E_INVALID);
}

}  // namespace
}  // namespace ta::testing
