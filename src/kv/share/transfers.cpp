#include "src/kv/share/transfers.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <optional>
#include <utility>

#include "kernels/format/hash.h"

namespace ta::share {
namespace {

constexpr size_t kKnownTickets = 4096;                       // finished ones
constexpr uint64_t kMostOfferedBytes = uint64_t{256} << 20;  // of offers that nobody has asked for

struct OfferHeader {
    uint64_t fingerprint;  // of the source's pool
    uint64_t pool;         // its serial
    uint64_t tag;
    int64_t length;  // tokens
    uint64_t blocks;
    uint64_t space;  // that the sequence belongs to
    uint64_t slot_bytes[kPageKinds];
};  // then a StoredBlock for each block, without slot_hash

struct ReadyHeader {
    uint64_t window;
    uint64_t address;  // of the first block; the others follow without gaps
    uint64_t blocks;
};  // then their positions in the offer

struct SentHeader {
    uint64_t window;
    uint64_t blocks;
};  // then the XXH3 of each slot

struct AskLeaseHeader {
    uint64_t blocks;
};  // then their positions in the offer

constexpr uint64_t kElsewhere = ~uint64_t{0};

struct LeasedHeader {
    MemoryName memory;  // shared for as long as the lease lasts
    uint64_t bytes;
    uint64_t blocks;
};  // then where each lies in it, kElsewhere: where no other GPU reads it

struct FetchHeader {
    SpaceName space;
    uint64_t blocks;
};  // then a WantedBlock for each

struct WantedBlock {
    BlockKey key;    // hashed
    uint64_t index;  // ascending
};

constexpr size_t kMostServed = 1024;                 // fetches of other ranks at once
constexpr uint64_t kPullBytes = uint64_t{32} << 20;  // that are copied at once, while those before are checked
constexpr size_t kPullsUnderWay = 4;
constexpr size_t kEngineBytes = size_t{1} << 20;  // from this size on blocks go by copy engine

Time after(std::chrono::milliseconds from_now) {
    return Clock::now() + from_now;
}

}  // namespace

struct Transfers::Outgoing {
    Outgoing(Residency& residency) : hold(residency) {}
    Residency::BlockHold hold;
    ta_seq seq = 0;
    Pool::Snapshot snapshot;
    std::vector<StoredBlock> list;
    std::vector<Sequence*> locked;  // of a move
    // What another rank wants to fetch, until the lane has looked for it.
    Tenant space = 0;
    std::vector<WantedBlock> wanted;
    // Guarded by mutex_: the window that is to be written and the positions of its blocks in the list, from kReady to kSent.
    bool writing = false;
    ReadyHeader ready{};
    std::vector<uint64_t> positions;
    // What the destination reads itself, until the transfer ends: where blocks lie they stay.
    bool leased = false;  // guarded by mutex_, as its positions until the lane has them
    std::vector<uint64_t> leased_positions;
    std::optional<ReadingBlocks> reading;
    Transport::Shared memory;
};

// Blocks of a prefix that come, from one rank after the other. The lane's.
struct Transfers::Fetch {
    Tenant space = 0;
    SpaceName name{};
    std::vector<BlockKey> keys;     // hashed
    std::vector<uint64_t> indices;  // 0, 1, ...
    std::vector<bool> in_vain;      // [ranks] that had nothing
    // Of the leg that goes on.
    std::vector<BlockPtr> chain;   // [keys.size()] that are published here, or have come
    std::vector<uint64_t> wanted;  // indices
    size_t first_missing = 0;
    bool begun = false, landed = false;
};

struct Transfers::Incoming {
    Incoming(Pool& pool)
        : hold(pool.residency()),
          spaces(pool.prefixes()),
          others_see(pool.residency(), mine),
          staging(pool.context().allocator()) {}
    Residency::BlockHold hold;
    std::vector<uint8_t> offer_bytes;
    OfferHeader offer{};
    std::vector<StoredBlock> list;
    PrefixStore::Named spaces;
    Tenant tenant = 0;
    std::vector<BlockPtr> blocks;  // [list.size()], those that are there
    Residency::Loading mine;
    Residency::LoadHold others_see;
    size_t next = 0;  // in the list: those before are there or in the window
    Buffer staging;
    std::vector<uint64_t> positions;  // in the list, of the blocks in the window
    uint64_t open_window = 0;         // 0: none
    // Guarded by mutex_: the window for which kSent has to come, 0: none; what it brought.
    uint64_t awaited = 0;
    std::vector<uint64_t> hashes;
    bool asked_lease = false;
    LeasedHeader leased{};
    std::vector<uint64_t> offsets;  // of `positions`
    std::unique_ptr<Fetch> fetch;   // nullptr: a sequence comes
};

// Blocks that are on their way from another GPU.
struct Transfers::Pull {
    std::vector<uint64_t> positions;  // in the list
    std::vector<BlockPtr> blocks;
    std::vector<PlacedBlock> placed;
    uint64_t bytes = 0;
    std::unique_ptr<DeviceTransfer> transfer;
    std::unique_ptr<ArrivalCheck> check;  // goes before what it checks
};

struct Transfers::Transfer {
    uint64_t ticket = 0;
    uint64_t channel = 0;
    bool outgoing = false;
    std::shared_ptr<Pool> pool;
    std::atomic<Phase> phase{Phase::kWaiting};
    Time deadline{};
    TransferProgress progress;  // guarded by mutex_, as the next ones
    Status ending;              // of a transfer that is being cancelled
    bool cancelled_here = false;
    bool served = false;            // another rank's fetch: no caller has the ticket
    Lane::Tasks end;                // what its lane does last
    std::unique_ptr<Outgoing> out;  // the lane's, where nothing else is said
    std::unique_ptr<Incoming> in;
};

TransferProgress TransferProgress::clone() const {
    return {state, peer, tag, blocks, blocks_moved, blocks_shared, bytes_moved, seq, length, status.clone()};
}

Transfers::Transfers(Group& group, SharedSpaces* spaces) : group_(group), spaces_(spaces) {
    const uint64_t of[] = {group.settings().generation, group.settings().rank};
    tickets_ = hash_bytes(of, sizeof of) >> 33 << 32;  // those of another group name nothing here
    done_.reserve(kKnownTickets + 1);
}

Status Transfers::start() {
    TA_RETURN_IF_ERROR(coming_.start());
    return leaving_.start();
}

void Transfers::stop() {
    coming_.stop();
    leaving_.stop();
    std::vector<Ptr> left;
    {
        const std::lock_guard lock(mutex_);
        left.swap(live_);
    }
    for (const Ptr& t : left) let_go(*t, false);
}

Lane& Transfers::lane_of(const Transfer& t) {
    return t.outgoing ? leaving_ : coming_;
}

// ------------------------------------------------------------------------------------------------------------------- calls

// Under mutex_. Who fails after that calls forget().
Transfers::Ptr Transfers::add(std::shared_ptr<Pool> pool, bool outgoing, uint32_t peer, uint64_t tag) {
    auto t = std::make_shared<Transfer>();
    t->ticket = ++tickets_;
    t->outgoing = outgoing;
    t->pool = std::move(pool);
    t->progress.peer = peer;
    t->progress.tag = tag;
    t->deadline = after(group_.settings().operation);
    t->end.push_back([this, raw = t.get()] {
        const Ptr kept = [&] {
            const std::lock_guard lock(mutex_);
            return known_.at(raw->ticket);
        }();
        let_go(*kept, kept->ending.ok());
        publish(*kept);
    });
    live_.reserve(live_.size() + 1);
    group_.expect_finished(live_.size() + 1);
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
            if (out) pool->unlock_for_plan(out->locked);
        }
    } unlock{pool.get(), move ? out.get() : nullptr};
    if (move) {
        Result<std::vector<Sequence*>> locked = pool->lock_for_plan({&seq, 1});
        if (!locked.ok()) return std::move(locked).status().argument(2).sequence(-1);
        out->locked = locked.take();
    }
    Result<Pool::Snapshot> snapshot = move ? pool->snapshot_in_plan(*out->locked[0]) : pool->snapshot(seq);
    if (!snapshot.ok()) return std::move(snapshot).status().argument(2);
    out->snapshot = snapshot.take();
    out->seq = seq;
    const Pool::Snapshot& s = out->snapshot;
    for (size_t i = 0; i < s.blocks.size(); ++i) {
        const Block& block = *s.blocks[i];
        if (block.dropped()) {
            return fail(TA_E_STATE, "a sequence with blocks that were dropped cannot be sent").argument(2).block(int64_t(i));
        }
        StoredBlock b{};
        b.content_id = block.content_id();
        b.index = i;
        b.tokens = block.sealed() ? kPageTokens : uint32_t(s.length - int64_t(i) * kPageTokens);
        b.kind = uint8_t(block.kind());
        out->list.push_back(b);
    }
    OfferHeader offer{};
    offer.fingerprint = pool->fingerprint();
    offer.pool = pool->serial();
    offer.tag = tag;
    offer.length = s.length;
    offer.blocks = s.blocks.size();
    offer.space = pool->tag_of(s);
    for (int kind = 0; kind < kPageKinds; ++kind) offer.slot_bytes[kind] = pool->geometry().slot_bytes(PageKind(kind));
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

