"""Chunks: which elements of which array travel. Pure arithmetic on shapes and shardings.

A chunk is a range of rows of an array's local shards, the same rows on every device. A shard is
taken as a list of rows: its leading axes as one, so that a range of rows is a run of consecutive
elements, wherever it is cut. Every process cuts alike, from global facts.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from gockpt_jax import _compat
from gockpt_jax.transfer.boxes import Index

MAX_CHUNK_BYTES = 64 * 2**20
"""No part of a leaf that is cut is larger, and no buffer of small chunks, but on a GPU."""

MIN_CHUNK_BYTES = 2**20
"""A leaf is not cut into smaller ones: each costs a transfer."""

_ROWS_PER_PART = 8  # so many at least, so that parts are equal within an eighth


@dataclasses.dataclass(frozen=True)
class Source:
    """An array as a chunk's program sees it; what it looks up in the sharding is looked up once.

    Attributes:
      shape: Global.
      dtype: Of its elements; typed PRNG keys travel as their key data.
      sharding: Where it is.
      travels_by: By whose shards it leaves: its own; where replicas share it, a finer one; of a
        retained value, that of the leaf that it replays.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding
    travels_by: jax.sharding.Sharding

    @classmethod
    def of(cls, array: jax.Array, travels_by: jax.sharding.Sharding | None = None) -> "Source":
        """That of an array, which may have been donated; `None`: by its own shards."""
        return cls(array.shape, array.dtype, array.sharding, travels_by or array.sharding)

    @property
    def is_key(self) -> bool:
        """Whether the elements are typed PRNG keys."""
        return is_key_type(self.dtype)

    @functools.cached_property
    def stored_dtype(self) -> Any:
        """The dtype that travels."""
        return _key_data(self.dtype)[1] if self.is_key else self.dtype

    @functools.cached_property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of what one shard stores."""
        shape = tuple(self.travels_by.shard_shape(self.shape))
        return shape + _key_data(self.dtype)[0] if self.is_key else shape

    @functools.cached_property
    def shard_size(self) -> int:
        """Elements that one shard stores."""
        return math.prod(self.shard_shape)

    @functools.cached_property
    def shard_bytes(self) -> int:
        """Bytes of one shard."""
        return self.shard_size * int(self.stored_dtype.itemsize)

    @functools.cached_property
    def owned(self) -> dict[jax.Device, Index]:
        """The devices whose shards this process writes: of replicas the first one.

        Each with its shard's position in the array as it is stored.
        """
        ours, of_keys = self.travels_by.addressable_devices, len(self.shard_shape) - len(self.shape)
        owned: dict[jax.Device, Index] = {}
        seen: set[str] = set()  # until Python 3.12 a slice is no key
        for device, index in self.travels_by.devices_indices_map(self.shape).items():
            key = str(index)
            if key not in seen and device in ours:
                owned[device] = (*index, *(slice(None),) * of_keys)
            seen.add(key)
        return owned

    @property
    def owned_bytes(self) -> int:
        """Bytes that this process writes."""
        return self.shard_bytes * len(self.owned)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of an array's local shards.

    Attributes:
      source: The array.
      start: Of a shard's elements, row by row, the first.
      stop: The one after the last.
      everywhere: Whether every process needs it (a captured scalar), not only the one that writes.
    """

    source: Source
    start: int
    stop: int
    everywhere: bool = False

    @classmethod
    def whole(cls, source: Source, *, everywhere: bool = False) -> "Chunk":
        """All rows."""
        return cls(source, 0, source.shard_size, everywhere)

    @property
    def is_whole(self) -> bool:
        """Whether it has all rows."""
        return self.stop - self.start == self.source.shard_size

    @property
    def size(self) -> int:
        """Elements, in each shard."""
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """Bytes, in each shard."""
        return self.size * int(self.source.stored_dtype.itemsize)

    @property
    def owned(self) -> dict[jax.Device, Index]:
        """The devices from which this process takes it, as `Source.owned` says."""
        if not self.everywhere:
            return self.source.owned
        ours = self.source.travels_by.addressable_devices_indices_map(self.source.shape)
        return dict.fromkeys([*ours][:1], ())  # any of them has all of a scalar


@functools.cache
def is_key_type(dtype: Any) -> bool:
    """Whether it is one of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


@functools.cache
def _key_data(dtype: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of one key's data."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return tuple(data.shape), data.dtype


def in_host_memory(sharding: jax.sharding.Sharding) -> bool:
    """Whether arrays placed so are on the host, where devices have a memory of their own."""
    kind = sharding.memory_kind
    if kind is None or "host" not in kind:
        return False
    device = next(iter(sharding.device_set))
    return kind != _default_memory_kind(device)


@functools.cache
def _default_memory_kind(device: Any) -> str:
    return str(device.default_memory().kind)


def can_be_cut(source: Source) -> bool:
    """Whether a program of ours can take rows of such an array; others travel as wholes."""
    return (
        isinstance(source.travels_by, NamedSharding | SingleDeviceSharding)
        and not _compat.is_packed(source.dtype)
        and not in_host_memory(source.sharding)
        and source.shard_size > 0
    )


def row_ranges(shape: tuple[int, ...], parts: int) -> list[tuple[int, int]]:
    """Cuts a shard into ranges of rows that are as equal as rows allow.

    Args:
      shape: Of the shard.
      parts: How many; fewer where there are not as many elements.

    Returns:
      Start and stop of each, in elements row by row.

    Example:
      >>> row_ranges((25, 7), 3), row_ranges((2, 50, 3), 4)
      ([(0, 56), (56, 112), (112, 175)], [(0, 75), (75, 150), (150, 225), (225, 300)])
    """
    size, rows = math.prod(shape), 1
    for length in shape:
        if rows >= parts * _ROWS_PER_PART:
            break
        rows *= length
    parts = max(1, min(parts, rows))
    bounds = [n * rows // parts * (size // max(rows, 1)) for n in range(parts + 1)]
    return list(itertools.pairwise(bounds))


def row_size(shape: tuple[int, ...], start: int, stop: int) -> int:
    """The longest rows of which a range consists: as few leading axes as can be are made one."""
    rows = (math.prod(shape[axis:]) for axis in range(len(shape) + 1))
    return next(row for row in rows if row and start % row == 0 and stop % row == 0)
