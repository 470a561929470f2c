// The two products of the decode kernel over one page: scores and values, on codes as they are stored. Both are transposed:
// tokens or channels on the 16 rows of mma.sync, queries on its 8 columns, which are the high and the low digit of 4 query
// rows. Lane = 4 r + i works on query row i of each tile of 4: it gets the scores of tokens r + 8 k, k = 0..7, and the outputs
// of channels (d'/8) r .. (d'/8) (r + 1) - 1, d' the channels that V codes are stored for.
#pragma once

#include "kernels/cuda/any/decode/query.cuh"
#include "kernels/cuda/common/half2.cuh"

namespace ta::cuda {

__device__ __forceinline__ uint4 load_codes(const uint8_t* codes, int load, int lane) {
    return *reinterpret_cast<const uint4*>(codes + load * 512 + lane * 16);
}

// Row tile `sub` of those that share bytes. Upper fields stay where they are, 2^(kBits sub) too large: the code that uses the
// sum corrects it. The last of them is not unpacked at all: its sum is that of all fields, from which the sums of the others
// are subtracted. That costs less than the masks.
template <int kBits>
__device__ __forceinline__ void unpack(const uint4& w, int sub, uint32_t (&a)[4]) {
    const uint32_t mask = kBits * (sub + 1) == 8 ? 0xffffffffu : (kBits == 4 ? 0x0f0f0f0fu : 0x03030303u) << kBits * sub;
    a[0] = w.x & mask;
    a[1] = w.y & mask;
    a[2] = w.z & mask;
    a[3] = w.w & mask;
}

template <int kBits>
__device__ __forceinline__ uint32_t step_bits(uint32_t step_bytes) {
    return step_bytes & (kBits == 4 ? 0x1f1f1f1fu : 0x7f7f7f7fu);
}

// ---------------------------------------------------------------------------------------------------------------- scores

// A lane's channels 4 lane .. + 3 (and + 128) of the queries as fp16. Held in registers over a segment where there are few
// rows.
template <int D, int kRows>
struct HalfQueries {
    static constexpr int W = D > 128 ? 2 : 1;
    __half2 x[kRows][W][2];

    template <class Memory>
    __device__ __forceinline__ void load(const Memory& memory, int first_row, int lane) {
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const int word = min(lane + 32 * j, D / 4 - 1), from = first_row + row;
                const uint32_t q =
                    *reinterpret_cast<const uint32_t*>(memory.queries[0].code[from] + swizzled_word<D>(from, word));
                const uint32_t biased = q ^ 0x80808080u;  // 0x6400 | n is 1024 + n
                const __half2 bias = __floats2half2_rn(1152.0f, 1152.0f);
                x[row][j][0] = __hsub2(half2_of(__byte_perm(biased, 0x64, 0x4140)), bias);
                x[row][j][1] = __hsub2(half2_of(__byte_perm(biased, 0x64, 0x4342)), bias);
            }
        }
    }
};

// Splits q * step of kRows rows and all channels into digits, 128 high + low with |low| <= 64, and leaves them in memory. In
// fp16, adding 1536 rounds to an integer, which the low byte then is: |q step| <= 127 * 80, and each operation is exact but for
// that rounding.
template <int D, int kBits, int kRows, class Memory>
__device__ __forceinline__ void scale_queries(const uint8_t* k_step, const HalfQueries<D, kRows>& q, Memory& memory,
                                              int first_row, int lane) {
    const __half2 magic = __floats2half2_rn(1536.0f, 1536.0f);
#pragma unroll
    for (int j = 0; j < HalfQueries<D, kRows>::W; ++j) {
        const int word = lane + 32 * j;
        if (D / 4 < 32 && word >= D / 4) break;
        const uint32_t steps = step_bits<kBits>(*reinterpret_cast<const uint32_t*>(k_step + 4 * word));
        __half2 step[2], part[2];  // step, step / 128
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            step[c] = __hsub2(half2_of(__byte_perm(steps, 0x64, c ? 0x4342 : 0x4140)), __floats2half2_rn(1024.0f, 1024.0f));
            part[c] = __hmul2(step[c], __floats2half2_rn(0x1p-7f, 0x1p-7f));
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            uint32_t high[2], low[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const __half2 x = q.x[row][j][c], h = __hfma2(x, part[c], magic);
                high[c] = bits_of(h);
                low[c] = bits_of(__hfma2(x, step[c], __hfma2(__hsub2(h, magic), __floats2half2_rn(-128.0f, -128.0f), magic)));
            }
            const int to = 2 * (first_row + row);
            *reinterpret_cast<uint32_t*>(memory.digits[to] + swizzled_word<D>(0, word)) = __byte_perm(high[0], high[1], 0x6420);
            *reinterpret_cast<uint32_t*>(memory.digits[to + 1] + swizzled_word<D>(1, word)) =
                __byte_perm(low[0], low[1], 0x6420);
        }
    }
}

