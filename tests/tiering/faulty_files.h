// A file system that fails as it is told: at its k-th operation, once or from then on. Everything else goes to the real one.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "src/io/file_system.h"

namespace ta::testing {

enum class Fault {
    kNone,
    kEio,
    kEnospc,  // of what takes space
    kEintr,
    kShort,     // half of the bytes
    kTorn,      // half of the bytes, and EIO
    kStall,     // no answer until heal(), then as if nothing had been
    kNoThread,  // io_uring's queues cancel all, as where RLIMIT_NPROC leaves them no thread; in no sweep
};
inline constexpr Fault kFaults[] = {Fault::kEio, Fault::kEnospc, Fault::kEintr, Fault::kShort, Fault::kTorn, Fault::kStall};

inline const char* name_of(Fault f) {
    constexpr const char* kNames[] = {"none", "EIO", "ENOSPC", "EINTR", "short", "torn", "stall", "no thread"};
    return kNames[int(f)];
}

class FaultyFiles : public FileSystem {
  public:
    FaultyFiles() = default;
    FaultyFiles(Fault fault, uint64_t at, bool forever) : fault_(fault), at_(at), forever_(forever) {}

    // Counts from 0. Fewer than `at` after a run: the fault never came.
    uint64_t operations() const { return operations_.load(); }
    int open_files() const { return open_files_.load(); }
    // Faults from the operation after the next `skip` ones.
    void break_now(Fault fault, bool forever, uint64_t skip = 0) {
        std::lock_guard lock(mutex_);
        fault_ = fault;
        at_ = operations_ + skip;
        forever_ = forever;
    }
    // From now on nothing fails, and what stalls goes on.
    void heal() {
        {
            std::lock_guard lock(mutex_);
            fault_ = Fault::kNone;
            ++heals_;
            for (IoQueue* q : queues_) q->wake();
        }
        healed_.notify_all();
    }
    // Threads that were left behind in a stall close their files late.
    bool wait_until_closed() const {
        for (int i = 0; i < 5000 && open_files() > 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return open_files() == 0;
    }
    bool has_queues = true, has_nameless = true, has_links = true, has_locks = true;

    int open(const char* path, int flags, mode_t mode) override {
        const bool creates = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
        if (const int e = plain(creates)) return e;
        if (!has_nameless && (flags & O_TMPFILE) == O_TMPFILE) return -EOPNOTSUPP;
        const int fd = real_->open(path, flags, mode);
        open_files_ += fd >= 0;
        return fd;
    }
    int close(int fd) override {
        --open_files_;
        return real_->close(fd);
    }
    int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) override {
        switch (hit(false)) {
            case Fault::kNone:
            case Fault::kNoThread:
            case Fault::kEnospc:
                break;
            case Fault::kEintr:
                return -EINTR;
            case Fault::kShort:
                return real_->pread(fd, data, half(bytes), offset);
            default:
                return -EIO;
        }
        return real_->pread(fd, data, bytes, offset);
    }
    int64_t pwrite(int fd, const void* data, size_t bytes, uint64_t offset) override {
        switch (hit(true)) {
            case Fault::kNone:
            case Fault::kNoThread:
                break;
            case Fault::kEintr:
                return -EINTR;
            case Fault::kEnospc:
                return -ENOSPC;
            case Fault::kShort:
                return real_->pwrite(fd, data, half(bytes), offset);
            case Fault::kTorn:
                (void)real_->pwrite(fd, data, half(bytes), offset);
                return -EIO;
            default:
                return -EIO;
        }
        return real_->pwrite(fd, data, bytes, offset);
    }
    int fallocate(int fd, uint64_t offset, uint64_t bytes) override {
        const int e = plain(true);
        return e ? e : real_->fallocate(fd, offset, bytes);
    }
    int ftruncate(int fd, uint64_t bytes) override {
        const int e = plain(true);
        return e ? e : real_->ftruncate(fd, bytes);
    }
    int fsync(int fd) override {
        const int e = plain(true);
        return e ? e : real_->fsync(fd);
    }
    int fstat(int fd, FileInfo& info) override {
        const int e = plain(false);
        return e ? e : real_->fstat(fd, info);
    }
    int lstat(const char* path, FileInfo& info) override {
        const int e = plain(false);
        return e ? e : real_->lstat(path, info);
    }
    int rename(const char* from, const char* to) override {
        const int e = plain(true);
        return e ? e : real_->rename(from, to);
    }
    int link(int fd, const char* to) override {
        const int e = plain(true);
        return e ? e : real_->link(fd, to);
    }
    bool can_link(int fd) override { return has_links && real_->can_link(fd); }
    int unlink(const char* path) override {
        const int e = plain(false);
        return e ? e : real_->unlink(path);
    }
    int list(const char* folder, const std::function<void(const char*)>& each) override {
        const int e = plain(false);
        return e ? e : real_->list(folder, each);
    }
    int lock(int fd) override {
        const int e = plain(false);
        return e ? e : has_locks ? real_->lock(fd) : -ENOLCK;
    }
    int unlock(int fd) override { return real_->unlock(fd); }
    int clear_direct(int fd) override { return real_->clear_direct(fd); }
    std::unique_ptr<IoQueue> make_queue(unsigned depth, std::string& reason) override {
        if (!has_queues) {
            reason = "the test has no io_uring";
            return nullptr;
        }
        std::unique_ptr<IoQueue> real = real_->make_queue(depth, reason);
        return real ? std::make_unique<Queue>(*this, std::move(real)) : nullptr;
    }

