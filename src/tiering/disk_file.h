// The file of a disk tier: made or opened, checked, locked, and what it holds. Everything here happens once, before the tier
// serves anything; the hot path is disk.cpp's.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "src/io/file_system.h"
#include "src/tiering/disk_format.h"

namespace ta {

struct DiskFileOptions {
    std::string path;  // of the file where it is persistent, else of the folder that the nameless file is made in
    bool persistent = false;
    uint64_t budget = 0;
    size_t slot_bytes[kSlotClasses] = {};
    uint64_t fingerprint = 0;
    unsigned queue_depth = 32;  // 0: no io_uring
};

// A block that a persistent file held when it was opened. Its slot is acquired.
struct RecoveredBlock {
    Slot slot;
    BlockIdentity identity;
    uint64_t generation = 0;
};

// Between the thread that opens a file and the one that waits for it.
struct OpeningProgress {
    std::atomic<uint64_t> steps{0};      // grows with every operation that returned: slow is not stuck
    std::atomic<bool> abandoned{false};  // nobody waits any more
};

class DiskFile {
  public:
    // A failure leaves nothing behind but, at worst, `path`.new, which the next call takes over.
    static Result<std::unique_ptr<DiskFile>> open(std::shared_ptr<FileSystem> files, const DiskFileOptions& options,
                                                  OpeningProgress& progress);
    ~DiskFile();
    DiskFile(const DiskFile&) = delete;
    DiskFile& operator=(const DiskFile&) = delete;

    std::shared_ptr<FileSystem> files;
    int fd = -1;
    bool persistent = false, direct = false;
    std::unique_ptr<IoQueue> queue;  // the first one that was found to work; nullptr: there is no io_uring
    SlotMap::Shape shape;
    RecordContext context;
    uint64_t next_generation = 1;
    std::vector<RecoveredBlock> recovered;
    // Records that were refused: what is wrong with the first ones, and how many there are. Their slots are free.
    std::vector<std::string> refused;
    uint64_t refused_count = 0;
    std::vector<std::string> degraded;

  private:
    struct Pages;
    explicit DiskFile(std::shared_ptr<FileSystem> fs) : files(std::move(fs)) {}

    Status make_nameless(const DiskFileOptions& options);
    Status make_persistent(const DiskFileOptions& options, bool& exists);
    Status open_existing(const DiskFileOptions& options);
    Status preallocate(uint64_t bytes);
    Status write_superblock(Pages& pages, uint64_t opens);
    Status read_superblock(Pages& pages, uint64_t file_size, const DiskFileOptions& options);
    Status probe_direct(Pages& pages);
    void probe_queue(Pages& pages, unsigned depth);
    Status scan(unsigned depth);
    int open_file(const char* path, int flags, bool count_missing_direct);
    void close_file();
    Status check_wanted() const;
    int lock();

    OpeningProgress* progress_ = nullptr;
    pid_t locked_by_ = 0;  // the process that locked the file
    std::string path_;
};

}  // namespace ta
