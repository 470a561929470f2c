// Joins the partial results of (sequence, head) pairs that several warps of the decode kernel worked on, and writes the rows of
// those that no key belongs to. In the order of the pages, so that results do not depend on timing.
#pragma once

#include "kernels/cuda/decode_output.cuh"

namespace ta::cuda {

// One CTA: kMergeWarps / warps_per_row rows of one (sequence, head). blockIdx.x: sequence and head; blockIdx.y: which rows.
template <int D>
__global__ void __launch_bounds__(32 * kMergeWarps)
    decode_merge_kernel(const __grid_constant__ DecodeParams p, int warps_per_row) {
    constexpr int W = D > 128 ? 2 : 1;
    __shared__ float4 shared_o[kMergeWarps][D / 4];
    __shared__ float2 shared_ml[kMergeWarps];
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    const int seq = int(blockIdx.x) / p.a.kv_heads, head = int(blockIdx.x) % p.a.kv_heads;
    const int part = warp % warps_per_row, row = int(blockIdx.y) * (kMergeWarps / warps_per_row) + warp / warps_per_row;

    const SequenceArgs s = p.a.sequences[seq];
    const DecodeCut cut(p.pages_before[p.a.batch] * p.a.kv_heads, p.warps);
    const int32_t before = p.pages_before[seq], pages = p.pages_before[seq + 1] - before;
    int32_t first = 0, last = -1;  // ranges with a share of it
    if (pages > 0) {
        const int32_t begin = before * p.a.kv_heads + head * pages;
        first = cut.range_of(begin);
        last = cut.range_of(begin + pages - 1);
    }
    grid_dependency_wait();
    if (pages > 0 && first == last) return;  // whoever had it wrote the result
    const bool exists = row < s.n_query * p.a.group;

    float m = kLowest, l = 0.0f;
    float4 o[W] = {};
    if (exists) {
        const int64_t at = (int64_t(seq) * p.a.kv_heads + head + first) * p.row_capacity + row;  // of the first part
        const float2* ml = p.partial_ml + at;
        const float4* source = reinterpret_cast<const float4*>(p.partial_o + at * D);
        const int32_t parts = last - first + 1;
        for (int32_t n = lane; n < parts; n += 256) {
#pragma unroll
            for (int k = 0; k < 8; ++k) m = fmaxf(m, ml[min(n + 32 * k, parts - 1) * p.row_capacity].x);
        }
#pragma unroll
        for (int h = 16; h >= 1; h /= 2) m = fmaxf(m, __shfl_xor_sync(kAllLanes, m, h));
        constexpr int kAtOnce = 8 / W;
        for (int32_t n = part; n < parts; n += kAtOnce * warps_per_row) {
            float4 x[kAtOnce][W];
            float2 of_part[kAtOnce];
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const int32_t from =
                    min(n + k * warps_per_row, parts - 1);  // no branch, so that all loads are under way at once
                of_part[k] = ml[from * p.row_capacity];
                if (n + k * warps_per_row >= parts) of_part[k] = make_float2(-kInfinity, 0.0f);
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const int word = min(lane + 32 * j, D / 4 - 1);
                    x[k][j] = source[from * p.row_capacity * (D / 4) + word];
                }
            }
#pragma unroll
            for (int k = 0; k < kAtOnce; ++k) {
                const float weight = ex2(of_part[k].x - m);
                l = fmaf(weight, of_part[k].y, l);
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    o[j].x = fmaf(weight, x[k][j].x, o[j].x);
                    o[j].y = fmaf(weight, x[k][j].y, o[j].y);
                    o[j].z = fmaf(weight, x[k][j].z, o[j].z);
                    o[j].w = fmaf(weight, x[k][j].w, o[j].w);
                }
            }
        }
    }
    if (warps_per_row > 1) {
        if (lane == 0) shared_ml[warp] = make_float2(m, l);
#pragma unroll
        for (int j = 0; j < W; ++j) {
            if (lane + 32 * j < D / 4) shared_o[warp][lane + 32 * j] = o[j];
        }
        __syncthreads();
        if (part != 0) return;
        for (int n = 1; n < warps_per_row; ++n) {
            l += shared_ml[warp + n].y;
#pragma unroll
            for (int j = 0; j < W; ++j) {
                if (lane + 32 * j >= D / 4) continue;
                const float4 other = shared_o[warp + n][lane + 32 * j];
                o[j].x += other.x;
                o[j].y += other.y;
                o[j].z += other.z;
                o[j].w += other.w;
            }
        }
    }
    if (!exists) return;
    const int q_head = head * p.a.group + row % p.a.group;
    const int64_t at = s.row + row / p.a.group;
    const RowEnd end = end_row(p.a, m, l, q_head);
    uint8_t* to = output_row(p.a, at, q_head);
#pragma unroll
    for (int j = 0; j < W; ++j) {
        if (lane + 32 * j < D / 4) store_word(to, p.a.out.dtype, lane + 32 * j, scaled(o[j], end.factor));
    }
    if (p.a.lse && lane == 0) p.a.lse[at * p.a.kv_heads * p.a.group + q_head] = end.lse;
}

}  // namespace ta::cuda
