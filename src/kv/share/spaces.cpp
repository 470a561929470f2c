#include "src/kv/share/spaces.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ta::share {
namespace {

constexpr size_t kMostHints = size_t{1} << 20;  // hints kept of one rank in one namespace
constexpr size_t kHintsInMessage = 4096;
constexpr uint32_t kMostEmptyAnswers = 16;       // after so many empty answers a fetch asks the rank no more
constexpr size_t kKeysAtOnce = 4096;             // keys that are looked up at a time
constexpr std::chrono::milliseconds kTick{250};  // how often the teller looks for moved blocks

// The bytes that are hashed into a name or a proof.
struct Signed {
    char label[32];
    uint64_t generation, fingerprint;
    uint32_t from, to;  // only of a proof
};
static_assert(sizeof(Signed) == 56, "no hash of a key is of so many bytes");

struct JoinMessage {
    SpaceName name;
    std::array<uint8_t, 32> proof;
    uint32_t answers;  // 1: this answers the addressee's own join
    uint32_t reserved;
};

struct HintsHeader {
    SpaceName name;
    uint64_t hints;
    uint32_t first, last;  // 1: the first or last message of a whole table
};                         // then the hints

struct Hint {
    BlockKey key;
    uint8_t there;  // 0: dropped
    uint8_t tier;
    uint8_t reserved[6];
};

Result<BlockKey> sign(const Group& group, const Pool& pool, Tenant space, const char* label, uint32_t from, uint32_t to) {
    Signed s{};
    std::memcpy(s.label, label, std::min(std::strlen(label), sizeof s.label));
    s.generation = group.settings().generation;
    s.fingerprint = pool.fingerprint();
    s.from = from;
    s.to = to;
    return pool.prefixes().sign(space, {reinterpret_cast<const uint8_t*>(&s), sizeof s});
}

}  // namespace

void SharedSpaces::stop() {
    {
        const std::lock_guard lock(bell_mutex_);
        stopping_ = true;
        bell_.notify_all();
    }
    if (teller_.joinable()) teller_.join();
    std::map<SpaceName, Ptr> left;
    {
        const std::lock_guard lock(mutex_);
        left.swap(spaces_);
    }
    for (const auto& [name, space] : left) end_space(space);
}

SharedSpaces::Ptr SharedSpaces::find_locked(const SpaceName& name) const {
    const auto found = spaces_.find(name);
    return found == spaces_.end() ? nullptr : found->second;
}

SharedSpaces::Ptr SharedSpaces::find_locked(const Pool& pool, Tenant space) const {
    for (const auto& [name, s] : spaces_) {
        if (s->which == &pool && s->id == space) return s;
    }
    return nullptr;
}

// ------------------------------------------------------------------------------------------------------------------- calls

Status SharedSpaces::join(const std::shared_ptr<Pool>& pool, Tenant id) {
    TA_RETURN_IF_ERROR(group_.check_ready());
    const uint32_t rank = group_.settings().rank, ranks = group_.settings().ranks;
    auto space = std::make_shared<Space>();
    space->pool = pool;
    space->which = pool.get();
    space->id = id;
    const auto signature = [&](const char* label, uint32_t from, uint32_t to, BlockKey& result) -> Status {
        Result<BlockKey> signed_by = sign(group_, *pool, id, label, from, to);
        if (!signed_by.ok()) return std::move(signed_by).status().argument(2);
        result = signed_by.value();
        return {};
    };
    BlockKey name;
    TA_RETURN_IF_ERROR(signature("turboattention shared namespace", 0, 0, name));
    std::copy_n(name.begin(), space->name.size(), space->name.begin());
    space->own.resize(ranks);
    space->expected.resize(ranks);
    space->peers.resize(ranks);
    for (uint32_t r = 0; r < ranks; ++r) {
        TA_RETURN_IF_ERROR(signature("turboattention proof of a salt", rank, r, space->own[r]));
        TA_RETURN_IF_ERROR(signature("turboattention proof of a salt", r, rank, space->expected[r]));
    }
    space->feed = std::make_shared<PrefixFeed>([this] { ring(); });
    TA_RETURN_IF_ERROR(start_teller());
    struct Undo {
        SharedSpaces* spaces;
        Ptr space;
        ~Undo() {
            if (!space) return;
            {
                const std::lock_guard lock(spaces->mutex_);
                spaces->retire(space);  // some peers may have heard of it
            }
            spaces->end_space(space);
        }
    } undo{this, space};
    if (Status s = pool->prefixes().follow(id, space->feed); !s.ok()) return std::move(s).argument(2);
    leave_if_over(space->name);
    {
        const std::lock_guard lock(mutex_);
        if (ended_) return group_.health();
        tell_left();
        if (!spaces_.emplace(space->name, space).second) {
            return fail(TA_E_INVALID, "this rank has joined a namespace of this salt and a pool of this fingerprint")
                .argument(2);
        }
        // Under the lock, so that no other message about the namespace goes out first.
        for (uint32_t r = 0; r < ranks; ++r) {
            const JoinMessage join{space->name, space->own[r], 0, 0};
            if (r != rank) group_.send(r, MessageType::kSpaceJoin, 0, PayloadWriter().put(join).bytes());
        }
    }
    undo.space.reset();
    ring();
    return {};
}

