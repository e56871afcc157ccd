"""Late chunks: staged at the sealed version itself, final as they land."""

from collections.abc import Callable, Sequence

import jax

from gockpt_jax.transfer.block import Block, block_of, stage_and_pull
from gockpt_jax.transfer.budget import ByteBudget, batches
from gockpt_jax.transfer.chunks import (
    MAX_CHUNK_BYTES,
    MIN_CHUNK_BYTES,
    Chunk,
    can_be_cut,
    in_host_memory,
    row_ranges,
)
from gockpt_jax.transfer.layout import ALIGNMENT_BYTES
from gockpt_jax.transfer.pull import HostChunk, Pull
from gockpt_jax.transfer.replicas import FIRST_ALONE, Replicas
from gockpt_jax.window.landing import Landing
from gockpt_jax.window.slots import ChunkSlot, fail, fill, make_slots
from gockpt_jax.window.worker import Worker

_PARTS = 16
"""In which late leaves are staged that exceed the device budget: each is a program to compile."""


def take_now(
    arrays: Sequence[jax.Array],
    worker: Worker,
    *,
    device: ByteBudget,
    host: ByteBudget,
    replicas: Replicas = FIRST_ALONE,
) -> dict[int, list[ChunkSlot]]:
    """Stages arrays and starts their pulls; waits only while the device budget is used up.

    Args:
      arrays: Distinct arrays, alive.
      worker: Lands them.
      device: Budget for the copies.
      host: Accounts for bytes on the host.
      replicas: How they share what is taken.

    Returns:
      For each array, by its `id`, the slots of what this process writes.
    """
    slots = [make_slots(replicas.boxes(a)) for a in arrays]
    landings = [Landing() for _ in arrays]
    chunks = late_chunks(arrays, device.limit_bytes, replicas)
    held_bytes = [replicas.owned_bytes(a) for a in arrays]
    lost: set[int] = set()

    def land(position: int, found: Sequence[HostChunk]) -> None:
        n, chunk = chunks[position]
        landings[n].put(chunk, found)
        if landings[n].is_complete and n not in lost:
            fill(slots[n], landings[n].chunks([s.index for s in slots[n]]))
            landings[n] = Landing()  # the slots' now

    def failed(position: int, error: BaseException) -> None:
        n, _ = chunks[position]
        if n not in lost and not all(slot.data.done() for slot in slots[n]):
            lost.add(n)  # what is filled is given back when it has been written
            fail(slots[n], error)
            host.release(held_bytes[n])

    def forget() -> None:  # nobody will write these
        host.release(sum(num_bytes for n, num_bytes in enumerate(held_bytes) if n not in lost))

    promised = {id(a): found for a, found in zip(arrays, slots, strict=True)}
    # From now on, not from when they land: a window that opens meanwhile must not take their room.
    host.add(sum(held_bytes))
    try:
        send_late([(arrays[n], chunk) for n, chunk in chunks], land, failed, worker, device)
    except BaseException:
        worker.submit(forget)
        raise
    return promised


def send_late(
    chunks: Sequence[tuple[jax.Array, Chunk]],
    land: Callable[[int, Sequence[HostChunk]], None],
    failed: Callable[[int, BaseException], None],
    worker: Worker,
    device: ByteBudget,
) -> None:
    """Stages chunks as the device budget has room, and starts their pulls.

    Args:
      chunks: Each with the array that it is cut from.
      land: Takes in a chunk, by its position; called by the worker.
      failed: Likewise, what went wrong with it.
      worker: Lands them.
      device: Budget for the copies.
    """
    numbered = [(id(array), chunk) for array, chunk in chunks]
    for positions, block in late_blocks(numbered, device.limit_bytes):
        with device.lent(block.staged_bytes) as give_back:
            pull = stage_and_pull(block, [chunks[n][0] for n in positions])
            worker.submit(_landing(positions, pull, land, failed, give_back))


def _landing(
    positions: Sequence[int], pull: Pull[list[list[HostChunk]]],
    land: Callable[[int, Sequence[HostChunk]], None], failed: Callable[[int, BaseException], None],
    has_landed: Callable[[], None],
) -> Callable[[], None]:  # fmt: skip
    pulls = [pull]

    def task() -> None:
        try:
            try:
                found = pulls.pop().result()
            finally:  # nothing holds the staged copies any more
                has_landed()
            for n, chunk in zip(positions, found, strict=True):
                land(n, chunk)
        except BaseException as error:
            for n in positions:
                failed(n, error)

    return task


def _staged_bytes(chunk: Chunk) -> int:
    """At most, on one device; copies of what the host holds are made there."""
    if in_host_memory(chunk.source.given):
        return 0
    return -(-chunk.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def late_chunks(
    arrays: Sequence[jax.Array], limit_bytes: int | None, replicas: Replicas
) -> list[tuple[int, Chunk]]:
    """What late arrays are sent in: whole, or in parts where one is large for the device budget.

    Rows are copied together on the host, so no more is cut than must be.

    Args:
      arrays: Alive or not.
      limit_bytes: Of the device budget.
      replicas: How they share what is taken.

    Returns:
      Chunks, each with the position of its array.
    """
    whole = [Chunk.whole(replicas.source(a)) for a in arrays]
    part_bytes = _part_bytes(whole, limit_bytes)
    if limit_bytes is None or part_bytes is None:
        return list(enumerate(whole))
    return [
        (n, part)
        for n, chunk in enumerate(whole)
        for part in (_parts(chunk, part_bytes) if chunk.num_bytes > limit_bytes // 2 else [chunk])
    ]


def _part_bytes(chunks: Sequence[Chunk], limit_bytes: int | None) -> int | None:
    """What is staged at once; `None` if all of it fits the device budget."""
    total = sum(map(_staged_bytes, chunks))
    if limit_bytes is None or total <= limit_bytes:
        return None
    return min(limit_bytes, -(-total // _PARTS))


def _parts(whole: Chunk, part_bytes: int) -> list[Chunk]:
    if not can_be_cut(whole.source):
        return [whole]
    part_bytes = min(MAX_CHUNK_BYTES, max(MIN_CHUNK_BYTES, part_bytes))
    ranges = row_ranges(whole.source.shard_shape, -(-whole.num_bytes // part_bytes))
    return [Chunk(whole.source, start, stop) for start, stop in ranges]


def late_blocks(
    chunks: Sequence[tuple[int, Chunk]], limit_bytes: int | None
) -> list[tuple[list[int], Block]]:
    """Blocks of neighbours that are staged one after another, with the chunks' positions.

    All is one block if it fits the device budget. What does not fit must wait until as much has
    been pulled as exceeds the budget; not for longer than that only if memory is given back, and
    staged into, in small parts. A chunk that is larger goes alone.

    Args:
      chunks: Each with the number of its array.
      limit_bytes: Of the device budget.
    """
    part_bytes = _part_bytes([chunk for _, chunk in chunks], limit_bytes)
    sizes = [_staged_bytes(chunk) for _, chunk in chunks]
    return [
        (at, block_of([chunks[n][1] for n in at], [chunks[n][0] for n in at]))
        for at in batches(sizes, part_bytes)
    ]
