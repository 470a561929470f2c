#include <cstdio>
#include <utility>

#include "kernels/format/hash.h"
#include "kernels/format/merge_states.h"
#include "src/api/dense.h"
#include "src/attend/dense/scatter.h"
#include "src/kv/partition.h"
#include "src/kv/share/transfers.h"
#include "tiering/share/host.h"
#include "tiering/share/local.h"
#include "tiering/share/nccl.h"

using namespace ta;
using namespace ta::api;
using namespace ta::share;

struct ta_group {
    ta_group_kind kind = 0;
    std::unique_ptr<Group> group;
    std::unique_ptr<SharedSpaces> spaces;
    std::unique_ptr<Transfers> transfers;
    std::shared_ptr<Exchange> exchange;  // partitioned sequences share it
    std::unique_ptr<DenseScatter> scatter;

    // First stops the threads that call the members; then the members are destroyed, the ones that `transfers` uses last. After
    // a failed creation, any member may be null.
    ~ta_group() {
        if (group) group->stop();
        if (spaces) spaces->stop();
        if (exchange) exchange->stop();
        if (scatter) scatter->rounds().stop();
    }
};

static_assert(int(GroupState::kConnecting) == TA_GROUP_CONNECTING && int(GroupState::kReady) == TA_GROUP_READY &&
              int(GroupState::kEnded) == TA_GROUP_ENDED);
static_assert(int(Fault::Kind::kDrop) == TA_X_FAULT_DROP && int(Fault::Kind::kDelay) == TA_X_FAULT_DELAY &&
              int(Fault::Kind::kDuplicate) == TA_X_FAULT_DUPLICATE && int(Fault::Kind::kReorder) == TA_X_FAULT_REORDER &&
              int(Fault::Kind::kCorrupt) == TA_X_FAULT_CORRUPT && int(Fault::Kind::kCut) == TA_X_FAULT_CUT &&
              int(Fault::Kind::kKill) == TA_X_FAULT_KILL);
static_assert(sizeof(ta_group_id) == kGroupIdBytes && int(GroupKind::kLocal) == TA_GROUP_LOCAL &&
              int(GroupKind::kHost) == TA_GROUP_HOST && int(GroupKind::kNccl) == TA_GROUP_NCCL);
static_assert(int(Transport::Route::By::kHostMemory) == TA_ROUTE_HOST_MEMORY &&
              int(Transport::Route::By::kGpuMemory) == TA_ROUTE_GPU_MEMORY &&
              int(Transport::Route::By::kNccl) == TA_ROUTE_NCCL);
static_assert(int(PrefixPlace::Answer::kUnknown) == TA_PREFIX_UNKNOWN && int(PrefixPlace::Answer::kNo) == TA_PREFIX_NO &&
              int(PrefixPlace::Answer::kYes) == TA_PREFIX_YES);

