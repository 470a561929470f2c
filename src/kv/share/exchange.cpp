#include "src/kv/share/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/format/hash.h"

namespace ta::share {
namespace {

struct StepHeader {
    uint64_t nonce;      // of the sender's step
    uint64_t arguments;  // of that step
    MemoryName area;     // for the others' parts of that step
};                       // then the nonce of each rank in the last step in which the sender exchanged; 0: there was none

struct StepRefused {
    uint64_t nonce;  // of the addressee's step
};

struct StepOver {
    uint64_t nonce;  // of the addressee's step that is over with it, as the sender knows it; 0: none is
    uint64_t ends;   // 1: by the sender's own doing; 0: by that of a rank that tells the others itself
};                   // then of each rank the last nonce that the sender knows to be over; its own 0: its sequence is released

struct PartHeader {
    uint64_t identity, number, arguments, values;
};  // then the values

}  // namespace

Status other_arguments(uint32_t rank) {
    return fail(TA_E_MISMATCH, "rank %u attends to another layer, or with other heads, options or outputs", rank)
        .rank(int32_t(rank));
}

void Exchange::stop() {
    on_end(fail(TA_E_STATE, "the sequence's group was destroyed"));
}

void Exchange::on_end(const Status& why) {
    const std::lock_guard lock(mutex_);
    ended_ = why.clone();
    for (auto& [name, c] : channels_) tell(c);
    changed_.notify_all();
}

// -------------------------------------------------------------------------------------------------------- under mutex_

Exchange::Channel& Exchange::channel(uint64_t name) {
    Channel& c = channels_[name];
    if (c.peers.empty()) {
        c.nonces.resize(ranks_);
        c.peers.resize(ranks_);
    }
    return c;
}

void Exchange::erase_if_unknown(uint64_t name) {
    const auto found = channels_.find(name);
    if (found == channels_.end() || tags_.contains(name)) return;
    for (const Peer& p : found->second.peers) {
        if (p.nonce != 0) return;
    }
    channels_.erase(found);
}

// The same at all ranks that know of each other's steps, and at no other time. 0: a rank is not known to be in it.
uint64_t Exchange::identity_of(const Channel& c) const {
    std::vector<uint64_t> nonces;
    for (uint32_t r = 0; r < ranks_; ++r) {
        const Peer& p = c.peers[r];
        if (r != rank_ && (p.nonce <= p.used || p.arguments != c.arguments)) return 0;
        nonces.push_back(r == rank_ ? c.nonce : p.nonce);
    }
    return identity_of(nonces);
}

uint64_t Exchange::identity_of(std::span<const uint64_t> nonces) {
    return hash_bytes(nonces.data(), nonces.size_bytes()) | 1;
}

// A call that failed elsewhere is made again there: its parts come twice.
bool Exchange::has_parts(Channel& c, uint64_t identity, const Call& call) const {
    for (uint32_t r = 0; r < ranks_ && call.wanted > 0; ++r) {
        if (r == rank_) continue;
        std::deque<Part>& parts = c.peers[r].parts;
        std::erase_if(parts, [&](const Part& p) { return p.identity == identity && p.number < call.number; });
        if (parts.empty() || parts.front().identity != identity) return false;
    }
    return true;
}

Exchange::Parts Exchange::take_parts(Channel& c, const Call& call) {
    Parts parts(ranks_);
    for (uint32_t r = 0; r < ranks_ && call.wanted > 0; ++r) {
        if (r == rank_) continue;
        std::deque<Part>& from = c.peers[r].parts;
        const Part& p = from.front();
        if (p.number != call.number || p.arguments != call.arguments || p.values.size() != call.wanted) {
            fail_step(c, other_arguments(r));
            return {};
        }
        parts[r] = std::move(from.front().values);
        from.pop_front();
    }
    return parts;
}

void Exchange::give(uint64_t name, uint64_t identity, const Call& call) {
    for (uint32_t r = 0; r < ranks_; ++r) {
        if (r == rank_ || call.given[r].empty()) continue;
        const PartHeader header{identity, call.number, call.arguments, call.given[r].size()};
        group_.send(r, MessageType::kPart, name,
                    PayloadWriter().put(header).put_all(std::span<const float>(call.given[r])).bytes());
    }
}

// A peer in a step of the same channel with other arguments is told. If it is not in that step any more, it knows better.
void Exchange::compare(uint64_t name, Channel& c, uint32_t peer) {
    const Peer& p = c.peers[peer];
    if (c.nonce == 0 || c.bound != 0 || p.nonce <= p.used || p.arguments == c.arguments) return;
    group_.send(peer, MessageType::kStepRefused, name, PayloadWriter().put(StepRefused{p.nonce}).bytes());
}

void Exchange::fail_step(Channel& c, Status why) {
    if (c.failed.ok()) c.failed = std::move(why);
    tell(c);
    changed_.notify_all();
}

// `ends`: the peers that are in the step fail. Else they hear from another rank why this one failed, or see it themselves.
void Exchange::leave(uint64_t name, Channel& c, bool ends) {
    std::vector<uint64_t> over;
    // One that has not left the step before is in none that this rank gives up.
    const auto is_told = [&](const Peer& p) { return ends && (c.bound != 0 || p.nonce > p.used); };
    for (uint32_t r = 0; r < ranks_; ++r) {
        const Peer& p = c.peers[r];
        over.push_back(r == rank_ ? c.nonce : is_told(p) ? std::max(p.nonce, p.used) : p.used);
    }
    for (uint32_t r = 0; r < ranks_; ++r) {
        if (r == rank_) continue;
        const StepOver told{is_told(c.peers[r]) ? over[r] : 0, ends};
        group_.send(r, MessageType::kStepOver, name,
                    PayloadWriter().put(told).put_all(std::span<const uint64_t>(over)).bytes());
    }
    for (uint32_t r = 0; r < ranks_; ++r) c.peers[r].used = std::max(c.peers[r].used, r == rank_ ? 0 : over[r]);
}

void Exchange::tell(Channel& c) {
    if (c.tells) c.tells->store(c.bound, std::memory_order_release);
}

// To the attempts of all ranks that it is a step of. Of some this rank may not have heard yet.
void Exchange::bind(Channel& c, std::span<const uint64_t> nonces) {
    c.bound = identity_of(nonces);
    std::copy(nonces.begin(), nonces.end(), c.nonces.begin());
    for (uint32_t r = 0; r < ranks_; ++r) c.peers[r].used = nonces[r];
}

void Exchange::bind_to_known(Channel& c) {
    for (uint32_t r = 0; r < ranks_; ++r) c.nonces[r] = r == rank_ ? c.nonce : c.peers[r].nonce;
    bind(c, c.nonces);
}

// A rank that is in another step by now gives no part of this one any more.
void Exchange::check_peers(Channel& c) {
    for (uint32_t r = 0; r < ranks_; ++r) {
        const Peer& p = c.peers[r];
        const bool gave = !p.parts.empty() && p.parts.front().identity == c.bound;
        if (r == rank_ || gave || p.nonce <= p.used) continue;
        fail_step(c, fail(TA_E_MISMATCH, "rank %u has begun another step", r).rank(int32_t(r)));
    }
}

// The first rank that keeps a call waiting.
Status Exchange::lacks(const Channel& c, uint64_t identity, const Call& call) const {
    const auto ms = (long long)patience_.count();
    for (uint32_t r = 0; r < ranks_; ++r) {
        const Peer& p = c.peers[r];
        if (r == rank_) continue;
        if (identity == 0 && (p.nonce <= p.used || p.arguments != c.arguments))
            return fail(TA_E_TIMEOUT, "rank %u did not begin the step in %lld ms", r, ms).rank(int32_t(r));
        if (identity != 0 && call.wanted > 0 && (p.parts.empty() || p.parts.front().identity != identity))
            return fail(TA_E_TIMEOUT, "rank %u did not attend in %lld ms", r, ms).rank(int32_t(r));
    }
    return fail(TA_E_TIMEOUT, "the step did not go on in %lld ms", ms);
}

// ------------------------------------------------------------------------------------------------------------- calls

Status Exchange::add_tag(uint64_t tag) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    if (tags_.contains(tag)) {
        return fail(TA_E_INVALID, "tag %llu is that of another partitioned sequence", (unsigned long long)tag);
    }
    channel(tag);
    tags_.insert(tag);
    return {};
}

