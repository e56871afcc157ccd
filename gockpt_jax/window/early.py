"""The chunks that left early, from landing on the host to being final.

Two threads come here. One lands: it waits for pulls, counts what has come, and returns what is to
be done with it. The other does that, and all the rest, in the order in which it landed, which is
the trainer's. So an update always meets the chunks that left before it and no others, and nothing
needs a lock; and device memory is given back while an earlier update is still being replayed. What
leaves as one is a unit: the updates that it has had are counted for each.
"""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.replay.programs import FUSED_UPDATES
from gockpt_jax.replay.shards import ShardReplay, Update
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.training.step_cut import ReplayGroup
from gockpt_jax.transfer.budget import ByteBudget, Loan
from gockpt_jax.transfer.chunks import Chunk
from gockpt_jax.transfer.pull import ChunkPull, HostChunk
from gockpt_jax.window.departure import Follower
from gockpt_jax.window.landed import LandedLeaf
from gockpt_jax.window.slots import ChunkSlot, fill
from gockpt_jax.window.units import GroupUnit
from gockpt_jax.window.worker import Task

_Rows = tuple[int, Chunk, Sequence[HostChunk]]
"""Of a leaf, by its position, rows and what has come of them."""
UnitValue = tuple[int, int]
"""A unit, and one of its group's cut values or leaves, by their positions."""


@dataclasses.dataclass(frozen=True, slots=True)
class _LandedCut:
    """One update's cut on the host: flat rows in each shard by unit and value, and the scalars."""

    values: Mapping[UnitValue, Sequence[np.ndarray]]
    scalars: Mapping[int, np.ndarray]
    num_bytes: int

    @classmethod
    def of(
        cls, followers: Sequence[Follower], pull: ChunkPull, units: Sequence[GroupUnit]
    ) -> "_LandedCut":
        values: dict[UnitValue, Sequence[np.ndarray]] = {}
        scalars: dict[int, np.ndarray] = {}
        for follower, chunks in zip(followers, pull.result(), strict=True):
            run, i = follower.units, follower.value
            if follower.is_scalar:
                scalars[i] = chunks[0].data.reshape(())
            for u in run:  # the chunk begins with the rows of the first
                first, unit = units[run[0]], units[u]
                rows = slice(unit.start - first.start, unit.stop - first.start)
                values[u, i] = [c.data[rows] for c in chunks]
        arrays = [*(x for rows in values.values() for x in rows), *scalars.values()]
        return cls(values, scalars, sum(x.nbytes for x in arrays))


