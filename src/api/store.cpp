#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

Result<store::Settings> read_settings(const ta_store_options* options) {
    store::Settings s;
    if (!options) return s;
    Result<ta_store_options> read = read_struct(options, "options", 3);
    if (!read.ok()) return std::move(read).status();
    const ta_store_options& o = read.value();
    if (o.timeout_ms < 0 || o.timeout_ms > Patience::kMostWait) {
        return fail(TA_E_INVALID, "options.timeout_ms is %d; it is 0 to %d", int(o.timeout_ms), int(Patience::kMostWait))
            .argument(3);
    }
    struct {
        ta_switch given;
        const char* name;
        bool* to;
    } const switches[] = {{o.write_through, "write_through", &s.write_through},
                          {o.authenticate, "authenticate", &s.authenticate}};
    for (const auto& w : switches) {
        if (w.given < TA_DEFAULT || w.given > TA_OFF)
            return fail(TA_E_INVALID, "options.%s is %d, no value of ta_switch", w.name, int(w.given)).argument(3);
        *w.to = w.given != TA_OFF;
    }
    if (o.timeout_ms > 0) s.timeout = std::chrono::milliseconds(o.timeout_ms);
    if (o.batch_bytes > 0) s.batch_bytes = o.batch_bytes;
    return s;
}

Status check_set(const ta_block_store& set) {
    struct {
        ta_store_fn function;
        const char* name;
    } const functions[] = {{set.exists, "exists"}, {set.get, "get"}, {set.put, "put"}, {set.remove, "remove"}};
    for (const auto& f : functions) {
        if (!f.function) return fail(TA_E_INVALID, "store.%s is null", f.name).argument(2);
    }
    if (set.reserved != 0) return fail(TA_E_INVALID, "store.reserved is not 0").argument(2);
    return {};
}

}  // namespace

extern "C" {

ta_status ta_namespace_attach_store(ta_kv_pool* pool, ta_namespace space, const ta_block_store* store,
                                    const ta_store_options* options, ta_error* err) {
    return guard(err, [&]() -> Status {
        CallbackSet<ta_block_store> set;
        Status taken = take_set(store, "store", 2, set);
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(store, "store", 2));
        TA_RETURN_IF_ERROR(std::move(taken));
        TA_RETURN_IF_ERROR(check_set(*set));
        Result<store::Settings> settings = read_settings(options);
        if (!settings.ok()) return std::move(settings).status();
        return at_argument(pool->stores->attach(space, std::move(set), settings.value()), 1);
    });
}

ta_status ta_namespace_detach_store(ta_kv_pool* pool, ta_namespace space, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return at_argument(pool->stores->detach(space), 1);
    });
}

ta_status ta_namespace_load(ta_kv_pool* pool, ta_namespace space, const uint8_t* keys, uint64_t n, ta_ticket* out,
                            ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_keys(keys, n, 2));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 4));
        Result<uint64_t> ticket = pool->stores->load(space, {keys, size_t(n) * kPrefixKeyBytes});
        if (!ticket.ok()) return at_argument(std::move(ticket).status(), 1);
        *out = ticket.value();
        return {};
    });
}

ta_status ta_namespace_flush_store(ta_kv_pool* pool, ta_namespace space, int64_t nanoseconds, uint64_t* missing,
                                   ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_aligned(missing, "missing", 3));
        Result<uint64_t> left = pool->stores->flush(space, nanoseconds);
        if (!left.ok()) return at_argument(std::move(left).status(), 1);
        if (missing) *missing = left.value();
        return {};
    });
}

ta_status ta_namespace_get_store_stats(const ta_kv_pool* pool, ta_namespace space, ta_store_stats* stats, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(stats, "stats", 2));
        Result<ta_store_stats> read = pool->stores->stats(space);
        if (!read.ok()) return at_argument(std::move(read).status(), 1);
        return write_struct(read.value(), stats, "stats", 2);
    });
}

}  // extern "C"
