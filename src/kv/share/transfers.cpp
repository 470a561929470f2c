#include "src/kv/share/transfers.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "kernels/format/hash.h"
#include "src/kv/share/transfer.h"

namespace ta::share {
namespace {

constexpr uint64_t kMostOfferedBytes = uint64_t{256} << 20;  // of offers that no caller has asked for

Time after(std::chrono::milliseconds from_now) {
    return Clock::now() + from_now;
}

// True if these are positions in a list of n blocks, in ascending order, each once. So a peer cannot ask for more than there
// is.
bool are_positions(std::span<const uint64_t> positions, uint64_t n) {
    return std::adjacent_find(positions.begin(), positions.end(), std::greater_equal<>()) == positions.end() &&
           (positions.empty() || positions.back() < n);
}

}  // namespace

TransferProgress TransferProgress::clone() const {
    return {state, peer, tag, blocks, blocks_moved, blocks_shared, bytes_moved, seq, length, status.clone()};
}

Transfers::Transfers(Group& group, SharedSpaces* spaces) : group_(group), spaces_(spaces), begun_(group.settings().ranks) {
    const uint64_t of[] = {group.settings().generation, group.settings().rank};
    tickets_ = hash_bytes(of, sizeof of) >> 33 << 32;  // so that tickets of another group are none of this one
    done_.reserve(kMostFinished + 1);
}

Status Transfers::start() {
    TA_RETURN_IF_ERROR(coming_.start());
    return leaving_.start();
}

void Transfers::stop() {
    on_end(fail(TA_E_STATE, "the group was destroyed"));  // a lane may wait for room
    coming_.stop();
    leaving_.stop();
    std::vector<Ptr> left;
    {
        const std::lock_guard lock(mutex_);
        left.swap(live_);
    }
    for (const Ptr& t : left) let_go(*t, t->phase == Phase::kOver && t->ending.ok());
}

Lane& Transfers::lane_of(const Transfer& t) {
    return t.outgoing ? leaving_ : coming_;
}

// ------------------------------------------------------------------------------------------------------------------- calls

// Adds a transfer. If the caller fails afterwards, it calls forget(). Under mutex_.
Transfers::Ptr Transfers::add(std::shared_ptr<Pool> pool, bool outgoing, uint32_t peer, uint64_t tag) {
    auto t = std::make_shared<Transfer>();
    t->ticket = ++tickets_;
    t->outgoing = outgoing;
    t->pool = std::move(pool);
    t->progress.peer = peer;
    t->progress.tag = tag;
    t->deadline = after(group_.settings().operation);
    t->told = Clock::now();
    t->end.push_back([this, raw = t.get()] {
        const Ptr kept = [&] {
            const std::lock_guard lock(mutex_);
            return known_.at(raw->ticket);
        }();
        let_go(*kept, kept->ending.ok());
        publish(*kept);
    });
    live_.reserve(live_.size() + 1);
    group_.finished().expect(live_.size() + 1);
    known_.emplace(t->ticket, t);
    live_.push_back(t);
    return t;
}

void Transfers::forget(const Ptr& t) {
    known_.erase(t->ticket);
    std::erase(live_, t);
}

Result<uint64_t> Transfers::send(std::shared_ptr<Pool> pool, ta_seq seq, uint32_t to, uint64_t tag, bool move) {
    TA_RETURN_IF_ERROR(group_.check_ready());
    auto out = std::make_unique<Outgoing>(pool->residency());
    struct Unlock {
        Pool* pool;
        Outgoing* out;
        ~Unlock() {
            if (out) pool->sequences().unlock_for_plan(out->locked);
        }
    } unlock{pool.get(), move ? out.get() : nullptr};
    if (move) {
        Result<std::vector<Sequence*>> locked = pool->sequences().lock_for_plan({&seq, 1});
        if (!locked.ok()) return std::move(locked).status().argument(2).sequence(-1);
        out->locked = locked.take();
    }
    Result<Sequences::Snapshot> snapshot =
        move ? pool->sequences().snapshot_in_plan(*out->locked[0]) : pool->sequences().snapshot(seq);
    if (!snapshot.ok()) return std::move(snapshot).status().argument(2);
    out->snapshot = snapshot.take();
    out->seq = seq;
    const Sequences::Snapshot& s = out->snapshot;
    out->list.reserve(s.blocks.size());
    for (size_t i = 0; i < s.blocks.size(); ++i) {
        const Block& block = *s.blocks[i];
        if (block.dropped()) {
            return fail(TA_E_STATE, "a sequence with blocks that were dropped cannot be sent").argument(2).block(int64_t(i));
        }
        StoredBlock b{};
        b.content_id = block.content_id();
        b.index = i;
        b.tokens = block.full() ? kPageTokens : uint32_t(s.length - int64_t(i) * kPageTokens);
        b.kind = uint8_t(block.kind());
        out->list.push_back(b);
    }
    OfferHeader offer = offer_of(*pool);
    offer.tag = tag;
    offer.length = s.length;
    offer.blocks = s.blocks.size();
    offer.space = pool->tag_of(s);
    const std::vector<uint8_t> payload = PayloadWriter().put(offer).put_all(std::span<const StoredBlock>(out->list)).bytes();

    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    const Ptr t = add(std::move(pool), true, to, tag);
    t->channel = uint64_t(group_.settings().rank) << 40 | ++channels_;
    t->progress.blocks = offer.blocks;
    t->progress.length = offer.length;
    try {
        group_.send(to, MessageType::kOffer, t->channel, payload);
    } catch (...) {
        forget(t);
        throw;
    }
    t->out = std::move(out);
    t->out->offered = true;
    unlock.out = nullptr;
    group_.wake();
    return t->ticket;
}

Result<uint64_t> Transfers::receive(std::shared_ptr<Pool> pool, uint32_t from, uint64_t tag) {
    TA_RETURN_IF_ERROR(group_.check_ready());
    TA_RETURN_IF_ERROR(pool->check_open());
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    const Ptr t = add(std::move(pool), false, from, tag);
    const auto offer = std::find_if(offers_.begin(), offers_.end(), [&](const Offer& o) {
        OfferHeader h{};
        return o.from == from && PayloadReader(o.payload).get(h) && h.tag == tag;
    });
    if (offer != offers_.end()) {
        const size_t bytes = offer->payload.size();
        try {
            match(t, *offer);
        } catch (...) {
            forget(t);
            throw;
        }
        offers_.erase(offer);
        offered_bytes_ -= bytes;
    }
    group_.wake();
    return t->ticket;
}

Result<TransferProgress> Transfers::wait(uint64_t ticket, int64_t nanoseconds) const {
    std::unique_lock lock(mutex_);
    const auto found = known_.find(ticket);
    if (found == known_.end()) {
        return fail(TA_E_STALE, "0x%llx is no ticket of this group, or finished long ago", (unsigned long long)ticket);
    }
    const Ptr t = found->second;
    finished_.wait_until(lock, time_after(nanoseconds), [&t] { return t->progress.state >= TA_MOVE_DONE; });
    return t->progress.clone();
}

Status Transfers::cancel(uint64_t ticket) {
    const std::lock_guard lock(mutex_);
    const auto found = known_.find(ticket);
    if (found == known_.end()) {
        return fail(TA_E_STALE, "0x%llx is no ticket of this group, or finished long ago", (unsigned long long)ticket);
    }
    Transfer& t = *found->second;
    if (t.phase == Phase::kWaiting || t.phase == Phase::kMoving) {
        t.cancelled_here = true;
        begin_cancel(t, fail(TA_E_CANCELLED, "the transfer was cancelled"));
        group_.wake();
    } else if (t.phase == Phase::kLanding) {
        t.cancelled_here = true;  // a fetch then fetches nothing more
    }
    return {};
}

// ------------------------------------------------------------------------------------------------------ ends (under mutex_)

// If there is no memory for the message, the peer's own deadline ends the transfer there.
void Transfers::tell(uint32_t to, MessageType type, uint64_t channel, const Ending* ending) noexcept {
    const auto* bytes = reinterpret_cast<const uint8_t*>(ending);
    try {
        group_.send(to, type, channel, {bytes, ending ? sizeof *ending : 0});
    } catch (const std::bad_alloc&) {
    }
}

// Stops a transfer. It ends when the peer has answered, or if it cannot.
void Transfers::begin_cancel(Transfer& t, Status why) {
    if (t.phase == Phase::kCancelling || t.phase == Phase::kOver) return;
    const bool peer_knows = t.channel != 0 && ended_.ok();
    if (peer_knows) {
        t.phase = Phase::kCancelling;
        t.pool->blocks().room_signal().notify();  // its lane may wait on the signal
        touch(t);
        const Ending ending = Ending::of(why);
        tell(t.progress.peer, MessageType::kCancel, t.channel, &ending);
        t.ending = std::move(why);
        return;
    }
    conclude(t, std::move(why));
}

// Ends a transfer. After the running task its lane releases all that the transfer holds, and finishes the ticket.
void Transfers::conclude(Transfer& t, Status status) noexcept {
    if (t.phase == Phase::kOver) return;
    t.phase = Phase::kOver;
    t.pool->blocks().room_signal().notify();  // its lane may wait on the signal
    t.ending = std::move(status);
    lane_of(t).post(std::move(t.end));
}

void Transfers::publish(Transfer& t) noexcept {
    const std::lock_guard lock(mutex_);
    TransferProgress& p = t.progress;
    const bool cancelled = t.cancelled_here && t.ending.code() == TA_E_CANCELLED;
    p.state = t.ending.ok() ? TA_MOVE_DONE : cancelled ? TA_MOVE_CANCELLED : TA_MOVE_FAILED;
    p.status = std::move(t.ending);
    std::erase_if(live_, [&t](const Ptr& other) { return other.get() == &t; });
    if (t.served) {
        --served_;
        known_.erase(t.ticket);
        return;
    }
    done_.push_back(t.ticket);
    if (done_.size() > kMostFinished) {
        known_.erase(done_.front());
        done_.erase(done_.begin());
    }
    finished_.notify_all();
    group_.finished().add(t.ticket);
}

void Transfers::touch(Transfer& t) {
    t.deadline = after(group_.settings().operation);
}

// Notes that the lane has made progress with the transfer.
void Transfers::works(Transfer& t) noexcept {
    touch(t);
    worked_[t.outgoing] = Clock::now();
    tell_goes_on(t);
}

// True while the peer waits for this rank's work on the transfer.
bool Transfers::has_work(const Transfer& t) {
    return (t.phase == Phase::kMoving && (t.queued > 0 || t.runs)) || t.phase == Phase::kLanding;
}

// Tells the peer now and then that this rank goes on: it may hear nothing else of the transfer for longer than it is willing to
// wait.
void Transfers::tell_goes_on(Transfer& t) noexcept {
    const Time now = Clock::now();
    const bool is_begun = t.phase == Phase::kMoving || t.phase == Phase::kLanding;
    if (!is_begun || t.channel == 0 || now < t.told + telling_interval()) return;
    t.told = now;
    tell(t.progress.peer, MessageType::kGoesOn, t.channel);
}

// When the transfer times out, for want of progress of the peer or of this rank's lane. The lane may be busy with other
// transfers, or wait for room as long as a step may; so it gets that time on top of the usual one. A landing transfer does not
// time out.
Time Transfers::deadline_of(const Transfer& t) const {
    const std::chrono::milliseconds operation = group_.settings().operation;
    if (t.phase == Phase::kLanding) return Time::max();
    if (!has_work(t)) return t.deadline;
    const Patience& room = t.pool->tier_settings().patience;
    return std::max(t.deadline, worked_[t.outgoing] + operation + std::max(room.plans, room.moves));
}

Time Transfers::on_time(Time now) {
    const std::lock_guard lock(mutex_);
    const std::chrono::milliseconds operation = group_.settings().operation;
    Time next = Time::max();
    for (const Ptr& t : live_) {
        if (t->phase == Phase::kOver) continue;
        const bool works = has_work(*t);
        const Time deadline = deadline_of(*t);
        if (deadline <= now) {
            if (t->phase == Phase::kCancelling) {
                conclude(*t, std::move(t->ending));
                continue;
            }
            const uint32_t idle = works ? group_.settings().rank : t->progress.peer;
            begin_cancel(
                *t, fail(TA_E_TIMEOUT, "rank %u did nothing for the transfer in %lld ms", idle, (long long)operation.count())
                        .rank(int32_t(idle)));
        } else if (works) {
            tell_goes_on(*t);
            if (t->channel != 0) next = std::min(next, t->told + telling_interval());
        }
        if (t->phase != Phase::kOver) next = std::min(next, deadline_of(*t));
    }
    return next;
}

void Transfers::on_end(const Status& why) {
    const std::lock_guard lock(mutex_);
    if (ended_.ok()) ended_ = why.clone();
    offers_.clear();
    offered_bytes_ = 0;
    for (const Ptr& t : live_) {
        if (t->phase == Phase::kLanding) continue;
        conclude(*t, t->phase == Phase::kCancelling ? std::move(t->ending) : why.clone());
    }
}

// ---------------------------------------------------------------------------------------------------------------- messages

Transfers::Ptr Transfers::find(uint64_t channel, uint32_t peer) const {
    for (const Ptr& t : live_) {
        if (t->channel != 0 && t->channel == channel && t->progress.peer == peer) return t;
    }
    return nullptr;
}

Transfers::Ptr Transfers::find(uint64_t channel, uint32_t peer, bool outgoing) const {
    const Ptr t = find(channel, peer);
    return t && t->outgoing == outgoing ? t : nullptr;
}

// True if the rank may begin a transfer on the channel: channels have the number of the rank that begins, and ascend. Under
// mutex_.
bool Transfers::begins(uint32_t from, uint64_t channel) {
    if (channel >> 40 != from || channel <= begun_[from]) return false;
    begun_[from] = channel;
    return true;
}

// Wraps a task for the transfer's lane. If the task fails, the transfer is cancelled.
std::function<void()> Transfers::guarded(const Ptr& t, Task task) {
    return [this, t, task] {
        {
            const std::lock_guard lock(mutex_);
            --t->queued;
            if (t->phase != Phase::kMoving) return;
            t->runs = true;
            works(*t);
        }
        Status s;
        try {
            s = (this->*task)(*t);
        } catch (const std::bad_alloc&) {
            s = fail(TA_E_MEMORY, "no memory for a transfer");
        }
        const std::lock_guard lock(mutex_);
        t->runs = false;
        if (s.ok()) return;
        if (t->phase == Phase::kLanding) t->phase = Phase::kMoving;
        begin_cancel(*t, std::move(s));
        group_.wake();
    };
}

// Posts tasks to the transfer's lane. Under mutex_.
void Transfers::post(Transfer& t, Lane::Tasks&& tasks) noexcept {
    t.queued += tasks.size();
    lane_of(t).post(std::move(tasks));
}

Status Transfers::on_message(const Message& m) {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return {};
    const uint32_t from = m.header.from;
    const auto type = MessageType(m.header.type);
    if (type == MessageType::kFetch) return on_fetch(m);
    // The channel's number has the rank that began the transfer.
    const bool mine = m.header.channel >> 40 == group_.settings().rank;
    if (type == MessageType::kOffer) return mine ? on_fetched_offer(m) : on_offer(m);
    if (type == MessageType::kReady) return on_ready(m);
    if (type == MessageType::kSent) return on_sent(m);
    if (type == MessageType::kAskLease) return on_ask_lease(m);
    if (type == MessageType::kLeased) return on_leased(m);
    const Ptr t = find(m.header.channel, from);
    PayloadReader payload(m.payload);
    Ending ending{};
    if (type == MessageType::kCancel && payload.get(ending) && payload.at_end() && ending.is_valid(group_.settings().ranks)) {
        on_cancel(m, t, ending);
    } else if (type == MessageType::kCancelled) {
        if (t && t->phase == Phase::kCancelling) conclude(*t, std::move(t->ending));
    } else if (type == MessageType::kArrived) {
        return on_arrived(from, t);
    } else if (type == MessageType::kGoesOn && payload.at_end()) {
        if (t && (t->phase == Phase::kWaiting || t->phase == Phase::kMoving)) touch(*t);
    } else {
        return no_message(from);
    }
    return {};
}

// Full blocks an earlier transfer may have brought, so the destination need not ask for them. An open block, and what it asked
// for, it cannot have before they were sent.
Status Transfers::on_arrived(uint32_t from, const Ptr& t) {
    if (!t || !t->outgoing || t->phase == Phase::kOver) return {};
    const auto is_full = [](const StoredBlock& b) { return b.tokens == uint32_t(kPageTokens); };
    const Outgoing& out = *t->out;
    if (!out.offered || !out.asked.empty() || (!out.sent_open && !std::all_of(out.list.begin(), out.list.end(), is_full)))
        return no_message(from);
    conclude(*t, {});
    return {};
}

Status Transfers::on_offer(const Message& m) {
    const uint32_t from = m.header.from;
    OfferHeader offer{};
    if (!begins(from, m.header.channel) || !PayloadReader(m.payload).get(offer))
        return fail(TA_E_PEER_LOST, "rank %u sent an offer that is none", from).rank(int32_t(from));
    for (const Ptr& t : live_) {
        const bool waits = !t->outgoing && t->channel == 0 && t->phase == Phase::kWaiting;
        if (!waits || t->progress.peer != from || t->progress.tag != offer.tag) continue;
        Offer taken{from, m.header.channel, m.payload};
        match(t, taken);
        return {};
    }
    if (offered_bytes_ + m.payload.size() > kMostOfferedBytes) {
        const Ending full = Ending::of(
            fail(TA_E_LIMIT, "too many sequences are offered to rank %u that it has not asked for", group_.settings().rank)
                .rank(int32_t(group_.settings().rank)));
        tell(from, MessageType::kCancel, m.header.channel, &full);
        return {};
    }
    offered_bytes_ += m.payload.size();
    offers_.push_back({from, m.header.channel, m.payload});
    return {};
}

// The transfer takes the offer. If memory runs out, neither has changed.
void Transfers::match(const Ptr& t, Offer& offer) {
    auto in = std::make_unique<Incoming>(*t->pool, &coming_);
    Lane::Tasks prepare{guarded(t, &Transfers::prepare)};
    in->offer_bytes = std::move(offer.payload);
    t->in = std::move(in);
    t->channel = offer.channel;
    t->phase = Phase::kMoving;
    t->progress.state = TA_MOVE_RUNNING;
    t->told = Clock::now();
    touch(*t);
    post(*t, std::move(prepare));
}

Status Transfers::on_ready(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, true);
    if (!t || (t->phase != Phase::kWaiting && t->phase != Phase::kMoving)) return {};
    PayloadReader payload(m.payload);
    ReadyHeader ready{};
    std::vector<uint64_t> positions;
    const bool good = payload.get(ready) && payload.get_rest(ready.blocks, positions) && t->out->offered &&
                      t->out->asked.size() < kWindows && are_positions(positions, t->out->list.size());
    if (!good) {
        return fail(TA_E_PEER_LOST, "rank %u asks for blocks that were not offered", m.header.from)
            .rank(int32_t(m.header.from));
    }
    t->out->asked.push_back({ready.window, ready.on_gpu != 0, std::move(positions)});
    t->phase = Phase::kMoving;
    t->progress.state = TA_MOVE_RUNNING;
    touch(*t);
    post(*t, {guarded(t, &Transfers::write_window)});
    return {};
}

