#include "src/kv/files/block_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>

#include "kernels/format/slot.h"
#include "kernels/format/turning.h"

namespace ta {
namespace {

// Part of the names of unfinished files, if these need a name.
constexpr char kSaving[] = ".saving-";

bool is_named(FileSystem& files, int fd, const std::string& path) {
    FileInfo open, there;
    return files.fstat(fd, open) == 0 && files.lstat(path.c_str(), there) == 0 && there.regular &&
           open.device == there.device && open.inode == there.inode;
}

// True if this result of lock() means that the file system has no locks.
bool has_no_locks(int r) {
    return r == -ENOLCK || r == -EOPNOTSUPP || r == -ENOSYS || r == -EINVAL;
}

// A file that gets its name when it is complete. Until then it has none, so that a killed process leaves nothing. If the file
// system has no nameless files, it lies beside its place under a temporary name, locked. The lock ends with the process; the
// next save in the folder removes files without locks.
class NewFile {
  public:
    NewFile(FileSystem& files, const std::string& path) : files_(files), path_(path), file_(files, path) {}
    ~NewFile() {
        if (!temporary_.empty()) files_.unlink(temporary_.c_str());
        if (folder_ >= 0) files_.close(folder_);
    }
    NewFile(const NewFile&) = delete;
    NewFile& operator=(const NewFile&) = delete;
    File& file() { return file_; }

    Status make() {
        const std::string folder = folder_of(path_);
        folder_ = files_.open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
        if (folder_ < 0) return file_.failed(folder_, "opening the folder of");
        remove_left_behind(folder);
        if (file_.open(folder, O_WRONLY | O_TMPFILE) >= 0 && files_.can_link(file_.fd())) return {};
        static std::atomic<uint64_t> saves{0};
        for (;;) {
            file_.close();
            std::string name =
                name_beside(path_, kSaving + std::to_string(getpid()) + "-" + std::to_string(saves.fetch_add(1)));
            const int fd = file_.open(name, O_WRONLY | O_CREAT | O_EXCL);
            if (fd == -EEXIST) continue;  // a file of another machine or container
            if (fd < 0) return file_.failed(fd, "making");
            temporary_ = std::move(name);
            const int locked = files_.lock(fd);
            if (locked < 0 && locked != -EWOULDBLOCK && !has_no_locks(locked)) return file_.failed(locked, "locking");
            FileInfo info;
            if (const int e = files_.fstat(fd, info); e < 0) return file_.failed(e, "looking at");
            if (locked != -EWOULDBLOCK && info.links > 0) return {};
            temporary_.clear();  // another save has locked it first, and removes it
        }
    }

    // Gives the complete, synced file its name. On failure neither name nor file is left, if possible.
    Status give_name() {
        const int named =
            temporary_.empty() ? files_.link(file_.fd(), path_.c_str()) : files_.rename(temporary_.c_str(), path_.c_str());
        if (named == -EEXIST) return fail(TA_E_INVALID, "%s exists", file_.name());
        if (named < 0) return file_.failed(named, "naming");
        temporary_.clear();
        const int synced = files_.fsync(folder_);
        // Some file systems sync only files, not folders.
        if (synced >= 0 || synced == -EINVAL || synced == -EOPNOTSUPP || synced == -ENOSYS) return {};
        Status s = file_.failed(synced, "syncing the folder of");
        if (is_named(files_, file_.fd(), path_) && files_.unlink(path_.c_str()) >= 0) return s;
        return std::move(s).because("the file is there and complete, but may be gone after a power failure");
    }

  private:
    void remove_left_behind(const std::string& folder) {
        std::vector<std::string> names;
        const auto of_a_save = [&](const char* name) {
            const std::string_view n = name;
            if (n.starts_with(kOwnName) && n.find(kSaving) != n.npos) names.emplace_back(n);
        };
        (void)files_.list(folder.c_str(), of_a_save);  // files that cannot be listed stay
        for (const std::string& name : names) {
            const std::string at = folder == "." ? name : folder + name;
            File left(files_, at);
            if (left.open(at, O_WRONLY | O_NONBLOCK) >= 0 && files_.lock(left.fd()) == 0 && is_named(files_, left.fd(), at))
                files_.unlink(at.c_str());
        }
    }

