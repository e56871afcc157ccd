"""The chunks that left early, from landing on the host to being final.

Everything here but `expect` runs on the worker thread, in the order in which the trainer
dispatched it. So an update always meets the chunks that left before it and no others, and nothing
needs a lock. What leaves as one is a unit: the updates that it has had are counted for each.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.programs import FUSED_UPDATES
from gockpt_jax.replay.shards import ShardReplay, Update
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.report import SaveRecord
from gockpt_jax.training.replay_group import ReplayGroup
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.chunks import Chunk
from gockpt_jax.transfer.pull import HostChunk, Pull
from gockpt_jax.window.departure import Followers
from gockpt_jax.window.landing import Landing
from gockpt_jax.window.slots import ChunkSlot, fill
from gockpt_jax.window.units import GroupUnit

ChunkPull = Pull[list[list[HostChunk]]]
UnitValue = tuple[int, int]
"""A unit, and one of its group's cut values or leaves, by their positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class CutPull:
    """One update's cut on its way.

    Attributes:
      values: For each block that has left, what follows it and its pull.
      scalars: Positions of the captured scalars.
      scalar_pull: Theirs.
    """

    values: Sequence[tuple[Sequence[Followers], ChunkPull]]
    scalars: Sequence[int]
    scalar_pull: ChunkPull

    def is_ready(self) -> bool:
        """Whether all of it is on the host."""
        return all(p.is_ready() for p in (*(p for _, p in self.values), self.scalar_pull))


@dataclasses.dataclass(frozen=True, slots=True)
class _Cut:
    """One update's cut on the host: flat rows in each shard by unit and value, and the scalars."""

    values: Mapping[UnitValue, Sequence[np.ndarray]]
    scalars: Mapping[int, np.ndarray]
    num_bytes: int

    @classmethod
    def of(cls, pull: CutPull, units: Sequence[GroupUnit]) -> "_Cut":
        values = {
            (u, i): [_rows(c.data, units[run[0]], units[u]) for c in chunks]
            for keys, of_block in pull.values
            for (run, i), chunks in zip(keys, of_block.result(), strict=True)
            for u in run
        }
        found = pull.scalar_pull.result()
        scalars = {
            i: chunks[0].data.reshape(()) for i, chunks in zip(pull.scalars, found, strict=True)
        }
        arrays = [*(x for rows in values.values() for x in rows), *scalars.values()]
        return cls(values, scalars, sum(x.nbytes for x in arrays))


def _rows(data: np.ndarray, first: GroupUnit, unit: GroupUnit) -> np.ndarray:
    """Of flat rows that begin with those of one unit, those of another."""
    return data[unit.start - first.start : unit.stop - first.start]


class EarlyChunks:
    """The chunks of one window that left before its save step.

    Args:
      groups: The program's groups.
      units: The plan's units.
      replayer: Applies the groups' recipes.
      host: Accounts for bytes on the host.
      record: The save's record.
    """

    def __init__(
        self, groups: Sequence[ReplayGroup], units: Sequence[GroupUnit], replayer: Replayer,
        host: ByteBudget, record: SaveRecord,
    ):  # fmt: skip
        self.error: BaseException | None = None
        self._groups = groups
        self._units = units
        self._replayer = replayer
        self._host = host
        self._record = record
        self._landed: dict[int, int] = {}  # units, with the number of updates before they left
        self._leaves: dict[int, Landing] = collections.defaultdict(Landing)
        self._expected: collections.deque[CutPull] = collections.deque()
        self._pending: list[_Cut] = []
        self._num_applied = 0

    def land(self, leaves: Sequence[UnitValue], chunks: Sequence[Chunk], pull: ChunkPull) -> None:
        """Takes in a block.

        Args:
          leaves: Of each chunk, the unit and the leaf.
          chunks: What left.
          pull: Theirs.
        """
        seen = self._num_applied + len(self._pending)
        for (unit, leaf), chunk, found in zip(leaves, chunks, pull.result(), strict=True):
            self.put(leaf, chunk, found)
            self._landed[unit] = seen

    def put(self, leaf: int, chunk: Chunk, found: Sequence[HostChunk]) -> None:
        """Takes in rows of a leaf; unless `land` does it for a unit, they are final."""
        self._host.add(self._leaves[leaf].put(chunk, found))

    def expect(self, cut: CutPull) -> None:
        """Tells of an update whose turn will come; called on the trainer's thread."""
        self._expected.append(cut)

    def take_in(self, cut: CutPull) -> None:
        """Takes in one update, which `catch_up` will apply.

        Args:
          cut: A pull of what the landed units read.
        """
        if self._expected:
            self._expected.popleft()
        landed = _Cut.of(cut, self._units)
        self._host.add(landed.num_bytes)
        self._record.gradient_bytes += landed.num_bytes
        self._pending.append(landed)

    def catch_up(self) -> None:
        """Applies what has been taken in, unless the next update is there already."""
        if not self._is_worth_waiting(self._pending[-1].num_bytes):
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
        return has_room and self._expected[0].is_ready()

    def _apply_pending(self) -> None:
        """Applies what has been taken in to all chunks that had landed by then."""
        shards = [
            shard
            for u, seen in self._landed.items()
            if not self._groups[self._units[u].group].recipe.is_identity
            for shard in self._shards(u, max(0, seen - self._num_applied))
        ]
        scratch_bytes = self._replayer.scratch_bytes(shards)
        self._host.add(scratch_bytes)
        try:
            with events.span(events.SPAN_REPLAY):
                self._replayer.apply(shards)
        finally:
            self._host.release(scratch_bytes)
            self._forget_pending()

    def _shards(self, u: int, start: int) -> Iterator[ShardReplay]:
        unit = self._units[u]
        group, rows = self._groups[unit.group], slice(unit.start, unit.stop)
        pending = self._pending[start:]
        leaves = [self._leaves[j].flat for j in group.leaves]
        for shard, states in enumerate(zip(*leaves, strict=True)):
            updates = tuple(
                Update(
                    tuple(cut.values[u, i][shard] for i in group.retained),
                    tuple(cut.scalars[i] for i in group.scalars),
                )
                for cut in pending
            )
            yield ShardReplay(group.recipe, tuple(x[rows] for x in states), updates)

    def _forget_pending(self) -> None:
        self._num_applied += len(self._pending)
        self._host.release(sum(cut.num_bytes for cut in self._pending))
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
        final = {
            leaf: self._leaves[leaf].chunks([s.index for s in wanted])
            for leaf, wanted in slots.items()
        }
        if check is not None:
            check(final)
        for leaf, wanted in slots.items():
            del self._leaves[leaf]
            fill(wanted, final.pop(leaf))

    def drop(self) -> None:
        """Forgets what was not asked for; the window was abandoned, or the save took a part."""
        self._host.release(sum(leaf.num_landed_bytes for leaf in self._leaves.values()))
        self._leaves.clear()
        self._landed.clear()
        self._expected.clear()
        self._forget_pending()
