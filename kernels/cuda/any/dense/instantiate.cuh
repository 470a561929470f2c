#pragma once

#include "kernels/cuda/any/dense/half.cuh"
#include "kernels/cuda/any/dense/launch.h"
#include "kernels/cuda/any/dense/pages.cuh"

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
