"""How chunks come to the host, and where those of a leaf become its shards again."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np

from gockpt_jax.replay.memory import own
from gockpt_jax.transfer.boxes import Index, explicit, overlap, shape_of, within
from gockpt_jax.transfer.chunks import Chunk, Source
from gockpt_jax.transfer.pull import HostChunk, Pull
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.worker import Failed, Task

_T = TypeVar("_T")

# A page: storage writes from it without a copy. The CPU backend asks for 64 bytes.
_ALIGNMENT = 4096


def landing_task(
    pull: Callable[[], _T], land: Callable[[_T], object], has_landed: Callable[[], None],
    heed: Failed, failed: Failed,
) -> tuple[Task, Failed]:  # fmt: skip
    """For `Worker.submit`: waits for what is on its way to the host, and takes it in.

    Args:
      pull: Waits for it; nobody else holds what this one does, so that it is free behind it.
      land: Takes it in.
      has_landed: Gives back what it had of the device budget; may be called again.
      heed: Is told of an error first: a runtime may find out only now that it had no room.
      failed: Is told then.
    """
    on_its_way = [pull]

    def task() -> None:
        found = on_its_way.pop()()
        has_landed()
        land(found)

    def not_landed(error: BaseException) -> None:
        # These would keep it on the device, which has to be free before the budget says so.
        on_its_way.clear()
        error.with_traceback(None)
        try:
            has_landed()
            heed(error)
        finally:
            failed(error)

    return task, not_landed


def send(
    start: Callable[[], Pull[_T]], land: Callable[[_T], object], failed: Failed, num_bytes: int,
    resources: Resources,
) -> bool:  # fmt: skip
    """Stages something as the device budget has room, and has the worker land it.

    The budget is an estimate: other programs may have taken the device's memory since.

    Args:
      start: Stages it, and starts its pull.
      land: Takes it in.
      failed: Is told of what went wrong instead.
      num_bytes: Of what is staged.
      resources: The session's.

    Returns:
      Whether it is on its way. If not, the device had less room, and parts of it may be tried.
    """
    device, beside_bytes = resources.device, 0
    try:
        with device.lent(num_bytes) as give_back:
            beside_bytes = device.used_bytes - num_bytes
            heed = functools.partial(device.heed, num_bytes, beside_bytes)
            resources.worker.submit(*landing_task(start().result, land, give_back, heed, failed))
        return True
    except jax.errors.JaxRuntimeError as error:
        if not device.allows_less(num_bytes, beside_bytes, error):
            raise
        return False  # the error goes with it, which holds what was copied


class Landing:
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
