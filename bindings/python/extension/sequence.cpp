// Sequences.
#include "arguments.h"
#include "callbacks.h"
#include "objects.h"

namespace {

// Calls that end or copy a sequence, and its length.
void bind_life(nb::class_<SequenceObject>& sequence) {
    sequence.def_prop_ro(
        "id", [](const SequenceObject& self) { return self.handle.get()->id(); }, "Its number in the pool.");
    sequence.def(
        "release",
        [](SequenceObject& self) {
            const auto sequence = self.handle.get();
            self.handle.close();
            call([&](ta_error* e) { return ta_seq_release(sequence->pool().get(), sequence->id(), e); });
        },
        R"(Ends it; later calls raise StateError (CLOSED).

Raises:
    StateError: it has moved to another rank (STALE)
)");
    add_context_manager(sequence.def(
        "close", [](nb::handle self) { unless_gone([&] { self.attr("release")(); }); },
        "As ``release``; nothing where the sequence has ended."));
    const auto length = [](const SequenceObject& self) {
        const auto sequence = self.handle.get();
        return unlocked([&] { return sequence->length(); });
    };
    sequence.def("__len__", length);
    sequence.def("length", length, "Tokens; those of an open step are not counted. Raises StateError (STALE).");
    sequence.def("__bool__", [](const SequenceObject&) { return true; });
    sequence.def(
        "fork",
        [](const SequenceObject& self) {
            const auto sequence = self.handle.get();
            return SequenceObject(unlocked([&] { return sequence->fork(); }));
        },
        R"(A sequence with the same tokens, which shares the blocks until one of the two writes to them.

Raises:
    StateError: BUSY, STALE
    ExhaustedError: max_sequences (LIMIT)
)");
}

// Calls that take tokens away.
void bind_tokens(nb::class_<SequenceObject>& sequence) {
    sequence.def(
        "truncate",
        [](const SequenceObject& self, int64_t length) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->truncate(length); });
        },
        "length"_a, R"(Drops all tokens from ``length`` on.

Raises:
    ArgumentError: length is negative or above the present one (INVALID), a partitioned sequence with universal open scales
        (UNSUPPORTED but for 0)
    StateError: BUSY, STALE, STATE (inside a block that was dropped; windows have passed what the tokens behind it need)
)");
    sequence.def(
        "forget",
        [](const SequenceObject& self, int64_t first, int64_t n) {
            const auto sequence = self.handle.get();
            return unlocked([&] { return sequence->forget(first, n); });
        },
        "first"_a, "n"_a,
        R"(Forgets the tokens of the blocks that are wholly in tokens [first, first + n). Positions and the length stay, attention
passes over these tokens, and blocks that nobody else has are freed. Tokens of a block that is only in part in the range stay, as do
those of the last block until it is full. Later calls that would need such a block raise StateError (STATE): a save, an export, a
publish, a transfer, a truncate to inside of it.

Returns:
    how many tokens were forgotten now

Raises:
    ArgumentError: tokens beyond the sequence (INVALID)
    StateError: BUSY, STALE
    ExhaustedError: MEMORY
)");
    sequence.def(
        "shift",
        [](const SequenceObject& self, int64_t first, int64_t n) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->shift(first, n); });
        },
        "first"_a, "n"_a,
        R"(Context shift: forgets tokens [first, first + n), as ``forget`` does, and closes the gap: attention sees the tokens before
it n positions later. The length stays, and a new token has the position that it says, in Q and in K. Stored keys are not changed.
docs/shift.md is the guide. Later steps with a query before the gap or in it raise StateError (STATE).

Args:
    first, n: tokens, multiples of 64

Raises:
    ArgumentError: no multiples of 64, tokens beyond the sequence (INVALID), a pool without ``rotary``, or with windows,
        ``Numerics.batch_invariant`` or ``Eviction.ATTENTION``, a partitioned sequence (UNSUPPORTED)
    StateError: BUSY, STALE
    ExhaustedError: MEMORY
)");
}

