#include "tiering/move/mover.h"

#include <algorithm>
#include <chrono>
#include <system_error>

namespace ta {
namespace {

// The blocks of a part are cancelled, published and counted together.
constexpr uint64_t kPartBytes = 8 << 20, kFirstPartBytes = 1 << 20, kLastPartBytes = 1 << 20;
constexpr size_t kPartBlocks = 128;
constexpr size_t kPreparedBlocks = 8;      // so many are prepared at least while the first part is on its way
constexpr int kPartsHere = 2;              // parts that the caller of submit() starts itself: a thread wakes up 50 us later
constexpr uint64_t kSoonBytes = 16 << 20;  // when so little of a move is left, its waiters are woken early: 300 us before the
                                           // end
constexpr size_t kFlights = 4;             // parts that a thread has on their way
constexpr int kThreads = 2;                // of a lane: one starts copies while the other publishes blocks
constexpr int kMostCheckers = 12;  // threads that hash what arrived in host memory: 5 GB/s each from DRAM, the bus has 55
constexpr std::chrono::microseconds kCheckersPoll{100};  // longer than a part takes to arrive
constexpr std::chrono::milliseconds kAMoment{20};        // the least patience with readers, even past the deadline
constexpr size_t kHanded = 64;                           // parts started by callers that no thread has taken over yet
constexpr size_t kFinishedTickets = 4096;                // kept for queries

bool is_full(const MoveItem& item) {
    return item.block != nullptr;
}
bool is_full(const MoveRequest& request) {
    return request.full;
}
PageKind kind_of(const MoveItem& item) {
    return item.block->kind();
}
PageKind kind_of(const MoveRequest& request) {
    return request.kind;
}

void add(MoveProgress& all, MoveProgress&& part) {
    all.moved += part.moved;
    all.present += part.present;
    all.skipped += part.skipped;
    all.failed += part.failed;
    if (all.status.ok()) all.status = std::move(part.status);
}

}  // namespace

Mover::Mover(MoveHost pool, uint64_t first_ticket)
    : sharing_(std::move(pool)),
      copies_beside_(sharing_.pool.device && sharing_.pool.device->copies_beside()),
      tickets_(first_ticket) {}

Status Mover::start(MoveRoute route) {
    sharing_.route = route;
    const LowerTiers& tiers = sharing_.pool.tiers;
    const bool copies = tiers[TierKind::kPeer] || tiers[TierKind::kHost];
    if (Device* device = sharing_.pool.device; device && copies && route == MoveRoute::kCalibrated)
        TA_RETURN_IF_ERROR(device->calibrate_moves());
    const int processors = int(std::thread::hardware_concurrency());
    TA_RETURN_IF_ERROR(sharing_.checkers.start(std::clamp(processors * 3 / 4, 1, kMostCheckers), kCheckersPoll));
    try {
        for (std::vector<Flight>& handed : handed_) handed.reserve(kHanded);
        const size_t lanes = sharing_.pool.disk ? kLanes : kFromDisk;
        for (size_t i = 0; i < lanes * kThreads; ++i) {
            std::vector<Flight> flights;  // reserved here, where running out of memory can be reported
            flights.reserve(kFlights);
            threads_.emplace_back(
                [this, i, lanes, flights = std::move(flights)]() mutable { serve(Lane(i % lanes), flights); });
        }
    } catch (const std::system_error&) {
        return fail(TA_E_LIMIT, "the threads that move blocks could not be started");
    }
    // Keeps the disk's file last: nothing can fail after this.
    if (sharing_.pool.disk) sharing_.pool.disk->keep_file();
    return {};
}

Mover::~Mover() {
    stop();
}

void Mover::stop() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    cancel_all();
    for (std::condition_variable& threads : wake_) threads.notify_all();
    for (std::thread& t : threads_) t.join();
    threads_.clear();
}

// ----------------------------------------------------------------------------------------------------------------- tickets

