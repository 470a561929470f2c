/* TurboAttention: attention over very long, compressed KV caches.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The folder docs/ that comments here speak of is installed under share/doc/TurboAttention.
 *
 * Keys and values are kept as INT8/INT4/INT2 pages and attention runs on the integer codes. One decode step:
 *
 *     ta_context* ctx = NULL;  ta_kv_pool* pool = NULL;  ta_plan* plan = NULL;  ta_seq seq = 0;
 *     ta_kv_pool_options po = {.struct_size = sizeof po, .layers = 32, .kv_heads = 8, .head_dim = 128,
 *                              .bits = 4, .budget_bytes = 4ull << 30};
 *     ta_context_create(NULL, &ctx, &err);
 *     ta_kv_pool_create(ctx, &po, &pool, &err);
 *     ta_plan_create(pool, NULL, &plan, &err);
 *     ta_seq_create(pool, &seq, &err);
 *     for (;;) {
 *         int32_t n_new = 1;                                         // or the whole prompt at first
 *         ta_plan_begin(plan, 1, &seq, &n_new, NULL, NULL, &err);    // reserves memory, fixes the work
 *         for (uint32_t layer = 0; layer < 32; ++layer) {
 *             ta_append(plan, layer, &k, &v, &err);                  // K, V of the new tokens
 *             ta_attend(plan, layer, &q, &out, NULL, NULL, &err);    // the new tokens attend to all they may see
 *         }
 *         ta_plan_end(plan, NULL, &err);                             // the tokens now belong to the sequence
 *     }
 *
 * Terms:
 *  - A block is 64 tokens of a sequence in all layers; a page is one layer of a block. A block is full when it has all 64
 *    tokens; before that it is open.
 *  - A token block has INT8 codes with a scale for each token: open blocks, sink blocks, all blocks of an 8-bit pool. A channel
 *    block is any other full block. In it K and V of each head have bits of their own: 4 or 2 with a scale for each channel, or
 *    8 as in a token block. A low block has 2 bits and had more before (ta_tier_options.falling_precision).
 *  - Sink blocks are the first blocks of a sequence, which stay at 8 bits (ta_numerics.sink_blocks). The learned sinks of
 *    ta_attend_options are something else: logits.
 *
 * Conventions, valid for every call unless it says otherwise:
 *  - Status. A call returns a ta_status and, when `err` is not NULL, fills it in (on success too: code TA_OK, empty text).
 *  - A call that fails changes nothing, writes none of its outputs and leaves every object usable. One exception:
 *    ta_kv_pool_write_metrics gives the size that it needs when the buffer is too small.
 *  - Errors. Any call may return TA_E_INVALID (a NULL that is not allowed, an unknown enum value), TA_E_ALIGNMENT (a pointer is
 *    not aligned to its type), TA_E_STRUCT (struct_size), TA_E_CLOSED, TA_E_FORKED, TA_E_MEMORY (for its own bookkeeping),
 *    TA_E_INTERNAL; a call on a plan or a calibrator also TA_E_BUSY (Threads); a call that needs the GPU also TA_E_DEVICE and
 *    TA_E_DEVICE_LOST. The lists below name what a call may return besides.
 *  - Enums. Values are passed as int32_t typedefs (ta_tier); their constants are those of the enum beside it, whose name ends in
 *    _code (enum ta_tier_code).
 *  - Structs. The caller sets `struct_size = sizeof(the struct)` and zeroes the rest; a zero field means its default. A shorter
 *    struct of an older header is accepted if it ends at the end of a field; a longer one is accepted if the unknown tail is
 *    zero. The library fills in output structs up to their struct_size.
 *  - Ownership. Create gives the caller a handle that it passes to the matching destroy once. Handles may be destroyed in any
 *    order, children keep their parents alive; destroy(NULL) does nothing. Strings and arrays passed in are copied.
 *  - Release, destroy and close do not fail because something is in use: the id or handle is stale at once, and the memory is
 *    freed with its last user.
 *  - Threads. Calls on different handles, and calls on the same ta_context, ta_kv_pool or ta_group, may overlap. A ta_plan or a
 *    ta_calibrator is used by one thread at a time: a call on it while another runs gives TA_E_BUSY. No handle may be
 *    destroyed while a call on it runs.
 *  - No call is a cancellation point of pthread_cancel (docs/threading.md).
 *  - fork(). In a child process every call on an inherited handle returns TA_E_FORKED; destroy does nothing there.
 *  - After a pool is closed, every call on it and its plans returns TA_E_CLOSED, except ta_plan_abort of an open plan. After a
 *    GPU is lost, every call that needs it returns TA_E_DEVICE_LOST.
 *  - Callback sets (ta_allocator, ta_log_sink, ta_progress, ta_sink, ta_block_store) are copied. When the library does not need
 *    a set any more, it calls the set's release(user), unless it is NULL, exactly once: after the last of the set's other
 *    functions has returned, from any thread, and also if the call that was given the set fails. release is not called in two
 *    cases: struct_size of the set, or of the struct that points to it, is that of no header (TA_E_STRUCT; then nothing else of
 *    the set is read, and no function of it is called); in a child process, for sets of its parent. A function of a set must
 *    not unwind, and must not call this library unless its comment allows it.
 *  - Nothing here prints, exits, aborts, installs signal handlers or throws.
 */
#ifndef TURBOATTENTION_H
#define TURBOATTENTION_H

#include <stddef.h>
#include <stdint.h>

#define TA_VERSION_MAJOR 0
#define TA_VERSION_MINOR 2
#define TA_VERSION_PATCH 0
#define TA_ABI_VERSION 1 /* the SONAME; grows when a program built before needs to be built again */

#if defined(__GNUC__)
#define TA_API __attribute__((visibility("default")))
#else
#define TA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------ status and errors */

typedef int32_t ta_status; /* TA_OK or one of TA_E_*; the family is the value >> 8 */
enum ta_status_code {
    TA_OK = 0,
    /* 0x01xx: the arguments are wrong; the same call will fail again */
    TA_E_INVALID = 0x0101,     /* a null pointer, a value outside its range, an unknown enum value */
    TA_E_STRUCT = 0x0102,      /* struct_size is that of no header's struct, or an unknown tail is not zero */
    TA_E_SHAPE = 0x0103,       /* a tensor's shape or strides do not fit the call */
    TA_E_DTYPE = 0x0104,       /* a tensor's element type is not accepted here */
    TA_E_ALIGNMENT = 0x0105,   /* a pointer is not aligned to its type */
    TA_E_UNSUPPORTED = 0x0106, /* a valid request that this build or device cannot serve; the text says what it can */
    /* 0x02xx: not now: the object is in another state */
    TA_E_STATE = 0x0201,     /* wrong order of calls: the text says which call belongs first */
    TA_E_BUSY = 0x0202,      /* in use: the sequence (an open plan), the file, the plan; or moves take a step's blocks */
    TA_E_STALE = 0x0203,     /* the id (sequence, namespace, ticket) was released, or was never given out */
    TA_E_CLOSED = 0x0204,    /* the pool is closed */
    TA_E_FORKED = 0x0205,    /* the handle was made by the parent process */
    TA_E_CANCELLED = 0x0206, /* a callback of the caller asked to stop; a rank of a group cancelled */
    /* 0x03xx: something ran out */
    TA_E_MEMORY = 0x0301,    /* the allocator returned NULL */
    TA_E_TIER_FULL = 0x0302, /* no room: in the pool's byte budget for the new blocks, or on the disk for the file */
    /* A maximum: ta_kv_pool_options.max_sequences, 65536 namespaces, a namespace's quota, 2^40 tokens of a sequence, 2^31 - 1 query
     * tokens of a step, 4096 loads from a pool's stores that are not finished; on a GPU 2^30 tokens of a sequence, of a step and of
     * a dense call. Or no thread could be started. The text says which. */
    TA_E_LIMIT = 0x0303,
    /* 0x04xx: the data is wrong */
    TA_E_NONFINITE = 0x0401, /* NaN, Inf or a magnitude above 2^56 in q, k or v; an lse to be merged that is NaN or +inf */
    TA_E_CORRUPT = 0x0402,   /* a page does not match its hash; a file is damaged, or of something else */
    /* 0x05xx: the GPU */
    TA_E_DEVICE = 0x0501,      /* a CUDA call failed; the text has CUDA's reason */
    TA_E_DEVICE_LOST = 0x0502, /* an earlier error ended the GPU for this process; every call that needs it returns this */
    /* 0x06xx: files */
    TA_E_IO = 0x0601, /* reading or writing a file failed, or did not end in time; the text has the system's reason */
    /* 0x07xx: the other ranks of a group; ta_error.rank says which */
    TA_E_PEER_LOST = 0x0701, /* a rank died, left or was silent, or a message was lost: the group has ended */
    TA_E_TIMEOUT = 0x0702,   /* a rank did not do its part in time */
    TA_E_MISMATCH = 0x0703,  /* ranks asked for different things: the number of ranks, pools that cannot exchange blocks */
    /* 0x0fxx */
    TA_E_INTERNAL = 0x0f01 /* a defect of this library; please report the text */
};

/* Describes where and why a call failed. Fields that do not apply are -1. Owned by the caller; may be NULL in every call. It has no
 * struct_size: its layout is final from ABI 1 on. */
typedef struct ta_error {
    ta_status code;
    int32_t layer;     /* model layer */
    int32_t head;      /* kv head, or query head when the text says so */
    int32_t argument;  /* position of the wrong argument of the call, from 0; if a field is wrong, that of its struct */
    int32_t tier;      /* a ta_tier: the one that is full, or has the block or file at which the call failed */
    int32_t rank;      /* of a group: whose fault it is */
    int64_t sequence;  /* index into the call's list of sequences; in calls on a plan into the list of its begin */
    int64_t block;     /* index of the 64-token block within the sequence */
    int64_t token;     /* row of the tensor that has a bad value, from 0 */
    int64_t bytes;     /* how many are lacking (TA_E_TIER_FULL, a quota), or were refused (TA_E_MEMORY) */
    char message[256]; /* one English sentence, null-terminated UTF-8 */
} ta_error;

/* The name of a status, such as "TA_E_INVALID"; "unknown" for any other value. Never NULL; static storage. */
TA_API const char* ta_status_name(ta_status status);

/* ------------------------------------------------------------------------------------------------ version, build info */

/* TA_VERSION_MAJOR * 10000 + MINOR * 100 + PATCH of the library that is loaded. */
TA_API uint32_t ta_version(void);
/* TA_ABI_VERSION of the library that is loaded. */
TA_API uint32_t ta_abi_version(void);
/* One line: version, compiler, what was built in, such as "turboattention 0.2.0; compiler: 12.2.0; cpu: scalar avx2 avx-vnni
 * avx512-vnni amx-int8; cuda: no" (without the line break). Never NULL; static storage. */
TA_API const char* ta_build_info(void);

/* ------------------------------------------------------------------------------------------------ enums */

typedef int32_t ta_dtype;
enum ta_dtype_code { TA_DTYPE_F16 = 1, TA_DTYPE_BF16 = 2, TA_DTYPE_F32 = 3 };

typedef int32_t ta_device_kind;
enum ta_device_kind_code { TA_DEVICE_CPU = 0, TA_DEVICE_CUDA = 1 };

typedef int32_t ta_cpu_isa; /* which CPU kernels run; all give the same integers */
enum ta_cpu_isa_code {
    TA_CPU_ISA_AUTO = 0,
    TA_CPU_ISA_SCALAR = 1,
    TA_CPU_ISA_AVX2 = 2,
    TA_CPU_ISA_AVX_VNNI = 3,
    TA_CPU_ISA_AVX512 = 4,
    TA_CPU_ISA_AMX = 5 /* AMX-INT8 beside AVX-512; Linux is asked for the tiles, see docs/threading.md */
};

typedef int32_t ta_log_level;
enum ta_log_level_code { TA_LOG_ERROR = 1, TA_LOG_WARNING = 2, TA_LOG_INFO = 3, TA_LOG_DEBUG = 4 };

typedef int32_t ta_switch; /* a setting that a profile decides unless it is given */
enum ta_switch_code { TA_DEFAULT = 0, TA_ON = 1, TA_OFF = 2 };

/* Sets of numeric settings; docs/numerics.md has the table and the sources. */
typedef int32_t ta_profile;
enum ta_profile_code {
    TA_PROFILE_ACCURATE = 0, /* rotation, sink block, V token exponents, fractional zeros, V search, poly exp, 16-bit P */
    /* TurboAttention as published: page scales, universal buffer scale, SAS, 8-bit P, none of accurate's settings. It departs
     * from the paper in: scales per row of Q and of P, exact rescales, zero points, rounding (docs/numerics.md, section 9). */
    TA_PROFILE_PAPER = 1
};

/* Stage 1, float -> INT8 (docs/numerics.md): what shares one scale. */
typedef int32_t ta_granularity;
enum ta_granularity_code {
    /* PAGE; in profile accurate TOKEN for what stays at 8 bits; in ta_attend_dense the variant decides */
    TA_GRANULARITY_DEFAULT = 0,
    TA_GRANULARITY_TOKEN = 1, /* each token of a head (INT-FlashAttention, arXiv 2409.16997, section 3) */
    TA_GRANULARITY_PAGE = 2,  /* the 64 tokens of a head's page, if they arrive together (TurboAttention, FlashQ) */
    TA_GRANULARITY_TENSOR = 3 /* all tokens of a sequence's head; ta_attend_dense's V only */
};

/* The scale of tokens that join a page that is not full. */
typedef int32_t ta_open_scale;
enum ta_open_scale_code {
    TA_OPEN_SCALE_DEFAULT = 0,
    TA_OPEN_SCALE_TOKEN = 1, /* each token has its own */
    /* One scale per page. The page's first token that is not zero fixes it: it follows from the largest magnitude of the
     * sequence's tokens up to the end of that step. Larger values that join the page later are clamped (FlashQ). Whole pages
     * whose granularity is TOKEN take it, too. After a truncation, the truncated tokens have no effect on pages that begin
     * later. In the page that was cut, values that those tokens had coarsened or clamped stay so. Token blocks have 512 bytes
     * more for each head and layer. */
    TA_OPEN_SCALE_UNIVERSAL = 2
};

/* The exponential in P. The rescale of earlier pages always uses the exact one. */
typedef int32_t ta_exp;
enum ta_exp_code {
    TA_EXP_DEFAULT = 0,
    TA_EXP_POLY = 1,  /* 2^-f as a cubic that is exact at both ends, no threshold; max. relative error 1.03e-4 */
    TA_EXP_EXACT = 2, /* within 2 ulp */
    TA_EXP_SAS = 3    /* TurboAttention's sparse activated softmax: table x cubic, 0 below -6 */
};