Result<uint64_t> Transfers::fetch(std::shared_ptr<Pool> pool, Tenant space, std::span<const uint8_t> keys) {
    TA_RETURN_IF_ERROR(group_.check_ready());
    TA_RETURN_IF_ERROR(pool->check_open());
    auto fetch = std::make_unique<Fetch>();
    Result<std::vector<BlockKey>> hashed = spaces_->hash_findable(*pool, space, keys);
    if (!hashed.ok()) return std::move(hashed).status();
    Result<SpaceName> name = spaces_->name_of(*pool, space);
    if (!name.ok()) return std::move(name).status();
    fetch->space = space;
    fetch->name = name.value();
    fetch->keys = hashed.take();
    fetch->indices.resize(fetch->keys.size());
    for (size_t i = 0; i < fetch->indices.size(); ++i) fetch->indices[i] = i;
    fetch->in_vain.resize(group_.settings().ranks);
    auto in = std::make_unique<Incoming>(*pool);
    in->fetch = std::move(fetch);

    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    const Ptr t = add(std::move(pool), false, group_.settings().rank, 0);
    t->progress.blocks = keys.size() / kPrefixKeyBytes;
    t->in = std::move(in);
    t->phase = Phase::kMoving;
    try {
        coming_.post(guarded(t, &Transfers::next_leg));
    } catch (...) {
        forget(t);
        throw;
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
        t.cancelled_here = true;  // of a fetch nothing more comes
    }
    return {};
}

// ------------------------------------------------------------------------------------------------------ ends (under mutex_)

// Where there is no memory for the message, the peer's own deadline ends the transfer there.
void Transfers::tell(uint32_t to, MessageType type, uint64_t channel, const Ending* ending) noexcept {
    const auto* bytes = reinterpret_cast<const uint8_t*>(ending);
    try {
        group_.send(to, type, channel, {bytes, ending ? sizeof *ending : 0});
    } catch (const std::bad_alloc&) {
    }
}

// Stops a transfer. It is over when the peer has answered, or cannot.
void Transfers::begin_cancel(Transfer& t, Status why) {
    if (t.phase == Phase::kCancelling || t.phase == Phase::kOver) return;
    const bool peer_knows = t.channel != 0 && ended_.ok();
    if (peer_knows) {
        t.phase = Phase::kCancelling;
        touch(t);
        const Ending ending = Ending::of(why);
        tell(t.progress.peer, MessageType::kCancel, t.channel, &ending);
        t.ending = std::move(why);
        return;
    }
    conclude(t, std::move(why));
}

// What it holds is let go by its lane, behind the task that runs; then the ticket is finished.
void Transfers::conclude(Transfer& t, Status status) noexcept {
    if (t.phase == Phase::kOver) return;
    t.phase = Phase::kOver;
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
    if (done_.size() > kKnownTickets) {
        known_.erase(done_.front());
        done_.erase(done_.begin());
    }
    finished_.notify_all();
    group_.add_finished(t.ticket);
}