namespace {

constexpr uint32_t kMostRanks = 1024;

Status check_group(const ta_group* group) {
    TA_RETURN_IF_ERROR(check_pointer(group, "group", 0));
    return check_process(group->group->context());
}

Status check_kind(ta_group_kind kind, int argument) {
    if (kind >= TA_GROUP_LOCAL && kind <= TA_GROUP_NCCL) return {};
    return fail(TA_E_INVALID, "kind is %d, no value of ta_group_kind", int(kind)).argument(argument);
}

Result<std::chrono::milliseconds> read_milliseconds(int32_t given, const char* name, std::chrono::milliseconds usual) {
    constexpr int32_t kDay = 86400000;
    if (given < 0 || given > kDay) return fail(TA_E_INVALID, "%s is %d; it is 0 to %d", name, given, kDay).argument(1);
    return given == 0 ? usual : std::chrono::milliseconds(given);
}

Result<Fault> read_fault(const ta_x_group_fault* given) {
    if (!given) return Fault{};
    Result<ta_x_group_fault> read = read_struct(given, "options.fault", 1);
    if (!read.ok()) return std::move(read).status();
    const ta_x_group_fault& f = read.value();
    if (f.kind < TA_X_FAULT_NONE || f.kind > TA_X_FAULT_KILL)
        return fail(TA_E_INVALID, "options.fault.kind is %d, no value of ta_x_fault", int(f.kind)).argument(1);
    return Fault{Fault::Kind(f.kind), f.action, f.detail};
}

Result<GroupSettings> read_settings(const ta_group_options& o) {
    if (o.ranks == 0 || o.ranks > kMostRanks)
        return fail(TA_E_INVALID, "ranks is %u; it is 1 to %u", o.ranks, kMostRanks).argument(1);
    if (o.rank >= o.ranks) return fail(TA_E_INVALID, "rank is %u of %u", o.rank, o.ranks).argument(1);
    TA_RETURN_IF_ERROR(check_kind(o.kind, 1));
    TA_RETURN_IF_ERROR(check_pointer(o.id, "options.id", 1));
    GroupSettings s;
    s.rank = o.rank;
    s.ranks = o.ranks;
    s.generation = hash_bytes(o.id, sizeof *o.id);
    struct {
        int32_t given;
        const char* name;
        std::chrono::milliseconds* to;
    } const times[] = {{o.connect_ms, "connect_ms", &s.connect},
                       {o.operation_ms, "operation_ms", &s.operation},
                       {o.silence_ms, "silence_ms", &s.silence}};
    for (const auto& time : times) {
        Result<std::chrono::milliseconds> read = read_milliseconds(time.given, time.name, *time.to);
        if (!read.ok()) return std::move(read).status();
        *time.to = read.value();
    }
    if (o.staging_bytes > 0) s.staging_bytes = o.staging_bytes;
    return s;
}

Status check_peer(const ta_group& group, uint32_t rank, int argument) {
    const GroupSettings& s = group.group->settings();
    if (rank < s.ranks && rank != s.rank) return {};
    return fail(TA_E_INVALID, "rank %u is asked for; this is rank %u of %u", rank, s.rank, s.ranks).argument(argument);
}

Result<std::unique_ptr<Transport>> join(const std::shared_ptr<Context>& context, const GroupId& id, const ta_group_options& o,
                                        const GroupSettings& settings, const Fault& fault) {
    if (o.kind == TA_GROUP_LOCAL) return join_local_group(id, o.rank, o.ranks, context->device(), fault);
    std::shared_ptr<Device> device;
    if (context->device()) device = {context, context->device()};
    if (o.kind == TA_GROUP_HOST) return join_host_group(settings.generation, o.rank, o.ranks, std::move(device));
    return join_nccl_group(id, o.rank, o.ranks, std::move(device),
                           {o.nccl_comm, o.hosts_apart != 0, settings.silence, settings.connect});
}

// Checks the pool that a call of the group is about.
Status check_pool_of(const ta_group* group, const ta_kv_pool* pool) {
    TA_RETURN_IF_ERROR(check_group(group));
    TA_RETURN_IF_ERROR(check_pointer(pool, "pool", 1));
    TA_RETURN_IF_ERROR(check_process(pool->impl->context()));
    TA_RETURN_IF_ERROR(pool->impl->check_open());
    if (&pool->impl->context() == &group->group->context()) return {};
    return fail(TA_E_STATE, "the pool is of another context than the group's rank").argument(1);
}

Result<ta_partition_options> read_partition(const ta_partition_options* options, const GroupSettings& group) {
    TA_RETURN_IF_ERROR(check_pointer(options, "options", 3));
    Result<ta_partition_options> read = read_struct(options, "options", 3);
    if (!read.ok()) return std::move(read).status();
    const ta_partition_options& o = read.value();
    if (o.output < TA_OUTPUT_ALL || o.output > TA_OUTPUT_ONE)
        return fail(TA_E_INVALID, "options.output is %d, no value of ta_partition_output", int(o.output)).argument(3);
    if (o.first_rank >= group.ranks)
        return fail(TA_E_INVALID, "options.first_rank is %u of %u", o.first_rank, group.ranks).argument(3);
    if (o.output_rank >= (o.output == TA_OUTPUT_ONE ? group.ranks : 1))
        return fail(TA_E_INVALID, "options.output_rank is %u; it is a rank under TA_OUTPUT_ONE, else 0", o.output_rank)
            .argument(3);
    return o;
}

// `kv_heads`: of the call at the root; -1 at other ranks.
Result<ScatterSettings> read_scatter(const ta_x_scatter_options* options, const GroupSettings& group, uint32_t root,
                                     int64_t kv_heads) {
    ScatterSettings s;
    s.root = root;
    if (!options) return s;
    Result<ta_x_scatter_options> read = read_struct(options, "scatter", 8);
    if (!read.ok()) return std::move(read).status();
    const ta_x_scatter_options& o = read.value();
    TA_RETURN_IF_ERROR(check_aligned(o.rank_heads, "scatter.rank_heads", 8));
    s.tag = o.tag;
    s.room = o.workspace_bytes;
    s.heads_per_round = o.heads_per_round;
    if (kv_heads < 0 && (o.heads_per_round != 0 || o.rank_heads))
        return fail(TA_E_INVALID, "scatter.heads_per_round and scatter.rank_heads are the root's to say").argument(8);
    if (kv_heads < 0 || !o.rank_heads) return s;
    s.heads.assign(o.rank_heads, o.rank_heads + group.ranks);
    uint64_t sum = 0;
    for (const uint32_t n : s.heads) sum += n;
    if (sum == uint64_t(kv_heads)) return s;
    return fail(TA_E_INVALID, "scatter.rank_heads add up to %llu; k has %lld heads", (unsigned long long)sum,
                (long long)kv_heads)
        .argument(8);
}

ta_x_scatter_info info_of(const ScatterStats& s) {
    ta_x_scatter_info r{};
    r.heads = s.heads;
    r.rounds = s.rounds;
    r.heads_per_round = s.heads_per_round;
    r.bytes_sent = s.bytes_sent;
    r.bytes_received = s.bytes_received;
    r.pack_ns = s.pack;
    r.send_ns = s.send;
    r.longest_send_ns = s.longest_send;
    r.first_wait_ns = s.first_wait;
    r.wait_ns = s.wait;
    r.total_ns = s.total;
    return r;
}

Status write_info(const TransferProgress& p, ta_transfer_info* info, int argument) {
    ta_transfer_info r{};
    r.state = p.state;
    r.peer = p.peer;
    r.status = p.status.code();
    r.tag = p.tag;
    r.blocks = p.blocks;
    r.blocks_moved = p.blocks_moved;
    r.blocks_shared = p.blocks_shared;
    r.bytes_moved = p.bytes_moved;
    r.seq = p.seq;
    r.length = p.length;
    r.block = r.rank = -1;
    if (const ta_error* detail = p.status.detail()) {
        r.block = detail->block;
        r.rank = detail->rank;
        std::snprintf(r.reason, sizeof r.reason, "%.*s", int(sizeof r.reason - 1), detail->message);
    }
    return write_struct(r, info, "info", argument);
}

ta_status write_progress(const ta_group* group, ta_ticket ticket, int64_t nanoseconds, ta_transfer_info* info, int argument,
                         ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        TA_RETURN_IF_ERROR(check_pointer(info, "info", argument));
        TA_RETURN_IF_ERROR(check_struct_size(info, "info", argument));  // checked before the wait
        Result<TransferProgress> progress = group->transfers->wait(ticket, nanoseconds);
        if (!progress.ok()) return std::move(progress).status().argument(1);
        return write_info(progress.value(), info, argument);
    });
}

}  // namespace

