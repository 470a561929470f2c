// DistrAttention on Hopper's tensor cores (sm_90a). The host side.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/any/distr/distr.h"

namespace ta::cuda::distr::sm90 {

// The reason why it cannot run the call, or nullptr.
const char* refusal(const DistrArgs& args);
// Attends with what launch_distr_keys() and launch_distr_rows() have prepared.
cudaError_t launch(const DistrArgs& args, cudaStream_t stream);

}  // namespace ta::cuda::distr::sm90
