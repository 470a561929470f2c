#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/any/dense/dense.h"
#include "kernels/cuda/any/dense/launch.h"
#include "kernels/cuda/common/launch.cuh"

namespace ta::cuda {
namespace {

DenseKernels kernels_for(int head_dim) {
    switch (head_dim) {
        case 64:
            return dense_kernels_d64();
        case 96:
            return dense_kernels_d96();
        case 128:
            return dense_kernels_d128();
        case 256:
            return dense_kernels_d256();
        default:
            return {};
    }
}

int launch_for_pages(const void* kernel, int threads, const DensePagesArgs& args, CUstream_st* stream) {
    if (!kernel || int64_t(args.n_pages) * args.kv_heads > INT32_MAX) return cudaErrorInvalidValue;
    if (args.n_pages == 0) return cudaSuccess;
    DensePagesArgs copy = args;
    void* parameters[] = {&copy};
    return cudaLaunchKernel(kernel, dim3(unsigned(args.n_pages * args.kv_heads)), dim3(unsigned(threads)), parameters, 0,
                            stream);
}

constexpr int kCountThreads = 256;

__global__ void __launch_bounds__(kCountThreads) dense_count_kernel(const uint32_t* counts, int64_t n, uint32_t* total) {
    uint32_t sum = 0;
    for (int64_t i = int64_t(blockIdx.x) * kCountThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kCountThreads) {
        sum += counts[i];
    }
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (sum != 0 && threadIdx.x % 32 == 0) atomicAdd_system(total, sum);
}

}  // namespace

int launch_dense_amax(const DensePagesArgs& args, CUstream_st* stream) {
    const DenseKernels k = kernels_for(args.head_dim);
    return launch_for_pages(k.amax, k.page_threads, args, stream);
}

int launch_dense_pages(const DensePagesArgs& args, CUstream_st* stream) {
    const DenseKernels k = kernels_for(args.head_dim);
    return launch_for_pages(k.pages, k.page_threads, args, stream);
}

int launch_dense_half(const DenseHalfArgs& args, CUstream_st* stream) {
    const DenseKernels k = kernels_for(args.attend.head_dim);
    if (!k.half) return cudaErrorInvalidValue;
    if (args.n_tiles == 0) return cudaSuccess;
    if (cudaError_t e = cudaFuncSetAttribute(k.half, cudaFuncAttributeMaxDynamicSharedMemorySize, k.half_smem);
        e != cudaSuccess)
        return e;
    DenseHalfArgs copy = args;
    void* parameters[] = {&copy};
    const dim3 grid(unsigned(args.n_tiles), unsigned(args.attend.kv_heads));
    return cudaLaunchKernel(k.half, grid, dim3(unsigned(k.half_threads)), parameters, size_t(k.half_smem), stream);
}

int launch_dense_count(const uint32_t* counts, int64_t n, uint32_t* total, CUstream_st* stream) {
    const int64_t ctas = std::clamp<int64_t>((n + kCountThreads - 1) / kCountThreads, 1, 64);
    return launch_kernel(dense_count_kernel, unsigned(ctas), kCountThreads, 0, stream, counts, n, total);
}

}  // namespace ta::cuda
