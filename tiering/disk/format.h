// Layout of the file of a disk tier, all little endian. Two superblocks of 4096 bytes, written in turn; then regions of
// records. A record is a header page of 4096 bytes, RecordHeader and more keys, and the slot, padded with zeros to 4096 bytes.
// A persistent file has a record's header only while its slot is stored completely: writing it is the last step, erasing it the
// first one. So kill -9 leaves it; after a power failure a header says nothing of what was written since the last sync.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/core/checked.h"
#include "tiering/disk/request.h"
#include "tiering/store/slot_map.h"

namespace ta {

inline constexpr size_t kDiskPage = 4096;
inline constexpr uint64_t kDiskRegionsOffset = 2 * kDiskPage;
inline constexpr uint16_t kDiskVersion = 1;
inline constexpr uint32_t kSuperblockMagic = 0x46444154;  // "TADF"
inline constexpr uint32_t kUnfinishedMagic = 0x4e444154;  // "TADN"
inline constexpr uint32_t kRecordMagic = 0x52444154;      // "TADR"

struct FileId {
    uint64_t words[2] = {0, 0};
    bool operator==(const FileId&) const = default;
};

struct Superblock {
    uint32_t magic;
    uint16_t version;
    uint16_t reserved0;
    uint64_t fingerprint;  // of the pool
    FileId file;           // random
    uint64_t opens;        // how often the file was opened; the superblock with more is the present one
    uint64_t regions, region_bytes;
    uint64_t slot_bytes[3];  // of token, channel and low blocks; 0: no such class
    uint64_t boot;           // FileSystem::boot() of who opened it last
    uint64_t state;          // SessionState of that session
    uint64_t reserved;
    uint64_t hash;                  // XXH3_64 of the whole page with 0 here
    uint64_t passed_slot_bytes[2];  // likewise of passed token and channel blocks
};
static_assert(sizeof(Superblock) == 128);

// Only a power failure, or syncs that fail, can leave records that are not all there: of the session that went on then.
enum class SessionState : uint64_t { kOpen, kClosed, kSyncFailed };

struct RecordHeader {
    uint32_t magic;
    uint16_t version;
    uint8_t slot_class;
    uint8_t reserved0;
    uint64_t fingerprint;
    FileId file;
    uint64_t offset;        // of this header in the file
    uint64_t generation;    // of the write; never twice in a file
    uint64_t slot_bytes;    // that follow the header page, without padding
    uint64_t payload_hash;  // XXH3_64 of them
    uint64_t block_index;
    uint64_t content_id;
    uint32_t tokens;
    uint32_t reserved1;
    uint8_t key[32];
    uint64_t more_keys;  // that follow, 32 bytes each. A process that knows none of them finds the block by `key` alone
    uint64_t reserved2;
    uint64_t hash;  // XXH3_64 of the whole page with 0 here
};
static_assert(sizeof(RecordHeader) == 144);

// Bytes of a record, and the shape of a file that takes at most `budget`.
constexpr uint64_t record_bytes(uint64_t slot_bytes) {
    return slot_bytes == 0 ? 0 : kDiskPage + round_up(slot_bytes, kDiskPage);
}
SlotMap::Shape disk_shape(uint64_t budget, const size_t (&slot_bytes)[kSlotClasses]);
inline uint64_t file_bytes(const SlotMap::Shape& shape) {
    return kDiskRegionsOffset + shape.bytes();
}

// Values that all records of a file share.
struct RecordContext {
    uint64_t fingerprint = 0;
    FileId file;
    size_t slot_bytes[kSlotClasses] = {};
};

// Writes a page: the header in front, as many of the keys as it says, zeros behind, and the hash.
void seal_superblock(Superblock superblock, uint8_t* page);
void seal_header(RecordHeader header, std::span<const BlockKey> more_keys, uint8_t* page);
// nullptr when the page holds what it should, else what is wrong with it. The content is in the out parameter either way.
const char* check_superblock(const uint8_t* page, Superblock& superblock);
// In place of a superblock that is not written yet.
void mark_unfinished(uint8_t* page);
const char* check_header(const uint8_t* page, const RecordContext& context, uint8_t slot_class, uint64_t offset,
                         RecordHeader& header);
RecordHeader make_header(const RecordContext& context, const BlockIdentity& identity, uint8_t slot_class, uint64_t offset,
                         uint64_t generation, const uint8_t* slot);
BlockIdentity identity_of(const RecordHeader& header);
// Of a page whose header was checked.
std::vector<BlockKey> more_keys_of(const uint8_t* page);
// True for a page of zeros: no record.
bool is_blank(const uint8_t* page, size_t bytes);

}  // namespace ta
