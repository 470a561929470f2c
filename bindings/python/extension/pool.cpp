// Pools, and moves of blocks between their tiers.
#include <algorithm>
#include <cstring>

#include "arguments.h"
#include "callbacks.h"
#include "objects.h"

namespace {

// One of an enumeration of Python: `wanted` is "a <name>".
int32_t choice(nb::handle options, const char* name, const char* wanted) {
    return to_integer<int32_t>(options.attr(name), name, wanted);
}
ta_switch switch_of(nb::handle options, const char* name) {
    return to_switch(options.attr(name), name);
}

std::vector<uint8_t> to_bits(nb::handle object) {
    if (object.is_none()) return {};
    const std::string bytes = to_bytes(object);
    return {bytes.begin(), bytes.end()};
}

// The elements of an array of numpy.
template <class T>
std::vector<T> to_numbers(nb::handle array) {
    const std::string bytes = to_bytes(array);
    std::vector<T> numbers(bytes.size() / sizeof(T));
    if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(T));
    return numbers;
}

ta::Numerics to_numerics(nb::handle o, std::vector<float>& k_offset) {
    if (o.is_none()) return {};
    const nb::object offset = o.attr("k_offset");
    if (!offset.is_none()) k_offset = to_numbers<float>(package("numpy", "ascontiguousarray")(offset, nb::str("float32")));
    return {.profile = choice(o, "profile", "a Profile"),
            .k_granularity = choice(o, "k_granularity", "a Granularity"),
            .v_granularity = choice(o, "v_granularity", "a Granularity"),
            .open_scale = choice(o, "open_scale", "an OpenScale"),
            .v_exponents = switch_of(o, "v_exponents"),
            .fractional_zero = switch_of(o, "fractional_zero"),
            .v_search = switch_of(o, "v_search"),
            .hadamard = switch_of(o, "hadamard"),
            .sink_blocks = field<int32_t>(o, "sink_blocks"),
            .exp = choice(o, "exp", "an Exp"),
            .p = choice(o, "p", "a P"),
            .nonfinite = choice(o, "nonfinite", "a NonFinite"),
            .hadamard_seed = field<uint64_t>(o, "hadamard_seed"),
            .k_offset = k_offset,
            .k_turning = switch_of(o, "k_turning"),
            .k_search = switch_of(o, "k_search"),
            .unit_slope = switch_of(o, "unit_slope"),
            .q_bits = field<uint32_t>(o, "q_bits"),
            .batch_invariant = switch_of(o, "batch_invariant")};
}

std::optional<ta::Rotary> to_rotary(nb::handle o, std::vector<double>& angles) {
    if (o.is_none()) return std::nullopt;
    const nb::object array = package("numpy", "ascontiguousarray")(o.attr("angles"), nb::str("float64"));
    angles = to_numbers<double>(array);
    auto channels = field<uint32_t>(o, "channels");
    if (channels == 0) channels = 2 * nb::cast<uint32_t>(array.attr("shape")[-1]);
    return ta::Rotary{.pairs = choice(o, "pairs", "a RotaryPairs"), .channels = channels, .angles = angles};
}

// What the options point to.
struct TierPointers {
    std::optional<std::string> folder, path;
    std::optional<ta::Context> peer;
};
// `to.peer` is there.
ta::TierOptions to_tiers(nb::handle o, TierPointers& to) {
    to.folder = to_path(o.attr("disk_folder"));
    to.path = to_path(o.attr("disk_path"));
    return {.host_node = field<uint32_t>(o, "host_node"),
            .host_bytes = field<uint64_t>(o, "host_bytes"),
            .disk_bytes = field<uint64_t>(o, "disk_bytes"),
            .disk_folder = to.folder ? to.folder->c_str() : nullptr,
            .high_percent = field<int32_t>(o, "high_percent"),
            .low_percent = field<int32_t>(o, "low_percent"),
            .eviction = choice(o, "eviction", "an Eviction"),
            .disk_path = to.path ? to.path->c_str() : nullptr,
            .drop_coldest = switch_of(o, "drop_coldest"),
            .begin_wait_ms = field<int32_t>(o, "begin_wait_ms"),
            .staging = choice(o, "staging", "a Staging"),
            .falling_precision = switch_of(o, "falling_precision"),
            .tuning = reinterpret_cast<const struct ta_x_tier_tuning*>(field<uintptr_t>(o, "tuning")),
            .peer = to.peer ? to.peer->get() : nullptr,
            .peer_bytes = field<uint64_t>(o, "peer_bytes")};
}

