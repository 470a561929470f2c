/* TurboAttention: functions that may change or go between minor versions. SPDX-License-Identifier: Apache-2.0
 * The conventions of turboattention.h hold. Functions and structs that prove useful move there, without the x in their
 * names. */
#ifndef TURBOATTENTION_EXPERIMENTAL_H
#define TURBOATTENTION_EXPERIMENTAL_H

#include "turboattention.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Describes one block of a sequence. */
typedef struct ta_x_block_info {
    uint32_t struct_size;
    /* 8: token block. 4, or 2 if no head's K or V has 4: channel block; K or V of other heads may have 8. 2: also a low block.
     * A pool with low blocks has no channel blocks of 2 bits, since falling_precision is for pools of 8 and of 4 bits. The
     * trailer in the slot also names the kind. */
    uint32_t bits;
    uint32_t tokens;     /* 1..64 that belong to the sequence */
    uint32_t owners;     /* sequences that share it */
    uint64_t bytes;      /* of the slot, trailer included */
    uint64_t content_id; /* the identity that its hashes bind */
    uint64_t trailer_offset;
} ta_x_block_info;

/* Describes the block and, if `buffer` is not NULL, copies the slot byte for byte as docs/FORMAT.md specifies it. In a block of
 * fewer than 64 tokens the bytes of the missing tokens are unspecified.
 * Errors: TA_E_STALE, TA_E_INVALID (block beyond the sequence, buffer smaller than info->bytes), TA_E_STATE (it was dropped),
 * TA_E_BUSY, TA_E_MEMORY, of a block on disk TA_E_IO and TA_E_CORRUPT, on a GPU TA_E_DEVICE. */
TA_API ta_status ta_x_seq_block(const ta_kv_pool* pool, ta_seq seq, uint64_t block, ta_x_block_info* info, void* buffer,
                                uint64_t buffer_bytes, ta_error* err);

/* Writes the values that attention sees: the dequantized K and V of tokens [first, first + tokens) of one layer, for checks and
 * exports.
 *   k, v   [tokens, kv_heads, head_dim] and [tokens, kv_heads, v_head_dim] F32, contiguous, each may be NULL; K is rotated back
 *          and has its offset added again
 * Errors: TA_E_STALE, TA_E_INVALID (range, layer), TA_E_STATE (a block was dropped, or the layer's window has passed it), TA_E_BUSY,
 * TA_E_MEMORY, of a block on disk TA_E_IO and TA_E_CORRUPT, on a GPU TA_E_DEVICE. */
TA_API ta_status ta_x_seq_dequantize(const ta_kv_pool* pool, ta_seq seq, uint32_t layer, int64_t first, int64_t tokens,
                                     float* k, float* v, ta_error* err);

/* Writes the values by which TA_EVICT_ATTENTION decides: the attention that blocks [first, first + n) got in the layers that
 * steps observed, faded until now. On a GPU it waits for the steps that have ended so far.
 *   mass   [n] F32
 * Errors: TA_E_STALE, TA_E_INVALID (range), TA_E_UNSUPPORTED (a pool of another policy), TA_E_BUSY. */
TA_API ta_status ta_x_seq_attention(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, float* mass, ta_error* err);

/* The engine that copies blocks between a GPU and host memory. Copy engines leave the multiprocessors alone but take microseconds
 * for each piece of memory; a kernel is faster for small blocks and keeps some of the multiprocessors from other kernels.
 * TA_X_MOVE_ROUTE_AUTO: if somebody waits for blocks, those below a measured size go by kernel; blocks that leave in the
 * background or are prefetched, and larger ones, go by copy engine. */
typedef int32_t ta_x_move_route;
enum ta_x_move_route_code { TA_X_MOVE_ROUTE_AUTO = 0, TA_X_MOVE_ROUTE_COPY_ENGINE = 1, TA_X_MOVE_ROUTE_KERNEL = 2 };

/* Settings of tiers whose defaults were right in all measurements so far: ta_tier_options.tuning. Copied. */
typedef struct ta_x_tier_tuning {
    uint32_t struct_size;
    ta_x_move_route route; /* between a GPU and the host; default: measured when the context's first such pool is created */
    /* The most bytes of the device budget that a step may take for staging, if they are free; default: an eighth of the
     * budget. */
    uint64_t staging_bytes;
    int32_t attention_half_life; /* of weights under TA_EVICT_ATTENTION, in steps of all plans of the pool; default 128 */
    /* Under TA_EVICT_ATTENTION: a step observes one layer in so many, and the steps of a plan observe the layers in turn.
     * Captured calls always observe layers 0, attention_layers, 2 * attention_layers and so on. A number above the pool's
     * layers counts as their number, so every step observes one layer. Default 8 on a GPU, where decode takes longer in an
     * observed layer (docs/tiers.md); 1, all layers, on a CPU. */
    int32_t attention_layers;
} ta_x_tier_tuning;