// Leaves a namespace whose pool or namespace has ended. The teller would see that later; a join under the same name does not
// wait for it.
void SharedSpaces::leave_if_over(const SpaceName& name) {
    Ptr present;
    {
        const std::lock_guard lock(mutex_);
        present = find_locked(name);
    }
    if (!present) return;
    const std::shared_ptr<Pool> pool = present->pool.lock();
    if (pool && pool->prefixes().check(present->id).ok()) return;
    {
        const std::lock_guard lock(mutex_);
        retire(present);
    }
    end_space(present);
}

Status SharedSpaces::leave(Pool& pool, Tenant id) {
    TA_RETURN_IF_ERROR(group_.health());
    Ptr space;
    {
        const std::lock_guard lock(mutex_);
        space = find_locked(pool, id);
        if (!space) return not_joined();
        retire(space);
    }
    end_space(space);
    return {};
}

// Leaves the namespace here, which takes no memory. If there is none to tell the others, the teller or the next join does so.
// Under mutex_.
void SharedSpaces::retire(const Ptr& space) noexcept {
    if (find_locked(space->name) != space) return;  // another namespace of the name may have joined since
    left_.insert(spaces_.extract(space->name));
    changed_.notify_all();
    try {
        tell_left();
    } catch (const std::bad_alloc&) {
        ring();
    }
}

// Tells all other ranks what this one has left. A peer that is told twice ignores the second message. Under mutex_.
void SharedSpaces::tell_left() {
    for (; !left_.empty(); left_.erase(left_.begin())) {
        const PayloadWriter payload = PayloadWriter().put(left_.begin()->first);
        for (uint32_t r = 0; r < group_.settings().ranks; ++r) {
            if (r != group_.settings().rank) group_.send(r, MessageType::kSpaceLeave, 0, payload.bytes());
        }
    }
}

// If the group has ended, says so: the teller may have removed the namespaces of such a group.
Status SharedSpaces::not_joined() const {
    TA_RETURN_IF_ERROR(group_.health());
    return fail(TA_E_STATE, "the namespace has not joined the group: ta_namespace_join belongs first").argument(2);
}

Result<std::vector<PrefixPlace>> SharedSpaces::lookup(const Pool& pool, Tenant id, std::span<const uint8_t> keys,
                                                      int64_t nanoseconds) const {
    TA_RETURN_IF_ERROR(group_.check_ready());
    const Time until = time_after(nanoseconds);
    std::vector<PrefixPlace> places;
    std::vector<BlockKey> hashed;
    size_t first = 0;
    do {
        const size_t n = std::min(kKeysAtOnce, keys.size() / kPrefixKeyBytes - first);
        places.resize(first + n);
        TA_RETURN_IF_ERROR(look_up(pool, id, keys.subspan(first * kPrefixKeyBytes, n * kPrefixKeyBytes), first, until, hashed,
                                   std::span(places).subspan(first)));
        first += n;
    } while (first < keys.size() / kPrefixKeyBytes);
    return places;
}

