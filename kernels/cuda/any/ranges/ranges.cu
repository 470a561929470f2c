#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/ranges/ranges.h"
#include "kernels/cuda/common/launch.cuh"

namespace ta::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kWords = kMaxHeadDim / 4 / 32;  // of 4 channels, a lane's
constexpr uint32_t kWholeWarp = 0xffffffffu;

// A warp for each query.
__global__ void __launch_bounds__(32 * kWarps) cut_ranges(const __grid_constant__ CutRangesArgs a) {
    const int32_t n = int32_t(blockIdx.x) * kWarps + int32_t(threadIdx.x) / 32, lane = int32_t(threadIdx.x) % 32;
    if (n >= a.queries) return;
    const RangeQuery q = a.query[n];
    const RangeCut cut(q.position, a.window);
    const int32_t ranges = cut.ranges(), range = cut.first / kRangePages;
    const auto write = [&](int32_t k, int32_t keys, int32_t entry, int32_t first_key, int32_t pages) {
        const int32_t part = q.first_part + k;
        a.sequences[part] = {keys, 1, q.row, entry};
        a.first_position[part] = q.position - first_key;
        a.pages_before[part + 1] = q.pages_before + pages;
    };
    if (n == 0 && lane == 0) a.pages_before[0] = 0;
    for (int32_t k = lane; k < ranges; k += 32) {
        const int32_t begin = max((range + k) * kRangePages, cut.first), end = min((range + k + 1) * kRangePages, cut.own);
        write(k, (end - begin) * kPageTokens, q.first_entry + begin, begin * kPageTokens, end - cut.first);
    }
    if (lane == 0 && cut.own >= 0) write(ranges, q.position % kPageTokens + 1, q.own_entry, cut.own * kPageTokens, cut.pages());
}

// There is a CTA for each query and head. Each warp sums a quarter of the parts, one after the other, and the quarters are
// added in their order: sums depend on the query's parts alone.
__global__ void __launch_bounds__(32 * kWarps) merge_ranges(const __grid_constant__ MergeRangesArgs a) {
    __shared__ float4 quarter_o[kWarps][32 * kWords];
    __shared__ float quarter_l[kWarps];
    const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32, words = a.head_dim / 4;
    const int head = int(blockIdx.x % unsigned(a.heads));
    const RangeQuery q = a.query[blockIdx.x / unsigned(a.heads)];
    const int32_t parts = RangeCut(q.position, a.window).parts(), share = (parts + kWarps - 1) / kWarps;
    const PartSum* const sums = a.sums + head;
    float top = kLowest;
    for (int32_t p = lane; p < parts; p += 32) top = fmaxf(top, sums[int64_t(q.first_part + p) * a.heads].m);
#pragma unroll
    for (int h = 1; h < 32; h *= 2) top = fmaxf(top, __shfl_xor_sync(kWholeWarp, top, h));
    float l = 0.0f;
    float4 o[kWords] = {};
    const int32_t end = q.first_part + min((warp + 1) * share, parts);
#pragma unroll 8
    for (int32_t p = q.first_part + warp * share; p < end; ++p) {
        const int64_t at = int64_t(p) * a.heads;
        const PartSum sum = sums[at];
        const float weight = ex2(sum.m - top) * sum.l;
        const auto* from = reinterpret_cast<const float4*>(a.o + (at + head) * a.head_dim);
        l += weight;
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
            if (lane + 32 * k >= words) break;
            const float4 x = from[lane + 32 * k];
            o[k].x = fmaf(weight, x.x, o[k].x);
            o[k].y = fmaf(weight, x.y, o[k].y);
            o[k].z = fmaf(weight, x.z, o[k].z);
            o[k].w = fmaf(weight, x.w, o[k].w);
        }
    }
    if (lane == 0) quarter_l[warp] = l;
#pragma unroll
    for (int k = 0; k < kWords; ++k) quarter_o[warp][lane + 32 * k] = o[k];
    __syncthreads();
    if (warp > 0) return;
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
        l += quarter_l[w];
#pragma unroll
        for (int k = 0; k < kWords; ++k) {
            const float4 x = quarter_o[w][lane + 32 * k];
            o[k] = make_float4(o[k].x + x.x, o[k].y + x.y, o[k].z + x.z, o[k].w + x.w);
        }
    }
    const RowEnd row = end_row(a.sink, top, l, head);
    auto* to = static_cast<uint8_t*>(a.out.data) +
               (int64_t(q.row) * a.out.stride_row + head * a.out.stride_head) * int64_t(dtype_bytes(a.out.dtype));
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
        if (lane + 32 * k < words) store_word(to, a.out.dtype, lane + 32 * k, scaled(o[k], row.factor));
    }
    if (a.lse && lane == 0) a.lse[int64_t(q.row) * a.heads + head] = row.lse;
}

}  // namespace

int launch_cut_ranges(const CutRangesArgs& args, CUstream_st* stream) {
    if (args.queries == 0) return cudaSuccess;
    return launch_kernel(cut_ranges, unsigned((args.queries + kWarps - 1) / kWarps), 32 * kWarps, 0, stream, args);
}

int launch_merge_ranges(const MergeRangesArgs& args, CUstream_st* stream) {
    if (args.head_dim < 4 || args.head_dim > kMaxHeadDim || args.head_dim % 4 != 0) return cudaErrorInvalidValue;
    if (args.queries == 0) return cudaSuccess;
    const int64_t ctas = int64_t(args.queries) * args.heads;
    if (ctas > INT32_MAX) return cudaErrorInvalidValue;
    return launch_kernel(merge_ranges, unsigned(ctas), 32 * kWarps, 0, stream, args);
}

}  // namespace ta::cuda
