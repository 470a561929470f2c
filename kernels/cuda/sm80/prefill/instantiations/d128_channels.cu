#include "kernels/cuda/sm80/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm80 {
Kernels kernels_d128_channels() {
    return kernels<128, true>();
}
}  // namespace ta::cuda::prefill::sm80
