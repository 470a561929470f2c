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

// Copies all of them, which do not overlap one another; any number. `generation`: as kernel_generation() says. The table
// travels with the launch: it may go as soon as this returns. Returns a cudaError_t.
int launch_move_blocks(const BlockCopy* copies, size_t n, int generation, CUstream_st* stream);

}  // namespace ta::cuda