class EarlyChunks:
    """The chunks of one window that left before its save step.

    Args:
      groups: The program's groups.
      units: The plan's units.
      replayer: Applies the groups' recipes.
      host: Accounts for bytes on the host.
      waiting_limit_bytes: Of retained values that have landed and wait for replay; what comes
        beyond waits to be landed.
      record: The save's record.

    Attributes:
      error: What went wrong first, on either thread: nothing more is landed or replayed.
    """

    def __init__(
        self, groups: Sequence[ReplayGroup], units: Sequence[GroupUnit], replayer: Replayer,
        host: ByteBudget, waiting_limit_bytes: int | None, record: SaveRecord,
    ):  # fmt: skip
        self.error: BaseException | None = None
        self._groups = groups
        self._units = units
        self._replayer = replayer
        self._host = host
        self._held = Loan()  # of the host's bytes, until slots have them
        self._waiting = ByteBudget(waiting_limit_bytes)
        self._waits = Loan()  # of those
        self._record = record
        self._landed: dict[int, int] = {}  # units, with the number of updates before they left
        self._leaves: dict[int, LandedLeaf] = collections.defaultdict(LandedLeaf)
        self._pending: list[_LandedCut] = []
        self._num_applied = 0
        self._promised: list[ChunkSlot] = []
        self._is_rest_unwanted = False

    # On the trainer's thread.

    def promise(self, slots: Iterable[ChunkSlot]) -> None:
        """Takes note of slots that were promised: somebody reads them, or gives them back."""
        self._promised += slots

    def promise_no_more(self) -> None:
        """What has not been promised by now, nobody will read."""
        self._is_rest_unwanted = True

    @property
    def is_wanted(self) -> bool:
        """Whether somebody may still read what becomes final.

        Replay is the dearest part of a save: that of one which was abandoned, superseded or has
        failed would make the next one late.
        """
        return not self._is_rest_unwanted or any(slot.owed for slot in self._promised)

    def failed(self, error: BaseException) -> None:
        """Takes note of an error, unless there is one; what waits for replay waits no more."""
        self.error = self.error or error
        self._waiting.repay(self._waits)

    # On the thread that lands.

    def land_block(
        self, leaves: Sequence[UnitValue], chunks: Sequence[Chunk], pull: ChunkPull
    ) -> Task:
        """Waits for a block.

        Args:
          leaves: Of each chunk, the unit and the leaf.
          chunks: What left.
          pull: Theirs.

        Returns:
          What the other thread is to do with it.
        """
        rows = [
            (leaf, chunk, found)
            for (_, leaf), chunk, found in zip(leaves, chunks, pull.result(), strict=True)
        ]
        return self._counted(rows, {unit for unit, _ in leaves})

    def land_rows(self, leaf: int, chunk: Chunk, found: Sequence[HostChunk]) -> Task:
        """Takes in rows of a leaf that have come at the sealed version, and are final."""
        return self._counted([(leaf, chunk, found)], ())

    def _counted(self, rows: Sequence[_Rows], units: Iterable[int]) -> Task:
        num_bytes = sum(h.data.nbytes for _, _, found in rows for h in found)
        self._host.add(num_bytes, self._held)
        return functools.partial(self._put, rows, units)

    def land_cut(self, followers: Sequence[Follower], pull: ChunkPull) -> Task:
        """Waits for an update's cut, and for room on the host, which replay gives back.

        Args:
          followers: What follows all that has left.
          pull: Of these, in their order.
        """
        landed = _LandedCut.of(followers, pull, self._units)
        self._waiting.acquire(landed.num_bytes, self._waits)
        self._host.add(landed.num_bytes, self._held)
        self._record.gradient_bytes += landed.num_bytes
        return functools.partial(self._update, landed)

    # On the thread that replays.

    def _put(self, rows: Sequence[_Rows], units: Iterable[int]) -> None:
        for leaf, chunk, found in rows:
            self._leaves[leaf].put(chunk, found)
        self._landed.update(dict.fromkeys(units, self._num_applied + len(self._pending)))

    def _update(self, cut: _LandedCut) -> None:
        """Applies an update, and those before it that wait, unless the next has landed too.

        Updates are applied together, in one pass over the chunks, if replay is behind.
        """
        self._pending.append(cut)
        if self.error is not None or not self.is_wanted:
            self._forget_pending()
        elif len(self._pending) == FUSED_UPDATES[0] or not self._next_has_landed():
            self._apply_pending()

    def _next_has_landed(self) -> bool:
        return self._waiting.used_bytes > sum(cut.num_bytes for cut in self._pending)

    def _apply_pending(self) -> None:
        """Applies what has been taken in to all chunks that had landed by then."""
        shards = [
            shard
            for u, seen in self._landed.items()
            if not self._groups[self._units[u].group].recipe.is_identity
            for shard in self._shards(u, max(0, seen - self._num_applied))
        ]
        scratch_bytes = self._replayer.scratch_bytes(shards)
        self._host.add(scratch_bytes, self._held)  # given back by `drop`, if this fails
        with events.span(events.SPAN_REPLAY):
            self._replayer.apply(shards)
        self._host.release(scratch_bytes, self._held)
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
        num_bytes = sum(cut.num_bytes for cut in self._pending)
        self._pending.clear()
        self._host.release(num_bytes, self._held)
        self._waiting.release(num_bytes, self._waits)

    def finish(self, slots: Mapping[int, Sequence[ChunkSlot]]) -> dict[int, list[HostChunk]]:
        """The seal has been reached: the chunks of each leaf that is wanted, replayed up to it.

        Raises:
          CancelledError: if nobody wants them any more; they may not have been replayed.
        """
        if not self.is_wanted:
            raise concurrent.futures.CancelledError
        assert not self._pending, "an update waits for one that has come or will never come"
        return {
            leaf: self._leaves[leaf].chunks([s.index for s in wanted])
            for leaf, wanted in slots.items()
        }

    def hand_over(
        self, slots: Mapping[int, Sequence[ChunkSlot]], final: dict[int, list[HostChunk]]
    ) -> None:
        """Resolves the slots with what is final, and keeps none of it."""
        self._record.drained()  # what is late may still be landing: that is drained after it
        for leaf, wanted in slots.items():
            fill(wanted, final.pop(leaf), self._host, self._held)
            del self._leaves[leaf]  # the slots' now

    def drop(self) -> None:
        """Forgets what was not asked for; the window was abandoned, or the save took a part."""
        self._leaves.clear()
        self._forget_pending()  # if the update that they wait for was never passed on
        self._host.repay(self._held)