void Transfers::touch(Transfer& t) {
    t.deadline = after(group_.settings().operation);
}

Time Transfers::on_time(Time now) {
    const std::lock_guard lock(mutex_);
    Time next = Time::max();
    for (const Ptr& t : live_) {
        if (t->phase == Phase::kOver || t->phase == Phase::kLanding) continue;
        if (t->deadline <= now) {
            if (t->phase == Phase::kCancelling) {
                conclude(*t, std::move(t->ending));
                continue;
            }
            begin_cancel(*t, fail(TA_E_TIMEOUT, "rank %u did nothing for the transfer in %lld ms", t->progress.peer,
                                  (long long)group_.settings().operation.count())
                                 .rank(int32_t(t->progress.peer)));
        }
        if (t->phase != Phase::kOver) next = std::min(next, t->deadline);
    }
    return next;
}

void Transfers::on_end(const Status& why) {
    const std::lock_guard lock(mutex_);
    ended_ = why.clone();
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

// A task of the transfer's lane. A failure cancels the transfer.
std::function<void()> Transfers::guarded(const Ptr& t, Task task) {
    return [this, t, task] {
        if (t->phase != Phase::kMoving) return;
        Status s;
        try {
            s = (this->*task)(*t);
        } catch (const std::bad_alloc&) {
            s = fail(TA_E_MEMORY, "no memory for a transfer");
        }
        if (s.ok()) return;
        const std::lock_guard lock(mutex_);
        if (t->phase == Phase::kLanding) t->phase = Phase::kMoving;
        begin_cancel(*t, std::move(s));
        group_.wake();
    };
}

Status Transfers::on_message(const Message& m) {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return {};
    const uint32_t from = m.header.from;
    const auto type = MessageType(m.header.type);
    if (type == MessageType::kFetch) return on_fetch(m);
    // Whose channel it is, says who began the transfer.
    const bool mine = m.header.channel >> 40 == group_.settings().rank;
    if (type == MessageType::kOffer) return mine ? on_fetched_offer(m) : on_offer(m);
    if (type == MessageType::kReady) return on_ready(m);
    if (type == MessageType::kSent) return on_sent(m);
    if (type == MessageType::kAskLease) return on_ask_lease(m);
    if (type == MessageType::kLeased) return on_leased(m);
    const Ptr t = find(m.header.channel, from);
    PayloadReader payload(m.payload);
    Ending ending{};
    if (type == MessageType::kCancel && payload.get(ending) && payload.at_end()) {
        on_cancel(m, t, ending);
    } else if (type == MessageType::kCancelled) {
        if (t && t->phase == Phase::kCancelling) conclude(*t, std::move(t->ending));
    } else if (type == MessageType::kArrived) {
        if (t && t->outgoing) conclude(*t, {});
    } else {
        return fail(TA_E_PEER_LOST, "rank %u sent what is no message of the protocol", from).rank(int32_t(from));
    }
    return {};
}

Status Transfers::on_offer(const Message& m) {
    const uint32_t from = m.header.from;
    OfferHeader offer{};
    if (!PayloadReader(m.payload).get(offer) || m.header.channel >> 40 != from)
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

Status Transfers::on_fetch(const Message& m) {
    const uint32_t from = m.header.from;
    PayloadReader payload(m.payload);
    FetchHeader h{};
    std::vector<WantedBlock> wanted;
    bool good =
        payload.get(h) && payload.get_rest(h.blocks, wanted) && m.header.channel >> 40 == from && !find(m.header.channel, from);
    for (size_t i = 1; i < wanted.size(); ++i) good = good && wanted[i - 1].index < wanted[i].index;
    if (!good) return fail(TA_E_PEER_LOST, "rank %u wants to fetch what cannot be", from).rank(int32_t(from));
    std::optional<SharedSpaces::Joined> joined = spaces_ ? spaces_->find(h.space, from) : std::nullopt;
    // It may have left the namespace, or the pool is no more.
    if (!joined) {
        tell(from, MessageType::kOffer, m.header.channel);
        return {};
    }
    if (served_ >= kMostServed) {
        const Ending full =
            Ending::of(fail(TA_E_LIMIT, "rank %u serves %zu fetches already", group_.settings().rank, kMostServed)
                           .rank(int32_t(group_.settings().rank)));
        tell(from, MessageType::kCancel, m.header.channel, &full);
        return {};
    }
    auto out = std::make_unique<Outgoing>(joined->pool->residency());
    out->space = joined->space;
    out->wanted = std::move(wanted);
    const Ptr t = add(std::move(joined->pool), true, from, 0);
    t->channel = m.header.channel;
    t->served = true;
    ++served_;
    t->phase = Phase::kMoving;
    t->out = std::move(out);
    leaving_.post(guarded(t, &Transfers::offer_published));
    return {};
}

// The answer to a fetch. An empty one: that rank has nothing of it.
Status Transfers::on_fetched_offer(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, false);
    if (!t || t->phase != Phase::kWaiting) return {};
    const bool nothing = m.payload.empty();
    Lane::Tasks next{guarded(t, nothing ? &Transfers::next_leg : &Transfers::prepare_leg)};
    t->in->offer_bytes = m.payload;
    t->phase = Phase::kMoving;
    if (nothing) {
        t->in->fetch->in_vain[m.header.from] = true;
        t->channel = 0;
    }
    t->progress.state = TA_MOVE_RUNNING;
    touch(*t);
    coming_.post(std::move(next));
    return {};
}

// The transfer takes what was offered. Where there is no memory for that, neither has changed.
void Transfers::match(const Ptr& t, Offer& offer) {
    auto in = std::make_unique<Incoming>(*t->pool);
    Lane::Tasks prepare{guarded(t, &Transfers::prepare)};
    in->offer_bytes = std::move(offer.payload);
    t->in = std::move(in);
    t->channel = offer.channel;
    t->phase = Phase::kMoving;
    t->progress.state = TA_MOVE_RUNNING;
    touch(*t);
    coming_.post(std::move(prepare));
}

Status Transfers::on_ready(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, true);
    if (!t || (t->phase != Phase::kWaiting && t->phase != Phase::kMoving)) return {};
    PayloadReader payload(m.payload);
    ReadyHeader ready{};
    std::vector<uint64_t> positions;
    const bool good = payload.get(ready) && payload.get_rest(ready.blocks, positions) && !t->out->writing &&
                      std::all_of(positions.begin(), positions.end(), [&](uint64_t i) { return i < t->out->list.size(); });
    if (!good) {
        return fail(TA_E_PEER_LOST, "rank %u asks for blocks that were not offered", m.header.from)
            .rank(int32_t(m.header.from));
    }
    t->out->writing = true;
    t->out->ready = ready;
    t->out->positions = std::move(positions);
    t->phase = Phase::kMoving;
    t->progress.state = TA_MOVE_RUNNING;
    touch(*t);
    leaving_.post(guarded(t, &Transfers::write_window));
    return {};
}

