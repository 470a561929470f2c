#include "tiering/disk/engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>

#include "kernels/format/hash.h"

namespace ta {
namespace {

constexpr int kMostRetries = 16;  // of an operation that was interrupted

}  // namespace

DiskEngine::DiskEngine(std::unique_ptr<DiskFile> file, Options options)
    : file_(std::move(file)),
      options_(std::move(options)),
      largest_record_(size_t(std::ranges::max(file_->shape.stride))),
      map_(file_->shape) {}

DiskEngine::~DiskEngine() {
    queues_.clear();
    if (buffers_) munmap(buffers_, buffer_bytes_);
}

Result<std::shared_ptr<DiskEngine>> DiskEngine::create(std::unique_ptr<DiskFile> file, Options options) {
    std::shared_ptr<DiskEngine> engine(new DiskEngine(std::move(file), std::move(options)));
    TA_RETURN_IF_ERROR(engine->allocate());
    return engine;
}

// Allocates all that the threads need, so that none of them runs out of memory.
Status DiskEngine::allocate() {
    const unsigned depth = options_.depth;
    buffer_bytes_ = depth * largest_record_ + kDiskPage;
    void* p = mmap(nullptr, buffer_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        buffer_bytes_ = 0;
        return fail(TA_E_MEMORY, "no %zu bytes for the buffers of the disk tier", depth * largest_record_ + kDiskPage)
            .tier(TA_TIER_DISK)
            .bytes(depth * largest_record_ + kDiskPage);
    }
    buffers_ = static_cast<uint8_t*>(p);
    zeros_ = buffers_ + depth * largest_record_;
    if (options_.device) {
        if (Status s = options_.device->register_host(buffers_, buffer_bytes_); !s.ok()) return std::move(s).tier(TA_TIER_DISK);
        registered_ = true;
    }
    idle_buffers_.reserve(depth);
    for (unsigned i = 0; i < depth; ++i) idle_buffers_.push_back(buffers_ + i * largest_record_);
    spare_.resize(depth);
    slots_.resize(map_.shape().indices());
    if (file_->persistent) {
        to_erase_.reserve(slots_.size());
        not_erased_.reserve(slots_.size());
        retired_.reserve(slots_.size());
    }
    next_generation_ = file_->next_generation;
    for (const RecoveredBlock& b : file_->recovered) {
        map_.take(b.slot);
        SlotInfo& s = slots_[b.slot.index];
        s.generation = b.generation;
        s.slot_class = b.slot.slot_class;
        s.acquired = s.valid = s.on_disk = true;
    }
    for (const Slot stale : file_->stale) {
        // Only if its region serves its class. Else the index is that of another slot, which may be recovered.
        if (!map_.take(stale)) continue;
        map_.give(stale);
        slots_[stale.index].slot_class = stale.slot_class;
        slots_[stale.index].on_disk = true;
    }
    uring_ = file_->queue != nullptr;
    if (uring_) queues_.push_back(std::move(file_->queue));
    while (queues_.size() < options_.threads) {
        std::string reason;
        std::unique_ptr<IoQueue> queue = uring_ ? file_->files->make_queue(depth, reason) : make_blocking_queue(*file_->files);
        if (!queue) break;  // rather fewer threads with rings than more without
        queues_.push_back(std::move(queue));
    }
    queue_depth_ = uring_ ? depth : 1;
    return {};
}

Status DiskEngine::start(const std::shared_ptr<DiskEngine>& engine) {
    DiskEngine& e = *engine;
    try {
        e.workers_.reserve(e.queues_.size());
        e.supervisor_ = std::thread([engine] { engine->supervise(); });
        for (unsigned i = 0; i < e.queues_.size(); ++i) e.workers_.emplace_back([engine, i] { engine->work(i); });
    } catch (const std::system_error& error) {
        if (e.workers_.empty())
            return fail(TA_E_LIMIT, "the threads of the disk tier could not be started: %s",
                        error_text(-error.code().value()).c_str());
        e.file_->degraded.push_back("the disk tier has " + std::to_string(e.workers_.size()) + " of " +
                                    std::to_string(e.queues_.size()) + " threads: " + error_text(-error.code().value()));
    }
    return {};
}

void DiskEngine::stop() {
    {
        std::lock_guard lock(mutex_);
        drop_queued();
    }
    supervise_.notify_one();
    bool answers = false;
    {
        std::lock_guard lock(mutex_);
        answers = stalled_now_ == 0 && !workers_.empty();
    }
    try {
        // If the flush fails, only writes are at risk that no flush has promised.
        if (file_->persistent && answers && flush().ok() && is_all_synced()) (void)mark(end_of_session());
    } catch (const std::bad_alloc&) {
    }
    Lock lock(mutex_);
    stopping_ = true;
    drop_queued();
    wake_workers();
    supervise_.notify_one();
    // Bounded: the supervisor gives up what takes too long.
    changed_.wait(lock, [&] { return outstanding_ == 0 || !supervisor_.joinable(); });
    changed_.wait_for(lock, stalled_now_ > 0 ? std::chrono::milliseconds(0) : options_.deadline,
                      [&] { return exited_ == workers_.size(); });
    const bool all_exited = exited_ == workers_.size();
    // Closing the file may hang as well. If threads still use it, the last one closes it.
    supervisor_closes_ = all_exited && supervisor_.joinable();
    supervisor_stops_ = true;
    supervise_.notify_one();
    if (supervisor_closes_ && !changed_.wait_for(lock, options_.deadline, [&] { return is_closed_; })) supervisor_.detach();
    lock.unlock();
    if (supervisor_.joinable()) supervisor_.join();
    for (std::thread& t : workers_) {
        // A thread that the operating system keeps cannot be joined. It owns a share of the engine and ends by itself.
        if (all_exited) {
            t.join();
        } else {
            t.detach();
        }
    }
    workers_.clear();
    if (std::exchange(registered_, false)) options_.device->unregister_host(buffers_);
}

void DiskEngine::wake_workers() {
    for (const auto& queue : queues_) queue->wake();
}

// The threads -----------------------------------------------------------------------------------------------------------------

void DiskEngine::work(unsigned worker) {
    IoQueue& queue = *queues_[worker];
    IoResult results[16];
    unsigned flying = 0;
    Lock lock(mutex_);
    for (;;) {
        Op* op = nullptr;
        while (flying < queue_depth_ && (op = take()) != nullptr) start_op(lock, queue, *op, flying);
        if (stopping_ && flying == 0) break;
        lock.unlock();
        const size_t n = queue.wait(results);
        lock.lock();
        for (size_t i = 0; i < n; ++i) on_result(lock, queue, *static_cast<Op*>(results[i].user), results[i].result, flying);
    }
    ++exited_;
    changed_.notify_all();
}

// The next operation, with a buffer. nullptr: no operation, or no buffer.
DiskEngine::Op* DiskEngine::take() {
    if (idle_buffers_.empty()) return nullptr;
    Op* op = nullptr;
    if (!to_erase_.empty() && !spare_.empty()) {
        active_.splice(active_.end(), spare_, spare_.begin());
        op = &active_.back();
        *op = Op{};
        op->kind = Op::Kind::kErase;
        op->request.slot = {to_erase_.back(), slots_[to_erase_.back()].slot_class};
        to_erase_.pop_back();
        ++erasures_;
        ++slots_[op->request.slot.index].busy;
    } else if (!queued_.empty()) {
        active_.splice(active_.end(), queued_, queued_.begin());
        op = &active_.back();
    } else {
        return nullptr;
    }
    op->self = std::prev(active_.end());
    op->state = Op::State::kCopying;
    op->buffer = idle_buffers_.back();
    idle_buffers_.pop_back();
    op->offset = op->has_slot() ? kDiskRegionsOffset + map_.offset(op->request.slot) : 0;
    if (op->kind == Op::Kind::kWrite) op->generation = next_generation_++;
    last_progress_ = Clock::now();
    return op;
}

void DiskEngine::start_op(Lock& lock, IoQueue& queue, Op& op, unsigned& flying) {
    if (op.kind == Op::Kind::kWrite) {
        lock.unlock();
        op.refused = stage_write(op);
        lock.lock();
        if (!op.refused.ok()) return finish(lock, op, -EBADMSG);
    }
    if (op.cancel) return finish(lock, op, -ECANCELED);
    next_step(op);
    run_step(lock, queue, op, flying);
}

// Builds the record as it will lie on disk. The header is sealed here too: its hash covers the bytes that were copied, whatever
// the client's memory holds by now.
Status DiskEngine::stage_write(Op& op) {
    const size_t bytes = op.request.bytes, record = size_t(map_.shape().stride[op.request.slot.slot_class]);
    uint8_t* payload = op.buffer + kDiskPage;
    TA_RETURN_IF_ERROR(copy(op.request, payload, false));
    std::memset(payload + bytes, 0, record - kDiskPage - bytes);
    if (options_.check) TA_RETURN_IF_ERROR(options_.check(op.request.identity, op.request.slot.slot_class, payload));
    RecordHeader header =
        make_header(file_->context, op.request.identity, op.request.slot.slot_class, op.offset, op.generation, payload);
    header.more_keys = std::min(op.request.more_keys.size(), kMostMoreKeys);
    seal_header(header, op.request.more_keys, op.buffer);
    return {};
}

// Prepares the next I/O of the operation. False: it has had its last.
bool DiskEngine::next_step(Op& op) {
    const size_t record = op.has_slot() ? size_t(map_.shape().stride[op.request.slot.slot_class]) : 0;
    IoOp io;
    io.fd = file_->fd;
    io.user = &op;
    io.offset = op.offset;
    io.data = op.buffer;
    io.bytes = record;
    const int step = op.step++;
    switch (op.kind) {
        case Op::Kind::kRead:
            if (step > 0) return false;
            break;
        case Op::Kind::kSync:
            if (step > 0) return false;
            io.kind = IoOp::Kind::kSync;
            op.covers = sync_started_ = writes_;
            op.synced_before = synced_;
            op.retired_before = reclaimed_ + retired_.size();
            break;
        case Op::Kind::kMark:
            if (step > 0) return false;
            io.kind = IoOp::Kind::kWrite;
            io.offset = file_->seal_session(op.mark, op.mark == SessionState::kClosed ? unread_before() : 0, op.buffer);
            io.bytes = kDiskPage;
            break;
        case Op::Kind::kRewrite:
            if (step > 1) return false;
            if (step == 0) break;
            // Writes the bytes that are there already: a crash at any moment leaves nothing worse.
            io.kind = IoOp::Kind::kWrite;
            break;
        case Op::Kind::kErase:
            if (step > 0) return false;
            io.kind = IoOp::Kind::kWrite;
            io.data = zeros_;
            io.bytes = kDiskPage;
            break;
        case Op::Kind::kWrite: {
            io.kind = IoOp::Kind::kWrite;
            SlotInfo& slot = slots_[op.request.slot.index];
            if (!file_->persistent) {
                if (step > 0) return false;
                break;
            }
            // A header must never stand in front of bytes that are not its own. So the old header is erased, the bytes are
            // written, then the new header.
            if (step == 0) set_doubtful(slot, false);
            if (step == 0 && !slot.on_disk) ++op.step;
            switch (op.step - 1) {
                case 0:
                    io.data = zeros_;
                    io.bytes = kDiskPage;
                    break;
                case 1:
                    slot.on_disk = false;
                    io.data = op.buffer + kDiskPage;
                    io.offset = op.offset + kDiskPage;
                    io.bytes = record - kDiskPage;
                    break;
                case 2:
                    slot.on_disk = true;
                    io.bytes = kDiskPage;
                    break;
                default:
                    return false;
            }
            break;
        }
    }
    op.io = io;
    op.retries = 0;
    return true;
}

void DiskEngine::run_step(Lock& lock, IoQueue& queue, Op& op, unsigned& flying) {
    op.state = Op::State::kInFlight;
    op.started = Clock::now();
    ++flying;
    if (supervisor_idle_) supervise_.notify_one();
    lock.unlock();
    const int r = queue.submit(op.io);
    lock.lock();
    if (r < 0) on_result(lock, queue, op, r, flying);
}

void DiskEngine::on_result(Lock& lock, IoQueue& queue, Op& op, int64_t result, unsigned& flying) {
    if (result == -ECANCELED && uring_ && !op.cancel && !op.reported) result = run_blocking(lock, op);
    --flying;
    last_progress_ = Clock::now();
    if (advance(op, result)) return run_step(lock, queue, op, flying);
    finish(lock, op, result);
}

// The kernel cancels I/O that it has no thread for: RLIMIT_NPROC counts io_uring's threads. Nothing else cancels I/O here.
int64_t DiskEngine::run_blocking(Lock& lock, Op& op) {
    has_no_workers_ = true;
    op.started = Clock::now();
    lock.unlock();
    const int64_t result = run_io(*file_->files, op.io);
    lock.lock();
    return result;
}

// Looks at the result of an I/O. True: there is more to do. False: `result` is 0 or -errno.
bool DiskEngine::advance(Op& op, int64_t& result) {
    if (op.reported || op.cancel) {
        if (op.kind == Op::Kind::kSync && result < 0 && result != -ECANCELED) {
            // No other sync will be told of this error.
            sync_failed(op, result);
            op.kind = Op::Kind::kMark;
            op.mark = SessionState::kSyncFailed;
            op.step = 0;
            return next_step(op);
        }
        result = -ECANCELED;
        return false;
    }
    if (result == -EINTR || result == -EAGAIN) return ++op.retries <= kMostRetries;
    if (result < 0) return false;
    if (op.io.kind != IoOp::Kind::kSync && size_t(result) < op.io.bytes) {
        // Short: continues after the last whole page, since direct I/O can start nowhere else.
        const size_t done = size_t(result) / kDiskPage * kDiskPage;
        op.io.data += done;
        op.io.offset += done;
        op.io.bytes -= done;
        if (done > 0) return true;
        result = op.io.kind == IoOp::Kind::kRead ? -ENODATA : -EIO;
        return false;
    }
    result = 0;
    if (op.kind == Op::Kind::kRewrite && op.step == 1 && is_damaged(op)) {
        result = -EBADMSG;
        return false;
    }
    return next_step(op);
}

// True if the bytes read back are not the record. Hashes under the lock: only failing disks come here.
bool DiskEngine::is_damaged(const Op& op) const {
    RecordHeader h;
    return check_header(op.buffer, file_->context, op.request.slot.slot_class, op.offset, h) != nullptr ||
           h.generation != op.generation || hash_bytes(op.buffer + kDiskPage, size_t(h.slot_bytes)) != h.payload_hash;
}

void DiskEngine::finish(Lock& lock, Op& op, int64_t error) {
    Status status;
    bool cancelled = false;
    SlotInfo* slot = op.has_slot() ? &slots_[op.request.slot.index] : nullptr;
    if (error < 0 && op.kind == Op::Kind::kWrite) set_doubtful(*slot, false);
    if (error == -ECANCELED) {
        cancelled = true;
        status = fail(TA_E_IO, "cancelled");
    } else if (error == -EBADMSG && op.kind == Op::Kind::kRewrite) {
        status = fail(TA_E_CORRUPT, "record %u of the disk tier is lost", op.request.slot.index);
        set_doubtful(*slot, false);
        lost_ += !slot->lost;
        slot->lost = true;
    } else if (!op.refused.ok()) {
        status = std::move(op.refused);
    } else if (error < 0) {
        status = io_status(op, error);
        if (op.kind == Op::Kind::kWrite || op.kind == Op::Kind::kErase) write_failed(error);
        if (op.kind == Op::Kind::kSync) sync_failed(op, error);
    } else if (op.kind == Op::Kind::kRead) {
        op.state = Op::State::kFinishing;
        lock.unlock();
        status = check_and_copy(op);
        lock.lock();
        slot->whole |= status.ok();
    } else if (op.kind == Op::Kind::kWrite) {
        slot->valid = true;
        slot->generation = op.generation;
        slot->written_at = ++writes_;
        write_succeeded();
    } else if (op.kind == Op::Kind::kErase) {
        slot->on_disk = slot->doubtful;  // true: a sync has failed meanwhile
        set_doubtful(*slot, false);
        slot->written_at = ++writes_;
    } else if (op.kind == Op::Kind::kRewrite) {
        set_doubtful(*slot, false);
        slot->written_at = ++writes_;
    } else if (op.kind == Op::Kind::kSync) {
        sync_succeeded(op);
    } else if (op.kind == Op::Kind::kMark) {
        owes_mark_ &= op.mark != SessionState::kSyncFailed;
    }
    idle_buffers_.push_back(op.buffer);
    if (op.stalled) {
        --stalled_now_;
        changed_.notify_all();  // a flush may wait for a sync that was given up
        if (op.kind == Op::Kind::kWrite) --stalled_writes_;
    }
    if (op.kind == Op::Kind::kErase) {
        --slot->busy;
        --erasures_;
        if (slot->on_disk) {
            not_erased_.push_back(op.request.slot.index);
            erase_again_at_ = Clock::now() + options_.retry_after;
        } else {
            free_slot(op.request.slot.index);
        }
        spare_.splice(spare_.end(), active_, op.self);
        if (to_erase_.empty() && erasures_ == 0) changed_.notify_all();
        return;
    }
    if (slot) leave_slot(op);
    Ops done;
    done.splice(done.end(), active_, op.self);
    if (!op.reported) report(lock, op, std::move(status), cancelled);
}

// The operation is done with its slot.
void DiskEngine::leave_slot(Op& op) {
    SlotInfo& slot = slots_[op.request.slot.index];
    if (op.kind == Op::Kind::kWrite) slot.writing = false;
    if (--slot.busy == 0 && slot.released) free_slot(op.request.slot.index);
}

Status DiskEngine::io_status(const Op& op, int64_t error) const {
    const bool read = op.kind == Op::Kind::kRead;
    if (!op.has_slot())
        return fail(TA_E_IO, "%s the disk tier's file failed: %s", op.kind == Op::Kind::kSync ? "fsync of" : "marking",
                    error_text(error).c_str())
            .tier(TA_TIER_DISK);
    return fail(is_lack_of_space(error) ? TA_E_TIER_FULL : TA_E_IO, "%s record %u of the disk tier failed: %s",
                read ? "reading" : "writing", op.request.slot.index, error_text(error).c_str())
        .tier(TA_TIER_DISK)
        .block(int64_t(op.request.identity.block_index));
}

// Copies nothing into the client's memory but the block it asked for.
Status DiskEngine::check_and_copy(const Op& op) {
    const DiskRequest& r = op.request;
    RecordHeader h;
    const uint8_t* payload = op.buffer + kDiskPage;
    const char* wrong = check_header(op.buffer, file_->context, r.slot.slot_class, op.offset, h);
    if (!wrong && (h.generation != op.generation || identity_of(h) != r.identity)) wrong = "holds another block";
    if (!wrong && hash_bytes(payload, size_t(h.slot_bytes)) != h.payload_hash) wrong = "does not match its hash";
    if (wrong) {
        return fail(TA_E_CORRUPT, "record %u of the disk tier, at offset %llu of its file, %s", r.slot.index,
                    (unsigned long long)op.offset, wrong)
            .tier(TA_TIER_DISK)
            .block(int64_t(r.identity.block_index));
    }
    if (options_.check) TA_RETURN_IF_ERROR(options_.check(r.identity, r.slot.slot_class, payload));
    // Hashes do not show who wrote the file, so records of earlier sessions are checked further.
    if (options_.check_found && op.generation < file_->next_generation)
        TA_RETURN_IF_ERROR(options_.check_found(r.identity, r.slot.slot_class, payload));
    return copy(r, op.buffer + kDiskPage + r.offset, true);
}

// Copies between a client's memory and a buffer.
Status DiskEngine::copy(const DiskRequest& r, uint8_t* buffer, bool to_client) const {
    uint8_t* const to = to_client ? r.memory : buffer;
    const uint8_t* const from = to_client ? buffer : r.memory;
    if (r.on_device) {
        const DeviceCopy one{to, from, r.bytes};
        return options_.device->copy({&one, 1}, !to_client);
    }
    std::memcpy(to, from, r.bytes);
    return {};
}

}  // namespace ta
