#include "kernels/cuda/any/dense/instantiate.cuh"

namespace ta::cuda {
DenseKernels dense_kernels_d128() {
    return dense_kernels<128>();
}
}  // namespace ta::cuda
