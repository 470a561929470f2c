// The side of the disk tier's engine that clients see, and its supervisor. The side that does the I/O is engine.cpp.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "tiering/disk/engine.h"
#include "tiering/disk/latch.h"

namespace ta {
namespace {

constexpr int kMostFailedWrites = 3;  // in a row, other than for lack of space; then the tier turns read-only

}  // namespace

// Slots -----------------------------------------------------------------------------------------------------------------------

Result<std::vector<Slot>> DiskEngine::acquire(std::span<const uint8_t> wanted) {
    std::lock_guard lock(mutex_);
    if (stopping_) return fail(TA_E_CLOSED, "the disk tier is closed");
    if (!not_erased_.empty() && Clock::now() >= erase_again_at_) erase_again();
    if (may_not_write() && Clock::now() < retry_at_) return refused_write();
    Result<std::vector<Slot>> slots = map_.acquire_all(wanted, TierKind::kDisk);
    if (!slots.ok()) {
        freed_at_refusal_ = freed_;
        return slots;
    }
    for (const Slot s : slots.value()) {
        SlotInfo& slot = slots_[s.index];
        const SlotInfo before = std::exchange(slot, SlotInfo{});
        slot.slot_class = s.slot_class;
        slot.acquired = true;
        slot.written_at = before.written_at;
        slot.on_disk = before.on_disk && before.slot_class == s.slot_class;
    }
    return slots;
}

void DiskEngine::release(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot s : slots) {
        if (!map_.taken(s) || !slots_[s.index].acquired) continue;
        SlotInfo& slot = slots_[s.index];
        slot.acquired = false;
        slot.released = true;
        if (slot.busy == 0) free_slot(s.index);
    }
    if (!to_erase_.empty()) wake_workers();
}

void DiskEngine::retire(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot s : slots) {
        if (!map_.taken(s) || !slots_[s.index].acquired) continue;
        SlotInfo& slot = slots_[s.index];
        slot.acquired = false;
        // A sync that started before the record was written promised nothing. Then the record goes at once: its successor may
        // already be on the medium.
        const bool promised = slot.valid && slot.on_disk && !slot.lost && slot.written_at <= sync_started_;
        if (promised && !is_synced(writes_)) {
            retired_.push_back(s.index);
            ++retired_of_[s.slot_class];
            continue;
        }
        slot.released = true;
        if (slot.busy == 0) free_slot(s.index);
    }
    if (!to_erase_.empty()) wake_workers();
}

// Frees a released slot. The block must not come back with a persistent file, so the header is erased first.
void DiskEngine::free_slot(uint32_t index) {
    SlotInfo& slot = slots_[index];
    slot.valid = false;
    set_doubtful(slot, false);
    lost_ -= slot.lost;
    slot.lost = false;
    if (slot.on_disk) {
        to_erase_.push_back(index);
        return;
    }
    map_.give({index, slot.slot_class});
    ++freed_;
    const SlotInfo before = std::exchange(slot, SlotInfo{});
    slot.slot_class = before.slot_class;
    slot.written_at = before.written_at;
}

bool DiskEngine::holds(Slot slot) const {
    std::lock_guard lock(mutex_);
    return !slots_[slot.index].lost;
}

bool DiskEngine::is_unread(Slot slot) const {
    std::lock_guard lock(mutex_);
    return is_unread(slots_[slot.index]);
}

bool DiskEngine::is_unread(const SlotInfo& slot) const {
    return slot.valid && !slot.whole && slot.generation < file_->unread_before;
}

// For the superblock of a session that closes.
uint64_t DiskEngine::unread_before() const {
    const auto is_unread = [this](const SlotInfo& slot) { return this->is_unread(slot); };
    return std::any_of(slots_.begin(), slots_.end(), is_unread) ? file_->unread_before : 0;
}

