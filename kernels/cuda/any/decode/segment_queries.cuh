// The queries of segments: how the warps of a CTA prepare them together, and how a warp gets those of its next segment.
#pragma once

#include "kernels/cuda/any/decode/query.cuh"

namespace ta::cuda {

// The queries of the CTA's segments, a row to each warp in turn: into the memory of the warps that have the segment first or
// second, and for the others into global memory. Each warp's first two rows are on their way before the first pages.
// `at`: where the CTA's units begin. Starts the copies of `loader` when the first two rows have been asked for.
template <int D, int kTiles, class Loader>
__device__ __forceinline__ void prepare_queries(const DecodeParams& p, const DecodeShare& share, const DecodeCursor& at,
                                                Loader& loader, uint8_t* smem, int stride, int warp, int lane) {
    using Memory = WarpMemory<D, 4 * kTiles>;
    const int warps = int(blockDim.x) / 32, cta = int(blockIdx.x);
    prefetch_queries<D, 4 * kTiles>(p, at, share.end - share.begin, warp, lane);
    struct Task {
        DecodeCursor at;
        int32_t unit, unit_before;  // of the segment, and of that before it
        int row;
        bool exists;
        RowPart<D> part;
    };
    Task next{at, share.begin, share.begin, warp};
    const auto load_next = [&](Task& task) {
        while (next.unit < share.end && next.row >= 4 * kTiles) {
            next.row -= 4 * kTiles;
            next.unit_before = next.unit;
            next.unit += next.at.pages - next.at.page;
            if (next.unit < share.end) next.at.next_segment(p);
        }
        next.exists = next.unit < share.end;
        next.part.load(next.exists ? query_row(p, next.at.s, next.at.head, next.row) : nullptr, p.a.q.dtype, lane);
        task = next;
        next.row += warps;
    };
    const auto memory_of = [&](int w) -> Memory& { return *reinterpret_cast<Memory*>(smem + w * stride); };
    RowPart<D> signs;
    signs.load(p.a.signs, DType::kF32, lane);
    Task task, following;
    load_next(task);
    for (bool is_first = true;; is_first = false) {
        load_next(following);
        if (is_first) loader.start();
        if (!task.exists) break;
        const int32_t end = min(task.unit + task.at.pages - task.at.page, share.end);
        const int first = share.warp_of(task.unit), last = share.warp_of(end - 1);
        const bool inside = share.warp_begin(first) < task.unit;  // of the range of warp `first`
        // Counted by the CTA that has the first page.
        uint32_t* const nonfinite = p.a.nonfinite && task.at.page == 0 ? p.a.nonfinite + task.at.seq : nullptr;
        const QueryRow<D> q = prepare_query<D>(p, task.part, signs, task.at.head, nonfinite, lane);
        if (inside) {
            const bool is_second = share.warp_begin(first) >= task.unit_before;
            if (Memory::kQueries == 2 && is_second) {
                store_query<D>(q, task.row, memory_of(first).queries[Memory::kQueries - 1], lane);
            } else {
                store_query<D>(p, q, query_slot(p, cta, task.at), task.row, lane);
            }
        }
#pragma unroll 1
        for (int w = first + inside; w <= last; ++w) store_query<D>(q, task.row, memory_of(w).queries[0], lane);
        if (!following.exists) break;
        task = following;
    }
}

// The queries of the segment that begins at `at`, the warp's `segment`-th, to where page after page finds them.
template <int D, int kRows>
__device__ __forceinline__ void take_queries(const DecodeParams& p, const DecodeCursor& at, int cta, int segment,
                                             WarpMemory<D, kRows>& memory, int lane) {
    using Memory = WarpMemory<D, kRows>;
    if (Memory::kQueries == 2 && segment == 1) {
        const auto* from = reinterpret_cast<const uint32_t*>(&memory.queries[Memory::kQueries - 1]);
        auto* to = reinterpret_cast<uint32_t*>(&memory.queries[0]);
        for (int i = lane; i < int(sizeof(memory.queries[0]) / 4); i += 32) to[i] = from[i];
    } else if (segment > 0) {
        load_queries<D, kRows>(p, query_slot(p, cta, at), memory.queries[0], lane);
    }
    __syncwarp();
}

}  // namespace ta::cuda
