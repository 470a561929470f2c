// A refusal of the system is an error like any other. Writes beyond the size that the process may give to files, whatever the
// program does with SIGXFSZ; io_uring that may be made and not used; names for files without one.
#include "src/io/file_system.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <thread>

#include "support/files.h"
#include "support/forbidden_call.h"

namespace ta {
namespace {

constexpr size_t kMost = size_t{1} << 16;

int g_calls = 0;  // of the program's handler

class SizeLimit : public ::testing::TestWithParam<bool> {
  protected:
    SizeLimit() : folder_(GetParam()) {
        fd = open(0);
        EXPECT_GE(fd, 0);
        getrlimit(RLIMIT_FSIZE, &limit_);
        const rlimit less{kMost, limit_.rlim_max};
        EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &less), 0);
        sigemptyset(&signal);
        sigaddset(&signal, SIGXFSZ);
    }
    ~SizeLimit() override {
        setrlimit(RLIMIT_FSIZE, &limit_);
        files->close(fd);
        ::signal(SIGXFSZ, SIG_DFL);
    }
    int open(int flags) const { return files->open(folder_.file("file").c_str(), O_RDWR | O_CREAT | flags, 0600); }
    void write_beyond() {
        EXPECT_EQ(files->pwrite(fd, bytes.data(), bytes.size(), 0), int64_t(bytes.size()));
        EXPECT_EQ(files->pwrite(fd, bytes.data(), bytes.size(), kMost), -EFBIG);
        EXPECT_EQ(files->ftruncate(fd, kMost + 1), -EFBIG);
        const int r = files->fallocate(fd, kMost, 4096);
        EXPECT_TRUE(r == -EFBIG || r == -EOPNOTSUPP) << error_text(r).c_str();
    }
    void write_beyond(IoQueue& queue, int to) {
        for (const uint64_t offset : {uint64_t{0}, uint64_t{kMost}, uint64_t{kMost * 2}}) {
            IoOp op;
            op.kind = IoOp::Kind::kWrite;
            op.fd = to;
            op.data = bytes.data();
            op.bytes = bytes.size();
            op.offset = offset;
            ASSERT_EQ(queue.submit(op), 0);
            IoResult result[1];
            while (queue.wait(result) == 0) {
            }
            EXPECT_EQ(result[0].result, offset < kMost ? int64_t(bytes.size()) : -EFBIG);
        }
    }
    bool is_pending() const {
        sigset_t pending;
        return sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1;
    }
    bool is_blocked() const {
        sigset_t now;
        return pthread_sigmask(SIG_BLOCK, nullptr, &now) == 0 && sigismember(&now, SIGXFSZ) == 1;
    }

    const std::shared_ptr<FileSystem> files = system_files();
    alignas(4096) std::array<uint8_t, 4096> bytes{};
    int fd = -1;
    sigset_t signal;

  private:
    const testing::Folder folder_;
    rlimit limit_{};
};

TEST_P(SizeLimit, TheProgramLives) {
    write_beyond();
    EXPECT_FALSE(is_blocked());
    EXPECT_FALSE(is_pending());
}

TEST_P(SizeLimit, ItsHandlerIsNotCalled) {
    g_calls = 0;
    ::signal(SIGXFSZ, [](int) { ++g_calls; });
    write_beyond();
    EXPECT_EQ(g_calls, 0);
    raise(SIGXFSZ);
    EXPECT_EQ(g_calls, 1);
}

TEST_P(SizeLimit, WhatItBlockedStaysAsItWas) {
    pthread_sigmask(SIG_BLOCK, &signal, nullptr);
    write_beyond();
    EXPECT_TRUE(is_blocked());
    EXPECT_FALSE(is_pending());
    raise(SIGXFSZ);
    write_beyond();
    EXPECT_TRUE(is_pending());
    const timespec now{};
    EXPECT_EQ(sigtimedwait(&signal, nullptr, &now), SIGXFSZ);
    pthread_sigmask(SIG_UNBLOCK, &signal, nullptr);
}

TEST_P(SizeLimit, Queues) {
    const std::unique_ptr<IoQueue> blocking = make_blocking_queue(*files);
    write_beyond(*blocking, fd);
    std::string reason;
    const std::unique_ptr<IoQueue> uring = make_uring(4, reason);
    if (!uring) GTEST_SKIP() << reason;
    write_beyond(*uring, fd);
    // As the disk tier writes, and where io_uring does not leave it to threads of its own.
    if (const int direct = open(O_DIRECT); direct >= 0) {
        write_beyond(*uring, direct);
        files->close(direct);
    }
    EXPECT_FALSE(is_pending());
}

