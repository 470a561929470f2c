#include "kernels/cuda/sm80/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm80 {
Kernels kernels_d128() {
    return kernels<128, false>();
}
}  // namespace ta::cuda::prefill::sm80
