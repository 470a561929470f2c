// Launches that report their own error: the last error of the thread may be one that the caller's program left.
#pragma once

#include <cuda_runtime.h>

namespace ta::cuda {

template <class... P, class... A>
cudaError_t launch_kernel(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                          A&&... arguments) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<A&&>(arguments)...);
}

}  // namespace ta::cuda
