// Universal scales of sequences that do not have theirs any more, after a truncate, fork, match or load: found in their blocks on the
// GPU. Only CUDA builds include this.
#pragma once

#include "src/attend/cuda/constants.h"
#include "src/attend/cuda/tables.h"
#include "src/attend/step.h"
#include "src/device/cuda/device.h"

namespace ta {

// Of the step's members that need it, whose blocks are in the tables: enqueues the search.
Status recall_scales(const Step& step, const Pool& pool, const CudaDevice& device, const CudaConstants& constants,
                     const CudaTables& tables, cudaStream_t stream);

}  // namespace ta
