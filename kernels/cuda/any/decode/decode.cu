#include <algorithm>
#include <utility>

#include "kernels/cuda/any/decode/decode.h"
#include "kernels/cuda/any/decode/launch.h"
#include "kernels/cuda/any/decode/loader.cuh"
#include "kernels/cuda/common/generation.h"

namespace ta::cuda {
namespace {

constexpr size_t kWorkspaceAlignment = 256;
// From this number of pages of a warp on, an even cut gains more than a cut at the ends of segments: measured on an H200.
constexpr int kLongRange = 16;

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

bool kernels_of(int head_dim, DecodeKernels* kernels) {
    switch (head_dim) {
        case 64:
            *kernels = decode_kernels_d64();
            return true;
        case 96:
            *kernels = decode_kernels_d96();
            return true;
        case 128:
            *kernels = decode_kernels_d128();
            return true;
        case 256:
            *kernels = decode_kernels_d256();
            return true;
    }
    return false;
}

// The largest number of workers, not below `least`, such that no worker has a part of one segment and a part of another: each
// has some whole segments, or several share one segment. All workers if there is no such number. The segments are equal.
int aligned_workers(int all, int least, int64_t segments) {
    for (int n = all; n >= least; --n) {
        if (segments % n == 0 || n % segments == 0) return n;
    }
    return all;
}

int tiles_index(int tiles) {
    return tiles == 4 ? 2 : tiles - 1;
}

// Offsets in the workspace.
struct Workspace {
    size_t arrivals, zeroed_bytes, warp_partials, cta_partials, query_codes, query_scale, query_bias, windowed_pages, bytes = 0;

    Workspace(const DecodePlan& plan, int head_dim, int kv_heads, int batch) {
        const auto take = [this](size_t n) {
            const size_t at = bytes;
            bytes += round_up(n, kWorkspaceAlignment);
            return at;
        };
        const size_t ctas = size_t(plan.ctas), partial = size_t(decode_partial_bytes(head_dim, plan.tiles));
        const size_t query_rows = (ctas + size_t(batch) * kv_heads) * 4 * size_t(plan.tiles);
        // First and the same in all plans.
        arrivals = take(size_t(plan.multiprocessors) * decode_parts(kMaxHeadDim, kDecodeRows / 4) * sizeof(uint32_t));
        zeroed_bytes = bytes;
        warp_partials = take(ctas * plan.warps * partial);
        cta_partials = take(ctas * 2 * partial);
        query_codes = take(2 * query_rows * head_dim);
        query_scale = take(query_rows * sizeof(float));
        query_bias = take(query_rows * sizeof(float));
        windowed_pages = take((size_t(batch) + 1) * sizeof(int32_t));
    }
};

// pages_before for the pages within the window, by one warp.
__global__ void __launch_bounds__(32) count_window_pages(const __grid_constant__ AttendArgs a, int32_t* pages_before) {
    grid_dependency_wait();  // the plan's calls before may read what is written here
    grid_launch_dependents();
    const int lane = int(threadIdx.x);
    int32_t sum = 0;
    if (lane == 0) pages_before[0] = 0;
    for (int first = 0; first < a.batch; first += 32) {
        const int seq = first + lane;
        int32_t upto = 0;
        if (seq < a.batch) {
            const SequenceArgs s = a.sequences[seq];
            const BlockWalk walk = walk_of<true>(a, seq);
            if (s.n_query > 0) upto = walk.pages((s.n_keys + kPageTokens - 1) / kPageTokens) - first_page(a, s, walk);
        }
#pragma unroll
        for (int h = 1; h < 32; h *= 2) {
            const int32_t other = __shfl_up_sync(kAllLanes, upto, h);
            if (lane >= h) upto += other;
        }
        if (seq < a.batch) pages_before[seq + 1] = sum + upto;
        sum += __shfl_sync(kAllLanes, upto, 31);
    }
}

// `overlap`: the grid may start before those before it are complete.
template <class... Args>
cudaError_t launch(bool overlap, const void* kernel, dim3 grid, int threads, size_t smem, cudaStream_t stream, Args... args) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = smem;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap ? 1 : 0;
    void* pointers[] = {&args...};
    return cudaLaunchKernelExC(&config, kernel, pointers);
}

}  // namespace

