/* TurboAttention: functions that may change or go between minor versions. SPDX-License-Identifier: Apache-2.0
 * The conventions of turboattention.h hold. Functions and structs that prove themselves move there under their names without the x. */
#ifndef TURBOATTENTION_EXPERIMENTAL_H
#define TURBOATTENTION_EXPERIMENTAL_H

#include "turboattention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Describes one block of a sequence. */
typedef struct ta_x_block_info {
    uint32_t struct_size;
    /* 8: token block; 4 or, if no head's K or V has 4, 2: channel block, in which other heads may have 8; 2: low block. A pool that
     * has low blocks has no channel blocks of 2 bits: falling_precision is for pools of 8 and of 4. The trailer in the slot says
     * which kind it is, too. */
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
 *   k, v   [tokens, kv_heads, head_dim] and [tokens, kv_heads, v_head_dim] F32, contiguous, each may be NULL; K is rotated back
 *          and has its offset added again
 * Errors: TA_E_STALE, TA_E_INVALID (range, layer), TA_E_STATE (a block was dropped, or the layer's window has passed it), TA_E_BUSY,
 * TA_E_MEMORY, of a block on disk TA_E_IO and TA_E_CORRUPT, on a GPU TA_E_DEVICE. */
TA_API ta_status ta_x_seq_dequantize(const ta_kv_pool* pool, ta_seq seq, uint32_t layer, int64_t first, int64_t tokens,
                                     float* k, float* v, ta_error* err);

/* Writes what TA_EVICT_ATTENTION goes by: the attention that blocks [first, first + n) got in the layers that steps observed,
 * faded until now. On a GPU it waits for the steps that were ended so far.
 *   mass   [n] F32
 * Errors: TA_E_STALE, TA_E_INVALID (range), TA_E_UNSUPPORTED (a pool of another policy), TA_E_BUSY. */
TA_API ta_status ta_x_seq_attention(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, float* mass, ta_error* err);

/* The engine that copies blocks between a GPU and host memory. Copy engines leave the multiprocessors alone but take microseconds
 * for each piece of memory; a kernel is faster for small blocks and keeps some of the multiprocessors from other kernels.
 * TA_X_MOVE_ROUTE_AUTO: the kernel for blocks below a size that is measured, if somebody waits for them; blocks that leave in the
 * background or are prefetched go by copy engine. */
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

/* A fault that a rank of a local group injects, for tests: ta_group_options.fault. */
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

/* How ta_x_group_attend_dense shares its heads out. A kv head goes with its query heads. */
typedef struct ta_x_scatter_options {
    uint32_t struct_size;
    uint32_t
        heads_per_round; /* at the root: kv heads that a rank gets at once, at most; default: as many as make Q, K and V of a
                                 round 384 MiB and leave each rank four rounds; 0 elsewhere */
    uint64_t tag;        /* the same at all ranks, any number: tells calls apart */
    /* Memory of its device that this rank lends when it is not the root, for two rounds with their results, on a GPU plus what
     * ta_attend_dense needs for a round; default 1 GiB. The root takes as much for each other rank, and three rounds of results and
     * one of Q, K and V are enough. It is kept for later calls until the group is destroyed. */
    uint64_t workspace_bytes;
    const uint32_t*
        rank_heads; /* at the root: [ranks] how many kv heads each rank attends to, itself included, in the order of the
                                   ranks; they add up to k's heads. NULL: evenly. NULL elsewhere */
} ta_x_scatter_options;

/* Counters and times of one rank in such a call. Times are in nanoseconds of the caller's clock. */
typedef struct ta_x_scatter_info {
    uint32_t struct_size;
    uint32_t heads;           /* kv heads that this rank attended to */
    uint32_t rounds;          /* in so many rounds */
    uint32_t heads_per_round; /* of so many kv heads, the last one of the rest */
    uint64_t bytes_sent;      /* to other ranks, and from them */
    uint64_t bytes_received;
    int64_t pack_ns;         /* at the root: copying heads together, and results apart, for all other ranks */
    int64_t send_ns;         /* writing to other ranks: at the root Q, K and V, elsewhere results */
    int64_t longest_send_ns; /* of one round */
    int64_t first_wait_ns;   /* elsewhere: until the first round was there */
    int64_t wait_ns; /* elsewhere: for later rounds, while nothing was attended to; at the root: its threads, one for each
                                other rank, for rounds to be attended to elsewhere */
    int64_t total_ns;
} ta_x_scatter_info;

/* ta_attend_dense over the heads of tensors that one rank has, by all ranks of a group (DistrAttention, section 4.7). Every rank
 * calls. The root keeps its share of the kv heads; the others get theirs from it in rounds, two of which are in work: Q, K and V of
 * the next one are on their way while one is attended to, and results go back into the root's tensors. The heads are independent:
 * `out` and `lse` have the bits that ta_attend_dense gives on the root; of INT8 variants on a GPU, which cut keys into parts by how much
 * work a call has, those of one call for each round. All ranks are CPUs, or GPUs of one compute capability.
 *   q, k, v, out, lse, options   at the root: as those of ta_attend_dense, on the device of the root's rank. NULL elsewhere
 *   root                         the same at all ranks
 *   scatter                      may be NULL: defaults
 *   info                         filled in where the call succeeds; may be NULL
 * Synchronous everywhere. At the root it returns when `out` and `lse` are complete, on a GPU too, where the inputs have to be complete
 * on options.stream: the call's work is enqueued there and, behind what was there before, on streams of the library's own. Elsewhere it
 * returns when the root has the results of all ranks but its own. Between two GPUs bytes go directly where ta_group_get_peer says
 * TA_ROUTE_GPU_MEMORY or TA_ROUTE_NCCL, otherwise through host memory, where they are hashed and checked.
 * A rank is in one such call at a time; other calls on the group may run beside it. Arguments that are wrong are refused before any
 * other rank hears of the call, which goes on to wait for this one. Then each wait for another rank lasts operation_ms at most, in
 * which it has to attend to a round. A call that fails at one rank in its course fails at all of them that are still in it,
 * err->rank says whose fault it was; `out` and `lse` are unspecified then, the group goes on, and the call may be made again at all
 * ranks. A rank that comes when the others have failed already waits for their next call. When a rank dies or leaves, the group
 * ends, as always, with TA_E_PEER_LOST.
 * Errors: as ta_attend_dense; on a GPU values that are not finite fail this call, not the next, under TA_NONFINITE_REJECT.
 * TA_E_INVALID also for root and scatter, and for tensors or options that are given elsewhere than at the root. TA_E_MISMATCH (another
 * rank began a call with another root or tag, or is on another kind of device), TA_E_TIMEOUT (a rank did not call, or did not go on),
 * TA_E_BUSY (this rank is in such a call), TA_E_MEMORY (also: a rank lends too little for two rounds of one kv head; err->bytes says what
 * that takes), TA_E_LIMIT (threads), TA_E_CORRUPT (bytes came damaged), TA_E_STATE (the group is not ready; a stream that is captured),
 * and what ta_group_health says. */
TA_API ta_status ta_x_group_attend_dense(ta_group* group, const ta_tensor* q, const ta_tensor* k, const ta_tensor* v,
                                         const ta_tensor* out, float* lse, const ta_dense_options* options, uint32_t root,
                                         const ta_x_scatter_options* scatter, ta_x_scatter_info* info, ta_error* err);

#ifdef __cplusplus
}
#endif
#endif /* TURBOATTENTION_EXPERIMENTAL_H */
