// What a persistent disk tier finds when it is opened again: its blocks, damage, other people's files.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <random>

#include "tiering/disk_model.h"

namespace ta {
namespace {

using testing::Fault;
using testing::FaultyFiles;
using testing::Folder;
using testing::is_ok;
using testing::make_identity;
using testing::read_block;
using testing::read_status;
using testing::write_block;

constexpr size_t kSlot = 5000, kRecord = 3 * 4096, kFirst = 2 * 4096;

class DiskFiles : public ::testing::Test {
  protected:
    DiskTierOptions options() {
        DiskTierOptions o;
        o.persistent = true;
        o.path = path;
        o.budget = 200000;
        o.slot_bytes[1] = kSlot;
        o.fingerprint = 5;
        o.threads = 1;
        o.use_uring = use_uring;
        return o;
    }
    std::unique_ptr<DiskTier> open(const DiskTierOptions& o) {
        Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(system_files(), o);
        if (tier.ok()) return tier.take();
        why = std::move(tier).status();
        return nullptr;
    }
    std::unique_ptr<DiskTier> open() { return open(options()); }
    // A file with n blocks.
    void make(size_t n) {
        auto tier = open();
        ASSERT_TRUE(tier) << is_ok(why).message();
        const std::vector<uint8_t> wanted(n, 1);
        Result<std::vector<Slot>> slots = tier->acquire(wanted);
        ASSERT_TRUE(slots.ok());
        for (size_t i = 0; i < n; ++i) ASSERT_TRUE(write_block(*tier, slots.value()[i], make_identity(i, 100 + i)));
    }
    std::vector<uint8_t> bytes() const {
        std::ifstream in(path, std::ios::binary);
        return {std::istreambuf_iterator<char>(in), {}};
    }
    void store(const std::vector<uint8_t>& all) const {
        std::ofstream out(path, std::ios::binary | std::ios::in);
        out.write(reinterpret_cast<const char*>(all.data()), std::streamsize(all.size()));
    }
    void change(size_t at, const std::function<uint8_t(uint8_t)>& f) const {
        const int fd = ::open(path.c_str(), O_RDWR);
        uint8_t b = 0;
        ASSERT_EQ(pread(fd, &b, 1, off_t(at)), 1);
        b = f(b);
        ASSERT_EQ(pwrite(fd, &b, 1, off_t(at)), 1);
        close(fd);
    }
    void flip(size_t at, int bit) const {
        change(at, [bit](uint8_t b) { return uint8_t(b ^ 1 << bit); });
    }

    // In a file as small as these a region holds one record.
    static size_t record_at(Slot s) { return kFirst + s.index / SlotMap::kIndicesPerRegion * kRecord; }

