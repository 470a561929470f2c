#include <stdio.h>
#include <stdlib.h>
#include <turboattention.h>

enum { LAYERS = 2, Q_HEADS = 8, KV_HEADS = 2, DIM = 128, PROMPT = 1000 };
static float q[PROMPT * Q_HEADS * DIM], k[PROMPT * KV_HEADS * DIM], v[PROMPT * KV_HEADS * DIM], out[PROMPT * Q_HEADS * DIM];
static ta_error err;
#define CHECK(call) ((call) == TA_OK ? (void)0 : (fprintf(stderr, "%s: %s\n", ta_status_name(err.code), err.message), exit(1)))

int main(void) {
    ta_context* ctx; ta_kv_pool* pool; ta_plan* plan; ta_seq seq;
    ta_kv_pool_options options = {.struct_size = sizeof options, .layers = LAYERS, .kv_heads = KV_HEADS, .head_dim = DIM,
                                  .bits = 4, .budget_bytes = 64 << 20};
    CHECK(ta_context_create(NULL, &ctx, &err));
    CHECK(ta_kv_pool_create(ctx, &options, &pool, &err));
    CHECK(ta_plan_create(pool, NULL, &plan, &err));
    CHECK(ta_seq_create(pool, &seq, &err));
    for (int i = 0; i < PROMPT * KV_HEADS * DIM; ++i) k[i] = (float)(i * 79 % 2003) / 1001 - 1, v[i] = (float)(i % 1009) / 1009;
    for (int i = 0; i < PROMPT * Q_HEADS * DIM; ++i) q[i] = (float)(i * 97 % 1999) / 999 - 1;
    for (int step = 0; step < 10; ++step) { /* the prompt first, then one token at a time */
        int32_t n = step ? 1 : PROMPT;
        ta_tensor tq = ta_tensor_make(q, TA_DTYPE_F32, n, Q_HEADS, DIM);
        ta_tensor tk = ta_tensor_make(k, TA_DTYPE_F32, n, KV_HEADS, DIM);
        ta_tensor tv = ta_tensor_make(v, TA_DTYPE_F32, n, KV_HEADS, DIM);
        ta_tensor to = ta_tensor_make(out, TA_DTYPE_F32, n, Q_HEADS, DIM);
        CHECK(ta_plan_begin(plan, 1, &seq, &n, NULL, NULL, &err));
        for (uint32_t layer = 0; layer < LAYERS; ++layer) {
            CHECK(ta_append(plan, layer, &tk, &tv, &err));
            CHECK(ta_attend(plan, layer, &tq, &to, NULL, NULL, &err));
        }
        CHECK(ta_plan_end(plan, NULL, &err));
        printf("step %d: out[0] = %.4f\n", step, (double)out[0]);
    }
    ta_plan_destroy(plan), ta_kv_pool_destroy(pool), ta_context_destroy(ctx);
    return 0;
}