Status Transfers::on_sent(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, false);
    if (!t || t->phase != Phase::kMoving) return {};
    PayloadReader payload(m.payload);
    SentHeader sent{};
    std::vector<uint64_t> said;
    std::deque<Incoming::Window>& windows = t->in->windows;
    const auto w = std::find_if(windows.begin(), windows.end(), [](const Incoming::Window& x) { return !x.filled; });
    if (!payload.get(sent) || !payload.get_rest(sent.blocks, said) || w == windows.end() || sent.window != w->number ||
        said.size() != w->positions.size()) {
        return fail(TA_E_PEER_LOST, "rank %u sent blocks that nobody asked for", m.header.from).rank(int32_t(m.header.from));
    }
    w->filled = true;
    w->said = std::move(said);
    touch(*t);
    post(*t, {guarded(t, &Transfers::take_in_window)});
    return {};
}

Status Transfers::on_ask_lease(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, true);
    if (!t || (t->phase != Phase::kWaiting && t->phase != Phase::kMoving)) return {};
    PayloadReader payload(m.payload);
    AskLeaseHeader asked{};
    std::vector<uint64_t> positions;
    Outgoing& out = *t->out;
    const bool good = payload.get(asked) && payload.get_rest(asked.blocks, positions) && out.offered &&
                      !std::exchange(out.leased, true) && are_positions(positions, out.list.size());
    if (!good) {
        return fail(TA_E_PEER_LOST, "rank %u asks for blocks that were not offered", m.header.from)
            .rank(int32_t(m.header.from));
    }
    out.leased_positions = std::move(positions);
    t->phase = Phase::kMoving;
    t->progress.state = TA_MOVE_RUNNING;
    touch(*t);
    post(*t, {guarded(t, &Transfers::lease)});
    return {};
}

