// The instantiations of the append kernel, one source file per head_dim: instantiations/d*.cu.
#pragma once

namespace ta::cuda {

struct AppendKernel {
    const void* kernel;  // of one argument, AppendArgs
    int threads;
    const void* lower;  // of one argument, LowerArgs; as many threads
};

// Once for each device and head_dim, before launch_turning. Returns a cudaError_t.
int prepare_turning(int head_dim, int* ctas_per_multiprocessor);

AppendKernel append_kernel_d64();
AppendKernel append_kernel_d96();
AppendKernel append_kernel_d128();
AppendKernel append_kernel_d256();

}  // namespace ta::cuda
