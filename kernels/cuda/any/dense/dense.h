// Dense attention on CUDA: K and V of plain tensors to token pages, byte for byte those of src/attend/dense/dense.cpp, and attention
// with V in float, which no page holds. The host side; nothing here needs the CUDA language.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/attend_args.h"

struct CUstream_st;

namespace ta::cuda {

// One page: up to 64 keys of a sequence.
struct alignas(16) DensePage {
    int32_t row;  // of k and v: that of its first token
    int32_t tokens;
    int32_t sequence;
    int32_t unused;
};

enum class DenseScale : uint8_t {
    kToken,   // each token its own
    kPage,    // one for the page's tokens
    kTensor,  // one for a sequence's head: V alone, from v_amax
    kNone,    // no codes: V alone, when attention reads the tensor
};

struct DensePagesArgs {
    int32_t head_dim, kv_heads, n_pages;
    const DensePage* pages;  // [n_pages]
    const uint64_t* table;   // [n_pages] their addresses
    TensorArgs k, v;
    DenseScale k_scale, v_scale;
    int32_t levels;       // of stage 1: 119 or 127
    uint32_t* v_amax;     // [sequences, kv_heads] bits of V's largest magnitudes: 0 before find_dense_scales
    bool saturate;        // non-finite and huge values become the nearest allowed ones instead of 0; NaN becomes 0 in any case
    uint32_t* nonfinite;  // [sequences] counts values that were replaced, or nullptr
};

// V's largest magnitudes, for kTensor. Returns a cudaError_t, as the other launches do.
int launch_dense_amax(const DensePagesArgs& args, CUstream_st* stream);
// Writes the pages; slots of tokens that are missing in a page get zeros.
int launch_dense_pages(const DensePagesArgs& args, CUstream_st* stream);

inline constexpr int kHalfRows = 64;  // query rows of a tile: query token * group + query head within the group

struct HalfTile {
    int32_t sequence;
    int32_t first_row;  // of the sequence's n_query * group
};

// Attention with INT8 scores and P V in float: P and V are rounded to TF32, which holds 16-bit floats exactly.
struct DenseHalfArgs {
    AttendArgs attend;  // token pages; P's format is not looked at
    TensorArgs v;
    const int32_t* v_row;   // [sequences] row of the first key
    const HalfTile* tiles;  // [n_tiles]
    int32_t n_tiles;
};
int launch_dense_half(const DenseHalfArgs& args, CUstream_st* stream);

// Adds the `n` counts to *total, which is host memory mapped into the device.
int launch_dense_count(const uint32_t* counts, int64_t n, uint32_t* total, CUstream_st* stream);

}  // namespace ta::cuda
