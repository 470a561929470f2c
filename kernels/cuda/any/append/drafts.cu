#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/any/append/drafts.h"
#include "kernels/format/codec.h"

namespace ta::cuda {
namespace {

constexpr int kThreads = 128, kMostCtas = 1024;

// How many of 16 bytes' values appends replace: those that widen_rows of codec_rows.cuh does.
__device__ int count_beyond(const uint4& w, DType type) {
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    int n = 0;
#pragma unroll
    for (const uint32_t word : words) {
        if (type == DType::kF32) {
            n += !(fabsf(__uint_as_float(word)) <= kMaxMagnitude);
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto bits = uint16_t(word >> 16 * half);
            n += type == DType::kF16 ? !(fabsf(__half2float(__ushort_as_half(bits))) <= 65504.0f)
                                     : !(fabsf(__uint_as_float(uint32_t(bits) << 16)) <= kMaxMagnitude);
        }
    }
    return n;
}

// A thread moves 16 bytes of each of a sequence's rows, one row after the other, since a row may go to where another one was.
__global__ void __launch_bounds__(kThreads) close_up_kernel(const __grid_constant__ CloseUpArgs a) {
    const int64_t chunks = int64_t(a.row_elements) * sizeof(float) / 16, items = 2 * int64_t(a.layers) * a.members * chunks;
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < items; i += int64_t(gridDim.x) * kThreads) {
        const int64_t chunk = i % chunks, member = i / chunks % a.members, tensor = i / chunks / a.members;
        const auto type = DType(a.dtypes[tensor]);
        const int64_t of_row = int64_t(a.row_elements) * int64_t(dtype_bytes(type)) / 16;
        if (chunk >= of_row) continue;
        const KeptTokens kept = a.tokens[member];
        auto* rows = reinterpret_cast<uint4*>(a.drafts + tensor * a.bytes) + kept.first_row * of_row + chunk;
        int replaced = 0;
        for (int32_t n = 0; n < kept.n; ++n) {
            const int32_t from = kept.path < 0 ? n : a.paths[kept.path + n];
            const uint4 x = rows[from * of_row];
            replaced += count_beyond(x, type);
            if (from != n) rows[n * of_row] = x;
        }
        if (replaced && a.nonfinite) atomicAdd(a.nonfinite + kept.sequence, uint32_t(replaced));
    }
}

unsigned ctas_for(int64_t items) {
    return unsigned(std::clamp<int64_t>((items + kThreads - 1) / kThreads, 1, kMostCtas));
}

}  // namespace

int launch_close_up(const CloseUpArgs& args, CUstream_st* stream) {
    CloseUpArgs copy = args;
    void* parameters[] = {&copy};
    const int64_t items = int64_t(args.layers) * args.members * args.row_elements / 4;
    return cudaLaunchKernel(reinterpret_cast<const void*>(&close_up_kernel), dim3(ctas_for(items)), dim3(kThreads), parameters,
                            0, stream);
}

}  // namespace ta::cuda
