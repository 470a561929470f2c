#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda {
PrefillKernels prefill_kernels_d64_channels() {
    return prefill_kernels<64, true>();
}
}  // namespace ta::cuda
