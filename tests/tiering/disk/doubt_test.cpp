// Headers of records that are not whole any more: none may outlive the session that knows of it, whatever the slots of its region
// serve by then, and whatever fails on the way.
#include <gtest/gtest.h>
#include <unistd.h>

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
using testing::make_identity;
using testing::read_block;
using testing::write_block;

// Records of class 1 have three pages, those of class 2 two. A region has two of the former and three of the latter.
class DiskDoubt : public DiskFiles {
  protected:
    static constexpr uint8_t kThree = 1, kTwo = 2;

    DiskTierOptions two_classes() {
        DiskTierOptions o = options();
        o.slot_bytes[kTwo] = 4000;
        return o;
    }
    // Takes `n` slots of a class, which are those of the first region.
    static std::vector<Slot> take(DiskTier& tier, uint8_t slot_class, size_t n) {
        return tier.acquire(std::vector<uint8_t>(n, slot_class)).value();
    }
    // Pages [first, last) of the first region.
    static std::vector<uint8_t> pages(const std::vector<uint8_t>& all, size_t first, size_t last) {
        const auto at = all.begin() + ptrdiff_t(kFirst);
        return {at + ptrdiff_t(first * kDiskPage), at + ptrdiff_t(last * kDiskPage)};
    }
    void put(size_t page, const std::vector<uint8_t>& content) const {
        std::vector<uint8_t> all = bytes();
        std::copy(content.begin(), content.end(), all.begin() + ptrdiff_t(kFirst + page * kDiskPage));
        store(all);
    }
    bool is_blank_page(size_t page) const { return is_blank(pages(bytes(), page, page + 1).data(), kDiskPage); }
    // The record of the class-1 slot at pages 3 to 5, as it was before it was erased.
    std::vector<uint8_t> make_erased() {
        auto tier = open(two_classes());
        EXPECT_EQ(tier->stats().slots_per_region[kThree], 2u);
        EXPECT_EQ(tier->stats().slots_per_region[kTwo], 3u);
        const std::vector<Slot> slots = take(*tier, kThree, 2);
        EXPECT_TRUE(write_block(*tier, slots[1], make_identity(1, 1)));
        std::vector<uint8_t> record = pages(bytes(), 3, 6);
        tier->release(slots);
        EXPECT_TRUE(tier->wait_for_erased(5s));
        return record;
    }
    // The superblock of the last session.
    Superblock superblock() const {
        const std::vector<uint8_t> all = bytes();
        Superblock s[2]{};
        for (size_t i = 0; i < 2; ++i) {
            if (check_superblock(all.data() + i * kDiskPage, s[i])) s[i] = {};
        }
        return s[s[0].opens < s[1].opens];
    }
    SessionState state() const { return SessionState(superblock().state); }
    void end_as(SessionState state) const {
        std::vector<uint8_t> all = bytes();
        Superblock s = superblock();
        s.state = uint64_t(state);
        seal_superblock(s, all.data() + s.opens % 2 * kDiskPage);
        store(all);
    }
    // Writes a class-2 record over the last two pages of the region, and gives all slots back.
    static void overwrite_the_end(DiskTier& tier) {
        const std::vector<Slot> slots = take(tier, kTwo, 3);
        EXPECT_EQ(slots[2].index, 2u);
        EXPECT_TRUE(write_block(tier, slots[2], make_identity(2, 2)));
        tier.release(slots);
        EXPECT_TRUE(tier.wait_for_erased(5s));
    }
    // Both syncs and writes of the tests go by threads.
    std::unique_ptr<DiskTier> open_with(std::shared_ptr<FileSystem> files, std::chrono::milliseconds deadline = 10s) {
        DiskTierOptions o = options();
        o.threads = 4;
        o.deadline = deadline;
        return open(o, std::move(files));
    }
};

