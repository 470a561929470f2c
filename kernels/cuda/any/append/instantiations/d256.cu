#include "kernels/cuda/any/append/kernel.cuh"
#include "kernels/cuda/any/append/lower.cuh"

namespace ta::cuda {
AppendKernel append_kernel_d256() {
    return {reinterpret_cast<const void*>(&append_kernel<256>), RowShape<256>::kThreads,
            reinterpret_cast<const void*>(&lower_kernel<256>)};
}
}  // namespace ta::cuda
