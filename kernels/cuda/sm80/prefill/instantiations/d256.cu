#include "kernels/cuda/sm80/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm80 {
Kernels kernels_d256() {
    return kernels<256, false>();
}
}  // namespace ta::cuda::prefill::sm80
