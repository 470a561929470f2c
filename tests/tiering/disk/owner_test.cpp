// Whose file a persistent disk tier opens: paths, owners, files half made, and other people's.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "tiering/disk/files.h"

namespace ta {
namespace {

using testing::DiskFiles;
using testing::Fault;
using testing::FaultyFiles;
using testing::is_ok;
using testing::make_identity;
using testing::read_block;
using testing::write_block;

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
    refuses("zeros of somebody", std::vector<char>(kDiskPage + 1, 0), 0600, false);
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

// The mark was written and not yet on the medium. So the file must not be larger before it is.
TEST_F(NamedDiskFiles, WhatAPowerFailureLeavesOfTheMarkIsTakenOver) {
    struct Watched : FaultyFiles {
        int syncs = 0, before_space = -1;
        int fsync(int fd) override {
            ++syncs;
            return FaultyFiles::fsync(fd);
        }
        int fallocate(int fd, uint64_t offset, uint64_t bytes) override {
            if (before_space < 0) before_space = syncs;
            return FaultyFiles::fallocate(fd, offset, bytes);
        }
    };
    const auto watched = std::make_shared<Watched>();
    watched->has_nameless = false;
    ASSERT_TRUE(open(options(), watched));
    EXPECT_EQ(watched->before_space, 1);
    unlink(path.c_str());
    (void)open(options(), make_files(Fault::kEio, 5));
    const std::string name = unfinished();
    ASSERT_FALSE(name.empty());
    for (const size_t n : {size_t{0}, size_t{100}, kDiskPage}) {
        testing::write_file(name, std::vector<char>(n, 0));
        chmod(name.c_str(), 0600);
        EXPECT_TRUE(open(options(), make_files())) << n << " bytes: " << is_ok(why).message();
        EXPECT_EQ(folder.entries(), 1u);
        unlink(path.c_str());
    }
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
        // A file that was there before stays, and so does a file that has taken its place.
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

}  // namespace
}  // namespace ta
