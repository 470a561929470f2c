// The order in which a CTA's tiles and pages come from memory.
#pragma once

#include <cstddef>

#include "kernels/cuda/common/prefill/tile.cuh"
#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/sm90/prefill/prefill.h"

namespace ta::cuda::prefill::sm90 {

inline constexpr int kProducerWarps = 4;  // expand pages into tiles
inline constexpr int kTiles = 4;          // tiles of rows that some warp works on

// Position in a ring of `N` slots and the parity of its barrier's phase.
template <int N>
struct Ring {
    int slot = 0;
    uint32_t phase = 0;
    TA_DEVICE void next() {
        if (++slot == N) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// The pages that a CTA reads, tile after tile, as a stream of bulk copies. Run by one warp, whose lane n knows the address of
// page n of a batch of 32. The next tile is taken, in steps that wait for memory once each, while the copies of this one are
// requested. The state lives in shared memory: the registers of its warp are for expanding pages.
template <int D>
class PageStream {
  public:
    TA_DEVICE void start(int lane) {
        __syncwarp();
        page_ = page_end_ = batch_ = issued_ = handed_out_ = 0;
        tile_ring_ = {};
        known_ = kNothing;
        __syncwarp();
    }

    // Returns when tile `n` of this CTA, counted from 0, is known to all warps; the copies of the tiles before have been
    // started.
    template <class Shared>
    TA_DEVICE void hand_out(const AttendArgs& args, PrefillSchedule* schedule, int n, Shared& shared, int lane) {
        while (true) {
            __syncwarp();
            const int handed_out = handed_out_;
            const Known known = known_;
            __syncwarp();
            if (handed_out > n) return;
            if (known == kEntries) {
                start_tile(args, lane);  // that before has no pages, or fill() had started it
            } else {
                learn(args, schedule, known, true, shared, lane);
            }
        }
    }

    // Starts copies until `until` blocks (of two pages; the last of a tile may have one) have been requested since the
    // beginning, or all that are known. Never waits for a place for the next tile: consumers may hold it until they get what
    // this warp has yet to expand.
    template <class Shared>
    TA_DEVICE void fill(const AttendArgs& args, PrefillSchedule* schedule, int until, Shared& shared, int lane) {
        // All lanes read the state between two warp barriers, so that none sees another's change to it.
        while (true) {
            __syncwarp();
            const int issued = issued_, page = page_, page_end = page_end_, batch = batch_;
            const Known known = known_;
            __syncwarp();
            const bool learns = known < kEntries && (known > kNothing || page_end - page <= kPagesToLearn);
            if (issued >= until) {
                if (learns) learn(args, schedule, known, false, shared, lane);
                return;
            }
            if (page == page_end) {
                if (known == kEnd) return;
                if (known < kEntries) {
                    if (!learn(args, schedule, known, false, shared, lane)) return;
                } else {
                    start_tile(args, lane);
                }
                continue;
            }
            if (page == batch + 32) {
                find_addresses(args, load_entry(args, first_entry_, walk_, page, page_end, lane), lane);
                continue;
            }
            const uint32_t slot = uint32_t(issued) % Shared::kRawBlocks, round = uint32_t(issued) / Shared::kRawBlocks;
            ptx::barrier_wait(&shared.raw_empty[slot], (round & 1) ^ 1);
            if (lane == 0) {
                const int pages = min(2, page_end - page);
                const uint32_t piece[2] = {piece_[page - batch], pages == 2 ? piece_[page - batch + 1] : 0};
                *reinterpret_cast<uint2*>(shared.raw_bits[slot]) = make_uint2(piece[0] & 0xffff, piece[1] & 0xffff);
                // NOTES: one barrier for both pages, which every producer warp waits for in every round. A warp that skipped
                // rounds could take the end of one before for that of its own.
                ptx::barrier_arrive_expecting(&shared.raw_full[slot], (piece[0] >> 16) + (piece[1] >> 16));
                for (int n = 0; n < pages; ++n) {
                    ptx::bulk_copy(shared.raw[slot][n], reinterpret_cast<const void*>(address_[page - batch + n]),
                                   piece[n] >> 16, &shared.raw_full[slot]);
                }
                page_ = page + pages;
                issued_ = issued + 1;
            }
            if (issued + 1 == until && !learns) return;  // as most often: there is no more to do
        }
    }

  private:
    enum Known : int { kNothing, kItem, kTile, kEntries, kEnd };  // of the next tile

    // The next tile is taken this long before the end of a tile. If it were earlier, a CTA with much left to do would take
    // tiles that others could do.
    static constexpr int kPagesToLearn = 8;

    // One step: the item's number, the tile (which all warps are told of then), its first table entries. False: there is no
    // place for the tile yet.
    template <class Shared>
    TA_DEVICE bool learn(const AttendArgs& args, PrefillSchedule* schedule, Known known, bool wait, Shared& shared, int lane) {
        if (known == kNothing) {
            if (lane == 0) item_ = atomicAdd(&schedule->taken, 1);
            known_ = kItem;
        } else if (known == kItem) {
            const int item = item_, heads = args.kv_heads;
            const bool end = item >= __ldg(&schedule->tiles) * heads;
            const Ring<kTiles> at = tile_ring_;
            __syncwarp();
            if (wait) {
                ptx::barrier_wait(&shared.tile_empty[at.slot], at.phase ^ 1);
            } else if (!__shfl_sync(~0u, ptx::barrier_test(&shared.tile_empty[at.slot], at.phase ^ 1), 0)) {
                return false;
            }
            if (lane == 0) {
                Tile& t = shared.tiles[at.slot];
                t.head = -1;
                if (!end) {
                    constexpr int kWords = sizeof(PrefillTile) / sizeof(int4);
                    const int4* from = reinterpret_cast<const int4*>(schedule + 1) + kWords * (item / heads);
                    int4* words = reinterpret_cast<int4*>(&t.rows);
#pragma unroll
                    for (int n = 0; n < kWords; ++n) words[n] = __ldg(from + n);
                    t.head = item % heads;
                    t.head_of_first = uint32_t(t.rows.first_row - t.rows.first_token * args.group);
                    t.per_group = kReciprocal / uint32_t(args.group) + 1;
                    t.n_rows = min(schedule->rows, t.rows.n_query * args.group - t.rows.first_row);
                    next_ = t;
                }
                ptx::barrier_arrive(&shared.tile_full[at.slot]);
                tile_ring_.next();
                ++handed_out_;
                known_ = end ? kEnd : kTile;
                if (end && atomicAdd(&schedule->finished, 1) == int(gridDim.x) - 1) schedule->taken = schedule->finished = 0;
            }
            __syncwarp();
            // A resident tile's last rows are its first ones.
            const int first = end ? 0 : max(0, (next_.n_rows + 63) / 64 * 64 - kRowsOfTile);
            for (int row = lane; row < kRowsOfTile && !end; row += 32) prefetch_query<D>(args, next_, first + row);
        } else {
            const PrefillTile& next = next_.rows;
            next_entry_[lane] = load_entry(args, next.first_entry, next.walk, next.page_begin, next.page_end, lane);
            known_ = kEntries;
        }
        return true;
    }

    TA_DEVICE static uint64_t load_entry(const AttendArgs& args, int first_entry, const BlockWalk& walk, int page, int page_end,
                                         int lane) {
        return page + lane < page_end ? __ldg(args.table + first_entry + walk.block(page + lane)) : 0;
    }
    TA_DEVICE void start_tile(const AttendArgs& args, int lane) {
        head_ = next_.head, first_entry_ = next_.rows.first_entry, walk_ = next_.rows.walk;
        page_ = next_.rows.page_begin, page_end_ = next_.rows.page_end;
        known_ = kNothing;
        __syncwarp();
        find_addresses(args, next_entry_[lane], lane);
    }
    TA_DEVICE void find_addresses(const AttendArgs& args, uint64_t entry, int lane) {
        const int head = head_;
        const PagePlace at = find_page<D>(args, head, args.heads + head, entry);
        address_[lane] = at.address;
        piece_[lane] = at.piece;
        batch_ = page_;
        __syncwarp();
    }

    uint64_t address_[32], next_entry_[32];
    uint32_t piece_[32];  // bytes << 16 | page_bits()
    Tile next_;
    Known known_;
    int item_;
    int head_, first_entry_, page_, page_end_, batch_, issued_, handed_out_;
    BlockWalk walk_;
    Ring<kTiles> tile_ring_;
};

}  // namespace ta::cuda::prefill::sm90
