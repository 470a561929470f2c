// The schedule of a prefill kernel. The rows of a call are cut into tiles; a host function lists them in a buffer that is copied
// to the device, and CTAs take them from there one after the other. If there are too few tiles to keep all CTAs busy, their
// pages are split: each part leaves its result in memory, and the warp that comes last joins them. The grid and the arguments
// do not depend on lengths, so a captured graph is replayed after rewriting that buffer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/common/attend_args.h"
#include "kernels/cuda/common/block_walk.h"

namespace ta::cuda {

inline constexpr int kLongTilePages = 64;  // tiles with as many pages, on the average, are AttendArgs::long_tiles

inline constexpr int kMostTileRows = 4032;  // of a tile: kernels divide its rows by the group as if there were no more

// The same rows of each kv head.
struct alignas(16) PrefillTile {
    int32_t first_row, first_token;             // of the sequence's n_query * group; its query token
    int32_t page_begin, page_end;               // pages of `walk` that at least one row sees; none: page_begin == page_end
    int32_t n_keys, n_query, row, first_entry;  // of the sequence, as in SequenceArgs
    BlockWalk walk;                             // the sequence's pages
    int32_t own_keys;                           // in these pages
    int32_t sequence;
    int32_t part, parts;  // which part of these pages this is, of how many
    int32_t first_slot;   // of several parts: that of kv head 0, part 0; a head's parts follow each other
};
static_assert(sizeof(PrefillTile) == 64);

// The schedule begins with this; the tiles follow, those with the most pages first, then uint32 arrivals [slots][rows / 16]. Item
// n of a launch is tile n / kv_heads of head n % kv_heads. All counters are 0 between launches: the last CTA resets them.
struct alignas(16) PrefillSchedule {
    int32_t taken;     // items
    int32_t finished;  // CTAs
    int32_t tiles;
    int32_t rows;  // of a tile, at most
};

// Inputs of a plan beside the sequences.
struct PrefillShape {
    int group;
    bool causal;
    int window, kv_heads;
    int ctas;       // of the launch; 0: tiles are not split
    int cut_every;  // even: parts begin so many pages, or a multiple, behind the first that the tile's rows see
    int rows;       // of a tile: query token * group + query head within the group
};

// The tiles of a call.
class PrefillPlan {
  public:
    PrefillPlan() = default;
    // `walks`: which blocks of each sequence are its pages; empty: all.
    PrefillPlan(std::span<const SequenceArgs> sequences, const PrefillShape& shape, std::span<const BlockWalk> walks = {});
    // A plan of resident tiles (sm90/prefill/resident.cuh). Such a tile has up to kMostTileRows rows of a sequence, so many
    // that `ctas` CTAs get equal shares, and no tile is split. No tiles, if one of the sequences with queries has more than
    // `keys` keys.
    static PrefillPlan resident(std::span<const SequenceArgs> sequences, PrefillShape shape, int keys, int ctas,
                                std::span<const BlockWalk> walks = {});

    size_t bytes() const;
    // Writes the schedule, `bytes` long, to host memory.
    void write(void* to) const;
    std::span<const PrefillTile> tiles() const { return tiles_; }
    int slots() const { return slots_; }
    // The block table's entries that tiles read, each once.
    std::vector<uint32_t> entries() const;
    int64_t pages() const { return pages_; }  // of all tiles
    int rows() const { return rows_; }
    bool has_long_tiles() const { return !tiles_.empty() && pages_ >= kLongTilePages * int64_t(tiles_.size()); }

  private:
    std::vector<PrefillTile> tiles_;
    int rows_ = 0;
    int slots_ = 0;
    int64_t pages_ = 0;
};

// Memory that a launch needs for the parts of split tiles of so many rows, whatever the schedule.
size_t prefill_workspace_bytes(int rows, int head_dim, int ctas);

}  // namespace ta::cuda
