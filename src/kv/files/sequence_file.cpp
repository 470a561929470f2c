#include "src/kv/files/sequence_file.h"

namespace ta {
namespace {

constexpr FileFormat kFormat{"sequence", 0x51455354, 3};  // "TSEQ" in little endian

struct FileHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved0;
    uint64_t fingerprint;  // of the pool
    int64_t length;        // tokens
    uint64_t blocks;
    uint64_t reserved1;
    uint64_t slot_bytes[2];
    uint64_t index_hash;  // XXH3 of the index, which is between this header and the first block
    SpaceTag space;       // the namespace of its tokens
    uint64_t hash;        // XXH3 of the fields above
};
static_assert(sizeof(FileHeader) == 80);

// The index: a StoredBlock for each block.
uint64_t index_bytes(uint64_t blocks) {
    return blocks * sizeof(StoredBlock);
}

}  // namespace

Status save_sequence(Pool& pool, ta_seq seq, const std::string& path, const Progress& progress, FileSystem& files) {
    return save_sequence(pool, seq, progress,
                         [&](const std::function<Status(File&)>& write) { return write_new_file(files, path, write); });
}

Status save_sequence(Pool& pool, ta_seq seq, const Progress& progress,
                     const std::function<Status(const std::function<Status(File&)>& write)>& into_file) {
    const Geometry& g = pool.geometry();
    const Residency::BlockHold hold(pool.residency());
    // A block owned here is not written to any more: a step that appends copies the open block first.
    Result<Sequences::Snapshot> taken = pool.sequences().snapshot(seq);
    if (!taken.ok()) return std::move(taken).status();
    const Sequences::Snapshot s = taken.take();
    return into_file([&](File& file) -> Status {
        // Header and index are written last: they describe each block as it was when it was written.
        file.go_to(sizeof(FileHeader) + index_bytes(s.blocks.size()));
        uint64_t total = file.at();
        for (const BlockPtr& b : s.blocks) total += sizeof(BlockHeader) + g.slot_bytes(b->kind());
        std::vector<StoredBlock> stored;
        std::vector<uint8_t> slot;
        for (size_t i = 0; i < s.blocks.size(); ++i) {
            if (progress && !progress(file.at(), total)) return stopped(file);
            const Block& block = *s.blocks[i];
            const uint32_t tokens = block.full() ? kPageTokens : uint32_t(s.length - int64_t(i) * kPageTokens);
            Result<StoredBlock> written = write_block(pool, file, block, i, tokens, slot);
            if (!written.ok()) return std::move(written).status();
            stored.push_back(written.value());
        }
        std::vector<uint8_t> index;
        put(index, stored);
        FileHeader h{};
        h.magic = kFormat.magic;
        h.version = kFormat.version;
        h.fingerprint = pool.fingerprint();
        h.length = s.length;
        h.blocks = s.blocks.size();
        h.slot_bytes[0] = g.token_slot_bytes;
        h.slot_bytes[1] = g.channel_slot_bytes;
        h.index_hash = hash_bytes(index.data(), index.size());
        h.space = pool.tag_of(s);
        h.hash = header_hash(h);
        file.go_to(0);
        TA_RETURN_IF_ERROR(file.write(&h, sizeof h));
        TA_RETURN_IF_ERROR(file.write(index.data(), index.size()));
        TA_RETURN_IF_ERROR(file.sync());
        return progress && !progress(total, total) ? stopped(file) : Status();
    });
}

Result<ta_seq> load_sequence(Pool& pool, const std::string& path, const Progress& progress, FileSystem& files) {
    File file(files, path);
    FileHeader h;
    uint64_t bytes = 0;
    TA_RETURN_IF_ERROR(open_with_header(pool, kFormat, file, h, bytes));
    if (h.blocks > bytes / least_block_bytes(pool.geometry()) || h.length < 0 || uint64_t(h.length) > h.blocks * kPageTokens ||
        uint64_t(h.length) + kPageTokens <= h.blocks * kPageTokens) {
        return fail(TA_E_CORRUPT, "%s says %llu blocks for %lld tokens", file.name(), (unsigned long long)h.blocks,
                    (long long)h.length);
    }
    std::vector<StoredBlock> stored;
    Sequences::Snapshot s;
    s.length = h.length;
    IndexReader index(file, index_bytes(h.blocks));
    TA_RETURN_IF_ERROR(read_stored_blocks(pool, index, h.blocks, stored, [&](uint64_t i, const StoredBlock& b) {
        const bool is_end = i + 1 == h.blocks && h.length == int64_t(i) * kPageTokens + int64_t(b.tokens);
        const bool may_have_passed = int64_t(i) < pool.geometry().first_needed(h.length);
        return b.index == i && (b.tokens == uint32_t(kPageTokens) || is_end) &&
               (!is_passed(PageKind(b.kind)) || may_have_passed);
    }));
    TA_RETURN_IF_ERROR(index.end(h.index_hash));
    TA_RETURN_IF_ERROR(check_end(pool, file, bytes, stored));
    PrefixStore::Named spaces(pool.prefixes());
    pool.end_forgotten_namespaces();
    s.tenant = spaces.tenant_of(h.space);
    TA_RETURN_IF_ERROR(spaces.complete());
    TA_RETURN_IF_ERROR(pool.sequences().check_room_for(1));
    const auto claim = [&](uint64_t, Block& block) {
        if (s.tenant != 0) block.set_tenant(s.tenant);
    };
    Result<std::vector<BlockPtr>> blocks = load_blocks(pool, file, stored, bytes, claim, progress);
    if (!blocks.ok()) return std::move(blocks).status();
    s.blocks = blocks.take();
    Result<ta_seq> seq = pool.sequences().adopt(std::move(s));
    if (seq.ok()) spaces.keep();
    return seq;
}

}  // namespace ta
