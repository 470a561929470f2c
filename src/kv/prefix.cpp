#include "src/kv/prefix.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "src/core/blake2s.h"

namespace ta {
namespace {

constexpr size_t kTagBytes = 8;  // of a key: the namespace's tag
constexpr size_t kMostNamespaces = 65536;
constexpr size_t kMostUnclaimed = 65536;  // namespaces that files named and nobody has created

// The same for all keys of a namespace; reveals nothing of its salt.
SpaceTag tag_for(const Salt& salt) {
    static constexpr char kLabel[] = "turboattention namespace";
    const Blake2sDigest digest = blake2s(salt.data(), salt.size(), kLabel, sizeof kLabel);
    uint64_t tag;
    std::memcpy(&tag, digest.data(), kTagBytes);
    return tag;
}

BlockKey hash_key(const Salt& salt, uint64_t tag, const uint8_t* key, uint64_t index) {
    uint8_t bytes[kPrefixKeyBytes + sizeof index];
    std::memcpy(bytes, key, kPrefixKeyBytes);
    std::memcpy(bytes + kPrefixKeyBytes, &index, sizeof index);
    BlockKey hashed = blake2s(salt.data(), salt.size(), bytes, sizeof bytes);
    std::memcpy(hashed.data(), &tag, kTagBytes);
    return hashed;
}

// Recognises the last entry of a block among all of its entries.
class LastEntries {
  public:
    bool is_last(const Block& block) { return block.entries() == 1 || ++seen_[&block] == block.entries(); }

