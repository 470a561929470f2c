#include "kernels/cuda/any/append/kernel.cuh"
#include "kernels/cuda/any/append/lower.cuh"

namespace ta::cuda {
AppendKernel append_kernel_d96() {
    return {reinterpret_cast<const void*>(&append_kernel<96>), RowShape<96>::kThreads,
            reinterpret_cast<const void*>(&lower_kernel<96>)};
}
}  // namespace ta::cuda