    FileSystem& files_;
    const std::string path_;
    File file_;
    int folder_ = -1;
    std::string temporary_;  // the file's temporary name, if it has one
};

// Zeroes the tokens that an open block lacks: its slot may have held anything before.
void clear_missing_tokens(const Pool& pool, uint32_t tokens, uint8_t* slot) {
    const Geometry& g = pool.geometry();
    const cpu::PageCodec& codec = *pool.context().kernels().codec;
    const auto codes = std::make_unique<cpu::HeadStage1>();
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
        const TokenLayout layout = g.token_layout(layer);
        const int d = int(g.shape(layer).head_dim);
        for (uint32_t head = 0; head < g.shape(layer).kv_heads; ++head) {
            uint8_t* piece = slot + g.page_offset(PageKind::kToken, layer) + g.head_offset(PageKind::kToken, layer, head);
            codec.load_token_piece(piece, d, int(tokens), *codes);
            const TurningPairs turning = turning_of_tokens(piece, layout);
            std::memset(piece, 0, layout.bytes());
            codec.store_token_piece(*codes, d, 0, int(tokens), piece);
            if (pool.numerics().encode.k_turning) store_turning_of_missing(turning, int(tokens), layout, piece);
            if (!g.keeps_own_scales) continue;
            auto* own = reinterpret_cast<float*>(slot + g.own_scales_offset(layer, head));
            for (int which = 0; which < 2; ++which)
                std::fill(own + which * kPageTokens + tokens, own + (which + 1) * kPageTokens, 0.0f);
        }
    }
}

BlockHeader header_of(const StoredBlock& b) {
    BlockHeader h{};
    h.magic = kBlockMagic;
    h.kind = b.kind;
    h.tokens = b.tokens;
    h.index = b.index;
    h.content_id = b.content_id;
    h.slot_hash = b.slot_hash;
    h.hash = header_hash(h);
    return h;
}

// Reads blocks one after the other. If the rest of the file must be known to be good, checks it ahead.
class BlockLoader {
  public:
    BlockLoader(Pool& pool, File& file, std::span<const StoredBlock> blocks, uint64_t file_bytes,
                const std::function<void(uint64_t, Block&)>& claim, const Progress& progress)
        : pool_(pool), file_(file), blocks_(blocks), file_bytes_(file_bytes), claim_(claim), progress_(progress) {}

    Result<std::vector<BlockPtr>> load() {
        std::vector<BlockPtr> loaded;
        Residency::Loading mine;  // the loaded blocks, with their indices
        Residency::LoadHold others_see(pool_.residency(), mine);
        std::vector<uint8_t> slot;
        for (size_t i = 0; i < blocks_.size(); ++i) {
            TA_RETURN_IF_ERROR(go_on(file_.at()));
            TA_RETURN_IF_ERROR(read(i, slot));
            Result<BlockPtr> block = take(i, mine);
            if (!block.ok()) return std::move(block).status().block(int64_t(blocks_[i].index));
            claim_(i, *block.value());
            TA_RETURN_IF_ERROR(fill_block(pool_, *block.value(), blocks_[i], slot));
            loaded.push_back(block.value());
            others_see.add({block.take(), blocks_[i].index});
        }
        TA_RETURN_IF_ERROR(go_on(file_.at()));
        return loaded;
    }

  private:
    Status go_on(uint64_t done) const { return progress_ && !progress_(done, file_bytes_) ? stopped(file_) : Status(); }

    // Reads block i, which is next in the file, into host memory. Checks that it is the block of the index, and sound.
    Status read(size_t i, std::vector<uint8_t>& slot) {
        const Geometry& g = pool_.geometry();
        const StoredBlock& b = blocks_[i];
        const auto kind = PageKind(b.kind);
        const auto other = [&](const char* what) {
            return fail(TA_E_CORRUPT, "%s block %zu in %s is not what the file's index says", what, i, file_.name())
                .block(int64_t(b.index));
        };
        const BlockHeader expected = header_of(b);
        BlockHeader header;
        TA_RETURN_IF_ERROR(file_.read(&header, sizeof header));
        if (std::memcmp(&header, &expected, sizeof header) != 0) return other("the header of");
        slot.resize(g.slot_bytes(kind));
        TA_RETURN_IF_ERROR(file_.read(slot.data(), slot.size()));
        if (hash_bytes(slot.data(), slot.size()) != b.slot_hash) return other("the content of");
        return check_block(pool_, b, slot, file_.name());
    }