/* Precision of the probabilities that multiply V. Each (query row, page) has one scale unless it says otherwise. */
typedef int32_t ta_p;
enum ta_p_code {
    TA_P_DEFAULT = 0,
    TA_P_AUTO = 1,           /* U16 up to 16 rows (query tokens x query heads per kv head), U8 beyond */
    TA_P_U8 = 2,             /* 255 levels */
    TA_P_U16 = 3,            /* 65535 levels */
    TA_P_S8_127 = 4,         /* 127 levels, as INT-FlashAttention's R */
    TA_P_S8_119 = 5,         /* 119 levels, as printed in TurboAttention */
    TA_P_S8_127_RUNNING = 6, /* 127 levels of the running maximum, INT-FlashAttention as printed: wrong on flat contexts */
    /* 255 levels of the running maximum: probabilities below 1/500 of a row's largest one are lost, even if there are many. The
     * prefill kernel of sm_90 computes it with the accuracy of U8. */
    TA_P_U8_RUNNING = 7
};

/* Handling of NaN, Inf and magnitudes above 2^56 in q, k, v. On a GPU such values in ta_attend's q are replaced and not
 * reported. */
typedef int32_t ta_nonfinite;
enum ta_nonfinite_code {
    TA_NONFINITE_DEFAULT = 0, /* reject */
    TA_NONFINITE_REJECT = 1,  /* TA_E_NONFINITE, and the element is named; on a GPU it becomes 0, and a later call fails once */
    TA_NONFINITE_SATURATE = 2 /* NaN becomes 0, the others +-2^56 or the largest finite value of the element type; counted */
};

typedef int32_t ta_mask;
enum ta_mask_code {
    TA_MASK_CAUSAL = 0, /* query i of n_q sees keys j <= i + n_k - n_q */
    TA_MASK_FULL = 1    /* every query sees every key */
};

/* ------------------------------------------------------------------------------------------------ tensors */

/* A view of [tokens, heads, head_dim] elements in the context's memory, owned by the caller. The innermost stride is 1.
 * ta_tensor_make and ta_tensor_make_strided below fill one in.
 *
 * Strides are in elements and at least head_dim in magnitude; they may be negative. The stride of an axis of one element is not
 * read. If both strides are 0, as in a zeroed struct, the tensor is dense, with strides heads * head_dim and head_dim. If only
 * one stride is 0, on an axis of more than one element, the tensor is refused (TA_E_SHAPE), inputs too: broadcast views have
 * such strides (expand of PyTorch, broadcast_to of NumPy); copy their elements apart first.
 *
 * Calls take const ta_tensor*: the struct is only read. `data` of an input is only read; `data` of an output (`out`) is
 * written. */
typedef struct ta_tensor {
    uint32_t struct_size;
    ta_dtype dtype;
    void* data;           /* aligned to its element; may be NULL when tokens is 0 */
    int64_t tokens;       /* 0 and up */
    int64_t heads;        /* 1 and up */
    int64_t head_dim;     /* channels */
    int64_t stride_token; /* between tokens */
    int64_t stride_head;  /* between heads */
} ta_tensor;

#define TA_STRIDE_BROADCAST INT64_MIN /* an intended stride of 0: always refused on an axis of more than one element */

/* A view with these strides. A stride of 0 means 0, never a default. `data` of an input may be const. */
static inline ta_tensor ta_tensor_make_strided(const void* data, ta_dtype dtype, int64_t tokens, int64_t heads,
                                               int64_t head_dim, int64_t stride_token, int64_t stride_head) {
    ta_tensor t;
    t.struct_size = sizeof(ta_tensor);
    t.dtype = dtype;
#ifdef __cplusplus
    t.data = const_cast<void*>(data);
#else
    t.data = (void*)(uintptr_t)data;
#endif
    t.tokens = tokens;
    t.heads = heads;
    t.head_dim = head_dim;
    t.stride_token = stride_token != 0 ? stride_token : TA_STRIDE_BROADCAST;
    t.stride_head = stride_head != 0 ? stride_head : TA_STRIDE_BROADCAST;
    return t;
}

/* A dense one: [tokens, heads, head_dim] without gaps. */
static inline ta_tensor ta_tensor_make(const void* data, ta_dtype dtype, int64_t tokens, int64_t heads, int64_t head_dim) {
    /* If the shape overflows, both strides are 0, and the library refuses the shape. */
    const int fits = heads > 0 && head_dim > 0 && heads <= INT64_MAX / head_dim;
    ta_tensor t = ta_tensor_make_strided(data, dtype, tokens, heads, head_dim, 1, 1);
    t.stride_token = fits ? heads * head_dim : 0;
    t.stride_head = fits ? head_dim : 0;
    return t;
}

/* ------------------------------------------------------------------------------------------------ context */

/* A CUDA stream: cudaStream_t and CUstream are this type. NULL is the legacy default stream. */
typedef struct CUstream_st* ta_stream;

typedef struct ta_context ta_context;

/* Of a callback set: the library does not use the set any more. See Callback sets above. */
typedef void (*ta_release_fn)(void* user);

/* Provides host memory. Both functions are called from any thread; NULL means out of memory. The library zeroes memory before
 * it gives it back. The set is released with the context, after all memory was given back. */
typedef struct ta_allocator {
    uint32_t struct_size;
    void* (*allocate)(size_t bytes, size_t alignment, void* user); /* alignment: a power of two, at most 4096 */
    void (*deallocate)(void* ptr, size_t bytes, size_t alignment, void* user);
    void* user;
    ta_release_fn release; /* may be NULL */
} ta_allocator;

/* Called from any thread, never while a lock of the library is held. `message` lives for the call. */
typedef void (*ta_log_fn)(ta_log_level level, const char* message, void* user);

/* Receives the library's log messages. Released with the context. */
typedef struct ta_log_sink {
    uint32_t struct_size;
    ta_log_level level; /* most detailed level that is delivered; default TA_LOG_WARNING */
    ta_log_fn log;      /* NULL: none */
    void* user;
    ta_release_fn release; /* may be NULL */
} ta_log_sink;

typedef struct ta_context_options {
    uint32_t struct_size;
    ta_device_kind device;         /* TA_DEVICE_CUDA: an NVIDIA GPU from sm_80 on, in a build with CUDA */
    int32_t device_ordinal;        /* which GPU, as cudaSetDevice numbers them */
    int32_t threads;               /* 1..1024 including the calling one; default: CPUs this process may run on */
    ta_cpu_isa cpu_isa;            /* default: the best of this CPU; TA_E_UNSUPPORTED if the CPU lacks it */
    const ta_allocator* allocator; /* default: the C library. Serves pages and workspaces, not small bookkeeping */
    const ta_log_sink* log;        /* default: none */
} ta_context_options;

typedef struct ta_context_info {
    uint32_t struct_size;
    ta_device_kind device;
    int32_t threads;
    ta_cpu_isa cpu_isa;      /* the kernels in use */
    ta_cpu_isa cpu_isa_best; /* the best this CPU has */
    uint64_t bytes_in_use;   /* taken from the allocator and not given back: pages, workspaces of plans (docs/threading.md) */
    uint64_t bytes_peak;
    char device_name[64];
    char degraded[256];           /* what is missing here and why; empty when nothing is */
    int32_t device_ordinal;       /* the GPU; 0 on a CPU */
    int32_t compute_capability;   /* 90: sm_90; 0 on a CPU */
    uint64_t device_bytes_in_use; /* GPU memory of the context's pools, plans and dense calls */
    uint64_t device_bytes_peak;
} ta_context_info;

/* Creates a context: a device, its kernels and a pool of threads - 1 worker threads. `options` may be NULL for defaults.
 * On a GPU tensors lie in its memory (or in host memory registered with CUDA), the caller's current device is left as it is,
 * and append, attend, dense attention and merging enqueue work on a stream and return.
 * Errors: TA_E_INVALID (a value outside its range, no such GPU), TA_E_UNSUPPORTED (no CUDA in the build, no driver, too old a
 * GPU, instructions that this CPU lacks), TA_E_LIMIT (threads could not be started). */
TA_API ta_status ta_context_create(const ta_context_options* options, ta_context** out, ta_error* err);
/* Gives up the caller's handle. The context ends with its last pool, plan, calibrator and group. */
TA_API void ta_context_destroy(ta_context* context);
/* Fills in `info`. */
TA_API ta_status ta_context_get_info(const ta_context* context, ta_context_info* info, ta_error* err);
/* TA_OK, or TA_E_DEVICE_LOST once the GPU was lost. */
TA_API ta_status ta_context_health(const ta_context* context, ta_error* err);

/* ------------------------------------------------------------------------------------------------ pool */

typedef struct ta_kv_pool ta_kv_pool;

/* The numeric settings. All zero: profile `accurate`. Each setting can be changed alone, for ablation. */
typedef struct ta_numerics {
    uint32_t struct_size;
    ta_profile profile; /* decides every field below that is 0 */
    ta_granularity k_granularity;
    ta_granularity v_granularity;
    ta_open_scale open_scale;  /* accurate: TOKEN; paper: UNIVERSAL */
    ta_switch v_exponents;     /* a power-of-two scale per token of V, folded into P. accurate: on */
    ta_switch fractional_zero; /* zero points in 1/8 (4-bit) or 1/2 (2-bit) of an INT8 step, mean-preserving. accurate: on */
    ta_switch v_search;        /* the encoder searches V's scale and zero with the least squared error. accurate: on */
    ta_switch hadamard;        /* randomized Hadamard rotation of Q and K; head_dim 64, 128, 256. accurate: on where possible */
    /* Blocks at the start of a sequence that stay 8 bits, up to 2^20; -1: none. accurate: 1; paper: none. */
    int32_t sink_blocks;
    ta_exp exp; /* accurate: POLY; paper: SAS */
    ta_p p;     /* accurate: AUTO; paper: S8_119 */
    ta_nonfinite nonfinite;
    uint64_t hadamard_seed; /* which signs; part of the pool's fingerprint; default 11 */
    const float* k_offset;  /* [layers, heads, head_dim] subtracted from K, up to 2^56; NULL: none. LSE is not affected */
    /* The rotary embedding turns a bias in the K projection into pairs of K channels with a large part that turns evenly from
     * token to token. On: up to 8 such pairs a page are kept apart and added to the scores in fp32. accurate: on. It does not
     * help if positions jump or repeat within a page (docs/numerics.md, 4.7). */
    ta_switch k_turning;
    ta_switch k_search; /* v_search for K's 2-bit heads. accurate: on */
    /* Rounding to 4 or 2 bits shrinks values, and a search shrinks them more. On: steps and page scales are widened so that a
     * line fitted to the stored values over the INT8 values has slope 1 (docs/numerics.md, 4.9). accurate: on */
    ta_switch unit_slope;
    /* Bits of a query's codes against K of 8 bits, in decode (up to 16 query rows of a sequence and kv head): 8 or 15; 0:
     * default. With more rows, and against K of 4 and 2 bits, they are 8. accurate: 15; paper: 8. */
    uint32_t q_bits;
    /* On: a token's results have the same bits whether it comes in a decode, among drafts or in a chunk of a prompt, and
     * whatever else is in the step (docs/numerics.md, 4.11). Prompts take longer. Each token has its own scales, open_scale is
     * TOKEN and k_turning is off; other values of these settings are TA_E_INVALID. TA_E_UNSUPPORTED: token trees that branch,
     * TA_MASK_FULL, partitions; on a GPU also more than 16 query heads for each kv head, captured calls, TA_EVICT_ATTENTION. A
     * GPU does not stage. Default: off */
    ta_switch batch_invariant;
} ta_numerics;

/* Tiers in which blocks lie: docs/tiers.md. On a CPU the device tier is ordinary memory. */
typedef int32_t ta_tier;
enum ta_tier_code { TA_TIER_DEVICE = 0, TA_TIER_HOST = 1, TA_TIER_DISK = 2, TA_TIER_PEER = 3 /* between device and host */ };

/* State of a tier. Read-only: blocks in it can be read; the tier tries by itself to write again. */
typedef int32_t ta_tier_state;
enum ta_tier_state_code { TA_TIER_OK = 0, TA_TIER_READ_ONLY = 1, TA_TIER_FAILED = 2 };

/* Order in which a full tier evicts blocks. Sink blocks, open blocks and pinned blocks stay. Blocks that several sequences
 * share leave only if the others are not enough. */
typedef int32_t ta_eviction;
enum ta_eviction_code {
    TA_EVICT_LRU = 0,      /* blocks of the least recently used sequence, spread evenly over it; if blocks are dropped, its
                            * oldest ones. Use: a plan of the sequence, or a call that moves it to the device */
    TA_EVICT_PRIORITY = 1, /* blocks of the sequence of lowest ta_seq_set_priority; among equals as LRU */
    /* blocks with the least attention, of whatever sequence. A block's attention is its mean weight in a step, over the observed
     * layers, the query heads and the last 16 query tokens; it is summed over steps, halves with the pool's steps, and is divided by
     * the largest sum that a block of its age can have (docs/tiers.md) */
    TA_EVICT_ATTENTION = 2
};

/* How steps on a GPU read pages in the peer and the host tier: staged or in place. Staged: each layer's pages are copied to
 * free room of the device tier while the layers before it run. In place: a step reads a page once for each tile of its query
 * rows. Results are the same to the bit. TA_STAGING_AUTO: whichever is predicted to be faster. Captured calls read in place. */
typedef int32_t ta_staging;
enum ta_staging_code { TA_STAGING_AUTO = 0, TA_STAGING_NEVER = 1, TA_STAGING_ALWAYS = 2 };

/* Tiers below the device tier, for full blocks that it has no room for: memory of another GPU (the peer tier), memory of the
 * host, disk, in this order. Steps read blocks of the peer and the host tier in place; blocks on disk are promoted when a plan
 * begins. Without a peer and a host tier, all blocks that a step attends to must fit into the device tier. */
struct ta_x_tier_tuning;
typedef struct ta_tier_options {
    uint32_t struct_size;
    uint32_t host_node;      /* 1 + the NUMA node of the host tier; default: the GPU's node; on a CPU the system chooses */
    uint64_t host_bytes;     /* budget, metadata included; 0: no host tier. On a GPU pinned and taken at once */
    uint64_t disk_bytes;     /* likewise; 0: no disk tier */
    const char* disk_folder; /* for a file without a name, which ends with the pool; default: TMPDIR or /tmp */
    int32_t high_percent; /* of the device budget: a step that ends above it starts evictions in the background; default 94 */
    int32_t low_percent;  /* of the device budget: until no more than this is in use; default high_percent - 4 */
    ta_eviction eviction; /* default TA_EVICT_LRU */
    /* The file of a disk tier that lasts: mode 0600, created if there is none. The next pool of the same shape and settings
     * finds the published blocks in it, also after a crash. NULL: the disk tier ends with the pool. */
    const char* disk_path;
    /* Default off. On: if no block that may leave the device finds room below, a begin drops full blocks that only one sequence
     * has, in the order of `eviction`, but no sink blocks and no pinned blocks. Their tokens keep their positions and get no
     * attention any more. Changes results. */
    ta_switch drop_coldest;
    /* How long a begin waits for what others hold: room that open plans may be reading (default 1000), and moves that take its
     * blocks away (default 10000); up to 86,400,000; -1: not at all. */
    int32_t begin_wait_ms;
    ta_staging staging; /* default TA_STAGING_AUTO; on a CPU nothing is staged */
    /* Default off. On: full blocks lose bits when they are demoted, for good. In a pool of 8 bits blocks in the host tier have
     * 4 bits and blocks on disk 2; in a pool of 4 bits blocks on disk have 2. Sink blocks and published blocks keep their bits.
     * Changes results; bench/results/accuracy.md says by how much. TA_E_UNSUPPORTED with drop_coldest, and with other or mixed
     * bits. */
    ta_switch falling_precision;
    const struct ta_x_tier_tuning* tuning; /* turboattention_experimental.h; NULL: measured values and defaults */
    /* A peer tier: memory of another GPU of the process, taken at once. TA_E_UNSUPPORTED: this GPU cannot read that memory.
     * `peer`: a context of that GPU, or of a CPU for a pool on a CPU; the pool keeps it alive. Give both `peer` and
     * `peer_bytes`, or neither. If that GPU is lost, only the blocks there are lost: a begin with one of them fails with
     * TA_E_DEVICE_LOST, tier and block. An error of a kernel there also ends this GPU for the process. */
    struct ta_context* peer;
    uint64_t peer_bytes; /* budget; 0: no peer tier */
} ta_tier_options;

