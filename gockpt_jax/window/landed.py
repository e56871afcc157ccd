"""What has landed of a leaf: rows of its shards, which become these shards again."""

from collections.abc import Sequence

import numpy as np

from gockpt_jax.replay.memory import own
from gockpt_jax.transfer.boxes import Index, explicit, overlap, shape_of, within
from gockpt_jax.transfer.chunks import Chunk, Source
from gockpt_jax.transfer.pull import HostChunk

# A page: storage writes from it without a copy. The CPU backend asks for 64 bytes.
_ALIGNMENT = 4096


class LandedLeaf:
    """The shards of one leaf that this process owns, flat, as far as they have landed.

    A leaf that left as a whole stays where it was pulled to; the rows of one that left in parts are
    copied together.
    """

    def __init__(self) -> None:
        self.flat: list[np.ndarray] = []
        self._source: Source | None = None  # until some rows have landed
        self._indices: list[Index] = []
        self._num_landed = 0  # elements of each shard

    @property
    def is_complete(self) -> bool:
        """Whether all rows have landed."""
        return self._source is not None and self._num_landed == self._source.shard_size

    def put(self, chunk: Chunk, found: Sequence[HostChunk]) -> None:
        """Takes in rows of all shards."""
        source = chunk.source
        if self._source is None:
            self._source, self._indices = source, [h.index for h in found]
            if not chunk.is_whole:
                self.flat = [_aligned(source.shard_size, h.data.dtype) for h in found]
        self._num_landed += chunk.size
        assert self._num_landed <= source.shard_size, "rows landed twice"
        if chunk.is_whole:
            self.flat = [own(h.data) for h in found]
        else:
            for flat, rows in zip(self.flat, found, strict=True):
                flat[chunk.start : chunk.stop] = rows.data

    def chunks(self, wanted: Sequence[Index]) -> list[HostChunk]:
        """The shards at these positions, complete: as they landed, or cut anew if they lie so."""
        assert self._source is not None, "nothing has landed"
        assert self.is_complete, "rows have not landed"
        shape = self._source.shard_shape
        landed = [
            HostChunk(index, flat.reshape(shape))
            for index, flat in zip(self._indices, self.flat, strict=True)
        ]
        if list(wanted) == self._indices:
            return landed
        dims = self._source.shape
        return [_assembled(index, landed, (*dims, *shape[len(dims) :])) for index in wanted]


def _assembled(index: Index, landed: Sequence[HostChunk], shape: Sequence[int]) -> HostChunk:
    """One shard of an array of this shape, from pieces that this process has all of."""
    target = explicit(index, shape)
    data = np.empty(shape_of(target), landed[0].data.dtype)
    for piece in landed:
        place = explicit(piece.index, shape)
        if (both := overlap(target, place)) is not None:
            data[within(both, target)] = piece.data[within(both, place)]
    return HostChunk(index, data)


def _aligned(size: int, dtype: np.dtype) -> np.ndarray:
    memory = np.empty(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size * dtype.itemsize].view(dtype)
