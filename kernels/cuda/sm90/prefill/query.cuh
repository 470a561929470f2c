// Places of the codes of queries.
#pragma once

#include "kernels/cuda/common/prefill/query.cuh"
#include "kernels/cuda/sm90/prefill/shared.cuh"

namespace ta::cuda::prefill::sm90 {

// Q's tile.
template <int D>
struct SwizzledRows {
    uint8_t* q;
    TA_DEVICE void store(int, int at, int i, const uint32_t (&w)[2][D / 32]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint8_t* const chunk = q + at * D + ptx::swizzled_chunk<D>(at, channel_chunk<D>(8 * i + 4 * h)) * 16;
            if constexpr (D == 128) {
                *reinterpret_cast<uint4*>(chunk) = make_uint4(w[h][0], w[h][1], w[h][2], w[h][3]);
            } else {
#pragma unroll
                for (int n = 0; n < D / 32; ++n)
                    *reinterpret_cast<uint32_t*>(chunk + channel_byte<D>(32 * n + 8 * i)) = w[h][n];
            }
        }
    }
};

// Which lane of the consumers this is. At the start and the end of a tile it is computed again: what the compiler knows of it
// before the main loop it would keep in local memory, which takes longer.
struct ConsumerLane {
    int thread, lane, row_in_tile;
    TA_DEVICE ConsumerLane() {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        lane = thread % 32;
        row_in_tile = thread / 32 * 16 + lane / 4;
    }
};

// start_rows as a call: where a kernel's main loop is so given better registers.
template <int D>
__device__ __noinline__ void start_rows_apart(const AttendArgs& args, const Tile& tile, int row_in_tile, int lane,
                                              const uint4* masks, uint8_t* q, RowInfo* info) {
    start_rows<D>(args, tile, row_in_tile, lane, masks, SwizzledRows<D>{q}, info);
}

}  // namespace ta::cuda::prefill::sm90
