// XXH3_64 by instruction set: all give the same value.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ta::cpu {

uint64_t hash_bytes_avx2(const void* data, size_t bytes);

}  // namespace ta::cpu