// How much of the device tier a sequence may claim, and how long it keeps it.
void bind_room(nb::class_<SequenceObject>& sequence) {
    sequence.def(
        "reserve",
        [](const SequenceObject& self, int64_t tokens, int32_t wait_ms) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->reserve(tokens, wait_ms); });
        },
        "tokens"_a, "wait_ms"_a = 0,
        R"(Promises room in the device tier for its next tokens: steps that bring no more, of any size, do not wait for room or fail for
lack of it. The promise ends with the sequence, with ``suspend``, or with the next call, which replaces it. A fork has none.

Args:
    tokens: 0 ends the promise
    wait_ms: how long it may wait for room, in milliseconds; 0: as a step does (``Tiers.begin_wait_ms``); -1: not at all

Raises:
    ArgumentError: INVALID
    ExhaustedError: TIER_FULL (``bytes`` are lacking; the former promise holds), MEMORY, LIMIT (2^40 tokens)
    StateError: BUSY, STALE
    FileError, DataError: of blocks on disk (IO, CORRUPT)
)");
    sequence.def(
        "set_priority",
        [](const SequenceObject& self, int32_t priority) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->set_priority(priority); });
        },
        "priority"_a, R"(The lower, the earlier its blocks leave a full tier under ``Eviction.PRIORITY``; 0 at first.

Raises:
    StateError: STALE
)");
}

// Calls that check, write or publish the stored blocks.
void bind_contents(nb::class_<SequenceObject>& sequence) {
    sequence.def(
        "verify",
        [](const SequenceObject& self) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->verify(); });
        },
        R"(Recomputes the hash of every full page.

Raises:
    DataError: CORRUPT; ``block`` and ``layer`` name the first bad page
    FileError: a block on disk cannot be read (IO)
    StateError: BUSY, STALE
)");
    sequence.def(
        "save",
        [](const SequenceObject& self, nb::handle path, nb::object progress) {
            const auto sequence = self.handle.get();
            const auto file = to_path(path);
            if (!file) throw nb::type_error("path is None");
            const auto report = to_progress(progress);
            unlocked([&] { sequence->save(file->c_str(), report); });
        },
        "path"_a, "progress"_a = nb::none(),
        nb::sig("def save(self, path: str | os.PathLike[str], progress: typing.Callable[[int, int], object] | None = None) -> "
                "None"),
        R"(Writes it to a new file of mode 0600, complete and synced before there is a file of this name.

Args:
    progress: called as ``progress(done, total)`` in bytes; False stops the call, which raises StateError (CANCELLED). It must not
        call this pool

Raises:
    ArgumentError: the file exists (INVALID)
    FileError, DataError, ExhaustedError: IO, CORRUPT, TIER_FULL (no space)
    StateError: CANCELLED, BUSY, STALE, STATE (blocks were dropped)
)");
    sequence.def(
        "export",
        [](const SequenceObject& self) {
            const auto sequence = self.handle.get();
            std::vector<uint8_t> all;
            unlocked([&] { sequence->export_to(to_sink(all)); });
            return nb::bytes(all.data(), all.size());
        },
        R"(The bytes of the file that ``save`` would write, for programs that carry sequences by means of their own.
``Pool.import_sequence`` takes them.

Raises:
    DataError: CORRUPT; ``block`` says where
    FileError: a block on disk cannot be read (IO)
    StateError: BUSY, STALE, STATE (blocks were dropped)
)");
    sequence.def(
        "publish",
        [](const SequenceObject& self, const NamespaceObject& space, nb::handle keys) {
            const auto sequence = self.handle.get();
            const auto list = to_keys(keys);
            const ta::Namespace handle = space.handle.get();
            unlocked([&] { sequence->publish(handle, list); });
        },
        "space"_a, "keys"_a, nb::sig("def publish(self, space: Namespace, keys: Keys) -> None"),
        R"(Publishes its first blocks, one for each key; they outlive the sequence.

Raises:
    ArgumentError: more keys than full blocks, another namespace's blocks, a namespace of another pool (INVALID)
    StateError: BUSY, STALE, STATE (a block was dropped)
    ExhaustedError: the quota (LIMIT)
    DataError: CORRUPT, on a GPU of earlier tokens NONFINITE
)");
}

