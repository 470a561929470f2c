#include "kernels/cuda/any/dense/instantiate.cuh"

namespace ta::cuda {
DenseKernels dense_kernels_d256() {
    return dense_kernels<256>();
}
}  // namespace ta::cuda