bool DiskEngine::reclaim(std::chrono::milliseconds patience) {
    uint64_t before = 0;
    bool has_retired = false;
    {
        std::lock_guard lock(mutex_);
        before = freed_at_refusal_.value_or(freed_);
        if (freed_ != before) return true;
        has_retired = !retired_.empty();
    }
    if (has_retired && !flush().ok()) return false;
    Lock lock(mutex_);
    changed_.wait_for(lock, patience, [&] { return freed_ != before || !is_erasing(); });
    return freed_ != before;
}

bool DiskEngine::wait_for_erased(std::chrono::milliseconds patience) {
    Lock lock(mutex_);
    return changed_.wait_for(lock, patience, [&] { return !is_erasing(); });
}

// Requests --------------------------------------------------------------------------------------------------------------------

Result<DiskBatch> DiskEngine::submit(std::span<const DiskRequest> requests, DiskClient& client) {
    Ops ops;
    for (const DiskRequest& r : requests) {
        Op& op = ops.emplace_back();
        op.kind = r.kind == DiskRequest::Kind::kRead ? Op::Kind::kRead : Op::Kind::kWrite;
        op.request = r;
        op.client = &client;
    }
    return enqueue(ops);
}

Result<DiskBatch> DiskEngine::enqueue(Ops& ops) {
    std::lock_guard lock(mutex_);
    if (stopping_) return fail(TA_E_CLOSED, "the disk tier is closed");
    if (stalled_now_ >= options_.depth) return overdue();
    if (std::any_of(ops.begin(), ops.end(), [](const Op& op) { return op.kind == Op::Kind::kWrite; }))
        TA_RETURN_IF_ERROR(check_write());
    for (auto op = ops.begin(); op != ops.end(); ++op) {
        op->batch = next_batch_;
        Status s = mark(*op);
        if (s.ok()) continue;
        while (op != ops.begin()) unmark(*--op);
        return s;
    }
    if (queued_.empty()) last_progress_ = Clock::now();
    outstanding_ += uint64_t(std::count_if(ops.begin(), ops.end(), [](const Op& op) { return op.client != nullptr; }));
    queued_.splice(queued_.end(), ops);
    wake_workers();
    if (supervisor_idle_) supervise_.notify_one();
    return next_batch_++;
}

// Checks a request and marks its slot.
Status DiskEngine::mark(Op& op) {
    if (!op.has_slot()) return {};
    if (op.kind == Op::Kind::kRewrite) {
        ++slots_[op.request.slot.index].busy;
        return {};
    }
    const DiskRequest& r = op.request;
    if (!map_.taken(r.slot) || !slots_[r.slot.index].acquired)
        return fail(TA_E_STATE, "slot %u of the disk tier is not acquired", r.slot.index);
    SlotInfo& slot = slots_[r.slot.index];
    const size_t bytes = file_->context.slot_bytes[r.slot.slot_class];
    if (!r.memory || r.bytes == 0 || r.offset > bytes || r.bytes > bytes - r.offset)
        return fail(TA_E_INVALID, "a request for bytes %llu ... of a slot of %zu", (unsigned long long)r.offset, bytes);
    if (op.kind == Op::Kind::kRead) {
        if (slot.writing) return fail(TA_E_BUSY, "slot %u of the disk tier is being written", r.slot.index);
        if (!slot.valid) return fail(TA_E_STATE, "slot %u of the disk tier holds no block", r.slot.index);
        op.generation = slot.generation;
    } else {
        if (r.offset != 0 || r.bytes != bytes)
            return fail(TA_E_INVALID, "the disk tier writes whole slots of %zu bytes", bytes);
        if (r.identity.tokens < 1 || r.identity.tokens > 64)
            return fail(TA_E_INVALID, "a block of %u tokens; it has 1..64", r.identity.tokens);
        if (slot.busy > 0) return fail(TA_E_BUSY, "slot %u of the disk tier is in use by another request", r.slot.index);
        op.was_valid = slot.valid;
        slot.valid = false;
        slot.writing = true;
    }
    ++slot.busy;
    return {};
}