  private:
    std::unordered_map<const Block*, uint32_t> seen_;
};

}  // namespace

SpaceTag PrefixStore::tag_in(const BlockKey& key) {
    SpaceTag tag;
    std::memcpy(&tag, key.data(), kTagBytes);
    return tag;
}

size_t PrefixStore::HashKey::operator()(const BlockKey& key) const {
    size_t hash;
    std::memcpy(&hash, key.data() + kTagBytes, sizeof hash);
    return hash;
}

Result<PrefixStore::Space*> PrefixStore::find(Tenant id) const {
    if (closed_) return fail(TA_E_CLOSED, "the pool is closed");
    const auto found = by_id_.find(id);
    if (found != by_id_.end() && found->second->claimed) return found->second;
    return fail(TA_E_STALE, "0x%llx is no living namespace of this pool", (unsigned long long)id);
}

Status PrefixStore::check(Tenant id) const {
    std::lock_guard lock(mutex_);
    return find(id).status();
}

Result<Tenant> PrefixStore::create(const Salt& salt, uint64_t quota) {
    Entries dropped;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    if (closed_) return fail(TA_E_CLOSED, "the pool is closed");
    if (claimed_ >= kMostNamespaces) return fail(TA_E_LIMIT, "the pool has its maximum of %zu namespaces", kMostNamespaces);
    const SpaceTag tag = tag_for(salt);
    const auto present = spaces_.find(tag);
    if (present != spaces_.end() && present->second->claimed)
        return fail(TA_E_INVALID, "the pool has a namespace with this salt already");
    Space* const space = &space_of(tag);
    const Tenant id = space->id;
    space->claimed = true;
    ++claimed_;
    space->salt = salt;
    space->quota = quota;
    if (space->bytes > quota) shrink(*space, space->bytes - quota, UINT64_MAX, dropped);
    return id;
}

// Finds or makes the space of this tag. Under the lock.
PrefixStore::Space& PrefixStore::space_of(SpaceTag tag) {
    if (const auto present = spaces_.find(tag); present != spaces_.end()) return *present->second;
    auto fresh = std::make_unique<Space>();
    Space* const space = fresh.get();
    space->id = last_id_ + 1;
    space->tag = tag;
    by_id_.emplace(space->id, space);
    try {
        spaces_.emplace(tag, std::move(fresh));
    } catch (...) {
        by_id_.erase(last_id_ + 1);
        throw;
    }
    ++last_id_;
    return *space;
}

SpaceTag PrefixStore::tag_of(Tenant id) const {
    if (id == 0) return 0;
    std::lock_guard lock(mutex_);
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? kEndedSpace : found->second->tag;
}

// Names a namespace for a load. Named::~Named() undoes that.
Tenant PrefixStore::name(SpaceTag tag) {
    std::lock_guard lock(mutex_);
    // Hostile files must not name namespaces without limit.
    if (closed_ || (is_full_locked() && spaces_.count(tag) == 0)) return kUnknownTenant;
    Space& space = space_of(tag);
    ++space.loads;
    return space.id;
}

Tenant PrefixStore::Named::tenant_of(SpaceTag tag) {
    if (tag == 0) return 0;
    if (tag == kEndedSpace) return kUnknownTenant;
    const auto [at, fresh] = tenants_.emplace(tag, kUnknownTenant);
    if (fresh) at->second = store_.name(tag);
    if (at->second == kUnknownTenant) complete_ = false;
    return at->second;
}

Status PrefixStore::Named::complete() const {
    if (complete_) return {};
    return fail(TA_E_LIMIT, "files have named the maximum of %zu namespaces that this pool has not created", kMostUnclaimed);
}

bool PrefixStore::is_full() const {
    std::lock_guard lock(mutex_);
    return is_full_locked();
}

bool PrefixStore::is_full_locked() const {
    return spaces_.size() - claimed_ >= kMostUnclaimed;
}

void PrefixStore::end_forgotten(const std::unordered_set<Tenant>& in_use) {
    std::lock_guard lock(mutex_);
    std::erase_if(spaces_, [&](const auto& s) {
        const Space& space = *s.second;
        if (space.claimed || space.loads > 0 || !space.entries.empty() || in_use.contains(space.id)) return false;
        by_id_.erase(space.id);
        return true;
    });
}

PrefixStore::Named::~Named() {
    std::lock_guard lock(store_.mutex_);
    for (const auto& [tag, id] : tenants_) {
        const auto found = store_.by_id_.find(id);
        if (found == store_.by_id_.end()) continue;  // it ended meanwhile, or it was one too many
        Space& space = *found->second;
        --space.loads;
        space.kept = space.kept || keep_;
        if (space.kept || space.claimed || space.loads > 0 || !space.entries.empty()) continue;
        store_.by_id_.erase(found);
        store_.spaces_.erase(tag);
    }
}

Status PrefixStore::destroy(Tenant id) {
    std::unique_ptr<Space> ended;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    Result<Space*> found = find(id);
    if (!found.ok()) return std::move(found).status();
    const auto space = spaces_.find(tag_for(found.value()->salt));
    for (Entry& e : space->second->entries) {
        forget(e);
        if (!e.block->published()) blocks_.drop_record(*e.block);
    }
    end_feeds(*space->second);
    ended = std::move(space->second);
    spaces_.erase(space);
    by_id_.erase(id);
    --claimed_;
    return {};
}

void PrefixStore::close() {
    std::unordered_map<SpaceTag, std::unique_ptr<Space>> ended;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    closed_ = true;
    end_all_feeds();
    by_id_.clear();
    claimed_ = 0;
    ended.swap(spaces_);
}

// --------------------------------------------------------------------------------------------------------- publish and match

Status PrefixStore::hash_keys_into(Tenant id, std::span<const uint8_t> keys, uint64_t first, uint8_t* hashed) const {
    Salt salt;
    {
        std::lock_guard lock(mutex_);
        Result<Space*> space = find(id);
        if (!space.ok()) return std::move(space).status();
        salt = space.value()->salt;
    }
    const SpaceTag tag = tag_for(salt);
    for (size_t i = 0; i < keys.size() / kPrefixKeyBytes; ++i) {
        const BlockKey key = hash_key(salt, tag, keys.data() + i * kPrefixKeyBytes, first + i);
        hashed = std::copy(key.begin(), key.end(), hashed);
    }
    return {};
}

Result<std::vector<BlockKey>> PrefixStore::hash_keys(Tenant id, std::span<const uint8_t> keys, uint64_t first) const {
    std::vector<BlockKey> hashed(keys.size() / kPrefixKeyBytes);
    TA_RETURN_IF_ERROR(hash_keys_into(id, keys, first, reinterpret_cast<uint8_t*>(hashed.data())));
    return hashed;
}

Result<BlockKey> PrefixStore::sign(Tenant id, std::span<const uint8_t> bytes) const {
    std::lock_guard lock(mutex_);
    Result<Space*> space = find(id);
    if (!space.ok()) return std::move(space).status();
    const Salt& salt = space.value()->salt;
    return BlockKey(blake2s(salt.data(), salt.size(), bytes.data(), bytes.size()));
}

// Marks an entry as used. Called for a prefix from its end to its beginning, so that the beginning comes last in the order and
// is dropped last: the rest cannot be found without it.
void PrefixStore::touch(Space& space, Entries::iterator entry) {
    entry->stamp = stamp_;
    space.entries.splice(space.entries.end(), space.entries, entry);
}

// Undoes what an entry means to its block.
void PrefixStore::forget(Entry& e) {
    e.block->remove_entry();
    if (persistent_) blocks_.remove_key(*e.block, e.key);
}

void PrefixStore::erase(Space& space, Entries::iterator entry, Entries& dropped) {
    tell(space, PrefixEvent::Kind::kDropped, *entry);
    forget(*entry);
    space.bytes -= bytes_of(*entry);
    space.table.erase(entry->key);
    if (entry->block->entries() > 0)
        entry->block.reset();  // other entries of the block must not count this owner in
                               // is_unused()
    dropped.splice(dropped.end(), space.entries, entry);
}

// Drops unused entries until so many bytes are free, but none with the stamp `except`.
void PrefixStore::shrink(Space& space, uint64_t bytes, uint64_t except, Entries& dropped) {
    uint64_t freed = 0;
    for_each_level(blocks_.given_priorities(), [&](const RetentionLevel& level) {
        for (auto e = space.entries.begin(); e != space.entries.end() && freed < bytes;) {
            const auto next = std::next(e);
            if (is_unused(*e) && e->stamp != except && level.has(e->block->retention())) {
                freed += bytes_of(*e);
                erase(space, e, dropped);
                ++space.evicted;
            }
            e = next;
        }
        return freed >= bytes;
    });
}

Status PrefixStore::check_owner(Tenant id, std::span<const BlockPtr> sequence) {
    for (size_t b = 0; b < sequence.size(); ++b) {
        const Tenant of = sequence[b]->tenant();
        if (of == 0 || of == id) continue;
        return fail(TA_E_INVALID, "the sequence has blocks of another namespace").argument(2).block(int64_t(b));
    }
    return {};
}

// Checks the quota for `more` bytes in place of `less`. Unused entries outside `chain` may make room.
Status PrefixStore::check_quota(const Space& space, std::span<const Entries::iterator> chain, uint64_t more,
                                uint64_t less) const {
    if (more <= less || space.bytes - less + more <= space.quota) return {};
    const uint64_t wanted = space.bytes - less + more - space.quota;
    uint64_t unused = 0;
    for (const Entry& e : space.entries) {
        // Evaluated once for each entry: owners release blocks without this lock.
        const bool asked = e.index < chain.size() && &*chain[size_t(e.index)] == &e;
        if (!asked && is_unused(e) && !e.block->stuck()) unused += bytes_of(e);
    }
    if (wanted <= unused) return {};
    return fail(TA_E_LIMIT, "namespace 0x%llx has a quota of %llu bytes; it holds %llu in use, and this needs %llu more",
                (unsigned long long)space.id, (unsigned long long)space.quota, (unsigned long long)(space.bytes - unused),
                (unsigned long long)more)
        .bytes(wanted - unused);
}

Status PrefixStore::publish(Tenant id, std::span<const BlockKey> keys, std::span<const BlockPtr> sequence) {
    const auto blocks = sequence.first(keys.size());
    // Takes all memory before the lock's part, which then cannot fail half way.
    Entries fresh, dropped;
    Table fresh_table;
    std::vector<Entries::iterator> chain;
    std::vector<Block*> kept;  // blocks whose kind this call has made final
    std::vector<std::pair<BlockPtr, BlockPtr>> replaced;
    replaced.reserve(persistent_ ? blocks.size() : 0);
    chain.reserve(blocks.size());
    kept.reserve(blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
        const BlockKey& key = keys[i];
        fresh.push_back({key, i, blocks[i], 0});
        fresh_table.emplace(key, std::prev(fresh.end()));
        chain.push_back(std::prev(fresh.end()));
    }
    std::lock_guard lock(mutex_);
    Result<Space*> found = find(id);
    if (!found.ok()) return std::move(found).status();
    Space& space = *found.value();
    TA_RETURN_IF_ERROR(check_owner(id, sequence));  // another thread may have published them in another namespace
    space.table.reserve(space.table.size() + blocks.size());
    // An existing entry wins, unless its block is damaged or unreadable, or windows have passed its block and not the new one.
    const auto is_new = [&](const Entry& e) {
        const auto present = space.table.find(e.key);
        if (present == space.table.end()) return true;
        const Block& there = *present->second->block;
        return &there != e.block.get() && (there.is_bad() || (is_passed(there.kind()) && !is_passed(e.block->kind())));
    };
    for (const Entry& e : fresh) {
        if (persistent_ && is_new(e)) blocks_.reserve_keys(*e.block, 1);
    }
    uint64_t more = 0, less = 0;  // bytes
    // A published block keeps its kind: the quota counts these bytes, and a match gets the block as it is.
    const auto add = [&](const Entry& e) {
        if (blocks_.keep_kind(*e.block)) kept.push_back(e.block.get());
        more += bytes_of(e);
    };
    for (auto& e : chain) {
        const auto present = space.table.find(e->key);
        if (is_new(*e)) {
            add(*e);
            if (present != space.table.end()) less += bytes_of(*present->second);
        } else {
            const auto unneeded = e;
            e = present->second;
            fresh_table.erase(unneeded->key);
            dropped.splice(dropped.end(), fresh, unneeded);
        }
    }
    if (Status within = check_quota(space, chain, more, less); !within.ok()) {
        for (Block* block : kept) blocks_.free_kind(*block);
        return within;
    }
    for (auto& e : chain) {
        const auto present = space.table.find(e->key);
        if (present == space.table.end() || present->second == e) continue;
        if (persistent_) replaced.emplace_back(present->second->block, e->block);
        erase(space, present->second, dropped);
    }
    space.bytes += more;
    space.published += fresh.size();
    for (Entry& e : fresh) {
        if (persistent_) blocks_.add_key(*e.block, e.key);
        e.block->add_entry();
        tell(space, PrefixEvent::Kind::kPublished, e);
    }
    for (const auto& [block, by] : replaced) blocks_.replace(*block, by);
    replaced.clear();  // shrink() counts owners; the replaced entries still own their blocks
    space.entries.splice(space.entries.end(), fresh);
    space.table.merge(fresh_table);
    ++stamp_;
    for (size_t i = chain.size(); i-- > 0;) touch(space, chain[i]);
    if (space.bytes > space.quota) shrink(space, space.bytes - space.quota, stamp_, dropped);
    for (const BlockPtr& block : sequence) block->set_tenant(id);
    return {};
}

Status PrefixStore::check_quota(Tenant id, uint64_t bytes) const {
    std::lock_guard lock(mutex_);
    Result<Space*> space = find(id);
    return space.ok() ? check_quota(*space.value(), {}, bytes, 0) : std::move(space).status();
}

template <class Found>
Status PrefixStore::visit(Tenant id, std::span<const BlockKey> keys, std::span<const uint64_t> indices, Found&& found) const {
    std::lock_guard lock(mutex_);
    Result<Space*> space = find(id);
    if (!space.ok()) return std::move(space).status();
    const Table& table = space.value()->table;
    for (size_t i = 0; i < keys.size(); ++i) {
        const auto entry = table.find(keys[i]);
        if (entry != table.end() && entry->second->index == indices[i] && !entry->second->block->is_bad())
            found(i, entry->second->block);
    }
    return {};
}

Result<std::vector<BlockPtr>> PrefixStore::find_blocks(Tenant id, std::span<const BlockKey> keys,
                                                       std::span<const uint64_t> indices) const {
    std::vector<BlockPtr> blocks(keys.size());
    TA_RETURN_IF_ERROR(visit(id, keys, indices, [&](size_t i, const BlockPtr& block) { blocks[i] = block; }));
    return blocks;
}

Result<std::vector<std::optional<TierKind>>> PrefixStore::find_tiers(Tenant id, std::span<const BlockKey> keys,
                                                                     std::span<const uint64_t> indices) const {
    std::vector<std::optional<TierKind>> tiers(keys.size());
    TA_RETURN_IF_ERROR(visit(id, keys, indices, [&](size_t i, const BlockPtr& block) { tiers[i] = block->tier(); }));
    return tiers;
}

size_t PrefixStore::count_usable(std::span<const BlockPtr> blocks) const {
    size_t n = blocks.size();
    for (size_t b = n; geometry_.has_windows() && b > size_t(geometry_.first_needed(int64_t(n) * kPageTokens));) {
        if (is_passed(blocks[--b]->kind())) n = b;
    }
    return n;
}

Result<PrefixStore::Match> PrefixStore::match(Tenant id, std::span<const uint8_t> keys) {
    size_t most = 0;  // no more than the namespace has entries
    {
        std::lock_guard lock(mutex_);
        Result<Space*> space = find(id);
        if (!space.ok()) return std::move(space).status();
        most = space.value()->table.size();
    }
    Result<std::vector<BlockKey>> hashed =
        hash_keys(id, keys.first(std::min(most, keys.size() / kPrefixKeyBytes) * kPrefixKeyBytes));
    if (!hashed.ok()) return std::move(hashed).status();
    Match m;
    m.keys = hashed.take();
    m.asked = keys.size() / kPrefixKeyBytes;
    m.blocks.reserve(m.keys.size());
    Entries dropped;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    Result<Space*> found = find(id);
    if (!found.ok()) return std::move(found).status();
    Space& space = *found.value();
    for (size_t i = 0; i < m.keys.size(); ++i) {
        const auto entry = space.table.find(m.keys[i]);
        if (entry == space.table.end() || entry->second->index != i) break;
        if (const Block& block = *entry->second->block; block.is_bad()) {
            if (block.stuck()) erase(space, entry->second, dropped);
            break;
        }
        m.blocks.push_back(entry->second->block);
    }
    m.blocks.resize(count_usable(m.blocks));
    m.matched = m.blocks.size();
    return m;
}

void PrefixStore::count_match(Tenant id, const Match& m) {
    std::lock_guard lock(mutex_);
    const auto found = by_id_.find(id);
    if (found == by_id_.end()) return;  // it ended meanwhile
    Space& space = *found->second;
    ++stamp_;
    for (size_t i = m.matched; i-- > 0;) {
        if (const auto entry = space.table.find(m.keys[i]); entry != space.table.end()) touch(space, entry->second);
    }
    space.hits += m.matched;
    space.misses += m.asked - m.matched;
}

// ---------------------------------------------------------------------------------------------------------------------- feeds

void PrefixStore::tell(Space& space, PrefixEvent::Kind kind, Entry& e) noexcept {
    if (kind == PrefixEvent::Kind::kPublished) e.told = e.block->tier();
    for (const auto& feed : space.feeds) feed->add(event(kind, e));
}

// Nobody knows the entries of a moved block, so this looks at all entries if any block has moved.
void PrefixStore::tell_moves(Space& space) noexcept {
    const uint64_t moves = blocks_.moves();
    if (std::exchange(space.moves_told, moves) == moves) return;
    for (Entry& e : space.entries) {
        const TierKind tier = e.block->tier();
        if (std::exchange(e.told, tier) != tier) tell(space, PrefixEvent::Kind::kMoved, e);
    }
}

void PrefixStore::end_feeds(Space& space) noexcept {
    for (const auto& feed : space.feeds) {
        feed->ended_ = true;
        feed->ring();
    }
}

Status PrefixStore::follow(Tenant id, std::shared_ptr<PrefixFeed> feed) {
    std::lock_guard lock(mutex_);
    Result<Space*> space = find(id);
    if (!space.ok()) return std::move(space).status();
    space.value()->feeds.push_back(std::move(feed));
    return {};
}

void PrefixStore::unfollow(Tenant id, const PrefixFeed& feed) {
    std::lock_guard lock(mutex_);
    if (const auto found = by_id_.find(id); found != by_id_.end())
        std::erase_if(found->second->feeds, [&feed](const auto& f) { return f.get() == &feed; });
}

bool PrefixStore::take(Tenant id, PrefixFeed& feed, size_t most, std::vector<PrefixEvent>& events,
                       std::vector<PrefixEvent>* all) {
    std::lock_guard lock(mutex_);
    const auto found = by_id_.find(id);
    if (feed.ended_ || found == by_id_.end()) return false;
    Space& space = *found->second;
    tell_moves(space);
    if (feed.reset_) {
        std::vector<PrefixEvent> again;
        again.reserve(space.entries.size() + 1);
        again.push_back({{}, ++feed.numbers_});
        for (const Entry& e : space.entries) {
            again.push_back(event(PrefixEvent::Kind::kPublished, e));
            again.back().number = ++feed.numbers_;
        }
        feed.told_again_ = std::move(again);
        feed.told_ = 0;
        feed.queue_.clear();
        feed.reset_ = false;
    }
    if (all) {
        all->reserve(space.entries.size());
        for (const Entry& e : space.entries) all->push_back(event(PrefixEvent::Kind::kPublished, e));
    }
    const size_t first = std::min(most, feed.told_again_.size() - feed.told_),
                 second = std::min(most - first, feed.queue_.size());
    events.reserve(events.size() + first + second);
    const auto again = feed.told_again_.begin() + ptrdiff_t(feed.told_);
    events.insert(events.end(), again, again + ptrdiff_t(first));
    events.insert(events.end(), feed.queue_.begin(), feed.queue_.begin() + ptrdiff_t(second));
    feed.told_ += first;
    if (feed.told_ == feed.told_again_.size()) {
        feed.told_again_ = {};
        feed.told_ = 0;
    }
    feed.queue_.erase(feed.queue_.begin(), feed.queue_.begin() + ptrdiff_t(second));
    return true;
}

Result<std::vector<PrefixEvent>> PrefixStore::take_events(Tenant id, size_t most) {
    std::shared_ptr<PrefixFeed> feed;
    {
        std::lock_guard lock(mutex_);
        Result<Space*> space = find(id);
        if (!space.ok()) return std::move(space).status();
        feed = space.value()->callers_feed;
        if (!feed) {
            feed = std::make_shared<PrefixFeed>(nullptr);
            space.value()->feeds.push_back(feed);
            space.value()->callers_feed = feed;
        }
    }
    std::vector<PrefixEvent> events;
    if (!take(id, *feed, most, events)) return check(id);
    return events;
}

// ---------------------------------------------------------------------------------------------------------------------- room

std::vector<MoveItem> PrefixStore::unused(TierKind tier, uint64_t bytes) const {
    struct Candidate {
        Order order;
        MoveItem item;
    };
    std::vector<Candidate> candidates;
    std::vector<MoveItem> items;
    const DropOrder order(blocks_);
    {
        std::lock_guard lock(mutex_);
        LastEntries entries;
        for (const auto& [tag, space] : spaces_) {
            uint64_t found = 0;
            for (const Entry& e : space->entries) {
                if (found >= bytes && order.alike) break;
                const Block& b = *e.block;
                if (b.tier() != tier || !is_unused(e) || b.moving() || b.stuck() || b.pins() > 0) continue;
                if (!entries.is_last(b)) continue;
                candidates.push_back({order.of(e), {e.block, e.index}});
                found += bytes_of(e);
            }
        }
    }
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.order < b.order; });
    uint64_t found = 0;
    for (Candidate& c : candidates) {
        if (found >= bytes) break;
        found += geometry_.slot_bytes(c.item.block->kind());
        items.push_back(std::move(c.item));
    }
    return items;
}