void Exchange::remove_tag(uint64_t tag) noexcept {
    const std::lock_guard lock(mutex_);
    tags_.erase(tag);
    erase_if_unknown(tag);
    if (!ended_.ok()) return;
    try {
        const std::vector<uint64_t> none(ranks_);
        const PayloadWriter payload = PayloadWriter().put(StepOver{}).put_all(std::span<const uint64_t>(none));
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (r != rank_) group_.send(r, MessageType::kStepOver, tag, payload.bytes());
        }
    } catch (const std::bad_alloc&) {
        // A peer that is in a step with it waits until its time is over.
    }
}

Result<bool> Exchange::all_reach() {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    return group_.transport().all_reach();
}

Result<bool> Exchange::all_cpus() {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    return group_.transport().all_cpus();
}

Result<Transport::Shared> Exchange::share_memory(std::shared_ptr<uint8_t> memory) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    return group_.transport().share_memory(std::move(memory));
}

Status Exchange::begin(uint64_t name, uint64_t arguments, const MemoryName& area) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    Channel& c = channel(name);
    c.nonce = ++nonces_;
    c.arguments = arguments;
    c.bound = 0;
    c.failed = {};
    for (uint32_t r = 0; r < ranks_; ++r) {
        c.peers[r].parts.clear();
        const StepHeader step{c.nonce, arguments, area};
        const PayloadWriter payload = PayloadWriter().put(step).put_all(std::span<const uint64_t>(c.nonces));
        if (r != rank_) group_.send(r, MessageType::kStep, name, payload.bytes());
    }
    for (uint32_t r = 0; r < ranks_; ++r) {
        if (r != rank_) compare(name, c, r);
    }
    return {};
}

