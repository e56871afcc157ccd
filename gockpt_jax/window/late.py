"""Late chunks: staged at the sealed version itself, final as they land."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax

from gockpt_jax.transfer.block import Block, block_of, stage_and_pull
from gockpt_jax.transfer.budget import ByteBudget, Loan, batches
from gockpt_jax.transfer.chunks import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Chunk,
    can_be_cut,
    in_host_memory,
    row_ranges,
    row_size,
)
from gockpt_jax.transfer.layout import padded_bytes
from gockpt_jax.transfer.pull import HostChunk
from gockpt_jax.transfer.replicas import Replicas
from gockpt_jax.window.landed import LandedLeaf
from gockpt_jax.window.landing import send
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.slots import ChunkSlot, fail, fill, give_back, make_slots
from gockpt_jax.window.worker import Failed, in_any_case

Numbered = tuple[int, Chunk]
"""A chunk behind the position, or another number, of its array."""

Receiver = tuple[Callable[[Chunk, Sequence[HostChunk]], None], Callable[[BaseException], None]]
"""Takes in a chunk of each shard, and what went wrong with it instead."""

_PARTS = 16
"""In which late leaves are staged that exceed the device budget: each is a program to compile."""


def take_late(arrays: Sequence[jax.Array], resources: Resources) -> dict[int, list[ChunkSlot]]:
    """Stages arrays and starts their pulls; waits only while the device budget is used up.

    Args:
      arrays: Distinct arrays, alive.
      resources: The session's.

    Returns:
      For each array, by its `id`, the slots of what this process writes.
    """
    late = [_LateArray(a, resources.host, resources.replicas) for a in arrays]
    chunks = late_chunks(arrays, resources.device.limit_bytes, resources.replicas)
    receivers = [(one.land, one.fail) for one in late]

    def forget() -> None:
        for one in late:
            one.forget()

    promised = {id(a): one.slots for a, one in zip(arrays, late, strict=True)}
    try:
        for one in late:
            one.count()
        send_late(arrays, chunks, receivers, resources)
    except BaseException:
        resources.worker.submit(*in_any_case(forget))
        raise
    return promised


class _LateArray:
    """An array on its way, and where its writer will find it; the worker lands it.

    Args:
      array: Alive.
      host: Accounts for its bytes.
      replicas: How they share what is taken.

    Attributes:
      slots: Of what this process writes of it.
    """

    def __init__(self, array: jax.Array, host: ByteBudget, replicas: Replicas):
        source = replicas.source(array)
        self.slots = make_slots(source.owned.values())
        self._num_bytes = source.owned_bytes
        self._host = host
        self._loan = Loan()
        self._landed = LandedLeaf()
        self._is_lost = False

    def count(self) -> None:
        """Takes its bytes, as it is sent.

        Not when it has landed: a window that opens meanwhile must not take their room.
        """
        self._host.add(self._num_bytes, self._loan)

    def land(self, chunk: Chunk, found: Sequence[HostChunk]) -> None:
        """Takes in rows; with the last ones it is final."""
        self._landed.put(chunk, found)
        if self._landed.is_complete and not self._is_lost:
            chunks = self._landed.chunks([slot.index for slot in self.slots])
            fill(self.slots, chunks, self._host, self._loan)
            self._landed = LandedLeaf()  # the slots' now

    def fail(self, error: BaseException) -> None:
        """Some of it will not come; what is final is given back when it has been written."""
        fail(self.slots, error)
        self._is_lost = True
        self._host.repay(self._loan)

    def forget(self) -> None:
        """Nobody will write it."""
        self._is_lost = True
        give_back(self.slots, self._host)
        self._host.repay(self._loan)


def send_late(
    arrays: Sequence[jax.Array], chunks: Sequence[Numbered], receivers: Sequence[Receiver],
    resources: Resources,
) -> None:  # fmt: skip
    """Stages chunks as the device budget has room, and starts their pulls.

    What the device has no room for after all is staged in smaller parts, as those before them land.

    Args:
      arrays: Alive.
      chunks: Of them.
      receivers: Of each array; called by the worker.
      resources: The session's.

    Raises:
      JaxRuntimeError: if the device has no room for the smallest part.
    """
    device = resources.device
    blocks = late_blocks(chunks, device.limit_bytes)
    for n, (positions, block) in enumerate(blocks):
        sent = [chunks[at] for at in positions]
        start = functools.partial(stage_and_pull, block, [arrays[i] for i, _ in sent])
        land, failed = _for_all([(chunk, receivers[i]) for i, chunk in sent])
        if not send(start, land, failed, block.staged_bytes, resources):
            left = [chunks[at] for positions, _ in blocks[n:] for at in positions]
            send_late(arrays, _in_parts(left, device.limit_bytes), receivers, resources)
            return


def _for_all(
    sent: Sequence[tuple[Chunk, Receiver]],
) -> tuple[Callable[[Sequence[Sequence[HostChunk]]], None], Failed]:
    """What takes in, or hears of, chunks that were sent together."""

    def land(found: Sequence[Sequence[HostChunk]]) -> None:
        for (chunk, (receive, _)), shards in zip(sent, found, strict=True):
            receive(chunk, shards)

    def failed(error: BaseException) -> None:
        for _, (_, tell) in sent:
            tell(error)

    return land, failed


def _staged_bytes(chunk: Chunk) -> int:
    """At most, on one device; copies of what the host holds are made there."""
    if in_host_memory(chunk.source.sharding):
        return 0
    return padded_bytes(chunk)


def late_chunks(
    arrays: Sequence[jax.Array], limit_bytes: int | None, replicas: Replicas
) -> list[Numbered]:
    """What late arrays are sent in: whole, or in parts where one is large for the device budget.

    Rows are copied together on the host, so no more is cut than must be.

    Args:
      arrays: Alive or not.
      limit_bytes: Of the device budget.
      replicas: How they share what is taken.
    """
    whole = [Chunk.whole(replicas.source(a)) for a in arrays]
    return _in_parts(list(enumerate(whole)), limit_bytes)


def _in_parts(chunks: Sequence[Numbered], limit_bytes: int | None) -> list[Numbered]:
    part_bytes = _part_bytes([chunk for _, chunk in chunks], limit_bytes)
    if limit_bytes is None or part_bytes is None:
        return list(chunks)
    return [
        (n, part)
        for n, chunk in chunks
        for part in (_parts(chunk, part_bytes) if chunk.num_bytes > limit_bytes // 2 else [chunk])
    ]


def _part_bytes(chunks: Sequence[Chunk], limit_bytes: int | None) -> int | None:
    """What is staged at once; `None` if all of it fits the device budget."""
    total = sum(map(_staged_bytes, chunks))
    if limit_bytes is None or total <= limit_bytes:
        return None
    return min(limit_bytes, -(-total // _PARTS))


def _parts(chunk: Chunk, part_bytes: int) -> list[Chunk]:
    source = chunk.source
    if not can_be_cut(source):
        return [chunk]
    part_bytes = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, part_bytes))
    row = row_size(source.shard_shape, chunk.start, chunk.stop)
    shape = source.shard_shape if chunk.is_whole else (chunk.size // row, row)
    return [
        dataclasses.replace(chunk, start=chunk.start + start, stop=chunk.start + stop)
        for start, stop in row_ranges(shape, -(-chunk.num_bytes // part_bytes))
    ]


def late_blocks(
    chunks: Sequence[Numbered], limit_bytes: int | None
) -> list[tuple[list[int], Block]]:
    """Blocks of neighbours that are staged one after another, with the chunks' positions.

    All is one block if it fits the device budget, but for what lies on the host, whose copies take
    none of the device's memory. What does not fit must wait until as much has been pulled as
    exceeds the budget; not for longer than that only if memory is given back, and staged into, in
    small parts. A chunk that is larger goes alone.

    Args:
      chunks: Whose arrays they are from, by number.
      limit_bytes: Of the device budget.
    """
    of_chunks = [chunk for _, chunk in chunks]
    part_bytes = _part_bytes(of_chunks, limit_bytes)
    on_host = [n for n, chunk in enumerate(of_chunks) if in_host_memory(chunk.source.sharding)]
    on_device = sorted({*range(len(chunks))}.difference(on_host))
    together = [
        *batches(on_device, lambda n: _staged_bytes(of_chunks[n]), part_bytes),
        *([on_host] if on_host else []),
    ]
    return [
        (at, block_of([of_chunks[n] for n in at], [chunks[n][0] for n in at])) for at in together
    ]


def compile_late_ahead(
    arrays: Sequence[jax.Array], resources: Resources, rows: Sequence[Numbered] = ()
) -> None:
    """Compiles, on other threads, what late arrays will be staged by, and rows of others.

    Args:
      arrays: Alive or not.
      resources: The session's.
      rows: Of leaves that leave early in part.
    """
    limit_bytes = resources.device.limit_bytes
    for chunks in (late_chunks(arrays, limit_bytes, resources.replicas), rows):
        for _, block in late_blocks(chunks, limit_bytes):
            block.compile_ahead()
