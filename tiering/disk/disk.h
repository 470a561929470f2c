// The disk tier: blocks are records of one preallocated file, read and written past the page cache. An anonymous file is gone
// when the process ends, however it ends. A persistent file brings its blocks back, even after kill -9.
#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/io/file_system.h"
#include "tiering/disk/engine.h"

namespace ta {

struct DiskTierOptions {
    std::string path;                      // the file if persistent, else the folder for a file without a name
    bool persistent = false;               // mode 0600; an existing file must be of this user, this mode and this pool
    uint64_t budget = 0;                   // bytes of the file. An existing file keeps its size, which must be within the
                                           // budget
    size_t slot_bytes[kSlotClasses] = {};  // by PageKind; 0: no such blocks
    uint64_t fingerprint = 0;              // of the pool
    BlockCheck check;                      // checks what is read, beside the record's own hash; may be empty
    BlockCheck check_found;                // checks records that earlier sessions wrote, too; may be empty
    Device* device = nullptr;              // requests may name its memory; outlives the tier

    bool use_uring = true;                        // if available; else threads with pread and pwrite
    unsigned threads = 0;                         // 0: 4 with io_uring, 8 without
    uint64_t buffer_bytes = 64 << 20;             // host memory for requests in flight; at least one record for each thread
    std::chrono::milliseconds deadline{10000};    // for one I/O; a later one fails with TA_E_IO
    std::chrono::milliseconds retry_after{1000};  // then a read-only tier tries to write again
};

class DiskTier final : public Tier {
  public:
    // TA_E_INVALID: the file is not one of this pool, or not safe to use. TA_E_CORRUPT: it is not a file of a disk tier, or
    // damaged as a whole. TA_E_BUSY: in use. TA_E_TIER_FULL: no space. TA_E_IO.
    static Result<std::unique_ptr<DiskTier>> open(std::shared_ptr<FileSystem> files, const DiskTierOptions& options);
    // open() may have made the file. The tier then removes it at the end, unless keep_file() is called: when the rest of the
    // pool is there.
    void keep_file() { engine_->keep_file(); }
    // Cancels queued requests. Returns when the clients have been told of every request.
    ~DiskTier() override;

    // Bytes of a block; 0 for a class that the tier does not have.
    size_t slot_bytes(uint8_t slot_class) const;
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override { return engine_->acquire(wanted); }
    // If requests still work on a slot, it becomes free when they are done. In a persistent tier it becomes free a moment
    // later, when its record is erased.
    void release(std::span<const Slot> slots) override { engine_->release(slots); }
    void retire(std::span<const Slot> slots) override { engine_->retire(slots); }
    bool holds(Slot slot) const override { return engine_->holds(slot); }
    // True if a killed session may have left the record incomplete, and no request has read it since. flush() says nothing of
    // such records.
    bool is_unread(Slot slot) const { return engine_->is_unread(slot); }
    // Makes room of slots that are free but for what their records have promised: flushes where some are retired, and waits for
    // erasures. False: no slot came free since acquire() was refused.
    bool reclaim(std::chrono::milliseconds patience) { return engine_->reclaim(patience); }
    // Waits until no record is being erased. False: time is up.
    bool wait_for_erased(std::chrono::milliseconds patience) { return engine_->wait_for_erased(patience); }
    uint8_t* address(Slot) const override { return nullptr; }
    // Submits all requests, or none on failure; they are done in any order. A slot is written whole. A request to a slot that
    // is being written is TA_E_BUSY, reading a slot that was never written TA_E_STATE.
    Result<DiskBatch> submit(std::span<const DiskRequest> requests, DiskClient& client) {
        return engine_->submit(requests, client);
    }
    // Unfinished requests of the batch complete as cancelled, soon, whatever the disk does.
    void cancel(DiskBatch batch) { engine_->cancel(batch); }
    TierStats stats() const override;
    TierHealth health() const override { return engine_->health(); }
    std::span<const std::string> degraded() const override { return engine_->file().degraded; }

    // The blocks that a persistent file brought along. Their slots are acquired; release those that nobody wants. Their bytes
    // are checked only when they are read.
    std::span<const RecoveredBlock> recovered() const { return engine_->file().recovered; }
    // One sentence for each refused record, of the first ones only. refused_count() counts all.
    std::span<const std::string> refused() const { return engine_->file().refused; }
    uint64_t refused_count() const { return engine_->file().refused_count; }
    // When this returns OK, writes that completed before survive a power failure. (They survive a kill of the process anyway.)
    // If a sync fails, the next flush() first reads back and rewrites the records that it covered. If the file has lost one of
    // them, flush() fails with TA_E_IO until that slot is released.
    Status flush() { return engine_->flush(); }
    bool direct_io() const { return engine_->file().direct; }
    bool io_uring() const { return engine_->io_uring(); }

  private:
    explicit DiskTier(std::shared_ptr<DiskEngine> engine, uint64_t budget) : engine_(std::move(engine)), budget_(budget) {}
    const std::shared_ptr<DiskEngine> engine_;
    const uint64_t budget_;
};

}  // namespace ta
