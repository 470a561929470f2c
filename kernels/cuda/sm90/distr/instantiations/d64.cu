#include "kernels/cuda/sm90/distr/instantiate.cuh"

namespace ta::cuda::distr::sm90 {
Kernels kernels_d64() {
    return kernels<64>();
}
}  // namespace ta::cuda::distr::sm90
