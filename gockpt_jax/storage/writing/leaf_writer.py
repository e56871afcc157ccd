"""Writes the shards of one leaf, chunk by chunk."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any, TypeVar

import numpy as np
import tensorstore as ts

from gockpt_jax.promise import Promise
from gockpt_jax.storage.files import grid
from gockpt_jax.storage.files.database import Extents
from gockpt_jax.storage.files.direct import DirectFiles
from gockpt_jax.storage.writing.array_layout import ArrayLayout
from gockpt_jax.storage.writing.host_array import HostShard
from gockpt_jax.storage.writing.write_budget import WriteBudget

_T = TypeVar("_T")

# A chunk that TensorStore compresses, and what it has become.
_COMPRESSED_COPIES = 2


@dataclasses.dataclass(frozen=True)
class LeafWriter:
    """Where the chunks of one leaf go.

    Attributes:
      layout: Where and how it is stored.
      budget: The bytes in flight, of the whole save.
      target: The leaf as TensorStore sees it; or where `files` writes each chunk, by its key.
      files: Writes chunks without TensorStore.
    """

    layout: ArrayLayout
    budget: WriteBudget
    target: ts.TensorStore | Extents
    files: DirectFiles

    async def write_shard(self, shard: HostShard, box: grid.Box) -> None:
        """Writes one shard, whose bytes have come, chunk by chunk, and gives them back."""
        data: np.ndarray[Any, Any] | None = None
        try:
            with named_in_errors(self.layout.name, box):
                data = _result_of(self.promised(shard))
                _check_data(data, box, self.layout.dtype)
            async with first_error_alone(), asyncio.TaskGroup() as group:
                for cell in grid.cells(box, self.layout.chunk):
                    part = data[grid.within(cell, box)]
                    group.create_task(self._write_chunk(cell, part))
                    del part
        finally:
            data = None  # An exception's traceback would keep the bytes alive.
            shard.release()

    def promised(self, shard: HostShard) -> Promise[np.ndarray[Any, Any]]:
        """The bytes of a shard. Who gives a save up gives them back, from another thread."""
        try:
            return shard.data
        except RuntimeError:
            self.budget.stats.require_wanted()
            raise

    async def _write_chunk(self, cell: grid.Box, data: np.ndarray[Any, Any] | None) -> None:
        """The one place where a chunk is about to be written: (leaf name, box, values)."""
        assert data is not None
        checksums, dtype = self.budget.stats.checksums, self.layout.stored_dtype
        with named_in_errors(self.layout.name, cell):
            try:
                if not self._is_direct:
                    # Nothing is held for it: that of the next chunk is made beside the write.
                    await checksums.add(self.layout.name, cell, data, dtype)
                async with self.budget.admit(data.nbytes, self._held_bytes(data.nbytes)):
                    digest = await self._written(cell, data)
                if self._is_direct:
                    checksums.record(self.layout.name, cell, dtype, digest)
                if self.layout.item.compressed:
                    await self.budget.trim(data.nbytes)
            finally:
                data = None

    def _written(self, cell: grid.Box, data: np.ndarray[Any, Any]) -> Awaitable[Any]:
        if not isinstance(self.target, ts.TensorStore):
            extent = self.target(grid.key(cell, self.layout.chunk))
            return _result(self.files.write(extent.path, data, extent.offset))
        # No copy into TensorStore's cache: the bytes stay as they are until released.
        return to_the_end(
            self.target[cell].write(data, can_reference_source_data_indefinitely=True)
        )

    @property
    def _is_direct(self) -> bool:
        return not isinstance(self.target, ts.TensorStore)

    def _held_bytes(self, nbytes: int) -> int:
        """What is in flight because of a chunk."""
        if self._is_direct:
            return min(nbytes, self.files.copied_bytes)
        return nbytes * (_COMPRESSED_COPIES if self.layout.item.compressed else 1)


async def open_store(
    spec: dict[str, Any], context: ts.Context | None, **mode: Any
) -> ts.TensorStore:
    """Opens an array of TensorStore's."""
    return await to_the_end(ts.open(ts.Spec(spec), context=context, **mode))


async def to_the_end(operation: Awaitable[_T]) -> _T:
    """Waits for an operation on the disk until it has ended, even when cancelled.

    Neither TensorStore nor a thread stops: it goes on reading the bytes, and its call back into an
    event loop that has been closed meanwhile would fail.
    """
    task = asyncio.ensure_future(operation)
    del operation  # The traceback of a failed write would keep it, and with it the bytes.
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        task.exception()  # The save has failed already; without this asyncio would log it.
        raise


async def _result(operation: concurrent.futures.Future[_T]) -> _T:
    """The same for a thread's work; what has been done already costs no turn of the event loop."""
    if not operation.done():
        await to_the_end(asyncio.wrap_future(operation))
    return operation.result()


def _result_of(promise: Promise[_T]) -> _T:
    try:
        return promise.result()
    except concurrent.futures.CancelledError as error:
        # Orbax would take a CancelledError for its own cancellation: the save would be a success.
        raise RuntimeError("The save was given up before the bytes of a shard came.") from error


def _check_data(data: Any, box: grid.Box, dtype: np.dtype[Any]) -> None:
    """TensorStore would broadcast or convert other data without a word."""
    shape = grid.shape_of(box)
    if not isinstance(data, np.ndarray) or data.shape != shape or data.dtype != dtype:
        got = f"{getattr(data, 'dtype', type(data).__name__)}{getattr(data, 'shape', '')}"
        raise ValueError(f"Expected an ndarray {dtype}{shape}, got {got}.")


@contextlib.contextmanager
def named_in_errors(name: str, box: grid.Box | None = None) -> Iterator[None]:
    """Adds a note to an error that says which leaf it befell; its type and text stay."""
    try:
        yield
    except Exception as error:
        if not getattr(error, "__notes__", ()):  # one that all chunks share would be named by each
            where = f"`{name}`" if box is None else f"`{name}`, box {box}"
            error.add_note(f"gockpt_jax: while saving {where}.")
        raise


@contextlib.asynccontextmanager
async def first_error_alone() -> AsyncIterator[None]:
    """Unwraps a task group's error: the user shall see the one that came first, as it was."""
    first: BaseException | None = None
    try:
        yield
    except BaseExceptionGroup as group:
        first = group.exceptions[0]
    if first is not None:
        raise first from first.__cause__  # nor the group as what it was raised in
