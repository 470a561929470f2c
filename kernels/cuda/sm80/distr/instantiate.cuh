#pragma once

#include "kernels/cuda/sm80/distr/kernel.cuh"
#include "kernels/cuda/sm80/distr/launch.h"

namespace ta::cuda::distr::sm80 {

template <int D>
Kernels kernels() {
    return {
        {{reinterpret_cast<const void*>(&distr_kernel<D, 2, false>), reinterpret_cast<const void*>(&distr_kernel<D, 2, true>)},
         {reinterpret_cast<const void*>(&distr_kernel<D, 3, false>), reinterpret_cast<const void*>(&distr_kernel<D, 3, true>)},
         {reinterpret_cast<const void*>(&distr_kernel<D, 4, false>), reinterpret_cast<const void*>(&distr_kernel<D, 4, true>)}},
        kThreads,
        {int(sizeof(SharedMemory<D, 2>)), int(sizeof(SharedMemory<D, 3>)), int(sizeof(SharedMemory<D, 4>))}};
}

}  // namespace ta::cuda::distr::sm80
