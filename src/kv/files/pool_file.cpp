#include "src/kv/files/pool_file.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "src/core/checked.h"

namespace ta {
namespace {

constexpr FileFormat kFormat{"pool", 0x4C4F5054, 3};  // "TPOL" in little endian
constexpr uint64_t kMostIndexBytes = uint64_t{1} << 32;

struct FileHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved0;
    uint64_t fingerprint;  // of the pool
    uint64_t sequences;
    uint64_t references;  // from all sequences to their blocks
    uint64_t entries;     // published blocks
    uint64_t reserved1;
    uint64_t blocks;
    uint64_t slot_bytes[2];
    uint64_t index_bytes;  // between this header and the first block
    uint64_t index_hash;   // XXH3 of them
    uint64_t hash;         // XXH3 of the fields above
};
static_assert(sizeof(FileHeader) == 96);

// The index: a StoredBlock for each block; sequences; references (u64: the number of a block in the file); entries.
struct SequenceRecord {
    uint64_t id;
    int64_t length;
    uint64_t reserved;
    SpaceTag space;  // the namespace of its tokens
};
static_assert(sizeof(SequenceRecord) == 32);

struct EntryRecord {
    uint8_t key[32];
    uint64_t index, block, reserved;
};
static_assert(sizeof(EntryRecord) == 56);

struct Index {
    std::vector<StoredBlock> blocks;
    std::vector<SequenceRecord> sequences;
    std::vector<uint64_t> references;
    std::vector<EntryRecord> entries;
};

uint64_t blocks_for(int64_t tokens) {
    return (uint64_t(tokens) + kPageTokens - 1) / kPageTokens;
}

// The blocks that will be in the file, each once.
class Contents {
  public:
    struct Item {
        BlockPtr block;
        uint64_t index;   // in its sequences
        uint32_t tokens;  // of the longest of its sequences
        ta_seq owner;     // one of its sequences; 0: only published
    };
    uint64_t add(const BlockPtr& block, uint64_t index, uint32_t tokens, ta_seq owner) {
        const auto [at, fresh] = numbers_.emplace(block.get(), items_.size());
        if (fresh) items_.push_back({block, index, 0, owner});
        items_[at->second].tokens = std::max(items_[at->second].tokens, tokens);
        return at->second;
    }
    const std::vector<Item>& items() const { return items_; }

  private:
    std::unordered_map<const Block*, size_t> numbers_;
    std::vector<Item> items_;
};

Status name_owner(Status s, ta_seq owner) {
    if (owner == 0 || !s.detail() || s.detail()->block < 0) return s;
    const ta_error& e = *s.detail();
    return fail(e.code, "sequence 0x%llx: %s", (unsigned long long)owner, e.message).layer(e.layer).block(e.block);
}

// True if the header's counts fit the size of the file. Each part of the index is checked when it is read.
bool has_good_counts(const Pool& pool, const FileHeader& h, uint64_t rest) {
    const std::pair<uint64_t, uint64_t> parts[] = {{h.blocks, sizeof(StoredBlock)},
                                                   {h.sequences, sizeof(SequenceRecord)},
                                                   {h.references, sizeof(uint64_t)},
                                                   {h.entries, sizeof(EntryRecord)}};
    uint64_t bytes = 0;
    for (const auto& [n, size] : parts) {
        const auto part = checked_mul(n, size);
        const auto sum = part ? checked_add(bytes, *part) : std::nullopt;
        if (!sum) return false;
        bytes = *sum;
    }
    return bytes == h.index_bytes && bytes <= rest && bytes <= kMostIndexBytes &&
           h.blocks <= rest / least_block_bytes(pool.geometry());
}

// Reads everything but the blocks. A hostile file can have right hashes and impossible content. So each record is checked
// against those before it, and only then takes memory.
Status read_index(Pool& pool, File& file, FileHeader& h, Index& index, uint64_t& file_bytes) {
    TA_RETURN_IF_ERROR(open_with_header(pool, kFormat, file, h, file_bytes));
    if (!has_good_counts(pool, h, file_bytes - sizeof h))
        return fail(TA_E_CORRUPT, "%s says more of its contents than it has bytes", file.name());
    if (h.sequences > pool.sequences().most()) {
        return fail(TA_E_LIMIT, "%s has %llu sequences; the pool takes %u at most", file.name(),
                    (unsigned long long)h.sequences, pool.sequences().most());
    }
    IndexReader raw(file, h.index_bytes);
    TA_RETURN_IF_ERROR(read_stored_blocks(pool, raw, h.blocks, index.blocks));
    std::vector<bool> used(index.blocks.size());
    uint64_t references = 0;
    for (uint64_t i = 0; i < h.sequences; ++i) {
        SequenceRecord s;
        TA_RETURN_IF_ERROR(raw.read(s));
        if (s.length < 0 || blocks_for(s.length) > h.blocks || blocks_for(s.length) > h.references - references)
            return raw.damaged();
        references += blocks_for(s.length);
        index.sequences.push_back(s);
    }
    if (references != h.references) return raw.damaged();
    for (const SequenceRecord& s : index.sequences) {
        for (uint64_t b = 0; b < blocks_for(s.length); ++b) {
            uint64_t r;
            TA_RETURN_IF_ERROR(raw.read(r));
            const int64_t tokens = std::min<int64_t>(kPageTokens, s.length - int64_t(b) * kPageTokens);
            const bool may_have_passed = int64_t(b) < pool.geometry().first_needed(s.length);
            if (r >= h.blocks || index.blocks[size_t(r)].index != b || index.blocks[size_t(r)].tokens < tokens ||
                (is_passed(PageKind(index.blocks[size_t(r)].kind)) && !may_have_passed))
                return raw.damaged().block(int64_t(b));
            used[size_t(r)] = true;
            index.references.push_back(r);
        }
    }
    for (uint64_t i = 0; i < h.entries; ++i) {
        EntryRecord e;
        TA_RETURN_IF_ERROR(raw.read(e));
        SpaceTag space;  // the key's first bytes
        std::memcpy(&space, e.key, sizeof space);
        if (space == 0 || space == kEndedSpace || e.block >= h.blocks) return raw.damaged();
        const StoredBlock& block = index.blocks[size_t(e.block)];
        if (block.index != e.index || block.tokens != uint32_t(kPageTokens)) return raw.damaged().block(int64_t(e.index));
        used[size_t(e.block)] = true;
        index.entries.push_back(e);
    }
    if (std::find(used.begin(), used.end(), false) != used.end()) return raw.damaged();
    TA_RETURN_IF_ERROR(raw.end(h.index_hash));
    return check_end(pool, file, file_bytes, index.blocks);
}

}  // namespace

