#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda {
PrefillKernels prefill_kernels_d128_channels() {
    return prefill_kernels<128, true>();
}
}  // namespace ta::cuda
