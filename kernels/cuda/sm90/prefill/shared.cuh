// What the warps of the prefill kernel share: the tiles of Q, K and V that the products read, the pages they are made from, and
// the barriers between them.
#pragma once

#include "kernels/cuda/sm90/prefill/stream.cuh"

namespace ta::cuda::prefill {

inline constexpr int kBlockTokens = 2 * kPageTokens;  // a block of keys: two pages, one step of the main loop
inline constexpr int kStages = 3;                     // blocks ready for the products
inline constexpr int kConsumerGroups = 3;             // warpgroups of 64 query rows
inline constexpr int kThreads = 32 * kProducerWarps + 128 * kConsumerGroups;
inline constexpr int kProducerRegisters = 56, kConsumerRegisters = 152;
static_assert(kProducerRegisters + kConsumerGroups * kConsumerRegisters <= 65536 / kThreads * 4);
static_assert(64 * kConsumerGroups == kPrefillRows);

// Orders within a tile, chosen so that a producer's lane stores 16 bytes at a time, that the eight lanes of a store's phase
// reach all banks, and that a consumer's lane has the scores of exactly those tokens whose P it must hand to the product with
// V.
//
// Token 16 t + r + 8 h of a page, with r < 8 and h < 2, is row k_row(t, r, h) of K's tile, a column of the scores.
TA_HD constexpr int k_row(int t, int r, int h) {
    return 16 * (r >> 1) + 8 * (t & 1) + 4 * (t >> 1) + 2 * (r & 1) + h;
}
// Lane 4 g + i has the scores of columns 8 j + 2 i + e, which are tokens lane_token(i) + column_token(j, e) of the block.
TA_HD constexpr int lane_token(int i) {
    return 32 * (i >> 1) + (i & 1);
}
TA_HD constexpr int column_token(int j, int e) {
    return kPageTokens * (j / 8) + 2 * (j % 8 / 2) + 16 * (j % 2) + 8 * e;
}
// 16 channels are a chunk of a row of K's and Q's tiles, before the swizzle.
TA_HD constexpr int k_chunk(int chunk) {
    return (chunk & 4) | (chunk & 1) << 1 | (chunk >> 1 & 1);
}
// Channel (d/8) r + 2 t + h is row 16 t + 8 h + v_row(r) of V's tile and a column of O: lane 4 g + i has columns 8 j + 2 i + e,
// which are channels (d/8) out_octant(i, e) + j.
TA_HD constexpr int v_row(int r) {
    return (r & 2) | (r >> 2) | (r & 1) << 2;
}
TA_HD constexpr int out_octant(int i, int e) {
    return 4 * e + 2 * (i & 1) + (i >> 1);
}

inline constexpr float kSumUnit = 0x1p-32f;  // of the sums of rows: so they are finite whatever V's scale
inline constexpr float kNever = -1e30f;      // log2 of what no key has added to yet

inline constexpr int kGrid = 112;                // steps of an octave in which scores come to the exponential
inline constexpr float kFine = kGrid * 0x1p16f;  // those of their multiply-add, whose high half counts

// Scores of tokens with scales of their own come to the exponential out of a float near kTokenZero: its middle bytes are the
// integer, less 16384. The half rounds to nearest.
inline constexpr float kTokenZero = 49152.5f;
inline constexpr int kTokenBias = 16384;

// The scales of two columns of a lane that follow one another.
struct alignas(16) TokenScales {
    float k[2];  // K's
    float v[2];  // log2 of V's in steps, plus kTokenZero
};

// The scales of a block. A page is uniform when its K scales are equal and its V scales are; the fields of pages are for blocks
// of two such, those of tokens for all.
struct alignas(16) BlockScales {
    float k_page[2];     // K's scale * kFine; infinite: the page is not uniform
    int32_t v_page[2];   // log2 of V's scale, in 1 / kFine; plus 1/2 of the high half, which so is rounded to nearest
    float v_inverse[2];  // kSumUnit / V's scale; 0: there is no page
    float v_unit[2];     // that of v_weight, times kSumUnit
    float k_largest[2], v_largest[2];  // of K's scales; of the sizes of log2 of V's, in steps
    float v_spread[2];                 // octaves between V's scales
    uint32_t unused[2];
    TokenScales token[16][4];     // [j][i]: columns 8 j + 2 i and the next
    float v_token[kBlockTokens];  // kSumUnit / V's scale, by columns
    uint8_t v_weight[2][4][32];   // where V's scales differ, the same in v_unit, high and low bytes: [byte][i], tokens as in P
};

// What a query row needs once per block; registers are for the accumulators.
struct alignas(16) RowInfo {
    float scale;      // stage-1 scale * softmax scale, log2 units unless softcap is on
    float magnitude;  // bound of the row's scores: 127 * the sum of |codes|, or a little more
    int key_begin, key_end;
    int position;
    float slope;      // ALiBi, log2 units
    float bias;       // from K's offset, in the unit of `scale`
    float natural;    // running maximum of the scores (SAS)
    float reference;  // m of the row: its sums and O are times 2^-m
};

// A lane's sums over its columns, for rows g and g + 8 of its warp.
struct alignas(16) LaneSums {
    float l[2];  // of P / V's scale, times 255 kSumUnit / 2^m
    float c[2];  // of P, which O holds 128 times too often since V is stored plus 128; times 255 / 2^m
};

// What holds for all rows of a warp.
struct alignas(16) WarpLimits {
    int begin, end;  // keys that every row sees
    float largest;   // no score, times K's scale, is larger
    int unused;
};

template <int D, bool kFractions>
struct SharedMemory {
    static constexpr int kFractionStages = kFractions ? kStages : 1;

    // Q, K: a row per query row or token, columns are channels. V: a row per channel, columns are tokens. Rows are swizzled
    // (wgmma.cuh).
    alignas(1024) uint8_t q[kPrefillRows * D];
    alignas(1024) uint8_t k[kStages][kBlockTokens * D];
    alignas(1024) uint8_t v[kStages][D * kBlockTokens];
    // Fractions of the pages' zero points, in eighths. K: row p is page p, rows 2 ... unused. V: bytes 2 p, 2 p + 1 of a row
    // are page p, bytes 4 ... unused.
    alignas(1024) uint8_t k_fraction[kFractionStages][8 * D];
    alignas(128) uint8_t v_fraction[kFractionStages][16 * D];
    alignas(128) uint8_t raw[kRawBlocks][2][TokenLayout(D).bytes()];  // pages on their way from memory
    alignas(16) BlockScales scales[kStages];
    RowInfo rows[kPrefillRows];
    LaneSums sums[128 * kConsumerGroups];
    WarpLimits limits[4 * kConsumerGroups];
    Tile tiles[kTiles];
    alignas(16) uint4 sign_masks[D / 8];  // of the rotation
    PageStream<D> stream;
    uint32_t raw_is_channel[kRawBlocks][2];
    uint64_t raw_full[kRawBlocks], raw_empty[kRawBlocks];
    uint64_t full[kStages], empty[kStages];
    uint64_t tile_full[kTiles], tile_empty[kTiles];
};

}  // namespace ta::cuda::prefill
