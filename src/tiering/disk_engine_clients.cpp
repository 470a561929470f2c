// The side of the disk tier's engine that clients see, and its supervisor. The side that does the I/O is disk_engine.cpp.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "src/tiering/disk_engine.h"
#include "src/tiering/disk_latch.h"

namespace ta {
namespace {

constexpr int kMostFailedWrites = 3;  // in a row, other than for lack of space, before the tier turns read-only

}  // namespace

// Slots -----------------------------------------------------------------------------------------------------------------------

Result<std::vector<Slot>> DiskEngine::acquire(std::span<const uint8_t> wanted) {
    std::lock_guard lock(mutex_);
    if (stopping_) return fail(TA_E_CLOSED, "the disk tier is closed");
    if (!not_erased_.empty() && Clock::now() >= erase_again_at_) erase_again();
    if (may_not_write() && Clock::now() < retry_at_) return refused_write();
    Result<std::vector<Slot>> slots = map_.acquire_all(wanted, TierKind::kDisk);
    if (!slots.ok()) return slots;
    for (const Slot s : slots.value()) {
        slots_[s.index] = SlotInfo{};
        slots_[s.index].slot_class = s.slot_class;
        slots_[s.index].acquired = true;
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

// Hands a released slot on. A persistent file must not bring its block back, so its header goes first.
void DiskEngine::free_slot(uint32_t index) {
    SlotInfo& slot = slots_[index];
    slot.valid = false;
    if (slot.on_disk) {
        to_erase_.push_back(index);
        return;
    }
    map_.give({index, slot.slot_class});
    slot = SlotInfo{};
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
        TA_RETURN_IF_ERROR(admit_write());
    for (auto op = ops.begin(); op != ops.end(); ++op) {
        op->batch = next_batch_;
        Status s = admit(*op);
        if (s.ok()) continue;
        while (op != ops.begin()) unadmit(*--op);
        return s;
    }
    if (queued_.empty()) last_progress_ = Clock::now();
    outstanding_ += ops.size();
    queued_.splice(queued_.end(), ops);
    wake_workers();
    if (supervisor_idle_) supervise_.notify_one();
    return next_batch_++;
}

// Checks a request and marks its slot.
Status DiskEngine::admit(Op& op) {
    if (op.kind == Op::Kind::kSync) return {};
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

void DiskEngine::unadmit(const Op& op) {
    if (op.kind == Op::Kind::kSync) return;
    SlotInfo& slot = slots_[op.request.slot.index];
    --slot.busy;
    if (op.kind != Op::Kind::kWrite) return;
    slot.writing = false;
    slot.valid = op.was_valid;
}

Status DiskEngine::refused_write() const {
    return fail(TA_E_TIER_FULL, "the disk tier is read-only: %s", reason_).tier(TA_TIER_DISK);
}

// A tier that could not be written lets one batch through after a while, to see.
Status DiskEngine::admit_write() {
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

// Tells the client. The operation may be gone afterwards, since the lock is given up meanwhile.
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
    } else if (op.kind != Op::Kind::kSync) {
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

Status DiskEngine::flush() {
    DiskLatch latch(1);
    Ops ops;
    Op& op = ops.emplace_back();
    op.kind = Op::Kind::kSync;
    op.client = &latch;
    {
        std::lock_guard lock(mutex_);
        erase_again();
    }
    Result<DiskBatch> batch = enqueue(ops);
    return batch.ok() ? std::move(latch.wait()[0].status) : std::move(batch).status();
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
}

// Tells one client that its request will come to nothing: cancelled, or beyond its deadline. False when there is none.
bool DiskEngine::give_up_one(Lock& lock, Clock::time_point now) {
    if (!dropped_.empty()) {
        Ops one;
        one.splice(one.end(), dropped_, dropped_.begin());
        Op& op = one.front();
        op.stalled = !op.cancel;
        if (op.kind != Op::Kind::kSync) leave_slot(op);
        if (!to_erase_.empty()) wake_workers();
        report(lock, op, op.cancel ? fail(TA_E_IO, "cancelled") : overdue(), op.cancel);
        return true;
    }
    for (Op& op : active_) {
        if (op.state != Op::State::kInFlight) continue;
        if (!op.stalled && now - op.started >= options_.deadline) {
            op.stalled = true;
            ++stalled_now_;
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

// What is told ----------------------------------------------------------------------------------------------------------------

TierHealth DiskEngine::health() const {
    std::lock_guard lock(mutex_);
    TierHealth h;
    if (stalled_now_ >= options_.depth) {
        h.state = TierState::kFailed;
        std::snprintf(h.reason, sizeof h.reason, "no operation came back within %lld ms", (long long)options_.deadline.count());
    } else if (may_not_write()) {
        h.state = TierState::kReadOnly;
        std::memcpy(h.reason, reason_, sizeof h.reason);
    }
    return h;
}

TierStats DiskEngine::stats() const {
    std::lock_guard lock(mutex_);
    TierStats s = counters_;
    map_.describe(s);
    s.taken = file_bytes(map_.shape());
    s.memory = buffer_bytes_ + map_.index_bytes() + slots_.capacity() * sizeof(SlotInfo) +
               (to_erase_.capacity() + not_erased_.capacity()) * sizeof(uint32_t);
    s.queued = queued_.size();
    s.in_flight = active_.size();
    const auto erasing =
        std::count_if(active_.begin(), active_.end(), [](const Op& op) { return op.kind == Op::Kind::kErase; });
    s.erasing = to_erase_.size() + uint64_t(erasing);
    return s;
}

}  // namespace ta
