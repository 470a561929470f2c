#include <algorithm>

#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

static_assert(int(PrefixEvent::Kind::kReset) == TA_PREFIX_RESET && int(PrefixEvent::Kind::kPublished) == TA_PREFIX_PUBLISHED &&
              int(PrefixEvent::Kind::kDropped) == TA_PREFIX_DROPPED && int(PrefixEvent::Kind::kMoved) == TA_PREFIX_MOVED);
static_assert(sizeof(ta_prefix_event::key) == sizeof(BlockKey));

extern "C" {

ta_status ta_namespace_create(ta_kv_pool* pool, const ta_namespace_options* options, ta_namespace* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(options, "options", 1));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        Result<ta_namespace_options> read = read_struct(options, "options", 1);
        if (!read.ok()) return std::move(read).status();
        const ta_namespace_options& o = read.value();
        if (o.reserved != 0) return fail(TA_E_INVALID, "options.reserved is not 0").argument(1);
        Salt salt;
        std::copy(std::begin(o.salt), std::end(o.salt), salt.begin());
        if (salt == Salt{}) return fail(TA_E_INVALID, "options.salt is all zero; give 32 secret random bytes").argument(1);
        Result<Tenant> space = pool->impl->prefixes().create(salt, o.quota_bytes ? o.quota_bytes : UINT64_MAX);
        if (!space.ok()) return at_argument(std::move(space).status(), 1);
        *out = space.value();
        return {};
    });
}

ta_status ta_namespace_destroy(ta_kv_pool* pool, ta_namespace space, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(at_argument(pool->impl->prefixes().destroy(space), 1));
        pool->stores->end(space, pool->impl->prefixes().check(space));
        return {};
    });
}

ta_status ta_namespace_get_stats(const ta_kv_pool* pool, ta_namespace space, ta_namespace_stats* stats, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(stats, "stats", 2));
        const PrefixStore& prefixes = std::as_const(*pool->impl).prefixes();
        Result<NamespaceStats> read = prefixes.stats(space);
        if (!read.ok()) return at_argument(std::move(read).status(), 1);
        const NamespaceStats& s = read.value();
        ta_namespace_stats r{};
        r.entries = s.entries;
        r.bytes = s.bytes;
        r.bytes_quota = s.quota;
        r.bytes_shared = s.bytes_shared;
        r.hits = s.hits;
        r.misses = s.misses;
        r.published = s.published;
        r.evicted = s.evicted;
        return write_struct(r, stats, "stats", 2);
    });
}

ta_status ta_namespace_flush(ta_kv_pool* pool, ta_namespace space, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return at_argument(pool->impl->flush_namespace(space), 1);
    });
}

ta_status ta_namespace_hash_keys(const ta_kv_pool* pool, ta_namespace space, const uint8_t* keys, uint64_t n, uint8_t* hashed,
                                 ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_keys(keys, n, 2));
        if (n > 0) TA_RETURN_IF_ERROR(check_pointer(hashed, "hashed", 4));
        const PrefixStore& prefixes = std::as_const(*pool->impl).prefixes();
        return at_argument(prefixes.hash_keys_into(space, {keys, size_t(n) * kPrefixKeyBytes}, 0, hashed), 1);
    });
}

ta_status ta_namespace_take_events(ta_kv_pool* pool, ta_namespace space, ta_prefix_event* events, uint64_t most, uint64_t* n,
                                   ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        if (most > 0) TA_RETURN_IF_ERROR(check_pointer(events, "events", 2));
        TA_RETURN_IF_ERROR(check_pointer(n, "n", 4));
        Result<std::vector<PrefixEvent>> taken = pool->impl->prefixes().take_events(space, size_t(most));
        if (!taken.ok()) return at_argument(std::move(taken).status(), 1);
        for (const PrefixEvent& e : taken.value()) {
            ta_prefix_event& to = *events++;
            std::copy(e.key.begin(), e.key.end(), to.key);
            to.number = e.number;
            to.index = e.index;
            to.kind = int32_t(e.kind);
            to.tier = code_of(e.tier);
        }
        *n = taken.value().size();
        return {};
    });
}

ta_status ta_seq_publish(ta_kv_pool* pool, ta_seq seq, ta_namespace space, const uint8_t* keys, uint64_t n, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_keys(keys, n, 3));
        return at_argument(pool->impl->publish(seq, space, {keys, size_t(n) * kPrefixKeyBytes}), 2);
    });
}

ta_status ta_seq_match_prefix(ta_kv_pool* pool, ta_namespace space, const uint8_t* keys, uint64_t n, ta_seq* out,
                              int64_t* length, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_keys(keys, n, 2));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 4));
        TA_RETURN_IF_ERROR(check_pointer(length, "length", 5));
        auto match = pool->impl->match_prefix(space, {keys, size_t(n) * kPrefixKeyBytes});
        if (!match.ok()) return at_argument(std::move(match).status(), 1);
        *out = match.value().first;
        *length = match.value().second;
        return {};
    });
}

}  // extern "C"