/* A range of layers that differ from the pool's others. */
typedef struct ta_layer_group {
    uint32_t struct_size;
    uint32_t first;  /* layers [first, first + layers) */
    uint32_t layers; /* 1 and up */
    /* kv_heads, head_dim and v_head_dim of these layers, as in ta_kv_pool_options; 0: the pool's. Tensors of these layers have
     * this shape: k [tokens, kv_heads, head_dim], v and `out` with v_head_dim channels. If only head_dim is given, v_head_dim
     * is head_dim. Blocks of these layers have the least number of channels that holds both. A shape other than the pool's is
     * TA_E_UNSUPPORTED with TA_OPEN_SCALE_UNIVERSAL and falling_precision. */
    uint32_t kv_heads;
    /* The most keys that a query of these layers sees, its own included, up to 2^40. Attends to these layers take this window,
     * or a smaller one (ta_attend_options.window). 0: no limit. A block passes when the pool's largest window hides it from the
     * last 64 tokens and from all tokens to come: ta_plan_end gives back the pages of layers with a window, and the sequence
     * keeps a passed block. A block stays whole until a later end while other sequences have it too, or while it is published,
     * pinned or moving. TA_E_UNSUPPORTED with TA_OPEN_SCALE_UNIVERSAL and falling_precision. docs/layers.md. */
    int64_t window;
    uint32_t head_dim;   /* see kv_heads */
    uint32_t v_head_dim; /* likewise */
} ta_layer_group;

/* Which channels of a head a rotary embedding turns together. */
typedef int32_t ta_rotary_pairs;
enum ta_rotary_pairs_code {
    TA_ROTARY_HALVES = 0,  /* i and i + channels / 2 (GPT-NeoX, Llama) */
    TA_ROTARY_ADJACENT = 1 /* 2 i and 2 i + 1 (GPT-J) */
};

/* The rotary embedding that callers apply to Q and K, for ta_seq_shift: at position p pair i (x, y) of a head has become
 * (x cos(a p) - y sin(a p), x sin(a p) + y cos(a p)), where a is angles[layer][i]. Not part of the fingerprint. */
typedef struct ta_rotary {
    uint32_t struct_size;
    ta_rotary_pairs pairs;
    uint32_t channels;    /* the first channels of a head, which are turned: even, 2 to the least head_dim of the layers */
    uint32_t layers;      /* of angles: all layers of the pool; or 1, for all layers alike */
    const double* angles; /* [layers, channels / 2] radians for each position, -1024 to 1024; 0: the pair stays as it is */
} ta_rotary;

typedef struct ta_kv_pool_options {
    uint32_t struct_size;
    uint32_t layers;   /* 1..4096 */
    uint32_t kv_heads; /* 1..1024 */
    /* Channels of Q and K, and of V unless v_head_dim is given: 16..256, a multiple of 8. Blocks have 64, 96, 128 or 256
     * channels, the least number that holds both; the channels left over hold zeros. */
    uint32_t head_dim;
    uint32_t bits;         /* 8, 4 or 2 for every head; default 4; ignored if k_bits, v_bits are given */
    const uint8_t* k_bits; /* [layers, kv_heads of the layer], each 8, 4 or 2; NULL: `bits` */
    const uint8_t* v_bits; /* likewise */
    uint64_t budget_bytes; /* of the device tier: blocks, metadata included; required */
    /* Default 65536. With universal open scales (profile paper) a GPU's pool takes 16 * kv_heads * (layers + 1) bytes of device
     * memory for each of them, beside the budget: 277 MB at 32 layers, 8 heads and the default. */
    uint32_t max_sequences;
    const ta_numerics* numerics;  /* NULL: profile accurate */
    const ta_tier_options* tiers; /* NULL: the device tier alone */
    uint32_t v_head_dim;          /* channels of V and of the output, as head_dim; default: head_dim */
    uint32_t n_layer_groups;
    /* [n_layer_groups], no layer in two groups; the structs lie struct_size bytes apart. NULL: no groups. Layers in no group
     * have the pool's shape and no window. */
    const ta_layer_group* layer_groups;
    const ta_rotary* rotary; /* NULL: ta_seq_shift is TA_E_UNSUPPORTED */
} ta_kv_pool_options;

typedef struct ta_kv_pool_stats {
    uint32_t struct_size;
    uint32_t sequences; /* alive now */
    uint64_t tokens;    /* sum of their lengths; a shared block counts once for each sequence */
    uint64_t bytes_budget;
    uint64_t bytes_used;           /* blocks in use */
    uint64_t bytes_cached;         /* freed blocks kept for reuse; given back before the budget is exceeded */
    uint64_t bytes_peak;           /* highest bytes_used */
    uint64_t token_blocks;         /* in use */
    uint64_t channel_blocks;       /* in use */
    uint64_t shared_blocks;        /* blocks with more than one owner */
    uint64_t token_block_bytes;    /* size of one, all layers, metadata and trailer included */
    uint64_t channel_block_bytes;  /* likewise; 0 in a pool of 8 bits throughout without falling_precision */
    double token_bits_per_element; /* true size over 64 * kv_heads * (head_dim + v_head_dim), summed over layers */
    double channel_bits_per_element;
    uint64_t appended_tokens;  /* since creation, as the next ones */
    uint64_t closed_pages;     /* pages turned into those of channel blocks */
    uint64_t reopened_blocks;  /* closed blocks turned back into open ones after a truncate */
    uint64_t copied_blocks;    /* copy-on-write after a fork */
    uint64_t saturated_values; /* non-finite inputs replaced under TA_NONFINITE_SATURATE */
    uint64_t clamped_values;   /* values cut off by a universal open scale */
    uint64_t low_blocks;       /* under falling_precision, blocks of 2 bits in use; in the device tier, as the others */
    uint64_t low_block_bytes;  /* size of one; 0 without */
    /* Bytes of the device tier that a step can get: bytes_free at once; bytes_reclaimable after blocks have been demoted and
     * published blocks that nobody uses have been dropped. bytes_promised are in neither: ta_seq_reserve gave them away. */
    uint64_t bytes_free;
    uint64_t bytes_reclaimable;
    uint64_t bytes_promised;
    uint64_t passed_blocks; /* in use, beside token, channel and low blocks: see ta_layer_group */
} ta_kv_pool_stats;

/* Creates an empty pool. Memory is taken block by block as sequences grow, never beyond budget_bytes; on a GPU all of the
 * budget is taken now. The budget does not count: padding of each block to whole memory pages; without allocator hooks, the
 * rest of the last huge page of either kind of block; on a GPU, the sequences' largest scales under universal open scales, and
 * what is left over if blocks of several sizes share the memory. ta_context_info.device_bytes_in_use counts all GPU memory.
 * Errors: TA_E_INVALID, TA_E_UNSUPPORTED, TA_E_MEMORY; of the tiers also TA_E_TIER_FULL (no space for the file), TA_E_IO,
 * TA_E_LIMIT (threads), TA_E_BUSY (another pool has the file at disk_path, from its creation to its destruction),
 * TA_E_CORRUPT (the file is damaged). */
TA_API ta_status ta_kv_pool_create(ta_context* context, const ta_kv_pool_options* options, ta_kv_pool** out, ta_error* err);
/* Releases every sequence and drops what is published. Later calls on the pool return TA_E_CLOSED, this call too, and so does a
 * begin that waits now. An open plan keeps its blocks until it is aborted or destroyed. */
TA_API ta_status ta_kv_pool_close(ta_kv_pool* pool, ta_error* err);
/* Gives up the caller's handle. The pool ends with its last plan. */
TA_API void ta_kv_pool_destroy(ta_kv_pool* pool);
/* Fills in `stats`. */
TA_API ta_status ta_kv_pool_get_stats(const ta_kv_pool* pool, ta_kv_pool_stats* stats, ta_error* err);

/* Describes a pool to another holder of its handle. Memory behind the pointers lives as long as the handle. */
typedef struct ta_kv_pool_description {
    uint32_t struct_size;
    ta_device_kind device;
    int32_t device_ordinal; /* 0 on a CPU */
    uint32_t layers, kv_heads, head_dim;
    uint32_t bits; /* 8, 4 or 2; 0: not the same for all heads */
    uint32_t max_sequences;
    const uint8_t* k_bits; /* [layers, kv_heads of the layer] */
    const uint8_t* v_bits;
    uint64_t budget_bytes;        /* of the device tier */
    uint64_t fingerprint;         /* of everything that decides how stored bytes are read: pools with equal ones exchange
    files */
    uint64_t token_block_bytes;   /* size of a block, all layers, metadata and trailer included */
    uint64_t channel_block_bytes; /* 0: there are none */
    uint64_t low_block_bytes;     /* likewise */
    /* The values in effect instead of defaults. Only a granularity may be DEFAULT: if pages of 8 bits have another one than
     * other pages. A pool that is created with these numerics has the same ones. */
    const ta_numerics* numerics;
    /* The values in effect; NULL: only the device tier. Budgets are those of the tiers. Paths are absolute, from the process's
     * working directory at the pool's creation. begin_wait_ms 0: the two defaults. `tuning` is not NULL. */
    const ta_tier_options* tiers;
    uint32_t v_head_dim;
    uint32_t block_head_dim;            /* channels that blocks have */
    const ta_layer_group* layer_groups; /* [n_layer_groups] as given, struct_size bytes apart; NULL: none */
    uint32_t n_layer_groups;
    uint32_t reserved;
    uint64_t
        passed_token_block_bytes; /* sizes of passed blocks: of those that were token and channel blocks; 0: there are none */
    uint64_t passed_channel_block_bytes;
    const ta_rotary* rotary; /* as given; NULL: none */
} ta_kv_pool_description;

/* Fills in `out`. */
TA_API ta_status ta_kv_pool_describe(const ta_kv_pool* pool, ta_kv_pool_description* out, ta_error* err);

/* ------------------------------------------------------------------------------------------------ sequences */

/* A sequence of one pool: slot in the low, generation in the high 32 bits. 0 is never a sequence. */
typedef uint64_t ta_seq;

/* Creates an empty sequence. Errors: TA_E_LIMIT (max_sequences). */
TA_API ta_status ta_seq_create(ta_kv_pool* pool, ta_seq* out, ta_error* err);
/* Creates a sequence with the tokens of `source`, which shares its blocks. A block is copied when one of the two first writes
 * to it.
 * Errors: TA_E_STALE, TA_E_BUSY (source is in an open plan), TA_E_LIMIT (max_sequences). */
TA_API ta_status ta_seq_fork(ta_kv_pool* pool, ta_seq source, ta_seq* out, ta_error* err);
/* Drops all tokens from `length` on. Blocks that become empty are freed. A length inside a closed block keeps the block; when
 * tokens are appended there, it is reopened at 8 bits from its stored values.
 * Errors: TA_E_INVALID (length < 0 or above the present one), TA_E_STALE, TA_E_BUSY, TA_E_STATE:
 * - the length is inside a block that was dropped or forgotten;
 * - in pools with windows, a block has passed that tokens behind `length` need. They need the blocks of the window - 1 tokens
 *   before `length`, and the block before the one that `length` is in. docs/layers.md says when the last 64 tokens can be taken
 *   off. */
TA_API ta_status ta_seq_truncate(ta_kv_pool* pool, ta_seq seq, int64_t length, ta_error* err);
/* Forgets the tokens of whole blocks in [first, first + n), as drop_coldest does: positions and length stay, attention skips
 * the tokens, and the blocks are freed unless others have them too. Blocks that are only partly in the range keep their tokens,
 * and so does the last block until it is full.
 *   forgotten   gets how many tokens were forgotten now; may be NULL
 * Later a save, an export, a publish or a transfer that needs a forgotten block is refused (TA_E_STATE), and so is a truncate
 * to a length inside one. On a GPU with more than 16 query heads per kv head a call with such a sequence may be refused
 * (TA_E_UNSUPPORTED). Under a window, ALiBi or SAS, or with blocks below the device, its prompts are computed 16 query rows at
 * a time, which is far slower.
 * Errors: TA_E_INVALID (tokens beyond the sequence), TA_E_STALE, TA_E_BUSY, TA_E_MEMORY. */
TA_API ta_status ta_seq_forget(ta_kv_pool* pool, ta_seq seq, int64_t first, int64_t n, int64_t* forgotten, ta_error* err);
/* Context shift: forgets the tokens [first, first + n), as ta_seq_forget does, and closes the gap. Attention then sees the
 * tokens before the range n positions later than they were appended. A range at the beginning has no tokens before it, so it is
 * only forgotten. docs/shift.md.
 *   first, n   multiples of 64. They count tokens that are gone already: to take out more behind the same tokens, give the same
 *              `first` and a larger `n`
 * A new token has the position that the length says, in Q and in K, also beyond what the model was trained for. Stored K is not
 * changed: queries are turned back, in fp32, for the keys before a gap. So nothing is lost, however often a sequence is shifted.
 *
 * A later ta_plan_begin fails with TA_E_STATE if a query stands before the last gap or in it. A later ta_attend of such a
 * sequence computes its queries once more for each gap. It takes only TA_MASK_CAUSAL without a window and without ALiBi, and
 * cannot be captured (TA_E_UNSUPPORTED); on a GPU it is limited as after ta_seq_forget. A truncate to `first` or less removes
 * the gap.
 * Errors: TA_E_INVALID (no multiples of 64, tokens beyond the sequence), TA_E_STALE, TA_E_BUSY, TA_E_MEMORY, TA_E_UNSUPPORTED
 * (ta_kv_pool_options.rotary was not given; the pool has windows, batch_invariant or TA_EVICT_ATTENTION; a partitioned sequence). */
