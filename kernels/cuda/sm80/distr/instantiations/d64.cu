#include "kernels/cuda/sm80/distr/instantiate.cuh"

namespace ta::cuda::distr::sm80 {
Kernels kernels_d64() {
    return kernels<64>();
}
}  // namespace ta::cuda::distr::sm80
