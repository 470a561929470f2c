#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda::prefill::sm90 {
Kernels kernels_d64_resident() {
    return kernels<64, false, Tiles::kResident>();
}
}  // namespace ta::cuda::prefill::sm90
