"""Where the chunks of a leaf land on the host, and become its shards again."""

from collections.abc import Sequence

import numpy as np

from gockpt_jax.replay.memory import own
from gockpt_jax.transfer.chunks import Chunk
from gockpt_jax.transfer.pull import Box, HostChunk

# A page: storage writes from it without a copy. The CPU backend asks for 64 bytes.
_ALIGNMENT = 4096


class Landing:
    """The shards of one leaf that this process owns, flat, as far as they have landed.

    A leaf that left as a whole stays where it was pulled to; the rows of one that left in parts are
    copied together.
    """

    def __init__(self) -> None:
        self.flat: list[np.ndarray] = []
        self._indices: list[Box] = []
        self._shape: tuple[int, ...] = ()
        self._global_shape: tuple[int, ...] = ()
        self._missing = -1

    @property
    def is_complete(self) -> bool:
        """Whether all rows have landed."""
        return self._missing == 0

    def put(self, chunk: Chunk, found: Sequence[HostChunk]) -> None:
        """Takes in rows of all shards."""
        source = chunk.source
        if self._missing < 0:
            self._missing, self._shape = source.shard_size, source.shard_shape
            extra = self._shape[len(source.shape) :]
            self._global_shape = (*source.shape, *extra)
            self._indices = [h.index for h in found]
            if not chunk.is_whole:
                self.flat = [_aligned(source.shard_size, h.data.dtype) for h in found]
        assert self._missing >= chunk.size, "rows landed twice"
        self._missing -= chunk.size
        if chunk.is_whole:
            self.flat = [own(h.data) for h in found]
        else:
            for flat, rows in zip(self.flat, found, strict=True):
                flat[chunk.start : chunk.stop] = rows.data

    def chunks(self, wanted: Sequence[Box]) -> list[HostChunk]:
        """The shards at these positions, complete: as they landed, or cut anew if they lie so."""
        assert self.is_complete, "rows have not landed"
        landed = [
            HostChunk(index, flat.reshape(self._shape))
            for index, flat in zip(self._indices, self.flat, strict=True)
        ]
        if list(wanted) == self._indices:
            return landed
        return [self._assembled(box, landed) for box in wanted]

    def _assembled(self, box: Box, landed: Sequence[HostChunk]) -> HostChunk:
        """One shard, from pieces that this process has all of."""
        target = _bounds(box, self._global_shape)
        data = np.empty([b - a for a, b in target], landed[0].data.dtype)
        for piece in landed:
            place = _bounds(piece.index, self._global_shape)
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(target, place, strict=True)]
            if all(a < b for a, b in both):
                into = tuple(
                    slice(a - t, b - t) for (a, b), (t, _) in zip(both, target, strict=True)
                )
                out_of = tuple(
                    slice(a - p, b - p) for (a, b), (p, _) in zip(both, place, strict=True)
                )
                data[into] = piece.data[out_of]
        return HostChunk(box, data)


def _bounds(box: Box, shape: Sequence[int]) -> list[tuple[int, int]]:
    return [s.indices(n)[:2] for s, n in zip(box, shape, strict=True)]


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    memory = np.empty(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size * dtype.itemsize].view(dtype)
