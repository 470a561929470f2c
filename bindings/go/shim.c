// SPDX-License-Identifier: Apache-2.0
#include "shim.h"

#include <stdlib.h>
#include <string.h>

// Exported by callbacks.go.
extern void tagoLog(uintptr_t sink, int32_t level, char* message);
extern void* tagoAllocate(uintptr_t allocator, size_t bytes, size_t alignment);
extern void tagoDeallocate(uintptr_t allocator, void* ptr, size_t bytes, size_t alignment);
extern int32_t tagoReport(uintptr_t progress, uint64_t done, uint64_t total);
extern int32_t tagoWrite(uintptr_t sink, uint64_t offset, void* data, uint64_t bytes);
extern int32_t tagoStore(uintptr_t store, int32_t method, ta_store_item* items, uint64_t n, int64_t nanoseconds);
extern void tagoRelease(uintptr_t handle);

static ta_tensor with_data(const ta_tensor* shape, const char* data) {
    ta_tensor t = *shape;
    t.data = (void*)(uintptr_t)data;
    return t;
}

/* ---------------------------------------------------------------------------------------------------------------- plans */

tago_plan* tago_plan_create(ta_kv_pool* pool, ta_status* status, ta_error* err) {
    tago_plan* p = calloc(1, sizeof *p);
    if (!p) {
        *status = TA_E_MEMORY;
        return NULL;
    }
    p->a.struct_size = p->b.struct_size = sizeof p->a;
    p->options.struct_size = sizeof p->options;
    p->step.struct_size = sizeof p->step;
    *status = ta_plan_create(pool, NULL, &p->plan, err);
    if (*status == TA_OK) return p;
    free(p);
    return NULL;
}

void tago_plan_destroy(tago_plan* plan) {
    ta_plan_destroy(plan->plan);
    free(plan->seqs);
    free(plan);
}

int tago_plan_reserve(tago_plan* plan, uint32_t n) {
    if (n <= plan->capacity) return 1;
    void* memory = realloc(plan->seqs, n * (sizeof(ta_seq) + 2 * sizeof(int32_t)));
    if (!memory) return 0;
    plan->seqs = memory;
    plan->n_new = (int32_t*)(plan->seqs + n);
    plan->n_query = plan->n_new + n;
    plan->capacity = n;
    return 1;
}

ta_status tago_begin(tago_plan* plan, uint32_t n, int n_new, int n_query, const int32_t* tree_parent,
                     const int64_t* query_positions) {
    ta_step_options options = plan->step;
    options.tree_parent = tree_parent;
    options.query_positions = query_positions;
    return ta_plan_begin(plan->plan, n, plan->seqs, n_new ? plan->n_new : NULL, n_query ? plan->n_query : NULL, &options,
                         &plan->err);
}
ta_status tago_end(tago_plan* plan, int keep) {
    return ta_plan_end(plan->plan, keep ? plan->n_new : NULL, &plan->err);
}
ta_status tago_abort(tago_plan* plan) {
    return ta_plan_abort(plan->plan, &plan->err);
}

ta_status tago_append(tago_plan* plan, uint32_t layer, const char* k, const char* v) {
    const ta_tensor tk = with_data(&plan->a, k), tv = with_data(&plan->b, v);
    return ta_append(plan->plan, layer, &tk, &tv, &plan->err);
}

ta_status tago_attend(tago_plan* plan, uint32_t layer, const char* q, char* out, float* lse, const float* slopes,
                      const float* sinks) {
    const ta_tensor tq = with_data(&plan->a, q), to = with_data(&plan->b, out);
    ta_attend_options options = plan->options;
    options.alibi_slopes = slopes;
    options.sinks = sinks;
    return ta_attend(plan->plan, layer, &tq, &to, lse, &options, &plan->err);
}

/* ------------------------------------------------------------------------------------------------------------ callbacks */