Result<std::vector<BlockKey>> SharedSpaces::hash_findable(const Pool& pool, Tenant id, std::span<const uint8_t> keys) const {
    std::vector<BlockKey> all, hashed;
    std::vector<PrefixPlace> places;
    do {
        const size_t n = std::min(kKeysAtOnce, keys.size() / kPrefixKeyBytes - all.size());
        places.resize(n);
        TA_RETURN_IF_ERROR(look_up(pool, id, keys.subspan(all.size() * kPrefixKeyBytes, n * kPrefixKeyBytes), all.size(),
                                   Clock::now(), hashed, places));
        const auto nowhere = std::find_if(places.begin(), places.end(),
                                          [](const PrefixPlace& p) { return p.answer == PrefixPlace::Answer::kNo; });
        all.insert(all.end(), hashed.begin(), hashed.begin() + (nowhere - places.begin()));
        if (nowhere != places.end()) break;
    } while (all.size() < keys.size() / kPrefixKeyBytes);
    return all;
}

Status SharedSpaces::look_up(const Pool& pool, Tenant id, std::span<const uint8_t> keys, uint64_t first, Time until,
                             std::vector<BlockKey>& hashed, std::span<PrefixPlace> places) const {
    Result<std::vector<BlockKey>> made = pool.prefixes().hash_keys(id, keys, first);
    if (!made.ok()) return std::move(made).status().argument(2);
    hashed = made.take();
    std::vector<uint64_t> indices(hashed.size());
    for (size_t i = 0; i < indices.size(); ++i) indices[i] = first + i;
    const uint32_t rank = group_.settings().rank, ranks = group_.settings().ranks;
    for (bool last = false;;) {
        Result<std::vector<std::optional<TierKind>>> here = pool.prefixes().find_tiers(id, hashed, indices);
        if (!here.ok()) return std::move(here).status().argument(2);
        std::unique_lock lock(mutex_);
        if (ended_) break;
        const Ptr space = find_locked(pool, id);
        if (!space) return not_joined();
        bool waits = false;
        for (size_t i = 0; i < hashed.size(); ++i) {
            if (const std::optional<TierKind>& tier = here.value()[i]) {
                places[i] = {PrefixPlace::Answer::kYes, rank, *tier};
                continue;
            }
            uint8_t nearest = kNowhere;
            uint32_t at = 0;
            bool untold = false;
            for (uint32_t d = 1; d < ranks; ++d) {
                const uint32_t r = (rank + d) % ranks;
                const uint8_t near = nearness(space->peers[r], hashed[i]);
                untold = untold || (near == kMayHave && !space->peers[r].complete);
                if (near < nearest) at = r;
                nearest = std::min(nearest, near);
            }
            waits = waits || (nearest == kMayHave && untold);
            places[i] = {};
            if (nearest == kNowhere) places[i].answer = PrefixPlace::Answer::kNo;
            if (nearest < kMayHave) places[i] = {PrefixPlace::Answer::kYes, at, TierKind(nearest)};
        }
        if (!waits || last) return {};
        last = changed_.wait_until(lock, until) == std::cv_status::timeout;
    }
    return group_.health();
}

Result<SpaceName> SharedSpaces::name_of(const Pool& pool, Tenant id) const {
    const std::lock_guard lock(mutex_);
    const Ptr space = find_locked(pool, id);
    if (!space) return not_joined();
    return space->name;
}

std::optional<SharedSpaces::Joined> SharedSpaces::find(const SpaceName& name, uint32_t peer) const {
    const std::lock_guard lock(mutex_);
    const Ptr space = find_locked(name);
    if (!space || space->peers[peer].state != Peer::State::kProven) return {};
    Joined joined{space->pool.lock(), space->id};
    if (!joined.pool) return {};
    return joined;
}

// The block's tier at the peer, or kMayHave, or kNowhere. Smaller is nearer.
uint8_t SharedSpaces::nearness(const Peer& peer, const BlockKey& key) {
    if (peer.state == Peer::State::kAbsent) return kNowhere;
    if (const auto found = peer.table.find(key); found != peer.table.end()) return uint8_t(found->second);
    return peer.complete && !peer.partial ? kNowhere : kMayHave;
}

