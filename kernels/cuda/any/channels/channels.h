// Rows of as many channels as blocks have, for callers that have fewer, and back. The host side; nothing here needs the CUDA
// language.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/attend_args.h"

struct CUstream_st;

namespace ta::cuda {

// `from` and `to` are [rows, heads, channels] of one type. The two halves of the shorter rows, each of a multiple of 4 channels, are
// the beginnings of the halves of the longer ones (kernels/format/channels.h), whose other channels become 0 or are left out.
struct CopyChannelsArgs {
    TensorArgs from, to;
    int64_t rows;
    int32_t heads, from_channels, to_channels;
};

// Enqueues the copy. Returns a cudaError_t.
int launch_copy_channels(const CopyChannelsArgs& args, CUstream_st* stream);

}  // namespace ta::cuda
