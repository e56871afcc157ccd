"""One open window, on the trainer's thread: what leaves, what follows, what is sealed."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.save_record import SaveRecord
from gockpt_jax.training.program import StepProgram
from gockpt_jax.transfer.block import stage_and_pull
from gockpt_jax.transfer.chunks import Chunk
from gockpt_jax.transfer.pull import HostChunk
from gockpt_jax.window.audit import Auditor, PendingAudit
from gockpt_jax.window.departure import Departure, make_departure
from gockpt_jax.window.early import EarlyChunks
from gockpt_jax.window.landing import landing_task
from gockpt_jax.window.late import send_late
from gockpt_jax.window.late_groups import LateGroups
from gockpt_jax.window.planned import Planned
from gockpt_jax.window.resources import Resources
from gockpt_jax.window.slots import ChunkSlot, fail, make_slots
from gockpt_jax.window.step_room import StepRoom
from gockpt_jax.window.units import units_behind
from gockpt_jax.window.worker import Task, in_any_case

_ROUNDED = "replayed up to rounding, as no exact window fits the device budget"


class OpenWindow:
    """A window between its opening and its seal.

    Args:
      program: Of the steps that it follows, armed; another one later, if it has the same cut.
      planned: What leaves at which version.
      target: The version that will be saved.
      departures: The plan's, behind the one of nothing.
      replayer: Applies the recipes.
      auditor: Compares what was replayed, and knows what must not leave early any more.
      resources: The session's.

    Attributes:
      state: The leaves that the last armed step returned; none before the first.
      given_up: Why this process takes nothing more for it; `None` if it does.
      others_wait: Whether a program of all processes is to begin here, and has not yet.
      stepping: The thread whose update is under way: a block has left, and nothing has followed it
        yet; `None` between updates.
    """

    def __init__(
        self, program: StepProgram, planned: Planned, target: int,
        departures: Sequence[Departure], *,
        replayer: Replayer, auditor: Auditor, resources: Resources,
    ):  # fmt: skip
        self.program = program
        self.plan = plan = planned.plan
        self._cut = cut = planned.cut
        self.target = target
        reason = plan.reason if cut.is_exact else f"{plan.reason}; {_ROUNDED}"
        self.record = SaveRecord(kind="window", reason=reason, window_steps=plan.steps)
        self.state: Sequence[jax.Array] = ()
        self.given_up: str | None = None
        self.stepping: int | None = None
        self.others_wait = False
        self._departures = departures[1:]
        self._units = units = planned.size.units
        self._resources = resources
        self._worker, self._device = resources.worker, resources.device
        self._auditor = auditor
        self._early = EarlyChunks(
            cut.groups, units, replayer, resources.host,
            resources.host.waiting_limit_bytes(*planned.host_bytes), self.record,
        )  # fmt: skip
        self._left = [departures[0]]  # in that order, the last with what follows them all
        self._handed_over: set[int] = set()  # leaves whose early chunks an item of the save has
        self._late = LateGroups(cut, auditor)
        self._retained_bytes = planned.size.retained
        self._room = StepRoom(resources.device, resources.watcher)
        self._beside_bytes = 0  # what else was in flight when it was taken
        sizes = [math.prod(spec.shape) for spec in cut.arrays]
        self._smallest = sizes.index(min(sizes)) if sizes else 0  # of the cut values

    @property
    def error(self) -> BaseException | None:
        """What went wrong on the worker threads, if anything."""
        return self._early.error

    @property
    def is_sound(self) -> bool:
        """Whether its save can be made from it."""
        return self.error is None and self.given_up is None

    def status(self, version: int) -> str:
        """How far it is at a version, in a few words."""
        return f"window {version - (self.target - self.plan.steps)}/{self.plan.steps}"

    def leave(self, version: int, old: Sequence[Any]) -> None:
        """Stages the block of this version and starts its pull.

        Args:
          version: Of the state about to go into the step.
          old: Its leaves.
        """
        n = version - (self.target - self.plan.steps + 1)
        # First: should this fail, the other processes go on, and this one beside them.
        self._left[n + 1 :] = [self._departures[n]]  # once, where a call is made again
        # Given up or not: what follows is staged by a program of all.
        self._left[-1] = departure = self._departure(n, old)
        if departure.leaves and self.given_up is None:
            self._send(departure, old)

    def _departure(self, n: int, old: Sequence[Any]) -> Departure:
        """The plan's n-th, unless some of it, or of what left before, has become late."""
        leaving = dict.fromkeys(self._units[u].group for u in self.plan.blocks[n])
        self._late.look_for_replaced(self._groups_of(self._left[:-1]), old, self.state)
        self._late.heed_demotions()
        self._late.look_for_host_arrays(leaving, old)
        before, planned = self._left[-2], self._departures[n]
        units = {
            u: self._units[u] for u in self.plan.blocks[n] if self._units[u].group not in self._late
        }
        if planned.units == (*before.units, *units) and planned.is_cut_from(old):
            return planned
        return make_departure(self._cut, units, old, before)

    def _groups_of(self, left: Sequence[Departure]) -> dict[int, int]:
        """Of each leaf of which some has left, its group."""
        return {j: self._units[u].group for departure in left for u, j in departure.leaves}

    def _send(self, departure: Departure, old: Sequence[jax.Array]) -> None:
        block, num_bytes = departure.block, departure.block.staged_bytes
        with self._device.lent(num_bytes) as give_back, self._device.heeded(num_bytes):
            pull = stage_and_pull(block, [old[j] for _, j in departure.leaves])
            land = functools.partial(self._early.land_block, departure.leaves, block.chunks, pull)
            self._land(land, give_back, num_bytes)

    def make_room(self) -> None:
        """Waits until the armed step's retained values, and copies of them, fit the budget."""
        self._room.take(self._retained_bytes + self._left[-1].following.staged_bytes)
        self._beside_bytes = self._device.used_bytes - self._room.taken_bytes

    def had_no_room(self, error: BaseException) -> None:
        """The armed step did not run for want of the device's memory."""
        self._device.heed(self._room.taken_bytes, self._beside_bytes, error)

    def follow(self, state: Sequence[jax.Array], cut: Sequence[jax.Array]) -> None:
        """Sends an armed step's cut after the chunks that have left; nothing keeps the rest.

        Args:
          state: The leaves of the new state, in the program's order.
          cut: The cut arrays, likewise.
        """
        self.state = state
        has_run = [*cut[self._smallest : self._smallest + 1]]  # none, if there is no cut
        with self._room.dispatched(has_run) as follows:
            left, staged = self._stage_cut(cut)
            has_run += staged
            if self.given_up is not None:
                follows(0)
                return
            with events.span(events.SPAN_PULL):
                pull = left.following.start_pull(staged)
            land = functools.partial(self._early.land_cut, left.followers, pull)
            self._land(land, follows(left.following.held_bytes), left.following.held_bytes)

    def _stage_cut(self, cut: Sequence[jax.Array]) -> tuple[Departure, list[jax.Array]]:
        # The compiler may have put them elsewhere than the leaves.
        left = self._left[-1] = self._left[-1].followed_by(cut)
        # Given up or not: where values lie otherwise, it is a program of all processes.
        self.others_wait = left.following.is_resharded
        with self._device.heeded(left.following.staged_bytes), events.span(events.SPAN_STAGE):
            staged = left.following.stage(left.arrays_of(cut))
        self.others_wait = False
        return left, staged

    def give_up(self, why: str) -> None:
        """Takes nothing more on this process; the others', and its armed steps, go on."""
        self.given_up = why
        self._forget_rest()

    def _land(
        self, land: Callable[[], Task], has_landed: Callable[[], None], num_bytes: int
    ) -> None:
        """Lands something on the worker, gives back what it held on the device, and passes it on.

        Replay takes no device memory, so whatever lands next does not wait for it.

        Args:
          land: Waits for it; a runtime may find out only now that it had no room.
          has_landed: Gives back what it held.
          num_bytes: As many.
        """
        heed = functools.partial(self._device.heed, num_bytes, self._device.used_bytes - num_bytes)
        self._worker.submit(
            *landing_task(
                lambda: land() if self._early.error is None else None,
                self._pass_on, has_landed, heed, self._early.failed,
            )
        )  # fmt: skip

    def _pass_on(self, task: Task | None) -> None:
        """Has something done with what has landed, after all that has landed before it."""
        if task is not None:
            self._worker.pass_on(task, self._early.failed)

    def take_early(
        self, arrays: Sequence[jax.Array], promised: dict[int, list[ChunkSlot]]
    ) -> dict[str, Any] | None:
        """Promises what has left early of one item of the save, whose version has been reached.

        Args:
          arrays: Of the state given to `save`.
          promised: Takes, by its `id`, the slots of each of them that the last update returned,
            that left early, was followed all the way, and has not been handed over to another item
            of the same save. An interrupt leaves them there: whoever has them gives them back.

        Returns:
          What their audit has shown, which is complete once a slot is; `None` if there is none.
        """
        self._late.heed_demotions()
        given = set(map(id, arrays))
        new = {j: a for j, a in enumerate(self.state) if id(a) in given}
        wanted = self._followed(new)
        source = self._resources.replicas.source
        slots = {j: make_slots(source(new[j]).owned.values()) for j in wanted}
        promised.update((id(new[j]), of_leaf) for j, of_leaf in slots.items())
        self._early.promise(slot for of_leaf in slots.values() for slot in of_leaf)
        self.record.late_leaves = self._late.reasons
        paths = self._cut.paths
        audit = self._auditor.sample(
            {paths[j]: new[j] for j in slots}, self.record, is_exact=self._cut.is_exact
        )
        try:
            self._handed_over.update(slots)
            self._send_rest(new, wanted)
            self._worker.submit_behind(
                functools.partial(self._finish, slots, audit),
                functools.partial(self._is_lost, slots, audit),
            )
        except BaseException:  # an interrupt
            if audit is not None:
                self._worker.submit_behind(*in_any_case(audit.drop))
            raise
        return None if audit is None else audit.metadata

    def _send_rest(self, new: Mapping[int, jax.Array], rest: Mapping[int, Sequence[Chunk]]) -> None:
        """Of leaves that have left in part, sends the rows that have not: late, and final."""
        chunks = [(n, chunk) for n, of_leaf in enumerate(rest.values()) for chunk in of_leaf]
        receivers = [(functools.partial(self._land_rows, j), self._early.failed) for j in rest]
        send_late([new[j] for j in rest], chunks, receivers, self._resources)

    def _land_rows(self, leaf: int, chunk: Chunk, found: Sequence[HostChunk]) -> None:
        self._pass_on(self._early.land_rows(leaf, chunk, found))

    def _finish(self, slots: Mapping[int, Sequence[ChunkSlot]], audit: PendingAudit | None) -> None:
        """On the thread that replays: hands over what is final, unless the audit objects."""
        if self._early.error is not None:
            raise self._early.error
        final = self._early.finish(slots)
        if audit is not None:
            audit.check({self._cut.paths[j]: chunks for j, chunks in final.items()})
        self._early.hand_over(slots, final)
        if audit is not None:
            audit.drop()

    def _is_lost(
        self, slots: Mapping[int, Sequence[ChunkSlot]], audit: PendingAudit | None,
        error: BaseException,
    ) -> None:  # fmt: skip
        self._early.failed(error)  # no other item of this save is made of what is left
        self._early.drop()  # before anybody hears of it: the next save may need the room
        if audit is not None:
            audit.drop()
        for promised in slots.values():
            fail(promised, error)

    def _followed(self, arrays: Mapping[int, jax.Array]) -> dict[int, list[Chunk]]:
        """The leaves that left early and were followed all the way, with the rows that did not."""
        lay = {
            j: chunk.source.sharding
            for left in self._left
            for (_, j), chunk in zip(left.leaves, left.block.chunks, strict=True)
        }
        followed = [
            j for j, g in self._groups_of(self._left).items()
            if g not in self._late and j in arrays and j not in self._handed_over
            and arrays[j].sharding.is_equivalent_to(lay[j], arrays[j].ndim)
        ]  # fmt: skip
        behind = units_behind(self._cut, self._units, set(self._left[-1].units))
        return {j: [unit.chunk_of(arrays[j]) for unit in behind[j]] for j in followed}

    def drop(self) -> None:
        """Forgets what no save was promised; earlier checkpoints are untouched."""
        self._room.give_back()  # an interrupted step's, of which nobody else may hear
        self.state = ()  # whoever replays still holds the window
        self._forget_rest()

    def _forget_rest(self) -> None:
        self._early.promise_no_more()
        self._worker.submit_behind(*in_any_case(self._early.drop))