// Calls that move blocks between tiers or keep them in one.
void bind_tiers(nb::class_<SequenceObject>& sequence) {
    sequence.def(
        "move",
        [](const SequenceObject& self, int32_t tier, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            return MoveObject{unlocked([&] { return sequence->move(tier, first, n); })};
        },
        "tier"_a, "first"_a, "n"_a, nb::sig("def move(self, tier: Tier, first: int, n: int) -> Move"),
        R"(Asks for blocks [first, first + n) to be in a tier.

Raises:
    ArgumentError: blocks beyond the sequence (INVALID), no such tier (UNSUPPORTED)
    StateError: BUSY, STALE
)");
    sequence.def(
        "prefetch",
        [](const SequenceObject& self, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            return MoveObject{unlocked([&] { return sequence->prefetch(first, n); })};
        },
        "first"_a, "n"_a, "Asks for blocks [first, first + n) to be in the device tier, as many as fit. Raises as ``move``.");
    sequence.def(
        "suspend",
        [](const SequenceObject& self, int32_t tier) {
            const auto sequence = self.handle.get();
            return MoveObject{unlocked([&] { return sequence->suspend(tier); })};
        },
        "tier"_a, nb::sig("def suspend(self, tier: Tier) -> Move"),
        R"(Asks for all its blocks, the open one too, to be in a tier below the device, so that it has no bytes there. The next step
brings back what it needs. Pinned blocks stay, and so do blocks that sequences in open steps or with reservations have, too.

Raises:
    ArgumentError: ``Tier.DEVICE`` (INVALID), no such tier (UNSUPPORTED)
    StateError: BUSY, STALE
)");
    sequence.def(
        "pin",
        [](const SequenceObject& self, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->pin(first, n); });
        },
        "first"_a, "n"_a, R"(Keeps blocks [first, first + n) from leaving their tier for a slower one. Pins are counted.

Raises:
    ArgumentError: blocks beyond the sequence (INVALID)
    StateError: a block is not full (STATE), BUSY, STALE
)");
    sequence.def(
        "unpin",
        [](const SequenceObject& self, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->unpin(first, n); });
        },
        "first"_a, "n"_a, "Takes a pin of each block away. Raises as ``pin``; STATE: a block is not pinned.");
}

