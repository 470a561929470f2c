// Included by instantiations/d*.cu.
#pragma once

#include "kernels/cuda/sm90/prefill/kernel.cuh"
#include "kernels/cuda/sm90/prefill/launch.h"

namespace ta::cuda {

template <int D, bool kChannels, bool kLong, bool kAnyBits = false>
PrefillKernels prefill_kernels() {
    using namespace prefill;
    constexpr size_t kBytes = sizeof(SharedMemory<D, kChannels>);
    static_assert(kBytes <= 227 * 1024, "what a CTA of Hopper may have");
    return {{reinterpret_cast<const void*>(&prefill_kernel<D, kChannels, false, kLong, kAnyBits>),
             reinterpret_cast<const void*>(&prefill_kernel<D, kChannels, true, kLong, kAnyBits>)},
            kThreads,
            int(kBytes)};
}

}  // namespace ta::cuda
