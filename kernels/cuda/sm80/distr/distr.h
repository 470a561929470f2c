// DistrAttention for every GPU since Ampere. The host side.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/any/distr/distr.h"

namespace ta::cuda::distr::sm80 {

// It takes every call.
const char* refusal(const DistrArgs& args);
// Attends with what launch_distr_keys() and launch_distr_rows() have prepared.
cudaError_t launch(const DistrArgs& args, cudaStream_t stream);

}  // namespace ta::cuda::distr::sm80
