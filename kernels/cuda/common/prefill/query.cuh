// Stage 1 of queries: rotation and INT8 codes. A warp does 16 rows. Lane 4 g + i has, of rows g and g
// + 8, channels 32 n + 8 i + c for each n and c = 0 ... 7: of 16-bit elements, 16 bytes of a row at a time.
//
// The rotation is a product with the Hadamard matrix. Its levels between channels whose numbers differ in bits 0 to 4 are
// products with a 16 x 16 matrix of +-1 on the tensor cores, for both values of bit 2, exact but for the rounding of the sum;
// those of the other bits are additions of a lane's own values. A code may differ by one from a CPU's where the value is half
// way between two.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/common/division.cuh"
#include "kernels/cuda/common/prefill/rows.cuh"
#include "kernels/format/codec.h"
#include "kernels/format/rotation.h"

namespace ta::cuda::prefill {

constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: a sum with it has the nearest integer in its low bits

TA_DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
TA_DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// The properties in which 16-bit element types differ.
template <typename T>
struct Element;
template <>
struct Element<__half> {
    using Two = __half2;
    static constexpr uint32_t kOne = 0x3C00;
    static constexpr float kLargest = 65504.0f;
    static TA_DEVICE Two two(float x, float y) { return __floats2half2_rn(x, y); }
    static TA_DEVICE float2 floats(Two x) { return __half22float2(x); }
    static TA_DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};
template <>
struct Element<__nv_bfloat16> {
    using Two = __nv_bfloat162;
    static constexpr uint32_t kOne = 0x3F80;
    static constexpr float kLargest = kMaxMagnitude;
    static TA_DEVICE Two two(float x, float y) { return __floats2bfloat162_rn(x, y); }
    static TA_DEVICE float2 floats(Two x) { return __bfloat1622float2(x); }
    static TA_DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
            "%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};
template <typename T>
TA_DEVICE typename Element<T>::Two as_two(uint32_t x) {
    return *reinterpret_cast<typename Element<T>::Two*>(&x);
}
template <typename Two>
TA_DEVICE uint32_t bits_of(Two x) {
    return *reinterpret_cast<uint32_t*>(&x);
}

// The signs of a rotation, as bits to flip in pairs of 16-bit elements: those of channels 8 n ... 8 n + 7.
TA_DEVICE uint4 sign_mask(const float* signs, int n) {
    uint32_t w[4];
#pragma unroll
    for (int p = 0; p < 4; ++p)
        w[p] = (signs[8 * n + 2 * p] < 0.0f ? 0x8000u : 0u) | (signs[8 * n + 2 * p + 1] < 0.0f ? 0x80000000u : 0u);
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// Operand B of the product with +-1: rows are channels 8 i + c with bit 2 of c gone, columns likewise, those with bit 1 of c
// set in the second tile of 8. Row 2 i + e is (i, c = e), row 8 + 2 i + e is (i, c = 2 + e), column 2 i + e is (i, c = 2 tile +
// e).
template <typename T>
TA_DEVICE void make_signs(uint32_t (&b)[2][2], int g, int i) {
    constexpr uint32_t kOnes = Element<T>::kOne * 0x10001u;
    const uint32_t all = (__popc(i & (g >> 1)) & 1) * 0x80008000u, odd = (g & 1) * 0x80000000u;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        b[tile][0] = kOnes ^ all ^ odd;
        b[tile][1] = b[tile][0] ^ (tile ? 0x80008000u : 0u);
    }
}

// The levels of the bits 0 to 4 of group n of 32 channels; w[row][p] is the pair c = 2 p, 2 p + 1. kAdd: adds to x.
template <typename T, bool kAdd>
TA_DEVICE void rotate_group(const uint32_t (&w)[2][4], const uint32_t (&b)[2][2], float (&x0)[8], float (&x1)[8]) {
    const uint32_t low[4] = {w[0][0], w[1][0], w[0][1], w[1][1]}, high[4] = {w[0][2], w[1][2], w[0][3], w[1][3]};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
        const uint32_t minus[2] = {b[tile][0] ^ 0x80008000u, b[tile][1] ^ 0x80008000u};
#pragma unroll
        for (int c = 2 * tile; c < 8; c += 4) {
            float d[4] = {};
            if (kAdd) d[0] = x0[c], d[1] = x0[c + 1], d[2] = x1[c], d[3] = x1[c + 1];
            Element<T>::multiply(d, low, b[tile]);
            Element<T>::multiply(d, high, c < 4 ? b[tile] : minus);
            x0[c] = d[0], x0[c + 1] = d[1], x1[c] = d[2], x1[c + 1] = d[3];
        }
    }
}

// Values that are no numbers or too large are replaced, and counted.
TA_DEVICE float finite(float x, float limit, float instead, bool saturate, int& replaced) {
    if (fabsf(x) <= limit) return x;
    ++replaced;
    return saturate && x == x ? copysignf(instead, x) : 0.0f;
}
TA_DEVICE void count_replaced(const AttendArgs& args, const Tile& tile, int replaced) {
    if (replaced && args.nonfinite && tile.rows.part == 0) atomicAdd(args.nonfinite + tile.rows.sequence, uint32_t(replaced));
}

TA_DEVICE float times_offset(const float (&x)[8], const float* mu) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) sum = fmaf(x[c], __ldg(mu + c), sum);
    return sum;
}

