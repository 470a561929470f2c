// What the warps of the prefill kernel share: the tiles of K and V that the products read, the pages they are made from, and the
// barriers between them.
#pragma once

#include "kernels/cuda/prefill_stream.cuh"

namespace ta::cuda::prefill {

inline constexpr int kBlockTokens = 2 * kPageTokens;  // a block of keys: two pages, one step of the main loop
inline constexpr int kStages = 4;                     // blocks ready for the products
inline constexpr int kProducerWarps = 4;              // expand pages into tiles
inline constexpr int kConsumerGroups = 2;             // warpgroups of 64 query rows
inline constexpr int kThreads = 32 * kProducerWarps + 128 * kConsumerGroups;

// The scales of a block. A page is uniform when its K scales are equal, its V scales are equal, and P can carry V's scale
// without costing the row sums their precision; else the per-token arrays count.
struct BlockScales {
    float k_token[kBlockTokens];
    float v_token[kBlockTokens];  // log2 of V's scale
    float k_page[2];
    float v_page[2];     // log2 of V's scale
    float v_inverse[2];  // 2^-v_page
    float v_largest[2];  // of V's scales up to this block
    uint32_t uniform[2];
    uint32_t zero;  // 0, though the compiler does not know
    uint32_t unused;
};

// What a query row needs once per block; registers are for the accumulators.
struct alignas(16) RowInfo {
    float scale;      // stage-1 scale * softmax scale, log2 units unless softcap is on
    float magnitude;  // bound of the row's scores: 127 * the sum of |codes|, or a little more
    int key_begin, key_end;
    int position;
    float slope;    // ALiBi, log2 units
    float bias;     // from K's offset, in the unit of `scale`
    float natural;  // running maximum of the scores (SAS)
};

template <int D>
struct SharedMemory {
    // K: a row per token, columns are channels. V: a row per channel, columns are tokens. Rows are swizzled (wgmma.cuh).
    alignas(1024) uint8_t k[kStages][kBlockTokens * D];
    alignas(1024) uint8_t v[kStages][D * kBlockTokens];
    alignas(1024) uint8_t
        k_fraction[kStages][8 * D];  // row p: fractions of page p's zero points, in eighths; rows 2 ... unused
    alignas(128) uint8_t raw[kRawPages][TokenLayout(D).bytes()];
    alignas(16) BlockScales scales[kStages];
    RowInfo rows[kPrefillRows];
    uint2 spread[8];       // spread_fraction() of pages.cuh
    uint32_t negative[4];  // bit c % 32 of word c / 32: the rotation changes the sign of channel c
    PageStream<D> stream;
    uint32_t raw_is_channel[kRawPages];
    uint64_t raw_full[kRawPages], raw_empty[kRawPages];
    uint64_t full[kStages], empty[kStages];
};

}  // namespace ta::cuda::prefill
