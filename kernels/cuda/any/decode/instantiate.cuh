// Included by instantiations/d*.cu.
#pragma once

#include "kernels/cuda/any/decode/kernel.cuh"
#include "kernels/cuda/any/decode/launch.h"

namespace ta::cuda {

template <int D>
DecodeKernels decode_kernels() {
    const auto kernel = [](auto* k) { return reinterpret_cast<const void*>(k); };
    return {
        {{kernel(decode_kernel<D, 1, kPlain>), kernel(decode_kernel<D, 2, kPlain>), kernel(decode_kernel<D, 4, kPlain>)},
         {kernel(decode_kernel<D, 1, kTiered>), kernel(decode_kernel<D, 2, kTiered>), kernel(decode_kernel<D, 4, kTiered>)},
         {kernel(decode_kernel<D, 1, kGeneral>), kernel(decode_kernel<D, 2, kGeneral>), kernel(decode_kernel<D, 4, kGeneral>)}},
        {kWarpMemoryBytes<D, 1>, kWarpMemoryBytes<D, 2>, kWarpMemoryBytes<D, 4>}};
}

}  // namespace ta::cuda
