#include "src/kv/sequence_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "kernels/format/hash.h"
#include "kernels/format/slot.h"

namespace ta {
namespace {

constexpr uint32_t kFileMagic = 0x51455354, kBlockMagic = 0x4B4C4254;  // "TSEQ", "TBLK" in little endian
constexpr uint16_t kFileVersion = 1;

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
    uint64_t hash;       // XXH3 of the fields above
};
static_assert(sizeof(FileHeader) == 72);

struct BlockHeader {
    uint32_t magic;
    uint8_t kind;
    uint8_t reserved0[3];
    uint32_t tokens;
    uint32_t reserved1;
    uint64_t index;
    uint64_t content_id;  // that the slot's trailer and hashes name
    uint64_t slot_hash;   // XXH3 of the slot that follows
    uint64_t hash;        // XXH3 of the fields above
};
static_assert(sizeof(BlockHeader) == 48);

template <class Header>
uint64_t header_hash(const Header& h) {
    return hash_bytes(&h, offsetof(Header, hash));
}

class File {
  public:
    File(FileSystem& files, const std::string& path) : files_(files), path_(path) {}
    ~File() {
        if (fd_ >= 0) files_.close(fd_);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    Status open(int flags) {
        fd_ = files_.open(path_.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600);
        return fd_ < 0 ? failed(fd_, "opening") : Status();
    }
    int fd() const { return fd_; }
    uint64_t at() const { return at_; }
    Status write(const void* data, size_t bytes) { return move(static_cast<const uint8_t*>(data), nullptr, bytes); }
    Status read(void* data, size_t bytes) { return move(nullptr, static_cast<uint8_t*>(data), bytes); }
    Status sync() {
        const int e = files_.fsync(fd_);
        return e < 0 ? failed(e, "writing") : Status();
    }
    Status failed(int64_t error, const char* what) const {
        return fail(is_lack_of_space(error) ? TA_E_TIER_FULL : TA_E_IO, "%s %s: %s", what, path_.c_str(),
                    error_text(error).c_str());
    }

  private:
    Status move(const uint8_t* from, uint8_t* to, size_t bytes) {
        constexpr int kAttempts = 16;
        for (int attempt = 0; bytes > 0;) {
            const int64_t n = from ? files_.pwrite(fd_, from, bytes, at_) : files_.pread(fd_, to, bytes, at_);
            if (n == -EINTR || n == -EAGAIN) {
                if (++attempt < kAttempts) continue;
            }
            if (n < 0) return failed(n, from ? "writing" : "reading");
            if (n == 0) {
                return from ? fail(TA_E_IO, "writing %s: nothing was written", path_.c_str())
                            : fail(TA_E_CORRUPT, "%s ends early", path_.c_str());
            }
            at_ += uint64_t(n);
            bytes -= size_t(n);
            if (from) from += n;
            if (to) to += n;
        }
        return {};
    }

    FileSystem& files_;
    const std::string& path_;
    int fd_ = -1;
    uint64_t at_ = 0;
};

Status stopped(const std::string& path) {
    return fail(TA_E_CANCELLED, "the progress callback stopped the work on %s", path.c_str());
}

// An open block with zeros in place of the tokens that it lacks: its slot may have held anything before.
void clear_missing_tokens(const Pool& pool, uint32_t tokens, uint8_t* slot) {
    const Geometry& g = pool.geometry();
    const cpu::PageCodec& codec = *pool.context().kernels().codec;
    const auto codes = std::make_unique<cpu::HeadStage1>();
    const size_t piece_bytes = TokenLayout(int(g.head_dim)).bytes();
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
        for (uint32_t head = 0; head < g.kv_heads; ++head) {
            uint8_t* piece = slot + g.page_offset(PageKind::kToken, layer) + g.head_offset(PageKind::kToken, layer, head);
            codec.load_token_piece(piece, int(g.head_dim), int(tokens), *codes);
            std::memset(piece, 0, piece_bytes);
            codec.store_token_piece(*codes, int(g.head_dim), 0, int(tokens), piece);
        }
    }
}

// The block's slot in host memory, with a trailer, checked.
Status copy_slot(Pool& pool, const Block& block, uint64_t index, uint32_t tokens, std::vector<uint8_t>& slot) {
    const Geometry& g = pool.geometry();
    const ReadingBlocks reading(pool.blocks());
    slot.resize(g.slot_bytes(block.kind()));
    if (block.tier() == TierKind::kDisk) return pool.read_from_disk(block, index, slot.data());
    Device* device = pool.context().device();
    if (device && block.tier() == TierKind::kDevice) {
        TA_RETURN_IF_ERROR(device->read(slot.data(), block.slot(), slot.size()));
    } else {
        std::memcpy(slot.data(), block.slot(), slot.size());
    }
    if (block.sealed()) return block.verify(g, pool.fingerprint(), index, slot.data());
    clear_missing_tokens(pool, tokens, slot.data());
    block.write_trailer(g, pool.fingerprint(), index, tokens, slot.data());
    return {};
}

// Scales that attention multiplies with must be numbers: hashes do not keep a hostile file from having others.
bool has_good_scales(const Geometry& g, PageKind kind, uint32_t tokens, const uint8_t* slot) {
    const auto good = [](const uint8_t* at) {
        float x;
        std::memcpy(&x, at, sizeof x);
        return x >= 0.0f && x < 0x1p120f;
    };
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
        for (uint32_t head = 0; head < g.kv_heads; ++head) {
            const uint8_t* piece = slot + g.page_offset(kind, layer) + g.head_offset(kind, layer, head);
            if (kind == PageKind::kChannel) {
                const ChannelLayout layout = g.channel_layout(layer, head);
                if (!good(piece + layout.k_scale()) || !good(piece + layout.v_scale())) return false;
                continue;
            }
            const TokenLayout layout(int(g.head_dim));
            for (uint32_t t = 0; t < tokens; ++t) {
                if (!good(piece + layout.k_scale() + 4 * t) || !good(piece + layout.v_scale() + 4 * t)) return false;
            }
        }
    }
    return true;
}

}  // namespace

