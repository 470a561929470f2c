#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/any/tables/step_tables.h"

namespace ta::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) step_tables_kernel(const __grid_constant__ StepTablesArgs a) {
    const size_t first = size_t(blockIdx.x) * kThreads + threadIdx.x, stride = size_t(gridDim.x) * kThreads;
#pragma unroll
    for (int n = 0; n < StepTablesArgs::kCopies; ++n) {
        const auto* from = static_cast<const uint4*>(a.copies[n].from);
        auto* to = static_cast<uint4*>(a.copies[n].to);
        for (size_t i = first; i < a.copies[n].bytes / 16; i += stride) to[i] = from[i];
    }
    for (size_t i = first; i < a.n_patches; i += stride) {
        const ulonglong2 patch = reinterpret_cast<const ulonglong2*>(a.patches)[i];
        a.table[patch.x] = patch.y;
    }
}

}  // namespace

int launch_step_tables(const StepTablesArgs& args, CUstream_st* stream) {
    static_assert(sizeof(TablePatch) == sizeof(ulonglong2));
    size_t chunks = args.n_patches;
    for (const auto& copy : args.copies) chunks = std::max(chunks, copy.bytes / 16);
    if (chunks == 0) return cudaSuccess;
    StepTablesArgs copy = args;
    void* parameters[] = {&copy};
    const size_t ctas = std::min<size_t>((chunks + kThreads - 1) / kThreads, 64);
    return cudaLaunchKernel(reinterpret_cast<const void*>(&step_tables_kernel), dim3(unsigned(ctas)), dim3(kThreads),
                            parameters, 0, stream);
}

}  // namespace ta::cuda