PoolObject create_pool(const ContextObject& self, nb::handle layers, nb::handle kv_heads, nb::handle head_dim,
                       nb::handle budget_bytes, nb::handle bits, nb::handle k_bits, nb::handle v_bits, nb::handle max_sequences,
                       nb::handle numerics, nb::handle tiers, nb::handle v_head_dim, nb::iterable layer_groups,
                       nb::handle rotary) {
    const auto context = self.handle.get();
    const auto k_map = to_bits(k_bits), v_map = to_bits(v_bits);
    std::vector<float> k_offset;
    std::vector<double> angles;
    TierPointers pointers;
    const std::vector<ta::LayerGroup> groups = to_layer_groups(layer_groups);
    ta::PoolOptions options{.layers = to_integer<uint32_t>(layers, "layers"),
                            .kv_heads = to_integer<uint32_t>(kv_heads, "kv_heads"),
                            .head_dim = to_integer<uint32_t>(head_dim, "head_dim"),
                            .bits = to_integer<uint32_t>(bits, "bits"),
                            .k_bits = k_map,
                            .v_bits = v_map,
                            .budget_bytes = to_integer<uint64_t>(budget_bytes, "budget_bytes"),
                            .max_sequences = to_integer<uint32_t>(max_sequences, "max_sequences"),
                            .numerics = to_numerics(numerics, k_offset),
                            .v_head_dim = to_integer<uint32_t>(v_head_dim, "v_head_dim"),
                            .layer_groups = groups,
                            .rotary = to_rotary(rotary, angles)};
    nb::object peer = nb::none();
    if (!tiers.is_none()) {
        peer = tiers.attr("peer");
        if (!peer.is_none() && !nb::isinstance<ContextObject>(peer)) wrong_type("peer", "a Context", peer);
        if (!peer.is_none()) pointers.peer = nb::cast<const ContextObject&>(peer).handle.get();
        options.tiers = to_tiers(tiers, pointers);
    }
    return {{unlocked([&] { return context.create_pool(options); }), "the pool"}, self.cuda, std::move(peer)};
}

ta_fit fit(const PoolObject& self, nb::handle sequences, nb::handle n_new) {
    const auto pool = self.handle.get();
    std::vector<ta_seq> ids;
    const auto add = [&](nb::handle object) {
        if (object.is_none()) return ids.push_back(0);
        if (!nb::isinstance<SequenceObject>(object))
            throw nb::type_error("sequences is a Sequence, or an iterable of them and of None");
        const auto sequence = nb::inst_ptr<SequenceObject>(object)->handle.get();
        if (sequence->pool() != pool.shared()) throw ta::Error(TA_E_INVALID, "a sequence is of another pool");
        ids.push_back(sequence->id());
    };
    if (sequences.is_none() || nb::isinstance<SequenceObject>(sequences)) {
        add(sequences);
    } else {
        for (nb::handle object : sequences) add(object);
    }
    const auto tokens = to_counts(n_new, ids.size(), "n_new");
    return unlocked([&] { return pool.fit(ids, tokens); });
}

std::shared_ptr<const std::vector<int64_t>> v_head_dims(const ta::Pool& pool) {
    const ta_kv_pool_description d = pool.describe();
    std::vector<int64_t> channels(d.layers, d.v_head_dim);
    for (const ta_layer_group& g : ta::layer_groups_of(d)) {
        const uint32_t own = g.v_head_dim ? g.v_head_dim : g.head_dim;
        if (own != 0) std::fill_n(channels.begin() + g.first, g.layers, own);
    }
    return std::make_shared<const std::vector<int64_t>>(std::move(channels));
}

