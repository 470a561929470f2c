// Copies of one or two words to shared memory; complete after cp_async_wait (mma.cuh).
#pragma once

#include <cstdint>

namespace ta::cuda {

__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}
__device__ __forceinline__ void cp_async_8(uint32_t smem, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(smem), "l"(global) : "memory");
}

}  // namespace ta::cuda