void DiskEngine::unmark(const Op& op) {
    if (!op.has_slot()) return;
    SlotInfo& slot = slots_[op.request.slot.index];
    --slot.busy;
    if (op.kind != Op::Kind::kWrite) return;
    slot.writing = false;
    slot.valid = op.was_valid;
}

Status DiskEngine::refused_write() const {
    return fail(TA_E_TIER_FULL, "the disk tier is read-only: %s", reason_).tier(TA_TIER_DISK);
}

// After a while, lets one batch through to a tier that could not be written, to see whether it works again.
Status DiskEngine::check_write() {
    if (!may_not_write()) return {};
    const auto now = Clock::now();
    if (now < retry_at_) return refused_write();
    retry_at_ = now + options_.retry_after;
    return {};
}

void DiskEngine::write_failed(int64_t error) {
    if (!is_lack_of_space(error) && error != -EROFS && ++failed_writes_ < kMostFailedWrites) return;
    read_only_ = true;
    retry_at_ = Clock::now() + options_.retry_after;
    std::snprintf(reason_, sizeof reason_, "writing failed with %s", error_text(error).c_str());
}

void DiskEngine::write_succeeded() {
    read_only_ = false;
    failed_writes_ = 0;
    erase_again();
}

void DiskEngine::erase_again() {
    if (not_erased_.empty()) return;
    to_erase_.insert(to_erase_.end(), not_erased_.begin(), not_erased_.end());
    not_erased_.clear();
    wake_workers();
}

// Tells the client. Gives up the lock meanwhile, so the operation may be gone afterwards.
void DiskEngine::report(Lock& lock, Op& op, Status status, bool cancelled) {
    op.reported = true;
    DiskClient* client = op.client;
    if (!client) return;
    const bool read = op.kind == Op::Kind::kRead;
    if (cancelled) {
        ++counters_.cancelled;
    } else if (status.code() == TA_E_CORRUPT) {
        ++counters_.corrupt;
    } else if (op.stalled) {
        ++counters_.stalled;
    } else if (!status.ok()) {
        ++counters_.failed;
    } else if (read || op.kind == Op::Kind::kWrite) {
        ++(read ? counters_.reads : counters_.writes);
        (read ? counters_.bytes_read : counters_.bytes_written) += op.request.bytes;
    }
    DiskCompletion completion{op.request.tag, cancelled, std::move(status)};
    lock.unlock();
    client->on_done(std::move(completion));
    lock.lock();
    if (--outstanding_ == 0) changed_.notify_all();
}

void DiskEngine::cancel(DiskBatch batch) {
    {
        std::lock_guard lock(mutex_);
        for (auto op = queued_.begin(); op != queued_.end();) {
            const auto next = std::next(op);
            if (op->batch == batch && op->client) {
                op->cancel = true;
                dropped_.splice(dropped_.end(), queued_, op);
            }
            op = next;
        }
        for (Op& op : active_) op.cancel |= op.batch == batch && op.client;
    }
    supervise_.notify_one();
}

void DiskEngine::drop_queued() {
    for (Op& op : queued_) op.cancel = true;
    dropped_.splice(dropped_.end(), queued_);
}

// Syncs ------------------------------------------------------------------------------------------------------------------------

// Linux reports a failed write-back to one sync and drops the pages, so a later sync that succeeds says nothing about them. So
// there is one sync at a time, and after a failed one all that it covered is written again.
class DiskEngine::SyncTurn {
  public:
    // Waits for the sync that others run, which may serve as well.
    explicit SyncTurn(DiskEngine& engine) : engine_(engine) {
        Lock lock(engine_.mutex_);
        const uint64_t wanted = engine_.writes_;
        const auto is_done = [&] { return engine_.is_synced(wanted) && engine_.retired_.empty(); };
        engine_.changed_.wait_for(lock, engine_.options_.deadline, [&] { return is_done() || !engine_.is_syncing(); });
        done_ = is_done();
        has_ = !done_ && !engine_.is_syncing();
        engine_.syncing_ |= has_;
    }
    ~SyncTurn() {
        if (!has_) return;
        std::lock_guard lock(engine_.mutex_);
        engine_.syncing_ = false;
        engine_.changed_.notify_all();
    }
    SyncTurn(const SyncTurn&) = delete;
    SyncTurn& operator=(const SyncTurn&) = delete;
    bool done() const { return done_; }
    bool has() const { return has_; }

