// Groups of ranks, and transfers between them.
#include <cstring>

#include "objects.h"

namespace {

GroupObject create_group(const ContextObject& self, nb::bytes id, uint32_t rank, uint32_t ranks, int32_t kind,
                         int32_t connect_ms, int32_t operation_ms, int32_t silence_ms, uint64_t staging_bytes,
                         uintptr_t nccl_comm, bool hosts_apart, uintptr_t fault) {
    const auto context = self.handle.get();
    ta::GroupOptions options{.rank = rank,
                             .ranks = ranks,
                             .kind = kind,
                             .connect_ms = connect_ms,
                             .operation_ms = operation_ms,
                             .silence_ms = silence_ms,
                             .staging_bytes = staging_bytes,
                             .fault = reinterpret_cast<const struct ta_x_group_fault*>(fault),
                             .nccl_comm = reinterpret_cast<void*>(nccl_comm),
                             .hosts_apart = hosts_apart};
    if (id.size() != sizeof options.id) throw ta::Error(TA_E_INVALID, "id has 128 bytes: make_group_id makes one");
    std::memcpy(&options.id, id.data(), sizeof options.id);
    return {{unlocked([&] { return context.create_group(options); }), "the group"}};
}

// ``Context.create_group`` and ``make_group_id``.
void bind_create_group(nb::class_<ContextObject>& context, nb::module_& m) {
    context.def(
        "create_group", &create_group, "id"_a, nb::kw_only(), "rank"_a, "ranks"_a, "kind"_a = int32_t{TA_GROUP_LOCAL},
        "connect_ms"_a = 0, "operation_ms"_a = 0, "silence_ms"_a = 0, "staging_bytes"_a = 0, "nccl_comm"_a = 0,
        "hosts_apart"_a = false, "fault"_a = 0,
        nb::sig(
            "def create_group(self, id: bytes, *, rank: int, ranks: int, kind: GroupKind = "
            "turboattention._enums.GroupKind.LOCAL, connect_ms: int = "
            "0, operation_ms: int = 0, silence_ms: int = 0, staging_bytes: int = 0, nccl_comm: int = 0, hosts_apart: bool = "
            "False, fault: int = 0) -> Group"),
        R"(Joins a group as one of its ranks and returns: ``Group.wait`` says when all have joined.

Args:
    id: of ``make_group_id``, the same at all ranks
    rank: 0..ranks - 1
    ranks: 1..1024
    kind: how ranks reach each other
    connect_ms: until all ranks have joined; 0: 30000
    operation_ms: a transfer without progress for so long ends; 0: 30000
    silence_ms: a rank that was not heard of for so long is lost; 0: 10000
    staging_bytes: host memory that an arriving transfer may take; 0: 64 MiB
    nccl_comm: address of an ncclComm_t of the same ranks, which outlives the group
    hosts_apart: takes ranks of one host for ranks of several, to compare
    fault: address of a ta_x_group_fault, for tests

Raises:
    ArgumentError: INVALID, UNSUPPORTED
    StateError: the group of this id has ended (STALE)
    ExhaustedError: LIMIT, MEMORY
    PeerError: another rank says another number of ranks (MISMATCH)
)");

    m.def(
        "make_group_id",
        [](int32_t kind) {
            const ta_group_id id = unlocked([&] { return ta::Group::make_id(kind); });
            return nb::bytes(id.bytes, sizeof id.bytes);
        },
        "kind"_a = int32_t{TA_GROUP_LOCAL},
        nb::sig("def make_group_id(kind: GroupKind = turboattention._enums.GroupKind.LOCAL) -> bytes"),
        R"(A fresh id of 128 bytes, which all ranks of the group are to be given.

Raises:
    ArgumentError: INVALID; no NCCL (UNSUPPORTED)
)");
}

// The state of a group, and its end.
void bind_rank(nb::class_<GroupObject>& group) {
    group.def_prop_ro(
        "address", [](const GroupObject& self) { return reinterpret_cast<uintptr_t>(self.handle.get().get()); },
        "Address of the C handle, for calls of the C header; valid as long as the object is.");
    group.def(
        "close", [](GroupObject& self) { self.handle.close(); }, "Leaves the group, unless a transfer still has it.");
    add_context_manager(group);
    group.def(
        "wait",
        [](const GroupObject& self, std::optional<double> seconds) {
            const auto group = self.handle.get();
            ta_group_state state = 0;
            wait_for(seconds,
                     [&](std::chrono::nanoseconds slice) { return (state = group.wait(slice)) != TA_GROUP_CONNECTING; });
            return package("turboattention._enums", "GroupState")(state);
        },
        "seconds"_a = nb::none(), nb::sig("def wait(self, seconds: float | None = None) -> GroupState"),
        "Waits until the group does not connect any more, or so many seconds. Ctrl-C ends the wait.");
    group.def(
        "info",
        [](const GroupObject& self) {
            const auto group = self.handle.get();
            return unlocked([&] { return group.info(); });
        },
        "The rank, and whether the group works.");
    group.def(
        "peer",
        [](const GroupObject& self, uint32_t rank) {
            const auto group = self.handle.get();
            return unlocked([&] { return group.peer(rank); });
        },
        "rank"_a, R"(What lies between this rank and another.

Raises:
    ArgumentError: no such rank (INVALID)
    StateError: the group is not ready (STATE)
    PeerError, StateError: it has ended, as ``health``
)");
    group.def(
        "health",
        [](const GroupObject& self) {
            const auto group = self.handle.get();
            unlocked([&] { group.health(); });
        },
        "Raises PeerError, or StateError (CANCELLED), once the group has ended; ``rank`` says whose fault it was.");
    group.def(
        "abort",
        [](const GroupObject& self) {
            const auto group = self.handle.get();
            unlocked([&] { group.abort(); });
        },
        "Ends the group at all ranks.");
}

// Finished transfers, and sequences from other ranks.
void bind_receives(nb::class_<GroupObject>& group) {
    group.def(
        "fileno",
        [](const GroupObject& self) {
            const auto group = self.handle.get();
            return unlocked([&] { return group.descriptor(); });
        },
        R"(A descriptor for ``select`` and ``asyncio``'s ``add_reader``: it can be read while ``take_finished`` has tickets, or since the
state changed. It belongs to the group.

Raises:
    ArgumentError: the system gave none (UNSUPPORTED)
)");
    group.def(
        "take_finished",
        [](const GroupObject& self, size_t most) {
            const auto group = self.handle.get();
            return unlocked([&] { return group.take_finished(most); });
        },
        "most"_a = 256,
        "Tickets (``Transfer.ticket``) that are finished, each once; fewer than ``most``: there are no more now.");
    group.def(
        "receive",
        [](const GroupObject& self, const PoolObject& pool, uint32_t from, uint64_t tag) {
            const auto group = self.handle.get();
            const auto target = pool.handle.get();
            return TransferObject(group.shared(), unlocked([&] { return group.receive(target, from, tag).detach(); }),
                                  target.shared());
        },
        "pool"_a, "source"_a, "tag"_a, R"(Takes a sequence that rank ``source`` sends with this tag: ``Transfer.take`` has it.

Raises:
    ArgumentError: no such rank (INVALID)
    StateError: the group is not ready, the pool is of another context (STATE)
    PeerError, StateError: it has ended, as ``health``
)");
}

// Transfers between ranks.
void bind_transfer(nb::module_& m) {
    nb::class_<TransferObject> transfer(
        m, "Transfer",
        R"(A transfer in the background: ``Sequence.send``, ``Group.receive``, ``Namespace.fetch``. It keeps the group. Sends and
fetches go on when the object goes. A receive whose sequence was not taken is cancelled then, and a sequence that comes all the same is
released.)");
    transfer.def_prop_ro(
        "ticket", [](const TransferObject& self) { return self.ticket; }, "Its number in the group.");
    transfer.def(
        "query",
        [](const TransferObject& self) {
            const ta::Transfer handle(self.group.get(), self.ticket);
            return unlocked([&] { return handle.query(); });
        },
        "How far it is. Raises StateError (STALE: finished more than 4096 tickets ago).");
    transfer.def(
        "wait", [](const TransferObject& self, std::optional<double> seconds) { return self.wait(seconds); },
        "seconds"_a = nb::none(),
        R"(Waits until it is finished, or so many seconds; ``state`` says which, and may be FAILED. Ctrl-C ends the wait.

Raises:
    StateError: finished more than 4096 tickets ago (STALE)
)");
    transfer.def(
        "cancel",
        [](const TransferObject& self) {
            const ta::Transfer handle(self.group.get(), self.ticket);
            unlocked([&] { handle.cancel(); });
        },
        R"(Asks for its end; it is finished when neither rank touches its blocks any more.

Raises:
    StateError: STALE
)");
    transfer.def(
        "take",
        [](TransferObject& self, std::optional<double> seconds) {
            if (!self.pool.get()) throw ta::Error(TA_E_STATE, "no receive, or its sequence was taken");
            const ta_transfer_info info = self.wait(seconds);
            if (!finished(info.state)) throw ta::Error(TA_E_TIMEOUT, "the transfer is not finished");
            if (info.state != TA_MOVE_DONE) {
                ta_error detail = ta::Error(info.status, info.reason).detail();
                detail.block = info.block;
                detail.rank = info.rank;
                throw ta::Error(detail);
            }
            if (!self.pool.get()) throw ta::Error(TA_E_STATE, "its sequence was taken");
            SequenceObject sequence(ta::Sequence(self.pool.get(), info.seq));
            self.pool = Handle<std::shared_ptr<ta_kv_pool>>(nullptr);
            return sequence;
        },
        "seconds"_a = nb::none(), R"(Waits for the sequence of a receive and hands it over, once. Ctrl-C ends the wait.

Raises:
    PeerError: it is not there after so many seconds (TIMEOUT), the group has ended
    Error: as the transfer failed
    StateError: no receive, or the sequence was taken (STATE); CANCELLED; STALE
)");
}

}  // namespace

void bind_group(nb::module_& m, nb::class_<ContextObject>& context) {
    bind_create_group(context, m);
    nb::class_<GroupObject> group(m, "Group",
                                  R"(One rank of a group: ``Context.create_group``. Any thread may call it. When the last
reference goes, or by ``close``, the rank leaves and the group ends everywhere; a transfer keeps it, too.)");
    bind_rank(group);
    bind_receives(group);
    bind_transfer(m);
}
