// Namespaces of published prefixes.
#include "arguments.h"
#include "callbacks.h"
#include "objects.h"

namespace {

// The namespace as a whole.
void bind_life(nb::class_<NamespaceObject>& space) {
    space.def(
        "destroy",
        [](const NamespaceObject& self) {
            const ta::Namespace handle = self.handle.get();
            unlocked([&] { handle.destroy(); });
        },
        "Drops its entries; sequences that have the blocks keep them. Raises StateError (STALE).");
    space.def(
        "stats",
        [](const NamespaceObject& self) {
            const ta::Namespace handle = self.handle.get();
            return unlocked([&] { return handle.stats(); });
        },
        "What is published. Raises StateError (STALE).");
    space.def(
        "flush",
        [](const NamespaceObject& self) {
            const ta::Namespace handle = self.handle.get();
            unlocked([&] { handle.flush(); });
        },
        R"(Writes what is published to the persistent disk tier, and waits until it survives a power failure.

Raises:
    ArgumentError: no such tier (UNSUPPORTED)
    StateError: STALE
    ExhaustedError, FileError, DataError: TIER_FULL, IO, CORRUPT
)");
}

// Published blocks by their keys, and events about them.
void bind_keys(nb::class_<NamespaceObject>& space) {
    space.def(
        "match",
        [](const NamespaceObject& self, nb::handle keys) {
            const ta::Namespace handle = self.handle.get();
            const auto list = to_keys(keys);
            auto match = unlocked([&] { return handle.match(list); });
            return nb::make_tuple(nb::cast(SequenceObject(std::move(match.sequence))), match.length);
        },
        "keys"_a, nb::sig("def match(self, keys: Keys) -> tuple[Sequence, int]"),
        R"(A new sequence that begins with the blocks of the first keys, as many as are published without a gap, maybe none.

Returns:
    the sequence and its tokens

Raises:
    StateError: STALE
    ExhaustedError: max_sequences (LIMIT)
)");
    space.def(
        "hash_keys",
        [](const NamespaceObject& self, nb::handle keys) {
            const ta::Namespace handle = self.handle.get();
            const auto list = to_keys(keys);
            nb::list hashed;
            for (const ta::Key& key : unlocked([&] { return handle.hash_keys(list); }))
                hashed.append(nb::bytes(key.data(), key.size()));
            return hashed;
        },
        "keys"_a, nb::sig("def hash_keys(self, keys: Keys) -> list[bytes]"),
        "What stands for the keys in events. Raises StateError (STALE).");
    space.def(
        "take_events",
        [](const NamespaceObject& self, size_t most) {
            const ta::Namespace handle = self.handle.get();
            return to_list(unlocked([&] { return handle.take_events(most); }));
        },
        "most"_a = 256, nb::sig("def take_events(self, most: int = 256) -> list[PrefixEvent]"),
        "The oldest events, each once; fewer than ``most``: there are no more now. Raises StateError (STALE).");
}

// The store that also keeps what is published: which it is.
void bind_attaching(nb::class_<NamespaceObject>& space) {
    space.def(
        "attach_store",
        [](const NamespaceObject& self, nb::object store, int32_t timeout_ms, nb::handle write_through, nb::handle authenticate,
           uint64_t batch_bytes, uintptr_t address) {
            const ta::Namespace handle = self.handle.get();
            const ta::StoreOptions options{.timeout_ms = timeout_ms,
                                           .write_through = to_switch(write_through, "write_through"),
                                           .authenticate = to_switch(authenticate, "authenticate"),
                                           .batch_bytes = batch_bytes};
            if (store.is_none() == (address == 0)) throw ta::Error(TA_E_INVALID, "a store or the address of one is needed");
            if (address != 0) {
                const auto* set = reinterpret_cast<const ta_block_store*>(address);
                return unlocked([&] { handle.attach_store(*set, options); });
            }
            auto mapping = to_store(std::move(store), options.write_through != TA_OFF);
            unlocked([&] { handle.attach_store(std::move(mapping), options); });
        },
        "store"_a = nb::none(), nb::kw_only(), "timeout_ms"_a = 0, "write_through"_a = nb::none(),
        "authenticate"_a = nb::none(), "batch_bytes"_a = 0, "address"_a = 0,
        nb::sig("def attach_store(self, store: typing.Any = None, *, timeout_ms: int = 0, write_through: bool | None = None, "
                "authenticate: bool | None = None, batch_bytes: int = 0, address: int = 0) -> None"),
        R"(Keeps what is published in a store, too, from now on; ``load`` brings blocks from it.

Args:
    store: with the methods of a dict of bytes: ``get``, ``pop``, ``__contains__``, ``__setitem__``, which a thread of the library
        calls. What raises has failed, and is asked again after a pause; the exception goes to ``sys.unraisablehook``.
    timeout_ms: that a call of the library's to the store may take; 0: 2000
    write_through: what is published is put; None: yes
    authenticate: values bear a keyed hash that takes the salt to make; None: yes
    batch_bytes: host memory for the values of a call; 0: 32 MiB
    address: of a ta_block_store of C in place of ``store``, such as ta_valkey_store_open fills in. It is copied; its ``release`` is
        called once, also when the library refuses the call

Raises:
    ArgumentError: an option outside its range; both a store and an address, or none (INVALID)
    StateError: the namespace has a store (STATE), STALE
    ExhaustedError: threads could not be started (LIMIT)
)");
    space.def(
        "detach_store",
        [](const NamespaceObject& self) {
            const ta::Namespace handle = self.handle.get();
            unlocked([&] { handle.detach_store(); });
        },
        "Lets go of the store. Raises StateError (STATE: there is none; STALE).");
}

// What is asked of it.
void bind_store(nb::class_<NamespaceObject>& space) {
    space.def(
        "load",
        [](const NamespaceObject& self, nb::handle keys) {
            const ta::Namespace handle = self.handle.get();
            const auto list = to_keys(keys);
            return MoveObject{unlocked([&] { return handle.load(list); })};
        },
        "keys"_a, nb::sig("def load(self, keys: Keys) -> Move"),
        R"(Brings the blocks of the first keys that are not published from the store, up to the first that it lacks.

Returns:
    a move; when it is done ``match`` finds what came

Raises:
    StateError: there is no store (STATE), STALE
    ExhaustedError: 4096 loads wait (LIMIT)
)");
    space.def(
        "flush_store",
        [](const NamespaceObject& self, std::optional<double> seconds) {
            const ta::Namespace handle = self.handle.get();
            check_seconds(seconds);
            const auto limit = seconds ? std::chrono::nanoseconds(int64_t(std::clamp(*seconds, 0.0, 9e9) * 1e9)) : ta::forever;
            return unlocked([&] { return handle.flush_store(limit); });
        },
        "seconds"_a = nb::none(), nb::sig("def flush_store(self, seconds: float | None = None) -> int"),
        R"(Puts what the store lacks of all that is published now, and waits for that.

Args:
    seconds: how long; None: as long as the store takes

Returns:
    how many blocks are not known to be in the store then

Raises:
    StateError: there is no store, or it is only read (STATE), it was detached meanwhile (CANCELLED), STALE
)");
    space.def(
        "store_stats",
        [](const NamespaceObject& self) {
            const ta::Namespace handle = self.handle.get();
            return unlocked([&] { return handle.store_stats(); });
        },
        "What the store did. Raises StateError (STATE: there is none; STALE).");
}

// Sharing of the namespace by the ranks of a group.
void bind_ranks(nb::class_<NamespaceObject>& space) {
    space.def(
        "join",
        [](const NamespaceObject& self, const GroupObject& group) {
            const ta::Namespace handle = self.handle.get();
            const auto ranks = group.handle.get();
            unlocked([&] { handle.join(ranks); });
        },
        "group"_a,
        R"(Shares it with the ranks whose pools have the same fingerprint and a namespace of the same salt that has joined.

Raises:
    ArgumentError: one of this salt and fingerprint of this rank has joined (INVALID)
    StateError: the group is not ready, the pool is of another context (STATE), STALE
    PeerError, StateError: the group has ended, as ``Group.health``
    ExhaustedError: threads could not be started (LIMIT)
)");
    space.def(
        "leave",
        [](const NamespaceObject& self, const GroupObject& group) {
            const ta::Namespace handle = self.handle.get();
            const auto ranks = group.handle.get();
            unlocked([&] { handle.leave(ranks); });
        },
        "group"_a, R"(Ends the sharing; blocks that were fetched stay.

Raises:
    StateError: it has not joined (STATE), STALE
    PeerError, StateError: the group has ended, as ``Group.health``
)");
    space.def(
        "lookup",
        [](const NamespaceObject& self, const GroupObject& group, nb::handle keys, std::optional<double> seconds) {
            const ta::Namespace handle = self.handle.get();
            const auto ranks = group.handle.get();
            const auto list = to_keys(keys);
            std::vector<ta_prefix_place> places;
            wait_for(seconds, [&](std::chrono::nanoseconds slice) {
                places = handle.lookup(ranks, list, slice);
                return std::none_of(places.begin(), places.end(), [](const auto& p) { return p.answer == TA_PREFIX_UNKNOWN; });
            });
            return to_list(std::move(places));
        },
        "group"_a, "keys"_a, "seconds"_a = 0.0,
        nb::sig("def lookup(self, group: Group, keys: Keys, seconds: float | None = 0.0) -> list[PrefixPlace]"),
        R"(Which ranks have the blocks of the keys, as far as they have told: a hint.

Args:
    seconds: how long to wait for ranks that have not told at all; None: without limit

Raises:
    StateError: it has not joined (STATE), STALE
    PeerError, StateError: the group has ended, as ``Group.health``
)");
    space.def(
        "fetch",
        [](const NamespaceObject& self, const GroupObject& group, nb::handle keys) {
            const ta::Namespace handle = self.handle.get();
            const auto ranks = group.handle.get();
            const auto list = to_keys(keys);
            return TransferObject(ranks.shared(), unlocked([&] { return handle.fetch(ranks, list).ticket(); }));
        },
        "group"_a, "keys"_a, nb::sig("def fetch(self, group: Group, keys: Keys) -> Transfer"),
        R"(Brings blocks that this rank lacks from where they are nearest, and publishes them here.

Returns:
    a transfer; DONE says with ``length`` how many tokens ``match`` finds now

Raises:
    as ``lookup``
)");
}

}  // namespace

void bind_prefix(nb::module_& m) {
    nb::class_<NamespaceObject> space(m, "Namespace", R"(Published prefixes of one tenant: ``Pool.create_namespace``.

Keys are bytes-like with 32 bytes for each block, or an iterable of such. Key i is the one of block i, and stands for ALL tokens up
to the end of its block.)");
    bind_life(space);
    bind_keys(space);
    bind_attaching(space);
    bind_store(space);
    bind_ranks(space);
}