Result<uint64_t> Mover::submit(std::span<const MoveItem> items, TierKind to, MoveReason reason) {
    std::vector<MoveRequest> requests;
    requests.reserve(items.size());
    for (const MoveItem& item : items)
        requests.push_back(item.block ? MoveRequest(item.block, item.index, item.last_used_at) : MoveRequest(item.index));
    return submit(std::move(requests), to, reason);
}

Result<uint64_t> Mover::submit(std::vector<MoveRequest> requests, TierKind to, MoveReason reason) {
    auto ticket = std::make_shared<Ticket>();
    ticket->requests = std::move(requests);
    ticket->to = to;
    ticket->reason = reason;
    ticket->progress.blocks = ticket->requests.size();
    if (reason == MoveReason::kPrefetch) {
        for (MoveRequest& request : ticket->requests) {
            const BlockPtr block = request.block.lock();
            request.prefetched = block && block->tier() != to;
            if (request.prefetched) block->prefetch().ask();
        }
    }
    const size_t n = ticket->requests.size();
    size_t in_memory = n;  // requests outside the disk, which are sorted to the front
    if (sharing_.pool.disk && to != TierKind::kDisk) {
        const auto rest = std::stable_partition(ticket->requests.begin(), ticket->requests.end(),
                                                [](const MoveRequest& r) { return r.from != TierKind::kDisk; });
        in_memory = size_t(rest - ticket->requests.begin());
    }
    const Lane lane = to == TierKind::kDevice ? kToDevice : to == TierKind::kDisk ? kToDisk : kToMemory;
    std::unique_lock lock(mutex_);
    ticket->id = ++tickets_;
    try {
        known_.emplace(ticket->id, ticket);
        if (in_memory > 0 || n == 0) enqueue(ticket, lane, 0, in_memory);
        if (in_memory < n) enqueue(ticket, kFromDisk, in_memory, n);
    } catch (...) {
        unqueue(ticket);
        known_.erase(ticket->id);
        lock.unlock();
        end_prefetches(ticket->requests);
        throw;
    }
    if (in_memory < n) wake_[kFromDisk].notify_all();
    if (in_memory == 0 && n > 0) return ticket->id;
    // The caller waits for an asked-for move: the first parts are on their way before a thread is awake.
    if (copies_beside_ && reason == MoveReason::kAsked && to != TierKind::kDisk) start_here(*ticket, lane, lock);
    wake_[lane].notify_all();
    return ticket->id;
}

// Under the lock.
void Mover::enqueue(const std::shared_ptr<Ticket>& ticket, Lane lane, size_t first, size_t end) {
    queues_[lane].push_back(ticket);
    ticket->legs[lane] = {first, end, 0, true};
    ++ticket->queued;
}

// Removes the ticket from all queues; parts that threads have taken go on. Under the lock.
void Mover::unqueue(const std::shared_ptr<Ticket>& ticket) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
        Leg& leg = ticket->legs[lane];
        if (!leg.queued) continue;
        Queue& queue = queues_[lane];
        queue.erase(std::find(queue.begin(), queue.end(), ticket));
        leg.queued = false;
    }
    ticket->queued = 0;
}

// While the ticket is first in its queue, starts parts of it here; the lane's threads finish them. Gives up the lock meanwhile.
void Mover::start_here(const Ticket& ticket, Lane lane, std::unique_lock<std::mutex>& lock) {
    const Queue& queue = queues_[lane];
    std::vector<Flight>& handed = handed_[lane];
    for (int i = 0; i < kPartsHere && !queue.empty() && queue.front().get() == &ticket; ++i) {
        if (handed.size() + handing_[lane] >= kHanded) return;
        Flight flight;
        take_part(lane, flight);
        ++handing_[lane];
        lock.unlock();
        flight.stage = Flight::Stage::kPrepared;
        const bool at_once = prepare(flight) && flight.part && flight.part->starts_at_once();
        if (at_once) {
            start(flight);
            flight.stage = Flight::Stage::kStarted;
        }
        lock.lock();
        --handing_[lane];
        handed.push_back(std::move(flight));  // cannot allocate: its capacity is kHanded
        if (!at_once) return;
    }
}

