// Published prefixes: full blocks that new sequences find by the caller's keys, apart for each namespace. A key stands for all
// tokens up to the end of its block. The tables hold shares of the blocks, and hashes of the keys under the namespace's salt;
// nobody can compute these without the salt.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "src/kv/prefix_feed.h"
#include "tiering/move/mover.h"
#include "tiering/store/blocks.h"

namespace ta {

inline constexpr size_t kPrefixKeyBytes = 32;
using Salt = std::array<uint8_t, 32>;

// Names a namespace in files: a hash of its salt, which reveals nothing of it. 0: none.
using SpaceTag = uint64_t;
inline constexpr SpaceTag kEndedSpace = UINT64_MAX;  // of an ended namespace: what belonged to it belongs to none

struct NamespaceStats {
    Tenant id = 0;
    uint64_t entries = 0, bytes = 0, quota = 0, bytes_shared = 0;
    uint64_t hits = 0, misses = 0, published = 0, evicted = 0;  // since creation, blocks
};

// Internally synchronised. Frees blocks outside its lock. A caller that gets blocks has a Residency::BlockHold until it releases them:
// meanwhile they count as in use, and others wait for that. A caller that needs no bytes asks for keys or tiers instead.
class PrefixStore {
  public:
    // An entry as it is in files.
    struct Record {
        BlockKey key;
        uint64_t index;
        BlockPtr block;
    };
    // The key of an entry, and the index of its block in its sequence.
    struct EntryKey {
        BlockKey key;
        uint64_t index;
    };
    struct Match {
        std::vector<BlockPtr> blocks;
        std::vector<BlockKey> keys;  // the first keys asked for, at most as many as the namespace has entries
        size_t asked = 0;
        size_t matched = 0;  // how many of them have blocks
    };

    // Namespaces get ids from first_id + 1 on.
    PrefixStore(BlockStore& blocks, const Geometry& geometry, Tenant first_id)
        : blocks_(blocks), geometry_(geometry), last_id_(first_id) {}
    ~PrefixStore() { end_all_feeds(); }
    // Makes blocks keep the keys under which they are published, for the disk.
    void set_persistent() { persistent_ = true; }
    bool persistent() const { return persistent_; }

    // TA_E_INVALID: a namespace has this salt already. The new one starts with the entries of its salt that a file brought
    // along.
    Result<Tenant> create(const Salt& salt, uint64_t quota);
    Status destroy(Tenant id);
    Result<NamespaceStats> stats(Tenant id) const;
    std::vector<NamespaceStats> all_stats() const;
    Status check(Tenant id) const;
    // A hash of these bytes under the namespace's salt; nobody can compute it without the salt.
    Result<BlockKey> sign(Tenant id, std::span<const uint8_t> bytes) const;
    // Hashes keys [n, 32] of blocks from index `first` on. Tables and files have these hashes in place of the keys.
    Result<std::vector<BlockKey>> hash_keys(Tenant id, std::span<const uint8_t> keys, uint64_t first = 0) const;
    // Hashes keys into memory of the caller, [n, 32].
    Status hash_keys_into(Tenant id, std::span<const uint8_t> keys, uint64_t first, uint8_t* hashed) const;
    // The namespace's name in files.
    SpaceTag tag_of(Tenant id) const;
    // The namespaces that a file names, created or not. When this object ends, namespaces that only the file named end, too,
    // unless keep() was called: the file was loaded. Used by one thread.
    class Named {
      public:
        explicit Named(PrefixStore& store) : store_(store) {}
        ~Named();
        Named(const Named&) = delete;
        Named& operator=(const Named&) = delete;
        // The tenant of this tag's namespace.
        Tenant tenant_of(SpaceTag tag);
        // TA_E_LIMIT: files have named too many namespaces, and some of the tags asked for got none.
        Status complete() const;
        void keep() { keep_ = true; }