std::array<SlotCounts, kTiers> PrefixStore::unused_slots() const {
    std::array<SlotCounts, kTiers> slots{};
    std::lock_guard lock(mutex_);
    LastEntries entries;
    for (const auto& [tag, space] : spaces_) {
        for (const Entry& e : space->entries) {
            const bool unused = is_unused(e) && e.block->pins() == 0;
            const std::optional<PageKind> record = persistent_ ? blocks_.droppable_record(*e.block) : std::nullopt;
            if ((!unused && !record) || !entries.is_last(*e.block)) continue;
            const auto kind = size_t(e.block->kind());
            if (unused) ++slots[size_t(e.block->tier())][kind];
            if (record && e.block->tier() != TierKind::kDisk) ++slots[size_t(TierKind::kDisk)][size_t(*record)];
        }
    }
    return slots;
}

uint64_t PrefixStore::drop_unused(TierKind tier, uint64_t bytes, bool all) {
    Entries dropped;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    struct Candidate {
        Order order;
        Space* space;
        Entries::iterator entry;
        uint64_t bytes;
    };
    std::vector<Candidate> candidates;
    LastEntries entries;
    uint64_t found_all = 0;
    const DropOrder order(blocks_);
    for (const auto& [tag, space] : spaces_) {
        uint64_t found = 0;
        for (auto e = space->entries.begin(); e != space->entries.end() && (found < bytes || !order.alike); ++e) {
            const bool here = e->block->tier() == tier && is_unused(*e) && e->block->pins() == 0;
            std::optional<PageKind> record;
            if (tier == TierKind::kDisk && persistent_ && e->block->tier() != tier)
                record = blocks_.droppable_record(*e->block);
            if (!here && !record) continue;
            // Dropping frees room only with the last entry of a block, or of a record.
            const bool last = entries.is_last(*e->block);
            const uint64_t size = here ? bytes_of(*e) : geometry_.slot_bytes(*record);
            if (here || last) candidates.push_back({order.of(*e), space.get(), e, size});
            if (last) found += size;
        }
        found_all += found;
    }
    if (all && found_all < bytes) return 0;
    std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) { return a.order < b.order; });
    uint64_t freed = 0;
    for (const Candidate& c : candidates) {
        if (freed >= bytes) break;
        const uint64_t size = c.bytes;
        if (c.entry->block->tier() == tier) {
            const bool last = c.entry->block->entries() == 1;
            erase(*c.space, c.entry, dropped);
            ++c.space->evicted;
            if (!last) continue;
        } else if (!blocks_.drop_record(*c.entry->block)) {
            continue;
        }
        freed += size;
    }
    return freed;
}

