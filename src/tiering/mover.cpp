#include "src/tiering/mover.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>

#include "src/kv/pool.h"

namespace ta {
namespace {

constexpr size_t kPartBytes = 16 << 20;  // moved together: cancelled, published and counted as one
constexpr int kThreads = 2;              // of a direction: one copies while the other's blocks are checked
constexpr int kMostCheckers = 8;         // threads that hash what arrived in host memory
constexpr std::chrono::milliseconds kReadersPatience{200};
constexpr size_t kFinishedTickets = 4096;  // that can still be asked about

// Waits for the completions of a batch.
class Latch final : public TierClient {
  public:
    explicit Latch(size_t n) : statuses_(n), missing_(n) {}
    void on_done(TierCompletion completion) noexcept override {
        std::lock_guard lock(mutex_);
        statuses_[completion.tag] = std::move(completion.status);
        if (--missing_ == 0) all_.notify_all();
    }
    std::vector<Status>& wait() {
        std::unique_lock lock(mutex_);
        all_.wait(lock, [this] { return missing_ == 0; });
        return statuses_;
    }

  private:
    std::mutex mutex_;
    std::condition_variable all_;
    std::vector<Status> statuses_;
    size_t missing_;
};

// A Status that is kept while another copy is reported.
Status copy_of(const Status& s) {
    if (s.ok()) return {};
    const ta_error* d = s.detail();
    Status copy = fail(s.code(), "%s", d ? d->message : "");
    return d ? std::move(copy).layer(d->layer).sequence(d->sequence).block(d->block) : std::move(copy);
}

MoveProgress copy_of(const MoveProgress& p) {
    return {p.state, p.blocks, p.moved, p.present, p.skipped, p.failed, copy_of(p.status)};
}

}  // namespace

Mover::Mover(Pool& pool, Tier* host, Tier* disk) : pool_(pool), host_(host), disk_(disk) {}

Status Mover::start() {
    const int processors = int(std::thread::hardware_concurrency());
    TA_RETURN_IF_ERROR(checkers_.start(std::clamp(processors / 2, 1, kMostCheckers)));
    try {
        for (int i = 0; i < 2 * kThreads; ++i) threads_.emplace_back([this, i] { serve(i % 2); });
    } catch (const std::system_error&) {
        return fail(TA_E_LIMIT, "the threads that move blocks could not be started");
    }
    return {};
}

Mover::~Mover() {
    stop();
}

void Mover::stop() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        for (auto& [id, ticket] : known_) ticket->cancelled = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
}

// ----------------------------------------------------------------------------------------------------------------- tickets

Result<uint64_t> Mover::submit(std::vector<MoveItem> items, TierKind to, MoveReason reason) {
    auto ticket = std::make_shared<Ticket>();
    ticket->items = std::move(items);
    ticket->to = to;
    ticket->reason = reason;
    ticket->progress.blocks = ticket->items.size();
    std::lock_guard lock(mutex_);
    ticket->id = ++tickets_;
    // What goes to the device overtakes what is moved out for it.
    Queue& queue = queues_[to == TierKind::kDevice ? 0 : 1];
    queue.push_back(ticket);
    try {
        known_.emplace(ticket->id, ticket);
    } catch (...) {
        queue.pop_back();
        throw;
    }
    wake_.notify_all();
    return ticket->id;
}

// How many of the first items go together.
size_t Mover::part_of(std::span<const MoveItem> items) const {
    const Geometry& g = pool_.geometry();
    size_t n = 0, bytes = 0;
    for (; n < items.size() && bytes < kPartBytes; ++n) bytes += items[n].block ? g.slot_bytes(items[n].block->kind()) : 0;
    return n;
}

void Mover::serve(int direction) {
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stopping_ || !queues_[direction].empty(); });
        if (queues_[direction].empty()) return;
        const std::shared_ptr<Ticket> ticket = queues_[direction].front();
        Ticket& t = *ticket;
        t.progress.state = TA_MOVE_RUNNING;
        if (t.cancelled) t.next = t.items.size();
        const std::span rest(t.items.data() + t.next, t.items.size() - t.next);
        const std::span items = rest.first(part_of(rest));
        t.next += items.size();
        if (t.next == t.items.size()) queues_[direction].pop_front();
        ++t.threads;
        lock.unlock();
        MoveProgress part;
        try {
            run_part(items, t.to, t.reason, part);
        } catch (const std::bad_alloc&) {
            part.failed = items.size() - part.moved - part.present - part.skipped;
            part.status = fail(TA_E_MEMORY, "no memory for the bookkeeping of a move");
        }
        lock.lock();
        add(t, std::move(part));
        if (--t.threads > 0 || t.next < t.items.size()) continue;
        const uint64_t done = t.progress.moved + t.progress.present + t.progress.skipped + t.progress.failed;
        t.progress.state = t.progress.failed ? TA_MOVE_FAILED : done < t.progress.blocks ? TA_MOVE_CANCELLED : TA_MOVE_DONE;
        std::vector<MoveItem> dropped;  // after the lock: the last owner of a block may give it back here
        dropped.swap(t.items);
        t.next = 0;
        try {
            done_.push_back(t.id);
        } catch (const std::bad_alloc&) {
            known_.erase(t.id);
        }
        if (done_.size() > kFinishedTickets) {
            known_.erase(done_.front());
            done_.pop_front();
        }
        finished_.notify_all();
        lock.unlock();
        dropped.clear();
        lock.lock();
    }
}

