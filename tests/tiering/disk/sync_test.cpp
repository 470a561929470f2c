// Records after a power failure: when records go, what becomes of those that a sync failed for, and records in wrong places.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "tiering/disk/files.h"
#include "tiering/gated_files.h"

namespace ta {
namespace {

using namespace std::chrono_literals;
using testing::DiskFiles;
using testing::Fault;
using testing::FaultyFiles;
using testing::GatedFiles;
using testing::is_ok;
using testing::kFirst;
using testing::kRecord;
using testing::make_identity;
using testing::read_block;
using testing::read_status;
using testing::write_block;

class DiskSync : public DiskFiles {
  protected:
    static Slot take(DiskTier& tier) { return tier.acquire(std::vector<uint8_t>{1}).value()[0]; }
    // Another content of the block whose key the identity has.
    static BlockIdentity again(BlockIdentity identity, uint64_t content) {
        identity.content_id = content;
        return identity;
    }
    std::unique_ptr<DiskTier> open_with_threads(unsigned n, std::shared_ptr<FileSystem> files) {
        DiskTierOptions o = options();
        o.threads = n;
        return open(o, std::move(files));
    }
    bool has_header(Slot slot) const {
        const std::vector<uint8_t> all = bytes();
        return !is_blank(all.data() + record_at(slot), kDiskPage);
    }
    std::vector<uint8_t> record(const std::vector<uint8_t>& all, Slot slot) const {
        const auto at = all.begin() + ptrdiff_t(record_at(slot));
        return {at, at + ptrdiff_t(kRecord)};
    }
    void put(Slot slot, const std::vector<uint8_t>& record) const {
        std::vector<uint8_t> all = bytes();
        std::copy(record.begin(), record.end(), all.begin() + ptrdiff_t(record_at(slot)));
        store(all);
    }
};

TEST_F(DiskSync, AReplacedRecordStaysUntilASync) {
    auto tier = open();
    ASSERT_TRUE(tier) << is_ok(why).message();
    const BlockIdentity first = make_identity(1, 1), second = again(first, 2);
    const Slot a = take(*tier), b = take(*tier), c = take(*tier);
    ASSERT_TRUE(write_block(*tier, a, first));
    ASSERT_TRUE(is_ok(tier->flush()));
    const uint64_t used = tier->stats().used;
    ASSERT_TRUE(write_block(*tier, b, second));
    tier->retire({&a, 1});
    EXPECT_EQ(tier->stats().retired, 1u);
    EXPECT_LT(tier->stats().used, used) << "it counts as free";
    EXPECT_EQ(read_status(*tier, a, first).code(), TA_E_STATE);
    usleep(20000);
    EXPECT_TRUE(has_header(a)) << "what takes its place is not on the medium";
    // Writes that no sync has covered were promised to nobody.
    ASSERT_TRUE(write_block(*tier, c, again(first, 3)));
    tier->retire({&b, 1});
    ASSERT_TRUE(tier->wait_for_erased(5s));
    EXPECT_FALSE(has_header(b));
    EXPECT_TRUE(has_header(a));
    EXPECT_TRUE(tier->reclaim(5s));
    EXPECT_FALSE(has_header(a));
    EXPECT_EQ(tier->stats().retired, 0u);
    EXPECT_FALSE(tier->reclaim(5s)) << "there is nothing left";
    tier.reset();
    tier = open();
    ASSERT_EQ(tier->recovered().size(), 1u);
    EXPECT_EQ(tier->recovered()[0].identity.content_id, 3u);
}

TEST_F(DiskSync, ASlotThatIsBeingErasedIsWaitedFor) {
    const auto files = std::make_shared<GatedFiles>();
    auto tier = open(options(), files);
    ASSERT_TRUE(tier) << is_ok(why).message();
    std::vector<Slot> slots;
    const auto takes_another = [&] {
        Result<std::vector<Slot>> slot = tier->acquire(std::vector<uint8_t>{1});
        if (slot.ok()) slots.push_back(slot.value()[0]);
        return slot.ok();
    };
    while (takes_another()) continue;
    for (const bool in_time : {false, true}) {
        GatedFiles::Gate erasure;
        const Slot slot = slots.back();
        slots.pop_back();
        ASSERT_TRUE(write_block(*tier, slot, make_identity(1, 1)));
        files->write = &erasure;
        tier->release({&slot, 1});
        erasure.reached.acquire();
        EXPECT_FALSE(takes_another());
        erasure.opens.release();
        if (in_time) {
            EXPECT_TRUE(tier->wait_for_erased(5s));
        }
        EXPECT_TRUE(tier->reclaim(5s));
        EXPECT_TRUE(takes_another());
        EXPECT_FALSE(takes_another());
        EXPECT_FALSE(tier->reclaim(5s)) << "there is nothing left";
    }
}

TEST_F(DiskSync, WhatASyncFailedForIsWrittenAgain) {
    for (const bool uring : {true, false}) {
        use_uring = uring;
        unlink(path.c_str());
        const auto files = std::make_shared<FaultyFiles>();
        auto tier = open(options(), files);
        ASSERT_TRUE(tier) << is_ok(why).message();
        std::vector<Slot> slots;
        for (uint64_t i = 0; i < 4; ++i) {
            slots.push_back(take(*tier));
            ASSERT_TRUE(write_block(*tier, slots[i], make_identity(i, i + 1)));
            if (i == 0) {
                ASSERT_TRUE(is_ok(tier->flush()));
            }
        }
        files->break_now(Fault::kEio, false);
        EXPECT_EQ(tier->flush().code(), TA_E_IO);
        EXPECT_EQ(tier->health().state, TierState::kOk);
        EXPECT_NE(std::string(tier->health().reason).find("EIO"), std::string::npos) << tier->health().reason;
        EXPECT_NE(std::string(tier->health().reason).find("writes 3 records again"), std::string::npos);
        const uint64_t before = files->operations();
        EXPECT_TRUE(is_ok(tier->flush()));
        EXPECT_EQ(files->operations() - before, 3u * 2 + 1) << "each is read and written, then comes the sync";
        EXPECT_STREQ(tier->health().reason, "");
        for (uint64_t i = 0; i < 4; ++i) EXPECT_TRUE(read_block(*tier, slots[i], make_identity(i, i + 1)));
    }
}

// A header that was erased may be back, in front of other bytes, and nothing that was written again tells.
TEST_F(DiskSync, AfterASessionInWhichASyncFailedRecordsAreRead) {
    for (const bool fails : {false, true}) {
        unlink(path.c_str());
        const auto files = std::make_shared<FaultyFiles>();
        auto tier = open(options(), files);
        ASSERT_TRUE(tier) << is_ok(why).message();
        const Slot a = take(*tier), b = take(*tier);
        ASSERT_TRUE(write_block(*tier, a, make_identity(0, 1)));
        ASSERT_TRUE(write_block(*tier, b, make_identity(1, 2)));
        ASSERT_TRUE(is_ok(tier->flush()));
        std::vector<uint8_t> erased = record(bytes(), a);
        erased[kDiskPage + 77] ^= 1;
        tier->release({&a, 1});
        ASSERT_TRUE(tier->wait_for_erased(5s));
        if (fails) {
            files->break_now(Fault::kEio, false);
            EXPECT_EQ(tier->flush().code(), TA_E_IO);
        }
        EXPECT_TRUE(is_ok(tier->flush()));
        tier.reset();
        put(a, erased);
        tier = open();
        ASSERT_TRUE(tier) << is_ok(why).message();
        EXPECT_EQ(tier->refused_count(), fails ? 1u : 0u) << "a clean session's records are not read";
        EXPECT_EQ(has_header(a), !fails) << "a later session would take it for whole";
    }
}

// The kernel may have dropped of it what was written before the sync failed.
TEST_F(DiskSync, AWriteThatEndsDuringASyncThatFailsIsWrittenAgain) {
    const auto files = std::make_shared<GatedFiles>();
    auto tier = open_with_threads(2, files);
    ASSERT_TRUE(tier) << is_ok(why).message();
    const Slot a = take(*tier), b = take(*tier);
    ASSERT_TRUE(write_block(*tier, a, make_identity(0, 1)));
    GatedFiles::Gate sync;
    sync.result = -EIO;
    files->sync = &sync;
    std::thread flush([&] { EXPECT_EQ(tier->flush().code(), TA_E_IO); });
    sync.reached.acquire();
    EXPECT_TRUE(write_block(*tier, b, make_identity(1, 2)));
    sync.opens.release();
    flush.join();
    EXPECT_NE(std::string(tier->health().reason).find("writes 2 records again"), std::string::npos) << tier->health().reason;
    EXPECT_TRUE(is_ok(tier->flush()));
}

// It may be the only one that a power failure leaves.
TEST_F(DiskSync, ARetiredRecordStaysWhileWhatReplacesItIsDoubtful) {
    const auto files = std::make_shared<GatedFiles>();
    auto tier = open_with_threads(2, files);
    ASSERT_TRUE(tier) << is_ok(why).message();
    const BlockIdentity first = make_identity(1, 1);
    const Slot a = take(*tier), b = take(*tier), c = take(*tier);
    ASSERT_TRUE(write_block(*tier, a, first));
    ASSERT_TRUE(is_ok(tier->flush()));
    ASSERT_TRUE(write_block(*tier, c, make_identity(2, 3)));
    // A sync fails while the replacement is being written,
    GatedFiles::Gate write, read;
    files->write = &write;
    std::thread replaces([&] { EXPECT_TRUE(write_block(*tier, b, again(first, 2))); });
    write.reached.acquire();
    files->break_now(Fault::kEio, false);
    EXPECT_EQ(tier->flush().code(), TA_E_IO);
    // and its write ends when the next flush has looked at what it has to write again.
    files->read = &read;
    std::thread flush([&] { (void)tier->flush(); });
    read.reached.acquire();
    write.opens.release();
    replaces.join();
    tier->retire({&a, 1});
    read.opens.release();
    flush.join();
    ASSERT_TRUE(tier->wait_for_erased(5s));
    EXPECT_TRUE(has_header(a));
    EXPECT_TRUE(is_ok(tier->flush()));
    ASSERT_TRUE(tier->wait_for_erased(5s));
    EXPECT_FALSE(has_header(a));
}

TEST_F(DiskSync, AFlushErasesWhatCouldNotBeErasedWhereNothingElseIsToSync) {
    const auto files = std::make_shared<FaultyFiles>();
    auto tier = open(options(), files);
    ASSERT_TRUE(tier) << is_ok(why).message();
    const Slot a = take(*tier);
    ASSERT_TRUE(write_block(*tier, a, make_identity(0, 1)));
    ASSERT_TRUE(is_ok(tier->flush()));
    files->break_now(Fault::kEio, false);
    tier->release({&a, 1});
    ASSERT_TRUE(tier->wait_for_erased(5s));
    EXPECT_TRUE(has_header(a)) << "the fault did not come";
    EXPECT_TRUE(is_ok(tier->flush()));
    ASSERT_TRUE(tier->wait_for_erased(5s));
    EXPECT_FALSE(has_header(a));
    EXPECT_EQ(tier->stats().used, 0u);
}

TEST_F(DiskSync, ARecordThatIsLostIsNotAcknowledged) {
    const auto files = std::make_shared<FaultyFiles>();
    auto tier = open(options(), files);
    ASSERT_TRUE(tier) << is_ok(why).message();
    const Slot a = take(*tier), b = take(*tier);
    ASSERT_TRUE(write_block(*tier, a, make_identity(0, 1)));
    ASSERT_TRUE(write_block(*tier, b, make_identity(1, 2)));
    files->break_now(Fault::kEio, false);
    EXPECT_EQ(tier->flush().code(), TA_E_IO);
    flip(record_at(b) + kDiskPage + 17, 3);  // the write has not reached the medium
    for (int i = 0; i < 2; ++i) {
        const Status s = tier->flush();
        EXPECT_EQ(s.code(), TA_E_IO);
        EXPECT_NE(std::string(s.detail()->message).find("lost 1 records"), std::string::npos) << s.detail()->message;
        EXPECT_NE(std::string(tier->health().reason).find("1 records are lost"), std::string::npos);
    }
    EXPECT_TRUE(tier->holds(a));
    EXPECT_FALSE(tier->holds(b));
    EXPECT_EQ(read_status(*tier, b, make_identity(1, 2)).code(), TA_E_CORRUPT);
    tier->release({&b, 1});
    EXPECT_TRUE(is_ok(tier->flush()));
    EXPECT_STREQ(tier->health().reason, "");
}

TEST_F(DiskSync, ATornRecordDisplacesNothing) {
    std::vector<Slot> slots;
    const BlockIdentity old = make_identity(1, 1);
    {
        auto tier = open();
        ASSERT_TRUE(tier) << is_ok(why).message();
        for (uint64_t content = 1; content <= 3; ++content) {
            slots.push_back(take(*tier));
            ASSERT_TRUE(write_block(*tier, slots.back(), again(old, content)));
        }
    }
    const auto contents = [&] {
        std::vector<uint64_t> found;
        auto tier = open();
        for (const RecoveredBlock& b : tier->recovered()) {
            found.push_back(b.identity.content_id);
            EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
        }
        return found;
    };
    EXPECT_EQ(contents(), (std::vector<uint64_t>{1, 2, 3})) << "who opens the tier takes the latest";
    flip(record_at(slots[2]) + kDiskPage + 4999, 1);
    EXPECT_EQ(contents(), (std::vector<uint64_t>{1, 2}));
    EXPECT_FALSE(has_header(slots[2])) << "it would be in the way again";
    flip(record_at(slots[1]) + kDiskPage, 1);
    EXPECT_EQ(contents(), (std::vector<uint64_t>{1}));
}

// Records that were erased since the last sync may be back, in front of those that were written in their place.
TEST_F(DiskSync, AfterAPowerFailureRecordsOfEveryAgeAreRead) {
    make(2);
    auto tier = open();
    ASSERT_TRUE(tier) << is_ok(why).message();
    const std::vector<RecoveredBlock> blocks(tier->recovered().begin(), tier->recovered().end());
    ASSERT_EQ(blocks.size(), 2u);
    std::vector<uint8_t> all = bytes();  // of a session that does not end
    tier.reset();
    for (const size_t at : {size_t{0}, kDiskPage}) {
        Superblock s{};
        if (check_superblock(all.data() + at, s)) continue;
        ++s.boot;
        seal_superblock(s, all.data() + at);
    }
    all[record_at(blocks[0].slot) + kDiskPage + 77] ^= 1;
    store(all);
    tier = open();
    ASSERT_TRUE(tier) << is_ok(why).message();
    EXPECT_EQ(tier->refused_count(), 1u);
    ASSERT_EQ(tier->recovered().size(), 1u);
    EXPECT_EQ(tier->recovered()[0].identity, blocks[1].identity);
    EXPECT_FALSE(has_header(blocks[0].slot)) << "the next one would take it for whole";
}

// Whole records, right in themselves.
TEST_F(DiskSync, SplicedRecordsAreRefused) {
    make(3);
    const std::vector<uint8_t> mine = bytes();
    std::vector<RecoveredBlock> blocks;
    if (auto tier = open()) blocks.assign(tier->recovered().begin(), tier->recovered().end());
    ASSERT_EQ(blocks.size(), 3u);
    const auto refused = [&](const char* what, size_t found) {
        auto tier = open();
        EXPECT_EQ(tier->recovered().size(), found);
        EXPECT_GE(tier->refused_count(), 1u);
        for (const std::string& why_not : tier->refused()) EXPECT_NE(why_not.find(what), std::string::npos) << why_not;
        for (const RecoveredBlock& b : tier->recovered()) EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
    };
    // Two change places.
    put(blocks[0].slot, record(mine, blocks[1].slot));
    put(blocks[1].slot, record(mine, blocks[0].slot));
    refused("another place", 1);
    // One comes from another file of the same settings.
    unlink(path.c_str());
    make(3);
    const std::vector<uint8_t> other = bytes();
    store(mine);
    put(blocks[2].slot, record(other, blocks[2].slot));
    refused("another file", 2);
    // An older file as a whole is what it was: nothing in it tells, and its keys name what is in it.
    store(mine);
    auto tier = open();
    ASSERT_EQ(tier->recovered().size(), 3u);
    for (const RecoveredBlock& b : tier->recovered()) EXPECT_TRUE(read_block(*tier, b.slot, b.identity));
    // But under a tier that has it open, an older state of a record is none of what was written since.
    const Slot slot = tier->recovered()[0].slot;
    const BlockIdentity identity = tier->recovered()[0].identity;
    ASSERT_TRUE(write_block(*tier, slot, identity));
    put(slot, record(mine, slot));
    EXPECT_EQ(read_status(*tier, slot, identity).code(), TA_E_CORRUPT);
}

// Hashes are no proof of what a file of somebody else holds.
TEST_F(DiskSync, WhatAnEarlierSessionWroteIsCheckedForWhatItHolds) {
    DiskTierOptions o = options();
    o.check_found = [](const BlockIdentity& id, uint8_t, const uint8_t*) {
        return id.block_index == 0 ? fail(TA_E_CORRUPT, "no values") : Status();
    };
    for (const bool found : {false, true}) {
        auto tier = open(o);
        ASSERT_TRUE(tier) << is_ok(why).message();
        for (uint64_t i = 0; i < 2; ++i) {
            const Slot slot = found ? tier->recovered()[i].slot : take(*tier);
            if (!found) {
                ASSERT_TRUE(write_block(*tier, slot, make_identity(i, i + 1)));
            }
            EXPECT_EQ(read_status(*tier, slot, make_identity(i, i + 1)).code(), found && i == 0 ? TA_E_CORRUPT : TA_OK);
        }
    }
}

TEST_F(DiskSync, WithoutThreadsOfTheKernelSystemCallsDo) {
    use_uring = true;
    std::string reason;
    if (!make_uring(4, reason)) GTEST_SKIP() << reason;
    const auto files = std::make_shared<FaultyFiles>();
    auto tier = open(options(), files);
    ASSERT_TRUE(tier) << is_ok(why).message();
    ASSERT_TRUE(tier->io_uring());
    files->break_now(Fault::kNoThread, true);
    const Slot slot = take(*tier);
    EXPECT_TRUE(write_block(*tier, slot, make_identity(1, 1)));
    EXPECT_TRUE(read_block(*tier, slot, make_identity(1, 1)));
    EXPECT_TRUE(is_ok(tier->flush()));
    EXPECT_EQ(tier->health().state, TierState::kOk);
    EXPECT_NE(std::string(tier->health().reason).find("RLIMIT_NPROC"), std::string::npos) << tier->health().reason;
    tier.reset();
    // From the start.
    files->break_now(Fault::kNoThread, true);
    tier = open(options(), files);
    ASSERT_TRUE(tier) << is_ok(why).message();
    EXPECT_FALSE(tier->io_uring());
    ASSERT_EQ(tier->recovered().size(), 1u);
    EXPECT_TRUE(read_block(*tier, tier->recovered()[0].slot, make_identity(1, 1)));
}

TEST_F(DiskSync, NoDescriptorIsAStandardStream) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        for (int fd = 0; fd < 3; ++fd) close(fd);
        use_uring = true;
        for (const bool persistent : {true, false}) {
            DiskTierOptions o = options();
            o.persistent = persistent;
            if (!persistent) o.path = folder.path();
            auto tier = open(o);
            if (!tier) _exit(10);
            for (int fd = 0; fd < 3; ++fd) {
                if (fcntl(fd, F_GETFD) >= 0) _exit(20 + fd);
            }
        }
        _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 0) << "20 + n: descriptor n is taken";
}

