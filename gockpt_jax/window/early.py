"""The chunks that left early, from landing on the host to being final.

Everything here but `expect` runs on the worker thread, in the order in which the trainer
dispatched it. So an update always meets the chunks that left before it and no others, and nothing
needs a lock.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from gockpt_jax.replay.engine import Replayer, ShardReplay, Update
from gockpt_jax.replay.memory import own
from gockpt_jax.replay.programs import FUSED_UPDATES
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.report import SaveRecord
from gockpt_jax.training.program import ReplayGroup
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.pull import Box, HostChunk, Pull
from gockpt_jax.window.slots import ChunkSlot, fill

_Values = Mapping[int, Sequence[np.ndarray]]
"""What an update brings: the shards of each cut value, flat, by position."""


@dataclasses.dataclass(slots=True)
class _Early:
    """A leaf's chunks between leaving and being final: flat data, and what it takes to write."""

    indices: list[Box]
    shapes: list[tuple[int, ...]]
    flat: list[np.ndarray]

    def chunks(self) -> list[HostChunk]:
        """As they are now, in their shapes."""
        parts = zip(self.indices, self.shapes, self.flat, strict=True)
        return [HostChunk(index, flat.reshape(shape)) for index, shape, flat in parts]


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
        self._landed: dict[int, int] = {}  # groups, with the number of updates before they left
        self._leaves: dict[int, _Early] = {}
        self._expected: collections.deque[Sequence[Pull]] = collections.deque()
        self._pending: list[tuple[_Values, int]] = []  # with their bytes
        self._num_applied = 0

    def land(self, block: Sequence[int], pulls: Mapping[int, Pull]) -> None:
        """Takes in a block: the groups that left together, one pull per leaf."""
        for leaf, pull in pulls.items():
            chunks = pull.result()
            self._host.add(sum(c.data.nbytes for c in chunks))
            self._leaves[leaf] = _Early(
                [c.index for c in chunks],
                [c.data.shape for c in chunks],
                [own(c.data) for c in chunks],
            )
        self._landed.update((g, self._num_applied + len(self._pending)) for g in block)

    def expect(self, cut: Mapping[int, Pull]) -> None:
        """Tells of an update whose turn will come; called on the trainer's thread."""
        self._expected.append(tuple(cut.values()))

    def update(self, cut: Mapping[int, Pull]) -> None:
        """Takes in one update, and applies it unless the next one is there already.

        Args:
          cut: A pull for each cut value that the landed groups read, by position.
        """
        if self._expected:
            self._expected.popleft()
        values = {i: [c.data.reshape(-1) for c in pull.result()] for i, pull in cut.items()}
        num_bytes = sum(a.nbytes for arrays in values.values() for a in arrays)
        self._host.add(num_bytes)
        self._record.gradient_bytes += num_bytes
        self._pending.append((values, num_bytes))
        if not self._is_worth_waiting(num_bytes):
            self._apply_pending()

    def _is_worth_waiting(self, num_bytes: int) -> bool:
        """Whether the next update has landed too, and the host has room for it.

        Updates are applied together, in one pass over the chunks, if replay is behind. It never
        waits for a step.
        """
        if len(self._pending) == FUSED_UPDATES[0] or not self._expected:
            return False
        limit = self._host.limit_bytes
        has_room = limit is None or self._host.used_bytes + num_bytes <= limit
        return has_room and all(pull.is_ready() for pull in self._expected[0])

    def _apply_pending(self) -> None:
        """Applies what has been taken in to all chunks that had landed by then."""
        shards = [
            shard
            for g, seen in self._landed.items()
            if not self._groups[g].recipe.is_identity
            for shard in self._shards(self._groups[g], max(0, seen - self._num_applied))
        ]
        scratch_bytes = self._replayer.scratch_bytes(shards)
        self._host.add(scratch_bytes)
        try:
            with events.span(events.SPAN_REPLAY):
                self._replayer.apply(shards)
        finally:
            self._host.release(scratch_bytes)
            self._forget_pending()

    def _shards(self, group: ReplayGroup, start: int) -> Iterator[ShardReplay]:
        pending = [values for values, _ in self._pending[start:]]
        leaves = [self._leaves[j] for j in group.leaves]
        for shard in range(len(leaves[0].flat)):
            updates = tuple(
                Update(
                    tuple(values[i][shard] for i in group.retained),
                    tuple(values[i][0].reshape(()) for i in group.scalars),
                )
                for values in pending
            )
            yield ShardReplay(group.recipe, tuple(leaf.flat[shard] for leaf in leaves), updates)

    def _forget_pending(self) -> None:
        self._num_applied += len(self._pending)
        self._host.release(sum(num_bytes for _, num_bytes in self._pending))
        self._pending.clear()

    def finish(
        self, slots: Mapping[int, Sequence[ChunkSlot]],
        check: Callable[[Mapping[int, Sequence[HostChunk]]], None] | None = None,
    ) -> None:  # fmt: skip
        """The seal has been reached: what was replayed up to it is final, and is handed over.

        Args:
          slots: Of each leaf that is wanted.
          check: Called with its chunks before any is handed over; raises if one is wrong.
        """
        assert not self._pending, "an update waits for one that has come or will never come"
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
        self._expected.clear()
        self._forget_pending()