// After a failed sync a record that was erased may be back as it was, beside one of another class.
TEST_F(DiskDoubt, AWholeRecordAmongThoseOfAnotherClassIsErased) {
    const std::vector<uint8_t> erased = make_erased();
    {
        auto tier = open(two_classes());
        ASSERT_TRUE(write_block(*tier, take(*tier, kTwo, 1)[0], make_identity(0, 9)));
    }
    put(3, erased);
    end_as(SessionState::kSyncFailed);
    {
        auto tier = open(two_classes());
        ASSERT_EQ(tier->recovered().size(), 1u);
        EXPECT_EQ(tier->recovered()[0].identity.content_id, 9u);
        EXPECT_EQ(tier->refused_count(), 1u);
        const Slot newer = tier->recovered()[0].slot;
        tier->release({&newer, 1});
        ASSERT_TRUE(tier->wait_for_erased(5s));
        overwrite_the_end(*tier);
    }
    auto tier = open(two_classes());
    EXPECT_EQ(tier->recovered().size(), 0u) << "its bytes are another record's";
}

TEST_F(DiskDoubt, ARecordThatCannotBeReadIsNotTakenForWholeLater) {
    // Fails where the payload of the erased record lies.
    struct BadSector : FaultyFiles {
        int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) override {
            if (offset == kFirst + 4 * kDiskPage && bytes > kDiskPage) return -EIO;
            return FaultyFiles::pread(fd, data, bytes, offset);
        }
    };
    for (const bool killed : {false, true}) {
        for (const bool overwritten : {false, true}) {
            SCOPED_TRACE(std::to_string(killed) + " " + std::to_string(overwritten));
            unlink(path.c_str());
            const std::vector<uint8_t> erased = make_erased();
            put(3, erased);
            end_as(SessionState::kSyncFailed);
            auto tier = open(two_classes(), std::make_shared<BadSector>());
            EXPECT_EQ(tier->recovered().size(), 0u);
            EXPECT_EQ(tier->refused_count(), 1u);
            if (overwritten) overwrite_the_end(*tier);
            const std::vector<uint8_t> as_it_is = bytes();
            tier.reset();
            if (killed) store(as_it_is);
            tier = open(two_classes());
            EXPECT_EQ(tier->recovered().size(), overwritten ? 0u : 1u) << "it is lost only if its place was used";
            EXPECT_EQ(is_blank_page(3), overwritten);
            tier.reset();
            EXPECT_EQ(state(), SessionState::kClosed);
        }
    }
}

// The index of a slot says nothing without its class.
TEST_F(DiskDoubt, ARefusedRecordChangesNothingOfARecordWithItsIndex) {
    std::vector<uint8_t> erased;
    {
        auto tier = open(two_classes());
        const std::vector<Slot> slots = take(*tier, kTwo, 2);
        ASSERT_TRUE(write_block(*tier, slots[1], make_identity(1, 1)));
        erased = pages(bytes(), 2, 4);
    }
    unlink(path.c_str());
    {
        auto tier = open(two_classes());
        const std::vector<Slot> slots = take(*tier, kTwo, 2);
        ASSERT_TRUE(write_block(*tier, slots[1], make_identity(1, 1)));
        erased = pages(bytes(), 2, 4);
        tier->release(slots);
        ASSERT_TRUE(tier->wait_for_erased(5s));
        const std::vector<Slot> larger = take(*tier, kThree, 2);
        ASSERT_TRUE(write_block(*tier, larger[1], make_identity(5, 5)));
    }
    // The header of the smaller record is back; the larger one lies on the rest of it. Both have index 1.
    put(2, {erased.begin(), erased.begin() + kDiskPage});
    end_as(SessionState::kSyncFailed);
    {
        auto tier = open(two_classes());
        ASSERT_EQ(tier->recovered().size(), 1u);
        const Slot there = tier->recovered()[0].slot, beside = take(*tier, kThree, 1)[0];
        ASSERT_EQ(there.index, 1u);
        ASSERT_EQ(beside.index, 0u);
        ASSERT_TRUE(write_block(*tier, beside, make_identity(6, 6)));
        tier->release({&there, 1});
        ASSERT_TRUE(tier->wait_for_erased(5s));
        EXPECT_TRUE(read_block(*tier, beside, make_identity(6, 6)));
    }
    auto tier = open(two_classes());
    ASSERT_EQ(tier->recovered().size(), 1u);
    EXPECT_EQ(tier->recovered()[0].identity.content_id, 6u) << "the released one is back";
}

