"""The byte limit of a save, and what the save reports about its writing."""

import asyncio
import contextlib
import contextvars
import ctypes
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from gockpt_jax.storage.files.checksums import Checksums
from gockpt_jax.telemetry import events
from gockpt_jax.transfer.budget import ByteBudget

# After so many bytes of chunks the allocator is told to give back what compressing them has freed.
_TRIM_BYTES = 32 * 2**20


# Of glibc; other allocators give back by themselves, or never.
_malloc_trim: Callable[[int], Any] = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)


@dataclasses.dataclass
class WriteStats:
    """What one save wrote. Complete once the save's future has resolved.

    Attributes:
      written_bytes: Bytes of the shards that this process has written, before compression.
      peak_inflight_bytes: The most bytes that were in flight at one time, with what is held
        beside them: see `LeafWriter`.
      write_secs: Seconds during which at least one chunk was being written, or files were being
        synced at the end; the time spent waiting for shards to arrive is not in it.
      checksums: Of what this process has written.
      is_given_up: Whether nobody wants it any more: from then on no chunk begins to be written.
    """

    written_bytes: int = 0
    peak_inflight_bytes: int = 0
    write_secs: float = 0.0
    checksums: Checksums = dataclasses.field(default_factory=Checksums)
    is_given_up: bool = False

    def require_wanted(self) -> None:
        """Before something is written; RuntimeError if nobody wants it any more."""
        if self.is_given_up:
            raise RuntimeError("the save has failed elsewhere, so no more of it is written")


_collected: contextvars.ContextVar[WriteStats | None] = contextvars.ContextVar(
    "gockpt_write_stats", default=None
)


@contextlib.contextmanager
def collecting(stats: WriteStats) -> Iterator[None]:
    """Collects the statistics of the one save that is begun inside; filled while the save runs.

    Saves that another task or thread begins at the same time, such as other items of a checkpoint,
    are not in them.
    """
    before = _collected.get()
    try:
        _collected.set(stats)  # in here, as an interrupt comes behind it
        yield
    finally:
        _collected.set(before)


def collected_here() -> WriteStats:
    """The statistics that are collected for the save that is being begun, if any are."""
    return _collected.get() or WriteStats()


class WriteBudget:
    """Admits chunks to the disk, first come first served, up to a number of bytes.

    Belongs to one event loop. A chunk larger than the limit is admitted when nothing else is in
    flight.

    Args:
      limit_bytes: The most bytes in flight.
      stats: Is kept up to date.
      host: Accounts for them beside all else that saves hold; None: nobody does.
    """

    def __init__(self, limit_bytes: int, stats: WriteStats, host: ByteBudget | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._host = ByteBudget(None) if host is None else host
        self.stats = stats
        self._inflight_bytes = 0
        self._busy_since_secs = 0.0
        self._busy = contextlib.ExitStack()
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self._untrimmed_bytes = 0

    @contextlib.asynccontextmanager
    async def admit(self, nbytes: int, held: int) -> AsyncIterator[None]:
        """Waits until a chunk of `nbytes` may take `held` bytes; on success it is written."""
        # Waiting inside the turn keeps a large chunk from being overtaken by small ones for ever.
        async with self._turn:
            while self._inflight_bytes and self._inflight_bytes + held > self._limit_bytes:
                self._freed.clear()
                await self._freed.wait()
            self.stats.require_wanted()
            self._add(held)
        try:
            yield
            self.stats.written_bytes += nbytes
        finally:
            self._remove(held)

    async def trim(self, nbytes: int) -> None:
        """Gives memory back to the system, once enough of it has been freed.

        A compressed chunk is made of small blocks, by whichever thread of TensorStore's; what was
        freed stays with that thread's heap. Without this, a chunk for each thread is kept.

        Args:
          nbytes: Of a chunk that has been compressed and written.
        """
        self._untrimmed_bytes += nbytes
        if self._untrimmed_bytes >= _TRIM_BYTES:
            self._untrimmed_bytes = 0
            await asyncio.to_thread(_malloc_trim, 0)

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Counts what happens inside as writing."""
        started_at = time.perf_counter()
        with events.span(events.SPAN_WRITE):
            yield
        self.stats.write_secs += time.perf_counter() - started_at

    def _add(self, nbytes: int) -> None:
        self._host.add(nbytes)
        if not self._inflight_bytes:
            self._busy_since_secs = time.perf_counter()
            self._busy.enter_context(events.span(events.SPAN_WRITE))
        self._inflight_bytes += nbytes
        peak_bytes = max(self.stats.peak_inflight_bytes, self._inflight_bytes)
        self.stats.peak_inflight_bytes = peak_bytes

    def _remove(self, nbytes: int) -> None:
        self._host.release(nbytes)
        self._inflight_bytes -= nbytes
        if not self._inflight_bytes:
            self.stats.write_secs += time.perf_counter() - self._busy_since_secs
            self._busy.close()
        self._freed.set()
