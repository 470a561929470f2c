#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/any/channels/channels.h"
#include "kernels/format/channels.h"
#include "kernels/format/codec.h"

namespace ta::cuda {
namespace {

constexpr int kThreads = 128, kMostCtas = 4096;

// A thread copies `kChannels` channels at a time, which lie in one half. Strides are in elements.
template <class Word, int kChannels>
__device__ void copy(const CopyChannelsArgs& a, int element_bytes) {
    const int64_t words = a.to_channels / kChannels, n = a.rows * a.heads * words;
    const auto* from = static_cast<const uint8_t*>(a.from.data);
    auto* to = static_cast<uint8_t*>(a.to.data);
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kThreads) {
        const int channel = int(i % words) * kChannels;
        const int64_t head = i / words % a.heads, row = i / words / a.heads;
        const int source = channel_of(channel, a.to_channels, a.from_channels);
        Word word{};
        if (source >= 0) {
            const int64_t at = row * a.from.stride_row + head * a.from.stride_head + source;
            word = *reinterpret_cast<const Word*>(from + at * element_bytes);
        }
        const int64_t at = row * a.to.stride_row + head * a.to.stride_head + channel;
        *reinterpret_cast<Word*>(to + at * element_bytes) = word;
    }
}

__device__ bool is_aligned(const TensorArgs& x, int element_bytes, int bytes) {
    return (reinterpret_cast<uintptr_t>(x.data) | uintptr_t(x.stride_row * element_bytes) |
            uintptr_t(x.stride_head * element_bytes)) %
               uintptr_t(bytes) ==
           0;
}

__global__ void __launch_bounds__(kThreads) copy_channels_kernel(const __grid_constant__ CopyChannelsArgs a) {
    const int bytes = int(dtype_bytes(a.from.dtype)), four = 4 * bytes;
    const bool aligned = is_aligned(a.from, bytes, four) && is_aligned(a.to, bytes, four);
    if (bytes == 4) {
        aligned ? copy<uint4, 4>(a, bytes) : copy<uint32_t, 1>(a, bytes);
    } else {
        aligned ? copy<uint2, 4>(a, bytes) : copy<uint16_t, 1>(a, bytes);
    }
}

}  // namespace

int launch_copy_channels(const CopyChannelsArgs& args, CUstream_st* stream) {
    const int64_t words = args.rows * args.heads * (args.to_channels / 4);
    if (words == 0) return cudaSuccess;
    const auto ctas = unsigned(std::min<int64_t>((words + kThreads - 1) / kThreads, kMostCtas));
    copy_channels_kernel<<<ctas, kThreads, 0, stream>>>(args);
    return cudaGetLastError();
}

}  // namespace ta::cuda