Status Transfers::on_sent(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, false);
    if (!t || t->phase != Phase::kMoving) return {};
    PayloadReader payload(m.payload);
    SentHeader sent{};
    std::vector<uint64_t> hashes;
    if (!payload.get(sent) || !payload.get_rest(sent.blocks, hashes) || sent.window == 0 ||
        sent.window != std::exchange(t->in->awaited, 0) || hashes.size() != t->in->positions.size()) {
        return fail(TA_E_PEER_LOST, "rank %u sent blocks that nobody asked for", m.header.from).rank(int32_t(m.header.from));
    }
    t->in->hashes = std::move(hashes);
    touch(*t);
    coming_.post(guarded(t, &Transfers::take_in_window));
    return {};
}

Status Transfers::on_ask_lease(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, true);
    if (!t || (t->phase != Phase::kWaiting && t->phase != Phase::kMoving)) return {};
    PayloadReader payload(m.payload);
    AskLeaseHeader asked{};
    std::vector<uint64_t> positions;
    Outgoing& out = *t->out;
    const bool good = payload.get(asked) && payload.get_rest(asked.blocks, positions) && !std::exchange(out.leased, true) &&
                      std::all_of(positions.begin(), positions.end(), [&](uint64_t i) { return i < out.list.size(); });
    if (!good) {
        return fail(TA_E_PEER_LOST, "rank %u asks for blocks that were not offered", m.header.from)
            .rank(int32_t(m.header.from));
    }
    out.leased_positions = std::move(positions);
    t->phase = Phase::kMoving;
    t->progress.state = TA_MOVE_RUNNING;
    touch(*t);
    leaving_.post(guarded(t, &Transfers::lease));
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
    coming_.post(guarded(t, &Transfers::take_in_leased));
    return {};
}

// The peer stops. Its answer comes from the lane: then nothing of this rank's writes any more.
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

// ------------------------------------------------------------------------------------------------------ tasks of the source

// The first of the blocks that another rank wants, as far as they are published here.
Status Transfers::offer_published(Transfer& t) {
    Outgoing& out = *t.out;
    Pool& pool = *t.pool;
    std::vector<BlockKey> keys;
    std::vector<uint64_t> indices;
    for (const WantedBlock& w : out.wanted) {
        keys.push_back(w.key);
        indices.push_back(w.index);
    }
    out.wanted = {};
    Result<std::vector<BlockPtr>> found = pool.prefixes().find_blocks(out.space, keys, indices);
    if (found.ok()) out.snapshot.blocks = found.take();  // else the namespace has ended meanwhile
    std::vector<BlockPtr>& blocks = out.snapshot.blocks;
    blocks.erase(std::find(blocks.begin(), blocks.end(), nullptr), blocks.end());
    for (size_t i = 0; i < blocks.size(); ++i) {
        StoredBlock b{};
        b.content_id = blocks[i]->content_id();
        b.index = indices[i];
        b.tokens = uint32_t(kPageTokens);
        b.kind = uint8_t(blocks[i]->kind());
        out.list.push_back(b);
    }
    OfferHeader offer{};
    offer.fingerprint = pool.fingerprint();
    offer.pool = pool.serial();
    offer.blocks = blocks.size();
    for (int kind = 0; kind < kPageKinds; ++kind) offer.slot_bytes[kind] = pool.geometry().slot_bytes(PageKind(kind));
    const PayloadWriter payload = PayloadWriter().put(offer).put_all(std::span<const StoredBlock>(out.list));
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    touch(t);
    if (blocks.empty()) {
        tell(t.progress.peer, MessageType::kOffer, t.channel);
        conclude(t, {});
    } else {
        group_.send(t.progress.peer, MessageType::kOffer, t.channel, payload.bytes());
    }
    return {};
}

Status Transfers::write_window(Transfer& t) {
    Outgoing& out = *t.out;
    const Pool& pool = *t.pool;
    std::vector<uint64_t> hashes;
    std::vector<uint8_t> slot;
    uint64_t to = out.ready.address, bytes = 0;  // nobody else looks at these two while `writing`
    for (const uint64_t position : out.positions) {
        if (t.phase != Phase::kMoving) return {};
        TA_RETURN_IF_ERROR(pool.check_open());
        const StoredBlock& b = out.list[size_t(position)];
        Result<PageKind> kind = copy_slot(*t.pool, *out.snapshot.blocks[size_t(position)], b.index, b.tokens, slot);
        if (!kind.ok()) return std::move(kind).status().block(int64_t(b.index)).rank(int32_t(group_.settings().rank));
        if (kind.value() != PageKind(b.kind)) {
            return fail(TA_E_BUSY, "the block lost bits on its way to a slower tier while it was sent").block(int64_t(b.index));
        }
        hashes.push_back(hash_bytes(slot.data(), slot.size()));
        const RemoteCopy copy{to, slot.data(), slot.size()};
        TA_RETURN_IF_ERROR(group_.transport().write(t.progress.peer, out.ready.window, {&copy, 1}));
        to += slot.size();
        bytes += slot.size();
    }
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    t.progress.blocks_moved += out.positions.size();
    t.progress.bytes_moved += bytes;
    touch(t);
    out.writing = false;
    const SentHeader sent{out.ready.window, hashes.size()};
    group_.send(t.progress.peer, MessageType::kSent, t.channel,
                PayloadWriter().put(sent).put_all(std::span<const uint64_t>(hashes)).bytes());
    return {};
}

