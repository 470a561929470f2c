// K and V of drafts, kept as they were given until the step's end says which of them stay (drafts.h).
#pragma once

#include <cstdint>

#include "kernels/cuda/any/append/append.h"
#include "kernels/format/codec.h"

namespace ta::cuda {

// A warp copies one head of a row at a time.
template <class Word>
__device__ __forceinline__ void copy_rows(const AppendArgs& a, const TensorArgs& from, void* to) {
    const unsigned heads = unsigned(a.kv_heads), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned bytes = unsigned(a.head_dim) * unsigned(dtype_bytes(from.dtype)), words = bytes / sizeof(Word);
    for (unsigned n = warp * gridDim.x + blockIdx.x; n < unsigned(a.kept_rows) * heads; n += blockDim.x / 32 * gridDim.x) {
        const int64_t at = int64_t(n / heads) * from.stride_row + int64_t(n % heads) * from.stride_head;
        const auto* source =
            reinterpret_cast<const Word*>(static_cast<const uint8_t*>(from.data) + at * int64_t(dtype_bytes(from.dtype)));
        auto* target = reinterpret_cast<Word*>(static_cast<uint8_t*>(to) + int64_t(n) * bytes);
        for (unsigned w = lane; w < words; w += 32) target[w] = source[w];
    }
}

// By the whole grid. A call: one place for K and V.
__device__ __noinline__ static void keep_rows(const AppendArgs& a, const TensorArgs& from, void* to) {
    const int bytes = int(dtype_bytes(from.dtype)), elements = 16 / bytes;
    const bool aligned =
        reinterpret_cast<uintptr_t>(from.data) % 16 == 0 && from.stride_row % elements == 0 && from.stride_head % elements == 0;
    if (aligned) {
        copy_rows<uint4>(a, from, to);
    } else if (bytes == 4) {
        copy_rows<uint32_t>(a, from, to);
    } else {
        copy_rows<uint16_t>(a, from, to);
    }
}

}  // namespace ta::cuda