  private:
    DiskEngine& engine_;
    bool done_ = false, has_ = false;
};

Status DiskEngine::flush() {
    {
        std::lock_guard lock(mutex_);
        erase_again();
    }
    const SyncTurn turn(*this);
    if (turn.done()) return {};
    if (!turn.has()) return overdue();
    TA_RETURN_IF_ERROR(mark_failed_sync());
    TA_RETURN_IF_ERROR(write_again());
    Ops ops;
    ops.emplace_back().kind = Op::Kind::kSync;
    Status s = run_own(ops);
    bool answers = false;
    {
        std::lock_guard lock(mutex_);
        answers = stalled_now_ == 0;
    }
    if (s.ok()) return s;
    if (answers) {
        (void)mark_failed_sync();
    } else {
        mark_later();
    }
    return s;
}

// The next open of the file then reads all records. Until the mark is written no later flush succeeds: the process may be killed
// after it.
Status DiskEngine::mark_failed_sync() {
    {
        std::lock_guard lock(mutex_);
        if (!owes_mark_) return {};
    }
    return mark(SessionState::kSyncFailed);
}

// Asks for the mark and does not wait: the sync has not been answered, and the process may be killed before it is.
void DiskEngine::mark_later() {
    Ops ops;
    Op& op = ops.emplace_back();
    op.kind = Op::Kind::kMark;
    op.mark = SessionState::kSyncFailed;
    (void)enqueue(ops);
}

// True if a flush has the turn, or a sync is in the kernel that a flush gave up.
bool DiskEngine::is_syncing() const {
    return syncing_ || std::any_of(active_.begin(), active_.end(), [](const Op& op) { return op.kind == Op::Kind::kSync; });
}

// A sync that failed may have brought an erased header back, where by now the slots of another class lie, so that it cannot be
// erased again. Only reading all records at the next open shows that such a record is not whole.
SessionState DiskEngine::end_of_session() const {
    std::lock_guard lock(mutex_);
    return sync_error_ == 0 && file_->first_state() == SessionState::kOpen ? SessionState::kClosed : SessionState::kSyncFailed;
}

Status DiskEngine::mark(SessionState state) {
    Ops ops;
    Op& op = ops.emplace_back();
    op.kind = Op::Kind::kMark;
    op.mark = state;
    return run_own(ops);
}

// Rewrites records that a failed sync covered. Reads them from the file: with direct I/O that is what the disk has.
Status DiskEngine::write_again() {
    Ops ops;
    {
        std::lock_guard lock(mutex_);
        for (uint32_t i = 0; doubtful_ > 0 && i < slots_.size(); ++i) {
            const SlotInfo& slot = slots_[i];
            if (!slot.doubtful || !slot.valid) continue;  // else it is being written, and this flush does not answer for it
            Op& op = ops.emplace_back();
            op.kind = Op::Kind::kRewrite;
            op.request.slot = {i, slot.slot_class};
            op.request.tag = ops.size() - 1;
            op.generation = slot.generation;
        }
    }
    if (!ops.empty()) TA_RETURN_IF_ERROR(run_own(ops));
    std::lock_guard lock(mutex_);
    if (lost_ == 0) return {};
    return fail(TA_E_IO, "the disk tier has lost %llu records: fsync failed with %s, and they could not be read back",
                (unsigned long long)lost_, error_text(sync_error_).c_str())
        .tier(TA_TIER_DISK);
}