// Scores of channel pages are in eighths times 2^score_shift, for token r + 8 k: a power of two that needs no shift to the
// right.
template <int kBits>
constexpr int score_shift(int k) {
    const int field = k / 2 % (8 / kBits) * kBits;
    return field > 3 ? field - 3 : 0;
}

// s[n][k] = sum over channels of q (8 step c + zero8) * 2^score_shift for token r + 8 k and query row 4 n + i of `tile` on.
template <int D, int kBits, int N, class Memory>
__device__ __forceinline__ void channel_scores(const uint8_t* codes, const uint8_t* k_step, const Memory& memory, int tile,
                                               int (&s)[N][8], int lane) {
    const int r = lane / 4, i = lane % 4;
    int zero8[N];
    {
        // Zero points on rows 0..7, their fractions on rows 8..15, the query in both digits.
        uint32_t z[D / 32][2], f[D / 32][2];
        const auto load = [&](const uint8_t* from, uint32_t(&to)[D / 32][2]) {
            const uint8_t* at = from + (D / 4) * i;
#pragma unroll
            for (int k = 0; k < D / 32; ++k) {
                if constexpr (D == 96) {
                    const uint2 x = *reinterpret_cast<const uint2*>(at + 8 * k);
                    to[k][0] = x.x, to[k][1] = x.y;
                } else if (k % 2 == 0) {
                    const uint4 x = *reinterpret_cast<const uint4*>(at + 8 * k);
                    to[k][0] = x.x, to[k][1] = x.y, to[k + 1][0] = x.z, to[k + 1][1] = x.w;
                }
            }
        };
        load(k_step + D, z);
        load(k_step, f);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int row = 4 * (tile + n) + r / 2;
            uint32_t q[D / 32][2];
            load_fragments<D>(memory.queries[0].code[row], row, i, q);
            int c[4] = {0, 0, 0, 0};
#pragma unroll
            for (int k = 0; k < D / 32; ++k) {
                // At 2 bits the fraction is bit 7, which as a signed byte is -128.
                const auto fraction = [](uint32_t x) { return kBits == 4 ? x >> 5 & 0x07070707u : x & 0x80808080u; };
                const uint32_t a[4] = {z[k][0], fraction(f[k][0]), z[k][1], fraction(f[k][1])};
                mma_s8_s8(c, a, q[k][0], q[k][1]);
            }
            zero8[n] = 8 * c[1] + (kBits == 4 ? c[3] : -(c[3] >> 5));
        }
    }
    uint32_t b[N][D / 32][2];
#pragma unroll
    for (int n = 0; n < N; ++n) load_fragments<D>(memory.digits[8 * (tile + n) + r], r, i, b[n]);
    constexpr int kSubs = 8 / kBits;
#pragma unroll
    for (int group = 0; group < 4 / kSubs; ++group) {
        int c[kSubs][N][4] = {};
#pragma unroll
        for (int k = 0; k < D / 32; ++k) {
            const uint4 w = load_codes(codes, group * (D / 32) + k, lane);
#pragma unroll
            for (int sub = 0; sub < kSubs; ++sub) {
                uint32_t a[4];
                unpack<kBits>(w, sub, a);
#pragma unroll
                for (int n = 0; n < N; ++n) mma_u8_s8(c[sub][n], a, b[n][k][0], b[n][k][1]);
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int others = 0;
#pragma unroll
                for (int sub = 0; sub < kSubs; ++sub) {
                    const int k = 2 * (group * kSubs + sub) + h;
                    const int sum = 128 * c[sub][n][2 * h] + c[sub][n][2 * h + 1];
                    const int own = sub == kSubs - 1 ? sum - others : sum;
                    others += sum;
                    constexpr int kEighths = 3;
                    const int left = kEighths - kBits * sub > 0 ? kEighths - kBits * sub : 0;
                    s[n][k] = (own << left) + (zero8[n] << score_shift<kBits>(k));
                }
            }
        }
    }
}

