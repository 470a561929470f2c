// Shared by the files of sequences and of pools: checked reading and writing, the list of blocks in their indices, and blocks
// with their headers. docs/FORMAT.md, section 8.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "kernels/format/check.h"
#include "kernels/format/codec.h"
#include "kernels/format/hash.h"
#include "src/io/file_system.h"
#include "src/kv/pool.h"

namespace ta {

// Called with bytes done and in all. Returns false to stop.
using Progress = std::function<bool(uint64_t done, uint64_t total)>;

inline constexpr uint32_t kBlockMagic = 0x4B4C4254;  // "TBLK" in little endian

// The index entry of a block. Its hashes determine every byte of the block.
struct StoredBlock {
    uint64_t content_id;  // as named in the slot's trailer and hashes
    uint64_t slot_hash;   // XXH3 of the slot
    uint64_t index;       // in its sequences
    uint32_t tokens;
    uint8_t kind;
    uint8_t reserved[3];
};
static_assert(sizeof(StoredBlock) == 32);

// Stands in front of the block's slot. All of it follows from the index.
struct BlockHeader {
    uint32_t magic;
    uint8_t kind;
    uint8_t reserved0[3];
    uint32_t tokens;
    uint32_t reserved1;
    uint64_t index;
    uint64_t content_id;
    uint64_t slot_hash;
    uint64_t hash;  // XXH3 of the fields above
};
static_assert(sizeof(BlockHeader) == 48);

// The hash of a header; `hash` is its last field.
template <class Header>
uint64_t header_hash(const Header& h) {
    return hash_bytes(&h, offsetof(Header, hash));
}

template <class T>
void put(std::vector<uint8_t>& bytes, const std::vector<T>& values) {
    const auto* p = reinterpret_cast<const uint8_t*>(values.data());
    bytes.insert(bytes.end(), p, p + values.size() * sizeof(T));
}

// A file with a position; keeps `files` by reference.
class File {
  public:
    File(FileSystem& files, const std::string& path) : files_(files), path_(path), name_(shown(path)) {}
    ~File() { close(); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Opens the path for reading; it must be a regular file. Does not wait, whatever the path names.
    Status open_regular(uint64_t& bytes);
    // Opens with O_CLOEXEC, O_NOFOLLOW and mode 0600; returns the descriptor or -errno. `path`: where the file is now, perhaps
    // only for a while.
    int open(const std::string& path, int flags);
    void close();
    int fd() const { return fd_; }
    // For error texts.
    const char* name() const { return name_.c_str(); }
    uint64_t at() const { return at_; }
    void go_to(uint64_t at) { at_ = at; }
    Status write(const void* data, size_t bytes) { return transfer(static_cast<const uint8_t*>(data), nullptr, bytes); }
    Status read(void* data, size_t bytes) { return transfer(nullptr, static_cast<uint8_t*>(data), bytes); }
    Status sync();
    Status failed(int64_t error, const char* what) const;

  private:
    Status transfer(const uint8_t* from, uint8_t* to, size_t bytes);

    FileSystem& files_;
    const std::string path_, name_;
    int fd_ = -1;
    uint64_t at_ = 0;
};

// The kind of a file: its first bytes, and what error texts call it.
struct FileFormat {
    const char* of;
    uint32_t magic;
    uint16_t version;
};

// Opens a file and reads the part of its header that files of sequences and of pools share. `bytes` gets its size.
// TA_E_CORRUPT. TA_E_UNSUPPORTED: another version. TA_E_INVALID: no regular file, or of another pool.
template <class Header>
Status open_with_header(const Pool& pool, const FileFormat& format, File& file, Header& h, uint64_t& bytes) {
    TA_RETURN_IF_ERROR(pool.check_open());
    TA_RETURN_IF_ERROR(file.open_regular(bytes));
    if (bytes < sizeof h) return fail(TA_E_CORRUPT, "%s is too short for a %s", file.name(), format.of);
    TA_RETURN_IF_ERROR(file.read(&h, sizeof h));
    if (h.magic != format.magic || h.hash != header_hash(h))
        return fail(TA_E_CORRUPT, "%s is no file of a %s, or damaged", file.name(), format.of);
    if (h.version != format.version) {
        return fail(TA_E_UNSUPPORTED, "%s is of version %u of a %s's files; this library reads version %u alone", file.name(),
                    unsigned(h.version), format.of, unsigned(format.version));
    }
    const Geometry& g = pool.geometry();
    if (h.slot_bytes[0] != g.token_slot_bytes || h.slot_bytes[1] != g.channel_slot_bytes) {
        return fail(TA_E_INVALID,
                    "%s is of a pool of another shape or other bits: its blocks have %llu and %llu bytes, here %zu and %zu",
                    file.name(), (unsigned long long)h.slot_bytes[0], (unsigned long long)h.slot_bytes[1], g.token_slot_bytes,
                    g.channel_slot_bytes);
    }
    if (h.fingerprint != pool.fingerprint()) {
        return fail(TA_E_INVALID,
                    "%s is of a pool with another rotation, sink blocks, K offset, falling precision, shape or bits",
                    file.name());
    }
    return {};
}

// TA_E_CANCELLED: the progress callback asked to stop.
Status stopped(const File& file);

// Makes a file, which gets its name only when `write` has written all of it and it is on the medium. On failure nothing is
// left. TA_E_INVALID: the name exists.
Status write_new_file(FileSystem& files, const std::string& path, const std::function<Status(File&)>& write);

// Reads an index of so many bytes piece by piece. A file may claim any number; the reader takes no more memory than it has
// read. So callers check each part before they read the next.
class IndexReader {
  public:
    IndexReader(File& file, uint64_t bytes) : file_(file), left_(bytes) {}
    // Reads the next bytes. Fails if fewer are left.
    Status read(void* to, size_t bytes);
    template <class T>
    Status read(T& value) {
        return read(&value, sizeof value);
    }
    // TA_E_CORRUPT: bytes are left, or the hash of what was read is another.
    Status end(uint64_t hash) const;
    // The error for an index whose content is impossible.
    Status damaged() const { return fail(TA_E_CORRUPT, "the index of %s is damaged", file_.name()); }

