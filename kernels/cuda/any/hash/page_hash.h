// Hashes pages in place, on the device: the values of kernels/format/hash.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/layout.h"

struct CUstream_st;

namespace ta::cuda {

// A full block in a slot that the device can read.
struct alignas(16) HashTask {
    uint64_t slot;
    uint64_t content_id, block_index;
    uint64_t adopted_id;  // the content id that launch_adopt gives
    PageKind kind;
    uint8_t unused[15];
};
static_assert(sizeof(HashTask) == 48);

struct HashArgs {
    const HashTask* tasks;  // in memory that the device can read
    uint32_t n_tasks, layers;
    uint32_t lasting_layers;                                  // pages that passed blocks have: those in the first places
    uint64_t fingerprint;                                     // of the pool
    const uint64_t *channel_page_offset, *token_page_offset;  // [layers + 1] in device memory; those of channel blocks may be 0
    uint64_t low_page_bytes;
    uint64_t slot_bytes[kPageKinds];  // by PageKind
    uint64_t own_scales_bytes;        // of token blocks, at the end of their slots
};

// Writes the trailers of all tasks: identity, hashes, zeros to the end of the slot. Returns a cudaError_t.
int launch_seal(const HashArgs& args, CUstream_st* stream);

// mismatch[task * layers + place] = 1 where a page does not match its hash, 2 where the trailer is that of another block; the
// others are not written. Returns a cudaError_t.
int launch_verify(const HashArgs& args, uint32_t* mismatch, CUstream_st* stream);

// The same, and seals each task under its adopted_id: pages are hashed once. A task with a mismatch is no block after that.
int launch_adopt(const HashArgs& args, uint32_t* mismatch, CUstream_st* stream);

}  // namespace ta::cuda
