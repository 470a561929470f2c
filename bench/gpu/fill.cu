#include <cuda_fp16.h>

#include "bench/gpu/fill.h"
#include "bench/gpu/support.h"

namespace ta::bench {
namespace {

constexpr int kThreads = 256, kBlocks = 2048;

__global__ void fill(__half* to, size_t n, uint64_t seed) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        uint64_t x = (seed << 40) + i + 0x9e3779b97f4a7c15u;  // splitmix64
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        to[i] = __float2half_rz(float((x ^ x >> 31) >> 40) * 0x1p-24f);
    }
}

__global__ void compare(const uint32_t* a, const uint32_t* b, size_t n, unsigned long long* differences) {
    const size_t step = size_t(gridDim.x) * blockDim.x;
    unsigned long long found = 0;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) found += a[i] != b[i];
    if (found) atomicAdd(differences, found);
}

}  // namespace

void fill_uniform(void* to, size_t elements, uint64_t seed) {
    fill<<<kBlocks, kThreads>>>(static_cast<__half*>(to), elements, seed);
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaDeviceSynchronize());
}

uint64_t count_differences(const void* a, const void* b, size_t bytes) {
    const DeviceArray count(sizeof(unsigned long long));
    CUDA_OK(cudaMemset(count.data, 0, sizeof(unsigned long long)));
    compare<<<kBlocks, kThreads>>>(static_cast<const uint32_t*>(a), static_cast<const uint32_t*>(b), bytes / sizeof(uint32_t),
                                   static_cast<unsigned long long*>(count.data));
    CUDA_OK(cudaGetLastError());
    unsigned long long found = 0;
    CUDA_OK(cudaMemcpy(&found, count.data, sizeof found, cudaMemcpyDeviceToHost));
    return found;
}

}  // namespace ta::bench