// ``Context.create_pool``.
void bind_create_pool(nb::class_<ContextObject>& context) {
    context.def(
        "create_pool", &create_pool, nb::kw_only(), "layers"_a, "kv_heads"_a, "head_dim"_a, "budget_bytes"_a, "bits"_a = 4,
        "k_bits"_a = nb::none(), "v_bits"_a = nb::none(), "max_sequences"_a = 0, "numerics"_a = nb::none(),
        "tiers"_a = nb::none(), "v_head_dim"_a = 0, "layer_groups"_a = nb::tuple(), "rotary"_a = nb::none(),
        nb::sig("def create_pool(self, *, layers: int, kv_heads: int, head_dim: int, budget_bytes: int, bits: int = 4, k_bits: "
                "Buffer | None = None, v_bits: Buffer | None = None, max_sequences: int = 0, numerics: "
                "Numerics | None = None, tiers: Tiers | None = None, v_head_dim: int = 0, layer_groups: "
                "Iterable[LayerGroup] = (), rotary: Rotary | None = None) -> Pool"),
        R"(A pool of compressed keys and values.

Args:
    layers: 1..4096
    kv_heads: 1..1024
    head_dim: channels of Q and K: 16..256, a multiple of 8
    budget_bytes: of the device tier: blocks, metadata included
    bits: 8, 4 or 2 for every head; ignored where k_bits and v_bits are given
    k_bits, v_bits: uint8 [layers, kv_heads], each 8, 4 or 2; where layers have shapes of their own: one axis, the layers one after
        the other
    max_sequences: 0: 65536
    numerics: None: profile ``ACCURATE``
    tiers: memory below the device tier; None: there is none
    v_head_dim: channels of V and of the output, as head_dim; 0: head_dim
    layer_groups: ranges of distinct layers with a window, whose pages are given back when it has passed them, or with a shape of
        their own
    rotary: the rotary embedding of the model; None: its sequences cannot be shifted

Raises:
    ArgumentError: a value outside its range (INVALID, SHAPE), or that cannot be served (UNSUPPORTED)
    ExhaustedError: MEMORY, TIER_FULL (no space for the tiers' files), LIMIT
    StateError: another pool has the file at ``disk_path`` (BUSY)
    FileError, DataError: of that file
)");
}

// The end of a pool, and the objects that are created in it.
void bind_parts(nb::class_<PoolObject>& pool) {
    pool.def_prop_ro(
        "address", [](const PoolObject& self) { return reinterpret_cast<uintptr_t>(self.handle.get().get()); },
        "Address of the C handle, for calls of the C header; valid as long as the object is.");
    pool.def(
        "close",
        [](PoolObject& self) {
            unless_gone([&] {
                const auto pool = self.handle.get();
                unlocked([&] { pool.close(); });
                self.handle.close();
            });
        },
        "Releases every sequence and drops what is published. Later calls on it, its sequences and plans, but for ``close``, "
        "raise "
        "StateError (CLOSED).");
    add_context_manager(pool);
    pool.def(
        "create_plan",
        [](const PoolObject& self) {
            const auto pool = self.handle.get();
            auto [plan, channels] = unlocked([&] { return std::pair{pool.create_plan(), v_head_dims(pool)}; });
            return PlanObject{{std::move(plan), "the plan"}, pool.shared(), {self.cuda, nullptr}, std::move(channels)};
        },
        R"(A plan, which makes steps of batches.

Raises:
    StateError: the pool was closed (CLOSED)
    ExhaustedError: MEMORY
)");
    pool.def(
        "create_sequence",
        [](const PoolObject& self) {
            const auto pool = self.handle.get();
            return SequenceObject(unlocked([&] { return pool.create_sequence(); }));
        },
        R"(An empty sequence.

Raises:
    ExhaustedError: max_sequences (LIMIT)
)");
    pool.def(
        "create_namespace",
        [](const PoolObject& self, nb::handle salt, uint64_t quota_bytes) {
            const auto pool = self.handle.get();
            ta::NamespaceOptions options{.quota_bytes = quota_bytes};
            const std::string bytes = to_bytes(salt);
            if (bytes.size() != options.salt.size()) throw ta::Error(TA_E_INVALID, "salt has 32 bytes");
            std::memcpy(options.salt.data(), bytes.data(), bytes.size());
            return NamespaceObject{unlocked([&] { return pool.create_namespace(options); })};
        },
        "salt"_a, "quota_bytes"_a = 0,
        nb::sig("def create_namespace(self, salt: Buffer | bytes, quota_bytes: int = 0) -> Namespace"),
        R"(A namespace for published prefixes. It ends by ``Namespace.destroy`` or with the pool.

Args:
    salt: 32 secret random bytes; the same ones find published blocks again in a later process
    quota_bytes: of its published blocks, wherever they are; 0: no limit

Raises:
    ArgumentError: no salt, or the pool has a namespace with this one (INVALID)
    ExhaustedError: 65536 namespaces (LIMIT)
)");
}

// Calls that read one sequence from a file or from bytes.
void bind_sequence_files(nb::class_<PoolObject>& pool) {
    pool.def(
        "load_sequence",
        [](const PoolObject& self, nb::handle path, nb::object progress) {
            const auto pool = self.handle.get();
            const auto file = to_path(path);
            if (!file) throw nb::type_error("path is None");
            const auto report = to_progress(progress);
            return SequenceObject(unlocked([&] { return pool.load_sequence(file->c_str(), report); }));
        },
        "path"_a, "progress"_a = nb::none(),
        nb::sig("def load_sequence(self, path: str | os.PathLike[str], progress: typing.Callable[[int, int], object] | None = "
                "None) -> "
                "Sequence"),
        R"(Makes a sequence of a file of ``Sequence.save``, all of it or nothing.

Args:
    progress: called as ``progress(done, total)`` in bytes; False stops the call, which raises StateError (CANCELLED). It must not
        call this pool

Raises:
    ArgumentError: a file of another pool, no regular file (INVALID), another version of the format (UNSUPPORTED)
    DataError: CORRUPT; ``block`` says where
    FileError: IO; of a symbolic link, too
    ExhaustedError: TIER_FULL, LIMIT, MEMORY
    StateError: CANCELLED
)");
    pool.def(
        "import_sequence",
        [](const PoolObject& self, nb::handle data) {
            const auto pool = self.handle.get();
            const Buffer buffer(data);
            return SequenceObject(unlocked([&] { return pool.import_sequence(buffer.bytes()); }));
        },
        "data"_a, nb::sig("def import_sequence(self, data: Buffer | bytes) -> Sequence"),
        R"(Makes a sequence of the bytes of ``Sequence.export``, or of a file of ``Sequence.save`` that is in memory.

Args:
    data: [bytes], contiguous; read before the call returns, without the GIL

Raises:
    ArgumentError: bytes of another pool (INVALID), another version of the format (UNSUPPORTED)
    DataError: CORRUPT; ``block`` says where
    ExhaustedError: TIER_FULL, LIMIT, MEMORY
    FileError: a block that makes room cannot be written to disk (IO)
    BufferError, ValueError: not contiguous
)");
}

// Calls that write and read all sequences.
void bind_pool_files(nb::class_<PoolObject>& pool) {
    pool.def(
        "save",
        [](const PoolObject& self, nb::handle path, int32_t flags, nb::object progress) {
            const auto pool = self.handle.get();
            const auto file = to_path(path);
            if (!file) throw nb::type_error("path is None");
            const auto report = to_progress(progress);
            unlocked([&] { pool.save(file->c_str(), flags, report); });
        },
        "path"_a, "flags"_a = 0, "progress"_a = nb::none(),
        nb::sig("def save(self, path: str | os.PathLike[str], flags: SaveFlags = SaveFlags(0), progress: typing.Callable[[int, "
                "int], "
                "object] | None = None) -> None"),
        R"(Writes all sequences to a new file; blocks that several share are written once.

Args:
    flags: ``SaveFlags.PUBLISHED``: what is published, too
    progress: as for ``load_sequence``

Raises:
    ArgumentError: the file exists (INVALID)
    StateError: a sequence is in an open step (BUSY), a block was dropped (STATE), CANCELLED
    FileError, DataError: IO, CORRUPT
    ExhaustedError: no space (TIER_FULL), an index of more than 4 GiB (LIMIT)
)");
    pool.def(
        "load",
        [](const PoolObject& self, nb::handle path, nb::object progress) {
            const auto pool = self.handle.get();
            const auto file = to_path(path);
            if (!file) throw nb::type_error("path is None");
            const auto report = to_progress(progress);
            auto loaded = unlocked([&] { return pool.load(file->c_str(), report); });
            nb::dict sequences;
            for (auto& one : loaded) sequences[nb::cast(one.saved)] = nb::cast(SequenceObject(std::move(one.sequence)));
            return sequences;
        },
        "path"_a, "progress"_a = nb::none(),
        nb::sig("def load(self, path: str | os.PathLike[str], progress: typing.Callable[[int, int], object] | None = None) -> "
                "dict[int, "
                "Sequence]"),
        R"(Adds the sequences of a file of ``save``, all or nothing; they share blocks as they did.

Returns:
    the new sequences by the ids that they had when they were saved

Raises:
    as ``load_sequence``
)");
}

// Settings and statistics.
void bind_numbers(nb::class_<PoolObject>& pool) {
    pool.def(
        "stats",
        [](const PoolObject& self) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.stats(); });
        },
        "What the pool holds.");
    pool.def(
        "fit", &fit, "sequences"_a.none(), "n_new"_a,
        nb::sig("def fit(self, sequences: Sequence | typing.Iterable[Sequence | None] | None, n_new: int | "
                "typing.Iterable[int]) -> Fit"),
        R"(Whether a step with these sequences and new tokens would find room, as things are. Takes nothing: ``Sequence.reserve``
does.

Args:
    sequences: distinct sequences, which may be in steps; None: a new one, which is empty
    n_new: new tokens of each, or one number for all

Raises:
    ArgumentError: INVALID
    StateError: STALE
    ExhaustedError: more tokens than a sequence can have (LIMIT)
)");
    pool.def("describe", &describe, nb::sig("def describe(self) -> PoolDescription"),
             "Shape, settings as in effect, block sizes.");
    pool.def(
        "tier_stats",
        [](const PoolObject& self, int32_t tier) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.tier_stats(tier); });
        },
        "tier"_a, nb::sig("def tier_stats(self, tier: Tier) -> TierStats"), R"(One tier.

