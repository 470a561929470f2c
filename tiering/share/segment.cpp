#include "tiering/share/segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

#include "tiering/share/id.h"

namespace ta::share {
namespace {

constexpr char kDirectory[] = "/dev/shm";
constexpr char kNamePrefix[] = "turboattention-";
constexpr uint64_t kMagic = 0x32766d65736174;  // "tasemv2" in little endian
constexpr uint64_t kAllRings = uint64_t{32} << 20;

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

std::string path_of(uint64_t name) {
    char path[64];
    std::snprintf(path, sizeof path, "%s/%s%016llx", kDirectory, kNamePrefix, (unsigned long long)name);
    return path;
}

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

// 512 KiB for up to 8 ranks, so that all of it fits into the 64 MiB that containers give /dev/shm.
uint64_t ring_bytes(uint32_t ranks) {
    const uint64_t rings = std::max<uint64_t>(uint64_t(ranks) * (ranks - 1), 1);
    uint64_t bytes = uint64_t{512} << 10;
    while (bytes > (uint64_t{8} << 10) && bytes * rings > kAllRings) bytes /= 2;
    return bytes;
}

// The file lock of a rank: byte `rank` of the file.
struct flock lock_of(uint32_t rank) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

// All open files with locks. A forked child closes them, and does not inherit their mappings: either would keep the locks of a
// dead parent.
class LockedFiles {
  public:
    static LockedFiles& all() {
        static auto* const files = new LockedFiles;  // lives until the last fork()
        return *files;
    }
    int open(const char* path, int flags) {
        const std::lock_guard lock(mutex_);
        fds_.reserve(fds_.size() + 1);
        const int fd = ::open(path, flags | O_CLOEXEC, 0600);
        if (fd >= 0) fds_.push_back(fd);
        return fd;
    }
    void close(int fd) {
        const std::lock_guard lock(mutex_);
        std::erase(fds_, fd);
        ::close(fd);
    }

  private:
    LockedFiles() {
        (void)pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); },
                             [] {
                                 for (const int fd : all().fds_) ::close(fd);
                                 all().fds_.clear();
                                 all().mutex_.unlock();
                             });
    }
    std::mutex mutex_;
    std::vector<int> fds_;
};

struct OpenFile {
    int fd = -1;
    ~OpenFile() {
        if (fd >= 0) LockedFiles::all().close(fd);
    }
    int release() { return std::exchange(fd, -1); }
};

// Removes segments of processes that were killed before their group was ready.
void remove_forgotten() {
    DIR* const directory = opendir(kDirectory);
    if (!directory) return;
    while (const dirent* entry = readdir(directory)) {
        if (std::strncmp(entry->d_name, kNamePrefix, sizeof kNamePrefix - 1) != 0) continue;
        const std::string path = std::string(kDirectory) + "/" + entry->d_name;
        const OpenFile file{LockedFiles::all().open(path.c_str(), O_RDWR | O_NOFOLLOW)};
        struct flock any {};
        any.l_type = F_WRLCK;
        any.l_whence = SEEK_SET;
        if (file.fd >= 0 && fcntl(file.fd, F_OFD_GETLK, &any) == 0 && any.l_type == F_UNLCK)
            unlinkat(dirfd(directory), entry->d_name, 0);
    }
    closedir(directory);
}

}  // namespace

struct Segment::Header {
    uint64_t magic;
    uint32_t ranks;
    uint32_t reserved;
    uint64_t ring_bytes;
};

namespace {

constexpr size_t kAreasAt = 64;

size_t rings_at(uint32_t ranks) {
    return round_up(kAreasAt + ranks * sizeof(RankArea), 4096);
}

size_t ring_stride(uint64_t bytes) {
    return round_up(sizeof(Ring::Header) + bytes, 64);
}

size_t segment_bytes(uint32_t ranks) {
    return rings_at(ranks) + size_t(ranks) * ranks * ring_stride(ring_bytes(ranks));
}

}  // namespace

// --------------------------------------------------------------------------------------------------------------- ring

namespace {

// Ranks that are threads of one process map a segment once for each, and ThreadSanitizer takes these mappings for different
// memory. What goes through any segment is ordered for it here.
#ifdef __SANITIZE_THREAD__
char g_order;
void note_sent() {
    __tsan_release(&g_order);
}
void note_seen() {
    __tsan_acquire(&g_order);
}
#else
void note_sent() {}
void note_seen() {}
#endif

}  // namespace

