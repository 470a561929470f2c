// Included by kernels/cuda/decode_d*.cu.
#pragma once

#include "kernels/cuda/decode_kernel.cuh"
#include "kernels/cuda/decode_launch.h"
#include "kernels/cuda/decode_merge.cuh"

namespace ta::cuda {

template <int D>
DecodeKernels decode_kernels() {
    return {{reinterpret_cast<const void*>(decode_kernel<D, 1>), reinterpret_cast<const void*>(decode_kernel<D, 2>),
             reinterpret_cast<const void*>(decode_kernel<D, 4>)},
            reinterpret_cast<const void*>(decode_merge_kernel<D>),
            {kWarpMemoryBytes<D, 1>, kWarpMemoryBytes<D, 2>, kWarpMemoryBytes<D, 4>}};
}

}  // namespace ta::cuda
