"""The enumerations of turboattention.h, by the names they have there without the prefix."""

from enum import IntEnum, IntFlag


class Status(IntEnum):
    """What a call says: ``Error.kind``."""

    OK = 0
    INVALID = 0x0101
    STRUCT = 0x0102
    SHAPE = 0x0103
    DTYPE = 0x0104
    ALIGNMENT = 0x0105
    UNSUPPORTED = 0x0106
    STATE = 0x0201
    BUSY = 0x0202
    STALE = 0x0203
    CLOSED = 0x0204
    FORKED = 0x0205
    CANCELLED = 0x0206
    MEMORY = 0x0301
    TIER_FULL = 0x0302
    LIMIT = 0x0303
    NONFINITE = 0x0401
    CORRUPT = 0x0402
    DEVICE = 0x0501
    DEVICE_LOST = 0x0502
    IO = 0x0601
    PEER_LOST = 0x0701
    TIMEOUT = 0x0702
    MISMATCH = 0x0703
    INTERNAL = 0x0f01


class DType(IntEnum):
    """Element types."""

    F16 = 1
    BF16 = 2
    F32 = 3


class Device(IntEnum):
    """Where a context computes."""

    CPU = 0
    CUDA = 1


class CpuIsa(IntEnum):
    """Which CPU kernels run; all give the same integers."""

    AUTO = 0
    SCALAR = 1
    AVX2 = 2
    AVX_VNNI = 3
    AVX512 = 4
    AMX = 5


class LogLevel(IntEnum):
    """How much a log callback is told."""

    ERROR = 1
    WARNING = 2
    INFO = 3
    DEBUG = 4


class Profile(IntEnum):
    """Sets of numeric settings."""

    ACCURATE = 0
    PAPER = 1


class Granularity(IntEnum):
    """What shares one scale of stage 1 (float to INT8)."""

    DEFAULT = 0
    TOKEN = 1
    PAGE = 2
    TENSOR = 3


class OpenScale(IntEnum):
    """The scale of tokens that join a page that is not full."""

    DEFAULT = 0
    TOKEN = 1
    UNIVERSAL = 2


class Exp(IntEnum):
    """The exponential in P."""

    DEFAULT = 0
    POLY = 1
    EXACT = 2
    SAS = 3


class P(IntEnum):
    """Precision of the probabilities that multiply V."""

    DEFAULT = 0
    AUTO = 1
    U8 = 2
    U16 = 3
    S8_127 = 4
    S8_119 = 5
    S8_127_RUNNING = 6
    U8_RUNNING = 7


class NonFinite(IntEnum):
    """What NaN, Inf and magnitudes above 2**56 do."""

    DEFAULT = 0
    REJECT = 1
    SATURATE = 2


class Mask(IntEnum):
    """Which keys a query sees."""

    CAUSAL = 0
    FULL = 1


class Tier(IntEnum):
    """Where blocks lie."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    PEER = 3
    """between DEVICE and HOST"""


class TierState(IntEnum):
    """What a tier can do now."""

    OK = 0
    READ_ONLY = 1
    FAILED = 2


class Eviction(IntEnum):
    """Which blocks leave a full tier first."""

    LRU = 0
    PRIORITY = 1
    ATTENTION = 2


class Staging(IntEnum):
    """Whether a GPU copies what it reads in host memory to device memory first."""

    AUTO = 0
    NEVER = 1
    ALWAYS = 2


class RotaryPairs(IntEnum):
    """Which channels of a head a rotary embedding turns together."""

    HALVES = 0
    """i and i + channels / 2"""
    ADJACENT = 1
    """2 i and 2 i + 1"""


class PrefixEventKind(IntEnum):
    """What became of a published block."""

    RESET = 1
    PUBLISHED = 2
    DROPPED = 3
    MOVED = 4


class SaveFlags(IntFlag):
    """What a saved pool holds beside its sequences."""

    PUBLISHED = 1


class BlockFlags(IntFlag):
    """What a block of a sequence is, beside a full one in some tier."""

    OPEN = 1
    """not full, or cut by ``Sequence.truncate``"""
    DROPPED = 2
    """by ``Tiers.drop_coldest`` or ``Sequence.forget``; in no tier"""
    ABSENT = 4
    """of a partitioned sequence, another rank's; in no tier"""
    PASSED = 8
    """has the pages of layers without a window alone"""
    PUBLISHED = 16
    """in a namespace"""


class MoveState(IntEnum):
    """How far moves or a transfer are."""

    QUEUED = 1
    RUNNING = 2
    DONE = 3
    FAILED = 4
    CANCELLED = 5


class MetricsFormat(IntEnum):
    """Text of ``Pool.metrics``."""

    OPENMETRICS = 1
    JSON = 2


class GroupKind(IntEnum):
    """How ranks reach each other."""

    LOCAL = 1
    HOST = 2
    NCCL = 3


class PeerRoute(IntEnum):
    """How blocks go between two ranks."""

    HOST_MEMORY = 1
    GPU_MEMORY = 2
    NCCL = 3


class GroupState(IntEnum):
    """Whether a group works."""

    CONNECTING = 1
    READY = 2
    ENDED = 3


class SendMode(IntEnum):
    """What becomes of a sequence that is sent."""

    COPY = 0
    MOVE = 1


class StoreResult(IntEnum):
    """What became of an item of a store."""

    FAILED = -1
    ABSENT = 0
    DONE = 1


class PrefixAnswer(IntEnum):
    """Whether a rank has a block."""

    UNKNOWN = 0
    NO = 1
    YES = 2


class PartitionOutput(IntEnum):
    """Which ranks get the results over a partitioned sequence."""

    ALL = 0
    HEADS = 1
    ONE = 2


class DenseVariant(IntEnum):
    """How ``Context.attend_dense`` quantizes, or that it groups channels."""

    INT8_PAGE = 0
    INT_FLASH = 1
    INT_FLASH_HALF = 2
    DISTR = 3