Raises:
    ArgumentError: the pool has no such tier (UNSUPPORTED)
)");
    pool.def(
        "memory",
        [](const PoolObject& self, int32_t tier) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.memory(tier); });
        },
        "tier"_a, nb::sig("def memory(self, tier: Tier) -> MemoryRange"),
        R"(Where a tier's memory is, for a transfer library to register. It stays there until the pool ends.

Args:
    tier: ``Tier.PEER``, ``Tier.HOST`` or, on a GPU, ``Tier.DEVICE``

Raises:
    ArgumentError: the pool has no such tier, the disk tier, the device tier on a CPU (UNSUPPORTED)
)");
    pool.def(
        "move_stats",
        [](const PoolObject& self) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.move_stats(); });
        },
        "What moved between the tiers and why.");
}

// Calls for event loops and scrapers.
void bind_watching(nb::class_<PoolObject>& pool) {
    pool.def(
        "descriptor",
        [](const PoolObject& self) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.descriptor(); });
        },
        R"(A descriptor for ``select`` and ``asyncio``'s ``add_reader``: it can be read while ``take_finished_moves`` has tickets. It
belongs to the pool.

Raises:
    ArgumentError: the pool has no tier below the device (UNSUPPORTED)
    ExhaustedError: no more descriptors (LIMIT)
)");
    pool.def(
        "take_finished_moves",
        [](const PoolObject& self, size_t most) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.take_finished_moves(most); });
        },
        "most"_a = 256,
        R"(Tickets (``Move.ticket``) that are finished, each once, from the first ``descriptor`` on; fewer than ``most``: there are no more