TA_API ta_status ta_seq_shift(ta_kv_pool* pool, ta_seq seq, int64_t first, int64_t n, ta_error* err);
/* Promises room in the device tier for the next `tokens` tokens of a sequence: begins that bring no more than these, in steps
 * of any size, do not fail or wait for room. The promise shrinks with the tokens that come. It ends with the sequence or with a
 * suspend; the next call replaces it, and 0 tokens end it. It includes one copy of the open block, which a fork or a save makes
 * necessary. Further copies, and steps with more than 64 drafts, use up a part of the promised room. Until the promise ends,
 * the sequence's blocks stay in memory that the device reads: this call promotes blocks from disk, and none go there. A fork
 * has no promise.
 *   wait_ms   how long the call may wait for room; 0: as a begin does (ta_tier_options.begin_wait_ms); -1: not at all
 * On failure the former promise holds. Errors: TA_E_INVALID, TA_E_STALE, TA_E_BUSY (in an open plan, or moves take its blocks to
 * the disk as fast as the call brings them back), TA_E_TIER_FULL (err->bytes lack), TA_E_MEMORY, TA_E_LIMIT (2^40 tokens), and of
 * blocks on disk TA_E_IO, TA_E_CORRUPT. */
TA_API ta_status ta_seq_reserve(ta_kv_pool* pool, ta_seq seq, int64_t tokens, int32_t wait_ms, ta_error* err);
/* The answer of ta_kv_pool_fit. */
typedef struct ta_fit {
    uint32_t struct_size;
    int32_t now; /* 1: a begin finds room at once: it evicts nothing from the device tier and promotes nothing from disk */
    /* 1: it finds room, now or after evictions. 0: bytes lack; if tiers below are nearly full, also for a step that fits. */
    int32_t after_eviction;
    int32_t reserved;
    int64_t
        first_lacking; /* index of the first sequence that does not fit, with those before it, after eviction; -1: all fit */
    uint64_t bytes_lacking;    /* of the device tier after eviction; 0: all fit */
    uint64_t bytes_new;        /* of blocks that the step adds, without what is promised to its sequences */
    uint64_t blocks_from_disk; /* that come to memory first */
    uint64_t bytes_from_disk;
} ta_fit;

/* Tells whether a begin with these sequences and new tokens would find room now. It reserves nothing; ta_seq_reserve does.
 *   seqs    [n_seqs] distinct sequences, which may be in plans; 0, any number of times: a new, empty sequence
 *   n_new   [n_seqs] tokens for each, 0 and up
 * Not counted are room that only the end of open plans can free, and the second slot of blocks of drafts. Errors: TA_E_INVALID,
 * TA_E_STALE, TA_E_LIMIT. */
TA_API ta_status ta_kv_pool_fit(const ta_kv_pool* pool, uint32_t n_seqs, const ta_seq* seqs, const int32_t* n_new, ta_fit* out,
                                ta_error* err);

/* Sets how early a full tier evicts the sequence's blocks under TA_EVICT_PRIORITY: the lower, the earlier. A new or loaded
 * sequence has 0, a fork the priority of its source. May be called while the sequence is in a plan. Errors: TA_E_STALE. */
TA_API ta_status ta_seq_set_priority(ta_kv_pool* pool, ta_seq seq, int32_t priority, ta_error* err);
/* Ends the sequence; its id is stale from then on. May be called while the sequence is in an open plan: the plan's calls still
 * take and give the sequence's rows, and ta_plan_end commits nothing to it. When the plan ends or is aborted, its blocks are
 * freed and it no longer counts among max_sequences. Errors: TA_E_STALE. */
TA_API ta_status ta_seq_release(ta_kv_pool* pool, ta_seq seq, ta_error* err);
/* Number of tokens; those of an open plan are not counted before ta_plan_end. Errors: TA_E_STALE. */
TA_API ta_status ta_seq_length(const ta_kv_pool* pool, ta_seq seq, int64_t* out, ta_error* err);
/* Recomputes the hash of every full page, in whatever tier; dropped pages are skipped. Errors: TA_E_CORRUPT (the first bad page
 * is named), TA_E_IO (a block on disk cannot be read), TA_E_STALE, TA_E_BUSY. */
TA_API ta_status ta_seq_verify(const ta_kv_pool* pool, ta_seq seq, ta_error* err);

/* Called from time to time on the calling thread with the bytes done and the total. A return value other than 0 stops the work.
 * It may call the library, but not with the same pool. */
typedef int32_t (*ta_progress_fn)(void* user, uint64_t done, uint64_t total);

/* Receives the progress of a call. Released before the call returns. */
typedef struct ta_progress {
    uint32_t struct_size;
    ta_progress_fn report; /* NULL: none */
    void* user;
    ta_release_fn release; /* may be NULL */
} ta_progress;

/* Writes a sequence, in whatever tiers its blocks are, to a new file of mode 0600. `path` exists only when the file is complete
 * and synced; with TA_OK its name is synced, too. The folder must be readable. A process that is killed leaves no file. If the
 * file system has no files without a name (O_TMPFILE), the next save in the folder removes what the killed process left. A
 * block is checked before it is written. `progress` may be NULL. docs/FORMAT.md has the format: a file of a GPU context loads
 * on a CPU and the reverse.
 * Errors: TA_E_INVALID (path exists), TA_E_IO, TA_E_TIER_FULL (no space), TA_E_CORRUPT, TA_E_CANCELLED, TA_E_STATE (blocks were
 * dropped), TA_E_STALE, TA_E_BUSY. */
TA_API ta_status ta_seq_save(ta_kv_pool* pool, ta_seq seq, const char* path, const ta_progress* progress, ta_error* err);
/* Creates a sequence from a file, all of it or nothing. The pool must have the same fingerprint as the pool that saved it:
 * shape, and the settings that decide how stored bytes are read (bits, rotation and its seed, sink blocks, K offset, falling
 * precision, ...). Every byte is checked against hashes. They find damage, and blocks that come from another file, another
 * place or an earlier state of the sequence. They do not find forgery by somebody who can compute hashes; but values that
 * attention cannot compute with are refused. The sequence belongs to the namespace whose salt is that of the saved sequence's
 * namespace. If the load needs room, it makes room as a begin does, and checks all of the file before, so that a file that is
 * bad or cannot fit changes nothing. If the load fails after that (a disk, other calls that take the room, the callback), other
 * blocks may lie in slower tiers.
 * Errors: TA_E_INVALID (a file of another pool, no regular file), TA_E_CORRUPT (err->block), TA_E_IO (a symbolic link, too),
 * TA_E_UNSUPPORTED (another version of the format), TA_E_CANCELLED, TA_E_TIER_FULL, TA_E_LIMIT (max_sequences; or 65536
 * namespaces that nobody created, but that files named and something in the pool belongs to), TA_E_MEMORY. */
TA_API ta_status ta_seq_load(ta_kv_pool* pool, const char* path, const ta_progress* progress, ta_seq* out, ta_error* err);

/* Takes bytes of an export, which belong at `offset`. Called on the calling thread. A return value other than 0 stops the work.
 * It may call the library, but not with the same pool. */
typedef int32_t (*ta_write_fn)(void* user, uint64_t offset, const void* data, uint64_t bytes);

/* Receives the bytes of an export. Released before the call returns. */
typedef struct ta_sink {
    uint32_t struct_size;
    uint32_t reserved;
    ta_write_fn write; /* required */
    void* user;
    ta_release_fn release; /* may be NULL */
} ta_sink;

/* Hands out the bytes of the file that ta_seq_save would write, for programs that transport sequences by their own means. The
 * blocks come first, in their order; the beginning of the file, which names them, comes last, at offset 0.
 *   bytes   gets how many there are; may be NULL
 * Errors: as ta_seq_save but for those of files, TA_E_CANCELLED (the sink stopped the work). */
TA_API ta_status ta_seq_export(ta_kv_pool* pool, ta_seq seq, const ta_sink* sink, uint64_t* bytes, ta_error* err);
/* Creates a sequence from such bytes, or from a file that is in memory, with all checks of ta_seq_load.
 *   data   [bytes] is read before the call returns
 * Errors: as ta_seq_load. */
TA_API ta_status ta_seq_import(ta_kv_pool* pool, const void* data, uint64_t bytes, ta_seq* out, ta_error* err);

/* ------------------------------------------------------------------------------------------------ prefix reuse
 *
 * A sequence publishes full blocks under keys, and other sequences begin with these blocks. A key is 32 bytes of the caller,
 * such as a cryptographic hash, and stands for ALL tokens up to the end of its block (and for the model that made them). Key i
 * of a list belongs to block i. Namespaces keep tenants apart: keys are hashed with a salt, so that nobody without the salt
 * finds or guesses what others have, and memory is zeroed before it goes from one namespace to another. A sequence and its
 * forks belong to the namespace in which it was matched or published, and it can be published only there. A sequence that is
 * loaded from a file belongs to the namespace of the same salt. More: docs/prefixes.md. */

/* A namespace of one pool. 0 is never one. */
typedef uint64_t ta_namespace;

typedef struct ta_namespace_options {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t quota_bytes; /* of its published blocks, in all tiers; 0: no limit. Blocks that a file brings may exceed it */
    uint8_t salt[32];     /* secret random bytes; the same ones find published blocks again in a later process */
} ta_namespace_options;

typedef struct ta_namespace_stats {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t entries; /* published blocks */
    uint64_t bytes;
    uint64_t bytes_quota;  /* 0: no limit */
    uint64_t bytes_shared; /* of entries that sequences have, too */
    uint64_t hits;         /* keys found, since creation, as the next ones */
    uint64_t misses;       /* keys asked for and not found, including those behind the first such key */
    uint64_t published;    /* blocks; not those whose key was there already */
    uint64_t evicted;      /* entries dropped for room or quota */
} ta_namespace_stats;

/* Errors: TA_E_INVALID (no salt, or the pool has a namespace with this one), TA_E_LIMIT (65536). */
TA_API ta_status ta_namespace_create(ta_kv_pool* pool, const ta_namespace_options* options, ta_namespace* out, ta_error* err);
/* Drops its entries; sequences that have the blocks keep them, in open plans too. Errors: TA_E_STALE. */
TA_API ta_status ta_namespace_destroy(ta_kv_pool* pool, ta_namespace space, ta_error* err);
/* Fills in `stats`. Errors: TA_E_STALE. */
TA_API ta_status ta_namespace_get_stats(const ta_kv_pool* pool, ta_namespace space, ta_namespace_stats* stats, ta_error* err);
/* Writes the entries that are not yet in the persistent disk tier to it, and waits until they survive a power failure. Blocks
 * that are in faster tiers stay there, too. What was written before a failure stays. Errors: TA_E_STALE, TA_E_UNSUPPORTED (no
 * such tier), TA_E_TIER_FULL, TA_E_IO, TA_E_CORRUPT (err->block; if a killed process left it incomplete, its entry is dropped
 * and everything else survives), TA_E_LIMIT (err->block is the first block published under more than 16 keys: of such blocks
 * only the 16 oldest keys survive; everything else survives). */
TA_API ta_status ta_namespace_flush(ta_kv_pool* pool, ta_namespace space, ta_error* err);

/* Hashed keys, which stand for keys in events: BLAKE2s-256 of key and index, keyed with the salt (docs/sharing.md).
 *   keys     [n, 32]
 *   hashed   [n, 32]
 * Errors: TA_E_STALE. */
TA_API ta_status ta_namespace_hash_keys(const ta_kv_pool* pool, ta_namespace space, const uint8_t* keys, uint64_t n,
                                        uint8_t* hashed, ta_error* err);

typedef int32_t ta_prefix_event_kind;
enum ta_prefix_event_kind_code {
    TA_PREFIX_RESET = 1, /* forget what earlier events said; a PUBLISHED for each present entry follows */
    TA_PREFIX_PUBLISHED = 2,
    TA_PREFIX_DROPPED = 3, /* for room or quota, or it was damaged */
    TA_PREFIX_MOVED = 4    /* to another tier */
};

/* A change of an entry. It has no struct_size: its layout is final. */
typedef struct ta_prefix_event {
    uint8_t key[32]; /* hashed */
    uint64_t number; /* of the namespace's events, from 1; events whose numbers are missing before a RESET were lost */
    uint64_t index;  /* of the block in its sequence */
    ta_prefix_event_kind kind;
    ta_tier tier; /* where it is; DROPPED: was */
} ta_prefix_event;

/* Takes events of a namespace, each once, the oldest first, for a router that follows where blocks are. The first call begins
 * with RESET. Up to 8192 events wait; if there are more, a RESET and all entries come again.
 *   events   [most]
 *   n        gets how many
 * Errors: TA_E_STALE. */
TA_API ta_status ta_namespace_take_events(ta_kv_pool* pool, ta_namespace space, ta_prefix_event* events, uint64_t most,
                                          uint64_t* n, ta_error* err);

/* Publishes blocks 0 to n - 1 of a sequence. If a key is published already, its block stays. The entries outlive the sequence
 * and are demoted like other blocks. Unused entries, those whose block no sequence has, are demoted before other blocks of
 * their priority (ta_seq_retain). If no tier has room, or if the quota requires it, unused entries are dropped: first those of
 * the lowest priority, among these first the least recently matched or published.
 *   keys   [n, 32]; n is at most length / 64
 * Errors: TA_E_INVALID (n; the sequence or one of its blocks belongs to another namespace), TA_E_STALE, TA_E_BUSY, TA_E_LIMIT
 * (the quota is used up, and sequences use its entries), TA_E_NONFINITE (on a GPU; once, as ta_plan_begin), TA_E_STATE (a block
 * was dropped), TA_E_CORRUPT. */
TA_API ta_status ta_seq_publish(ta_kv_pool* pool, ta_seq seq, ta_namespace space, const uint8_t* keys, uint64_t n,
                                ta_error* err);
/* Creates a sequence of the namespace that begins with the blocks of the first keys, as many as are published without a gap,
 * maybe none. It equals a fork of the publisher that is truncated there. `length` gets its number of tokens.
 *   keys   [n, 32], may be NULL when n is 0
 * Tokens after a match give the same bits as without it if all prompts are appended in chunks of a fixed multiple of 64 tokens,
 * counted from the first token, and the match is cut (ta_seq_truncate) to a multiple of the chunk. docs/prefixes.md explains
 * this, and how a model that is spread over several pools gets matches of equal length.
 * Errors: TA_E_INVALID (n is above 2^34), TA_E_STALE, TA_E_LIMIT (max_sequences). */
TA_API ta_status ta_seq_match_prefix(ta_kv_pool* pool, ta_namespace space, const uint8_t* keys, uint64_t n, ta_seq* out,
                                     int64_t* length, ta_error* err);

/* ------------------------------------------------------------------------------------------------ pools as files */

typedef int32_t ta_save_flags;
enum ta_save_flags_code {
    TA_SAVE_PUBLISHED = 1
}; /* saves published blocks, too; a namespace of the same salt has them again in the pool that loads */

