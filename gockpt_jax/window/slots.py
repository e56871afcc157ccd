"""Where the writer will find a chunk, promised before the chunk is final."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from gockpt_jax.promise import Promise
from gockpt_jax.transfer.boxes import Index
from gockpt_jax.transfer.budget import ByteBudget, Loan
from gockpt_jax.transfer.pull import HostChunk


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkSlot:
    """Where a chunk of the checkpoint will be found.

    Attributes:
      index: Its position in the leaf's global array.
      data: Resolved with its elements once it is final, or with what went wrong.
      owed: One `None` as long as its bytes have not been given back.
    """

    index: Index
    data: Promise[np.ndarray]
    owed: list[None] = dataclasses.field(default_factory=lambda: [None])


def make_slots(indices: Iterable[Index]) -> list[ChunkSlot]:
    """Empty slots for the shards at `indices`."""
    return [ChunkSlot(index, Promise()) for index in indices]


def fill(
    slots: Sequence[ChunkSlot], chunks: Sequence[HostChunk], host: ByteBudget, loan: Loan
) -> None:
    """Resolves slots with the chunks at the same positions, all or none.

    Args:
      slots: Empty ones.
      chunks: Of them.
      host: Accounts for their bytes.
      loan: That they are on; what a slot has is given back by whoever reads it.

    Raises:
      AssertionError: if a chunk is not the one the slot was made for.
    """
    for slot, chunk in zip(slots, chunks, strict=True):
        assert slot.index == chunk.index, f"chunk {chunk.index} came for slot {slot.index}"
    for slot, chunk in zip(slots, chunks, strict=True):
        try:
            slot.data.set_result(chunk.data)
        finally:  # somebody who was called may have raised
            if slot.data.done():
                host.hand_over(chunk.data.nbytes, loan)


def give_back(slots: Sequence[ChunkSlot], host: ByteBudget) -> None:
    """Gives the host's bytes of chunks back that nobody reads any more, once they have landed.

    Those that have been given back before are left out.
    """
    for slot in slots:
        try:
            slot.owed.pop()
        except IndexError:  # given back before, maybe this very moment on another thread
            continue
        slot.data.add_done_callback(
            lambda done: None if done.exception() else host.release(done.result().nbytes)
        )


def fail(slots: Sequence[ChunkSlot], error: BaseException) -> None:
    """Resolves the slots that are still empty with an error."""
    for slot in slots:
        if not slot.data.done():
            slot.data.set_exception(error)
