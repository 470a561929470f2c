#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm90 {
Kernels kernels_d128_channels() {
    return kernels<128, true>();
}
}  // namespace ta::cuda::prefill::sm90
