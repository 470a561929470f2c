#include "tiering/disk/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "kernels/format/hash.h"

namespace ta {
namespace {

constexpr int kMostRetries = 16;  // of an interrupted operation
constexpr uint64_t kAllocationStep = uint64_t{1} << 30;
constexpr std::chrono::milliseconds kLockPatience{1000};
constexpr int kGenerationBits = 40;  // for the writes of one session
constexpr uint64_t kMostOpens = (uint64_t{1} << (64 - kGenerationBits)) - 4;
constexpr size_t kMostRefusals = 16;  // whose reasons are kept
constexpr int kMostAttempts = 8;      // if other processes make the same file meanwhile

// Superblocks are written in turn.
constexpr uint64_t superblock_offset(uint64_t opens) {
    return opens % 2 * kDiskPage;
}

// True if a page was not moved whole: interrupted, or too few bytes.
bool is_incomplete(int64_t r) {
    return r == -EINTR || r == -EAGAIN || (r >= 0 && r < int64_t(kDiskPage));
}

// Moves a page, and retries if that is incomplete. Returns bytes, or -errno.
template <class Operation>
int64_t move_page(Operation&& operation) {
    int64_t r = operation();
    for (int i = 0; i < kMostRetries && is_incomplete(r); ++i) r = operation();
    return r >= 0 && r < int64_t(kDiskPage) ? -ENODATA : r;
}

// Calls `operation` again while it is interrupted.
template <class Operation>
auto retry(Operation&& operation) {
    auto r = operation();
    for (int i = 0; i < kMostRetries && (r == -EINTR || r == -EAGAIN); ++i) r = operation();
    return r;
}

Status io_failure(int64_t error, const char* what, const std::string& path) {
    return fail(is_lack_of_space(error) ? TA_E_TIER_FULL : TA_E_IO, "%s the disk tier's file %s failed: %s", what,
                shown(path).c_str(), error_text(error).c_str())
        .tier(TA_TIER_DISK);
}

// True if this result of open() with O_TMPFILE means that the kernel or the file system lacks it.
bool lacks_nameless_files(int r) {
    return r == -EOPNOTSUPP || r == -EISDIR || r == -EINVAL;
}

// True if this result of link() means that the file cannot be named, for want of /proc or of hard links, say.
bool cannot_name(int r) {
    return r == -ENOENT || r == -ENOTDIR || r == -EPERM || r == -EACCES || r == -EOPNOTSUPP || r == -ENOSYS || r == -EINVAL ||
           r == -EXDEV;
}

bool is_private(const FileInfo& info) {
    return info.owner == geteuid() && (info.mode & 077) == 0;
}

// The next place after `slot` where a record can be. Each region is walked once for every class.
Slot next_place(const SlotMap& map, const SlotMap::Shape& shape, Slot slot) {
    do {
        ++slot.index;
        if (slot.index % SlotMap::kIndicesPerRegion == 0) {
            slot.slot_class = uint8_t((slot.slot_class + 1) % kSlotClasses);
            if (slot.slot_class != 0) slot.index -= SlotMap::kIndicesPerRegion;
        }
    } while (slot.index < shape.indices() && !map.known(slot));
    return slot;
}

}  // namespace

// Some pages of memory as direct I/O takes it.
class DiskFile::DirectBuffer {
  public:
    explicit DirectBuffer(size_t pages) : bytes_(pages * kDiskPage) {
        void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        data_ = p == MAP_FAILED ? nullptr : static_cast<uint8_t*>(p);
    }
    ~DirectBuffer() {
        if (data_) munmap(data_, bytes_);
    }
    DirectBuffer(const DirectBuffer&) = delete;
    DirectBuffer& operator=(const DirectBuffer&) = delete;
    uint8_t* data(size_t page = 0) { return data_ + page * kDiskPage; }
    bool ok() const { return data_ != nullptr; }

