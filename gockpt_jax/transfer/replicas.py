"""Replicas share what leaves: each takes a slice, and the process that takes it writes it.

Orbax cuts what R replicas hold into R slices along one axis, one chunk of the checkpoint each (its
`use_replica_parallel`). Here such an array travels by the shards of a finer sharding: the axes of
the mesh that its own leaves unused cut that axis too. So what a process takes is what Orbax has it
write, a chunk is never of two processes, and everything between the device and the disk is as for
any other sharded array.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from gockpt_jax.compiling import REMEMBERED
from gockpt_jax.transfer.boxes import Index, explicit, within
from gockpt_jax.transfer.chunks import Source, can_be_cut, is_key_type

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
    _sources: dict[Any, Source] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def source(self, array: Any) -> Source:
        """An array as it travels by itself: by its own shards, or by finer ones.

        Asked for every leaf at every seal, so it is remembered.

        Args:
          array: Or its specification; it may have been donated.
        """
        key = (array.shape, array.dtype, array.sharding)
        found = self._sources.get(key)
        if found is None:
            if len(self._sources) >= REMEMBERED:  # of a loop that saves other shapes each time
                self._sources.clear()
            found = self._sources[key] = Source.of(array, _by_slices(self.write_shape, *key))
        return found

    def pieces(self, array: jax.Array) -> list[Piece]:
        """What this process writes, in the order of `Source.owned`, with the shards that hold it.

        Args:
          array: Alive; no typed keys.
        """
        source, shards = self.source(array), {s.device: s for s in array.addressable_shards}
        found = []
        for device, index in source.owned.items():
            held = explicit(shards[device].index, array.shape)
            start = tuple(s.start for s in within(explicit(index, array.shape), held))
            found.append(Piece(index, shards[device].data, start, source.shard_shape))
        return found


def _by_slices(
    write_shape: WriteShape, shape: Shape, dtype: Any, sharding: jax.sharding.Sharding
) -> NamedSharding | None:
    """A sharding whose shards are the slices that replicas write; `None` if they share nothing."""
    if not isinstance(sharding, NamedSharding) or is_key_type(dtype):
        return None
    if not can_be_cut(Source(shape, dtype, sharding, sharding)):
        return None
    whole, wanted = sharding.shard_shape(shape), write_shape(shape, dtype, sharding)
    cut = [i for i, (n, w) in enumerate(zip(whole, wanted, strict=True)) if n != w]
    entries = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    names = [e if isinstance(e, tuple) else (e,) * (e is not None) for e in entries]
    used = set().union(*names)
    rest = [a for a, n in sharding.mesh.shape.items() if a not in used and n > 1]
    replicas = math.prod(sharding.mesh.shape[a] for a in rest)
    if len(cut) != 1 or whole[cut[0]] != wanted[cut[0]] * replicas:
        return None
    if math.prod(wanted) < MIN_SLICE_ELEMENTS:
        return None
    names[cut[0]] = (*names[cut[0]], *rest)
    spec = PartitionSpec(*(n or None for n in names))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
