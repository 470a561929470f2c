#include "kernels/cuda/any/append/kernel.cuh"
#include "kernels/cuda/any/append/lower.cuh"

namespace ta::cuda {
AppendKernel append_kernel_d64() {
    return {reinterpret_cast<const void*>(&append_kernel<64>), RowShape<64>::kThreads,
            reinterpret_cast<const void*>(&lower_kernel<64>)};
}
}  // namespace ta::cuda
