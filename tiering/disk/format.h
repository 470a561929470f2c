// Layout of the file of a disk tier, all little endian. Two superblocks of 4096 bytes, written in turn; then regions of
// records. A record is a header page of 4096 bytes, RecordHeader and more keys, and the slot, padded with zeros to 4096 bytes.
// In a persistent file a header exists only while its slot is stored completely: it is written last and erased first. So kill
// -9 leaves whole records only. After a power failure a header says nothing of what was written since the last sync.
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
    uint64_t opens;        // how often the file was opened; the superblock with the higher count is valid
    uint64_t regions, region_bytes;
    uint64_t slot_bytes[3];  // of token, channel and low blocks; 0: no such class
    uint64_t boot;           // FileSystem::boot() of who opened it last
    uint64_t state;          // SessionState of that session
    uint64_t unread_before;  // if that is kClosed: nobody has read all records of earlier generations since a session ended
                             // without saying whether its syncs failed
    uint64_t hash;           // XXH3_64 of the whole page with 0 here
    uint64_t passed_slot_bytes[2];  // likewise of passed token and channel blocks
};
static_assert(sizeof(Superblock) == 128);

// Records are incomplete only after a power failure or a session in which a sync failed. Some may be of earlier sessions: an
// erased header may be back. A session whose open could not read all such records has the state kSyncFailed from the start. A
// session that was killed has the state kOpen, and a sync may have failed in it: the mark was not written in time.
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
    uint64_t more_keys;  // number of keys that follow, 32 bytes each. A reader that does not know them finds the block by `key`
                         // alone
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

// Fills a page: the header, as many keys as it counts, zeros, and the hash.
void seal_superblock(Superblock superblock, uint8_t* page);
void seal_header(RecordHeader header, std::span<const BlockKey> more_keys, uint8_t* page);
// nullptr: the page is valid; else what is wrong with it. The out parameter is filled either way.
const char* check_superblock(const uint8_t* page, Superblock& superblock);
// Marks a file whose superblock is not written yet.
void mark_unfinished(uint8_t* page);
const char* check_header(const uint8_t* page, const RecordContext& context, uint8_t slot_class, uint64_t offset,
                         RecordHeader& header);
RecordHeader make_header(const RecordContext& context, const BlockIdentity& identity, uint8_t slot_class, uint64_t offset,
                         uint64_t generation, const uint8_t* slot);
BlockIdentity identity_of(const RecordHeader& header);
// The further keys in a page whose header was checked.
std::vector<BlockKey> more_keys_of(const uint8_t* page);
// True for a page of zeros: no record.
bool is_blank(const uint8_t* page, size_t bytes);

}  // namespace ta
