// Decode: attention of at most 16 query rows per kv head over pages, one warp per page and kv head. Warps share nothing, so the
// main loop has no CTA barrier. docs/numerics.md, section 8, defines the arithmetic. Here the reference of O and l is raised
// only when scores exceed it by 2^30, and 2^x is the hardware's for POLY and EXACT alike: its error, 2 ulp, is far below
// POLY's.
#pragma once

#include "kernels/cuda/any/decode/close_segment.cuh"
#include "kernels/cuda/any/decode/segment_queries.cuh"

namespace ta::cuda {

// Writes the rows of sequences of which no query sees a page: zeros, or what learned sinks leave. By one warp of each CTA.
template <int D>
__device__ __forceinline__ void write_empty_rows(const DecodeParams& p, int lane) {
    for (int first = int(blockIdx.x) * 32; first < p.a.batch; first += int(gridDim.x) * 32) {
        const int of_lane = min(first + lane, p.a.batch - 1);
        const bool empty = p.pages_before[of_lane] == p.pages_before[of_lane + 1] && first + lane < p.a.batch;
        for (uint32_t left = __ballot_sync(kAllLanes, empty); left != 0; left &= left - 1) {
            const SequenceArgs s = p.a.sequences[first + __ffs(left) - 1];
            const float4 zero[D / 32] = {};
            for (int head = 0; head < p.a.kv_heads; ++head) {
                for (int tile = 0; 4 * tile < s.n_query * p.a.group; ++tile) {
                    write_row<D>(p, s, head, tile, 0, zero, {kLowest, 0.0f}, lane);
                }
            }
        }
    }
}

// Has what is needed later on its way into L2, which stays coherent.
__device__ __forceinline__ void prefetch_tables(const DecodeParams& p) {
    for (int i = int(threadIdx.x) * 128; i < p.a.batch * int(sizeof(SequenceArgs)); i += int(blockDim.x) * 128) {
        prefetch_l2(reinterpret_cast<const uint8_t*>(p.a.sequences) + i);
    }
    if (p.a.heads && threadIdx.x * 128 < p.a.kv_heads * sizeof(HeadArgs)) prefetch_l2(p.a.heads + threadIdx.x * 16);
}

// Dynamic shared memory: for each warp WarpMemory and p.ring_bytes.
// kKind == kGeneral: with softcap, ALiBi, K offsets, SAS, P in units of the running maximum, heads of 8 bits in channel pages or
// token trees;
// the rest of the options cost nothing.
template <int D, int kTiles, DecodeKind kKind>
__global__ void __launch_bounds__(32 * decode_max_warps(D, kTiles), 1) decode_kernel(const __grid_constant__ DecodeParams p) {
    static_assert(D % 32 == 0, "an MMA step has 32 channels");
    constexpr bool kTiered = kKind != DecodeKind::kPlain;
    extern __shared__ __align__(128) uint8_t smem[];
    using Memory = WarpMemory<D, 4 * kTiles>;
    const int warp = __shfl_sync(kAllLanes, int(threadIdx.x) / 32, 0), lane = int(threadIdx.x) % 32;
    const int warps = int(blockDim.x) / 32, cta = int(blockIdx.x);
    constexpr int kMemoryBytes = kWarpMemoryBytes<D, kTiles>;
    const int stride = kMemoryBytes + p.ring_bytes;
    Memory& memory = *reinterpret_cast<Memory*>(smem + warp * stride);
    uint8_t* const ring = smem + warp * stride + kMemoryBytes;
    // NOTES: lengths and the block table are read before the wait. That is right because the launch behind the kernel that
    // writes them waits for all of it (CudaStep::tables_are_last_), and a kernel that this one may overlap with came later.
    // With a window, another kernel writes windowed_pages: it must be waited for.
    if (p.windowed_pages) grid_dependency_wait();
    const DecodeCursor::Probe probe(p, lane);
    HeadArgs head{};
    if (HeadCosts::may_differ(p) && lane < p.a.kv_heads) head = p.a.heads[lane];
    prefetch_tables(p);
#if __CUDA_ARCH__ >= 900
    if (lane < kDecodeMaxInFlight) mbarrier_init(smem_address(&memory.barriers[lane]), 1);
    mbarrier_init_fence();
    __syncwarp();
#endif

    const HeadCosts costs(p, head, probe.pages(), lane);
    // If weights depend on the maxima so far, a warp begins where its first range begins. If that is before its first unit, it
    // takes only the maxima from the pages there, which belong to other warps.
    const bool running = kKind == DecodeKind::kGeneral && (p.a.exp == ExpMode::kSas || p.a.p_running);
    const int32_t range = running && !p.a.are_parts ? p.a.range_pages : 1;
    const DecodeShare share(p, costs, probe.pages(), kTiered, range, lane);
    const int32_t cta_begin = share.begin, cta_end = share.end, begin = share.warp_begin(warp);
    int32_t left = share.warp_begin(warp + 1) - begin;
    DecodeCursor at{}, cta_at{};
    if (left > 0) at.seek(p, begin, probe, lane);
    int32_t others = 0;
    if constexpr (kKind == DecodeKind::kGeneral) {
        if (running && left > 0) {
            others = at.page % p.a.range_pages;
            at.page -= others;
            left += others;
        }
    }
    PieceLoader<D, kTiered, kKind == kGeneral> loader(p, at, left, ring, memory.barriers, lane);
    if (cta_begin < cta_end) cta_at.seek(p, cta_begin, probe, lane);
    grid_dependency_wait();
    grid_launch_dependents();
    if (left > at.pages - at.page) loader.touch_next_segment();

    prepare_queries<D, kTiles>(p, share, cta_at, loader, smem, stride, warp, lane);
    __syncthreads();
    if (warp == warps - 1) write_empty_rows<D>(p, lane);
    if constexpr (kTiered) {
        if (p.mass.heads && cta == 0 && threadIdx.x == 0) {
            atomicAdd(reinterpret_cast<unsigned long long*>(p.mass.heads), uint32_t(p.a.kv_heads * p.a.group));
        }
    }

    for (int segment = 0; left > 0; ++segment) {
        take_queries(p, at, cta, segment, memory, lane);
        const DecodeSegment seg = open_segment<kKind>(p, at);
        const int32_t pages = min(at.pages - at.page, left);
        DecodeRows<D, kTiles> rows;
        const DecodeWarp<D, kTiles> work{p, seg, memory, rows, lane};
        rows.clear();
#pragma unroll
        for (int n = 0; n < kTiles; ++n) rows.q_scale[n] = memory.queries[0].scale[4 * n + lane % 4];
        HalfQueries<D, 4> q;
        q.load(memory, 0, lane);
        const BlockWalk walk = walk_of<kTiered>(p.a, at.seq);
        const int32_t first = first_page(p.a, seg.s, walk) + at.page;
        const uint32_t place = mass_place(p, seg.s, seg.head);
        for (int32_t page = first; page < first + pages; ++page) {
            loader.fill();
            // The LSE of the page before is computed while this page is on its way: a warp has room for one piece or two, and
            // the memory waits for those who compute.
            if (page > first + others) leave_page_lse<kKind>(p, place + page - 1, rows.m, rows.page, lane);
            if constexpr (kKind == DecodeKind::kGeneral) {
                if (running && (page - first + at.page) % p.a.range_pages == 0) {
#pragma unroll
                    for (float& x : rows.range) x = kLowest;
                }
            }
            const auto piece = loader.take();
            if (kTiered && piece.dropped) {
#pragma unroll
                for (float& x : rows.page) x = 0.0f;
                loader.release();
                continue;
            }
            attend_piece<kKind>(work, piece, walk.block(page), q, page < first + others);
            loader.release();
        }
        leave_page_lse<kKind>(p, place + first + pages - 1, rows.m, rows.page, lane);
        left -= pages;
        // The ring is free once the range is at its end.
        void* const partial = left == 0 ? static_cast<void*>(ring)
                                        : reinterpret_cast<uint8_t*>(p.warp_partials) +
                                              (int64_t(cta) * warps + warp) * decode_partial_bytes(D, kTiles);
        close_segment<kTiered>(work, pages, pages - others == at.pages, partial);
        others = 0;
        if (left > 0) at.next_segment(p);
    }
    join_segments<D, kTiles, kTiered>(p, share, costs, cta_at, smem + kMemoryBytes, stride, lane);
}

}  // namespace ta::cuda
