#include "src/io/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "kernels/format/hash.h"
#include "src/io/size_signal.h"

namespace ta {
namespace {

template <class T>
T result_of(T r) {
    return r < 0 ? T(-errno) : r;
}

int describe(const struct stat& s, FileInfo& info) {
    info.bytes = uint64_t(s.st_size);
    info.regular = S_ISREG(s.st_mode);
    info.owner = s.st_uid;
    info.mode = s.st_mode & 07777;
    info.device = s.st_dev;
    info.inode = s.st_ino;
    info.links = s.st_nlink;
    return 0;
}

// The name of an open file in /proc. link() uses it, because linking a descriptor needs a privilege.
struct NameOf {
    explicit NameOf(int fd) { std::snprintf(text, sizeof text, "/proc/self/fd/%d", fd); }
    char text[32];
};

class SystemFiles final : public FileSystem {
  public:
    // A file that this call creates has this mode, whatever the umask is.
    int open(const char* path, int flags, mode_t mode) override {
        const int fd = ::open(path, flags, mode);
        if (fd < 0) return -errno;
        const bool makes = (flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL) || (flags & O_TMPFILE) == O_TMPFILE;
        if (makes) (void)::fchmod(fd, mode);  // ignored: some file systems have no modes
        const int other = above_standard_streams(fd);
        if (other < 0 && makes && (flags & O_TMPFILE) != O_TMPFILE) ::unlink(path);
        return other;
    }
    int close(int fd) override { return result_of(::close(fd)); }
    int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) override {
        return result_of(int64_t(::pread(fd, data, bytes, off_t(offset))));
    }
    int64_t pwrite(int fd, const void* data, size_t bytes, uint64_t offset) override {
        const NoSizeSignal none;
        return result_of(int64_t(::pwrite(fd, data, bytes, off_t(offset))));
    }
    int fallocate(int fd, uint64_t offset, uint64_t bytes) override {
        const NoSizeSignal none;
        return result_of(::fallocate(fd, 0, off_t(offset), off_t(bytes)));
    }
    int ftruncate(int fd, uint64_t bytes) override {
        const NoSizeSignal none;
        return result_of(::ftruncate(fd, off_t(bytes)));
    }
    int fsync(int fd) override { return result_of(::fsync(fd)); }
    int fstat(int fd, FileInfo& info) override {
        struct stat s;
        if (::fstat(fd, &s) != 0) return -errno;
        struct statvfs v;
        info.room = ::fstatvfs(fd, &v) == 0 && v.f_blocks > 0 ? uint64_t(v.f_bfree) * v.f_frsize : UINT64_MAX;
        return describe(s, info);
    }
    int lstat(const char* path, FileInfo& info) override {
        struct stat s;
        return ::lstat(path, &s) == 0 ? describe(s, info) : -errno;
    }
    int rename(const char* from, const char* to) override {
        const long r = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);
        if (r == 0) return 0;
        if (errno != EINVAL && errno != ENOSYS) return -errno;
        // This file system cannot rename without replacing. link() does not replace either.
        if (::link(from, to) != 0) return -errno;
        return result_of(::unlink(from));
    }
    int link(int fd, const char* to) override {
        return result_of(::linkat(AT_FDCWD, NameOf(fd).text, AT_FDCWD, to, AT_SYMLINK_FOLLOW));
    }
    bool can_link(int fd) override { return ::access(NameOf(fd).text, F_OK) == 0; }
    int unlink(const char* path) override { return result_of(::unlink(path)); }
    int list(const char* folder, const std::function<void(const char*)>& each) override {
        const std::unique_ptr<DIR, int (*)(DIR*)> open_folder(::opendir(folder), ::closedir);
        if (!open_folder) return -errno;
        for (;;) {
            errno = 0;
            const dirent* entry = ::readdir(open_folder.get());
            if (!entry) return -errno;
            each(entry->d_name);
        }
    }
    int lock(int fd) override { return result_of(::flock(fd, LOCK_EX | LOCK_NB)); }
    int unlock(int fd) override { return result_of(::flock(fd, LOCK_UN)); }
    int clear_direct(int fd) override {
        const int flags = ::fcntl(fd, F_GETFL);
        return flags < 0 ? -errno : result_of(::fcntl(fd, F_SETFL, flags & ~O_DIRECT));
    }
    uint64_t boot() override {
        char id[64];
        const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC, 0);
        if (fd < 0) return 0;
        const ssize_t n = ::read(fd, id, sizeof id);
        close(fd);
        return n > 0 ? hash_bytes(id, size_t(n)) : 0;
    }
    void drop_cache(int fd) override { (void)::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); }
    std::unique_ptr<IoQueue> make_queue(unsigned depth, std::string& reason) override { return make_uring(depth, reason); }
};

class BlockingQueue final : public IoQueue {
  public:
    explicit BlockingQueue(FileSystem& files) : files_(files) {}

    int submit(const IoOp& op) override {
        if (has_result_) return -EBUSY;
        result_ = {op.user, run_io(files_, op)};
        has_result_ = true;
        return 0;
    }
    size_t wait(std::span<IoResult> results) override {
        std::unique_lock lock(mutex_);
        if (!has_result_) wake_.wait(lock, [&] { return woken_; });
        woken_ = false;
        if (!has_result_) return 0;
        has_result_ = false;
        results[0] = result_;
        return 1;
    }
    void wake() override {
        {
            std::lock_guard lock(mutex_);
            woken_ = true;
        }
        wake_.notify_one();
    }

  private:
    FileSystem& files_;
    bool has_result_ = false;
    IoResult result_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool woken_ = false;
};

}  // namespace

ErrorText error_text(int64_t negative_errno) {
    ErrorText t;
    const int code = int(-negative_errno);
    std::snprintf(t.text, sizeof t.text, "error %d", code);
#if defined(__GLIBC__)
    if (const char* name = strerrorname_np(code)) std::snprintf(t.text, sizeof t.text, "%s: %s", name, strerrordesc_np(code));
#endif
    return t;
}

int above_standard_streams(int fd) {
    if (fd > STDERR_FILENO) return fd;
    const int other = result_of(::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
    ::close(fd);
    return other;
}

bool is_lack_of_space(int64_t error) {
    return error == -ENOSPC || error == -EDQUOT || error == -EFBIG;
}

std::shared_ptr<FileSystem> system_files() {
    return std::make_shared<SystemFiles>();
}

int64_t run_io(FileSystem& files, const IoOp& op) {
    switch (op.kind) {
        case IoOp::Kind::kRead:
            return files.pread(op.fd, op.data, op.bytes, op.offset);
        case IoOp::Kind::kWrite:
            return files.pwrite(op.fd, op.data, op.bytes, op.offset);
        case IoOp::Kind::kSync:
            return files.fsync(op.fd);
    }
    return -EINVAL;
}

std::unique_ptr<IoQueue> make_blocking_queue(FileSystem& files) {
    return std::make_unique<BlockingQueue>(files);
}

std::string folder_of(const std::string& path) {
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

std::string name_beside(const std::string& path, const std::string& suffix) {
    const size_t name = path.rfind('/') + 1;  // npos + 1 is 0
    char own[40];
    std::snprintf(own, sizeof own, "%s%016llx", kOwnName,
                  (unsigned long long)hash_bytes(path.data() + name, path.size() - name));
    return path.substr(0, name) + own + suffix;
}

std::string shown(const std::string& path) {
    constexpr size_t kMost = 96;
    if (path.size() <= kMost) return path;
    std::string end = "...";
    end.append(path, path.size() - (kMost - end.size()));
    return end;
}

}  // namespace ta