/* A sequence of a file, and its id in the pool that loaded it. It has no struct_size: its layout is final. */
typedef struct ta_loaded_seq {
    ta_seq saved;
    ta_seq loaded;
} ta_loaded_seq;

/* Writes all sequences of a pool, as ta_seq_save writes one; shared blocks are written once.
 *   flags   0, or TA_SAVE_PUBLISHED
 * Errors: as ta_seq_save, TA_E_BUSY (a sequence is in an open plan), TA_E_LIMIT (an index of more than 4 GiB). */
TA_API ta_status ta_kv_pool_save(ta_kv_pool* pool, const char* path, ta_save_flags flags, const ta_progress* progress,
                                 ta_error* err);
/* Adds the sequences of a file to the pool, all or nothing, as ta_seq_load adds one; they share blocks as before.
 *   loaded  [most] gets old and new ids; NULL: nothing is loaded, `n` gets how many sequences the file has
 * Errors: as ta_seq_load, TA_E_INVALID also when the file has more than `most` sequences. */
TA_API ta_status ta_kv_pool_load(ta_kv_pool* pool, const char* path, const ta_progress* progress, ta_loaded_seq* loaded,
                                 uint64_t most, uint64_t* n, ta_error* err);

/* ------------------------------------------------------------------------------------------------ moves
 *
 * The pool moves blocks by itself; a full tier evicts in the order of ta_tier_options.eviction. For more control ask for moves,
 * which are done in the background. Results of attend are the same to the bit wherever blocks lie, except under
 * falling_precision. Only full blocks move, and open blocks that are suspended. The hashes of a block are checked when it
 * arrives. If they do not match, the block stays where it was, and the move fails with TA_E_CORRUPT. */

/* A batch of moves asked for. 0 is never a ticket. */
typedef uint64_t ta_ticket;

typedef int32_t ta_move_state;
enum ta_move_state_code {
    TA_MOVE_QUEUED = 1,
    TA_MOVE_RUNNING = 2,
    TA_MOVE_DONE = 3,
    TA_MOVE_FAILED = 4,
    TA_MOVE_CANCELLED = 5
};

typedef struct ta_move_info {
    uint32_t struct_size;
    ta_move_state state; /* FAILED: a block failed; the others have moved, unless the ticket was cancelled, too */
    uint64_t blocks;     /* asked for */
    uint64_t moved;
    uint64_t present; /* were there already */
    uint64_t skipped; /* not full (or held by a save), pinned, reserved, released, moving; of a prefetch also: no room */
    uint64_t failed;
    ta_status status; /* of the first block that failed */
    int32_t reserved;
    int64_t block; /* its index in the sequence, -1: none */
} ta_move_info;

/* Asks for blocks [first, first + n) of a sequence to be moved to `tier`, faster or slower than their present one; prefetch: to
 * the device tier. `out` gets a ticket. If the tier is full, ta_seq_move evicts colder blocks from it; ta_seq_prefetch moves
 * only the blocks that fit. If a sequence has a reservation, its blocks do not go to the disk, even if other sequences have
 * them, too.
 * Errors: TA_E_INVALID (blocks beyond the sequence), TA_E_STALE, TA_E_BUSY (the sequence is in an open plan), TA_E_UNSUPPORTED
 * (no such tier, or none below the device). */
TA_API ta_status ta_seq_move(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_tier tier, ta_ticket* out,
                             ta_error* err);
TA_API ta_status ta_seq_prefetch(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_ticket* out, ta_error* err);
/* Asks for all blocks of an idle sequence, also its sink blocks and its open block, to be moved to a tier below the device, so
 * that it has no bytes in the device tier. `out` gets a ticket. The next begin with the sequence promotes what it needs; its
 * results are the same. Pinned blocks stay, and so do blocks that sequences in open plans or with reservations have, too. If a
 * begin lacks room and full blocks are not enough, it suspends idle sequences by itself, the least recently used first.
 * Errors: TA_E_INVALID (TA_TIER_DEVICE), TA_E_STALE, TA_E_BUSY (in an open plan), TA_E_UNSUPPORTED (no such tier). */
TA_API ta_status ta_seq_suspend(ta_kv_pool* pool, ta_seq seq, ta_tier tier, ta_ticket* out, ta_error* err);
/* Pinned blocks are not demoted to a slower tier. Pins are counted, and a block has them in all sequences that share it. A
 * published block keeps its pins when the last of these sequences is released: unpin it before, or through a sequence of
 * ta_seq_match_prefix.
 * Errors: TA_E_INVALID (blocks beyond the sequence), TA_E_STALE, TA_E_BUSY, TA_E_STATE (a block is not full or, for unpin, not
 * pinned; nothing was changed). */
TA_API ta_status ta_seq_pin(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_error* err);
TA_API ta_status ta_seq_unpin(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_error* err);

/* How long blocks are to be kept. */
typedef struct ta_retention {
    uint32_t struct_size;
    /* 1..63; default 32, which all blocks have at first. If a tier needs room, blocks of a lower priority are evicted before
     * all others. Among blocks of one priority, published blocks that no sequence has go first, the least recently matched
     * first; then the pool's ta_eviction decides. If nothing can leave, published blocks that no sequence has are dropped,
     * then, under drop_coldest, blocks of sequences, both by priority. If a begin suspends idle sequences, their last use
     * decides. Give the first blocks of a published prompt at least the priority of later ones, which cannot be matched without
     * them. */
    uint32_t priority;
    int64_t duration_ms; /* after which the blocks have priority 32 again; 0: for ever; up to 2^53 */
} ta_retention;

/* Gives full blocks [first, first + n) of a sequence a priority. A block has it in all sequences that share it, and when it is
 * published. Files do not have it. `retention` NULL: the usual priority. Errors: as ta_seq_pin. */
TA_API ta_status ta_seq_retain(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, const ta_retention* retention,
                               ta_error* err);

typedef int32_t ta_block_flags;
enum ta_block_flags_code {
    TA_BLOCK_OPEN = 1,      /* not full, or cut by a truncate */
    TA_BLOCK_DROPPED = 2,   /* by drop_coldest or ta_seq_forget; in no tier */
    TA_BLOCK_ABSENT = 4,    /* another rank's block of a partitioned sequence; in no tier */
    TA_BLOCK_PASSED = 8,    /* has only the pages of layers without a window */
    TA_BLOCK_PUBLISHED = 16 /* in a namespace */
};

/* A block of a sequence. It has no struct_size: its layout is final. */
typedef struct ta_block_info {
    ta_tier tier; /* undefined if flags has DROPPED or ABSENT */
    ta_block_flags flags;
    uint64_t bytes;      /* in its tier, all layers, trailer included */
    uint32_t owners;     /* sequences that have it, keys under which it is published, and calls at work on it; 0: in no tier */
    uint32_t pins;       /* not taken back by ta_seq_unpin */
    uint32_t priority;   /* now */
    uint32_t reserved;   /* 0 */
    int64_t retained_ms; /* how long it keeps this priority; -1: for ever */
} ta_block_info;

/* Memory that a tier has blocks in. */
typedef struct ta_memory_range {
    uint32_t struct_size;
    int32_t device_ordinal; /* of the GPU whose memory it is; -1: the host's */
    void* data;
    uint64_t bytes;
} ta_memory_range;

/* Says where a tier's memory is, so that a transfer library can register it. The memory stays the same until the pool ends.
 *   tier   TA_TIER_PEER, TA_TIER_HOST or, on a GPU, TA_TIER_DEVICE
 * Errors: TA_E_INVALID, TA_E_UNSUPPORTED (the pool has no such tier; the disk tier; the device tier on a CPU, whose memory
 * changes: a ta_allocator of the context can provide registered memory instead). */
TA_API ta_status ta_kv_pool_get_memory(const ta_kv_pool* pool, ta_tier tier, ta_memory_range* out, ta_error* err);
/* Says where blocks [first, first + n) of a sequence lie. The memory may only be read. A full block has the bytes and the
 * trailer of docs/FORMAT.md; on a GPU it has them once the stream of the step that filled it has got there. A pinned block
 * stays in its place unless it is moved to a faster tier; any other block may leave at any time.
 *   out   [n]; NULL: in no memory (on disk, dropped, another rank's)
 * Errors: TA_E_INVALID (blocks beyond the sequence), TA_E_STALE, TA_E_BUSY. */
TA_API ta_status ta_seq_locate_blocks(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, const void** out,
                                      ta_error* err);
/* Describes blocks [first, first + n) of a sequence.
 *   out   [n]
 * Errors: TA_E_INVALID (blocks beyond the sequence), TA_E_STALE, TA_E_BUSY. */
TA_API ta_status ta_seq_describe_blocks(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_block_info* out,
                                        ta_error* err);

/* Says how far a ticket's moves are. Errors: TA_E_STALE (never given out, or finished more than 4096 tickets ago),
 * TA_E_UNSUPPORTED (the pool has no tier below the device, and no namespace had a store). */
TA_API ta_status ta_move_query(const ta_kv_pool* pool, ta_ticket ticket, ta_move_info* info, ta_error* err);
/* As ta_move_query, but waits until the moves are finished, or for so many nanoseconds (< 0: no limit). TA_OK in either case:
 * see info->state. Errors: as ta_move_query. */
TA_API ta_status ta_move_wait(const ta_kv_pool* pool, ta_ticket ticket, int64_t nanoseconds, ta_move_info* info, ta_error* err);
/* Cancels a ticket: blocks that have not moved yet stay where they are, also those that a disk works on. Errors: as
 * ta_move_query. */
TA_API ta_status ta_move_cancel(ta_kv_pool* pool, ta_ticket ticket, ta_error* err);
/* A file descriptor that can be read (poll, epoll) while ta_move_take_finished has tickets. The pool closes it. Tickets that
 * finished before the first call are not reported. Errors: TA_E_UNSUPPORTED (as ta_move_query), TA_E_LIMIT (no more
 * descriptors). */
TA_API ta_status ta_kv_pool_descriptor(ta_kv_pool* pool, int32_t* out, ta_error* err);
/* Takes tickets of ta_seq_move, ta_seq_prefetch, ta_seq_suspend and ta_namespace_load that have finished, oldest first, each once,
 * from the first call of ta_kv_pool_descriptor on. The last 4096 are kept.
 *   out   [most]
 *   n     gets how many
 * Errors: TA_E_UNSUPPORTED, TA_E_STATE (nobody has asked for the descriptor). */
TA_API ta_status ta_move_take_finished(ta_kv_pool* pool, ta_ticket* out, uint64_t most, uint64_t* n, ta_error* err);

/* Counts the blocks of a sequence in each tier, and their bytes. */
typedef struct ta_residency {
    uint32_t struct_size;
    uint32_t pinned_blocks;
    uint64_t device_blocks, host_blocks, disk_blocks;
    uint64_t device_bytes, host_bytes, disk_bytes;
    uint64_t dropped_blocks; /* by ta_tier_options.drop_coldest or ta_seq_forget; in no tier */
    uint64_t peer_blocks, peer_bytes;
} ta_residency;

/* Errors: TA_E_STALE, TA_E_BUSY. */
TA_API ta_status ta_seq_residency(const ta_kv_pool* pool, ta_seq seq, ta_residency* out, ta_error* err);

/* Of one tier. Counters are since creation. */
typedef struct ta_tier_stats {
    uint32_t struct_size;
    ta_tier_state state;
    uint64_t bytes_budget;
    uint64_t bytes_used;   /* by blocks */
    uint64_t bytes_free;   /* that no block has, even if no block fits there */
    uint64_t largest_free; /* longest run of free bytes that a block can take; 0: no block fits, or not known (device) */
    double fragmentation;  /* share of free bytes that the worst-fitting block size cannot use; 0 if that is not known */
    uint64_t blocks;
    /* `blocks` by what they are: 8 bits; the pool's bits or, in an 8-bit pool, 4; 2 under falling_precision. */
    uint64_t token_blocks, channel_blocks, low_blocks;
    char reason[192];               /* of the state, and what the tier lacks here; empty when nothing is missing */
    uint64_t blocks_in, blocks_out; /* moved here and away */
    uint64_t bytes_in, bytes_out;
    uint64_t fallen_blocks;     /* that came here with fewer bits than they had */
    uint64_t hits;              /* blocks of steps that were here when the step began */
    uint64_t misses;            /* that were not here but in a slower tier */
    uint64_t misses_failed;     /* that were here but could not be brought to where the step reads them */
    uint64_t evicted_blocks;    /* that left this tier to make room */
    double evicted_age_seconds; /* since the last step of their sequences, summed */
    uint64_t requests_queued;   /* reads and writes of a disk that are not finished now; 0 elsewhere */
    uint64_t requests_failed;   /* that failed, or did not end in time */
    uint64_t requests_corrupt;  /* reads of data that does not match its hash, and records refused at opening */
    uint64_t passed_blocks;     /* of `blocks`, beside token, channel and low ones: see ta_layer_group */
} ta_tier_stats;

/* Fills in `stats`. Errors: TA_E_UNSUPPORTED (the pool has no such tier). */
TA_API ta_status ta_kv_pool_get_tier_stats(const ta_kv_pool* pool, ta_tier tier, ta_tier_stats* stats, ta_error* err);

/* What a pool with all its tiers moved, and why; what its steps waited for and staged. Counters are since creation. */
typedef struct ta_move_stats {
    uint32_t struct_size;
    uint32_t reserved;
    uint64_t queued_tickets;                                             /* that are not finished now */
    uint64_t bytes_asked, bytes_prefetched, bytes_needed, bytes_evicted; /* what moves were for */
    uint64_t failed_blocks;                                              /* that could not move, for reasons other than room */
    uint64_t corrupt_blocks;                                             /* that did not match their hashes where they lay */
    uint64_t prefetch_used;                                              /* prefetched blocks that a step then found */
    uint64_t prefetch_late;                                              /* that a step wanted before they came */
    uint64_t prefetch_wasted; /* prefetched blocks that left again or were released before a step used them */
    /* Begins that found no room for new blocks and waited for others to leave. 0: high_percent and low_percent are low
     * enough. */
    uint64_t waits_for_room;
    uint64_t waits_for_blocks; /* begins that waited for blocks to come from disk */
    double wait_seconds;       /* of these, summed */
    uint64_t dropped_blocks;   /* lost because no tier had room: ta_tier_options.drop_coldest */
    uint64_t host_steps;       /* steps that read blocks in host memory */
    uint64_t staged_steps;     /* steps of these that staged some of the blocks: ta_tier_options.staging */
    uint64_t staged_pages;     /* that they copied; a page is what a block has of one layer */
    uint64_t staged_bytes;
    uint64_t bytes_by_copy_engine, bytes_by_kernel; /* what carried the moves that a GPU makes */
    /* Measured: blocks of at least so many bytes go by copy engine to the host (down) and back (up); 0: not measured. */
    uint64_t copy_engine_from_down, copy_engine_from_up;
} ta_move_stats;

/* Fills in `stats`. In a pool without tiers below the device all but waits and drops are 0. */
TA_API ta_status ta_kv_pool_get_move_stats(const ta_kv_pool* pool, ta_move_stats* stats, ta_error* err);

