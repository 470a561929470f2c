// Precision that falls: token pages that are full, where they lie, to channel pages of 4 bits. A CTA takes one head of one
// page.
#pragma once

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/append/codec_page.cuh"

namespace ta::cuda {

template <int D>
__global__ void __launch_bounds__(RowShape<D>::kThreads, 512 / RowShape<D>::kThreads)
    lower_kernel(const __grid_constant__ LowerArgs a) {
    using Page = PageImage<D>;
    constexpr TokenLayout kToken(D);
    constexpr int kBits = 4, kThreads = RowShape<D>::kThreads;
    __shared__ Page page;
    const int block = int(blockIdx.x) / a.pieces, piece = int(blockIdx.x) % a.pieces;
    const auto* from = reinterpret_cast<const uint8_t*>(a.from[block]) + piece * kToken.bytes();
    auto* to = reinterpret_cast<uint8_t*>(a.to[block]) + piece * ChannelLayout(D, kBits, kBits).bytes();
    const auto* codes = reinterpret_cast<const uint4*>(from);
    for (int n = int(threadIdx.x); n < Page::kChunks; n += kThreads) {
        page.k[Page::k_chunk(n)] = codes[n];
        page.v[Page::v_chunk(n)] = codes[Page::kChunks + n];
    }
    if (threadIdx.x < kPageTokens) {
        const auto* scales = reinterpret_cast<const float*>(from + kToken.k_scale()) + threadIdx.x;
        page.scale[0][threadIdx.x] = scales[0];
        page.scale[1][threadIdx.x] = scales[kPageTokens];
        page.v_sum[threadIdx.x] = 0;
        if (a.token_own_scales) {
            const auto* own = reinterpret_cast<const float*>(a.from[block] + a.token_own_scales) + 2 * kPageTokens * piece;
            page.own[0][threadIdx.x] = own[threadIdx.x];
            page.own[1][threadIdx.x] = own[kPageTokens + threadIdx.x];
        }
    }
    __syncthreads();
    close_page(page, kBits, kBits, a.encode, a.token_own_scales != 0, to);
}

}  // namespace ta::cuda
