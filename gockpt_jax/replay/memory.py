"""Host memory that replay works in: chunks that were pulled, and its own results.

NumPy's views of JAX arrays are read-only, for good reason: others may hold the array. Nobody else
holds these. A pulled chunk is the landing place of a copy that was made for the checkpoint alone,
so its updates are applied where it lies: there is no second copy of the state on the host, and no
fresh pages fault (docs/decisions/0009).
"""

import collections
import ctypes
from typing import Any

import jax
import numpy as np


def own(data: np.ndarray) -> np.ndarray:
    """A pulled chunk as flat memory that may be written.

    Args:
      data: Of any shape and dtype; nobody else reads it, and nobody writes it.

    Returns:
      The same memory, shape (size,), kept alive by the result; a copy only where the elements do
      not lie in order.
    """
    if not data.flags.c_contiguous:
        return data.flatten()
    if data.flags.writeable or not data.size:
        return data.reshape(-1)
    return _writable(data.ctypes.data, data.nbytes, data.dtype, data)


class Scratch:
    """What a thread works in beside the shards: buffers of results, and these as NumPy sees them.

    Attributes:
      free: Buffers that no program uses now, by the size and dtypes of results; each run takes some
        over, and gives its results in them.
    """

    def __init__(self) -> None:
        self.free: dict[tuple[Any, ...], list[list[jax.Array]]] = collections.defaultdict(list)
        self._views: dict[tuple[int, int, np.dtype], np.ndarray] = {}

    def view(self, result: jax.Array) -> np.ndarray:
        """The memory of a finished result, for as long as the caller holds `result`.

        `np.asarray` would do the same, but the view that JAX then keeps stops the buffer from being
        donated again. Results come in the same few buffers again and again, so views are kept: to
        make one takes longer than to start a program.

        Its elements have a byte each at least: no others are repeated (`walk.py`).
        """
        key = (result.unsafe_buffer_pointer(), result.size, result.dtype)
        if (view := self._views.get(key)) is None:
            view = self._views[key] = _writable(key[0], result.nbytes, result.dtype, None)
        return view


def _writable(
    address: int, num_bytes: int, dtype: np.dtype, owner: np.ndarray | None
) -> np.ndarray:
    memory = (ctypes.c_char * num_bytes).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]  # ctypes arrays take attributes
    return np.frombuffer(memoryview(memory), np.uint8).view(dtype)
