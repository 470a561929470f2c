#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm90 {
Kernels kernels_d64_channels() {
    return kernels<64, true>();
}
}  // namespace ta::cuda::prefill::sm90
