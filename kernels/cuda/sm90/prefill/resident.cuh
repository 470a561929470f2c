// Tiles whose blocks stay in shared memory. A short prompt has few blocks of keys: once expanded, they stay until all of its
// rows have seen them. A warpgroup takes the tile's rows 64 at a time, at its own pace: while it starts or ends rows, the
// others multiply.
#pragma once

#include "kernels/cuda/common/prefill/output.cuh"
#include "kernels/cuda/sm90/prefill/loops/other_blocks.cuh"

namespace ta::cuda::prefill::sm90 {

// Where the pages end that rows [first, first + 64) of a tile see. There is no window.
TA_DEVICE int end_of_pages(const AttendArgs& args, const Tile& tile, int first) {
    const uint32_t last = tile.head_of_first + uint32_t(first + 63);
    const int token = min(tile.rows.first_token + int(last * tile.per_group / kReciprocal), tile.rows.n_query - 1);
    const int seen = visible_keys(args.causal, 0, tile.rows.n_keys, tile.rows.n_keys - tile.rows.n_query + token).end;
    const BlockWalk walk = tile.rows.walk;
    const int keys = walk.stride == 1 ? seen : walk.keys(seen);
    return max(tile.rows.page_begin, (keys + kPageTokens - 1) / kPageTokens);
}

// One warpgroup's share of the tiles: every third group of 64 rows. The last rows of a tile, which see most keys, come first.
template <int D, bool kOptions, class Shared>
TA_DEVICE void consume_resident(const AttendArgs& args, Shared& shared, int group, int warp, int lane) {
    Consumer<D, false, kOptions, Tiles::kResident> consumer(shared, group, warp, lane);
    Ring<kTiles> at;
    uint32_t blocks = 0;  // of the tiles before
    int next = group;     // of this tile's parts of 64 rows, counted from the end, the next that is this group's
    for (;; at.next()) {
        ptx::barrier_wait(&shared.tile_full[at.slot], at.phase);
        const Tile& tile = shared.tiles[at.slot];
        if (tile.head < 0) return;
        const int parts = __shfl_sync(~0u, (tile.n_rows + 63) / 64, 0);
        for (; next < parts; next += kConsumerGroups) {
            const int first = (parts - 1 - next) * 64;
            {
                const ConsumerLane me;
                RowInfo* const of = shared.rows + me.row_in_tile;
                start_rows<D>(args, tile, first + me.row_in_tile - 64 * group, me.lane, shared.sign_masks,
                              SwizzledRows<D>{shared.q + (64 * group - first) * D}, of);
                shared.lanes[me.thread] = {{}, {of[0].scale, of[8].scale}, {kNever, kNever}, {}};
                const int following = first - 64 * kConsumerGroups;
                if (following >= 0 && me.lane < 16) prefetch_query<D>(args, tile, following + 16 * warp + me.lane);
            }
            shared.first_of_part[4 * group + warp] = first;
            consumer.stage = {int(blocks % Shared::kStages), blocks / Shared::kStages & 1};
            consumer.take_tile(args, tile, end_of_pages(args, tile, first), shared.all_limits[0][group], warp);
            const ConsumerLane me;
            LaneRows& mine = shared.lanes[me.thread];
            settle(mine, {kNever, kNever}, consumer.o);
            finish_rows<D>(args, tile, first + me.row_in_tile - 64 * group, me.lane, shared.rows + me.row_in_tile, mine,
                           consumer.o, shared.q + me.thread / 32 * 16 * D);
            __syncwarp();  // before the next part writes `rows`
        }
        next -= parts;
        // Releases all of the tile's blocks for this warp, also those that its rows do not see. It waits until they are there;
        // otherwise it would count for what they hold before.
        const int of_tile = __shfl_sync(~0u, (tile.rows.page_end - tile.rows.page_begin + 1) / 2, 0);
        for (int n = 0; n < of_tile; ++n, ++blocks) {
            const uint32_t slot = blocks % Shared::kStages;
            ptx::barrier_wait(&shared.full[slot], blocks / Shared::kStages & 1);
            if (lane == 0) ptx::barrier_arrive(&shared.empty[slot]);
        }
        if (lane == 0) ptx::barrier_arrive(&shared.tile_empty[at.slot]);
    }
}

}  // namespace ta::cuda::prefill::sm90
