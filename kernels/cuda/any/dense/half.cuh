// INT-FlashAttention's half INT8: scores on INT8 codes, P and V in float. A CTA takes 64 query rows of one sequence and kv
// head, a warp 16 of them, and goes through the pages of K; a page's V is brought into shared memory as TF32. Query rows lie on
// the 16 rows of mma.sync in both products. The order of the sums over tokens is free, and chosen so that the scores of a lane
// are its operand of the second product.
#pragma once

#include "kernels/cuda/any/append/codec_rows.cuh"
#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/dense/dense.h"
#include "kernels/cuda/common/scores.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/format/codec.h"

namespace ta::cuda {

inline constexpr int kHalfWarps = kHalfRows / 16;
inline constexpr int kHalfThreads = 32 * kHalfWarps;

template <int D>
struct HalfMemory {
    static constexpr int kStride = D + 4;  // lanes that read V as an operand meet all banks
    union {
        alignas(16) float v[kPageTokens][kStride];
        float out[kHalfRows][kStride];
        uint32_t q[kHalfRows][D / 4];  // stage-1 codes
    };
    float q_scale[kHalfRows];  // times the unit of scores
};
static_assert(kHalfRows == kPageTokens);

// c += a b with a [16, 8] and b [8, 8] of TF32, c [16, 8]. With lane = 4 r + i: a[0], a[2] are row r, columns i and i + 4, a[1]
// and a[3] row r + 8; b0, b1 are column r, rows i and i + 4; c[0], c[1] are row r, columns 2i and 2i + 1, c[2], c[3] row r + 8.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t to_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// The query rows of a CTA and the keys that they see.
struct HalfBlock {
    const AttendArgs& a;
    HalfTile tile;
    SequenceArgs s;
    int head, last_row;

    __device__ __forceinline__ explicit HalfBlock(const DenseHalfArgs& args)
        : a(args.attend),
          tile(args.tiles[blockIdx.x]),
          s(a.sequences[tile.sequence]),
          head(int(blockIdx.y)),
          last_row(min(tile.first_row + kHalfRows, s.n_query * a.group) - 1) {}

    __device__ __forceinline__ int position_of(int row) const { return s.n_keys - s.n_query + row / a.group; }
    __device__ __forceinline__ KeyRange keys_of(int row) const {
        return visible_keys(a.causal, a.window, s.n_keys, position_of(row));
    }
    __device__ __forceinline__ int64_t token_of(int row) const { return s.row + int64_t(row / a.group); }
    __device__ __forceinline__ int q_head_of(int row) const { return head * a.group + row % a.group; }
};

// Stage 1 of the CTA's query rows.
template <int D>
__device__ __forceinline__ void quantize_half_queries(const HalfBlock& block, HalfMemory<D>& memory) {
    using Rows = RowShape<D>;
    const AttendArgs& a = block.a;
    const float unit = a.softcap > 0.0f ? a.scale : a.scale * kLog2e;  // of scores
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % Rows::kLanes;
    const bool active = 8 * lane < D;
#pragma unroll 1
    for (int n = int(threadIdx.x) % 32 / Rows::kLanes; n < 16; n += Rows::kWarpRows) {
        const int in_tile = 16 * warp + n, row = block.tile.first_row + in_tile;
        const bool exists = row <= block.last_row;
        float x[1][8], amax[1];
        const HeadRows of{a.q, block.token_of(row), 0, block.q_head_of(row), exists && active};
        const int replaced = read_rows<1>(of, lane, a.saturate, x, amax);
        if (replaced && a.nonfinite) atomicAdd(a.nonfinite + block.tile.sequence, uint32_t(replaced));
        amax[0] = row_amax<D>(amax[0]);
        const float scale = amax[0] < kMinAmax ? 0.0f : __fdiv_rn(amax[0], float(a.q_levels));
        const Divider divider(scale);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[0][j] = __fmul_rn(x[0][j], divider.up);
        uint32_t code[8];
        quantize_row(x[0], divider, code);
        if (lane == 0) memory.q_scale[in_tile] = scale * unit;
        if (!active) continue;
        memory.q[in_tile][2 * lane] = low_bytes(code[0], code[1], code[2], code[3]);
        memory.q[in_tile][2 * lane + 1] = low_bytes(code[4], code[5], code[6], code[7]);
    }
}

// V's rows of one page; zeros where the page has no token.
template <int D>
__device__ __forceinline__ void load_half_values(const DenseHalfArgs& a, int64_t first_row, int tokens, int head,
                                                 HalfMemory<D>& memory) {
    using Rows = RowShape<D>;
    constexpr int kStep = kHalfWarps * Rows::kWarpRows;  // rows that the CTA takes at a time
    const int lane = int(threadIdx.x) % Rows::kLanes;
    const bool active = 8 * lane < D;
#pragma unroll 1
    for (int t = int(threadIdx.x) / Rows::kLanes; t < kPageTokens; t += 4 * kStep) {
        float x[4][8], amax[4];
        const int rows = active ? (tokens - t + kStep - 1) / kStep : 0;
        read_rows<4>({a.v, first_row + t, kStep, head, rows}, lane, a.attend.saturate, x, amax);
        if (!active) continue;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            auto* to = reinterpret_cast<uint4*>(&memory.v[t + p * kStep][8 * lane]);
            to[0] = make_uint4(to_tf32(x[p][0]), to_tf32(x[p][1]), to_tf32(x[p][2]), to_tf32(x[p][3]));
            to[1] = make_uint4(to_tf32(x[p][4]), to_tf32(x[p][5]), to_tf32(x[p][6]), to_tf32(x[p][7]));
        }
    }
}

