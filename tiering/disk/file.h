// The file of a disk tier: makes or opens it, checks it, locks it, and finds its records. All of this happens once, before the
// tier serves requests; requests are engine.cpp's.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "src/io/file_system.h"
#include "tiering/disk/format.h"

namespace ta {

struct DiskFileOptions {
    std::string path;  // if persistent: of the file; else of the folder in which the nameless file is made
    bool persistent = false;
    uint64_t budget = 0;
    size_t slot_bytes[kSlotClasses] = {};
    uint64_t fingerprint = 0;
    unsigned queue_depth = 32;  // 0: no io_uring
};

// Shared by the thread that opens a file and the one that waits for it.
struct OpeningProgress {
    using Clock = std::chrono::steady_clock;
    std::atomic<Clock::time_point> last{Clock::now()};  // when the last system call returned: slow is not stuck
    std::atomic<bool> abandoned{false};                 // nobody waits any more
    void step() { last = Clock::now(); }
};

class DiskFile {
  public:
    // On failure nothing is left but, at worst, an unfinished file under another name, which the next call takes over.
    static Result<std::unique_ptr<DiskFile>> open(std::shared_ptr<FileSystem> files, const DiskFileOptions& options,
                                                  OpeningProgress& progress);
    // Removes a persistent file that open() made, unless keep() was called; it has been locked all the time.
    ~DiskFile();
    DiskFile(const DiskFile&) = delete;
    DiskFile& operator=(const DiskFile&) = delete;

    std::shared_ptr<FileSystem> files;
    void keep() { made_ = false; }
    // Does the work of the destructor, in a thread that can afford to wait.
    void close();
    // The state of this session while it is open. kSyncFailed: records that could not be read may be incomplete.
    SessionState first_state() const { return has_unread_ ? SessionState::kSyncFailed : SessionState::kOpen; }
    // Writes the superblock of this session, in that state, to `page`. Returns its offset in the file.
    uint64_t seal_session(SessionState state, uint64_t unread, uint8_t* page) const;

    int fd = -1;
    bool persistent = false, direct = false;
    std::unique_ptr<IoQueue> queue;  // the one that was probed; nullptr: there is no io_uring
    SlotMap::Shape shape;
    RecordContext context;
    uint64_t next_generation = 1;
    // Records of earlier generations may be incomplete, since the session that wrote them may have been killed after a failed
    // sync. Nothing in their headers tells.
    uint64_t unread_before = 0;
    // If two records have one key, both are here; the later one only if it was read and is whole.
    std::vector<RecoveredBlock> recovered;
    // Refused records: what is wrong with each of the first ones, and how many there are. Their slots are free.
    std::vector<std::string> refused;
    uint64_t refused_count = 0;
    std::vector<Slot> stale;  // the slots of refused records whose headers are still there
    std::vector<std::string> degraded;

  private:
    class DirectBuffer;
    explicit DiskFile(std::shared_ptr<FileSystem> fs) : files(std::move(fs)) {}

    // The outcome of an attempt at a persistent file. kAgain: another process was quicker.
    enum class Attempt { kMade, kFound, kAgain };

    Status make_anonymous(const DiskFileOptions& options);
    Status open_persistent(const DiskFileOptions& options);
    Result<Attempt> attempt(const DiskFileOptions& options);
    Result<Attempt> lock_found(const DiskFileOptions& options);
    Result<Attempt> make_persistent(const DiskFileOptions& options);
    Result<Attempt> make_by_name(const DiskFileOptions& options);
    Status complete(const DiskFileOptions& options);
    Result<Attempt> finish_making();
    Status read_found(const DiskFileOptions& options);
    Status lay_out(const DiskFileOptions& options);
    Status preallocate(uint64_t bytes);
    Status write_page(DirectBuffer& pages, uint64_t offset, const char* what = "writing the superblock of");
    Status write_superblock(DirectBuffer& pages);
    Status read_superblock(DirectBuffer& pages, uint64_t file_size, const DiskFileOptions& options);
    void start_session(uint64_t opens);
    Status probe_direct(DirectBuffer& pages);
    void probe_queue(DirectBuffer& pages, unsigned depth);
    using HeaderSink = std::function<void(Slot slot, uint64_t offset, const uint8_t* page)>;
    Status read_headers(unsigned depth, const SlotMap& map, const HeaderSink& take);
    Status scan(unsigned depth);
    struct Found;
    Status keep_whole(std::vector<Found>& found);
    enum class Record { kWhole, kTorn, kUnreadable };
    Record look_at(const Found& record, DirectBuffer& pages);
    void refuse(Slot slot, uint64_t offset, const char* why);
    Status erase_refused();
    Status sync_file();
    Status sync_found(DirectBuffer& pages);
    int create(const char* path);
    int open_file(const char* path, int flags);
    bool is_named(const char* path) const;
    void start_over();
    Status check_wanted() const;
    int lock();

    OpeningProgress* progress_ = nullptr;
    uint64_t opens_ = 0, boot_ = 0;
    Superblock found_{};              // of the session before this one
    bool doubtful_ = false;           // records may be incomplete
    bool has_unread_ = false;         // some of them could not be read
    std::vector<uint64_t> to_erase_;  // offsets of refused records whose headers are valid
    pid_t locked_by_ = 0;             // the process that locked the file
    bool made_ = false;               // this object named the file, and keep() was not called yet
    std::string path_;
};

}  // namespace ta
