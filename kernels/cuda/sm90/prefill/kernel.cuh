// The prefill kernel. Persistent CTAs, which take tiles of 192 query rows of one kv head from a list. Four producer warps
// expand pages into INT8 tiles in shared memory (pages.cuh); three warpgroups of 64 rows run, per block of 128 keys,
//   S = Q K^T (s8 x s8) -> P (u8, softmax.cuh) -> O += P V (u8 x u8, int32, added to O in fp32),
// with P and O in registers. A warpgroup waits for each of its products: the other two keep the tensor cores busy meanwhile.
#pragma once

#include "kernels/cuda/common/prefill/join.cuh"
#include "kernels/cuda/common/prefill/output.cuh"
#include "kernels/cuda/sm90/prefill/loops/channel_blocks.cuh"
#include "kernels/cuda/sm90/prefill/loops/long_blocks.cuh"
#include "kernels/cuda/sm90/prefill/loops/other_blocks.cuh"
#include "kernels/cuda/sm90/prefill/pages.cuh"
#include "kernels/cuda/sm90/prefill/resident.cuh"

namespace ta::cuda::prefill::sm90 {

// One warpgroup's share of the tiles.
template <int D, bool kChannels, bool kOptions, Tiles kOfTiles>
TA_DEVICE void consume(const AttendArgs& args, PrefillSchedule* schedule, uint8_t* workspace,
                       SharedMemory<D, kChannels>& shared, int group, int warp, int lane) {
    Consumer<D, kChannels, kOptions, kOfTiles> consumer(shared, group, warp, lane);
    Ring<kTiles> at;
    for (;; at.next()) {
        ptx::barrier_wait(&shared.tile_full[at.slot], at.phase);
        const Tile& tile = shared.tiles[at.slot];
        if (tile.head < 0) return;
        {
            const ConsumerLane me;
            RowInfo* const of = shared.rows + me.row_in_tile;
            if constexpr (kChannels && kOptions) {
                start_rows_apart<D>(args, tile, me.row_in_tile, me.lane, shared.sign_masks, shared.q, of);
            } else {
                start_rows<D>(args, tile, me.row_in_tile, me.lane, shared.sign_masks, SwizzledRows<D>{shared.q}, of);
            }
            shared.lanes[me.thread] = {{}, {of[0].scale, of[8].scale}, {kNever, kNever}, {}};
        }
        consumer.take_tile(args, tile, tile.rows.page_end, shared.all_limits[at.slot % 2][group], warp);
        const ConsumerLane me;
        LaneRows& mine = shared.lanes[me.thread];
        settle(mine, {kNever, kNever}, consumer.o);
        if (tile.rows.parts == 1 ||
            join_parts<D, kWarpsOfTile>(schedule, workspace, tile, me.thread / 32, me.lane, mine, consumer.o)) {
            finish_rows<D>(args, tile, me.row_in_tile, me.lane, shared.rows + me.row_in_tile, mine, consumer.o,
                           shared.q + me.thread / 32 * 16 * D);
        }
        __syncwarp();  // before the next tile writes `rows`
        if (me.lane == 0) ptx::barrier_arrive(&shared.tile_empty[at.slot]);
    }
}

// kChannels: pages may be channel pages, with kAnyBits ones whose K or V has 8 bits. These are a kernel of their own, since they take
// registers from the producers' loop: 7% of a prompt over INT4.
template <int D, bool kChannels, bool kOptions, Tiles kOfTiles, bool kAnyBits>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ AttendArgs args, PrefillSchedule* schedule, uint8_t* workspace) {
    extern __shared__ __align__(1024) uint8_t memory[];
    constexpr bool kResident = kOfTiles == Tiles::kResident;
    using Shared = SharedMemory<D, kChannels, kResident>;
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    // By a shuffle, so that the compiler knows it to be the same in all lanes.
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int n = 0; n < Shared::kRawBlocks; ++n) {
            ptx::barrier_init(&shared.raw_full[n], 1);
            ptx::barrier_init(&shared.raw_empty[n], kProducerWarps);
        }
        for (int n = 0; n < Shared::kStages; ++n) {
            ptx::barrier_init(&shared.full[n], kProducerWarps);
            ptx::barrier_init(&shared.empty[n], 4 * kConsumerGroups);
            ptx::barrier_init(&shared.keys_empty[n], 4 * kConsumerGroups);
        }
        for (int n = 0; n < kTiles; ++n) {
            ptx::barrier_init(&shared.tile_full[n], 1);
            ptx::barrier_init(&shared.tile_empty[n], kProducerWarps + 4 * kConsumerGroups);
        }
        ptx::fence_barrier_init();
    }
    if (args.signs && threadIdx.x < D / 8) shared.sign_masks[threadIdx.x] = sign_mask(args.signs, threadIdx.x);
    prepare_tiles(shared, int(threadIdx.x));
    ptx::fence_async_proxy();
    __syncthreads();
    // The CTA starts with 128 registers a thread, 512 for a thread of each warpgroup. NOTES: to ask for more hangs.
    // Producers are the last warps: as the first ones they take 1% longer.
    if (warp >= 4 * kConsumerGroups) {
        ptx::shrink_registers<kProducerRegisters>();
        produce<D, kChannels, kAnyBits>(args, schedule, shared, warp - 4 * kConsumerGroups, lane);
    } else {
        ptx::grow_registers<kConsumerRegisters>();
        if constexpr (kResident) {
            consume_resident<D, kOptions>(args, shared, warp / 4, warp % 4, lane);
        } else {
            consume<D, kChannels, kOptions, kOfTiles>(args, schedule, workspace, shared, warp / 4, warp % 4, lane);
        }
    }
}

}  // namespace ta::cuda::prefill::sm90
