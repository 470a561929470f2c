#include "kernels/cuda/sm80/distr/instantiate.cuh"

namespace ta::cuda::distr::sm80 {
Kernels kernels_d32() {
    return kernels<32>();
}
}  // namespace ta::cuda::distr::sm80
