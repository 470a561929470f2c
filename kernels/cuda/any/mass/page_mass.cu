#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/any/decode/params.h"
#include "kernels/cuda/any/mass/page_mass.h"

namespace ta::cuda {
namespace {

constexpr int kThreads = 256, kMostRows = 4096, kParts = 8;

// CTAs: sequences, parts of them.
__global__ void __launch_bounds__(kThreads) page_mass_kernel(const __grid_constant__ PageMassArgs a) {
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *a.heads_to = *a.heads;
    for (int32_t row = int32_t(blockIdx.x); row < a.n_rows; row += int32_t(gridDim.x)) {
        const MassRow r = a.rows[row];
        for (uint32_t i = blockIdx.y * kThreads + threadIdx.x; i < r.n; i += kParts * kThreads) {
            uint64_t& weight = a.weight[r.first + i];
            a.to[r.to + i] = float(weight) * kMassUnit;
            weight = 0;
        }
    }
}

}  // namespace

int launch_page_mass(const PageMassArgs& args, CUstream_st* stream) {
    PageMassArgs copy = args;
    void* parameters[] = {&copy};
    const dim3 grid(unsigned(std::clamp(args.n_rows, 1, kMostRows)), kParts);
    return cudaLaunchKernel(reinterpret_cast<const void*>(&page_mass_kernel), grid, dim3(kThreads), parameters, 0, stream);
}

}  // namespace ta::cuda
