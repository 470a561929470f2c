#include "kernels/format/hash.h"

#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ta {

uint64_t hash_bytes(const void* data, size_t bytes) {
    return XXH3_64bits(data, bytes);
}

uint64_t page_hash(const PageIdentity& identity, const uint8_t* payload) {
    const uint64_t payload_hash = hash_bytes(payload, identity.payload_bytes);
    uint8_t bound[sizeof identity + sizeof payload_hash];
    std::memcpy(bound, &identity, sizeof identity);
    std::memcpy(bound + sizeof identity, &payload_hash, sizeof payload_hash);
    return hash_bytes(bound, sizeof bound);
}

}  // namespace ta