static void release(void* user) {
    tagoRelease((uintptr_t)user);
}
static void log_message(ta_log_level level, const char* message, void* user) {
    tagoLog((uintptr_t)user, level, (char*)(uintptr_t)message);
}
static void* allocate(size_t bytes, size_t alignment, void* user) {
    return tagoAllocate((uintptr_t)user, bytes, alignment);
}
static void deallocate(void* ptr, size_t bytes, size_t alignment, void* user) {
    tagoDeallocate((uintptr_t)user, ptr, bytes, alignment);
}
static int32_t report(void* user, uint64_t done, uint64_t total) {
    return tagoReport((uintptr_t)user, done, total);
}

static int32_t write_bytes(void* user, uint64_t offset, const void* data, uint64_t bytes) {
    return tagoWrite((uintptr_t)user, offset, (void*)(uintptr_t)data, bytes);
}

static int32_t store_exists(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) {
    return tagoStore((uintptr_t)user, 0, items, n, nanoseconds);
}
static int32_t store_get(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) {
    return tagoStore((uintptr_t)user, 1, items, n, nanoseconds);
}
static int32_t store_put(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) {
    return tagoStore((uintptr_t)user, 2, items, n, nanoseconds);
}
static int32_t store_remove(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) {
    return tagoStore((uintptr_t)user, 3, items, n, nanoseconds);
}

static ta_progress progress_of(uintptr_t handle) {
    return (ta_progress){.struct_size = sizeof(ta_progress), .report = handle ? report : NULL, .user = (void*)handle};
}

ta_status tago_context_create(ta_context_options* options, uintptr_t log, ta_log_level level, uintptr_t allocator,
                              ta_context** out, ta_error* err) {
    const ta_log_sink sink = {sizeof sink, level, log_message, (void*)log, release};
    const ta_allocator hooks = {sizeof hooks, allocate, deallocate, (void*)allocator, release};
    ta_context_options o = *options;
    o.struct_size = sizeof o;
    if (log) o.log = &sink;
    if (allocator) o.allocator = &hooks;
    return ta_context_create(&o, out, err);
}

/* ---------------------------------------------------------------------------------------------------------------- pools */

ta_status tago_kv_pool_create(ta_context* context, ta_kv_pool_options* options, ta_numerics* numerics, ta_tier_options* tiers,
                              const ta_rotary* rotary, const ta_layer_group* groups, const uint8_t* k_bits,
                              const uint8_t* v_bits, const float* k_offset, const double* angles, const char* disk_folder,
                              const char* disk_path, ta_kv_pool** out, ta_error* err) {
    ta_kv_pool_options o = *options;
    ta_numerics n = *numerics;
    ta_tier_options t = {0};
    ta_rotary r = {0};
    o.struct_size = sizeof o;
    o.layer_groups = groups;
    o.k_bits = k_bits;
    o.v_bits = v_bits;
    o.numerics = &n;
    n.struct_size = sizeof n;
    n.k_offset = k_offset;
    if (tiers) {
        t = *tiers;
        t.struct_size = sizeof t;
        t.disk_folder = disk_folder;
        t.disk_path = disk_path;
        o.tiers = &t;
    }
    if (rotary) {
        r = *rotary;
        r.struct_size = sizeof r;
        r.angles = angles;
        o.rotary = &r;
    }
    return ta_kv_pool_create(context, &o, out, err);
}

ta_status tago_calibrator_create_for(ta_context* context, const ta_kv_pool_options* options, const ta_layer_group* groups,
                                     ta_calibrator** out, ta_error* err) {
    ta_kv_pool_options o = *options;
    o.struct_size = sizeof o;
    o.layer_groups = groups;
    return ta_calibrator_create_for(context, &o, out, err);
}