// A slot of a far smaller class has pages behind its record.
TEST_F(DiskDoubt, AHeaderBehindAWholeRecordIsErased) {
    DiskTierOptions o = options();
    o.budget = 4 << 20;
    o.slot_bytes[0] = 64 * kDiskPage;
    o.slot_bytes[kThree] = 6 * kDiskPage;  // seven pages; slots of class 2 have five, records two
    o.slot_bytes[kTwo] = 4000;
    std::vector<uint8_t> erased;
    {
        auto tier = open(o);
        const std::vector<Slot> slots = take(*tier, kThree, 2);
        ASSERT_TRUE(write_block(*tier, slots[1], make_identity(1, 1)));
        erased = pages(bytes(), 7, 14);
        tier->release(slots);
        ASSERT_TRUE(tier->wait_for_erased(5s));
        const std::vector<Slot> small = take(*tier, kTwo, 2);
        ASSERT_TRUE(write_block(*tier, small[1], make_identity(2, 2)));
        ASSERT_FALSE(is_blank_page(5)) << "a slot of class 2 has another size than this test takes it to have";
    }
    put(7, {erased.begin(), erased.begin() + kDiskPage});
    end_as(SessionState::kSyncFailed);
    {
        auto tier = open(o);
        ASSERT_EQ(tier->recovered().size(), 1u);
        const Slot small = tier->recovered()[0].slot;
        EXPECT_TRUE(read_block(*tier, small, make_identity(2, 2)));
        tier->release({&small, 1});
        ASSERT_TRUE(tier->wait_for_erased(5s));
    }
    EXPECT_EQ(open(o)->recovered().size(), 0u);
}

// The system reports a failed write-back to one sync only. So the next open cannot see that pages are missing.
TEST_F(DiskDoubt, AfterAnOpenWhoseSyncFailedRecordsAreRead) {
    make(1);
    auto tier = open();
    const std::vector<uint8_t> open_file = bytes();
    tier.reset();
    store(open_file);  // its process was killed
    const auto files = std::make_shared<GatedFiles>();
    GatedFiles::Gate sync;
    sync.result = -EIO;
    sync.opens.release();
    files->sync = &sync;
    EXPECT_FALSE(open(options(), files));
    EXPECT_EQ(why.code(), TA_E_IO);
    flip(kFirst + kDiskPage + 100, 2);  // that page was not written back
    tier = open();
    ASSERT_TRUE(tier) << is_ok(why).message();
    EXPECT_EQ(tier->recovered().size(), 0u);
    EXPECT_EQ(tier->refused_count(), 1u);
}

// The damaged one may be of a session later than the one that was closed.
TEST_F(DiskDoubt, AfterAClosedSessionADamagedSuperblockRaisesDoubt) {
    make(1);
    auto tier = open();
    const std::vector<uint8_t> open_file = bytes();
    tier.reset();
    store(open_file);
    flip(kFirst + kDiskPage + 100, 2);
    flip(superblock().opens % 2 * kDiskPage + 40, 1);
    tier = open();
    ASSERT_TRUE(tier) << is_ok(why).message();
    EXPECT_EQ(tier->recovered().size(), 0u);
    EXPECT_EQ(tier->refused_count(), 1u);
}

// A sync that was given up may yet fail, and then takes the error of what was written meanwhile from later ones.
TEST_F(DiskDoubt, ASyncThatFailsLateCoversWhatWasWrittenMeanwhile) {
    const auto files = std::make_shared<GatedFiles>();
    auto tier = open_with(files, 300ms);
    ASSERT_TRUE(tier) << is_ok(why).message();
    const std::vector<Slot> slots = take(*tier, 1, 2);
    ASSERT_TRUE(write_block(*tier, slots[0], make_identity(0, 1)));
    GatedFiles::Gate sync;
    sync.result = -EIO;
    files->sync = &sync;
    EXPECT_EQ(tier->flush().code(), TA_E_IO);
    sync.reached.acquire();
    EXPECT_TRUE(write_block(*tier, slots[1], make_identity(1, 2)));
    EXPECT_EQ(tier->flush().code(), TA_E_IO) << "another sync while one runs would share its error";
    sync.opens.release();
    for (int i = 0; i < 500 && tier->stats().in_flight > 0; ++i) usleep(10000);
    EXPECT_NE(std::string(tier->health().reason).find("writes 2 records again"), std::string::npos) << tier->health().reason;
    EXPECT_EQ(state(), SessionState::kSyncFailed) << "if it is killed now, records must be read";
    EXPECT_TRUE(is_ok(tier->flush()));
    EXPECT_STREQ(tier->health().reason, "");
}