cudaError_t plan_decode(int device, const DecodeShape& shape, DecodePlan* plan) {
    DecodeKernels kernels{};
    if (!kernels_of(shape.head_dim, &kernels) || shape.max_rows < 1 || shape.max_rows > kDecodeRows || shape.batch < 1 ||
        shape.kv_heads < 1 || shape.group < 1 || shape.warps < 0) {
        return cudaErrorInvalidValue;
    }
    int sms = 0, smem = 0, generation = 0;
    for (const auto& [value, attribute] :
         {std::pair(&sms, cudaDevAttrMultiProcessorCount), std::pair(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin)}) {
        if (const cudaError_t e = cudaDeviceGetAttribute(value, attribute, device); e != cudaSuccess) return e;
    }
    if (const cudaError_t e = kernel_generation(&generation); e != cudaSuccess) return e;

    DecodePlan p{};
    p.multiprocessors = sms;
    p.overlap = generation >= 9;
    p.q_rest = shape.q_rest;
    p.tiles = shape.max_rows <= 4 ? 1 : shape.max_rows <= 8 ? 2 : 4;
    // Equal lengths are common, and a (sequence, head) that is a CTA's alone needs no join of CTAs. Memory is saturated without
    // the CTAs that are left out.
    const int64_t segments = int64_t(shape.batch) * shape.kv_heads;
    p.ctas = aligned_workers(sms, sms - sms / 16, segments);
    const int warp_bytes = kernels.warp_bytes[tiles_index(p.tiles)], token_bytes = int(TokenLayout(shape.head_dim).bytes());
    const auto ring_of = [&](int warps) { return (smem / warps - warp_bytes) / kPieceAlignment * kPieceAlignment; };
    // More warps hide more latency than more pieces in flight of each do, measured at 8 to 12 warps.
    p.warps = decode_max_warps(shape.head_dim, p.tiles);
    if (shape.warps > 0) p.warps = std::min(p.warps, shape.warps);
    while (p.warps > 1 && ring_of(p.warps) < token_bytes) --p.warps;
    p.ring_bytes = ring_of(p.warps);
    if (p.ring_bytes < token_bytes) return cudaErrorInvalidValue;
    p.smem_bytes = p.warps * (warp_bytes + p.ring_bytes);
    // If warps have few pages each, a number of warps that shares a CTA's segments evenly is faster than all warps.
    p.warps_if_short = segments % p.ctas == 0 ? aligned_workers(p.warps, p.warps - p.warps / 4, segments / p.ctas) : p.warps;
    p.long_pages = int(kLongRange * p.ctas * p.warps / shape.kv_heads);
    const Workspace workspace(p, shape.head_dim, shape.kv_heads, shape.batch);
    p.workspace_bytes = workspace.bytes;
    p.zeroed_bytes = workspace.zeroed_bytes;
    for (const auto& of_kind : kernels.attend) {
        const void* kernel = of_kind[tiles_index(p.tiles)];
        const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.smem_bytes);
        if (e != cudaSuccess) return e;
    }
    *plan = p;
    return cudaSuccess;
}

cudaError_t launch_decode(const DecodePlan& plan, const AttendArgs& args, void* workspace, cudaStream_t stream,
                          const DecodeMass* mass, const TreeRow* tree) {
    DecodeKernels kernels{};
    if (!kernels_of(args.head_dim, &kernels)) return cudaErrorInvalidValue;
    auto* base = static_cast<uint8_t*>(workspace);
    const Workspace w(plan, args.head_dim, args.kv_heads, args.batch);
    DecodeParams p{};
    p.a = args;
    const bool counts = args.window > 0 && !args.first_position;  // with that, pages_before is of the window already
    p.windowed_pages = counts ? reinterpret_cast<int32_t*>(base + w.windowed_pages) : nullptr;
    p.pages_before = counts ? p.windowed_pages : args.pages_before;
    p.query_codes = reinterpret_cast<uint32_t*>(base + w.query_codes);
    p.query_scale = reinterpret_cast<float*>(base + w.query_scale);
    p.query_bias = reinterpret_cast<float*>(base + w.query_bias);
    p.warp_partials = reinterpret_cast<float*>(base + w.warp_partials);
    p.cta_partials = reinterpret_cast<float*>(base + w.cta_partials);
    p.arrivals = reinterpret_cast<uint32_t*>(base + w.arrivals);
    p.unit = args.softcap > 0.0f ? args.scale : args.scale * 1.44269504f;
    p.levels = float(args.p_levels);
    p.inverse_levels = 1.0f / float(args.p_levels);
    p.row_capacity = 4 * plan.tiles;
    p.q_rest = plan.q_rest;
    p.group_inverse = (65536 + args.group - 1) / args.group;
    p.ring_bytes = plan.ring_bytes;
    p.ctas = DecodeWorkers(plan.ctas);
    p.warps = DecodeWorkers(plan.warps);
    p.warps_if_short = DecodeWorkers(plan.warps_if_short);
    p.long_pages = plan.long_pages;
    if (mass) p.mass = *mass;
    p.tree = tree;
    if (counts) {
        const cudaError_t e = launch(plan.overlap, reinterpret_cast<const void*>(count_window_pages), dim3(1), 32, 0, stream,
                                     args, p.windowed_pages);
        if (e != cudaSuccess) return e;
    }
    const bool general = args.softcap > 0.0f || args.alibi_slope || args.k_offset || args.exp == ExpMode::kSas ||
                         args.p_running || args.some_8_bits || tree;
    const DecodeKind kind = general                                                                             ? kGeneral
                            : mass || args.may_lack_pages || args.first_block || args.has_low || args.are_parts ? kTiered
                                                                                                                : kPlain;
    const void* attend = kernels.attend[kind][tiles_index(plan.tiles)];
    return launch(plan.overlap, attend, dim3(unsigned(plan.ctas)), 32 * plan.warps, size_t(plan.smem_bytes), stream, p);
}

}  // namespace ta::cuda