// ----------------------------------------------------------------------------------------------------------- files, statistics

void PrefixStore::recover(std::vector<Record>&& records) {
    // Sorts the end of a prefix to the front, as touch() would.
    std::stable_sort(records.begin(), records.end(), [](const Record& a, const Record& b) { return a.index > b.index; });
    Entries fresh, dropped;  // freed after the lock is released
    Table nodes;
    for (Record& r : records) {
        fresh.push_back({r.key, r.index, std::move(r.block), 0});
        if (!nodes.emplace(r.key, std::prev(fresh.end())).second) fresh.pop_back();
    }
    std::unordered_map<SpaceTag, size_t> sizes;
    Named spaces(*this);
    std::unordered_map<Block*, size_t> keys;
    for (const Entry& e : fresh) {
        if (sizes[tag_in(e.key)]++ == 0) spaces.tenant_of(tag_in(e.key));
        if (persistent_) ++keys[e.block.get()];
    }
    std::lock_guard lock(mutex_);
    if (closed_) return;
    // Steps that can fail come first.
    for (const auto& [tag, n] : sizes) {
        if (const auto space = spaces_.find(tag); space != spaces_.end())
            space->second->table.reserve(space->second->table.size() + n);
    }
    for (const auto& [block, n] : keys) blocks_.reserve_keys(*block, n);
    spaces.keep();
    while (!fresh.empty()) {
        Entry& e = fresh.front();
        const auto found = spaces_.find(tag_in(e.key));
        if (found == spaces_.end()) {
            // Nobody could ever make room of its record on disk, so the key goes.
            if (persistent_) blocks_.remove_key(*e.block, e.key);
            dropped.splice(dropped.end(), fresh, fresh.begin());
            continue;
        }
        Space& space = *found->second;
        if (!space.table.insert(nodes.extract(e.key)).inserted) {
            dropped.splice(dropped.end(), fresh, fresh.begin());
            continue;
        }
        blocks_.keep_kind(*e.block);
        if (persistent_) blocks_.add_key(*e.block, e.key);
        e.block->set_tenant(space.id);
        e.stamp = stamp_;
        e.block->add_entry();
        tell(space, PrefixEvent::Kind::kPublished, e);
        space.bytes += bytes_of(e);
        space.entries.splice(space.entries.end(), fresh, fresh.begin());
        if (space.bytes > space.quota) shrink(space, space.bytes - space.quota, UINT64_MAX, dropped);
    }
}

