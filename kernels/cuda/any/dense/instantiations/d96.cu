#include "kernels/cuda/any/dense/instantiate.cuh"

namespace ta::cuda {
DenseKernels dense_kernels_d96() {
    return dense_kernels<96>();
}
}  // namespace ta::cuda
