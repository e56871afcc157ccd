"""Pulls: device buffers that nobody donates, on their way to host memory."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from gockpt_jax.telemetry import events
from gockpt_jax.transfer.meter import LINK

_log = logging.getLogger("gockpt_jax")

Box = tuple[slice, ...]
"""Position of a shard in the global array."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostChunk:
    """One shard on the host.

    Attributes:
      index: Its position in the global array.
      data: Its elements; a view of pinned memory where the platform has it.
    """

    index: Box
    data: np.ndarray


class Pull:
    """A started transfer of one array's owned shards.

    Args:
      indices: Their positions in the global array.
      shards: What arrives, in host memory where the platform has it.
      sources: What is moved.
    """

    def __init__(self, indices: Sequence[Box], shards: Sequence[Any], sources: Sequence[Any]):
        self._indices = indices
        self._shards = shards
        self._sources = sources

    def is_ready(self) -> bool:
        """Whether `result` would return at once."""
        return all(shard.is_ready() for shard in self._shards)

    def result(self) -> list[HostChunk]:
        """Waits for the transfer; called on the worker thread."""
        LINK.begin(self._sources, self.is_ready())
        # On pinned memory and on the CPU backend this is a view: the array it views is ours.
        with events.span(events.SPAN_LAND):
            data = [np.asarray(shard) for shard in self._shards]
        LINK.end(data, len(self._sources))
        self._sources = ()  # the device's memory is free before the budget says so
        return [HostChunk(index, a) for index, a in zip(self._indices, data, strict=True)]


def owned_shards(array: jax.Array) -> list[jax.Shard]:
    """The local shards that this process writes: of replicated data, the first replica."""
    return [s for s in array.addressable_shards if s.replica_id == 0]


def start_pull(array: jax.Array) -> Pull:
    """Starts moving an array's owned shards to the host; returns at once.

    Per shard: a global array would be moved by a program on the compute stream, behind the steps.

    Args:
      array: A buffer that no later step donates: a staged copy or a retained value.

    Returns:
      The transfer.
    """
    return _start_shards(owned_shards(array))


def start_scalar_pull(array: jax.Array) -> Pull:
    """Starts moving a captured scalar: every process replays with it, so each moves its own."""
    return _start_shards(array.addressable_shards[:1])


def _start_shards(shards: Sequence[jax.Shard]) -> Pull:
    sources = [s.data for s in shards]
    return Pull([s.index for s in shards], [_start(a) for a in sources], sources)


def align(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Gives a retained value the placement of the leaf that it replays, outside the step."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    moved: jax.Array = jax.device_put(array, sharding)
    return moved


def _start(shard: jax.Array) -> jax.Array:
    (device,) = shard.devices()
    kind = host_memory_kind(device)
    if kind is None:
        shard.copy_to_host_async()
        return shard
    pinned: jax.Array = jax.device_put(shard, SingleDeviceSharding(device, memory_kind=kind))
    return pinned


@functools.cache
def host_memory_kind(device: jax.Device) -> str | None:
    """The memory a device transfers to by itself: pinned where there is such, else `None`.

    On the CPU backend a device buffer is host memory already.
    """
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = "pinned_host" if device.platform != "cpu" and "pinned_host" in kinds else None
    _log.debug("pulls from %s go to %s", device, kind or "host memory by copy_to_host_async")
    return kind