// Two rows of queries. One that does not exist is another's place: something finite, which nobody writes or counts.
struct RowPair {
    RowPlace at[2];
    bool exists[2];
    TA_DEVICE RowPair(const AttendArgs& args, const Tile& tile, int row_in_tile)
        : at{{args, tile, row_in_tile}, {args, tile, row_in_tile + 8}} {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            exists[r] = at[r].token < tile.rows.n_query;
            at[r].token = min(at[r].token, tile.rows.n_query - 1);
        }
    }
};

// A lane's part of a row of 16-bit elements, as it is.
template <int D, typename T>
TA_DEVICE void load_words(const T* from, uint32_t (&w)[D / 32][4]) {
    if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
        for (int n = 0; n < D / 32; ++n) {
            const uint4 raw = __ldg(reinterpret_cast<const uint4*>(from + 32 * n));
            w[n][0] = raw.x, w[n][1] = raw.y, w[n][2] = raw.z, w[n][3] = raw.w;
        }
    } else {
#pragma unroll
        for (int n = 0; n < D / 32; ++n) {
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                typename Element<T>::Two pair;
                pair.x = from[32 * n + 2 * p], pair.y = from[32 * n + 2 * p + 1];
                w[n][p] = bits_of(pair);
            }
        }
    }
}

// A lane's part of two rows, rotated but for the levels of the other bits. bias[row]: its part of the product with K's offset.
// The work begins with the first words that arrive. Rows with values to be replaced are known only at the end, and are
// loaded once more.
template <int D, typename T>
TA_DEVICE void load_rows(const AttendArgs& args, const Tile& tile, const RowPair& rows, int lane, const uint4* masks,
                         float (&x)[2][D / 32][8], float (&bias)[2]) {
    using Two = typename Element<T>::Two;
    constexpr float kLargest = Element<T>::kLargest;
    const int i = lane & 3;
    const auto* const first = static_cast<const T*>(args.q.data) + 8 * i;
    const T* const from[2] = {first + rows.at[0].offset(args.q, tile), first + rows.at[1].offset(args.q, tile)};
    uint32_t b[2][2];
    if (args.signs) make_signs<T>(b, lane >> 2, i);
#pragma unroll 1
    for (bool replaces = false;; replaces = true) {
        uint32_t w[2][D / 32][4];
        load_words<D>(from[0], w[0]);
        load_words<D>(from[1], w[1]);
        if (replaces) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int replaced = 0;
#pragma unroll
                for (int n = 0; n < 4 * (D / 32); ++n) {
                    const float2 v = Element<T>::floats(as_two<T>(w[r][n / 4][n % 4]));
                    const float y = finite(v.x, kLargest, kLargest, args.saturate, replaced);
                    const float z = finite(v.y, kLargest, kLargest, args.saturate, replaced);
                    w[r][n / 4][n % 4] = bits_of(Element<T>::two(y, z));
                }
                if (rows.exists[r]) count_replaced(args, tile, replaced);
            }
        }
        if (args.k_offset) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                bias[r] = 0.0f;
#pragma unroll
                for (int n = 0; n < 4 * (D / 32); ++n) {
                    const float* mu = args.k_offset + tile.head * D + 32 * (n / 4) + 8 * i + 2 * (n % 4);
                    const float2 v = Element<T>::floats(as_two<T>(w[r][n / 4][n % 4]));
                    bias[r] = fmaf(v.x, __ldg(mu), fmaf(v.y, __ldg(mu + 1), bias[r]));
                }
            }
        }
        Two largest = as_two<T>(0);
