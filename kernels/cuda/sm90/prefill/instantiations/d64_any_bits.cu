#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda {
PrefillKernels prefill_kernels_d64_any_bits() {
    return prefill_kernels<64, true, prefill::Tiles::kAny, true>();
}
}  // namespace ta::cuda
