"""A block: the chunks that leave together, staged by one program per mesh and pulled as buffers.

The program runs on all devices of the mesh at once and takes whole arrays, however many devices
there are: a dispatch per block, not one per shard. Each device packs what it holds; nothing moves
between devices, but for retained values that lie otherwise than the leaf that they replay.
"""

import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gockpt_jax.compiling import Programs
from gockpt_jax.transfer.chunks import Chunk, Source, in_host_memory
from gockpt_jax.transfer.layout import LARGE_BYTES, Buffer, lay_out
from gockpt_jax.transfer.packing import compile_packing, on_its_devices
from gockpt_jax.transfer.pull import HostChunk, Pull, align, owned_shards
from gockpt_jax.transfer.staging import stage

_programs = Programs("gockpt-compile-copies")
_blocks: dict[tuple[tuple[Chunk, ...], tuple[int, ...], bool], "Block"] = {}
_lock = threading.Lock()


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
    key = (tuple(chunks), same, donatable)
    with _lock:
        if key not in _blocks:
            _blocks[key] = Block(*key)
        return _blocks[key]


class Block:
    """Chunks that leave together. Made by `block_of`.

    Attributes:
      chunks: What leaves.
      staged_bytes: What staging takes on one device, padding included.
      held_bytes: What is there until it has been pulled: staged copies, and arrays that need none.
    """

    def __init__(self, chunks: tuple[Chunk, ...], arrays: tuple[int, ...], donatable: bool):
        self.chunks = chunks
        self._arrays = arrays  # of each chunk, the first that is cut from the same array
        self._donatable = donatable
        buffers = [b for b in lay_out(chunks) if donatable or not _needs_no_copy(b, chunks)]
        # Two meshes of the same devices are two: shards of one are not those of the other.
        self._by_mesh: dict[Any, list[Buffer]] = {}
        for buffer in buffers:
            if any(d.process_index == jax.process_index() for d in buffer.place.devices):
                mesh = (buffer.place.mesh, buffer.place.device)
                self._by_mesh.setdefault(mesh, []).append(buffer)
        self._inputs = {
            mesh: [(n, on_its_devices(chunks[n].source)) for n in self._arguments(of_mesh)]
            for mesh, of_mesh in self._by_mesh.items()
        }
        self._compiled: dict[Any, Any] = {}
        packed = {n for b in buffers for n in b.chunks}
        self._whole = [n for n in range(len(chunks)) if n not in packed]
        whole = [chunks[n].source for n in self._whole]
        on_device = [s for s in whole if not in_host_memory(s.placed)]
        copied = [s for s in on_device if donatable or not _lies_in_place(s)]
        packed_bytes = sum(b.staged_bytes for b in buffers)
        self.staged_bytes = packed_bytes + sum(s.shard_bytes for s in copied)
        self.held_bytes = packed_bytes + sum(s.shard_bytes for s in on_device)

    def compile_ahead(self) -> None:
        """Has its programs compiled, on a thread of their own."""
        for buffers in self._by_mesh.values():
            key, compile_it = self._program(buffers)
            _programs.wanted(key, compile_it)

    def programs(self) -> list[Any]:
        """Its programs, compiled; waits for them, at the first call."""
        for mesh, buffers in self._by_mesh.items():
            if mesh not in self._compiled:
                self._compiled[mesh] = _programs.needed(*self._program(buffers))
        return list(self._compiled.values())

    def stage(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Copies the chunks into fresh buffers on their devices; returns at once.

        Args:
          arrays: Of each chunk, the array that it is cut from.

        Returns:
          Buffers that are nobody else's; or, for what need not be staged, the array itself.
        """
        staged: list[jax.Array] = []
        self.programs()
        for mesh, inputs in self._inputs.items():
            given = [
                arrays[n] if there else align(arrays[n], self.chunks[n].source.placed)
                for n, there in inputs
            ]
            staged += _copied(self._compiled[mesh], given)
        whole = [arrays[n] for n in self._whole]
        for n, array in zip(self._whole, stage(whole) if self._donatable else whole, strict=True):
            source = self.chunks[n].source
            staged.append(array if _lies_in_place(source) else align(array, source.placed))
        if self._donatable:
            taken = {id(a) for a in arrays}
            assert not any(id(a) in taken for a in staged), "a step may donate a staged buffer"
        return staged

    def start_pull(self, staged: Sequence[jax.Array]) -> Pull[list[list[HostChunk]]]:
        """Starts moving staged buffers to the host; returns at once.

        Returns:
          For each chunk, its flat elements in each shard that this process owns.
        """
        buffers = [b for together in self._by_mesh.values() for b in together]
        sent: list[jax.Array] = []
        for buffer, array in zip(buffers, staged[: len(buffers)], strict=True):
            at = {s.device: s.data for s in array.addressable_shards}
            sent += [at[device] for device in buffer.senders().flat]
        indices: dict[int, list[Any]] = {}
        for n, array in zip(self._whole, staged[len(buffers) :], strict=True):
            everywhere = self.chunks[n].everywhere
            shards = array.addressable_shards[:1] if everywhere else owned_shards(array)
            indices[n] = [s.index for s in shards]
            sent += [s.data for s in shards]
        return Pull.start(sent, functools.partial(self._unpack, buffers, indices))

    def _unpack(
        self, buffers: Sequence[Buffer], indices: dict[int, list[Any]], found: list[np.ndarray]
    ) -> list[list[HostChunk]]:
        chunks: list[list[HostChunk]] = [[] for _ in self.chunks]
        arrived = iter(found)
        for buffer in buffers:
            for row in buffer.senders():
                slices = [next(arrived) for _ in row]
                for n, offset in zip(buffer.chunks, buffer.offsets, strict=True):
                    data = _join(buffer, slices, offset, self.chunks[n].size)
                    chunks[n].append(HostChunk(_index(self.chunks[n].source, row[0]), data))
        for n in self._whole:
            part = slice(self.chunks[n].start, self.chunks[n].stop)
            chunks[n] = [HostChunk(i, next(arrived).reshape(-1)[part]) for i in indices[n]]
        return chunks

    def _arguments(self, buffers: Sequence[Buffer]) -> dict[int, int]:
        """Positions of the chunks whose arrays a program takes, each with its argument's number."""
        found: dict[int, int] = {}
        for buffer in buffers:
            for n in buffer.chunks:
                found.setdefault(self._arrays[n], len(found))
        return found

    def _program(self, buffers: Sequence[Buffer]) -> tuple[Any, Any]:
        arguments = self._arguments(buffers)
        taken = [self.chunks[n].source for n in arguments]
        parts = [
            (self.chunks[n], arguments[self._arrays[n]])
            for buffer in buffers
            for n in buffer.chunks
        ]
        key = (tuple(taken), tuple(parts), tuple(buffers))
        return key, functools.partial(compile_packing, *key)


def _copied(program: Any, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    try:
        copies: list[jax.Array] = program(*arrays)
    except ValueError:  # before dispatch: some lie in memory as the user asked (`layout.Format`)
        copies = program(*(_in_default_layout(x) for x in arrays))
    return copies


_in_default_layout = jax.jit(jnp.copy)


def _needs_no_copy(buffer: Buffer, chunks: Sequence[Chunk]) -> bool:
    """Whether a buffer would be a copy of one large array that nobody donates."""
    first = chunks[buffer.chunks[0]]
    alone = len(buffer.chunks) == 1 and not buffer.is_sliced
    return (
        alone and first.is_whole and first.num_bytes >= LARGE_BYTES
        and _lies_in_place(first.source) and not first.source.is_key
    )  # fmt: skip


def _lies_in_place(source: Source) -> bool:
    return source.given.is_equivalent_to(source.placed, len(source.shape))


def _join(buffer: Buffer, slices: Sequence[np.ndarray], offset: int, size: int) -> np.ndarray:
    """Elements of a buffer: a view if one slice has them, else a copy."""
    starts = [buffer.slice_start(number) for number in range(len(slices))]
    for start, data in zip(starts, slices, strict=True):
        if start <= offset and offset + size <= start + data.size:
            return data[offset - start : offset - start + size]
    joined = np.empty(size, slices[0].dtype)
    for start, data in zip(starts, slices, strict=True):
        first, last = max(offset, start), min(offset + size, start + data.size)
        if first < last:
            joined[first - offset : last - offset] = data[first - start : last - start]
    return joined


def _index(source: Source, device: jax.Device) -> Any:
    """Position of a device's shard in the array as stored."""
    index = source.placed.devices_indices_map(source.shape)[device]
    return (*index, *(slice(None),) * (len(source.shard_shape) - len(source.shape)))
