#include <algorithm>

#include "kernels/cuda/any/merge/exchange_parts.h"
#include "kernels/cuda/any/merge/merge_rows.cuh"
#include "kernels/cuda/common/generation.h"
#include "kernels/cuda/ptx/mma.cuh"

namespace ta::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWidth = 8;               // elements of a word
constexpr uint64_t kLookEvery = 20000;  // nanoseconds between looks at the host's notes
static_assert(kMaxMergeParts <= kThreads, "a thread waits for a rank");
static_assert(kExchangeRows <= kMaxMergeRows);

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void store_release(uint64_t* p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// What a signal of this exchange says, and no other's.
__device__ __forceinline__ uint64_t signal_value(uint64_t identity, uint64_t number) {
    const uint64_t x = (identity ^ number) * 0x9E3779B97F4A7C15u;
    return (x ^ x >> 32) | 1;
}

struct Area {
    uint8_t* data;
    int ranks, parity;

    __device__ float* o(int rank) const {
        return reinterpret_cast<float*>(data + size_t(parity * ranks + rank) * kExchangeSlotBytes);
    }
    __device__ ExchangeSignal* signal(int rank) const {
        auto* const signals = reinterpret_cast<ExchangeSignal*>(data + 2 * size_t(ranks) * kExchangeSlotBytes);
        return signals + (parity * ranks + rank) * kMaxExchangeCtas + blockIdx.x;
    }
};

__device__ uint32_t wait_for(const ExchangeSignal* signal, uint64_t value, uint64_t arguments, const ExchangeState& s) {
    const uint64_t begun = nanoseconds();
    uint64_t look = begun + kLookEvery;
    while (load_acquire(&signal->value) != value) {
        const uint64_t now = nanoseconds();
        if (now < look) continue;
        if (*static_cast<volatile uint64_t*>(&s.notes->given_up) == s.identity) return ExchangeNotes::kGivenUp;
        if (now - begun > s.patience) return ExchangeNotes::kSilent;
        look = now + kLookEvery;
    }
    return signal->arguments == arguments ? ExchangeNotes::kNone : ExchangeNotes::kOtherArguments;
}

__device__ void note_failure(ExchangeState& s, uint32_t cause, uint32_t rank) {
    if (atomicExch(&s.failed, 1u) != 0) return;
    s.notes->cause = cause;
    s.notes->rank = rank;
    __threadfence_system();
    *static_cast<volatile uint64_t*>(&s.notes->failed) = s.identity;
}

// The word of a row, wherever it begins.
__device__ __forceinline__ void store_word(const MergeState& out, uint8_t* to, const float (&x)[kWidth]) {
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) return Word<kWidth>::store(to, out.dtype, x);
#pragma unroll
    for (int c = 0; c < kWidth; ++c) Word<1>::store(to + c * int64_t(dtype_bytes(out.dtype)), out.dtype, {x[c]});
}

