/* TurboAttention: functions that may change or go between minor versions. SPDX-License-Identifier: Apache-2.0
 * The conventions of turboattention.h hold. What proves itself moves there under its name without the x. */
#ifndef TURBOATTENTION_EXPERIMENTAL_H
#define TURBOATTENTION_EXPERIMENTAL_H

#include "turboattention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What one block of a sequence is. */
typedef struct ta_x_block_info {
    uint32_t struct_size;
    /* 8: token block; 4 or, if no head has 4, 2: channel block; 2: low block. A pool that has low blocks has no channel blocks
     * of 2 bits: falling_precision is for pools of 8 and of 4. The trailer in the slot says which kind it is, too. */
    uint32_t bits;
    uint32_t tokens;     /* 1..64 that belong to the sequence */
    uint32_t owners;     /* sequences that share it */
    uint64_t bytes;      /* of the slot, trailer included */
    uint64_t content_id; /* the identity that its hashes bind */
    uint64_t trailer_offset;
} ta_x_block_info;

/* Describes the block and, where `buffer` is not NULL, copies the slot byte for byte as docs/FORMAT.md specifies it. In a block
 * of fewer than 64 tokens the bytes of the missing ones are unspecified.
 * Errors: TA_E_STALE, TA_E_INVALID (block beyond the sequence, buffer smaller than info->bytes), TA_E_STATE (it was dropped),
 * TA_E_BUSY, TA_E_MEMORY, of a block on disk TA_E_IO and TA_E_CORRUPT, on a GPU TA_E_DEVICE. */
TA_API ta_status ta_x_seq_block(const ta_kv_pool* pool, ta_seq seq, uint64_t block, ta_x_block_info* info, void* buffer,
                                uint64_t buffer_bytes, ta_error* err);

/* Writes what attention sees: the dequantized K and V of tokens [first, first + tokens) of one layer, for checks and exports.
 *   k, v   [tokens, kv_heads, head_dim] F32, contiguous, each may be NULL; K is rotated back and has its offset added again
 * Errors: TA_E_STALE, TA_E_INVALID (range, layer), TA_E_STATE (a block was dropped), TA_E_BUSY, TA_E_MEMORY, of a block on disk
 * TA_E_IO and TA_E_CORRUPT, on a GPU TA_E_DEVICE. */
TA_API ta_status ta_x_seq_dequantize(const ta_kv_pool* pool, ta_seq seq, uint32_t layer, int64_t first, int64_t tokens,
                                     float* k, float* v, ta_error* err);

/* Writes what TA_EVICT_ATTENTION goes by: the attention that blocks [first, first + n) got in the layers that steps observed,
 * faded until now. On a GPU it waits for the steps that were ended so far.
 *   mass   [n] F32
 * Errors: TA_E_STALE, TA_E_INVALID (range), TA_E_UNSUPPORTED (a pool of another policy), TA_E_BUSY. */
TA_API ta_status ta_x_seq_attention(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, float* mass, ta_error* err);

/* What carries blocks between a GPU and host memory. Copy engines leave the multiprocessors alone but take microseconds for
 * each piece of memory; a kernel is faster for small blocks and keeps some of the multiprocessors from other kernels.
 * TA_X_MOVE_ROUTE_AUTO: the kernel for blocks below a size that is measured, if somebody waits for them; what leaves in the
 * background or is prefetched goes by copy engine. */
typedef int32_t ta_x_move_route;
enum ta_x_move_route_code { TA_X_MOVE_ROUTE_AUTO = 0, TA_X_MOVE_ROUTE_COPY_ENGINE = 1, TA_X_MOVE_ROUTE_KERNEL = 2 };

/* Settings of tiers that are right by default on what was measured so far: ta_tier_options.tuning. Copied. */
typedef struct ta_x_tier_tuning {
    uint32_t struct_size;
    ta_x_move_route route; /* between a GPU and the host; default: measured when the context's first such pool is created */
    /* How many bytes of the device budget a step may stage in, as far as they are free; default: an eighth of the budget. */
    uint64_t staging_bytes;
    int32_t attention_half_life; /* of weights under TA_EVICT_ATTENTION, in steps, all of the pool counted; default 128 */
    /* Under TA_EVICT_ATTENTION: a step observes one layer in so many, from step to step of a plan each in its turn. Captured
     * calls are always observed in layers 0, attention_layers, 2 * attention_layers and so on. More than the pool's layers
     * counts as all of them, so every step observes one. Default 8 on a GPU, where decode takes longer in a layer that is
     * observed (docs/tiers.md); 1, all layers, on a CPU. */
    int32_t attention_layers;
} ta_x_tier_tuning;

/* Blocks the calling thread until the moves are finished, so that work that is enqueued afterwards on any stream finds them
 * done. `stream` is not used yet: a later version may enqueue the wait there. Errors: as ta_move_query, TA_E_UNSUPPORTED also
 * on a CPU. */
TA_API ta_status ta_x_move_stream_wait(const ta_kv_pool* pool, ta_ticket ticket, ta_stream stream, ta_error* err);

/* What a rank of a local group does wrong, for tests: ta_group_options.fault. */
typedef int32_t ta_x_fault;
enum ta_x_fault_code {
    TA_X_FAULT_NONE = 0,
    TA_X_FAULT_DROP = 1,      /* the message is lost; of a write nothing is written */
    TA_X_FAULT_DELAY = 2,     /* it comes `detail` milliseconds later, and those behind it, too */
    TA_X_FAULT_DUPLICATE = 3, /* the message comes twice */
    TA_X_FAULT_REORDER = 4,   /* the message comes 50 ms later, those behind it before */
    TA_X_FAULT_CORRUPT = 5,   /* bit `detail` of the message or of what is written, modulo its length, is flipped */
    TA_X_FAULT_CUT = 6,       /* the message, or what is written, ends before byte `detail`, modulo its length */
    TA_X_FAULT_KILL = 7       /* from the action on the rank sends, writes and receives nothing, as if it had been killed */
};
typedef struct ta_x_group_fault {
    uint32_t struct_size;
    ta_x_fault kind;
    uint64_t
        action; /* the action that goes wrong, from 1: messages of this rank but for heartbeats, and its writes of blocks */
    uint64_t detail;
} ta_x_group_fault;

#ifdef __cplusplus
}
#endif
#endif /* TURBOATTENTION_EXPERIMENTAL_H */
