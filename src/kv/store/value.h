// A block in a store: its key, and its value, which is a header and the block's slot. docs/FORMAT.md, section 10.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "src/kv/files/block_file.h"
#include "src/kv/pool.h"

namespace ta::store {

inline constexpr uint32_t kValueMagic = 0x56534254;  // "TBSV" in little endian
inline constexpr uint16_t kValueVersion = 1;

struct ValueHeader {
    uint32_t magic;
    uint16_t version;
    uint8_t kind;
    uint8_t sealed;        // 1: the seal is valid
    uint64_t fingerprint;  // of the pool
    uint64_t slot_bytes;   // of the slot after this header
    uint64_t index;        // of the block in its sequence
    uint64_t content_id;   // as named in the slot's trailer and hashes
    uint64_t slot_hash;    // XXH3 of the slot
    uint8_t key[32];       // of this value in the store
    uint8_t seal[32];      // BLAKE2s, keyed with the salt, of the fields above and of a BLAKE2s of the slot; or 0
    uint64_t reserved;
    uint64_t hash;  // XXH3 of the fields above
};
static_assert(sizeof(ValueHeader) == 128);

// The pool and namespace of the values. `authenticate`: refuse values without a seal.
struct Source {
    Pool& pool;
    Tenant space;
    bool authenticate;
};

// The most bytes of a value of the pool.
size_t most_value_bytes(const Pool& pool);
// The key in the store of a block with this hashed key. Without the salt nobody can tell which key it is. Pools of another
// fingerprint have other keys.
Result<BlockKey> key_in_store(const Source& from, const BlockKey& hashed);
// Writes a published block, checked, from whatever tier it is in, to memory of most_value_bytes(). Returns the bytes written.
// `slot`: a buffer to use.
Result<size_t> write_value(const Source& from, const Block& block, uint64_t index, const BlockKey& key,
                           std::vector<uint8_t>& slot, uint8_t* to);
// Checks that the value belongs to this key and index, is whole, and is good for the pool. The slot follows the header.
// TA_E_CORRUPT.
Result<StoredBlock> check_value(const Source& from, const BlockKey& key, uint64_t index, std::span<const uint8_t> value);

}  // namespace ta::store
