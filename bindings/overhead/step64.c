// Measures the time of a step of 64 tokens in C, in nanoseconds: the least of 750 rounds of 20 steps, which are short so that
// some are not disturbed by other programs. The other languages' programs of this name do the same work, so that the difference
// is theirs:
// begin, append, attend, end, truncate.
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <turboattention.h>

enum { TOKENS = 64, DIM = 64, ROUNDS = 750, STEPS = 20 };
static float x[TOKENS * DIM], out[TOKENS * DIM];
static ta_error err;
#define CHECK(call) ((call) == TA_OK ? (void)0 : (fprintf(stderr, "%s\n", err.message), exit(1)))

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(void) {
    ta_context* context;
    ta_kv_pool* pool;
    ta_plan* plan;
    ta_seq seq;
    ta_context_options co = {.struct_size = sizeof co, .threads = 1};
    ta_kv_pool_options po = {
        .struct_size = sizeof po, .layers = 1, .kv_heads = 1, .head_dim = DIM, .bits = 8, .budget_bytes = 1 << 20};
    CHECK(ta_context_create(&co, &context, &err));
    CHECK(ta_kv_pool_create(context, &po, &pool, &err));
    CHECK(ta_plan_create(pool, NULL, &plan, &err));
    CHECK(ta_seq_create(pool, &seq, &err));
    for (int i = 0; i < TOKENS * DIM; ++i) x[i] = (float)(i * 79 % 2003) / 1001 - 1;
    const int32_t n = TOKENS;
    double best = 1e18;
    for (int round = 0; round < ROUNDS; ++round) {
        const double start = now();
        for (int i = 0; i < STEPS; ++i) {
            ta_tensor t = ta_tensor_make(x, TA_DTYPE_F32, TOKENS, 1, DIM),
                      o = ta_tensor_make(out, TA_DTYPE_F32, TOKENS, 1, DIM);
            CHECK(ta_plan_begin(plan, 1, &seq, &n, NULL, NULL, &err));
            CHECK(ta_append(plan, 0, &t, &t, &err));
            CHECK(ta_attend(plan, 0, &t, &o, NULL, NULL, &err));
            CHECK(ta_plan_end(plan, NULL, &err));
            CHECK(ta_seq_truncate(pool, seq, 0, &err));
        }
        const double each = (now() - start) / STEPS;
        if (each < best) best = each;
    }
    printf("%.0f\n", best);
    return 0;
}
