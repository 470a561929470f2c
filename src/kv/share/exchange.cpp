#include "src/kv/share/exchange.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/format/hash.h"

namespace ta::share {
namespace {

constexpr uint64_t kMostKeptBytes = uint64_t{64} << 20;  // of another rank's channels that no sequence here has
constexpr size_t kMostReleased = 65536;                  // tags in Exchange::released_

struct StepHeader {
    uint64_t nonce;      // of the sender's step
    uint64_t arguments;  // of that step
    MemoryName area;     // memory for the other ranks' parts of that step
};                       // then the nonce of each rank in the last step in which the sender exchanged; 0: there was none

struct StepIdle {
    uint64_t step;    // hash of the step as one without queries
    uint64_t before;  // how many steps without queries the sender had ended before (Channel::idles)
};

struct StepRefused {
    uint64_t nonce;  // of the addressee's step
};

struct StepOver {
    uint64_t nonce;  // the addressee's step that ends with it; 0: the sender knows of none
    uint64_t ends;   // 1: the sender ended it; 0: another rank did, and tells the others itself
};                   // then, for each rank, the last nonce that the sender knows to be over
// If the sender's own nonce there is 0, its sequence is released. Then `nonce` is the sender's own one in the last step in which
// it exchanged, and the others are those of the other ranks in that step.

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
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return asking_ == 0; });
}

void Exchange::on_end(const Status& why) {
    const std::lock_guard lock(mutex_);
    ended_ = why.clone();
    for (auto& [name, c] : channels_) tell(c);
    changed_.notify_all();
}

