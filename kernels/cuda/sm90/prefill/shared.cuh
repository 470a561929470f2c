// Memory that the warps of the prefill kernel share: the tiles of Q, K and V for the products, the pages they are made from, and
// the barriers between them.
#pragma once

#include "kernels/cuda/common/prefill/rows.cuh"
#include "kernels/cuda/common/turning.cuh"
#include "kernels/cuda/sm90/prefill/stream.cuh"

namespace ta::cuda::prefill::sm90 {

inline constexpr int kBlockTokens = 2 * kPageTokens;  // a block of keys: two pages, one step of the main loop
inline constexpr int kConsumerGroups = 3;             // warpgroups of 64 query rows
inline constexpr int kThreads = 32 * kProducerWarps + 128 * kConsumerGroups;
inline constexpr int kProducerRegisters = 56, kConsumerRegisters = 152;
static_assert(kProducerRegisters + kConsumerGroups * kConsumerRegisters <= 65536 / kThreads * 4);
static_assert(64 * kConsumerGroups == kRowsOfTile);

// Orders within a tile. stmatrix takes the words of pages to them as a lane loads them: word w of lanes 4 r + i becomes row r
// of an 8 x 16-byte matrix, lane i's four bytes its bytes 4 i ....
//
// A row of Q's and K's tiles is a token, in order; a chunk is 16 of its channels, four from each quarter.
template <int D>
TA_HD constexpr int channel_chunk(int channel) {
    return channel % (D / 4) / 4;
}
template <int D>
TA_HD constexpr int channel_byte(int channel) {
    return channel / (D / 4) * 4 + channel % 4;
}
// Lane 4 g + i has the scores of columns 8 j + 2 i + e, which are tokens lane_token(i) + column_token(j, e) of the block. They
// are P's for V's chunks, of 16 tokens of a block: byte 4 i + j % 4 of chunk 2 (j / 4) + e. Two scores come to the exponential
// in a word, n = score_word(j, e), of which j is half score_half(j), and two words make one of P.
TA_HD constexpr int lane_token(int i) {
    return 2 * i;
}
TA_HD constexpr int column_token(int j, int e) {
    return 8 * j + e;
}
TA_HD constexpr int score_word(int j, int e) {
    return j / 4 * 4 + 2 * e + j % 4 / 2;
}
TA_HD constexpr int score_half(int j) {
    return j % 2;
}
// Word n is of this e, and of this j and the next.
TA_HD constexpr int e_of_word(int n) {
    return n / 2 % 2;
}
TA_HD constexpr int j_of_word(int n) {
    return n / 4 * 4 + n % 2 * 2;
}
static_assert(score_word(j_of_word(7), e_of_word(7)) == 7 && score_word(j_of_word(10), e_of_word(10)) == 10);
TA_HD constexpr int v_chunk(int token) {
    return token / 32 * 2 + token % 2;
}
TA_HD constexpr int v_byte(int token) {
    return token % 8 / 2 * 4 + token % 32 / 8;
}
// Channel (d/8) r + 2 t + h is row 16 t + 8 h + r of V's tile.

TA_DEVICE uint4 load_chunk(const uint8_t* from) {
    return *reinterpret_cast<const uint4*>(from);
}
TA_DEVICE void store_chunk(uint8_t* to, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
    *reinterpret_cast<uint4*>(to) = make_uint4(w0, w1, w2, w3);
}

// f and 16 f of a page, for a row of V's tile: digits of the page's sum of P multiply them (softmax.cuh). A product reads all 16
// bytes of a row and those of the row 8 further on, times 0: what is being written there for other stages and, at the end, what
// lies behind.
inline constexpr int kMostStagesWithFractions = 4;
TA_HD constexpr int v_fraction_byte(int row, int stage, int page) {
    return 16 * row + 4 * stage + 2 * page;
}

inline constexpr float kNoLog = 1e30f;  // larger than any log2
inline constexpr int32_t kNoAddend = INT32_MIN;

inline constexpr int kSettleKeys = 8192;         // O is settled (softmax.cuh) when so many more have been added to it
inline constexpr int kHighest = 16256;           // up to here a maximum can be taken off any score without leaving 16 bits
inline constexpr int kGrid = 112;                // steps of an octave in which scores come to the exponential
inline constexpr float kFine = kGrid * 0x1p16f;  // those of their multiply-add, whose high half counts

// The multiply-add's factor is an integer, so if a score of the codes is as large as this, it may be a step off. Factors below
// kFewest are too coarse to be mended.
inline constexpr float kCoarse = 0x1p17f, kFewest = 32.0f;

// Scores of tokens with scales of their own come to the exponential out of a float near kTokenZero: its middle bytes are the
// integer, less 16384. The half rounds to nearest.
inline constexpr float kTokenZero = 49152.5f;
inline constexpr int kTokenBias = 16384;

// The scales of the two tokens of a word of scores.
struct alignas(16) TokenScales {
    float k[2];  // K's
    float v[2];  // log2 of V's in steps, plus kTokenZero
};

// The scales of a block. The replacement of a page that is missing at a tile's end takes part in nothing.
struct alignas(16) BlockScales {
    float k_page[2];                     // K's scale * kFine; infinite: the page's tokens differ
    float v_room[2];                     // what log2 of V's scales leaves of a 16-bit score, in 1 / kFine
    float v_highest[2], v_lowest[2];     // log2 of V's
    int32_t v_page[2];                   // as v_token, of all tokens; kNoAddend: they differ
    float digit[4];                      // what sums of P with digit i of 1 / V's scale count for in l: sum_row()
    float k_largest[2];                  // of K's scales
    float k_coarse[2];                   // K's scale * kCoarse; infinite: it is 0, or the page's tokens differ
    uint32_t channel[2];                 // is the page a channel page?
    uint64_t turning[2][kTurningPairs];  // of the pages; where there are any, only general_scores will do
    TokenScales token[16][4];            // [n][i]: word n
    int32_t v_token[8][4][2][2];         // [n][i][e]: log2 of V's, columns j = 2 n and 2 n + 1, in 1 / kFine; plus 1/2 of the
                                         // high half, which so is rounded to nearest
    float2 v_inverse[16][4];             // [n][i]: kSumUnit / V's scale, word n
};

// Eight more rows of V's tile, so that the product with V sums P too. The even ones are 1: what O holds 128 times too often
// since V is stored plus 128. The odd ones are the high and low bytes of 1 / V's scale, in some unit, of the tokens of page 0,
// which are 0 for those of page 1, and vice versa. So lane 4 g + i gets the sum of P, and digit i of l. The product comes in 16
// columns: it reads eight rows more, of whatever lies behind, and nobody looks at what becomes of them.
inline constexpr int kSumRows = 8;
TA_HD constexpr int sum_row(int page, int digit) {
    return 1 + 4 * page + 2 * digit;
}
// A lane's state between blocks beside O, of rows g and g + 8 of its warp. The sums are those of its columns.
struct alignas(16) LaneSums {
    float p[2];  // of P, which O holds 128 times too often since V is stored plus 128; in O's units
    float l[2];  // of its digits of P / V's scale, in O's units times kSumUnit
};
struct alignas(16) LaneRows {
    LaneSums sums;
    float scale[2];      // RowInfo's
    float reference[2];  // m of the row: its sums and O are times 2^-m
    float exact[2];      // l of a block where it is not made from P, times 255 kSumUnit / 2^m
    bool stays;          // the block does, for its second pass
};

// Limits that hold for all rows of a warp, or of several.
struct alignas(16) WarpLimits {
    int begin, end;  // keys that every row sees
    float largest;   // no score, times K's scale, is larger
    float trusted;   // the same; infinite until one has looked whether the factors' rounding shows, no number if it does
};

// Kinds of tiles. kLong: of many blocks, of which most take a loop of their own. kResident: of many rows and few blocks, which stay in
// shared memory until all of these rows have seen them (resident.cuh).
enum class Tiles { kAny, kLong, kResident };

template <int D, bool kChannels, bool kResident = false>
struct SharedMemory {
    static constexpr int kStages = kResident ? kResidentKeys<D> / kBlockTokens : 3;  // blocks ready for the products
    static constexpr int kRawBlocks = kResident ? 1 : 2;  // blocks of keys whose pages are on their way from memory
    static_assert(!kChannels || kStages <= kMostStagesWithFractions);
    // K of a stage is free as soon as the scores are there, not only with V: 4% less with scales per token. Where it costs
    // registers, 2% more.
    static constexpr bool kFreesKeys = !kChannels && !kResident && D == 128;

