// The seam to files: what the disk tier asks of the operating system, so that tests can let every operation fail.
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

// An operation of an IoQueue. The buffer belongs to the operation until its result was seen, however long that takes.
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

// Operations in flight, many at a time. Used by one thread, except for wake().
class IoQueue {
  public:
    virtual ~IoQueue() = default;  // nothing is in flight any more
    // 0, or -errno: the operation was not taken.
    virtual int submit(const IoOp& op) = 0;
    // Waits for the first result or a wake(), and returns how many results there are.
    virtual size_t wait(std::span<IoResult> results) = 0;
    // Lets the present or the next wait() return. Any thread.
    virtual void wake() = 0;
};

struct FileInfo {
    uint64_t bytes = 0;
    bool regular = false;
    uid_t owner = 0;
    mode_t mode = 0;  // permission bits
    uint64_t device = 0, inode = 0;
    uint64_t links = 0;          // names
    uint64_t room = UINT64_MAX;  // of an open file: bytes that its file system has free, if it says so
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
    // Gives a file without a name, from O_TMPFILE, the name `to`. Fails with -EEXIST rather than replace what has it.
    virtual int link(int fd, const char* to) = 0;
    // True if link() will work on this file; asked before there is work in the file.
    virtual bool can_link(int fd) = 0;
    virtual int unlink(const char* path) = 0;
    // Calls `each` with every name in the folder.
    virtual int list(const char* folder, const std::function<void(const char* name)>& each) = 0;
    // An exclusive lock that ends with the descriptor, in this process too; -EWOULDBLOCK when someone else has it.
    virtual int lock(int fd) = 0;
    // Ends it also for children that fork() gave the descriptor to.
    virtual int unlock(int fd) = 0;
    // Buffered I/O from now on, for a descriptor that was opened with O_DIRECT.
    virtual int clear_direct(int fd) = 0;
    // Names the time since the system was started, as far as that is known; another one means that the power may have failed.
    virtual uint64_t boot() { return 0; }
    // From now on reads come from the medium, as far as it was synced, and not from memory.
    virtual void drop_cache(int) {}
    // A queue of up to `depth` operations at a time; nullptr and the reason when there is none here.
    virtual std::unique_ptr<IoQueue> make_queue(unsigned depth, std::string& reason) = 0;
};

// "ENOSPC: No space left on device", from -errno. No std::string: threads that have run out of memory report with it too.
struct ErrorText {
    char text[96];
    const char* c_str() const { return text; }
    friend std::string operator+(std::string before, const ErrorText& t) { return std::move(before) + t.text; }
};
ErrorText error_text(int64_t negative_errno);

// The same file under a descriptor that is no standard stream, which closes with exec; `fd` itself where it is none. -errno, and
// `fd` is closed. Where a program has closed one, what it prints must not go into a file of this library.
int above_standard_streams(int fd);

// With the slash, or "." where `path` has none.
std::string folder_of(const std::string& path);
// Names that name_beside() makes start with this.
inline constexpr char kOwnName[] = ".turboattention-";
// A name for what becomes `path` later: in its folder, and of a length of its own, so that it is no longer than names may be.
std::string name_beside(const std::string& path, const std::string& suffix);
// A path as texts of errors show it: of a long one the end, so that the reason behind it has room.
std::string shown(const std::string& path);
bool is_lack_of_space(int64_t negative_errno);

// The operating system's files.
std::shared_ptr<FileSystem> system_files();

// io_uring through liburing, which is opened at run time; nullptr and the reason without it.
std::unique_ptr<IoQueue> make_uring(unsigned depth, std::string& reason);
// By a system call, in the caller. Bytes, or -errno.
int64_t run_io(FileSystem& files, const IoOp& op);
// One operation at a time, run by submit() with pread and pwrite of `files`.
std::unique_ptr<IoQueue> make_blocking_queue(FileSystem& files);

}  // namespace ta