    // Makes a pool's block for block i, which was read.
    Result<BlockPtr> take(size_t i, Residency::Loading& mine) {
        const auto kind = PageKind(blocks_[i].kind);
        if (may_make_room_) return pool_.residency().new_block(kind, mine);
        Result<std::vector<BlockPtr>> taken = pool_.blocks().acquire({&kind, 1});
        if (taken.ok()) return std::move(taken.value()[0]);
        if (Status s = std::move(taken).status(); s.code() != TA_E_TIER_FULL) return s;
        TA_RETURN_IF_ERROR(look_ahead(i, mine));
        may_make_room_ = true;
        return pool_.residency().new_block(kind, mine);
    }

    // Checks the blocks after block i, and returns to the present position.
    Status look_ahead(size_t i, Residency::Loading& mine) {
        const uint64_t here = file_.at();
        std::vector<uint8_t> slot;
        for (size_t next = i + 1; next < blocks_.size(); ++next) {
            TA_RETURN_IF_ERROR(go_on(here));
            TA_RETURN_IF_ERROR(read(next, slot));
        }
        uint64_t bytes = 0;
        for (const StoredBlock& b : blocks_.subspan(i)) bytes += pool_.geometry().slot_bytes(PageKind(b.kind));
        file_.go_to(here);
        return pool_.residency().promise_room(mine, bytes);
    }

    Pool& pool_;
    File& file_;
    const std::span<const StoredBlock> blocks_;
    const uint64_t file_bytes_;
    const std::function<void(uint64_t, Block&)>& claim_;
    const Progress& progress_;
    bool may_make_room_ = false;  // all of the file has been checked
};

}  // namespace

bool can_exist(const Pool& pool, const StoredBlock& b) {
    constexpr uint8_t kReserved[sizeof StoredBlock::reserved] = {};
    const bool is_full = b.tokens == uint32_t(kPageTokens);
    return b.kind < kPageKinds && pool.geometry().slot_bytes(PageKind(b.kind)) > 0 && b.tokens > 0 &&
           b.tokens <= uint32_t(kPageTokens) && b.index <= uint64_t(INT64_MAX / kPageTokens) &&
           std::memcmp(b.reserved, kReserved, sizeof kReserved) == 0 && (is_full || PageKind(b.kind) == PageKind::kToken) &&
           (page_format(PageKind(b.kind)) == PageKind::kToken || b.index >= pool.numerics().sink_blocks);
}

Status check_block(const Pool& pool, const StoredBlock& b, std::span<const uint8_t> slot, const char* from) {
    const Geometry& g = pool.geometry();
    const auto kind = PageKind(b.kind);
    TA_RETURN_IF_ERROR(verify_slot(g, kind, slot.data(), pool.fingerprint(), b.index, b.content_id, b.tokens));
    TA_RETURN_IF_ERROR(check_values(g, pool.numerics().encode.k_turning, kind, slot.data(), b.index));
    if (b.tokens == uint32_t(kPageTokens)) return {};
    std::vector<uint8_t> cleared(slot.begin(), slot.end());
    clear_missing_tokens(pool, b.tokens, cleared.data());
    if (std::equal(slot.begin(), slot.end(), cleared.begin())) return {};
    return fail(TA_E_CORRUPT, "block %llu in %s has values for tokens that it lacks", (unsigned long long)b.index, from)
        .block(int64_t(b.index));
}

Status fill_block(Pool& pool, Block& block, const StoredBlock& b, std::span<uint8_t> slot) {
    block.write_trailer(pool.geometry(), pool.fingerprint(), b.index, b.tokens, slot.data());
    if (Device* device = pool.context().device()) {
        TA_RETURN_IF_ERROR(device->write(block.slot(), slot.data(), slot.size()));
    } else {
        std::memcpy(block.slot(), slot.data(), slot.size());
    }
    if (b.tokens == uint32_t(kPageTokens)) block.mark_sealed();
    return {};
}

int File::open(const std::string& path, int flags) {
    return fd_ = files_.open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600);
}

void File::close() {
    if (fd_ >= 0) files_.close(fd_);
    fd_ = -1;
}

Status File::open_regular(uint64_t& bytes) {
    if (const int e = open(path_, O_RDONLY | O_NONBLOCK); e < 0) return failed(e, "opening");
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
    NewFile file(files, path);
    TA_RETURN_IF_ERROR(file.make());
    TA_RETURN_IF_ERROR(write(file.file()));
    return file.give_name();
}