      private:
        PrefixStore& store_;
        std::unordered_map<SpaceTag, Tenant> tenants_;
        bool keep_ = false, complete_ = true;
    };

    // TA_E_INVALID: some of the blocks are another namespace's.
    static Status check_owner(Tenant id, std::span<const BlockPtr> sequence);
    // Publishes the first n blocks of a sequence under n hashed keys, all or nothing. Entries that exist stay as they are.
    // Afterwards all of the sequence's blocks belong to the namespace.
    Status publish(Tenant id, std::span<const BlockKey> keys, std::span<const BlockPtr> sequence);
    // TA_E_LIMIT: so many more bytes exceed the quota, even if all unused entries are dropped.
    Status check_quota(Tenant id, uint64_t bytes) const;
    // Finds the blocks of the first keys, up to the first key without one, as many as a sequence can begin with.
    Result<Match> match(Tenant id, std::span<const uint8_t> keys);
    // [keys.size()]: the block published under each key as block `indices[i]` of its sequence; nullptr: none.
    Result<std::vector<BlockPtr>> find_blocks(Tenant id, std::span<const BlockKey> keys,
                                              std::span<const uint64_t> indices) const;
    // Like find_blocks(), without the blocks: the tier of each.
    Result<std::vector<std::optional<TierKind>>> find_tiers(Tenant id, std::span<const BlockKey> keys,
                                                            std::span<const uint64_t> indices) const;
    // How many of the first blocks of a prefix a sequence can begin with: those at its end, which windows see, must not have
    // passed.
    size_t count_usable(std::span<const BlockPtr> blocks) const;
    // Counts a match that became a sequence: as hits, and as the latest use of its entries.
    void count_match(Tenant id, const Match& match);

    // ---- events of entries (src/kv/prefix_feed.h)

    // From now on the feed gets all events, beginning with all present entries.
    Status follow(Tenant id, std::shared_ptr<PrefixFeed> feed);
    void unfollow(Tenant id, const PrefixFeed& feed);
    // Moves up to `most` of the feed's oldest events to `events`. `all`, if not null, gets kPublished of each entry as it is
    // after all events so far. False: the namespace has ended, and there are no more events.
    bool take(Tenant id, PrefixFeed& feed, size_t most, std::vector<PrefixEvent>& events,
              std::vector<PrefixEvent>* all = nullptr);
    // Like take(), from a feed that the first call makes: for the library's caller.
    Result<std::vector<PrefixEvent>> take_events(Tenant id, size_t most);

    // Blocks of a tier that only the tables own and nobody has pinned: at least so many bytes, or all there are. Lower
    // priorities come first, then those not asked for longest. Within a prefix of one priority the end comes before the
    // beginning.
    std::vector<MoveItem> unused(TierKind tier, uint64_t bytes) const;
    // The number of such blocks by TierKind and kind. On the disk also its records of blocks in faster tiers.
    std::array<SlotCounts, kTiers> unused_slots() const;
    // Drops the entries of such blocks; on a persistent disk also records of blocks in faster tiers. Returns the bytes that
    // this frees. `all`: drops nothing if that would free less than `bytes`.
    uint64_t drop_unused(TierKind tier, uint64_t bytes, bool all);

    // The namespace of a key from a file.
    static SpaceTag tag_in(const BlockKey& key);
    // True if files have named the maximum of namespaces that nobody has created.
    bool is_full() const;
    // Forgets namespaces that files named, nobody has created, no load is naming, and that have neither entries nor sequences.
    void end_forgotten(const std::unordered_set<Tenant>& in_use);

    // Takes in entries that a file brought along, for the namespaces that their keys name, created or not. Leaves out entries
    // beyond the namespaces that files may name.
    void recover(std::vector<Record>&& records);
    // All entries, or those of one namespace.
    std::vector<Record> records(Tenant id = 0) const;
    // Drops the entry of a key if its block is damaged, as a match would.
    void drop_damaged(Tenant id, const BlockKey& key);
    // The keys of one namespace's entries, by the index of their blocks.
    std::vector<EntryKey> entry_keys(Tenant id) const;
    // Drops everything; publish, match and create fail from then on.
    void close();

