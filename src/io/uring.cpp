// io_uring. liburing's header provides the layouts at build time; the library itself is loaded at run time, so that a program
// that embeds this one does not depend on it.
#include "src/io/file_system.h"

#if defined(TA_HAVE_LIBURING)

#include <dlfcn.h>
#include <fcntl.h>
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "src/io/size_signal.h"

namespace ta {
namespace {

constexpr int kRetryMilliseconds = 2;  // if the kernel had no memory for an operation

struct Liburing {
    decltype(&io_uring_queue_init) queue_init = nullptr;
    decltype(&io_uring_queue_exit) queue_exit = nullptr;
    decltype(&io_uring_submit) submit = nullptr;
    decltype(&io_uring_register_eventfd) register_eventfd = nullptr;
    bool found = false;

    explicit Liburing(void* library) {
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        found = find(queue_init, "io_uring_queue_init") && find(queue_exit, "io_uring_queue_exit") &&
                find(submit, "io_uring_submit") && find(register_eventfd, "io_uring_register_eventfd");
    }
};

// Tries again until it succeeds: the first attempt may fail for lack of descriptors.
void* open_liburing() {
    static std::atomic<void*> found{nullptr};
    if (!found) found = dlopen("liburing.so.2", RTLD_NOW | RTLD_LOCAL);
    return found;
}
// Call only after open_liburing() succeeded.
const Liburing& liburing() {
    static const Liburing library(open_liburing());
    return library;
}

// For the length of a scope, opens the standard streams that the program has closed. Otherwise liburing could get and keep one
// of their descriptors.
class StandardStreams {
  public:
    StandardStreams() {
        for (int& fd : taken_) {
            fd = open("/dev/null", O_RDWR | O_CLOEXEC);
            if (fd < 0) fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
            if (fd > STDERR_FILENO) {
                close(fd);
                fd = -1;
            }
            if (fd < 0) break;
        }
    }
    ~StandardStreams() {
        for (const int fd : taken_) {
            if (fd >= 0) close(fd);
        }
    }
    StandardStreams(const StandardStreams&) = delete;
    StandardStreams& operator=(const StandardStreams&) = delete;

  private:
    int taken_[STDERR_FILENO + 1] = {-1, -1, -1};
};

class Uring final : public IoQueue {
  public:
    ~Uring() override {
        if (made_) liburing().queue_exit(&ring_);
        if (event_ >= 0) close(event_);
    }

    bool make(unsigned depth, std::string& reason) {
        const StandardStreams taken;
        if (const int r = liburing().queue_init(depth, &ring_, 0); r < 0) {
            reason = std::string("io_uring is not available here: ") + std::strerror(-r);
            return false;
        }
        made_ = true;
        event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        event_ = event_ < 0 ? -errno : above_standard_streams(event_);
        const int r = event_ < 0 ? event_ : liburing().register_eventfd(&ring_, event_);
        if (r < 0) {
            reason = std::string("io_uring cannot signal an eventfd: ") + std::strerror(-r);
            return false;
        }
        return true;
    }

    int submit(const IoOp& op) override {
        if (broken_ < 0) return broken_;
        io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
        if (!sqe) return -EBUSY;
        switch (op.kind) {
            case IoOp::Kind::kRead:
                io_uring_prep_read(sqe, op.fd, op.data, unsigned(op.bytes), op.offset);
                break;
            case IoOp::Kind::kWrite:
                io_uring_prep_write(sqe, op.fd, op.data, unsigned(op.bytes), op.offset);
                break;
            case IoOp::Kind::kSync:
                io_uring_prep_fsync(sqe, op.fd, 0);
                break;
        }
        io_uring_sqe_set_data(sqe, op.user);
        // An entry that the kernel does not accept now stays in the ring, and wait() submits it again: so it counts as
        // accepted. If the error is permanent, the entry stays there, too, and nothing is submitted any more.
        if (const int r = submit_all(); r < 0 && r != -EAGAIN && r != -EBUSY && r != -EINTR && r != -ENOMEM) broken_ = r;
        return broken_;
    }

    size_t wait(std::span<IoResult> results) override {
        if (is_behind()) submit_all();
        const size_t n = reap(results);
        if (n > 0) return n;
        pollfd p{event_, POLLIN, 0};
        poll(&p, 1, is_behind() ? kRetryMilliseconds : -1);
        uint64_t count = 0;
        [[maybe_unused]] const ssize_t r = read(event_, &count, sizeof count);
        return reap(results);
    }

    void wake() override {
        const uint64_t one = 1;
        [[maybe_unused]] const ssize_t r = write(event_, &one, sizeof one);
    }

  private:
    // The kernel first tries a write on this thread, so its signals arrive here. The kernel's own threads block signals.
    int submit_all() {
        const NoSizeSignal none;
        return liburing().submit(&ring_);
    }
    bool is_behind() const { return broken_ == 0 && io_uring_sq_ready(&ring_) > 0; }
    size_t reap(std::span<IoResult> results) {
        unsigned head;
        size_t n = 0;
        io_uring_cqe* cqe;
        io_uring_for_each_cqe(&ring_, head, cqe) {
            if (n == results.size()) break;
            results[n++] = {io_uring_cqe_get_data(cqe), cqe->res};
        }
        io_uring_cq_advance(&ring_, unsigned(n));
        // If `results` is full, more completions may be in the ring, and no further event would announce them.
        if (n == results.size()) wake();
        return n;
    }

    io_uring ring_{};
    bool made_ = false;
    int broken_ = 0;  // -errno: the ring refuses all operations
    int event_ = -1;
};

}  // namespace

std::unique_ptr<IoQueue> make_uring(unsigned depth, std::string& reason) {
    const bool opened = open_liburing() != nullptr;
    if (!opened || !liburing().found) {
        const char* error = opened ? "it lacks functions" : dlerror();
        reason = std::string("liburing.so.2 cannot be used, so the disk tier uses pread and pwrite: ") + (error ? error : "");
        return nullptr;
    }
    auto ring = std::make_unique<Uring>();
    if (!ring->make(depth, reason)) return nullptr;
    return ring;
}

}  // namespace ta

#else

namespace ta {

std::unique_ptr<IoQueue> make_uring(unsigned, std::string& reason) {
    reason = "this build has no io_uring, so the disk tier uses pread and pwrite";
    return nullptr;
}

}  // namespace ta

#endif