std::optional<SharedSpaces::Leg> SharedSpaces::nearest(const SpaceName& name, std::span<const BlockKey> keys,
                                                       std::span<const BlockPtr> present,
                                                       std::span<const Lacked> lacked) const {
    const uint32_t rank = group_.settings().rank, ranks = group_.settings().ranks;
    const std::lock_guard lock(mutex_);
    const Ptr space = find_locked(name);
    if (!space) return {};
    std::vector<uint32_t> left;  // ranks that are nearest for all blocks so far
    for (uint32_t d = 1; d < ranks; ++d) {
        const uint32_t r = (rank + d) % ranks;
        const bool is_asked = lacked[r].empty_answers < kMostEmptyAnswers;
        if (is_asked && space->peers[r].state == Peer::State::kProven) left.push_back(r);
    }
    const std::vector<uint32_t> all = left;
    Leg leg{};
    for (size_t i = 0; i < keys.size() && leg.indices.size() < kMostAsked; ++i) {
        if (present[i]) continue;
        const auto near = [&](uint32_t r) {
            return lacked[r].indices.contains(i) ? kNowhere : nearness(space->peers[r], keys[i]);
        };
        uint8_t best = kNowhere;
        for (const uint32_t r : all) best = std::min(best, near(r));
        std::vector<uint32_t> still;
        for (const uint32_t r : left) {
            if (best != kNowhere && near(r) == best) still.push_back(r);
        }
        if (still.empty()) break;
        left = std::move(still);
        leg.rank = left[0];
        leg.indices.push_back(i);
    }
    if (leg.indices.empty()) return {};
    return leg;
}

// ---------------------------------------------------------------------------------------------------------------- messages

Status SharedSpaces::on_message(const Message& m) {
    const auto type = MessageType(m.header.type);
    if (type == MessageType::kSpaceJoin) return on_join(m);
    if (type == MessageType::kHints) return on_hints(m);
    SpaceName name;
    PayloadReader payload(m.payload);
    if (!payload.get(name) || !payload.at_end()) return no_message(m.header.from);
    const std::lock_guard lock(mutex_);
    if (const Ptr space = find_locked(name)) {
        Peer gone;
        gone.state = Peer::State::kAbsent;
        space->peers[m.header.from] = std::move(gone);
        changed_.notify_all();
    }
    return {};
}

Status SharedSpaces::on_join(const Message& m) {
    const uint32_t from = m.header.from;
    PayloadReader payload(m.payload);
    JoinMessage join{};
    if (!payload.get(join) || !payload.at_end() || join.answers > 1 || join.reserved != 0) return no_message(from);
    {
        const std::lock_guard lock(mutex_);
        if (ended_) return {};
        const Ptr space = find_locked(join.name);
        if (!space) {
            // Tells the sender that this rank has not joined, and nothing else.
            if (!join.answers) group_.send(from, MessageType::kSpaceAbsent, 0, PayloadWriter().put(join.name).bytes());
            return {};
        }
        if (join.proof != space->expected[from]) {
            return fail(TA_E_PEER_LOST, "rank %u names a namespace whose salt it does not know", from).rank(int32_t(from));
        }
        Peer& peer = space->peers[from];
        if (!join.answers || peer.state != Peer::State::kProven) {
            Peer proven;
            proven.state = Peer::State::kProven;
            proven.wants_table = true;
            peer = std::move(proven);
        }
        if (!join.answers) {
            const JoinMessage answer{space->name, space->own[from], 1, 0};
            group_.send(from, MessageType::kSpaceJoin, 0, PayloadWriter().put(answer).bytes());
        }
        changed_.notify_all();
    }
    ring();
    return {};
}

Status SharedSpaces::on_hints(const Message& m) {
    const uint32_t from = m.header.from;
    PayloadReader payload(m.payload);
    HintsHeader h{};
    std::vector<Hint> hints;
    const bool good = payload.get(h) && payload.get_rest(h.hints, hints) && h.first <= 1 && h.last <= 1 &&
                      std::all_of(hints.begin(), hints.end(), [](const Hint& x) { return x.there <= 1 && x.tier < kTiers; });
    if (!good) return no_message(from);
    const std::lock_guard lock(mutex_);
    const Ptr space = find_locked(h.name);
    if (!space || space->peers[from].state != Peer::State::kProven)
        return {};  // sent before the peer left, or before this
                    // rank did
    Peer& peer = space->peers[from];
    if (h.first) {
        peer.table.clear();
        peer.complete = peer.partial = false;
    }
    for (const Hint& hint : hints) {
        if (!hint.there) {
            peer.table.erase(hint.key);
        } else if (peer.table.size() < kMostHints || peer.table.contains(hint.key)) {
            peer.table[hint.key] = TierKind(hint.tier);
        } else {
            peer.partial = true;
        }
    }
    peer.complete = peer.complete || h.last;
    changed_.notify_all();
    return {};
}

