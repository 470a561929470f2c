#include "src/kv/share/rounds.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ta::share {
namespace {

struct BeginHeader {
    uint64_t nonce;  // of the sender's call
    Rounds::Begin begin;
};

// After this struct: for each rank the nonce of its last call that the sender can no longer use. This includes calls that
// failed with the sender's; the addressee may not have heard of these yet.
struct OverHeader {
    uint64_t nonce;  // of the sender's call
    uint64_t other;  // the addressee's call that failed with it; 0: the sender knew of none
    Ending ending;
};

// kRoundsCall: the nonce of each rank in the call, then what the root says of it.

struct NoteHeader {
    uint64_t from, to;  // nonces
    Rounds::Note what;
    uint32_t way;
    uint64_t value;
    MemoryName memory;
};
static_assert(sizeof(NoteHeader) == 112);

}  // namespace

void Rounds::stop() {
    on_end(fail(TA_E_STATE, "the group was destroyed"));
}

void Rounds::on_end(const Status& why) {
    const std::lock_guard lock(mutex_);
    if (ended_.ok()) ended_ = why.clone();
    changed_.notify_all();
}

// -------------------------------------------------------------------------------------------------------- under mutex_

// Checks that another rank's call is the same one. Each rank finds this out by itself.
void Rounds::compare(uint32_t rank) {
    const Peer& p = peers_[rank];
    if (nonce_ == 0 || bound_ || p.nonce <= p.used) return;
    const auto other = [&](int argument, const char* what, long long theirs, long long ours) {
        fail_call(
            fail(TA_E_MISMATCH, "rank %u began a call with %s %lld, rank %u one with %lld", rank, what, theirs, rank_, ours)
                .argument(argument)
                .rank(int32_t(rank)));
    };
    if (p.begin.root != mine_.root) return other(7, "root", p.begin.root, mine_.root);
    if (p.begin.tag != mine_.tag) return other(8, "tag", (long long)p.begin.tag, (long long)mine_.tag);
    if (p.begin.device != mine_.device) {
        fail_call(
            fail(TA_E_MISMATCH, "rank %u and rank %u are on devices of different kinds, whose results differ", rank, rank_)
                .rank(int32_t(rank)));
    }
}

// Fails this rank's call. Each failing rank tells all others, whoever is at fault, so that none takes its begun call for a
// living one.
void Rounds::fail_call(Status why) noexcept {
    const Ending told = Ending::of(why);
    fail_call(std::move(why), told);
}

// `told`: the reason that the others get.
void Rounds::fail_call(Status why, const Ending& told) noexcept {
    if (nonce_ == 0 || !failed_.ok()) return;
    failed_ = std::move(why);
    changed_.notify_all();
    if (!ended_.ok()) return;
    // If all ranks are known to be in the call, a peer's later begin is of the next call.
    const auto last = [this](const Peer& p) { return bound_ ? p.used : std::max(p.used, p.nonce); };
    try {
        std::vector<uint64_t> over;
        for (const Peer& p : peers_) over.push_back(last(p));
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (r == rank_) continue;
            const Peer& p = peers_[r];
            const uint64_t other = bound_ ? p.used : p.nonce > p.used ? p.nonce : 0;
            PayloadWriter payload;
            payload.put(OverHeader{nonce_, other, told}).put_all(std::span<const uint64_t>(over));
            group_.send(r, MessageType::kRoundsOver, 0, payload.bytes());
        }
    } catch (const std::bad_alloc&) {
        // A peer that is in the call waits until its time is up.
    }
    for (Peer& p : peers_) p.used = last(p);
}

Status Rounds::why_not() const {
    return failed_.ok() ? ended_.clone() : failed_.clone();
}

// ------------------------------------------------------------------------------------------------------------- calls

Status Rounds::begin(const Begin& mine) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    if (nonce_ != 0) return fail(TA_E_BUSY, "another such call of this rank runs; a rank is in one at a time").argument(0);
    const PayloadWriter payload = PayloadWriter().put(BeginHeader{nonces_ + 1, mine});
    for (Peer& p : peers_) p.there = p.here = {};
    mine_ = mine;
    bound_ = called_ = false;
    failed_ = {};
    nonce_ = ++nonces_;
    try {
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (r != rank_) group_.send(r, MessageType::kRoundsBegin, 0, payload.bytes());
        }
    } catch (const std::bad_alloc&) {
        fail_call(fail(TA_E_MEMORY, "no memory to begin a call").rank(int32_t(rank_)));
        nonce_ = 0;
        throw;
    }
    for (uint32_t r = 0; r < ranks_; ++r) {
        if (r != rank_) compare(r);
    }
    return {};
}