// In memory and on disk: their file systems ask for the limit in different places.
INSTANTIATE_TEST_SUITE_P(Files, SizeLimit, ::testing::Bool());

// Forbidden from the start, and when the ring has worked already.
TEST(Uring, WhatTheSystemRefusesToTakeIsNotTaken) {
    const testing::Folder folder;
    const std::shared_ptr<FileSystem> files = system_files();
    const int fd = files->open(folder.file("file").c_str(), O_RDWR | O_CREAT, 0600);
    ASSERT_GE(fd, 0);
    for (const bool works_first : {false, true}) {
        std::thread thread([&] {
            std::string reason;
            const std::unique_ptr<IoQueue> uring = make_uring(4, reason);
            if (!uring) GTEST_SKIP() << reason;
            IoOp op;
            op.kind = IoOp::Kind::kSync;
            op.fd = fd;
            IoResult result;
            if (works_first) {
                ASSERT_EQ(uring->submit(op), 0);
                while (uring->wait({&result, 1}) == 0) {
                }
                ASSERT_EQ(result.result, 0);
            }
            if (!testing::forbid_call(SYS_io_uring_enter, EPERM)) GTEST_SKIP() << "no seccomp";
            // More than the ring has places: none is used up.
            for (int i = 0; i < 10; ++i) ASSERT_EQ(uring->submit(op), -EPERM);
            uring->wake();
            EXPECT_EQ(uring->wait({&result, 1}), 0u);
        });
        thread.join();
    }
    files->close(fd);
}

// If a standard stream is closed, output of the program for it must not go into a file of ours.
TEST(SystemFiles, FilesAreNoStandardStreams) {
    const testing::Folder folder;
    const std::shared_ptr<FileSystem> files = system_files();
    const int kept = dup(STDIN_FILENO);
    ::close(STDIN_FILENO);
    const int fd = files->open(folder.file("file").c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    EXPECT_GT(fd, STDERR_FILENO);
    EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
    EXPECT_EQ(fcntl(STDIN_FILENO, F_GETFD), -1);
    EXPECT_EQ(files->close(fd), 0);
    if (kept >= 0) {
        EXPECT_EQ(dup2(kept, STDIN_FILENO), STDIN_FILENO);
        ::close(kept);
    }
}

TEST(SystemFiles, PathsInErrorsAreShortened) {
    EXPECT_EQ(shown("/tmp/file"), "/tmp/file");
    const std::string name = "/folder/file", longest(96, 'x'), path = std::string(300, 'x') + name;
    EXPECT_EQ(shown(longest), longest);
    EXPECT_EQ(shown(path).size(), longest.size());
    EXPECT_TRUE(shown(path).starts_with("...x"));
    EXPECT_TRUE(shown(path).ends_with("x" + name));
}

TEST(SystemFiles, AFileWithoutANameGetsOne) {
    const testing::Folder folder;
    const std::shared_ptr<FileSystem> files = system_files();
    const std::string name = folder.file("name"), other = folder.file("other");
    const int fd = files->open(folder.path().c_str(), O_RDWR | O_TMPFILE, 0600);
    if (fd < 0) GTEST_SKIP() << error_text(fd).c_str();
    FileInfo info, there;
    ASSERT_EQ(files->fstat(fd, info), 0);
    EXPECT_EQ(info.links, 0u);
    ASSERT_EQ(files->link(fd, name.c_str()), 0);
    ASSERT_EQ(files->lstat(name.c_str(), there), 0);
    EXPECT_EQ(there.inode, info.inode);
    EXPECT_EQ(there.links, 1u);
    const int second = files->open(folder.path().c_str(), O_RDWR | O_TMPFILE, 0600);
    ASSERT_GE(second, 0);
    EXPECT_EQ(files->link(second, name.c_str()), -EEXIST);
    ASSERT_EQ(symlink("nowhere", other.c_str()), 0);
    EXPECT_EQ(files->link(second, other.c_str()), -EEXIST) << "a link is not followed";
    EXPECT_EQ(files->link(second, folder.file("none/name").c_str()), -ENOENT);
    files->close(second);
    files->close(fd);
}

}  // namespace
}  // namespace ta