// s[n][k] = sum over channels of (128 q + rest) k.
template <int D, int N, class Memory>
__device__ __forceinline__ void token_scores(const uint8_t* codes, const Memory& memory, int tile, int (&s)[N][8], int lane) {
    const int r = lane / 4, i = lane % 4;
    uint32_t b[N][D / 32][2];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int row = 4 * (tile + n) + r / 2, digit = r & 1;
        const auto& q = memory.queries[0];
        load_fragments<D>(digit ? q.rest[row] : q.code[row], row + digit, i, b[n]);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        int c[N][4] = {};
#pragma unroll
        for (int k = 0; k < D / 32; ++k) {
            uint32_t a[4];
            unpack<8>(load_codes(codes, t * (D / 32) + k, lane), 0, a);
#pragma unroll
            for (int n = 0; n < N; ++n) mma_s8_s8(c[n], a, b[n][k][0], b[n][k][1]);
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            s[n][2 * t] = kRestUnits * c[n][0] + c[n][1];
            s[n][2 * t + 1] = kRestUnits * c[n][2] + c[n][3];
        }
    }
}

// ------------------------------------------------------------------------------------------------------------- P and values

// P of tokens r + 8 k as bytes of two digits: a lane's words are the high digits of k = 0..3 and 4..7 and the low ones. Its
// place keeps both the write and the reads below free of bank conflicts.
__device__ __forceinline__ int p_place(int lane) {
    const int r = lane / 4, i = lane % 4, r0 = r & 1, r1 = r >> 1 & 1, r2 = r >> 2;
    return (i & 1) | ((i >> 1) ^ r1) << 1 | (r0 ^ r2) << 2 | r1 << 3 | r2 << 4;
}

// `bits` are floats 2^23 + P.
__device__ __forceinline__ void store_p(uint4* p, const uint32_t (&bits)[8], int lane) {
    uint32_t high[2], low[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t first = __byte_perm(bits[4 * h], bits[4 * h + 1], 0x5140);
        const uint32_t second = __byte_perm(bits[4 * h + 2], bits[4 * h + 3], 0x5140);
        low[h] = __byte_perm(first, second, 0x5410);
        high[h] = __byte_perm(first, second, 0x7632);
    }
    p[p_place(lane)] = make_uint4(high[0], high[1], low[0], low[1]);
}

// B fragments of the two steps of 32 tokens: column r is the digit r & 1 of query row r / 2.
__device__ __forceinline__ void load_p(const uint4* p, int lane, uint32_t (&b)[2][2]) {
    const int r = lane / 4, i = lane % 4;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        const uint4* from = p + p_place(4 * (2 * i + step) + r / 2);
        const uint2 x = reinterpret_cast<const uint2*>(from)[r & 1];
        b[step][0] = x.x;
        b[step][1] = x.y;
    }
}

// Byte b of x. One instruction converts the first and the last.
template <int b>
__device__ __forceinline__ float float_of_u8(uint32_t x) {
    if constexpr (b == 0) return float(x & 0xff);
    if constexpr (b == 3) return float(x >> 24);
    return __uint_as_float(__byte_perm(x, 0x4b000000u, 0x7440 + b)) - 0x1p23f;
}
// The signed halfword [high, low] of bytes b of the two.
template <int b>
__device__ __forceinline__ float float_of_s16(uint32_t low, uint32_t high) {
    return float(int(permute_signed<b + 0x10 * (4 + b) + 0x1100 * (12 + b)>(low, high)));
}

