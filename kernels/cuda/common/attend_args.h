// Arguments of one attention call over pages (one layer) on the device; decode and prefill share them. Pointers are to device
// memory, or to host memory mapped into it, unless said otherwise. Nothing here depends on lengths: a captured graph is
// replayed with new lengths by rewriting what `sequences`, `pages_before` and `table` point at.
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"
#include "kernels/format/types.h"
#include "kernels/format/visible.h"

namespace ta::cuda {

// Entry of a block table: the address of a slot, 4096-byte aligned, and flags in the low bits.
inline constexpr uint64_t kEntryChannel = 1;      // a channel page, else a token page
inline constexpr uint64_t kEntrySingleLayer = 2;  // the address is that of this layer's page: no layer offset is added
inline constexpr uint64_t kEntryLow = 4;          // beside kEntryChannel: a low page, 2 bits for all heads
inline constexpr uint64_t kEntryDropped = 8;      // no page: its keys are seen by nobody
inline constexpr uint64_t kEntryFlags = 4095;
TA_HD constexpr uint64_t entry_flags(PageKind kind) {
    const PageKind format = page_format(kind);
    return format == PageKind::kToken ? 0 : format == PageKind::kLow ? kEntryChannel | kEntryLow : kEntryChannel;
}

struct alignas(16) SequenceArgs {
    int32_t n_keys;       // keys visible to the call, those of the open page included
    int32_t n_query;      // query tokens; the last n_query positions, unless first_position says where. 0: nothing to do
    int32_t row;          // first row in q, out and lse
    int32_t first_entry;  // of the sequence's ceil(n_keys / 64) entries in `table`
};

struct HeadArgs {
    uint32_t channel_offset;  // of the head's piece within a channel page of one layer; a token page's is head * bytes
    uint8_t k_bits, v_bits;   // of channel pages: 8, 4 or 2
    uint16_t unused;
};

// [rows, heads, head_dim] with head_dim contiguous; strides in elements. 16-byte aligned rows are read faster, none are
// required.
struct TensorArgs {
    void* data;
    int64_t stride_row, stride_head;
    DType dtype;
};

// The divisor of a part's O: l 2^m. l is 0 if the part's keys are not seen.
struct alignas(8) PartSum {
    float m, l;
};

struct AttendArgs {
    int32_t head_dim, kv_heads, group, batch;

    const SequenceArgs* sequences;  // [batch]
    const int32_t* pages_before;    // [batch + 1] pages of the sequences before; the last is the sum
    // [batch] place of the first query token among the keys; may be below 0 or behind them. nullptr: the queries are the last
    // tokens. With it the pages before a window are left out already. The decode kernel's alone.
    const int32_t* first_position;
    // The sequences are parts of queries (kernels/cuda/any/ranges): none is cut, and results of the i-th go to row i of out and of
    // part_sums [batch, q_heads]. The decode kernel's alone, beside first_position, without lse and sink.
    bool are_parts = false;
    PartSum* part_sums = nullptr;
    const uint64_t* table;
    // [batch] the first block of each sequence that is read, and every block_stride-th after it: those of one rank of several.
    // pages_before counts these. nullptr: all blocks. The decode kernel's alone, and not beside first_position: the prefill kernel
    // has them from its schedule.
    const int32_t* first_block;
    int32_t block_stride = 1;
    const HeadArgs* heads;  // [kv_heads]; nullptr when no page is a channel page
    uint64_t token_layer_offset, channel_layer_offset;
    uint64_t low_layer_offset;  // a low page's pieces all have the same size

    TensorArgs q, out;
    float* lse;  // [rows, q_heads] natural logarithm, or nullptr
    // The same, but of the sums by which O was divided, with their rounding: good enough to merge O with that of other keys.
    // The prefill kernel's alone, which takes no longer for it; not beside lse.
    float* lse_of_o;

    const float* signs;     // [head_dim] +1 or -1: queries are rotated; nullptr: they are not
    const float* k_offset;  // [kv_heads, head_dim] what keys are stored less of, or nullptr
    bool k_turning;         // pages can have turning pairs
    int32_t q_levels;       // stage-1 levels of queries: 119 or 127
    bool saturate;          // non-finite query values become the nearest finite ones instead of 0
    uint32_t* nonfinite;    // [batch] counts query values that were replaced, or nullptr

    float scale;               // of q.k, natural units
    bool causal;               // aligned at the bottom right; otherwise a full mask
    int32_t window;            // keys nearer than this are seen, on both sides under a full mask; 0: all
    float softcap;             // 0: off
    const float* alibi_slope;  // [q_heads] natural units, or nullptr
    const float* sink;         // [q_heads] logits of learned sinks, natural units, or nullptr

    ExpMode exp;
    int32_t p_levels;     // 65535 (two bytes), 255, 127 or 119
    bool p_running;       // P in units of the running maximum instead of the page's
    int32_t range_pages;  // kDecodeRangePages or kPromptRangePages: the decode kernel's alone
    bool may_lack_pages;  // entries may have kEntryDropped
    bool has_low;         // entries may have kEntryLow
    bool some_8_bits;     // `heads` may have 8 bits
    // A hint for the choice of the prefill kernel: most tiles have many pages, and the keys of a page have one scale.
    bool long_tiles;
    // The prefill kernel's schedule has resident tiles; no page is a channel page.
    bool resident;
};

using KeyRange = ta::KeyRange<int32_t>;
using ta::in_window;
using ta::visible_keys;

}  // namespace ta::cuda
