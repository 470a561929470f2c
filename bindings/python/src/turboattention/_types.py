"""Types that signatures name."""

from __future__ import annotations

from typing import Any, Iterable, Protocol, Union, runtime_checkable

import numpy as np


@runtime_checkable
class SupportsDLPack(Protocol):
    """An array of PyTorch, JAX, CuPy, ..."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


@runtime_checkable
class SupportsCudaArrayInterface(Protocol):
    """A device array of Numba, CuPy, ..."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


@runtime_checkable
class SupportsBuffer(Protocol):
    """An array in host memory: numpy, memoryview, ..."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


# Where [tokens, heads, head_dim] elements are taken from, never copied: float32, float16, or bfloat16 (of ml_dtypes, by DLPack, or
# its bits as uint16).
Array = Union[SupportsDLPack, SupportsCudaArrayInterface, SupportsBuffer]

# What has bytes in host memory. Before Python 3.12 type checkers do not know this of arrays of numpy.
Buffer = Union[SupportsBuffer, np.ndarray]

# One key of 32 bytes for each block.
Keys = Union[Buffer, Iterable[Union[Buffer, bytes]]]
