// Encoding on the CPU: many values of one head at a time, the same integers as kernels/format/codec.h. Compiled once for each
// instruction set (page_codec_impl.h); kernels.h picks one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/codec.h"
#include "kernels/format/layout.h"
#include "kernels/format/types.h"

namespace ta::cpu {

// Part of this interface, under its name too.

// Stage-1 codes and scales of one head for the tokens of one page, tokens and channels in natural order.
struct HeadStage1 {
    alignas(64) int8_t k[kPageTokens * kMaxHeadDim];  // [token, head_dim]
    alignas(64) int8_t v[kPageTokens * kMaxHeadDim];
    float k_scale[kPageTokens];
    float v_scale[kPageTokens];
};

struct PageCodec {
    // Index of the first value that is NaN, Inf or above kMaxMagnitude in magnitude; n if there is none.
    int64_t (*find_nonfinite)(const void* x, DType type, int64_t n);
    // Widens n values. `saturate` replaces non-finite and huge ones (NaN by 0); returns how many.
    int64_t (*to_float)(const void* x, DType type, int64_t n, bool saturate, float* out);
    // Rounds n values to nearest even; beyond the range of the type they become infinite.
    void (*from_float)(const float* x, int64_t n, DType type, void* out);
    float (*amax)(const float* x, int64_t n);
    // Stage 1 of n values with one scale. Returns how many were clamped.
    int64_t (*quantize)(const float* x, int64_t n, float scale, int levels, int8_t* out);
    // stage1_rest of n values whose codes are known.
    void (*quantize_rest)(const float* x, int64_t n, float scale, int levels, const int8_t* codes, int8_t* out);
    // Randomized Hadamard rotation of one head vector (rotation.h); `sign` [d] is +1 or -1.
    void (*rotate)(float* x, int d, const float* sign);
    // Writes tokens [first, last) into a token page's piece.
    void (*store_token_piece)(const HeadStage1& in, int d, int first, int last, uint8_t* piece);
    // Reads tokens [0, last) of a token page's piece.
    void (*load_token_piece)(const uint8_t* piece, int d, int last, HeadStage1& out);
    // Closes a page: merges the token scales, encodes K and V, writes the whole piece, padding included.
    void (*encode_channel_piece)(const HeadStage1& in, const ChannelLayout& layout, const EncodeOptions& options,
                                 uint8_t* piece);
    // Reopens tokens [0, last) of a closed page at 8 bits; fractions of zero points are rounded. If the page has turning pairs,
    // all of K's scales have their bytes.
    void (*decode_channel_piece)(const uint8_t* piece, const ChannelLayout& layout, int last, HeadStage1& out);
};

const PageCodec& page_codec_scalar();
const PageCodec& page_codec_avx2();
const PageCodec& page_codec_avx512();

}  // namespace ta::cpu