// Runs operations of the tier's own and waits. Returns the first failure. A lost record is not one: it is counted.
Status DiskEngine::run_own(Ops& ops) {
    DiskLatch latch(ops.size());
    for (Op& op : ops) op.client = &latch;
    Result<DiskBatch> batch = enqueue(ops);
    if (!batch.ok()) return std::move(batch).status();
    for (DiskCompletion& c : latch.wait()) {
        if (!c.status.ok() && c.status.code() != TA_E_CORRUPT) return std::move(c.status);
    }
    return {};
}

// True if all writes up to this number of writes_ are on the medium.
bool DiskEngine::is_synced(uint64_t writes) const {
    return synced_ >= writes && doubtful_ == 0 && lost_ == 0;
}

// Also nothing is being written.
bool DiskEngine::is_all_synced() const {
    std::lock_guard lock(mutex_);
    return is_synced(writes_) &&
           std::none_of(active_.begin(), active_.end(), [](const Op& op) { return op.kind == Op::Kind::kWrite; });
}

void DiskEngine::sync_succeeded(const Op& op) {
    synced_ = std::max(synced_, op.covers);
    // After a failed sync the successor of a retired record may be incomplete, so the retired record must stay.
    if (doubtful_ > 0 || lost_ > 0) return;
    const size_t n = op.retired_before > reclaimed_ ? size_t(op.retired_before - reclaimed_) : 0;
    for (size_t i = 0; i < n; ++i) {
        SlotInfo& slot = slots_[retired_[i]];
        --retired_of_[slot.slot_class];
        slot.released = true;
        if (slot.busy == 0) free_slot(retired_[i]);
    }
    retired_.erase(retired_.begin(), retired_.begin() + ptrdiff_t(n));
    reclaimed_ += n;
    if (!to_erase_.empty()) wake_workers();
}

void DiskEngine::sync_failed(const Op& op, int64_t error) {
    sync_error_ = error;
    owes_mark_ = true;
    for (uint32_t i = 0; i < slots_.size(); ++i) {
        SlotInfo& slot = slots_[i];
        // The failed sync may also have lost what was written after it started, or is being written or erased now.
        const bool covered = slot.written_at > op.synced_before;
        if (slot.writing || (covered && slot.valid) || (slot.on_disk && !slot.valid && slot.busy > 0)) {
            set_doubtful(slot, true);
        } else if (covered && !slot.on_disk) {
            erase_doubtful(i);
        }
    }
    if (!to_erase_.empty()) wake_workers();
}

// A header that was erased here may be back: it must be erased again.
void DiskEngine::erase_doubtful(uint32_t index) {
    SlotInfo& slot = slots_[index];
    if (slot.acquired) {
        slot.on_disk = true;
    } else if (slot.busy == 0 && map_.take({index, slot.slot_class})) {
        slot.on_disk = slot.released = true;
        to_erase_.push_back(index);
    }
}

void DiskEngine::set_doubtful(SlotInfo& slot, bool doubtful) {
    doubtful_ += doubtful && !slot.doubtful;
    doubtful_ -= !doubtful && slot.doubtful;
    slot.doubtful = doubtful;
}

// The supervisor --------------------------------------------------------------------------------------------------------------

void DiskEngine::supervise() {
    Lock lock(mutex_);
    while (!supervisor_stops_) {
        if (give_up_one(lock, Clock::now())) continue;
        const Clock::time_point next = next_deadline();
        supervisor_idle_ = next == Clock::time_point::max();
        if (supervisor_idle_) {
            supervise_.wait(lock);
        } else {
            supervise_.wait_until(lock, next);
        }
        supervisor_idle_ = false;
    }
    if (!supervisor_closes_) return;
    lock.unlock();
    file_->close();
    lock.lock();
    is_closed_ = true;
    changed_.notify_all();
}

