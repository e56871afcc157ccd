"""The life of windows, on the trainer's thread.

A window of K steps that ends at save step V:

    version  V-K+1           V-K+2           ...  V-1             V
    trainer  open, stage 1   stage 2         ...  stage K-1       save: stage the late leaves, seal
    device        armed step, cut  armed step, cut  ...  armed step, cut
    worker        land 1, update   land 2, update   ...  update   finish early, land late

Each `stage` copies a block on the device and starts its pull before the next step is dispatched;
the pull of a step's cut is started right behind the step. The worker takes them in that order.

Beside other processes, a window is open everywhere or nowhere, for all run the same executables
(`processes.py`). One process may give up its part: it runs the armed steps beside the others, and
takes a snapshot at the seal. Nothing it finds wrong is raised between two commits, where the
others would wait for it in vain.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import jax

from gockpt_jax.errors import ReplayError
from gockpt_jax.options import WindowOptions
from gockpt_jax.telemetry import events
from gockpt_jax.telemetry.report import SaveRecord
from gockpt_jax.training.program import StepProgram
from gockpt_jax.training.wrap import WrappedStep
from gockpt_jax.transfer.budget import ByteBudget
from gockpt_jax.transfer.staging import owned_bytes
from gockpt_jax.window.agreement import Agreement
from gockpt_jax.window.audit import Auditor
from gockpt_jax.window.failures import surface
from gockpt_jax.window.late import take_now
from gockpt_jax.window.open_window import OpenWindow
from gockpt_jax.window.planner import Planner
from gockpt_jax.window.predict import SavePredictor
from gockpt_jax.window.processes import Processes
from gockpt_jax.window.slots import ChunkSlot
from gockpt_jax.window.worker import Worker

_log = logging.getLogger("gockpt_jax")

_NO_ROOM = "the host budget had no room when the window should have opened"
_NOT_PREDICTED = "the save was not predicted, so no window was open"


class Session:
    """Counts updates, opens windows for predicted saves, and seals them.

    Args:
      options: The user's.
      processes: Those that save together.
    """

    def __init__(self, options: WindowOptions, processes: Processes):
        self.version = 0
        self.processes = processes
        self.predictor = SavePredictor()
        self.host = ByteBudget(options.host_budget_bytes)  # counts; nobody waits for it
        self._options = options
        self._worker = Worker()
        self._device = ByteBudget(options.device_budget_bytes)
        self._window: OpenWindow | None = None
        self._last_step: WrappedStep | None = None
        self._sealed_at = -1
        self.planner = Planner(options, self._device, self.host, processes)
        self._agreement = Agreement(options, processes)
        self._auditor = Auditor(options.audit, self._worker, device=self._device, host=self.host)
        self._why_snapshot = _NOT_PREDICTED
        self._failure: BaseException | None = None
        self._given_up: str | None = None  # why this process takes no part in the open window
        self._saving: tuple[OpenWindow | None, SaveRecord] | None = None  # between its items

    # What the wrapped step tells.

    def before_update(self, step: WrappedStep, args: Any, kwargs: Any) -> bool:
        """Stages what leaves at this version; True if the update must return its cut.

        Raises:
          ReplayError: if a window failed since the last call. Nothing has been dispatched, the
            state is alive, and the next call goes on.
        """
        start = time.perf_counter()
        self.end_save()
        self.surface_failure()
        if self._window is None:
            self.planner.clock.tick(start)
        if self._window is not None and self._window.target <= self.version:
            self.abandon("the predicted save did not come", mispredicted=True)
        opening = self._window is None
        if opening and step.last_result is not None:
            self._window = self._open(step)
        window, program = self._window, step.program
        if window is None:
            return False
        if program is None or not self._can_follow(window, step, program):
            self.abandon("the step's program changed inside the window")
            return False
        try:
            old = program.state_leaves(args, kwargs)
        except TypeError as error:  # the call itself, unarmed, is for the user's step to judge
            self.abandon(f"the call changed: {error}")
            step.call_changed(args, kwargs)
            return False
        previous = None if opening else window.program.new_state_leaves(window.step.last_result)
        window.step, window.program = step, program
        try:
            window.leave(self.version, old, previous)
        except Exception as error:  # out of device memory, as a rule: training must go on
            _log.warning("a window was given up, training is not affected: %r", error)
            self._give_up(f"staging failed: {error!r}")
            if self._window is None:
                return False
        window.make_room()
        self.planner.clock.pause()
        window.record.stall_secs += time.perf_counter() - start
        return True

    def no_update(self, step: WrappedStep, reason: str) -> None:
        """The armed step did not run: it refused the call, or raised. The window is over."""
        del step
        if self._window is not None:
            self._window.give_back_room()
            self.abandon(reason)

    def after_update(self, step: WrappedStep, result: Any, cut: list[jax.Array] | None) -> None:
        """Counts the update and sends its cut after what has left."""
        del result
        self.version += 1
        self._last_step = step
        if self._window is not None and cut is not None:
            start = time.perf_counter()
            try:
                self._window.follow(cut)
            except Exception as error:  # the old state is donated: the caller must get the new one
                _log.warning("a window was given up, training is not affected: %r", error)
                self._window.give_back_room()
                self._give_up(f"its cut could not be pulled: {error!r}")
                return
            self._window.record.stall_secs += time.perf_counter() - start

    # Opening and abandoning.

    def _open(self, step: WrappedStep) -> OpenWindow | None:
        """Opens a window if a save is predicted as many steps ahead as it takes."""
        self._given_up = None
        self.planner.limit_device(stepped=True)
        self.planner.prepare(step)
        self._agreement.settle(step)
        horizon = self._options.steps or self._options.max_steps
        target = self.predictor.next_save(self.version, horizon - 1) if horizon > 1 else None
        # A window may not begin with the version that the last save sealed: K is at most the
        # distance between saves.
        if target is None or self.version <= self._sealed_at:
            return None
        program = step.program
        if program is None:
            self._why_snapshot = step.why_not or "the step had not been traced yet"
            return None
        steps = target - self.version + 1
        plan, size = self.planner.plan_for(program, steps)
        if plan.steps == 1:
            self._why_snapshot = plan.reason
        if plan.steps == 1 or plan.steps < steps or not self._is_ready(program, target):
            return None
        leaves = program.new_state_leaves(step.last_result)
        admitted = self.planner.admits(leaves, size)
        if not admitted and not self.processes.several:
            self._why_snapshot = _NO_ROOM
            return None
        self._reset_peaks()
        window = OpenWindow(
            step, program, plan, target,
            departures=self.planner.departures(program, plan, size, leaves), units=size.units,
            retained_bytes=size.retained, worker=self._worker, device=self._device, host=self.host,
            replayer=self.planner.replayer(leaves), auditor=self._auditor,
        )  # fmt: skip
        if not admitted:  # the others may have room
            self._given_up = _NO_ROOM
            window.give_up()
        return window

    def _is_ready(self, program: StepProgram, target: int) -> bool:
        why_not = self._agreement.why_not_ready(program, target)
        if why_not is not None:
            self._why_snapshot = why_not
        return why_not is None

    def _can_follow(self, window: OpenWindow, step: WrappedStep, program: StepProgram) -> bool:
        """Whether a window goes on with this step; another step may have opened it."""
        if program is window.program:
            return True
        if not program.replays_like(window.program):
            return False
        self.planner.prepare(step)
        self._agreement.settle(step)
        return program.is_armed and self._is_ready(program, window.target)

    def abandon(self, reason: str, *, mispredicted: bool = False) -> None:
        """Closes the open window without a checkpoint; earlier ones are untouched."""
        if self._window is None:
            return
        level = logging.DEBUG if self._window.error is None else logging.WARNING
        _log.log(level, "window for version %d abandoned: %s", self._window.target, reason)
        events.record_event(events.WINDOW_ABANDONED)
        self._why_snapshot = f"its window was abandoned: {reason}"
        self._window.drop()
        self._window = self._given_up = None
        if self.processes.several:
            self._failure = None  # its save does not come, so there is nothing to fail
        if mispredicted:
            self.predictor.abandoned()

    def _give_up(self, reason: str) -> None:
        """This process's part of the open window is over; so is the window, unless others go on."""
        assert self._window is not None
        if not self.processes.several:
            self.abandon(reason)
            return
        level = logging.DEBUG if self._window.error is None else logging.WARNING
        _log.log(level, "a part of the window for version %d given up: %s",
                 self._window.target, reason)  # fmt: skip
        events.record_event(events.WINDOW_ABANDONED)
        self._given_up = reason
        self._window.give_up()

    def surface_failure(self) -> None:
        """Raises what went wrong in a window since the last call.

        Beside other processes it raises nothing: they would wait for this one. The window's save
        fails instead, on all of them.

        Raises:
          ReplayError: from the original error.
        """
        window = self._window
        if window is not None and window.error is not None and self._given_up is None:
            self._failure = window.error
            self._give_up(f"it failed: {self._failure!r}")
        if not self.processes.several:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            error = ReplayError(
                f"a window failed on the worker thread: {failure!r}. Earlier checkpoints are "
                "intact and training can go on; the next predicted save opens a new window."
            )
            error.__cause__ = failure
            surface(error, self._options.on_save_error)

    # Saving.

    def seal(
        self, arrays: Sequence[jax.Array]
    ) -> tuple[SaveRecord, list[list[ChunkSlot]], dict[str, Any] | None]:
        """Takes the state at the save step.

        Args:
          arrays: The arrays to be saved. Those that the last update returned, by identity, and that
            left early and were followed all the way, come from the window; all others are staged
            now.

        Returns:
          The save's record; for each array its slots; what the audit of those that left early has
          shown, complete once their slots are.

        Raises:
          HostBudgetError: if a snapshot cannot fit the host budget even alone.
          ReplayError: beside other processes, if this save's window has failed here.
        """
        state_bytes = sum(owned_bytes(a) for a in arrays)
        window, record = self._begin_save()
        self.planner.refuse_oversized(state_bytes)
        slots: dict[int, list[ChunkSlot]] = {}
        audit: dict[str, Any] | None = None
        if window is not None:
            new = window.program.new_state_leaves(window.step.last_result)
            wanted = {id(a) for a in arrays}
            early, audit = window.seal({j: a for j, a in enumerate(new) if id(a) in wanted})
            slots = {id(new[j]): found for j, found in early.items()}
            record.early_leaves += len(early)
        record.state_bytes += state_bytes
        record.early_bytes += sum(owned_bytes(a) for a in arrays if id(a) in slots)
        with events.span(events.SPAN_SEAL):
            # Of an array on other processes' devices alone there is nothing to take.
            slots.update((id(a), []) for a in arrays if not a.addressable_shards)
            late = [a for a in {id(a): a for a in arrays}.values() if id(a) not in slots]
            slots.update(take_now(late, self._worker, device=self._device, host=self.host))
        self._worker.submit(
            lambda: record.drained(
                peak_host_bytes=self.host.peak_bytes, peak_device_bytes=self._device.peak_bytes
            )
        )
        return record, [slots[id(a)] for a in arrays], audit

    def _begin_save(self) -> tuple[OpenWindow | None, SaveRecord]:
        """The window that is sealed now and the save's record; the same for all items of a save."""
        if self._saving is not None:
            return self._saving
        # Before anything that can fail here alone: these ask the other processes, now or later.
        self.planner.limit_device(stepped=self.version > 0)
        self.planner.save_ended()
        self._sealed_at = self.version
        window = self._sealing_window()
        if self.processes.several:
            self._raise_failure()
        if window is None:
            record = SaveRecord(kind="snapshot", reason=self._why_snapshot)
            self._reset_peaks()
        else:
            record = window.record
        record.sealed_at = time.perf_counter()
        self.planner.clock.pause()
        self._why_snapshot = _NOT_PREDICTED
        self._saving = (window, record)
        return self._saving

    def end_save(self) -> None:
        """All items have been sealed; what the save did not ask for is forgotten."""
        if self._saving is None:
            return
        window, record = self._saving
        self._saving = None
        if window is None:
            return
        window.drop()
        if not record.early_leaves:
            record.nothing_left_early()

    def _reset_peaks(self) -> None:
        self._device.reset_peak()
        self.host.reset_peak()

    def _sealing_window(self) -> OpenWindow | None:
        """The open window, if this is the version it was opened for and it is sound."""
        window = self._window
        if window is None:
            return None
        is_due = window.target == self.version
        if is_due and window.error is None and self._given_up is None:
            self._window = None
            return window
        if window.error is not None:
            self.abandon(f"it failed: {window.error!r}")
            if is_due or not self.processes.several:
                # Surfaces at the next call, and this save is a snapshot; beside others it fails.
                self._failure = window.error
        elif self._given_up is not None:
            self.abandon(self._given_up)
        else:
            self.abandon(f"the save came {window.target - self.version} steps early")
        return None

    # For the face.

    @property
    def window_steps(self) -> int:
        """K of the next window as far as it is known; 1 if there is none to be had."""
        program = None if self._last_step is None else self._last_step.program
        return 1 if program is None else self.planner.steps_of(program)

    @property
    def window_status(self) -> str:
        """What the window is doing, in a few words."""
        return "idle" if self._window is None else self._window.status(self.version)

    def explain(self) -> str:
        """What leaves early, what is retained, what is late and why."""
        step = self._last_step
        if step is None:
            return "no wrapped step has run yet"
        if step.program is None:
            return f"snapshots only: {step.why_not or 'the step has not been traced yet'}"
        return step.program.explain()

    def close(self) -> None:
        """Drops the open window and ends the worker thread."""
        if self._window is not None:
            error = self._window.error
            self.abandon("the manager was closed" if error is None else f"it failed: {error!r}")
        self._worker.close()
