// Writes beyond the size that the process may give to files: an error like any other, whatever the program does with SIGXFSZ.
#include "src/io/file_system.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include "support/files.h"

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

}  // namespace
}  // namespace ta
