#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda {
PrefillKernels prefill_kernels_d64() {
    return prefill_kernels<64, false>();
}
}  // namespace ta::cuda
