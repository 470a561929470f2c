#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cuda/decode.h"
#include "kernels/cuda/decode_launch.h"

namespace ta::cuda {
namespace {

constexpr size_t kWorkspaceAlignment = 256;

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

int tiles_index(int tiles) {
    return tiles == 4 ? 2 : tiles - 1;
}

// Offsets in the workspace.
struct Workspace {
    size_t partial_o, partial_ml, query_codes, query_scale, query_bias, windowed_pages, bytes = 0;

    Workspace(const DecodePlan& plan, int head_dim, int kv_heads, int batch) {
        const auto take = [this](size_t n) {
            const size_t at = bytes;
            bytes += round_up(n, kWorkspaceAlignment);
            return at;
        };
        const size_t capacity = 4 * size_t(plan.tiles), pairs = size_t(batch) * kv_heads;
        const size_t rows = pairs * capacity, partial_rows = (size_t(plan.ctas) * plan.warps + pairs) * capacity;
        partial_o = take(partial_rows * head_dim * sizeof(float));
        partial_ml = take(partial_rows * sizeof(float2));
        query_codes = take(rows * head_dim);
        query_scale = take(rows * sizeof(float));
        query_bias = take(rows * sizeof(float));
        windowed_pages = take((size_t(batch) + 1) * sizeof(int32_t));
    }
};

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
    int sms = 0, smem = 0, major = 0;
    for (const auto& [value, attribute] :
         {std::pair(&sms, cudaDevAttrMultiProcessorCount), std::pair(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin),
          std::pair(&major, cudaDevAttrComputeCapabilityMajor)}) {
        if (const cudaError_t e = cudaDeviceGetAttribute(value, attribute, device); e != cudaSuccess) return e;
    }
    if (major < 8 || (shape.path == LoadPath::kBulk && major < 9)) return cudaErrorInvalidValue;

    DecodePlan p{};
    p.bulk = shape.path == LoadPath::kAuto ? major >= 9 : shape.path == LoadPath::kBulk;
    p.overlap = major >= 9;
    p.tiles = shape.max_rows <= 4 ? 1 : shape.max_rows <= 8 ? 2 : 4;
    p.ctas = sms;
    const int warp_bytes = kernels.warp_bytes[tiles_index(p.tiles)], token_bytes = int(TokenLayout(shape.head_dim).bytes());
    const auto ring_of = [&](int warps) { return (smem / warps - warp_bytes) / kPieceAlignment * kPieceAlignment; };
    // More warps hide more latency than more pieces in flight of each do, measured at 8 to 12 warps.
    p.warps = decode_max_warps(shape.head_dim, p.tiles);
    if (shape.warps > 0) p.warps = std::min(p.warps, shape.warps);
    while (p.warps > 1 && ring_of(p.warps) < token_bytes) --p.warps;
    p.ring_bytes = ring_of(p.warps);
    if (p.ring_bytes < token_bytes) return cudaErrorInvalidValue;
    p.smem_bytes = p.warps * (warp_bytes + p.ring_bytes);
    // Partial results of a (sequence, head), on average: with more of them, more warps share a row.
    const int64_t partials = int64_t(p.ctas) * p.warps / (int64_t(shape.batch) * shape.kv_heads) + 1;
    p.merge_warps = partials > 24 ? 8 : partials > 12 ? 4 : partials > 6 ? 2 : 1;
    p.workspace_bytes = Workspace(p, shape.head_dim, shape.kv_heads, shape.batch).bytes;
    for (const auto& of_kind : kernels.attend) {
        const void* kernel = of_kind[tiles_index(p.tiles)];
        const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.smem_bytes);
        if (e != cudaSuccess) return e;
    }
    *plan = p;
    return cudaSuccess;
}

cudaError_t launch_decode(const DecodePlan& plan, const AttendArgs& args, void* workspace, cudaStream_t stream) {
    DecodeKernels kernels{};
    if (!kernels_of(args.head_dim, &kernels)) return cudaErrorInvalidValue;
    auto* base = static_cast<uint8_t*>(workspace);
    const Workspace w(plan, args.head_dim, args.kv_heads, args.batch);
    DecodeParams p{};
    p.a = args;
    p.windowed_pages = args.window > 0 ? reinterpret_cast<int32_t*>(base + w.windowed_pages) : nullptr;
    p.pages_before = args.window > 0 ? p.windowed_pages : args.pages_before;
    p.query_codes = reinterpret_cast<uint32_t*>(base + w.query_codes);
    p.query_scale = reinterpret_cast<float*>(base + w.query_scale);
    p.query_bias = reinterpret_cast<float*>(base + w.query_bias);
    p.partial_o = reinterpret_cast<float*>(base + w.partial_o);
    p.partial_ml = reinterpret_cast<float2*>(base + w.partial_ml);
    p.unit = args.softcap > 0.0f ? args.scale : args.scale * 1.44269504f;
    p.log2_levels = std::log2(float(args.p_levels));
    p.inverse_levels = 1.0f / float(args.p_levels);
    p.row_capacity = 4 * plan.tiles;
    p.warps = plan.ctas * plan.warps;
    p.ring_bytes = plan.ring_bytes;
    p.bulk = plan.bulk;
    const int pairs = args.batch * args.kv_heads;
    const int query_warps = pairs * p.row_capacity / kQueryRows;
    const unsigned query_ctas = unsigned((query_warps + kQueryWarps - 1) / kQueryWarps) + 1;
    if (const cudaError_t e = launch(plan.overlap, kernels.query, dim3(query_ctas), 32 * kQueryWarps, 0, stream, p);
        e != cudaSuccess)
        return e;
    const bool general =
        args.softcap > 0.0f || args.alibi_slope || args.k_offset || args.exp == ExpMode::kSas || args.p_running;
    const void* attend = kernels.attend[general][tiles_index(plan.tiles)];
    if (const cudaError_t e =
            launch(plan.overlap, attend, dim3(unsigned(plan.ctas)), 32 * plan.warps, size_t(plan.smem_bytes), stream, p);
        e != cudaSuccess) {
        return e;
    }
    const int rows_per_cta = kMergeWarps / plan.merge_warps;
    const dim3 grid(unsigned(pairs), unsigned((4 * plan.tiles + rows_per_cta - 1) / rows_per_cta));
    return launch(plan.overlap, kernels.merge, grid, 32 * kMergeWarps, 0, stream, p, plan.merge_warps);
}

}  // namespace ta::cuda
