// The instantiations of the append kernel, one source file per head_dim: instantiations/d*.cu.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/any/append/append.h"

namespace ta::cuda {

struct AppendKernel {
    const void* kernel;  // of one argument, AppendArgs
    int threads;
    const void* lower;  // of one argument, LowerArgs; as many threads
};

// The search for turning pairs. Once for each device and head_dim, before it is launched. Returns a cudaError_t.
int prepare_turning(int head_dim, int* ctas_per_multiprocessor);
int launch_turning(const AppendPlan& plan, const AppendArgs& args, CUstream_st* stream);

// CTAs side by side that have something to do, of a plan's; the layers of a launch lie along y.
inline unsigned ctas_of(int32_t planned, const AppendArgs& args) {
    return unsigned(args.most_tasks > 0 ? std::min(int64_t{planned}, int64_t{args.most_tasks} * args.kv_heads) : planned);
}
inline unsigned layers_of(const AppendArgs& args) {
    return unsigned(args.layers ? args.n_layers : 1);
}

AppendKernel append_kernel_d64();
AppendKernel append_kernel_d96();
AppendKernel append_kernel_d128();
AppendKernel append_kernel_d256();

}  // namespace ta::cuda