TEST_F(DiskSync, OpeningThatHangsEndsWithItsDeadline) {
    DiskTierOptions o = options();
    o.deadline = 400ms;
    for (uint64_t at = 0; at < 12; at += 3) {
        const auto files = std::make_shared<FaultyFiles>(Fault::kStall, at, true);
        const auto start = std::chrono::steady_clock::now();
        const bool opened = open(o, files) != nullptr;
        const auto took = std::chrono::steady_clock::now() - start;
        files->heal();
        EXPECT_TRUE(files->wait_until_closed());
        unlink(path.c_str());
        if (opened) break;
        EXPECT_EQ(why.code(), TA_E_IO);
        EXPECT_LT(took, 2 * o.deadline) << "operation " << at;
    }
}

TEST_F(DiskSync, AFolderThatTakesNoFilesIsNotBusy) {
    for (const char* place : {"/proc", "/proc/self/fd"}) {
        DiskTierOptions o = options();
        o.path = std::string(place) + "/tier";
        EXPECT_FALSE(open(o));
        EXPECT_EQ(why.code(), TA_E_IO) << is_ok(why).message();
        EXPECT_NE(std::string(why.detail()->message).find("ENOENT"), std::string::npos) << why.detail()->message;
    }
}

}  // namespace
}  // namespace ta
