// Prefill on Hopper: attention of many query rows over pages, on the INT8 tensor cores (sm_90a).
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/prefill/schedule.h"

namespace ta::cuda::prefill::sm90 {

inline constexpr int kRowsOfTile = 192;  // query rows of a tile
inline constexpr int kWarpsOfTile = kRowsOfTile / 16;

// Keys of a sequence that the kernel for resident tiles has room for.
template <int D>
inline constexpr int kResidentKeys = D == 128 ? 512 : 1024;

// Why the kernel cannot run a call, or nullptr when it can. Its P has 255 levels and a unit per 128 keys: finer than P of 127 and
// 119 levels and than P in units of the running maximum. So it serves calls that ask for those.
const char* refusal(const AttendArgs& args);

// Sequences of up to so many keys, without channel pages, can have resident tiles.
int resident_keys(const AttendArgs& args);

// Loads the kernel that a captured call with these arguments takes, never that for long or resident tiles, so that its first launch
// may be a captured one.
cudaError_t load(const AttendArgs& args);

// Enqueues the call on `ctas` CTAs, at best as many as multiprocessors; `schedule` and `workspace` are in device memory, both
// 16-byte aligned. Launches with the same schedule or workspace must not overlap. A schedule without parts needs no workspace.
cudaError_t launch(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream);

}  // namespace ta::cuda::prefill::sm90
