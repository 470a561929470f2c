// The pool's side of prefix reuse: publishing from sequences, making sequences of published blocks, and recovering published
// blocks from a persistent disk.
#include <algorithm>
#include <chrono>
#include <unordered_set>
#include <utility>

#include "src/kv/files/block_file.h"
#include "src/kv/pool.h"
#include "tiering/disk/disk.h"
#include "tiering/store/room_signal.h"

namespace ta {

Status Pool::publish(ta_seq seq, Tenant space, std::span<const uint8_t> keys) {
    const size_t n = keys.size() / kPrefixKeyBytes;
    TA_RETURN_IF_ERROR(prefixes_.check(space));
    const Residency::BlockHold hold(residency_);
    Result<Sequences::Snapshot> taken = sequences_.snapshot_to_publish(seq);
    if (!taken.ok()) return std::move(taken).status();
    const Sequences::Snapshot s = taken.take();
    if (n > uint64_t(s.length) / kPageTokens) {
        return fail(TA_E_INVALID, "%zu blocks are to be published; the sequence has %lld that are full", n,
                    (long long)(s.length / kPageTokens))
            .argument(4);
    }
    TA_RETURN_IF_ERROR(PrefixStore::check_owner(space, s.blocks));
    if (s.tenant != 0 && s.tenant != space) return fail(TA_E_INVALID, "the sequence belongs to another namespace").argument(2);
    for (size_t b = 0; b < n; ++b) {
        if (s.blocks[b]->dropped()) return fail(TA_E_STATE, "the block was dropped").block(int64_t(b));
        if (!s.blocks[b]->sealed() || s.blocks[b]->stuck())
            return fail(TA_E_CORRUPT, "the block does not match its hashes").block(int64_t(b));
    }
    Result<std::vector<BlockKey>> hashed = prefixes_.hash_keys(space, keys);
    if (!hashed.ok()) return std::move(hashed).status();
    TA_RETURN_IF_ERROR(publish_blocks(space, hashed.value(), s.blocks, &hold));
    sequences_.set_tenant(seq, space);
    return {};
}

Status Pool::publish_blocks(Tenant space, std::span<const BlockKey> keys, std::span<const BlockPtr> blocks,
                            Residency::Holder holder) {
    constexpr std::chrono::milliseconds kMoment{200};
    const Residency::HolderWait wait(residency_, holder);
    RoomSignal::Watch watch(this->blocks().room_signal());
    const Deadline until = this->blocks().room_signal().now() + std::min(tier_settings().patience.moves, kMoment);
    const auto held = [&] { return wait.others_hold() || residency_.evictions_choose(); };
    for (;;) {
        const bool before = held();
        Status published = prefixes_.publish(space, keys, blocks);
        // A move, an eviction or a file may hold a block for a moment. That counts as use, so tries again later. One that began
        // and ended during the try has signalled.
        if (published.code() != TA_E_LIMIT || !(before || held() || watch.signalled()) || !watch.wait(until)) return published;
    }
}

SpaceTag Pool::tag_of(const Sequences::Snapshot& s) const {
    Tenant tenant = s.tenant;
    for (size_t b = 0; tenant == 0 && b < s.blocks.size(); ++b) tenant = s.blocks[b]->tenant();
    return prefixes_.tag_of(tenant);
}

Result<std::pair<ta_seq, int64_t>> Pool::match_prefix(Tenant space, std::span<const uint8_t> keys) {
    TA_RETURN_IF_ERROR(check_open());
    const Residency::BlockHold hold(residency_);
    Result<PrefixStore::Match> found = prefixes_.match(space, keys);
    if (!found.ok()) return std::move(found).status();
    PrefixStore::Match& m = found.value();
    Sequences::Snapshot s;
    s.length = int64_t(m.blocks.size()) * kPageTokens;
    s.blocks = std::move(m.blocks);
    s.tenant = space;
    const int64_t length = s.length;
    Result<ta_seq> seq = sequences_.adopt(std::move(s));
    if (!seq.ok()) return std::move(seq).status();
    prefixes_.count_match(space, m);
    return std::pair(seq.value(), length);
}

// ------------------------------------------------------------------------------------------------------------ persistent disk

// Each key of a full block becomes an entry of the namespace that the key names. Blocks without keys belonged to sequences that
// are gone.
void Pool::recover_published() {
    constexpr uint64_t kMostContents = uint64_t{1} << 63, kMostBlocks = uint64_t{1} << 34;
    prefixes_.set_persistent();
    refused_records_ = residency_.disk()->refused_count();
    std::vector<RecoveredBlock> found(residency_.disk()->recovered().begin(), residency_.disk()->recovered().end());
    // If several records have one key, the latest counts.
    std::sort(found.begin(), found.end(),
              [](const RecoveredBlock& a, const RecoveredBlock& b) { return a.generation > b.generation; });
    std::vector<PrefixStore::Record> records;
    std::vector<Slot> unwanted;
    struct Hash {
        size_t operator()(const BlockKey& key) const { return hash_bytes(key.data(), key.size()); }
    };
    std::unordered_set<BlockKey, Hash> seen;
    for (const RecoveredBlock& b : found) {
        const BlockIdentity& id = b.identity;
        std::vector<BlockKey> keys = b.more_keys, older;
        keys.insert(keys.begin(), id.key);
        const bool good =
            id.key != BlockKey{} && id.tokens == uint32_t(kPageTokens) && id.content_id < kMostContents &&
            id.block_index < kMostBlocks &&
            (id.block_index >= numerics_.sink_blocks || page_format(PageKind(b.slot.slot_class)) == PageKind::kToken);
        std::erase_if(keys, [&](const BlockKey& key) {
            if (good && seen.insert(key).second) return false;
            older.push_back(key);
            return true;
        });
        if (keys.empty()) {
            unwanted.push_back(b.slot);
            continue;
        }
        const BlockPtr block = blocks().recover(b);
        for (const BlockKey& key : older) blocks().remove_key(*block, key);
        for (const BlockKey& key : keys) records.push_back({key, id.block_index, block});
    }
    residency_.disk()->release(unwanted);
    prefixes_.recover(std::move(records));
}

void Pool::end_forgotten_namespaces() {
    if (!prefixes_.is_full()) return;
    // No load can add a sequence in between: while it runs, its namespaces count as named.
    sequences_.visit_tenants([this](const std::unordered_set<Tenant>& in_use) { prefixes_.end_forgotten(in_use); });
}

Status Pool::flush_namespace(Tenant space) {
    TA_RETURN_IF_ERROR(check_open());
    TA_RETURN_IF_ERROR(prefixes_.check(space));
    if (!prefixes_.persistent()) return fail(TA_E_UNSUPPORTED, "the pool has no persistent disk tier").argument(0);
    const Residency::BlockHold holds(residency_);
    std::vector<PrefixStore::Record> records = prefixes_.records(space);
    std::sort(records.begin(), records.end(), [](const auto& a, const auto& b) { return a.index < b.index; });
    constexpr size_t kMostKeys = 1 + kMostMoreKeys;
    // Of the first block that a killed session left incomplete, else of the first with more keys than a record takes. The others
    // are written all the same.
    Status unsaved;
    for (const PrefixStore::Record& r : records) {
        if (Status s = check_unread(*r.block, r.index); !s.ok()) {
            if (!r.block->stuck()) return s;
            prefixes_.drop_damaged(space, r.key);
            if (unsaved.code() != TA_E_CORRUPT) unsaved = std::move(s);
            continue;
        }
        // The first entry of a block writes its record, with all keys.
        if (!blocks().has_keys_on_disk(*r.block)) TA_RETURN_IF_ERROR(write_record(*r.block, r.index));
        if (const size_t keys = blocks().count_keys(*r.block); unsaved.ok() && keys > kMostKeys) {
            unsaved = fail(TA_E_LIMIT, "the block is published under %zu keys; the disk keeps the first %zu", keys, kMostKeys)
                          .tier(TA_TIER_DISK)
                          .block(int64_t(r.index));
        }
    }
    TA_RETURN_IF_ERROR(residency_.disk()->flush());
    return unsaved;
}

namespace {

// Owns a slot of a tier until it is kept.
class ReservedSlot {
  public:
    ReservedSlot(Tier& tier, Slot slot) : tier_(tier), slot_(slot) {}
    ~ReservedSlot() {
        if (slot_.index != Slot::kNone) tier_.release({&slot_, 1});
    }
    ReservedSlot(const ReservedSlot&) = delete;
    ReservedSlot& operator=(const ReservedSlot&) = delete;
    Slot get() const { return slot_; }
    Slot keep() { return std::exchange(slot_, Slot{}); }

