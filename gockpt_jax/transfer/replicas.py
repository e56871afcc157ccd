"""Replicas share what leaves: each takes a slice, and the process that takes it writes it.

Orbax cuts what R replicas hold into R slices along one axis, one chunk of the checkpoint each (its
`use_replica_parallel`). Here such an array travels by the shards of a finer sharding: the axes of
the mesh that its own leaves unused cut that axis too. So what a process takes is what Orbax has it
write, a chunk is never of two processes, and everything between the device and the disk is as for
any other sharded array.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gockpt_jax.compiling import REMEMBERED
from gockpt_jax.transfer.boxes import Index, explicit, within
from gockpt_jax.transfer.chunks import Source, can_be_cut, is_key_type
from gockpt_jax.transfer.pull import owned_shards

MIN_SLICE_ELEMENTS = 2**19
"""Smaller slices cost more than they save: a transfer and a chunk each. 1 MiB of two bytes each; by
elements, so that a parameter and its moments are shared alike, whatever their dtypes."""

Shape = tuple[int, ...]
WriteShape = Callable[[Shape, Any, jax.sharding.Sharding], Shape]
"""From an array's shape, dtype and sharding to the shape of what one replica writes of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What this process takes and writes of an array as one: a shard, or a replica's slice.

    Attributes:
      index: Its position in the global array.
      shard: The shard that holds it, on its device.
      start: Where it begins in the shard, in each dimension.
      shape: Its own.
    """

    index: Index
    shard: jax.Array
    start: Shape
    shape: Shape


@dataclasses.dataclass(frozen=True, slots=True)
class Replicas:
    """How replicas share arrays: alike on all processes, from global facts.

    Attributes:
      write_shape: What the checkpoint's chunks are cut from. Where that is the whole shard, the
        first replica takes it.
    """

    write_shape: WriteShape
    _owned_by_layout: dict[Any, tuple[Sequence[Index], int]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    _sources: dict[Any, Source] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def _finer(self, array: Any) -> NamedSharding | None:
        """The sharding by slices, if the replicas of an array share it."""
        sharding = array.sharding
        if not isinstance(sharding, NamedSharding):
            return None
        finer = _by_slices(self.write_shape, sharding, array.shape, array.dtype)
        if finer is None or Source.of(array, finer).shard_size < MIN_SLICE_ELEMENTS:
            return None
        return finer

    def source(self, array: Any) -> Source:
        """An array as it travels by itself: by its own shards, or by finer ones.

        Args:
          array: Or its specification; it may have been donated.
        """
        key = (array.shape, array.dtype, array.sharding)
        found = self._sources.get(key)
        if found is None:
            found = self._sources[key] = Source.of(array, self._finer(array))
        return found

    def boxes(self, array: jax.Array) -> list[Index]:
        """Positions of what this process writes, in the array as it is stored."""
        return list(self._owned(array)[0])

    def pieces(self, array: jax.Array) -> list[Piece]:
        """What this process writes, in the same order, with the shards that hold it.

        Args:
          array: Alive; no typed keys.
        """
        finer = self._finer(array)
        if finer is None:
            return [
                Piece(s.index, s.data, (0,) * s.data.ndim, s.data.shape)
                for s in owned_shards(array)
            ]
        shards = {s.device: s for s in array.addressable_shards}
        shape = finer.shard_shape(array.shape)
        found = []
        for device, index in _local_boxes(finer, array.shape).items():
            shard = shards[device]
            held = explicit(shard.index, array.shape)
            start = tuple(s.start for s in within(explicit(index, array.shape), held))
            found.append(Piece(index, shard.data, start, shape))
        return found

    def owned_bytes(self, array: jax.Array) -> int:
        """Bytes that this process writes."""
        return self._owned(array)[1]

    def _owned(self, array: jax.Array) -> tuple[Sequence[Index], int]:
        """Positions and bytes of what this process writes: asked for every leaf at every seal."""
        key = (array.shape, array.dtype, array.sharding)
        found = self._owned_by_layout.get(key)
        if found is None:
            finer = self._finer(array)
            # Of keys too these are positions in the array as it is stored.
            boxes = (
                tuple(s.index for s in owned_shards(array)) if finer is None
                else tuple(_local_boxes(finer, array.shape).values())
            )  # fmt: skip
            found = self._owned_by_layout[key] = boxes, self.source(array).shard_bytes * len(boxes)
        return found

    def owned_bytes_at_most(self, array: Any) -> int:
        """As `owned_bytes`, of donated arrays too; too many where processes hold the same."""
        source = self.source(array)
        shards = math.prod(array.shape) // max(math.prod(source.placed.shard_shape(array.shape)), 1)
        return source.shard_bytes * int(min(shards, len(source.placed.addressable_devices)))


def _local_boxes(sharding: NamedSharding, shape: Shape) -> Mapping[jax.Device, Index]:
    """Where the shards of this process's devices lie, in the mesh's order."""
    found: Any = sharding.addressable_devices_indices_map(shape)
    return dict(found)


@functools.lru_cache(REMEMBERED)
def _by_slices(
    write_shape: WriteShape, sharding: NamedSharding, shape: Shape, dtype: Any
) -> NamedSharding | None:
    """A sharding whose shards are the slices that replicas write; `None` if there are none."""
    if is_key_type(dtype) or not can_be_cut(Source(shape, dtype, sharding, sharding)):
        return None
    whole, wanted = sharding.shard_shape(shape), write_shape(shape, dtype, sharding)
    cut = [i for i, (n, w) in enumerate(zip(whole, wanted, strict=True)) if n != w]
    entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    names = [e if isinstance(e, tuple) else (e,) * (e is not None) for e in entries]
    used = set().union(*names)
    rest = [a for a, n in sharding.mesh.shape.items() if a not in used and n > 1]
    if len(cut) != 1 or whole[cut[0]] != wanted[cut[0]] * math.prod(
        sharding.mesh.shape[a] for a in rest
    ):
        return None
    names[cut[0]] = (*names[cut[0]], *rest)
    return NamedSharding(
        sharding.mesh, PartitionSpec(*(n or None for n in names)), memory_kind=sharding.memory_kind
    )
