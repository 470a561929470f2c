#include "kernels/cuda/any/merge/exchange_parts.h"
#include "kernels/cuda/any/merge/merge_rows.cuh"
#include "kernels/cuda/common/generation.h"
#include "kernels/cuda/ptx/mma.cuh"

namespace ta::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kMaxMergeParts <= kThreads, "a thread waits for a rank");
constexpr int kExchangeWidth = 8;       // elements of a word
constexpr uint64_t kLookEvery = 20000;  // nanoseconds between looks at the host's notes

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* p) {
    uint64_t v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void store_release(uint64_t* p, uint64_t v) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// The value of a signal of this exchange, and of no other.
__device__ __forceinline__ uint64_t signal_value(uint64_t identity, uint64_t number) {
    const uint64_t x = (identity ^ number) * 0x9E3779B97F4A7C15u;
    return (x ^ x >> 32) | 1;
}

struct ExchangeArea {
    uint8_t* data;
    int ranks, parity;

    __device__ float* o(int rank) const {
        return reinterpret_cast<float*>(data + size_t(parity * ranks + rank) * kExchangeSlotBytes);
    }
    __device__ ExchangeSignal* signals(int rank) const {
        auto* const signals = reinterpret_cast<ExchangeSignal*>(data + 2 * size_t(ranks) * kExchangeSlotBytes);
        return signals + (parity * ranks + rank) * kMaxExchangeCtas;
    }
};

__device__ uint32_t wait_for_signal(const ExchangeSignal* signal, uint64_t value, uint64_t arguments, const ExchangeState& s) {
    const uint64_t begun = nanoseconds();
    uint64_t look = begun + kLookEvery;
    while (load_acquire_system(&signal->value) != value) {
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
__device__ __forceinline__ void store_merged(const MergeState& out, uint8_t* to, const float (&x)[kExchangeWidth]) {
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) return Word<kExchangeWidth>::store(to, out.dtype, x);
#pragma unroll
    for (int c = 0; c < kExchangeWidth; ++c) Word<1>::store(to + c * int64_t(dtype_bytes(out.dtype)), out.dtype, {x[c]});
}

using ExchangeWeights = float[kMaxMergeParts][kMaxExchangeRows];

// A row of an exchange, and whose it is.
struct ExchangeRow {
    int64_t token;
    int32_t row, head;  // row within the exchange

    __device__ ExchangeRow(const ExchangeArgs& a, int32_t row) : row(row) {
        const uint32_t at = uint32_t(a.first_head) + uint32_t(row), heads = uint32_t(a.outputs.heads);
        token = a.first_token + at / heads;
        head = int32_t(at % heads);
    }
    __device__ bool is_for(const ExchangeArgs& a, int rank) const {
        const OutputHeads::Range range = a.outputs.of(uint32_t(rank));
        return head >= range.first && head < range.end;
    }
};

// A thread's view of an exchange: the tiles of rows that its CTA works on, and the steps that this takes.
struct ExchangeWork {
    const ExchangeArgs& a;
    const int cta, ctas;

    ExchangeState& s = *a.state;
    const int tile = exchange_tile_rows(a.rows);    // rows
    const int words = a.head_dim / kExchangeWidth;  // of a row
    const int ranks = int(a.outputs.ranks);
    const int thread = int(threadIdx.x), threads = int(blockDim.x);
    const ExchangeArea mine = area_of(a.rank);

    __device__ __forceinline__ ExchangeArea area_of(int rank) const {
        return ExchangeArea{s.areas[rank], ranks, int(a.number & 1)};
    }
    // fn(first row, rows) for each tile of the CTA.
    template <class Fn>
    __device__ __forceinline__ void for_each_tile(Fn fn) const {
        for (int first = cta * tile; first < a.rows; first += ctas * tile) fn(first, min(tile, a.rows - first));
    }

    // Writes this rank's part of the rows first .. first + n - 1 to the ranks that these rows are for.
    __device__ __forceinline__ void send(int first, int n) const {
        constexpr int kAtOnce = 2;  // words of a thread whose loads are under way together
        for (int k = thread; k < n * words; k += kAtOnce * threads) {
            float4 low[kAtOnce], high[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int word = min(k + j * threads, n * words - 1);
                const auto* from = reinterpret_cast<const float4*>(a.o + int64_t(first) * a.head_dim) + 2 * word;
                low[j] = from[0], high[j] = from[1];
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int word = k + j * threads;
                if (word >= n * words) break;
                const ExchangeRow at(a, first + word / words);
                for (int r = 0; r < ranks; ++r) {
                    if (r == a.rank || !at.is_for(a, r)) continue;
                    float* const rows = area_of(r).o(a.rank) + int64_t(first) * a.head_dim;
                    auto* const to = reinterpret_cast<float4*>(rows) + 2 * word;
                    to[0] = low[j], to[1] = high[j];
                }
            }
        }
        for (int k = thread; k < n * ranks; k += threads) {
            const int r = k / n, row = first + k % n;
            if (r == a.rank || !ExchangeRow(a, row).is_for(a, r)) continue;
            area_of(r).o(a.rank)[int64_t(a.rows) * a.head_dim + row] = a.lse[row];
        }
    }

    // Thread r tells rank r that the CTA's rows are there, and waits for that rank's rows. Returns false if they did not come;
    // the cause is noted. The CTA has sent all its tiles.
    __device__ __forceinline__ bool meet() const {
        if (thread >= ranks || thread == a.rank) return true;
        const uint64_t value = signal_value(s.identity, a.number);
        ExchangeSignal* const theirs = area_of(thread).signals(a.rank) + cta;
        theirs->arguments = a.arguments;
        store_release(&theirs->value, value);
        const uint32_t cause = wait_for_signal(mine.signals(thread) + cta, value, a.arguments, s);
        if (cause == ExchangeNotes::kNone) return true;
        note_failure(s, cause, uint32_t(thread));
        return false;
    }

    // Each thread finds the weights of all ranks' parts for one row, and the LSE. If the exchange failed, it writes only the
    // LSE, as NaN.
    __device__ __forceinline__ void weigh(int first, int n, bool failed, ExchangeWeights& weight) const {
        if (thread >= n) return;
        const ExchangeRow at(a, first + thread);
        if (!at.is_for(a, a.rank)) return;
        float* const lse = a.out.lse ? a.out.lse_at(at.token, at.head) : nullptr;
        if (!failed) {
            const int64_t behind_o = int64_t(a.rows) * a.head_dim;
            const auto lse_at = [&](int i) { return i == a.rank ? a.lse + at.row : mine.o(i) + behind_o + at.row; };
            weigh_row(ranks, lse_at, thread, weight, lse);
        } else if (lse) {
            *lse = std::numeric_limits<float>::quiet_NaN();
        }
    }

    // Writes the sums of all ranks' parts, or NaN if the exchange failed.
    __device__ __forceinline__ void merge(int first, int n, bool failed, const ExchangeWeights& weight) const {
        for (int k = thread; k < n * words; k += threads) {
            const int tile_row = k / words, c = k % words * kExchangeWidth;
            const ExchangeRow at(a, first + tile_row);
            if (!at.is_for(a, a.rank)) continue;
            float sum[kExchangeWidth] = {};
            if (failed) {
                for (float& x : sum) x = std::numeric_limits<float>::quiet_NaN();
            } else {
                const auto word_at = [&](int i) {
                    const float* const from = (i == a.rank ? a.o : mine.o(i)) + int64_t(at.row) * a.head_dim + c;
                    return MergeWordAt{reinterpret_cast<const uint8_t*>(from), DType::kF32};
                };
                merge_word(ranks, word_at, tile_row, weight, sum);
            }
            store_merged(a.out, a.out.row(at.token, at.head) + c * int64_t(dtype_bytes(a.out.dtype)), sum);
        }
    }
};

// The work of CTA `cta` of exchange_ctas(a.rows): tiles cta, cta + ctas, ... of rows. It depends on the same CTA of each other
// rank and on no other. All threads call it, kMaxMergeParts or more. `weight` is shared.
__device__ __forceinline__ void exchange(const ExchangeArgs& a, int cta, int ctas, ExchangeWeights& weight) {
    const ExchangeWork work{a, cta, ctas};
    bool failed = work.s.identity == 0 || *static_cast<volatile uint32_t*>(&work.s.failed) != 0;
    failed = __syncthreads_or(failed);
    if (!failed) {
        work.for_each_tile([&](int first, int n) { work.send(first, n); });
        __syncthreads();
        failed = __syncthreads_or(!work.meet());
    }
    work.for_each_tile([&](int first, int n) {
        work.weigh(first, n, failed, weight);
        __syncthreads();
        work.merge(first, n, failed, weight);
        __syncthreads();  // the weights are the next tile's
    });
}

__global__ void __launch_bounds__(kThreads) exchange_kernel(const __grid_constant__ ExchangeArgs a) {
    __shared__ ExchangeWeights weight;
    grid_launch_dependents();
    grid_dependency_wait();
    exchange(a, int(blockIdx.x), int(gridDim.x), weight);
}

}  // namespace

int load_exchange_parts() {
    cudaFuncAttributes attributes{};
    return cudaFuncGetAttributes(&attributes, exchange_kernel);
}

int launch_exchange_parts(const ExchangeArgs& args, CUstream_st* stream) {
    static_assert(sizeof(ExchangeArgs) <= 4096, "arguments of a launch");
    if (args.head_dim % kExchangeWidth != 0 || args.rows > rows_per_exchange(args.head_dim)) return cudaErrorInvalidValue;
    if (args.rows == 0) return cudaSuccess;
    int generation = 0;
    if (const cudaError_t e = kernel_generation(&generation); e != cudaSuccess) return e;
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = unsigned(exchange_ctas(args.rows));
    config.blockDim = kThreads;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = generation >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, exchange_kernel, args);
}

}  // namespace ta::cuda