extern "C" {

ta_status ta_group_make_id(ta_group_kind kind, ta_group_id* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_kind(kind, 0));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 1));
        Result<GroupId> made = kind == TA_GROUP_NCCL ? make_nccl_id() : make_id(GroupKind(kind));
        if (!made.ok()) return std::move(made).status();
        const GroupId& id = made.value();
        std::memcpy(out->bytes, id.data(), id.size());
        return {};
    });
}

ta_status ta_group_create(ta_context* context, const ta_group_options* options, ta_group** out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(context, "context", 0));
        TA_RETURN_IF_ERROR(check_process(*context->impl));
        TA_RETURN_IF_ERROR(check_pointer(options, "options", 1));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        Result<ta_group_options> read = read_struct(options, "options", 1);
        if (!read.ok()) return std::move(read).status();
        const ta_group_options& o = read.value();
        Result<GroupSettings> settings = read_settings(o);
        if (!settings.ok()) return std::move(settings).status();
        Result<Fault> fault = read_fault(o.fault);
        if (!fault.ok()) return std::move(fault).status();
        GroupId id;
        std::memcpy(id.data(), o.id->bytes, id.size());
        if (!is_of(id, GroupKind(o.kind)))
            return fail(TA_E_INVALID, "options.id is not of ta_group_make_id and this kind").argument(1);
        if (o.hosts_apart < 0 || o.hosts_apart > 1)
            return fail(TA_E_INVALID, "options.hosts_apart is %d; it is 0 or 1", int(o.hosts_apart)).argument(1);
        if ((o.nccl_comm || o.hosts_apart) && o.kind != TA_GROUP_NCCL)
            return fail(TA_E_INVALID, "options.nccl_comm and options.hosts_apart are for TA_GROUP_NCCL").argument(1);
        if (o.fault && o.kind != TA_GROUP_LOCAL)
            return fail(TA_E_UNSUPPORTED, "options.fault is for TA_GROUP_LOCAL").argument(1);
        Result<std::unique_ptr<Transport>> transport = join(context->impl, id, o, settings.value(), fault.value());
        if (!transport.ok()) return at_argument(std::move(transport).status(), 1);
        auto group = std::make_unique<ta_group>();
        group->kind = o.kind;
        group->group = std::make_unique<Group>(context->impl, settings.value(), transport.take());
        group->spaces = std::make_unique<SharedSpaces>(*group->group);
        group->transfers = std::make_unique<Transfers>(*group->group, group->spaces.get());
        group->exchange = std::make_shared<Exchange>(*group->group);
        group->scatter = std::make_unique<DenseScatter>(*group->group);
        TA_RETURN_IF_ERROR(group->transfers->start());
        TA_RETURN_IF_ERROR(group->group->start(
            {group->transfers.get(), group->exchange.get(), group->spaces.get(), &group->scatter->rounds()}));
        *out = group.release();
        return {};
    });
}

