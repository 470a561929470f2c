#include "src/kv/store/value.h"

#include <algorithm>
#include <cstring>

#include "kernels/format/hash.h"
#include "src/core/blake2s.h"

namespace ta::store {
namespace {

Status refused(uint64_t index, const char* why) {
    return fail(TA_E_CORRUPT, "the store's value of block %llu %s", (unsigned long long)index, why).block(int64_t(index));
}

Result<BlockKey> seal_of(const Source& from, const ValueHeader& h, std::span<const uint8_t> slot) {
    struct {
        char label[32] = "turboattention sealed value";
        uint8_t header[offsetof(ValueHeader, seal)];
        Blake2sDigest slot;
    } sealed;
    std::memcpy(sealed.header, &h, sizeof sealed.header);
    sealed.slot = blake2s(nullptr, 0, slot.data(), slot.size());
    return from.pool.prefixes().sign(from.space, {reinterpret_cast<const uint8_t*>(&sealed), sizeof sealed});
}

}  // namespace

size_t most_value_bytes(const Pool& pool) {
    size_t most = 0;
    for (size_t kind = 0; kind < kPageKinds; ++kind) most = std::max(most, pool.geometry().slot_bytes(PageKind(kind)));
    return sizeof(ValueHeader) + most;
}

Result<BlockKey> key_in_store(const Source& from, const BlockKey& hashed) {
    struct {
        char label[32] = "turboattention key in a store";
        BlockKey hashed;
        uint64_t fingerprint;
    } named;
    named.hashed = hashed;
    named.fingerprint = from.pool.fingerprint();
    return from.pool.prefixes().sign(from.space, {reinterpret_cast<const uint8_t*>(&named), sizeof named});
}

Result<size_t> write_value(const Source& from, const Block& block, uint64_t index, const BlockKey& key,
                           std::vector<uint8_t>& slot, uint8_t* to) {
    Result<PageKind> kind = copy_slot(from.pool, block, index, kPageTokens, slot);
    if (!kind.ok()) return std::move(kind).status().block(int64_t(index));
    ValueHeader h{};
    h.magic = kValueMagic;
    h.version = kValueVersion;
    h.kind = uint8_t(kind.value());
    h.sealed = from.authenticate;
    h.fingerprint = from.pool.fingerprint();
    h.slot_bytes = slot.size();
    h.index = index;
    h.content_id = block.content_id();
    h.slot_hash = hash_bytes(slot.data(), slot.size());
    std::copy(key.begin(), key.end(), h.key);
    if (from.authenticate) {
        Result<BlockKey> seal = seal_of(from, h, slot);
        if (!seal.ok()) return std::move(seal).status();
        std::copy(seal.value().begin(), seal.value().end(), h.seal);
    }
    h.hash = header_hash(h);
    std::memcpy(to, &h, sizeof h);
    std::memcpy(to + sizeof h, slot.data(), slot.size());
    return sizeof h + slot.size();
}

Result<StoredBlock> check_value(const Source& from, const BlockKey& key, uint64_t index, std::span<const uint8_t> value) {
    const Pool& pool = from.pool;
    ValueHeader h;
    if (value.size() < sizeof h) return refused(index, "is too short");
    std::memcpy(&h, value.data(), sizeof h);
    if (h.magic != kValueMagic || h.hash != header_hash(h)) return refused(index, "has a damaged header, or is something else");
    if (h.version != kValueVersion || h.reserved != 0 || h.sealed > 1) return refused(index, "is of another version");
    if (h.fingerprint != pool.fingerprint()) return refused(index, "is of a pool of other shape or settings");
    if (!std::equal(key.begin(), key.end(), h.key) || h.index != index) return refused(index, "is that of another block");
    StoredBlock b{};
    b.content_id = h.content_id;
    b.slot_hash = h.slot_hash;
    b.index = h.index;
    b.tokens = uint32_t(kPageTokens);
    b.kind = h.kind;
    const std::span<const uint8_t> slot = value.subspan(sizeof h);
    if (!can_exist(pool, b) || h.slot_bytes != pool.geometry().slot_bytes(PageKind(b.kind)))
        return refused(index, "is of a block that this pool cannot have");
    if (slot.size() != h.slot_bytes) return refused(index, "has another size than its header says");
    if (hash_bytes(slot.data(), slot.size()) != h.slot_hash) return refused(index, "is damaged");
    if (from.authenticate) {
        if (h.sealed == 0) return refused(index, "has no seal");
        Result<BlockKey> seal = seal_of(from, h, slot);
        if (!seal.ok()) return std::move(seal).status();
        if (!std::equal(seal.value().begin(), seal.value().end(), h.seal)) return refused(index, "has a seal of somebody else");
    }
    TA_RETURN_IF_ERROR(check_block(pool, b, slot, "the store"));
    return b;
}

}  // namespace ta::store