TEST_F(DiskDoubt, ASyncThatEndsLateLetsTheNextOneRun) {
    const auto files = std::make_shared<GatedFiles>();
    auto tier = open_with(files, 300ms);
    ASSERT_TRUE(tier) << is_ok(why).message();
    ASSERT_TRUE(write_block(*tier, take(*tier, 1, 1)[0], make_identity(0, 1)));
    GatedFiles::Gate sync;
    files->sync = &sync;
    EXPECT_EQ(tier->flush().code(), TA_E_IO);
    for (int i = 0; i < 500 && state() != SessionState::kSyncFailed; ++i) usleep(10000);
    EXPECT_EQ(state(), SessionState::kSyncFailed) << "its process may be killed before it ends";
    sync.opens.release();
    for (int i = 0; i < 500 && tier->stats().in_flight > 0; ++i) usleep(10000);
    EXPECT_TRUE(is_ok(tier->flush()));
}

// Else a process that is killed after that flush would leave a file that says nothing of the sync that failed.
TEST_F(DiskDoubt, AFlushAfterASyncThatFailedFirstMarksTheSession) {
    const auto files = std::make_shared<GatedFiles>();
    auto tier = open_with(files);
    ASSERT_TRUE(tier) << is_ok(why).message();
    ASSERT_TRUE(write_block(*tier, take(*tier, 1, 1)[0], make_identity(0, 1)));
    GatedFiles::Gate sync, mark, again;
    sync.result = mark.result = again.result = -EIO;
    for (GatedFiles::Gate* gate : {&sync, &mark, &again}) gate->opens.release();
    files->sync = &sync;
    files->write = &mark;
    EXPECT_EQ(tier->flush().code(), TA_E_IO);
    EXPECT_EQ(state(), SessionState::kOpen) << "the fault did not come";
    files->write = &again;
    EXPECT_EQ(tier->flush().code(), TA_E_IO);
    EXPECT_TRUE(is_ok(tier->flush()));
    EXPECT_EQ(state(), SessionState::kSyncFailed);
}

// A sync may have failed in a session that was killed, without a mark. Nothing tells whose records that session wrote.
TEST_F(DiskDoubt, WhatAKilledSessionLeavesIsUnreadUntilItIsRead) {
    make(2);
    auto tier = open();
    const std::vector<uint8_t> open_file = bytes();
    tier.reset();
    store(open_file);
    flip(kFirst + kDiskPage + 100, 2);
    std::vector<RecoveredBlock> found;
    Slot own{};
    const auto is_unread = [&](size_t i) { return tier->is_unread(found[i].slot); };
    const auto reopen = [&] {
        tier.reset();
        EXPECT_EQ(state(), found.empty() ? SessionState::kOpen : SessionState::kClosed);
        tier = open();
        found.assign(tier->recovered().begin(), tier->recovered().end());
    };
    reopen();
    ASSERT_EQ(found.size(), 2u) << "the open reads headers only";
    EXPECT_TRUE(is_unread(0) && is_unread(1));
    EXPECT_EQ(testing::read_status(*tier, found[0].slot, found[0].identity).code(), TA_E_CORRUPT);
    EXPECT_TRUE(read_block(*tier, found[1].slot, found[1].identity));
    EXPECT_TRUE(is_unread(0) && !is_unread(1));
    own = take(*tier, 1, 1)[0];
    ASSERT_TRUE(write_block(*tier, own, make_identity(5, 5)));
    EXPECT_FALSE(tier->is_unread(own));
    // A session that closes says which records it wrote itself.
    reopen();
    ASSERT_EQ(found.size(), 3u);
    EXPECT_TRUE(is_unread(0) && is_unread(1) && !is_unread(2));
    EXPECT_TRUE(read_block(*tier, found[1].slot, found[1].identity));
    tier->release({&found[0].slot, 1});
    ASSERT_TRUE(tier->wait_for_erased(5s));
    reopen();
    ASSERT_EQ(found.size(), 2u);
    EXPECT_FALSE(is_unread(0) || is_unread(1)) << "all were read";
}

}  // namespace
}  // namespace ta
