// Merges partial attention results: for ta_merge_states, and for partitioned sequences.
#pragma once

#include "kernels/format/merge_states.h"
#include "src/core/status.h"
#include "src/kv/tensor.h"

namespace ta {

class Context;
class CudaDevice;

// `lse`: [tokens, heads] without gaps; may be nullptr for a result.
MergeState merge_state(const TensorView& o, const float* lse);

// The caller has checked the arguments, except a GPU's memory. On a CPU checks the LSEs: TA_E_NONFINITE. On a GPU enqueues on
// `stream` and returns; the call may be captured.
Status merge_states(Context& context, const MergeArgs& args, ta_stream stream);

// Merges on a GPU.
Status merge_states_on_gpu(const CudaDevice& device, const MergeArgs& args, ta_stream stream);

}  // namespace ta
