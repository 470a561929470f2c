// The disk tier: blocks as records of one preallocated file, read and written past the page cache. Anonymous files are gone
// with the process, however it ends; a persistent one brings its blocks back, kill -9 included.
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
    std::string path;                      // persistent: the file; else the folder of a file without a name
    bool persistent = false;               // mode 0600; an existing file must be of this user, this mode and this pool
    uint64_t budget = 0;                   // bytes of the file. One that exists keeps its size, which must be within
    size_t slot_bytes[kSlotClasses] = {};  // by PageKind; 0: no such blocks
    uint64_t fingerprint = 0;              // of the pool
    BlockCheck check;                      // of what is read, beside the record's own hash; may be empty
    BlockCheck check_found;                // likewise, of records that earlier sessions wrote
    Device* device = nullptr;              // whose memory requests may name; outlives the tier

    bool use_uring = true;                        // where there is one; else threads with pread and pwrite
    unsigned threads = 0;                         // 0: 4 with io_uring, 8 without
    uint64_t buffer_bytes = 64 << 20;             // of host memory: what is in flight. At least one record for each thread
    std::chrono::milliseconds deadline{10000};    // for one I/O; then TA_E_IO
    std::chrono::milliseconds retry_after{1000};  // until a read-only tier tries to write again
};

class DiskTier final : public Tier {
  public:
    // TA_E_INVALID: the file is not one of this pool, or not safe to use. TA_E_CORRUPT: it is not a file of a disk tier, or
    // damaged as a whole. TA_E_BUSY: in use. TA_E_TIER_FULL: no space. TA_E_IO.
    static Result<std::unique_ptr<DiskTier>> open(std::shared_ptr<FileSystem> files, const DiskTierOptions& options);
    // A file that open() made goes with the tier, as if nothing had been, unless this is called: when all else is there too.
    void keep_file() { engine_->keep_file(); }
    // Cancels what is queued, and returns when every client was told of every request.
    ~DiskTier() override;

    // Of a block, 0 for a class that the tier does not have.
    size_t slot_bytes(uint8_t slot_class) const;
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override { return engine_->acquire(wanted); }
    // A slot that requests still work on is free for others when they are done with it; in a persistent tier when its record
    // was erased, a moment later.
    void release(std::span<const Slot> slots) override { engine_->release(slots); }
    void retire(std::span<const Slot> slots) override { engine_->retire(slots); }
    bool holds(Slot slot) const override { return engine_->holds(slot); }
    // Makes room of retired slots, with a flush. False: there were none, or the flush failed.
    bool reclaim(std::chrono::milliseconds patience) { return engine_->reclaim(patience); }
    // Until no record is being erased, or time is up; false then.
    bool wait_for_erased(std::chrono::milliseconds patience) { return engine_->wait_for_erased(patience); }
    uint8_t* address(Slot) const override { return nullptr; }
    // All requests, or none on failure. They are done in any order. Slots are written whole, and while one is written nothing
    // else may be asked of it: TA_E_BUSY; reading what was never written is TA_E_STATE.
    Result<DiskBatch> submit(std::span<const DiskRequest> requests, DiskClient& client) {
        return engine_->submit(requests, client);
    }
    // Requests of the batch that did not finish yet complete as cancelled, soon, whatever the disk does.
    void cancel(DiskBatch batch) { engine_->cancel(batch); }
    TierStats stats() const override;
    TierHealth health() const override { return engine_->health(); }
    std::span<const std::string> degraded() const override { return engine_->file().degraded; }

    // The blocks that a persistent file brought along. Their slots are acquired; release those that nobody wants. Their
    // bytes are checked when they are read.
    std::span<const RecoveredBlock> recovered() const { return engine_->file().recovered; }
    // Records that were not taken, a sentence each (the first ones), and how many there were.
    std::span<const std::string> refused() const { return engine_->file().refused; }
    uint64_t refused_count() const { return engine_->file().refused_count; }
    // Writes that completed survive a power failure when this returns OK. A kill of the process they survive anyway. Where a
    // sync fails, what it was to cover is read back and written again before a later one can succeed; if the file does not have
    // it any more, flush() fails with TA_E_IO until the slot is released.
    Status flush() { return engine_->flush(); }
    bool direct_io() const { return engine_->file().direct; }
    bool io_uring() const { return engine_->io_uring(); }

  private:
    explicit DiskTier(std::shared_ptr<DiskEngine> engine, uint64_t budget) : engine_(std::move(engine)), budget_(budget) {}
    const std::shared_ptr<DiskEngine> engine_;
    const uint64_t budget_;
};

}  // namespace ta