    Folder folder;
    const std::string path = folder.file("tier");
    bool use_uring = false;
    Status why;
};

TEST_F(DiskFiles, BlocksAndTheirIdentitySurviveAReopen) {
    make(6);
    for (int round = 0; round < 3; ++round) {
        auto tier = open();
        ASSERT_TRUE(tier);
        ASSERT_EQ(tier->recovered().size(), 6u);
        EXPECT_EQ(tier->stats().slots_used[1], 6u);
        EXPECT_EQ(tier->refused_count(), 0u);
        for (const RecoveredBlock& b : tier->recovered()) {
            EXPECT_TRUE(b.identity == make_identity(b.identity.block_index, 100 + b.identity.block_index));
            EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
        }
    }
}

TEST_F(DiskFiles, ReleasedBlocksDoNotComeBack) {
    make(6);
    {
        auto tier = open();
        const std::vector<RecoveredBlock> blocks(tier->recovered().begin(), tier->recovered().end());
        for (const RecoveredBlock& b : blocks) {
            if (b.identity.block_index % 2) tier->release({&b.slot, 1});
        }
    }
    auto tier = open();
    ASSERT_EQ(tier->recovered().size(), 3u);
    for (const RecoveredBlock& b : tier->recovered()) EXPECT_EQ(b.identity.block_index % 2, 0u);
}

TEST_F(DiskFiles, EveryBitOfAHeaderCounts) {
    make(3);
    size_t served = 0;
    // Every bit of the header, then a bit of every 37th byte of the zeros behind it.
    std::vector<std::pair<size_t, int>> places;
    for (size_t i = 0; i < sizeof(RecordHeader); ++i) {
        for (int bit = 0; bit < 8; ++bit) places.emplace_back(i, bit);
    }
    for (size_t i = sizeof(RecordHeader); i < 4096; i += 37) places.emplace_back(i, int(i % 8));
    for (const auto& [at, bit] : places) {
        flip(kFirst + kRecord + at, bit);
        auto tier = open();
        ASSERT_TRUE(tier);
        ASSERT_EQ(tier->recovered().size(), 2u) << "byte " << at << " bit " << bit;
        ASSERT_EQ(tier->refused_count(), 1u) << "byte " << at << " bit " << bit;
        EXPECT_NE(tier->refused()[0].find(" at offset 20480 "), std::string::npos) << tier->refused()[0];
        for (const RecoveredBlock& b : tier->recovered()) served += b.identity.block_index == 1;
        tier.reset();
        flip(kFirst + kRecord + at, bit);
    }
    EXPECT_EQ(served, 0u);
    EXPECT_EQ(open()->recovered().size(), 3u);
}

TEST_F(DiskFiles, AHeaderThatChangesUnderTheTierIsNoticed) {
    make(2);
    auto tier = open();
    const RecoveredBlock b = tier->recovered()[1];
    ASSERT_EQ(b.identity.block_index, 1u);
    for (size_t at = 0; at < sizeof(RecordHeader); ++at) {
        flip(kFirst + kRecord + at, int(at % 8));
        ASSERT_EQ(read_status(*tier, b.slot, b.identity).code(), TA_E_CORRUPT) << "byte " << at;
        flip(kFirst + kRecord + at, int(at % 8));
    }
    EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
    // Another record of the same file in its place: whole, but not the one that was asked for.
    const std::vector<uint8_t> was = bytes();
    std::vector<uint8_t> moved = was;
    std::copy_n(was.begin() + kFirst, kRecord, moved.begin() + kFirst + kRecord);
    store(moved);
    EXPECT_EQ(read_status(*tier, b.slot, b.identity).code(), TA_E_CORRUPT);
    store(was);
    EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
}

TEST_F(DiskFiles, AnOlderStateOfARecordIsNoticed) {
    make(1);
    const std::vector<uint8_t> old = bytes();
    auto tier = open();
    const RecoveredBlock b = tier->recovered()[0];
    ASSERT_TRUE(write_block(*tier, b.slot, b.identity)) << "the same bytes again: only the generation differs";
    std::vector<uint8_t> now = bytes();
    std::copy_n(old.begin() + kFirst, kRecord, now.begin() + kFirst);
    store(now);
    EXPECT_EQ(read_status(*tier, b.slot, b.identity).code(), TA_E_CORRUPT);
}

TEST_F(DiskFiles, FlippedPayloadBitsAreDetected) {
    make(8);
    auto tier = open();
    std::mt19937_64 random(3);
    for (int i = 0; i < 3000; ++i) {
        const RecoveredBlock& b = tier->recovered()[random() % 8];
        const size_t at = record_at(b.slot) + 4096 + random() % kSlot;
        const int bit = int(random() % 8);
        flip(at, bit);
        ASSERT_EQ(read_status(*tier, b.slot, b.identity).code(), TA_E_CORRUPT) << "offset " << at;
        flip(at, bit);
    }
    for (const RecoveredBlock& b : tier->recovered()) EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
}

TEST_F(DiskFiles, OneSuperblockIsEnough) {
    make(2);
    for (int i = 0; i < 4; ++i) {
        // The newer one and the older one in turn; the tier writes the other one.
        for (size_t byte : {size_t(0), size_t(9), size_t(60), size_t(108), size_t(4000)}) {
            flip(size_t(i % 2) * 4096 + byte, 3);
            auto tier = open();
            ASSERT_TRUE(tier) << is_ok(why).message();
            EXPECT_EQ(tier->recovered().size(), 2u);
            tier.reset();
            ASSERT_TRUE(open());
        }
    }
}

TEST_F(DiskFiles, BlocksOutliveTheSuperblockOfTheirTime) {
    for (int session = 1; session < 6; ++session) {
        unlink(path.c_str());
        for (int i = 1; i < session; ++i) ASSERT_TRUE(open());
        make(3);  // the n-th open writes superblock n % 2
        if (session > 1) {
            flip(size_t(session % 2) * 4096 + 20, 1);
        }
        for (int again = 0; again < 3; ++again) {
            auto tier = open();
            ASSERT_TRUE(tier) << is_ok(why).message();
            ASSERT_EQ(tier->recovered().size(), 3u) << (tier->refused_count() ? tier->refused()[0] : "");
            for (const RecoveredBlock& b : tier->recovered()) EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
        }
    }
}

TEST_F(DiskFiles, EveryBitOfASuperblockCounts) {
    make(1);
    std::vector<uint8_t> whole = bytes();
    // Only one superblock is left.
    std::fill_n(whole.begin(), 4096, uint8_t(0));
    store(whole);
    for (size_t at = 0; at < sizeof(Superblock); ++at) {
        for (int bit = 0; bit < 8; ++bit) {
            flip(4096 + at, bit);
            ASSERT_FALSE(open()) << "byte " << at << " bit " << bit;
            ASSERT_EQ(why.code(), TA_E_CORRUPT);
            flip(4096 + at, bit);
        }
    }
    EXPECT_NE(std::string(why.detail()->message).find("superblock 1"), std::string::npos) << why.detail()->message;
    ASSERT_TRUE(open()) << is_ok(why).message();
}

TEST_F(DiskFiles, HostileShapesAreRefused) {
    make(1);
    const std::vector<uint8_t> whole = bytes();
    const auto with = [&](const std::function<void(Superblock&)>& edit) {
        std::vector<uint8_t> all = whole;
        Superblock s;
        std::memcpy(&s, all.data() + 4096, sizeof s);
        edit(s);
        seal_superblock(s, all.data() + 4096);
        std::fill_n(all.begin(), 4096, uint8_t(0));
        store(all);
        why = Status();
        EXPECT_FALSE(open());
        return why.code();
    };
    EXPECT_EQ(with([](Superblock& s) { s.regions = UINT64_MAX; }), TA_E_CORRUPT);
    EXPECT_EQ(with([](Superblock& s) { s.regions = uint64_t{1} << 30; }), TA_E_CORRUPT);
    EXPECT_EQ(with([](Superblock& s) { s.regions += 1; }), TA_E_CORRUPT);
    EXPECT_EQ(with([](Superblock& s) { s.region_bytes = 1; }), TA_E_CORRUPT);
    EXPECT_EQ(with([](Superblock& s) { s.region_bytes = UINT64_MAX; }), TA_E_CORRUPT);
    EXPECT_EQ(with([](Superblock& s) { s.region_bytes = 0; }), TA_E_CORRUPT);
    EXPECT_EQ(with([](Superblock& s) { s.version = 2; }), TA_E_CORRUPT);
    EXPECT_EQ(with([](Superblock& s) { s.fingerprint ^= 1; }), TA_E_INVALID);
    EXPECT_EQ(with([](Superblock& s) { s.slot_bytes[1] += 1; }), TA_E_INVALID);
    EXPECT_EQ(with([](Superblock& s) { s.slot_bytes[0] = 4096; }), TA_E_INVALID);
    EXPECT_EQ(with([](Superblock& s) { s.opens = UINT64_MAX; }), TA_E_LIMIT);
    store(whole);
    EXPECT_TRUE(open());
}

TEST_F(DiskFiles, HostileRecordsAreRefusedByName) {
    make(2);
    const std::vector<uint8_t> whole = bytes();
    const auto with = [&](const std::function<void(RecordHeader&)>& edit) -> std::string {
        std::vector<uint8_t> all = whole;
        RecordHeader h;
        std::memcpy(&h, all.data() + kFirst, sizeof h);
        edit(h);
        seal_header(h, all.data() + kFirst);
        store(all);
        auto tier = open();
        if (!tier) return "not opened";
        EXPECT_EQ(tier->recovered().size(), 1u);
        return tier->refused_count() == 1 ? tier->refused()[0] : "nothing refused";
    };
    const auto says = [&](const char* what, const std::function<void(RecordHeader&)>& edit) {
        const std::string text = with(edit);
        EXPECT_NE(text.find("record 0 "), std::string::npos) << text;
        EXPECT_NE(text.find(what), std::string::npos) << text;
    };
    says("another file", [](RecordHeader& h) { h.file.words[1] ^= 1; });
    says("another pool", [](RecordHeader& h) { h.fingerprint ^= 1; });
    says("another place", [](RecordHeader& h) { h.offset += kRecord; });
    says("another class", [](RecordHeader& h) { h.slot_class = 0; });
    says("another class", [](RecordHeader& h) { h.slot_bytes = UINT64_MAX; });
    says("tokens", [](RecordHeader& h) { h.tokens = 65; });
    says("version", [](RecordHeader& h) { h.version = 9; });
    says("generation", [](RecordHeader& h) { h.generation = UINT64_MAX; });
    // With a right header and a wrong hash of the payload the record is found, and refused when it is read.
    std::vector<uint8_t> all = whole;
    RecordHeader h;
    std::memcpy(&h, all.data() + kFirst, sizeof h);
    h.payload_hash ^= 1;
    seal_header(h, all.data() + kFirst);
    store(all);
    auto tier = open();
    ASSERT_EQ(tier->recovered().size(), 2u);
    EXPECT_EQ(read_status(*tier, tier->recovered()[0].slot, tier->recovered()[0].identity).code(), TA_E_CORRUPT);
}

TEST_F(DiskFiles, RandomGarbageNeverCrashes) {
    make(4);
    const std::vector<uint8_t> whole = bytes();
    std::mt19937_64 random(11);
    for (int round = 0; round < 150; ++round) {
        std::vector<uint8_t> all = whole;
        for (int i = 0; i < 1 + round % 20; ++i) {
            const size_t at = random() % all.size(), n = std::min<size_t>(all.size() - at, random() % 5000);
            for (size_t k = 0; k < n; ++k) all[at + k] = uint8_t(random() >> 56);
        }
        store(all);
        auto tier = open();
        if (!tier) continue;
        for (const RecoveredBlock& b : tier->recovered()) {
            const Status s = read_status(*tier, b.slot, b.identity);  // checks the bytes where that succeeds
            EXPECT_TRUE(s.ok() || s.code() == TA_E_CORRUPT);
        }
    }
}

TEST_F(DiskFiles, FilesThatAreNotOursAreLeftAlone) {
    // A symbolic link, a folder, a FIFO, a short file, a text file, one that others may read.
    ASSERT_EQ(symlink("/dev/null", path.c_str()), 0);
    EXPECT_FALSE(open());
    EXPECT_EQ(why.code(), TA_E_INVALID);
    unlink(path.c_str());
    ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
    EXPECT_FALSE(open());
    EXPECT_EQ(why.code(), TA_E_INVALID);
    unlink(path.c_str());
    ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
    EXPECT_FALSE(open());
    rmdir(path.c_str());
    const auto text = [&](const std::string& content) {
        std::ofstream(path) << content;
        chmod(path.c_str(), 0600);
        EXPECT_FALSE(open());
        EXPECT_EQ(why.code(), TA_E_CORRUPT);
        std::ifstream in(path);
        EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), content) << "it was changed";
    };
    text("");
    text("a letter");
    text(std::string(100000, 'x'));
    unlink(path.c_str());
    make(1);
    for (const mode_t mode : {0640u, 0604u, 0666u}) {
        chmod(path.c_str(), mode);
        EXPECT_FALSE(open());
        EXPECT_EQ(why.code(), TA_E_INVALID);
    }
    chmod(path.c_str(), 0600);
    DiskTierOptions o = options();
    o.fingerprint = 6;
    EXPECT_FALSE(open(o));
    EXPECT_EQ(why.code(), TA_E_INVALID);
    o = options();
    o.budget = 100000;
    EXPECT_FALSE(open(o));
    EXPECT_EQ(why.code(), TA_E_INVALID);
    ASSERT_EQ(truncate(path.c_str(), 50000), 0);
    EXPECT_FALSE(open());
    EXPECT_EQ(why.code(), TA_E_CORRUPT);
    o = options();
    o.path = folder.file("none/tier");
    EXPECT_FALSE(open(o));
    EXPECT_EQ(why.code(), TA_E_IO);
}

TEST_F(DiskFiles, OneOwnerAtATime) {
    auto tier = open();
    ASSERT_TRUE(tier);
    EXPECT_FALSE(open());
    EXPECT_EQ(why.code(), TA_E_BUSY);
    tier.reset();
    EXPECT_TRUE(open());
}

TEST_F(DiskFiles, AnUnfinishedFileIsTakenOver) {
    std::ofstream(path + ".new") << "what a killed process left";
    chmod((path + ".new").c_str(), 0600);
    make(2);
    EXPECT_EQ(folder.entries(), 1u);
    EXPECT_EQ(open()->recovered().size(), 2u);
    unlink(path.c_str());
    ASSERT_EQ(symlink("/dev/null", (path + ".new").c_str()), 0);
    EXPECT_FALSE(open()) << "a link is not followed";
}

}  // namespace
}  // namespace ta