void SharedSpaces::on_end(const Status&) {
    {
        const std::lock_guard lock(mutex_);
        ended_ = true;
        changed_.notify_all();
    }
    ring();
}

// --------------------------------------------------------------------------------------------------------- telling the others

Status SharedSpaces::start_teller() {
    const std::lock_guard lock(mutex_);
    if (teller_.joinable()) return {};
    return start_thread(teller_, [this] { run(); });
}

void SharedSpaces::ring() {
    const std::lock_guard lock(bell_mutex_);
    rung_ = true;
    bell_.notify_all();
}

void SharedSpaces::run() {
    bool may_move = false;  // blocks of some namespace may move
    for (;;) {
        {
            std::unique_lock lock(bell_mutex_);
            const auto called = [this] { return rung_ || stopping_; };
            if (may_move) {
                bell_.wait_for(lock, kTick, called);
            } else {
                bell_.wait(lock, called);
            }
            if (stopping_) return;
            rung_ = false;
        }
        try {
            std::vector<Ptr> spaces;
            {
                const std::lock_guard lock(mutex_);
                for (const auto& [name, space] : spaces_) spaces.push_back(space);
                if (ended_) {
                    spaces_.clear(), left_.clear();
                } else {
                    tell_left();
                }
            }
            may_move = false;
            for (const Ptr& space : spaces) {
                if (ended_) {
                    end_space(space);
                } else {
                    may_move = tell(space) || may_move;
                }
            }
        } catch (const std::bad_alloc&) {
            group_.end(fail(TA_E_MEMORY, "rank %u has no memory to tell what it has published", group_.settings().rank)
                           .rank(int32_t(group_.settings().rank)));
        }
    }
}

// Tells the peers what has changed. Returns true if the namespace's blocks may move without an event.
bool SharedSpaces::tell(const Ptr& space) {
    const std::shared_ptr<Pool> pool = space->pool.lock();
    std::vector<uint32_t> fresh, told;
    {
        const std::lock_guard lock(mutex_);
        for (uint32_t r = 0; r < space->peers.size(); ++r) {
            Peer& peer = space->peers[r];
            if (std::exchange(peer.wants_table, false)) {
                fresh.push_back(r);
                peer.told = true;
            } else if (peer.told) {
                told.push_back(r);
            }
        }
    }
    std::vector<PrefixEvent> events, all;
    if (!pool || !pool->prefixes().take(space->id, *space->feed, SIZE_MAX, events, fresh.empty() ? nullptr : &all)) {
        {
            const std::lock_guard lock(mutex_);
            retire(space);
        }
        end_space(space);
        return false;
    }
    // A reset comes first and begins a new table.
    const bool reset = !events.empty() && events[0].kind == PrefixEvent::Kind::kReset;
    if (!events.empty()) send_hints(space, told, std::span(events).subspan(reset), reset);
    if (!fresh.empty()) send_hints(space, fresh, all, true);
    return pool->mover() != nullptr;
}

// Sends hints, but not to peers that have joined anew meanwhile: they would take them for part of the table that they wait for.
void SharedSpaces::send_hints(const Ptr& space, std::span<const uint32_t> to, std::span<const PrefixEvent> events, bool all) {
    if (to.empty()) return;
    for (size_t first = 0; first == 0 || first < events.size(); first += kHintsInMessage) {
        const auto part = events.subspan(first, std::min(kHintsInMessage, events.size() - first));
        std::vector<Hint> hints;
        for (const PrefixEvent& e : part) hints.push_back({e.key, e.kind != PrefixEvent::Kind::kDropped, uint8_t(e.tier), {}});
        const HintsHeader h{space->name, hints.size(), all && first == 0, all && first + part.size() == events.size()};
        const PayloadWriter payload = PayloadWriter().put(h).put_all(std::span<const Hint>(hints));
        for (const uint32_t r : to) {
            const std::lock_guard lock(mutex_);
            if (find_locked(space->name) == space && space->peers[r].told)
                group_.send(r, MessageType::kHints, 0, payload.bytes());
        }
    }
}

void SharedSpaces::end_space(const Ptr& space) {
    space->feed->silence();
    if (const std::shared_ptr<Pool> pool = space->pool.lock()) pool->prefixes().unfollow(space->id, *space->feed);
}

}  // namespace ta::share
