#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda {
PrefillKernels prefill_kernels_d64_long() {
    return prefill_kernels<64, false, prefill::Tiles::kLong>();
}
}  // namespace ta::cuda
