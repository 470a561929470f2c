#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda {
PrefillKernels prefill_kernels_d128_long() {
    return prefill_kernels<128, false, prefill::Tiles::kLong>();
}
}  // namespace ta::cuda