void Ring::copy_out(uint64_t at, uint8_t* to, size_t bytes) const {
    const size_t begin = size_t(at % size_), first = std::min<size_t>(bytes, size_ - begin);
    if (first > 0) std::memcpy(to, data_ + begin, first);
    if (bytes > first) std::memcpy(to + first, data_, bytes - first);
}

void Ring::copy_in(uint64_t at, const uint8_t* from, size_t bytes) {
    const size_t begin = size_t(at % size_), first = std::min<size_t>(bytes, size_ - begin);
    if (first > 0) std::memcpy(data_ + begin, from, first);
    if (bytes > first) std::memcpy(data_, from + first, bytes - first);
}

uint64_t Ring::room() const {
    const uint64_t used = header_->head.load(std::memory_order_relaxed) - header_->tail.load(std::memory_order_seq_cst);
    note_seen();
    return used <= size_ ? size_ - used : 0;
}

bool Ring::put(const Record& record, const uint8_t* body) {
    if (room() < sizeof record + record.bytes) return false;
    const uint64_t head = header_->head.load(std::memory_order_relaxed);
    copy_in(head, reinterpret_cast<const uint8_t*>(&record), sizeof record);
    copy_in(head + sizeof record, body, record.bytes);
    note_sent();
    header_->head.store(head + sizeof record + record.bytes, std::memory_order_seq_cst);
    return true;
}

Ring::Next Ring::next(Record& record) const {
    const uint64_t tail = header_->tail.load(std::memory_order_relaxed);
    const uint64_t used = header_->head.load(std::memory_order_seq_cst) - tail;
    note_seen();
    if (used == 0) return Next::kNone;
    if (used > size_ || used < sizeof record) return Next::kDamaged;
    copy_out(tail, reinterpret_cast<uint8_t*>(&record), sizeof record);
    const bool kind = record.kind >= Record::Kind::kPacket && record.kind <= Record::Kind::kBytes;
    return kind && record.bytes <= used - sizeof record ? Next::kRecord : Next::kDamaged;
}

void Ring::read(const Record& record, uint8_t* body) const {
    copy_out(header_->tail.load(std::memory_order_relaxed) + sizeof record, body, record.bytes);
}

void Ring::drop(const Record& record) {
    note_sent();
    header_->tail.store(header_->tail.load(std::memory_order_relaxed) + sizeof record + record.bytes,
                        std::memory_order_seq_cst);
}

bool Ring::starve(size_t bytes) {
    header_->starved.store(1, std::memory_order_seq_cst);
    return room() >= sizeof(Record) + bytes;
}

// ------------------------------------------------------------------------------------------------------------ segment

Segment::Segment(int file, std::string path, uint8_t* memory, size_t bytes, uint32_t rank, uint32_t ranks)
    : file_(file), path_(std::move(path)), memory_(memory), bytes_(bytes), rank_(rank), ranks_(ranks) {}

Segment::~Segment() {
    munmap(memory_, bytes_);
    LockedFiles::all().close(file_);
}

Segment::Header& Segment::header() const {
    return *reinterpret_cast<Header*>(memory_);
}

RankArea& Segment::area(uint32_t rank) const {
    return reinterpret_cast<RankArea*>(memory_ + kAreasAt)[rank];
}

Ring Segment::ring(uint32_t from, uint32_t to) const {
    const uint64_t bytes = ring_bytes(ranks_);
    uint8_t* const at = memory_ + rings_at(ranks_) + (size_t(from) * ranks_ + to) * ring_stride(bytes);
    return {reinterpret_cast<Ring::Header*>(at), at + sizeof(Ring::Header), bytes};
}