// What lies in the device's memory is read there by the destination. The blocks stay where they are until the lease ends.
Status Transfers::lease(Transfer& t) {
    Outgoing& out = *t.out;
    Pool& pool = *t.pool;
    TA_RETURN_IF_ERROR(pool.check_open());
    Device* const device = pool.context().device();
    LeasedHeader leased{};
    if (device) {
        const DeviceRange memory = pool.blocks().device_memory();
        Result<Transport::Shared> shared = group_.transport().share_memory(std::shared_ptr<uint8_t>(t.pool, memory.memory));
        // Memory that other processes cannot map: all goes by windows.
        if (shared.ok()) {
            out.memory = shared.take();
            leased = {out.memory.name, memory.bytes, 0};
        }
    }
    std::vector<uint64_t> offsets;
    uint64_t moved = 0, bytes = 0;
    out.reading.emplace(pool.blocks());
    if (device) TA_RETURN_IF_ERROR(device->wait_for_steps());  // which write them
    for (const uint64_t position : out.leased_positions) {
        const StoredBlock& b = out.list[size_t(position)];
        const Block& block = *out.snapshot.blocks[size_t(position)];
        const Place at = pool.blocks().place_of(block);
        if (at.kind != PageKind(b.kind)) {
            return fail(TA_E_BUSY, "the block lost bits on its way to a slower tier while it was sent").block(int64_t(b.index));
        }
        const bool there = leased.bytes > 0 && at.tier == TierKind::kDevice && block.sealed();
        offsets.push_back(there ? uint64_t(at.address - pool.blocks().device_memory().memory) : kElsewhere);
        moved += there;
        bytes += there ? pool.geometry().slot_bytes(at.kind) : 0;
    }
    leased.blocks = offsets.size();
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    t.progress.blocks_moved += moved;
    t.progress.bytes_moved += bytes;
    touch(t);
    group_.send(t.progress.peer, MessageType::kLeased, t.channel,
                PayloadWriter().put(leased).put_all(std::span<const uint64_t>(offsets)).bytes());
    return {};
}

// ------------------------------------------------------------------------------------------------- tasks of the destination

// Asks the next rank of a fetch for blocks, or ends it.
Status Transfers::next_leg(Transfer& t) {
    Pool& pool = *t.pool;
    Fetch& f = *t.in->fetch;
    TA_RETURN_IF_ERROR(pool.check_open());
    Result<std::vector<BlockPtr>> found = pool.prefixes().find_blocks(f.space, f.keys, f.indices);
    if (!found.ok()) return std::move(found).status().rank(int32_t(group_.settings().rank));
    f.chain = found.take();
    const auto missing = size_t(std::find(f.chain.begin(), f.chain.end(), nullptr) - f.chain.begin());
    // Blocks that leave as fast as they come are not fetched for ever.
    const bool stuck = std::exchange(f.landed, false) && missing <= f.first_missing;
    f.first_missing = missing;
    std::optional<SharedSpaces::Leg> leg;
    if (!stuck && missing < f.keys.size()) leg = spaces_->nearest(f.name, f.keys, f.chain, f.in_vain);
    PayloadWriter payload;
    if (leg) {
        f.wanted = std::move(leg->indices);
        payload.put(FetchHeader{f.name, f.wanted.size()});
        for (const uint64_t i : f.wanted) payload.put(WantedBlock{f.keys[size_t(i)], i});
    }
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    t.progress.length = int64_t(missing) * kPageTokens;
    if (!std::exchange(f.begun, true))
        t.progress.blocks_shared = uint64_t(f.chain.size() - size_t(std::count(f.chain.begin(), f.chain.end(), nullptr)));
    if (!leg) {
        conclude(t, {});
        return {};
    }
    t.progress.peer = leg->rank;
    t.channel = uint64_t(group_.settings().rank) << 40 | ++channels_;
    t.phase = Phase::kWaiting;
    touch(t);
    group_.send(leg->rank, MessageType::kFetch, t.channel, payload.bytes());
    return {};
}

Status Transfers::prepare_leg(Transfer& t) {
    Pool& pool = *t.pool;
    Incoming& in = *t.in;
    TA_RETURN_IF_ERROR(pool.check_open());
    TA_RETURN_IF_ERROR(read_offer(t));
    // The first of the blocks that were asked for.
    const std::vector<uint64_t>& wanted = in.fetch->wanted;
    const bool good = !in.list.empty() && in.list.size() <= wanted.size() &&
                      std::equal(in.list.begin(), in.list.end(), wanted.begin(), [](const StoredBlock& b, uint64_t index) {
                          return b.index == index && b.tokens == uint32_t(kPageTokens);
                      });
    if (!good) return no_offer(t);
    in.tenant = in.fetch->space;
    // What is here already is part of what comes: others may move it, and nobody drops it.
    for (size_t i = 0; i < in.fetch->chain.size(); ++i) {
        if (in.fetch->chain[i]) in.others_see.add({in.fetch->chain[i], i});
    }
    uint64_t bytes = 0;
    for (const StoredBlock& b : in.list) bytes += pool.geometry().slot_bytes(PageKind(b.kind));
    if (Status s = pool.prefixes().check_quota(in.fetch->space, bytes); !s.ok())
        return std::move(s).rank(int32_t(group_.settings().rank));
    return begin_moving(t);
}

