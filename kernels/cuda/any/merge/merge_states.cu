#include <algorithm>

#include "kernels/cuda/any/merge/merge_rows.cuh"
#include "kernels/cuda/any/merge/merge_states.h"
#include "kernels/cuda/common/launch.cuh"

namespace ta::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxCtas = 1 << 15;
constexpr int kMaxMergeRows = 32;  // of a tile: one warp finds their weights

struct RowPlace {
    int64_t token, head;
};

// A CTA takes `tile` rows at a time, a thread a word of a row. A thread reads its word in all parts before it writes it, so out
// may be one of them.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeArgs a, int tile) {
    __shared__ float weight[kMaxMergeParts][kMaxMergeRows];
    __shared__ RowPlace place[kMaxMergeRows];
    const int words = a.head_dim / kWidth;
    const int64_t rows = a.tokens * a.heads;
    for (int64_t first = int64_t(blockIdx.x) * tile; first < rows; first += int64_t(gridDim.x) * tile) {
        const int n_rows = int(min(int64_t(tile), rows - first)), lane = int(threadIdx.x);
        if (lane < n_rows) {
            const uint64_t row = uint64_t(first + lane), heads = uint64_t(a.heads);
            const RowPlace at = place[lane] = {int64_t(row / heads), int64_t(row % heads)};
            const auto lse_at = [&](int i) { return a.parts[i].lse_at(at.token, at.head); };
            weigh_row(a.n, lse_at, lane, weight, a.out.lse ? a.out.lse_at(at.token, at.head) : nullptr);
        }
        __syncthreads();
        for (int k = lane; k < n_rows * words; k += kThreads) {
            const int row = k / words, word = k % words;
            const RowPlace at = place[row];
            const auto address = [&](const MergeState& s) {
                return s.row(at.token, at.head) + int64_t(word * kWidth) * int64_t(dtype_bytes(s.dtype));
            };
            float sum[kWidth] = {};
            const auto word_at = [&](int i) { return MergeWordAt{address(a.parts[i]), a.parts[i].dtype}; };
            merge_word(a.n, word_at, row, weight, sum);
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
    const int words = aligned ? args.head_dim / 8 : args.head_dim, tile = std::clamp(kThreads / words, 1, kMaxMergeRows);
    const int64_t tiles = (args.tokens * args.heads + tile - 1) / tile;
    return launch_kernel(aligned ? merge_kernel<8> : merge_kernel<1>, unsigned(std::min<int64_t>(tiles, kMaxCtas)), kThreads, 0,
                         stream, args, tile);
}

}  // namespace ta::cuda