Status save_pool(Pool& pool, const std::string& path, bool published, const Progress& progress, FileSystem& files) {
    const Geometry& g = pool.geometry();
    const Residency::BlockHold holds(pool.residency());
    // A block owned here is not written to any more.
    auto taken = pool.sequences().snapshot_all();
    if (!taken.ok()) return std::move(taken).status();
    const auto all = taken.take();
    std::vector<PrefixStore::Record> entries;
    if (published) entries = pool.prefixes().records();

    Index index;
    Contents contents;
    for (const auto& [id, s] : all) {
        index.sequences.push_back({id, s.length, 0, pool.tag_of(s)});
        for (size_t b = 0; b < s.blocks.size(); ++b) {
            const Block& block = *s.blocks[b];
            const auto tokens = uint32_t(std::min<int64_t>(kPageTokens, s.length - int64_t(b) * kPageTokens));
            index.references.push_back(contents.add(s.blocks[b], b, block.full() ? uint32_t(kPageTokens) : tokens, id));
        }
    }
    for (const PrefixStore::Record& r : entries) {
        EntryRecord e{};
        std::copy(r.key.begin(), r.key.end(), e.key);
        e.index = r.index;
        e.block = contents.add(r.block, r.index, uint32_t(kPageTokens), 0);
        index.entries.push_back(e);
    }
    std::vector<uint8_t> raw;  // the index after its StoredBlocks
    put(raw, index.sequences);
    put(raw, index.references);
    put(raw, index.entries);
    const uint64_t index_bytes = contents.items().size() * sizeof(StoredBlock) + raw.size();
    if (index_bytes > kMostIndexBytes) return fail(TA_E_LIMIT, "the pool has more sequences and blocks than a file lists");

    return write_new_file(files, path, [&](File& file) -> Status {
        // Header and index are written last: they describe each block as it was when it was written.
        file.go_to(sizeof(FileHeader) + index_bytes);
        uint64_t total = file.at();
        for (const Contents::Item& c : contents.items()) total += sizeof(BlockHeader) + g.slot_bytes(c.block->kind());
        std::vector<uint8_t> slot;
        for (const Contents::Item& c : contents.items()) {
            if (progress && !progress(file.at(), total)) return stopped(file);
            Result<StoredBlock> written = write_block(pool, file, *c.block, c.index, c.tokens, slot);
            if (!written.ok()) return name_owner(std::move(written).status(), c.owner);
            index.blocks.push_back(written.value());
        }
        std::vector<uint8_t> whole;
        put(whole, index.blocks);
        put(whole, raw);
        FileHeader h{};
        h.magic = kFormat.magic;
        h.version = kFormat.version;
        h.fingerprint = pool.fingerprint();
        h.sequences = index.sequences.size();
        h.references = index.references.size();
        h.entries = index.entries.size();
        h.blocks = index.blocks.size();
        h.slot_bytes[0] = g.token_slot_bytes;
        h.slot_bytes[1] = g.channel_slot_bytes;
        h.index_bytes = whole.size();
        h.index_hash = hash_bytes(whole.data(), whole.size());
        h.hash = header_hash(h);
        file.go_to(0);
        TA_RETURN_IF_ERROR(file.write(&h, sizeof h));
        TA_RETURN_IF_ERROR(file.write(whole.data(), whole.size()));
        TA_RETURN_IF_ERROR(file.sync());
        return progress && !progress(total, total) ? stopped(file) : Status();
    });
}

