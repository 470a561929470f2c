"""What calls raise. Every exception is an ``Error``; the classes are the families of ``Status``."""

from __future__ import annotations

from ._enums import Status, Tier


class Error(Exception):
    """A call of the library failed. It has changed nothing.

    The lists of calls ("Raises") name what a call may raise besides these: ArgumentError (INVALID) for an unknown choice,
    StateError (CLOSED, FORKED, and BUSY of plans, steps and calibrators that another thread uses), ExhaustedError (MEMORY) for the
    call's own bookkeeping, DeviceError where it needs the GPU, InternalError, and TypeError for arguments of a wrong type.

    Fields that do not apply are None.

    Attributes:
        kind: the ``Status``, such as ``Status.TIER_FULL``
        message: one English sentence
        layer: model layer
        head: kv head, or query head when the message says so
        argument: position of the wrong argument in the C call, from 0
        tier: the one that is full, or has the block or file at which the call failed
        rank: the rank of the group that is at fault
        sequence: index into the call's list of sequences; of a step's calls into that of ``Plan.step``
        block: index of the 64-token block within the sequence
        token: row of the tensor that has a bad value, from 0
        bytes: how many are lacking, or were refused
    """

    kind: Status
    message: str
    layer: int | None
    head: int | None
    argument: int | None
    tier: Tier | None
    rank: int | None
    sequence: int | None
    block: int | None
    token: int | None
    bytes: int | None

    _PLACES = ("layer", "head", "argument", "tier", "rank", "sequence", "block", "token", "bytes")

    def __init__(self, kind: int, message: str, *places, **named_places):
        if len(places) > len(self._PLACES) or not named_places.keys() <= set(self._PLACES[len(places):]):
            raise TypeError(f"an error has a kind, a message and, each once, {', '.join(self._PLACES)}")
        super().__init__(message)
        self.kind, self.message = Status(kind), message
        given = dict(zip(self._PLACES, places)) | named_places
        for name in self._PLACES:
            setattr(self, name, given.get(name))
        if self.tier is not None:
            self.tier = Tier(self.tier)

    def __str__(self) -> str:
        fields = {name: getattr(self, name) for name in self._PLACES if name != "argument"}
        fields["tier"] = None if self.tier is None else self.tier.name
        places = "".join(f", {name} {value}" for name, value in fields.items() if value is not None)
        return f"{self.message} ({self.kind.name}{places})"

    def __reduce__(self):
        return type(self), (int(self.kind), self.message, *(getattr(self, name) for name in self._PLACES))


class ArgumentError(Error, ValueError):
    """The arguments are wrong: INVALID, STRUCT, SHAPE, DTYPE, ALIGNMENT, UNSUPPORTED. The same call will fail again."""


class StateError(Error, RuntimeError):
    """Not now: STATE, BUSY, STALE, CLOSED, FORKED, CANCELLED."""


class ExhaustedError(Error, RuntimeError):
    """Something ran out: MEMORY, TIER_FULL, LIMIT. ``bytes`` says how many are lacking."""


class DataError(Error, ValueError):
    """The data is wrong: NONFINITE, CORRUPT."""


class DeviceError(Error, RuntimeError):
    """The GPU: DEVICE, DEVICE_LOST."""


class FileError(Error, RuntimeError):
    """Reading or writing a file failed: IO."""


class PeerError(Error, RuntimeError):
    """Other ranks of a group: PEER_LOST, TIMEOUT, MISMATCH. ``rank`` says which."""


class InternalError(Error, RuntimeError):
    """A defect of the library; please report the text."""


_FAMILIES = {1: ArgumentError, 2: StateError, 3: ExhaustedError, 4: DataError, 5: DeviceError, 6: FileError, 7: PeerError}


def _make(kind: int, message: str, *places: int) -> Error:
    """Of the fields of a ta_error, where -1 says that a field does not apply."""
    return _FAMILIES.get(kind >> 8, InternalError)(kind, message, *(None if x == -1 else x for x in places))
