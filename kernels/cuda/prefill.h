// Prefill on Hopper: attention of many query rows over pages, on the INT8 tensor cores (sm_90a). The rows of a call are cut into
// tiles; a host function writes the tiles and which CTA computes them into a buffer that is copied to the device. The grid and
// the arguments do not depend on lengths, so a captured graph is replayed after rewriting that buffer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cuda/attend_args.h"

namespace ta::cuda {

inline constexpr int kPrefillRows = 128;  // query rows of a tile: query token * group + query head within the group

struct alignas(16) PrefillTile {
    int32_t head;                               // kv head
    int32_t first_row;                          // of the sequence's n_query * group
    int32_t page_begin, page_end;               // pages that at least one row sees; none: page_begin == page_end
    int32_t n_keys, n_query, row, first_entry;  // of the sequence, as in SequenceArgs
    int32_t sequence;
    int32_t unused[3];
};
static_assert(sizeof(PrefillTile) == 48);

// The schedule: int32_t begin[ctas + 1], then at the next multiple of 16 the tiles; CTA c computes tiles begin[c] ... in order.
TA_HD constexpr size_t prefill_tiles_offset(int ctas) {
    return (size_t(ctas + 1) * sizeof(int32_t) + 15) / 16 * 16;
}
TA_HD constexpr size_t prefill_schedule_bytes(int ctas, int64_t tiles) {
    return prefill_tiles_offset(ctas) + size_t(tiles) * sizeof(PrefillTile);
}
// Tiles of a call: what `plan_prefill` will write.
int64_t count_prefill_tiles(std::span<const SequenceArgs> sequences, int group, int kv_heads);
// Writes the schedule of `sequences` (in host memory) into `schedule`, also in host memory. Longest tiles first, to the CTA with
// the least work.
void plan_prefill(std::span<const SequenceArgs> sequences, int group, int kv_heads, bool causal, int window, int ctas,
                  void* schedule);

// Why the kernel cannot run a call, or nullptr when it can.
const char* prefill_refusal(const AttendArgs& args);

// Enqueues the call; `schedule` is in device memory, `ctas` the number it was planned for, at best that of the multiprocessors.
cudaError_t launch_prefill(const AttendArgs& args, const void* schedule, int ctas, cudaStream_t stream);

}  // namespace ta::cuda
