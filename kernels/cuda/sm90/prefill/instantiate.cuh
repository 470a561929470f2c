// Included by instantiations/d*.cu.
#pragma once

#include "kernels/cuda/sm90/prefill/kernel.cuh"
#include "kernels/cuda/sm90/prefill/launch.h"

namespace ta::cuda::prefill::sm90 {

template <int D, bool kChannels, Tiles kOfTiles = Tiles::kAny, bool kAnyBits = false>
Kernels kernels() {
    constexpr size_t kBytes = sizeof(SharedMemory<D, kChannels, kOfTiles == Tiles::kResident>);
    static_assert(kBytes <= 227 * 1024, "what a CTA of Hopper may have");
    return {{reinterpret_cast<const void*>(&prefill_kernel<D, kChannels, false, kOfTiles, kAnyBits>),
             reinterpret_cast<const void*>(&prefill_kernel<D, kChannels, true, kOfTiles, kAnyBits>)},
            kThreads,
            int(kBytes)};
}

}  // namespace ta::cuda::prefill::sm90
