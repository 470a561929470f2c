#include "kernels/cuda/sm80/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm80 {
Kernels kernels_d96() {
    return kernels<96, false>();
}
}  // namespace ta::cuda::prefill::sm80