// o[n][2 tile + h] += g[n] * sum over tokens of P (step c + zero8 / 8), for channel (d'/8) r + 2 tile + h.
template <int D, int kBits, int N, int O>
__device__ __forceinline__ void channel_values(const uint8_t* codes, const uint8_t* v_step, const uint32_t (&p)[N][2][2],
                                               const float (&g)[N], float (&o)[N][O], int lane) {
    constexpr int kStored = v_stored_channels(D, kBits), kTiles = kStored / 16, kSubs = 8 / kBits;
    static_assert(O == 2 * kTiles);
    // The halfword [zero, step byte] is 256 zero + 32 fraction8 + step, so zero8 / 8 = (halfword - step) / 256.
    float g_sum[N];  // g * sum of P / 256
#pragma unroll
    for (int n = 0; n < N; ++n) {
        constexpr uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
        int c[4] = {};
        mma_u8_u8(c, kOnes, p[n][0][0], p[n][0][1]);
        mma_u8_u8(c, kOnes, p[n][1][0], p[n][1][1]);
        g_sum[n] = g[n] * 0x1p-8f * float(256 * c[0] + c[1]);
    }
    const uint8_t* steps = v_step + kStored / 8 * (lane / 4);
#pragma unroll
    for (int group = 0; group < kTiles / kSubs; ++group) {
        const uint4 w[2] = {load_codes(codes, 2 * group, lane), load_codes(codes, 2 * group + 1, lane)};
        int sum[kSubs][N][2];  // times 2^(kBits sub)
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
            uint32_t a[2][4];
            unpack<kBits>(w[0], sub, a[0]);
            unpack<kBits>(w[1], sub, a[1]);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                int c[4] = {};
                mma_u8_u8(c, a[0], p[n][0][0], p[n][0][1]);
                mma_u8_u8(c, a[1], p[n][1][0], p[n][1][1]);
#pragma unroll
                for (int h = 0; h < 2; ++h) sum[sub][n][h] = 256 * c[2 * h] + c[2 * h + 1];
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
#pragma unroll
                for (int sub = 0; sub < kSubs - 1; ++sub) sum[kSubs - 1][n][h] -= sum[sub][n][h];
            }
        }
#pragma unroll
        for (int sub = 0; sub < kSubs; sub += 2) {  // metadata of 4 channels at once
            const int tile = group * kSubs + sub;
            const uint32_t step = *reinterpret_cast<const uint32_t*>(steps + 2 * tile);
            const uint32_t zero = *reinterpret_cast<const uint32_t*>(steps + D + 2 * tile);
            uint32_t step_word = step_bits<kBits>(step);
            asm("" : "+r"(step_word));  // its bytes are not masked once more
            const float of_step[4] = {float_of_u8<0>(step_word), float_of_u8<1>(step_word), float_of_u8<2>(step_word),
                                      float_of_u8<3>(step_word)};
            const float of_zero[4] = {float_of_s16<0>(step, zero), float_of_s16<1>(step, zero), float_of_s16<2>(step, zero),
                                      float_of_s16<3>(step, zero)};
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float g_sub = g[n] * (1.0f / float(1 << kBits * (sub + c / 2)));
                    float& out = o[n][2 * tile + c];
                    const float x = fmaf(float(sum[sub + c / 2][n][c % 2]), g_sub, -g_sum[n]);
                    out = fmaf(x, of_step[c], out);
                    out = fmaf(g_sum[n], of_zero[c], out);
                }
            }
        }
    }
}

// o[n][2 tile + h] += g[n] * sum over tokens of P v.
template <int D, int N, int O>
__device__ __forceinline__ void token_values(const uint8_t* codes, const uint32_t (&p)[N][2][2], const float (&g)[N],
                                             float (&o)[N][O], int lane) {
    static_assert(O == D / 8);
#pragma unroll
    for (int tile = 0; tile < D / 16; ++tile) {
        uint32_t a[2][4];
        unpack<8>(load_codes(codes, 2 * tile, lane), 0, a[0]);
        unpack<8>(load_codes(codes, 2 * tile + 1, lane), 0, a[1]);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            int c[4] = {};
            mma_s8_u8(c, a[0], p[n][0][0], p[n][0][1]);
            mma_s8_u8(c, a[1], p[n][1][0], p[n][1][1]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                o[n][2 * tile + h] = fmaf(float(256 * c[2 * h] + c[2 * h + 1]), g[n], o[n][2 * tile + h]);
            }
        }
    }
}

}  // namespace ta::cuda
