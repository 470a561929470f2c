// Published prefixes: full blocks that new sequences find by keys of the caller, kept apart by namespace. A key stands for all
// tokens up to the end of its block. The tables hold hashes of the keys under the namespace's salt, which nobody
// without the salt can compute, and shares of the blocks.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
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

// Names a namespace in files: a hash of its salt, which tells nothing of it. 0: none.
using SpaceTag = uint64_t;
inline constexpr SpaceTag kEndedSpace = UINT64_MAX;  // one that is no more: what belonged to it belongs nowhere

struct NamespaceStats {
    Tenant id = 0;
    uint64_t entries = 0, bytes = 0, quota = 0, bytes_shared = 0;
    uint64_t hits = 0, misses = 0, published = 0, evicted = 0;  // since creation, blocks
};

// Internally synchronised; blocks are freed outside its lock.
class PrefixStore {
  public:
    // An entry as files have it.
    struct Record {
        BlockKey key;
        uint64_t index;
        BlockPtr block;
    };
    struct Match {
        std::vector<BlockPtr> blocks;
        std::vector<BlockKey> keys;  // the first that were asked for, as many as the namespace has entries at most
        size_t asked = 0;
        size_t matched = 0;  // the first of them, those of the blocks
    };

    // `first_id`: ids count up from here.
    PrefixStore(BlockStore& blocks, const Geometry& geometry, Tenant first_id)
        : blocks_(blocks), geometry_(geometry), last_id_(first_id) {}
    ~PrefixStore() { end_all_feeds(); }
    // Blocks know the keys under which they are published, for the disk.
    void set_persistent() { persistent_ = true; }
    bool persistent() const { return persistent_; }

    // TA_E_INVALID: there is one with this salt. It starts with the entries that a file brought along for its salt.
    Result<Tenant> create(const Salt& salt, uint64_t quota);
    Status destroy(Tenant id);
    Result<NamespaceStats> stats(Tenant id) const;
    std::vector<NamespaceStats> all_stats() const;
    Status check(Tenant id) const;
    // A hash of these bytes under the namespace's salt, which only those who know the salt can compute.
    Result<BlockKey> sign(Tenant id, std::span<const uint8_t> bytes) const;
    // Hashes keys [n, 32] of blocks from `first` on. The tables, and files, have the hashes in place of the keys.
    Result<std::vector<BlockKey>> hash_keys(Tenant id, std::span<const uint8_t> keys, uint64_t first = 0) const;
    // The same into memory of the caller, [n, 32].
    Status hash_keys_into(Tenant id, std::span<const uint8_t> keys, uint64_t first, uint8_t* hashed) const;
    // How a file names the namespace.
    SpaceTag tag_of(Tenant id) const;
    // The namespaces that a file names, be they there already or not yet. Ones that nobody else knows of end with this, unless
    // the file was loaded. Used by one thread.
    class Named {
      public:
        explicit Named(PrefixStore& store) : store_(store) {}
        ~Named();
        Named(const Named&) = delete;
        Named& operator=(const Named&) = delete;
        // Whose the tokens are that the file says are of it.
        Tenant tenant_of(SpaceTag tag);
        // TA_E_LIMIT: the pool knows too many namespaces to take in all that were asked for.
        Status complete() const;
        void keep() { keep_ = true; }

      private:
        PrefixStore& store_;
        std::unordered_map<SpaceTag, Tenant> tenants_;
        bool keep_ = false, complete_ = true;
    };

    // TA_E_INVALID: some of the blocks are another namespace's.
    static Status check_owner(Tenant id, std::span<const BlockPtr> sequence);
    // Publishes the first n blocks of a sequence under n hashed keys. Entries that exist stay as they are. All or nothing. Then all
    // of the sequence's blocks are the namespace's.
    Status publish(Tenant id, std::span<const BlockKey> keys, std::span<const BlockPtr> sequence);
    // TA_E_LIMIT: so many more bytes are beyond the quota, whatever is dropped that nobody uses.
    Status check_quota(Tenant id, uint64_t bytes) const;
    // The blocks of the first keys, up to one that has none, as many as a sequence can begin with.
    Result<Match> match(Tenant id, std::span<const uint8_t> keys);
    // [keys.size()] the block that is published under each, as block `indices[i]` of its sequence; nullptr: none.
    Result<std::vector<BlockPtr>> find_blocks(Tenant id, std::span<const BlockKey> keys,
                                              std::span<const uint64_t> indices) const;
    // How many of the first blocks of a prefix a sequence can begin with: what its windows see at the end must not have passed.
    size_t count_usable(std::span<const BlockPtr> blocks) const;
    // Counts a match of which a sequence was made, as the latest use of its entries.
    void count_match(Tenant id, const Match& match);

