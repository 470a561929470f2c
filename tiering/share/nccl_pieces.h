// Pieces of GPU memory that go from one GPU to another through NCCL. The source packs them into chunks, the destination unpacks
// these.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/cuda/any/moves/move_blocks.h"

namespace ta::share {

inline constexpr size_t kGpuChunk = size_t{64} << 20;  // bytes that are packed at a time
inline constexpr size_t kGpuBytes = 16 * kGpuChunk;    // most bytes from GPU to GPU in a round, each way
inline constexpr int kPackingCtas = 48;

// Bytes for a round that shall take `wanted`, if the last one carried `bytes` in `took`: whole chunks, at least one. Messages
// wait for the end of a round, heartbeats too.
inline size_t bytes_of_round(size_t bytes, std::chrono::nanoseconds took, std::chrono::nanoseconds wanted) {
    const double fit = double(bytes) * double(wanted.count()) / double(std::max<int64_t>(took.count(), 1));
    return size_t(std::clamp(fit / double(kGpuChunk), 1.0, double(kGpuBytes / kGpuChunk))) * kGpuChunk;
}

// Scattered pieces of GPU memory that a round carries, chunk by chunk.
class Pieces {
  public:
    Pieces() = default;
    // `most`: bytes, whole chunks.
    explicit Pieces(size_t most) : most_(most) {}
    // Bytes left in the current chunk, or in all.
    size_t room() const { return bytes_ == most_ ? 0 : kGpuChunk - bytes_ % kGpuChunk; }
    size_t bytes() const { return bytes_; }
    size_t chunks() const { return (bytes_ + kGpuChunk - 1) / kGpuChunk; }
    size_t bytes_of(size_t chunk) const { return chunk < chunks() ? std::min(kGpuChunk, bytes_ - chunk * kGpuChunk) : 0; }
    // Adds a piece that fits room(). nullptr: skips its place.
    void add(uint8_t* memory, size_t bytes) {
        if (bytes_ % kGpuChunk == 0) lists_.emplace_back();
        if (memory) lists_.back().push_back({memory, bytes_ % kGpuChunk, bytes});
        bytes_ += bytes;
    }
    // Copies a chunk from its pieces to contiguous memory (`pack`), or back. Returns a cudaError_t.
    int move(size_t chunk, bool pack, uint8_t* whole, int generation, cudaStream_t stream) const {
        std::vector<cuda::BlockCopy> copies;
        for (const Piece& p : lists_[chunk]) {
            const auto piece = reinterpret_cast<uintptr_t>(p.memory), at = reinterpret_cast<uintptr_t>(whole + p.at);
            copies.push_back(pack ? cuda::BlockCopy{at, piece, p.bytes} : cuda::BlockCopy{piece, at, p.bytes});
        }
        return cuda::launch_move_blocks(copies.data(), copies.size(), generation, stream, kPackingCtas);
    }

  private:
    struct Piece {
        uint8_t* memory;
        size_t at, bytes;  // `at`: within its chunk
    };
    size_t most_ = kGpuBytes, bytes_ = 0;
    std::vector<std::vector<Piece>> lists_;
};

// Memory for two chunks of one direction, so that one is packed or unpacked while the other is sent or received.
struct Chunks {
    uint8_t* memory[2] = {};
    cudaEvent_t moved[2] = {};  // packed or unpacked
    cudaStream_t stream = nullptr;
    std::atomic<bool> made{false};  // the fields above are final

    cudaStream_t made_stream() const { return made ? stream : nullptr; }
    bool make() {
        if (made) return true;
        // The priority differs from that of NCCL's streams: streams that share a hardware queue wait for each other.
        int least = 0, greatest = 0;
        bool ok = cudaDeviceGetStreamPriorityRange(&least, &greatest) == cudaSuccess &&
                  cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest) == cudaSuccess;
        for (int i = 0; i < 2 && ok; ++i) {
            ok = cudaMalloc(reinterpret_cast<void**>(&memory[i]), kGpuChunk) == cudaSuccess &&
                 cudaEventCreateWithFlags(&moved[i], cudaEventDisableTiming) == cudaSuccess;
        }
        made = ok;
        if (!ok) free();
        return ok;
    }
    void free() {
        for (int i = 0; i < 2; ++i) {
            cudaFree(std::exchange(memory[i], nullptr));
            if (moved[i]) cudaEventDestroy(std::exchange(moved[i], nullptr));
        }
        if (stream) cudaStreamDestroy(std::exchange(stream, nullptr));
        (void)cudaGetLastError();  // clears the error of running out of memory
    }
};

}  // namespace ta::share