Status save_sequence(Pool& pool, ta_seq seq, const std::string& path, const Progress& progress, FileSystem& files) {
    const Geometry& g = pool.geometry();
    // Blocks that are held here are not written to: who appends makes a copy of the open one.
    Result<Pool::Snapshot> taken = pool.snapshot(seq);
    if (!taken.ok()) return std::move(taken).status();
    const Pool::Snapshot s = taken.take();

    FileInfo info;
    if (files.lstat(path.c_str(), info) == 0) return fail(TA_E_INVALID, "%s exists", path.c_str());
    static std::atomic<uint64_t> saves{0};
    const std::string temporary = path + ".new-" + std::to_string(getpid()) + "-" + std::to_string(saves.fetch_add(1));
    File file(files, temporary);
    TA_RETURN_IF_ERROR(file.open(O_WRONLY | O_CREAT | O_EXCL));
    struct Unfinished {  // unlinked by every way out of here, exceptions included
        FileSystem& files;
        const char* path;
        ~Unfinished() {
            if (path) files.unlink(path);
        }
    } unfinished{files, temporary.c_str()};
    const auto write_all = [&]() -> Status {
        FileHeader h{};
        h.magic = kFileMagic;
        h.version = kFileVersion;
        h.fingerprint = pool.fingerprint();
        h.length = s.length;
        h.blocks = s.blocks.size();
        h.open_amax = s.open_amax.size();
        h.slot_bytes[0] = g.token_slot_bytes;
        h.slot_bytes[1] = g.channel_slot_bytes;
        h.amax_hash = hash_bytes(s.open_amax.data(), s.open_amax.size() * sizeof(float));
        h.hash = header_hash(h);
        TA_RETURN_IF_ERROR(file.write(&h, sizeof h));
        TA_RETURN_IF_ERROR(file.write(s.open_amax.data(), s.open_amax.size() * sizeof(float)));
        uint64_t total = file.at();
        for (const BlockPtr& b : s.blocks) total += sizeof(BlockHeader) + g.slot_bytes(b->kind());
        std::vector<uint8_t> slot;
        for (size_t i = 0; i < s.blocks.size(); ++i) {
            if (progress && !progress(file.at(), total)) return stopped(path);
            const Block& block = *s.blocks[i];
            BlockHeader b{};
            b.magic = kBlockMagic;
            b.kind = uint8_t(block.kind());
            b.tokens = block.sealed() ? kPageTokens : uint32_t(s.length - int64_t(i) * kPageTokens);
            b.index = i;
            b.content_id = block.content_id();
            if (Status c = copy_slot(pool, block, i, b.tokens, slot); !c.ok()) return std::move(c).block(int64_t(i));
            b.slot_hash = hash_bytes(slot.data(), slot.size());
            b.hash = header_hash(b);
            TA_RETURN_IF_ERROR(file.write(&b, sizeof b));
            TA_RETURN_IF_ERROR(file.write(slot.data(), slot.size()));
        }
        TA_RETURN_IF_ERROR(file.sync());
        if (progress && !progress(total, total)) return stopped(path);
        const int e = files.rename(temporary.c_str(), path.c_str());
        if (e == -EEXIST) return fail(TA_E_INVALID, "%s exists", path.c_str());
        return e < 0 ? file.failed(e, "renaming") : Status();
    };
    Status status = write_all();
    if (status.ok()) unfinished.path = nullptr;
    return status;
}

