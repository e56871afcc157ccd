"""Shards are written in the order in which their bytes come, so many at a time."""

import asyncio
import contextlib
import functools
from typing import Any

from gockpt_jax.storage.files import grid
from gockpt_jax.storage.writing.host_array import HostShard
from gockpt_jax.storage.writing.leaf_writer import LeafWriter

_DIRECT_AT_ONCE = 64
"""All others are entries of a queue. What is begun of a write is some thirty Python objects, and
the garbage collector counts those that are there for long (docs/scale.md). But TensorStore has all
that have come: what a database is given at a time it writes with one index."""

_Arrival = tuple[LeafWriter, HostShard, grid.Box]


class Arrivals:
    """The shards of one save; belongs to its event loop.

    Args:
      count: Of all that will be expected.
      group: Writes them, and fails with the first that fails.
      is_direct: Whether all are written without TensorStore.
    """

    def __init__(self, count: int, group: asyncio.TaskGroup, *, is_direct: bool):
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._come: asyncio.Queue[_Arrival] = asyncio.Queue()
        self._room = asyncio.Semaphore(_DIRECT_AT_ONCE if is_direct else count)
        group.create_task(self._begin(count))

    def expect(self, writer: LeafWriter, shard: HostShard, box: grid.Box) -> None:
        """Has a shard written as soon as its bytes have come, from whichever thread."""
        promise = writer.promised(shard)
        promise.add_done_callback(functools.partial(self._has_come, (writer, shard, box)))

    def _has_come(self, arrival: _Arrival, _: Any) -> None:
        # It raises where the loop is closed, for the save has failed meanwhile: nobody waits then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._come.put_nowait, arrival)

    async def _begin(self, count: int) -> None:
        for _ in range(count):
            arrival = await self._come.get()
            await self._room.acquire()
            self._group.create_task(self._write(*arrival))

    async def _write(self, writer: LeafWriter, shard: HostShard, box: grid.Box) -> None:
        try:
            await writer.write_shard(shard, box)
        finally:
            self._room.release()
