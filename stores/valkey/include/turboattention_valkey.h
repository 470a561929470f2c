/* A store of published blocks in a Valkey or Redis server, for ta_namespace_attach_store: libturboattention_valkey.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     ta_valkey_options o = {.struct_size = sizeof o, .host = "10.0.0.7", .expiry_seconds = 86400};
 *     ta_block_store store = {.struct_size = sizeof store};
 *     ta_valkey_store_open(&o, &store, &err);
 *     ta_namespace_attach_store(pool, space, &store, NULL, &err);    // releases the store, whatever becomes of it
 *
 * Conventions are those of turboattention.h. docs/stores.md has a guide. */
#ifndef TURBOATTENTION_VALKEY_H
#define TURBOATTENTION_VALKEY_H

#include "turboattention.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ta_valkey_options {
    uint32_t struct_size;
    uint32_t port;           /* default 6379 */
    const char* host;        /* address, or a name that the system resolves, which has no deadline; default 127.0.0.1 */
    const char* socket_path; /* of a Unix socket, in place of host and port */
    const char* user;        /* for AUTH; NULL: the server's default user */
    const char* password;    /* NULL: no AUTH */
    const char* key_prefix;  /* keys are this and 32 bytes; default "ta:" */
    uint32_t database;       /* for SELECT */
    int32_t connect_ms;      /* at most, within the time of the call that connects; default 1000 */
    int32_t command_ms;      /* without an answer; default: the time of the call */
    uint32_t expiry_seconds; /* values that nobody has put again for so long go; 0: they stay */
} ta_valkey_options;

/* Fills in a set that connects at its first call, and again after each failure: a server that cannot be reached fails calls of the
 * set, not this one. The set is for one namespace. Whoever does not attach it calls its release(user). Texts are copied.
 * What its functions return: 0, or -errno: -ECONNREFUSED, -ETIMEDOUT, -EACCES (AUTH or SELECT were refused), -EPROTO (the server
 * answered with an error), -EMSGSIZE (with more than was asked for). Values above 512 MB, which servers do not take, fail.
 * Errors: TA_E_INVALID (an option outside its range), TA_E_STRUCT, TA_E_ALIGNMENT, TA_E_MEMORY. */
TA_API ta_status ta_valkey_store_open(const ta_valkey_options* options, ta_block_store* out, ta_error* err);

#ifdef __cplusplus
}
#endif
#endif /* TURBOATTENTION_VALKEY_H */
