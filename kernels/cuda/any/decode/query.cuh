// Queries rotated and quantized to stage 1, in the arithmetic of kernels/format/{rotation,codec}.h to the bit. The warps of a
// CTA share the rows of its segments, while the first pages are on their way.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/any/decode/loader.cuh"
#include "kernels/cuda/common/division.cuh"
#include "kernels/format/codec.h"
#include "kernels/format/query_rest.h"
#include "kernels/format/rotation.h"

namespace ta::cuda {

// One warp's shared memory but for its ring. `kRows` is a multiple of 4.
template <int D, int kRows>
struct WarpMemory {
    // High and low digits of q * step, rows 2 r and 2 r + 1 for query row r. The P of a tile of 4 rows replaces its digits, on
    // its way from the layout of scores to that of an operand.
    uint8_t digits[2 * kRows][D];
    // Stage-1 codes, scales and K offset terms of the segment at hand and, where there is room, of the warp's second one:
    // reading them from global memory would wait behind all pages that have been asked for.
    static constexpr int kQueries = kRows * D <= 1024 && (kRows > 4 || D < 128) ? 2 : 1;
    struct Queries {
        uint8_t code[kRows][D];
        uint8_t rest[kRows][D];  // what the codes leave, in 128ths; rows are swizzled as the next ones of `code`
        float scale[kRows], bias[kRows];
    };
    Queries queries[kQueries];
    uint64_t barriers[kDecodeMaxInFlight];

    __device__ __forceinline__ uint4* p(int tile) { return reinterpret_cast<uint4*>(digits[8 * tile]); }
    static_assert(8 * D >= 32 * sizeof(uint4));
};

template <int D, int kTiles>
inline constexpr int kWarpMemoryBytes =
    (int(sizeof(WarpMemory<D, 4 * kTiles>)) + kPieceAlignment - 1) / kPieceAlignment* kPieceAlignment;

// Place of a word of 4 channels in a row of bytes. Fragments are read 16 bytes at a time by lanes of two rows and four quarters
// of the channels (at 96: 8 bytes, four rows); the order keeps them, and writes of whole rows, free of bank conflicts.
template <int D>
__device__ __forceinline__ int swizzled_word(int row, int word) {
    if constexpr (D == 128) return word * 4 ^ (row & 1) * 16;
    if constexpr (D == 256) return word * 4 ^ (word >> 5 & 1) * 16 ^ (row & 1) * 32;
    return word * 4;
}

// Lane (r, i)'s share of a row, as B fragments: channels (D/4) i + 8 k .. + 7 for step k.
template <int D>
__device__ __forceinline__ void load_fragments(const uint8_t* row_data, int row, int i, uint32_t (&b)[D / 32][2]) {
    if constexpr (D == 96) {
#pragma unroll
        for (int k = 0; k < D / 32; ++k) {
            const uint2 x = *reinterpret_cast<const uint2*>(row_data + i * (D / 4) + 8 * k);
            b[k][0] = x.x;
            b[k][1] = x.y;
        }
    } else {
#pragma unroll
        for (int k = 0; k < D / 32; k += 2) {
            const uint4 x = *reinterpret_cast<const uint4*>(row_data + swizzled_word<D>(row, i * (D / 16) + 2 * k));
            b[k][0] = x.x;
            b[k][1] = x.y;
            b[k + 1][0] = x.z;
            b[k + 1][1] = x.w;
        }
    }
}

// Channels 4 word .. + 3 of a row, as they lie in memory: in two words, or in four if they are float.
__device__ __forceinline__ void load_word(const void* row, DType type, int word, uint32_t (&bits)[4]) {
    const int bytes = type == DType::kF32 ? 16 : 8;
    const void* at = static_cast<const uint8_t*>(row) + word * bytes;
    const bool aligned = reinterpret_cast<uintptr_t>(row) % bytes == 0;
    if (type == DType::kF32) {
        if (aligned) {
            const uint4 v = *static_cast<const uint4*>(at);
            bits[0] = v.x, bits[1] = v.y, bits[2] = v.z, bits[3] = v.w;
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c) bits[c] = static_cast<const uint32_t*>(at)[c];
        }
    } else if (aligned) {
        const uint2 v = *static_cast<const uint2*>(at);
        bits[0] = v.x, bits[1] = v.y;
    } else {
        const auto* h = static_cast<const uint16_t*>(at);
        bits[0] = h[0] | uint32_t(h[1]) << 16;
        bits[1] = h[2] | uint32_t(h[3]) << 16;
    }
}
__device__ __forceinline__ void to_floats(const uint32_t (&bits)[4], DType type, float (&x)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const auto half = uint16_t(bits[c / 2] >> c % 2 * 16);
        x[c] = type == DType::kF32   ? __uint_as_float(bits[c])
               : type == DType::kF16 ? __half2float(__ushort_as_half(half))
                                     : __uint_as_float(uint32_t(half) << 16);
    }
}

