// Calls of groups with wrong values: the status, the argument it names, the text, and that nothing changes.
#include "abi/wrong_calls.h"
#include "support/groups.h"

namespace ta::testing {
namespace {

class BadGroups : public WrongCalls {
  protected:
    void SetUp() override { ASSERT_EQ(poll(first), TA_GROUP_READY); }

    const ta_group_id id = make_group_id(), lonely_id = make_group_id();
    const GroupHandle first = make_group(context, group_options(id, 0, 2)),
                      second = make_group(context, group_options(id, 1, 2)),
                      lonely = make_group(context, group_options(lonely_id, 0, 2));  // waits for another rank
    const Context elsewhere = make_context(1);
    const KvPool foreign = make_pool(elsewhere, pool_options(kLayers, kHeads, kDim));
};

TEST_F(BadGroups, CreateRefusesAndJoinsNothing) {
    static const ta_group_id fresh = make_group_id(), zeros{};
    static ta_x_group_fault unknown = sized<ta_x_group_fault>(), no_size{};
    unknown.kind = 8;
    static ta_x_group_fault dropping = sized<ta_x_group_fault>();
    dropping.kind = TA_X_FAULT_DROP;
    auto* out = untouched<ta_group>();
    ta_group_id host_id, any_id;
    ASSERT_EQ(ta_group_make_id(TA_GROUP_HOST, &host_id, nullptr), TA_OK);
    std::memset(&any_id, 7, sizeof any_id);
    const auto create = [&](auto change) {
        return [&, change](ta_error* err) {
            auto options = group_options(fresh, 0, 2);
            change(options);
            return ta_group_create(context.get(), &options, &out, err);
        };
    };
    using O = ta_group_options;
    const auto good = group_options(fresh, 0, 2);
    expect_failures({
        {"no context", [&](ta_error* err) { return ta_group_create(nullptr, &good, &out, err); }, TA_E_INVALID, 0,
         "context is"},
        {"no options", [&](ta_error* err) { return ta_group_create(context.get(), nullptr, &out, err); }, TA_E_INVALID, 1,
         "options is null"},
        {"no out", [&](ta_error* err) { return ta_group_create(context.get(), &good, nullptr, err); }, TA_E_INVALID, 2,
         "out is null"},
        {"no ranks", create([](O& o) { o.ranks = 0; }), TA_E_INVALID, 1, "ranks is 0"},
        {"ranks", create([](O& o) { o.ranks = 1025; }), TA_E_INVALID, 1, "ranks is 1025"},
        {"rank", create([](O& o) { o.rank = 2; }), TA_E_INVALID, 1, "rank is 2 of 2"},
        {"no kind", create([](O& o) { o.kind = 0; }), TA_E_INVALID, 1, "kind is 0"},
        {"kind", create([](O& o) { o.kind = -5; }), TA_E_INVALID, 1, "kind is -5"},
        {"no id", create([](O& o) { o.id = nullptr; }), TA_E_INVALID, 1, "options.id is null"},
        {"an id of zeros", create([](O& o) { o.id = &zeros; }), TA_E_INVALID, 1, "options.id is not of"},
        {"connect_ms", create([](O& o) { o.connect_ms = -1; }), TA_E_INVALID, 1, "connect_ms is -1"},
        {"operation_ms", create([](O& o) { o.operation_ms = 86400001; }), TA_E_INVALID, 1, "operation_ms is 86400001"},
        {"silence_ms", create([](O& o) { o.silence_ms = INT32_MIN; }), TA_E_INVALID, 1, "silence_ms is -2147483648"},
        {"fault", create([](O& o) { o.fault = &unknown; }), TA_E_INVALID, 1, "fault.kind is 8"},
        {"fault without size", create([](O& o) { o.fault = &no_size; }), TA_E_STRUCT, 1, "fault.struct_size is 0"},
        {"id of no kind", [](ta_error* err) { return ta_group_make_id(4, untouched<ta_group_id>(), err); }, TA_E_INVALID, 0,
         "kind is 4"},
        {"id of another kind", create([](O& o) { o.kind = TA_GROUP_HOST; }), TA_E_INVALID, 1, "options.id is not of"},
        {"id that NCCL did not make", create([](O& o) { o.kind = TA_GROUP_NCCL; }), TA_E_INVALID, 1, "options.id is not of"},
        {"fault of processes", create([&](O& o) { o.kind = TA_GROUP_HOST, o.id = &host_id, o.fault = &dropping; }),
         TA_E_UNSUPPORTED, 1, "options.fault is for"},
        {"too many processes", create([&](O& o) { o.kind = TA_GROUP_HOST, o.id = &host_id, o.ranks = 64; }), TA_E_UNSUPPORTED,
         1, "ranks is 64"},
        {"NCCL's group of a CPU", create([&](O& o) { o.kind = TA_GROUP_NCCL, o.id = &any_id; }), TA_E_UNSUPPORTED, 1,
         "a group over NCCL"},
        {"communicator", create([](O& o) { o.nccl_comm = &o; }), TA_E_INVALID, 1, "are for TA_GROUP_NCCL"},
        {"hosts_apart", create([](O& o) { o.hosts_apart = 2; }), TA_E_INVALID, 1, "hosts_apart is 2"},
        {"hosts_apart of one process", create([](O& o) { o.hosts_apart = 1; }), TA_E_INVALID, 1, "are for TA_GROUP_NCCL"},
        {"no place for an id", [](ta_error* err) { return ta_group_make_id(TA_GROUP_LOCAL, nullptr, err); }, TA_E_INVALID, 1,
         "out is null"},
    });
    EXPECT_EQ(out, untouched<ta_group>());
    const GroupHandle a = make_group(context, good), b = make_group(context, group_options(fresh, 1, 2));
    EXPECT_EQ(poll(a), TA_GROUP_READY);
}

TEST_F(BadGroups, CallsRefuse) {
    ta_group* const g = first.get();
    auto* ticket = untouched<ta_ticket>();
    auto* state = untouched<ta_group_state>();
    auto* info = untouched<ta_transfer_info>();
    const auto send = [&](ta_group* group, ta_kv_pool* p, ta_seq seq, uint32_t to, ta_send_mode mode, ta_ticket* out) {
        return [=](ta_error* err) { return ta_seq_send(group, p, seq, to, 1, mode, out, err); };
    };
    const auto receive = [&](ta_group* group, ta_kv_pool* p, uint32_t from, ta_ticket* out) {
        return [=](ta_error* err) { return ta_seq_receive(group, p, from, 1, out, err); };
    };
    expect_failures({
        {"send of no group", send(nullptr, pool.get(), long_seq, 1, 0, ticket), TA_E_INVALID, 0, "group is null"},
        {"send of no pool", send(g, nullptr, long_seq, 1, 0, ticket), TA_E_INVALID, 1, "pool is null"},
        {"send of no sequence", send(g, pool.get(), 0, 1, 0, ticket), TA_E_STALE, 2, "no living sequence"},
        {"move of no sequence", send(g, pool.get(), 0, 1, 1, ticket), TA_E_STALE, 2, "no living sequence"},
        {"send to oneself", send(g, pool.get(), long_seq, 0, 0, ticket), TA_E_INVALID, 3, "this is rank 0 of 2"},
        {"send to nobody", send(g, pool.get(), long_seq, 2, 0, ticket), TA_E_INVALID, 3, "rank 2 is asked for"},
        {"send mode", send(g, pool.get(), long_seq, 1, 2, ticket), TA_E_INVALID, 5, "mode is 2"},
        {"send without out", send(g, pool.get(), long_seq, 1, 0, nullptr), TA_E_INVALID, 6, "out is null"},
        {"send from elsewhere", send(g, foreign.get(), long_seq, 1, 0, ticket), TA_E_STATE, 1, "another context"},
        {"send too early", send(lonely.get(), pool.get(), long_seq, 1, 0, ticket), TA_E_STATE, 0, "not ready"},
        {"receive of no group", receive(nullptr, pool.get(), 1, ticket), TA_E_INVALID, 0, "group is null"},
        {"receive of no pool", receive(g, nullptr, 1, ticket), TA_E_INVALID, 1, "pool is null"},
        {"receive from oneself", receive(g, pool.get(), 0, ticket), TA_E_INVALID, 2, "this is rank 0 of 2"},
        {"receive without out", receive(g, pool.get(), 1, nullptr), TA_E_INVALID, 4, "out is null"},
        {"receive too early", receive(lonely.get(), pool.get(), 1, ticket), TA_E_STATE, 0, "not ready"},
        {"query of no group", [&](ta_error* e) { return ta_transfer_query(nullptr, 1, info, e); }, TA_E_INVALID, 0, "group is"},
        {"query of no ticket",
         [&](ta_error* e) {
             auto i = sized<ta_transfer_info>();
             return ta_transfer_query(g, 1, &i, e);
         },
         TA_E_STALE, 1, "0x1 is no ticket"},
        {"query without info", [&](ta_error* e) { return ta_transfer_query(g, 1, nullptr, e); }, TA_E_INVALID, 2,
         "info is null"},
        {"wait of no group", [&](ta_error* e) { return ta_transfer_wait(nullptr, 1, -1, info, e); }, TA_E_INVALID, 0,
         "group is"},
        {"wait without info", [&](ta_error* e) { return ta_transfer_wait(g, 1, -1, nullptr, e); }, TA_E_INVALID, 3, "info is"},
        {"cancel of no group", [&](ta_error* e) { return ta_transfer_cancel(nullptr, 1, e); }, TA_E_INVALID, 0,
         "group is null"},
        {"cancel of no ticket", [&](ta_error* e) { return ta_transfer_cancel(g, 1, e); }, TA_E_STALE, 1, "0x1 is no ticket"},
        {"poll of no group", [&](ta_error* e) { return ta_group_poll(nullptr, 0, state, e); }, TA_E_INVALID, 0,
         "group is null"},
        {"poll without state", [&](ta_error* e) { return ta_group_poll(g, 0, nullptr, e); }, TA_E_INVALID, 2, "state is null"},
        {"info of no group", [&](ta_error* e) { return ta_group_get_info(nullptr, untouched<ta_group_info>(), e); },
         TA_E_INVALID, 0, "group is null"},
        {"no info", [&](ta_error* e) { return ta_group_get_info(g, nullptr, e); }, TA_E_INVALID, 1, "info is null"},
        {"peer of no group", [&](ta_error* e) { return ta_group_get_peer(nullptr, 1, untouched<ta_group_peer>(), e); },
         TA_E_INVALID, 0, "group is null"},
        {"no peer", [&](ta_error* e) { return ta_group_get_peer(g, 1, nullptr, e); }, TA_E_INVALID, 2, "peer is null"},
        {"peer that is oneself", [&](ta_error* e) { return ta_group_get_peer(g, 0, untouched<ta_group_peer>(), e); },
         TA_E_INVALID, 1, "this is rank 0 of 2"},
        {"peer too early",
         [&](ta_error* e) {
             auto p = sized<ta_group_peer>();
             return ta_group_get_peer(lonely.get(), 1, &p, e);
         },
         TA_E_STATE, 0, "not ready"},
        {"health of no group", [&](ta_error* e) { return ta_group_health(nullptr, e); }, TA_E_INVALID, 0, "group is null"},
        {"abort of no group", [&](ta_error* e) { return ta_group_abort(nullptr, e); }, TA_E_INVALID, 0, "group is null"},
        {"descriptor of no group", [&](ta_error* e) { return ta_group_descriptor(nullptr, untouched<int32_t>(), e); },
         TA_E_INVALID, 0, "group is null"},
        {"no place for a descriptor", [&](ta_error* e) { return ta_group_descriptor(g, nullptr, e); }, TA_E_INVALID, 1,
         "out is"},
        {"finished of no group", [&](ta_error* e) { return ta_group_take_finished(nullptr, ticket, 1, ticket, e); },
         TA_E_INVALID, 0, "group is null"},
        {"no place for tickets", [&](ta_error* e) { return ta_group_take_finished(g, nullptr, 1, ticket, e); }, TA_E_INVALID, 1,
         "tickets is null"},
        {"no place for n", [&](ta_error* e) { return ta_group_take_finished(g, nullptr, 0, nullptr, e); }, TA_E_INVALID, 3,
         "n is null"},
    });
    EXPECT_EQ(ta_group_health(g, nullptr), TA_OK);
}

TEST_F(BadGroups, PartitionRefuses) {
    const auto good = sized<ta_partition_options>();
    const auto partition = [&](ta_group* group, ta_kv_pool* p, ta_seq seq, const ta_partition_options* o) {
        return [=](ta_error* err) { return ta_seq_partition(group, p, seq, o, err); };
    };
    const auto with = [&](auto change) {
        return [&, change](ta_error* err) {
            auto options = good;
            change(options);
            return ta_seq_partition(first.get(), pool.get(), long_seq, &options, err);
        };
    };
    using O = ta_partition_options;
    expect_failures({
        {"no group", partition(nullptr, pool.get(), long_seq, &good), TA_E_INVALID, 0, "group is null"},
        {"no pool", partition(first.get(), nullptr, long_seq, &good), TA_E_INVALID, 1, "pool is null"},
        {"no sequence", partition(first.get(), pool.get(), 0, &good), TA_E_STALE, 2, "no living sequence"},
        {"no options", partition(first.get(), pool.get(), long_seq, nullptr), TA_E_INVALID, 3, "options is null"},
        {"from elsewhere", partition(first.get(), foreign.get(), long_seq, &good), TA_E_STATE, 1, "another context"},
        {"too early", partition(lonely.get(), pool.get(), long_seq, &good), TA_E_STATE, 0, "not ready"},
        {"output", with([](O& o) { o.output = 3; }), TA_E_INVALID, 3, "output is 3"},
        {"negative output", with([](O& o) { o.output = -1; }), TA_E_INVALID, 3, "output is -1"},
        {"first_rank", with([](O& o) { o.first_rank = 2; }), TA_E_INVALID, 3, "first_rank is 2 of 2"},
        {"output_rank of none", with([](O& o) { o.output_rank = 1; }), TA_E_INVALID, 3, "output_rank is 1"},
        {"output_rank", with([](O& o) {
             o.output = TA_OUTPUT_ONE;
             o.output_rank = 2;
         }),
         TA_E_INVALID, 3, "output_rank is 2"},
    });
    // A call that failed took no tag.
    const ta_seq spread = make_sequence(pool);
    ta_error err;
    require(ta_seq_partition(first.get(), pool.get(), spread, &good, &err), err);
    expect_failures(
        {{"tag", partition(first.get(), pool.get(), long_seq, &good), TA_E_INVALID, 3, "tag 0 is that of another"}});
    EXPECT_EQ(ta_seq_release(pool.get(), spread, nullptr), TA_OK);
}

TEST_F(BadGroups, ScatteredHeadsRefuse) {
    Random random(7);
    constexpr int64_t kQ = 6;
    Tensor q(random.normals(kQ * kQHeads * kDim), kQ, kQHeads, kDim), out(kQ, kQHeads, kDim);
    Tensor k(random.normals(kQ * kRow), kQ, kHeads, kDim), v(random.normals(kQ * kRow), kQ, kHeads, kDim);
    Tensor short_v(random.normals(3 * kRow), 3, kHeads, kDim);
    std::vector<float> lse(kQ * kQHeads, -1.0f);
    static const uint32_t too_many[] = {2, 1}, all[] = {1, 1};
    struct Arguments {
        ta_group* group;
        const ta_tensor *q, *k, *v, *out;
        float* lse;
        ta_dense_options options = sized<ta_dense_options>();
        const ta_dense_options* given_options = nullptr;
        uint32_t root = 0;
        ta_x_scatter_options scatter = sized<ta_x_scatter_options>();
        const ta_x_scatter_options* given_scatter = nullptr;
        ta_x_scatter_info* info = nullptr;
    };
    using A = Arguments;
    const auto with = [&](auto change) {
        return [&, change](ta_error* err) {
            A a{first.get(), q.view(), k.view(), v.view(), out.view(), lse.data()};
            change(a);
            return ta_x_group_attend_dense(a.group, a.q, a.k, a.v, a.out, a.lse, a.given_options, a.root, a.given_scatter,
                                           a.info, err);
        };
    };
    const auto not_the_root = [&](auto change) {
        return with([&, change](A& a) {
            a = A{second.get(), nullptr, nullptr, nullptr, nullptr, nullptr};
            change(a);
        });
    };
    static auto no_size = ta_x_scatter_info{};
    expect_failures({
        {"no group", with([](A& a) { a.group = nullptr; }), TA_E_INVALID, 0, "group is null"},
        {"too early", with([&](A& a) { a.group = lonely.get(); }), TA_E_STATE, 0, "not ready"},
        {"no q", with([](A& a) { a.q = nullptr; }), TA_E_INVALID, 1, "q is null"},
        {"no k", with([](A& a) { a.k = nullptr; }), TA_E_INVALID, 2, "k is null"},
        {"no v", with([](A& a) { a.v = nullptr; }), TA_E_INVALID, 3, "v is null"},
        {"short v", with([&](A& a) { a.v = short_v.view(); }), TA_E_SHAPE, 3, "v"},
        {"no out", with([](A& a) { a.out = nullptr; }), TA_E_INVALID, 4, "out is null"},
        {"out is q", with([](A& a) { a.out = a.q; }), TA_E_INVALID, 4, "out"},
        {"misaligned lse", with([](A& a) { a.lse = misaligned<float>(); }), TA_E_ALIGNMENT, 5, "lse is not aligned"},
        {"variant", with([](A& a) {
             a.options.variant = 4;
             a.given_options = &a.options;
         }),
         TA_E_INVALID, 6, "variant is 4"},
        {"stream", with([](A& a) {
             a.options.stream = reinterpret_cast<ta_stream>(&a);
             a.given_options = &a.options;
         }),
         TA_E_UNSUPPORTED, 6, "has no streams"},
        {"root", with([](A& a) { a.root = 2; }), TA_E_INVALID, 7, "root is 2 of 2"},
        {"rank_heads", with([](A& a) {
             a.scatter.rank_heads = too_many;
             a.given_scatter = &a.scatter;
         }),
         TA_E_INVALID, 8, "add up to 3; k has 2 heads"},
        {"misaligned rank_heads", with([](A& a) {
             a.scatter.rank_heads = misaligned<uint32_t>();
             a.given_scatter = &a.scatter;
         }),
         TA_E_ALIGNMENT, 8, "rank_heads is not aligned"},
        {"info without size", with([](A& a) { a.info = &no_size; }), TA_E_STRUCT, 9, "info.struct_size is 0"},
        {"q of another", not_the_root([&](A& a) { a.q = q.view(); }), TA_E_INVALID, 1, "rank 1 is not the root"},
        {"k of another", not_the_root([&](A& a) { a.k = k.view(); }), TA_E_INVALID, 2, "k is not null"},
        {"v of another", not_the_root([&](A& a) { a.v = v.view(); }), TA_E_INVALID, 3, "v is not null"},
        {"out of another", not_the_root([&](A& a) { a.out = out.view(); }), TA_E_INVALID, 4, "out is not null"},
        {"lse of another", not_the_root([&](A& a) { a.lse = lse.data(); }), TA_E_INVALID, 5, "lse is not null"},
        {"options of another", not_the_root([](A& a) { a.given_options = &a.options; }), TA_E_INVALID, 6,
         "options is not null"},
        {"rank_heads of another", not_the_root([](A& a) {
             a.scatter.rank_heads = all;
             a.given_scatter = &a.scatter;
         }),
         TA_E_INVALID, 8, "are the root's to say"},
        {"heads_per_round of another", not_the_root([](A& a) {
             a.scatter.heads_per_round = 1;
             a.given_scatter = &a.scatter;
         }),
         TA_E_INVALID, 8, "are the root's to say"},
    });
    EXPECT_TRUE(out.all_poison());
    EXPECT_EQ(lse, std::vector<float>(lse.size(), -1.0f));
    EXPECT_EQ(ta_group_health(first.get(), nullptr), TA_OK);
}

TEST_F(BadGroups, SharedNamespacesRefuse) {
    const ta_namespace joined = make_space(pool, 1), apart = make_space(pool, 2);
    ta_group* const g = first.get();
    ta_kv_pool* const p = pool.get();
    ta_error err;
    require(ta_namespace_join(g, p, joined, &err), err);
    const uint8_t key[32] = {};
    constexpr uint64_t kTooMany = (uint64_t{1} << 34) + 1;
    auto* place = untouched<ta_prefix_place>();
    auto* ticket = untouched<ta_ticket>();
    const auto join = [](ta_group* group, ta_kv_pool* of, ta_namespace space) {
        return [=](ta_error* e) { return ta_namespace_join(group, of, space, e); };
    };
    const auto leave = [](ta_group* group, ta_kv_pool* of, ta_namespace space) {
        return [=](ta_error* e) { return ta_namespace_leave(group, of, space, e); };
    };
    const auto lookup = [](ta_group* group, ta_kv_pool* of, ta_namespace space, const uint8_t* keys, uint64_t n,
                           ta_prefix_place* to) {
        return [=](ta_error* e) { return ta_namespace_lookup(group, of, space, keys, n, 0, to, e); };
    };
    const auto fetch = [](ta_group* group, ta_kv_pool* of, ta_namespace space, const uint8_t* keys, uint64_t n, ta_ticket* to) {
        return [=](ta_error* e) { return ta_namespace_fetch(group, of, space, keys, n, to, e); };
    };
    expect_failures({
        {"join of no group", join(nullptr, p, apart), TA_E_INVALID, 0, "group is null"},
        {"join of no pool", join(g, nullptr, apart), TA_E_INVALID, 1, "pool is null"},
        {"join from elsewhere", join(g, foreign.get(), apart), TA_E_STATE, 1, "another context"},
        {"join of no namespace", join(g, p, 77), TA_E_STALE, 2, "no living namespace"},
        {"join again", join(g, p, joined), TA_E_INVALID, 2, "has joined"},
        {"join too early", join(lonely.get(), p, apart), TA_E_STATE, 0, "not ready"},
        {"leave of no group", leave(nullptr, p, joined), TA_E_INVALID, 0, "group is null"},
        {"leave of no pool", leave(g, nullptr, joined), TA_E_INVALID, 1, "pool is null"},
        {"leave before", leave(g, p, apart), TA_E_STATE, 2, "has not joined"},
        {"lookup of no group", lookup(nullptr, p, joined, key, 1, place), TA_E_INVALID, 0, "group is null"},
        {"lookup of no pool", lookup(g, nullptr, joined, key, 1, place), TA_E_INVALID, 1, "pool is null"},
        {"lookup of no namespace", lookup(g, p, 77, key, 1, place), TA_E_STALE, 2, "no living namespace"},
        {"lookup before", lookup(g, p, apart, key, 1, place), TA_E_STATE, 2, "has not joined"},
        {"lookup of no keys", lookup(g, p, joined, nullptr, 1, place), TA_E_INVALID, 3, "keys is null"},
        {"lookup of too many", lookup(g, p, joined, key, kTooMany, place), TA_E_INVALID, 4, "n is 17179869185"},
        {"lookup without places", lookup(g, p, joined, key, 1, nullptr), TA_E_INVALID, 6, "places is null"},
        {"lookup too early", lookup(lonely.get(), p, joined, key, 1, place), TA_E_STATE, 0, "not ready"},
        {"fetch of no group", fetch(nullptr, p, joined, key, 1, ticket), TA_E_INVALID, 0, "group is null"},
        {"fetch of no pool", fetch(g, nullptr, joined, key, 1, ticket), TA_E_INVALID, 1, "pool is null"},
        {"fetch from elsewhere", fetch(g, foreign.get(), joined, key, 1, ticket), TA_E_STATE, 1, "another context"},
        {"fetch of no namespace", fetch(g, p, 77, key, 1, ticket), TA_E_STALE, 2, "no living namespace"},
        {"fetch before", fetch(g, p, apart, key, 1, ticket), TA_E_STATE, 2, "has not joined"},
        {"fetch of no keys", fetch(g, p, joined, nullptr, 1, ticket), TA_E_INVALID, 3, "keys is null"},
        {"fetch of too many", fetch(g, p, joined, key, kTooMany, ticket), TA_E_INVALID, 4, "n is 17179869185"},
        {"fetch without out", fetch(g, p, joined, key, 1, nullptr), TA_E_INVALID, 5, "out is null"},
        {"fetch too early", fetch(lonely.get(), p, joined, key, 1, ticket), TA_E_STATE, 0, "not ready"},
    });
    auto* hashed = untouched<uint8_t>();
    auto* event = untouched<ta_prefix_event>();
    auto* count = untouched<uint64_t>();
    expect_failures({
        {"hash in no pool", [&](ta_error* e) { return ta_namespace_hash_keys(nullptr, joined, key, 1, hashed, e); },
         TA_E_INVALID, 0, "pool is null"},
        {"hash in no namespace", [&](ta_error* e) { return ta_namespace_hash_keys(p, 77, key, 1, hashed, e); }, TA_E_STALE, 1,
         "no living namespace"},
        {"hash no keys", [&](ta_error* e) { return ta_namespace_hash_keys(p, joined, nullptr, 1, hashed, e); }, TA_E_INVALID, 2,
         "keys is null"},
        {"hash too many", [&](ta_error* e) { return ta_namespace_hash_keys(p, joined, key, kTooMany, hashed, e); },
         TA_E_INVALID, 3, "n is 17179869185"},
        {"hash to nowhere", [&](ta_error* e) { return ta_namespace_hash_keys(p, joined, key, 1, nullptr, e); }, TA_E_INVALID, 4,
         "hashed is null"},
        {"events of no pool", [&](ta_error* e) { return ta_namespace_take_events(nullptr, joined, event, 1, count, e); },
         TA_E_INVALID, 0, "pool is null"},
        {"events of no namespace", [&](ta_error* e) { return ta_namespace_take_events(p, 77, event, 1, count, e); }, TA_E_STALE,
         1, "no living namespace"},
        {"no place for events", [&](ta_error* e) { return ta_namespace_take_events(p, joined, nullptr, 1, count, e); },
         TA_E_INVALID, 2, "events is null"},
        {"no place for n of events", [&](ta_error* e) { return ta_namespace_take_events(p, joined, event, 1, nullptr, e); },
         TA_E_INVALID, 4, "n is null"},
    });
    EXPECT_EQ(ta_group_health(g, nullptr), TA_OK);
    for (const ta_namespace space : {joined, apart}) EXPECT_EQ(ta_namespace_destroy(p, space, nullptr), TA_OK);
}

}  // namespace
}  // namespace ta::testing
