#include <algorithm>

#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/rotary/rotary.h"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/turning.cuh"

namespace ta::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 4;  // of one turn
constexpr int kWarps = kThreads / 32;
constexpr int kWords = kMaxHeadDim / 4 / 32;  // of 4 channels, a lane's
constexpr int64_t kMostCtas = 1 << 20;

// A pair of the largest magnitudes turns into a larger one.
__device__ __forceinline__ float within_range(float x) {
    return fminf(fmaxf(x, -kMaxMagnitude), kMaxMagnitude);
}

// A thread takes a pair, or a channel that is not turned, of up to kHeads heads of a row.
__global__ void __launch_bounds__(kThreads) turn_queries(const __grid_constant__ TurnQueriesArgs a) {
    const int pairs = a.channels / 2, units = a.head_dim - pairs;
    const int64_t groups = (a.heads + kHeads - 1) / kHeads, n = (int64_t{a.rows} + a.turned) * groups * units;
    const int64_t bytes = int64_t(dtype_bytes(a.q.dtype)), head_bytes = a.q.stride_head * bytes;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kThreads) {
        const int64_t to_row = i / units / groups;
        const int unit = int(i % units), head = int(i / units % groups) * kHeads, heads = min(kHeads, a.heads - head);
        const TurnedRow row = to_row < a.rows ? TurnedRow{int32_t(to_row), 0} : a.row[to_row - a.rows];
        const auto* const from = static_cast<const uint8_t*>(a.q.data) + row.from * a.q.stride_row * bytes + head * head_bytes;
        float* const to = a.to + (to_row * a.heads + head) * a.head_dim;
        const auto [cx, cy] = unit < pairs ? rotary_pair(a.pairs, unit, a.channels) : ChannelPair{unit + pairs, unit + pairs};
        float x[kHeads], y[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            const void* const q = h < heads ? from + h * head_bytes : nullptr;
            x[h] = query_value(a.q, q, cx, 1.0f, a.saturate);
            y[h] = query_value(a.q, q, cy, 1.0f, a.saturate);
        }
        float sine = 0.0f, cosine = 1.0f;
        if (row.back > 0 && unit < pairs) {
            const double turns = -a.turns[unit] * double(row.back);
            double s, c;
            sincospi(2.0 * (turns - rint(turns)), &s, &c);
            sine = float(s), cosine = float(c);
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
            if (h >= heads) break;
            if (unit < pairs) to[h * a.head_dim + cy] = within_range(x[h] * sine + y[h] * cosine);
            to[h * a.head_dim + cx] = unit < pairs ? within_range(x[h] * cosine - y[h] * sine) : x[h];
        }
    }
}

// A warp for each row and head.
__global__ void __launch_bounds__(kThreads) join_rows(const __grid_constant__ JoinRowsArgs a) {
    const int lane = int(threadIdx.x) % 32, words = a.head_dim / 4;
    const int64_t n = int64_t{a.rows} * a.heads;
    for (int64_t k = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; k < n; k += int64_t(gridDim.x) * kWarps) {
        const int64_t row = k / a.heads;
        const int head = int(k % a.heads);
        const JoinedRow joined = a.joined[row];
        const auto part = [&](int i) {
            return (i == 0 ? row : joined.first + int64_t(i - 1) * joined.stride) * a.heads + head;
        };
        float top = -kInfinity, l = 0.0f;
        for (int i = 0; i <= joined.count; ++i) top = fmaxf(top, a.lse[part(i)]);
        float4 o[kWords] = {};
        for (int i = 0; i <= joined.count && top > -kInfinity; ++i) {
            const float weight = ex2((a.lse[part(i)] - top) * kLog2e);
            const auto* const from = reinterpret_cast<const float4*>(a.o + part(i) * a.head_dim);
            l += weight;
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                if (lane + 32 * w >= words) break;
                const float4 x = from[lane + 32 * w];
                o[w].x = fmaf(weight, x.x, o[w].x);
                o[w].y = fmaf(weight, x.y, o[w].y);
                o[w].z = fmaf(weight, x.z, o[w].z);
                o[w].w = fmaf(weight, x.w, o[w].w);
            }
        }
        const RowEnd end = end_row(a.sink, fmaxf(top * kLog2e, kLowest), l, head);
        auto* const to = static_cast<uint8_t*>(a.out.data) +
                         (row * a.out.stride_row + head * a.out.stride_head) * int64_t(dtype_bytes(a.out.dtype));
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            if (lane + 32 * w < words) store_word(to, a.out.dtype, lane + 32 * w, scaled(o[w], end.factor));
        }
        if (a.out_lse && lane == 0) a.out_lse[k] = end.lse;
    }
}

}  // namespace

int launch_turn_queries(const TurnQueriesArgs& args, CUstream_st* stream) {
    if (args.channels > args.head_dim || args.head_dim > kMaxHeadDim) return cudaErrorInvalidValue;
    const int64_t groups = (args.heads + kHeads - 1) / kHeads, units = args.head_dim - args.channels / 2;
    const int64_t ctas = ((int64_t{args.rows} + args.turned) * groups * units + kThreads - 1) / kThreads;
    if (ctas == 0) return cudaSuccess;
    return launch_kernel(turn_queries, unsigned(std::min(ctas, kMostCtas)), kThreads, 0, stream, args);
}

int launch_join_rows(const JoinRowsArgs& args, CUstream_st* stream) {
    if (args.head_dim % 4 != 0 || args.head_dim > kMaxHeadDim) return cudaErrorInvalidValue;
    const int64_t ctas = (int64_t{args.rows} * args.heads + kWarps - 1) / kWarps;
    if (ctas == 0) return cudaSuccess;
    return launch_kernel(join_rows, unsigned(std::min(ctas, kMostCtas)), kThreads, 0, stream, args);
}

}  // namespace ta::cuda