typedef int32_t ta_metrics_format;
enum ta_metrics_format_code { TA_METRICS_OPENMETRICS = 1, TA_METRICS_JSON = 2 };

/* Writes the fields of the statistics structs, of all tiers, and how long batches of moves took, as text that ends in a NUL:
 * metrics for a scraper (https://openmetrics.io), or one JSON object. `needed` gets the size of the text with the NUL; with
 * buffer NULL the call does nothing else. Errors: TA_E_INVALID (buffer_bytes is too small; `needed` is set all the same,
 * nothing else). */
TA_API ta_status ta_kv_pool_write_metrics(const ta_kv_pool* pool, ta_metrics_format format, char* buffer, uint64_t buffer_bytes,
                                          uint64_t* needed, ta_error* err);

/* ------------------------------------------------------------------------------------------------ block stores
 *
 * A store keeps published blocks outside of the process. The caller provides it: a service such as Valkey
 * (turboattention_valkey.h), an object store, a table in memory. Namespaces of the same salt, in pools of the same fingerprint,
 * share prefixes through it, on any hosts. A value from a store is checked before it is published. If it is not the value of
 * its key, to the last byte, it is refused, and removed from the store. A store that fails, stalls or loses values causes
 * misses, not errors. docs/stores.md has a guide. */

typedef int32_t ta_store_result; /* what became of an item */
enum ta_store_result_code {
    TA_STORE_FAILED = -1,
    TA_STORE_ABSENT = 0, /* there is no value of this key; set by the library before the call */
    TA_STORE_DONE = 1    /* exists: there is a value. get, put, remove: done */
};

/* A key and its value. It has no struct_size: its layout is final. */
typedef struct ta_store_item {
    const uint8_t* key;     /* [32], looks random; tells nothing of tokens, salt and shape */
    void* data;             /* get: where the value goes; put: the value, which is only read; else NULL */
    uint64_t bytes;         /* get: room at `data`; the store sets the value's size. put: size of the value. Else 0 */
    ta_store_result result; /* the store sets it */
    int32_t reserved;
} ta_store_item;

/* Handles a batch of n items, 1 and up. Returns 0; or any other number if the call failed as a whole, and then results are not
 * read. It should return within so many nanoseconds. If it does not, the library goes on without it and ignores what it does
 * later. Items and their memory stay valid until it has returned, and no function of the set is called before that. */
typedef int32_t (*ta_store_fn)(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds);

/* A store. All four functions are required. One thread of the library calls them, and calls nothing else. If a value is larger
 * than the room of a get, the function sets `bytes` and writes nothing. */
typedef struct ta_block_store {
    uint32_t struct_size;
    uint32_t reserved;
    ta_store_fn exists;
    ta_store_fn get;
    ta_store_fn put;    /* replaces a value that is there */
    ta_store_fn remove; /* if the key has no value: DONE or ABSENT */
    void* user;
    ta_release_fn release; /* may be NULL */
} ta_block_store;

typedef struct ta_store_options {
    uint32_t struct_size;
    int32_t timeout_ms;      /* for each call of the store's functions, 1..86,400,000; default 2000 */
    ta_switch write_through; /* published blocks are put to the store. Default on; off: the store is only read */
    /* On: values have a BLAKE2s of all of their bytes, keyed with the salt, and values without it are refused. Off: hashes find
     * damage, not forgery, and values go several times as fast; only for stores to which only trusted processes write. Default
     * on. */
    ta_switch authenticate;
    uint64_t batch_bytes; /* host memory for the values of a call, which has at least one value; default 32 MiB */
} ta_store_options;

/* Of the store of a namespace, since it was attached. */
typedef struct ta_store_stats {
    uint32_t struct_size;
    int32_t pausing;       /* 1: it failed, and is asked again after a pause, up to 5 s; until then loads are misses */
    uint64_t puts;         /* blocks that were put */
    uint64_t puts_present; /* that were there already */
    uint64_t put_failures; /* attempts; if the whole store failed, they are repeated when it works again */
    uint64_t hits;         /* blocks that loads brought */
    uint64_t misses;       /* that loads asked for and did not get, refused ones included */
    uint64_t refused;      /* values that were not what they should be */
    uint64_t bytes_put, bytes_got;
    uint64_t calls;         /* of its functions */
    uint64_t calls_failed;  /* that returned an error */
    uint64_t timeouts;      /* calls that did not return in time */
    uint64_t waiting;       /* published blocks that are still to be put, or asked for by a flush, as far as known */
    int64_t failed_unix_ms; /* when something last failed or was refused, in milliseconds since 1970; 0: never */
    char failure[192];      /* what that was */
} ta_store_stats;

/* Attaches a store to a namespace. From now on published blocks are put to it in the background, first those that are published
 * already; a publish never waits for it. Two threads serve it. It is detached by ta_namespace_detach_store, and when the
 * namespace, the pool or the handle of the pool ends. Each of these waits for a running call of the store, up to timeout_ms, or
 * for a move that makes room for a load. A call that has not returned by then is left alone with its thread, which calls
 * release after it.
 *   options   may be NULL
 * Errors: TA_E_INVALID (an option outside its range, a function that is NULL), TA_E_STALE, TA_E_STATE (the namespace has a store),
 * TA_E_LIMIT (threads). */
TA_API ta_status ta_namespace_attach_store(ta_kv_pool* pool, ta_namespace space, const ta_block_store* store,
                                           const ta_store_options* options, ta_error* err);
/* Detaches the store. Its unfinished tickets fail with TA_E_CANCELLED. Blocks that are not put yet are not put. Errors:
 * TA_E_STALE, TA_E_STATE (there is no store). */
TA_API ta_status ta_namespace_detach_store(ta_kv_pool* pool, ta_namespace space, ta_error* err);
/* Brings blocks from the store: of the first keys, those that are not published here, up to the first one that the store lacks.
 * It checks them and publishes them as ta_seq_publish does, within the quota. They take room in the device tier like blocks of
 * a load. `out` gets a ticket of the pool for ta_move_query, ta_move_wait, ta_move_cancel and ta_move_take_finished. DONE:
 * ta_seq_match_prefix finds the blocks that came. In ta_move_info `moved` counts blocks that came, `present` blocks that others
 * published, `skipped` the rest. A block that is dropped and comes again counts once.
 * FAILED: TA_E_LIMIT (the quota), TA_E_TIER_FULL, TA_E_STALE (the namespace ended), TA_E_CLOSED, TA_E_MEMORY, TA_E_CANCELLED;
 * blocks that came before stay. A ticket that is cancelled ends after the running call of the store, and does not wait for
 * room.
 *   keys   [n, 32]
 * Errors: TA_E_INVALID (n is above 2^34), TA_E_STALE, TA_E_STATE (there is no store), TA_E_LIMIT (4096 of the
 * pool's loads are not finished). */
TA_API ta_status ta_namespace_load(ta_kv_pool* pool, ta_namespace space, const uint8_t* keys, uint64_t n, ta_ticket* out,
                                   ta_error* err);
/* Asks the store for all blocks that are published now, puts those that it lacks, and waits, up to so many nanoseconds (0: does
 * not wait; < 0: no limit beyond the timeouts of the store's calls). TA_OK in either case.
 *   missing   gets how many blocks are not known to be in the store, because the time was over or puts failed; may be NULL
 * Errors: TA_E_STALE, TA_E_STATE (there is no store, or it has no write_through), TA_E_CANCELLED (it was detached meanwhile). */
TA_API ta_status ta_namespace_flush_store(ta_kv_pool* pool, ta_namespace space, int64_t nanoseconds, uint64_t* missing,
                                          ta_error* err);
/* Fills in `stats`. Errors: TA_E_STALE, TA_E_STATE (there is no store). */
TA_API ta_status ta_namespace_get_store_stats(const ta_kv_pool* pool, ta_namespace space, ta_store_stats* stats, ta_error* err);

/* ------------------------------------------------------------------------------------------------ groups
 *
 * Several contexts, each a rank with one GPU or CPU, exchange sequences as compressed, verified blocks. docs/sharing.md has a
 * guide. Each rank has a communication thread and two threads that read and take in blocks; a call enqueues and returns. Every
 * wait has a deadline. When a rank dies, leaves or breaks the protocol, the group ends at all ranks: its tickets end with
 * TA_E_PEER_LOST, and pools go on as before. */

typedef struct ta_group ta_group;

/* Names a group. One rank makes the id and gives it to the others by the caller's means. It has no struct_size: its layout is
 * final. */
typedef struct ta_group_id {
    uint8_t bytes[128];
} ta_group_id;

/* How ranks reach each other. */
typedef int32_t ta_group_kind;
enum ta_group_kind_code {
    TA_GROUP_LOCAL = 1, /* all ranks are in this process */
    TA_GROUP_HOST = 2,  /* in processes of one host and user: messages in /dev/shm, GPU memory by CUDA IPC; up to 63 ranks */
    TA_GROUP_NCCL = 3   /* on any hosts, each rank with a GPU, through libnccl.so.2 of 2.27 or newer; within a host as HOST */
};

/* How blocks go between two ranks. */
typedef int32_t ta_peer_route;
enum ta_peer_route_code {
    TA_ROUTE_HOST_MEMORY = 1, /* through host memory */
    TA_ROUTE_GPU_MEMORY = 2,  /* each GPU reads the memory of the other */
    TA_ROUTE_NCCL = 3         /* by NCCL's messages */
};

typedef int32_t ta_group_state;
enum ta_group_state_code { TA_GROUP_CONNECTING = 1, TA_GROUP_READY = 2, TA_GROUP_ENDED = 3 };

struct ta_x_group_fault;
typedef struct ta_group_options {
    uint32_t struct_size;
    uint32_t rank;  /* 0..ranks - 1 */
    uint32_t ranks; /* 1..1024 */
    ta_group_kind kind;
    const ta_group_id* id; /* the same at all ranks */
    int32_t connect_ms;    /* until all ranks have joined; default 30000; at most 86,400,000, as the next two */
    int32_t operation_ms;  /* a transfer without progress for this time ends: TA_E_TIMEOUT; default 30000 */
    int32_t silence_ms;    /* a rank from which nothing came for this time is lost; default 10000 */
    int32_t reserved;
    uint64_t staging_bytes;               /* host memory that each arriving transfer may take; default 64 MiB */
    const struct ta_x_group_fault* fault; /* turboattention_experimental.h, for tests of TA_GROUP_LOCAL; NULL: none */
    void* nccl_comm;                      /* of TA_GROUP_NCCL: an ncclComm_t of the same ranks; NULL: the group makes one. The
                                             caller leaves it alone until the group is ready, keeps it until the group is
                                             destroyed, and frees it. Use config.blocking = 0. A communicator whose group
                                             failed to connect has been aborted: it is not to be used or freed */
    int32_t hosts_apart;                  /* of TA_GROUP_NCCL: 1 treats ranks of one host as ranks of several, to compare */
    int32_t reserved2;
} ta_group_options;

typedef struct ta_group_info {
    uint32_t struct_size;
    ta_group_state state;
    uint32_t rank, ranks;
    ta_group_kind kind;
    int32_t nccl_version; /* 22809: 2.28.9; 0: not of TA_GROUP_NCCL */
    uint64_t generation;  /* differs from group to group; the same at all ranks */
    char reason[192];     /* why the group has ended; else empty */
} ta_group_info;

/* The connection between this rank and another. */
typedef struct ta_group_peer {
    uint32_t struct_size;
    uint32_t rank;
    ta_peer_route route;
    int32_t reserved;
    uint64_t bytes_per_s; /* speed at which its GPU's memory was read when the group was made; 0: not measured */
    char why[192];        /* why no faster route is taken; else empty */
} ta_group_peer;

/* Makes a fresh id. With TA_GROUP_NCCL this process must live until all ranks have joined, since NCCL listens in it. Errors:
 * TA_E_INVALID (kind), TA_E_UNSUPPORTED (no NCCL). */
TA_API ta_status ta_group_make_id(ta_group_kind kind, ta_group_id* out, ta_error* err);
/* Joins a group and returns; the group is ready when all ranks have joined. Keeps the context alive. Errors: TA_E_INVALID (a value
 * outside its range, an id of another kind, a rank that joined already), TA_E_MISMATCH (another rank, or nccl_comm, says another
 * number of ranks), TA_E_STALE (the group of this id has ended), TA_E_LIMIT (threads), TA_E_UNSUPPORTED (HOST: /dev/shm cannot be
 * used, or more than 63 ranks; NCCL: no library, or a rank without a GPU; a fault), TA_E_MEMORY (/dev/shm is full). If another
 * process joins with an id whose ranks have all joined, or whose group has ended, it may get TA_OK instead of TA_E_INVALID or
 * TA_E_STALE: then its group ends with TA_E_TIMEOUT, and the first one goes on. */
TA_API ta_status ta_group_create(ta_context* context, const ta_group_options* options, ta_group** out, ta_error* err);
/* Leaves the group, which thereby ends at all ranks, and frees it. Transfers end; their tickets are gone with the group. */
TA_API void ta_group_destroy(ta_group* group);
/* Waits while the group connects, for at most so many nanoseconds (0: not at all, < 0: no limit beyond connect_ms). TA_OK in
 * either case: see `state`. */
TA_API ta_status ta_group_poll(const ta_group* group, int64_t nanoseconds, ta_group_state* state, ta_error* err);
/* Fills in `info`. */
TA_API ta_status ta_group_get_info(const ta_group* group, ta_group_info* info, ta_error* err);
/* Fills in `peer` for another rank of a group that is ready. Errors: TA_E_INVALID (rank), TA_E_STATE, and what ta_group_health
 * says. */
TA_API ta_status ta_group_get_peer(const ta_group* group, uint32_t rank, ta_group_peer* peer, ta_error* err);
/* TA_OK while the group connects or is ready; else why it has ended: TA_E_PEER_LOST, TA_E_TIMEOUT (a rank did not join),
 * TA_E_MISMATCH (a rank has another number of ranks, or another version), TA_E_CANCELLED (ta_group_abort), TA_E_MEMORY and
 * TA_E_DEVICE (of this rank), and over NCCL what ta_group_create says of TA_GROUP_HOST. err->rank is the rank at fault, -1: unknown. */
TA_API ta_status ta_group_health(const ta_group* group, ta_error* err);
/* Ends the group at all ranks. Tickets end with TA_E_CANCELLED here, with TA_E_PEER_LOST at other ranks. If the group has
 * already ended, nothing is done. */
TA_API ta_status ta_group_abort(ta_group* group, ta_error* err);
/* A file descriptor that can be read (poll, epoll) while ta_group_take_finished has tickets, or since the state changed. It
 * belongs to the group. Errors: TA_E_UNSUPPORTED (the system gave none). */
TA_API ta_status ta_group_descriptor(const ta_group* group, int32_t* out, ta_error* err);
/* Takes tickets that are finished, each once, the oldest first. If nobody takes them, the last 4096 are kept.
 *   tickets   [most]
 *   n         gets how many */
