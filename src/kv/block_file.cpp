#include "src/kv/block_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/format/slot.h"

namespace ta {
namespace {

constexpr int kMostLeftBehind = 1000;

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
            if (kind != PageKind::kToken) {
                const ChannelLayout layout = g.channel_layout(kind, layer, head);
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

// Reads blocks one after the other, and the rest of them ahead where that must be known to be good.
class BlockLoader {
  public:
    BlockLoader(Pool& pool, File& file, const StoredBlocks& blocks, const Progress& progress)
        : pool_(pool), file_(file), blocks_(blocks), progress_(progress) {}

    Result<std::vector<BlockPtr>> load() {
        std::vector<BlockPtr> loaded;
        Pool::Loading mine;  // the same with their indices
        Pool::LoadHold others_see(pool_, mine);
        std::vector<uint8_t> slot;
        for (uint64_t i = 0; i < blocks_.count; ++i) {
            TA_RETURN_IF_ERROR(go_on(file_.at()));
            BlockHeader header;
            TA_RETURN_IF_ERROR(read(i, header, slot));
            Result<BlockPtr> block = take(i, mine);
            if (!block.ok()) return std::move(block).status().block(int64_t(header.index));
            blocks_.claim(i, *block.value());
            TA_RETURN_IF_ERROR(fill(*block.value(), header, slot));
            loaded.push_back(block.value());
            others_see.add({block.take(), header.index});
        }
        TA_RETURN_IF_ERROR(check_all());
        TA_RETURN_IF_ERROR(go_on(file_.at()));
        return loaded;
    }

  private:
    Status go_on(uint64_t done) const { return progress_ && !progress_(done, blocks_.file_bytes) ? stopped(file_) : Status(); }

    // Block i, which is next in the file, into host memory, and what there is to be known of it without the others.
    Status read(uint64_t i, BlockHeader& b, std::vector<uint8_t>& slot) {
        const Geometry& g = pool_.geometry();
        TA_RETURN_IF_ERROR(file_.read(&b, sizeof b));
        const auto kind = PageKind(b.kind);
        if (b.magic != kBlockMagic || b.hash != header_hash(b) || (blocks_.in_order && b.index != i) || b.kind >= kPageKinds ||
            g.slot_bytes(kind) == 0 || b.tokens == 0 || b.tokens > uint32_t(kPageTokens) ||
            (kind != PageKind::kToken && (b.tokens < uint32_t(kPageTokens) || b.index < pool_.numerics().sink_blocks))) {
            Status s = fail(TA_E_CORRUPT, "the header of a block in %s is damaged", file_.name());
            return blocks_.in_order ? std::move(s).block(int64_t(i)) : std::move(s);
        }
        slot.resize(g.slot_bytes(kind));
        TA_RETURN_IF_ERROR(file_.read(slot.data(), slot.size()));
        if (hash_bytes(slot.data(), slot.size()) != b.slot_hash || !has_good_scales(g, kind, b.tokens, slot.data()))
            return fail(TA_E_CORRUPT, "a block in %s is damaged", file_.name()).block(int64_t(b.index));
        TA_RETURN_IF_ERROR(verify_slot(g, kind, slot.data(), pool_.fingerprint(), b.index, b.content_id, b.tokens));
        seen_.resize(std::max(seen_.size(), size_t(i) + 1));
        seen_[size_t(i)] = {kind, b.tokens, b.index};
        return {};
    }

    Status check_all() const {
        if (file_.at() != blocks_.file_bytes) return fail(TA_E_CORRUPT, "%s goes on behind its last block", file_.name());
        return blocks_.check(seen_);
    }

    // A block for the one that was read, number i.
    Result<BlockPtr> take(uint64_t i, Pool::Loading& mine) {
        const PageKind kind = seen_[size_t(i)].kind;
        Result<std::vector<BlockPtr>> taken = pool_.blocks().acquire({&kind, 1});
        if (taken.ok()) return std::move(taken.value()[0]);
        if (Status s = std::move(taken).status(); s.code() != TA_E_TIER_FULL) return s;
        if (!may_make_room_) TA_RETURN_IF_ERROR(look_ahead(i));
        may_make_room_ = true;
        return pool_.new_block(kind, mine);
    }

    // Checks what lies behind block i, and comes back.
    Status look_ahead(uint64_t i) {
        const uint64_t here = file_.at();
        BlockHeader header;
        std::vector<uint8_t> slot;
        for (uint64_t next = i + 1; next < blocks_.count; ++next) {
            TA_RETURN_IF_ERROR(go_on(here));
            TA_RETURN_IF_ERROR(read(next, header, slot));
        }
        TA_RETURN_IF_ERROR(check_all());
        uint64_t bytes = 0;
        for (size_t next = size_t(i); next < seen_.size(); ++next) bytes += pool_.geometry().slot_bytes(seen_[next].kind);
        file_.go_to(here);
        return pool_.check_may_take_in(bytes);
    }

    // The block's bytes, which are new content here.
    Status fill(Block& block, const BlockHeader& b, std::vector<uint8_t>& slot) {
        block.write_trailer(pool_.geometry(), pool_.fingerprint(), b.index, b.tokens, slot.data());
        if (Device* device = pool_.context().device()) {
            TA_RETURN_IF_ERROR(device->write(block.slot(), slot.data(), slot.size()));
        } else {
            std::memcpy(block.slot(), slot.data(), slot.size());
        }
        if (b.tokens == uint32_t(kPageTokens)) block.mark_sealed();
        return {};
    }

    Pool& pool_;
    File& file_;
    const StoredBlocks& blocks_;
    const Progress& progress_;
    std::vector<StoredBlock> seen_;  // by their number in the file
    bool may_make_room_ = false;     // all of the file is good
};

}  // namespace

Status File::open(int flags) {
    fd_ = files_.open(path_.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600);
    return fd_ < 0 ? failed(fd_, "opening") : Status();
}

Status File::open_regular(uint64_t& bytes) {
    TA_RETURN_IF_ERROR(open(O_RDONLY | O_NONBLOCK));
    FileInfo info;
    if (const int e = files_.fstat(fd_, info); e < 0) return failed(e, "looking at");
    if (!info.regular) return fail(TA_E_INVALID, "%s is no regular file", name());
    bytes = info.bytes;
    return {};
}

Status File::sync() {
    const int e = files_.fsync(fd_);
    return e < 0 ? failed(e, "writing") : Status();
}

Status File::failed(int64_t error, const char* what) const {
    return fail(is_lack_of_space(error) ? TA_E_TIER_FULL : TA_E_IO, "%s %s: %s", what, name(), error_text(error).c_str());
}

Status File::transfer(const uint8_t* from, uint8_t* to, size_t bytes) {
    constexpr int kAttempts = 16;
    for (int attempt = 0; bytes > 0;) {
        const int64_t n = from ? files_.pwrite(fd_, from, bytes, at_) : files_.pread(fd_, to, bytes, at_);
        if (n == -EINTR || n == -EAGAIN) {
            if (++attempt < kAttempts) continue;
        }
        if (n < 0) return failed(n, from ? "writing" : "reading");
        if (n == 0) {
            return from ? fail(TA_E_IO, "writing %s: nothing was written", name())
                        : fail(TA_E_CORRUPT, "%s ends early", name());
        }
        at_ += uint64_t(n);
        bytes -= size_t(n);
        if (from) from += n;
        if (to) to += n;
    }
    return {};
}

Status stopped(const File& file) {
    return fail(TA_E_CANCELLED, "the progress callback stopped the work on %s", file.name());
}

Status write_new_file(FileSystem& files, const std::string& path, const std::function<Status(File&)>& write) {
    FileInfo info;
    if (files.lstat(path.c_str(), info) == 0) return fail(TA_E_INVALID, "%s exists", shown(path).c_str());
    // What a process of the same number left that was killed while it saved stays in the way of nobody.
    static std::atomic<uint64_t> saves{0};
    std::string temporary;
    for (int attempt = 0; attempt < kMostLeftBehind; ++attempt) {
        temporary = name_beside(path, ".new-" + std::to_string(getpid()) + "-" + std::to_string(saves.fetch_add(1)));
        if (files.lstat(temporary.c_str(), info) < 0) break;
    }
    File file(files, temporary);
    TA_RETURN_IF_ERROR(file.open(O_WRONLY | O_CREAT | O_EXCL));
    struct Removal {  // also when memory runs out
        FileSystem& files;
        const char* path;
        ~Removal() {
            if (path) files.unlink(path);
        }
    } removal{files, temporary.c_str()};
    TA_RETURN_IF_ERROR(write(file));
    const int e = files.rename(temporary.c_str(), path.c_str());
    if (e == -EEXIST) return fail(TA_E_INVALID, "%s exists", shown(path).c_str());
    if (e < 0) return file.failed(e, "renaming");
    removal.path = nullptr;
    return {};
}

Result<PageKind> copy_slot(Pool& pool, const Block& block, uint64_t index, uint32_t tokens, std::vector<uint8_t>& slot) {
    const Geometry& g = pool.geometry();
    if (block.dropped()) return fail(TA_E_STATE, "the block was dropped");
    const ReadingBlocks reading(pool.blocks());
    const Place at = pool.blocks().place_of(block);
    slot.resize(g.slot_bytes(at.kind));
    if (at.tier == TierKind::kDisk) {
        TA_RETURN_IF_ERROR(pool.read_from_disk(block, index, slot.data()));
        return at.kind;
    }
    TA_RETURN_IF_ERROR(pool.read_memory(at, slot.data()));
    if (block.sealed()) {
        TA_RETURN_IF_ERROR(block.verify(g, pool.fingerprint(), index, slot.data(), at.kind));
        return at.kind;
    }
    clear_missing_tokens(pool, tokens, slot.data());
    block.write_trailer(g, pool.fingerprint(), index, tokens, slot.data());
    return at.kind;
}

Status write_block(Pool& pool, File& file, const Block& block, uint64_t index, uint32_t tokens, std::vector<uint8_t>& slot) {
    BlockHeader b{};
    b.magic = kBlockMagic;
    b.tokens = tokens;
    b.index = index;
    b.content_id = block.content_id();
    Result<PageKind> kind = copy_slot(pool, block, index, b.tokens, slot);
    if (!kind.ok()) return std::move(kind).status().block(int64_t(index));
    b.kind = uint8_t(kind.value());
    b.slot_hash = hash_bytes(slot.data(), slot.size());
    b.hash = header_hash(b);
    TA_RETURN_IF_ERROR(file.write(&b, sizeof b));
    return file.write(slot.data(), slot.size());
}

Result<std::vector<BlockPtr>> load_blocks(Pool& pool, File& file, const StoredBlocks& blocks, const Progress& progress) {
    return BlockLoader(pool, file, blocks, progress).load();
}

}  // namespace ta
