// Prefill on every GPU since Ampere: attention of many query rows over pages, by INT8 mma.sync.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/prefill/schedule.h"

namespace ta::cuda::prefill::sm80 {

// Query rows of a tile: at up to 128 channels and at 256.
inline constexpr int kRowsOfTile = 256, kRowsOfWideTile = 128;

// Why the kernel cannot run a call, or nullptr when it can: that for tiles of kRowsOfTile, and for kRowsOfWideTile.
const char* refusal(const AttendArgs& args);
const char* wide_refusal(const AttendArgs& args);

// Shared memory that a GPU must allow a CTA.
inline constexpr int kSharedBytes = 99 * 1024, kWideSharedBytes = 160 * 1024;

// Loads the kernel that a captured call with these arguments takes, so that its first launch may be a captured one.
cudaError_t load(const AttendArgs& args);

// Enqueues the call on `ctas` CTAs, at best as many as multiprocessors; `schedule` and `workspace` are in device memory, both
// 16-byte aligned. Launches with the same schedule or workspace must not overlap. A schedule without parts needs no workspace.
cudaError_t launch(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream);

}  // namespace ta::cuda::prefill::sm80
