// BLAKE2s (RFC 7693) with a key. Without the key nobody can compute or invert the hash.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ta {

using Blake2sDigest = std::array<uint8_t, 32>;

// key_bytes: 0 to 32.
Blake2sDigest blake2s(const uint8_t* key, size_t key_bytes, const void* data, size_t bytes);

}  // namespace ta
