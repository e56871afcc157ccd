"""A checksum of every chunk, made before it is written; `checksum_files.py` keeps them.

Digests are xxh3 (128 bits) of the little-endian values in C order, as stored and before
compression: independent of the layout on disk. Large ones are made on threads, without the GIL.
See docs/decisions/0016.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
import xxhash

from gockpt_jax.storage.files import checksum_files
from gockpt_jax.storage.files.grid import Box, whole
from gockpt_jax.storage.files.pieces import in_order

# Below this a thread costs more than the digest.
_INLINE_BYTES = 2**18
_DIGEST_THREADS = 2


def digest(values: np.ndarray[Any, Any]) -> str:
    """Returns the digest of an array's values; at most 4 MiB is copied where it is not contiguous.

    Example:
      >>> import numpy as np
      >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
      >>> digest(x) == digest(np.asfortranarray(x)) != digest(x + 1)
      True
    """
    if values.dtype.name.endswith(("int2", "int4")):  # NumPy leaves their upper bits undefined.
        values = values.astype(np.int8)
    if values.flags.c_contiguous:
        return digest_of([values])
    return digest_of(np.ascontiguousarray(part) for _, part in in_order(values))


def digest_of(pieces: Iterable[np.ndarray[Any, Any]]) -> str:
    """Returns the digest of an array's values that come piece by piece, in C order."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece.reshape(-1).view(np.uint8).data)
    return str(state.hexdigest())


class Checksums:
    """What one process wrote of one item, chunk by chunk.

    Used on the event loop of one save; `add_values` before it starts.
    """

    def __init__(self) -> None:
        self._leaves: dict[str, dict[str, Any]] = {}
        # Faster than a disk, and the first chunk need not wait for the digests of all others.
        self._threads = asyncio.Semaphore(_DIGEST_THREADS)

    async def add(
        self, name: str, box: Box, data: np.ndarray[Any, Any], dtype: np.dtype[Any]
    ) -> None:
        """Records a chunk that is about to be written.

        Args:
          name: The leaf's parameter name.
          box: Where the chunk is in the leaf; explicit starts and stops.
          data: Its values.
          dtype: What they are stored as.
        """
        if data.nbytes < _INLINE_BYTES:
            made = _stored_digest(data, dtype)
        else:
            async with self._threads:
                made = await asyncio.to_thread(_stored_digest, data, dtype)
        self.record(name, box, dtype, made)

    def record(self, name: str, box: Box, dtype: np.dtype[Any], made: str) -> None:
        """Records a chunk whose digest is known, as stored with `dtype`."""
        leaf = self._leaves.setdefault(name, {"dtype": dtype.name, "chunks": []})
        # Tuples of numbers, unlike lists, are nothing that the garbage collector looks at.
        starts, stops = tuple(s.start for s in box), tuple(s.stop for s in box)
        leaf["chunks"].append((starts, stops, made))

    def add_values(self, tree: Any, save_args: Any, is_array: Callable[[Any], bool]) -> None:
        """Records the leaves of a tree that stock writes itself, on the first process.

        Args:
          tree: Of the save.
          save_args: The user's for it, or `None`.
          is_array: Whether stock writes a leaf as an array.
        """
        names = ocp.tree.get_param_names(tree, include_empty_nodes=False)
        if save_args is None:
            save_args = jax.tree.map(lambda _: ocp.SaveArgs(), tree)

        def add(name: str, leaf: Any, args: Any) -> None:
            if is_array(leaf):
                data, asked = np.asarray(leaf), getattr(args, "dtype", None)
                data = data.astype(data.dtype.newbyteorder("="), copy=False)
                dtype = data.dtype if asked is None else np.dtype(asked)
                self.record(name, whole(data.shape), dtype, _stored_digest(data, dtype))

        jax.tree.map(add, names, tree, save_args)

    def write(self, item: Any) -> None:
        """Writes this process's file into the item, which is not visible yet."""
        checksum_files.write_process(item, self._leaves)


def _stored_digest(data: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> str:
    if dtype != data.dtype:
        # TensorStore's own conversion, bit for bit, NaNs included.
        data = ts.cast(ts.array(data), dtype).read().result()
    return digest(data)