// A warp's 16 rows. A lane has rows r = lane / 4 and r + 8, of scores columns 8 n + 2 i and + 1, i = lane % 4, and of O likewise.
template <int D>
struct HalfRows {
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, r = lane / 4, i = lane % 4;
    uint32_t q[D / 32][4];
    float q_scale[2], slope[2], m[2] = {kLowest, kLowest}, l[2] = {};
    KeyRange keys[2];
    int position[2];
    float o[D / 8][4] = {};

    __device__ __forceinline__ HalfRows(const HalfBlock& block, const HalfMemory<D>& memory) {
        const AttendArgs& a = block.a;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int in_tile = in_tile_of(h), row = block.tile.first_row + in_tile;
#pragma unroll
            for (int k = 0; k < D / 32; ++k) {
                const uint2 codes = *reinterpret_cast<const uint2*>(&memory.q[in_tile][D / 16 * i + 2 * k]);
                q[k][h] = codes.x;
                q[k][2 + h] = codes.y;
            }
            q_scale[h] = memory.q_scale[in_tile];
            position[h] = block.position_of(row);
            keys[h] = block.keys_of(row);
            slope[h] = a.alibi_slope ? a.alibi_slope[block.q_head_of(row)] * kLog2e : 0.0f;
        }
    }
    __device__ __forceinline__ int in_tile_of(int h) const {
        return 16 * warp + r + 8 * h;
    }

    // The scores of the page that has the head's `piece` of K.
    __device__ __forceinline__ void multiply_keys(const uint8_t* piece, float (&x)[8][4]) const {
        const auto* k_scale = reinterpret_cast<const float*>(piece + TokenLayout(D).k_scale());
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            int c[2][4] = {};
#pragma unroll
            for (int k = 0; k < D / 32; ++k) {
                const uint4 w = __ldg(reinterpret_cast<const uint4*>(piece) + (t * (D / 32) + k) * 32 + lane);
                mma_s8_s8(c[0], q[k], w.x, w.z);
                mma_s8_s8(c[1], q[k], w.y, w.w);
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float2 scale = __ldg(reinterpret_cast<const float2*>(k_scale + 16 * t + 8 * n + 2 * i));
#pragma unroll
                for (int e = 0; e < 4; ++e) x[2 * t + n][e] = float(c[n][e]) * (q_scale[e / 2] * (e % 2 ? scale.y : scale.x));
            }
        }
    }

    // Softcap, ALiBi and masks. The page's first key is `first_key`.
    __device__ __forceinline__ void apply_options(const AttendArgs& a, int first_key, float (&x)[8][4]) const {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int key = first_key + 8 * n + 2 * i + e % 2, h = e / 2;
                if (a.softcap > 0.0f) x[n][e] = soft_capped(x[n][e], a.softcap);
                x[n][e] = fmaf(slope[h], float(key - position[h]), x[n][e]);
                if (key < keys[h].begin || key >= keys[h].end) x[n][e] = -kInfinity;
            }
        }
    }

    // Scores become P. m, l and O are then those of a maximum over this page too.
    __device__ __forceinline__ void weigh(const AttendArgs& a, float (&x)[8][4]) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top = m[h];