// What has come of a fetch is published; then the next rank is asked.
Status Transfers::land_leg(Transfer& t) {
    Lane::Tasks next;
    {
        const std::lock_guard lock(mutex_);
        if (t.phase != Phase::kMoving) return {};
        next.push_back(guarded(known_.at(t.ticket), &Transfers::next_leg));
        t.phase = Phase::kLanding;
    }
    Fetch& f = *t.in->fetch;
    remember_arrived(t);
    for (size_t i = 0; i < t.in->list.size(); ++i) f.chain[size_t(t.in->list[i].index)] = t.in->blocks[i];
    const auto n = size_t(std::find(f.chain.begin(), f.chain.end(), nullptr) - f.chain.begin());
    auto leg = std::make_unique<Incoming>(*t.pool);  // the next one's; then the last one's, which goes after the lock
    Status s = t.pool->publish_blocks(f.space, std::span(f.keys).first(n), std::span(f.chain).first(n));
    if (!s.ok()) return std::move(s).rank(int32_t(group_.settings().rank));
    f.landed = true;
    const std::lock_guard lock(mutex_);
    t.progress.length = int64_t(n) * kPageTokens;
    tell(t.progress.peer, MessageType::kArrived, t.channel);
    if (n == f.keys.size()) {
        conclude(t, {});
    } else if (!ended_.ok()) {
        conclude(t, ended_.clone());
    } else if (t.cancelled_here) {
        conclude(t, fail(TA_E_CANCELLED, "the transfer was cancelled"));
    } else {
        leg->fetch = std::move(t.in->fetch);
        t.in.swap(leg);
        t.channel = 0;
        t.phase = Phase::kMoving;
        touch(t);
        coming_.post(std::move(next));
    }
    return {};
}

Status Transfers::prepare(Transfer& t) {
    Pool& pool = *t.pool;
    Incoming& in = *t.in;
    TA_RETURN_IF_ERROR(pool.check_open());
    TA_RETURN_IF_ERROR(read_offer(t));
    TA_RETURN_IF_ERROR(read_sequence(t));
    pool.end_forgotten_namespaces();
    in.tenant = in.spaces.tenant_of(in.offer.space);
    TA_RETURN_IF_ERROR(in.spaces.complete());
    TA_RETURN_IF_ERROR(pool.check_room_for(1));
    return begin_moving(t);
}

// Asks for the blocks of the list that are not here.
Status Transfers::begin_moving(Transfer& t) {
    Pool& pool = *t.pool;
    Incoming& in = *t.in;
    in.blocks.resize(in.list.size());
    share_present(t);
    uint64_t bytes = 0;
    for (size_t i = 0; i < in.list.size(); ++i) {
        if (!in.blocks[i]) bytes += pool.geometry().slot_bytes(PageKind(in.list[i].kind));
    }
    TA_RETURN_IF_ERROR(pool.residency().check_may_take_in(bytes));
    return ask_for_blocks(t);
}

// Full blocks first, where this rank can read them itself; the rest by windows.
Status Transfers::ask_for_blocks(Transfer& t) {
    Incoming& in = *t.in;
    in.positions.clear();
    Result<bool> reaches = t.pool->context().device() ? group_.transport().reaches(t.progress.peer) : Result<bool>(false);
    if (reaches.ok() && reaches.value()) {
        for (size_t i = 0; i < in.list.size(); ++i) {
            if (!in.blocks[i] && in.list[i].tokens == uint32_t(kPageTokens)) in.positions.push_back(i);
        }
    }
    if (in.positions.empty()) return ask_for_window(t);
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    in.asked_lease = true;
    touch(t);
    group_.send(
        t.progress.peer, MessageType::kAskLease, t.channel,
        PayloadWriter().put(AskLeaseHeader{in.positions.size()}).put_all(std::span<const uint64_t>(in.positions)).bytes());
    return {};
}

// Copies, checks and takes in what is leased; the rest comes by windows.
Status Transfers::take_in_leased(Transfer& t) {
    const Incoming& in = *t.in;
    std::vector<uint64_t> positions, offsets;
    for (size_t i = 0; i < in.positions.size(); ++i) {
        if (in.offsets[i] == kElsewhere) continue;
        const uint64_t position = in.positions[i], bytes = t.pool->geometry().slot_bytes(PageKind(in.list[position].kind));
        if (in.offsets[i] > in.leased.bytes || bytes > in.leased.bytes - in.offsets[i])
            return fail(TA_E_CORRUPT, "rank %u leases what is not there", t.progress.peer).rank(int32_t(t.progress.peer));
        positions.push_back(position);
        offsets.push_back(in.offsets[i]);
    }
    if (!positions.empty()) TA_RETURN_IF_ERROR(pull(t, positions, offsets));
    return ask_for_window(t);
}

// A part of it while the parts before are checked.
Status Transfers::pull(Transfer& t, std::span<const uint64_t> positions, std::span<const uint64_t> offsets) {
    Incoming& in = *t.in;
    Result<std::shared_ptr<uint8_t>> found = group_.transport().find_memory(t.progress.peer, in.leased.memory);
    if (!found.ok()) return std::move(found).status();
    const std::shared_ptr<uint8_t> memory = found.take();
    if (!memory) {
        return fail(TA_E_CANCELLED, "rank %u has let go of the blocks", t.progress.peer).rank(int32_t(t.progress.peer));
    }
    std::vector<uint8_t*> from;
    for (const uint64_t offset : offsets) from.push_back(memory.get() + offset);
    const Geometry& g = t.pool->geometry();
    std::deque<Pull> under_way;
    const auto finish_oldest = [&]() -> Status {
        Pull oldest = std::move(under_way.front());
        under_way.pop_front();
        return finish_pull(t, oldest);
    };
    for (size_t first = 0; first < positions.size();) {
        if (t.phase != Phase::kMoving) return {};
        TA_RETURN_IF_ERROR(t.pool->check_open());
        size_t end = first;
        for (uint64_t bytes = 0; end < positions.size() && (end == first || bytes < kPullBytes); ++end)
            bytes += g.slot_bytes(PageKind(in.list[size_t(positions[end])].kind));
        Result<Pull> started = start_pull(t, positions.subspan(first, end - first), std::span(from).subspan(first));
        if (!started.ok()) return std::move(started).status();
        under_way.push_back(started.take());
        if (under_way.size() == kPullsUnderWay) TA_RETURN_IF_ERROR(finish_oldest());
        first = end;
    }
    while (!under_way.empty()) TA_RETURN_IF_ERROR(finish_oldest());
    return {};
}