Result<std::vector<Rounds::Begin>> Rounds::wait_for_all() {
    std::unique_lock lock(mutex_);
    const std::chrono::milliseconds patience = group_.settings().operation;
    const Time until = Clock::now() + patience;
    for (;;) {
        TA_RETURN_IF_ERROR(why_not());
        uint32_t missing = ranks_;
        for (uint32_t r = 0; r < ranks_ && missing == ranks_; ++r) {
            if (r != rank_ && peers_[r].nonce <= peers_[r].used) missing = r;
        }
        if (missing == ranks_) break;
        if (Clock::now() >= until) {
            fail_call(fail(TA_E_TIMEOUT, "rank %u did not begin the call in %lld ms", missing, (long long)patience.count())
                          .rank(int32_t(missing)));
            return failed_.clone();
        }
        changed_.wait_until(lock, until);
    }
    std::vector<Begin> all;
    for (uint32_t r = 0; r < ranks_; ++r) {
        peers_[r].used = peers_[r].nonce;
        peers_[r].heard = Clock::now();
        all.push_back(r == rank_ ? mine_ : peers_[r].begin);
    }
    bound_ = true;
    return all;
}

Status Rounds::call(uint32_t to, std::span<const uint8_t> what) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(why_not());
    std::vector<uint64_t> nonces;
    for (uint32_t r = 0; r < ranks_; ++r) nonces.push_back(r == rank_ ? nonce_ : peers_[r].used);
    PayloadWriter payload;
    payload.put_all(std::span<const uint64_t>(nonces)).put_all(what);
    group_.send(to, MessageType::kRoundsCall, 0, payload.bytes());
    return {};
}

Result<std::vector<uint8_t>> Rounds::wait_for_call() {
    std::unique_lock lock(mutex_);
    const std::chrono::milliseconds patience = group_.settings().operation;
    const Time until = Clock::now() + patience;
    for (;;) {
        TA_RETURN_IF_ERROR(why_not());
        if (called_) return std::move(call_);
        if (Clock::now() >= until) {
            uint32_t missing = mine_.root;
            for (uint32_t r = 0; r < ranks_; ++r) {
                if (r != rank_ && peers_[r].nonce <= peers_[r].used) missing = r;
            }
            fail_call(fail(TA_E_TIMEOUT, "rank %u did not begin the call in %lld ms", missing, (long long)patience.count())
                          .rank(int32_t(missing)));
            return failed_.clone();
        }
        changed_.wait_until(lock, until);
    }
}

Status Rounds::note(uint32_t to, Note what, uint64_t value, uint32_t way, const MemoryName& memory) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(why_not());
    Peer& p = peers_[to];
    if (what == Note::kReady) p.here.ready = 1;
    if (what == Note::kGiven) ++p.here.given;
    if (what == Note::kTaken) ++p.here.taken;
    if (what == Note::kReturned) ++p.here.returned;
    if (what == Note::kReceived) ++p.here.received;
    const NoteHeader header{nonce_, p.used, what, way, value, memory};
    group_.send(to, MessageType::kRoundsNote, 0, PayloadWriter().put(header).bytes());
    changed_.notify_all();
    return {};
}

Result<Rounds::Progress> Rounds::wait(uint32_t peer, const Condition& condition) {
    std::unique_lock lock(mutex_);
    const std::chrono::milliseconds patience = group_.settings().operation;
    const Time started = Clock::now();
    const Peer& p = peers_[peer];
    for (;;) {
        TA_RETURN_IF_ERROR(failed_.clone());
        if (condition(p.there, p.here))
            return p.there;  // also after the group has ended: a peer may have left when it was
                             // done
        TA_RETURN_IF_ERROR(ended_.clone());
        const Time until = std::max(p.heard, started) + patience;
        if (Clock::now() >= until) {
            fail_call(fail(TA_E_TIMEOUT, "rank %u did not go on with the call for %lld ms", peer, (long long)patience.count())
                          .rank(int32_t(peer)));
            return failed_.clone();
        }
        changed_.wait_until(lock, until);
    }
}

void Rounds::give_up(const Status& why) noexcept {
    const std::lock_guard lock(mutex_);
    fail_call(why.clone());
}