  private:
    struct Entry {
        BlockKey key;
        uint64_t index;  // of the block in its sequence
        BlockPtr block;
        uint64_t stamp;                     // stamp of the last call that asked for it
        TierKind told = TierKind::kDevice;  // the tier that feeds know
    };
    using Entries = std::list<Entry>;
    struct HashKey {
        size_t operator()(const BlockKey& key) const;
    };
    using Table = std::unordered_map<BlockKey, Entries::iterator, HashKey>;
    struct Space {
        Tenant id = 0;
        SpaceTag tag = 0;
        bool claimed = false;  // true: it was created; false: it keeps what came from files until then
        bool kept = false;     // something that was loaded belongs to it
        uint32_t loads = 0;    // loads under way that name it
        Salt salt{};
        Entries entries;  // those not asked for longest come first; of a prefix the end first
        Table table;
        uint64_t bytes = 0, quota = UINT64_MAX;
        uint64_t hits = 0, misses = 0, published = 0, evicted = 0;
        std::vector<std::shared_ptr<PrefixFeed>> feeds;
        std::shared_ptr<PrefixFeed> callers_feed;  // one of `feeds`, or nullptr
        uint64_t moves_told = 0;                   // BlockStore::moves() when feeds were told of moves
    };
    // The order in which entries are dropped: by priority, then by the last call that asked for them.
    using Order = std::pair<uint32_t, uint64_t>;
    struct DropOrder {
        explicit DropOrder(const BlockStore& blocks)
            : alike(blocks.given_priorities() == 0), now(alike ? 0 : retention_now()) {}
        Order of(const Entry& e) const { return {e.block->retention().priority(now), e.stamp}; }
        const bool alike;  // all blocks have the same priority
        const uint64_t now;
    };
    // A block published under several keys has an entry for each.
    static bool is_unused(const Entry& e) { return e.block.use_count() == long{e.block->entries()}; }
    void forget(Entry& e);
    Result<Space*> find(Tenant id) const;
    Space& space_of(SpaceTag tag);
    Tenant name(SpaceTag tag);
    bool is_full_locked() const;
    uint64_t bytes_of(const Entry& e) const { return geometry_.slot_bytes(e.block->kind()); }
    Status check_quota(const Space& space, std::span<const Entries::iterator> chain, uint64_t more, uint64_t less) const;
    // Calls found(i, block) for each key that is published as block `indices[i]`. Under the lock.
    template <class Found>
    Status visit(Tenant id, std::span<const BlockKey> keys, std::span<const uint64_t> indices, Found&& found) const;
    static PrefixEvent event(PrefixEvent::Kind kind, const Entry& e) { return {e.key, 0, e.index, kind, e.told}; }
    static void tell(Space& space, PrefixEvent::Kind kind, Entry& e) noexcept;
    void tell_moves(Space& space) noexcept;
    static void end_feeds(Space& space) noexcept;
    void end_all_feeds() noexcept {
        for (const auto& [tag, space] : spaces_) end_feeds(*space);
    }
    void touch(Space& space, Entries::iterator entry);
    void erase(Space& space, Entries::iterator entry, Entries& dropped);
    void shrink(Space& space, uint64_t bytes, uint64_t except, Entries& dropped);
    NamespaceStats describe(const Space& space) const;

    BlockStore& blocks_;
    const Geometry& geometry_;
    mutable std::mutex mutex_;
    bool closed_ = false, persistent_ = false;
    uint64_t stamp_ = 0;
    Tenant last_id_;
    size_t claimed_ = 0;
    std::unordered_map<SpaceTag, std::unique_ptr<Space>> spaces_;
    std::unordered_map<Tenant, Space*> by_id_;
};

}  // namespace ta