#pragma unroll
        for (int n = 0; n < D / 32; ++n) {
#pragma unroll
            for (int p = 0; p < 8; ++p) largest = __hmax2_nan(largest, __habs2(as_two<T>(w[p / 4][n][p % 4])));
            if (args.signs) {
                const uint4 mask = masks[4 * n + i];
                uint32_t both[2][4];
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    both[r][0] = w[r][n][0] ^ mask.x, both[r][1] = w[r][n][1] ^ mask.y;
                    both[r][2] = w[r][n][2] ^ mask.z, both[r][3] = w[r][n][3] ^ mask.w;
                }
                rotate_group<T, false>(both, b, x[0][n], x[1][n]);
            } else {
#pragma unroll
                for (int p = 0; p < 8; ++p) {
                    const float2 v = Element<T>::floats(as_two<T>(w[p / 4][n][p % 4]));
                    x[p / 4][n][2 * (p % 4)] = v.x, x[p / 4][n][2 * (p % 4) + 1] = v.y;
                }
            }
        }
        const float2 all = Element<T>::floats(largest);
        if (replaces || !__any_sync(~0u, !(all.x <= kLargest && all.y <= kLargest))) break;
    }
}

// fp32 values: as sums of three bf16, which hold all of their bits.
template <int D>
TA_DEVICE void load_float_rows(const AttendArgs& args, const Tile& tile, const RowPair& rows, int lane, const uint4* masks,
                               float (&x)[2][D / 32][8], float (&bias)[2]) {
    using E = Element<__nv_bfloat16>;
    const int i = lane & 3;
    int replaced = 0;
    uint32_t b[2][2];
    if (args.signs) make_signs<__nv_bfloat16>(b, lane >> 2, i);
#pragma unroll
    for (int n = 0; n < D / 32; ++n) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float* from = static_cast<const float*>(args.q.data) + rows.at[r].offset(args.q, tile) + 32 * n + 8 * i;
            int of_row = 0;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                x[r][n][c] = finite(__ldg(from + c), kMaxMagnitude, kMaxMagnitude, args.saturate, of_row);
            if (rows.exists[r]) replaced += of_row;
            if (args.k_offset) bias[r] += times_offset(x[r][n], args.k_offset + tile.head * D + 32 * n + 8 * i);
        }
        if (!args.signs) continue;
        const uint4 mask = masks[4 * n + i];
        const uint32_t flip[4] = {mask.x, mask.y, mask.z, mask.w};
        float rest[2][8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const uint32_t sign = c % 2 ? flip[c / 2] & 0x80000000u : flip[c / 2] << 16;
                rest[r][c] = __uint_as_float(__float_as_uint(x[r][n][c]) ^ sign);
                x[r][n][c] = 0.0f;
            }
        }
#pragma unroll
        for (int part = 0; part < 3; ++part) {
            uint32_t w[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    const E::Two high = E::two(rest[r][2 * p], rest[r][2 * p + 1]);
                    const float2 v = E::floats(high);
                    rest[r][2 * p] -= v.x, rest[r][2 * p + 1] -= v.y;
                    w[r][p] = bits_of(high);
                }
            }
            rotate_group<__nv_bfloat16, true>(w, b, x[0][n], x[1][n]);
        }
    }
    count_replaced(args, tile, replaced);
}

TA_DEVICE float sqrt_approx(float x) {
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The levels of the bits 5 and up.
template <int N>
TA_DEVICE void finish_rotation(float (&x)[N][8]) {
#pragma unroll
    for (int h = 1; h < N; h *= 2) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (n & h) continue;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const float a = x[n][c], b = x[n + h][c];
                x[n][c] = a + b, x[n + h][c] = a - b;
            }
        }
    }
}

// For rows that are not rotated.
template <int D>
TA_DEVICE void divide_by_scales(float (&x)[2][D / 32][8], const float (&scale)[2], float (&inverse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        // Plain 16-bit values often lie half way between two codes (half of the largest does). The quotient is rounded as a
        // division's is, so that the code is the CPU's.
#pragma unroll
        for (int n = 0; n < D / 4; ++n) {
            float& value = x[r][n / 8][n % 8];
            const float quotient = value * inverse[r];
            value = fmaf(fmaf(-quotient, scale[r], value), inverse[r], quotient);
        }
        inverse[r] = scale[r] > 0.0f ? 1.0f : 0.0f;
    }
}

