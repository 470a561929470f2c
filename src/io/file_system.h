// The seam to files: all that the disk tier asks of the operating system. Tests replace it to make any operation fail.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace ta {

// An operation of an IoQueue. The buffer belongs to the operation until wait() has returned its result, however long that
// takes.
struct IoOp {
    enum class Kind : uint8_t { kRead, kWrite, kSync };
    Kind kind = Kind::kRead;
    int fd = -1;
    uint8_t* data = nullptr;
    size_t bytes = 0;
    uint64_t offset = 0;
    void* user = nullptr;
};

struct IoResult {
    void* user = nullptr;
    int64_t result = 0;  // bytes, or -errno
};

// Runs many operations at a time. Used by one thread, except for wake().
class IoQueue {
  public:
    virtual ~IoQueue() = default;  // the caller has waited for all operations
    // 0, or -errno if the queue did not accept the operation.
    virtual int submit(const IoOp& op) = 0;
    // Waits for a result or a wake(). Returns the number of results.
    virtual size_t wait(std::span<IoResult> results) = 0;
    // Makes the current or the next wait() return. Any thread may call it.
    virtual void wake() = 0;
};

struct FileInfo {
    uint64_t bytes = 0;
    bool regular = false;
    uid_t owner = 0;
    mode_t mode = 0;  // permission bits
    uint64_t device = 0, inode = 0;
    uint64_t links = 0;          // number of names (hard links)
    uint64_t room = UINT64_MAX;  // of an open file: free bytes of its file system, if known
};

// As the POSIX functions of these names, except that a failure is returned as -errno. Thread-safe.
class FileSystem {
  public:
    virtual ~FileSystem() = default;
    virtual int open(const char* path, int flags, mode_t mode) = 0;
    virtual int close(int fd) = 0;
    virtual int64_t pread(int fd, void* data, size_t bytes, uint64_t offset) = 0;
    virtual int64_t pwrite(int fd, const void* data, size_t bytes, uint64_t offset) = 0;
    virtual int fallocate(int fd, uint64_t offset, uint64_t bytes) = 0;
    virtual int ftruncate(int fd, uint64_t bytes) = 0;
    virtual int fsync(int fd) = 0;
    virtual int fstat(int fd, FileInfo& info) = 0;
    virtual int lstat(const char* path, FileInfo& info) = 0;
    // Fails with -EEXIST rather than replace `to`.
    virtual int rename(const char* from, const char* to) = 0;
    // Gives a file that O_TMPFILE opened the name `to`. Fails with -EEXIST rather than replace a file of that name.
    virtual int link(int fd, const char* to) = 0;
    // True if link() will work for this file. Ask before writing to it.
    virtual bool can_link(int fd) = 0;
    virtual int unlink(const char* path) = 0;
    // Calls `each` with every name in the folder.
    virtual int list(const char* folder, const std::function<void(const char* name)>& each) = 0;
    // Takes an exclusive lock that ends with the descriptor and also excludes other descriptors of this process. -EWOULDBLOCK:
    // somebody else has the lock.
    virtual int lock(int fd) = 0;
    // Unlocks also for children that inherited the descriptor by fork().
    virtual int unlock(int fd) = 0;
    // Turns O_DIRECT off for a descriptor: its I/O is buffered from now on.
    virtual int clear_direct(int fd) = 0;
    // Identifies the boot of the system, as far as that is known. If it changes, the power may have failed in between.
    virtual uint64_t boot() { return 0; }
    // Drops cached pages that have been synced, so that later reads come from the medium.
    virtual void drop_cache(int) {}
    // A queue of up to `depth` operations at a time; nullptr and the reason if none is available.
    virtual std::unique_ptr<IoQueue> make_queue(unsigned depth, std::string& reason) = 0;
};

// "ENOSPC: No space left on device", from -errno. It is no std::string because threads that are out of memory report with it,
// too.
struct ErrorText {
    char text[96];
    const char* c_str() const { return text; }
    friend std::string operator+(std::string before, const ErrorText& t) { return std::move(before) + t.text; }
};
ErrorText error_text(int64_t negative_errno);

// Returns a descriptor of the same file that is no standard stream: `fd` itself if it is none, else a duplicate that closes on
// exec, and `fd` is closed. On failure returns -errno, with `fd` closed. Without this, what a program prints after it has
// closed a standard stream could end in a file of this library.
int above_standard_streams(int fd);

// The folder with its slash; "." if `path` has none.
std::string folder_of(const std::string& path);
// Prefix of all names that name_beside() makes.
inline constexpr char kOwnName[] = ".turboattention-";
// A temporary name for a file that becomes `path` later, in the same folder. Its length does not depend on that of `path`, so
// it fits the limit of names.
std::string name_beside(const std::string& path, const std::string& suffix);
// A path as error texts show it: only the end of a long one, so that the reason still fits.
std::string shown(const std::string& path);
bool is_lack_of_space(int64_t negative_errno);

// The files of the operating system.
std::shared_ptr<FileSystem> system_files();

// io_uring through liburing, which is loaded at run time; nullptr and the reason without it.
std::unique_ptr<IoQueue> make_uring(unsigned depth, std::string& reason);
// Runs the operation by a system call on the calling thread. Returns bytes, or -errno.
int64_t run_io(FileSystem& files, const IoOp& op);
// A queue whose submit() runs each operation to its end, with pread and pwrite of `files`.
std::unique_ptr<IoQueue> make_blocking_queue(FileSystem& files);

}  // namespace ta
