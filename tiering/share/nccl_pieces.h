// Pieces of GPU memory that go from one GPU to another through NCCL: packed into chunks at the source, unpacked at the destination.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/cuda/any/moves/move_blocks.h"

namespace ta::share {

inline constexpr size_t kGpuChunk = size_t{64} << 20;  // bytes that are packed at once
inline constexpr size_t kGpuBytes = 16 * kGpuChunk;    // that a GPU has for the other in a round
inline constexpr int kPackingCtas = 48;

// Scattered pieces of GPU memory that a round carries, chunk by chunk.
class Pieces {
  public:
    // Bytes up to the end of the chunk, or of all.
    size_t room() const { return bytes_ == kGpuBytes ? 0 : kGpuChunk - bytes_ % kGpuChunk; }
    size_t bytes() const { return bytes_; }
    size_t chunks() const { return (bytes_ + kGpuChunk - 1) / kGpuChunk; }
    size_t bytes_of(size_t chunk) const { return chunk < chunks() ? std::min(kGpuChunk, bytes_ - chunk * kGpuChunk) : 0; }
    // A piece that fits the room; nullptr: its place is passed over.
    void add(uint8_t* memory, size_t bytes) {
        if (bytes_ % kGpuChunk == 0) lists_.emplace_back();
        if (memory) lists_.back().push_back({memory, bytes_ % kGpuChunk, bytes});
        bytes_ += bytes;
    }
    // Copies a chunk between its pieces and memory where they lie one behind the other. Returns a cudaError_t.
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
        size_t at, bytes;  // in its chunk
    };
    size_t bytes_ = 0;
    std::vector<std::vector<Piece>> lists_;
};

// Memory for two chunks of one direction: one is packed or unpacked while the other is on its way.
struct Chunks {
    uint8_t* memory[2] = {};
    cudaEvent_t moved[2] = {};  // packed or unpacked
    cudaStream_t stream = nullptr;
    std::atomic<bool> made{false};

    bool make() {
        if (made) return true;
        // Of another priority than NCCL's: streams that share a hardware queue wait for each other.
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
        (void)cudaGetLastError();  // there was no memory
    }
};

}  // namespace ta::share
