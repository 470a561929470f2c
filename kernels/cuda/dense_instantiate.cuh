#pragma once

#include "kernels/cuda/dense_half.cuh"
#include "kernels/cuda/dense_launch.h"
#include "kernels/cuda/dense_pages.cuh"

namespace ta::cuda {

template <int D>
DenseKernels dense_kernels() {
    return {reinterpret_cast<const void*>(&dense_amax_kernel<D>),
            reinterpret_cast<const void*>(&dense_pages_kernel<D>),
            RowShape<D>::kThreads,
            reinterpret_cast<const void*>(&dense_half_kernel<D>),
            kHalfThreads,
            int(sizeof(HalfMemory<D>))};
}

}  // namespace ta::cuda