/* A fault that a rank of a local group injects, for tests: ta_group_options.fault. */
typedef int32_t ta_x_fault;
enum ta_x_fault_code {
    TA_X_FAULT_NONE = 0,
    TA_X_FAULT_DROP = 1,      /* the message is lost; of a write nothing is written */
    TA_X_FAULT_DELAY = 2,     /* the message and those behind it come `detail` milliseconds later */
    TA_X_FAULT_DUPLICATE = 3, /* the message comes twice */
    TA_X_FAULT_REORDER = 4,   /* the message comes 50 ms later, after messages that were behind it */
    TA_X_FAULT_CORRUPT = 5,   /* bit `detail` of the message or of what is written, modulo its length, is flipped */
    TA_X_FAULT_CUT = 6,       /* the message, or what is written, ends before byte `detail`, modulo its length */
    TA_X_FAULT_KILL = 7       /* from this action on the rank sends, writes and receives nothing, as if it were killed */
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
    /* Device memory that this rank lends when it is not the root: for two rounds with their results, on a GPU also for what
     * ta_attend_dense needs for a round. Default 1 GiB. The root takes as much for each other rank; there it must hold three
     * rounds of results and one of Q, K and V. The memory is kept for later calls until the group is destroyed. */
    uint64_t workspace_bytes;
    const uint32_t*
        rank_heads; /* at the root: [ranks] how many kv heads each rank attends to, itself included, in the order of the
                                   ranks; they add up to k's heads. NULL: evenly. NULL elsewhere */
} ta_x_scatter_options;

/* Counters and times of one rank in such a call. Times are in nanoseconds of the caller's clock. */
typedef struct ta_x_scatter_info {
    uint32_t struct_size;
    uint32_t heads;           /* kv heads that this rank attended to */
    uint32_t rounds;          /* number of rounds for these */
    uint32_t heads_per_round; /* kv heads of a round; the last round has the rest */
    uint64_t bytes_sent;      /* to other ranks, and from them */
    uint64_t bytes_received;
    int64_t pack_ns;         /* at the root: gathering heads and scattering results, for all other ranks */
    int64_t send_ns;         /* writing to other ranks: at the root Q, K and V, elsewhere results */
    int64_t longest_send_ns; /* of one round */
    int64_t first_wait_ns;   /* elsewhere: until the first round was there */
    int64_t wait_ns; /* elsewhere: for later rounds, while nothing was attended to; at the root: its threads, one for each
                                other rank, for rounds to be attended to elsewhere */
    int64_t total_ns;
} ta_x_scatter_info;

/* All ranks of a group compute ta_attend_dense over tensors that one rank, the root, has (DistrAttention, section 4.7). Every
 * rank calls. The root keeps its share of the kv heads; the other ranks get theirs from it in rounds. Two rounds are in work:
 * Q, K and V of the next round are on their way while one is attended to. Results go back into the root's tensors. The heads
 * are independent: `out` and `lse` have the bits that ta_attend_dense gives on the root. INT8 variants on a GPU are an
 * exception: there a call's amount of work decides how keys are cut into parts, so the bits are those of one call for each
 * round. All ranks must be CPUs, or GPUs of one compute capability.
 *   q, k, v, out, lse, options   at the root: as those of ta_attend_dense, on the device of the root's rank. NULL elsewhere
 *   root                         the same at all ranks
 *   scatter                      may be NULL: defaults
 *   info                         filled in if the call succeeds; may be NULL
 * Synchronous at every rank. At the root it returns when `out` and `lse` are complete, on a GPU too. There the inputs must be
 * complete on options.stream: the call's work is enqueued on that stream, and on streams of the library that wait for what was
 * there before. At other ranks it returns when the root has the results of all ranks but its own. Between two GPUs bytes go
 * directly if ta_group_get_peer says TA_ROUTE_GPU_MEMORY or TA_ROUTE_NCCL; otherwise they go through host memory, where they
 * are hashed and checked.
 * A rank is in one such call at a time; other calls on the group may run beside it. Wrong arguments are refused before any
 * other rank hears of the call, and the other ranks still wait for this one. After that each wait for another rank lasts at
 * most operation_ms, in which that rank must attend to a round. If the call fails at one rank while it runs, it fails at all
 * ranks that are still in it, and err->rank says which rank is at fault. Then `out` and `lse` are unspecified, the group goes
 * on, and the call may be made again at all ranks. If a rank calls when the others have already failed, it waits for their next
 * call. When a rank dies or leaves, the group ends, as always, with TA_E_PEER_LOST.
 * Errors: as ta_attend_dense; on a GPU values that are not finite fail this call, not the next, under TA_NONFINITE_REJECT.
 * TA_E_INVALID also for root and scatter, and for tensors or options that are given at a rank other than the root.
 * TA_E_MISMATCH (another rank began a call with another root or tag, or is on another kind of device), TA_E_TIMEOUT (a rank did
 * not call, or did not go on),
 * TA_E_BUSY (this rank is in such a call), TA_E_MEMORY (also: a rank lends too little for two rounds of one kv head; err->bytes
 * says how much is needed), TA_E_LIMIT (threads), TA_E_CORRUPT (bytes came damaged), TA_E_STATE (the group is not ready; a
 * stream that is captured), and what ta_group_health says. */
TA_API ta_status ta_x_group_attend_dense(ta_group* group, const ta_tensor* q, const ta_tensor* k, const ta_tensor* v,
                                         const ta_tensor* out, float* lse, const ta_dense_options* options, uint32_t root,
                                         const ta_x_scatter_options* scatter, ta_x_scatter_info* info, ta_error* err);

#ifdef __cplusplus
}
#endif
#endif /* TURBOATTENTION_EXPERIMENTAL_H */