  private:
    size_t bytes_;
    uint8_t* data_;
};

DiskFile::~DiskFile() {
    close();
}

void DiskFile::close() {
    // A forked child may still have the descriptor, and with it the lock.
    const bool locked = locked_by_ == getpid();
    // Without a lock another process may have put blocks into the file.
    if (made_ && locked && is_named(path_.c_str())) files->unlink(path_.c_str());
    if (locked) files->unlock(fd);
    if (fd >= 0) files->close(fd);
    fd = -1;
    locked_by_ = 0;
    made_ = false;
}

void DiskFile::start_over() {
    close();
    queue.reset();
    degraded.clear();
}

Result<std::unique_ptr<DiskFile>> DiskFile::open(std::shared_ptr<FileSystem> fs, const DiskFileOptions& options,
                                                 OpeningProgress& progress) {
    std::unique_ptr<DiskFile> file(new DiskFile(std::move(fs)));
    file->progress_ = &progress;
    file->path_ = options.path;
    file->persistent = options.persistent;
    file->context.fingerprint = options.fingerprint;
    std::copy(std::begin(options.slot_bytes), std::end(options.slot_bytes), file->context.slot_bytes);
    file->shape = disk_shape(options.budget, options.slot_bytes);
    if (!file->shape.valid() || file->shape.regions == 0) {
        return fail(TA_E_INVALID, "%llu bytes on disk do not hold one block of %zu bytes and what belongs to it",
                    (unsigned long long)options.budget, std::ranges::max(options.slot_bytes));
    }
    TA_RETURN_IF_ERROR(options.persistent ? file->open_persistent(options) : file->make_anonymous(options));
    file->progress_ = nullptr;
    return file;
}

// With O_DIRECT where that is possible.
int DiskFile::open_file(const char* path, int flags) {
    flags |= O_RDWR | O_CLOEXEC;
    fd = retry([&] { return files->open(path, flags | O_DIRECT, 0600); });
    progress_->step();
    direct = fd >= 0;
    if (fd != -EINVAL) return fd;
    fd = retry([&] { return files->open(path, flags, 0600); });
    progress_->step();
    if (fd >= 0) degraded.push_back("the file system of " + path_ + " has no O_DIRECT");
    return fd;
}

// Makes an empty file. Without O_DIRECT: such an open may fail and leave the file behind.
int DiskFile::create(const char* path) {
    const int made = retry([&] { return files->open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600); });
    progress_->step();
    if (made >= 0) files->close(made);
    return std::min(made, 0);
}

// True if `path` (still) names the open file.
bool DiskFile::is_named(const char* path) const {
    FileInfo mine, there;
    return files->fstat(fd, mine) == 0 && files->lstat(path, there) == 0 && there.inode == mine.inode &&
           there.device == mine.device;
}

// An opening that was given up must neither make nor change a file: the caller may have opened it again by now.
Status DiskFile::check_wanted() const {
    return progress_->abandoned ? fail(TA_E_IO, "opening was given up") : Status();
}

// I/O that a killed process had in flight may still land. It keeps the file locked until then, a moment longer than the process
// lives.
int DiskFile::lock() {
    const auto end = std::chrono::steady_clock::now() + kLockPatience;
    for (;;) {
        const int r = files->lock(fd);
        progress_->step();
        if (r == 0) locked_by_ = getpid();
        if ((r == -EWOULDBLOCK || r == -EINTR) && std::chrono::steady_clock::now() < end) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            continue;
        }
        if (r < 0 && r != -EWOULDBLOCK) degraded.push_back("the disk tier's file cannot be locked: " + error_text(r));
        return r;
    }
}

// Makes a file that nobody else can open. It is gone with this descriptor, however the process ends.
Status DiskFile::make_anonymous(const DiskFileOptions& options) {
    int r = open_file(options.path.c_str(), O_TMPFILE | O_EXCL);
    if (lacks_nameless_files(r)) {
        uint64_t random = 0;
        if (getrandom(&random, sizeof random, 0) != ssize_t(sizeof random)) return fail(TA_E_IO, "getrandom failed");
        const std::string name = options.path + "/.turboattention-" + std::to_string(getpid()) + "-" + std::to_string(random);
        r = create(name.c_str());
        if (r >= 0) {
            r = open_file(name.c_str(), O_NOFOLLOW);
            const int removed = retry([&] { return files->unlink(name.c_str()); });
            progress_->step();
            if (removed < 0) return io_failure(removed, "unlinking", name);
        }
    }
    if (r < 0) return io_failure(r, "making", options.path + "/(nameless)");
    return lay_out(options);
}

// Turns an empty file into one without blocks.
Status DiskFile::lay_out(const DiskFileOptions& options) {
    TA_RETURN_IF_ERROR(preallocate(file_bytes(shape)));
    DirectBuffer pages(2);
    if (!pages.ok()) return fail(TA_E_MEMORY, "no memory for two pages");
    if (getrandom(&context.file, sizeof context.file, 0) != ssize_t(sizeof context.file))
        return fail(TA_E_IO, "getrandom failed");
    start_session(1);
    TA_RETURN_IF_ERROR(write_superblock(pages));
    TA_RETURN_IF_ERROR(probe_direct(pages));
    if (options.queue_depth > 0) probe_queue(pages, options.queue_depth);
    return {};
}

