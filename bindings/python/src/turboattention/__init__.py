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
# Type checkers take "X as X" for public.
from ._errors import ArgumentError as ArgumentError
from ._errors import DataError as DataError
from ._errors import DeviceError as DeviceError
from ._errors import Error as Error
from ._errors import ExhaustedError as ExhaustedError
from ._errors import FileError as FileError
from ._errors import InternalError as InternalError
from ._errors import PeerError as PeerError
from ._errors import StateError as StateError
from ._options import Allocator as Allocator
from ._options import LayerGroup as LayerGroup
from ._options import Numerics as Numerics
from ._options import PoolDescription as PoolDescription
from ._options import Rotary as Rotary
from ._options import Tiers as Tiers
from ._types import Array as Array
from ._types import Keys as Keys
