// K and V of drafts as they were given, which appends keep (AppendArgs::kept_k) until the end of the step says which of them stay. The
// host side; nothing here needs the CUDA language.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/attend_args.h"

struct CUstream_st;

namespace ta::cuda {

struct KeptTokens {
    int32_t first_row;  // of the sequence's new tokens
    int32_t n;          // that stay
    int32_t path;       // their places among the new tokens are at paths[path ..]; -1: the first ones stay
    int32_t sequence;   // index for nonfinite
};

// All layers.
struct CloseUpArgs {
    uint8_t* drafts;  // [layers, 2] times `bytes`: K and V
    size_t bytes;
    const uint8_t* dtypes;     // [layers, 2] of DType
    const KeptTokens* tokens;  // [members]
    const int32_t* paths;
    int32_t layers, members, row_elements;
    uint32_t* nonfinite;  // [sequences] counts values of tokens that stay that appends replace
};

// Enqueues the kernel that moves the tokens that stay to the first places of each sequence. Returns a cudaError_t.
int launch_close_up(const CloseUpArgs& args, CUstream_st* stream);

}  // namespace ta::cuda