  private:
    // Whole pages, where there is more than one.
    static size_t half(size_t bytes) { return bytes > 4096 ? std::max<size_t>(bytes / 2 / 4096, 1) * 4096 : bytes / 2; }

    // Decides the fault of the next operation. A stall is waited for here.
    Fault hit(bool takes_space, bool wait = true) {
        std::unique_lock lock(mutex_);
        const uint64_t n = operations_++;
        if (fault_ == Fault::kNone || n < at_ || (n > at_ && !forever_)) return Fault::kNone;
        if (fault_ == Fault::kEnospc && !takes_space) return Fault::kNone;
        if (fault_ != Fault::kStall || !wait) return fault_;
        healed_.wait(lock, [&, heals = heals_] { return heals_ != heals; });
        return Fault::kNone;
    }
    int plain(bool takes_space) {
        switch (hit(takes_space)) {
            case Fault::kEio:
            case Fault::kTorn:
                return -EIO;
            case Fault::kEnospc:
                return -ENOSPC;
            case Fault::kEintr:
                return -EINTR;
            default:
                return 0;
        }
    }

    class Queue final : public IoQueue {
      public:
        Queue(FaultyFiles& files, std::unique_ptr<IoQueue> real) : files_(files), real_(std::move(real)) {
            std::lock_guard lock(files_.mutex_);
            files_.queues_.push_back(this);
        }
        ~Queue() override {
            std::lock_guard lock(files_.mutex_);
            files_.queues_.remove(this);
        }
        int submit(const IoOp& op) override {
            const bool write = op.kind == IoOp::Kind::kWrite;
            const Fault fault = files_.hit(op.kind != IoOp::Kind::kRead, false);
            switch (fault) {
                case Fault::kNone:
                    return pass(op, op.bytes, 0);
                case Fault::kEio:
                    return answer(op, -EIO);
                case Fault::kEnospc:
                    return answer(op, -ENOSPC);
                case Fault::kEintr:
                    return answer(op, -EINTR);
                case Fault::kShort:
                    if (op.kind == IoOp::Kind::kSync) return pass(op, op.bytes, 0);
                    return op.bytes > 4096 ? pass(op, half(op.bytes), 0) : answer(op, int64_t(half(op.bytes)));
                case Fault::kTorn:
                    return write && op.bytes > 4096 ? pass(op, half(op.bytes), -EIO) : answer(op, -EIO);
                case Fault::kNoThread:
                    return answer(op, -ECANCELED);
                case Fault::kStall: {
                    std::lock_guard lock(files_.mutex_);
                    stalled_.push_back({op, files_.heals_});
                    return 0;
                }
            }
            return 0;
        }
        size_t wait(std::span<IoResult> results) override {
            std::list<IoOp> free;
            {
                std::lock_guard lock(files_.mutex_);
                while (!stalled_.empty() && stalled_.front().heals != files_.heals_) {
                    free.push_back(stalled_.front().op);
                    stalled_.pop_front();
                }
            }
            for (const IoOp& op : free) {
                if (const int r = pass(op, op.bytes, 0); r < 0) answers_.push_back({op.user, r});
            }
            size_t n = 0;
            for (; n < results.size() && !answers_.empty(); ++n) {
                results[n] = answers_.front();
                answers_.pop_front();
            }
            if (n > 0) return n;
            n = real_->wait(results);
            for (size_t i = 0; i < n; ++i) {
                auto* p = static_cast<Passed*>(results[i].user);
                results[i].user = p->user;
                if (p->error && results[i].result >= 0) results[i].result = p->error;
                delete p;
            }
            return n;
        }
        void wake() override { real_->wake(); }

      private:
        struct Passed {
            void* user;
            int64_t error;
        };
        struct Stalled {
            IoOp op;
            uint64_t heals;
        };
        int pass(IoOp op, size_t bytes, int64_t error) {
            auto* p = new Passed{op.user, error};
            op.user = p;
            op.bytes = bytes;
            const int r = real_->submit(op);
            if (r < 0) delete p;
            return r;
        }
        int answer(const IoOp& op, int64_t result) {
            answers_.push_back({op.user, result});
            real_->wake();
            return 0;
        }
        FaultyFiles& files_;
        std::unique_ptr<IoQueue> real_;
        std::deque<IoResult> answers_;
        std::deque<Stalled> stalled_;  // under the files' mutex
    };

    const std::shared_ptr<FileSystem> real_ = system_files();
    std::atomic<int> open_files_{0};
    std::mutex mutex_;
    std::condition_variable healed_;
    Fault fault_ = Fault::kNone;
    uint64_t at_ = 0, heals_ = 0;
    bool forever_ = false;
    std::atomic<uint64_t> operations_{0};
    std::list<IoQueue*> queues_;
};

}  // namespace ta::testing