void ta_group_destroy(ta_group* group) {
    destroy(group, [](const ta_group& g) -> const Context& { return g.group->context(); });
}

ta_status ta_group_poll(const ta_group* group, int64_t nanoseconds, ta_group_state* state, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        TA_RETURN_IF_ERROR(check_pointer(state, "state", 2));
        *state = int32_t(group->group->wait_connected(nanoseconds));
        return {};
    });
}

ta_status ta_group_get_info(const ta_group* group, ta_group_info* info, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        TA_RETURN_IF_ERROR(check_pointer(info, "info", 1));
        const Group& g = *group->group;
        ta_group_info r{};
        r.state = int32_t(g.state());
        r.rank = g.settings().rank;
        r.ranks = g.settings().ranks;
        r.kind = group->kind;
        r.nccl_version = r.kind == TA_GROUP_NCCL ? nccl_version() : 0;
        r.generation = g.settings().generation;
        const Status health = g.health();
        if (health.detail())
            std::snprintf(r.reason, sizeof r.reason, "%.*s", int(sizeof r.reason - 1), health.detail()->message);
        return write_struct(r, info, "info", 1);
    });
}

ta_status ta_group_get_peer(const ta_group* group, uint32_t rank, ta_group_peer* peer, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        TA_RETURN_IF_ERROR(check_peer(*group, rank, 1));
        TA_RETURN_IF_ERROR(check_pointer(peer, "peer", 2));
        TA_RETURN_IF_ERROR(group->group->check_ready());
        const Transport::Route route = group->group->transport().route(rank);
        ta_group_peer r{};
        r.rank = rank;
        r.route = int32_t(route.by);
        r.bytes_per_s = route.bytes_per_s;
        std::snprintf(r.why, sizeof r.why, "%s", route.why);
        return write_struct(r, peer, "peer", 2);
    });
}

