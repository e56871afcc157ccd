"""The flat buffers in which chunks travel, laid out from global facts alone.

Chunks that lie alike on the devices (cut over the same axes of one mesh) and have one dtype share a
buffer, each starting at a multiple of 64 bytes; large ones have one of their own, unless they are
many, and on a GPU. R replicas share the transfer: each moves a slice of about 1 / R of a large
chunk, unless that is less than 1 MiB, and the buffers of small ones in turn. Only replicas within a
process do: what a process writes is what Orbax has it write.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from gockpt_jax.transfer.budget import batches
from gockpt_jax.transfer.chunks import MAX_CHUNK_BYTES, Chunk, can_be_cut
from gockpt_jax.transfer.host_memory import GPUS

ALIGNMENT_BYTES = 64
"""What the CPU backend asks of memory that it takes as it is."""

LARGE_BYTES = 8 * 2**20
"""From here on a chunk has a buffer of its own."""

PAGE_BYTES = 4096
"""Where large chunks share a buffer, each starts at a multiple of this: files are written from
there without another copy."""

_FEW_ON = dict.fromkeys(GPUS, 16)
"""About how many buffers a block that is copied has, where each costs more than its bytes: behind a
step that has not run yet, a GPU's driver takes some fifty transfers, and for the next one it holds
the trainer's thread until the step has run (docs/decisions/0034)."""

_SHARED_BYTES = 2**30
"""A buffer of large chunks takes no more of them from here on: its memory is free when the last of
them is."""

_MANY = 256
"""No buffer has more small chunks: how long a compiler takes for one grows with their square."""

MIN_SLICE_BYTES = 2**20
"""Replicas do not share a transfer in smaller slices."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """How chunks lie on the devices.

    Attributes:
      mesh: Of the program; `None` on a single device.
      sharded: The axes over which their arrays are cut, in the mesh's order.
      split: Axes of replicas within one process, which share the transfer.
      everywhere: Whether each process takes a copy.
      device: The single device.
    """

    mesh: Mesh | None
    sharded: tuple[str, ...]
    split: tuple[str, ...]
    everywhere: bool
    device: jax.Device | None

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Those that the program runs on, in the mesh's order."""
        if self.mesh is None:
            assert self.device is not None
            return (self.device,)
        return tuple(self.mesh.devices.flat)

    @property
    def replicas(self) -> int:
        """How many of them share the transfer."""
        return math.prod(self.mesh.shape[a] for a in self.split) if self.mesh is not None else 1

    def owners(self) -> np.ndarray:
        """The devices of this process that have what it writes: a row per shard, its replicas.

        Rows are in the order of the shards that a process owns (`Source.owned`).
        """
        process = jax.process_index()
        if self.mesh is None or self.everywhere:
            local = [d for d in self.devices if d.process_index == process]
            return np.array(local[:1], object).reshape(-1, 1)
        names, shape = list(self.mesh.axis_names), self.mesh.devices.shape
        first = [names.index(a) for a in (*self.sharded, *self.split)]
        rest = [i for i in range(len(names)) if i not in first]
        others = math.prod(shape[i] for i in rest)
        grid = self.mesh.devices.transpose(*first, *rest).reshape(-1, self.replicas, others)[..., 0]
        return grid[[row[0].process_index == process for row in grid]]


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A flat buffer of chunks.

    Attributes:
      place: How its chunks lie.
      dtype: Of the elements.
      chunks: Positions of the chunks.
      offsets: Where each starts, in elements.
      size: Elements, padding included.
      slice_size: Elements that a replica moves: all, or its slice; the last slice overlaps the one
        before it.
      turn: Which replica moves it, if it is not sliced.
    """

    place: Place
    dtype: Any
    chunks: tuple[int, ...]
    offsets: tuple[int, ...]
    size: int
    slice_size: int
    turn: int = 0

    @property
    def is_sliced(self) -> bool:
        """Whether replicas move a slice each."""
        return self.slice_size < self.size

    def senders(self) -> np.ndarray:
        """The devices that move it: a row per shard, a column per slice."""
        owners = self.place.owners()
        turn = self.turn % self.place.replicas
        return owners if self.is_sliced else owners[:, turn : turn + 1]

    @property
    def staged_bytes(self) -> int:
        """Bytes on one device."""
        return self.slice_size * int(self.dtype.itemsize)

    def slice_start(self, number: int) -> int:
        """Where a replica's slice starts."""
        return min(number * self.slice_size, self.size - self.slice_size)


