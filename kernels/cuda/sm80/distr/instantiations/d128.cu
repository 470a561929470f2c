#include "kernels/cuda/sm80/distr/instantiate.cuh"

namespace ta::cuda::distr::sm80 {
Kernels kernels_d128() {
    return kernels<128>();
}
}  // namespace ta::cuda::distr::sm80
