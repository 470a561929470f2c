#include "kernels/cuda/sm80/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm80 {
Kernels kernels_d64_channels() {
    return kernels<64, true>();
}
}  // namespace ta::cuda::prefill::sm80
