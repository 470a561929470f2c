// A CTA takes every gridDim-th piece of the blocks. From sm_90 on one thread of it keeps bulk copies in flight through a ring
// in shared memory, so that a CTA takes next to no registers and issue slots from the kernels beside it; before, threads load
// and store.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/any/moves/move_blocks.h"
#include "kernels/cuda/common/launch.cuh"

namespace ta::cuda {
namespace {

constexpr int kStages = 4;
constexpr uint32_t kPieceBytes = 16384;
constexpr int kLoadThreads = 512;  // before sm_90

struct Task {
    uint64_t to, from;
    uint32_t words;        // of 16 bytes
    uint32_t first_piece;  // of all tasks
};

// NOTES: passed by value, so that no table has to outlive the launch. 32764 bytes are the most that a kernel's parameters may
// be.
template <int kTasks>
struct Tasks {
    uint32_t n, pieces;
    Task tasks[kTasks];
};
constexpr int kFewTasks = 64, kManyTasks = 1024;
static_assert(sizeof(Tasks<kManyTasks>) <= 32764);

// Pieces of a task have about equal sizes, so that none is too small to be worth its latency. They begin at whole units, since
// unaligned bursts on the bus take twice the time.
constexpr uint32_t kUnitWords = 64;
__host__ __device__ uint32_t pieces_of(uint32_t words) {
    return (words + kPieceBytes / 16 - 1) / (kPieceBytes / 16);
}

struct Piece {
    uint64_t to, from;
    uint32_t bytes;
};

// Pieces in rising order.
template <int kTasks>
class Walk {
  public:
    __device__ explicit Walk(const Tasks<kTasks>& t) : t_(t) {}
    __device__ Piece at(uint32_t piece) {
        while (task_ + 1 < t_.n && piece >= t_.tasks[task_ + 1].first_piece) ++task_;
        const Task& task = t_.tasks[task_];
        const uint32_t n = pieces_of(task.words), i = piece - task.first_piece;
        const uint64_t units = (task.words + kUnitWords - 1) / kUnitWords;
        const auto begin = uint32_t(units * i / n * kUnitWords),
                   end = uint32_t(min(units * (i + 1) / n * kUnitWords, uint64_t(task.words)));
        return {task.to + 16ull * begin, task.from + 16ull * begin, 16 * (end - begin)};
    }

  private:
    const Tasks<kTasks>& t_;
    uint32_t task_ = 0;
};

#if __CUDA_ARCH__ >= 900
__device__ uint32_t shared_address(const void* p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

template <int kTasks>
__device__ void move(const Tasks<kTasks>& t) {
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ __align__(8) uint64_t arrived[kStages];
    if (threadIdx.x != 0) return;
    for (uint64_t& barrier : arrived) asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    Walk<kTasks> loads(t), stores(t);
    const uint32_t mine = t.pieces > blockIdx.x ? (t.pieces - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    const auto load = [&](uint32_t j) {
        const Piece p = loads.at(blockIdx.x + j * gridDim.x);
        const uint32_t barrier = shared_address(&arrived[j % kStages]);
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(p.bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(ring + j % kStages * kPieceBytes)),
                     "l"(p.from), "r"(p.bytes), "r"(barrier)
                     : "memory");
    };
    for (uint32_t j = 0; j < kStages - 1 && j < mine; ++j) load(j);
    for (uint32_t j = 0; j < mine; ++j) {
        const Piece p = stores.at(blockIdx.x + j * gridDim.x);
        uint32_t done = 0;
        while (!done) {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done)
                         : "r"(shared_address(&arrived[j % kStages])), "r"(j / kStages & 1)
                         : "memory");
        }
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(p.to),
                     "r"(shared_address(ring + j % kStages * kPieceBytes)), "r"(p.bytes)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (j + kStages - 1 >= mine) continue;
        // NOTES: the stage of the next load is the one before this: its store must have read it.
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        load(j + kStages - 1);
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#else
template <int kTasks>
__device__ void move(const Tasks<kTasks>& t) {
    constexpr int kUnroll = 4;
    Walk<kTasks> walk(t);
    for (uint32_t i = blockIdx.x; i < t.pieces; i += gridDim.x) {
        const Piece p = walk.at(i);
        const auto* from = reinterpret_cast<const uint4*>(p.from);
        auto* to = reinterpret_cast<uint4*>(p.to);
        for (uint32_t k = threadIdx.x; k < p.bytes / 16; k += kUnroll * blockDim.x) {
            uint4 v[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (k + u * blockDim.x < p.bytes / 16) v[u] = __ldcs(from + k + u * blockDim.x);
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                if (k + u * blockDim.x < p.bytes / 16) __stcs(to + k + u * blockDim.x, v[u]);
            }
        }
    }
}
#endif

template <int kTasks>
__global__ void __launch_bounds__(kLoadThreads) move_blocks_kernel(const __grid_constant__ Tasks<kTasks> t) {
    move(t);
}

template <int kTasks>
cudaError_t load(bool bulk) {
    return cudaFuncSetAttribute(move_blocks_kernel<kTasks>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                bulk ? int(kStages * kPieceBytes) : 0);
}

template <int kTasks>
cudaError_t launch(const BlockCopy* copies, size_t n, bool bulk, int most_ctas, cudaStream_t stream) {
    Tasks<kTasks> t;
    t.n = uint32_t(n);
    t.pieces = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto words = uint32_t(copies[i].bytes / 16);
        t.tasks[i] = {copies[i].to, copies[i].from, words, t.pieces};
        t.pieces += pieces_of(words);
    }
    const size_t ring = bulk ? kStages * kPieceBytes : 0;
    if (const cudaError_t e = load<kTasks>(bulk); e != cudaSuccess) return e;
    const auto ctas = unsigned(std::min(uint32_t(most_ctas), t.pieces));
    return launch_kernel(move_blocks_kernel<kTasks>, ctas, bulk ? 32 : kLoadThreads, ring, stream, t);
}

}  // namespace

int load_move_blocks(int generation) {
    const bool bulk = generation >= 9;
    const cudaError_t e = load<kFewTasks>(bulk);
    return e != cudaSuccess ? e : load<kManyTasks>(bulk);
}

int launch_move_blocks(const BlockCopy* copies, size_t n, int generation, CUstream_st* stream, int ctas) {
    constexpr uint64_t kMostBytes = uint64_t{1} << 34;  // of one: words and pieces of a launch fit 32 bits
    for (size_t i = 0; i < n; ++i) {
        if (((copies[i].to | copies[i].from | copies[i].bytes) & 15) || copies[i].bytes == 0 || copies[i].bytes > kMostBytes)
            return cudaErrorInvalidValue;
    }
    while (n > 0) {
        const size_t now = std::min<size_t>(n, kManyTasks);
        const bool bulk = generation >= 9;
        const cudaError_t e = now <= kFewTasks ? launch<kFewTasks>(copies, now, bulk, ctas, stream)
                                               : launch<kManyTasks>(copies, now, bulk, ctas, stream);
        if (e != cudaSuccess) return e;
        copies += now;
        n -= now;
    }
    return cudaSuccess;
}

}  // namespace ta::cuda
