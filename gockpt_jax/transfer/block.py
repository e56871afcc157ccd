"""A block: the chunks that leave together, staged by one program per mesh and pulled as buffers.

The program runs on all devices of the mesh at once and takes whole arrays, however many devices
there are: a dispatch per block, not one per shard. Each device packs what it holds; nothing moves
between devices, but for retained values that lie otherwise than the leaf that they replay.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gockpt_jax.compiling import REMEMBERED, Programs, unwatched
from gockpt_jax.telemetry import events
from gockpt_jax.transfer.chunks import Chunk, Source, in_host_memory, is_key_type
from gockpt_jax.transfer.layout import LARGE_BYTES, Buffer, lay_out
from gockpt_jax.transfer.packing import compile_packing, on_its_devices
from gockpt_jax.transfer.pull import ChunkPull, HostChunk, Pull, reshard
from gockpt_jax.transfer.staging import stage

_programs = Programs("gockpt-compile-copies", compile_packing)
_ALIKE = 64
"""Of how many calls a block knows the shardings again: it stages the same few sets of arrays."""


def block_of(
    chunks: Sequence[Chunk], arrays: Sequence[int] | None = None, *, donatable: bool = True
) -> "Block":
    """The block of these chunks; the same one whenever the same chunks leave together.

    Args:
      chunks: What leaves.
      arrays: Of each chunk, the number of its array: rows of one array are cut from one argument.
        `None`: each has an array of its own.
      donatable: Whether a later step may donate the arrays. If not, whole and large ones need no
        staging.
    """
    numbers = range(len(chunks)) if arrays is None else arrays
    first: dict[tuple[int, Source], int] = {}
    of_array = [(i, chunk.source) for i, chunk in zip(numbers, chunks, strict=True)]
    same = tuple(first.setdefault(array, n) for n, array in enumerate(of_array))
    return _made(tuple(chunks), same, donatable)


@dataclasses.dataclass(frozen=True, slots=True)
class _Packing:
    """What one program packs, on one mesh.

    Attributes:
      arguments: Of each array that it takes, the position of a chunk that is cut from it, and where
        it must be brought before; `None`: it is on the program's devices.
      made_from: What the program is made from, as `compile_packing` takes it.
    """

    arguments: tuple[tuple[int, jax.sharding.Sharding | None], ...]
    made_from: tuple[Any, ...]


class Block:
    """Chunks that leave together. Made by `block_of`.

    What depends on the chunks alone is worked out here once: `stage` and `start_pull` are called
    on the trainer's thread.

    Attributes:
      chunks: What leaves.
      staged_bytes: What staging takes on one device, padding included.
      held_bytes: What is there until it has been pulled: staged copies, and arrays that need none.
    """

    def __init__(self, chunks: tuple[Chunk, ...], arrays: tuple[int, ...], donatable: bool):
        self.chunks = chunks
        self._arrays = arrays  # of each chunk, the first that is cut from the same array
        self._donatable = donatable
        # Shardings that were found to be those of the chunks, by their ids; alive, so are these.
        self._alike: dict[tuple[int, ...], list[Any]] = {}
        laid_out = lay_out(chunks, copied=donatable)
        buffers = [b for b in laid_out if donatable or not _needs_no_copy(b, chunks)]
        # Two meshes of the same devices are two: shards of one are not those of the other.
        by_mesh: dict[Any, list[Buffer]] = collections.defaultdict(list)
        for buffer in buffers:
            if any(d.process_index == jax.process_index() for d in buffer.place.devices):
                by_mesh[buffer.place.mesh, buffer.place.device].append(buffer)
        self._packings = [self._packing(of_mesh) for of_mesh in by_mesh.values()]
        # As the programs return them, each with the devices that move it: a row per shard.
        self._sent = [(b, b.senders()) for of_mesh in by_mesh.values() for b in of_mesh]
        self._compiled: list[Any] = []
        packed = {n for b in buffers for n in b.chunks}
        self._whole = [n for n in range(len(chunks)) if n not in packed]
        # Of all that is staged, the devices that move it.
        self._senders = [[*senders.flat] for _, senders in self._sent]
        self._senders += [[*chunks[n].owned] for n in self._whole]
        whole = [chunks[n].source for n in self._whole]
        on_device = [s for s in whole if not in_host_memory(s.travels_by)]
        copied = [s for s in on_device if donatable or not _lies_in_place(s)]
        packed_bytes = sum(b.staged_bytes for b in buffers)
        self.staged_bytes = packed_bytes + sum(s.shard_bytes for s in copied)
        self.held_bytes = packed_bytes + sum(s.shard_bytes for s in on_device)

    def _packing(self, buffers: Sequence[Buffer]) -> _Packing:
        packed = [n for buffer in buffers for n in buffer.chunks]
        taken = {n: self.chunks[n].source for n in (self._arrays[m] for m in packed)}
        number = {n: i for i, n in enumerate(taken)}  # of each, the program's argument
        parts = tuple((self.chunks[n], number[self._arrays[n]]) for n in packed)
        arguments = tuple(
            (n, None if on_its_devices(s) else s.travels_by) for n, s in taken.items()
        )
        made_from = (tuple(taken.values()), parts, tuple(buffers))
        return _Packing(arguments, made_from)

    @functools.cached_property
    def is_resharded(self) -> bool:
        """Whether its chunks lie otherwise than their arrays: staging them may be a collective."""
        return not all(_lies_in_place(chunk.source) for chunk in self.chunks)

    def compile_ahead(self) -> None:
        """Has its programs compiled, on a thread of their own."""
        for packing in self._packings:
            _programs.wanted(*packing.made_from)

    def programs(self) -> list[Any]:
        """Its programs, compiled; waits for them, at the first call."""
        if not self._compiled:
            self._compiled = [_programs.needed(*packing.made_from) for packing in self._packings]
        return self._compiled

    def is_cut_from(self, arrays: Sequence[jax.Array]) -> bool:
        """Whether arrays lie as those that it was made for.

        Args:
          arrays: Of each chunk, the one that it would be cut from; alive or not.
        """
        shardings = [array.sharding for array in arrays]
        # An executable has the same objects for its results each time.
        key = tuple(map(id, shardings))
        if key not in self._alike:
            if any(s != c.source.sharding for s, c in zip(shardings, self.chunks, strict=True)):
                return False
            if len(self._alike) == _ALIKE:
                self._alike.clear()
            self._alike[key] = shardings
        return True

    def stage(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Copies the chunks into fresh buffers on their devices; returns at once.

        Args:
          arrays: Of each chunk, the array that it is cut from.

        Returns:
          Buffers that are nobody else's; or, for what need not be staged, the array itself.
        """
        staged: list[jax.Array] = []
        for packing, program in zip(self._packings, self.programs(), strict=True):
            arguments = [
                arrays[n] if place is None else reshard(arrays[n], place)
                for n, place in packing.arguments
            ]
            staged += _copied(packing, program, arguments)
        whole = [arrays[n] for n in self._whole]
        for n, array in zip(self._whole, stage(whole) if self._donatable else whole, strict=True):
            source = self.chunks[n].source
            staged.append(array if _lies_in_place(source) else reshard(array, source.travels_by))
        if self._donatable:
            taken = set(map(id, arrays))
            assert taken.isdisjoint(map(id, staged)), "a step may donate a staged buffer"
        return staged

    def start_pull(self, staged: Sequence[jax.Array]) -> ChunkPull:
        """Starts moving staged buffers to the host; returns at once."""
        sent: list[jax.Array] = []
        for array, devices in zip(staged, self._senders, strict=True):
            at = {s.device: s.data for s in array.addressable_shards}
            sent += [at[device] for device in devices]
        return Pull(sent, self._unpack)

    def _unpack(self, found: list[np.ndarray]) -> list[list[HostChunk]]:
        chunks: list[list[HostChunk]] = [[] for _ in self.chunks]
        boxes = [[*chunk.owned.values()] for chunk in self.chunks]
        arrived = iter(found)
        for buffer, senders in self._sent:
            for number, row in enumerate(senders):
                slices = list(itertools.islice(arrived, len(row)))
                for n, offset in zip(buffer.chunks, buffer.offsets, strict=True):
                    data = _join(buffer, slices, offset, self.chunks[n].size)
                    chunks[n].append(HostChunk(boxes[n][number], data))
        for n in self._whole:
            part = slice(self.chunks[n].start, self.chunks[n].stop)
            chunks[n] = [HostChunk(i, next(arrived).reshape(-1)[part]) for i in boxes[n]]
        return chunks


