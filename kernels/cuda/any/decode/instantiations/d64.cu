#include "kernels/cuda/any/decode/instantiate.cuh"

namespace ta::cuda {
DecodeKernels decode_kernels_d64() {
    return decode_kernels<64>();
}
}  // namespace ta::cuda
