#include "kernels/format/hash.h"

#include <cstring>

#include "kernels/cpu/hash.h"

#define XXH_INLINE_ALL
#define XXH_PREFETCH_DIST 2048  // as kernels/cpu/avx2/hash.cpp says
#include <xxhash.h>

namespace ta {

namespace {

uint64_t hash_portable(const void* data, size_t bytes) {
    return XXH3_64bits(data, bytes);
}

using HashFn = uint64_t (*)(const void* data, size_t bytes);

HashFn fastest() {
#if TA_HAVE_AVX2
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return cpu::hash_bytes_avx2;
#endif
    return hash_portable;
}

}  // namespace

uint64_t hash_bytes(const void* data, size_t bytes) {
    static const HashFn hash = fastest();
    return hash(data, bytes);
}

struct PiecewiseHash::State {
    XXH3_state_t xxh;
};

PiecewiseHash::PiecewiseHash() : state_(std::make_unique<State>()) {
    XXH3_64bits_reset(&state_->xxh);
}

PiecewiseHash::~PiecewiseHash() = default;

void PiecewiseHash::add(const void* data, size_t bytes) {
    XXH3_64bits_update(&state_->xxh, data, bytes);
}

uint64_t PiecewiseHash::value() const {
    return XXH3_64bits_digest(&state_->xxh);
}

uint64_t page_hash(const PageIdentity& identity, const uint8_t* payload) {
    const uint64_t payload_hash = hash_bytes(payload, identity.payload_bytes);
    uint8_t bound[sizeof identity + sizeof payload_hash];
    std::memcpy(bound, &identity, sizeof identity);
    std::memcpy(bound + sizeof identity, &payload_hash, sizeof payload_hash);
    return hash_bytes(bound, sizeof bound);
}

}  // namespace ta
