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

#ifdef __cplusplus
}
#endif
#endif /* TURBOATTENTION_EXPERIMENTAL_H */
