// What Go cannot pass to C directly: structs that would hold Go pointers are put together here, on C's stack, from pointers
// that cgo pins for the call; and callbacks become calls of exported Go functions.
// SPDX-License-Identifier: Apache-2.0
#ifndef TURBOATTENTION_GO_SHIM_H
#define TURBOATTENTION_GO_SHIM_H

#include <stdint.h>
#include <turboattention.h>

// What a plan's calls use, in C memory, so that a step allocates nothing. The tensors' data and the options' pointers are NULL
// between calls.
typedef struct tago_plan {
    ta_plan* plan;
    ta_tensor a, b;
    ta_attend_options options;
    ta_step_options step;
    ta_seq* seqs;      // [capacity], followed by n_new and n_query
    int32_t* n_new;    // [capacity]; at the end of a step what it keeps
    int32_t* n_query;  // [capacity]
    uint32_t capacity;
    ta_error err;
} tago_plan;

tago_plan* tago_plan_create(ta_kv_pool* pool, ta_status* status, ta_error* err);
void tago_plan_destroy(tago_plan* plan);
int tago_plan_reserve(tago_plan* plan, uint32_t n);  // 0: no memory
// The plan's calls; Go would box an incomplete ta_plan* for cgo's check, which allocates. n_new, n_query and keep: whether there are any.
ta_status tago_begin(tago_plan* plan, uint32_t n, int n_new, int n_query, const int32_t* tree_parent,
                     const int64_t* query_positions);
ta_status tago_end(tago_plan* plan, int keep);
ta_status tago_abort(tago_plan* plan);
ta_status tago_append(tago_plan* plan, uint32_t layer, const char* k, const char* v);
ta_status tago_attend(tago_plan* plan, uint32_t layer, const char* q, char* out, float* lse, const float* slopes,
                      const float* sinks);

// `log` and `allocator` are handles of Go values, 0: none. The library releases them, whether the call succeeds or fails.
ta_status tago_context_create(ta_context_options* options, uintptr_t log, ta_log_level level, uintptr_t allocator,
                              ta_context** out, ta_error* err);
// Pointers of `options`, `numerics`, `tiers` and `rotary` are set here; tiers and rotary may be NULL.
ta_status tago_kv_pool_create(ta_context* context, ta_kv_pool_options* options, ta_numerics* numerics, ta_tier_options* tiers,
                              const ta_rotary* rotary, const ta_layer_group* groups, const uint8_t* k_bits,
                              const uint8_t* v_bits, const float* k_offset, const double* angles, const char* disk_folder,
                              const char* disk_path, ta_kv_pool** out, ta_error* err);

ta_status tago_calibrator_create_for(ta_context* context, const ta_kv_pool_options* options, const ta_layer_group* groups,
                                     ta_calibrator** out, ta_error* err);

// `progress` is a handle, which the caller deletes; 0: none.
ta_status tago_seq_save(ta_kv_pool* pool, ta_seq seq, const char* path, uintptr_t progress, ta_error* err);
ta_status tago_seq_load(ta_kv_pool* pool, const char* path, uintptr_t progress, ta_seq* out, ta_error* err);
ta_status tago_seq_export(ta_kv_pool* pool, ta_seq seq, uintptr_t sink, uint64_t* bytes, ta_error* err);  // likewise
ta_status tago_kv_pool_save(ta_kv_pool* pool, const char* path, ta_save_flags flags, uintptr_t progress, ta_error* err);
ta_status tago_kv_pool_load(ta_kv_pool* pool, const char* path, uintptr_t progress, ta_loaded_seq* loaded, uint64_t most,
                            uint64_t* n, ta_error* err);

// `store` is a handle of a Go value, which the library releases, whatever becomes of the call.
ta_status tago_attach_store(ta_kv_pool* pool, ta_namespace space, uintptr_t store, const ta_store_options* options,
                            ta_error* err);
// Of a store that no call of the library is given.
void tago_release_store(const ta_block_store* store);

ta_status tago_group_create(ta_context* context, ta_group_options* options, const ta_group_id* id, ta_group** out,
                            ta_error* err);

// Tensors come as ta_tensor without data, in order, and the data as pointers of their own.
ta_status tago_attend_dense(ta_context* context, const ta_tensor* qkvo, const char* q, const char* k, const char* v, char* out,
                            float* lse, const ta_dense_options* options, const ta_attend_options* attend,
                            const int64_t* q_offsets, const int64_t* k_offsets, const float* slopes, const float* sinks,
                            ta_error* err);
// Up to 65 pointers that go by value, so that cgo pins each of them.
typedef struct tago_pointers {
    char* at[65];
} tago_pointers;
// `tensors`, `data` and `lses` have n <= 64 parts, then the output.
ta_status tago_merge_states(ta_context* context, uint32_t n, const ta_tensor* tensors, tago_pointers data, tago_pointers lses,
                            ta_stream stream, ta_error* err);
ta_status tago_calibrator_observe(ta_calibrator* calibrator, uint32_t layer, const ta_tensor* kv, const char* k, const char* v,
                                  ta_error* err);

#endif