void Mover::add(Ticket& ticket, MoveProgress&& part) {
    MoveProgress& all = ticket.progress;
    all.moved += part.moved;
    all.present += part.present;
    all.skipped += part.skipped;
    all.failed += part.failed;
    if (all.status.ok()) all.status = std::move(part.status);
}

MoveProgress Mover::run(std::span<const MoveItem> items, TierKind to, MoveReason reason) {
    MoveProgress progress;
    progress.blocks = items.size();
    while (!items.empty()) {
        const size_t n = part_of(items);
        run_part(items.first(n), to, reason, progress);
        items = items.subspan(n);
    }
    progress.state = progress.failed ? TA_MOVE_FAILED : TA_MOVE_DONE;
    return progress;
}

Result<MoveProgress> Mover::query(uint64_t ticket) const {
    return wait(ticket, 0);
}

Result<MoveProgress> Mover::wait(uint64_t ticket, int64_t nanoseconds) const {
    std::unique_lock lock(mutex_);
    const auto found = known_.find(ticket);
    if (found == known_.end())
        return fail(TA_E_STALE, "%llu is no ticket of this pool, or one that finished long ago", (unsigned long long)ticket);
    const std::shared_ptr<Ticket> t = found->second;
    const auto over = [&] { return t->progress.state != TA_MOVE_QUEUED && t->progress.state != TA_MOVE_RUNNING; };
    constexpr int64_t kYear = int64_t{366} * 24 * 3600 * 1'000'000'000;  // longer than that is for ever
    if (nanoseconds < 0 || nanoseconds > kYear) {
        finished_.wait(lock, over);
    } else if (nanoseconds > 0) {
        finished_.wait_for(lock, std::chrono::nanoseconds(nanoseconds), over);
    }
    return copy_of(t->progress);
}

Status Mover::cancel(uint64_t ticket) {
    std::lock_guard lock(mutex_);
    const auto found = known_.find(ticket);
    if (found == known_.end())
        return fail(TA_E_STALE, "%llu is no ticket of this pool, or one that finished long ago", (unsigned long long)ticket);
    found->second->cancelled = true;
    return {};
}

void Mover::cancel_all() {
    std::lock_guard lock(mutex_);
    for (auto& [id, ticket] : known_) ticket->cancelled = true;
}

MoveCounters Mover::counters() const {
    std::lock_guard lock(mutex_);
    return counters_;
}

uint64_t Mover::queued() const {
    std::lock_guard lock(mutex_);
    return known_.size() - done_.size();
}

// ------------------------------------------------------------------------------------------------------------------- moves

// A GPU's memory and the disk meet in the host tier.
bool Mover::through_host(const Place& from, TierKind to) const {
    if (!pool_.context().device()) return false;
    return (from.tier == TierKind::kDevice && to == TierKind::kDisk) ||
           (from.tier == TierKind::kDisk && to == TierKind::kDevice);
}

class Mover::Unfinished {
  public:
    Unfinished(Mover& mover, std::vector<Work>& work) : mover_(mover), work_(work) { mover_.running_.fetch_add(1); }
    ~Unfinished() {
        for (const Work& w : work_) {
            if (w.over) continue;
            mover_.give_back(w);
            w.item->block->end_move();
        }
        mover_.running_.fetch_sub(1);
    }
    Unfinished(const Unfinished&) = delete;
    Unfinished& operator=(const Unfinished&) = delete;

  private:
    Mover& mover_;
    std::vector<Work>& work_;
};

