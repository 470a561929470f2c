// Calls about block stores with wrong values.
#include "abi/wrong_calls.h"

namespace ta::testing {
namespace {

class BadStores : public WrongCalls {};

TEST_F(BadStores, CallsRefuse) {
    auto options = sized<ta_namespace_options>();
    options.salt[0] = 1;
    ta_namespace space = 0;
    ASSERT_EQ(ta_namespace_create(pool.get(), &options, &space, nullptr), TA_OK);
    before = snapshot();
    ta_kv_pool* const p = pool.get();
    const ta_store_fn none = [](void*, ta_store_item*, uint64_t, int64_t) { return 0; };
    auto store = sized<ta_block_store>();
    store.exists = store.get = store.put = store.remove = none;
    const uint8_t key[32] = {};
    ta_ticket ticket = 77;
    uint64_t missing = 77;
    auto stats = sized<ta_store_stats>();
    const ta_status invalid = TA_E_INVALID, aligned = TA_E_ALIGNMENT, state = TA_E_STATE, stale = TA_E_STALE;
    const auto attach = [&](const ta_block_store* s, ta_error* e) {
        return ta_namespace_attach_store(p, space, s, nullptr, e);
    };
    const auto lacking = [&](ta_store_fn ta_block_store::*f, ta_error* e) {
        ta_block_store s = store;
        s.*f = nullptr;
        return attach(&s, e);
    };
    const auto with = [&](auto field, auto value, ta_error* e) {
        auto o = sized<ta_store_options>();
        o.*field = value;
        return ta_namespace_attach_store(p, space, &store, &o, e);
    };
    expect_failures({
        {"attach to null", [&](ta_error* e) { return ta_namespace_attach_store(nullptr, space, &store, nullptr, e); }, invalid,
         0, "pool is null"},
        {"attach null", [&](ta_error* e) { return attach(nullptr, e); }, invalid, 2, "store is null"},
        {"attach misaligned", [&](ta_error* e) { return attach(misaligned<ta_block_store>(), e); }, aligned, 2,
         "store is not aligned"},
        {"attach with misaligned options",
         [&](ta_error* e) { return ta_namespace_attach_store(p, space, &store, misaligned<ta_store_options>(), e); }, aligned,
         3, "options is not aligned"},
        {"without exists", [&](ta_error* e) { return lacking(&ta_block_store::exists, e); }, invalid, 2,
         "store.exists is null"},
        {"without get", [&](ta_error* e) { return lacking(&ta_block_store::get, e); }, invalid, 2, "store.get is null"},
        {"without put", [&](ta_error* e) { return lacking(&ta_block_store::put, e); }, invalid, 2, "store.put is null"},
        {"without remove", [&](ta_error* e) { return lacking(&ta_block_store::remove, e); }, invalid, 2,
         "store.remove is null"},
        {"timeout", [&](ta_error* e) { return with(&ta_store_options::timeout_ms, -1, e); }, invalid, 3, "options.timeout_ms"},
        {"long timeout", [&](ta_error* e) { return with(&ta_store_options::timeout_ms, 86400001, e); }, invalid, 3,
         "options.timeout_ms"},
        {"write_through", [&](ta_error* e) { return with(&ta_store_options::write_through, 3, e); }, invalid, 3,
         "options.write_through"},
        {"authenticate", [&](ta_error* e) { return with(&ta_store_options::authenticate, -1, e); }, invalid, 3,
         "options.authenticate"},
        {"attach to a stale namespace", [&](ta_error* e) { return ta_namespace_attach_store(p, 5, &store, nullptr, e); }, stale,
         1, "no living namespace"},
        {"detach nothing", [&](ta_error* e) { return ta_namespace_detach_store(p, space, e); }, state, 1, "has no store"},
        {"detach of a stale one", [&](ta_error* e) { return ta_namespace_detach_store(p, 5, e); }, stale, 1, "no living"},
        {"load without keys", [&](ta_error* e) { return ta_namespace_load(p, space, nullptr, 1, &ticket, e); }, invalid, 2,
         "keys is null"},
        {"load too many", [&](ta_error* e) { return ta_namespace_load(p, space, key, (uint64_t{1} << 34) + 1, &ticket, e); },
         invalid, 3, "2^34"},
        {"load without out", [&](ta_error* e) { return ta_namespace_load(p, space, key, 1, nullptr, e); }, invalid, 4,
         "out is null"},
        {"load to misaligned", [&](ta_error* e) { return ta_namespace_load(p, space, key, 1, misaligned<ta_ticket>(), e); },
         aligned, 4, "out is not aligned"},
        {"load from nothing", [&](ta_error* e) { return ta_namespace_load(p, space, key, 1, &ticket, e); }, state, 1,
         "has no store"},
        {"load of a stale one", [&](ta_error* e) { return ta_namespace_load(p, 5, key, 1, &ticket, e); }, stale, 1,
         "no living"},
        {"flush to nothing", [&](ta_error* e) { return ta_namespace_flush_store(p, space, 0, &missing, e); }, state, 1,
         "has no store"},
        {"flush to misaligned", [&](ta_error* e) { return ta_namespace_flush_store(p, space, 0, misaligned<uint64_t>(), e); },
         aligned, 3, "missing is not aligned"},
        {"statistics of nothing", [&](ta_error* e) { return ta_namespace_get_store_stats(p, space, &stats, e); }, state, 1,
         "has no store"},
        {"statistics to null", [&](ta_error* e) { return ta_namespace_get_store_stats(p, space, nullptr, e); }, invalid, 2,
         "stats is null"},
    });
    EXPECT_EQ(ticket, 77u);
    EXPECT_EQ(missing, 77u);
    // One that is only read is not flushed.
    auto read_only = sized<ta_store_options>();
    read_only.write_through = TA_OFF;
    ASSERT_EQ(ta_namespace_attach_store(p, space, &store, &read_only, nullptr), TA_OK);
    expect_failures({
        {"flush to a store that is only read", [&](ta_error* e) { return ta_namespace_flush_store(p, space, 0, &missing, e); },
         state, 1, "no write_through"},
        {"attach twice", [&](ta_error* e) { return attach(&store, e); }, state, 1, "has a store already"},
    });
    EXPECT_EQ(missing, 77u);
}

}  // namespace
}  // namespace ta::testing
