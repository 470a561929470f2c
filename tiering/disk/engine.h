// Runs a disk tier: a few threads move records between the file and buffers of their own, and one supervises them. I/O never
// touches a client's memory, so an operation that the disk does not finish can be given up: its client is told. Its buffer and
// its slot stay out of use until the operating system is done with them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "src/core/device.h"
#include "src/io/file_system.h"
#include "tiering/disk/file.h"
#include "tiering/store/slot_map.h"

namespace ta {

class DiskEngine {
  public:
    struct Options {
        unsigned threads = 2, depth = 16;  // buffers, and so operations in flight, of all threads together
        std::chrono::milliseconds deadline{10000}, retry_after{1000};
        BlockCheck check, check_found;
        Device* device = nullptr;  // copies from and to the buffers, until stop()
    };
    static Result<std::shared_ptr<DiskEngine>> create(std::unique_ptr<DiskFile> file, Options options);
    ~DiskEngine();
    DiskEngine(const DiskEngine&) = delete;
    DiskEngine& operator=(const DiskEngine&) = delete;

    // The threads own shares of the engine, for as long as the operating system keeps one of them. Call stop() even if start()
    // fails.
    static Status start(const std::shared_ptr<DiskEngine>& engine);
    void stop();

    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted);
    void release(std::span<const Slot> slots);
    void retire(std::span<const Slot> slots);
    bool holds(Slot slot) const;
    bool is_unread(Slot slot) const;
    bool reclaim(std::chrono::milliseconds patience);
    bool wait_for_erased(std::chrono::milliseconds patience);
    Result<DiskBatch> submit(std::span<const DiskRequest> requests, DiskClient& client);
    void cancel(DiskBatch batch);
    Status flush();
    void keep_file() { file_->keep(); }
    TierStats stats() const;
    TierHealth health() const;
    const DiskFile& file() const { return *file_; }
    bool io_uring() const { return uring_; }

  private:
    using Clock = std::chrono::steady_clock;
    using Lock = std::unique_lock<std::mutex>;

    struct SlotInfo {
        uint64_t generation = 0;  // of the record
        uint64_t written_at = 0;  // persistent: writes_ when the slot was last written or erased
        uint32_t busy = 0;        // operations that the operating system or a thread still works on
        uint8_t slot_class = 0;
        bool acquired = false, released = false;
        bool valid = false;    // the slot is stored
        bool on_disk = false;  // persistent: the file may hold a header here
        bool writing = false;
        bool doubtful = false;  // persistent: a sync that covered the record failed; it must be written again
        bool lost = false;      // read back for that, the record was damaged
        bool whole = false;     // persistent: it was read in this session
    };

    struct Op {
        enum class Kind : uint8_t { kRead, kWrite, kErase, kRewrite, kSync, kMark };
        enum class State : uint8_t { kQueued, kCopying, kInFlight, kFinishing };
        Kind kind = Kind::kRead;
        bool has_slot() const { return kind < Kind::kSync; }
        SessionState mark = SessionState::kOpen;  // mark: of the superblock
        State state = State::kQueued;
        bool cancel = false;     // its client wants no more of it
        bool reported = false;   // its client was told; a later result goes to nobody
        bool stalled = false;    // it is beyond its deadline
        bool was_valid = false;  // write: the value to restore if the batch is refused
        DiskRequest request;
        DiskClient* client = nullptr;  // nullptr: the tier's own
        DiskBatch batch = 0;
        uint64_t generation = 0;  // read: expected; write: new
        uint64_t offset = 0;      // of the record in the file
        uint8_t* buffer = nullptr;
        int step = 0, retries = 0;
        IoOp io;
        Clock::time_point started;
        Status refused;  // write: what the check said of the client's bytes
        // Sync: writes_ and synced_ when it started, and the number of slots that had been retired by then.
        uint64_t covers = 0, synced_before = 0, retired_before = 0;
        std::list<Op>::iterator self;
    };
    using Ops = std::list<Op>;

