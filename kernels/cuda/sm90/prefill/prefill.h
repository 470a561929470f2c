// Prefill on Hopper: attention of many query rows over pages, on the INT8 tensor cores (sm_90a). The rows of a call are cut
// into tiles; a host function lists them in a buffer that is copied to the device, and CTAs take them from there one after the
// other. The grid and the arguments do not depend on lengths, so a captured graph is replayed after rewriting that buffer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cuda/common/attend_args.h"

namespace ta::cuda {

inline constexpr int kPrefillRows = 192;  // query rows of a tile: query token * group + query head within the group

// The same rows of each kv head.
struct alignas(16) PrefillTile {
    int32_t first_row;                          // of the sequence's n_query * group
    int32_t page_begin, page_end;               // pages that at least one row sees; none: page_begin == page_end
    int32_t n_keys, n_query, row, first_entry;  // of the sequence, as in SequenceArgs
    int32_t sequence;
};
static_assert(sizeof(PrefillTile) == 32);

// The schedule begins with this, the tiles follow, those with the most pages first. Item n of a launch is tile n / kv_heads of
// head n % kv_heads. Both counters are 0 between launches: the last CTA to finish sees to it.
struct alignas(16) PrefillSchedule {
    int32_t taken;     // items
    int32_t finished;  // CTAs
    int32_t tiles;
    int32_t unused;
};

TA_HD constexpr size_t prefill_schedule_bytes(int64_t tiles) {
    return sizeof(PrefillSchedule) + size_t(tiles) * sizeof(PrefillTile);
}
// Tiles of a call: what `plan_prefill` will write.
int64_t count_prefill_tiles(std::span<const SequenceArgs> sequences, int group);
// Writes the schedule of `sequences` (in host memory) into `schedule`, also in host memory.
void plan_prefill(std::span<const SequenceArgs> sequences, int group, bool causal, int window, void* schedule);

// Why the kernel cannot run a call, or nullptr when it can.
const char* prefill_refusal(const AttendArgs& args);

// Loads the kernel for channel pages that a call with these options takes, so that its first launch may be a captured one.
cudaError_t load_prefill(const AttendArgs& args);

// Enqueues the call on `ctas` CTAs, at best as many as multiprocessors; `schedule` is in device memory. Launches with the same
// schedule must not overlap.
cudaError_t launch_prefill(const AttendArgs& args, void* schedule, int ctas, cudaStream_t stream);

}  // namespace ta::cuda