constexpr float kInfinity = __builtin_huge_valf();

__device__ __forceinline__ float finite_or(float x, DType type, bool saturate) {
    if (!saturate || x != x) return 0.0f;
    return copysignf(type == DType::kF16 ? 65504.0f : kMaxMagnitude, x);
}

// Butterflies of distance 1, 2, 4, ..: within a lane's words, then across lanes, then between its words.
template <int D, int W>
__device__ __forceinline__ void rotate_row(float (&x)[W][4], const uint32_t (&signs)[W][4], int lane) {
    constexpr int kLanes = D / 4 < 32 ? D / 4 : 32;
    const auto butterfly = [](float& a, float& b) {
        const float sum = __fadd_rn(a, b), difference = __fsub_rn(a, b);
        a = sum;
        b = difference;
    };
#pragma unroll
    for (int j = 0; j < W; ++j) {
        float(&v)[4] = x[j];
#pragma unroll
        for (int c = 0; c < 4; ++c) v[c] = int32_t(signs[j][c]) < 0 ? -v[c] : v[c];
        butterfly(v[0], v[1]);
        butterfly(v[2], v[3]);
        butterfly(v[0], v[2]);
        butterfly(v[1], v[3]);
    }
#pragma unroll 1  // few instructions to fetch: each of these is run only once or twice
    for (int h = 1; h < kLanes; h *= 2) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
#pragma unroll
            for (float& v : x[j]) {
                const float other = __shfl_xor_sync(kAllLanes, v, h);
                v = lane & h ? __fsub_rn(other, v) : __fadd_rn(v, other);
            }
        }
    }
    if constexpr (W == 2) {
#pragma unroll
        for (int c = 0; c < 4; ++c) butterfly(x[0][c], x[1][c]);
    }
#pragma unroll
    for (int j = 0; j < W; ++j) {
#pragma unroll
        for (float& v : x[j]) v = __fmul_rn(v, rotation_norm(D));
    }
}

// stage1_code of codec.h for a row. A scale is 0 or above 2^-62 (see up), so divide() may be used.
struct RowQuantizer {
    float stage1;  // the row's scale
    float scale, up, inverse, limit;
    __device__ __forceinline__ RowQuantizer(float amax, int levels) : limit(float(levels)) {
        stage1 = amax < kMinAmax ? 0.0f : divide(amax, limit, inverse_of(limit));
        up = amax < 0x1p-54f ? 0x1p64f : 1.0f;  // exact
        scale = __fmul_rn(stage1, up);
        inverse = scale > 0.0f ? inverse_of(scale) : 0.0f;
    }
    // And what it leaves: stage1_rest.
    __device__ __forceinline__ int code(float x, bool wide, int& rest) const {
        const float quotient = divide(__fmul_rn(x, up), scale, inverse), wide_limit = float(kRestUnits) * limit;
        const int code = __float2int_rn(fminf(fmaxf(rintf(quotient), -limit), limit));
        const float units = fminf(fmaxf(rintf(quotient * float(kRestUnits)), -wide_limit), wide_limit);
        rest = wide ? __float2int_rn(units) - kRestUnits * code : 0;
        return code;
    }
};

