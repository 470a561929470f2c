// Included by instantiations/d*.cu.
#pragma once

#include "kernels/cuda/any/decode/kernel.cuh"
#include "kernels/cuda/any/decode/launch.h"

namespace ta::cuda {

template <int D>
DecodeKernels decode_kernels() {
    const auto kernel = [](auto* k) { return reinterpret_cast<const void*>(k); };
    return {{{kernel(decode_kernel<D, 1, false>), kernel(decode_kernel<D, 2, false>), kernel(decode_kernel<D, 4, false>)},
             {kernel(decode_kernel<D, 1, true>), kernel(decode_kernel<D, 2, true>), kernel(decode_kernel<D, 4, true>)}},
            {kWarpMemoryBytes<D, 1>, kWarpMemoryBytes<D, 2>, kWarpMemoryBytes<D, 4>}};
}

}  // namespace ta::cuda