Result<Transfers::Pull> Transfers::start_pull(Transfer& t, std::span<const uint64_t> positions,
                                              std::span<uint8_t* const> from) {
    Incoming& in = *t.in;
    Pool& pool = *t.pool;
    Pull p;
    std::vector<PageKind> kinds;
    for (const uint64_t i : positions) kinds.push_back(PageKind(in.list[size_t(i)].kind));
    Result<std::vector<BlockPtr>> taken = pool.blocks().acquire(kinds);
    if (taken.ok()) {
        p.blocks = taken.take();
    } else if (Status s = std::move(taken).status(); s.code() != TA_E_TIER_FULL) {
        return s;
    }
    std::vector<DeviceCopy> copies;
    for (size_t n = 0; n < positions.size(); ++n) {
        const StoredBlock& b = in.list[size_t(positions[n])];
        if (n >= p.blocks.size()) {  // one by one, while others leave
            Result<BlockPtr> block = pool.residency().new_block(kinds[n], in.mine);
            if (!block.ok()) return std::move(block).status().block(int64_t(b.index)).rank(int32_t(group_.settings().rank));
            p.blocks.push_back(block.take());
        }
        Block& block = *p.blocks[n];
        if (in.tenant != 0) block.set_tenant(in.tenant);
        p.positions.push_back(positions[n]);
        p.placed.push_back({&block, b.index, block.slot(), kinds[n], b.content_id});
        copies.push_back({block.slot(), from[n], pool.geometry().slot_bytes(kinds[n])});
        p.bytes += copies.back().bytes;
    }
    CopyOptions options;
    options.route = p.bytes >= kEngineBytes * copies.size() ? MoveRoute::kCopyEngine : MoveRoute::kKernel;
    Result<std::unique_ptr<DeviceTransfer>> transfer = pool.context().device()->start_copy(copies, options);
    if (!transfer.ok()) return std::move(transfer).status();
    p.transfer = transfer.take();
    Result<std::unique_ptr<ArrivalCheck>> check = pool.residency().verifier()->start(p.placed, *p.transfer);
    if (!check.ok()) return std::move(check).status();
    p.check = check.take();
    return p;
}

// The hash of each page says that it is what the source sealed; what attention can compute with, the source's kernels wrote.
Status Transfers::finish_pull(Transfer& t, Pull& p) {
    Incoming& in = *t.in;
    TA_RETURN_IF_ERROR(p.transfer->wait());
    std::vector<Status> statuses(p.placed.size());
    TA_RETURN_IF_ERROR(p.check->wait(statuses));
    for (Status& s : statuses) {
        if (!s.ok()) return std::move(s).rank(int32_t(t.progress.peer));
    }
    TA_RETURN_IF_ERROR(t.pool->residency().verifier()->seal(p.placed));
    for (size_t n = 0; n < p.blocks.size(); ++n) {
        p.blocks[n]->mark_sealed();
        in.blocks[size_t(p.positions[n])] = p.blocks[n];
        in.others_see.add({std::move(p.blocks[n]), p.placed[n].index});
    }
    const std::lock_guard lock(mutex_);
    t.progress.blocks_moved += p.placed.size();
    t.progress.bytes_moved += p.bytes;
    touch(t);
    return {};
}

Status Transfers::no_offer(const Transfer& t) const {
    return fail(TA_E_CORRUPT, "rank %u offers what no pool has", t.progress.peer).rank(int32_t(t.progress.peer));
}

// The offer is of a pool like this one.
Status Transfers::read_offer(Transfer& t) {
    Incoming& in = *t.in;
    const Pool& pool = *t.pool;
    OfferHeader& h = in.offer;
    PayloadReader payload(in.offer_bytes);
    if (!payload.get(h)) return no_offer(t);
    bool same = h.fingerprint == pool.fingerprint();
    for (int kind = 0; kind < kPageKinds; ++kind)
        same = same && h.slot_bytes[kind] == pool.geometry().slot_bytes(PageKind(kind));
    if (!same) {
        return fail(TA_E_MISMATCH,
                    "the pools of ranks %u and %u differ in rotation, sink blocks, K offset, falling precision, shape or bits",
                    t.progress.peer, group_.settings().rank)
            .rank(int32_t(t.progress.peer));
    }
    if (!payload.get_rest(h.blocks, in.list)) return no_offer(t);
    in.offer_bytes = {};
    for (const StoredBlock& b : in.list) {
        if (!can_exist(pool, b)) return no_offer(t);
    }
    return {};
}

// It may be that of a sequence.
Status Transfers::read_sequence(Transfer& t) {
    const OfferHeader& h = t.in->offer;
    const std::vector<StoredBlock>& list = t.in->list;
    if (h.length < 0 || h.blocks > uint64_t(INT64_MAX / kPageTokens) || uint64_t(h.length) > h.blocks * kPageTokens ||
        uint64_t(h.length) + kPageTokens <= h.blocks * kPageTokens)
        return no_offer(t);
    for (size_t i = 0; i < list.size(); ++i) {
        const bool is_end = i + 1 == list.size() && h.length == int64_t(i) * kPageTokens + int64_t(list[i].tokens);
        if (list[i].index != i || (list[i].tokens != uint32_t(kPageTokens) && !is_end)) return no_offer(t);
    }
    const std::lock_guard lock(mutex_);
    t.progress.blocks = h.blocks;
    t.progress.length = h.length;
    return {};
}

// Blocks of the list that an earlier transfer from the same pool brought.
void Transfers::share_present(Transfer& t) {
    Incoming& in = *t.in;
    uint64_t shared = 0;
    const ArrivedBlocks& arrived = arrived_[{t.progress.peer, in.offer.pool, t.pool.get()}];
    for (size_t i = 0; i < in.list.size() && !arrived.empty(); ++i) {
        const StoredBlock& b = in.list[i];
        if (b.tokens != uint32_t(kPageTokens)) continue;
        const auto found = arrived.find(b.content_id);
        if (found == arrived.end() || found->second.index != b.index) continue;
        BlockPtr block = found->second.block.lock();
        if (!block || block->dropped() || block->stuck() || block->kind() != PageKind(b.kind) || block->tenant() != in.tenant)
            continue;
        in.blocks[i] = std::move(block);
        ++shared;
    }
    const std::lock_guard lock(mutex_);
    t.progress.blocks_shared += shared;
}