void Rounds::end() noexcept {
    const std::lock_guard lock(mutex_);
    nonce_ = 0;
    call_.clear();
}

uint64_t Rounds::new_window() {
    const std::lock_guard lock(mutex_);
    // Bit 39 tells these windows from those of transfers, which have a zero there.
    return uint64_t(rank_ + 1) << 40 | uint64_t{1} << 39 | ++windows_;
}

// ---------------------------------------------------------------------------------------------------------- messages

Status Rounds::on_message(const Message& m) {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return {};
    const uint32_t from = m.header.from;
    PayloadReader payload(m.payload);
    Peer& peer = peers_[from];
    const auto type = MessageType(m.header.type);
    if (type == MessageType::kRoundsBegin) {
        BeginHeader begin{};
        if (!payload.get(begin) || !payload.at_end() || begin.nonce <= peer.nonce) return no_message(from);
        peer.nonce = begin.nonce;
        peer.begin = begin.begin;
        compare(from);
    } else if (type == MessageType::kRoundsOver) {
        OverHeader over{};
        std::vector<uint64_t> nonces(ranks_);
        bool whole = payload.get(over);
        for (uint64_t& n : nonces) whole = whole && payload.get(n);
        if (!whole || !payload.at_end() || over.nonce > peer.nonce || !over.ending.is_valid(ranks_)) return no_message(from);
        const bool is_mine = nonce_ != 0 && over.other == nonce_;
        if (is_mine) fail_call(over.ending.to_status(from), over.ending.relayed(from));
        // Begins of the failed calls may still be on their way: they are ignored.
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (r != rank_) peers_[r].used = std::max(peers_[r].used, nonces[r]);
        }
        peer.used = std::max(peer.used, over.nonce);
    } else if (type == MessageType::kRoundsCall) {
        std::vector<uint64_t> nonces(ranks_);
        for (uint64_t& n : nonces) {
            if (!payload.get(n)) return no_message(from);
        }
        if (nonce_ == 0 || nonces[rank_] != nonce_ || !failed_.ok()) return {};  // the call was given up
        if (from != mine_.root || bound_ || nonces[from] != peer.nonce) return no_message(from);
        for (uint32_t r = 0; r < ranks_; ++r) peers_[r].used = std::max(peers_[r].used, nonces[r]);
        peer.heard = Clock::now();
        const size_t header = nonces.size() * sizeof(uint64_t);
        call_.assign(m.payload.begin() + std::ptrdiff_t(header), m.payload.end());
        bound_ = called_ = true;
    } else {
        TA_RETURN_IF_ERROR(take_note(from, payload));
    }
    changed_.notify_all();
    return {};
}

Status Rounds::take_note(uint32_t from, PayloadReader& payload) {
    NoteHeader note{};
    Peer& peer = peers_[from];
    if (!payload.get(note) || !payload.at_end()) return no_message(from);
    if (nonce_ == 0 || !bound_ || note.to != nonce_ || note.from != peer.used) return {};  // the call was given up
    Progress& there = peer.there;
    const Progress& here = peer.here;
    const bool is_root = rank_ == mine_.root, from_root = from == mine_.root;
    bool fits = is_root || from_root;
    switch (note.what) {
        case Note::kReady:
            fits = fits && is_root && there.ready == 0;
            there.ready = 1;
            there.window = note.value;
            there.way = note.way;
            break;
        case Note::kGiven:
            fits = fits && from_root && here.ready != 0 && there.given - here.taken < kSlots;
            there.given_hash[there.given++ % kSlots] = note.value;
            break;
        case Note::kTaken:
            fits = fits && is_root && there.taken < here.given;
            ++there.taken;
            break;
        case Note::kReturned:
            fits = fits && is_root && there.returned < there.taken && there.returned - here.received < kSlots;
            there.returned_hash[there.returned++ % kSlots] = note.value;
            break;
        case Note::kReceived:
            fits = fits && from_root && there.received < here.returned;
            ++there.received;
            break;
        case Note::kDone:
            fits = fits && from_root && here.ready != 0;
            there.done = 1;
            break;
        case Note::kGoesOn:
            fits = fits && from_root;
            break;
        default:
            fits = false;
    }
    if (!fits) return no_message(from);
    if (note.memory.number != 0) there.memory = note.memory;
    peer.heard = Clock::now();
    return {};
}

}  // namespace ta::share
