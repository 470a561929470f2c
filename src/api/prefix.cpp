#include <algorithm>

#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

Status check_keys(const uint8_t* keys, uint64_t n, int argument) {
    if (n > 0) TA_RETURN_IF_ERROR(check_pointer(keys, "keys", argument));
    constexpr uint64_t kMost = uint64_t{1} << 34;  // blocks of a sequence
    if (n <= kMost) return {};
    return fail(TA_E_INVALID, "n is %llu; a sequence has up to 2^34 blocks", (unsigned long long)n).argument(argument + 1);
}

}  // namespace

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
        return at_argument(pool->impl->prefixes().destroy(space), 1);
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