Result<Exchange::Parts> Exchange::exchange(uint64_t name, const Call& call) {
    std::unique_lock lock(mutex_);
    Channel& c = channels_.at(name);
    const Time until = Clock::now() + patience_;
    uint64_t given = 0;  // under which identity
    for (;;) {
        const uint64_t identity = c.bound != 0 ? c.bound : identity_of(c);
        if (identity != 0) {
            if (identity != given && c.failed.ok() && ended_.ok()) give(name, given = identity, call);
            // Also when the group has ended since: a peer may have left when it had its own results.
            if (identity == given && has_parts(c, identity, call) && c.failed.ok()) {
                Parts parts = take_parts(c, call);
                if (c.failed.ok()) {
                    if (c.bound == 0) bind_to_known(c);
                    return parts;
                }
            }
            if (c.bound != 0) check_peers(c);
        }
        TA_RETURN_IF_ERROR(ended_.clone());
        TA_RETURN_IF_ERROR(c.failed.clone());
        if (Clock::now() >= until) return lacks(c, identity, call);
        changed_.wait_until(lock, until);
    }
}

Result<Exchange::Agreement> Exchange::agree(uint64_t name, std::atomic<uint64_t>* given_up) {
    std::unique_lock lock(mutex_);
    Channel& c = channels_.at(name);
    const Time until = Clock::now() + patience_;
    for (;;) {
        if (c.bound != 0) check_peers(c);
        TA_RETURN_IF_ERROR(ended_.clone());
        TA_RETURN_IF_ERROR(c.failed.clone());
        const uint64_t identity = identity_of(c);
        if (identity != 0) {
            Agreement all{identity, {}};
            for (uint32_t r = 0; r < ranks_; ++r) {
                all.areas.emplace_back();
                if (r == rank_) continue;
                Result<std::shared_ptr<uint8_t>> area = group_.transport().find_memory(r, c.peers[r].area);
                if (!area.ok()) return std::move(area).status();
                all.areas[r] = area.take();
                if (!all.areas[r])
                    return fail(TA_E_CANCELLED, "rank %u has destroyed the plan of its step", r).rank(int32_t(r));
            }
            bind_to_known(c);
            c.tells = given_up;
            return all;
        }
        if (Clock::now() >= until) return lacks(c, identity, {});
        changed_.wait_until(lock, until);
    }
}

