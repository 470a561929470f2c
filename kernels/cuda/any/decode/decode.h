// Decode on CUDA: attention of up to 16 query rows (query tokens x group) per sequence and kv head over pages. The host side;
// nothing here needs the CUDA language.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cuda/any/decode/params.h"
#include "kernels/cuda/common/block_walk.h"

namespace ta::cuda {

// Inputs of a plan: no lengths, so one plan serves every replay of a graph.
struct DecodeShape {
    int head_dim, kv_heads, group, batch;
    int max_rows;         // query tokens x group of any sequence, at most kDecodeRows
    int warps = 0;        // of a CTA; 0: chosen
    bool q_rest = false;  // queries have 15 bits against K at 8 bits (kernels/format/query_rest.h)
};

struct DecodePlan {
    int tiles;            // of 4 query rows
    int ctas, warps;      // warps of each CTA
    int warps_if_short;   // those of them with units in a call of less than long_pages pages
    int long_pages;       // from this many on, units of heads of different bits are weighed when they are cut into ranges
    int multiprocessors;  // of the device, the CTAs or more
    int smem_bytes;       // of each CTA
    int ring_bytes;       // of each warp
    bool q_rest;          // the shape's
    bool overlap;         // programmatic dependent launch, from sm_90 on
    size_t workspace_bytes;
    size_t zeroed_bytes;  // at the start of the workspace, the same in all plans of a device
};

// `device` is the current one. Fails with cudaErrorInvalidValue for shapes that are not supported.
cudaError_t plan_decode(int device, const DecodeShape& shape, DecodePlan* plan);

// Enqueues one call: one kernel, and under a window a small one before it. `workspace` is device memory of the plan's size,
// 256-byte aligned, and belongs to the call until the stream has passed it. Its first zeroed_bytes must be 0 before its first
// call; calls leave them so. Every sequence must have at most shape.max_rows rows. args.batch, kv_heads, group and head_dim
// must be the shape's. The lengths and the block table must not come from a kernel that is enqueued right before: with
// programmatic dependent launch they are read while it still runs. `mass`: where to leave what attention pages get, or nullptr;
// its page_lse is for 4 * plan.tiles rows, and belongs to the call like the workspace. `tree`: as in DecodeParams.
cudaError_t launch_decode(const DecodePlan& plan, const AttendArgs& args, void* workspace, cudaStream_t stream,
                          const DecodeMass* mass = nullptr, const TreeRow* tree = nullptr);

// Fills pages_before [sequences + 1] with the pages to which a call without a window attends. Sequences without queries have no
// pages.
// `first_block`, `block_stride`: as in AttendArgs.
inline void count_pages(std::span<const SequenceArgs> sequences, int32_t* pages_before, const int32_t* first_block = nullptr,
                        int32_t block_stride = 1) {
    pages_before[0] = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
        const int32_t blocks = sequences[s].n_query > 0 ? (sequences[s].n_keys + kPageTokens - 1) / kPageTokens : 0;
        const BlockWalk walk{first_block ? first_block[s] : 0, block_stride};
        pages_before[s + 1] = pages_before[s] + walk.pages(blocks);
    }
}

}  // namespace ta::cuda