TA_API ta_status ta_group_take_finished(ta_group* group, ta_ticket* tickets, uint64_t most, uint64_t* n, ta_error* err);

/* The source's part in a transfer: to keep the sequence, or to give it up. */
typedef int32_t ta_send_mode;
enum ta_send_mode_code {
    TA_SEND_COPY = 0, /* the source keeps it, and may go on with it at once */
    TA_SEND_MOVE = 1  /* until the end as in an open plan; then released if the other rank has it, else as before */
};

/* Offers a sequence to another rank, where ta_seq_receive with the same tag takes it: the oldest offer first. The destination
 * gets a new sequence with the same tokens and bits, in the namespace of the same salt, or nothing. If the destination still
 * has blocks that an earlier transfer brought from the same pool, these are shared, not sent again. `out` gets a ticket of this
 * group.
 * Errors: TA_E_INVALID (rank, mode), TA_E_STALE, TA_E_BUSY, TA_E_STATE (the group is not ready; a block was dropped; the pool is
 * of another context), TA_E_NONFINITE (MOVE, on a GPU, as ta_plan_begin), and what ta_group_health says. */
TA_API ta_status ta_seq_send(ta_group* group, ta_kv_pool* pool, ta_seq seq, uint32_t to, uint64_t tag, ta_send_mode mode,
                             ta_ticket* out, ta_error* err);
/* Takes a sequence that rank `from` sends with this tag, now or within operation_ms, into a pool of the same shape and settings
 * (ta_kv_pool_description.fingerprint). All of it or nothing: each block is checked against its identity and its hashes before
 * the sequence exists. Errors: as ta_seq_send. */
TA_API ta_status ta_seq_receive(ta_group* group, ta_kv_pool* pool, uint32_t from, uint64_t tag, ta_ticket* out, ta_error* err);

typedef struct ta_transfer_info {
    uint32_t struct_size;
    ta_move_state state; /* QUEUED: the other rank has not answered yet */
    uint32_t peer;       /* rank */
    ta_status status;    /* of a transfer that failed or was cancelled */
    uint64_t tag;
    uint64_t blocks;        /* of the sequence; 0 if the destination has no offer yet. Of a fetch: keys */
    uint64_t blocks_moved;  /* at the source: written; at the destination: checked */
    uint64_t blocks_shared; /* at the destination: were there already */
    uint64_t bytes_moved;
    ta_seq seq;     /* DONE at the destination: the new sequence; else 0 */
    int64_t length; /* its tokens; of a fetch: tokens that are published under the first keys */
    int64_t block;  /* at which it failed, -1: none */
    int32_t rank;   /* whose fault it was, -1: nobody's */
    int32_t reserved;
    char reason[192]; /* text of `status` */
} ta_transfer_info;

/* Says how far a transfer is. FAILED: TA_E_MISMATCH (the pools cannot exchange blocks), TA_E_TIER_FULL and the other errors of
 * ta_seq_load (at the destination), TA_E_CORRUPT, TA_E_IO (a block at the source), TA_E_BUSY (under falling_precision: a block
 * lost bits meanwhile), TA_E_CLOSED (a pool), TA_E_TIMEOUT, TA_E_PEER_LOST. If the source of a move cannot learn how it ended
 * (TA_E_PEER_LOST, TA_E_TIMEOUT), both ranks may have the sequence; at least one has it. Errors: TA_E_STALE (never given out,
 * or finished more than 4096 tickets ago). */
TA_API ta_status ta_transfer_query(const ta_group* group, ta_ticket ticket, ta_transfer_info* info, ta_error* err);
/* As ta_transfer_query, but waits until the transfer is finished, or for so many nanoseconds (< 0: no limit). TA_OK in either
 * case: see info->state. Errors: as ta_transfer_query. */
TA_API ta_status ta_transfer_wait(const ta_group* group, ta_ticket ticket, int64_t nanoseconds, ta_transfer_info* info,
                                  ta_error* err);
/* Asks for the end of a transfer and returns. The ticket is finished when neither rank touches its blocks any more: CANCELLED,
 * or DONE if the transfer was faster. The other rank's ticket fails with TA_E_CANCELLED. If the two have not met (a receive
 * without an offer), the other rank hears nothing of it. Errors: as ta_transfer_query. */
TA_API ta_status ta_transfer_cancel(ta_group* group, ta_ticket ticket, ta_error* err);

/* Shares a namespace with other ranks of a group: those that have joined with a namespace of the same salt, in a pool of the
 * same fingerprint. Each rank tells these ranks what it publishes, moves and drops; ranks that have not joined learn nothing of
 * it. A key must also stand for the part of the model that a pool has: ranks that hold different layers or heads use different
 * salts. A namespace leaves with ta_namespace_leave, and when it, its pool or the group ends; blocks that were fetched stay.
 * Errors: TA_E_INVALID (a namespace of this salt and fingerprint of this rank has joined already), TA_E_STALE, TA_E_LIMIT
 * (threads), TA_E_STATE (the group is not ready; the pool is of another context); leave: TA_E_STATE (it has not joined); and what
 * ta_group_health says. */
TA_API ta_status ta_namespace_join(ta_group* group, ta_kv_pool* pool, ta_namespace space, ta_error* err);
TA_API ta_status ta_namespace_leave(ta_group* group, ta_kv_pool* pool, ta_namespace space, ta_error* err);

typedef int32_t ta_prefix_answer;
enum ta_prefix_answer_code {
    TA_PREFIX_UNKNOWN = 0, /* some rank has not announced yet what it has, and none is known to have the block */
    TA_PREFIX_NO = 1,
    TA_PREFIX_YES = 2
};

/* The place of a block. It has no struct_size: its layout is final. */
typedef struct ta_prefix_place {
    ta_prefix_answer answer;
    uint32_t rank; /* of YES: this rank if it has the block, else the rank that has it in the fastest tier */
    ta_tier tier;  /* there */
} ta_prefix_place;

/* Says which ranks have the blocks of keys, as far as ranks have announced: a hint, which may be out of date. Waits for ranks
 * that have not announced anything, up to so many nanoseconds (0: not at all, < 0: no limit); what is not known then is
 * UNKNOWN.
 *   keys     [n, 32]
 *   places   [n]
 * Errors: TA_E_STALE, TA_E_STATE (the namespace has not joined), and what ta_group_health says. */
TA_API ta_status ta_namespace_lookup(const ta_group* group, const ta_kv_pool* pool, ta_namespace space, const uint8_t* keys,
                                     uint64_t n, int64_t nanoseconds, ta_prefix_place* places, ta_error* err);
/* Brings the blocks of the first keys that this rank lacks from the ranks where they are nearest. It checks the blocks and
 * publishes them here as ta_seq_publish does: within the quota, the blocks of each rank all or none. `out` gets a ticket of
 * this group. When it is DONE, ta_transfer_info.length says how many tokens ta_seq_match_prefix finds now. These may be fewer
 * than asked for: blocks that a rank has dropped meanwhile do not come. If a rank fails, the blocks from earlier ranks stay.
 * ta_transfer_info.peer is the rank that was asked last.
 * Errors: as ta_namespace_lookup; of the ticket: as of a receive, TA_E_LIMIT (the quota), TA_E_STALE (the namespace ended). */
TA_API ta_status ta_namespace_fetch(ta_group* group, ta_kv_pool* pool, ta_namespace space, const uint8_t* keys, uint64_t n,
                                    ta_ticket* out, ta_error* err);

/* Which ranks get the results of attention over a partitioned sequence. */
typedef int32_t ta_partition_output;
enum ta_partition_output_code {
    TA_OUTPUT_ALL = 0,   /* each rank gets all of them, the same bits */
    TA_OUTPUT_HEADS = 1, /* rank r of n gets query heads q_heads * r / n up to q_heads * (r + 1) / n */
    TA_OUTPUT_ONE = 2    /* output_rank gets all of them */
};

typedef struct ta_partition_options {
    uint32_t struct_size;
    ta_partition_output output;
    uint32_t first_rank;  /* has block 0; block i is at rank (first_rank + i) mod ranks */
    uint32_t output_rank; /* of TA_OUTPUT_ONE; else 0 */
    uint64_t tag;         /* of the sequence in the group; no other partitioned sequence of this rank has it */
} ta_partition_options;

/* Spreads a sequence over the ranks of a group. All ranks make this call on a sequence of the same length with the same
 * options. From then on each rank has its own blocks of 64 tokens, and the last block in any case; it frees the others. All
 * ranks then make the same calls on the sequence: ta_plan_begin with the same sequences in the same order, ta_append with the
 * same tokens, ta_attend with the same queries, ta_plan_end with the same keep. ta_attend merges the results of all ranks.
 * Outputs that a rank does not get are not written. The sequences of a step are all partitioned alike, or none is partitioned.
 * These calls wait for other ranks, up to operation_ms:
 *   - If every rank is a GPU of its own, and each reaches the memory of each other: ta_plan_begin, and ta_plan_end of a step
 *     with queries. ta_attend enqueues the exchange and may be captured. An exchange that fails writes NaN, and ta_plan_end
 *     says why.
 *   - Otherwise: ta_attend, which then cannot be captured (TA_E_UNSUPPORTED).
 * The sequence cannot be forked, published, saved or sent. It can be truncated to multiples of 64, or within the last block of
 * the last step that brought tokens. A truncation fails with TA_E_STATE if windows would see blocks that they may have passed
 * (docs/layers.md), and with TA_E_UNSUPPORTED in pools with universal open scales unless it is to 0.
 * Later errors of ta_plan_begin, ta_attend and ta_plan_end: TA_E_INVALID (sequences of a step differ), TA_E_MISMATCH (another
 * rank's step or call has other arguments), TA_E_CANCELLED (another rank gave the step up), TA_E_TIMEOUT, TA_E_PEER_LOST: abort
 * the step at all ranks. Errors: TA_E_INVALID (an option outside its range, the tag of another sequence), TA_E_STALE, TA_E_BUSY,
 * TA_E_STATE (the group is not ready; the sequence is partitioned already; its universal scales are unknown after a match,
 * fork, load or truncate: end a step with new tokens first), TA_E_UNSUPPORTED (more than 64 ranks; a sequence that
 * was shifted; batch_invariant), and what ta_group_health says. */
TA_API ta_status ta_seq_partition(ta_group* group, ta_kv_pool* pool, ta_seq seq, const ta_partition_options* options,
                                  ta_error* err);

/* ------------------------------------------------------------------------------------------------ plan */

/* One batch step over all layers. Keeps its pool alive. Exclusive: one thread at a time. */
typedef struct ta_plan ta_plan;

/* Creates a plan; it can be begun and ended any number of times. `options` is reserved and must be NULL. */
TA_API ta_status ta_plan_create(ta_kv_pool* pool, const void* options, ta_plan** out, ta_error* err);
/* Aborts the plan if it is open, then frees it. If its stream is being captured, this may invalidate the capture. In that case
 * calls of the open step that were not captured must be complete, and the graph must not be launched. */
TA_API void ta_plan_destroy(ta_plan* plan);

/* Sets the CUDA stream on which the plan's later calls enqueue, default NULL; it must outlive them. After a step of one kind
 * has run without a capture, a step's append and attend calls may be captured into a graph (cudaStreamBeginCapture between
 * begin and end). Then the graph may be launched in place of these calls between any later begin and end of a step of the same
 * kind: with the same number of sequences, of query tokens for each, the same tensors, and the same number of query heads in
 * the last attend before that begin. Lengths may differ. A plan may have graphs of several kinds; end() refuses a step of
 * another kind.
 * Errors: TA_E_STATE (the plan is open; the stream is being captured, and the plan ran on another one), TA_E_UNSUPPORTED (on a
 * CPU). */
TA_API ta_status ta_plan_set_stream(ta_plan* plan, ta_stream stream, ta_error* err);

/* How a step differs from an ordinary one. */
typedef struct ta_step_options {
    uint32_t struct_size;
    int32_t wait_ms; /* how long the begin may wait for room; 0: ta_tier_options.begin_wait_ms; -1: not at all */
    /* Default off. On: the end may keep only a part of the new tokens, for the verification of drafts. No page is closed before
     * the end. Until then a block that the step fills takes room twice, at 8 bits and at its own bits, and is read at 8 bits
     * (but see ta_numerics.batch_invariant). TA_E_UNSUPPORTED with TA_OPEN_SCALE_UNIVERSAL and new tokens. */
    ta_switch drafts;
    /* Default off: a layer may be attended to after later layers were appended, as in models whose later layers use K and V of
     * an earlier one. On: the caller attends to a layer before it appends the next one. Then the plan keeps 8-bit pages of one
     * layer instead of all: a prompt takes 1/layers of the memory beside the pool. */
    ta_switch layers_in_order;
    /* [sum(n_new)] Token trees: the parent of each new token, an index among the sequence's new tokens below its own; -1: the
     * sequence's last token. A new token's query sees the tokens before the step, its ancestors and itself; for ALiBi and
     * windows its position follows from its depth in the tree. NULL: each token's parent is the token before it. Implies
     * `drafts`; n_query must be n_new, at most 64 for a sequence whose tokens are no chain. */
    const int32_t* tree_parent;
    /* [sum(n_query)] The position of each query token in its sequence, from 0 to the sequence's new length - 1, in any order; a
     * query sees the tokens up to its own position. NULL: the positions of the last n_query tokens. Not with tree_parent.
     * Attends of such a step take only TA_MASK_CAUSAL and cannot be captured (TA_E_UNSUPPORTED); no policy observes them.
     * Consecutive positions are the fastest. */
    const int64_t* query_positions;
} ta_step_options;

/* Opens the plan on a batch and reserves all memory that the step needs, copies of shared blocks included.
 *   seqs      [n_seqs] distinct sequences of the pool that are in no other open plan
 *   n_new     [n_seqs] tokens that ta_append will bring for each, 0 and up; NULL: all 0
 *   n_query   [n_seqs] query tokens of ta_attend for each, 0 and up: the last tokens; NULL: as n_new. If there are more than
 *             the sequence will have tokens, the first queries stand before token 0, and see nothing under TA_MASK_CAUSAL
 *   options   may be NULL
 * Errors: TA_E_INVALID, TA_E_STALE, TA_E_BUSY, TA_E_TIER_FULL, TA_E_MEMORY, TA_E_LIMIT (more than 2^40 tokens of a sequence, or
 * 2^31 - 1 query tokens of the step, where a query of a shifted sequence counts once more for each gap; on a GPU more than 2^30 of
 * either or of new tokens), TA_E_STATE (open already; queries before the new tokens see what windows have passed, or stand before a
 * gap of ta_seq_shift), TA_E_UNSUPPORTED (drafts; trees in a pool with batch_invariant), on a GPU TA_E_NONFINITE (earlier
 * tokens were not finite; only once: the next begin goes on). With tiers it waits for room and for blocks to come from disk;
 * then also TA_E_BUSY (moves keep taking the step's blocks to disk), TA_E_IO and TA_E_CORRUPT (err->block). */
