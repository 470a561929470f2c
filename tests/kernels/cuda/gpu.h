// If there is no GPU, the CUDA tests are reported as skipped, not as passed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>

namespace ta::cuda::testing {

inline constexpr int kSkipped = 77;  // the exit status that CTest takes for it

inline bool without_gpu() {
    int n = 0;
    if (cudaGetDeviceCount(&n) == cudaSuccess && n > 0) return false;
    std::puts("no GPU: SKIPPED, nothing of these kernels is tested here");
    return true;
}

}  // namespace ta::cuda::testing
