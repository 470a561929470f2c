#include "kernels/cuda/sm80/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm80 {
Kernels kernels_d256_channels() {
    return kernels<256, true>();
}
}  // namespace ta::cuda::prefill::sm80
