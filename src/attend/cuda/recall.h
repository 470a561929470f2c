// Universal scales of sequences that have lost theirs, by a truncate, fork, match or load: finds them in the blocks, on the
// GPU. Only CUDA builds include this.
#pragma once

#include "src/attend/cuda/constants.h"
#include "src/attend/cuda/tables.h"
#include "src/attend/step.h"
#include "src/device/cuda/device.h"

namespace ta {

// Enqueues the search for members that need it. The tables have their blocks.
Status recall_scales(const Step& step, const Pool& pool, const CudaDevice& device, const CudaConstants& constants,
                     const CudaTables& tables, cudaStream_t stream);

}  // namespace ta
