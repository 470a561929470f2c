// The instantiations of the dense kernels, one source file per head_dim: instantiations/d*.cu.
#pragma once

namespace ta::cuda {

struct DenseKernels {
    const void *amax, *pages;  // of one argument, DensePagesArgs; a CTA for each page and head
    int page_threads;
    const void* half;  // of one argument, DenseHalfArgs; a CTA for each tile (x) and kv head (y)
    int half_threads, half_smem;
};

DenseKernels dense_kernels_d64();
DenseKernels dense_kernels_d96();
DenseKernels dense_kernels_d128();
DenseKernels dense_kernels_d256();

}  // namespace ta::cuda
