#include "kernels/cuda/any/decode/instantiate.cuh"

namespace ta::cuda {
DecodeKernels decode_kernels_d128() {
    return decode_kernels<128>();
}
}  // namespace ta::cuda