// Asks the transport without the lock: the answer may take until a GPU is done, and the communication thread must not wait for
// that.
template <class Question>
auto Exchange::ask(std::unique_lock<std::mutex>& lock, Question&& question) {
    struct Back {
        Exchange& exchange;
        std::unique_lock<std::mutex>& lock;
        ~Back() {
            lock.lock();
            if (--exchange.asking_ == 0) exchange.changed_.notify_all();
        }
    } const back{*this, lock};
    ++asking_;
    lock.unlock();
    return question(group_.transport());
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

// Erases the channel if no sequence here has the tag and a later one need not know what other ranks have said. Else counts it
// for its keeper.
void Exchange::settle(uint64_t name) noexcept {
    const auto found = channels_.find(name);
    if (found == channels_.end()) return;
    Channel& c = found->second;
    const bool is_ours = tags_.contains(name);
    std::optional<uint32_t> keeper;
    for (uint32_t r = 0; r < ranks_ && !is_ours && !keeper; ++r) {
        const Peer& p = c.peers[r];
        // It is in a step, or the begin of one that is over is still on its way.
        const bool may_be_in_step = p.nonce > p.used || p.used > begun_[r];
        if (r != rank_ && (may_be_in_step || p.idle != 0)) keeper = r;
    }
    if (c.keeper) --kept_[*c.keeper];
    if (keeper) ++kept_[*keeper];
    c.keeper = keeper;
    if (!is_ours && !keeper) channels_.erase(found);
}

size_t Exchange::most_kept() const {
    return size_t(kMostKeptBytes / (sizeof(Channel) + ranks_ * (sizeof(Peer) + sizeof(uint64_t))));
}

// A hash of all ranks' nonces, which ranks have in common only when they know of each other's steps. 0: a rank is not known to
// be in the step.
uint64_t Exchange::identity_of(const Channel& c) const {
    if (c.bound != 0) return c.bound;
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

// Drops parts of earlier calls: a rank whose call failed makes it again, and sends its parts twice.
bool Exchange::has_parts(Channel& c, uint64_t identity, const Call& call) const {
    for (uint32_t r = 0; r < ranks_ && call.wanted > 0; ++r) {
        if (r == rank_) continue;
        std::list<Part>& parts = c.peers[r].parts;
        std::erase_if(parts, [&](const Part& p) { return p.identity == identity && p.number < call.number; });
        if (parts.empty() || parts.front().identity != identity) return false;
    }
    return true;
}

Exchange::Parts Exchange::take_parts(Channel& c, const Call& call) {
    Parts parts(ranks_);
    for (uint32_t r = 0; r < ranks_ && call.wanted > 0; ++r) {
        if (r == rank_) continue;
        std::list<Part>& from = c.peers[r].parts;
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

// True if the peer has ended this rank's step as one without queries, and is in none with queries. The peer may have ended an
// equal step earlier, before both ranks truncated the sequences; then its count is lower.
bool Exchange::passed_without_queries(const Channel& c, const Peer& p) {
    return p.idle != 0 && p.idle == c.without_queries && p.idles_before >= c.idles && p.nonce <= p.used;
}

// Tells a peer that is in a step of the same channel with other arguments. If the peer has left that step, it ignores the
// message.
void Exchange::compare(uint64_t name, Channel& c, uint32_t peer) {
    const Peer& p = c.peers[peer];
    if (c.nonce == 0 || c.bound != 0) return;
    if (passed_without_queries(c, p))
        fail_step(c, fail(TA_E_MISMATCH, "rank %u has ended the step without queries", peer).rank(int32_t(peer)));
    if (p.nonce <= p.used || p.arguments == c.arguments) return;
    group_.send(peer, MessageType::kStepRefused, name, PayloadWriter().put(StepRefused{p.nonce}).bytes());
}

void Exchange::fail_step(Channel& c, Status why) {
    if (c.failed.ok()) c.failed = std::move(why);
    tell(c);
    changed_.notify_all();
}

// `ends`: the step fails on the peers that are in it. Otherwise they hear the reason from another rank, or see it themselves.
void Exchange::leave(uint64_t name, Channel& c, bool ends) {
    std::vector<uint64_t> over;
    // A peer that has not left the step before is in no step that this rank could give up.
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

// Binds the step to these attempts of all ranks. This rank may not have heard of some of them yet.
void Exchange::bind(Channel& c, std::span<const uint64_t> nonces) {
    c.bound = identity_of(nonces);
    c.idles = 0;
    std::copy(nonces.begin(), nonces.end(), c.nonces.begin());
    for (uint32_t r = 0; r < ranks_; ++r) c.peers[r].used = nonces[r];
}

// The same if a peer says that it has exchanged in a step with these attempts, and this rank's one is among them.
void Exchange::bind_if_in(Channel& c, std::span<const uint64_t> nonces) {
    if (c.nonce != 0 && c.bound == 0 && nonces[rank_] == c.nonce) bind(c, nonces);
}

void Exchange::bind_to_known(Channel& c) {
    for (uint32_t r = 0; r < ranks_; ++r) c.nonces[r] = r == rank_ ? c.nonce : c.peers[r].nonce;
    bind(c, c.nonces);
}

// A rank that has begun another step sends no part of this one any more.
void Exchange::check_peers(Channel& c) {
    for (uint32_t r = 0; r < ranks_; ++r) {
        const Peer& p = c.peers[r];
        const bool gave = !p.parts.empty() && p.parts.front().identity == c.bound;
        if (r == rank_ || gave || p.nonce <= p.used) continue;
        fail_step(c, fail(TA_E_MISMATCH, "rank %u has begun another step", r).rank(int32_t(r)));
    }
}

// Names the first rank that keeps a call waiting.
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

Result<uint64_t> Exchange::add_tag(uint64_t tag) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    if (tags_.contains(tag)) {
        return fail(TA_E_INVALID, "tag %llu is that of another partitioned sequence", (unsigned long long)tag);
    }
    Channel& c = channel(tag);
    std::map<uint64_t, uint64_t>::node_type known = released_.extract(tag);
    if (known.empty()) known = released_before_.extract(tag);
    const uint64_t history = known.empty() ? 0 : known.mapped();
    if (known.empty()) {
        tags_.emplace(tag, history);
    } else {
        tags_.insert(std::move(known));
    }
    c.idles = 0;
    settle(tag);
    return history;
}

void Exchange::remove_tag(uint64_t tag, uint64_t last_met, uint64_t given_up) noexcept {
    std::map<uint64_t, uint64_t> forgotten;  // freed after the lock
    const std::lock_guard lock(mutex_);
    const Channel& c = channels_.at(tag);
    const uint64_t went[] = {last_met, c.idles, given_up};
    std::map<uint64_t, uint64_t>::node_type node = tags_.extract(tag);
    node.mapped() = hash_bytes(went, sizeof went);
    released_.insert(std::move(node));
    if (released_.size() >= kMostReleased) {
        released_.swap(released_before_);
        released_.swap(forgotten);
    }
    try {
        std::vector<uint64_t> nonces = c.nonces;
        const StepOver told{std::exchange(nonces[rank_], 0), 0};
        const PayloadWriter payload = PayloadWriter().put(told).put_all(std::span<const uint64_t>(nonces));
        for (uint32_t r = 0; r < ranks_ && ended_.ok(); ++r) {
            if (r != rank_) group_.send(r, MessageType::kStepOver, tag, payload.bytes());
        }
    } catch (const std::bad_alloc&) {
        // A peer that is in a step over the sequence waits until its time is up.
    }
    settle(tag);
}

Result<bool> Exchange::all_reach() {
    std::unique_lock lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    return ask(lock, [](Transport& t) { return t.all_reach(); });
}

Result<bool> Exchange::all_cpus() {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    return group_.transport().all_cpus();
}

Result<Transport::Shared> Exchange::share_memory(std::shared_ptr<uint8_t> memory, uint64_t bytes) {
    std::unique_lock lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    return ask(lock, [&](Transport& t) { return t.share_memory(std::move(memory), bytes); });
}

Status Exchange::begin(uint64_t name, uint64_t arguments, uint64_t without_queries, const MemoryName& area) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    Channel& c = channel(name);
    c.nonce = ++nonces_;
    c.arguments = arguments;
    c.without_queries = without_queries;
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

void Exchange::end_idle(uint64_t name, uint64_t without_queries) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = channels_.find(name);
    if (found == channels_.end() || !ended_.ok()) return;
    const StepIdle idle{without_queries, found->second.idles++};
    try {
        const PayloadWriter payload = PayloadWriter().put(idle);
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (r != rank_) group_.send(r, MessageType::kStepIdle, name, payload.bytes());
        }
    } catch (const std::bad_alloc&) {
        // A peer that is in the step waits until its time is up.
    }
}

Result<Exchange::Parts> Exchange::exchange(uint64_t name, const Call& call) {
    std::unique_lock lock(mutex_);
    Channel& c = channels_.at(name);
    const Time until = Clock::now() + patience_;
    uint64_t given = 0;  // the identity under which this call has sent its values
    for (;;) {
        const uint64_t identity = identity_of(c);
        if (identity != 0) {
            if (identity != given && c.failed.ok() && ended_.ok()) give(name, given = identity, call);
            // Also after the group has ended: a peer may have left once it had its own results.
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

Result<Exchange::Agreement> Exchange::agree(uint64_t name, uint64_t area_bytes, std::atomic<uint64_t>* given_up) {
    std::vector<Agreement> tried;  // destroyed after the lock is released: freeing memory may wait for a GPU
    std::unique_lock lock(mutex_);
    Channel& c = channels_.at(name);
    const Time until = Clock::now() + patience_;
    for (;;) {
        if (c.bound != 0) check_peers(c);
        TA_RETURN_IF_ERROR(ended_.clone());
        TA_RETURN_IF_ERROR(c.failed.clone());
        const uint64_t identity = identity_of(c);
        if (identity != 0) {
            std::vector<MemoryName> names;
            for (const Peer& p : c.peers) names.push_back(p.area);
            Agreement& all = tried.emplace_back(Agreement{identity, {}});
            const Status found = ask(lock, [&](Transport& t) { return find_areas(t, names, area_bytes, all.areas); });
            TA_RETURN_IF_ERROR(ended_.clone());
            TA_RETURN_IF_ERROR(c.failed.clone());
            if (identity_of(c) != identity) continue;  // a peer has begun another attempt meanwhile
            TA_RETURN_IF_ERROR(found.clone());
            if (c.bound == 0) bind_to_known(c);
            c.tells = given_up;
            return std::move(all);
        }
        if (Clock::now() >= until) return lacks(c, identity, {});
        changed_.wait_until(lock, until);
    }
}

// Finds the memory of all other ranks; `areas`: [ranks], nullptr for this rank.
Status Exchange::find_areas(Transport& transport, std::span<const MemoryName> names, uint64_t bytes,
                            std::vector<std::shared_ptr<uint8_t>>& areas) const {
    areas.resize(ranks_);
    for (uint32_t r = 0; r < ranks_; ++r) {
        if (r == rank_) continue;
        Result<std::shared_ptr<uint8_t>> area = transport.find_memory(r, names[r], bytes);
        if (!area.ok()) return std::move(area).status();
        areas[r] = area.take();
        if (!areas[r]) return fail(TA_E_CANCELLED, "rank %u has destroyed the plan of its step", r).rank(int32_t(r));
    }
    return {};
}

Status Exchange::check(uint64_t name) {
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    return channels_.at(name).failed.clone();
}

uint64_t Exchange::end(uint64_t name, bool gave_up) noexcept {
    const std::lock_guard lock(mutex_);
    const auto found = channels_.find(name);
    if (found == channels_.end()) return 0;
    Channel& c = found->second;
    try {
        // No rank may join a step that this rank has left before an exchange.
        if (c.nonce != 0 && ended_.ok() && (gave_up || c.bound == 0)) leave(name, c, gave_up && c.failed.ok());
    } catch (const std::bad_alloc&) {
        // A peer that is in the step waits until its time is up.
    }
    const uint64_t identity = c.nonce == 0 ? 0 : c.bound;
    for (Peer& p : c.peers) {
        // The peer's report has ended one step here and must not end another: its rank truncates the sequences, and may begin
        // the step anew with queries.
        if (c.nonce != 0 && c.bound == 0 && p.idle == c.without_queries) p.idle = 0;
        p.used = std::max(p.used, p.left);
        p.parts.clear();
        if (!p.gone) continue;
        // Keeps what the peer reported: by now another sequence may use the tag, and the report may be about that one.
        Peer anew;
        anew.idle = p.idle;
        anew.idles_before = p.idles_before;
        p = std::move(anew);
    }
    c.nonce = 0;
    c.tells = nullptr;
    settle(name);
    return identity;
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
        if (!payload.get(step) || !payload.get_rest(ranks_, nonces) || step.nonce <= begun_[from]) return no_message(from);
        begun_[from] = step.nonce;
        bind_if_in(c, nonces);  // the sender is done with the step
        peer.gone = false;
        peer.idle = 0;
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
        // Keeps parts of one identity: the sender has left steps of others. If its call failed, it sends the last one again.
        if (!peer.parts.empty() && peer.parts.back().identity != part.identity) peer.parts.clear();
        if (!peer.parts.empty() && peer.parts.back().number > part.number) return no_message(from);
        if (!peer.parts.empty() && peer.parts.back().number == part.number) peer.parts.pop_back();
        if (c.nonce != 0) peer.parts.push_back(std::move(part));
    } else if (type == MessageType::kStepIdle) {
        StepIdle idle{};
        if (!payload.get(idle) || !payload.at_end() || idle.step == 0) return no_message(from);
        peer.idle = idle.step;
        peer.idles_before = idle.before;
        compare(name, c, from);
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
        peer.idle = 0;
        if (over[from] == 0) {
            over[from] = told.nonce;
            bind_if_in(c, over);
            // If the peer was in this rank's step, it has ended it; this rank may not have taken its parts yet.
            const bool was_in = c.bound != 0 || (peer.nonce > peer.used && peer.arguments == c.arguments);
            peer.gone = true;
            if (c.nonce == 0 || !was_in) peer = {};
        } else {
            // If other ranks had agreed upon a step with it, the peer may have given the step up before it knew whom to tell.
            const bool is_agreed = c.tells && peer.used == over[from];
            // The peer did not end the step. This rank sees or hears the reason itself, as both are in the step.
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
    settle(name);
    const auto most = std::max_element(kept_.begin(), kept_.end());
    if (*most <= most_kept()) return {};
    const auto keeper = uint32_t(most - kept_.begin());
    return fail(TA_E_PEER_LOST, "rank %u begins steps of more than %zu sequences that rank %u does not have", keeper,
                most_kept(), rank_)
        .rank(int32_t(keeper));
}

}  // namespace ta::share
