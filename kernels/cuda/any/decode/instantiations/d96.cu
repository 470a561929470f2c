#include "kernels/cuda/any/decode/instantiate.cuh"

namespace ta::cuda {
DecodeKernels decode_kernels_d96() {
    return decode_kernels<96>();
}
}  // namespace ta::cuda