// Query token and query head of a row of a kv head.
struct RowPlace {
    int token, q_head;
    __device__ __forceinline__ RowPlace(const DecodeParams& p, int head, int row)
        : token(row * p.group_inverse >> 16), q_head(head * p.a.group + row - token * p.a.group) {}
};

// Row `row` of a (sequence, kv head) in q; nullptr if it does not exist.
__device__ __forceinline__ const void* query_row(const DecodeParams& p, const SequenceArgs& s, int head, int row) {
    const AttendArgs& a = p.a;
    if (row >= s.n_query * a.group) return nullptr;
    const auto [token, q_head] = RowPlace(p, head, row);
    const int64_t at = (s.row + token) * a.q.stride_row + q_head * a.q.stride_head;
    return static_cast<const uint8_t*>(a.q.data) + at * int64_t(dtype_bytes(a.q.dtype));
}

// A lane's part of a row: channels 4 lane .. + 3 (and + 128). At 64 the upper lanes do the same once more.
template <int D>
struct RowPart {
    static constexpr int W = D > 128 ? 2 : 1;
    static constexpr int kLanes = D / 4 < 32 ? D / 4 : 32;  // that hold a word
    uint32_t bits[W][4];  // nothing is made of them before they are needed, so that other loads follow at once

    __device__ __forceinline__ void load(const void* row, DType type, int lane) {
        const int word_lane = D == 64 ? lane % kLanes : lane;
#pragma unroll
        for (int j = 0; j < W; ++j) {
#pragma unroll
            for (int c = 0; c < 4; ++c) bits[j][c] = 0;
            if (row && word_lane < kLanes) load_word(row, type, word_lane + 32 * j, bits[j]);
        }
    }
    __device__ __forceinline__ void floats(DType type, float (&x)[W][4]) const {
#pragma unroll
        for (int j = 0; j < W; ++j) to_floats(bits[j], type, x[j]);
    }
};

// Brings the rows of the CTA's segments of the first sequence into L2, warp w byte range w of each. Later, when pages have been
// asked for, each access waits in their queue.
template <int D, int kRows>
__device__ __forceinline__ void prefetch_queries(const DecodeParams& p, const DecodeCursor& at, int32_t units, int warp,
                                                 int lane) {
    const int head = at.head + lane / kRows, first_unit = lane / kRows * at.pages - at.page;
    if (first_unit >= units || head >= p.a.kv_heads || warp * 128 >= D * int(dtype_bytes(p.a.q.dtype))) return;
    const void* row = query_row(p, at.s, head, lane % kRows);
    if (row) prefetch_l2(static_cast<const uint8_t*>(row) + warp * 128);
}

// A query row at stage 1. A lane has the codes of the same channels.
template <int D>
struct QueryRow {
    static constexpr int W = RowPart<D>::W;
    uint32_t codes[W], rests[W];
    float scale, bias;
};

// By one warp. `signs` are looked at where p.a.signs is not nullptr. `nonfinite`, if not nullptr, counts the values that are
// replaced.
template <int D>
__device__ __forceinline__ QueryRow<D> prepare_query(const DecodeParams& p, const RowPart<D>& part, const RowPart<D>& signs,
                                                     int head, uint32_t* nonfinite, int lane) {
    constexpr int W = RowPart<D>::W, kLanes = RowPart<D>::kLanes;
    float x[W][4];
    part.floats(p.a.q.dtype, x);
    float amax = 0.0f;
    const auto largest = [&] {
        amax = 0.0f;
#pragma unroll
        for (int j = 0; j < W; ++j) {
#pragma unroll
            for (const float v : x[j]) amax = v == v ? fmaxf(amax, fabsf(v)) : kInfinity;
        }
        // Not negative, so that the order of floats is that of their bits.
        amax = __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(amax)));
    };
    largest();
    if (!(amax <= kMaxMagnitude)) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