    // Q, K: a row per query row or token, columns are channels. V: a row per channel, columns are tokens. Rows are swizzled
    // (wgmma.cuh). Behind K's, the fractions of the zero points of its two pages, in eighths: products read 14 rows more, of
    // whatever is there.
    static constexpr int kFractionRows = kChannels ? 8 : 0;
    alignas(1024) uint8_t q[kRowsOfTile * D];
    alignas(1024) uint8_t k[kStages][(kBlockTokens + kFractionRows) * D];
    alignas(1024) uint8_t v[kStages][(D + kSumRows) * kBlockTokens];
    // V's fractions: 16 bytes for each row of its tile, of which those of a stage's block are v_fraction_byte() and the next;
    // zeros where V's tile has its sums.
    alignas(128) uint8_t v_fraction[kChannels ? 16 * (D + 2 * kSumRows) : 16];
    alignas(128) uint8_t raw[kRawBlocks][2][TokenLayout(D).bytes()];  // pages on their way from memory
    alignas(16) BlockScales scales[kStages];
    RowInfo rows[kRowsOfTile];
    LaneRows lanes[128 * kConsumerGroups];
    WarpLimits limits[4 * kConsumerGroups];        // of the rows of a warp; with channels of those of its warpgroup
    WarpLimits all_limits[2][kConsumerGroups][4];  // what these are made from, of this tile and of the next
    Tile tiles[kTiles];
    int first_of_part[4 * kConsumerGroups];  // a warp's rows of a resident tile
    alignas(16) uint4 sign_masks[D / 8];     // of the rotation
    PageStream<D> stream;
    alignas(8) uint32_t raw_bits[kRawBlocks][2];  // page_bits()
    uint64_t raw_full[kRawBlocks], raw_empty[kRawBlocks];
    uint64_t full[kStages], empty[kStages], keys_empty[kStages];
    uint64_t tile_full[kTiles], tile_empty[kTiles];
};

}  // namespace ta::cuda::prefill::sm90