ta_status ta_group_health(const ta_group* group, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        return group->group->health();
    });
}

ta_status ta_group_abort(ta_group* group, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        const auto rank = int32_t(group->group->settings().rank);
        group->group->end(fail(TA_E_CANCELLED, "rank %d aborted the group", rank).rank(rank));
        return {};
    });
}

ta_status ta_group_descriptor(const ta_group* group, int32_t* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 1));
        if (group->group->descriptor() < 0) return fail(TA_E_UNSUPPORTED, "the system gave no event descriptor");
        *out = group->group->descriptor();
        return {};
    });
}

ta_status ta_group_take_finished(ta_group* group, ta_ticket* tickets, uint64_t most, uint64_t* n, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        if (most > 0) TA_RETURN_IF_ERROR(check_pointer(tickets, "tickets", 1));
        TA_RETURN_IF_ERROR(check_pointer(n, "n", 3));
        *n = group->group->finished().take({tickets, size_t(most)});
        return {};
    });
}

ta_status ta_seq_send(ta_group* group, ta_kv_pool* pool, ta_seq seq, uint32_t to, uint64_t tag, ta_send_mode mode,
                      ta_ticket* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool_of(group, pool));
        TA_RETURN_IF_ERROR(check_peer(*group, to, 3));
        if (mode != TA_SEND_COPY && mode != TA_SEND_MOVE)
            return fail(TA_E_INVALID, "mode is %d, no value of ta_send_mode", int(mode)).argument(5);
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 6));
        Result<uint64_t> ticket = group->transfers->send(pool->impl, seq, to, tag, mode == TA_SEND_MOVE);
        if (!ticket.ok()) return std::move(ticket).status();
        *out = ticket.value();
        return {};
    });
}

ta_status ta_seq_receive(ta_group* group, ta_kv_pool* pool, uint32_t from, uint64_t tag, ta_ticket* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool_of(group, pool));
        TA_RETURN_IF_ERROR(check_peer(*group, from, 2));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 4));
        Result<uint64_t> ticket = group->transfers->receive(pool->impl, from, tag);
        if (!ticket.ok()) return std::move(ticket).status();
        *out = ticket.value();
        return {};
    });
}

ta_status ta_namespace_join(ta_group* group, ta_kv_pool* pool, ta_namespace space, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool_of(group, pool));
        return group->spaces->join(pool->impl, space);
    });
}

ta_status ta_namespace_leave(ta_group* group, ta_kv_pool* pool, ta_namespace space, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool_of(group, pool));
        return group->spaces->leave(*pool->impl, space);
    });
}

ta_status ta_namespace_lookup(const ta_group* group, const ta_kv_pool* pool, ta_namespace space, const uint8_t* keys,
                              uint64_t n, int64_t nanoseconds, ta_prefix_place* places, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool_of(group, pool));
        TA_RETURN_IF_ERROR(check_keys(keys, n, 3));
        if (n > 0) TA_RETURN_IF_ERROR(check_pointer(places, "places", 6));
        Result<std::vector<PrefixPlace>> found =
            group->spaces->lookup(*pool->impl, space, {keys, size_t(n) * kPrefixKeyBytes}, nanoseconds);
        if (!found.ok()) return std::move(found).status();
        for (const PrefixPlace& p : found.value()) *places++ = {int32_t(p.answer), p.rank, code_of(p.tier)};
        return {};
    });
}

ta_status ta_namespace_fetch(ta_group* group, ta_kv_pool* pool, ta_namespace space, const uint8_t* keys, uint64_t n,
                             ta_ticket* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool_of(group, pool));
        TA_RETURN_IF_ERROR(check_keys(keys, n, 3));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 5));
        Result<uint64_t> ticket = group->transfers->fetch(pool->impl, space, {keys, size_t(n) * kPrefixKeyBytes});
        if (!ticket.ok()) return std::move(ticket).status();
        *out = ticket.value();
        return {};
    });
}

