// The instantiations of the kernel, one source file per head_dim: instantiations/d*.cu.
#pragma once

namespace ta::cuda::distr::sm80 {

struct Kernels {
    const void* attend[3][2];  // [group size - 2][has options]; one argument, DistrArgs
    int threads, shared_bytes[3];
};

Kernels kernels_d32();
Kernels kernels_d64();
Kernels kernels_d128();

}  // namespace ta::cuda::distr::sm80
