// Copies pages of blocks that windows pass (src/attend/passing.h), in device memory. Only CUDA builds include this.
#pragma once

#include "src/attend/step.h"
#include "src/device/cuda/device.h"

namespace ta {

// Enqueues the copies of the pages that stay, after the whole blocks are hashed. `fence`: of the step's own plan.
Status copy_passing(const Geometry& geometry, CudaDevice& device, Step& step, cudaEvent_t fence, cudaStream_t stream);

}  // namespace ta