// How many of the first items form the next part. `before`: bytes of the parts before it. Towards the end of a move parts are
// small, so that little is left to check when the last one has arrived. (Parts for a device stay large: it checks faster than
// anybody waits.) If the device copies beside this thread, the first parts are small, too, so that the bus is busy before all
// is prepared. Otherwise parts are large: between two parts the bus idles for 3 us.
template <class Item>
Mover::Cut Mover::cut_part(std::span<const Item> items, TierKind to, uint64_t before) const {
    const Geometry& g = sharing_.pool.pages.geometry;
    const auto bytes_of = [&](const Item& item) { return is_full(item) ? uint64_t{g.slot_bytes(kind_of(item))} : 0; };
    const auto full = std::find_if(items.begin(), items.end(), [](const Item& item) { return is_full(item); });
    const uint64_t left = full == items.end() ? 0 : uint64_t(items.end() - full) * bytes_of(*full);  // an estimate: as if all
                                                                                                     // had the first one's kind
    const uint64_t most = is_of_devices(to) ? 2 * kPartBytes : std::clamp(left / 2, kLastPartBytes, kPartBytes);
    const uint64_t soon = copies_beside_ && to != TierKind::kDisk ? std::max(2 * before, kFirstPartBytes) : most;
    Cut cut;
    while (cut.items < items.size() && cut.items < kPartBlocks && cut.bytes < most &&
           (cut.bytes < soon || (before > 0 && cut.items < kPreparedBlocks)))
        cut.bytes += bytes_of(items[cut.items++]);
    return cut;
}

// `flights`: the thread's own, oldest first, with capacity for kFlights.
void Mover::serve(Lane lane, std::vector<Flight>& flights) {
    std::unique_lock lock(mutex_);
    const auto some = [&] { return stopping_ || !queues_[lane].empty() || !handed_[lane].empty(); };
    for (;;) {
        if (flights.empty()) wake_[lane].wait(lock, some);
        Flight next;
        if (flights.size() < kFlights && take_flight(lane, next)) {
            lock.unlock();
            if (next.stage != Flight::Stage::kStarted) {
                if (next.stage == Flight::Stage::kPrepared || !prepare(next)) land_all(flights);
                start(next);
            }
            if (next.part) next.part->wake_checkers();
            flights.push_back(std::move(next));
            lock.lock();
            continue;
        }
        if (flights.empty()) {
            if (stopping_) return;
            continue;
        }
        lock.unlock();
        land(flights.front());
        flights.erase(flights.begin());
        lock.lock();
    }
}

// Takes a part that a caller has handed over, else the next part of the queue. Under the lock.
bool Mover::take_flight(Lane lane, Flight& flight) {
    if (handed_[lane].empty()) return take_part(lane, flight);
    flight = std::move(handed_[lane].front());
    handed_[lane].erase(handed_[lane].begin());
    return true;
}

// If the ticket finishes soon, wakes its waiters now, so that they are awake then. Under the lock.
void Mover::look_ahead(Ticket& t) {
    if (t.landing || t.queued > 0 || (t.parts > 1 && t.left > kSoonBytes)) return;
    t.landing = true;
    finished_.notify_all();
}

// Takes the next part of the oldest ticket. False: the queue is empty. Under the lock.
bool Mover::take_part(Lane lane, Flight& flight) {
    Queue& queue = queues_[lane];
    if (queue.empty()) return false;
    flight.ticket = queue.front();
    Ticket& t = *flight.ticket;
    Leg& leg = t.legs[lane];
    t.progress.state = TA_MOVE_RUNNING;
    const std::span<const MoveRequest> rest = std::span(t.requests).subspan(leg.next, leg.end - leg.next);
    const Cut cut = cut_part(rest, t.to, leg.taken);
    flight.requests = rest.first(cut.items);
    flight.bytes = cut.bytes;
    leg.next += cut.items;
    leg.taken += cut.bytes;
    t.left += cut.bytes;
    if (leg.next == leg.end) {
        leg.queued = false;
        --t.queued;
        queue.pop_front();
    }
    ++t.parts;
    return true;
}