std::vector<PrefixStore::Record> PrefixStore::records(Tenant id) const {
    std::vector<Record> all;
    std::lock_guard lock(mutex_);
    for (const auto& [tag, space] : spaces_) {
        if (id != 0 && space->id != id) continue;
        for (const Entry& e : space->entries) all.push_back({e.key, e.index, e.block});
    }
    return all;
}

void PrefixStore::drop_damaged(Tenant id, const BlockKey& key) {
    Entries dropped;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    const auto space = by_id_.find(id);
    if (space == by_id_.end()) return;  // it has ended
    const auto entry = space->second->table.find(key);
    if (entry != space->second->table.end() && entry->second->block->stuck()) erase(*space->second, entry->second, dropped);
}

std::vector<PrefixStore::EntryKey> PrefixStore::entry_keys(Tenant id) const {
    std::vector<EntryKey> all;
    {
        std::lock_guard lock(mutex_);
        const auto space = by_id_.find(id);
        if (space == by_id_.end()) return all;  // it has ended
        all.reserve(space->second->entries.size());
        for (const Entry& e : space->second->entries) all.push_back({e.key, e.index});
    }
    std::stable_sort(all.begin(), all.end(), [](const EntryKey& a, const EntryKey& b) { return a.index < b.index; });
    return all;
}

NamespaceStats PrefixStore::describe(const Space& space) const {
    NamespaceStats s;
    s.id = space.id;
    s.entries = space.entries.size();
    s.bytes = space.bytes;
    s.quota = space.quota == UINT64_MAX ? 0 : space.quota;
    for (const Entry& e : space.entries) s.bytes_shared += is_unused(e) ? 0 : bytes_of(e);
    s.hits = space.hits;
    s.misses = space.misses;
    s.published = space.published;
    s.evicted = space.evicted;
    return s;
}

Result<NamespaceStats> PrefixStore::stats(Tenant id) const {
    std::lock_guard lock(mutex_);
    Result<Space*> space = find(id);
    if (!space.ok()) return std::move(space).status();
    return describe(*space.value());
}

std::vector<NamespaceStats> PrefixStore::all_stats() const {
    std::vector<NamespaceStats> all;
    std::lock_guard lock(mutex_);
    for (const auto& [id, space] : by_id_) {
        if (space->claimed) all.push_back(describe(*space));
    }
    std::sort(all.begin(), all.end(), [](const NamespaceStats& a, const NamespaceStats& b) { return a.id < b.id; });
    return all;
}

}  // namespace ta