ta_status tago_seq_save(ta_kv_pool* pool, ta_seq seq, const char* path, uintptr_t progress, ta_error* err) {
    const ta_progress p = progress_of(progress);
    return ta_seq_save(pool, seq, path, &p, err);
}
ta_status tago_seq_load(ta_kv_pool* pool, const char* path, uintptr_t progress, ta_seq* out, ta_error* err) {
    const ta_progress p = progress_of(progress);
    return ta_seq_load(pool, path, &p, out, err);
}
ta_status tago_seq_export(ta_kv_pool* pool, ta_seq seq, uintptr_t sink, uint64_t* bytes, ta_error* err) {
    const ta_sink s = {.struct_size = sizeof s, .write = sink ? write_bytes : NULL, .user = (void*)sink};
    return ta_seq_export(pool, seq, &s, bytes, err);
}
ta_status tago_kv_pool_save(ta_kv_pool* pool, const char* path, ta_save_flags flags, uintptr_t progress, ta_error* err) {
    const ta_progress p = progress_of(progress);
    return ta_kv_pool_save(pool, path, flags, &p, err);
}
ta_status tago_kv_pool_load(ta_kv_pool* pool, const char* path, uintptr_t progress, ta_loaded_seq* loaded, uint64_t most,
                            uint64_t* n, ta_error* err) {
    const ta_progress p = progress_of(progress);
    return ta_kv_pool_load(pool, path, &p, loaded, most, n, err);
}

ta_status tago_attach_store(ta_kv_pool* pool, ta_namespace space, uintptr_t store, const ta_store_options* options,
                            ta_error* err) {
    const ta_block_store set = {.struct_size = sizeof set,
                                .exists = store_exists,
                                .get = store_get,
                                .put = store_put,
                                .remove = store_remove,
                                .user = (void*)store,
                                .release = release};
    return ta_namespace_attach_store(pool, space, &set, options, err);
}
void tago_release_store(const ta_block_store* store) {
    if (store->struct_size >= sizeof *store && store->release) store->release(store->user);
}

/* ------------------------------------------------------------------------------------------- groups, dense, calibration */

ta_status tago_group_create(ta_context* context, ta_group_options* options, const ta_group_id* id, ta_group** out,
                            ta_error* err) {
    ta_group_options o = *options;
    o.struct_size = sizeof o;
    o.id = id;
    return ta_group_create(context, &o, out, err);
}

ta_status tago_attend_dense(ta_context* context, const ta_tensor* qkvo, const char* q, const char* k, const char* v, char* out,
                            float* lse, const ta_dense_options* options, const ta_attend_options* attend,
                            const int64_t* q_offsets, const int64_t* k_offsets, const float* slopes, const float* sinks,
                            ta_error* err) {
    const ta_tensor tq = with_data(&qkvo[0], q), tk = with_data(&qkvo[1], k), tv = with_data(&qkvo[2], v);
    const ta_tensor to = with_data(&qkvo[3], out);
    ta_dense_options o = *options;
    ta_attend_options a = *attend;
    o.struct_size = sizeof o;
    o.q_offsets = q_offsets;
    o.k_offsets = k_offsets;
    o.attend = &a;
    a.struct_size = sizeof a;
    a.alibi_slopes = slopes;
    a.sinks = sinks;
    return ta_attend_dense(context, &tq, &tk, &tv, &to, lse, &o, err);
}

ta_status tago_merge_states(ta_context* context, uint32_t n, const ta_tensor* tensors, tago_pointers data, tago_pointers lses,
                            ta_stream stream, ta_error* err) {
    ta_tensor t[65];
    for (uint32_t i = 0; i <= n; ++i) t[i] = with_data(&tensors[i], data.at[i]);
    return ta_merge_states(context, n, t, (const float* const*)lses.at, &t[n], (float*)lses.at[n], stream, err);
}

ta_status tago_calibrator_observe(ta_calibrator* calibrator, uint32_t layer, const ta_tensor* kv, const char* k, const char* v,
                                  ta_error* err) {
    const ta_tensor tk = with_data(&kv[0], k), tv = with_data(&kv[1], v);
    return ta_calibrator_observe(calibrator, layer, &tk, &tv, err);
}
