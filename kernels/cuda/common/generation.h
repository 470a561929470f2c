// Which GPUs' code runs.
#pragma once

#include <cuda_runtime_api.h>

namespace ta::cuda {

// The generation (8 from sm_80 on, 9 from sm_90 on) whose code the kernels of this build run on the current device: older than
// the device's if the build has only PTX of an older one. cudaErrorNoKernelImageForDevice if it has nothing for the device.
cudaError_t kernel_generation(int* generation);

}  // namespace ta::cuda
