#include "kernels/cuda/sm90/distr/instantiate.cuh"

namespace ta::cuda::distr::sm90 {
Kernels kernels_d128() {
    return kernels<128>();
}
}  // namespace ta::cuda::distr::sm90
