// Included by instantiations/d*.cu.
#pragma once

#include "kernels/cuda/sm80/prefill/kernel.cuh"
#include "kernels/cuda/sm80/prefill/launch.h"

namespace ta::cuda::prefill::sm80 {

template <int D, bool kChannels>
Kernels kernels() {
    return {{reinterpret_cast<const void*>(&prefill_kernel<D, kChannels, false>),
             reinterpret_cast<const void*>(&prefill_kernel<D, kChannels, true>)},
            {SharedMemory<D>::bytes(2), SharedMemory<D>::bytes(3)}};
}

}  // namespace ta::cuda::prefill::sm80
