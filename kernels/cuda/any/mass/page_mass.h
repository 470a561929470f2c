// Sends the attention that pages got in a step to the host: one launch that reads the sums of the decode kernels, puts them
// into pinned host memory and leaves zeros for the next step.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace ta::cuda {

struct MassRow {
    uint32_t first, n;  // entries of a sequence in the block table
    uint64_t to;        // where theirs begin in PageMassArgs::to
};

struct PageMassArgs {
    uint64_t* weight;       // DecodeMass
    const uint64_t* heads;  // DecodeMass
    const MassRow* rows;    // [n_rows] pinned, as what follows
    int32_t n_rows;
    float* to;  // weight of each entry, summed over rows and heads
    uint64_t* heads_to;
};

// Returns a cudaError_t.
int launch_page_mass(const PageMassArgs& args, CUstream_st* stream);

}  // namespace ta::cuda
