#include "tiering/disk/format.h"

#include <algorithm>
#include <cstring>

#include "kernels/format/hash.h"

namespace ta {
namespace {

template <class Header>
void seal(Header header, uint8_t* page, std::span<const BlockKey> keys = {}) {
    header.hash = 0;
    std::memset(page, 0, kDiskPage);
    std::memcpy(page, &header, sizeof header);
    if (!keys.empty()) std::memcpy(page + sizeof header, keys.data(), keys.size_bytes());
    header.hash = hash_bytes(page, kDiskPage);
    std::memcpy(page, &header, sizeof header);
}

template <class Header>
bool hash_matches(const uint8_t* page, const Header& header) {
    uint8_t copy[kDiskPage];
    std::memcpy(copy, page, kDiskPage);
    std::memset(copy + offsetof(Header, hash), 0, sizeof header.hash);
    return hash_bytes(copy, kDiskPage) == header.hash;
}

}  // namespace

SlotMap::Shape disk_shape(uint64_t budget, const size_t (&slot_bytes)[kSlotClasses]) {
    uint64_t strides[kSlotClasses];
    for (int c = 0; c < kSlotClasses; ++c) strides[c] = record_bytes(slot_bytes[c]);
    return SlotMap::fit(budget - std::min(budget, kDiskRegionsOffset), strides);
}

void seal_superblock(Superblock superblock, uint8_t* page) {
    seal(superblock, page);
}

void seal_header(RecordHeader header, std::span<const BlockKey> more_keys, uint8_t* page) {
    seal(header, page, more_keys.first(size_t(std::min<uint64_t>(header.more_keys, more_keys.size()))));
}

const char* check_superblock(const uint8_t* page, Superblock& s) {
    std::memcpy(&s, page, sizeof s);
    if (s.magic != kSuperblockMagic) return "has the wrong magic number";
    if (!hash_matches(page, s)) return "does not match its hash";
    if (s.version != kDiskVersion) return "has a version that this library does not know";
    return nullptr;
}

void mark_unfinished(uint8_t* page) {
    Superblock mark{};
    mark.magic = kUnfinishedMagic;
    seal(mark, page);
}

const char* check_header(const uint8_t* page, const RecordContext& context, uint8_t slot_class, uint64_t offset,
                         RecordHeader& h) {
    std::memcpy(&h, page, sizeof h);
    if (h.magic != kRecordMagic) return "has the wrong magic number";
    if (!hash_matches(page, h)) return "does not match its header's hash";
    if (h.version != kDiskVersion) return "has a version that this library does not know";
    if (h.file != context.file) return "belongs to another file";
    if (h.fingerprint != context.fingerprint) return "belongs to another pool";
    if (h.offset != offset) return "was written for another place";
    if (h.slot_class != slot_class || h.slot_bytes != context.slot_bytes[slot_class]) return "is of another class";
    if (h.tokens < 1 || h.tokens > 64) return "has a number of tokens that no block has";
    if (h.more_keys > kMostMoreKeys) return "has more keys than a record has room for";
    return nullptr;
}

RecordHeader make_header(const RecordContext& context, const BlockIdentity& identity, uint8_t slot_class, uint64_t offset,
                         uint64_t generation, const uint8_t* slot) {
    RecordHeader h{};
    h.magic = kRecordMagic;
    h.version = kDiskVersion;
    h.slot_class = slot_class;
    h.fingerprint = context.fingerprint;
    h.file = context.file;
    h.offset = offset;
    h.generation = generation;
    h.slot_bytes = context.slot_bytes[slot_class];
    h.payload_hash = hash_bytes(slot, context.slot_bytes[slot_class]);
    h.block_index = identity.block_index;
    h.content_id = identity.content_id;
    h.tokens = identity.tokens;
    std::memcpy(h.key, identity.key.data(), sizeof h.key);
    return h;
}

BlockIdentity identity_of(const RecordHeader& h) {
    BlockIdentity identity;
    identity.block_index = h.block_index;
    identity.content_id = h.content_id;
    identity.tokens = h.tokens;
    std::memcpy(identity.key.data(), h.key, sizeof h.key);
    return identity;
}

std::vector<BlockKey> more_keys_of(const uint8_t* page) {
    RecordHeader h;
    std::memcpy(&h, page, sizeof h);
    std::vector<BlockKey> keys(size_t(h.more_keys));
    if (!keys.empty()) std::memcpy(keys.data(), page + sizeof h, keys.size() * sizeof(BlockKey));
    return keys;
}

bool is_blank(const uint8_t* page, size_t bytes) {
    return page[0] == 0 && std::memcmp(page, page + 1, bytes - 1) == 0;
}

}  // namespace ta
