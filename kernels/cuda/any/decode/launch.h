// The instantiations of the decode kernels, one source file per head_dim: instantiations/d*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/any/decode/params.h"

namespace ta::cuda {

// kTiered: for pools that record the attention of pages, or lack pages, or have low ones. kGeneral: with any option, and that
// too.
enum DecodeKind { kPlain, kTiered, kGeneral, kDecodeKinds };

struct DecodeKernels {
    // [DecodeKind][1, 2 and 4 tiles of query rows]: kernels of one argument, DecodeParams.
    const void* attend[kDecodeKinds][3];
    int warp_bytes[3];  // shared memory of a warp besides its ring
};

DecodeKernels decode_kernels_d64();
DecodeKernels decode_kernels_d96();
DecodeKernels decode_kernels_d128();
DecodeKernels decode_kernels_d256();

}  // namespace ta::cuda