_made = functools.lru_cache(REMEMBERED)(Block)


def stage_and_pull(block: Block, arrays: Sequence[jax.Array]) -> ChunkPull:
    """Copies a block on the device and starts moving the copy to the host."""
    with events.span(events.SPAN_STAGE):
        staged = block.stage(arrays)
    with events.span(events.SPAN_PULL):
        return block.start_pull(staged)


def _copied(packing: _Packing, program: Any, arrays: Sequence[Any]) -> list[jax.Array]:
    with unwatched():
        try:
            copies: list[jax.Array] = program(*arrays)
        except ValueError:  # before dispatch: some lie in memory as the user asked (`Format`)
            layouts = tuple(None if is_key_type(x.dtype) else x.format.layout for x in arrays)
            copies = _programs.needed(*packing.made_from, layouts)(*arrays)
    return copies


def _needs_no_copy(buffer: Buffer, chunks: Sequence[Chunk]) -> bool:
    """Whether a buffer would be a copy of one large array that nobody donates."""
    first = chunks[buffer.chunks[0]]  # alone there, if it is large
    return (
        not buffer.is_sliced and first.is_whole and first.num_bytes >= LARGE_BYTES
        and _lies_in_place(first.source) and not first.source.is_key
    )  # fmt: skip


def _lies_in_place(source: Source) -> bool:
    return source.sharding.is_equivalent_to(source.travels_by, len(source.shape))


def _join(buffer: Buffer, slices: Sequence[np.ndarray], offset: int, size: int) -> np.ndarray:
    """Elements of a buffer: a view, or a copy where replicas have moved slices of one chunk."""
    if len(slices) == 1:
        return slices[0][offset : offset + size]
    joined = np.empty(size, slices[0].dtype)
    for number, data in enumerate(slices):
        start = buffer.slice_start(number)
        joined[start : start + data.size] = data
    return joined