Result<std::shared_ptr<Segment>> Segment::join(uint64_t name, uint32_t rank, uint32_t ranks) {
    const std::string path = path_of(name);
    const size_t bytes = segment_bytes(ranks);
    OpenFile file;
    struct flock lock = lock_of(rank);
    // The first rank gives the file its name only when it is complete and locked, so nobody sees a part of it.
    for (int tries = 0; file.fd < 0 && tries < 2; ++tries) {
        file.fd = LockedFiles::all().open(path.c_str(), O_RDWR | O_NOFOLLOW);
        if (file.fd >= 0) break;
        if (errno != ENOENT) return fail(TA_E_UNSUPPORTED, "%s cannot be opened: %s", path.c_str(), strerror(errno));
        remove_forgotten();
        OpenFile made{LockedFiles::all().open(kDirectory, O_TMPFILE | O_RDWR)};
        if (made.fd < 0)
            return fail(TA_E_UNSUPPORTED, "memory cannot be shared between processes in %s: %s", kDirectory, strerror(errno));
        // Allocates all pages now: a page that is missing later is a SIGBUS.
        if (const int error = posix_fallocate(made.fd, 0, off_t(bytes)); error != 0)
            return fail(TA_E_MEMORY, "%s has no %zu bytes for a group of %u ranks: %s", kDirectory, bytes, ranks,
                        strerror(error))
                .bytes(bytes);
        const Header header{kMagic, ranks, 0, ring_bytes(ranks)};
        if (pwrite(made.fd, &header, sizeof header, 0) != ssize_t(sizeof header))
            return fail(TA_E_UNSUPPORTED, "%s cannot be written: %s", kDirectory, strerror(errno));
        (void)fcntl(made.fd, F_OFD_SETLK, &lock);
        char link[32];
        std::snprintf(link, sizeof link, "/proc/self/fd/%d", made.fd);
        if (linkat(AT_FDCWD, link, AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) {
            file.fd = made.release();
        } else if (errno != EEXIST) {
            return fail(TA_E_UNSUPPORTED, "%s cannot be made: %s", path.c_str(), strerror(errno));
        }
    }
    if (file.fd < 0) return ended_group();
    struct stat info {};
    Header header{};
    if (fstat(file.fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077) != 0 ||
        pread(file.fd, &header, sizeof header, 0) != ssize_t(sizeof header) || header.magic != kMagic)
        return fail(TA_E_UNSUPPORTED, "%s is not a group's memory of this user and version", path.c_str());
    if (header.ranks != ranks)
        return fail(TA_E_MISMATCH, "ranks is %u; another rank of the group says %u", ranks, header.ranks);
    if (size_t(info.st_size) != bytes || header.ring_bytes != ring_bytes(ranks))
        return fail(TA_E_UNSUPPORTED, "%s is not a group's memory of this version", path.c_str());
    if (fcntl(file.fd, F_OFD_SETLK, &lock) != 0) return fail(TA_E_INVALID, "rank %u has joined the group already", rank);
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
    if (memory == MAP_FAILED)
        return fail(TA_E_MEMORY, "%zu bytes of shared memory cannot be mapped: %s", bytes, strerror(errno));
    (void)madvise(memory, bytes, MADV_DONTFORK);
    std::shared_ptr<Segment> s(new Segment(file.release(), path, static_cast<uint8_t*>(memory), bytes, rank, ranks));
    for (uint32_t r = 0; r < ranks; ++r) {
        const uint32_t state = s->area(r).state;
        const bool gone = state == RankArea::kLeft || (state != RankArea::kAbsent && (r == rank || !s->alive(r)));
        if (!gone) continue;
        s->remove_name();
        return ended_group();
    }
    return s;
}

bool Segment::alive(uint32_t rank) const {
    if (rank == rank_) return true;
    struct flock lock = lock_of(rank);
    return fcntl(file_, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void Segment::ring_bell(uint32_t rank) const {
    RankArea& a = area(rank);
    a.bell.fetch_add(1, std::memory_order_seq_cst);
    if (a.sleeping.load(std::memory_order_seq_cst) != 0)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&a.bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Segment::wait_for_bell(uint32_t heard, Time until) const {
    RankArea& a = area(rank_);
    const auto left = std::clamp<std::chrono::nanoseconds>(until - Clock::now(), {}, std::chrono::hours(1));
    const timespec time{time_t(left.count() / 1000000000), long(left.count() % 1000000000)};
    a.sleeping.store(1, std::memory_order_seq_cst);
    if (a.bell.load(std::memory_order_seq_cst) == heard)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&a.bell), FUTEX_WAIT, heard, &time, nullptr, 0);
    a.sleeping.store(0, std::memory_order_seq_cst);
}

void Segment::remove_name() {
    struct stat here {
    }, there{};
    if (fstat(file_, &here) == 0 && lstat(path_.c_str(), &there) == 0 && here.st_ino == there.st_ino) unlink(path_.c_str());
}

}  // namespace ta::share
