#pragma once

#include "kernels/cuda/sm90/distr/kernel.cuh"
#include "kernels/cuda/sm90/distr/launch.h"

namespace ta::cuda::distr::sm90 {

template <int D>
Kernels kernels() {
    return {{reinterpret_cast<const void*>(&distr_kernel<D, 2>), reinterpret_cast<const void*>(&distr_kernel<D, 3>),
             reinterpret_cast<const void*>(&distr_kernel<D, 4>)},
            kThreads,
            {int(sizeof(SharedMemory<D, 2>)), int(sizeof(SharedMemory<D, 3>)), int(sizeof(SharedMemory<D, 4>))}};
}

}  // namespace ta::cuda::distr::sm90
