// Merges partial attention results: ta_merge_states, and sequences whose blocks lie on several GPUs.
#pragma once

#include "kernels/format/merge_states.h"
#include "src/core/status.h"
#include "src/kv/tensor.h"

namespace ta {

class Context;
class CudaDevice;

// `lse` [tokens, heads], one after the other; may be nullptr for a result.
MergeState merge_state(const TensorView& o, const float* lse);

// Arguments are checked already, but for a GPU's memory and, on a CPU, the LSEs: TA_E_NONFINITE. On a GPU it enqueues on `stream`
// and returns; the call may be captured.
Status merge_states(Context& context, const MergeArgs& args, ta_stream stream);

// The same on a GPU.
Status merge_states_on_gpu(const CudaDevice& device, const MergeArgs& args, ta_stream stream);

}  // namespace ta