Status DiskFile::open_persistent(const DiskFileOptions& options) {
    for (int i = 0; i < kMostAttempts; ++i) {
        Result<Attempt> r = attempt(options);
        if (!r.ok()) return std::move(r).status();
        if (r.value() == Attempt::kMade) return {};
        if (r.value() == Attempt::kFound) return read_found(options);
        start_over();
    }
    return fail(TA_E_BUSY, "other processes make and remove the disk tier's file %s", options.path.c_str());
}

Result<DiskFile::Attempt> DiskFile::attempt(const DiskFileOptions& options) {
    const char* path = options.path.c_str();
    const int r = open_file(path, O_NOFOLLOW);
    TA_RETURN_IF_ERROR(check_wanted());
    if (r >= 0) return lock_found(options);
    if (r == -ELOOP) return fail(TA_E_INVALID, "the disk tier's file %s is a symbolic link; it takes a file", path);
    if (r != -ENOENT) return io_failure(r, "opening", options.path);
    if (options.path.ends_with('/')) return fail(TA_E_INVALID, "the disk tier's file %s has no name", path);
    Result<Attempt> made = make_persistent(options);
    if (made.ok()) return made;
    Status why = std::move(made).status();
    FileInfo there;
    // Another process may have just used the missing space for the same file.
    if (why.code() == TA_E_TIER_FULL && files->lstat(path, there) == 0) return Attempt::kAgain;
    return why;
}

Result<DiskFile::Attempt> DiskFile::lock_found(const DiskFileOptions& options) {
    const char* path = options.path.c_str();
    FileInfo info;
    if (const int s = files->fstat(fd, info); s < 0) return io_failure(s, "fstat of", options.path);
    if (!info.regular) return fail(TA_E_INVALID, "the disk tier's file %s is not a file", path);
    if (!is_private(info)) {
        return fail(TA_E_INVALID, "the disk tier's file %s must belong to this user and have mode 0600; it has %04o", path,
                    unsigned(info.mode));
    }
    if (lock() == -EWOULDBLOCK) return fail(TA_E_BUSY, "the disk tier's file %s is in use", path);
    TA_RETURN_IF_ERROR(check_wanted());
    // The previous holder of the lock may have removed the file that it had made.
    FileInfo there;
    const int s = files->lstat(path, there);
    if (s < 0 && s != -ENOENT) return io_failure(s, "lstat of", options.path);
    return s == 0 && there.inode == info.inode && there.device == info.device ? Attempt::kFound : Attempt::kAgain;
}

// The file gets its name when it is complete: a path never names half a file, and a process that is killed leaves nothing.
Result<DiskFile::Attempt> DiskFile::make_persistent(const DiskFileOptions& options) {
    const int r = open_file(folder_of(options.path).c_str(), O_TMPFILE);
    if (lacks_nameless_files(r)) return make_by_name(options);
    if (r < 0) return io_failure(r, "making", options.path);
    lock();
    FileInfo there;
    if (files->lstat(options.path.c_str(), there) == 0) return Attempt::kAgain;
    TA_RETURN_IF_ERROR(complete(options));
    const int named = retry([&] { return files->link(fd, options.path.c_str()); });
    progress_->step();
    if (named == -EEXIST) return Attempt::kAgain;
    if (cannot_name(named)) {
        start_over();
        return make_by_name(options);
    }
    if (named < 0) return io_failure(named, "naming", options.path);
    return finish_making();
}