Result<PageKind> copy_slot(Pool& pool, const Block& block, uint64_t index, uint32_t tokens, std::vector<uint8_t>& slot) {
    const Geometry& g = pool.geometry();
    if (block.dropped()) return fail(TA_E_STATE, "the block was dropped");
    const ReadingBlocks reading(pool.blocks());
    const Place at = pool.blocks().place_of(block);
    const bool sealed = block.sealed(), full = block.full();  // read before the bytes are
    slot.resize(g.slot_bytes(at.kind));
    if (at.tier == TierKind::kDisk) {
        TA_RETURN_IF_ERROR(pool.reader().read(block, index, slot.data()));
    } else {
        TA_RETURN_IF_ERROR(pool.reader().read_memory(at, slot.data()));
        if (sealed) TA_RETURN_IF_ERROR(block.verify(g, pool.fingerprint(), index, slot.data(), at.kind));
    }
    if (full) return at.kind;
    clear_missing_tokens(pool, tokens, slot.data());
    block.write_trailer(g, pool.fingerprint(), index, tokens, slot.data());
    return at.kind;
}

Result<StoredBlock> write_block(Pool& pool, File& file, const Block& block, uint64_t index, uint32_t tokens,
                                std::vector<uint8_t>& slot) {
    Result<PageKind> kind = copy_slot(pool, block, index, tokens, slot);
    if (!kind.ok()) return std::move(kind).status().block(int64_t(index));
    StoredBlock b{};
    b.content_id = block.content_id();
    b.slot_hash = hash_bytes(slot.data(), slot.size());
    b.index = index;
    b.tokens = tokens;
    b.kind = uint8_t(kind.value());
    const BlockHeader header = header_of(b);
    TA_RETURN_IF_ERROR(file.write(&header, sizeof header));
    TA_RETURN_IF_ERROR(file.write(slot.data(), slot.size()));
    return b;
}

Status IndexReader::read(void* to, size_t bytes) {
    constexpr uint64_t kPiece = 1 << 16;
    for (auto* out = static_cast<uint8_t*>(to); bytes > 0;) {
        if (at_ == piece_.size()) {
            if (left_ == 0) return damaged();
            piece_.resize(size_t(std::min(left_, kPiece)));
            TA_RETURN_IF_ERROR(file_.read(piece_.data(), piece_.size()));
            hash_.add(piece_.data(), piece_.size());
            left_ -= piece_.size();
            at_ = 0;
        }
        const size_t n = std::min(bytes, piece_.size() - at_);
        std::memcpy(out, piece_.data() + at_, n);
        at_ += n;
        out += n;
        bytes -= n;
    }
    return {};
}

Status IndexReader::end(uint64_t hash) const {
    return left_ == 0 && at_ == piece_.size() && hash_.value() == hash ? Status() : damaged();
}

uint64_t least_block_bytes(const Geometry& g) {
    uint64_t least = g.token_slot_bytes;
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        if (const size_t bytes = g.slot_bytes(PageKind(kind)); bytes > 0) least = std::min<uint64_t>(least, bytes);
    }
    return sizeof(StoredBlock) + sizeof(BlockHeader) + least;
}

Status read_stored_blocks(const Pool& pool, IndexReader& index, uint64_t n, std::vector<StoredBlock>& blocks,
                          const std::function<bool(uint64_t, const StoredBlock&)>& good) {
    for (uint64_t i = 0; i < n; ++i) {
        StoredBlock b;
        TA_RETURN_IF_ERROR(index.read(b));
        if (!can_exist(pool, b) || (good && !good(i, b))) return index.damaged();
        blocks.push_back(b);
    }
    return {};
}

Status check_end(const Pool& pool, const File& file, uint64_t file_bytes, std::span<const StoredBlock> blocks) {
    uint64_t left = file_bytes - file.at();
    for (const StoredBlock& b : blocks) {
        const uint64_t bytes = sizeof(BlockHeader) + pool.geometry().slot_bytes(PageKind(b.kind));
        if (bytes > left) return fail(TA_E_CORRUPT, "%s ends early", file.name()).block(int64_t(b.index));
        left -= bytes;
    }
    return left == 0 ? Status() : fail(TA_E_CORRUPT, "%s goes on behind its last block", file.name());
}

Result<std::vector<BlockPtr>> load_blocks(Pool& pool, File& file, std::span<const StoredBlock> blocks, uint64_t file_bytes,
                                          const std::function<void(uint64_t i, Block& block)>& claim,
                                          const Progress& progress) {
    return BlockLoader(pool, file, blocks, file_bytes, claim, progress).load();
}

}  // namespace ta