  private:
    Tier& tier_;
    Slot slot_;
};

}  // namespace

// A killed session may have left a block's record incomplete: if nobody has read it since, reads it. TA_E_CORRUPT: it is
// incomplete, and the block is damaged.
Status Pool::check_unread(Block& block, uint64_t index) {
    const Place at = blocks().place_of(block);
    if (at.tier != TierKind::kDisk || !residency_.disk()->is_unread(at.slot)) return {};
    std::vector<uint8_t> bytes;
    Result<PageKind> read = copy_slot(*this, block, index, kPageTokens, bytes);
    if (read.ok()) return {};
    Status why = std::move(read).status();
    if (why.code() == TA_E_CORRUPT) block.set_stuck();
    return std::move(why).block(int64_t(index));
}

Status Pool::write_record(Block& block, uint64_t index) {
    DiskRequest r;
    const RecordKeys keys = blocks().keys_of(block, r.more_keys);
    if (keys.state == 0) return {};  // its last entry was dropped meanwhile
    std::vector<uint8_t> bytes;
    Result<PageKind> kind = copy_slot(*this, block, index, kPageTokens, bytes);
    if (!kind.ok()) return std::move(kind).status().block(int64_t(index));
    const uint8_t slot_class = uint8_t(kind.value());
    Result<std::vector<Slot>> slots = residency_.disk()->acquire({&slot_class, 1});
    if (!slots.ok() && residency_.disk()->reclaim(Residency::kErasePatience))
        slots = residency_.disk()->acquire({&slot_class, 1});
    if (!slots.ok()) return std::move(slots).status().block(int64_t(index));
    ReservedSlot slot(*residency_.disk(), slots.value()[0]);
    r.kind = DiskRequest::Kind::kWrite;
    r.slot = slot.get();
    r.bytes = bytes.size();
    r.memory = bytes.data();
    r.identity = block.identity(index, keys);
    TA_RETURN_IF_ERROR(reader().ask_disk(r));
    blocks().set_record(block, slot.keep(), keys);
    return {};
}

}  // namespace ta
