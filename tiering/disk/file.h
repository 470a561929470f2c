// The file of a disk tier: made or opened, checked, locked, and what it holds. Everything here happens once, before the tier
// serves anything; the hot path is disk_engine.cpp's.
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
    std::string path;  // of the file where it is persistent, else of the folder that the nameless file is made in
    bool persistent = false;
    uint64_t budget = 0;
    size_t slot_bytes[kSlotClasses] = {};
    uint64_t fingerprint = 0;
    unsigned queue_depth = 32;  // 0: no io_uring
};

// Between the thread that opens a file and the one that waits for it.
struct OpeningProgress {
    using Clock = std::chrono::steady_clock;
    std::atomic<Clock::time_point> last{Clock::now()};  // when an operation returned: slow is not stuck
    std::atomic<bool> abandoned{false};                 // nobody waits any more
    void step() { last = Clock::now(); }
};

class DiskFile {
  public:
    // A failure leaves nothing behind but, at worst, an unfinished file under another name, which the next call takes over.
    static Result<std::unique_ptr<DiskFile>> open(std::shared_ptr<FileSystem> files, const DiskFileOptions& options,
                                                  OpeningProgress& progress);
    // Removes a persistent file that open() made, unless keep() was called; it has been locked all the time.
    ~DiskFile();
    DiskFile(const DiskFile&) = delete;
    DiskFile& operator=(const DiskFile&) = delete;

    std::shared_ptr<FileSystem> files;
    void keep() { made_ = false; }
    // Does the work of the destructor, for a thread that may wait for it.
    void close();
    // The superblock of this session, in that state, and its place.
    uint64_t seal_session(SessionState state, uint8_t* page) const;

    int fd = -1;
    bool persistent = false, direct = false;
    std::unique_ptr<IoQueue> queue;  // the first one that was found to work; nullptr: there is no io_uring
    SlotMap::Shape shape;
    RecordContext context;
    uint64_t next_generation = 1;
    // Of two records under one key both are here, the later one only if it was read and is whole.
    std::vector<RecoveredBlock> recovered;
    // Records that were refused: what is wrong with the first ones, and how many there are. Their slots are free.
    std::vector<std::string> refused;
    uint64_t refused_count = 0;
    std::vector<Slot> stale;  // the slots of refused records: their headers may still be there
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
    Status erase_torn();
    Status sync_file();
    int create(const char* path);
    int open_file(const char* path, int flags);
    bool is_named(const char* path) const;
    void start_over();
    Status check_wanted() const;
    int lock();

    OpeningProgress* progress_ = nullptr;
    uint64_t opens_ = 0, boot_ = 0;
    bool doubtful_ = false;       // records may not be all there
    std::vector<uint64_t> torn_;  // offsets of those that are not
    pid_t locked_by_ = 0;         // the process that locked the file
    bool made_ = false;           // the file got its name from here, and nobody wants to keep it yet
    std::string path_;
};

}  // namespace ta
