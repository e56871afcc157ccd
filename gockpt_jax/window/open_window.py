"""One open window, on the trainer's thread: what leaves, what follows, what is sealed."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gockpt_jax.replay.engine import Replayer
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.report import SaveRecord
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.wrap import WrappedStep
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.pull import (
    HostChunk,
    Pull,
    align,
    owned_shards,
    start_pull,
    start_scalar_pull,
)
from gockpt_jax.transfer.staging import device_bytes, stage
from gockpt_jax.window.audit import Auditor
from gockpt_jax.window.early import EarlyChunks
from gockpt_jax.window.plan import Plan
from gockpt_jax.window.slots import ChunkSlot, fail, make_slots
from gockpt_jax.window.worker import Worker


class OpenWindow:
    """A window between its opening and its seal.

    Args:
      step: The wrapped step whose updates it follows; another one later, if it has the same cut.
      program: Its program, armed.
      plan: What leaves at which version.
      target: The version that will be saved.
      retained_bytes: What an armed step retains on one device.
      worker: Takes what has left.
      device: Budget for staged copies and retained values.
      host: Accounts for bytes on the host.
      replayer: Applies the recipes.
      auditor: Compares what was replayed, and knows what must not leave early any more.
    """

    def __init__(
        self, step: WrappedStep, program: StepProgram, plan: Plan, target: int, *,
        retained_bytes: int, worker: Worker, device: ByteBudget, host: ByteBudget,
        replayer: Replayer, auditor: Auditor,
    ):  # fmt: skip
        self.step = step
        self.program = program
        self.plan = plan
        self.target = target
        self.record = SaveRecord(kind="window", reason=plan.reason, window_steps=plan.steps)
        self._worker = worker
        self._device = device
        self._auditor = auditor
        self._early = EarlyChunks(program.groups, replayer, host, self.record)
        self._placed: dict[int, Any] = {}  # sharding of each leaf that has left
        self._left: list[int] = []  # groups that have left, in that order
        self._handed_over: set[int] = set()  # leaves whose early chunks an item of the save has
        self._late: dict[int, str] = {}  # groups that left but became late, with the reason
        self._retained_bytes = retained_bytes
        self._is_given_up = False

    @property
    def error(self) -> BaseException | None:
        """What went wrong on the worker thread, if anything."""
        return self._early.error

    def status(self, version: int) -> str:
        """How far it is at a version, in a few words."""
        return f"window {version - (self.target - self.plan.steps)}/{self.plan.steps}"

    def leave(self, version: int, old: Sequence[Any], previous: Sequence[Any] | None) -> None:
        """Stages the block of this version and starts its pull.

        Args:
          version: Of the state about to go into the step.
          old: Its leaves.
          previous: The leaves that the last update returned; `None` when the window opens.
        """
        if previous is not None:
            self._check_continuity(old, previous)
        self._heed_demotions()
        # Units are the program's groups, one to one and in its order.
        planned = self.plan.blocks[version - (self.target - self.plan.steps + 1)]
        block = [g for g in planned if g not in self._late]
        leaves = [j for g in block for j in self.program.groups[g].leaves]
        # First: should sending fail, the other processes go on, and this one beside them.
        self._left.extend(block)
        self._placed.update((j, old[j].sharding) for j in leaves)
        if leaves and not self._is_given_up:
            self._send(block, {j: old[j] for j in leaves})

    def _check_continuity(self, old: Sequence[Any], previous: Sequence[Any]) -> None:
        """What left can be replayed only if each step starts from what the last one returned."""
        for g in self._left:
            for j in self.program.groups[g].leaves:
                if old[j] is not previous[j] and g not in self._late:
                    path = self.program.positions.paths[j]
                    self._late[g] = f"{path}: replaced between two steps of the window"

    def _heed_demotions(self) -> None:
        """The audit of the last save may still be running while this window is open."""
        paths = self.program.positions.paths
        for block in self.plan.blocks:
            for g in block:
                reason = self._auditor.demoted([paths[j] for j in self.program.groups[g].leaves])
                if reason is not None:
                    self._late.setdefault(g, reason)

    def _send(self, block: Sequence[int], arrays: Mapping[int, jax.Array]) -> None:
        num_bytes = sum(device_bytes(a) for a in arrays.values())
        self._device.acquire(num_bytes)
        try:
            with events.span(events.SPAN_STAGE):
                staged = stage(list(arrays.values()))
            with events.span(events.SPAN_PULL):
                pulls = dict(zip(arrays, [start_pull(a) for a in staged], strict=True))
        except BaseException:
            self._device.release(num_bytes)
            raise
        self._submit(lambda: self._early.land(block, pulls), num_bytes)

    def make_room(self) -> None:
        """Waits until the armed step's retained values fit the device budget."""
        self._device.acquire(self._retained_bytes)

    def give_back_room(self) -> None:
        """The armed step did not run after all."""
        self._device.release(self._retained_bytes)

    def follow(self, cut: Sequence[jax.Array]) -> None:
        """Sends an armed step's cut after the chunks that have left.

        Args:
          cut: The cut arrays, in the program's order.
        """
        pulls: dict[int, Pull] = {}
        if self._is_given_up:
            self._follow_with_nothing(cut)
            return
        with events.span(events.SPAN_PULL):
            for g in self._left:
                group = self.program.groups[g]
                placement = self._placed[group.leaves[0]]
                for i in group.retained:
                    pulls.setdefault(i, start_pull(align(cut[i], placement)))
                for i in group.scalars:
                    pulls.setdefault(i, start_scalar_pull(cut[i]))
        self._early.expect(pulls)
        self._submit(lambda: self._early.update(pulls), self._retained_bytes)

    def _follow_with_nothing(self, cut: Sequence[jax.Array]) -> None:
        """Takes part in what the other processes do with an armed step's cut, and takes nothing."""
        for g in self._left:
            group = self.program.groups[g]
            for i in group.retained:
                align(cut[i], self._placed[group.leaves[0]])  # may be a program of all processes
        self.give_back_room()

    def give_up(self) -> None:
        """Takes nothing more on this process; the others', and its armed steps, go on."""
        self._is_given_up = True
        self.drop()

    def _submit(self, task: Any, device_bytes_held: int) -> None:
        """Runs a task on the worker; what it held on the device is free afterwards."""

        def run() -> None:
            try:
                if self._early.error is None:
                    task()
            except BaseException as error:
                self._early.error = error
            finally:
                self._device.release(device_bytes_held)

        self._worker.submit(run)

    def seal(
        self, arrays: Mapping[int, jax.Array]
    ) -> tuple[dict[int, list[ChunkSlot]], dict[str, Any] | None]:
        """The state at the save step is reached; its early chunks are final after this.

        Args:
          arrays: Leaves of the state given to `save` that are the ones the last update returned,
            by their position in the program's state.

        Returns:
          Slots for those of them that left early, were followed all the way, and have not been
          handed over to another item of the same save. And what their audit has shown, which is
          complete once a slot is; `None` if there is none.
        """
        self._heed_demotions()
        slots = {
            j: make_slots([s.index for s in owned_shards(arrays[j])])
            for g in self._left
            if g not in self._late
            for j in self.program.groups[g].leaves
            if j in arrays
            and j not in self._handed_over
            and arrays[j].sharding.is_equivalent_to(self._placed[j], arrays[j].ndim)
        }
        self.record.late_leaves = tuple(self._late.values())
        paths = self.program.positions.paths
        audit = self._auditor.sample({paths[j]: arrays[j] for j in slots}, self.record)
        self._handed_over.update(slots)

        def check(final: Mapping[int, Sequence[HostChunk]]) -> None:
            if audit is not None:
                audit.check({paths[j]: chunks for j, chunks in final.items()})

        def finish() -> None:
            try:
                if self._early.error is not None:
                    raise self._early.error
                self._early.finish(slots, check)
            except BaseException as error:
                self._early.drop()
                for wanted in slots.values():
                    fail(wanted, error)
            finally:
                if audit is not None:
                    audit.drop()

        self._worker.submit(finish)
        return slots, None if audit is None else audit.metadata

    def drop(self) -> None:
        """Forgets everything; earlier checkpoints are untouched."""
        self._worker.submit(self._early.drop)