Status Exchange::check(uint64_t name) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    return channels_.at(name).failed.clone();
}

void Exchange::end(uint64_t name, bool gave_up) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = channels_.find(name);
    if (found == channels_.end()) return;
    Channel& c = found->second;
    try {
        // No rank may join a step that this one has left without an exchange.
        if (c.nonce != 0 && ended_.ok() && (gave_up || c.bound == 0)) leave(name, c, gave_up && c.failed.ok());
    } catch (const std::bad_alloc&) {
        // A peer that is in the step waits until its time is over.
    }
    c.nonce = 0;
    c.tells = nullptr;
    for (Peer& p : c.peers) {
        p.used = std::max(p.used, p.left);
        p.parts.clear();
        if (p.gone) p = {};
    }
    erase_if_unknown(name);
}

// ---------------------------------------------------------------------------------------------------------- messages

Status Exchange::on_message(const Message& m) {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return {};
    const uint32_t from = m.header.from;
    const uint64_t name = m.header.channel;
    const auto type = MessageType(m.header.type);
    PayloadReader payload(m.payload);
    Channel& c = channel(name);
    Peer& peer = c.peers[from];
    if (type == MessageType::kStep) {
        StepHeader step{};
        std::vector<uint64_t> nonces;
        if (!payload.get(step) || !payload.get_rest(ranks_, nonces) || step.nonce <= peer.nonce) return no_message(from);
        // The sender is done with the step in which this rank is.
        if (c.nonce != 0 && c.bound == 0 && nonces[rank_] == c.nonce) bind(c, nonces);
        peer.gone = false;
        peer.nonce = step.nonce;
        peer.arguments = step.arguments;
        peer.area = step.area;
        compare(name, c, from);
    } else if (type == MessageType::kPart) {
        PartHeader header{};
        Part part{};
        if (!payload.get(header) || !payload.get_rest(header.values, part.values)) return no_message(from);
        part.identity = header.identity;
        part.number = header.number;
        part.arguments = header.arguments;
        // Of one identity: a step that the sender has left is of no use.
        if (!peer.parts.empty() && peer.parts.back().identity != part.identity) peer.parts.clear();
        if (c.nonce != 0) peer.parts.push_back(std::move(part));
    } else if (type == MessageType::kStepRefused) {
        StepRefused refused{};
        if (!payload.get(refused) || !payload.at_end()) return no_message(from);
        if (c.nonce != 0 && c.nonce == refused.nonce)
            fail_step(c, fail(TA_E_MISMATCH, "rank %u is in a step with other sequences, lengths or numbers of tokens", from)
                             .rank(int32_t(from)));
    } else {
        StepOver told{};
        std::vector<uint64_t> over;
        if (!payload.get(told) || !payload.get_rest(ranks_, over)) return no_message(from);
        if (over[from] == 0) {
            // If it was in this rank's step it has ended that. Its parts may not have been looked at here.
            const bool was_in = c.bound != 0 || (peer.nonce > peer.used && peer.arguments == c.arguments);
            peer.gone = true;
            if (c.nonce == 0 || !was_in) peer = {};
        } else {
            // It may not have known whom to tell when it gave up a step that others had agreed upon with it.
            const bool is_agreed = c.tells && peer.used == over[from];
            // Why it failed this rank sees, or hears, in the step that both are in.
            const bool stays =
                told.ends == 0 && c.nonce != 0 && c.bound == 0 && peer.nonce == over[from] && peer.arguments == c.arguments;
            if (stays) peer.left = std::exchange(over[from], 0);
            for (uint32_t r = 0; r < ranks_; ++r) {
                if (r != rank_) c.peers[r].used = std::max(c.peers[r].used, over[r]);
            }
            if (c.nonce != 0 && (c.nonce == told.nonce || is_agreed))
                fail_step(c, fail(TA_E_CANCELLED, "rank %u gave the step up", from).rank(int32_t(from)));
        }
    }
    changed_.notify_all();
    erase_if_unknown(name);
    return {};
}

}  // namespace ta::share
