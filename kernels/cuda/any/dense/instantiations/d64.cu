#include "kernels/cuda/any/dense/instantiate.cuh"

namespace ta::cuda {
DenseKernels dense_kernels_d64() {
    return dense_kernels<64>();
}
}  // namespace ta::cuda
