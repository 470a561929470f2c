#include "src/kv/sequence_file.h"

namespace ta {
namespace {

constexpr FileFormat kFormat{"sequence", 0x51455354, 2};  // "TSEQ" in little endian

struct FileHeader {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved0;
    uint64_t fingerprint;  // of the pool
    int64_t length;        // tokens
    uint64_t blocks;
    uint64_t open_amax;  // floats after this header: largest magnitudes of universal scales
    uint64_t slot_bytes[2];
    uint64_t amax_hash;  // XXH3 of those floats
    SpaceTag space;      // that it belongs to
    uint64_t hash;       // XXH3 of the fields above
};
static_assert(sizeof(FileHeader) == 80);

}  // namespace

Status save_sequence(Pool& pool, ta_seq seq, const std::string& path, const Progress& progress, FileSystem& files) {
    const Geometry& g = pool.geometry();
    const Pool::BlockHold hold(pool);
    // Blocks that are held here are not written to: who appends makes a copy of the open one.
    Result<Pool::Snapshot> taken = pool.snapshot(seq);
    if (!taken.ok()) return std::move(taken).status();
    const Pool::Snapshot s = taken.take();
    return write_new_file(files, path, [&](File& file) -> Status {
        FileHeader h{};
        h.magic = kFormat.magic;
        h.version = kFormat.version;
        h.fingerprint = pool.fingerprint();
        h.length = s.length;
        h.blocks = s.blocks.size();
        h.open_amax = s.open_amax.size();
        h.slot_bytes[0] = g.token_slot_bytes;
        h.slot_bytes[1] = g.channel_slot_bytes;
        h.amax_hash = hash_bytes(s.open_amax.data(), s.open_amax.size() * sizeof(float));
        h.space = pool.tag_of(s);
        h.hash = header_hash(h);
        TA_RETURN_IF_ERROR(file.write(&h, sizeof h));
        TA_RETURN_IF_ERROR(file.write(s.open_amax.data(), s.open_amax.size() * sizeof(float)));
        uint64_t total = file.at();
        for (const BlockPtr& b : s.blocks) total += sizeof(BlockHeader) + g.slot_bytes(b->kind());
        std::vector<uint8_t> slot;
        for (size_t i = 0; i < s.blocks.size(); ++i) {
            if (progress && !progress(file.at(), total)) return stopped(file);
            const Block& block = *s.blocks[i];
            const uint32_t tokens = block.sealed() ? kPageTokens : uint32_t(s.length - int64_t(i) * kPageTokens);
            TA_RETURN_IF_ERROR(write_block(pool, file, block, i, tokens, slot));
        }
        TA_RETURN_IF_ERROR(file.sync());
        return progress && !progress(total, total) ? stopped(file) : Status();
    });
}

Result<ta_seq> load_sequence(Pool& pool, const std::string& path, const Progress& progress, FileSystem& files) {
    File file(files, path);
    FileHeader h;
    uint64_t bytes = 0;
    TA_RETURN_IF_ERROR(open_with_header(pool, kFormat, file, h, bytes));
    const uint64_t most_blocks = bytes / sizeof(BlockHeader),
                   amax = pool.numerics().universal_open_scale ? pool.open_amax_record() : 0;
    if (h.open_amax != amax)
        return fail(TA_E_INVALID, "%s is of a pool with%s universal scales", file.name(), amax ? "out" : "");
    if (h.blocks > most_blocks || h.length < 0 || uint64_t(h.length) > h.blocks * kPageTokens ||
        uint64_t(h.length) + kPageTokens <= h.blocks * kPageTokens) {
        return fail(TA_E_CORRUPT, "%s says %llu blocks for %lld tokens", file.name(), (unsigned long long)h.blocks,
                    (long long)h.length);
    }
    Pool::Snapshot s;
    s.length = h.length;
    PrefixStore::Named spaces(pool.prefixes());
    pool.end_forgotten_namespaces();
    s.tenant = spaces.tenant_of(h.space);
    TA_RETURN_IF_ERROR(spaces.complete());
    s.open_amax.resize(amax);
    TA_RETURN_IF_ERROR(file.read(s.open_amax.data(), amax * sizeof(float)));
    bool good = hash_bytes(s.open_amax.data(), amax * sizeof(float)) == h.amax_hash;
    for (float x : s.open_amax) good = good && is_good_amax(x);
    if (!good) return fail(TA_E_CORRUPT, "the universal scales in %s are damaged", file.name());
    TA_RETURN_IF_ERROR(pool.check_room_for(1));
    StoredBlocks stored;
    stored.count = h.blocks;
    stored.file_bytes = bytes;
    stored.in_order = true;
    stored.check = [&](std::span<const StoredBlock> all) -> Status {
        for (size_t i = 0; i < all.size(); ++i) {
            const uint32_t tokens = all[i].tokens;
            const bool is_end = i + 1 == all.size() && h.length == int64_t(i) * kPageTokens + int64_t(tokens);
            if (tokens < uint32_t(kPageTokens) && !is_end)
                return fail(TA_E_CORRUPT, "the header of a block in %s is damaged", file.name()).block(int64_t(i));
        }
        return {};
    };
    stored.claim = [&](uint64_t, Block& block) {
        if (s.tenant != 0) block.set_tenant(s.tenant);
    };
    Result<std::vector<BlockPtr>> blocks = load_blocks(pool, file, stored, progress);
    if (!blocks.ok()) return std::move(blocks).status();
    s.blocks = blocks.take();
    Result<ta_seq> seq = pool.adopt(std::move(s));
    if (seq.ok()) spaces.keep();
    return seq;
}

}  // namespace ta
