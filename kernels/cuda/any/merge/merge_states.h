// Merging partial attention results on a GPU: the same bits as on a CPU (kernels/format/merge_states.h). The host side; nothing
// here needs the CUDA language.
#pragma once

#include "kernels/format/merge_states.h"

struct CUstream_st;

namespace ta::cuda {

// One launch; all that it needs are its arguments, so it can be captured. Tensors whose rows all begin at multiples of 16 bytes,
// with a head_dim that is a multiple of 8, are read and written 8 elements at a time. Returns a cudaError_t.
int launch_merge_states(const MergeArgs& args, CUstream_st* stream);

}  // namespace ta::cuda