ta_status ta_seq_partition(ta_group* group, ta_kv_pool* pool, ta_seq seq, const ta_partition_options* options, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool_of(group, pool));
        const Group& g = *group->group;
        Result<ta_partition_options> read = read_partition(options, g.settings());
        if (!read.ok()) return std::move(read).status();
        TA_RETURN_IF_ERROR(g.check_ready());
        if (g.settings().ranks > uint32_t(kMaxMergeParts)) {
            return fail(TA_E_UNSUPPORTED, "the group has %u ranks; a sequence is spread over at most %d", g.settings().ranks,
                        kMaxMergeParts)
                .argument(0);
        }
        const ta_partition_options& o = read.value();
        const auto partition = std::make_shared<Partition>();
        partition->tag = o.tag;
        partition->first_rank = o.first_rank;
        partition->output = o.output;
        partition->output_rank = o.output_rank;
        // The tag first: a call that fails counts as a sequence that had the tag and was released (its partition is destroyed),
        // since the other ranks release theirs then.
        Result<uint64_t> history = group->exchange->add_tag(o.tag);
        if (history.ok()) {
            partition->last_met = history.value();
            partition->exchange = group->exchange;
        }
        Status s = pool->impl->sequences().may_partition(seq);
        if (!s.ok()) return std::move(s).argument(2);
        if (!history.ok()) return std::move(history).status().argument(3);
        s = pool->impl->sequences().partition(seq, partition);
        return s.ok() ? std::move(s) : std::move(s).argument(2);
    });
}

ta_status ta_transfer_query(const ta_group* group, ta_ticket ticket, ta_transfer_info* info, ta_error* err) {
    return write_progress(group, ticket, 0, info, 2, err);
}

ta_status ta_transfer_wait(const ta_group* group, ta_ticket ticket, int64_t nanoseconds, ta_transfer_info* info,
                           ta_error* err) {
    return write_progress(group, ticket, nanoseconds, info, 3, err);
}

ta_status ta_transfer_cancel(ta_group* group, ta_ticket ticket, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        Status s = group->transfers->cancel(ticket);
        return s.ok() ? std::move(s) : std::move(s).argument(1);
    });
}

ta_status ta_x_group_attend_dense(ta_group* group, const ta_tensor* q, const ta_tensor* k, const ta_tensor* v,
                                  const ta_tensor* out, float* lse, const ta_dense_options* options, uint32_t root,
                                  const ta_x_scatter_options* scatter, ta_x_scatter_info* info, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_group(group));
        const GroupSettings& g = group->group->settings();
        if (root >= g.ranks) return fail(TA_E_INVALID, "root is %u of %u", root, g.ranks).argument(7);
        if (info) TA_RETURN_IF_ERROR(check_struct_size(info, "info", 9));
        const bool is_root = root == g.rank;
        const struct {
            const void* given;
            const char* name;
        } of_root[] = {{q, "q"}, {k, "k"}, {v, "v"}, {out, "out"}, {lse, "lse"}, {options, "options"}};
        for (int i = 0; i < 6 && !is_root; ++i) {
            if (of_root[i].given)
                return fail(TA_E_INVALID, "%s is not null; rank %u is not the root", of_root[i].name, g.rank).argument(i + 1);
        }
        DenseArguments arguments;
        if (is_root) TA_RETURN_IF_ERROR(read_dense(group->group->context(), {q, k, v, out}, lse, options, arguments));
        Result<ScatterSettings> settings = read_scatter(scatter, g, root, is_root ? arguments.call.k.heads : -1);
        if (!settings.ok()) return std::move(settings).status();
        TA_RETURN_IF_ERROR(group->group->check_ready());
        ScatterStats stats;
        DenseScatter& work = *group->scatter;
        TA_RETURN_IF_ERROR(is_root ? work.give(arguments.call, settings.value(), stats) : work.take(settings.value(), stats));
        return info ? write_struct(info_of(stats), info, "info", 9) : Status();
    });
}

}  // extern "C"