// For file systems without nameless files: makes the file under a name that nothing else uses. A killed process leaves a file
// with a mark there, which the next one takes over.
Result<DiskFile::Attempt> DiskFile::make_by_name(const DiskFileOptions& options) {
    const std::string name = name_beside(options.path, ".new");
    const char* making = name.c_str();
    const auto in_the_way = [&](const char* why) { return fail(TA_E_INVALID, "%s is in the way: %s", making, why); };
    int r = open_file(making, O_NOFOLLOW);
    const bool created = r == -ENOENT;
    if (created) {
        r = create(making);
        if (r == -EEXIST) return Attempt::kAgain;
        if (r >= 0) {  // else `path`'s folder is missing, or takes no files
            r = open_file(making, O_NOFOLLOW);
            if (r == -ENOENT) return Attempt::kAgain;
        }
    }
    if (r == -ELOOP) return in_the_way("it is a symbolic link");
    if (r < 0) return io_failure(r, "making", name);
    const int locked = lock();
    if (locked == -EWOULDBLOCK)
        return fail(TA_E_BUSY, "another process is making the disk tier's file %s", options.path.c_str());
    // The previous holder of the lock may have finished and renamed this file.
    if (!is_named(making)) return Attempt::kAgain;
    FileInfo info;
    if (const int s = files->fstat(fd, info); s < 0) return io_failure(s, "fstat of", name);
    DirectBuffer pages(2);
    if (!pages.ok()) return fail(TA_E_MEMORY, "no memory for two pages");
    if (!info.regular || !is_private(info) || info.links != 1)
        return in_the_way("not a file of this user alone with mode 0600");
    mark_unfinished(pages.data());
    if (info.bytes > 0) {
        TA_RETURN_IF_ERROR(probe_direct(pages));
        const int64_t n = move_page([&] { return files->pread(fd, pages.data(1), kDiskPage, 0); });
        if (n < 0 && n != -ENODATA) return io_failure(n, "reading", name);
        // A killed process may have written only a part of the mark. A power failure may have left zeros in its place.
        const auto bytes = size_t(std::min<uint64_t>(info.bytes, kDiskPage));
        const bool blank = info.bytes <= kDiskPage && is_blank(pages.data(1), bytes);
        if (!blank && std::memcmp(pages.data(), pages.data(1), bytes) != 0)
            return in_the_way("not a disk tier's file that was left unfinished");
    }
    if (locked < 0 && !created)
        return in_the_way("it may be unfinished work of another process, which cannot be told without locks");
    const auto build = [&]() -> Result<Attempt> {
        if (const int t = retry([&] { return files->ftruncate(fd, 0); }); t < 0) return io_failure(t, "truncating", name);
        TA_RETURN_IF_ERROR(write_page(pages, 0));
        TA_RETURN_IF_ERROR(sync_file());  // before the file is larger than its mark
        TA_RETURN_IF_ERROR(complete(options));
        const int renamed = retry([&] { return files->rename(making, options.path.c_str()); });
        progress_->step();
        if (renamed == -EEXIST) {
            files->unlink(making);
            return Attempt::kAgain;
        }
        if (renamed < 0) return io_failure(renamed, "renaming", name);
        return finish_making();
    };
    Result<Attempt> made = build();
    if (!made.ok()) files->unlink(making);
    return made;
}

// All of the file but its name.
Status DiskFile::complete(const DiskFileOptions& options) {
    TA_RETURN_IF_ERROR(lay_out(options));
    TA_RETURN_IF_ERROR(sync_file());
    return check_wanted();
}

