/* The life of an engine in C: docs/embedding.md explains it. The programs of all languages here do and print the same. */
#include <stdio.h>
#include <stdlib.h>
#include <turboattention.h>

enum { LAYERS = 2, Q_HEADS = 4, KV_HEADS = 2, DIM = 64, CHUNK = 128, PROMPT = 300, BLOCKS = PROMPT / 64, ANSWER = 256 };
static float q[CHUNK * Q_HEADS * DIM], k[CHUNK * KV_HEADS * DIM], v[CHUNK * KV_HEADS * DIM], out[CHUNK * Q_HEADS * DIM];
static ta_error err;
static ta_kv_pool* pool;
static ta_plan* plan;
static ta_namespace space;

static void check(ta_status status) {
    if (status == TA_OK) return;
    fprintf(stderr, "%s: %s\n", ta_status_name(status), err.message);
    exit(1);
}

/* Stands in for a model: fills the rows of a layer for n tokens from `first` on. */
static void fill(float* x, int first, int n, int width, int salt) {
    for (int i = 0; i < n * width; ++i) x[i] = (float)((((first + i / width) * 131 + i % width) * salt) % 255 - 127) / 128;
}

static void layers(int first, int n) {
    ta_tensor tq = ta_tensor_make(q, TA_DTYPE_F32, n, Q_HEADS, DIM), to = ta_tensor_make(out, TA_DTYPE_F32, n, Q_HEADS, DIM);
    ta_tensor tk = ta_tensor_make(k, TA_DTYPE_F32, n, KV_HEADS, DIM), tv = ta_tensor_make(v, TA_DTYPE_F32, n, KV_HEADS, DIM);
    for (uint32_t layer = 0; layer < LAYERS; ++layer) {
        fill(q, first, n, Q_HEADS * DIM, 79), fill(k, first, n, KV_HEADS * DIM, 83), fill(v, first, n, KV_HEADS * DIM, 89);
        check(ta_append(plan, layer, &tk, &tv, &err));
        check(ta_attend(plan, layer, &tq, &to, NULL, NULL, &err));
    }
}

/* Runs a step of tokens [first, first + n). Returns the first output value of the last token. */
static double step(ta_seq seq, int first, int32_t n) {
    check(ta_plan_begin(plan, 1, &seq, &n, NULL, NULL, &err));
    layers(first, n);
    check(ta_plan_end(plan, NULL, &err));
    return out[(n - 1) * Q_HEADS * DIM];
}

/* The sequence of a request; 0: there is no room for it yet. */
static ta_seq admit(const uint8_t* keys, int answer, int* have) {
    ta_seq seq;
    int64_t length;
    check(ta_seq_match_prefix(pool, space, keys, BLOCKS, &seq, &length, &err));
    *have = (int)(length / CHUNK * CHUNK);
    check(ta_seq_truncate(pool, seq, *have, &err));
    ta_status status = ta_seq_reserve(pool, seq, PROMPT - *have + answer, -1, &err);
    if (status == TA_E_TIER_FULL) { /* the request stays in the queue: err.bytes lack */
        ta_seq_release(pool, seq, NULL);
        return 0;
    }
    check(status);
    return seq;
}

static double prefill(ta_seq seq, const uint8_t* keys, int have) {
    double last = 0;
    for (int n; have < PROMPT; have += n) {
        n = PROMPT - have < CHUNK ? PROMPT - have : CHUNK;
        last = step(seq, have, n);
    }
    check(ta_seq_publish(pool, seq, space, keys, BLOCKS, &err));
    return last;
}

int main(void) {
    ta_context* context;
    ta_tier_options tiers = {.struct_size = sizeof tiers, .host_bytes = 8 << 20};
    ta_kv_pool_options options = {.struct_size = sizeof options,
                                  .layers = LAYERS,
                                  .kv_heads = KV_HEADS,
                                  .head_dim = DIM,
                                  .bits = 4,
                                  .budget_bytes = 4 << 20,
                                  .tiers = &tiers};
    ta_namespace_options tenant = {.struct_size = sizeof tenant, .salt = {1}}; /* a real salt is secret and random */
    check(ta_context_create(NULL, &context, &err));
    check(ta_kv_pool_create(context, &options, &pool, &err));
    check(ta_plan_create(pool, NULL, &plan, &err));
    check(ta_namespace_create(pool, &tenant, &space, &err));
    uint8_t keys[BLOCKS * 32]; /* a real key is a hash of the model and of all tokens up to the block's end */
    for (int i = 0; i < BLOCKS * 32; ++i) keys[i] = (uint8_t)(i + 1);

    ta_seq none = 0;
    int32_t tokens = PROMPT + ANSWER;
    ta_fit fit = {.struct_size = sizeof fit};
    check(ta_kv_pool_fit(pool, 1, &none, &tokens, &fit, &err));
    printf("fits: %d, %d bytes\n", (int)fit.now, (int)fit.bytes_new);

    int have;
    ta_seq cold = admit(keys, ANSWER, &have);
    printf("cold: %d matched, prefill %.6f\n", have, prefill(cold, keys, have));
    ta_seq seq = admit(keys, ANSWER, &have);
    printf("warm: %d matched, prefill %.6f\n", have, prefill(seq, keys, have));
    printf("too long: %s\n", admit(keys, 1 << 20, &have) ? "admitted" : "queued");

    for (int t = PROMPT; t < PROMPT + 3; ++t) printf("decode: token %d, %.6f\n", t, step(seq, t, 1));

    ta_seq other;
    check(ta_seq_fork(pool, seq, &other, &err));
    check(ta_seq_truncate(pool, other, PROMPT, &err));
    printf("fork: %.6f\n", step(other, PROMPT + 7, 1));

    int32_t drafts = 4, accepted = 2;
    ta_step_options how = {.struct_size = sizeof how, .drafts = TA_ON};
    check(ta_plan_begin(plan, 1, &other, &drafts, NULL, &how, &err));
    layers(PROMPT + 8, drafts);
    check(ta_plan_end(plan, &accepted, &err));
    int64_t length;
    check(ta_seq_length(pool, other, &length, &err));
    printf("verified: %lld tokens, next %.6f\n", (long long)length, step(other, PROMPT + 17, 1));

    int32_t one = 1;
    check(ta_plan_begin(plan, 1, &seq, &one, NULL, NULL, &err));
    layers(PROMPT + 3, 1);
    check(ta_plan_abort(plan, &err));
    check(ta_seq_length(pool, seq, &length, &err));
    printf("cancelled: %lld tokens\n", (long long)length);

    ta_ticket ticket;
    ta_move_info info = {.struct_size = sizeof info};
    check(ta_seq_move(pool, seq, 0, BLOCKS, TA_TIER_HOST, &ticket, &err));
    check(ta_move_wait(pool, ticket, -1, &info, &err));
    printf("swapped out: %d blocks\n", (int)info.moved);
    check(ta_seq_move(pool, seq, 0, BLOCKS, TA_TIER_DEVICE, &ticket, &err));
    check(ta_move_wait(pool, ticket, -1, &info, &err));
    printf("swapped in: %.6f\n", step(seq, PROMPT + 3, 1));

    check(ta_seq_release(pool, cold, &err));
    check(ta_kv_pool_close(pool, &err));
    ta_plan_destroy(plan), ta_kv_pool_destroy(pool), ta_context_destroy(context);
    return 0;
}