TA_API ta_status ta_plan_begin(ta_plan* plan, uint32_t n_seqs, const ta_seq* seqs, const int32_t* n_new, const int32_t* n_query,
                               const ta_step_options* options, ta_error* err);

/* Quantizes the new tokens of one layer and appends them. Pages that become full are closed to their bits. Synchronous on a
 * CPU.
 *   k      [sum(n_new), kv_heads, head_dim] F16, BF16 or F32, the sequences one after the other, keys after their rotary
 *          embedding
 *   v      [sum(n_new), kv_heads, v_head_dim] likewise
 * Each layer is appended once for each begin, in any order. Errors: TA_E_INVALID (no such layer; on a GPU memory that it cannot
 * reach), TA_E_SHAPE, TA_E_DTYPE, TA_E_NONFINITE (on a GPU the sequence's next begin reports it), TA_E_STATE, TA_E_MEMORY. */
TA_API ta_status ta_append(ta_plan* plan, uint32_t layer, const ta_tensor* k, const ta_tensor* v, ta_error* err);

typedef struct ta_attend_options {
    uint32_t struct_size;
    ta_mask mask;
    float scale;   /* multiplies q.k; above 0 up to 64; default 1/sqrt(head_dim) */
    float softcap; /* c: score = c * tanh(score / c), 2^-10..2^14, after scale, before ALiBi and masks; 0: none */
    /* Keys that a query sees, its own included; in both directions under TA_MASK_FULL. 0: no limit, or, if the layer has a
     * window, that window. A layer with a window takes no larger one. */
    int64_t window;
    const float* alibi_slopes; /* [q_heads], up to 2^56: adds slope * (j - p) for key j and query position p; NULL: none */
    /* [q_heads] learned sink logits, finite: exp(sink) joins the denominator; NULL: none. Sinks and slopes are in the memory of
     * the tensors, and on a GPU in use until the work is done. */
    const float* sinks;
    ta_exp exp; /* default: the pool's */
    ta_p p;     /* default: the pool's */
} ta_attend_options;

/* Attends with the plan's queries to all tokens of their sequences, the plan's new ones included. Synchronous on a CPU.
 *   q        [sum(n_query), q_heads, head_dim]; q_heads is kv_heads x 1..128; query head h reads kv head
 *            h / (q_heads / kv_heads)
 *   out      [sum(n_query), q_heads, v_head_dim], any of the three types. Its memory range must not overlap those of q and lse,
 *            and its rows must not overlap each other (the longer of its two strides must step over all that the shorter one
 *            reaches). F16 beyond 65504 becomes Inf
 *   lse      [sum(n_query), q_heads] F32, contiguous, may be NULL: natural log of the denominator, scale and sink included
 *   options  may be NULL
 * Pages that get new tokens in this step are read at 8 bits, also their old tokens, and also if the step fills them. Other full
 * pages are read at their stored bits. (With ta_numerics.batch_invariant a query reads only its own page at 8 bits.) Once they
 * are appended, layers may be attended to in any order and repeatedly (ta_step_options.layers_in_order). If a row sees no key,
 * out = 0 and lse = sink or -inf.
 * Errors: TA_E_INVALID (no such layer, an option outside its range, outputs that overlap; on a GPU memory that it cannot
 * reach), TA_E_SHAPE, TA_E_DTYPE, TA_E_NONFINITE (on a CPU), TA_E_STATE, TA_E_MEMORY, TA_E_UNSUPPORTED
 * (ta_numerics.batch_invariant, ta_seq_shift and query_positions say what they exclude; on a GPU more than 16 query heads for
 * each kv head: in token trees, if attention is observed, with TA_P_U16, and if no prefill kernel takes the prompts,
 * docs/gpu.md), on a GPU TA_E_LIMIT (too many rows and pages). */
TA_API ta_status ta_attend(ta_plan* plan, uint32_t layer, const ta_tensor* q, const ta_tensor* out, float* lse,
                           const ta_attend_options* options, ta_error* err);

/* Commits: the new tokens belong to their sequences.
 *   keep   [n_seqs] of a step with ta_step_options.drafts: 1 + the index, among the sequence's new tokens, of the last token
 *          that stays. This token and its ancestors stay, in their order; the others leave no trace. 0: none stays. NULL: all
 *          stay, and must be a chain. Without `drafts` it must be NULL.
 * Errors, after which the plan stays open: TA_E_STATE (not open, or a layer lacks its append), TA_E_INVALID (keep), TA_E_MEMORY,
 * TA_E_DEVICE. If a step with drafts fails with one of the last two, the call may already have removed the tokens that do not
 * stay. Then ta_plan_end with the same `keep` continues from there; with another `keep` it fails with TA_E_STATE, and so do
 * appends and attends. ta_plan_abort leaves sequences as they were before the begin. */
TA_API ta_status ta_plan_end(ta_plan* plan, const int32_t* keep, ta_error* err);
/* Closes the plan without committing: sequences are as before begin. Errors: TA_E_STATE (not open). */
TA_API ta_status ta_plan_abort(ta_plan* plan, ta_error* err);

/* ------------------------------------------------------------------------------------------------ dense attention */

/* How ta_attend_dense quantizes. */
typedef int32_t ta_dense_variant;
enum ta_dense_variant_code {
    TA_DENSE_INT8_PAGE = 0, /* TurboAttention: K, V one scale for 64 tokens, levels +-119; P U8, exp POLY */
    TA_DENSE_INT_FLASH = 1, /* INT-FlashAttention, full INT8: K per token, V per tensor, levels +-127; P S8_127, exp EXACT */
    /* INT-FlashAttention, half INT8: Q, K as above; P and V in float, whatever p and v_granularity say */
    TA_DENSE_INT_FLASH_HALF = 2,
    /* DistrAttention: scores of d / group_size channels. For each 128 query tokens of a head, similar channels are put into
     * groups. One channel of q stands for its group, and the group's channels of k are summed. Nothing is quantized; P and V
     * are float, whatever p and v_granularity say; exp EXACT. docs/numerics.md, section 8, defines it. */
    TA_DENSE_DISTR = 3
};

typedef struct ta_dense_options {
    uint32_t struct_size;
    ta_dense_variant variant;
    uint32_t batch;               /* sequences, up to 2^24; default 1 */
    const int64_t* q_offsets;     /* [batch + 1] prefix sums of query tokens; NULL: q.tokens split evenly */
    const int64_t* k_offsets;     /* [batch + 1] prefix sums of keys; NULL: k.tokens split evenly */
    ta_granularity v_granularity; /* PAGE, TENSOR or TOKEN; default: the variant's */
    ta_nonfinite nonfinite;
    const ta_attend_options* attend; /* mask, scale, softcap, window, slopes, sinks, exp, p; NULL: defaults */
    ta_stream stream;                /* of a GPU context: where the work is enqueued; NULL on a CPU */
    uint32_t group_size;             /* of TA_DENSE_DISTR: channels that share a score, 2, 3 or 4; default 2; else 0 */
} ta_dense_options;

/* Attention over plain tensors, without a pool: quantizes Q, K, V to INT8, or groups channels (TA_DENSE_DISTR). Synchronous on
 * a CPU; on a GPU it enqueues on options.stream and returns. The offsets are in host memory and are read before the call
 * returns, so it fails with TA_E_STATE if the stream is being captured.
 *   q, out   [sum of query tokens, q_heads, head_dim]
 *   k, v     [sum of keys, kv_heads, head_dim]; q_heads = kv_heads x 1..16; head_dim 64, 96, 128 or 256, of
 *            TA_DENSE_DISTR 32, 64 or 128
 *   lse      [q.tokens, q_heads] or NULL
 * A GPU takes values that are not finite as 0. Under TA_NONFINITE_REJECT it counts them, and the context's next rejecting call
 * that finds a count fails once with TA_E_NONFINITE. To ask about calls that are complete, call with no query tokens.
 * Errors: as ta_attend, TA_E_INVALID also for offsets that are no prefix sums, TA_E_NONFINITE also on a GPU, TA_E_UNSUPPORTED
 * (head_dim; a stream on a CPU; a driver without memory pools). */
TA_API ta_status ta_attend_dense(ta_context* context, const ta_tensor* q, const ta_tensor* k, const ta_tensor* v,
                                 const ta_tensor* out, float* lse, const ta_dense_options* options, ta_error* err);

/* ------------------------------------------------------------------------------------------------ merging */

/* Merges attention of the same queries over n disjoint sets of keys, each with its LSE, into attention over all of these keys:
 * m = the largest LSE, w = exp(lse - m), out = sum w O / sum w, lse = m + log(sum w). This is for engines that split the keys
 * of a query over GPUs and transport the parts by their own means. FlashInfer calls it merging of attention states; the
 * arithmetic is that of FlashAttention's split-KV. Synchronous on a CPU; on a GPU it enqueues on `stream` and returns, needs no
 * memory, and can be captured in a graph.
 *   n       1..64
 *   parts   [n] of one shape [tokens, heads, head_dim], head_dim 1..1024; types and strides may differ. The structs lie
 *           struct_size bytes apart; struct_size is the same in all
 *   lses    [n] of [tokens, heads] F32, contiguous, in the context's memory; may be NULL if tokens is 0. The arrays `lses` and
 *           `parts` themselves are in host memory and are read before the call returns
 *   out     of that shape, any of the three types; F16 beyond 65504 becomes Inf
 *   lse     [tokens, heads] F32, contiguous, may be NULL
 *   stream  of a GPU context; NULL on a CPU
 * Parts are merged in the order of the list, in fp32, by operations that are the same on CPUs and GPUs: the same inputs give the
 * same bits on every rank and in every run. A single part comes out as it went in, except that -0 becomes 0. If the lse of a
 * part is -inf, or more than 87.4 below the largest, the part adds nothing, even if its O has NaN. If all are -inf, out = 0 and
 * lse = -inf. Otherwise NaN and Inf in O affect only their element. An lse of NaN or +inf is refused on a CPU (err->token,
 * err->head: a query head). On a GPU the call cannot wait to refuse it, and out and lse of its row become NaN. A learned sink
 * belongs to one part: give it only to that call of attention.
 * out may be one of the parts (the same data, dtype and strides), and lse one of the lses; apart from that, outputs must not
 * overlap anything, as in ta_attend.
 * Errors: TA_E_INVALID (n, outputs that overlap; on a GPU memory that it cannot reach), TA_E_SHAPE, TA_E_DTYPE, TA_E_NONFINITE
 * (on a CPU), TA_E_UNSUPPORTED (head_dim; a stream on a CPU), on a GPU TA_E_STATE (NULL while a stream that synchronizes with the
 * legacy default stream is captured). */
TA_API ta_status ta_merge_states(ta_context* context, uint32_t n, const ta_tensor* parts, const float* const* lses,
                                 const ta_tensor* out, float* lse, ta_stream stream, ta_error* err);

/* ------------------------------------------------------------------------------------------------ calibration */

/* Ranks the kv heads of each layer for 4 or 2 bits (TurboAttention, head-wise mixed precision): priority = (max - min over the
 * head) * standard deviation over its channels of (max - min of the channel). The n_low heads of a layer with the lowest
 * priorities get 2 bits. K and V are ranked separately. This is the published ranking, from the ranges of K and V alone. On the
 * model in examples/tinylm its maps are no better than random ones, but maps by measured costs are (ta_calibrator_choose).
 * Exclusive: one thread at a time. */
typedef struct ta_calibrator ta_calibrator;

/* Errors: TA_E_INVALID (layers, kv_heads), TA_E_UNSUPPORTED (head_dim). */
TA_API ta_status ta_calibrator_create(ta_context* context, uint32_t layers, uint32_t kv_heads, uint32_t head_dim,
                                      ta_calibrator** out, ta_error* err);
/* The same for layers of different shapes, or K and V of different head_dim. Of the pool options only layers, kv_heads,
 * head_dim, v_head_dim and layer_groups are read. [layers, kv_heads] in the calls below means [layers, kv_heads of the layer],
 * as in ta_kv_pool_options. Errors: those of ta_kv_pool_create for these fields. */
TA_API ta_status ta_calibrator_create_for(ta_context* context, const ta_kv_pool_options* options, ta_calibrator** out,
                                          ta_error* err);
TA_API void ta_calibrator_destroy(ta_calibrator* calibrator);
/* Takes K and V of some tokens of a layer into account: [tokens, kv_heads, head_dim or v_head_dim]. With a GPU context they
 * must lie in memory that the GPU can copy from, and must be complete when the call is made, since it has no stream. They are
 * copied to the host, and the call waits for that. Errors: TA_E_INVALID (no such layer), TA_E_SHAPE, TA_E_DTYPE, TA_E_NONFINITE
 * (on a GPU too), TA_E_MEMORY. */
TA_API ta_status ta_calibrator_observe(ta_calibrator* calibrator, uint32_t layer, const ta_tensor* k, const ta_tensor* v,
                                       ta_error* err);
/* Writes the maps for ta_kv_pool_options and, where not NULL, the priorities behind them.
 *   n_low                    heads of each layer that get 2 bits, for K and for V each: 0..the least kv_heads of a layer
 *   k_bits, v_bits           [layers, kv_heads]
 *   k_priority, v_priority   [layers, kv_heads], may be NULL
 * Errors: TA_E_INVALID (n_low), TA_E_STATE (a layer was never observed). */
TA_API ta_status ta_calibrator_finish(const ta_calibrator* calibrator, uint32_t n_low, uint8_t* k_bits, uint8_t* v_bits,
                                      float* k_priority, float* v_priority, ta_error* err);
/* Writes the maps of least total cost whose blocks have at most block_bytes, over all layers at once. No observation is needed.
 * The total is the sum of the costs of K and V of all heads, in any unit. Of maps with equal totals the one with the smallest
 * blocks is taken. The choice is exact, with one exception: if thousands of heads have many equal costs, the total may be above
 * the least by less than what one head saves by its next step (docs/numerics.md, section 5).
 * `tinylm calibrate` measures the cost of a head's bits: how far the model's predictions are from those with 8 bits in all
 * heads if only this head has these bits.
 *   k_cost, v_cost   [layers, kv_heads, 3]: of K and of V with 8 bits, with 4, and with 2; +Inf: never with these bits
 *   block_bytes      the most that a full block may have: ta_kv_pool_stats.channel_block_bytes, or token_block_bytes where all
 *                    heads have 8 bits (without what universal open scales add)
 *   k_bits, v_bits   [layers, kv_heads]
 * Errors: TA_E_INVALID (a cost of NaN or -Inf; K or V of a head whose three costs are all +Inf; block_bytes below the smallest block
 * that the costs allow: ta_error.bytes says by how much). */
TA_API ta_status ta_calibrator_choose(const ta_calibrator* calibrator, const float* k_cost, const float* v_cost,
                                      uint64_t block_bytes, uint8_t* k_bits, uint8_t* v_bits, ta_error* err);

#ifdef __cplusplus
}
#endif
#endif /* TURBOATTENTION_H */