// A name is durable once its folder is synced. Some file systems know no fsync of folders, and an unreadable folder cannot be
// opened.
Result<DiskFile::Attempt> DiskFile::finish_making() {
    made_ = true;
    const int dir = retry([&] { return files->open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
    const int synced = dir < 0 ? dir : retry([&] { return files->fsync(dir); });
    if (dir >= 0) files->close(dir);
    progress_->step();
    if (synced == -EIO || is_lack_of_space(synced)) return io_failure(synced, "fsync of the folder of", path_);
    if (synced < 0) degraded.push_back("fsync of the folder of " + path_ + " failed: " + error_text(synced));
    return Attempt::kMade;
}

Status DiskFile::read_found(const DiskFileOptions& options) {
    FileInfo info;
    if (const int s = files->fstat(fd, info); s < 0) return io_failure(s, "fstat of", options.path);
    DirectBuffer pages(2);
    if (!pages.ok()) return fail(TA_E_MEMORY, "no memory for two pages");
    TA_RETURN_IF_ERROR(read_superblock(pages, info.bytes, options));
    if (options.queue_depth > 0) probe_queue(pages, options.queue_depth);
    // After this sync all that is found here is on the medium, whoever wrote it. An earlier process whose sync failed may have
    // left pages in memory that the medium lacks, so the cache is dropped.
    TA_RETURN_IF_ERROR(sync_found(pages));
    files->drop_cache(fd);
    TA_RETURN_IF_ERROR(scan(options.queue_depth));
    // The old superblock says that records may be torn, so it stays until those are erased.
    TA_RETURN_IF_ERROR(check_wanted());
    TA_RETURN_IF_ERROR(erase_refused());
    TA_RETURN_IF_ERROR(write_superblock(pages));
    return sync_file();  // before any record has a generation of this open
}

// The system reports a failed write-back to one sync only, so the sync of the next open would succeed. The mark tells that open to
// read all records.
Status DiskFile::sync_found(DirectBuffer& pages) {
    Status synced = sync_file();
    const bool is_mine = locked_by_ != 0 || !progress_->abandoned;
    if (synced.ok() || doubtful_ || !is_mine) return synced;
    Superblock s = found_;
    s.state = uint64_t(SessionState::kSyncFailed);
    seal_superblock(s, pages.data());
    if (write_page(pages, superblock_offset(s.opens)).ok()) (void)sync_file();
    return synced;
}

Status DiskFile::sync_file() {
    const int r = retry([&] { return files->fsync(fd); });
    progress_->step();
    return r < 0 ? io_failure(r, "fsync of", path_) : Status();
}

// Space for the whole file, so that no write can run out of it later.
Status DiskFile::preallocate(uint64_t bytes) {
    // Looks for room first: a budget beyond the disk must not take all the space of others before it fails.
    FileInfo info;
    if (files->fstat(fd, info) == 0 && bytes > info.room) return io_failure(-ENOSPC, "preallocating", path_);
    for (uint64_t at = 0; at < bytes; at += kAllocationStep) {
        const int r = retry([&] { return files->fallocate(fd, at, std::min(kAllocationStep, bytes - at)); });
        progress_->step();
        if (r == -EOPNOTSUPP || r == -ENOSYS) {
            const int t = retry([&] { return files->ftruncate(fd, bytes); });
            if (t < 0) return io_failure(t, "truncating", path_);
            degraded.push_back("the file system of " + path_ + " cannot preallocate: writes may run out of space");
            return {};
        }
        if (r < 0) return io_failure(r, "preallocating", path_);
    }
    return {};
}

void DiskFile::start_session(uint64_t opens) {
    opens_ = opens;
    boot_ = files->boot();
    next_generation = opens << kGenerationBits | 1;
}

Status DiskFile::write_superblock(DirectBuffer& pages) {
    return write_page(pages, seal_session(first_state(), 0, pages.data()));
}

uint64_t DiskFile::seal_session(SessionState state, uint64_t unread, uint8_t* page) const {
    Superblock s{};
    s.magic = kSuperblockMagic;
    s.version = kDiskVersion;
    s.fingerprint = context.fingerprint;
    s.file = context.file;
    s.opens = opens_;
    s.boot = boot_;
    s.state = uint64_t(state);
    s.unread_before = unread;
    s.regions = shape.regions;
    s.region_bytes = shape.region_bytes;
    std::copy_n(context.slot_bytes, std::size(s.slot_bytes), s.slot_bytes);
    std::copy_n(context.slot_bytes + std::size(s.slot_bytes), std::size(s.passed_slot_bytes), s.passed_slot_bytes);
    seal_superblock(s, page);
    return superblock_offset(opens_);
}

// Writes pages.data() to `offset`.
Status DiskFile::write_page(DirectBuffer& pages, uint64_t offset, const char* what) {
    const auto write = [&] { return move_page([&] { return files->pwrite(fd, pages.data(), kDiskPage, offset); }); };
    int64_t r = write();
    if (r == -EINVAL && direct) {
        if (Status d = probe_direct(pages); !d.ok()) return d;
        r = write();
    }
    progress_->step();
    return r < 0 ? io_failure(r, what, path_) : Status();
}

// Some file systems take O_DIRECT at open() and refuse the I/O.
Status DiskFile::probe_direct(DirectBuffer& pages) {
    if (!direct) return {};
    const int64_t r = retry([&] { return files->pread(fd, pages.data(1), kDiskPage, 0); });
    progress_->step();
    if (r != -EINVAL) return {};
    if (const int c = files->clear_direct(fd); c < 0) return io_failure(c, "fcntl of", path_);
    direct = false;
    degraded.push_back("the file system of " + path_ + " takes no direct I/O of 4096 bytes");
    return {};
}

// A kernel may lack the parts of io_uring that are needed, or forbid it.
void DiskFile::probe_queue(DirectBuffer& pages, unsigned depth) {
    std::string reason;
    queue = files->make_queue(depth, reason);
    if (!queue) return degraded.push_back(std::move(reason));
    IoOp op;
    op.fd = fd;
    op.data = pages.data(1);
    op.bytes = kDiskPage;
    int64_t r = queue->submit(op);
    const bool taken = r == 0;
    if (taken) {
        IoResult result;
        while (queue->wait({&result, 1}) == 0) {
        }
        r = result.result;
    }
    progress_->step();
    // Other errors of a submitted read are the file's, not io_uring's. They will show up later.
    if (taken && r != -EINVAL && r != -ENOSYS && r != -EOPNOTSUPP && r != -EPERM && r != -EACCES && r != -ECANCELED) return;
    queue.reset();
    degraded.push_back("io_uring cannot read here: " + error_text(r));
}

Status DiskFile::read_superblock(DirectBuffer& pages, uint64_t file_size, const DiskFileOptions& options) {
    const char* path = options.path.c_str();
    if (file_size < kDiskRegionsOffset) return fail(TA_E_CORRUPT, "%s is no file of a disk tier: it has no superblock", path);
    TA_RETURN_IF_ERROR(probe_direct(pages));
    Superblock best{};
    const char* wrong[2] = {nullptr, nullptr};
    bool damaged = false;
    for (int i = 0; i < 2; ++i) {
        const int64_t r = move_page([&] { return files->pread(fd, pages.data(), kDiskPage, uint64_t(i) * kDiskPage); });
        progress_->step();
        if (r < 0) return io_failure(r, "reading the superblock of", options.path);
        Superblock s{};
        wrong[i] = check_superblock(pages.data(), s);
        // The second open overwrites the mark of a file that was made by name.
        mark_unfinished(pages.data(1));
        const bool is_mark = std::memcmp(pages.data(), pages.data(1), kDiskPage) == 0;
        damaged |= wrong[i] && !is_mark && !is_blank(pages.data(), kDiskPage);
        if (!wrong[i] && s.opens > best.opens) best = s;
    }
    if (best.opens == 0) {
        return fail(TA_E_CORRUPT, "%s is no file of a disk tier: superblock 0 %s, superblock 1 %s", path,
                    wrong[0] ? wrong[0] : "is blank", wrong[1] ? wrong[1] : "is blank");
    }
    static_assert(std::size(Superblock().slot_bytes) + std::size(Superblock().passed_slot_bytes) == kSlotClasses);
    if (best.fingerprint != options.fingerprint ||
        !std::equal(std::begin(best.slot_bytes), std::end(best.slot_bytes), options.slot_bytes) ||
        !std::equal(std::begin(best.passed_slot_bytes), std::end(best.passed_slot_bytes),
                    options.slot_bytes + std::size(best.slot_bytes)))
        return fail(TA_E_INVALID, "%s belongs to a pool with other settings (fingerprint %016llx)", path,
                    (unsigned long long)best.fingerprint);
    SlotMap::Shape s = shape;
    s.regions = best.regions;
    s.region_bytes = best.region_bytes;
    if (!s.valid() || s.bytes() > UINT64_MAX - kDiskRegionsOffset)
        return fail(TA_E_CORRUPT, "the superblock of %s gives a shape that no file can have", path);
    if (best.opens >= kMostOpens)
        return fail(TA_E_LIMIT, "%s was opened %llu times; make a new one", path, (unsigned long long)best.opens);
    if (file_bytes(s) > file_size)
        return fail(TA_E_CORRUPT, "%s has %llu bytes where its superblock says %llu: it was cut off", path,
                    (unsigned long long)file_size, (unsigned long long)file_bytes(s));
    if (file_bytes(s) > options.budget)
        return fail(TA_E_INVALID, "%s has %llu bytes, more than the budget of %llu", path, (unsigned long long)file_bytes(s),
                    (unsigned long long)options.budget);
    shape = s;
    context.file = best.file;
    const auto ended = SessionState(best.state);
    const bool power_may_have_failed = best.boot == 0 || best.boot != files->boot();
    // Records of sessions before that one are doubtful, too: an erased header may be back, in front of newer bytes. A damaged
    // superblock may be that of a later session, which was not closed.
    doubtful_ = damaged || ended == SessionState::kSyncFailed || (ended != SessionState::kClosed && power_may_have_failed);
    found_ = best;
    // A damaged superblock may be of one open more: generations of its records must count as known. The odd step makes the next
    // superblock overwrite the damaged one.
    start_session(best.opens + (damaged ? 3 : 1));
    if (!doubtful_) unread_before = ended == SessionState::kClosed ? best.unread_before : next_generation;
    return {};
}

struct DiskFile::Found {
    RecoveredBlock block;
    uint64_t offset, payload_hash;
    bool refused = false;
};

// Reads the first page of every place where a record can be, `depth` at a time.
Status DiskFile::read_headers(unsigned depth, const SlotMap& map, const HeaderSink& take) {
    std::unique_ptr<IoQueue> blocking;
    if (!queue) {
        blocking = make_blocking_queue(*files);
        depth = 1;
    }
    IoQueue& reader = queue ? *queue : *blocking;
    struct Read {
        Slot slot;
        uint64_t offset;
        int retries;
    };
    std::vector<Read> reads(depth);
    DirectBuffer pages(depth);
    if (!pages.ok()) return fail(TA_E_MEMORY, "no memory to read headers");
    Status failure;
    Slot next{0, 0};
    if (!map.known(next)) next = next_place(map, shape, next);
    std::vector<unsigned> idle(depth);
    for (unsigned i = 0; i < depth; ++i) idle[i] = i;
    const auto submit = [&](unsigned i) {
        IoOp op;
        op.fd = fd;
        op.data = pages.data(i);
        op.bytes = kDiskPage;
        op.offset = reads[i].offset;
        op.user = &reads[i];
        return reader.submit(op);
    };
    const auto give_up = [&](const Read& read, const std::string& why) {
        if (failure.ok())
            failure =
                fail(TA_E_IO, "reading the header of record %u of %s failed: %s", read.slot.index, path_.c_str(), why.c_str());
    };
    while (idle.size() < depth || (failure.ok() && next.index < shape.indices())) {
        while (failure.ok() && !idle.empty() && next.index < shape.indices()) {
            const unsigned i = idle.back();
            reads[i] = {next, kDiskRegionsOffset + map.offset(next), 0};
            if (const int r = submit(i); r < 0) {
                give_up(reads[i], error_text(r).c_str());
                break;
            }
            idle.pop_back();
            next = next_place(map, shape, next);
        }
        if (idle.size() == depth) break;
        IoResult results[16];
        const size_t n = reader.wait(results);
        progress_->step();
        for (size_t k = 0; k < n; ++k) {
            Read& read = *static_cast<Read*>(results[k].user);
            const auto i = unsigned(&read - reads.data());
            int64_t r = results[k].result;
            // -ECANCELED: the kernel has no thread for io_uring.
            if (r == -ECANCELED) r = files->pread(fd, pages.data(i), kDiskPage, read.offset);
            if (is_incomplete(r) && read.retries++ < kMostRetries && submit(i) == 0) continue;
            idle.push_back(i);
            if (r == int64_t(kDiskPage)) {
                take(read.slot, read.offset, pages.data(i));
            } else {
                give_up(read, r < 0 ? error_text(r).c_str() : "only " + std::to_string(r) + " bytes came");
            }
        }
    }
    return failure;
}

// Finds the records that the file has.
Status DiskFile::scan(unsigned depth) {
    const SlotMap map(shape);  // to know which slots exist
    struct Suspect {
        Slot slot;
        const char* why;
    };
    std::vector<Suspect> suspects;
    std::vector<Found> found;
    TA_RETURN_IF_ERROR(read_headers(depth, map, [&](Slot slot, uint64_t offset, const uint8_t* page) {
        RecordHeader h;
        const char* wrong = check_header(page, context, slot.slot_class, offset, h);
        if (!wrong && h.generation >= next_generation) {
            wrong = "has a generation that no write had yet";
            to_erase_.push_back(offset);  // some later session would take it
        }
        if (!wrong) {
            found.push_back({{slot, identity_of(h), h.generation, more_keys_of(page)}, offset, h.payload_hash});
        } else if (h.magic == kRecordMagic || h.file == context.file || h.offset == offset) {
            // Any other page is payload of a record of another class, perhaps an erased one. The fingerprint tells nothing: a
            // slot's trailer has it at the same offset as a header.
            suspects.push_back({slot, wrong});
        }
    }));
    TA_RETURN_IF_ERROR(keep_whole(found));
    std::vector<int8_t> class_of(shape.regions, -1);
    for (const Found& f : found) {
        if (f.refused) continue;
        class_of[f.block.slot.index / SlotMap::kIndicesPerRegion] = int8_t(f.block.slot.slot_class);
        recovered.push_back(f.block);
    }
    std::sort(recovered.begin(), recovered.end(),
              [](const RecoveredBlock& a, const RecoveredBlock& b) { return a.slot.index < b.slot.index; });
    for (const Suspect& s : suspects) {
        // In a region of another class these are bytes of blocks, not headers.
        const int8_t c = class_of[s.slot.index / SlotMap::kIndicesPerRegion];
        if (c >= 0 && c != int8_t(s.slot.slot_class)) continue;
        stale.push_back(s.slot);
        refuse(s.slot, kDiskRegionsOffset + map.offset(s.slot), s.why);
    }
    return {};
}

void DiskFile::refuse(Slot slot, uint64_t offset, const char* why) {
    if (++refused_count > kMostRefusals) return;
    refused.push_back("record " + std::to_string(slot.index) + " at offset " + std::to_string(offset) + " " + why);
}

// A power failure leaves any mixture of what was written since the last sync: an incomplete record, a record that was erased,
// or an erased header of any age in front of newer bytes. So after one every record is read, and counts only if it is whole. A
// record that competes with an older one is always read: both have a key in common, or lie in one region with different
// classes.
Status DiskFile::keep_whole(std::vector<Found>& found) {
    std::sort(found.begin(), found.end(),
              [](const Found& a, const Found& b) { return a.block.generation > b.block.generation; });
    std::vector<std::pair<BlockKey, uint32_t>> bearers;    // of keys, the latest first
    std::vector<std::pair<uint32_t, uint32_t>> in_region;  // likewise of regions
    for (uint32_t i = 0; i < found.size(); ++i) {
        const RecoveredBlock& b = found[i].block;
        if (b.identity.key != BlockKey{}) bearers.emplace_back(b.identity.key, i);
        for (const BlockKey& key : b.more_keys) bearers.emplace_back(key, i);
        in_region.emplace_back(b.slot.index / SlotMap::kIndicesPerRegion, i);
    }
    std::sort(bearers.begin(), bearers.end());
    std::sort(in_region.begin(), in_region.end());
    std::vector<bool> in_the_way(found.size());
    for (size_t i = 0; i + 1 < bearers.size(); ++i) {
        if (bearers[i].first == bearers[i + 1].first && bearers[i].second != bearers[i + 1].second)
            in_the_way[bearers[i].second] = true;
    }
    const auto slot_class = [&](size_t i) { return found[in_region[i].second].block.slot.slot_class; };
    for (size_t i = 0, end = 0; i < in_region.size(); i = end) {
        bool mixed = false;
        for (end = i; end < in_region.size() && in_region[end].first == in_region[i].first; ++end)
            mixed |= slot_class(end) != slot_class(i);
        for (size_t k = i; mixed && k < end; ++k) in_the_way[in_region[k].second] = true;
    }
    DirectBuffer pages(size_t(std::ranges::max(shape.stride) / kDiskPage));
    if (!pages.ok()) return fail(TA_E_MEMORY, "no memory to read a record");
    for (uint32_t i = 0; i < found.size(); ++i) {
        const Record record = in_the_way[i] || doubtful_ ? look_at(found[i], pages) : Record::kWhole;
        if (record == Record::kWhole) continue;
        found[i].refused = true;
        const bool is_torn = record == Record::kTorn;
        if (is_torn) {
            to_erase_.push_back(found[i].offset);
        } else {
            // It may be whole, so it stays until its slot is used, and the next open reads it again.
            stale.push_back(found[i].block.slot);
            has_unread_ = true;
        }
        refuse(found[i].block.slot, found[i].offset, is_torn ? "is not all there" : "cannot be read");
    }
    // A region serves one class at a time: records of another class are older, and were erased.
    std::vector<int8_t> class_of(shape.regions, -1);
    for (Found& f : found) {
        int8_t& c = class_of[f.block.slot.index / SlotMap::kIndicesPerRegion];
        if (f.refused) continue;
        if (c < 0) c = int8_t(f.block.slot.slot_class);
        if (c == int8_t(f.block.slot.slot_class)) continue;
        f.refused = true;
        to_erase_.push_back(f.offset);  // later its bytes are those of other records
        refuse(f.block.slot, f.offset, "lies among blocks of another class");
    }
    return {};
}

// Erases valid headers of refused records, which a later session would take for whole ones. If the header lies within a whole
// record by now, it stays.
Status DiskFile::erase_refused() {
    if (to_erase_.empty()) return {};
    const SlotMap map(shape);
    std::vector<std::pair<uint64_t, uint64_t>> whole;  // [first, second) of the file
    for (const RecoveredBlock& b : recovered) {
        const uint64_t offset = kDiskRegionsOffset + map.offset(b.slot);
        whole.emplace_back(offset, offset + record_bytes(context.slot_bytes[b.slot.slot_class]));  // its slot may be longer
    }
    std::sort(whole.begin(), whole.end());
    DirectBuffer zeros(2);
    if (!zeros.ok()) return fail(TA_E_MEMORY, "no memory for two pages");
    for (const uint64_t offset : to_erase_) {
        const auto next = std::upper_bound(whole.begin(), whole.end(), std::pair(offset, UINT64_MAX));
        if (next != whole.begin() && offset < std::prev(next)->second) continue;
        TA_RETURN_IF_ERROR(write_page(zeros, offset, "erasing a refused record of"));
    }
    return sync_file();
}

DiskFile::Record DiskFile::look_at(const Found& record, DirectBuffer& pages) {
    const size_t slot_bytes = context.slot_bytes[record.block.slot.slot_class];
    const size_t bytes = size_t(round_up(slot_bytes, kDiskPage));
    int retries = 0;
    for (size_t at = 0; at < bytes;) {
        const int64_t r = files->pread(fd, pages.data() + at, bytes - at, record.offset + kDiskPage + at);
        progress_->step();
        const bool interrupted = r == -EINTR || r == -EAGAIN;
        // Direct I/O continues at whole pages only.
        const size_t done = r > 0 ? size_t(r) / kDiskPage * kDiskPage : 0;
        if ((done == 0 && !interrupted) || (done == 0 && ++retries > kMostRetries)) return Record::kUnreadable;
        at += done;
    }
    return hash_bytes(pages.data(), slot_bytes) == record.payload_hash ? Record::kWhole : Record::kTorn;
}

}  // namespace ta
