"""Options of contexts and pools. A field that is left out has its default; turboattention.h says more of each."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

from ._enums import Device, Eviction, Exp, Granularity, NonFinite, OpenScale, P, Profile, RotaryPairs, Staging

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike

    from ._core import Context
    from ._types import Array


@dataclass(frozen=True)
class Allocator:
    """Where a context's host memory comes from: addresses of C functions. (They cannot be Python functions, since the library calls
    them under its locks, from any thread.) They must stay valid until the last object of the context has gone.

    Attributes:
        allocate: ``void* (*)(size_t bytes, size_t alignment, void* user)``; NULL says that there is no memory
        deallocate: ``void (*)(void* ptr, size_t bytes, size_t alignment, void* user)``
        user: what both get
    """

    allocate: int
    deallocate: int
    user: int = 0


@dataclass(frozen=True)
class LayerGroup:
    """A range of layers of a pool.

    Attributes:
        first, layers: layers [first, first + layers)
        window: the most keys that a query of these layers sees, its own included; 0: no limit
        kv_heads: 1..1024; 0: the pool's
        head_dim: channels of Q and K: 16..256, a multiple of 8; 0: the pool's
        v_head_dim: channels of V and of the output, as head_dim; 0: head_dim, or, if that is 0, too, the pool's
    """

    first: int
    layers: int
    window: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding that callers apply to Q and K, for ``Sequence.shift``: at position p pair i (x, y) of a head has become
    (x cos(a p) - y sin(a p), x sin(a p) + y cos(a p)), where a is the pair's angle.

    Attributes:
        angles: [layers, channels / 2] radians for each position, -1024 to 1024, or one row for all layers; what numpy makes float64
            of; copied. 0: the pair stays as it is
        channels: the first channels of a head, which are turned: even, 2 to the least head_dim of the layers; 0: twice the last
            axis of angles
        pairs: which channels are turned together
    """

    angles: ArrayLike
    channels: int = 0
    pairs: RotaryPairs = RotaryPairs.HALVES


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Numeric settings of a pool. The profile decides each one that is left out; docs/numerics.md has the table.

    Attributes:
        profile: ``ACCURATE``, or ``PAPER`` for TurboAttention as published
        k_granularity, v_granularity: what shares a scale of stage 1
        open_scale: the scale of tokens that join a page that is not full
        v_exponents: a power-of-two scale for each token of V
        fractional_zero: zero points in parts of an INT8 step
        v_search: the encoder searches V's scale and zero with the least squared error
        hadamard: randomized Hadamard rotation of Q and K; head_dim 64, 128, 256
        sink_blocks: blocks at the start of a sequence that stay at 8 bits; 0: the profile's; -1: none
        exp, p: how the softmax is computed
        nonfinite: what NaN and Inf do
        hadamard_seed: which signs; 0: the default
        k_offset: float32 [layers, kv_heads, head_dim], subtracted from K; copied. Where layers have shapes of their own: one axis, the
            layers one after the other
        k_turning: pairs of K channels that turn from token to token are kept apart
        k_search: v_search for K's 2-bit heads
        unit_slope: 4- and 2-bit values have slope 1 on the INT8 ones
        q_bits: of queries in decode, against K at 8 bits: 8 or 15; 0: the profile's
        batch_invariant: a token's results have the same bits in every step; off by default
    """

    profile: Profile = Profile.ACCURATE
    k_granularity: Granularity = Granularity.DEFAULT
    v_granularity: Granularity = Granularity.DEFAULT
    open_scale: OpenScale = OpenScale.DEFAULT
    v_exponents: bool | None = None
    fractional_zero: bool | None = None
    v_search: bool | None = None
    hadamard: bool | None = None
    sink_blocks: int = 0
    exp: Exp = Exp.DEFAULT
    p: P = P.DEFAULT
    nonfinite: NonFinite = NonFinite.DEFAULT
    hadamard_seed: int = 0
    k_offset: Array | None = None
    k_turning: bool | None = None
    k_search: bool | None = None
    unit_slope: bool | None = None
    q_bits: int = 0
    batch_invariant: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Memory below the device tier, for full blocks that it has no room for; docs/tiers.md is the guide.

    Attributes:
        host_node: 1 + the NUMA node of the host tier; 0: the GPU's
        host_bytes, disk_bytes: budgets; 0: no such tier
        disk_folder: for a file without a name, which ends with the pool; None: TMPDIR or /tmp
        high_percent, low_percent: of the device budget: above the first, blocks leave until no more than the second is in use;
            0: 94, and 4 below the first
        eviction: which blocks leave a full tier first
        disk_path: the file of a disk tier that lasts: published blocks are found there again
        drop_coldest: blocks that find no room below are lost. Changes results
        begin_wait_ms: how long ``Plan.step`` waits for what others hold; 0: the defaults; -1: not at all
        staging: whether a GPU copies what it reads in host memory first
        falling_precision: blocks lose bits as they are demoted, for good. Changes results
        tuning: address of a ``ta_x_tier_tuning`` of turboattention_experimental.h, or 0
        peer: a context of another device, whose memory holds a peer tier, between device and host; the pool keeps it
        peer_bytes: budget of the peer tier; 0: none
    """

    host_node: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_folder: str | PathLike[str] | None = None
    high_percent: int = 0
    low_percent: int = 0
    eviction: Eviction = Eviction.LRU
    disk_path: str | PathLike[str] | None = None
    drop_coldest: bool | None = None
    begin_wait_ms: int = 0
    staging: Staging = Staging.AUTO
    falling_precision: bool | None = None
    tuning: int = 0
    peer: Context | None = None
    peer_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PoolDescription:
    """What a pool is: ``Pool.describe``.

    Attributes:
        bits: 8, 4 or 2; 0: not the same for all heads
        k_bits, v_bits: uint8 [layers, kv_heads]; if layers differ in shape: one axis, the layers one after the other
        budget_bytes: of the device tier
        fingerprint: of everything that decides how stored bytes are read: pools with equal ones exchange files and sequences
        token_block_bytes: size of a block of 8 bits, all layers
        channel_block_bytes: of the bits of k_bits and v_bits; 0: there are none
        low_block_bytes: of a block of 2 bits that had more before; 0: there are none
        block_head_dim: channels that blocks have: 64, 96, 128 or 256
        layer_groups: as given
        passed_token_block_bytes, passed_channel_block_bytes: sizes of blocks without the pages of layers with windows; 0: there are
            none
        numerics, tiers: as in effect
        rotary: as given, angles in two axes; None: none
    """

    device: Device
    device_ordinal: int
    layers: int
    kv_heads: int
    head_dim: int
    bits: int
    max_sequences: int
    k_bits: np.ndarray
    v_bits: np.ndarray
    budget_bytes: int
    fingerprint: int
    token_block_bytes: int
    channel_block_bytes: int
    low_block_bytes: int
    v_head_dim: int
    block_head_dim: int
    layer_groups: tuple[LayerGroup, ...]
    passed_token_block_bytes: int
    passed_channel_block_bytes: int
    numerics: Numerics
    tiers: Tiers | None
    rotary: Rotary | None


_CHOICES = {"profile": Profile, "k_granularity": Granularity, "v_granularity": Granularity, "open_scale": OpenScale, "exp": Exp,
            "p": P, "nonfinite": NonFinite, "eviction": Eviction, "staging": Staging, "pairs": RotaryPairs}


def _description(*, device, numerics, tiers, rotary, **rest) -> PoolDescription:
    def named(fields):
        return {name: _CHOICES[name](value) if name in _CHOICES else value for name, value in fields.items()}

    return PoolDescription(device=Device(device), numerics=Numerics(**named(numerics)),
                           tiers=None if tiers is None else Tiers(**named(tiers)),
                           rotary=None if rotary is None else Rotary(**named(rotary)), **rest)
