// Files that are saved: there is one at its path when it is complete and on the medium, and else nothing is left, whatever fails
// and whoever is killed.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <set>

#include "src/kv/files/block_file.h"
#include "support/files.h"
#include "tiering/faulty_files.h"

namespace ta::testing {
namespace {

constexpr char kContent[] = "complete";

Status write_content(File& file) {
    TA_RETURN_IF_ERROR(file.write(kContent, sizeof kContent));
    return file.sync();
}

class NewFile : public ::testing::Test {
  protected:
    Status save(FileSystem& files, const char* name, const std::function<Status(File&)>& write = write_content) {
        return write_new_file(files, folder.file(name), write);
    }
    std::set<std::string> names() const {
        std::set<std::string> all;
        for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
            all.insert(entry.path().filename().string());
        return all;
    }
    bool is_complete(const char* name) const {
        return read_file(folder.file(name)) == std::vector<char>(std::begin(kContent), std::end(kContent));
    }
    // Leaves the file of a process that was killed while it saved, where files need names.
    void leave(const char* name) {
        const pid_t child = fork();
        if (child == 0) {
            FaultyFiles files;
            files.has_nameless = false;
            (void)save(files, name, [](File& file) -> Status {
                (void)file.write("half", 4);
                kill(getpid(), SIGKILL);
                return {};
            });
            _exit(1);
        }
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        ASSERT_TRUE(WIFSIGNALED(status));
    }

    const Folder folder;
};

TEST_F(NewFile, HasNoNameUntilItIsComplete) {
    for (const bool has_nameless : {true, false}) {
        for (const bool has_links : {true, false}) {
            FaultyFiles files;
            files.has_nameless = has_nameless;
            files.has_links = has_links;
            size_t meanwhile = 9;
            const Status s = save(files, "file", [&](File& file) {
                meanwhile = folder.entries();
                return write_content(file);
            });
            EXPECT_TRUE(s.ok());
            EXPECT_EQ(meanwhile, has_nameless && has_links ? 0u : 1u);
            EXPECT_EQ(names(), std::set<std::string>{"file"});
            EXPECT_TRUE(is_complete("file"));
            EXPECT_EQ(save(files, "file").code(), TA_E_INVALID) << "it exists";
            EXPECT_EQ(files.open_files(), 0);
            std::filesystem::remove(folder.file("file"));
        }
    }
}

// Of two that were started before either was there, one gets the name.
TEST_F(NewFile, ReplacesNothing) {
    for (const bool has_nameless : {true, false}) {
        FaultyFiles files;
        files.has_nameless = has_nameless;
        const Status s = save(files, "file", [&](File& file) {
            write_file(folder.file("file"), {'x'});
            return write_content(file);
        });
        EXPECT_EQ(s.code(), TA_E_INVALID);
        EXPECT_EQ(names(), std::set<std::string>{"file"});
        EXPECT_EQ(read_file(folder.file("file")), std::vector<char>{'x'});
        std::filesystem::remove(folder.file("file"));
    }
}

TEST_F(NewFile, TheNextSaveRemovesWhatAKilledOneLeft) {
    leave("file");
    ASSERT_EQ(folder.entries(), 1u);
    const std::string left = *names().begin();
    // Nobody's: not of a save, or no regular file.
    write_file(folder.file((left + ".mine").c_str()), {'x'});
    std::filesystem::rename(folder.file((left + ".mine").c_str()), folder.file(".turboattention-mine"));
    std::filesystem::create_directory(folder.file((left + "1").c_str()));
    std::filesystem::create_symlink(folder.file(".turboattention-mine"), folder.file((left + "2").c_str()));
    FaultyFiles no_locks;
    no_locks.has_nameless = no_locks.has_locks = false;
    EXPECT_TRUE(save(no_locks, "first").ok()) << "it cannot tell whether they are alive";
    EXPECT_EQ(folder.entries(), 5u);
    FaultyFiles files;
    EXPECT_TRUE(save(files, "second").ok());
    EXPECT_EQ(names(), (std::set<std::string>{".turboattention-mine", left + "1", left + "2", "first", "second"}));
}

TEST_F(NewFile, ASaveThatGoesOnIsLeftAlone) {
    FaultyFiles files;
    files.has_nameless = false;
    const Status s = save(files, "outer", [&](File& file) {
        EXPECT_TRUE(save(files, "inner").ok());
        EXPECT_EQ(folder.entries(), 2u);
        return write_content(file);
    });
    EXPECT_TRUE(s.ok());
    EXPECT_EQ(names(), (std::set<std::string>{"inner", "outer"}));
}

// Another save takes the file for one that was left behind, between its making and its lock.
TEST_F(NewFile, ARemovedFileIsMadeAgain) {
    class Racing final : public FaultyFiles {
      public:
        int lock(int fd) override {
            if (races-- > 0) std::filesystem::remove(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd)));
            return races % 2 ? FaultyFiles::lock(fd) : -EWOULDBLOCK;
        }
        int races = 4;
    } files;
    files.has_nameless = false;
    EXPECT_TRUE(save(files, "file").ok());
    EXPECT_EQ(names(), std::set<std::string>{"file"});
    EXPECT_TRUE(is_complete("file"));
    EXPECT_EQ(files.open_files(), 0);
}

// Each operation fails, once and from then on.
TEST_F(NewFile, WhateverFails) {
    int failed = 0, there = 0;
    for (const bool has_nameless : {true, false}) {
        for (const Fault fault : kFaults) {
            if (fault == Fault::kStall) continue;
            for (const bool forever : {false, true}) {
                for (uint64_t k = 0;; ++k) {
                    SCOPED_TRACE(std::string(name_of(fault)) + " at " + std::to_string(k) + (forever ? ", from then on" : ""));
                    FaultyFiles files(fault, k, forever);
                    files.has_nameless = has_nameless;
                    const Status s = save(files, "file");
                    const bool came = files.operations() > k;
                    EXPECT_EQ(files.open_files(), 0);
                    const bool is_there = names().count("file") > 0;
                    if (is_there) {
                        EXPECT_TRUE(is_complete("file"));
                    }
                    if (!s.ok()) {
                        ++failed;
                        ASSERT_TRUE(s.detail());
                        const bool says_so =
                            std::string(s.detail()->message).find("is there and complete") != std::string::npos;
                        EXPECT_EQ(is_there, says_so) << s.detail()->message;
                        there += is_there;
                        EXPECT_TRUE(forever || folder.entries() == 0);
                    }
                    files.heal();
                    if (!s.ok() && !is_there) {
                        EXPECT_TRUE(save(files, "file").ok());
                    }
                    EXPECT_EQ(names(), std::set<std::string>{"file"});
                    std::filesystem::remove(folder.file("file"));
                    if (!came) break;
                }
            }
        }
    }
    EXPECT_GT(failed, 100);
    EXPECT_GT(there, 0) << "when removing it fails too";
}

}  // namespace
}  // namespace ta::testing
