#include "kernels/cuda/any/decode/instantiate.cuh"

namespace ta::cuda {
DecodeKernels decode_kernels_d256() {
    return decode_kernels<256>();
}
}  // namespace ta::cuda
