// Expands channel pages in memory to token pages, once for a call. Otherwise each tile of rows of a prefill kernel would expand
// each page for itself. The host side; nothing here needs the CUDA language.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/attend_args.h"

struct CUstream_st;

namespace ta::cuda {

// Bytes of an expanded page with all heads. A block table's addresses leave the low bits for flags.
constexpr size_t expanded_page_bytes(int head_dim, int kv_heads) {
    return (TokenLayout(head_dim).bytes() * size_t(kv_heads) + kEntryFlags) & ~size_t(kEntryFlags);
}

struct ExpandArgs {
    const uint32_t* entries;  // [pages] of the block table: which pages
    int32_t pages;
    uint8_t* to;      // expanded_page_bytes() for each of `entries`, 4096-byte aligned
    uint64_t* table;  // as the call's, with these entries set: to the expanded page, or to a token page as it is
};

// Enqueues the expansion of the channel pages among `entries` of args.table. Values are a channel page's, rounded to INT8
// (kernels/format/fractions.h). Returns a cudaError_t.
int launch_expand(const AttendArgs& args, const ExpandArgs& expand, CUstream_st* stream);

}  // namespace ta::cuda
