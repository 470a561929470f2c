#include "src/kv/pool_file.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "src/core/checked.h"

namespace ta {
namespace {

constexpr FileFormat kFormat{"pool", 0x4C4F5054, 2};  // "TPOL" in little endian
constexpr uint64_t kMostIndexBytes = uint64_t{1} << 32;
constexpr uint64_t kNoState = UINT64_MAX;

struct FileHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved0;
    uint64_t fingerprint;  // of the pool
    uint64_t sequences;
    uint64_t references;  // of all sequences to their blocks
    uint64_t entries;     // published blocks
    uint64_t states;      // of universal scales, each the same number of floats
    uint64_t blocks;
    uint64_t slot_bytes[2];
    uint64_t index_bytes;  // between this header and the first block
    uint64_t index_hash;   // XXH3 of them
    uint64_t hash;         // XXH3 of the fields above
};
static_assert(sizeof(FileHeader) == 96);

// The index: sequences, references (u64, which block of the file), entries, states.
struct SequenceRecord {
    uint64_t id;
    int64_t length;
    uint64_t state;  // kNoState: none
    SpaceTag space;  // that it belongs to
};
static_assert(sizeof(SequenceRecord) == 32);

struct EntryRecord {
    uint8_t key[32];
    uint64_t index, block, state;
};
static_assert(sizeof(EntryRecord) == 56);

struct Index {
    std::vector<SequenceRecord> sequences;
    std::vector<uint64_t> references;
    std::vector<EntryRecord> entries;
    std::vector<float> states;
};

template <class T>
void put(std::vector<uint8_t>& bytes, const std::vector<T>& values) {
    const auto* p = reinterpret_cast<const uint8_t*>(values.data());
    bytes.insert(bytes.end(), p, p + values.size() * sizeof(T));
}

template <class T>
void take(const uint8_t*& at, std::vector<T>& values, uint64_t n) {
    values.resize(size_t(n));
    if (n > 0) std::memcpy(values.data(), at, size_t(n) * sizeof(T));
    at += n * sizeof(T);
}

uint64_t blocks_for(int64_t tokens) {
    return (uint64_t(tokens) + kPageTokens - 1) / kPageTokens;
}

// What will be in the file, once each.
class Contents {
  public:
    struct Item {
        BlockPtr block;
        uint64_t index;   // in its sequences
        uint32_t tokens;  // of the longest of them
        ta_seq owner;     // one of them; 0: it is published only
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

// Everything but the blocks, checked as far as that goes without them.
Status read_index(Pool& pool, File& file, FileHeader& h, Index& index, uint64_t& file_bytes) {
    const Geometry& g = pool.geometry();
    TA_RETURN_IF_ERROR(open_with_header(pool, kFormat, file, h, file_bytes));
    const bool has_states = pool.numerics().universal_open_scale;
    if (h.sequences + h.entries > 0 && (h.states > 0) != has_states)
        return fail(TA_E_INVALID, "%s is of a pool with%s universal scales", file.name(), has_states ? "out" : "");
    const uint64_t state = has_states ? pool.open_amax_record() * sizeof(float) : 0, rest = file_bytes - sizeof h;
    uint64_t bytes = 0;
    const std::pair<uint64_t, uint64_t> parts[] = {{h.sequences, sizeof(SequenceRecord)},
                                                   {h.references, sizeof(uint64_t)},
                                                   {h.entries, sizeof(EntryRecord)},
                                                   {h.states, state}};
    bool fits = has_states || h.states == 0;
    for (const auto& [n, size] : parts) {
        const auto part = checked_mul(n, size);
        const auto sum = part ? checked_add(bytes, *part) : std::nullopt;
        fits = fits && sum.has_value();
        bytes = sum.value_or(0);
    }
    const uint64_t smallest =
        sizeof(BlockHeader) + (g.falls                  ? g.low_slot_bytes
                               : g.has_channel_blocks() ? std::min(g.token_slot_bytes, g.channel_slot_bytes)
                                                        : g.token_slot_bytes);
    // A sequence has a block once.
    const auto most_references = checked_mul(h.sequences, h.blocks);
    if (!fits || bytes != h.index_bytes || bytes > rest || bytes > kMostIndexBytes || h.blocks > (rest - bytes) / smallest ||
        (most_references && h.references > *most_references))
        return fail(TA_E_CORRUPT, "%s says more of its contents than it has bytes", file.name());
    if (h.sequences > pool.max_sequences()) {
        return fail(TA_E_LIMIT, "%s has %llu sequences; the pool takes %u at most", file.name(),
                    (unsigned long long)h.sequences, pool.max_sequences());
    }
    std::vector<uint8_t> raw(static_cast<size_t>(bytes));
    TA_RETURN_IF_ERROR(file.read(raw.data(), raw.size()));
    if (hash_bytes(raw.data(), raw.size()) != h.index_hash)
        return fail(TA_E_CORRUPT, "the index of %s is damaged", file.name());
    const uint8_t* at = raw.data();
    take(at, index.sequences, h.sequences);
    take(at, index.references, h.references);
    take(at, index.entries, h.entries);
    take(at, index.states, state ? h.states * pool.open_amax_record() : 0);

    // No hash keeps a hostile file from saying what cannot be.
    bool good = true;
    uint64_t references = 0;
    const auto good_state = [&](uint64_t s) { return has_states ? s < h.states : s == kNoState; };
    for (const SequenceRecord& s : index.sequences) {
        good = good && s.length >= 0 && blocks_for(s.length) <= h.references - references && good_state(s.state);
        if (!good) break;
        references += blocks_for(s.length);
    }
    good = good && references == h.references;
    for (uint64_t b : index.references) good = good && b < h.blocks;
    for (const EntryRecord& e : index.entries)
        good = good && e.block < h.blocks && (e.state == kNoState || good_state(e.state));
    for (float x : index.states) good = good && is_good_amax(x);
    return good ? Status() : fail(TA_E_CORRUPT, "the index of %s says what no pool has", file.name());
}

// Whether the blocks are those that the index speaks of, and no others.
Status check_blocks(const File& file, const Index& index, bool has_states, std::span<const StoredBlock> all) {
    std::vector<bool> used(all.size());
    size_t reference = 0;
    for (const SequenceRecord& r : index.sequences) {
        for (uint64_t b = 0; b < blocks_for(r.length); ++b) {
            const auto i = size_t(index.references[reference++]);
            if (all[i].index != b ||
                int64_t(all[i].tokens) < std::min<int64_t>(kPageTokens, r.length - int64_t(b) * kPageTokens))
                return fail(TA_E_CORRUPT, "a sequence in %s has a block of another place", file.name()).block(int64_t(b));
            used[i] = true;
        }
    }
    for (const EntryRecord& e : index.entries) {
        const StoredBlock& block = all[size_t(e.block)];
        if (block.index != e.index || block.tokens != uint32_t(kPageTokens) || has_states != (e.state != kNoState))
            return fail(TA_E_CORRUPT, "a published block in %s is another one", file.name()).block(int64_t(e.index));
        used[size_t(e.block)] = true;
    }
    if (std::find(used.begin(), used.end(), false) != used.end())
        return fail(TA_E_CORRUPT, "%s has a block that belongs to nothing", file.name());
    return {};
}

}  // namespace

Status save_pool(Pool& pool, const std::string& path, bool published, const Progress& progress, FileSystem& files) {
    const Geometry& g = pool.geometry();
    const Pool::BlockHold holds(pool);
    // Blocks that are held here are not written to.
    auto taken = pool.snapshot_all();
    if (!taken.ok()) return std::move(taken).status();
    const auto all = taken.take();
    std::vector<PrefixStore::Record> entries;
    if (published) entries = pool.prefixes().records();

    Index index;
    Contents contents;
    const size_t record = pool.numerics().universal_open_scale ? pool.open_amax_record() : 0;
    uint64_t states = 0;
    const auto add_state = [&](const std::vector<float>& state) {
        if (record == 0 || state.empty()) return kNoState;
        index.states.insert(index.states.end(), state.begin(), state.end());
        return states++;
    };
    for (const auto& [id, s] : all) {
        index.sequences.push_back({id, s.length, add_state(s.open_amax), pool.tag_of(s)});
        for (size_t b = 0; b < s.blocks.size(); ++b) {
            const Block& block = *s.blocks[b];
            const auto tokens = uint32_t(std::min<int64_t>(kPageTokens, s.length - int64_t(b) * kPageTokens));
            index.references.push_back(contents.add(s.blocks[b], b, block.sealed() ? uint32_t(kPageTokens) : tokens, id));
        }
    }
    std::unordered_map<const std::vector<float>*, uint64_t> known;  // states that entries share
    for (const PrefixStore::Record& r : entries) {
        EntryRecord e{};
        std::copy(r.key.begin(), r.key.end(), e.key);
        e.index = r.index;
        e.block = contents.add(r.block, r.index, uint32_t(kPageTokens), 0);
        e.state = kNoState;
        if (r.open_amax) {
            const auto [at, fresh] = known.emplace(r.open_amax.get(), 0);
            if (fresh) at->second = add_state(*r.open_amax);
            e.state = at->second;
        }
        index.entries.push_back(e);
    }
    std::vector<uint8_t> raw;
    put(raw, index.sequences);
    put(raw, index.references);
    put(raw, index.entries);
    put(raw, index.states);
    if (raw.size() > kMostIndexBytes) return fail(TA_E_LIMIT, "the pool has more sequences and blocks than a file lists");

    return write_new_file(files, path, [&](File& file) -> Status {
        FileHeader h{};
        h.magic = kFormat.magic;
        h.version = kFormat.version;
        h.fingerprint = pool.fingerprint();
        h.sequences = index.sequences.size();
        h.references = index.references.size();
        h.entries = index.entries.size();
        h.states = states;
        h.blocks = contents.items().size();
        h.slot_bytes[0] = g.token_slot_bytes;
        h.slot_bytes[1] = g.channel_slot_bytes;
        h.index_bytes = raw.size();
        h.index_hash = hash_bytes(raw.data(), raw.size());
        h.hash = header_hash(h);
        TA_RETURN_IF_ERROR(file.write(&h, sizeof h));
        TA_RETURN_IF_ERROR(file.write(raw.data(), raw.size()));
        uint64_t total = file.at();
        for (const Contents::Item& c : contents.items()) total += sizeof(BlockHeader) + g.slot_bytes(c.block->kind());
        std::vector<uint8_t> slot;
        for (const Contents::Item& c : contents.items()) {
            if (progress && !progress(file.at(), total)) return stopped(file);
            Status written = write_block(pool, file, *c.block, c.index, c.tokens, slot);
            if (!written.ok()) return name_owner(std::move(written), c.owner);
        }
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
    TA_RETURN_IF_ERROR(pool.check_room_for(h.sequences));
    PrefixStore::Named spaces(pool.prefixes());
    pool.end_forgotten_namespaces();
    std::vector<Tenant> tenants(size_t(h.blocks));  // whose bytes the file says they are
    std::vector<bool> published(size_t(h.blocks));  // and so not to lose bits, should they make room for others
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
    const size_t record = pool.numerics().universal_open_scale ? pool.open_amax_record() : 0;
    StoredBlocks stored;
    stored.count = h.blocks;
    stored.file_bytes = bytes;
    stored.check = [&](std::span<const StoredBlock> all) { return check_blocks(file, index, record > 0, all); };
    stored.claim = [&](uint64_t i, Block& block) {
        if (tenants[size_t(i)] != 0) block.set_tenant(tenants[size_t(i)]);
        if (published[size_t(i)]) pool.blocks().keep_kind(block);
    };
    Result<std::vector<BlockPtr>> read = load_blocks(pool, file, stored, progress);
    if (!read.ok()) return std::move(read).status();
    std::vector<BlockPtr> blocks = read.take();

    const auto state_of = [&](uint64_t s) {
        if (s == kNoState) return std::vector<float>();
        const auto first = index.states.begin() + std::ptrdiff_t(size_t(s) * record);
        return std::vector<float>(first, first + std::ptrdiff_t(record));
    };
    std::vector<Pool::Snapshot> sequences;
    std::vector<LoadedSequence> loaded;
    size_t reference = 0;
    for (const SequenceRecord& r : index.sequences) {
        Pool::Snapshot s;
        s.length = r.length;
        s.open_amax = state_of(r.state);
        s.tenant = spaces.tenant_of(r.space);
        for (uint64_t b = 0; b < blocks_for(r.length); ++b) s.blocks.push_back(blocks[size_t(index.references[reference++])]);
        sequences.push_back(std::move(s));
        loaded.push_back({r.id, 0});
    }
    std::vector<PrefixStore::Record> entries;
    std::unordered_map<uint64_t, PrefixStore::OpenAmax> states;
    for (const EntryRecord& e : index.entries) {
        PrefixStore::OpenAmax& state = states[e.state];
        if (record > 0 && !state) state = std::make_shared<const std::vector<float>>(state_of(e.state));
        PrefixStore::Record r{{}, e.index, blocks[size_t(e.block)], state};
        std::copy(std::begin(e.key), std::end(e.key), r.key.begin());
        entries.push_back(std::move(r));
    }
    blocks.clear();
    Result<std::vector<ta_seq>> ids = pool.adopt_all(std::move(sequences));
    if (!ids.ok()) return std::move(ids).status();
    try {
        pool.prefixes().recover(std::move(entries));
    } catch (...) {
        for (ta_seq id : ids.value()) (void)pool.release(id);
        throw;
    }
    spaces.keep();
    for (size_t i = 0; i < loaded.size(); ++i) loaded[i].loaded = ids.value()[i];
    return loaded;
}

}  // namespace ta