Result<ta_seq> load_sequence(Pool& pool, const std::string& path, const Progress& progress, FileSystem& files) {
    const Geometry& g = pool.geometry();
    TA_RETURN_IF_ERROR(pool.check_open());
    File file(files, path);
    TA_RETURN_IF_ERROR(file.open(O_RDONLY | O_NONBLOCK));
    FileInfo info;
    if (const int e = files.fstat(file.fd(), info); e < 0) return file.failed(e, "looking at");
    if (!info.regular) return fail(TA_E_INVALID, "%s is no regular file", path.c_str());
    FileHeader h;
    if (info.bytes < sizeof h) return fail(TA_E_CORRUPT, "%s is too short for a sequence", path.c_str());
    TA_RETURN_IF_ERROR(file.read(&h, sizeof h));
    if (h.magic != kFileMagic || h.hash != header_hash(h))
        return fail(TA_E_CORRUPT, "%s is no sequence, or damaged", path.c_str());
    if (h.version != kFileVersion)
        return fail(TA_E_UNSUPPORTED, "%s has version %u; this library reads 1", path.c_str(), h.version);
    if (h.fingerprint != pool.fingerprint() || h.slot_bytes[0] != g.token_slot_bytes ||
        h.slot_bytes[1] != g.channel_slot_bytes) {
        return fail(TA_E_INVALID, "%s is of a pool with another shape or other numeric settings", path.c_str());
    }
    const uint64_t most_blocks = info.bytes / sizeof(BlockHeader),
                   amax = pool.numerics().universal_open_scale ? pool.open_amax_record() : 0;
    if (h.blocks > most_blocks || h.length < 0 || uint64_t(h.length) > h.blocks * kPageTokens ||
        uint64_t(h.length) + kPageTokens <= h.blocks * kPageTokens || h.open_amax != amax) {
        return fail(TA_E_CORRUPT, "%s says %llu blocks for %lld tokens", path.c_str(), (unsigned long long)h.blocks,
                    (long long)h.length);
    }
    Pool::Snapshot s;
    s.length = h.length;
    s.open_amax.resize(amax);
    TA_RETURN_IF_ERROR(file.read(s.open_amax.data(), amax * sizeof(float)));
    bool good = hash_bytes(s.open_amax.data(), amax * sizeof(float)) == h.amax_hash;
    for (float x : s.open_amax) good = good && x >= 0.0f && std::isfinite(x);
    if (!good) return fail(TA_E_CORRUPT, "the universal scales in %s are damaged", path.c_str());
    std::vector<uint8_t> slot;
    for (uint64_t i = 0; i < h.blocks; ++i) {
        if (progress && !progress(file.at(), info.bytes)) return stopped(path);
        BlockHeader b;
        TA_RETURN_IF_ERROR(file.read(&b, sizeof b));
        const bool last = i + 1 == h.blocks;
        const auto kind = PageKind(b.kind);
        if (b.magic != kBlockMagic || b.hash != header_hash(b) || b.index != i || b.kind > 1 || g.slot_bytes(kind) == 0 ||
            b.tokens == 0 || b.tokens > uint32_t(kPageTokens) ||
            (b.tokens < uint32_t(kPageTokens) &&
             (!last || kind != PageKind::kToken || h.length != int64_t(i) * kPageTokens + int64_t(b.tokens)))) {
            return fail(TA_E_CORRUPT, "the header of a block in %s is damaged", path.c_str()).block(int64_t(i));
        }
        slot.resize(g.slot_bytes(kind));
        TA_RETURN_IF_ERROR(file.read(slot.data(), slot.size()));
        if (hash_bytes(slot.data(), slot.size()) != b.slot_hash || !has_good_scales(g, kind, b.tokens, slot.data()))
            return fail(TA_E_CORRUPT, "a block in %s is damaged", path.c_str()).block(int64_t(i));
        TA_RETURN_IF_ERROR(verify_slot(g, kind, slot.data(), pool.fingerprint(), i, b.content_id, b.tokens));
        Result<BlockPtr> block = pool.new_block(kind, s.blocks);
        if (!block.ok()) return std::move(block).status().block(int64_t(i));
        // The same bytes are new content here.
        block.value()->write_trailer(g, pool.fingerprint(), i, b.tokens, slot.data());
        if (Device* device = pool.context().device()) {
            TA_RETURN_IF_ERROR(device->write(block.value()->slot(), slot.data(), slot.size()));
        } else {
            std::memcpy(block.value()->slot(), slot.data(), slot.size());
        }
        if (b.tokens == uint32_t(kPageTokens)) block.value()->mark_sealed();
        s.blocks.push_back(block.take());
    }
    if (file.at() != info.bytes) return fail(TA_E_CORRUPT, "%s goes on behind its last block", path.c_str());
    if (progress && !progress(info.bytes, info.bytes)) return stopped(path);
    return pool.adopt(std::move(s));
}

}  // namespace ta
