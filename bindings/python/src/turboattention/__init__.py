"""TurboAttention: attention over very long, compressed KV caches.

A step of a model, with keys, values and queries as arrays of numpy, PyTorch or others, which are never copied::

    import turboattention as ta

    context = ta.Context()
    pool = context.create_pool(layers=32, kv_heads=8, head_dim=128, bits=4, budget_bytes=4 << 30)
    plan = pool.create_plan()
    seq = pool.create_sequence()
    with plan.step(seq, n_new=1) as step:
        for layer in range(32):
            step.append(layer, k, v)            # [1, 8, 128]
            step.attend(layer, q, out)          # [1, 32, 128]

Objects may be freed in any order: a child keeps its parent alive. Calls that fail raise ``Error`` and change nothing. The GIL is
released while the library works. In a child process of ``fork`` every call on an object of the parent raises StateError (FORKED).
``turboattention.transformers`` runs Hugging Face models.
"""

from ._core import *  # noqa: F403
from ._core import __doc__ as _  # noqa: F401
from ._enums import *  # noqa: F403
from ._errors import (
    ArgumentError,
    DataError,
    DeviceError,
    Error,
    ExhaustedError,
    FileError,
    InternalError,
    PeerError,
    StateError,
)
from ._options import Allocator, LayerGroup, Numerics, PoolDescription, Rotary, Tiers
from ._types import Array, Keys