Status Transfers::on_leased(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, false);
    if (!t || t->phase != Phase::kMoving) return {};
    PayloadReader payload(m.payload);
    LeasedHeader leased{};
    std::vector<uint64_t> offsets;
    if (!payload.get(leased) || !payload.get_rest(leased.blocks, offsets) || !std::exchange(t->in->asked_lease, false) ||
        offsets.size() != t->in->positions.size()) {
        return fail(TA_E_PEER_LOST, "rank %u leases blocks that nobody asked for", m.header.from).rank(int32_t(m.header.from));
    }
    t->in->leased = leased;
    t->in->offsets = std::move(offsets);
    touch(*t);
    post(*t, {guarded(t, &Transfers::take_in_leased)});
    return {};
}

// Handles the peer's cancel. The answer is posted to the lane: when it is sent, nothing of this rank writes any more.
void Transfers::on_cancel(const Message& m, const Ptr& t, const Ending& ending) {
    const uint32_t from = m.header.from;
    const uint64_t channel = m.header.channel;
    std::erase_if(offers_, [&](const Offer& o) {
        const bool same = o.from == from && o.channel == channel;
        if (same) offered_bytes_ -= o.payload.size();
        return same;
    });
    const auto answer = [this, from, channel] { tell(from, MessageType::kCancelled, channel); };
    if (!t) return answer();
    lane_of(*t).post(answer);
    if (t->phase == Phase::kWaiting || t->phase == Phase::kMoving) conclude(*t, ending.to_status(from));
}

// ------------------------------------------------------------------------------------------------------------- the last task

// Releases all that a transfer holds. Called by its lane, or after the lanes have stopped. `done`: the destination has the
// sequence.
void Transfers::let_go(Transfer& t, bool done) {
    if (t.out) {
        if (done && !t.out->locked.empty())
            (void)t.pool->sequences().release(t.out->seq);  // fails only in a closed pool, which has no sequences
        t.pool->sequences().unlock_for_plan(t.out->locked);
        t.out.reset();
    }
    if (t.in) {
        for (const Incoming::Window& w : t.in->windows) group_.transport().close_window(w.number);
        t.in.reset();
    }
    if (t.pool) t.pool->sequences().trim_if_closed();
    t.pool.reset();
}

}  // namespace ta::share