// Tells one client that its request is cancelled or beyond its deadline. False: there is none to tell.
bool DiskEngine::give_up_one(Lock& lock, Clock::time_point now) {
    if (!dropped_.empty()) {
        Ops one;
        one.splice(one.end(), dropped_, dropped_.begin());
        Op& op = one.front();
        op.stalled = !op.cancel;
        if (op.has_slot()) leave_slot(op);
        if (!to_erase_.empty()) wake_workers();
        report(lock, op, op.cancel ? fail(TA_E_IO, "cancelled") : overdue(), op.cancel);
        return true;
    }
    for (Op& op : active_) {
        if (op.state != Op::State::kInFlight) continue;
        if (!op.stalled && now - op.started >= options_.deadline) {
            op.stalled = true;
            ++stalled_now_;
            if (op.kind == Op::Kind::kSync) sync_failed(op, -ETIMEDOUT);
            if (op.kind == Op::Kind::kWrite) {
                ++stalled_writes_;
                retry_at_ = now + options_.retry_after;
                std::snprintf(reason_, sizeof reason_, "a write has not been answered within %lld ms",
                              (long long)options_.deadline.count());
            }
        }
        if (op.reported || !op.client || (!op.stalled && !op.cancel)) continue;
        report(lock, op, op.cancel ? fail(TA_E_IO, "cancelled") : overdue(), op.cancel);
        return true;
    }
    if (!queued_.empty() && now - last_progress_ >= options_.deadline) {
        dropped_.splice(dropped_.end(), queued_);
        return true;
    }
    return false;
}

DiskEngine::Clock::time_point DiskEngine::next_deadline() const {
    auto next = Clock::time_point::max();
    if (!queued_.empty()) next = last_progress_ + options_.deadline;
    for (const Op& op : active_) {
        if (op.state == Op::State::kInFlight && !op.stalled) next = std::min(next, op.started + options_.deadline);
    }
    return next;
}

Status DiskEngine::overdue() const {
    return fail(TA_E_IO, "the disk tier's file did not answer within %lld ms", (long long)options_.deadline.count())
        .tier(TA_TIER_DISK);
}

// Health and counters ---------------------------------------------------------------------------------------------------------

TierHealth DiskEngine::health() const {
    std::lock_guard lock(mutex_);
    TierHealth h;
    if (stalled_now_ >= options_.depth) {
        h.state = TierState::kFailed;
        std::snprintf(h.reason, sizeof h.reason, "no operation came back within %lld ms", (long long)options_.deadline.count());
    } else if (may_not_write()) {
        h.state = TierState::kReadOnly;
        std::memcpy(h.reason, reason_, sizeof h.reason);
    } else if (lost_ > 0) {
        std::snprintf(h.reason, sizeof h.reason, "%llu records are lost: fsync failed with %s, and they could not be read back",
                      (unsigned long long)lost_, error_text(sync_error_).c_str());
    } else if (doubtful_ > 0) {
        std::snprintf(h.reason, sizeof h.reason, "fsync failed with %s: the next flush writes %llu records again",
                      error_text(sync_error_).c_str(), (unsigned long long)doubtful_);
    } else if (has_no_workers_) {
        std::snprintf(h.reason, sizeof h.reason,
                      "the kernel had no thread for io_uring (RLIMIT_NPROC): such operations go by system call");
    }
    return h;
}

TierStats DiskEngine::stats() const {
    std::lock_guard lock(mutex_);
    TierStats s = counters_;
    map_.describe(s);
    s.taken = file_bytes(map_.shape());
    s.memory = buffer_bytes_ + map_.index_bytes() + slots_.capacity() * sizeof(SlotInfo) +
               (to_erase_.capacity() + not_erased_.capacity() + retired_.capacity()) * sizeof(uint32_t);
    s.retired = retired_.size();
    for (int c = 0; c < kSlotClasses; ++c) {
        const uint64_t bytes = retired_of_[c] * map_.shape().stride[c];
        s.slots_used[c] -= retired_of_[c];
        s.slots_free[c] += retired_of_[c];
        s.used -= bytes;
        s.free += bytes;
        s.room += bytes;
    }
    s.queued = queued_.size();
    s.in_flight = active_.size();
    s.erasing = to_erase_.size() + erasures_;
    return s;
}

}  // namespace ta
