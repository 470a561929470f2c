// Two halves and their bits.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace ta::cuda {

__device__ __forceinline__ uint32_t bits_of(__half2 h) {
    return reinterpret_cast<const uint32_t&>(h);
}
__device__ __forceinline__ __half2 half2_of(uint32_t bits) {
    return reinterpret_cast<const __half2&>(bits);
}

}  // namespace ta::cuda