// Names memory for the next blocks; where there are none left, the sequence is made.
Status Transfers::ask_for_window(Transfer& t) {
    Incoming& in = *t.in;
    const Geometry& g = t.pool->geometry();
    in.positions.clear();
    size_t bytes = 0;
    for (; in.next < in.list.size(); ++in.next) {
        if (in.blocks[in.next]) continue;
        const size_t more = g.slot_bytes(PageKind(in.list[in.next].kind));
        if (!in.positions.empty() && bytes + more > group_.settings().staging_bytes) break;
        bytes += more;
        in.positions.push_back(in.next);
    }
    if (in.positions.empty()) return in.fetch ? land_leg(t) : land(t);
    if (!in.staging.reserve(bytes)) {
        return fail(TA_E_MEMORY, "no %zu bytes of host memory for blocks that arrive", bytes)
            .bytes(bytes)
            .rank(int32_t(group_.settings().rank));
    }
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    in.awaited = in.open_window = uint64_t(group_.settings().rank + 1) << 40 | ++windows_;
    group_.transport().open_window(in.open_window, t.progress.peer, {in.staging.data(), bytes});
    const ReadyHeader ready{in.open_window, reinterpret_cast<uintptr_t>(in.staging.data()), in.positions.size()};
    touch(t);
    group_.send(t.progress.peer, MessageType::kReady, t.channel,
                PayloadWriter().put(ready).put_all(std::span<const uint64_t>(in.positions)).bytes());
    return {};
}

Status Transfers::take_in_window(Transfer& t) {
    Incoming& in = *t.in;
    Pool& pool = *t.pool;
    group_.transport().close_window(std::exchange(in.open_window, 0));
    char from[32];
    std::snprintf(from, sizeof from, "what rank %u sent", t.progress.peer);
    uint8_t* slot = in.staging.data();
    for (size_t n = 0; n < in.positions.size(); ++n) {
        if (t.phase != Phase::kMoving) return {};
        TA_RETURN_IF_ERROR(pool.check_open());
        const StoredBlock& b = in.list[size_t(in.positions[n])];
        const auto kind = PageKind(b.kind);
        const std::span<uint8_t> bytes(slot, pool.geometry().slot_bytes(kind));
        slot += bytes.size();
        if (hash_bytes(bytes.data(), bytes.size()) != in.hashes[n]) {
            return fail(TA_E_CORRUPT, "the block arrived damaged from rank %u", t.progress.peer)
                .block(int64_t(b.index))
                .rank(int32_t(t.progress.peer));
        }
        if (Status s = check_block(pool, b, bytes, from); !s.ok()) return std::move(s).rank(int32_t(t.progress.peer));
        Result<BlockPtr> block = pool.residency().new_block(kind, in.mine);
        if (!block.ok()) return std::move(block).status().block(int64_t(b.index)).rank(int32_t(group_.settings().rank));
        if (in.tenant != 0) block.value()->set_tenant(in.tenant);
        TA_RETURN_IF_ERROR(fill_block(pool, *block.value(), b, bytes));
        in.blocks[size_t(in.positions[n])] = block.value();
        in.others_see.add({block.take(), b.index});
        const std::lock_guard lock(mutex_);
        ++t.progress.blocks_moved;
        t.progress.bytes_moved += bytes.size();
        touch(t);
    }
    return ask_for_window(t);
}

void Transfers::remember_arrived(const Transfer& t) {
    const Incoming& in = *t.in;
    ArrivedBlocks& arrived = arrived_[{t.progress.peer, in.offer.pool, t.pool.get()}];
    for (size_t i = 0; i < in.list.size(); ++i) {
        if (in.list[i].tokens == uint32_t(kPageTokens)) arrived[in.list[i].content_id] = {in.list[i].index, in.blocks[i]};
    }
    size_t all = 0;
    for (const auto& [origin, blocks] : arrived_) all += blocks.size();
    if (all <= prune_arrived_at_) return;
    all = 0;
    for (auto& [origin, blocks] : arrived_) {
        std::erase_if(blocks, [](const auto& entry) { return entry.second.block.expired(); });
        all += blocks.size();
    }
    std::erase_if(arrived_, [](const auto& entry) { return entry.second.empty(); });
    prune_arrived_at_ = 2 * all + 1024;
}

Status Transfers::land(Transfer& t) {
    {
        const std::lock_guard lock(mutex_);
        if (t.phase != Phase::kMoving) return {};
        t.phase = Phase::kLanding;
    }
    Incoming& in = *t.in;
    remember_arrived(t);
    Pool::Snapshot s;
    s.length = in.offer.length;
    s.blocks = in.blocks;
    s.tenant = in.tenant;
    Result<ta_seq> seq = t.pool->adopt(std::move(s));
    if (!seq.ok()) return std::move(seq).status().rank(int32_t(group_.settings().rank));
    in.spaces.keep();
    const std::lock_guard lock(mutex_);
    t.progress.seq = seq.value();
    tell(t.progress.peer, MessageType::kArrived, t.channel);
    conclude(t, {});
    return {};
}

// By the transfer's lane, or once there is none. `done`: the destination has the sequence.
void Transfers::let_go(Transfer& t, bool done) {
    if (t.out) {
        if (done && !t.out->locked.empty()) (void)t.pool->release(t.out->seq);  // closed meanwhile: it has none any more
        t.pool->unlock_for_plan(t.out->locked);
        t.out.reset();
    }
    if (t.in) {
        if (t.in->open_window != 0) group_.transport().close_window(t.in->open_window);
        t.in.reset();
    }
    t.pool.reset();
}

}  // namespace ta::share
