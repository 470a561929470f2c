// Fetches: blocks of published prefixes that come from several ranks, one after the other.
#include <algorithm>
#include <utility>

#include "src/kv/share/transfer.h"

namespace ta::share {
namespace {

constexpr size_t kMostServed = 1024;  // fetches of other ranks at once

}  // namespace

// --------------------------------------------------------------------------------------------------------- at the destination

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
    fetch->lacked.resize(group_.settings().ranks);
    auto in = std::make_unique<Incoming>(*pool, &coming_);
    in->fetch = std::move(fetch);

    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(ended_.clone());
    const Ptr t = add(std::move(pool), false, group_.settings().rank, 0);
    t->progress.blocks = keys.size() / kPrefixKeyBytes;
    t->in = std::move(in);
    t->phase = Phase::kMoving;
    try {
        post(*t, {guarded(t, &Transfers::next_leg)});
    } catch (...) {
        forget(t);
        throw;
    }
    group_.wake();
    return t->ticket;
}

// Handles the answer to a fetch. An empty one: the rank lacks the first wanted block.
Status Transfers::on_fetched_offer(const Message& m) {
    const Ptr t = find(m.header.channel, m.header.from, false);
    if (!t || t->phase != Phase::kWaiting) return {};
    const bool nothing = m.payload.empty();
    Lane::Tasks next{guarded(t, nothing ? &Transfers::next_leg : &Transfers::prepare_leg)};
    t->in->offer_bytes = m.payload;
    t->phase = Phase::kMoving;
    if (nothing) {
        SharedSpaces::Lacked& lacked = t->in->fetch->lacked[m.header.from];
        lacked.indices.insert(t->in->fetch->wanted[0]);
        ++lacked.empty_answers;
        t->channel = 0;
    }
    t->progress.state = TA_MOVE_RUNNING;
    touch(*t);
    post(*t, std::move(next));
    return {};
}

// Asks the next rank of a fetch for blocks, or ends the fetch.
Status Transfers::next_leg(Transfer& t) {
    Pool& pool = *t.pool;
    Fetch& f = *t.in->fetch;
    TA_RETURN_IF_ERROR(pool.check_open());
    Result<std::vector<BlockPtr>> found = pool.prefixes().find_blocks(f.space, f.keys, f.indices);
    if (!found.ok()) return std::move(found).status().rank(int32_t(group_.settings().rank));
    f.chain = found.take();
    // Blocks that windows have passed here, but that a sequence with all keys needs whole, count as missing. Until whole ones
    // come they serve a shorter sequence.
    const auto there = size_t(std::find(f.chain.begin(), f.chain.end(), nullptr) - f.chain.begin());
    const size_t usable = pool.prefixes().count_usable(std::span(f.chain).first(there));
    const Geometry& g = pool.geometry();
    for (auto i = size_t(g.first_needed(int64_t(f.chain.size()) * kPageTokens)); g.has_windows() && i < f.chain.size(); ++i) {
        if (f.chain[i] && is_passed(f.chain[i]->kind())) f.chain[i] = nullptr;
    }
    const auto missing = size_t(std::find(f.chain.begin(), f.chain.end(), nullptr) - f.chain.begin());
    // If blocks leave as fast as they come, the fetch ends.
    const bool stuck = std::exchange(f.landed, false) && missing <= f.first_missing;
    f.first_missing = missing;
    std::optional<SharedSpaces::Leg> leg;
    if (!stuck && missing < f.keys.size()) leg = spaces_->nearest(f.name, f.keys, f.chain, f.lacked);
    PayloadWriter payload;
    if (leg) {
        f.wanted = std::move(leg->indices);
        payload.put(FetchHeader{f.name, f.wanted.size()});
        for (const uint64_t i : f.wanted) payload.put(WantedBlock{f.keys[size_t(i)], i});
    }
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    t.progress.length = int64_t(usable) * kPageTokens;
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
    // The offer has the first ones of the blocks that were asked for.
    const std::vector<uint64_t>& wanted = in.fetch->wanted;
    const bool good = !in.list.empty() && in.list.size() <= wanted.size() &&
                      std::equal(in.list.begin(), in.list.end(), wanted.begin(), [](const StoredBlock& b, uint64_t index) {
                          return b.index == index && b.tokens == uint32_t(kPageTokens);
                      });
    if (!good) return no_offer(t);
    if (in.list.size() < wanted.size()) in.fetch->lacked[t.progress.peer].indices.insert(wanted[in.list.size()]);
    in.tenant = in.fetch->space;
    // Makes the fetch an owner of the blocks that are here already: others may move them, and nobody drops them.
    for (size_t i = 0; i < in.fetch->chain.size(); ++i) {
        if (in.fetch->chain[i]) in.others_see.add({in.fetch->chain[i], i});
    }
    uint64_t bytes = 0;
    for (const StoredBlock& b : in.list) bytes += pool.geometry().slot_bytes(PageKind(b.kind));
    if (Status s = pool.prefixes().check_quota(in.fetch->space, bytes); !s.ok())
        return std::move(s).rank(int32_t(group_.settings().rank));
    return begin_moving(t);
}

// Publishes the blocks of a leg that have come, then asks the next rank.
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
    auto leg = std::make_unique<Incoming>(*t.pool, &coming_);  // the state of the next leg; after the swap that of the last
                                                               // one, destroyed after the lock
    Status s = t.pool->publish_blocks(f.space, std::span(f.keys).first(n), std::span(f.chain).first(n), &coming_);
    if (!s.ok()) return std::move(s).rank(int32_t(group_.settings().rank));
    f.landed = true;
    const std::lock_guard lock(mutex_);
    t.progress.length = int64_t(t.pool->prefixes().count_usable(std::span(f.chain).first(n))) * kPageTokens;
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
        post(t, std::move(next));
        group_.wake();
    }
    return {};
}

// -------------------------------------------------------------------------------------------------------------- at the source

Status Transfers::on_fetch(const Message& m) {
    const uint32_t from = m.header.from;
    PayloadReader payload(m.payload);
    FetchHeader h{};
    std::vector<WantedBlock> wanted;
    bool good =
        begins(from, m.header.channel) && payload.get(h) && h.blocks <= kMostAsked && payload.get_rest(h.blocks, wanted);
    for (size_t i = 1; i < wanted.size(); ++i) good = good && wanted[i - 1].index < wanted[i].index;
    if (!good) return fail(TA_E_PEER_LOST, "rank %u wants to fetch what cannot be", from).rank(int32_t(from));
    std::optional<SharedSpaces::Joined> joined;
    if (spaces_ && served_ < kMostServed) joined = spaces_->find(h.space, from);
    // The peer may have left the namespace, the pool may be gone, or this rank serves too many fetches: the fetch goes on
    // elsewhere.
    if (!joined) {
        tell(from, MessageType::kOffer, m.header.channel);
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
    post(*t, {guarded(t, &Transfers::offer_published)});
    return {};
}

// Offers the first of the wanted blocks that are published here.
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
    if (found.ok()) out.snapshot.blocks = found.take();  // else the namespace has ended
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
    OfferHeader offer = offer_of(pool);
    offer.blocks = blocks.size();
    const PayloadWriter payload = PayloadWriter().put(offer).put_all(std::span<const StoredBlock>(out.list));
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    touch(t);
    if (blocks.empty()) {
        tell(t.progress.peer, MessageType::kOffer, t.channel);
        conclude(t, {});
    } else {
        out.offered = true;
        group_.send(t.progress.peer, MessageType::kOffer, t.channel, payload.bytes());
    }
    return {};
}

}  // namespace ta::share