#pragma unroll
            for (float& v : x[j]) {
                if (fabsf(v) <= kMaxMagnitude) continue;
                v = finite_or(v, p.a.q.dtype, p.a.saturate);
                if (nonfinite && lane < kLanes) atomicAdd(nonfinite, 1u);
            }
        }
        largest();
    }
    QueryRow<D> result;
    result.bias = 0.0f;
    if (p.a.k_offset) {
        double dot = 0.0;
        if (lane < kLanes) {
#pragma unroll
            for (int j = 0; j < W; ++j) {
                uint32_t mu[4];
                load_word(p.a.k_offset + int64_t(head) * D, DType::kF32, lane + 32 * j, mu);
#pragma unroll
                for (int c = 0; c < 4; ++c) dot += double(x[j][c]) * double(__uint_as_float(mu[c]));
            }
        }
#pragma unroll
        for (int h = 16; h >= 1; h /= 2) dot += __shfl_xor_sync(kAllLanes, dot, h);
        result.bias = float(dot * double(p.unit));
    }
    if constexpr (can_rotate(D)) {
        if (p.a.signs) {
            rotate_row<D>(x, signs.bits, lane);
            largest();
        }
    }
    const RowQuantizer quantizer(amax, p.a.q_levels);
    const auto bytes_of = [](const int(&x)[4]) {
        return __byte_perm(__byte_perm(x[0], x[1], 0x40), __byte_perm(x[2], x[3], 0x40), 0x5410);
    };
#pragma unroll
    for (int j = 0; j < W; ++j) {
        int code[4], rest[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) code[c] = quantizer.code(x[j][c], p.q_rest, rest[c]);
        result.codes[j] = bytes_of(code);
        result.rests[j] = bytes_of(rest);
    }
    result.scale = quantizer.stage1 * p.unit;
    return result;
}

template <int D, class Queries>
__device__ __forceinline__ void store_query(const QueryRow<D>& q, int row, Queries& to, int lane) {
#pragma unroll
    for (int j = 0; j < QueryRow<D>::W; ++j) {
        const int word = lane + 32 * j;
        if (word >= D / 4) continue;
        *reinterpret_cast<uint32_t*>(to.code[row] + swizzled_word<D>(row, word)) = q.codes[j];
        *reinterpret_cast<uint32_t*>(to.rest[row] + swizzled_word<D>(row + 1, word)) = q.rests[j];
    }
    if (lane == 0) {
        to.scale[row] = q.scale;
        to.bias[row] = q.bias;
    }
}

// The slot in p.query_codes of a segment of a CTA; there and from there to a warp's memory.
__device__ __forceinline__ int64_t query_slot(const DecodeParams& p, int cta, const DecodeCursor& at) {
    return cta + int64_t(at.seq) * p.a.kv_heads + at.head;
}
template <int D>
__device__ __forceinline__ void store_query(const DecodeParams& p, const QueryRow<D>& q, int64_t slot, int row, int lane) {
    const int64_t at = slot * p.row_capacity + row;
#pragma unroll
    for (int j = 0; j < QueryRow<D>::W; ++j) {
        const int word = lane + 32 * j;
        if (word >= D / 4) continue;
        p.query_codes[2 * at * (D / 4) + word] = q.codes[j];
        p.query_codes[(2 * at + 1) * (D / 4) + word] = q.rests[j];
    }
    if (lane == 0) {
        p.query_scale[at] = q.scale;
        p.query_bias[at] = q.bias;
    }
}
template <int D, int kRows, class Queries>
__device__ __forceinline__ void load_queries(const DecodeParams& p, int64_t slot, Queries& to, int lane) {
    const uint32_t* codes = p.query_codes + slot * kRows * 2 * (D / 4);
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int word = lane; word < D / 4; word += 32) {
            const uint32_t* from = codes + row * 2 * (D / 4) + word;
            *reinterpret_cast<uint32_t*>(to.code[row] + swizzled_word<D>(row, word)) = from[0];
            *reinterpret_cast<uint32_t*>(to.rest[row] + swizzled_word<D>(row + 1, word)) = from[D / 4];
        }
    }
    if (lane < kRows) {
        to.scale[lane] = p.query_scale[slot * kRows + lane];
        to.bias[lane] = p.query_bias[slot * kRows + lane];
    }
}

}  // namespace ta::cuda