// CTA c takes the rows [kExchangeRows * c, ...) and every gridDim.x-th such tile. It depends on the same CTA of each other rank and
// on no other: they need not all be on the GPU at once.
__global__ void __launch_bounds__(kThreads) exchange_kernel(const __grid_constant__ ExchangeArgs a) {
    __shared__ MergeWeights weight;
    // The grid before wrote `o` and, through `out` and its readers, may be what the last exchange waited for.
    grid_dependency_wait();
    grid_launch_dependents();
    ExchangeState& s = *a.state;
    const int thread = int(threadIdx.x), ranks = int(a.outputs.ranks), d = a.head_dim, words = d / kWidth;
    const auto heads = uint32_t(a.outputs.heads);
    const auto for_each_tile = [&](auto fn) {
        for (int64_t first = int64_t(blockIdx.x) * kExchangeRows; first < a.rows; first += int64_t(gridDim.x) * kExchangeRows)
            fn(first, int(min(int64_t(kExchangeRows), a.rows - first)));
    };
    const auto head_of = [&](int64_t row) { return int64_t(uint64_t(a.first_row + row) % heads); };
    const auto gets = [&](int rank, int64_t row) {
        const OutputHeads::Range r = a.outputs.of(uint32_t(rank));
        return head_of(row) >= r.first && head_of(row) < r.end;
    };
    const auto area_of = [&](int rank) { return Area{s.areas[rank], ranks, int(a.number & 1)}; };
    const float *const own_o = a.o + a.first_row * d, *const own_lse = a.lse + a.first_row;

    bool failed = s.identity == 0 || *static_cast<volatile uint32_t*>(&s.failed) != 0;
    failed = __syncthreads_or(failed);
    if (!failed) {
        for_each_tile([&](int64_t first, int n) {
            for (int k = thread; k < n * words; k += kThreads) {
                const int64_t row = first + k / words, at = row * d + k % words * kWidth;
                const auto* from = reinterpret_cast<const float4*>(own_o + at);
                const float4 low = from[0], high = from[1];
                for (int r = 0; r < ranks; ++r) {
                    if (r == a.rank || !gets(r, row)) continue;
                    auto* const to = reinterpret_cast<float4*>(area_of(r).o(a.rank) + at);
                    to[0] = low;
                    to[1] = high;
                }
            }
            for (int k = thread; k < n * ranks; k += kThreads) {
                const int r = k / n;
                const int64_t row = first + k % n;
                if (r != a.rank && gets(r, row)) area_of(r).o(a.rank)[a.rows * d + row] = own_lse[row];
            }
        });
        __syncthreads();
        if (thread < ranks && thread != a.rank) {
            const uint64_t value = signal_value(s.identity, a.number);
            ExchangeSignal* const theirs = area_of(thread).signal(a.rank);
            theirs->arguments = a.arguments;
            store_release(&theirs->value, value);
            const uint32_t cause = wait_for(area_of(a.rank).signal(thread), value, a.arguments, s);
            failed = cause != ExchangeNotes::kNone;
            if (failed) note_failure(s, cause, uint32_t(thread));
        }
        failed = __syncthreads_or(failed);
    }
    const Area mine = area_of(a.rank);
    const auto row_of = [&](int64_t row) { return a.out.row(int64_t(uint64_t(a.first_row + row) / heads), head_of(row)); };
    const auto lse_of = [&](int64_t row) {
        return a.out.lse ? a.out.lse_at(int64_t(uint64_t(a.first_row + row) / heads), head_of(row)) : nullptr;
    };
    for_each_tile([&](int64_t first, int n) {
        if (thread < n && gets(a.rank, first + thread)) {
            const int64_t row = first + thread;
            if (failed) {
                if (float* const lse = lse_of(row)) *lse = std::numeric_limits<float>::quiet_NaN();
            } else {
                const auto lse_at = [&](int i) { return i == a.rank ? own_lse + row : mine.o(i) + a.rows * d + row; };
                weigh_row(ranks, lse_at, thread, weight, lse_of(row));
            }
        }
        __syncthreads();
        for (int k = thread; k < n * words; k += kThreads) {
            const int tile_row = k / words, c = k % words * kWidth;
            const int64_t row = first + tile_row, at = row * d + c;
            if (!gets(a.rank, row)) continue;
            float sum[kWidth] = {};
            if (failed) {
                for (float& x : sum) x = std::numeric_limits<float>::quiet_NaN();
            } else {
                const auto word_at = [&](int i) {
                    const float* const from = i == a.rank ? own_o + at : mine.o(i) + at;
                    return MergeWordAt{reinterpret_cast<const uint8_t*>(from), DType::kF32};
                };
                merge_word(ranks, word_at, tile_row, weight, sum);
            }
            store_word(a.out, row_of(row) + c * int64_t(dtype_bytes(a.out.dtype)), sum);
        }
        __syncthreads();  // the weights are the next tile's
    });
}

}  // namespace

int load_exchange_parts() {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, exchange_kernel);
}

int launch_exchange_parts(const ExchangeArgs& args, CUstream_st* stream) {
    static_assert(sizeof(ExchangeArgs) <= 4096, "arguments of a launch");
    if (args.head_dim % kWidth != 0 || args.rows > rows_per_exchange(args.head_dim)) return cudaErrorInvalidValue;
    if (args.rows == 0) return cudaSuccess;
    const int64_t tiles = (args.rows + kExchangeRows - 1) / kExchangeRows;
    int generation = 0;
    if (const cudaError_t e = kernel_generation(&generation); e != cudaSuccess) return e;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = unsigned(std::min<int64_t>(tiles, kMaxExchangeCtas));
    config.blockDim = kThreads;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = generation >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, exchange_kernel, args);
}

}  // namespace ta::cuda
