#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/any/merge/merge_states.h"
#include "kernels/cuda/common/launch.cuh"

namespace ta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxRows = 32;  // of a tile: one warp finds their weights
constexpr int kAtOnce = 4;    // parts whose loads are under way together
constexpr int kMaxCtas = 1 << 15;

// kWidth elements as they lie in memory, and as floats.
template <int kWidth>
struct Word;

template <>
struct Word<8> {
    uint4 low, high;  // high: of floats

    __device__ __forceinline__ void load(const uint8_t* from, DType type) {
        low = reinterpret_cast<const uint4*>(from)[0];
        if (type == DType::kF32) high = reinterpret_cast<const uint4*>(from)[1];
    }
    __device__ __forceinline__ void add_to(float (&sum)[8], float w, DType type) const {
        const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (type == DType::kF32) {
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] = fmaf(w, __uint_as_float(words[c]), sum[c]);
            return;
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const auto half = uint16_t(words[c / 2] >> 16 * (c % 2));
            const float x = type == DType::kF16 ? __half2float(__ushort_as_half(half)) : __uint_as_float(uint32_t(half) << 16);
            sum[c] = fmaf(w, x, sum[c]);
        }
    }
    static __device__ __forceinline__ void store(uint8_t* to, DType type, const float (&x)[8]) {
        if (type == DType::kF32) {
            reinterpret_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
            reinterpret_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
            return;
        }
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) words[k] = half_of(x[2 * k], type) | uint32_t(half_of(x[2 * k + 1], type)) << 16;
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    static __device__ __forceinline__ uint16_t half_of(float x, DType type) {
        return type == DType::kF16 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
    }
};

template <>
struct Word<1> {
    uint32_t bits;

    __device__ __forceinline__ void load(const uint8_t* from, DType type) {
        bits = type == DType::kF32 ? *reinterpret_cast<const uint32_t*>(from) : *reinterpret_cast<const uint16_t*>(from);
    }
    __device__ __forceinline__ void add_to(float (&sum)[1], float w, DType type) const {
        const float x = type == DType::kF16    ? __half2float(__ushort_as_half(uint16_t(bits)))
                        : type == DType::kBf16 ? __uint_as_float(bits << 16)
                                               : __uint_as_float(bits);
        sum[0] = fmaf(w, x, sum[0]);
    }
    static __device__ __forceinline__ void store(uint8_t* to, DType type, const float (&x)[1]) {
        if (type == DType::kF32) {
            *reinterpret_cast<float*>(to) = x[0];
        } else {
            *reinterpret_cast<uint16_t*>(to) = Word<8>::half_of(x[0], type);
        }
    }
};

struct RowPlace {
    int64_t token, head;
};

// The weights of a row, and its LSE. All of its LSEs are read by one thread before it writes: lse may be one of them.
__device__ __forceinline__ void weigh_row(const MergeArgs& a, const RowPlace& at, int lane,
                                          float (&weight)[kMaxMergeParts][kMaxRows]) {
    float m = -std::numeric_limits<float>::infinity(), sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < a.n; ++i) {
        const float lse = *a.parts[i].lse_at(at.token, at.head);
        weight[i][lane] = lse;
        m = larger_lse(m, lse);
    }
#pragma unroll 4
    for (int i = 0; i < a.n; ++i) {
        const float w = merge_weight(weight[i][lane], m);
        weight[i][lane] = w;
        sum += w;
    }
    const MergeEnd end = end_merge(m, sum);
    for (int i = 0; i < a.n; ++i) weight[i][lane] = __fmul_rn(weight[i][lane], end.factor);
    if (a.out.lse) *a.out.lse_at(at.token, at.head) = end.lse;
}

// A CTA takes `tile` rows at a time, a thread a word of a row: it has read it in all parts before it writes it, so out may be one
// of them.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeArgs a, int tile) {
    __shared__ float weight[kMaxMergeParts][kMaxRows];
    __shared__ RowPlace place[kMaxRows];
    const int words = a.head_dim / kWidth;
    const int64_t rows = a.tokens * a.heads;
    for (int64_t first = int64_t(blockIdx.x) * tile; first < rows; first += int64_t(gridDim.x) * tile) {
        const int n_rows = int(min(int64_t(tile), rows - first)), lane = int(threadIdx.x);
        if (lane < n_rows) {
            const uint64_t row = uint64_t(first + lane), heads = uint64_t(a.heads);
            place[lane] = {int64_t(row / heads), int64_t(row % heads)};
            weigh_row(a, place[lane], lane, weight);
        }
        __syncthreads();
        for (int k = lane; k < n_rows * words; k += kThreads) {
            const int row = k / words, word = k % words;
            const RowPlace at = place[row];
            const auto address = [&](const MergeState& s) {
                return s.row(at.token, at.head) + int64_t(word * kWidth) * int64_t(dtype_bytes(s.dtype));
            };
            float sum[kWidth] = {};
            for (int i = 0; i < a.n; i += kAtOnce) {
                Word<kWidth> x[kAtOnce];
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    if (i + j < a.n) x[j].load(address(a.parts[i + j]), a.parts[i + j].dtype);
                }
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    if (i + j >= a.n) continue;
                    const float w = weight[i + j][row];
                    if (w != 0.0f) x[j].add_to(sum, w, a.parts[i + j].dtype);
                }
            }
            Word<kWidth>::store(address(a.out), a.out.dtype, sum);
        }
        __syncthreads();  // the weights are the next tile's
    }
}

bool is_aligned(const MergeState& s) {
    const int64_t bytes = int64_t(dtype_bytes(s.dtype));
    return reinterpret_cast<uintptr_t>(s.o) % 16 == 0 && s.stride_token * bytes % 16 == 0 && s.stride_head * bytes % 16 == 0;
}

}  // namespace

int launch_merge_states(const MergeArgs& args, CUstream_st* stream) {
    static_assert(sizeof(MergeArgs) + sizeof(int) <= 4096, "arguments of a launch");
    if (args.n < 1 || args.n > kMaxMergeParts || args.head_dim < 1) return cudaErrorInvalidValue;
    if (args.tokens == 0) return cudaSuccess;
    bool aligned = args.head_dim % 8 == 0 && is_aligned(args.out);
    for (int i = 0; i < args.n; ++i) aligned = aligned && is_aligned(args.parts[i]);
    const int words = aligned ? args.head_dim / 8 : args.head_dim, tile = std::clamp(kThreads / words, 1, kMaxRows);
    const int64_t tiles = (args.tokens * args.heads + tile - 1) / tile;
    return launch_kernel(aligned ? merge_kernel<8> : merge_kernel<1>, unsigned(std::min<int64_t>(tiles, kMaxCtas)), kThreads, 0,
                         stream, args, tile);
}

}  // namespace ta::cuda
