// Package forked is for tests: what handles do in a child process that C code has forked.
package forked

/*
#cgo pkg-config: turboattention
#include <sys/types.h>
#include <sys/wait.h>
#include <turboattention.h>
#include <unistd.h>

// The number of the first thing that is wrong in the child; 0: nothing.
static int in_child(ta_context* context, ta_kv_pool* pool, ta_plan* plan, ta_seq seq) {
    ta_error err;
    ta_seq other;
    ta_context* own = NULL;
    const ta_context_options options = {.struct_size = sizeof options, .threads = 1};
    if (ta_context_health(context, &err) != TA_E_FORKED || err.code != TA_E_FORKED) return 1;
    if (ta_seq_fork(pool, seq, &other, &err) != TA_E_FORKED) return 2;
    if (ta_plan_begin(plan, 1, &seq, NULL, NULL, NULL, &err) != TA_E_FORKED) return 3;
    ta_plan_destroy(plan);
    ta_kv_pool_destroy(pool);
    ta_context_destroy(context);
    if (ta_context_create(&options, &own, &err) != TA_OK || ta_context_health(own, &err) != TA_OK) return 4;
    ta_context_destroy(own);
    return 0;
}

static int forked(ta_context* context, ta_kv_pool* pool, ta_plan* plan, ta_seq seq) {
    const pid_t child = fork();
    if (child == 0) _exit(in_child(context, pool, plan, seq));
    int status = -1;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 100;
    return WEXITSTATUS(status);
}
*/
import "C"

import "unsafe"

// Handles says what is wrong with the handles in a forked child; 0: nothing.
func Handles(context, pool, plan unsafe.Pointer, seq uint64) int {
	return int(C.forked((*C.ta_context)(context), (*C.ta_kv_pool)(pool), (*C.ta_plan)(plan), C.ta_seq(seq)))
}
