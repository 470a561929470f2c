#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm90 {
Kernels kernels_d128() {
    return kernels<128, false>();
}
}  // namespace ta::cuda::prefill::sm90
