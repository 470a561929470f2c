#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm90 {
Kernels kernels_d64() {
    return kernels<64, false>();
}
}  // namespace ta::cuda::prefill::sm90