// Makes the part and prepares it; returns as MovePart::prepare() does.
bool Mover::prepare(Flight& flight) {
    try {
        flight.items.reserve(flight.requests.size());
        for (const MoveRequest& r : flight.requests) flight.items.push_back({r.block.lock(), r.index, r.last_used_at});
        flight.part = std::make_unique<MovePart>(sharing_, flight.items, flight.ticket->to, flight.ticket->reason,
                                                 kReadersPatience, &flight.ticket->disk_work);
        return flight.part->prepare();
    } catch (const std::bad_alloc&) {
        flight.part.reset();
        return true;
    }
}

void Mover::start(Flight& flight) {
    try {
        if (flight.part) flight.part->start();
    } catch (const std::bad_alloc&) {
        flight.part.reset();
    }
}

void Mover::land_all(std::vector<Flight>& flights) {
    for (Flight& flight : flights) land(flight);
    flights.clear();
}

// Finishes a part and adds its outcome to the ticket.
void Mover::land(Flight& flight) {
    {
        std::lock_guard lock(mutex_);
        look_ahead(*flight.ticket);
    }
    MoveProgress part;
    try {
        if (!flight.part) throw std::bad_alloc();
        flight.part->finish();
        part = std::move(flight.part->progress());
    } catch (const std::bad_alloc&) {
        if (flight.part) part = std::move(flight.part->progress());
        part.failed = flight.requests.size() - part.moved - part.present - part.skipped;
        part.status = fail(TA_E_MEMORY, "no memory for the bookkeeping of a move");
    }
    flight.part.reset();
    end_prefetches(flight.requests);
    flight.items.clear();            // before the lock: the last owner of a block gives it back here
    std::vector<MoveRequest> freed;  // destroyed after the lock is released: that may take long
    std::lock_guard lock(mutex_);
    Ticket& t = *flight.ticket;
    add(t.progress, std::move(part));
    t.left -= flight.bytes;
    end_part(t, freed);
}

// Tells the blocks that a ticket which prefetched them has ended. Not under the lock: this may be a block's last owner.
void Mover::end_prefetches(std::span<const MoveRequest> requests) {
    for (const MoveRequest& request : requests) {
        if (!request.prefetched) continue;
        if (const BlockPtr block = request.block.lock()) block->prefetch().end();
    }
}

// Counts a part as over. The last part of a ticket finishes it. Under the lock.
void Mover::end_part(Ticket& t, std::vector<MoveRequest>& freed) {
    if (--t.parts > 0 || t.queued > 0) return;
    const uint64_t done = t.progress.moved + t.progress.present + t.progress.skipped + t.progress.failed;
    t.progress.state = t.progress.failed ? TA_MOVE_FAILED : done < t.progress.blocks ? TA_MOVE_CANCELLED : TA_MOVE_DONE;
    t.finished.store(true, std::memory_order_release);
    sharing_.pool.store.room_signal().notify();
    freed.swap(t.requests);
    if (t.reason == MoveReason::kAsked || t.reason == MoveReason::kPrefetch) told_.add(t.id);
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
}

