#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm90 {
Kernels kernels_d64_long() {
    return kernels<64, false, Tiles::kLong>();
}
}  // namespace ta::cuda::prefill::sm90