Result<uint64_t> count_sequences(Pool& pool, const std::string& path, FileSystem& files) {
    File file(files, path);
    FileHeader h;
    Index index;
    uint64_t bytes = 0;
    TA_RETURN_IF_ERROR(read_index(pool, file, h, index, bytes));
    return h.sequences;
}

Result<std::vector<LoadedSequence>> load_pool(Pool& pool, const std::string& path, uint64_t most, const Progress& progress,
                                              FileSystem& files) {
    File file(files, path);
    FileHeader h;
    Index index;
    uint64_t bytes = 0;
    TA_RETURN_IF_ERROR(read_index(pool, file, h, index, bytes));
    if (h.sequences > most) {
        return fail(TA_E_INVALID, "%s has %llu sequences; there is room for the ids of %llu", file.name(),
                    (unsigned long long)h.sequences, (unsigned long long)most)
            .argument(5);
    }
    TA_RETURN_IF_ERROR(pool.sequences().check_room_for(h.sequences));
    PrefixStore::Named spaces(pool.prefixes());
    pool.end_forgotten_namespaces();
    std::vector<Tenant> tenants(size_t(h.blocks));  // by block: the namespace that the file gives for its bytes
    std::vector<bool> published(size_t(h.blocks));  // such blocks must not lose bits if they make room for others
    for (const EntryRecord& e : index.entries) {
        published[size_t(e.block)] = true;
        BlockKey key;
        std::copy(std::begin(e.key), std::end(e.key), key.begin());
        tenants[size_t(e.block)] = spaces.tenant_of(PrefixStore::tag_in(key));
    }
    auto referenced = index.references.begin();
    for (const SequenceRecord& r : index.sequences) {
        const Tenant tenant = spaces.tenant_of(r.space);
        for (uint64_t b = 0; b < blocks_for(r.length); ++b, ++referenced) {
            if (tenant != 0) tenants[size_t(*referenced)] = tenant;
        }
    }
    TA_RETURN_IF_ERROR(spaces.complete());
    const auto claim = [&](uint64_t i, Block& block) {
        if (tenants[size_t(i)] != 0) block.set_tenant(tenants[size_t(i)]);
        if (published[size_t(i)]) pool.blocks().keep_kind(block);
    };
    Result<std::vector<BlockPtr>> read = load_blocks(pool, file, index.blocks, bytes, claim, progress);
    if (!read.ok()) return std::move(read).status();
    std::vector<BlockPtr> blocks = read.take();

    std::vector<Sequences::Snapshot> sequences;
    std::vector<LoadedSequence> loaded;
    size_t reference = 0;
    for (const SequenceRecord& r : index.sequences) {
        Sequences::Snapshot s;
        s.length = r.length;
        s.tenant = spaces.tenant_of(r.space);
        for (uint64_t b = 0; b < blocks_for(r.length); ++b) s.blocks.push_back(blocks[size_t(index.references[reference++])]);
        sequences.push_back(std::move(s));
        loaded.push_back({r.id, 0});
    }
    std::vector<PrefixStore::Record> entries;
    for (const EntryRecord& e : index.entries) {
        PrefixStore::Record r{{}, e.index, blocks[size_t(e.block)]};
        std::copy(std::begin(e.key), std::end(e.key), r.key.begin());
        entries.push_back(std::move(r));
    }
    blocks.clear();
    Result<std::vector<ta_seq>> ids = pool.sequences().adopt_all(std::move(sequences));
    if (!ids.ok()) return std::move(ids).status();
    try {
        pool.prefixes().recover(std::move(entries));
    } catch (...) {
        for (ta_seq id : ids.value()) (void)pool.sequences().release(id);
        throw;
    }
    spaces.keep();
    for (size_t i = 0; i < loaded.size(); ++i) loaded[i].loaded = ids.value()[i];
    return loaded;
}

}  // namespace ta