void Mover::run_part(std::span<const MoveItem> items, TierKind to, MoveReason reason, MoveProgress& progress) {
    std::vector<Work> work;
    std::vector<MoveItem> in_two;
    work.reserve(items.size());
    in_two.reserve(items.size());
    const Unfinished unfinished(*this, work);
    for (const MoveItem& item : items) {
        if (!take(item, to, progress, work)) continue;
        if (!through_host(work.back().from, to)) continue;
        item.block->end_move();
        work.pop_back();
        in_two.push_back(item);
    }
    if (!in_two.empty()) {
        MoveProgress to_host;
        run_part(in_two, TierKind::kHost, reason, to_host);
        progress.skipped += to_host.skipped;
        progress.failed += to_host.failed;
        if (progress.status.ok()) progress.status = std::move(to_host.status);
        for (const MoveItem& item : in_two) {
            if (item.block->tier() == TierKind::kHost) take(item, to, progress, work);
        }
    }
    if (work.empty()) return;
    const auto start = std::chrono::steady_clock::now();
    find_room(work, to, reason);
    copy(work, to);
    check(work, to);
    finish(work, to, reason, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), progress);
}

// False when the block stays where it is; `progress` says why.
bool Mover::take(const MoveItem& item, TierKind to, MoveProgress& progress, std::vector<Work>& work) const {
    if (!item.block || !item.block->sealed() || !item.block->start_move()) {
        ++progress.skipped;
        return false;
    }
    Block& block = *item.block;
    const Place from = pool_.blocks().place_of(block);
    const bool pinned = block.pins() > 0 && to > from.tier;
    if (from.tier == to || pinned) {
        block.end_move();
        ++(pinned ? progress.skipped : progress.present);
        return false;
    }
    work.push_back({&item, from, {to, nullptr, {}}, {}});
    return true;
}

// Slots for all, or for as many as possible one by one; the others get a status.
void Mover::find_room(std::vector<Work>& work, TierKind to, MoveReason reason) {
    Status all = acquire(work, to);
    // What blocks have left counts until those are done who were reading there.
    if (all.code() == TA_E_TIER_FULL && pool_.blocks().wait_for_left(kReadersPatience)) all = acquire(work, to);
    if (all.code() == TA_E_TIER_FULL && reason != MoveReason::kPrefetch) {
        std::vector<PageKind> kinds;
        for (const Work& w : work) kinds.push_back(w.item->block->kind());
        if (pool_.make_room(to, kinds)) all = acquire(work, to);
    }
    if (all.ok()) return;
    for (Work& w : work) w.status = acquire({&w, 1}, to);
}

Status Mover::acquire(std::span<Work> work, TierKind to) {
    if (to == TierKind::kDevice) {
        std::vector<PageKind> kinds;
        for (const Work& w : work) kinds.push_back(w.item->block->kind());
        Result<std::vector<uint8_t*>> slots = pool_.blocks().acquire_slots(kinds);
        if (!slots.ok()) return std::move(slots).status();
        for (size_t i = 0; i < work.size(); ++i) work[i].to.address = slots.value()[i];
        return {};
    }
    std::vector<uint8_t> classes;
    for (const Work& w : work) classes.push_back(uint8_t(w.item->block->kind()));
    Result<std::vector<Slot>> slots = below(to)->acquire(classes);
    if (!slots.ok()) return std::move(slots).status();
    for (size_t i = 0; i < work.size(); ++i) {
        work[i].to.slot = slots.value()[i];
        work[i].to.address = below(to)->address(work[i].to.slot);
    }
    return {};
}

void Mover::copy(std::vector<Work>& work, TierKind to) {
    std::vector<Work*> memory, from_disk, to_disk;
    for (Work& w : work) {
        if (!w.status.ok()) continue;
        (to == TierKind::kDisk ? to_disk : w.from.tier == TierKind::kDisk ? from_disk : memory).push_back(&w);
    }
    copy_in_memory(memory);
    copy_with_disk(to_disk, TierRequest::Kind::kWrite);
    copy_with_disk(from_disk, TierRequest::Kind::kRead);
}

void Mover::copy_in_memory(std::span<Work*> work) {
    if (work.empty()) return;
    const Geometry& g = pool_.geometry();
    if (Device* device = pool_.context().device()) {
        std::vector<DeviceCopy> copies;
        for (const Work* w : work) copies.push_back({w->to.address, w->from.address, g.slot_bytes(w->item->block->kind())});
        const Status s = device->copy(copies, work[0]->to.tier == TierKind::kHost);
        for (Work* w : work) w->status = copy_of(s);
        return;
    }
    for (Work* w : work) std::memcpy(w->to.address, w->from.address, g.slot_bytes(w->item->block->kind()));
}

