// XXH3 as kernels/format/hash.h has it: the library's own code, twice as fast on data in caches.
#include "kernels/cpu/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

static_assert(XXH_VECTOR == XXH_AVX2, "compiled for another instruction set");

namespace ta::cpu {

uint64_t hash_bytes_avx2(const void* data, size_t bytes) {
    return XXH3_64bits(data, bytes);
}

}  // namespace ta::cpu