  private:
    File& file_;
    uint64_t left_;  // in the file
    std::vector<uint8_t> piece_;
    size_t at_ = 0;
    PiecewiseHash hash_;
};

// The least bytes of a file that one block takes, with its index entry.
uint64_t least_block_bytes(const Geometry& geometry);
// Reads the index entries of n blocks. TA_E_CORRUPT: no pool can have such a block. `good`: a further check of block i.
Status read_stored_blocks(const Pool& pool, IndexReader& index, uint64_t n, std::vector<StoredBlock>& blocks,
                          const std::function<bool(uint64_t i, const StoredBlock&)>& good = {});
// TA_E_CORRUPT: the file does not end right after these blocks. The file's position is at the first of them.
Status check_end(const Pool& pool, const File& file, uint64_t file_bytes, std::span<const StoredBlock> blocks);

// Writes a block with its header, checked, from whatever tier it is in. `slot`: a buffer to use. Returns the block's index
// entry.
Result<StoredBlock> write_block(Pool& pool, File& file, const Block& block, uint64_t index, uint32_t tokens,
                                std::vector<uint8_t>& slot);

// Reads the blocks of the index, which come next in the file, into new blocks of the pool. Calls `claim` for each block before
// its bytes are in the pool's memory. When the pool runs out of room, checks the rest of the file, and whether there can be
// enough room, before it makes any: loading a bad or too large file changes nothing. TA_E_CORRUPT, TA_E_TIER_FULL.
Result<std::vector<BlockPtr>> load_blocks(Pool& pool, File& file, std::span<const StoredBlock> blocks, uint64_t file_bytes,
                                          const std::function<void(uint64_t i, Block& block)>& claim, const Progress& progress);

// ---- blocks from outside: a file, another rank

// True if a pool like this one may have such a block at all.
bool can_exist(const Pool& pool, const StoredBlock& b);
// Checks that `slot`, in host memory, is that block and sound: its trailer, the hashes of its pages, values that attention can
// compute with, and zeros for tokens that it lacks. TA_E_CORRUPT; `from`: for the error text.
Status check_block(const Pool& pool, const StoredBlock& b, std::span<const uint8_t> slot, const char* from);
// Copies the bytes to a new block of the pool, under the block's own identity. Rewrites the trailer in `slot`.
Status fill_block(Pool& pool, Block& block, const StoredBlock& b, std::span<uint8_t> slot);
// Copies the block's slot to host memory, with a trailer, checked. Returns its kind.
Result<PageKind> copy_slot(Pool& pool, const Block& block, uint64_t index, uint32_t tokens, std::vector<uint8_t>& slot);

}  // namespace ta