now.

Raises:
    ArgumentError: UNSUPPORTED
    StateError: nobody has asked for the descriptor (STATE)
)");
    pool.def(
        "metrics",
        [](const PoolObject& self, int32_t format) {
            const auto pool = self.handle.get();
            return unlocked([&] { return pool.metrics(format); });
        },
        "format"_a = int32_t{TA_METRICS_OPENMETRICS},
        nb::sig("def metrics(self, format: MetricsFormat = turboattention._enums.MetricsFormat.OPENMETRICS) -> str"),
        R"(All statistics as text for a scraper, or as a JSON object.

Raises:
    ArgumentError: no such format (INVALID)
)");
}

// Moves of blocks between tiers.
void bind_move(nb::module_& m) {
    nb::class_<MoveObject> move(m, "Move",
                                "Moves of blocks that go on in the background: ``Sequence.move``, ``prefetch``, ``suspend``.");
    move.def_prop_ro(
        "ticket", [](const MoveObject& self) { return self.handle.get().ticket(); }, "The number of these moves in the pool.");
    move.def(
        "query",
        [](const MoveObject& self) {
            const ta::Move handle = self.handle.get();
            return unlocked([&] { return handle.query(); });
        },
        R"(How far they are.

Raises:
    StateError: finished more than 4096 tickets ago (STALE)
)");
    move.def(
        "wait",
        [](const MoveObject& self, std::optional<double> seconds) {
            const ta::Move handle = self.handle.get();
            ta_move_info info;
            wait_for(seconds, [&](std::chrono::nanoseconds slice) { return finished((info = handle.wait(slice)).state); });
            return info;
        },
        "seconds"_a = nb::none(),
        R"(Waits until they are finished, or so many seconds; ``state`` says which. Ctrl-C ends the wait.

Raises:
    StateError: STALE
)");
    move.def(
        "cancel",
        [](const MoveObject& self) {
            const ta::Move handle = self.handle.get();
            unlocked([&] { handle.cancel(); });
        },
        R"(Blocks that have not moved yet stay where they are.

Raises:
    StateError: STALE
)");
}

}  // namespace

void bind_pool(nb::module_& m, nb::class_<ContextObject>& context) {
    bind_create_pool(context);
    nb::class_<PoolObject> pool(m, "Pool",
                                "Compressed keys and values of sequences: ``Context.create_pool``. Any thread may call it.");
    bind_parts(pool);
    bind_sequence_files(pool);
    bind_pool_files(pool);
    bind_numbers(pool);
    bind_watching(pool);
    bind_move(m);
}