void Mover::copy_with_disk(std::span<Work*> work, TierRequest::Kind kind) {
    if (work.empty()) return;
    const bool write = kind == TierRequest::Kind::kWrite;
    if (Device* device = pool_.context().device(); device && !write) {
        // Kernels may still read what these host slots held before.
        if (Status s = device->wait_for_steps(); !s.ok()) {
            for (Work* w : work) w->status = copy_of(s);
            return;
        }
    }
    std::vector<TierRequest> requests;
    for (size_t i = 0; i < work.size(); ++i) {
        const Block& block = *work[i]->item->block;
        TierRequest r;
        r.kind = kind;
        r.slot = write ? work[i]->to.slot : work[i]->from.slot;
        r.bytes = pool_.geometry().slot_bytes(block.kind());
        r.memory = write ? work[i]->from.address : work[i]->to.address;
        r.identity.block_index = work[i]->item->index;
        r.identity.content_id = block.content_id();
        r.identity.tokens = kPageTokens;
        r.tag = i;
        requests.push_back(r);
    }
    Latch latch(work.size());
    if (Result<TierBatch> batch = disk_->submit(requests, latch); !batch.ok()) {
        const Status s = std::move(batch).status();
        for (Work* w : work) w->status = copy_of(s);
        return;
    }
    std::vector<Status>& statuses = latch.wait();
    for (size_t i = 0; i < work.size(); ++i) work[i]->status = std::move(statuses[i]);
}

// What arrived in memory must match its hashes before anybody is sent there; a disk is checked when it is read.
void Mover::check(std::vector<Work>& work, TierKind to) {
    if (to == TierKind::kDisk) return;
    const Geometry& g = pool_.geometry();
    Device* device = pool_.context().device();
    if (device && to == TierKind::kDevice) {
        std::vector<PlacedBlock> placed;
        std::vector<Work*> arrived;
        for (Work& w : work) {
            if (!w.status.ok()) continue;
            placed.push_back({w.item->block.get(), w.item->index, w.to.address});
            arrived.push_back(&w);
        }
        std::vector<Status> statuses(placed.size());
        const Status all = pool_.verifier()->verify(placed, statuses);
        for (size_t i = 0; i < arrived.size(); ++i) arrived[i]->status = all.ok() ? std::move(statuses[i]) : copy_of(all);
        return;
    }
    std::lock_guard lock(checking_);
    checkers_.parallel_for(int64_t(work.size()), 1, [&](int64_t i, int) {
        Work& w = work[size_t(i)];
        if (w.status.ok() && w.from.tier != TierKind::kDisk)
            w.status = w.item->block->verify(g, pool_.fingerprint(), w.item->index, w.to.address);
    });
}

void Mover::give_back(const Work& w) {
    if (w.to.tier == TierKind::kDevice) {
        if (w.to.address) pool_.blocks().release_slot(w.item->block->kind(), w.to.address);
    } else if (w.to.slot.index != Slot::kNone) {
        below(w.to.tier)->release({&w.to.slot, 1});
    }
}

void Mover::finish(std::vector<Work>& work, TierKind to, MoveReason reason, double seconds, MoveProgress& progress) {
    MoveCounters counted;
    for (Work& w : work) {
        Block& block = *w.item->block;
        const uint64_t bytes = pool_.geometry().slot_bytes(block.kind());
        const bool pinned = w.status.ok() && block.pins() > 0 && to > w.from.tier;  // since it was taken
        if (w.status.ok() && !pinned) {
            pool_.blocks().move(block, w.to);
            w.over = true;
            ++progress.moved;
            ++counted.blocks_in[size_t(to)];
            ++counted.blocks_out[size_t(w.from.tier)];
            counted.bytes_in[size_t(to)] += bytes;
            counted.bytes_out[size_t(w.from.tier)] += bytes;
            counted.bytes_by_reason[size_t(reason)] += bytes;
        } else if (pinned || (reason == MoveReason::kPrefetch && w.status.code() == TA_E_TIER_FULL)) {
            give_back(w);
            w.over = true;
            ++progress.skipped;
        } else {
            give_back(w);
            w.over = true;
            if (w.status.code() == TA_E_CORRUPT) block.set_stuck();
            ++progress.failed;
            ++(w.status.code() == TA_E_CORRUPT ? counted.corrupt : counted.failed);
            if (progress.status.ok()) progress.status = std::move(w.status).block(int64_t(w.item->index));
        }
        block.end_move();
    }
    int bucket = 0;
    while (bucket < kLatencyBuckets - 1 && seconds > 1e-6 * double(uint64_t{1} << bucket)) ++bucket;
    std::lock_guard lock(mutex_);
    ++counters_.latency[size_t(to)][bucket];
    counters_.seconds[size_t(to)] += seconds;
    for (int t = 0; t < 3; ++t) {
        counters_.blocks_in[t] += counted.blocks_in[t];
        counters_.blocks_out[t] += counted.blocks_out[t];
        counters_.bytes_in[t] += counted.bytes_in[t];
        counters_.bytes_out[t] += counted.bytes_out[t];
    }
    for (int r = 0; r < kMoveReasons; ++r) counters_.bytes_by_reason[r] += counted.bytes_by_reason[r];
    counters_.failed += counted.failed;
    counters_.corrupt += counted.corrupt;
}

}  // namespace ta