// Rows row_in_tile and row_in_tile + 8 of the tile. `info` is that of the first. q.store(r, at, i, w) takes row r of these two,
// `at` of the tile: the lane's codes w[h][n], of channels 32 n + 8 i + 4 h .. + 3.
template <int D, class QueryTile>
TA_DEVICE void start_rows(const AttendArgs& args, const Tile& tile, int row_in_tile, int lane, const uint4* masks, QueryTile q,
                          RowInfo* info) {
    const int i = lane & 3;
    float x[2][D / 32][8], bias[2] = {};
    {
        const RowPair rows(args, tile, row_in_tile);
        if (args.q.dtype == DType::kF16) {
            load_rows<D, __half>(args, tile, rows, lane, masks, x, bias);
        } else if (args.q.dtype == DType::kBf16) {
            load_rows<D, __nv_bfloat16>(args, tile, rows, lane, masks, x, bias);
        } else {
            load_float_rows<D>(args, tile, rows, lane, masks, x, bias);
        }
    }
    const float unit = args.softcap > 0.0f ? args.scale : args.scale * 1.44269504f;
    const float levels = float(args.q_levels), per_level = inverse_of(levels), norm = args.signs ? rotation_norm(D) : 1.0f;
    float scale[2], inverse[2];
    if (args.signs) {
#pragma unroll
        for (int r = 0; r < 2; ++r) finish_rotation(x[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float amax[4] = {};
#pragma unroll
        for (int n = 0; n < D / 4; ++n) amax[n % 4] = fmaxf(amax[n % 4], fabsf(x[r][n / 8][n % 8]));
        const float largest = quad_max(fmaxf(fmaxf(amax[0], amax[1]), fmaxf(amax[2], amax[3]))) * norm;
        scale[r] = largest < kMinAmax ? 0.0f : divide(largest, levels, per_level);
        inverse[r] = scale[r] > 0.0f ? norm * inverse_of(scale[r]) : 0.0f;
    }
    if (!args.signs) divide_by_scales<D>(x, scale, inverse);
    int squares[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        uint32_t w[2][D / 32];
#pragma unroll
        for (int n = 0; n < D / 32; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t code[4];
#pragma unroll
                for (int c = 0; c < 4; ++c) code[c] = __float_as_uint(fmaf(x[r][n][4 * h + c], inverse[r], kInteger));
                w[h][n] = __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
                squares[r] = __dp4a(int(w[h][n]), int(w[h][n]), squares[r]);
            }
        }
        q.store(r, row_in_tile + 8 * r, i, w);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        squares[r] += __shfl_xor_sync(~0u, squares[r], 1);
        squares[r] += __shfl_xor_sync(~0u, squares[r], 2);
        if (args.k_offset) bias[r] = quad_sum(bias[r]);
        if (i == 0) {
            info[8 * r].scale = scale[r] * unit;
            info[8 * r].magnitude = 127.5f * sqrt_approx(float(D) * float(squares[r]));  // by Cauchy and Schwarz
            info[8 * r].bias = bias[r] * unit;
        }
    }
    // The rest is a lane's for a row.
    if (lane < 16) {
        RowInfo& to = info[lane - (lane >> 2)];
        const RowPlace at(args, tile, row_in_tile - (lane >> 2) + lane);
        const bool exists = at.token < tile.rows.n_query;
        to.position = tile.rows.n_keys - tile.rows.n_query + at.token;
        KeyRange seen = visible_keys(args.causal, args.window, tile.rows.n_keys, to.position);
        const BlockWalk walk = tile.rows.walk;
        if (walk.stride > 1) seen = {walk.keys(seen.begin), walk.keys(seen.end)};
        // A row that does not exist sees all keys, so that no block takes a slower path because of it.
        to.key_begin = exists ? seen.begin : 0;
        to.key_end = exists ? seen.end : tile.rows.own_keys;
        to.slope = 0.0f;
        if (args.alibi_slope && exists) to.slope = args.alibi_slope[at.head] * 1.44269504f;
        to.natural = kNever;
    }
    __syncwarp();
}

}  // namespace ta::cuda::prefill
