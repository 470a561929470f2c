#include "kernels/cuda/any/append/kernel.cuh"
#include "kernels/cuda/any/append/lower.cuh"

namespace ta::cuda {
AppendKernel append_kernel_d128() {
    return {reinterpret_cast<const void*>(&append_kernel<128>), RowShape<128>::kThreads,
            reinterpret_cast<const void*>(&lower_kernel<128>)};
}
}  // namespace ta::cuda