#pragma unroll
            for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(x[n][2 * h], x[n][2 * h + 1]));
            top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, 2));
            const float weight = ex2(m[h] - top);
            m[h] = top;
            l[h] *= weight;
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                o[n][2 * h] *= weight;
                o[n][2 * h + 1] *= weight;
            }
#pragma unroll
            for (int n = 0; n < 8; ++n) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; ++e) {
                    x[n][e] = a.exp == ExpMode::kSas ? exp2_neg_sas(top - x[n][e]) : ex2(x[n][e] - top);
                    l[h] += x[n][e];
                }
            }
        }
    }

    // Adds P V to O.
    __device__ __forceinline__ void multiply_values(const float (&x)[8][4], const HalfMemory<D>& memory) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const uint32_t p[4] = {to_tf32(x[n][0]), to_tf32(x[n][2]), to_tf32(x[n][1]), to_tf32(x[n][3])};
            const auto* v0 = reinterpret_cast<const uint32_t*>(memory.v[8 * n + 2 * i]) + r;
            const auto* v1 = v0 + HalfMemory<D>::kStride;
#pragma unroll
            for (int c = 0; c < D / 8; ++c) mma_tf32(o[c], p, v0[8 * c], v1[8 * c]);
        }
    }

    // Leaves the rows' results in `memory`, and writes their LSE.
    __device__ __forceinline__ void finish(const HalfBlock& block, HalfMemory<D>& memory) {
        const AttendArgs& a = block.a;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int in_tile = in_tile_of(h), row = block.tile.first_row + in_tile, q_head = block.q_head_of(row);
            l[h] += __shfl_xor_sync(kWholeWarp, l[h], 1);
            l[h] += __shfl_xor_sync(kWholeWarp, l[h], 2);
            const RowEnd end = end_row(a, m[h], l[h], q_head);
#pragma unroll
            for (int c = 0; c < D / 8; ++c) {
                *reinterpret_cast<float2*>(&memory.out[in_tile][8 * c + 2 * i]) =
                    make_float2(o[c][2 * h] * end.factor, o[c][2 * h + 1] * end.factor);
            }
            if (a.lse && i == 0 && row <= block.last_row) {
                a.lse[block.token_of(row) * a.kv_heads * a.group + q_head] = end.lse;
            }
        }
    }
};

// Writes the results that the warp's lanes have left in `memory`.
template <int D>
__device__ __forceinline__ void write_half_rows(const HalfBlock& block, const HalfMemory<D>& memory) {
    const AttendArgs& a = block.a;
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
    for (int n = 0; n < 16; ++n) {
        const int in_tile = 16 * warp + n, row = block.tile.first_row + in_tile;
        if (row > block.last_row) break;
        uint8_t* to = output_row(a, block.token_of(row), block.q_head_of(row));
        for (int w = lane; w < D / 4; w += 32) {
            store_word(to, a.out.dtype, w, *reinterpret_cast<const float4*>(&memory.out[in_tile][4 * w]));
        }
    }
}

template <int D>
__global__ void __launch_bounds__(kHalfThreads) dense_half_kernel(const __grid_constant__ DenseHalfArgs args) {
    extern __shared__ __align__(16) uint8_t shared[];
    HalfMemory<D>& memory = *reinterpret_cast<HalfMemory<D>*>(shared);
    const AttendArgs& a = args.attend;
    const HalfBlock block(args);
    quantize_half_queries(block, memory);
    __syncthreads();
    // Both ends of what a row sees grow with its position.
    const int page_begin = block.keys_of(block.tile.first_row).begin / kPageTokens;
    const int key_end = block.keys_of(block.last_row).end;
    HalfRows<D> rows(block, memory);
    for (int page = page_begin; page * kPageTokens < key_end; ++page) {
        const int first_key = page * kPageTokens;
        __syncthreads();  // with the codes, or the values of the page before
        load_half_values(args, args.v_row[block.tile.sequence] + int64_t(first_key),
                         min(block.s.n_keys - first_key, kPageTokens), block.head, memory);
        __syncthreads();
        float x[8][4];
        const uint64_t entry = a.table[block.s.first_entry + page];
        rows.multiply_keys(reinterpret_cast<const uint8_t*>(entry + block.head * TokenLayout(D).bytes()), x);
        rows.apply_options(a, first_key, x);
        rows.weigh(a, x);
        rows.multiply_values(x, memory);
    }
    __syncthreads();
    rows.finish(block, memory);
    __syncwarp();
    write_half_rows(block, memory);
}

}  // namespace ta::cuda