// The priority of blocks, and reports about them.
void bind_blocks(nb::class_<SequenceObject>& sequence) {
    sequence.def(
        "retain",
        [](const SequenceObject& self, uint64_t first, uint64_t n, uint32_t priority, int64_t duration_ms) {
            const auto sequence = self.handle.get();
            unlocked([&] { sequence->retain(first, n, ta::Retention{.priority = priority, .duration_ms = duration_ms}); });
        },
        "first"_a, "n"_a, nb::kw_only(), "priority"_a = 0, "duration_ms"_a = 0,
        R"(Gives full blocks [first, first + n) a priority. A block has it in all sequences that share it, and as a published one. It is
not saved.

Args:
    priority: 1..63: blocks of a lower one are demoted, evicted and dropped before all others, among equals ``Tiers.eviction`` decides;
        0: 32, which all blocks have at first
    duration_ms: after which the blocks have priority 32 again, in milliseconds, up to 2^53; 0: for ever

Raises:
    ArgumentError: blocks beyond the sequence, a value outside its range (INVALID)
    StateError: a block is not full (STATE), BUSY, STALE
)");
    sequence.def(
        "describe_blocks",
        [](const SequenceObject& self, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            return to_list(unlocked([&] { return sequence->describe_blocks(first, n); }));
        },
        "first"_a, "n"_a, nb::sig("def describe_blocks(self, first: int, n: int) -> list[BlockInfo]"),
        R"(What blocks [first, first + n) are now.

Raises:
    ArgumentError: blocks beyond the sequence (INVALID)
    StateError: BUSY, STALE
)");
    sequence.def(
        "locate_blocks",
        [](const SequenceObject& self, uint64_t first, uint64_t n) {
            const auto sequence = self.handle.get();
            nb::list places;
            for (const void* place : unlocked([&] { return sequence->locate_blocks(first, n); }))
                places.append(place ? nb::object(nb::int_(reinterpret_cast<uintptr_t>(place))) : nb::none());
            return places;
        },
        "first"_a, "n"_a, nb::sig("def locate_blocks(self, first: int, n: int) -> list[int | None]"),
        R"(Where blocks [first, first + n) lie, to be read alone. Pin them before: others may leave at any time.

Returns:
    an address for each; None: in no memory (on disk, dropped, another rank's)

Raises:
    ArgumentError: blocks beyond the sequence (INVALID)
    StateError: BUSY, STALE
)");
    sequence.def(
        "residency",
        [](const SequenceObject& self) {
            const auto sequence = self.handle.get();
            return unlocked([&] { return sequence->residency(); });
        },
        "Where its blocks are. Raises StateError (BUSY, STALE).");
}

// Calls that give a sequence to other ranks of a group.
void bind_ranks(nb::class_<SequenceObject>& sequence) {
    sequence.def(
        "send",
        [](const SequenceObject& self, const GroupObject& group, uint32_t to, uint64_t tag, int32_t mode) {
            const auto sequence = self.handle.get();
            const auto ranks = group.handle.get();
            return TransferObject(ranks.shared(), unlocked([&] { return sequence->send(ranks, to, tag, mode).ticket(); }));
        },
        "group"_a, "to"_a, "tag"_a, "mode"_a = int32_t{TA_SEND_COPY},
        nb::sig("def send(self, group: Group, to: int, tag: int, mode: SendMode = turboattention._enums.SendMode.COPY) -> "
                "Transfer"),
        R"(Offers it to another rank, where ``Group.receive`` with the same tag takes it. One that has moved is gone here: later calls
raise StateError (STALE).

Raises:
    ArgumentError: no such rank (INVALID)
    StateError: the group is not ready, a block was dropped, the pool is of another context (STATE), BUSY, STALE
    PeerError, StateError: the group has ended, as ``Group.health``
    DataError: of a move on a GPU, earlier tokens are not finite (NONFINITE)
)");
    sequence.def(
        "partition",
        [](const SequenceObject& self, const GroupObject& group, int32_t output, uint32_t first_rank, uint32_t output_rank,
           uint64_t tag) {
            const auto sequence = self.handle.get();
            const auto ranks = group.handle.get();
            const ta::PartitionOptions options{
                .output = output, .first_rank = first_rank, .output_rank = output_rank, .tag = tag};
            unlocked([&] { sequence->partition(ranks, options); });
        },
        "group"_a, nb::kw_only(), "output"_a = 0, "first_rank"_a = 0, "output_rank"_a = 0, "tag"_a = 0,
        nb::sig("def partition(self, group: Group, *, output: PartitionOutput = turboattention._enums.PartitionOutput.ALL, "
                "first_rank: int = 0, output_rank: "
                "int = 0, tag: int = 0) -> None"),
        R"(Spreads it over the ranks of a group, which all make this call on a sequence of the same length with the same options, and
the same steps from then on; docs/sharing.md is the guide.

Raises:
    ArgumentError: an option outside its range, the tag of another sequence (INVALID); more than 64 ranks, a shifted sequence,
        ``Numerics.batch_invariant`` (UNSUPPORTED)
    StateError: the group is not ready, it is partitioned already, its universal scales are not known (STATE), BUSY, STALE
    PeerError, StateError: the group has ended, as ``Group.health``

Steps with it and ``Step.attend`` also raise PeerError (MISMATCH, TIMEOUT, PEER_LOST) or StateError (CANCELLED): abort the step at all
ranks then.
)");
}

}  // namespace

void bind_sequence(nb::module_& m) {
    nb::class_<SequenceObject> sequence(m, "Sequence", R"(A sequence of tokens in a pool: ``Pool.create_sequence``.

It is released when the object goes, or by ``release``; a step that it is in goes on. Any thread may call it. While it is in an open
step, calls that would change or copy it raise StateError (BUSY). Blocks are 64 tokens.)");
    bind_life(sequence);
    bind_tokens(sequence);
    bind_room(sequence);
    bind_contents(sequence);
    bind_tiers(sequence);
    bind_blocks(sequence);
    bind_ranks(sequence);
}
