// Which GPUs' code runs.
#pragma once

#include <cuda_runtime_api.h>

namespace ta::cuda {

// The generation (8 from sm_80 on, 9 from sm_90 on) whose code the kernels of this build run on the current device: an older
// one than the device's where the build has only that one's PTX. cudaErrorNoKernelImageForDevice where it has nothing for the
// device.
cudaError_t kernel_generation(int* generation);

}  // namespace ta::cuda
