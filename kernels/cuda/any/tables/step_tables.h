// The tables of a step on their way to the device: one launch that reads them in pinned host memory and puts them where the
// step's kernels look.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace ta::cuda {

struct TablePatch {
    uint64_t entry;  // index into the block table
    uint64_t value;
};

struct StepTablesArgs {
    static constexpr int kCopies = 6;
    struct Copy {  // addresses and size are multiples of 16
        void* to;
        const void* from;
        size_t bytes;
    } copies[kCopies];
    const TablePatch* patches;
    size_t n_patches;
    uint64_t* table;
};

// Returns a cudaError_t.
int launch_step_tables(const StepTablesArgs& args, CUstream_st* stream);

}  // namespace ta::cuda