    // ---- what becomes of entries (src/kv/prefix_feed.h)

    // The feed gets all events from now on, all entries first.
    Status follow(Tenant id, std::shared_ptr<PrefixFeed> feed);
    void unfollow(Tenant id, const PrefixFeed& feed);
    // Moves the oldest events out of the feed, at most so many. `all` not null: gets kPublished of each entry as they are after
    // all events so far. False: the namespace has ended, and there are none left.
    bool take(Tenant id, PrefixFeed& feed, size_t most, std::vector<PrefixEvent>& events,
              std::vector<PrefixEvent>* all = nullptr);
    // The same of a feed that the first call makes, for the caller of the library.
    Result<std::vector<PrefixEvent>> take_events(Tenant id, size_t most);

    // Blocks of a tier that nobody but the tables owns and nobody has pinned, those first that were not asked for longest, of
    // at least so many bytes or all there are. Blocks of a lower priority come before all others; of a prefix with one priority the
    // end comes before the beginning.
    std::vector<MoveItem> unused(TierKind tier, uint64_t bytes) const;
    // How many such blocks there are, by TierKind and kind; with those of the disk records on it of blocks that lie elsewhere.
    std::array<SlotCounts, kTiers> unused_slots() const;
    // Drops the entries of such blocks, on a persistent disk also the records of blocks that lie elsewhere. Returns the bytes
    // that this frees. `all`: drops nothing when they would be fewer than wanted.
    uint64_t drop_unused(TierKind tier, uint64_t bytes, bool all);

    // The namespace that a key of a file is of.
    static SpaceTag tag_in(const BlockKey& key);
    // True if files have named as many namespaces that nobody created as they may.
    bool is_full() const;
    // Namespaces that files named, nobody created, no entry is of and no sequence either: forgets them.
    void end_forgotten(const std::unordered_set<Tenant>& in_use);

    // Entries that a file brought along, for the namespace that their keys name, be it there already or not yet. Entries of more
    // namespaces than files may name are left out.
    void recover(std::vector<Record>&& records);
    // All entries, or those of one namespace.
    std::vector<Record> records(Tenant id = 0) const;
    // Drops everything; publish, match and create fail from then on.
    void close();

  private:
    struct Entry {
        BlockKey key;
        uint64_t index;  // of the block in its sequence
        BlockPtr block;
        uint64_t stamp;                     // of the last call that asked for it
        TierKind told = TierKind::kDevice;  // that feeds know
    };
    using Entries = std::list<Entry>;
    struct HashKey {
        size_t operator()(const BlockKey& key) const;
    };
    using Table = std::unordered_map<BlockKey, Entries::iterator, HashKey>;
    struct Space {
        Tenant id = 0;
        SpaceTag tag = 0;
        bool claimed = false;  // by a namespace; till then it keeps what came from files
        bool kept = false;     // something that was loaded belongs to it
        uint32_t loads = 0;    // going on, that name it
        Salt salt{};
        Entries entries;  // those not asked for longest first; of one prefix the end first
        Table table;
        uint64_t bytes = 0, quota = UINT64_MAX;
        uint64_t hits = 0, misses = 0, published = 0, evicted = 0;
        std::vector<std::shared_ptr<PrefixFeed>> feeds;
        std::shared_ptr<PrefixFeed> callers_feed;  // one of them, or nullptr
        uint64_t moves_told = 0;                   // state of BlockStore::moves() when feeds were told of moves
    };
    // In which entries go: by priority, then by the last call that asked for them.
    using Order = std::pair<uint32_t, uint64_t>;
    struct DropOrder {
        explicit DropOrder(const BlockStore& blocks)
            : alike(blocks.given_priorities() == 0), now(alike ? 0 : retention_now()) {}
        Order of(const Entry& e) const { return {e.block->retention().priority(now), e.stamp}; }
        const bool alike;  // all blocks have one priority
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
