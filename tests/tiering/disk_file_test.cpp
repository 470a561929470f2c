// What a persistent disk tier finds when it is opened again: its blocks, damage, other people's files.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <thread>

#include "kernels/format/slot.h"
#include "support/forbidden_call.h"
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
    std::unique_ptr<DiskTier> open(const DiskTierOptions& o, std::shared_ptr<FileSystem> files = system_files()) {
        Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(std::move(files), o);
        if (tier.ok()) {
            if (keep) tier.value()->keep_file();
            return tier.take();
        }
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
    bool use_uring = false, keep = true;
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

TEST_F(DiskFiles, KeysOfABlockSurviveAReopen) {
    std::vector<BlockKey> keys(20);
    for (size_t i = 0; i < keys.size(); ++i) keys[i].fill(uint8_t(i + 1));
    {
        auto tier = open();
        ASSERT_TRUE(tier) << is_ok(why).message();
        const std::vector<Slot> slots = tier->acquire(std::vector<uint8_t>{1, 1, 1}).value();
        ASSERT_TRUE(write_block(*tier, slots[0], make_identity(0, 100)));
        ASSERT_TRUE(write_block(*tier, slots[1], make_identity(1, 101), {keys[0], keys[1]}));
        ASSERT_TRUE(write_block(*tier, slots[2], make_identity(2, 102), keys));
        for (uint64_t i = 0; i < 3; ++i) EXPECT_TRUE(read_block(*tier, slots[i], make_identity(i, 100 + i)));
    }
    auto tier = open();
    ASSERT_TRUE(tier) << is_ok(why).message();
    ASSERT_EQ(tier->recovered().size(), 3u);
    for (const RecoveredBlock& b : tier->recovered()) {
        const size_t most[] = {0, 2, kMostMoreKeys};
        const auto n = std::ptrdiff_t(most[b.identity.block_index]);
        EXPECT_EQ(b.more_keys, std::vector<BlockKey>(keys.begin(), keys.begin() + n)) << "block " << b.identity.block_index;
        EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
    }
}

// A header page as the first version of this library wrote it, byte for byte, and read it: it looks at no byte behind the
// header but for the hash of the page.
TEST_F(DiskFiles, RecordsWithOneKeyAreAsTheyEverWere) {
    make(1);
    const std::vector<uint8_t> all = bytes();
    RecordHeader h;
    std::memcpy(&h, all.data() + kFirst, sizeof h);
    EXPECT_EQ(h.version, 1u);
    EXPECT_EQ(h.more_keys, 0u);
    EXPECT_EQ(h.reserved2, 0u);
    EXPECT_EQ(offsetof(RecordHeader, more_keys), 120u);
    EXPECT_TRUE(is_blank(all.data() + kFirst + sizeof h, 4096 - sizeof h));
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

// The last page of a payload, where headers of another class may lie, has little in front and zeros behind as they have.
TEST_F(DiskFiles, WhatErasedRecordsLeaveIsNoDamagedHeader) {
    DiskTierOptions o = options();
    o.budget = 4 << 20;
    o.slot_bytes[0] = 2 * 4096 + 128;
    SlotTrailer trailer{};
    trailer.magic = kSlotMagic;
    trailer.fingerprint = o.fingerprint;
    for (const bool ends_with_trailer : {false, true}) {
        std::vector<Slot> slots;
        {
            auto tier = open(o);
            ASSERT_TRUE(tier) << is_ok(why).message();
            slots = tier->acquire(std::vector<uint8_t>(3, 0)).value();
            std::vector<std::vector<uint8_t>> bytes;
            for (size_t i = 0; i < slots.size(); ++i) {
                const BlockIdentity identity = make_identity(i, 100 + i);
                bytes.push_back(testing::make_bytes(identity, o.slot_bytes[0]));
                if (ends_with_trailer) std::memcpy(bytes.back().data() + size_t{2} * 4096, &trailer, sizeof trailer);
                const auto done = testing::run(*tier, {testing::write_request(slots[i], identity, bytes.back())}, &why);
                ASSERT_EQ(done.size(), 1u);
                ASSERT_TRUE(is_ok(done[0].status));
            }
        }
        {
            auto tier = open(o);
            ASSERT_EQ(tier->recovered().size(), 3u);
            EXPECT_EQ(tier->refused_count(), 0u);
            tier->release(slots);
        }
        auto tier = open(o);
        EXPECT_EQ(tier->recovered().size(), 0u);
        EXPECT_EQ(tier->refused_count(), 0u) << (tier->refused().empty() ? "" : tier->refused()[0]);
    }
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
        seal_header(h, {}, all.data() + kFirst);
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
    for (const uint64_t n : {uint64_t{kMostMoreKeys + 1}, UINT64_MAX})
        says("more keys", [n](RecordHeader& h) { h.more_keys = n; });
    says("version", [](RecordHeader& h) { h.version = 9; });
    says("generation", [](RecordHeader& h) { h.generation = UINT64_MAX; });
    // With a right header and a wrong hash of the payload the record is found, and refused when it is read.
    std::vector<uint8_t> all = whole;
    RecordHeader h;
    std::memcpy(&h, all.data() + kFirst, sizeof h);
    h.payload_hash ^= 1;
    seal_header(h, {}, all.data() + kFirst);
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

TEST_F(DiskFiles, WhatLiesBesideItIsLeftAlone) {
    // A whole tier, a file with two names, one that is no tier at all.
    const std::string beside = path + ".new", linked = folder.file("linked");
    DiskTierOptions o = options();
    o.path = beside;
    {
        auto tier = open(o);
        ASSERT_TRUE(tier) << is_ok(why).message();
        const Slot slot = tier->acquire(std::vector<uint8_t>{1}).value()[0];
        ASSERT_TRUE(write_block(*tier, slot, make_identity(7, 7)));
        ASSERT_TRUE(tier->flush().ok());
    }
    make(2);
    EXPECT_EQ(folder.entries(), 2u);
    {
        auto tier = open(o);
        ASSERT_TRUE(tier) << is_ok(why).message();
        ASSERT_EQ(tier->recovered().size(), 1u);
        EXPECT_TRUE(read_block(*tier, tier->recovered()[0].slot, make_identity(7, 7)));
    }
    for (const bool two_names : {false, true}) {
        unlink(path.c_str());
        unlink(beside.c_str());
        testing::write_file(beside, {'p', 'o', 'e', 'm'});
        chmod(beside.c_str(), 0600);
        if (two_names) {
            ASSERT_EQ(link(beside.c_str(), linked.c_str()), 0);
        }
        make(2);
        EXPECT_EQ(testing::read_file(beside), (std::vector<char>{'p', 'o', 'e', 'm'}));
        EXPECT_EQ(folder.entries(), two_names ? 3u : 2u);
    }
}

// On file systems without O_TMPFILE.
class NamedDiskFiles : public DiskFiles {
  protected:
    std::shared_ptr<FaultyFiles> make_files(Fault fault = Fault::kNone, uint64_t at = 0) {
        auto files = std::make_shared<FaultyFiles>(fault, at, true);
        files->has_nameless = false;
        return files;
    }
    // The name under which the file is made; empty when there is none.
    std::string unfinished() const {
        for (const auto& e : std::filesystem::directory_iterator(folder.path())) {
            if (e.path().filename().string().starts_with(".turboattention-")) return e.path().string();
        }
        return {};
    }
};

TEST_F(NamedDiskFiles, AnUnfinishedFileIsTakenOver) {
    size_t left = 0;
    std::set<std::string> names;
    for (uint64_t at = 0;; ++at) {
        SCOPED_TRACE("operation " + std::to_string(at));
        // All fails from there on, removal too: as if the process were killed.
        const auto broken = make_files(Fault::kEio, at);
        const bool made = open(options(), broken) != nullptr;
        EXPECT_TRUE(broken->wait_until_closed());
        EXPECT_LE(folder.entries(), 1u);
        if (const std::string name = unfinished(); !name.empty()) {
            ++left;
            names.insert(name);
        }
        {
            auto tier = open(options(), make_files());
            ASSERT_TRUE(tier) << is_ok(why).message();
            const Slot slot = tier->acquire(std::vector<uint8_t>{1}).value()[0];
            ASSERT_TRUE(write_block(*tier, slot, make_identity(0, 1)));
        }
        EXPECT_EQ(folder.entries(), 1u);
        EXPECT_EQ(open()->recovered().size(), 1u);
        unlink(path.c_str());
        if (made) break;
    }
    EXPECT_GE(left, 5u);
    EXPECT_EQ(names.size(), 1u) << "they would fill the disk";
}

TEST_F(NamedDiskFiles, WhatIsNoUnfinishedFileIsRefusedUntouched) {
    // As it is left when the superblock cannot be written.
    std::vector<char> ours;
    std::string name;
    for (uint64_t at = 0; ours.size() < 100000; ++at) {
        ASSERT_LT(at, 100u);
        (void)open(options(), make_files(Fault::kEio, at));
        name = unfinished();
        if (!name.empty()) ours = testing::read_file(name);
    }
    const auto refuses = [&](const char* what, std::vector<char> content, mode_t mode, bool linked) {
        SCOPED_TRACE(what);
        unlink(name.c_str());
        testing::write_file(name, content);
        chmod(name.c_str(), mode);
        const std::string second = folder.file("second");
        if (linked) {
            EXPECT_EQ(link(name.c_str(), second.c_str()), 0);
        }
        EXPECT_FALSE(open(options(), make_files()));
        EXPECT_EQ(why.code(), TA_E_INVALID);
        EXPECT_NE(std::string(why.detail()->message).find("in the way"), std::string::npos) << why.detail()->message;
        EXPECT_TRUE(testing::read_file(name) == content);
        EXPECT_FALSE(std::filesystem::exists(path));
        unlink(second.c_str());
    };
    refuses("a text", {'p', 'o', 'e', 'm'}, 0600, false);
    refuses("a long text", std::vector<char>(100000, 'x'), 0600, false);
    refuses("one that others may read", ours, 0644, false);
    refuses("one with two names", ours, 0600, true);
    std::vector<char> damaged = ours;
    damaged[50] ^= 1;
    refuses("a damaged mark", damaged, 0600, false);
    make(1);
    const std::vector<char> whole = testing::read_file(path);
    unlink(path.c_str());
    refuses("a whole tier", whole, 0600, false);
    unlink(name.c_str());
    ASSERT_EQ(symlink("/dev/null", name.c_str()), 0);
    EXPECT_FALSE(open(options(), make_files()));
    EXPECT_EQ(why.code(), TA_E_INVALID);
    unlink(name.c_str());
    // Without locks nobody knows whether its maker lives.
    testing::write_file(name, ours);
    chmod(name.c_str(), 0600);
    auto files = make_files();
    files->has_locks = false;
    EXPECT_FALSE(open(options(), files));
    EXPECT_EQ(why.code(), TA_E_INVALID);
    EXPECT_TRUE(testing::read_file(name) == ours);
    EXPECT_TRUE(open(options(), make_files()));
    EXPECT_EQ(folder.entries(), 1u);
}

TEST_F(NamedDiskFiles, TheFirstSessionsBlocksAreFound) {
    for (int session = 0; session < 4; ++session) {
        auto tier = open(options(), make_files());
        ASSERT_TRUE(tier) << is_ok(why).message();
        ASSERT_EQ(tier->recovered().size(), size_t(session));
        EXPECT_EQ(tier->refused_count(), 0u);
        const Slot slot = tier->acquire(std::vector<uint8_t>{1}).value()[0];
        ASSERT_TRUE(write_block(*tier, slot, make_identity(uint64_t(session), 1)));
    }
}

TEST_F(DiskFiles, AFileThatNobodyKeepsIsRemoved) {
    for (const bool nameless : {true, false}) {
        const auto files = std::make_shared<FaultyFiles>();
        files->has_nameless = nameless;
        keep = false;
        auto tier = open(options(), files);
        ASSERT_TRUE(tier) << is_ok(why).message();
        EXPECT_EQ(folder.entries(), 1u);
        tier.reset();
        EXPECT_EQ(folder.entries(), 0u);
        // What was there before stays, and so does what has taken its place.
        keep = true;
        make(2);
        keep = false;
        EXPECT_EQ(open(options(), files)->recovered().size(), 2u);
        EXPECT_EQ(open()->recovered().size(), 2u);
        unlink(path.c_str());
        tier = open(options(), files);
        unlink(path.c_str());
        testing::write_file(path, {'p', 'o', 'e', 'm'});
        tier.reset();
        EXPECT_EQ(testing::read_file(path), (std::vector<char>{'p', 'o', 'e', 'm'}));
        unlink(path.c_str());
    }
}

TEST_F(DiskFiles, WhoWaitsForAFileThatIsRemovedMakesOne) {
    keep = false;
    auto first = open();
    ASSERT_TRUE(first);
    keep = true;
    std::thread second([&] { make(3); });
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it waits for the lock by now
    first.reset();
    second.join();
    ASSERT_EQ(folder.entries(), 1u);
    EXPECT_EQ(open()->recovered().size(), 3u);
}

// One is held up at each of its operations while the other makes the file and keeps it.
TEST_F(DiskFiles, OfTwoMakersOneIsBusy) {
    for (const bool nameless : {true, false}) {
        size_t busy = 0;
        for (uint64_t at = 1; at < 30; at += 5) {
            SCOPED_TRACE(std::string(nameless ? "nameless" : "named") + ", operation " + std::to_string(at));
            const auto slow = std::make_shared<FaultyFiles>(Fault::kStall, at, false);
            slow->has_nameless = nameless;
            const auto fast = std::make_shared<FaultyFiles>();
            fast->has_nameless = nameless;
            std::unique_ptr<DiskTier> tiers[2];
            Status whys[2];
            const auto open_one = [&](int i, const std::shared_ptr<FaultyFiles>& files) {
                Result<std::unique_ptr<DiskTier>> r = DiskTier::open(files, options());
                if (r.ok()) {
                    tiers[i] = r.take();
                    tiers[i]->keep_file();
                } else {
                    whys[i] = std::move(r).status();
                }
            };
            std::atomic<bool> opened{false};
            std::thread thread([&] {
                open_one(0, slow);
                opened = true;
            });
            for (int i = 0; i < 1000 && slow->operations() <= at && !opened; ++i) usleep(200);
            open_one(1, fast);
            slow->heal();
            thread.join();
            ASSERT_NE(tiers[0] == nullptr, tiers[1] == nullptr) << is_ok(whys[0]).message() << is_ok(whys[1]).message();
            EXPECT_EQ(whys[tiers[0] ? 1 : 0].code(), TA_E_BUSY) << is_ok(whys[tiers[0] ? 1 : 0]).message();
            busy += tiers[1] != nullptr;
            tiers[0].reset();
            tiers[1].reset();
            EXPECT_EQ(folder.entries(), 1u);
            EXPECT_TRUE(open());
            unlink(path.c_str());
            if (slow->operations() <= at || HasFailure()) break;
        }
        EXPECT_GE(busy, 1u) << "the slow one was never overtaken";
    }
}

TEST_F(DiskFiles, AFileThatCannotBeLockedIsReported) {
    const auto files = std::make_shared<FaultyFiles>();
    files->has_locks = false;
    for (const bool nameless : {true, false}) {
        files->has_nameless = nameless;
        for (const char* when : {"made", "opened"}) {
            auto tier = open(options(), files);
            ASSERT_TRUE(tier) << is_ok(why).message();
            ASSERT_EQ(tier->degraded().size(), 1u) << when;
            EXPECT_NE(tier->degraded()[0].find("cannot be locked: ENOLCK"), std::string::npos) << tier->degraded()[0];
        }
        unlink(path.c_str());
    }
}

TEST_F(DiskFiles, WhatWasAppendedIsIgnored) {
    make(3);
    const auto bytes_made = off_t(std::filesystem::file_size(path));
    ASSERT_EQ(truncate(path.c_str(), bytes_made * 3 + 77), 0);
    auto tier = open();
    ASSERT_TRUE(tier) << is_ok(why).message();
    EXPECT_LE(tier->stats().taken, options().budget);
    ASSERT_EQ(tier->recovered().size(), 3u);
    for (const RecoveredBlock& b : tier->recovered()) EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
}

// A file of 8 KiB on disk must not take more memory than an honest one of its length.
TEST_F(DiskFiles, ShapesWithFewSlotsInManyRegionsAreRefused) {
    make(1);
    const std::vector<uint8_t> whole = bytes();
    DiskTierOptions o = options();
    o.budget = uint64_t{1} << 30;
    const auto opens = [&](uint64_t slots_per_region, uint64_t regions) {
        std::vector<uint8_t> all(whole.begin(), whole.begin() + kFirst);
        Superblock s;
        std::memcpy(&s, all.data() + 4096, sizeof s);
        s.region_bytes = slots_per_region * kRecord;
        s.regions = regions;
        seal_superblock(s, all.data() + 4096);
        store(all);
        EXPECT_EQ(truncate(path.c_str(), 0), 0);
        store(all);
        EXPECT_EQ(truncate(path.c_str(), off_t(kFirst + regions * s.region_bytes)), 0);
        why = Status();
        return open(o) != nullptr;
    };
    EXPECT_FALSE(opens(1, 80000));
    EXPECT_EQ(why.code(), TA_E_CORRUPT) << is_ok(why).message();
    EXPECT_FALSE(opens(63, 1000));
    EXPECT_EQ(why.code(), TA_E_CORRUPT) << is_ok(why).message();
    EXPECT_TRUE(opens(64, 1000)) << is_ok(why).message();
    EXPECT_TRUE(opens(1, 100)) << is_ok(why).message();
}

// The shape is what the superblock says, not what this library would make: here a region for every block of the largest size.
TEST_F(DiskFiles, FilesWithOtherRegionsAreServed) {
    DiskTierOptions o = options();
    o.slot_bytes[0] = 2 * 4096 + 1000;
    make(0);
    unlink(path.c_str());
    ASSERT_TRUE(open(o)) << is_ok(why).message();
    std::vector<uint8_t> all = bytes();
    Superblock s;
    std::memcpy(&s, all.data() + 4096, sizeof s);
    ASSERT_NE(s.region_bytes, record_bytes(o.slot_bytes[0])) << "both shapes are the same";
    s.region_bytes = record_bytes(o.slot_bytes[0]);
    s.regions = (o.budget - kFirst) / s.region_bytes;
    seal_superblock(s, all.data() + 4096);
    std::fill_n(all.begin(), 4096, uint8_t(0));
    all.resize(kFirst + s.regions * s.region_bytes);
    store(all);
    const std::vector<uint8_t> wanted = {1, 0, 1, 1, 0};
    {
        auto tier = open(o);
        ASSERT_TRUE(tier) << is_ok(why).message();
        EXPECT_EQ(tier->stats().taken, all.size());
        EXPECT_EQ(tier->stats().slots_free[1], s.regions);
        Result<std::vector<Slot>> slots = tier->acquire(wanted);
        ASSERT_TRUE(slots.ok());
        for (size_t i = 0; i < wanted.size(); ++i) ASSERT_TRUE(write_block(*tier, slots.value()[i], make_identity(i, 100 + i)));
    }
    auto tier = open(o);
    ASSERT_TRUE(tier) << is_ok(why).message();
    ASSERT_EQ(tier->recovered().size(), wanted.size());
    for (const RecoveredBlock& b : tier->recovered()) {
        EXPECT_EQ(b.slot.slot_class, wanted[size_t(b.identity.block_index)]);
        EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
    }
}

TEST_F(DiskFiles, NamesMayBeAsLongAsTheSystemAllows) {
    for (const bool nameless : {true, false}) {
        const auto files = std::make_shared<FaultyFiles>();
        files->has_nameless = nameless;
        DiskTierOptions o = options();
        o.path = folder.file(std::string(255, 'n').c_str());
        EXPECT_TRUE(open(o, files)) << is_ok(why).message();
        EXPECT_TRUE(open(o, files)) << is_ok(why).message();
        unlink(o.path.c_str());
        o.path = folder.path() + "/none/";
        EXPECT_FALSE(open(o, files));
        EXPECT_EQ(why.code(), TA_E_INVALID);
    }
    ASSERT_EQ(chdir(folder.path().c_str()), 0);
    DiskTierOptions o = options();
    o.path = "relative";
    EXPECT_TRUE(open(o)) << is_ok(why).message();
    EXPECT_TRUE(std::filesystem::exists(folder.file("relative")));
    ASSERT_EQ(chdir("/"), 0);
}

TEST_F(DiskFiles, IoUringThatMayBeMadeAndNotUsed) {
    use_uring = true;
    std::string reason;
    if (!make_uring(4, reason)) GTEST_SKIP() << reason;
    for (const bool persistent : {true, false}) {
        std::thread thread([&] {
            if (!testing::forbid_call(SYS_io_uring_enter, EPERM)) GTEST_SKIP() << "no seccomp";
            DiskTierOptions o = options();
            o.persistent = persistent;
            if (!persistent) o.path = folder.path();
            const auto start = std::chrono::steady_clock::now();
            auto tier = open(o);
            ASSERT_TRUE(tier) << is_ok(why).message();
            EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
            EXPECT_FALSE(tier->io_uring());
            ASSERT_EQ(tier->degraded().size(), 1u);
            EXPECT_NE(tier->degraded()[0].find("io_uring cannot read here: EPERM"), std::string::npos) << tier->degraded()[0];
            const Slot slot = tier->acquire(std::vector<uint8_t>{1}).value()[0];
            EXPECT_TRUE(write_block(*tier, slot, make_identity(1, 1)));
            EXPECT_TRUE(read_block(*tier, slot, make_identity(1, 1)));
        });
        thread.join();
    }
    EXPECT_EQ(open()->recovered().size(), 1u);
}

}  // namespace
}  // namespace ta
