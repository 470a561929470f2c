#include "kernels/cuda/sm80/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm80 {
Kernels kernels_d64() {
    return kernels<64, false>();
}
}  // namespace ta::cuda::prefill::sm80
