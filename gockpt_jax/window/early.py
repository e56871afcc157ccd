"""The chunks that left early, from landing on the host to being final.

Everything here runs on the worker thread, in the order in which the trainer dispatched it. So an
update always meets the chunks that left before it and no others, and nothing needs a lock.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.report import SaveRecord
from gockpt_jax.training.program import ReplayGroup
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.pull import Box, HostChunk, Pull
from gockpt_jax.window.slots import ChunkSlot, fill


@dataclasses.dataclass(slots=True)
class _Early:
    """A leaf's chunks between leaving and being final: flat data, and what it takes to write."""

    indices: list[Box]
    shapes: list[tuple[int, ...]]
    flat: list[jax.Array | np.ndarray]

    def chunks(self) -> list[HostChunk]:
        """As they are now, in their shapes."""
        parts = zip(self.indices, self.shapes, self.flat, strict=True)
        return [HostChunk(index, np.asarray(flat).reshape(shape)) for index, shape, flat in parts]


class EarlyChunks:
    """The chunks of one window that left before its save step.

    Args:
      groups: The program's groups.
      replayer: Applies their recipes.
      host: Accounts for bytes on the host.
      record: The save's record.
    """

    def __init__(
        self, groups: Sequence[ReplayGroup], replayer: Replayer, host: ByteBudget,
        record: SaveRecord,
    ):  # fmt: skip
        self.error: BaseException | None = None
        self._groups = groups
        self._replayer = replayer
        self._host = host
        self._record = record
        self._landed: list[int] = []
        self._leaves: dict[int, _Early] = {}

    def land(self, block: Sequence[int], pulls: Mapping[int, Pull]) -> None:
        """Takes in a block: the groups that left together, one pull per leaf."""
        for leaf, pull in pulls.items():
            chunks = pull.result()
            self._host.add(sum(c.data.nbytes for c in chunks))
            self._leaves[leaf] = _Early(
                [c.index for c in chunks],
                [c.data.shape for c in chunks],
                [c.data.reshape(-1) for c in chunks],
            )
        self._landed.extend(block)

    def update(self, cut: Mapping[int, Pull]) -> None:
        """Applies one update to all chunks that have landed.

        Args:
          cut: A pull for each cut value that their groups read, by position.
        """
        values = {i: [c.data.reshape(-1) for c in pull.result()] for i, pull in cut.items()}
        moved = sum(a.nbytes for arrays in values.values() for a in arrays)
        self._host.add(moved)
        self._record.gradient_bytes += moved
        try:
            with events.span(events.SPAN_REPLAY):
                for g in self._landed:
                    if not self._groups[g].recipe.is_identity:
                        self._update_group(self._groups[g], values)
            # Until then the retained values are in use.
            jax.block_until_ready([leaf.flat for leaf in self._leaves.values()])
        finally:
            self._host.release(moved)

    def _update_group(self, group: ReplayGroup, values: Mapping[int, Sequence[np.ndarray]]) -> None:
        leaves = [self._leaves[j] for j in group.leaves]
        scalars = [values[i][0].reshape(()) for i in group.scalars]
        for shard in range(len(leaves[0].flat)):
            new = self._replayer.apply(
                group.recipe,
                [leaf.flat[shard] for leaf in leaves],
                [values[i][shard] for i in group.retained],
                scalars,
            )
            for leaf, chunk in zip(leaves, new, strict=True):
                leaf.flat[shard] = chunk

    def finish(
        self, slots: Mapping[int, Sequence[ChunkSlot]],
        check: Callable[[Mapping[int, Sequence[HostChunk]]], None] | None = None,
    ) -> None:  # fmt: skip
        """The seal has been reached: what was replayed up to it is final, and is handed over.

        Args:
          slots: Of each leaf that is wanted.
          check: Called with its chunks before any is handed over; raises if one is wrong.
        """
        final = {leaf: self._leaves[leaf].chunks() for leaf in slots}
        if check is not None:
            check(final)
        for leaf, wanted in slots.items():
            del self._leaves[leaf]
            fill(wanted, final.pop(leaf))

    def drop(self) -> None:
        """Forgets what was not asked for; the window was abandoned, or the save took a part."""
        self._host.release(sum(f.nbytes for e in self._leaves.values() for f in e.flat))
        self._leaves.clear()
        self._landed.clear()
