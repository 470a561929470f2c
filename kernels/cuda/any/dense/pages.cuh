// K and V of plain tensors into token pages. A CTA takes one head of one page.
#pragma once

#include "kernels/cuda/any/append/codec_page.cuh"
#include "kernels/cuda/any/dense/dense.h"
#include "kernels/cuda/ptx/mma.cuh"

namespace ta::cuda {

// The place of a thread's four rows in a page: tokens t0 + 8 p, as in the append kernel, so that they fill whole words of V's
// order and half words of K's.
template <int D>
struct DenseLane {
    int slot, t0, lane;
    bool active;
    __device__ DenseLane() {
        using Rows = RowShape<D>;
        slot = int(threadIdx.x) / 32 + Rows::kWarps * (int(threadIdx.x) % 32 / Rows::kLanes);
        t0 = 32 * (slot / 8) + slot % 8;
        lane = int(threadIdx.x) % Rows::kLanes;
        active = 8 * lane < D;
    }
    // Its rows of one head, and their largest magnitudes.
    __device__ int load(const TensorArgs& from, const DensePage& page, int head, bool saturate, float (&x)[4][8],
                        float (&amax)[4]) const {
        const int rows = active ? (page.tokens - t0 + 7) / 8 : 0;
        const int replaced = read_rows<4>({from, int64_t(page.row) + t0, 8, head, rows}, lane, saturate, x, amax);
#pragma unroll
        for (int p = 0; p < 4; ++p) amax[p] = row_amax<D>(amax[p]);
        return replaced;
    }
    // Has them brought into L2.
    __device__ void prefetch(const TensorArgs& from, const DensePage& page, int head) const {
        const int64_t bytes = int64_t(dtype_bytes(from.dtype));
        const int64_t at = (int64_t(page.row) + t0) * from.stride_row + head * from.stride_head + 8 * lane;
        const auto* data = static_cast<const uint8_t*>(from.data) + at * bytes;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            if (active && t0 + 8 * p < page.tokens) prefetch_l2(data + p * 8 * from.stride_row * bytes);
        }
    }
};

// The largest of the CTA's values; all of its threads, each of which may have passed a barrier since the last call.
template <int D>
__device__ __forceinline__ float cta_max(float x, float (&of_warps)[RowShape<D>::kWarps]) {
    x = warp_max(x);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (const float m : of_warps) x = fmaxf(x, m);
    return x;
}

template <int D>
__global__ void __launch_bounds__(RowShape<D>::kThreads) dense_amax_kernel(const __grid_constant__ DensePagesArgs a) {
    __shared__ float of_warps[RowShape<D>::kWarps];
    const DensePage page = a.pages[blockIdx.x / a.kv_heads];
    const int head = int(blockIdx.x % a.kv_heads);
    float x[4][8], amax[4];
    DenseLane<D>().load(a.v, page, head, a.saturate, x, amax);
    const float most = cta_max<D>(fmaxf(fmaxf(amax[0], amax[1]), fmaxf(amax[2], amax[3])), of_warps);
    // Magnitudes compare as their bits do.
    if (threadIdx.x == 0) atomicMax(a.v_amax + int64_t(page.sequence) * a.kv_heads + head, __float_as_uint(most));
}

template <int D>
__global__ void __launch_bounds__(RowShape<D>::kThreads, 768 / RowShape<D>::kThreads)
    dense_pages_kernel(const __grid_constant__ DensePagesArgs a) {
    using Rows = RowShape<D>;
    using Page = PageImage<D>;
    __shared__ uint4 v_image[Page::kChunks];
    __shared__ float of_warps[2][Rows::kWarps];
    const int head = int(blockIdx.x % a.kv_heads), number = int(blockIdx.x / a.kv_heads);
    const DensePage page = a.pages[number];
    auto* piece = reinterpret_cast<uint8_t*>(a.table[number] + head * TokenLayout(D).bytes());
    auto* chunks = reinterpret_cast<uint4*>(piece);
    const DenseLane<D> at;
    if (a.v_scale != DenseScale::kNone) at.prefetch(a.v, page, head);
#pragma unroll 1
    for (int tensor = 0; tensor < 2; ++tensor) {
        const DenseScale rule = tensor ? a.v_scale : a.k_scale;
        if (rule == DenseScale::kNone && !a.nonfinite) break;
        float x[4][8], amax[4];
        const int replaced = at.load(tensor ? a.v : a.k, page, head, a.saturate, x, amax);
        if (replaced && a.nonfinite) atomicAdd(a.nonfinite + page.sequence, uint32_t(replaced));
        if (rule == DenseScale::kNone) break;
        float shared = 0.0f;
        if (rule == DenseScale::kPage) {
            shared = cta_max<D>(fmaxf(fmaxf(amax[0], amax[1]), fmaxf(amax[2], amax[3])), of_warps[tensor]);
        } else if (rule == DenseScale::kTensor) {
            shared = __uint_as_float(a.v_amax[int64_t(page.sequence) * a.kv_heads + head]);
        }
        uint32_t code[4][8];
        auto* scales = reinterpret_cast<float*>(piece + TokenLayout(D).k_scale()) + tensor * kPageTokens;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const float most = rule == DenseScale::kToken ? amax[p] : shared;
            const float scale = most < kMinAmax ? 0.0f : __fdiv_rn(most, float(a.levels));
            const Divider divider(scale);
#pragma unroll
            for (int j = 0; j < 8; ++j) x[p][j] = __fmul_rn(x[p][j], divider.up);
            quantize_row(x[p], divider, code[p]);
            const int token = at.t0 + 8 * p;
            if (at.lane == 0) scales[token] = token < page.tokens ? scale : 0.0f;
        }
        if (!at.active) continue;
        if (tensor == 0) {
            const int i = 8 * at.lane / (D / 4), step = 8 * at.lane % (D / 4) / 8;
#pragma unroll
            for (int p = 0; p < 4; p += 2) {
                const int tile = 2 * (at.slot / 8) + p / 2;
                const auto word = [&](int row, int c) {
                    return low_bytes(code[row][c], code[row][c + 1], code[row][c + 2], code[row][c + 3]);
                };
                chunks[(tile * (D / 32) + step) * 32 + at.slot % 8 * 4 + i] =
                    make_uint4(word(p, 0), word(p + 1, 0), word(p, 4), word(p + 1, 4));
            }
        } else {
            const int t = at.slot % 8;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int channel = 8 * at.lane + j;
                const int chunk = Page::v_chunk(channel % (D / 8) / 2, t % 2, channel / (D / 8), t / 2);
                reinterpret_cast<uint32_t*>(v_image + chunk)[2 * (at.slot / 8) + j % 2] =
                    low_bytes(code[0][j], code[1][j], code[2][j], code[3][j]);
            }
        }
    }
    if (a.v_scale == DenseScale::kNone) return;
    __syncthreads();
    for (int n = threadIdx.x; n < Page::kChunks; n += Rows::kThreads) chunks[Page::kChunks + n] = v_image[Page::v_chunk(n)];
}

}  // namespace ta::cuda
