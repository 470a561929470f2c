#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm90 {
Kernels kernels_d128_resident() {
    return kernels<128, false, Tiles::kResident>();
}
}  // namespace ta::cuda::prefill::sm90
