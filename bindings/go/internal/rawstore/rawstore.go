// Package rawstore is for tests: a block store in C.
package rawstore

/*
#cgo pkg-config: turboattention
#include <stdlib.h>
#include <string.h>
#include <turboattention.h>

struct value {
    struct value* next;
    uint64_t bytes;
    uint8_t key[32];
    uint8_t data[];
};
static struct value* values;
static int released;

static int32_t each(ta_store_item* items, uint64_t n, int get) {
    for (uint64_t i = 0; i < n; ++i) {
        struct value* v = values;
        while (v && memcmp(v->key, items[i].key, 32) != 0) v = v->next;
        if (!v) continue;
        if (get && v->bytes <= items[i].bytes) memcpy(items[i].data, v->data, v->bytes);
        if (get) items[i].bytes = v->bytes;
        items[i].result = TA_STORE_DONE;
    }
    return 0;
}
static int32_t exists(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) { return each(items, n, 0); }
static int32_t get(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) { return each(items, n, 1); }
static int32_t put(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) {
    for (uint64_t i = 0; i < n; ++i) {
        struct value* const v = malloc(sizeof *v + items[i].bytes);
        if (!v) return -1;
        v->next = values;
        v->bytes = items[i].bytes;
        memcpy(v->key, items[i].key, 32);
        memcpy(v->data, items[i].data, v->bytes);
        values = v;
        items[i].result = TA_STORE_DONE;
    }
    return 0;
}
static int32_t removed(void* user, ta_store_item* items, uint64_t n, int64_t nanoseconds) { return -1; }
static void release(void* user) { ++*(int*)user; }

static const ta_block_store set = {sizeof set, 0, exists, get, put, removed, &released, release};
static const void* address(void) { return &set; }
static int times_released(void) { return released; }
*/
import "C"

import "unsafe"

// Set is a ta_block_store, which any number of namespaces may have, one after the other.
func Set() unsafe.Pointer { return unsafe.Pointer(C.address()) }

// Released says how often it was released.
func Released() int { return int(C.times_released()) }
