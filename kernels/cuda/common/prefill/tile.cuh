// A tile of rows as the warps of a prefill kernel see it: where its queries and its pages are.
#pragma once

#include "kernels/cuda/common/prefill/schedule.h"

#define TA_DEVICE __device__ __forceinline__

namespace ta::cuda::prefill {

// A tile of rows; all warps learn of it.
struct Tile {
    PrefillTile rows;
    int32_t head;            // kv head; -1: there are no more tiles
    uint32_t head_of_first;  // of first_row, within the group
    uint32_t per_group;      // kReciprocal / group, a little more
    int32_t n_rows;          // that exist
};

// A division by the group takes 30 instructions, a product with its reciprocal few. row * (kReciprocal / group + 1) / kReciprocal is
// row / group if what is added, up to group / kReciprocal of each row, stays below 1, and no product is beyond 32 bits. Rows count from
// the first of its token: there are up to group - 1 more than the tile has.
inline constexpr uint32_t kReciprocal = 1u << 20;
constexpr bool divides(uint32_t group) {
    const uint64_t per_group = kReciprocal / group + 1, rows = kMostTileRows + group - 1;
    return rows * (per_group * group - kReciprocal) < kReciprocal && rows * per_group <= UINT32_MAX;
}
constexpr bool divides_by_all(uint32_t most) {
    for (uint32_t group = 1; group <= most; ++group) {
        if (!divides(group)) return false;
    }
    return true;
}
static_assert(divides_by_all(128));  // kMaxStepGroup, src/attend/call.h

// Row `row_in_tile` of a tile: its query token and query head.
struct RowPlace {
    int token, head;
    TA_DEVICE RowPlace(const AttendArgs& args, const Tile& tile, int row_in_tile) {
        const uint32_t row = tile.head_of_first + uint32_t(row_in_tile), tokens = row * tile.per_group / kReciprocal;
        token = tile.rows.first_token + int(tokens);
        head = tile.head * args.group + int(row - tokens * uint32_t(args.group));
    }
    // Offset of the row in q or out, in elements.
    TA_DEVICE int64_t offset(const TensorArgs& t, const Tile& tile) const {
        return int64_t(uint64_t(uint32_t(tile.rows.row + token)) * uint64_t(t.stride_row) +
                       uint64_t(uint32_t(head)) * uint64_t(t.stride_head));
    }
};

// Prefetches the row into the L2 cache, and its first line into L1, which has no room for more: queries are read once, at a
// moment when nothing else is left to do.
template <int D>
TA_DEVICE void prefetch_query(const AttendArgs& args, const Tile& tile, int row_in_tile) {
    const RowPlace at(args, tile, row_in_tile);
    if (at.token >= tile.rows.n_query) return;
    const uint32_t bytes = args.q.dtype == DType::kF32 ? 4 : 2;
    const uint64_t from = reinterpret_cast<uint64_t>(args.q.data) + uint64_t(at.offset(args.q, tile)) * bytes;
    for (uint32_t n = 128; n < D * bytes; n += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + n));
    uint32_t unused;
    asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(unused) : "l"(from / 4 * 4));
}

// The bits of a channel page's K and V in a word; of a token page 0, which stands for 8 of both.
TA_HD constexpr uint32_t page_bits(uint32_t k, uint32_t v) {
    return k | v << 8;
}
TA_HD constexpr int k_bits_of(uint32_t bits) {
    return int(bits & 0xff);
}
TA_HD constexpr int v_bits_of(uint32_t bits) {
    return int(bits >> 8);
}

// Tells the compiler that neither is 8: offsets in the page then take fewer instructions.
TA_DEVICE void assume_low_bits(int k_bits, int v_bits) {
    __builtin_assume(k_bits != 8 && v_bits != 8);
}

// The piece of a page that is a kv head's.
struct alignas(16) PagePlace {
    uint64_t address;
    uint32_t piece;  // bytes << 16 | page_bits()
};
// Where the page of an entry of the block table lies. `channel`: where channel pages have the head, and its bits.
template <int D>
TA_DEVICE PagePlace find_page(const AttendArgs& args, int head, const HeadArgs* channel, uint64_t entry) {
    constexpr uint32_t kTokenBytes = TokenLayout(D).bytes(), kLowBytes = ChannelLayout(D, 2, 2).bytes();
    uint64_t layer = args.token_layer_offset, in_page = uint64_t(head) * kTokenBytes;
    uint32_t piece = kTokenBytes << 16;
    if (entry & kEntryLow) {
        layer = args.low_layer_offset, in_page = uint64_t(head) * kLowBytes;
        piece = kLowBytes << 16 | page_bits(2, 2);
    } else if (entry & kEntryChannel) {
        const HeadArgs h = *channel;
        layer = args.channel_layer_offset, in_page = h.channel_offset;
        // Behind 8 bits of both there is nothing to be read, and no room for it.
        piece = min(uint32_t(ChannelLayout(D, h.k_bits, h.v_bits).bytes()), kTokenBytes) << 16 | page_bits(h.k_bits, h.v_bits);
    }
    return {(entry & ~kEntryFlags) + (entry & kEntrySingleLayer ? 0 : layer) + in_page, piece};
}

}  // namespace ta::cuda::prefill
