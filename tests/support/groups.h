// Ranks of a local group, each with a context and a pool of its own, and calls about them that throw where they fail.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "support/handles.h"

namespace ta::testing {

struct GroupDeleter {
    void operator()(ta_group* p) const { ta_group_destroy(p); }
};
using GroupHandle = std::unique_ptr<ta_group, GroupDeleter>;

// TA_TEST_GROUP=host: of TA_GROUP_HOST.
inline ta_group_kind group_kind() {
    static const char* const given = std::getenv("TA_TEST_GROUP");
    return given && std::strcmp(given, "host") == 0 ? TA_GROUP_HOST : TA_GROUP_LOCAL;
}

inline ta_group_id make_group_id() {
    ta_group_id id;
    ta_error err;
    require(ta_group_make_id(group_kind(), &id, &err), err);
    return id;
}

inline ta_group_options group_options(const ta_group_id& id, uint32_t rank, uint32_t ranks) {
    auto o = sized<ta_group_options>();
    o.kind = group_kind();
    o.id = &id;
    o.rank = rank;
    o.ranks = ranks;
    return o;
}

inline GroupHandle make_group(const Context& context, const ta_group_options& options) {
    ta_group* p = nullptr;
    ta_error err;
    require(ta_group_create(context.get(), &options, &p, &err), err);
    return GroupHandle(p);
}

inline ta_group_state poll(const GroupHandle& group, int64_t nanoseconds = -1) {
    ta_group_state state = 0;
    ta_error err;
    require(ta_group_poll(group.get(), nanoseconds, &state, &err), err);
    return state;
}

struct Rank {
    Context context;
    KvPool pool;
    GroupHandle group;
    Plan plan;
};

// A rank in each context; `change` may alter its options. The group is ready where it becomes so.
template <class Change>
std::vector<Rank> make_ranks(std::vector<Context> contexts, const ta_kv_pool_options& pool, Change&& change) {
    const ta_group_id id = make_group_id();
    std::vector<Rank> ranks(contexts.size());
    for (uint32_t r = 0; r < ranks.size(); ++r) {
        ranks[r].context = std::move(contexts[r]);
        ranks[r].pool = make_pool(ranks[r].context, pool);
        ranks[r].plan = make_plan(ranks[r].pool);
        ta_group_options o = group_options(id, r, uint32_t(ranks.size()));
        change(o);
        ranks[r].group = make_group(ranks[r].context, o);
    }
    for (Rank& r : ranks) poll(r.group);
    return ranks;
}
// On CPUs.
template <class Change>
std::vector<Rank> make_ranks(uint32_t n, const ta_kv_pool_options& pool, Change&& change) {
    std::vector<Context> contexts;
    for (uint32_t r = 0; r < n; ++r) contexts.push_back(make_context(1));
    return make_ranks(std::move(contexts), pool, change);
}
inline std::vector<Rank> make_ranks(uint32_t n, const ta_kv_pool_options& pool) {
    return make_ranks(n, pool, [](ta_group_options&) {});
}

inline ta_ticket send(const Rank& from, ta_seq seq, uint32_t to, uint64_t tag, ta_send_mode mode = TA_SEND_COPY) {
    ta_ticket ticket = 0;
    ta_error err;
    require(ta_seq_send(from.group.get(), from.pool.get(), seq, to, tag, mode, &ticket, &err), err);
    return ticket;
}
inline ta_ticket receive(const Rank& to, uint32_t from, uint64_t tag) {
    ta_ticket ticket = 0;
    ta_error err;
    require(ta_seq_receive(to.group.get(), to.pool.get(), from, tag, &ticket, &err), err);
    return ticket;
}
inline ta_transfer_info wait(const Rank& rank, ta_ticket ticket, int64_t nanoseconds = -1) {
    auto info = sized<ta_transfer_info>();
    ta_error err;
    require(ta_transfer_wait(rank.group.get(), ticket, nanoseconds, &info, &err), err);
    return info;
}
inline void cancel(const Rank& rank, ta_ticket ticket) {
    ta_error err;
    require(ta_transfer_cancel(rank.group.get(), ticket, &err), err);
}

// ---- namespaces that ranks share

inline ta_namespace make_space(const KvPool& pool, uint8_t salt, uint64_t quota = 0) {
    auto options = sized<ta_namespace_options>();
    options.salt[0] = salt;
    options.quota_bytes = quota;
    ta_namespace space = 0;
    ta_error err;
    require(ta_namespace_create(pool.get(), &options, &space, &err), err);
    return space;
}
// Of the first n blocks of a text.
inline std::vector<uint8_t> make_keys(uint8_t text, size_t n) {
    std::vector<uint8_t> keys(n * 32, text);
    for (size_t i = 0; i < n; ++i) {
        keys[i * 32] = uint8_t(i);
        keys[i * 32 + 1] = uint8_t(i >> 8);
    }
    return keys;
}
inline void join(const Rank& rank, ta_namespace space) {
    ta_error err;
    require(ta_namespace_join(rank.group.get(), rank.pool.get(), space, &err), err);
}
inline void publish(const Rank& rank, ta_seq seq, ta_namespace space, const std::vector<uint8_t>& keys) {
    ta_error err;
    require(ta_seq_publish(rank.pool.get(), seq, space, keys.data(), keys.size() / 32, &err), err);
}
inline std::vector<ta_prefix_place> lookup(const Rank& rank, ta_namespace space, const std::vector<uint8_t>& keys,
                                           int64_t nanoseconds = -1) {
    std::vector<ta_prefix_place> places(keys.size() / 32);
    ta_error err;
    require(ta_namespace_lookup(rank.group.get(), rank.pool.get(), space, keys.data(), places.size(), nanoseconds,
                                places.data(), &err),
            err);
    return places;
}
inline ta_ticket fetch(const Rank& rank, ta_namespace space, const std::vector<uint8_t>& keys) {
    ta_ticket ticket = 0;
    ta_error err;
    require(ta_namespace_fetch(rank.group.get(), rank.pool.get(), space, keys.data(), keys.size() / 32, &ticket, &err), err);
    return ticket;
}

}  // namespace ta::testing
