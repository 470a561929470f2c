#include "kernels/cuda/sm90/prefill/instantiate.cuh"

namespace ta::cuda {
PrefillKernels prefill_kernels_d128() {
    return prefill_kernels<128, false>();
}
}  // namespace ta::cuda
