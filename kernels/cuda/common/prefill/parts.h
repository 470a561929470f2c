// Results of parts of tiles in the workspace: [slot][rows / 16], each, of 16 rows
//   float4 o [head_dim / 8][32], the accumulators of a warp's lanes, four at a time
//   float4 sums [32]: l of a lane's two rows, then their references
#pragma once

#include <cstddef>

namespace ta::cuda {

// Slots of a launch: enough for CTAs to share the work evenly, little enough memory (104 KB each at head_dim 128).
constexpr int prefill_slots(int ctas) {
    return 2 * ctas;
}
constexpr size_t part_bytes(int head_dim) {
    return size_t(head_dim / 8 + 1) * 32 * 16;
}

}  // namespace ta::cuda
