// The rates that this GPU reaches now: reading memory, and the INT8 tensor cores of Hopper.
#include <algorithm>
#include <vector>

#include "bench/gpu/support.h"
#include "kernels/cuda/ptx/wgmma.cuh"

namespace ta::bench {
namespace {

__global__ void __launch_bounds__(512) read_kernel(const uint4* data, size_t n, uint32_t* sink) {
    uint32_t x = 0;
    const size_t stride = size_t(gridDim.x) * blockDim.x;
    size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) v[k] = __ldcs(data + i + k * stride);
#pragma unroll
        for (int k = 0; k < 4; ++k) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (x == 0x12345678) *sink = x;  // never, but the compiler cannot know
}

constexpr int kSteps = 4096;

// Two warpgroups per multiprocessor that do nothing but multiply: 64 x 128 x 32 a step.
__global__ void __launch_bounds__(256) multiply_kernel(uint32_t* sink) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) uint8_t memory[];
    for (int i = threadIdx.x; i < 16384; i += 256) memory[i] = uint8_t(i * 7);
    __syncthreads();
    int32_t s[64] = {};
    const uint64_t tile = cuda::ptx::tile_descriptor<128>(memory);
    for (int i = 0; i < kSteps / 8; ++i) {
        cuda::ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < 8; ++k) cuda::ptx::wgmma_s8_n128(s, tile + 2 * (k % 4), tile + 2 * (k % 4), true);
        cuda::ptx::wgmma_commit();
        cuda::ptx::wgmma_wait<0>();
        cuda::ptx::pin_registers(s);
    }
    int32_t x = 0;
    for (int k = 0; k < 64; ++k) x ^= s[k];
    if (x == 0x12345678) *sink = uint32_t(x);
#endif
}

}  // namespace

void flush_l2(cudaStream_t stream) {
    constexpr size_t kBytes = size_t{256} << 20;
    static const DeviceArray data(kBytes), sink(16);
    read_kernel<<<132 * 4, 512, 0, stream>>>(static_cast<const uint4*>(data.data), kBytes / 16,
                                             static_cast<uint32_t*>(sink.data));
    CUDA_OK(cudaGetLastError());
}

double measured_hbm_bytes_per_s() {
    constexpr size_t kBytes = size_t{4} << 30;
    const DeviceArray data(kBytes), sink(16);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const double us = cold_us(stream, [&] {
        read_kernel<<<132 * 4, 512, 0, stream>>>(static_cast<const uint4*>(data.data), kBytes / 16,
                                                 static_cast<uint32_t*>(sink.data));
    });
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaStreamDestroy(stream));
    return double(kBytes) / (us * 1e-6);
}

double measured_int8_ops_per_s() {
    int device = 0;
    cudaDeviceProp p{};
    CUDA_OK(cudaGetDevice(&device));
    CUDA_OK(cudaGetDeviceProperties(&p, device));
    if (p.major != 9) return 0.0;
    const DeviceArray sink(16);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const double us = cold_us(
        stream, [&] { multiply_kernel<<<p.multiProcessorCount, 256, 16384, stream>>>(static_cast<uint32_t*>(sink.data)); });
    CUDA_OK(cudaGetLastError());
    CUDA_OK(cudaStreamDestroy(stream));
    return 2.0 * 64 * 128 * 32 * kSteps * 2 * p.multiProcessorCount / (us * 1e-6);
}

}  // namespace ta::bench
