// The layer that a CTA of an append works for.
#pragma once

#include "kernels/cuda/any/append/append.h"

namespace ta::cuda {

// Brings it into shared memory. By the whole CTA.
__device__ __forceinline__ const AppendLayer& take_layer(const AppendArgs& a, AppendLayer& shared) {
    static_assert(sizeof(AppendLayer) % sizeof(uint64_t) == 0);
    const auto* from = reinterpret_cast<const uint64_t*>(a.layers ? a.layers + blockIdx.y : &a.layer);
    for (unsigned n = threadIdx.x; n < sizeof(AppendLayer) / sizeof(uint64_t); n += blockDim.x)
        reinterpret_cast<uint64_t*>(&shared)[n] = from[n];
    __syncthreads();
    return shared;
}

}  // namespace ta::cuda
