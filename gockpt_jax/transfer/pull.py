"""Pulls: device buffers that nobody donates, on their way to host memory."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from gockpt_jax.compiling import unwatched
from gockpt_jax.errors import is_out_of_memory
from gockpt_jax.telemetry import events
from gockpt_jax.transfer.boxes import Index
from gockpt_jax.transfer.chunks import in_host_memory
from gockpt_jax.transfer.host_memory import PINNED_LIMIT
from gockpt_jax.transfer.meter import LINK

_log = logging.getLogger("gockpt_jax")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class HostChunk:
    """One shard, or rows of one, on the host.

    Attributes:
      index: The shard's position in the global array.
      data: Its elements; a view of pinned memory where the platform has it. Rows alone are flat.
    """

    index: Index
    data: np.ndarray


class Pull(Generic[T]):
    """A transfer, which starts as this is made; that returns at once.

    Args:
      sources: Buffers that no later step donates, staged copies or retained values; of one device
        each. A global array would be moved by a program on the compute stream, behind the steps.
      unpack: Makes the result of what arrives.
    """

    def __init__(self, sources: Sequence[jax.Array], unpack: Callable[[list[np.ndarray]], T]):
        self._sources = sources
        with unwatched():
            self._buffers: Sequence[Any] = [start_buffer(source) for source in sources]
        self._unpack = unpack

    def is_ready(self) -> bool:
        """Whether `result` would return at once."""
        return all(buffer.is_ready() for buffer in self._buffers)

    def result(self) -> T:
        """Waits for the transfer; called on the worker thread."""
        sent = [n for n, source in enumerate(self._sources) if not in_host_memory(source.sharding)]
        try:
            LINK.begin([self._sources[n] for n in sent], self.is_ready())
            # On pinned memory and on the CPU backend this is a view: the array it views is ours.
            with events.span(events.SPAN_LAND), unwatched():
                data = [*map(_read, self._buffers, self._sources)]
            devices = {device for n in sent for device in self._sources[n].devices()}
            LINK.end([data[n] for n in sent], len(devices))
        finally:  # the device's memory is free before the budget says so
            self._sources = self._buffers = ()
        return self._unpack(data)


ChunkPull = Pull[list[list[HostChunk]]]
"""Of chunks: for each, its flat elements in each shard that this process owns."""


def reshard(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """Gives a retained value the devices of the leaf that it replays, outside the step."""
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    with unwatched():  # JAX may take it by the host, and from 0.12 on asks the guard there
        moved: jax.Array = jax.device_put(array, sharding)
    return moved


def start_buffer(buffer: jax.Array) -> jax.Array:
    """Starts moving a buffer of one device; what it returns is read on the host."""
    pinned = _pinned(buffer)
    if pinned is None:
        if not in_host_memory(buffer.sharding):
            buffer.copy_to_host_async()
        return buffer
    try:
        there: jax.Array = jax.device_put(buffer, pinned)
        return there
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return buffer  # sent when it is read: ordinary memory is had through another such pool


def _pinned(buffer: jax.Array) -> jax.sharding.Sharding | None:
    """Where a buffer of one device goes first; `None`: nowhere, or it is there."""
    (device,) = buffer.devices()
    kind = None if in_host_memory(buffer.sharding) else host_memory_kind(device)
    return None if kind is None else SingleDeviceSharding(device, memory_kind=kind)


def _read(buffer: jax.Array, source: jax.Array) -> np.ndarray:
    """What has arrived; if it could not, for want of pinned memory, by way of ordinary memory.

    Whether the call has said so or what it has returned does depends on the version of JAX.
    """
    if buffer is not source or _pinned(source) is None:
        try:
            return np.asarray(buffer)
        except jax.errors.JaxRuntimeError as error:
            if buffer is source or not is_out_of_memory(error):
                raise
    found = np.asarray(source)  # raises if the error is its own
    _warn_of_a_full_pool()
    return found


@functools.cache  # once
def _warn_of_a_full_pool() -> None:
    _log.warning(
        "there is no more pinned memory, so part of a save leaves through ordinary memory, which "
        "is many times slower. XLA pins as many GiB for each GPU as `%s` says when JAX starts, or "
        "64: set it to more than a save takes of one",
        PINNED_LIMIT,
    )


@functools.cache
def host_memory_kind(device: jax.Device) -> str | None:
    """The memory a device transfers to by itself: pinned where there is such, else `None`.

    On the CPU backend a device buffer is host memory already.
    """
    kinds = {memory.kind for memory in device.addressable_memories()}
    kind = "pinned_host" if device.platform != "cpu" and "pinned_host" in kinds else None
    _log.debug("pulls from %s go to %s", device, kind or "host memory by copy_to_host_async")
    return kind
