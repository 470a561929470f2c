// Memory that the warps of a CTA share: codes of queries, pages as the products read them and as they came, and values of rows.
#pragma once

#include "kernels/cuda/common/prefill/query.cuh"
#include "kernels/cuda/common/prefill/rows.cuh"
#include "kernels/cuda/common/turning.cuh"
#include "kernels/cuda/ptx/copy_words.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/sm80/prefill/prefill.h"

namespace ta::cuda::prefill::sm80 {

inline constexpr int kWarps = 8, kThreads = 32 * kWarps;

// A warp has 16 kRowTiles<D> query rows: O of 32 rows takes 128 registers at 128 channels.
template <int D>
inline constexpr int kRowTiles = D <= 128 ? 2 : 1;
template <int D>
inline constexpr int kRows = 16 * kRowTiles<D>* kWarps;  // of a tile
static_assert(kRows<128> == kRowsOfTile && kRows<256> == kRowsOfWideTile);

// Operands. A page stores its codes in the order of the A fragments of a product with tokens (K) or channels (V) as rows. Read as
// B fragments of the products here, words 0 and 2 of a lane's 16 bytes are one tile of 8 columns, words 1 and 3 the next. So in
// shared memory words 1 and 2 change places: a fragment of B lies in two registers that follow each other.
//   S = Q K^T   columns are tokens, in order; a step of 32 rows is channels (D/4) i + 8 step + 4 w + b
//   O = P V     columns are channels (D/8) r + 2 tile + h; row 16 w + 4 i + b of step e is token 32 w + 8 b + 2 i + e
// Lane 4 g + i has S of columns 8 j + 2 i + e, which are the tokens of P that the same lane supplies: bytes j % 4 of word j / 4 of
// step e.
TA_HD constexpr int score_token(int j, int i, int e) {
    return 8 * j + 2 * i + e;
}
TA_HD constexpr int value_token(int step, int w, int i, int b) {
    return 32 * w + 8 * b + 2 * i + step;
}
static_assert(score_token(6, 3, 1) == value_token(1, 6 / 4, 3, 6 % 4));
static_assert(k_place(128, 8, score_token(5, 2, 1), 2 * 32 + 8 * 3 + 4 + 1).byte ==
              (2 * 4 + 3) * 512 + (4 * (2 * 2 + 1) + 2) * 16 + (2 * 1 + 1) * 4 + 1);
static_assert(v_place(128, 8, value_token(1, 1, 3, 2), 16 * 5 + 2 * 7 + 1).byte ==
              (2 * 7 + 1) * 512 + (4 * 5 + 3) * 16 + (2 * 1 + 1) * 4 + 2);

// Q's operand: [16 rows][step][lane] 16 bytes, lanes swizzled by their step. start_rows() gives a lane the codes of 8 channels of
// each 32, which are those of one lane's step.
template <int D>
struct QueryOperand {
    static constexpr int kSteps = D / 32;
    uint8_t* q;
    uint32_t first[2][kSteps] = {};  // of the first row

    TA_DEVICE static int place(int tile, int step, int lane) {
        return ((tile * kSteps + step) * 32 + (lane ^ (step & 3))) * 16;
    }
    TA_DEVICE void store(int r, int at, int i, const uint32_t (&w)[2][kSteps]) {
#pragma unroll
        for (int n = 0; n < kSteps; ++n) {
            if (r == 0) {
                first[0][n] = w[0][n], first[1][n] = w[1][n];
                continue;
            }
            const int octet = 4 * n + i;
            *reinterpret_cast<uint4*>(q + place(at / 16, octet % kSteps, at % 8 * 4 + octet / kSteps)) =
                make_uint4(first[0][n], w[0][n], first[1][n], w[1][n]);
        }
    }
};

// Properties of a page that its scores and products need.
struct alignas(16) PageInfo {
    enum : uint32_t {
        kKBytes = 1,      // K has 8 bits
        kKTokens = 2,     // K's tokens have scales of their own
        kVTokens = 4,     // V's do
        kTurning = 8,     // K has turning pairs
        kKFraction = 16,  // zero points of K have fractions
        kVFraction = 32,  // those of V
        kK2 = 64,         // K has 2 bits
        kV2 = 128,        // V has
        kVBytes = 256,    // V has 8 bits
    };
    uint32_t flags;
    float k_scale;  // the largest of K's
    float v_log2;   // log2 of V's largest; of codes that are all 0 as of 2^-60
    uint32_t unused;
};

// A page. K and V are INT8 codes in the order of token pages, except that words 1 and 2 of each 16 bytes have changed places;
// then comes what came behind the codes.
template <int D>
struct alignas(16) PageSlot {
    // For K or V of 4 and 2 bits, or of 8.
    struct Channels {
        uint8_t step[D], zero[D];
    };
    uint8_t k[kPageTokens * D], v[kPageTokens * D];
    union {
        Channels k_channels;
        float k_scale[kPageTokens];
    };
    union {
        Channels v_channels;
        float v_log2[kPageTokens];  // V's scales as they came, then log2 of them, less PageInfo's
    };
    struct Tail {  // of a channel page
        uint8_t v_exponents[kPageTokens / 2];
        float k_scale, v_scale;
        uint8_t turning[8 * kTurningPairs];
        float own_scales[2];
    } tail;
    PageInfo info;
};
static_assert(sizeof(PageSlot<128>::Tail) ==
              ChannelLayout(128, 4, 4).own_scales() + 8 - ChannelLayout(128, 4, 4).v_exponents());

inline constexpr int kPlaces = 32;  // of pages, a ring
inline constexpr int kMostDepth = 3;

// `depth` pages are on their way or being expanded while one is multiplied: depth + 1 slots and depth - 1 places for the codes of
// channel pages as they come.
template <int D>
struct SharedMemory {
    static constexpr int kRawBytes = kPageTokens * D;  // of 4 bits, K and V
    alignas(16) uint8_t q[kRows<D> * D];
    RowInfo rows[kRows<D>];
    alignas(16) uint4 sign_masks[D / 8];
    alignas(16) PagePlace places[kPlaces];
    alignas(16) uint64_t entries[kPlaces / 2];
    alignas(16) Tile tiles[2];
    alignas(16) PageSlot<D> slots[1];

    TA_DEVICE uint8_t* raw(int depth, int n) { return reinterpret_cast<uint8_t*>(slots + depth + 1) + n * kRawBytes; }
    static constexpr int bytes(int depth) {
        return int(sizeof(SharedMemory) + size_t(depth) * sizeof(PageSlot<D>)) + (depth - 1) * kRawBytes;
    }
};
static_assert(SharedMemory<128>::bytes(2) <= kSharedBytes && SharedMemory<256>::bytes(2) <= kWideSharedBytes);

}  // namespace ta::cuda::prefill::sm80