MoveProgress Mover::run(std::span<const MoveItem> items, TierKind to, MoveReason reason, Deadline until) {
    MoveProgress progress;
    progress.blocks = items.size();
    // A step waits no longer than its pool allows.
    const auto most = std::min(kReadersPatience, sharing_.pool.patience);
    const auto patience = [&] {
        if (until == kNoDeadline) return most;
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
        return std::clamp(left, std::min(most, kAMoment), most);
    };
    std::deque<std::unique_ptr<MovePart>> flights;
    const auto land_first = [&] {
        flights.front()->finish();
        add(progress, std::move(flights.front()->progress()));
        flights.pop_front();
    };
    uint64_t before = 0;
    while (!items.empty()) {
        const auto [n, bytes] = cut_part(items, to, before);
        before += bytes;
        auto next = std::make_unique<MovePart>(sharing_, items.first(n), to, reason, patience());
        const bool at_once = next->prepare();
        while (!flights.empty() && (!at_once || flights.size() == kFlights)) land_first();
        next->start();
        flights.push_back(std::move(next));
        items = items.subspan(n);
    }
    while (!flights.empty()) land_first();
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
    constexpr int64_t kYear = int64_t{366} * 24 * 3600 * 1'000'000'000;  // a longer wait is unlimited
    constexpr std::chrono::milliseconds kSpin{1};
    const auto soon = [&] { return t->landing || over(); };
    const bool for_ever = nanoseconds < 0 || nanoseconds > kYear;
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(for_ever ? kYear : nanoseconds);
    if (nanoseconds != 0 && finished_.wait_until(lock, end, soon)) {
        // The last part takes about as long as waking up does.
        const auto spin_end = std::min(end, std::chrono::steady_clock::now() + kSpin);
        while (!over() && std::chrono::steady_clock::now() < spin_end) {
            lock.unlock();
            while (!t->finished.load(std::memory_order_acquire) && std::chrono::steady_clock::now() < spin_end)
                std::this_thread::yield();
            lock.lock();
        }
        finished_.wait_until(lock, end, over);
    }
    const MoveProgress& p = t->progress;
    return MoveProgress{p.state, p.blocks, p.moved, p.present, p.skipped, p.failed, p.status.clone()};
}

Status Mover::cancel(uint64_t ticket) {
    std::shared_ptr<Ticket> found;
    {
        std::lock_guard lock(mutex_);
        if (const auto known = known_.find(ticket); known != known_.end()) found = known->second;
    }
    if (!found)
        return fail(TA_E_STALE, "%llu is no ticket of this pool, or one that finished long ago", (unsigned long long)ticket);
    cancel(found);
    return {};
}

// Ends the requests that no thread has taken at once, as a part that moves nothing.
void Mover::cancel(const std::shared_ptr<Ticket>& ticket) {
    Ticket& t = *ticket;
    std::vector<MoveRequest> freed;
    std::unique_lock lock(mutex_);
    if (sharing_.pool.disk) t.disk_work.cancel(*sharing_.pool.disk);
    if (t.queued == 0) return;
    unqueue(ticket);
    ++t.parts;
    if (t.reason == MoveReason::kPrefetch) {
        lock.unlock();
        for (const Leg& leg : t.legs) end_prefetches(std::span(t.requests).subspan(leg.next, leg.end - leg.next));
        lock.lock();
    }
    end_part(t, freed);
}

void Mover::cancel_all() {
    for (;;) {
        std::shared_ptr<Ticket> next;
        std::unique_lock lock(mutex_);
        for (const Queue& queue : queues_) {
            if (!queue.empty()) next = queue.front();
        }
        if (next) {
            lock.unlock();
            cancel(next);
            continue;
        }
        for (auto& [id, ticket] : known_) {
            if (sharing_.pool.disk) ticket->disk_work.cancel(*sharing_.pool.disk);
        }
        return;
    }
}

Result<int> Mover::finished_descriptor() {
    std::lock_guard lock(mutex_);
    told_.expect(FinishedTickets::kMost);
    if (!told_.open()) return fail(TA_E_LIMIT, "the system gives no event descriptor");
    return told_.descriptor();
}

Result<uint64_t> Mover::take_finished(std::span<uint64_t> out) {
    if (told_.descriptor() < 0) return fail(TA_E_STATE, "nobody waits for tickets: ta_kv_pool_descriptor belongs first");
    return told_.take(out);
}

MoveCounters Mover::counters() const {
    std::lock_guard lock(sharing_.counting);
    return sharing_.counters;
}

uint64_t Mover::queued() const {
    std::lock_guard lock(mutex_);
    return known_.size() - done_.size();
}

}  // namespace ta
