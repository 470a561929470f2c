// Copies scattered blocks between device memory and host memory that the device reads, by a few CTAs: for blocks too small for
// the copy engine, which takes microseconds for each.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace ta::cuda {

// Addresses and size are multiples of 16.
struct BlockCopy {
    uint64_t to, from;
    uint64_t bytes;
};

// The least that keeps the bus busy in both directions: H200, 2026-11-21, test_kernels.cuda.move_blocks --bench.
inline constexpr int kMoveCtas = 16;

// Copies any number of blocks, which must not overlap one another. `generation`: as kernel_generation() says. The table travels
// with the launch: it may go as soon as this returns. Returns a cudaError_t.
int launch_move_blocks(const BlockCopy* copies, size_t n, int generation, CUstream_st* stream, int ctas = kMoveCtas);
// Loads the kernels. A launch that loads them would wait for what runs on the GPU. Returns a cudaError_t.
int load_move_blocks(int generation);

}  // namespace ta::cuda
