// A persistent disk tier is opened again and finds its blocks, damage, other people's files.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <random>
#include <thread>

#include "kernels/format/slot.h"
#include "support/forbidden_call.h"
#include "tiering/disk/files.h"

namespace ta {
namespace {

using testing::DiskFiles;
using testing::is_ok;
using testing::kFirst;
using testing::kRecord;
using testing::kSlot;
using testing::make_identity;
using testing::read_block;
using testing::read_status;
using testing::write_block;

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
