"""Late chunks: staged at the sealed version itself, final as they land."""

from collections.abc import Callable, Iterator, Sequence

import jax

from gockpt_jax.telemetry import events
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.pull import Pull, owned_shards, start_pull
from gockpt_jax.transfer.staging import device_bytes, stage
from gockpt_jax.window.slots import ChunkSlot, fail, fill, make_slots
from gockpt_jax.window.worker import Worker


def take_now(
    arrays: Sequence[jax.Array], worker: Worker, *, device: ByteBudget, host: ByteBudget
) -> dict[int, list[ChunkSlot]]:
    """Stages arrays and starts their pulls; waits only while the device budget is used up.

    Args:
      arrays: Distinct arrays, alive.
      worker: Lands them.
      device: Budget for the copies.
      host: Accounts for bytes on the host.

    Returns:
      For each array, by its `id`, the slots of the shards that this process writes.
    """
    slots: dict[int, list[ChunkSlot]] = {}
    for batch in _batches(arrays, device.limit_bytes):
        num_bytes = sum(device_bytes(a) for a in batch)
        device.acquire(num_bytes)
        try:
            with events.span(events.SPAN_STAGE):
                staged = stage(batch)
            with events.span(events.SPAN_PULL):
                pulls = [start_pull(a) for a in staged]
        except BaseException:
            device.release(num_bytes)
            raise
        promised = [make_slots([s.index for s in owned_shards(a)]) for a in staged]
        worker.submit(_landing(promised, pulls, num_bytes, device, host))
        slots.update((id(a), found) for a, found in zip(batch, promised, strict=True))
    return slots


def _landing(
    slots: Sequence[Sequence[ChunkSlot]], pulls: list[Pull], num_bytes: int,
    device: ByteBudget, host: ByteBudget,
) -> Callable[[], None]:  # fmt: skip
    def land() -> None:
        try:
            for wanted, pull in zip(slots, pulls, strict=True):
                chunks = pull.result()
                host.add(sum(c.data.nbytes for c in chunks))
                fill(wanted, chunks)
        except BaseException as error:
            for wanted in slots:
                fail(wanted, error)
        finally:
            pulls.clear()  # the staged copies
            device.release(num_bytes)

    return land


def _batches(arrays: Sequence[jax.Array], limit_bytes: int | None) -> Iterator[list[jax.Array]]:
    """Consecutive arrays that fit the device budget together; one too large goes alone."""
    batch: list[jax.Array] = []
    batch_bytes = 0
    for array in arrays:
        num_bytes = device_bytes(array)
        if batch and limit_bytes is not None and batch_bytes + num_bytes > limit_bytes:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(array)
        batch_bytes += num_bytes
    if batch:
        yield batch