def lay_out(chunks: Sequence[Chunk], *, copied: bool = True) -> list[Buffer]:
    """Assigns chunks to buffers, in order.

    Args:
      chunks: That can be cut; the positions of the others are in no buffer.
      copied: Whether all of them are in any case; else a large one that is alone need not be.
    """
    alike: dict[tuple[Place, Any], list[int]] = defaultdict(list)
    for n, chunk in enumerate(chunks):
        if can_be_cut(chunk.source):
            place = place_of(chunk.source.travels_by, everywhere=chunk.everywhere)
            alike[place, np.dtype(chunk.source.stored_dtype)].append(n)
    shared_bytes = _shared_bytes(chunks, alike) if copied else 0
    return [
        _buffer(place, dtype, chunks, positions, turn)
        for (place, dtype), together in alike.items()
        for turn, positions in enumerate(_fill(chunks, together, place.replicas, shared_bytes))
    ]


def padded_bytes(chunk: Chunk) -> int:
    """What a chunk takes of a buffer that it may share."""
    is_page = chunk.num_bytes >= LARGE_BYTES and _platform(chunk.source.travels_by) in _FEW_ON
    return _padded(chunk.num_bytes, PAGE_BYTES if is_page else ALIGNMENT_BYTES)


@functools.cache
def _platform(sharding: jax.sharding.Sharding) -> str:
    device: Any = next(iter(sharding.device_set))
    return str(device.platform)


def _shared_bytes(chunks: Sequence[Chunk], alike: Mapping[tuple[Place, Any], Sequence[int]]) -> int:
    """How full a buffer of large chunks is to be; 0 where each has one of its own."""
    positions = [n for together in alike.values() for n in together]
    platforms = {place.devices[0].platform for place, _ in alike}
    few = min((_FEW_ON.get(platform, len(positions)) for platform in platforms), default=0)
    if len(positions) <= few:
        return 0
    total = sum(padded_bytes(chunks[n]) for n in positions)
    return min(_SHARED_BYTES, -(-total // few))


def _fill(
    chunks: Sequence[Chunk], positions: Sequence[int], replicas: int, shared_bytes: int
) -> list[list[int]]:
    """Those that share a buffer: small ones, and large ones until they are `shared_bytes`."""
    large_bytes = min(LARGE_BYTES, MIN_SLICE_BYTES * replicas) if replicas > 1 else LARGE_BYTES
    weights = {n: padded_bytes(chunks[n]) for n in positions}
    large = [n for n in positions if weights[n] >= large_bytes]
    small = [n for n in positions if weights[n] < large_bytes]
    limit = max(MAX_CHUNK_BYTES, shared_bytes)
    if replicas > 1:  # a buffer for each of them
        total = sum(weights[n] for n in small)
        limit = min(limit, max(MIN_SLICE_BYTES, -(-total // replicas)))
    of_large = _until_full(large, weights, shared_bytes if replicas == 1 else 0)
    return [*of_large, *batches(small, weights.__getitem__, limit, _MANY)]


def _until_full(
    positions: Sequence[int], weights: Mapping[int, int], full_bytes: int
) -> list[list[int]]:
    """Neighbours, each time until they are that many bytes."""
    filled: list[list[int]] = []
    room = 0
    for n in positions:
        if room <= 0:
            filled.append([])
            room = full_bytes
        filled[-1].append(n)
        room -= weights[n]
    return filled


def _buffer(
    place: Place, dtype: Any, chunks: Sequence[Chunk], positions: list[int], turn: int
) -> Buffer:
    unit = ALIGNMENT_BYTES // dtype.itemsize
    offsets, size = [], 0
    for n in positions:
        offsets.append(size)
        size += padded_bytes(chunks[n]) // dtype.itemsize
    slice_size = size
    if len(positions) == 1:
        slice_size = size = chunks[positions[0]].size  # nothing follows it
        if size * dtype.itemsize >= MIN_SLICE_BYTES * place.replicas:
            slice_size = min(size, _padded(-(-size // place.replicas), unit))
    return Buffer(place, dtype, tuple(positions), tuple(offsets), size, slice_size, turn)


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


@functools.cache
def place_of(sharding: jax.sharding.Sharding, *, everywhere: bool = False) -> Place:
    """How an array of this sharding lies."""
    if not isinstance(sharding, NamedSharding):
        (device,) = sharding.device_set
        return Place(None, (), (), everywhere, device)
    mesh, used = plain_mesh(sharding.mesh), set()
    for entry in sharding.spec:
        used |= set(entry if isinstance(entry, tuple) else (entry,)) - {None}
    sharded = tuple(a for a in mesh.axis_names if a in used)
    split = () if everywhere else tuple(a for a in _local_axes(mesh) if a not in used)
    return Place(mesh, sharded, split, everywhere, None)


def plain_mesh(mesh: Any) -> Mesh:
    """The same devices and names, without what the user's mesh says of types."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _local_axes(mesh: Mesh) -> list[str]:
    """Axes along which there is one process."""
    process = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
    return [
        name
        for i, name in enumerate(mesh.axis_names)
        if (process == process.take([0], axis=i)).all()
    ]
