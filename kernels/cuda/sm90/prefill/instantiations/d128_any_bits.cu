#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm90 {
Kernels kernels_d128_any_bits() {
    return kernels<128, true, Tiles::kAny, true>();
}
}  // namespace ta::cuda::prefill::sm90