    DiskEngine(std::unique_ptr<DiskFile> file, Options options);
    Status allocate();
    void work(unsigned worker);
    void supervise();
    Op* take();
    void start_op(Lock& lock, IoQueue& queue, Op& op, unsigned& flying);
    bool next_step(Op& op);
    void run_step(Lock& lock, IoQueue& queue, Op& op, unsigned& flying);
    void on_result(Lock& lock, IoQueue& queue, Op& op, int64_t result, unsigned& flying);
    bool advance(Op& op, int64_t& result);
    void finish(Lock& lock, Op& op, int64_t error);
    void report(Lock& lock, Op& op, Status status, bool cancelled);
    Status stage_write(Op& op);
    Status check_and_copy(const Op& op);
    Status copy(const DiskRequest& request, uint8_t* buffer, bool to_client) const;
    Status io_status(const Op& op, int64_t error) const;
    class SyncTurn;
    Status write_again();
    Status run_own(Ops& ops);
    SessionState end_of_session() const;
    Status mark(SessionState state);
    Status mark_failed_sync();
    void mark_later();
    bool is_syncing() const;
    bool is_synced(uint64_t writes) const;
    bool is_all_synced() const;
    bool is_unread(const SlotInfo& slot) const;
    uint64_t unread_before() const;
    bool is_damaged(const Op& op) const;
    void sync_succeeded(const Op& op);
    void sync_failed(const Op& op, int64_t error);
    void set_doubtful(SlotInfo& slot, bool doubtful);
    void erase_doubtful(uint32_t index);
    int64_t run_blocking(Lock& lock, Op& op);
    void write_failed(int64_t error);
    void write_succeeded();
    void erase_again();
    bool is_erasing() const { return !to_erase_.empty() || erasures_ > 0; }
    void leave_slot(Op& op);
    void free_slot(uint32_t index);
    Status mark(Op& op);
    Result<DiskBatch> enqueue(Ops& ops);
    bool may_not_write() const { return read_only_ || stalled_writes_ > 0; }
    Status refused_write() const;
    Status check_write();
    void unmark(const Op& op);
    Status overdue() const;
    bool give_up_one(Lock& lock, Clock::time_point now);
    Clock::time_point next_deadline() const;
    void wake_workers();
    void drop_queued();

    const std::unique_ptr<DiskFile> file_;
    const Options options_;
    const size_t largest_record_;
    uint8_t* buffers_ = nullptr;
    uint8_t* zeros_ = nullptr;  // a page, to erase headers with
    size_t buffer_bytes_ = 0;
    bool registered_ = false;                       // the buffers, with the device
    std::vector<std::unique_ptr<IoQueue>> queues_;  // by worker
    bool uring_ = false;
    unsigned queue_depth_ = 1;
    std::vector<std::thread> workers_;
    std::thread supervisor_;

    mutable std::mutex mutex_;
    std::condition_variable supervise_, changed_;
    bool stopping_ = false, supervisor_stops_ = false;
    bool supervisor_closes_ = false, is_closed_ = false;  // the file
    bool supervisor_idle_ = false;                        // it waits for no deadline
    unsigned exited_ = 0;

    SlotMap map_;
    std::vector<SlotInfo> slots_;  // by index
    // to_erase_: released slots whose headers are to be erased. not_erased_: slots where that failed. It is tried again when a
    // write succeeds, at a flush, and when slots are wanted after a while. The capacity of both is all slots.
    std::vector<uint32_t> to_erase_, not_erased_;
    uint64_t erasures_ = 0;                     // under way
    uint64_t freed_ = 0;                        // slots, ever
    std::optional<uint64_t> freed_at_refusal_;  // when acquire() last found no room
    // Slots whose blocks have been written elsewhere, oldest first; reclaimed_ counts those before the first one. A record is
    // erased only after a sync that started later has succeeded: until then it may be all that the medium has.
    std::vector<uint32_t> retired_;
    uint64_t retired_of_[kSlotClasses] = {};
    uint64_t reclaimed_ = 0;
    uint64_t writes_ = 0;               // persistent: counts writes and erasures that completed
    uint64_t sync_started_ = 0;         // writes_ when the last sync started
    uint64_t synced_ = 0;               // the highest writes_ that a successful sync covered
    bool syncing_ = false;              // a thread has the turn
    uint64_t doubtful_ = 0, lost_ = 0;  // slots
    int64_t sync_error_ = 0;            // of the last sync that failed
    bool owes_mark_ = false;            // that sync failed after the superblock was last marked with it
    bool has_no_workers_ = false;       // the kernel cancelled an I/O of the ring, for want of threads
    std::vector<uint8_t*> idle_buffers_;
    Ops queued_, active_;
    Ops dropped_;  // queued ones whose clients are yet to be told: cancelled or overdue
    Ops spare_;    // set aside, so that erasing needs no memory
    DiskBatch next_batch_ = 1;
    uint64_t next_generation_ = 1;
    uint64_t outstanding_ = 0;     // requests whose clients have not been told yet
    uint64_t stalled_now_ = 0;     // operations that were given up and are not back
    uint64_t stalled_writes_ = 0;  // of these
    Clock::time_point last_progress_;

    bool read_only_ = false;
    int failed_writes_ = 0;  // in a row
    Clock::time_point retry_at_, erase_again_at_;
    char reason_[sizeof TierHealth::reason] = "";

    TierStats counters_;
};

}  // namespace ta
